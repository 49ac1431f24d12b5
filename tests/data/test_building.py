"""A data directory in the making: what takes the place of what, and what a killed run leaves."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rl_dialog.data.building import building
from rl_dialog.errors import UserError

ROOT = Path(__file__).parents[2]


def test_a_directory_is_replaced_only_when_asked_and_only_a_data_directory(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with building(out, overwrite=False) as directory:  # an empty one is fine
        (directory / "manifest.json").write_text('{"format": "rl_dialog.data", "version": 2}')
    with (
        pytest.raises(UserError, match="exists and is not empty.*--overwrite"),
        building(out, overwrite=False),
    ):
        pass
    with pytest.raises(RuntimeError), building(out, overwrite=True):
        raise RuntimeError("killed half way")
    assert (out / "manifest.json").exists()
    with building(out, overwrite=True) as directory:
        (directory / "new").touch()
    assert [p.name for p in out.iterdir()] == ["new"]
    with (
        pytest.raises(UserError, match="no data directory, so --overwrite leaves it alone"),
        building(out, overwrite=True),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_next_run_removes_what_a_killed_one_left(tmp_path):
    out, script = (
        tmp_path / "out",
        "import sys, time; from pathlib import Path; from rl_dialog.data.building import building\n",
    )
    script += (
        "with building(Path(sys.argv[1]), overwrite=False) as d: (d / 'half').touch(); print('here', "
        "flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(out)], cwd=ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"here\n"
        with building(out.with_name("other"), overwrite=False):
            assert len(list(tmp_path.glob("out.tmp-*"))) == 1
        run.kill()
    with building(out, overwrite=False) as directory:
        assert list(tmp_path.glob("out.tmp-*")) == [directory]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def test_a_linked_folder_is_filled_where_it_lies(tmp_path):
    (tmp_path / "disk/out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk/out")
    with building(tmp_path / "out", overwrite=False) as directory:
        (directory / "new").touch()
    assert (tmp_path / "out").is_symlink() and (tmp_path / "out/new").exists()
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["out"]


def test_what_a_machine_with_a_longer_name_makes_is_left_alone(tmp_path):
    others = [f"out.tmp-{platform.node()}-{rest}" for rest in ("head-77-abc", "4194400-77-abc")]
    for name in others:
        (tmp_path / name).mkdir()
    with building(tmp_path / "out", overwrite=False):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["out", *others])
