"""How well rewards tell the replies that people called good from those they called bad: the AUC over all
labelled replies, and within each source.

A mixed set has its trap: where one source is mostly good and another mostly bad, a reward that only tells
the two apart looks like a judge of replies.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_dialog.data.pairs import context_keys
from rl_dialog.data.schema import Dialog

TOGETHER = (
    16  # dialogs that answer the same messages are one unit; more of them have only a common opening ("hi")
)
Z95 = 1.959964
APART = 0.02  # how far the AUC within sources may be from the one over all before it is worth a warning


@dataclass(frozen=True)
class Labelled:
    """R replies that people said to be good or bad."""

    kinds: tuple[str, ...]  # which rewards the labels are: vote, logged
    good: np.ndarray  # (R,) bool
    source: np.ndarray  # (R,) int64 into `sources`
    sources: tuple[str, ...]
    unit: np.ndarray  # (R,) int64: replies of one dialog, or to the same messages, are not independent
    scores: dict[str, np.ndarray]  # reward -> (R,), NaN where it does not apply


@dataclass(frozen=True)
class Agreement:
    """An AUC with its 95 % interval."""

    auc: float
    low: float
    high: float
    replies: int

    def __str__(self) -> str:
        return f"{self.auc:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class RewardAgreement:
    """One reward against the labels."""

    whole: Agreement
    within: (
        Agreement | None
    )  # the mean of the sources' AUCs by their pairs of a good and a bad reply; None without such a source
    of_source: dict[str, Agreement]  # the sources with both kinds of replies
    separates: bool  # the AUC over all is another than within sources, by more than chance


def labelled_replies(dialogs: Iterable[Dialog], names: Sequence[str]) -> Labelled | None:
    """Every reply with a label, and its rewards `names`. None without good and bad ones.

    Labels are votes other than 0 where a source has some, else its `logged` rewards if they are of two
    values.
    """
    vote, logged, source, number, values = array("d"), array("d"), array("q"), array("q"), array("d")
    sources: dict[str, int] = {}
    contexts: dict[bytes, int] = {}
    context_of: list[int] = []
    for n, dialog in enumerate(dialogs):
        replies = [dialog.messages[i] for i in dialog.replies]
        context_of.append(contexts.setdefault(opening(dialog), len(contexts)))
        for reply in replies:
            liked, rewards = (reply.get("feedback") or {}).get("vote") or 0, reply.get("rewards") or {}
            logged_reward = rewards.get("logged")
            if liked or logged_reward is not None:
                vote.append(liked)
                logged.append(np.nan if logged_reward is None else logged_reward)
                source.append(sources.setdefault(dialog.source, len(sources)))
                number.append(n)
                values.extend(np.nan if (value := rewards.get(name)) is None else value for name in names)
    of_source, dialog = np.array(source, dtype=np.int64), np.array(number, dtype=np.int64)
    good, is_labelled, kinds = _labels(np.array(vote), np.array(logged), of_source, len(sources))
    if not (good & is_labelled).any() or not (~good & is_labelled).any():
        return None
    table = np.array(values).reshape(len(vote), len(names))[is_labelled]
    unit = _units(np.array(context_of, dtype=np.int64))[dialog[is_labelled]]
    source_names, place = np.unique(
        np.array([name or "(no source)" for name in sources])[of_source[is_labelled]], return_inverse=True
    )
    return Labelled(
        kinds,
        good[is_labelled],
        place,
        tuple(source_names.tolist()),
        unit,
        {name: table[:, k] for k, name in enumerate(names) if name not in kinds},
    )


def opening(dialog: Dialog) -> bytes:
    """The messages before the first reply: the two sides of a preference pair share them."""
    return context_keys(dialog)[dialog.replies[0] if dialog.replies else len(dialog.messages)]


def _units(context: np.ndarray) -> np.ndarray:
    """(D,) -> (D,): the context, or a number of its own for a dialog whose context is that of more than
    TOGETHER."""
    crowded = np.bincount(context)[context] > TOGETHER
    return np.where(crowded, context.max(initial=0) + 1 + np.arange(len(context)), context)


def _labels(
    vote: np.ndarray, logged: np.ndarray, source: np.ndarray, sources: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(good (R,), known (R,), which rewards say so). One logged value says which it is if all sources of at
    most two values have two together."""
    good, is_labelled = vote > 0, np.zeros(len(vote), bool)
    logged_values = {s: np.unique(logged[(source == s) & ~np.isnan(logged)]) for s in range(sources)}
    common = np.unique(
        np.concatenate([np.empty(0), *(values for values in logged_values.values() if len(values) <= 2)])
    )
    kinds = []
    for s, values in logged_values.items():
        in_source = source == s
        if (vote[in_source] != 0).any():
            kinds.append("vote")
            is_labelled |= in_source & (vote != 0)
            continue
        values = common if len(values) == 1 else values
        if len(values) == 2:
            kinds.append("logged")
            is_labelled |= in_source & ~np.isnan(logged)
            good = np.where(in_source, logged == values[1], good)
    return good, is_labelled, tuple(dict.fromkeys(kinds))


