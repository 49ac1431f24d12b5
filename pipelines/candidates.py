"""Contexts x a policy to N scored replies per context, and the training data made of them.

    python -m pipelines.candidates --data data/chats --checkpoint runs/bc --output_dir data/candidates --num_candidates 5 --threshold 0.6
    python -m pipelines.train --data data/candidates --output_dir runs/top --method tf_top --method.threshold 1 --model_name_or_path runs/bc

After Sodhi et al. 2023 (arXiv 2307.12425): a base policy answers every logged context, an answer earns its similarity to the human's reply, and the
human's reply stands among them as candidate 0. A context is everything before a reply that is trained on.

    train-00000.parquet ... manifest.json tokenizer/     a data directory: a Dialog and a row per candidate, whose last message alone has a reward
    candidates/train-00000.parquet ...                   context, candidate, text, finished, similarity (see cluster/candidates.py)
    candidates/key.json                                  what the texts and scores were made from

With `--resume` a run goes on with the shards it lacks. Another threshold uses texts and scores again, another similarity the texts;
another model, other data or other settings are refused unless `--overwrite` deletes what is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from pipelines.prepare import PrepareConfig
from pipelines.prepare import main as prepare
from rl_dialog.cluster.candidates import (
    Drawing,
    Keys,
    Scoring,
    describe_drawing,
    figures_of,
    generate_and_score,
    is_current,
    write_contexts,
    write_dialogs,
)
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.train import wants_gpus
from rl_dialog.config import save_config
from rl_dialog.data.files import write_json
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import MANIFEST, load_manifest
from rl_dialog.data.tokenize import TemplateError, encode_prompt, load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.text_reward import TextReward
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.similarity import similarity
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, run

VERSION = 1  # of the texts kept in candidates/: another one is not used again
SCORED = 2  # the same of their scores
KEY = "key.json"
NOT_THE_MODEL = ("README.md", "metrics.json")  # files of a checkpoint that change no text


@dataclass(frozen=True)
class CandidatesConfig(Decoding, ResumableOutput, OnCluster, OnDevice):
    """Which contexts to answer, with which policy, and what an answer earns."""

    max_prompt_length: int = 96
    """longest prompt in tokens; older messages are left out first (the system prompt stays)"""
    data: str = ""
    """a directory that `prepare` wrote"""
    checkpoint: str = ""
    """a checkpoint, or a run folder (its best one)"""
    splits: tuple[str, ...] = SPLITS
    """splits of the data whose contexts are answered; each candidate stays in its context's split"""
    contexts: int = 0
    """most contexts per split, taken at even distances; 0 takes all"""
    num_candidates: int = 5
    """replies of the policy per context; fewer where it repeats itself or the human"""
    tries: int = 2
    """when sampling: rounds of draws, each for what duplicates left missing"""
    similarity: str = "token_f1"
    """what a reply earns: token_f1, chrf, bleu, meteor, embedding, bert_score or bleurt (rl_dialog/rewards/README.md)"""
    similarity_path: str = ""
    """the WordNet folder, encoder or BLEURT checkpoint of the similarities that need one"""
    reward_model: str = ""
    """a model of `fit_reward`: what it says of a reply is the reward, of the human's reply too, and the similarity is reported beside it"""
    threshold: float | None = None
    """reward 1 above this similarity (or score of the reward model) and 0 otherwise; by default the similarity (or score) is the reward"""
    max_length: int = 1024
    """longest row in tokens of the data that is written, less where the policy has fewer positions; contexts are cut on the left"""
    shard_contexts: int = 256
    """contexts per shard: what a killed run may lose, and what shares batches"""
    batch_size: int = 128
    """replies generated together"""
    num_generators: int | None = None
    """actors that generate; by default one per CPU"""
    num_scorers: int | None = 1
    """actors that score"""
    seed: int = 0
    """sampling"""
    num_cpus: int | None = None
    """CPUs of a Ray that this run starts; by default all"""


