"""A policy talks in a world, learns from what came of it, and stays near its prior.

    python -m pipelines.online --checkpoint runs/bc --env small_talk --method rloo --output_dir runs/online
    python -m pipelines.online --checkpoint runs/bc --contexts data/mine --rewards.learned 1 \
        --scorers reward_model=runs/reward --max_steps 100 --output_dir runs/rlhf

Each round plays `--groups` groups of `--group_size` episodes (a group has one conversation partner) and
learns from them; `rl_dialog/training/online.py` is the loop. The frozen prior is the checkpoint that it
starts from. Every episode stays as a Dialog in `rollouts/`, which `prepare` reads like any log; checkpoints
are those of `train`.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils import logging as transformers_logging

from envs import text_env
from rl_dialog.data.shards import load_manifest
from rl_dialog.data.tokenize import load_tokenizer, require_hub_name_or_directory
from rl_dialog.errors import UserError, room_for
from rl_dialog.evaluation.checkpoints import MakeEnv
from rl_dialog.evaluation.contexts import Contexts
from rl_dialog.evaluation.episodes import env_return
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import ONLINE, RLOO, Method
from rl_dialog.models.checkpoint import freeze_prior, method_name, read_method, resolve, start_of
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import ModelConfig, Policy, load_lm
from rl_dialog.rewards import REWARDS, choosing
from rl_dialog.run import OnDevice, ResumableOutput, at_least, claim_output, require, run
from rl_dialog.training.logger import check_tracker, following
from rl_dialog.training.online import OnlineSettings, OnlineTrainer

CHOICES = {"method": ONLINE}
CHANGEABLE = (  # by --resume: how long, how fast and with what it is watched, but not what is learned
    *("max_steps", "eval_steps", "save_steps", "logging_steps", "save_total_limit", "env_episodes"),
    *("per_device_train_batch_size", "batch_size", "device", "checkpoint", "prior"),
)
ENV_SEED = 10_000  # of the partners that the return is measured with: those of `train`
PLAY_SEED = 20_000  # of those that are learned from


@dataclass(frozen=True)
class OnlineConfig(OnlineSettings, ResumableOutput, OnDevice):
    """Who learns, where, and how."""

    checkpoint: str = ""
    """run folder (its best checkpoint), checkpoint directory or hub name to start from"""
    env: str = ""
    """the world to talk in: small_talk, multiwoz, wordle, toy_maze, ..., or module:Class for one of your own
    (envs/README.md)"""
    contexts: str = ""
    """instead of a world, a directory that `prepare` wrote: one reply to each context of its training split,
    judged by `rewards`; the return is measured on the validation split"""
    rewards: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(REWARDS))
    """with `contexts`, the weight of each reward, e.g. `--rewards.learned 1`; `--rewards.MODULE:FUNCTION 1`
    is one of your own (rl_dialog/rewards/README.md)"""
    scorers: tuple[str, ...] = ()
    """models behind rewards: reward_model=DIR (that `fit_reward` wrote), sentiment=PATH, toxicity=PATH,
    encoder=PATH"""
    method: Method = field(default_factory=RLOO)
    """how to learn: a name, and dotted flags for its fields"""
    prior: str = ""
    """checkpoint that the policy stays near; by default the one that it starts from"""
    value_trunk: Literal["auto", "shared", "separate"] = "auto"
    """what ppo's values read: a transformer of their own, which begins as a copy of the language model's
    (separate, and auto), or the language model's states (shared)"""
    groups: int = 8
    """groups of episodes in a round, each with a conversation partner of its own"""
    group_size: int = 8
    """episodes of a group, with the same partner"""
    batch_size: int = 128
    """episodes played side by side; what is drawn does not depend on it"""
    env_episodes: int = 128
    """episodes per measurement of the return, with partners that are never learned from"""
    max_new_tokens: int = 64
    """longest reply, its end-of-turn token included"""
    max_prompt_length: int = 512
    """longest prompt in tokens; older messages are left out first (the system prompt stays)"""
    temperature: float = 1.0
    """softmax temperature; the policy that learns, its prior and its divergence are those at it"""
    top_k: int = 0
    """sample among the k likeliest tokens; 0 keeps all"""
    top_p: float = 1.0
    """sample among the likeliest tokens of this total probability"""


