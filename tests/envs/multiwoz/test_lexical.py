"""Placeholders and what comes in their place."""

import random

import pytest

from envs.multiwoz.acts import ACT_SLOT, NONE
from envs.multiwoz.database import reference
from envs.multiwoz.lexical import delexicalised, lexicalised, note
from envs.multiwoz.options import Options
from envs.multiwoz.tracker import Tracker
from envs.multiwoz.values import Values


@pytest.fixture
def known(hotels):
    """A tracker to whom a user said: hotel, 4 stars, 3 people."""
    tracker = Tracker(hotels, Values({}), Options())
    state = tracker.start()
    tracker.user_said(state, (("Inform", "Hotel", "Stars", "4"), ("Inform", "Hotel", "People", "3")))
    return state


def words(reply, state, hotels):
    return lexicalised(reply, state, hotels, random.Random(0))


def test_values_come_from_the_rows_that_fit(known, hotels):
    table = hotels["hotel"]
    names = [row["name"] for i, row in enumerate(table.rows) if known.rows["hotel"] >> i & 1]
    text, booked = words(
        "[hotel_name] or [HOTEL_NAME_2], [hotel_choice] in all, in the [hotel_area]", known, hotels
    )
    first = next(row for row in table.rows if row["name"] == names[0])
    assert text == f"{names[0]} or {names[1]}, {len(names)} in all, in the {first['area']}" and booked == ()


def test_bookings_are_reported(known, hotels):
    row = known.rows["hotel"]
    first = reference((row & -row).bit_length() - 1)
    assert words("Booked for [booking_people]: [booking_ref].", known, hotels) == (
        f"Booked for 3: {first}.",
        (("Book", "Booking", "Ref", first),),
    )
    assert words("[hotel_ref]", known, hotels)[1] == (("Book", "Hotel", "Ref", first),)


def test_what_nobody_said_is_unknown(known, hotels):
    known.rows["hotel"] = 1
    assert words("[booking_day] [hotel_name_2] [taxi_dest]", known, hotels)[0] == "unknown unknown unknown"
    known.rows["hotel"] = 0
    assert words("None with [hotel_stars] stars; [hotel_choice]", known, hotels)[0] == "None with 4 stars; 0"
    assert words("[booking_ref]", known, hotels) == ("unknown", ())


def test_a_reply_has_one_taxi(known, hotels):
    text, _ = words("[taxi_car] [taxi_phone] [taxi_car]", known, hotels)
    car, phone, again = text.split()
    assert car == again in hotels.taxi_types and len(phone) == 11


def test_other_brackets_stay(known, hotels):
    for text in ("[sic]", "[hotel]", "[hotel_wings]", "[]", "[hotel_name_x]"):
        assert words(text, known, hotels) == (text, ())


def test_acts_without_values():
    acts = [
        ("Inform", "Hotel", "Name", "a"),
        ("Inform", "Hotel", "Name", "b"),
        ("Request", "Hotel", "Area", "?"),
        ("Book", "Booking", "Ref", "00000001"),
    ]
    acts += [("reqmore", "general", NONE, NONE), ("NoOffer", "Hotel", NONE, NONE)]
    assert [act[3] for act in delexicalised(acts)] == [
        "[hotel_name]",
        "[hotel_name_2]",
        "?",
        "[booking_ref]",
        NONE,
        NONE,
    ]


def test_every_slot_has_a_placeholder(known, hotels):
    for domain, slots in ACT_SLOT.items():
        for slot in slots.values():
            ((*_, value),) = delexicalised([("Inform", domain, slot, "x")])
            assert "[" not in words(value, known, hotels)[0], value


def test_the_note(known, hotels):
    count = known.rows["hotel"].bit_count()
    assert note(known, hotels) == f"hotel: {count} fit; Stars 4; People 3"
    known.rows["hotel"], known.booked["hotel"] = 1, "00000000"
    assert note(known, hotels) == "hotel: one fits; Stars 4; People 3; booked 00000000"
    known.rows["hotel"] = 0
    assert note(known, hotels).startswith("hotel: none fits;")
    known.domain = "taxi"
    assert note(known, hotels) == "taxi: "
    known.domain = ""
    assert note(known, hotels) == "nothing asked yet"
