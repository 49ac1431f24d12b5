"""`benchmark offline_start`: how many conversations does learning from logs save, before a policy talks?

    logs -> prepare -> for each of `seeds`: bc, the clone -> ilql and psi from it, by the files of the
    quickstart
    online --env small_talk from each of them, with the same users in the same order, for `online_rounds`

A curve is the return with users that are never learned from, after so many conversations. The level is the
return that the clone's run ends with: a start saves what the clone of its seed needed for it less what it
needed itself, on the lines between measurements.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from envs.small_talk import write_logs
from pipelines import online, stages
from pipelines.benchmark.measuring import Result
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.cluster.data import connect
from rl_dialog.evaluation.plots import COLOURS, plain
from rl_dialog.methods import RLOO

DIALOGS = 2000  # logged conversations
STEPS = 0  # updates of every run of `train`; 0: those of the quickstart
MEASURED = 8  # times that the return of a run is measured on its way
EPISODES = 200  # of a measurement
LEARNING_RATE, C = 1e-3, 0.05  # of `online`, as in tune_configs/online_rloo.yaml
CLONE, OFFLINE = "bc", ("ilql", "psi")


@dataclass(frozen=True)
class Curve:
    """The run of one start and seed."""

    start: str
    seed: int
    conversations: list[int]  # learned from so far
    returns: list[float]  # with users that are not


def measure(config: BenchmarkConfig) -> Result:
    """All curves, a table of what each start returns and saves, and the plot."""
    began, out = time.process_time(), Path(config.output_dir).absolute()
    seeds = range(config.seed, config.seed + config.seeds)
    starts = learned_from_logs(config, out, seeds)
    curves = [_online(config, out, start, seed, place) for (start, seed), place in starts.items()]
    minutes = (time.process_time() - began) / 60
    rounds = f"{config.seeds} seeds, {config.online_rounds} rounds of 64 conversations"
    told = f"{rounds}; {minutes:.1f} minutes of CPU in this process"
    saving = {start: [saved(of_seed(curves, seed), start) for seed in seeds] for start in OFFLINE}
    headline = {"saved": saving, "ends": {f"{c.start}-seed{c.seed}": c.returns[-1] for c in curves}}
    report = {"curves": [asdict(curve) for curve in curves], "saved": saving}
    return Result(report, "\n".join([*table(curves, saving), "", told]), headline, plot(curves))


def learned_from_logs(
    config: BenchmarkConfig, out: Path, seeds: Sequence[int]
) -> dict[tuple[str, int], Path]:
    """(start, seed) -> the run folder of what has learned from the same logs."""
    (out / "logs").mkdir(parents=True)
    write_logs(out / "logs" / "small_talk.jsonl", dialogs=DIALOGS, seed=config.seed + 1)
    found: dict[tuple[str, int], Path] = {}
    with connect("local", num_cpus=max(2, config.threads)):
        sizes = ("--vocab_size", "1024", "--max_length", "512", "--seed", str(config.seed))
        stages.prepare_logs(str(out / "logs"), out / "data", "--rewards.logged", "1", *sizes)
    for seed in seeds:
        for name in (CLONE, *OFFLINE):
            place, first = out / f"{name}-seed{seed}", found.get((CLONE, seed))
            file = stages.CONFIGS / f"quickstart_{name}.yaml"
            how = {"start": first, "steps": STEPS}
            stages.train_run(stages.train_config_of_file(file, out / "data", place, seed, **how))
            found[name, seed] = place
    return found


def _online(config: BenchmarkConfig, out: Path, start: str, seed: int, place: Path) -> Curve:
    """Talks and learns."""
    settings = online.OnlineConfig(
        model_name_or_path=str(place),
        env="small_talk",
        method=RLOO(c=C),
        value_unit=1.0,
        output_dir=str(out / f"online-{start}-seed{seed}"),
        max_steps=config.online_rounds,
        learning_rate=LEARNING_RATE,
        eval_steps=max(1, config.online_rounds // MEASURED),
        env_episodes=EPISODES,
        seed=seed,
        report_to="none",
        device="cpu",
        quiet=True,
    )
    online.main(settings)
    lines = map(json.loads, (Path(settings.output_dir) / "metrics.jsonl").read_text().splitlines())
    measured = {line["step"]: line["eval/return"] for line in lines if "eval/return" in line}
    a_round = settings.groups * settings.group_size
    curve = Curve(start, seed, [step * a_round for step in measured], list(measured.values()))
    if not config.quiet:
        print(f"{start}, seed {seed}: return {curve.returns[0]:+.2f} -> {curve.returns[-1]:+.2f}", flush=True)
    return curve


def of_seed(curves: Sequence[Curve], seed: int) -> dict[str, Curve]:
    """start -> its curve."""
    return {curve.start: curve for curve in curves if curve.seed == seed}


def reached(curve: Curve, level: float) -> float | None:
    """After how many conversations the return is `level` for the first time, on the lines between
    measurements; None where it never is."""
    if curve.returns[0] >= level:
        return 0.0
    points = list(zip(curve.conversations, curve.returns, strict=True))
    for (x, low), (after, high) in zip(points, points[1:], strict=False):
        if high >= level:
            return x + (level - low) / (high - low) * (after - x)
    return None


def saved(curves: Mapping[str, Curve], start: str) -> float | None:
    """Conversations that a start needed less than the clone of its seed for the return with which the clone's
    run ends; None where it never returned so much."""
    level = curves[CLONE].returns[-1]
    own, clones = reached(curves[start], level), reached(curves[CLONE], level)
    return None if own is None else clones - own


def table(curves: Sequence[Curve], saving: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Markdown: means over seeds, lowest and highest; what was saved, seed by seed."""
    lines = ["| start | return before it talks | in the middle | at the end | conversations saved |"]
    lines.append("|---|---|---|---|---|")
    for start in dict.fromkeys(curve.start for curve in curves):
        returns = np.array([curve.returns for curve in curves if curve.start == start])
        cells = [_mean(returns[:, place]) for place in (0, (returns.shape[1] - 1) // 2, -1)]
        seeds = ["never there" if each is None else f"{each:.0f}" for each in saving.get(start, ())]
        lines.append(f"| {start} | {' | '.join(cells)} | {', '.join(seeds)} |")
    return lines


def _mean(values: np.ndarray) -> str:
    """With the lowest and the highest."""
    return f"{values.mean():+.2f} [{values.min():+.2f}, {values.max():+.2f}]"


def plot(curves: Sequence[Curve]) -> Figure:
    """Return against conversations: a line per seed, a colour per start."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    starts = list(dict.fromkeys(curve.start for curve in curves))
    for curve in curves:
        name = curve.start if curve.seed == min(each.seed for each in curves) else None
        colour = COLOURS[starts.index(curve.start)]
        axes.plot(curve.conversations, curve.returns, color=colour, marker="o", markersize=2.5, label=name)
    axes.set_xlabel("conversations learned from", fontsize=9)
    axes.set_title("return with users that are not learned from", loc="left", fontsize=10)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    plain(axes)
    return figure
