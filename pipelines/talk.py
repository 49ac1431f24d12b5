"""Talk to a task-oriented system, or be the system for a simulated user, and look into every module on the way.

    python -m pipelines.talk                                                    you are the user, the rule system of the generated town answers
    python -m pipelines.talk --play system --world ../shared/data/multiwoz      a simulated user talks to you
    python -m pipelines.talk --play none                                        watch the two: Enter is the next turn
    python -m pipelines.talk --system runs/ilql --save talks.jsonl              a language model answers; talks are kept

`/look` shows what each module made of the last turn, `/set` puts something else in the place of a module's output and takes the turn again from
there, `/undo` goes back. Saved talks are log lines that `prepare` reads. The modules are those of envs/multiwoz/agents.py.
"""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers.utils import logging as transformers_logging

from envs.multiwoz import Options, Simulator, load_world
from envs.multiwoz.acts import Acts, checked
from envs.multiwoz.agents import EndToEndAgent, Meeting, Memory, Message, Session, SystemAgent, Turn, UserAgent, record
from envs.multiwoz.briefing import briefing
from envs.multiwoz.lexical import lexicalised, note
from envs.multiwoz.templates import Speaker
from envs.multiwoz.tracker import DialogState, belief_state
from pipelines.converse import reader
from pipelines.simulate_play import responder
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, generate_replies, load_for_decoding, stream
from rl_dialog.evaluation.runs import existing
from rl_dialog.models.checkpoint import resolve
from rl_dialog.run import Quiet, run
from rl_dialog.serving.terminal import saved_at_the_end, typed_lines

HELP = """what you type is said; /acts says dialogue acts
/acts ACTS              such as /acts Inform-Hotel-Area-east; Request-Hotel-Phone-?
/look                   what each module made of the last turn
/set SIDE.MODULE VALUE  takes the last turn again with this in place of the module's output; later modules of it follow
                        /set system.nlu ACTS   /set system.state hotel.area=east train.day=   /set system.acts ACTS   /set system.text WORDS
/undo [N]               goes back N turns
/hint                   what the system would say by itself (where you are the system)
/rows [N]               the first rows of the database that fit, as the system knows
/goal                   what the user wants
/new [SEED]             another conversation; with the seed that it says, the same one again
/quit                   leave (quit, exit and Ctrl-D do too)"""
MODULES = {"nlu": "understood", "state": "state", "acts": "acts", "text": "text"}  # in the order in which they work -> arguments of `respond`


@dataclass(frozen=True)
class TalkConfig(Quiet):
    """Who talks to whom."""

    play: Literal["user", "system", "none"] = "user"
    """whose part you take; none: you watch"""
    system: str = "rule"
    """rule: tracker, hand-written policy and templates; or a run folder or checkpoint, of a task policy (in place of the hand-written one) or of a
    language model"""
    nlu: str = "templates"
    """how both sides read. templates: the templates backwards, which understand no other words; or a folder that `fit_nlu` wrote"""
    world: str = ""
    """folder with MultiWOZ's files; by default a generated town"""
    goal: str = ""
    """JSON file with the user's goal; by default one is drawn"""
    seed: int = 0
    """the same seed and input give the same conversation"""
    save: str = ""
    """append every conversation to this file as one JSON line"""
    options: Options = Options()
    """how users, goals, rewards and measures behave"""
    decoding: Decoding = Decoding(do_sample=False, max_new_tokens=96)
    """how a language model's replies are drawn"""


@dataclass
class Move:
    """A turn that was taken, and how to take it again."""

    before: Any  # a copy of the conversation
    said: str | Acts | None  # by the person; None for a turn without one
    changes: dict[str, dict[str, Any]] = field(default_factory=lambda: {"system": {}, "user": {}})  # side -> module -> its output


