"""What a hierarchical model predicts of each message that it has read, from the context's state c_m behind
it, so that contexts know how messages feel and what they mean: the EI (emotion and InferSent) regularisation
of Ghandeharioun et al. 2019 (arXiv 1906.09308).

    q_m = softmax(MLP(c_m))      emotion        loss  sum_k p_mk (log p_mk - log q_mk)
    v_m = MLP(c_m)               embedding      loss  |v_m - e_m|^2 / (D s^2)

p and e are the teachers' (data/taught.py), s^2 the mean variance of e's D numbers over the training split: as
a loss 1 is what the mean of all embeddings earns, whatever the teacher's scale. Both begin as the teacher's
mean. Generation and values never ask these heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 128  # as published
LEAST = 1e-6  # of a share that an emotion has on average, and of a variance: they are divided by and logged


class MessageHeads(nn.Module):
    """E emotions and D numbers of an embedding; 0 has no head."""

    def __init__(self, hidden: int, emotions: int, embedding: int) -> None:
        super().__init__()
        self.emotion = _two_layers(hidden, emotions) if emotions else None
        self.embedding = _two_layers(hidden, embedding) if embedding else None
        self.register_buffer("variance", torch.ones(1))  # s^2

    def forward(self, contexts: Tensor, emotions: Tensor, embeddings: Tensor) -> dict[str, Tensor]:
        """Contexts (M, H), what teachers say (M, E) and (M, D) -> each head's loss, summed over the M
        messages."""
        losses = {}
        with torch.autocast(contexts.device.type, enabled=False):
            if self.emotion is not None:
                logq = self.emotion(contexts.float()).log_softmax(-1)
                losses["emotion"] = F.kl_div(logq, emotions, reduction="sum")
            if self.embedding is not None:
                distance = (self.embedding(contexts.float()) - embeddings).square().mean(-1)
                losses["embedding"] = (distance / self.variance).sum()
        return losses

    @torch.no_grad()
    def start_at(self, emotions: Tensor, embeddings: Tensor) -> None:
        """Begins as what the teachers say on average of the training split's messages, (M, E) and (M, D), and
        takes the unit of the embedding's loss from them."""
        if self.emotion is not None:
            self.emotion[-1].bias.copy_(emotions.mean(0).clamp(min=LEAST).log())
        if self.embedding is not None:
            mean = embeddings.mean(0)
            self.embedding[-1].bias.copy_(mean)
            self.variance.fill_((embeddings - mean).square().mean().clamp(min=LEAST))


def _two_layers(hidden: int, size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, size))
