"""What the two passes over the logs made, as the files of a data directory: its tokenizer, quarantine, pairs
and manifest."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rl_dialog.cluster.data import peak_kib
from rl_dialog.cluster.scored import Scored
from rl_dialog.cluster.scoring import WORK, Scoring, score_logs
from rl_dialog.cluster.shards import Shard, largest_context, occurrences, shared_contexts, write_shards
from rl_dialog.data.manifest_report import COUNTS
from rl_dialog.data.missing import judged_by
from rl_dialog.data.pairs import mine_pairs, rewards_of
from rl_dialog.data.readers import STOPPED, Bad, LogFile
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import read_dialogs
from rl_dialog.errors import UserError
from rl_dialog.evaluation.runs import nearest
from rl_dialog.rewards import Statistics
from rl_dialog.rewards.choosing import scorer_names
from rl_dialog.rewards.normalise import Normaliser, fit_normalisers
from rl_dialog.rewards.statistics import SUM

TRAINED_ON = (
    20_000_000  # characters of the train split, evenly taken: a tokenizer is trained on at most so many
)


Progress = Callable[
    [str, int | None], AbstractContextManager[Callable[[int], Any]]
]  # (title, total): who is told how many came


@dataclass(frozen=True)
class Tokenising:
    """How scored dialogs become token rows."""

    tokenizer: str | None  # by default one is trained
    vocab_size: int  # of that one
    max_length: int
    shard_rows: int
    teachers: tuple[str, ...] = ()  # that are asked about every message


def fill_directory(
    directory: Path,
    logs: Sequence[LogFile],
    bad: Sequence[Bad],
    *,
    scoring: Scoring,
    tokenising: Tokenising,
    kinds: Mapping[str, str],
    normalisers: Mapping[str, Normaliser],
    concurrency: int | None,
    progress: Progress,
    began: float,  # when the command did, by time.perf_counter
) -> dict[str, Any]:
    """Both passes over the logs into `directory`; returns what the manifest says of them. Ray must run.

    Normalisers of these `kinds` are fitted where none are given. What only the passes needed is left in WORK.
    """
    work, tokenizer = directory / WORK, directory / "tokenizer"
    with progress("score", None) as step:
        scored = score_logs(logs, scoring, work, concurrency=concurrency, progress=step)
    _check_scored(scored, bad, split=scoring.split)
    _check_rating(scored, scoring)
    weights, normalisers = scoring.weights, normalisers or _fitted(kinds, scored, scoring)
    vocab_size = _save_tokenizer(tokenising, scored, tokenizer)
    with progress("tokenise", sum(scored.dialogs.values())) as step:
        how = {name: getattr(tokenising, name) for name in ("shard_rows", "max_length", "teachers")}
        how |= {name: getattr(scoring, name) for name in ("record_seconds", "strict")}
        how |= {"weights": weights, "normalisers": normalisers, "concurrency": concurrency}
        shards = write_shards(scored, tokenizer, directory, **how, progress=step)
    late = [item for made in shards.values() for shard in made for item in shard.late]
    if late and not any(shard.dialogs for shard in shards["train"]):
        expected = "expected at least one dialog of the train split that can be tokenised"
        first = Bad(**late[0]["bad"])
        raise UserError(f"{expected}, got {len(late)} dialogs that cannot; the first is {first}")
    rewards = _reward_figures(scored, shards, weights, normalisers)
    rewards["scorers"] = scorer_names(weights, compat=scoring.compat, scorers=scoring.scorers)
    quarantined, stopped = _write_quarantine(bad, work / "quarantine", late, directory / "quarantine.jsonl")
    return {
        "sources": _source_figures(logs, bad, scored, late),
        "splits": {split: _split_figures(made) for split, made in shards.items()},
        "rewards": rewards,
        "tokenizer": _tokenizer_figures(tokenising.tokenizer, tokenizer, vocab_size),
        "quarantined": quarantined,
        "stopped": stopped,
        **_count_figures(scored, shards, split=scoring.split),
        **_cost_figures(time.perf_counter() - began, scored, shards),
    }


def _fitted(kinds: Mapping[str, str], scored: Scored, scoring: Scoring) -> dict[str, Normaliser]:
    """From the training split; as the 2019 code did it, from everything."""
    statistics = scored.statistics if scoring.compat else scored.training
    return fit_normalisers(kinds, statistics.summary(scoring.weights)["components"], scored.ranked)


def _check_scored(scored: Scored, bad: Sequence[Bad], *, split: str) -> None:
    total = sum(scored.dialogs.values())
    if not total:
        silent = sum(count["no_reply"] for count in scored.counts.values())
        quarantined = len(bad) + sum(count["quarantined"] for count in scored.counts.values())
        first = scored.first_bad or (str(bad[0]) if bad else "")
        reason = f"; the first quarantined one is {first}" if first else ""
        counts = f"{silent} without a reply and {quarantined} quarantined{reason}"
        raise UserError(f"expected at least one dialog with an assistant reply, got {counts}")
    if not scored.dialogs["train"]:
        fix = "lower --validation and --test, choose another --seed or --split_by dialog, or give more logs"
        fix = "--split hash draws one, whatever the logs declare" if split == "declared" else fix
        raise UserError(f"no dialog of {total} fell into the train split: {fix}")


def _check_rating(scored: Scored, scoring: Scoring) -> None:
    """A name that no conversation is rated by would be a reward of nothing."""
    if scoring.rating is None or "rating" not in scoring.weights:
        return
    if scored.statistics.summary(scoring.weights)["components"]["rating"]["coverage"]:
        return
    names = rating_names(scored)
    they = f"they are rated by {', '.join(names)}" if names else "they have no ratings"
    near = nearest(scoring.rating, names)
    raise UserError(f"--rating {scoring.rating}: no conversation of these logs has it, {they}.{near}")


def rating_names(scored: Scored) -> list[str]:
    """What conversations are rated by, the commonest first."""
    names: Counter[str] = Counter()
    for path, _ in itertools.chain(*scored.chunks.values()):
        for meta in pq.read_table(path, columns=["meta"]).column("meta").to_pylist():
            ratings = json.loads(meta).get("ratings")
            names.update(ratings if isinstance(ratings, dict) else ())
    return [name for name, _ in names.most_common()]


def _save_tokenizer(how: Tokenising, scored: Scored, directory: Path) -> int:
    """Saves the named tokenizer, or one that is trained on the train split; returns how many tokens it
    has."""
    from rl_dialog.data.tokenize import load_tokenizer, train_tokenizer

    size, trained = how.vocab_size, how.tokenizer is None
    tokenizer = (
        train_tokenizer(sample_texts(scored), vocab_size=size) if trained else load_tokenizer(how.tokenizer)
    )
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


def sample_texts(scored: Scored, *, limit: int = TRAINED_ON) -> Iterator[str]:
    """The message texts of every n-th dialog of the train split, with n such that about `limit` characters
    come out."""
    step = math.ceil(scored.characters["train"] / limit) or 1  # nobody may have said a word
    seen = 0
    for path, count in scored.chunks["train"]:
        messages = pq.read_table(path, columns=["messages"]).column("messages")
        for i in range(-seen % step, count, step):
            yield from (message["content"] for message in messages[i].as_py() if message["content"])
        seen += count


def _write_quarantine(
    bad: Sequence[Bad], parts: Path, late: Sequence[dict[str, Any]], path: Path
) -> tuple[int, list[str]]:
    """All bad records, files first, in the order of reading; then those that could not be tokenised.
    Returns how many, and which of them are files that were not read to their end."""
    count, stopped = 0, []
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for item in bad:
            file.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")
            count += 1
        for part in sorted(parts.iterdir()):
            with open(part, encoding="utf-8", newline="\n") as lines:
                for line in lines:
                    file.write(line)
                    count += 1
                    if STOPPED in line and (item := Bad(**json.loads(line))).reason.startswith(STOPPED):
                        stopped.append(str(item))
        for item in late:
            file.write(json.dumps(item["bad"], ensure_ascii=False) + "\n")
    return count + len(late), stopped


def write_pairs(directory: Path, by: str) -> None:
    """`directory`/pairs/<split>.jsonl, judged in all splits by what suits the training split."""
    (directory / "pairs").mkdir(exist_ok=True)
    rewards = [rewards_of(dialog) for dialog in read_dialogs(directory, "train")]
    by = judged_by(by, "to_go", rewards, who="--pairs", flag="--pairs_by")
    for split in SPLITS:
        with open(directory / "pairs" / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
            for pair in mine_pairs(partial(read_dialogs, directory, split), by=by):
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")


def _source_figures(
    logs: Sequence[LogFile], bad: Sequence[Bad], scored: Scored, late: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Counts per source, and the files that it came from; a file without a record counts for its corpus."""
    counts = {**scored.counts}
    seen = {log for log, _ in counts}
    for index, log in enumerate(logs):
        if index not in seen:
            counts[index, log.corpus] = {}
    sources: dict[str, Any] = {}
    for (index, name), count in sorted(counts.items()):
        source = sources.setdefault(name, _new_source())
        log = logs[index]
        member = {} if log.member is None else {"member": log.member}
        source["files"].append({"path": log.path, **member, "reader": log.reader, **scored.files[log.path]})
        for key in COUNTS:
            source[key] += count.get(key, 0)
    for item in bad:
        sources.setdefault(item.source, _new_source())["quarantined"] += 1
    for item in late:
        source = sources.setdefault(item["bad"]["source"], _new_source())
        source["quarantined"], source["dialogs"] = source["quarantined"] + 1, source["dialogs"] - 1
        for name in ("replies", "turns"):
            source[name] -= item[name]
    return dict(sorted(sources.items()))


