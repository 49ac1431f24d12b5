"""Learning from users that an endpoint plays, over real connections: one of ours, and one that misbehaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from envs.adapters import chat_endpoint
from pipelines import online
from pipelines.online import OnlineConfig
from rl_dialog.data.readers import read_logs
from rl_dialog.data.schema import Dialog
from rl_dialog.data.splits import split_key
from rl_dialog.errors import UserError
from rl_dialog.methods import RLOO
from tests.envs.chat_server import Raw, chat_server
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PEOPLE = [
    {"name": name, "system": f"You are {name}.", "stop": "<END>", "request": {"max_tokens": 8}}
    for name in ("ada", "bo", "cy", "di", "eve")
]
OWN = '''
def vowels(dialog):
    """The letters a of each reply."""
    return [float(dialog.messages[i]["content"].count("a")) for i in dialog.replies]
'''


@pytest.fixture
def config(checkpoints, tmp_path: Path, monkeypatch) -> OnlineConfig:  # noqa: ANN001
    (tmp_path / "user_vowels.py").write_text(OWN)
    (tmp_path / "people.jsonl").write_text("\n".join(map(json.dumps, PEOPLE)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("user_vowels", None)
    monkeypatch.setattr(chat_endpoint, "PAUSES", (0.0, 0.0))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1")
    return OnlineConfig(
        model_name_or_path=checkpoints["bc"], personas="people.jsonl", method=RLOO(c=0.01), user_turns=2,
        rewards={"user_vowels:vowels": 1.0, "answer_length": 0.0}, output_dir=str(tmp_path / "online"),
        groups=4, group_size=4, max_steps=5, warmup_steps=0, eval_steps=3, learning_rate=1e-2,
        env_episodes=16, max_new_tokens=4, report_to="none", quiet=True, device="cpu",
    )  # fmt: skip


def person(request) -> str:  # noqa: ANN001
    return request["messages"][0]["content"].removeprefix("You are ").rstrip(".")


def answer(request) -> str:  # noqa: ANN001
    """Who says its name, and goes after its second answer where it is Ada."""
    said = sum(message["role"] == "assistant" for message in request["messages"])
    return f"{person(request)} says {said}" + (" <END>" if said == 2 and person(request) == "ada" else "")


def logged(config: OnlineConfig) -> list[Dialog]:
    dialogs, bad = read_logs([Path(config.output_dir) / "rollouts"])
    assert not bad
    return dialogs


def test_a_policy_learns_from_users_and_is_measured_with_others(config, tmp_path: Path) -> None:  # noqa: ANN001
    with chat_server(answer) as server:
        config = replace(config, users=server.url)
        result = online.main(config)
        asked_to_learn = {person(request) for request in server.requests}
    assert result["return"] > result["return_before"] + 0.3
    assert asked_to_learn == {"ada", "bo", "cy", "di", "eve"}
    dialogs = logged(config)
    assert len(dialogs) == 5 * 16
    assert {dialog.meta["user"]["persona"] for dialog in dialogs} == {"ada", "bo", "cy", "di"}  # not eve
    for dialog in dialogs:
        user = dialog.meta["user"]
        said = [each["text"] for each in user["said"]]
        ends = {"ada": ("", "", " <END>")}.get(user["persona"], ("", "", ""))
        assert said == [f"{user['persona']} says {n}{end}" for n, end in enumerate(ends)]
        assert dialog.truncated == (user["persona"] != "ada")
        assert [m["content"] for m in dialog.messages if m["role"] == "user"] == [
            text.removesuffix(" <END>") for text in said
        ]
        for i in dialog.replies:
            reply = dialog.messages[i]
            assert reply["reward"] == reply["content"].count("a")
            assert reply["rewards"]["answer_length"] == pytest.approx(3 / 30)  # the user's words
    lines = [json.loads(line) for line in (Path(config.output_dir) / "metrics.jsonl").open()]
    measured = [line for line in lines if "eval/return" in line]
    assert len(measured) == 3 and all("eval/true_return" not in line for line in measured)
    best = max(measured[1:], key=lambda line: line["eval/return"])["step"]
    assert result["best"].endswith(f"checkpoint-{best}")
    assert set(server.keys) == {"Bearer sk-secret-1"}
    for path in Path(config.output_dir).rglob("*"):
        assert path.is_dir() or b"sk-secret" not in path.read_bytes(), path

    assert len({split_key(dialog) for dialog in dialogs}) == 4  # all conversations of a person in one split
    assert [Dialog.from_row(dialog.to_row()) for dialog in dialogs] == dialogs  # in Parquet too


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_users_elsewhere(config, tmp_path: Path) -> None:  # noqa: ANN001
    """The same bits, at another address; other people are another run."""
    config = replace(config, max_steps=4, eval_steps=2, lr_scheduler_type="constant", env_episodes=4)
    with chat_server(answer) as server:
        whole = online.main(replace(config, users=server.url))
        half = replace(config, users=server.url, output_dir=str(tmp_path / "half"))
        online.main(replace(half, max_steps=2))
    with chat_server(answer) as server:
        resumed = online.main(replace(half, users=server.url, resume=True, user_concurrency=1))
        with pytest.raises(UserError, match="--user_turns"):
            online.main(replace(half, users=server.url, resume=True, user_turns=3))
    weights = [Path(run["latest"], "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]


def test_who_does_not_answer_is_left_out_and_nobody_else(config) -> None:  # noqa: ANN001
    """Of the people to learn with one is refused, one says nothing, and one fails in the middle."""

    def faulty(request):  # noqa: ANN001, ANN202
        who, turns = person(request), len(request["messages"])
        if who == "bo":
            return Raw("no such model", 404)
        if who == "cy":
            return Raw("{}", 200)
        return Raw("overloaded", 503) if who == "di" and turns > 4 else answer(request)

    with chat_server(faulty) as server:
        config = replace(config, users=server.url, max_steps=3, groups=8, group_size=2)
        result = online.main(config)
    ends = {(d.meta["user"]["persona"], d.meta["end"], len(d.replies)) for d in logged(config)}
    assert {("ada", "terminated", 2), ("bo", "failed", 0), ("cy", "failed", 0), ("di", "failed", 2)} == ends
    assert result["train/no_return"] == pytest.approx(
        sum(d.meta["end"] == "failed" for d in logged(config) if d.meta["step"] == 3) / 16
    )
    failed = {d.meta["user"]["persona"]: d.meta["failed"] for d in logged(config) if "failed" in d.meta}
    assert re.search("expected status 200, got 404: no such model", failed["bo"])
    assert re.search("within 3 tries, got no chat completion", failed["cy"])
    assert re.search("within 3 tries, got status 503: overloaded", failed["di"])


def test_a_round_without_any_user_ends_the_run_with_a_message(config) -> None:  # noqa: ANN001
    """The return cannot be measured then; what was learned before stays."""
    rounds = {"dead": False}

    def dying(request):  # noqa: ANN001, ANN202
        return Raw("", 500) if rounds["dead"] else answer(request)

    with chat_server(dying) as server:
        config = replace(config, users=server.url, max_steps=2, env_episodes=4)
        online.main(config)
        rounds["dead"] = True
        again = replace(config, output_dir=config.output_dir + "-2")
        with pytest.raises(UserError, match="--users: .*expected a reply within 3 tries, got status 500"):
            online.main(again)
        with pytest.raises(UserError, match="--users: .*expected a reply"):
            online.main(replace(config, resume=True, max_steps=4))


@contextmanager
def served(checkpoint: str, store: Path) -> Iterator[str]:
    """The address of `serve --backend local` in a process of its own."""
    flags = ["--models", f"people={checkpoint}", "--backend", "local", "--port", str(free_port())]
    flags += ["--store", f"sqlite:///{store}", "--max_prompt_length", "96", "--threads", "1", "--drain", "5"]
    command = [sys.executable, "-m", "pipelines.serve", *flags, "--quiet"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield json.loads(server.stdout.readline())["api"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=400)


@pytest.mark.slow
def test_a_served_checkpoint_plays_the_user(config, checkpoints, tmp_path: Path) -> None:  # noqa: ANN001
    """In a process of its own, as `serve --backend local` starts it; with a model that has learned nothing
    but says something. The server has every conversation in its store."""
    with served(checkpoints["bc"], tmp_path / "chats.db") as url:
        config = replace(config, users=url, user_model="people", max_steps=4, env_episodes=8)
        result = online.main(config)
    dialogs = logged(config)
    played = [dialog for dialog in dialogs if dialog.meta["end"] != "failed"]
    assert len(dialogs) == 4 * 16 and len(played) > 32 and result["step"] == 4
    assert all(dialog.meta["user"]["model"] == "people" for dialog in dialogs)
    assert len({dialog.meta["user"]["said"][0]["text"] for dialog in played}) > 4
    kept, _ = read_logs([f"sqlite:///{tmp_path / 'chats.db'}"])
    said = {each["content"] for dialog in kept for each in dialog.messages if each["role"] == "assistant"}
    assert {answer["text"] for dialog in played for answer in dialog.meta["user"]["said"]} <= said
