"""What `evaluate` writes of its results: the report, metrics.json, replies.csv and candidates/."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError
from rl_dialog.evaluation.aggregate import OPTIMUM
from rl_dialog.evaluation.candidates import write_candidates
from rl_dialog.evaluation.checkpoints import CheckpointConfig, MakeEnv
from rl_dialog.evaluation.held_out import HeldOut
from rl_dialog.evaluation.intervals import Estimate, Measure, estimate
from rl_dialog.evaluation.report import Evaluation, write_report
from rl_dialog.evaluation.runs import Entry
from rl_dialog.evaluation.summary import Group, RunResult, as_json, baseline_of, compare

HEADLINE = ("return", "return_greedy", "return_best_of", "perplexity", "kl", "critic", "distinct_2", "words")


def put_together(
    config: CheckpointConfig,
    entries: Sequence[Entry],
    results: Mapping[str, RunResult],
    held_out: HeldOut | None,
    make_env: MakeEnv | None,
) -> Evaluation:
    """Everything that is told of these results, which are by checkpoint directory."""
    resampled = {"replicates": config.replicates, "seed": config.seed}
    groups = _groups(entries, results, **resampled)
    comparisons = {}
    for group in groups:
        if baseline := baseline_of(group, groups):
            comparisons[group.label] = baseline.label, compare(group, baseline, **resampled)
    trained = held_out.trained if held_out else None
    references = _references(config, make_env)
    about = _about(config, held_out)
    return Evaluation(
        "Evaluation", about, groups, comparisons, references, trained, _folders(entries), config.samples
    )


def _groups(
    entries: Sequence[Entry], results: Mapping[str, RunResult], *, replicates: int, seed: int
) -> list[Group]:
    """Runs that differ by seed put together. Raises UserError for runs of several methods under one name."""
    groups: dict[tuple[str, str], Group] = {}
    for entry in entries:
        group = groups.setdefault((entry.group, entry.which), Group(entry.group, entry.which, []))
        group.runs.append(replace(results[entry.directory], run=entry.run))
    for group in groups.values():
        methods = sorted({member.method for member in group.runs})
        if len(methods) > 1:
            names = ", ".join(methods)
            raise UserError(
                f"group {group.label}: expected runs of one method, got {names}: tell them apart with --names"
            )
        group.summarise(replicates=replicates, seed=seed)
    return list(groups.values())


def _folders(entries: Sequence[Entry]) -> dict[str, list[Path]]:
    """The run folders of each group."""
    folders: dict[str, dict[Path, None]] = {}
    for entry in entries:
        folders.setdefault(entry.group, {})[entry.folder] = None
    return {group: list(paths) for group, paths in folders.items()}


def _references(config: CheckpointConfig, make_env: MakeEnv | None) -> dict[str, Estimate]:
    """What returns mean: reference policies and bounds of an environment that brings `reference_returns`, or
    its `optimum` alone. A line whose episodes all failed is none."""
    bring = getattr(make_env, "reference_returns", None)
    returns = bring(config.episodes, config.seed) if bring else {}
    if not bring and hasattr(make_env, "optimum"):
        returns = {OPTIMUM: [make_env().optimum()]}
    settings = {"replicates": config.replicates, "seed": config.seed}
    lines = {name: estimate([Measure.mean(values)], **settings) for name, values in returns.items()}
    return {name: line for name, line in lines.items() if line is not None}


def _about(config: CheckpointConfig, held_out: HeldOut | None) -> list[str]:
    """The report's first sentences."""
    if config.do_sample:
        top_k = config.top_k or "off"
        sampling = f"sampled at temperature {config.temperature:g}, top_k {top_k}, top_p {config.top_p:g}"
    else:
        sampling = f"by beam search of {config.num_beams}" if config.num_beams > 1 else "greedy"
    decoding = f"{sampling}, at most {config.max_new_tokens} tokens, seed {config.seed}"
    about = []
    if config.env:
        best = (
            f"; the best of {config.best_of} has the highest Q among so many draws" if config.best_of else ""
        )
        about.append(f"{config.episodes} conversations in {config.env}; replies {decoding}{best}.")
    if held_out:
        dialogs = f"{len(held_out.dialogs)} dialogs of the {held_out.split} split of {Path(config.data).name}"
        answered = f"{len(held_out.contexts)} of their contexts answered"
        about.append(f"Held-out: {dialogs}; {answered}" + ("." if config.env else f", {decoding}."))
    if config.ope:
        discounted = (
            "not discounted" if config.gamma == 1 else f"discounted by {config.gamma:g} per {config.discount}"
        )
        about.append(f"Estimates from the logs: {', '.join(config.ope)}, {discounted}.")
    return about


