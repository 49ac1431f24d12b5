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
from typing import Annotated, Any, Literal

import torch
import tyro
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
from rl_dialog.models.checkpoint import resolve
from rl_dialog.run import OnCluster, ResumableOutput, at_least, claim_output, run
from rl_dialog.training.imitation import Imitation
from rl_dialog.training.policy_gradient import APPO, GDPL, PG, PPO
from rl_dialog.training.task_policy import (
    VALIDATION,
    Checkpoints,
    TaskTraining,
    train_by_imitation,
    validation_figures,
)

CHANGEABLE = ("epochs", "episodes", "together", "num_workers", "save_total_limit")  # by --resume


@dataclass(frozen=True)
class SimulateConfig(ResumableOutput, OnCluster):
    """Which policy meets which users, and how it is trained."""

    policy: Literal["rule", "mle", "pg", "ppo", "appo", "gdpl"] = "rule"
    """rule: the hand-written policy of envs/multiwoz/rule_policy.py. mle: imitation. From there on, pg:
    REINFORCE; ppo; appo: PPO that samples asynchronously, with V-trace; gdpl: PPO on an adversarially learned
    reward"""
    world: str = ""
    """the folder with MultiWOZ's files; by default a generated town"""
    seed: int = 0
    """decides on goals, users and the policy's chance"""
    train_seed: int = 0
    """decides on networks, and the conversations to learn from; held-out goals depend on `seed` alone"""
    model_name_or_path: str = ""
    """a task policy's checkpoint, or the folder of a run (its best): where training starts; with --epochs 0
    it is evaluated as it is"""
    epochs: Annotated[int | None, tyro.conf.arg(aliases=["--epoch"])] = None
    """passes over the demonstrations (mle), batches of turns (all others); by default 16 and 220. ConvLab-2's
    --epoch is understood"""
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=["--batchsz"])] = None
    """system turns per epoch, in place of the method's own number. ConvLab-2's --batchsz is understood"""
    num_workers: Annotated[int, tyro.conf.arg(aliases=["--process-num"])] = 0
    """actors that hold conversations, in training and evaluation; 0: this process. ConvLab-2's --process_num
    is understood"""
    num_envs: int = 64
    """conversations that each of them steps at a time while training"""
    demonstrations: str = ""
    """MultiWOZ dialogs to imitate, {id: {goal, log}} as JSON or zipped; by default val.json.zip in the
    world's folder, and where there is none the rule policy's conversations"""
    features: Literal["cleaned", "raw"] = "cleaned"
    """corpus states as the tracker would have them, or as they were annotated
    (envs/multiwoz/demonstrations.py)"""
    rule_episodes: int = 1000
    """the rule policy's conversations to imitate"""
    eval_every: int = 5
    """epochs between evaluations on the validation goals, which are also the checkpoints"""
    eval_episodes: int = 500
    """conversations of such an evaluation"""
    save_total_limit: int = 3
    """checkpoints kept, besides the best"""
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl"""
    mle: Imitation = Imitation()
    """settings of imitation"""
    pg: PG = PG()
    """settings of REINFORCE"""
    ppo: PPO = PPO()
    """settings of PPO"""
    appo: APPO = APPO()
    """settings of asynchronous PPO"""
    gdpl: GDPL = GDPL()
    """settings of PPO on a learned reward"""
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

    @property
    def method(self) -> PPO:
        """The settings of reinforcement."""
        settings = getattr(self, self.policy)
        if self.batch_size is None:
            return settings
        return replace(
            settings, batch_size=self.batch_size, minibatch_size=min(settings.minibatch_size, self.batch_size)
        )


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
        place = resolve(config.model_name_or_path)
        start = ActPolicy.from_pretrained(place, expected=shape)
        if config.epochs == 0:
            return start, {"checkpoint": place}
    goals = range(VALIDATION, VALIDATION + config.eval_episodes)
    training = TaskTraining(
        out,
        config.train_seed,
        lambda: experts(
            player.simulator,
            config.demonstrations,
            features=config.features,
            episodes=config.rule_episodes,
            seed=2**31 + config.train_seed,  # conversations that nobody else learns from or is measured with
        ),
        lambda policy: validation_figures(
            each.outcome for each in player(goals, GreedyActs(policy), config.seed)
        ),
        config.save_total_limit,
        config.report_to,
        config.quiet,
        {"policy": config.policy, "train_seed": config.train_seed},
    )
    began = time.perf_counter()
    if config.policy == "mle":
        torch.manual_seed(config.train_seed)
        settings = config.mle if config.epochs is None else replace(config.mle, epochs=config.epochs)
        policy, figures = train_by_imitation(training, start or ActPolicy(shape), settings)
    else:
        policy, figures = _reinforced(config, training, player, start)
    return policy, {**figures, "train_seconds": round(time.perf_counter() - began, 1)}


def _reinforced(
    config: SimulateConfig, training: TaskTraining, player: Player, start: ActPolicy | None
) -> tuple[ActPolicy, dict[str, Any]]:
    """From a checkpoint, or from what imitation leads to."""
    from rl_dialog.cluster.task_policy import Reinforcement, train_by_reinforcement  # RLlib loads for seconds

    shape, checkpoints = (
        shape_of(player.simulator),
        Checkpoints(training.folder, training.save_total_limit, resume=config.resume),
    )
    if checkpoints.epoch:
        start = ActPolicy.from_pretrained(checkpoints.latest, expected=shape)
    elif start is None:
        torch.manual_seed(config.train_seed)
        before = replace(training, folder=training.folder / "imitation")
        start, _ = train_by_imitation(before, ActPolicy(shape), config.mle)
    settings = Reinforcement(
        config.method,
        partial(MultiWOZVector, world=player.world, options=config.simulator_options),
        220 if config.epochs is None else config.epochs,
        config.num_workers,
        config.num_envs,
        config.eval_every,
        config.address or None,
    )
    return train_by_reinforcement(training, settings, start, checkpoints)


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
