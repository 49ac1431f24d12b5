"""The results table: every method on every task over seeds, trained, evaluated, and written as Markdown, JSON
and a plot.

    python -m pipelines.compare --experiments tune_configs/compare_methods.yaml --output_dir runs/compare

    logs -> settings (where a task searches) -> prepare -> bc for every seed
         -> candidates (where a task wants them)
         -> every method from its seed's bc -> evaluate -> table

Runs are processes of one core, as many at a time as Ray has cores; OUT/<task>/<method>-seed<k> is the folder
of one, OUT/<task>/report of `evaluate`. With --resume the same command repeats nothing that is done: a killed
run goes on from its latest checkpoint, and only what follows from a changed flag is made anew
(OUT/<task>/recipes says what each folder was made from; the code is not part of it, so delete a folder to
repeat it). A run that fails stops no other one: the table names it, its traceback is in error.txt of its
folder, and the command ends with status 2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from pipelines import stages, tune
from rl_dialog.cluster.data import connect
from rl_dialog.config import typed_command
from rl_dialog.evaluation.comparison import BASELINE, replace_table
from rl_dialog.evaluation.comparison_file import (
    Chosen,
    Comparison,
    Settings,
    best_settings,
    read_comparison,
    with_taken_over,
    write_search,
)
from rl_dialog.evaluation.comparison_run import runs_of, write_results
from rl_dialog.evaluation.experiment import Progress, Run
from rl_dialog.evaluation.sweep_measured import check_figure
from rl_dialog.evaluation.sweep_space import check_world
from rl_dialog.run import OnCluster, ResumableOutput, claim_output, require, run


@dataclass(frozen=True)
class CompareConfig(ResumableOutput, OnCluster):
    """Which table, or which part of it."""

    experiments: str = ""
    """what to compare: a YAML file like tune_configs/compare_methods.yaml"""
    tasks: tuple[str, ...] = ()
    """only these tasks of the file"""
    methods: tuple[str, ...] = ()
    """only these methods of the file; bc, which they start from, is always there"""
    seeds: tuple[int, ...] = ()
    """other seeds than those of the file"""
    readme: str = ""
    """also put the table into this file, between the lines `<!-- compare: begin -->` and `<!-- compare: end
    -->`"""
    picture: str = ""
    """also write the plot to this SVG file"""


def main(config: CompareConfig) -> dict[str, Any]:
    """Makes the table; returns its paths.

    Raises UserError for what the user can fix, and at the end when something is missing from the table.
    """
    comparison = read(config)
    out = Path(config.output_dir).absolute()
    # a misspelt flag is told now, and not in two hours; so is a file without the marks
    for name, task in comparison.tasks.items():
        plan(comparison, name, out, {})
        flags = (task.bc, task.improve, *filter(None, task.methods.values()), task.evaluate, task.search)
        check_world(f"{config.experiments}: tasks: {name}", task.write_logs, flags)
    if config.readme:
        replace_table(Path(config.readme).read_text(encoding="utf-8"), "")
    # each part has a recipe of its own, and several commands may make one each
    claim_output(config, "compare", free=[field.name for field in fields(config)], shared=True)
    say = (lambda text: None) if config.quiet else partial(print, flush=True)
    settings = _find_settings(comparison, config, out)
    tasks = [
        Progress(name, task, out / name, plan(comparison, name, out, settings.get(name, {})))
        for name, task in comparison.tasks.items()
    ]
    with connect(config.address or None):
        for task in tasks:
            stages.prepare_task(task, say)
        stages.train_tasks(tasks, lambda one: one.method == BASELINE, say)
        for task in tasks:
            stages.make_candidates(task, say)
        stages.train_tasks(tasks, lambda one: one.method != BASELINE, say)
        stages.evaluate_tasks(tasks, say)
    command = typed_command("compare", config, ("experiments", "output_dir", "tasks", "methods", "seeds"))
    how = {"command": command, "readme": config.readme, "picture": config.picture, "say": say}
    return write_results(out, comparison, tasks, settings, **how)


def read(config: CompareConfig) -> Comparison:
    """The YAML file, cut down to what the flags ask for."""
    require(
        config, experiments="a file like tune_configs/compare_methods.yaml", output_dir="a folder to write to"
    )
    return read_comparison(config.experiments, tasks=config.tasks, methods=config.methods, seeds=config.seeds)


def plan(comparison: Comparison, name: str, out: Path, settings: Chosen) -> list[Run]:
    """Every run of a task, bc first, with the chosen settings.

    All flags are read here: a misspelt one is found before anything starts.
    """
    task, folder = comparison.tasks[name], out / name
    stages.prepare_config(task, folder)
    stages.candidates_config(task, folder, folder)
    evaluation = stages.evaluate_config(task, folder, ["RUN"])
    for figure in task.figures:
        check_figure(figure, evaluation, where=f"tasks: {name}: figures")
    return runs_of(comparison, name, folder, settings, stages.train_config)


def _find_settings(comparison: Comparison, config: CompareConfig, out: Path) -> Settings:
    """Searches where a task says so, by `tune` in OUT/<task>/search; a search that is done is read."""
    searched: Settings = {}
    for name, task in comparison.tasks.items():
        if task.search:
            sweep = write_search(comparison, name, out / name)
            where = {"sweep": str(sweep), "output_dir": str(out / name / "search"), "address": config.address}
            done = tune.main(tune.TuneConfig(resume=True, **where, quiet=config.quiet))
            searched[name] = best_settings(Path(done["sweep"]))
    return with_taken_over(comparison, searched)


if __name__ == "__main__":
    run(CompareConfig, main)
