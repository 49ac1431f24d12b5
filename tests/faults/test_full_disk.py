"""A file system of 3 MB that is full: one message with the path, nothing left of what could not be written,
and the same command afterwards."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_dialog.config import load_config
from rl_dialog.data.files import write_atomically, write_text_atomically
from rl_dialog.errors import NoRoom, UserError, room_for

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
        "--model.layers 2 --model.width 48 --max_steps 6 --save_steps 2 --eval_steps 0 --cpus_per_worker 1"
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
@pytest.mark.parametrize(("left", "checkpoints"), [(100_000, []), (2_200_000, ["checkpoint-2"])])
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
    ("error", "tries"), [(NoRoom("no room"), 1), (UserError("fix it"), 1), (RuntimeError("died"), 3)]
)
def test_only_what_may_go_well_again_is_tried_again(made: Path, tmp_path: Path, error, tries: int) -> None:
    from rl_dialog.cluster.train import WorkerGroup, fit

    notes = tmp_path / "notes"
    with pytest.raises(Exception, match=str(error)):
        fit(partial(_note_and_fail, error=error), notes, WorkerGroup(max_failures=2), tmp_path / "out")
    assert notes.read_text().count("tried") == tries
