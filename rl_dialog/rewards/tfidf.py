"""A small text classifier for when there is no model at hand: words and pairs of words, weighted, and a
logistic regression; seconds to fit on a CPU.

    p(good) = sigmoid(sum_f w_f x_f + b),   x_f = (1 + log tf_f) idf_f, divided by the length of x
    idf_f = 1 + log((1 + n) / (1 + df_f)),  w_f = r_f c_f, c of the regression, r_f = log of how much
                                            commoner f is in good texts than in bad ones

After Wang and Manning (2012), as the 2019 code did for toxicity. Reading a fitted one needs numpy only;
nothing of it is a pickle.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.data.schema import said
from rl_dialog.errors import UserError
from rl_dialog.rewards.words import words

FILE = "tfidf.json"


@dataclass(frozen=True)
class TfidfSettings:
    """How the word counts are fitted. Raises UserError for a number out of its range."""

    min_texts: int = 3
    """words and pairs in fewer texts are left out"""
    max_share: float = 0.9
    """words and pairs in more than this share of the texts are left out"""
    inverse_penalty: float = 4.0
    """C of the logistic regression: larger fits closer"""

    def __post_init__(self) -> None:
        if self.min_texts < 1 or not 0 < self.max_share <= 1 or not self.inverse_penalty > 0:
            raise UserError(
                "expected min_texts of at least 1, max_share in (0, 1] and a positive inverse_penalty, got "
                f"{self}"
            )


class TfidfClassifier:
    """F features with their idf (F,) and weight (F,), and a bias."""

    def __init__(self, features: Sequence[str], idf: np.ndarray, weight: np.ndarray, bias: float) -> None:
        self.known = {
            feature: (float(i), float(w)) for feature, i, w in zip(features, idf, weight, strict=True)
        }
        self.bias = float(bias)

    @classmethod
    def fit(
        cls, texts: Sequence[str], good: Sequence[bool], settings: TfidfSettings | None = None
    ) -> TfidfClassifier:
        """From labelled texts. Raises UserError without both labels, or where no feature is left."""
        settings = settings or TfidfSettings()
        try:
            from sklearn.feature_extraction.text import TfidfVectorizer
            from sklearn.linear_model import LogisticRegression
        except ImportError as error:
            raise UserError("counting words needs scikit-learn: pip install scikit-learn") from error
        good = np.asarray(good, bool)
        if good.all() or not good.any():
            raise UserError(f"expected good and bad texts, got {int(good.sum())} good ones of {len(good)}")
        vectorizer = TfidfVectorizer(
            analyzer=grams, min_df=settings.min_texts, max_df=settings.max_share, sublinear_tf=True
        )
        try:
            x = vectorizer.fit_transform(texts)
        except ValueError as error:
            expected = f"words that occur in at least {settings.min_texts} of the {len(texts)} texts"
            raise UserError(f"expected {expected}, found none: give more texts") from error
        ratio = np.log(_shares(x[good]) / _shares(x[~good]))
        regression = LogisticRegression(C=settings.inverse_penalty, max_iter=1000).fit(
            x.multiply(ratio).tocsr(), good
        )
        return cls(
            vectorizer.get_feature_names_out().tolist(),
            vectorizer.idf_,
            ratio * regression.coef_[0],
            regression.intercept_[0],
        )

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """p(good) of each text; a text without known features has that of the bias."""
        return [1 / (1 + math.exp(-self._log_odds(text))) for text in texts]

    def score(self, conversations: Iterable[Sequence[Mapping[str, Any]]]) -> list[float]:
        """The log-odds of each conversation's last message, which is all that is read of it."""
        return [self._log_odds(said(conversation[-1])) for conversation in conversations]

    def to(self, device: Any) -> TfidfClassifier:
        """As other reward models have it: it needs no device; itself."""
        return self

    def _log_odds(self, text: str) -> float:
        score = square = 0.0
        for gram, count in Counter(grams(text)).items():
            if gram in self.known:
                idf, weight = self.known[gram]
                x = (1 + math.log(count)) * idf
                score, square = score + weight * x, square + x * x
        return (score / math.sqrt(square) if square else 0.0) + self.bias

    @property
    def size(self) -> int:
        """How many weights there are."""
        return len(self.known) + 1

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `tfidf.json`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        features = {
            feature: [round(idf, 6), round(weight, 6)] for feature, (idf, weight) in self.known.items()
        }
        (Path(folder) / FILE).write_text(
            json.dumps({"bias": self.bias, "features": features}, ensure_ascii=False), encoding="utf-8"
        )

    @classmethod
    def load(cls, folder: str | Path) -> TfidfClassifier:
        """Reads `tfidf.json`. Raises UserError for anything else."""
        path = Path(folder) / FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            features = values["features"]
            numbers = np.array(list(features.values()), dtype=float).reshape(-1, 2)
            return cls(list(features), numbers[:, 0], numbers[:, 1], float(values["bias"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: expected a classifier that pipelines.fit_reward wrote, got {type(error).__name__}: "
                f"{error}"
            ) from error


def grams(text: str) -> list[str]:
    """Words and pairs of neighbouring words."""
    unigrams = words(text)
    return [*unigrams, *(f"{left} {right}" for left, right in zip(unigrams, unigrams[1:], strict=False))]


def _shares(x: np.ndarray) -> np.ndarray:
    """(F,) how much of the weight of a class each feature has, one added to each."""
    counts = np.asarray(x.sum(0)).ravel() + 1
    return counts / counts.sum()
