"""Checkpoints to a report: returns in an environment, scores on held-out logs, rewards, distance to the prior, text, all with intervals over seeds.

    python -m pipelines.evaluate --checkpoints runs/bc-seed* runs/ilql-seed* --env small_talk --data data/chats --output_dir report

A run folder gives its best and its last checkpoint. Runs whose names differ by `seed<k>` at the end are one group.
`rl_dialog/evaluation/README.md` defines every figure. `compare` trains first and makes a whole table, `ab` compares models that were served by
what their users said of them, `analyse` tells what happened in simulated task-oriented dialogs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from envs import text_env
from rl_dialog.config import to_dict
from rl_dialog.data.files import write_json
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.candidates import write_candidates
from rl_dialog.evaluation.episodes import Episode, play_episodes
from rl_dialog.evaluation.generation import Decoding, generations, load_for_decoding
from rl_dialog.evaluation.held_out import (
    HeldOut,
    HeldOutConfig,
    check_held_out,
    read_held_out,
    score_held_out,
)
from rl_dialog.evaluation.intervals import Estimate, Measure, estimate
from rl_dialog.evaluation.report import Evaluation, write_replies, write_report
from rl_dialog.evaluation.runs import Entry, find_entries
from rl_dialog.evaluation.summary import Group, RunResult, as_json, baseline_of, compare
from rl_dialog.models.checkpoint import method_name, read_method
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import Policy
from rl_dialog.rewards import REWARDS, choose_rewards
from rl_dialog.rewards.scorers import make_scorers
from rl_dialog.run import OnCluster, Output, claim_output, run

MakeEnv = Callable[[], Any]
Player = Callable[[Policy, Any, str, float | None, Decoding], list[Episode]]  # policy, tokenizer, its checkpoint and beta -> the episodes it played


@dataclass(frozen=True)
class EvaluateConfig(HeldOutConfig, Output, OnCluster):
    """What to evaluate, where, and how."""

    checkpoints: tuple[str, ...] = ()
    """run folders (best and last checkpoint each) or checkpoint directories"""
    names: tuple[str, ...] = ()
    """group of each checkpoint; by default its folder's name without a trailing seed<k>"""
    env: str = ""
    """environment to talk in: small_talk, multiwoz, or module:Class for one of your own (envs/README.md)"""
    episodes: int = 128
    """conversations per checkpoint"""
    greedy: bool = True
    """where replies are sampled, also play the same conversations with the likeliest token every time (the greedy return)"""
    best_of: int = 0
    """also play them with the reply of the highest Q among so many draws, for policies that have a Q; 0 does not"""
    rewards: tuple[str, ...] = ("vote", "rating", "logged", "sentiment", "answer_length", "question", "repetition")
    """rewards of the generated dialogs to report, besides those that the data was prepared with"""
    beta: float | None = None
    """another beta at decoding time, for checkpoints whose method has one"""
    num_workers: int = 0
    """Ray actors that play the episodes; 0 plays them in this process. The result is the same"""
    side_by_side: bool = False
    """evaluate as many checkpoints at a time as Ray has cores, each on one of them. The result is the same"""
    replicates: int = 2000
    """bootstrap replicates behind the intervals"""
    samples: int = 3
    """dialogs and contexts shown side by side"""


