"""A sweep from a YAML file to a report: planned before anything runs, killed and continued, halved, told in
pictures."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pipelines import stages
from pipelines.chat import ChatConfig
from pipelines.tune import TuneConfig, _claim, main
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.sweep_experiment import SweepExperiment
from rl_dialog.cluster.trials import _run_trial, reports_of, trial_of
from rl_dialog.cluster.tune import Resources, run_trials
from rl_dialog.config import ConfigError, load_config
from rl_dialog.errors import UserError
from rl_dialog.evaluation.experiment import Run
from rl_dialog.evaluation.sweep_space import Halving, Point, Sweep, find_points
from rl_dialog.models.policy import Policy
from tests.holding import Hold
from tests.processes import of_a_job, title

ROOT = Path(__file__).parents[2]
START = (
    "--model.family llama --model.layers 1 --model.width 16 --model.attention_heads 2 --model.context 256 "
    "--max_steps 4"
)
TINY = {
    "title": "tiny",
    "about": "Two methods, two weights.",
    "write_logs": {"dialogs": 60, "seed": 1},
    "prepare": "--rewards.logged 1 --vocab_size 400 --max_length 256",
    "start": START + " --env small_talk --env_episodes 4",
    "train": "--method.gamma 1 --max_steps 6 --env small_talk --eval_steps 2 --env_episodes 4",
    "space": {"method": ["kl_control", "psi"], "method.c": [0.05, 0.5]},
    "seeds": [0, 1],
    "evaluate": "--env small_talk --episodes 8 --contexts 0 --samples 1 --max_new_tokens 16",
}


def sweep(**changes) -> Sweep:
    return Sweep(**{"title": "t", "about": "a", "space": {"method": ["bc"]}} | changes)


def written(folder: Path, **changes) -> str:
    path = folder / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({name: value for name, value in (TINY | changes).items() if value is not None})
    )
    return str(path)


def test_a_misspelt_parameter_is_found_before_anything_starts(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"--method\.tua.*Did you mean --method\.tau"):
        main(
            TuneConfig(
                sweep=written(tmp_path, space={"method": ["ilql"], "method.tua": [0.5]}),
                output_dir=str(tmp_path / "out"),
            )
        )
    with pytest.raises(UserError, match="unknown env 'smalltalk': expected one of"):
        main(
            TuneConfig(
                sweep=written(tmp_path, train="--max_steps 2 --env smalltalk"),
                output_dir=str(tmp_path / "other"),
            )
        )
    with pytest.raises(ConfigError, match="metric"):
        main(TuneConfig(sweep=written(tmp_path, train="--max_steps 2"), output_dir=str(tmp_path / "other")))


ALONE = {"train": "--max_steps 2", "start": None}
REFUSED = {
    "misspelt": ({"metric": "eval/retrun"}, r"never measured: .*Did you mean eval/return\?"),
    "of another method": (
        ALONE | {"metric": "eval/q_loss", "space": {"method": ["tf_all"]}},
        "eval/q_loss is never measured: .*tf_all reports .*eval/loss, eval/nll",
    ),
    "nothing held out": (
        ALONE | {"metric": "eval/loss", "prepare": "--validation 0"},
        "eval/loss is never measured: .*nothing, as --validation 0",
    ),
    "methods by their losses": (
        ALONE | {"metric": "eval/loss", "mode": "min", "evaluate": None},
        r"compares no two of them \(kl_control, psi\)",
    ),
    "halved by their losses": (
        ALONE | {"metric": "eval/loss", "mode": "min", "halving": {"grace": 1}},
        "compares no two of them",
    ),
    "no environment to earn in": ({"evaluate": "--contexts 4"}, "figure return is never measured: .*--env"),
    "no candidates": ({"figure": "top/bleu@1"}, "never measured: expected --candidates"),
    "no texts": (
        ALONE | {"metric": "eval/loss", "space": {"method": ["psi"]}, "figure": "words",
                 "evaluate": "--contexts 0"},
        "words is never measured: expected --env or --contexts",
    ),
    "no such figure": ({"figure": "retrun"}, r"never measured: .*Did you mean return\?"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_never_measured_is_said_before_anything_starts(tmp_path, why) -> None:
    changes, message = REFUSED[why]
    with pytest.raises(ConfigError, match=message):
        main(TuneConfig(sweep=written(tmp_path, **changes), output_dir=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_trials_differ_by_their_values_and_seed_only(tmp_path) -> None:
    [point, *_] = find_points(sweep(space={"method": ["psi"], "method.c": [0.5]}))
    planned = SweepExperiment(sweep(train="--max_steps 3", seeds=(0, 1)), tmp_path, stages)
    first, second = planned.trials_of(point)
    assert (first.config.method.c, first.config.max_steps, first.config.seed, second.config.seed) == (
        0.5,
        3,
        0,
        1,
    )
    assert first.folder.name == "psi,c=0.5-seed0"


ONLINE = {
    "train": None,
    "online": "--env small_talk --groups 2 --group_size 2 --max_steps 4 --eval_steps 2 --env_episodes 4 "
    "--max_new_tokens 8 --max_prompt_length 200 --learning_rate 1e-2",
    "space": {"method": ["rloo"], "method.c": [0.0, 0.5]},
}


def test_trials_of_online_start_from_the_clone_of_their_seed(tmp_path) -> None:
    changes = ONLINE | {"online": "--contexts {data} --rewards.question 1", "train": ""}
    [point, _] = find_points(sweep(**changes))
    planned = SweepExperiment(sweep(**changes, start=START, seeds=(0, 1)), tmp_path, stages)
    first, second = (one.config for one in planned.trials_of(point))
    starts = first.model_name_or_path, second.model_name_or_path
    assert starts == (f"{tmp_path}/bc-seed0", f"{tmp_path}/bc-seed1")
    assert (first.seed, second.seed, first.method.c) == (0, 1, 0.0)
    assert first.contexts == f"{tmp_path}/data" and first.report_to == "none"


REFUSED_ONLINE = {
    "of logs": ({"space": {"method": ["psi"]}}, "unknown method 'psi': expected one of reinforce, rloo"),
    "actors": (
        {"online": ONLINE["online"] + " --num_workers 2"}, "expected none, because a trial plays in its own"
    ),
    "a world that is not there": ({"online": "--env smalltalk"}, "unknown env 'smalltalk'"),
    "the loss": (
        {"metric": "eval/loss"}, r"eval/loss is never measured: .*eval/return.* in a world eval/true_return"
    ),
    "nobody to talk with": ({"online": "--max_steps 2"}, "expected either --env, .*got neither"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED_ONLINE)
def test_a_wrong_online_sweep_is_refused_before_anything_starts(tmp_path, why) -> None:
    changes, message = REFUSED_ONLINE[why]
    with pytest.raises(UserError, match=message):
        main(TuneConfig(sweep=written(tmp_path, **ONLINE | changes), output_dir=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_trial_that_could_not_say_why_it_failed_is_listed(tmp_path: Path) -> None:
    """As on a full disk, where its error.txt is there and empty."""
    config = stages.LEARNING["online"].config_of(tmp_path, tmp_path / "rloo", 0, ["--method", "rloo"])
    (tmp_path / "rloo").mkdir()
    (tmp_path / "rloo" / "error.txt").touch()
    told = trial_of(Point({"method": "rloo"}), Run("rloo", 0, config))
    assert (told.how, told.error) == ("failed", "its process died")


@pytest.mark.slow
def test_a_trial_of_online_that_failed_goes_on_from_its_checkpoint(checkpoints, tmp_path) -> None:  # noqa: ANN001
    """With the report that its last evaluation made, to the bits of one that nothing interrupted."""
    how = stages.LEARNING["online"]
    flags = shlex.split(ONLINE["online"]) + ["--method", "rloo", "--report_to", "none", "--device", "cpu"]
    flags += ["--rewards.question", "1"]

    def run(name: str, report) -> tuple[Run, dict]:  # noqa: ANN001
        one = Run(name, 0, how.config_of(tmp_path, tmp_path / name, 0, flags, Path(checkpoints["bc"])))
        return one, _run_trial(one, report, learn=how.learn, resources=Resources())

    def failing(metrics) -> None:  # noqa: ANN001
        raise RuntimeError("gone")

    whole, last = run("whole", lambda metrics: None)
    with pytest.raises(RuntimeError, match="gone"):
        run("half", failing)
    half, again = run("half", lambda metrics: None)
    assert [row["step"] for row in reports_of(half)] == [2, 4] and half.is_done
    assert {**again, "time": 0} == {**last, "time": 0} and "eval/true_return" in again
    weights = [(one.folder / "checkpoint-4" / "model.safetensors").read_bytes() for one in (whole, half)]
    assert weights[0] == weights[1]
    told = trial_of(Point({"method": "rloo"}), half)
    assert (told.how, told.rewards, told.verb) == ("ended", {"question": 1.0}, "online")


def test_the_chat_that_the_report_suggests_answers_as_the_evaluation_did(tmp_path) -> None:
    point = Point({"method": "mc", "evaluate.beta": 2, "evaluate.top_k": 5})
    experiment = SweepExperiment(sweep(evaluate="--env small_talk --temperature 0.5"), tmp_path, stages)
    chat = load_config(ChatConfig, experiment.chat_flags(point).split())
    assert (chat.do_sample, chat.num_beams, chat.max_new_tokens) == (True, 1, 64)
    assert (chat.temperature, chat.top_k, chat.beta) == (0.5, 5, 2.0)


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """One Ray for all tests that kill nothing: it takes seconds to start."""
    with connect("local", num_cpus=2):
        yield


@pytest.fixture(scope="module")
def whole(running, tmp_path_factory) -> Path:
    """A sweep that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    result = main(
        TuneConfig(
            sweep=written(folder),
            output_dir=str(folder / "out"),
            picture=str(folder / "frontier.svg"),
            quiet=True,
        )
    )
    assert "</svg>" in (folder / "frontier.svg").read_text()
    assert result["trials"] == {"ended": 8, "stopped": 0, "failed": 0, "left": 0}
    return folder / "out"


