"""What a hierarchical model keeps of a conversation: a few vectors, however long it is.

`State` is that, `MessageStates` is the cache that `generate` hands on with it, and `StateSlots` holds the
states of many conversations for a server, as models/slots.py holds keys and values. A state says nothing
about what it was before: it cannot be cut to a beginning, only gone on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import Cache

from rl_dialog.errors import UserError


@dataclass
class State:
    """Where B conversations are. L layers of GRUs, H hidden, C latent numbers of a conversation."""

    encoder: Tensor  # (B, L, H) of the message that is being read
    context: Tensor  # (B, H) of the messages before it
    decoder: Tensor  # (B, L, H) of what the message's next token is said from
    reminder: Tensor  # (B, H) what it reads beside each word of that message; (B, 0) of a model that does not
    conversation: Tensor  # (B, C)
    message: Tensor  # (B,) int64 its number, from 0
    begun: Tensor  # (B,) bool: a token has been read

    def rows(self, index: Tensor | slice) -> State:
        """Some of the conversations."""
        return State(*(getattr(self, field.name)[index] for field in fields(self)))

    def write(self, index: Tensor | slice, other: State) -> None:
        """Overwrites some of the conversations."""
        for field in fields(self):
            getattr(self, field.name)[index] = getattr(other, field.name)

    def where(self, chosen: Tensor, other: State) -> State:
        """These states in the rows where `chosen` (B,), `other`'s elsewhere."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return State(*(torch.where(_beside(chosen, one), one, two) for one, two in pairs))


def _beside(chosen: Tensor, values: Tensor) -> Tensor:
    return chosen.view(-1, *[1] * (values.dim() - 1))


class MessageStates(Cache):
    """The states of a batch, and beside them those of the value and target trunks that read the same."""

    is_compileable = False  # or `generate` would make masks of another kind for it

    def __init__(self, others: int = 0) -> None:
        super().__init__(layers=[])
        self.state: State | None = None
        self.read = 0  # tokens, padding included
        self.others = [MessageStates() for _ in range(others)]

    @classmethod
    def around(cls, cache: Cache | None, others: int) -> MessageStates:
        """`cache` itself when it is one of ours, a new one where there is none. Raises UserError for another
        one, even if it is empty: nothing would be written to it, and who goes on with it would begin anew."""
        if isinstance(cache, cls):
            return cache
        if cache is not None:
            raise UserError(
                f"expected no cache or one that this model returned, got a {type(cache).__name__}: a "
                "hierarchical model keeps states, not keys and values; leave past_key_values (or "
                "cache_implementation) out of the first call and go on with those of what it returns"
            )
        return cls(others)

    def load(self) -> State | None:
        """The state to go on from; None at the beginning."""
        return self.state

    def keep(self, state: State, tokens: int) -> None:
        """What to go on from, after so many more tokens."""
        self.state, self.read = state, self.read + tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.read + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            count = len(self.state.message)
            self._select(torch.arange(count, device=self.state.message.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        raise UserError(
            "expected decoding that only goes on, got one that takes tokens back (assisted decoding?): a "
            "hierarchical model's state cannot be cut to a beginning"
        )

    def reset(self) -> None:
        self.state, self.read = None, 0
        for cache in self.others:
            cache.reset()

    def _select(self, index: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.rows(index.to(self.state.message.device))
        for cache in self.others:
            cache._select(index)


class StateSlots:
    """The states of many conversations side by side, with the interface of `Slots`."""

    def __init__(
        self,
        empty: State,
        context: int,
        message_ends: Sequence[int],
        *,
        resumes: bool,
        others: tuple[StateSlots, ...] = (),
    ) -> None:
        """empty: as many states as there are slots; context: longest conversation in tokens; message_ends:
        the tokens that end a message; resumes: a state read with other noise may be gone on from."""
        self.store, self.context, self.others = empty, context, list(others)
        self.ends, self.resumes = frozenset(message_ends), resumes
        self.place, self.fresh = slice(0, 0), torch.empty(0, dtype=torch.bool)

    def aim(self, first: int, positions: Tensor, real: Tensor) -> Tensor:
        """Says whose states the next pass reads and writes: rows `first`, `first` + 1, ...; where positions
        (B, T) begin at 0, a conversation begins. Returns the mask (B, T) of what is no padding."""
        longest = int(positions[real].max()) + 1
        if longest > self.context:
            raise UserError(f"expected at most {self.context} tokens in a conversation, got {longest}")
        for slots in (self, *self.others):
            slots.place, slots.fresh = slice(first, first + len(positions)), positions[:, 0] == 0
            slots.fresh = slots.fresh & real[:, 0]
        return real

    def load(self) -> State:
        """The states that `aim` chose."""
        state = self.store.rows(self.place)
        nothing = State(*(torch.zeros_like(getattr(state, field.name)) for field in fields(state)))
        return nothing.where(self.fresh.to(state.begun.device), state)

    def keep(self, state: State, tokens: int) -> None:
        """Writes them."""
        self.store.write(self.place, state)

    def swap(self, one: int, other: int) -> None:
        """Exchanges two slots."""
        for slots in (self, *self.others):
            order = torch.tensor([one, other], device=slots.store.begun.device)
            slots.store.write(order, slots.store.rows(order.flip(0)))

    def copy(self, source: int, target: int, length: int) -> None:
        """A slot's state, written over another; `length` is what `reusable` gave, all of the slot."""
        for slots in (self, *self.others):
            slots.store.write(slice(target, target + 1), slots.store.rows(slice(source, source + 1)))

    def reusable(self, held: Sequence[int], prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens need not be read again behind a slot that has read `held`: all that
        it has read or nothing.

        At least one message must begin behind them, so that the reply's latent comes from its own noise.
        """
        whole = len(held) < len(prompt) and list(prompt[: len(held)]) == list(held)
        if not whole or not self.resumes or not self.ends.intersection(prompt[len(held) :]):
            return 0
        return len(held)
