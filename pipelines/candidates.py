"""Contexts x a policy to N scored replies per context, and the training data made of them.

    python -m pipelines.candidates --data data/chats --checkpoint runs/bc --output_dir data/candidates \\
        --num_candidates 5 --threshold 0.6
    python -m pipelines.train --data data/candidates --output_dir runs/top \\
        --model_name_or_path runs/bc --method tf_top --method.threshold 1

After Sodhi et al. 2023 (arXiv 2307.12425): a base policy answers every logged context, an answer earns its
similarity to the human's reply, and the human's reply stands among them as candidate 0. A context is
everything before a reply that is trained on.

    train-00000.parquet ...             a data directory: a Dialog and a row per candidate, whose last message
    manifest.json tokenizer/            alone has a reward
    candidates/train-00000.parquet ...  context, candidate, text, finished, similarity (cluster/candidates.py)
    candidates/key.json                 what the texts and scores were made from

With `--resume` a run goes on with the shards it lacks. Another threshold uses texts and scores again, another
similarity the texts; another model, other data or other settings are refused unless `--overwrite` deletes
what is there.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from pipelines import prepare
from rl_dialog.cluster import candidate_folder as folder
from rl_dialog.cluster.candidate_run import CandidateSettings, check_candidates, drawing_of, make_missing
from rl_dialog.cluster.candidates import Drawing, Keys, Scoring, is_current, write_dialogs
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.gpus import check_device
from rl_dialog.data.shards import MANIFEST
from rl_dialog.models.checkpoint import resolve
from rl_dialog.rewards import REWARDS
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, at_least, claim_output, progress, require, run


@dataclass(frozen=True)
class CandidatesConfig(CandidateSettings, ResumableOutput, OnCluster, OnDevice):
    """Which contexts to answer, with which policy, and what an answer earns."""

    num_cpus: int | None = None
    """CPUs of a Ray that this run starts; by default all"""


def main(config: CandidatesConfig) -> dict[str, Any]:
    """Writes the candidates and the data directory; returns headline figures.

    Raises UserError or OSError for what the user can fix.
    """
    began = time.perf_counter()
    transformers_logging.disable_progress_bar()
    scoring = folder.scoring_from_anywhere(config.similarity, config.similarity_path, config.reward_model)
    _check(config, scoring)
    policy, data = Path(resolve(config.checkpoint)).absolute(), Path(config.data)
    drawing = drawing_of(config, policy, device=config.device)
    contexts = {name: getattr(config, name) for name in ("splits", "contexts", "shard_contexts")}
    ingredients = folder.ingredients_of(data, drawing, scoring, **contexts)
    keys, generator = folder.keys_of(ingredients), folder.generator_of(config.checkpoint, ingredients)
    if config.resume:
        folder.check_texts(Path(config.output_dir).absolute() / "candidates", ingredients)
    # what matters is an ingredient
    out = claim_output(config, "candidates", free=[one.name for one in fields(config)])
    work = out / "candidates"
    folder.begin(work, ingredients)
    plan = folder.plan_shards(work, keys.texts, data, policy, **contexts)
    files = [shard["file"] for shard in plan["shards"]]
    with connect(config.address or None, num_cpus=config.num_cpus):
        speed = _generate(config, work, plan["shards"], drawing, keys, scoring)
        write_dialogs(work, files, name=config.similarity, threshold=config.threshold, generator=generator)
        prepared = prepare.main(_prepare_config(config, work, policy))
    figures = folder.total_figures(work, files, config.num_candidates) | {"skipped": plan["skipped"]}
    about = {"data": config.data, "policy": config.checkpoint, "generator": generator, "keys": asdict(keys)}
    settings = {
        name: getattr(config, name) for name in ("similarity", "similarity_path", "reward_model", "threshold")
    }
    folder.publish(work / "prepared", out, about | {"ingredients": ingredients} | settings | figures)
    paths = {"output_dir": str(out), "manifest": str(out / MANIFEST), "candidates_folder": str(work)}
    rows = {name: prepared[name] for name in ("rows", "splits", "reward", "cut_replies")}
    return {**paths, **figures, **rows, **speed, "seconds": round(time.perf_counter() - began, 2)}


def _check(config: CandidatesConfig, scoring: Scoring) -> None:
    """What can be known to fail before anything is generated."""
    require(config, data="a directory that `prepare` wrote", checkpoint="a checkpoint or run folder")
    require(config, output_dir="a directory to write")
    sizes = {"shard_contexts": 1, "batch_size": 1, "num_generators": 1, "num_scorers": 1, "max_length": 8}
    at_least(config, contexts=0, seed=0, **sizes)
    check_device(config.device, config.address)
    check_candidates(config, scoring)


def _generate(
    config: CandidatesConfig,
    work: Path,
    shards: list[dict[str, Any]],
    drawing: Drawing,
    keys: Keys,
    scoring: Scoring,
) -> dict[str, Any]:
    """Makes the shards that are missing; returns how many contexts were answered, and how fast."""
    began = time.perf_counter()
    total = sum(shard["contexts"] for shard in shards)
    kept = sum(shard["contexts"] for shard in shards if is_current(work / shard["file"], keys.scores))
    files = [shard["file"] for shard in shards]
    with progress("candidates", total, "contexts", done=kept, quiet=config.quiet) as step:
        fresh = make_missing(config, work, files, drawing, keys, scoring, step=step)
    seconds = time.perf_counter() - began
    if not config.quiet:
        print(f"{total:,} contexts answered; writing training data")
    return {"generated_contexts": fresh, "contexts_per_s": round(fresh / seconds, 2) if fresh else None}


def _prepare_config(config: CandidatesConfig, work: Path, policy: Path) -> prepare.PrepareConfig:
    """How the Dialogs of all candidates become token rows: as they are, in their own splits, with the
    policy's tokenizer."""
    rewards = dict.fromkeys(REWARDS) | {"logged": 1.0}
    where = {"logs": (str(work / "dialogs"),), "output_dir": str(work / "prepared"), "tokenizer": str(policy)}
    max_length = folder.longest_row(policy, config.max_length)
    how = {"split": "declared", "strict": True, "quiet": True}
    return prepare.PrepareConfig(**where, rewards=rewards, max_length=max_length, **how)


if __name__ == "__main__":
    run(CandidatesConfig, main)
