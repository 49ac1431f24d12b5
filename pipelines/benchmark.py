"""Speed on this machine, as ratios to the plain language model measured in the same run.

    python -m pipelines.benchmark train       tokens/s of every method, over those of cross-entropy training of the same backbone
    python -m pipelines.benchmark memory      peak memory of the same training steps, each in a process of its own
    python -m pipelines.benchmark generate    new tokens/s of ilql's guided decoding, over those of the backbone's own `generate`
    python -m pipelines.benchmark candidates  contexts/s of several replies to each, over those of the backbone's `generate` on one context at a time
    python -m pipelines.benchmark prepare     conversations/s from a CSV to reward columns, over those of a pandas pass; and its memory
    python -m pipelines.benchmark scorers     replies/s of coherence by an encoder, batched, over those of one text at a time
    python -m pipelines.benchmark tune        trials/s of a sweep, over those of a plain loop; and what Ray Tune adds to a trial
    python -m pipelines.benchmark prefer      steps/s of learning from preferences, over those of plain RLlib
    python -m pipelines.benchmark simulate    system steps/s with simulated users, over those of one conversation after the other; of workers; memory
    python -m pipelines.benchmark serve       tokens/s to 1, 4 and 16 clients at once, over one request at a time; first tokens; the cost of HTTP
    python -m pipelines.benchmark cartpole    no speed: returns of way-off-policy and its rivals on logs of CartPole, and what explains them

The contenders take turns, step by step, and a ratio is the median over rounds of (seconds of the plain LM / seconds of ours) within one round:
whatever else runs on the machine slows both. Absolute tokens/s are only as good as the machine is quiet; the load average stands beside them.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
import tyro
from torch import Tensor, nn

from pipelines.benchmark_prefer import benchmark_prefer
from pipelines.benchmark_prepare import benchmark_long, benchmark_prepare, benchmark_scorers
from pipelines.benchmark_serve import benchmark_serving
from pipelines.benchmark_simulate import benchmark_simulate
from pipelines.benchmark_tune import benchmark_tune
from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.files import write_json
from rl_dialog.data.tokenize import Row, encode_prompt, train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.draws import Context, draw_replies
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.machine import describe_machine
from rl_dialog.methods import AWAC, BC, BCQ, CHAI, CQL, DPO, ILQL, KTO, KLControl, MCReturns, Method, Psi, UtteranceILQL, WayOffPolicy
from rl_dialog.models.policy import ModelConfig, Policy, load_lm
from rl_dialog.models.prior import Prior
from rl_dialog.run import Quiet, run
from rl_dialog.training.loop import Objective, TrainerConfig
from rl_dialog.training.optim import make_optimizer

# Freed memory stays in the process: otherwise every step pays for getting large tensors from the system anew, by how much depends on the kernel.
ALLOCATOR = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"

# Ratios of other implementations of ILQL with mlp heads, measured the same way on the same shapes.
OTHERS = {
    "train": {"trlx": 0.44, "Snell et al., shared backbone": 0.35, "Snell et al., as shipped": 0.24},
    "generate": {"trlx, batch 1": 0.56, "trlx, batch 16": 0.52, "Snell et al., batch 1": 0.43, "Snell et al., batch 16": 0.45},
}

UNITS = {  # and digits
    "train": ("tokens/s", 0),
    "generate": ("tokens/s", 0),
    "candidates": ("contexts/s", 2),
    "prepare": ("conversations/s", 0),
    "scorers": ("replies/s", 0),
    "tune": ("trials/s", 3),
    "serve": ("tokens/s", 0),
    "simulate": ("steps/s", 0),
    "prefer": ("steps/s", 0),
}

# What takes training steps: a method and the model fields it needs. Methods that share a loss stand for each other: bc for tf_all, tf_top and dt,
# ilql for sarsa, bcq for dbcq. The prior's log-probabilities are given, as they are after the start of a run.
CONTENDERS: dict[str, tuple[Method, dict[str, Any]]] = {
    "bc": (BC(), {}),
    "ilql mlp": (ILQL(), {"heads": "mlp"}),
    "ilql lowrank": (ILQL(), {"heads": "lowrank"}),
    "ilql, own trunk": (ILQL(), {"value_trunk": "separate"}),
    "mc lowrank": (MCReturns(), {"heads": "lowrank"}),
    "awac lowrank": (AWAC(), {"heads": "lowrank"}),
    "cql lowrank": (CQL(), {"heads": "lowrank"}),
    "bcq lowrank": (BCQ(), {"heads": "lowrank"}),
    "kl_control": (KLControl(), {}),
    "way_off_policy": (WayOffPolicy(), {}),
    "way_off_policy, exact KL": (WayOffPolicy(kl="exact"), {}),
    "way_off_policy, 5 passes": (WayOffPolicy(target_passes=5), {"dropout": 0.1}),
    "psi": (Psi(), {}),
    "utterance_ilql": (UtteranceILQL(), {}),
    "chai": (CHAI(), {}),
    "dpo": (DPO(), {}),
    "kto": (KTO(), {}),
}


@dataclass(frozen=True)
class BenchmarkConfig(Quiet):
    """What to measure, and on which shapes."""

    what: tyro.conf.Positional[
        Literal["train", "memory", "generate", "candidates", "prepare", "scorers", "tune", "serve", "simulate", "prefer", "cartpole"]
    ] = "train"
    """train: tokens/s of the training step; memory: its peak memory; generate: new tokens/s of sampling; candidates: contexts/s; prepare:
    conversations/s; scorers: replies/s; tune: trials/s; serve: tokens/s to several clients; simulate: system steps/s; prefer: environment steps/s;
    cartpole: mean returns"""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """train and memory: what to measure against the plain language model"""
    output_dir: str = "runs/benchmark"
    """where to write the figures, the settings and the machine"""
    rounds: int = 20
    """rounds to measure; each contender takes one step, or generates once, in each"""
    warmup: int = 3
    """rounds before those"""
    threads: int = 2
    """threads of torch"""
    layers: int = 6
    """transformer blocks"""
    attention_heads: int = 8
    """attention heads"""
    width: int = 256
    """hidden size"""
    vocabulary: int = 8192
    """tokens of the vocabulary"""
    rank: int = ModelConfig.rank
    """rank of lowrank heads"""
    batch_size: int = 16
    """train: rows of a batch"""
    length: int = 128
    """train: tokens of a row"""
    user_block: int = 16
    """train: in the second setting, user and assistant alternate in blocks of so many tokens"""
    batch_sizes: tuple[int, ...] = (1, 16)
    """generate: rows of a batch, one setting each"""
    prompt: int = 32
    """generate: tokens of a prompt"""
    new_tokens: int = 64
    """generate: tokens of a reply"""
    top_k: int = 20
    """generate: how many tokens to sample among; ilql chooses them before it adds the advantage"""
    beta: float = 1.0
    """generate: strength of the advantage"""
    contexts: int = 64
    """candidates: contexts of a round; their prompts have up to `prompt_words` words"""
    prompt_words: int = 64
    """candidates: words of the longest prompt, about as many tokens"""
    replies: int = 5
    """candidates: replies to each context, of up to 32 tokens"""
    conversations: int = 10_000
    """prepare: conversations of the CSV; scorers: dialogs"""
    turns: int = 10
    """prepare: exchanges of a conversation"""
    exchanges: tuple[int, ...] = (100, 400, 1600, 6400)
    """prepare: exchanges of one long dialog, whose scoring and tokenising are timed: twice as many should take twice as long"""
    turn_bytes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """prepare: length of one long turn, timed in the same way"""
    encoder: str = ""
    """scorers: an encoder's folder or hub name"""
    logs: str = ""
    """scorers: where the dialogs come from"""
    clients: tuple[int, ...] = (1, 4, 16)
    """serve: how many clients send requests at once, one setting each"""
    requests: int = 4
    """serve: requests of each client in a round"""
    trials: int = 6
    """tune: trials of a round"""
    world: str = ""
    """simulate: folder with MultiWOZ's files; by default a generated town"""
    steps: int = 4000
    """simulate, prefer: system steps, or steps of the environments, of a round; cartpole: updates of each network of values"""
    envs: int = 64
    """simulate: conversations stepped together"""
    workers: int = 0
    """simulate: measure so many rollout workers too, against one; 0: none"""
    seeds: int = 10
    """cartpole: independent learners with buffers and networks of their own"""
    priors: tuple[Literal["clone", "vae", "uniform"], ...] = ("clone", "vae", "uniform")
    """cartpole: p(a|s) of DBCQ and WOP: a clone, a conditional VAE over actions, both actions alike"""
    seed: int = 0
    """weights, tokens, texts and sampling; cartpole: the first of its seeds"""


