"""Q-rank: heads whose values are known, and what cannot be compared."""

from __future__ import annotations

import json

import pytest
import torch

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.q_rank import Pair, q_rank, read_pairs
from rl_dialog.evaluation.scoring import token_table
from rl_dialog.methods import BC, ILQL

ASKED = [{"role": "user", "content": "which way?"}]
LATER = [*ASKED, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "yes"}]
PAIRS = [
    Pair("first", ASKED, "abQ", "abZ"),
    Pair("first", ASKED, "Q", "ZZZ"),
    Pair("second", LATER, "ZQ", "QZ"),
]


@pytest.fixture
def critic(make_policy, tokenizer):
    """ILQL whose Q is, in every state, -1 for Z, 1 for Q and 0 for every other token; its targets turn the
    signs."""
    policy = make_policy(ILQL())
    ids = {letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "QZ"}
    with torch.no_grad():
        for heads, sign in ((policy.heads.q, 1), (policy.heads.q_target, -1)):
            for head in heads:
                head.out.weight.zero_()
                head.out.bias.zero_()
                head.out.bias[ids["Q"]], head.out.bias[ids["Z"]] = sign, -sign
    return policy


def test_shares_at_each_token_from_the_end(critic, tokenizer):
    found = q_rank(critic, tokenizer, PAIRS, last=4)
    assert {kind: figures["pairs"] for kind, figures in found.items()} == {"first": 2, "second": 1}
    # abQ| against abZ|: a and b are the same, Q beats Z, the ends are equal. Q| against ZZZ|: Q beats Z.
    assert found["first"]["online"] == [None, None, 1.0, 0.0]
    assert found["first"]["target"] == [None, None, 0.0, 0.0]
    # ZQ| against QZ|: lower at first, then higher.
    assert found["second"]["online"] == [None, 0.0, 1.0, 0.0]


def test_values_are_those_of_the_reply_in_its_conversation(make_policy, tokenizer):
    policy = make_policy(ILQL())
    found = q_rank(policy, tokenizer, PAIRS, last=2)

    def last_q(pair: Pair, reply: str) -> list[float]:
        prompt = encode_prompt(pair.messages, tokenizer, max_length=512)
        ids = tokenizer.encode(reply, add_special_tokens=False) + [tokenizer.eos_token_id]
        return [row["q"] for row in token_table(policy, None, prompt, ids)][-2:]

    (pair,) = PAIRS[2:]
    higher = [a > b for a, b in zip(last_q(pair, pair.better), last_q(pair, pair.worse), strict=True)]
    assert found["second"]["target"] == list(map(float, higher))


def test_what_cannot_be_ranked(make_policy, tokenizer, tmp_path):
    with pytest.raises(UserError, match="Q heads"):
        q_rank(make_policy(BC()), tokenizer, PAIRS)
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(vars(PAIRS[2])) + "\n", encoding="utf-8")
    assert read_pairs(path) == PAIRS[2:]
    lines = vars(PAIRS[2]) | {"better": "one\u2028two\x85three"}  # no ends of a line of JSON
    path.write_text(json.dumps(lines, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [pair.better for pair in read_pairs(path)] == [lines["better"]]
    path.write_text('{"kind": "first"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="pairs.jsonl:1: expected JSON with kind, messages, better, worse"):
        read_pairs(path)
