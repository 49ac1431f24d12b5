"""A small classifier of replies from labelled ones, to be used as a scorer of rewards: toxicity, upvotes, whatever a log has labels for.

    python -m pipelines.fit_scorer --data data/votes --reward vote --output_dir models/upvotes
    python -m pipelines.fit_scorer --data data/votes --reward vote --output_dir models/upvotes --model_name_or_path roberta-base
    python -m pipelines.prepare --logs chats/ --output_dir data/chats --rewards.toxicity 1 --scorers toxicity=models/toxicity

Without --model_name_or_path it is TF-IDF and logistic regression, fitted in seconds; with it, that pretrained model is fine-tuned.
The labels are a reward of a prepared directory; texts with their own labels are logs too (TRL's prompt, completion, label, for example).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.errors import UserError
from rl_dialog.evaluation.agreement import auc_with_interval
from rl_dialog.rewards.scorers import make_scorers
from rl_dialog.rewards.tfidf import TfidfClassifier
from rl_dialog.run import Output, claim_output, require, run


@dataclass(frozen=True)
class FitScorerConfig(Output):
    data: str = ""
    """A directory that `prepare` wrote."""
    reward: str = "logged"
    """The component that labels replies."""
    above: float = 0.0
    """A reply is good when the component is above this. For toxicity let the toxic ones be the good."""
    below: bool = False
    """Turn it around: good is what is not above."""
    model_name_or_path: str = ""
    """A pretrained encoder or language model to fine-tune, a folder or hub name; without it words and pairs of words are counted."""
    learning_rate: float = 1e-5
    """With --model_name_or_path: at its highest, after a tenth of the steps; it falls to 0."""
    per_device_train_batch_size: int = 16
    """With --model_name_or_path: replies of a step."""
    num_train_epochs: float = 3.0
    """With --model_name_or_path: how often every reply is seen."""
    max_length: int = 256
    """With --model_name_or_path: tokens; longer replies lose their tail."""
    seed: int = 0
    """With --model_name_or_path: the new head, the order of the replies, dropout."""
    min_texts: int = 3
    """Without --model_name_or_path: words and pairs in fewer replies are left out."""
    max_share: float = 0.9
    """Without --model_name_or_path: words and pairs in more than this share of the replies are left out."""
    inverse_penalty: float = 4.0
    """Without --model_name_or_path: C of the logistic regression: larger fits closer."""
    split: str = "validation"
    """Where the classifier is judged."""


def main(config: FitScorerConfig) -> dict[str, Any]:
    """Fits on the training split, judges on another; returns figures and the folder. Raises UserError for what the user can fix."""
    require(config, data="a directory that `prepare` wrote")
    components = load_manifest(config.data)["rewards"]["components"]
    if config.reward not in components:
        raise UserError(f"--reward {config.reward}: expected one of {', '.join(components)}, with which {config.data} was prepared")
    texts, good, _ = labelled(config, "train")
    out = claim_output(config, "fit_scorer")
    if config.model_name_or_path:
        _fine_tune(config, texts, good)
    else:
        settings = {"min_texts": config.min_texts, "max_share": config.max_share, "inverse_penalty": config.inverse_penalty}
        TfidfClassifier.fit(texts, good, **settings).save(out)
    texts_of_split, good_of_split, owner = labelled(config, config.split)
    figures: dict[str, Any] = {"replies": len(texts), "good": int(good.sum())}
    if len(set(good_of_split.tolist())) == 2:
        scorer = make_scorers([f"sentiment={config.output_dir}"])["sentiment"]  # as prepare loads it
        value, low, high = auc_with_interval(np.array(scorer.score(list(texts_of_split))), good_of_split, owner)
        figures |= {"auc": round(value, 4), "auc_interval": [round(low, 4), round(high, 4)], "judged_on": len(texts_of_split)}
    elif not config.quiet:
        print(f"the {config.split} split has no good and bad replies to judge by")
    return {"output_dir": config.output_dir, **figures}


def _fine_tune(config: FitScorerConfig, texts: Sequence[str], good: np.ndarray) -> None:
    from rl_dialog.rewards.fine_tune import fine_tune

    settings = {"learning_rate": config.learning_rate, "batch_size": config.per_device_train_batch_size, "epochs": config.num_train_epochs}
    fine_tune(
        config.model_name_or_path, texts, good, config.output_dir, **settings, max_length=config.max_length, seed=config.seed, quiet=config.quiet
    )


def labelled(config: FitScorerConfig, split: str) -> tuple[Sequence[str], np.ndarray, np.ndarray]:
    """(texts, good (R,), number of the dialog (R,)) of the replies that the component applies to."""
    texts, good, owner = [], [], []
    for number, dialog in enumerate(read_dialogs(config.data, split)):
        for i in dialog.replies:
            value = dialog.messages[i].get("rewards", {}).get(config.reward)
            if value is not None:
                texts.append(dialog.messages[i]["content"] or "")
                good.append((value > config.above) != config.below)
                owner.append(number)
    return texts, np.array(good, bool), np.array(owner)


if __name__ == "__main__":
    run(FitScorerConfig, main)
