"""What is most probably right where people disagree, and how far each of them can be trusted.

Dawid and Skene (1979): pair i has a hidden truth t (first, tie, second), labeller k answers a with
probability pi_k[t, a], whatever the others say. Expectation and maximisation in turn:

    P(t | answers of i) ~ p[t] prod_k pi_k[t, a_ki]            one-hot for gold pairs, whose truth is known
    pi_k[t, a] ~ prior[t, a] + sum_i P(t | i) [a_ki = a]       p[t] ~ 1 + sum_i P(t | i)

Which segment is first means nothing, so first and second are pooled: pi_k[first, second] = pi_k[second,
first]. The prior is that of a labeller who is right on 95 % (the reward model's own `noise` of .1), and
weighs as much as `PRIOR` answers of each kind: of whom nothing is known it is believed.

The reward model learns from the result as a `Judgement`. With q = P(truth is the preferred one | it is no
tie), the loss of a score difference d is -log(q sigmoid(d) + (1 - q) sigmoid(-d)): that of a labeller with a
share 2 (1 - q) of random answers. What nobody reliable has said teaches nothing, instead of teaching that
both are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_dialog.preferences.agreement import by_query, opinions
from rl_dialog.preferences.labels import Answer

TRUTHS = (1.0, 0.5, 0.0)  # first preferred, tie, second preferred
PLACE = {value: place for place, value in enumerate(TRUTHS)}
RIGHT = 0.95  # of the answers, as long as nothing else is known
PRIOR = 4.0  # answers of each kind that this belief weighs
UNTRUSTED = 0.9  # noise of a pair that nobody reliable has judged: nothing to learn from or to judge by
MOST_ROUNDS = 500
CLOSE = 1e-7  # the largest change of a probability at which the rounds end


@dataclass(frozen=True)
class Reliability:
    """T = 3 truths, in the order of TRUTHS."""

    queries: dict[str, np.ndarray]  # query -> P(truth) # (T,)
    labellers: dict[str, np.ndarray]  # labeller -> P(answer | truth) # (T, T)

    def accuracy(self, labeller: str) -> float:
        """P(the answer is right | one of the two is better)."""
        return float(self.labellers[labeller][0, 0])

    def noise(self, labeller: str) -> float:
        """Share of their decided answers about decided pairs that are a coin's: 2 P(the wrong one)."""
        right, _, wrong = self.labellers[labeller][0]
        return float(2 * wrong / (right + wrong))


@dataclass(frozen=True)
class Judgement:
    """What all answers to a pair say together."""

    query: str
    first: str
    second: str
    preference: float  # P(first preferred) of the most probable truth: 1, 0, or 0.5 for a tie
    validation: bool
    noise: float = 0.0  # share of random answers among labels as sure as this one
    weight: float = 1.0  # P(the truth is of its kind, decided or a tie)
    strength: float | None = None  # mean of those who said so and agree with it: 1 slightly, 2 much better


def judgements(answers: Iterable[Answer]) -> list[Judgement]:
    """One for each pair that somebody preferred something of, in the order of the first answers; gold pairs
    are none. Where nobody shares a pair with anybody and nothing is gold there is nothing to estimate: then
    each is its answer as it stands."""
    answers = list(answers)
    groups = by_query(opinions(answers))
    known = [answer for answer in answers if answer.gold is not None and answer.counts]
    if not known and all(len(group) == 1 for group in groups.values()):
        return [_as_said(group[0]) for group in groups.values()]
    estimate = dawid_skene(
        [(answer.query, answer.labeller, answer.preference) for answer in answers if answer.counts],
        known={answer.query: answer.gold for answer in known},
    )
    return [_weighed(group, estimate.queries[query]) for query, group in groups.items()]


