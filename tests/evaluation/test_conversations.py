"""Replies of conversations that go on: those of generation.py, though only what is new is read, and only of
those that are not at their end."""

from __future__ import annotations

import pytest
import torch

from rl_dialog.data import beginnings
from rl_dialog.evaluation.conversations import Conversations, can_keep
from rl_dialog.evaluation.generation import Decoding, recorded_replies
from rl_dialog.methods import BC


@pytest.fixture
def ending(make_policy, tokenizer):
    """A policy whose replies have all lengths: each token ends them with a fair chance."""
    policy = make_policy(BC())
    with torch.no_grad():
        last, words = policy.lm.transformer.ln_f, policy.lm.transformer.wte.weight
        last.weight[0], last.bias[0], words[:, 0] = 0.0, 1.0, 0.0
        words[tokenizer.eos_token_id, 0] = 4.0
    return policy


@pytest.mark.parametrize("cost", [beginnings.PASS, 0], ids=["each alone", "beginnings once"])
def test_replies_of_many_lengths_are_those_of_one_prompt_at_a_time(
    ending, tokenizer, monkeypatch, cost: int
) -> None:  # noqa: ANN001
    """Over three turns, after the first of which some conversations are over and others begin."""
    monkeypatch.setattr(beginnings, "PASS", cost)
    decoding = Decoding(max_new_tokens=12)
    assert can_keep(ending, decoding)
    running = Conversations(ending, tokenizer, decoding, rows=8)
    talks = {key: [{"role": "user", "content": f"hello {key}"}] for key in range(8)}
    for turn in range(3):
        seeds = [100 * turn + key for key in talks]
        found = running.recorded(talks, seeds)
        expected = recorded_replies(ending, tokenizer, list(talks.values()), decoding, seeds=seeds)
        assert len({len(reply.tokens) for reply in found}) > 2
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.text, ours.spoken.ids) == (theirs.text, theirs.spoken.ids)
            assert ours.spoken.logp == pytest.approx(theirs.spoken.logp, abs=1e-5)
        for key, reply in zip(talks, found, strict=True):
            talks[key] = [
                *talks[key],
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": "and then?"},
            ]
        if not turn:
            talks = {key: talks[key] for key in (6, 1, 3)} | {
                key: [{"role": "user", "content": f"good day {key}"}] for key in (8, 9)
            }


def test_what_has_been_said_is_not_read_beside_what_goes_on(ending, tokenizer) -> None:  # noqa: ANN001
    read, rows = ending.read, []
    ending.read = lambda tokens, *args, **more: rows.append(len(tokens)) or read(tokens, *args, **more)
    running = Conversations(ending, tokenizer, Decoding(max_new_tokens=12), rows=8)
    found = running.recorded({key: [{"role": "user", "content": "hello"}] for key in range(8)}, range(8))
    assert sum(rows) == sum(len(reply.spoken.ids) for reply in found) < 8 * 12


def test_what_conversations_begin_with_alike_is_read_once(ending, tokenizer, monkeypatch) -> None:  # noqa: ANN001
    """Two prompts of four conversations each, whose keys lie in the way of each other, and so again when
    others take their rows, which still hold how those began."""
    monkeypatch.setattr(beginnings, "PASS", 0)
    read, real = ending.read, []
    ending.read = lambda *args, **more: real.append(int(more["real"].sum())) or read(*args, **more)
    running = Conversations(ending, tokenizer, Decoding(max_new_tokens=12), rows=8)
    talks = {
        key: [{"role": "user", "content": f"hello {'there' if key % 2 else 'hello'}"}] for key in range(8)
    }
    for first in (0, 8):
        real.clear()
        found = running.recorded({first + key: talk for key, talk in talks.items()}, range(first, first + 8))
        prompts = {reply.spoken.prompt for reply in found}
        # Each prompt but its last token once; then that token, and what was drawn but for each reply's last.
        assert len(prompts) == 2 and real[0] == sum(len(prompt) - 1 for prompt in prompts)
        assert sum(real[1:]) == sum(len(reply.spoken.ids) for reply in found)
        expected = recorded_replies(
            ending, tokenizer, list(talks.values()), running.decoding, seeds=list(range(first, first + 8))
        )
        assert [reply.spoken.ids for reply in found] == [reply.spoken.ids for reply in expected]
        talks = {key: [{"role": "user", "content": f"good {'day ' * (1 + key // 4)}"}] for key in range(8)}
