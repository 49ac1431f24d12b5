"""VHRL by integration: all episodes of a tiny world, with latents of one number at Gauss and Hermite's nodes.

Before each word a latent is drawn. The first word is 0, 1 or 2; 2 ends the episode, the others lead to a
second word each. Policy and prior have a table of logits for each state, and a slope of them in the latent.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods import VHRL, Reinforce
from rl_dialog.methods.advantages import Experience
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense
from tests.methods.test_online import EPISODES, U, rewards, states

NODES, CHANCES = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(12))
CHANCES = CHANCES / math.sqrt(2 * math.pi)


@dataclass
class Net:
    """Four states: what latents are drawn from in each, (4,), and the words that follow, (4, 3)."""

    mean: Tensor
    log_spread: Tensor
    level: Tensor
    slope: Tensor

    @staticmethod
    def of(seed: int) -> Net:
        make = torch.Generator().manual_seed(seed)
        shapes = ((4,), (4,), (4, 3), (4, 3))
        return Net(*(0.3 * torch.randn(*shape, generator=make, dtype=torch.float64) for shape in shapes))

    def leaves(self) -> list[Tensor]:
        return [self.mean, self.log_spread, self.level, self.slope]

    def learning(self) -> Net:
        return Net(*(each.clone().requires_grad_() for each in self.leaves()))

    def latents(self, places: list[int], noise: Tensor) -> Tensor:
        return self.mean[places] + self.log_spread[places].exp() * noise

    def density(self, places: list[int], latents: Tensor) -> Tensor:
        return torch.distributions.Normal(self.mean[places], self.log_spread[places].exp()).log_prob(latents)

    def logits(self, places: list[int], latents: Tensor) -> Tensor:
        return self.level[places] + self.slope[places] * latents[:, None]

    def said(self, places: list[int], latents: Tensor, words: tuple[int, ...]) -> Tensor:
        return self.logits(places, latents).log_softmax(1)[range(len(words)), list(words)]


POLICY, PRIOR = Net.of(1), Net.of(2)


def every_episode() -> list[tuple[tuple[int, ...], Tensor, float]]:
    """Words, noise of their latents, and the weight of that noise."""
    return [
        (words, NODES[list(nodes)], float(CHANCES[list(nodes)].prod()))
        for words in EPISODES
        for nodes in itertools.product(range(len(NODES)), repeat=len(words))
    ]


def objective(net: Net, method: VHRL) -> Tensor:
    """E[R] - c E[sum of log-ratios]: of latents and words; of words where each net draws its latent with
    the same noise."""
    total = torch.zeros((), dtype=torch.float64)
    for words, noise, weight in every_episode():
        places = states(words)
        latents = net.latents(places, noise)
        own = net.said(places, latents, words)
        if method.holds_latents:
            ratio = own - PRIOR.said(places, latents, words)
            ratio = ratio + net.density(places, latents) - PRIOR.density(places, latents)
        else:
            ratio = own - PRIOR.said(places, PRIOR.latents(places, noise), words)
        total = total + weight * own.sum().exp() * (sum(rewards(words)) - method.c * ratio.sum())
    return total


def experience(words: tuple[int, ...], noise: Tensor, method: VHRL) -> Experience:
    places = states(words)
    latents = POLICY.latents(places, noise)
    theirs = latents if method.holds_latents else PRIOR.latents(places, noise)
    ratio = POLICY.said(places, latents, words) - PRIOR.said(places, theirs, words)
    of_latents = POLICY.density(places, latents) - PRIOR.density(places, latents)
    n = len(words)
    return Experience(
        0, np.array(rewards(words)), np.ones(n, bool), ratio.numpy(), np.zeros(n + 1),
        of_latents.numpy() if method.holds_latents else np.zeros(n),
    )  # fmt: skip


def expected_gradient(method: VHRL) -> list[Tensor]:
    """Of minus the loss, over all episodes with their weights."""
    episodes = every_episode()
    found = [experience(words, noise, method) for words, noise, _ in episodes]
    chances = [
        weight * float(POLICY.said(states(words), POLICY.latents(states(words), noise), words).sum().exp())
        for words, noise, weight in episodes
    ]
    net = POLICY.learning()
    places = [s for words, *_ in episodes for s in states(words)]
    drawn = net.latents(places, torch.cat([noise for _, noise, _ in episodes]))
    held = drawn.detach()
    batch = batch_of([words for words, *_ in episodes])
    batch.latents = held[:, None]
    batch.latent_behaviour_logp = POLICY.density(places, held)
    words = [word for words, *_ in episodes for word in words]
    batch.behaviour_logp = batch.old_logp = POLICY.said(places, held, words)
    batch.prior_logp = torch.zeros(len(places), dtype=torch.float64)
    batch.advantages, batch.latent_advantages, batch.weights = (
        torch.from_numpy(np.concatenate(each))
        for each in (
            [chance * own for chance, own in zip(chances, method.advantages(found), strict=True)],
            [chance * own for chance, own in zip(chances, method.latent_advantages(found), strict=True)],
            [method.weights(each) for each in found],
        )
    )
    logits = net.logits(places, held if method.holds_latents else drawn)
    loss = method.loss(Outputs(Dense(logits), drawn=held, latent_logp=net.density(places, held)), batch)
    gradients = torch.autograd.grad(loss.total, net.leaves(), allow_unused=True)
    return [torch.zeros(1) if each is None else -each for each in gradients]


def batch_of(episodes: list[tuple[int, ...]]) -> Batch:
    rows = []
    for words in episodes:
        ids = np.array([token for word in words for token in (U, word)], np.int32)
        ends = np.arange(1, len(ids), 2).astype(np.int32)
        rows.append(Row(ids, np.arange(len(ids)) % 2 == 1, ends, np.array(rewards(words), np.float32), False))
    return collate(rows)


def exact(method: VHRL) -> list[Tensor]:
    net = POLICY.learning()
    return list(torch.autograd.grad(objective(net, method), net.leaves()))


@pytest.mark.parametrize("c", [0.0, 0.3])
def test_the_expected_gradient_of_both_is_the_exact_one(c: float) -> None:
    """Of E[R] - c KL over latents and words together, where each is told what came after it."""
    method = VHRL(c=c, baseline="none")
    for found, wanted in zip(expected_gradient(method), exact(method), strict=True):
        assert wanted.abs().max() > 0.01
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_worker_alone_learns_through_the_latents_and_is_exact_too() -> None:
    """Latents are then what the noise makes of the context: `reinforce` is right for a model with latents."""
    method = VHRL(c=0.3, baseline="none", learns="worker")
    for found, wanted in zip(expected_gradient(method), exact(method), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_published_worker_tells_the_manager_what_it_knows() -> None:
    """With `through_latents` the net that draws latents learns everything twice."""
    published = expected_gradient(VHRL(c=0.0, baseline="none", through_latents=True))
    once = exact(VHRL(c=0.0))
    for found, wanted, times in zip(published, once, (2, 2, 1, 1), strict=True):
        torch.testing.assert_close(found, times * wanted, rtol=1e-5, atol=1e-5)


def test_who_learns_gets_a_gradient() -> None:
    manager, joint = (
        expected_gradient(VHRL(c=0.0, baseline="none", learns=who)) for who in ("manager", "joint")
    )
    assert [bool(each.any()) for each in manager] == [True, True, False, False]
    for found, wanted in zip(manager[:2], joint[:2], strict=True):
        torch.testing.assert_close(found, wanted)


def test_latents_far_from_what_the_policy_would_draw_have_a_finite_gradient() -> None:
    """Where the weights have moved away from latents that the prior still finds likely."""
    mean = torch.tensor([30.0, 0.1], requires_grad=True)
    drawn, ones = torch.tensor([[0.0], [0.3]]), torch.ones(2)
    batch = batch_of([(0, 2)])
    batch.latents, batch.latent_advantages, batch.advantages, batch.weights = drawn, ones, ones, ones
    batch.behaviour_logp = batch.old_logp = batch.prior_logp = -ones
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(drawn[:, 0])
    batch.latent_prior_logp = batch.latent_behaviour_logp = prior
    logp = torch.distributions.Normal(mean, 1).log_prob(drawn[:, 0])
    out = Outputs(Dense(torch.zeros(2, 3)), drawn=drawn, latent_logp=logp)
    loss = VHRL(c=0.3, kl="k3", baseline="none").loss(out, batch)
    (slope,) = torch.autograd.grad(loss.total, mean)
    assert torch.isfinite(loss.total) and torch.isfinite(slope).all() and slope[0] > 0, "back to the latents"


# --- advantages ---------------------------------------------------------------------------------------------


def told(
    earned: list[float], lengths: list[int], *, group: int = 0, ratio=0.0, latent=0.0, **parts
) -> Experience:  # noqa: ANN001, ANN003
    ends = np.zeros(sum(lengths), bool)
    ends[np.cumsum(lengths) - 1] = True
    rewards = np.zeros(len(ends))
    rewards[ends] = earned
    spread = {}
    for name, (weight, values) in parts.items():
        spread[name] = weight, np.zeros(len(ends))
        spread[name][1][ends] = values
    n = len(ends)
    ratios = np.full(n, ratio), np.full(len(lengths), latent)
    return Experience(group, rewards, ends, ratios[0], np.zeros(n + 1), ratios[1], spread)


PUBLISHED = VHRL(c=0.0, gamma=0.9, baseline="none", standardise=True, words="mean", manager_weight=0.001)


def test_returns_are_discounted_from_turn_to_turn() -> None:
    """[1, 0, 2] with gamma .9 is [2.62, 1.8, 2]: of each latent, and of all words of its reply."""
    plain = VHRL(c=0.0, gamma=0.9, baseline="none")
    episode = told([1.0, 0.0, 2.0], [2, 1, 3])
    assert plain.latent_advantages([episode])[0] == pytest.approx([2.62, 1.8, 2.0])
    assert plain.advantages([episode])[0] == pytest.approx([2.62] * 2 + [1.8] + [2.0] * 3)


def test_standardised_over_all_replies_of_the_round() -> None:
    """z = (G - mean) / deviation (N - 1) of the six returns to go, however many words each reply has."""
    episodes = [told([1.0, 0.0, 2.0], [2, 1, 3]), told([0.0, 0.0, 1.0], [1, 1, 5])]
    to_go = np.array([2.62, 1.8, 2.0, 0.81, 0.9, 1.0])
    z = (to_go - to_go.mean()) / to_go.std(ddof=1)
    assert np.concatenate(PUBLISHED.latent_advantages(episodes)) == pytest.approx(z)
    words = np.repeat(z, [2, 1, 3, 1, 1, 5])
    assert np.concatenate(PUBLISHED.advantages(episodes)) == pytest.approx(words)
    weights = np.concatenate([PUBLISHED.weights(each) for each in episodes])
    assert weights == pytest.approx(1 / np.repeat([2, 1, 3, 1, 1, 5], [2, 1, 3, 1, 1, 5]))


def test_each_reward_is_standardised_before_it_is_weighed() -> None:
    """A reward in thousands counts by its weight alone; one that never changes says nothing."""
    parts = [([1.0, 0.0], [3000.0, 1000.0], [7.0, 7.0]), ([0.0, 1.0], [0.0, 1000.0], [7.0, 7.0])]
    named = [
        told([0.0, 0.0], [1, 2], words=(0.5, np.array(a)), mood=(-2.0, np.array(b)), flat=(4.0, np.array(f)))
        for a, b, f in parts
    ]
    method = VHRL(c=0.0, gamma=0.0, baseline="none", standardise=True)

    def z(values: list[float]) -> np.ndarray:
        return (np.array(values) - np.mean(values)) / np.std(values, ddof=1)

    wanted = 0.5 * z([1, 0, 0, 1]) - 2.0 * z([3000, 1000, 0, 1000])
    assert np.concatenate(method.latent_advantages(named)) == pytest.approx(wanted)
    flat = [told([2.0, 2.0], [1, 1]), told([2.0, 2.0], [3, 1])]
    assert not np.concatenate(method.latent_advantages(flat)).any()


@pytest.mark.parametrize("standardise", [False, True])
def test_a_decision_pays_for_the_divergence_behind_it_and_not_before(standardise: bool) -> None:  # noqa: FBT001
    """Ratios of .2 for each of 3 words and .5 for each of 2 latents: the second latent pays for itself and
    the word behind it, the first for everything."""
    method = VHRL(c=1.0, baseline="none", standardise=standardise)
    episode = told([0.0, 0.0], [2, 1], ratio=0.2, latent=0.5)
    shift = np.mean([1.6, 0.7]) if standardise else 0.0
    assert method.latent_advantages([episode])[0] == pytest.approx([shift - 1.6, shift - 0.7])
    assert method.advantages([episode])[0] == pytest.approx([shift - 1.1, shift - 0.9, shift - 0.2])


def test_baselines_are_those_of_reinforce() -> None:
    """Of the others of the group from the same turn on; latents have theirs, words theirs."""
    episodes = [told([1.0, 2.0], [1, 2]), told([0.0, 4.0], [2, 1]), told([3.0], [2])]
    found = VHRL(c=0.0).latent_advantages(episodes)
    assert np.concatenate(found) == pytest.approx([3 - 3.5, 2 - 4, 4 - 3, 4 - 2, 3 - 3.5])
    words, reinforce = VHRL(c=0.0).advantages(episodes), Reinforce(c=0.0).advantages(episodes)
    assert np.concatenate(words) == pytest.approx(np.concatenate(reinforce))


def test_who_learns_in_which_round() -> None:
    apart = VHRL(learns="decoupled", worker_rate=0.01)
    assert [apart.learner(step) for step in range(4)] == ["manager", "worker"] * 2
    assert [apart.rate_share(step) for step in range(2)] == [1.0, 0.01]
    assert [VHRL(learns=who).learner(1) for who in ("joint", "manager", "worker")] == [
        "joint",
        "manager",
        "worker",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"manager_weight": -1.0}, "--method.manager_weight of at least 0, got -1.0"),
        ({"worker_weight": math.nan}, "--method.worker_weight of at least 0, got nan"),
        ({"worker_rate": 0.0, "learns": "decoupled"}, "--method.worker_rate above 0, got 0.0"),
        ({"worker_rate": 0.5}, "--method.worker_rate: expected --method.learns decoupled, got joint"),
        ({"through_latents": True, "learns": "worker"}, "--method.through_latents: expected --method.learns"),
        ({"c": -1.0}, "--method.c of at least 0"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(settings, message: str) -> None:  # noqa: ANN001
    with pytest.raises(UserError, match=message):
        VHRL(**settings)
