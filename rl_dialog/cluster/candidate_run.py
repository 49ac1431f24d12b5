"""A run of `pipelines.candidates`: what it is told, what can be known to fail, and what it lacks is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_dialog.cluster.candidate_folder import check_vocabulary
from rl_dialog.cluster.candidates import Drawing, Keys, Scoring, generate_and_score
from rl_dialog.cluster.gpus import wants_gpus
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import load_manifest
from rl_dialog.errors import UserError
from rl_dialog.evaluation.draws import check_draws
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.models.checkpoint import resolve
from rl_dialog.rewards.fitted import load_reward_model
from rl_dialog.rewards.similarity import similarity


@dataclass(frozen=True)
class CandidateSettings(Decoding):
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
    """what a reply earns: token_f1, chrf, bleu, meteor, average, extrema, greedy, emotion, embedding,
    bert_score or bleurt (rl_dialog/rewards/README.md)"""
    similarity_path: str = ""
    """the WordNet folder, word vectors, classifier, encoder or BLEURT checkpoint of the similarities that
    read one"""
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


def check_candidates(config: CandidateSettings, scoring: Scoring) -> None:
    """What can be known to fail before anything is generated. Raises UserError."""
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
    check_draws(Decoding.of(config), count=config.num_candidates, tries=config.tries)
    similarity(scoring.similarity, path=scoring.path)
    if scoring.reward_model:
        load_reward_model(scoring.reward_model)
    load_manifest(config.data)
    check_vocabulary(Path(resolve(config.checkpoint)))


def drawing_of(config: CandidateSettings, policy: Path, *, device: str) -> Drawing:
    """How the replies of a checkpoint are drawn."""
    counts = config.num_candidates, config.tries, config.seed, config.batch_size
    return Drawing(str(policy), Decoding.of(config), *counts, device)


def make_missing(
    config: CandidateSettings,
    work: Path,
    files: Sequence[str],
    drawing: Drawing,
    keys: Keys,
    scoring: Scoring,
    *,
    step: Callable[[int], Any],
) -> int:
    """Makes the shards that are missing; returns how many contexts were answered."""
    pools = {"generators": config.num_generators, "scorers": config.num_scorers}
    pools["use_gpu"] = wants_gpus(drawing.device, config.num_generators or 1)
    return generate_and_score(work, list(files), drawing, keys, scoring=scoring, **pools, progress=step)
