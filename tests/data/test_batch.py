"""The alignment rule: the table of the docstring to the letter, then random rows against a slow
implementation written from the same words."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.tokenize import tokenize
from rl_dialog.errors import UserError

U, HI, A, A1, A2, B1 = 11, 12, 13, 14, 15, 16  # <u> hi <a> a1 a2 <u> <a> b1
IDS = [U, HI, A, A1, A2, U, A, B1]


@pytest.fixture
def table_row(make_row):
    return make_row(IDS, [(3, 4, 0.5), (7, 7, 2.0)])


def flags(*positions, width=8):
    return [t in positions for t in range(width)]


def test_the_table_of_the_docstring(table_row):
    """States end at t=2 and 3 (actions a1, a2) and t=6 (action b1); r_a arrives after a2, r_b after b1; a2
    links to b1 across the user's token."""
    batch = collate([table_row])
    assert batch.input_ids.tolist() == [IDS]
    assert batch.attention_mask.tolist() == [[True] * 8]
    assert batch.act.tolist() == [flags(2, 3, 6)]
    assert batch.reward.tolist() == [[0, 0, 0, 0.5, 0, 0, 2.0, 0]]
    assert batch.nxt.tolist() == [[0, 0, 3, 6, 0, 0, 0, 0]]
    assert batch.done.tolist() == [flags(6)]
    assert batch.decisions == 3
    assert batch.states.tolist() == [2, 3, 6]
    assert batch.actions.tolist() == [A1, A2, B1]
    assert batch.rewards.tolist() == [0, 0.5, 2.0]
    assert batch.next_state.tolist() == [1, 2, 0]
    assert batch.dones.tolist() == [False, False, True]
    assert batch.turn_end.tolist() == [False, True, True]
    assert batch.rows.tolist() == [0, 0, 0]
    assert batch.rated.tolist() == [True] * 3
    assert batch.prior_logp is None


