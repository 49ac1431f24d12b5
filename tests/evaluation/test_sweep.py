"""What the report of a sweep ranks, and by what: points with all of their seeds, by a figure that knows which
side is better."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_dialog.cluster.sweep_experiment import SweepExperiment
from rl_dialog.errors import UserError
from rl_dialog.evaluation import sweep_plots
from rl_dialog.evaluation.sweep import (
    Trial,
    _best_trial,
    _curves,
    _trained_change,
    _warned,
    _write_tensorboard,
    headline_of,
    rank,
)

SWEEP = SimpleNamespace(
    metric="eval/loss", mode="min", figure="perplexity", seeds=(0, 1), start="--max_steps 1"
)


def trial(
    point: str, seed: int, *, how: str = "ended", loss: float = 1.0, metrics: str = "", **changes: Any
) -> Trial:
    return Trial(
        point,
        {"method": point},
        seed,
        f"trials/{point}-seed{seed}",
        how,
        [{"step": 5, "eval/loss": loss}],
        metrics=metrics,
        **changes,
    )


def evaluation(folder: Path, values: dict[str, float]) -> str:
    """metrics.json with the perplexity of each point."""
    figures = {
        name: {"perplexity": {"value": value, "low": value - 0.1, "high": value + 0.1}}
        for name, value in values.items()
    }
    groups = [{"group": name, "label": name, "which": "", "figures": row} for name, row in figures.items()]
    changes = {name: {"baseline": "bc", "figures": row} for name, row in figures.items()}
    (folder / "metrics.json").write_text(json.dumps({"groups": groups, "differences": changes}))
    return str(folder / "metrics.json")


def test_a_lower_perplexity_is_better_and_what_has_not_all_of_its_seeds_comes_last(tmp_path: Path) -> None:
    path = evaluation(tmp_path, {"worse": 3.0, "better": 2.0, "half": 1.0})
    trials = [trial(name, seed, metrics=path) for name in ("worse", "better") for seed in (0, 1)]
    trials += [trial("half", 0, metrics=path), trial("fallen", 0, how="stopped", loss=0.1)]
    ranked = rank(SWEEP, trials)
    assert [point.name for point in ranked[:2]] == ["better", "worse"] and {
        point.name for point in ranked[2:]
    } == {"half", "fallen"}
    assert [point.ended for point in ranked] == [True, True, False, False]
    assert headline_of(SWEEP, ranked) == "perplexity" and ranked[0].headline.value == 2.0


def test_a_point_that_was_not_evaluated_never_beats_one_that_was(tmp_path: Path) -> None:
    path = evaluation(tmp_path, {"measured": 3.0})
    trials = [trial("measured", seed, metrics=path) for seed in (0, 1)] + [
        trial("lost", seed, metrics=path, loss=0.0) for seed in (0, 1)
    ]
    assert [point.name for point in rank(SWEEP, trials)] == ["measured", "lost"]


def test_without_an_evaluation_the_metric_ranks_and_names_itself() -> None:
    ranked = rank(
        SWEEP,
        [trial(name, seed, loss=loss) for name, loss in (("high", 2.0), ("low", 1.0)) for seed in (0, 1)],
    )
    assert [point.name for point in ranked] == ["low", "high"] and headline_of(SWEEP, ranked) == "eval/loss"


def test_a_figure_that_was_not_measured_is_an_error(tmp_path: Path) -> None:
    path = evaluation(tmp_path, {"a": 3.0})
    with pytest.raises(
        UserError, match="figure: expected one that the evaluation measured, perplexity, got 'retrun'"
    ):
        rank(
            SimpleNamespace(**{**vars(SWEEP), "figure": "retrun"}),
            [trial("a", seed, metrics=path) for seed in (0, 1)],
        )


def test_without_a_start_nothing_is_a_difference_to_it(tmp_path: Path) -> None:
    path = evaluation(tmp_path, {"a": 3.0})
    trials = [trial("a", seed, metrics=path) for seed in (0, 1)]
    assert (
        rank(SWEEP, trials)[0].changes
        and not rank(SimpleNamespace(**{**vars(SWEEP), "start": ""}), trials)[0].changes
    )


def test_a_mix_changes_by_its_normalised_parts() -> None:
    """2 (.5 / .25) - 1 (.3 / 1.) = 3.7: what training's own sum of rewards changed by."""
    [point] = rank(
        SWEEP,
        [trial("a", seed, rewards={"vote": 2.0, "length": -1.0}, scales={"vote": 0.25}) for seed in (0, 1)],
    )
    point.changes.update(
        {"reward/vote": SimpleNamespace(value=0.5), "reward/length": SimpleNamespace(value=0.3)}
    )
    assert _trained_change(point) == pytest.approx(3.7)


def test_trials_that_were_over_optimised_while_they_were_watched_are_named() -> None:
    """By the first step at which it was seen; sweeps whose trials cannot tell say nothing."""
    calm, wild = trial("calm", 0), trial("wild", 0)
    assert _warned(SWEEP, rank(SWEEP, [calm])) is None
    calm.reports[0]["eval/over_optimised"] = 0.0
    assert _warned(SWEEP, rank(SWEEP, [calm])).notes == ["none"]
    wild.reports[:] = [
        {"step": step, "eval/loss": 1.0, "eval/over_optimised": float(step > 5)} for step in (5, 10, 15)
    ]
    assert _warned(SWEEP, rank(SWEEP, [calm, wild])).notes == ["wild-seed0: step 10"]


def test_reports_without_the_metric_are_passed_over(tmp_path: Path) -> None:
    """A return is not measured where every episode failed; what was measured before counts."""
    lower, higher, never = trial("a", 0, loss=1.0), trial("a", 1, loss=3.0), trial("never", 0)
    for one in (lower, higher):
        one.reports.append({"step": 10, "eval/failed": 1.0})
    never.reports[:] = [{"step": 5, "eval/failed": 1.0}]
    ranked = rank(SWEEP, [never, lower, higher])
    assert [point.name for point in ranked] == ["a", "never"]
    assert ranked[0].headline.value == 2.0 and ranked[1].headline is None
    assert _best_trial(SWEEP, ranked[0]) is lower and _best_trial(SWEEP, ranked[1]) is never
    assert _curves(SWEEP, ranked).plot
    _write_tensorboard(tmp_path / "board", SWEEP, ranked)
    assert {folder.name for folder in (tmp_path / "board").iterdir()} == {"a-seed0", "a-seed1", "never-seed0"}


def test_a_search_is_told_the_last_metric_there_was() -> None:
    asked = SimpleNamespace(sweep=SWEEP)
    one, never = trial("a", 0, loss=2.0), trial("a", 1)
    one.reports.append({"step": 10, "eval/failed": 1.0})
    never.reports[:] = [{"step": 5, "eval/failed": 1.0}]
    assert SweepExperiment._reached(asked, [one, never]) == 2.0
    assert SweepExperiment._reached(asked, [never]) is None


def test_points_without_a_spread_are_drawn_whatever_the_unit() -> None:
    """A number that one method alone has, and returns that are all the same, both of them large."""
    values = [{"method": "ilql", "max_steps": 20_000}, {"method": "bcq"}]
    points = [
        SimpleNamespace(kind=each["method"], values=each, headline=SimpleNamespace(value=1e6))
        for each in values
    ]
    with np.errstate(all="raise"):
        assert sweep_plots.parallel(points, ["method", "max_steps"], "return").startswith(b"\x89PNG")