class Talk:
    """One sitting. `now` is the conversation: a Meeting of two agents, or the system's Memory where the person is the user."""

    def __init__(self, config: TalkConfig, simulator: Simulator, goal: dict[str, Any] | None) -> None:
        self.config, self.simulator, self.wish = config, simulator, goal
        world = simulator.world
        self.speakers = {side: Speaker(world.templates[side], side=side) for side in ("user", "system")}
        self.reads = {side: reader(config.nlu, side, simulator) for side in ("user", "system")}
        self.system: SystemAgent | EndToEndAgent
        if policy := responder(config.system, simulator):
            self.system = SystemAgent(simulator, policy, nlu=self.reads["system"], nlg=self.speakers["system"])
        else:
            self.system = EndToEndAgent(simulator, _language_model(config), nlu=self.reads["system"])
        self.session = Session(UserAgent(simulator, nlu=self.reads["user"], nlg=self.speakers["user"]), self.system)
        self.turns = self.saved = 0
        self.start(config.seed)

    def start(self, seed: int) -> None:
        """A conversation of this seed. Raises GoalError for an impossible goal."""
        seeds = (seed, 0, 0, 0)
        self.seed, self.past = seed, list[Move]()
        if self.config.play == "user":
            self.goal = self.simulator.user(seeds, self.wish).goal
            self.now: Meeting | Memory[DialogState] = self.system.start(seeds)
        else:
            self.now = self.session.start(seeds, self.wish)
            self.goal = self.now.goal

    @property
    def done(self) -> bool:
        return isinstance(self.now, Meeting) and self.now.done

    def take(self, said: str | Acts | None, changes: dict[str, dict[str, Any]] | None = None) -> None:
        """The next turn. Raises UserError for what cannot be said or set; then nothing has happened."""
        move = Move(copy.deepcopy(self.now), said, *([changes] if changes else []))
        given = {side: {MODULES[module]: value for module, value in of.items()} for side, of in move.changes.items()}
        try:
            if isinstance(self.now, Memory):
                self._as_user(said, given["system"])
            elif self.config.play == "system" and said is not None:
                self._as_system(said, given)
            else:
                self.session.step(self.now, system=given["system"], user=given["user"])
        except BaseException:
            self.now = move.before
            raise
        self.past.append(move)
        self.turns += 1

    def _as_user(self, said: str | Acts, given: dict[str, Any]) -> None:
        if not isinstance(said, str):
            acts = checked(said, side="user")
            given, said = {"understood": acts} | given, self.speakers["user"].say(acts, self.now.voice)
        self.system.respond(self.now, said, **given)

    def _as_system(self, said: str | Acts, given: dict[str, dict[str, Any]]) -> None:
        words: dict[str, Any] = {"acts": said}
        if isinstance(said, str):  # placeholders are filled in; the acts are what the user would read
            memory = copy.deepcopy(self.now.system)
            text, bookings = lexicalised(said, self.hint().state, self.simulator.world.database, memory.rng)
            words = {"text": text, "acts": tuple(dict.fromkeys((*self.reads["user"](text, memory.words), *bookings)))}
        self.session.step(self.now, system=words | given["system"], user=given["user"])

    def change(self, side: str, module: str, value: Any) -> None:
        """Takes the last turn again with another output of a module. What was set of later modules on that side is forgotten."""
        if not self.past:
            raise UserError("expected a turn to take again; say something first")
        move = self.past[-1]
        later = list(MODULES)[list(MODULES).index(module) :]
        kept = {name: output for name, output in move.changes[side].items() if name not in later}
        after = self.now
        self.now = copy.deepcopy(move.before)
        try:
            self.take(move.said, move.changes | {side: kept | {module: value}})
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
        memory, spoken = copy.deepcopy(self.now.system), self.now.user.turns[-1]
        return self.system.respond(memory, spoken.said)

    def known(self) -> DialogState:
        """The system's memory."""
        return self.now.mind if isinstance(self.now, Memory) else self.hint().state if not self.done else self.now.system.mind

    def last(self) -> dict[str, Turn]:
        """The last turn of each side that is an agent, the earlier first."""
        memory = self.now if isinstance(self.now, Memory) else self.now.system
        found = {"system": memory.turns[-1]} if memory.turns else {}
        return found | ({"user": self.now.user.turns[-1]} if isinstance(self.now, Meeting) else {})

    def save(self) -> None:
        """Appends the conversation to --save, if the system has spoken."""
        if not self.config.save or not self.past:
            return
        if isinstance(self.now, Memory):
            messages: list[dict[str, Any]] = []
            for turn in self.now.turns:
                messages.append({"role": "user", "content": turn.heard, "acts": [list(act) for act in turn.understood]})
                messages.append({"role": "assistant", "content": turn.text, "acts": [list(act) for act in turn.acts]})
            found: dict[str, Any] = {"messages": messages, "goal": self.goal, "meta": {"seeds": [self.seed, 0, 0, 0]}}
        else:
            found = record(self.now, self.simulator)
        found["meta"] |= {"played": self.config.play, "system": self.config.system}
        if changed := [{"turn": n, **_plain(move.changes)} for n, move in enumerate(self.past) if any(move.changes.values())]:
            found["meta"]["overwritten"] = changed
        path = Path(self.config.save)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(Dialog.from_record(found | {"id": f"talk-{uuid.uuid4().hex[:12]}", "source": "talk"}).to_json() + "\n")
        self.saved += 1


