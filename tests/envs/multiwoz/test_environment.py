"""Conversations by acts and by vectors: rewards by hand, seeds, and independence of what is stepped beside
them."""

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.multiwoz.acts import ActError
from envs.multiwoz.environment import MultiWOZ, MultiWOZVector, Simulator, stream
from envs.multiwoz.goals import GoalError
from envs.multiwoz.options import ORIGINAL, Options
from envs.multiwoz.rollout import play, transcripts_hash
from envs.multiwoz.rule_policy import RulePolicy
from rl_dialog.errors import UserError

BYE = ("bye", "general", "none", "none")


def phone_goal(world, *, book=False):
    """A goal about the place and the price of hotel 0 of a world, and the right answers."""
    row = world.database["hotel"].rows[0]
    goal = {"hotel": {"info": {"name": row["name"]}, "reqt": ["phone"]}}
    if book:
        goal["hotel"] |= {"reqt": [], "book": {"people": "3", "day": "monday", "stay": "2"}}
    return goal, [("Inform", "Hotel", "Phone", row["phone"])]


def rewards(world, goal, turns, **options):
    simulator = Simulator(world, Options(**{"coref_prob": 0.0} | options))
    talk = simulator.start((0, 0, 0, 0), goal)
    found = [simulator.step(talk, acts) for acts in turns]
    assert talk.done and talk.turns == len(turns) and talk.total == sum(found)
    return found, simulator.outcome(talk)


# --- rewards


def test_success_and_failure_at_the_end(town):
    goal, right = phone_goal(town)
    found, outcome = rewards(town, goal, [[], [], right])
    assert (
        found == [-1, -1, 80]
        and outcome.success
        and outcome.complete
        and outcome.turns == 3
        and outcome.total == 78
    )  # -(k - 1) + 80
    found, outcome = rewards(town, goal, [[], [("NoOffer", "Hotel", "none", "none")]])
    assert found == [-1, -40] and not outcome.success and not outcome.complete


def test_a_domain_is_rewarded_once(town):
    goal, right = phone_goal(town)
    goal["police"] = {"info": {}, "reqt": ["phone"]}
    police = [("Inform", "Police", "Phone", town.database["police"].rows[0]["phone"])]
    found, _ = rewards(town, goal, [right, [], [], police], reward="terminal_domain")
    assert found == [4, -1, -1, 85]


def test_acts_can_cost(town):
    goal, right = phone_goal(town)
    two = [("reqmore", "general", "none", "none"), ("Request", "Hotel", "Area", "?")]
    assert rewards(town, goal, [two, [], right], act_penalty=0.5)[0] == [-1, 0, 80]


def test_the_original_pays_every_turn(town):
    """A booking for the wrong number of nights satisfies the evaluator and not the user, so the 40 come again
    and again."""
    goal, _ = phone_goal(town, book=True)
    wrong = [("Book", "Booking", "Stay", "5"), ("Book", "Booking", "Ref", "00000000")]
    found, outcome = rewards(
        town, goal, [[], wrong, [], [("Book", "Booking", "Ref", "00000000")]], reward="per_turn"
    )
    assert found == [-1, 40, 40, 40] and outcome.success
    goal, right = phone_goal(town)
    goal["police"] = {"info": {}, "reqt": ["phone"]}
    police = [("Inform", "Police", "Phone", town.database["police"].rows[0]["phone"])]
    assert rewards(town, goal, [right, police], reward="per_turn")[0] == [
        -1,
        40,
    ]  # after the phone, the user speaks of the police


def test_the_users_own_view(town):
    goal, _ = phone_goal(town)
    invented = [("Inform", "Hotel", "Phone", "99999999999")]
    assert rewards(town, goal, [[], invented], reward="user")[0] == [-1, 80]
    assert rewards(town, goal, [[], invented], reward="terminal")[0] == [-1, -40]


@pytest.mark.parametrize("seed", range(5))
def test_a_silent_system(town, seed):
    for reward, total in (("per_turn", -20), ("terminal", -59), ("user", -59)):
        simulator = Simulator(town, Options(reward=reward))
        talk = simulator.start((seed, 0, 0, 0))
        while not talk.done:
            simulator.step(talk, [])
        outcome = simulator.outcome(talk)
        assert (outcome.turns, outcome.total, outcome.success) == (20, total, False)


# --- seeds and independence


def test_transcripts_do_not_depend_on_what_is_stepped_beside_them(town):
    simulator = Simulator(town)
    respond = RulePolicy(town.database, simulator.options).respond
    hashes = {
        transcripts_hash(play(simulator, respond, seed=3, episodes=60, together=together))
        for together in (1, 2, 7, 64)
    }
    assert len(hashes) == 1
    halves = [
        *play(simulator, respond, seed=3, episodes=30),
        *play(simulator, respond, seed=3, episodes=30, first=30),
    ]
    assert transcripts_hash(halves) in hashes
    assert transcripts_hash(play(simulator, respond, seed=4, episodes=60)) not in hashes


