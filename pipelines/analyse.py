"""What happened in simulated task-oriented dialogs, of one policy or of several that met the same users.

    python -m pipelines.simulate --policy rule --output_dir runs/rule
    python -m pipelines.simulate --policy ppo  --output_dir runs/ppo
    python -m pipelines.analyse --simulated runs/rule runs/ppo --output_dir runs/tasks

Differences are to the first folder's policy. rl_dialog/evaluation/task_dialogs.py says what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_dialog.evaluation.document import print_tables, terminal
from rl_dialog.evaluation.task_dialogs import options_of, read_simulated
from rl_dialog.evaluation.task_report import compare_tasks, headline, sections, write_task_report
from rl_dialog.run import Output, at_least, claim_output, require, run

SHOWN = (
    "Measures",
    "Difference",
    "Domains",
    "Why dialogs fail",
    "Missed bookings",
    "Loops",
)  # tables in the terminal


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
    """Writes the report; returns its paths and the headline figures."""
    require(config, simulated="folders that simulate or converse wrote", output_dir="a folder to write to")
    at_least(config, replicates=1, seed=0)
    dialogs = read_simulated(config.simulated)
    options = {name: options_of(folder) for name, (folder, _) in dialogs.items()}
    out = claim_output(config, "analyse")
    comparison = compare_tasks(dialogs, options=options, replicates=config.replicates, seed=config.seed)
    paths = write_task_report(comparison, out)
    if not config.quiet:
        if comparison.other_options:
            terminal().print(comparison.other_options, markup=False)
        print_tables(sections(comparison), SHOWN, wrapped=SHOWN)
    return {**{kind: str(path) for kind, path in paths.items()}, **headline(comparison)}


if __name__ == "__main__":
    run(AnalyseConfig, main)
