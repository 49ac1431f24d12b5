"""Self-play: who plays which role, what each role saw and earned, and what is learned from."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_dialog.data.readers import read_logs
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.openings import RewardMix
from rl_dialog.evaluation.rollouts import Playing, Rollouts, components_of, self_play_return
from rl_dialog.evaluation.self_play import Opponent
from rl_dialog.methods import RLOO
from rl_dialog.rewards import choose_rewards
from rl_dialog.training.versions import FROZEN, Versions, take_weights, weights_of

HOW = Decoding(max_new_tokens=4)


class Bidding:
    """Two bidders speak in turn, three times in all; each earns the length of its words when it spoke, and at
    the end the other's last length is taken off. Who begins follows from the seed."""

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        self.first = int(np.random.default_rng(seed).integers(2))
        self.views = [[{"role": "user", "content": f"bidder {i}, seed {seed}"}] for i in range(2)]
        self.said = []
        return list(self.views[self.first]), {"role": f"bidder_{self.first}"}

    def step(self, reply):  # noqa: ANN001, ANN201
        me = (self.first + len(self.said)) % 2
        self.said.append(reply)
        self.views[me].append({"role": "assistant", "content": reply})
        self.views[1 - me].append({"role": "user", "content": f"other: {reply}"})
        over, earned = len(self.said) == 3, {f"bidder_{me}": float(len(reply))}
        told = {"role": f"bidder_{1 - me}"}
        if over:
            earned[f"bidder_{1 - me}"] = -float(len(reply))
            self.views[me].append({"role": "user", "content": "sold"})
            told["views"] = {f"bidder_{me}": list(self.views[me])}
        return list(self.views[1 - me]), earned, over, False, told


class Unfair(Bidding):
    """Breaks in its second step for the seeds that bidder 1 begins."""

    def step(self, reply):  # noqa: ANN001, ANN201
        messages, earned, over, _, info = super().step(reply)
        if len(self.said) == 2 and self.first:
            return messages, {}, False, True, info | {"failed": "the auctioneer left"}
        return messages, earned, over, False, info


class Forgetful(Bidding):
    """Shows each bidder the latest message alone."""

    def step(self, reply):  # noqa: ANN001, ANN201
        messages, *rest = super().step(reply)
        return messages[-1:], *rest


class Alone:
    """A world of one player."""

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        return [{"role": "user", "content": "hi"}], {}


def rollouts(make_env=Bidding, **more) -> Rollouts:  # noqa: ANN001, ANN003
    return Rollouts(make_env, HOW, groups=4, group_size=2, seed=3, batch_size=4, self_play=True, **more)


@pytest.fixture
def policy(make_policy):  # noqa: ANN001, ANN201
    return make_policy(RLOO(), "llama").eval()


