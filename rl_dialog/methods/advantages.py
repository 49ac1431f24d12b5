"""What the decisions of sampled episodes led to, and how much better that was than expected: the one place
where online methods get advantages from.

An episode's decisions are the tokens that the policy drew, over all its turns; what the world said between
them is no decision, so the decision after the last token of a reply is the first one of the next reply. An
episode counts once in its group, whatever its turns and tokens; one that failed or was not scored is not here
at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_dialog.errors import UserError

SAME = 1e-6  # returns of a group that differ by less than this share of their size are equal


@dataclass(frozen=True)
class Experience:
    """The n decisions of one scored episode, in the order in which they were made. Rewards and values are in
    units of value (`OnlineSettings.value_unit`), so that methods do not depend on the unit of rewards."""

    group: int
    rewards: np.ndarray  # (n,) float64: what each reply earned, at its last decision
    turn_end: np.ndarray  # (n,) bool: the last decision of its reply
    log_ratio: np.ndarray  # (n,) float64: log pi - log p of each action, p the frozen prior
    values: np.ndarray  # (n + 1,) float64: V of each state, then of the one where the episode was cut off; 0
    #                     behind a true end, and everywhere without a value head
    # Where a method chooses the latents of replies: (R,) log N(z) of each less that under the prior.
    latent_log_ratio: np.ndarray | None = None
    # Of rewards that are weighed and added up: the weight of each by name, and (n,) what it was by itself.
    parts: Mapping[str, tuple[float, np.ndarray]] = field(default_factory=dict)

    @property
    def turn(self) -> np.ndarray:
        """(n,) the number of the reply that each decision belongs to."""
        return np.cumsum(self.turn_end) - self.turn_end

    @property
    def replies(self) -> int:
        """R."""
        return int(self.turn_end.sum())

    def charged(self, c: float) -> np.ndarray:
        """(n,) rewards less c times the log-ratio of each action: what k1 in the reward is."""
        return self.rewards - c * self.log_ratio


def discount_factors(experience: Experience, gamma: float, per: str) -> np.ndarray:
    """(n,) what a decision's future is multiplied with: `gamma` per token, or at the end of each turn only.

    Raises UserError for another `per`.
    """
    if per not in ("token", "turn"):
        raise UserError(f"expected discount 'token' or 'turn', got {per!r}")
    return np.where(experience.turn_end | (per == "token"), gamma, 1.0)


def rewards_to_go(rewards: np.ndarray, factors: np.ndarray, last: float = 0.0) -> np.ndarray:
    """(n,) G_t = r_t + factor_t G_{t+1}, with G_{n+1} = `last`."""
    sums = np.zeros(len(rewards))
    for t in range(len(rewards) - 1, -1, -1):
        last = rewards[t] + factors[t] * last
        sums[t] = last
    return sums


def generalised_advantages(
    experience: Experience, rewards: np.ndarray, gamma: float, lam: float, per: str
) -> np.ndarray:
    """(n,) A_t = d_t + gamma_t lambda_t A_{t+1}, d_t = r_t + gamma_t V_{t+1} - V_t (Schulman et al. 2016).

    gamma_t and lambda_t count tokens or turns alike (`per`): per turn both are 1 inside a reply.
    """
    discount = discount_factors(experience, gamma, per)
    errors = rewards + discount * experience.values[1:] - experience.values[:-1]
    return rewards_to_go(errors, discount * discount_factors(experience, lam, per))


def means_of_others(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(E,) the mean of the others of each one's group; NaN for who is alone."""
    _, place = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(place, values)[place], np.bincount(place)[place]
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums - values) / (counts - 1)


def turn_baselines(
    to_go: Sequence[np.ndarray], turns: Sequence[np.ndarray], groups: np.ndarray
) -> list[np.ndarray]:
    """For each episode (n,) what the others of its group earned on average from the same turn on.

    Of the others those count that came so far; where none did, the turn before stands for it. NaN for an
    episode without others. It depends on the others alone, so it biases no gradient.
    """
    starts = [np.flatnonzero(np.diff(turn, prepend=-1)) for turn in turns]
    from_turn = [sums[first] for sums, first in zip(to_go, starts, strict=True)]
    baselines = [np.full(len(first), np.nan) for first in starts]
    for k in range(max((len(first) for first in starts), default=0)):
        there = np.array([e for e, first in enumerate(starts) if len(first) > k])
        means = means_of_others(np.array([from_turn[e][k] for e in there]), groups[there])
        for e, mean in zip(there, means, strict=True):
            baselines[e][k] = baselines[e][k - 1] if np.isnan(mean) and k else mean
    return [baseline[turn] for baseline, turn in zip(baselines, turns, strict=True)]


def group_scores(totals: np.ndarray, groups: np.ndarray, *, by_deviation: bool) -> np.ndarray:
    """(E,) how far each return lies above its group's mean, in the group's standard deviations (N - 1) or in
    the unit of the returns; 0 in groups without spread."""
    scores = np.zeros(len(totals))
    for group in np.unique(groups):
        inside = groups == group
        own = totals[inside]
        if np.ptp(own) <= SAME * np.abs(own).max():
            continue
        above = own - own.mean()
        scores[inside] = above / own.std(ddof=1) if by_deviation else above
    return scores


def groups_without_spread(totals: np.ndarray, groups: np.ndarray) -> float:
    """The share of groups whose returns are all equal."""
    names = np.unique(groups)
    flat = [np.ptp(own) <= SAME * np.abs(own).max() for own in (totals[groups == name] for name in names)]
    return float(np.mean(flat))
