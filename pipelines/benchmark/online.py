"""`benchmark online`: what a round of `online` takes, on a task of one reply with a model of random weights.

    rloo, grpo      episodes/s of the whole loop, over those of TRL's trainer of that name, which takes its
                    steps in turn with ours, in a process of its own (`--trl_python`, trl_rival.py)
    playing         the same of a round's playing alone, with its records and logs, over those of
                    transformers' `generate` on as many prompts
    one Ray actor   of the loop with an actor that plays ahead, over those without playing ahead
    weights         milliseconds of new weights to the object store, and out of it into a model

Every contender draws 64 replies to 8 prompts in a round and learns from them in one step with a frozen prior:
c, TRL's beta, is 0.04. Either the replies have one length but for the few that a random model ends, so that
nothing but the arithmetic is left to save, or they end by themselves, as those of dialogs do: each token is
the last one with a chance of two by the longest reply. The prompts are a few words, or as long as a dialog.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Semaphore, Thread
from typing import Any

import numpy as np
import ray
import torch

from envs import text_env
from pipelines import online
from pipelines.benchmark.measuring import Measured, Result, Seconds, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from pipelines.benchmark.trl_process import TrlProcess
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.online import on_actors
from rl_dialog.data.rollout import Rollout
from rl_dialog.data.tokenize import encode_prompt, train_tokenizer
from rl_dialog.evaluation.generation import left_padded, pad_id
from rl_dialog.evaluation.online_run import load_trainer, model_of
from rl_dialog.methods import BC, GRPO, RLOO, Method
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.online import OnlineTrainer
from rl_dialog.training.versions import take_weights, weights_of

GROUPS, GROUP_SIZE = 8, 8
C = 0.04  # the weight of the divergence, TRL's beta
METHODS: dict[str, Method] = {"rloo": RLOO(c=C), "grpo": GRPO(c=C)}
STALENESS = (0, 1, 2)
ROUNDS_ALONE = 10  # of a run with actors, of which the first ones are not measured
UNMEASURED = 3
LONGEST = 600.0  # seconds that a round may take
ENDLESS = 1_000_000  # rounds of a run that ends when enough was measured
THINGS = ("jazz", "tennis", "hotels", "food", "films", "music", "cooking", "actors")
PROMPTS = tuple(f"say something of {thing}" for thing in THINGS)
CONTEXT = 1024
LONG_PROMPT = 62  # things that are named in one


class OneReply:
    """A text world of one reply, which pays for every letter a."""

    max_turns, prompts = 1, PROMPTS

    def reset(self, *, seed: int | None = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        prompt = self.prompts[int(np.random.default_rng(seed).integers(len(self.prompts)))]
        self.messages = [{"role": "user", "content": prompt}]
        return list(self.messages), {}

    def step(self, reply: str) -> tuple[list[dict[str, str]], float, bool, bool, dict[str, Any]]:
        said = {"role": "assistant", "content": reply}
        return [*self.messages, said], float(reply.count("a")), True, False, {}


class ToLongPrompts(OneReply):
    """The same behind prompts of about 128 tokens."""

    prompts = tuple(
        f"{PROMPTS[i]} and " + " and ".join(np.random.default_rng(i).choice(THINGS, LONG_PROMPT))
        for i in range(len(PROMPTS))
    )


KINDS: dict[str, tuple[bool, type[OneReply]]] = {  # whether replies end by themselves, and the world
    "equal": (False, OneReply),
    "ending": (True, OneReply),
    "long": (True, ToLongPrompts),
}


def measure(config: BenchmarkConfig) -> Result:
    """Episodes of a round and its seconds in each setting; tokens of a round, and milliseconds of weights."""
    out, more = Path(config.output_dir).absolute(), {}
    measured: Measured = {}
    start = new_policy(config, out / "start")
    ending = new_policy(config, out / "ending-start", 2 / config.new_tokens)
    for folder, (ends, world) in KINDS.items():
        policy, place = ending if ends else start, out / folder
        kind = f"replies of {'up to ' if ends else ''}{config.new_tokens} tokens"
        kind += " to long prompts" if world is ToLongPrompts else ""
        for name in METHODS:
            setting, seconds, tokens = loops(config, policy, place, name, f"{name}, {kind}", world)
            measured[setting] = GROUPS * GROUP_SIZE, seconds
            more[f"tokens_of_a_round, {name}, {kind}"] = tokens
        measured[f"playing, {kind}"] = GROUPS * GROUP_SIZE, playing(config, policy, place, world)
    if config.overlap_runs:
        with connect("local", num_cpus=2):
            measured["rloo with one Ray actor"] = GROUPS * GROUP_SIZE, overlap(config, start, out)
            more["milliseconds_of_weights"] = weights(config, start, out)
    shown = "" if config.trl_python else "No --trl_python: our loop alone, without TRL's.\n"
    shown += "".join(f"{name}: {value}\n" for name, value in more.items())
    return speeds(config, measured, shown=shown, **more)


def new_policy(config: BenchmarkConfig, folder: Path, chance: float = 0.0) -> Path:
    """A checkpoint of random weights, and of a tokenizer of random words; each token is a reply's last one
    with this chance, 0: with that of any other token."""
    rng, letters = np.random.default_rng(config.seed), list("abcdefghijklmnopqrstuvwxyz")
    words = ["".join(rng.choice(letters, size=rng.integers(2, 9))) for _ in range(1000)]
    tokenizer = train_tokenizer([" ".join(words)] * 3 + [*PROMPTS, " and"], vocab_size=config.vocabulary)
    torch.manual_seed(config.seed)
    shape = {"layers": config.layers, "attention_heads": config.attention_heads, "width": config.width}
    model = ModelConfig(family="gpt2", **shape, context=CONTEXT)
    policy = Policy(load_lm(model, tokenizer), BC(), model)
    if chance:
        _end_with(policy, chance, tokenizer.eos_token_id)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def _end_with(policy: Policy, chance: float, end: int) -> None:
    """Makes one state of the last layer a constant, which only the score of the token `end` reads."""
    last, words = policy.lm.transformer.ln_f, policy.lm.transformer.wte.weight
    last.weight[0], last.bias[0], words[:, 0] = 0.0, 1.0, 0.0
    words[end] = 0.0
    # The others' scores are normal with the variance |word|^2 in a state whose numbers have variance 1.
    others = float((words.pow(2).sum(1) / 2).exp().sum()) - 1
    words[end, 0] = math.log(chance / (1 - chance) * others)


def loops(
    config: BenchmarkConfig, start: Path, out: Path, name: str, setting: str, world: type[OneReply]
) -> tuple[str, Seconds, dict[str, float]]:
    """Our loop and TRL's in turn: (setting, seconds of each round, mean tokens drawn in a round)."""
    turns = {"rounds": config.rounds, "warmup": config.warmup}
    with ExitStack() as stack:
        ours = stack.enter_context(rounds_of(trainer_of(config, start, out / name, name, world)))
        if not config.trl_python:
            alone = f"{setting}, ours alone"
            return alone, take_turns({"plain": ours}, **turns), {"rl_dialog": ours.mean_tokens}
        settings = {
            "model": str(start), "trainer": name, "prompts": world.prompts, "groups": GROUPS,
            "size": GROUP_SIZE, "new_tokens": config.new_tokens, "beta": C, "threads": config.threads,
            "seed": config.seed, "folder": str(out / f"trl-{name}"), "steps": config.rounds + config.warmup,
        }  # fmt: skip
        theirs = stack.enter_context(TrlProcess(config.trl_python, settings, patience=LONGEST))
        seconds = take_turns({"plain": theirs, f"rl_dialog {name}": ours}, **turns)
        return f"{setting}; plain: TRL", seconds, {"rl_dialog": ours.mean_tokens, "trl": theirs.mean_tokens}


