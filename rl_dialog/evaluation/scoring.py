"""What a policy says about logged replies: their log-probabilities, the divergence from the prior, and the
critic's values. No text is generated.

Everything is exact over the vocabulary, a chunk of states at a time, so no (N, V) tensor of a whole batch
ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import Row, tokenize
from rl_dialog.errors import UserError
from rl_dialog.evaluation.intervals import Measure
from rl_dialog.methods.backup import minimum
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Scores, kl_divergence
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK_ELEMENTS = 1 << 21  # numbers in one chunk of scores: 8 MB in float32
TOKENS_PER_BATCH = 8192
WAYS = (
    "utterance Q",
    "mean Q",
    "last-token Q",
    "mean Q - V",
    "sum of Q - V",
    "last V",
    "mean log-probability",
    "log-probability",
)  # to rank replies
COLUMNS = ("nll", "lm_nll", "kl", "q", "q_last", "advantage", "v_last", "utterance_q")


@dataclass(frozen=True)
class LoggedReplies:
    """Held-out dialogs as token rows. R replies, numbered through the dialogs in order."""

    rows: list[Row]
    dialog: np.ndarray  # (R,) int64: the dialog of each reply
    dialogs: int

    @property
    def owners(self) -> np.ndarray:
        """The dialog of each row # (rows,) int64"""
        first_reply = np.cumsum([0, *(len(row.reply_ends) for row in self.rows[:-1])])
        return self.dialog[first_reply]

    def of(self, dialogs: np.ndarray) -> LoggedReplies:
        """The replies of some dialogs, which keep their numbers."""
        rows = [row for row, kept in zip(self.rows, np.isin(self.owners, dialogs), strict=True) if kept]
        return replace(self, rows=rows, dialog=self.dialog[np.isin(self.dialog, dialogs)])


@dataclass(frozen=True)
class ReplyScores:
    """Sums over the decisions of each of R replies; NaN where the policy has no such number."""

    tokens: np.ndarray  # (R,) decisions, the end of turn included
    nll: np.ndarray  # -log pi(a|s), pi being what the policy samples from
    lm_nll: np.ndarray  # the same for the plain LM
    kl: np.ndarray  # KL(pi || prior)
    q: np.ndarray  # min over the target heads, at the taken tokens
    q_last: np.ndarray  # the same at the last decision only (not a sum)
    advantage: np.ndarray  # q - V
    v_last: np.ndarray  # V of the state before the last decision (not a sum)
    utterance_q: np.ndarray  # min over the target heads of the reply's own value (not a sum)
    kl_missing: str = ""  # why there is no KL

    def of(self, replies: np.ndarray) -> ReplyScores:
        """Those of some replies # (R,) bool"""
        columns = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kl_missing"}
        return replace(self, **{name: column[replies] for name, column in columns.items()})


def logged_replies(
    dialogs: Sequence[Dialog], tokenizer: PreTrainedTokenizerFast, *, max_length: int
) -> LoggedReplies:
    """The rows of `dialogs` under a policy's own tokenizer."""
    rows, owner = [], []
    for number, dialog in enumerate(dialogs):
        windows = tokenize(dialog, tokenizer, max_length=max_length)
        rows += windows
        owner += [number] * sum(len(row.reply_ends) for row in windows)
    return LoggedReplies(rows, np.array(owner, dtype=np.int64), len(dialogs))


@torch.no_grad()
def score_replies(
    policy: Policy,
    logged: LoggedReplies,
    *,
    prior: Prior | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> ReplyScores:
    """Scores every logged reply. Without a `prior`, a policy that steers its own LM is compared with that LM;
    any other has no KL."""
    frozen, kl_missing = reference_policy(policy, prior)
    return ReplyScores(*_score_rows(policy, frozen, logged.rows, tokens_per_batch).T, kl_missing=kl_missing)


def rank_replies(
    policy: Policy, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], *, by: str
) -> np.ndarray:
    """(replies,) how good the policy finds each reply (ids, end of turn included) behind its prompt. Raises
    UserError for a way it does not have."""
    return all_rankings(policy, prompts, replies, by=by)[by]


