"""What stands beside the policies in a report."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation.generation import Reply
from rl_dialog.evaluation.results import _references, write_replies
from rl_dialog.evaluation.summary import Answer, Group, RunResult

CONFIG = SimpleNamespace(episodes=3, seed=0, replicates=10)


class Known:
    """A world that says what its best mean return is, and no more."""

    def optimum(self) -> float:
        return 0.75


class Measured(Known):
    @staticmethod
    def reference_returns(episodes: int, seed: int) -> dict[str, list[float]]:
        return {"logs": [1.0] * episodes}


class Away(Known):
    @staticmethod
    def reference_returns(episodes: int, seed: int) -> dict[str, list[float | None]]:
        """Of a world whose server is down: every episode failed."""
        return {"logs": [None] * episodes, "none": []}


def test_the_optimum_of_a_world_is_a_line_of_its_report() -> None:
    found = {world.__name__: _references(CONFIG, world) for world in (object, Known, Measured, Away)}
    means = {name: {line: each.value for line, each in lines.items()} for name, lines in found.items()}
    assert means == {"object": {}, "Known": {"optimum": 0.75}, "Measured": {"logs": 1.0}, "Away": {}}


def test_a_reward_that_failed_in_the_first_run_is_told_of_the_others(tmp_path: Path) -> None:
    """A reward of the user's own that takes replies for numbers."""
    groups = []
    for text in ("none", "3"):
        messages = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": text}]
        answer = Answer("c", Dialog("d", messages), Reply(text, (1,), True), "2")
        run = RunResult(text, text, "bc", answers=[answer])
        run.score({"mine:number": lambda dialog: [float(dialog.messages[-1]["content"])]})
        groups.append(Group(text, "", [run]))
    assert write_replies(tmp_path / "replies.csv", groups) == 2
    with open(tmp_path / "replies.csv", encoding="utf-8", newline="") as file:
        assert [row["reward:mine:number"] for row in csv.DictReader(file)] == ["", "3.0"]
