"""Plots of episodes in environments as PNG bytes: predicted against true reward, step by step and episode by
episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rl_dialog.evaluation.control_episodes import ControlEpisode, correlation
from rl_dialog.evaluation.plots import COLOURS, as_png, plain


def episode_plot(episode: ControlEpisode, title: str) -> bytes:
    """Rewards of the steps above, their running sums below; true ones on the left axis, predicted ones, whose
    unit is another, on the right."""
    figure = Figure(figsize=(8, 4.6), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _both(upper, episode.rewards, episode.predicted, "reward")
    sums = None if episode.predicted is None else np.cumsum(episode.predicted, dtype=float)
    _both(lower, np.cumsum(episode.rewards, dtype=float), sums, "sum so far")
    step_correlation = None if episode.predicted is None else correlation(episode.rewards, episode.predicted)
    upper.set_title(
        title + ("" if step_correlation is None else f": correlation of the steps {step_correlation:.2f}"),
        loc="left",
        fontsize=10,
    )
    lower.set_xlabel("step", fontsize=9)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    return as_png(figure)


def returns_plot(episodes: Sequence[ControlEpisode], title: str) -> bytes:
    """The returns of episodes, true across and predicted up."""
    true, predicted = (
        np.array([getattr(each, name) for each in episodes]) for name in ("true_return", "predicted_return")
    )
    figure = Figure(figsize=(5, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(true, predicted, "o", color=COLOURS[0], alpha=0.6, markersize=5, markeredgewidth=0)
    return_correlation = correlation(true, predicted)
    axes.set_title(
        title + ("" if return_correlation is None else f": correlation {return_correlation:.2f}"),
        loc="left",
        fontsize=10,
    )
    axes.set_xlabel("true return", fontsize=9)
    axes.set_ylabel("predicted return", fontsize=9)
    plain(axes)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    return as_png(figure)


def _both(axes: Axes, true: np.ndarray, predicted: np.ndarray | None, name: str) -> None:
    steps = np.arange(1, len(true) + 1)
    sides = [(axes, "true", true)] + ([] if predicted is None else [(axes.twinx(), "predicted", predicted)])
    plain(axes)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    for (side, word, values), colour in zip(sides, COLOURS, strict=False):
        side.plot(
            steps, values, color=colour, linewidth=1.3, alpha=0.85, marker="" if len(steps) > 3 else "o"
        )
        side.set_ylabel(f"{word} {name}", color=colour, fontsize=9)
        side.tick_params(axis="y", labelcolor=colour, labelsize=8, length=3)
        side.spines["top"].set_visible(False)
