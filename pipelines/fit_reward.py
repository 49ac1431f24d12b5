"""A reward model over replies, from preferences or ratings: what `prepare --scorers` and `candidates
--reward_model` ask.

    python -m pipelines.fit_reward --run runs/replies --output_dir models/reward
    python -m pipelines.fit_reward --logs preferences.jsonl --output_dir models/reward
    python -m pipelines.fit_reward --logs taskmaster4/reward --output_dir models/reward --folds 5
    python -m pipelines.fit_reward --data data/chats --reward vote --output_dir models/reward
    python -m pipelines.fit_reward --run runs/replies --output_dir models/reward --model_name_or_path BASE \\
        --fitting.use_peft --fitting.bf16 --fitting.learning_rate 1e-4 --fitting.batch_size 64 \\
        --fitting.gradient_accumulation_steps 8 --fitting.calibration 0.1 --fitting.patience 1 \\
        --num_workers 2
    python -m pipelines.fit_reward --data data/votes --reward vote --output_dir models/upvotes \\
        --objective ratings --model_name_or_path tfidf

It learns from answers of the labelling page (`--run`), from TRL's prompt, chosen, rejected or replies rated 0
or 1 (`--logs`), or from a prepared directory and its splits (`--data`). The model: any encoder or language
model of transformers with one output, a small new encoder, or a count of words, `tfidf`, which takes seconds.
One of `--objective ratings` also serves as a scorer of single texts: `prepare --scorers
toxicity=models/toxicity`.

It is judged on conversations that it was not fitted to, beside judges that cost nothing: the longer reply,
the words of the reply, and with `--checkpoint` the likelihood of a policy. With `--folds` every conversation
is judged once, and the model that is kept learns from all of them. rl_dialog/preferences/README.md has the
figures. """

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rl_dialog.config import at_least
from rl_dialog.data.files import write_json
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import load_for_decoding
from rl_dialog.evaluation.reply_judges import MODEL, HeldOut, headline, judged, likelihoods, table, write_card
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.device import named_device
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences import replies as preferences
from rl_dialog.preferences.replies import Preferences
from rl_dialog.preferences.reply_fitting import Scores, plain_judges, score
from rl_dialog.preferences.reply_reward import WORDS, ReplyRewardSettings, divisions, fitted, read_labels
from rl_dialog.preferences.segments import Reply
from rl_dialog.rewards.tfidf import TfidfClassifier
from rl_dialog.run import OnCluster, OnDevice, Output, claim_output, run


@dataclass(frozen=True)
class FitRewardConfig(ReplyRewardSettings, Output, OnDevice, OnCluster):
    """What to learn from, how, and what to be judged beside."""

    num_workers: int = 0
    """workers of Ray Train that learn together, each with a GPU where there are as many; 0 learns in this
    process, without Ray"""

    checkpoint: str = ""
    """a checkpoint whose likelihood (mean log-probability of a token) is judged beside the model"""


def main(config: FitRewardConfig) -> dict[str, Any]:
    """Fits, judges and saves; headline figures. Raises UserError or OSError for what the user can fix."""
    config.check()
    at_least(config, num_workers=0)
    if config.device not in ("auto", "cpu"):
        from rl_dialog.cluster.gpus import check_device  # Ray, which most runs of this verb do without

        check_device(config.device, config.address)
    if config.num_workers and config.model_name_or_path == WORDS:
        raise UserError("--num_workers: expected a transformer; a count of words takes seconds without any")
    load_quietly()
    began = time.perf_counter()
    labels = read_labels(config)
    likely = _likelihoods(config, labels)
    parts = list(divisions(labels, config))
    out = claim_output(config, "fit_reward")
    held_out = Preferences([], [])
    scores: dict[str, Scores] = {}
    for train, test in parts:
        model = _fitted(train, config, out)
        for name, values in _judges(model, train, test, likely).items():
            scores[name] = scores.get(name, {}) | values
        held_out = Preferences(held_out.pairs + test.pairs, held_out.ratings + test.ratings)
    if config.folds:
        model, train = _fitted(labels, config, out), labels
    noise = 0.0 if config.objective == "ratings" else config.fitting.noise_of_labels
    figures = judged(_plain(held_out), scores, noise=noise, zero=config.objective != "pairs")
    sizes = train.sizes()
    _write(out, model, config, {"fitted_to": sizes, "held_out": figures, "parameters": model.size})
    if not config.quiet:
        print(table(figures), flush=True)
    seconds = round(time.perf_counter() - began, 1)
    return {"output_dir": str(out), **sizes, **headline(figures), "seconds": seconds}


