"""Logs of any known format to a data directory: scored, split and tokenised Parquet shards with a manifest.

    python -m pipelines.prepare --logs chats/ --output_dir data/chats --rewards.vote 1 --rewards.sentiment 0.5
    python -m pipelines.prepare --logs sqlite:///chats.db --output_dir data/served --rewards.vote 1

`rl_dialog/data/shards.py` describes what it writes and reads it back; `rl_dialog/rewards/README.md` defines
the rewards.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.data_directory import fill_directory, write_pairs
from rl_dialog.cluster.preparation import Preparation, check_logs, passes, recipe, weights_of
from rl_dialog.cluster.scoring import WORK
from rl_dialog.config import save_config, to_dict
from rl_dialog.data.building import building
from rl_dialog.data.database import database_url, shown_url
from rl_dialog.data.manifest_report import headline, show_manifest
from rl_dialog.data.readers import find_logs
from rl_dialog.data.shards import FORMAT, MANIFEST, VERSION
from rl_dialog.data.tokenize import LEAST_VOCABULARY, require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.rewards import REWARDS, choosing
from rl_dialog.rewards.teachers import describe, make_teachers
from rl_dialog.run import OnCluster, Output, at_least, progress, require, run


@dataclass(frozen=True)
class PrepareConfig(Preparation, Output, OnCluster):
    """What to read, how to score, split and tokenise it, and where to write it."""

    report: bool = False
    """Also write report/ into the output folder: distributions, correlations, examples at both ends, human
    labels, and the hacks that each reward falls for."""
    pairs: bool = False
    """Also write pairs/<split>.jsonl into the output folder: replies to the same messages of which one earned
    more, as TRL's prompt, chosen and rejected."""
    pairs_by: Literal["auto", "reply", "to_go"] = "auto"
    """What makes a reply the better one: its own reward, or the sum of the known rewards from it to the end
    of its dialog; auto: to_go, unless most replies are unrated."""
    num_cpus: int | None = None
    """CPUs of a Ray that this run starts; by default all."""
    num_workers: int | None = None
    """Most actors per stage; by default one per CPU."""


def main(config: PrepareConfig) -> dict[str, Any]:
    """Writes the data directory; returns its headline figures.

    Raises UserError or OSError for what the user can fix.
    """
    began = time.perf_counter()
    _check(config)
    out = Path(config.output_dir).absolute()
    places = [path if "://" in path else str(Path(path).absolute()) for path in config.logs]
    logs, bad, skipped = find_logs(places, reader=config.reader)
    shown = tuple(shown_url(database_url(path)) if "://" in path else path for path in config.logs)
    config = replace(config, logs=shown)  # no password goes further
    check_logs(config, logs, bad, skipped, out, overwrite=config.overwrite)
    weights = weights_of(config)
    if weights is None and not config.quiet:
        print("no --rewards given: a reply's reward is the one its log has (logged 1)")
    weights = weights or {"logged": 1.0}
    rewards = choosing.load_rewards(weights, **config.models)
    teachers = describe(make_teachers(config.teachers))  # or told now, and not in a worker, why not
    shown_progress = partial(progress, unit="dialogs", quiet=config.quiet)
    how = {**passes(config, weights), "concurrency": config.num_workers, "progress": shown_progress}
    with building(out, overwrite=config.overwrite, recipe=recipe(config, logs, weights)) as directory:
        with connect(config.address or None, num_cpus=config.num_cpus):
            figures = fill_directory(directory, logs, bad, **how, began=began)
        manifest = {"format": FORMAT, "version": VERSION, "settings": to_dict(config), **figures}
        manifest["teachers"] = teachers
        manifest["skipped"] = [asdict(skip) for skip in skipped]
        save_config(config, directory / "prepare.yaml")
        (directory / MANIFEST).write_text(
            json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        if config.pairs:
            write_pairs(directory, config.pairs_by)
        if config.report:
            from rl_dialog.evaluation.reward_report import write_reward_report

            write_reward_report(directory, rewards)
        shutil.rmtree(directory / WORK)
    if not config.quiet:
        show_manifest(manifest, skipped, out)
    return headline(manifest, out)


def _check(config: PrepareConfig) -> None:
    require(config, logs="files, folders or stores with logs", output_dir="a directory to write")
    if config.split not in ("hash", "declared"):
        raise UserError(f"expected --split hash or declared, got {config.split!r}")
    if not (config.validation >= 0 and config.test >= 0 and config.validation + config.test < 1):
        shares = f"validation={config.validation} and test={config.test}"
        raise UserError(f"expected shares >= 0 with validation + test < 1, got {shares}")
    at_least(
        config, record_seconds=0, shard_rows=1, max_length=8, max_line_bytes=1, vocab_size=LEAST_VOCABULARY
    )
    at_least(config, num_cpus=1, num_workers=1)
    if config.tokenizer:
        require_hub_name_or_directory(config.tokenizer)
    if config.normalise and config.normalisers:
        raise UserError(
            "expected --normalise to fit normalisers or --normalisers to use fitted ones, got both"
        )


if __name__ == "__main__":
    run(PrepareConfig, main, listed={"rewards": REWARDS})
