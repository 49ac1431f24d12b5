"""What is measured of policies with latents on logged replies: how likely the replies are whatever the
latents, and what the latents say.

    log p(x) >= E log 1/K sum_k w_k,   w_k = p(x | z_k) p(z_k) / q(z_k | x),   z_k ~ q     (Burda et al. 2016)

The bound rises to log p(x) with K. x are the replies of one row, one conversation most often; averaging over
a whole batch first, as the code of 2019 did, is a looser bound. A policy that acts by values has no
posterior of what it says: there q is the prior, and w_k = pi(x | z_k).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.batch import Batch, collate
from rl_dialog.evaluation.intervals import Measure
from rl_dialog.evaluation.scoring import TOKENS_PER_BATCH, LoggedReplies, per_decision, row_batches
from rl_dialog.models.latents import LatentTerms, latent_seeds
from rl_dialog.models.policy import Policy
from rl_dialog.models.seeded_noise import derived

DRAWS = 32  # K
ACTIVE = 0.01  # variance of a posterior mean over messages above which its unit says something


@dataclass
class LatentFigures:
    """Of R rows and their M messages."""

    nll: np.ndarray  # (R,) -log p of each row's replies, by importance sampling
    lm_nll: np.ndarray  # (R,) the same for the plain LM
    tokens: np.ndarray  # (R,)
    kl: list[np.ndarray] = field(default_factory=list)  # (messages of a row,) each
    means: list[np.ndarray] = field(default_factory=list)  # (messages of a row, Z) each


@torch.no_grad()
def latent_figures(policy: Policy, logged: LoggedReplies, *, draws: int = DRAWS) -> LatentFigures:
    """With `draws` latents of each row, which follow from its number."""
    count = len(logged.rows)
    found = LatentFigures(*(np.zeros(count) for _ in range(3)), [np.empty(0)] * count, [np.empty(0)] * count)
    for indices in row_batches([len(row.input_ids) for row in logged.rows], TOKENS_PER_BATCH):
        batch = collate([logged.rows[i] for i in indices]).to(policy.device)
        if not batch.decisions:
            continue
        seeds = derived(torch.tensor(indices, device=policy.device), 0)
        weights, terms = [], None
        for k in range(draws):
            batch.noise = latent_seeds(derived(seeds, k))
            of_draw, terms = _weights(policy, batch)
            weights.append(of_draw)
        together = torch.stack(weights).double().logsumexp(0) - np.log(draws)  # (2, B)
        found.nll[indices], found.lm_nll[indices] = -together.cpu().numpy()
        found.tokens[indices] = np.bincount(batch.rows.cpu().numpy(), minlength=len(indices))
        for place, i in enumerate(indices) if terms is not None else ():
            mine = terms.rows == place
            found.kl[i], found.means[i] = terms.kl[mine].cpu().numpy(), terms.means[mine].cpu().numpy()
    return found


def _weights(policy: Policy, batch: Batch) -> tuple[Tensor, LatentTerms | None]:
    """(2, B) log w of the policy and of its plain LM for one draw of each row."""
    terms = None
    if policy.method.draws_from_posterior:
        out, terms = policy.inferred(batch)
    else:
        out = policy.outputs(batch)
    figures = per_decision(policy, None, batch, out)
    logp = torch.stack([figures["logp"], figures["lm_logp"]]).float()
    sums = logp.new_zeros(2, len(batch.input_ids)).index_add(1, batch.rows, logp)
    return sums if terms is None else sums + terms.importance, terms


def latent_measures(found: LatentFigures, logged: LoggedReplies) -> dict[str, Measure]:
    """Perplexities over all latents; of policies that clone, KL per message and active units too."""
    starts = np.cumsum([0, *(len(row.reply_ends) for row in logged.rows)])[:-1]
    dialog = logged.dialog[starts]  # of each row

    def per_dialog(values: np.ndarray) -> np.ndarray:
        return np.bincount(dialog, values, minlength=logged.dialogs)

    tokens = per_dialog(found.tokens)
    measures = {
        "perplexity": Measure(per_dialog(found.nll), tokens, exponential=True),
        "lm_perplexity": Measure(per_dialog(found.lm_nll), tokens, exponential=True),
    }
    messages = np.array([len(kl) for kl in found.kl], float)
    if not messages.sum():
        return measures
    sums = np.array([kl.sum() for kl in found.kl])
    means = np.concatenate([each for each in found.means if len(each)])
    measures["kl_per_message"] = Measure(per_dialog(sums), per_dialog(messages))
    measures["active_units"] = Measure.whole(float((means.var(0) > ACTIVE).sum()))
    return measures
