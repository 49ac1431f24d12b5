"""Q-rank: how often a critic prefers the better of two replies in one conversation, token by token.

Pairs are known to be better and worse because of the world (`python -m envs.wordle --pairs`), not because of
what somebody earned afterwards. It is what tells learning over several steps from learning over one: on data
where a good beginning is mostly followed by bad play, only the former prefers the good beginning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.evaluation.scoring import logged_replies
from rl_dialog.methods.backup import minimum
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

AT_ONCE = 64  # replies in a batch
KEYS = ("kind", "messages", "better", "worse")


@dataclass(frozen=True)
class Pair:
    """Two replies to one conversation."""

    kind: str  # pairs of a kind are counted together
    messages: list[dict[str, Any]]
    better: str
    worse: str


def read_pairs(path: str | Path) -> list[Pair]:
    """JSON lines with the keys of a Pair. Raises UserError for anything else."""
    pairs = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                pairs.append(Pair(*(record[key] for key in KEYS)))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}:{number}: expected JSON with {', '.join(KEYS)}, got {line[:80]!r}"
                ) from error
    return pairs


@torch.no_grad()
def q_rank(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[Pair],
    *,
    last: int = 6,
    max_length: int = 1024,
) -> dict[str, dict[str, Any]]:
    """Kind -> `pairs`, and `online` and `target`: the share of pairs whose better reply has the higher Q at
    each of the `last` tokens, counted from the replies' ends; Q is the lowest of the heads.

    Where both replies are the same up to a token they are not compared there; None where none are. Raises
    UserError for a policy without Q heads.
    """
    if not policy.method.heads.q:
        raise UserError("Q-rank: expected a policy with Q heads over tokens, this one has none")
    better, worse = (
        _rows(tokenizer, pairs, [getattr(pair, which) for pair in pairs], max_length)
        for which in ("better", "worse")
    )
    told_apart = _told_apart(better, worse, last)
    heads = ("online", "target") if policy.method.heads.target else ("online",)
    good, bad = (_values(policy, rows, heads, last) for rows in (better, worse))  # (heads, pairs, last)
    by_kind: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        chosen = np.array([pair.kind == kind for pair in pairs])
        by_kind[kind] = {"pairs": int(chosen.sum())}
        counted = told_apart & chosen[:, None]
        count = counted.sum(axis=0)
        for name, higher in zip(heads, good > bad, strict=True):
            won = (higher & counted).sum(axis=0)
            by_kind[kind][name] = [float(a / b) if b else None for a, b in zip(won, count, strict=True)]
    return by_kind


def _rows(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], replies: Sequence[str], max_length: int
) -> list[Row]:
    """A row for each pair's conversation with a reply behind it, which is the only one that counts."""
    dialogs = []
    for pair, reply in zip(pairs, replies, strict=True):
        before = [m | {"weight": 0} if m["role"] == "assistant" else m for m in pair.messages]
        dialogs.append(Dialog(pair.kind, [*before, {"role": "assistant", "content": reply}]))
    return logged_replies(dialogs, tokenizer, max_length=max_length).rows


def _told_apart(first: Sequence[Row], second: Sequence[Row], last: int) -> np.ndarray:
    """(pairs, last) whether two replies, aligned at their ends, have a token there and differ by then."""
    pairs = [(a.input_ids[a.assistant], b.input_ids[b.assistant]) for a, b in zip(first, second, strict=True)]
    differs = np.zeros((len(pairs), last), bool)
    for apart, (a, b) in zip(differs, pairs, strict=True):
        both = min(len(a), len(b))
        differ = np.logical_or.accumulate(a[-both:] != b[-both:]) | (len(a) != len(b))
        apart[max(0, last - both) :] = differ[-last:]
    return differs


def _values(policy: Policy, rows: Sequence[Row], heads: Sequence[str], last: int) -> np.ndarray:
    """(heads, rows, last) Q of the last tokens of each row's reply; NaN before a shorter reply begins."""
    all_values = np.full((len(heads), len(rows), last), np.nan)
    for start in range(0, len(rows), AT_ONCE):
        batch = collate(list(rows[start : start + AT_ONCE])).to(policy.device)
        out, reply = policy.outputs(batch), batch.reply.cpu().numpy()
        for values, scores in zip(all_values, (out.q, out.q_target), strict=False):
            q = minimum(tuple(each.at(batch.actions) for each in scores)).float().cpu().numpy()
            for number in range(int(batch.turn_end.sum())):
                own = q[reply == number][-last:]
                values[start + number, last - len(own) :] = own
    return all_values
