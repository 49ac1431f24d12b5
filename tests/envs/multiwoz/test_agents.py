"""Pipelines of modules for both sides."""

import copy
import pickle

import gymnasium
import pytest

from envs.multiwoz import Options, RulePolicy, Simulator
from envs.multiwoz.acts import BYE, NONE, ActError
from envs.multiwoz.agents import EndToEndAgent, Session, SystemAgent, UserAgent, played, record
from envs.multiwoz.matcher import matchers
from envs.multiwoz.rollout import play
from envs.multiwoz.templates import Speaker
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError

SEEDS = [(0, 0, 0, i) for i in range(40)]
GOAL = {"hotel": {"info": {"area": "east"}, "reqt": ["phone"]}}


class Kit:
    """The modules of a world."""

    def __init__(self, world, **options):
        self.simulator = Simulator(world, Options(**options))
        self.policy = RulePolicy(world.database, self.simulator.options).respond
        self.nlu = {side: reader.understand for side, reader in matchers(world).items()}
        self.nlg = {side: Speaker(world.templates[side], side=side) for side in ("user", "system")}

    def user(self, *, words=True):
        return UserAgent(
            self.simulator, nlu=self.nlu["system"] if words else None, nlg=self.nlg["user"] if words else None
        )

    def system(self, *, words=True, **settings):
        return SystemAgent(
            self.simulator,
            self.policy,
            nlu=self.nlu["user"] if words else None,
            nlg=self.nlg["system"] if words else None,
            **settings,
        )


@pytest.fixture(scope="module")
def kit(town):
    return Kit(town)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_agents_that_speak_in_acts_are_the_simulator(town, noise):
    """Acts, rewards and outcomes are those of `Simulator.step`, one by one, with a noisy channel too."""
    kit = Kit(town, noise=noise)
    meetings = Session(kit.user(words=False), kit.system(words=False)).play(SEEDS)
    for expected, meeting in zip(
        play(kit.simulator, kit.policy, seed=0, episodes=len(SEEDS)), meetings, strict=True
    ):
        got = played(meeting, kit.simulator, expected.episode)
        assert (got.turns, got.rewards, got.outcome, got.goal) == (
            expected.turns,
            expected.rewards,
            expected.outcome,
            expected.goal,
        )
        assert not got.words


def test_any_subset_of_the_modules(town, kit):
    """Words in, acts out, and the other way round; what is missing on one side is missing on the other's way
    in."""
    found = {}
    for user_words in (True, False):  # the user speaks in words, and the system reads
        for system_words in (True, False):
            user = UserAgent(
                kit.simulator,
                nlu=kit.nlu["system"] if system_words else None,
                nlg=kit.nlg["user"] if user_words else None,
            )
            nlu, nlg = kit.nlu["user"] if user_words else None, kit.nlg["system"] if system_words else None
            meetings = list(
                Session(user, SystemAgent(kit.simulator, kit.policy, nlu=nlu, nlg=nlg)).play(SEEDS)
            )
            found[user_words, system_words] = sum(
                kit.simulator.outcome(meeting.talk).success for meeting in meetings
            )
            turn = meetings[0].system.turns[0]
            assert (
                isinstance(turn.heard, str) is user_words and isinstance(turn.utterance, str) is system_words
            )
    assert all(abs(count - found[False, False]) <= 2 for count in found.values()), (
        found
    )  # of 40: the words lose next to nothing


def test_a_system_that_does_not_read_is_told_the_acts(kit):
    (meeting,) = Session(UserAgent(kit.simulator, nlg=kit.nlg["user"]), kit.system(words=False)).play(
        SEEDS[:1]
    )
    assert [turn.understood for turn in meeting.system.turns] == [
        turn.acts for turn in meeting.user.turns[:-1]
    ]
    assert isinstance(meeting.system.turns[0].heard, str)


def test_every_output_can_be_overwritten(kit):
    agent = kit.system()
    heard = "I am looking for a hotel. The area should be east."
    plain = agent.respond(agent.start((0, 0, 0, 0)), heard)
    assert ("Inform", "Hotel", "Area", "east") in plain.understood and plain.state.semi == {
        "hotel": {"area": "east"}
    }
    assert plain.acts and plain.text == plain.utterance
    memory = agent.start((0, 0, 0, 0))
    assert agent.respond(memory, heard, understood=[["Inform", "Hotel", "Area", "west"]]).state.semi == {
        "hotel": {"area": "west"}
    }
    state = copy.deepcopy(plain.state)
    state.semi["hotel"]["area"] = "nowhere"
    state.rows["hotel"] = 0
    turn = agent.respond(agent.start((0, 0, 0, 0)), heard, state=state)
    assert turn.acts == (("NoOffer", "Hotel", "Area", "nowhere"),) and "nowhere" in turn.text
    turn = agent.respond(agent.start((0, 0, 0, 0)), heard, acts=[["Request", "Hotel", "Stars", "?"]])
    assert turn.acts == (("Request", "Hotel", "Stars", "?"),) and "stars" in turn.text
    memory = agent.start((0, 0, 0, 0))
    assert agent.respond(memory, heard, text="Pardon?").utterance == "Pardon?" and memory.words == [
        heard,
        "Pardon?",
    ]
    user = kit.user()
    memory = user.start((0, 0, 0, 0), GOAL)
    turn = user.respond(memory, "", text="A room, quick!")
    assert turn.utterance == "A room, quick!" and turn.acts
    assert user.respond(memory, "Hello.", understood=[("Request", "Hotel", "Area", "?")]).acts == (
        ("Inform", "Hotel", "Area", "east"),
    )
    assert user.respond(memory, "Hello.", acts=[BYE]).acts == (BYE,)


