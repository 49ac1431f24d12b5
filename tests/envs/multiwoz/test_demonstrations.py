"""Corpus turns as states and actions: what the annotators wrote, as they wrote it and as the tracker would
have it."""

import json
import zipfile

import numpy as np
import pytest

from envs.multiwoz import Options, Simulator
from envs.multiwoz.acts import ActError
from envs.multiwoz.demonstrations import CorpusError, from_corpus, from_rule_policy
from envs.multiwoz.rollout import play
from envs.multiwoz.rule_policy import RulePolicy


def turn(acts, **metadata):
    return {"dialog_act": acts, "metadata": metadata}


def hotel(*, area="", stars="not mentioned", booked=False):
    return {
        "semi": {"area": area, "stars": stars, "name": "not mentioned"},
        "book": {"booked": [{"reference": "00000000"}] * booked, "people": ""},
    }


LOG = [
    turn({"Hotel-Inform": [["Area", "east"]]}),
    turn({"Hotel-Request": [["Price", "?"]]}, hotel=hotel(area="east")),
    turn({"Hotel-Inform": [["People", "3"]]}),
    turn(
        {"Booking-Book": [["Ref", "AB12"]], "general-reqmore": [["none", "none"]]},
        hotel=hotel(area="east", booked=True),
    ),
    turn({"general-bye": [["none", "none"]]}),
    turn({"general-bye": [["none", "none"]]}, hotel=hotel(area="east", booked=True)),
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "val.json"
    path.write_text(json.dumps({"ONE": {"goal": {}, "log": LOG}, "TWO": {"goal": {}, "log": LOG[:2]}}))
    return path


def bits(simulator, row):
    """The names of the constraints and bookings that are on, and the last bit."""
    vectors = simulator.vectors
    given = {pair for pair, i in vectors.given.items() if row[i]}
    return given, {domain for domain, i in vectors.booked.items() if row[i]}, bool(row[vectors.terminated])


def test_cleaned_features_are_those_of_the_tracker(corpus, town):
    """ "not mentioned" is no constraint, a booking is known from the turn after it on, and nothing is ever
    terminated."""
    simulator = Simulator(town)
    found = from_corpus(corpus, simulator)
    area = ("hotel", "area")
    assert [bits(simulator, row) for row in found.states] == [
        ({area}, set(), False),
        ({area}, set(), False),
        ({area}, {"hotel"}, False),
        ({area}, set(), False),
    ]
    assert found.dialogs.tolist() == [0, 0, 0, 1]
    assert (
        bits(simulator, from_corpus(corpus, Simulator(town, Options(set_booked=False))).states[2])[1] == set()
    )


def test_raw_features_are_the_annotators(corpus, town):
    """ "not mentioned" fills a bit, the turn that books has the booking already, and the last turn of a
    dialog is terminated."""
    simulator = Simulator(town)
    filled = {("hotel", "area"), ("hotel", "stars"), ("hotel", "name")}
    assert [bits(simulator, row) for row in from_corpus(corpus, simulator, features="raw").states] == [
        (filled, set(), False),
        (filled, {"hotel"}, False),
        (filled, {"hotel"}, True),
        (filled, set(), True),
    ]


def test_acts_of_both_sides_stand_where_the_vectoriser_puts_them(corpus, town):
    simulator = Simulator(town)
    vectors, found = simulator.vectors, from_corpus(corpus, simulator)
    second = found.states[1]
    users = {vectors.user_acts.tokens[i] for i in np.flatnonzero(second[: len(vectors.user_acts)])}
    start = len(vectors.user_acts)
    systems = {
        vectors.system_acts.tokens[i] for i in np.flatnonzero(second[start : start + vectors.action_size])
    }
    assert users == {"Hotel-Inform-People-1"} and systems == {"Hotel-Request-Price-?"}
    assert {vectors.system_acts.tokens[i] for i in np.flatnonzero(found.actions[1])} == {
        "Booking-Book-Ref-1",
        "general-reqmore-none-none",
    }


def test_zipped_and_shortened(corpus, town, tmp_path):
    with zipfile.ZipFile(tmp_path / "val.json.zip", "w") as archive:
        archive.write(corpus, "val.json")
    whole, first = (
        from_corpus(tmp_path / "val.json.zip", Simulator(town)),
        from_corpus(corpus, Simulator(town), dialogs=1),
    )
    assert len(whole) == 4 and len(first) == 3 and (whole.states[:3] == first.states).all()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "found no such file"),
        ("{", "expected JSON"),
        ("[]", "found list"),
        ('{"A": 3}', "dialog A: expected an object with goal and log"),
        ('{"A": {"log": [{}, {}]}}', "dialog A: expected turns with dialog_act and metadata"),
        ('{"A": {"log": []}}', "expected dialogs with system turns, found none"),
    ],
)
def test_broken_corpora_are_explained(text, told, town, tmp_path):
    path = tmp_path / "val.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CorpusError, match=told):
        from_corpus(path, Simulator(town))
    assert not issubclass(ActError, CorpusError)


def test_the_rule_policys_turns_are_those_it_plays(town):
    """As many as it plays, with its acts, in the order of the conversations."""
    simulator = Simulator(town)
    found = from_rule_policy(simulator, episodes=12, seed=3)
    rule = RulePolicy(town.database, simulator.options)
    played = list(play(simulator, rule.respond, seed=3, episodes=12))
    assert found.dialogs.tolist() == [each.episode for each in played for _ in each.rewards]
    acts = [simulator.vectors.bits(acts) for each in played for side, acts in each.turns if side == "system"]
    assert (found.actions == np.stack(acts)).all()


@pytest.mark.realdata
def test_the_published_dialogs(multiwoz):
    """7,365 system turns; 18,828 of 19,150 acts are in the vocabulary, 2.56 of them a turn."""
    from tests.envs.multiwoz.conftest import DATA

    found = from_corpus(DATA / "val.json.zip", Simulator(multiwoz))
    assert found.states.shape == (7365, 340) and found.actions.shape == (7365, 209)
    assert found.actions.sum() == 18_828 and found.actions.sum() / 7365 == pytest.approx(2.556, abs=0.001)
    assert (found.actions.sum(1) == 0).mean() == pytest.approx(0.014, abs=0.002)
