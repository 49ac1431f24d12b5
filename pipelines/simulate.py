"""A task-oriented policy against simulated users: how often it does what they want.

    python -m pipelines.simulate --policy rule --output_dir runs/rule                     a generated town
    python -m pipelines.simulate --policy rule --world DIR --output_dir runs/multiwoz     MultiWOZ's files
    python -m pipelines.simulate --policy ppo --num_workers 2 --output_dir runs/ppo       imitation, then PPO
    python -m pipelines.simulate --policy ppo --model_name_or_path runs/ppo --epochs 0 --output_dir runs/again

Goal i of a seed is the same for every policy and in every run. Into the folder go

    results.json      every figure with its 95 % interval over conversations, per domain too
    dialogs.jsonl     the conversations in words, with acts and rewards: log lines that `prepare` reads
    simulate.yaml     the config
    imitation/        the policy that reinforcement started from, if it was trained here

and the checkpoints and metrics of rl_dialog/training/task_policy.py. A trained policy says the most probable
acts. The world, its users and the measures are described in envs/multiwoz/README.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from envs.multiwoz import ORIGINAL, MultiWOZVector, Options
from envs.multiwoz.demonstrations import experts
from envs.multiwoz.rollout import Played, Player, dialog_record, published_scores, transcripts_hash
from pipelines.task_agents import shape_of
from rl_dialog.cluster.rollout import CHUNK, play_in_order
from rl_dialog.config import changed
from rl_dialog.data.files import write_json
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.evaluation.task_figures import headline, table, task_figures
from rl_dialog.models.act_policy import ActPolicy, GreedyActs
from rl_dialog.run import OnCluster, ResumableOutput, at_least, claim_output, run
from rl_dialog.training.task_policy import VALIDATION, TaskTraining, imitated, validation_figures
from rl_dialog.training.task_settings import TaskSettings

CHANGEABLE = ("epochs", "episodes", "together", "num_workers", "save_total_limit")  # by --resume


@dataclass(frozen=True)
class SimulateConfig(TaskSettings, ResumableOutput, OnCluster):
    """Which policy meets which users, and how it is trained."""

    world: str = ""
    """the folder with MultiWOZ's files; by default a generated town"""
    seed: int = 0
    """decides on goals, users and the policy's chance"""
    demonstrations: str = ""
    """MultiWOZ dialogs to imitate, {id: {goal, log}} as JSON or zipped; by default val.json.zip in the
    world's folder, and where there is none the rule policy's conversations"""
    features: Literal["cleaned", "raw"] = "cleaned"
    """corpus states as the tracker would have them, or as they were annotated
    (envs/multiwoz/demonstrations.py)"""
    rule_episodes: int = 1000
    """the rule policy's conversations to imitate"""
    original: bool = False
    """ConvLab-2's behaviour throughout, mistakes included, except for the options that are given"""
    options: Options = Options()
    """how users, goals, rewards and measures behave"""
    episodes: int = 1000
    """conversations of the final evaluation"""
    templates: Literal["manual", "auto_manual"] = "manual"
    """how acts are worded. manual: a sentence for each; auto_manual: one for all acts of a kind where the
    world has one"""
    together: int = 64
    """conversations stepped in turns; changes no result"""

    @property
    def simulator_options(self) -> Options:
        """`options`, over ConvLab-2's if `original`."""
        return replace(ORIGINAL, **changed(self.options)) if self.original else self.options


def main(config: SimulateConfig) -> dict[str, Any]:
    """Trains if the policy is a trained one, plays and writes all conversations; returns headline figures."""
    _check(config)
    player = Player(config.world, config.simulator_options, together=config.together)
    out = claim_output(config, "simulate", free=CHANGEABLE)
    policy, trained = _trained(config, out, player) if config.policy != "rule" else (None, {})
    began = time.perf_counter()
    played = _played(config, player, policy)
    seconds = time.perf_counter() - began
    figures = task_figures([each.outcome for each in played], published_scores(played, player.simulator))
    world = player.simulator.world
    speakers = world.speakers(config.templates)
    write_jsonl((Dialog.from_record(dialog_record(each, speakers)) for each in played), out / "dialogs.jsonl")
    results = {
        "world": world.source,
        "policy": config.policy,
        "episodes": config.episodes,
        "seed": config.seed,
    }
    results |= {**trained, "figures": figures, "options": changed(config.simulator_options)}
    results |= {"transcripts": transcripts_hash(played)}
    write_json(out / "results.json", results)
    if not config.quiet:
        print(table(figures), flush=True)
    return {
        **headline(figures),
        "episodes": config.episodes,
        "steps_per_second": round(sum(each.talk.turns for each in played) / seconds),
        "transcripts": results["transcripts"],
        **trained,
        "results": str(out / "results.json"),
        "dialogs": str(out / "dialogs.jsonl"),
    }


