"""Acts that get lost on their way."""

import random

import pytest

from envs.multiwoz import Options, RulePolicy, Simulator
from envs.multiwoz.acts import BYE, NONE, Vocabulary, checked
from envs.multiwoz.channel import Channel
from envs.multiwoz.rollout import play, transcripts_hash
from envs.multiwoz.values import Values
from rl_dialog.errors import UserError

TOKENS = [
    "Hotel-Inform-Area-1",
    "Hotel-Inform-Stars-1",
    "Hotel-Request-Phone-?",
    "Hotel-Request-Post-?",
    "Hotel-Inform-none-none",
    "general-bye-none-none",
]
EAST = ("Inform", "Hotel", "Area", "east")


def channel(noise):
    return Channel(Vocabulary(TOKENS), Values({"hotel": {"area": ["east", "west"], "stars": ["4"]}}), noise)


def test_each_way_to_go_wrong_is_as_likely():
    """East can only become west; an area only stars; four ways, a quarter each."""
    rng = random.Random(0)
    counts = {"drop": 0, "value": 0, "slot": 0, "insert": 0}
    for _ in range(4000):
        arrived = channel(1.0).passed((EAST,), rng)
        checked(arrived, side="user")
        way = (
            "drop"
            if not arrived
            else "insert"
            if len(arrived) == 2
            else "value"
            if arrived[0][2] == "Area"
            else "slot"
        )
        counts[way] += 1
        assert way != "value" or arrived == (("Inform", "Hotel", "Area", "west"),)
        assert way != "slot" or arrived == (("Inform", "Hotel", "Stars", "4"),)
        assert way != "insert" or arrived[0] == EAST
    assert all(abs(count - 1000) < 130 for count in counts.values()), counts  # 4.7 standard deviations


def test_the_share_of_errors_is_the_noise():
    rng = random.Random(1)
    wrong = sum(channel(0.2).passed((EAST,), rng) != (EAST,) for _ in range(4000))
    assert abs(wrong / 4000 - 0.2) < 0.03
    assert channel(0.0).passed((EAST, BYE), None) == (EAST, BYE)


def test_acts_without_values_keep_their_form():
    rng = random.Random(2)
    for act in (("Request", "Hotel", "Phone", "?"), ("Inform", "Hotel", NONE, NONE), BYE):
        arrived = {channel(1.0).passed((act,), rng) for _ in range(200)}
        assert () in arrived and all(checked(acts, side="user") == acts for acts in arrived)
        assert all(a[3] == "?" for acts in arrived for a in acts if a[0] == "Request")


def test_noise_out_of_range():
    for noise in (-0.1, 1.5):
        with pytest.raises(UserError, match=r"expected noise between 0 and 1"):
            channel(noise)
        with pytest.raises(UserError, match=r"expected noise between 0 and 1"):
            Options(noise=noise)


def transcripts(world, **options):
    simulator = Simulator(world, Options(**options))
    return list(play(simulator, RulePolicy(world.database, simulator.options).respond, seed=3, episodes=150))


def test_no_noise_changes_nothing_and_noise_is_seeded(town):
    plain, silent = transcripts(town), transcripts(town, noise=0.0)
    assert transcripts_hash(plain) == transcripts_hash(silent)
    noisy = transcripts(town, noise=0.2)
    assert (
        transcripts_hash(noisy) == transcripts_hash(transcripts(town, noise=0.2)) != transcripts_hash(plain)
    )
    assert [each.goal for each in noisy] == [each.goal for each in plain] and noisy[0].turns[0] == plain[
        0
    ].turns[0]  # the user said the same


def test_noise_makes_it_harder(town):
    success = [
        sum(each.outcome.success for each in transcripts(town, noise=noise)) / 150
        for noise in (0.0, 0.2, 0.5)
    ]
    assert success[0] > success[1] + 0.05 and success[1] > success[2] + 0.05, success


def test_every_user_act_of_a_world_can_go_wrong(town):
    simulator = Simulator(town, Options(noise=1.0))
    rng = random.Random(0)
    for intent, domain, slot, _ in town.user_acts.parts:
        act = (intent, domain, slot, "?" if intent == "Request" else NONE)
        for _ in range(5):
            checked(simulator.channel.passed((act,), rng), side="user")
