"""Fitting a reward to labels: what it finds, what it must not look at, and that a resumed run goes on as the
uninterrupted one."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from rl_dialog.errors import UserError
from rl_dialog.models.reward_model import RewardModel, RewardModelConfig, preference_loss
from rl_dialog.preferences.reward_trainer import RewardTrainer, RewardTraining, _Pairs
from rl_dialog.preferences.segments import Clip

LENGTH = 5
SHAPE = RewardModelConfig((2,), 3, hidden=(32,))


@dataclass(frozen=True)
class Label:
    query: str
    first: str
    second: str
    preference: float | None
    validation: bool = False


def clips(n, seed=0, length=LENGTH):
    """The true reward of a step is its first feature, plus one for action 2."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        observations, actions = rng.normal(size=(length, 2)).astype(np.float32), rng.integers(3, size=length)
        found.append(
            Clip(observations, actions, (observations[:, 0] + (actions == 2)).astype(np.float32), length)
        )
    return {clip.id: clip for clip in found}


def labels(segments, n, seed=0, *, validation=False):
    rng, ids = np.random.default_rng(seed), list(segments)
    found = []
    for number in range(n):
        first, second = (ids[i] for i in rng.choice(len(ids), 2, replace=False))
        better = segments[first].true_return > segments[second].true_return
        found.append(Label(f"{seed}-{number}", first, second, float(better), validation))
    return found


def trainer(given, segments, *, config=SHAPE, seed=0, **settings):
    torch.manual_seed(seed)
    made = RewardTrainer(RewardModel(config), RewardTraining(**settings), seed=seed)
    made.set_labels(given, segments)
    return made


def test_it_ranks_clips_it_has_not_seen():
    segments = clips(400)
    made = trainer(labels(segments, 500), segments, learning_rate=3e-3)
    made.fit(30)
    unseen = list(clips(200, seed=9).values())
    found = made.returns(unseen)
    assert found.shape == (3, 200)
    assert spearmanr(found.mean(0), [clip.true_return for clip in unseen]).statistic > 0.95


def test_four_labels_are_fitted_and_a_tie_becomes_one():
    segments = clips(8)
    ids = list(segments)
    given = [
        Label(str(i), ids[2 * i], ids[2 * i + 1], preference)
        for i, preference in enumerate((1.0, 0.0, 1.0, 0.5))
    ]
    made = trainer(given, segments, bagging=False, noise=0.0, learning_rate=1e-2)
    made.fit(150)
    sums = made.returns([segments[id] for id in ids]).mean(0)
    differences = sums[::2] - sums[1::2]
    p = 1 / (1 + np.exp(-differences))
    assert np.abs(p[:3] - [1, 0, 1]).max() < 0.1 and abs(differences[3]) < 0.5


def test_a_zero_reward_loses_ln_2():
    segments = clips(64)
    made = trainer(labels(segments, 32), segments, noise=0.0, learning_rate=1e-12, bagging=False)
    with torch.no_grad():
        made.model.layers[-1].weight.zero_()
    assert made.fit(1)["loss"] == pytest.approx(0.693147, abs=1e-6)


def test_updates_of_the_original_pretraining():
    """500 labels in batches of 32 are 16 updates, the last one short: 200 passes would be 3,200."""
    segments = clips(60)
    made = trainer(labels(segments, 500), segments)
    assert made.fit(5)["updates"] == 5 * 16 and made.epochs == 5


