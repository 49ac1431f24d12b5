"""The report of a sweep: which point of the search space is best, what each parameter does, what was paid for
it. `sweep_plots.py` draws it."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.data.files import write_atomically, write_json
from rl_dialog.errors import UserError
from rl_dialog.evaluation import sweep_plots as plots
from rl_dialog.evaluation.comparison import FALLS
from rl_dialog.evaluation.document import Column, Sample, Section, Table, write_document
from rl_dialog.evaluation.plots import as_png, as_svg
from rl_dialog.models.checkpoint import resolve

BEST = "best"  # folder with the winner's checkpoint
TENSORBOARD = "tensorboard"  # folder with the curves and the HParams of every trial


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
    metrics: str = ""  # metrics.json of the evaluation that it took part in
    rewards: dict[str, float] = field(default_factory=dict)  # weights of the rewards that it was trained on
    scales: dict[str, float] = field(default_factory=dict)  # what the normalisers of these divide by
    chat: str = ""  # flags with which `chat` answers as the evaluation did
    verb: str = "train"  # what it is a run of

    def with_metric(self, metric: str) -> list[dict[str, float]]:
        """The reports that have it: no return is measured where every episode failed."""
        return [row for row in self.reports if metric in row]


@dataclass(frozen=True)
class Estimate:
    """A figure of a point over its seeds; without an interval where it comes from training's own
    evaluations."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3g}" + (f" [{self.low:.3g}, {self.high:.3g}]" if self.low is not None else "")


@dataclass
class Ranked:
    """A point with all its trials. Figures are of its best checkpoints, else of its last ones, and empty
    where no trial was evaluated."""

    name: str
    values: dict[str, Any]
    trials: list[Trial]
    best: dict[str, Estimate]
    last: dict[str, Estimate]
    changes: dict[str, Estimate]  # figure -> difference to the start, of the best checkpoints
    headline: Estimate | None  # the sweep's figure; where the point has none, what training itself measured
    ended: bool  # all seeds

    @property
    def figures(self) -> dict[str, Estimate]:
        return self.best or self.last

    @property
    def kind(self) -> str:
        """What it is drawn in one colour with."""
        return str(self.values.get("method", "all points"))


def write_sweep_report(
    out: Path, sweep: Any, trials: Sequence[Trial], *, seconds: float, command: str
) -> dict[str, Any]:
    """report.md, report.html, sweep.json, tensorboard/ and best/ in `out`; returns their paths and the
    winner."""
    ranked = rank(sweep, trials)
    winner = ranked[0] if ranked and ranked[0].headline else None
    best_trial = _best_trial(sweep, winner) if winner else None
    measured = headline_of(sweep, ranked)
    runs = list({trial.folder: trial for trial in trials}.values())
    parts = (_ranking, _frontier, _effects, _parallel, _curves, _over_optimised, _warned, _late, _samples)
    sections = [_winner(sweep, ranked, best_trial, out, command), *(part(sweep, ranked) for part in parts)]
    sections.append(_cost(runs, seconds))
    markdown, page = write_document(sweep.title, [section for section in sections if section], out)
    _write_tensorboard(out / TENSORBOARD, sweep, ranked)
    if best_trial:
        _copy_best(out, best_trial)
    record = {"command": command, "seconds": round(seconds, 1)}
    record |= {"metric": sweep.metric, "figure": sweep.figure}
    write_json(out / "sweep.json", record | {"points": [_as_json(point) for point in ranked]})
    headline = (
        {"winner": winner.name, measured: winner.headline.value, BEST: str(out / BEST)}
        if winner
        else {"winner": None}
    )
    outcomes = {
        name: sum(trial.how == name for trial in runs) for name in ("ended", "stopped", "failed", "left")
    }
    return {
        "report": str(markdown),
        "html": str(page),
        "sweep": str(out / "sweep.json"),
        **headline,
        "trials": outcomes,
        "seconds": round(seconds, 1),
    }


