"""The learner of a preference run: a policy, RLlib's trainer, and the learned reward in between."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rl_dialog.cluster.rllib import MakeEnvs, PolicyTrainer
from rl_dialog.data.files import write_atomically, write_json, write_text_atomically
from rl_dialog.evaluation.control_episodes import first_episodes
from rl_dialog.models.control_policy import ControlPolicy, shape_of
from rl_dialog.models.reward_model import RewardModel
from rl_dialog.preferences.learned_reward import LearnedReward
from rl_dialog.preferences.segments import Clip
from rl_dialog.training.policy_gradient import PPO

EVALUATION = 2**31 - 1  # a seed that no training round has
Log = Callable[[int, dict[str, float]], None]
Published = tuple[int, RewardModel]  # a version, and its weights and normaliser, which belong together


@dataclass(frozen=True)
class LearnerSettings:
    """What the learner of a run depends on."""

    environment: str
    make_envs: MakeEnvs
    ppo: PPO
    clip_length: int
    envs: int = 32
    workers: int = 0
    seed: int = 0
    save_every: int = 20
    learned: bool = True  # False: the environment's own reward
    checkpoint: str = ""  # of a policy to start with
    clips_per_round: int = 64
    save_total_limit: int = 3
    eval_every: int = 0  # steps between evaluations; 0: none
    eval_episodes: int = 100
    averaging: float = 0.97  # of the policy's weights over the rounds, see Learner; 0: none
    device: str = "cpu"  # of the networks


class Learner:
    """Trains the policy on the published reward, and cuts clips. Before the first version it only plays.

    What is evaluated and saved is the average of the policies of all rounds, with weights that fall by
    `averaging` from round to round (Polyak and Juditsky 1992): the most probable action of a policy that
    follows a changing reward changes with each update where two are about as good. A folder that holds
    checkpoints is gone on from: policy, average, optimizers, steps and rounds.
    """

    def __init__(self, settings: LearnerSettings, folder: str | Path) -> None:
        self.settings, self.folder = settings, Path(folder)
        latest = self.folder / "latest"
        self.round, self.gathered = 0, 0
        source = self.folder / latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
        probe = settings.make_envs(1, worker=0)
        shape = shape_of(probe)
        probe.close()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            start = source / "trainer" / "current" if source else settings.checkpoint
            policy = ControlPolicy.from_pretrained(start, expected=shape) if start else ControlPolicy(shape)
        self.average = AveragedModel(
            policy, multi_avg_fn=get_ema_multi_avg_fn(settings.averaging), use_buffers=True
        )
        if source:
            progress = json.loads((source / "trainer" / "progress.json").read_text(encoding="utf-8"))
            self.round, self.gathered = progress["round"], progress["gathered"]
            self.average.module.load_state_dict(ControlPolicy.from_pretrained(source).state_dict())
            self.average.n_averaged.fill_(1)
        self.reward = LearnedReward(
            settings.clip_length,
            environment=settings.environment,
            keep=settings.clips_per_round,
            device=settings.device,
        )
        more = {
            "workers": settings.workers,
            "envs": settings.envs,
            "seed": settings.seed,
            "first_round": self.round,
            "renew_every": settings.save_every,
            "device": settings.device,
        }
        self.trainer = PolicyTrainer(
            policy, settings.make_envs, settings.ppo, reward=self.reward if settings.learned else None, **more
        )
        if source:
            self.trainer.load(source / "trainer")

    @property
    def steps(self) -> int:
        """That were learned from."""
        return self.trainer.steps

    def step(self, published: Published | None = None) -> tuple[dict[str, float], list[Clip]]:
        """One round with this version of the reward, or the one before if None; its metrics and the clips cut
        from it."""
        if self.round % self.settings.save_every == 0:
            self.reward.renew(self.settings.seed * 1_000_003 + self.round)
        if published and published[0] > self.reward.version:
            self.reward.use(published[1], published[0])
        self.round += 1
        before = self.steps
        if self.settings.learned and self.reward.model is None:
            trajectories = self.trainer.sample()
            self.reward(trajectories)
            self.gathered += sum(len(each.actions) for each in trajectories)
            metrics = {}
        else:
            metrics = {f"train/{name}": value for name, value in self.trainer.train().items()}
            self.average.update_parameters(self.trainer.policy())
        if (
            self.settings.eval_every
            and before // self.settings.eval_every != self.steps // self.settings.eval_every
        ):
            metrics |= {"eval/return": self.evaluate(), "eval/return_sampled": self.evaluate(greedy=False)}
        metrics |= {f"pref/{name}": value for name, value in self.reward.metrics.items()}
        metrics |= {
            "steps": self.steps,
            "due": self.due(),
            "pref/gathered_steps": self.gathered,
            "pref/reward_version": self.reward.version,
        }
        return metrics, self.reward.take_clips()

    def run(self, steps: int, log: Log) -> None:
        """On the environment's own reward, until it has learned from so many steps."""
        while self.steps < steps:
            metrics, _ = self.step()
            log(
                int(metrics.pop("steps")),
                {name: value for name, value in metrics.items() if name.startswith(("train/", "eval/"))},
            )
            if metrics["due"]:
                self.save()
        self.save()

    def evaluate(self, *, greedy: bool = True) -> float:
        """Mean true return of the policy in fresh episodes, always the same ones."""
        policy, envs = self.average.module, self.settings.make_envs(self.settings.eval_episodes, worker=0)
        returns = np.zeros(envs.num_envs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(EVALUATION)
            for _, _, rewards, running in first_episodes(policy, envs, seed=EVALUATION, greedy=greedy):
                returns += np.where(running, rewards, 0)
        envs.close()
        return float(returns.mean())

    def due(self) -> bool:
        """Is this a round after which to save?"""
        return self.steps > 0 and self.round % self.settings.save_every == 0

    def save(self) -> str:
        """Writes `checkpoint-<steps>` and makes it the latest; its path."""
        name = f"checkpoint-{self.steps}"

        def fill(directory: Path) -> None:
            self.average.module.save_pretrained(directory)
            self.trainer.save(directory / "trainer")
            self.trainer.policy().save_pretrained(directory / "trainer" / "current")
            progress = {
                "round": self.round,
                "gathered": self.gathered,
                "steps": self.steps,
                "reward_version": self.reward.version,
            }
            write_json(directory / "trainer" / "progress.json", progress)

        write_atomically(self.folder / name, fill)
        write_text_atomically(self.folder / "latest", name)
        for old in sorted(
            self.folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1])
        )[: -self.settings.save_total_limit]:
            shutil.rmtree(old)
        return str(self.folder / name)
