"""`benchmark control`: what policies learn from preferences in environments, beside the same learner with the
true reward and, where its Python is given, beside `imitation`.

    for each of `environments`, and of `seeds` in it
    true        prefer --mode original-rewards
    learned     prefer --labeller oracle, `control_labels` answers
    imitation   its own script with its own defaults and as many answers (imitation_rival.py)

All get `control_steps` steps to learn from; what was gathered before there was a reward is counted beside
them. Then each last policy plays `EPISODES` episodes twice, with actions drawn and with the most probable
ones. `way` is how far a return is from that of random actions (0) to the mean of the true reward's runs (1).
Every run is written when it ends, so a command that was killed goes on with --resume, and more environments
or seeds may be asked for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from envs import vectors_of
from pipelines import prefer
from pipelines.benchmark.measuring import Result
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.config import load_config
from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError
from rl_dialog.evaluation.control_episodes import play_control
from rl_dialog.evaluation.plots import COLOURS, GREY, plain
from rl_dialog.models.control_policy import ControlPolicy
from rl_dialog.preferences.run_files import find_checkpoint

RIVAL = Path(__file__).parent / "imitation_rival.py"
EPISODES = 20
RANDOM, TRUE, LEARNED, IMITATION = "random", "true", "learned", "imitation"
WAYS = ("sampled", "probable")


@dataclass(frozen=True)
class Learned:
    """What one policy returns."""

    environment: str  # with its flags of `prefer`
    learner: str  # RANDOM, TRUE, LEARNED or IMITATION
    seed: int
    steps: int  # of the environment, those before there was a reward among them
    labels: int
    cpu_seconds: float
    sampled: tuple[float, ...]  # true returns of episodes with actions drawn
    probable: tuple[float, ...]  # with the most probable ones; of RANDOM none

    def returned(self, way: str) -> float:
        return float(np.mean(getattr(self, way)))


def measure(config: BenchmarkConfig) -> Result:
    """All runs, a table and the plot."""
    for environment in config.environments:  # a wrong name is told now, and not in an hour
        Suite(config, environment).check()
    if config.imitation_python:
        ask_python(config.imitation_python, "-c", "import imitation, sacred, seals")
    runs = [each for environment in config.environments for each in Suite(config, environment).runs()]
    lines = [row for environment in config.environments for row in rows(runs, environment)]
    columns = ["environment", "policy", "seeds", "steps", "labels", *WAYS, *(f"way, {way}" for way in WAYS)]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    told = f"{sum(each.cpu_seconds for each in runs) / 60:.0f} minutes of CPU in all runs"
    headline = {
        f"{each.environment}, {each.learner}, seed {each.seed}": [
            round(each.returned(way), 2) for way in WAYS if getattr(each, way)
        ]
        for each in runs
    }
    return Result(
        {"runs": [asdict(each) for each in runs]}, "\n".join([*head, *lines, "", told]), headline, plot(runs)
    )


@dataclass(frozen=True)
class Suite:
    """The runs in one environment."""

    config: BenchmarkConfig
    environment: str

    @property
    def name(self) -> str:
        return shlex.split(self.environment)[0]

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir).absolute() / re.sub(r"[^\w.=-]+", "_", self.environment)

    def check(self) -> None:
        """Raises UserError for an environment or a flag that there is none of."""
        prefer.resolved(self._settings(LEARNED, self.config.seed)).check()

    def runs(self) -> list[Learned]:
        """Those that are written are read."""
        config = self.config
        found = [self._written(RANDOM, config.seed, self._random)]
        for seed in range(config.seed, config.seed + config.seeds):
            found += [self._written(TRUE, seed, self._true), self._written(LEARNED, seed, self._learned)]
            if config.imitation_python:
                found.append(self._written(IMITATION, seed, self._imitation))
        return found

    def _written(self, learner: str, seed: int, make: Callable[[str, int], Learned]) -> Learned:
        path = self.folder / f"{learner}-seed{seed}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._run(learner, seed), ignore_errors=True)  # one that was killed begins anew
            write_json(path, asdict(make(learner, seed)))
        values = json.loads(path.read_text(encoding="utf-8"))
        found = Learned(**{**values, **{way: tuple(values[way]) for way in WAYS}})
        if not self.config.quiet:
            shown = ", ".join(f"{way} {found.returned(way):.1f}" for way in WAYS if getattr(found, way))
            print(f"{self.environment}, {learner}, seed {seed}: {shown}", flush=True)
        return found

    def _run(self, learner: str, seed: int) -> Path:
        return self.folder / f"{learner}-seed{seed}"

    def _random(self, learner: str, seed: int) -> Learned:
        returns = random_returns(self._envs(self._settings(learner, seed)), seed)
        return Learned(self.environment, learner, seed, 0, 0, 0.0, returns, ())

    def _true(self, learner: str, seed: int) -> Learned:
        return self._prefer(learner, seed, "--mode", "original-rewards")

    def _learned(self, learner: str, seed: int) -> Learned:
        return self._prefer(learner, seed, "--synchronous", "--budget", str(self.config.control_labels))

    def _prefer(self, learner: str, seed: int, *flags: str) -> Learned:
        began, settings = time.process_time(), self._settings(learner, seed, *flags)
        result = prefer.main(settings)
        seconds = time.process_time() - began
        checkpoint, folder = find_checkpoint(result["output_dir"])
        policy, returns = ControlPolicy.from_pretrained(checkpoint), []
        for greedy in (False, True):
            envs = self._envs(settings)
            played = play_control(policy, envs, seed=seed, greedy=greedy)
            returns.append(tuple(episode.true_return for episode in played))
            envs.close()
        last = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        steps = result["steps"] + json.loads(last).get("pref/gathered_steps", 0)
        return Learned(
            self.environment, learner, seed, steps, result.get("labels", 0), round(seconds), *returns
        )

    def _settings(self, learner: str, seed: int, *flags: str) -> prefer.PreferConfig:
        told = {"seed": seed, "steps": self.config.control_steps, "output_dir": self._run(learner, seed)}
        told |= {"labeller": "oracle", "report_to": "none", "device": "cpu"}
        words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
        words = ["--env", *shlex.split(self.environment), *flags, *words, "--quiet"]
        return load_config(prefer.PreferConfig, words, suited=prefer.suited)

    def _envs(self, settings: prefer.PreferConfig) -> Any:
        resolved = prefer.resolved(settings)
        return vectors_of(resolved.env, resolved.env_options)(EPISODES)

    def _imitation(self, learner: str, seed: int) -> Learned:
        told = {"env": self.name, "steps": self.config.control_steps, "labels": self.config.control_labels}
        told |= {"seed": seed, "episodes": EPISODES}
        where = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": str(self.config.threads)}
        said = ask_python(self.config.imitation_python, str(RIVAL), json.dumps(told), **where)
        return Learned(self.environment, learner, seed, **json.loads(said.splitlines()[-1]))


def random_returns(envs: Any, seed: int) -> tuple[float, ...]:
    """True returns of the first episode of each environment, with actions drawn evenly."""
    envs.action_space.seed(seed)
    envs.reset(seed=seed)
    total, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while running.any():
        _, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
        total += np.where(running, rewards, 0.0)
        running &= ~(terminated | truncated)
    envs.close()
    return tuple(map(float, total))


def ask_python(python: str, *arguments: str, **surroundings: str) -> str:
    """What imitation's Python prints. Raises UserError where it does not come to its end."""
    try:
        ran = subprocess.run(
            [python, *arguments], capture_output=True, text=True, env=os.environ | surroundings
        )
    except OSError as error:
        raise UserError(
            f"--imitation_python {python}: expected the Python of an environment with imitation, such as "
            f"imitation/bin/python ({error})"
        ) from error
    if ran.returncode:
        said = " / ".join(ran.stderr.strip().splitlines()[-3:])[-600:]
        raise UserError(
            f"--imitation_python {python}: expected imitation to learn there, it ended with: "
            f"{said} (pip install imitation seals 'setuptools<80'; it wants episodes of one length)"
        )
    return ran.stdout