def rank(sweep: Any, trials: Sequence[Trial]) -> list[Ranked]:
    """The points, best first: by the evaluation of their best checkpoints, and behind those by the last
    metric that training reported.

    Raises UserError for a figure that the evaluation did not measure.
    """
    by_point: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_point[trial.point].append(trial)
    evaluations = {path: _read_evaluation(Path(path)) for path in {trial.metrics for trial in trials} if path}
    figures = {
        name
        for groups in evaluations.values()
        for best, last, _ in groups.values()
        for name in (*best, *last)
    }
    if figures and sweep.figure not in figures:
        raise UserError(
            f"figure: expected one that the evaluation measured, {', '.join(sorted(figures))}, got "
            f"{sweep.figure!r}"
        )
    points = []
    for name, members in by_point.items():
        best, last, changes = {}, {}, {}
        ended = len(members) == len(sweep.seeds) and all(trial.how == "ended" for trial in members)
        if ended and members[0].metrics:
            best, last, changes = evaluations[members[0].metrics].get(_group(members[0]), ({}, {}, {}))
            changes = changes if sweep.start else {}  # else they are differences to another point
        headline = (best or last).get(sweep.figure) or _reported(sweep, members)
        points.append(Ranked(name, members[0].values, members, best, last, changes, headline, ended))

    return sorted(points, key=lambda point: _place(point, sweep))


def _place(point: Ranked, sweep: Any) -> tuple[bool, bool, float, float]:
    """What the points are ordered by."""
    evaluated = sweep.figure in point.figures
    steps = max((trial.reports[-1]["step"] for trial in point.trials if trial.reports), default=0)
    sign = _sign(sweep) if evaluated else 1 if sweep.mode == "max" else -1
    return (
        not point.ended,
        not evaluated,
        0 if point.ended else -steps,
        -sign * point.headline.value if point.headline else math.inf,
    )


def headline_of(sweep: Any, ranked: Sequence[Ranked]) -> str:
    """What the ranking is by: the evaluation's figure, or where nothing was evaluated the metric of
    training's own."""
    return sweep.figure if any(sweep.figure in point.figures for point in ranked) else sweep.metric


def _sign(sweep: Any) -> int:
    """1 for figures that are better when they are higher, else -1."""
    return -1 if sweep.figure in FALLS else 1


def _group(trial: Trial) -> str:
    """What `evaluate` calls the runs of a point: their folders' name without the seed."""
    return Path(trial.folder).name.removesuffix(f"-seed{trial.seed}")


def _read_evaluation(
    path: Path,
) -> dict[str, tuple[dict[str, Estimate], dict[str, Estimate], dict[str, Estimate]]]:
    """group -> figures of its best checkpoints, of its last ones, and what the best differ in from the
    baseline."""
    metrics = json.loads(path.read_text(encoding="utf-8"))

    def estimates(rows: Mapping[str, Any]) -> dict[str, Estimate]:
        return {
            name: Estimate(row["value"], row.get("low"), row.get("high"))
            for name, row in rows.items()
            if row["value"] is not None
        }

    by_group: dict[str, tuple[dict, dict, dict]] = defaultdict(lambda: ({}, {}, {}))
    for group in metrics["groups"]:
        best, last, changes = by_group[group["group"]]
        (best if group["which"] == "best" else last).update(
            estimates(group["figures"])
        )  # `which` is empty where both are one checkpoint
        if group["which"] != "last":
            changes.update(estimates(metrics["differences"].get(group["label"], {}).get("figures", {})))
    return by_group


def _reported(sweep: Any, trials: Sequence[Trial]) -> Estimate | None:
    measured = [rows for trial in trials if (rows := trial.with_metric(sweep.metric))]
    last_values = [rows[-1][sweep.metric] for rows in measured]
    return Estimate(float(np.mean(last_values))) if last_values else None


def _best_trial(sweep: Any, winner: Ranked) -> Trial | None:
    """The seed whose best checkpoint training itself found best."""
    sign = 1 if sweep.mode == "max" else -1
    reported = [trial for trial in winner.trials if trial.reports]

    def best_value(trial: Trial) -> float:
        values = (sign * row[sweep.metric] for row in trial.with_metric(sweep.metric))
        return max(values, default=-math.inf)

    return max(reported, key=best_value, default=None)


def _winner(
    sweep: Any, ranked: Sequence[Ranked], best_trial: Trial | None, out: Path, command: str
) -> Section:
    text, commands = [sweep.about], [f"{command}  # this sweep"]
    if best_trial is None:
        return Section(
            "What is best", [*text, "No trial got as far as its first evaluation."], commands=commands
        )
    winner, *others = (point for point in ranked if point.ended or point is ranked[0])
    measured = headline_of(sweep, ranked)
    gain = winner.changes.get(sweep.figure)
    difference = (
        f", {gain.value:+.3g} [{gain.low:.3g}, {gain.high:.3g}] over the bc that it started from"
        if gain and gain.low is not None
        else ""
    )
    text.append(f"{winner.name}: {measured} {winner.headline}{difference}.")
    if close := [point.name for point in others if _overlap(winner.headline, point.headline)]:
        close_names = "; ".join(close[:5]) + (f"; and {len(close) - 5} more" if len(close) > 5 else "")
        text.append(
            f"The best of {len(others) + 1} is partly lucky, and the intervals of {len(close)} others overlap"
            f" with its own: {close_names}."
        )
    commands.append(
        " ".join(
            [
                "python -m pipelines.chat --checkpoint",
                shlex.quote(str(out / BEST)),
                *best_trial.chat.split(),
                f" # its checkpoint, of seed {best_trial.seed}",
            ]
        )
    )
    commands.append(
        f"python -m pipelines.{best_trial.verb} --config "
        f"{shlex.quote(f'{out / BEST}/{best_trial.verb}.yaml')} --output_dir runs/again  # the same run"
    )
    return Section("What is best", text, commands=commands)


