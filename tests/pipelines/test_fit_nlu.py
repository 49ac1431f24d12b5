"""`fit_nlu` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.multiwoz import Options
from envs.multiwoz.acts import acts_of
from envs.multiwoz.lexical import PLACEHOLDER
from pipelines.converse import ConverseConfig
from pipelines.converse import main as converse
from pipelines.fit_nlu import FitNluConfig, main
from rl_dialog.config import load_config
from rl_dialog.data.labelled import labelled_turns
from rl_dialog.data.readers import read_logs
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError

DATA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[2] / "../shared/data")) / "multiwoz"


def test_records_that_cannot_be_read_are_quarantined(tmp_path, monkeypatch):
    """And told where nothing else is left."""
    monkeypatch.chdir(tmp_path)
    logs, small = (
        tmp_path / "dialogs.jsonl",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_train_epochs": 0.1, "min_count": 1, "quiet": True},
    )
    turns = [
        {"role": "user", "content": "in the east", "acts": [["Inform", "Hotel", "Area", "east"]]},
        {"role": "assistant", "content": "y"},
    ]
    write_jsonl([Dialog(f"a{i}", turns) for i in range(40)], logs)
    with open(logs, "a", encoding="utf-8") as file:
        file.write('{"id": "b", "messages": [{"role": "nobody"}]}\n')
    result = main(FitNluConfig(logs=(str(logs),), output_dir="nlu", **small))
    assert result["quarantined"] == 1 and result["output_dir"] == str(tmp_path / "nlu")
    assert json.loads((tmp_path / "nlu/quarantine.jsonl").read_text())["where"].startswith("line 41")
    logs.write_text(
        logs.read_text().splitlines()[-1]
        + "\n"
        + json.dumps({"messages": [{"role": "user", "content": "x"}]})
        + "\n"
    )
    with pytest.raises(
        UserError, match="expected dialogs with acts.*the first of 1 records that cannot be read is .*line 1"
    ):
        main(FitNluConfig(logs=(str(logs),), output_dir=str(tmp_path / "none"), **small))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected --output_dir"),
        (["--output_dir", "x", "--simulated", "0"], "expected something to learn from"),
        (
            ["--output_dir", "x", "--validation", "1"],
            "expected --validation of at least 0 and below 1, got 1",
        ),
        (["--output_dir", "x", "--hidden_size", "100"], "multiple of 32"),
        (["--output_dir", "x", "--learning_rate", "0"], "expected --learning_rate above 0"),
        (["--output_dir", "x", "--logs", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_explained(arguments, told):
    with pytest.raises(UserError, match=told):
        main(load_config(FitNluConfig, arguments))


@pytest.mark.parametrize("wrong", [{"min_count": 10**6}, {"model_name_or_path": "./nowhere"}])
def test_an_earlier_model_stays_where_the_command_is_refused(wrong, tmp_path):
    for name in ("fit_nlu.yaml", "model.safetensors"):
        (tmp_path / name).touch()
    how = {"simulated": 20, "output_dir": str(tmp_path), "overwrite": True, "quiet": True}
    with pytest.raises(UserError, match="at least 1000000 times|nowhere"):
        main(FitNluConfig(**how | wrong))
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_generated_town_end_to_end(tmp_path):
    """Fitted from template words; the figures that it tells are those that it wrote, and dialogs can be held
    with it."""
    command = [
        sys.executable,
        "-m",
        "pipelines.fit_nlu",
        "--output_dir",
        str(tmp_path / "nlu"),
        "--simulated",
        "300",
        "--num_train_epochs",
        "8",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["simulated_user_f1"] > 0.8 and figures["simulated_system_f1"] > 0.6, (
        figures
    )  # .90 and .71 when this was written
    assert (
        json.loads((tmp_path / "nlu/metrics.json").read_text())["held_out"]["simulated"]["user"]["f1"]
        == figures["simulated_user_f1"]
    )
    spoken = converse(
        ConverseConfig(
            output_dir=str(tmp_path / "words"), nlu=str(tmp_path / "nlu"), episodes=100, quiet=True
        )
    )
    deaf = converse(
        ConverseConfig(
            output_dir=str(tmp_path / "noise"), options=Options(noise=1.0), episodes=100, quiet=True
        )
    )
    assert spoken["success"] > deaf["success"] + 0.2, (spoken, deaf)


@pytest.mark.realdata
def test_the_corpus_has_turns_to_learn_from():
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    found = list(labelled_turns(read_logs([DATA / "val.json.zip"])[0], acts_of, without=PLACEHOLDER))
    assert len(found) > 14_000 and len({turn.dialog for turn in found}) == 999
