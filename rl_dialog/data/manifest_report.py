"""The manifest of a data directory, told to who made it: tables, what not to overlook, and the headline
figures."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rl_dialog.data.readers import Skipped
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import MANIFEST

COUNTS = ("dialogs", "replies", "turns", "no_reply", "quarantined")  # of a source
LARGE_CONTEXT = (
    0.05  # share of dialogs with one split key from which the sizes of the splits are a matter of luck
)
MOST_SHOWN = (
    9  # components whose correlations fit a terminal; manifest.json and the report have those of more
)
NAMED = 3  # files that were skipped; all of them are in manifest.json
HEADLINES = (
    *("split_by", "quarantined", "stopped", "no_reply", "renamed_ids", "cut_replies", "shared_contexts"),
    *("seconds", "dialogs_per_second", "peak_memory_mib"),
)


def headline(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    """For the line of JSON."""
    splits = manifest["splits"]
    return {
        "output_dir": str(out),
        "manifest": str(out / MANIFEST),
        **{
            key: sum(split[key] for split in splits.values())
            for key in ("dialogs", "replies", "rows", "tokens")
        },
        "splits": {split: splits[split]["dialogs"] for split in SPLITS},
        "reward": {key: manifest["rewards"]["sum"][key] for key in ("mean", "std", "coverage")},
        **{key: manifest[key] for key in HEADLINES},
    }


def show_manifest(manifest: dict[str, Any], skipped: Sequence[Skipped], out: Path) -> None:
    """Prints the tables and notes."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, soft_wrap=not sys.stdout.isatty())
    console.print(_source_table(manifest))
    for table in _reward_tables(manifest["rewards"]):
        console.print(table)
    for note in notes(manifest, skipped):
        console.print(note, markup=False, highlight=False)
    console.print(f"wrote {out} in {manifest['seconds']:.1f} s", markup=False, highlight=False)


