"""The verb `prefer`: its modes, that a synchronous run can be repeated and resumed to the bit, and what it
refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from envs import vectors_of
from pipelines.prefer import PreferConfig, main, resolved, suited
from rl_dialog.cluster.preference_plan import plan_of
from rl_dialog.config import load_config
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.segments import Segments
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
    assert (
        metrics_of(tmp_path / "run")[-1]["pref/gathered_steps"]
        == metrics_of(tmp_path / "run")[0]["pref/gathered_steps"]
    )


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
        ({"env_options": "observations=words"}, "expected observations of pixels, features or position"),
        ({"labeller": "page"}, "expected --labeller oracle"),
        ({"steps": 0}, "--steps of at least 1"),
        ({"budget": 10, "initial_labels": 20}, "initial"),
        ({"mode": "pretrain"}, "expected labels to fit a reward to"),
        ({"labels_from": "nowhere"}, "expected the folder of a run"),
    ],
)
def test_what_cannot_be(wrong, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main(replace(SMALL, **{"output_dir": str(tmp_path / "run")} | wrong))


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
