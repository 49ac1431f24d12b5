"""The agenda user: golden traces and every rule by itself."""

import random

import pytest

from envs.multiwoz.goals import copied
from envs.multiwoz.options import Options
from envs.multiwoz.user import AgendaUser, complete
from envs.multiwoz.values import Values

BYE = {("bye", "general", "none", "none")}


class Talk:
    """A user to talk to by acts; without co-reference unless asked for."""

    def __init__(self, goal, *, seed=0, **options):
        self.rule = AgendaUser(Values({}), Options(**{"coref_prob": 0.0} | options))
        self.user = self.rule.start(copied(goal), random.Random(seed))
        self.opening = self.rule.respond(self.user, ())

    def hear(self, *acts):
        """What the user answers, as a set of (slot, value) where all acts are of one intent and domain, else
        of acts."""
        return set(self.rule.respond(self.user, acts))

    @property
    def goal(self):
        return self.user.goal


def inform(domain, **slots):
    return {("Inform", domain, slot, value) for slot, value in slots.items()}


def request(domain, *slots):
    return {("Request", domain, slot, "?") for slot in slots}


BOOKED = {"people": "3", "day": "monday", "stay": "2"}
HOTEL = {
    "hotel": {
        "info": {"area": "east", "stars": "4"},
        "reqt": {"postcode": "?", "phone": "?"},
        "book": BOOKED,
        "booked": "?",
    }
}
WELSH = {"restaurant": {"info": {"food": "indian"}, "fail_info": {"food": "welsh"}, "reqt": {"phone": "?"}}}
KETTLES = {
    "attraction": {"info": {"name": "kettles yard"}, "reqt": {"phone": "?"}},
    "taxi": {"info": {"leaveAt": "10:00"}, "reqt": {"car type": "?", "phone": "?"}},
}


# --- golden traces


def test_a_hotel_with_questions_and_a_booking():
    talk = Talk(HOTEL)
    assert set(talk.opening) == inform("Hotel", none="none", Stars="4", Area="east")
    assert talk.hear(("Request", "Hotel", "Price", "?")) == inform("Hotel", Price="dontcare")
    assert talk.hear(("Inform", "Hotel", "Name", "one"), ("Inform", "Hotel", "Choice", "3")) == request(
        "Hotel", "Phone", "Post"
    )
    answer = talk.hear(("Inform", "Hotel", "Post", "cb11aa"), ("Inform", "Hotel", "Phone", "01223111111"))
    assert answer == inform("Hotel", Stay="2", Day="monday", People="3")
    wrong = ("Book", "Booking", "Stay", "5"), ("Book", "Booking", "Ref", "00000000")
    assert talk.hear(*wrong) == inform("Hotel", Stay="2") and talk.goal["hotel"]["booked"] == "?"
    assert talk.hear(("Book", "Booking", "Ref", "00000000")) == BYE
    assert talk.user.done and complete(talk.goal)


def test_a_second_wish_after_the_first_failed_and_none_after_that():
    talk = Talk(WELSH)
    assert set(talk.opening) == inform("Restaurant", none="none", Food="welsh")
    assert talk.hear(("NoOffer", "Restaurant", "Food", "welsh")) == inform("Restaurant", Food="indian")
    assert "fail_info" not in talk.goal["restaurant"]
    assert talk.hear(("NoOffer", "Restaurant", "none", "none")) == BYE
    assert talk.user.done and not complete(talk.goal)


def test_a_taxi_goes_to_the_place_by_its_name():
    talk = Talk(KETTLES)
    assert talk.hear(("Inform", "Attraction", "Phone", "01223111111")) == inform(
        "Taxi", none="none", Leave="10:00"
    )
    assert talk.hear(("Request", "Taxi", "Dest", "?")) == inform("Taxi", Dest="kettles yard")
    assert talk.hear(("Request", "Taxi", "Depart", "?")) == inform(
        "Taxi", Depart="dontcare"
    )  # there is no place before that