def playing(config: BenchmarkConfig, start: Path, out: Path, world: type[OneReply]) -> Seconds:
    """A round's playing and `generate` on as many prompts of the same world."""
    trainer = trainer_of(config, start, out / "playing", "rloo", world)
    policy, tokenizer = trainer.policy.eval(), trainer.tokenizer
    talks = [world().reset(seed=number)[0] for number in range(GROUPS)]
    prompts = [
        encode_prompt(talk, tokenizer, max_length=CONTEXT - config.new_tokens)
        for talk in talks
        for _ in range(GROUP_SIZE)
    ]
    ids, mask = left_padded(prompts, pad_id(tokenizer), policy.device)
    limits = {"max_new_tokens": config.new_tokens, "pad_token_id": pad_id(tokenizer)}
    steps = iter(range(ENDLESS))

    @torch.no_grad()
    def generate() -> None:
        policy.lm.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **limits)

    contenders = {
        "plain": generate,
        "a round's playing": lambda: trainer.play(policy, tokenizer, next(steps)) and None,
    }
    return take_turns(contenders, rounds=config.rounds, warmup=config.warmup)


def overlap(config: BenchmarkConfig, start: Path, out: Path) -> Seconds:
    """Median seconds of a round in whole runs, with so many rounds played ahead; run after run in turn."""
    seconds: Seconds = {}
    for k in range(config.overlap_runs):
        for staleness in STALENESS:
            folder = out / f"staleness-{staleness}-{k}"
            how = {"max_steps": ROUNDS_ALONE, "num_workers": 1, "max_staleness": staleness}
            trainer = trainer_of(config, start, folder, "rloo", **how)
            model = model_of(online_config(config, start, folder, "rloo"), str(start))
            where = {"rounds": ROUNDS_ALONE, "device": "cpu", "address": None}
            with on_actors(trainer.play, model, 1, **where) as play:
                clock = Clock(play)
                trainer.play = clock
                trainer.train()
            name = "plain" if not staleness else f"{staleness} rounds ahead"
            seconds.setdefault(name, []).append(float(np.median(np.diff(clock.began)[UNMEASURED:])))
    return seconds


