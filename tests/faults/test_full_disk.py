"""A file system of 3 MB that is full: one message with the path, nothing left of what could not be written,
and the same command afterwards."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import save_file

from rl_dialog.config import load_config
from rl_dialog.data.files import write_atomically, write_text_atomically
from rl_dialog.data.store import Store
from rl_dialog.errors import NoRoom, UserError, room_for
from rl_dialog.evaluation.sweep import Trial, _copy_best
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.page.app import create_page
from rl_dialog.preferences.segments import Segments
from rl_dialog.serving.api import create_app
from rl_dialog.serving.served import Models
from rl_dialog.serving.settings import ServeSettings

SIZE = 3 << 20


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """In bytes: the limit that any user can set for oneself."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_finds_no_room_leaves_nothing_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("kept")
    with files_of_at_most(1000):
        with pytest.raises(NoRoom, match=f"no room to write {tmp_path}/note: .*MB free"):
            write_text_atomically(tmp_path / "note", "x" * 5000)
        with pytest.raises(NoRoom, match=f"no room to write {tmp_path}/folder: "):
            write_atomically(tmp_path / "folder", lambda folder: (folder / "a").write_bytes(bytes(5000)))
    assert [path.name for path in tmp_path.iterdir()] == ["note"] and (
        tmp_path / "note"
    ).read_text() == "kept"


def test_half_a_copy_of_a_folder_leaves_nothing_and_says_where(tmp_path: Path) -> None:
    """As the best checkpoint of a sweep is copied."""
    trial = Trial("bc", {}, 0, str(tmp_path / "trial"), "ended", [])
    (tmp_path / "trial").mkdir()
    for name, size in (("config.json", 2), ("model.safetensors", 5000), ("train.yaml", 2)):
        (tmp_path / "trial" / name).write_bytes(bytes(size))
    with (
        files_of_at_most(1000),
        pytest.raises(NoRoom, match=f"write {tmp_path}/best: .Errno 27"),
    ):
        _copy_best(tmp_path, trial)
    assert [path.name for path in tmp_path.iterdir()] == ["trial"]
    _copy_best(tmp_path, trial)
    assert (tmp_path / "best" / "train.yaml").is_file()


def test_only_full_disks_are_told_so(tmp_path: Path) -> None:
    for error in (FileNotFoundError(2, "none"), ValueError("28")):
        with pytest.raises(type(error)), room_for(tmp_path):
            raise error


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a file system of 3 MB")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with logs and data; Ray runs."""
    from envs.small_talk import write_logs
    from pipelines import prepare
    from rl_dialog.cluster.data import connect

    folder = tmp_path_factory.mktemp("made")
    write_logs(folder / "logs.jsonl", dialogs=400, seed=1)
    with connect(num_cpus=2):
        prepare.main(preparing(folder, folder / "data"))
        yield folder


def preparing(made: Path, out: Path):
    from pipelines.prepare import PrepareConfig

    words = ["--logs", str(made / "logs.jsonl"), "--output_dir", str(out), "--vocab_size", "300", "--quiet"]
    return load_config(PrepareConfig, words)


def training(made: Path, out: Path, *more: str):
    from pipelines.train import CHOICES, TrainConfig

    words = (
        "--model.layers 2 --model.width 48 --model.attention_heads 4 --max_steps 6 --save_steps 2 "
        "--eval_steps 0 --cpus_per_worker 1"
    )
    where = ["--data", str(made / "data"), "--output_dir", str(out), "--quiet", "--report_to", "none"]
    return load_config(TrainConfig, [*words.split(), *where, *more], choices=CHOICES)


