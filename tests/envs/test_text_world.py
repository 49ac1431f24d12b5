"""The contract of text worlds: worlds that keep it pass the check, each fault has a name, and an episode of
several players gives a Dialog for each of them."""

from __future__ import annotations

import multiprocessing
import random
import re
import threading
import time
from fractions import Fraction

import pytest

from envs import conformance
from envs.conformance import CHECKS, Babbler, check_world
from envs.example import House
from envs.multiwoz.text import MultiWOZText
from envs.small_talk import SmallTalk
from envs.text_world import play, restore, snapshot
from rl_dialog.errors import UserError
from rl_dialog.serving.worlds import Session


def faults(make_world, *but: str) -> dict[str, str]:
    found = check_world(make_world, but=("other process", *but))
    return {finding.check: finding.fault for finding in found if finding.fault}


class Haggle:
    """Two players by turns; the one who says yes pays the other a half. Each sees the other as the user."""

    def reset(self, *, seed=None):
        self.chance, self.said = random.Random(seed), []
        self.price = self.chance.randint(1, 9)
        return self._view(0), {"role": "buyer"}

    def _view(self, number):
        roles = ["assistant" if i % 2 == number else "user" for i in range(len(self.said))]
        talk = [{"role": role, "content": text} for role, text in zip(roles, self.said, strict=True)]
        return [{"role": "system", "content": f"The price is {self.price}."}, *talk]

    def step(self, reply):
        number = len(self.said) % 2
        self.said.append(reply)
        over, role = "yes" in reply or len(self.said) == 6, ("seller", "buyer")[number]
        rewards = {"buyer": 0.5 - number, "seller": number - 0.5} if over else {"buyer": -0.1}
        return self._view(1 - number), rewards, over, False, {"role": role}


@pytest.mark.parametrize("world", [House, SmallTalk, MultiWOZText, Haggle])
def test_worlds_that_keep_the_contract(world):
    assert faults(world) == {}


def test_the_whole_check_and_what_a_world_brings():
    found = {finding.check: finding for finding in check_world(SmallTalk)}
    assert list(found) == list(CHECKS)
    assert not [finding for finding in found.values() if finding.fault]
    assert "optimal 3." in found["players"].note and "optimum 3.19" in found["players"].note
    assert found["references"].note == "behaviour policy, best inside the logs, optimum"


class Misspelt(Haggle):
    """Pays roles that nobody plays."""

    def step(self, reply):
        messages, rewards, *rest = super().step(reply)
        return messages, {role.title(): value for role, value in rewards.items()}, *rest


def test_rewards_of_roles_that_never_speak_are_told():
    found = check_world(Misspelt, but=tuple(name for name in CHECKS if name != "contract"))
    told = "rewards go to 'Buyer', 'Seller', who said nothing, so that they are lost: 'buyer', 'seller' spoke"
    assert found[0].note == told


class Thought:
    """Which of four it thinks of, it draws; one guess."""

    def reset(self, *, seed=None):
        self.number = random.Random(seed).choice("1234")
        self.messages = [{"role": "user", "content": "Guess!"}]
        return list(self.messages), {}

    def step(self, reply):
        self.messages += [{"role": "assistant", "content": reply}]
        return list(self.messages), float(reply == self.number), True, False, {}

    @staticmethod
    def optimum():
        return 0.25

    @staticmethod
    def scripted_players():
        return {"guess": lambda seed: lambda messages: random.Random(seed).choice("1234")}


def test_a_player_that_draws_as_the_world_does_knows_nothing_of_it():
    """With the world's own seed it would always be right, and above the optimum."""
    assert faults(Thought) == {}
    [told] = [
        finding.note for finding in check_world(Thought, but=("other process",)) if finding.check == "players"
    ]
    assert "optimum 0.25 (32 episodes each)" in told


class Thousandths(Thought):
    """As small as a conversion rate."""

    def step(self, reply):
        messages, reward, *rest = super().step(reply)
        return messages, reward / 1000, *rest

    @staticmethod
    def optimum():
        return 0.25 / 1000


def test_returns_in_thousandths_are_told_with_their_digits():
    [told] = [finding.note for finding in check_world(Thousandths) if finding.check == "players"]
    assert re.fullmatch(r"guess 0\.000\d+, optimum 0\.00025 \(32 episodes each\)", told)


