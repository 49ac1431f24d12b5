"""Is what a sweep goes by ever measured? Said before anything is trained, and not after hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_dialog.config import ConfigError
from rl_dialog.evaluation.checkpoints import CheckpointConfig
from rl_dialog.evaluation.episodes import MEASURED
from rl_dialog.evaluation.runs import nearest
from rl_dialog.models.checkpoint import method_name
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.choosing import read_weights
from rl_dialog.training.rehearsal import reported_metrics

RETURNS = ("return", "return_greedy", "return_best_of")
OF_LOGS = ("perplexity", "lm_perplexity", "kl", "kl_per_reply", "critic")
OF_TEXTS = (
    "replies",
    "tokens",
    "words",
    "repeated",
    "rep_3",
    "empty",
    "unfinished",
    "distinct_1",
    "distinct_2",
)
BY_FLAG = {
    "answer/": "contexts",
    "ope/": "ope",
    "top/": "candidates",
    "ranked/": "candidates",
    "gain/": "candidates",
}


def check_metric(sweep: Any, runs: Sequence[Any], *, held_out: bool, where: str) -> None:
    """Raises ConfigError for a metric that training would not report of all these runs (configs of `train`,
    or of `online`), and for methods that would be compared by their own losses. `held_out`: is there a
    validation split?"""
    metric, methods = sweep.metric, list(dict.fromkeys(run.method for run in runs))
    if sweep.online:
        _check_online_metric(metric, runs, where)
        return
    if metric in MEASURED:
        if not all(run.env for run in runs):
            fix = "expected --env in train, or another metric"
            raise ConfigError(f"{where}: the metric {metric} is measured in an environment: {fix}")
        return
    for method in methods:
        reported = reported_metrics(method) if held_out else set()
        if metric not in reported:
            listing = ", ".join(sorted(reported)) or "nothing, as --validation 0 leaves no dialogs"
            raise ConfigError(
                f"{where}: the metric {metric} is never measured: expected one that training "
                f"{method_name(method)} reports of held-out dialogs, {listing}, or with --env one of "
                f"{', '.join(MEASURED)}.{nearest(metric, [*reported, *MEASURED])}"
            )
    names = dict.fromkeys(method_name(method) for method in methods)
    by_metric = sweep.halving or sweep.search == "optuna" or not sweep.evaluate
    if by_metric and len(names) > 1:
        raise ConfigError(
            f"{where}: {metric} is what each method says of its own loss, so it compares no two of them "
            f"({', '.join(names)}): expected a metric that is measured in an environment ("
            f"{', '.join(MEASURED)}), or an evaluation to rank by and no halving or optuna"
        )


def _check_online_metric(metric: str, runs: Sequence[Any], where: str) -> None:
    """The same of runs of `online`, whose returns are always measured."""
    judged = all(run.env and read_weights(run.rewards) for run in runs)
    reported = (*MEASURED, "eval/true_return") if judged else MEASURED
    if metric not in reported:
        raise ConfigError(
            f"{where}: the metric {metric} is never measured: expected one of {', '.join(reported)}"
            + ("" if judged else ", or with rewards that judge in a world eval/true_return")
            + f".{nearest(metric, reported)}"
        )


def check_figure(figure: str, config: CheckpointConfig, *, where: str) -> None:
    """Raises ConfigError for a figure that an evaluation with this config does not measure."""
    if missing := _missing(figure, config):
        raise ConfigError(f"{where}: the figure {figure} is never measured: expected {missing}")


def _missing(figure: str, config: CheckpointConfig) -> str:
    """What the evaluation lacks that would measure the figure; nothing where it is measured."""
    texts = bool(config.env or config.contexts)
    if figure in RETURNS:
        missing = "" if config.env else "--env in evaluate, the environment that returns are earned in"
        if figure == "return_greedy" and not (config.greedy and config.do_sample):
            missing = "--greedy and --do_sample in evaluate"
        return missing if figure != "return_best_of" or config.best_of > 1 else "--best_of in evaluate"
    if figure in OF_TEXTS or figure.startswith("reward/"):
        return "" if texts else "--env or --contexts in evaluate, where replies are generated"
    if figure in OF_LOGS or figure.startswith("critic/"):
        return ""
    for prefix, flag in ({"candidates_different": "candidates"} | BY_FLAG).items():
        if figure.startswith(prefix):
            return "" if getattr(config, flag) else f"--{flag} in evaluate"
    names = [*RETURNS, *OF_LOGS, *OF_TEXTS, *(f"reward/{name}" for name in REWARDS)]
    return f"one of {', '.join(names)}, or one of --ope and --candidates.{nearest(figure, names)}"
