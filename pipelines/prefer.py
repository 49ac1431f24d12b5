"""Teach a policy by comparing clips of what it does: it learns from the reward that explains the answers.

    python -m pipelines.prefer --env moving_dot --labeller oracle --output_dir runs/dot          the environment's true reward answers
    python -m pipelines.prefer --env pong --output_dir runs/pong                                 people answer, on the page that it names
    python -m pipelines.prefer --env moving_dot --mode original-rewards --output_dir runs/true   the yardstick: the true reward

Killed, or to go on for longer: the same command with `--resume`. What changed of its settings is shown. `--mode gather` and
`--mode pretrain` are the first two parts of `train`, for which others may answer in between (`python -m pipelines.label`).
Into the output folder go

    labels.db            every query, showing and answer (or the database that --labels names)
    clips/               what was compared
    reward/<version>/    the reward model: weights, normaliser, optimizer
    checkpoint-<steps>/  the policy; `latest` names the last one
    metrics.jsonl, tensorboard/, status.json, events.jsonl, prefer.yaml

rl_dialog/preferences/README.md describes the roles, the settings and every metric.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.label import drawing
from pipelines.prefer_settings import PreferConfig, make_envs, resolved, suited
from rl_dialog.config import read_yaml, to_dict
from rl_dialog.errors import UserError
from rl_dialog.preferences.exchange import open_labels
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.schedule import AnnotationSchedule
from rl_dialog.preferences.segments import Segments
from rl_dialog.run import HOW, at_least, claim_output, require, run
from rl_dialog.training.logger import Logger, following

FIXED = ("env", "env_options", "model", "algorithm", "num_envs", "synchronous")  # a run is gone on with only where these are the same


def main(config: PreferConfig) -> dict[str, Any]:
    """Runs the mode; headline figures. Raises UserError or OSError for what cannot be, RuntimeError where a role cannot be kept alive."""
    config = resolved(config)
    _check(config)
    out = _begin(config)
    began = time.perf_counter()
    result = {"train": _train, "gather": _train, "pretrain": _pretrain, "original-rewards": _original}[config.mode](config, out)
    return {"mode": config.mode, **result, "seconds": round(time.perf_counter() - began, 1), "output_dir": str(out)}


def placed(config: PreferConfig, gpus: float) -> PreferConfig:
    """With a device that there is, of so many GPUs. Raises UserError where a GPU is asked for and there is none."""
    if config.device == "cuda" and not gpus:
        raise UserError("--device cuda: expected a GPU that torch and Ray know of, found none")
    if config.device != "auto":
        return config
    envs = make_envs(config)(1)
    pictures = len(envs.single_observation_space.shape) == 3
    envs.close()
    return replace(config, device="cuda" if gpus and pictures else "cpu")


def plan_of(config: PreferConfig, out: Path, *, gpus: float = 0.0) -> Any:
    """The roles of a run, as constructors. `gpus`: how many there are."""
    from rl_dialog.cluster.preferences import Plan

    config = placed(config, gpus)
    total = AnnotationSchedule(config.budget, config.steps, config.initial_labels, config.schedule, config.schedule_scale)
    labellers = {"oracle": partial(make_oracle, config, out), "page": partial(make_page, config, out)}
    return Plan(
        learner=partial(make_learner, config, out),
        asker=partial(make_asker, config, out),
        teacher=None if config.mode == "gather" else partial(make_teacher, config, out),
        labellers={} if config.labeller == "none" else {config.labeller: labellers[config.labeller]},
        wanted=total.labels_wanted,
        steps=config.steps,
        budget=config.budget,
        clips=config.clips,
        gather=config.initial_labels if config.mode == "gather" else 0,
        max_staleness=config.max_staleness,
        gpus=min(1.0, gpus / 2) if config.device == "cuda" else 0.0,
        paced=config.labeller == "oracle",
    )


def make_learner(config: PreferConfig, out: Path, *, learned: bool = True) -> Any:
    from rl_dialog.cluster.preference_learner import Learner, LearnerSettings

    envs = make_envs(config)
    names = ("seed", "save_every", "save_total_limit", "eval_every", "eval_episodes", "averaging", "device")
    more = {"envs": config.num_envs, "workers": config.num_workers, "checkpoint": config.model_name_or_path}
    more |= {name: getattr(config, name) for name in names}
    ppo = config.ppo if config.algorithm == "ppo" else config.a2c
    return Learner(LearnerSettings(config.env, envs, ppo, envs.func.clip_length, learned=learned, **more), out)


def make_asker(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.preferences.roles import Asker

    task = config.queries.task or make_envs(config).func.task
    pool = config.budget if config.labeller == "oracle" else None
    least = min(config.clips, 2 * config.initial_labels, 200)
    settings = replace(config.queries, task=task)
    return Asker(LabelLog(config.labels), Segments(out / "clips"), settings, capacity=config.clips, least=least, pool=pool, seed=config.seed)


def make_teacher(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.cluster.preference_learner import reward_shape
    from rl_dialog.preferences.roles import Teacher

    model = config.model
    shape = reward_shape(make_envs(config), hidden=model.hidden, **{name: getattr(model, name) for name in vars(model) if name != "hidden"})
    enough = 1 if config.labels_from or config.mode == "pretrain" else config.initial_labels
    passes = {"enough": enough, "first_epochs": config.first_epochs, "epochs": config.epochs, "start": config.reward_model}
    more = {**passes, "seed": config.seed, "device": config.device}
    return Teacher(LabelLog(config.labels), Segments(out / "clips"), out / "reward", shape, config.reward, **more)


def make_oracle(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.preferences.roles import OracleLabeller

    oracle = Oracle(**vars(config.oracle), seed=config.seed)
    return OracleLabeller(LabelLog(config.labels), Segments(out / "clips"), oracle)


def make_page(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.preferences.page.app import create_page
    from rl_dialog.preferences.page.server import PageServer

    open_to_all = config.page_host in ("127.0.0.1", "localhost", "::1")
    draw = drawing({"env": config.env})
    app = create_page(LabelLog(config.labels), Segments(out / "clips"), draw=draw, labeller="you" if open_to_all else None, run=out)
    return PageServer(app, host=config.page_host, port=config.page_port)


def _train(config: PreferConfig, out: Path) -> dict[str, Any]:
    import ray
    import torch

    from rl_dialog.cluster.data import connect
    from rl_dialog.cluster.preferences import Supervisor, run_in_turn

    with nullcontext() if config.synchronous else connect(config.address or None):
        gpus = torch.cuda.device_count() if config.synchronous else ray.cluster_resources().get("GPU", 0)
        plan = plan_of(config, out, gpus=gpus)
        with _logged(config, out) as log:
            run_in_turn(plan, out, log) if config.synchronous else Supervisor(plan, out, log).run()
    counts = LabelLog(config.labels, create=False).counts()
    return {**figures(out), "labels": counts["labels"], "ties": counts["ties"], "skipped": counts["skipped"], **_latest(out)}


def _pretrain(config: PreferConfig, out: Path) -> dict[str, Any]:
    import torch

    teacher = make_teacher(placed(config, torch.cuda.device_count()), out)
    with _logged(config, out) as log:
        metrics = teacher.step()
        log(teacher.version, {f"pref/{name}": value for name, value in metrics.items()})
    if not teacher.version:
        raise UserError(f"expected labels to fit a reward to in {config.labels}, found none; `--mode gather` collects them")
    return {**{name: metrics[name] for name in ("loss", "validation_accuracy", "training_labels") if name in metrics}, **_latest(out)}


def _original(config: PreferConfig, out: Path) -> dict[str, Any]:
    import torch

    from rl_dialog.cluster.data import connect

    with connect(config.address or None) if config.num_workers else nullcontext(), _logged(config, out) as log:
        learner = make_learner(placed(config, torch.cuda.device_count()), out, learned=False)
        while learner.steps < config.steps:
            metrics, _ = learner.step()
            log(int(metrics.pop("steps")), {name: value for name, value in metrics.items() if name.startswith(("train/", "eval/"))})
            if metrics["due"]:
                learner.save()
        learner.save()
    return {**figures(out), **_latest(out)}


def figures(out: Path) -> dict[str, Any]:
    """Of the run's metrics: the mean true return of the last tenth of its episodes, and of the last evaluation."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ended = [(line["train/return"], line["train/episodes"]) for line in lines if line.get("train/return") is not None]
    evaluated = [line for line in lines if line.get("eval/return") is not None]
    found: dict[str, Any] = {"steps": lines[-1]["step"] if lines else 0}
    if ended:
        last, left = [], sum(count for _, count in ended) / 10
        while ended and left > 0:
            value, count = ended.pop()
            last.append((value, min(count, left)))
            left -= count
        found["return"] = round(sum(value * count for value, count in last) / sum(count for _, count in last), 3)
    if evaluated:
        found |= {"eval_return": round(evaluated[-1]["eval/return"], 3), "eval_return_sampled": round(evaluated[-1]["eval/return_sampled"], 3)}
    return found


