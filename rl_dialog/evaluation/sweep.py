"""The report of a sweep: which point of the search space is best, what each parameter does, what was paid for it."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rl_dialog.evaluation.document import Section, Table, write_document
from rl_dialog.evaluation.plots import COLOURS, GREY, as_png, plain
from rl_dialog.models.checkpoint import resolve, write_json

BEST = "best"  # folder with the winner's checkpoint
MOST_CURVES = 12


@dataclass(frozen=True)
class Trial:
    """One run: a point of the space with a seed."""

    point: str
    values: dict[str, Any]
    seed: int
    folder: str
    how: str  # ended, stopped (by halving), failed, left (no time)
    reports: list[dict[str, float]]
    error: str = ""


@dataclass(frozen=True)
class Estimate:
    """A figure of a point over its seeds; without an interval where it comes from training's own evaluations."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3g}" + (f" [{self.low:.3g}, {self.high:.3g}]" if self.low is not None else "")


@dataclass
class Ranked:
    """A point with all its trials."""

    name: str
    values: dict[str, Any]
    trials: list[Trial]
    figures: dict[str, dict[str, Estimate]]  # best, last -> figure -> estimate; empty where no trial of the point was evaluated
    headline: Estimate | None

    @property
    def ended(self) -> bool:
        return all(trial.how == "ended" for trial in self.trials)


def write_sweep_report(out: Path, sweep: Any, trials: Sequence[Trial], *, seconds: float, command: str) -> dict[str, Any]:
    """report.md, report.html, sweep.json and best/ in `out`; returns their paths and the winner."""
    ranked = rank(out, sweep, trials)
    winner = ranked[0] if ranked and ranked[0].headline else None
    sections = [_winner(sweep, winner, out, command), _ranking(sweep, ranked), _frontier(sweep, ranked), _effects(sweep, ranked)]
    sections += [_curves(sweep, ranked), _late(sweep, ranked), _cost(trials, seconds)]
    markdown, page = write_document(sweep.title, [section for section in sections if section], out)
    if winner:
        _copy_best(out, sweep, winner)
    points = [
        {"point": point.name, "values": point.values, "figures": _plain_figures(point), "trials": [_summary(t) for t in point.trials]}
        for point in ranked
    ]
    write_json(
        out / "sweep.json", {"command": command, "seconds": round(seconds, 1), "metric": sweep.metric, "figure": sweep.figure, "points": points}
    )
    headline = {"winner": winner.name, sweep.figure: winner.headline.value, BEST: str(out / BEST)} if winner else {"winner": None}
    how = {name: sum(trial.how == name for trial in trials) for name in ("ended", "stopped", "failed", "left")}
    return {"report": str(markdown), "html": str(page), "sweep": str(out / "sweep.json"), **headline, "trials": how, "seconds": round(seconds, 1)}


def rank(out: Path, sweep: Any, trials: Sequence[Trial]) -> list[Ranked]:
    """The points, best first: by the evaluation of their best checkpoints, and behind those by the last metric that training reported."""
    by_point: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_point[trial.point].append(trial)
    evaluated = _evaluated(out / "report" / "metrics.json")
    sign = 1 if sweep.mode == "max" else -1
    found = []
    for name, members in by_point.items():
        figures = evaluated.get(name, {}) if all(trial.how == "ended" for trial in members) else {}
        chosen = figures.get("best") or figures.get("last") or {}
        headline = chosen.get(sweep.figure) or _reported(sweep, members)
        found.append(Ranked(name, members[0].values, members, figures, headline))

    def order(point: Ranked) -> tuple[bool, float, float]:
        steps = max((trial.reports[-1]["step"] for trial in point.trials if trial.reports), default=0)
        value = sign * point.headline.value if point.headline else -math.inf
        return (not point.ended, -steps, -value) if not point.ended else (False, 0.0, -value)

    return sorted(found, key=order)


def _evaluated(path: Path) -> dict[str, dict[str, dict[str, Estimate]]]:
    """point -> best, last -> figure -> estimate, of `evaluate`'s metrics.json; where both are one checkpoint it is the last."""
    found: dict[str, dict[str, dict[str, Estimate]]] = defaultdict(dict)
    groups = json.loads(path.read_text(encoding="utf-8"))["groups"] if path.is_file() else []
    for group in groups:
        figures = {
            name: Estimate(row["value"], row.get("low"), row.get("high")) for name, row in group["figures"].items() if row["value"] is not None
        }
        found[group["group"]][group["which"] or "last"] = figures
    return found


def _reported(sweep: Any, trials: Sequence[Trial]) -> Estimate | None:
    last = [trial.reports[-1][sweep.metric] for trial in trials if trial.reports and sweep.metric in trial.reports[-1]]
    return Estimate(float(np.mean(last))) if last else None


