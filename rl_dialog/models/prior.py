"""The frozen prior: the language model that KL-control stays near, or the weighted average of several (model averaging)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_dialog.data.batch import Batch
from rl_dialog.methods import BC
from rl_dialog.methods.scores import Mixture, Scores
from rl_dialog.models.policy import Policy


class Prior(nn.Module):
    """p(a|s) = sum_i w_i p_i(a|s) over frozen language models with one vocabulary; the weights are normalised to sum 1.

    Raises ValueError for weights that do not fit, or models whose vocabularies differ.
    """

    def __init__(self, lms: Sequence[PreTrainedModel], weights: Sequence[float] = ()) -> None:
        super().__init__()
        weights = tuple(weights) or (1.0,) * len(lms)
        if len(weights) != len(lms) or min(weights) <= 0:
            raise ValueError(f"expected a positive weight for each of the prior's {len(lms)} models, got {list(weights)}")
        sizes = sorted({lm.get_output_embeddings().weight.shape[0] for lm in lms})
        if len(sizes) > 1:
            raise ValueError(f"expected models of one vocabulary to average, got {sizes} tokens: tokens are matched by their ids")
        self.members = nn.ModuleList(Policy(lm, BC()) for lm in lms).requires_grad_(False)
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self.vocabulary = sizes[0]
        self.eval()

    @torch.no_grad()
    def prior_scores(self, batch: Batch) -> Scores:
        """log p (up to a constant of each state) over the vocabulary in the batch's S states."""
        scores = [member.outputs(batch).lm for member in self.members]
        return scores[0] if len(scores) == 1 else Mixture(scores, torch.tensor(self.weights).log())

    @torch.no_grad()
    def prior_logp(self, batch: Batch) -> Tensor:
        """(N,) log p(action)."""
        return -self.prior_scores(batch).nll(batch.actions)[1]
