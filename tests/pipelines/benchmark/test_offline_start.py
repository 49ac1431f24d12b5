"""What an offline start saves: by hand arithmetic, and the whole command on tiny sizes."""

from __future__ import annotations

import json

import pytest

from pipelines.benchmark import offline_start
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.offline_start import Curve, of_seed, plot, reached, saved, table
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.errors import UserError

CURVES = [
    Curve("bc", 0, [0, 100, 200], [0.0, 0.5, 1.0]),
    Curve("psi", 0, [0, 100, 200], [0.8, 0.6, 1.2]),
    Curve("bc", 1, [0, 100, 200], [0.0, 1.0, 0.6]),
    Curve("psi", 1, [0, 100, 200], [0.7, 0.9, 1.0]),
    Curve("ilql", 0, [0, 100, 200], [0.2, 0.4, 0.9]),
]


def test_a_level_is_reached_on_the_line_between_two_measurements() -> None:
    assert reached(CURVES[0], 0.75) == 150 and reached(CURVES[0], 0.5) == 100
    assert reached(CURVES[1], 0.8) == 0 and reached(CURVES[1], 0.9) == pytest.approx(150)
    assert reached(CURVES[2], 0.6) == pytest.approx(60)  # the first time, though it falls again
    assert reached(CURVES[4], 1.0) is None


def test_a_start_saves_what_the_clone_of_its_seed_needed_more() -> None:
    first, second = of_seed(CURVES, 0), of_seed(CURVES, 1)
    assert saved(first, "psi") == pytest.approx(200 - (100 + 100 * 0.4 / 0.6))
    assert saved(second, "psi") == pytest.approx(60)
    assert saved(first, "ilql") is None and saved(first, "bc") == 0


def test_the_table_and_the_plot_have_every_seed() -> None:
    rows = table(CURVES, {"psi": [33.3, 60.0], "ilql": [None]})
    assert rows[2] == "| bc | +0.00 [+0.00, +0.00] | +0.75 [+0.50, +1.00] | +0.80 [+0.60, +1.00] |  |"
    assert rows[3].endswith("| +1.10 [+1.00, +1.20] | 33, 60 |") and rows[4].endswith("| never there |")
    [axes] = plot(CURVES).axes
    assert len(axes.lines) == 5 and len(axes.get_legend().get_texts()) == 3


def test_numbers_that_no_run_has() -> None:
    with pytest.raises(UserError, match="offline_start: expected seeds, online_rounds and held_out"):
        main(BenchmarkConfig(what="offline_start", seeds=0))


@pytest.mark.slow
@pytest.mark.long
def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(offline_start, "DIALOGS", 60)
    monkeypatch.setattr(offline_start, "STEPS", 3)
    monkeypatch.setattr(offline_start, "EPISODES", 4)
    out = tmp_path / "out"
    size = {"seeds": 1, "online_rounds": 2, "threads": 1, "output_dir": str(out)}
    found = main(BenchmarkConfig(what="offline_start", **size))
    report = json.loads((out / "benchmark.json").read_text())
    assert [(each["start"], each["conversations"]) for each in report["curves"]] == [
        (start, [0, 64, 128]) for start in ("bc", "ilql", "psi")
    ]
    assert set(found["saved"]) == {"ilql", "psi"} and "<svg" in (out / "offline_start.svg").read_text()
    assert "| psi |" in capsys.readouterr().out
