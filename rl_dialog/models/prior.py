"""The frozen prior: the language model that KL-control stays near, or the weighted average of several (model
averaging)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_dialog.data.batch import Batch
from rl_dialog.errors import UserError
from rl_dialog.methods import BC
from rl_dialog.methods.scores import Mixture, Scores
from rl_dialog.models.policy import Policy
from rl_dialog.models.steering import Steering


class Prior(nn.Module):
    """p(a|s) = sum_i w_i p_i(a|s) over frozen language models with one vocabulary; the weights are normalised
    to sum 1.

    Raises UserError for weights that do not fit, or models whose vocabularies differ.
    """

    def __init__(self, lms: Sequence[PreTrainedModel], weights: Sequence[float] = ()) -> None:
        super().__init__()
        weights = tuple(weights) or (1.0,) * len(lms)
        if len(weights) != len(lms) or not proper_weights(weights):
            raise UserError(
                f"expected a positive weight for each of the prior's {len(lms)} models, got {list(weights)}: "
                "finite numbers above 0"
            )
        sizes = sorted({lm.get_output_embeddings().weight.shape[0] for lm in lms})
        if len(sizes) > 1:
            raise UserError(
                f"expected models of one vocabulary to average, got {sizes} tokens: tokens are matched by "
                "their ids"
            )
        self.members = nn.ModuleList(Policy(lm, BC()) for lm in lms).requires_grad_(False)
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self.vocabulary = sizes[0]
        self.eval()

    def steered_by(self, steering: Steering | None) -> Prior:
        """The same with values beside its models, as `online` starts from (models/steering.py)."""
        for member in self.members:
            member.steering = steering
        return self

    @torch.no_grad()
    def prior_scores(self, batch: Batch) -> Scores:
        """log p plus a level of each state over the vocabulary in the batch's S states.

        The level is the log-sum-exp of the logits, averaged over the models by their weights: way_off_policy
        reads it, and so a model averaged with itself is that model in every respect.
        """
        scores = [member.outputs(batch).lm for member in self.members]
        if len(scores) == 1:
            return scores[0]
        weights = torch.tensor(self.weights, device=batch.input_ids.device)
        level = sum(
            weight * each.reduce("logsumexp").float() for weight, each in zip(weights, scores, strict=True)
        )
        return Mixture(scores, weights.log(), level)

    @torch.no_grad()
    def prior_logp(self, batch: Batch) -> Tensor:
        """(N,) log p(action)."""
        return -self.prior_scores(batch).nll(batch.actions)[1]


def proper_weights(weights: Sequence[float]) -> bool:
    """Whether they can be shares of one sum: all finite and above 0."""
    return all(math.isfinite(weight) and weight > 0 for weight in weights) and math.isfinite(sum(weights))