def fill(disk: Path, left: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(bytes(SIZE - left))
    return filler


def test_the_errors_of_libraries_are_known(disk: Path) -> None:
    """safetensors has an exception of its own."""
    with pytest.raises(NoRoom, match="checkpoint: .*No space left on device"):
        write_atomically(
            disk / "checkpoint",
            lambda folder: save_file({"a": torch.zeros(SIZE)}, folder / "model.safetensors"),
        )
    assert not list(disk.iterdir())


def fill_up(disk: Path) -> Path:
    """To the last byte."""
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(filler, bytes(4096))
    os.close(filler)
    return disk / "filler"


def test_a_full_database_is_a_full_disk(disk: Path) -> None:
    with closing(Store(f"sqlite:///{disk}/chats.db")) as store:
        fill_up(disk)
        told = f"no room to write {disk}: database or disk is full .*MB free"
        with pytest.raises(NoRoom, match=told), room_for(disk):
            for _ in range(2000):
                store.start_chat(model="m" * 1000)


def test_serve(disk: Path, checkpoints: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """What was acknowledged before is there, nothing is acknowledged meanwhile, and it goes on by itself."""
    filler = fill_up(disk)
    with pytest.raises(UserError, match=f"cannot open the store sqlite:///{disk}/chats.db: .*full"):
        Store(f"sqlite:///{disk}/chats.db")
    filler.unlink()
    with closing(Store(f"sqlite:///{disk}/chats.db")) as store:
        models = {"bc": checkpoints["bc"]}
        settings = ServeSettings(models=models, needs_key=False, max_tokens=2, threads=1)
        with TestClient(create_app(Models(settings), store), "http://localhost") as http:
            asked = {"model": "bc", "messages": [{"role": "user", "content": "hello " * 20}]}
            said = http.post("/v1/chat/completions", json=asked).json()["id"]
            counts, filler = store.counts(), fill_up(disk)
            vote = {"completion_id": said, "vote": 1}
            tries = [("chat/completions", asked), ("chats", {}), ("feedback", vote)]
            for path, body in tries:
                answer = http.post(f"/v1/{path}", json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_stored"), path
            streamed = http.post("/v1/chat/completions", json=asked | {"stream": True})
            assert '"not_stored"' in streamed.text and "[DONE]" not in streamed.text
            assert store.counts() == counts
            filler.unlink()
            assert [http.post(f"/v1/{path}", json=body).status_code for path, body in tries] == [200] * 3
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert errors and all("is full" in each.message and not each.exc_info for each in errors)


def test_prefer(disk: Path) -> None:
    """The page for labels: an answer is not acknowledged until it is there."""
    with closing(LabelLog(f"sqlite:///{disk}/labels.db")) as log:
        log.add_query("a" * 64, "b" * 64)
        app = create_page(log, Segments(disk), labeller="ann")
        with TestClient(app, "http://localhost") as http:
            log.add_labeller("ann")
            query = log.lease("ann").id
            filler = fill_up(disk)
            answer = {"query": query, "choice": "left"}
            refused = http.post("/v1/answers", json=answer)
            assert refused.status_code == 503 and "takes nothing for now" in refused.text
            filler.unlink()
            assert http.post("/v1/answers", json=answer).status_code == 200
            assert log.counts()["labels"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("left", [60_000, 300_000, 500_000])
def test_prefer_as_a_command(disk: Path, left: int) -> None:
    """The store cannot be made, a clip, an answer or a reward model cannot be kept: --resume goes on."""
    from pipelines import prefer

    words = "--env moving_dot --env_options observations=position --labeller oracle --synchronous"
    words += " --steps 2048 --budget 40 --initial_labels 20 --first_epochs 5 --report_to none --eval_every 0"
    words += f" --quiet --output_dir {disk / 'run'}"
    filler = fill(disk, left)
    told = f"{disk}/run.*( full|No space)"
    with pytest.raises(UserError, match=told), room_for(disk / "run"):  # as `run` does
        prefer.main(load_config(prefer.PreferConfig, words.split(), suited=prefer.suited))
    assert not list(disk.rglob("*.tmp-*"))
    filler.unlink()
    again = load_config(prefer.PreferConfig, [*words.split(), "--resume"], suited=prefer.suited)
    assert prefer.main(again)["labels"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("left", [20_000, 200_000])
def test_prepare(made: Path, disk: Path, left: int) -> None:
    from pipelines import prepare

    filler = fill(disk, left)
    with pytest.raises(NoRoom, match=f"^no room to write {disk}/data: .*MB free.*same command") as refused:
        prepare.main(preparing(made, disk / "data"))
    assert "Ray" not in str(refused.value) and "retr" not in str(refused.value)
    assert list(disk.iterdir()) == [filler]
    filler.unlink()
    assert prepare.main(preparing(made, disk / "data"))["dialogs"] == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "checkpoints"),
    [pytest.param(100_000, [], marks=pytest.mark.long), (2_200_000, ["checkpoint-2"])],
)
def test_train(made: Path, disk: Path, left: int, checkpoints: list[str]) -> None:
    from pipelines import train

    filler, out = fill(disk, left), disk / "run"
    with pytest.raises(NoRoom, match=f"no room to write {out}.*--resume"):
        train.main(training(made, out))
    assert sorted(path.name for path in disk.rglob("*checkpoint-*")) == checkpoints
    assert not list(disk.rglob("*.tmp-*")) and out.exists() == bool(checkpoints)
    filler.unlink()
    again = training(made, out, "--save_total_limit", "1", *(["--resume"] if checkpoints else []))
    assert train.main(again)["step"] == 6


def _note_and_fail(config: Path, error: Exception) -> None:
    with open(config, "a", encoding="utf-8") as file:
        file.write("tried\n")
    raise error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "tries"),
    [(NoRoom("no room"), 1), pytest.param(RuntimeError("died"), 2, marks=pytest.mark.long)],
)
def test_only_what_may_go_well_again_is_tried_again(made: Path, tmp_path: Path, error, tries: int) -> None:
    from rl_dialog.cluster.train import WorkerGroup, fit

    notes = tmp_path / "notes"
    with pytest.raises(Exception, match=str(error)):
        fit(partial(_note_and_fail, error=error), notes, WorkerGroup(max_failures=1), tmp_path / "out")
    assert notes.read_text().count("tried") == tries
