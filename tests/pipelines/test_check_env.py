"""The verb that tells whether a world keeps the contract."""

import pytest

from pipelines.check_env import CheckEnvConfig, main
from rl_dialog.errors import UserError

BAD = """
import random

class Lucky:
    def reset(self, *, seed=None):
        self.messages = [{"role": "user", "content": str(random.random())}]
        return list(self.messages), {}

    def step(self, reply):
        self.messages += [{"role": "assistant", "content": reply}]
        return list(self.messages), 1.0, True, False, {}
"""


def test_a_world_that_keeps_it(capsys):
    found = main(CheckEnvConfig(env="envs.example:House"))
    assert found["checks"] == 11 and found["notes"]["logs"] == "the class brings none"
    assert "other process   ok" in capsys.readouterr().err


def test_a_world_that_does_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "lucky_world.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="1 of 2 checks found a fault. seed: expected a generator"):
        main(CheckEnvConfig(env="lucky_world:Lucky", quiet=True))
    assert capsys.readouterr() == ("", "")


def test_no_world():
    with pytest.raises(UserError, match="expected --env: module:Class"):
        main(CheckEnvConfig())
    with pytest.raises(UserError, match="Did you mean small_talk"):
        main(CheckEnvConfig(env="small_tak"))