def main(config: CandidatesConfig) -> dict[str, Any]:
    """Writes the candidates and the data directory; returns headline figures. Raises UserError or OSError for what the user can fix."""
    began = time.perf_counter()
    transformers_logging.disable_progress_bar()
    _check(config)
    out, policy = Path(config.output_dir).absolute(), Path(resolve(config.checkpoint)).absolute()
    drawing = _drawing(config, policy)
    ingredients = _ingredients(config, drawing)
    keys = Keys(_digest(ingredients["texts"]), _digest(ingredients))
    work = _claim(out, ingredients, config)
    plan = _plan(config, keys.texts, work)
    files = [shard["file"] for shard in plan["shards"]]
    total = sum(shard["contexts"] for shard in plan["shards"])
    kept = sum(shard["contexts"] for shard in plan["shards"] if is_current(work / shard["file"], keys.scores))
    with connect(config.address or None, num_cpus=config.num_cpus):
        started = time.perf_counter()
        with _progress(total, kept, config.quiet) as progress:
            pools = {
                "generators": config.num_generators,
                "scorers": config.num_scorers,
                "use_gpu": wants_gpus(config.device, config.num_generators or 1),
            }
            scoring = Scoring(config.similarity, _similarity_path(config), _reward_model(config))
            fresh = generate_and_score(work, files, drawing, keys, scoring=scoring, **pools, progress=progress)
        seconds = time.perf_counter() - started
        if not config.quiet:
            print(f"{total:,} contexts answered; writing training data")
        generator = f"{Path(config.checkpoint).name}:{_digest(ingredients['texts']['model'])[:12]}"
        write_dialogs(work, files, name=config.similarity, threshold=config.threshold, generator=generator)
        prepared = prepare(_prepare_config(config, work, policy))
    figures = _figures(work, files, config.num_candidates) | {"skipped": plan["skipped"]}
    about = {"data": config.data, "policy": config.checkpoint, "generator": generator, "keys": asdict(keys), "ingredients": ingredients}
    settings = {name: getattr(config, name) for name in ("similarity", "similarity_path", "reward_model", "threshold")}
    _publish(work / "prepared", out, about | settings | figures)
    save_config(config, out / "candidates.yaml")
    speed = {"generated_contexts": fresh, "contexts_per_s": round(fresh / seconds, 2) if fresh else None}
    paths = {"output_dir": str(out), "manifest": str(out / MANIFEST), "candidates_folder": str(work)}
    rows = {"rows": prepared["rows"], "splits": prepared["splits"], "reward": prepared["reward"], "cut_replies": prepared["cut_replies"]}
    return {**paths, **figures, **rows, **speed, "seconds": round(time.perf_counter() - began, 2)}


def _check(config: CandidatesConfig) -> None:
    """What can be known to fail before anything is generated."""
    from rl_dialog.evaluation.draws import check_draws

    for name, what in (("data", "a directory that `prepare` wrote"), ("checkpoint", "a checkpoint or run folder"), ("out", "a directory to write")):
        if not getattr(config, name):
            raise UserError(f"expected --{name}: {what}")
    if not Path(config.checkpoint).is_dir():
        raise UserError(f"--checkpoint {config.checkpoint}: expected a checkpoint directory or run folder, found no such directory")
    if not set(config.splits) <= set(SPLITS) or "train" not in config.splits:
        raise UserError(f"expected --splits among {', '.join(SPLITS)}, with train (candidates become training data), got {' '.join(config.splits)}")
    if config.threshold is not None and not math.isfinite(config.threshold):
        raise UserError(f"expected a finite --threshold, got {config.threshold}")
    for name, least in (("contexts", 0), ("shard_contexts", 1), ("batch_size", 1), ("num_generators", 1), ("num_scorers", 1), ("max_length", 8)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"expected --{name} of at least {least}, got {value}")
    check_draws(Decoding.of(config), count=config.num_candidates, tries=config.tries)
    similarity(config.similarity, path=_similarity_path(config))
    if config.reward_model:
        TextReward.from_pretrained(_reward_model(config))
    load_manifest(config.data)
    _check_vocabulary(Path(resolve(config.checkpoint)))


