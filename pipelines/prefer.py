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
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from envs import CONTROL, vectors_of, with_options
from rl_dialog.config import to_dict
from rl_dialog.data.database import database_url, is_missing, shown_url, without_password
from rl_dialog.errors import UserError
from rl_dialog.models.control_policy import ControlPolicy, shape_of
from rl_dialog.models.reward_model import RewardModel
from rl_dialog.preferences.earlier_runs import (
    as_it_saw,
    environment_options,
    is_earlier,
    named_labels,
    with_names_since,
)
from rl_dialog.preferences.environments import observes_pictures, probe
from rl_dialog.preferences.exchange import check_source, take_over
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.original_names import OriginalNames, in_our_names
from rl_dialog.preferences.run_files import RunFiles, latest_of
from rl_dialog.preferences.settings import (
    Suited,
    clip_length_of,
    completed,
    suited_groups,
    suited_to,
)
from rl_dialog.run import (
    OnCluster,
    ResumableOutput,
    changes,
    claimed,
    is_loopback,
    require,
    run,
    told_to_save,
)

# --resume takes no others
FIXED = ("env", "env_options", "clip_length", "model", "normalise_observations", "algorithm", "num_envs")
OF_GYMNASIUM = ("frames", "max_episode_steps", "ends")  # flags that are arguments of such an environment
ABSORBED = 25  # steps of the end state: the longest clip by default is full of it


@dataclass(frozen=True)
class PreferConfig(OriginalNames, ResumableOutput, OnCluster):
    """Who learns, from whose labels."""

    output_dir: Annotated[str, tyro.conf.arg(aliases=["--log-dir"])] = ""
    """the folder of the run"""
    env_options: str = ""
    """arguments of the environment, `observations=position,continuous=true`"""
    frames: int | None = None
    """environments of Gymnasium's only: observations that are seen at a time; by default 1 of numbers, 4
    pictures"""
    max_episode_steps: int | None = None
    """environments of Gymnasium's only: steps of an episode; by default what the environment itself says"""
    ends: Literal["refuse", "absorb", "restart", "allow", "hold"] | None = None
    """environments of Gymnasium's only: what to do with episodes that end sooner than others, which tells the
    policy what nobody has labelled. refuse (the default), absorb: a state without reward follows that goes on
    for ever, restart: the next start follows until the time limit, allow, hold: the last observation follows
    without reward until then"""
    synchronous: bool = False
    """one role after the other in one process, reproducible to the bit; for oracles"""
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl"""


def suited(config: PreferConfig) -> dict[str, Any]:
    """Settings of the policy, the reward and the queries that suit the environment, `load_config`'s."""
    defaults = _suited(config)
    return suited_groups(defaults, defaults.steps if config.given_steps is None else config.given_steps)


def _suited(config: PreferConfig) -> Suited:
    make_envs = vectors_of(config.env, _options(config))
    pictures = config.env not in CONTROL and observes_pictures(make_envs)
    observations = make_envs.keywords.get("observations", "")
    suited = suited_to(config.env, observations, pictures=pictures, earlier=_is_earlier(config))
    return as_it_saw(_began(config), suited)


def _options(config: PreferConfig) -> str:
    flags = {name: getattr(config, name) for name in OF_GYMNASIUM}
    options = with_options(config.env, config.env_options, flags)
    if began := _began(config):
        return environment_options(began, options)
    more = {"absorbed_steps": ABSORBED} if "ends=absorb" in options.split(",") else {}
    return options if "absorbed_steps=" in options else with_options(config.env, options, more)


def _is_earlier(config: PreferConfig) -> bool:
    return is_earlier(_began(config), config.aligned_clips)


def _began(config: PreferConfig) -> Mapping[str, Any]:
    """The settings of the run that --resume goes on with, {} for a new one."""
    return RunFiles(config.output_dir).settings() if config.resume else {}


def resolved(config: PreferConfig) -> PreferConfig:
    """With numbers that suit the environment where none are given, and the original's names carried over to
    ours."""
    labels = config.labels or RunFiles(config.output_dir).own_labels
    given = {"labels": labels, "env_options": _options(config)}
    given["model_name_or_path"] = latest_of(config.model_name_or_path, "checkpoint")
    given["reward_model"] = latest_of(config.reward_model, "reward")
    config = in_our_names(replace(config, **given, **dict.fromkeys(OF_GYMNASIUM)))
    envs = probe(_make_envs(config), is_seen=config.is_seen)
    horizon = 0 if _is_earlier(config) else getattr(envs, "horizon", 0)
    suits = clip_length_of(horizon) if horizon else envs.clip_length
    clip_length = _began(config).get("clip_length") or suits  # an earlier version took longer ones
    return completed(config, _suited(config), clip_length, horizon)


def _make_envs(config: PreferConfig) -> Any:
    return vectors_of(config.env, config.env_options)