def main(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates and writes the report; returns headline figures and paths. Raises UserError for what the user can fix."""
    began = time.perf_counter()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    make_env = _check(config)
    entries = find_entries(config.checkpoints, config.names)
    _check_beta(config, entries)
    choose_rewards(list(config.rewards))  # unknown names now, not after the first checkpoint
    out = claim_output(config, "evaluate")
    held_out = read_held_out(config) if config.data else None
    directories = list(dict.fromkeys(entry.directory for entry in entries))
    with _progress(directories, config.quiet) as progress:
        results = dict(_each_checkpoint(progress, config, make_env, held_out))
    groups = _groups(entries, results, config)
    references = _references(config, make_env)
    comparisons = {}
    for group in groups:
        if baseline := baseline_of(group, groups):
            comparisons[group.label] = baseline.label, compare(group, baseline, replicates=config.replicates, seed=config.seed)
    trained = held_out.trained if held_out else None
    about = _about(config, held_out)
    evaluation = Evaluation("Evaluation", about, groups, comparisons, references, trained, _folders(entries), config.samples)
    markdown, page = write_report(evaluation, out)
    count = write_replies(out / "replies.csv", groups)
    tables = _write_candidates(groups, out / "candidates") if config.candidates else {}
    write_json(out / "metrics.json", _metrics(config, evaluation))
    seconds = round(time.perf_counter() - began, 2)
    paths = {"report": str(markdown), "html": str(page), "metrics": str(out / "metrics.json"), "replies": str(out / "replies.csv")}
    return {**paths, **tables, "checkpoints": len(directories), "generated_replies": count, "seconds": seconds, **_headline(evaluation)}


def _each_checkpoint(
    directories: tqdm, config: EvaluateConfig, make_env: MakeEnv | None, held_out: HeldOut | None
) -> Iterator[tuple[str, RunResult]]:
    if not config.side_by_side:
        with _player(config, make_env) as play:
            yield from ((directory, evaluate_checkpoint(directory, config, play, held_out)) for directory in directories)
        return
    from rl_dialog.cluster.data import connect
    from rl_dialog.cluster.jobs import each

    names = list(directories.iterable)
    with connect(config.address or None):
        for position, outcome in each(partial(_evaluate_alone, config=config, held_out=held_out), names, waiting=lambda unfinished: None):
            if isinstance(outcome, BaseException):
                raise outcome
            directories.update()
            yield names[position], outcome


def _evaluate_alone(directory: str, config: EvaluateConfig, held_out: HeldOut | None) -> RunResult:
    with _player(config, text_env(config.env) if config.env else None) as play:
        return evaluate_checkpoint(directory, config, play, held_out)


def evaluate_checkpoint(directory: str, config: EvaluateConfig, play: Player | None, held_out: HeldOut | None) -> RunResult:
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
        for figure, decoding in _other_ways(policy, config).items():
            result.measures[figure] = Measure.mean([episode.total for episode in play(policy, tokenizer, directory, beta, decoding)])
    if held_out:
        score_held_out(result, policy, tokenizer, held_out, config)
    trained = [name for name in held_out.trained if name in REWARDS] if held_out else []
    scorers = make_scorers([f"reward_model={config.reward_model}"] if config.reward_model else [])
    asked = ["learned"] if config.reward_model else []
    if "learned" in trained and not asked:
        result.notes["learned"] = "the reward model that the data was prepared with is not known here: --reward_model"
    result.score(choose_rewards([*trained, *config.rewards, *asked], scorers=scorers))
    return result


def _other_ways(policy: Policy, config: EvaluateConfig) -> dict[str, Decoding]:
    """The same policy in the same conversations with other draws, by figure. What says the best of several replies has no likeliest one."""
    asked, ways = Decoding.of(config), {}
    if config.greedy and config.do_sample and generations(policy, asked) == 1:
        ways["return_greedy"] = replace(asked, do_sample=False)
    if config.best_of > 1 and policy.method.heads.q:
        ways["return_best_of"] = replace(asked, do_sample=True, num_beams=1, num_generations=config.best_of)
    return ways


def _groups(entries: Sequence[Entry], results: dict[str, RunResult], config: EvaluateConfig) -> list[Group]:
    groups: dict[tuple[str, str], Group] = {}
    for entry in entries:
        group = groups.setdefault((entry.group, entry.which), Group(entry.group, entry.which, []))
        result = results[entry.directory]
        group.runs.append(replace(result, run=entry.run))
    for group in groups.values():
        methods = sorted({member.method for member in group.runs})
        if len(methods) > 1:
            raise UserError(f"group {group.label}: expected runs of one method, got {', '.join(methods)}: tell them apart with --names")
        group.summarise(replicates=config.replicates, seed=config.seed)
    return list(groups.values())


@contextmanager
def _player(config: EvaluateConfig, make_env: MakeEnv | None) -> Iterator[Player | None]:
    """How episodes are played: on Ray actors, in this process, or not at all."""
    what = {"episodes": range(config.episodes), "seed": config.seed, "batch_size": config.batch_size}
    if make_env is None:
        yield None
    elif not config.num_workers:
        yield lambda policy, tokenizer, directory, beta, decoding: play_episodes(policy, tokenizer, make_env, decoding=decoding, **what)
    else:
        from rl_dialog.cluster.rollout import Rollouts

        with Rollouts(make_env, config.num_workers, address=config.address or None) as rollouts:
            yield lambda policy, tokenizer, directory, beta, decoding: rollouts.play(Path(directory).absolute(), beta=beta, decoding=decoding, **what)


def _references(config: EvaluateConfig, make_env: MakeEnv | None) -> dict[str, Estimate]:
    """What returns mean: the environment's own reference policies and bounds, where it has some. An env may bring `reference_returns`."""
    if make_env is None:
        return {}
    known = getattr(make_env, "reference_returns", None) or REFERENCES.get(config.env)
    returns = known(config.episodes, config.seed) if known else {}
    return {name: estimate([Measure.mean(values)], replicates=config.replicates, seed=config.seed) for name, values in returns.items()}


def small_talk_references(episodes: int, seed: int) -> dict[str, list[float]]:
    """The policy behind the logs and the best of those that it is a mixture of, met by the same conversation partners, and the optimum by search."""
    from envs.small_talk import POLICIES, optimal_return, returns

    behaviour, best = (returns(POLICIES[name], conversations=episodes, seed=seed).tolist() for name in ("mixed", "friend"))
    return {"behaviour policy": behaviour, "best inside the logs": best, "optimum": [optimal_return()]}


REFERENCES = {"small_talk": small_talk_references}


def _check(config: EvaluateConfig) -> MakeEnv | None:
    """What can be known to fail before anything is loaded; returns the env's constructor."""
    if not config.checkpoints:
        raise UserError("expected --checkpoints: run folders or checkpoint directories")
    if not config.env and not config.data:
        raise UserError("nothing to evaluate on: expected --env (an environment to talk in), --data (a directory that `prepare` wrote), or both")
    make_env = text_env(config.env) if config.env else None
    if config.episodes < 1 or config.batch_size < 1 or config.replicates < 1 or config.num_workers < 0 or config.best_of < 0:
        raise UserError("expected episodes, batch_size and replicates of at least 1, and num_workers and best_of of at least 0")
    if config.side_by_side and config.num_workers:
        raise UserError("expected side_by_side or num_workers: checkpoints that are evaluated at the same time play their own episodes")
    Decoding.of(config).check()
    check_held_out(config)
    return make_env


def _check_beta(config: EvaluateConfig, entries: Sequence[Entry]) -> None:
    methods = {entry.directory: read_method(entry.directory) for entry in entries}
    if config.beta is not None and not any(method.acts_with_beta for method in methods.values()):
        names = sorted({method_name(method) for method in methods.values()})
        raise UserError(f"--beta {config.beta:g}: none of these checkpoints was trained by a method with a beta (they are {', '.join(names)})")


def _about(config: EvaluateConfig, held_out: HeldOut | None) -> list[str]:
    about = []
    if config.do_sample:
        drawn = f"sampled at temperature {config.temperature:g}, top_k {config.top_k or 'off'}, top_p {config.top_p:g}"
    else:
        drawn = f"by beam search of {config.num_beams}" if config.num_beams > 1 else "greedy"
    how = f"{drawn}, at most {config.max_new_tokens} tokens, seed {config.seed}"
    if config.env:
        best = f"; the best of {config.best_of} has the highest Q among so many draws" if config.best_of else ""
        about.append(f"{config.episodes} conversations in {config.env}; replies {how}{best}.")
    if held_out:
        what = f"{len(held_out.dialogs)} dialogs of the {held_out.split} split of {Path(config.data).name}"
        about.append(f"Held-out: {what}; {len(held_out.contexts)} of their contexts answered" + ("." if config.env else f", {how}."))
    if config.ope:
        discounted = "not discounted" if config.gamma == 1 else f"discounted by {config.gamma:g} per {config.discount}"
        about.append(f"Estimates from the logs: {', '.join(config.ope)}, {discounted}.")
    return about


def _metrics(config: EvaluateConfig, evaluation: Evaluation) -> dict[str, Any]:
    """metrics.json: everything the report says, as numbers."""

    def figures(estimates: dict[str, Estimate]) -> dict[str, Any]:
        return {name: as_json(value) for name, value in estimates.items()}

    groups = [
        {
            "label": group.label,
            "group": group.name,
            "which": group.which,
            "method": group.method,
            "figures": figures(group.estimates),
            "runs": [
                {"run": r.run, "checkpoint": r.directory, "figures": {name: m.value for name, m in r.measures.items()}, "notes": r.notes}
                for r in group.runs
            ],
        }
        for group in evaluation.groups
    ]
    differences = {label: {"baseline": name, "figures": figures(changes)} for label, (name, changes) in evaluation.comparisons.items()}
    return {
        "settings": to_dict(config),
        "trained_rewards": evaluation.trained,
        "references": figures(evaluation.references),
        "groups": groups,
        "differences": differences,
    }


def _write_candidates(groups: Sequence[Group], directory: Path) -> dict[str, list[str]]:
    """One CSV per checkpoint, as in the paper; returns their paths for the JSON line."""
    directory.mkdir(exist_ok=True)
    paths = []
    for group in groups:
        for result in group.runs:
            name = re.sub(r"[^\w.=-]+", "-", "-".join(part for part in (result.run or group.name, group.which) if part))
            paths.append(directory / f"{name}.csv")
            write_candidates(paths[-1], result.candidates)
    return {"candidates": [str(path) for path in paths]}


def _headline(evaluation: Evaluation) -> dict[str, Any]:
    """For the JSON line: the figures of each group that people ask for first."""
    tops = dict.fromkeys(name for group in evaluation.groups for name in group.estimates if name.startswith(("top/", "ope/")))
    wanted = ("return", "return_greedy", "return_best_of", "perplexity", "kl", "critic", "distinct_2", "words", *tops)
    figures = {
        group.label: {name: [value.value, value.low, value.high] for name in wanted if (value := group.estimates.get(name))}
        for group in evaluation.groups
    }
    changes = {
        label: {"baseline": name, **{key: [d.value, d.low, d.high] for key in wanted if (d := found.get(key))}}
        for label, (name, found) in evaluation.comparisons.items()
    }
    return {"figures": figures, "differences": changes, "references": {name: value.value for name, value in evaluation.references.items()}}


def _folders(entries: Sequence[Entry]) -> dict[str, list[Path]]:
    folders: dict[str, list[Path]] = {}
    for entry in entries:
        known = folders.setdefault(entry.group, [])
        if entry.folder not in known:
            known.append(entry.folder)
    return folders


@contextmanager
def _progress(directories: Sequence[str], quiet: bool) -> Iterator[tqdm]:
    with tqdm(directories, desc="evaluate", unit=" checkpoints", disable=True if quiet else None) as bar:  # None: silent unless a terminal
        yield bar


if __name__ == "__main__":
    run(EvaluateConfig, main)
