"""Acts in words."""

import random

import pytest

from envs.multiwoz.acts import NONE
from envs.multiwoz.environment import Simulator
from envs.multiwoz.rollout import dialog_of, play
from envs.multiwoz.rule_policy import RulePolicy
from envs.multiwoz.templates import NO_BOOKING, PLACEHOLDER, Speaker
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError

TEMPLATES = {
    "Hotel-Inform": {
        "Area": ["it is in the #HOTEL-INFORM-AREA# ."],
        "Name": ["There is #HOTEL-INFORM-NAME#"],
    },
    "Hotel-Request": {"Area": ["which area ?"]},
    "general-bye": {"none": ["bye"]},
}


def say(*acts, side="system", groups=None, seed=0):
    return Speaker(TEMPLATES, side=side, groups=groups).say(acts, random.Random(seed))


def test_one_sentence_per_act_in_a_fixed_order():
    acts = [
        ("Request", "Hotel", "Area", "?"),
        ("Inform", "Hotel", "Area", "east"),
        ("Inform", "Hotel", "Name", "one"),
        ("NoOffer", "Hotel", "Stars", "5"),
        ("bye", "general", NONE, NONE),
    ]
    assert say(*acts) == "Bye. There is none with the stars 5. There is one. It is in the east. Which area?"
    assert say() == ""


def test_everything_can_be_said():
    assert say(("Inform", "Hotel", "Post", "cb11aa")) == "The postcode is cb11aa."
    assert say(("Request", "Hotel", "Post", "?")) == "What is the postcode of the hotel?"
    assert say(("Inform", "Hotel", "Area", "dontcare"), side="user") == "I do not care about the area."
    assert say(("Inform", "Hotel", "Parking", "no")) == "There is no parking."
    assert say(("Inform", "Hotel", "Parking", "no"), side="user") == "I do not need parking."
    assert (
        say(("Inform", "Hotel", "Price", "in the same price range as the inn"), side="user")
        == "It should be in the same price range as the inn."
    )
    assert (
        say(("Inform", "Hotel", "Area", "same area as the inn"), side="user")
        == "It is in the same area as the inn."
    )
    assert say(("Inform", "Hotel", "Area", NONE)) == "I do not know the area."
    assert say(("reqmore", "general", NONE, NONE)) == "Is there anything else?"
    assert say(("Book", "Booking", NONE, NONE)) == "It is booked."
    assert {
        say(("Inform", "Restaurant", "NotBook", NONE), side="user", seed=seed) for seed in range(20)
    } == set(NO_BOOKING)


def test_choices_are_offered_together():
    acts = [("Select", "Hotel", "Area", area) for area in ("east", "west", "north")]
    assert say(*acts) == "Do you prefer east, west or north as the area?"
    assert say(*acts[:1]) == "Do you prefer east as the area?"
    assert say(("Select", "Hotel", NONE, NONE)) == "Which hotel do you prefer?"


def test_templates_for_whole_groups_come_first():
    groups = {
        "Hotel-Inform": {
            "Area;Name;Name;": ["#HOTEL-INFORM-NAME# and #HOTEL-INFORM-NAME# are in the #HOTEL-INFORM-AREA#"]
        }
    }
    acts = [
        ("Inform", "Hotel", "Name", "one"),
        ("Inform", "Hotel", "Name", "two"),
        ("Inform", "Hotel", "Area", "east"),
    ]
    assert say(*acts, groups=groups) == "One and two are in the east."
    assert say(*acts[:2], groups=groups) == "There is one. There is two."


def test_a_side_must_be_named():
    with pytest.raises(UserError, match="expected side user or system, got 'bot'"):
        Speaker(TEMPLATES, side="bot")


@pytest.mark.realdata
def test_published_templates_for_groups(multiwoz):
    """Whole turns are worded at once where the corpus has such a turn; no placeholder stays."""
    simulator = Simulator(multiwoz)
    words = {mode: {} for mode in ("manual", "auto_manual")}
    for played in play(
        simulator, RulePolicy(multiwoz.database, simulator.options).respond, seed=1, episodes=40
    ):
        for side, acts in played.turns:
            for mode in words:
                groups = multiwoz.group_templates[side] if mode == "auto_manual" else None
                words[mode][played.episode, side, acts] = Speaker(
                    multiwoz.templates[side], side=side, groups=groups
                ).say(acts, random.Random(0))
    assert all(text and not PLACEHOLDER.search(text) for texts in words.values() for text in texts.values())
    changed = sum(words["manual"][turn] != text for turn, text in words["auto_manual"].items())
    assert 0.3 < changed / len(words["manual"]) < 0.95


@pytest.mark.parametrize("world", ["town", pytest.param("multiwoz", marks=pytest.mark.realdata)])
def test_conversations_become_dialogs(world, request):
    world = request.getfixturevalue(world)
    simulator = Simulator(world)
    speakers = {side: Speaker(world.templates[side], side=side) for side in ("user", "system")}
    for played in play(simulator, RulePolicy(world.database, simulator.options).respond, seed=1, episodes=40):
        dialog = dialog_of(played, speakers)
        assert [message["role"] for message in dialog.messages] == [
            "user",
            "assistant",
        ] * played.outcome.turns + ["user"]
        assert sum(message["reward"] for message in dialog.messages[1::2]) == played.outcome.total
        for message in dialog.messages:
            assert message["content"] and not PLACEHOLDER.search(message["content"]), message
            for _, _, slot, value in message["acts"]:
                special = value in ("?", NONE, "dontcare", "no", "yes", "any") or slot == "Open"
                assert special or value.lower() in message["content"].lower(), message
        assert Dialog.from_json(dialog.to_json()) == dialog
    assert dialog_of(played).messages[0]["content"].split("; ")[0].count("-") >= 3