def _winner(sweep: Any, winner: Ranked | None, out: Path, command: str) -> Section:
    text = [sweep.about, f"Command: {command}"]
    if winner is None:
        return Section("What is best", [*text, "No trial got as far as its first evaluation."])
    text.append(f"{winner.name}: {sweep.figure} {winner.headline}.")
    text.append(f"Its checkpoint is {out / BEST}: python -m pipelines.chat --checkpoint {out / BEST}")
    text.append(f"The same run again: python -m pipelines.train --config {out / BEST}/train.yaml --output_dir runs/again")
    return Section("What is best", text)


def _ranking(sweep: Any, ranked: Sequence[Ranked]) -> Section:
    parameters = list(dict.fromkeys(name for point in ranked for name in point.values))
    columns = ["", *parameters, f"{sweep.figure}, best", f"{sweep.figure}, last", "KL per token", "seeds", "steps", "how"]
    rows = []
    for number, point in enumerate(ranked, 1):
        best, last = (point.figures.get(which, {}).get(sweep.figure) for which in ("best", "last"))
        kl = (point.figures.get("best") or point.figures.get("last") or {}).get("kl")
        how = ", ".join(sorted({trial.how for trial in point.trials}))
        steps = max((int(trial.reports[-1]["step"]) for trial in point.trials if trial.reports), default=0)
        values = [_value(point.values.get(name)) for name in parameters]
        told = str(last) if last else f"({point.headline}, {sweep.metric})" if point.headline else "-"
        rows.append(
            [
                str(number),
                *values,
                str(best) if best else "as last" if last else "-",
                told,
                str(kl) if kl else "-",
                str(len(point.trials)),
                str(steps),
                how,
            ]
        )
    text = [
        "Evaluated on conversations that training never saw, with 95 % bootstrap intervals over seeds and conversations. Points whose trials did not "
        "all reach their end come last, with what training itself measured in brackets."
    ]
    errors = [f"{Path(trial.folder).name} failed: {trial.error}" for point in ranked for trial in point.trials if trial.error]
    return Section("Ranking", text, Table(columns, rows), notes=errors)


