"""Pairs of replies to one context for people to compare: fills a label log, answers it by a reward if asked to, tells and exports what is there.

    python -m pipelines.prefer_replies --output_dir runs/replies --source candidates --data data/scored                     N replies of one policy
    python -m pipelines.prefer_replies --output_dir runs/replies --source checkpoints --data data/chats --checkpoints runs/bc runs/ilql
    python -m pipelines.prefer_replies --output_dir runs/replies --source logs --logs preferences.jsonl --oracle logged     with the labels they have
    python -m pipelines.prefer_replies --output_dir runs/replies --export preferences.jsonl                                 what people said, for TRL

    runs/replies/labels.db     the label log (or --labels URL)
    runs/replies/clips/        the replies with their contexts, a file each

People answer with `label --run runs/replies`; `fit_reward --run runs/replies` learns from the answers. Run again, it adds what is new: a pair is
asked once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from rl_dialog.config import save_config
from rl_dialog.data.files import write_text_atomically
from rl_dialog.data.readers import Bad, find_logs, read_log
from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.data.shards import read_dialogs
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.candidates import candidate_replies
from rl_dialog.evaluation.generation import Decoding, load_for_decoding, stream
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences import replies as preferences
from rl_dialog.preferences.exchange import trl_rows
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.labels import NewQuery, pair_id
from rl_dialog.preferences.segments import Reply, Segments
from rl_dialog.rewards import Reward, choose_rewards
from rl_dialog.rewards.scorers import make_scorers
from rl_dialog.run import Quiet, run

TASK = "Which reply is better?"
LOG = "labels.db"
TOGETHER = 500  # answers of the oracle in one transaction


@dataclass(frozen=True)
class PreferRepliesConfig(Decoding, Quiet):
    """Where replies come from, and what is done with the log of labels."""

    output_dir: str = ""
    """folder of the replies and their labels; what is there stays"""
    labels: str = ""
    """URL of the label log, such as postgresql://user:password@host/database; by default labels.db in the folder"""
    source: Literal["", "candidates", "logs", "checkpoints"] = ""
    """what to add. candidates: of --data, a directory of `candidates`, or any with several replies to one context. logs: of --logs. checkpoints: a
    reply of each of two --checkpoints to the contexts of --data. Without it nothing is added"""
    data: str = ""
    """a directory that `prepare` or `candidates` wrote"""
    logs: tuple[str, ...] = ()
    """files and folders of any known format: TRL's preferences, rated replies, chats"""
    checkpoints: tuple[str, ...] = ()
    """two checkpoints or run folders"""
    splits: tuple[str, ...] = SPLITS
    """splits of --data; labels of all but train are for validation"""
    validation: float = 0.1
    """share of the conversations whose labels are for validation, where the replies have no split yet"""
    human: bool = True
    """candidates: also ask about the human's own replies"""
    contexts: int = 0
    """most contexts that are asked about, a random choice; 0 takes all"""
    pairs_per_context: int = 1
    """pairs of one context, a random choice"""
    reward_model: str = ""
    """a model of `fit_reward`: first asked are the pairs that it is least sure of; without it the order is random"""
    task: str = TASK
    """what the labellers are told"""
    oracle: str = ""
    """a reward that answers in place of people: logged, vote, or any other (rl_dialog/rewards/README.md); what it cannot judge it skips"""
    scorers: tuple[str, ...] = ()
    """models behind the oracle's reward: sentiment=PATH, reward_model=PATH, ..."""
    oracle_labels: int = 0
    """most answers of the oracle; 0 for all questions"""
    oracle_temperature: float = 0.0
    """0: the larger reward wins; above: with the probability sigmoid(difference / temperature)"""
    oracle_noise: float = 0.0
    """share of its answers that are a coin's"""
    oracle_ties: float = 0.0
    """rewards that differ by no more are equally good"""
    export: str = ""
    """write the preferences so far into this file, as TRL's prompt, chosen, rejected"""
    seed: int = 0
    """the choice of contexts and pairs, their order, the oracle's coins; sampling of --checkpoints"""
    batch_size: int = 128
    """replies generated together"""