def main(config: BenchmarkConfig) -> dict[str, Any]:
    """Measures, prints a table, writes the figures; returns the ratios. Raises UserError for sizes that cannot be measured."""
    if config.rounds < 1 or config.warmup < 0 or config.threads < 1 or config.length < 2 * config.user_block:
        raise UserError("expected rounds and threads of at least 1, warmup of at least 0, and a length of at least two user blocks")
    if unknown := [name for name in config.contenders if name not in CONTENDERS]:
        raise UserError(f"unknown contender {unknown[0]!r}: expected some of {', '.join(map(repr, CONTENDERS))}")
    if config.what == "scorers" and not (config.encoder and config.logs):
        raise UserError("scorers: expected --encoder PATH and --logs PATH")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(config.threads)
    if config.what == "memory":
        return _report_memory(config)
    if config.what == "cartpole":
        from pipelines.benchmark_cartpole import benchmark_cartpole

        return benchmark_cartpole(config)
    before, more = os.getloadavg(), {}
    if config.what == "prepare":
        settings, more["memory"] = benchmark_prepare(config)
        more["long"] = benchmark_long(config)
    elif config.what == "tune":
        settings, more["overhead"] = benchmark_tune(config)
    elif config.what == "serve":
        settings, more["serving"] = benchmark_serving(config)
    elif config.what == "simulate":
        settings, more["memory"] = benchmark_simulate(config)
    elif config.what == "prefer":
        settings = benchmark_prefer(config)
    elif config.what == "scorers":
        settings = benchmark_scorers(config)
    else:
        settings = {"train": benchmark_training, "generate": benchmark_generation, "candidates": benchmark_candidates}[config.what](config)
    figures = {setting: summarise(seconds, tokens, seed=config.seed) for setting, (tokens, seconds) in settings.items()}
    if not config.quiet:
        print(_table(config, figures))
        for what, row in more.get("long", {}).items():
            print(f"  {what:<24} tokenise {row['tokenise']:>8.2f} s   score {row['score']:>8.2f} s   peak memory {row['peak_mib']:>6} MiB")
    machine = describe_machine() | {"load_average_before": before, "load_average_after": os.getloadavg()}
    report = {"what": config.what, "machine": machine, "settings": asdict(config), "figures": figures, **more}
    report |= {"measured_elsewhere": OTHERS[config.what]} if config.what in OTHERS else {}
    Path(config.output_dir).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(config.output_dir), report)
    ratios = {setting: {name: row["ratio"] for name, row in rows.items() if "ratio" in row} for setting, rows in figures.items()}
    return {"what": config.what, "ratios": ratios, **more, "load_average": os.getloadavg()[0], "output_dir": config.output_dir}


