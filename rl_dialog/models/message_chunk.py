"""Token rows cut at the ends of messages, so that a GRU can read all messages of a batch side by side.

    token        <u>  hi  <end>  <a>  yo  <end>  <u>
    read in       0   0    0      1   1    1      2     the encoder begins anew behind an end
    said from     0   0    1      1   1    2      2     the decoder begins anew at it, its first input

Letters: B rows, T tokens, N real tokens, K ends in the row with the most, P pieces, H hidden, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


@dataclass
class Chunk:
    """The next tokens of B conversations."""

    real: Tensor  # (B, T) bool: false for padding
    read_in: Tensor  # (B, T) int64: the message that a token belongs to, counted from the one going on
    said_from: Tensor  # (B, T) int64: the message that is said in the state behind a token
    ends: Tensor  # (B,) int64: how many messages end
    width: int  # K + 1

    @classmethod
    def of(cls, input_ids: Tensor, real: Tensor, message_ends: Tensor) -> Chunk:
        ends = torch.isin(input_ids, message_ends) & real
        said_from = ends.cumsum(1)
        total = said_from[:, -1]
        return cls(real, said_from - ends.long(), said_from, total, int(total.max()) + 1)

    def pieces(self, numbers: Tensor) -> Pieces:
        """The real tokens by row and number (B, T)."""
        rows = torch.arange(len(self.real), device=self.real.device)[:, None]
        return Pieces((rows * self.width + numbers)[self.real])

    @property
    def numbers(self) -> Tensor:
        """(K + 1,) of the messages from the one going on."""
        return torch.arange(self.width, device=self.real.device)


class Pieces:
    """P runs of tokens, each read from a start of its own."""

    def __init__(self, keys: Tensor) -> None:
        """keys (N,): row x width + number of every token, in reading order."""
        self.keys, self.of_token, self.lengths = keys.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        starts = self.lengths.cumsum(0) - self.lengths
        self.offsets = torch.arange(len(keys), device=keys.device) - starts[self.of_token]

    def run(self, gru: nn.GRU, inputs: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """inputs (N, E), starts (P, L, H) -> what the GRU says behind each token (N, H), and its state at the
        end of each piece (P, L, H)."""
        padded = inputs.new_zeros(len(self.keys), int(self.lengths.max()), inputs.shape[1])
        padded[self.of_token, self.offsets] = inputs
        packed = pack_padded_sequence(padded, self.lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = gru(packed, starts.transpose(0, 1).contiguous())
        outputs, _ = pad_packed_sequence(outputs, batch_first=True)
        return outputs[self.of_token, self.offsets], last.transpose(0, 1)
