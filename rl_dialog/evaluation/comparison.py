"""The results table: what `evaluate` found on several tasks side by side, one row per method, as Markdown and
as a plot.

Nothing here measures: every figure comes from a task's `metrics.json`, every time from the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_dialog.data.files import write_json, write_text_atomically
from rl_dialog.errors import UserError
from rl_dialog.evaluation.aggregate import World, as_markdown, as_record, draw, scale_of
from rl_dialog.evaluation.intervals import Estimate
from rl_dialog.evaluation.plots import COLOURS, GREY, as_svg
from rl_dialog.evaluation.summary import figure_of, shown

BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"
FALLS = (
    "perplexity",
    "lm_perplexity",
    "kl",
    "kl_per_reply",
    "repeated",
    "rep_3",
    "empty",
    "unfinished",
)  # figures that are better when they are lower
BASELINE = "bc"


@dataclass(frozen=True)
class FinishedRun:
    """One run of the comparison: how long it took, or why it has no figures."""

    method: str
    seed: int
    seconds: float | None = (
        None  # None for a run that was killed and resumed: nobody watched the clock all the time
    )
    error: str = ""


@dataclass(frozen=True)
class ComparedTask:
    """A task's column: its figures (the first is the headline) and where they come from."""

    name: str
    title: str
    figures: tuple[str, ...]
    about: str  # what the task is, and what `best` means in it
    runs: tuple[FinishedRun, ...] = ()
    metrics: Mapping[str, Any] | None = None  # metrics.json; None where nothing was evaluated
    problem: str = ""  # why the whole task is missing
    searched: bool = False  # settings were chosen in it: it stands in no score over worlds

    def estimate(self, method: str, checkpoint: str, figure: str) -> Estimate | None:
        """The figure of a method at its `best` or `last` checkpoint; where those are the same one, of
        that."""
        group = self._group(method, checkpoint)
        return None if group is None else _estimate(group["figures"].get(figure))

    def difference(self, method: str, checkpoint: str, figure: str) -> Estimate | None:
        """The same minus that of bc, paired by unit."""
        group = self._group(method, checkpoint)
        change = None if group is None else self.metrics["differences"].get(group["label"])
        return None if change is None else _estimate(change["figures"].get(figure))

    def one_checkpoint(self, method: str) -> bool:
        """Are best and last the same checkpoint in every run?"""
        group = self._group(method, "last")
        return group is not None and group["which"] == ""

    def world(self, methods: Sequence[str]) -> World | None:
        """Its scores between the logs and the best; None where it has no such scale, or chose settings."""
        if self.searched or self.metrics is None or self.figures[0] != "return":
            return None
        values = {name: value["value"] for name, value in self.metrics["references"].items() if value}
        if (scale := scale_of(values)) is None:
            return None
        scores, above, below = {}, set(), set()
        for method in methods:
            runs = (self._group(method, "last") or {"runs": []})["runs"]
            returns = [run["figures"].get("return") for run in runs]
            scores[method] = [scale.score(value) for value in returns if value is not None]
            change = self.difference(method, "last", "return")
            if change and change.low is not None and change.high is not None:
                above |= {method} if change.low > 0 else set()
                below |= {method} if change.high < 0 else set()
        return World(self.title, scale, scores, frozenset(above), frozenset(below))

    def _group(self, method: str, checkpoint: str) -> Mapping[str, Any] | None:
        groups = self.metrics["groups"] if self.metrics else ()
        return next((g for g in groups if g["group"] == method and g["which"] in (checkpoint, "")), None)


def to_markdown(tasks: Sequence[ComparedTask], methods: Sequence[str], header: str) -> str:
    """The header line, the table and its notes."""
    columns = ["method"]
    for task in tasks:
        headline, *others = (figure_of(name).title for name in task.figures)
        columns += [f"{task.title}: {headline}, best", "last", *(f"{other}, last" for other in others)]
    columns += ["seeds", "minutes per run"]
    rows = [
        [f"`{method}`", *(cell for task in tasks for cell in _cells(task, method)), *_runs_of(tasks, method)]
        for method in methods
    ]
    rows += _references(tasks)
    table = [columns, ["---"] * len(columns), *rows]
    lines = [
        header,
        "",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table),
        "",
        *_notes(tasks),
    ]
    if worlds := worlds_of(tasks, methods):
        lines += ["", *as_markdown(worlds, methods)]
    return "\n".join(lines) + "\n"


