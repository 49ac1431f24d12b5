"""The exact answers by hand: one state, in which `a` earned 1 twice, `b` 0 twice and `c` 1, 0, 0 and 0."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.methods import AWAC, BC, BCQ, DBCQ, DPO, DT, KTO, TFTop
from tests.learning.exact_answers import exact_of, held, return_in_logs, table_of

EARNED = [("a", 1), ("b", 0), ("c", 1), ("a", 1), ("c", 0), ("b", 0), ("c", 0), ("c", 0)]


def dialogs_of(earned: list[tuple[str, float]]) -> list[Dialog]:
    question = {"role": "user", "content": "?"}
    return [
        Dialog(id=str(i), messages=[question, {"role": "assistant", "content": reply, "reward": reward}])
        for i, (reply, reward) in enumerate(earned)
    ]


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (BC(), {"a": 1 / 4, "b": 1 / 4, "c": 1 / 2}),
        (TFTop(fraction=3 / 8), {"a": 2 / 3, "b": 0, "c": 1 / 3}),
        (TFTop(fraction=0.5), {"a": 2 / 4, "b": 0.4 / 4, "c": 1.6 / 4}),  # one of the five with 0, by lot
        (DT(), {"a": 2 / 3, "b": 0, "c": 1 / 3}),
        # V = 3/8; log 4 times the advantages 5/8, -3/8 and -1/8
        (
            AWAC(tau=0.5, awac_beta=math.log(4)),
            {"a": 4**0.625 / 4, "b": 4**-0.375 / 4, "c": 4**-0.125 / 2},
        ),
        (AWAC(tau=0.5, awac_beta=100.0), {"a": 20 / 4, "b": 0, "c": math.exp(-12.5) / 2}),  # clipped at 20
        # Q is 1, 0 and 1/4; half as frequent as c are a and b
        (BCQ(beta=math.log(16), threshold=0.5), {"a": 16 / 4, "b": 1 / 4, "c": 2 / 2}),
        (BCQ(beta=math.log(16), threshold=0.6), {"c": 1}),
        (DBCQ(samples=2), {"a": 1 - 9 / 16, "b": 1 / 16, "c": 9 / 16 - 1 / 16}),
    ],
)
def test_what_a_method_would_answer(method, answer) -> None:  # noqa: ANN001
    dialogs = dialogs_of(EARNED)
    table, _ = table_of(dialogs)
    found = exact_of(method, 1.0, table, dialogs)["?"]
    shares = {reply: weight / sum(answer.values()) for reply, weight in answer.items()}
    assert {reply: found.get(reply, 0) for reply in answer} == pytest.approx(shares, abs=1e-9)


def test_what_an_answer_earns_if_it_never_says_some_reply() -> None:
    """c alone, which earned 1 once in four."""
    dialogs = dialogs_of(EARNED)
    table, starts = table_of(dialogs)
    answer = exact_of(BCQ(threshold=0.6), 1.0, table, dialogs)
    assert return_in_logs(answer, table, starts) == pytest.approx(1 / 4)


def test_the_conservative_term_at_rest() -> None:
    """Replies of equal worth: with the term everywhere what is often said is lifted; by default only what is
    seldom said moves, in proportion to how far it is below twice the support."""
    p, q = {"a": 0.75, "b": 0.25}, {"a": 2.0, "b": 2.0}
    lifted = held(0.3, 1.0, unit=2.0)(p, q)
    soft = 1 / (1 + math.exp((lifted["b"] - lifted["a"]) / 2))
    assert lifted["a"] / 2 - 1 == pytest.approx(0.3 * (0.75 - soft) / 1.5)
    assert lifted["b"] / 2 - 1 == pytest.approx(-0.3 * (0.75 - soft) / 0.5)
    assert held(0.3, 0.1)(p, q) == pytest.approx(q)
    low = held(0.3, 0.1)({"a": 0.85, "b": 0.15}, q)
    soft = 1 / (1 + math.exp(low["a"] - low["b"]))
    assert low["a"] == pytest.approx(2) and low["b"] - 2 == pytest.approx(0.15 * (0.15 - soft) / 0.3)


def test_no_answer_is_made_up() -> None:
    dialogs = dialogs_of(EARNED)
    assert exact_of(DPO(), 1.0, *table_of(dialogs)[:1], dialogs) is None
    assert exact_of(KTO(), 1.0, *table_of(dialogs)[:1], dialogs) is None


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_the_filter_keeps_what_the_answer_says(fraction: float) -> None:
    """Two hundred dialogs, filtered by the method itself."""
    rng = np.random.default_rng(1)
    dialogs = dialogs_of([(str(rng.choice(["a", "b", "c"])), float(rng.integers(3))) for _ in range(200)])
    tokenizer = train_tokenizer((m["content"] for d in dialogs for m in d.messages), vocab_size=300)
    rows = [row for dialog in dialogs for row in tokenize(dialog, tokenizer)]
    kept, _ = TFTop(fraction=fraction).prepare(rows, [], tokenizer)
    said = [tokenizer.decode(row.input_ids[row.assistant], skip_special_tokens=True).strip() for row in kept]
    table, _ = table_of(dialogs)
    answer = exact_of(TFTop(fraction=fraction), 1.0, table, dialogs)["?"]
    assert len(said) == 200 * fraction
    for reply, share in answer.items():
        assert said.count(reply) / len(said) == pytest.approx(share, abs=0.06)
