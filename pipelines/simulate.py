"""A task-oriented policy against simulated users: how often it does what they want.

    python -m pipelines.simulate --policy rule --output_dir runs/rule                    # a generated town
    python -m pipelines.simulate --policy rule --world DIR --output_dir runs/multiwoz    # MultiWOZ's files
    python -m pipelines.simulate --policy ppo --num_workers 2 --output_dir runs/ppo      # imitation, then PPO
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
from envs.multiwoz.demonstrations import experts, from_corpus
from envs.multiwoz.rollout import Played, Player, dialog_of, published_scores, transcripts_hash
from pipelines.task_agents import InWorld, shape_of
from rl_dialog.cluster.rollout import CHUNK, play_in_order
from rl_dialog.cluster.task_policy import trained
from rl_dialog.config import changed
from rl_dialog.data.files import write_json
from rl_dialog.data.schema import write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.evaluation.task_figures import headline, table, task_figures
from rl_dialog.models.act_policy import ActPolicy, GreedyActs
from rl_dialog.models.checkpoint import resolve
from rl_dialog.run import OnCluster, ResumableOutput, at_least, claimed, require, run
from rl_dialog.training.task_policy import training_of
from rl_dialog.training.task_settings import TaskSettings

CHANGEABLE = ("epochs", "episodes", "together", "num_workers", "save_total_limit")  # by --resume


@dataclass(frozen=True)
class SimulateConfig(TaskSettings, InWorld, ResumableOutput, OnCluster):
    """Which policy meets which users, and how it is trained."""

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
    at_least(config, episodes=1, together=1, seed=0, rule_episodes=2)
    config.check(resume=config.resume)
    player = Player(config.world, config.simulator_options, together=config.together)
    _check_starts(config, player)
    with claimed(config, "simulate", free=CHANGEABLE) as out:
        policy, training = _trained(config, out, player) if config.policy != "rule" else (None, {})
    began = time.perf_counter()
    played = _played(config, player, policy)
    seconds = time.perf_counter() - began
    world = player.simulator.world
    figures = task_figures([each.outcome for each in played], published_scores(played, player.simulator))
    speakers, hashed = world.speakers(config.templates), transcripts_hash(played)
    write_jsonl((dialog_of(each, speakers) for each in played), out / "dialogs.jsonl")
    about = {name: getattr(config, name) for name in ("policy", "episodes", "seed")}
    results = {"world": world.source, **about, **training, "figures": figures}
    results |= {"options": changed(config.simulator_options), "transcripts": hashed}
    write_json(out / "results.json", results)
    if not config.quiet:
        print(table(figures), flush=True)
    return {
        **headline(figures),
        "episodes": config.episodes,
        "steps_per_second": round(sum(each.talk.turns for each in played) / seconds),
        "transcripts": hashed,
        **training,
        "results": str(out / "results.json"),
        "dialogs": str(out / "dialogs.jsonl"),
    }


def _check_starts(config: SimulateConfig, player: Player) -> None:
    """Raises UserError for a policy or demonstrations that are not there or of another world, before
    --overwrite deletes anything."""
    if config.demonstrations and not _imitates(config):
        raise UserError(
            f"--demonstrations: expected a policy that learns from them, got {config.policy}"
            + ("" if config.policy == "rule" else " that starts from --model_name_or_path")
            + "; leave this out"
        )
    if config.policy == "rule":
        return
    require(config, output_dir="a folder to write to")
    if config.model_name_or_path:
        start = resolve(config.model_name_or_path)
        ActPolicy.from_pretrained(start, expected=shape_of(player.simulator))
    if config.demonstrations:
        from_corpus(config.demonstrations, player.simulator, features=config.features, dialogs=1)


def _imitates(config: SimulateConfig) -> bool:
    if config.policy == "rule" or config.epochs == 0:
        return False
    return config.policy in ("mle", "gdpl") or not config.model_name_or_path


def _played(config: SimulateConfig, player: Player, policy: ActPolicy | None) -> list[Played]:
    """The conversations of the evaluation."""
    where = {"num_workers": config.num_workers, "address": config.address or None}
    make_player = player.maker if config.num_workers else lambda: player
    what = range(config.episodes), GreedyActs(policy) if policy else None, config.seed
    episodes = play_in_order(make_player, *what, size=max(CHUNK, config.together), **where)
    return list(tqdm(episodes, total=config.episodes, unit="dialog", disable=True if config.quiet else None))


def _trained(config: SimulateConfig, out: Path, player: Player) -> tuple[ActPolicy, dict[str, Any]]:
    """The trained policy, and what became of the training."""
    how = {"features": config.features, "episodes": config.rule_episodes}
    demonstrations = partial(experts, player.simulator, config.demonstrations, **how)
    training = training_of(
        config,
        out,
        demonstrations,
        lambda goals, choose: (one.outcome for one in player(goals, choose, config.seed)),
        quiet=config.quiet,
    )
    make_envs = partial(MultiWOZVector, world=player.world, options=config.simulator_options)
    where = {"resume": config.resume, "address": config.address or None}
    return trained(training, config, shape_of(player.simulator), make_envs, **where)


if __name__ == "__main__":
    run(SimulateConfig, main)
