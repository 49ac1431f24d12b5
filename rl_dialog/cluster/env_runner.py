"""Sampling: an RLlib env runner that steps a vector of environments with one forward pass and makes episodes
from arrays.

RLlib's own goes through connectors and lists for every environment and step. Here a step is a row of arrays
over all environments, and the episodes' pieces are cut out of the rows when a sample is complete, as views. N
environments, T rows of a sample.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from rl_dialog.errors import UserError
from rl_dialog.models.trajectory import Trajectory

OUTCOMES = (
    "success",
    "complete",
    "book_rate",
    "inform_f1",
    "turns",
)  # what `infos["outcome"]` of an ended episode may have
PICTURES = "pictures"  # in infos: what people see of the first environments # (n, H, W, 3)
STRIDE = 1_000_003  # between the seeds of neighbouring runs


class VectorEnvRunner(SingleAgentEnvRunner):
    """Samples from a vector of environments that is made as a whole; its chance is that of the round, so that
    rounds can be repeated.

    After every `renew_every` rounds of the run all episodes start anew: resumed there it goes on as if it had
    never stopped. So they do in the first round here. 0: only then.
    """

    def make_env(self) -> None:
        settings = self.config.env_config
        self.env = settings["make_envs"](
            self.config.num_envs_per_env_runner, worker=self.worker_index + 1
        )  # 0: held-out goals
        self.num_envs = self.env.num_envs
        self.round, self._needs_initial_reset = settings["first_round"], True

    def sample(self, **arguments: Any) -> list[SingleAgentEpisode]:
        settings = self.config.env_config
        self._seed = settings["seed"] * STRIDE + self.round
        torch.manual_seed(self._seed * STRIDE + self.worker_index)
        if settings["renew_every"] and self.round % settings["renew_every"] == 0:
            self._needs_initial_reset = True
        self.round += 1
        return super().sample(**arguments)

    def sample_starts(self, *, steps: int, times: int) -> list[SingleAgentEpisode]:
        """The first `steps` of so many episodes of each environment, whose next sample starts new ones. It is
        no round."""
        episodes = []
        for time in range(times):
            self._seed = (self.config.env_config["seed"] * STRIDE + self.round) * STRIDE + time
            torch.manual_seed(self._seed * STRIDE + self.worker_index)
            self._reset()
            self.first_round = f"{self.round}s{time}"  # no other episode is called so
            episodes += self._episodes([self._step_all(True)[0] for _ in range(steps)])
        self._needs_initial_reset = True
        return episodes

    def _sample(self, *, num_timesteps: int | None, explore: bool, num_episodes: int | None = None,
                random_actions: bool = False, force_reset: bool = False,
                ) -> list[SingleAgentEpisode]:  # fmt: skip
        if num_timesteps is None or random_actions:
            raise UserError(
                f"expected a number of timesteps and the policy's actions, got {num_episodes} episodes, "
                f"random: {random_actions}"
            )
        if force_reset or self._needs_initial_reset:
            self._reset()
        rows: list[dict[str, Any]] = []
        steps, ends = 0, 0
        while steps < num_timesteps:
            row, infos = self._step_all(explore)
            rows.append(row)
            steps += self.num_envs - int(row["starting"].sum())
            if self.ended.any():
                ends += self._log_ends(infos)
        episodes = self._episodes(rows)
        self._log_env_steps(metric=self._metrics_num_env_steps_sampled, num_steps=steps)
        self._increase_sampled_metrics(steps, ends)
        return episodes

    def _step_all(self, explore: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step of all environments: what happened in each # (N, ...), and their infos."""
        actions, outputs = self._act(explore)
        row = {
            Columns.OBS: self.observations,
            Columns.ACTIONS: actions,
            "starting": self.ended,
            **outputs,
        }
        if self.pictures is not None:
            row[PICTURES] = self.pictures
        self.observations, rewards, terminated, truncated, infos = self.env.step(self._for_env(actions))
        self.pictures = infos.get(PICTURES)
        self.returns += rewards
        self.lengths += ~row["starting"]
        self.ended = terminated | truncated
        ends = {Columns.TERMINATEDS: terminated, Columns.TRUNCATEDS: truncated}
        return row | {Columns.REWARDS: rewards} | ends, infos

    def _reset(self) -> None:
        self.observations, infos = self.env.reset(seed=self._seed)
        self.pictures = infos.get(PICTURES)  # of the first environments, where there are some
        self._needs_initial_reset = False
        self.ended = np.zeros(self.num_envs, bool)  # with its last step: the next one starts an episode
        self.episodes = [0] * self.num_envs  # their numbers since the reset
        self.started = np.zeros(self.num_envs, np.int64)  # steps of the running episodes in earlier samples
        self.returns, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        self.first_round = self.round - 1

    @torch.no_grad()
    def _act(self, explore: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions # (N, ...), and what the learner needs to know of how they were chosen."""
        network = (
            self.module.network
        )  # not by the module's own forward: it switches to eval mode and back every time
        device = next(network.parameters()).device
        inputs = network.logits(
            *parts_of(tree.map_structure(lambda each: torch.from_numpy(each).to(device), self.observations))
        )
        distribution = network.distribution(inputs)
        actions = distribution.sample() if explore else distribution.mode()
        outputs = {Columns.ACTION_DIST_INPUTS: inputs, Columns.ACTION_LOGP: distribution.log_prob(actions)}
        return actions.cpu().numpy(), {name: each.cpu().numpy() for name, each in outputs.items()}

    def _for_env(self, actions: np.ndarray) -> np.ndarray:
        """A Gaussian knows no bounds; environments do."""
        space = self.env.action_space
        return np.clip(actions, space.low, space.high) if actions.dtype == np.float32 else actions

    def _log_ends(self, infos: dict[str, Any]) -> int:
        """Logs how the episodes that just ended went; their number."""
        ended = np.flatnonzero(self.ended)
        for i in ended:
            outcome = infos["outcome"][i] if "outcome" in infos else None
            values = {name: getattr(outcome, name, None) for name in OUTCOMES} | {
                "return": self.returns[i],
                "length": self.lengths[i],
            }
            for name, value in values.items():
                if value is not None:
                    self.metrics.log_value(
                        ("outcome", name), float(value), reduce="sum"
                    )  # sums start anew each round, means do not
                    self.metrics.log_value(("outcomes", name), 1, reduce="sum")
        self.returns[ended] = self.lengths[ended] = 0
        return len(ended)

    def _episodes(self, rows: list[dict[str, Any]]) -> list[SingleAgentEpisode]:
        """The pieces of episodes that T rows are made of; those that ended come first."""
        columns = {
            name: np.stack([row[name] for row in rows], axis=1) for name in rows[0] if name != Columns.OBS
        }  # (N, T, ...)
        seen = [*(row[Columns.OBS] for row in rows), self.observations]
        observations = tree.map_structure(lambda *each: np.stack(each, axis=1), *seen)  # (N, T + 1, ...)
        ended, going_on = [], []
        for i in range(self.num_envs):
            edges = np.diff(columns["starting"][i].astype(np.int8), prepend=1, append=1)
            for first, end in zip(
                np.flatnonzero(edges == -1), np.flatnonzero(edges == 1), strict=True
            ):  # runs without a start in between
                if first and columns["starting"][i, first - 1]:
                    self.episodes[i] += 1
                    self.started[i] = 0
                piece = self._episode(i, columns, observations, first, end)
                if piece.is_done:
                    ended.append((end, i, piece))
                else:
                    going_on.append(piece)
                self.started[i] += end - first
            if columns["starting"][i, -1]:
                self.episodes[i] += 1
                self.started[i] = 0
        return [piece for _, _, piece in sorted(ended, key=lambda each: each[:2])] + going_on

    def _episode(
        self, i: int, columns: dict[str, np.ndarray], observations: Any, first: int, end: int
    ) -> SingleAgentEpisode:
        n = end - first
        buffer = lambda data: InfiniteLookbackBuffer(data, lookback=0)  # noqa: E731
        outputs = {
            name: buffer(columns[name][i, first:end])
            for name in (Columns.ACTION_DIST_INPUTS, Columns.ACTION_LOGP)
        }
        if i < len(columns.get(PICTURES, ())):
            outputs[PICTURES] = buffer(columns[PICTURES][i, first:end])
        return SingleAgentEpisode(
            id_=f"{self.first_round}-{self.worker_index}-{i}-{self.episodes[i]}",
            observations=buffer(tree.map_structure(itemgetter((i, slice(first, end + 1))), observations)),
            infos=buffer([{}] * (n + 1)),
            actions=buffer(columns[Columns.ACTIONS][i, first:end]),
            rewards=buffer(columns[Columns.REWARDS][i, first:end].astype(np.float32)),
            terminated=bool(columns[Columns.TERMINATEDS][i, end - 1]),
            truncated=bool(columns[Columns.TRUNCATEDS][i, end - 1]),
            extra_model_outputs=outputs,
            t_started=int(self.started[i]),
            len_lookback_buffer=0,
        )


def parts_of(observations: Any) -> tuple[Any, ...]:
    """Observations, and masks of actions where there are some."""
    return (
        (observations["obs"], observations["action_mask"])
        if isinstance(observations, dict)
        else (observations,)
    )


def trajectory_of(episode: SingleAgentEpisode) -> Trajectory:
    """A piece of an episode, as learned rewards see it."""
    steps, observations = slice(0, len(episode)), episode.get_observations(slice(0, len(episode) + 1))
    _, worker, env, _ = episode.id_.split("-")
    return Trajectory(
        observations=parts_of(observations)[0],
        actions=np.asarray(episode.get_actions(steps)),
        log_probs=np.asarray(episode.get_extra_model_outputs(Columns.ACTION_LOGP, steps)),
        pictures=_pictures(episode, steps),
        rewards=episode.get_rewards(steps),
        terminated=episode.is_terminated,
        truncated=episode.is_truncated,
        episode=episode.id_,
        start=episode.t_started,
        worker=int(worker),
        env=int(env),
    )


def _pictures(episode: SingleAgentEpisode, steps: slice) -> np.ndarray | None:
    """What people see before each action, where that was drawn."""
    there = PICTURES in episode.extra_model_outputs
    return np.asarray(episode.get_extra_model_outputs(PICTURES, steps)) if there else None
