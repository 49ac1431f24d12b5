"""The world in words, as language models meet it."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from envs import ENVS
from envs.multiwoz import MultiWOZText, Options, RulePolicy, Simulator
from envs.multiwoz.agents import Session, SystemAgent, UserAgent
from envs.multiwoz.matcher import matchers
from envs.multiwoz.templates import Speaker
from rl_dialog.errors import UserError

GOAL = {"hotel": {"info": {"area": "east"}, "reqt": ["phone"]}}


def test_it_is_a_gymnasium_environment():
    env = ENVS["multiwoz"]()
    check_env(env, skip_render_check=True)
    assert env.observation_space.contains(env.observation_space.sample()) and env.action_space.contains(
        "Hello."
    )
    assert not env.observation_space.contains([]) and not env.observation_space.contains(
        [{"role": "tool", "content": ""}]
    )


def test_a_conversation():
    env = MultiWOZText(options={"reward": "terminal"}, render_mode="ansi")
    messages, info = env.reset(seed=0, options={"goal": GOAL})
    assert (
        [m["role"] for m in messages] == ["user", "system"]
        and messages[1]["content"].startswith("hotel: ")
        and "Area east" in messages[1]["content"]
    )
    assert info["goal"]["hotel"]["info"] == {"area": "east"}
    before = messages
    messages, reward, terminated, truncated, info = env.step(
        "The number of choices is [hotel_choice]. What stars do you have in mind?"
    )
    assert messages[:2] == before and [m["role"] for m in messages[2:]] == ["assistant", "user", "system"]
    assert (reward, terminated, truncated) == (-1.0, False, False) and "outcome" not in info
    assert ("Request", "Hotel", "Stars", "?") in info["heard"] and "[" not in info["text"]
    messages, reward, terminated, truncated, info = env.step("The phone is [hotel_phone].")
    while not terminated:
        messages, reward, terminated, truncated, info = env.step("Goodbye.")
    assert reward == 80.0 and info["outcome"]["success"] and not truncated
    assert env.render().splitlines()[1].startswith("system: The number of choices is ")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("More?")


def test_the_rule_policy_in_words_earns_what_it_earns_as_a_pipeline(town):
    """Each reply of a pipeline with placeholders, sent through `step`, brings the same rewards and
    outcome."""
    simulator = Simulator(town)
    speakers = {side: Speaker(town.templates[side], side=side) for side in ("user", "system")}
    system = SystemAgent(
        simulator,
        RulePolicy(town.database, simulator.options).respond,
        nlg=speakers["system"],
        placeholders=True,
    )
    session = Session(
        UserAgent(simulator, nlu=matchers(town)["system"].understand, nlg=speakers["user"]), system
    )
    env = MultiWOZText(simulator)
    for meeting in session.play((seed, 0, 0, 0) for seed in range(20)):
        messages, _ = env.reset(seed=meeting.talk.seeds[0])
        for turn, reward in zip(meeting.system.turns, meeting.rewards, strict=True):
            messages, got, terminated, _, info = env.step(turn.reply)
            assert got == reward
        assert terminated and info["outcome"]["success"] == simulator.outcome(meeting.talk).success
        assert [m["content"] for m in messages[:-2]] == [m["content"] for m in meeting.system.messages]


def test_conversations_follow_from_seed_and_replies():
    texts = []
    for _ in range(2):
        env = MultiWOZText()
        found = []
        for seed in (4, None, None):
            messages, _ = env.reset(seed=seed)
            found += [messages, env.step("How may I help?")[0]]
        texts.append(found)
    assert texts[0] == texts[1] and texts[0][0] != texts[0][2]


@pytest.mark.parametrize(("reward", "last"), [("terminal", -40.0), ("per_turn", -1.0), ("user", -40.0)])
def test_rewards_are_those_of_the_acts_environment(reward, last):
    env = MultiWOZText(options=Options(reward=reward))
    env.reset(seed=1)
    rewards, terminated = [], False
    while not terminated:
        _, got, terminated, _, info = env.step("")
        rewards.append(got)
    assert (
        rewards == [-1.0] * 19 + [last] and info["outcome"]["turns"] == 20 and not info["outcome"]["success"]
    )


def test_noise_reaches_the_notes_and_not_the_words():
    plain, noisy = MultiWOZText(), MultiWOZText(options={"noise": 1.0})
    found = [env.reset(seed=seed)[0] for seed in range(5) for env in (plain, noisy)]
    assert [m[0] for m in found[::2]] == [m[0] for m in found[1::2]] and [m[1] for m in found[::2]] != [
        m[1] for m in found[1::2]
    ]


def test_other_readers_can_be_put_in():
    heard = []
    env = MultiWOZText(
        user_nlu=lambda text, context: (
            heard.append((text, len(context))) or [("Request", "Hotel", "Area", "?")]
        ),
        system_nlu=lambda *_: (),
    )
    messages, _ = env.reset(seed=0, options={"goal": GOAL})
    assert messages[1]["content"] == "nothing asked yet"
    assert env.step("?")[4]["heard"] == (("Request", "Hotel", "Area", "?"),) and heard == [("?", 1)]


def test_mistakes_are_explained():
    env = MultiWOZText()
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
        env.step("Hello.")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="expected the reply as a string, got int"):
        env.step(3)
    with pytest.raises(UserError, match="expected no options but goal"):
        env.reset(options={"goals": {}})
    with pytest.raises(UserError, match="expected render_mode"):
        MultiWOZText(render_mode="human")
    with pytest.raises(UserError, match="which has its own"):
        MultiWOZText(env.simulator, options=Options())
    with pytest.raises(UserError, match="nowhere: expected a folder with world files"):
        MultiWOZText("nowhere")
