"""What stands beside the policies in a report."""

from __future__ import annotations

from types import SimpleNamespace

from rl_dialog.evaluation.results import _references

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
