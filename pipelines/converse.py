"""Conversations in words: a system of modules, or a language model of this project, meets simulated users.

    python -m pipelines.converse --output_dir runs/words                                template words
    python -m pipelines.converse --output_dir runs/nlu --world DIR --nlu models/nlu     a trained NLU
    python -m pipelines.converse --output_dir runs/lm --system runs/ilql                a checkpoint
    python -m pipelines.converse --output_dir runs/logs --placeholders --mistakes 0.2   logs to train one on

User i of a seed has the same goal whoever meets it. Into `out` go

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
from typing import Any, Literal

from tqdm import tqdm

from envs.multiwoz import MultiWOZText, Options, Simulator, load_world
from envs.multiwoz.agents import Meeting, Session, SystemAgent, Understand, UserAgent, played, record
from envs.multiwoz.channel import Channel
from envs.multiwoz.rollout import Respond, published_scores
from pipelines.task_agents import language_model, reader, responder
from rl_dialog.config import changed
from rl_dialog.data.files import write_json
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.task_figures import headline, table, task_figures
from rl_dialog.run import Output, at_least, claim_output, run


@dataclass(frozen=True)
class ConverseConfig(Output):
    """Who meets whom, and how they read each other."""

    system: str = "rule"
    """rule: tracker, hand-written policy and templates; or a run folder or checkpoint, of a task policy (in
    place of the hand-written one) or of a language model"""
    nlu: str = "templates"
    """how both sides read. templates: the templates backwards; acts: nobody reads, acts are passed on; or a
    folder that `fit_nlu` wrote"""
    user_nlu: str = ""
    """the user's, where it is another one"""
    system_nlu: str = ""
    """the system's, where it is another one; a checkpoint reads the words itself, and this one only fills the
    notes that it gets"""
    templates: Literal["manual", "auto_manual"] = "manual"
    """how acts are worded. manual: a sentence for each; auto_manual: one for all acts of a kind where the
    world has one; needs a trained --nlu"""
    placeholders: bool = False
    """the rule system words acts with placeholders, filled in from the databases, as a language model does:
    dialogs to train one on"""
    mistakes: float = 0.0
    """probability that an act of the rule system is dropped, another one, or joined by one more: logs of a
    worse system"""
    world: str = ""
    """folder with MultiWOZ's files; by default a generated town"""
    episodes: int = 200
    """conversations"""
    seed: int = 0
    """goals, users, and the system's chance"""
    options: Options = Options()
    """how users, goals, rewards and measures behave"""
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
    _check(config)
    simulator = Simulator(load_world(config.world), config.options)
    reads = {side: reader(name, side, simulator) for side, name in _readers(config).items()}
    began = time.perf_counter()
    policy = responder(config.system, simulator)
    if policy is None:
        _check_language_model(config)
    out = claim_output(config, "converse")
    running = _meetings(config, simulator, reads, policy)
    meetings = list(
        tqdm(running, total=config.episodes, unit="dialog", disable=True if config.quiet else None)
    )
    seconds = time.perf_counter() - began
    conversations = [played(meeting, simulator, i) for i, meeting in enumerate(meetings)]
    figures = task_figures(
        [each.outcome for each in conversations], published_scores(conversations, simulator)
    )
    notes = config.placeholders or policy is None
    if meetings[0].user.turns[0].text is not None:
        records = (Dialog.from_record(record(meeting, simulator, notes=notes)) for meeting in meetings)
        write_jsonl(records, out / "dialogs.jsonl")
    about = {
        "world": simulator.world.source,
        "system": config.system,
        "episodes": config.episodes,
        "seed": config.seed,
    }
    write_json(out / "results.json", {**about, "options": changed(config.options), "figures": figures})
    if not config.quiet:
        print(table(figures), flush=True)
    ends = {"success_interval": [figures["success"]["low"], figures["success"]["high"]]}
    outcome = {
        "episodes": config.episodes,
        "seconds": round(seconds, 1),
        "results": str(out / "results.json"),
    }
    return {**headline(figures), **ends, **outcome}


def _meetings(
    config: ConverseConfig, simulator: Simulator, reads: dict[str, Understand | None], policy: Respond | None
) -> Iterator[Meeting]:
    """The conversations of a system of modules with this policy, else of the language model."""
    if policy is None:
        backwards = (
            config.nlu == "templates" and not config.system_nlu
        )  # they would find the acts as they are
        yield from _of_language_model(config, simulator, reads | ({"system": None} if backwards else {}))
        return
    world = simulator.world
    if config.mistakes:
        wrong, right = Channel(world.system_acts, world.values, config.mistakes), policy
        policy = lambda state, rng: wrong.passed(right(state, rng), rng)  # noqa: E731
    speakers = world.speakers(config.templates) if config.nlu != "acts" else {"user": None, "system": None}
    user = UserAgent(simulator, nlu=reads["user"], nlg=speakers["user"])
    words = {"nlu": reads["system"], "nlg": speakers["system"], "placeholders": config.placeholders}
    session = Session(user, SystemAgent(simulator, policy, **words))
    yield from session.play((stream(config.seed, i), 0, 0, 0) for i in range(config.episodes))


def _of_language_model(
    config: ConverseConfig, simulator: Simulator, reads: dict[str, Understand | None]
) -> Iterator[Meeting]:
    """A language model's conversations, `batch_size` of them stepped together."""
    policy, tokenizer = language_model(config.system, beta=config.beta)
    for start in range(0, config.episodes, config.batch_size):
        worlds: list[MultiWOZText] = []

        def make_env(worlds: list[MultiWOZText] = worlds) -> MultiWOZText:
            worlds.append(MultiWOZText(simulator, user_nlu=reads["user"], system_nlu=reads["system"]))
            return worlds[-1]

        numbers = range(start, min(start + config.batch_size, config.episodes))
        more = {"seed": config.seed, "batch_size": config.batch_size}
        play_episodes(policy, tokenizer, make_env, numbers, config.decoding, **more)
        yield from (world.meeting for world in worlds)


def _readers(config: ConverseConfig) -> dict[str, str]:
    return {"user": config.user_nlu or config.nlu, "system": config.system_nlu or config.nlu}


def _check_language_model(config: ConverseConfig) -> None:
    if config.placeholders or config.mistakes or config.nlu == "acts" or config.templates == "auto_manual":
        flags = "--placeholders, --mistakes, --nlu acts, --templates auto_manual"
        why = "a language model writes its own words, and hears those that its logs were made of"
        raise UserError(f"{flags}: expected with --system rule or a task policy; {why}")


def _check(config: ConverseConfig) -> None:
    at_least(config, episodes=1, batch_size=1, seed=0)
    if config.nlu == "acts" and (config.placeholders or config.user_nlu or config.system_nlu):
        raise UserError("--nlu acts: expected without words: no --placeholders, --user_nlu, --system_nlu")
    if "acts" in (config.user_nlu, config.system_nlu):
        why = "one that speaks in words cannot be heard by one that takes acts"
        raise UserError(f"expected --nlu acts for both sides: {why}")
    if config.templates == "auto_manual" and "templates" in _readers(config).values():
        why = "those sentences cannot be read backwards"
        raise UserError(f"--templates auto_manual: expected a trained --nlu (pipelines/fit_nlu.py), as {why}")
    config.decoding.check()


if __name__ == "__main__":
    run(ConverseConfig, main)
