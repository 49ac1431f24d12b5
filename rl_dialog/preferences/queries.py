"""Which pairs of clips are asked about: the clips at hand, the choice among their pairs, and the bounded pool
of open queries.

clips = ClipPool(1000)
broker = QueryBroker(log, QuerySettings(selection="variance"), seed=0)
clips.add(id)                                                       # never waits
broker.refill(clips.ids(), wanted=schedule.labels_wanted(steps), returns=lambda: returns)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal, get_args

import numpy as np
import tyro

from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import NewQuery
from rl_dialog.preferences.segments import Clip

Pair = tuple[str, str]  # with the smaller id first
Selection = Literal["random", "variance", "informative"]
ANY = 4  # with informative one pair in so many is any
TRIES = 20  # draws per wanted pair before all pairs are listed


class ClipPool:
    """At most `capacity` ids of clips: the newest, or a sample in which each that ever came has the same
    chance (Vitter 1985, algorithm R).

    `add` never waits; what it drops is counted. Raises UserError for fewer than two places.
    """

    def __init__(self, capacity: int, *, keep: Literal["newest", "sample"] = "newest", seed: int = 0) -> None:
        if capacity < 2:
            raise UserError(f"expected room for at least two clips, got {capacity}")
        self.capacity, self.keep = capacity, keep
        self.slots: list[str] = []
        self.seen = 0
        self._order: dict[str, None] = {}  # of arrival
        self._rng = np.random.default_rng(seed)

    def add(self, id: str) -> None:
        """A clip that is here already is left where it is."""
        if id in self._order:
            return
        place = self.seen % self.capacity if self.keep == "newest" else int(self._rng.integers(self.seen + 1))
        self.seen += 1
        if len(self.slots) < self.capacity:
            self.slots.append(id)
        elif place < self.capacity:
            del self._order[self.slots[place]]
            self.slots[place] = id
        else:
            return
        self._order[id] = None

    @property
    def dropped(self) -> int:
        """Clips that came and are no longer here, or never were."""
        return self.seen - len(self.slots)

    def ids(self) -> list[str]:
        """In the order in which they came, the newest last."""
        return list(self._order)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class QuerySettings:
    """What is asked. Raises UserError for a number out of its range."""

    selection: Selection = "random"
    """any pair not yet asked about; those about which the members of the reward's ensemble disagree most; or
    these, and before there is a reward those whose clips look least alike, with a quarter of any"""
    candidates: int = 10
    """with variance and informative: so many times as many pairs are drawn, of which the highest are kept"""
    recency: float = 0.0
    """share of the pairs in which one clip is among the newest"""
    newest: int = 50
    """with recency: how many clips are the newest"""
    prefetch: int = 4
    """queries that wait for each labeller, while as many are being answered: the pool holds 2 x labellers x
    prefetch"""
    expire: float = 600.0
    """seconds after which an unanswered query is offered no more: its clips are old by then"""
    task: Annotated[str, tyro.conf.arg(aliases=["--task"])] = ""
    """what labellers are told; by default what the environment says"""

    def __post_init__(self) -> None:
        if self.selection not in get_args(Selection):
            raise UserError(f"expected random, variance or informative as selection, got {self.selection!r}")
        if (
            self.candidates < 1
            or self.newest < 1
            or self.prefetch < 1
            or not 0 <= self.recency <= 1
            or not self.expire > 0
        ):
            raise UserError(
                "expected candidates, newest and prefetch of at least 1, recency in [0, 1], expire above 0, "
                f"got {self}"
            )


class QueryBroker:
    """Keeps the log's pool of open queries filled, never with a pair that was asked about before: the log
    remembers them over restarts.

    What is drawn depends on `seed` and on how many pairs were asked about, so that a resumed run goes on as
    it would have.
    """

    def __init__(self, log: LabelLog, settings: QuerySettings | None = None, *, seed: int = 0) -> None:
        self.log, self.settings, self.seed = log, settings or QuerySettings(), seed
        self.asked = log.pairs()

    def refill(
        self,
        clips: Sequence[str],
        *,
        wanted: int,
        pool: int | None = None,
        labellers: int = 1,
        returns: Callable[[], np.ndarray] | None = None,
        looks: Callable[[], np.ndarray] | None = None,
        reward_version: int = 0,
        about: Mapping[str, Any] | None = None,
        store: Callable[[Iterable[str]], None] = lambda ids: None,
    ) -> list[str]:
        """Expires old queries and adds new ones until `pool` are open (by default what the settings say for
        so many labellers), but no more than can become `wanted` labels; the ids of the new ones. `clips`
        (newest last) and what `returns` and `looks` give as in `choose`; they are called only if there is
        something to choose. `store` is called with the clips of the new queries before they are offered: it
        writes their files.

        A late answer to a query that has expired counts, although another one was asked in its place:
        people's work is not thrown away.
        """
        self.log.expire(self.settings.expire)
        counts = self.log.counts()
        open = counts["waiting"] + counts["leased"]
        room = (2 * labellers * self.settings.prefetch if pool is None else pool) - open
        number = min(room, wanted - counts["labels"] - open)
        if number < 1:
            return []
        pairs = self.choose(clips, number, returns=returns and returns(), looks=looks and looks())
        fields = {"task": self.settings.task, "reward_version": reward_version, "about": about or {}}
        store(dict.fromkeys(id for pair, _ in pairs for id in pair))
        ids = self.log.add_queries(NewQuery(*pair, priority=priority, **fields) for pair, priority in pairs)
        self.asked.update(pair for pair, _ in pairs)
        return ids

    def choose(
        self,
        clips: Sequence[str],
        number: int,
        *,
        returns: np.ndarray | None = None,
        looks: np.ndarray | None = None,
    ) -> list[tuple[Pair, float]]:
        """Up to `number` new pairs, each with its priority: the variance of what the members predict, or 0.
        Both clips of a pair are for training, or both for validation, in the proportion in which the log
        divides clips.

        Args:
            clips: different ids in the order in which they came, the newest last.
            returns: (M, len(clips)) what each of M members predicts the clips to be worth. None: no reward is
                known yet, pairs are random, or by their looks.
            looks: (len(clips), F) numbers by which clips can be told apart.

        Raises UserError for clips given twice and for returns of another shape.
        """
        place = {id: i for i, id in enumerate(clips)}
        if len(place) != len(clips):
            raise UserError(f"expected different clips, got {len(clips) - len(place)} of them twice")
        if returns is not None and (returns.ndim != 2 or returns.shape[1] != len(clips)):
            raise UserError(f"expected returns of shape (members, {len(clips)}), got {returns.shape}")
        if number < 1:
            return []
        rng = np.random.default_rng([self.seed, len(self.asked)])
        sides = [[id for id in clips if self.log.is_validation(id) == side] for side in (False, True)]
        for_validation = int(rng.binomial(number, self.log.validation)) if len(sides[True]) > 1 else 0
        score = self._score(place, returns, looks)
        validation = self._choose(sides[True], for_validation, rng, score)
        training = self._choose(sides[False], number - len(validation), rng, score)
        short = (
            number - len(validation) - len(training)
        )  # more validation pairs, where the others are used up
        chosen_pairs = {pair for pair, _ in validation}
        return training + validation + self._choose(sides[True], short, rng, score, chosen_pairs)

    def _score(
        self, place: Mapping[str, int], returns: np.ndarray | None, looks: np.ndarray | None
    ) -> Callable[[Sequence[Pair]], np.ndarray] | None:
        """How much is hoped of each pair; None: nobody knows."""
        places = lambda pairs: np.array([(place[one], place[other]) for one, other in pairs])  # noqa: E731
        if returns is not None and self.settings.selection != "random":
            return lambda pairs: preference_variance(returns, places(pairs))
        if looks is not None and self.settings.selection == "informative":
            return lambda pairs: np.abs(np.diff(looks[places(pairs)], axis=1)).mean((1, 2))
        return None

    def _choose(
        self,
        clips: Sequence[str],
        number: int,
        rng: np.random.Generator,
        score: Callable[[Sequence[Pair]], np.ndarray] | None,
        excluded: Set[Pair] = frozenset(),
    ) -> list[tuple[Pair, float]]:
        if number < 1:
            return []
        draw_count = number * self.settings.candidates if score else number
        recent = int(rng.binomial(draw_count, self.settings.recency))
        pairs = draw_pairs(clips[-self.settings.newest :], clips, recent, rng, self.asked | excluded)
        pairs += draw_pairs(clips, clips, draw_count - len(pairs), rng, self.asked | excluded | set(pairs))
        if not score or not pairs:
            return [(pair, 0.0) for pair in pairs[:number]]
        hope = score(pairs)
        anyway = min(number, len(pairs)) // ANY if self.settings.selection == "informative" else 0
        best = np.argsort(-hope[anyway:], kind="stable")[: number - anyway] + anyway
        return [(pairs[i], float(hope[i])) for i in (*range(anyway), *best)]


def looks_of(clips: Sequence[Clip]) -> np.ndarray:
    """Numbers by which clips can be told apart: means and deviations of what is seen in them, and the mean of
    what is done, each ranked among the clips, between 0 and 1, so that no unit and no rare extreme counts for
    more # (clips, F)"""
    rows = []
    for clip in clips:
        seen, done = clip.observations[: clip.steps], clip.actions[: clip.steps]
        seen = seen[:, ::6, ::6, -1] if seen.ndim == 4 else seen  # of pictures a coarse one, the newest
        seen = seen.reshape(clip.steps, -1).astype(np.float32)
        rows.append(np.concatenate([seen.mean(0), seen.std(0), np.atleast_1d(done.mean(0))]))
    order = np.argsort(np.argsort(np.stack(rows), axis=0, kind="stable"), axis=0)
    return order / max(1, len(rows) - 1)


