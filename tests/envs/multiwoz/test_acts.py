"""The codec of acts and the vocabularies."""

import json
import pickle
import zipfile
from pathlib import Path

import pytest

from envs.multiwoz.acts import ActError, Vocabulary, acts_of, checked, from_corpus, tokens

TURN = [
    ("Inform", "Hotel", "Name", "a"),
    ("Inform", "Hotel", "Name", "b"),
    ("Request", "Hotel", "Area", "?"),
    ("bye", "general", "none", "none"),
]


def test_tokens_count_within_domain_intent_and_slot():
    assert tokens(TURN) == [
        "Hotel-Inform-Name-1",
        "Hotel-Inform-Name-2",
        "Hotel-Request-Area-?",
        "general-bye-none-none",
    ]
    assert tokens([("Inform", "Hotel", "none", "none"), ("Recommend", "Hotel", "Name", "a")]) == [
        "Hotel-Inform-none-none",
        "Hotel-Recommend-Name-1",
    ]


def test_the_corpus_form_is_sorted_by_slot_and_comes_back():
    corpus = {
        "Hotel-Inform": [["Name", "b"], ["Area", "east"], ["Name", "a"]],
        "general-bye": [["none", "none"]],
    }
    acts = from_corpus(corpus)
    assert acts == (
        ("Inform", "Hotel", "Area", "east"),
        ("Inform", "Hotel", "Name", "b"),  # the sort keeps the order of one slot's values
        ("Inform", "Hotel", "Name", "a"),
        ("bye", "general", "none", "none"),
    )
    assert (
        from_corpus({"Hotel-Inform": [acts[0][2:], acts[1][2:], acts[2][2:]], "general-bye": [acts[3][2:]]})
        == acts
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "expected an object"),
        ({"Hotel": [["Area", "east"]]}, "expected keys of the form Domain-Intent, got 'Hotel'"),
        ({"Hotel-Inform": [["Area"]]}, "Hotel-Inform: expected a list of .slot, value."),
    ],
)
def test_malformed_corpus_acts_are_refused(given, told):
    with pytest.raises(ActError, match=told):
        from_corpus(given)


def test_positions_are_those_of_the_tokens():
    names = ["Hotel-Inform-Name-1", "Hotel-Inform-Name-2", "Hotel-Request-Area-?", "general-bye-none-none"]
    vocabulary = Vocabulary(names)
    assert vocabulary.positions(TURN) == [0, 1, 2, 3]
    third = [*TURN[:2], ("Inform", "Hotel", "Name", "c"), ("Inform", "Hotel", "Area", "east")]
    assert vocabulary.positions(third) == [0, 1]  # the vocabulary has no third name and no area
    assert pickle.loads(pickle.dumps(vocabulary)).positions(TURN) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["Hotel-Inform-Name"], "line 1: expected Domain-Intent-Slot-V"),
        (["Hotel-Inform-Name-x"], "with V a number"),
        (["a-b-c-1", "a-b-d-1", "a-b-c-1"], "line 3: 'a-b-c-1' stands there for the second time"),
    ],
)
def test_broken_vocabularies_are_refused(names, told):
    with pytest.raises(ActError, match=told):
        Vocabulary(names)


def test_checked_acts_become_tuples():
    assert checked([list(act) for act in TURN], side="system") == tuple(TURN)
    assert checked([], side="system") == ()


@pytest.mark.parametrize(
    ("acts", "told"),
    [
        ("Inform", "expected a list of acts"),
        (7, "expected a list of acts"),
        (["Inform"], "system act 0 'Inform': expected four strings"),
        ([["Inform", "Hotel", "Area"]], "expected four strings"),
        ([["Inform", "Hotel", "Stars", 4]], "expected four strings"),
        ([["inform", "Hotel", "Area", "east"]], "Did you mean Inform"),
        ([["Inform", "hotel", "Area", "east"]], "Did you mean Hotel"),
        ([["Inform", "Bus", "Area", "east"]], "expected a domain, one of Attraction"),
        ([["Inform", "Hotel", "Phon", "x"]], "Did you mean Phone"),
        ([["thank", "general", "none", "none"]], "expected an intent of the system"),
        ([["bye", "Hotel", "none", "none"]], "expected the domain general"),
        ([["Inform", "general", "none", "none"]], "expected the domain general"),
    ],
)
def test_malformed_acts_are_refused(acts, told):
    with pytest.raises(ActError, match=told):
        checked(acts, side="system")


def test_users_do_not_speak_of_booking():
    with pytest.raises(
        ActError,
        match=(
            "expected a domain, one of Attraction, Hotel, Restaurant, Train, Taxi, Hospital, Police, general"
        ),
    ):
        checked([["Inform", "Booking", "Day", "monday"]], side="user")


@pytest.mark.realdata
def test_sizes_of_the_published_vocabularies(multiwoz):
    assert (len(multiwoz.user_acts), len(multiwoz.system_acts)) == (78, 209)
    assert multiwoz.system_acts.index["general-welcome-none-none"] == 208
    assert (
        "Hotel-Inform-Stay-1" in multiwoz.user_acts.index
        and "Taxi-Request-Phone-?" not in multiwoz.user_acts.index
    )


@pytest.mark.realdata
def test_coverage_of_the_published_dialogs(multiwoz):
    """Validation dialogs: 18,828 of 19,150 system acts are in the vocabulary, and 1.4 % of the system turns
    have none that is."""
    with zipfile.ZipFile(Path(multiwoz.source) / "val.json.zip") as archive:
        dialogs = json.loads(archive.read("val.json"))
    turns = [
        from_corpus(turn.get("dialog_act") or {})
        for dialog in dialogs.values()
        for turn in dialog["log"][1::2]
    ]
    found = [tokens(acts) for acts in turns]
    covered = [sum(token in multiwoz.system_acts.index for token in names) for names in found]
    assert (sum(map(len, found)), sum(covered)) == (19_150, 18_828)
    assert covered == [len(multiwoz.system_acts.positions(acts)) for acts in turns]
    assert covered.count(0) / len(turns) == pytest.approx(0.014, abs=5e-4)


def test_acts_of_messages():
    corpus = {
        "role": "user",
        "content": "x",
        "annotations": {
            "dialogue_acts": {
                "Hotel-Inform": [["Area", "east"], ["Wings", "2"]],
                "Hotel-Dance": [["none", "none"]],
            }
        },
    }
    assert acts_of(corpus) == (("Inform", "Hotel", "Area", "east"),)
    assert acts_of({"role": "assistant", "content": "x", "acts": [["Book", "Booking", "Ref", "1"]]}) == (
        ("Book", "Booking", "Ref", "1"),
    )
    assert acts_of({"role": "user", "content": "x"}) is None
