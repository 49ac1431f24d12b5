"""The plots of a sweep's report as PNG bytes: points of a search space, each a `Ranked` of sweep.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_dialog.evaluation.plots import COLOURS, GREY, as_png, plain

MOST_CURVES, MOST_PANELS = 12, 6


def value_text(value: Any) -> str:
    """A parameter's value in a table or a label."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def frontier(points: Sequence[Any], figure_name: str, sign: int) -> Figure:
    """KL to the prior against the figure, a colour per method, the points that no other one beats at less KL
    joined by a line.

    `sign` is -1 for a figure that is better when it is lower, else 1.
    """
    figure = Figure(figsize=(8.4, 5.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    hue, labelled = _hues(points), labels(points)
    entries = sorted(
        [(point.figures["kl"], point.figures[figure_name], point) for point in points],
        key=lambda entry: entry[0].value,
    )
    for kl, value, point in entries:
        arms = {"yerr": _arms(value), "xerr": _arms(kl)}
        axes.errorbar(
            kl.value,
            value.value,
            **arms,
            fmt="o",
            color=hue[point.kind],
            markersize=5,
            linewidth=1,
            capsize=2,
        )
        label = ", ".join(value_text(point.values[name]) for name in labelled if name in point.values)
        axes.annotate(
            label, (kl.value, value.value), textcoords="offset points", xytext=(5, 4), fontsize=7, color=GREY
        )
    line, reached = [], -math.inf
    for kl, value, _ in entries:
        if sign * value.value > reached:
            reached = sign * value.value
            line.append((kl.value, value.value))
    axes.plot(*zip(*line, strict=True), color=GREY, linestyle="--", linewidth=1, zorder=0)
    _set_scale(axes, [kl.value for kl, _, _ in entries])
    axes.set(xlabel="KL to the prior per token (nats)", ylabel=figure_name)
    _legend(axes, hue)
    plain(axes)
    return figure


def labels(points: Sequence[Any]) -> list[str]:
    """Parameters in which points of one colour differ."""
    names = dict.fromkeys(name for point in points for name in point.values if name != "method")
    return [name for name in names if len({value_text(point.values.get(name)) for point in points}) > 1]


def effects(points: Sequence[Any], parameters: Sequence[str], name: str) -> bytes:
    """A panel per parameter: its values against the figure, a line per method where other things are equal on
    average."""
    columns = min(3, len(parameters))
    rows = -(-len(parameters) // columns)
    figure = Figure(figsize=(3.6 * columns + 1.2, 2.9 * rows), dpi=110, layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False, sharey=True)).ravel()
    hue = _hues(points)
    for axes, parameter in zip(grid, parameters, strict=False):
        values, numeric = _values(points, parameter)
        for kind, colour in hue.items():
            kind_points = [point for point in points if point.kind == kind and parameter in point.values]
            x = [
                point.values[parameter] if numeric else values.index(value_text(point.values[parameter]))
                for point in kind_points
            ]
            y = [point.headline.value for point in kind_points]
            axes.plot(x, y, "o", color=colour, markersize=4, alpha=0.6)
            means = [
                (place, np.mean([b for a, b in zip(x, y, strict=True) if a == place]))
                for place in sorted(set(x))
            ]
            if parameter != "method" and len(means) > 1:
                axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.2)
        if numeric:
            _set_scale(axes, values)
        else:
            axes.set_xticks(range(len(values)), values, fontsize=7)
        axes.set_title(parameter, loc="left", fontsize=9)
        plain(axes)
    for axes in grid[len(parameters) :]:
        axes.set_visible(False)
    grid[0].set_ylabel(name)
    if len(hue) > 1:
        handles = [grid[0].plot([], [], "o", color=colour, label=kind)[0] for kind, colour in hue.items()]
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return as_png(figure)


def _heights(points: Sequence[Any], parameter: str) -> tuple[Sequence[Any], dict[str, float]]:
    """The values of a parameter, and where each stands on its axis from 0 to 1."""
    values, numeric = _values(points, parameter)
    log = numeric and _spans_decades(values)
    spread = [(math.log(v) if log else v) for v in values] if numeric else list(range(len(values)))
    low, size = min(spread), (max(spread) - min(spread)) or 1.0
    return values, {value_text(v): (s - low) / size for v, s in zip(values, spread, strict=True)}


def parallel(points: Sequence[Any], parameters: Sequence[str], name: str) -> bytes:
    """Parallel coordinates: an axis per parameter and one for the figure, a line per point, coloured by the
    figure."""
    figure = Figure(figsize=(2.2 * (len(parameters) + 1), 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    reached = np.asarray([point.headline.value for point in points])
    low, size = reached.min(), np.ptp(reached) or 1.0
    places = np.empty((len(points), len(parameters) + 1))
    places[:, -1] = (reached - low) / size
    for column, parameter in enumerate(parameters):
        values, heights = _heights(points, parameter)
        cells = [point.values.get(parameter) for point in points]
        places[:, column] = [
            heights[value_text(value)] if value is not None else np.nan for value in cells
        ]  # a gap where another method has no such one
        tick_values = values if len(values) <= 8 else [values[0], values[-1]]
        for value in tick_values:
            axes.annotate(
                value_text(value),
                (column, heights[value_text(value)]),
                textcoords="offset points",
                xytext=(4, 2),
                fontsize=7,
                color=GREY,
            )
    for height in np.linspace(0, np.ptp(reached) / size, 5):
        text, tick = f"{low + height * size:.3g}", (len(parameters), height)
        axes.annotate(text, tick, textcoords="offset points", xytext=(4, 2), fontsize=7, color=GREY)
    colour = colormaps["viridis"]
    for row in np.argsort(reached):  # the best on top
        axes.plot(
            places[row], "o-", color=colour(0.95 * places[row, -1]), linewidth=1.3, markersize=3, alpha=0.85
        )
    axes.vlines(range(len(parameters) + 1), 0, 1, color=GREY, linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(parameters) + 1), [*parameters, name], fontsize=8)
    axes.set_xlim(-0.15, len(parameters) + 0.4)
    axes.set_yticks([])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    return as_png(figure)


def curves(points: Sequence[Any], metric: str) -> bytes:
    """The metric over training: the mean over seeds with their range."""
    figure = Figure(figsize=(8.4, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for number, point in enumerate(points):
        by_step: dict[float, list[float]] = defaultdict(list)
        for trial in point.trials:
            for row in trial.with_metric(metric):
                by_step[row["step"]].append(row[metric])
        steps = sorted(by_step)
        colour, style = COLOURS[number % len(COLOURS)], ("-", "--", ":")[number // len(COLOURS) % 3]
        axes.plot(
            steps,
            [np.mean(by_step[step]) for step in steps],
            style,
            color=colour,
            linewidth=1.4,
            label=point.name,
        )
        axes.fill_between(
            steps,
            [min(by_step[step]) for step in steps],
            [max(by_step[step]) for step in steps],
            color=colour,
            alpha=0.1,
            linewidth=0,
        )
    axes.set(xlabel="step", ylabel=metric)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    plain(axes)
    return as_png(figure)


def against_held_out(
    changes: Sequence[tuple[Any, float, Mapping[str, Any]]], titles: Mapping[str, str]
) -> bytes | None:
    """Change of the trained-on reward against those of others, a panel per other reward; None where there is
    none."""
    names = list(titles)[:MOST_PANELS]
    if not names:
        return None
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.6 * columns + 1.2, 2.9 * rows), dpi=110, layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    hue = _hues([point for point, _, _ in changes])
    for axes, name in zip(grid, names, strict=False):
        for point, trained, held_out in changes:
            if change := held_out.get(name):
                axes.errorbar(
                    trained,
                    change.value,
                    yerr=_arms(change),
                    fmt="o",
                    color=hue[point.kind],
                    markersize=4,
                    linewidth=1,
                    capsize=2,
                )
        axes.axhline(0, color=GREY, linewidth=0.8, linestyle="--")
        axes.axvline(0, color=GREY, linewidth=0.8, linestyle="--")
        axes.set_title(titles[name], loc="left", fontsize=9)
        plain(axes)
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel("change of the reward that was trained on, per reply", fontsize=9)
    return as_png(figure)


def _values(points: Sequence[Any], parameter: str) -> tuple[list[Any], bool]:
    """All of a parameter, sorted, and whether they are numbers; else they are labels."""
    values = [point.values[parameter] for point in points if point.values.get(parameter) is not None]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return (sorted(set(values)) if numeric else sorted(set(map(value_text, values)))), numeric


def _set_scale(axes: Axes, values: Sequence[float]) -> None:
    if _spans_decades(values):
        axes.set_xscale("log")


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > 30 * min(values)


def _legend(axes: Axes, hue: Mapping[str, str]) -> None:
    for kind, colour in hue.items():
        axes.plot([], [], "o", color=colour, label=kind)
    axes.legend(frameon=False, fontsize=8)


def _hues(points: Sequence[Any]) -> dict[str, str]:
    kinds = dict.fromkeys(point.kind for point in points)
    return {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}


def _arms(value: Any) -> list[list[float]] | None:
    return (
        None
        if value.low is None
        else [[max(value.value - value.low, 0.0)], [max(value.high - value.value, 0.0)]]
    )
