"""What is measured of policies with latents on logged replies: how likely the replies are whatever the
latents, and what the latents say.

    log p(x) >= E log 1/K sum_k w_k,   w_k = p(x | z_k) p(z_k) / q(z_k | x),   z_k ~ q     (Burda et al. 2016)

The bound rises to log p(x) with K. x is one reply: the latents of messages know of each other only by words,
so log p of a conversation is the sum over its replies, and the bound is as tight in a long one as in a short
one. A latent of the whole conversation (VHCR) joins them: there x are all replies of one row, and the bound
is looser the more there are. Averaging over a whole batch first, as the code of 2019 did, is looser still. A
policy that acts by values has no posterior of what it says: there q is the prior, and w_k = pi(x | z_k).
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
from rl_dialog.models.message_chunk import Chunk
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
        weights, terms, part = [], None, _joined(policy, batch)
        for k in range(draws):
            batch.noise = latent_seeds(derived(seeds, k))
            of_draw, terms = _weights(policy, batch, part)
            weights.append(of_draw)
        together = torch.stack(weights).double().logsumexp(0) - np.log(draws)  # (2, X)
        row = torch.empty(together.shape[1], dtype=torch.int64, device=policy.device)
        row[part] = batch.rows
        sums = together.new_zeros(2, len(indices)).index_add(1, row, together)
        found.nll[indices], found.lm_nll[indices] = -sums.cpu().numpy()
        found.tokens[indices] = np.bincount(batch.rows.cpu().numpy(), minlength=len(indices))
        for place, i in enumerate(indices) if terms is not None else ():
            mine = terms.rows == place
            found.kl[i], found.means[i] = terms.kl[mine].cpu().numpy(), terms.means[mine].cpu().numpy()
    return found


def _joined(policy: Policy, batch: Batch) -> Tensor:
    """(N,) which x each decision is of, in reading order: its message, or where a latent of the conversation
    joins these, its row."""
    if policy.config.conversation_latent:
        x = batch.rows
    else:
        ends = torch.tensor(policy.config.message_end_ids, device=policy.device)
        chunk = Chunk.of(batch.input_ids, batch.attention_mask, ends)
        x = batch.rows * chunk.width + chunk.said_from.flatten()[batch.states[: batch.decisions]]
    return x.unique_consecutive(return_inverse=True)[1]


def _weights(policy: Policy, batch: Batch, part: Tensor) -> tuple[Tensor, LatentTerms | None]:
    """(2, X) log w of the policy and of its plain LM for one draw of the latents."""
    terms = None
    if policy.method.draws_from_posterior:
        out, terms = policy.inferred(batch)
    else:
        out = policy.outputs(batch)
    figures = per_decision(policy, None, batch, out)
    logp = torch.stack([figures["logp"], figures["lm_logp"]]).float()
    sums = logp.new_zeros(2, int(part[-1]) + 1).index_add(1, part, logp)
    if terms is None:
        return sums, None
    if terms.conversation_importance is None:
        return sums + terms.importance, terms  # a message each
    of_rows = terms.conversation_importance.index_add(0, terms.rows, terms.importance)
    return sums + of_rows[batch.rows.unique_consecutive()], terms


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
