"""What a person types in a talk: words, acts, and commands that look into modules and change outputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from envs.multiwoz.acts import Acts, checked
from envs.multiwoz.agents import EndToEndAgent, Meeting
from envs.multiwoz.briefing import briefing
from envs.multiwoz.lexical import note
from envs.multiwoz.talk import MODULES, Talk
from envs.multiwoz.tracker import DialogState
from rl_dialog.data.schema import harmless
from rl_dialog.errors import UserError

HELP = """what you type is said; /acts says dialogue acts
/acts ACTS              such as /acts Inform-Hotel-Area-east; Request-Hotel-Phone-?
/look                   what each module made of the last turn
/set SIDE.MODULE VALUE  takes the last turn again with this in place of the module's output and goes on
                        /set system.nlu ACTS   /set system.state hotel.area=east train.day=
                        /set system.acts ACTS  /set system.text WORDS
/undo [N]               goes back N turns
/hint                   what the system would say by itself (where you are the system)
/rows [N]               the first rows of the database that fit, as the system knows
/goal                   what the user wants
/new [SEED]             another conversation; with the seed that it says, the same one again
/quit                   leave (quit, exit and Ctrl-D do too)"""


def greet(talk: Talk, *, quiet: bool = False) -> None:
    """Prints what there is to know at the beginning of a conversation."""
    if not quiet:
        print(f"Conversation {talk.seed}. /help shows the commands, /quit leaves.")
        if talk.play != "system":
            print("The user wants:\n" + briefing(talk.goal))
    if isinstance(talk.now, Meeting):
        print(f"user> {talk.now.user.turns[-1].text}", flush=True)
        _notes(talk)


def obey(talk: Talk, line: str, *, save: Callable[[], None], quiet: bool = False) -> bool:
    """Does what a line asks for; False when it asks to leave. `save` keeps a conversation before the next
    begins.

    Raises UserError for what cannot be done.
    """
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if line.lower() in ("/quit", "/exit", "quit", "exit"):
        return False
    if command == "/look":
        print("\n".join(_inside(talk)), flush=True)
    elif command == "/goal":
        print(briefing(talk.goal), flush=True)
    elif command == "/undo":
        print(f"Back {talk.undo(_number(argument, 1))}.", flush=True)
        _notes(talk)
    elif command == "/new":
        save()
        talk.start(_number(argument, talk.seed + 1))
        greet(talk, quiet=quiet)
    elif command == "/rows":
        print("\n".join(_rows(talk, _number(argument, 3))), flush=True)
    elif command == "/hint" and isinstance(talk.now, Meeting) and not talk.done:
        print(talk.hint().text, flush=True)
    elif command == "/set":
        side, module, value = _overwritten(talk, argument)
        talk.change(side, module, value)
        _show(talk)
    elif command == "/acts":
        _say(talk, _acts(argument))
    elif line.startswith("/"):
        print(HELP if command == "/help" else f"{command} cannot be done here\n{HELP}", flush=True)
    elif line or talk.play == "none":
        _say(talk, line)
    return True


def _say(talk: Talk, spoken: str | Acts) -> None:
    if talk.done:
        raise UserError("the user has said goodbye; /new starts another conversation, /undo goes back")
    if talk.play == "none" and spoken:
        why = "you watch (--play user and --play system let you speak)"
        raise UserError(f"expected Enter for the next turn or a command: {why}")
    talk.take(spoken if talk.play != "none" else None)
    _show(talk)


def _show(talk: Talk) -> None:
    """What was said in the last turn, by whom the person is not."""
    for side, turn in talk.last().items():
        if side != talk.play or talk.past[-1].spoken is None:
            if talk.past[-1].spoken and not turn.understood:
                print(f"  (the {side} understood nothing of it)")
            print(f"{side}> {harmless(turn.text)}", flush=True)
    if talk.done:
        outcome = {
            name: value
            for name, value in asdict(talk.simulator.outcome(talk.now.talk)).items()
            if value is not None
        }
        print(
            "The user has left: "
            + ", ".join(f"{name} {value}" for name, value in outcome.items() if name != "domains"),
            flush=True,
        )
    else:
        _notes(talk)


def _notes(talk: Talk) -> None:
    """For who plays the system: what the tracker makes of the user's words."""
    if talk.play == "system" and not talk.done:
        print(f"  ({note(talk.belief(), talk.simulator.world.database)})", flush=True)