# Training.


def benchmark_training(config: BenchmarkConfig) -> dict[str, tuple[int, dict[str, list[float]]]]:
    """{setting: (tokens of a step, {contender: seconds of each round})}."""
    measured = {}
    for setting, block in (("every token a decision", 0), (f"half of the tokens the user's, blocks of {config.user_block}", config.user_block)):
        batch = make_batch(config, block)
        contenders = {"plain": plain_training(config, batch)} | {name: our_training(config, name, batch) for name in config.contenders}
        measured[setting] = batch.input_ids.numel(), take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
    return measured


def plain_training(config: BenchmarkConfig, batch: Batch) -> Callable[[], None]:
    """A step of cross-entropy training as transformers does it, on the same tokens."""
    lm = _new_lm(config).train()
    labels = batch.input_ids.clone()
    labels[:, 1:][~batch.act[:, :-1]] = -100  # position t decides token t + 1
    labels[:, 0] = -100
    return _step(lm, lambda: lm(input_ids=batch.input_ids, labels=labels, use_cache=False).loss)


def our_training(config: BenchmarkConfig, name: str, batch: Batch) -> Callable[[], None]:
    """The same step as the training loop takes it."""
    method, model = CONTENDERS[name]
    lm = _new_lm(config, dropout=model.get("dropout", 0.0))
    policy = Policy(lm, method, ModelConfig(**{"rank": config.rank, "value_trunk": "shared"} | model)).start_training().train()
    prior = Prior([_new_lm(config)]) if method.prior_every_step else None
    objective, given = Objective(policy, prior), replace(batch)
    if method.uses_prior:
        given.prior_logp = torch.full((batch.decisions,), -np.log(config.vocabulary), dtype=torch.float32)
        given.prior_lse = torch.full((len(batch.states),), np.log(config.vocabulary), dtype=torch.float32)
    if method.proposals:
        shape = int(batch.turn_end.sum()), method.proposals
        given.proposals, given.proposal_logp = torch.rand(*shape, config.width), torch.full(shape, -10.0)
    if method.measures:
        with torch.no_grad():
            given.measured = method.measure(policy.outputs(given), given)
    return _step(policy, lambda: objective(given)[0] / batch.decisions, alpha=method.target_rate(1000, 0.0))


