"""Templates read backwards."""

import random

import pytest

from envs.multiwoz import RulePolicy, Simulator
from envs.multiwoz.acts import NONE
from envs.multiwoz.matcher import matchers
from envs.multiwoz.rollout import play
from envs.multiwoz.templates import Speaker


@pytest.fixture(scope="module")
def read(town):
    found = matchers(town)
    return lambda text, *context, side="user": set(found[side].understand(text, context))


@pytest.mark.parametrize("world", ["town", pytest.param("multiwoz", marks=pytest.mark.realdata)])
def test_what_is_said_is_understood(world, request):
    """Every user act of 100 dialogs is read as it was meant; of the system's, all but those that have the
    same sentence as another act."""
    world = request.getfixturevalue(world)
    simulator, readers, rng = Simulator(world), matchers(world), random.Random(0)
    speakers = {side: Speaker(world.templates[side], side=side) for side in readers}
    wrong, total = {"user": 0, "system": 0}, {"user": 0, "system": 0}
    for played in play(
        simulator, RulePolicy(world.database, simulator.options).respond, seed=0, episodes=100
    ):
        words = []
        for side, acts in played.turns:
            text = speakers[side].say(acts, rng)
            got = {heard(act) for act in readers[side].understand(text, words)}
            wanted = {heard(act) for act in acts}
            wrong[side] += len(wanted ^ got)
            total[side] += len(wanted)
            words.append(text)
    assert wrong["user"] <= 0.002 * total["user"] and wrong["system"] <= 0.03 * total["system"], (
        wrong,
        total,
    )


def heard(act):
    """An act as far as it matters to who hears it: the user takes offers and recommendations as
    information."""
    intent, domain, slot, value = act
    value = "unknown" if value == "?" and intent != "Request" else value
    return (
        "Inform" if intent in ("Recommend", "OfferBook") else intent,
        domain,
        slot,
        "".join(filter(str.isalnum, value.lower())),
    )


def test_the_domain_in_hand_decides(read):
    assert read(
        "The area should be east.", "I am looking for a hotel.", "What area do you have in mind?"
    ) == {("Inform", "Hotel", "Area", "east")}
    assert read("The area should be east.", "I am looking for an attraction.", "Hello.") == {
        ("Inform", "Attraction", "Area", "east")
    }
    both = read("Next I need a restaurant. The area should be east.", "I am looking for a hotel.", "Hello.")
    assert both == {("Inform", "Restaurant", NONE, NONE), ("Inform", "Restaurant", "Area", "east")}
    asked = read(
        "What departure time do you have in mind?", "I am looking for a train.", side="system"
    )  # taxis leave too
    assert asked == {("Request", "Train", "Leave", "?")}


def test_special_wordings(read):
    hotel = "I am looking for a hotel."
    assert read("I do not need parking.", hotel, "Hello.") == {("Inform", "Hotel", "Parking", "no")}
    assert read("I do not care about the stars.", hotel, "Hello.") == {
        ("Inform", "Hotel", "Stars", "dontcare")
    }
    same = "in the same price range as the restaurant"
    assert read(f"It should be {same}.", hotel, "Hello.") == {("Inform", "Hotel", "Price", same)}
    assert read("Any of them will do.", hotel, "Hello.") == {("Inform", "Hotel", "Choice", "any")}
    assert read("That is all, goodbye.") == {("bye", "general", NONE, NONE)}
    offered = read("Do you prefer east, west or north as the area?", hotel, side="system")
    assert offered == {("Select", "Hotel", "Area", area) for area in ("east", "west", "north")}


def test_what_is_no_template_means_nothing(read):
    assert read("") == read("   ") == read("colourless green ideas sleep furiously") == set()
    assert read("Blah blah. The area should be east. Foo?", "I am looking for a hotel.", "Hello.") == {
        ("Inform", "Hotel", "Area", "east")
    }
    assert read("the AREA should   be East.", "I am looking for a hotel.", "Hello.") == {
        ("Inform", "Hotel", "Area", "East")
    }
    assert read(
        "The area should be " + "very " * 2000 + "east.", "I am looking for a hotel.", "Hello."
    )  # long, and read in time