def agreement(labelled: Labelled, name: str) -> RewardAgreement | None:
    """Of one reward, over the labelled replies that it applies to; None where these are not of both kinds."""
    applies = ~np.isnan(labelled.scores[name])
    scores, good, source, unit = (
        values[applies] for values in (labelled.scores[name], labelled.good, labelled.source, labelled.unit)
    )
    if len(set(good.tolist())) < 2:
        return None
    value, influence = _influence(scores, good)
    overall = Agreement(*_interval(value, influence, unit, good), len(scores))
    of_source, middle, pairs, within = {}, 0.0, 0, np.zeros(len(scores))
    for s, source_name in enumerate(labelled.sources):
        in_source = source == s
        if not (weight := int(good[in_source].sum()) * int((~good[in_source]).sum())):
            continue
        source_value, source_influence = _influence(scores[in_source], good[in_source])
        of_source[source_name] = Agreement(
            *_interval(source_value, source_influence, unit[in_source], good[in_source]), int(in_source.sum())
        )
        middle, pairs = middle + weight * source_value, pairs + weight
        within[in_source] = weight * source_influence
    if not pairs:
        return RewardAgreement(overall, None, {}, separates=True)
    middle, within = middle / pairs, within / pairs
    change = abs(value - middle)
    separates = change > APART and change > Z95 * _spread(influence - within, unit)
    return RewardAgreement(
        overall, Agreement(*_interval(middle, within, unit, good), len(scores)), of_source, bool(separates)
    )


def auc(scores: np.ndarray, good: np.ndarray) -> float:
    """P(the score of a good one > that of a bad one) + half of P(equal), (R,) each. NaN without both."""
    return _influence(scores, good)[0]


def auc_with_interval(scores: np.ndarray, good: np.ndarray, unit: np.ndarray) -> tuple[float, float, float]:
    """(AUC, low, high) with a 95 % interval over units (dialogs, contexts); scores, good and the number of
    the unit are (R,) each."""
    return _interval(*_influence(scores, good), unit, good)


def _influence(scores: np.ndarray, good: np.ndarray) -> tuple[float, np.ndarray]:
    """The AUC and what each reply moves it by: the share of the other kind that it beats, minus the AUC, over
    the number of its own kind."""
    values, place = np.unique(scores, return_inverse=True)
    positives, negatives = np.bincount(place, good, len(values)), np.bincount(place, ~good, len(values))
    p, n = positives.sum(), negatives.sum()
    if not p or not n:
        return float("nan"), np.zeros(len(scores))
    below, above = np.cumsum(negatives) - negatives / 2, p - np.cumsum(positives) + positives / 2
    beaten = np.where(good, below[place] / n, above[place] / p)  # (R,)
    value = float(beaten[good].mean())
    return value, (beaten - value) / np.where(good, p, n)


def _spread(influence: np.ndarray, unit: np.ndarray) -> float:
    """Standard error over units (DeLong's for replies one by one, Obuchowski's 1997 for groups of them);
    infinite with one unit."""
    sums = np.bincount(np.unique(unit, return_inverse=True)[1], influence)
    return (
        float(np.sqrt(len(sums) / (len(sums) - 1) * np.square(sums).sum())) if len(sums) > 1 else float("inf")
    )


def _interval(
    value: float, influence: np.ndarray, unit: np.ndarray, good: np.ndarray
) -> tuple[float, float, float]:
    """Symmetric on the scale of log(a / (1 - a)), so that it stays between 0 and 1. At 0 and 1 by the rule of
    three: of u units none went the other way, which up to 3 / u of all may."""
    if not 0 < value < 1:
        units = min(len(np.unique(unit[of_kind])) for of_kind in (good, ~good))
        width = min(1.0, 3 / units)
        return (value, 1 - width, 1.0) if value else (value, 0.0, width)
    middle, half = np.log(value / (1 - value)), Z95 * _spread(influence, unit) / (value * (1 - value))
    with np.errstate(over="ignore"):
        low, high = (1 / (1 + np.exp(-(middle + side * half))) for side in (-1, 1))
    return value, float(low), float(high)
