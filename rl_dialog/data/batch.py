"""The alignment rule, written once. Letters: B dialogs, T tokens, N decisions, S states, V vocabulary, H
hidden width.

Position t is a decision: state = tokens[0..t], action = tokens[t+1]. A dialog of two replies (a1 a2 and b1),
which then ends:

    t          0      1      2     3      4     5      6      7
    token      <u>    hi     <a>   a1     a2    <u>    <a>    b1
    act        .      .      1     1      .     .      1      .       token t+1 was written by the assistant
    reward     .      .      0     r_a    .     .      r_b    .       arrives after the reply's last action
    nxt        .      .      3     6      .     .      -      .       the next decision: user tokens are
                                                                      skipped
    done       .      .      0     0      .     .      1      .       only the last action of a finished
                                                                      conversation

A truncated conversation has no `done`: its last action's `nxt` is the row's last token, a state without an
action that only bootstraps. Where a row was cut because it was too long, that state is read as the row that
goes on begins with it, and as a policy will: behind fewer messages, in a row of its own behind the others
(`extra`), where `collate` is asked for it. What the conversation earned behind the cut stands in
`later_rewards`. Padding is `attention_mask`, never `done`. Rewards are float32
in raw units. A missing one (NaN in a Row: nobody rated the reply) is 0 in `reward` and `rewards`, and `rated`
is false at every decision of its reply. Each method says what it makes of such a reply; to take the 0 for
what it earned is wrong.

Everything a method needs is also gathered: `states` lists the flat positions b*T + t of the N decisions in
reading order, then of the states that only bootstrap, so a vocabulary-wide head runs on S rows and never on
user tokens; `next_state` indexes into `states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.beginnings import shared_beginnings
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError


@dataclass
class Batch:
    """Token tensors of B rows under the alignment rule."""

    input_ids: Tensor  # (B, T) int64, padded on the right
    attention_mask: Tensor  # (B, T) bool
    act: Tensor  # (B, T) bool
    reward: Tensor  # (B, T) float32; 0 where it is missing
    nxt: Tensor  # (B, T) int64; 0 where there is none
    done: Tensor  # (B, T) bool
    states: Tensor  # (S,) int64: flat positions, the N decisions first
    actions: Tensor  # (N,) int64
    rewards: Tensor  # (N,) float32; 0 where it is missing
    rated: Tensor  # (N,) bool: the reward of this decision's reply is known
    next_state: Tensor  # (N,) int64 into `states`; 0 where done
    dones: Tensor  # (N,) bool
    turn_end: Tensor  # (N,) bool: this action ends its reply
    rows: Tensor  # (N,) int64: which of the B rows
    progress: float = 1.0  # share of the training run that is done, 0 at its start
    measured: Tensor | None = (
        None  # what `Method.measure` found in the whole update, where the method asks for it
    )
    prior_logp: Tensor | None = (
        None  # (N,) float32: log p(action) under the frozen prior, where the method asks for it
    )
    prior_lse: Tensor | None = (
        None  # (S,) float32: log sum exp of the frozen prior's logits in each state, likewise
    )
    proposals: Tensor | None = (
        # (R, n, H) float32: features of n proposed replies to the context of each reply, where the method
        # asks for them
        None
    )
    proposal_logp: Tensor | None = None  # (R, n) float32: their log-probabilities
    # (E,) int64 into the B rows: the last E of these are only read, to the state that each of those leads to
    led_from: Tensor | None = None
    # Of rows that were cut, (B, K): what the K replies behind them earned, and how many tokens each has; 0
    # behind the last one. None where no row knows how its conversation went on.
    later_rewards: Tensor | None = None  # float32
    later_tokens: Tensor | None = None  # int64
    later_known: Tensor | None = None  # (B,) bool: the conversation ended with them, and all were rated
    # What rows begin with alike and is read once for all of them (data/beginnings.py), where that pays:
    beginning: int = 0  # its length in tokens
    begun: Tensor | None = None  # (C,) int64: a row with each of the C beginnings
    begins_like: Tensor | None = None  # (B,) int64 into `begun`: which of them each row has
    noise: Tensor | None = (
        None  # (B,) int64: seeds of each row's latents, the same for all nets that read this batch
    )
    # What teachers say of M messages (data/taught.py), where the rows have that:
    taught_at: Tensor | None = None  # (M,) int64: the flat position b*T + t of each message's last token
    emotions: Tensor | None = None  # (M, E) float32: a distribution each
    embeddings: Tensor | None = None  # (M, D) float32
    # Of rows that a policy with latents said: (R,) int64, the seed of each reply's latent; or (R, Z) the
    # latent that was drawn, where nets are asked about that one. With both, words follow from the seed's.
    reply_noise: Tensor | None = None
    latents: Tensor | None = None
    # Of rows that a policy sampled to learn from (training/online.py), each (N,) float32:
    behaviour_logp: Tensor | None = None  # log-probability that each action had where it was sampled
    old_logp: Tensor | None = None  # what the policy gave it before the update, over the whole vocabulary
    unchanged: bool = False  # and still gives it, to the rounding of sums: no step was made in between
    advantages: Tensor | None = None
    weights: Tensor | None = None  # of each action in the loss, whose divisor is the update's episodes
    value_targets: Tensor | None = None  # what V is fitted to, in units of value
    supervised: float = 0.0  # of logged rows beside them: what the loss of each token is multiplied with
    round: int = 0  # of the run that plays them, counted from 0
    # The same of latents that were drawn, where the method learns to choose them, each (R,) float32:
    latent_behaviour_logp: Tensor | None = None  # log-density where it was drawn
    latent_prior_logp: Tensor | None = None
    latent_advantages: Tensor | None = None

    @property
    def decisions(self) -> int:
        """N."""
        return len(self.actions)

    @property
    def extra(self) -> int:
        """E."""
        return 0 if self.led_from is None else len(self.led_from)

    @property
    def dialogs(self) -> int:
        """B - E: rows of which something is learned."""
        return len(self.input_ids) - self.extra

    @property
    def owners(self) -> Tensor:
        """(S,) int64: the row that each state is of, and the row that leads to it where that is one of the
        last E."""
        row = self.states // self.input_ids.shape[1]
        own = torch.arange(self.dialogs, device=row.device)
        return row if self.led_from is None else torch.cat([own, self.led_from])[row]

    @property
    def reply(self) -> Tensor:
        """(N,) int64: which of the batch's R replies each decision belongs to, in reading order."""
        return self.turn_end.cumsum(0) - self.turn_end.long()

    @property
    def last(self) -> Tensor:
        """(N,) int64: the decision that ends the reply of each decision."""
        return self.turn_end.nonzero().squeeze(1)[self.reply]

    @property
    def reply_starts(self) -> Tensor:
        """(R,) int64 into `states`: the first decision of each reply, whose state has none of its tokens."""
        ends = self.turn_end.nonzero().squeeze(1)
        return torch.cat([ends.new_zeros(min(1, len(ends))), ends[:-1] + 1])

    @property
    def reply_ends(self) -> Tensor:
        """(R,) int64: the flat position of each reply's last token, a state that knows all of it."""
        return self.states[: self.decisions][self.turn_end] + 1

    @property
    def context(self) -> Tensor:
        """(M,) int64: the flat positions whose next token is not the assistant's, without padding and `extra`
        rows."""
        inside = self.attention_mask.roll(-1, 1) & ~self.act
        inside[:, -1] = False
        inside[self.dialogs :] = False
        return inside.flatten().nonzero().squeeze(1)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        return Batch(**moved)