def write_evaluation(evaluation: Evaluation, out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes everything into a folder; returns the paths and the number of replies."""
    markdown, page = write_report(evaluation, out)
    count = write_replies(out / "replies.csv", evaluation.groups)
    write_json(out / "metrics.json", metrics(evaluation, settings))
    paths = {
        "report": markdown,
        "html": page,
        "metrics": out / "metrics.json",
        "replies": out / "replies.csv",
    }
    results: dict[str, Any] = {kind: str(path) for kind, path in paths.items()}
    if any(run.candidates for group in evaluation.groups for run in group.runs):
        tables = _write_candidates(evaluation.groups, out / "candidates")
        results["candidates"] = [str(path) for path in tables]
    return results | {"generated_replies": count}


def metrics(evaluation: Evaluation, settings: Mapping[str, Any]) -> dict[str, Any]:
    """metrics.json: everything the report says, as numbers; `settings` is what was asked for."""
    differences = {
        label: {"baseline": name, "figures": _figures(changes)}
        for label, (name, changes) in evaluation.comparisons.items()
    }
    return {
        "settings": settings,
        "trained_rewards": evaluation.trained,
        "references": _figures(evaluation.references),
        "groups": [_described(group) for group in evaluation.groups],
        "differences": differences,
    }


def _described(group: Group) -> dict[str, Any]:
    runs = [
        {
            "run": run.run,
            "checkpoint": run.directory,
            "figures": {name: measure.value for name, measure in run.measures.items()},
            "notes": run.notes,
        }
        for run in group.runs
    ]
    about = {"label": group.label, "group": group.name, "which": group.which, "method": group.method}
    return about | {"figures": _figures(group.estimates), "runs": runs}


def _figures(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: as_json(value) for name, value in estimates.items()}


def headline(evaluation: Evaluation) -> dict[str, Any]:
    """The figures of each group that people ask for first, each with the ends of its interval."""
    figure_names = [name for group in evaluation.groups for name in group.estimates]
    names = (*HEADLINE, *dict.fromkeys(name for name in figure_names if name.startswith(("top/", "ope/"))))
    changes = {
        label: {"baseline": baseline} | _first(figures, names)
        for label, (baseline, figures) in evaluation.comparisons.items()
    }
    return {
        "figures": {group.label: _first(group.estimates, names) for group in evaluation.groups},
        "differences": changes,
        "references": {name: value.value for name, value in evaluation.references.items()},
    }


def _first(estimates: Mapping[str, Estimate], names: Sequence[str]) -> dict[str, list[float | None]]:
    return {name: estimates[name].triple for name in names if name in estimates}


def _write_candidates(groups: Sequence[Group], directory: Path) -> list[Path]:
    """A CSV of candidates per checkpoint, as in the paper; their paths."""
    directory.mkdir(exist_ok=True)
    paths = []
    for group in groups:
        for run in group.runs:
            labels = (label for label in (run.run or group.name, group.which) if label)
            paths.append(directory / (re.sub(r"[^\w.=-]+", "-", "-".join(labels)) + ".csv"))
            write_candidates(paths[-1], run.candidates)
    return paths


def write_replies(path: Path, groups: Sequence[Group]) -> int:
    """Every generated reply as one line of CSV; returns how many."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.rewards)
    rewards = [f"reward:{name}" for name in names]  # one of the user's own may have failed in some runs
    columns = [
        "policy",
        "run",
        "checkpoint",
        "source",
        "context",
        "turn",
        "reply",
        "tokens",
        "finished",
        "reward",
        "return",
        "vote",
        *rewards,
    ]
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for group in groups:
            for run in group.runs:
                for row in _reply_rows(run):
                    writer.writerow(
                        {"policy": group.label, "run": run.run, "checkpoint": run.directory, **row}
                    )
                    count += 1
    return count


def _reply_rows(run: RunResult) -> Iterator[dict[str, Any]]:
    generated = [("env", e.dialog.id, e.dialog, e.replies, e.total) for e in run.episodes]
    generated += [("data", a.context, a.dialog, [a.reply], None) for a in run.answers]
    for number, (source, context, dialog, replies, total) in enumerate(generated):
        for turn, (i, reply) in enumerate(zip(dialog.replies, replies, strict=True)):
            message = dialog.messages[i]
            yield {
                "source": source,
                "context": context,
                "turn": turn,
                "reply": reply.text,
                "tokens": len(reply.tokens),
                "finished": int(reply.finished),
                "reward": message.get("reward"),
                "return": total,
                "vote": message.get("feedback", {}).get("vote"),
                **{f"reward:{name}": values[number][turn] for name, values in run.rewards.items()},
            }