def main(config: TalkConfig) -> dict[str, Any]:
    """Talks until the person leaves; returns how much was said and where it was saved."""
    if config.nlu == "acts":
        raise UserError("--nlu: expected templates or a folder that fit_nlu wrote; acts can be said with /acts")
    config.decoding.check()
    goal = json.loads(Path(config.goal).read_text(encoding="utf-8")) if config.goal else None
    talk = Talk(config, Simulator(load_world(config.world), config.options), goal)
    with saved_at_the_end(talk.save):
        _greet(talk)
        for line in typed_lines("" if config.quiet else {"none": "[Enter]"}.get(config.play, config.play) + "> "):
            try:
                if not _obey(talk, line.strip()):
                    break
            except ValueError as error:
                print(f"error: {error}", flush=True)
    return {"turns": talk.turns, "dialogs_saved": talk.saved, "saved": config.save or None}


def _greet(talk: Talk) -> None:
    """What there is to know at the beginning of a conversation."""
    if not talk.config.quiet:
        print(f"Conversation {talk.seed}. /help shows the commands, /quit leaves.")
        if talk.config.play != "system":
            print("The user wants:\n" + briefing(talk.goal))
    if isinstance(talk.now, Meeting):
        print(f"user> {talk.now.user.turns[-1].text}", flush=True)
        _notes(talk)


def _obey(talk: Talk, line: str) -> bool:
    """Does what a line asks for; False when it asks to leave. Raises UserError for what cannot be done."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if line.lower() in ("/quit", "/exit", "quit", "exit"):
        return False
    if command == "/look":
        print("\n".join(_inside(talk)), flush=True)
    elif command == "/goal":
        print(briefing(talk.goal), flush=True)
    elif command == "/undo":
        print(f"Back {talk.undo(_number(rest, 1))}.", flush=True)
        _notes(talk)
    elif command == "/new":
        talk.save()
        talk.start(_number(rest, talk.seed + 1))
        _greet(talk)
    elif command == "/rows":
        print("\n".join(_rows(talk, _number(rest, 3))), flush=True)
    elif command == "/hint" and isinstance(talk.now, Meeting) and not talk.done:
        print(talk.hint().text, flush=True)
    elif command == "/set":
        side, module, value = _overwritten(talk, rest)
        talk.change(side, module, value)
        _show(talk)
    elif command == "/acts":
        _say(talk, _acts(rest))
    elif line.startswith("/"):
        print(HELP if command == "/help" else f"{command} cannot be done here\n{HELP}", flush=True)
    elif line or talk.config.play == "none":
        _say(talk, line)
    return True


def _say(talk: Talk, said: str | Acts) -> None:
    if talk.done:
        raise UserError("the user has said goodbye; /new starts another conversation, /undo goes back")
    if talk.config.play == "none" and said:
        raise UserError("expected Enter for the next turn or a command: you watch (--play user and --play system let you speak)")
    talk.take(said if talk.config.play != "none" else None)
    _show(talk)


def _show(talk: Talk) -> None:
    """What was said in the last turn, by whom the person is not."""
    for side, turn in talk.last().items():
        if side != talk.config.play or talk.past[-1].said is None:
            if talk.past[-1].said and not turn.understood:
                print(f"  (the {side} understood nothing of it)")
            print(f"{side}> {turn.text}", flush=True)
    if talk.done:
        outcome = {name: value for name, value in asdict(talk.simulator.outcome(talk.now.talk)).items() if value is not None}
        print("The user has left: " + ", ".join(f"{name} {value}" for name, value in outcome.items() if name != "domains"), flush=True)
    else:
        _notes(talk)


def _notes(talk: Talk) -> None:
    """For who plays the system: what the tracker makes of the user's words."""
    if talk.config.play == "system" and not talk.done:
        print(f"  ({note(talk.known(), talk.simulator.world.database)})", flush=True)


