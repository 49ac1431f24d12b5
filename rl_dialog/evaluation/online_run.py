"""A run of online learning, for `pipelines.online`: what it is told, what is loaded for it, and what it plays
in when that is no world but contexts of logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rl_dialog.data.shards import read_rows
from rl_dialog.data.tokenize import Row, load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.checkpoints import MakeEnv
from rl_dialog.evaluation.contexts import Contexts
from rl_dialog.evaluation.episodes import env_return
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.openings import Openings, RewardMix
from rl_dialog.evaluation.rollouts import Judge, Rollouts, Watch, judged_return, self_play_return
from rl_dialog.evaluation.self_play import Opponent
from rl_dialog.methods import RLOO, Method
from rl_dialog.models.checkpoint import (
    freeze_prior,
    lengths_of,
    method_name,
    resolve,
    start_of,
    steering_of,
)
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.rewards import REWARDS, Reward, choosing
from rl_dialog.training.loop import Evaluate
from rl_dialog.training.online import OnlineSettings, OnlineTrainer
from rl_dialog.training.start import Report
from rl_dialog.training.versions import Versions

ENV_SEED = 10_000  # of the partners that the return is measured with: those of `train`
PLAY_SEED = 20_000  # of those that are learned from
Run = TypeVar("Run", bound="OnlineRun")


@dataclass(frozen=True)
class OnlineRun(OnlineSettings):
    """Who learns, where, and how."""

    model_name_or_path: str = ""
    """run folder (its best checkpoint), checkpoint directory or hub name to start from"""
    env: str = ""
    """the world to talk in: small_talk, multiwoz, wordle, toy_maze, ..., or module:Class for one of your own
    (envs/README.md)"""
    contexts: str = ""
    """instead of a world, a directory that `prepare` wrote: one reply to each context of its training split,
    judged by `rewards`; the return is measured on the validation split"""
    users: str = ""
    """instead of a world, the address of an OpenAI-compatible chat endpoint that plays the user,
    http://host:port/v1 (OPENAI_API_KEY in the environment is its key): `rewards` judge the conversations"""
    personas: str = ""
    """who the users are: a file with a persona a line, a system prompt or a JSON object with a goal
    (envs/adapters/README.md); the return is measured with those that are not learned with"""
    user_model: str = ""
    """the model that plays the user; by default the first one that the endpoint lists"""
    user_turns: int = 4
    """replies of the policy after which a conversation with a user is cut off that has not ended it"""
    user_concurrency: int = 16
    """users that are waited for at a time, by each process that plays"""
    user_timeout: float = 60.0
    """seconds for a user's answer, after which the endpoint is asked again, three times in all; then the
    episode has failed"""
    self_play: bool = False
    """the policy plays all roles: of a world of several (textarena:NAME?opponent=self), or with `contexts`
    both sides of conversations that begin as a logged one did, judged by `rewards`. Each role is an episode
    of its own, compared with the same role of its group"""
    opponent_lag: int = 0
    """in self-play, how many rounds the copy that plays the other roles falls behind before it is renewed;
    0: it is the policy as it is, and all roles are learned from; -1: it stays what the policy was at the
    start"""
    learner_role: str = ""
    """in self-play, the only role that is learned; by default all of them, and against a copy that lags who
    speaks first in every other group and the others in the rest"""
    self_play_turns: int = 3
    """in self-play from logged openings, the replies of each side"""
    eval_env: str = ""
    """the world that the return is measured in; by default `env`, and in self-play against the policy as it
    was at the start"""
    rewards: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(REWARDS))
    """the weight of each reward, e.g. `--rewards.learned 1`: what judges replies to `contexts`, and in `env`
    whole conversations instead of the world's own reward, which is watched beside it;
    `--rewards.MODULE:FUNCTION 1` is one of your own (rl_dialog/rewards/README.md)"""
    scorers: tuple[str, ...] = ()
    """models behind rewards: reward_model=DIR (that `fit_reward` wrote; several are an ensemble, whose mean
    counts), sentiment=PATH, toxicity=PATH, encoder=PATH"""
    data: str = ""
    """a directory that `prepare` wrote, whose training split `supervised_weight` holds the policy to; its
    tokens must be those of the checkpoint"""
    method: Method = field(default_factory=RLOO)
    """how to learn: a name, and dotted flags for its fields"""
    prior: str = ""
    """checkpoint whose language model the policy stays near; by default the policy that it starts from, with
    its values where it speaks by them (`--prior` with the same checkpoint is its language model alone)"""
    value_trunk: Literal["auto", "shared", "separate"] = "auto"
    """what ppo's values read: a transformer of their own, which begins as a copy of the language model's
    (separate, and auto), or the language model's states (shared)"""
    use_peft: bool = False
    """learn LoRA adapters instead of all of the model, which without them is the prior: no second model is
    held, and only adapters travel to workers"""
    lora_r: int = 16
    """rank of the adapters"""
    lora_alpha: int = 32
    """scale of the adapters (alpha / r)"""
    groups: int = 8
    """groups of episodes in a round, each with a conversation partner of its own"""
    group_size: int = 8
    """episodes of a group, with the same partner"""
    batch_size: int = 0
    """episodes played side by side, in whole groups; 0: a quarter of a round. What is drawn does not depend
    on it; with workers it is what one of them is handed at a time"""
    num_workers: int = 0
    """Ray actors that play; 0 plays in this process. The result is the same"""
    cpus_per_worker: int = 1
    """cores that play, of each actor or of this process, and those of each learner; wide models gain by
    several. The last digits of what is computed depend on them"""
    num_learners: int = 0
    """Ray Train workers that learn, each from its share of every update; 0 learns in this process, as one of
    them does. The first one plays, or has the actors play, for all"""
    max_failures: int = 3
    """with num_learners, restarts from the latest checkpoint after one of them died"""
    max_staleness: int = 0
    """rounds that workers play ahead while this process learns: a round is played with the weights of so many
    rounds before; 0 plays and learns in turn"""
    env_episodes: int = 128
    """episodes per measurement of the return, with partners that are never learned from"""
    max_new_tokens: int = 64
    """longest reply, its end-of-turn token included"""
    max_prompt_length: int = 512
    """longest prompt in tokens, of a model that was made here no longer than those it learned from; older
    messages are left out first (the system prompt stays)"""
    temperature: float = 1.0
    """softmax temperature; the policy that learns, its prior and its divergence are those at it"""
    top_k: int = 0
    """sample among the k likeliest tokens; 0 keeps all"""
    top_p: float = 1.0
    """sample among the likeliest tokens of this total probability"""


