"""The results table: a tiny comparison from logs to table, what is repeated and what is not, a driver that is
killed, and how a table reads."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from envs import write_logs_of
from pipelines import compare, stages
from pipelines.compare import CompareConfig, main
from rl_dialog.cluster import experiment
from rl_dialog.data.schema import Dialog
from rl_dialog.data.splits import assign_split
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison_file import read_comparison

ROOT = Path(__file__).parents[2]
TINY = {
    "seeds": [0],
    "train": "--report_to none --per_device_train_batch_size 4 --env small_talk --env_episodes 2",
    "methods": {"bc": "", "tf_top": "--method.fraction 0.5"},
    "tasks": {
        "talk": {
            "title": "small talk",
            "about": "Forty chats.",
            "figures": ["return", "perplexity"],
            "write_logs": {"dialogs": 40, "seed": 1},
            "prepare": "--rewards.logged 1 --vocab_size 400 --max_length 384 --test 0.2",
            "bc": (
                "--model.family llama --model.layers 1 --model.width 16 --model.context 512 --max_steps 4 "
                "--eval_steps 2"
            ),
            "improve": "--max_steps 4 --eval_steps 2",
            "evaluate": (
                "--env small_talk --episodes 4 --contexts 0 --max_new_tokens 8 --held_out 8 --replicates 100"
            ),
        },
        "elsewhere": {
            "title": "no such corpus",
            "about": "",
            "figures": ["critic"],
            "logs": ["no_such_corpus/data.json"],
            "bc": "",
            "improve": "",
            "evaluate": "",
        },
    },
}
TALK = TINY["tasks"]["talk"]


def written(values: dict) -> str:
    return yaml.safe_dump(values, sort_keys=False)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "compare.yaml"
    path.write_text(written(TINY))
    return path


def config_of(table: Path, **changes) -> CompareConfig:
    return CompareConfig(experiments=str(table), output_dir=str(table.parent / "out"), **changes)


def test_worlds_write_their_logs_by_their_class_or_their_module(tmp_path: Path) -> None:
    for world in ("toy_graph", "tests.worlds.mazes:Maze"):
        path = tmp_path / world / "logs.jsonl"
        write_logs_of({"world": world, "dialogs": 11, "seed": 1}, path)
        assert len(path.read_text(encoding="utf-8").splitlines()) == 11


def test_logs_of_worlds_take_the_options_of_their_class_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "dialogs.jsonl"
    asked = {"dialogs": 22, "seed": 1}
    write_logs_of(asked | {"world": "wordle", "kind": "adversarial"}, path)
    assert {Dialog.from_json(line).meta["policy"] for line in path.open(encoding="utf-8")} > {"adversarial"}
    write_logs_of(asked | {"world": "small_talk"}, path)
    of_small_talk = path.read_bytes()
    write_logs_of(asked, path)
    assert path.read_bytes() == of_small_talk
    for wrong, message in (
        ({"kind": "half"}, "small_talk: expected dialogs and seed, got kind too"),
        ({"world": "toy_graph", "kind": "half"}, "toy_graph: expected dialogs and seed, got kind too"),
        ({"world": "multiwoz"}, "multiwoz: expected a class or a module with write_logs"),
    ):
        with pytest.raises(UserError, match=message):
            write_logs_of(asked | wrong, path)


def test_a_task_whose_logs_are_read_and_written_is_refused(table: Path) -> None:
    """Whoever added `logs` to a copied file and left its `write_logs` lost them: they were written over."""
    table.write_text(written(TINY | {"tasks": {"talk": TALK | {"logs": ["mine.jsonl"]}}}))
    with pytest.raises(UserError, match="tasks: talk: expected logs, which are read, or write_logs.*both"):
        read_comparison(str(table))


def test_worlds_are_evaluated_on_a_split_that_holds_dialogs(tmp_path: Path) -> None:
    """Equal walks stay together: of the three that toy_graph has none is in the split for testing."""
    tasks = read_comparison(ROOT / "tune_configs" / "compare_worlds.yaml").tasks
    for name in ("branches", "graph_7"):
        path = tmp_path / f"{name}.jsonl"
        write_logs_of(tasks[name].write_logs | {"dialogs": 300}, path)
        asked = stages.prepare_config(tasks[name], tmp_path)
        dialogs = [Dialog.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        held = {assign_split(dialog, asked.validation, asked.test, by=asked.split_by) for dialog in dialogs}
        assert (stages.evaluate_config(tasks[name], tmp_path, ["bc"]).split or "test") in held


def test_logs_are_found_where_the_command_starts_or_among_the_corpora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Path
) -> None:
    """Logs of one's own, named as every verb names them."""
    corpora, here = tmp_path / "corpora", tmp_path / "here"
    for place in (corpora / "public.jsonl", here / "logs" / "mine.jsonl"):
        write_logs_of({"dialogs": 1, "seed": 1}, place)
    monkeypatch.setattr(stages, "CORPORA", corpora)
    monkeypatch.chdir(here)
    task = replace(read_comparison(table).tasks["talk"], logs=("logs/mine.jsonl", "public.jsonl"))
    asked = stages.prepare_config(task, tmp_path / "task")
    assert asked.logs == (str(here / "logs" / "mine.jsonl"), str(corpora / "public.jsonl"))


