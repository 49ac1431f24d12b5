"""Preferences over replies: where pairs come from, what stays on one side of a split, and that a model learns what they say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.replies import (
    Fitting,
    Rating,
    ReplyPair,
    as_dialog,
    by_context,
    fit,
    group_of,
    pairs_of_labels,
    pairs_of_ratings,
    replies_of,
    score,
    split_of,
)
from rl_dialog.preferences.segments import Clip, Reply, Segments
from rl_dialog.rewards.human import logged, vote

WORDS = ["red", "green", "blue", "yellow", "black", "white", "orange", "purple", "pink", "brown"]


def context(number):
    return [{"role": "user", "content": f"what about {number}?"}]


def planted(count, seed=0):
    """Pairs in which the reply that says "sure" is preferred, whatever else it says; on either side."""
    rng = random.Random(seed)
    pairs = []
    for number in range(count):
        good, bad = (f"{rng.choice(WORDS)} {said} {rng.choice(WORDS)}" for said in ("sure", "never"))
        better, worse = Reply(context(number), good), Reply(context(number), bad)
        pairs.append(ReplyPair(better, worse, 1.0) if rng.random() < 0.5 else ReplyPair(worse, better, 0.0))
    return pairs


def small(pairs, seed=0):
    torch.manual_seed(seed)
    texts = [reply.text for pair in pairs for reply in (pair.first, pair.second)] + ["what about 1234567890?"]
    return TextReward.new(texts, hidden_size=32, num_hidden_layers=1, vocab_size=330, max_length=64)


def right(reward, pairs):
    scores = score(reward, [reply for pair in pairs for reply in (pair.first, pair.second)])
    return np.array([(scores[pair.first.id] > scores[pair.second.id]) == (pair.preference > 0.5) for pair in pairs])


def test_replies_of_a_dialog_keep_what_was_said_of_them():
    call = [{"function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "assistant", "content": "welcome", "reward": 1.0},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": call, "weight": 0},
        {"role": "assistant", "content": "yes", "feedback": {"vote": -1}, "reward": 0.5},
    ]
    dialog = Dialog("d", messages, split="test", meta={"generator": "bc:1"})
    [(i, reply)] = replies_of(dialog)  # the opening has no context
    assert (i, reply.text, len(reply.context)) == (3, "yes", 3) and reply.context[2]["content"].startswith('[{"function"')
    assert reply.source == {"dialog": "d", "message": 3, "reward": 0.5, "feedback": {"vote": -1}, "split": "test", "model": "bc:1"}
    again = as_dialog(reply)
    assert logged(again) == [0.5] and vote(again) == [-1.0] and again.replies == [3]


def test_a_missing_reward_says_nothing_of_a_reply():
    reply = {"role": "assistant", "content": "yes", "reward": None}
    [(_, found)] = replies_of(Dialog("d", [{"role": "user", "content": "hi"}, reply]))
    assert found.source == {"dialog": "d", "message": 1}
    assert logged(as_dialog(found)) == [None]


def test_pairs_of_ratings():
    replies = [Rating(Reply(context(1), text), value) for text, value in (("a", 1), ("b", 0), ("c", 0), ("b", 1), ("d", 1))]
    found = pairs_of_ratings([*replies, Rating(Reply(context(2), "e"), 1)])
    assert {(pair.first.text, pair.second.text) for pair in found} == {("a", "b"), ("a", "c"), ("d", "b"), ("d", "c")}  # the first b counts
    assert all(pair.preference == 1 for pair in found) and len(pairs_of_ratings(replies, most_per_context=3)) == 3
    assert [len(ratings) for ratings in by_context(replies)] == [4]


def test_a_pair_is_of_one_context():
    with pytest.raises(UserError, match="expected two replies to one context"):
        ReplyPair(Reply(context(1), "a"), Reply(context(2), "b"))
    with pytest.raises(UserError, match="expected a preference from 0 to 1, got 2"):
        ReplyPair(Reply(context(1), "a"), Reply(context(1), "b"), 2)


def test_what_one_conversation_says_stays_on_one_side():
    """Longer contexts of a conversation go with its beginning; every group has one split, and the shares are as asked."""
    start = [{"role": "system", "content": "you are a bot"}, {"role": "user", "content": "hi  there"}]
    later = [*start, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
    assert group_of(Reply(start, "a")) == group_of(Reply(later, "b")) == group_of(Reply([{"role": "user", "content": "hi there"}], "c"))
    assert split_of(Reply(start, "a"), validation=0.5) == split_of(Reply(later, "b"), validation=0.5)
    splits = [split_of(Reply(context(n), "a"), validation=0.2) for n in range(2000)]
    assert abs(splits.count("validation") / 2000 - 0.2) < 0.03 and set(splits) == {"train", "validation"}
    assert split_of(Reply(start, "a", {"split": "test"}), validation=0.5) == "test"


def test_labels_of_a_log(tmp_path):
    log, segments = LabelLog(f"sqlite:///{tmp_path}/labels.db"), Segments(tmp_path / "clips")
    ids = [segments.add(Reply(context(1), text)) for text in "abc"]
    wanted = {}
    for (first, second), choice in zip([(ids[0], ids[1]), (ids[0], ids[2]), (ids[1], ids[2])], ("left", "tie", "skip"), strict=True):
        log.add_query(first, second, validation=False)
        query = log.lease("ann")
        log.answer(query.id, "ann", choice)
        wanted[frozenset((first, second))] = (query.left, choice)
    found = pairs_of_labels(log.labels(), segments)
    assert len(found) == 2  # the incomparable one is left out
    for pair in found:
        left, choice = wanted[frozenset((pair.first.id, pair.second.id))]
        assert pair.preference == (0.5 if choice == "tie" else float(pair.first.id == left))
    clips = [segments.add(Clip(np.full((2, 1), float(n)), np.zeros(2), np.zeros(2, np.float32), 2)) for n in range(2)]
    log.add_query(*clips, validation=False)
    log.answer(log.lease("ann").id, "ann", "left")
    with pytest.raises(UserError, match="expected labels of replies, got one of clips"):
        pairs_of_labels(log.labels(), segments)
    log.close()


def test_four_pairs_are_learned_and_a_tie_stays_one():
    pairs = planted(4)
    tie = ReplyPair(Reply(context(9), "red sure blue"), Reply(context(9), "red never blue"), 0.5)
    reward = small([*pairs, tie])
    fit(reward, pairs, settings=Fitting(learning_rate=5e-3, batch_size=4, epochs=60, noise=0.0))
    assert right(reward, pairs).all()
    reward = small([*pairs, tie])
    fit(reward, [tie], settings=Fitting(learning_rate=5e-3, batch_size=4, epochs=100, noise=0.0))
    first, second = score(reward, [tie.first, tie.second]).values()
    assert abs(first - second) < 0.2


def test_planted_preferences_are_found_on_other_contexts():
    """A permutation test over seeds: models of true labels against models of the same pairs with labels that a coin decided."""
    pairs, unseen = planted(96), planted(60, seed=1)
    rng = random.Random(2)
    coins = [ReplyPair(pair.first, pair.second, float(rng.random() < 0.5)) for pair in pairs]
    found = {"true": [], "coin": []}
    for seed in range(4):
        for name, given in (("true", pairs), ("coin", coins)):
            reward = small(pairs, seed)
            fit(reward, given, settings=Fitting(learning_rate=5e-3, epochs=6), seed=seed)
            found[name].append(right(reward, unseen).mean())
    assert min(found["true"]) > max(found["coin"]), found  # p = 1 / 70 of all ways to deal out eight models
    assert np.mean(found["true"]) > 0.9


def test_ratings_teach_from_contexts_with_one_reply():
    ratings = [(pair.first, pair.preference > 0.5) for pair in planted(96)]
    reward = small(planted(96))
    fit(reward, [], ratings, settings=Fitting(learning_rate=5e-3, epochs=6))
    assert right(reward, planted(60, seed=1)).mean() > 0.9


def test_the_same_seed_gives_the_same_model():
    scores = []
    for _ in range(2):
        reward = small(planted(8))
        fit(reward, planted(8), [(pair.first, True) for pair in planted(4)], settings=Fitting(epochs=2), seed=3)
        scores.append(list(score(reward, [pair.first for pair in planted(8)]).values()))
    assert scores[0] == scores[1]


def test_noise_bounds_what_a_wrong_label_can_do():
    """One pair in eight is labelled the wrong way round; with noise the model stays less sure of it."""
    pairs = planted(32)
    wrong = [ReplyPair(pair.first, pair.second, 1 - pair.preference) for pair in pairs[:4]]
    worst = {}
    for noise in (0.0, 0.2):
        reward = small(pairs)
        fit(reward, [*wrong, *pairs[4:]], settings=Fitting(learning_rate=5e-3, epochs=40, noise=noise))
        scores = score(reward, [reply for pair in pairs for reply in (pair.first, pair.second)])
        worst[noise] = np.mean([abs(scores[pair.first.id] - scores[pair.second.id]) for pair in pairs])
    assert worst[0.2] < worst[0.0]


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"learning_rate": 0}, {"epochs": 0}, {"noise": 1.0}, {"weight_decay": -1}])
def test_settings_that_mean_nothing(wrong):
    with pytest.raises(UserError, match="expected a batch of at least 1"):
        Fitting(**wrong)


def test_nothing_to_learn_from():
    with pytest.raises(UserError, match="expected preferences to learn from"):
        fit(small(planted(2)), [])