def _step(model: nn.Module, loss: Callable[[], Tensor], alpha: float = 0.0) -> Callable[[], None]:
    """Forward, backward, clipping, optimizer, targets: the order of training/loop.py."""
    trainer = TrainerConfig()
    optimizer = make_optimizer(model, learning_rate=1e-4, weight_decay=trainer.weight_decay)

    def step() -> None:
        loss().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), trainer.max_grad_norm)
        if not torch.isfinite(norm):
            raise UserError("expected a finite gradient")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if alpha:
            model.update_targets(alpha)

    return step


def make_batch(config: BenchmarkConfig, user_block: int) -> Batch:
    """Random tokens. Without a `user_block` the assistant writes all but the first, otherwise every second block."""
    generator = np.random.default_rng(config.seed)
    t = np.arange(config.length)
    assistant = t > 0 if not user_block else t // user_block % 2 == 1
    ends = np.flatnonzero(assistant & ~np.append(assistant[1:], False)).astype(np.int32)
    rows = []
    for _ in range(config.batch_size):
        ids = generator.integers(config.vocabulary, size=config.length, dtype=np.int32)
        rows.append(Row(ids, assistant, ends, generator.normal(size=len(ends)).astype(np.float32), truncated=False))
    return collate(rows)


# Memory.


def _report_memory(config: BenchmarkConfig) -> dict[str, Any]:
    """Prints and writes the peak memory of each contender; returns its ratios to plain training."""
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for name in ("plain", *config.contenders):
        with context.Pool(1) as fresh:  # memory that one contender freed would look free to the next
            peaks[name] = fresh.apply(peak_memory, (config, name))
    ratios = {name: round(peak / peaks["plain"], 3) for name, peak in peaks.items()}
    lines = [
        f"memory: GPT-2 of {config.layers} layers, width {config.width}, vocabulary {config.vocabulary}; {config.batch_size} x {config.length} tokens"
    ]
    lines += ["", f"{'peak above that of the imports':<52} {'MiB':>10} {'ratio':>7}"]
    lines += [f"  {name:<50} {peak / 1024:>10.0f} {ratios[name]:>7.3f}" for name, peak in peaks.items()]
    if not config.quiet:
        print("\n".join([*lines, ""]))
    figures = {name: {"peak_kib": peak, "ratio": ratios[name]} for name, peak in peaks.items()}
    Path(config.output_dir).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(config.output_dir), {"what": "memory", "machine": describe_machine(), "settings": asdict(config), "figures": figures})
    return {"what": "memory", "ratios": ratios, "output_dir": config.output_dir}


