"""The file of a sweep: what is refused, and the points of its space."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import yaml

from rl_dialog.config import ConfigError
from rl_dialog.data.files import write_json
from rl_dialog.evaluation.sweep_space import Point, Sweep, check_world, find_points, read_sweep

TINY = {
    "title": "tiny",
    "about": "Two methods, two weights.",
    "write_logs": {"dialogs": 60, "seed": 1},
    "start": "--max_steps 4 --env small_talk",
    "train": "--method.gamma 1 --max_steps 6 --env small_talk",
    "space": {"method": ["kl_control", "psi"], "method.c": [0.05, 0.5]},
    "evaluate": "--env small_talk --episodes 8",
}


def sweep(**changes) -> Sweep:
    return Sweep(**{"title": "t", "about": "a", "space": {"method": ["bc"]}} | changes)


def written(folder: Path, **changes) -> str:
    path = folder / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({name: value for name, value in (TINY | changes).items() if value is not None})
    )
    return str(path)


def test_points_are_all_combinations_and_their_names_say_so() -> None:
    points = find_points(sweep(space={"method": ["kl_control", "psi"], "method.c": [0.05, 1.0]}))
    assert [point.name for point in points] == [
        "kl_control,c=0.05",
        "kl_control,c=1",
        "psi,c=0.05",
        "psi,c=1",
    ]
    union = find_points(sweep(space=[{"method": ["bc"]}, {"method": ["ilql"], "method.tau": [0.7, 0.9]}]))
    assert [point.values for point in union] == [
        {"method": "bc"},
        {"method": "ilql", "method.tau": 0.7},
        {"method": "ilql", "method.tau": 0.9},
    ]


def test_values_are_passed_on_whole_and_two_points_never_share_a_name() -> None:
    assert Point({"method.gamma": 0.99999, "max_steps": 123456}).flags == [
        "--method.gamma",
        "0.99999",
        "--max_steps",
        "123456",
    ]
    with pytest.raises(ConfigError, match=r"points of different names.*0\.99999.*are both gamma=1"):
        find_points(sweep(space={"method.gamma": [0.99999, 1.0]}))


def test_a_long_name_is_cut_and_stays_its_own(tmp_path: Path) -> None:
    """Beside it `bc,`, the seed and what writing a file adds have to go into the 255 bytes of a disk."""
    texts = ["ü" * 150 + end for end in ("1", "2")]
    long = find_points(sweep(space={"method": ["bc"], "start.data": texts}))
    assert len({point.name for point in long}) == 2
    for point in long:
        assert point.name.startswith("bc,data=üüü") and len(point.name.encode()) <= 219
        write_json(tmp_path / f"bc,{point.name}-seed{2**31}.json", {})
    short = Point({"method.gamma": "x" * 213})
    assert short.name == "gamma=" + "x" * 213


def test_draws_lie_within_their_limits_and_are_the_same_every_time() -> None:
    space = {
        "method": ["ilql"],
        "learning_rate": {"loguniform": [1e-4, 1e-2]},
        "method.tau": {"uniform": [0.5, 0.9]},
        "model.layers": {"randint": [1, 3]},
    }
    points = find_points(sweep(space=space, samples=200))
    assert len(points) == 200 and points == find_points(sweep(space=space, samples=200))
    rates = sorted(point.values["learning_rate"] for point in points)
    assert (
        rates[0] >= 1e-4 and rates[-1] <= 1e-2 and 5e-4 < rates[100] < 2e-3
    )  # the median of a log-uniform one is its middle, 1e-3
    assert {point.values["model.layers"] for point in points} == {1, 2, 3}
    # a sweep that is made in pieces draws what the whole one draws
    other = {"method": ["mc"], "method.beta": {"uniform": [1, 9]}}
    union = find_points(sweep(space=[other, space], samples=3))
    assert union == [
        *find_points(sweep(space=[other], samples=3)),
        *find_points(sweep(space=[space], samples=3)),
    ]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ([{}], "expected a mapping of flags to values"),
        ({"method": ["bc", "psi"]}, "method: expected none of bc, which all points start from"),
        ({"method.c": []}, "method.c: expected a list of values or one of uniform, loguniform, randint, got"),
        ({"method.c": 0.5}, "method.c: expected a list of values"),
        (
            {"method.c": {"normal": [0, 1]}},
            "method.c: expected a list of values or one of uniform, loguniform, randint with",
        ),
        ({"method.c": {"uniform": [1, 0]}}, "low below high"),
        ({"method.c": {"loguniform": ["1e-4", "1e-2"]}}, r"write 1\.0e-4"),
    ],
)
def test_a_space_that_says_nothing_is_refused(tmp_path, space, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(written(tmp_path, space=space))


def test_a_parameter_of_a_stage_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"start\.model\.layers is about the bc that trials start from, but the file has no start",
    ):
        read_sweep(written(tmp_path, start=None, space={"start.model.layers": [1]}))
    with pytest.raises(
        ConfigError, match=r"evaluate\.beta is about the evaluation, but the file has no evaluate"
    ):
        read_sweep(written(tmp_path, evaluate=None, space={"evaluate.beta": [1]}))
    with pytest.raises(ConfigError, match=r"expected no evaluate\.\*"):
        read_sweep(written(tmp_path, search="optuna", space={"evaluate.beta": [1]}))


def test_every_stage_has_its_flags() -> None:
    point = Point(
        {
            "method": "ilql",
            "prepare.rewards.vote": 1,
            "start.model.layers": 2,
            "evaluate.do_sample": False,
            "method.double_q": True,
        }
    )
    assert point.name == "ilql,vote=1,layers=2,do_sample=False,double_q=True"
    assert point.of("train").flags == ["--method", "ilql", "--method.double_q"]
    assert point.of("prepare").flags == ["--rewards.vote", "1"] and point.of("start").flags == [
        "--model.layers",
        "2",
    ]
    assert point.of("evaluate").flags == ["--no_do_sample"]
    assert point.trained.name == "ilql,vote=1,layers=2,double_q=True"


def test_a_file_without_a_space_and_a_misspelt_halving_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="expected a space"):
        read_sweep(written(tmp_path, space={}))
    with pytest.raises(ConfigError, match="halving: expected factor, grace, got graze"):
        read_sweep(written(tmp_path, halving={"graze": 2}))


ONLINE = {"train": None, "online": "--env small_talk", "space": {"method.c": [0.1, 0.5]}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logs": ["mine.jsonl"]}, "expected logs, which are read, or write_logs.*got both"),
        ({"write_logs": {"seed": 1}}, "write_logs: dialogs: expected a whole number of at least 1, got None"),
        ({"write_logs": {"dialogs": "many", "seed": 1}}, "dialogs: expected a whole number.*'many'"),
        ({"write_logs": {"dialogs": 5, "seed": -1}}, "seed: expected a whole number of at least 0, got -1"),
    ],
)
def test_logs_that_a_world_writes(tmp_path: Path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(written(tmp_path, **changes))


@pytest.mark.parametrize("flags", ["--max_steps 6 --env toy_graph", "--episodes 8 --env=toy_graph"])
def test_logs_are_of_the_world_that_is_played_in(flags) -> None:
    logs = {"dialogs": 5, "seed": 1}
    with pytest.raises(
        ConfigError, match="x: write_logs: .* of small talk, and --env is toy_graph: expected"
    ):
        check_world("x", logs, [flags])
    check_world("x", logs | {"world": "toy_graph"}, [flags])
    check_world("x", logs, ["--env small_talk --env_episodes 4"])
    check_world("x", {}, [flags])


def test_trials_of_a_sweep_learn_from_logs_or_from_what_they_play(tmp_path: Path) -> None:
    found = read_sweep(written(tmp_path, **ONLINE))
    assert (found.verb, found.flags) == ("online", "--env small_talk")
    assert read_sweep(written(tmp_path)).verb == "train"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "--max_steps 3"}, "expected either train or online, .*got both"),
        ({"start": None}, "online: expected start, flags of the bc"),
        ({"space": {"prepare.rewards.vote": [1, 2]}}, r"vote changes data, .*\{data\} among the flags"),
    ],
)
def test_what_trials_of_online_cannot_be_is_said(tmp_path: Path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(written(tmp_path, **ONLINE | changes))


def test_data_of_a_mix_may_be_what_trials_reply_to(tmp_path: Path) -> None:
    space = {"prepare.rewards.vote": [1, 2]}
    online = "--contexts {data} --rewards.question 1"
    assert read_sweep(written(tmp_path, **ONLINE | {"online": online, "space": space})).space == space


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"title": None, "about": None}, "expected 'title', 'about' too, which Sweep needs"),
        ({"space": {"method.c": {"loguniform": [0, 1]}}}, r"method\.c: expected limits above 0 .*\[0, 1\]"),
        ({"space": {"method.samples": {"randint": [1.5, 3.2]}}}, "expected whole numbers for randint"),
        ({"space": {"seed": {"randint": [0, 10**20]}}}, "expected whole numbers .*of at most 18 digits"),
        ({"space": {"start": ["--seed 1"]}}, "expected a flag of start, as start.FLAG"),
        ({"space": [{"seed": [date(2026, 1, 1)]}]}, "seed: expected numbers and texts, got datetime.date"),
        ({"space": {"seed": [[]]}}, "seed: expected numbers and texts, got ..: put it in quotes"),
        ({"space": {1: [2]}}, "space: expected names of flags, got 1"),
        ({"samples": 0}, "samples: expected at least 1, got 0"),
        ({"search": "optuna", "batch": 0}, "batch: expected at least 1, got 0"),
        ({"seeds": []}, "seeds: expected different numbers"),
        ({"seeds": [3, 3]}, "seeds: expected different numbers from 0 on, got .3, 3."),
        ({"halving": {"factor": 3}}, "halving: expected grace, the updates"),
        ({"halving": {"grace": 0}}, "halving: grace: expected at least 1, got 0"),
        ({"halving": {"grace": 10, "factor": 1}}, "halving: factor: expected at least 2, got 1"),
        ({"train": "--env 'small_talk"}, "train: expected flags as one types them, got no closing quotation"),
    ],
)
def test_numbers_without_a_sweep_and_limits_that_nothing_is_drawn_between_are_refused(
    tmp_path: Path, changes, message
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(written(tmp_path, **changes))
