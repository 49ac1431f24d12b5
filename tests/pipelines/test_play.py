"""The verb `play`: its films and figures are those of the environment and of the reward model, and what it
refuses."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from envs import control_env
from pipelines import prefer
from pipelines.play import PlayConfig, main
from pipelines.prefer import PreferConfig
from rl_dialog.errors import UserError
from rl_dialog.evaluation.control_episodes import ControlEpisode, correlation, headline, play_control
from rl_dialog.models.control_policy import ControlPolicy, shape_of
from rl_dialog.models.reward_model import RewardModel, RewardModelConfig
from rl_dialog.preferences.run_files import find_checkpoint
from rl_dialog.training.policy_gradient import PPO

RUN = PreferConfig(
    env_options="observations=position,max_steps=120",
    labeller="oracle",
    synchronous=True,
    steps=1024,
    budget=20,
    initial_labels=8,
    first_epochs=2,
    epochs=1,
    num_envs=8,
    ppo=PPO(batch_size=256, minibatch_size=64, passes=1),
    save_every=2,
    eval_every=0,
    report_to="none",
    quiet=True,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("play") / "run"
    prefer.main(replace(RUN, output_dir=str(out)))
    return out


def playing(run: Path, **more) -> PlayConfig:
    return PlayConfig(
        **{"checkpoint": str(run), "episodes": 5, "films": 1, "seed": 3, "quiet": True, "overwrite": True}
        | more
    )


def by_hand(policy: ControlPolicy, episodes: int, seed: int, *, max_steps: int = 120):
    """Each episode by itself: observations, actions and rewards of environment i alone, stepped without any
    of the code under test."""
    envs = control_env("moving_dot")(episodes, observations="position", max_steps=max_steps)
    seen, _ = envs.reset(seed=seed)
    rows = []
    for _ in range(max_steps // 4):
        actions = policy.act(seen)
        after, rewards, _, ended, _ = envs.step(actions)
        rows.append((seen, actions, rewards))
        seen = after
    assert ended.all()
    return [np.stack(column, 1) for column in zip(*rows, strict=True)]  # (episodes, steps, ...)


def test_figures_and_records_are_those_of_the_environment_and_of_the_reward_model(run):
    result = main(playing(run, films=0))
    checkpoint, reward = Path(result["checkpoint"]), RewardModel.from_pretrained(result["reward"])
    assert (
        checkpoint == run / (run / "latest").read_text()
        and Path(result["output_dir"]) == run / "play" / checkpoint.name
    )
    assert Path(result["reward"]).name == str(max(int(each.name) for each in (run / "reward").iterdir()))
    seen, actions, rewards = by_hand(ControlPolicy.from_pretrained(checkpoint), 5, 3)
    assert result["return"] == pytest.approx(rewards.sum(1).mean(), abs=1e-3) and result["steps"] == 150
    low, high = result["return_interval"]
    assert low <= result["return"] <= high
    predicted = reward.predict(seen.reshape(150, 2), actions.reshape(150)).reshape(5, 30)
    assert result["predicted_return"] == pytest.approx(predicted.sum(1).mean(), abs=1e-3)
    assert result["step_correlation"] == pytest.approx(
        np.corrcoef(rewards.ravel(), predicted.ravel())[0, 1], abs=1e-3
    )
    assert result["return_correlation"] == pytest.approx(
        np.corrcoef(rewards.sum(1), predicted.sum(1))[0, 1], abs=1e-3
    )
    rows = list(csv.DictReader((run / "play" / checkpoint.name / "steps.csv").open()))
    assert [(int(row["episode"]), int(row["step"])) for row in rows] == [
        (i, step + 1) for i in range(5) for step in range(30)
    ]
    assert [float(row["reward"]) for row in rows] == rewards.ravel().tolist()
    assert np.allclose([float(row["predicted"]) for row in rows], predicted.ravel(), atol=1e-5)
    assert [row["action"] for row in rows] == [
        ("NOOP", "DOWN", "RIGHT", "UP", "LEFT")[action] for action in actions.ravel()
    ]
    told = json.loads((run / "play" / checkpoint.name / "play.json").read_text())
    assert [each["return"] for each in told["each"]] == rewards.sum(1).tolist()
    assert (
        main(playing(run, films=0)) == result
        and main(playing(run, films=0, seed=4))["return"] != result["return"]
    )


@pytest.mark.slow
def test_a_film_has_a_frame_for_every_step_and_shows_what_was_seen(run, tmp_path):
    result = main(playing(run, output_dir=str(tmp_path / "out"), films=2))
    seen, _, _ = by_hand(ControlPolicy.from_pretrained(result["checkpoint"]), 5, 3)
    for i in range(2):
        film = Image.open(tmp_path / "out" / f"episode-{i}.gif")
        assert film.n_frames == 30 and film.info["duration"] == pytest.approx(1000 / 15, abs=10)
        for step in (0, 29):
            film.seek(step)
            shown = np.asarray(film.convert("L"))
            x, y = np.clip(np.rint((seen[i, step] + 1) * (80, 105)), (2, 2), (157, 207))
            rows, columns = np.nonzero(shown[:420] > 200)  # 210 x 160, enlarged by 2
            assert (columns.mean() + 0.5, rows.mean() + 0.5) == pytest.approx((2 * x, 2 * y), abs=0.1)
            assert (shown[420:] < 100).sum() > 100, "expected text below the frame"
        assert Image.open(tmp_path / "out" / f"episode-{i}.png").size[0] > 400
    assert (tmp_path / "out" / "returns.png").is_file() and not (tmp_path / "out" / "episode-2.gif").exists()
    with pytest.raises(UserError, match="already holds a run of `play`: pass --overwrite to delete it"):
        main(playing(run, output_dir=str(tmp_path / "out"), film_steps=7, overwrite=False))
    main(playing(run, output_dir=str(tmp_path / "out"), film_steps=7))
    assert Image.open(tmp_path / "out" / "episode-0.gif").n_frames == 7
    assert not (tmp_path / "out" / "episode-1.gif").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.png").touch()
    with pytest.raises(UserError, match="was not made by `play`, so it is left alone"):
        main(playing(run, output_dir=str(tmp_path / "mine")))
    assert (tmp_path / "mine" / "notes.png").exists()


def test_the_reward_that_belongs_to_a_checkpoint(run, tmp_path, capsys, monkeypatch):
    """The version that the checkpoint was trained on; the newest where that was deleted; without a run only
    what is given; without any, none."""
    own = shutil.copytree(run, tmp_path / "run")
    checkpoint = own / (own / "latest").read_text()
    versions = sorted(int(each.name) for each in (own / "reward").iterdir())
    progress = checkpoint / "trainer" / "progress.json"
    assert json.loads(progress.read_text())["reward_version"] in versions
    progress.write_text(json.dumps({"reward_version": versions[0]}))
    quick = {"films": 0, "episodes": 1}
    assert main(playing(checkpoint, **quick))["reward"] == str(own / "reward" / str(versions[0]))
    monkeypatch.chdir(checkpoint)
    assert Path(main(playing(Path("."), **quick))["output_dir"]) == own / "play" / checkpoint.name
    assert main(playing(own, **quick))["reward"] == str(own / "reward" / str(versions[-1]))
    shutil.rmtree(own / "reward" / str(versions[0]))
    assert main(playing(checkpoint, **quick, quiet=False))["reward"] == str(
        own / "reward" / str(versions[-1])
    )
    assert f"version {versions[0]}" in capsys.readouterr().err
    shutil.rmtree(own / "reward")
    bare = main(playing(own, **quick | {"films": 1, "quiet": False}))
    assert (
        bare["reward"] is None
        and "predicted_return" not in bare
        and not (Path(bare["output_dir"]) / "returns.png").exists()
    )
    assert "only the true one is shown" in capsys.readouterr().err
    alone = shutil.copytree(checkpoint, tmp_path / "alone")
    more = {"env": "moving_dot", "env_options": RUN.env_options}
    given = main(playing(alone, **quick, **more, reward_model=str(run / "reward" / str(versions[-1]))))
    assert (
        given["output_dir"] == str(alone / "play")
        and given["predicted_return"] == main(playing(run, **quick))["predicted_return"]
    )


@pytest.mark.parametrize(
    "options", [{"observations": "features"}, {"observations": "pixels"}, {"continuous": True}], ids=str
)
def test_every_kind_of_observation_and_action(options, tmp_path):
    given = {"max_steps": 40, **options}
    shape = shape_of(control_env("moving_dot")(1, **given))
    ControlPolicy(shape).save_pretrained(tmp_path / "policy")
    hidden = (8,)
    RewardModel(
        RewardModelConfig(shape.observation, shape.actions, shape.discrete, hidden=hidden)
    ).save_pretrained(tmp_path / "reward")
    text = ",".join(f"{name}={value}" for name, value in given.items())
    more = {
        "env": "moving_dot",
        "env_options": text,
        "reward_model": str(tmp_path / "reward"),
        "episodes": 3,
        "sampled": True,
    }
    first, again = (main(playing(tmp_path / "policy", **more, films=films)) for films in (0, 1))
    assert first == again and first["steps"] >= 3 * 3  # up to 30 of 40 steps are waiting
    rows = list(csv.DictReader((tmp_path / "policy" / "play" / "steps.csv").open()))
    assert Image.open(tmp_path / "policy" / "play" / "episode-0.gif").n_frames == sum(
        row["episode"] == "0" for row in rows
    )
    assert len(rows[0]["action"].split()) == (2 if "continuous" in options else 1)


def test_episodes_of_different_lengths_end_where_they_end():
    """The environment goes on with others while some episodes last: nothing of those may count."""
    envs = control_env("moving_dot")(6, observations="features", max_steps=60)
    envs.reset(seed=1)
    lengths = -(-(60 - envs.steps) // 4)  # waiting counts as steps of one pixel, an action has 4 of them
    assert len(set(lengths.tolist())) > 1
    episodes = play_control(ControlPolicy(shape_of(envs)), envs, seed=1, draw=envs.draw, drawn=6)
    assert (
        [len(each.rewards) for each in episodes]
        == lengths.tolist()
        == [len(each.frames) for each in episodes]
    )


def test_a_chance_of_its_own():
    """Sampling leaves torch's generator as it was."""
    envs = control_env("moving_dot")(1, observations="position", max_steps=40)
    policy, before = ControlPolicy(shape_of(envs)), torch.random.get_rng_state()
    play_control(policy, envs, seed=1, greedy=False)
    assert torch.equal(before, torch.random.get_rng_state())