def weights(config: BenchmarkConfig, start: Path, out: Path) -> dict[str, float]:
    """Median milliseconds of new weights on their way to an actor, by stage."""
    trainer, taken = trainer_of(config, start, out / "weights", "rloo"), {"put": [], "take": []}
    other = Policy(load_lm(ModelConfig(model_name_or_path=str(start)), trainer.tokenizer), BC()).eval()
    for _ in range(config.rounds):
        began = time.perf_counter()
        stored = ray.put({name: value.numpy() for name, value in weights_of(trainer.policy).items()})
        there = time.perf_counter()
        take_weights(other, ray.get(stored))
        taken["put"].append(there - began)
        taken["take"].append(time.perf_counter() - there)
    return {name: round(1000 * median(values), 2) for name, values in taken.items()}


def online_config(
    config: BenchmarkConfig,
    start: Path,
    out: Path,
    name: str,
    world: type[OneReply] = OneReply,
    **more: Any,
) -> online.OnlineConfig:
    """What a user would set for this; every round draws the replies in one batch, and makes one step, in the
    micro-batches that come by default."""
    settings = {"max_steps": ENDLESS, "eval_steps": 0, "num_iterations": 1, "num_mini_batches": 1} | more
    return online.OnlineConfig(
        model_name_or_path=str(start), env=f"{__name__}:{world.__name__}", method=METHODS[name],
        output_dir=str(out), groups=GROUPS, group_size=GROUP_SIZE, batch_size=GROUPS * GROUP_SIZE,
        max_new_tokens=config.new_tokens, seed=config.seed, learning_rate=1e-6,
        report_to="none", cpus_per_worker=config.threads, device="cpu", **settings,
    )  # fmt: skip


def trainer_of(
    config: BenchmarkConfig,
    start: Path,
    out: Path,
    name: str,
    world: type[OneReply] = OneReply,
    **more: Any,
) -> OnlineTrainer:
    """The loop, as the verb loads it; nothing is measured in the world."""
    out.mkdir(parents=True)
    settings = online_config(config, start, out, name, world, **more)
    played = text_env(settings.env)
    trainer = load_trainer(settings, out, played, played, device=torch.device("cpu"))
    trainer.evaluate = None
    return trainer


class Clock:
    """A source of episodes that notes when it is asked, which is when a round begins."""

    def __init__(self, play: Callable[..., Sequence[Rollout]]) -> None:
        self.play, self.began = play, []

    def __call__(self, *given: Any) -> Sequence[Rollout]:
        self.began.append(time.perf_counter())
        return self.play(*given)


class Enough(Exception):
    """Ends a loop that waits for its turn."""


class Rounds:
    """A loop in a thread of its own, each of whose rounds begins with a call and ends before it returns."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self.trainer, self.play, self.error, self.ended = trainer, trainer.play, None, False
        self.tokens: list[int] = []
        self.go, self.waits = Semaphore(0), Semaphore(0)
        trainer.play = self._wait
        self.thread = Thread(target=self._run, name="online", daemon=True)

    def __call__(self) -> None:
        """One round. Raises what the loop raises, TimeoutError after LONGEST seconds."""
        self.go.release()
        self.await_turn()

    def await_turn(self) -> None:
        """Until the loop waits to begin a round."""
        if not self.waits.acquire(timeout=LONGEST):
            raise TimeoutError(f"waited {LONGEST:.0f} s for a round of our own loop")
        if self.error is not None:
            raise self.error

    @property
    def mean_tokens(self) -> float:
        """Drawn in a round."""
        return round(float(np.mean(self.tokens)), 1)

    def _run(self) -> None:
        try:
            self.trainer.train()
        except Enough:
            pass
        except BaseException as error:
            self.error = error
            self.waits.release()

    def _wait(self, *given: Any) -> Sequence[Rollout]:
        self.waits.release()
        self.go.acquire()
        if self.ended:
            raise Enough
        rollouts = self.play(*given)
        self.tokens.append(sum(len(logp) for each in rollouts for logp in each.logp))
        return rollouts


@contextmanager
def rounds_of(trainer: OnlineTrainer) -> Iterator[Rounds]:
    """The loop, up to where it waits for its first round; it ends with the block."""
    rounds = Rounds(trainer)
    rounds.thread.start()
    rounds.await_turn()
    try:
        yield rounds
    finally:
        rounds.ended = True
        rounds.go.release()
        rounds.thread.join(LONGEST)
