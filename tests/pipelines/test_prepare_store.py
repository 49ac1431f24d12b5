"""prepare reads stores of served chats: the way from a vote to the reward `vote`, on one Ray that all tests
here share."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pytest

from pipelines.prepare import PrepareConfig, main
from rl_dialog.cluster.data import connect
from rl_dialog.config import load_config
from rl_dialog.data.formats import served
from rl_dialog.data.schema import SPLITS, Dialog, write_jsonl
from rl_dialog.data.shards import load_manifest, read_dialogs, read_rows
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError

FLAGS = ["--rewards.vote", "1", "--rewards.rating", "0.5", "--vocab_size", "300", "--quiet"]


@pytest.fixture(scope="module")
def running():
    with connect(num_cpus=2):
        yield


def fill(url, chats):
    """Chats of three replies, the second of which is thumbed down and the third, a regenerated second one,
    thumbed up; every chat is rated."""
    store = Store(url)
    made = {"model": "bot", "checkpoint": "c", "method": "bc", "settings": {"beta": 1.0}, "seconds": 0.1}
    for number in range(chats):
        chat = store.start_chat(user=f"user {number}", model="bot")
        messages = [{"role": "user", "content": f"hello {number}"}]
        store.add_turns(messages, [("hi there", "stop", {})], chat=chat, completion=f"{number}-a", **made)
        messages += [{"role": "assistant", "content": "hi there"}, {"role": "user", "content": "a joke?"}]
        store.add_turns(messages, [("no", "stop", {})], chat=chat, completion=f"{number}-b", **made)
        store.add_turns(messages, [("knock knock", "stop", {})], chat=chat, completion=f"{number}-c", **made)
        store.feedback(f"{number}-b", vote=-1)
        store.feedback(f"{number}-c", vote=1)
        store.rate(chat, {"quality": 4})
    return store


def prepare(out, *arguments):
    return main(load_config(PrepareConfig, ["--output_dir", str(out), *FLAGS, *arguments]))


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_votes_on_served_chats_become_rewards(running, database, request, tmp_path, monkeypatch):
    """A store in pieces and a file behind it, read by two workers: what is written stands in the order of the
    store."""
    store_url = (
        request.getfixturevalue("postgres_url")
        if database == "postgres"
        else f"sqlite:///{tmp_path}/chats.db"
    )
    store = fill(store_url, 20)
    write_jsonl(
        [Dialog("filed", [{"role": "user", "content": "hey"}, {"role": "assistant", "content": "yes?"}])],
        tmp_path / "more.jsonl",
    )
    monkeypatch.setattr(served, "PIECE", 3)
    monkeypatch.setattr("rl_dialog.cluster.scoring.GROUP_BYTES", 20_000)
    headline = prepare(
        tmp_path / "out", "--logs", store_url, str(tmp_path / "more.jsonl"), "--num_workers", "2"
    )
    found = {split: list(read_dialogs(tmp_path / "out", split)) for split in SPLITS}
    dialogs = {dialog.id: dialog for split in SPLITS for dialog in found[split]}
    order = [dialog.id for dialog in store.dialogs()] + ["filed"]
    assert all(
        [dialog.id for dialog in found[split]] == [name for name in order if dialogs[name] in found[split]]
        for split in SPLITS
    )

    assert (
        headline["dialogs"] == len(dialogs) == 41
        and headline["replies"] == 61
        and headline["quarantined"] == 0
    )
    for (chat,), *_ in store.threads():
        first, second = dialogs[chat.id], dialogs[f"{chat.id}#2"]
        assert [m.get("reward") for m in first.messages] == [None, None, None, -1.0]  # no vote is no 0
        assert second.messages[1]["weight"] == 0 and "reward" not in second.messages[1]
        assert (
            second.messages[3]["rewards"] == {"vote": 1.0, "rating": 4.0}
            and second.messages[3]["reward"] == 3.0
        )
        assert second.meta["user"] == chat.user and second.meta["settings"] == {"beta": 1.0}
    rows = [row for split in SPLITS for row in read_rows(tmp_path / "out", split)]
    rewards = np.concatenate([row.rewards for row in rows])
    np.testing.assert_array_equal(np.sort(rewards), [-1.0] * 20 + [3.0] * 20 + [np.nan] * 21)  # NaN is last
    check_manifest(tmp_path / "out", store)
    store.close()


def check_manifest(out, store):
    manifest = load_manifest(out)
    source = manifest["sources"]["served"]
    assert (source["dialogs"], source["replies"], source["quarantined"]) == (40, 60, 0)
    assert [file["member"] for file in source["files"]] == [
        f"chats {i} to {min(i + 2, 20)}, turns up to 60" for i in range(1, 20, 3)
    ]
    assert {
        (file["chats"], file["turns"], file["last_turn"], len(file["sha256"])) for file in source["files"]
    } == {(20, 60, 60, 64)}
    assert {file["path"] for file in source["files"]} == {store.name.removeprefix("sqlite:///")}
    assert manifest["settings"]["logs"][0] == store.name
    texts = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert len(texts) > 5 and not any(b"hunter2" in text for text in texts)


def test_what_cannot_be_prepared_is_said_without_a_password(tmp_path):
    Store(f"sqlite:///{tmp_path}/empty.db").start_chat(model="bot")
    with sqlite3.connect(tmp_path / "songs.db") as connection:
        connection.execute("CREATE TABLE songs (name)")
    for log, message in (
        (f"sqlite:///{tmp_path}/empty.db", "a store without a reply"),
        (f"sqlite:///{tmp_path}/songs.db", "the tables songs"),
        (f"sqlite:///{tmp_path}/missing.db", "found nothing at"),
        (
            "postgresql://ann:hunter2@127.0.0.1:1/chats",
            r"cannot open the store postgresql://ann:\*\*\*@127.0.0.1:1/chats",
        ),
        ("oracle://ann:hunter2@h/chats", "SQLite or PostgreSQL store"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            prepare(tmp_path / "out", "--logs", log)
        assert "hunter2" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".db") in (
        [],
        ["empty.db-shm", "empty.db-wal"],
    )


def test_the_recipe_of_a_run_follows_the_store(tmp_path):
    """A killed run is taken up again only where the store stands as it stood."""
    from rl_dialog.data.building import recipe_of
    from rl_dialog.data.readers import find_logs

    store = fill(f"sqlite:///{tmp_path}/chats.db", 2)
    logs, _, _ = find_logs([str(tmp_path / "chats.db")])
    before = recipe_of({}, {"vote": 1.0}, logs)
    assert recipe_of({}, {"vote": 1.0}, logs) == before
    store.feedback("1-a", vote=1)
    assert recipe_of({}, {"vote": 1.0}, logs) != before
    assert json.loads(before)["files"][str(tmp_path / "chats.db")]["turns"] == 6
    store.close()