def main(config: PreferRepliesConfig) -> dict[str, Any]:
    """Adds, answers, exports; returns the counts. Raises UserError or OSError for what the user can fix."""
    _check(config)
    found: dict[str, Any] = {"output_dir": config.output_dir}
    folder = Path(config.output_dir)
    if config.source:
        folder.mkdir(parents=True, exist_ok=True)
    elif not config.labels and not (folder / LOG).is_file():
        raise UserError(f"{folder}: expected a folder with labelled replies, found no {LOG} in it: add replies with --source")
    log, segments = LabelLog(config.labels or f"sqlite:///{folder / LOG}", create=bool(config.source)), Segments(folder / "clips")
    try:
        if config.source:
            save_config(replace(config, labels=log.name if config.labels else ""), folder / "prefer_replies.yaml")  # without the URL's password
            found["added"] = add_pairs(log, segments, chosen_pairs(contexts_of(config), config), config)
        if config.oracle:
            found["answered"] = answer(log, segments, config)
        if config.export:
            found["exported"] = export(log, segments, Path(config.export))
        return {**found, **log.counts()}
    finally:
        log.close()


def contexts_of(config: PreferRepliesConfig) -> list[list[Reply]]:
    """The different replies to each context that has two or more."""
    source = _generated(config) if config.source == "checkpoints" else (reply for _, reply in _logged(config))
    ratings = (preferences.Rating(reply, 0.0) for reply in source if config.human or reply.source.get("model") != "human")
    return [[rating.reply for rating in found] for found in preferences.by_context(ratings) if len(found) > 1]


def chosen_pairs(contexts: Sequence[Sequence[Reply]], config: PreferRepliesConfig) -> list[tuple[Reply, Reply]]:
    """Which pairs to ask about, in which order; by hashes of what is compared, so that the same replies give the same pairs again."""
    pairs = []
    for replies in contexts:
        drawn = sorted(combinations(replies, 2), key=lambda pair: _draw(config.seed, *pair))
        pairs.append(drawn[: config.pairs_per_context])
    pairs.sort(key=lambda drawn: _draw(config.seed, *drawn[0]))
    return [pair for drawn in pairs[: config.contexts or None] for pair in drawn]


def add_pairs(log: LabelLog, segments: Segments, pairs: Sequence[tuple[Reply, Reply]], config: PreferRepliesConfig) -> int:
    """Writes the replies, then offers the queries; how many are new."""
    before = len(log.pairs())
    sure = _sureness(config.reward_model, pairs)
    queries = []
    for pair, priority in zip(pairs, sure, strict=True):
        split = preferences.split_of(pair[0], validation=config.validation, seed=config.seed)
        first, second = (segments.add(replace(reply, source={**reply.source, "split": split})) for reply in pair)
        queries.append(NewQuery(first, second, task=config.task, priority=-priority, validation=split != "train"))
    log.add_queries(queries)
    return len(log.pairs()) - before


def answer(log: LabelLog, segments: Segments, config: PreferRepliesConfig) -> int:
    """Lets the oracle answer what is open; how many."""
    name = f"oracle:{config.oracle}"
    [reward] = choose_rewards([config.oracle], scorers=make_scorers(config.scorers)).values()
    settings = {"temperature": config.oracle_temperature, "noise": config.oracle_noise, "ties": config.oracle_ties}
    oracle = Oracle(truth=lambda reply: value(reply, reward), seed=config.seed, **settings)
    done = 0
    while queries := log.lease_many(name, min(TOGETHER, config.oracle_labels - done) if config.oracle_labels else TOGETHER):
        choices = []
        for query in queries:
            left, right = segments[query.left], segments[query.right]
            known = value(left, reward) is not None and value(right, reward) is not None
            choices.append((query, oracle.choice(left, right) if known else "skip"))
        done += len(log.answer_many(choices, name))
        if done == config.oracle_labels:
            break
    return done


def export(log: LabelLog, segments: Segments, path: Path) -> int:
    """Writes the preferences so far, whole or not at all; how many."""
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in trl_rows(log.labels(), segments)]
    write_text_atomically(path, "".join(rows))
    return len(rows)


