"""Layers that a CPU computes in a third of the time of those in transformers' models, which they replace."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


class TanhGELU(nn.Module):
    """GPT-2's GELU in one go, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), any shape: the same function,
    so a checkpoint does not change."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh") if x.is_cuda else _SigmoidGELU.apply(x)


class _SigmoidGELU(torch.autograd.Function):
    """x s(u) with u = 2 sqrt(2/pi) (x + 0.044715 x^3), which is the same thing: a sigmoid vectorises better
    than a tanh."""

    SCALE, CUBE = 2 * (2 / torch.pi) ** 0.5, 0.044715

    @staticmethod
    def forward(ctx, x):  # noqa: ANN001, ANN205
        gate = (
            torch.addcmul(x.new_ones(()), x, x, value=_SigmoidGELU.CUBE)
            .mul_(x)
            .mul_(_SigmoidGELU.SCALE)
            .sigmoid_()
        )
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, outer):  # noqa: ANN001, ANN205
        x, gate = ctx.saved_tensors
        slope = (
            torch.addcmul(x.new_ones(()), x, x, value=3 * _SigmoidGELU.CUBE).mul_(x).mul_(_SigmoidGELU.SCALE)
        )  # x du/dx
        return slope.mul_(gate).mul_(1 - gate).add_(gate).mul_(outer)


class Dropout(nn.Dropout):
    """nn.Dropout whose mask comes from 16 random bits a number: PyTorch draws one number at a time on CPUs
    that are not Intel's.

    The share kept is the nearest of 65,536 steps to 1 - p, and what is kept is divided by that share. Masks
    follow torch's seed.
    """

    STEPS = 2**16

    def forward(self, x: Tensor) -> Tensor:
        kept = round((1 - self.p) * self.STEPS)
        if not self.training or x.is_cuda or not 0 < kept < self.STEPS:
            return F.dropout(x, self.p, self.training)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        mask = words.view(torch.int16)[: x.numel()].view(x.shape) < kept - self.STEPS // 2
        return x * mask.to(x.dtype).mul_(self.STEPS / kept)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, with the mask of `Dropout` where attention weights are dropped: PyTorch has no
    fused kernel for that on a CPU."""
    if not dropout or query.is_cuda or key.shape != query.shape:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if attention_mask is None:  # sdpa's way to say causal
        attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    scores = torch.matmul(query * scaling, key.transpose(2, 3))  # under autocast of another type than queries
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = Dropout(dropout)(scores.softmax(-1))
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa_dropout", attention)
AttentionMaskInterface.register("sdpa_dropout", sdpa_mask)


def speed_up(model: PreTrainedModel) -> None:
    """Replaces every NewGELUActivation and nn.Dropout inside `model`, and `sdpa` where it would drop
    attention weights."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, TanhGELU())
            elif type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p).train(child.training))
    drops = getattr(model.config, "attn_pdrop", 0.0) or getattr(
        model.config, "attention_dropout", 0.0
    )  # GPT-2's name, Llama's name
    if drops and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("sdpa_dropout")
