"""`benchmark cartpole`: the classic-control check of Jaques et al. 2019, 1907.00456. Four kinds of logged
data meet the losses of rl_dialog/methods.

A Q-learner explores CartPole (at most 200 steps, reward 1 each) and leaves four buffers of 10 000
transitions. On each of them every method learns a policy without the environment, which afterwards only
measures it:

    full         everything the learner saw, from its first random step on
    concurrent   the same, through a window of the most recent data that slides along while the method learns
    expert       the learner at its best, always with its best action
    noisy        the same with 30 % random actions

The paper found WOP >= DBCQ >= cloning and batch Q-learning on each, and WOP above the policy that wrote the
logs. A second table has what explains where that does not come out. A plot goes to the folder too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from envs.cart_pole import LIMIT
from pipelines.benchmark.cartpole_causes import Shares, causes
from pipelines.benchmark.cartpole_learners import (
    LOWER_Q_LEARNING,
    Q_LEARNING,
    WOP,
    Act,
    Networks,
    Transitions,
    best_of,
    greedy,
    learn,
    log_probability,
    sampled,
    uniform,
    variational,
)
from pipelines.benchmark.cartpole_logs import BUFFERS, collect, columns_of, returns
from pipelines.benchmark.measuring import Result
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.evaluation.intervals import Estimate, Measure, estimate
from rl_dialog.methods import BC, WayOffPolicy

PRIOR_STEPS = 2_000
DRAWS = 2  # of the prior, of which DBCQ takes the best
Returns = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Experiment:
    """What K seeds found, buffer by buffer."""

    returns: Returns  # buffer -> policy -> the mean return of each seed; "behaviour" is what wrote the buffer
    causes: dict[str, Shares]  # buffer -> what may explain them -> a numerator and a denominator of each seed


def measure(config: BenchmarkConfig) -> Result:
    """The mean returns, both tables and the plot."""
    torch.set_num_threads(1)  # products of 32 x 32 matrices gain nothing from more
    start = time.process_time()
    measured = experiment(config.seeds, config.steps, priors=config.priors, seed=config.seed)
    seconds = time.process_time() - start
    means = {
        buffer: {name: round(float(np.mean(values)), 1) for name, values in rows.items()}
        for buffer, rows in measured.returns.items()
    }
    tables = [table(measured.returns), "", table(measured.causes, head="what may explain it", digits=1), ""]
    size = f"{config.seeds} seeds, {config.steps} updates, {seconds:.0f} s of CPU"
    report = {"cpu_seconds": seconds, **asdict(measured)}
    return Result(
        report,
        "\n".join([*tables, f"{size}; means and 95 % intervals over seeds"]),
        {"returns": means},
        plot(measured.returns),
    )


def experiment(
    seeds: int, updates: int, *, priors: Sequence[str] = ("clone",), seed: int = 0, variants: bool = True
) -> Experiment:
    """All policies on all buffers.

    `seed` reaches whatever is drawn; `variants` adds WOP with one thing changed at a time, and the causes.
    """
    first_seed = 100 * seed  # what is drawn counts up from here
    logs = collect(seeds, seed=first_seed)
    fitting = {"steps": PRIOR_STEPS, "seed": first_seed}
    clone = learn(BC(), logs, columns_of(seeds, PRIOR_STEPS, seed=first_seed), **fitting)
    makers = {
        "clone": lambda: sampled(clone),
        "vae": lambda: variational(logs, columns_of(seeds, PRIOR_STEPS, seed=first_seed), **fitting),
        "uniform": lambda: uniform,
    }
    fitted = {name: makers[name]() for name in priors}
    values = _values(logs, fitted, clone, seeds, updates, seed=first_seed, variants=variants)
    mean_returns = {"behaviour": logs.mean_return()}
    mean_returns |= {
        name: returns(act, len(BUFFERS) * seeds, seed=first_seed + 10_000)
        for name, act in _policies(fitted, values).items()
    }
    rows = {name: value.view(len(BUFFERS), seeds).tolist() for name, value in mean_returns.items()}
    why = causes(logs, fitted, values, seed=first_seed) if variants else {}
    return Experiment(
        {buffer: {name: row[i] for name, row in rows.items()} for i, buffer in enumerate(BUFFERS)},
        {
            buffer: {name: row[i * seeds : (i + 1) * seeds] for name, row in why.items()}
            for i, buffer in enumerate(BUFFERS)
        },
    )


def _values(
    logs: Transitions,
    priors: Mapping[str, Act],
    clone: Networks,
    seeds: int,
    updates: int,
    *,
    seed: int,
    variants: bool,
) -> dict[str, nn.Module]:
    """What each method learned, by its name: a network per log."""
    logp = {
        name: log_probability(prior, logs)
        for name, prior in ({"clone": sampled(clone)} | dict(priors)).items()
    }

    def train(method: WayOffPolicy, prior: str = "clone", above: Networks | None = None) -> nn.Module:
        return learn(
            method,
            logs,
            columns_of(seeds, updates, seed=seed),
            steps=updates,
            seed=seed,
            prior_logp=logp[prior],
            above=above,
        )

    networks = {"Batch Q": train(Q_LEARNING), "DBCQ's Q": train(LOWER_Q_LEARNING)} | {
        f"WOP, {name}": train(WOP, name) for name in priors
    }
    if variants:
        networks |= {
            "WOP, one pass": train(replace(WOP, target_passes=1)),
            "WOP, from the clone": train(WOP, above=clone),
        }
    return networks


def _policies(priors: Mapping[str, Act], values: Mapping[str, nn.Module]) -> dict[str, Act]:
    def dbcq(prior: Act, observations: Tensor) -> Tensor:
        return best_of(prior(observations), values["DBCQ's Q"](observations), DRAWS)

    policies = {f"p, {name}": prior for name, prior in priors.items()}
    policies |= {
        f"p, {name}, best action": greedy(prior) for name, prior in priors.items() if name != "uniform"
    }
    policies["Batch Q"] = greedy(values["Batch Q"])
    policies |= {f"DBCQ, {name}": partial(dbcq, prior) for name, prior in priors.items()}
    for name in [name for name in values if name.startswith("WOP")]:
        policies |= {name: sampled(values[name]), f"{name}, best action": greedy(values[name])}
    return policies


def table(
    by_buffer: Mapping[str, Mapping[str, Sequence[float | tuple[float, float]]]],
    *,
    head: str = "policy",
    digits: int = 0,
) -> str:
    """Markdown: a row per policy, a column per buffer.

    A pair is a numerator and a denominator: a figure is the sum of those over that of these.
    """
    lines = [f"| {head} | " + " | ".join(by_buffer) + " |", "|---|" + "---|" * len(by_buffer)]
    for name in next(iter(by_buffer.values())):
        cells = [_shown(interval(rows[name]), digits) for rows in by_buffer.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(figure: Estimate | None, digits: int) -> str:
    if figure is None:
        return ""
    value = f"{figure.value:.{digits}f}"
    return value if figure.low is None else f"{value} [{figure.low:.{digits}f}, {figure.high:.{digits}f}]"


def interval(values: Sequence[float | tuple[float, float]]) -> Estimate | None:
    """The mean over seeds, or the ratio of sums over them, with its 95 % bootstrap interval; no interval
    where all seeds are equal.
    """
    pairs = [value if isinstance(value, tuple) else (value, 1.0) for value in values]
    return estimate([Measure(np.array([top]), np.array([bottom])) for top, bottom in pairs])


def plot(by_buffer: Returns) -> Figure:
    """A panel per buffer: each policy's mean with its 95 % interval and its seeds as dots, its best action
    hollow, the behaviour policy as a line.
    """
    first_rows = next(iter(by_buffer.values()))
    names = [name for name in first_rows if name != "behaviour" and not name.endswith(", best action")]
    figure = Figure(figsize=(11, 1.4 + 0.28 * len(names)), layout="constrained")
    for axes, (buffer, rows) in zip(
        figure.subplots(1, len(by_buffer), sharey=True), by_buffer.items(), strict=True
    ):
        behaviour = interval(rows["behaviour"])
        axes.axvline(
            behaviour.value, color="#6b6b6b", linestyle="--", linewidth=1.2, label="behaviour policy"
        )
        if behaviour.low is not None:
            axes.axvspan(behaviour.low, behaviour.high, color="#6b6b6b", alpha=0.15, linewidth=0)
        for y, name in enumerate(names):
            colour = "#b5468c" if name.startswith("WOP") else "#4269d0"
            _mark(axes, y - 0.12, rows[name], colour, colour)
            if f"{name}, best action" in rows:
                _mark(axes, y + 0.18, rows[f"{name}, best action"], colour, "white")
        axes.set_title(buffer, loc="left", fontsize=10)
        axes.set_xlim(0, 1.04 * LIMIT)
        axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    figure.supxlabel(
        "mean return (steps of 200): the policy, and hollow its best action; dashed: what wrote the buffer",
        fontsize=9,
    )
    return figure


def _mark(axes: Axes, y: float, values: Sequence[float], colour: str, face: str) -> None:
    mean = interval(values)
    axes.plot(values, [y] * len(values), ".", color=colour, alpha=0.3, markersize=4, markeredgewidth=0)
    if mean.low is not None:
        axes.plot([mean.low, mean.high], [y, y], color=colour, linewidth=1.6)
    axes.plot(mean.value, y, "o", color=colour, markerfacecolor=face, markersize=5)
