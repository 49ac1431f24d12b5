"""The train verb as a user calls it: relative paths, a real worker, one paragraph for what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.small_talk import write_logs
from pipelines import evaluate, prepare, train
from rl_dialog.cluster.data import connect
from rl_dialog.config import load_config
from rl_dialog.data.shards import read_rows
from rl_dialog.errors import UserError
from rl_dialog.models import language_model
from rl_dialog.training.start import load_trainer, notes_before

ROOT = Path(__file__).parents[2]
SIZES = ["--model.layers", "1", "--model.width", "16"]
RESUMED = ["--data", "data", "--output_dir", "runs/bc", "--resume", *SIZES]
NEW = ["--data", "data", "--output_dir", "runs/x"]
PSI = [*NEW, "--method", "way_off_policy", "--method.backup", "psi"]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_logs(folder / "logs.jsonl", dialogs=60, seed=3)
    logs = ["--logs", "logs.jsonl", "--output_dir", "data", "--vocab_size", "400", "--quiet"]
    bc = ["--data", "data", "--output_dir", "runs/bc", *SIZES, "--max_steps", "2", "--quiet"]
    with pytest.MonkeyPatch.context() as patch, connect(num_cpus=2):
        patch.chdir(folder)
        prepare.main(load_config(prepare.PrepareConfig, logs))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main(load_config(train.TrainConfig, bc, choices=train.CHOICES))["step"] == 2
    shutil.copytree(
        folder / "runs" / "bc" / "checkpoint-2", folder / "runs" / "foreign"
    )  # as many tokens, two of which have changed places
    tokenizer = folder / "runs" / "foreign" / "tokenizer.json"
    words = json.loads(tokenizer.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.write_text(json.dumps(words))
    return folder


@pytest.mark.slow
def test_relative_paths_reach_the_workers_and_start_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on Ray learns to the last bit what this process does."""
    steps = ("--max_steps", "2", "--cpus_per_worker", "1", "--model_name_or_path", "runs/bc")
    flags = ("--data", "data", "--method", "way_off_policy", *steps)
    done = call(folder, "pipelines.train", *flags, "--output_dir", "runs/psi", "--num_workers", "1")
    assert done.returncode == 0, done.stderr
    assert (folder / "runs" / "psi" / "prior").is_dir() and "step 2:" in done.stdout
    monkeypatch.chdir(folder)
    here = [*flags, "--output_dir", "runs/psi_here", "--quiet"]
    train.main(load_config(train.TrainConfig, here, choices=train.CHOICES))
    weights = [Path("runs", name, "checkpoint-2", "model.safetensors") for name in ("psi", "psi_here")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "data"], "expected --output_dir"),
        (["--data", "nowhere", "--output_dir", "runs/x"], "nowhere"),
        (
            ["--data", "data", "--output_dir", "runs/bc"],
            "already holds a run of `train`: pass --resume to go on with it or --overwrite",
        ),
        (["--data", "data", "--output_dir", "runs/bc", "--resume", "--overwrite"], "to delete it, got both"),
        (
            [*RESUMED, "--method", "ilql"],
            "was made with other settings: --method name 'bc' then and 'ilql' now",
        ),
        (
            [*RESUMED, "--learning_rate", "0.1"],
            "--learning_rate None then and 0.1 now. Resume it with the same ones",
        ),
        (
            [*RESUMED, "--model.width", "32", "--model.detach_q"],
            "other settings: --model width 16 then and 32 now, detach_q False then and True now. Resume",
        ),
        (["--data", "data", "--output_dir", "data"], "was not made by `train`, so it is left alone"),
        (
            ["--data", "data", "--output_dir", "runs/x", "--learning_rat", "1"],
            "Did you mean --learning_rate?",
        ),
        (["--data", "data", "--output_dir", "runs/x", "--env", "smalltalk"], "unknown env 'smalltalk'"),
        (
            ["--data", "data", "--output_dir", "runs/x", "--prior", "runs/bc"],
            "--prior: bc has none; way_off_policy, dpo",
        ),
        (
            ["--data", "data", "--output_dir", "runs/x", "--method", "ilql", "--prior", "runs/bc"],
            "--prior: ilql has none",
        ),
        (
            [*PSI, "--prior", "runs/bc", "--prior_weights", "1", "2"],
            "--prior_weights: expected one for each of the 1 checkpoints",
        ),
        (
            [*PSI, "--prior", "runs/bc", "runs/bc", "--prior_weights", "1", "nan"],
            "expected a finite number for --prior_weights, got nan",
        ),
        (
            [*PSI, "--prior", "runs/bc", "runs/bc", "--prior_weights", "1", "0"],
            "--prior_weights: expected finite numbers above 0, got [1.0, 0.0]",
        ),
        (
            [*PSI, "--prior", "runs/bc", "runs/foreign"],
            "tokens that are not those of runs/foreign (400): train a prior on data",
        ),
        ([*PSI, "--prior", "runs/nowhere"], "runs/nowhere: expected a directory with a model"),
        ([*NEW, "--num_train_epochs", "0"], "expected --num_train_epochs above 0, got 0: nothing would"),
        ([*NEW, "--device", "cdua"], "--device cdua: expected auto, cpu, cuda"),
        (
            [*NEW, "--model.family", "hred", "--model.bow_weight", "1"],
            "--model.bow_weight 1: a new hred has no use for it, expected --model.family vhred or vhcr",
        ),
        (
            [*NEW, "--model.family", "vhcr", "--model.attention_heads", "2"],
            "--model.attention_heads 2: a new vhcr has no use for it, expected --model.family llama or gpt2",
        ),
        (
            [*NEW, "--model_name_or_path", "runs/bc", "--model.width", "32"],
            "--model.width 32 is about a new model, expected none beside --model_name_or_path runs/bc",
        ),
        (
            [*NEW, "--model.width", "30", "--model.attention_heads", "4"],
            "--model.width 30 with --model.attention_heads 4: expected a multiple of 8",
        ),
        ([*NEW, "--model.width", "0"], "--model.width 0: expected a multiple of 2, above 0"),
        ([*NEW, "--model.attention_heads", "0"], "--model.attention_heads 0: expected at least one head"),
        ([*NEW, "--model.word_drop", "0.1"], "--model.word_drop 0.1: a new llama has no use for it"),
    ],
)
def test_what_is_wrong_is_said_before_a_worker_starts(
    folder: Path, monkeypatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as error:
        train.main(load_config(train.TrainConfig, arguments, choices=train.CHOICES))
    assert expected in str(error.value) and not Path("runs/x").exists()


def test_a_resume_that_is_refused_leaves_the_settings_of_the_run(folder: Path, monkeypatch) -> None:
    """Only when all is loaded is it known that the batches would not be those of the run."""
    monkeypatch.chdir(folder)
    shutil.copytree("runs/bc", "runs/kept", dirs_exist_ok=True)
    settings = Path("runs/kept/train.yaml")
    before = settings.read_text()
    arguments = ["--data", "data", "--output_dir", "runs/kept", "--resume", *SIZES, "--quiet"]
    refused = [*arguments, "--max_steps", "9", "--per_device_train_batch_size", "3"]
    with pytest.raises(UserError, match="expected to resume a run with"):
        train.main(load_config(train.TrainConfig, refused, choices=train.CHOICES))
    assert settings.read_text() == before
    went_on = load_config(train.TrainConfig, [*arguments, "--max_steps", "3"], choices=train.CHOICES)
    assert train.main(went_on)["step"] == 3 and "max_steps: 3" in settings.read_text()


@pytest.mark.parametrize("text", ["", "[1]", '{"model_type"'])
def test_a_model_to_start_from_whose_config_is_none_is_told(folder: Path, monkeypatch, text: str) -> None:
    monkeypatch.chdir(folder)
    Path("runs/broken").mkdir(exist_ok=True)
    Path("runs/broken/config.json").write_text(text)
    arguments = [*NEW, "--model_name_or_path", "runs/broken"]
    with pytest.raises(UserError, match="broken/config.json: expected the JSON object that describes"):
        train.main(load_config(train.TrainConfig, arguments, choices=train.CHOICES))


@pytest.mark.slow
def test_an_error_is_one_paragraph_and_status_2(folder: Path) -> None:
    done = call(folder, "pipelines.train", *RESUMED, "--method", "ilql")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error:" in done.stderr and "was made with other settings: --method" in " ".join(
        done.stderr.split()
    )