def worlds_of(tasks: Sequence[ComparedTask], methods: Sequence[str]) -> list[World]:
    """Those that can be put together; none where there are fewer than two."""
    worlds = [world for task in tasks if (world := task.world(methods))]
    return worlds if len(worlds) > 1 else []


def _cells(task: ComparedTask, method: str) -> list[str]:
    """The headline at the best and the last checkpoint with its difference to bc, then the other figures at
    the last one."""
    headline, *other_figures = task.figures
    cells = []
    for checkpoint in ("best", "last"):
        value = shown(task.estimate(method, checkpoint, headline), figure_of(headline))
        if change := task.difference(method, checkpoint, headline):
            value += f"<br>Δ {shown(change, figure_of(headline), signed=True)}"
            value = f"**{value}**" if _better(change, headline) else value
        cells.append("as last" if checkpoint == "best" and task.one_checkpoint(method) else value)
    for name in other_figures:
        change = task.difference(method, "last", name) if name.startswith("return") else None
        value = shown(task.estimate(method, "last", name), figure_of(name))
        cells.append(value + (f"<br>Δ {shown(change, figure_of(name), signed=True)}" if change else ""))
    return cells


def _references(tasks: Sequence[ComparedTask]) -> list[list[str]]:
    """The policies that a task's environment brings along to say what a return means, below the methods."""
    rows = []
    for number, task in enumerate(tasks):
        before, after = (
            sum(1 + len(other.figures) for other in neighbours)
            for neighbours in (tasks[:number], tasks[number + 1 :])
        )
        for name, value in (task.metrics["references"] if task.metrics else {}).items():
            cells = ["", shown(_estimate(value), figure_of(task.figures[0])), *[""] * (len(task.figures) - 1)]
            rows.append([name, *[""] * before, *cells, *[""] * after, "", ""])
    return rows


def _better(change: Estimate, figure: str) -> bool:
    """Does the whole interval of the difference lie on the better side of 0?"""
    if change.low is None or change.high is None:
        return False
    return change.high < 0 if figure in FALLS else change.low > 0


def _runs_of(tasks: Sequence[ComparedTask], method: str) -> list[str]:
    """How many seeds have figures and what a run took, once where the tasks agree, else one number per
    task."""
    seeds, minutes = [], []
    for task in tasks:
        mine = [run for run in task.runs if run.method == method]
        seconds = [run.seconds for run in mine if run.seconds is not None]
        seeds.append(str(sum(not run.error for run in mine)))
        minutes.append(f"{sum(seconds) / len(seconds) / 60:.1f}" if seconds else "-")
    return [" / ".join(values if len(set(values)) > 1 else values[:1]) for values in (seeds, minutes)]


def _notes(tasks: Sequence[ComparedTask]) -> list[str]:
    """What the columns mean, then everything that is missing and why."""
    notes = [
        "Figures are means over seeds with 95 % bootstrap intervals over seeds and conversations, crossed. Δ "
        "is the difference to `bc` at the same kind of checkpoint (to its best where a method has only one), "
        "paired by conversation; bold where the interval of Δ lies on the better side of 0, which one in "
        "forty does by chance."
    ]
    notes += [f"{task.title}: {task.about}" for task in tasks if task.about]
    for task in tasks:
        if task.problem:
            notes.append(f"{task.title} is missing: {task.problem}")
        notes += [
            f"{task.title}, `{run.method}`, seed {run.seed} failed: {run.error}"
            for run in task.runs
            if run.error
        ]
    return [f"- {note}" for note in notes]


