"""Online methods by enumeration: all episodes of a tiny world, each with its probability.

Three tokens, one per turn. The first turn says 0, 1 or 2; 2 ends the episode, the others lead to a second
turn each. So there are seven episodes of one or two decisions in four states.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods import FROM_LOGS, GRPO, METHODS, ONLINE, PPO, RLOO, Reinforce
from rl_dialog.methods.advantages import (
    Experience,
    generalised_advantages,
    group_scores,
    groups_without_spread,
    means_of_others,
    turn_baselines,
)
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.online import DIVERGENCES, by_log_probability
from rl_dialog.methods.scores import Dense, Linear, entropy

U, C = 3, 0.3
FIRST, SECOND = (0.5, -1.0, 0.7), ((2.0, -1.0, 0.0), (-0.5, 3.0, 1.0))
EPISODES = [(a, b) for a in (0, 1) for b in range(3)] + [(2,)]
generator = torch.Generator().manual_seed(3)
POLICY, PRIOR = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
VALUES = torch.randn(4, generator=generator, dtype=torch.float64)


def states(episode: tuple[int, ...]) -> list[int]:
    return [0] if len(episode) == 1 else [0, 1 + episode[0]]


def rewards(episode: tuple[int, ...]) -> list[float]:
    return [FIRST[episode[0]]] + [SECOND[episode[0]][b] for b in episode[1:]]


def log_p(table: torch.Tensor, episode: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([table[s].log_softmax(0)[a] for s, a in zip(states(episode), episode, strict=True)])


def objective(table: torch.Tensor, c: float = C) -> torch.Tensor:
    """E[R] - c KL(pi || p) over whole episodes, exactly."""
    total = table.new_zeros(())
    for episode in EPISODES:
        own = log_p(table, episode).sum()
        total = total + own.exp() * (sum(rewards(episode)) - c * (own - log_p(PRIOR, episode).sum()))
    return total


def exact(c: float = C) -> torch.Tensor:
    table = POLICY.clone().requires_grad_()
    return torch.autograd.grad(objective(table, c), table)[0]


def experience(episode: tuple[int, ...], group: int = 0, values: torch.Tensor | None = None) -> Experience:
    n = len(episode)
    v = np.zeros(n + 1) if values is None else np.append(values[states(episode)].numpy(), 0.0)
    ratio = (log_p(POLICY, episode) - log_p(PRIOR, episode)).numpy()
    return Experience(group, np.array(rewards(episode)), np.ones(n, bool), ratio, v)


def batch_of(episodes, advantages, weights, targets=None, behaviour=None) -> Batch:  # noqa: ANN001
    rows = []
    for episode in episodes:
        ids = [token for action in episode for token in (U, action)]
        ends = np.arange(1, len(ids), 2)
        written = np.arange(len(ids)) % 2 == 1
        earned = np.array(rewards(episode), np.float32)
        rows.append(Row(np.array(ids, np.int32), written, ends.astype(np.int32), earned, False))
    batch = collate(rows)
    own = torch.cat([log_p(POLICY, episode) for episode in episodes])
    batch.old_logp, batch.behaviour_logp = own, own if behaviour is None else behaviour
    batch.prior_logp = torch.cat([log_p(PRIOR, episode) for episode in episodes])
    batch.advantages = torch.from_numpy(np.concatenate(advantages))
    batch.weights = torch.from_numpy(np.concatenate(weights))
    batch.value_targets = None if targets is None else torch.from_numpy(np.concatenate(targets))
    return batch


def expected_gradient(method, size: int = 2, values: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ANN001
    """Of minus the loss, over all groups of `size` episodes, each with its probability."""
    episodes, advantages, weights, targets = [], [], [], []
    chance = {episode: log_p(POLICY, episode).sum().exp().item() for episode in EPISODES}
    for group in itertools.product(EPISODES, repeat=size):
        found = [experience(episode, values=values) for episode in group]
        probability = math.prod(chance[episode] for episode in group)
        episodes += group
        advantages += method.advantages(found)
        weights += [method.weights(each) * probability / size for each in found]
        targets += [method.value_targets(each) for each in found]
    return -gradient(method, batch_of(episodes, advantages, weights, targets), episodes, values)


def gradient(method, batch: Batch, episodes, values=None) -> torch.Tensor:  # noqa: ANN001
    table = POLICY.clone().requires_grad_()
    places = [s for episode in episodes for s in states(episode)]
    v = None if values is None else values[places]
    loss = method.loss(Outputs(Dense(table[places]), v=v), batch)
    return torch.autograd.grad(loss.total, table)[0]


@pytest.mark.parametrize(
    "method",
    [
        Reinforce(c=C, baseline="none"),
        Reinforce(c=C, baseline="batch"),
        Reinforce(c=C, baseline="leave_one_out"),
        RLOO(c=C),
        RLOO(c=0.0),
        PPO(c=C, lam=1.0, whiten=False, value_weight=0.0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_gradient_is_the_exact_one(method, size: int) -> None:  # noqa: ANN001
    """Also where one of a group ends earlier than the others, and for any values that are no advantage."""
    values = VALUES if isinstance(method, PPO) else None
    torch.testing.assert_close(expected_gradient(method, size, values), exact(method.c))


@pytest.mark.parametrize("size", [2, 3])
def test_grpo_without_its_divisions_is_the_exact_one_but_for_its_own_share_of_the_mean(size: int) -> None:
    """The mean has the episode itself in it: (N - 1) / N of the gradient, which RLOO does not lose."""
    plain = GRPO(c=C, kl="reward", divide_by_deviation=False, divide_by_length=False)
    torch.testing.assert_close(expected_gradient(plain, size), exact() * (size - 1) / size)


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_divergences_in_the_loss_are_those_of_each_state(kl: str) -> None:
    """On policy k2 has the gradient of KL(pi || p) of each state, k3 that of KL(p || pi); where actions lead
    to is not its business."""
    table = POLICY.clone().requires_grad_()
    log_pi, prior = table.log_softmax(1), PRIOR.log_softmax(1)
    first = POLICY[0].softmax(0)
    visits = torch.stack([torch.ones_like(first[0]), first[0], first[1], first[0] * 0])  # of each state
    forward = (prior.exp() * (prior - log_pi)).sum(1)
    reverse = (log_pi.exp() * (log_pi - prior)).sum(1)
    divergence = (visits * (reverse if kl == "k2" else forward)).sum()
    wanted = exact(0.0) - C * torch.autograd.grad(divergence, table)[0]
    torch.testing.assert_close(expected_gradient(RLOO(c=C, kl=kl)), wanted)


def test_k3_is_the_unbiased_estimate_of_the_divergence_that_is_never_negative() -> None:
    log_pi, log_prior = POLICY.log_softmax(1), PRIOR.log_softmax(1)
    x = log_pi - log_prior
    k3 = DIVERGENCES["k3"](x)
    assert (k3 >= 0).all()
    torch.testing.assert_close((log_pi.exp() * k3).sum(1), (log_pi.exp() * x).sum(1))


def test_k3_of_what_the_policy_has_left_far_behind_is_a_straight_line() -> None:
    """exp(-x) is infinite below -89, and with it the gradient of everything."""
    near = torch.linspace(-20, 30, 501, requires_grad=True)
    far = torch.tensor([-21.0, -89.0, -1e6], requires_grad=True)
    k3 = DIVERGENCES["k3"]
    assert torch.equal(k3(near), torch.expm1(-near) + near)
    (slope,) = torch.autograd.grad(k3(near).sum(), near)
    torch.testing.assert_close(slope, 1 - torch.exp(-near), rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(k3(far).sum(), far)
    assert torch.isfinite(k3(far)).all() and (k3(far).diff() > 0).all()
    torch.testing.assert_close(slope, (1 - torch.tensor(20.0).exp()).expand(3))


def test_the_first_epoch_of_ppo_is_reinforce_with_the_same_baseline() -> None:
    episodes = [(0, 2), (2,), (1, 1), (0, 0)]
    found = [experience(episode, values=VALUES) for episode in episodes]
    weights = [np.ones(len(episode)) for episode in episodes]
    ppo = PPO(c=C, lam=1.0, whiten=False, value_weight=0.0)
    to_go = Reinforce(c=C, baseline="none").advantages(found)
    by_hand = [g - each.values[:-1] for g, each in zip(to_go, found, strict=True)]
    targets = [ppo.value_targets(each) for each in found]
    one = gradient(ppo, batch_of(episodes, ppo.advantages(found), weights, targets), episodes, VALUES)
    other = gradient(Reinforce(c=C), batch_of(episodes, by_hand, weights), episodes)
    torch.testing.assert_close(one, other)
    for target, g in zip(targets, to_go, strict=True):  # at lambda 1 values are fitted to what followed
        np.testing.assert_allclose(target, g)


def test_the_clip_lets_no_token_be_pulled_further() -> None:
    """r = 1.5 with A > 0 and r = .5 with A < 0 have no gradient; the other two signs have."""
    method = PPO(c=0.0, whiten=False, value_weight=0.0)
    batch = batch_of([(2,)] * 4, [np.array([a]) for a in (1.0, -1.0, 1.0, -1.0)], [np.ones(1)] * 4)
    logp = batch.old_logp + torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64).log()
    logp.requires_grad_()
    terms, metrics = method.surrogate(logp, batch)
    (slope,) = torch.autograd.grad(terms.sum(), logp)
    assert slope.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert metrics["clipped"].tolist() == [1, 0, 0, 1]


def test_weights_of_older_or_narrowed_draws_are_those_of_the_policy_truncated() -> None:
    """Drawn from mu, the gradient of a bandit is that of the policy; a weight never exceeds max_weight."""
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    episodes = [(a,) for a in range(3)]
    earned = [np.array([FIRST[a]]) for a in range(3)]
    weights = [mu[a].exp().numpy()[None] for a in range(3)]
    table = POLICY.clone().requires_grad_()
    wanted = torch.autograd.grad((table[0].softmax(0) * torch.tensor(FIRST)).sum(), table)[0]
    batch = batch_of(episodes, earned, weights, behaviour=mu)
    batch.advantages = torch.tensor(FIRST, dtype=torch.float64)
    for method in (Reinforce(c=0.0, max_weight=100.0), GRPO(c=0.0, max_weight=100.0)):
        torch.testing.assert_close(-gradient(method, batch, episodes), wanted)
    ratio = (POLICY[0].log_softmax(0) - mu).exp()
    assert ratio.max() > 1.1
    held = Reinforce(max_weight=1.1).importance(batch.old_logp, batch)
    torch.testing.assert_close(held, ratio.clamp(max=1.1))


# --- advantages ---------------------------------------------------------------------------------------------


def spoken(rewards, ends, *, group=0, ratio=None, values=None) -> Experience:  # noqa: ANN001
    n = len(rewards)
    return Experience(
        group,
        np.array(rewards, float),
        np.array(ends, bool),
        np.zeros(n) if ratio is None else np.array(ratio, float),
        np.zeros(n + 1) if values is None else np.array(values, float),
    )


def test_gae_by_hand_walks_over_decisions_and_discounts_at_the_ends_of_turns() -> None:
    """Two replies of two tokens: V = 1, 2, 3, 4 and 5 where it was cut off; gamma .5, lambda .5 per turn."""
    each = spoken([0, 1, 0, 2], [0, 1, 0, 1], values=[1, 2, 3, 4, 5])
    d = [2 - 1, 1 + 0.5 * 3 - 2, 4 - 3, 2 + 0.5 * 5 - 4]
    a3 = d[3]
    a2 = d[2] + a3
    a1 = d[1] + 0.25 * a2
    found = generalised_advantages(each, each.rewards, 0.5, 0.5, "turn")
    np.testing.assert_allclose(found, [d[0] + a1, a1, a2, a3])
    per_token = generalised_advantages(each, each.rewards, 0.5, 0.0, "token")
    np.testing.assert_allclose(per_token, [0.5 * 2 - 1, 1 + 1.5 - 2, 2 - 3, 2 + 2.5 - 4])


def test_rewards_count_where_they_fall() -> None:
    """Reinforce credits a turn with what followed it; rloo and grpo see one outcome of the episode."""
    each = spoken([0, 1, 0, 2], [0, 1, 0, 1])
    (to_go,) = Reinforce(c=0.0, baseline="none", gamma=0.5).advantages([each])
    np.testing.assert_allclose(to_go, [2, 2, 2, 2])
    (to_go,) = Reinforce(c=0.0, baseline="none").advantages([each])
    np.testing.assert_allclose(to_go, [3, 3, 2, 2])
    other = spoken([1], [1])
    one, two = RLOO(c=0.0).advantages([each, other])
    assert one.tolist() == [2] * 4 and two.tolist() == [-2]


def test_the_divergence_is_charged_token_by_token() -> None:
    each = spoken([0, 1], [0, 1], ratio=[0.5, -1.0])
    (to_go,) = Reinforce(c=2.0, baseline="none").advantages([each])
    np.testing.assert_allclose(to_go, [-1 + 3, 3])
    assert Reinforce(c=2.0, kl="k2", baseline="none").advantages([each])[0].tolist() == [1, 1]


def test_an_episode_counts_once_in_its_group_however_long_it_is() -> None:
    """Ten turns with the outcome 1 and one turn with the outcome 0: the mean is .5, not 10 / 11."""
    long, short = spoken([0] * 9 + [1], [1] * 10), spoken([0], [1])
    for method in (GRPO(divide_by_deviation=False), GRPO(divide_by_deviation=True)):
        one, two = method.advantages([long, short])
        assert one.tolist() == [-two[0]] * 10
    assert GRPO().advantages([long, short])[0][0] == pytest.approx(1 / math.sqrt(2))
    assert GRPO().weights(long).sum() == pytest.approx(1) == GRPO().weights(short).sum()
    assert GRPO(divide_by_length=False).weights(long).sum() == 10


def test_leave_one_out_leaves_out_one() -> None:
    groups = np.array([0, 0, 0, 1, 1, 2])
    found = means_of_others(np.array([1.0, 2, 6, 5, 7, 9]), groups)
    np.testing.assert_allclose(found, [4, 3.5, 1.5, 7, 5, np.nan])
    alone = spoken([5], [1], group=7)
    for method in (RLOO(c=0.0), GRPO(), Reinforce(c=0.0)):  # who is alone has nobody to be compared with
        assert method.advantages([alone])[0].tolist() == [0]


def test_a_turn_is_compared_with_the_same_turn_of_others_that_came_so_far() -> None:
    to_go = [np.array([3.0, 3.0, 2.0]), np.array([1.0]), np.array([6.0, 4.0])]
    turns = [np.array([0, 0, 1]), np.array([0]), np.array([0, 1])]
    found = turn_baselines(to_go, turns, np.zeros(3))
    assert [each.tolist() for each in found] == [[3.5, 3.5, 4], [4.5], [2, 2]]
    found = turn_baselines(to_go[:2], turns[:2], np.zeros(2))  # nobody else reached the second turn
    assert [each.tolist() for each in found] == [[1, 1, 1], [3]]


@pytest.mark.parametrize("scale", [1.0, 1024.0, 1e-6])
def test_groups_without_spread_give_no_gradient_in_any_unit(scale: float) -> None:
    flat = np.array([0.1 + 0.2, 0.3, 0.3]) * scale  # unequal in the last bit
    totals, groups = np.append(flat, [1 * scale, 2 * scale]), np.array([0, 0, 0, 1, 1])
    assert groups_without_spread(totals, groups) == 0.5
    for by_deviation in (True, False):
        assert group_scores(totals, groups, by_deviation=by_deviation)[:3].tolist() == [0, 0, 0]
    scores = group_scores(totals, groups, by_deviation=True)[3:]
    np.testing.assert_allclose(scores, [-(0.5**0.5), 0.5**0.5])


def test_a_divergence_in_the_reward_is_in_units_of_grpos_advantage() -> None:
    """It does not make a group spread that earned the same, and weighs c whatever the group's deviation."""
    flat = [spoken([2], [1], ratio=[x]) for x in (1e-7, 0.0, -1e-7)]
    for each in GRPO(c=0.1, kl="reward").advantages(flat):
        assert abs(each[0]) < 1e-6
    for size in (1.0, 100.0):
        pair = [spoken([size], [1], ratio=[0.5]), spoken([0], [1], ratio=[-0.5])]
        one, two = GRPO(c=0.1, kl="reward").advantages(pair)
        assert one[0] == pytest.approx(math.sqrt(0.5) - 0.1 * 0.5) == -two[0]
        one, _ = GRPO(c=0.1, kl="reward", divide_by_deviation=False).advantages(pair)
        assert one[0] == pytest.approx(size / 2 - 0.1 * 0.5)


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_groups_without_spread_are_still_held_by_the_prior(kl: str) -> None:
    episodes = [(0, 2), (0, 2)]
    method = GRPO(c=C, kl=kl)
    found = [experience(episode) for episode in episodes]
    weights = [method.weights(each) for each in found]
    batch = batch_of(episodes, method.advantages(found), weights)
    assert not batch.advantages.any()
    assert gradient(method, batch, episodes).abs().max() > 1e-3
    batch.weights = batch.weights * 0
    assert not gradient(method, batch, episodes).any()