def main(config: PreferConfig) -> dict[str, Any]:
    """Runs the mode; headline figures. Raises UserError or OSError for what cannot be."""
    config = resolved(config)
    require(config, output_dir="the folder of the run")
    config.check()
    if config.device not in ("auto", "cpu"):
        from rl_dialog.cluster.gpus import check_device  # Ray, which most runs of this verb do without

        check_device(config.device, config.address)
    database_url(config.labels)  # raises for what is no log's
    if config.synchronous and config.is_seen:
        raise UserError("--synchronous waits for every answer: expected --labeller oracle")
    with _claimed(config) as out:
        began = time.perf_counter()
        # A fit of the reward has no rounds after which it could save: it ends at once.
        at_once = config.mode == "pretrain"
        with nullcontext(threading.Event()) if at_once else told_to_save() as stop:
            result = _run(config, out, stop)
    if stop.is_set():
        labels = f"{result['labels']:,} labels and " if "labels" in result else ""
        saved = f"{labels}{result['steps']:,} steps are saved"
        print(f"\nstopped; {saved}. The same command with --resume goes on", file=sys.stderr)
        raise KeyboardInterrupt
    seconds = round(time.perf_counter() - began, 1)
    files = {**RunFiles(out).latest(), "seconds": seconds, "output_dir": str(out)}
    return {"mode": config.mode, **result, **files}


@contextmanager
def _claimed(config: PreferConfig) -> Iterator[Path]:
    """The run's folder; what --resume changes of its settings is shown."""
    files, now = RunFiles(config.output_dir), to_dict(config)
    before = with_names_since(_began(config), config, _make_envs(config))
    if before:
        before = {**before, "labels": without_password(named_labels(before, files.folder))}
    takes_over = _takes_over(config, before)
    _check_starts(config, begins=not before, takes_over=takes_over)
    is_own = config.labels == files.own_labels  # it is another one in a copy of the folder
    kept = replace(config, labels="" if is_own else without_password(config.labels))
    free = [name for name in now if name not in FIXED]
    with claimed(kept, "prefer", free=free, began=before) as out:
        for change in _changes(before, to_dict(kept), files.own_labels):
            print(f"going on with {change}", file=sys.stderr, flush=True)
        if takes_over:
            take_over(Path(config.labels_from), out, config.labels)
        yield out


def _check_starts(config: PreferConfig, *, begins: bool, takes_over: bool) -> None:
    """Raises UserError for labels, a reward or a policy that are not there or of another world, before
    --overwrite deletes anything."""
    if not takes_over and not (begins and (config.reward_model or config.model_name_or_path)):
        return
    envs = _make_envs(config)(1)
    shape = shape_of(envs, normalise_observations=config.normalise_observations, scales=2)
    envs.close()
    if takes_over:
        check_source(Path(config.labels_from), Path(config.output_dir), shape)
    if begins and config.reward_model:
        RewardModel.from_pretrained(config.reward_model, expected=shape)
    if begins and config.model_name_or_path:
        ControlPolicy.from_pretrained(config.model_name_or_path, expected=shape)


def _takes_over(config: PreferConfig, before: Mapping[str, Any]) -> bool:
    """Are labels of another run to come? A run that goes on has them, unless it ended before they came, or is
    told of them only now."""
    if not config.labels_from or not before or config.labels_from != before.get("labels_from"):
        return bool(config.labels_from)
    if is_missing(config.labels):
        return True
    log = LabelLog(config.labels)
    answers, *_ = log.state()
    log.close()
    return not answers


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], own_labels: str) -> Iterator[str]:
    """What goes on otherwise than it began; of another label log where it is, without passwords."""
    if before and before["labels"] != now["labels"]:
        logs = [shown_url(database_url(of["labels"] or own_labels)) for of in (now, before)]
        yield "the labels of {} instead of {}".format(*logs)
    yield from changes({name: before[name] for name in before if name != "labels"}, now)


def _run(config: PreferConfig, out: Path, stop: threading.Event) -> dict[str, Any]:
    from rl_dialog.cluster import preference_modes as modes  # RLlib loads for seconds

    # What a tracker shows of the run is not for whoever may write its labels.
    told = to_dict(config) | {"labels": shown_url(database_url(config.labels))}
    more = {"report_to": config.report_to, "settings": told, "quiet": config.quiet}
    run = (config, _make_envs(config), out, partial(modes.logged_run, out, **more))
    address = config.address or None
    if config.mode == "pretrain":
        return modes.fit_reward(*run)
    if config.mode == "original-rewards":
        return modes.learn_from_true_reward(*run, address=address, stop=stop)
    person = "you" if is_loopback(config.page_host) else None
    how = {"in_turn": config.synchronous, "address": address, "person": person, "stop": stop}
    return modes.learn_from_labels(*run, **how)


if __name__ == "__main__":
    run(PreferConfig, main, suited=suited)