def test_incomparable_and_validation_labels_are_not_learned_from():
    segments = clips(40)
    given = labels(segments, 20)
    alone = trainer(given, segments)
    alone.fit(3)
    lies = [
        Label(f"lie {i}", each.first, each.second, 1 - each.preference, True) for i, each in enumerate(given)
    ]
    nothing = [Label(f"none {i}", each.first, each.second, None) for i, each in enumerate(given)]
    beside = trainer([*nothing, *given, *lies], segments)
    metrics = beside.fit(3)
    for a, b in zip(alone.model.parameters(), beside.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert metrics["training_labels"] == 20 and metrics["validation_loss"] > metrics["loss"]
    with pytest.raises(UserError, match="expected labels to learn from"):
        trainer([*nothing, *lies], segments).fit()


def test_the_oldest_labels_are_forgotten():
    segments = clips(40)
    given = labels(segments, 20)
    made = trainer(given, segments, max_labels=5)
    assert [each.query for each in made.train_pairs] == [each.query for each in given[-5:]]
    assert set(made.clips) == {id for each in given[-5:] for id in (each.first, each.second)}


def test_members_see_resamples():
    """A member sees each label Poisson(1) times: a share of 1 - 1/e of them at all, the same ones when more
    labels come."""
    segments = clips(60)
    given = labels(segments, 4000)
    made = trainer(given, segments)
    counts = made._counts(given)
    assert counts.shape == (3, 4000)
    assert ((counts > 0).float().mean(1) - 0.632).abs().max() < 0.025 and (
        counts.mean(1) - 1
    ).abs().max() < 0.05
    assert torch.equal(made._counts(given[100:300]), counts[:, 100:300])
    assert trainer(given, segments, bagging=False)._counts(given).unique().tolist() == [1]


def test_ties_are_counted_apart():
    """Right about the only decided label: accuracy 1, and two thirds ties."""
    segments = clips(6)
    ids = list(segments)
    better, worse = sorted(ids[:2], key=lambda id: -segments[id].true_return)
    given = [Label("a", ids[2], ids[3], 0.5), Label("b", ids[4], ids[5], 0.5), Label("c", better, worse, 1.0)]
    made = trainer(given, segments, bagging=False, learning_rate=1e-2)
    made.fit(100)
    held_out = trainer(
        [
            *given,
            *(Label(f"v{each.query}", each.first, each.second, each.preference, True) for each in given),
        ],
        segments,
    )
    held_out.model.load_state_dict(made.model.state_dict())
    metrics = held_out.evaluate(_held_out(held_out))
    assert (
        metrics["accuracy"] == 1.0
        and metrics["tie_share"] == pytest.approx(2 / 3)
        and 0 <= metrics["calibration_error"] < 0.5
    )


def _held_out(made):
    from rl_dialog.preferences.reward_trainer import _Pairs

    return _Pairs(made.validation_pairs, made.clips, None, 0.0)


@pytest.mark.parametrize(("ratio", "factor"), [(2.0, 1.5), (1.3, 1.0), (1.0, 1 / 1.5)])
def test_l2_follows_the_ratio_of_the_losses(ratio, factor):
    segments = clips(10)
    made = trainer(labels(segments, 5), segments, adaptive_l2=True, l2=0.01)
    made._steer_l2({"loss": 0.5, "validation_loss": 0.5 * ratio})
    assert made.l2 == pytest.approx(0.01 * factor)
    for _ in range(100):
        made._steer_l2({"loss": 1.0, "validation_loss": 0.1})
    assert made.l2 > 0


def test_l2_holds_the_validation_loss_near_the_training_loss():
    """Random labels can only be learned by heart: with adaptive L2 the gap stays small."""
    segments, others = clips(80), clips(80, seed=1)
    rng = np.random.default_rng(0)
    given = [
        Label(str(i), each.first, each.second, float(rng.integers(2)))
        for i, each in enumerate(labels(segments, 100))
    ]
    given += [
        Label(f"v{i}", each.first, each.second, float(rng.integers(2)), True)
        for i, each in enumerate(labels(others, 100))
    ]
    gaps = []
    for adaptive in (False, True):
        settings = {
            "adaptive_l2": adaptive,
            "l2": 1e-4 * adaptive,
            "noise": 0.0,
            "bagging": False,
            "learning_rate": 5e-3,
        }
        made = trainer(
            given,
            segments | others,
            config=RewardModelConfig((2,), 3, hidden=(64, 64), members=1),
            **settings,
        )
        metrics = made.fit(60)
        gaps.append(metrics["validation_loss"] / metrics["loss"])
    assert gaps[0] > 2 and gaps[1] < 1.5, gaps


def test_a_resumed_fit_ends_with_the_same_weights(tmp_path):
    segments = clips(60)
    given = labels(segments, 100)
    config = RewardModelConfig((2,), 3, hidden=(32, 32), dropout=0.3)
    whole = trainer(given, segments, config=config)
    whole.fit(6)
    begun = trainer(given, segments, config=config)
    begun.fit(2)
    begun.calibrate()
    begun.save(tmp_path, version=4)
    torch.manual_seed(99)
    resumed = RewardTrainer(RewardModel(config), RewardTraining(), seed=0)
    assert resumed.load(tmp_path) == 4
    resumed.set_labels(given, segments)
    metrics = resumed.fit(4)
    assert metrics["updates"] == whole.updates
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match="expected a reward model of the shape"):
        RewardTrainer(RewardModel(SHAPE), RewardTraining()).load(tmp_path)