@pytest.mark.slow
def test_the_report_ranks_by_the_evaluation_and_best_is_a_checkpoint(whole: Path) -> None:
    found = json.loads((whole / "sweep.json").read_text())
    values = [
        (point["figures"]["best"] or point["figures"]["last"])["return"]["value"] for point in found["points"]
    ]
    assert len(values) == 4 and values == sorted(values, reverse=True)
    text = (whole / "report.md").read_text()
    for picture in ("frontier", "effects", "parallel", "curves"):
        assert (
            f"](plots/{picture}.png)" in text and (whole / "plots" / f"{picture}.png").stat().st_size > 5000
        )
    assert re.search(
        rf"^\| 1 \|.*{found['points'][0]['values']['method'].replace('_', chr(92) * 2 + '_')}", text, re.M
    )
    assert Policy.from_pretrained(whole / "best").method.c == found["points"][0]["values"]["method.c"]
    again = yaml.safe_load((whole / "best" / "train.yaml").read_text())
    assert again["method"]["c"] == found["points"][0]["values"]["method.c"]


@pytest.mark.slow
def test_a_sweep_is_neither_overwritten_nor_continued_unasked(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="already holds a run of `tune`: pass --resume to go on with it or --overwrite"
    ):
        main(TuneConfig(sweep=written(tmp_path), output_dir=str(whole)))
    with pytest.raises(UserError, match="was not made by `tune`"):  # but sweep.yaml
        main(TuneConfig(sweep=written(tmp_path), output_dir=str(tmp_path), overwrite=True))
    before = sorted((path, path.stat().st_mtime_ns) for path in (whole / "trials").rglob("*"))
    with pytest.raises(
        UserError,
        match=(
            r"start is '.*--max_steps 5.*was made with '.*--max_steps 4.*choose another --output_dir, or"
            r" --overwrite"
        ),
    ):
        main(
            TuneConfig(
                sweep=written(tmp_path, start=TINY["start"].replace("--max_steps 4", "--max_steps 5")),
                output_dir=str(whole),
                resume=True,
            )
        )
    with pytest.raises(
        UserError, match=r'c=0\.05-seed0 was made with other settings: .*now "num_workers": 2'
    ):
        main(
            TuneConfig(sweep=written(tmp_path), output_dir=str(whole), resume=True, num_workers=2, quiet=True)
        )
    with pytest.raises(UserError, match="was moved since: .*Move it back"):
        main(
            TuneConfig(
                sweep=written(tmp_path),
                output_dir=str(shutil.copytree(whole, tmp_path / "moved")),
                resume=True,
            )
        )
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (whole / "trials").rglob("*"))


