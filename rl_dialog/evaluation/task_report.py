"""The report on task-oriented dialogs: one policy, or several that met the same users. task_dialogs.py says
what is counted."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError
from rl_dialog.evaluation import plots
from rl_dialog.evaluation.document import Column, Sample, Section, Table, write_document
from rl_dialog.evaluation.intervals import Estimate
from rl_dialog.evaluation.summary import Group, RunResult, as_json, compare, figure_of, shown
from rl_dialog.evaluation.task_dialogs import (
    BY_DOMAIN,
    FIGURE,
    MISSED,
    REASONS,
    TaskDialog,
    domain_counts,
    domains_of,
    measures,
    questions,
    readings,
    shown_acts,
)

FIRST = (*FIGURE, "turns", "return", "loops")
MOST = 10  # rows of a list
EXAMPLES = 2  # dialogs of a kind


@dataclass
class TaskRun:
    """A policy's dialogs."""

    name: str
    folder: str
    dialogs: list[TaskDialog]
    group: Group
    options: Mapping[str, Any] | None = (
        None  # of its simulated users, those that are not the defaults; None: not known
    )

    @property
    def by_key(self) -> dict[tuple[int, ...], TaskDialog]:
        return {dialog.key: dialog for dialog in self.dialogs}


@dataclass
class TaskComparison:
    """All policies; the differences are to the first, user by user."""

    runs: list[TaskRun]
    differences: dict[str, dict[str, Estimate]]  # policy -> figure -> its difference

    @property
    def other_options(self) -> str:
        """What to know where the policies met the same goals under other options; "" where they are the same,
        as far as is known."""
        known_options = {run.name: run.options for run in self.runs if run.options is not None}
        if all(
            options == first
            for first in list(known_options.values())[:1]
            for options in known_options.values()
        ):
            return ""
        option_texts = "; ".join(
            f"{name}: {_settings(options) or 'the defaults'}" for name, options in known_options.items()
        )
        return (
            "These runs had the same goals, but other user options, which are part of every difference "
            f"between them. {option_texts}."
        )


