"""Logs of any known format to a data directory: scored, split and tokenised Parquet shards with a manifest.

    python -m pipelines.prepare --logs chats/ --output_dir data/chats --rewards.vote 1 --rewards.sentiment 0.5
    python -m pipelines.prepare --logs sqlite:///chats.db --output_dir data/served --rewards.vote 1

`rl_dialog/data/shards.py` describes what it writes and reads it back; `rl_dialog/rewards/README.md` defines the rewards.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import psutil
import pyarrow.parquet as pq
import tyro
from tqdm import tqdm

from pipelines.prepare_rewards import fit, given_normalisers, kinds_of, label_weights_of, reward_figures, reward_tables, scorer_names, weights_of
from rl_dialog.cluster.data import connect, peak_kib
from rl_dialog.cluster.scored import Scored
from rl_dialog.cluster.scoring import WORK, Scoring, fingerprint, score_logs
from rl_dialog.cluster.shards import Shard, largest_context, occurrences, shared_contexts, write_shards
from rl_dialog.config import save_config, to_dict
from rl_dialog.data.database import database_url, shown_url
from rl_dialog.data.pairs import mine_pairs
from rl_dialog.data.readers import Bad, LogFile, Skipped, find_logs
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import FORMAT, MANIFEST, VERSION, load_manifest, read_dialogs
from rl_dialog.data.tokenize import LEAST_VOCABULARY
from rl_dialog.errors import UserError
from rl_dialog.rewards import REWARDS, choose_rewards
from rl_dialog.rewards.scorers import make_scorers
from rl_dialog.run import OnCluster, Output, run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RECIPE = "recipe.json"  # in a data directory in the making
LARGE_CONTEXT = 0.05  # share of dialogs with the same split key from which the sizes of the splits become a matter of luck
TRAINED_ON = 20_000_000  # characters: a tokenizer is trained on at most about this much of the train split, evenly taken from all of it


@dataclass(frozen=True)
class PrepareConfig(Output, OnCluster):
    logs: tuple[str, ...] = ()
    """Files and folders with logs of any known format (plain, gzipped or zipped), and stores of served chats: sqlite:///chats.db, or
    postgresql://user:password@host/database, whose password is written nowhere."""
    reader: str | None = None
    """Read every file with this reader instead of deciding by its content."""
    rewards: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(REWARDS))
    """Weight of each reward in a reply's total, e.g. `--rewards.vote 1`; 0 computes and reports it without adding it; nan here: not computed.
    Without any: logged 1. `--rewards.MODULE:FUNCTION 1` is one of your own (rl_dialog/rewards/README.md)."""
    reward: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["-r"])] = ()
    """Another way to name rewards: `-r NAME ... -w WEIGHT ...`, for users of the 2019 code: its names (reward_user_ha) are understood."""
    weight: Annotated[tuple[float, ...], tyro.conf.arg(aliases=["-w"])] = ()
    """A weight for each of `reward`; without any, 1 each."""
    scorers: tuple[str, ...] = ()
    """Models behind rewards instead of the built-in ones: sentiment=PATH, toxicity=PATH (classifiers), encoder=PATH; a folder or a hub name each."""
    label_weights: tuple[str, ...] = ()
    """What each label of a classifier counts, e.g. joy=1 anger=-1 surprise=0, where its labels are not positive, negative, toxic or the like."""
    compat: Literal["", "2019", "2019-self-play"] = ""
    """2019: rewards as the 2019 code computed them, defects and normalisation over the whole file included; 2019-self-play: as its bots got them."""
    normalise: tuple[str, ...] = ()
    """zscore, min_max or rank for every reward, NAME=KIND for one; fitted on the training split, applied to all. By default rewards stay raw."""
    normalisers: str = ""
    """A data directory (or its manifest.json) whose fitted normalisers to use, for logs that come later; instead of --normalise."""
    report: bool = False
    """Also write OUT/report: distributions, correlations, examples at both ends, human labels, and the hacks that each reward falls for."""
    pairs: bool = False
    """Also write OUT/pairs/<split>.jsonl: replies to the same messages of which one earned more, as TRL's prompt, chosen and rejected."""
    rating: str | None = None
    """Which of a conversation's ratings the reward `rating` reads; by default the mean of all."""
    tokenizer: str | None = None
    """Hub name or folder; by default a byte-level BPE tokenizer is trained on the train split."""
    vocab_size: int = 4096
    """Size of a tokenizer that is trained, at least 262: then each character is a token, as text games want it."""
    max_length: int = 1024
    """Longest row in tokens; longer dialogs become several overlapping windows."""
    split: str = "hash"
    """hash: drawn, by what --split_by says. declared: the data's own splits, hash where it has none."""
    split_by: Literal["auto", "first_turn", "dialog"] = "auto"
    """What stays on one side. first_turn: all that begins with the same user turn. dialog: equal dialogs, for
    worlds where all begin alike. auto: first_turn, or dialog where that would leave a split empty."""
    validation: float = 0.05
    """Share of contexts held out for validation."""
    test: float = 0.05
    """Share of contexts held out for the final test."""
    seed: int = 0
    """Another seed draws another split."""
    strict: bool = False
    """Stop at the first record that cannot be read instead of putting it into quarantine.jsonl."""
    shard_rows: int = 5000
    """Dialogs per shard; one shard is tokenised by one worker."""
    max_line_bytes: int = 64 << 20
    """A line longer than this is quarantined."""
    record_seconds: float = 60.0
    """A record that takes longer to score or to tokenise is quarantined; 0: no limit."""
    num_cpus: int | None = None
    """CPUs of a Ray that this run starts; by default all."""
    num_workers: int | None = None
    """Most actors per stage; by default one per CPU."""