class Asked(House):
    """Its player may ask the world, as `play` lets it; its logs and references want a world instead of the
    class, which is what the verbs have."""

    class Asks:
        def __init__(self, seed):
            pass

        def __call__(self, messages):
            return "nowhere"

        def in_world(self, world):
            return lambda messages: world.doors[0]

    def scripted_players(self):
        return {"asks": self.Asks}

    def reference_returns(self, episodes, seed):
        return {"asks": [-3.0] * episodes}

    def write_logs(self, path, *, dialogs, seed):
        path.write_text('{"messages": []}\n' * dialogs)


def test_players_references_and_logs_are_checked_as_the_verbs_ask_for_them():
    found = {each.check: each for each in check_world(Asked, but=("other process",))}
    assert found["players"].note == "asks -3.00 (32 episodes each)"
    assert "TypeError" in found["references"].fault and "TypeError" in found["logs"].fault


class Doubtful(Thought):
    """Nobody knows what an odd guess was worth."""

    def step(self, reply):
        messages, reward, *rest = super().step(reply)
        return messages, None if reply in "13" else reward, *rest

    @staticmethod
    def scripted_players():
        return Thought.scripted_players() | {"odd": lambda seed: lambda messages: "1"}


def test_a_player_whose_episodes_nobody_can_score_is_no_fault():
    """They are one of the four ends; a mean says how many episodes it is over."""
    assert faults(Doubtful) == {}
    [told] = [each.note for each in check_world(Doubtful) if each.check == "players"]
    assert re.fullmatch(
        r"guess 0\.\d\d \(1\d\), odd without a return, optimum 0\.25 \(32 episodes each\)", told
    )


class Lucky(House):
    """Draws from the generator of the process."""

    def reset(self, *, seed=None):
        _, info = super().reset(seed=seed)
        self.doors = random.choices(["left", "right"], k=3)
        self.messages[0]["content"] += self.doors[0]
        return list(self.messages), info


class Late(House):
    """Ignores its seed: three doors alone would be the same ones again in one run of some hundred."""

    def reset(self, *, seed=None):
        _, info = super().reset(seed=time.perf_counter_ns())
        self.messages[0]["content"] += f" It is {time.perf_counter_ns()}."
        return list(self.messages), info


class Tired(House):
    """Remembers the episodes before."""

    count = 0

    def reset(self, *, seed=None):
        self.count += 1
        _, info = super().reset(seed=seed)
        self.messages[0]["content"] += f" You come for the {self.count}th time."
        return list(self.messages), info


class Shared(House):
    """All worlds of the class are one."""

    visits: list[int] = []

    def reset(self, *, seed=None):
        self.visits.clear()
        return super().reset(seed=seed)

    def step(self, reply):
        self.visits.append(1)
        *rest, info = super().step(reply)
        return *rest[:1], float(len(self.visits)), *rest[2:], info


class Opened(House):
    """Holds what no process can send."""

    def reset(self, *, seed=None):
        self.friend = lambda: None
        return super().reset(seed=seed)


class Same(House):
    """Hands its own list out."""

    def reset(self, *, seed=None):
        super().reset(seed=seed)
        return self.messages, {}


class Scored(House):
    """A reward that is no number."""

    def step(self, reply):
        messages, _, *rest = super().step(reply)
        return messages, float("nan"), *rest


class Silent(House):
    """Forgets the reply."""

    def step(self, reply):
        messages, *rest = super().step(reply)
        return [*messages[:-2], *messages[-1:]], *rest


class Proud(House):
    """Its optimum is not one."""

    @staticmethod
    def scripted_players():
        return {"reader": lambda seed: lambda messages: messages[-1]["content"]}

    @staticmethod
    def optimum():
        return -4.0


class Unnamed(House):
    """Pays by role, and says nobody's."""

    def step(self, reply):
        messages, reward, *rest = super().step(reply)
        return messages, {"seller": reward, "buyer": -reward}, *rest


class Endless(House):
    """Its most turns are no number."""

    max_turns = float("inf")


class Vague(House):
    """Fails without a word."""

    def step(self, reply):
        messages, reward, *_ = super().step(reply)
        return messages, reward, False, True, {"failed": ""}


class Halved(House):
    """Says half of a character."""

    def step(self, reply):
        _, *rest = super().step(reply)
        self.messages[-1]["content"] += "\ud83d"
        return list(self.messages), *rest


class Begun(House):
    """Fails at its beginning without a word."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0], {"failed": True}


class Dead(House):
    """Never begins."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0], {"failed": "the server is gone"}


class Several(House):
    """How many steps at a time it takes it says in words."""

    concurrency = "2"


