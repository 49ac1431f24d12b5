"""Both sides of a conversation as pipelines: understand, remember, decide, word. Any module may be missing,
and its output may be overwritten.

    user                                             system
    words -> NLU -> agenda -> templates -> words     words -> NLU -> tracker -> policy -> templates -> words
                                                         SystemAgent
                                                     words -> NLU -> tracker -> note -> a text model -> words
                                                         EndToEndAgent

    simulator = Simulator(load_world())
    session = Session(UserAgent(simulator, nlu=nlu, nlg=speakers["user"]),
                      SystemAgent(simulator, policy.respond, nlu=nlu, nlg=speakers["system"]))
    meeting = session.start((0, 0, 0, 7))
    while not meeting.done:
        reward = session.step(meeting)
    simulator.outcome(meeting.talk)

What an agent hears is words or acts: acts go past a missing NLU, and without templates acts come out. A
`Turn` holds what each module made of it; a module whose output is given to `respond` is not asked. Agents
hold nothing of a dialog; a dialog is a `Memory` for each side and a `Meeting` for both, and `copy.deepcopy`
of one is the way back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import gymnasium

from envs.multiwoz.acts import Acts, checked
from envs.multiwoz.environment import Conversation, Seeds, Simulator, stream
from envs.multiwoz.evaluator import Record
from envs.multiwoz.goals import copied
from envs.multiwoz.lexical import delexicalised, lexicalised, note
from envs.multiwoz.rollout import Played, Respond
from envs.multiwoz.templates import Speaker
from envs.multiwoz.tracker import DialogState
from envs.multiwoz.user import UserState
from rl_dialog.errors import UserError

Utterance = str | Acts
Message = dict[str, str]
Understand = Callable[
    [str, Sequence[str]], Iterable[Sequence[str]]
]  # the words of a turn, all words before it (oldest first) -> acts
Reads = Mapping[str, Understand | None]  # what "user" and "system" read the other with
Reply = Callable[[list[Message]], str]
Mind = TypeVar("Mind", UserState, DialogState)


@dataclass(slots=True)
class Turn:
    """One side's turn, module by module."""

    heard: Utterance  # as it came in
    understood: Acts  # by the NLU, or as it came in, less what the channel lost
    state: DialogState | None  # of a system, after it heard and before it spoke; a copy
    acts: Acts  # of the policy; of an end-to-end system the bookings in its words
    reply: str | None = None  # in words; None from an agent without words
    text: str | None = None  # the same with values in place of placeholders

    @property
    def utterance(self) -> Utterance:
        """What goes out."""
        return self.acts if self.text is None else self.text


@dataclass(slots=True)
class Memory(Generic[Mind]):
    """One agent in one dialog."""

    mind: Mind  # the user's goal and stack, or the system's belief
    rng: random.Random  # its decisions
    voice: random.Random  # its choice of words
    noise: random.Random | None = None  # what gets lost on the way to it
    words: list[str] = field(default_factory=list)  # both sides' turns, oldest first; "" for one in acts
    messages: list[Message] = field(
        default_factory=list
    )  # of a system: what a text model sees, its own replies with placeholders
    turns: list[Turn] = field(default_factory=list)


class UserAgent:
    """The simulated user.

    Args:
        nlu: what it makes of the system's words; without one the system has to speak in acts.
        nlg: its words; without them it speaks in acts.
    """

    side = "user"

    def __init__(
        self, simulator: Simulator, *, nlu: Understand | None = None, nlg: Speaker | None = None
    ) -> None:
        self.simulator, self.nlu, self.nlg = simulator, nlu, nlg

    def start(self, seeds: Seeds, goal: Mapping[str, Any] | None = None) -> Memory[UserState]:
        """A user who has said nothing yet; its first turn answers to (). Raises GoalError for an impossible
        goal."""
        user = self.simulator.user(seeds, goal)
        return Memory(user, user.rng, stream(seeds, "user's words"))

    def respond(
        self,
        memory: Memory[UserState],
        heard: Utterance,
        *,
        understood: Any = None,
        acts: Any = None,
        text: str | None = None,
    ) -> Turn:
        """Answers the system. What is given as `understood`, `acts` or `text` stands in place of that
        module's output.

        Raises ActError for acts that are none, UserError for words without an NLU, ResetNeeded after the
        goodbye.
        """
        if memory.mind.done:
            raise gymnasium.error.ResetNeeded(
                "expected a running conversation, got a turn after the user's goodbye; start a new one"
            )
        understood = _understand(memory, heard, understood, self.nlu, side="system")
        agenda_acts = self.simulator.users.respond(
            memory.mind, understood
        )  # also where other acts are given: the agenda moves on
        acts = agenda_acts if acts is None else checked(acts, side="user")
        reply = text if text is not None else self.nlg.say(acts, memory.voice) if self.nlg else None
        return _remember(memory, Turn(heard, understood, None, acts, reply, reply))


