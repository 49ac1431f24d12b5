"""Checkpoints to a report: returns in an environment, scores on held-out logs, rewards, distance to the prior, text, all with intervals over seeds.

    python -m pipelines.evaluate --checkpoints runs/bc-seed* runs/ilql-seed* --env small_talk --data data/chats --out report

A run folder gives its best and its last checkpoint. Runs whose names differ by `seed<k>` at the end are one group.
`rl_dialog/evaluation/README.md` defines every figure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from envs import ENVS
from rl_dialog.config import run, to_dict
from rl_dialog.data.schema import Dialog
from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.generation import Decoding, Episode, generate_replies, load_for_decoding, play_episodes, stream
from rl_dialog.evaluation.intervals import Estimate, Measure, estimate
from rl_dialog.evaluation.metrics import Pairs, find_pairs, pairwise_accuracy
from rl_dialog.evaluation.report import Evaluation, write_replies, write_report
from rl_dialog.evaluation.runs import Entry, find_entries, nearest
from rl_dialog.evaluation.scoring import LoggedReplies, critic_scores, held_out_measures, logged_replies, score_replies
from rl_dialog.evaluation.summary import Answer, Group, RunResult, as_json, baseline_of, compare
from rl_dialog.models.checkpoint import load_prior, method_name, read_method, write_json
from rl_dialog.models.policy import Policy
from rl_dialog.rewards import REWARDS

Player = Callable[[Policy, Any, str, float | None], list[Episode]]  # policy, tokenizer, its checkpoint and beta -> the episodes it played


@dataclass(frozen=True)
class EvaluateConfig(Decoding):
    """What to evaluate, where, and how."""

    checkpoints: tuple[str, ...] = ()
    """run folders (best and last checkpoint each) or checkpoint directories"""
    names: tuple[str, ...] = ()
    """group of each checkpoint; by default its folder's name without a trailing seed<k>"""
    out: str = ""
    """folder for report.md, report.html, metrics.json, replies.csv and plots/"""
    env: str = ""
    """environment to talk in"""
    episodes: int = 128
    """conversations per checkpoint"""
    data: str = ""
    """a directory that `prepare` wrote: held-out replies, contexts, and which rewards were trained on"""
    split: str = ""
    """split of the data to score; by default test, or validation where test is empty"""
    held_out: int = 512
    """most dialogs of the split to score; 0 takes all"""
    contexts: int = 32
    """held-out contexts to answer; 0 answers none"""
    max_length: int = 1024
    """longest row in tokens when scoring held-out dialogs"""
    beta: float | None = None
    """another beta at decoding time, for checkpoints whose method has one"""
    num_workers: int = 0
    """Ray actors that play the episodes; 0 plays them in this process. The result is the same"""
    batch_size: int = 128
    """conversations stepped together"""
    replicates: int = 2000
    """bootstrap replicates behind the intervals"""
    samples: int = 3
    """dialogs and contexts shown side by side"""
    seed: int = 0
    """conversation partners, sampling and bootstrap"""
    device: str = ""
    """where policies run; by default a GPU if there is one (actors use the CPU)"""
    address: str = ""
    """Ray cluster to join; empty starts one here (or joins RAY_ADDRESS)"""
    quiet: bool = False
    """print only the final JSON line"""


@dataclass
class HeldOut:
    """Logged dialogs to score, and contexts to answer. Token rows are made once per tokenizer."""

    split: str
    dialogs: list[Dialog]
    pairs: Pairs
    contexts: list[tuple[Dialog, int]]  # dialog, index of the reply to replace
    trained: list[str]  # rewards with a weight in the training data
    rows: dict[tuple[str, int], LoggedReplies] = field(default_factory=dict)


