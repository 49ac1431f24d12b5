"""The closed circle for real and small."""

from __future__ import annotations

import re
import socket
import time

import psutil
import pytest
import ray

from pipelines import stages
from pipelines.circle import CircleConfig, main
from rl_dialog.cluster import local_serve
from rl_dialog.data.schema import SPLITS
from rl_dialog.data.shards import read_dialogs
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError
from tests.processes import title


def test_what_cannot_be_run_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="was not made by `circle`"):
        main(CircleConfig(output_dir=str(tmp_path)))
    clone = str(stages.CONFIGS / "quickstart_bc.yaml")
    for wrong, message in (
        ({"users": 0}, "expected --users of at least 1, got 0"),
        ({"steps": -1}, "expected --steps of at least 0, got -1"),
        ({"seed": -1}, "expected --seed of at least 0, got -1"),
        ({"train": "nowhere.yaml"}, "cannot read the config file 'nowhere.yaml'"),
        ({"train": clone}, "expected a method that learns from votes, got bc"),
    ):
        with pytest.raises(UserError, match=message):
            main(CircleConfig(output_dir=str(tmp_path / "new"), **wrong))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_nobody_else_is_given_the_port_of_the_server(tmp_path, monkeypatch):
    """Whoever asks for any port or for this one, from before the server listens until it has ended."""
    taken = []

    def deploy(args, *, host, port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((host, port))
        with socket.socket() as proxy, socket.socket() as client:  # of Serve's, which shares ports
            proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            proxy.bind((host, port))
            proxy.listen()
            client.connect((host, port))
            proxy.accept()[0].close()
        taken.append(port)

    monkeypatch.setattr(local_serve.serve, "deploy", deploy)
    monkeypatch.setattr(local_serve.serve, "running", lambda: False)
    monkeypatch.setattr(local_serve, "resolve", str)
    store = f"sqlite:///{tmp_path}/chats.db"
    with local_serve.served_here(store, {"bc": tmp_path}, "ann") as (url, _, again):
        again({"bc": tmp_path})
    assert taken == [int(url.rpartition(":")[2])] * 2


@pytest.mark.slow
def test_the_circle_closes(tmp_path, capsys):
    """Small, so nothing is said about who is better: tests/learning is for that."""
    sizes = {"dialogs": 120, "chats": 24, "ab_chats": 40, "users": 8, "bc_steps": 20, "steps": 15}
    found = main(CircleConfig(output_dir=str(tmp_path / "out"), quiet=True, **sizes))
    assert capsys.readouterr().out == "" and not ray.is_initialized()
    store = Store(found["store"])
    dialogs = list(store.dialogs())

    # No request failed: main raises otherwise. Every reply that a user was given is in the store, and every
    # vote.
    during = found["chats_during_rollout"]
    assert (
        during >= 1
        and store.counts()["chats"] == len(dialogs) == store.counts()["ratings"] == 24 + during + 40
    )
    counts = store.counts()
    assert found["requests"] == 2 * counts["chats"] + counts["turns"] + counts["votes"]

    # The votes of the first chats, and nothing else, are the rewards that the successor learnt from.
    learnt = {
        dialog.id: dialog for split in SPLITS for dialog in read_dialogs(tmp_path / "out" / "served", split)
    }
    assert list(learnt) and set(learnt) == {dialog.id for dialog in dialogs[:24]}
    for dialog in dialogs[:24]:
        given = [dialog.messages[i].get("feedback", {}).get("vote") for i in dialog.replies]
        assert [learnt[dialog.id].messages[i].get("rewards", {}).get("vote") for i in dialog.replies] == given
        assert [learnt[dialog.id].messages[i].get("reward") or 0.0 for i in dialog.replies] == [
            vote or 0.0 for vote in given
        ]

    # The successor got its half of the new chats, and every chat was answered by the model drawn for it.
    assert {dialog.meta["drawn"] for dialog in dialogs[:24]} == {"bc"}
    assert (
        6 <= sum(dialog.meta["drawn"] == "mc" for dialog in dialogs[24 + during :]) <= 34
    )  # less likely than 1 in 100,000 otherwise
    assert all(
        dialog.messages[i]["model"] == dialog.meta["drawn"] for dialog in dialogs for i in dialog.replies
    )
    assert {dialog.meta["checkpoint"].rsplit("/", 2)[1] for dialog in dialogs} == {"bc", "mc"}

    # The report compares the two by votes and, beside them, by what the world knows.
    text = (tmp_path / "out" / "ab" / "ab.md").read_text()
    assert (
        "mc - bc" in text
        and "return per dialog" in text
        and set(found["differences"]["mc - bc"]) == {"vote", "return"}
    )
    assert sum(model["chats"] for model in found["models"].values()) == len(dialogs)
    deadline, rays = time.monotonic() + 120, r"^ray::|/(raylet|gcs_server)( |$)"  # which end soon
    while left := [each for each in map(title, psutil.Process().children(True)) if re.search(rays, each)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