def _fitted(labels: Preferences, config: FitRewardConfig, out: Path) -> TextReward | TfidfClassifier:
    """By this process, or by workers of Ray Train."""
    if not config.num_workers:
        return fitted(labels, config, device=config.device, quiet=config.quiet)
    from rl_dialog.cluster.reward_fitting import fitted_by_workers

    where = {"device": config.device, "address": config.address, "folder": out}
    reward = fitted_by_workers(labels, config, num_workers=config.num_workers, **where)
    # It is judged here, where there may be no GPU though the workers had some.
    return reward.to(named_device("cpu" if config.device == "cpu" else "auto"))


def _likelihoods(config: FitRewardConfig, labels: Preferences) -> Callable[..., list[float]] | None:
    """What judges contexts and texts by the checkpoint, where there is one. Raises UserError for a likelihood
    that cannot be judged: now, and not when all is fitted."""
    if not config.checkpoint:
        return None
    if not all(isinstance(reply, Reply) for reply in labels.replies):
        raise UserError("--checkpoint: expected labels of single replies, got labels of conversations")
    policy = load_for_decoding(config.checkpoint)
    return partial(likelihoods, policy, load_tokenizer(resolve(config.checkpoint)))


def _judges(
    model: Any, train: Preferences, test: Preferences, likely: Callable[..., list[float]] | None
) -> dict[str, Scores]:
    """Judge -> what it says of every held-out reply."""
    replies = list({reply.id: reply for reply in test.replies}.values())
    scores = {MODEL: score(model, replies), **plain_judges(train, test)}
    if likely:
        values = likely([reply.context for reply in replies], [reply.text for reply in replies])
        scores["likelihood"] = dict(zip((reply.id for reply in replies), values, strict=True))
    return scores


def _plain(labels: Preferences) -> HeldOut:
    of = preferences.group_of
    return HeldOut(
        pairs=[(pair.first.id, pair.second.id, pair.preference, of(pair.first)) for pair in labels.pairs],
        ratings=[(rating.reply.id, rating.good, of(rating.reply)) for rating in labels.ratings],
        contexts=[
            ([(rating.reply.id, rating.good) for rating in rated], of(rated[0].reply))
            for rated in preferences.by_context(labels.ratings)
        ],
    )


def _write(
    out: Path, model: TextReward | TfidfClassifier, config: FitRewardConfig, about: dict[str, Any]
) -> None:
    model.to("cpu").save_pretrained(out)
    write_json(out / "metrics.json", about)
    source = config.run or config.data or ", ".join(Path(path).name for path in config.logs)
    sizes = ", ".join(f"{about['fitted_to'][name]} {name}" for name in ("pairs", "ratings", "conversations"))
    facts = [
        f"labels: {Path(source).name}: {sizes}",
        (
            f"objective: {config.objective}; base: {config.model_name_or_path or 'none, a new encoder'}; "
            f"reads the {config.what_is_read}"
        ),
        f"{about['parameters']:,} parameters; seed {config.seed}",
    ]
    write_card(out / "README.md", facts, about["held_out"], words=config.model_name_or_path == WORDS)


if __name__ == "__main__":
    run(FitRewardConfig, main)
