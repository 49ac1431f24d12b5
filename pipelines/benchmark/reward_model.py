"""`benchmark reward_model`: a reward model over replies learned by `fit_reward` and by TRL's RewardTrainer
from the same pairs: how often each is right about pairs that it has not seen, how sure it is of that, and
how long it takes.

    pairs       of small talk, from an oracle that errs (oracle_pairs.py), or `--logs`, any file that
                `fit_reward --logs` reads; a quarter of the conversations is held out
    start       a llama of random weights with one output and a tokenizer of these texts: a folder for each
                of `seeds`, from which all start
    plain       TRL's trainer (`--trl_python`), in a process of its own (trl_rival.py)
    rl_dialog   with TRL's loss (--fitting.noise 0), at once and in parts sorted by length, as it comes (noise
                0.1), and calibrated by a tenth

All take as many steps of as many pairs with the same learning rate, warm-up, weight decay, betas and
clipping, in turn, and leave a folder. Each side then scores the held-out replies by the other's folders, too:
`scores_apart` tells by how much the two differ. Beside the models stand judges that cost nothing, and the
oracle itself.

    accuracy            share of the held-out pairs whose better reply scores higher
    loss                -log P(better preferred), in nats per pair; .693 is knowing nothing
    calibration_error   of P, for each seed

with P = sigmoid(better - worse), and .9 of that + .05 where a tenth of the labels is taken to be random.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from pipelines.benchmark.measuring import Measured, Result, speeds, take_turns
from pipelines.benchmark.oracle_pairs import worth, write_oracle_pairs, write_rows
from pipelines.benchmark.settings import BenchmarkConfig
from pipelines.benchmark.trl_process import TrlProcess
from rl_dialog.data.tokenize import train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.intervals import Estimate, Measure, difference, estimate
from rl_dialog.evaluation.reply_judges import calibration, log_odds_measures, pair_accuracy
from rl_dialog.preferences.replies import Preferences, conversation_of, group_of
from rl_dialog.preferences.reply_fitting import Fitting, Scores, fit, new_reward, plain_judges, score
from rl_dialog.preferences.reply_reward import ReplyRewardSettings, divisions, read_labels
from rl_dialog.rewards.fitted import load_reward_model
from rl_dialog.training.fitting import WARMUP

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT = 0.25  # of the conversations
LONGEST = 512  # tokens of context and reply; pairs with longer ones are left out
PATIENCE = 3600.0  # seconds that TRL may take for a model
TRL, ALIKE = "plain", "rl_dialog, TRL's loss"
OURS: dict[str, dict[str, Any]] = {
    ALIKE: {"noise": 0.0},
    "the same, in 4 parts": {"noise": 0.0, "gradient_accumulation_steps": 4},
    "rl_dialog": {},
    "rl_dialog, calibrated": {"calibration": 0.1},
}


@dataclass(frozen=True)
class Task:
    """What every contender learns from and is measured on."""

    config: BenchmarkConfig
    out: Path
    train: Preferences
    test: Preferences
    too_long: int  # pairs that were left out

    @property
    def steps(self) -> int:
        """Of a model: those of `fit` without calibration."""
        return max(2, round(self.config.epochs * len(self.train.pairs) / self.config.batch_size))

    @property
    def seeds(self) -> range:
        return range(self.config.seed, self.config.seed + self.config.seeds)

    def start(self, seed: int) -> str:
        """The folder that all contenders start from."""
        return str(self.out / f"start-{seed}")

    def folder(self, name: str, seed: int) -> str:
        """Where a contender leaves its model."""
        return str(self.out / f"{re.sub(r'[^a-zA-Z]+', '_', name)}-{seed}")


# seed, steps -> processor seconds from the end of the first step to that of the last
Learn = Callable[[int, int], float]


def measure(config: BenchmarkConfig) -> Result:
    """Pairs/s of learning, what the models are worth on held-out pairs, and whether each side's folders mean
    the same to the other."""
    task = task_of(config)
    with ExitStack() as stack:
        ask = stack.enter_context(_rival(task)).ask if config.trl_python else None
        learn = {TRL: theirs(task, ask)} if ask else {TRL: ours(task, TRL, **OURS[ALIKE])}
        learn |= {name: ours(task, name, **how) for name, how in OURS.items() if ask or name != ALIKE}
        for each in learn.values():
            each(config.seed, 2)  # what is slow the first time
        whole, steps = timed(task, learn)
        scores = {name: [_scores(task, name, seed) for seed in task.seeds] for name in learn}
        apart = scores_apart(task, ask, scores) if ask else {}
    figures = figures_of(task, scores)
    measured: Measured = {
        "a model, from folder to folder": (task.steps * config.batch_size, whole),
        "processor time of its steps but the first": (
            (task.steps - 1) * config.batch_size,
            {name: of for name, of in steps.items() if "calibration" not in OURS.get(name, {})},
        ),
    }
    sizes = {
        "pairs": len(task.train.pairs), "held_out": len(task.test.pairs), "too_long": task.too_long,
        "steps": task.steps,
    }  # fmt: skip
    shown = "\n".join(["", *table(figures), "", f"sizes: {sizes}", f"scores_apart: {apart}", ""])
    if not config.trl_python:
        shown += "No --trl_python: plain is ours with TRL's loss.\n"
    return speeds(config, measured, shown=shown, models=figures, scores_apart=apart, sizes=sizes)


def task_of(config: BenchmarkConfig) -> Task:
    """Writes the folders to start from. Raises UserError for logs without pairs on both sides of the
    split."""
    out = Path(config.output_dir).absolute()
    how = {"seed": config.seed, "flipped": config.flipped}
    path = config.logs or str(write_oracle_pairs(out / "preferences.jsonl", config.labels, **how))
    settings = ReplyRewardSettings(logs=(path,), validation=HELD_OUT, seed=config.seed)
    labels = read_labels(settings)
    replies = {reply.id: reply for pair in labels.pairs for reply in (pair.first, pair.second)}.values()
    texts = (message["content"] for reply in replies for message in conversation_of(reply))
    tokenizer = train_tokenizer(texts, vocab_size=config.vocabulary)
    lengths = {reply.id: _length(conversation_of(reply), tokenizer) for reply in replies}
    fits = lambda pair: max(lengths[pair.first.id], lengths[pair.second.id]) <= LONGEST  # noqa: E731
    short = Preferences([pair for pair in labels.pairs if fits(pair)], [])
    [(train, test)] = divisions(short, settings)
    if not test.pairs:
        raise UserError(f"{path}: expected pairs of several conversations, got none to hold out")
    task = Task(config, out, train, test, len(labels.pairs) - len(short.pairs))
    for seed in task.seeds:
        new_model(config, tokenizer, task.start(seed), seed)
    return task


def _length(conversation: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tokenizer.apply_chat_template([*conversation], return_dict=True)["input_ids"])


def new_model(config: BenchmarkConfig, tokenizer: PreTrainedTokenizerFast, folder: str, seed: int) -> None:
    """A llama of random weights with one output, and its tokenizer."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        intermediate_size=2 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.attention_heads,
        max_position_embeddings=LONGEST,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    LlamaForSequenceClassification(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(task: Task, name: str, **how: Any) -> Learn:
    """What `fit_reward` does, from loading the folder to writing another."""
    config = task.config

    def learn(seed: int, steps: int) -> float:
        ends: list[float] = []
        epochs = steps * config.batch_size / len(task.train.pairs)
        sizes = {"batch_size": config.batch_size, "epochs": epochs, "learning_rate": config.learning_rate}
        reward = new_reward(task.train, task.start(seed), {}, LONGEST, "conversation", seed=seed)
        note = lambda *_: ends.append(time.process_time())  # noqa: E731
        fit(reward, task.train.pairs, settings=Fitting(**sizes, **how), seed=seed, progress=note)
        reward.save_pretrained(task.folder(name, seed))
        return ends[-1] - ends[0]

    return learn


def _rival(task: Task) -> TrlProcess:
    rows = {"train": task.out / "train.jsonl", "test": task.out / "test.jsonl"}
    write_rows(rows["train"], task.train.pairs)
    write_rows(rows["test"], task.test.pairs)
    paths = {name: str(path) for name, path in rows.items()}
    settings = {"trainer": "reward", "threads": task.config.threads, **paths}
    return TrlProcess(task.config.trl_python, settings, patience=PATIENCE)


def theirs(task: Task, ask: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Learn:
    """The same by TRL's trainer."""
    config = task.config

    def learn(seed: int, steps: int) -> float:
        order = {
            "model": task.start(seed), "folder": task.folder(TRL, seed), "seed": seed, "steps": steps,
            "batch_size": config.batch_size, "learning_rate": config.learning_rate,
            "warmup": round(WARMUP * steps), "weight_decay": Fitting.weight_decay, "max_length": LONGEST,
        }  # fmt: skip
        return ask({"train": order})["seconds"]

    return learn


def timed(task: Task, learn: Mapping[str, Learn]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each contender and seed, in turn: of all that it does by the clock, and of its steps but
    the first by the processor, whatever else the machine does."""
    steps: dict[str, list[float]] = {name: [] for name in learn}

    def turn(name: str) -> Callable[[], None]:
        seeds = iter(task.seeds)
        return lambda: steps[name].append(learn[name](next(seeds), task.steps))

    whole = take_turns({name: turn(name) for name in learn}, rounds=task.config.seeds, warmup=0)
    return whole, steps


def _scores(task: Task, name: str, seed: int) -> Scores:
    return score(load_reward_model(task.folder(name, seed)), task.test.replies)


def scores_apart(
    task: Task, ask: Callable[[Mapping[str, Any]], dict[str, Any]], scores: Mapping[str, Sequence[Scores]]
) -> dict[str, float]:
    """Whose folders -> the largest difference between a held-out reply's score by us and by transformers in
    TRL's environment, over all seeds."""
    apart: dict[str, float] = {}
    for name, of_seeds in scores.items():
        for seed, here in zip(task.seeds, of_seeds, strict=True):
            there = ask({"score": task.folder(name, seed)})["scores"]
            pairs = zip(task.test.pairs, there, strict=True)
            wrong = [
                abs(here[reply.id] - value)
                for pair, values in pairs
                for reply, value in zip((pair.first, pair.second), values, strict=True)
            ]
            apart[name] = max(apart.get(name, 0.0), *wrong)
    return apart


def figures_of(task: Task, scores: Mapping[str, Sequence[Scores]]) -> dict[str, dict[str, Any]]:
    """Of each model over all seeds, and of judges that have none: figures on the held-out pairs with 95 %
    intervals over conversations and seeds, and the advantage over `plain`, paired."""
    noises = {name: Fitting(**OURS.get(name, OURS[ALIKE])).noise_of_labels for name in scores}
    measures = {name: [_measures(task, each, noises[name]) for each in of] for name, of in scores.items()}
    figures: dict[str, dict[str, Any]] = {}
    for name, found in measures.items():
        figures[name] = {key: _figure(estimate([each[key] for each in found])) for key in found[0]}
        figures[name]["calibration_error"] = [
            _calibration_error(task, each, noises[name]) for each in scores[name]
        ]
        if name != TRL:
            figures[name]["advantage"] = {
                key: _figure(difference([of[key] for of in found], [of[key] for of in measures[TRL]]))
                for key in found[0]
            }
    judges = plain_judges(task.train, task.test)
    if not task.config.logs:
        judges["the oracle"] = {reply.id: worth(reply) for reply in task.test.replies}
    for name, each in judges.items():
        figures[name] = {"accuracy": _figure(estimate([_measures(task, each)["accuracy"]]))}
    return figures


def _sides(task: Task, scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of first and second, P(first preferred) # (P,), (P,), (P,)"""
    pairs = task.test.pairs
    first, second = (
        np.array([scores[getattr(pair, side).id] for pair in pairs]) for side in ("first", "second")
    )
    return first, second, np.array([pair.preference for pair in pairs])


def _measures(task: Task, scores: Scores, noise: float = 0.0) -> dict[str, Measure]:
    first, second, preferred = _sides(task, scores)
    units: dict[str, int] = {}
    unit = np.array([units.setdefault(group_of(pair.first), len(units)) for pair in task.test.pairs])
    losses = log_odds_measures(first - second, preferred, unit, noise=noise)
    return {"accuracy": pair_accuracy(first, second, preferred, unit), "loss": losses["loss"]}


def _calibration_error(task: Task, scores: Scores, noise: float) -> float:
    first, second, preferred = _sides(task, scores)
    return round(float(calibration(first - second, preferred, noise=noise)[0]), 4)


def _figure(found: Estimate) -> list[float | None]:
    ends = (found.value, found.low, found.high)
    return [None if value is None else round(value, 4) for value in ends]


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each model and judge."""
    lines = [f"{'on held-out pairs':<28}{'accuracy':>24}{'loss':>24}   calibration error, by seed"]
    for name, row in figures.items():
        errors = " ".join(f"{error:.3f}" for error in row.get("calibration_error", ()))
        lines.append(
            f"  {name:<26}{_shown(row['accuracy']):>24}{_shown(row.get('loss')):>24}   {errors}".rstrip()
        )
    lines += ["", f"{'advantage over plain':<28}{'accuracy':>24}{'loss':>24}"]
    for name, row in figures.items():
        if of := row.get("advantage"):
            lines.append(f"  {name:<26}{_shown(of['accuracy']):>24}{_shown(of['loss']):>24}")
    return lines


def _shown(figure: Sequence[float | None] | None) -> str:
    if not figure:
        return ""
    value, low, high = figure
    return f"{value:.3f}" if low is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