class Huge(House):
    """A reward of 400 digits."""

    def step(self, reply):
        messages, _, *rest = super().step(reply)
        return messages, 10**400, *rest


class Painted(House):
    """To draw it is a step."""

    painted = 0

    def draw(self):
        self.painted += 1
        return "a house"

    def step(self, reply):
        messages, reward, *rest = super().step(reply)
        return messages, reward + self.painted, *rest


class Whole(House):
    """Says of every step that it did not fail."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0], {"failed": None}

    def step(self, reply):
        return *super().step(reply)[:4], {"failed": False}


def test_a_world_may_say_that_nothing_failed():
    assert faults(Whole) == {}


@pytest.mark.parametrize(
    ("world", "check", "message"),
    [
        (Halved, "contract", "expected in messages of step text that UTF-8 and JSON can hold"),
        (Lucky, "seed", "expected a generator per episode"),
        (Late, "seed", "the same seed and replies, played twice: at step . other messages"),
        (Tired, "order", "a new world, and one that was played in before: at step 0 other messages"),
        (Shared, "side by side", "other rewards"),
        (Opened, "pickle", "expected a world that can be pickled, got "),
        (Same, "contract", "expected a new list of messages from each step|expected a list of messages that"),
        (Scored, "contract", "expected a finite number or None as the reward, got nan"),
        (Silent, "contract", "expected the conversation so far with the reply added"),
        (Proud, "players", "expected no player above the optimum -4, got 'reader at -3 "),
        (Unnamed, "contract", r"expected info\['role'\] of reset to name who speaks first"),
        (Endless, "contract", "expected a whole number above 0 as max_turns, got inf"),
        (Vague, "contract", r"expected words that say why it failed in info\['failed'\], got ''"),
        (Begun, "contract", r"expected words that say why it failed in info\['failed'\], got True"),
        (Dead, "contract", "expected episodes that do not fail, got 'the server is gone'"),
        (Several, "contract", "expected a whole number above 0 as concurrency, got '2'"),
        (Huge, "contract", "expected a finite number or None as the reward, got 1000"),
        (Painted, "drawing", "an episode that is not drawn, and one that is: at step 1 other rewards"),
    ],
)
def test_faults_are_named(world, check, message):
    found = faults(world)
    assert check in found and re.search(message, found[check]), found


def test_a_fraction_is_a_number():
    class Third(House):
        def step(self, reply):
            messages, _, *rest = super().step(reply)
            return messages, Fraction(1, 3), *rest

    assert faults(Third, "players", "pickle") == {}


class Short(House):
    """Keeps of a reply what it understands, and says that it counts for nothing."""

    def step(self, reply):
        before = len(self.messages)
        _, *rest = super().step(reply)
        self.messages[before] |= {"content": reply[:3], "weight": 0}
        return list(self.messages), *rest


def test_a_reply_that_stands_with_another_text_is_noted():
    [told] = [each.note for each in check_world(Short, but=("other process",)) if each.check == "contract"]
    assert "a reply stands in the conversation with another text, as '" in told


def test_what_a_reply_earned_counts_whatever_weight_the_world_gives_it():
    played = play(Short(), lambda messages: "yes", seed=1)
    [dialog] = played.dialogs.values()
    assert len(dialog.replies) == len(played.infos) and "weight" not in dialog.messages[dialog.replies[0]]


def test_what_raises_is_a_fault():
    class Raises(House):
        def step(self, reply):
            raise KeyError("door")

    line = Raises.step.__code__.co_firstlineno + 1
    told = f"the world raised KeyError: 'door' (at test_text_world.py:{line})"
    assert faults(Raises) == {"contract": told}


def test_an_order_of_hashes_is_seen_in_another_process(monkeypatch):
    """Strings hash differently in every process, so a world that goes through a set of them does too."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = check_world(Hashed, but=tuple(name for name in CHECKS if name not in ("other process",)))
    assert "does it go through a set?" in found[0].fault


class Hashed(House):
    """Greets in the order of a set."""

    def reset(self, *, seed=None):
        messages, info = super().reset(seed=seed)
        order = " ".join({f"word{i}" for i in range(30)})
        self.messages[0]["content"] += order
        return messages, info


class Held(House):
    """Waits for ever in a process that another one started, as for a lock that this one has."""

    def reset(self, *, seed=None):
        if multiprocessing.parent_process() is not None:
            threading.Event().wait()
        return super().reset(seed=seed)


