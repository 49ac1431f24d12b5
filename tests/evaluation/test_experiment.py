"""The folders of an experiment, and a report without the runs that cannot be evaluated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_dialog.errors import UserError
from rl_dialog.evaluation.experiment import METRICS_OF_SOME, claim, evaluate_runs


@dataclass(frozen=True)
class Config:
    """As much of `evaluate`'s as it takes."""

    checkpoints: tuple[str, ...]
    output_dir: str


def test_a_run_that_cannot_be_evaluated_is_left_out(tmp_path: Path) -> None:
    def broken(config) -> None:
        if str(tmp_path / "b") in config.checkpoints:
            raise ValueError("not a number")
        (Path(config.output_dir) / "metrics.json").write_text(json.dumps(config.checkpoints))

    runs = tuple(str(tmp_path / name) for name in "abc")
    for name in ("a", "b", "c", "report"):
        (tmp_path / name).mkdir()
    _, errors = evaluate_runs(Config(runs, str(tmp_path / "report")), broken)
    assert (
        errors == {runs[1]: "ValueError: not a number"}
        and "Traceback" in (tmp_path / "b" / "error.txt").read_text()
    )
    assert json.loads((tmp_path / "report" / METRICS_OF_SOME).read_text()) == [runs[0], runs[2]]
    assert not (tmp_path / "report" / "metrics.json").exists()  # so it is tried again
    with pytest.raises(ValueError, match="not a number"):
        evaluate_runs(Config(runs[1:2], str(tmp_path / "report")), broken)


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="no comparison made it"):
        claim(tmp_path / "data", "manifest.json", {"a": 1})
    assert (tmp_path / "data" / "mine.txt").read_text() == "mine"


def test_a_folder_is_kept_as_long_as_its_recipe_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert not claim(run, "result.json", {"a": 1})
    run.mkdir()
    (run / "half").write_text("")
    assert not claim(run, "result.json", {"a": 1}) and (run / "half").exists()  # killed: goes on
    (run / "result.json").write_text("{}")
    assert claim(run, "result.json", {"a": 1})
    assert not claim(run, "result.json", {"a": 2}) and not run.exists()
