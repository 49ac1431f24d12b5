"""What preferences teach in environments: the table by hand, random actions, and the whole command on tiny
sizes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from pipelines.benchmark import control
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.control import Learned, plot, random_returns, rows, ways
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.errors import UserError

POLE = "tests.worlds.endless_cart_pole:EndlessCartPole"
TRUE = Learned("Arm-v1", "true", 0, 1000, 0, 1.0, sampled=(8.0, 12.0), probable=(20.0, 22.0))
RUNS = [
    replace(TRUE, learner="random", steps=0, sampled=(1.0, 3.0), probable=()),
    TRUE,
    replace(TRUE, seed=1, sampled=(14.0, 14.0), probable=(23.0, 23.0)),
    replace(TRUE, learner="learned", steps=1100, labels=70, sampled=(7.0, 7.0), probable=(12.0, 12.0)),
    replace(TRUE, learner="imitation", labels=70, sampled=(2.0, 2.0), probable=(-3.0, -3.0)),
]


def test_the_way_is_from_random_actions_to_the_mean_of_the_true_rewards_runs() -> None:
    """2 is what random actions return; the runs of the true reward return 12 on average, and 22."""
    way = ways(RUNS, "Arm-v1")
    assert way["learned", 0, "sampled"] == pytest.approx(0.5)
    assert way["learned", 0, "probable"] == pytest.approx(0.5)
    assert way["true", 0, "sampled"] == pytest.approx(0.8) and way["true", 1, "sampled"] == pytest.approx(1.2)
    assert way["imitation", 0, "sampled"] == 0 and way["imitation", 0, "probable"] == pytest.approx(-0.25)
    random, true, learned, rival = rows(RUNS, "Arm-v1")
    assert random == "| Arm-v1 | random |  | 0 | 0 | 2 |  |  |  |"
    assert true.startswith("| Arm-v1 | true | 2 | 1,000 | 0 | 12 [10, 14] | 22 [21, 23] | 1 [0.8, 1.2] |")
    assert learned == "| Arm-v1 | learned | 1 | 1,100 | 70 | 7 | 12 | 0.5 | 0.5 |"
    assert rival.endswith("| 2 | -3 | 0 | -0.25 |")
    [axes] = plot(RUNS).axes
    shown = [(line.get_label(), float(line.get_xdata()[0])) for line in axes.lines[:4]]
    expected = [("true", 19 / 20), ("true", 21 / 20), ("learned", 0.5), ("imitation", -0.25)]
    assert [name for name, _ in shown] == [name for name, _ in expected]
    assert np.allclose([x for _, x in shown], [x for _, x in expected])


class Counter(gymnasium.Env):
    """Pays 1 a step; its first episode has as many steps as the seed says."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.left = 1 if seed is None else seed % 10 + 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


def test_of_random_actions_only_first_episodes_count() -> None:
    envs = gymnasium.vector.SyncVectorEnv([Counter] * 3)
    assert random_returns(envs, 4) == (5.0, 6.0, 7.0)


def test_what_no_run_has_is_refused() -> None:
    with pytest.raises(UserError, match="control: expected seeds, control_steps and control_labels"):
        main(BenchmarkConfig(what="control", control_labels=0))
    with pytest.raises(UserError, match="--resume: expected control.* got train"):
        main(BenchmarkConfig(what="train", resume=True))


def test_what_cannot_run_is_told_before_anything_does(tmp_path) -> None:
    config = BenchmarkConfig(what="control", environments=("Pendulum-v1",), output_dir=str(tmp_path / "out"))
    with pytest.raises(UserError, match="--imitation_python .*no/python: expected the Python"):
        main(replace(config, imitation_python=str(tmp_path / "no" / "python")))
    with pytest.raises(UserError, match="imitation.*ended with: .*No module named 'imitation'"):
        main(replace(config, imitation_python=sys.executable, overwrite=True))
    with pytest.raises(UserError, match="Pendulum-v1"):
        main(replace(config, environments=("Pendulum-v1", "Pendullum-v1"), overwrite=True))


@pytest.mark.slow
def test_the_command_goes_on_with_more_seeds(tmp_path, monkeypatch, capsys) -> None:
    """With the Python that RL_DIALOG_IMITATION_PYTHON names, its imitation learns in the same world."""
    monkeypatch.setattr(control, "EPISODES", 2)
    rival, out = os.environ.get("RL_DIALOG_IMITATION_PYTHON", ""), tmp_path / "out"
    sizes = {"control_steps": 4000, "control_labels": 20, "threads": 1, "output_dir": str(out)}
    pole = f"{POLE} --initial_labels 10"
    config = BenchmarkConfig(what="control", environments=(pole,), seeds=1, imitation_python=rival, **sizes)
    main(config)
    first = json.loads((out / "benchmark.json").read_text())["runs"]
    learners = ["random", "true", "learned", *(["imitation"] if rival else [])]
    assert [each["learner"] for each in first] == learners
    true, learned = first[1:3]
    assert learned["labels"] == 20 and learned["steps"] > 4000 <= true["steps"]
    assert all(len(each["sampled"]) == 2 for each in first)
    main(replace(config, seeds=2, imitation_python="", resume=True))
    second = json.loads((out / "benchmark.json").read_text())["runs"]
    assert second[:3] == first[:3] and [each["seed"] for each in second] == [0, 0, 0, 1, 1]
    assert "| learned | 2 |" in capsys.readouterr().out and "<svg" in (out / "control.svg").read_text()