def dawid_skene(
    said: Sequence[tuple[str, str, float]],
    *,
    known: Mapping[str, float] | None = None,
    symmetric: bool = True,
    prior: float = PRIOR,
) -> Reliability:
    """Of (query, labeller, preference) triples, each labeller once per query; `known` queries have their
    truth. It begins with the shares of the votes, and ends when no probability moves by more than CLOSE.

    `symmetric=False, prior=0` is the published estimator, of maximum likelihood, for comparison.
    """
    queries, asked = _numbered(query for query, _, _ in said)
    labellers, people = _numbered(labeller for _, labeller, _ in said)
    answer = np.array([PLACE[preference] for _, _, preference in said])
    votes: list[list[int]] = [[] for _ in queries]
    for query, vote in zip(asked, people * 3 + answer, strict=True):  # a vote: labeller and answer
        votes[query].append(vote)
    # Pairs of which the same people said the same have the same truth. There are few kinds of pairs in a long
    # log, and the rounds go over these.
    gold = [PLACE[known[query]] if known and query in known else None for query in queries]
    kinds, kind = _numbered(zip(gold, map(tuple, map(sorted, votes)), strict=True))
    places = np.repeat(np.arange(len(kinds)), [len(of) for _, of in kinds])
    counts, cells = np.bincount(kind), np.concatenate([of for _, of in kinds])
    fixed = np.array([place is not None for place, _ in kinds])
    truth = np.stack([np.bincount(places, cells % 3 == place, len(kinds)) for place in range(3)])  # (T, P)
    truth = truth / truth.sum(0)
    truth[:, fixed] = np.eye(3)[:, [place for place, _ in kinds if place is not None]]
    for _ in range(MOST_ROUNDS):
        confusion, share = _maximised(truth, counts, places, cells, len(labellers), symmetric, prior)
        new = _expected(confusion, share, places, cells, len(kinds))
        new[:, fixed] = truth[:, fixed]
        moved, truth = np.abs(new - truth).max(), new
        if moved < CLOSE:
            break
    truths = dict(zip(queries, truth.T[kind], strict=True))
    return Reliability(truths, dict(zip(labellers, confusion, strict=True)))


def _maximised(
    truth: np.ndarray,
    counts: np.ndarray,
    places: np.ndarray,
    cells: np.ndarray,
    people: int,
    symmetric: bool,
    prior: float,
) -> tuple[np.ndarray, np.ndarray]:
    """P(answer | truth) of each labeller (K, T, A), and how often each truth is (T,), of kinds of pairs, each
    there so many times. Vote n is `cells[n]`, on kind `places[n]`."""
    weighed = truth * counts
    counted = np.stack([np.bincount(cells, of[places], people * 3) for of in weighed])  # (T, K * A)
    counted = counted.reshape(3, people, 3).transpose(1, 0, 2)
    share = weighed.sum(1)
    if symmetric:
        counted = (counted + counted[:, ::-1, ::-1]) / 2
        share = (share + share[::-1]) / 2
    believed = np.where(np.eye(3, dtype=bool), RIGHT, (1 - RIGHT) / 2)
    counted = counted + prior * believed
    share = share + (prior > 0)
    total = counted.sum(2, keepdims=True)
    return np.divide(counted, total, out=np.full_like(counted, 1 / 3), where=total > 0), share / share.sum()


def _expected(
    confusion: np.ndarray, share: np.ndarray, places: np.ndarray, cells: np.ndarray, count: int
) -> np.ndarray:
    """P(truth | answers) of each kind of pair (T, P)."""
    with np.errstate(divide="ignore"):
        log_confusion = np.log(confusion).transpose(1, 0, 2).reshape(3, -1)  # (T, K * A)
        log_share = np.log(share)[:, None]
    log_p = log_share + np.stack([np.bincount(places, of[cells], count) for of in log_confusion])
    p = np.exp(log_p - log_p.max(0))
    return p / p.sum(0)


def _weighed(group: Sequence[Answer], truth: np.ndarray) -> Judgement:
    """The judgement of a pair's answers, with P(truth)."""
    first, tie, second = truth.tolist()
    about = (group[0].query, group[0].first, group[0].second)
    if tie > max(first, second):
        return Judgement(*about, 0.5, group[0].validation, weight=tie)
    preference = float(first >= second)
    unsure = min(first, second) / (first + second)
    agreeing = [one.strength for one in group if one.strength and one.preference == preference]
    strength = sum(agreeing) / len(agreeing) if agreeing else None
    return Judgement(*about, preference, group[0].validation, 2 * unsure, 1 - tie, strength)


def _as_said(answer: Answer) -> Judgement:
    about = (answer.query, answer.first, answer.second, answer.preference, answer.validation)
    return Judgement(*about, strength=answer.strength)


def _numbered(names: Iterable[Any]) -> tuple[list[Any], np.ndarray]:
    """The different names in their order, and the place of each."""
    place: dict[Any, int] = {}
    places = [place.setdefault(name, len(place)) for name in names]
    return list(place), np.array(places, dtype=int)
