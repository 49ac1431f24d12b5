"""How the results table reads, row by row, and its plot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import ComparedTask, FinishedRun, replace_table, to_markdown, to_svg


def figure(value: float | None, low: float | None = None, high: float | None = None) -> dict:
    return {"value": value, "low": low, "high": high, "runs": 2, "units": 9}


def group(name: str, which: str, **figures) -> dict:
    return {
        "label": f"{name} ({which})" if which else name,
        "group": name,
        "which": which,
        "figures": figures,
    }


METRICS = {
    "groups": [
        group("bc", "best", critic=figure(0.5, 0.4, 0.6), perplexity=figure(2.0)),
        group("bc", "last", critic=figure(0.45, 0.35, 0.55), perplexity=figure(3.0)),
        group("ilql", "", critic=figure(0.75, 0.7, 0.8), perplexity=figure(None)),
    ],
    "references": {"optimum": figure(0.9)},
    "differences": {"ilql": {"baseline": "bc (best)", "figures": {"critic": figure(0.25, 0.05, 0.4)}}},
}
RUNS = (
    FinishedRun("bc", 0, 60.0),
    FinishedRun("bc", 1, None),
    FinishedRun("ilql", 0, 30.0),
    FinishedRun("ilql", 1, None, "ValueError: too | hot"),
)
TASK = ComparedTask("t", "Taskmaster", ("critic", "perplexity"), "Ratings.", RUNS, METRICS)


def test_a_table_row_by_row() -> None:
    lines = to_markdown([TASK], ["bc", "ilql", "psi"], "the command").splitlines()
    assert lines[0] == "the command"
    head = (
        "| method | Taskmaster: pairwise accuracy, best | last | perplexity (policy), last | seeds | minutes "
        "per run |"
    )
    bc = "| `bc` | 50.0 % [40.0, 60.0] | 45.0 % [35.0, 55.0] | 3.00 | 2 | 1.0 |"
    ilql = "| `ilql` | as last | **75.0 % [70.0, 80.0]<br>Δ +25.0 points [+5.0, +40.0]** | inf | 1 | 0.5 |"
    assert [lines[2], *lines[4:8]] == [
        head,
        bc,
        ilql,
        "| `psi` | - | - | - | 0 | - |",
        "| optimum |  | 90.0 % |  |  |  |",
    ]
    assert (
        "- Taskmaster: Ratings." in lines
        and "- Taskmaster, `ilql`, seed 1 failed: ValueError: too | hot" in lines
    )


def test_an_interval_across_0_and_a_figure_that_should_fall() -> None:
    def with_change(low: float, high: float, name: str) -> str:
        changed = {"ilql": {"baseline": "bc (best)", "figures": {name: figure(0.1, low, high)}}}
        return to_markdown(
            [replace(TASK, figures=(name,), metrics={**METRICS, "differences": changed})], ["ilql"], ""
        )

    assert "**" in with_change(0.1, 0.2, "critic") and "**" not in with_change(-0.1, 0.2, "critic")
    assert "**" in with_change(-0.2, -0.1, "perplexity") and "**" not in with_change(0.1, 0.2, "perplexity")


def test_tasks_that_took_different_times_and_one_that_is_missing() -> None:
    other = ComparedTask("m", "MultiWOZ", ("return",), "", (), None, "no such folder")
    text = to_markdown([TASK, other], ["bc"], "")
    assert "| `bc` | 50.0 % [40.0, 60.0] | 45.0 % [35.0, 55.0] | 3.00 | - | - | 2 / 0 | 1.0 / - |" in text
    assert "| optimum |  | 90.0 % |  |  |  |  |  |" in text
    assert "- MultiWOZ is missing: no such folder" in text


def test_the_plot_is_the_same_file_twice_and_names_every_method() -> None:
    other = replace(TASK, name="u", title="Second", figures=("perplexity",))
    svg = to_svg([TASK, other, replace(TASK, metrics=None)], ["bc", "ilql"])
    assert svg == to_svg([TASK, other], ["bc", "ilql"])
    assert svg.count('<g id="axes_') == 2
    with pytest.raises(UserError, match="at least one evaluated task"):
        to_svg([replace(TASK, metrics=None)], ["bc"])


def test_many_tasks_stand_in_rows_of_five() -> None:
    def drawn(count: int) -> tuple[str, float, float]:
        svg = to_svg([replace(TASK, name=str(i), title=f"World {i}") for i in range(count)], ["bc", "ilql"])
        width, height = re.search(r'width="([0-9.]+)pt" height="([0-9.]+)pt"', svg).groups()
        return svg, float(width), float(height)

    (_, width, height), (svg, same, twice) = drawn(5), drawn(7)
    assert (same, twice) == (width, 2 * height)
    assert [f"World {i}" in svg for i in range(7)] == [True] * 7 and svg.count('<g id="axes_') == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!-- compare: begin -->",
        "<!-- compare: end --><!-- compare: begin -->",
        "<!-- compare: begin -->" * 2,
    ],
)
def test_a_file_without_its_two_marks_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="compare: begin"):
        replace_table(text, "table\n")


def world_of(
    name: str, low: float, high: float, bc: list[float], ilql: list[float], change: tuple
) -> ComparedTask:
    """Returns of each seed in a world where the logs return `low` and the optimum `high`."""

    def runs(returns: list[float], method: str) -> dict:
        each = [{"run": f"{method}-seed{i}", "figures": {"return": value}} for i, value in enumerate(returns)]
        figures = {"return": figure(sum(returns) / len(returns))}
        return group(method, "", **figures) | {"runs": each}

    metrics = {
        "groups": [runs(bc, "bc"), runs(ilql, "ilql")],
        "references": {"behaviour policy": figure(low), "optimum": figure(high)},
        "differences": {"ilql": {"baseline": "bc", "figures": {"return": figure(*change)}}},
    }
    return ComparedTask(name, name, ("return",), "", (), metrics)


def test_worlds_are_put_together_on_one_scale() -> None:
    first = world_of("first", -10.0, 0.0, [-10.0, -9.0], [-2.0, -3.0], (7.0, 6.0, 8.0))
    second = world_of("second", 0.0, 1.0, [0.0, 0.1], [-0.1, 0.1], (-0.05, -0.2, -0.01))
    searched = replace(first, title="searched", searched=True)
    text = to_markdown([first, second, searched], ["bc", "ilql"], "")
    head, bc, ilql = (line for line in text.splitlines() if line.count("|") == 7 and "---" not in line)
    assert head == "| method | all worlds | first | second | above `bc` | below `bc` |"
    assert bc.startswith("| `bc` | 0.05 [0.00, 0.10] | 0.05 | 0.05 | 0 | 0 |")
    # .8, .7, -.1, .1: the middle two are .7 and .1, or .8 and .1, ...
    assert ilql.startswith("| `ilql` | 0.40 [") and ilql.endswith("| 0.75 | 0.00 | 1 | 1 |")
    assert "first -10.00 to 0.00 (optimum); second 0.00 to 1.00 (optimum)." in text
    small = world_of("small", 1e-4, 0.002, [0.0, 0.0], [0.0, 0.0], (0.0, 0.0, 0.0))
    assert "small 0.00010 to 0.0020 (optimum)" in to_markdown([first, small], ["bc", "ilql"], "")
    svg = to_svg([first, second, searched], ["bc", "ilql"])
    assert svg.count('<g id="axes_') == 4
    # one world alone is not put together with anything
    assert "all worlds" not in to_markdown([first, searched], ["bc", "ilql"], "")
