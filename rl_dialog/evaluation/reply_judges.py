"""How well a judge (a reward model, a likelihood, a rule) agrees with what people said of replies. Arrays in,
figures out.

    accuracy      share of preferences without ties that the judge has right; equal scores count half
    chosen_good   of the replies to one context that the judge puts first, the share that people called good;
                  equal scores share the place
    random_good   the same for a reply chosen by chance: the share of good ones among all
    auc           how often a good reply of any context scores above a bad one of any

`log_odds_measures` and `calibration` are for models whose score differences are log-odds.
The unit of every interval is the conversation, since pairs within one are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.evaluation.agreement import auc_with_interval
from rl_dialog.evaluation.intervals import Estimate, Measure, difference, estimate
from rl_dialog.evaluation.scoring import rank_replies
from rl_dialog.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL = "reward model"  # the judge that was fitted; the others cost nothing
FIGURES = ("accuracy", "chosen_good", "random_good", "auc")
BINS = 5  # of calibration, from "cannot tell" (.5) to "sure" (1)

Scores = Mapping[str, float]  # reply id -> what a judge says of it


@dataclass(frozen=True)
class HeldOut:
    """What people said of replies that no judge was fitted to. Replies are known by their ids, and each is of
    a conversation."""

    pairs: Sequence[tuple[str, str, float, str]]  # both replies, P(first preferred), conversation
    ratings: Sequence[tuple[str, bool, str]]  # reply, is it good, conversation
    contexts: Sequence[tuple[Sequence[tuple[str, bool]], str]]  # rated replies to one context, conversation

    @property
    def mixed(self) -> list[tuple[Sequence[tuple[str, bool]], str]]:
        """The contexts with good and bad replies."""
        return [(rated, owner) for rated, owner in self.contexts if len({good for _, good in rated}) == 2]

    @property
    def replies(self) -> set[str]:
        return {id for first, second, *_ in self.pairs for id in (first, second)} | {
            id for id, *_ in self.ratings
        }

    @property
    def units(self) -> dict[str, int]:
        """The number of each conversation."""
        owners = [*(owner for *_, owner in self.pairs), *(owner for *_, owner in self.ratings)]
        return {owner: n for n, owner in enumerate(dict.fromkeys(owners))}


def judged(held_out: HeldOut, scores: Mapping[str, Scores], *, noise: float, zero: bool) -> dict[str, Any]:
    """Figures of all judges with 95 % intervals over conversations, and the model's advantage over each other
    judge that judged every reply.

    Args:
        scores: of each judge; MODEL is the one whose differences are log-odds.
        noise: share of preferences that it took to be random; 0 of one that a temperature has made say how
            often labels agree with it.
        zero: have its scores a common zero? Without one those of different contexts cannot be compared.
    """
    reply_ids = held_out.replies
    scores = {name: values for name, values in scores.items() if reply_ids <= values.keys()}
    measures = {
        name: _measures(held_out, values, noise if name == MODEL else None) for name, values in scores.items()
    }
    sizes = {
        "pairs": len(held_out.pairs),
        "contexts": len(held_out.mixed),
        "conversations": len(held_out.units),
    }
    figures: dict[str, Any] = {**sizes, "judges": {}, "advantage": {}}
    for name, values in scores.items():
        judge_figures = {key: _figure(estimate([measure])) for key, measure in measures[name].items()}
        auc = _auc(held_out, values) if zero or name != MODEL else None
        figures["judges"][name] = judge_figures | ({"auc": auc} if auc else {})
        if name != MODEL:
            pairs = [
                (key, measures[MODEL][key], measures[name][key])
                for key in ("accuracy", "chosen_good")
                if key in judge_figures
            ]
            figures["advantage"][name] = {
                key: _figure(difference([ours], [theirs])) for key, ours, theirs in pairs
            }
    if held_out.pairs and MODEL in scores:
        preferred = np.array([preference for *_, preference, _ in held_out.pairs])
        error, bins = calibration(_apart(held_out, scores[MODEL]), preferred, noise=noise)
        figures["calibration"] = {"error": None if error is None else round(error, 4), "bins": bins}
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """The judges, one line each."""
    contexts = f"{figures['contexts']} contexts with good and bad replies"
    lines = [f"held out: {figures['pairs']} pairs, {contexts}, {figures['conversations']} conversations"]
    lines.append(f"{'judge':<20}" + "".join(f"{key:>24}" for key in FIGURES))
    for name, judge_figures in figures["judges"].items():
        lines.append(f"{name:<20}" + "".join(f"{_shown(judge_figures.get(key)):>24}" for key in FIGURES))
    if close := not_surely_better(figures):
        told = ", ".join(f"{name} ({_shown(figures['advantage'][name]['accuracy'])})" for name in close)
        lines.append(f"not surely better than: {told}")
    return "\n".join(lines)


def not_surely_better(figures: Mapping[str, Any]) -> list[str]:
    """The judges that cost nothing, or next to nothing, and may be as good: the interval of the model's
    advantage in accuracy over them reaches 0, or where there is none the advantage itself is not above 0."""
    return [
        name
        for name, advantage in figures["advantage"].items()
        if (of := advantage.get("accuracy")) and (of[0] if of[1] is None else of[1]) <= 0
    ]


def headline(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What people ask for first."""
    judge_figures = figures["judges"].get(MODEL, {})
    headline_figures = {
        key: judge_figures[key]
        for key in ("accuracy", "loss", "tie_share", *FIGURES[1:])
        if judge_figures.get(key)
    }
    error = figures.get("calibration", {}).get("error")
    sure = {"calibration_error": error, "not_surely_better_than": not_surely_better(figures)}
    return {"held_out_pairs": figures["pairs"], **headline_figures, **sure}


