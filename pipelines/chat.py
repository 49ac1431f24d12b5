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

import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import encode_prompt, load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import (
    Decoding,
    Reply,
    beam_replies,
    choose_beam,
    choose_reply,
    generations,
    load_for_decoding,
    prompt_room,
    stream,
    stream_reply,
)
from rl_dialog.evaluation.runs import existing
from rl_dialog.evaluation.scoring import reference_policy, token_table
from rl_dialog.models.checkpoint import load_prior, method_name, resolve
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.run import OnDevice, Quiet, run

HELP = """/reset   start a new conversation
/undo    take back your last message and its answer
/help    show this
/quit    leave (quit, exit and Ctrl-D do too)"""


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
    """show the context, all beams with their scores or all replies that were chosen among with their Q, and Q, V and log-probabilities of each
    token of the reply"""
    save: str = ""
    """append every conversation to this file as one JSON line"""


class Chat:
    """One sitting: a policy and the conversation so far."""

    def __init__(self, config: ChatConfig) -> None:
        self.config, self.place = config, resolve(existing(config.checkpoint))
        self.decoding = decoding_of(config)
        self.policy: Policy = load_for_decoding(self.place, beta=config.beta).to(named_device(config.device))
        self.tokenizer = load_tokenizer(self.place)
        self.prior, self.prior_note = _prior(self.policy, self.place) if config.debug else (None, "")
        self.replies = self.saved = 0
        self.start()

    def start(self) -> None:
        """A conversation in which nobody has said anything yet but what it is primed with, which is shown."""
        self.id = f"chat-{uuid.uuid4().hex[:12]}"
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        system = _as_typed(self.config.system, sys.getfilesystemencoding())
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        texts = [_as_typed(text, sys.getfilesystemencoding()) for text in self.config.prime]
        for user, bot in zip(texts[::2], texts[1::2], strict=True):
            self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": bot, "weight": 0}]  # no reply of the policy's
            print(f"you> {user}\nbot> {bot}", flush=True)
        self.given = len(self.messages)

    def answer(self, text: str) -> None:
        """Adds the user's message and the reply, which it prints."""
        self.messages.append({"role": "user", "content": text})
        if self.config.debug:
            prompt = encode_prompt(self.messages, self.tokenizer, max_length=prompt_room(self.policy, self.decoding))
            print(f"context ({len(prompt)} tokens): {self.tokenizer.decode(prompt)}")
        reply = self._draw() if self.config.beams_by_rank else self._choose() if generations(self.policy, self.decoding) > 1 else self._stream()
        if self.config.debug:
            print(self._table(prompt, reply), flush=True)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.replies += 1

    def undo(self) -> bool:
        """Takes back the last exchange; False when there is none."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user" and i >= self.given]
        if users:
            del self.messages[users[-1] :]
        return bool(users)

    def save(self) -> None:
        """Appends the conversation to the transcript, if it has a reply; a message that was not answered is left out."""
        while self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()
        if not self.config.save or len(self.messages) <= self.given:
            return
        others = {"beta": self.config.beta, "beams_by_rank": self.config.beams_by_rank or None}
        given = {name: value for name, value in others.items() if value is not None}
        decoding = asdict(self.decoding) | given
        meta = {"checkpoint": self.place, "method": method_name(self.policy.method), "decoding": decoding, "started": self.started}
        path = Path(self.config.save)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(Dialog(self.id, self.messages, source="chat", meta=meta).to_json() + "\n")
        self.saved += 1

    def _stream(self) -> Reply:
        print("bot> ", end="", flush=True)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        return stream_reply(self.policy, self.tokenizer, self.messages, self.decoding, seed=self._seed(), streamer=streamer)

    def _choose(self) -> Reply:
        choice = choose_reply(self.policy, self.tokenizer, self.messages, self.decoding, seed=self._seed())
        for i, reply in enumerate(choice.replies) if self.config.debug else ():
            told = "  ".join(f"{name} {values[i]:8.4f}" for name, values in choice.scores.items())
            print(f"reply {i + 1}{' *' if i == choice.chosen else '  '} {told}  {reply.text or '(empty)'}")
        print(f"bot> {choice.replies[choice.chosen].text}", flush=True)
        return choice.replies[choice.chosen]

    def _draw(self) -> Reply:
        beams = beam_replies(self.policy, self.tokenizer, self.messages, self.decoding)
        chosen, odds = choose_beam(beams, np.random.default_rng(self._seed()))
        for i, beam in enumerate(beams) if self.config.debug else ():
            print(f"beam {i + 1}{' *' if i == chosen else '  '} score {beam.score:8.4f}  drawn with {odds[i]:.2f}  {beam.text or '(empty)'}")
        print(f"bot> {beams[chosen].text}", flush=True)
        return beams[chosen]

    def _seed(self) -> int:
        """Another stream for each reply of a sitting, so that a message that was taken back can be answered anew."""
        return stream(self.config.seed, self.replies)

    def _table(self, prompt: list[int], reply: Reply) -> str:
        ids = [*reply.tokens, *([self.tokenizer.eos_token_id] if reply.finished else [])]
        names = {"q": "Q", "v": "V", "advantage": "Q - V", "prior": "log prior", "lm": "log LM", "policy": "log policy"}
        lines = [f"{'token':<16}" + "".join(f"{title:>12}" for title in names.values())]
        for row in token_table(self.policy, self.prior, prompt, ids) if ids else ():
            cells = "".join(f"{'-' if row[name] is None else format(row[name], '.4f'):>12}" for name in names)
            lines.append(f"{self.tokenizer.decode([row['token']])!r:<16}" + cells)
        return "\n".join(lines + ([f"no log prior: {self.prior_note}"] if self.prior_note else []))


def main(config: ChatConfig) -> dict[str, Any]:
    """Talks until the user leaves; returns how much was said and where it was saved."""
    if not config.checkpoint:
        raise UserError("expected --checkpoint: a run folder or a checkpoint directory")
    if len(config.prime) % 2:
        raise UserError(f"--prime: expected a reply to every message, an even number of texts, got {len(config.prime)}")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    chat = Chat(config)
    if not config.quiet:
        print(f"{chat.place} ({method_name(chat.policy.method)}). /help shows the commands, /quit leaves.", flush=True)
    with saved_at_the_end(chat.save):
        for line in typed_lines("" if config.quiet else "you> "):
            if not _obey(chat, line):
                break
    return {"replies": chat.replies, "dialogs_saved": chat.saved, "saved": config.save or None}


def _obey(chat: Chat, line: str) -> bool:
    """Does what a line asks for; False when it asks to leave."""
    text = line.strip()
    if text.lower() in ("/quit", "/exit", "quit", "exit"):
        return False
    if text == "/reset":
        chat.save()
        chat.start()
        print("A new conversation.", flush=True)
    elif text == "/undo":
        print("Taken back." if chat.undo() else "There is nothing to take back.", flush=True)
    elif text.startswith("/"):
        print(HELP if text == "/help" else f"unknown command {text.split()[0]}\n{HELP}", flush=True)
    elif text:
        chat.answer(text)
    return True


def typed_lines(prompt: str) -> Iterator[str]:
    """What the user types; a terminal gets line editing."""
    if not sys.stdin.isatty():
        yield from (_as_typed(line, sys.stdin.encoding) for line in sys.stdin)
        return
    while True:
        try:
            yield _as_typed(input(prompt), sys.stdin.encoding)
        except EOFError:
            print()
            return


def _as_typed(text: str, encoding: str) -> str:
    """Text with bytes that its encoding does not have, which Python reads as lone surrogates (PEP 383), is UTF-8, or else Latin-1."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        typed = text.encode(encoding, "surrogateescape")
        try:
            return typed.decode("utf-8")
        except UnicodeDecodeError:
            return typed.decode("latin-1")
    return text


@contextmanager
def saved_at_the_end(save: Callable[[], None]) -> Iterator[None]:
    """Saves the conversation however the block ends; Ctrl-C and a termination signal end it like /quit."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        save()


def decoding_of(config: ChatConfig) -> Decoding:
    """How replies are drawn. Raises UserError for settings that contradict each other."""
    decoding = Decoding.of(config)
    if config.beams_by_rank < 0:
        got = config.beams_by_rank
        raise UserError(f"--beams_by_rank: expected a number of beams, or 0 to sample, got {got}")
    if config.beams_by_rank:
        decoding = replace(decoding, do_sample=False, num_beams=config.beams_by_rank)
    decoding.check()
    return decoding


def _prior(policy: Policy, place: str) -> tuple[Prior | None, str]:
    """The frozen prior for the table of tokens, and why it cannot be shown."""
    try:
        prior = load_prior(place)
    except ValueError as error:
        return None, str(error)
    return prior, reference_policy(policy, prior)[1]


if __name__ == "__main__":
    run(ChatConfig, main)