def test_small_returns_are_no_zeros():
    """Rewards may have any unit."""
    cheap = [ControlEpisode(np.zeros(1, int), np.array([1e-5 * n]), None, []) for n in (1, 2, 3)]
    figures = headline(cheap)
    low, high = figures["return_interval"]
    assert figures["return"] == 2e-5 and 1e-5 <= low < 2e-5 < high <= 3e-5


def test_figures_without_spread():
    still = ControlEpisode(np.zeros(4, int), np.zeros(4), np.arange(4.0), [])
    assert headline([still]) == {
        "episodes": 1, "steps": 4, "return": 0.0, "return_interval": None, "predicted_return": 6.0,
        "step_correlation": None, "return_correlation": None,
    }  # fmt: skip
    assert (
        correlation(np.array([1.0, 2]), np.array([3.0, 1])) is None
        and correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == -1
    )


@pytest.mark.slow
def test_pong(tmp_path):
    pytest.importorskip("ale_py", reason="Atari games need ale-py: pip install ale-py")
    shape = shape_of(control_env("pong")(1))
    ControlPolicy(shape).save_pretrained(tmp_path)
    RewardModel(RewardModelConfig(shape.observation, shape.actions, hidden=(8,))).save_pretrained(
        tmp_path / "reward"
    )
    reward = str(tmp_path / "reward")
    result = main(
        playing(tmp_path, env="pong", env_options="max_frames=120", episodes=2, reward_model=reward)
    )
    assert (
        result["predicted_return"] != 0 and 40 <= result["steps"] <= 60
    )  # 1 to 30 frames of waiting, 4 to an action
    assert {row["action"] for row in csv.DictReader((tmp_path / "play" / "steps.csv").open())} <= {
        "NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE",
    }  # fmt: skip


