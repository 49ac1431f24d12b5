"""Bots that talk to each other: the table and the plot by hand, and the whole command on tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pipelines.benchmark import rlhf, self_play
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.self_play import GOALS, Talked, plot, table
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.errors import UserError

EARNED = {"reply_sentiment": 0.5, "question": 0.2, "repetition": -0.1}
ASKING = Talked("psi", "question", 0, EARNED, 2.0, 0.25, 6.0, "What?", 0.4)
TALKED = [
    replace(ASKING, learner="bc", goal=""),
    ASKING,
    replace(ASKING, seed=1, perplexity=4.0, commonest="Why?", share=0.6),
]


def test_a_goal_is_the_weighted_sum_of_its_rewards() -> None:
    assert ASKING.goal_reached("question") == 0.2
    assert ASKING.goal_reached("mix") == pytest.approx(0.3 * 0.5 + 0.2 * 0.2 - 0.5 * 0.1)


def test_the_table_and_the_plot_have_every_policy_and_seed() -> None:
    _, _, clone, asking = table(TALKED)
    assert clone.startswith("| `bc` |  | 0.5 | 0.2 | -0.1 | 2 | 0.25 | 6 |")
    assert "| 3 [2, 4] |" in asking and asking.endswith("| 'Why?', 60 % |")
    panels = plot(TALKED).axes
    assert [axes.get_title(loc="left") for axes in panels] == list(GOALS)
    shown = {line.get_label(): list(line.get_xdata()) for line in panels[1].lines}
    assert shown == {"bc": [2.0], "reinforce": [], "psi": [2.0, 4.0]}


def test_numbers_that_no_run_has() -> None:
    with pytest.raises(UserError, match="self_play: expected seeds, online_rounds and held_out"):
        main(BenchmarkConfig(what="self_play", held_out=0))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "vhred"])
def test_the_command(tmp_path, monkeypatch, capsys, family: str) -> None:
    """Psi learns from as many conversations as REINFORCE, and every reply is judged by all rewards; where the
    clone draws latents, they are learned too."""
    monkeypatch.setattr(rlhf, "DIALOGS", 60)
    monkeypatch.setattr(rlhf, "CLONE_STEPS", 3)
    monkeypatch.setattr(self_play, "STEPS", 3)
    monkeypatch.setattr(self_play, "GOALS", {name: GOALS[name] for name in ("question", "mix")})
    out = tmp_path / "out"
    size = {"seeds": 1, "online_rounds": 2, "held_out": 6, "threads": 1, "output_dir": str(out)}
    main(BenchmarkConfig(what="self_play", family=family, **size))
    latents = ("vhrl joint", "vhrl decoupled", "vhrl manager") if family == "vhred" else ()
    talked = [Talked(**each) for each in json.loads((out / "benchmark.json").read_text())["talked"]]
    assert [(each.learner, each.goal) for each in talked] == [
        ("bc", ""),
        *((learner, goal) for goal in ("question", "mix") for learner in ("reinforce", *latents, "psi")),
    ]
    assert all(set(each.rewards) == set(EARNED) and each.perplexity > 1 for each in talked)
    talks = list((out / "seed0" / "talks" / "talks.jsonl").open())
    rollouts = [
        line for file in (out / "seed0" / "reinforce-mix" / "rollouts").iterdir() for line in file.open()
    ]
    assert len(talks) == 128 == sum(json.loads(line)["meta"]["role"] == "assistant" for line in rollouts)
    assert np.isfinite([each.distinct for each in talked]).all()
    assert "<svg" in (out / "self_play.svg").read_text() and "| `psi` | mix |" in capsys.readouterr().out
    if family == "llama":  # as if it had been killed while psi learned from the mix
        judged, learned = out / "seed0" / "talked.jsonl", out / "seed0" / "reinforce-mix" / "latest"
        before = judged.read_text(), learned.stat().st_mtime_ns
        judged.write_text("".join(before[0].splitlines(keepends=True)[:-1]))
        main(BenchmarkConfig(what="self_play", family=family, **size, resume=True))
        assert (judged.read_text(), learned.stat().st_mtime_ns) == before
