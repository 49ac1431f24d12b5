"""The modes of a preference run, for `pipelines.prefer`: the whole of it, the reward from labels that are
there, and the policy from the true reward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.preference_plan import make_learner, make_teacher, placed, plan_of
from rl_dialog.cluster.preferences import Log, Supervisor, run_in_turn
from rl_dialog.data.database import database_url, is_missing, shown_url
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.settings import PreferenceRun
from rl_dialog.training.logger import Logger, following

if TYPE_CHECKING:
    from rl_dialog.cluster.rllib import MakeEnvs

Logged = Callable[[], AbstractContextManager[Log]]  # writes what it hears while the block lasts


def learn_from_labels(
    run: PreferenceRun,
    make_envs: MakeEnvs,
    out: Path,
    logged: Logged,
    *,
    in_turn: bool,
    address: str | None,
    person: str | None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """All roles, or those that gather labels; headline figures. `in_turn`: one after the other in this
    process; `person`: who answers on the page without a token; `stop`: set when the run is to end and to
    save."""
    with nullcontext() if in_turn else connect(address):
        gpus = torch.cuda.device_count() if in_turn else ray.cluster_resources().get("GPU", 0)
        plan = plan_of(run, make_envs, out, gpus=gpus, person=person)
        with logged() as log:
            if in_turn:
                run_in_turn(plan, out, log, stop=stop)
            else:
                Supervisor(plan, out, log, stop=stop).run()
    counts = LabelLog(run.labels, create=False).counts()
    return RunFiles(out).headline() | {name: counts[name] for name in ("labels", "ties", "skipped")}


def fit_reward(run: PreferenceRun, make_envs: MakeEnvs, out: Path, logged: Logged) -> dict[str, Any]:
    """The reward alone, from the labels that are there. Raises UserError where there are none."""
    shown = shown_url(database_url(run.labels))
    nothing = UserError(
        f"expected labels to fit a reward to in {shown}, found none; `--mode gather` collects them"
    )
    if is_missing(run.labels):
        raise nothing
    teacher = make_teacher(placed(run, make_envs, torch.cuda.device_count()), make_envs, out)
    with logged() as log:
        metrics = teacher.step()
        log(teacher.version, {f"pref/{name}": value for name, value in metrics.items()})
    if not teacher.version:
        raise nothing
    names = ("loss", "validation_accuracy", "training_labels")
    return {name: metrics[name] for name in names if name in metrics}


def learn_from_true_reward(
    run: PreferenceRun,
    make_envs: MakeEnvs,
    out: Path,
    logged: Logged,
    *,
    address: str | None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """The policy from the environment's own reward; headline figures. `stop` as above."""
    with connect(address) if run.num_workers else nullcontext(), logged() as log:
        placed_run = placed(run, make_envs, torch.cuda.device_count())
        make_learner(placed_run, make_envs, out, learned=False).run(run.steps, log, stop=stop)
    return RunFiles(out).headline()


@contextmanager
def logged_run(out: Path, *, report_to: str, settings: dict[str, Any], quiet: bool) -> Iterator[Log]:
    """Writes metrics, and shows them unless `quiet`, while the block lasts."""
    latest = RunFiles(out).latest().get("checkpoint", "-0")
    first = int(latest.rsplit("-", 1)[1])
    logger = Logger(out, first_step=first, report_to=report_to, settings=settings)
    with nullcontext() if quiet else following(out):
        yield logger.log
    logger.close()
