"""The closed circle: a served policy talks to users, learns from their votes alone, and its successor joins
it on the running server.

    python -m pipelines.circle --output_dir runs/circle

    logs -> prepare -> bc -> serve -> users talk and vote -> prepare from the store -> mc
         -> rollout beside bc -> users get either one -> A/B report

The users are simulated (envs/small_talk_world.py), the rest is real: Ray Serve, HTTP, an API key, the store.
The world knows the true return of a conversation, so the report can show beside the votes what they stand
for; nothing learns from it. A verb of its own, because the quickstart compares methods over seeds and needs
no server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.small_talk import optimal_return, write_logs
from envs.small_talk_users import Crowd, Server, Talk
from pipelines import ab, stages
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.local_serve import served_here
from rl_dialog.errors import UserError
from rl_dialog.models.checkpoint import method_name
from rl_dialog.run import Output, at_least, claim_output, run

REWARDED = ("--rewards.vote", "1", "--max_length", "512")  # how all logs of the circle are prepared
KEY = "simulated users"


@dataclass(frozen=True)
class CircleConfig(Output):
    """How large the circle is. The defaults take a while on two cores."""

    output_dir: str = "runs/circle"
    """the folder for everything that it writes"""
    dialogs: int = 2000
    """conversations in the logs that bc is cloned from"""
    chats: int = 1000
    """chats with bc, whose votes are learnt from"""
    ab_chats: int = 1000
    """chats with bc or its successor, whichever the server draws"""
    users: int = 16
    """users who talk at the same time"""
    train: str = str(stages.CONFIGS / "circle_mc.yaml")
    """how to learn from the votes: a config of `train`"""
    bc_steps: int = 0
    """updates of bc; 0 takes those of tune_configs/quickstart_bc.yaml"""
    steps: int = 0
    """updates of the successor; 0 takes those of its config"""
    seed: int = 0
    """of logs, training and users. The server draws models by chance, so two circles differ all the same"""


Say = Callable[[str, str], None]


def main(config: CircleConfig) -> dict[str, Any]:
    """Runs the circle; returns the differences between the two policies, what happened on the way, and the
    paths."""
    began, console = time.perf_counter(), Console(quiet=config.quiet, highlight=False)
    at_least(config, dialogs=1, chats=1, ab_chats=1, users=1, bc_steps=0, steps=0, seed=0)
    successor = _successor(config, Path(config.output_dir).absolute())
    out = claim_output(config, "circle")

    def say(step: str, what: str) -> None:
        console.print(f"[bold]{step:<9}[/]{time.perf_counter() - began:5.0f} s  {what}")

    url = f"sqlite:///{out / 'chats.db'}"
    with connect():
        _clone(config, out, say)
        first, between, last = _serve_and_learn(config, successor, url, say)
    talks = [*first, *between, *last]
    returns = {"return": {talk.chat: talk.total for talk in talks}}
    report = ab.ABConfig(store=url, output_dir=str(out / "ab"), baseline="bc", quiet=config.quiet)
    compared = ab.main(report, known=returns)
    seconds = round(time.perf_counter() - began, 1)
    optimum = f"the best possible return is {optimal_return():.2f}"
    say("done", f"in {seconds:.0f} s; {optimum}. The report: {compared['html']}")
    happened = {
        "requests": sum(talk.requests for talk in talks),
        "chats_during_rollout": len(between),
        "votes_learnt_from": sum(talk.votes for talk in first),
    }
    return {**compared, **happened, "store": url, "output_dir": str(out), "seconds": seconds}


def _clone(config: CircleConfig, out: Path, say: Say) -> None:
    """Logs of a mixed-quality bot, and bc of them."""
    say("logs", f"{config.dialogs} chats of a mixed-quality bot")
    (out / "logs").mkdir()
    write_logs(out / "logs" / "small_talk.jsonl", dialogs=config.dialogs, seed=config.seed)
    stages.prepare_logs(str(out / "logs"), out / "data", *REWARDED, "--vocab_size", "1024")
    say("train", "bc, which clones it")
    what = stages.CONFIGS / "quickstart_bc.yaml", out / "data", out / "bc", config.seed
    stages.train_run(stages.train_config_of_file(*what, steps=config.bc_steps))


def _serve_and_learn(
    config: CircleConfig, successor: Any, url: str, say: Say
) -> tuple[list[Talk], list[Talk], list[Talk]]:
    """Talks with bc, those during the rollout of its successor, and those with either."""
    out, name = Path(successor.output_dir).parent, Path(successor.output_dir).name
    with served_here(url, {"bc": out / "bc"}, KEY) as (address, key, deploy):
        server = Server(address, key)
        crowd_of = partial(Crowd, server, seed=config.seed)
        say("chats", f"{config.chats} users talk to bc at {server.url}, {config.users} at a time")
        with crowd_of(range(config.chats), at_once=config.users) as crowd:
            first = crowd.finish()
        say("prepare", f"{sum(talk.votes for talk in first)} votes from the store of the running server")
        stages.prepare_logs(url, out / "served", *REWARDED, "--tokenizer", str(out / "data" / "tokenizer"))
        say("train", f"{name} from bc, on these votes")
        stages.train_run(successor)
        say("rollout", f"{name} beside bc, one chat each, while users talk")
        with crowd_of(count(config.chats), at_once=max(1, config.users // 4)) as crowd:
            deploy({"bc": out / "bc", name: out / name})
        between = crowd.talks
        say("A/B", f"{config.ab_chats} new users get bc or {name}; {len(between)} came during the rollout")
        begin = config.chats + len(between)
        with crowd_of(range(begin, begin + config.ab_chats), at_once=config.users) as crowd:
            return first, between, crowd.finish()


def _successor(config: CircleConfig, out: Path) -> Any:
    """The run that learns from the votes, in a folder named after its method. Raises UserError for a config
    that cannot be read, and for one that clones again."""
    how = {"start": out / "bc", "steps": config.steps}
    chosen = stages.train_config_of_file(Path(config.train), out / "served", out, config.seed, **how)
    if (name := method_name(chosen.method)) == "bc":
        raise UserError(f"--train {config.train}: expected a method that learns from votes, got bc")
    return replace(chosen, output_dir=str(out / name))


if __name__ == "__main__":
    run(CircleConfig, main)