def _check_vocabulary(policy: Path) -> None:
    """A tokenizer may have got tokens (a chat template's) that the model has never seen."""
    known, needed = getattr(AutoConfig.from_pretrained(policy), "vocab_size", None), len(load_tokenizer(policy))
    if known is not None and needed > known:
        raise UserError(f"{policy}: expected a dialog policy, got a model of {known} tokens whose chat format needs {needed}: train it with bc first")


def _drawing(config: CandidatesConfig, policy: Path) -> Drawing:
    counts = config.num_candidates, config.tries, config.seed, config.batch_size
    return Drawing(str(policy), Decoding.of(config), *counts, config.device)


def _ingredients(config: CandidatesConfig, drawing: Drawing) -> dict[str, Any]:
    """What the texts depend on, and what the scores depend on beside them."""
    splits = load_manifest(config.data)["splits"]
    shards = [shard["file"] for split in config.splits for shard in splits[split]["shards"]]
    settings = describe_drawing(drawing) | {name: getattr(config, name) for name in ("splits", "contexts", "shard_contexts")}
    texts = {"version": VERSION, "model": _fingerprints(Path(drawing.policy)), "data": {s: _sha256(Path(config.data) / s) for s in shards}}
    path = _similarity_path(config)
    read = _fingerprints(Path(path)) if Path(path).is_dir() and path else path
    scores = {"version": SCORED, "similarity": config.similarity, "path": read}
    if config.reward_model:
        model = Path(config.reward_model)
        scores["reward_model"] = _fingerprints(model) if model.is_dir() else config.reward_model
    found = {"texts": texts | {"settings": settings}, "scores": scores}
    return json.loads(json.dumps(found))  # as it is read back


def _similarity_path(config: CandidatesConfig) -> str:
    """Absolute where it is a folder, because workers do not share the driver's working directory; a run folder stands for its best checkpoint."""
    path = Path(config.similarity_path)
    if not config.similarity_path or not path.is_dir():
        return config.similarity_path
    is_run = (path / "best").is_file() or (path / "latest").is_file()
    return str(Path(resolve(path) if is_run else path).absolute())


def _reward_model(config: CandidatesConfig) -> str:
    """Absolute where it is a folder, because workers do not share the driver's working directory."""
    return str(Path(config.reward_model).absolute()) if config.reward_model and Path(config.reward_model).is_dir() else config.reward_model


def _fingerprints(directory: Path) -> dict[str, str]:
    """The hash of every file of a checkpoint that a text may depend on: weights, configs, tokenizer, template, method."""
    return {path.name: _sha256(path) for path in sorted(directory.iterdir()) if path.is_file() and path.name not in NOT_THE_MODEL}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _claim(out: Path, ingredients: dict[str, Any], config: CandidatesConfig) -> Path:
    """The folder of the kept shards. Raises UserError when `out` holds something else, or texts of another model, data or settings."""
    work = out / "candidates"
    stored = json.loads((work / KEY).read_text(encoding="utf-8")) if (work / KEY).is_file() else None
    if stored is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and holds no candidates, so it is left alone: choose another --output_dir")
    if stored and config.overwrite:
        shutil.rmtree(out)
    elif stored and not config.resume:
        raise UserError(f"{out} already holds candidates: pass --resume to go on with them or --overwrite to delete them")
    elif stored and stored["texts"] != ingredients["texts"]:
        changed = ", ".join(_differences(stored["texts"], ingredients["texts"]))
        raise UserError(f"{out} holds candidates of another {changed}: choose another --output_dir, or delete them with --overwrite")
    work.mkdir(parents=True, exist_ok=True)
    for part in work.rglob("*.part"):  # of a run that was killed
        part.unlink()
    write_json(work / KEY, ingredients)
    return work


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in ("version", "model", "data"):
        if old.get(name) != new[name]:
            yield name
    before = old.get("settings", {})
    yield from (f"{name} ({before.get(name)} then, {value} now)" for name, value in new["settings"].items() if before.get(name) != value)