def with_absolute_paths(config: Run) -> Run:
    """For learners, which do not share the working directory of whoever starts them."""
    named = ("model_name_or_path", "prior", "contexts", "data", "personas")
    places = {name: absolute(getattr(config, name)) for name in named}
    return replace(config, scorers=absolute_scorers(config.scorers), **places)


def absolute(path: str) -> str:
    """The path from the root, where there is something; else what it is, such as the name of a model."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path


def absolute_scorers(scorers: Sequence[str]) -> tuple[str, ...]:
    """The same of models behind rewards, name=PATH."""
    parts = (entry.partition("=") for entry in scorers)
    return tuple(f"{name}{equals}{absolute(path)}" for name, equals, path in parts)


def load_trainer(
    config: OnlineRun,
    out: Path,
    make_env: MakeEnv,
    held_out: MakeEnv,
    *,
    judge: Judge | None = None,
    watch: Watch | None = None,
    about_rewards: Callable[[], Mapping[str, float]] | None = None,
    report: Report | None = None,
    device: torch.device,
) -> OnlineTrainer:
    """Everything loaded: what learns in worlds of `make_env`, and is measured in those of `held_out`; `judge`
    has the rewards that take the place of the worlds', `watch` is how it learns from what is played,
    `about_rewards` and `report` are those of OnlineTrainer."""
    start = resolve(config.model_name_or_path)
    tokenizer = load_tokenizer(start)
    policy = _policy_of(config, start, tokenizer)
    started = (out / "latest").is_file()
    priors = (config.prior,) if config.prior else ()
    prior = freeze_prior(policy, out / "prior", tokenizer, checkpoints=priors, started=started)
    _check_prior(config, policy, prior)
    policy.to(device)
    versions = _versions_of(config, policy)
    play = replace(_rollouts_of(config, policy, make_env, out / "rollouts", judge, versions), watch=watch)
    evaluate = evaluation_of(config, play, held_out, policy)
    return OnlineTrainer(
        policy,
        tokenizer,
        play,
        config,
        out,
        prior=prior,
        temperature=config.temperature,
        drawn_plainly=decoding_of(config).is_plain,
        versions=versions,
        logged=_logged_rows(config, tokenizer, policy),
        evaluate=evaluate,
        about_rewards=about_rewards,
        report=report,
        describe=model_card(
            config, out.name, steered=policy.steering is not None, labelled=about_rewards is not None
        ),
        device=device,
    )


def _versions_of(config: OnlineRun, policy: Policy) -> Versions | None:
    """Of the policy, where older ones play."""
    if not (config.self_play or config.num_workers):
        return None
    return Versions(policy, staleness=config.max_staleness, lag=config.opponent_lag)


def _rollouts_of(
    config: OnlineRun,
    policy: Policy,
    make_env: MakeEnv,
    folder: Path,
    judge: Judge | None,
    versions: Versions | None,
) -> Rollouts:
    """How rounds are played."""
    return Rollouts(
        make_env,
        decoding_of(config),
        config.groups,
        config.group_size,
        seed=stream(PLAY_SEED, config.seed),
        folder=folder,
        batch_size=batch_size_of(config),
        self_play=config.self_play,
        learner_role=config.learner_role,
        threads=config.cpus_per_worker,
        judge=judge,
        versions=versions,
        opponent=Opponent(policy) if config.self_play and config.opponent_lag else None,
    )


def _logged_rows(config: OnlineRun, tokenizer: PreTrainedTokenizerBase, policy: Policy) -> list[Row]:
    """The rows of the supervised term. Raises UserError for rows of other tokens, and for too long ones."""
    if not config.data:
        return []
    theirs = load_tokenizer(Path(config.data) / "tokenizer")
    if theirs.get_vocab() != tokenizer.get_vocab() or theirs.chat_template != tokenizer.chat_template:
        raise UserError(
            f"--data {config.data}: expected the tokens of {config.model_name_or_path}, got others: prepare "
            "the logs anew with --tokenizer and that checkpoint"
        )
    rows = [row for row in read_rows(config.data, "train") if row.assistant.any()]
    longest = max((len(row.input_ids) for row in rows), default=0)
    if not rows or longest > (policy.context or longest):
        raise UserError(
            f"--data {config.data}: expected replies in rows of at most {policy.context} tokens in its "
            f"training split, got {len(rows)} rows, the longest of {longest}"
        )
    return rows


def batch_size_of(config: OnlineRun) -> int:
    """Episodes side by side, by default whole groups that are a quarter of a round."""
    return config.batch_size or -(-config.groups // 4) * config.group_size


def evaluation_of(config: OnlineRun, play: Rollouts, held_out: MakeEnv, policy: Policy) -> Evaluate:
    """How the return is measured: in a world, or in self-play against the start."""
    side_by_side = config.batch_size or 128
    if not config.self_play or config.eval_env:
        measure = {"make_env": held_out, "episodes": config.env_episodes, "seed": ENV_SEED}
        measure |= {"decoding": play.decoding, "batch_size": side_by_side}
        if play.judge is None:
            return partial(env_return, **measure)
        return partial(judged_return, **measure, judge=play.judge)
    playing = replace(play.playing, make_env=held_out, group_size=1, seed=ENV_SEED, batch_size=side_by_side)
    return partial(
        self_play_return,
        playing=playing,
        opponent=play.opponent or Opponent(policy),
        start=play.versions.kept[0],
        episodes=config.env_episodes,
        judge=play.judge,
    )


def judge_of(config: OnlineRun) -> RewardMix | None:
    """The rewards that are learned from instead of a world's. Raises UserError."""
    weights = choosing.read_weights(config.rewards)
    if not weights or (config.contexts and not config.self_play):  # contexts judge by themselves
        return None
    return RewardMix(_rewards_of(config, weights), weights, world_pays=bool(config.env))


