"""`simulate` as a user runs it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from envs.multiwoz import Options
from pipelines.simulate import SimulateConfig, main
from rl_dialog.cluster.data import connect
from rl_dialog.config import load_config, save_config
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError
from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig
from rl_dialog.training.imitation import Imitation
from rl_dialog.training.policy_gradient import PPO

DATA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[2] / "../shared/data")) / "multiwoz"


def simulate(*arguments, hash_seed="0"):
    command = [sys.executable, "-m", "pipelines.simulate", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.slow
def test_the_rule_policy_in_the_generated_town(tmp_path):
    """The last line of stdout is JSON and agrees with the files."""
    done = simulate("--policy", "rule", "--episodes", 50, "--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr
    headline = json.loads(done.stdout.splitlines()[-1])
    assert (
        headline["episodes"] == 50
        and headline["success"] > 0.8
        and {"complete", "book_rate", "inform_f1", "turns", "return"} <= headline.keys()
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert (
        results["figures"]["success"]["value"] == headline["success"]
        and results["transcripts"] == headline["transcripts"]
    )
    dialogs = list(read_jsonl(tmp_path / "dialogs.jsonl"))
    assert (
        len(dialogs) == 50
        and sum(dialog.meta["outcome"]["success"] for dialog in dialogs) / 50 == headline["success"]
    )
    turns = sum(len(dialog.replies) for dialog in dialogs) / 50
    assert turns == headline["turns"]
    other = simulate(
        "--episodes", 50, "--output_dir", tmp_path.parent / f"{tmp_path.name}-other", "--quiet", hash_seed="1"
    )  # the order of Python's sets is another one there
    assert (
        len(other.stdout.splitlines()) == 1
        and json.loads(other.stdout)["transcripts"] == headline["transcripts"]
    )
    again = load_config(SimulateConfig, ["--config", str(tmp_path / "simulate.yaml")])
    with pytest.raises(
        UserError,
        match="already holds a run of `simulate`: pass --resume to go on with it or --overwrite to delete it",
    ):
        main(again)
    assert main(replace(again, overwrite=True))["transcripts"] == headline["transcripts"]


def test_the_number_stepped_together_changes_nothing(tmp_path):
    config = SimulateConfig(episodes=30, output_dir=str(tmp_path), quiet=True, overwrite=True)
    first = main(config)
    assert first["transcripts"] == main(replace(config, together=3))["transcripts"]
    assert main(replace(config, seed=1))["transcripts"] != first["transcripts"]


def test_the_original_with_exceptions(tmp_path):
    config = SimulateConfig(
        episodes=20, output_dir=str(tmp_path), quiet=True, original=True, options=Options(reward="user")
    )
    rewards = {
        message["reward"]
        for dialog in (main(config), read_jsonl(tmp_path / "dialogs.jsonl"))[1]
        for message in dialog.messages[1::2]
    }
    assert rewards <= {-1, 80, -40}  # not the 40 and 5 of the original
    per_turn = SimulateConfig(
        episodes=20, output_dir=str(tmp_path), quiet=True, original=True, overwrite=True
    )
    assert main(per_turn)["return"] < 80 and 40 in {
        m["reward"] for dialog in read_jsonl(tmp_path / "dialogs.jsonl") for m in dialog.messages[1::2]
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected --output_dir"),
        (["--output_dir", "x", "--episodes", "0"], "expected --episodes of at least 1, got 0"),
        (
            ["--output_dir", "x", "--world", "nowhere"],
            "nowhere: expected a folder with world files, found nothing",
        ),
        (["--output_dir", "x", "--episode", "3"], "Did you mean --episodes"),
        (["--output_dir", "x", "--epoch", "3"], "--epochs: the rule policy is not trained"),
        (["--output_dir", "x", "--policy", "mle", "--resume"], "--resume: imitation is not resumed"),
        (
            ["--output_dir", "x", "--policy", "ppo", "--batchsz", "0"],
            "expected --batch_size of at least 1, got 0",
        ),
        (
            ["--output_dir", "x", "--policy", "mle", "--epochs", "0"],
            "expected --model_name_or_path, the folder of a task policy",
        ),
        (["--output_dir", "x", "--policy", "ppo", "--model_name_or_path", "nowhere"], "found no config.json"),
        (["--output_dir", "x", "--demonstrations", "y"], "expected a policy that learns from them, got rule"),
        (
            ["--output_dir", "x", "--policy", "ppo", "--demonstrations", "y", "--model_name_or_path", "z"],
            "from them, got ppo that starts from --model_name_or_path; leave this out",
        ),
        (
            ["--output_dir", "x", "--policy", "mle", "--demonstrations", "nowhere.json"],
            "nowhere.json: expected dialogs of MultiWOZ",
        ),
    ],
)
def test_mistakes_are_explained(arguments, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, OSError), match=told.replace("(", r"\(")):
        main(load_config(SimulateConfig, arguments))


def test_the_originals_flags_are_understood():
    config = load_config(
        SimulateConfig, ["--policy", "ppo", "--batchsz", "1024", "--epoch=200", "--process_num", "8"]
    )
    assert (config.batch_size, config.epochs, config.num_workers, config.method.batch_size) == (
        1024,
        200,
        8,
        1024,
    )
    assert load_config(SimulateConfig, ["--policy", "ppo", "--ppo.clip", "0.1"]).method == PPO(clip=0.1)
    assert (
        load_config(SimulateConfig, ["--policy", "ppo", "--batchsz", "64"]).method.minibatch_size == 64
    )  # never more than the batch


def test_imitation_of_the_rule_policy_in_the_generated_town(tmp_path):
    """It learns something, writes a checkpoint, and the checkpoint plays the same conversations again."""
    run = [
        "--policy",
        "mle",
        "--mle.batch_size",
        "16",
        "--epochs",
        "8",
        "--rule_episodes",
        "300",
        "--eval_episodes",
        "40",
        "--episodes",
        "40",
    ]
    found = main(load_config(SimulateConfig, [*run, "--output_dir", str(tmp_path / "mle"), "--quiet"]))
    assert found["success"] > 0.2 and found["turns"] < 20
    lines = [json.loads(line) for line in (tmp_path / "mle" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9)) and lines[-1]["train/loss"] < lines[0][
        "train/loss"
    ]
    assert list((tmp_path / "mle" / "tensorboard").iterdir())
    again = [
        "--policy",
        "mle",
        "--model_name_or_path",
        str(tmp_path / "mle"),
        "--epochs",
        "0",
        "--episodes",
        "40",
        "--together",
        "7",
    ]
    other = main(load_config(SimulateConfig, [*again, "--output_dir", str(tmp_path / "again"), "--quiet"]))
    assert other["transcripts"] == found["transcripts"] and other["checkpoint"] == found["checkpoint"]
    assert not (tmp_path / "again" / "best").exists()  # nothing was trained there


def test_a_policy_of_another_world_is_refused(tmp_path):
    ActPolicy(ActPolicyConfig(340, 209)).save_pretrained(tmp_path / "other")
    config = SimulateConfig(
        policy="ppo",
        model_name_or_path=str(tmp_path / "other"),
        epochs=0,
        output_dir=str(tmp_path / "out"),
        quiet=True,
    )
    with pytest.raises(UserError, match="it was trained in another world"):
        main(config)


@pytest.mark.parametrize("wrong", [{"model_name_or_path": "nowhere"}, {"demonstrations": "nowhere.json"}])
def test_an_earlier_run_stays_where_the_command_is_refused(wrong, tmp_path):
    for name in ("simulate.yaml", "results.json"):
        (tmp_path / name).touch()
    how = {"policy": "ppo", "output_dir": str(tmp_path), "overwrite": True, "quiet": True}
    with pytest.raises(UserError, match="nowhere"):
        main(SimulateConfig(**how | wrong))
    assert (tmp_path / "results.json").is_file()


def test_a_run_that_cannot_be_resumed_keeps_its_settings(tmp_path):
    config = SimulateConfig(policy="ppo", epochs=3, output_dir=str(tmp_path), quiet=True)
    save_config(config, tmp_path / "simulate.yaml")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "latest").write_text("checkpoint-3")
    before = (tmp_path / "simulate.yaml").read_text()
    with pytest.raises(UserError, match="expected the state of a run to resume, found no such file"):
        main(replace(config, epochs=6, resume=True))
    assert (tmp_path / "simulate.yaml").read_text() == before


@pytest.fixture
def running():
    """One Ray for all runs of a test."""
    with connect(num_cpus=2):
        yield


@pytest.mark.slow
def test_ppo_learns_and_a_resumed_run_is_the_uninterrupted_one(running, tmp_path, capsys):
    """From a clone of the rule policy, on 200 held-out goals, with two workers. Learning: the gains of single
    goals, signs flipped at random, have so large a mean in less than 1 of 100 flips. Resuming: six epochs,
    and three and three, end with the same weights."""
    start = SimulateConfig(
        policy="mle",
        mle=Imitation(epochs=6),
        rule_episodes=300,
        eval_episodes=100,
        episodes=200,
        output_dir=str(tmp_path / "start"),
        quiet=True,
    )
    before = main(start)
    more = {
        "policy": "ppo",
        "model_name_or_path": before["checkpoint"],
        "num_workers": 2,
        "eval_every": 3,
        "eval_episodes": 100,
        "episodes": 200,
        "quiet": True,
    }
    whole = main(SimulateConfig(**more, epochs=6, output_dir=str(tmp_path / "whole")))
    gains = np.array(successes(tmp_path / "whole"), float) - np.array(successes(tmp_path / "start"), float)
    signs = np.random.default_rng(0).choice([-1, 1], (2000, len(gains)))
    assert ((signs * gains).mean(1) >= gains.mean()).mean() < 0.01, (before["success"], whole["success"])
    main(SimulateConfig(**more, epochs=3, output_dir=str(tmp_path / "halves")))
    halves = main(SimulateConfig(**more, epochs=6, output_dir=str(tmp_path / "halves"), resume=True))
    assert halves["transcripts"] == whole["transcripts"]
    ends = [load_file(tmp_path / name / "checkpoint-6" / "model.safetensors") for name in ("whole", "halves")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    lines = (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(7))
    shorter = main(
        SimulateConfig(**more | {"quiet": False}, epochs=3, output_dir=str(tmp_path / "halves"), resume=True)
    )
    assert shorter["transcripts"] == whole["transcripts"]
    assert "nothing is trained: the run has 6 epochs already, --epochs is 3" in capsys.readouterr().err
    with pytest.raises(UserError, match="was made with other settings: --train_seed 0 then and 1 now"):
        main(SimulateConfig(**more, epochs=6, output_dir=str(tmp_path / "halves"), resume=True, train_seed=1))
    with pytest.raises(
        UserError,
        match="was made with other settings: --num_envs 64 then and 32 now; --eval_every 3 then and 2 now",
    ):
        main(
            SimulateConfig(
                **more | {"eval_every": 2},
                epochs=6,
                output_dir=str(tmp_path / "halves"),
                resume=True,
                num_envs=32,
            )
        )


def successes(folder):
    return [dialog.meta["outcome"]["success"] for dialog in read_jsonl(folder / "dialogs.jsonl")]


@pytest.mark.parametrize("policy", ["pg", "gdpl", pytest.param("appo", marks=pytest.mark.slow)])
def test_the_other_methods_run_to_the_end(policy, tmp_path):
    """And change the policy they start from, and log how."""
    config = SimulateConfig(
        policy=policy,
        mle=Imitation(epochs=1),
        rule_episodes=60,
        eval_every=2,
        eval_episodes=20,
        episodes=20,
        epochs=2,
    )
    workers = int(policy == "appo")  # the others need none, and ppo above has two
    found = main(
        replace(
            config, batch_size=256, num_envs=16, num_workers=workers, output_dir=str(tmp_path), quiet=True
        )
    )
    assert found["episodes"] == 20 and found["train_seconds"] > 0
    ends = [
        load_file(path / "model.safetensors")
        for path in (tmp_path / "imitation" / "checkpoint-1", tmp_path / "checkpoint-2")
    ]
    assert any(not torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {
        "train/policy_loss",
        "train/entropy",
        "train/success",
        "train/steps",
        "eval/success",
    } <= last.keys()
    assert policy != "gdpl" or {"train/discriminator_loss", "train/learned_reward"} <= last.keys()


@pytest.mark.slow
@pytest.mark.realdata
def test_the_published_world(tmp_path):
    """The command of the README, shorter."""
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    found = main(SimulateConfig(world=str(DATA), output_dir=str(tmp_path), quiet=True))
    assert found["success"] == pytest.approx(0.973, abs=0.010) and found["complete"] == pytest.approx(
        0.982, abs=0.010
    )
    assert found["book_rate"] == pytest.approx(0.99, abs=0.01) and found["inform_f1"] == pytest.approx(
        0.90, abs=0.015
    )
    assert found["turns"] == pytest.approx(4.34, abs=0.2)