def test_a_sweep_begins_anew_from_its_own_copy(tmp_path: Path) -> None:
    copy = tmp_path / "sweep.yaml"
    for path, text in ((copy, "samples: 2\n"), (tmp_path / "tune.yaml", ""), (tmp_path / "report.html", "")):
        path.write_text(text)
    config = TuneConfig(sweep=str(copy), output_dir=str(tmp_path), overwrite=True)
    _claim(config, tmp_path)
    assert copy.read_text() == "samples: 2\n" and not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_more_than_the_cluster_has_is_said_at_once(running, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a trial takes 4000 CPUs \(4000 workers\), the cluster has"):
        main(
            TuneConfig(
                sweep=written(tmp_path), output_dir=str(tmp_path / "out"), num_workers=4000, quiet=True
            )
        )


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_no_trial_that_ended_runs_again(whole: Path, tmp_path: Path) -> None:
    """To the figures of the sweep that nothing interrupted, of which it is one half."""
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "pipelines.tune",
        "--sweep",
        written(tmp_path, space=TINY["space"] | {"method.c": [0.5]}),
        "--output_dir",
        str(out),
        "--quiet",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    hold = Hold(tmp_path)
    hold.begin(f"{out}/trials/*/result.json", 2)
    environment |= hold.environment
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        deadline = time.monotonic() + 900
        while len(list(out.glob("trials/*/result.json"))) < 2:
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline, "waited 900 s for two trials"
            time.sleep(0.05)
        workers = of_a_job(run.pid)
        run.send_signal(signal.SIGKILL)
    psutil.wait_procs(workers, timeout=240)  # they notice and end
    done = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/result.json")}
    assert 2 <= len(done) < 4
    main(TuneConfig(sweep=command[4], output_dir=str(out), quiet=True, resume=True))
    assert all(path.stat().st_mtime_ns == changed for path, changed in done.items())
    ours, theirs = (
        {point["point"]: point["figures"] for point in json.loads(path.read_text())["points"]}
        for path in (out / "sweep.json", whole / "sweep.json")
    )
    assert len(ours) == 2 and ours == {name: theirs[name] for name in ours}


@pytest.mark.slow
@pytest.mark.long
def test_kl_weights_of_online_are_swept_and_a_killed_sweep_goes_on(running, tmp_path: Path) -> None:
    """To the same figures. The report draws return against KL, and what it names makes the winner again."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    result = main(TuneConfig(sweep=written(tmp_path, **ONLINE), output_dir=str(whole), quiet=True))
    assert result["trials"] == {"ended": 4, "stopped": 0, "failed": 0, "left": 0}
    file = str(tmp_path / "sweep.yaml")
    command = [sys.executable, "-m", "pipelines.tune", "--sweep", file, "--output_dir", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as run:
        deadline = time.monotonic() + 300
        while not list(out.glob("trials/*/checkpoint-2")):
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()
            time.sleep(0.02)
        workers = of_a_job(run.pid)
        run.send_signal(signal.SIGKILL)
    psutil.wait_procs(workers, timeout=120)
    assert len(list(out.glob("trials/*/result.json"))) < 4
    main(TuneConfig(sweep=file, output_dir=str(out), quiet=True, resume=True))
    ours, theirs = (json.loads((folder / "sweep.json").read_text())["points"] for folder in (out, whole))
    assert [(each["point"], each["figures"]) for each in ours] == [
        (each["point"], each["figures"]) for each in theirs
    ]
    assert all({"return", "kl"} <= set(each["figures"]["best"] or each["figures"]["last"]) for each in ours)
    text = (out / "report.md").read_text()
    assert "](plots/frontier.png)" in text and "python -m pipelines.online --config" in text
    assert yaml.safe_load((out / "best" / "online.yaml").read_text())["method"]["name"] == "rloo"
    played = [len(path.read_text().splitlines()) for path in out.glob("trials/*/rollouts/*.jsonl")]
    assert played == [4] * 16


@pytest.mark.slow
def test_halving_stops_trials_that_fall_behind_and_remembers_it(running, tmp_path: Path) -> None:
    changes = {
        "halving": {"grace": 3, "factor": 2},
        "evaluate": None,
        "metric": "eval/loss",
        "mode": "min",
        "space": {
            "method": ["psi"],
            "learning_rate": [1.0e-3, 1.0e-4, 1.0e-5, 1.0e-6],
        },  # the best ones first: the first to report stays
    }
    config = TuneConfig(sweep=written(tmp_path, **changes), output_dir=str(tmp_path / "out"), quiet=True)
    first = main(config)
    ended, stopped = first["trials"]["ended"], first["trials"]["stopped"]
    assert (
        ended >= 2 and ended % 2 == 0 and ended // 2 + stopped == 4
    )  # what ends on the first seed gets the second one
    assert {path.read_text() for path in (tmp_path / "out").glob("trials/*/stopped.txt")} == {
        "4\n"
    }  # at 6 there is nothing left to save
    steps = {
        path.parent.name: len(path.read_text().splitlines())
        for path in (tmp_path / "out").glob("trials/*/reports.jsonl")
    }
    second = main(TuneConfig(**{**config.__dict__, "resume": True}))
    assert second["trials"] == first["trials"] and second["winner"] == first["winner"]
    assert steps == {
        path.parent.name: len(path.read_text().splitlines())
        for path in (tmp_path / "out").glob("trials/*/reports.jsonl")
    }


@pytest.mark.slow
def test_a_reward_mix_has_data_of_its_own(running, tmp_path: Path) -> None:
    space = [{"prepare.rewards.vote": [1]}, {"prepare.rewards.vote": [1], "prepare.rewards.sentiment": [0.5]}]
    changes = {
        "space": space,
        "prepare": "--vocab_size 400 --max_length 256",
        "train": TINY["train"] + " --method psi",
        "seeds": [0],
    }
    out = tmp_path / "out"
    result = main(TuneConfig(sweep=written(tmp_path, **changes), output_dir=str(out), quiet=True))
    assert result["trials"]["ended"] == 2
    weights = {}
    for trial in out.glob("trials/*-seed*"):
        data = yaml.safe_load((trial / "train.yaml").read_text())["data"]
        components = json.loads((Path(data) / "manifest.json").read_text())["rewards"]["components"]
        weights[trial.name] = {name: row["weight"] for name, row in components.items()}
    assert weights == {
        "vote=1-seed0": {"vote": 1.0},
        "sentiment=0.5,vote=1-seed0": {"vote": 1.0, "sentiment": 0.5},
    }


@pytest.mark.slow
def test_the_page_shows_samples_what_fell_and_what_tensorboard_compares(whole: Path) -> None:
    text = (whole / "report.md").read_text()
    found = json.loads((whole / "sweep.json").read_text())
    assert (
        "## Samples of the best and the worst" in text
        and re.search(r"\*\*best: .*return", text)
        and re.search(r"\*\*worst: .*return", text)
    )
    changes = found["points"][0]["figures"]["changes"]
    assert "return" in changes and found["points"][0]["trials"][0]["rewards"] == {"logged": 1.0}
    assert "## Reward against held-out rewards" in text and (whole / "plots" / "held_out.png").is_file()
    accumulator = EventAccumulator(str(whole / "tensorboard" / "psi,c=0.5-seed1")).Reload()
    reports = [
        json.loads(line)
        for line in (whole / "trials" / "psi,c=0.5-seed1" / "reports.jsonl").read_text().splitlines()
    ]
    curve = accumulator.Scalars("eval/return")
    assert [event.step for event in curve] == [2, 4, 6]
    assert [event.value for event in curve] == pytest.approx([row["eval/return"] for row in reports])
    [start] = [
        HParamsPluginData.FromString(metadata.plugin_data.content)
        for name, metadata in accumulator.summary_metadata.items()
        if name == "_hparams_/session_start_info"
    ]
    values = {
        name: value.string_value or value.number_value
        for name, value in start.session_start_info.hparams.items()
    }
    assert values == {"method": "psi", "method.c": 0.5, "seed": 1.0, "how": "ended"}


@pytest.mark.slow
def test_a_metric_that_is_never_reported_ends_the_sweep_at_once(running, tmp_path: Path) -> None:
    heard = []

    def work(trial: int, report) -> None:
        for step in range(1, 100):
            report({"step": step, "eval/return": 0.5})
            (tmp_path / f"{trial}-{step}").touch()

    expected = "the metric 'eval/retrun' is never reported: expected one of eval/return, step"
    with pytest.raises(UserError, match=expected):
        run_trials(
            work,
            range(20),
            metric="eval/retrun",
            mode="max",
            resources=Resources(),
            folder=tmp_path / "tune",
            ended=lambda *how: heard.append(how),
        )
    assert heard == [] and not list(tmp_path.glob("*-2"))


@pytest.mark.slow
def test_a_report_without_the_metric_stops_nothing_once_it_was_there(running, tmp_path: Path) -> None:
    """As where an endpoint is down: the trial is judged by its next report."""

    def work(trial: int, report) -> dict[str, float]:
        while trial == 1 and not (tmp_path / "ended").exists():
            time.sleep(0.05)
        report({"step": 1, "eval/return": 1.0 - trial})
        report({"step": 2, "eval/failed": 1.0} if trial else {"step": 2, "eval/return": 1.0})
        (tmp_path / f"{trial}").touch()
        report({"step": 3, "eval/return": 1.0 - trial})
        time.sleep(1)
        return {"step": 4, "eval/failed": 1.0}

    heard = {}

    def ended(position: int, how: str, seconds: float) -> None:
        heard[position] = how
        (tmp_path / "ended").touch()

    how = {"resources": Resources(), "folder": tmp_path / "tune", "halving": Halving(grace=2, factor=2)}
    run_trials(work, range(2), metric="eval/return", mode="max", **how, ended=ended)
    assert heard == {0: "ended", 1: "stopped"} and (tmp_path / "1").exists()


@pytest.mark.slow
@pytest.mark.long
def test_ways_to_decode_and_kinds_of_start_share_what_they_can(running, tmp_path: Path) -> None:
    space = {
        "start.model.layers": [1, 2],
        "method": ["mc"],
        "evaluate.beta": [0, 1000],
    }  # after six steps the heads say little
    out = tmp_path / "out"
    result = main(
        TuneConfig(sweep=written(tmp_path, space=space, seeds=[0]), output_dir=str(out), quiet=True)
    )
    assert result["trials"]["ended"] == 2
    assert sorted(path.name for path in out.glob("trials/*-seed0")) == [
        "mc,layers=1-seed0",
        "mc,layers=2-seed0",
    ]
    assert sorted(path.name for path in out.glob("bc*-seed0")) == ["bc,layers=1-seed0", "bc,layers=2-seed0"]
    points = {point["point"]: point for point in json.loads((out / "sweep.json").read_text())["points"]}
    assert set(points) == {f"beta={beta},mc,layers={layers}" for layers in (1, 2) for beta in (0, 1000)}
    for layers in (1, 2):
        trial = out / "trials" / f"mc,layers={layers}-seed0"
        assert (
            Policy.from_pretrained(trial / (trial / "latest").read_text().strip()).lm.config.num_hidden_layers
            == layers
        )
        calm, steered = (points[f"beta={beta},mc,layers={layers}"]["figures"]["last"] for beta in (0, 1000))
        assert calm["distinct_2"] != steered["distinct_2"]
        for beta in (0, 1000):
            told = json.loads((out / "reports" / f"layers={layers},beta={beta}" / "metrics.json").read_text())
            assert {group["group"] for group in told["groups"]} == {
                f"bc,layers={layers}",
                f"mc,layers={layers}",
            }
            assert {difference["baseline"].split(" ")[0] for difference in told["differences"].values()} == {
                f"bc,layers={layers}"
            }


@pytest.mark.slow
@pytest.mark.long
def test_optuna_chooses_again_what_it_chose_before_a_kill(running, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {"method": ["psi", "mc"], "learning_rate": {"loguniform": [1.0e-5, 1.0e-1]}}
    changes = {"search": "optuna", "space": space, "samples": 4, "batch": 2, "seeds": [0], "evaluate": None}
    found = {}
    for name, stop in (("whole", 0), ("cut", 2)):
        config = TuneConfig(
            sweep=written(tmp_path, **changes), output_dir=str(tmp_path / name), quiet=True, trials=stop
        )
        result = main(config)
        if stop:
            assert result["trials"]["ended"] == stop
            done = {path: path.stat().st_mtime_ns for path in (tmp_path / name).glob("trials/*/result.json")}
            result = main(TuneConfig(**{**config.__dict__, "trials": 0, "resume": True}))
            assert all(path.stat().st_mtime_ns == changed for path, changed in done.items())
        assert result["trials"]["ended"] == 4
        found[name] = [
            point["point"] for point in json.loads((tmp_path / name / "sweep.json").read_text())["points"]
        ]
    assert found["whole"] == found["cut"] and len(set(found["whole"])) == 4


@pytest.mark.slow
@pytest.mark.long
def test_a_trial_of_two_workers_trains_as_one_of_one(whole: Path, tmp_path: Path) -> None:
    halved = TINY["train"] + " --per_device_train_batch_size 8"  # of the default 16
    changes = {"space": {"method": ["psi"], "method.c": [0.5]}, "seeds": [0], "train": halved}
    result = main(
        TuneConfig(
            sweep=written(tmp_path, **changes), output_dir=str(tmp_path / "out"), quiet=True, num_workers=2
        )
    )
    assert result["trials"] == {"ended": 1, "stopped": 0, "failed": 0, "left": 0}
    both = [
        json.loads((out / "trials" / "psi,c=0.5-seed0" / "reports.jsonl").read_text().splitlines()[-1])
        for out in (whole, tmp_path / "out")
    ]
    assert both[0].keys() == both[1].keys() and both[0]["step"] == 6
    assert {name: both[0][name] for name in both[0] if name != "time"} == pytest.approx(
        {name: both[1][name] for name in both[1] if name != "time"}, rel=1e-4
    )


@pytest.mark.slow
def test_a_trial_whose_process_dies_goes_on_once_and_is_then_listed_with_its_reason(tmp_path: Path) -> None:
    changes = {
        "space": {"method": ["psi"], "method.c": [0.5]},
        "seeds": [0],
        "evaluate": None,
        "train": TINY["train"] + " --max_steps 100000",
    }
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "pipelines.tune",
        "--sweep",
        written(tmp_path, **changes),
        "--output_dir",
        str(out),
        "--max_failures",
        "1",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    reports, killed = out / "trials" / "psi,c=0.5-seed0" / "reports.jsonl", []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        deadline = time.monotonic() + 900
        for _ in range(2):
            reached = len(reports.read_text().splitlines()) if killed else 0
            while not reports.is_file() or len(reports.read_text().splitlines()) < reached + 2:
                assert run.poll() is None and time.monotonic() < deadline, run.communicate()
                time.sleep(0.05)
            processes = psutil.Process(run.pid).children(recursive=True)
            [trial] = [
                p for p in processes if p.pid not in killed and title(p).startswith("ray::ImplicitFunc")
            ]
            trial.kill()
            killed.append(trial.pid)
        said, _ = run.communicate(timeout=600)
    assert run.returncode == 0 and "psi,c=0.5-seed0: failed after" in said and "its process died" in said
    assert "psi,c=0.5-seed0 failed: its process died" in (out / "report.md").read_text().replace("\\", "")
    steps = [json.loads(line)["step"] for line in reports.read_text().splitlines()]
    assert len(steps) >= 4 and steps == sorted(set(steps))  # the second start went on where the first one was


@pytest.mark.slow
def test_time_that_is_over_leaves_the_rest_and_says_so(running, tmp_path: Path) -> None:
    config = TuneConfig(
        sweep=written(tmp_path, evaluate=None, seeds=[0]),
        output_dir=str(tmp_path / "out"),
        quiet=True,
        minutes=0.05,
    )
    first = main(config)
    assert first["trials"]["left"] >= 1
    second = main(TuneConfig(**{**config.__dict__, "resume": True, "minutes": 0}))
    assert second["trials"]["ended"] == 4
