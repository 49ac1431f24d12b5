"""`benchmark wordle`: the check of Snell et al. 2022 on a branching Wordle. What does learning over several
steps see that learning over one cannot?

The logs (envs/wordle, kind `adversarial`) are rounds of one game of an expert, of games that begin as it did
and then repeat themselves until they are lost, and of games of a mediocre player. On average an expert's
opening is followed by worse play than a mediocre one, so whoever learns what mostly followed (sarsa) ranks it
lower; whoever learns what can follow (ilql with an expectile near 1) ranks it first. Counted is Q-rank
(`rl_dialog/evaluation/q_rank.py`): the share of pairs of guesses in which the expert's has the higher Q, once
the guess has been said whole.

    initial   the expert's first guess against the mediocre player's
    branch    the expert's third guess against one of its first two once more

Both methods go on from one clone of the logs and train as `train` does at its defaults, but for the
expectile; the language model stays the clone's (`awac_weight` 0). The curves go to the folder as a plot, and
the checkpoints lie beside them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure

from envs.wordle.logs import write_logs, write_pairs
from pipelines.benchmark.measuring import Result
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.schema import read_jsonl
from rl_dialog.data.tokenize import Row, tokenize, train_tokenizer
from rl_dialog.evaluation.experiment import Say
from rl_dialog.evaluation.q_rank import Pair, q_rank, read_pairs
from rl_dialog.methods import BC, ILQL, SARSA, Method
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.loop import Trainer, TrainerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL = ModelConfig(layers=2, width=64, attention_heads=4, context=256)
POINTS = 16  # of a curve
PAIRS = 1000
OTHER_GAMES = 1000  # added to a seed: no pair is of a logged game
BARS = {"ilql": 0.9, "sarsa": 0.1}  # what the published curves reach on `initial`: at least, at most
COLOURS = {"ilql": "#4269d0", "sarsa": "#e0731d"}
TITLES = {
    "initial": "the expert's opening above a mediocre one",
    "branch": "its third guess above a repeated one",
}


@dataclass(frozen=True)
class Curve:
    """What one run ranked right while it learned."""

    method: str
    seed: int
    steps: list[int]
    shares: dict[str, list[float]]  # kind of pair -> share at each of the steps
    seconds: float  # of processor time, the evaluations included


def measure(config: BenchmarkConfig) -> Result:
    """The share of pairs that each method ranks right in the end, the curves, and the plot."""
    out, curves, began = Path(config.output_dir), [], time.process_time()
    say: Say = (lambda text: None) if config.quiet else partial(print, flush=True)
    for seed in range(config.seed, config.seed + config.runs):
        logs = Logs.written(out / f"logs-seed{seed}", games=config.games, seed=seed)
        clone = cloned(logs, out / f"bc-seed{seed}", steps=config.steps, seed=seed)
        for name, method in methods(config.tau).items():
            run = out / f"{name}-seed{seed}"
            how = {"name": name, "steps": config.steps, "seed": seed, "say": say}
            curves.append(learned(method, logs, clone, run, **how))
    ends = {name: {kind: _ends(curves, name, kind) for kind in TITLES} for name in BARS}
    means = {
        name: {kind: float(np.mean(found)) for kind, found in each.items()} for name, each in ends.items()
    }
    report = {"ends": ends, "curves": [asdict(curve) for curve in curves], "bars": BARS}
    minutes = (time.process_time() - began) / 60
    size = f"{config.runs} seeds, {config.games} games and {config.steps} updates each, tau {config.tau:g}"
    shown = "\n".join([*table(ends), "", f"{size}; {minutes:.1f} minutes of CPU"])
    return Result(report, shown, {"ranked_first": means, "cpu_minutes": minutes}, plot(curves))


def methods(tau: float) -> dict[str, Method]:
    """What is compared; sarsa is ilql with an expectile of a half."""
    return {"ilql": ILQL(tau=tau, awac_weight=0.0), "sarsa": SARSA(awac_weight=0.0)}


@dataclass(frozen=True)
class Logs:
    """Games to learn from, and pairs of guesses in others."""

    tokenizer: PreTrainedTokenizerFast
    rows: list[Row]
    pairs: list[Pair]

    @classmethod
    def written(cls, folder: Path, *, games: int, seed: int) -> Logs:
        """Writes both. The tokenizer is as `prepare` makes one: most guesses and colours are one token."""
        folder.mkdir(parents=True)
        write_logs(folder / "logs.jsonl", dialogs=games, seed=seed, kind="adversarial")
        write_pairs(folder / "pairs.jsonl", pairs=PAIRS, seed=seed + OTHER_GAMES)
        dialogs = list(read_jsonl(folder / "logs.jsonl"))
        tokenizer = train_tokenizer(message["content"] for dialog in dialogs for message in dialog.messages)
        rows = [row for dialog in dialogs for row in tokenize(dialog, tokenizer)]
        return cls(tokenizer, rows, read_pairs(folder / "pairs.jsonl"))


def cloned(logs: Logs, folder: Path, *, steps: int, seed: int) -> Policy:
    """A new model that plays as the logs do, which every critic begins as a copy of."""
    torch.manual_seed(seed)
    policy = Policy(load_lm(MODEL, logs.tokenizer), BC(), MODEL)
    policy.start = "new"
    settings = TrainerConfig(max_steps=steps, seed=seed, eval_steps=0, report_to="none")
    Trainer(policy, logs.tokenizer, logs.rows, [], settings, folder).train()
    return policy


def learned(
    method: Method,
    logs: Logs,
    clone: Policy,
    folder: Path,
    *,
    name: str,
    steps: int,
    seed: int,
    say: Say = print,
) -> Curve:
    """Trains a critic from the clone, as `train` does, and ranks the pairs at each evaluation."""
    torch.manual_seed(seed)
    policy = Policy(copy.deepcopy(clone.lm), method, MODEL)
    policy.start = "made"
    curve = Curve(name, seed, [], {kind: [] for kind in TITLES}, 0.0)

    def rank(metrics: dict[str, float], last: bool) -> None:
        policy.eval()
        curve.steps.append(int(metrics["step"]))
        for kind, found in q_rank(policy, logs.tokenizer, logs.pairs).items():
            curve.shares[kind].append(found["target"][-1])
        shares = ", ".join(f"{kind} {share[-1]:.3f}" for kind, share in curve.shares.items())
        say(f"{name}, seed {seed}, {curve.steps[-1]:>5} updates: {shares}")

    every = max(1, steps // POINTS)
    settings = TrainerConfig(max_steps=steps, seed=seed, eval_steps=every, report_to="none")
    began = time.process_time()
    Trainer(policy, logs.tokenizer, logs.rows, [], settings, folder, report=rank).train()
    return replace(curve, seconds=time.process_time() - began)


def _ends(curves: Sequence[Curve], name: str, kind: str) -> list[float]:
    """The last share of each seed."""
    return [curve.shares[kind][-1] for curve in curves if curve.method == name]


def table(ends: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Markdown: a row per method, a column per kind of pair, each seed's last share."""
    lines = ["| method | " + " | ".join(TITLES.values()) + " |", "|---|" + "---|" * len(TITLES)]
    for name, by_kind in ends.items():
        cells = [", ".join(f"{share:.3f}" for share in by_kind[kind]) for kind in TITLES]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def plot(curves: Sequence[Curve]) -> Figure:
    """A panel per kind of pair: the mean curve of each method over seeds, the seeds thin; dashed the bars."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (kind, title) in zip(figure.subplots(1, len(TITLES), sharey=True), TITLES.items(), strict=True):
        for name, colour in COLOURS.items():
            mine = [curve for curve in curves if curve.method == name]
            for curve in mine if len(mine) > 1 else ():
                axes.plot(curve.steps, curve.shares[kind], color=colour, linewidth=0.8, alpha=0.4)
            mean = np.mean([curve.shares[kind] for curve in mine], axis=0)
            axes.plot(mine[0].steps, mean, color=colour, linewidth=2, label=name)
            if kind == "initial":
                axes.axhline(BARS[name], color=colour, linestyle="--", linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("updates", fontsize=9)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("share of pairs with the higher Q", fontsize=9)
    figure.axes[-1].legend(frameon=False, fontsize=9, loc="lower right")
    return figure