def _source_table(manifest: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("source", "reader", title="Sources", title_justify="left")
    for name in ("files", *COUNTS):
        table.add_column(name.replace("_", " "), justify="right")
    for name, source in manifest["sources"].items():
        readers = ", ".join(sorted({file["reader"] for file in source["files"]}))
        table.add_row(
            name or "(none)", readers, str(len(source["files"])), *(f"{source[key]:,}" for key in COUNTS)
        )
    splits = ", ".join(f"{split} {figures['dialogs']:,}" for split, figures in manifest["splits"].items())
    tokens = sum(figures["tokens"] for figures in manifest["splits"].values())
    table.caption = f"{splits} dialogs; {tokens:,} tokens"
    table.caption_justify = "left"
    return table


def _reward_tables(rewards: dict[str, Any]) -> Iterator[Any]:
    from rich.table import Table

    figures = ("mean", "std", "min", "max")
    table = Table(
        "reward", title="Rewards per reply (over the replies a component applies to)", title_justify="left"
    )
    for name in ("weight", *figures, "coverage"):
        table.add_column(name, justify="right")
    for name, row in rewards["components"].items():
        numbers = (_number(row[key], row["std"]) for key in figures)
        table.add_row(name, f"{row['weight']:g}", *numbers, f"{row['coverage']:.1%}")
    total = rewards["sum"]
    numbers = (_number(total[key], total["std"]) for key in figures)
    table.add_row("sum", "", *numbers, f"{total['coverage']:.1%}")
    yield table
    if 1 < len(rewards["components"]) <= MOST_SHOWN:
        names = list(rewards["correlation"])
        table = Table("correlation", *names, title_justify="left")
        for name in names:
            row = rewards["correlation"][name].values()
            table.add_row(name, *("" if value is None else f"{value:.2f}" for value in row))
        yield table


def _number(value: float | None, spread: float | None) -> str:
    """With four digits, or as many as show the spread of what it is one of."""
    if value is None:
        return "-"
    digits = math.floor(math.log10(abs(value) / spread)) + 2 if value and spread else 0
    return f"{value:.{min(max(digits, 4), 15)}g}"


def notes(manifest: dict[str, Any], skipped: Sequence[Skipped] = ()) -> Iterator[str]:
    """What a user should not overlook."""
    if manifest["quarantined"]:
        yield f"{_counted(manifest['quarantined'], 'record')} could not be read: see quarantine.jsonl"
    yield from manifest["stopped"][:MOST_SHOWN]
    if skipped:
        names = [PurePosixPath(skip.file).name for skip in skipped[:NAMED]]
        which = ", ".join([*names, "..."] if len(skipped) > NAMED else names)
        yield f"{_counted(len(skipped), 'file')} skipped ({which}): the reasons are in manifest.json"
    if manifest["renamed_ids"]:
        yield f"{manifest['renamed_ids']:,} dialogs had an id that was taken and got a number behind it"
    if manifest["cut_replies"]:
        yield f"{manifest['cut_replies']:,} replies longer than a row lost their tail: raise --max_length"
    yield from _split_notes(manifest)
    what = "rl_dialog/rewards/README.md says what it reads"
    for name, row in manifest["rewards"]["components"].items():
        same = row["weight"] and row["std"] == 0
        if not row["coverage"]:
            yield f"the reward {name} applies to no reply of these logs: {what}"
        elif same and (row["mean"] == 0 or row["coverage"] == manifest["rewards"]["sum"]["coverage"]):
            yield (
                f"the reward {name} is {row['mean']:g} for every reply that it applies to and tells none "
                f"from another: {what}, and in which language"
            )
    yield from _unrated(manifest)
    yield from _as_if_nothing(manifest)
    if manifest["rewards"]["sum"]["std"] == 0:
        enough = "enough for behaviour cloning, nothing for the other methods to learn from"
        yield f"every reply earns the same reward: {enough}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _unrated(manifest: dict[str, Any]) -> Iterator[str]:
    """How many replies have no reward."""
    replies = sum(split["replies"] for split in manifest["splits"].values())
    unrated = round(replies * (1 - manifest["rewards"]["sum"]["coverage"]))
    if unrated == replies:
        yield "no reply has a reward: enough for behaviour cloning, nothing for other methods to learn from"
    elif unrated:
        yield f"{unrated:,} of {replies:,} replies have no reward: no component with a weight applies"


def _as_if_nothing(manifest: dict[str, Any]) -> Iterator[str]:
    """Rewards that never are 0 and yet count as 0 where they do not apply, because others do: a conversation
    that nobody rated would be worse than one of a single star. One that is on each conversation's last reply
    is 0 before it, as it should be."""
    splits, rewards = manifest["splits"].values(), manifest["rewards"]
    replies, dialogs = (sum(split[key] for split in splits) for key in ("replies", "dialogs"))
    for name, row in rewards["components"].items():
        known = round(replies * row["coverage"])
        if not (row["weight"] and 0 < row["coverage"] < rewards["sum"]["coverage"]) or known == dialogs:
            continue
        if name not in rewards["normalisers"] and (row["min"] > 0 or row["max"] < 0):
            yield (
                f"the reward {name} lies between {row['min']:g} and {row['max']:g} and applies to {known:,} "
                f"of {replies:,} replies: where other rewards do and it does not, it counts as 0, which is "
                f"none of its values; --normalise {name}=zscore makes 0 its mean"
            )


def _split_notes(manifest: dict[str, Any]) -> Iterator[str]:
    by_dialog, settings = manifest["split_by"] == "dialog", manifest["settings"]
    if manifest["split_why"]:
        yield f"split by dialog: {manifest['split_why']}; --split_by first_turn does that"
    if manifest["shared_contexts"]:
        shared = "first user turns" if by_dialog else "contexts"
        splits = "splits" if settings["split"] == "hash" else "the declared splits"
        yield f"{manifest['shared_contexts']:,} {shared} are in more than one of {splits}"
    dialogs = sum(split["dialogs"] for split in manifest["splits"].values())
    alike = round(manifest["largest_context"] * dialogs)  # of few dialogs one is a large share
    if manifest["largest_context"] > LARGE_CONTEXT and alike > 1 and not by_dialog:
        share = f"{manifest['largest_context']:.0%} of the dialogs"
        remedies = "--split_by dialog parts those without a `meta.group`, --split declared takes the data's "
        remedies += "own splits instead"
        yield f"{share} share their first user turn or `meta.group` and are in one split; {remedies}"
    for split in ("validation", "test"):
        if settings[split] and not manifest["splits"][split]["dialogs"]:
            yield f"no dialog fell into {split}: more logs, a larger --{split} or another --seed may fill it"
