"""The branching Wordle check: from games to curves on tiny sizes, and what its tables and its plot say."""

from __future__ import annotations

import json

import pytest

from pipelines.benchmark import wordle
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.settings import BenchmarkConfig
from pipelines.benchmark.wordle import Curve, plot, table
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import load_for_decoding
from rl_dialog.evaluation.q_rank import q_rank, read_pairs
from rl_dialog.models.language_model import ModelConfig


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    """The curves end with what the checkpoints say of the pairs that lie beside them."""
    monkeypatch.setattr(wordle, "MODEL", ModelConfig(layers=1, width=8, attention_heads=2, context=128))
    monkeypatch.setattr(wordle, "PAIRS", 60)
    out = tmp_path / "wordle"
    size = {"games": 60, "steps": 4, "runs": 2, "threads": 1}
    found = main(BenchmarkConfig(what="wordle", **size, output_dir=str(out)))
    report, printed = json.loads((out / "benchmark.json").read_text()), capsys.readouterr().out
    assert found["plot"] == str(out / "wordle.svg") and "<svg" in (out / "wordle.svg").read_text()
    assert [(curve["method"], curve["seed"]) for curve in report["curves"]] == [
        ("ilql", 0),
        ("sarsa", 0),
        ("ilql", 1),
        ("sarsa", 1),
    ]
    for curve in report["curves"]:
        assert curve["steps"] == [1, 2, 3, 4] and set(curve["shares"]) == {"initial", "branch"}
        place = out / f"{curve['method']}-seed{curve['seed']}" / "checkpoint-4"
        pairs = read_pairs(out / f"logs-seed{curve['seed']}" / "pairs.jsonl")
        ranked = q_rank(load_for_decoding(place), load_tokenizer(place), pairs)
        assert {kind: shares[-1] for kind, shares in curve["shares"].items()} == {
            kind: figures["target"][-1] for kind, figures in ranked.items()
        }
    assert f"| `ilql` | {report['ends']['ilql']['initial'][0]:.3f}, " in printed
    assert found["ranked_first"]["sarsa"]["branch"] == pytest.approx(
        sum(report["ends"]["sarsa"]["branch"]) / 2
    )


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"games": 0}, {"steps": 0}, {"tau": 1.0}, {"seed": -1}])
def test_numbers_that_no_run_has(wrong):
    with pytest.raises(UserError, match="wordle: expected runs, games and steps"):
        main(BenchmarkConfig(what="wordle", **wrong))


def test_a_table_and_a_plot_of_two_seeds():
    ends = {
        "ilql": {"initial": [0.91, 0.95], "branch": [1.0, 0.99]},
        "sarsa": {"initial": [0.0], "branch": []},
    }
    head, _, ilql, sarsa = table(ends)
    assert head.startswith("| method | the expert's opening above a mediocre one |")
    assert ilql == "| `ilql` | 0.910, 0.950 | 1.000, 0.990 |" and sarsa == "| `sarsa` | 0.000 |  |"
    shares = {"initial": [0.1, 0.9], "branch": [0.5, 1.0]}
    curves = [Curve(name, seed, [2, 4], shares, 1.0) for name in ("ilql", "sarsa") for seed in (0, 1)]
    first, second = plot(curves).axes
    assert len(first.lines) == 8 and len(second.lines) == 6  # a mean and two seeds of each method, two bars
