"""Models behind rewards. A scorer turns a text into a number or vectors; it is loaded once per process and
asked once per text, in batches.

A reward function says which scorer it needs by the name of a keyword (`sentiment`, `encoder`, `toxicity`).
`make_scorers` gives the built-in one, which needs no download, or a model of the user's. `in_batches` runs
the functions once before, to hear what they ask.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.rewards.fitted import judges_texts, load_reward_model, text_probabilities
from rl_dialog.rewards.words import parts, words

MOST_TEXTS = 20_000  # remembered per scorer
MOST_BYTES = 256 << 20  # of them and of what was said about them, about
MOST_WORDS = 2048  # that the built-in encoder reads of a text; models read 512 tokens
TOGETHER = 64  # dialogs whose texts are scored together
HASHED = 256  # numbers in the built-in encoder's vector of a word


class Scorer:
    """text -> what `score` says of it, remembered. While it collects, unknown texts give `blank` and are
    scored together by `score_collected`.

    A text may also be a whole conversation: a tuple of (role, content).
    """

    def __init__(self, name: str, score: Callable[[list[Any]], Sequence[Any]], blank: Any) -> None:
        self.name, self.score, self.blank = name, score, blank
        self.known: dict[Hashable, Any] = {}
        self.bytes = 0
        self.collected: dict[Hashable, None] | None = None

    def __call__(self, text: Hashable) -> Any:
        if text not in self.known:
            if self.collected is not None:
                self.collected[text] = None
                return self.blank
            self._make_room()
            self._remember([text], self.score([text]))
        return self.known[text]

    def collect(self) -> None:
        """From here on unknown texts are only collected."""
        self._make_room()
        self.collected = {}

    def score_collected(self) -> None:
        """Scores what was collected, and ends the collecting."""
        texts, self.collected = list(self.collected or ()), None
        if texts:
            self._remember(texts, self.score(texts))

    def _remember(self, texts: list[Any], values: Sequence[Any]) -> None:
        for text, value in zip(texts, values, strict=True):
            self.known[text] = value
            self.bytes += (len(text) if isinstance(text, str) else 8 * len(text)) + getattr(
                value, "nbytes", 0
            )

    def _make_room(self) -> None:
        if len(self.known) >= MOST_TEXTS or self.bytes >= MOST_BYTES:
            self.known.clear()
            self.bytes = 0


def make_scorers(
    entries: Sequence[str] = (), *, label_weights: Mapping[str, float] | None = None
) -> dict[str, Scorer]:
    """{keyword: scorer}: the built-in ones, and models for entries such as `sentiment=PATH`; several entries
    of `reward_model` are an ensemble. Raises UserError for what cannot be one."""
    paths = paths_of(entries)
    for name, named in paths.items():
        if name not in BUILT_IN or not all(named):
            raise UserError(
                f"--scorers {name}={named[-1]}: expected NAME=PATH with a NAME of {', '.join(BUILT_IN)} and a"
                " model's folder or hub name"
            )
        if len(named) > 1 and name != "reward_model":
            raise UserError(
                f"--scorers {name}={named[1]}: expected one model, got {name}={named[0]} too; only those of "
                "reward_model become an ensemble"
            )
    first = {name: named[0] for name, named in paths.items()}
    if label_weights and not any(name in LABELS and not judges_texts(path) for name, path in first.items()):
        raise UserError(
            "--label_weights: expected a classifier whose labels they weigh, --scorers sentiment=PATH or "
            "toxicity=PATH"
        )
    return {
        name: _model(name, paths[name], label_weights or {}) if name in paths else scorer
        for name, scorer in BUILT_IN.items()
    }


def paths_of(entries: Sequence[str]) -> dict[str, list[str]]:
    """Keyword -> the models of its entries, of NAME=PATH."""
    paths: dict[str, list[str]] = {}
    for entry in entries:
        name, _, path = entry.partition("=")
        paths.setdefault(name, []).append(path)
    return paths


def needed(function: Callable) -> list[str]:
    """The scorers that a reward function takes as keywords."""
    try:
        return [name for name in inspect.signature(function).parameters if name in BUILT_IN]
    except (TypeError, ValueError):
        return []  # a callable without a signature


def with_scorers(function: Callable, scorers: Mapping[str, Scorer]) -> Callable:
    """The reward function with the scorers it needs filled in."""
    names = needed(function)
    return partial(function, **{name: scorers[name] for name in names}) if names else function


def in_batches(
    dialogs: Sequence[Dialog], rewards: Sequence[Callable], scorers: Sequence[Scorer]
) -> Iterator[Dialog]:
    """The dialogs, each once its texts for `scorers` have been scored together with those of others."""
    asking = [
        reward
        for reward in rewards
        if isinstance(reward, partial) and any(value in scorers for value in reward.keywords.values())
    ]
    for start in range(0, len(dialogs), TOGETHER):
        group = dialogs[start : start + TOGETHER]
        if asking:
            for scorer in scorers:
                scorer.collect()
            for dialog in group:
                for reward in asking:
                    # A blank may be what it cannot work with; what is really wrong is raised when its value
                    # is asked for.
                    with suppress(Exception):
                        reward(dialog)
            for scorer in scorers:
                scorer.score_collected()
        yield from group


# What needs no download.


@cache
def _analyser() -> Any:
    """The lexicon, read once per process, and VADER's rules with the same numbers in linear time.

    There are no parts to combine: a word's valence depends on the three words before it, the two behind it
    and whether the text mixes capitals, so it is asked with these words alone (the library lower-cases all
    words for each one of the lexicon); the valences are added up as they were.
    """
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise UserError("rewards of sentiment need VADER: pip install vaderSentiment") from error

    class Analyser(SentimentIntensityAnalyzer):
        def sentiment_valence(
            self, valence: float, sentitext: Any, item: str, i: int, sentiments: list[float]
        ) -> list[float]:
            start = max(i - 3, 0)
            near = SimpleNamespace(
                words_and_emoticons=sentitext.words_and_emoticons[start : i + 3],
                is_cap_diff=sentitext.is_cap_diff,
            )
            return super().sentiment_valence(valence, near, item, i - start, sentiments)

        _but_check = staticmethod(_but_check)

    return Analyser()


def _but_check(words_said: list[str], valences: list[float]) -> list[float]:
    """Half of what stands before the first "but" and 1.5 times what stands behind it, as VADER does it: in
    place of each valence, one after the other, the first that equals it at that moment is changed."""
    but = next((i for i, word in enumerate(words_said) if word.lower() == "but"), None)
    if but is None:
        return valences
    places: dict[
        float, list[int]
    ] = {}  # a heap per value; a place that has another value by now is dropped when it comes up
    for i, valence in enumerate(valences):
        places.setdefault(valence, []).append(i)
    for i in range(len(valences)):
        valence = valences[i]
        heap = places[valence]
        while valences[heap[0]] != valence:
            heappop(heap)
        place = heap[0]
        if place != but:
            valences[place] = valence * (0.5 if place < but else 1.5)
            heappush(places.setdefault(valences[place], []), place)
    return valences


MOODS = ("negative", "neutral", "positive")


def moods(texts: Sequence[str]) -> np.ndarray:
    """(texts, MOODS) the shares of each text that VADER finds negative, neutral and positive; a text without
    words is neutral."""
    found = [_analyser().polarity_scores(text) for text in texts]
    shares = np.array([[each["neg"], each["neu"], each["pos"]] for each in found], float).reshape(-1, 3)
    shares[shares.sum(1) == 0] = 0, 1, 0
    return shares / shares.sum(1, keepdims=True)  # VADER rounds them to three digits


@lru_cache(MOST_TEXTS)
def _hashed(word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(HASHED)


def hashed_words(text: str) -> np.ndarray:
    """(n, HASHED) a random vector per word, always the same one: near are texts that share words. Of a long
    text the first MOST_WORDS words."""
    first_words = words(text[: 64 * MOST_WORDS])[:MOST_WORDS]
    return np.stack([_hashed(word) for word in first_words]) if first_words else np.zeros((0, HASHED))


SURE = math.exp(
    -0.355
)  # 0.70: the probability from which a text counts as toxic for good, in the filter that the levels come from


def toxicity_levels(probabilities: Sequence[Sequence[float]], levels: Sequence[float]) -> list[int]:
    """0 (safe), 1 (sensitive) or 2 (toxic) for each text, of a classifier whose labels stand for `levels`:
    (texts, labels), (labels,).

    The likeliest level, but 2 only where it has a probability of at least SURE, else the likelier of 0 and 1.
    A classifier without a level between says 1 where it is not sure.
    """
    probs, levels = np.asarray(probabilities, dtype=float), np.asarray(levels)
    sensitive, toxic = (probs[:, levels == level].sum(1).clip(0, 1) for level in (1, 2))
    safe = (1 - sensitive - toxic).clip(0)
    between = sensitive > safe if (levels == 1).any() else True
    unsure = np.where(between, 1, 0)
    return np.select(
        [(toxic > safe) & (toxic > sensitive) & (toxic >= SURE), (toxic > safe) & (toxic > sensitive)],
        [2, unsure],
        (sensitive > safe).astype(int),
    ).tolist()


_INSULTS = """
arse arsehole asshole bastard bitch bollocks bullshit crap cretin dick dickhead dumb dumbass fool fuck \
fucked fucker fucking idiot idiotic
idiots imbecile jackass jerk loser moron moronic morons motherfucker pathetic piss prick scum scumbag shit \
shitty stupid twat wanker worthless
"""
INSULTS = frozenset(_INSULTS.split())

VADER = Scorer("VADER", lambda texts: [_analyser().polarity_scores(text)["compound"] for text in texts], 0.0)
HASHED_WORDS = Scorer(
    "hashed words", lambda texts: [hashed_words(text) for text in texts], np.zeros((0, HASHED))
)
INSULT_LIST = Scorer(
    "list of insults", lambda texts: [float(not INSULTS.isdisjoint(parts(text))) for text in texts], 0.0
)  # a floor, not a judge
INSULT_LEVEL = Scorer(
    INSULT_LIST.name, lambda texts: toxicity_levels([[INSULT_LIST(text)] for text in texts], [2]), 0
)
NO_MODEL = Scorer(
    "none", lambda conversations: [None] * len(conversations), None
)  # a learned reward has nothing to say before it was learned
BUILT_IN: dict[str, Scorer] = {
    "sentiment": VADER,
    "encoder": HASHED_WORDS,
    "toxicity": INSULT_LIST,
    "toxicity_level": INSULT_LEVEL,
}
BUILT_IN["reward_model"] = BUILT_IN["upvotes"] = NO_MODEL


# Models.


def _model(name: str, paths: Sequence[str], label_weights: Mapping[str, float]) -> Scorer:
    if name == "reward_model":
        return _reward_model(paths)
    [path] = paths
    if name != "encoder" and judges_texts(path):
        probabilities = text_probabilities(path)
        if name == "toxicity_level":
            return Scorer(path, lambda texts: toxicity_levels([[p] for p in probabilities(texts)], [2]), 0)
        return Scorer(path, probabilities, 0.0)
    from rl_dialog.rewards.encoder import Classifier, Encoder

    if name == "encoder":
        return _token_vectors(path, Encoder(path))
    classifier = Classifier(path)
    weights = classifier.weights({**LABELS[name], **label_weights})
    if name == "toxicity_level":
        if not set(weights) <= {0, 1, 2}:
            raise UserError(
                f"--scorers toxicity_level={path}: expected labels that count 0, 1 or 2, got --label_weights "
                f"{label_weights}"
            )
        return Scorer(path, lambda texts: toxicity_levels(classifier(texts), weights), 0)
    return Scorer(path, lambda texts: (classifier(texts) @ weights).tolist(), 0.0)


def _reward_model(paths: Sequence[str]) -> Scorer:
    """The score of a conversation's last message, of an ensemble the mean over its members: differences are
    their mean log-odds, so that none of them has to know where the others' zero is."""
    members = [load_reward_model(path) for path in paths]

    def score(conversations: list[tuple[tuple[str, str], ...]]) -> list[float]:
        messages = [
            [{"role": role, "content": content} for role, content in turns] for turns in conversations
        ]
        return np.mean([member.score(messages) for member in members], axis=0).tolist()

    return Scorer(", ".join(paths), score, 0.0)


