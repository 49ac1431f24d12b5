"""Training and judging the language understanding of `models/nlu.py`.

    loss = mean over turns of [sum over the text's tokens of CE(tags) + sum over acts of BCE(sentence)],
           both over what the turn's side can say

Acts that need no words of their own are rare: each one's positive term weighs 1 + log10(negatives /
positives), as in BERTNLU.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_dialog.data.by_length import shuffled_batches
from rl_dialog.data.labelled import NO_TEXT, SIDES, Act, LabelledTurn, located
from rl_dialog.data.splits import drawn
from rl_dialog.errors import UserError
from rl_dialog.models.nlu import Encoded, Labels, Nlu, new_nlu
from rl_dialog.training.fitting import Progress, minimise

POOL = 32  # batches whose turns are sorted by length together
OUTSIDE = 0


@dataclass(frozen=True)
class NluSettings:
    """The model, and how it learns."""

    model_name_or_path: str = ""
    """a pretrained encoder, a folder or a hub name; by default a small one is trained from nothing"""
    hidden_size: int = 64
    """width of the encoder, where no pretrained one is given"""
    num_hidden_layers: int = 2
    """layers of the encoder, where no pretrained one is given"""
    vocab_size: int = 4096
    """size of the tokenizer, where no pretrained encoder is given"""
    context: int = 1
    """how many turns before the text are read with it; 0 for none"""
    max_length: int = 128
    """the most tokens of context and text together"""
    min_count: int = 3
    """acts that occur less often are not learned"""
    learning_rate: float = 1e-2
    """the learning rate at its highest, after a tenth of the steps; 3e-5 is usual with
    --model_name_or_path"""
    per_device_train_batch_size: int = 32
    """turns in a training step"""
    num_train_epochs: float = 10.0
    """how often every turn is seen"""
    weight_decay: float = 0.01
    """weight decay of all matrices"""
    validation: float = 0.1
    """the share of the dialogs that is held out to judge by"""
    seed: int = 0
    """decides on the new weights, the order of the turns and the held-out dialogs"""


def is_held_out(turn: LabelledTurn, settings: NluSettings) -> bool:
    """Is its dialog one of those to judge by?"""
    return drawn(turn.dialog, seed=settings.seed) < settings.validation


def untrained(turns: Sequence[LabelledTurn], labels: Labels, settings: NluSettings) -> Nlu:
    """A model for these turns. Raises UserError for a pretrained encoder that cannot be loaded."""
    torch.manual_seed(settings.seed)  # of the new weights
    sizes = {name: getattr(settings, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return new_nlu(turns, labels, encoder=settings.model_name_or_path, **sizes)


def teach(
    nlu: Nlu,
    turns: Sequence[LabelledTurn],
    settings: NluSettings,
    *,
    progress: Progress = lambda step, steps, loss: None,
) -> None:
    """Trains the model on these turns."""
    how = {"learning_rate": settings.learning_rate, "batch_size": settings.per_device_train_batch_size}
    how |= {"epochs": settings.num_train_epochs, "weight_decay": settings.weight_decay, "seed": settings.seed}
    fit(nlu, turns, **how, progress=progress)


def labels_of(
    turns: Sequence[LabelledTurn], *, min_count: int = 3, context: int = 1, max_length: int = 128
) -> Labels:
    """What occurs in the turns at least `min_count` times. Raises UserError where nothing does."""
    tags, acts = Counter(), Counter()
    sides: dict[tuple, set[str]] = {}
    for turn in turns:
        spans, sentence_acts = located(turn.text, turn.acts)
        for label in [*(tag for _, _, tag in spans), *sentence_acts]:
            (tags if len(label) == 3 else acts)[label] += 1
            sides.setdefault(label, set()).add(turn.side)
    frequent = [
        sorted(label for label, count in counter.items() if count >= min_count) for counter in (tags, acts)
    ]
    if not any(frequent):
        raise UserError(
            f"expected acts that occur at least {min_count} times, got {len(turns)} turns with "
            f"{sum(acts.values()) + sum(tags.values())} acts"
        )
    masks = [tuple(tuple(side in sides[label] for side in SIDES) for label in labels) for labels in frequent]
    return Labels(tuple(frequent[0]), tuple(frequent[1]), *masks, context=context, max_length=max_length)


def fit(
    nlu: Nlu,
    turns: Sequence[LabelledTurn],
    *,
    learning_rate: float,
    batch_size: int,
    epochs: float,
    weight_decay: float = 0.01,
    seed: int = 0,
    progress: Progress = lambda step, steps, loss: None,
) -> None:
    """Trains all weights as `training/fitting.py` says."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    positive = _positive_weights(nlu.labels, turns)
    lengths = [len(turn.text) + len(turn.context[-1] if turn.context else "") for turn in turns]
    waiting: list[list[int]] = []

    def batch_loss() -> Tensor:
        waiting[:] = waiting or shuffled_batches(lengths, batch_size, rng, pool=POOL)
        return loss_of(nlu, [turns[i] for i in waiting.pop()], positive)

    steps = max(1, round(epochs * len(turns) / batch_size))
    rate = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    minimise(nlu, batch_loss, steps=steps, **rate, progress=progress)


