"""The verb `prefer`: its modes, that a synchronous run can be repeated and resumed to the bit, and what it
refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from envs import vectors_of
from envs.gymnasium_vector import GymnasiumEnv
from pipelines import prefer
from pipelines.prefer import PreferConfig, main, resolved, suited
from rl_dialog.cluster.preference_plan import make_learner, plan_of
from rl_dialog.config import load_config, read_yaml, save_config
from rl_dialog.errors import UserError
from rl_dialog.models.control_policy import ControlPolicy
from rl_dialog.models.reward_model import RewardModel
from rl_dialog.preferences.frames import drawn_frames
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labelling import log_url
from rl_dialog.preferences.roles import Teacher
from rl_dialog.preferences.run_files import newest_version
from rl_dialog.preferences.segments import Segments
from rl_dialog.preferences.settings import ModelSettings, OracleSettings
from rl_dialog.training.policy_gradient import PPO

SMALL = PreferConfig(
    env_options="observations=position",
    labeller="oracle",
    synchronous=True,
    steps=1024,
    budget=40,
    initial_labels=20,
    first_epochs=5,
    num_envs=16,
    ppo=PPO(batch_size=256, minibatch_size=64, passes=2),
    save_every=4,
    eval_every=0,
    report_to="none",
    quiet=True,
)


def weights(out: Path, name="model.safetensors") -> bytes:
    return (out / (out / "latest").read_text() / name).read_bytes()


def planned(config, out: Path, **more):
    return plan_of(config, vectors_of(config.env, config.env_options), out, **more)


def test_a_tracker_is_told_no_password(tmp_path, monkeypatch):
    told = {}

    def learn(config, make_envs, out, logged, **how):
        told.update(labels=config.labels, settings=logged.keywords["settings"])
        return {}

    monkeypatch.setattr("rl_dialog.cluster.preference_modes.learn_from_labels", learn)
    url = "postgresql://ann:secret@host/labels"
    main(replace(SMALL, labels=url, output_dir=str(tmp_path / "run")))
    assert told["labels"] == url and "secret" not in json.dumps(told["settings"])


@pytest.mark.parametrize(
    "place", ["ann:secret@host/labels?sslmode=require", "ann@host/labels?password=secret"]
)
def test_no_password_is_written_and_the_log_is_found_again(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rl_dialog.cluster.preference_modes.learn_from_labels", lambda *run, **how: {})
    out = tmp_path / "run"
    config = replace(SMALL, labels=f"postgresql://{place}", output_dir=str(out))
    main(config)
    written = (out / "prefer.yaml").read_text()
    assert "secret" not in written and "***" not in written
    options = "?sslmode=require" if "sslmode" in place else ""
    assert log_url("", out, read_yaml(str(out / "prefer.yaml"))) == f"postgresql://ann@host/labels{options}"
    main(replace(config, resume=True))
    assert "going on with the labels" not in capsys.readouterr().err
    (out / "prefer.yaml").write_text((out / "prefer.yaml").read_text().replace("ann@", "ann:secret@"))
    main(replace(config, resume=True))  # of an earlier version, which kept it
    assert "secret" not in (out / "prefer.yaml").read_text() + capsys.readouterr().err


def labels_of(config: PreferConfig):
    log = LabelLog(resolved(config).labels, create=False)
    found = [
        (label.query, label.first, label.second, label.preference, label.reward_version)
        for label in log.labels()
    ]
    log.close()
    return found


def metrics_of(out: Path):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    config = replace(SMALL, output_dir=str(tmp_path_factory.mktemp("prefer") / "run"))
    return config, main(config)


def test_a_synchronous_run(once):
    config, result = once
    out = Path(config.output_dir)
    assert (
        result["steps"] == 1024
        and result["labels"] == 40
        and result["checkpoint"] == str(out / "checkpoint-1024")
    )
    lines = metrics_of(out)
    gathered = [line for line in lines if line["step"] == 0]
    assert gathered and all(line["pref/reward_version"] == 0 for line in gathered)
    assert [line["pref/reward_version"] for line in lines if line["step"]] == sorted(
        line["pref/reward_version"] for line in lines if line["step"]
    )
    assert lines[-1]["pref/labels"] == 40 and lines[-1]["train/entropy"] > 0
    assert all(
        (out / name).exists() for name in ("labels.db", "clips", "reward", "prefer.yaml", "status.json")
    )
    status = json.loads((out / "status.json").read_text())
    assert (
        status["over"]
        and status["steps"] == 1024
        and status["labels_wanted"] == 0
        and status["label_budget"] == 40
    )


@pytest.mark.slow
def test_the_same_settings_give_the_same_labels_losses_and_weights(once, tmp_path):
    config, _ = once
    again = replace(config, output_dir=str(tmp_path / "again"))
    main(again)
    assert labels_of(again) == labels_of(config)
    assert metrics_of(tmp_path / "again") == metrics_of(Path(config.output_dir))
    assert weights(tmp_path / "again") == weights(Path(config.output_dir))
    main(replace(config, output_dir=str(tmp_path / "other"), seed=1))
    assert weights(tmp_path / "other") != weights(Path(config.output_dir))


def test_a_resumed_run_ends_like_the_uninterrupted_one(tmp_path):
    """Stopped after a checkpoint and gone on with by new roles: the same labels, reward and policy."""
    from rl_dialog.cluster.preferences import run_in_turn

    def go(out, *stops):
        config = resolved(replace(SMALL, output_dir=str(out)))
        out.mkdir()
        for steps in stops:
            run_in_turn(replace(planned(config, out), steps=steps), out, lambda step, metrics: None)
        return config

    probe = go(tmp_path / "probe", 256)
    rounds = json.loads((tmp_path / "probe" / "checkpoint-256" / "trainer" / "progress.json").read_text())[
        "round"
    ]
    assert rounds % SMALL.save_every == 0, (
        "expected gathering to take so many rounds that the first 256 steps end at a checkpoint"
    )
    whole, parts = go(tmp_path / "whole", 2304), go(tmp_path / "parts", 1280, 2304)
    assert labels_of(parts) == labels_of(whole) != labels_of(probe)
    for name in ("model.safetensors", "trainer/policy.safetensors", "trainer/progress.json"):
        assert weights(tmp_path / "parts", name) == weights(tmp_path / "whole", name), name


def test_a_policy_that_learned_nothing_is_no_part_of_the_average(tmp_path):
    """A run that was stopped while labels were gathered: its first trained policy is the average, as it is in
    one that was not stopped."""

    def learner(out):
        config = resolved(replace(SMALL, output_dir=str(out), device="cpu"))
        return make_learner(config, vectors_of(config.env, config.env_options), out, learned=False)

    learner(tmp_path / "stopped").save()
    for out in (tmp_path / "stopped", tmp_path / "whole"):
        each = learner(out)
        each.step()
        each.save()
        assert weights(out) == weights(out, "trainer/current/model.safetensors")


@pytest.mark.slow
def test_the_policy_is_not_trained_before_there_is_a_reward(tmp_path):
    """gather keeps the policy as it was made; pretrain fits the reward to its labels; train takes both over,
    and waits for nothing."""
    config = replace(SMALL, output_dir=str(tmp_path / "run"), mode="gather")
    result = main(config)
    gathered = weights(tmp_path / "run")
    assert result["labels"] >= 20 and result["steps"] == 0 and "reward" not in result
    with pytest.raises(UserError, match="already holds a run of `prefer`: pass --resume"):
        main(replace(config, mode="pretrain"))
    config = replace(config, resume=True)
    taught = main(replace(config, mode="pretrain"))
    assert taught["reward"] == str(tmp_path / "run" / "reward" / "1") and taught["training_labels"] > 0
    assert weights(tmp_path / "run") == gathered
    trained = main(replace(config, mode="train"))
    assert trained["steps"] == 1024 and weights(tmp_path / "run") != gathered
    lines = metrics_of(tmp_path / "run")
    gathering = [line for line in lines if line["step"] == 0]
    assert lines[-1]["pref/gathered_steps"] == gathering[-1]["pref/gathered_steps"] > 0


@pytest.mark.slow
def test_an_asynchronous_run_and_the_same_command_again(tmp_path):
    """All labels are there when it is gone on with: nobody has anything new to say, and yet nobody may wait
    for anybody."""
    config = replace(SMALL, synchronous=False, output_dir=str(tmp_path / "run"), budget=20)
    first = main(config)
    assert first["steps"] >= 1024 and first["labels"] == 20
    again = main(replace(config, steps=4096, resume=True))
    assert again["steps"] >= 4096 and again["labels"] == 20
    lines = metrics_of(tmp_path / "run")
    assert lines[-1]["pref/reward_version"] >= 1
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


@pytest.mark.slow
def test_labels_and_rewards_of_another_run(once, tmp_path):
    """None given: labels are waited for. Labels: none, but the reward is fitted. A reward: neither."""
    source, _ = once
    first = {"labels": [], "reward": []}
    for name, more in (
        ("labels", {"labels_from": source.output_dir}),
        ("reward", {"reward_model": str(newest(Path(source.output_dir) / "reward"))}),
    ):
        config = replace(SMALL, output_dir=str(tmp_path / name), steps=256, **more)
        main(config)
        first[name] = metrics_of(tmp_path / name)
    assert (
        first["labels"][0]["pref/labels"] == 40 and first["labels"][0]["pref/gathered_steps"] <= 256
    )  # one round before it is fitted
    assert first["labels"][0]["pref/version"] == 1
    assert (
        first["reward"][0]["step"] == 256
        and first["reward"][0]["pref/gathered_steps"] == 0
        and first["reward"][0]["pref/reward_version"] == 1
    )


def test_a_teacher_that_is_made_again_tells_the_version_that_is_there(once):
    """There is nothing new to learn; without being told the learner would wait for a reward, and labellers
    for the learner."""
    config, _ = once
    out = Path(config.output_dir)
    teacher = planned(resolved(config), out).teacher()
    metrics, (version, model) = teacher.teach()
    assert metrics == {"version": version, "all_labels": 40} and str(version) == newest(out / "reward").name
    assert torch.equal(model.mean, load_file(newest(out / "reward") / "model.safetensors")["mean"])
    assert teacher.teach()[0] == {}


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: int(path.name))


@pytest.mark.slow
def test_the_true_reward(tmp_path):
    config = replace(
        SMALL, output_dir=str(tmp_path / "run"), mode="original-rewards", eval_every=512, eval_episodes=4
    )
    result = main(config)
    assert (
        result["steps"] == 1024
        and "labels" not in result
        and {"eval_return", "eval_return_sampled"} <= set(result)
    )
    begun = metrics_of(tmp_path / "run")
    assert "pref/labels" not in begun[-1]
    more = main(replace(config, steps=1536, resume=True))
    assert more["steps"] == 1536 and metrics_of(tmp_path / "run")[: len(begun)] == begun


def test_names_of_the_original(tmp_path):
    flags = (
        "--mode train_policy_with_preferences --synthetic_prefs --n_initial_prefs 7 --n_envs 3 --ent_coef "
        "0.02 --million_timesteps 0.15 --lr 0.1"
    )
    flags += (
        " --lr_zero_million_timesteps 0.2 --max_segs 9 --n_initial_epochs 5 --policy_ckpt_interval 6 "
        f"--log_dir {tmp_path}"
    )
    config = resolved(load_config(PreferConfig, flags.split(), suited=suited))
    assert (config.mode, config.labeller, config.initial_labels, config.num_envs, config.steps) == (
        "train",
        "oracle",
        7,
        3,
        150_000,
    )
    assert (config.ppo.entropy_coeff, config.ppo.learning_rate, config.ppo.lr_zero_steps) == (
        0.02,
        0.1,
        200_000,
    )
    assert (config.clips, config.first_epochs, config.save_every, config.output_dir) == (
        9,
        5,
        6,
        str(tmp_path),
    )
    a2c = resolved(
        load_config(PreferConfig, ["--algorithm", "a2c", "--lr", "0.5", "--output_dir", "x"], suited=suited)
    )
    assert a2c.a2c.learning_rate == 0.5 and a2c.a2c.passes == 1 and a2c.a2c.lr_zero_steps == 150_000


def test_settings_suit_the_environment_unless_they_are_given(tmp_path):
    def loaded(*flags):
        return resolved(load_config(PreferConfig, [*flags, "--output_dir", str(tmp_path)], suited=suited))

    dot, position, pong = loaded(), loaded("--env_options", "observations=position"), loaded("--env", "pong")
    assert (dot.ppo.gamma, position.ppo.gamma, pong.ppo.gamma) == (0.9, 0.5, 0.99)
    assert (dot.budget, position.budget, pong.budget) == (3000, 700, 5500) and (
        dot.model.dropout,
        pong.model.dropout,
    ) == (0.0, 0.5)
    usual = PPO()  # a flag that says what is usual elsewhere is a flag
    given = loaded(
        "--ppo.gamma",
        str(usual.gamma),
        "--ppo.lr_zero_steps",
        "0",
        "--model.dropout",
        "0",
        "--env",
        "pong",
        "--steps",
        "5",
    )
    assert (given.ppo.gamma, given.ppo.lr_zero_steps, given.model.dropout, given.ppo.clip) == (
        usual.gamma,
        0,
        0.0,
        0.1,
    )
    (tmp_path / "mine.yaml").write_text("env: pong\nppo: {gamma: 0.5}\nsteps: 7\n")
    file = loaded("--config", str(tmp_path / "mine.yaml"), "--ppo.clip", "0.3")
    assert (file.ppo.gamma, file.ppo.clip, file.ppo.lr_zero_steps, file.ppo.batch_size) == (0.5, 0.3, 7, 1024)
    assert dot == resolved(PreferConfig(output_dir=str(tmp_path), ppo=dot.ppo, a2c=dot.a2c))


def test_who_works_on_a_gpu(tmp_path):
    """Pictures, where there is one, unless told otherwise: half of it for the policy and half for the
    reward."""

    def share(gpus, **more):
        return planned(resolved(replace(SMALL, output_dir=str(tmp_path), **more)), tmp_path, gpus=gpus).gpus

    pixels = {"env_options": "observations=pixels"}
    assert [share(gpus, **pixels) for gpus in (0, 1, 2, 4)] == [0, 0.5, 1, 1]
    assert share(1) == 0 and share(1, device="cuda") == 0.5 and share(1, device="cpu", **pixels) == 0
    with pytest.raises(UserError, match="expected a GPU"):
        share(0, device="cuda")


def test_an_environment_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_dots.py").write_text(
        "from envs.moving_dot import MovingDotVector\n"
        "class Fast(MovingDotVector):\n    task = 'Be quick.'\n    clip_length = 10\n"
        "class Mute:\n    task = 'None.'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = main(replace(SMALL, env="my_dots:Fast", output_dir=str(tmp_path / "run")))
    assert result["labels"] == 40
    clip = Segments(tmp_path / "run" / "clips")[
        labels_of(replace(SMALL, output_dir=str(tmp_path / "run")))[0][1]
    ]
    assert len(clip.actions) == 10
    wrong = {
        "my_dots:Slow": "expected Slow in my_dots.py",
        "my_dots:Mute": "whose class has clip_length, frames",
        "no:Where": "got ModuleNotFound",
    }
    for name, message in wrong.items():
        with pytest.raises(UserError, match=message):
            main(replace(SMALL, env=name, output_dir=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"output_dir": ""}, "expected --output_dir"),
        ({"env": "moving_dots"}, "Did you mean moving_dot"),
        ({"env": "small_talk"}, "unsuitable env"),
        ({"env_options": "observations"}, "expected name=value"),
        ({"env_options": "observations={"}, "expected a YAML value for observations, got '{'"),
        ({"env_options": "max_steps=2026-13-45"}, "expected a YAML value for max_steps, got '2026-13-45'"),
        ({"env_options": "foo=1"}, "env_options of moving_dot: expected some of observations, .*'foo'"),
        ({"env_options": "max_steps=3,max_steps=4"}, "expected each option once, got max_steps again"),
        ({"env_options": "num_envs=3"}, "env_options of moving_dot: expected some of observations, "),
        ({"env": "enduro", "env_options": "game=pong"}, "of enduro: expected some of .*max_frames, .*'game'"),
        ({"env_options": "max_steps=abc"}, "moving_dot: expected int \\| None for max_steps, got 'abc'"),
        ({"env": "Pendulum-v1", "env_options": "frames=2.5"}, "expected int for frames, got 2.5"),
        ({"env": "Pendulum-v1", "env_options": "frame=2"}, "some of frames, .*, ends; .*'frame'"),
        ({"env": "Pendulum-v1", "env_options": "num_envs=2"}, "multiple values for argument 'num_envs'"),
        ({"env_options": "observations=words"}, "expected observations of pixels, features or position"),
        ({"labeller": "page"}, "expected --labeller oracle"),
        ({"steps": 0}, "--steps of at least 1"),
        ({"budget": 10, "initial_labels": 20}, "--initial_labels of at most --budget, which is 10, got 20"),
        ({"schedule_scale": 0}, "expected --schedule_scale above 0, got 0"),
        ({"oracle": OracleSettings(noise=1.5)}, "--oracle.noise: expected a share between 0 and 1, got 1.5"),
        ({"model": ModelSettings(scales=3)}, "--model.scales: expected 1 or 2, got 3"),
        ({"model": ModelSettings(hidden=(64, 0))}, "--model.hidden: expected sizes of at least 1"),
        ({"labels": "mysql://host/labels"}, "expected the URL of an SQLite or PostgreSQL store"),
        ({"labels_from": "nowhere"}, "expected the folder of a run"),
        ({"reward_model": "nowhere"}, "expected the description of a reward model"),
        ({"model_name_or_path": "nowhere"}, "expected the description of a control policy"),
    ],
)
def test_what_cannot_be(wrong, message, tmp_path):
    """It is told before --overwrite deletes an earlier run."""
    (tmp_path / "run").mkdir()
    for name in ("prefer.yaml", "labels.db"):
        (tmp_path / "run" / name).touch()
    with pytest.raises(UserError, match=message):
        main(replace(SMALL, **{"output_dir": str(tmp_path / "run"), "overwrite": True} | wrong))
    assert (tmp_path / "run" / "labels.db").is_file()


def test_without_labels_no_reward_is_fitted(tmp_path):
    with pytest.raises(UserError, match="expected labels to fit a reward to"):
        main(replace(SMALL, output_dir=str(tmp_path / "run"), mode="pretrain"))


def test_a_run_that_is_refused_makes_no_log_of_labels(once, tmp_path):
    """Of a name with a slip, where a run goes on with its own labels or those of another run."""
    config = replace(once[0], resume=True, labels=f"sqlite:///{tmp_path}/slip.db")
    with pytest.raises(UserError, match="expected labels to fit a reward to in sqlite:.*slip.db, found none"):
        main(replace(config, mode="pretrain"))
    began = prefer.RunFiles(config.output_dir).settings()
    assert prefer._takes_over(
        replace(config, labels_from="another"), {**began, "labels_from": "another"}
    )  # whose labels never came
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_go_on_keeps_its_settings(once, tmp_path):
    """Whoever then answers on `label --run` finds the labels that are there."""
    shutil.copytree(once[0].output_dir, tmp_path / "run")
    config = replace(once[0], output_dir=str(tmp_path / "run"), resume=True)
    before = (tmp_path / "run" / "prefer.yaml").read_text()
    with pytest.raises(UserError, match="expected a folder for the SQLite file"):
        main(replace(config, labels=f"sqlite:///{tmp_path}/nowhere/labels.db"))
    assert (tmp_path / "run" / "prefer.yaml").read_text() == before


def test_starts_of_another_world_are_refused_before_anything_is_deleted(once, tmp_path):
    """Labels, a reward and a policy of one of five actions, where these are two numbers; the folder of a run
    stands for what it has newest."""
    run = once[0].output_dir
    options = "observations=position,continuous=true"
    config = replace(SMALL, env_options=options, output_dir=str(tmp_path / "run"))
    for start, message in (
        ({"labels_from": run}, "expected clips with observations .* they are of another environment"),
        ({"reward_model": run}, f"{newest(Path(run) / 'reward')}: expected a reward model for observations"),
        ({"model_name_or_path": run}, f"{Path(run) / 'checkpoint-'}.*: expected a policy for"),
    ):
        with pytest.raises(UserError, match=message):
            main(replace(config, **start))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="--labels_from: expected another run than the one in --output_dir"):
        main(replace(once[0], overwrite=True, labels_from=run))
    assert (Path(run) / "labels.db").is_file()


def test_labels_that_had_not_come_when_a_run_was_killed_come_when_it_goes_on(once, tmp_path, monkeypatch):
    """A kill behind the settings and before the labels, and labels that are named later."""
    source, labels = once[0].output_dir, len(labels_of(once[0]))
    config = replace(SMALL, output_dir=str(tmp_path / "killed"), labels_from=source, mode="pretrain")
    with monkeypatch.context() as killed:
        killed.setattr("pipelines.prefer.take_over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(config)
    main(replace(config, resume=True))
    assert len(labels_of(config)) == labels
    later = replace(SMALL, output_dir=str(tmp_path / "later"), mode="gather")
    main(later)
    before = len(labels_of(later))
    main(replace(later, resume=True, mode="pretrain", labels_from=source))
    assert len(labels_of(later)) > before


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_run_is_gone_on_with_or_refused(once, capsys):
    config, _ = once
    with pytest.raises(UserError, match="pass --resume to go on with it or --overwrite to delete it"):
        main(config)
    config = replace(config, resume=True)
    with pytest.raises(UserError, match="made with other settings: --num_envs 16 then and 8 now"):
        main(replace(config, num_envs=8))
    assert (
        main(replace(config, budget=41, ppo=replace(config.ppo, entropy_coeff=0.02)))["labels"] == 40
    )  # nothing left to learn: nobody asks
    told = capsys.readouterr().err
    assert (
        "going on with --budget 41 instead of 40" in told
        and "--ppo entropy_coeff 0.02 instead of entropy_coeff 0.0" in told
    )


def test_every_environment_says_what_people_are_asked():
    for name in ("moving_dot",):
        envs = vectors_of(name).func
        assert envs.task.endswith(".") and envs.clip_length > 1


# Any environment of Gymnasium's

GYM = replace(
    SMALL, env="Pendulum-v1", env_options="", steps=800, num_envs=4, ppo=PPO(batch_size=400, passes=1)
)


def test_an_environment_of_gymnasiums(tmp_path):
    """Numbers that suit its horizon; flags of the environment are kept with its options, from where `play`
    takes them."""
    flags = "--env Pendulum-v1 --frames 2 --max_episode_steps 100 --labeller oracle --synchronous --steps 800"
    flags += " --budget 40 --initial_labels 20 --first_epochs 5 --ppo.batch_size 400 --ppo.passes 1 --quiet"
    given = [*flags.split(), "--report_to", "none", "--task", "Hold it up."]
    given += ["--output_dir", str(tmp_path / "run")]
    config = load_config(PreferConfig, given, suited=suited)
    result = main(config)
    assert result["labels"] == 40 and result["steps"] >= 800
    stored = read_yaml(str(tmp_path / "run" / "prefer.yaml"))
    assert stored["env_options"] == "frames=2,max_episode_steps=100" and stored["clip_length"] == 10
    assert stored["frames"] is None and stored["labels"] == ""
    assert stored["num_envs"] == 4 and stored["queries"]["task"] == "Hold it up."
    first = labels_of(config)[0][1]
    clip = Segments(tmp_path / "run" / "clips")[first]
    assert clip.observations.shape == (10, 6) and clip.pictures is None
    policy = ControlPolicy.from_pretrained(result["checkpoint"])
    assert policy.config.normalise_observations and policy.trunk.count > 800
    reward = RewardModel.from_pretrained(result["reward"])
    assert reward.config.action_limit == 1 and reward.observations is not None
    assert policy.config.scales == reward.config.scales == 2
    lines = metrics_of(tmp_path / "run")
    assert all(0 <= line["pref/confirmed"] <= 1 for line in lines if "pref/confirmed" in line)
    # Of the first sixty clips twenty are the beginnings of episodes, not those of the four alone.
    log = LabelLog(resolved(config).labels, create=False)
    asked = [label for label in log.labels() if label.reward_version == 0]
    ids = {id for label in asked for id in (label.first, label.second)}
    starts = [Segments(tmp_path / "run" / "clips")[id].source["start"] for id in ids]
    assert sum(start == 0 for start in starts) > 4


@pytest.mark.slow
def test_a_run_of_before_there_were_two_scales_is_refused_or_goes_on(tmp_path):
    """Its networks see one; told so, it goes on with them."""
    config = replace(GYM, output_dir=str(tmp_path / "run"), steps=400)
    model = replace(config.model, normalise_observations=True, scales=1)
    main(replace(config, model=model))
    path = tmp_path / "run" / "prefer.yaml"
    stored = read_yaml(str(path))
    del stored["model"]["scales"], stored["reward"]["even_ties"]
    path.write_text(yaml.safe_dump(stored))
    now = replace(config, steps=800, resume=True)
    with pytest.raises(UserError, match="--model scales 1 then and 2 now"):
        main(replace(now, model=replace(model, scales=2)))
    assert main(replace(now, model=model))["steps"] >= 800


DRAWN = """
import gymnasium
import numpy as np

