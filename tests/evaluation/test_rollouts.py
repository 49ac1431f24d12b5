"""Recorded replies and groups of episodes: the numbers that learning rests on."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import collate
from rl_dialog.data.readers import read_logs
from rl_dialog.data.splits import split_key
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, generate_replies, recorded_replies
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import RLOO
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy

HOW = Decoding(max_new_tokens=6)
TALKS = [[{"role": "user", "content": text}] for text in ("hello", "what would you like to eat", "hi", "a b")]


class Echo:
    """Two turns; says back what it heard, with a number of its seed. The seed's first episode may fail."""

    max_turns = 2

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        self.number = int(np.random.default_rng(seed).integers(1000))
        self.messages = [{"role": "user", "content": f"hello {self.number}"}]
        return list(self.messages), {}

    def step(self, reply):  # noqa: ANN001, ANN201
        self.messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": f"you: {reply}"},
        ]
        return list(self.messages), float(len(reply)), False, False, {}


class Silent(Echo):
    """Says nothing of its number."""

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        super().reset(seed=seed)
        self.messages = [{"role": "user", "content": "hello"}]
        return list(self.messages), {}


class Careless(Echo):
    """Ignores its seed."""

    begun = 0

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        Careless.begun += 1
        return super().reset(seed=Careless.begun)


class Broken(Echo):
    """Fails in its second step for about half of the partners, and never says what it paid in the rest."""

    def step(self, reply):  # noqa: ANN001, ANN201
        messages, reward, *rest = super().step(reply)
        if len(messages) > 3 and self.number % 2:
            return messages, 0.0, False, True, {"failed": "the server is gone"}
        return messages, reward if self.number % 3 else None, *rest[:2], {}


@torch.no_grad()
def learners_logp(policy, rows, factor: float = 1.0) -> list[np.ndarray]:  # noqa: ANN001
    """What the learner says of the decisions of each row, all rows in one padded batch."""
    batch = collate(rows)
    logp = -policy.outputs(batch).lm.scaled(factor).nll(batch.actions)[1]
    return [logp[batch.rows == b].numpy() for b in range(len(rows))]


def rows_of(replies):  # noqa: ANN001, ANN201
    from rl_dialog.data.rollout import rollout_rows

    return [rollout_rows([reply.spoken], [0.0], truncated=False)[0][0] for reply in replies]


def test_recorded_replies_are_the_replies(make_policy, tokenizer) -> None:  # noqa: ANN001
    """Recording changes no draw; ids give the text again, and only a drawn end is among them."""
    policy, seeds = make_policy(RLOO()), [3, 1, 4, 1]
    plain = generate_replies(policy, tokenizer, TALKS, HOW, seeds=seeds)
    found = recorded_replies(policy, tokenizer, TALKS, HOW, seeds=seeds)
    for one, other in zip(plain, found, strict=True):
        assert (one.text, one.tokens, one.finished) == (other.text, other.tokens, other.finished)
        ids = other.spoken.ids
        assert ids[: len(one.tokens)] == one.tokens and len(ids) == len(one.tokens) + one.finished
        assert len(ids) == len(other.spoken.logp)
    assert {reply.finished for reply in found} == {False} or any(reply.finished for reply in found)


