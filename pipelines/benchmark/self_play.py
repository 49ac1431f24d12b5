"""`benchmark self_play`: what comes of the rewards of bots that talk to each other, by REINFORCE and by psi.

    logs -> prepare -> for each of `seeds`: bc, the clone, which is the prior and the other side of all talks
    reinforce   online --contexts --self_play against the clone, for `online_rounds` of 64 conversations
    psi         as many conversations of the clone with itself -> prepare -> train, from the clone
    vhrl        where the clone draws a latent for each message (`family` vhred): as reinforce, and latents
                learn to be chosen; at the same time as words (joint), in turn, or alone (manager)

once for each of three rewards of the bot's own replies (sentiment, question, repetition in the conversation;
Jaques et al. 2019, Saleh et al. 2019) and for their mix. Both learn towards the same: the reward, in spreads
of its returns, less c times the divergence from the clone. Then every policy talks with the clone from the
same openings, which nothing was learned from, and its replies are judged by all three rewards, by their
perplexity to the clone (with latents over all of them, by importance sampling) and by their words.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipelines import online, stages
from pipelines.benchmark.measuring import Result
from pipelines.benchmark.rlhf import cloned
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.cluster.data import connect
from rl_dialog.data.files import write_text_atomically
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.generation import Decoding, load_for_decoding
from rl_dialog.evaluation.latents import latent_figures
from rl_dialog.evaluation.metrics import distinct
from rl_dialog.evaluation.openings import Openings, RewardMix
from rl_dialog.evaluation.plots import COLOURS, GREY, plain
from rl_dialog.evaluation.rollouts import Playing
from rl_dialog.evaluation.scoring import logged_replies, score_replies
from rl_dialog.methods.method import Method
from rl_dialog.methods.reinforce import Reinforce
from rl_dialog.methods.vhrl import VHRL
from rl_dialog.models.checkpoint import resolve
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.words import words

GOALS = {  # what is learned from, by name: rewards and their weights
    "sentiment": {"reply_sentiment": 1.0},
    "question": {"question": 1.0},
    "repetition": {"repetition": 1.0},
    "mix": {"reply_sentiment": 0.3, "question": 0.2, "repetition": 0.5},
}
JUDGES = {name: weight for goal in GOALS.values() for name, weight in goal.items()}
TURNS = 3  # replies of each side
A_ROUND = 64  # conversations
C = 0.1  # of both: spreads of returns that a nat away from the clone costs
LEARNING_RATE = 1e-3  # of `online`, as in tune_configs/online_reinforce.yaml
STEPS = 0  # updates of psi; 0: those of the quickstart
CLONES = {  # flags of `train`; of llama the quickstart's
    "llama": (),
    "vhred": (
        *("--model.family", "vhred", "--model.width", "128", "--model.context", "512"),
        *("--model.bow_weight", "0.5"),
        *("--max_steps", "900", "--learning_rate", "0.004"),
        *("--report_to", "none", "--cpus_per_worker", "1", "--quiet"),
    ),
}
CLONE, PSI = "bc", "psi"
BY_TALKING = {"reinforce": Reinforce(c=C)}
BY_LATENTS = {f"vhrl {who}": VHRL(c=C, learns=who) for who in ("joint", "decoupled", "manager")}


@dataclass(frozen=True)
class Talked:
    """What one policy said to the clone."""

    learner: str  # `CLONE`, `PSI`, or who learned by talking
    goal: str  # one of GOALS; "" of the clone
    seed: int
    rewards: dict[str, float]  # of JUDGES: the mean over replies
    perplexity: float  # of its replies, to the clone
    distinct: float  # different words / words
    words: float  # of a reply
    commonest: str  # the reply that it gives most often
    share: float  # of its replies

    def goal_reached(self, goal: str) -> float:
        """The weighted sum that the goal means, per reply."""
        return sum(weight * self.rewards[name] for name, weight in GOALS[goal].items())


def measure(config: BenchmarkConfig) -> Result:
    """What all policies say, a table and the plot."""
    began, out = time.process_time(), Path(config.output_dir).absolute()
    talked = []
    for seed in range(config.seed, config.seed + config.seeds):
        talked += Bots(replace(config, seed=seed), out / f"seed{seed}").talk()
    minutes = (time.process_time() - began) / 60
    sizes = f"{config.seeds} seeds, {config.online_rounds} rounds of {A_ROUND} conversations"
    told = f"{sizes}; {config.held_out} conversations each; {minutes:.1f} minutes of CPU in this process"
    headline = {f"{each.goal}, {each.learner}, seed {each.seed}": asdict(each) for each in talked}
    shown = "\n".join([*table(talked), "", told])
    return Result({"talked": [asdict(each) for each in talked]}, shown, headline, plot(talked))


@dataclass(frozen=True)
class Bots:
    """The clone of a seed and all that learns from talks with it, in one folder."""

    config: BenchmarkConfig
    out: Path

    def talk(self) -> list[Talked]:
        """The clone, and each learner of each goal. What is judged is written, and not made again."""
        data, clone, judged = self.out / "data", self.out / CLONE, self.out / "talked.jsonl"
        lines = judged.read_text(encoding="utf-8").splitlines() if judged.exists() else []
        talked = [Talked(**json.loads(line)) for line in lines]
        if not talked:
            shutil.rmtree(self.out, ignore_errors=True)
            cloned(self.config, self.out, CLONES[self.config.family])
            self._own_talks(data, clone)
        learners: dict[str, Method | None] = {**BY_TALKING, PSI: None}
        if load_for_decoding(clone).has_latents:
            learners = {**BY_TALKING, **BY_LATENTS, PSI: None}
        todo = [(CLONE, ""), *((learner, goal) for goal in GOALS for learner in learners)]
        for learner, goal in todo[len(talked) :]:
            run = clone if learner == CLONE else self.out / f"{learner.replace(' ', '-')}-{goal}"
            if learner == PSI:
                self._psi(run, clone, goal)
            elif learner != CLONE:
                self._online(run, data, clone, goal, learners[learner])
            talked.append(self.judge(run, data, clone, learner, goal))
            write_text_atomically(judged, "".join(json.dumps(asdict(each)) + "\n" for each in talked))
        return talked

    def _own_talks(self, data: Path, clone: Path) -> None:
        """Logs of the clone with itself, as many as REINFORCE learns from, for psi."""
        talks = self._dialogs(clone, data, clone, "train", self.config.online_rounds * A_ROUND)
        lines = [
            replace(talk, meta={**talk.meta, "group": talk.messages[0]["content"][:200]}).to_json() + "\n"
            for talk in talks
        ]
        (self.out / "talks").mkdir()
        write_text_atomically(self.out / "talks" / "talks.jsonl", "".join(lines))

    def _online(self, run: Path, data: Path, clone: Path, goal: str, method: Method) -> None:
        shutil.rmtree(run, ignore_errors=True)
        settings = online.OnlineConfig(
            model_name_or_path=str(clone),
            contexts=str(data),
            self_play=True,
            self_play_turns=TURNS,
            opponent_lag=-1,
            learner_role="assistant",
            rewards=GOALS[goal],
            method=method,
            output_dir=str(run),
            max_steps=self.config.online_rounds,
            learning_rate=LEARNING_RATE,
            eval_steps=0,
            seed=self.config.seed,
            report_to="none",
            device="cpu",
            quiet=True,
        )
        online.main(settings)

    def _psi(self, run: Path, clone: Path, goal: str) -> None:
        place, seed = self.out / f"data-{goal}", self.config.seed
        for begun in (run, place):
            shutil.rmtree(begun, ignore_errors=True)
        flags = [word for name, weight in GOALS[goal].items() for word in (f"--rewards.{name}", str(weight))]
        with connect("local", num_cpus=max(2, self.config.threads)):
            sizes = ("--tokenizer", str(resolve(clone)), "--max_length", "512", "--seed", str(seed))
            stages.prepare_logs(str(self.out / "talks"), place, *flags, *sizes)
        how = {"start": clone, "steps": STEPS}
        file = stages.CONFIGS / "quickstart_psi.yaml"
        settings = stages.train_config_of_file(file, place, run, seed, **how)
        stages.train_run(replace(settings, method=replace(settings.method, c=C)))

    def judge(self, run: Path, data: Path, clone: Path, learner: str, goal: str) -> Talked:
        """What a policy says to the clone from openings of the validation split."""
        talks = self._dialogs(run, data, clone, "validation", self.config.held_out)
        mix = RewardMix({name: REWARDS[name] for name in JUDGES}, JUDGES, world_pays=False)
        for talk in talks:
            mix(talk)
        said = [talk.messages[i] for talk in talks for i in talk.replies]
        texts = [message["content"] for message in said]
        rewards = {
            name: float(np.mean([message["rewards"].get(name) or 0.0 for message in said])) for name in JUDGES
        }
        logged = logged_replies(talks, load_tokenizer(resolve(clone)), max_length=512)
        prior = load_for_decoding(clone)
        scores = latent_figures(prior, logged) if prior.has_latents else score_replies(prior, logged)
        [(commonest, times)] = Counter(texts).most_common(1)
        found = Talked(
            learner,
            goal,
            self.config.seed,
            rewards,
            perplexity=float(np.exp(scores.lm_nll.sum() / scores.tokens.sum())),
            distinct=distinct(texts, 1),
            words=float(np.mean([len(words(text)) for text in texts])),
            commonest=commonest,
            share=times / len(texts),
        )
        if not self.config.quiet:
            print(json.dumps(asdict(found)), flush=True)
        return found

    def _dialogs(self, run: Path, data: Path, clone: Path, split: str, count: int) -> list[Dialog]:
        """What the policy of a run says to the clone, as the assistant sees it."""
        playing = Playing(
            Openings(str(data), split, TURNS),
            Decoding(),
            group_size=1,
            seed=self.config.seed,
            self_play=True,
            learner_role="assistant",
            threads=self.config.threads,
        )
        policies = load_for_decoding(run), load_for_decoding(clone)
        talks: list[Dialog] = []
        for unit in playing.units(range(count)):
            played = playing(policies[0], load_tokenizer(resolve(run)), unit, policies[1])
            talks += [each.dialog for each in played if each.dialog.meta["role"] == "assistant"]
        return talks


def table(talked: Sequence[Talked]) -> list[str]:
    """Markdown: means over seeds with the lowest and the highest."""
    names = ["policy", "learned from", *JUDGES, "perplexity", "distinct words", "words", "commonest reply"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (learner, goal), each in _by_policy(talked).items():
        figures = [_mean([one.rewards[name] for one in each]) for name in JUDGES]
        texts = ("perplexity", "distinct", "words")
        figures += [_mean([getattr(one, name) for one in each]) for name in texts]
        most = max(each, key=lambda one: one.share)
        lines.append(
            f"| `{learner}` | {goal} | {' | '.join(figures)} | {most.commonest!r}, {100 * most.share:.0f} % |"
        )
    return lines


def _by_policy(talked: Sequence[Talked]) -> Mapping[tuple[str, str], list[Talked]]:
    """(learner, goal) -> its seeds."""
    found: dict[tuple[str, str], list[Talked]] = {}
    for each in talked:
        found.setdefault((each.learner, each.goal), []).append(each)
    return found


def _mean(values: Sequence[float]) -> str:
    """With the lowest and the highest, where there are several."""
    spread = f" [{min(values):.3g}, {max(values):.3g}]" if len(values) > 1 else ""
    return f"{np.mean(values):.3g}{spread}"


def plot(talked: Sequence[Talked]) -> Figure:
    """A panel per goal: what is earned of it per reply, against the perplexity of the replies to the clone; a
    dot per seed."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    latents = BY_LATENTS if BY_LATENTS.keys() & {one.learner for one in talked} else {}
    learners = [*BY_TALKING, PSI, *latents]
    colours = {CLONE: GREY, **dict(zip(learners, COLOURS, strict=False))}
    for axes, goal in zip(figure.subplots(1, len(GOALS)), GOALS, strict=True):
        for learner, colour in colours.items():
            each = [one for one in talked if one.learner == learner and one.goal in ("", goal)]
            earned = [one.goal_reached(goal) for one in each]
            axes.plot([one.perplexity for one in each], earned, "o", color=colour, label=learner)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_title(goal, loc="left", fontsize=10)
        axes.set_xlabel("perplexity to the clone", fontsize=9)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        plain(axes)
    figure.axes[0].set_ylabel("reward of a reply", fontsize=9)
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure
