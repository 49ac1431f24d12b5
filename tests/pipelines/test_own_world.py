"""A world of one's own, as a new user would try it: the code and the commands of envs/README.md, one after
the other, with fewer steps and episodes; and worlds of one's own that break."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from envs.text_world import play as played_alone
from pipelines.check_env import CheckEnvConfig
from pipelines.check_env import main as check_env
from pipelines.play import PlayConfig
from pipelines.play import main as play
from rl_dialog.config import load_config
from rl_dialog.errors import UserError
from tests.ports import free_port
from tests.test_readme import commands, config_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "envs/README.md"
FEWER = {"max_steps": 12, "episodes": 40}  # than on the page
SERVER_SECONDS = 400  # to come up


def own_commands() -> list[list[str]]:
    """Of the section, in their order."""
    return [each for each in commands(PAGE) if re.search("my_worlds:Geb|autos", " ".join(each))]


def done(command: list[str], **more) -> dict:
    verb = command[0].removeprefix("pipelines.")
    config_class, choices = config_of(verb)
    config = load_config(config_class, command[1:], choices=choices)
    names = config_class.__dataclass_fields__
    fewer = {key: value for key, value in FEWER.items() if key in names and getattr(config, key) > value}
    module = __import__(f"pipelines.{verb}", fromlist=["main"])
    quiet = {"quiet": True, "report_to": "none"}
    quiet = {key: value for key, value in quiet.items() if key in names}
    return module.main(replace(config, **(quiet | fewer | more)))


@pytest.mark.slow
def test_the_recipe_of_the_page(tmp_path, monkeypatch):
    text = PAGE.read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import random\nimport re\n.*?)```", text, re.S)
    (tmp_path / "my_worlds.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))  # of workers and the server
    checked, logged, prepared, trained, swept, chat, served, talked = own_commands()
    players = "geduldig 5937.50, irgendwie 3375.00, optimum 6000.00 (32 episodes each)"
    assert done(checked)["notes"]["players"] == players
    assert done(logged, episodes=600)["players"]["geduldig"]["return"] > 5500
    assert done(prepared)["dialogs"] == 600
    done(trained)
    found = done(swept)["players"]
    assert {each["n"] for each in found.values()} == {40}
    monkeypatch.setattr(sys, "stdin", io.StringIO("Grüß Gott! Was kostet der Käfer?\n/quit\n"))
    assert done(chat)["replies"] == 1
    port = str(free_port())
    arguments = [sys.executable, "-m", *(port if each == "8000" else each for each in served), "--quiet"]
    with subprocess.Popen(arguments) as server:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server)
            address = f"http://127.0.0.1:{port}/v1"
            talked = [each.replace("http://127.0.0.1:8000/v1", address) for each in talked]
            assert done(talked, episodes=4)["n"] == 4
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(240)
    with pytest.raises(UserError, match="expected a reply within 3 tries"):
        done(talked, episodes=1)


def _wait_for(address: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            if httpx.get(address).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError(f"no server at {address} after {SERVER_SECONDS} s")


class Fine:
    """Ends after three replies; odd ones of those below break in the second."""

    def reset(self, *, seed=None):
        self.messages = [{"role": "user", "content": "Привет"}]
        return list(self.messages), {}

    def step(self, reply):
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "ещё"}]
        return list(self.messages), 1000.0, len(self.messages) == 7, False, {}


class Raises(Fine):
    def step(self, reply):
        if len(self.messages) == 3:
            raise KeyError("ключ")
        return super().step(reply)


class NotANumber(Fine):
    def step(self, reply):
        messages, _, *rest = super().step(reply)
        return messages, float("nan"), *rest


class InWords(Fine):
    def step(self, reply):
        messages, _, *rest = super().step(reply)
        return messages, "много", *rest


class Array(Fine):
    def step(self, reply):
        messages, reward, *rest = super().step(reply)
        return messages, np.array([reward]), *rest


class Huge(Fine):
    def step(self, reply):
        messages, _, *rest = super().step(reply)
        return messages, 10**400, *rest


class NoInfo(Fine):
    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0], None


class Meta(Fine):
    def step(self, reply):
        return *super().step(reply)[:4], {"meta": "да"}


class NotFailed(Fine):
    def step(self, reply):
        return *super().step(reply)[:4], {"failed": 0}


class Whole(Fine):
    """Always has the key; and NumPy's numbers by name."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0], {"failed": None}

    def step(self, reply):
        parts = {"tone": np.float32(0.5), "length": np.int64(2), "unknown": None}
        more = {"failed": False, "rewards": parts, "vote": np.int64(1)}
        return *super().step(reply)[:4], more


class Parts(Fine):
    def step(self, reply):
        return *super().step(reply)[:4], {"rewards": {"tone": np.float32("inf")}}


