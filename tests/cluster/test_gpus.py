"""Every verb that asks Ray for GPUs, on a Ray that is told of two which this machine may not have: what is
declared is asked for. Where torch finds none, `train` says so and whatever only scores goes on without."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
import yaml

from envs.small_talk import SmallTalk, write_logs
from pipelines import candidates, evaluate, prepare, train, tune
from rl_dialog.cluster.jobs import each
from rl_dialog.config import load_config
from rl_dialog.data.shards import load_manifest
from rl_dialog.errors import UserError

pytestmark = pytest.mark.slow
GIVEN = "CUDA_VISIBLE_DEVICES"  # which GPUs a process of Ray's was given
SMALL = ["--model.layers", "1", "--model.width", "16", "--max_steps", "2", "--report_to", "none", "--quiet"]
SWEEP = {
    "title": "tiny",
    "about": "Two weights.",
    "write_logs": {"dialogs": 60, "seed": 1},
    "prepare": "--vocab_size 400 --max_length 256",
    "start": "",
    "train": "--model.layers 1 --model.width 16 --max_steps 2 --env small_talk --env_episodes 2",
    "space": {"learning_rate": [0.001]},
    "evaluate": "--env small_talk --contexts 0 --episodes 2",
}


class Witness(SmallTalk):
    """A world that notes which GPUs the process has that plays in it."""

    def __init__(self) -> None:
        super().__init__()
        with open(os.environ["RL_DIALOG_WITNESS"], "a", encoding="utf-8") as file:
            file.write(os.environ.get(GIVEN, "") + "\n")


WITNESS = f"{__name__}:Witness"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with data and a policy."""
    folder = tmp_path_factory.mktemp("gpus")
    write_logs(folder / "logs.jsonl", dialogs=60, seed=1)
    data = ["--logs", str(folder / "logs.jsonl"), "--output_dir", str(folder / "data"), "--vocab_size", "400"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_DIALOG_WITNESS", str(folder / "seen"))
        ray.init(
            address="local", num_cpus=3, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20
        )
        prepare.main(load_config(prepare.PrepareConfig, [*data, "--quiet"]))
        train.train_worker(_training(folder, "policy", ["--device", "cpu"]))
        yield folder
        ray.shutdown()


def _training(folder: Path, name: str, more: list[str]) -> train.TrainConfig:
    where = ["--data", str(folder / "data"), "--output_dir", str(folder / name)]
    return load_config(train.TrainConfig, [*SMALL, *where, *more], choices=train.CHOICES)


def _seen(folder: Path) -> set[str]:
    """What the witnesses noted since the last call."""
    notes = folder / "seen"
    lines = set(notes.read_text(encoding="utf-8").split("\n")[:-1])
    notes.unlink()
    return lines


def test_train(made: Path) -> None:
    """A worker gets a GPU; where torch cannot use it, that is said once."""
    there = torch.cuda.is_available()
    useless = (
        nullcontext() if there else pytest.raises(UserError, match="gave this worker a GPU of .* --device")
    )
    with useless:
        train.main(_training(made, "measured", ["--env", WITNESS, "--env_episodes", "2"]))


def test_tune(made: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    out = tmp_path / "out"
    config = tune.TuneConfig(sweep=str(tmp_path / "sweep.yaml"), output_dir=str(out), max_failures=0)
    done = tune.main(config)["trials"]
    errors = "".join(path.read_text(encoding="utf-8") for path in out.rglob("error.txt"))
    assert done["ended"] if torch.cuda.is_available() else "gave this worker a GPU of" in errors


def test_candidates(made: Path, tmp_path: Path) -> None:
    config = candidates.CandidatesConfig(
        data=str(made / "data"), checkpoint=str(made / "policy"), output_dir=str(tmp_path / "out"),
        contexts=6, shard_contexts=2, max_new_tokens=2, quiet=True,
    )  # fmt: skip
    done = candidates.main(config)  # all GPUs: more generators than that would wait for ever
    assert done["generated_contexts"] == done["contexts"] > 6
    assert load_manifest(tmp_path / "out")["candidates"]["contexts"] == done["contexts"]


@pytest.mark.parametrize("how", [{"num_workers": 2}, {"side_by_side": True}], ids=["workers", "side by side"])
def test_evaluate(made: Path, tmp_path: Path, how: dict) -> None:
    config = evaluate.EvaluateConfig(
        checkpoints=(str(made / "policy"),), output_dir=str(tmp_path / "out"), env=WITNESS, episodes=4,
        max_new_tokens=2, quiet=True,
    )  # fmt: skip
    evaluate.main(replace(config, **how))
    assert _seen(made) & {"0", "1"}


def test_many_runs(made: Path) -> None:
    """`compare` trains so."""

    def given(_: int) -> str:
        return os.environ.get(GIVEN, "")

    assert {found for _, found in each(given, range(4), waiting=print, gpus=1)} <= {"0", "1"}