def ways(runs: Sequence[Learned], environment: str) -> dict[tuple[str, int, str], float]:
    """(learner, seed, sampled or probable) -> how far its return is from random actions to the true reward's
    mean over seeds."""
    here = [each for each in runs if each.environment == environment]
    lowest = next(each.returned("sampled") for each in here if each.learner == RANDOM)
    found = {}
    for way in WAYS:
        best = np.mean([each.returned(way) for each in here if each.learner == TRUE])
        for each in here:
            if each.learner != RANDOM:
                found[each.learner, each.seed, way] = float((each.returned(way) - lowest) / (best - lowest))
    return found


def rows(runs: Sequence[Learned], environment: str) -> list[str]:
    """Of the table, one for each learner: means over seeds with the lowest and the highest."""
    way, lines = ways(runs, environment), []
    for learner in (RANDOM, TRUE, LEARNED, IMITATION):
        each = [one for one in runs if (one.environment, one.learner) == (environment, learner)]
        if not each:
            continue
        figures = [_spread([one.returned(name) for one in each if getattr(one, name)]) for name in WAYS]
        figures += [
            _spread([way[learner, one.seed, name] for one in each if learner != RANDOM]) for name in WAYS
        ]
        counts = (f"{np.mean([getattr(one, name) for one in each]):,.0f}" for name in ("steps", "labels"))
        seeds = len(each) if learner != RANDOM else ""
        lines.append(f"| {environment} | {learner} | {seeds} | {' | '.join([*counts, *figures])} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{np.mean(values):.3g}" + (f" [{low:.3g}, {high:.3g}]" if len(values) > 1 else "")


def plot(runs: Sequence[Learned]) -> Figure:
    """The way of the most probable actions in each environment, a dot for each seed."""
    environments = list(dict.fromkeys(each.environment for each in runs))
    figure = Figure(figsize=(7, 1.2 + 0.45 * len(environments)), layout="constrained")
    axes = figure.subplots()
    for place, environment in enumerate(environments):
        for (learner, _, way), value in ways(runs, environment).items():
            if way == "probable":
                above = {TRUE: 0.2, LEARNED: 0.0, IMITATION: -0.2}[learner]
                colour = {TRUE: GREY, LEARNED: COLOURS[0], IMITATION: COLOURS[1]}[learner]
                axes.plot([value], [-place + above], "o", color=colour, label=learner)
    names = [environment.rpartition(":")[2] for environment in environments]
    axes.set_yticks([-place for place in range(len(environments))], names, fontsize=9)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_xlabel("most probable actions: from random ones (0) to PPO on the true reward (1)")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    plain(axes)
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        named.values(), named.keys(), frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
    )
    return figure
