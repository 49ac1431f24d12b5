"""What README says is there, is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipelines import (
    ab,
    analyse,
    candidates,
    chat,
    circle,
    compare,
    converse,
    evaluate,
    fit_reward,
    label,
    play,
    prefer_replies,
    prepare,
    simulate,
    talk,
    train,
    tune,
)
from rl_dialog.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGS = {
    "prepare": (prepare.PrepareConfig, None),
    "candidates": (candidates.CandidatesConfig, None),
    "prefer_replies": (prefer_replies.PreferRepliesConfig, None),
    "label": (label.LabelConfig, None),
    "play": (play.PlayConfig, None),
    "fit_reward": (fit_reward.FitRewardConfig, None),
    "train": (train.TrainConfig, train.CHOICES),
    "evaluate": (evaluate.EvaluateConfig, None),
    "chat": (chat.ChatConfig, None),
    "tune": (tune.TuneConfig, None),
    "circle": (circle.CircleConfig, None),
    "simulate": (simulate.SimulateConfig, None),
    "converse": (converse.ConverseConfig, None),
    "talk": (talk.TalkConfig, None),
}


def commands(text: str) -> list[list[str]]:
    """Every `python -m pipelines.VERB ...` of the fenced blocks, with continued lines joined and comments dropped."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ")
    found = [line[line.index("python -m pipelines.") :] for line in blocks.splitlines() if "python -m pipelines." in line]
    return [shlex.split(line, comments=True)[2:] for line in found]


@pytest.mark.parametrize("step", ["run", "test"])
def test_the_marked_blocks_are_there(step: str) -> None:
    assert re.search(rf"<!-- newcomer: {step} -->\s*```bash\n(.*?)```", README, re.S)


@pytest.mark.parametrize("command", commands(README), ids=lambda command: command[0])
def test_every_command_has_known_flags(command: list[str]) -> None:
    verb = command[0].removeprefix("pipelines.")
    assert (ROOT / "pipelines" / f"{verb}.py").is_file()
    if verb in CONFIGS:
        others = {"--compare": compare.CompareConfig, "--store": ab.ABConfig, "--simulated": analyse.AnalyseConfig} if verb == "evaluate" else {}
        config_class, choices = next(((other, None) for flag, other in others.items() if flag in command), CONFIGS[verb])
        load_config(config_class, command[1:], choices=choices)


def test_every_file_it_names_exists() -> None:
    figure = re.search(r"```mermaid\n(.*?)```", README, re.S).group(1)
    for name in re.findall(r"[\w/]+/[\w*]+\.py", figure):
        assert any(ROOT.glob(name)) or any((ROOT / "rl_dialog").glob(name)), name
    for name in re.findall(r"^\| `([\w/.]+)` \|", README.split("## Files")[1], re.M):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / link).exists(), link


TABLES, SWEEPS = (sorted((ROOT / "tune_configs").glob(f"{kind}_*.yaml")) for kind in ("compare", "sweep"))


@pytest.mark.parametrize("path", sorted({*(ROOT / "tune_configs").glob("*.yaml")} - {*TABLES, *SWEEPS}), ids=lambda path: path.name)
def test_every_config_loads_and_says_its_command(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith(f"# python -m pipelines.train --config tune_configs/{path.name}")
    assert load_config(train.TrainConfig, ["--config", str(path)], choices=train.CHOICES).max_steps > 0


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_table_has_known_flags_and_says_its_command(path: Path, tmp_path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# python -m pipelines.evaluate --compare tune_configs/{path.name} --out runs/")
    found = compare.read_comparison(compare.CompareConfig(compare=str(path), out=str(tmp_path)))
    assert all(compare.plan(found, name, tmp_path, {}) for name in found.tasks)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_every_sweep_has_known_flags_and_says_its_command(path: Path, tmp_path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# python -m pipelines.tune --sweep tune_configs/{path.name} --out runs/")
    sweep = tune.read_sweep(str(path))
    assert all(list(tune.plan_trials(sweep, point, tmp_path)) for point in tune.find_points(sweep))