def main(config: PrepareConfig) -> dict[str, Any]:
    """Writes the data directory; returns its headline figures. Raises UserError or OSError for what the user can fix."""
    began = time.perf_counter()
    _check(config)
    out = Path(config.output_dir).absolute()
    logs, bad, skipped = find_logs([path if "://" in path else str(Path(path).absolute()) for path in config.logs], reader=config.reader)
    config = replace(config, logs=tuple(shown_url(database_url(path)) if "://" in path else path for path in config.logs))  # no password goes further
    _check_logs(config, logs, bad, out)
    weights = weights_of(config)
    kinds, given = kinds_of(config, weights), given_normalisers(config, weights)
    recipe = _recipe(config, logs, weights)
    with building(out, overwrite=config.overwrite, recipe=recipe) as directory, connect(config.address or None, num_cpus=config.num_cpus):
        work = directory / WORK
        with _progress("score", config.quiet) as progress:
            scored = score_logs(logs, _scoring(config, weights, kinds), work, concurrency=config.num_workers, progress=progress)
        _check_scored(scored, bad)
        normalisers = given or fit(kinds, weights, scored, everywhere=bool(config.compat))
        tokenizer = _tokenizer(config, scored, directory / "tokenizer")
        with _progress("tokenise", config.quiet, sum(scored.dialogs.values())) as progress:
            sizes = {"shard_rows": config.shard_rows, "max_length": config.max_length, "concurrency": config.num_workers}
            sizes |= {"record_seconds": config.record_seconds, "strict": config.strict}
            added = {"weights": weights, "normalisers": normalisers}
            shards = write_shards(scored, directory / "tokenizer", directory, **sizes, **added, progress=progress)
        late = [item for found in shards.values() for shard in found for item in shard.late]
        quarantined = _write_quarantine(bad, work / "quarantine", late, directory / "quarantine.jsonl")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "settings": to_dict(config),
            "sources": _sources(logs, bad, scored, late),
            "skipped": [asdict(skip) for skip in skipped],
            "splits": {split: _split_figures(found) for split, found in shards.items()},
            "rewards": reward_figures(scored, shards, weights, normalisers) | {"scorers": scorer_names(config, weights)},
            "tokenizer": _tokenizer_figures(config, directory / "tokenizer", len(tokenizer)),
            "quarantined": quarantined,
            "split_by": scored.split_by,
            "split_why": scored.split_why,
            **_counts(config, scored, shards),
            **_cost(began, scored, shards),
        }
        save_config(config, directory / "prepare.yaml")
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if config.pairs:
            _write_pairs(directory)
        if config.report:
            from rl_dialog.evaluation.reward_report import write_reward_report

            scorers = make_scorers(config.scorers, label_weights=label_weights_of(config))
            write_reward_report(directory, choose_rewards(weights, rating_name=config.rating, compat=config.compat, scorers=scorers))
        shutil.rmtree(work)
    if not config.quiet:
        _report(manifest, skipped, out)
    return _headline(manifest, out)


