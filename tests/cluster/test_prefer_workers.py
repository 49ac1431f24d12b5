"""A preference run whose environments are stepped by env runners of their own, on another machine of the
cluster, and one of them dies."""

import json
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from pipelines.prefer import PreferConfig, main
from rl_dialog.training.policy_gradient import PPO
from tests.processes import title


@pytest.fixture
def two_nodes(monkeypatch):
    """The address of a cluster whose first node has no CPU to lend: what asks for one runs on the second."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def env_runners() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if "VectorEnvRunner" in title(each)]


@pytest.mark.slow
def test_env_runners_on_another_node_of_which_one_is_killed(two_nodes, tmp_path):
    address = two_nodes
    config = PreferConfig(
        env_options="observations=position", labeller="oracle", address=address,
        output_dir=str(tmp_path / "run"), steps=40_000, budget=60,
        initial_labels=40, first_epochs=5, num_envs=8, num_workers=2,
        ppo=PPO(batch_size=400, minibatch_size=100), eval_every=0, report_to="none", quiet=True,
    )  # fmt: skip
    killed = []

    def kill_one() -> None:
        while not (Path(config.output_dir) / "latest").is_file() or not (found := env_runners()):
            time.sleep(0.2)
        found[0].kill()
        killed.append(found[0].pid)

    threading.Thread(target=kill_one, daemon=True).start()
    result = main(config)
    assert killed and result["steps"] >= 40_000 and 55 <= result["labels"] <= 60
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    # On a busy machine a role may be slow to say that it lives, which is told there too.
    assert [event["restarts"] for event in events if event["role"] == "worker"] == [1]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["train/worker_restarts"] == 1
    assert sum(line.get("train/episodes") or 0 for line in lines) == pytest.approx(
        result["steps"] / 100, rel=0.1
    )