def test_types(table_row):
    batch = collate([table_row])
    kinds = {name: value.dtype for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    integers = ("input_ids", "nxt", "states", "actions", "next_state", "rows")
    booleans = ("attention_mask", "act", "done", "dones", "turn_end", "rated")
    expected = (
        {name: torch.int64 for name in integers}
        | {name: torch.bool for name in booleans}
        | {"reward": torch.float32, "rewards": torch.float32}
    )
    assert kinds == expected


def test_the_replies_and_the_context_of_the_table(table_row):
    """Two replies: decisions 0, 1 and 2. They end at tokens 4 and 7, which are states that know all of them.
    The rest are tokens 1, 2, 5 and 6."""
    batch = collate([table_row])
    assert batch.reply.tolist() == [0, 0, 1]
    assert batch.reply_starts.tolist() == [0, 2]
    assert batch.reply_ends.tolist() == [4, 7]
    assert batch.context.tolist() == [0, 1, 4, 5]  # <u> hi, hi <a>; a2 <u>, <u> <a>


def test_every_token_spreads_a_reply_s_reward_over_its_actions(table_row):
    batch = collate([table_row], spread="every_token")
    assert batch.reward.tolist() == [[0, 0, 0.5, 0.5, 0, 0, 2.0, 0]]
    assert batch.rewards.tolist() == [0.5, 0.5, 2.0]


@pytest.mark.parametrize(("spread", "first"), [("reply_end", 0.0), ("every_token", 0.5)])
def test_a_missing_reward_is_masked_and_never_nan(make_row, spread, first):
    """Replies of 2, 1 and 2 tokens: not rated, rated 0 (the same number, another mask), rated .5."""
    unrated = make_row([U, A, A1, A2, U, B1], [(2, 3, np.nan), (5, 5, 0.0)])
    batch = collate([unrated, make_row([U, A1, A2], [(1, 2, 0.5)])], spread=spread)
    assert batch.rewards.tolist() == [0, 0, 0, first, 0.5] and not batch.reward.isnan().any()
    assert batch.rated.tolist() == [False, False, True, True, True]
    assert batch.reward.dtype == torch.float32


def test_a_truncated_row_bootstraps_from_its_last_token(make_row):
    """<u> <a> a1 a2 <u> <a>, cut off: the last action's next state is the last token (t=5), which takes no
    action and has no `done`."""
    batch = collate([make_row([U, A, A1, A2, U, A], [(2, 3, 1.5)], truncated=True)])
    assert batch.states.tolist() == [1, 2, 5]
    assert batch.actions.tolist() == [A1, A2]
    assert batch.nxt.tolist() == [[0, 2, 5, 0, 0, 0]]
    assert batch.next_state.tolist() == [1, 2]
    assert batch.dones.tolist() == [False, False] and not batch.done.any()
    assert batch.rewards.tolist() == [0, 1.5]


def test_a_truncated_row_that_ends_with_its_action(make_row):
    """A reply cut at the window's end: its last token is both the last action and the state that
    bootstraps."""
    batch = collate([make_row([U, A, A1, A2], [(2, 3, 1.0)], truncated=True)])
    assert batch.states.tolist() == [1, 2, 3]
    assert batch.next_state.tolist() == [1, 2]


def test_bootstrap_states_come_after_all_decisions(make_row, table_row):
    """Rows of 6 and 8 tokens, padded to 8: decisions of row 0 (t=1, 2), of row 1 (8+2, 8+3, 8+6), then row
    0's last token (t=5)."""
    batch = collate([make_row([U, A, A1, A2, U, A], [(2, 3, 1.5)], truncated=True), table_row])
    assert batch.states.tolist() == [1, 2, 10, 11, 14, 5]
    assert batch.next_state.tolist() == [1, 5, 3, 4, 0]
    assert batch.rows.tolist() == [0, 0, 1, 1, 1]
    assert batch.decisions == 5


def test_padding_is_no_end(make_row, table_row):
    """The short row is finished at its last action and nowhere else; what follows is padding."""
    short = make_row([U, A, A1], [(2, 2, 1.0)])
    batch = collate([table_row, short], pad_id=99)
    assert batch.input_ids[1].tolist() == [U, A, A1, 99, 99, 99, 99, 99]
    assert batch.attention_mask[1].tolist() == flags(0, 1, 2)
    assert batch.done[1].tolist() == flags(1)
    for name in ("act", "done", "reward", "nxt"):
        assert not getattr(batch, name)[~batch.attention_mask].any(), name
    assert 99 not in batch.actions


def test_a_truncated_row_s_padding_is_no_end_either(make_row, table_row):
    batch = collate([make_row([U, A, A1, U], [(2, 2, 1.0)], truncated=True), table_row])
    assert not batch.done[0].any()
    assert batch.states[-1] == 3  # its own last token, not the padded row's


def test_after_the_end_there_is_no_state_even_where_one_begins_the_row(make_row):
    """Rows of <u> a1 and <u> b1: the states are each row's first token, and `next_state` of an ended decision
    is 0, not its own row's beginning."""
    batch = collate([make_row([U, A1], [(1, 1, 1.0)]), make_row([U, B1], [(1, 1, 2.0)])])
    assert batch.states.tolist() == [0, 2]
    assert batch.next_state.tolist() == [0, 0] and batch.dones.tolist() == [True, True]


def test_context_replies_are_skipped_like_user_tokens(make_row):
    """A reply of weight 0 (tokens 4, 5) is in no reply's span: the action before links over it."""
    batch = collate([make_row([U, A, A1, U, A, A2, U, A, B1], [(2, 2, 1.0), (8, 8, 2.0)])])
    assert batch.states.tolist() == [1, 7]
    assert batch.next_state.tolist() == [1, 0]


def test_a_row_without_decisions_adds_nothing(make_row, table_row):
    batch = collate([table_row, make_row([U, HI, U], [], truncated=True)])
    assert batch.decisions == 3 and len(batch.states) == 3
    assert batch.attention_mask[1].sum() == 3


def test_only_rows_without_decisions(make_row):
    batch = collate([make_row([U, HI], [])])
    assert batch.decisions == 0 and batch.states.shape == (0,) and batch.next_state.shape == (0,)


def test_bad_input_is_refused(make_row, table_row):
    with pytest.raises(UserError, match="expected at least one row to collate, got none"):
        collate([])
    with pytest.raises(UserError, match="expected spread 'reply_end' or 'every_token', got 'evenly'"):
        collate([table_row], spread="evenly")
    with pytest.raises(UserError, match="expected a state before the first action"):
        collate([make_row([A1, U], [(0, 0, 1.0)])])


def test_prior_logp_follows_the_decisions(table_row, make_row):
    short = make_row([U, A, A1], [(2, 2, 1.0)])
    batch = collate([table_row, short], prior_logp=[np.array([-1.0, -2.0, -3.0]), np.array([-4.0])])
    assert batch.prior_logp.tolist() == [-1, -2, -3, -4] and batch.prior_logp.dtype == torch.float32


def test_to_moves_every_tensor(table_row):
    moved = collate([table_row], prior_logp=[np.zeros(3)]).to("meta")
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {
        "meta"
    }
    assert moved.prior_logp is not None
    assert collate([table_row]).to("cpu").prior_logp is None


def test_weight_zero_and_tool_messages_through_the_tokenizer(tokenizer):
    """From the record to the batch: three assistant messages, the middle one context; the first reply links
    to the last."""
    from rl_dialog.data.schema import Dialog

    replies = [
        {"role": "assistant", "content": "a", "reward": 1.0},
        {"role": "assistant", "content": "b", "reward": 9.0, "weight": 0},
    ]
    last = {"role": "assistant", "content": "c", "reward": 2.0}
    user = {"role": "user", "content": "u"}
    (row,) = tokenize(Dialog(id="d", messages=[user, replies[0], user, replies[1], user, last]), tokenizer)
    batch = collate([row])
    assert [tokenizer.decode([i]) for i in batch.actions] == ["a", "<|end|>", "c", "<|end|>"]
    assert batch.rewards.tolist() == [0, 1, 0, 2]
    assert batch.next_state.tolist() == [1, 2, 3, 0]
    assert batch.dones.tolist() == [False, False, False, True]


# --- random rows --------------------------------------------------------------------------------------------


def random_row(draw, make_row):
    ids, replies, t = [draw.randint(1, 50)], [], 1
    for _ in range(draw.randint(0, 4)):
        user, words = draw.randint(0, 3), draw.randint(1, 4)
        t += user
        replies.append((t, t + words - 1, round(draw.uniform(-2, 2), 3) if draw.random() < 0.8 else np.nan))
        t += words
    t += draw.randint(0, 2)
    row = make_row(ids + [draw.randint(1, 50) for _ in range(t - 1)], replies, truncated=draw.random() < 0.4)
    if not row.truncated or draw.random() < 0.5:
        return row
    prompt = [draw.randint(51, 99) for _ in range(draw.randint(1, 30))]
    return replace(row, next_prompt=np.array(prompt, np.int32))


def decisions_of(row, spread, bootstraps=False):
    """(state, action, reward, next state or None, ends its reply, is rated), token by token, by the rule."""
    found = []
    length = len(row.input_ids)
    behind = row.next_prompt if bootstraps and len(row.next_prompt) else row.input_ids
    for t in range(length - 1):
        if not row.assistant[t + 1]:
            continue
        later = [s for s in range(t + 1, length - 1) if row.assistant[s + 1]]
        following = (
            tuple(row.input_ids[: later[0] + 1]) if later else tuple(behind) if row.truncated else None
        )
        which = sum(1 for end in row.reply_ends if end < t + 1)  # replies that ended before this action
        ends = t + 1 in row.reply_ends
        earned = row.rewards[which] if ends or spread == "every_token" else 0
        state, action = tuple(row.input_ids[: t + 1]), int(row.input_ids[t + 1])
        known = not np.isnan(row.rewards[which])
        found.append((state, action, float(earned) if known else 0.0, following, ends, known))
    return found


def decisions_in(batch: Batch):
    """The same, read back from the gathered tensors: a state is the tokens up to its flat position."""
    width = batch.input_ids.shape[1]
    names = ("actions", "rewards", "next_state", "dones", "turn_end", "rated")
    text = [tuple(batch.input_ids[s // width, : s % width + 1].tolist()) for s in batch.states.tolist()]
    return [
        (text[n], a, r, None if done else text[following], end, rated)
        for n, (a, r, following, done, end, rated) in enumerate(
            zip(*(getattr(batch, name).tolist() for name in names), strict=True)
        )
    ]


@pytest.mark.parametrize("bootstraps", [False, True])
@pytest.mark.parametrize("spread", ["reply_end", "every_token"])
def test_random_rows_against_the_slow_implementation(make_row, spread, bootstraps):
    """With `bootstraps` a row that goes on leads to the beginning of the one that does."""
    draw = random.Random(3)
    for _ in range(60):
        rows = [random_row(draw, make_row) for _ in range(draw.randint(1, 5))]
        batch = collate(rows, spread=spread, bootstraps=bootstraps)
        expected = [decision for row in rows for decision in decisions_of(row, spread, bootstraps)]
        assert decisions_in(batch) == expected
        speaks = [b for b, row in enumerate(rows) if decisions_of(row, spread)]
        leads = [b for b in speaks if bootstraps and len(rows[b].next_prompt)]
        assert batch.extra == len(leads) and batch.dialogs == len(rows)
        owners = [b for b in speaks if rows[b].truncated]
        assert sorted(batch.owners[batch.decisions :].tolist()) == owners
        assert batch.owners[len(batch.states) - batch.extra :].tolist() == leads
        context = sum((~row.assistant[1:]).sum() for row in rows)
        assert len(batch.context) == context
        assert batch.rows.tolist() == [b for b, row in enumerate(rows) for _ in decisions_of(row, spread)]
        assert len(batch.states) == len(expected) + sum(
            bool(row.truncated and decisions_of(row, spread)) for row in rows
        )


def test_the_dense_and_the_gathered_view_agree(make_row):
    """(B, T) tensors at the decisions are the (N,) tensors."""
    draw = random.Random(4)
    for _ in range(30):
        batch = collate([random_row(draw, make_row) for _ in range(4)])
        at = batch.act.flatten()
        assert torch.equal(batch.reward.flatten()[at], batch.rewards)
        assert torch.equal(batch.done.flatten()[at], batch.dones)
        assert torch.equal(batch.input_ids.flatten()[1:][at[:-1]], batch.actions)
        assert not batch.reward.flatten()[~at].any() and not batch.done.flatten()[~at].any()
        width = batch.input_ids.shape[1]
        alive = ~batch.dones
        flat = batch.rows[alive] * width + batch.nxt.flatten()[at][alive]
        assert torch.equal(batch.states[batch.next_state[alive]], flat)


def test_replies_of_random_rows(make_row):
    """R replies in reading order: their decisions lie together, begin before their first token and end at
    their last one."""
    draw = random.Random(6)
    for _ in range(60):
        rows = [random_row(draw, make_row) for _ in range(draw.randint(1, 5))]
        batch = collate(rows)
        width = batch.input_ids.shape[1]
        spans = [(b, first, last) for b, row in enumerate(rows) for first, last in replies_of(row)]
        assert batch.reply.tolist() == [
            n for n, (_, first, last) in enumerate(spans) for _ in range(first, last + 1)
        ]
        assert batch.states[batch.reply_starts].tolist() == [b * width + first - 1 for b, first, _ in spans]
        assert batch.reply_ends.tolist() == [b * width + last for b, _, last in spans]


def replies_of(row):
    """(first token, last token) of each reply; every end in `reply_ends` closes the run of assistant tokens
    before it."""
    first = None
    for t, written in enumerate(row.assistant):
        first = t if written and first is None else first
        if t in row.reply_ends:
            yield first, t
            first = None


def test_context_and_decisions_are_all_predictions(make_row):
    """Every token but a row's first is predicted once: by a decision or by the context; nothing predicts
    padding."""
    draw = random.Random(7)
    for _ in range(60):
        rows = [random_row(draw, make_row) for _ in range(draw.randint(1, 5))]
        batch = collate(rows, pad_id=99)
        width = batch.input_ids.shape[1]
        expected = [b * width + t for b, row in enumerate(rows) for t in range(len(row.input_ids) - 1)]
        decisions = batch.states[: batch.decisions].tolist()
        assert sorted(decisions + batch.context.tolist()) == expected
        assert not (batch.input_ids.flatten()[batch.context + 1] == 99).any()


def test_rows_together_or_apart_are_the_same_decisions(make_row):
    """Ragged equals single, whatever the order, the padding token and the longest row."""
    draw = random.Random(5)
    for _ in range(30):
        rows = [random_row(draw, make_row) for _ in range(4)]
        together = decisions_in(collate(rows, pad_id=7))
        assert together == [d for row in rows for d in decisions_in(collate([row]))]
        order = draw.sample(range(4), 4)
        assert sorted(map(repr, decisions_in(collate([rows[i] for i in order])))) == sorted(
            map(repr, together)
        )


def test_a_longer_neighbour_only_adds_padding(make_row):
    row = make_row(IDS, [(3, 4, 0.5), (7, 7, 2.0)], truncated=True)
    longer = replace(
        row,
        input_ids=np.arange(1, 41, dtype=np.int32),
        assistant=np.zeros(40, bool),
        reply_ends=np.zeros(0, np.int32),
    )
    alone, beside = collate([row]), collate([row, replace(longer, rewards=np.zeros(0, np.float32))])
    for name in ("input_ids", "attention_mask", "act", "reward", "nxt", "done"):
        wide = getattr(beside, name)[:1]
        assert torch.equal(wide[:, :8], getattr(alone, name)) and not wide[:, 8:].any(), name
