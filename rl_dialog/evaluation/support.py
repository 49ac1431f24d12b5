"""How much of what a policy says lies outside the logs: conversations that no weight can bring back, because
the logs cannot hold them.

At a logged state s the mass outside is m(s) = sum_a pi(a given s) [pi(a given s) > n mu(a given s)]: what mu
never says, and what it says so seldom that of n dialogs not one is expected to hold it. Nothing lies outside
for pi = mu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.tokenize import Row
from rl_dialog.evaluation.scoring import CHUNK_ELEMENTS, TOKENS_PER_BATCH, LoggedReplies, in_states
from rl_dialog.models.policy import Policy


@torch.no_grad()
def decisions_outside(
    policy: Policy, behaviour: Policy, logged: LoggedReplies, theirs: LoggedReplies
) -> list[np.ndarray]:
    """(T, 2) per dialog with replies: log pi - log mu of the logged token of each decision, and m of its
    state.

    `logged` and `theirs` are the same decisions, each as its policy sees them (windows may differ).
    """
    reach = float(np.log(len(np.unique(logged.dialog))))
    tables = []
    for ours, behaviours in _together(_rows_of(logged), _rows_of(theirs)):
        batches = [collate([row for rows in dialogs for row in rows]) for dialogs in (ours, behaviours)]
        table = np.concatenate(list(_in_chunks((policy, behaviour), batches, reach)))
        ends = np.cumsum([sum(int(row.assistant.sum()) for row in rows) for rows in ours])
        tables += np.split(table, ends[:-1])
    return tables


def _in_chunks(policies: Sequence[Policy], batches: Sequence[Batch], reach: float) -> Iterator[np.ndarray]:
    """`decisions_outside`, for the decisions of a batch as each of the two policies sees it."""
    batches = [batch.to(policy.device) for policy, batch in zip(policies, batches, strict=True)]
    outs = [policy.outputs(batch) for policy, batch in zip(policies, batches, strict=True)]
    size = max(
        1, CHUNK_ELEMENTS // max(policy.get_output_embeddings().weight.shape[0] for policy in policies)
    )
    for start in range(0, batches[0].decisions, size):
        states = slice(start, min(start + size, batches[0].decisions))
        pi, mu = (
            policy.method.decode(in_states(out, states)).float().log_softmax(1)
            for policy, out in zip(policies, outs, strict=True)
        )
        mu = mu.to(pi.device)
        actions = batches[0].actions[states, None]
        ratio = (pi.gather(1, actions) - mu.gather(1, actions)).squeeze(1)
        padding = max(
            0, pi.shape[1] - mu.shape[1]
        )  # rows of a larger embedding: tokens that mu does not have
        mu = torch.nn.functional.pad(mu[:, : pi.shape[1]], (0, padding), value=-torch.inf)
        outside = (pi.exp() * (pi > mu + reach)).sum(1)
        yield torch.stack([ratio, outside], 1).double().cpu().numpy()


def _rows_of(logged: LoggedReplies) -> list[list[Row]]:
    """The rows of each dialog with replies."""
    dialogs: dict[int, list[Row]] = {}
    for owner, row in zip(logged.owners.tolist(), logged.rows, strict=True):
        dialogs.setdefault(owner, []).append(row)
    return list(dialogs.values())


def _together(
    ours: Sequence[list[Row]], others: Sequence[list[Row]]
) -> Iterator[tuple[Sequence[list[Row]], Sequence[list[Row]]]]:
    """Neighbouring dialogs, as both policies see them, about TOKENS_PER_BATCH tokens at a time."""
    start = longest = rows = 0
    for end, pair in enumerate(zip(ours, others, strict=True)):
        longest, rows = (
            max(longest, *(len(row.input_ids) for dialog_rows in pair for row in dialog_rows)),
            rows + max(map(len, pair)),
        )
        if end > start and longest * rows > TOKENS_PER_BATCH:
            yield ours[start:end], others[start:end]
            start, longest, rows = (
                end,
                max(len(row.input_ids) for dialog_rows in pair for row in dialog_rows),
                max(map(len, pair)),
            )
    yield ours[start:], others[start:]


def mass_outside(decisions: Sequence[np.ndarray]) -> np.ndarray:
    """(D,) numbers whose mean is the share of the policy's conversations that leave the logs, and whose
    spread is its spread.

    1 - prod_t (1 - h_t), h_t = sum_i w_it m_it / sum_i w_it, w_it the weight of dialog i before decision t
    (its last weight, and m = 0, once it has ended): of the conversations that are inside so far, h_t leave at
    decision t. Never needs a weight of a word that was not said. A dialog's number is that plus n times its
    influence (the infinitesimal jackknife).
    """
    turns = max(map(len, decisions))
    log_w, m = np.zeros((len(decisions), turns)), np.zeros((len(decisions), turns))
    for i, decision_rows in enumerate(decisions):
        total = np.cumsum(decision_rows[:, 0])
        log_w[i, 1 : len(decision_rows) + 1] = total[: turns - 1]
        log_w[i, len(decision_rows) + 1 :] = total[-1]
        m[i, : len(decision_rows)] = decision_rows[:, 1]
    alive = np.isfinite(
        log_w.max(0)
    )  # from where on the policy says nothing that is in the logs, they know no more
    log_w, m = log_w[:, alive], m[:, alive]
    w = np.exp(log_w - log_w.max(0))
    w /= w.sum(0)
    h = (w * m).sum(0)
    stays = np.clip(1 - h, 1e-12, 1)
    inside = np.prod(stays)
    return 1 - inside + len(w) * inside * (w * (m - h) / stays).sum(1)
