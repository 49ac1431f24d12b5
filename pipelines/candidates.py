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

import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from pipelines import prepare
from rl_dialog.cluster import candidate_folder as folder
from rl_dialog.cluster.candidates import Drawing, Keys, Scoring, generate_and_score, is_current, write_dialogs
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.train import wants_gpus
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import MANIFEST, load_manifest
from rl_dialog.errors import UserError
from rl_dialog.evaluation.draws import check_draws
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.models.checkpoint import resolve
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.fitted import load_reward_model
from rl_dialog.rewards.similarity import similarity
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, at_least, claim_output, progress, require, run


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
    """what a reply earns: token_f1, chrf, bleu, meteor, embedding, bert_score or bleurt
    (rl_dialog/rewards/README.md)"""
    similarity_path: str = ""
    """the WordNet folder, encoder or BLEURT checkpoint of the similarities that need one"""
    reward_model: str = ""
    """a model of `fit_reward`: what it says of a reply is the reward, of the human's reply too, and the
    similarity is reported beside it"""
    threshold: float | None = None
    """reward 1 above this similarity (or score of the reward model) and 0 otherwise; by default the
    similarity (or score) is the reward"""
    max_length: int = 1024
    """longest row in tokens of the data that is written, less where the policy has fewer positions; contexts
    are cut on the left"""
    shard_contexts: int = 256
    """contexts per shard: what a killed run may lose, and what shares batches"""
    batch_size: int = 128
    """replies generated together"""
    num_generators: int | None = None
    """actors that generate; by default one per CPU"""
    num_scorers: int | None = 1
    """actors that score"""
    seed: int = 0
    """another seed draws other replies"""
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
    drawing = drawing_of(config, policy)
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
    if not Path(config.checkpoint).is_dir():
        expected = "expected a checkpoint directory or run folder, found no such directory"
        raise UserError(f"--checkpoint {config.checkpoint}: {expected}")
    if not set(config.splits) <= set(SPLITS) or "train" not in config.splits:
        expected = (
            f"expected --splits among {', '.join(SPLITS)}, with train (candidates become training data)"
        )
        raise UserError(f"{expected}, got {' '.join(config.splits)}")
    if config.threshold is not None and not math.isfinite(config.threshold):
        raise UserError(f"expected a finite --threshold, got {config.threshold}")
    at_least(
        config, contexts=0, shard_contexts=1, batch_size=1, num_generators=1, num_scorers=1, max_length=8
    )
    check_draws(Decoding.of(config), count=config.num_candidates, tries=config.tries)
    similarity(scoring.similarity, path=scoring.path)
    if scoring.reward_model:
        load_reward_model(scoring.reward_model)
    load_manifest(config.data)
    folder.check_vocabulary(Path(resolve(config.checkpoint)))


def drawing_of(config: CandidatesConfig, policy: Path) -> Drawing:
    counts = config.num_candidates, config.tries, config.seed, config.batch_size
    return Drawing(str(policy), Decoding.of(config), *counts, config.device)


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
    with progress("candidates", total, "contexts", done=kept, quiet=config.quiet) as step:
        pools = {"generators": config.num_generators, "scorers": config.num_scorers}
        pools["use_gpu"] = wants_gpus(config.device, config.num_generators or 1)
        files = [shard["file"] for shard in shards]
        fresh = generate_and_score(work, files, drawing, keys, scoring=scoring, **pools, progress=step)
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