def test_a_prior_that_a_killed_run_left_is_replaced_and_that_of_a_started_run_is_kept(
    folder: Path, monkeypatch
) -> None:  # noqa: ANN001
    """The second run says so in its notes, also for who follows it; resumed with the first one's prior it is
    refused."""
    monkeypatch.chdir(folder)
    new = ("--model.layers", "1", "--model.width", "16", "--max_steps", "1", "--report_to", "none")
    flags = ["--data", "data", "--output_dir", "runs/stale", "--method", "way_off_policy", *new]
    left, config = (
        load_config(train.TrainConfig, [*flags, *prior], choices=train.CHOICES)
        for prior in (["--prior", "runs/bc"], [])
    )
    load_trainer(left, Path(left.output_dir), [], device=torch.device("cpu"))
    told = train.train_worker(config)["notes"]
    expected = (
        "held another prior (another model) of a run that wrote no checkpoint: it is replaced by the model as"
        " it is before training"
    )
    assert [note for note in told if expected in note] and expected in (
        folder / "runs" / "stale" / "notes.txt"
    ).read_text()
    with pytest.raises(
        UserError,
        match=(
            "prior: expected the prior of this run, runs/bc, found another model, .* resume with the same "
            "--model"
        ),
    ):
        train.train_worker(left)
    train.train_worker(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1.0},
        {"weight_decay": float("nan")},
        {"env_episodes": 0},
        {"per_device_train_batch_size": 0},
        {"logging_steps": 0},
        {"max_steps": -1},
        {"max_failures": -1},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_told(wrong):
    with pytest.raises(UserError, match=f"expected --{next(iter(wrong))} of at least [01], got"):
        train.check(train.TrainConfig(data="data", output_dir="runs/x", **wrong))