def test_a_copy_is_the_way_back(kit):
    """After a roll-back the conversation goes on as it would have, words included; so it does after
    pickling."""
    session = Session(kit.user(), kit.system())
    meeting = session.start((0, 0, 0, 5))
    session.step(meeting)
    saved, pickled = copy.deepcopy(meeting), pickle.dumps(meeting)
    session.step(meeting, system={"text": "I will not tell you."})
    for other in (saved, pickle.loads(pickled)):
        assert other.talk.record.goal is other.user.mind.goal and other.talk.state is other.system.mind
        twin = copy.deepcopy(other)
        while not other.done:
            session.step(other)
            session.step(twin)
        assert other.user.words == twin.user.words and other.rewards == twin.rewards
    straight = next(session.play([(0, 0, 0, 5)]))
    assert straight.user.words == other.user.words and "I will not tell you." not in straight.user.words


def test_an_end_to_end_system(kit):
    """It sees words and notes, and what it writes is filled in."""
    seen = []

    def reply(messages):
        seen.append(messages)
        return "The phone is [hotel_phone]." if len(seen) > 1 else "The number of choices is [hotel_choice]."

    agent = EndToEndAgent(kit.simulator, reply, nlu=kit.nlu["user"])
    session = Session(kit.user(), agent)
    meeting = session.start((0, 0, 0, 0), GOAL)
    while not meeting.done:
        session.step(meeting)
    assert [m["role"] for m in seen[1]] == ["user", "system", "assistant", "user", "system"]
    assert (
        seen[1][1]["content"].startswith("hotel: ")
        and seen[1][2]["content"] == "The number of choices is [hotel_choice]."
    )
    hotels = kit.simulator.world.database["hotel"]
    first = next(row for row in hotels.rows if row["area"] == "east")
    assert f"The phone is {first['phone']}." in meeting.user.words
    assert kit.simulator.outcome(meeting.talk).success and meeting.goal["hotel"]["reqt"] == {"phone": "?"}


def test_placeholders_are_what_a_text_model_would_have_written(kit):
    session = Session(kit.user(), kit.system(placeholders=True))
    for meeting in session.play(SEEDS[:10]):
        dialog = Dialog.from_record(record(meeting, kit.simulator, notes=True))
        replies = [dialog.messages[i] for i in dialog.replies]
        assert [m["content"] for m in replies] == [turn.reply for turn in meeting.system.turns]
        assert sum(m["reward"] for m in replies) == sum(meeting.rewards)
        repeated = Session(kit.user(), EndToEndAgent(kit.simulator, lambda messages: "", nlu=kit.nlu["user"]))
        other = repeated.start(meeting.talk.seeds)
        for message in replies:  # the written replies, said again, have the same consequences
            repeated.step(other, system={"text": message["content"]})
        assert other.rewards == meeting.rewards
        plain = record(meeting, kit.simulator)
        assert not any("[" in m["content"] for m in plain["messages"]) and {
            m["role"] for m in plain["messages"]
        } == {"user", "assistant"}


def test_mistakes_are_explained(kit):
    user, system = kit.user(words=False), kit.system(words=False)
    with pytest.raises(UserError, match="this agent has no NLU, got the words 'Hello"):
        system.respond(system.start((0, 0, 0, 0)), "Hello.")
    with pytest.raises(ActError, match="Did you mean Hotel"):
        system.respond(system.start((0, 0, 0, 0)), [["Inform", "Hotels", "Area", "east"]])
    with pytest.raises(ActError, match="expected an intent of the system"):
        user.respond(user.start((0, 0, 0, 0)), (), understood=[["thank", "general", NONE, NONE]])
    with pytest.raises(UserError, match="expected an nlg"):
        SystemAgent(kit.simulator, kit.policy, placeholders=True)
    with pytest.raises(UserError, match="expected a user with an nlu"):
        Session(user, EndToEndAgent(kit.simulator, lambda messages: ""))
    (meeting,) = Session(user, system).play(SEEDS[:1])
    with pytest.raises(gymnasium.error.ResetNeeded, match="after the user's goodbye"):
        user.respond(meeting.user, ())
