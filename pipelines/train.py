"""Shards to checkpoint: any method, one worker or many.

python -m pipelines.train --data data/prepared --output_dir runs/bc
python -m pipelines.train --data data/prepared --output_dir runs/ilql --method ilql --model_name_or_path runs/bc --num_workers 2
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from transformers.utils import logging as transformers_logging

from rl_dialog.cluster.data import connect
from rl_dialog.cluster.train import WorkerGroup, device, fit, wants_gpus
from rl_dialog.data.files import write_json
from rl_dialog.data.shards import load_manifest, read_rows
from rl_dialog.data.tokenize import load_tokenizer, require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.methods import BC, METHODS, Method
from rl_dialog.models.checkpoint import freeze_prior, method_name, resolve, start_of
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import ModelConfig, Policy, load_lm
from rl_dialog.models.prior import proper_weights
from rl_dialog.run import OnCluster, OnDevice, ResumableOutput, claim_output, require, run
from rl_dialog.training.logger import check_tracker, following, write_note
from rl_dialog.training.loop import Trainer, TrainerConfig

CHOICES = {"method": METHODS}
CHANGEABLE = (  # by --resume: how long, how fast and with what it is watched, but not what is learned
    *("max_steps", "num_train_epochs", "eval_steps", "save_steps", "logging_steps", "save_total_limit", "env", "env_episodes"),
    *("data", "model", "num_workers", "cpus_per_worker", "device", "max_failures", "per_device_train_batch_size", "gradient_accumulation_steps"),
)
Report = Callable[[dict[str, float], bool], None]  # metrics of an evaluation, and whether it is the last one


@dataclass(frozen=True)
class TrainConfig(TrainerConfig, ResumableOutput, OnCluster, OnDevice):
    """Everything a training run depends on."""

    data: str = ""
    """a directory that `prepare` wrote"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """the language model and its heads"""
    method: Method = field(default_factory=BC)
    """how to learn: a name, and dotted flags for its fields"""
    prior: tuple[str, ...] = ()
    """checkpoints whose weighted average is the frozen prior, for methods that have one (model averaging); by default the model as loaded"""
    prior_weights: tuple[float, ...] = ()
    """weight of each of them; by default equal"""
    num_workers: int = 1
    """training processes (data parallel)"""
    cpus_per_worker: float = 0.0
    """CPU cores of each; 0 shares out the cores of this machine"""
    max_failures: int = 3
    """restarts after a worker died"""
    env: str = ""
    """measure the return in this environment at each evaluation, and choose the best checkpoint by it:
    small_talk, multiwoz, or module:Class for one of your own (envs/README.md)"""
    env_episodes: int = 64
    """conversations per measurement"""


def main(config: TrainConfig) -> dict[str, Any]:
    """Trains and returns the final metrics and checkpoint paths."""
    check(config)
    config = from_anywhere(config)
    out = claim_output(config, "train", free=CHANGEABLE, choices=CHOICES)
    told = _told_before(config)
    for note in () if config.quiet else told:
        print(f"note: {note}", flush=True)
    with connect(config.address or None), nullcontext([]) if config.quiet else following(out) as shown:
        use_gpu = wants_gpus(config.device, config.num_workers)
        config = replace(config, device="cuda" if use_gpu else "cpu")
        cores = config.cpus_per_worker or max(1, int(ray.cluster_resources().get("CPU", 1)) // config.num_workers)
        fit(train_worker, config, WorkerGroup(config.num_workers, cores, use_gpu, config.max_failures), out)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    for note in () if config.quiet else result.get("notes", ()):
        if note not in (*told, *shown):
            print(f"note: {note}", flush=True)
    return result


def train_worker(config: TrainConfig, *, report: Report | None = None) -> dict[str, Any]:
    """What one worker does, from files to checkpoints; runs without Ray too.

    `report` hears the metrics of each evaluation, and whether it is the last one. What a method or the loop warns of is told at once to who follows
    the run, and stands under `notes` in result.json: nobody reads a worker's stderr.
    """
    notes: list[str] = []
    trainer = _trainer(config, report, notes)
    with _noting(notes, Path(config.output_dir)):
        result = trainer.train()
    result |= {"notes": notes} if notes else {}
    if trainer.rank == 0:
        write_json(Path(config.output_dir) / "result.json", result)
    return result


def _trainer(config: TrainConfig, report: Report | None, notes: list[str]) -> Trainer:
    """Everything loaded; `notes` gets what was warned of."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    out, device = Path(config.output_dir), _device(config)
    tokenizer = config.method.extend_tokenizer(load_tokenizer(Path(config.data) / "tokenizer"))
    manifest = load_manifest(config.data)
    torch.manual_seed(config.seed)
    model = _with_path(config.model)
    lm = load_lm(model, tokenizer)
    policy = Policy(lm, config.method, model)
    policy.start = start_of(model.model_name_or_path) if model.model_name_or_path else "new"
    evaluate = None
    if config.env:
        from envs import text_env
        from rl_dialog.evaluation.episodes import env_return

        evaluate = partial(env_return, make_env=text_env(config.env), episodes=config.env_episodes, seed=10_000)
    rows = [list(read_rows(config.data, split)) for split in ("train", "validation")]
    given = {"evaluate": evaluate, "report": report, "describe": model_card(config, manifest)}
    notes += _told_before(config)
    with _noting(notes, out):
        if config.method.uses_prior:
            averaged = {"checkpoints": config.prior, "weights": config.prior_weights, "started": (out / "latest").is_file()}
            given["prior"] = freeze_prior(policy, out / "prior", tokenizer, **averaged)
        return Trainer(policy, tokenizer, *rows, config, out, **given, device=device)