def _rewards_of(config: OnlineRun, weights: dict[str, float]) -> dict[str, Reward]:
    models = {"rating": None, "compat": "", "scorers": config.scorers, "label_weights": {}}
    return choosing.load_rewards(weights, **models)


def _policy_of(config: OnlineRun, start: str, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """The checkpoint as a policy of the method."""
    torch.manual_seed(config.seed)
    model = model_of(config, start)
    policy = Policy(load_lm(model, tokenizer), config.method, model)
    _check_latents(config, policy)
    policy.start, policy.lengths, policy.steering = start_of(start), lengths_of(start), steering_of(start)
    return policy


def _check_prior(config: OnlineRun, policy: Policy, prior: Prior | None) -> None:
    """Raises UserError for a prior that cannot be asked about the latents that the policy draws."""
    for member in prior.members if prior and config.method.holds_latents else ():
        size = member.config.latent_size if member.has_latents else 0
        if size != policy.config.latent_size or member.config.latent != "message":
            raise UserError(
                f"--prior {config.prior}: expected a vhred with latents of {policy.config.latent_size} "
                f"numbers, as {config.model_name_or_path} has them, got a {member.config.model_type} with "
                f"{size}"
            )


def _check_latents(config: OnlineRun, policy: Policy) -> None:
    """Raises UserError for a start whose latents, or lack of them, do not go with the rest."""
    start, method = f"--model_name_or_path {config.model_name_or_path}", method_name(config.method)
    latent = policy.config.latent if policy.is_hierarchical else "none"
    if config.method.needs_latents and latent != "message":
        other = "" if latent == "conversation" else ", or take --method reinforce"  # which a vhcr cannot
        raise UserError(
            f"--method {method}: expected a start that draws a latent for each message, got {start}, a "
            f"{policy.config.model_type} with latent {latent}: start from one that `train --model.family "
            f"vhred` made{other}"
        )
    if latent == "conversation":
        raise UserError(
            f"{start}: expected latents of messages alone (vhred), got a vhcr, which draws the "
            "conversation's latent anew for each reply, so that no row says how likely its replies were; "
            "start from hred, vhred or a transformer"
        )
    if latent != "none" and config.data:
        raise UserError(
            f"--data {config.data}: expected a start without latents, got {start}: logged replies have a "
            "bound on their probability, which `train --method bc` learns, and no supervised term"
        )


def model_of(config: OnlineRun, start: str) -> ModelConfig:
    """What is loaded of the checkpoint `start`; LoRA adapters that it consists of are merged into the model
    below them."""
    adapters = {"use_peft": config.use_peft, "lora_r": config.lora_r, "lora_alpha": config.lora_alpha}
    return ModelConfig(model_name_or_path=start, value_trunk=config.value_trunk, **adapters)


def contexts_of(config: OnlineRun) -> tuple[MakeEnv, MakeEnv]:
    """The logged contexts, or in self-play openings, that are learned from, and those that the return is
    measured in. Raises UserError."""
    splits = ("train", "validation")
    if config.self_play:
        return tuple(Openings(config.contexts, split, config.self_play_turns) for split in splits)
    weights = choosing.read_weights(config.rewards)
    rewards = _rewards_of(config, weights)
    return tuple(Contexts(config.contexts, split, rewards, weights) for split in splits)


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


def model_card(config: OnlineRun, name: str, *, steered: bool = False, labelled: bool = False) -> str:
    """The README.md of a checkpoint: what it is, how it was made, how to use it. `steered`: by the values
    that it started with; `labelled`: with a reward that was learned from labels."""
    logged = f"{'openings' if config.self_play else 'contexts'} of {Path(config.contexts).name}"
    users = f"users by an endpoint, personas of {Path(config.personas).name}"
    world = config.env or (users if config.users else logged)
    world += " in self-play" if config.self_play else ""
    how = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    same = "the language model without the values that steer it" if steered else "the same logits"
    plain = Decoding()  # what has learned is the policy as it was drawn from
    spoken = "".join(f" --{key} {value}" for key, value in how.items() if value != getattr(plain, key))
    return f"""# {name}

A dialog policy trained online with `{method_name(config.method)}` by rl_dialog.

- method: `{config.method}`
- world: {world}, {config.groups} groups of {config.group_size} episodes a round
- rewards: {"learned from labels" if labelled else choosing.read_weights(config.rewards) or "the world's own"}
- started from: {Path(config.model_name_or_path).name}
- seed: {config.seed}

```bash
python -m pipelines.chat --checkpoint THIS_FOLDER{spoken}
```

`rl_dialog.models.policy.Policy.from_pretrained(folder)` gives the policy; \
`transformers.AutoModelForCausalLM.from_pretrained(folder)` gives {same}.
"""
