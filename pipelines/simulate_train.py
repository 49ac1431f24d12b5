"""Training of the task policies of `simulate`: imitation first, then reinforcement from where it ends.

Into the run's folder go

    checkpoint-<epoch>/        config.json, model.safetensors, metrics.json; in the latest also trainer/, for --resume
    best, latest               names of checkpoints; the best is the one with most success on the validation goals
    metrics.jsonl, tensorboard/
    imitation/                 the policy that reinforcement started from, if it was trained here

An epoch of imitation is a pass over the demonstrations, of reinforcement a batch of the simulator's turns.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file

from envs.multiwoz import ORIGINAL, MultiWOZVector, Options, Simulator
from envs.multiwoz.demonstrations import Demonstrations, from_corpus, from_rule_policy
from pipelines.simulate_play import Player, shape_of
from rl_dialog.config import changed
from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig
from rl_dialog.models.adversarial_reward import AdversarialReward, AdversarialRewardConfig
from rl_dialog.run import OnCluster, ResumableOutput
from rl_dialog.training.imitation import Imitation, imitate
from rl_dialog.training.logger import Logger, following
from rl_dialog.training.policy_gradient import APPO, PG, PPO

CORPUS = "val.json.zip"  # in a world's folder
VALIDATION = 1_000_000  # number of the first validation conversation: far from those of the final evaluation


@dataclass(frozen=True)
class GDPL(PPO):
    """PPO on rewards learned from demonstrations; the simulator's own are not used."""

    reward: AdversarialRewardConfig = field(default_factory=AdversarialRewardConfig)
    """how the reward is learned"""


@dataclass(frozen=True)
class TrainingConfig(ResumableOutput, OnCluster):
    """What a trained task policy depends on."""

    policy: Literal["rule", "mle", "pg", "ppo", "appo", "gdpl"] = "rule"
    """rule: the hand-written policy of envs/multiwoz/rule_policy.py. mle: imitation. From there on, pg: REINFORCE; ppo; appo: PPO that samples
    asynchronously, with V-trace; gdpl: PPO on an adversarially learned reward"""
    world: str = ""
    """folder with MultiWOZ's files; by default a generated town"""
    seed: int = 0
    """goals, users and the policy's chance"""
    train_seed: int = 0
    """networks, and the conversations to learn from; held-out goals depend on `seed` alone"""
    model_name_or_path: str = ""
    """a task policy's checkpoint, or the folder of a run (its best): where training starts; with --epochs 0 it is evaluated as it is"""
    epochs: Annotated[int | None, tyro.conf.arg(aliases=["--epoch"])] = None
    """passes over the demonstrations (mle), batches of turns (all others); by default 16 and 220. ConvLab-2's --epoch is understood"""
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=["--batchsz"])] = None
    """system turns per epoch, in place of the method's own number. ConvLab-2's --batchsz is understood"""
    num_workers: Annotated[int, tyro.conf.arg(aliases=["--process-num"])] = 0
    """actors that hold conversations, in training and evaluation; 0: this process. ConvLab-2's --process_num is understood"""
    num_envs: int = 64
    """conversations that each of them steps at a time while training"""
    demonstrations: str = ""
    """MultiWOZ dialogs to imitate, {id: {goal, log}} as JSON or zipped; by default val.json.zip in the world's folder, and where there is none the
    rule policy's conversations"""
    features: Literal["cleaned", "raw"] = "cleaned"
    """corpus states as the tracker would have them, or as they were annotated (envs/multiwoz/demonstrations.py)"""
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
    """imitation"""
    pg: PG = PG()
    """REINFORCE"""
    ppo: PPO = PPO()
    """PPO"""
    appo: APPO = APPO()
    """asynchronous PPO"""
    gdpl: GDPL = GDPL()
    """PPO on a learned reward"""
    original: bool = False
    """ConvLab-2's behaviour throughout, mistakes included, except for the options that are given"""
    options: Options = Options()
    """how users, goals, rewards and measures behave"""

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
        return replace(settings, batch_size=self.batch_size, minibatch_size=min(settings.minibatch_size, self.batch_size))


def train(config: TrainingConfig, player: Player) -> tuple[ActPolicy, dict[str, Any]]:
    """The trained policy (the best by success on the validation goals), and what became of the training. Raises UserError, OSError."""
    from rl_dialog.models.checkpoint import resolve  # here, because it loads transformers, which the rule policy need not wait for

    out, shape = Path(config.output_dir), shape_of(player.simulator)
    start = ActPolicy.from_pretrained(resolve(config.model_name_or_path), expected=shape) if config.model_name_or_path else None
    if config.epochs == 0:
        if start is None:
            raise UserError("--epochs 0 evaluates a checkpoint: expected --model_name_or_path, the folder of a task policy or of a run")
        return start, {"checkpoint": resolve(config.model_name_or_path)}
    resumed = config.resume and (out / "latest").is_file() and config.policy != "mle"
    began = time.perf_counter()
    if config.policy == "mle":
        settings = config.mle if config.epochs is None else replace(config.mle, epochs=config.epochs)
        policy, found = _imitation(config, player, out, settings, start)
    else:
        if start is None and not (resumed and _Run(out, config).epoch):
            start, _ = _imitation(config, player, out / "imitation", config.mle, None)
        policy, found = _reinforcement(config, player, out, start)
    return policy, {**found, "train_seconds": round(time.perf_counter() - began, 1)}