def _inside(talk: Talk) -> Iterator[str]:
    """The modules of the last turn."""
    for side, turn in talk.last().items():
        yield f"{side}"
        yield f"  heard  {turn.heard if isinstance(turn.heard, str) else _shown(turn.heard)}"
        yield f"  nlu    {_shown(turn.understood)}"
        if turn.state is not None:
            yield f"  state  {note(turn.state, talk.simulator.world.database)}"
            yield from (
                f"         {name}: {_slots(turn.state, name)}"
                for name in {**turn.state.semi, **turn.state.book}
            )
        yield f"  acts   {_shown(turn.acts)}"
        if turn.reply != turn.text:
            yield f"  reply  {turn.reply}"
        yield f"  text   {turn.text}"


def _slots(state: DialogState, name: str) -> str:
    noted = [
        f"{slot}={value}" for part in (state.semi, state.book) for slot, value in part.get(name, {}).items()
    ]
    return " ".join(noted + ([f"booked={state.booked[name]}"] if name in state.booked else []))


def _rows(talk: Talk, count: int) -> Iterator[str]:
    state, database = talk.belief(), talk.simulator.world.database
    if state.domain not in database:
        yield f"there is no table of {state.domain or 'anything yet: no domain was spoken of'}"
        return
    rows = [row for n, row in enumerate(database[state.domain].rows) if state.rows[state.domain] >> n & 1]
    yield f"{state.domain}: {len(rows)} fit"
    for row in rows[:count]:
        yield "  " + "; ".join(f"{name} {value}" for name, value in row.items() if isinstance(value, str))


def _overwritten(talk: Talk, text: str) -> tuple[str, str, Any]:
    """(side, module, output) of what follows /set. Raises UserError."""
    target, _, value = text.partition(" ")
    side, _, module = target.partition(".")
    system = (
        ["nlu", "state"] if isinstance(talk.system, EndToEndAgent) or talk.play == "system" else list(MODULES)
    )
    system += ["text"] * ("text" not in system and talk.play != "system")
    settable = {"system": system} | ({} if talk.play == "user" else {"user": ["nlu", "acts", "text"]})
    if module not in settable.get(side, ()):
        names = ", ".join(f"{side}.{module}" for side, modules in settable.items() for module in modules)
        raise UserError(f"expected /set with one of {names}, got {target!r}")
    if module == "text":
        return side, module, value.strip()
    if module == "state":
        return side, module, _corrected(talk, value)
    return (
        side,
        module,
        checked(_acts(value), side=("user" if side == "system" else "system") if module == "nlu" else side),
    )


def _corrected(talk: Talk, text: str) -> DialogState:
    """The system's state of the last turn with `domain.slot=value` overwritten; without a value the slot is
    forgotten. Values may have spaces.
    """
    if not talk.past:
        raise UserError("expected a turn to take again; say something first")
    state = copy.deepcopy(talk.last()["system"].state)
    corrections = list(re.finditer(r"(\w+)\.(\w+)=(.*?)(?=\s+\w+\.\w+=|$)", text))
    if not corrections:
        raise UserError(f"expected domain.slot=value, such as hotel.area=east, got {text!r}")
    for correction in corrections:
        talk.simulator.tracker.correct(state, correction[1], correction[2], correction[3].strip())
    return state


def _acts(text: str) -> Acts:
    """`Inform-Hotel-Area-east; Request-Hotel-Phone-?` as acts."""
    return tuple(tuple(part.strip().split("-", 3)) for part in text.split(";") if part.strip())


def _shown(acts: Acts) -> str:
    return "; ".join("-".join(act) for act in acts) or "nothing"


def _number(text: str, default: int) -> int:
    if not text:
        return default
    if not text.isdigit():
        raise UserError(f"expected a number, got {text!r}")
    return int(text)
