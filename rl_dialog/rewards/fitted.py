"""The models that `fit_reward` writes, of either kind: word counts (tfidf.py), or a transformer
(models/text_reward.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl_dialog.errors import UserError
from rl_dialog.rewards.tfidf import FILE, TfidfClassifier


class ReplyReward(Protocol):
    """What judges a reply behind its context."""

    def score(self, conversations: Iterable[Sequence[Mapping[str, Any]]]) -> list[float]:
        """The score of each conversation's last message."""
        ...


def load_reward_model(path: str | Path, *, device: Any = "cpu") -> ReplyReward:
    """What scores the last message of conversations: a model of ours, or one of TRL's. Raises UserError for
    anything else."""
    if (Path(path) / FILE).is_file():
        return TfidfClassifier.load(path)
    from rl_dialog.models.text_reward import TextReward

    return TextReward.from_pretrained(path).to(device)


def judges_texts(path: str) -> bool:
    """Is there a model of ours? Only its folder is looked at; a classifier of labels, or one on the hub, is
    none."""
    try:
        return (Path(path) / FILE).is_file() or "rated" in json.loads(
            (Path(path) / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return False


def text_probabilities(path: str) -> Callable[[Sequence[str]], list[float]]:
    """Texts to how likely each is a good one. Raises UserError for a model of preferences, whose scores have
    no zero."""
    model = load_reward_model(path)
    if isinstance(model, TfidfClassifier):
        return model
    if not model.rated:
        raise UserError(
            f"{path}: expected a model of good and bad replies (`fit_reward --objective ratings`), got one of"
            " preferences, whose scores have no zero"
        )
    return model.probabilities
