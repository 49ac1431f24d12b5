"""What a frozen LM would answer to every context of the data: replies as features and log-probabilities,
drawn once before training (CHAI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_dialog.data.batch import collate
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.models.latents import AT_MEAN
from rl_dialog.models.policy import Policy, hidden_states, running_means
from rl_dialog.models.prefill import read_prompts


@dataclass(frozen=True)
class Proposals:
    """n replies to the context of each of a row's R replies."""

    features: np.ndarray  # (R, n, H) float32: what Q reads of the context with the proposed reply
    logp: np.ndarray  # (R, n) float32: log p(reply | context), the end of turn included


@torch.no_grad()
def propose(
    policy: Policy, rows: Sequence[Row], *, eos_id: int, pad_id: int, seed: int, batch_size: int = 128
) -> list[Proposals]:
    """`policy.method.proposals` sampled replies to every context of every row; contexts of similar length are
    answered together.

    The same seed, rows and model give the same proposals. A context is cut on the left where the longest
    reply would not fit the model's window.
    """
    count, tokens = policy.method.proposals, policy.method.proposal_tokens
    window = policy.context or 1 << 30
    if window <= tokens:
        raise UserError(
            f"expected proposals that leave room for a context, got {tokens} tokens with a model of {window} "
            "positions"
        )
    contexts = [row.input_ids[:start][tokens - window :] for row in rows for start in row.reply_starts]
    width = policy.get_output_embeddings().weight.shape[1]  # not that of the layers, in every architecture
    features = np.empty((len(contexts), count, width), np.float32)
    logp = np.empty((len(contexts), count), np.float32)
    torch.manual_seed(seed)
    order = np.argsort([len(ids) for ids in contexts], kind="stable")
    for at in range(0, len(order), max(1, batch_size // count)):
        chosen = order[at : at + max(1, batch_size // count)]
        replies = _sample(policy, [contexts[i] for i in chosen], count, tokens, eos_id=eos_id, pad_id=pad_id)
        proposed = [Row.of_reply(contexts[chosen[k // count]], reply) for k, reply in enumerate(replies)]
        batch = collate(proposed, pad_id=pad_id).to(policy.device)
        hidden = hidden_states(policy.lm.base_model, batch)  # (rows * T, H)
        read = (
            running_means(hidden.view(*batch.input_ids.shape, -1))
            if policy.method.heads.utterance_mean
            else hidden
        )
        features[chosen] = read[batch.reply_ends].view(len(chosen), count, -1).float().cpu().numpy()
        each = -policy.output_layer.scores(policy.lm, hidden[batch.states]).nll(batch.actions)[1]
        sums = each.new_zeros(len(proposed)).index_add(0, batch.rows, each)
        logp[chosen] = sums.view(len(chosen), count).cpu().numpy()
    ends = np.cumsum([len(row.reply_ends) for row in rows])[:-1]
    return [Proposals(*parts) for parts in zip(np.split(features, ends), np.split(logp, ends), strict=True)]


def _sample(
    policy: Policy, contexts: Sequence[np.ndarray], count: int, tokens: int, *, eos_id: int, pad_id: int
) -> list[np.ndarray]:
    """`count` replies to each context, side by side, the end of turn included where it came. A context is
    read once for all of them."""
    width = max(map(len, contexts))
    ids = np.full((len(contexts), width), pad_id, np.int64)
    for row, context in zip(ids, contexts, strict=True):
        row[width - len(context) :] = context
    mask = np.arange(width) >= width - np.array([[len(context)] for context in contexts])
    prompts, mask = torch.from_numpy(ids).to(policy.device), torch.from_numpy(mask).long().to(policy.device)
    rows = torch.arange(len(contexts), device=policy.device).repeat_interleave(count)
    cache = read_prompts(policy.lm, prompts, mask, rows, room=tokens)
    settings = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": tokens,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }
    if policy.has_latents:  # drawn as they are valued, from latents that are their means
        settings["noise"] = torch.full((len(rows),), AT_MEAN, device=policy.device)
    out = policy.lm.generate(
        input_ids=prompts[rows], attention_mask=mask[rows], past_key_values=cache, **settings
    )
    replies = out[:, width:].cpu().numpy()
    ends = np.where((replies == eos_id).any(1), (replies == eos_id).argmax(1) + 1, replies.shape[1])
    return [reply[:end] for reply, end in zip(replies, ends, strict=True)]
