"""How contenders are timed, and what becomes of their seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipelines.benchmark.settings import BenchmarkConfig

Seconds = dict[
    str, list[float]
]  # contender -> the seconds of each round; "plain" is what the others are compared with
Measured = dict[
    str, tuple[int, Seconds]
]  # setting -> what is done in a round (tokens, steps, ...), and the seconds

# Ratios of other implementations of ILQL with mlp heads, measured the same way on the same shapes.
OTHERS = {
    "train": {"trlx": 0.44, "Snell et al., shared backbone": 0.35, "Snell et al., as shipped": 0.24},
    "generate": {
        "trlx, batch 1": 0.56,
        "trlx, batch 16": 0.52,
        "Snell et al., batch 1": 0.43,
        "Snell et al., batch 16": 0.45,
    },
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
    "play": ("episodes/s", 1),
    "prefer": ("steps/s", 0),
    "online": ("episodes/s", 1),
    "reward_model": ("pairs/s", 1),
}


@dataclass(frozen=True)
class Result:
    """What was measured."""

    report: dict[str, Any]  # for benchmark.json
    shown: str  # for people
    headline: dict[str, Any] = field(default_factory=dict)
    plot: Figure | None = None


def speeds(config: BenchmarkConfig, measured: Measured, *, shown: str = "", **more: Any) -> Result:
    """The ratios of what was timed; `more` is told beside them, and `shown` below them."""
    figures = {
        setting: summarise(seconds, count, seed=config.seed) for setting, (count, seconds) in measured.items()
    }
    elsewhere = {"measured_elsewhere": OTHERS[config.what]} if config.what in OTHERS else {}
    ratios = {
        setting: {name: row["ratio"] for name, row in rows.items() if "ratio" in row}
        for setting, rows in figures.items()
    }
    return Result(
        {"figures": figures, **more, **elsewhere}, table(config, figures) + shown, {"ratios": ratios, **more}
    )


def take_turns(
    contenders: dict[str, Callable[[], None]], *, rounds: int, warmup: int
) -> dict[str, list[float]]:
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
    """Per contender: median seconds, tokens/s, and the median ratio to `plain` with the 95% interval of a
    bootstrap over rounds.
    """
    generator = np.random.default_rng(seed)
    plain = np.array(seconds["plain"])
    rows: dict[str, dict[str, Any]] = {}
    for name, values in seconds.items():
        rows[name] = {
            "seconds": round(float(np.median(values)), 5),
            "per_second": round(tokens / float(np.median(values)), 3),
        }
        if name != "plain":
            ratios = plain / np.array(values)
            medians = np.median(generator.choice(ratios, size=(2000, len(ratios))), axis=1)
            low, high = np.quantile(medians, (0.025, 0.975))
            rows[name] |= {
                "ratio": round(float(np.median(ratios)), 3),
                "low": round(float(low), 3),
                "high": round(float(high), 3),
            }
    return rows


def table(config: BenchmarkConfig, figures: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The figures of each setting, a line for each contender."""
    unit, digits = UNITS[config.what]
    shape = f"{config.threads} CPUs"
    if config.what in ("train", "generate", "candidates", "serve", "online"):
        size = f"{config.layers} layers, width {config.width}, vocabulary {config.vocabulary}"
        shape = f"GPT-2 of {size}; {config.threads} threads, float32"
    if config.what == "reward_model":
        size = f"{config.layers} layers, width {config.width}, vocabulary {config.vocabulary}"
        shape = f"llama of {size}; {config.threads} threads, float32"
    lines = [f"{config.what}: {shape}"]
    for setting, rows in figures.items():
        lines += ["", f"{setting:<52} {unit:>15} {'ratio':>7}   95% interval"]
        for name, row in rows.items():
            ratio = (
                f"{row['ratio']:>7.3f}   {row['low']:.3f} to {row['high']:.3f}"
                if "ratio" in row
                else f"{1:>7.3f}"
            )
            lines.append(f"  {name:<50} {row['per_second']:>15.{digits}f} {ratio}")
    others = ", ".join(f"{name} {value:.2f}" for name, value in OTHERS.get(config.what, {}).items())
    return "\n".join(
        [*lines, "", *([f"Measured elsewhere at the default sizes: {others}.", ""] if others else [])]
    )