def test_corrections_and_refused_bookings():
    talk = Talk(HOTEL)
    assert talk.hear(("Inform", "Hotel", "Area", "north")) == inform("Hotel", Area="east")
    assert talk.hear(("NoBook", "Booking", "none", "none")) == BYE
    assert not complete(talk.goal)


# --- the opening


def test_the_opening_introduces_the_first_domain_and_three_constraints():
    goal = {
        "train": {
            "info": {"day": "monday", "departure": "a", "destination": "b", "leaveAt": "10:00"},
            "reqt": {"price": "?"},
        },
        "hotel": {"info": {"area": "east"}, "reqt": {"phone": "?"}},
    }
    openings = {Talk(goal, seed=seed).opening for seed in range(30)}
    assert len(openings) > 10  # the order is random
    for opening in openings:
        assert opening[0] == ("Inform", "Train", "none", "none") and len(opening) == 4
        assert {act[1] for act in opening} == {"Train"}
    assert len(Talk(goal, max_initiative=2).opening) == 2


def test_the_rest_of_a_long_opening_comes_before_questions():
    goal = {
        "train": {
            "info": {"day": "monday", "departure": "a", "destination": "b", "leaveAt": "10:00"},
            "reqt": {"price": "?"},
        }
    }
    said = {"Day": "monday", "Depart": "a", "Dest": "b", "Leave": "10:00"}
    for seed in range(10):
        talk = Talk(goal, seed=seed)
        left = inform("Train", **said) - set(talk.opening)
        assert len(left) == 1 and talk.hear(("reqmore", "general", "none", "none")) == left
        assert talk.hear(("reqmore", "general", "none", "none")) == request("Train", "Ticket")


# --- the system informs


def test_answers_wait_until_the_constraints_are_said():
    goal = {
        "hotel": {
            "info": dict.fromkeys(("area", "stars", "internet", "parking"), "x"),
            "reqt": {"phone": "?"},
        }
    }
    talk = Talk(goal)
    talk.hear(("Inform", "Hotel", "Phone", "01223111111"))
    assert talk.goal["hotel"]["reqt"] == {"phone": "?"}  # one constraint was still to be said
    talk.hear(("Inform", "Hotel", "Phone", "01223111111"))
    assert talk.goal["hotel"]["reqt"] == {"phone": "01223111111"}


def test_a_later_answer_replaces_an_earlier_one():
    talk = Talk(HOTEL)
    for phone in ("01223111111", "01223222222"):
        talk.hear(("Inform", "Hotel", "Phone", phone))
        assert talk.goal["hotel"]["reqt"]["phone"] == phone


@pytest.mark.parametrize("answer", ["?", "dontcare", "none", "no"])
def test_unsure_answers_count_as_answers_in_quotes(answer):
    talk = Talk({"hotel": {"info": {"area": "east"}, "reqt": {"type": "?"}}})
    assert talk.hear(("Inform", "Hotel", "Type", answer)) == BYE
    assert talk.goal["hotel"]["reqt"]["type"] == f'"{answer}"' and complete(talk.goal)


@pytest.mark.parametrize(
    ("slot", "goal_slot", "fine", "wrong"),
    [("Arrive", "arriveBy", "09:59", "10:01"), ("Leave", "leaveAt", "10:01", "09:59")],
)
def test_times_are_bounds(slot, goal_slot, fine, wrong):
    goal = {"train": {"info": {goal_slot: "10:00"}, "reqt": {"price": "?"}}}
    assert Talk(goal).hear(("Inform", "Train", slot, fine)) == request("Train", "Ticket")
    assert (
        Talk(goal).hear(("Inform", "Train", slot, wrong)) >= inform("Train", **{slot: "10:00"})
        or wrong == fine
    )


def test_the_first_wish_is_defended_while_it_lasts():
    talk = Talk(WELSH)
    assert inform("Restaurant", Food="welsh") <= talk.hear(("Inform", "Restaurant", "Food", "indian"))


