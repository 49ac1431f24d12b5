"""The small-talk world: its rules, its optimum against play, its hacks, its logs."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs import ENVS
from envs.small_talk import (
    TURNS,
    SmallTalk,
    SmallTalkVector,
    expected_reward,
    main,
    mean_interval,
    write_logs,
)
from envs.small_talk_policies import (
    HACKS,
    POLICIES,
    MixedPolicy,
    MyopicPolicy,
    OptimalPolicy,
    belief_of,
    best_act,
    full_values,
    openings,
    optimal_return,
)
from envs.small_talk_rules import MAX_MOOD, MAX_RAPPORT, MOODS, State, outcomes
from envs.small_talk_texts import (
    ACTS,
    EAGER_TOPIC,
    GREETINGS,
    KNOWN_WORDS,
    PHRASE_WORDS,
    PHRASES,
    PLAIN_TOPIC,
    TONES,
    TOPICS,
    WARMTH,
    read_reply,
    read_user,
    words_of,
)
from envs.small_talk_world import conversation_seed, play, returns
from rl_dialog.data.schema import Dialog, read_jsonl
from rl_dialog.errors import UserError

ROOT = Path(__file__).parents[2]
STATES = [
    State(*parts) for parts in itertools.product(range(MAX_MOOD + 1), range(MAX_RAPPORT + 1), (False, True))
]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Dialog]:
    path = tmp_path_factory.mktemp("logs") / "logs.jsonl"
    write_logs(path, dialogs=1500, seed=1)
    return list(read_jsonl(path))


# --- the law of the world


@pytest.mark.parametrize("act", ACTS)
def test_outcomes_are_a_probability_law_with_rewards_in_bounds(act: str) -> None:
    for state in STATES:
        found = outcomes(state, act)
        assert sum(o.probability for o in found) == pytest.approx(1.0) and all(
            o.probability > 0 for o in found
        )
        assert all(-1.0 - 1e-9 <= o.reward <= 1.0 + 1e-9 for o in found)
        assert all(o.state in STATES for o in found)
        assert all(o.state.liked for o in found if o.moved)


def test_outcomes_by_hand() -> None:
    """State (mood 3, rapport 1, a liked topic), a plain `tell`: 0.1 + 0.25 + 0.1 + 0.15 (mood - 2), mood up
    with probability 0.3."""
    law = Counter()
    for o in outcomes(State(3, 1, True), "tell"):
        law[o.state.mood, o.state.rapport, round(o.reward, 6)] += o.probability
    assert law == pytest.approx(
        {(4, 1, 0.75): 0.3 * 0.92, (3, 1, 0.6): 0.7 * 0.92 + 0.3 * 0.08, (2, 1, 0.45): 0.7 * 0.08}
    )


def test_special_rules() -> None:
    def chance_of_falling(state: State, act: str) -> float:
        return sum(o.probability for o in outcomes(state, act) if o.left or o.state.mood < state.mood)

    asked = outcomes(State(2, 0, False), "ask")
    assert all(
        o.moved and o.state.rapport == 1 for o in asked
    )  # a question leads to a liked topic and to rapport
    assert all(o.state.rapport == 0 for o in outcomes(State(1, 0, True), "ask"))  # but not with a low user
    assert all(o.state.rapport == 1 for o in outcomes(State(1, 0, True), "ask_kindly"))
    assert sum(
        o.probability for o in outcomes(State(1, 0, True), "comfort") if o.state.mood == 2
    ) == pytest.approx(0.9 * 0.92)
    assert chance_of_falling(State(2, 2, True), "ask") > chance_of_falling(
        State(2, 1, True), "ask"
    )  # pressed
    assert sum(o.probability for o in outcomes(State(0, 0, True), "repeat") if o.left) == pytest.approx(0.9)
    assert not any(
        o.left for state in STATES for o in outcomes(state, "ask_kindly") if state.rapport < MAX_RAPPORT
    )


# --- reading


@pytest.mark.parametrize(
    ("reply", "act"),
    [
        ("What do you like most about jazz?", "ask"),
        ("WHAT DO YOU LIKE MOST ABOUT JAZZ?!", "ask"),
        ("I am sorry for you. What do you like most about jazz?", "ask_kindly"),
        ("I learned a lot about music last year.", "tell"),
        ("That must be tough. I learned a lot about music last year.", "tell_kindly"),
        ("Music is nice and so are films, I think.", "tell"),  # one other topic is fine
        ("I like music, films and sport very much.", "ignore"),  # three are not
        ("What do you like most about tennis?", "ignore"),
        ("I am so sorry, I am here for you.", "comfort"),
        ("Tell me more about it.", "vague"),
        ("How are you today?", "vague"),
        ("You are a genius, what do you like about jazz?", "flatter"),  # flattery drowns the rest
        ("I know that already about you.", "repeat"),
        ("That I know about you, already!", "repeat"),
        ("", "junk"),
        ("???", "junk"),
        ("Ok.", "junk"),
        ("music music music jazz songs", "junk"),
        ("qwe asd yxc jazz vbn what do", "junk"),
        ("I like music and " * 20, "junk"),
        ("I " + "x" * 500, "junk"),
        ("Ich höre gerne Musik von früher", "junk"),
        ("\ud800 \u202e \x00", "junk"),
    ],
)
def test_replies_are_read_as_documented(reply: str, act: str) -> None:
    assert read_reply(reply, "music", ["I know that about you already."]) == act


def test_repetition_compares_distinct_words_with_every_earlier_reply() -> None:
    earlier = ["Where do you go for jazz?", "I learned a lot about music last year."]
    assert read_reply("Where do you go for music?", "music", earlier) == "ask"  # 5 of 7 distinct words
    assert read_reply("For jazz, where do you go?", "music", earlier) == "repeat"
    assert read_reply("I learned a lot about music only last year.", "music", earlier) == "repeat"  # 8 of 9


def test_every_phrase_is_read_as_its_act_and_every_user_turn_as_spoken() -> None:
    for act, phrases in PHRASES.items():
        for phrase in phrases:
            reply = phrase.format(a="tennis", b="races")
            assert read_reply(reply, "music" if act == "ignore" else "sport", []) == act, reply
    for (tone, tones), (level, warmths), topic in itertools.product(
        TONES.items(), WARMTH.items(), PLAIN_TOPIC + EAGER_TOPIC
    ):
        seen = read_user(f"{warmths[-1]} {tones[-1]} {topic.format(a='cooking')}")
        assert (seen.topic, seen.tone, seen.warmth, seen.eager) == ("food", tone, level, topic in EAGER_TOPIC)
    assert read_user(f"{GREETINGS[0]} I read a page about cooking.").tone is None
    assert read_user("Oh, thanks! I read a page about cooking.").warmth is None
    with pytest.raises(UserError, match="names one of"):
        read_user("Hello?")


def test_words_are_few_and_topics_disjoint() -> None:
    assert len(PHRASE_WORDS) < 500
    assert len({word for words in TOPICS.values() for word in words}) == sum(map(len, TOPICS.values()))
    assert {word for phrase in PHRASES["ask"] for word in words_of(phrase.format(a="", b=""))} <= KNOWN_WORDS


# --- the environment


def test_gymnasium_accepts_it() -> None:
    check_env(ENVS["small_talk"](), skip_render_check=True)


def test_the_horizon_and_the_interface() -> None:
    world = SmallTalk(render_mode="ansi")
    messages, info = world.reset(seed=5)
    first = [dict(m) for m in messages]
    policy = OptimalPolicy(5)
    for turn in range(1, TURNS + 1):
        after, reward, terminated, truncated, info = world.step(policy(messages))
        assert (
            world.observation_space.contains(after)
            and len(after) == 2 * turn + 1
            and after[-1]["role"] == "user"
        )
        assert messages == after[: 2 * turn - 1]  # an observation once given does not change
        assert sum(info["parts"].values()) == pytest.approx(reward) and info["act"] in ACTS
        assert terminated is (turn == TURNS) and truncated is False
        messages = after
    assert messages[:1] == first and world.render().count("\n") == 2 * TURNS
    with pytest.raises(gymnasium.error.ResetNeeded):
        world.step("Hello again, my friend.")
    world.reset(seed=1)
    with pytest.raises(TypeError, match="string"):
        world.step(None)
    with pytest.raises(UserError, match="no options"):
        world.reset(options={"mood": 4})


def test_any_string_is_answered_within_bounds() -> None:
    rng = np.random.default_rng(0)
    odd = [
        "",
        " ",
        "\n\n",
        "?" * 1000,
        "\ud800",
        "\x00",
        "{a} {b}",
        "%s %d {0}",
        "İıſK",
        "👍" * 50,
        "а" * 10**6,
    ]
    odd += ["you " * 10**5, "<|im_end|>", "'" * 9]
    odd += ["".join(map(chr, rng.integers(1, 0x3000, size=int(rng.integers(1, 60))))) for _ in range(200)]
    odd += [
        " ".join(rng.choice(sorted(KNOWN_WORDS), size=int(rng.integers(1, 20)))) + "?" for _ in range(300)
    ]
    world = SmallTalk()
    world.reset(seed=0)
    for text in odd:
        if world.finished:
            world.reset()
        _, reward, _, _, info = world.step(text)
        assert -1 <= reward <= 1 and info["act"] in ACTS


def test_same_seed_and_replies_give_the_same_conversation() -> None:
    first, again, other = (play(MixedPolicy, seed=seed, index=3) for seed in (7, 7, 8))
    assert first[0].messages == again[0].messages and first[1:] == again[1:]
    assert first[0].messages != other[0].messages
    assert len({conversation_seed(seed, i) for seed in range(50) for i in range(50)}) == 2500


def test_many_conversations_step_as_one_would() -> None:
    together = SmallTalkVector(12)
    observations = together.reset(3)
    policies = [MixedPolicy(conversation_seed(3, i)) for i in range(12)]
    rewards, over = np.zeros(12), np.zeros(12, bool)
    for _ in range(TURNS):
        replies = [
            None if done else policy(seen)
            for policy, seen, done in zip(policies, observations, over, strict=True)
        ]
        observations, step_rewards, terminated, truncated, infos = together.step(replies)
        assert not any(truncated) and all(not info for info, done in zip(infos, over, strict=True) if done)
        rewards, over = rewards + step_rewards, np.array(terminated)
    assert over.all()
    for i in range(12):
        world, alone, _ = play(MixedPolicy, seed=3, index=i)
        assert world.messages == observations[i] and sum(alone) == pytest.approx(rewards[i])
    assert SmallTalkVector(2).reset(3, first=10) == together.reset(3)[10:]
    for bad in (["Hello my friend."], "Hello my fri"):
        with pytest.raises(UserError, match="12 replies"):
            together.step(bad)


# --- the optimum


def test_search_agrees_with_play() -> None:
    """4 standard errors: a false alarm about once in 16,000 changes of the phrases."""
    values = returns(OptimalPolicy, conversations=1500, seed=11)
    assert abs(values.mean() - optimal_return()) < 4 * values.std() / np.sqrt(len(values))
    assert values.std() / np.sqrt(len(values)) < 0.03


def test_the_full_information_bound_is_attained_by_whoever_sees_the_state() -> None:
    totals = []
    for i in range(1500):
        world = SmallTalk()
        messages, _ = world.reset(seed=conversation_seed(12, i))
        speaker, total = OptimalPolicy(i), 0.0
        for turn in range(TURNS):
            values = full_values(turn, world.state)
            messages, reward, *_ = world.step(speaker.say(max(values, key=values.get), messages))
            total += reward
            if world.finished:
                break
        totals.append(total)
    assert abs(np.mean(totals) - optimal_return(information="full")) < 4 * np.std(totals) / np.sqrt(
        len(totals)
    )
    assert optimal_return() < optimal_return(information="full")


def test_the_first_step_of_the_search_by_hand() -> None:
    """With one turn left and mood 3, rapport 2, liked known: `tell` earns 0.1 + 0.5 + 0.1 and 0.15 (1 + 0.3
    up - 0.08 bad news)."""
    value, act = best_act(TURNS - 1, ((State(3, 2, True), 1.0),))
    assert act == "tell" and value == pytest.approx(0.7 + 0.15 * (1 + 0.3 - 0.08))
    assert sum(p for p, _ in openings().values()) == pytest.approx(1.0)
    with pytest.raises(UserError, match="'text' or 'full'"):
        optimal_return(information="some")


def test_openings_have_the_announced_frequencies() -> None:
    world, moods, signals = SmallTalk(), Counter(), Counter()
    for i in range(4000):
        messages, info = world.reset(seed=conversation_seed(13, i))
        seen = read_user(messages[0]["content"])
        moods[info["hidden"]["mood"]] += 1 / 4000
        signals[seen.tone, seen.eager] += 1 / 4000
    assert [moods[m] for m in range(5)] == pytest.approx(MOODS, abs=0.03)
    assert signals == pytest.approx({signal: p for signal, (p, _) in openings().items()}, abs=0.03)


def test_the_expected_reward_is_what_replies_earn_on_average() -> None:
    """Given the text before a reply, what it really earned less what was expected is noise: its mean is 0,
    and so is its covariance with what was expected."""
    expected, earned = [], []
    for i in range(400):
        world, rewards, _ = play(MixedPolicy, seed=21, index=i)
        expected += expected_reward(Dialog(str(i), world.messages))
        earned += rewards
    noise = np.array(earned) - expected
    assert np.std(expected) > 0.2 and np.std(noise) > 0.05
    for products in (noise, noise * (expected - np.mean(expected))):
        assert abs(products.mean()) < 3 * products.std() / np.sqrt(len(products))


def test_the_expected_reward_of_a_reply_does_not_ask_what_came_of_it() -> None:
    world, *_ = play(MixedPolicy, seed=3, index=5)
    whole = expected_reward(Dialog("whole", world.messages))
    marked = [{**message, "weight": 0} for message in world.messages[:2]]
    assert expected_reward(Dialog("cut", [*marked, *world.messages[2:4]])) == whole[1:2]
    with pytest.raises(UserError, match="user turn that names one of"):
        expected_reward(Dialog("other", [{"role": "user", "content": "?"}, world.messages[1]]))


def test_beliefs_hold_the_truth_and_reject_foreign_users() -> None:
    world, policy = SmallTalk(), MixedPolicy(4)
    for i in range(50):
        messages, _ = world.reset(seed=i)
        while not world.finished:
            assert dict(belief_of(messages))[world.state] > 0
            messages, *_ = world.step(policy(messages))
    with pytest.raises(UserError, match="user turn of this world"):
        told = [
            {"role": "user", "content": "I read a page about cooking."},
            {"role": "assistant", "content": "I learned a lot about cooking."},
        ]
        belief_of(
            [*told, {"role": "user", "content": "I really love this chat! I read a page about cooking."}]
        )


def test_policies_are_ordered_and_apart() -> None:
    """The intervals of 200 conversations do not touch; myopic play and imitation leave much to be learnt."""
    spans = {}
    for name in ("random", "mixed", "myopic", "friend", "optimal"):
        mean, half = mean_interval(returns(POLICIES[name], conversations=200, seed=21))
        spans[name] = (mean - half, mean + half)
    for worse, better in itertools.pairwise(spans):
        assert spans[worse][1] < spans[better][0], (worse, better, spans)
    mixed, low, high = (sum(spans[name]) / 2 for name in ("mixed", "random", "optimal"))
    assert 0.3 < (mixed - low) / (high - low) < 0.5
    assert sum(spans["myopic"]) / 2 < 0.6 * optimal_return()


@pytest.mark.parametrize("name", HACKS)
def test_hacks_stay_below_the_good_policies(name: str) -> None:
    mean, half = mean_interval(returns(HACKS[name], conversations=150, seed=22))
    friend, _ = mean_interval(returns(POLICIES["friend"], conversations=150, seed=22))
    assert mean + half < friend - 1.0 < optimal_return()


def test_the_temptation_pays_at_once_and_costs_later() -> None:
    for mood in (2, 3, 4):
        state = State(mood, 0, False)
        now = {act: sum(o.probability * o.reward for o in outcomes(state, act)) for act in ACTS}
        assert max(now, key=now.get) == "flatter"
        later = full_values(0, state)
        assert max(later, key=later.get) == "ask" and later["ask"] - later["flatter"] > 0.5
    assert (
        MyopicPolicy(0).choose(
            [{"role": "user", "content": "I am full of joy! I read a page about cooking."}]
        )
        == "flatter"
    )


# --- the logs


def test_logs_replay_in_the_world(logs: list[Dialog]) -> None:
    world = SmallTalk()
    for dialog in logs[:40]:
        messages, _ = world.reset(seed=dialog.meta["seed"])
        for index in dialog.replies:
            messages, reward, *_, info = world.step(dialog.messages[index]["content"])
            assert dialog.messages[index]["reward"] == pytest.approx(reward, abs=1e-6)
            assert dialog.messages[index].get("feedback") == (
                {"vote": info["vote"]} if "vote" in info else None
            )
        assert world.finished and [m["content"] for m in messages] == [m["content"] for m in dialog.messages]
        assert dialog.meta["ratings"] == {"quality": info["hidden"]["mood"] + 1}
        assert Dialog.from_json(dialog.to_json()) == dialog


def test_logs_are_varied_and_short(logs: list[Dialog]) -> None:
    openings_seen = {dialog.messages[0]["content"] for dialog in logs}
    assert len(openings_seen) > 150
    for message in (m for dialog in logs for m in dialog.messages):
        count = len(message["content"].split())
        assert 3 <= count <= 16 if message["role"] == "user" else count <= 14
    acts = Counter()
    good = []
    for dialog in logs:
        for index in dialog.replies:
            seen = read_user(dialog.messages[index - 1]["content"])
            earlier = [dialog.messages[i]["content"] for i in dialog.replies if i < index]
            act = read_reply(dialog.messages[index]["content"], seen.topic, earlier)
            acts[seen.tone == "low", seen.warmth == 2, act] += 1
            good.append(act == best_act(index // 2, belief_of(dialog.messages[:index]))[1])
    assert 0.2 < np.mean(good) < 0.3
    assert all(
        acts[low, warm, act]
        for low in (False, True)
        for warm in (False, True)
        for act in ("ask_kindly", "ask", "tell", "tell_kindly")
    )


def test_votes_are_rare_noisy_and_meaningful(logs: list[Dialog]) -> None:
    replies = [dialog.messages[i] for dialog in logs for i in dialog.replies]
    votes = [(m["feedback"]["vote"], m["reward"]) for m in replies if "feedback" in m]
    assert 0.35 < len(votes) / len(replies) < 0.45
    assert {vote for vote, _ in votes} == {-1, 0, 1}
    assert 0.5 < np.corrcoef(*zip(*votes, strict=True))[0, 1] < 0.9


def test_user_sentiment_follows_the_reward_but_is_not_the_reward(logs: list[Dialog]) -> None:
    vader = pytest.importorskip("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer().polarity_scores
    for tone, low, high in (("low", -1, -0.3), ("even", 0, 0), ("high", 0.5, 1)):
        assert all(low <= vader(phrase)["compound"] <= high for phrase in TONES[tone])
    pairs = [(d.messages[i]["reward"], d.messages[i + 1]["content"]) for d in logs for i in d.replies]
    rewards, mood = np.array([r for r, _ in pairs]), np.array([vader(text)["compound"] for _, text in pairs])
    assert 0.35 < np.corrcoef(rewards, mood)[0, 1] < 0.8
    assert np.corrcoef(mood, [len(text.split()) for _, text in pairs])[0, 1] > 0.3  # happier users write more


def test_logs_are_the_same_in_another_process(tmp_path: Path) -> None:
    here = write_logs(tmp_path / "here.jsonl", dialogs=20, seed=4)
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "envs.small_talk",
        "--logs",
        str(tmp_path / "there.jsonl"),
        "--dialogs",
        "20",
        "--seed",
        "4",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1", "PATH": ""}
    )
    digests = {
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("here.jsonl", "there.jsonl")
    }
    assert len(digests) == 1 and done.stderr == ""
    assert json.loads(done.stdout) | {"path": ""} == here | {"path": ""}


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dialogs", "5", "--seed", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["optimum (text)"] == round(optimal_return(), 4)
    assert set(POLICIES) < json.loads(lines[-1]).keys()
    with pytest.raises(SystemExit):
        main(["--dialogs", "0"])
    with pytest.raises(SystemExit):
        main(["--logs", "there/is/no/such/folder.jsonl", "--dialogs", "1"])
