"""What README says is there, is there."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines import compare, online, train, tune
from pipelines.__main__ import VERBS, overview
from pipelines.__main__ import main as run_verb
from rl_dialog.cluster.sweep_experiment import SweepExperiment
from rl_dialog.config import INSTALLED, ConfigError, load_config
from rl_dialog.data.readers import find_logs
from rl_dialog.evaluation.comparison import replace_table
from rl_dialog.evaluation.comparison_file import read_comparison, write_search
from rl_dialog.evaluation.sweep_space import find_points, read_sweep

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    path
    for path in ROOT.rglob("README.md")
    if not {part for part in path.relative_to(ROOT).parts if part.startswith(".")}
)


def commands(path: Path) -> list[list[str]]:
    """Every `python -m pipelines.VERB ...` of a page's code, with continued lines joined and comments
    dropped."""
    text = path.read_text(encoding="utf-8")
    blocks = [*re.findall(r"```bash\n(.*?)```", text, re.S), *re.findall(r"(?:^ {4}.*\n)+", text, re.M)]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [
        line[line.index("python -m pipelines.") :]
        for line in lines
        if re.search(r"python -m pipelines\.[a-z]", line)
    ]
    return [shlex.split(re.split(r" #|\|| && ", line)[0])[2:] for line in found]


def config_of(verb: str) -> tuple[type, dict[str, Any] | None]:
    """The config of a verb, and its choices."""
    module = importlib.import_module(
        f"pipelines.{verb}" + (".__main__" if (ROOT / "pipelines" / verb).is_dir() else "")
    )
    if hasattr(module, "__path__"):  # a package runs by its __main__
        module = importlib.import_module(f"pipelines.{verb}.__main__")
    return typing.get_type_hints(module.main)["config"], getattr(module, "CHOICES", None)


@pytest.mark.parametrize("step", ["run", "test"])
def test_the_marked_blocks_are_there(step: str) -> None:
    assert re.search(rf"<!-- newcomer: {step} -->\s*```bash\n(.*?)```", README, re.S)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_has_known_flags(path: Path) -> None:
    for command in commands(path):
        verb = command[0].removeprefix("pipelines.")
        assert verb in VERBS, command
        config_class, choices = config_of(verb)
        load_config(config_class, command[1:], choices=choices)


def test_the_overview_lists_every_verb() -> None:
    """A verb is a module of pipelines/ that runs a config."""
    ours = {
        path.stem
        for path in (ROOT / "pipelines").glob("*.py")
        if 'if __name__ == "__main__":\n    run(' in path.read_text(encoding="utf-8")
    }
    assert ours | {"benchmark"} == VERBS.keys()
    assert all(name in overview() for name in VERBS)


def test_a_verb_that_is_not_there_is_told_and_the_version_is(monkeypatch, capsys) -> None:
    def typed(*words: str) -> tuple[int | None, str]:
        monkeypatch.setattr("sys.argv", ["rl-dialog", *words])
        status = None
        try:
            run_verb()
        except SystemExit as end:
            status = end.code
        return status, "".join(capsys.readouterr())

    assert typed("trian")[0] == typed("--verison")[0] == 2
    assert "unknown verb 'trian'" in typed("trian")[1] and "Did you mean train?" in typed("trian")[1]
    assert "unknown verb '--verison'" in typed("--verison")[1]
    status, told = typed("--version")
    assert status is None and told.startswith("rl-dialog ")
    assert typed() == typed("--help") == typed("help") == (None, overview() + "\n")


@pytest.mark.parametrize(
    ("installed", "typed"), [("", "python -m pipelines.prepare"), ("1", "rl-dialog prepare")]
)
def test_help_tells_what_a_verb_does_with_the_commands_as_they_are_typed(
    installed, typed, monkeypatch, capsys
):
    monkeypatch.setenv(INSTALLED, installed)
    config_class, choices = config_of("prepare")
    with pytest.raises(SystemExit):
        load_config(config_class, ["--help"], choices=choices)
    told = capsys.readouterr().out
    assert "Logs of any known format to a data directory" in told and f"{typed} --logs chats/" in told
    assert ("python -m pipelines" in told) is not bool(installed) and "--max-length" in told


@pytest.mark.parametrize(
    ("verb", "told", "untold"),
    [
        ("train", ["  ilql  ", "Implicit Language Q-Learning", "belong to `online`"], "  rloo  "),
        ("online", ["  rloo  ", "leave-one-out"], "  ilql  "),
        (
            "prepare",
            ["--rewards.module:function WEIGHT", "  repetition  ", "already used in this dialog"],
            "ilql",
        ),
    ],
)
def test_help_explains_each_name_that_the_verb_takes(verb, told, untold, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", [f"pipelines/{verb}.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "pipelines" / f"{verb}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert all(text in shown for text in told) and untold not in shown


def test_help_that_is_not_read_to_its_end_ends_without_a_word() -> None:
    command = f"{sys.executable} -m pipelines.label --help | head -c 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("u", "")


def test_pages_are_named_by_where_they_lie(monkeypatch, tmp_path) -> None:
    """In the repository by their names in it, elsewhere in full: there is no envs/README.md in the folder of
    somebody who works with the installed package."""
    monkeypatch.chdir(ROOT)
    assert "\npipelines/README.md names" in overview() and str(ROOT) not in overview()
    monkeypatch.chdir(tmp_path)
    assert f"{ROOT}/pipelines/README.md names" in overview() and f"lie in {ROOT}." in overview()
    (tmp_path / "table.csv").write_text("Wer?;Text\nich;ja\n")
    _, [unknown], _ = find_logs(["table.csv"])
    assert f"{ROOT}/rl_dialog/data/README.md has one for tables" in unknown.reason


def test_every_file_it_names_exists() -> None:
    figure = re.search(r"```mermaid\n(.*?)```", README, re.S).group(1)
    for name in re.findall(r"[\w/]+/[\w*]+\.py", figure):
        assert any(ROOT.glob(name)) or any((ROOT / "rl_dialog").glob(name)), name
    for name in re.findall(r"^\| `([\w/.]+)` \|", README.split("## Map")[1], re.M):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize(
    ("verb", "typed", "meant"),
    [
        ("train", "checkpoint", "model_name_or_path"),
        ("online", "checkpoint", "model_name_or_path"),
        ("chat", "model_name_or_path", "checkpoint"),
        ("evaluate", "model_name_or_path", "checkpoints"),
        ("train", "lr", "learning_rate"),
        ("train", "batch_size", "per_device_train_batch_size"),
        ("prefer", "use_gpu", "device"),
        ("simulate", "workers", "num_workers"),
    ],
)
def test_a_flag_by_its_name_elsewhere_gets_the_name_here(verb: str, typed: str, meant: str) -> None:
    kind, choices = config_of(verb)
    with pytest.raises(ConfigError, match=rf"unknown flag --{typed}\. Did you mean --{meant}\?"):
        load_config(kind, [f"--{typed}", "x"], choices=choices)


TABLES, SWEEPS, ROUNDS = (
    sorted((ROOT / "tune_configs").glob(f"{kind}_*.yaml")) for kind in ("compare", "sweep", "online")
)


OTHERS = sorted({*(ROOT / "tune_configs").glob("*.yaml")} - {*TABLES, *SWEEPS, *ROUNDS})


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_every_config_loads_and_says_its_command(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith(
        f"# python -m pipelines.train --config tune_configs/{path.name}"
    )
    assert load_config(train.TrainConfig, ["--config", str(path)], choices=train.CHOICES).max_steps > 0


@pytest.mark.parametrize("path", ROUNDS, ids=lambda path: path.name)
def test_every_online_config_loads_and_says_its_command(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    command = f"# python -m pipelines.online --config tune_configs/{path.name} --model_name_or_path "
    assert first.startswith(command)
    config = load_config(online.OnlineConfig, ["--config", str(path)], choices=online.CHOICES)
    assert (config.env or " --contexts " in first) and config.method.online


@pytest.mark.slow
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_table_has_known_flags_and_says_its_command(path: Path, tmp_path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(
        f"# python -m pipelines.compare --experiments tune_configs/{path.name} --output_dir runs/"
    )
    config = load_config(compare.CompareConfig, shlex.split(first)[4:])
    assert not config.readme or replace_table((ROOT / config.readme).read_text(encoding="utf-8"), "")
    found = read_comparison(str(path))
    assert all(compare.plan(found, name, tmp_path, {}) for name in found.tasks)
    for name in (name for name, task in found.tasks.items() if task.search):  # is what it goes by measured?
        place = write_search(found, name, tmp_path)
        sweep = read_sweep(str(place))
        points = find_points(replace(sweep, samples=1))
        SweepExperiment(sweep, tmp_path, tune.stages).check(points, where=str(place))


@pytest.mark.slow
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_every_sweep_has_known_flags_and_says_its_command(path: Path, tmp_path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# python -m pipelines.tune --sweep tune_configs/{path.name} --output_dir runs/")
    sweep = read_sweep(str(path))
    experiment = SweepExperiment(sweep, tmp_path, tune.stages)
    assert all(list(experiment.trials_of(point)) for point in find_points(sweep))
