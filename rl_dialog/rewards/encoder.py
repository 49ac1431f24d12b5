"""What a transformers model says of texts: a classifier's labels, cosines of sentence vectors, greedy matches
of token vectors, a regression head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_dialog.data.by_length import batches
from rl_dialog.errors import UserError
from rl_dialog.models.weights import (
    Lacking,
    in_words,
    load_strictly,
    of_trunk,
    positions_of,
    require_readable,
    require_weights,
)
from rl_dialog.rewards.scorers import EMOJI_WEIGHTS, EMOJIS

BATCH_TEXTS = 64
MAX_TOKENS = 512  # longer texts lose their tail; a model with fewer positions cuts earlier


class Encoder:
    """A text encoder, or the trunk of a causal LM: one vector per token. Raises UserError when there is none
    at `path`."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModel

        self.tokenizer, self.model, lacking = _load(AutoModel, path)
        require_weights(self.model, of_trunk(self.model, lacking), path)
        self.length = _longest(self.tokenizer, self.model)

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """{text: (its last hidden states (T, H), which of them are special tokens (T,))}. Texts of similar
        length share a batch."""
        hidden_states = {}
        unique = list(set(texts))
        for places in batches([(len(text), text) for text in unique], BATCH_TEXTS):
            batch = [unique[i] for i in places]
            encoded = self.tokenizer(
                batch,
                padding=True,
                truncation=True,
                max_length=self.length,
                return_tensors="pt",
                return_special_tokens_mask=True,
            )
            mask, special = encoded["attention_mask"].bool(), encoded["special_tokens_mask"].bool()
            if not encoded["input_ids"].shape[1]:  # nothing here that the tokenizer knows
                hidden_states |= {
                    text: (torch.empty(0, self.model.config.hidden_size), torch.empty(0, dtype=torch.bool))
                    for text in batch
                }
                continue
            states = self.model(
                input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]
            ).last_hidden_state  # (B, T, H)
            hidden_states |= {text: (states[i, mask[i]], special[i, mask[i]]) for i, text in enumerate(batch)}
        return hidden_states


def cosine(encoder: Encoder, pairs: list[tuple[str, str]]) -> list[float]:
    """The cosine of the two texts' mean token vectors, special tokens included as in sentence encoders.
    -1..1."""
    states = encoder([text for pair in pairs for text in pair])
    means = {
        text: torch.nn.functional.normalize(vectors.mean(0), dim=0)
        for text, (vectors, _) in states.items()
        if len(vectors)
    }
    return [_compared(means, pair, lambda one, other: (one @ other).clamp(-1, 1)) for pair in pairs]


def greedy_f1(encoder: Encoder, pairs: list[tuple[str, str]]) -> list[float]:
    """BERTScore F1 (Zhang et al. 2020): every token takes its best cosine in the other text; P over the
    candidate's, R over the reference's.

    From the last layer, without idf weights, special tokens or rescaling.
    """
    states = encoder([text for pair in pairs for text in pair])
    tokens = {
        text: torch.nn.functional.normalize(vectors[~special], dim=1)
        for text, (vectors, special) in states.items()
    }
    tokens = {text: vectors for text, vectors in tokens.items() if len(vectors)}
    return [_compared(tokens, pair, _greedy) for pair in pairs]