def test_each_role_is_an_episode_with_what_it_earned(policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    found = rollouts(folder=tmp_path)(policy, tokenizer, 2)
    assert len(found) == 16 and {each.role for each in found} == {"bidder_0", "bidder_1"}
    assert len({(each.group, each.role) for each in found}) == len({each.group for each in found}) == 8
    dialogs, bad = read_logs([tmp_path])
    assert not bad and len({dialog.id for dialog in dialogs}) == 16
    by_episode: dict[int, dict[str, Dialog]] = {}
    for dialog in dialogs:
        by_episode.setdefault(dialog.meta["episode"], {})[dialog.meta["role"]] = dialog
    for roles in by_episode.values():
        first, second = sorted(roles.values(), key=lambda dialog: len(dialog.replies), reverse=True)
        said = [first.messages[i]["content"] for i in first.replies]
        answer = second.messages[second.replies[0]]["content"]
        heard = [m["content"] for m in second.messages[1:]]
        assert heard == [f"other: {said[0]}", answer, f"other: {said[1]}"]
        assert first.messages[-1] == {"role": "user", "content": "sold"}  # who had the last word, too
        assert [first.messages[i]["reward"] for i in first.replies] == [len(said[0]), len(said[1])]
        assert second.messages[second.replies[0]]["reward"] == len(answer) - len(said[1])
    for each in found:
        dialog = by_episode[each.episode][each.role]
        assert each.total == sum(dialog.messages[i]["reward"] for i in dialog.replies)


def test_what_is_trained_is_what_the_role_drew(policy, tokenizer) -> None:  # noqa: ANN001
    play = rollouts()
    episodes = play.episodes(policy, tokenizer, 0)
    for each, episode in zip(play(policy, tokenizer, 0), episodes, strict=True):
        trained = [token for row in each.rows for token in row.input_ids[row.assistant].tolist()]
        assert trained == [token for reply in episode.replies for token in reply.spoken.ids]


def test_against_a_copy_both_sides_are_played_in_turn(make_policy, policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    """The copy's words are logged and not learned from; its weights are its own."""
    versions = Versions(policy, lag=FROZEN)
    play = rollouts(folder=tmp_path, versions=versions, opponent=Opponent(policy))
    take_weights(policy, weights_of(make_policy(RLOO(), "llama", seed=7)))
    found = play(policy, tokenizer, 0)
    dialogs = [json.loads(line) for line in (tmp_path / "step-000001.jsonl").open()]
    assert len(found) == 8 and len(dialogs) == 16
    learned = {(d["meta"]["episode"], d["meta"]["role"]) for d in dialogs if d["meta"]["player"] == "learner"}
    assert learned == {(each.episode, each.role) for each in found}
    by_partner = {d["meta"]["partner"]: set() for d in dialogs}
    for d in dialogs:
        if d["meta"]["player"] == "learner":
            by_partner[d["meta"]["partner"]].add(len([m for m in d["messages"] if m["role"] == "assistant"]))
    assert list(by_partner.values()) == [{2}, {1}, {2}, {1}]  # who begins speaks twice
    with torch.no_grad():
        for each in found:  # the recorded numbers are those of the learner's own weights
            ids = torch.tensor(each.rows[0].input_ids[None].astype(np.int64))
            logp = policy(ids).logits[0, :-1].log_softmax(-1)
            mask = torch.tensor(each.rows[0].assistant[1:])
            drawn = logp.gather(1, ids[0, 1:, None])[mask, 0]
            np.testing.assert_allclose(drawn.numpy(), each.logp[0], atol=2e-5)


def test_one_role_alone_is_learned(policy, tokenizer) -> None:  # noqa: ANN001
    versions = Versions(policy, lag=FROZEN)
    how = {"versions": versions, "opponent": Opponent(policy), "learner_role": "bidder_1"}
    found = rollouts(**how)(policy, tokenizer, 0)
    assert {each.role for each in found} == {"bidder_1"} and len(found) == 8
    alone = rollouts(learner_role="bidder_1")(policy, tokenizer, 0)  # the same weights on both sides
    assert [each.total for each in alone] == [each.total for each in found]
    message = "--learner_role buyer: expected a role of Bidding, which has bidder_0, bidder_1"
    with pytest.raises(UserError, match=message):
        rollouts(**how | {"learner_role": "buyer"})(policy, tokenizer, 0)


def test_an_episode_that_failed_has_no_return_in_any_role(policy, tokenizer) -> None:  # noqa: ANN001
    found = rollouts(Unfair)(policy, tokenizer, 0)
    ends = {each.episode: set() for each in found}
    for each in found:
        ends[each.episode].add(each.total is None)
    assert {True} in ends.values() and {False} in ends.values() and {True, False} not in ends.values()


def test_a_world_of_one_player_is_refused(policy, tokenizer) -> None:  # noqa: ANN001
    with pytest.raises(UserError, match="Alone: expected a world of several roles for self-play"):
        rollouts(Alone)(policy, tokenizer, 0)


def test_a_world_that_rewrites_what_was_seen_is_told_with_the_episode(policy, tokenizer) -> None:  # noqa: ANN001
    told = r"Forgetful, episode \d+, whose seed is \d+: expected messages that begin with those before"
    with pytest.raises(UserError, match=told):
        rollouts(Forgetful)(policy, tokenizer, 0)


def test_what_is_drawn_does_not_depend_on_who_plays_beside(policy, tokenizer) -> None:  # noqa: ANN001
    one, other = (replace(rollouts(), batch_size=size)(policy, tokenizer, 1) for size in (2, 128))
    for a, b in zip(one, other, strict=True):
        assert [row.input_ids.tolist() for row in a.rows] == [row.input_ids.tolist() for row in b.rows]


def test_the_return_is_that_against_the_start(make_policy, policy, tokenizer) -> None:  # noqa: ANN001
    """The same for the same weights, in both roles."""
    playing = Playing(Bidding, HOW, 1, 5, 8, self_play=True)
    start = weights_of(policy)
    measure = {"playing": playing, "opponent": Opponent(policy), "start": start, "episodes": 12}
    before = self_play_return(policy, tokenizer, **measure)
    assert {"eval/return", "eval/return_bidder_0", "eval/return_bidder_1"} <= before.keys()
    take_weights(policy, weights_of(make_policy(RLOO(), "llama", seed=7)))
    assert self_play_return(policy, tokenizer, **measure) != before
    take_weights(policy, start)
    assert self_play_return(policy, tokenizer, **measure) == before


@pytest.mark.parametrize(
    ("lag", "staleness", "expected"),
    [
        (0, 0, [0, 1, 2, 3, 4, 5, 6]),
        (1, 0, [0, 0, 2, 2, 4, 4, 6]),
        (2, 0, [0, 0, 0, 3, 3, 3, 6]),
        (FROZEN, 0, [0] * 7),
        (1, 2, [0, 0, 0, 0, 2, 2, 4]),
    ],
)
def test_which_version_plays_the_other_roles(policy, lag: int, staleness: int, expected, tmp_path) -> None:  # noqa: ANN001
    """And all that a round needs is kept, also by a run that goes on from a checkpoint before any round."""
    versions = Versions(policy, lag=lag, staleness=staleness)
    assert [versions.opponent(step) for step in range(7)] == expected
    for step in range(7):
        (tmp_path / str(step)).mkdir()
        versions.save(tmp_path / str(step), step)
        resumed = Versions(policy, lag=lag, staleness=staleness)
        resumed.load(tmp_path / str(step))
        for found in (versions, resumed):
            found.remember(step, policy)
            assert versions.needed(step) <= found.kept.keys()
        assert not lag or expected[step] in resumed.kept
        assert not staleness or max(0, step - staleness) in resumed.kept
        assert len(versions.kept) <= 2 + staleness + bool(lag)


def test_a_mix_judges_the_whole_conversation_from_each_side() -> None:
    """Components by name; a reply that nobody answered earned nothing from a reward about answers; what the
    world paid stays beside."""
    weights = {"question": 0.5, "answer_length": 0.1}
    mix = RewardMix(choose_rewards(weights), weights)
    dialog = Dialog(
        "d",
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "how are you?", "reward": 2.0},
            {"role": "user", "content": "very well indeed"},
            {"role": "assistant", "content": "good", "reward": 1.0},
        ],
    )
    mix(dialog)
    first, last = (dialog.messages[i] for i in dialog.replies)
    assert first["rewards"]["world"] == 2.0 and components_of(dialog)["world"] == 3.0
    assert first["reward"] == pytest.approx(
        0.5 * first["rewards"]["question"] + 0.1 * first["rewards"]["answer_length"]
    )
    assert first["rewards"]["answer_length"] > 0 and last["reward"] == 0.0
    alone = {"answer_length": 1.0}
    single = Dialog("e", [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good"}])
    RewardMix(choose_rewards(alone), alone)(single)
    assert single.messages[1]["reward"] is None and components_of(single) == {}
