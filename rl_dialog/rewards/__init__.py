"""Rewards: named functions `Dialog -> list[float | None]`, one number per reply. A run uses a weighted sum of
them.

None means "does not apply to this reply" (the user never answered, nobody voted): it is left out of the sum
and lowers the component's coverage. Where no component with a weight applies, the sum itself is missing.
README.md has a section per reward; `statistics.py` says how the components spread and correlate.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from rl_dialog.data.schema import Dialog, DialogError
from rl_dialog.errors import UserError
from rl_dialog.own import line_in, own
from rl_dialog.rewards.coherence import answer_coherence, coherence, coherence_extrema, coherence_greedy
from rl_dialog.rewards.compat_2019 import COMPAT
from rl_dialog.rewards.conversation import conversation_length
from rl_dialog.rewards.human import logged, rating, upvotes, vote
from rl_dialog.rewards.learned import learned
from rl_dialog.rewards.normalise import weighted_sum
from rl_dialog.rewards.phrases import cheerful, compliments, politeness, supportive, you
from rl_dialog.rewards.reply import (
    inner_repetition,
    predicted_upvotes,
    question,
    repetition,
    reply_length,
    reply_sentiment,
    toxicity,
    toxicity_level,
    toxicity_noised,
)
from rl_dialog.rewards.scorers import BUILT_IN, Scorer, with_scorers
from rl_dialog.rewards.statistics import Statistics
from rl_dialog.rewards.user import (
    answer_characters,
    answer_length,
    laughter,
    sentiment,
    sentiment_slope,
    sentiment_sum,
    sentiment_transition,
    sentiment_variance,
    word_similarity,
)

Reward = Callable[[Dialog], list[float | None]]

LARGEST = 1e30  # of a reward: batches are float32, where sums and squares of larger ones overflow
REWARDS: dict[str, Reward] = {
    "vote": vote,
    "rating": rating,
    "logged": logged,
    "upvotes": upvotes,
    "learned": learned,
    "sentiment": sentiment,
    "sentiment_transition": sentiment_transition,
    "sentiment_sum": sentiment_sum,
    "sentiment_variance": sentiment_variance,
    "sentiment_slope": sentiment_slope,
    "answer_length": answer_length,
    "answer_characters": answer_characters,
    "laughter": laughter,
    "word_similarity": word_similarity,
    "conversation_length": conversation_length,
    "question": question,
    "you": you,
    "compliments": compliments,
    "politeness": politeness,
    "cheerful": cheerful,
    "supportive": supportive,
    "repetition": repetition,
    "inner_repetition": inner_repetition,
    "reply_length": reply_length,
    "reply_sentiment": reply_sentiment,
    "toxicity": toxicity,
    "toxicity_level": toxicity_level,
    "toxicity_noised": toxicity_noised,
    "predicted_upvotes": predicted_upvotes,
    "coherence": coherence,
    "answer_coherence": answer_coherence,
    "coherence_extrema": coherence_extrema,
    "coherence_greedy": coherence_greedy,
}

# What users of the 2019 code type, and what we call it. Values differ where README.md says so.
COLUMNS_2019 = {
    "reward_you": "you",
    "reward_answer_length_words": "answer_length",
    "reward_answer_length_chars": "answer_characters",
    "reward_user_ha": "laughter",
    "reward_conversation_length": "conversation_length",
    "reward_manual_ratings": "vote",
    "reward_deepmoji": "sentiment",
    "reward_user_deepmoji": "sentiment",
    "reward_bot_deepmoji": "reply_sentiment",
    "reward_user_emotional_transition": "sentiment_transition",
    "reward_user_min_max_emotion_transition": "sentiment_slope",
    "reward_user_var_emotion": "sentiment_variance",
    "reward_user_auc_emotion_transition": "sentiment_sum",
    "reward_question": "question",
    "reward_compliments": "compliments",
    "reward_politeness": "politeness",
    "reward_supportive": "supportive",
    "reward_cheerful": "cheerful",
    "reward_conversation_repetition": "repetition",
    "reward_utterance_repetition": "inner_repetition",
    "reward_word_similarity": "word_similarity",
    "reward_bot_response_length": "reply_length",
    "reward_toxicity": "toxicity",
    "reward_infersent_coherence_cornell": "coherence",
    "reward_infersent_coherence_reddit_casual": "coherence",
    "reward_USE_similarity": "answer_coherence",
    "reward_word2vec_coherence": "answer_coherence",
    "rewards_embedding_average": "coherence",
    "rewards_embedding_extrema": "coherence_extrema",
    "rewards_embedding_greedy": "coherence_greedy",
}

__all__ = [
    "COLUMNS_2019",
    "COMPAT",
    "REWARDS",
    "Reward",
    "Statistics",
    "apply_rewards",
    "choose_rewards",
    "numbers_of",
]


def choose_rewards(
    names: Mapping[str, float] | list[str],
    *,
    rating_name: str | None = None,
    compat: str = "",
    scorers: Mapping[str, Scorer] = BUILT_IN,
) -> dict[str, Reward]:
    """The functions behind `names`, with their `scorers`, `rating` reading one named rating if asked;
    `module:function` is imported.

    `compat`, a name in COMPAT, takes them as the 2019 code computed them. Raises UserError for a name that is
    none of these.
    """
    if compat:
        functions = COMPAT[compat]
        if unknown := [name for name in names if name not in functions]:
            raise UserError(
                f"--compat {compat}: {unknown[0]!r} is not known as the 2019 code computed it, expected some "
                f"of {', '.join(functions)}"
            )
        return {name: with_scorers(functions[name][0], scorers) for name in names}
    rewards = {
        name: with_scorers(REWARDS[name] if name in REWARDS else _own(name), scorers) for name in names
    }
    if rating_name is not None and "rating" in rewards:
        rewards["rating"] = partial(rating, name=rating_name)
    return rewards


def _own(name: str) -> Reward:
    """A reward of the user's, `module:function`."""
    if ":" not in name:
        raise UserError(
            f"unknown reward {name!r}: expected one of {', '.join(REWARDS)}, or module:function for one of "
            "your own"
        )
    function = own(name, "reward")
    if not callable(function):
        raise UserError(f"reward {name!r}: expected a function that takes a Dialog, got {function!r}")
    return function


