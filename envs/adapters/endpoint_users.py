"""Users that an OpenAI-compatible endpoint plays, as a world to talk in: `online --users URL --personas
FILE`.

    the policy sees       the endpoint sees
    user: hello           system: (the persona)
    assistant: welcome    assistant: hello
    user: a table, ...    user: welcome            and says what comes next: a table, ...

Nobody pays in this world: every reward is None, and rewards that are named judge the conversation when it is
over. What the endpoint said, word for word, and which persona it was stand in the `meta` of the Dialog, under
`user`. A user that gives no answer (chat_endpoint.py) fails its own episode. A conversation ends where the
persona's stop marker comes (terminated), or after so many replies, each of them answered (truncated).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from envs.adapters.chat_endpoint import Answer, ChatEndpoint, EndpointError, checked_address
from envs.adapters.personas import Persona, read_personas
from envs.text_world import Message
from rl_dialog.errors import UserError

BEGIN = "(The conversation begins here. Write your first message.)"  # what is said to who speaks first
SILENCE = "..."  # how an empty reply reaches the endpoint: many refuse empty messages
NOBODY = "The conversation did not begin."  # what stands in the log of such an episode
KEPT = 4096  # first words that are remembered
FAILED_FOR = 30.0  # seconds in which a group whose first words failed is not asked for them again

Stepped = tuple[list[Message], None, bool, bool, dict[str, Any]]


class Users:
    """Makes conversations with the users that an endpoint plays. The seed says which persona it is.

    Episodes of one seed begin with the same words, which the endpoint is asked for once: then the replies of
    a group can be compared.
    """

    __name__ = "users"

    def __init__(
        self, endpoint: ChatEndpoint, personas: Sequence[Persona], *, turns: int, concurrency: int
    ) -> None:
        """turns: replies of the policy; concurrency: users that are waited for at a time."""
        self.endpoint, self.personas = endpoint, tuple(personas)
        self.turns, self.concurrency = turns, concurrency
        self.__setstate__({})

    def __call__(self) -> UserTalk:
        return UserTalk(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._guard = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._openings: dict[int, tuple[float, Answer | EndpointError]] = {}

    def persona_of(self, seed: int) -> Persona:
        """Who the user is in the episodes of a seed."""
        return random.Random(f"persona {seed}").choice(self.personas)

    def opening(self, persona: Persona, seed: int) -> Answer:
        """The first words in the episodes of a seed. Raises EndpointError."""
        with self._guard:
            lock = self._locks.setdefault(seed, threading.Lock())
        with lock:
            when, known = self._openings.get(seed, (0.0, None))
            if isinstance(known, Answer):
                return known
            if known is None or time.monotonic() - when > FAILED_FOR:
                known = self._asked_for_opening(persona, seed)
                self._remember(seed, known)
        if isinstance(known, EndpointError):
            raise known
        return known

    def ask(self, persona: Persona, messages: Sequence[Message], seed: int) -> Answer:
        """What the persona says next in a conversation as the policy sees it. Raises EndpointError."""
        turned = [_turned(message) for message in messages]
        if not turned or turned[-1]["role"] != "user":
            turned.append({"role": "user", "content": BEGIN})
        asked = [{"role": "system", "content": persona.system}, *turned]
        return self.endpoint.answer(asked, seed=seed + len(messages), request=persona.request)

    def _asked_for_opening(self, persona: Persona, seed: int) -> Answer | EndpointError:
        try:
            return self.ask(persona, _greeting(persona), seed)
        except EndpointError as error:
            return error

    def _remember(self, seed: int, known: Answer | EndpointError) -> None:
        with self._guard:
            self._openings[seed] = time.monotonic(), known
            while len(self._openings) > KEPT:
                oldest = next(iter(self._openings))
                del self._openings[oldest]
                self._locks.pop(oldest, None)


class UserTalk:
    """A conversation with one of the users."""

    def __init__(self, source: Users) -> None:
        self.source, self.max_turns = source, source.turns

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """What the user says first; info names the persona."""
        self.seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        self.persona = self.source.persona_of(self.seed)
        self.answers: list[Answer] = []
        self.replies, self.messages = 0, _greeting(self.persona)
        try:
            over = self._hear_opening()
            failed = "the user ended the conversation before it began" if over else ""
        except EndpointError as error:
            failed = str(error)
        if failed:
            self.messages = self.messages or [{"role": "user", "content": NOBODY}]
            return list(self.messages), {"failed": failed, "meta": self._meta()}
        return list(self.messages), {"meta": self._meta()}

    def step(self, reply: str) -> Stepped:
        """Says the reply, and waits for the user's answer to it."""
        self.replies += 1
        self.messages.append({"role": "assistant", "content": reply})
        try:
            over = self._hear(self.source.ask(self.persona, self.messages, self.seed))
        except EndpointError as error:
            info = {"failed": str(error), "meta": self._meta()}
            return list(self.messages), None, False, True, info
        cut = not over and self.replies >= self.max_turns
        return list(self.messages), None, over, cut, {"meta": self._meta()}

    def _hear_opening(self) -> bool:
        if not self.persona.opening:
            return self._hear(self.source.opening(self.persona, self.seed))
        self.messages.append({"role": "user", "content": self.persona.opening})
        return False

    def _hear(self, answer: Answer) -> bool:
        """Takes what the user said, up to its stop marker; whether that was there."""
        self.answers.append(answer)
        stop = self.persona.stop
        over = bool(stop) and stop in answer.text
        said = (answer.text.split(stop, 1)[0] if over else answer.text).strip()
        if said:
            self.messages.append({"role": "user", "content": said})
        return over

    def _meta(self) -> dict[str, Any]:
        """For the log. All episodes of a persona stay in one split when they are learned from again."""
        told = {"persona": self.persona.name, "model": self.source.endpoint.model}
        goal = {} if self.persona.goal is None else {"goal": self.persona.goal}
        said = [asdict(answer) for answer in self.answers]
        return {"user": told | goal | {"said": said}, "group": f"users: {self.persona.name}"}


def users_of(
    address: str, personas: str, *, model: str, turns: int, concurrency: int, seconds: float
) -> tuple[Users, Users]:
    """The users to learn with, and those to measure with. The endpoint is asked for a word first.

    Raises UserError for an address or a file that does not do, and where the endpoint does not answer.
    """
    checked_address("--users", address)
    splits = read_personas(personas)
    endpoint = ChatEndpoint(address, model, seconds)
    try:
        endpoint = ChatEndpoint(address, model or endpoint.listed_model(), seconds)
        first = splits["train"][0]
        Users(endpoint, [first], turns=turns, concurrency=1).ask(first, _greeting(first), 0)
    except EndpointError as error:
        raise UserError(
            f"--users: {error}. Expected an OpenAI-compatible endpoint, such as `serve` starts, that answers "
            "POST /chat/completions; --user_model names a model where it lists none, and OPENAI_API_KEY in "
            "the environment is its key"
        ) from error
    how = {"turns": turns, "concurrency": concurrency}
    return Users(endpoint, splits["train"], **how), Users(endpoint, splits["validation"], **how)


def _greeting(persona: Persona) -> list[Message]:
    return [{"role": "assistant", "content": persona.greeting}] if persona.greeting else []


def _turned(message: Message) -> Message:
    """As the user sees it."""
    if message["role"] == "user":
        return {"role": "assistant", "content": message["content"]}
    return {"role": "user", "content": message["content"] or SILENCE}