def main(config: OnlineConfig) -> dict[str, Any]:
    """Plays and learns; returns the return before and after, and the checkpoint paths."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    check(config)
    make_worlds = worlds(config)
    out = claim_output(config, "online", free=CHANGEABLE, choices=CHOICES)
    with nullcontext() if config.quiet else following(out), room_for(out):
        trainer = load_trainer(config, out, *make_worlds)
        result = trainer.train()
    measured = [
        (line["step"], line["eval/return"])
        for line in map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        if line.get("eval/return") is not None
    ]
    return {
        "output_dir": str(out),
        "return_before": measured[0][1] if measured and measured[0][0] == 0 else None,
        "return": measured[-1][1] if measured else None,
        **result,
        "rollouts": str(out / "rollouts"),
    }


def load_trainer(config: OnlineConfig, out: Path, make_env: MakeEnv, held_out: MakeEnv) -> OnlineTrainer:
    """Everything loaded: what learns in worlds of `make_env`, and is measured in those of `held_out`."""
    start = resolve(config.checkpoint)
    tokenizer = load_tokenizer(start)
    torch.manual_seed(config.seed)
    model = ModelConfig(model_name_or_path=start, value_trunk=config.value_trunk)
    policy = Policy(load_lm(model, tokenizer), config.method, model)
    policy.start = start_of(start)
    if policy.has_adapters:
        raise UserError(
            f"--checkpoint {config.checkpoint}: expected a whole model, got LoRA adapters, whose prior would "
            "be the model below them: merge them into it first (peft's merge_and_unload)"
        )
    started = (out / "latest").is_file()
    priors = (config.prior,) if config.prior else ()
    prior = freeze_prior(policy, out / "prior", tokenizer, checkpoints=priors, started=started)
    decoding = decoding_of(config)
    play = Rollouts(
        make_env,
        decoding,
        config.groups,
        config.group_size,
        seed=stream(PLAY_SEED, config.seed),
        folder=out / "rollouts",
        batch_size=config.batch_size,
    )
    measure = {"make_env": held_out, "episodes": config.env_episodes, "seed": ENV_SEED, "decoding": decoding}
    evaluate = partial(env_return, **measure, batch_size=config.batch_size)
    return OnlineTrainer(
        policy,
        tokenizer,
        play,
        config,
        out,
        prior=prior,
        temperature=config.temperature,
        evaluate=evaluate,
        describe=model_card(config, out.name),
        device=named_device(config.device),
    )


def check(config: OnlineConfig) -> None:
    """What can be known to fail before anything is loaded. Raises UserError."""
    require(
        config,
        checkpoint="the policy to start from, a run folder or a checkpoint directory",
        output_dir="a folder for the run",
    )
    at_least(
        config,
        max_steps=1, groups=1, group_size=1, batch_size=1, env_episodes=1, per_device_train_batch_size=1,
        num_iterations=1, num_mini_batches=1, warmup_steps=0, eval_steps=0, save_steps=0, logging_steps=1,
        save_total_limit=1, max_grad_norm=0, seed=0, value_unit=0,
    )  # fmt: skip
    decoding_of(config).check()
    _check_partner(config)
    check_tracker(config.report_to)
    if not config.method.online:
        raise UserError(
            f"--method {method_name(config.method)} learns from logs: python -m pipelines.train; online "
            f"learn {', '.join(ONLINE)}"
        )
    if config.method.compares_groups and config.group_size < 2:
        raise UserError(
            f"--group_size {config.group_size}: {method_name(config.method)} compares the episodes of a "
            "group, so expected at least 2; ppo, and reinforce with another --method.baseline, learn from "
            "single ones"
        )
    for path in (config.checkpoint, *([config.prior] if config.prior else [])):
        require_hub_name_or_directory(path)
    stored = read_method(resolve(config.checkpoint))
    if not stored.plain_lm:
        raise UserError(
            f"--checkpoint {config.checkpoint}: expected a policy that is its language model (bc, "
            f"tf_top, dpo, ...), got {method_name(stored)}, which speaks by its values too: start from the "
            "model that it was trained from"
        )


def worlds(config: OnlineConfig) -> tuple[MakeEnv, MakeEnv]:
    """What makes the worlds that are learned from, and those that the return is measured in. Raises
    UserError."""
    if config.env:
        return text_env(config.env), text_env(config.env)
    weights = choosing.read_weights(config.rewards)
    models = {"rating": None, "compat": "", "scorers": config.scorers, "label_weights": {}}
    rewards = choosing.load_rewards(weights, **models)
    return tuple(Contexts(config.contexts, split, rewards, weights) for split in ("train", "validation"))


def _check_partner(config: OnlineConfig) -> None:
    if bool(config.env) == bool(config.contexts):
        raise UserError(
            "expected either --env, a world to talk in, or --contexts, a directory that `prepare` wrote, got "
            + ("both" if config.env else "neither")
        )
    if config.env:
        text_env(config.env)
        given = [name for name, weight in config.rewards.items() if weight is not None]
        if given or config.scorers:
            flag = f"--rewards.{given[0]}" if given else "--scorers"
            raise UserError(f"{flag}: a world has rewards of its own; rewards judge replies to --contexts")
    elif not choosing.read_weights(config.rewards):
        raise UserError(
            "--contexts: expected rewards that judge the replies, --rewards.NAME WEIGHT, got none"
        )
    else:
        load_manifest(config.contexts)


def decoding_of(config: OnlineConfig) -> Decoding:
    """How replies are drawn, in what is learned from and in what is measured."""
    names = ("max_new_tokens", "max_prompt_length", "temperature", "top_k", "top_p")
    return Decoding(**{name: getattr(config, name) for name in names}, num_generations=1)


def model_card(config: OnlineConfig, name: str) -> str:
    """The README.md of a checkpoint: what it is, how it was made, how to use it."""
    world = config.env or f"contexts of {Path(config.contexts).name}"
    how = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    plain = Decoding()  # what has learned is the policy as it was drawn from
    spoken = "".join(f" --{key} {value}" for key, value in how.items() if value != getattr(plain, key))
    return f"""# {name}

A dialog policy trained online with `{method_name(config.method)}` by rl_dialog.

- method: `{config.method}`
- world: {world}, {config.groups} groups of {config.group_size} episodes a round
- started from: {Path(config.checkpoint).name}
- seed: {config.seed}

```bash
python -m pipelines.chat --checkpoint THIS_FOLDER{spoken}
```

`rl_dialog.models.policy.Policy.from_pretrained(folder)` gives the policy; \
`transformers.AutoModelForCausalLM.from_pretrained(folder)` gives the same logits.
"""


if __name__ == "__main__":
    run(OnlineConfig, main, choices=CHOICES)
