"""How a fitted reward model, and judges that cost nothing, agree with what people said: the judging of fit_reward.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_dialog.data.tokenize import encode_prompt, load_tokenizer
from rl_dialog.evaluation.agreement import auc_with_interval
from rl_dialog.evaluation.generation import load_for_decoding
from rl_dialog.evaluation.intervals import Estimate, Measure, difference, estimate
from rl_dialog.evaluation.reply_judges import calibration, choice_measures, log_odds_measures, pair_accuracy
from rl_dialog.evaluation.scoring import rank_replies
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences import replies as preferences
from rl_dialog.preferences.replies import Preferences, Rating, ReplyPair
from rl_dialog.preferences.segments import Reply
from rl_dialog.rewards.tfidf import TfidfClassifier
from rl_dialog.rewards.words import words

if TYPE_CHECKING:
    from pipelines.fit_reward import FitRewardConfig

MODEL = "reward model"

Scores = dict[str, float]  # reply id -> score


def judges(model: TextReward, train: Preferences, test: Preferences, config: FitRewardConfig) -> dict[str, Scores]:
    """Judge -> what it says of every held-out reply."""
    replies = {reply.id: reply for reply in test.replies}
    found = {MODEL: preferences.score(model, list(replies.values()))}
    found["longer reply"] = {id: float(len(words(reply.text))) for id, reply in replies.items()}
    rated = [(rating.reply.text, rating.value > config.above) for rating in train.ratings]
    decided = [pair for pair in train.pairs if pair.preference != 0.5]
    rated = rated or [(reply.text, (pair.preference > 0.5) == (reply is pair.first)) for pair in decided for reply in (pair.first, pair.second)]
    with suppress(ValueError):  # too few texts to count words in: one judge less
        classifier = TfidfClassifier.fit([text for text, _ in rated], [good for _, good in rated])
        found["words of the reply"] = {id: classifier([reply.text])[0] for id, reply in replies.items()}
    if config.checkpoint:
        found["likelihood"] = likelihoods(config.checkpoint, list(replies.values()))
    return found


def likelihoods(checkpoint: str, replies: Sequence[Reply]) -> Scores:
    """The mean log-probability of a token of each reply under a policy."""
    policy, tokenizer = load_for_decoding(checkpoint), load_tokenizer(resolve(checkpoint))
    positions = getattr(policy.config, "max_position_embeddings", None) or 1024
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    said = [[*tokenizer(reply.text, add_special_tokens=False)["input_ids"], *ends][: positions // 2] for reply in replies]
    prompts = [encode_prompt([*r.context], tokenizer, max_length=positions - len(ids)) for r, ids in zip(replies, said, strict=True)]
    values = rank_replies(policy, prompts, said, by="mean log-probability") if replies else []
    return {reply.id: float(value) for reply, value in zip(replies, values, strict=True)}


def judged(held_out: Preferences, scores: dict[str, Scores], config: FitRewardConfig) -> dict[str, Any]:
    """Figures of all judges with 95 % intervals over conversations, and the model's advantage over each other judge that judged every reply."""
    scores = {name: values for name, values in scores.items() if all(reply.id in values for reply in held_out.replies)}
    units = {group: n for n, group in enumerate(dict.fromkeys(preferences.group_of(reply) for reply in held_out.replies))}
    measures = {name: _measures(name, held_out, values, units, config) for name, values in scores.items()}
    contexts = _mixed(held_out.ratings, config)
    found: dict[str, Any] = {"pairs": len(held_out.pairs), "contexts": len(contexts), "conversations": len(units), "judges": {}, "advantage": {}}
    for name, values in scores.items():
        found["judges"][name] = {key: _figure(estimate([measure])) for key, measure in measures[name].items()}
        if found_auc := _auc(held_out, values, name, config):
            found["judges"][name]["auc"] = found_auc
        if name != MODEL:
            pairs = ((key, measures[MODEL][key], measures[name][key]) for key in ("accuracy", "chosen_good") if key in measures[name])
            found["advantage"][name] = {key: _figure(difference([ours], [theirs])) for key, ours, theirs in pairs}
    if held_out.pairs and MODEL in scores:
        apart, preferred = _apart(held_out.pairs, scores[MODEL])
        error, bins = calibration(apart, preferred)
        found["calibration"] = {"error": None if error is None else round(error, 4), "bins": bins}
    return found


