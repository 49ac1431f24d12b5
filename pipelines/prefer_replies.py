"""Pairs of replies to one context for people to compare: fills a label log, answers it by a reward if asked
to, exports it.

    python -m pipelines.prefer_replies --output_dir runs/replies --source candidates --data data/scored
    python -m pipelines.prefer_replies --output_dir runs/replies --source checkpoints --data data/chats \\
        --checkpoints runs/bc runs/ilql
    python -m pipelines.prefer_replies --output_dir runs/replies --source logs --logs preferences.jsonl \\
        --oracle logged
    python -m pipelines.prefer_replies --output_dir runs/replies --export preferences.jsonl

N replies of one policy; a reply of each of two; replies of logs, with the labels they have; and what people
said so far, for TRL. Into the folder go

    runs/replies/labels.db     the label log (or --labels URL)
    runs/replies/clips/        the replies with their contexts, a file each

People answer with `label --run runs/replies`; `fit_reward --run runs/replies` learns from the answers. Run
again, it adds what is new: a pair is asked once. """

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_dialog.config import save_config
from rl_dialog.data.database import without_password
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.candidates import candidate_replies
from rl_dialog.evaluation.generation import Decoding, load_for_decoding, stream
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.checkpoint import resolve
from rl_dialog.preferences.exchange import write_trl
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.reliability import UNTRUSTED, judgements
from rl_dialog.preferences.replies import replies_of
from rl_dialog.preferences.reply_queries import ReplyQuestions, answer_by_reward, ask_about, asked_contexts
from rl_dialog.preferences.reply_sources import ReplySource
from rl_dialog.preferences.segments import Reply, Segments
from rl_dialog.run import Quiet, at_least, require, run

LOG = "labels.db"


@dataclass(frozen=True)
class PreferRepliesConfig(ReplySource, ReplyQuestions, Decoding, Quiet):
    """What is done with the log of labels."""

    output_dir: str = ""
    """folder of the replies and their labels; what is there stays"""
    labels: str = ""
    """URL of the label log, such as postgresql://user:password@host/database; by default labels.db in the
    folder"""
    export: str = ""
    """write the preferences so far into this file, as TRL's prompt, chosen, rejected: of each pair what is
    most probably right, as `fit_reward` learns it; ties and what nobody reliable has judged are left out"""
    batch_size: int = 128
    """replies generated together"""


def main(config: PreferRepliesConfig) -> dict[str, Any]:
    """Adds, answers, exports; returns the counts. Raises UserError or OSError for what the user can fix."""
    _check(config)
    load_quietly()
    folder = Path(config.output_dir).absolute()
    counts: dict[str, Any] = {"output_dir": str(folder)}
    if config.source:
        folder.mkdir(parents=True, exist_ok=True)
    elif not config.labels and not (folder / LOG).is_file():
        raise UserError(
            f"{folder}: expected a folder with labelled replies, found no {LOG} in it: add replies with "
            "--source"
        )
    log = LabelLog(config.labels or f"sqlite:///{folder / LOG}", create=bool(config.source))
    segments = Segments(folder / "clips")
    try:
        if config.source:
            kept = replace(config, labels=without_password(config.labels))
            save_config(kept, folder / "prefer_replies.yaml")
            counts["added"] = ask_about(_replies(config), config, log, segments)
        if config.oracle:
            counts["answered"] = answer_by_reward(config, log, segments)
        if config.export:
            trusted = [one for one in judgements(log.answers()) if one.noise < UNTRUSTED]
            counts["exported"] = write_trl(Path(config.export), trusted, segments)
        return {**counts, **log.counts()}
    finally:
        log.close()


def _replies(config: PreferRepliesConfig) -> Iterator[Reply]:
    if config.source == "checkpoints":
        return _generated(config)
    return (reply for dialog in config.dialogs() for _, reply in replies_of(dialog))


def _generated(config: PreferRepliesConfig) -> Iterator[Reply]:
    """A reply of each checkpoint to each context of the data."""
    contexts = asked_contexts(config.dialogs(), most=config.contexts, seed=config.seed)
    conversations = [asked.dialog.messages[: asked.message] for asked in contexts]
    for number, checkpoint in enumerate(config.checkpoints):
        policy, tokenizer = load_for_decoding(checkpoint), load_tokenizer(resolve(checkpoint))
        drawing = {"count": 1, "seed": stream(config.seed, number), "batch_size": config.batch_size}
        generated = candidate_replies(policy, tokenizer, conversations, Decoding.of(config), **drawing)
        for asked, [reply] in zip(contexts, generated, strict=True):
            yield asked.answered(reply.text, checkpoint)


def _check(config: PreferRepliesConfig) -> None:
    require(config, output_dir="the folder of the replies and their labels")
    config.check_source()
    config.check_questions()
    at_least(config, batch_size=1)
    if config.source == "checkpoints":
        Decoding.of(config).check()


if __name__ == "__main__":
    run(PreferRepliesConfig, main)
