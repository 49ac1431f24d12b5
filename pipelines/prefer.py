"""Teach a policy by comparing clips of what it does: it learns from the reward that explains the answers.

    python -m pipelines.prefer --env pong --output_dir runs/pong
    python -m pipelines.prefer --env moving_dot --labeller oracle --output_dir runs/dot
    python -m pipelines.prefer --env moving_dot --mode original-rewards --output_dir runs/true

The first is for people, who answer on the page that it names; in the second the environment's true reward
answers, and the third is the yardstick: the true reward. Killed, or to go on for longer: the same command
with `--resume`. What changed of its settings is shown. `--mode gather` and `--mode pretrain` are the first
two parts of `train`, for which others may answer in between (`python -m pipelines.label`); each next part
goes on with `--resume`. Into the output folder go

    labels.db            every query, showing and answer (or the database that --labels names)
    clips/               what was compared
    reward/<version>/    the reward model: weights, normaliser, optimizer
    checkpoint-<steps>/  the policy; `latest` names the last one
    metrics.jsonl, tensorboard/, status.json, events.jsonl, prefer.yaml

rl_dialog/preferences/README.md describes the roles, the settings and every metric.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from envs import vectors_of
from rl_dialog.config import read_yaml, to_dict
from rl_dialog.errors import UserError
from rl_dialog.preferences.exchange import take_over
from rl_dialog.preferences.original_names import OriginalNames, in_our_names
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.settings import Suited, completed, suited_groups, suited_to
from rl_dialog.run import OnCluster, ResumableOutput, changes, claim_output, is_loopback, require, run

FIXED = ("env", "env_options", "model", "algorithm", "num_envs", "synchronous")  # --resume takes no others


@dataclass(frozen=True)
class PreferConfig(OriginalNames, ResumableOutput, OnCluster):
    """Who learns, from whose labels."""

    output_dir: Annotated[str, tyro.conf.arg(aliases=["--log-dir"])] = ""
    """the folder of the run"""
    env_options: str = ""
    """arguments of the environment, `observations=position,continuous=true`"""
    synchronous: bool = False
    """one role after the other in one process, reproducible to the bit; for oracles"""
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl"""


def suited(config: PreferConfig) -> dict[str, Any]:
    """Settings of the policy, the reward and the queries that suit the environment, `load_config`'s."""
    defaults = _suited(config)
    return suited_groups(defaults, defaults.steps if config.given_steps is None else config.given_steps)


def resolved(config: PreferConfig) -> PreferConfig:
    """With numbers that suit the environment where none are given, and the original's names carried over to
    ours."""
    labels = config.labels or f"sqlite:///{Path(config.output_dir) / 'labels.db'}"
    return completed(in_our_names(replace(config, labels=labels)), _suited(config))


def main(config: PreferConfig) -> dict[str, Any]:
    """Runs the mode; headline figures. Raises UserError or OSError for what cannot be."""
    config = resolved(config)
    require(config, output_dir="the folder of the run")
    config.check()
    if config.synchronous and config.labeller != "oracle" and config.mode in ("train", "gather"):
        raise UserError("--synchronous waits for every answer: expected --labeller oracle")
    _make_envs(config)(1).close()  # options that the environment does not have, before anything is written
    out = _begin(config)
    began = time.perf_counter()
    result = _run(config, out)
    seconds = round(time.perf_counter() - began, 1)
    files = {**RunFiles(out).latest(), "seconds": seconds, "output_dir": str(out)}
    return {"mode": config.mode, **result, **files}


def _run(config: PreferConfig, out: Path) -> dict[str, Any]:
    from rl_dialog.cluster import preference_modes as modes  # RLlib loads for seconds

    more = {"report_to": config.report_to, "settings": to_dict(config), "quiet": config.quiet}
    run = (config, _make_envs(config), out, partial(modes.logged_run, out, **more))
    address = config.address or None
    if config.mode == "pretrain":
        return modes.fit_reward(*run)
    if config.mode == "original-rewards":
        return modes.learn_from_true_reward(*run, address=address)
    person = "you" if is_loopback(config.page_host) else None
    return modes.learn_from_labels(*run, in_turn=config.synchronous, address=address, person=person)


def _make_envs(config: PreferConfig) -> Any:
    return vectors_of(config.env, config.env_options)


def _suited(config: PreferConfig) -> Suited:
    return suited_to(config.env, _make_envs(config).keywords.get("observations", ""))


def _begin(config: PreferConfig) -> Path:
    """The run's folder; what --resume changes of its settings is shown."""
    stored = Path(config.output_dir) / "prefer.yaml"
    before = read_yaml(str(stored)) if config.resume and stored.is_file() else {}
    now = to_dict(config)
    out = claim_output(config, "prefer", free=[name for name in now if name not in FIXED])
    for change in changes(before, now):
        print(f"going on with {change}", file=sys.stderr, flush=True)
    if config.labels_from and not before:
        take_over(Path(config.labels_from), out, config.labels)
    return out


if __name__ == "__main__":
    run(PreferConfig, main, suited=suited)
