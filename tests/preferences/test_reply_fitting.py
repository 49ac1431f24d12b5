"""A reward model learns what preferences over replies say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.replies import Preferences, ReplyPair
from rl_dialog.preferences.reply_fitting import Fitting, fit, plain_judges, score
from rl_dialog.preferences.segments import Reply

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
    return np.array(
        [(scores[pair.first.id] > scores[pair.second.id]) == (pair.preference > 0.5) for pair in pairs]
    )


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
    """A permutation test over seeds: models of true labels against models of the same pairs with labels that
    a coin decided."""
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
        fit(
            reward,
            planted(8),
            [(pair.first, True) for pair in planted(4)],
            settings=Fitting(epochs=2),
            seed=3,
        )
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


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"learning_rate": 0}, {"epochs": 0}, {"noise": 1.0}, {"weight_decay": -1}]
)
def test_settings_that_mean_nothing(wrong):
    with pytest.raises(UserError, match="expected a batch of at least 1"):
        Fitting(**wrong)


def test_nothing_to_learn_from():
    with pytest.raises(UserError, match="expected preferences to learn from"):
        fit(small(planted(2)), [])


def test_judges_that_cost_nothing():
    """The words of preferred replies tell; their lengths do not. Of too few words there is no count."""
    train, test = Preferences(planted(48), []), Preferences(planted(30, seed=1), [])
    judges = plain_judges(train, test)
    agree = [
        (judges["words of the reply"][pair.first.id] > judges["words of the reply"][pair.second.id])
        == (pair.preference > 0.5)
        for pair in test.pairs
    ]
    assert np.mean(agree) > 0.9 and set(judges["longer reply"].values()) == {3.0}
    assert set(plain_judges(Preferences(planted(1), []), test)) == {"longer reply"}
