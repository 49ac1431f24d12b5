"""The learner of a preference run: a policy, RLlib's trainer, and the learned reward in between."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rl_dialog.cluster.rllib import MakeEnvs, PolicyTrainer
from rl_dialog.data.files import write_atomically, write_json, write_text_atomically
from rl_dialog.evaluation.control_episodes import first_episodes
from rl_dialog.models.control_policy import ControlPolicy, shape_of
from rl_dialog.models.reward_model import RewardModel
from rl_dialog.models.trajectory import Trajectory
from rl_dialog.preferences.learned_reward import LearnedReward
from rl_dialog.preferences.run_files import newest_version
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
    normalise_observations: bool = False  # that are numbers, in the policy
    drawn: bool = False  # environments draw what people will see
    aligned: float = 0.0  # share of the episodes whose first clip begins with them
    starts: int = 0  # clips of the first round that are the beginnings of as many episodes
    confirm: bool = False  # a reward is followed as fast as labels confirm it, and else at full speed
    least_pace: float = 0.0  # with confirm: how fast at least
    curious: bool = False  # what is not confirmed of the reward is replaced by what its members disagree on


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
        policy = self._policy(source)
        self.average = AveragedModel(
            policy, multi_avg_fn=get_ema_multi_avg_fn(settings.averaging), use_buffers=True
        )
        if source:
            self._load_progress(source)
        self.reward = LearnedReward(
            settings.clip_length,
            environment=settings.environment,
            keep=settings.clips_per_round,
            device=settings.device,
            aligned=settings.aligned,
            curious=settings.curious,
        )
        self.trainer = self._trainer(policy)
        if source:
            self.trainer.load(source / "trainer")
        version = newest_version(self.folder / "reward")
        if settings.learned and version:  # a run that goes on has a reward from its first step on
            path = self.folder / "reward" / str(version)
            self._follow(RewardModel.from_pretrained(path, expected=policy.config), version)

    def _policy(self, source: Path | None) -> ControlPolicy:
        """The policy as the last round left it in the checkpoint `source`, or as the run begins with it.
        Raises UserError for one of another shape than the environment's."""
        settings = self.settings
        probe = settings.make_envs(1, worker=0)
        shape = shape_of(probe, normalise_observations=settings.normalise_observations, scales=2)
        probe.close()
        start = source / "trainer" / "current" if source else settings.checkpoint
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return ControlPolicy.from_pretrained(start, expected=shape) if start else ControlPolicy(shape)

    def _load_progress(self, source: Path) -> None:
        """Rounds and the average over them."""
        progress = json.loads((source / "trainer" / "progress.json").read_text(encoding="utf-8"))
        self.round, self.gathered = progress["round"], progress["gathered"]
        self.average.module.load_state_dict(ControlPolicy.from_pretrained(source).state_dict())
        self.average.n_averaged.fill_(int(progress["steps"] > 0))  # one that learned nothing counts nothing

    def _trainer(self, policy: ControlPolicy) -> PolicyTrainer:
        """What plays and updates the policy, from the round that the run is in."""
        settings = self.settings
        return PolicyTrainer(
            policy,
            partial(settings.make_envs, pictures=True) if settings.drawn else settings.make_envs,
            settings.ppo,
            workers=settings.workers,
            envs=settings.envs,
            seed=settings.seed,
            first_round=self.round,
            renew_every=settings.save_every,
            device=settings.device,
            reward=self.reward if settings.learned else None,
        )

    def _follow(self, model: RewardModel, version: int) -> None:
        """From now on this reward, at full speed or as fast as labels confirm it."""
        self.reward.use(model, version)
        settings = self.settings
        self.trainer.pace(max(float(model.confirmed), settings.least_pace) if settings.confirm else 1.0)

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
            self._follow(published[1], published[0])
        self.round += 1
        before = self.steps
        if self.settings.learned and self.reward.model is None:
            starts = self._starts() if self.round == 1 else []
            trajectories = [*starts, *self.trainer.sample()]
            self.reward(trajectories[len(starts) :])
            self.gathered += sum(len(each.actions) for each in trajectories)
            if self.settings.normalise_observations:
                self.trainer.observe(trajectories)
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

    def _starts(self) -> list[Trajectory]:
        """Beginnings of episodes, as clips. Of some tasks little is decided after their first steps: who has
        fallen has fallen, and one such clip is as bad as the other."""
        if not self.settings.starts:
            return []
        starts = self.trainer.sample_starts(self.settings.clip_length, self.settings.starts)
        self.reward.cut_starts(starts)
        return starts

    def run(self, steps: int, log: Log, *, stop: threading.Event | None = None) -> None:
        """On the environment's own reward, until it has learned from so many steps, or `stop` is set."""
        stop = stop or threading.Event()
        while self.steps < steps and not stop.is_set():
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
            for _, _, rewards, running, _ in first_episodes(policy, envs, seed=EVALUATION, greedy=greedy):
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
