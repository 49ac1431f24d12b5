"""Dialogs to learn language understanding from."""

from envs.multiwoz import load_world
from envs.multiwoz.acts import acts_of
from envs.multiwoz.lexical import PLACEHOLDER
from envs.multiwoz.varied import varied_dialogs
from rl_dialog.data.labelled import labelled_turns


def test_simulated_turns_are_varied_and_reproducible():
    first, again = (turns_of_varied_dialogs() for _ in range(2))
    assert first == again and len({turn.dialog for turn in first}) == 20
    assert {turn.side for turn in first} == {"user", "system"} and first[1].context == (first[0].text,)
    assert {act[0] for turn in first for act in turn.acts} > {"Inform", "Request", "Recommend", "bye"}


def turns_of_varied_dialogs():
    dialogs = varied_dialogs(load_world(), 20, templates="manual", seed=5)
    return list(labelled_turns(dialogs, acts_of, without=PLACEHOLDER))
