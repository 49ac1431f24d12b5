"""Worlds of one's own, by module:Class."""

import sys

import pytest

from envs import control_env, text_env
from rl_dialog.errors import UserError

WORLDS = """
class Echo:
    def reset(self, *, seed=None):
        return [{"role": "user", "content": "hi"}], {}

    def step(self, reply):
        raise NotImplementedError

class Mute:
    def reset(self, *, seed=None):
        return [], {}

class Named(Echo):
    def __init__(self, game):
        self.game = game

here = Echo()
"""


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    """The module of these worlds, importable."""
    (tmp_path / "own_worlds.py").write_text(WORLDS)
    (tmp_path / "own_broken.py").write_text("class Echo(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_worlds", None)


def test_a_world_to_talk_in_is_imported(worlds):
    assert text_env("own_worlds:Echo")().reset(seed=1)[0][0]["content"] == "hi"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_worlds:Echos", "expected Echos in own_worlds.py in the folder where"),
        ("nowhere:Echo", "expected Echo in nowhere.py .* got ModuleNotFoundError"),
        ("own_broken:Echo", "got SyntaxError"),
        (":Echo", "got ValueError"),
        ("own_worlds:Mute", "expected a world to talk in whose class has step; envs/__init__.py says"),
        ("own_worlds:Named", "expected a class made without arguments, got missing .* 'game'"),
        ("own_worlds:here", "expected a world to talk in whose class has a constructor, got Echo"),
        ("own_world", "unknown env 'own_world': .* or module:Class for one of your own"),
    ],
)
def test_what_is_no_world_is_refused(worlds, name, message):
    with pytest.raises(UserError, match=message):
        text_env(name)


def test_a_world_to_talk_in_is_not_one_to_watch(worlds):
    with pytest.raises(UserError, match="a vector of environments whose class has clip_length, frames_per"):
        control_env("own_worlds:Echo")