@pytest.mark.parametrize("batch_size", [1, 2, 128])
def test_the_learner_says_what_the_sampler_said_in_every_batch(
    make_policy, tokenizer, batch_size: int
) -> None:  # noqa: ANN001
    policy, seeds = make_policy(RLOO(), "llama"), [3, 1, 4, 1]
    found = recorded_replies(policy, tokenizer, TALKS, HOW, seeds=seeds, batch_size=batch_size)
    for reply, logp in zip(found, learners_logp(policy, rows_of(found)), strict=True):
        np.testing.assert_allclose(reply.spoken.logp, logp, atol=2e-5)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"temperature": 0.5}, lambda p: torch.ones_like(p, dtype=torch.bool)),
        ({"top_k": 3}, lambda p: p >= p.topk(3).values[-1]),
        ({"top_p": 0.6}, None),
        ({"temperature": 2.0, "top_k": 5}, lambda p: p >= p.topk(5).values[-1]),
    ],
    ids=["temperature", "top_k", "top_p", "temperature and top_k"],
)
def test_probabilities_are_those_of_what_was_drawn_from(make_policy, tokenizer, how, kept) -> None:  # noqa: ANN001
    """Temperature enters in full; top-k and top-p leave a mass that the draw is divided by."""
    policy = make_policy(RLOO(), "llama")
    decoding = Decoding(max_new_tokens=4, **how)
    (reply,) = recorded_replies(policy, tokenizer, TALKS[1:2], decoding, seeds=[5])
    ids = list(reply.spoken.prompt)
    for token, logp in zip(reply.spoken.ids, reply.spoken.logp, strict=True):
        with torch.no_grad():
            p = policy(torch.tensor([ids])).logits[0, -1].div(decoding.temperature).softmax(-1)
        if kept is None:  # the smallest set of the likeliest tokens that has the mass
            order = p.argsort(descending=True)
            inside = order[: int((p[order].cumsum(0) < 0.6).sum()) + 1]
            mass = p[inside].sum()
        else:
            mass = p[kept(p)].sum()
        assert logp == pytest.approx(float((p[token] / mass).log()), abs=1e-4)
        ids.append(token)


@pytest.mark.parametrize("how", [{"do_sample": False}, {"num_generations": 2}], ids=str)
def test_what_has_no_probability_is_refused(make_policy, tokenizer, how) -> None:  # noqa: ANN001
    with pytest.raises(UserError, match="expected replies that are sampled, one per turn"):
        recorded_replies(make_policy(RLOO()), tokenizer, TALKS, Decoding(**how), seeds=[0] * 4)


def rollouts(folder=None, make_env=Echo, size=3, batch_size=128) -> Rollouts:  # noqa: ANN001
    return Rollouts(make_env, HOW, groups=2, group_size=size, seed=9, folder=folder, batch_size=batch_size)


def test_a_group_has_one_partner_and_many_draws(make_policy, tokenizer) -> None:  # noqa: ANN001
    policy = make_policy(RLOO())
    found = rollouts()(policy, tokenizer, 4)
    assert [each.episode for each in found] == list(range(24, 30))
    assert [each.group for each in found] == [8, 8, 8, 9, 9, 9]
    beginnings = [each.rows[0].input_ids[: each.rows[0].assistant.argmax()].tolist() for each in found]
    assert beginnings[0] == beginnings[1] == beginnings[2] != beginnings[3]
    replies = [tuple(row.input_ids[row.assistant].tolist() for row in each.rows) for each in found]
    assert replies[0] != replies[1]
    assert all(each.total == sum(row.rewards.sum() for row in each.rows) for each in found)
    assert all(each.rows[-1].truncated for each in found)  # max_turns cut them off


