"""`benchmark rlhf`: learning from feedback where the truth is known. How far does a policy get on a learned
reward before the true one falls behind, and what helps?

The world is small talk: its own reward, as a mean over what the text leaves open, judges any reply to any
context. An oracle with that reward answers in place of people, and all else is done as with people, by the
same verbs:

    logs -> prepare -> train bc, the prior
    two replies of the prior to each of `labels` contexts -> prefer_replies --oracle -> fit_reward
    online --contexts --rewards.learned 1, for each of `kl_weights`; and once more on an ensemble
    a reply of what was learned with the smallest of them and one of the prior -> as many labels more
        -> fit_reward -> online once more

Every policy on the way is measured on the same held-out contexts: KL(policy || prior) per reply, exact over
the vocabulary at the tokens that it drew, the true reward, and the learned one above the prior's. Beside them
stands the best of n replies of the prior by the same reward model, KL at most log n - (n - 1) / n (Stiennon
et al. 2020). The plot is that of Gao et al. 2022 (arXiv 2210.10760). Runs and models stay in the folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import comb, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from envs.small_talk import expected_reward, write_logs
from pipelines import fit_reward, online, prefer_replies, stages
from pipelines.benchmark.measuring import Result
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.cluster.data import connect
from rl_dialog.data.schema import Dialog
from rl_dialog.data.shards import read_dialogs
from rl_dialog.data.tokenize import Row, encode_prompt, load_tokenizer
from rl_dialog.evaluation.candidates import candidate_replies, reward_table
from rl_dialog.evaluation.generation import Decoding, Reply, load_for_decoding, prompt_limits
from rl_dialog.evaluation.plots import COLOURS, GREY, plain
from rl_dialog.evaluation.scoring import LoggedReplies, score_replies
from rl_dialog.methods import RLOO
from rl_dialog.models.checkpoint import load_prior, resolve
from rl_dialog.models.prior import Prior
from rl_dialog.preferences.reply_queries import asked_contexts
from rl_dialog.rewards.fitted import ReplyReward, load_reward_model
from rl_dialog.training.over_optimisation import OverOptimisation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rl_dialog.models.policy import Policy

TRUE = "envs.small_talk:expected_reward"
DIALOGS = 2000  # logged conversations
CLONE_STEPS = 0  # updates of the prior; 0: those of the quickstart
POINTS = 6  # policies of a run that are measured
DRAWS = 32  # replies of the prior to each held-out context, of which the best of n are chosen
LEARNING_RATE = 1e-3  # of `online`, as in tune_configs/online_rloo.yaml
BEST_OF = "best of n"


@dataclass(frozen=True)
class Point:
    """What the replies of one policy to the held-out contexts are worth."""

    step: int  # rounds of `online`; of the best of n: n
    kl: float  # nats per reply from the prior
    true: float
    true_stderr: float
    learned: float  # by the reward that it learns from, above the prior's replies
    learned_stderr: float


@dataclass(frozen=True)
class Curve:
    """A run on its way from the prior."""

    name: str
    points: list[Point]
    alarm: int | None = None  # the first step at which the over-optimisation alarm sounds

    @property
    def best(self) -> Point:
        """Where the true reward is highest."""
        return max(self.points, key=lambda point: point.true)


@dataclass(frozen=True)
class Judge:
    """A reward model of the labels so far."""

    folder: Path
    model: ReplyReward
    pairs: int
    # On held-out pairs the share that it orders as labelled, and its 95 % interval; None where too few are.
    accuracy: Sequence[float | None]

    def __str__(self) -> str:
        value, low, high = ("?" if value is None else f"{value:.3f}" for value in self.accuracy)
        return f"{self.pairs} pairs, {value} [{low}, {high}] of held-out ones in order"


def measure(config: BenchmarkConfig) -> Result:
    """All curves, a table of where they are best and where they end, and the plot."""
    began, out = time.process_time(), Path(config.output_dir).absolute()
    data, clone = cloned(config, out)
    feedback = Feedback(config, out, data, clone, HeldOut.of(data, clone, config.held_out, config.seed))
    feedback.ask((clone, clone))
    judges = [feedback.fit(f"member{k}", seed=config.seed + k) for k in range(config.members)]
    least = min(config.kl_weights)
    curves = [best_of_n(feedback.held_out, judges[0].model)]
    curves += [feedback.learned(judges[:1], c, f"c {c:g}") for c in config.kl_weights]
    if config.members > 1:
        curves.append(feedback.learned(judges, least, f"ensemble of {config.members}, c {least:g}"))
    feedback.ask((feedback.run(f"c {least:g}"), clone))
    judges.append(feedback.fit("again", seed=config.seed))
    curves.append(feedback.learned(judges[-1:], least, f"second round of labels, c {least:g}"))
    minutes = (time.process_time() - began) / 60
    told = [{"pairs": each.pairs, "accuracy": each.accuracy} for each in judges]
    size = f"{len(feedback.held_out.contexts)} held-out contexts, {config.online_rounds} rounds of 64 replies"
    shown = "\n".join([*table(curves), "", f"{size}; {minutes:.1f} minutes of CPU in this process"])
    headline = {
        "ends": {curve.name: asdict(curve.points[-1]) for curve in curves},
        "cpu_minutes": round(minutes, 1),
    }
    report = {"curves": [asdict(curve) for curve in curves], "reward_models": told}
    return Result(report, shown, headline, plot(curves))


def cloned(config: BenchmarkConfig, out: Path, model: Sequence[str] = ()) -> tuple[Path, Path]:
    """Logs, a data directory of them, and the clone of what they say: (data, run folder). `model`: flags of
    another one than the quickstart's."""
    (out / "logs").mkdir(parents=True)
    write_logs(out / "logs" / "small_talk.jsonl", dialogs=DIALOGS, seed=config.seed + 1)
    with connect("local", num_cpus=max(2, config.threads)):
        sizes = ("--vocab_size", "1024", "--max_length", "512", "--seed", str(config.seed))
        stages.prepare_logs(str(out / "logs"), out / "data", "--rewards.logged", "1", *sizes)
    where = out / "data", out / "bc", config.seed
    steps = ("--max_steps", str(CLONE_STEPS)) if CLONE_STEPS else ()
    stages.train_run(
        stages.train_config(*where, [*model, *steps])
        if model
        else stages.train_config_of_file(stages.CONFIGS / "quickstart_bc.yaml", *where, steps=CLONE_STEPS)
    )
    return out / "data", out / "bc"


