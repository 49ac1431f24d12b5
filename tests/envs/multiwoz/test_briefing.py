"""Goals in plain English."""

import random

import pytest

from envs.multiwoz.briefing import briefing
from envs.multiwoz.options import Options


def test_every_part_of_a_goal_is_told():
    goal = {
        "restaurant": {
            "info": {"food": "thai", "area": "east"},
            "fail_info": {"food": "welsh", "area": "east"},
            "reqt": {"phone": "?", "postcode": "?", "address": "?"},
        },
        "hotel": {
            "info": {"stars": "4", "internet": "yes", "parking": "no"},
            "book": {"people": "3", "stay": "2", "day": "monday"},
            "booked": "?",
        },
        "taxi": {"info": {"leaveAt": "10:00"}, "reqt": {"car type": "?"}},
    }
    assert briefing(goal).splitlines() == [
        (
            "You are looking for a restaurant. It should serve welsh food. The area should be east. If there "
            "is none: It should serve thai food. Ask for the phone number, postcode and address."
        ),
        (
            "You are looking for a hotel. It should have 4 stars. It should have internet. It should not have"
            " parking. Book it for 3 people, for 2 nights, from monday."
        ),
        (
            "You need a taxi. You do not want to leave before 10:00. It should bring you to the last place of"
            " this list. You come from the place before it. Ask for the car type."
        ),
    ]


def test_a_second_booking_and_bold_values():
    book = {"time": "12:00", "day": "monday", "people": "2"}
    goal = {
        "restaurant": {
            "info": {"name": "one"},
            "fail_book": book | {"time": "11:00"},
            "book": book,
            "booked": "?",
        }
    }
    told = (
        "You are looking for a restaurant. It is called <b>one</b>. Book it for <b>2</b> people, at "
        "<b>11:00</b>, on <b>monday</b>."
    )
    assert (
        briefing(goal, bold=True)
        == told + " If that fails: Book it for <b>2</b> people, at <b>12:00</b>, on <b>monday</b>."
    )


@pytest.mark.parametrize("world", ["town", pytest.param("multiwoz", marks=pytest.mark.realdata)])
def test_every_goal_can_be_told(world, request):
    world = request.getfixturevalue(world)
    for seed in range(300):
        goal = world.goals.sample(random.Random(seed), Options())
        lines = briefing(goal).splitlines()
        assert len(lines) == len(goal)
        for line, parts in zip(lines, goal.values(), strict=True):
            values = [
                value for part in ("info", "fail_info", "book") for value in parts.get(part, {}).values()
            ]
            assert all(value in line for value in values if value not in ("yes", "no"))
