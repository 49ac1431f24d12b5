"""What labellers do with the log: at most so many leases each, and nothing twice."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.exceptions import HTTPException

from rl_dialog.preferences.label_log import LabelLog, Query
from rl_dialog.preferences.labels import Remarks

MOST_LEASES = 8  # of one labeller at a time: two in each of four windows
REMEMBERED = 10_000  # answers to requests that may be sent again


class Desk:
    """The log as labellers use it."""

    def __init__(self, log: LabelLog, seconds: float) -> None:
        self.log, self.seconds = log, seconds
        self.leases: defaultdict[str, dict[str, float]] = defaultdict(
            dict
        )  # labeller -> query -> when the lease ends
        self.done: OrderedDict[tuple[str, str], tuple[Any, dict[str, Any]]] = (
            OrderedDict()
        )  # (labeller, key) -> what was asked, what was answered
        self.turns: defaultdict[str, threading.Lock] = defaultdict(
            threading.Lock
        )  # of each labeller, one request after the other

    def lease(self, who: str) -> Query | None:
        with self.turns[who]:
            now = time.monotonic()
            held = self.leases[who] = {query: end for query, end in self.leases[who].items() if end > now}
            if len(held) >= MOST_LEASES:
                raise HTTPException(
                    429, f"{len(held)} pairs are open in your windows: answer one or close a window"
                )
            goal = self.log.plan.goal
            if goal and self.log.own_counts(who)["answers"] + len(held) >= goal:
                return None
            pair = self.log.lease(who, self.seconds)
            if pair is not None:
                held[pair.id] = now + self.seconds
            return pair

    def renew(self, who: str, queries: list[str]) -> dict[str, list[str]]:
        """Which of them are still the labeller's, and which of the others they have answered themselves."""
        with self.turns[who]:
            kept = [query for query in queries if self.log.renew(query, who, self.seconds)]
            self._drop(who, queries)
            self.leases[who] |= dict.fromkeys(kept, time.monotonic() + self.seconds)
            others = [query for query in queries if query not in kept]
            return {"held": kept, "answered": [one for one in others if self.log.answer_of(one, who)]}

    def release(self, who: str, queries: list[str]) -> None:
        with self.turns[who]:
            for query in queries:
                self.log.renew(query, who, 0.0)
            self._drop(who, queries)

    def answer(self, who: str, query: str, choice: str, remarks: Remarks) -> dict[str, Any]:
        """The label that stands. `earlier`: what the labeller had said of the pair before, in another window,
        where that is something else: then this answer is not kept."""
        try:
            label = self.log.answer(query, who, choice, remarks)
        except KeyError as error:
            raise HTTPException(404, str(error.args[0])) from None
        except ValueError as error:
            raise HTTPException(409, str(error)) from None
        self._drop(who, [query])
        stands = self.log.stands_instead(query, who, choice, remarks)
        earlier = {"choice": stands.choice, **asdict(stands.remarks)} if stands else None
        return {"label": label.number, "query": label.query, "earlier": earlier}

    def undo(self, who: str, query: str | None, request: str) -> Query | None:
        pair = self.log.undo(who, self.seconds, query_id=query, request=request)
        if pair is not None:
            self.leases[who][pair.id] = time.monotonic() + self.seconds
        return pair

    def once(self, who: str, key: str, asked: Any, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `act` returns, or returned when the same labeller sent the same key before."""
        with self.turns[who]:
            if key and (who, key) in self.done:
                before, answered = self.done[who, key]
                if before != asked:
                    raise HTTPException(422, "this Idempotency-Key was sent with another request before")
                return answered
            answered = act()
            if key:
                self.done[who, key] = asked, answered
                if len(self.done) > REMEMBERED:
                    self.done.popitem(last=False)
            return answered

    def _drop(self, who: str, queries: list[str]) -> None:
        for query in queries:
            self.leases[who].pop(query, None)
