"""Task policies on workers: the same conversations for any number of them, and for one that is killed."""

import os
import signal
from functools import partial

import pytest

from rl_dialog.errors import UserError

pytest.importorskip("ray")

import ray
import torch

from envs.multiwoz import Options
from envs.multiwoz.rollout import Player, transcripts_hash
from pipelines.task_agents import shape_of
from rl_dialog.cluster.rollout import Workers, play_in_order, split
from rl_dialog.models.act_policy import ActPolicy, GreedyActs

EPISODES = range(200)


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def player():
    return Player("", Options())


@pytest.fixture(scope="module")
def policy(player):
    torch.manual_seed(0)
    return GreedyActs(ActPolicy(shape_of(player.simulator)))


def conversations(player, policy, *, seed, num_workers=0):
    return play_in_order(
        player.maker if num_workers else lambda: player, EPISODES, policy, seed, num_workers=num_workers
    )


def test_chunks_do_not_depend_on_the_workers():
    assert split(range(5), 2) == [[0, 1], [2, 3], [4]] and split([], 2) == []


@pytest.mark.slow
def test_any_number_of_workers_holds_the_same_conversations(cluster, player, policy):
    """The rule policy and a network, on the same workers."""
    policies = {"rule": None, "network": policy}
    expected = {
        name: transcripts_hash(conversations(player, each, seed=5)) for name, each in policies.items()
    }
    for count in (1, 3):
        with Workers(partial(Player, "", Options()), count) as workers:
            assert {
                name: transcripts_hash(played(workers, each)) for name, each in policies.items()
            } == expected, count
    assert (
        transcripts_hash(conversations(player, None, seed=5, num_workers=2)) == expected["rule"]
    )  # in their order, too
    assert transcripts_hash(conversations(player, policy, seed=6)) != expected["network"]


def played(workers, policy):
    """All conversations in the order of their numbers, of which workers finish some before others."""
    done = dict((chunk[0], found) for chunk, found in workers.play_chunks(split(EPISODES), policy, 5))
    return [each for first in sorted(done) for each in done[first]]


class Mortal:
    """A player whose process is killed in the middle of chunk 1, once."""

    def __init__(self, marker):
        self.player, self.marker = Player("", Options()), marker

    def __call__(self, episodes, policy, seed):
        played = self.player(episodes[: len(episodes) // 2], policy, seed)
        if episodes[0] == 64 and not self.marker.exists():
            self.marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return played + self.player(episodes[len(episodes) // 2 :], policy, seed)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_costs_no_conversation_and_doubles_none(
    cluster, player, policy, tmp_path
):
    """Its chunk is played again by its successor: the batch is complete, every episode is there once, and all
    are as they would have been."""
    marker = tmp_path / "killed"
    with Workers(partial(Mortal, marker), 2) as workers:
        found = played(workers, policy)
    assert marker.exists()
    assert [each.episode for each in found] == list(EPISODES)
    assert transcripts_hash(found) == transcripts_hash(conversations(player, policy, seed=5))


@pytest.mark.slow
def test_a_players_own_error_comes_through(cluster):
    with pytest.raises(UserError, match="at least one rollout worker"):
        Workers(partial(Player, "", Options()), 0)
    with (
        Workers(partial(Player, "", Options(), together=0), 1) as workers,
        pytest.raises(UserError, match="at least one conversation at a time"),
    ):
        list(workers.play_chunks([[0]], None, 0))
