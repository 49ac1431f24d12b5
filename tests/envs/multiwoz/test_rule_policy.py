"""The rule system, turn by turn, on a table of three hotels, and its reported success in the published
world."""

import random

from envs.multiwoz.database import Database
from envs.multiwoz.options import Options
from envs.multiwoz.rule_policy import RulePolicy
from envs.multiwoz.tracker import Tracker
from envs.multiwoz.values import Values

HOTELS = [
    {
        "name": "one",
        "area": "east",
        "stars": "4",
        "phone": "1",
        "pricerange": "cheap",
        "internet": "yes",
        "parking": "no",
        "type": "hotel",
    },
    {
        "name": "two",
        "area": "east",
        "stars": "2",
        "phone": "2",
        "pricerange": "cheap",
        "internet": "yes",
        "parking": "no",
        "type": "hotel",
    },
    {
        "name": "three",
        "area": "west",
        "stars": "4",
        "pricerange": "cheap",
        "internet": "yes",
        "parking": "no",
        "type": "hotel",
    },
]
TRAIN = {
    "departure": "a",
    "destination": "b",
    "day": "monday",
    "leaveAt": "10:00",
    "arriveBy": "11:00",
    "trainID": "TR1",
    "price": "5 pounds",
}
DATABASE = Database(
    {"hotel": HOTELS, "train": [TRAIN], "police": [{"name": "p", "phone": "3"}]}, taxi_types=["saloon"]
)


def answers(*turns, count=200, **options):
    """All that the policy may say after the user's turns."""
    rule, tracker, policy = Options(**options), None, None
    tracker, policy = Tracker(DATABASE, Values({}), rule), RulePolicy(DATABASE, rule)
    state = tracker.start()
    for acts in turns:
        tracker.user_said(state, tuple(acts))
    return {policy.respond(state, random.Random(seed)) for seed in range(count)}


def inform(domain, **slots):
    return [("Inform", domain, slot, value) for slot, value in slots.items()]


def ask(domain, *slots):
    return [("Request", domain, slot, "?") for slot in slots]


def test_courtesy():
    bye, welcome = ("bye", "general", "none", "none"), ("welcome", "general", "none", "none")
    assert answers([bye]) == {(bye,), (bye, welcome)}
    assert answers([("thank", "general", "none", "none")]) == {(welcome,)}
    assert answers([("Inform", "Police", "none", "none")]) == {
        (("greet", "general", "none", "none"),)
    }  # nothing to say


def test_several_hotels_are_counted_and_one_is_recommended():
    for acts in answers(inform("Hotel", Area="east")):
        assert acts[0] == ("Inform", "Hotel", "Choice", "2")
        assert acts[1] in {("Recommend", "Hotel", "Name", "one"), ("Recommend", "Hotel", "Name", "two")}
        row = HOTELS[acts[1][3] == "two"]
        assert len(acts) <= 4 and all(act[0] == "Recommend" and act[3] in row.values() for act in acts[2:])


def test_a_single_hotel_is_described():
    said = answers(inform("Hotel", Area="east", Stars="4"))
    assert {len(acts) for acts in said} == set(range(1, 8))
    assert {act[3] for acts in said for act in acts} <= set(HOTELS[0].values())


def test_no_hotel_is_refused_with_the_constraints():
    assert answers(inform("Hotel", Area="north"), inform("Hotel", Stars="5")) == {
        (("NoOffer", "Hotel", "Area", "north"), ("NoOffer", "Hotel", "Stars", "5"))
    }
    assert answers(inform("Hotel", Area="north"), ask("Hotel", "Phone")) == {
        (("NoOffer", "Hotel", "Area", "north"),)
    }


def test_questions_are_answered_from_the_first_row():
    assert answers(inform("Hotel", Area="east"), ask("Hotel", "Phone", "Stars")) == {
        (("Inform", "Hotel", "Phone", "1"), ("Inform", "Hotel", "Stars", "4"))
    }
    assert answers(inform("Hotel", Area="west"), ask("Hotel", "Phone")) == {
        (("Inform", "Hotel", "Phone", "unknown"),)
    }


def test_booking_books_the_first_row_and_says_nothing_else():
    book, more = ("Book", "Booking", "Ref", "00000002"), ("reqmore", "general", "none", "none")
    for slots in ({"Stay": "2"}, {"Day": "monday"}, {"People": "3", "Area": "west"}):
        assert answers(inform("Hotel", Area="west"), inform("Hotel", **slots)) == {(book,), (book, more)}


def test_trains_need_a_day_two_places_and_a_time():
    assert answers(inform("Train", Day="monday", Leave="09:00")) == {tuple(ask("Train", "Dest", "Depart"))}
    timeless = answers(inform("Train", Day="monday", Depart="a", Dest="b"))
    assert timeless == {
        tuple(ask("Train", "Leave")),
        tuple(ask("Train", "Arrive")),
        tuple(ask("Train", "Leave", "Arrive")),
    }
    known = {"Depart": "a", "Dest": "b", "Day": "monday", "Leave": "09:00"}
    assert answers(inform("Train", **known)) == {
        tuple(("OfferBook", "Train", slot, value) for slot, value in known.items())
    }
    assert answers(inform("Train", **known), ask("Train", "Id", "Ticket")) == {
        (("Inform", "Train", "Id", "TR1"), ("Inform", "Train", "Ticket", "5 pounds"))
    }
    assert answers(inform("Train", **known | {"Day": "friday"})) == {
        tuple(("NoOffer", "Train", s, v) for s, v in (known | {"Day": "friday"}).items())
    }
    assert (("Book", "Booking", "Ref", "00000000"),) in answers(
        inform("Train", **known), inform("Train", People="2")
    )


def test_taxis_need_a_time_and_by_option_two_places():
    assert answers(inform("Taxi", Dest="x")) == {
        tuple(ask("Taxi", "Leave")),
        tuple(ask("Taxi", "Leave", "Arrive")),
    }
    for acts in answers(inform("Taxi", Leave="10:00")):
        assert [act[:3] for act in acts] == [("Inform", "Taxi", "Car"), ("Inform", "Taxi", "Phone")]
    assert answers(inform("Taxi", Leave="10:00", Dest="x"), taxi_places=True) == {
        tuple(ask("Taxi", "Depart"))
    }