def _played(config: SimulateConfig, player: Player, policy: ActPolicy | None) -> list[Played]:
    """The conversations of the evaluation."""
    where = {
        "num_workers": config.num_workers,
        "size": max(CHUNK, config.together),
        "address": config.address or None,
    }
    make_player, choose = (
        player.maker if config.num_workers else lambda: player,
        GreedyActs(policy) if policy else None,
    )
    episodes = play_in_order(make_player, range(config.episodes), choose, config.seed, **where)
    return list(tqdm(episodes, total=config.episodes, unit="dialog", disable=True if config.quiet else None))


def _trained(config: SimulateConfig, out: Path, player: Player) -> tuple[ActPolicy, dict[str, Any]]:
    """The trained policy (the best by success on the validation goals), and what became of the training."""
    shape = shape_of(player.simulator)
    start = None
    if config.model_name_or_path:
        from rl_dialog.models.checkpoint import resolve  # transformers, which a task policy does without

        place = resolve(config.model_name_or_path)
        start = ActPolicy.from_pretrained(place, expected=shape)
        if config.epochs == 0:
            return start, {"checkpoint": place}
    training, began = _training(config, out, player), time.perf_counter()
    if config.policy == "mle":
        policy, figures = imitated(training, config.imitation, shape, start)
    else:
        from rl_dialog.cluster.task_policy import reinforced  # RLlib loads for seconds

        make_envs = partial(MultiWOZVector, world=player.world, options=config.simulator_options)
        where = {"resume": config.resume, "address": config.address or None}
        policy, figures = reinforced(training, config, shape, make_envs, start, **where)
    return policy, {**figures, "train_seconds": round(time.perf_counter() - began, 1)}


def _training(config: SimulateConfig, out: Path, player: Player) -> TaskTraining:
    """What is imitated, and how a policy is validated."""
    demonstrations = partial(
        experts,
        player.simulator,
        config.demonstrations,
        features=config.features,
        episodes=config.rule_episodes,
        seed=2**31 + config.train_seed,  # conversations that nobody else learns from or is measured with
    )
    goals = range(VALIDATION, VALIDATION + config.eval_episodes)

    def validate(policy: ActPolicy) -> dict[str, float]:
        return validation_figures(one.outcome for one in player(goals, GreedyActs(policy), config.seed))

    limits = {name: getattr(config, name) for name in ("save_total_limit", "report_to", "quiet")}
    about = {"policy": config.policy, "train_seed": config.train_seed}
    return TaskTraining(out, config.train_seed, demonstrations, validate, **limits, about=about)


def _check(config: SimulateConfig) -> None:
    at_least(
        config,
        episodes=1,
        together=1,
        seed=0,
        train_seed=0,
        num_workers=0,
        num_envs=1,
        eval_every=1,
        eval_episodes=1,
    )
    at_least(config, rule_episodes=2, save_total_limit=1, epochs=0, batch_size=1)
    if config.policy == "rule":
        names = ("model_name_or_path", "epochs", "batch_size", "resume")
        if given := [name for name in names if getattr(config, name) not in (None, "", False)]:
            raise UserError(
                f"--{given[0]}: the rule policy is not trained; choose another --policy, or leave this out"
            )
    if config.policy == "mle" and config.resume:
        raise UserError(
            "--resume: imitation is not resumed, as it takes minutes; pass --overwrite to start it anew"
        )
    if config.epochs == 0 and not config.model_name_or_path:
        what = "--model_name_or_path, the folder of a task policy or of a run"
        raise UserError(f"--epochs 0 evaluates a checkpoint: expected {what}")


if __name__ == "__main__":
    run(SimulateConfig, main)