def test_from_logs_to_table_and_again(
    table: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = table.parent / "README.md"
    readme.write_text("before\n<!-- compare: begin -->\nold\n<!-- compare: end -->\nafter\n")
    result = main(config_of(table, readme=str(readme), picture=str(table.parent / "results.svg")))
    assert (table.parent / "results.svg").read_text() == Path(result["svg"]).read_text()
    printed, out = capsys.readouterr().out, table.parent / "out"
    assert (
        "elsewhere: skipped, " in printed
        and "no_such_corpus" in printed
        and result["skipped"] == ["elsewhere"]
    )
    assert re.search(r"\[1/1, .* in all\] talk/bc-seed0: \d+ s, eval/return -?\d", printed)
    text = Path(result["md"]).read_text()
    assert readme.read_text() == f"before\n<!-- compare: begin -->\n{text}<!-- compare: end -->\nafter\n"
    metrics = json.loads((out / "talk" / "report" / "metrics.json").read_text())
    last = {group["group"]: group["figures"] for group in metrics["groups"] if group["which"] in ("last", "")}
    (row,) = re.findall(r"^\| `tf_top` \|.*$", text, re.M)
    assert (
        f"{last['tf_top']['return']['value']:.2f} [" in row
        and f"{last['tf_top']['perplexity']['value']:.1f} [" in row
    )
    assert Path(result["svg"]).read_text().count("<svg") == 1
    check_that_nothing_is_repeated(table, monkeypatch, text)


def check_that_nothing_is_repeated(table: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A table that is done needs no training: the same again; a changed flag makes one run stale, and those
    that start from it."""
    monkeypatch.setattr(compare, "connect", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(
        experiment, "each", lambda work, items, **_: pytest.fail(f"repeats {items}") if items else ()
    )
    with pytest.raises(
        UserError, match="already holds a run of `compare`: pass --resume to go on with it or --overwrite"
    ):
        main(config_of(table, quiet=True))
    (table.parent / "out" / "compare.md").unlink()
    assert Path(main(config_of(table, quiet=True, resume=True))["md"]).read_text() == text
    stale: list[list[str]] = []

    def fails(work, items, **_):
        stale.append([Path(getattr(item, "output_dir", "report")).name for item in items])
        return [(position, RuntimeError("no room")) for position in range(len(items))]

    monkeypatch.setattr(experiment, "each", fails)
    changed = copy.deepcopy(TINY)
    changed["methods"]["tf_top"] = "--method.fraction 0.25"
    table.write_text(written(changed))
    with pytest.raises(UserError, match=r"1 runs and talk failed: .*compare\.md says which and why"):
        main(config_of(table, quiet=True, resume=True))
    assert stale == [[], ["tf_top-seed0"], ["report"]]
    assert (
        "- small talk, `tf_top`, seed 0 failed: RuntimeError: no room"
        in (table.parent / "out" / "compare.md").read_text()
    )
    changed["tasks"]["talk"]["bc"] += " --learning_rate 1e-3"
    table.write_text(written(changed))
    with pytest.raises(UserError, match="talk failed"):
        main(config_of(table, quiet=True, resume=True))
    assert stale[3:] == [["bc-seed0"], [], []]  # and nothing is trained from a start that failed
    assert (
        "tf_top`, seed 0 failed: bc-seed0, which it starts from, failed"
        in (table.parent / "out" / "compare.md").read_text()
    )


@pytest.mark.slow
@pytest.mark.long  # it resumes by what tests/pipelines/test_tune.py kills
@pytest.mark.timeout(1800)
def test_a_killed_driver_goes_on_where_it_was(table: Path) -> None:
    """Killed with everything it started while a run is under way; the figures are those of a comparison that
    nobody touched."""
    slower = copy.deepcopy(TINY)
    del slower["tasks"]["elsewhere"]
    slower["train"] = "--report_to none --per_device_train_batch_size 4"
    slower["tasks"]["talk"] |= {"improve": "--max_steps 80 --save_steps 10", "figures": ["perplexity"]}
    table.write_text(written(slower))
    killed, whole = table.parent / "killed", table.parent / "whole"
    process = start(table, killed)
    wait_for(killed / "talk" / "tf_top-seed0" / "checkpoint-20", process)
    kill(process)
    assert (
        not (killed / "compare.json").exists()
        and not (killed / "talk" / "tf_top-seed0" / "result.json").exists()
    )
    process = start(table, killed, "--resume")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    main(CompareConfig(experiments=str(table), output_dir=str(whole), quiet=True))
    assert "/bc-seed" not in output and "prepared" not in output and "/tf_top-seed0: " in output
    found = [json.loads((out / "talk" / "report" / "metrics.json").read_text()) for out in (killed, whole)]
    assert found[0]["differences"] == found[1]["differences"]
    assert [group["figures"] for group in found[0]["groups"]] == [
        group["figures"] for group in found[1]["groups"]
    ]
    bc, resumed = json.loads((killed / "compare.json").read_text())["tasks"][0]["runs"]
    assert bc["seconds"] > 0 and resumed["seconds"] is None  # nobody watched the clock while it was dead


def start(table: Path, out: Path, *flags: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [
        sys.executable,
        "-m",
        "pipelines.compare",
        "--experiments",
        str(table),
        "--output_dir",
        str(out),
        *flags,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"it ended before it could be killed: {process.stdout.read()[-3000:]}"
        assert time.monotonic() < deadline, f"waited in vain for {path}"
        time.sleep(0.05)


def kill(process: subprocess.Popen) -> None:
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:  # it went with its parent
            continue
    process.wait(timeout=30)


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, {"experiments": ""}, "expected --experiments: a file like"),
        (
            {},
            {"tasks": ("talks",)},
            "--tasks: unknown name 'talks': the file has talk, elsewhere. Did you mean talk?",
        ),
        ({}, {"methods": ("ilql",)}, "--methods: unknown name 'ilql': the file has bc, tf_top"),
        ({"methods": {"tf_top": ""}}, {}, "expected bc among the methods"),
        ({"methods": {"bc": "", "tf_tops": ""}}, {}, "unknown method 'tf_tops'.*Did you mean tf_top?"),
        ({"train": "--learning_rat 1"}, {}, "Did you mean --learning_rate?"),
        ({"tasks": {"x": {"titel": "x"}}}, {}, "tasks: x: unknown key 'titel' for Task. Did you mean title?"),
        ({"seed": [1]}, {}, "unknown key 'seed' for Comparison. Did you mean seeds?"),
        ({"tasks": {"x": {"title": "x"}}}, {}, "tasks: x: expected 'about', 'figures', .* too"),
        ({"tasks": {}}, {}, "tasks: expected at least one"),
        ({"tasks": {1: TALK}}, {}, "expected names as the keys of tasks, got 1: put it in quotes"),
        ({"tasks": {"../x": TALK}}, {}, "expected names that can be folders, got '../x'"),
        ({"tasks": {"x": TALK | {"figures": []}}}, {}, "tasks: x: figures: expected at least one"),
        ({"tasks": {"x": TALK | {"figures": ["retrun"]}}}, {}, "figure retrun is never measured: .*return"),
        ({"tasks": {"x": TALK | {"methods": {"bc": None}}}}, {}, "tasks: x: methods: expected bc to stay"),
        (
            {"tasks": {"x": TALK | {"methods": {"tf_all": "--seed 1"}}}},
            {},
            r"x: methods: expected methods of the file \(bc, tf_top.*\), got 'tf_all'. Did you mean tf_top?",
        ),
        ({"tasks": {"x": TALK | {"settings_of": "y"}}}, {}, "settings_of: expected a task with a search"),
        ({"tasks": {"x": TALK | {"search_train": "--seed 1"}}}, {}, "x: search_train: expected `search`"),
        ({"tasks": {"x": TALK | {"bc": "--seed '1"}}}, {}, "x: expected flags .* no closing quotation"),
        ({"train": "--env 'small_talk"}, {}, "train: expected flags as one types them"),
        ({"space": {"tf_tops": {"seed": [1]}}}, {}, "space: expected names .*tf_tops'. Did you mean tf_top?"),
        ({"samples": 0}, {}, "samples: expected at least 1, got 0"),
        ({"seeds": []}, {}, r"seeds: expected different numbers from 0 on, got \[\]"),
        ({}, {"seeds": (0, 0)}, r"seeds: expected different numbers from 0 on, got \[0, 0\]"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    table: Path, monkeypatch, change: dict, flags: dict, message: str
) -> None:
    monkeypatch.setattr(compare, "connect", lambda address: pytest.fail("started"))
    table.write_text(written({**TINY, **change}))
    with pytest.raises(UserError, match=message):
        main(replace(config_of(table), **flags))


@pytest.mark.slow
def test_settings_are_drawn_among_other_users_and_hold_in_a_world_where_none_was_chosen(
    tmp_path: Path,
) -> None:
    values = copy.deepcopy(TINY) | {
        "methods": {"bc": "", "tf_top": "--method.by reply"},
        "samples": 2,
        "search_seeds": [7],
    }
    values["space"] = {"tf_top": {"method.fraction": {"uniform": [0.3, 0.9]}}}
    talk = values["tasks"]["talk"]
    talk["search"] = talk["evaluate"] + " --seed 1000"
    talk["search_train"] = "--max_steps 1"
    maze = {
        "title": "maze",
        "about": "",
        "settings_of": "talk",
        "write_logs": {"world": "tests.worlds.mazes:Maze", "dialogs": 30, "seed": 1},
    }
    short = (
        "--env tests.worlds.mazes:Maze --episodes 2 --contexts 0 --max_new_tokens 4 --held_out 4 "
        "--replicates 100"
    )
    values["tasks"] = {
        "talk": talk,
        "maze": talk
        | {"search": "", "search_train": "", "figures": ["return", "return_greedy"], "evaluate": short}
        | maze,
    }
    path = tmp_path / "compare.yaml"
    path.write_text(written(values))
    result = main(config_of(path))
    record = json.loads(Path(result["json"]).read_text())
    chosen = record["settings"]["talk"]["tf_top"]
    assert (
        set(chosen) == {"method.by", "method.fraction"}
        and record["settings"]["maze"] == record["settings"]["talk"]
    )
    points = json.loads((path.parent / "out" / "talk" / "search" / "sweep.json").read_text())["points"]
    assert len(points) == 2 and points[0]["values"]["method.fraction"] == chosen["method.fraction"]
    for task in ("talk", "maze"):
        used = yaml.safe_load((path.parent / "out" / task / "tf_top-seed0" / "train.yaml").read_text())
        assert used["method"]["fraction"] == chosen["method.fraction"] and used["seed"] == 0
        assert used["max_steps"] != 1
    trials = list((path.parent / "out" / "talk" / "search" / "trials").glob("*/train.yaml"))
    assert [yaml.safe_load(trial.read_text())["max_steps"] for trial in trials] == [1, 1]
    text = Path(result["md"]).read_text()
    assert (
        "best of 2 draws for each method, with training seed 7" in text
        and "none was chosen here" in text
        and "greedy return, last" in text
    )


def test_a_task_that_takes_over_what_nobody_chose_is_refused(tmp_path: Path) -> None:
    values = copy.deepcopy(TINY)
    values["tasks"]["talk"]["settings_of"] = "elsewhere"
    path = tmp_path / "compare.yaml"
    path.write_text(written(values))
    with pytest.raises(UserError, match="settings_of: expected a task with a search"):
        main(config_of(path))