def table(figures: dict[str, Any]) -> str:
    """The judges, one line each."""
    keys = ("accuracy", "chosen_good", "random_good", "auc")
    lines = [
        f"held out: {figures['pairs']} pairs, {figures['contexts']} contexts with good and bad replies, {figures['conversations']} conversations"
    ]
    lines.append(f"{'judge':<20}" + "".join(f"{key:>24}" for key in keys))
    lines += [f"{name:<20}" + "".join(f"{_shown(found.get(key)):>24}" for key in keys) for name, found in figures["judges"].items()]
    return "\n".join(lines)


def headline(figures: dict[str, Any]) -> dict[str, Any]:
    """What people ask for first."""
    own = figures["judges"].get(MODEL, {})
    shown = {key: own[key] for key in ("accuracy", "loss", "tie_share", "chosen_good", "random_good", "auc") if own.get(key)}
    return {"held_out_pairs": figures["pairs"], **shown, "calibration_error": figures.get("calibration", {}).get("error")}


def _measures(name: str, held_out: Preferences, scores: Scores, units: dict[str, int], config: FitRewardConfig) -> dict[str, Measure]:
    found: dict[str, Measure] = {}
    if held_out.pairs:
        unit = np.array([units[preferences.group_of(pair.first)] for pair in held_out.pairs])
        first, second = (np.array([scores[getattr(pair, side).id] for pair in held_out.pairs]) for side in ("first", "second"))
        preferred = np.array([pair.preference for pair in held_out.pairs])
        found["accuracy"] = pair_accuracy(first, second, preferred, unit)
        if name == MODEL:  # the others' numbers are no log-odds
            found |= log_odds_measures(first - second, preferred, unit, noise=config.fitting.noise)
    if contexts := _mixed(held_out.ratings, config):
        tables = [(np.array([scores[r.reply.id] for r in rated]), np.array([float(r.value > config.above) for r in rated])) for rated in contexts]
        found |= choice_measures(tables, np.array([units[preferences.group_of(rated[0].reply)] for rated in contexts]))
    return found


def _mixed(ratings: Sequence[Rating], config: FitRewardConfig) -> list[list[Rating]]:
    """The contexts with good and bad replies."""
    return [found for found in preferences.by_context(ratings) if len({rating.value > config.above for rating in found}) == 2]


def _auc(held_out: Preferences, scores: Scores, name: str, config: FitRewardConfig) -> list[float] | None:
    """Over ratings of all contexts; not for scores that preferences within a context alone have fixed, which have no common zero."""
    good = np.array([rating.value > config.above for rating in held_out.ratings], bool)
    if len(set(good.tolist())) < 2 or (name == MODEL and config.objective == "pairs"):
        return None
    owner = np.array([preferences.group_of(rating.reply) for rating in held_out.ratings])
    found = auc_with_interval(np.array([scores[rating.reply.id] for rating in held_out.ratings]), good, owner)
    return [round(value, 4) for value in found]


def _apart(pairs: Sequence[ReplyPair], scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    return np.array([scores[p.first.id] - scores[p.second.id] for p in pairs]), np.array([p.preference for p in pairs])


def _figure(found: Estimate | None) -> list[float | None] | None:
    return found and [None if value is None else round(value, 4) for value in (found.value, found.low, found.high)]


def _shown(figure: list[float | None] | None) -> str:
    if not figure:
        return ""
    value, low, high = figure
    return f"{value:.3f}" if low is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