def _overlap(ours: Estimate | None, theirs: Estimate | None) -> bool:
    if ours is None or theirs is None or ours.low is None or theirs.low is None:
        return False
    return ours.low <= theirs.high and theirs.low <= ours.high


def _ranking(sweep: Any, ranked: Sequence[Ranked]) -> Section:
    parameters = list(dict.fromkeys(name for point in ranked for name in point.values))
    columns = ["", *parameters, f"{sweep.figure}, best", f"{sweep.figure}, last"]
    columns += ["over its start", "KL per token", "seeds", "steps", "how"]
    rows = [
        [
            str(number),
            *(plots.value_text(point.values.get(name)) for name in parameters),
            *_cells(point, sweep),
        ]
        for number, point in enumerate(ranked, 1)
    ]
    over = (
        "seeds and conversations"
        if len(sweep.seeds) > 1
        else "conversations; one seed says nothing about others"
    )
    text = [
        f"Evaluated on conversations that training never saw, with 95 % bootstrap intervals over {over}; what"
        " a point gains over its start is paired by conversation. Points whose trials did not all reach "
        "their end come last, with what training itself measured in brackets; halving stops them on their "
        "first seed."
    ]
    errors = [
        f"{Path(trial.folder).name} failed: {trial.error}"
        for point in ranked
        for trial in point.trials
        if trial.error
    ]
    return Section("Ranking", text, Table(columns, rows), notes=errors)


def _cells(point: Ranked, sweep: Any) -> list[str]:
    """A line of the ranking behind the point's values."""
    best, last, change = (figures.get(sweep.figure) for figures in (point.best, point.last, point.changes))
    steps = max((int(trial.reports[-1]["step"]) for trial in point.trials if trial.reports), default=0)
    cells = [
        str(best) if best else "as last" if last else "-",
        str(last) if last else f"({point.headline}, {sweep.metric})" if point.headline else "-",
    ]
    cells += [str(change or "-"), str(point.figures.get("kl", "-")), str(len(point.trials)), str(steps)]
    return [*cells, ", ".join(sorted({trial.how for trial in point.trials}))]


def frontier_as_svg(sweep: Any, trials: Sequence[Trial]) -> str:
    """Reward against KL for a README. Raises UserError where fewer than two points were evaluated."""
    points = _with_kl(sweep, rank(sweep, trials))
    if len(points) < 2:
        raise UserError(
            "--picture: expected at least two evaluated points with a KL to the prior to draw, got "
            f"{len(points)}"
        )
    return as_svg(plots.frontier(points, sweep.figure, _sign(sweep)))


def _with_kl(sweep: Any, ranked: Sequence[Ranked]) -> list[Ranked]:
    return [point for point in ranked if {"kl", sweep.figure} <= point.figures.keys()]


