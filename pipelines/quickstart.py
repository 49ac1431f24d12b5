"""The whole circle on a laptop in minutes: logs -> prepare -> train (bc, psi, ilql) -> evaluate -> a chat.

    python -m pipelines.quickstart

The logs are written by a policy of mixed quality in the small-talk world (envs/README.md), where the best
possible return is known, so the table at the end is measured by talking, not estimated. Every step is a
pipeline that you can run on your own logs; the commands are printed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from envs.small_talk import SmallTalk, write_logs
from pipelines import stages
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.jobs import each
from rl_dialog.config import command_of
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.models.checkpoint import resolve
from rl_dialog.models.policy import Policy
from rl_dialog.run import Output, at_least, claim_output, run

METHODS = ("bc", "psi", "ilql")
REWARDED = ("--rewards.logged", "1", "--rewards.sentiment", "0", "--rewards.vote", "0")
YOURS = "--logs YOUR_LOGS --output_dir data/mine --rewards.vote 1 --rewards.sentiment 0.5"
REPORTED = "--checkpoints runs/bc runs/ilql --data data/mine --output_dir runs/report"
LEANING = "--data data/mine --output_dir runs/ilql --method ilql --model_name_or_path runs/bc"
NEXT = f"""Next:
  talk to the best policy    {{chat}} --checkpoint {{best}} --debug
  learning curves            tensorboard --logdir {{out}}
  the same with your logs    {{prepare}} {YOURS}
                             {{train}} --data data/mine --output_dir runs/bc
                             {{train}} {LEANING}
                             {{evaluate}} {REPORTED}"""


@dataclass(frozen=True)
class QuickstartConfig(Output):
    """What the quickstart makes. The defaults take minutes on two cores."""

    output_dir: str = "runs/quickstart"
    """the folder for everything that it writes"""
    dialogs: int = 2000
    """conversations in the logs"""
    seeds: int = 3
    """runs of each method"""
    episodes: int = 200
    """conversations per evaluated checkpoint"""
    max_steps: int = 0
    """updates per run; 0 takes those of tune_configs/quickstart_*.yaml"""


def main(config: QuickstartConfig) -> dict[str, Any]:
    """Runs the circle and returns the returns of each method and the paths."""
    began, width = time.perf_counter(), None if os.isatty(1) else 110
    say = Console(quiet=config.quiet, highlight=False, width=width).print
    at_least(config, dialogs=1, seeds=1, episodes=1, max_steps=0)
    out = claim_output(config, "quickstart")
    say(f"[bold]1 logs[/]       {config.dialogs} chats of a mixed-quality bot with simulated users")
    (out / "logs").mkdir()
    write_logs(out / "logs" / "small_talk.jsonl", dialogs=config.dialogs, seed=1)
    with connect():
        say("[bold]2 prepare[/]    score, split and tokenise them")
        sizes = ("--vocab_size", "1024", "--max_length", "512")
        stages.prepare_logs(str(out / "logs"), out / "data", *REWARDED, *sizes)
        say(f"[bold]3 train[/]      {', '.join(METHODS)}, each of {config.seeds} seed(s)")
        _train(config, out, say)
    say(f"[bold]4 evaluate[/]   {config.episodes} conversations per policy in the world")
    runs = [out / f"{method}-seed{seed}" for method in METHODS for seed in range(config.seeds)]
    how = ("--env", "small_talk", "--episodes", str(config.episodes), "--contexts", "8")
    quiet = ("--quiet",) if config.quiet else ()
    report = stages.evaluate_runs(runs, out / "data", out / "report", *how, *quiet)
    returns = {name: figures["return"] for name, figures in report["figures"].items()}
    best = max(returns, key=lambda name: returns[name][0])
    _sample(out / f"{best}-seed0", say)
    seconds, memory = time.perf_counter() - began, psutil.Process().memory_info().rss >> 20
    files = f"[bold]{report['html']}[/] (also report.md, metrics.json, replies.csv)"
    say(f"\nDone in {seconds:.0f} s. The report: {files}.", soft_wrap=True)
    commands = {verb: command_of(verb) for verb in ("chat", "prepare", "train", "evaluate")}
    say(NEXT.format(best=out / f"{best}-seed0", out=out, **commands), soft_wrap=True)
    paths = {"report": report["html"], "output_dir": str(out)}
    return {
        "returns": returns | report["references"],
        "best": best,
        **paths,
        "seconds": round(seconds, 1),
        "driver_mib": memory,
    }


def _train(config: QuickstartConfig, out: Path, say: Any) -> None:
    """Every seed's bc, and from it the other methods as soon as it is there; as many runs at a time as there
    are cores. A line for each that is done."""
    runs = [(method, seed) for method in METHODS for seed in range(config.seeds)]
    configs = [
        stages.train_config_of_file(
            stages.CONFIGS / f"quickstart_{method}.yaml",
            out / "data",
            out / f"{method}-seed{seed}",
            seed,
            start=out / f"bc-seed{seed}" if method != "bc" else None,
            steps=config.max_steps,
        )
        for method, seed in runs
    ]
    after = [None if method == "bc" else seed for method, seed in runs]

    def still(left: int) -> None:
        say(f"             {left} of {len(runs)} are still to end")

    began, trained = time.perf_counter(), each(stages.train_here, configs, waiting=still, after=after)
    for count, (position, outcome) in enumerate(trained, 1):
        if isinstance(outcome, BaseException):
            raise outcome
        name, seconds = Path(configs[position].output_dir).name, time.perf_counter() - began
        say(f"             {name} is trained, {count} of {len(runs)}, after {seconds:.0f} s")


def _sample(folder: Path, say: Any) -> None:
    """One conversation of a policy, as it was played."""
    place = resolve(folder)
    (episode,) = play_episodes(
        Policy.from_pretrained(place), load_tokenizer(place), SmallTalk, range(1), Decoding()
    )
    say(f"\nA conversation of {folder.name}:")
    for message in episode.dialog.messages:
        reward = f"   [dim]{message['reward']:+.2f}[/]" if message.get("reward") is not None else ""
        say(f"  {message['role']:>9}: {message['content']}{reward}")


if __name__ == "__main__":
    run(QuickstartConfig, main)
