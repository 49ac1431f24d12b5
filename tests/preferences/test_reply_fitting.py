"""A reward model learns what preferences over replies say."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.replies import Preferences, ReplyPair
from rl_dialog.preferences.reply_batches import Rows, Worker, pair_losses, updates
from rl_dialog.preferences.reply_fitting import (
    Fitting,
    fit,
    held_out_loss,
    plain_judges,
    score,
    temperature,
)
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


@pytest.mark.parametrize(("pairs", "steps"), [(6, 3), (16, 3), (24, 4)])
def test_fewer_pairs_than_a_batch_are_seen_as_often(pairs, steps):
    taken = []
    told = planted(pairs)
    fit(
        small(told),
        told,
        settings=Fitting(epochs=3),
        progress=lambda step, of, loss: taken.append((step, of)),
    )
    assert taken == [(step, steps) for step in range(1, steps + 1)]


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
    """A model that is sure is moved far by labels that are the wrong way round, and hardly with noise."""
    pairs = planted(32)
    reward = small(pairs)
    fit(reward, pairs, settings=Fitting(learning_rate=5e-3, epochs=30))
    wrong = Rows(reward).compared([ReplyPair(p.first, p.second, 1 - p.preference) for p in pairs[:8]])
    pull = {}
    for noise in (0.0, 0.2):
        reward.model.zero_grad()
        losses = pair_losses(reward, wrong, noise=noise)
        losses.mean().backward()
        pull[noise] = sum(float((p.grad**2).sum()) for p in reward.model.parameters()) ** 0.5
        assert noise == 0 or losses.max() <= -np.log(noise / 2) + 1e-5
    assert pull[0.2] < 0.1 * pull[0.0]


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"learning_rate": 0}, {"epochs": 0}, {"noise": 1.0}, {"weight_decay": -1}]
    + [{"epochs": float("inf")}, {"learning_rate": float("inf")}, {"margin": float("nan")}],
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


# At scale: parts, workers, adapters, halves, stopping, temperature


@dataclass(frozen=True)
class Row:
    length: int
    number: int


def test_the_rows_of_an_update_are_drawn_regardless_of_their_lengths():
    """Every row once in a pass, and the mean length of an update scatters as that of rows drawn at random."""
    rows = [Row(length=n, number=n) for n in range(64)]
    drawn = [next_ for next_, _ in zip(updates(rows, 8, 2, seed=0), range(800), strict=False)]
    numbers = [[row.number for part in parts for row in part] for parts, _ in drawn]
    for start in range(0, 80, 8):
        assert sorted(n for one in numbers[start : start + 8] for n in one) == list(range(64)), "a pass"
    assert all(size == 8 and [len(part) for part in parts] == [4, 4] for parts, size in drawn)
    assert all(max(r.length for r in parts[0]) <= min(r.length for r in parts[1]) for parts, _ in drawn)
    means = np.array([np.mean(one) for one in numbers])
    expected = np.sqrt((64**2 - 1) / 12 / 8 * (64 - 8) / 63)  # without replacement
    assert means.std() == pytest.approx(expected, rel=0.08)


def test_workers_and_parts_share_an_update_without_gaps():
    rows = [Row(length=n % 5, number=n) for n in range(22)]
    whole = updates(rows, 10, 1, seed=3)
    shares = [updates(rows, 10, 2, seed=3, worker=Worker(rank, 3)) for rank in range(3)]
    for _ in range(9):
        (all_rows,), size = next(whole)
        found = [row for share in shares for part in next(share)[0] for row in part]
        assert size == 10 and sorted(found, key=lambda row: row.number) == sorted(
            all_rows, key=lambda row: row.number
        )


@pytest.mark.parametrize("parts", [3, 16])
def test_a_batch_in_parts_teaches_what_it_teaches_at_once(parts):
    fitted = []
    for n in (1, parts):
        reward = small(planted(24))
        ratings = [(pair.first, pair.preference > 0.5) for pair in planted(10)]
        settings = Fitting(epochs=2, batch_size=8, gradient_accumulation_steps=n)
        fit(reward, planted(24), ratings, settings=settings)
        fitted.append(list(score(reward, [pair.first for pair in planted(24)]).values()))
    assert np.allclose(*fitted, atol=2e-4), "but for rounding"


def causal(seed=0):
    """A small language model with a new head, as `from_base` makes it."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = small(planted(24)).tokenizer
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape
    )
    return TextReward(LlamaForSequenceClassification(config), tokenizer, max_length=64)