def test_environment_i_is_the_same_among_one_and_many(town):
    def transcripts(count, follow):
        envs = MultiWOZVector(count, town, worker=2)
        policy = RulePolicy(town.database, envs.simulator.options)
        envs.reset(seed=5)
        said = []
        for _ in range(40):
            turns = [None if talk.done else policy.respond(talk.state, talk.rng) for talk in envs.talks]
            said.append(turns[follow])
            envs.step_acts(turns)
        return said, envs.episodes[follow]

    assert transcripts(1, 0) == transcripts(8, 0)
    assert transcripts(4, 3) == transcripts(8, 3)
    assert transcripts(4, 3) != transcripts(4, 2)


def test_a_single_environment_is_the_first_of_many(town):
    one, many = MultiWOZ(town), MultiWOZVector(3, town)
    a, _ = one.reset(seed=9)
    b, _ = many.reset(seed=9)
    rng = np.random.default_rng(0)
    for _ in range(60):
        assert (a["obs"] == b["obs"][0]).all() and (a["action_mask"] == b["action_mask"][0]).all()
        action = (rng.random(one.action_space.n) < 0.03) & a["action_mask"].astype(bool)
        a, reward, ended, truncated, info = one.step(action)
        b, rewards, ends, _, infos = many.step(np.stack([action] * 3))
        assert reward == rewards[0] and ended == ends[0] and not truncated
        if ended:
            assert info["outcome"]["turns"] == infos["outcome"][0].turns and infos["_outcome"][0]
            assert (a["obs"] == b["obs"][0]).all()
            a, _ = one.reset()
            b, rewards, ends, _, _ = many.step(np.stack([action] * 3))
            assert rewards[0] == 0 and not ends[0]


def test_a_conversation_can_be_pickled_and_goes_on(town):
    simulator = Simulator(town)
    policy = RulePolicy(town.database, simulator.options)

    def finish(talk):
        said = []
        while not talk.done:
            simulator.advance(talk, policy.respond(talk.state, talk.rng))
            said += [talk.state.system_acts, talk.state.user_acts]
        return said, simulator.outcome(talk)

    for episode in range(5):
        talk = simulator.start((0, 0, 0, episode))
        simulator.advance(talk, policy.respond(talk.state, talk.rng))
        copy = pickle.loads(pickle.dumps(talk))
        assert finish(copy) == finish(talk)


def test_streams_differ_by_every_number_and_role():
    seeds = [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
        (0, 0, 11, 1),
        (0, 0, 1, 11),
    ]
    drawn = {stream(seed, role).random() for seed in seeds for role in ("user", "system")}
    assert len(drawn) == 2 * len(seeds)
    assert stream(seeds[0], "user").random() == stream(seeds[0], "user").random()


def test_a_world_stays_as_it_was(town):
    before = pickle.dumps([table.rows for table in town.database.tables.values()])
    simulator = Simulator(town)
    list(play(simulator, RulePolicy(town.database, simulator.options).respond, seed=0, episodes=50))
    assert pickle.dumps([table.rows for table in town.database.tables.values()]) == before


@pytest.mark.parametrize(
    "options",
    [Options(), Options(coref_prob=1.0, not_book_after_offer=True, reward="terminal_domain"), ORIGINAL],
)
@pytest.mark.parametrize("density", [0.01, 0.1, 0.9])
def test_any_action_is_survived(town, options, density):
    """Random bits, masked or not as the options say: bounded dialogs, rewards of the mode, observations in
    the space."""
    envs, rng = MultiWOZVector(8, town, options), np.random.default_rng(0)
    observations, _ = envs.reset(seed=0)
    known = {
        "per_turn": {-1, 5, 40},
        "terminal_domain": {base + 5 * n for base in (-1, 80, -40) for n in range(4)},
        "terminal": {-1, 80, -40},
    }
    for _ in range(60):
        actions = (rng.random((8, envs.single_action_space.n)) < density) & observations[
            "action_mask"
        ].astype(bool)
        observations, rewards, ended, _, infos = envs.step(actions)
        assert observations in envs.observation_space
        assert set(rewards.tolist()) <= known[options.reward] | {0.0}
        for outcome in infos["outcome"][ended] if ended.any() else ():
            assert 1 <= outcome.turns <= 20 and (not outcome.success or outcome.final_goal == 1)


# --- Gymnasium


