"""A run of online learning, for `pipelines.online`: what it is told, what is loaded for it, and what it plays
in when that is no world but contexts of logs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from rl_dialog.data.shards import load_manifest
from rl_dialog.data.tokenize import load_tokenizer, require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.evaluation.checkpoints import MakeEnv
from rl_dialog.evaluation.contexts import Contexts
from rl_dialog.evaluation.episodes import env_return
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import ONLINE, RLOO, Method
from rl_dialog.models.checkpoint import freeze_prior, method_name, read_method, resolve, start_of
from rl_dialog.models.policy import ModelConfig, Policy, load_lm
from rl_dialog.rewards import REWARDS, choosing
from rl_dialog.training.logger import check_tracker
from rl_dialog.training.online import OnlineSettings, OnlineTrainer

ENV_SEED = 10_000  # of the partners that the return is measured with: those of `train`
PLAY_SEED = 20_000  # of those that are learned from


@dataclass(frozen=True)
class OnlineRun(OnlineSettings):
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


def load_trainer(
    config: OnlineRun, out: Path, make_env: MakeEnv, held_out: MakeEnv, *, device: torch.device
) -> OnlineTrainer:
    """Everything loaded: what learns in worlds of `make_env`, and is measured in those of `held_out`."""
    start = resolve(config.checkpoint)
    tokenizer = load_tokenizer(start)
    policy = _policy_of(config, start, tokenizer)
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
        device=device,
    )


def _policy_of(config: OnlineRun, start: str, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """The checkpoint as a policy of the method. Raises UserError for one of adapters."""
    torch.manual_seed(config.seed)
    model = ModelConfig(model_name_or_path=start, value_trunk=config.value_trunk)
    policy = Policy(load_lm(model, tokenizer), config.method, model)
    policy.start = start_of(start)
    if policy.has_adapters:
        raise UserError(
            f"--checkpoint {config.checkpoint}: expected a whole model, got LoRA adapters, whose prior would "
            "be the model below them: merge them into it first (peft's merge_and_unload)"
        )
    return policy


def check_run(config: OnlineRun) -> None:
    """What can be known to fail before anything is loaded. Raises UserError."""
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


def _check_partner(config: OnlineRun) -> None:
    if bool(config.env) == bool(config.contexts):
        raise UserError(
            "expected either --env, a world to talk in, or --contexts, a directory that `prepare` wrote, got "
            + ("both" if config.env else "neither")
        )
    if config.env:
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


def contexts_of(config: OnlineRun) -> tuple[MakeEnv, MakeEnv]:
    """The contexts that are learned from, and those that the return is measured in. Raises UserError."""
    weights = choosing.read_weights(config.rewards)
    models = {"rating": None, "compat": "", "scorers": config.scorers, "label_weights": {}}
    rewards = choosing.load_rewards(weights, **models)
    return tuple(Contexts(config.contexts, split, rewards, weights) for split in ("train", "validation"))


def returns_of(out: Path) -> tuple[float | None, float | None]:
    """The return before the first round, and the last one that was measured; None where there is none."""
    measured = [
        (line["step"], line["eval/return"])
        for line in map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        if line.get("eval/return") is not None
    ]
    before = measured[0][1] if measured and measured[0][0] == 0 else None
    return before, measured[-1][1] if measured else None


def decoding_of(config: OnlineRun) -> Decoding:
    """How replies are drawn, in what is learned from and in what is measured."""
    names = ("max_new_tokens", "max_prompt_length", "temperature", "top_k", "top_p")
    return Decoding(**{name: getattr(config, name) for name in names}, num_generations=1)


def model_card(config: OnlineRun, name: str) -> str:
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
