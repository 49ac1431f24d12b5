"""Checkpoints to a report: returns in an environment, scores on held-out logs, rewards, KL to the prior.

    python -m pipelines.evaluate --checkpoints runs/bc-* runs/ilql-* --env small_talk --output_dir runs/report

A run folder gives its best and its last checkpoint. Runs whose names differ by `seed<k>` at the end are
one group, and figures have intervals over seeds; `rl_dialog/evaluation/README.md` defines them.
`compare` trains first and makes a whole table, `ab` compares models that were served by what their users said
of them, `analyse` tells what happened in simulated task-oriented dialogs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from envs import text_env
from rl_dialog.cluster.evaluation import evaluate_in_turn, evaluate_side_by_side
from rl_dialog.cluster.experiment import still_waiting
from rl_dialog.cluster.gpus import check_device
from rl_dialog.config import to_dict
from rl_dialog.errors import UserError
from rl_dialog.evaluation.checkpoints import CheckpointConfig, MakeEnv, check_beta, check_measures
from rl_dialog.evaluation.held_out import HeldOut, read_held_out
from rl_dialog.evaluation.report import print_overview
from rl_dialog.evaluation.results import headline, put_together, write_evaluation
from rl_dialog.evaluation.runs import find_entries
from rl_dialog.evaluation.summary import RunResult
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.run import OnCluster, Output, at_least, claim_output, progress, require, run


@dataclass(frozen=True)
class EvaluateConfig(CheckpointConfig, Output, OnCluster):
    """What to evaluate, where, and how."""

    checkpoints: tuple[str, ...] = ()
    """run folders (best and last checkpoint each) or checkpoint directories"""
    names: tuple[str, ...] = ()
    """group of each checkpoint; by default its folder's name without a trailing seed<k>"""
    num_workers: int = 0
    """Ray actors that play the episodes; 0 plays them in this process. The result is the same"""
    side_by_side: bool = False
    """evaluate as many checkpoints at a time as Ray has cores, each on one of them. The result is the same"""


def main(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates and writes the report; returns headline figures and paths."""
    began = time.perf_counter()
    load_quietly()
    require(config, checkpoints="run folders or checkpoint directories", output_dir="a folder to write to")
    at_least(config, episodes=1, batch_size=1, replicates=1, num_workers=0, best_of=0)
    at_least(config, seed=0, held_out=0, samples=0, max_length=2)
    if config.side_by_side and config.num_workers:
        why = "checkpoints that are evaluated at the same time play their own episodes"
        raise UserError(f"expected side_by_side or num_workers: {why}")
    check_device(config.device, config.address)
    check_measures(config)
    make_env = text_env(config.env) if config.env else None
    entries = find_entries(config.checkpoints, config.names)
    directories = list(dict.fromkeys(entry.directory for entry in entries))
    check_beta(config, directories)
    held_out = read_held_out(config) if config.data else None
    out = claim_output(config, "evaluate")
    results = {}
    with progress("evaluate", len(directories), "checkpoints", quiet=config.quiet) as step:
        for directory, result in _measured(config, directories, make_env, held_out):
            results[directory] = result
            step(1)
    evaluation = put_together(config, entries, results, held_out, make_env)
    written = write_evaluation(evaluation, out, to_dict(config))
    if not config.quiet:
        print_overview(evaluation)
    seconds = round(time.perf_counter() - began, 2)
    return {**written, "checkpoints": len(directories), "seconds": seconds, **headline(evaluation)}


def _measured(
    config: EvaluateConfig, directories: Sequence[str], make_env: MakeEnv | None, held_out: HeldOut | None
) -> Iterator[tuple[str, RunResult]]:
    """(directory, result) of each checkpoint."""
    how = {"address": config.address or None}
    if config.side_by_side:
        say = (lambda text: None) if config.quiet else partial(print, file=sys.stderr, flush=True)
        how["waiting"] = still_waiting(say, "checkpoints")
        return evaluate_side_by_side(directories, config, make_env, held_out, **how)
    return evaluate_in_turn(directories, config, make_env, held_out, num_workers=config.num_workers, **how)


if __name__ == "__main__":
    run(EvaluateConfig, main)
