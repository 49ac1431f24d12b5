"""Speed on this machine, as ratios to the plain language model measured in the same run.

    python -m pipelines.benchmark train --output_dir runs/speed

    train       tokens/s of every method, over those of cross-entropy training of the same backbone
    memory      peak memory of the same training steps, each in a process of its own
    generate    new tokens/s of ilql's guided decoding, over those of the backbone's own `generate`
    candidates  contexts/s of several replies to each, over those of `generate` on one context at a time
    prepare     conversations/s from a CSV to reward columns, over those of a pandas pass; and its memory
    scorers     replies/s of coherence by an encoder, batched, over those of one text at a time
    tune        trials/s of a sweep, over those of a plain loop; and what Ray Tune adds to a trial
    prefer      steps/s of learning from preferences, over those of plain RLlib
    simulate    system steps/s with simulated users, over those of one conversation after the other; memory
    play        episodes/s of a language model in a text world, over those of one at a time; scripted players
    serve       tokens/s to 1, 4 and 16 clients at once, over one request at a time; the cost of HTTP
    control     no speed: true returns of what preferences teach, beside the true reward and imitation
    cartpole    no speed: returns of way-off-policy and its rivals on logs of CartPole, and what explains them
    wordle      no speed: what ilql and sarsa learn of openings after which the logs mostly play badly
    online      episodes/s of the loop that plays and learns, over those of TRL's trainers; playing ahead
    offline_start  no speed: conversations that learning from logs saves before a policy talks
    rlhf        no speed: what a policy earns truly while it learns from a reward that was learned from labels
    self_play   no speed: what comes of the rewards of bots that talk to each other, by REINFORCE and by psi
    reward_model  pairs/s of learning a reward model, over those of TRL's trainer; what each is worth

The contenders take turns, step by step, and a ratio is the median over rounds of (seconds of the plain LM /
seconds of ours) within one round: whatever else runs on the machine slows both. Absolute tokens/s are only as
good as the machine is quiet; the load average stands beside them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import torch
import transformers

from pipelines.benchmark import (
    candidates,
    cartpole,
    control,
    generation,
    memory,
    offline_start,
    online,
    playing,
    preferences,
    preparation,
    reward_model,
    rlhf,
    scorers,
    self_play,
    serving,
    simulation,
    sweeps,
    training,
    wordle,
)
from pipelines.benchmark.contenders import CONTENDERS
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError
from rl_dialog.evaluation.machine import describe_machine
from rl_dialog.run import claim_output, run

# Freed memory stays in the process: otherwise every step pays for getting large tensors from the system anew,
# by how much depends on the kernel.
ALLOCATOR = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"

MEASURES = {
    "train": training.measure,
    "memory": memory.measure,
    "generate": generation.measure,
    "candidates": candidates.measure,
    "prepare": preparation.measure,
    "scorers": scorers.measure,
    "tune": sweeps.measure,
    "serve": serving.measure,
    "simulate": simulation.measure,
    "play": playing.measure,
    "prefer": preferences.measure,
    "control": control.measure,
    "cartpole": cartpole.measure,
    "wordle": wordle.measure,
    "rlhf": rlhf.measure,
    "online": online.measure,
    "offline_start": offline_start.measure,
    "self_play": self_play.measure,
    "reward_model": reward_model.measure,
}


def main(config: BenchmarkConfig) -> dict[str, Any]:
    """Measures, prints a table, writes the figures; returns the ratios.

    Raises UserError for sizes that cannot be measured.
    """
    _check(config)
    out = claim_output(config, "benchmark", free=("environments", "seeds", "imitation_python", "threads"))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    before = os.getloadavg()
    result = MEASURES[config.what](config)
    if not config.quiet:
        print(result.shown)
    machine = describe_machine() | {"load_average_before": before, "load_average_after": os.getloadavg()}
    write_json(
        out / "benchmark.json",
        {"what": config.what, "machine": machine, "settings": asdict(config), **result.report},
    )
    headline = {
        "what": config.what,
        **result.headline,
        "load_average": os.getloadavg()[0],
        "output_dir": str(out),
    }
    if result.plot is not None:
        headline["plot"] = str(out / f"{config.what}.svg")
        result.plot.savefig(headline["plot"], dpi=110, metadata={"Date": None})
    return headline


def _check(config: BenchmarkConfig) -> None:
    if config.rounds < 1 or config.warmup < 0 or config.threads < 1 or config.system_prompt < 0:
        sizes = "rounds and threads of at least 1, warmup and system_prompt of at least 0"
        raise UserError(f"expected {sizes}")
    least = config.system_prompt + 2 * config.user_block
    if config.what == "train" and config.length < least:
        raise UserError(
            f"--length {config.length}: expected at least system_prompt + 2 user_block = {least}, so that "
            "the assistant has a block behind the system prompt"
        )
    if unknown := [name for name in config.contenders if name not in CONTENDERS]:
        raise UserError(
            f"unknown contender {unknown[0]!r}: expected some of {', '.join(map(repr, CONTENDERS))}"
        )
    if config.what not in ("train", "memory") and config.contenders != tuple(CONTENDERS):
        raise UserError(
            f"--contenders: expected none beside {config.what}, which has contenders of its own, got "
            f"{', '.join(map(repr, config.contenders))}: train and memory take them"
        )
    if config.what == "scorers" and not (config.encoder and config.logs):
        raise UserError("scorers: expected --encoder PATH and --logs PATH")
    if config.what == "cartpole" and (
        config.seeds < 1 or config.steps < 1 or config.seed < 0 or not config.priors
    ):
        numbers = "seeds and steps of at least 1, a seed of at least 0 and one prior or more"
        raise UserError(f"cartpole: expected {numbers}")
    if config.what == "wordle" and (
        config.runs < 1 or config.games < 1 or config.steps < 1 or config.seed < 0 or not 0 < config.tau < 1
    ):
        numbers = "runs, games and steps of at least 1, a seed of at least 0 and a tau between 0 and 1"
        raise UserError(f"wordle: expected {numbers}")
    if config.resume and not config.is_resumable:
        raise UserError(
            f"--resume: expected control or self_play, whose runs are written one by one, got {config.what}"
        )
    counts = (config.seeds, config.control_steps, config.control_labels, config.seed + 1)
    if config.what == "control" and (min(counts) < 1 or not config.environments):
        numbers = "seeds, control_steps and control_labels of at least 1, a seed of at least 0"
        raise UserError(f"control: expected {numbers}, and an environment or more")
    counts = (config.seeds, config.online_rounds, config.seed + 1, config.held_out)
    if config.what in ("offline_start", "self_play") and min(counts) < 1:
        numbers = "seeds, online_rounds and held_out of at least 1, a seed of at least 0"
        raise UserError(f"{config.what}: expected {numbers}")
    if config.what == "reward_model" and (
        min(config.seeds, config.labels, config.batch_size, config.seed + 1) < 1
        or min(config.epochs, config.learning_rate) <= 0
        or not 0 <= config.flipped < 0.5
    ):
        numbers = "seeds, labels and batch_size of at least 1, a seed of at least 0, epochs and learning_rate"
        raise UserError(f"reward_model: expected {numbers} above 0, and flipped in [0, 0.5)")
    sizes = (config.labels, config.members, config.online_rounds, config.seed + 1, len(config.kl_weights))
    if config.what == "rlhf" and (min(sizes) < 1 or config.held_out < 2 or min(config.kl_weights) < 0):
        numbers = "labels, members and online_rounds of at least 1, held_out of at least 2"
        raise UserError(
            f"rlhf: expected {numbers}, a seed of at least 0, and one of kl_weights or more, none below 0"
        )


def _pin_allocator() -> None:
    """Starts this process anew under `ALLOCATOR`, which glibc reads only at the start."""
    if (
        os.environ.get("GLIBC_TUNABLES") != ALLOCATOR
        and sys.platform == "linux"
        and not {"memory", "prepare"} & set(sys.argv)
    ):
        os.execve(sys.executable, sys.orig_argv, os.environ | {"GLIBC_TUNABLES": ALLOCATOR})


if __name__ == "__main__":
    _pin_allocator()
    run(BenchmarkConfig, main)