def _frontier(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    points = _with_kl(sweep, ranked)
    if len(points) < 2:
        return None
    text = [
        "How far a policy went from its prior, and what it got for that. Dashed: what no other point beats at"
        " less KL."
    ]
    text += [f"Labels: {', '.join(names)}."] if (names := plots.labels(points)) else []
    return Section(
        "Reward against KL",
        text,
        plot=("frontier.png", as_png(plots.frontier(points, sweep.figure, _sign(sweep)))),
    )


def _effects(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    points, parameters = _comparable(sweep, ranked)
    if not parameters:
        return None
    text = ["Each dot a point of the space, lines through the mean at each value, a colour per method."]
    return Section(
        "What each parameter does",
        text,
        plot=("effects.png", plots.effects(points, parameters, headline_of(sweep, ranked))),
    )


def _parallel(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    points, parameters = _comparable(sweep, ranked)
    if len(parameters) < 2:
        return None
    measured = headline_of(sweep, ranked)
    text = [
        f"A line per point of the space, from its parameters to its {measured} on the right, which also gives"
        " the colour."
    ]
    return Section(
        "All parameters together", text, plot=("parallel.png", plots.parallel(points, parameters, measured))
    )


def _comparable(sweep: Any, ranked: Sequence[Ranked]) -> tuple[list[Ranked], list[str]]:
    """Points that reached their end and were measured in the same way, and the parameters in which they
    differ."""
    evaluated = headline_of(sweep, ranked) == sweep.figure
    points = [
        point
        for point in ranked
        if point.headline and point.ended and (sweep.figure in point.figures or not evaluated)
    ]
    names = dict.fromkeys(name for point in points for name in point.values)
    return points, [
        name for name in names if len({plots.value_text(point.values.get(name)) for point in points}) > 1
    ]


def _curves(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    points = [point for point in ranked if any(len(trial.reports) > 1 for trial in point.trials)]
    if not points:
        return None
    most = plots.MOST_CURVES
    text = [
        f"{sweep.metric} during training: mean over seeds, and their range."
        + (f" The {most} best points." if len(points) > most else "")
    ]
    return Section("Learning curves", text, plot=("curves.png", plots.curves(points[:most], sweep.metric)))


def _over_optimised(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """The reward that was trained on against those that were not, each as what changed from the start."""
    changes = []
    for point in ranked:
        trained = _trained_change(point)
        if trained is not None:
            held_out = {n: change for n, change in point.changes.items() if _is_held_out(n, point, sweep)}
            changes.append((point, trained, held_out))
    if not changes:
        return None
    rows, alarms = [], []
    for point, trained, held_out in changes:
        fell = [
            f"{_title(name)} {change}"
            for name, change in held_out.items()
            if change.high is not None and change.high < 0
        ]
        mix = " + ".join(f"{weight:g} {name}" for name, weight in point.trials[0].rewards.items())
        change = str(point.changes.get(sweep.figure, "-"))
        rows.append([point.name, mix, f"{trained:+.3g}", change, ", ".join(fell) or "-"])
        if trained > 0 and fell:
            rose = f"{point.name}: the reward that it was trained on rose by {trained:.3g}"
            alarms.append(f"{rose}, but not {', '.join(fell)}")
    looked_at = sum(len(held_out) for *_, held_out in changes)
    columns = ["point", "trained on", "its change", f"change of {sweep.figure}", "what fell for certain"]
    text = [
        "Rewards of generated replies, as differences to the bc that the trials started from. A trained-on "
        "reward that rises while others fall below 0 with their whole interval is the sign of "
        "over-optimisation: the policy found what the reward pays for and not what it was meant for. Of "
        f"{looked_at} differences one in forty would fall so by chance."
    ]
    titles = {name: _title(name) for *_, held_out in changes for name in held_out}
    picture = plots.against_held_out(changes, titles)
    more = {
        "notes": alarms or ["No point is suspect."],
        "plot": picture and ("held_out.png", picture),
    }
    return Section("Reward against held-out rewards", text, Table(columns, rows), **more)


def _warned(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """Trials of `online` that earned more of what they learned from while the world's own reward fell."""
    judged = [
        (Path(trial.folder).name, [int(r["step"]) for r in trial.reports if r.get("eval/over_optimised")])
        for point in ranked
        for trial in point.trials
        if any("eval/over_optimised" in row for row in trial.reports)
    ]
    if not judged:
        return None
    text = [
        "Trials that learned from rewards in a world whose own reward is known. Listed are those whose true "
        "return fell from its best by more than chance while the return that they learned from rose, with "
        "the step at which that was first seen."
    ]
    notes = [f"{name}: step {steps[0]}" for name, steps in judged if steps]
    return Section("Over-optimised while it was watched", text, notes=notes or ["none"])


def _trained_change(point: Ranked) -> float | None:
    """Of the weighted, normalised rewards per reply, as far as they were measured on generated replies."""
    trial = point.trials[0]
    measured = {
        name: weight / trial.scales.get(name, 1.0)
        for name, weight in trial.rewards.items()
        if f"reward/{name}" in point.changes
    }
    return (
        sum(weight * point.changes[f"reward/{name}"].value for name, weight in measured.items())
        if measured
        else None
    )


def _is_held_out(name: str, point: Ranked, sweep: Any) -> bool:
    is_untrained = name.startswith("reward/") and name.removeprefix("reward/") not in point.trials[0].rewards
    return is_untrained or (name == sweep.figure == "return" and "logged" not in point.trials[0].rewards)


def _title(name: str) -> str:
    return name.removeprefix("reward/")


def _late(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """Points that were better earlier than they ended."""
    if not any(point.best for point in ranked):
        return None
    notes = []
    for point in ranked:
        best, last = point.best.get(sweep.figure), point.last.get(sweep.figure)
        if (
            best
            and last
            and best.low is not None
            and _sign(sweep) * (best.value - last.value) > (best.high - best.low) / 4
        ):
            notes.append(f"{point.name}: {best} at its best checkpoint, {last} at the end")
    text = [
        "Points whose last checkpoint is worse than an earlier one by more than a quarter of the interval: "
        "they were trained too long, or on a reward that parts from the figure."
    ]
    return Section("Trained too long", text, notes=notes or ["none"])


def _samples(sweep: Any, ranked: Sequence[Ranked]) -> Section | None:
    """The same conversation with the best point, the worst one, and the start: what `evaluate` showed of
    them."""
    ended = [point for point in ranked if point.ended and point.figures]
    if not ended:
        return None
    compared = {"best": ended[0]} | ({"worst": ended[-1]} if len(ended) > 1 else {})
    columns: dict[str, list[Column]] = defaultdict(list)
    for rank_name, point in compared.items():
        path = Path(point.trials[0].metrics).with_name("samples.json")
        for sample in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ():
            mine = [
                c
                for c in sample["columns"]
                if c["checkpoint"] and Path(c["checkpoint"]).parent == Path(point.trials[0].folder)
            ]
            columns[sample["title"]] += [Column(f"{rank_name}: {c['title']}", c["lines"]) for c in mine[:1]]
    samples = [Sample(title, members) for title, members in columns.items() if members]
    text = ["The first seed of each, with the same conversation partner."]
    return Section("Samples of the best and the worst", text, samples=samples) if samples else None


def _cost(trials: Sequence[Trial], seconds: float) -> Section:
    rows = []
    for trial in trials:
        took = trial.reports[-1]["time"] - trial.reports[0]["time"] if len(trial.reports) > 1 else None
        steps = str(int(trial.reports[-1]["step"])) if trial.reports else "0"
        rows.append(
            [Path(trial.folder).name, trial.how, steps, f"{took / 60:.1f}" if took is not None else "-"]
        )
    text = [f"{seconds / 60:.1f} minutes in all, of the last start of this sweep."]
    return Section(
        "Cost", text, Table(["trial", "how", "steps", "minutes between its first and last evaluation"], rows)
    )


def _write_tensorboard(directory: Path, sweep: Any, ranked: Sequence[Ranked]) -> None:
    """A run per trial with its evaluations during training, and what the HParams tab compares: parameters,
    seed, figures."""
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(directory, ignore_errors=True)
    for point in ranked:
        for trial in point.trials:
            if not trial.reports:
                continue
            with SummaryWriter(str(directory / f"{point.name}-seed{trial.seed}")) as board:
                for row in trial.reports:
                    for name, value in row.items():
                        if name not in ("step", "time"):
                            board.add_scalar(name, value, int(row["step"]))
                values = {
                    name: value if isinstance(value, bool | int | float) else str(value)
                    for name, value in trial.values.items()
                }
                figures = {
                    f"evaluation/{name}": estimate.value
                    for name, estimate in point.figures.items()
                    if name in (sweep.figure, "kl")
                }
                measured = trial.with_metric(sweep.metric)[-1:]
                last_metric = {f"last/{sweep.metric}": row[sweep.metric] for row in measured}
                board.add_hparams(
                    values | {"seed": trial.seed, "how": trial.how}, figures | last_metric, run_name="."
                )


def _copy_best(out: Path, best_trial: Trial) -> None:
    """The best seed's best checkpoint, ready for serve and chat, with the config that makes it again."""
    folder = Path(best_trial.folder)

    def fill(best: Path) -> None:
        without = shutil.ignore_patterns("trainer")
        shutil.copytree(resolve(folder), best, ignore=without, dirs_exist_ok=True)
        shutil.copy(folder / f"{best_trial.verb}.yaml", best)

    write_atomically(out / BEST, fill)
    if (folder / "prior").is_dir():  # the checkpoint says ../prior
        write_atomically(
            out / "prior", lambda prior: shutil.copytree(folder / "prior", prior, dirs_exist_ok=True)
        )


def _as_json(point: Ranked) -> dict[str, Any]:
    figures = {
        checkpoint: {name: asdict(value) for name, value in getattr(point, checkpoint).items()}
        for checkpoint in ("best", "last", "changes")
    }
    trials = [
        {key: value for key, value in asdict(trial).items() if key not in ("point", "values")}
        for trial in point.trials
    ]
    return {"point": point.name, "values": point.values, "figures": figures, "trials": trials}