def compare_tasks(
    simulated: Mapping[str, tuple[str, list[TaskDialog]]],
    *,
    replicates: int,
    seed: int,
    options: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> TaskComparison:
    """`simulated`: name -> (folder, dialogs); `options`: name -> those of its users. Raises UserError for
    policies that did not have the same goals."""
    runs = []
    for name, (folder, dialogs) in simulated.items():
        dialogs = sorted(dialogs, key=lambda dialog: dialog.key)
        group = Group(name, "", [RunResult(name, folder, name, measures(dialogs))])
        group.summarise(replicates=replicates, seed=seed)
        runs.append(TaskRun(name, folder, dialogs, group, (options or {}).get(name)))
    first = runs[0]
    for run in runs[1:]:
        if [(d.key, d.goal) for d in run.dialogs] != [(d.key, d.goal) for d in first.dialogs]:
            raise UserError(
                f"{run.folder}: expected dialogs with the same users as {first.folder} ({len(first.dialogs)} "
                f"goals), got {len(run.dialogs)}, not all of them the same: run both with the same --seed, "
                "--episodes, --world and user options"
            )
    changes = {
        run.name: compare(run.group, first.group, replicates=replicates, seed=seed) for run in runs[1:]
    }
    return TaskComparison(runs, changes)


def sections(comparison: TaskComparison) -> list[Section]:
    """The report, without what does not occur."""
    runs = comparison.runs
    optional = [
        _figures(runs),
        *_differences(comparison),
        _domains(runs),
        _failures(runs),
        _missed(runs),
        _questions(runs),
        _unasked(runs),
        _loops(runs),
        _readings(runs),
        _distributions(runs),
        *(_examples(run) for run in runs),
    ]
    return [section for section in optional if section is not None]


def _figures(runs: Sequence[TaskRun]) -> Section:
    names = [name for name in FIRST if any(name in run.group.estimates for run in runs)]
    rows = [
        [
            run.name,
            str(len(run.dialogs)),
            *(shown(run.group.estimates.get(name), figure_of(name)) for name in names),
        ]
        for run in runs
    ]
    png = plots.panels(
        [run.group for run in runs],
        {
            name: figure_of(name).title
            for name in ("success", "book_rate", "inform_f1_all_slots", "turns", "return")
        },
    )
    text = [
        "95 % bootstrap intervals over dialogs. envs/multiwoz/README.md defines the figures; turns are the "
        "system's. Precision and F1 are those of the dialogs' outcomes: unless simulated with other options "
        "they count every superfluous slot, like simulate's inform_f1_all_slots."
    ]
    table = Table(["policy", "dialogs", *(figure_of(name).title for name in names)], rows)
    return Section("Measures", text, table, plot=("measures.png", png) if png else None)


def _differences(comparison: TaskComparison) -> list[Section]:
    if not comparison.differences:
        return []
    first, *others = comparison.runs
    names = [name for name in FIRST if any(name in change for change in comparison.differences.values())]
    rows = [
        [
            run.name,
            *(
                shown(comparison.differences[run.name].get(name), figure_of(name), signed=True)
                for name in names
            ),
        ]
        for run in others
    ]
    text = [
        f"Each policy minus {first.name}, user by user: the same goals and the same chance of the user. "
        "Paired 95 % bootstrap intervals."
    ]
    text += [comparison.other_options] if comparison.other_options else []
    groups = [Group(run.name, "", [], comparison.differences[run.name]) for run in others]
    png = plots.panels(
        groups,
        {name: f"{figure_of(name).title} - {first.name}" for name in ("success", "turns", "return")},
        zero=True,
    )
    table = Table(["policy", *(figure_of(name).title for name in names)], rows)
    return [
        Section("Difference", text, table, plot=("difference.png", png) if png else None),
        _who_succeeds(first, others),
    ]


def _who_succeeds(first: TaskRun, others: Sequence[TaskRun]) -> Section:
    """Which policy gives the same users what they want, with examples where only one of two does."""
    counts, samples = [], []
    for run in others:
        ours, theirs = run.by_key, first.by_key
        only = {True: [key for key in ours if ours[key].success and not theirs[key].success]}
        only[False] = [key for key in ours if theirs[key].success and not ours[key].success]
        both_succeed = sum(ours[key].success and theirs[key].success for key in ours)
        neither = len(ours) - both_succeed - len(only[True]) - len(only[False])
        counts.append([run.name, *map(str, (both_succeed, len(only[True]), len(only[False]), neither))])
        for wins, keys in only.items():
            for key in keys[:EXAMPLES]:
                winner, loser = (run.name, first.name) if wins else (first.name, run.name)
                title = f"{winner} succeeds, {loser} does not: {_wish(ours[key].goal)}"
                columns = [_column(side.name, side.by_key[key]) for side in (first, run)]
                samples.append(Sample(title, columns, folded=True))
    solved = Table(["policy", "both succeed", "only this one", f"only {first.name}", "neither"], counts)
    return Section("Who succeeds where", [], solved, samples=samples)


def _domains(runs: Sequence[TaskRun]) -> Section:
    rows = []
    for domain in domains_of(runs[0].dialogs):
        for run in runs:
            count = domain_counts(run.dialogs, domain)
            figures = [
                shown(run.group.estimates.get(f"{name}/{domain}"), figure_of(name)) for name in BY_DOMAIN
            ]
            answered, at_once = (
                _share(count["told"], count["asked"]),
                _share(count["told at once"], count["asked"]),
            )
            booked, unasked = (
                _share(count["booked"], count["to book"]),
                f"{count['told unasked'] / max(1, count['dialogs']):.2f}",
            )
            rows.append(
                [domain, run.name, str(count["dialogs"]), *figures, answered, at_once, booked, unasked]
            )
    text = [
        "Turns: the replies while the user was at that domain. Told: questions of the user that were answered"
        " at all, and by the very next reply. Booked: wished bookings that were made, right or wrong."
    ]
    columns = [
        "domain",
        "policy",
        "dialogs",
        *(figure_of(name).title for name in BY_DOMAIN),
        "told",
        "at once",
        "booked",
        "unasked per dialog",
    ]
    return Section("Domains", text, Table(columns, rows))


def _missed(runs: Sequence[TaskRun]) -> Section | None:
    """Bookings that were never made, by domain and reason."""
    rows = []
    for run in runs:
        to_book = Counter(domain for dialog in run.dialogs for domain in dialog.to_book)
        missed = Counter(missed_booking for dialog in run.dialogs for missed_booking in dialog.missed.items())
        for domain in to_book:
            counts = [missed[domain, reason] for reason in MISSED]
            if any(counts):
                rows.append(
                    [
                        domain,
                        run.name,
                        str(to_book[domain]),
                        _of(sum(counts), to_book[domain]),
                        *map(str, counts),
                    ]
                )
    notes = [f"{reason}: {meaning}" for reason, meaning in MISSED.items()]
    columns = ["domain", "policy", "wanted", "never made", *MISSED]
    return (
        Section("Missed bookings", [], Table(columns, sorted(rows, key=lambda row: row[0])), notes)
        if rows
        else None
    )


def _failures(runs: Sequence[TaskRun]) -> Section | None:
    counts = {
        run.name: Counter(dialog.reason for dialog in run.dialogs if not dialog.success) for run in runs
    }
    if not any(counts.values()):
        return None
    rows = [
        [f"{reason}: {meaning}", *(_of(counts[run.name][reason], len(run.dialogs)) for run in runs)]
        for reason, meaning in REASONS.items()
    ]
    rows.append(["all failures", *(_of(sum(counts[run.name].values()), len(run.dialogs)) for run in runs)])
    return Section(
        "Why dialogs fail",
        ["The first reason that applies counts."],
        Table(["reason", *(run.name for run in runs)], rows),
    )


def _questions(runs: Sequence[TaskRun]) -> Section | None:
    rows = []
    for run in runs:
        for slot, question in list(questions(run.dialogs).items())[:MOST]:
            if question.at_once < question.asked:
                instead = ", ".join(f"{acts} ({count})" for acts, count in question.instead.most_common(3))
                rows.append(
                    [
                        slot,
                        run.name,
                        *map(str, (question.asked, question.at_once, question.later, question.never)),
                        _clipped(instead),
                    ]
                )
    columns = [
        "the user asks for",
        "policy",
        "asked",
        "answered at once",
        "later",
        "never",
        "first replies instead",
    ]
    text = [f"What users asked for and did not get at once, at most {MOST} slots a policy."]
    return Section("Questions", text, Table(columns, rows)) if rows else None


def _unasked(runs: Sequence[TaskRun]) -> Section | None:
    rows = []
    for run in runs:
        times, dialogs = Counter(), Counter()
        for dialog in run.dialogs:
            times.update(dialog.unasked)
            dialogs.update(set(dialog.unasked))
        rows += [
            [" ".join(domain_slot), run.name, str(count), str(dialogs[domain_slot])]
            for domain_slot, count in times.most_common(MOST)
        ]
    text = [
        "Slots that the system told before the user had asked for them or named a wish for them. The "
        "precision forgives those that stand in the goal."
    ]
    return (
        Section("Told unasked", text, Table(["slot", "policy", "times", "dialogs"], rows)) if rows else None
    )


def _loops(runs: Sequence[TaskRun]) -> Section | None:
    rows = []
    for run in runs:
        for side in ("user", "system"):
            having = [dialog for dialog in run.dialogs if any(loop[0] == side for loop in dialog.loops)]
            if not having:
                continue
            most = Counter(
                shown_acts(acts) for dialog in having for speaker, acts, _ in dialog.loops if speaker == side
            ).most_common(2)
            longest = max(times for dialog in having for speaker, _, times in dialog.loops if speaker == side)
            failed = sum(not dialog.success for dialog in having)
            most_often = ", ".join(f"{acts} ({count})" for acts, count in most)
            rows.append(
                [
                    f"the {side} says the same",
                    run.name,
                    _of(len(having), len(run.dialogs)),
                    str(failed),
                    str(longest),
                    _clipped(most_often),
                ]
            )
    text = ["Dialogs in which one side says exactly the same acts at least twice in a row."]
    return (
        Section(
            "Loops",
            text,
            Table(["loop", "policy", "dialogs", "of them failed", "longest", "most often"], rows),
        )
        if rows
        else None
    )


def _readings(runs: Sequence[TaskRun]) -> Section | None:
    rows = []
    for run in runs:
        for side in ("user", "system"):
            for kind, reading in list(readings(run.dialogs, side).items())[:MOST]:
                if reading.understood < reading.said:
                    instead = ", ".join(f"{act} ({count})" for act, count in reading.instead.most_common(3))
                    rows.append(
                        [
                            f"{side}: {kind}",
                            run.name,
                            str(reading.said),
                            _share(reading.understood, reading.said),
                            _clipped(instead),
                        ]
                    )
    text = [
        "What one side said in words and the other did not understand, the most frequent misunderstandings "
        "first."
    ]
    return (
        Section("Misunderstood", text, Table(["act", "policy", "said", "understood", "taken for"], rows))
        if rows
        else None
    )


def _distributions(runs: Sequence[TaskRun]) -> Section:
    columns = {
        "system turns": {run.name: np.array([dialog.replies for dialog in run.dialogs]) for run in runs},
        "return": {run.name: np.array(totals) for run in runs if (totals := _known_returns(run))},
    }
    text = ["The share of dialogs with at most so many system turns, and with at most such a return."]
    return Section("Turns and returns", text, plot=("turns.png", plots.distributions(columns)))


def _known_returns(run: TaskRun) -> list[float]:
    return [dialog.total for dialog in run.dialogs if dialog.total is not None]


def _examples(run: TaskRun) -> Section | None:
    samples = []
    for reason in REASONS:
        failed = [dialog for dialog in run.dialogs if dialog.reason == reason]
        if failed:
            shortest = sorted(failed, key=lambda dialog: dialog.replies)[:EXAMPLES]
            samples.append(
                Sample(
                    f"{reason}: {len(failed)} dialogs",
                    [_column(_wish(dialog.goal), dialog) for dialog in shortest],
                    folded=True,
                )
            )
    return (
        Section(f"Failures of {run.name}", ["The shortest of each kind."], samples=samples)
        if samples
        else None
    )


def _column(title: str, dialog: TaskDialog) -> Column:
    lines = [
        ("assistant" if turn.side == "system" else "user", turn.text, shown_acts(turn.acts))
        for turn in dialog.turns
    ]
    ends = "success" if dialog.success else f"failure: {dialog.reason}"
    return Column(
        f"{title} ({ends}, {dialog.replies} turns)",
        [(role, text, "" if acts == text else acts) for role, text, acts in lines],
    )


def _wish(goal: Mapping[str, Any]) -> str:
    parts = []
    for domain, wish in goal.items():
        wishes = [
            f"{slot} {value}"
            for kind in ("info", "book")
            for slot, value in wish.get(kind, {}).items()
            if isinstance(value, str)
        ]
        requests = [f"{slot}?" for slot in wish.get("reqt", {})]
        parts.append(f"{domain}: " + ", ".join(wishes + requests))
    return "; ".join(parts)


def _settings(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _of(part: int, whole: int) -> str:
    return f"{part} ({_share(part, whole)})"


def _clipped(text: str, most: int = 240) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


OF_A_DIALOG = (
    "policy",
    "dialog",
    "success",
    "turns",
    "return",
    "reason",
    "longest_loop",
    "unasked",
    "unanswered",
)


def write_task_report(comparison: TaskComparison, out: Path) -> dict[str, Path]:
    """tasks.md with plots/, tasks.html, tasks.json and dialogs.csv (a line per policy and dialog) in `out`;
    their paths."""
    out.mkdir(parents=True, exist_ok=True)
    markdown, page = write_document("Task-oriented dialogs", sections(comparison), out, name="tasks")
    write_json(out / "tasks.json", to_json(comparison))
    with (out / "dialogs.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(OF_A_DIALOG)
        for run in comparison.runs:
            for d in run.dialogs:
                longest = max((times for *_, times in d.loops), default=0)
                never = sum(question.answered is None for question in d.asked)
                row = [run.name, d.id, int(d.success), d.replies, d.total, d.reason]
                rows.writerow([*row, longest, len(d.unasked), never])
    return {"report": markdown, "html": page, "json": out / "tasks.json", "csv": out / "dialogs.csv"}


def to_json(comparison: TaskComparison) -> dict[str, Any]:
    """What the report says in numbers."""
    changes = {
        name: {figure: as_json(value) for figure, value in estimates.items()}
        for name, estimates in comparison.differences.items()
    }
    return {"policies": [_policy_to_json(run) for run in comparison.runs], "differences": changes}


def _policy_to_json(run: TaskRun) -> dict[str, Any]:
    failures = Counter(dialog.reason for dialog in run.dialogs if not dialog.success)
    missed: dict[str, dict[str, int]] = {}
    for domain, reason in (
        missed_booking for dialog in run.dialogs for missed_booking in dialog.missed.items()
    ):
        missed.setdefault(domain, Counter())[reason] += 1
    slots = {
        slot: {
            "asked": q.asked,
            "at_once": q.at_once,
            "later": q.later,
            "never": q.never,
            "instead": dict(q.instead.most_common(5)),
        }
        for slot, q in questions(run.dialogs).items()
    }
    misread = {
        side: {
            kind: {"said": r.said, "understood": r.understood, "instead": dict(r.instead.most_common(5))}
            for kind, r in readings_by_act.items()
        }
        for side in ("user", "system")
        if (readings_by_act := readings(run.dialogs, side))
    }
    return {
        "policy": run.name,
        "folder": run.folder,
        "dialogs": len(run.dialogs),
        "figures": {name: as_json(value) for name, value in run.group.estimates.items()},
        "domains": {domain: domain_counts(run.dialogs, domain) for domain in domains_of(run.dialogs)},
        "failures": dict(failures),
        "missed_bookings": missed,
        "questions": slots,
        "understood": misread,
    }


def headline(comparison: TaskComparison) -> dict[str, Any]:
    """The success of each policy, and the differences in it, each with its interval."""
    success = {run.name: run.group.estimates["success"].triple for run in comparison.runs}
    changes = {name: figures.get("success") for name, figures in comparison.differences.items()}
    return {
        "success": success,
        "differences": {name: change and change.triple for name, change in changes.items()},
    }