def collate(
    rows: Sequence[Row],
    *,
    pad_id: int = 0,
    spread: str = "reply_end",
    prior_logp: Sequence[np.ndarray] | None = None,
    bootstraps: bool = False,
) -> Batch:
    """B rows to a Batch. `spread="every_token"` repeats a reply's reward on each of its actions, as the 2019
    code did. `bootstraps`: values of next states are asked for, so the rows get those behind them that their
    `next_prompt` makes.

    Raises UserError for an empty list, an unknown `spread`, or a row whose first token is an action (it has
    no state).
    """
    if not rows:
        raise UserError("expected at least one row to collate, got none")
    if spread not in ("reply_end", "every_token"):
        raise UserError(f"expected spread 'reply_end' or 'every_token', got {spread!r}")
    if any(row.assistant[0] for row in rows):
        raise UserError(
            "expected a state before the first action: a row may not begin with an assistant token "
            "(render a generation prompt first)"
        )
    leading = [b for b, row in enumerate(rows) if bootstraps and len(row.next_prompt) and row.assistant.any()]
    asked = [_only_state(rows[b].next_prompt) for b in leading]
    batch = _gathered(*map(torch.from_numpy, _padded([*rows, *asked], pad_id, spread)), prior_logp)
    if asked:
        _lead_to_extra(batch, torch.tensor(leading))
    if all(len(row.latent_seeds) == len(row.reply_ends) for row in rows) and batch.decisions:
        batch.reply_noise = torch.from_numpy(np.concatenate([row.latent_seeds for row in rows]))
    if all(row.taught is not None for row in rows):
        batch.taught_at, batch.emotions, batch.embeddings = _taught(rows, batch.input_ids.shape[1])
    if spread == "reply_end":
        batch.later_rewards, batch.later_tokens, batch.later_known = _later([*rows, *asked])
    if shared := shared_beginnings(batch.input_ids.numpy()):
        batch.beginning = shared.length
        batch.begun, batch.begins_like = torch.from_numpy(shared.rows), torch.from_numpy(shared.of)
    return batch


def _only_state(ids: np.ndarray) -> Row:
    """A row that is read to its end, where nobody speaks."""
    nobody, nothing = np.zeros(len(ids), bool), np.empty(0, np.int32)
    return Row(ids, nobody, nothing, nothing.astype(np.float32), truncated=True)