def loss_of(nlu: Nlu, turns: Sequence[LabelledTurn], positive: Tensor | None = None) -> Tensor:
    """The loss of one batch; `positive` weighs the positive terms of the acts # (acts,)."""
    batch = nlu.encode([(turn.text, turn.context, turn.side) for turn in turns])
    tags, act_targets = targets(nlu.labels, turns, batch)
    sides = torch.tensor([SIDES.index(turn.side) for turn in turns])
    tag_logits, act_logits = nlu(batch.inputs, batch.text)
    tag_logits = tag_logits.masked_fill(~nlu.tag_mask[sides][:, None], -torch.inf)
    tagging = F.cross_entropy(tag_logits[batch.text], tags[batch.text], reduction="sum") / len(turns)
    sentence = F.binary_cross_entropy_with_logits(
        act_logits, act_targets, pos_weight=positive, reduction="none"
    )
    return tagging + (sentence * nlu.act_mask[sides]).sum(1).mean()


def targets(labels: Labels, turns: Sequence[LabelledTurn], batch: Encoded) -> tuple[Tensor, Tensor]:
    """The tag of each token # (B, T) int64: 0 outside, 1 + 2k begins tag k, 2 + 2k goes on; and which acts
    the sentence has # (B, acts) float."""
    tag_number = {tag: i for i, tag in enumerate(labels.tags)}
    act_number = {act: i for i, act in enumerate(labels.acts)}
    tags = torch.full(batch.text.shape, OUTSIDE)
    act_targets = torch.zeros(len(turns), len(labels.acts))
    for row, turn in enumerate(turns):
        spans, sentence_acts = located(turn.text, turn.acts)
        for act in sentence_acts:
            if act in act_number:
                act_targets[row, act_number[act]] = 1
        for first_char, last_char, tag in spans:
            inside = [
                t
                for t, (start, end) in enumerate(batch.offsets[row])
                if batch.text[row, t] and start < last_char and end > first_char and tag in tag_number
            ]
            for t in inside:
                tags[row, t] = 1 + 2 * tag_number[tag] + (t != inside[0])
    return tags, act_targets


def judge(nlu: Nlu, turns: Sequence[LabelledTurn]) -> dict[str, dict[str, float]]:
    """Precision, recall and F1 of acts, values compared without case and blanks: "all", each side, and each
    intent of a side ("user/Inform").

    Counts are summed over turns (micro). Only `acts` is there where neither has any: {"precision", "recall",
    "f1", "acts"}.
    """
    counts: Counter = Counter()
    predictions = nlu.understand([(turn.text, turn.context, turn.side) for turn in turns])
    for turn, acts in zip(turns, predictions, strict=True):
        expected, predicted = {_plain(act) for act in turn.acts}, {_plain(act) for act in acts}
        for kind, group in (("right", expected & predicted), ("wanted", expected), ("got", predicted)):
            for act in group:
                for name in ("all", turn.side, f"{turn.side}/{act[0]}"):
                    counts[name, kind] += 1
    return {name: _figures(counts, name) for name in sorted({name for name, _ in counts})}


def table(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """What `judge` says of the turns of several sources, one line for each source, side and intent."""
    rows = [f"{'held out':<12}{'of':<22}{'precision':>10}{'recall':>8}{'F1':>8}{'acts':>8}"]
    for source, judged in figures.items():
        for name, x in judged.items():
            rows.append(
                f"{source:<12}{name:<22}{x['precision']:>10.3f}{x['recall']:>8.3f}{x['f1']:>8.3f}{x['acts']:>8}"
            )
    return "\n".join(rows)


def _figures(counts: Counter, name: str) -> dict[str, float]:
    right, expected, predicted = (counts[name, kind] for kind in ("right", "wanted", "got"))
    precision, recall = right / predicted if predicted else 0.0, right / expected if expected else 0.0
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {
        "precision": round(precision, 4),
        "recall": round(recall, 4),
        "f1": round(f1, 4),
        "acts": expected,
    }


def _plain(act: Act) -> Act:
    value = act[3].lower()
    return *act[:3], value if value in NO_TEXT else "".join(filter(str.isalnum, value))


def _positive_weights(labels: Labels, turns: Sequence[LabelledTurn]) -> Tensor:
    counts = Counter(act for turn in turns for act in located(turn.text, turn.acts)[1])
    positives = torch.tensor([float(max(1, counts[act])) for act in labels.acts])
    return 1 + torch.log10((len(turns) / positives).clamp(min=1.0))
