"""What is measured of one checkpoint: returns in an environment, scores on held-out logs, rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import NO_RETURN, Episode, play_episodes
from rl_dialog.evaluation.generation import Decoding, check_strength, generations, load_for_decoding
from rl_dialog.evaluation.held_out import HeldOut, HeldOutConfig, check_held_out, score_held_out
from rl_dialog.evaluation.intervals import Measure
from rl_dialog.evaluation.summary import RunResult
from rl_dialog.models.checkpoint import method_name, read_method
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import Policy
from rl_dialog.rewards import choose_rewards
from rl_dialog.rewards.choosing import prepared_rewards
from rl_dialog.rewards.scorers import make_scorers

MakeEnv = Callable[[], Any]
Player = Callable[
    [Policy, Any, str, float | None, Decoding], list[Episode]
]  # policy, tokenizer, its checkpoint, beta


@dataclass(frozen=True)
class CheckpointConfig(HeldOutConfig):
    """What to measure of every checkpoint."""

    env: str = ""
    """environment to talk in: small_talk, multiwoz, wordle, toy_maze, ..., textarena:NAME,
    reasoning_gym:NAME, openenv:URL, or module:Class for your own (envs/README.md)"""
    episodes: int = 128
    """conversations per checkpoint"""
    greedy: bool = True
    """where replies are sampled, also play the same conversations with the likeliest token every time
    (the greedy return)"""
    best_of: int = 0
    """also play them with the reply of the highest Q among so many draws, for policies that have a Q;
    0 does not"""
    rewards: tuple[str, ...] = (
        "vote",
        "rating",
        "logged",
        "sentiment",
        "answer_length",
        "question",
        "repetition",
    )
    """rewards of the generated dialogs to report, besides those that the data was prepared with; a
    module:function that the data was prepared with is reported where it is named here, too"""
    beta: float | None = None
    """another beta at decoding time, for checkpoints whose method has one"""
    replicates: int = 2000
    """bootstrap replicates behind the intervals"""
    samples: int = 3
    """dialogs and contexts shown side by side"""


def check_measures(config: CheckpointConfig) -> None:
    """What can be known to fail before anything is loaded. Raises UserError."""
    if not config.env and not config.data:
        expected = "--env (an environment to talk in), --data (a directory that `prepare` wrote), or both"
        raise UserError(f"nothing to evaluate on: expected {expected}")
    Decoding.of(config).check()
    check_held_out(config)
    choose_rewards(list(config.rewards))  # unknown names now, not after the first checkpoint


def check_beta(config: CheckpointConfig, directories: Sequence[str]) -> None:
    """Raises UserError for a beta that none of the checkpoints acts with."""
    methods = [read_method(directory) for directory in directories]
    if config.beta is not None and not any(method.acts_with_beta for method in methods):
        names = ", ".join(sorted({method_name(method) for method in methods}))
        without = "none of these checkpoints was trained by a method with a beta"
        raise UserError(f"--beta {config.beta:g}: {without} (they are {names})")
    if config.beta is not None:
        check_strength(config.beta)


def play_here(config: CheckpointConfig, make_env: MakeEnv | None) -> Player | None:
    """How episodes are played in this process; None without an environment."""
    if make_env is None:
        return None
    settings = {"episodes": range(config.episodes), "seed": config.seed, "batch_size": config.batch_size}
    return lambda policy, tokenizer, _, __, decoding: play_episodes(
        policy, tokenizer, make_env, decoding=decoding, **settings
    )


def evaluate_checkpoint(
    directory: str, config: CheckpointConfig, play: Player | None, held_out: HeldOut | None
) -> RunResult:
    """Everything about one checkpoint."""
    beta = config.beta if read_method(directory).acts_with_beta else None
    policy = load_for_decoding(directory, beta=beta).to(named_device(config.device))
    tokenizer = load_tokenizer(directory)
    result = RunResult("", directory, method_name(policy.method))
    if beta is not None:
        result.notes["beta"] = f"decoded with {beta:g}"
    if play:
        result.episodes = play(policy, tokenizer, directory, beta, Decoding.of(config))
        result.measures["return"] = Measure.mean([episode.total for episode in result.episodes])
        _count_those_without_return(result)
        for figure, decoding in _other_ways(policy, config).items():
            episodes = play(policy, tokenizer, directory, beta, decoding)
            result.measures[figure] = Measure.mean([episode.total for episode in episodes])
    if held_out:
        score_held_out(result, policy, tokenizer, held_out, config)
    trained = held_out.trained if held_out else []
    settings = held_out.settings if held_out else {}
    what = {"reward_model": config.reward_model, "asked": config.rewards}
    rewards, missing = prepared_rewards(trained, settings, **what)
    result.notes |= {f"reward/{name}": why for name, why in missing.items()}
    scorers = make_scorers([f"reward_model={config.reward_model}"] if config.reward_model else [])
    others = [*config.rewards, *(["learned"] if config.reward_model else [])]
    others = [name for name in others if name not in trained]
    result.score(rewards | choose_rewards(others, scorers=scorers))
    return result


def _count_those_without_return(result: RunResult) -> None:
    """The shares of episodes that stand in no mean, and a note where there are some."""
    ends = [episode.end for episode in result.episodes]
    result.measures |= {end: Measure.mean([each == end for each in ends]) for end in NO_RETURN}
    if any(each in NO_RETURN for each in ends):
        failed, unscored = (ends.count(end) for end in NO_RETURN)
        counts = f"{failed} of {len(ends)} episodes failed and {unscored} were not scored"
        result.notes["return"] = f"{counts}: they have no return and are left out"


def _other_ways(policy: Policy, config: CheckpointConfig) -> dict[str, Decoding]:
    """The same policy in the same conversations with other draws, by figure.

    What says the best of several replies has no likeliest one.
    """
    decoding, decodings = Decoding.of(config), {}
    if config.greedy and config.do_sample and generations(policy, decoding) == 1:
        decodings["return_greedy"] = replace(decoding, do_sample=False)
    if config.best_of > 1 and policy.method.heads.q:
        decodings["return_best_of"] = replace(
            decoding, do_sample=True, num_beams=1, num_generations=config.best_of
        )
    return decodings
