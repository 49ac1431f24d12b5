"""The report's plots as PNG bytes, drawn on objects of their own: no global state of matplotlib is touched
and no display is needed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from rl_dialog.evaluation.intervals import Estimate
from rl_dialog.evaluation.summary import Group, figure_of, shown

COLOURS = ("#4269d0", "#e0731d", "#3a9b5c", "#b5468c", "#7a6ad8", "#8a6d3b", "#2a9fb5", "#c23b3b")
GREY = "#6b6b6b"
CURVES = (
    "eval/return",
    "eval/nll",
    "eval/loss",
    "train/loss",
    "train/q_loss",
    "train/nll",
)  # learning curves in order of interest
MOST_PANELS = 4


def colours(groups: Sequence[Group]) -> dict[str, str]:
    """One colour per group name; `best` and `last` share it."""
    names = list(dict.fromkeys(group.name for group in groups))
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def interval_plot(
    groups: Sequence[Group], name: str, *, title: str, references: Mapping[str, Estimate] | None = None
) -> bytes | None:
    """One line per group: the estimate with its interval, its runs as dots, references as vertical lines.
    None when no group has the figure."""
    shown_groups = [group for group in groups if name in group.estimates]
    if not shown_groups:
        return None
    references = references or {}
    figure = Figure(
        figsize=(8, 1.3 + 0.42 * len(shown_groups) + 0.2 * len(references)), dpi=110, layout="constrained"
    )
    axes = figure.add_subplot()
    _intervals(axes, shown_groups, name, colours(groups))
    for number, (label, value) in enumerate(references.items()):
        style = ("--", "-.", ":")[number % 3]
        legend = f"{label}: {shown(replace(value, low=None), figure_of(name))}"
        axes.axvline(value.value, color=GREY, linestyle=style, linewidth=1.2, label=legend, zorder=1)
        if value.low is not None:
            axes.axvspan(value.low, value.high, color=GREY, alpha=0.12, linewidth=0, zorder=0)
    if references:
        figure.legend(loc="outside lower center", ncols=min(3, len(references)), frameon=False, fontsize=8)
    axes.set_title(title, loc="left", fontsize=10)
    return as_png(figure)


def panels(
    groups: Sequence[Group], titles: Mapping[str, str], *, same_scale: bool = False, zero: bool = False
) -> bytes | None:
    """Small interval plots side by side: figure -> its title. `same_scale`: they all measure the same;
    `zero`: differences, with a line at 0."""
    having = {
        name: title for name, title in titles.items() if any(name in group.estimates for group in groups)
    }
    if not having:
        return None
    columns = min(3, len(having))
    rows = -(-len(having) // columns)
    figure = Figure(
        figsize=(3.1 * columns + 0.8, rows * (0.9 + 0.3 * len(groups))), dpi=110, layout="constrained"
    )
    grid = np.atleast_1d(
        figure.subplots(rows, columns, sharex=same_scale, sharey=True, squeeze=False)
    ).ravel()
    for axes, (name, title) in zip(grid, having.items(), strict=False):
        _intervals(axes, groups, name, colours(groups))
        if zero:
            axes.axvline(0, color=GREY, linestyle="--", linewidth=1)
        axes.set_title(title, loc="left", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(labelbottom=True)  # sharing an axis would leave it out in all rows but the last
    for axes in grid[len(having) :]:
        axes.set_visible(False)
    return as_png(figure)


def trade_off(groups: Sequence[Group]) -> bytes | None:
    """KL to the prior against return: how far a policy went, and what for. None without both."""
    having = [group for group in groups if {"kl", "return"} <= set(group.estimates)]
    if not having:
        return None
    figure = Figure(figsize=(6.4, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    hue = colours(groups)
    for group in having:
        kl, total = group.estimates["kl"], group.estimates["return"]
        axes.errorbar(
            kl.value,
            total.value,
            xerr=_arms(kl),
            yerr=_arms(total),
            fmt="o",
            color=hue[group.name],
            markerfacecolor=_face(group, hue),
            capsize=2,
            label=group.label,
        )
        for run in group.runs:
            axes.plot(
                run.measures["kl"].value,
                run.measures["return"].value,
                ".",
                color=hue[group.name],
                alpha=0.4,
                markersize=4,
            )
    axes.set_xlabel("KL to the prior per token (nats)", fontsize=9)
    axes.set_ylabel("return per dialog", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    plain(axes)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    return as_png(figure)


def top_k_curves(groups: Sequence[Group], metrics: Sequence[str], count: int) -> bytes:
    """Metrics against k: in the order of generation (solid, with its interval) and in that of each policy's
    own critic (dashed)."""
    columns = min(2, len(metrics))
    rows = -(-len(metrics) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.8 * rows), dpi=110, layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    hue = colours(groups)
    for axes, metric in zip(grid, metrics, strict=False):
        for group in groups:
            way = group.runs[0].candidates.own_way
            _top_k(axes, group, f"top/{metric}", count, hue, label=group.label)
            _top_k(axes, group, f"ranked/{way}/{metric}", count, hue, label="")
        axes.set_title(metric, loc="left", fontsize=9)
        axes.set_xlabel("k, the first candidates that count", fontsize=8)
        axes.set_xticks(range(1, count + 1) if count <= 10 else [1, count // 2, count])
        if figure_of(f"top/{metric}@1").percent:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        plain(axes)
        axes.grid(color="#e6e6e6", linewidth=0.8)
    return _grid_as_png(figure, grid, used=len(metrics), labels=len(groups))


def _grid_as_png(figure: Figure, grid: np.ndarray, *, used: int, labels: int) -> bytes:
    """The first `used` of the axes, with one legend below."""
    for axes in grid[used:]:
        axes.set_visible(False)
    below = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
    figure.legend(*_legend(grid[:used]), ncols=min(4, labels), **below)
    return as_png(figure)


def _top_k(axes: Axes, group: Group, prefix: str, count: int, hue: Mapping[str, str], *, label: str) -> None:
    """One line of `top_k_curves`; the interval of unlabelled ones is left out, or two would hide each
    other."""
    estimates = {k: value for k in range(1, count + 1) if (value := group.estimates.get(f"{prefix}@{k}"))}
    style = {"linestyle": "-", "label": label} if label else {"linestyle": (0, (3, 2))}
    colour, values = hue[group.name], [value.value for value in estimates.values()]
    axes.plot(
        list(estimates),
        values,
        color=colour,
        marker="o",
        markersize=4,
        linewidth=1.6,
        markerfacecolor=_face(group, hue),
        **style,
    )
    bounded = {k: value for k, value in estimates.items() if value.low is not None}
    if label and bounded:
        axes.fill_between(
            list(bounded),
            [v.low for v in bounded.values()],
            [v.high for v in bounded.values()],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )


def histograms(columns: Mapping[str, np.ndarray]) -> bytes | None:
    """How often each value occurs, a small plot per column, counts on a logarithmic scale. None without
    columns."""
    if not columns:
        return None
    across = min(4, len(columns))
    down = -(-len(columns) // across)
    figure = Figure(figsize=(2.7 * across, 1.9 * down), dpi=110, layout="constrained")
    grid = np.atleast_1d(figure.subplots(down, across, squeeze=False)).ravel()
    for axes, (name, values) in zip(grid, columns.items(), strict=False):
        bins = min(40, max(5, len(np.unique(values))))
        axes.hist(values, bins=bins, range=_width(values), color=COLOURS[0], log=True)
        axes.set_title(name, loc="left", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_minor_formatter(NullFormatter())
        plain(axes)
    for axes in grid[len(columns) :]:
        axes.set_visible(False)
    return as_png(figure)


def _width(values: np.ndarray) -> tuple[float, float]:
    """From where to where a histogram goes; around values that differ by rounding only, which cannot be told
    apart."""
    low, high = float(values.min()), float(values.max())
    if not math.isclose(low, high, rel_tol=1e-9):
        return low, high
    half = max(0.5, 1e-6 * abs(low))
    return low - half, high + half


def distributions(columns: Mapping[str, Mapping[str, np.ndarray]]) -> bytes:
    """Steps of the share of dialogs up to each value: figure -> group -> its values; a panel per figure, a
    line per group."""
    figure = Figure(figsize=(4.2 * len(columns), 2.9), dpi=110, layout="constrained")
    for axes, (title, groups) in zip(
        figure.subplots(1, len(columns), squeeze=False)[0], columns.items(), strict=True
    ):
        for i, (name, values) in enumerate(groups.items()):
            axes.ecdf(values, color=COLOURS[i % len(COLOURS)], linewidth=1.6, label=name)
        axes.set_xlabel(title, fontsize=9)
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.grid(color="#e6e6e6", linewidth=0.8)
        plain(axes)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    return as_png(figure)


def heat_map(names: Sequence[str], values: Sequence[Sequence[float | None]]) -> bytes:
    """A matrix of correlations with its numbers; None is left white."""
    size = 1.6 + 0.42 * len(names)
    figure = Figure(figsize=(size + 1.2, size), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    matrix = np.array([[np.nan if value is None else value for value in row] for row in values])
    axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            if np.isfinite(value):
                axes.text(
                    j,
                    i,
                    f"{value:.2f}".replace("0.", "."),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white" if abs(value) > 0.6 else "black",
                )
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    return as_png(figure)


def learning_curves(folders: Mapping[str, Sequence[Path]]) -> bytes | None:
    """Group name -> run folders; their metrics.jsonl side by side, runs thin and their mean thick. None where
    nothing was logged."""
    curves = {
        name: [curve for folder in paths if (curve := read_curves(folder / "metrics.jsonl"))]
        for name, paths in folders.items()
    }
    keys = [key for key in CURVES if any(key in run for runs in curves.values() for run in runs)][
        :MOST_PANELS
    ]
    if not keys:
        return None
    columns = min(2, len(keys))
    rows = -(-len(keys) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.7 * rows), dpi=110, layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axes, key in zip(grid, keys, strict=False):
        for number, (name, runs) in enumerate(curves.items()):
            if run_curves := [run[key] for run in runs if key in run]:
                _curve(axes, run_curves, COLOURS[number % len(COLOURS)], name)
        axes.set_title(key, loc="left", fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        plain(axes)
        axes.grid(color="#e6e6e6", linewidth=0.8)
    return _grid_as_png(figure, grid, used=len(keys), labels=len(curves))


def read_curves(path: Path) -> dict[str, dict[int, float]]:
    """metrics.jsonl as metric -> {step: value}; a line cut by a killed run is left out, and so are values
    that are not finite."""
    curves: dict[str, dict[int, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            values: Any = json.loads(line)
        except ValueError:
            continue
        step = values.get("step") if isinstance(values, dict) else None
        for key, value in values.items() if isinstance(step, int) else ():
            if isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault(key, {})[step] = float(value)
    return curves


def _intervals(axes: Axes, groups: Sequence[Group], name: str, hue: Mapping[str, str]) -> None:
    for y, group in enumerate(groups):
        value = group.estimates.get(name)
        if value is None or not math.isfinite(value.value):
            continue
        runs = [run.measures[name].value for run in group.runs]
        if len(runs) > 1:
            axes.plot(runs, [y + 0.22] * len(runs), ".", color=hue[group.name], alpha=0.55, markersize=5)
        if value.low is not None:
            axes.plot(
                [value.low, value.high], [y, y], color=hue[group.name], linewidth=2.2, solid_capstyle="butt"
            )
        axes.plot(value.value, y, "o", color=hue[group.name], markersize=6, markerfacecolor=_face(group, hue))
    axes.set_yticks(range(len(groups)), [group.label for group in groups], fontsize=8)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    if figure_of(name).percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    plain(axes)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)


def _curve(axes: Axes, runs: Sequence[Mapping[int, float]], colour: str, label: str) -> None:
    several = len(runs) > 1
    marker = "o" if max(map(len, runs)) < 4 else ""  # a line of one point would not be seen
    for run in runs:
        style = {"alpha": 0.3, "linewidth": 0.9} if several else {"linewidth": 1.9, "label": label}
        axes.plot(list(run), list(run.values()), color=colour, marker=marker, markersize=3, **style)
    if several:
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        means = [np.mean([run[step] for run in runs]) for step in steps]
        axes.plot(steps, means, color=colour, linewidth=1.9, marker=marker, markersize=4, label=label)


def _legend(grid: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Every label once."""
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return list(handles.values()), list(handles)


def _face(group: Group, hue: Mapping[str, str]) -> str:
    """Hollow for the last checkpoint, so that it is told from the best one in print too."""
    return "white" if group.which == "last" else hue[group.name]


def _arms(value: Estimate) -> list[list[float]] | None:
    """Error bars of matplotlib; a percentile interval need not hold the estimate itself."""
    if value.low is None or value.high is None:
        return None
    return [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]


def plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def as_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def as_svg(figure: Figure) -> str:
    """The same figures give the same text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rl_dialog"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