def preference_variance(returns: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """(N,) the variance over the members of P(first preferred) = sigmoid(R1 - R2).

    Args:
        returns: (M, clips) of each member.
        pairs: (N, 2) places of clips.
    """
    difference = returns[:, pairs[:, 0]].astype(np.float64) - returns[:, pairs[:, 1]]  # (M, N)
    return (0.5 + 0.5 * np.tanh(difference / 2)).var(0)


def draw_pairs(
    firsts: Sequence[str],
    seconds: Sequence[str],
    number: int,
    rng: np.random.Generator,
    used: Set[Pair] = frozenset(),
) -> list[Pair]:
    """Up to `number` different pairs of two different clips, one of `firsts` and one of `seconds`, that are
    not in `used`; all of them where there are no more."""
    pairs: dict[Pair, None] = {}
    if number < 1 or not firsts:
        return []
    for i, j in zip(
        rng.integers(len(firsts), size=TRIES * number),
        rng.integers(len(seconds), size=TRIES * number),
        strict=True,
    ):
        pair = _ordered(firsts[i], seconds[j])
        if pair not in pairs and pair[0] != pair[1] and pair not in used:
            pairs[pair] = None
            if len(pairs) == number:
                return list(pairs)
    all_pairs = {_ordered(one, other): None for one, other in product(firsts, seconds) if one != other}
    unused = [pair for pair in all_pairs if pair not in pairs and pair not in used]
    return [*pairs, *(unused[i] for i in rng.permutation(len(unused))[: number - len(pairs)])]


def _ordered(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)