def _token_vectors(path: str, encoder: Any) -> Scorer:
    """(n, H) of each text; a text of spaces has none, or two empty ones would be alike by their special
    tokens."""
    nothing = np.zeros((0, encoder.model.config.hidden_size))

    def score(texts: list[str]) -> list[np.ndarray]:
        states = encoder([text for text in texts if text.strip()])
        return [states[text][0].numpy() if text.strip() else nothing for text in texts]

    return Scorer(path, score, nothing)


SENTIMENT = {"positive": 1.0, "pos": 1.0, "neutral": 0.0, "neu": 0.0, "negative": -1.0, "neg": -1.0}
SENTIMENT |= {f"{n} star{'s' * (n > 1)}": (n - 3) / 2 for n in range(1, 6)}
TOXIC = {
    "toxic": 1.0,
    "toxicity": 1.0,
    "hate": 1.0,
    "offensive": 1.0,
    "nontoxic": 0.0,
    "non-toxic": 0.0,
    "not toxic": 0.0,
    "neutral": 0.0,
}
TOXIC |= {"nothate": 0.0, "non-hate": 0.0, "non-offensive": 0.0, "not-offensive": 0.0}
FITTED = {"bad": 0.0, "good": 1.0}
LEVELS = {label: 2 * weight for label, weight in (TOXIC | FITTED).items()} | {
    "safe": 0.0,
    "sensitive": 1.0,
    "unsafe": 2.0,
}
LEVELS |= {label: float(level) for level in range(3) for label in (str(level), f"label_{level}")}
LABELS = {
    "sentiment": SENTIMENT | FITTED,
    "toxicity": TOXIC | FITTED,
    "toxicity_level": LEVELS,
    "upvotes": {"positive": 1.0, "negative": 0.0, "upvoted": 1.0, "downvoted": 0.0} | FITTED,
}  # what labels count that need no --label_weights