def apply_rewards(dialog: Dialog, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> np.ndarray:
    """Scores a dialog in place: each reply gets its components as `rewards` and their weighted sum as
    `reward`.

    Returns the numbers as (R replies, K + 1) float64: the K components (NaN where one does not apply), then
    their sum (NaN, and None in the message, where none with a weight other than 0 applies). Components that
    are not among `rewards` stay in the message as they were. Raises UserError for a reward that fails, or
    does not give one finite number or None per reply, and DialogError for numbers too large to learn from.
    """
    columns = {name: numbers_of(name, function, dialog) for name, function in rewards.items()}
    totals = []
    for r, i in enumerate(dialog.replies):
        message = dialog.messages[i]
        applied = {name: column[r] for name, column in columns.items() if column[r] is not None}
        totals.append(weighted_sum(applied, weights, {}))
        message["rewards"] = {
            name: value for name, value in message.get("rewards", {}).items() if name not in rewards
        } | applied
        message["reward"] = totals[-1]
    scores = np.array([*columns.values(), totals], dtype=float).T  # None becomes NaN
    if (np.abs(scores) > LARGEST).any():
        got = scores.flat[np.nanargmax(np.abs(scores))]
        expected = (
            f"rewards and their weighted sum from {-LARGEST:g} to {LARGEST:g}, which float32 can add up"
        )
        raise DialogError(f"dialog {dialog.id!r}: expected {expected}, got {got:g}")
    return scores


def numbers_of(name: str, function: Reward, dialog: Dialog) -> list[float | None]:
    """What a reward says of each reply. Raises UserError for one of the user's own that fails, or says
    anything else than a finite number or None for each."""
    where = f"reward {name!r}, dialog {dialog.id!r}"
    try:
        values = list(function(dialog))
    except Exception as error:
        if name in REWARDS:
            raise  # ours say themselves what is wrong with the dialog
        line = line_in(name.partition(":")[0], error)
        raise UserError(f"{where}: {type(error).__name__}: {error}{line}") from error
    expected = len(dialog.replies)
    if len(values) != expected:
        raise UserError(f"{where}: expected {expected} numbers, one per reply, got {len(values)}")
    return [value if value is None else _finite(value, where) for value in values]


def _finite(value: object, where: str) -> float:
    try:
        if isinstance(value, float | int | numbers.Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer of 400 digits
        pass
    raise UserError(f"{where}: expected finite numbers or None, got {repr(value)[:100]}")
