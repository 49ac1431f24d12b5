"""What an actor of `online` holds, without Ray: it plays what this process plays, with any version."""

from __future__ import annotations

import pytest
import torch

from rl_dialog.cluster.online import GroupPlayer
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.evaluation.self_play import Opponent
from rl_dialog.methods import PPO
from rl_dialog.models.checkpoint import steering_of
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.versions import Versions, weights_of
from tests.evaluation.test_rollouts import Echo
from tests.evaluation.test_self_play import Bidding


@pytest.mark.parametrize(
    ("make_env", "lag", "start"),
    [(Echo, 0, "bc"), (Bidding, 0, "bc"), (Bidding, 1, "bc"), (Echo, 0, "ilql"), (Bidding, 1, "ilql")],
)
def test_an_actor_plays_what_the_learner_would(checkpoints, make_env, lag: int, start: str) -> None:  # noqa: ANN001
    """Word for word and bit for bit, with the weights that it was sent last, against those of the copy."""
    tokenizer, model = load_tokenizer(checkpoints[start]), ModelConfig(model_name_or_path=checkpoints[start])
    learner = Policy(load_lm(model, tokenizer), PPO(), model).eval()  # with values, which an actor has not
    learner.steering = steering_of(checkpoints[start])  # but for those that it speaks by
    versions = Versions(learner, lag=lag)
    play = Rollouts(
        make_env, Decoding(max_new_tokens=4), groups=2, group_size=2, seed=3, batch_size=2,
        self_play=make_env is Bidding, versions=versions, opponent=Opponent(learner) if lag else None,
    )  # fmt: skip
    actor = GroupPlayer(model, play.playing, "cpu")
    for step in range(3):
        versions.remember(step, learner)
        there = play.episodes(learner, tokenizer, step)
        weights = {name: value.numpy() for name, value in weights_of(learner).items()}
        other = versions.opponent(step) if lag else None
        copied = None if other is None else {k: v.numpy() for k, v in versions.kept[other].items()}
        here = [each for unit in play.units(step) for each in actor(unit, step, weights, other, copied)]
        assert [each.dialog for each in here] == [each.dialog for each in there] and len(here) >= 4
        for one, two in zip(here, there, strict=True):
            assert [reply.spoken for reply in one.replies] == [reply.spoken for reply in two.replies]
        chance = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in learner.lm.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=chance))