class Views(Fine):
    def step(self, reply):
        return *super().step(reply)[:4], {"views": {"другой": "да"}}


class NoDrawing(Fine):
    def draw(self):
        raise ZeroDivisionError("нет")


class Lines(Fine):
    def reset(self, *, seed=None):
        return ["Привет"], super().reset(seed=seed)[1]


class Text(Fine):
    max_turns = "10"


class FourValues(Fine):
    def step(self, reply):
        return super().step(reply)[:4]


class Waits(Fine):
    def step(self, reply):
        time.sleep(600)


class Surrogate(Fine):
    def step(self, reply):
        _, *rest = super().step(reply)
        self.messages[-1] = {"role": "user", "content": "\ud800"}
        return list(self.messages), *rest


def long(seed):
    return lambda messages: "ß" * 2**20  # 2 MB


def odd(seed):
    return lambda messages: "🙂\x00\u2028<|im_end|>\x1b[2J"


def halves(seed):
    return lambda messages: "\ud83d"  # half of a character, which no file in UTF-8 can hold


def playing(world: type, player=odd, **more) -> dict:
    own = {"env": f"{__name__}:{world.__name__}", "player": (f"{__name__}:{player.__name__}",)}
    return play(PlayConfig(**own, episodes=2, quiet=True, **more))


@pytest.mark.parametrize("player", [long, odd])
def test_long_and_odd_replies_are_played_and_logged(player, tmp_path):
    found = playing(Fine, player, logs=str(tmp_path / "logs.jsonl"), output_dir=str(tmp_path / "out"))
    assert (found["return"], found["terminated"]) == (3000, 2)
    line = json.loads((tmp_path / "logs.jsonl").read_text(encoding="utf-8").split("\n")[0])
    assert line["messages"][1]["content"] == player(0)([])
    assert sum(Path(film).stat().st_size for film in found["films"]) < 2**20


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (Raises, r"Raises: expected step to return, got KeyError: 'ключ' \(at test_own_world.py:\d+\) in"),
        (NotANumber, "NotANumber: expected a finite number or None as the reward, got 'nan'"),
        (InWords, "InWords: expected a finite number or None as the reward, got 'много'"),
        (Array, r"Array: expected a finite number or None as the reward, got '\[1000.\]' in episode 0"),
        (Huge, "Huge: expected a finite number or None as the reward, got '1000"),
        (NoInfo, "NoInfo: expected a dict as info of reset, got None in episode 0, whose seed is [0-9]+"),
        (Meta, r"Meta: expected a dict as info\['meta'\] of step, got 'да' in episode 0, whose seed is"),
        (NotFailed, r"NotFailed: expected text as info\['failed'\] of step, and none where .* got 0 in"),
        (Parts, r"Parts: expected finite numbers by name as info\['rewards'\] of step, got {'tone': .*inf"),
        (Views, r"Views: expected messages by role as info\['views'\] of step, got {'другой': 'да'} in"),
        (NoDrawing, r"NoDrawing: expected draw to return, got ZeroDivisionError: нет \(at test_own_world.py"),
        (Lines, r"Lines: expected reset to return \(messages, info\), got \(\['Привет'\], {}\) in episode"),
        (Text, "Text: expected a whole number above 0 as max_turns, got '10' in episode 0, whose seed is"),
        (FourValues, r"FourValues: expected step to return \(messages, reward, terminated, truncated"),
        (Surrogate, "Surrogate: expected text that UTF-8 and JSON can hold .* in episode 0, whose seed is"),
    ],
)
def test_a_world_that_breaks_is_told(world, message, tmp_path):
    with pytest.raises(UserError, match=message):
        playing(world, output_dir=str(tmp_path))


def test_what_a_world_says_that_did_not_fail_and_in_numpy_s_numbers(tmp_path):
    found = playing(Whole, logs=str(tmp_path / "logs.jsonl"))
    assert (found["return"], found["terminated"]) == (3000, 2)
    reply = json.loads((tmp_path / "logs.jsonl").read_text(encoding="utf-8").split("\n")[0])["messages"][1]
    assert reply["rewards"] == {"tone": 0.5, "length": 2, "unknown": None}
    assert reply["feedback"] == {"vote": 1}
    assert played_alone(Whole(), odd(0), seed=1).end == "terminated"


def test_a_reply_that_no_file_can_hold():
    with pytest.raises(UserError, match="player .*halves': expected text that UTF-8 and JSON can hold"):
        playing(Fine, halves)


def test_a_world_that_waits_for_ever_has_a_fault():
    with pytest.raises(UserError, match="contract: expected a check that is done within 0.3 s"):
        check_env(CheckEnvConfig(env=f"{__name__}:Waits", seconds=0.3, quiet=True))