def _new_source() -> dict[str, Any]:
    return {"files": [], **dict.fromkeys(COUNTS, 0)}


def _split_figures(shards: Sequence[Shard]) -> dict[str, Any]:
    """Totals, and the shards."""
    totals = {
        key: sum(getattr(shard, key) for shard in shards) for key in ("dialogs", "replies", "rows", "tokens")
    }
    return {
        **totals,
        "shards": [{"file": shard.file, "dialogs": shard.dialogs, "rows": shard.rows} for shard in shards],
    }


def _tokenizer_figures(name: str | None, directory: Path, vocab_size: int) -> dict[str, Any]:
    digest = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    return {"name": name or "trained", "vocab_size": vocab_size, "sha256": digest}


def _reward_figures(
    scored: Scored,
    shards: Mapping[str, Sequence[Shard]],
    weights: dict[str, float],
    normalisers: Mapping[str, Normaliser],
) -> dict[str, Any]:
    """Statistics of the raw components; of their sum as it is used, normalised or not."""
    figures = scored.statistics.summary(weights)
    if normalisers:
        totals = [Statistics.from_dict(shard.rewards) for written in shards.values() for shard in written]
        figures["sum"] = reduce(Statistics.merge, totals).summary({})["sum"]
        for row in figures["correlation"].values():
            row.pop(SUM)  # it was that of the raw sum
        figures["correlation"].pop(SUM)
    return figures | {"normalisers": {name: normaliser.to_dict() for name, normaliser in normalisers.items()}}