@torch.no_grad()
def all_rankings(
    policy: Policy, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], *, by: str
) -> dict[str, np.ndarray]:
    """The same in every way that the policy has; `by` has to be one of them."""
    rows = [Row.of_reply(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
    rankings = critic_scores(ReplyScores(*_score_rows(policy, None, rows, TOKENS_PER_BATCH).T))
    if by not in rankings:
        raise UserError(
            f"cannot rank replies by {by!r}: expected one of {', '.join(map(repr, rankings))}, which is what "
            "this policy has"
        )
    return rankings


def _score_rows(
    policy: Policy, frozen: Prior | Policy | None, rows: Sequence[Row], tokens_per_batch: int
) -> np.ndarray:
    """(replies, 1 + len(COLUMNS)) of all rows, in their order."""
    first_reply = np.cumsum([0, *(len(row.reply_ends) for row in rows)])  # first reply of each row
    table = np.full((first_reply[-1], 1 + len(COLUMNS)), np.nan)
    for indices in row_batches([len(row.input_ids) for row in rows], tokens_per_batch):
        batch = collate([rows[i] for i in indices]).to(policy.device)
        if batch.decisions:
            places = np.concatenate([np.arange(first_reply[i], first_reply[i + 1]) for i in indices])
            out = policy.outputs(batch)
            table[places] = _per_reply(policy, batch, out, per_decision(policy, frozen, batch, out))
    return table


def held_out_measures(scores: ReplyScores, logged: LoggedReplies) -> dict[str, Measure]:
    """Perplexities and divergences; one unit per dialog."""

    def per_dialog(values: np.ndarray) -> np.ndarray:
        return np.bincount(logged.dialog, values, minlength=logged.dialogs)

    tokens, replies = per_dialog(scores.tokens), per_dialog(np.ones_like(scores.tokens))
    measures = {
        "perplexity": Measure(per_dialog(scores.nll), tokens, exponential=True),
        "lm_perplexity": Measure(per_dialog(scores.lm_nll), tokens, exponential=True),
    }
    if not np.isnan(scores.kl).all():
        measures |= {
            "kl": Measure(per_dialog(scores.kl), tokens),
            "kl_per_reply": Measure(per_dialog(scores.kl), replies),
        }
    return measures


def critic_scores(scores: ReplyScores) -> dict[str, np.ndarray]:
    """Ways to rank replies, the one reported as the critic's first: a reply's own Q, mean Q where there are Q
    values, else the mean log-probability.

    The last token's Q is the predicted return: what is expected once the reply has been said.
    """
    q, advantage, logp = (values / scores.tokens for values in (scores.q, scores.advantage, -scores.nll))
    values = (
        scores.utterance_q,
        q,
        scores.q_last,
        advantage,
        scores.advantage,
        scores.v_last,
        logp,
        -scores.nll,
    )
    columns = dict(zip(WAYS, values, strict=True))
    return {way: values for way, values in columns.items() if not np.isnan(values).all()}


def token_table(
    policy: Policy,
    prior: Prior | None,
    prompt: Sequence[int],
    reply: Sequence[int],
    *,
    noise: Tensor | None = None,
) -> list[dict[str, float | int | None]]:
    """One row per token of a reply: q, v, advantage, and log-probabilities under the prior, the plain LM and
    the policy. noise (1,): the seed of the latents that it was said with, otherwise they are their means."""
    frozen, _ = reference_policy(policy, prior)
    with torch.no_grad():
        batch = collate([Row.of_reply(prompt, reply)]).to(policy.device)
        batch.noise = noise
        figures = per_decision(policy, frozen, batch, policy.outputs(batch))
    names = {
        "q": "q",
        "v": "v",
        "advantage": "advantage",
        "prior": "prior_logp",
        "lm": "lm_logp",
        "policy": "logp",
    }
    columns = {name: figures[key].tolist() for name, key in names.items()}
    return [
        {"token": int(token), **{name: _or_none(columns[name][i]) for name in columns}}
        for i, token in enumerate(reply)
    ]


def reference_policy(policy: Policy, prior: Prior | None) -> tuple[Prior | Policy | None, str]:
    """What has `prior_scores` (the policy itself: its LM is the prior), or None and the reason."""
    if prior is not None:
        ours = policy.get_output_embeddings().weight.shape[0]
        if ours != prior.vocabulary:
            return None, f"the prior has {prior.vocabulary} tokens, the policy {ours}"
        return prior.to(policy.device), ""
    if not policy.method.plain_lm:
        return policy, ""
    return None, "the checkpoint names no frozen prior"


def per_decision(
    policy: Policy, frozen: Prior | Policy | None, batch: Batch, out: Outputs
) -> dict[str, Tensor]:
    """(N,) numbers per decision of a batch, in chunks of decisions."""
    prior = None if frozen in (None, policy) else frozen.prior_scores(batch)
    vocabulary = policy.get_output_embeddings().weight.shape[0]
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    chunks: list[dict[str, Tensor]] = []
    for start in range(0, batch.decisions, size):
        states = slice(start, min(start + size, batch.decisions))
        chunk = in_states(out, states)
        reference = chunk.lm if frozen is policy else _part(prior, states)
        chunks.append(_chunk(policy, chunk, reference, batch.actions[states]))
    return {name: torch.cat([figures[name] for figures in chunks]) for name in chunks[0]}


def _chunk(policy: Policy, out: Outputs, prior: Scores | None, actions: Tensor) -> dict[str, Tensor]:
    log_pi = policy.method.decode(out).float().log_softmax(1)  # (S, V)
    log_lm = log_pi if policy.method.plain_lm else out.lm.dense().log_softmax(1)
    log_p = None if prior is None else log_lm if prior is out.lm else prior.dense().log_softmax(1)
    q, v = values_of(policy, out, actions, prior)
    nothing = torch.full_like(q, torch.nan)

    def of_actions(table: Tensor | None) -> Tensor:
        return nothing if table is None else table.gather(1, actions[:, None]).squeeze(1)

    figures = {
        "logp": of_actions(log_pi),
        "lm_logp": of_actions(log_lm),
        "prior_logp": of_actions(log_p),
        "q": q,
        "v": v,
        "advantage": q - v,
    }
    return figures | {"kl": nothing if log_p is None else kl_divergence(log_pi, log_p)}


def values_of(
    policy: Policy, out: Outputs, actions: Tensor, prior: Scores | None = None
) -> tuple[Tensor, Tensor]:
    """(S,) Q of the actions and (S,) V of the states, in units of reward; NaN where the method has none."""
    method = policy.method
    nothing = torch.full((len(actions),), torch.nan, device=actions.device)
    q = nothing
    if heads := out.q_target or out.q:
        q = minimum(tuple(head.at(actions) for head in heads))
    elif (
        method.heads.lm_target
    ):  # Q is the LM's logits and what the method raises them by; b is known where the prior is
        q = out.lm.at(actions) + (0.0 if out.v is None else out.v)
        if prior is not None and method.origin == "prior":
            q = q - prior.reduce("logsumexp")
    return (
        q * policy.value_unit,
        nothing if out.v is None or method.heads.lm_target else out.v * policy.value_unit,
    )


def in_states(out: Outputs, states: Any) -> Outputs:
    """What a policy says about some of the states: a slice or a tensor of their indices."""
    return replace(out, **{field.name: _part(getattr(out, field.name), states) for field in fields(out)})


def _per_reply(policy: Policy, batch: Batch, out: Outputs, figures: dict[str, Tensor]) -> np.ndarray:
    """(replies, 1 + len(COLUMNS)) sums over each reply's decisions: tokens, then COLUMNS."""
    reply, is_last = batch.reply.cpu().numpy(), batch.turn_end.cpu().numpy()
    count = int(is_last.sum())

    def summed(values: Tensor) -> np.ndarray:
        return np.bincount(reply, values.double().cpu().numpy(), minlength=count)

    sums = {f"{name}_last": figures[name].double().cpu().numpy()[is_last] for name in ("q", "v")}
    sums |= {"nll": summed(-figures["logp"]), "lm_nll": summed(-figures["lm_logp"])}
    reply_q = (
        minimum(out.utterance_q_target).double().cpu().numpy()
        if out.utterance_q_target
        else np.full(count, np.nan)
    )
    sums["utterance_q"] = reply_q * policy.value_unit
    sums |= {name: summed(figures[name]) for name in ("kl", "q", "advantage")}
    return np.stack([np.bincount(reply, minlength=count), *(sums[name] for name in COLUMNS)], axis=1)


def _part(value: Any, states: Any) -> Any:
    """The chosen states of whatever a policy says about all of them."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_part(item, states) for item in value)
    if isinstance(value, Tensor):
        return value[states]
    if isinstance(value, Scores):
        return value.rows(states)
    raise TypeError(f"expected scores or a tensor to cut into chunks, got {type(value).__name__}")


def row_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of rows of similar length, at most `tokens` padded tokens together (one row at least)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[i] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else value