@pytest.mark.parametrize("scale", [1024.0, 2.0**-20])
def test_the_unit_of_rewards_scales_advantages_or_cancels(scale: float) -> None:
    episodes = [(0, 2), (1, 0), (2,), (1, 1)]
    ones = [experience(episode, values=VALUES) for episode in episodes]
    others = [Experience(e.group, e.rewards * scale, e.turn_end, e.log_ratio, e.values * scale) for e in ones]
    for one, other, factor in (
        (RLOO(c=C), RLOO(c=C * scale), scale),
        (Reinforce(c=C), Reinforce(c=C * scale), scale),
        (PPO(c=C), PPO(c=C * scale), 1.0),
        (GRPO(), GRPO(), 1.0),
    ):
        for a, b in zip(one.advantages(ones), other.advantages(others), strict=True):
            np.testing.assert_allclose(b, a * factor, rtol=1e-9)


# --- the rest -----------------------------------------------------------------------------------------------


def test_any_function_of_log_probabilities_has_its_gradient() -> None:
    """The two passes over the scores, or the one where log pi is known, give what a softmax gives."""
    torch.manual_seed(0)
    features, weight = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True)
    actions = torch.tensor([0, 3, 6, 1, 1])

    def loss(logp):  # noqa: ANN001, ANN202
        return (logp.exp() * torch.arange(5.0)).sum() + logp.square().sum()

    logp = (features @ weight.t()).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
    direct = loss(logp)
    slope = torch.autograd.grad(direct, weight, retain_graph=True)[0]
    for known in (None, logp.detach()):
        total, told = by_log_probability(Linear(features, weight), actions, loss, known)
        torch.testing.assert_close((total, told), (direct, logp))
        torch.testing.assert_close(torch.autograd.grad(total, weight)[0], slope, rtol=1e-4, atol=1e-5)


