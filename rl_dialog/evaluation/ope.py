"""A policy's return estimated from logs alone, without letting it talk: fitted Q evaluation, the direct
method, weighted importance sampling.

The decision process is that of data/batch.py: one action per token, rewards at the end of a reply, `gamma`
per token or per turn. The policy is pi = softmax(decode), sampled at temperature 1. README.md has the
formulas and what each estimate cannot know; `notes` say what went wrong in a run.

A missing reward is unknown, never 0. A dialog with one has no return: it is left out, and counted in the
notes. Fitted Q evaluation leaves out the TD errors that would need it. Only where nothing but last replies is
rated, so that a reward is what its dialog came to, the replies before it earned 0 (`known_outcomes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import Row, load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.fqe import FQE, at_first, evaluate_q, expected, fit, read_pieces
from rl_dialog.evaluation.generation import load_for_decoding
from rl_dialog.evaluation.intervals import Measure
from rl_dialog.evaluation.scoring import LoggedReplies, ReplyScores, logged_replies, score_replies
from rl_dialog.evaluation.support import decisions_outside, mass_outside
from rl_dialog.models.checkpoint import likeliest
from rl_dialog.models.policy import Policy

ESTIMATORS = ("fqe", "dm", "wis", "pdwis")
# standard errors that the mass outside the logs may move an estimate by; more, and an interval would cover
# too seldom (README.md)
NUDGE = 0.25
FEW = 40.0  # effective dialogs below which bootstrap intervals of weighted means cover too seldom (README.md)


@dataclass(frozen=True)
class Discount:
    """How rewards to come count."""

    gamma: float = 1.0
    per: str = "token"  # or turn


@dataclass(frozen=True)
class Behaviour:
    """A stand-in for the policy that wrote the logs, and what it thinks of the held-out replies."""

    name: str
    logged: LoggedReplies
    nll: np.ndarray  # (R,) -log mu(reply)
    policy: Policy | None = None  # to ask what else it could have said


@dataclass
class Estimates:
    """Figures of one policy, and what a reader must know about them."""

    measures: dict[str, Measure] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add_note(self, figure: str, *texts: str) -> None:
        """Appends the texts that are not empty."""
        note = " ".join([self.notes.get(figure, ""), *texts]).strip()
        self.notes |= {figure: note} if note else {}


def read_behaviour(
    directory: str | Path, dialogs: Sequence[Dialog], *, max_length: int, device: object = "cpu"
) -> Behaviour:
    """A checkpoint (of a clone's run folder the one under which held-out replies were likeliest), or a plain
    language model with its tokenizer (a run's prior/ folder), as mu. Raises UserError for neither."""
    place = likeliest(directory)
    policy = load_for_decoding(place).to(device)
    length = min(max_length, policy.longest_row or max_length)
    logged = logged_replies(dialogs, load_tokenizer(place), max_length=length)
    return Behaviour(str(directory), logged, score_replies(policy, logged).nll, policy)


# ------------------------------------------------------------------------------------------------------------
# What was logged


def logged_returns(logged: LoggedReplies, tokens: np.ndarray, discount: Discount) -> np.ndarray:
    """(D,) the return of each held-out dialog as logged; NaN without a reply, or if a reward is missing."""
    values = _rewards(logged) * _discounts(logged, tokens, discount)
    count = np.bincount(logged.dialog, minlength=logged.dialogs)
    return np.where(count > 0, np.bincount(logged.dialog, values, minlength=logged.dialogs), np.nan)


def known_outcomes(logged: LoggedReplies) -> LoggedReplies:
    """The same replies; those before a rated last reply earned 0, if none but last replies are rated."""
    rewards = _rewards(logged)
    rated, is_last = ~np.isnan(rewards), np.append(np.diff(logged.dialog) != 0, True)[: len(rewards)]
    is_before = ~rated & np.isin(logged.dialog, logged.dialog[rated])  # (R,) before a rated last reply
    if (rated & ~is_last).any() or not is_before.any():
        return logged
    filled = np.where(is_before, 0, rewards)
    rewards_by_row = np.split(filled, np.cumsum([len(row.rewards) for row in logged.rows])[:-1])
    rows = [
        replace(row, rewards=row_rewards)
        for row, row_rewards in zip(logged.rows, rewards_by_row, strict=True)
    ]
    return replace(logged, rows=rows)


def _rewards(logged: LoggedReplies) -> np.ndarray:
    """(R,); NaN where it is missing."""
    return np.concatenate([np.empty(0), *(row.rewards for row in logged.rows)]).astype(float)


def _discounts(logged: LoggedReplies, tokens: np.ndarray, discount: Discount) -> np.ndarray:
    """(R,) what a reward at the end of each reply counts in the dialog's first state: gamma to the actions
    (or turn ends) before its last action."""
    steps = tokens if discount.per == "token" else np.ones(len(tokens))
    steps_before = (
        np.concatenate([np.empty(0), *(np.cumsum(counts) for counts in _by_dialog(steps, logged))]) - 1
    )
    return discount.gamma**steps_before


def _by_dialog(values: np.ndarray, logged: LoggedReplies) -> list[np.ndarray]:
    """(R,) numbers of replies, one array per dialog that has replies."""
    return np.split(values, np.flatnonzero(np.diff(logged.dialog)) + 1) if len(values) else []


def _first_rows(logged: LoggedReplies) -> tuple[np.ndarray, np.ndarray]:
    """(the dialogs with replies, the row that each begins in): a later window does not begin where a
    conversation does."""
    return np.unique(logged.owners, return_index=True)


# ------------------------------------------------------------------------------------------------------------
# Fitted Q evaluation and the direct method


def fitted_q(
    policy: Policy,
    train: Sequence[Row],
    logged: LoggedReplies,
    settings: FQE,
    discount: Discount,
    *,
    seed: int = 0,
    quiet: bool = True,
) -> Estimates:
    """`ope/fqe`: E_pi Q in the first state of each held-out dialog, Q learned from `train`; `ope/fqe_td`: its
    mean squared TD error there."""
    if not train:
        raise UserError(
            "--ope fqe: expected replies in the train split to learn from, found none; other estimators need "
            "no training data"
        )
    rewards = np.concatenate([row.rewards for row in train])
    if np.isnan(rewards).all():
        nothing = f"Undefined: none of the {len(rewards):,} training replies has a reward."
        return Estimates(notes={"ope/fqe": nothing})
    shuffled = [train[i] for i in np.random.default_rng([seed, 2]).permutation(len(train))]
    decode, discounting = policy.method.decode, {"gamma": discount.gamma, "discount": discount.per}
    read = partial(read_pieces, policy, batch_size=settings.batch_size)
    q = fit(read(shuffled), decode, settings, seed=seed, quiet=quiet, **discounting)
    fitted = evaluate_q(q, read(logged.rows), decode, **discounting)
    dialogs, rows = _first_rows(logged)
    values = np.full(logged.dialogs, np.nan)
    values[dialogs] = fitted.first[rows]
    estimates = Estimates(
        {"ope/fqe": Measure.mean(values), "ope/fqe_td": Measure(fitted.td_error, fitted.decisions)}
    )
    estimates.add_note("ope/fqe", _all_equal(rewards), _unrated(rewards), _cut(train))
    return estimates


def _all_equal(rewards: np.ndarray) -> str:
    low, high = np.nanmin(rewards), np.nanmax(rewards)
    if low < high:
        return ""
    trivial = "so the estimate is trivial: at most it counts replies, and ranks no policies"
    return f"Every reply of the training dialogs earned {low:g}, {trivial}."


def _unrated(rewards: np.ndarray) -> str:
    if not (unrated := int(np.isnan(rewards).sum())):
        return ""
    return f"{unrated:,} of {len(rewards):,} training replies have no reward: Q guesses it from the others."


def _cut(rows: Sequence[Row]) -> str:
    share = np.mean([row.truncated for row in rows])
    return (
        f"{share:.0%} of the training rows end before their conversation does; what follows them is Q's own "
        "guess."
        if share
        else ""
    )


def direct_method(
    policy: Policy, logged: LoggedReplies, discount: Discount, *, batch_size: int = 32
) -> Estimates:
    """`ope/dm`: E_pi of the policy's own critic in the first state of each held-out dialog."""
    estimates, method = Estimates(), policy.method
    if not method.has_critic:
        estimates.add_note("ope/dm", method.about_q or "The method has no Q over tokens.")
        return estimates
    dialogs, rows = _first_rows(logged)
    pieces = read_pieces(policy, [logged.rows[row] for row in rows], batch_size=batch_size)
    values = np.full(logged.dialogs, np.nan)
    piece_values = [
        at_first(p, expected(method.critic, p.out, method.decode)).double().cpu().numpy() for p in pieces
    ]
    values[dialogs] = np.concatenate(piece_values) * policy.value_unit
    estimates.measures["ope/dm"] = Measure.mean(values)
    estimates.add_note(
        "ope/dm", "The critic's own opinion of its policy, which was made to maximise it: optimistic."
    )
    estimates.add_note("ope/dm", method.about_q)
    gamma, per = method.gamma, method.discount
    if gamma != discount.gamma or (per != discount.per and gamma != 1):
        estimates.add_note(
            "ope/dm",
            f"Discounted as it was trained, by {gamma:g} per {per}, not by {discount.gamma:g} per "
            f"{discount.per}.",
        )
    return estimates


# ------------------------------------------------------------------------------------------------------------
# Importance sampling


def importance_sampling(
    estimators: Sequence[str],
    scores: ReplyScores,
    logged: LoggedReplies,
    behaviour: Behaviour,
    discount: Discount,
    *,
    dialogs: Sequence[Dialog] = (),
    policy: Policy | None = None,
) -> Estimates:
    """`ope/wis`, `ope/pdwis`, and how far to believe them: `ope/n_eff`, `ope/weight` (the mean weight),
    `ope/outside` (the mass outside the logs).

    Over the dialogs whose replies all have a reward and are the same tokens for both policies. Undefined,
    with a note instead of a figure, where there are none, or where mu is 0 at a logged token or pi at one in
    every dialog. Without the `policy`, or the behaviour's, the mass outside is 1 minus the mean weight, which
    is less exact. Raises UserError when the behaviour policy cuts most of the logged replies into other
    tokens.
    """
    estimates, all_dialogs = Estimates(), len(np.unique(logged.dialog))
    if unlike := all_dialogs - len(alike := _read_alike(logged, behaviour)):
        scores = scores.of(np.isin(logged.dialog, alike))
        theirs = behaviour.nll[np.isin(behaviour.logged.dialog, alike)]
        behaviour = replace(behaviour, logged=behaviour.logged.of(alike), nll=theirs)
        logged, dialogs = logged.of(alike), [dialogs[i] for i in alike] if dialogs else ()
        room = "a window has room for more of a reply with one policy's tokenizer than with the other's"
        estimates.add_note("ope/n_eff", f"{unlike} of {all_dialogs} dialogs are left out: {room}.")
    values = _rewards(logged) * _discounts(logged, scores.tokens, discount)
    columns = [_by_dialog(figures, logged) for figures in (values, behaviour.nll, scores.nll)]
    rated = [not np.isnan(row).any() for row in columns[0]]
    dialog_columns = [parts for parts, use in zip(zip(*columns, strict=True), rated, strict=True) if use]
    if impossible := _impossible(dialog_columns, behaviour.name):
        for name in estimators:
            estimates.add_note(f"ope/{name}", f"Undefined: {impossible}.")
        return estimates
    dialog_rewards = [row for row, _, _ in dialog_columns]
    weights = [np.cumsum(mu - pi) for _, mu, pi in dialog_columns]
    log_w = np.array([row[-1] for row in weights])
    w = np.exp(log_w - log_w.max())
    w /= w.sum()
    returns = np.array([row.sum() for row in dialog_rewards])
    if "wis" in estimators:
        estimates.measures["ope/wis"] = Measure(w * returns, w)
    if "pdwis" in estimators:
        estimates.measures["ope/pdwis"] = Measure.mean(per_decision(weights, dialog_rewards))
    with np.errstate(over="ignore"):
        plain = np.exp(log_w)
    estimates.measures["ope/weight"] = Measure.mean(plain)
    outside = _outside(policy, behaviour, logged, rated)
    less_exact = Measure.whole(max(0.0, 1 - plain.mean()))
    estimates.measures["ope/outside"] = less_exact if outside is None else outside
    _keep_intervals(estimates, estimators, w, plain, returns, seen=outside is not None)
    weighed = np.unique(logged.dialog)[rated]
    names = [*(f"ope/{name}" for name in estimators), "ope/weight"]
    for name in names if outside is None else [*names, "ope/outside"]:
        estimates.measures[name] = _among(estimates.measures[name], weighed, logged.dialogs)
    estimates.measures["ope/n_eff"] = Measure.whole(effective(w))
    estimates.add_note("ope/n_eff", *_doubts(w, log_w, logged, dialogs))
    return estimates


def _among(measure: Measure, units: np.ndarray, all_units: int) -> Measure:
    """The same with the units that it leaves out, which count nothing: other policies leave out others."""
    numerator, denominator = np.zeros((2, all_units))
    numerator[units], denominator[units] = measure.numerator, measure.denominator
    return replace(measure, numerator=numerator, denominator=denominator)


def _outside(
    policy: Policy | None, behaviour: Behaviour, logged: LoggedReplies, rated: Sequence[bool]
) -> Measure | None:
    """The mass outside the logs in the policies' probabilities, over the rated dialogs; None where one of the
    policies is not there to be asked."""
    if policy is None or behaviour.policy is None:
        return None
    decisions = decisions_outside(policy, behaviour.policy, logged, behaviour.logged)
    return Measure.mean(mass_outside([row for row, use in zip(decisions, rated, strict=True) if use]))


def _keep_intervals(
    estimates: Estimates,
    estimators: Sequence[str],
    w: np.ndarray,
    plain: np.ndarray,
    returns: np.ndarray,
    *,
    seen: bool,
) -> None:
    """No interval where too few dialogs carry the weight, or where what the logs cannot hold could move the
    estimate by NUDGE standard errors.

    The mass outside is what was `seen` in the policies' probabilities, or what the mean weight is certainly
    short of 1 by, whichever is more. It could earn anything that was earned in the logs.
    """
    n_eff, count, mean = effective(w), len(w), plain.mean()
    error = plain.std(ddof=1) / np.sqrt(count) if count > 1 and np.isfinite(mean) else np.inf
    mass, short = estimates.measures["ope/outside"].value, 1 - mean - 2 * error
    outside = max(mass, short) if seen else short  # else `mass` is half chance
    moves = outside * float(np.ptp(returns))
    warned = False
    for name in (f"ope/{name}" for name in estimators):
        measure = estimates.measures[name]
        of_zero = measure.numerator - measure.value * measure.denominator
        spread = float(np.sqrt(np.square(of_zero).sum()) / measure.denominator.sum())
        few, far = n_eff < FEW, moves > NUDGE * spread
        warned |= far
        reasons = {
            f"No interval: {n_eff:.1f} effective dialogs are too few, from {FEW:g} on there is one.": few,
            f"No interval: {outside:.1%} of what the policy says is outside the logs and could move the "
            f"estimate by {moves:.2g}, more than {NUDGE:g} standard errors ({spread:.2g} each).": far,
        }
        if few or far:  # at its last decision pdwis weighs dialogs as wis does
            estimates.measures[name] = replace(measure, interval=False)
            estimates.add_note(name, *(text for text, applies in reasons.items() if applies))
    if warned and mass > 0:
        text = (
            f"{mass:.1%} of the policy's conversations leave the logs: the estimates are of the others, and "
            "nothing is known of these."
        )
        estimates.add_note("ope/outside", text)
    estimates.add_note("ope/weight", _far_from_1(mean, error))


def _far_from_1(mean: float, error: float) -> str:
    """What it means where the mean weight is not 1."""
    if not np.isfinite(error) or abs(1 - mean) <= 2 * error + 1e-6:
        return ""
    side = "the logs do not hold all that the policy says, or " if mean < 1 else ""
    return f"It should be 1 and is {mean:.2g}: {side}the behaviour policy is not the one that wrote them."


def _impossible(dialog_columns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], behaviour: str) -> str:
    """Why there are no weights, if so: of dialogs as (rewards, -log mu, -log pi), one number per reply."""
    if not dialog_columns:
        return "every dialog has a reply without a reward"
    if not all(np.isfinite(mu).all() for _, mu, _ in dialog_columns):
        return f"{behaviour} gives probability 0 to logged tokens"
    if all(np.isinf(pi).any() for _, _, pi in dialog_columns):
        return "in every dialog the policy gives probability 0 to logged tokens"
    return ""


def effective(w: np.ndarray) -> float:
    """n_eff = (sum w)^2 / sum w^2: as many dialogs of equal weight would be as exact. Between 1 and the
    number of dialogs."""
    return float(w.sum() ** 2 / np.square(w).sum())


def per_decision(weights: Sequence[np.ndarray], earned: Sequence[np.ndarray]) -> np.ndarray:
    """(D,) numbers whose mean is the per-decision estimate J = sum_k J_k, J_k = sum_i w_ik r_ik / sum_i w_ik,
    and whose spread is its spread.

    w_ik is the weight of dialog i up to its k-th reply, its last one where it has ended; a dialog's number is
    J plus n times its influence sum_k w_ik (r_ik - J_k) / sum_j w_jk (the infinitesimal jackknife).
    """
    turns = range(max(map(len, weights)))
    log_w = np.array([[row[min(k, len(row) - 1)] for k in turns] for row in weights])  # (D, K)
    r = np.array([[row[k] if k < len(row) else 0.0 for k in turns] for row in earned])
    w = np.exp(log_w - log_w.max(0))
    w /= w.sum(0)
    j = (w * r).sum(0)  # (K,)
    return j.sum() + len(w) * (w * (r - j)).sum(1)


def _doubts(w: np.ndarray, log_w: np.ndarray, logged: LoggedReplies, dialogs: Sequence[Dialog]) -> list[str]:
    """Warnings, in words."""
    n_eff, impossible = effective(w), int(np.isneginf(log_w).sum())
    count, cut = len(np.unique(logged.dialog)), sum(dialog.truncated for dialog in dialogs)
    windows, unrated = len(logged.rows) - count, count - len(w)
    doubts = {
        f"{unrated} of {count} dialogs have a reply without a reward and are left out.": unrated,
        f"{n_eff:.1f} of {len(w)} dialogs carry the weight, which is fewer than {FEW:g}: do not rely on "
        "importance sampling here.": n_eff < FEW,
        f"The policy gives probability 0 to logged tokens in {impossible} of {len(w)} dialogs; they count "
        "nothing.": impossible,
        f"Long dialogs were cut into {windows} more windows: both policies see less of the conversation "
        "there.": windows,
        f"{cut} dialogs are logged up to a cut only; what they earned later counts as 0.": cut,
    }
    return [text for text, applies in doubts.items() if applies]


def _read_alike(logged: LoggedReplies, behaviour: Behaviour) -> np.ndarray:
    """The dialogs whose replies are the same tokens for both. Where one policy's tokenizer writes more than
    the words (`dt` its returns), the end of a reply that is as long as a window is missing there alone."""
    ours, theirs = (_tokens(replies) for replies in (logged, behaviour.logged))
    alike = [number for number, tokens in ours.items() if tokens == theirs.get(number)]
    lengths = [len(tokens) == len(theirs.get(number, ())) for number, tokens in ours.items()]
    if sum(lengths) > len(alike) or 2 * len(alike) < len(ours):  # other words, and not fewer of them
        raise UserError(
            f"--behaviour {behaviour.name}: expected a policy whose tokenizer cuts the logged replies into "
            f"the tokens of the evaluated one, got other ones in {len(ours) - len(alike)} of {len(ours)} "
            "dialogs; train the behaviour policy on the same data directory"
        )
    return np.array(alike)


def _tokens(logged: LoggedReplies) -> dict[int, list[int]]:
    """All that the assistant says in each dialog with replies."""
    said: dict[int, list[int]] = {}
    for owner, row in zip(logged.owners.tolist(), logged.rows, strict=True):
        said.setdefault(owner, []).extend(row.input_ids[row.assistant].tolist())
    return said


def _as_logged(logged: LoggedReplies, scores: ReplyScores, discount: Discount) -> Estimates:
    """`ope/logged`."""
    outcomes, estimates = known_outcomes(logged), Estimates()
    returns = logged_returns(outcomes, scores.tokens, discount)
    count, rated = len(np.unique(logged.dialog)), int((~np.isnan(returns)).sum())
    if rated:
        estimates.measures["ope/logged"] = Measure.mean(returns)
    notes = {
        "Only last replies are rated: a reward is taken for its dialog's outcome.": outcomes is not logged,
        f"{count - rated} of {count} dialogs have a reply without a reward and are left out.": rated < count,
    }
    estimates.add_note("ope/logged", *(text for text, applies in notes.items() if applies))
    return estimates


def _check_probabilities(weighted: Sequence[str], policy: Policy, behaviour: Behaviour | None) -> None:
    """Raises UserError for estimates by weights that are ratios of probabilities which nobody knows."""
    asked = (policy, behaviour.policy if behaviour is not None else None)
    if any(each is not None and each.has_latents for each in asked):
        raise UserError(
            f"--ope {' '.join(weighted)}: expected policies whose words have a probability, got one with "
            "latents, which has one for each value of them; take fqe or dm"
        )


def _together(estimates: Sequence[Estimates]) -> Estimates:
    together = Estimates()
    for estimate in estimates:
        together.measures |= estimate.measures
        together.notes |= estimate.notes
    return together


def all_estimates(
    names: Sequence[str],
    policy: Policy,
    scores: ReplyScores,
    logged: LoggedReplies,
    *,
    discount: Discount,
    fqe: FQE,
    dialogs: Sequence[Dialog] = (),
    train: Sequence[Row] = (),
    behaviour: Behaviour | None = None,
    seed: int = 0,
    quiet: bool = True,
) -> Estimates:
    """Every estimate asked for, and `ope/logged`, what the logs earned. `scores` are those of `logged`, the
    tokens of the held-out `dialogs`."""
    if not logged.rows:
        raise UserError("--ope: expected replies in the held-out dialogs, found none")
    weighted = [name for name in names if name in ("wis", "pdwis")]
    if weighted:
        _check_probabilities(weighted, policy, behaviour)
    estimates = [_as_logged(logged, scores, discount)]
    logged = known_outcomes(logged)
    if "fqe" in names:
        estimates.append(fitted_q(policy, train, logged, fqe, discount, seed=seed, quiet=quiet))
    if "dm" in names:
        estimates.append(direct_method(policy, logged, discount, batch_size=fqe.batch_size))
    if behaviour is not None and weighted:
        estimates.append(
            importance_sampling(weighted, scores, logged, behaviour, discount, dialogs=dialogs, policy=policy)
        )
    together = _together(estimates)
    if policy.method.num_generations > 1:
        for name in names:
            together.add_note(
                f"ope/{name}",
                f"The policy says the best of {policy.method.num_generations} replies; this is the return of "
                "one draw.",
            )
    return together