# The 64 outputs of DeepMoji's classifiers in their order, and what the 2019 code made of them; the others
# weigh 0.
_EMOJIS = """
joy unamused weary sob heart_eyes pensive ok_hand blush heart smirk grin notes flushed 100 sleeping relieved \
relaxed raised_hands two_hearts
expressionless sweat_smile pray confused kissing_heart heartbeat neutral_face information_desk_person \
disappointed see_no_evil tired_face v
sunglasses rage thumbsup cry sleepy yum triumph hand mask clap eyes gun persevere smiling_imp sweat \
broken_heart yellow_heart musical_note
speak_no_evil wink skull confounded smile stuck_out_tongue_winking_eye angry no_good muscle facepunch \
purple_heart sparkling_heart
blue_heart grimacing sparkles
"""
EMOJIS = tuple(_EMOJIS.split())
EMOJI_WEIGHTS = {
    **dict.fromkeys(("kissing_heart", "thumbsup", "ok_hand", "smile"), 1.0),
    **dict.fromkeys(("blush", "wink", "muscle", "grin", "heart_eyes", "100"), 0.75),
    **dict.fromkeys(
        (
            "smirk",
            "stuck_out_tongue_winking_eye",
            "sunglasses",
            "relieved",
            "relaxed",
            "blue_heart",
            "two_hearts",
            "heartbeat",
        ),
        0.5,
    ),
    "yellow_heart": 0.5,
    **dict.fromkeys(("disappointed", "eyes", "expressionless", "sleeping", "grimacing"), -0.5),
    **dict.fromkeys(("neutral_face", "confused", "triumph", "confounded"), -0.75),
    **dict.fromkeys(("unamused", "angry", "rage"), -1.0),
}