def _plan(config: CandidatesConfig, key: str, work: Path) -> dict[str, Any]:
    """The shards of contexts, written unless a run with the same key did so already."""
    path = work / "plan.json"
    plan = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if plan.get("key") == key:
        return plan
    manifest, openings = load_manifest(config.data), _renders_openings(Path(resolve(config.checkpoint)))
    plan = {"key": key, "shards": [], "skipped": {}}
    for split in config.splits:
        total = manifest["splits"][split]["replies"]
        settings = {"limit": config.contexts, "total": total, "size": config.shard_contexts, "openings": openings}
        shards, skipped = write_contexts(Path(config.data), split, work / "contexts", **settings)
        plan["shards"] += shards
        plan["skipped"] = {name: plan["skipped"].get(name, 0) + count for name, count in skipped.items()}
    if not any(shard["file"].startswith("train-") for shard in plan["shards"]):
        raise UserError(f"{config.data}: expected contexts to answer in the train split, found none (left out: {plan['skipped']})")
    write_json(path, plan)
    return plan


def _renders_openings(policy: Path) -> bool:
    """Can the chat template ask for the first message of a conversation?"""
    try:
        return bool(encode_prompt([], load_tokenizer(policy), max_length=8))
    except TemplateError:
        return False


def _prepare_config(config: CandidatesConfig, work: Path, policy: Path) -> PrepareConfig:
    """How the Dialogs of all candidates become token rows: as they are, in their own splits, with the policy's tokenizer."""
    shutil.rmtree(work / "prepared", ignore_errors=True)  # left by a run that was killed
    rewards = dict.fromkeys(REWARDS) | {"logged": 1.0}
    where = {"logs": (str(work / "dialogs"),), "output_dir": str(work / "prepared"), "tokenizer": str(policy)}
    positions = getattr(AutoConfig.from_pretrained(policy), "max_position_embeddings", None) or config.max_length + 1
    max_length = min(config.max_length, positions - 1)  # dt puts a token before the reply; before those of a long context too: then --max_length
    return PrepareConfig(**where, rewards=rewards, split="declared", max_length=max_length, strict=True, quiet=True)


def _publish(prepared: Path, out: Path, about: dict[str, Any]) -> None:
    """Moves the prepared data into `out`; the manifest goes first and comes last, so that nobody ever reads half of it."""
    manifest = load_manifest(prepared)
    for source in manifest["sources"].values():
        source["files"] = []  # the Dialogs that were prepared, which are not kept
    if (out / MANIFEST).is_file():
        old = load_manifest(out)
        (out / MANIFEST).unlink()
        for shard in (shard for split in old["splits"].values() for shard in split["shards"]):
            (out / shard["file"]).unlink(missing_ok=True)
    shutil.rmtree(out / "tokenizer", ignore_errors=True)
    for path in sorted(prepared.iterdir()):
        if path.name != MANIFEST:
            path.replace(out / path.name)
    write_json(out / MANIFEST, manifest | {"candidates": about})
    shutil.rmtree(prepared)
    shutil.rmtree(prepared.with_name("dialogs"))


def _figures(work: Path, files: Sequence[str], count: int) -> dict[str, Any]:
    """Totals over the shards."""
    shards = [figures_of(work / file) for file in files]
    totals = {name: sum(shard[name] for shard in shards) for name in ("contexts", "candidates", "duplicates", "empty", "unfinished")}
    similarity = sum(shard["similarity"] for shard in shards) / totals["candidates"] if totals["candidates"] else None
    missing = totals["contexts"] * count - totals["candidates"]
    found = {**totals, "missing": missing, "mean_similarity": None if similarity is None else round(similarity, 4)}
    learned = [shard["learned"] for shard in shards if shard["learned"] is not None]
    return found | ({"mean_learned": round(sum(learned) / totals["candidates"], 4)} if learned and totals["candidates"] else {})


@contextmanager
def _progress(total: int, done: int, quiet: bool) -> Iterator[Any]:
    with tqdm(
        desc="candidates", total=total, initial=done, unit=" contexts", disable=True if quiet else None
    ) as bar:  # None: silent unless a terminal
        yield bar.update


if __name__ == "__main__":
    run(CandidatesConfig, main)
