"""A prepare that is killed goes on where it was: real processes, a real SIGKILL, a Ray of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from pipelines import prepare
from rl_dialog.config import load_config
from rl_dialog.data.schema import SPLITS, Dialog, write_jsonl
from rl_dialog.data.shards import load_manifest, read_dialogs
from tests.holding import Hold
from tests.processes import of_a_job

ROOT = Path(__file__).parents[2]
DIALOGS = 2500  # of 8 kB each, so that a chunk of 4 MiB holds some 500
COUNTING = """
import os, time

def count(dialog):
    time.sleep(0.001)
    with open(os.environ["COUNTED"], "a") as file:
        file.write(dialog.id + chr(10))
    return [float(len(dialog.messages))] * len(dialog.replies)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_scores_no_finished_chunk_again(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(COUNTING)
    texts = [
        [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": f"good day {i}"}]
        for i in range(DIALOGS)
    ]
    write_jsonl(
        (Dialog(str(i), messages, meta={"note": "x" * 8000}) for i, messages in enumerate(texts)),
        tmp_path / "logs.jsonl",
    )

    hold = Hold(tmp_path)
    hold.begin(f"{tmp_path}/out.tmp-*/*/figures/*.parquet", 2)
    with _prepare(tmp_path, "out", "first", **hold.environment) as run:
        deadline = time.monotonic() + 400
        while len(list(tmp_path.glob("out.tmp-*/*/figures/*.parquet"))) < 2:
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline, "waited 400 s for two chunks"
            time.sleep(0.02)
        workers = of_a_job(run.pid)
        run.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    psutil.wait_procs(workers, timeout=240)  # they notice and end
    tables = [pq.read_table(path) for path in tmp_path.glob("out.tmp-*/*/figures/*.parquet")]
    kept = sum(len(table["id"][0]) for table in tables)
    assert len(tables) >= 2 and 0 < kept < DIALOGS

    with _prepare(tmp_path, "out", "second") as run:
        assert run.wait(600) == 0, run.communicate()
    again = Counter((tmp_path / "second").read_text().split())
    assert len(again) == DIALOGS - kept and set(again.values()) == {
        1
    }  # the chunks that were finished are not scored again
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()}.isdisjoint(("work", "recipe.json"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in _environment(tmp_path, "third").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    prepare.main(load_config(prepare.PrepareConfig, _flags("whole")))
    assert len((tmp_path / "third").read_text().split()) == DIALOGS
    for split in SPLITS:
        assert list(read_dialogs(tmp_path / "out", split)) == list(read_dialogs(tmp_path / "whole", split))
    ours, theirs = (load_manifest(tmp_path / name) for name in ("out", "whole"))
    for key in ("splits", "rewards", "sources", "tokenizer"):
        assert ours[key] == theirs[key], json.dumps([ours[key], theirs[key]])


def _flags(out):
    flags = "--logs logs.jsonl --rewards.counting:count 1 --num_cpus 2 --quiet --vocab_size 300"
    return [*flags.split(), "--output_dir", out]


def _environment(folder, counted):
    return {"COUNTED": str(folder / counted), "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


def _prepare(folder, out, counted, **held):
    environment = os.environ | _environment(folder, counted)
    if held:
        environment |= held | {"PYTHONPATH": os.pathsep.join((held["PYTHONPATH"], environment["PYTHONPATH"]))}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "pipelines.prepare", *_flags(out)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