def _count_figures(scored: Scored, shards: Mapping[str, Sequence[Shard]], *, split: str) -> dict[str, Any]:
    """What a user may wonder about afterwards. `split`: how the dialogs were split, hash or declared."""
    shared = shared_contexts(scored)
    if shared and split == "hash" and scored.split_by == "first_turn":
        raise RuntimeError(
            f"{shared} contexts are in two splits although splits are by context: this is a defect of "
            "prepare, please report it"
        )
    return {
        "split_by": scored.split_by,
        "split_why": scored.split_why,
        "no_reply": sum(count["no_reply"] for count in scored.counts.values()),
        "renamed_ids": sum(int((count > 1).sum()) for count in occurrences(scored).values()),
        "cut_replies": sum(shard.cut_replies for written in shards.values() for shard in written),
        "shared_contexts": shared,
        "largest_context": round(largest_context(scored), 4),
    }


def _cost_figures(seconds: float, scored: Scored, shards: Mapping[str, Sequence[Shard]]) -> dict[str, Any]:
    """Time and memory."""
    worker = max([scored.worker_kib, *(shard.worker_kib for found in shards.values() for shard in found)])
    return {
        "seconds": round(seconds, 2),
        "dialogs_per_second": round(sum(scored.dialogs.values()) / seconds, 1),
        "peak_memory_mib": {"driver": peak_kib() // 1024, "worker": worker // 1024},
    }
