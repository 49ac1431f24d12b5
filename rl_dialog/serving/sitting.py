"""A sitting with a policy: the conversation so far, its commands, and how a reply came about."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from transformers import TextStreamer

from rl_dialog.data.schema import Dialog, harmless
from rl_dialog.data.tokenize import encode_prompt, load_tokenizer
from rl_dialog.evaluation.generation import (
    Decoding,
    Reply,
    beam_replies,
    choose_beam,
    choose_reply,
    generations,
    latent_noise,
    load_for_decoding,
    prompt_limits,
    stream,
    stream_reply,
)
from rl_dialog.evaluation.runs import existing
from rl_dialog.evaluation.scoring import reference_policy, token_table
from rl_dialog.models.checkpoint import load_prior, method_name, resolve
from rl_dialog.models.device import named_device
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.serving.terminal import as_typed

HELP = """/reset   start a new conversation
/undo    take back your last message and its answer
/help    show this
/quit    leave (quit, exit and Ctrl-D do too)"""


class Printed(TextStreamer):
    """Shows a reply while it comes."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(harmless(text), stream_end)


class Chat:
    """One sitting: a policy and the conversation so far."""

    def __init__(
        self,
        checkpoint: str,
        decoding: Decoding,
        *,
        by_rank: bool = False,
        beta: float | None = None,
        device: str = "auto",
        system: str = "",
        prime: Sequence[str] = (),
        seed: int = 0,
        save: str = "",
        debug: bool = False,
    ) -> None:
        """
        by_rank: one of the beams is drawn, by its rank.
        prime: what the user and the bot said before every conversation, in turns.
        save: the file that conversations are appended to.
        debug: shows what a reply follows from.
        """
        self.place, self.decoding, self.by_rank = resolve(existing(checkpoint)), decoding, by_rank
        self.beta, self.system, self.prime = beta, system, prime
        self.seed, self.file, self.debug = seed, save, debug
        self.policy: Policy = load_for_decoding(self.place, beta=beta).to(named_device(device))
        self.tokenizer = load_tokenizer(self.place)
        self.prior, self.prior_note = _prior(self.policy, self.place) if debug else (None, "")
        self.replies = self.saved = 0
        self.start()

    def start(self) -> None:
        """A conversation in which nobody has said anything yet but what it is primed with, which is shown."""
        self.id = f"chat-{uuid.uuid4().hex[:12]}"
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        system = as_typed(self.system, sys.getfilesystemencoding())
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        texts = [as_typed(text, sys.getfilesystemencoding()) for text in self.prime]
        for user, bot in zip(texts[::2], texts[1::2], strict=True):
            self.messages += [
                {"role": "user", "content": user},
                {"role": "assistant", "content": bot, "weight": 0},
            ]  # no reply of the policy's
            print(harmless(f"you> {user}\nbot> {bot}"), flush=True)
        self.given = len(self.messages)

    def answer(self, text: str) -> None:
        """Adds the user's message and the reply, which it prints."""
        self.messages.append({"role": "user", "content": text})
        if self.debug:
            prompt = encode_prompt(self.messages, self.tokenizer, **prompt_limits(self.policy, self.decoding))
            print(f"context ({len(prompt)} tokens): {harmless(self.tokenizer.decode(prompt))}")
        reply, seed = (
            self._draw()
            if self.by_rank
            else self._choose()
            if generations(self.policy, self.decoding) > 1
            else self._stream()
        )
        if self.debug:
            print(self._table(prompt, reply, seed), flush=True)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.replies += 1

    def undo(self) -> bool:
        """Takes back the last exchange; False when there is none."""
        users = [
            i for i, message in enumerate(self.messages) if message["role"] == "user" and i >= self.given
        ]
        if users:
            del self.messages[users[-1] :]
        return bool(users)

    def save(self) -> None:
        """Appends the conversation to the file, if it has a reply; a message without an answer is left
        out."""
        while self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()
        if not self.file or len(self.messages) <= self.given:
            return
        others = {"beta": self.beta, "beams_by_rank": self.decoding.num_beams if self.by_rank else None}
        given = {name: value for name, value in others.items() if value is not None}
        decoding = asdict(self.decoding) | given
        meta = {
            "checkpoint": self.place,
            "method": method_name(self.policy.method),
            "decoding": decoding,
            "started": self.started,
        }
        path = Path(self.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(Dialog(self.id, self.messages, source="chat", meta=meta).to_json() + "\n")
        self.saved += 1

    def _stream(self) -> tuple[Reply, int | None]:
        """A reply, and as of the next two the seed that it was drawn with; None of a beam."""
        print("bot> ", end="", flush=True)
        streamer = Printed(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        seed = self._seed()
        reply = stream_reply(
            self.policy, self.tokenizer, self.messages, self.decoding, seed=seed, streamer=streamer
        )
        return reply, None if self.decoding.num_beams > 1 else seed

    def _choose(self) -> tuple[Reply, int | None]:
        choice = choose_reply(self.policy, self.tokenizer, self.messages, self.decoding, seed=self._seed())
        for i, reply in enumerate(choice.replies) if self.debug else ():
            scores = "  ".join(f"{name} {_number(values[i]):>8}" for name, values in choice.scores.items())
            mark, text = " *" if i == choice.chosen else "  ", harmless(reply.text) or "(empty)"
            print(f"reply {i + 1}{mark} {scores}  {text}")
        print(f"bot> {harmless(choice.replies[choice.chosen].text)}", flush=True)
        return choice.replies[choice.chosen], stream(self._seed(), choice.chosen)

    def _draw(self) -> tuple[Reply, int | None]:
        beams = beam_replies(self.policy, self.tokenizer, self.messages, self.decoding)
        chosen, odds = choose_beam(beams, np.random.default_rng(self._seed()))
        for i, beam in enumerate(beams) if self.debug else ():
            print(
                f"beam {i + 1}{' *' if i == chosen else '  '} score {beam.score:8.4f}  drawn with "
                f"{odds[i]:.2f}  {harmless(beam.text) or '(empty)'}"
            )
        print(f"bot> {harmless(beams[chosen].text)}", flush=True)
        return beams[chosen], None

    def _seed(self) -> int:
        """Another stream for each reply of a sitting, so that a message that was taken back can be answered
        anew."""
        return stream(self.seed, self.replies)

    def _table(self, prompt: list[int], reply: Reply, seed: int | None) -> str:
        ids = [*reply.tokens, *([self.tokenizer.eos_token_id] if reply.finished else [])]
        names = {
            "q": "Q",
            "v": "V",
            "advantage": "Q - V",
            "prior": "log prior",
            "lm": "log LM",
            "policy": "log policy",
        }
        noise = None if seed is None else latent_noise(self.policy, self.decoding, [seed])
        rows = token_table(self.policy, self.prior, prompt, ids, noise=noise) if ids else []
        tokens = [repr(self.tokenizer.decode([row["token"]])) for row in rows]
        width = max(15, *map(cell_len, tokens)) + 1
        lines = [f"{'token':<{width}}" + "".join(f"{title:>12}" for title in names.values())]
        for token, row in zip(tokens, rows, strict=True):
            cells = "".join(f"{_number(row[name]):>12}" for name in names)
            lines.append(token + " " * (width - cell_len(token)) + cells)
        return "\n".join(lines + ([f"no log prior: {self.prior_note}"] if self.prior_note else []))


def _number(value: float | None) -> str:
    """Values are in the unit of the rewards, which may be a thousandth."""
    return "-" if value is None else f"{value:.4g}" if 0 < abs(value) < 0.01 else f"{value:.4f}"


def obey(chat: Chat, line: str) -> bool:
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


def _prior(policy: Policy, place: str) -> tuple[Prior | None, str]:
    """The frozen prior for the table of tokens, and why it cannot be shown."""
    try:
        prior = load_prior(place)
    except ValueError as error:
        return None, str(error)
    return prior, reference_policy(policy, prior)[1]
