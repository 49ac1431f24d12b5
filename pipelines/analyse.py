"""What happened in simulated task-oriented dialogs, of one policy or of several that met the same users.

    python -m pipelines.simulate --policy rule --output_dir runs/rule
    python -m pipelines.simulate --policy ppo  --output_dir runs/ppo
    python -m pipelines.analyse --simulated runs/rule runs/ppo --output_dir runs/tasks

Differences are to the first folder's policy. rl_dialog/evaluation/task_dialogs.py says what is counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as ShownTable

from rl_dialog.errors import UserError
from rl_dialog.evaluation.task_dialogs import read_task_dialogs
from rl_dialog.evaluation.task_report import compare_tasks, sections, write_task_report
from rl_dialog.run import Output, at_least, claim_output, require, run


@dataclass(frozen=True)
class AnalyseConfig(Output):
    """Which dialogs. Written are tasks.md, tasks.html, tasks.json, dialogs.csv and plots/."""

    simulated: tuple[str, ...] = ()
    """folders that `simulate` or `converse` wrote; NAME=FOLDER gives one another name than its own"""
    replicates: int = 2000
    """bootstrap replicates behind the intervals"""
    seed: int = 0
    """another seed draws other replicates"""


def main(config: AnalyseConfig) -> dict[str, Any]:
    """Writes the report; returns its paths and the headline figures. Raises UserError or OSError for what the user can fix."""
    require(config, simulated="folders that simulate or converse wrote")
    at_least(config, replicates=1)
    found = _read(config.simulated)
    out = claim_output(config, "analyse")
    options = {name: _options(Path(folder)) for name, (folder, _) in found.items()}
    comparison = compare_tasks(found, options=options, replicates=config.replicates, seed=config.seed)
    paths = write_task_report(comparison, out)
    if not config.quiet:
        console = Console(highlight=False, width=None if Console().is_terminal else 150)
        if comparison.other_options:
            console.print(comparison.other_options, markup=False)
        for section in sections(comparison):
            if section.table and section.title in ("Measures", "Difference", "Domains", "Why dialogs fail", "Missed bookings", "Loops"):
                table = ShownTable(*section.table.columns, title=section.title)
                for row in section.table.rows:
                    table.add_row(*(cell.replace(" [", "\n[") for cell in row))
                console.print(table, markup=False)
    success = {each.name: _triple(each.group.estimates["success"]) for each in comparison.runs}
    changes = {name: _triple(of.get("success")) for name, of in comparison.differences.items()}
    return {**{kind: str(path) for kind, path in paths.items()}, "success": success, "differences": changes}


def _read(folders: tuple[str, ...]) -> dict[str, tuple[str, list[Any]]]:
    found: dict[str, tuple[str, list[Any]]] = {}
    for given in folders:
        name, _, folder = given.rpartition("=") if "=" in given and not Path(given).exists() else ("", "", given)
        path, name = Path(folder) / "dialogs.jsonl", name or Path(folder).name
        if not path.is_file():
            raise UserError(f"--simulated {folder}: expected a folder that simulate or converse wrote, found no {path}")
        if name in found:
            raise UserError(f"--simulated: two folders are called {name}; name them: a={found[name][0]} b={folder}")
        found[name] = folder, read_task_dialogs(path)
    return found


def _options(folder: Path) -> dict[str, Any] | None:
    """The user options of a run that are not the defaults; None where its results do not tell them."""
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8")).get("options") if path.is_file() else None


def _triple(value: Any) -> list[float | None] | None:
    return value and [value.value, value.low, value.high]


if __name__ == "__main__":
    run(AnalyseConfig, main)
