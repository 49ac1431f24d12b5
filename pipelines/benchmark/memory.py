"""`benchmark memory`: peak memory of the training steps, each contender in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path

import torch

from pipelines.benchmark.measuring import Result
from pipelines.benchmark.settings import BenchmarkConfig
from pipelines.benchmark.training import make_batch, our_training, plain_training


def measure(config: BenchmarkConfig) -> Result:
    """The peak of each contender, and its ratio to plain training."""
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for name in ("plain", *config.contenders):
        with context.Pool(1) as fresh:  # memory that one contender freed would look free to the next
            peaks[name] = fresh.apply(peak_memory, (config, name))
    ratios = {name: round(peak / peaks["plain"], 3) for name, peak in peaks.items()}
    shape = f"GPT-2 of {config.layers} layers, width {config.width}, vocabulary {config.vocabulary}"
    lines = [f"memory: {shape}; {config.batch_size} x {config.length} tokens"]
    lines += ["", f"{'peak above that of the imports':<52} {'MiB':>10} {'ratio':>7}"]
    lines += [f"  {name:<50} {peak / 1024:>10.0f} {ratios[name]:>7.3f}" for name, peak in peaks.items()]
    figures = {name: {"peak_kib": peak, "ratio": ratios[name]} for name, peak in peaks.items()}
    return Result({"figures": figures}, "\n".join([*lines, ""]), {"ratios": ratios})


def peak_memory(config: BenchmarkConfig, name: str) -> int:
    """KiB that three training steps add to this process at most: weights, gradients, optimizer, targets,
    activations.
    """
    torch.set_num_threads(config.threads)
    batch = make_batch(config, 0)
    before = peak_kib()
    step = plain_training(config, batch) if name == "plain" else our_training(config, name, batch)
    for _ in range(3):
        step()
    return peak_kib() - before


def peak_kib() -> int:
    """What this process needed at most. (On Linux ru_maxrss begins at the peak of the process that started
    it.)"""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = status.read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