@contextmanager
def building(out: Path, *, overwrite: bool, recipe: str = "") -> Iterator[Path]:
    """A sibling of `out` that takes its place when the block ends well, so that a killed run never leaves half a data directory under the name.

    What a killed or interrupted run on this machine left is taken over if its `recipe` was the same, and removed otherwise; an error leaves nothing.
    Raises UserError when `out` holds something: with `overwrite` a data directory is replaced, and nothing else.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not overwrite:
            raise UserError(f"{out} exists and is not empty: choose another --output_dir, or replace the data directory there with --overwrite")
        try:
            load_manifest(out)
        except ValueError as error:
            if not (out / MANIFEST).is_file():
                raise UserError(
                    f"{out} exists and is no data directory, so --overwrite leaves it alone: choose another --output_dir ({error})"
                ) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    directory = _take_over(out, recipe)
    try:
        yield directory
    except Exception:
        shutil.rmtree(directory)
        raise
    (directory / RECIPE).unlink(missing_ok=True)
    if out.exists():
        old = directory.with_name(f"{directory.name}.old")
        out.rename(old)
        directory.rename(out)
        shutil.rmtree(old)
    else:
        directory.rename(out)


def _take_over(out: Path, recipe: str) -> Path:
    """The folder to build in: what a killed run by the same recipe left, else a new one. Leftovers by other recipes are removed."""
    mine = f"{out.name}.tmp-{platform.node()}-"
    directory = Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}-", dir=out.parent))
    directory.chmod(0o755)  # mkdtemp's 0700 would shut out other users and workers
    (directory / RECIPE).write_text(recipe, encoding="utf-8")
    taken = False
    for left in sorted(out.parent.glob(f"{glob.escape(mine)}*")):
        if psutil.pid_exists(int(left.name.removeprefix(mine).partition("-")[0])):
            continue
        noted = left / RECIPE
        if recipe and not taken and noted.is_file() and noted.read_text(encoding="utf-8") == recipe:
            shutil.rmtree(directory)
            left.rename(directory)
            taken = True
        else:
            shutil.rmtree(left)
    for part in directory.rglob("*.part"):  # half written
        part.unlink()
    return directory


def _recipe(config: PrepareConfig, logs: Sequence[LogFile], weights: dict[str, float]) -> str:
    """All that the finished parts of a run follow from, besides this program: only a run by the same one may go on with them."""
    free = ("overwrite", "num_cpus", "num_workers", "address", "quiet", "report", "pairs")
    settings = {name: value for name, value in to_dict(config).items() if name not in free}
    own = [importlib.util.find_spec(name.partition(":")[0]).origin for name in weights if name not in REWARDS]
    models = [entry.partition("=")[2] for entry in config.scorers] + [config.tokenizer, config.normalisers]
    stores = {log.path: log for log in logs if log.reader == "served"}  # reading one may tidy its file, which changes the file's time
    read = {path: _stamps(Path(path)) for path in [*(log.path for log in logs), *own, *filter(None, models)] if path not in stores}
    for log in stores.values():
        read |= fingerprint(log)
    return json.dumps({"version": VERSION, "settings": settings, "weights": weights, "files": read}, default=str)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of every file in a folder; nothing for the name of a hub."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]


def _check(config: PrepareConfig) -> None:
    if not config.logs:
        raise UserError("expected at least one file or folder with logs, got none: pass --logs PATH [PATH ...]")
    if not config.output_dir:
        raise UserError("expected a directory to write, got none: pass --output_dir DIR")
    if config.split not in ("hash", "declared"):
        raise UserError(f"expected --split hash or declared, got {config.split!r}")
    if not (config.validation >= 0 and config.test >= 0 and config.validation + config.test < 1):
        raise UserError(f"expected shares >= 0 with validation + test < 1, got validation={config.validation} and test={config.test}")
    if not config.record_seconds >= 0:
        raise UserError(f"expected --record_seconds of at least 0, got {config.record_seconds}")
    for name, least in (
        ("shard_rows", 1),
        ("max_length", 8),
        ("max_line_bytes", 1),
        ("vocab_size", LEAST_VOCABULARY),
        ("num_cpus", 1),
        ("num_workers", 1),
    ):
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"expected --{name} of at least {least}, got {value}")


def _check_logs(config: PrepareConfig, logs: Sequence[LogFile], bad: Sequence[Bad], out: Path) -> None:
    if config.strict and bad:
        raise UserError(f"{bad[0]} (a strict run stops at the first bad file)")
    if not logs:
        reason = f"; the first of {len(bad)} bad files is {bad[0]}" if bad else ""
        raise UserError(f"expected logs in {', '.join(config.logs)}, found none that can be read{reason}")
    inside = next((log.path for log in logs if Path(log.path).is_relative_to(out)), None)
    if inside and config.overwrite:
        raise UserError(f"{inside} is a log inside {out}, which --overwrite would replace: choose another --output_dir")


def _check_scored(scored: Scored, bad: Sequence[Bad]) -> None:
    total = sum(scored.dialogs.values())
    if not total:
        silent = sum(count["no_reply"] for count in scored.counts.values())
        quarantined = len(bad) + sum(count["quarantined"] for count in scored.counts.values())
        first = scored.first_bad or (str(bad[0]) if bad else "")
        reason = f"; the first quarantined one is {first}" if first else ""
        raise UserError(f"expected at least one dialog with an assistant reply, got {silent} without a reply and {quarantined} quarantined{reason}")
    if not scored.dialogs["train"]:
        fix = "lower --validation and --test, choose another --seed or --split_by dialog, or give more logs"
        raise UserError(f"no dialog of {total} fell into the train split: {fix}")


def _scoring(config: PrepareConfig, weights: dict[str, float], kinds: dict[str, str]) -> Scoring:
    return Scoring(
        weights=weights,
        compat=config.compat,
        scorers=config.scorers,
        label_weights=label_weights_of(config),
        ranked=tuple(name for name, kind in kinds.items() if kind == "rank"),
        rating=config.rating,
        split=config.split,
        split_by=config.split_by,
        validation=config.validation,
        test=config.test,
        seed=config.seed,
        strict=config.strict,
        max_line_bytes=config.max_line_bytes,
        record_seconds=config.record_seconds,
    )


def _tokenizer(config: PrepareConfig, scored: Scored, directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the run, saved in `directory`."""
    from rl_dialog.data.tokenize import load_tokenizer, train_tokenizer

    trained = config.tokenizer is None
    tokenizer = train_tokenizer(sample_texts(scored), vocab_size=config.vocab_size) if trained else load_tokenizer(config.tokenizer)
    tokenizer.save_pretrained(directory)
    return tokenizer