def likelihoods(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    contexts: Sequence[Sequence[Mapping[str, Any]]],
    texts: Sequence[str],
) -> list[float]:
    """The mean log-probability of a token of each reply under a policy, behind its context."""
    positions = getattr(policy.config, "max_position_embeddings", None) or 1024
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    encoded = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], *ends][: positions // 2] for text in texts
    ]
    room = [positions - len(ids) for ids in encoded]
    prompts = [
        encode_prompt([*context], tokenizer, max_length=n) for context, n in zip(contexts, room, strict=True)
    ]
    return rank_replies(policy, prompts, encoded, by="mean log-probability").tolist() if texts else []


def write_card(path: Path, facts: Sequence[str], figures: Mapping[str, Any], *, words: bool) -> None:
    """README.md of a fitted model: what it is, how good, and how to use it. `words`: it counts words."""
    ours = "rl_dialog.rewards.fitted.load_reward_model(folder).score(conversations)"
    lines = [
        f"# {path.parent.name}",
        "",
        "A reward model over replies, fitted by rl_dialog: it scores the last message of a conversation.",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "On conversations that it was not fitted to, with 95 % intervals over conversations:",
        "",
        *("    " + line for line in table(figures).splitlines()),
        "",
        "```bash",
        (
            "python -m pipelines.prepare --logs LOGS --output_dir DATA --rewards.learned 1 --scorers "
            "reward_model=THIS_FOLDER"
        ),
        (
            "python -m pipelines.candidates --data DATA --checkpoint RUN --output_dir OUT --reward_model "
            "THIS_FOLDER"
        ),
        "```",
        "",
        f"`{ours}` gives the scores" + ("." if words else "; so does"),
    ]
    if not words:
        lines.append(
            "`transformers.AutoModelForSequenceClassification` (num_labels 1) on what the tokenizer's chat "
            "template renders."
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pair_accuracy(first: np.ndarray, second: np.ndarray, preferred: np.ndarray, unit: np.ndarray) -> Measure:
    """Scores of both sides (P,), P(first preferred) (P,), and the number of each pair's conversation (P,)."""
    decided = preferred != 0.5
    right = np.where(first == second, 0.5, (first > second) == (preferred > 0.5))
    return _per_unit(right[decided], unit[decided], unit)


def choice_measures(
    contexts: Sequence[tuple[np.ndarray, np.ndarray]], unit: np.ndarray
) -> dict[str, Measure]:
    """(scores (N,), good (N,)) of the replies to each of C contexts, and the number of each context's
    conversation (C,)."""
    best_good = [good[scores == scores.max()].mean() for scores, good in contexts]
    mean_good = [good.mean() for _, good in contexts]
    return {
        "chosen_good": _per_unit(np.array(best_good), unit, unit),
        "random_good": _per_unit(np.array(mean_good), unit, unit),
    }


def log_odds_measures(
    difference: np.ndarray, preferred: np.ndarray, unit: np.ndarray, *, noise: float
) -> dict[str, Measure]:
    """Of score differences (P,): the loss per label that was trained on, and the share of ties."""
    with np.errstate(divide="ignore"):  # the logarithm of no noise
        log_p, log_not_p = (
            np.logaddexp(np.log1p(-noise) - np.logaddexp(0, -apart), np.log(noise / 2))
            for apart in (difference, -difference)
        )
    loss = -preferred * log_p - (1 - preferred) * log_not_p
    return {
        "loss": _per_unit(loss, unit, unit),
        "tie_share": _per_unit((preferred == 0.5).astype(float), unit, unit),
    }


def calibration(
    difference: np.ndarray, preferred: np.ndarray, *, noise: float = 0.0
) -> tuple[float | None, list[dict[str, Any]]]:
    """(error, bins) over labels without ties: how sure the model is that a label prefers the side that it
    prefers, and how often that is right; equal scores, of which it prefers none, are half right.

    A model that takes a share `noise` of the labels to be random is never surer than 1 - noise / 2. The error
    is the mean distance of the two, weighted by labels (ECE); None without a label.
    """
    decided = preferred != 0.5
    sure = (1 - noise) / (1 + np.exp(-np.abs(difference[decided]))) + noise / 2
    right = np.where(difference == 0, 0.5, (difference > 0) == (preferred > 0.5))[decided]
    place = np.minimum(((sure - 0.5) * 2 * BINS).astype(int), BINS - 1)
    bins = [
        {
            "labels": int((place == b).sum()),
            "sure": round(float(sure[place == b].mean()), 4),
            "right": round(float(right[place == b].mean()), 4),
        }
        for b in range(BINS)
        if (place == b).any()
    ]
    total = sum(row["labels"] for row in bins)
    error = sum(row["labels"] * abs(row["sure"] - row["right"]) for row in bins) / total if total else None
    return error, bins


def _per_unit(values: np.ndarray, unit: np.ndarray, all_units: np.ndarray) -> Measure:
    """The mean of all values, whose units are drawn again together."""
    count = int(all_units.max()) + 1 if len(all_units) else 1
    place = unit.astype(int)
    return Measure(
        np.bincount(place, values, minlength=count), np.bincount(place, minlength=count).astype(float)
    )


def _measures(held_out: HeldOut, scores: Scores, noise: float | None) -> dict[str, Measure]:
    """`noise`: of scores whose differences are log-odds, the share of preferences that they took to be
    random."""
    measures: dict[str, Measure] = {}
    units = held_out.units
    if held_out.pairs:
        unit = np.array([units[owner] for *_, owner in held_out.pairs])
        first, second = (np.array([scores[pair[side]] for pair in held_out.pairs]) for side in (0, 1))
        preferred = np.array([preference for *_, preference, _ in held_out.pairs])
        measures["accuracy"] = pair_accuracy(first, second, preferred, unit)
        if noise is not None:
            measures |= log_odds_measures(first - second, preferred, unit, noise=noise)
    if mixed := held_out.mixed:
        tables = [
            (np.array([scores[id] for id, _ in rated]), np.array([float(good) for _, good in rated]))
            for rated, _ in mixed
        ]
        measures |= choice_measures(tables, np.array([units[owner] for _, owner in mixed]))
    return measures


def _auc(held_out: HeldOut, scores: Scores) -> list[float] | None:
    """Over ratings of all contexts."""
    good = np.array([good for _, good, _ in held_out.ratings], bool)
    if len(set(good.tolist())) < 2:
        return None
    owner = np.array([owner for *_, owner in held_out.ratings])
    interval = auc_with_interval(np.array([scores[id] for id, *_ in held_out.ratings]), good, owner)
    return [round(value, 4) for value in interval]


def _apart(held_out: HeldOut, scores: Scores) -> np.ndarray:
    return np.array([scores[first] - scores[second] for first, second, *_ in held_out.pairs])


def _figure(result: Estimate | None) -> list[float | None] | None:
    return result and [
        None if value is None else round(value, 4) for value in (result.value, result.low, result.high)
    ]


def _shown(figure: list[float | None] | None) -> str:
    if not figure:
        return ""
    value, low, high = figure
    return f"{value:.3f}" if low is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