class Ramp(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = gymnasium.spaces.Box(0, 100, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.n += 1
        return np.array([self.n], np.float32), float(action), False, self.n == 50, {}

    def render(self):
        return np.full((8, 8, 3), self.n, np.uint8)
"""


def test_clips_for_people_hold_what_render_draws(tmp_path, monkeypatch):
    (tmp_path / "drawn_worlds.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = replace(GYM, env="drawn_worlds:Ramp", synchronous=False, labeller="none", initial_labels=2)
    run = resolved(replace(config, output_dir=str(tmp_path)))
    plan = planned(run, tmp_path)
    learner = plan.learner()
    _, clips = learner.step()
    assert clips and all(clip.pictures.shape[0] == 10 and clip.pictures.shape[3] == 3 for clip in clips)
    assert {clip.source["episode"].split("-")[2] for clip in clips} == {"0"}  # one of four is drawn
    segments = Segments(tmp_path / "clips")
    again = segments[segments.add(clips[0])]
    drawn = drawn_frames(again, GymnasiumEnv(config.env).draw)
    assert drawn.shape[1:] == (8, 8, 3)
    np.testing.assert_array_equal(drawn[:, 0, 0, 0], again.observations[: again.steps, 0])


@pytest.mark.parametrize("mode", ["train", "train_policy_with_preferences"])
def test_a_world_that_people_could_not_see_is_refused_before_it_begins(mode, tmp_path, monkeypatch):
    """In the original's words too; the oracle needs to see nothing."""
    (tmp_path / "dark_worlds.py").write_text(DRAWN.replace('"rgb_array"', ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = replace(GYM, env="dark_worlds:Ramp", output_dir=str(tmp_path), mode=mode)
    with pytest.raises(UserError, match="rgb_array"):
        resolved(replace(config, labeller="page"))
    assert resolved(replace(config, synthetic_prefs=True, labeller="page")).labeller == "oracle"


@pytest.mark.parametrize(
    ("render", "message"),
    [
        ("", "got that mode and no method `render`: give it one, or let the true reward answer"),
        ("raise RuntimeError('no display')", r"got RuntimeError from its `render` \(no display\)"),
        ("return None", r"expected render\(\) to give bytes \(height, width, 3\), got NoneType"),
        ("return np.zeros((8, 8, 3))", r"got \(8, 8, 3\) of float64"),
    ],
)
def test_a_world_that_says_it_draws_and_does_not_is_refused_before_it_begins(
    render, message, tmp_path, monkeypatch
):
    name = f"blank_worlds_{abs(hash(render))}"
    source = DRAWN[: DRAWN.index("    def render")]
    source += f"    def render(self):\n        {render}\n" if render else ""
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = replace(GYM, env=f"{name}:Ramp", output_dir=str(tmp_path / "run"), labeller="page")
    with pytest.raises(UserError, match=message):
        main(replace(config, synchronous=False))
    assert not (tmp_path / "run").exists()


SHAPED = """
import gymnasium
from gymnasium import spaces

class World(gymnasium.Env):
    {spaces}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return self.observation_space.sample(), {{}}

    def step(self, action):
        self.n += 1
        return self.observation_space.sample(), 0.0, self.n > {end}, False, {{}}
"""
NUMBERS, TWO = "observation_space = spaces.Box(0, 1, (2,))", "action_space = spaces.Discrete(2)"
MIXED = "spaces.Dict({'a': spaces.Box(0, 1, (2,)), 'b': spaces.Discrete(3)})"


@pytest.mark.parametrize(
    ("given", "end", "message"),
    [
        (f"observation_space = {MIXED}; {TWO}", "9", "observations that are numbers or pictures, got Dict"),
        (f"{NUMBERS}; action_space = {MIXED}", "9", "actions that are Discrete or a Box .*, got Dict"),
        (f"{NUMBERS}; action_space = spaces.MultiDiscrete([3, 3])", "9", "got MultiDiscrete"),
        (TWO, "9", "expected an environment that says its observation_space"),
        (NUMBERS, "9", "expected an environment that says its action_space"),
        (
            f"{NUMBERS}; {TWO}",
            "9 + self.np_random.integers(9)",
            "episodes of one length, got .*--ends absorb",
        ),
        (f"{NUMBERS}; {TWO}", "10**6", "say how many steps by --max_episode_steps"),
    ],
)
def test_worlds_that_no_policy_understands(given, end, message, tmp_path, monkeypatch):
    name = f"shaped_worlds_{abs(hash((given, end)))}"
    (tmp_path / f"{name}.py").write_text(SHAPED.format(spaces=given, end=end))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=message):
        main(replace(GYM, env=f"{name}:World", output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_what_suits_worlds_that_nobody_has_seen(tmp_path):
    """MovingDot's numbers are MovingDot's alone; the horizon gives clips and environments."""
    given = {"env_options": "", "num_envs": None, "output_dir": str(tmp_path), "ppo": PPO()}
    run = resolved(replace(SMALL, env="Pendulum-v1", **given))
    assert (run.clip_length, run.num_envs, run.averaging) == (20, 10, 0.9)
    run = resolved(replace(SMALL, env="CartPole-v1", ends="absorb", **given))
    assert (run.clip_length, run.num_envs, run.env_options) == (25, 4, "ends=absorb,absorbed_steps=25")
    began = "{clip_length: 50, aligned_clips: 0.5, normalise_observations: true, env_options: ends=absorb}"
    (tmp_path / "prefer.yaml").write_text(began)
    for ends in ("absorb", "hold"):
        run = resolved(replace(SMALL, env="CartPole-v1", ends=ends, resume=True, **given))
        assert run.clip_length == 50  # what the run that it goes on with had by default
        assert run.env_options == "ends=hold"  # what absorb did then
    run = resolved(replace(SMALL, env="moving_dot", **given))
    assert (run.clip_length, run.num_envs, run.averaging, run.eval_episodes) == (25, 32, 0.97, 100)
    assert not run.normalise_observations
    dots = PreferConfig(env="moving_dot", env_options="observations=pixels", output_dir=str(tmp_path))
    assert suited(dots)["model"]["coordinates"]
    assert not suited(replace(dots, resume=True))["model"]["coordinates"]  # which that version had not
    for env, gamma in (("Pendulum-v1", 0.99), ("moving_dot", 0.9)):
        assert suited(PreferConfig(env=env))["ppo"]["gamma"] == gamma


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"env": "Pendulam-v1"}, "Did you mean Pendulum-v1"),
        ({"env": "CartPole-v1"}, "may end before their 500 steps"),
        ({"ends": "absorb", "env": "moving_dot"}, "--ends: expected an environment of Gymnasium's, got mov"),
        ({"clip_length": 0}, "--clip_length of at least 1"),
        ({"aligned_clips": 2.0}, "--aligned_clips between 0 and 1"),
    ],
)
def test_what_cannot_be_in_any_environment(wrong, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main(replace(GYM, **{"output_dir": str(tmp_path / "run")} | wrong))
    assert not (tmp_path / "run").exists()


# A run that is copied, stopped, or gone on with


@pytest.mark.slow
def test_a_copied_run_writes_its_labels_into_itself(once, tmp_path):
    config, _ = once
    copy = tmp_path / "copy"
    shutil.copytree(config.output_dir, copy)
    main(replace(config, output_dir=str(copy), resume=True, budget=60, steps=2048))
    assert len(labels_of(replace(config, output_dir=str(copy)))) == 60 and len(labels_of(config)) == 40
    shutil.move(copy, tmp_path / "moved")
    new = replace(config, output_dir=str(tmp_path / "new"), labels_from=str(tmp_path / "moved"))
    taken = main(replace(new, budget=60))
    assert taken["labels"] == 60


def test_a_run_that_goes_on_has_a_reward_from_its_first_step_on(once, tmp_path):
    """Before the teacher has said anything."""
    config, result = once
    shutil.copytree(config.output_dir, tmp_path / "run")
    run = resolved(replace(config, output_dir=str(tmp_path / "run"), steps=2048))
    learner = planned(run, tmp_path / "run").learner()
    assert learner.reward.version == int(Path(result["reward"]).name)
    steps = learner.steps
    learner.step(None)
    progress = json.loads(weights(Path(config.output_dir), "trainer/progress.json"))
    assert learner.steps > steps and learner.gathered == progress["gathered"]


@pytest.mark.parametrize(("confirm", "least", "pace"), [(True, 0, 0), (True, 0.2, 0.2), (False, 0, 1)])
def test_a_reward_that_nothing_confirmed_is_followed_unless_told(once, tmp_path, confirm, least, pace):
    """Also by a run that goes on with it."""
    config, result = once
    shutil.copytree(config.output_dir, tmp_path / "run")
    reward = RewardModel.from_pretrained(result["reward"])
    reward.confirmed.fill_(0)
    version = int(Path(result["reward"]).name)
    reward.save_pretrained(tmp_path / "run" / "reward" / str(version), version=version)
    more: dict = {"output_dir": str(tmp_path / "run")}
    more["reward"] = replace(config.reward, confirm=confirm, least_pace=least)
    learner = planned(resolved(replace(config, **more)), tmp_path / "run").learner()
    assert learner.trainer.learner.pace == pace


@pytest.mark.slow
def test_metrics_stay_when_a_run_goes_on_from_its_beginning(tmp_path):
    config = replace(SMALL, output_dir=str(tmp_path / "run"), mode="gather")
    main(config)
    gathered = metrics_of(tmp_path / "run")
    main(replace(config, resume=True, mode="train"))
    assert gathered and metrics_of(tmp_path / "run")[: len(gathered)] == gathered


@pytest.mark.slow
def test_what_was_gathered_asynchronously_may_go_on_in_turn(tmp_path):
    config = replace(SMALL, output_dir=str(tmp_path / "run"), mode="gather")
    main(config)
    path = tmp_path / "run" / "prefer.yaml"
    path.write_text(path.read_text().replace("synchronous: true", "synchronous: false"))
    assert main(replace(config, mode="train", resume=True))["steps"] == 1024


LATER = ("clip_length", "normalise_observations", "aligned_clips", "frames", "max_episode_steps", "ends")


def as_earlier(out: Path, **more):
    """The settings in the folder as a version wrote them that had no names for what came later."""
    stored = {name: value for name, value in read_yaml(str(out / "prefer.yaml")).items() if name not in LATER}
    del stored["model"]["normalise_observations"], stored["reward"]["confirm"]
    (out / "prefer.yaml").write_text(yaml.safe_dump(stored | more))


def test_a_run_of_an_earlier_version_goes_on(once, tmp_path, capsys):
    config, _ = once
    shutil.copytree(config.output_dir, tmp_path / "run")
    as_earlier(tmp_path / "run")
    config = replace(config, output_dir=str(tmp_path / "run"), resume=True)
    with pytest.raises(UserError, match="--clip_length 25 then and 24 now"):
        main(replace(config, clip_length=24))
    assert main(config)["steps"] == 1024
    told = capsys.readouterr().err
    assert not any(name in told for name in ("clip_length", "normalise", "confirm"))


@pytest.mark.slow
def test_the_label_log_of_an_earlier_version_is_the_folders_own(once, tmp_path, capsys):
    """It named the place where labels.db was when the run began: in a copy, another one's, and where the
    folder was moved, none."""
    config, _ = once
    there = f"sqlite:///{config.output_dir}/labels.db"
    shutil.copytree(config.output_dir, tmp_path / "copy")
    shutil.copytree(config.output_dir, tmp_path / "moved")
    for name, labels in (("copy", there), ("moved", "sqlite:////gone/labels.db")):
        as_earlier(tmp_path / name, labels=labels)
        settings = read_yaml(str(tmp_path / name / "prefer.yaml"))
        assert log_url("", tmp_path / name, settings) == f"sqlite:///{tmp_path / name}/labels.db"
        taken = replace(config, output_dir=str(tmp_path / f"from_{name}"), labels_from=str(tmp_path / name))
        assert main(replace(taken, steps=256))["labels"] >= 40
        more = {"output_dir": str(tmp_path / name), "resume": True, "budget": 60, "steps": 2048}
        assert main(replace(config, **more))["labels"] == 60
    assert len(labels_of(config)) == 40
    told = capsys.readouterr().err
    assert "going on with --budget 60 instead of" in told and "sqlite" not in told


@pytest.mark.slow
def test_another_label_log_is_told_by_its_place(once, tmp_path, capsys):
    config, _ = once
    run = tmp_path / "run"
    shutil.copytree(config.output_dir, run)
    config = replace(config, output_dir=str(run), resume=True)
    other = f"sqlite:///{tmp_path}/others.db"
    main(replace(config, labels=other, labels_from=""))
    assert f"the labels of {other} instead of sqlite:///{run}/labels.db" in capsys.readouterr().err
    main(config)
    assert f"the labels of sqlite:///{run}/labels.db instead of {other}" in capsys.readouterr().err


def test_a_world_of_ones_own_goes_on_with_what_an_earlier_version_took(tmp_path, monkeypatch):
    (tmp_path / "old_dots.py").write_text(
        "from envs.moving_dot import MovingDotVector\n"
        "class Fast(MovingDotVector):\n    clip_length, horizon = 10, 200\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = replace(SMALL, env="old_dots:Fast", output_dir=str(tmp_path), num_envs=None)
    assert resolved(config).clip_length == 20 and suited(config)["model"]["normalise_observations"]
    save_config(config, tmp_path / "prefer.yaml")
    as_earlier(tmp_path, num_envs=32)
    config = replace(config, resume=True)
    run = resolved(config)
    assert (run.clip_length, run.num_envs, run.normalise_observations) == (10, 32, False)
    assert not suited(config)["model"]["normalise_observations"]
    save_config(run, tmp_path / "prefer.yaml")  # and again, when the file has all names
    assert resolved(config) == run and not suited(config)["model"]["normalise_observations"]
    save_config(resolved(replace(config, resume=False)), tmp_path / "prefer.yaml")
    assert resolved(config).clip_length == 20 and suited(config)["model"]["normalise_observations"]


def test_a_fit_of_the_reward_ends_at_the_first_ctrl_c(once, tmp_path, monkeypatch):
    """It saves what it has only when it is done."""
    step = Teacher.step
    monkeypatch.setattr(Teacher, "step", lambda teacher: signal.raise_signal(signal.SIGINT) or step(teacher))
    config = replace(SMALL, output_dir=str(tmp_path / "run"), labels_from=once[0].output_dir, mode="pretrain")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    with pytest.raises(KeyboardInterrupt):
        main(config)
    signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert not newest_version(tmp_path / "run" / "reward")
    assert main(replace(config, resume=True))["training_labels"] > 0


@pytest.mark.slow
def test_ctrl_c_saves_what_is_learned_and_says_how_to_go_on(tmp_path):
    """A real process: stopped in the middle, its steps are there, and the same command goes on with them."""
    flags = "--env moving_dot --env_options observations=position --labeller oracle --synchronous"
    more = "--budget 40 --initial_labels 20 --first_epochs 5 --num_envs 16 --ppo.batch_size 256"
    more += " --save_every 1000 --report_to none"
    command = [sys.executable, "-m", "pipelines.prefer", *flags.split(), *more.split(), "--steps", "1000000"]
    command += ["--output_dir", str(tmp_path / "run")]
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=root, env=os.environ, **pipes)
    for line in process.stdout:
        if line.startswith("step ") and not line.startswith("step 0:"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "saving what is learned" in errors and "steps are saved. The same command with --resume" in errors
    steps = int((tmp_path / "run" / "latest").read_text().rpartition("-")[2])
    assert 0 < steps < 1_000_000 and metrics_of(tmp_path / "run")[-1]["step"] == steps