def _inside(talk: Talk) -> Iterator[str]:
    """The modules of the last turn."""
    for side, turn in talk.last().items():
        yield f"{side}"
        yield f"  heard  {turn.heard if isinstance(turn.heard, str) else _shown(turn.heard)}"
        yield f"  nlu    {_shown(turn.understood)}"
        if turn.state is not None:
            yield f"  state  {note(turn.state, talk.simulator.world.database)}"
            yield from (f"         {name}: {_slots(turn.state, name)}" for name in {**turn.state.semi, **turn.state.book})
        yield f"  acts   {_shown(turn.acts)}"
        if turn.reply != turn.text:
            yield f"  reply  {turn.reply}"
        yield f"  text   {turn.text}"


def _slots(state: DialogState, name: str) -> str:
    known = [f"{slot}={value}" for part in (state.semi, state.book) for slot, value in part.get(name, {}).items()]
    return " ".join(known + ([f"booked={state.booked[name]}"] if name in state.booked else []))


def _rows(talk: Talk, count: int) -> Iterator[str]:
    state, database = talk.known(), talk.simulator.world.database
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
    system = ["nlu", "state"] if isinstance(talk.system, EndToEndAgent) or talk.config.play == "system" else list(MODULES)
    system += ["text"] * ("text" not in system and talk.config.play != "system")
    known = {"system": system} | ({} if talk.config.play == "user" else {"user": ["nlu", "acts", "text"]})
    if module not in known.get(side, ()):
        names = ", ".join(f"{side}.{module}" for side, modules in known.items() for module in modules)
        raise UserError(f"expected /set with one of {names}, got {target!r}")
    if module == "text":
        return side, module, value.strip()
    if module == "state":
        return side, module, _corrected(talk, value)
    return side, module, checked(_acts(value), side=("user" if side == "system" else "system") if module == "nlu" else side)


def _corrected(talk: Talk, text: str) -> DialogState:
    """The system's state of the last turn with `domain.slot=value` overwritten; without a value the slot is forgotten. Values may have spaces."""
    if not talk.past:
        raise UserError("expected a turn to take again; say something first")
    state = copy.deepcopy(talk.last()["system"].state)
    found = list(re.finditer(r"(\w+)\.(\w+)=(.*?)(?=\s+\w+\.\w+=|$)", text))
    if not found:
        raise UserError(f"expected domain.slot=value, such as hotel.area=east, got {text!r}")
    for each in found:
        talk.simulator.tracker.correct(state, each[1], each[2], each[3].strip())
    return state


def _acts(text: str) -> Acts:
    """`Inform-Hotel-Area-east; Request-Hotel-Phone-?` as acts."""
    return tuple(tuple(part.strip().split("-", 3)) for part in text.split(";") if part.strip())


def _shown(acts: Acts) -> str:
    return "; ".join("-".join(act) for act in acts) or "nothing"


def _plain(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was overwritten, as JSON has it."""
    return {
        side: {name: belief_state(value) if isinstance(value, DialogState) else value for name, value in of.items()} for side, of in changes.items()
    }


def _number(text: str, default: int) -> int:
    if not text:
        return default
    if not text.isdigit():
        raise UserError(f"expected a number, got {text!r}")
    return int(text)


def _language_model(config: TalkConfig) -> Callable[[list[Message]], str]:
    """A checkpoint's replies; the same messages get the same one."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    place = resolve(existing(config.system))
    policy, tokenizer = load_for_decoding(place), load_tokenizer(place)

    def reply(messages: list[Message]) -> str:
        return generate_replies(policy, tokenizer, [messages], config.decoding, seeds=[stream(config.seed, len(messages))])[0].text

    return reply


if __name__ == "__main__":
    run(TalkConfig, main)
