"""Served models compared by the votes and ratings of their users: the A/B report of a store of chats.

    python -m pipelines.serve    --models bc=runs/bc ilql=runs/ilql --split bc=1 ilql=1 --store sqlite:///chats.db
    python -m pipelines.ab --store sqlite:///chats.db --output_dir runs/ab

The store may be in use. rl_dialog/evaluation/ab.py says which chats count for which model.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as ShownTable

from rl_dialog.data.store import Store
from rl_dialog.evaluation.ab import Comparison, Known, compare_served, read_chats, sections, to_json, write_ab_report
from rl_dialog.run import Output, at_least, claim_output, require, run


@dataclass(frozen=True)
class ABConfig(Output):
    """Which chats, and how to compare their models. Written are ab.md, ab.html, ab.json and plots/."""

    store: str = ""
    """database of chats: sqlite:///FILE, or postgresql://USER@HOST/NAME with the password in PGPASSWORD or ~/.pgpass"""
    baseline: str = ""
    """the model that the others are compared with; by default the one that was served first"""
    replicates: int = 2000
    """bootstrap replicates behind the intervals"""
    seed: int = 0
    """another seed draws other replicates"""


def main(config: ABConfig, *, known: Known | None = None) -> dict[str, Any]:
    """Writes the report; returns its paths and the differences. `known` has figures of chats that stand in no store: figure -> chat id -> value."""
    require(config, store="a database of served chats, e.g. sqlite:///chats.db")
    at_least(config, replicates=1)
    out = claim_output(config, "ab")
    with closing(Store(config.store, create=False)) as store:
        chats = read_chats(store.dialogs())
    comparison = compare_served(chats, baseline=config.baseline, known=known, replicates=config.replicates, seed=config.seed)
    paths = write_ab_report(comparison, out)
    if not config.quiet:
        show(comparison)
    found = to_json(comparison)
    headline = {row["model"]: {"chats": row["chats"], "vote": _triple(row["figures"].get("vote"))} for row in found["models"]}
    wanted = ("vote", *(known or ()))
    differences = {
        f"{row['model']} - {row['baseline']}": {name: _triple(row["figures"].get(name)) for name in wanted if name in row["figures"]}
        for row in found["differences"]
    }
    return {**{kind: str(path) for kind, path in paths.items()}, "models": headline, "differences": differences}


def show(comparison: Comparison) -> None:
    """The tables of figures, and what to know about them."""
    console = Console(highlight=False, width=None if Console().is_terminal else 150)
    for section in sections(comparison):
        if section.table and section.table.rows and section.title in ("Votes", "Difference", "Ratings"):
            table = ShownTable(*section.table.columns, title=section.title)
            for row in section.table.rows:
                table.add_row(*(cell.replace(" [", "\n[") if section.title == "Votes" else cell for cell in row))
            console.print(table, markup=False)
        for note in section.notes:
            console.print(f"- {note}", markup=False)


def _triple(value: dict[str, Any] | None) -> list[float | None] | None:
    return value and [value["value"], value["low"], value["high"]]


if __name__ == "__main__":
    run(ABConfig, main)