def _latest(out: Path) -> dict[str, str]:
    from rl_dialog.preferences.roles import newest_version

    found = {}
    if version := newest_version(out / "reward"):
        found["reward"] = str(out / "reward" / str(version))
    if (out / "latest").is_file():
        found["checkpoint"] = str(out / (out / "latest").read_text(encoding="utf-8").strip())
    return found


def _check(config: PreferConfig) -> None:
    require(config, output_dir="the folder of the run")
    at_least(config, steps=1, budget=1, initial_labels=1, num_envs=1, num_workers=0, first_epochs=1, epochs=1, clips=2, save_every=1)
    at_least(config, save_total_limit=1, eval_every=0, eval_episodes=1, max_staleness=0, seed=0)
    if config.synchronous and config.labeller != "oracle" and config.mode in ("train", "gather"):
        raise UserError("--synchronous waits for every answer: expected --labeller oracle")
    if not 0 <= config.averaging < 1:
        raise UserError(f"expected --averaging of at least 0 and below 1, got {config.averaging}")
    make_envs(config)(1).close()  # an unknown environment, or options that it does not have, before anything is written


def _begin(config: PreferConfig) -> Path:
    """The run's folder. What --resume changes of its settings is shown. Raises UserError where it cannot be gone on with."""
    stored = Path(config.output_dir) / "prefer.yaml"
    before = read_yaml(str(stored)) if config.resume and stored.is_file() else {}
    out = claim_output(config, "prefer", free=[name for name in to_dict(config) if name not in FIXED])
    now = to_dict(config)
    for name in (name for name in before if name not in HOW and before[name] != now.get(name)):
        changed = f"{_shown(now[name], before[name])} instead of {_shown(before[name], now[name])}"
        print(f"going on with --{name} {changed}", file=sys.stderr, flush=True)
    if config.labels_from and not before:
        take_over(Path(config.labels_from), out, config.labels)
    return out


