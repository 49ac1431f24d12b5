"""The examples of what a user can bring: as they stand beside what they extend, and copied into a folder of
the user's."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from envs import text_env
from rl_dialog.config import ConfigError, choice_class
from rl_dialog.data.batch import collate
from rl_dialog.data.readers import Bad, find_logs, read_log
from rl_dialog.data.schema import Dialog
from rl_dialog.methods import METHODS
from rl_dialog.methods.example import Smoothed
from rl_dialog.models.policy import Policy
from rl_dialog.rewards import choose_rewards

ROOT = Path(__file__).parent.parent
EXAMPLES = (
    "rl_dialog/rewards/example.py",
    "rl_dialog/methods/example.py",
    "rl_dialog/data/formats/example.py",
    "envs/example.py",
)


def test_the_reader_of_a_table_on_the_page(tmp_path, monkeypatch):
    """Another language, a byte order mark, quotes, a line break in a cell, an empty cell, a broken row; and
    the same table in Latin-1, which is told how to become readable."""
    page = (ROOT / "rl_dialog/data/README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "table_on_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rows = ["Ticket no.;Sent;Who?;Text", 'K-1;10:00;Customer;"Ich möchte ""sofort"" Geld;\nbitte"']
    rows += ["K-1;10:01;Agent;Tut mir leid", "K-2;10:00;Customer;", "K-2;10:01;Agent;Hallo?", "K-3;9:00;?;Hm"]
    rows += ["K-4;9:00;Customer;Und ich?"]
    for encoding in ("utf-8-sig", "latin-1"):
        (tmp_path / f"{encoding}.csv").write_text("\n".join(rows), encoding=encoding)
    [log], bad, _ = find_logs([str(tmp_path / "utf-8-sig.csv")], reader="table_on_the_page:read")
    first, second, broken, last = read_log(log)
    assert not bad and first.id.endswith("K-1") and second.messages[0]["content"] == ""
    texts = [message["content"] for message in first.messages]
    assert texts == ['Ich möchte "sofort" Geld;\nbitte', "Tut mir leid"]
    assert isinstance(broken, Bad) and "role" in broken.reason and "'?'" in broken.reason
    assert last.messages == [{"role": "user", "content": "Und ich?"}]
    [log], *_ = find_logs([str(tmp_path / "latin-1.csv")], reader="table_on_the_page:read")
    [told] = read_log(log)
    assert "expected UTF-8 text, got the byte 0xf6" in told.reason and "iconv" in told.reason
    _, [unknown], _ = find_logs([str(tmp_path / "utf-8-sig.csv")])
    assert "--reader module:function" in unknown.reason


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_is_short(path):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) < 40


def test_the_reward():
    name = "rl_dialog.rewards.example:names_the_user"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello Ann."}]
    messages += [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "Good."}]
    reward = choose_rewards([name])[name]
    assert reward(Dialog("a", messages, meta={"user_name": "Ann"})) == [1.0, 0.0]
    assert reward(Dialog("a", messages)) == [None, None]


def test_the_reader(tmp_path):
    """A gzipped file in a folder; the second conversation ends with the user, and a file without any is
    told."""
    text = "ANN: Is the museum open?\nBOT: Until six.\n---\nANN: Thanks: bye\n"
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "empty.txt").write_text("nothing")
    logs, bad, _ = find_logs([str(tmp_path)], reader="rl_dialog.data.formats.example:read")
    found = [item for log in logs for item in read_log(log)]
    assert not bad and [type(item) for item in found] == [Dialog, Dialog, Bad]
    assert [message["content"] for message in found[0].messages] == ["Is the museum open?", "Until six."]
    assert (
        found[0].id != found[1].id
        and found[0].source == tmp_path.name
        and found[1].messages[0]["content"] == "Thanks: bye"
    )
    assert "without any record" in found[2].reason


def test_a_reader_that_fails_keeps_what_came_before(tmp_path, monkeypatch):
    (tmp_path / "own_reader.py").write_text(
        "def read(file):\n"
        "    yield {'messages': [{'role': 'user', 'content': 'hi'}]}\n"
        "    yield {'messages': []}\n    yield 3\n    raise KeyError('x')\n"
    )
    (tmp_path / "log.txt").write_text("anything")
    monkeypatch.syspath_prepend(str(tmp_path))
    (log,), _, _ = find_logs([str(tmp_path / "log.txt")], reader="own_reader:read")
    good, empty, number, end = read_log(log)
    assert isinstance(good, Dialog)
    assert (empty.where, number.where, end.where) == ("record 2", "record 3", "after record 3")
    assert "non-empty list as `messages`" in empty.reason and "got int" in number.reason
    assert "what follows in this file was not read" in end.reason
    told = f"the reader own_reader:read raised KeyError: 'x' in line 5 of {tmp_path}"
    assert told in end.reason


def test_the_method(make_policy, make_row, tmp_path, tokenizer):
    """The loss by hand, of decisions alone: the end of a conversation that was cut off is a state, and none.
    A checkpoint knows its method by its name."""
    policy = make_policy(Smoothed(smoothing=0.2), family="llama")
    batch = collate([make_row([3, 4, 5, 6], [(2, 3, 1.0)], truncated=True)])
    out = policy.outputs(batch)
    logp = out.lm.dense()[:2].log_softmax(-1)
    nll = -logp.gather(1, batch.actions[:, None]).sum()
    expected = 0.8 * nll - 0.2 * logp.mean(-1).sum()
    assert torch.allclose(policy.method.loss(out, batch).total, expected, atol=1e-4)
    policy.save_pretrained(tmp_path)
    assert Policy.from_pretrained(tmp_path).method == Smoothed(smoothing=0.2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ilq", "Did you mean ilql"),
        ("rl_dialog.methods.example:Smooth", "expected Smooth in rl_dialog/methods/example.py"),
        ("pathlib:Path", "expected a frozen dataclass derived from Method"),
        ("os:system", "expected a frozen dataclass derived from Method"),
    ],
)
def test_what_is_no_method_is_refused(name, told):
    with pytest.raises((ConfigError, ValueError), match=told):
        choice_class("method", name, METHODS)


def test_the_world():
    """Whoever names the side gets out in three; who says nothing is left after nine replies."""
    world = text_env("envs.example:House")()
    for chooser, replies, ended in (
        (lambda said: said.split()[-1], 3, (True, False)),
        (lambda said: "hm", 9, (False, True)),
    ):
        messages, _ = world.reset(seed=1)
        rewards = []
        while True:
            messages, reward, *over, _ = world.step(chooser(messages[-1]["content"]))
            rewards.append(reward)
            if any(over):
                break
        assert (rewards, tuple(over)) == ([-1.0] * replies, ended)


@pytest.mark.slow
def test_copies_in_a_folder_of_ones_own(tmp_path):
    """The whole way by the installed command: own logs by the own reader, the own reward, the own method, the
    own world."""
    installed = tmp_path / "site"
    copied = shutil.copytree(
        ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "tests")
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(installed),
        str(copied),
    ]
    subprocess.run(command, check=True)
    here = tmp_path / "mine"
    (here / "scripts").mkdir(parents=True)
    for name, example in zip(("my_rewards", "my_methods", "my_reader", "my_worlds"), EXAMPLES, strict=True):
        shutil.copy(ROOT / example, here / f"{name}.py")
    rng = random.Random(0)
    turns = [
        f"ANN: I see a door on the {side}.\nBOT: {side}\n---\n"
        for side in rng.choices(["left", "right"], k=300)
    ]
    (here / "scripts" / "a.txt").write_text("".join(turns))

    def verb(*arguments: str) -> dict:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "PYTHONPATH": str(installed)
        }
        done = subprocess.run(
            [str(installed / "bin" / "rl-dialog"), *arguments, "--quiet"],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    prepared = verb("prepare", "--logs", "scripts", "--output_dir", "data", "--reader", "my_reader:read",
                    "--rewards.my_rewards:names_the_user", "0", "--rewards.logged", "1",
                    "--split_by", "dialog")  # fmt: skip
    assert prepared["dialogs"] == 300
    size = ("--model.layers", "1", "--model.width", "32", "--max_steps", "200", "--report_to", "none")
    verb(
        "train",
        "--data",
        "data",
        "--output_dir",
        "run",
        "--method",
        "my_methods:Smoothed",
        "--method.smoothing",
        "0.01",
        *size,
    )
    report = verb(
        "evaluate",
        "--checkpoints",
        "run",
        "--env",
        "my_worlds:House",
        "--episodes",
        "50",
        "--output_dir",
        "report",
        "--no_greedy",
    )
    assert next(iter(report["figures"].values()))["return"][0] > -6, (
        "nearly every door is found at once: -3 is the best, -9 the worst"
    )