def main(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates and writes the report; returns headline figures and paths. Raises ValueError for what the user can fix."""
    began = time.perf_counter()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    make_env = _check(config)
    entries = find_entries(config.checkpoints, config.names)
    _check_beta(config, entries)
    held_out = _held_out(config) if config.data else None
    directories = list(dict.fromkeys(entry.directory for entry in entries))
    with _player(config, make_env) as play, _progress(directories, config.quiet) as progress:
        results = {directory: evaluate_checkpoint(directory, config, play, held_out) for directory in progress}
    groups = _groups(entries, results, config)
    references = _references(config, make_env)
    comparisons = {}
    for group in groups:
        if baseline := baseline_of(group, groups):
            comparisons[group.label] = baseline.label, compare(group, baseline, replicates=config.replicates, seed=config.seed)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    trained = held_out.trained if held_out else None
    about = _about(config, held_out)
    evaluation = Evaluation("Evaluation", about, groups, comparisons, references, trained, _folders(entries), config.samples)
    markdown, page = write_report(evaluation, out)
    count = write_replies(out / "replies.csv", groups)
    write_json(out / "metrics.json", _metrics(config, evaluation))
    seconds = round(time.perf_counter() - began, 2)
    paths = {"report": str(markdown), "html": str(page), "metrics": str(out / "metrics.json"), "replies": str(out / "replies.csv")}
    return {**paths, "checkpoints": len(directories), "generated_replies": count, "seconds": seconds, **_headline(evaluation)}


def evaluate_checkpoint(directory: str, config: EvaluateConfig, play: Player | None, held_out: HeldOut | None) -> RunResult:
    """Everything about one checkpoint."""
    beta = config.beta if hasattr(read_method(directory), "beta") else None
    policy = load_for_decoding(directory, beta=beta).to(_device(config))
    tokenizer = load_tokenizer(directory)
    result = RunResult("", directory, method_name(policy.method))
    if beta is not None:
        result.notes["beta"] = f"decoded with {beta:g}"
    if play:
        result.episodes = play(policy, tokenizer, directory, beta)
        result.measures["return"] = Measure.mean([episode.total for episode in result.episodes])
    if held_out:
        _score(result, policy, tokenizer, held_out, config)
        result.answers = _answer(policy, tokenizer, held_out, config)
    result.score(REWARDS)
    return result


def _score(result: RunResult, policy: Policy, tokenizer: Any, held_out: HeldOut, config: EvaluateConfig) -> None:
    """Perplexity, KL and the critic on the held-out dialogs."""
    max_length = min(config.max_length, getattr(policy.config, "max_position_embeddings", None) or config.max_length)
    key = tokenizer.backend_tokenizer.to_str() + tokenizer.chat_template, max_length
    if key not in held_out.rows:
        held_out.rows[key] = logged_replies(held_out.dialogs, tokenizer, max_length=max_length)
    logged, missing = held_out.rows[key], ""
    try:
        prior = load_prior(result.directory)
    except ValueError as error:
        prior, missing = None, str(error)
    scores = score_replies(policy, logged, prior=prior)
    result.measures |= held_out_measures(scores, logged)
    if missing or scores.kl_missing:
        result.notes |= dict.fromkeys(("kl", "kl_per_reply"), missing or scores.kl_missing)
    if not held_out.pairs.contexts:
        result.notes["critic"] = "the held-out dialogs have no context with replies of different reward"
        return
    for name, values in critic_scores(scores).items():
        measure = pairwise_accuracy(values, held_out.pairs)
        result.measures.setdefault("critic", measure)
        result.measures[f"critic/{name}"] = measure


def _answer(policy: Policy, tokenizer: Any, held_out: HeldOut, config: EvaluateConfig) -> list[Answer]:
    """A reply to each held-out context."""
    conversations = [dialog.messages[:i] for dialog, i in held_out.contexts]
    seeds = [stream(config.seed, n, 0) for n in range(len(conversations))]
    replies = generate_replies(policy, tokenizer, conversations, _decoding(config), seeds=seeds, batch_size=config.batch_size)
    answers = []
    for (dialog, i), messages, reply in zip(held_out.contexts, conversations, replies, strict=True):
        context = [{"role": m["role"], "content": m["content"], **({"weight": 0} if m["role"] == "assistant" else {})} for m in messages]
        said = [*context, {"role": "assistant", "content": reply.text}]
        answers.append(Answer(dialog.id, Dialog(f"{dialog.id}:{i}", said, dialog.source, truncated=True), reply, dialog.messages[i]["content"] or ""))
    return answers


def _held_out(config: EvaluateConfig) -> HeldOut:
    manifest = load_manifest(config.data)
    sizes = {split: figures["dialogs"] for split, figures in manifest["splits"].items()}
    split = config.split or next((name for name in ("test", "validation") if sizes.get(name)), "test")
    dialogs = []
    for dialog in read_dialogs(config.data, split):
        dialogs.append(dialog)
        if config.held_out and len(dialogs) == config.held_out:
            break
    if not dialogs:
        raise ValueError(f"{config.data}: expected held-out dialogs in the split {split!r}, found none; the splits hold {sizes}")
    weights = {name: row["weight"] for name, row in manifest["rewards"]["components"].items()}
    return HeldOut(split, dialogs, find_pairs(dialogs), _contexts(dialogs, config.contexts), [name for name, weight in weights.items() if weight])


def _contexts(dialogs: Sequence[Dialog], count: int) -> list[tuple[Dialog, int]]:
    """The last reply of each dialog, every context once."""
    found: dict[str, tuple[Dialog, int]] = {}
    for dialog in dialogs:
        i = dialog.replies[-1] if dialog.replies else 0
        if i and len(found) < count:
            found.setdefault(json.dumps([(m["role"], m["content"]) for m in dialog.messages[:i]]), (dialog, i))
    return list(found.values())


def _groups(entries: Sequence[Entry], results: dict[str, RunResult], config: EvaluateConfig) -> list[Group]:
    groups: dict[tuple[str, str], Group] = {}
    for entry in entries:
        group = groups.setdefault((entry.group, entry.which), Group(entry.group, entry.which, []))
        result = results[entry.directory]
        group.runs.append(replace(result, run=entry.run))
    for group in groups.values():
        methods = sorted({member.method for member in group.runs})
        if len(methods) > 1:
            raise ValueError(f"group {group.label}: expected runs of one method, got {', '.join(methods)}: tell them apart with --names")
        group.summarise(replicates=config.replicates, seed=config.seed)
    return list(groups.values())


@contextmanager
def _player(config: EvaluateConfig, make_env: Callable[[], Any] | None) -> Iterator[Player | None]:
    """How episodes are played: on Ray actors, in this process, or not at all."""
    what = {"episodes": range(config.episodes), "decoding": _decoding(config), "seed": config.seed, "batch_size": config.batch_size}
    if make_env is None:
        yield None
    elif not config.num_workers:
        yield lambda policy, tokenizer, directory, beta: play_episodes(policy, tokenizer, make_env, **what)
    else:
        from rl_dialog.cluster.rollout import Rollouts

        with Rollouts(make_env, config.num_workers, address=config.address or None) as rollouts:
            yield lambda policy, tokenizer, directory, beta: rollouts.play(Path(directory).absolute(), beta=beta, **what)


def _references(config: EvaluateConfig, make_env: Callable[[], Any] | None) -> dict[str, Estimate]:
    """What returns mean: the environment's own reference policies and bounds, where it has some. An env may bring `reference_returns`."""
    if make_env is None:
        return {}
    known = getattr(make_env, "reference_returns", None) or REFERENCES.get(config.env)
    returns = known(config.episodes, config.seed) if known else {}
    return {name: estimate([Measure.mean(values)], replicates=config.replicates, seed=config.seed) for name, values in returns.items()}


def small_talk_references(episodes: int, seed: int) -> dict[str, list[float]]:
    """The policy behind the logs, met by the same conversation partners, and the optimum by search."""
    from envs.small_talk import POLICIES, optimal_return, returns

    behaviour = returns(POLICIES["mixed"], conversations=episodes, seed=seed)
    return {"behaviour policy": behaviour.tolist(), "optimum": [optimal_return()]}


REFERENCES = {"small_talk": small_talk_references}


def _check(config: EvaluateConfig) -> Callable[[], Any] | None:
    """What can be known to fail before anything is loaded; returns the env's constructor."""
    if not config.checkpoints:
        raise ValueError("expected --checkpoints: run folders or checkpoint directories")
    if not config.out:
        raise ValueError("expected --out: a folder for the report")
    if not config.env and not config.data:
        raise ValueError("nothing to evaluate on: expected --env (an environment to talk in), --data (a directory that `prepare` wrote), or both")
    if config.env and config.env not in ENVS:
        raise ValueError(f"unknown env {config.env!r}: expected one of {', '.join(ENVS)}.{nearest(config.env, ENVS)}")
    if config.episodes < 1 or config.batch_size < 1 or config.replicates < 1 or config.num_workers < 0:
        raise ValueError("expected episodes, batch_size and replicates of at least 1 and num_workers of at least 0")
    _decoding(config).check()
    return ENVS[config.env] if config.env else None


def _check_beta(config: EvaluateConfig, entries: Sequence[Entry]) -> None:
    methods = {entry.directory: read_method(entry.directory) for entry in entries}
    if config.beta is not None and not any(hasattr(method, "beta") for method in methods.values()):
        names = sorted({method_name(method) for method in methods.values()})
        raise ValueError(f"--beta {config.beta:g}: none of these checkpoints was trained by a method with a beta (they are {', '.join(names)})")


def _about(config: EvaluateConfig, held_out: HeldOut | None) -> list[str]:
    about = []
    if config.do_sample:
        drawn = f"sampled at temperature {config.temperature:g}, top_k {config.top_k or 'off'}, top_p {config.top_p:g}"
    else:
        drawn = f"by beam search of {config.num_beams}" if config.num_beams > 1 else "greedy"
    how = f"{drawn}, at most {config.max_new_tokens} tokens, seed {config.seed}"
    if config.env:
        about.append(f"{config.episodes} conversations in {config.env}; replies {how}.")
    if held_out:
        what = f"{len(held_out.dialogs)} dialogs of the {held_out.split} split of {Path(config.data).name}"
        about.append(f"Held-out: {what}; {len(held_out.contexts)} of their contexts answered" + ("." if config.env else f", {how}."))
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


def _headline(evaluation: Evaluation) -> dict[str, Any]:
    """For the JSON line: the figures of each group that people ask for first."""
    wanted = ("return", "perplexity", "kl", "critic", "distinct_2", "words")
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


def _decoding(config: EvaluateConfig) -> Decoding:
    return Decoding(*(getattr(config, name) for name in Decoding.__dataclass_fields__))


def _device(config: EvaluateConfig) -> torch.device:
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def _progress(directories: Sequence[str], quiet: bool) -> Iterator[Iterator[str]]:
    with tqdm(directories, desc="evaluate", unit=" checkpoints", disable=True if quiet else None) as bar:  # None: silent unless a terminal
        yield bar


if __name__ == "__main__":
    run(EvaluateConfig, main)