def _lead_to_extra(batch: Batch, leading: Tensor) -> None:
    """The last decisions of the rows `leading` (E,) go on in the last E rows, in this order, whose last
    states only bootstrap; the states at the rows' own ends go."""
    width, first, count = batch.input_ids.shape[1], len(batch.input_ids) - len(leading), batch.decisions
    own = batch.states[count:]
    stays = ~torch.isin(own // width, leading)
    number = torch.cat([torch.arange(count), count - 1 + stays.cumsum(0)])  # of each state that stays
    ends = torch.arange(first, len(batch.input_ids)) * width + batch.attention_mask[first:].sum(1) - 1
    batch.states = torch.cat([batch.states[:count], own[stays], ends])
    batch.next_state = number[batch.next_state]
    last = torch.searchsorted(batch.rows, leading, right=True) - 1
    batch.next_state[last] = len(batch.states) - len(leading) + torch.arange(len(leading))
    batch.led_from = leading


def _padded(rows: Sequence[Row], pad_id: int, spread: str) -> tuple[np.ndarray, ...]:
    """The (B, T) arrays that `_gathered` takes, in their order."""
    shape = (len(rows), max(len(row.input_ids) for row in rows))
    ids, reward, nxt = (
        np.full(shape, pad_id, np.int64),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.int64),
    )
    mask, act, done, turn_end, tail, rated = (np.zeros(shape, bool) for _ in range(6))
    for b, row in enumerate(rows):
        length = len(row.input_ids)
        ids[b, :length], mask[b, :length] = row.input_ids, True
        act[b, : length - 1] = row.assistant[1:]
        places = np.flatnonzero(act[b])
        ends = row.reply_ends - 1  # the decision that wrote a reply's last token
        turn_end[b, ends] = True
        reply = np.searchsorted(ends, places)  # a decision belongs to the first reply ending at or after it
        is_rated = ~np.isnan(row.rewards)
        rated[b, places] = is_rated[reply]
        if spread == "every_token":
            reward[b, places] = np.where(is_rated, row.rewards, 0)[reply]
        else:
            reward[b, ends] = np.where(is_rated, row.rewards, 0)
        if len(places):
            nxt[b, places] = np.append(places[1:], length - 1 if row.truncated else 0)
            done[b, places[-1]] = not row.truncated
            tail[b, length - 1] = row.truncated
    return ids, mask, act, reward, nxt, done, turn_end, tail, rated


def _taught(rows: Sequence[Row], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(M,), (M, E) and (M, D): what teachers say of the messages of all rows."""
    places = [b * width + row.taught.places.astype(np.int64) for b, row in enumerate(rows)]
    emotions, embeddings = (
        np.concatenate([getattr(row.taught, name) for row in rows]).astype(np.float32)
        for name in ("emotions", "embeddings")
    )
    return tuple(map(torch.from_numpy, (np.concatenate(places), emotions, embeddings)))


def _later(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """(B, K), (B, K) and (B,): what followed rows that were cut."""
    known = [row.truncated and row.later_done and not np.isnan(row.later_rewards).any() for row in rows]
    if not any(known):
        return None, None, None
    shape = (len(rows), max(len(row.later_rewards) for row in rows))
    rewards, tokens = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    for b, row in enumerate(rows):
        if known[b]:
            rewards[b, : len(row.later_rewards)] = row.later_rewards
            tokens[b, : len(row.later_tokens)] = row.later_tokens
    return torch.from_numpy(rewards), torch.from_numpy(tokens), torch.tensor(known)


def _gathered(
    ids: Tensor,
    mask: Tensor,
    act: Tensor,
    reward: Tensor,
    nxt: Tensor,
    done: Tensor,
    turn_end: Tensor,
    tail: Tensor,
    rated: Tensor,
    prior_logp: Sequence | None,
) -> Batch:
    """Adds the flat views of the N decisions."""
    width = ids.shape[1]
    decisions = act.flatten().nonzero().squeeze(1)  # (N,)
    states = torch.cat([decisions, tail.flatten().nonzero().squeeze(1)])  # (S,)
    index = torch.zeros(ids.numel(), dtype=torch.int64)
    index[states] = torch.arange(len(states))
    rows = decisions // width
    ends = done.flatten()[decisions]
    following = index[rows * width + nxt.flatten()[decisions]].masked_fill(ends, 0)
    if prior_logp is not None:
        prior_logp = torch.from_numpy(np.concatenate(list(prior_logp)).astype(np.float32))
    return Batch(
        input_ids=ids,
        attention_mask=mask,
        act=act,
        reward=reward,
        nxt=nxt,
        done=done,
        states=states,
        actions=ids.flatten()[decisions + 1],
        rewards=reward.flatten()[decisions],
        rated=rated.flatten()[decisions],
        next_state=following,
        dones=ends,
        turn_end=turn_end.flatten()[decisions],
        rows=rows,
        prior_logp=prior_logp,
    )
