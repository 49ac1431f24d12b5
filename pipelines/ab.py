"""Served models compared by the votes and ratings of their users: the A/B report of a store of chats.

    python -m pipelines.serve    --models bc=runs/bc ilql=runs/ilql --split bc=1 ilql=1 --store sqlite:///chats.db
    python -m pipelines.ab --store sqlite:///chats.db --output_dir runs/ab

The store may be in use. rl_dialog/evaluation/ab.py says which chats count for which model.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rl_dialog.data.store import Store
from rl_dialog.evaluation.ab import Known, compare_served, headline, read_chats, sections, write_ab_report
from rl_dialog.evaluation.document import print_tables
from rl_dialog.run import Output, at_least, claim_output, require, run


@dataclass(frozen=True)
class ABConfig(Output):
    """Which chats, and how to compare their models. Written are ab.md, ab.html, ab.json and plots/."""

    store: str = ""
    """database of chats: sqlite:///FILE, or postgresql://USER@HOST/NAME with the password in PGPASSWORD or
    ~/.pgpass"""
    baseline: str = ""
    """the model that the others are compared with; by default the one that was served first"""
    replicates: int = 2000
    """bootstrap replicates behind the intervals"""
    seed: int = 0
    """another seed draws other replicates"""


def main(config: ABConfig, *, known: Known | None = None) -> dict[str, Any]:
    """Writes the report; returns its paths and the differences.

    `known` has figures of chats that stand in no store: figure -> chat id -> value.
    """
    require(config, store="a database of served chats, e.g. sqlite:///chats.db")
    require(config, output_dir="a folder to write to")
    at_least(config, replicates=1, seed=0)
    with closing(Store(config.store, create=False)) as store:
        chats = read_chats(store.dialogs())
    resampled = {"replicates": config.replicates, "seed": config.seed}
    comparison = compare_served(chats, baseline=config.baseline, known=known, **resampled)
    out = claim_output(config, "ab")
    paths = write_ab_report(comparison, out)
    if not config.quiet:
        shown = ("Votes", "Difference", "Ratings", "Not part of the comparison")
        print_tables(sections(comparison), shown, wrapped=shown[::3], notes=True)
    return {
        **{kind: str(path) for kind, path in paths.items()},
        **headline(comparison, ("vote", *(known or ()))),
    }


if __name__ == "__main__":
    run(ABConfig, main)
