"""A conversation of a person with the agents, turn by turn: any module's output may be replaced, and every
turn taken back.

The person is the user or the system, or watches both. `talk_commands.py` lets a person do all this by typing.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envs.multiwoz.acts import Acts, checked
from envs.multiwoz.agents import EndToEndAgent, Meeting, Memory, Session, SystemAgent, Turn, UserAgent, record
from envs.multiwoz.lexical import lexicalised
from envs.multiwoz.tracker import DialogState, belief_state
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError

MODULES = {
    "nlu": "understood",
    "state": "state",
    "acts": "acts",
    "text": "text",
}  # as they work -> arguments of `respond`
Play = Literal["user", "system", "none"]  # whose part the person takes


@dataclass
class Move:
    """A turn that was taken, and how to take it again."""

    before: Any  # a copy of the conversation
    spoken: str | Acts | None  # by the person; None for a turn without one
    changes: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"system": {}, "user": {}}
    )  # side -> module -> output


class Talk:
    """One sitting. `now` is the conversation: a Meeting of two agents, or the system's Memory where the
    person is the user.

    Args:
        name: the system's, in what is saved.
        goal: the user's; by default one is drawn.
    """

    def __init__(
        self,
        user: UserAgent,
        system: SystemAgent | EndToEndAgent,
        *,
        play: Play,
        name: str,
        seed: int = 0,
        goal: Mapping[str, Any] | None = None,
    ) -> None:
        self.user, self.system, self.play, self.name, self.wish = user, system, play, name, goal
        self.simulator, self.session = user.simulator, Session(user, system)
        self.turns = self.saved = 0
        self.start(seed)

    def start(self, seed: int) -> None:
        """A conversation of this seed. Raises GoalError for an impossible goal."""
        seeds = (seed, 0, 0, 0)
        self.seed, self.past = seed, list[Move]()
        if self.play == "user":
            self.goal = self.simulator.user(seeds, self.wish).goal
            self.now: Meeting | Memory[DialogState] = self.system.start(seeds)
        else:
            self.now = self.session.start(seeds, self.wish)
            self.goal = self.now.goal

    @property
    def done(self) -> bool:
        return isinstance(self.now, Meeting) and self.now.done

    def take(self, spoken: str | Acts | None, changes: dict[str, dict[str, Any]] | None = None) -> None:
        """The next turn. Raises UserError for what cannot be said or set; then nothing has happened."""
        move = Move(copy.deepcopy(self.now), spoken, *([changes] if changes else []))
        overrides = {
            side: {MODULES[module]: value for module, value in of.items()}
            for side, of in move.changes.items()
        }
        try:
            if isinstance(self.now, Memory):
                self._as_user(spoken, overrides["system"])
            elif self.play == "system" and spoken is not None:
                self._as_system(spoken, overrides)
            else:
                self.session.step(self.now, system=overrides["system"], user=overrides["user"])
        except BaseException:
            self.now = move.before
            raise
        self.past.append(move)
        self.turns += 1

    def _as_user(self, spoken: str | Acts, overrides: dict[str, Any]) -> None:
        if not isinstance(spoken, str):
            acts = checked(spoken, side="user")
            overrides, spoken = {"understood": acts} | overrides, self.user.nlg.say(acts, self.now.voice)
        self.system.respond(self.now, spoken, **overrides)

    def _as_system(self, spoken: str | Acts, overrides: dict[str, dict[str, Any]]) -> None:
        words: dict[str, Any] = {"acts": spoken}
        if isinstance(spoken, str):  # placeholders are filled in; the acts are what the user would read
            memory = copy.deepcopy(self.now.system)
            text, bookings = lexicalised(spoken, self.hint().state, self.simulator.world.database, memory.rng)
            words = {
                "text": text,
                "acts": tuple(dict.fromkeys((*self.user.nlu(text, memory.words), *bookings))),
            }
        self.session.step(self.now, system=words | overrides["system"], user=overrides["user"])

    def change(self, side: str, module: str, value: Any) -> None:
        """Takes the last turn again with another output of a module.

        What was set of later modules on that side is forgotten.
        """
        if not self.past:
            raise UserError("expected a turn to take again; say something first")
        move = self.past[-1]
        later = list(MODULES)[list(MODULES).index(module) :]
        earlier_changes = {name: output for name, output in move.changes[side].items() if name not in later}
        after = self.now
        self.now = copy.deepcopy(move.before)
        try:
            self.take(move.spoken, move.changes | {side: earlier_changes | {module: value}})
        except BaseException:
            self.now = after
            raise
        del self.past[-2]
        self.turns -= 1

    def undo(self, count: int) -> int:
        """Goes back so many turns, or to the beginning; how many it were."""
        count = min(count, len(self.past))
        if count:
            self.now = self.past[-count].before
            del self.past[-count:]
        return count

    def hint(self) -> Turn:
        """What the system's modules would make of the user's last turn."""
        memory, user_turn = copy.deepcopy(self.now.system), self.now.user.turns[-1]
        return self.system.respond(memory, user_turn.utterance)

    def belief(self) -> DialogState:
        """The system's memory."""
        if isinstance(self.now, Memory):
            return self.now.mind
        return self.now.system.mind if self.done else self.hint().state

    def last(self) -> dict[str, Turn]:
        """The last turn of each side that is an agent, the earlier first."""
        memory = self.now if isinstance(self.now, Memory) else self.now.system
        turns = {"system": memory.turns[-1]} if memory.turns else {}
        return turns | ({"user": self.now.user.turns[-1]} if isinstance(self.now, Meeting) else {})

    def save(self, path: str | Path) -> None:
        """Appends the conversation to a file, as one JSON line, if the system has spoken."""
        if not path or not self.past:
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(self.dialog().to_json() + "\n")
        self.saved += 1

    def dialog(self) -> Dialog:
        """The conversation so far."""
        if isinstance(self.now, Memory):
            messages: list[dict[str, Any]] = []
            for turn in self.now.turns:
                messages.append(
                    {"role": "user", "content": turn.heard, "acts": [list(act) for act in turn.understood]}
                )
                messages.append(
                    {"role": "assistant", "content": turn.text, "acts": [list(act) for act in turn.acts]}
                )
            entry: dict[str, Any] = {
                "messages": messages,
                "goal": self.goal,
                "meta": {"seeds": [self.seed, 0, 0, 0]},
            }
        else:
            entry = record(self.now, self.simulator)
        entry["meta"] |= {"played": self.play, "system": self.name}
        changes = [
            {"turn": n, **_plain(move.changes)}
            for n, move in enumerate(self.past)
            if any(move.changes.values())
        ]
        if changes:
            entry["meta"]["overwritten"] = changes
        return Dialog.from_record(entry | {"id": f"talk-{uuid.uuid4().hex[:12]}", "source": "talk"})


def _plain(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was overwritten, as JSON has it."""
    return {
        side: {
            name: belief_state(value) if isinstance(value, DialogState) else value
            for name, value in of.items()
        }
        for side, of in changes.items()
    }
