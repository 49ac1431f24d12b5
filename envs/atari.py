"""Atari games as agents play them, in the vector environment of `ale-py`; its ROMs come with it.

An episode begins with 1 to 30 frames of waiting, and FIRE where a game waits for it. An action lasts 4
frames; a picture is the maximum over the last two of them, grey, shrunk to 84 x 84; a reward is the sign of
the frames' sum. Observations are the last 4 pictures, the newest last, and black ones before the first of an
episode: (84, 84, 4) bytes.

    AtariVector    any game by its name in ale-py: pong, breakout, ms_pacman, ...
    PongVector     to 21 points
    EnduroVector   black from row 160 of 210 on, where speed and counter are; 3000 frames, before the weather
                   changes: 743 to 750 actions

Unlike in Rahtz's reproduction, Enduro's first picture is black there, too; pictures shrink by areas; an
action that reaches frame 3000 is finished. Losing a life is no end by default, as in Christiano et al. 2017:
such ends tell an agent what is bad.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_dialog.errors import UserError

SMALL, STACK, ROWS = 84, 4, 210


class AtariVector(VectorEnv):
    """`num_envs` games. Environment i is the same, however many others there are.

    As in Gymnasium's own vector environments, the step after an end ignores that environment's action and
    starts its next episode, with reward 0.

    Args:
        game: as in ale-py, in snake case.
        worker: of several vectors with the same seed, which one.
        episodic_life: losing a life ends the episode and its game: the next one has all lives again.
        max_frames: of an episode, waiting included.
        blank_from: row of the game's 210 below which pictures are black; 210: none.
        threads: that play at the same time; 0: as many as there are cores.

    Raises UserError for an unknown game, ImportError without ale-py.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}
    clip_length = 25  # actions that people compare at a time: 1.7 seconds
    frames_per_second = 15
    task = "Play the game well."

    def __init__(self, num_envs: int = 1, game: str = "breakout", *, worker: int = 0,
                 episodic_life: bool = False, max_frames: int = 108_000, blank_from: int = ROWS,
                 threads: int = 1) -> None:  # fmt: skip
        try:
            from ale_py.roms import get_all_rom_ids
            from ale_py.vector_env import AtariVectorEnv
        except ImportError as error:
            raise UserError(f"{game} is played by ale-py: pip install ale-py") from error
        if num_envs < 1 or max_frames < 1 or not 0 < blank_from <= ROWS:
            raise UserError(
                f"expected num_envs and max_frames of at least 1 and blank_from in 1..{ROWS}, got {num_envs},"
                f" {max_frames}, {blank_from}"
            )
        if game not in get_all_rom_ids():
            raise UserError(f"unknown game {game!r}: expected one of {', '.join(sorted(get_all_rom_ids()))}")
        # The limit of ale-py counts from the first action on; ours is below.
        self.games = AtariVectorEnv(
            game,
            num_envs,
            num_threads=threads,
            episodic_life=episodic_life,
            max_num_frames_per_episode=2**31 - 1,
        )
        self.num_envs, self.worker, self.max_frames = num_envs, worker, max_frames
        self.visible = -(-blank_from * SMALL // ROWS)  # rows of the small picture
        self.single_observation_space = Box(0, 255, (SMALL, SMALL, STACK), np.uint8)
        self.single_action_space = self.games.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.action_names = tuple(action.name for action in self.games.ale.get_action_set())
        self.cut = np.zeros(num_envs, bool)  # by our limit, with the last step
        self.running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A new episode in every environment; a seed makes their chance anew. There are no options."""
        if options:
            raise UserError(f"expected no options, got {sorted(options)}")
        if seed is not None:
            seed = np.array(
                [
                    np.random.SeedSequence(seed, spawn_key=(self.worker, i)).generate_state(1)[0] >> 1
                    for i in range(self.num_envs)
                ]
            )
        pictures, _ = self.games.reset(seed=seed)
        self.cut[:], self.running = False, True
        return self._observations(pictures), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One action per environment # (N,). Raises UserError for another shape or unknown actions,
        ResetNeeded before the first reset."""
        if not self.running:
            raise gymnasium.error.ResetNeeded("expected running episodes; call reset first")
        actions, n = np.asarray(actions), self.single_action_space.n
        if actions.shape != (self.num_envs,) or not ((actions >= 0) & (actions < n)).all():
            raise UserError(f"expected {self.num_envs} actions of 0 to {n - 1}, got {actions}")
        pictures, rewards, terminated, truncated, infos = self.games.step(actions.astype(np.int64))
        if self.cut.any():  # ale-py knows nothing of this end, and went on
            pictures = pictures.copy()
            pictures[self.cut] = self.games.reset(options={"reset_mask": self.cut})[0][self.cut]
        rewards = np.where(self.cut, 0, rewards).astype(np.float32)
        terminated, truncated = terminated & ~self.cut, truncated & ~self.cut
        self.cut = ~self.cut & ~terminated & ~truncated & (infos["episode_frame_number"] >= self.max_frames)
        return self._observations(pictures), rewards, terminated, truncated | self.cut, {}

    @staticmethod
    def draw(observation: np.ndarray) -> np.ndarray:
        """What people see of one observation: the newest picture # (84, 84, 3) bytes"""
        return np.repeat(observation[..., -1:], 3, axis=-1)

    def _observations(self, pictures: np.ndarray) -> np.ndarray:
        """(N, 4, 84, 84) to new arrays # (N, 84, 84, 4)"""
        observations = np.moveaxis(pictures, 1, -1).copy()
        observations[:, self.visible :] = 0
        return observations


class PongVector(AtariVector):
    """Pong: the paddle on the right is the agent's."""

    task = "Play Pong well: the right paddle should return the ball, and make points."

    def __init__(
        self,
        num_envs: int = 1,
        *,
        worker: int = 0,
        max_frames: int = 108_000,
        blank_from: int = ROWS,
        threads: int = 1,
    ) -> None:
        super().__init__(
            num_envs, "pong", worker=worker, max_frames=max_frames, blank_from=blank_from, threads=threads
        )


class EnduroVector(AtariVector):
    """Enduro, with its limit and its blank rows."""

    task = "Drive well: pass other cars and do not hit them."

    def __init__(
        self,
        num_envs: int = 1,
        *,
        worker: int = 0,
        max_frames: int = 3000,
        blank_from: int = 160,
        threads: int = 1,
    ) -> None:
        super().__init__(
            num_envs, "enduro", worker=worker, max_frames=max_frames, blank_from=blank_from, threads=threads
        )
