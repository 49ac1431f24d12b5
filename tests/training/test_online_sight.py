"""What is seen of an online run: conversations token by token, and the alarm for over-optimised rewards."""

from __future__ import annotations

import html
import re

import numpy as np
import pytest

from rl_dialog.data.rollout import Spoken, rollout_rows
from rl_dialog.training.over_optimisation import OverOptimisation
from rl_dialog.training.token_page import TokenEpisode, TokenRow, token_page


def measured(learned: float, true: float, error: float = 0.1) -> dict[str, float]:
    return {"eval/return": learned, "eval/true_return": true, "eval/true_return_stderr": error}


@pytest.mark.parametrize(
    ("evaluations", "alarms"),
    [
        ([(0, 0), (1, 1), (2, 2)], [False, False, False]),  # both rise
        ([(0, 0), (1, 1), (2, 0.5)], [False, False, True]),  # the peak is past
        ([(0, 0), (1, -1)], [False, True]),  # it fell from the start on
        ([(0, 0), (1, 1), (2, 0.9)], [False, False, False]),  # by chance
        ([(0, 0), (1, 1), (0.5, 0.2)], [False, False, False]),  # both fell
        ([(0, 0), (1, 1), (2, 0.5), (3, 1.2)], [False, False, True, False]),  # it came back
    ],
)
def test_the_alarm_rings_where_one_rises_and_the_other_falls(evaluations, alarms) -> None:  # noqa: ANN001
    alarm, found = OverOptimisation(), []
    for step, (learned, true) in enumerate(evaluations):
        message = alarm.look(step, measured(learned, true))
        found.append(message is not None)
        resumed = OverOptimisation()
        resumed.load(alarm.state())
        alarm = resumed
    assert found == alarms
    assert alarm.look(9, {"eval/return": 9.0}) is None  # a world whose own reward is not known


def test_the_alarm_says_what_happened() -> None:
    alarm = OverOptimisation()
    alarm.look(25, measured(1.0, 1.0))
    message = alarm.look(50, measured(3.0, -1.0))
    assert message.startswith("step 50: over-optimisation: since step 25 the reward")
    assert "rose by 2" in message and "fell by 2" in message


def test_a_page_shows_each_token_with_its_numbers(tokenizer) -> None:  # noqa: ANN001
    """What was read is grey and has none; what is likelier afterwards is green; texts cannot be markup."""
    read, drawn = (tokenizer.encode(text, add_special_tokens=False) for text in ("hello", "<b> good"))
    logp = tuple(float(value) for value in np.log(np.linspace(0.02, 0.9, len(drawn))))
    rows, _ = rollout_rows([Spoken(tuple(read), tuple(drawn), logp)], [1.0], truncated=False)
    advantages = np.linspace(-1, 1, len(drawn))
    row = TokenRow(rows[0], np.array(logp), np.log(np.full(len(drawn), 0.5)), advantages, np.ones(len(drawn)))
    page = token_page("run <1>", [TokenEpisode("Group 0, episode 1: return 1", [row])], tokenizer)
    assert "<b>" not in page and "run &lt;1&gt;" in page
    colours = r'style="background:rgba\(([\d,]+),([\d.]+)\)" title="([^"]+)"'
    spans = re.findall(rf'<span class="(drawn[^"]*)" {colours}', page)
    assert len(spans) == len(drawn) and page.count('class="read"') == len(read)
    assert [kind == "drawn unlikely" for kind, *_ in spans] == [np.exp(value) < 0.05 for value in logp]
    assert [colour.startswith("46") for _, colour, _, _ in spans] == [value > 0 for value in advantages]
    assert spans[0][3].startswith("p 0.02, prior 0.5, advantage -1, weight 1") and spans[0][2] == "0.60"
    text = html.unescape("".join(re.findall(r"<span[^>]*>([^<]*)</span>", page)))
    assert text.replace(" ", "") == "hello<b>good"
