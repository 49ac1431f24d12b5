"""Which steps of an episode become clips."""

import numpy as np
import pytest
import torch

from rl_dialog.models.reward_model import RewardModel, RewardModelConfig
from rl_dialog.models.trajectory import Trajectory
from rl_dialog.preferences.learned_reward import LearnedReward


def cut(aligned, *, length=4, seed=0, terminated=False, truncated=False):
    """(first step, steps) of the clips of an episode of eleven steps."""
    reward = LearnedReward(length, aligned=aligned, seed=seed)
    seen, costs = np.arange(12, dtype=np.float32)[:, None], np.full(11, -1, np.float32)
    reward([Trajectory(seen, np.zeros(11, np.int64), np.zeros(11), costs, terminated, truncated)])
    return [(clip.source["start"], clip.steps) for clip in reward.take_clips()]


@pytest.mark.parametrize(
    ("end", "clips"),
    [
        ({"truncated": True}, [(0, 4), (4, 4)]),
        ({"terminated": True}, [(0, 4), (4, 4), (8, 3)]),
        ({}, [(0, 4), (4, 4)]),
    ],
)
def test_a_time_limit_makes_no_short_clip(end, clips):
    """Of two clips that cost 1 a step, that of three steps would be called better, whatever was done there.
    Where the world itself ends an episode, its last steps are what happened."""
    assert cut(1.0, **end) == clips


def test_episodes_shorter_than_a_clip_are_clips():
    assert cut(1.0, length=12, truncated=True) == [(0, 11)]
    assert cut(1.0, length=11, truncated=True) == [(0, 11)]


@pytest.mark.parametrize(("confirmed", "curious"), [(0.0, True), (0.25, True), (1.0, True), (0.0, False)])
def test_what_members_disagree_on_stands_in_for_what_is_not_confirmed(confirmed, curious):
    """Two members that see the observation and its double: mean 1.5 o, deviation .5 o."""
    model = RewardModel(RewardModelConfig((1,), 2, action_input="none", hidden=(1,), members=2))
    for layer, weights in zip(model.layers, ([1.0, 2.0], [1.0, 1.0]), strict=True):
        layer.weight.data = torch.tensor(weights)[:, None, None]
    model.confirmed.fill_(confirmed)
    reward = LearnedReward(4, curious=curious)
    reward.use(model, 1)
    seen = np.array([[0.0], [2.0], [4.0], [9.0]], np.float32)
    (earned,) = reward([Trajectory(seen, np.zeros(3, np.int64), np.zeros(3), np.zeros(3), False, True)])
    share = confirmed if curious else 1.0
    np.testing.assert_allclose(earned, seen[:3, 0] * (share * 1.5 + (1 - share) * 0.5))


def test_of_our_own_worlds_everything_is_shown():
    episodes = [cut(0.0, seed=seed, truncated=True) for seed in range(8)]
    assert all(sum(steps for _, steps in clips) == 11 - clips[0][0] for clips in episodes)
    assert any(clips[-1][1] < 4 for clips in episodes)