def value(reply: Reply, reward: Reward) -> float | None:
    """What a reward gives the reply; None where it does not apply."""
    if not isinstance(reply, Reply):
        raise UserError(f"expected replies to answer for, got a clip of an environment, {reply.id}")
    return list(reward(preferences.as_dialog(reply)))[-1]


def _logged(config: PreferRepliesConfig) -> Iterator[tuple[Dialog, Reply]]:
    if config.source == "candidates":
        dialogs = (dialog for split in config.splits for dialog in read_dialogs(config.data, split))
    else:
        logs, bad, _ = find_logs(config.logs)
        dialogs = (item for item in (*bad, *(item for log in logs for item in read_log(log))))
    for dialog in dialogs:
        if isinstance(dialog, Bad):
            raise UserError(f"{dialog.file} {dialog.where}: {dialog.reason} (`prepare` puts such records into quarantine)")
        yield from ((dialog, reply) for _, reply in preferences.replies_of(dialog))


def _generated(config: PreferRepliesConfig) -> Iterator[Reply]:
    """A reply of each checkpoint to each context of the data."""
    contexts: dict[str, tuple[Dialog, int, Reply]] = {}
    for split in config.splits:
        for dialog in read_dialogs(config.data, split):
            for i, reply in preferences.replies_of(dialog):
                contexts.setdefault(json.dumps(reply.context), (dialog, i, reply))
    asked = sorted(contexts.values(), key=lambda found: _draw(config.seed, found[2], found[2]))[: config.contexts or None]
    decoding = Decoding.of(config)
    conversations = [dialog.messages[:i] for dialog, i, _ in asked]
    for number, checkpoint in enumerate(config.checkpoints):
        policy, tokenizer = load_for_decoding(checkpoint), load_tokenizer(resolve(checkpoint))
        drawing = {"count": 1, "seed": stream(config.seed, number), "batch_size": config.batch_size}
        said = candidate_replies(policy, tokenizer, conversations, decoding, **drawing)
        for (dialog, _, logged), [generated] in zip(asked, said, strict=True):
            kept = {"dialog": dialog.id, "model": checkpoint} | ({"split": dialog.split} if dialog.split else {})
            yield Reply(logged.context, generated.text, kept)


def _sureness(reward_model: str, pairs: Sequence[tuple[Reply, Reply]]) -> list[float]:
    """|difference of the scores| of each pair; 0 without a model."""
    if not reward_model:
        return [0.0] * len(pairs)
    scores = preferences.score(TextReward.from_pretrained(reward_model), [reply for pair in pairs for reply in pair])
    return [abs(scores[first.id] - scores[second.id]) for first, second in pairs]


def _draw(seed: int, first: Reply, second: Reply) -> str:
    return hashlib.sha256(f"{seed}\0{pair_id(first.id, second.id)}".encode()).hexdigest()


def _check(config: PreferRepliesConfig) -> None:
    if not config.output_dir:
        raise UserError("expected --output_dir: the folder of the replies and their labels")
    needed = {"candidates": ("data",), "logs": ("logs",), "checkpoints": ("data", "checkpoints")}.get(config.source, ())
    for name in ("data", "logs", "checkpoints"):
        if name in needed and not getattr(config, name):
            raise UserError(f"--source {config.source}: expected --{name}")
        if name not in needed and getattr(config, name):
            raise UserError(f"--{name}: not used with --source {config.source or '(none)'}: expected it with another source")
    if config.source == "checkpoints" and len(config.checkpoints) != 2:
        raise UserError(f"expected two --checkpoints, got {len(config.checkpoints)}")
    if not set(config.splits) <= set(SPLITS) or not config.splits:
        raise UserError(f"expected --splits among {', '.join(SPLITS)}, got {' '.join(config.splits) or 'none'}")
    for name, least in (("pairs_per_context", 1), ("contexts", 0), ("oracle_labels", 0), ("batch_size", 1), ("seed", 0)):
        if getattr(config, name) < least:
            raise UserError(f"expected --{name} of at least {least}, got {getattr(config, name)}")
    if not 0 <= config.validation < 1:
        raise UserError(f"expected --validation of at least 0 and below 1, got {config.validation}")
    if config.source == "checkpoints":
        Decoding.of(config).check()


if __name__ == "__main__":
    run(PreferRepliesConfig, main)
