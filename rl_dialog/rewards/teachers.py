"""Teachers: what a classifier says that a message feels like, and an encoder's vector of it. `prepare` asks
them once, and hierarchical models learn to predict it (models/message_heads.py).

    emotion      VADER's shares of negative, neutral and positive; or emotion=PATH, any classifier
    embedding    the mean of the built-in encoder's word vectors; or embedding=PATH, the mean token vector of
                 any encoder, special tokens included as in sentence encoders

The 2019 originals were DeepMoji's 64 emojis and InferSent.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.data.taught import Taught, sizes
from rl_dialog.errors import UserError
from rl_dialog.rewards.scorers import HASHED, HASHED_WORDS, MOODS, VADER, hashed_words, moods

TEACHERS = ("emotion", "embedding")
SPEAKERS = ("user", "assistant")  # a system prompt is no message that anyone feels


@dataclass(frozen=True)
class Teacher:
    """One of TEACHERS."""

    name: str  # of the model
    ask: Callable[[list[str]], np.ndarray]  # n texts -> (n, E) distributions, or (n, D) vectors
    about: dict[str, Any] = field(default_factory=dict)  # "labels" or "size"

    def described(self) -> dict[str, Any]:
        """For the manifest, and for the models that learn from it."""
        return {"name": self.name, **self.about}


def make_teachers(entries: Sequence[str]) -> dict[str, Teacher]:
    """{name: teacher} of entries such as `emotion` (the built-in one) and `embedding=PATH`. Raises UserError
    for a name that is unknown or comes twice, and for a model that cannot be one."""
    teachers: dict[str, Teacher] = {}
    for entry in entries:
        name, given, path = entry.partition("=")
        if name not in TEACHERS:
            near = difflib.get_close_matches(name, TEACHERS, n=1)
            raise UserError(
                f"--teachers {entry}: unknown teacher {name!r}, expected emotion or embedding, or one of "
                f"them with a model (embedding=PATH).{f' Did you mean {near[0]}?' if near else ''}"
            )
        if name in teachers or (given and not path):
            problem = f"got {name} twice" if name in teachers else "got no path behind ="
            raise UserError(
                f"--teachers {entry}: expected each teacher once, with or without =PATH, {problem}"
            )
        teachers[name] = _make(name, path)
    return {name: teachers[name] for name in TEACHERS if name in teachers}


def describe(teachers: Mapping[str, Teacher]) -> dict[str, dict[str, Any]]:
    """What a manifest says of them."""
    return {name: teacher.described() for name, teacher in teachers.items()}


def teach(teachers: Mapping[str, Teacher], dialogs: Sequence[Dialog]) -> list[Taught]:
    """What they say of every message of these dialogs that user or assistant wrote; blank ones say nothing.
    Each text is asked once."""
    spoken = [
        [n for n, m in enumerate(dialog.messages) if m["role"] in SPEAKERS and (m["content"] or "").strip()]
        for dialog in dialogs
    ]
    texts = [d.messages[n]["content"] for d, numbers in zip(dialogs, spoken, strict=True) for n in numbers]
    unique = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    which = np.array([unique[text] for text in texts], int)
    widths = dict(zip(TEACHERS, sizes(describe(teachers)), strict=True))
    said = {name: np.zeros((len(texts), width)) for name, width in widths.items()}
    for name, teacher in teachers.items() if unique else ():
        said[name] = teacher.ask(list(unique))[which]
    shares, vectors = said["emotion"].astype(np.float32), said["embedding"].astype(np.float16)
    ends = np.cumsum([0, *map(len, spoken)])
    return [
        Taught(np.array(numbers, np.int32), shares[ends[i] : ends[i + 1]], vectors[ends[i] : ends[i + 1]])
        for i, numbers in enumerate(spoken)
    ]


def _make(name: str, path: str) -> Teacher:
    if not path and name == "emotion":
        return Teacher(VADER.name, moods, {"labels": list(MOODS)})
    if not path:
        return Teacher(HASHED_WORDS.name, lambda texts: _means(map(hashed_words, texts)), {"size": HASHED})
    from rl_dialog.rewards.encoder import Classifier, Encoder

    if name == "emotion":
        classifier = Classifier(path)
        return Teacher(path, lambda texts: _shares(classifier(texts)), {"labels": classifier.labels})
    encoder = Encoder(path)

    def vectors(texts: list[str]) -> np.ndarray:
        states = encoder(texts)
        return _means(states[text][0].numpy() for text in texts)

    return Teacher(path, vectors, {"size": int(encoder.model.config.hidden_size)})


def _means(texts: Any) -> np.ndarray:
    """(n, D) of n texts with vectors (t, D) each; 0 for a text of which no word is known."""
    return np.stack([vectors.mean(0) if len(vectors) else np.zeros(vectors.shape[1]) for vectors in texts])


def _shares(probabilities: np.ndarray) -> np.ndarray:
    """(n, E) that sum to 1, where several labels may hold too."""
    total = probabilities.sum(1, keepdims=True)
    even = np.full_like(probabilities, 1 / probabilities.shape[1])
    return np.divide(probabilities, total, out=even, where=total > 0)
