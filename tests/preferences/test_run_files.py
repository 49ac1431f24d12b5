"""A run's files as the live page reads them: growing, cut by a resumed run, half-written."""

from __future__ import annotations

import json

import pytest

from rl_dialog.errors import UserError
from rl_dialog.preferences.run_files import PIECE, RunFiles
from rl_dialog.training.logger import Logger


def steps(found):
    return [line["step"] for line in found["lines"]]


def test_metrics_are_read_once_as_they_come(tmp_path):
    files = RunFiles(tmp_path)
    assert files.metrics() == {"lines": [], "cursor": "", "more": False, "reset": False}
    logger = Logger(tmp_path, report_to="none")
    first = files.metrics()
    assert first["lines"] == [] and not first["reset"]
    logger.log(1, {"train/return": 2.0, "train/loss": float("nan")})
    logger.log(2, {"train/return": 3.0})
    found = files.metrics(first["cursor"])
    assert (
        found["lines"] == [{"step": 1, "train/return": 2.0}, {"step": 2, "train/return": 3.0}]
        and not found["reset"]
    )
    assert files.metrics(found["cursor"])["lines"] == []
    logger.log(3, {"train/return": 4.0})
    assert steps(files.metrics(found["cursor"])) == [3]
    logger.close()


def test_a_resumed_run_makes_reading_begin_anew(tmp_path):
    """It drops lines and writes others in their place; at once the file may be as long as before."""
    files, logger = RunFiles(tmp_path), Logger(tmp_path, report_to="none")
    for step in (1, 2, 3):
        logger.log(step, {"train/return": float(step)})
    logger.close()
    cursor = files.metrics()["cursor"]
    logger = Logger(tmp_path, first_step=2, report_to="none")
    cut = files.metrics(cursor)
    assert cut["reset"] and steps(cut) == [1, 2]
    logger.log(3, {"train/return": 9.0})
    changed = files.metrics(cursor)
    assert changed["reset"] and changed["lines"][-1] == {"step": 3, "train/return": 9.0}
    assert steps(files.metrics(cut["cursor"])) == [3], "who saw the cut needs no second beginning"
    logger.close()
    (tmp_path / "metrics.jsonl").unlink()
    assert files.metrics(cut["cursor"]) == {"lines": [], "cursor": "", "more": False, "reset": True}


def test_a_line_counts_when_it_is_whole(tmp_path):
    path, files = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    found = files.metrics()
    assert steps(found) == [1]
    with path.open("a") as file:
        file.write(': 2}\nnot json\n[1]\n{"step": 3, "a": true, "b": "x", "c": null, "d": 1e999, "e": 0}\n')
    found = files.metrics(found["cursor"])
    assert found["lines"] == [{"step": 2, "a": 2}, {"step": 3, "e": 0}] and not found["reset"]
    for odd in ("x", "-1", "99999999999-0", "5", "5-00000000", "9" * 39):
        assert steps(files.metrics(odd)) == [1, 2, 3], odd


def test_long_files_come_in_pieces(tmp_path):
    files = RunFiles(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "name": 1.5, "pad": "x" * 80}) + "\n" for n in range(25_000))
    )
    seen, cursor, more, rounds = [], "", True, 0
    while more:
        found = files.metrics(cursor)
        cursor, more, rounds = found["cursor"], found["more"], rounds + 1
        seen += steps(found)
    assert seen == list(range(25_000)) and rounds == 3
    (tmp_path / "metrics.jsonl").write_text("x" * (PIECE + 1))
    with pytest.raises(UserError, match="byte 0"):
        files.metrics()


def test_the_figures_of_a_run_have_the_unit_of_its_rewards(tmp_path):
    line = {"step": 8, "train/return": 1.5e-5, "train/episodes": 4, "eval/return": -123.4567891}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | {"eval/return_sampled": 2e9}) + "\n")
    expected = {"steps": 8, "return": 1.5e-5, "eval_return": -123.457, "eval_return_sampled": 2e9}
    assert RunFiles(tmp_path).headline() == expected


def test_status(tmp_path):
    files = RunFiles(tmp_path)
    assert files.status() == {}
    (tmp_path / "status.json").write_text('{"labels_wanted": 3, "rate": NaN, "queues": {"a": [Infinity]}}')
    status = files.status()
    assert status.pop("age") < 60 and status == {"labels_wanted": 3, "rate": None, "queues": {"a": [None]}}
    for wrong in ("[1]", "{", ""):
        (tmp_path / "status.json").write_text(wrong)
        with pytest.raises(UserError, match="expected"):
            files.status()


def test_the_page_tells_it(page, labelled_run):
    (labelled_run.folder / "status.json").write_text(
        '{"labels_wanted": 7, "label_budget": 100, "steps": 5, "secret": 1}'
    )
    (labelled_run.folder / "metrics.jsonl").write_text('{"step": 1, "train/return": 2.5}\n')
    ann = page(token=labelled_run.log.add_labeller("ann", scopes=["labeller", "operator"]))
    status = ann.get("/v1/status").json()
    assert (status["labels_wanted"], status["label_budget"]) == (7, 100) and "steps" not in status
    watcher = page("wes", token=labelled_run.log.keys.add("wes", scopes=("metrics",)))
    run = watcher.get("/v1/run").json()
    assert (
        run["name"] == labelled_run.folder.name
        and run["status"]["steps"] == 5
        and run["counts"]["labels"] == 0
    )
    metrics = watcher.get("/v1/metrics").json()
    assert metrics["lines"] == [{"step": 1, "train/return": 2.5}]
    assert watcher.get("/v1/metrics", params={"cursor": metrics["cursor"]}).json()["lines"] == []
    (labelled_run.folder / "status.json").write_text("{")
    broken = watcher.get("/v1/run")
    assert broken.status_code == 500 and "status.json" in broken.json()["error"]["message"]
    assert ann.post("/v1/lease", json={}).status_code == 200, "labelling goes on"
