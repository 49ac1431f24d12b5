"""Rounds on actors: the same bits for any number of them, and what is killed is played once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import online
from pipelines.online import OnlineConfig
from rl_dialog.cluster.data import connect
from rl_dialog.methods import RLOO
from rl_dialog.preferences.labelled_settings import LabelledRewardSettings
from rl_dialog.preferences.reply_fitting import Fitting
from tests.envs.chat_server import chat_server
from tests.evaluation.test_self_play import Bidding

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORLD = '''
import os, signal, time
from pathlib import Path
import numpy as np

def obey():
    """Two orders of a test are files beside the folder of who plays: `kill` for the first process that plays
    once there is the folder that it names (not for the test's own), `hold` for all, until it is gone."""
    place = Path(os.environ["WHO_PLAYS"]).parent
    while (hold := place / "hold").exists() and Path(hold.read_text()).is_dir():
        time.sleep(0.02)
    kill = place / "kill"
    if os.environ["WHO_TESTS"] != str(os.getpid()) and kill.exists() and Path(kill.read_text()).is_dir():
        try:
            kill.rename(place / f"killed {os.getpid()}")  # of several one succeeds
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

class Vowels:
    """Pays for the letter a, in two turns; tells who plays, and takes its time where it is asked to."""
    def reset(self, *, seed=None):
        self.messages = [{"role": "user", "content": f"hello {np.random.default_rng(seed).integers(99)}"}]
        return list(self.messages), {}
    def step(self, reply):
        if place := os.environ.get("WHO_PLAYS"):
            open(os.path.join(place, str(os.getpid())), "a").write("x")
            obey()
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and you?"}]
        return list(self.messages), float(reply.count("a")), len(self.messages) > 4, False, {}
'''


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Path]:  # noqa: ANN001
    """One Ray for all tests; its actors find the world above, and say in a folder who plays."""
    place = tmp_path_factory.mktemp("world")
    (place / "vowels_on_actors.py").write_text(WORLD)
    who = place / "who"
    who.mkdir()
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "WHO_PLAYS": str(who)}
    os.environ["WHO_TESTS"] = str(os.getpid())
    sys.path.insert(0, str(place))
    with connect(num_cpus=5):
        yield who
    sys.path.remove(str(place))
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def config(shared_checkpoints, tmp_path: Path, cluster) -> OnlineConfig:  # noqa: ANN001
    for path in (*cluster.iterdir(), *cluster.parent.glob("kill*"), *cluster.parent.glob("hold")):
        path.unlink()
    return OnlineConfig(
        model_name_or_path=shared_checkpoints["bc"], env="vowels_on_actors:Vowels", method=RLOO(c=0.01),
        output_dir=str(tmp_path / "online"), groups=4, group_size=3, max_steps=4, warmup_steps=0,
        eval_steps=2, learning_rate=1e-2, env_episodes=4, max_new_tokens=4, report_to="none", quiet=True,
        device="cpu", lr_scheduler_type="constant",
    )  # fmt: skip


@pytest.fixture(scope="module")
def found_alone() -> dict[str, tuple]:
    """What this process found by itself, for all tests that compare with it."""
    return {}


@pytest.fixture
def alone(config, found_alone, tmp_path: Path) -> tuple:  # noqa: ANN001
    if not found_alone:
        found_alone["run"] = ran(config, tmp_path / "alone")
    return found_alone["run"]


def ran(config: OnlineConfig, folder: Path, **changed) -> tuple[bytes, list[tuple[str, bytes]], list[dict]]:  # noqa: ANN003
    """The weights, the log and the metrics that do not tell the time."""
    online.main(replace(config, output_dir=str(folder), **changed))
    return result_of(folder)


def result_of(folder: Path) -> tuple[bytes, list[tuple[str, bytes]], list[dict]]:
    weights = (folder / (folder / "latest").read_text().strip() / "model.safetensors").read_bytes()
    logs = sorted((path.name, path.read_bytes()) for path in (folder / "rollouts").iterdir())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return (
        weights,
        logs,
        [
            {name: value for name, value in line.items() if name.startswith(("train", "eval"))}
            for line in lines
        ],
    )


def killed_one(cluster: Path) -> str:
    """The number of the process that killed itself as it was told to."""
    [found] = cluster.parent.glob("killed *")
    return found.name.removeprefix("killed ")


def test_any_number_of_actors_gives_the_same_bits(config, alone, tmp_path, cluster) -> None:  # noqa: ANN001
    """Weights, logs and metrics, of this process and of 1 and 4 actors (of 2 below, where one is killed). Two
    rounds ahead is another result, whose equality for 1 and 2 actors is seen where a driver is killed."""
    for count in (1, 4):
        for path in cluster.iterdir():
            path.unlink()
        assert ran(config, tmp_path / str(count), num_workers=count) == alone
        assert 1 <= len({path.name for path in cluster.iterdir()} - {str(os.getpid())}) <= count
    weights, _, lines = ran(config, tmp_path / "ahead", num_workers=1, max_staleness=2)
    assert weights != alone[0]
    assert [line["train/staleness"] for line in lines if "train/staleness" in line] == [0, 1, 2, 2]


def test_what_a_killed_actor_had_begun_is_played_once(config, alone, tmp_path, cluster) -> None:  # noqa: ANN001
    driver = {str(os.getpid())}
    for path in cluster.iterdir():
        path.unlink()
    (cluster.parent / "kill").write_text(str(cluster))  # the first actor that is in the middle of an episode
    disturbed = ran(config, tmp_path / "disturbed", num_workers=2)
    played, killed = {path.name for path in cluster.iterdir()} - driver, killed_one(cluster)
    assert killed in played and len(played) > 1  # and somebody played after it
    assert disturbed == alone


def test_a_killed_driver_goes_on_without_losing_or_doubling_an_episode(config, tmp_path, cluster) -> None:  # noqa: ANN001
    """To the same bits, with rounds under way that were played ahead, and on another number of actors."""
    config = replace(config, num_workers=1, max_staleness=2, save_steps=1, max_steps=6)
    whole, folder = ran(config, tmp_path / "whole"), tmp_path / "killed"
    code = (
        "from pipelines import online; from pipelines.online import OnlineConfig; "
        "from rl_dialog.methods import RLOO; from rl_dialog.preferences.labelled_settings import *; "
        f"online.main({replace(config, output_dir=str(folder))!r})"
    )
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    hold = cluster.parent / "hold"  # rounds after the second checkpoint are begun and not ended
    hold.write_text(str(folder / "checkpoint-2"))
    with subprocess.Popen([sys.executable, "-c", code], env=alone, stderr=subprocess.PIPE) as driver:
        deadline = time.monotonic() + 300
        while not (folder / "checkpoint-2").is_dir():
            assert driver.poll() is None, driver.stderr.read()
            assert time.monotonic() < deadline, "waited 300 s for the second checkpoint"
            time.sleep(0.02)
        driver.send_signal(signal.SIGKILL)
    hold.unlink()
    assert len(list((folder / "rollouts").iterdir())) < 6
    online.main(replace(config, output_dir=str(folder), resume=True, num_workers=2))
    weights, logs, _ = result_of(folder)
    assert (weights, logs) == whole[:2]
    episodes = [json.loads(line)["meta"]["episode"] for _, text in logs for line in text.splitlines()]
    assert episodes == list(range(6 * 12))


def test_self_play_on_actors(config, tmp_path, cluster) -> None:  # noqa: ANN001
    """The copy's weights travel by version too."""
    config = replace(config, env=f"{Bidding.__module__}:Bidding", self_play=True, opponent_lag=1, max_steps=3)
    alone, actors = ran(config, tmp_path / "0"), ran(config, tmp_path / "2", num_workers=2)
    assert alone == actors


def test_actors_talk_with_users_behind_an_endpoint(config, tmp_path, cluster) -> None:  # noqa: ANN001
    """The same bits as this process, the users' words in the log included. A group is one actor's, so its
    first words are asked for once, as often as here."""
    people = [{"name": name, "system": f"You are {name}."} for name in ("ada", "bo", "cy")]
    (tmp_path / "people.jsonl").write_text("\n".join(map(json.dumps, people)))

    def answer(request: dict) -> str:
        said = sum(message["role"] == "assistant" for message in request["messages"])
        return f"I said {said} things, and you {len(request['messages'][-1]['content'])} letters"

    with chat_server(answer) as server:
        talking = replace(
            config, env="", users=server.url, personas=str(tmp_path / "people.jsonl"), user_turns=2,
            rewards={"answer_length": 1.0}, max_steps=3,
        )  # fmt: skip
        alone = ran(talking, tmp_path / "0")
        asked = sorted(json.dumps(request) for request in server.requests)
        server.requests.clear()
        assert ran(talking, tmp_path / "2", num_workers=2) == alone
        assert sorted(json.dumps(request) for request in server.requests) == asked
    assert b"I said 2 things" in alone[1][0][1]


def test_one_learner_on_ray_gives_the_same_bits(config, alone, tmp_path, cluster) -> None:  # noqa: ANN001
    """As a learner in this process, with an actor that plays."""
    assert ran(config, tmp_path / "learner", num_learners=1, num_workers=1) == alone


def test_preferences_are_learned_alike_by_actors_and_several_learners(config, tmp_path, cluster) -> None:  # noqa: ANN001
    """Two actors play and two learners learn: one of them asks, and the figures are those of one process up
    to the rounding of sums."""
    how = {"initial_labels": 12, "budget": 20, "max_length": 64, "fitting": Fitting(learning_rate=3e-3)}
    asked = LabelledRewardSettings(labeller="oracle", validation=0.0, **how)
    config = replace(config, preferences=asked, max_steps=3, eval_steps=0, save_steps=3)
    ran(config, tmp_path / "alone")
    ran(config, tmp_path / "many", num_workers=2, num_learners=2)
    (one, many), (their, of_many) = (
        [(tmp_path / name / file).read_text().splitlines() for name in ("alone", "many")]
        for file in ("metrics.jsonl", "asked.jsonl")
    )
    assert their == of_many and len(their) == 3
    for line, other in zip(map(json.loads, one), map(json.loads, many), strict=True):
        told = {name: value for name, value in line.items() if name.startswith(("train", "eval", "pref"))}
        told.pop("pref/fitting_s", None)
        assert {name: other[name] for name in told} == pytest.approx(told, rel=1e-3, abs=1e-4)


def test_a_killed_learner_goes_on_without_losing_or_doubling_an_episode(config, tmp_path, cluster) -> None:  # noqa: ANN001
    """Of two the one that plays is killed, once there are two checkpoints; they end with the same bits."""
    config = replace(config, num_learners=2, save_steps=1, max_steps=5)
    whole, folder = ran(config, tmp_path / "whole"), tmp_path / "killed"
    for path in cluster.iterdir():
        path.unlink()
    (cluster.parent / "kill").write_text(str(folder / "checkpoint-2"))
    disturbed = ran(config, folder)
    played, killed = {path.name for path in cluster.iterdir()}, killed_one(cluster)
    assert killed in played and len(played) == 2
    assert disturbed[:2] == whole[:2]
    episodes = [json.loads(line)["meta"]["episode"] for _, text in disturbed[1] for line in text.splitlines()]
    assert episodes == list(range(5 * 12))
