"""Talk to a checkpoint in the terminal.

    python -m pipelines.chat --checkpoint runs/ilql
    python -m pipelines.chat --checkpoint runs/ilql --temperature 0.8 --save chats.jsonl --debug
    python -m pipelines.chat --checkpoint runs/ilql --beams_by_rank 5 --prime "hi" "hello, how are you?"

By default it answers as `evaluate` measures a policy and `serve` serves it: sampled at temperature 1, or
the best of several replies where the method says so. `--beams_by_rank 5` is the way of the 2019 bots: a
beam search proposes five replies and one of them is drawn by rank, .4 .3 .2 .1 0. That is another policy
than the one that was evaluated. `--prime` puts exchanges before every conversation, as they did. Saved chats
are log lines that `prepare` reads; what primed them has weight 0 there, so nothing learns to say it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rl_dialog.data.files import check_appendable
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.checkpoint import method_name
from rl_dialog.run import OnDevice, Quiet, at_least, interrupted_once, require, run
from rl_dialog.serving.sitting import Chat, obey
from rl_dialog.serving.terminal import saved_at_the_end, typed_lines


@dataclass(frozen=True)
class ChatConfig(Decoding, OnDevice, Quiet):
    """Whom to talk to, and how it answers."""

    checkpoint: str = ""
    """run folder (its best checkpoint) or checkpoint directory"""
    system: str = ""
    """system prompt"""
    prime: tuple[str, ...] = ()
    """what the user and the bot said before every conversation, in turns"""
    beams_by_rank: int = 0
    """draw one of so many beams by rank, as the bots of 2019 did with 5, instead of sampling; 0 does not"""
    beta: float | None = None
    """another beta, for a checkpoint whose method has one"""
    seed: int = 0
    """the same seed and input give the same replies"""
    debug: bool = False
    """show the context, all beams with their scores or all replies that were chosen among with their Q, and
    Q, V and log-probabilities of each token of the reply"""
    save: str = ""
    """append every conversation to this file as one JSON line"""


def main(config: ChatConfig) -> dict[str, Any]:
    """Talks until the user leaves; returns how much was said and where it was saved."""
    require(config, checkpoint="a run folder or a checkpoint directory")
    if len(config.prime) % 2:
        expected = "a reply to every message, an even number of texts"
        raise UserError(f"--prime: expected {expected}, got {len(config.prime)}")
    if config.save:
        check_appendable(config.save)
    load_quietly()
    chat = begin(config)
    if not config.quiet:
        method = method_name(chat.policy.method)
        print(f"{chat.place} ({method}). /help shows the commands, /quit leaves.", flush=True)
    with interrupted_once(), saved_at_the_end(chat.save):
        for line in typed_lines("" if config.quiet else "you> "):
            if not obey(chat, line):
                break
    return {"replies": chat.replies, "dialogs_saved": chat.saved, "saved": config.save or None}


def begin(config: ChatConfig) -> Chat:
    """A sitting in which nobody has said anything yet."""
    return Chat(
        config.checkpoint,
        decoding_of(config),
        by_rank=bool(config.beams_by_rank),
        beta=config.beta,
        device=config.device,
        system=config.system,
        prime=config.prime,
        seed=config.seed,
        save=config.save,
        debug=config.debug,
    )


def decoding_of(config: ChatConfig) -> Decoding:
    """How replies are drawn. Raises UserError for settings that contradict each other."""
    at_least(config, beams_by_rank=0, seed=0)
    decoding = Decoding.of(config)
    if config.beams_by_rank:
        decoding = replace(decoding, do_sample=False, num_beams=config.beams_by_rank)
    decoding.check()
    return decoding


if __name__ == "__main__":
    run(ChatConfig, main)