def take_over(source: Path, out: Path, labels: str) -> int:
    """Copies the labels of another run, with their clips; how many. Raises UserError for a folder that is no run's."""
    path = source / "prefer.yaml"
    if not path.is_file():
        raise UserError(f"--labels_from: expected the folder of a run with prefer.yaml, got {source}")
    (theirs, there), here = open_labels(source, read_yaml(str(path))["labels"]), Segments(out / "clips")
    taken = theirs.labels()
    for label in taken:
        for id in (label.first, label.second):
            here.add(there[id])
    return LabelLog(labels).add_labels(taken)


def _shown(value: Any, other: Any) -> str:
    """A value, or what of it differs from another one."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items() if other.get(name) != each)
    return str(value)


@contextmanager
def _logged(config: PreferConfig, out: Path) -> Iterator[Any]:
    """Writes metrics and shows them while the block lasts."""
    latest = out / "latest"
    first = int(latest.read_text(encoding="utf-8").strip().rsplit("-", 1)[1]) if latest.is_file() else 0
    logger = Logger(out, first_step=first, report_to=config.report_to, settings=to_dict(config))
    with nullcontext() if config.quiet else following(out):
        yield logger.log
    logger.close()


if __name__ == "__main__":
    run(PreferConfig, main, suited=suited)