@dataclass(frozen=True)
class Feedback:
    """Labels, reward models and policies in one folder."""

    config: BenchmarkConfig
    out: Path
    data: Path
    clone: Path
    held_out: HeldOut

    def ask(self, policies: tuple[Path, Path]) -> None:
        """The oracle compares a reply of each of two policies to each of `labels` contexts, in a log that
        keeps what it said before."""
        config = prefer_replies.PreferRepliesConfig(
            output_dir=str(self.out / "labels"),
            source="checkpoints",
            data=str(self.data),
            checkpoints=tuple(map(str, policies)),
            splits=("train", "validation"),
            contexts=self.config.labels,
            oracle=TRUE,
            seed=self.config.seed,
            quiet=True,
        )
        prefer_replies.main(config)

    def fit(self, name: str, *, seed: int) -> Judge:
        """A reward model of all labels so far."""
        folder = self.out / f"reward-{name}"
        where = {"run": str(self.out / "labels"), "output_dir": str(folder)}
        found = fit_reward.main(fit_reward.FitRewardConfig(**where, seed=seed, device="cpu", quiet=True))
        accuracy = found.get("accuracy") or (None, None, None)
        judge = Judge(folder, load_reward_model(folder), found["pairs"], accuracy)
        self._say(f"a reward model of {judge}")
        return judge

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.out / ("online-" + name.replace(",", "").replace(" ", "_"))

    def learned(self, judges: Sequence[Judge], c: float, name: str) -> Curve:
        """Learns from the mean of the judges, as `online` does, and measures what was saved on the way."""
        online.main(self._online(judges, c, name))
        run, models = self.run(name), [judge.model for judge in judges]
        points = [self.held_out.point(self.held_out.start, models, step=0)]
        alarm, sounded = OverOptimisation(), None
        alarm.look(0, _as_evaluation(points[0]))
        for step, place in _checkpoints(run):
            point = self.held_out.point(load_for_decoding(place), models, step=step, prior=load_prior(run))
            points.append(point)
            if alarm.look(step, _as_evaluation(point)) and sounded is None:
                sounded = step
            worth = f"true {point.true:+.3f}, learned {point.learned:+.2f}"
            self._say(f"{name}, {step:>4} rounds: KL {point.kl:6.2f}, {worth}")
        return Curve(name, points, sounded)

    def _online(self, judges: Sequence[Judge], c: float, name: str) -> online.OnlineConfig:
        rounds = self.config.online_rounds
        return online.OnlineConfig(
            model_name_or_path=str(self.clone),
            contexts=str(self.data),
            rewards={"learned": 1.0, TRUE: 0.0},
            scorers=tuple(f"reward_model={judge.folder}" for judge in judges),
            method=RLOO(c=c),
            output_dir=str(self.run(name)),
            max_steps=rounds,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            eval_steps=0,
            save_steps=max(1, rounds // POINTS),
            save_total_limit=rounds,
            env_episodes=64,
            seed=self.config.seed,
            report_to="none",
            device="cpu",
            quiet=True,
        )

    def _say(self, text: str) -> None:
        if not self.config.quiet:
            print(text, flush=True)


@dataclass(frozen=True)
class HeldOut:
    """Contexts of the validation split, and the policy that all others began as."""

    contexts: list[list[dict[str, str]]]
    tokenizer: PreTrainedTokenizerFast
    start: Policy
    seed: int

    @classmethod
    def of(cls, data: Path, clone: Path, count: int, seed: int) -> HeldOut:
        """At most `count` different contexts."""
        asked = asked_contexts(read_dialogs(data, "validation"), most=count, seed=seed)
        contexts = [[dict(message) for message in each.reply.context] for each in asked]
        return cls(contexts, load_tokenizer(resolve(clone)), load_for_decoding(clone), seed)

    @cached_property
    def of_the_start(self) -> list[list[Reply]]:
        """A reply of the start to each."""
        return self.replies(self.start)

    def replies(self, policy: Policy, count: int = 1) -> list[list[Reply]]:
        """(C, count) drawn with the same seeds from every policy."""
        drawing = {"count": count, "seed": self.seed, "batch_size": 128}
        return candidate_replies(policy, self.tokenizer, self.contexts, Decoding(), **drawing)

    def truth(self, replies: Sequence[Sequence[Reply]]) -> np.ndarray:
        """(C, N) what the world pays for each."""
        return np.array(
            [[self._worth(context, reply.text) for reply in row] for context, row in self._pairs(replies)]
        )

    def learned(self, replies: Sequence[Sequence[Reply]], models: Sequence[ReplyReward]) -> np.ndarray:
        """(C, N) the mean of what the models say of each."""
        return np.mean([reward_table(model, self.contexts, replies) for model in models], axis=0)

    def divergence(self, policy: Policy, prior: Prior, replies: Sequence[Sequence[Reply]]) -> float:
        """Mean over first replies of the sum of KL(policy || prior) at their tokens: nats per reply."""
        limits, rows = prompt_limits(policy, Decoding()), []
        for context, [reply, *_] in self._pairs(replies):
            end = [self.tokenizer.eos_token_id] if reply.finished else []
            prompt = encode_prompt(context, self.tokenizer, **limits)
            rows.append(Row.of_reply(prompt, [*reply.tokens, *end]))
        logged = LoggedReplies(rows, np.arange(len(rows)), len(rows))
        return float(score_replies(policy, logged, prior=prior).kl.mean())

    def point(
        self, policy: Policy, models: Sequence[ReplyReward], *, step: int, prior: Prior | None = None
    ) -> Point:
        """One policy. Without a `prior` it is the start itself, at no distance."""
        replies = self.replies(policy)
        kl = 0.0 if prior is None else self.divergence(policy, prior, replies)
        above = self.learned(replies, models) - self.learned(self.of_the_start, models)
        return Point(step, kl, *_mean(self.truth(replies)), *_mean(above))

    def _pairs(self, replies: Sequence[Sequence[Reply]]) -> zip[tuple[Any, Sequence[Reply]]]:
        return zip(self.contexts, replies, strict=True)

    @staticmethod
    def _worth(context: Sequence[dict[str, str]], text: str) -> float:
        said = {"role": "assistant", "content": text}
        return expected_reward(Dialog("held out", [*({**each} for each in context), said]))[-1]


def best_of_n(held_out: HeldOut, model: ReplyReward) -> Curve:
    """The best of 1, 2, 4, ... replies of the prior by the model, which no learning takes."""
    replies = held_out.replies(held_out.start, DRAWS)
    truth, scores = held_out.truth(replies), held_out.learned(replies, [model])
    points = []
    for n in (2**k for k in range(DRAWS.bit_length())):
        chosen = best_of(scores, truth, n), best_of(scores, scores, n) - scores.mean(1)
        points.append(Point(n, log(n) - (n - 1) / n, *_mean(chosen[0]), *_mean(chosen[1])))
    return Curve(BEST_OF, points)


def best_of(scores: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """(C,) the value of the reply of the highest score among n, on average over all ways to choose n of the N
    replies: (C, N), (C, N). The i-th lowest (from 0) is the highest of comb(i, n - 1) of comb(N, n) choices.
    """
    total = scores.shape[1]
    odds = np.array([comb(i, n - 1) / comb(total, n) for i in range(total)])
    return np.take_along_axis(values, np.argsort(scores, axis=1, kind="stable"), axis=1) @ odds


def table(curves: Sequence[Curve]) -> list[str]:
    """Markdown: where each curve is best and where it ends, true rewards with 95 % intervals."""
    lines = [
        "| policy | best true reward | at KL | true reward at the end | at KL | learned, above the prior | "
        "the alarm sounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve in curves:
        best, last = curve.best, curve.points[-1]
        alarm = "" if curve.name == BEST_OF else "never" if curve.alarm is None else f"round {curve.alarm}"
        ends = f"{_shown(last)} | {last.kl:.2f} | {last.learned:+.2f}"
        lines.append(f"| {curve.name} | {_shown(best)} | {best.kl:.2f} | {ends} | {alarm} |")
    return lines


def plot(curves: Sequence[Curve]) -> Figure:
    """The true reward and the learned one against the divergence, which is on a scale of square roots."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    titles = {"true": "true reward of a reply", "learned": "learned reward, above the prior's"}
    colours = dict(zip([each.name for each in curves if each.name != BEST_OF], COLOURS, strict=False))
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for curve in curves:
            kl = [max(0.0, point.kl) for point in curve.points]
            values = [getattr(point, name) for point in curve.points]
            reference = curve.name == BEST_OF
            look = {"color": GREY, "linestyle": "--"} if reference else {"color": colours[curve.name]}
            axes.plot(kl, values, marker="o", markersize=2.5, linewidth=1.5, label=curve.name, **look)
        axes.set_xscale("function", functions=(np.sqrt, np.square))
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("KL from the prior, nats per reply", fontsize=9)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        plain(axes)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="best")
    return figure


def _checkpoints(run: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.name.rpartition("-")[2]), path) for path in run.glob("checkpoint-*"))


def _mean(values: np.ndarray) -> tuple[float, float]:
    """The mean over contexts and its standard error."""
    flat = values.reshape(len(values), -1).mean(1)
    return float(flat.mean()), float(flat.std(ddof=1) / np.sqrt(len(flat)))


def _as_evaluation(point: Point) -> dict[str, float]:
    return {
        "eval/return": point.learned,
        "eval/true_return": point.true,
        "eval/true_return_stderr": point.true_stderr,
    }


def _shown(point: Point) -> str:
    return f"{point.true:+.3f} ± {1.96 * point.true_stderr:.3f}"