class Classifier:
    """A text classifier: probabilities per label. Raises UserError when there is no trained one at `path`."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForSequenceClassification

        self.path = path
        self.tokenizer, self.model, lacking = _load(AutoModelForSequenceClassification, path)
        if lacking or self.model.config.num_labels < 2:
            why = f"the files have {in_words(lacking)}" if lacking else "there is one output"
            raise UserError(
                f"{path}: expected a trained classifier with at least two labels, got one of which {why}"
            )
        self.length = _longest(self.tokenizer, self.model)
        named = self.model.config.id2label
        self.labels = [str(named[i]).lower() for i in range(self.model.config.num_labels)]
        if self.labels == [f"label_{i}" for i in range(len(EMOJIS))]:
            self.labels = list(EMOJIS)

    def weights(self, label_weights: Mapping[str, float]) -> np.ndarray:
        """(labels,) what each label counts; a classifier of 64 emojis has weights of its own. Raises
        UserError for a label that is not known."""
        if self.labels == list(EMOJIS):
            return np.array([EMOJI_WEIGHTS.get(label, 0.0) for label in self.labels])
        plain = {_plain(label): weight for label, weight in label_weights.items()}
        if unknown := [label for label in self.labels if _plain(label) not in plain]:
            example = " ".join(f"{label.replace(' ', '_')}=0" for label in self.labels[:3])
            raise UserError(
                f"{self.path}: its labels are {', '.join(self.labels)}, and what {unknown[0]!r} counts is not"
                f" known: say so for each, --label_weights {example} ..."
            )
        return np.array([plain[_plain(label)] for label in self.labels])

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> np.ndarray:
        """(texts, labels) probabilities, a sigmoid each where the model says that several labels may hold.
        Empty texts have 0 everywhere."""
        probabilities = np.zeros((len(texts), len(self.labels)))
        worded = [i for i, text in enumerate(texts) if text.strip()]
        for places in batches([(len(texts[i]), texts[i]) for i in worded], BATCH_TEXTS):
            indices = [worded[place] for place in places]
            encoded = self.tokenizer(
                [texts[i] for i in indices],
                padding=True,
                truncation=True,
                max_length=self.length,
                return_tensors="pt",
            )
            logits = self.model(**encoded).logits.float()
            several = self.model.config.problem_type == "multi_label_classification"
            probabilities[indices] = (logits.sigmoid() if several else logits.softmax(-1)).numpy()
        return probabilities


class Regression:
    """A regression head over (reference, candidate), as BLEURT is. Raises UserError when `path` has no such
    model."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForSequenceClassification

        self.tokenizer, self.model, lacking = _load(AutoModelForSequenceClassification, path)
        if lacking or self.model.config.num_labels != 1:
            why = in_words(lacking) or f"{self.model.config.num_labels} labels"
            raise UserError(
                f"{path}: expected a BLEURT checkpoint with a trained head of one output, got {why}. BLEURT's"
                " own TensorFlow files must be converted first (to a BertForSequenceClassification with "
                "num_labels 1)"
            )
        self.length = _longest(self.tokenizer, self.model)

    @torch.no_grad()
    def __call__(self, pairs: list[tuple[str, str]]) -> list[float]:
        scores = [0.0] * len(pairs)
        for part in batches([(len(pair[0]) + len(pair[1]), pair) for pair in pairs], BATCH_TEXTS):
            candidates, references = zip(*(pairs[i] for i in part), strict=True)
            encoded = self.tokenizer(
                list(references),
                list(candidates),
                padding=True,
                truncation=True,
                max_length=self.length,
                return_tensors="pt",
            )
            for i, value in zip(part, self.model(**encoded).logits[:, 0].tolist(), strict=True):
                scores[i] = value
        return scores


def _plain(label: str) -> str:
    """A label as its name may be typed."""
    return label.lower().replace("_", " ").replace("-", " ")


def _compared(
    vectors: dict[str, Tensor], pair: tuple[str, str], compare: Callable[[Tensor, Tensor], Any]
) -> float:
    """`compare` of the two texts' vectors; a text without any (nothing that the tokenizer knows) equals
    itself alone."""
    candidate, reference = pair
    if candidate in vectors and reference in vectors:
        return float(compare(vectors[candidate], vectors[reference]))
    return float(candidate.strip() == reference.strip())


def _greedy(mine: Tensor, theirs: Tensor) -> float:
    """mine (candidate tokens, H), theirs (reference tokens, H), of length 1 each."""
    table = (mine @ theirs.T).clamp(-1, 1)
    precision, recall = float(table.amax(1).mean()), float(table.amax(0).mean())
    return 2 * precision * recall / (precision + recall) if precision > 0 and recall > 0 else 0.0


def _load(kind: Any, path: str) -> tuple[Any, Any, Lacking]:
    """(tokenizer, model, which of its weights its files lack)."""
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    import rl_dialog.models.hierarchical  # noqa: F401  (whose family transformers does not know by itself)

    require_readable(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="right")
        model, lacking = load_strictly(kind, path)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"cannot load a model from {path!r}: expected a folder with config.json and weights, or a hub "
            f"name ({error})"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, model.eval(), lacking


def _longest(tokenizer: Any, model: Any) -> int:
    return min(MAX_TOKENS, tokenizer.model_max_length, positions_of(model) or MAX_TOKENS)
