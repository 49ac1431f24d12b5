"""Vectors: the published layout, what bits say, and which bits make sense."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from envs.multiwoz.acts import Vocabulary
from envs.multiwoz.database import Database
from envs.multiwoz.options import ORIGINAL, Options
from envs.multiwoz.tracker import Tracker
from envs.multiwoz.values import Values
from envs.multiwoz.vectors import Vectoriser
from rl_dialog.errors import UserError

USER = ["Hotel-Inform-Area-1", "Hotel-Inform-Stay-1", "general-bye-none-none"]
SYSTEM = [
    "Booking-Book-Ref-1",
    "Booking-Inform-Day-1",
    "Booking-NoBook-Day-1",
    "Booking-NoBook-none-none",
    "Hotel-Inform-Choice-1",
    "Hotel-Inform-Name-1",
    "Hotel-Inform-Name-2",
    "Hotel-Inform-Phone-1",
    "Hotel-NoOffer-Area-1",
    "Hotel-NoOffer-none-none",
    "Hotel-Request-Area-?",
    "Taxi-Inform-Car-1",
    "Taxi-Inform-Leave-1",
    "general-reqmore-none-none",
]
HOTELS = [
    {"name": "one", "area": "east", "phone": "1"},
    {"name": "two", "area": "east"},
    {"name": "three", "area": "west", "phone": "3"},
]


class Small:
    """Three hotels, two attractions, seven restaurants and three trains, and a state that the user's acts
    lead to."""

    def __init__(self, *turns, **options):
        tables = {"attraction": [{}] * 2, "restaurant": [{}] * 7, "train": [{}] * 3, "hotel": HOTELS}
        database, rule = Database(tables, taxi_types=["saloon"]), Options(**options)
        self.vectors = Vectoriser(database, Vocabulary(USER), Vocabulary(SYSTEM), rule)
        self.tracker = Tracker(database, Values({}), rule)
        self.state = self.tracker.start()
        for acts in turns:
            self.tracker.user_said(self.state, tuple(acts))

    def says(self, *names):
        bits = np.zeros(len(SYSTEM), np.int8)
        bits[[SYSTEM.index(name) for name in names]] = 1
        return self.vectors.acts(bits, self.state, random.Random(0))

    def allowed(self):
        return {name for name, bit in zip(SYSTEM, self.vectors.mask(self.state), strict=True) if bit}


EAST = [("Inform", "Hotel", "Area", "east")]
NORTH = [("Inform", "Hotel", "Area", "north")]


def test_the_state_bit_by_bit():
    """3 user bits, 14 system bits, 24 constraints, 4 bookings, 4 x 6 degrees, 1 end: worked out by hand."""
    small = Small(EAST)
    assert small.vectors.state_size == 3 + 14 + 24 + 4 + 24 + 1
    small.tracker.system_said(
        small.state, (("Inform", "Hotel", "Choice", "2"), ("Book", "Booking", "Ref", "00000000"))
    )
    small.tracker.user_said(
        small.state, (("bye", "general", "none", "none"), ("Inform", "Hotel", "Stay", "2"))
    )
    start = 3 + 14
    hotel_area = start + 3 + 4 + 5 + 1  # after attraction, restaurant, train and the hotel's name
    booked = start + 24 + 3  # attraction, restaurant, train, hotel
    degrees = start + 24 + 4
    rows = [
        degrees + 2,
        degrees + 6 + 5,
        degrees + 12 + 2,
        degrees + 18 + 2,
    ]  # 2 attractions, 7 restaurants, 3 trains (bin "up to 5"), 2 hotels
    on = [1, 2, 3 + 4, 3 + 0, hotel_area, booked, *rows, degrees + 24]
    assert np.flatnonzero(small.vectors.states([small.state])[0]).tolist() == sorted(on)
    same = Small(train_degree_bins="original")
    assert (
        np.flatnonzero(same.vectors.states([same.state])[0])[2] - degrees - 12 == 3
    )  # three trains, in the bin of three


def test_a_batch_is_its_rows_and_the_buffer_is_overwritten():
    small, other = Small(EAST), Small(NORTH)
    buffer = np.ones((2, small.vectors.state_size), np.float32)
    batch = small.vectors.states([small.state, other.state], buffer)
    assert batch is buffer and batch.dtype == np.float32
    assert (batch[0] == small.vectors.states([small.state])[0]).all() and (
        batch[1] == other.vectors.states([other.state])[0]
    ).all()


def test_tokens_point_at_rows():
    small = Small(EAST)
    assert small.says("Hotel-Inform-Choice-1", "Hotel-Inform-Name-2", "Hotel-Inform-Phone-1") == (
        ("Inform", "Hotel", "Choice", "2"),
        ("Inform", "Hotel", "Name", "two"),
        ("Inform", "Hotel", "Phone", "1"),
    )
    assert (
        Small(NORTH).says("Hotel-Inform-Name-1", "Hotel-Inform-Choice-1")
        == (("Inform", "Hotel", "Choice", "0"), ("Inform", "Hotel", "Name", "none"))[::1]
    )
    assert Small(NORTH).says("Hotel-NoOffer-Area-1", "Hotel-NoOffer-none-none") == (
        ("NoOffer", "Hotel", "Area", "north"),
        ("NoOffer", "Hotel", "none", "none"),
    )
    assert small.says("Hotel-Request-Area-?") == (("Request", "Hotel", "Area", "?"),)
    assert small.says() == (("reqmore", "general", "none", "none"),)


def test_booking_tokens_are_about_the_domain_of_the_moment():
    small = Small([("Inform", "Hotel", "Area", "west"), ("Inform", "Hotel", "Day", "monday")])
    assert small.says("Booking-Book-Ref-1", "Booking-Inform-Day-1", "Booking-NoBook-Day-1") == (
        ("Book", "Booking", "Ref", "00000002"),
        ("Inform", "Booking", "Day", "monday"),
        ("NoBook", "Booking", "Day", "monday"),
    )
    assert Small().says("Booking-Book-Ref-1") == (
        ("Book", "Booking", "Ref", "none"),
    )  # nothing was spoken of


def test_bits_and_acts_are_inverse_where_rows_are_there():
    small = Small(EAST)
    names = ["Hotel-Inform-Name-1", "Hotel-Inform-Name-2", "Hotel-Inform-Phone-1", "Hotel-Request-Area-?"]
    bits = small.vectors.bits(small.says(*names))
    assert [SYSTEM[i] for i in np.flatnonzero(bits)] == names


def test_masks():
    everything = set(SYSTEM)
    refusals = {
        "Booking-NoBook-Day-1",
        "Booking-NoBook-none-none",
        "Hotel-NoOffer-Area-1",
        "Hotel-NoOffer-none-none",
    }
    unknown = {"Booking-Inform-Day-1", "Taxi-Inform-Leave-1"}
    assert Small(EAST).allowed() == everything - refusals - unknown
    nothing_left = {
        "Hotel-Inform-Choice-1",
        "Hotel-Inform-Name-1",
        "Hotel-Inform-Name-2",
        "Hotel-Inform-Phone-1",
    }
    assert Small(NORTH).allowed() == everything - nothing_left - unknown - {
        "Booking-NoBook-Day-1",
        "Hotel-NoOffer-Area-1",
    }
    west = Small(
        [("Inform", "Hotel", "Area", "west"), ("Inform", "Hotel", "Day", "monday")],
        [("Inform", "Taxi", "Leave", "10:00")],
    )
    assert west.allowed() == everything - refusals - {"Hotel-Inform-Name-2", "Booking-Inform-Day-1"} | {
        "Booking-NoBook-none-none"
    }  # a taxi has no rows
    assert Small(NORTH, action_mask="none").allowed() == everything


def test_masks_are_remembered_and_safe():
    small = Small(EAST)
    mask = small.vectors.mask(small.state)
    assert mask is small.vectors.mask(small.state)
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = 1
    assert small.vectors.masks([small.state, small.state]).shape == (2, len(SYSTEM))


def test_actions_of_another_size_are_refused():
    small = Small()
    with pytest.raises(UserError, match=r"expected an action of shape \(14,\), got \(3,\)"):
        small.vectors.acts(np.zeros(3), small.state, random.Random(0))


@pytest.mark.realdata
def test_the_published_layout(multiwoz):
    def vector(options, *acts):
        vectors = Vectoriser(multiwoz.database, multiwoz.user_acts, multiwoz.system_acts, options)
        tracker = Tracker(multiwoz.database, multiwoz.values, options)
        state = tracker.start()
        tracker.user_said(state, acts)
        return SimpleNamespace(
            vectors=vectors,
            state=state,
            degrees=vectors.states([state])[0][-25:-1].reshape(4, 6).argmax(1).tolist(),
        )

    empty = vector(Options())
    assert (empty.vectors.state_size, empty.vectors.action_size) == (340, 209)
    assert empty.degrees == [5, 5, 5, 5]  # attraction, restaurant, train, hotel
    assert np.flatnonzero(empty.vectors.states([empty.state])[0]).tolist() == [
        315 + 5,
        315 + 11,
        315 + 17,
        315 + 23,
    ]
    assert vector(Options(), ("Inform", "Restaurant", "Food", "welsh")).degrees == [5, 0, 5, 5]
    trip = (
        ("Inform", "Train", slot, value)
        for slot, value in {
            "Depart": "cambridge",
            "Dest": "peterborough",
            "Day": "tuesday",
            "Arrive": "11:15",
        }.items()
    )
    trip = tuple(trip)
    assert vector(Options(), *trip).degrees == [5, 5, 4, 5] and vector(ORIGINAL, *trip).degrees == [
        5,
        5,
        5,
        5,
    ]  # eleven trains
    centre = vector(
        Options(), ("Inform", "Restaurant", "Food", "indian"), ("Inform", "Restaurant", "Area", "centre")
    )
    bits = np.zeros(209, np.int8)
    bits[multiwoz.system_acts.index["Restaurant-Inform-Choice-1"]] = 1
    assert centre.vectors.acts(bits, centre.state, random.Random(0)) == (
        ("Inform", "Restaurant", "Choice", "9"),
    )
    booking = np.zeros(209, np.int8)
    booking[multiwoz.system_acts.index["Booking-Book-Ref-1"]] = 1
    rows = [
        i
        for i, row in enumerate(multiwoz.database["restaurant"].rows)
        if row["food"] == "indian" and row["area"] == "centre"
    ]
    assert centre.vectors.acts(booking, centre.state, random.Random(0)) == (
        ("Book", "Booking", "Ref", f"{rows[0]:08d}"),
    )
