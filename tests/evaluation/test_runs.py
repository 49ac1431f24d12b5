"""Which checkpoints and groups a user means."""

import pytest

from rl_dialog.errors import UserError
from rl_dialog.evaluation.runs import existing, find_entries


def make_run(folder, *, best="checkpoint-10", latest="checkpoint-20"):
    for name, target in (("best", best), ("latest", latest)):
        if target:
            (folder / target).mkdir(parents=True, exist_ok=True)
            (folder / target / "config.json").write_text("{}")
            (folder / name).write_text(target + "\n")
    return str(folder)


def test_a_run_folder_gives_best_and_last(tmp_path):
    found = find_entries([make_run(tmp_path / "ilql-seed3")])
    assert [(e.group, e.which, e.run) for e in found] == [
        ("ilql", "best", "ilql-seed3"),
        ("ilql", "last", "ilql-seed3"),
    ]
    assert [e.directory for e in found] == [
        str(tmp_path / "ilql-seed3" / name) for name in ("checkpoint-10", "checkpoint-20")
    ]
    assert {e.folder for e in found} == {tmp_path / "ilql-seed3"}
    assert [e.which for e in find_entries([make_run(tmp_path / "new", best=None)])] == ["last"]


@pytest.mark.parametrize(
    ("folder", "group"),
    [
        ("bc-seed0", "bc"),
        ("bc_seed12", "bc"),
        ("bc.seed-1", "bc"),
        ("bc/seed1", "bc"),
        ("bc", "bc"),
        ("seeded", "seeded"),
        ("seed1-b", "seed1-b"),
    ],
)
def test_groups_are_named_before_the_seed(tmp_path, folder, group):
    assert find_entries([make_run(tmp_path / folder)])[0].group == group


def test_a_checkpoint_directory_stands_for_itself(tmp_path):
    make_run(tmp_path / "bc-seed1")
    (found,) = find_entries([str(tmp_path / "bc-seed1" / "checkpoint-10")])
    assert (found.group, found.which, found.run) == ("bc", "checkpoint-10", "bc-seed1")
    (named,) = find_entries([str(tmp_path / "bc-seed1" / "checkpoint-10")], ["mine"])
    assert (named.group, named.which) == ("mine", "")


def test_names_group_as_told(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("x", "y")]
    assert {e.group for e in find_entries(runs, ["one", "one"])} == {"one"}
    with pytest.raises(UserError, match="one name per checkpoint, got 1 names for 2"):
        find_entries(runs, ["one"])


def test_runs_that_cannot_be_told_apart(tmp_path):
    runs = [make_run(tmp_path / folder / "bc-seed0") for folder in ("a", "b")]
    with pytest.raises(UserError, match="both run bc-seed0 of group bc: tell them apart with --names"):
        find_entries(runs)


def test_what_is_no_checkpoint(tmp_path):
    make_run(tmp_path / "ilql-seed0")
    with pytest.raises(UserError, match=r"no such checkpoint: .*iql-seed0\. .* Did you mean .*/ilql-seed0\?"):
        existing(str(tmp_path / "iql-seed0"))
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"expected a checkpoint \(config.json\) or a run folder"):
        find_entries([str(tmp_path / "other")])
