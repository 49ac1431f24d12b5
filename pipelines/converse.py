"""Conversations in words: a system of modules, or a language model of this project, meets simulated users.

    python -m pipelines.converse --output_dir runs/words                                # template words
    python -m pipelines.converse --output_dir runs/nlu --world DIR --nlu models/nlu     # a trained NLU
    python -m pipelines.converse --output_dir runs/lm --system runs/ilql                # a checkpoint
    python -m pipelines.converse --output_dir runs/logs --placeholders --mistakes 0.2   # logs to train one on

User i of a seed has the same goal whoever meets it. Into the output folder go

    results.json      every figure with its 95 % interval over conversations, as `simulate` measures them
    dialogs.jsonl     the conversations, with acts and rewards: log lines that `prepare` reads
    converse.yaml     the config

How the words are read and where a language model's numbers come from is told in envs/multiwoz/README.md,
"In words".
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from envs.multiwoz import Simulator, load_world
from envs.multiwoz.agents import Meeting, Reads, played, record
from envs.multiwoz.in_words import InWords, session_of_modules
from envs.multiwoz.rollout import Respond, published_scores
from pipelines.task_agents import InWorld, language_model, language_model_meetings, reader, responder
from rl_dialog.config import changed
from rl_dialog.data.files import write_json
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.task_figures import headline, table, task_figures
from rl_dialog.run import Output, at_least, claim_output, run


@dataclass(frozen=True)
class ConverseConfig(InWords, InWorld, Output):
    """Who meets whom, and how often."""

    episodes: int = 200
    """conversations"""
    seed: int = 0
    """goals, users, and the system's chance"""
    decoding: Decoding = Decoding(do_sample=False, max_new_tokens=96)
    """how a checkpoint's replies are drawn"""
    beta: float | None = None
    """another beta, for a checkpoint whose method has one"""
    batch_size: int = 64
    """conversations of a checkpoint stepped together; changes no result"""


def main(config: ConverseConfig) -> dict[str, Any]:
    """Holds all conversations and writes them; returns headline figures.

    Raises UserError or OSError for what the user can fix.
    """
    at_least(config, episodes=1, batch_size=1, seed=0)
    config.check()
    config.decoding.check()
    simulator = Simulator(load_world(config.world), config.options)
    reads = {side: reader(name, side, simulator) for side, name in config.readers.items()}
    began = time.perf_counter()
    policy = responder(config.system, simulator)
    if policy is None:
        config.check_language_model()
    meetings = _meetings(config, simulator, reads, policy)
    out = claim_output(config, "converse")
    meetings = list(
        tqdm(meetings, total=config.episodes, unit="dialog", disable=True if config.quiet else None)
    )
    seconds = time.perf_counter() - began
    conversations = [played(meeting, simulator, i) for i, meeting in enumerate(meetings)]
    scores = published_scores(conversations, simulator)
    figures = task_figures([each.outcome for each in conversations], scores)
    if meetings[0].user.turns[0].text is not None:
        notes = config.placeholders or policy is None
        records = (Dialog.from_record(record(meeting, simulator, notes=notes)) for meeting in meetings)
        write_jsonl(records, out / "dialogs.jsonl")
    about = {name: getattr(config, name) for name in ("system", "episodes", "seed")}
    about = {"world": simulator.world.source, **about, "options": changed(config.options)}
    write_json(out / "results.json", {**about, "figures": figures})
    if not config.quiet:
        print(table(figures), flush=True)
    return {
        **headline(figures),
        "success_interval": [figures["success"]["low"], figures["success"]["high"]],
        "episodes": config.episodes,
        "seconds": round(seconds, 1),
        "results": str(out / "results.json"),
    }


def _meetings(
    config: ConverseConfig, simulator: Simulator, reads: Reads, policy: Respond | None
) -> Iterator[Meeting]:
    """The conversations of a system of modules with this policy, else of the language model."""
    if policy:
        session = session_of_modules(simulator, policy, reads, config)
        return session.play((stream(config.seed, i), 0, 0, 0) for i in range(config.episodes))
    if config.nlu == "templates" and not config.system_nlu:
        reads = {**reads, "system": None}  # the templates would find the acts as they are
    model = language_model(config.system, beta=config.beta)
    how = {"seed": config.seed, "batch_size": config.batch_size}
    return language_model_meetings(model, simulator, reads, config.episodes, config.decoding, **how)


if __name__ == "__main__":
    run(ConverseConfig, main)