@pytest.mark.slow
def test_mp4(run, tmp_path):
    av = pytest.importorskip("av", reason="MP4 films are written by PyAV: pip install av")
    main(playing(run, output_dir=str(tmp_path), format="mp4", fps=30))
    with av.open(str(tmp_path / "episode-0.mp4")) as film:
        assert len(list(film.decode(video=0))) == 30 and film.streams.video[0].average_rate == 30


def test_mp4_without_its_library(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match="pip install av"):
        main(playing(run, output_dir=str(tmp_path / "out"), format="mp4"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"checkpoint": ""}, "expected the folder of a run of `prefer` or of a checkpoint, got ''"),
        ({"checkpoint": "nowhere"}, "got 'nowhere'"),
        ({"env": "pongs"}, "Did you mean pong"),
        ({"env_options": "observations=pixels"}, "it was trained in another environment"),
        ({"env_options": "continuous=true,observations=position"}, "it was trained in another environment"),
        ({"reward_model": "nowhere"}, "expected the description of a reward model"),
        ({"episodes": 0}, "--episodes of at least 1"),
        ({"fps": 60}, "a GIF has at most 50 frames per second, got 60"),
    ],
)
def test_what_cannot_be(run, wrong, message):
    with pytest.raises(UserError, match=message):
        main(playing(run, **wrong))


def test_a_reward_of_another_shape_and_folders_that_hold_less(run, tmp_path):
    RewardModel(RewardModelConfig((3,), 5)).save_pretrained(tmp_path / "reward")
    with pytest.raises(
        UserError,
        match=(
            r"expected a reward model for observations \(2,\) and 5 discrete actions, got one for"
            r" observations \(3,\)"
        ),
    ):
        main(playing(run, reward_model=str(tmp_path / "reward")))
    shutil.copy(run / "prefer.yaml", tmp_path / "prefer.yaml")
    with pytest.raises(UserError, match="has saved no policy yet"):
        find_checkpoint(str(tmp_path))
    alone = shutil.copytree(run / (run / "latest").read_text(), tmp_path / "elsewhere" / "policy")
    with pytest.raises(UserError, match="expected --env"):
        main(playing(alone))