def peak_memory(config: BenchmarkConfig, name: str) -> int:
    """KiB that three training steps add to this process at most: weights, gradients, optimizer, targets, activations."""
    torch.set_num_threads(config.threads)
    batch = make_batch(config, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = plain_training(config, batch) if name == "plain" else our_training(config, name, batch)
    for _ in range(3):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


# Generation.


def benchmark_generation(config: BenchmarkConfig) -> dict[str, tuple[int, dict[str, list[float]]]]:
    """{setting: (new tokens of a call, {contender: seconds of each round})}."""
    method = ILQL(beta=config.beta, top_k=config.top_k)
    lm = _new_lm(config).eval()
    guided = {heads: Policy(_new_lm(config), method, ModelConfig(heads=heads, rank=config.rank)).eval() for heads in ("mlp", "lowrank")}
    for policy in guided.values():
        for parameter in policy.heads.parameters():
            nn.init.normal_(parameter, std=0.02)  # new heads are zero and would steer nowhere
    measured = {}
    for batch_size in config.batch_sizes:
        prompt = torch.randint(config.vocabulary, (batch_size, config.prompt), generator=torch.Generator().manual_seed(config.seed))
        contenders = {"plain": _generation(config, lm, prompt, top_k=config.top_k)}
        contenders |= {f"ilql {heads}": _generation(config, policy, prompt, top_k=0) for heads, policy in guided.items()}
        measured[f"batch {batch_size}"] = prompt.shape[0] * config.new_tokens, take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
    return measured


def _generation(config: BenchmarkConfig, model: Any, prompt: Tensor, *, top_k: int) -> Callable[[], None]:
    """One call of `generate`; there is no end-of-sequence token, so every reply has the same length."""
    mask = torch.ones_like(prompt)

    def call() -> None:
        ids = model.generate(prompt, attention_mask=mask, do_sample=True, top_k=top_k, max_new_tokens=config.new_tokens, use_cache=True)
        if ids.shape[1] != config.prompt + config.new_tokens:
            raise UserError(f"expected {config.new_tokens} new tokens, got {ids.shape[1] - config.prompt}")

    return call


# Candidates.


def benchmark_candidates(config: BenchmarkConfig) -> dict[str, tuple[int, dict[str, list[float]]]]:
    """{setting: (contexts of a round, {contender: seconds of each round})}. Nearly no reply ends early, the model being random."""
    writer = _Writer(config)
    with multiprocessing.get_context("spawn").Pool(config.threads, _start_writer, (config,)) as pool:
        parts = [range(start, config.contexts, config.threads) for start in range(config.threads)]
        contenders = {
            "plain": writer.one_at_a_time,
            "batched": lambda: writer.batched(range(config.contexts)),
            f"batched, {config.threads} processes of one thread": lambda: pool.map(_write, parts, chunksize=1),
        }
        seconds = take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
    return {f"{config.replies} sampled replies to each of {config.contexts} contexts": (config.contexts, seconds)}


class _Writer:
    """A random policy, and contexts of random words of very different length."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self.config, rng = config, np.random.default_rng(config.seed)
        words = ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), size=rng.integers(2, 9))) for _ in range(1000)]
        said = [" ".join(rng.choice(words, size=rng.integers(4, config.prompt_words + 1))) for _ in range(config.contexts)]
        self.tokenizer = train_tokenizer([" ".join(words)] * 3, vocab_size=config.vocabulary)
        self.contexts = [Context((0, i), [{"role": "user", "content": text}], "") for i, text in enumerate(said)]
        self.decoding = Decoding(max_new_tokens=32, max_prompt_length=96)
        self.policy = Policy(_new_lm(replace(config, length=128)), BC(), ModelConfig()).eval()

    def one_at_a_time(self) -> None:
        """As transformers does it: the prompt of one context, several sequences returned."""
        for context in self.contexts:
            prompt = torch.tensor([encode_prompt(context.messages, self.tokenizer, max_length=96)])
            settings = {"max_new_tokens": self.decoding.max_new_tokens, "eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": 0}
            mask = torch.ones_like(prompt)
            self.policy.lm.generate(prompt, attention_mask=mask, do_sample=True, top_k=0, num_return_sequences=self.config.replies, **settings)

    def batched(self, numbers: Sequence[int]) -> None:
        contexts = [self.contexts[i] for i in numbers]
        draw_replies(self.policy, self.tokenizer, contexts, self.decoding, count=self.config.replies, tries=1)


def _start_writer(config: BenchmarkConfig) -> None:
    """Once per process: what a generating actor has."""
    global _writer
    torch.set_num_threads(1)
    _writer = _Writer(config)


def _write(numbers: Sequence[int]) -> None:
    _writer.batched(numbers)


# Measuring.


def take_turns(contenders: dict[str, Callable[[], None]], *, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round, A B C A B C."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(warmup + rounds):
        for name, step in contenders.items():
            began = time.perf_counter()
            step()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def summarise(seconds: dict[str, list[float]], tokens: int, *, seed: int) -> dict[str, dict[str, Any]]:
    """Per contender: median seconds, tokens/s, and the median ratio to `plain` with the 95% interval of a bootstrap over rounds."""
    generator = np.random.default_rng(seed)
    plain = np.array(seconds["plain"])
    rows: dict[str, dict[str, Any]] = {}
    for name, values in seconds.items():
        rows[name] = {"seconds": round(float(np.median(values)), 5), "per_second": round(tokens / float(np.median(values)), 3)}
        if name != "plain":
            ratios = plain / np.array(values)
            medians = np.median(generator.choice(ratios, size=(2000, len(ratios))), axis=1)
            low, high = np.quantile(medians, (0.025, 0.975))
            rows[name] |= {"ratio": round(float(np.median(ratios)), 3), "low": round(float(low), 3), "high": round(float(high), 3)}
    return rows


def _table(config: BenchmarkConfig, figures: dict[str, dict[str, dict[str, Any]]]) -> str:
    unit, digits = UNITS[config.what]
    shape = f"GPT-2 of {config.layers} layers, width {config.width}, vocabulary {config.vocabulary}; {config.threads} threads, float32"
    lines = [f"{config.what}: {shape if config.what in ('train', 'generate', 'candidates', 'serve') else f'{config.threads} CPUs'}"]
    for setting, rows in figures.items():
        lines += ["", f"{setting:<52} {unit:>15} {'ratio':>7}   95% interval"]
        for name, row in rows.items():
            ratio = f"{row['ratio']:>7.3f}   {row['low']:.3f} to {row['high']:.3f}" if "ratio" in row else f"{1:>7.3f}"
            lines.append(f"  {name:<50} {row['per_second']:>15.{digits}f} {ratio}")
    others = ", ".join(f"{name} {value:.2f}" for name, value in OTHERS.get(config.what, {}).items())
    return "\n".join([*lines, "", *([f"Measured elsewhere at the default sizes: {others}.", ""] if others else [])])


@dataclass(frozen=True)
class _Vocabulary:
    """As much of a tokenizer as a new LM needs."""

    size: int
    bos_token_id: None = None
    eos_token_id: None = None
    pad_token_id: None = None

    def __len__(self) -> int:
        return self.size


def _new_lm(config: BenchmarkConfig, *, dropout: float = 0.0) -> Any:
    torch.manual_seed(config.seed)
    context = max(config.length, config.prompt + config.new_tokens)
    shape = {"layers": config.layers, "attention_heads": config.attention_heads, "width": config.width, "context": context}
    model = ModelConfig(family="gpt2", **shape, dropout=dropout)
    return load_lm(model, _Vocabulary(config.vocabulary))


def _pin_allocator() -> None:
    """Starts this process anew under `ALLOCATOR`, which glibc reads only at the start."""
    if os.environ.get("GLIBC_TUNABLES") != ALLOCATOR and sys.platform == "linux" and not {"memory", "prepare"} & set(sys.argv):
        os.execve(sys.executable, sys.orig_argv, os.environ | {"GLIBC_TUNABLES": ALLOCATOR})


if __name__ == "__main__":
    _pin_allocator()
    run(BenchmarkConfig, main)