def sample_texts(scored: Scored, *, limit: int = TRAINED_ON) -> Iterator[str]:
    """The message texts of every n-th dialog of the train split, with n such that about `limit` characters come out."""
    step = math.ceil(scored.characters["train"] / limit)
    seen = 0
    for path, count in scored.chunks["train"]:
        messages = pq.read_table(path, columns=["messages"]).column("messages")
        for i in range(-seen % step, count, step):
            yield from (message["content"] for message in messages[i].as_py() if message["content"])
        seen += count


def _write_quarantine(bad: Sequence[Bad], parts: Path, late: Sequence[dict[str, Any]], path: Path) -> int:
    """All bad records, files first, in the order of reading; then those that took too long to tokenise. Returns how many."""
    count = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for item in bad:
            file.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")
            count += 1
        for part in sorted(parts.iterdir()):
            with open(part, encoding="utf-8", newline="\n") as lines:
                for line in lines:
                    file.write(line)
                    count += 1
        for item in late:
            file.write(json.dumps(item, ensure_ascii=False) + "\n")
    return count + len(late)


def _write_pairs(directory: Path) -> None:
    (directory / "pairs").mkdir(exist_ok=True)
    for split in SPLITS:
        with open(directory / "pairs" / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
            for pair in mine_pairs(partial(read_dialogs, directory, split)):
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")


def _sources(logs: Sequence[LogFile], bad: Sequence[Bad], scored: Scored, late: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
        for key in _COUNTS:
            source[key] += count.get(key, 0)
    for item in bad:
        sources.setdefault(item.source, _new_source())["quarantined"] += 1
    for item in late:
        source = sources.setdefault(item["source"], _new_source())
        source["quarantined"], source["dialogs"] = source["quarantined"] + 1, source["dialogs"] - 1
    return dict(sorted(sources.items()))


_COUNTS = ("dialogs", "replies", "turns", "no_reply", "quarantined")


def _new_source() -> dict[str, Any]:
    return {"files": [], **dict.fromkeys(_COUNTS, 0)}


def _split_figures(shards: Sequence[Shard]) -> dict[str, Any]:
    totals = {key: sum(getattr(shard, key) for shard in shards) for key in ("dialogs", "replies", "rows", "tokens")}
    return {**totals, "shards": [{"file": shard.file, "dialogs": shard.dialogs, "rows": shard.rows} for shard in shards]}


def _tokenizer_figures(config: PrepareConfig, directory: Path, vocab_size: int) -> dict[str, Any]:
    digest = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    return {"name": config.tokenizer or "trained", "vocab_size": vocab_size, "sha256": digest}


def _counts(config: PrepareConfig, scored: Scored, shards: dict[str, list[Shard]]) -> dict[str, float]:
    """What a user may wonder about afterwards."""
    shared = shared_contexts(scored)
    if shared and config.split == "hash" and scored.split_by == "first_turn":
        raise RuntimeError(f"{shared} contexts are in two splits although splits are by context: this is a defect of prepare, please report it")
    return {
        "no_reply": sum(count["no_reply"] for count in scored.counts.values()),
        "renamed_ids": sum(int((count > 1).sum()) for count in occurrences(scored).values()),
        "cut_replies": sum(shard.cut_replies for found in shards.values() for shard in found),
        "shared_contexts": shared,
        "largest_context": round(largest_context(scored), 4),
    }


def _cost(began: float, scored: Scored, shards: dict[str, list[Shard]]) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    worker = max([scored.worker_kib, *(shard.worker_kib for found in shards.values() for shard in found)])
    return {
        "seconds": round(seconds, 2),
        "dialogs_per_second": round(sum(scored.dialogs.values()) / seconds, 1),
        "peak_memory_mib": {"driver": peak_kib() // 1024, "worker": worker // 1024},
    }


def _headline(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    totals = {key: sum(split[key] for split in manifest["splits"].values()) for key in ("dialogs", "replies", "rows", "tokens")}
    reward = {key: manifest["rewards"]["sum"][key] for key in ("mean", "std", "coverage")}
    kept = (
        "split_by",
        "quarantined",
        "no_reply",
        "renamed_ids",
        "cut_replies",
        "shared_contexts",
        "seconds",
        "dialogs_per_second",
        "peak_memory_mib",
    )
    dialogs = {split: manifest["splits"][split]["dialogs"] for split in SPLITS}
    return {
        "output_dir": str(out),
        "manifest": str(out / MANIFEST),
        **totals,
        "splits": dialogs,
        "reward": reward,
        **{key: manifest[key] for key in kept},
    }


@contextmanager
def _progress(title: str, quiet: bool, total: int | None = None) -> Iterator[Any]:
    with tqdm(desc=title, total=total, unit=" dialogs", disable=True if quiet else None) as bar:  # None: silent unless stderr is a terminal
        yield bar.update


def _report(manifest: dict[str, Any], skipped: Sequence[Skipped], out: Path) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, soft_wrap=not sys.stdout.isatty())
    console.print(_source_table(manifest))
    for table in reward_tables(manifest["rewards"]):
        console.print(table)
    for note in _notes(manifest, skipped):
        console.print(note, markup=False, highlight=False)
    console.print(f"wrote {out} in {manifest['seconds']:.1f} s", markup=False, highlight=False)


def _source_table(manifest: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("source", "reader", title="Sources", title_justify="left")
    for name in ("files", *_COUNTS):
        table.add_column(name.replace("_", " "), justify="right")
    for name, source in manifest["sources"].items():
        readers = ", ".join(sorted({file["reader"] for file in source["files"]}))
        table.add_row(name or "(none)", readers, str(len(source["files"])), *(f"{source[key]:,}" for key in _COUNTS))
    splits = ", ".join(f"{split} {figures['dialogs']:,}" for split, figures in manifest["splits"].items())
    tokens = sum(figures["tokens"] for figures in manifest["splits"].values())
    table.caption = f"{splits} dialogs; {tokens:,} tokens"
    table.caption_justify = "left"
    return table


def _notes(manifest: dict[str, Any], skipped: Sequence[Skipped]) -> Iterator[str]:
    """What a user should not overlook."""
    if manifest["quarantined"]:
        yield f"{manifest['quarantined']:,} records could not be read: see quarantine.jsonl"
    if skipped:
        yield f"{len(skipped)} files skipped that are no dialogs of their own: see manifest.json"
    if manifest["renamed_ids"]:
        yield f"{manifest['renamed_ids']:,} dialogs had an id that was taken and got a number behind it"
    if manifest["cut_replies"]:
        yield f"{manifest['cut_replies']:,} replies longer than a row lost their tail: raise --max_length"
    yield from _split_notes(manifest)
    for name, row in manifest["rewards"]["components"].items():
        if not row["coverage"]:
            yield f"the reward {name} applies to no reply of these logs"
    yield from _unrated(manifest)
    if manifest["rewards"]["sum"]["std"] == 0:
        yield "every reply earns the same reward: enough for behaviour cloning, nothing for the other methods to learn from"


def _unrated(manifest: dict[str, Any]) -> Iterator[str]:
    """How many replies have no reward."""
    replies = sum(split["replies"] for split in manifest["splits"].values())
    missing = round(replies * (1 - manifest["rewards"]["sum"]["coverage"]))
    if missing == replies:
        yield "no reply has a reward: enough for behaviour cloning, nothing for other methods to learn from"
    elif missing:
        yield f"{missing:,} of {replies:,} replies have no reward: no component with a weight applies"


def _split_notes(manifest: dict[str, Any]) -> Iterator[str]:
    by_dialog, settings = manifest["split_by"] == "dialog", manifest["settings"]
    if manifest["split_why"]:
        yield f"split by dialog: {manifest['split_why']}; --split_by first_turn does that"
    if manifest["shared_contexts"]:
        what = "first user turns" if by_dialog else "contexts"
        splits = "splits" if settings["split"] == "hash" else "the declared splits"
        yield f"{manifest['shared_contexts']:,} {what} are in more than one of {splits}"
    if manifest["largest_context"] > LARGE_CONTEXT and not by_dialog:
        share = f"{manifest['largest_context']:.0%} of the dialogs begin with the same user turn"
        others = "--split_by dialog parts them, --split declared takes the data's own splits instead"
        yield f"{share} and are therefore in one split; {others}"
    for split in ("validation", "test"):
        if settings[split] and not manifest["splits"][split]["dialogs"]:
            yield f"no dialog fell into {split}: more logs, a larger --{split} or another --seed may fill it"


if __name__ == "__main__":
    run(PrepareConfig, main)
