"""The roles of a preference run as constructors, so that any process can make them, and make them again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_dialog.cluster.preferences import Plan
from rl_dialog.errors import UserError
from rl_dialog.models.control_policy import shape_of
from rl_dialog.models.reward_model import RewardModelConfig
from rl_dialog.preferences.environments import is_drawn_when_seen, observes_pictures
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.roles import Asker, OracleLabeller, Teacher
from rl_dialog.preferences.schedule import AnnotationSchedule
from rl_dialog.preferences.segments import Segments
from rl_dialog.preferences.settings import PreferenceRun, R

if TYPE_CHECKING:
    from rl_dialog.cluster.preference_learner import Learner
    from rl_dialog.cluster.rllib import MakeEnvs


def plan_of(
    run: PreferenceRun, make_envs: MakeEnvs, out: Path, *, gpus: float = 0.0, person: str | None = None
) -> Plan:
    """The roles of a run, which has all its numbers.

    Args:
        make_envs: the class of the vectors of environments with its options, a `partial` (envs/__init__.py).
        gpus: how many there are.
        person: who answers on the page, where that is one person at this machine; else labellers have tokens.
    """
    run = placed(run, make_envs, gpus)
    total = AnnotationSchedule(run.budget, run.steps, run.initial_labels, run.schedule, run.schedule_scale)
    labellers = {
        "oracle": partial(make_oracle, run, out),
        "page": partial(make_page, run, make_envs, out, person),
    }
    return Plan(
        learner=partial(make_learner, run, make_envs, out),
        asker=partial(make_asker, run, make_envs, out),
        teacher=None if run.mode == "gather" else partial(make_teacher, run, make_envs, out),
        labellers={} if run.labeller == "none" else {run.labeller: labellers[run.labeller]},
        wanted=total.labels_wanted,
        steps=run.steps,
        budget=run.budget,
        clips=run.clips,
        gather=run.initial_labels if run.mode == "gather" else 0,
        max_staleness=run.max_staleness,
        gpus=min(1.0, gpus / 2) if run.device == "cuda" else 0.0,
        paced=run.labeller == "oracle",
        curious=run.reward.confirm and run.reward.curious,
    )


def placed(run: R, make_envs: MakeEnvs, gpus: float) -> R:
    """With a device that there is, of so many GPUs. Raises UserError where a GPU is asked for and there is
    none."""
    if run.device == "cuda" and not gpus:
        raise UserError("--device cuda: expected a GPU that torch and Ray know of, found none")
    if run.device != "auto":
        return run
    return replace(run, device="cuda" if gpus and observes_pictures(make_envs) else "cpu")


def make_learner(run: PreferenceRun, make_envs: MakeEnvs, out: Path, *, learned: bool = True) -> Learner:
    """`learned`: from the learned reward, and not from the environment's own."""
    from rl_dialog.cluster.preference_learner import Learner, LearnerSettings  # RLlib, for no other role

    names = ("seed", "save_every", "save_total_limit", "eval_every", "eval_episodes", "averaging", "device")
    more = {"envs": run.num_envs, "workers": run.num_workers, "checkpoint": run.model_name_or_path}
    more |= {name: getattr(run, name) for name in names}
    ppo = run.ppo if run.algorithm == "ppo" else run.a2c
    more |= {"normalise_observations": run.normalise_observations, "aligned": run.aligned_clips}
    more |= {name: getattr(run.reward, name) for name in ("confirm", "least_pace", "curious")}
    more["starts"] = least_clips(run) // 2 if run.aligned_clips else 0
    # People cannot tell from numbers what happened.
    more["drawn"] = learned and run.labeller != "oracle" and is_drawn_when_seen(make_envs)
    return Learner(LearnerSettings(run.env, make_envs, ppo, run.clip_length, learned=learned, **more), out)


def least_clips(run: PreferenceRun) -> int:
    """Clips at hand before the first query."""
    return min(run.clips, 2 * run.initial_labels, run.first_clips)


def make_asker(run: PreferenceRun, make_envs: MakeEnvs, out: Path) -> Asker:
    """Offers pairs of clips; what people are asked is the environment's task unless the settings say more."""
    settings = replace(run.queries, task=run.queries.task or make_envs.func.task)
    sizes = {"capacity": run.clips, "least": least_clips(run)}
    pool = run.budget if run.labeller == "oracle" else None
    return Asker(LabelLog(run.labels), Segments(out / "clips"), settings, **sizes, pool=pool, seed=run.seed)


def make_teacher(run: PreferenceRun, make_envs: MakeEnvs, out: Path) -> Teacher:
    """Fits the reward to the initial labels, or to whatever there is where these are not waited for."""
    shape = reward_shape(make_envs, **vars(run.model))
    enough = 1 if run.labels_from or run.mode == "pretrain" else run.initial_labels
    passes = {
        "enough": enough,
        "first_epochs": run.first_epochs,
        "epochs": run.epochs,
        "start": run.reward_model,
    }
    more = {**passes, "seed": run.seed, "device": run.device}
    return Teacher(LabelLog(run.labels), Segments(out / "clips"), out / "reward", shape, run.reward, **more)


def reward_shape(make_envs: MakeEnvs, *, hidden: tuple[int, ...] = (), **more: Any) -> RewardModelConfig:
    """The shape of a reward model for an environment. `more`: other fields. Without `hidden` it is (64, 64),
    after convolutions (64,)."""
    envs = make_envs(1, worker=0)
    policy, limit = shape_of(envs), limit_of(envs.single_action_space)
    envs.close()
    return RewardModelConfig(
        policy.observation,
        policy.actions,
        policy.discrete,
        hidden=hidden or ((64,) if policy.pixels else (64, 64)),
        action_limit=limit,
        **more,
    )


def limit_of(actions: Any) -> float:
    """What an environment cuts actions to, the same up and down; 0 for others."""
    low, high = getattr(actions, "low", None), getattr(actions, "high", None)
    if low is None or low.dtype.kind != "f":
        return 0.0
    limit = float(high.flat[0])
    is_same = limit < float("inf") and (high == limit).all() and (low == -limit).all()
    return limit if is_same else 0.0


def make_oracle(run: PreferenceRun, out: Path) -> OracleLabeller:
    """Answers from the true rewards."""
    oracle = Oracle(**vars(run.oracle), seed=run.seed)
    return OracleLabeller(LabelLog(run.labels), Segments(out / "clips"), oracle)


def make_page(run: PreferenceRun, make_envs: MakeEnvs, out: Path, person: str | None) -> Any:
    """People answer: this person without a token, or whoever has one."""
    from rl_dialog.preferences.page.app import create_page
    from rl_dialog.preferences.page.server import PageServer

    log, segments = LabelLog(run.labels), Segments(out / "clips")
    app = create_page(log, segments, draw=make_envs.func.draw, labeller=person, run=out)
    return PageServer(app, host=run.page_host, port=run.page_port)
