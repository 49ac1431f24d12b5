"""Talk to a task-oriented system, or be the system for a simulated user, and look into every module on the
way.

    python -m pipelines.talk                                        # you are the user of the generated town
    python -m pipelines.talk --play system --world DIR              # a simulated user talks to you
    python -m pipelines.talk --play none                            # watch the two: Enter is the next turn
    python -m pipelines.talk --system runs/ilql --save talks.jsonl  # a language model answers; talks are kept

`/look` shows what each module made of the last turn, `/set` puts something else in the place of a module's
output and takes the turn again from there, `/undo` goes back. Saved talks are log lines that `prepare` reads.
The modules are those of envs/multiwoz/agents.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from envs.multiwoz import Simulator, load_world
from envs.multiwoz.agents import EndToEndAgent, Message, SystemAgent, UserAgent
from envs.multiwoz.talk import Talk
from envs.multiwoz.talk_commands import greet, obey
from pipelines.task_agents import InWorld, language_model, reader, responder
from rl_dialog.data.files import check_appendable
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, generate_replies, stream
from rl_dialog.run import Quiet, interrupted_once, run
from rl_dialog.serving.terminal import saved_at_the_end, typed_lines


@dataclass(frozen=True)
class TalkConfig(InWorld, Quiet):
    """Who talks to whom."""

    play: Literal["user", "system", "none"] = "user"
    """whose part you take; none: you watch"""
    system: str = "rule"
    """rule: tracker, hand-written policy and templates; or a run folder or checkpoint, of a task policy (in
    place of the hand-written one) or of a language model"""
    nlu: str = "templates"
    """how both sides read. templates: the templates backwards, which understand no other words; or a folder
    that `fit_nlu` wrote"""
    goal: str = ""
    """a JSON file with the user's goal; by default one is drawn"""
    seed: int = 0
    """the same seed and input give the same conversation"""
    save: str = ""
    """append every conversation to this file as one JSON line"""
    decoding: Decoding = Decoding(do_sample=False, max_new_tokens=96)
    """how a language model's replies are drawn"""


def main(config: TalkConfig) -> dict[str, Any]:
    """Talks until the person leaves; returns how much was said and where it was saved."""
    if config.nlu == "acts":
        raise UserError(
            "--nlu: expected templates or a folder that fit_nlu wrote; acts can be said with /acts"
        )
    config.decoding.check()
    if config.save:
        check_appendable(config.save)
    talk = Talk(
        *_agents(config), play=config.play, name=config.system, seed=config.seed, goal=_goal(config.goal)
    )
    save = partial(talk.save, config.save)
    with interrupted_once(), saved_at_the_end(save):
        greet(talk, quiet=config.quiet)
        prompt = "" if config.quiet else {"none": "[Enter]"}.get(config.play, config.play) + "> "
        for line in typed_lines(prompt):
            try:
                if not obey(talk, line.strip(), save=save, quiet=config.quiet):
                    break
            except UserError as error:
                print(f"error: {error}", flush=True)
    return {"turns": talk.turns, "dialogs_saved": talk.saved, "saved": config.save or None}


def _goal(path: str) -> dict[str, Any] | None:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8")) if path else None
    except ValueError as error:
        raise UserError(f"--goal {path}: expected JSON, got {error}") from error


def _agents(config: TalkConfig) -> tuple[UserAgent, SystemAgent | EndToEndAgent]:
    """The simulated user and the system."""
    simulator = Simulator(load_world(config.world), config.options)
    speakers = simulator.world.speakers()
    user = UserAgent(simulator, nlu=reader(config.nlu, "user", simulator), nlg=speakers["user"])
    nlu = reader(config.nlu, "system", simulator)
    if policy := responder(config.system, simulator):
        return user, SystemAgent(simulator, policy, nlu=nlu, nlg=speakers["system"])
    model, tokenizer = language_model(config.system)

    def reply(messages: list[Message]) -> str:
        seeds = [stream(config.seed, len(messages))]  # the same messages get the same reply
        return generate_replies(model, tokenizer, [messages], config.decoding, seeds=seeds)[0].text

    return user, EndToEndAgent(simulator, reply, nlu=nlu)


if __name__ == "__main__":
    run(TalkConfig, main)