def test_pictures_give_the_same_as_stacks_or_compact():
    """Overlapping stacks are kept compact; what is learned from is the whole."""
    config = RewardModelConfig((44, 44, 4), 2, hidden=(8,), members=2)
    rng, found = np.random.default_rng(0), []
    for _ in range(6):
        frames = rng.integers(0, 256, (LENGTH + 3, 44, 44), dtype=np.uint8)
        stacks = np.stack([np.moveaxis(frames[t : t + 4], 0, -1) for t in range(LENGTH)])
        found.append(Clip(stacks, rng.integers(2, size=LENGTH), np.zeros(LENGTH, np.float32), LENGTH))
    segments = {clip.id: clip for clip in found}
    made = trainer(labels(segments, 4), segments, config=config)
    assert all("stack" in arrays for arrays in made.clips.values())
    both = made.model.returns(
        *(torch.from_numpy(x) for x in (found[0].observations[None], found[0].actions[None])),
        torch.tensor([LENGTH]),
    )
    torch.testing.assert_close(torch.from_numpy(made.returns(found[:1]).copy()), both.detach())
    assert made.fit(1)["loss"] > 0


def test_the_normaliser_is_of_the_newest_clips_without_their_padding():
    segments = clips(6)
    padded = Clip(
        np.full((LENGTH, 2), 50, np.float32), np.zeros(LENGTH, np.int64), np.zeros(LENGTH, np.float32), 1
    )
    segments[padded.id] = padded
    ids = list(segments)
    given = [
        Label("old", ids[0], ids[1], 1.0),
        Label("new", ids[2], ids[3], 0.0),
        Label("newest", ids[4], padded.id, 1.0),
    ]
    made = trainer(given, segments)
    made.calibrate(labels=2)
    used = [segments[id] for id in (ids[2], ids[3], ids[4], padded.id)]
    raw = [
        made.model(
            torch.from_numpy(clip.observations[: clip.steps]), torch.from_numpy(clip.actions[: clip.steps])
        ).detach()
        for clip in used
    ]
    by_hand = torch.cat(raw, 1)
    assert by_hand.shape == (3, 3 * LENGTH + 1)
    torch.testing.assert_close(made.model.mean, by_hand.mean(1))
    torch.testing.assert_close(made.model.std, by_hand.std(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": 1.0},
        {"batch_size": 0},
        {"l2": -1.0},
        {"l2_low": 2.0},
        {"l2_step": 1.0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"l2": float("nan")},
    ],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(UserError, match="expected"):
        RewardTraining(**wrong)


def test_what_unseen_labels_confirm():
    """Labels of the true reward confirm it, those of a coin do not, and a few do not suffice; ties count for
    nothing."""
    segments = clips(300)
    given = labels(segments, 300) + labels(segments, 60, seed=1, validation=True)
    made = trainer(given, segments, learning_rate=3e-3, confirm=True)
    metrics = made.fit(30)
    assert metrics["confirmed"] == 1 == made.model.confirmed and metrics["temperature"] < 4
    coin = np.random.default_rng(0)
    tossed = [replace(label, preference=float(coin.integers(2))) for label in given]
    made = trainer(tossed, segments, learning_rate=3e-3, confirm=True)
    assert made.fit(30)["confirmed"] == 0 == made.model.confirmed
    ties = [replace(label, preference=0.5) for label in given[7:]]
    metrics = trainer(given[:7] + ties, segments, learning_rate=3e-3, confirm=True).fit(30)
    assert metrics["confirmed"] == 0 and metrics["unseen_labels"] < 8
    made.settings = replace(made.settings, confirm=False)  # a run that goes on without
    made.fit(1)
    assert made.model.confirmed == 1


def test_a_label_is_unseen_to_the_members_that_bagging_kept_it_from():
    """The mean difference of the two members that have not seen the only label."""
    segments = clips(2)
    first, second = segments
    made = trainer([Label("q", first, second, 1.0)], segments)
    pairs = _Pairs(made.train_pairs, made.clips, torch.tensor([[1.0], [0.0], [0.0]]), 0.0)
    with torch.no_grad():
        difference, preferred = made._unseen(pairs, pairs.counts == 0)
    one, other = made.returns(list(segments.values())).T  # (M,) each
    assert difference.item() == pytest.approx((one - other)[1:].mean(), abs=1e-5)
    assert difference.item() != pytest.approx((one - other).mean(), abs=1e-3) and preferred.tolist() == [1]


def test_fitting_stops_when_validation_labels_say_enough():
    """The best pass's weights are kept; of a coin's labels this is an early one."""
    segments, coin = clips(60), np.random.default_rng(0)
    given = labels(segments, 120) + labels(segments, 60, seed=1, validation=True)
    tossed = [replace(label, preference=float(coin.integers(2))) for label in given]
    patient = trainer(tossed, segments, learning_rate=1e-2, patience=5)
    metrics = patient.fit(100)
    assert patient.epochs < 60
    held_out = _Pairs(patient.validation_pairs, patient.clips, None, 0.0)
    assert patient.evaluate(held_out)["loss"] == pytest.approx(metrics["validation_loss"])
    tireless = trainer(tossed, segments, learning_rate=1e-2).fit(100)
    assert metrics["validation_loss"] < tireless["validation_loss"] - 0.05


@pytest.mark.parametrize("begin_unsure", [True, False])
def test_it_begins_unsure_whatever_a_new_network_says(begin_unsure):
    """A new network's rewards, summed over many steps, are so far apart that it is sure of every label, here
    by weights that are as much larger; a label that it is sure is wrong teaches nothing, as it might be
    random."""
    segments = clips(200)
    given, held_out = labels(segments, 300), labels(segments, 100, seed=1, validation=True)
    made = trainer(given + held_out, segments, learning_rate=3e-3, begin_unsure=begin_unsure)
    with torch.no_grad():
        made.model.layers[-1].weight.mul_(150)
    made.fit(0)
    worth = dict(zip(segments, made.returns(list(segments.values())).T, strict=True))
    apart = [worth[label.first] - worth[label.second] for label in given]  # (labels, M)
    unsure = np.sqrt(np.square(apart).mean(0))
    assert unsure == pytest.approx(0.5, abs=0.01) if begin_unsure else unsure.min() > 10
    right = made.fit(5)["validation_accuracy"]
    assert right > 0.85 if begin_unsure else right < 0.75


def test_ties_that_are_many_do_not_outweigh_the_others():
    """Of 10 labels and 90 ties each kind counts as much as the other; and a tie between clips that are told
    far apart still pulls them together, where a share of random answers would excuse it."""
    segments = clips(60)
    given = labels(segments, 100)
    mixed = given[:10] + [replace(label, preference=0.5) for label in given[10:]]
    made = trainer(mixed, segments, even_ties=True, bagging=False)
    pairs = _Pairs(mixed, made.clips, None, 0.0)
    noise, weights = made._weights(pairs, torch.arange(100))
    assert weights[:10].sum() == pytest.approx(10) == weights[10:].sum().item()
    assert (noise[:10] == 0.1).all() and (noise[10:] == 0).all()
    far = torch.tensor([12.0], requires_grad=True)
    for share, pull in ((0.0, 0.5), (0.1, 0.0)):
        loss = preference_loss(far, torch.zeros(1), torch.tensor([0.5]), noise=torch.tensor([share]))
        assert torch.autograd.grad(loss.sum(), far)[0].item() == pytest.approx(pull, abs=0.01)


def test_observations_are_normalised_by_labelled_clips():
    segments = clips(40)
    given = labels(segments, 30)
    made = trainer(given, segments, config=replace(SHAPE, normalise_observations=True))
    made.fit(1)
    used = {id for label in given for id in (label.first, label.second)}
    seen = np.concatenate([segments[id].observations for id in used])
    np.testing.assert_allclose(made.model.observations.mean, seen.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(made.model.observations.variance, seen.var(0), rtol=1e-3)


def test_a_reward_of_before_actions_were_cut_is_taken(tmp_path):
    shape = RewardModelConfig((2,), 1, discrete=False, hidden=(8,))
    RewardTrainer(RewardModel(shape)).save(tmp_path, version=3)
    new = RewardTrainer(RewardModel(replace(shape, action_limit=1.0)))
    assert new.load(tmp_path) == 3 and new.model.config.action_limit == 1
    with pytest.raises(UserError, match="expected a reward model of the shape"):
        RewardTrainer(RewardModel(replace(shape, members=2))).load(tmp_path)