class SystemAgent:
    """A task-oriented system made of modules.

    Args:
        policy: dialog state and chance -> acts.
        nlu: what it makes of the user's words; without one it takes acts.
        nlg: its words; without them it speaks in acts.
        placeholders: word acts without values and fill these in from the databases by the rules of
            `lexical.py`, as for a text model. What such an agent says is what a text model can learn to say.
    """

    side = "system"

    def __init__(
        self,
        simulator: Simulator,
        policy: Respond,
        *,
        nlu: Understand | None = None,
        nlg: Speaker | None = None,
        placeholders: bool = False,
    ) -> None:
        if placeholders and nlg is None:
            raise UserError("expected an nlg to word acts with placeholders, got none")
        self.simulator, self.policy, self.nlu, self.nlg, self.placeholders = (
            simulator,
            policy,
            nlu,
            nlg,
            placeholders,
        )

    def start(self, seeds: Seeds) -> Memory[DialogState]:
        """A system that has heard nothing yet."""
        return _system_memory(self.simulator, seeds)

    def respond(self, memory: Memory[DialogState], heard: Utterance, *, understood: Any = None,
                state: DialogState | None = None, acts: Any = None,
                text: str | None = None) -> Turn:  # fmt: skip
        """Answers the user. What is given as `understood`, `state`, `acts` or `text` stands in place of that
        module's output.

        Raises ActError for acts that are none, UserError for words without an NLU.
        """
        turn = _listen(self.simulator, memory, heard, understood, state, self.nlu)
        turn.acts = self.policy(memory.mind, memory.rng) if acts is None else checked(acts, side="system")
        turn.reply = turn.text = text
        if text is None and self.nlg:
            turn.reply = turn.text = self.nlg.say(
                delexicalised(turn.acts) if self.placeholders else turn.acts, memory.voice
            )
            if self.placeholders:
                turn.text, _ = lexicalised(turn.reply, memory.mind, self.simulator.world.database, memory.rng)
        self.simulator.tracker.system_said(memory.mind, turn.acts)
        return _remember(memory, turn)


class EndToEndAgent:
    """A system that answers words with words, such as a language model of this project.

    Args:
        reply: messages -> reply, with placeholders where it names values. The messages are the user's, each
            followed by the system's note (`lexical.py`) as a system message, and its own replies as it wrote
            them.
        nlu: what the tracker, and so the note, makes of the user's words; without one it has to be told
            (`understood`).
    """

    side = "system"

    def __init__(self, simulator: Simulator, reply: Reply, *, nlu: Understand | None = None) -> None:
        self.simulator, self.reply, self.nlu, self.placeholders = simulator, reply, nlu, True

    def start(self, seeds: Seeds) -> Memory[DialogState]:
        """A system that has heard nothing yet."""
        return _system_memory(self.simulator, seeds)

    def respond(
        self,
        memory: Memory[DialogState],
        heard: Utterance,
        *,
        understood: Any = None,
        state: DialogState | None = None,
        text: str | None = None,
    ) -> Turn:
        """Answers the user; what is given stands in place of that module's output."""
        turn = self.listen(memory, heard, understood=understood, state=state)
        return self.speak(
            memory, turn, self.reply([dict(message) for message in memory.messages]) if text is None else text
        )

    def listen(
        self,
        memory: Memory[DialogState],
        heard: Utterance,
        *,
        understood: Any = None,
        state: DialogState | None = None,
    ) -> Turn:
        """The first half of `respond`: afterwards `memory.messages` is what the model answers to."""
        return _listen(self.simulator, memory, heard, understood, state, self.nlu)

    def speak(self, memory: Memory[DialogState], turn: Turn, reply: str) -> Turn:
        """The second half, with the model's reply."""
        turn.reply = reply
        turn.text, turn.acts = lexicalised(reply, memory.mind, self.simulator.world.database, memory.rng)
        self.simulator.tracker.system_said(memory.mind, turn.acts)
        return _remember(memory, turn)


