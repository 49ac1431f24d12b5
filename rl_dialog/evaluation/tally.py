"""What became of many episodes: the mean return and its error, and how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.cells import cell_len  # as wide as a terminal draws it

from rl_dialog.data.schema import ENDS
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.intervals import rounded


@dataclass
class Tally:
    """Counts episodes without keeping them."""

    returns: list[float] = field(default_factory=list)  # of those that have one
    ends: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # why episodes failed
    replies: int = 0

    def add(self, episode: Episode) -> None:
        """One more."""
        self.ends[episode.end] += 1
        if episode.end == "failed":
            reason = str(episode.dialog.meta.get("failed") or "no reason given")
            self.failures[" ".join(reason.split())[:200]] += 1
        self.replies += len(episode.replies)
        if episode.total is not None:
            self.returns.append(episode.total)

    def join(self, other: Tally) -> None:
        """The episodes of another tally."""
        self.returns += other.returns
        self.ends += other.ends
        self.failures += other.failures
        self.replies += other.replies

    def figures(self) -> dict[str, Any]:
        """`return`, the mean over the `n` episodes that have one, None without any; `stderr`, its standard
        error, deviation / sqrt(n), None of fewer than two; the episodes of each end; replies per episode;
        where episodes failed the commonest reasons."""
        n, played = len(self.returns), sum(self.ends.values())
        mean = float(np.mean(self.returns)) if n else None
        above_the_first = np.subtract(self.returns, self.returns[:1])  # equal returns have no error at all
        error = float(np.std(above_the_first, ddof=1) / np.sqrt(n)) if n > 1 else None
        return {
            "return": rounded(mean),
            "stderr": rounded(error),
            "n": n,
            "episodes": played,
            **{end: self.ends[end] for end in ENDS},
            "replies_per_episode": round(self.replies / played, 3) if played else None,
            **({"failures": dict(self.failures.most_common(3))} if self.failures else {}),
        }


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.2e}"


def table(rows: Mapping[str, Tally]) -> str:
    """A line for each player."""
    width = max(map(cell_len, ("player", *rows)))
    lines = [f"{'player':<{width}}   return   stderr       n  " + "  ".join(f"{end:>10}" for end in ENDS)]
    for name, tally in rows.items():
        found = tally.figures()
        mean, error = (f"{_short(found[key]):>8}" for key in ("return", "stderr"))
        ends = "  ".join(f"{found[end]:>10}" for end in ENDS)
        lines.append(f"{name}{' ' * (width - cell_len(name))} {mean} {error} {found['n']:>7}  {ends}")
    for name, tally in rows.items():
        lines += [f"{name}: {n} failed: {reason}" for reason, n in tally.failures.most_common(3)]
    return "\n".join(lines)
