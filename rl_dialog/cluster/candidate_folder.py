"""A folder of candidates: what they were made from, which shards there are, how it becomes a data directory.

candidates/key.json    what the texts and scores were made from: only a run with the same goes on with them
candidates/plan.json   the shards of contexts
candidates/prepared/   the data directory in the making
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_dialog.cluster.candidates import Drawing, Keys, Scoring, describe_drawing, figures_of, write_contexts
from rl_dialog.data.files import write_json
from rl_dialog.data.shards import MANIFEST, load_manifest
from rl_dialog.data.tokenize import TemplateError, encode_prompt, load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.models.causal_lm import base_of_adapter, config_of
from rl_dialog.models.checkpoint import resolve

VERSION = 1  # of the texts kept in candidates/: another one is not used again
SCORED = 2  # the same of their scores
KEY, PLAN = "key.json", "plan.json"
NOT_THE_MODEL = ("README.md", "metrics.json")  # files of a checkpoint that change no text
COUNTED = ("contexts", "candidates", "duplicates", "empty", "unfinished")


def scoring_from_anywhere(similarity: str, path: str, reward_model: str) -> Scoring:
    """With absolute paths: workers do not share the driver's working directory.

    A run folder stands for its best checkpoint.
    """
    if path and Path(path).exists():
        is_run = (Path(path) / "best").is_file() or (Path(path) / "latest").is_file()
        path = str(Path(resolve(path) if is_run else path).absolute())
    if reward_model and Path(reward_model).is_dir():
        reward_model = str(Path(reward_model).absolute())
    return Scoring(similarity, path, reward_model)


def check_vocabulary(policy: Path) -> None:
    """A tokenizer may have got tokens (a chat template's) that the model has never seen."""
    size = getattr(config_of(policy), "vocab_size", None)
    needed = len(load_tokenizer(policy))
    if size is not None and needed > size:
        got = f"a model of {size} tokens whose chat format needs {needed}"
        raise UserError(f"{policy}: expected a dialog policy, got {got}: train it with bc first")


def longest_row(policy: Path, max_length: int) -> int:
    """In tokens: `max_length`, or what the policy has positions for. dt puts a token before the reply, and
    before those of a long context too."""
    positions = getattr(config_of(policy), "max_position_embeddings", None) or max_length + 1
    return min(max_length, positions - 1)


def ingredients_of(
    data: Path,
    drawing: Drawing,
    scoring: Scoring,
    *,
    splits: Sequence[str],
    contexts: int,
    shard_contexts: int,
) -> dict[str, Any]:
    """What the texts depend on, and what the scores depend on beside them."""
    made = load_manifest(data)["splits"]
    shards = [shard["file"] for split in splits for shard in made[split]["shards"]]
    settings = describe_drawing(drawing) | {
        "splits": splits,
        "contexts": contexts,
        "shard_contexts": shard_contexts,
    }
    texts = {
        "version": VERSION,
        "model": _fingerprints(Path(drawing.policy)),
        "data": {s: _sha256(data / s) for s in shards},
    }
    scores = {"version": SCORED, "similarity": scoring.similarity, "path": _read_from(scoring.path)}
    if scoring.reward_model:
        scores["reward_model"] = _read_from(scoring.reward_model)
    # as it is read back
    return json.loads(json.dumps({"texts": texts | {"settings": settings}, "scores": scores}))


def keys_of(ingredients: dict[str, Any]) -> Keys:
    """The hashes that shards carry."""
    return Keys(_digest(ingredients["texts"]), _digest(ingredients))


def generator_of(checkpoint: str, ingredients: dict[str, Any]) -> str:
    """The policy as each of its candidates names it."""
    return f"{Path(checkpoint).name}:{_digest(ingredients['texts']['model'])[:12]}"


def _read_from(path: str) -> Any:
    """What a folder or a file holds; a hub's name as it is."""
    if path and Path(path).is_file():
        return _sha256(Path(path))
    return _fingerprints(Path(path)) if path and Path(path).is_dir() else path


def _fingerprints(directory: Path) -> dict[str, str]:
    """The hash of every file of a checkpoint that a text may depend on: weights, configs, tokenizer,
    template, method."""
    files = (
        path for path in sorted(directory.iterdir()) if path.is_file() and path.name not in NOT_THE_MODEL
    )
    found = {path.name: _sha256(path) for path in files}
    base = base_of_adapter(directory)
    return found if base is None else found | {"base": _read_from(base)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_texts(work: Path, ingredients: dict[str, Any]) -> None:
    """Raises UserError when `work` holds texts of another model, other data or other settings."""
    if not (work / KEY).is_file():
        return
    kept = json.loads((work / KEY).read_text(encoding="utf-8"))["texts"]
    if kept != ingredients["texts"]:
        changed = ", ".join(_differences(kept, ingredients["texts"]))
        raise UserError(
            f"{work.parent} holds candidates of another {changed}: choose another --output_dir, or delete "
            "them with --overwrite"
        )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in ("version", "model", "data"):
        if old.get(name) != new[name]:
            yield name
    before = old.get("settings", {})
    for name, value in new["settings"].items():
        if before.get(name) != value:
            yield f"{name} ({before.get(name)} then, {value} now)"


def begin(work: Path, ingredients: dict[str, Any]) -> None:
    """Notes what is made here, and removes what a killed run left half written."""
    work.mkdir(parents=True, exist_ok=True)
    for part in work.rglob("*.part"):
        part.unlink()
    shutil.rmtree(work / "prepared", ignore_errors=True)
    write_json(work / KEY, ingredients)


def plan_shards(
    work: Path,
    key: str,
    data: Path,
    policy: Path,
    *,
    splits: Sequence[str],
    contexts: int,
    shard_contexts: int,
) -> dict[str, Any]:
    """The shards of contexts, written unless a run with the same key did so already."""
    path = work / PLAN
    plan = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if plan.get("key") == key:
        return plan
    manifest, openings = load_manifest(data), _renders_openings(policy)
    plan = {"key": key, "shards": [], "skipped": {}}
    for split in splits:
        total = manifest["splits"][split]["replies"]
        settings = {"limit": contexts, "total": total, "size": shard_contexts, "openings": openings}
        shards, skipped = write_contexts(data, split, work / "contexts", **settings)
        plan["shards"] += shards
        plan["skipped"] = {name: plan["skipped"].get(name, 0) + count for name, count in skipped.items()}
    if not any(shard["file"].startswith("train-") for shard in plan["shards"]):
        left_out = plan["skipped"]
        raise UserError(
            f"{data}: expected contexts to answer in the train split, found none (left out: {left_out})"
        )
    write_json(path, plan)
    return plan


def _renders_openings(policy: Path) -> bool:
    """Can the chat template ask for the first message of a conversation?"""
    try:
        return bool(encode_prompt([], load_tokenizer(policy), max_length=8))
    except TemplateError:
        return False


def total_figures(work: Path, files: Sequence[str], count: int) -> dict[str, Any]:
    """Over the shards, with `count` candidates asked for per context."""
    shards = [figures_of(work / file) for file in files]
    totals: dict[str, Any] = {name: sum(shard[name] for shard in shards) for name in COUNTED}
    candidates = totals["candidates"]
    totals["missing"] = totals["contexts"] * count - candidates
    mean = sum(shard["similarity"] for shard in shards) / candidates if candidates else None
    totals["mean_similarity"] = None if mean is None else round(mean, 4)
    learned = [shard["learned"] for shard in shards if shard["learned"] is not None]
    return totals | ({"mean_learned": round(sum(learned) / candidates, 4)} if learned and candidates else {})


def publish(prepared: Path, out: Path, about: dict[str, Any]) -> None:
    """Moves the prepared data into `out`; the manifest goes first and comes last, so that nobody ever reads
    half of it."""
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