def test_adapters_learn_and_become_part_of_an_ordinary_model(tmp_path):
    reward = causal()
    before = {name: value.clone() for name, value in reward.model.state_dict().items()}
    settings = Fitting(learning_rate=2e-2, epochs=6, use_peft=True, lora_r=4, lora_alpha=8)
    fit(reward, planted(96), settings=settings)
    after = reward.model.state_dict()
    assert after.keys() == before.keys(), "no layer of an adapter is left"
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "score.weight" in changed and not any("norm" in name or "embed" in name for name in changed)
    for name in changed - {"score.weight"}:
        rank = torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3)
        assert rank <= 4, name
    assert right(reward, planted(60, seed=1)).mean() > 0.9
    reward.save_pretrained(tmp_path)
    again = TextReward.from_pretrained(tmp_path)
    told = [reply for pair in planted(5) for reply in (pair.first, pair.second)]
    assert list(score(again, told).values()) == pytest.approx(list(score(reward, told).values()), abs=1e-5)


def test_adapters_of_others_are_loaded(tmp_path):
    """A folder of adapters with a head, as TRL's reward trainer saves it."""
    from peft import LoraConfig, get_peft_model

    reward = causal()
    reward.model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(reward.model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.3
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapters")
    reward.tokenizer.save_pretrained(tmp_path / "adapters")
    reward.model = adapted
    told = [reply for pair in planted(5) for reply in (pair.first, pair.second)]
    mine = list(score(reward, told).values())
    loaded = list(score(TextReward.from_pretrained(tmp_path / "adapters"), told).values())
    plain = causal()
    assert loaded == pytest.approx(mine, abs=1e-4) and np.std(mine) > 0.01
    assert not np.allclose(mine, list(score(plain, told).values()), atol=0.1)


@pytest.mark.slow
def test_bfloat16_learns_nearly_the_same():
    accuracies, scores = [], []
    for bf16 in (False, True):
        reward = causal()
        fit(reward, planted(96), settings=Fitting(learning_rate=5e-3, epochs=4, bf16=bf16))
        assert all(parameter.dtype == torch.float32 for parameter in reward.model.parameters())
        accuracies.append(right(reward, planted(60, seed=1)).mean())
        scores.append(list(score(reward, [pair.first for pair in planted(60, seed=1)]).values()))
    assert min(accuracies) > 0.9 and scores[0] != scores[1] and np.corrcoef(scores)[0, 1] > 0.95


@pytest.mark.slow
def test_fitting_stops_when_what_was_set_aside_gets_no_better():
    """Labels of a coin: what is learned from them makes others worse, and the weights before are kept."""
    rng = random.Random(5)
    coins = [ReplyPair(pair.first, pair.second, float(rng.random() < 0.5)) for pair in planted(60)]
    took = {}
    for patience in (0, 2):
        reward, steps = small(coins), []
        settings = Fitting(learning_rate=5e-3, epochs=30, calibration=0.3, patience=patience, noise=0.0)
        fit(reward, coins, settings=settings, progress=lambda step, of, loss, to=steps: to.append(step))
        took[patience] = steps[-1]
    assert took[0] == round(30 * 42 / 16) and took[2] < took[0] / 2


def test_the_temperature_is_found_and_divides_the_scores(tmp_path):
    """Labels drawn as sigmoid(d) says, and scores that are ten times too large."""
    pairs = planted(1200)
    reward = small(pairs[:24])
    fit(reward, pairs[:24], settings=Fitting(learning_rate=5e-3, epochs=6))
    scores, rng = (
        score(reward, [reply for pair in pairs for reply in (pair.first, pair.second)]),
        random.Random(0),
    )
    drawn = []
    for pair in pairs:
        p = 1 / (1 + np.exp(scores[pair.second.id] - scores[pair.first.id]))
        drawn.append(ReplyPair(pair.first, pair.second, float(rng.random() < p)))
    reward.divide(0.1)
    assert temperature(reward, Rows(reward).compared(drawn), []) == pytest.approx(10, rel=0.25)
    first = pairs[0].first
    assert score(reward, [first])[first.id] == pytest.approx(10 * scores[first.id], rel=1e-3)
    assert reward.model.config.divided_by == pytest.approx(0.1)
    reward.save_pretrained(tmp_path)
    assert TextReward.from_pretrained(tmp_path).model.config.divided_by == reward.model.config.divided_by


@pytest.mark.parametrize("noise", [0.0, 0.28])
def test_scores_that_are_always_right_are_as_sure_as_their_number_allows(noise):
    """Right on all of N pairs, all as far apart: sigmoid(d / T) = (N + 1) / (N + 2). Where labels may be
    random they are no reason to be surer: P = sigmoid(d / T) is where N log((1 - noise) P + noise / 2) + log
    P + log(1 - P) is largest."""
    pair = planted(1)[0]
    reward = small(planted(24))
    fit(reward, planted(24), settings=Fitting(learning_rate=5e-3, epochs=6))
    compared = Rows(reward).compared([replace(pair, noise=noise)] * 20)
    scores = score(reward, [pair.first, pair.second])
    apart = abs(scores[pair.first.id] - scores[pair.second.id])
    p = np.linspace(0.5, 0.9999, 100_000)
    p = p[np.argmax(20 * np.log((1 - noise) * p + noise / 2) + np.log(p) + np.log(1 - p))]
    assert apart / temperature(reward, compared, []) == pytest.approx(np.log(p / (1 - p)), rel=0.02)


def test_scores_of_which_labels_say_nothing_stay_as_they_are():
    """All replies score the same, so that every temperature suits the labels alike."""
    pairs = planted(6)
    reward = small(pairs)
    with torch.no_grad():
        reward._head().weight.zero_()
    assert temperature(reward, Rows(reward).compared(pairs), []) == pytest.approx(1.0)


def test_a_model_that_diverges_is_none():
    pairs = planted(6)
    with pytest.raises(UserError, match="finite gradient, got norm nan; lower the learning rate, which is"):
        fit(small(pairs), pairs, settings=Fitting(learning_rate=1e20, epochs=9, batch_size=4))


@pytest.mark.slow
def test_a_calibrated_model_is_less_sure_of_itself():
    pairs = [
        ReplyPair(p.first, p.second, p.preference if n % 4 else 1 - p.preference)
        for n, p in enumerate(planted(120))
    ]
    unseen = planted(60, seed=1)
    losses = {}
    for share in (0.0, 0.3):
        reward = small(pairs)
        fit(reward, pairs, settings=Fitting(learning_rate=5e-3, epochs=20, noise=0.0, calibration=share))
        compared = Rows(reward).compared(
            unseen[:45] + [ReplyPair(p.first, p.second, 1 - p.preference) for p in unseen[45:]]
        )
        losses[share] = held_out_loss(reward, compared, [], noise=0.0)
    assert losses[0.3] < 0.8 * losses[0.0], losses


@pytest.mark.slow
def test_scores_are_kept_around_zero_and_much_better_is_further():
    pairs = planted(48)
    moved = {}
    for centre in (0.0, 0.1):
        reward = small(pairs)
        with torch.no_grad():
            reward.model.classifier.bias += 3.0
        fit(reward, pairs, settings=Fitting(learning_rate=5e-3, epochs=8, centre=centre))
        moved[centre] = np.mean(list(score(reward, [r for p in pairs for r in (p.first, p.second)]).values()))
    assert abs(moved[0.1]) < 0.5 < 2 < moved[0.0]
    much = [ReplyPair(p.first, p.second, p.preference, much=1.0) for p in pairs]
    apart = {}
    for margin in (0.0, 3.0):
        reward = small(pairs)
        fit(reward, much, settings=Fitting(learning_rate=5e-3, epochs=4, margin=margin))
        scores = score(reward, [r for p in pairs for r in (p.first, p.second)])
        apart[margin] = np.mean([abs(scores[p.first.id] - scores[p.second.id]) for p in pairs])
    assert apart[3.0] > apart[0.0] + 1


def test_an_untrusted_label_moves_nothing():
    pairs = planted(16)
    false = [ReplyPair(p.first, p.second, 1 - p.preference, noise=1.0) for p in pairs]
    without = [ReplyPair(p.first, p.second, 1 - p.preference, weight=0.0) for p in pairs]
    for useless in (false, without):
        reward = small(pairs)
        before = list(score(reward, [p.first for p in pairs]).values())
        fit(reward, useless, settings=Fitting(learning_rate=5e-3, epochs=3, weight_decay=0.0))
        after = list(score(reward, [p.first for p in pairs]).values())
        assert np.allclose(before, after, atol=0.05)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"lora_r": 0}, "lora_r"),
        ({"calibration": 1.0}, "--fitting.calibration"),
        ({"patience": 2}, "--fitting.patience: expected --fitting.calibration"),
        ({"margin": -1.0}, "margin"),
    ],
)
def test_settings_at_scale_that_mean_nothing(wrong, said):
    with pytest.raises(UserError, match=said):
        Fitting(**wrong)


def test_too_few_conversations_to_set_some_aside():
    with pytest.raises(UserError, match="expected conversations on both sides, got 2"):
        fit(small(planted(2)), planted(2), settings=Fitting(calibration=0.1))


def test_a_temperature_has_the_random_labels_in_the_scores():
    assert Fitting(noise=0.2).noise_of_labels == 0.2
    assert Fitting(noise=0.2, calibration=0.1).noise_of_labels == 0.0
