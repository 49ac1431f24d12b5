"""Whole conversations that are compared: stored, asked about in pairs, and worth what their replies are worth
together."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.methods import BC
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.labels import Label
from rl_dialog.preferences.played_pairs import pairs_of_groups
from rl_dialog.preferences.replies import (
    ReplyPair,
    conversation_of,
    group_of,
    judged_in,
    pairs_of_labels,
)
from rl_dialog.preferences.reply_batches import Compared, Rows, pair_losses
from rl_dialog.preferences.reply_fitting import Fitting, fit, learning_rate_of, score
from rl_dialog.preferences.reply_queries import value_of
from rl_dialog.preferences.segments import Conversation, Reply, Segments

OPENING = [{"role": "user", "content": "hello"}]


def talk(*replies: str, opening: list[dict[str, str]] = OPENING, **source) -> Conversation:
    """The bot's replies, with a user who says "go on" between them."""
    messages = [{"role": "assistant", "content": replies[0]}]
    for reply in replies[1:]:
        messages += [{"role": "user", "content": "go on"}, {"role": "assistant", "content": reply}]
    return Conversation(opening, messages, source)


def episode(index: int, *replies: str, end: str = "terminated", **meta) -> Episode:
    conversation = talk(*replies)
    messages = [dict(each) for each in [*conversation.context, *conversation.messages]]
    for message in messages:
        if message["role"] == "assistant":
            message["reward"] = 1.0
    return Episode(index, Dialog(str(index), messages, meta={"seed": index // 4, **meta}), [], end)


def test_a_conversation_is_stored_as_what_it_is(tmp_path) -> None:
    segments, conversation = Segments(tmp_path), talk("fine", "नमस्ते", dialog="d1")
    assert segments[segments.add(conversation)] == conversation
    assert conversation.id != Reply(OPENING, conversation.text).id
    assert conversation.id == talk("fine", "नमस्ते", dialog="another").id
    path = next(tmp_path.rglob("*.json"))
    path.write_text(path.read_text(encoding="utf-8").replace("fine", "good"), encoding="utf-8")
    with pytest.raises(UserError, match="the file was changed"):
        segments[conversation.id]


def test_one_without_a_reply_is_none() -> None:
    with pytest.raises(UserError, match="expected a reply among the messages"):
        Conversation(OPENING, [{"role": "user", "content": "and you?"}])


def test_each_reply_is_judged_behind_what_was_said_before_it() -> None:
    first, second = judged_in(talk("one", "two"))
    assert [m["content"] for m in conversation_of(first)] == ["hello", "one"]
    assert [m["content"] for m in conversation_of(second)] == ["hello", "one", "go on", "two"]
    reply = Reply(OPENING, "one")
    assert judged_in(reply) == [reply]
    whole = lambda dialog: [float(len(dialog.messages))] * len(dialog.replies)  # noqa: E731
    assert value_of(talk("one", "two"), whole) == 4 + 4


def test_conversations_with_one_partner_stay_on_one_side_of_a_split() -> None:
    apart = [talk("a", conversation="world-1"), talk("b", conversation="world-2")]
    assert group_of(apart[0]) == group_of(talk("c", conversation="world-1")) != group_of(apart[1])


def test_labels_of_conversations_are_pairs_of_them() -> None:
    one, other = talk("one", "two"), talk("three")
    label = Label(1, "q", one.id, other.id, 1.0, "ann", 0.0, 1.0, 0, False)
    (pair,) = pairs_of_labels([label], {one.id: one, other.id: other})
    assert (pair.first, pair.second, pair.preference) == (one, other, 1.0)
    with pytest.raises(UserError, match="two replies to one context"):
        ReplyPair(one, talk("three", opening=[{"role": "user", "content": "another"}]))


class Counts:
    """A reward model that says how many tokens a row has, over 10."""

    def chains(self, rows):
        return [(row, [len(row)]) for row in rows]

    def encode(self, conversation):
        return [0] * len(conversation)

    def along(self, chains):
        return torch.tensor([len(row) / 10 for row, _ in chains])


def test_the_loss_compares_the_sums() -> None:
    """Rows of 2 and 4 messages are worth .6, one of 2 is worth .2: -log sigmoid(.4), with a tenth of the
    labels random."""
    reward = Counts()
    batch = Rows(reward).compared([ReplyPair(talk("one", "two"), talk("three"))])
    expected = -math.log(0.9 / (1 + math.exp(-0.4)) + 0.05)
    assert pair_losses(reward, batch, noise=0.1).tolist() == pytest.approx([expected])


@pytest.fixture
def causal(tmp_path_factory, make_policy, tokenizer) -> TextReward:
    """A language model of ours with a head that scores."""
    folder = tmp_path_factory.mktemp("lm")
    make_policy(BC(), "llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    return TextReward.from_base(str(folder), max_length=64)


def test_a_language_model_reads_a_conversation_once(causal) -> None:
    """The scores are those of its replies one by one, and so are the gradients."""
    conversations = [talk("one", "two", "three"), talk("four"), talk("five", "six")]
    sides = [Rows(causal).all_of(each) for each in conversations]
    assert [[len(ends) for _, ends in side] for side in sides] == [[3], [1], [2]]
    one_by_one = [causal.encode(conversation_of(r)) for each in conversations for r in judged_in(each)]
    assert causal.score(conversation_of(r) for each in conversations for r in judged_in(each)) == (
        pytest.approx(causal([*one_by_one]).tolist(), abs=1e-5)
    )
    pairs = [ReplyPair(conversations[0], conversations[1]), ReplyPair(conversations[2], conversations[1])]

    def gradient(batch: list[Compared]) -> torch.Tensor:
        causal.model.zero_grad()
        pair_losses(causal, batch, noise=0.1, centre=0.1).sum().backward()
        return torch.cat([p.grad.flatten() for p in causal.model.parameters() if p.grad is not None])

    together = Rows(causal).compared(pairs)
    apart = [
        Compared(
            *([(row[:end], [end]) for row, ends in side for end in ends] for side in (one.first, one.second)),
            one.pair,
        )
        for one in together
    ]
    assert len(apart[0].first) == 3
    torch.testing.assert_close(gradient(together), gradient(apart), atol=1e-5, rtol=1e-4)


def test_one_pass_scores_where_transformers_does(causal) -> None:
    """Where the end of a turn is the padding, as in TRL's models, the token before it is read."""
    causal.model.config.pad_token_id = causal.tokenizer.eos_token_id
    rows = [causal.encode(conversation_of(reply)) for reply in judged_in(talk("one", "two", ""))]
    assert all(row[-1] == causal.tokenizer.eos_token_id for row in rows)
    (chain,) = causal.chains(rows)
    assert causal.along([chain]).tolist() == pytest.approx([causal([row]).item() for row in rows], abs=1e-5)


def test_a_cut_conversation_is_read_reply_by_reply(causal) -> None:
    """What is too long loses its beginning, so that a later reply does not go on from the row before."""
    long = talk(*["what would you like to eat today"] * 6)
    chains = Rows(causal).all_of(long)
    assert len(chains) > 1 and sum(len(ends) for _, ends in chains) == 6
    assert max(len(row) for row, _ in chains) <= 64


def test_an_encoder_is_asked_about_each_reply() -> None:
    reward = TextReward.new(["hello one two"] * 3, hidden_size=32, num_hidden_layers=1, vocab_size=300)
    assert [ends == [len(row)] for row, ends in Rows(reward).all_of(talk("one", "two"))] == [True, True]


def test_which_reply_made_the_difference_is_found_out(causal) -> None:
    """Conversations of three replies are preferred by how often the bot says yes; nobody is told which reply
    counts."""
    rng = np.random.default_rng(0)
    words = ["yes", "no", "well"]
    talks = [talk(*(str(w) for w in rng.choice(words, 3))) for _ in range(120)]
    pairs = [
        ReplyPair(a, b, (np.sign(a.text.count("yes") - b.text.count("yes")) + 1) / 2)
        for a, b in zip(talks[::2], talks[1::2], strict=True)
        if a.id != b.id
    ]
    fit(causal, pairs, settings=Fitting(learning_rate=3e-3, epochs=12), seed=0)
    scores = score(causal, [Reply(OPENING, word) for word in words])
    yes, no, well = scores.values()
    assert yes > max(no, well) + 1 and abs(no - well) < (yes - no) / 2


def test_each_conversation_is_compared_once_before_any_is_twice() -> None:
    played = [episode(index, f"reply {index}") for index in range(8)]
    pairs = pairs_of_groups(played, 4, np.random.default_rng(0), scored=True)
    assert len(pairs) == 2 * 6 and len({frozenset((a.id, b.id)) for a, b in pairs}) == 12
    for start in (0, 4, 8):  # a turn has two pairs of each group
        assert len({spoken.id for pair in pairs[start : start + 4] for spoken in pair}) == 8
    groups = [{a.source["conversation"], b.source["conversation"]} for a, b in pairs]
    assert all(len(group) == 1 for group in groups)
    assert all(a.source["return"] == 1.0 for a, _ in pairs)


def test_an_odd_group_has_all_its_pairs() -> None:
    played = [episode(index, f"reply {index}") for index in range(3)]
    pairs = pairs_of_groups(played, 4, np.random.default_rng(0), scored=True)
    texts = {frozenset((a.text, b.text)) for a, b in pairs}
    assert texts == {frozenset(pair) for pair in combinations([f"assistant> reply {n}" for n in range(3)], 2)}


def test_who_failed_is_not_compared_and_roles_are_compared_apart() -> None:
    """Nor is an episode that the world did not score, where its reward answers."""
    played = [
        episode(0, "a", role="buyer"),
        episode(1, "b", role="buyer"),
        episode(2, "c", role="seller"),
        episode(3, "d", role="seller", player="copy"),
        episode(4, "e"),
        episode(5, "f", end="failed"),
        episode(6, "g", end="unscored"),
    ]
    texts = lambda scored: {  # noqa: E731
        tuple(sorted((a.text[-1], b.text[-1])))
        for a, b in pairs_of_groups(played, 4, np.random.default_rng(0), scored=scored)
    }
    assert texts(True) == {("a", "b")}
    assert texts(False) == {("a", "b"), ("e", "g")}


def test_who_speaks_second_is_compared_behind_what_all_have_heard() -> None:
    """In self-play the other's first words differ; they are a part of what is compared."""
    played = [
        Episode(
            index,
            Dialog(
                str(index),
                [
                    *OPENING,
                    {"role": "user", "content": heard},
                    {"role": "assistant", "content": "so", "reward": 1.0},
                ],
                meta={"seed": 0, "role": "seller"},
            ),
            [],
            "terminated",
        )
        for index, heard in enumerate(["five", "six"])
    ]
    [(one, other)] = pairs_of_groups(played, 4, np.random.default_rng(0), scored=True)
    assert one.context == other.context == OPENING and one.source["role"] == "seller"
    assert {one.text, other.text} == {f"user> {heard}\nassistant> so" for heard in ("five", "six")}
    assert [len(judged_in(each)) for each in (one, other)] == [1, 1]


def test_a_pretrained_model_takes_shorter_steps(tmp_path, make_policy, tokenizer) -> None:
    """Its words are not forgotten for the first labels. A reward model of ours knows what it began from."""
    rates = {}
    for start in ("made", "pretrained"):
        policy = make_policy(BC(), "llama")
        policy.start = start
        policy.save_pretrained(tmp_path / start)
        tokenizer.save_pretrained(tmp_path / start)
        reward = TextReward.from_base(str(tmp_path / start), max_length=64)
        reward.save_pretrained(tmp_path / f"reward-{start}")
        again = TextReward.from_base(str(tmp_path / f"reward-{start}"), max_length=64)
        rates[start] = [learning_rate_of(each, Fitting()) for each in (reward, again)]
    new = TextReward.new(["hello"] * 3, hidden_size=32, num_hidden_layers=1, vocab_size=300)
    assert rates == {"made": [1e-3, 1e-3], "pretrained": [1e-5, 1e-5]}
    assert learning_rate_of(new, Fitting()) == 1e-3 and learning_rate_of(new, Fitting(learning_rate=1)) == 1
    assert learning_rate_of(reward, Fitting(use_peft=True)) == 1e-4