@pytest.mark.timeout(120)
def test_another_process_that_waits_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(conformance, "CHILD_SECONDS", 0.2)
    found = check_world(Held, but=tuple(name for name in CHECKS if name != "other process"))
    assert "expected another process to play 3 episodes within 0.2 s" in found[0].fault
    assert multiprocessing.active_children() == []


def test_none_is_no_failure():
    assert play(Whole(), Babbler(1), seed=1).returns == play(House(), Babbler(1), seed=1).returns
    session = Session(Whole())
    begun = session.answer({"type": "reset", "data": {"seed": 1}})["data"]
    assert not begun["done"] and "failed" not in begun["metadata"]
    assert not session.answer({"type": "step", "data": {"message": "left"}})["data"]["done"]


def test_a_world_that_never_ends_and_one_that_does_not_vary_are_noted():
    class Endless(House):
        def reset(self, *, seed=None):
            messages, info = super().reset(seed=1)
            return messages, info

        def step(self, reply):
            self.doors = ["nowhere"] * 3
            messages, reward, *_ = super().step(reply)
            return messages, reward, False, False, {}

    found = {each.check: each for each in check_world(Endless, but=("other process", "pickle"))}
    assert not any(each.fault for each in found.values())
    assert "do not end by themselves" in found["contract"].note
    assert found["seed"].note == "every seed gives the same episode"


def test_a_dialog_per_role_with_what_it_saw_and_earned():
    lines = iter(["five?", "no", "six?", "yes"])
    played = play(Haggle(), lambda messages: next(lines), seed=3)
    assert played.end == "terminated" and list(played.dialogs) == ["buyer", "seller"]
    buyer, seller = (played.dialogs[role] for role in ("buyer", "seller"))
    assert [m["content"] for m in buyer.messages[1:]] == ["five?", "no", "six?", "yes"]
    assert [m["role"] for m in buyer.messages[1:]] == ["assistant", "user"] * 2
    assert [m["role"] for m in seller.messages[1:]] == ["user", "assistant"] * 2
    assert [buyer.messages[i]["reward"] for i in buyer.replies] == pytest.approx([-0.2, -0.6])
    assert [seller.messages[i]["reward"] for i in seller.replies] == [0, 0.5]
    assert played.returns == {"buyer": pytest.approx(-0.8), "seller": 0.5}
    assert buyer.meta == {"seed": 3, "end": "terminated", "role": "buyer"} and buyer.id == "Haggle-3-buyer"


def test_players_by_role():
    players = {"buyer": lambda messages: "no", "seller": lambda messages: "yes"}
    played = play(Haggle(), players, seed=0)
    assert played.returns["seller"] == 0.5


def test_the_four_ends():
    class World(House):
        def step(self, reply):
            messages, reward, terminated, truncated, info = super().step(reply)
            if "break" in reply:
                return messages, 0.0, False, True, {"failed": "broken"}
            return messages, None if "hm" in reply else reward, terminated, truncated, info

    def say(text):
        return play(World(), lambda messages: text, seed=2)

    for text, end, total in [
        ("left or right", "terminated", -3.0),
        ("up", "truncated", -9.0),
        ("break", "failed", None),
        ("hm, left right", "unscored", None),
    ]:
        played = say(text)
        assert (played.end, played.returns["assistant"]) == (end, total)
        assert played.dialogs["assistant"].truncated == (end in ("truncated", "failed"))
    assert say("break").dialogs["assistant"].meta["failed"] == "broken"
    assert play(World(), lambda messages: "up", seed=2, max_turns=2).returns["assistant"] == -2.0


def test_a_step_that_forgets_is_told():
    told = "Silent, episode whose seed is 1: expected step to return the conversation so far"
    with pytest.raises(UserError, match=told):
        play(Silent(), lambda messages: "left", seed=1)


def test_going_back():
    world = House()
    world.reset(seed=1)
    world.step("left")
    saved = snapshot(world)
    ways = []
    for _ in range(2):
        restore(world, saved)
        ways.append(world.step("left or right"))
    assert ways[0] == ways[1] and len(ways[0][0]) == 5


def test_a_world_that_keeps_its_state_elsewhere_says_how():
    class Elsewhere(House):
        def snapshot(self):
            return list(self.doors), list(self.messages)

        def restore(self, saved):
            self.doors, self.messages = list(saved[0]), list(saved[1])

    assert faults(Elsewhere) == {"pickle": faults(Elsewhere)["pickle"]}  # a class inside a function


def test_the_check_leaves_the_generators_of_the_process_alone():
    random.seed(5)
    before = random.getstate()
    conformance.CHECKS["seed"](House)
    assert random.getstate() == before