def _told_before(config: TrainConfig) -> list[str]:
    """What the data directory tells before anything is trained."""
    if load_manifest(config.data)["splits"].get("validation", {}).get("dialogs"):
        return []
    best = "is chosen by the return alone" if config.env else "is the last one"
    return [
        f"{config.data} has no validation dialogs: nothing is measured on held-out replies, and the best "
        f"checkpoint {best}; prepare keeps some back (--validation; --split_by dialog where all begin alike)"
    ]


@contextmanager
def _noting(notes: list[str], directory: Path) -> Iterator[None]:
    """Collects the warnings of the block, which are given as ever, and writes them where `following` reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category is UserWarning:
                notes.append(" ".join(str(message).split()))  # as `following` shows it
                if int(os.environ.get("RANK", "0")) == 0:
                    write_note(directory, notes[-1])
            show(message, category, *where, **more)

        warnings.showwarning = note
        yield


def check(config: TrainConfig) -> None:
    """What can be known to fail before a worker starts."""
    require(config, data="a directory that `prepare` wrote", output_dir="a folder for the run")
    load_manifest(config.data)
    if (config.prior or config.prior_weights) and not config.method.uses_prior:
        raise UserError(f"--prior: {method_name(config.method)} has none; way_off_policy, dpo, kto, and ilql with reg_to base_policy do")
    if len(config.prior_weights) not in (0, len(config.prior)):
        raise UserError(f"--prior_weights: expected one for each of the {len(config.prior)} checkpoints of --prior, got {config.prior_weights}")
    if not proper_weights(config.prior_weights):
        raise UserError(f"--prior_weights: expected finite numbers above 0, got {list(config.prior_weights)}")
    for path in config.prior:
        require_hub_name_or_directory(path)
        _require_tokens(config.data, path, f"train a prior on {config.data} (--prior), or run prepare again with --tokenizer {path}")
    check_tracker(config.report_to)
    check_env(config.env)
    start = config.model.model_name_or_path
    if start:
        _require_tokens(config.data, start, f"run prepare again with --tokenizer {start}")


def _require_tokens(data: str, path: str, remedy: str) -> None:
    """Tokens are matched by their ids, so a model whose ids mean other words would be trained, or asked, about those."""
    if not Path(path).is_dir() or not (Path(resolve(path)) / "tokenizer.json").exists():
        return
    ours, theirs = load_tokenizer(Path(data) / "tokenizer"), load_tokenizer(resolve(path))
    if ours.get_vocab() != theirs.get_vocab():
        raise UserError(f"{data} was tokenised with {len(ours)} tokens that are not those of {path} ({len(theirs)}): {remedy}")


def check_env(name: str) -> None:
    """Raises UserError for an environment that does not exist or is not talked in; none at all is fine."""
    from envs import text_env

    if name:
        text_env(name)


def from_anywhere(config: TrainConfig) -> TrainConfig:
    """With absolute paths: workers do not share the driver's working directory."""
    model = config.model
    if Path(model.model_name_or_path).is_dir() and model.model_name_or_path:
        model = replace(model, model_name_or_path=str(Path(model.model_name_or_path).absolute()))
    prior = tuple(str(Path(resolve(path)).absolute()) if Path(path).is_dir() else path for path in config.prior)
    return replace(config, data=str(Path(config.data).absolute()), output_dir=str(Path(config.output_dir).absolute()), model=model, prior=prior)


def _with_path(model: ModelConfig) -> ModelConfig:
    """A run folder stands for its best checkpoint."""
    path = model.model_name_or_path
    return replace(model, model_name_or_path=resolve(path)) if path and Path(path).is_dir() else model


def model_card(config: TrainConfig, manifest: dict[str, Any]) -> str:
    """The README.md of a checkpoint: what it is, how it was made, how to use it."""
    rewards = {name: row["weight"] for name, row in manifest["rewards"]["components"].items() if row["weight"]}
    lines = [
        f"# {Path(config.output_dir).name}",
        "",
        f"A dialog policy trained with `{method_name(config.method)}` by rl_dialog.",
        "",
        f"- method: `{config.method}`",
        f"- data: {', '.join(manifest['sources'])} ({manifest['splits']['train']['replies']} replies to learn from)",
        f"- rewards and weights: {rewards or 'none'}",
        f"- seed: {config.seed}",
        "",
        "```bash",
        "python -m pipelines.chat --checkpoint THIS_FOLDER",
        "```",
        "",
        "`rl_dialog.models.policy.Policy.from_pretrained(folder)` gives the policy; "
        + (
            "`transformers.AutoModelForCausalLM.from_pretrained(folder)` gives the same logits."
            if config.method.plain_lm
            else "`transformers.AutoModelForCausalLM.from_pretrained(folder)` gives the language model without its value heads."
        ),
    ]
    return "\n".join(lines) + "\n"


def _device(config: TrainConfig) -> torch.device:
    """The GPU that Ray Train assigned; without its workers the one that the flag means."""
    return device() if "WORLD_SIZE" in os.environ and config.device != "cpu" else named_device(config.device)


if __name__ == "__main__":
    run(TrainConfig, main, choices=CHOICES)