def _frontier(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """KL to the prior against the figure, a colour per method, the points that no other one beats at less KL joined by a line."""
    found = []
    for point in ranked:
        figures = point.figures.get("best") or point.figures.get("last") or {}
        if "kl" in figures and sweep.figure in figures:
            found.append((figures["kl"], figures[sweep.figure], point))
    if len(found) < 2:
        return None
    figure = Figure(figsize=(8.4, 5.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    hue = _hues([_kind(point) for _, _, point in found])
    for kl, value, point in found:
        axes.errorbar(
            kl.value, value.value, yerr=_arms(value), xerr=_arms(kl), fmt="o", color=hue[_kind(point)], markersize=5, linewidth=1, capsize=2
        )
        axes.annotate(_rest(point), (kl.value, value.value), textcoords="offset points", xytext=(5, 4), fontsize=7, color=GREY)
    sign = 1 if sweep.mode == "max" else -1
    line, reached = [], -math.inf
    for kl, value, _ in sorted(found, key=lambda entry: entry[0].value):
        if sign * value.value > reached:
            reached = sign * value.value
            line.append((kl.value, value.value))
    axes.plot(*zip(*line, strict=True), color=GREY, linestyle="--", linewidth=1, zorder=0)
    for kind, colour in hue.items():
        axes.plot([], [], "o", color=colour, label=kind)
    if min(kl.value for kl, _, _ in found) > 0 and max(kl.value for kl, _, _ in found) > 30 * min(kl.value for kl, _, _ in found):
        axes.set_xscale("log")
    axes.set(xlabel="KL to the prior per token", ylabel=sweep.figure)
    axes.legend(frameon=False, fontsize=8)
    plain(axes)
    text = ["How far a policy went from its prior, and what it got for that. Dashed: what no other point beats at less KL."]
    return Section("Reward against KL", text, plot=("frontier.png", as_png(figure)))


def _effects(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """A panel per parameter that varies: its values against the figure, a line per method where other things are equal on average."""
    known = [point for point in ranked if point.headline and point.ended]
    parameters = [name for name in dict.fromkeys(n for p in known for n in p.values) if len({_value(p.values.get(name)) for p in known}) > 1]
    if not parameters or len(known) < 2:
        return None
    columns = min(3, len(parameters))
    rows = -(-len(parameters) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows), dpi=110, layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False, sharey=True)).ravel()
    hue = _hues([_kind(point) for point in known])
    for axes, name in zip(grid, parameters, strict=False):
        values = sorted({point.values[name] for point in known if name in point.values}, key=lambda value: (isinstance(value, str), value))
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        for kind, colour in hue.items():
            here = [point for point in known if _kind(point) == kind and name in point.values]
            x = [point.values[name] if numeric else values.index(point.values[name]) for point in here]
            y = [point.headline.value for point in here]
            axes.plot(x, y, "o", color=colour, markersize=4, alpha=0.6)
            means = [(place, np.mean([b for a, b in zip(x, y, strict=True) if a == place])) for place in sorted(set(x))]
            if name != "method" and len(means) > 1:
                axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.2)
        if not numeric:
            axes.set_xticks(range(len(values)), [str(value) for value in values], fontsize=7)
        elif min(values) > 0 and max(values) > 30 * min(values):
            axes.set_xscale("log")
        axes.set_title(name, loc="left", fontsize=9)
        plain(axes)
    for axes in grid[len(parameters) :]:
        axes.set_visible(False)
    grid[0].set_ylabel(sweep.figure)
    text = ["Each dot a point of the space, lines through the mean at each value, a colour per method."]
    return Section("What each parameter does", text, plot=("effects.png", as_png(figure)))


def _curves(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """The metric over training of the best points: the mean over seeds with their range."""
    having = [point for point in ranked if any(len(trial.reports) > 1 for trial in point.trials)][:MOST_CURVES]
    if not having:
        return None
    figure = Figure(figsize=(8.4, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for number, point in enumerate(having):
        at: dict[float, list[float]] = defaultdict(list)
        for trial in point.trials:
            for row in trial.reports:
                at[row["step"]].append(row[sweep.metric])
        steps = sorted(at)
        colour, style = COLOURS[number % len(COLOURS)], ("-", "--", ":")[number // len(COLOURS) % 3]
        axes.plot(steps, [np.mean(at[step]) for step in steps], style, color=colour, linewidth=1.4, label=point.name)
        axes.fill_between(steps, [min(at[step]) for step in steps], [max(at[step]) for step in steps], color=colour, alpha=0.1, linewidth=0)
    axes.set(xlabel="step", ylabel=sweep.metric)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    plain(axes)
    text = [
        f"{sweep.metric} during training: mean over seeds, and their range."
        + (f" The {MOST_CURVES} best points." if len(ranked) > MOST_CURVES else "")
    ]
    return Section("Learning curves", text, plot=("curves.png", as_png(figure)))


def _late(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """The alarm: points that were better earlier than they ended."""
    sign = 1 if sweep.mode == "max" else -1
    notes = []
    for point in ranked:
        best, last = (point.figures.get(which, {}).get(sweep.figure) for which in ("best", "last"))
        if best and last and sign * (best.value - last.value) > (best.high - best.low) / 4:
            notes.append(f"{point.name}: {best} at its best checkpoint, {last} at the end")
    if not any(point.figures.get("best") for point in ranked):
        return None
    text = [
        "Points whose last checkpoint is worse than an earlier one by more than a quarter of the interval: they were trained too long, or on a "
        "reward that parts from the figure."
    ]
    return Section("Trained too long", text, notes=notes or ["none"])


def _cost(trials: Sequence[Trial], seconds: float) -> Section:
    rows = []
    for trial in trials:
        took = trial.reports[-1]["time"] - trial.reports[0]["time"] if len(trial.reports) > 1 else None
        steps = str(int(trial.reports[-1]["step"])) if trial.reports else "0"
        rows.append([Path(trial.folder).name, trial.how, steps, f"{took / 60:.1f}" if took is not None else "-"])
    return Section(
        "Cost", [f"{seconds / 60:.1f} minutes in all."], Table(["trial", "how", "steps", "minutes between its first and last evaluation"], rows)
    )


def _copy_best(out: Path, sweep: Any, winner: Ranked) -> None:
    """The best seed's best checkpoint, ready for serve and chat, with the config that makes it again."""
    sign = 1 if sweep.mode == "max" else -1
    reported = [trial for trial in winner.trials if trial.reports]
    chosen = max(reported, key=lambda trial: max(sign * row[sweep.metric] for row in trial.reports))
    shutil.rmtree(out / BEST, ignore_errors=True)
    shutil.copytree(resolve(chosen.folder), out / BEST, ignore=shutil.ignore_patterns("trainer"))
    shutil.copy(Path(chosen.folder) / "train.yaml", out / BEST / "train.yaml")
    if (Path(chosen.folder) / "prior").is_dir():  # the checkpoint says ../prior
        shutil.rmtree(out / "prior", ignore_errors=True)
        shutil.copytree(Path(chosen.folder) / "prior", out / "prior")


def _summary(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in asdict(trial).items() if key not in ("point", "values")}


def _plain_figures(point: Ranked) -> dict[str, Any]:
    return {which: {name: asdict(value) for name, value in figures.items()} for which, figures in point.figures.items()}


def _kind(point: Ranked) -> str:
    return str(point.values.get("method", "all points"))


def _rest(point: Ranked) -> str:
    return ",".join(f"{name.rpartition('.')[2]}={_value(value)}" for name, value in point.values.items() if name != "method")


def _hues(kinds: Sequence[str]) -> dict[str, str]:
    return {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(dict.fromkeys(kinds))}


def _arms(value: Estimate) -> list[list[float]] | None:
    return None if value.low is None else [[max(value.value - value.low, 0.0)], [max(value.high - value.value, 0.0)]]


def _value(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