@dataclass(slots=True)
class Meeting:
    """The whole state of a conversation between two agents."""

    talk: Conversation  # what the evaluator and the rewards go by
    user: Memory[UserState]
    system: Memory[DialogState]
    goal: dict[str, Any]  # as it was at the start; the user writes into its own
    rewards: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.talk.done


class Session:
    """Who meets whom; the evaluator and the rewards are the simulator's. Precision, recall and success count
    what the user understood."""

    def __init__(self, user: UserAgent, system: SystemAgent | EndToEndAgent) -> None:
        if user.nlu is None and system.placeholders:
            raise UserError(
                "expected a user with an nlu: what the databases put in place of a system's placeholders is "
                "only to be had from its words"
            )
        self.simulator, self.user, self.system = user.simulator, user, system

    def start(self, seeds: Seeds, goal: Mapping[str, Any] | None = None) -> Meeting:
        """A new conversation, in which the user has spoken first. Raises GoalError for an impossible goal."""
        user, system = self.user.start(seeds, goal), self.system.start(seeds)
        own_goal = copied(user.mind.goal)
        talk = Conversation(seeds, user.mind, system.mind, Record(user.mind.goal), system.rng, system.noise)
        talk.user_acts = self.user.respond(user, ()).acts
        self.simulator.evaluator.user_said(talk.record, talk.user_acts)
        return Meeting(talk, user, system, own_goal)

    def step(
        self,
        meeting: Meeting,
        *,
        system: Mapping[str, Any] | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> float:
        """The system answers the user and the user the system: the reward. `system` and `user` are what
        `respond` is given in place of outputs."""
        user_turn = meeting.user.turns[-1]
        turn = self.system.respond(
            meeting.system, user_turn.utterance, **{**self._user_acts(meeting), **(system or {})}
        )
        return self.answer(meeting, turn, user=user)

    def listen(self, meeting: Meeting) -> Turn:
        """The first third of `step` with an end-to-end system, which then speaks (`EndToEndAgent.speak`) and
        is answered."""
        return self.system.listen(
            meeting.system, meeting.user.turns[-1].utterance, **self._user_acts(meeting)
        )

    def _user_acts(self, meeting: Meeting) -> dict[str, Any]:
        """The user's acts for a system that does not read words."""
        user_turn = meeting.user.turns[-1]
        if self.system.nlu is not None or not isinstance(user_turn.utterance, str):
            return {}
        return {"understood": self.simulator.channel.passed(user_turn.acts, meeting.system.noise)}

    def answer(self, meeting: Meeting, turn: Turn, *, user: Mapping[str, Any] | None = None) -> float:
        """The last third of `step`: the user answers what the system said."""
        meeting.talk.state = meeting.system.mind
        overrides = dict(user or {})
        if turn.text is not None and self.user.nlu is None and "understood" not in overrides:
            overrides["understood"] = turn.acts
        answer = self.user.respond(meeting.user, turn.utterance, **overrides)
        meeting.rewards.append(self.simulator.judge(meeting.talk, answer.understood, answer.acts))
        return meeting.rewards[-1]

    def play(self, seeds: Iterable[Seeds]) -> Iterator[Meeting]:
        """Whole conversations, one after the other."""
        for conversation_seeds in seeds:
            meeting = self.start(conversation_seeds)
            while not meeting.done:
                self.step(meeting)
            yield meeting


def played(meeting: Meeting, simulator: Simulator, episode: int) -> Played:
    """A finished conversation as the measures of `rollout.py` take it."""
    turns, words = [("user", meeting.user.turns[0].acts)], [meeting.user.turns[0].text]
    for system, user in zip(meeting.system.turns, meeting.user.turns[1:], strict=True):
        turns += [("system", system.acts or user.understood), ("user", user.acts)]
        words += [system.text, user.text]
    conversation = Played(
        episode, meeting.goal, meeting.talk, turns, meeting.rewards, simulator.outcome(meeting.talk)
    )
    conversation.words = words if None not in words else []
    return conversation


def record(meeting: Meeting, simulator: Simulator, *, notes: bool = False) -> dict[str, Any]:
    """A conversation in words as a Dialog's JSON object: every message with its acts, every reply with its
    reward.

    A user's message has in `understood` what the system made of it; a reply's `acts` are what the user made
    of it, and `meant` what was to be said. With `notes` the messages are those that a text model sees, with
    the system's notes and the placeholders of its replies.
    """
    rewards = iter(meeting.rewards)
    messages: list[dict[str, Any]] = []
    for i, user in enumerate(meeting.user.turns):
        messages.append({"role": "user", "content": user.text, "acts": [list(act) for act in user.acts]})
        if i < len(meeting.rewards):
            system, understood = meeting.system.turns[i], meeting.user.turns[i + 1].understood
            messages[-1]["understood"] = [list(act) for act in system.understood]
            if notes:
                messages.append({"role": "system", "content": note(system.state, simulator.world.database)})
            annotation = {"acts": [list(act) for act in understood], "reward": next(rewards)}
            if (
                system.acts and system.reply == system.text
            ):  # words without placeholders mean just what the policy meant
                annotation["meant"] = [list(act) for act in system.acts]
            messages.append(
                {"role": "assistant", "content": system.reply if notes else system.text, **annotation}
            )
    identity = f"multiwoz-{'-'.join(map(str, meeting.talk.seeds))}"
    meta = {"outcome": asdict(simulator.outcome(meeting.talk)), "seeds": list(meeting.talk.seeds)}
    return {
        "id": identity,
        "messages": messages,
        "source": "multiwoz-simulated",
        "goal": meeting.goal,
        "meta": meta,
    }


def _system_memory(simulator: Simulator, seeds: Seeds) -> Memory[DialogState]:
    return Memory(
        simulator.tracker.start(),
        stream(seeds, "system"),
        stream(seeds, "system's words"),
        simulator.noise(seeds),
    )


def _understand(
    memory: Memory[Any], heard: Utterance, understood: Any, nlu: Understand | None, *, side: str
) -> Acts:
    """The acts in what the other `side` said."""
    before = list(memory.words)
    if heard or before:
        memory.words.append(heard if isinstance(heard, str) else "")
    if isinstance(heard, str):
        if understood is None and nlu is None:
            raise UserError(
                f"expected acts of the {side}, as this agent has no NLU, got the words {heard!r:.80}"
            )
        if understood is None:
            understood = nlu(heard, before)
    return checked(heard if understood is None else understood, side=side)


def _listen(
    simulator: Simulator,
    memory: Memory[DialogState],
    heard: Utterance,
    understood: Any,
    state: DialogState | None,
    nlu: Understand | None,
) -> Turn:
    """NLU, channel, tracker and note of a system. What is given as `understood` has been through the
    channel."""
    acts = _understand(memory, heard, understood, nlu, side="user")
    if understood is None:
        acts = simulator.channel.passed(acts, memory.noise)
    simulator.tracker.user_said(memory.mind, acts)
    if state is not None:
        memory.mind = state
    if isinstance(heard, str):
        memory.messages += [
            {"role": "user", "content": heard},
            {"role": "system", "content": note(memory.mind, simulator.world.database)},
        ]
    return Turn(heard, acts, copy.deepcopy(memory.mind), ())


def _remember(memory: Memory[Any], turn: Turn) -> Turn:
    memory.words.append(turn.text or "")
    if turn.text is not None and isinstance(memory.mind, DialogState):
        memory.messages.append({"role": "assistant", "content": turn.reply})
    memory.turns.append(turn)
    return turn
