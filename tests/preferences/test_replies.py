"""Preferences over replies: where pairs come from, and what stays on one side of a split."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.replies import (
    Preferences,
    Rating,
    ReplyPair,
    as_dialog,
    by_context,
    folds,
    group_of,
    held_out,
    judged_in,
    pairs_of_labels,
    pairs_of_ratings,
    ratings_of,
    replies_of,
    split_of,
)
from rl_dialog.preferences.reply_queries import several
from rl_dialog.preferences.reply_reward import ReplyRewardSettings, read_labels
from rl_dialog.preferences.segments import Clip, Reply, Segments
from rl_dialog.rewards.human import logged, vote


def context(number):
    return [{"role": "user", "content": f"what about {number}?"}]


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
    assert (i, reply.text, len(reply.context)) == (3, "yes", 3) and reply.context[2]["content"].startswith(
        '[{"function"'
    )
    assert reply.source == {
        "dialog": "d",
        "message": 3,
        "reward": 0.5,
        "feedback": {"vote": -1},
        "split": "test",
        "model": "bc:1",
    }
    again = as_dialog(reply)
    assert logged(again) == [0.5] and vote(again) == [-1.0] and again.replies == [3]


def test_replies_that_differ_in_what_they_call_are_a_pair():
    """Their texts are the same, and nobody was asked about them."""
    calls = [[{"function": {"name": name, "arguments": "{}"}}] for name in ("search", "delete")]
    replies = [
        {"role": "assistant", "content": "Hemen bakıyorum.", "tool_calls": call, "reward": reward}
        for call, reward in zip(calls, (1.0, 0.0), strict=True)
    ]
    dialogs = [Dialog(f"d{n}", [*context(1), reply]) for n, reply in enumerate(replies)]
    [pair] = several(reply for dialog in dialogs for _, reply in replies_of(dialog))
    assert [reply.text[:16] for reply in pair] == ["Hemen bakıyorum."] * 2
    assert [json.loads(reply.text[16:]) for reply in pair] == calls


def test_a_missing_reward_says_nothing_of_a_reply():
    reply = {"role": "assistant", "content": "yes", "reward": None}
    [(_, found)] = replies_of(Dialog("d", [{"role": "user", "content": "hi"}, reply]))
    assert found.source == {"dialog": "d", "message": 1}
    assert logged(as_dialog(found)) == [None]


def test_pairs_of_ratings():
    replies = [
        Rating(Reply(context(1), text), value)
        for text, value in (("a", 1), ("b", 0), ("c", 0), ("b", 1), ("d", 1))
    ]
    found = pairs_of_ratings([*replies, Rating(Reply(context(2), "e"), 1)])
    assert {(pair.first.text, pair.second.text) for pair in found} == {
        ("a", "b"),
        ("a", "c"),
        ("d", "b"),
        ("d", "c"),
    }  # the first b counts
    assert (
        all(pair.preference == 1 for pair in found)
        and len(pairs_of_ratings(replies, most_per_context=3)) == 3
    )
    assert [len(ratings) for ratings in by_context(replies)] == [4]


def test_preferences_of_a_log_stay_the_pairs_that_they_are(tmp_path):
    """Four rows of one prompt: a chain, a pair of others, and one that contradicts. Of A and D, or D and B,
    nobody said anything."""
    rows = [("A", "B"), ("B", "C"), ("D", "E"), ("B", "A")]
    text = [json.dumps({"prompt": "which?", "chosen": good, "rejected": bad}) for good, bad in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(text) + "\n")
    logs = (str(tmp_path / "pairs.jsonl"),)
    labels = read_labels(ReplyRewardSettings(logs=logs))
    assert [(pair.first.text, pair.second.text) for pair in labels.pairs] == rows
    turned = read_labels(ReplyRewardSettings(logs=logs, below=True))
    assert [(pair.second.text, pair.first.text) for pair in turned.pairs] == rows


def test_a_pair_is_of_one_context():
    with pytest.raises(UserError, match="expected two replies to one context"):
        ReplyPair(Reply(context(1), "a"), Reply(context(2), "b"))
    with pytest.raises(UserError, match="expected a preference from 0 to 1, got 2"):
        ReplyPair(Reply(context(1), "a"), Reply(context(1), "b"), 2)


def test_a_preference_whose_sides_part_early_is_a_pair_of_conversations():
    """A pair is scored from where its sides part; one of another user turn is of another group, and one that
    opens a conversation has nothing before it."""

    def side(pair, value, *contents):
        roles = ("user", "assistant") * 2
        said = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        return Rating(Reply(said[:-1], contents[-1]), value, value > 0, pair)

    early = [side("0", 0, "a", "no", "why", "so"), side("0", 1, "a", "yes", "fine", "good")]
    late = [side("1", 1, "a", "yes", "fine", "x"), side("1", 0, "a", "yes", "fine", "y")]
    opening = [Rating(Reply([], "hi"), 1, True, "2"), Rating(Reply([], "go"), 0, False, "2")]
    last, first = pairs_of_ratings([*early, *late, *opening])
    assert (last.first.text, last.second.text) == ("x", "y")
    assert [message["content"] for message in first.first.context] == ["a"]
    for told, contents in ((first.first, "yes fine good"), (first.second, "no why so")):
        assert " ".join(message["content"] for message in told.messages) == contents
        assert [reply.text for reply in judged_in(told)] == [contents.split()[0], contents.split()[2]]
    assert first.preference == 1


def test_what_one_conversation_says_stays_on_one_side():
    """Longer contexts of a conversation go with its beginning; every group has one split, and the shares are
    as asked."""
    start = [{"role": "system", "content": "you are a bot"}, {"role": "user", "content": "hi  there"}]
    later = [*start, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
    assert (
        group_of(Reply(start, "a"))
        == group_of(Reply(later, "b"))
        == group_of(Reply([{"role": "user", "content": "hi there"}], "c"))
    )
    assert split_of(Reply(start, "a"), validation=0.5) == split_of(Reply(later, "b"), validation=0.5)
    splits = [split_of(Reply(context(n), "a"), validation=0.2) for n in range(2000)]
    assert abs(splits.count("validation") / 2000 - 0.2) < 0.03 and set(splits) == {"train", "validation"}
    assert split_of(Reply(start, "a", {"split": "test"}), validation=0.5) == "test"


def test_labels_of_a_log(tmp_path):
    log, segments = LabelLog(f"sqlite:///{tmp_path}/labels.db"), Segments(tmp_path / "clips")
    ids = [segments.add(Reply(context(1), text)) for text in "abc"]
    wanted = {}
    for (first, second), choice in zip(
        [(ids[0], ids[1]), (ids[0], ids[2]), (ids[1], ids[2])], ("left", "tie", "skip"), strict=True
    ):
        log.add_query(first, second, validation=False)
        query = log.lease("ann")
        log.answer(query.id, "ann", choice)
        wanted[frozenset((first, second))] = (query.left, choice)
    found = pairs_of_labels(log.labels(), segments)
    assert len(found) == 2  # the incomparable one is left out
    for pair in found:
        left, choice = wanted[frozenset((pair.first.id, pair.second.id))]
        assert pair.preference == (0.5 if choice == "tie" else float(pair.first.id == left))
    clips = [
        segments.add(Clip(np.full((2, 1), float(n)), np.zeros(2), np.zeros(2, np.float32), 2))
        for n in range(2)
    ]
    log.add_query(*clips, validation=False)
    log.answer(log.lease("ann").id, "ann", "left")
    with pytest.raises(UserError, match="expected labels of replies, got one of clips"):
        pairs_of_labels(log.labels(), segments)
    log.close()


def opened(name, reward):
    """A dialog whose only reply opens it."""
    return Dialog(name, [{"role": "assistant", "content": "welcome", "rewards": {"logged": reward}}])


def test_replies_that_open_a_conversation_are_rated_on_their_own():
    """Nothing tells their conversations apart but where they are from; they are in no context, and so in no
    pair."""
    dialogs = [opened(f"d{n}", float(n % 2)) for n in range(40)]
    assert not list(ratings_of(dialogs, "logged")) and not list(ratings_of(dialogs, "vote", openings=True))
    ratings = list(ratings_of(dialogs, "logged", openings=True))
    assert [rating.good for rating in ratings] == [False, True] * 20
    assert (
        len({group_of(rating.reply) for rating in ratings}) == 40
        and len({rating.reply.id for rating in ratings}) == 1
    )
    assert not by_context(ratings) and not pairs_of_ratings(ratings)
    labels = Preferences([], ratings)
    train, test = held_out(labels, ("validation",), validation=0.3, seed=0)
    assert len(train.ratings) + len(test.ratings) == 40 and 4 < len(test.ratings) < 20
    assert [len(own.ratings) for _, own in folds(labels, 4, seed=0)] == [10] * 4


def test_the_splits_of_a_data_directory_hold():
    """Where all conversations begin alike they are split by dialog, and where a corpus names its groups by
    these; the first user turn says nothing there. No pair has a side in each of two splits."""
    start = [{"role": "user", "content": "start"}]
    dialogs = [
        Dialog(
            f"d{n}",
            [*start, {"role": "assistant", "content": f"move {n}", "rewards": {"logged": float(n % 2)}}],
            split=("train", "train", "validation", "test")[n // 2 % 4],
        )
        for n in range(40)
    ]
    ratings = list(ratings_of(dialogs, "logged"))
    labels = Preferences(pairs_of_ratings(ratings), ratings)
    for splits in (("validation", "test"), ("test",)):
        for wanted, part in zip(
            (("train",), splits), held_out(labels, splits, validation=0.5, seed=0), strict=True
        ):
            assert len(part.ratings) == sum(dialog.split in wanted for dialog in dialogs)
            assert part.pairs and {
                reply.source["split"] for pair in part.pairs for reply in (pair.first, pair.second)
            } == set(wanted)
    assert {len(replies) for replies in several(rating.reply for rating in ratings)} == {20, 10}


def test_what_has_no_split_goes_with_its_conversation():
    """Replies of several places: a dialog that is in two directories stays in one split, and so does a reply
    of elsewhere to what it begins with."""
    sources = [{}, {"split": "test", "dialog": "d"}, {"split": "train", "dialog": "d"}]
    ratings = [
        Rating(Reply(context(n), f"say {k}", source), 1.0)
        for n in range(20)
        for k, source in enumerate(sources)
    ]
    train, test = held_out(Preferences([], ratings), ("test",), validation=0.5, seed=0)
    assert not train.ratings and len(test.ratings) == 60


@pytest.mark.parametrize(
    ("above", "below", "good"), [(0.0, False, "bc"), (1.0, False, "c"), (1.0, True, "ab"), (0.0, True, "a")]
)
def test_what_is_good_is_above_or_not(above, below, good):
    messages = [{"role": "user", "content": "hi"}]
    for text, reward in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        messages.append({"role": "assistant", "content": text, "rewards": {"length": reward}})
    ratings = list(ratings_of([Dialog("d", messages)], "length", above=above, below=below))
    assert "".join(rating.reply.text for rating in ratings if rating.good) == good
    same = [Rating(Reply(context(1), rating.reply.text), rating.value) for rating in ratings]
    assert all((pair.first.text > pair.second.text) != below for pair in pairs_of_ratings(same))