def test_the_entropy_bonus_is_the_entropy(monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr("rl_dialog.methods.scores.CHUNK_ELEMENTS", 14)  # two states in a chunk
    torch.manual_seed(0)
    features, weight = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True)
    share = torch.tensor([1.0, 0.5, 0.0])
    log_pi = (features[:3] @ weight.t()).log_softmax(1)
    direct = -(share * (log_pi.exp() * log_pi).sum(1)).sum()
    found = entropy(Linear(features, weight), share)
    torch.testing.assert_close(found, direct)
    torch.testing.assert_close(*(torch.autograd.grad(each, weight)[0] for each in (found, direct)))
    table = POLICY.clone().requires_grad_()
    batch = batch_of([(2,)], [np.zeros(1)], [np.ones(1)])
    total = Reinforce(c=0.0, entropy_weight=2.0).loss(Outputs(Dense(table[[0]])), batch).total
    log_pi = table[0].log_softmax(0)
    torch.testing.assert_close(
        torch.autograd.grad(total, table)[0],
        torch.autograd.grad(2 * (log_pi.exp() * log_pi).sum(), table)[0],
    )


def test_methods_from_logs_and_online_are_all_there_are() -> None:
    assert FROM_LOGS.keys() | ONLINE.keys() == METHODS.keys() and not FROM_LOGS.keys() & ONLINE.keys()
    assert list(ONLINE) == ["reinforce", "rloo", "grpo", "ppo", "vhrl"]


def test_who_needs_groups() -> None:
    """Those that give an episode without others no advantage, whatever it earned."""
    single = [spoken([5], [1], group=0), spoken([1], [1], group=1)]
    reinforce = [Reinforce(c=0.0, baseline=baseline) for baseline in ("none", "batch", "leave_one_out")]
    for method in (RLOO(c=0.0), GRPO(), PPO(), *reinforce):
        assert method.compares_groups == (not np.any(np.concatenate(method.advantages(single)))), method


@pytest.mark.parametrize(
    "settings", [{"c": -1.0}, {"entropy_weight": -0.1}, {"max_weight": 0.0}, {"c": math.nan}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match="expected --method"):
        RLOO(**settings)