def demonstrations(config: TrainingConfig, simulator: Simulator) -> Demonstrations:
    """Expert turns: a corpus's, or the rule policy's, whose conversations are none of those that others learn from or are measured with."""
    corpus = config.demonstrations or (str(Path(config.world) / CORPUS) if config.world and (Path(config.world) / CORPUS).is_file() else "")
    if corpus:
        return from_corpus(corpus, simulator, features=config.features)
    return from_rule_policy(simulator, episodes=config.rule_episodes, seed=2**31 + config.train_seed)


def validate(player: Player, policy: ActPolicy, episodes: int, seed: int) -> dict[str, float]:
    """Greedy conversations with the validation goals: success, complete, turns and return."""
    outcomes = [each.outcome for each in player(range(VALIDATION, VALIDATION + episodes), policy, seed)]
    columns = {"success": "success", "complete": "complete", "turns": "turns", "return": "total"}
    return {f"eval/{name}": float(np.mean([getattr(each, field) for each in outcomes])) for name, field in columns.items()}


def _imitation(config: TrainingConfig, player: Player, out: Path, settings: Imitation, start: ActPolicy | None) -> tuple[ActPolicy, dict[str, Any]]:
    torch.manual_seed(config.train_seed)
    policy = start or ActPolicy(shape_of(player.simulator))
    experts = demonstrations(config, player.simulator)
    with _logged(config, out) as log:
        write = lambda epoch, metrics: log(epoch, {f"train/{name}": value for name, value in metrics.items()})  # noqa: E731
        kept = imitate(policy, experts.states, experts.actions, experts.dialogs, settings, seed=config.train_seed, log=write)
        epoch = int(kept.get("epoch", 0))
        metrics = {f"train/{name}": value for name, value in kept.items()} | validate(player, policy, config.eval_episodes, config.seed)
    run = _Run(out, config)
    run.save(epoch, policy, metrics)
    return policy.eval(), {"epoch": epoch, "demonstrations": len(experts), "checkpoint": str(out / run.best)}


def _reinforcement(config: TrainingConfig, player: Player, out: Path, start: ActPolicy | None) -> tuple[ActPolicy, dict[str, Any]]:
    from rl_dialog.cluster.data import connect
    from rl_dialog.cluster.rllib import PolicyTrainer

    run, epochs = _Run(out, config), 220 if config.epochs is None else config.epochs
    policy = run.latest_policy(shape_of(player.simulator)) if run.epoch else start
    reward = None
    if isinstance(config.method, GDPL):
        experts = demonstrations(config, player.simulator)
        reward = AdversarialReward(experts.states, experts.actions, experts.dialogs, config.method.reward, seed=config.train_seed)
    make_envs = partial(MultiWOZVector, world=player.world, options=config.simulator_options)
    shape = {
        "workers": config.num_workers,
        "envs": config.num_envs,
        "seed": config.train_seed,
        "first_round": run.epoch,
        "renew_every": config.eval_every,
    }
    with (
        connect(config.address or None, num_cpus=config.num_workers) if config.num_workers else nullcontext(),
        PolicyTrainer(policy, make_envs, config.method, reward=reward, **shape) as trainer,
        _logged(config, out, first=run.epoch) as log,
    ):
        if run.epoch:
            run.load(trainer.load, reward)
        else:
            log(0, metrics := validate(player, policy, config.eval_episodes, config.seed))
            run.save(0, policy, metrics, trainer.save, reward)
        for epoch in range(run.epoch + 1, epochs + 1):
            began = time.perf_counter()
            metrics = {f"train/{name}": value for name, value in (trainer.train() | getattr(reward, "metrics", {})).items()}
            metrics |= {"train/seconds": time.perf_counter() - began, "train/progress": epoch / epochs}
            if epoch % config.eval_every == 0 or epoch == epochs:
                policy = trainer.policy()
                metrics |= validate(player, policy, config.eval_episodes, config.seed)
                run.save(epoch, policy, metrics, trainer.save, reward)
            log(epoch, metrics)
    best = ActPolicy.from_pretrained(out / run.best, expected=shape_of(player.simulator))
    return best, {"epoch": run.best_epoch, "checkpoint": str(out / run.best)}