def test_a_number_of_choices_is_answered_unless_a_name_follows():
    talk = Talk({"hotel": {"info": {"area": "east"}, "book": BOOKED, "booked": "?"}})
    assert ("Inform", "Hotel", "Choice", "any") in talk.hear(("Inform", "Hotel", "Choice", "3"))
    assert ("Inform", "Hotel", "Choice", "any") not in talk.hear(
        ("Inform", "Hotel", "Choice", "3"), ("Recommend", "Hotel", "Name", "one")
    )
    assert ("Inform", "Hotel", "Choice", "any") not in talk.hear(("Inform", "Hotel", "Choice", "1"))


@pytest.mark.parametrize("none_left", ["0", "zero"])
def test_no_choice_is_no_offer(none_left):
    assert Talk(WELSH).hear(("Inform", "Restaurant", "Choice", none_left)) == inform(
        "Restaurant", Food="indian"
    )


def test_what_the_user_does_not_know_is_not_heard():
    talk = Talk(HOTEL)
    assert talk.hear(("Inform", "Hotel", "Stay", "5")) == request(
        "Hotel", "Phone", "Post"
    )  # stays come as Booking only
    assert talk.hear(
        ("Inform", "Restaurant", "Area", "north"), ("bye", "general", "none", "none")
    ) == request("Hotel", "Phone", "Post")


def test_booking_acts_are_about_the_domain_of_the_moment():
    talk = Talk({"hotel": {"info": {"area": "east"}, "book": BOOKED, "booked": "?"}})
    assert talk.hear(("Inform", "Booking", "Day", "friday")) == inform("Hotel", Day="monday")
    unbooked = Talk({"hotel": {"info": {"area": "east"}, "reqt": {"phone": "?"}}})
    assert ("Inform", "Hotel", "NotBook", "none") in unbooked.hear(("Inform", "Booking", "none", "none"))


def test_offers_of_a_booking_nobody_wants():
    goal = {"train": {"info": {"day": "monday"}, "reqt": {"price": "?"}}}
    assert Talk(goal).hear(("OfferBook", "Train", "none", "none")) == request("Train", "Ticket")
    assert ("Inform", "Train", "NotBook", "none") in Talk(goal, not_book_after_offer=True).hear(
        ("OfferBook", "Train", "none", "none")
    )


def test_a_train_is_booked_by_its_own_act_too():
    goal = {"train": {"info": {"day": "monday"}, "book": {"people": "2"}, "booked": "?"}}
    talk = Talk(goal)
    assert talk.hear(("OfferBook", "Train", "none", "none")) == inform("Train", People="2")
    assert talk.hear(("OfferBooked", "Train", "Ref", "00000000")) == BYE and complete(talk.goal)


# --- the system asks, refuses, offers


def test_questions_are_answered_from_the_goal():
    talk = Talk(HOTEL)
    assert talk.hear(("Request", "Hotel", "Area", "?")) == inform("Hotel", Area="east")
    assert talk.hear(("Request", "Hotel", "Phone", "?")) == request(
        "Hotel", "Phone", "Post"
    )  # nobody asks the asker
    talk = Talk(HOTEL)
    assert talk.hear(("Request", "Booking", "People", "?")) == request(
        "Hotel", "Phone", "Post"
    )  # questions come before bookings,
    assert talk.hear(
        ("Inform", "Hotel", "Phone", "01223111111"), ("Inform", "Hotel", "Post", "cb11aa")
    ) == inform("Hotel", People="3")  # which wait


def test_a_taxi_from_and_to_places_without_names():
    goal = {
        "hotel": {"info": {"area": "east"}, "reqt": {"phone": "1"}},
        "restaurant": {"info": {"area": "east"}, "reqt": {"phone": "2"}},
        "taxi": {"info": {"leaveAt": "10:00"}, "reqt": {"phone": "?"}},
    }
    talk = Talk(goal)
    assert talk.hear(("Request", "Taxi", "Dest", "?"), ("Request", "Taxi", "Depart", "?")) == inform(
        "Taxi", Dest="the restaurant", Depart="the hotel"
    )


