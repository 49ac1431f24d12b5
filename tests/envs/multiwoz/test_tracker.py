"""The state tracker and the spelling of values."""

import pytest

from envs.multiwoz.database import Database
from envs.multiwoz.options import ORIGINAL, Options
from envs.multiwoz.tracker import SEMI, Tracker, belief_state
from envs.multiwoz.values import Values, edits

KNOWN = {
    "hotel": {"area": ["east", "west", "centre"], "name": ["the old inn", "king's arms - annexe"]},
    "train": {"leaveat": [], "destination": ["ely"]},
}
ROWS = [{"area": "east", "stars": "4"}, {"area": "west", "stars": "4"}]


def tracked(*turns, options=None):
    tracker = Tracker(
        Database({"hotel": ROWS, "train": []}, taxi_types=["x"]), Values(KNOWN), options or Options()
    )
    state = tracker.start()
    for side, acts in turns:
        (tracker.user_said if side == "user" else tracker.system_said)(state, tuple(acts))
    return state


def test_constraints_are_overwritten_and_counted():
    first = ("user", [("Inform", "Hotel", "Area", "east"), ("Inform", "Hotel", "Stars", "4")])
    state = tracked(first)
    assert state.semi == {"hotel": {"area": "east", "stars": "4"}} and state.rows["hotel"] == 0b01
    state = tracked(first, ("user", [("Inform", "Hotel", "Area", "West")]))
    assert state.semi == {"hotel": {"area": "west", "stars": "4"}} and state.rows["hotel"] == 0b10


def test_bookings_and_questions_have_their_own_place():
    state = tracked(
        (
            "user",
            [
                ("Inform", "Hotel", "Stay", "2"),
                ("Inform", "Hotel", "none", "none"),
                ("Inform", "Hotel", "Choice", "any"),
            ],
        ),
        (
            "user",
            [
                ("Inform", "Train", "Arrive", "19:45"),
                ("Inform", "Train", "Id", "TR1234"),
                ("Inform", "Train", "People", "the same"),
            ],
        ),
        ("user", [("Request", "Hotel", "Addr", "?")]),
    )
    assert state.book == {"hotel": {"stay": "2"}, "train": {"trainID": "TR1234", "people": "the same"}}
    assert state.semi == {"train": {"arriveBy": "19:45"}}
    assert state.requested == {"hotel": {"address"}} and state.domain == "hotel"


def test_what_the_original_never_notes():
    turns = [
        ("user", [("Inform", "Hotel", "Area", "east")]),
        ("system", [("Book", "Booking", "Ref", "00000000")]),
        ("user", [("bye", "general", "none", "none")]),
    ]
    state = tracked(*turns)
    assert state.booked == {"hotel": "00000000"} and state.terminated
    original = tracked(*turns, options=ORIGINAL)
    assert original.booked == {} and not original.terminated


def test_the_corpus_form_has_every_slot():
    belief = belief_state(
        tracked(
            ("user", [("Inform", "Hotel", "Area", "east")]),
            ("system", [("Book", "Booking", "Ref", "00000007")]),
        )
    )
    assert {domain: tuple(parts["semi"]) for domain, parts in belief.items()} == SEMI
    assert sum(map(len, SEMI.values())) == 24
    assert belief["hotel"]["semi"]["area"] == "east" and belief["hotel"]["book"] == {
        "booked": [{"reference": "00000007"}],
        "people": "",
        "day": "",
        "stay": "",
    }
    assert belief["train"]["book"] == {"booked": [], "people": ""}


@pytest.mark.parametrize(
    ("slot", "said", "noted"),
    [
        ("area", " EAST ", "east"),
        ("area", "center", "centre"),
        ("area", "dontcare", "dontcare"),
        ("area", "same area as the restaurant", "same area as the restaurant"),
        ("name", "old inn", "the old inn"),
        ("name", "king 's arms - annexe", "king's arms - annexe"),
        ("name", "king's arms - annexes", "king's arms - annexe"),  # one letter too many
        ("name", "queen's legs", "queen's legs"),
        ("leaveAt", "after 9:05 please", "09:05"),
        ("trainID", "the tr 1234 train", "tr1234"),
        ("price", "about 12.50 pound", "12.50 pounds"),
        ("duration", "17 minute", "17 minutes"),
    ],
)
def test_values_are_noted_in_one_spelling(slot, said, noted):
    domain = "train" if slot in ("leaveAt", "trainID", "price", "duration") else "hotel"
    assert Values(KNOWN).noted(domain, slot, said) == noted


@pytest.mark.parametrize(
    ("domain", "slot", "said", "heard"),
    [
        ("hotel", "area", "East", "east"),
        ("hotel", "name", "Old Inn", "the old inn"),
        ("hotel", "parking", "none", "yes"),
        ("hotel", "stars", "4", "4"),
        ("train", "leaveAt", "10:00", "10:00"),
    ],
)
def test_the_user_understands_values(domain, slot, said, heard):
    assert Values(KNOWN).heard(domain, slot, said) == heard


def test_edits():
    assert edits("kitten", "sitting", limit=3) == 3  # k -> s, e -> i, + g
    assert edits("kitten", "sitting", limit=2) == 3
    assert edits("abc", "abcdefgh", limit=2) == 3
    assert edits("same", "same", limit=0) == 0
