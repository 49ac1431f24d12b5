"""How often a task-oriented policy did what its users want: figures of played dialogs with their intervals.

success, success_strict, complete       the user got all that it wanted; envs/multiwoz/README.md defines them
book_rate                               share of a booking's wishes that what was booked meets
inform_precision, _recall, _f1          of slots that were asked for, unrequested ones counted as published
inform_precision_all_slots, _f1_...     every unrequested slot counts
turns, return                           of the system, and what it earned
success/hotel                           of the dialogs with that domain
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_dialog.evaluation.intervals import Measure, estimate

Figures = dict[
    str, dict[str, Any]
]  # name -> value, low, high (the 95 % interval over dialogs), dialogs that it applies to


def task_figures(outcomes: Sequence[Any], published: Sequence[tuple[float, float, float] | None]) -> Figures:
    """Every figure of dialogs with these outcomes (envs.multiwoz.Outcome, or what has the same fields).

    `published` has precision, recall and F1 of each, None where nothing was requested.
    """
    counts = [scores or (None, None, None) for scores in published]
    columns: dict[str, Iterable[float | None]] = {
        "success": [outcome.success for outcome in outcomes],
        "success_strict": [outcome.success_strict for outcome in outcomes],
        "complete": [outcome.complete for outcome in outcomes],
        "book_rate": [outcome.book_rate for outcome in outcomes],
        "inform_precision": [precision for precision, _, _ in counts],
        "inform_recall": [recall for _, recall, _ in counts],
        "inform_f1": [f1 for _, _, f1 in counts],
        "inform_precision_all_slots": [outcome.inform_precision for outcome in outcomes],
        "inform_f1_all_slots": [outcome.inform_f1 for outcome in outcomes],
        "turns": [outcome.turns for outcome in outcomes],
        "return": [outcome.total for outcome in outcomes],
    }
    for domain in dict.fromkeys(domain for outcome in outcomes for domain in outcome.domains):
        columns[f"success/{domain}"] = [outcome.domains.get(domain) for outcome in outcomes]
    return {name: _figure(Measure.mean(list(values))) for name, values in columns.items()}


def _figure(measure: Measure) -> dict[str, Any]:
    """Numbers as JSON has them."""
    figure = estimate([measure])
    if figure is None:
        return {"value": None, "low": None, "high": None, "dialogs": 0}
    low, high = (None if end is None else round(end, 4) for end in (figure.low, figure.high))
    return {
        "value": round(figure.value, 4),
        "low": low,
        "high": high,
        "dialogs": int(measure.denominator.sum()),
    }


def headline(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The values over all domains."""
    return {name: figure["value"] for name, figure in figures.items() if "/" not in name}


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures, one a line."""
    rows = [f"{'measure':<28}{'mean':>9}   95 % interval        dialogs"]
    for name, figure in figures.items():
        if figure["value"] is not None:
            interval = "" if figure["low"] is None else f"[{figure['low']:.3f}, {figure['high']:.3f}]"
            rows.append(f"{name:<28}{figure['value']:>9.3f}   {interval:<20}{figure['dialogs']:>8}")
    return "\n".join(rows)