def test_what_is_drawn_does_not_depend_on_who_plays_beside(make_policy, tokenizer) -> None:  # noqa: ANN001
    policy = make_policy(RLOO())
    one, other = (rollouts(batch_size=size)(policy, tokenizer, 0) for size in (1, 128))
    for a, b in zip(one, other, strict=True):
        assert [row.input_ids.tolist() for row in a.rows] == [row.input_ids.tolist() for row in b.rows]
        for mine, theirs in zip(a.logp, b.logp, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_all_turns_are_trained_as_they_were_drawn(make_policy, tokenizer) -> None:  # noqa: ANN001
    """Whatever bytes a reply was made of: its tokens stand in a row once, with the sampler's numbers."""
    policy = make_policy(RLOO(), "llama")
    found = rollouts()(policy, tokenizer, 0)
    for each in found:
        for row, mine, logp in zip(each.rows, learners_logp(policy, each.rows), each.logp, strict=True):
            np.testing.assert_allclose(mine, logp, atol=2e-5)
            assert row.assistant.sum() == len(logp)
    episodes = rollouts().episodes(policy, tokenizer, 0)
    for each, episode in zip(found, episodes, strict=True):
        trained = [token for row in each.rows for token in row.input_ids[row.assistant].tolist()]
        assert trained == [token for reply in episode.replies for token in reply.spoken.ids]


def test_whichever_end_was_drawn_is_trained(make_policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    """A model with two ends of turn keeps both. The one that the template does not write is trained where it
    was drawn; what is rendered instead is read, in a row of its own."""
    other = tokenizer.convert_tokens_to_ids("<|tool|>")
    policy = make_policy(RLOO(), "llama")
    policy.lm.generation_config.eos_token_id = [other, tokenizer.eos_token_id, 7]
    policy.lm.save_pretrained(tmp_path / "model")
    lm = load_lm(ModelConfig(model_name_or_path=str(tmp_path / "model")), tokenizer)
    assert lm.generation_config.eos_token_id == sorted([other, tokenizer.eos_token_id])  # 7 is a word
    policy, how = Policy(lm, RLOO()).eval(), Decoding(max_new_tokens=16)
    play = Rollouts(Echo, how, groups=8, group_size=2, seed=9)
    rows = [row for each in play(policy, tokenizer, 0) for row in each.rows]
    drawn = np.concatenate([row.input_ids[row.assistant] for row in rows])
    with torch.no_grad():  # as likely as the likeliest word
        weight = lm.get_output_embeddings().weight
        weight[other] = weight[np.bincount(drawn).argmax()]
    found = play(policy, tokenizer, 0)
    last = [int(row.input_ids[end]) for each in found for row in each.rows for end in row.reply_ends]
    assert tokenizer.eos_token_id in last
    ended = [each.rows for each in found if each.rows[0].input_ids[each.rows[0].reply_ends[0]] == other]
    assert ended
    for first, second in ended:
        assert first.assistant[first.reply_ends[0]] and not first.assistant[: first.reply_starts[0]].any()
        context = second.input_ids[: second.reply_starts[0]]
        assert other not in context and tokenizer.eos_token_id in context[first.reply_starts[0] :]


def test_an_end_that_the_tokenizer_marks_and_does_not_name_is_kept(make_policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.add_special_tokens(["<|stop|>"])
    ends = sorted([tokenizer.convert_tokens_to_ids("<|stop|>"), tokenizer.eos_token_id])
    policy = make_policy(RLOO(), "llama")
    policy.lm.generation_config.eos_token_id = ends
    policy.lm.save_pretrained(tmp_path)
    lm = load_lm(ModelConfig(model_name_or_path=str(tmp_path)), tokenizer)
    assert lm.generation_config.eos_token_id == ends


def test_a_failed_or_unscored_episode_has_no_return(make_policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    play = Rollouts(Broken, HOW, groups=12, group_size=2, seed=1, folder=tmp_path)
    found = play(make_policy(RLOO()), tokenizer, 0)
    ends = [json.loads(line)["meta"]["end"] for line in (tmp_path / "step-000001.jsonl").open()]
    assert {"failed", "unscored", "truncated"} == set(ends)
    for each, end in zip(found, ends, strict=True):
        assert (each.total is None) == (end in ("failed", "unscored"))


def test_the_log_is_read_like_any_other(make_policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    policy = make_policy(RLOO())
    play = rollouts(tmp_path / "rollouts")
    for step in range(2):
        play(policy, tokenizer, step)
    dialogs, bad = read_logs([tmp_path / "rollouts"])
    assert not bad
    assert len({dialog.id for dialog in dialogs}) == len(dialogs) == 12
    assert [dialog.meta["step"] for dialog in dialogs] == [1] * 6 + [2] * 6
    again = (tmp_path / "rollouts/step-000002.jsonl").read_bytes()
    play(policy, tokenizer, 1)  # a round that is played again after a kill takes the place of itself
    assert (tmp_path / "rollouts/step-000002.jsonl").read_bytes() == again


def test_a_partners_episodes_stay_in_one_split(make_policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    """Also in a world that begins alike for all of them."""
    rollouts(tmp_path, make_env=Silent)(make_policy(RLOO()), tokenizer, 0)
    dialogs, _ = read_logs([tmp_path])
    assert len({dialog.messages[0]["content"] for dialog in dialogs}) == 1
    for by in ("first_turn", "dialog"):
        keys = {dialog.meta["partner"]: set() for dialog in dialogs}
        for dialog in dialogs:
            keys[dialog.meta["partner"]].add(split_key(dialog, by))
        assert [len(own) for own in keys.values()] == [1, 1] and len(set.union(*keys.values())) == 2


def test_a_world_that_ignores_its_seed_is_told(make_policy, tokenizer) -> None:  # noqa: ANN001
    with pytest.raises(UserError, match="expected episodes of the same seed to begin alike.*group_size 1"):
        rollouts(make_env=Careless)(make_policy(RLOO()), tokenizer, 0)
    rollouts(make_env=Careless, size=1)(make_policy(RLOO()), tokenizer, 0)


def test_of_beginnings_that_differ_the_messages_that_do_are_told(make_policy, tokenizer) -> None:  # noqa: ANN001
    class Instructed(Careless):
        """Tells all of them the same before it ignores its seed."""

        def reset(self, *, seed=None):  # noqa: ANN001, ANN202
            messages, info = super().reset(seed=seed)
            self.messages = [{"role": "system", "content": "Be kind."}, *messages]
            return list(self.messages), info

    with pytest.raises(UserError, match="got .'role': 'user', .* and .'role': 'user', ") as told:
        rollouts(make_env=Instructed)(make_policy(RLOO()), tokenizer, 0)
    assert "Be kind" not in str(told.value)


def test_what_was_read_is_forgotten_with_the_weights_that_read_it(make_policy, tokenizer) -> None:  # noqa: ANN001
    """Caches stay from turn to turn and never from version to version: the same policy with other weights
    says what a fresh one with these weights says."""
    policy, other = (make_policy(RLOO(), "llama", seed=seed) for seed in (0, 7))
    play = rollouts()
    play(policy, tokenizer, 0)
    policy.load_state_dict(other.state_dict())
    found, fresh = play(policy, tokenizer, 0), play(other, tokenizer, 0)
    for one, two in zip(found, fresh, strict=True):
        for mine, theirs, logp in zip(one.logp, two.logp, learners_logp(policy, one.rows), strict=True):
            np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_allclose(mine, logp, atol=2e-5)


def test_a_drawn_token_that_is_the_padding_too_is_trained(make_policy, tokenizer) -> None:  # noqa: ANN001
    """Masks follow from where a token came from, not from which it is."""
    policy = make_policy(RLOO(), "llama")
    with torch.no_grad():  # likelier than any word
        weight = policy.lm.get_output_embeddings().weight
        weight[tokenizer.pad_token_id] = 3 * weight[weight.norm(dim=1).argmax()]
    drawn = [
        row.input_ids[row.assistant] for each in rollouts(size=4)(policy, tokenizer, 0) for row in each.rows
    ]
    assert any((ids == tokenizer.pad_token_id).any() for ids in drawn)
    for each in rollouts(size=4)(policy, tokenizer, 0):
        for row, logp in zip(each.rows, each.logp, strict=True):
            batch = collate([row], pad_id=tokenizer.pad_token_id)
            assert batch.decisions == len(logp) == row.assistant.sum()
            assert batch.actions.tolist() == row.input_ids[row.assistant].tolist()