def write_comparison(
    out: Path,
    tasks: Sequence[ComparedTask],
    methods: Sequence[str],
    header: str,
    *,
    record: Mapping[str, Any],
    readme: str = "",
    picture: str = "",
) -> tuple[dict[str, str], str]:
    """compare.md, compare.json (the record and the tasks) and compare.svg in `out`, the table in `readme` too
    and the plot in `picture`.

    Returns the paths and the table.
    """
    table = to_markdown(tasks, methods, header)
    paths = {kind: out / f"compare.{kind}" for kind in ("md", "json", "svg")}
    write_text_atomically(paths["md"], table)
    found = {"methods": methods, "tasks": [asdict(task) for task in tasks]}
    write_json(
        paths["json"], {**record, **found, "all_worlds": as_record(worlds_of(tasks, methods), methods)}
    )
    if any(task.metrics for task in tasks):
        for path in (paths["svg"], *([Path(picture)] if picture else [])):
            write_text_atomically(path, to_svg(tasks, methods))
    if readme:
        text = Path(readme).read_text(encoding="utf-8")
        write_text_atomically(Path(readme), replace_table(text, table))
    return {kind: str(path) for kind, path in paths.items()}, table


def replace_table(text: str, table: str) -> str:
    """`text` with the table between its two marks. Raises UserError where the marks are missing, or not one
    pair in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise UserError(
            f"expected the line {BEGIN} and below it the line {END}, once each: put them where the table "
            "shall stand"
        )
    return f"{before}{BEGIN}\n{table}{END}{after}"


def to_svg(tasks: Sequence[ComparedTask], methods: Sequence[str]) -> str:
    """One panel per task, five beside each other, one line per method: best full, last hollow, each with its
    interval; the dashed line is the last checkpoint of bc."""
    having = [
        task for task in tasks if any(task.estimate(method, "last", task.figures[0]) for method in methods)
    ]
    if not having:
        raise UserError("expected at least one evaluated task to draw, got none")
    worlds = worlds_of(tasks, methods)
    panels = len(having) + bool(worlds)
    columns = min(5, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(1.6 + 3.4 * columns, rows * (1.3 + 0.36 * len(methods))), layout="constrained")
    all_axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for axes in all_axes[panels:]:
        axes.set_visible(False)
    del all_axes[panels:]
    if worlds:
        draw(all_axes[0], worlds, methods, COLOURS[1])
        _finish(all_axes.pop(0), methods)
    for axes, task in zip(all_axes, having, strict=True):
        _panel(axes, task, methods)
        _finish(axes, methods)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return as_svg(figure)


def _panel(axes: Axes, task: ComparedTask, methods: Sequence[str]) -> None:
    name = task.figures[0]
    baseline = task.estimate(BASELINE, "last", name)
    if baseline and math.isfinite(baseline.value):
        axes.axvline(
            baseline.value, color=GREY, linestyle="--", linewidth=1, zorder=1, label=f"{BASELINE}, last"
        )
    for checkpoint, shift, colour, face in (
        ("best", -0.16, COLOURS[0], COLOURS[0]),
        ("last", 0.16, COLOURS[1], "white"),
    ):
        label = {"best": "best checkpoint", "last": "last checkpoint"}[checkpoint]
        axes.plot([], [], "o-", color=colour, markerfacecolor=face, markersize=5, linewidth=2, label=label)
        for y, method in enumerate(methods):
            value = task.estimate(method, checkpoint, name)
            if (
                value is None
                or not math.isfinite(value.value)
                or (checkpoint == "best" and task.one_checkpoint(method))
            ):
                continue
            if value.low is not None and value.high is not None:
                axes.plot(
                    [value.low, value.high],
                    [y + shift, y + shift],
                    color=colour,
                    linewidth=2,
                    solid_capstyle="butt",
                    zorder=2,
                )
            axes.plot(value.value, y + shift, "o", color=colour, markerfacecolor=face, markersize=5, zorder=3)
    axes.set_title(task.title, loc="left", fontsize=10)
    axes.set_xlabel(figure_of(name).title, fontsize=9)
    if figure_of(name).percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def _finish(axes: Axes, methods: Sequence[str]) -> None:
    """What all panels share."""
    axes.set_yticks(range(len(methods)), list(methods), fontsize=9)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.tick_params(labelsize=8, length=3)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _estimate(value: Mapping[str, Any] | None) -> Estimate | None:
    """As `evaluate` wrote it: a figure without a number is not written at all, so null is an infinity, and
    only perplexities have one."""
    if value is None:
        return None
    estimate = Estimate(**value)
    return replace(estimate, value=math.inf) if estimate.value is None else estimate