def test_refusals_without_a_second_wish():
    assert (
        Talk({"hotel": {"info": {"area": "east"}, "reqt": {"phone": "?"}}}).hear(
            ("NoOffer", "Hotel", "none", "none")
        )
        == BYE
    )
    only_booking = {"hotel": {"info": {"area": "east"}, "book": BOOKED, "booked": "?"}}
    assert Talk(only_booking).hear(("NoOffer", "Hotel", "none", "none")) == inform(
        "Hotel", Stay="2", Day="monday", People="3"
    )
    assert Talk(only_booking).hear(("NoBook", "Booking", "none", "none")) == BYE


def test_a_second_wish_for_a_booking():
    goal = {
        "hotel": {
            "info": {"area": "east"},
            "fail_book": BOOKED | {"day": "friday"},
            "book": BOOKED,
            "booked": "?",
        }
    }
    talk = Talk(goal)
    assert talk.hear(("reqmore", "general", "none", "none")) == inform(
        "Hotel", Stay="2", Day="friday", People="3"
    )
    assert talk.hear(("NoBook", "Booking", "none", "none")) == inform("Hotel", Day="monday")


def test_select_takes_the_goal_or_any_offer():
    talk = Talk(HOTEL)
    assert talk.hear(("Select", "Hotel", "Area", "west"), ("Select", "Hotel", "Area", "north")) == inform(
        "Hotel", Area="east"
    )
    chosen = set()
    for seed in range(20):
        talk = Talk({"hotel": {"info": {"area": "east"}, "reqt": {"type": "?"}}}, seed=seed)
        talk.hear(("Select", "Hotel", "Type", "hotel"), ("Select", "Hotel", "Type", "guesthouse"))
        chosen.add(talk.goal["hotel"]["reqt"]["type"])
    assert chosen == {"hotel", "guesthouse"}


# --- the end


def test_twenty_system_turns_are_the_most():
    talk = Talk(HOTEL)
    answers = [talk.hear() for _ in range(20)]
    assert answers[-1] == BYE and talk.user.done
    assert BYE not in answers[:-1] and all(answers)


# --- co-reference

BOTH = {
    "restaurant": {"info": {"area": "east", "pricerange": "cheap"}, "reqt": {"phone": "?"}},
    "hotel": {"info": {"area": "east", "pricerange": "cheap", "stars": "4"}, "reqt": {"phone": "?"}},
}


def test_later_domains_refer_to_earlier_ones():
    talk = Talk(BOTH, coref_prob=1.0)
    assert set(talk.opening) == inform("Restaurant", none="none", Area="east", Price="cheap")
    said = talk.hear(("Inform", "Restaurant", "Phone", "01223111111"))
    same = {"Area": "same area as the restaurant", "Price": "in the same price range as the restaurant"}
    assert said == inform("Hotel", none="none", Stars="4", **same)
    days = {
        "restaurant": {
            "info": {"area": "east"},
            "book": {"time": "10:00", "day": "monday", "people": "2"},
            "booked": "?",
        }
    }
    days["train"] = {"info": {"day": "monday", "leaveAt": "10:00"}, "reqt": {"price": "?"}}
    talk = Talk(days, coref_prob=1.0)
    talk.hear(
        ("reqmore", "general", "none", "none")
    )  # the table's day is said, and the train's becomes the same
    assert inform("Train", Day="the same day") <= talk.hear(("Book", "Booking", "Ref", "00000000"))


def test_the_odds_of_a_reference():
    hits = 0
    for seed in range(1000):
        talk = Talk(BOTH, seed=seed, coref_prob=0.3)
        hits += ("Inform", "Hotel", "Area", "same area as the restaurant") in talk.hear(
            ("Inform", "Restaurant", "Phone", "01223111111")
        )
    assert 0.3 - 0.045 < hits / 1000 < 0.3 + 0.045  # three standard deviations
