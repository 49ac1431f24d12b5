"""Any number of workers plays the same episodes, and a worker that dies costs nothing but time."""

import time
from functools import partial

import pytest

from rl_dialog.errors import UserError

pytest.importorskip("ray")

import ray

from envs.small_talk import SmallTalk
from rl_dialog.cluster.rollout import Rollouts, Workers
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding, load_for_decoding
from rl_dialog.methods import BC, ILQL

EPISODES = range(11)


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def rollouts(cluster):
    """The same two workers for all tests: each is a process that imports torch."""
    with Rollouts(SmallTalk, 2) as workers:
        yield workers


@pytest.fixture
def checkpoints(make_policy, tokenizer, tmp_path):
    for name, method in (("bc", BC()), ("ilql", ILQL())):
        make_policy(method).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path / "bc", tmp_path / "ilql"


@pytest.mark.slow
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_workers_and_batches_do_not_change_the_episodes(rollouts, checkpoints, tokenizer, sample):
    decoding = Decoding(max_new_tokens=6, max_prompt_length=100, do_sample=sample)
    here = [
        play_episodes(load_for_decoding(path), tokenizer, SmallTalk, EPISODES, decoding, seed=3)
        for path in checkpoints
    ]
    there = [rollouts.play(path, EPISODES, decoding, seed=3, batch_size=4) for path in checkpoints]
    steered = rollouts.play(checkpoints[1], EPISODES, decoding, seed=3, beta=0.0)
    assert here == there
    assert steered != there[1]


@pytest.mark.slow
def test_the_users_own_errors_come_through(rollouts, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="expected a checkpoint"):
        rollouts.play(tmp_path / "empty", EPISODES, Decoding())
    with pytest.raises(UserError, match="at least one rollout worker"):
        Rollouts(SmallTalk, 0)


def fails_at_first(folder):
    """A player: one episode raises at once, the other when it is told to."""

    def play(episodes):
        if not (folder / "well").exists():
            (folder / f"plays {episodes[0]}").touch()
            while episodes[0] and not (folder / "go").exists():
                time.sleep(0.05)
            while not (folder / f"plays {1 - episodes[0]}").exists():
                time.sleep(0.05)
            raise UserError(f"no luck with {episodes[0]}")
        return episodes

    return play


@pytest.mark.slow
def test_after_an_error_the_workers_play_on(cluster, tmp_path):
    """Both of them, and the error of the one that was still playing is nobody's any more."""
    with Workers(partial(fails_at_first, tmp_path), 2, cpus_per_worker=0.0) as workers:
        with pytest.raises(UserError, match="no luck with 0"):
            list(workers.play_chunks([[0], [1]]))
        (tmp_path / "well").touch()
        (tmp_path / "go").touch()
        for _ in range(2):
            assert sorted(chunk for chunk, _ in workers.play_chunks([[n] for n in range(6)])) == [
                [n] for n in range(6)
            ]
        assert len(workers.free) + len(workers.leaving) == 2 and not workers.starting


@pytest.mark.slow
def test_killed_workers_are_replaced(rollouts, checkpoints):
    """All of them: only successors can play."""
    decoding = Decoding(max_new_tokens=6, max_prompt_length=100)
    before = rollouts.play(checkpoints[0], EPISODES, decoding)
    for worker in (*rollouts.free, *rollouts.starting.values(), *rollouts.leaving.values()):
        ray.kill(worker)
    assert rollouts.play(checkpoints[0], EPISODES, decoding) == before