@pytest.mark.filterwarnings("error")
def test_gymnasium_accepts_it(town):
    check_env(MultiWOZ(town), skip_render_check=True)


def test_the_shape_of_everything(town):
    env = MultiWOZ(town, {"reward": "per_turn"}, render_mode="ansi")
    observation, info = env.reset(seed=1)
    assert observation in env.observation_space and set(info["goal"]) <= {
        "hotel",
        "restaurant",
        "train",
        "attraction",
        "taxi",
        "hospital",
        "police",
    }
    observation, *_ = env.step(np.zeros(env.action_space.n, np.int8))
    assert observation in env.observation_space
    assert env.render().splitlines()[1] == "system: general-reqmore-none"
    envs = MultiWOZVector(2, town)
    observations, infos = envs.reset(seed=1)
    assert observations in envs.observation_space and infos == {}
    assert envs.single_action_space.n == len(town.system_acts) and envs.action_space.shape == (
        2,
        len(town.system_acts),
    )


def test_goals_of_ones_own(town):
    goal, right = phone_goal(town)
    env = MultiWOZ(town)
    _, info = env.reset(seed=0, options={"goal": goal})
    assert info["goal"]["hotel"]["reqt"] == {"phone": "?"}
    *_, ended, _, info = env.step_acts(right)
    assert ended and info["outcome"]["success"]
    with pytest.raises(GoalError, match="got 'motel'"):
        env.reset(options={"goal": {"motel": {}}})
    with pytest.raises(UserError, match="expected no options but goal"):
        env.reset(options={"gaol": goal})


def test_misuse_is_refused(town):
    env = MultiWOZ(town)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
        env.step(np.zeros(env.action_space.n, np.int8))
    env.reset(seed=0)
    with pytest.raises(ActError, match="system act 0"):
        env.step_acts([["Inform", "Hotel"]])
    with pytest.raises(UserError, match="expected an action of shape"):
        env.step(np.zeros(3))
    with pytest.raises(UserError, match="render_mode"):
        MultiWOZ(town, render_mode="human")
    with pytest.raises(UserError, match="at least one environment"):
        MultiWOZVector(0, town)
    envs = MultiWOZVector(2, town)
    with pytest.raises(gymnasium.error.ResetNeeded):
        envs.step(np.zeros((2, env.action_space.n)))
    envs.reset(seed=0)
    with pytest.raises(UserError, match=r"expected actions of shape \(2,"):
        envs.step(np.zeros(env.action_space.n))
    simulator = Simulator(town)
    talk = simulator.start((0, 0, 0, 0))
    talk.user.done = True
    with pytest.raises(gymnasium.error.ResetNeeded, match="after the user's goodbye"):
        simulator.step(talk, [BYE])


@pytest.mark.parametrize(
    ("name", "value"), [("max_turn", 1), ("max_initiative", 0), ("coref_prob", 1.5), ("reward", "terminall")]
)
def test_options_out_of_range(name, value):
    with pytest.raises(UserError, match=f"expected {name}"):
        Options(**{name: value})


# --- the published world


def rule_figures(world, options, episodes, seed=0):
    simulator = Simulator(world, options)
    return [
        each.outcome
        for each in play(simulator, RulePolicy(world.database, options).respond, seed=seed, episodes=episodes)
    ]


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values)


@pytest.mark.realdata
def test_the_rule_policy_reaches_its_published_figures(multiwoz):
    """1,000 dialogs of the original: success .973, complete .982, book .9925, P/R/F1 .859/.989/.902, 4.34
    system turns, return 36.0."""
    found = rule_figures(multiwoz, ORIGINAL, 3000)
    assert mean(each.success for each in found) == pytest.approx(0.973, abs=0.010)
    assert mean(each.complete for each in found) == pytest.approx(0.982, abs=0.008)
    assert mean(each.book_rate for each in found) == pytest.approx(0.9925, abs=0.008)
    assert mean(each.inform_precision for each in found) == pytest.approx(0.859, abs=0.02)
    assert mean(each.inform_recall for each in found) == pytest.approx(0.989, abs=0.006)
    assert mean(each.inform_f1 for each in found) == pytest.approx(0.902, abs=0.015)
    assert mean(each.turns for each in found) == pytest.approx(4.34, abs=0.15)
    assert mean(each.total for each in found) == pytest.approx(36.0, abs=3.0)


@pytest.mark.realdata
def test_without_references_the_rule_policy_hardly_fails(multiwoz):
    found = rule_figures(multiwoz, Options(coref_prob=0.0), 2000)
    assert mean(each.success for each in found) == pytest.approx(0.991, abs=0.008)
    assert all(each.complete for each in found) and max(each.turns for each in found) <= 12