class _Run:
    """The checkpoints of a run's folder."""

    def __init__(self, out: Path, config: TrainingConfig) -> None:
        self.out, self.limit = out, config.save_total_limit
        self.of = {"policy": config.policy, "train_seed": config.train_seed, "seed": config.seed, "world": config.world}
        self.of["options"] = changed(config.simulator_options)
        self.best, self.best_success, self.epoch = "", -1.0, 0
        if config.policy not in ("mle", "rule") and out.name != "imitation":
            self.of["settings"] = json.loads(json.dumps(asdict(config.method)))
            self.of |= {
                name: getattr(config, name) for name in ("num_envs", "eval_every", "eval_episodes")
            }  # conversations start anew every eval_every
        if config.resume and (out / "latest").is_file():
            self._continue()

    @property
    def best_epoch(self) -> int:
        return int(self.best.rsplit("-", 1)[1])

    @property
    def latest(self) -> Path:
        return self.out / (self.out / "latest").read_text(encoding="utf-8").strip()

    def latest_policy(self, expected: ActPolicyConfig) -> ActPolicy:
        """Where a resumed run goes on."""
        return ActPolicy.from_pretrained(self.latest, expected=expected)

    def save(self, epoch: int, policy: ActPolicy, metrics: dict[str, float], save_trainer: Callable[[Path], None] | None = None,
             reward: AdversarialReward | None = None) -> None:  # fmt: skip
        """Writes the checkpoint of an epoch, and which one is the best."""
        from rl_dialog.data.files import write_atomically, write_json, write_text_atomically

        name = f"checkpoint-{epoch}"
        if metrics["eval/success"] > self.best_success:
            self.best, self.best_success = name, metrics["eval/success"]

        def fill(directory: Path) -> None:
            policy.save_pretrained(directory)
            write_json(directory / "metrics.json", {"epoch": epoch, **metrics})
            if save_trainer is None:
                return
            save_trainer(directory / "trainer")
            if reward is not None:
                _save_reward(reward, directory / "trainer")
            write_json(directory / "trainer" / "progress.json", {"epoch": epoch, "best": self.best, "best_success": self.best_success, "of": self.of})

        write_atomically(self.out / name, fill)
        write_text_atomically(self.out / "latest", name)
        write_text_atomically(self.out / "best", self.best)
        kept = sorted(self.out.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
        for old in kept[:-1]:
            shutil.rmtree(old / "trainer", ignore_errors=True)  # only the latest can be resumed
        for old in kept[: -self.limit]:
            if old.name != self.best:
                shutil.rmtree(old)

    def load(self, load_trainer: Callable[[Path], None], reward: AdversarialReward | None) -> None:
        """The state of optimizers, and of a learned reward, as they were."""
        load_trainer(self.latest / "trainer")
        if reward is not None:
            _load_reward(reward, self.latest / "trainer")

    def _continue(self) -> None:
        path = self.latest / "trainer" / "progress.json"
        try:
            progress = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(f"{path}: expected the state of a run to resume, found no such file; start anew without --resume") from error
        if progress["of"] != self.of:
            different = sorted(key for key in {*self.of, *progress["of"]} if self.of.get(key) != progress["of"].get(key))
            raise UserError(
                f"{self.out} holds a run with other {', '.join(different)}: resume with {progress['of']}, or start anew in another --output_dir"
            )
        self.epoch, self.best, self.best_success = progress["epoch"], progress["best"], progress["best_success"]


def _save_reward(reward: AdversarialReward, directory: Path) -> None:
    from rl_dialog.training.optim import save_optimizer

    save_file({**reward.state_dict(), "generator": reward.generator.get_state()}, directory / "reward.safetensors")
    save_optimizer(reward.optimizer, directory / "reward_optimizer.safetensors")


def _load_reward(reward: AdversarialReward, directory: Path) -> None:
    from rl_dialog.training.optim import load_optimizer

    tensors = load_file(directory / "reward.safetensors")
    reward.generator.set_state(tensors.pop("generator"))
    reward.load_state_dict(tensors)
    load_optimizer(reward.optimizer, directory / "reward_optimizer.safetensors")


class _logged:
    """Writes metrics and shows them while the block lasts; gives `log(epoch, metrics)`."""

    def __init__(self, config: TrainingConfig, out: Path, *, first: int = 0) -> None:
        self.logger = Logger(out, first_step=first, report_to=config.report_to, settings={"policy": config.policy, "train_seed": config.train_seed})
        self.shown = nullcontext() if config.quiet else following(out)

    def __enter__(self) -> Callable[[int, dict[str, float]], None]:
        self.shown.__enter__()
        return self.logger.log

    def __exit__(self, *error: Any) -> None:
        self.logger.close()
        self.shown.__exit__(*error)