def test_a_refused_run_leaves_its_folder_to_the_next_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dpo learns from pairs, which these logs have not; its frozen prior is written before that is known, and
    how it judges replies is told."""
    monkeypatch.chdir(folder)
    wanted = ["--data", "data", "--model_name_or_path", "runs/bc", "--output_dir", "runs/refused", "--quiet"]
    refused = load_config(train.TrainConfig, [*wanted, "--method", "dpo"], choices=train.CHOICES)
    for _ in range(2):
        with pytest.raises(UserError, match="pairs"):
            train.main(refused)


def test_tokens_are_compared_however_a_tokenizer_is_stored(folder: Path, monkeypatch) -> None:
    """As GPT-2's older checkpoints have it; without one the run starts, which is said."""
    monkeypatch.chdir(folder)
    shutil.copytree("runs/bc/checkpoint-2", "runs/older")
    words = json.loads(Path("runs/older/tokenizer.json").read_text())["model"]
    for path in Path("runs/older").glob("tokenizer*"):
        path.unlink()
    arguments = [*NEW, "--model_name_or_path", "runs/older"]
    config = load_config(train.TrainConfig, arguments, choices=train.CHOICES)
    train.check(config)
    assert notes_before(config, measured=False) == [
        "runs/older has no tokenizer: whether data has the tokens that it knows cannot be told"
    ]
    Path("runs/older/vocab.json").write_text(json.dumps(words["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in words["merges"])
    Path("runs/older/merges.txt").write_text(f"#version: 0.2\n{merges}")
    Path("runs/older/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(UserError, match="tokens that are not those of runs/older"):
        train.check(config)


def test_what_to_know_about_a_run_is_told(folder: Path) -> None:
    """No validation dialogs, and how tf_top chose to judge replies: in words and in the line of JSON."""
    shutil.copytree(folder / "data", folder / "whole")
    manifest = json.loads((folder / "whole" / "manifest.json").read_text())
    manifest["splits"]["validation"] |= {"dialogs": 0, "shards": []}
    (folder / "whole" / "manifest.json").write_text(json.dumps(manifest))
    sizes = ("--model.layers", "1", "--model.width", "16", "--max_steps", "1")
    flags = ("--data", "whole", "--output_dir", "runs/top", "--method", "tf_top", *sizes)
    done = call(folder, "pipelines.train", *flags)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    unseen, judged = json.loads(last)["notes"]
    assert "has no validation dialogs" in unseen and judged.startswith("tf_top judges by dialog: ")
    assert [line for line in lines if line.startswith("note: ")] == [f"note: {unseen}", f"note: {judged}"]
    assert "Warning" not in done.stderr  # what is a note is not a warning of Python's too


WORLD = """
class Lengths:
    \"\"\"Two turns; a reply earns its words.\"\"\"

    @staticmethod
    def reference_returns(episodes, seed):
        return {"a word each": [2.0] * episodes}

    def reset(self, *, seed=None):
        self.messages = [{"role": "user", "content": f"guest {seed % 7}"}]
        return list(self.messages), {}

    def step(self, reply):
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
        return list(self.messages), float(len(reply.split())), len(self.messages) > 4, False, {}
"""


@pytest.mark.slow
def test_a_world_of_ones_own_is_played_by_workers_of_every_kind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the training worker, in one process, by actors and side by side: the same returns."""
    (folder / "guests.py").write_text(WORLD)
    sizes = ("--model.layers", "1", "--model.width", "16", "--max_steps", "1", "--env_episodes", "4")
    where = ("--data", "data", "--output_dir", "runs/own", "--env", "guests:Lengths")
    done = call(folder, "pipelines.train", *where, *sizes, "--num_workers", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["eval/return"] > 0
    flags = ("--checkpoints", "runs/own", "--env", "guests:Lengths", "--episodes", "6")
    flags += ("--max_new_tokens", "6")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    here = evaluate.main(load_config(evaluate.EvaluateConfig, [*flags, "--output_dir", "here", "--quiet"]))
    found = [(json.loads(json.dumps(here["figures"])), here["references"])]
    for name, how in (("actors", ("--num_workers", "2")), ("beside", ("--side_by_side",))):
        done = call(folder, "pipelines.evaluate", *flags, "--output_dir", name, *how)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        found.append((result["figures"], result["references"]))
    assert found[0] == found[1] == found[2] and found[0][1] == {"a word each": 2.0}


def test_a_new_hierarchical_model_begins_with_the_words_of_the_replies(folder: Path) -> None:
    flags = ["--data", str(folder / "data"), "--output_dir", str(folder / "runs" / "words")]
    flags += ["--model.family", "hred", "--model.width", "16"]
    config = load_config(train.TrainConfig, flags, choices=train.CHOICES)
    trainer = load_trainer(config, Path(config.output_dir), [], device=torch.device("cpu"))
    rows = list(read_rows(config.data, "train"))
    bias = trainer.policy.get_output_embeddings().bias
    said = sum(np.bincount(row.input_ids[row.assistant], minlength=len(bias)) for row in rows)
    said = torch.from_numpy(said)
    torch.testing.assert_close(bias.detach().exp(), (said + 1) / (said + 1).sum())
    # the words alone make replies likelier than equal shares of the vocabulary do
    assert trainer._evaluation()["eval/nll"] < np.log(len(bias)) - 0.5


def test_a_run_goes_on_with_the_model_that_it_began_with(folder: Path, monkeypatch) -> None:  # noqa: ANN001
    """A new model made by an earlier version, whose output has no levels of words."""
    flags = ["--data", str(folder / "data"), "--output_dir", str(folder / "runs" / "begun_before"), "--quiet"]
    flags += ["--model.family", "hred", "--model.width", "16", "--report_to", "none", "--max_steps"]
    today = language_model._new_hierarchical_config

    def older(*arguments: object) -> object:
        config = today(*arguments)
        config.output_bias = False
        return config

    with monkeypatch.context() as patch:
        patch.setattr(language_model, "_new_hierarchical_config", older)
        train.main(load_config(train.TrainConfig, [*flags, "2"], choices=train.CHOICES))
    result = train.main(load_config(train.TrainConfig, [*flags, "3", "--resume"], choices=train.CHOICES))
    assert result["step"] == 3
    assert json.loads((Path(result["latest"]) / "config.json").read_text())["output_bias"] is False
