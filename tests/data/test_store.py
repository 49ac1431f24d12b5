"""The store of served chats, on SQLite and on PostgreSQL: what it links, keeps, hides, forgets and
survives."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import sqlalchemy
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_dialog.data.keys import KEYS
from rl_dialog.data.schema import Dialog
from rl_dialog.data.splits import assign_split
from rl_dialog.data.store import Store, conversation_hash
from rl_dialog.data.store_tables import CHATS, TURNS
from rl_dialog.errors import UserError

ROOT = Path(__file__).parents[2]
MADE = {
    "model": "bot",
    "checkpoint": "checkpoint-5",
    "method": "ilql",
    "settings": {"beta": 1.5},
    "seconds": 0.25,
}
NUMBERS = itertools.count(1)


@pytest.fixture
def store(store_url):
    with_tables = Store(store_url)
    yield with_tables
    with_tables.close()


def talk(*texts):
    """talk("hi", "Hello", "joke?"): the user's and the assistant's messages in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def add(store, messages, *replies, completion=None, **given):
    """Stores a completion with these replies; its id and its chat's."""
    completion = completion or f"chatcmpl-{next(NUMBERS)}"
    told = [(reply, "stop", {"prompt": 3, "completion": 2}) for reply in replies]
    return completion, store.add_turns(messages, told, **MADE | given, completion=completion)


def said(dialog):
    """The texts of a Dialog, or of a chat as its user sees it."""
    return [
        message["content"]
        for message in (dialog["messages"] if isinstance(dialog, dict) else dialog.messages)
    ]


def trained(dialog):
    return [dialog.messages[i]["content"] for i in dialog.replies]


def rows(store, table):
    with store._reader.begin() as connection:
        return connection.execute(sqlalchemy.select(table).order_by(next(iter(table.primary_key)))).all()


def test_requests_without_an_id_are_chats_of_their_own_and_one_dialog(store):
    chats = [
        add(store, talk("hi"), "Hello")[1],
        add(store, talk("hi"), "Hey")[1],
        add(store, talk("hi", "Hello", "joke?"), "No.")[1],
        add(store, talk("hi", "Hello", "joke?", "No.", "please"), "Fine.")[1],
    ]
    assert len(set(chats)) == 4
    assert [said(store.chat(chat)) for chat in chats] == [
        ["hi", "Hello"],
        ["hi", "Hey"],
        ["hi", "Hello", "joke?", "No."],
        ["hi", "Hello", "joke?", "No.", "please", "Fine."],
    ]
    turns = rows(store, TURNS)
    assert [turn.parent for turn in turns] == [None, None, turns[0].number, turns[2].number]
    assert [said(dialog) for dialog in store.dialogs()] == [said(store.chat(chats[3])), ["hi", "Hey"]]
    assert [dialog.id for dialog in store.dialogs()] == [chats[3], chats[1]], "the longest of each"


def test_two_callers_who_begin_alike_are_kept_apart(store):
    """One key, no user, temperature 0: the first exchanges are equal. Neither reads the other's words, each
    conversation is a Dialog, and each gets the vote that was given to its own reply."""
    (hers, _), (his, _) = add(store, talk("hi"), "Hello"), add(store, talk("hi"), "Hello")
    store.feedback(hers, vote=1)
    store.feedback(his, vote=-1)
    _, secret = add(store, talk("hi", "Hello", "my secret is 4711"), "I see.")
    _, other = add(store, talk("hi", "Hello", "good day"), "Good day.")
    for chat in {chat.id for chat in rows(store, CHATS)} - {secret}:
        assert "4711" not in str(store.chat(chat))
    assert [said(dialog) for dialog in store.dialogs()] == [
        ["hi", "Hello", "good day", "Good day."],
        ["hi", "Hello", "my secret is 4711", "I see."],
    ]
    dialogs = list(store.dialogs())
    assert {dialog.id for dialog in dialogs} == {secret, other}
    votes = [dialog.messages[1]["feedback"] for dialog in dialogs]
    assert sorted(votes, key=str) == [{"repeated_vote": 1}, {"vote": -1}], "nothing tells them apart"
    assert [trained(dialog) for dialog in dialogs] == [["Hello", "Good day."], ["Hello", "I see."]]


def test_only_roles_and_texts_link(store):
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind"}]
    add(store, [{"role": "developer", "content": parts}, *talk("hi")], "Hello")
    told = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "hi", "name": "Ann"}]
    hello = {"role": "assistant", "content": "Hello", "refusal": None}
    _, again = add(store, [*told, hello, *talk("so?")], "So.")
    assert [dialog.id for dialog in store.dialogs()] == [again]
    assert (
        conversation_hash(talk("a", "b"))
        != conversation_hash(talk("ab"))
        != conversation_hash([{"role": "assistant", "content": "ab"}])
    )


def test_conversations_of_one_user_continue_each_other(store):
    _, ann = add(store, talk("hi"), "Hello", user="ann")
    _, bob = add(store, talk("hi"), "Hello", user="bob")
    _, more = add(store, talk("hi", "Hello", "a"), "A", user="ann")
    _, other = add(store, talk("hi", "Hello", "b"), "B", user="bob")
    _, again = add(store, talk("hi", "Hello", "a"), "Aha", user="ann")  # the same asked anew
    _, eve = add(store, talk("hi", "Hello", "d"), "D", user="eve")
    assert add(store, talk("hi", "Hello", "c"), "C", user="ann", chat=ann)[1] == ann
    dialogs = {dialog.id: dialog for dialog in store.dialogs()}
    assert set(dialogs) == {ann, more, again, other, eve} and bob not in dialogs
    assert [trained(dialogs[chat]) for chat in (more, again, ann)] == [["Hello", "A"], ["Aha"], ["C"]]
    assert trained(dialogs[eve]) == ["D"] and dialogs[eve].messages[1]["said_by"] == "client"
    with pytest.raises(KeyError, match="of this API key and user"):
        add(store, talk("x"), "y", user="bob", chat=ann)


def test_a_chat_is_found_by_its_completions(store):
    completion, chat = add(store, talk("hi"), "Hello", key="ann")
    assert store.chat_of(completion, key="ann") == chat == store.known(chat, key="ann").id
    for wrong in (lambda: store.chat_of(completion), lambda: store.chat_of("chatcmpl-none", key="ann")):
        with pytest.raises(KeyError, match="of this API key"):
            wrong()


def test_repeated_votes_of_one_key_count_once(store):
    """The same conversation again and again, as a key may have it at temperature 0."""
    for number, (vote, user) in enumerate([(1, "ann"), (1, "ann"), (-1, "ann"), (1, "bob"), (1, "ann")]):
        add(store, talk("hi"), "Hello" if number < 4 else "Hey", completion=f"c{number}", user=user)
        store.feedback(f"c{number}", vote=vote)
    add(store, talk("hi"), "Hello", completion="other", key="app", user="ann")
    store.feedback("other", key="app", vote=1)
    feedback = [dialog.messages[1]["feedback"] for dialog in store.dialogs()]
    assert feedback == [{"repeated_vote": 1}] * 2 + [{"vote": -1}, {"vote": 1}, {"vote": 1}, {"vote": 1}]


def test_ratings_of_conversations_without_an_id(store):
    """Whichever of the records was rated, it is the conversation that was."""
    _, first = add(store, talk("hi"), "Hello")
    _, last = add(store, talk("hi", "Hello", "joke?"), "No.")
    store.rate(first, {"quality": 2, "fluency": 3}, "so far")
    store.rate(last, {"quality": 5})
    (dialog,) = store.dialogs()
    assert dialog.meta["ratings"] == {"quality": 5, "fluency": 3} and dialog.meta["comments"] == "so far"


def test_a_rating_that_no_float_can_hold_is_refused(store):
    completion, _ = add(store, talk("hi"), "Hello")
    with pytest.raises(UserError, match="expected ratings as {name: number}, got {'quality': 1000"):
        store.rate(completion, {"quality": 10**400})


def test_regenerated_replies_branch_and_are_each_trained_on_once(store):
    chat = store.start_chat(model="bot")
    add(store, talk("hi"), "Hello", chat=chat)
    add(store, talk("hi", "Hello", "joke?"), "No.", chat=chat)
    add(store, talk("hi", "Hello", "joke?"), "Knock knock", chat=chat)
    add(store, talk("hi", "Hello", "joke?", "No.", "why"), "Sad", chat=chat)
    add(store, talk("hey"), "Yes?", chat=chat)  # the user went back to the beginning
    dialogs = list(store.dialogs())
    assert [dialog.id for dialog in dialogs] == [chat, f"{chat}#2", f"{chat}#3"]
    assert [said(d) for d in dialogs] == [
        ["hi", "Hello", "joke?", "Knock knock"],
        ["hi", "Hello", "joke?", "No.", "why", "Sad"],
        ["hey", "Yes?"],
    ]
    assert [trained(dialog) for dialog in dialogs] == [["Hello", "Knock knock"], ["No.", "Sad"], ["Yes?"]]
    assert [m["content"] for m in store.chat(chat)["messages"]] == ["hey", "Yes?"]


@pytest.mark.parametrize("known", [True, False], ids=["by its id", "by none"])
def test_a_reply_that_was_stopped_half_way_is_context_and_the_chat_goes_on(store, known):
    """The client shows what it got and sends it along; no turn of ours ends with it."""
    first, chat = add(store, talk("hi"), "Hello")
    store.feedback(first, vote=1)
    given = {"chat": chat} if known else {}
    add(store, talk("hi", "Hello", "joke?", "Kno", "what?"), "Knock knock.", **given)
    add(store, talk("hi", "Hello", "joke?", "Kno", "what?", "Knock knock.", "ha"), "Yes.", **given)
    (dialog,) = store.dialogs()
    assert said(dialog) == ["hi", "Hello", "joke?", "Kno", "what?", "Knock knock.", "ha", "Yes."]
    assert trained(dialog) == ["Hello", "Knock knock.", "Yes."]
    assert [message.get("said_by") for message in dialog.messages] == [*[None] * 3, "client", *[None] * 4]
    assert dialog.messages[1]["feedback"] == {"vote": 1} == {"vote": store.chat(chat)["messages"][1]["vote"]}


def test_choices_are_leaves_and_the_first_one_is_shown(store):
    completion, chat = add(store, talk("hi"), "a", "b", "c")
    store.feedback(completion, 1, vote=1)
    store.rate(chat, {"quality": 6})
    assert [trained(dialog) for dialog in store.dialogs()] == [["a"], ["b"], ["c"]]
    assert [dialog.messages[1].get("feedback") for dialog in store.dialogs()] == [None, {"vote": 1}, None]
    assert ["ratings" in dialog.meta for dialog in store.dialogs()] == [
        True,
        False,
        False,
    ]  # of the conversation that stands
    assert store.chat(chat)["messages"][1] == {
        "role": "assistant",
        "content": "a",
        "completion": completion,
        "choice": 0,
    }
    add(store, talk("hi", "b", "and?"), "d", chat=chat)
    assert [m["content"] for m in store.chat(chat)["messages"]] == ["hi", "b", "and?", "d"]
    assert [trained(dialog) for dialog in store.dialogs()] == [["a"], ["c"], ["b", "d"]]


def test_what_the_client_says_for_the_assistant_is_context(store):
    add(
        store,
        [
            *talk("hi", "I am a teapot", "so?")[:1],
            {"role": "assistant", "content": "I am a teapot", "feedback": {"vote": 1}},
            *talk("so?"),
        ],
        "Indeed",
    )
    [dialog] = store.dialogs()
    assert dialog.messages[1] == {
        "role": "assistant",
        "content": "I am a teapot",
        "weight": 0,
        "said_by": "client",
    }
    assert trained(dialog) == ["Indeed"]


def test_votes_edits_and_ratings_come_back_in_dialogs_and_chats(store):
    chat = store.start_chat(user="ann", model="bot", propensity=0.25, consent="I agree.")
    first, _ = add(store, talk("hi"), "Hello", chat=chat)
    last, _ = add(store, talk("hi", "Hello", "joke?"), "No.", chat=chat)
    store.feedback(first, vote=1)
    store.feedback(last, vote=-1, edit="Knock knock")
    assert store.rate(chat, {"quality": 5, "fluency": 7}, "nice") == {
        "ratings": {"quality": 5, "fluency": 7},
        "comments": "nice",
    }
    assert store.rate(chat, {"quality": 3}) == {"ratings": {"quality": 3, "fluency": 7}, "comments": "nice"}
    dialog, edited = store.dialogs()
    assert [message.get("feedback") for message in dialog.messages] == [
        None,
        {"vote": 1},
        None,
        {"vote": -1, "edit": "Knock knock"},
    ]
    known = {"model": "bot", "checkpoint": "checkpoint-5", "completion": last, "seconds": 0.25}
    assert (
        dialog.messages[3] | {"feedback": 0} == {"role": "assistant", "content": "No.", "feedback": 0} | known
    )
    started = dialog.meta.pop("started")
    assert started.endswith("+00:00") and dialog.source == "served"
    about = {
        "thread": chat,
        "user": "ann",
        "model": "bot",
        "assigned": True,
        "checkpoint": "checkpoint-5",
        "method": "ilql",
        "settings": {"beta": 1.5},
    }
    about |= {"drawn": "bot", "propensity": 0.25, "consent": "I agree."}
    assert dialog.meta == about | {"ratings": {"quality": 3, "fluency": 7}, "comments": "nice"}
    assert edited.id == f"{chat}#edit-{rows(store, TURNS)[1].number}" and edited.meta == about | {
        "started": started
    }
    assert edited.messages[3] == {
        "role": "assistant",
        "content": "Knock knock",
        "feedback": {"vote": 1, "edited": True},
    }
    assert trained(edited) == ["Knock knock"]
    shown = store.chat(chat)
    assert shown["messages"][3] == {
        "role": "assistant",
        "content": "No.",
        "completion": last,
        "choice": 0,
        "vote": -1,
        "edit": "Knock knock",
    }
    assert (shown["id"], shown["assigned"], shown["consent"], shown["ratings"]["quality"]) == (
        chat,
        True,
        "I agree.",
        3,
    )
    assert store.counts() == {"chats": 1, "turns": 2, "votes": 2, "ratings": 1}
    store.feedback(last, vote=None, edit=None)
    assert "vote" not in store.chat(chat)["messages"][3] and len(list(store.dialogs())) == 1


def test_edits_and_redrawn_replies_stay_in_the_split_of_their_chat(store):
    """Where all chats begin alike, a pair of replies would else be torn apart."""
    splits = defaultdict(set)
    for number in range(30):
        completion, chat = add(store, talk("begin"), f"move {number}")
        add(store, talk("begin"), f"another move {number}", chat=chat)
        store.feedback(completion, edit=f"a better move {number}")
    dialogs = list(store.dialogs())
    for dialog in dialogs:
        splits[dialog.id.partition("#")[0]].add(assign_split(dialog, 0.3, 0.3, by="dialog"))
    assert len(dialogs) == 90 and {len(found) for found in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    "text", ["", " \n\t", "naïve 日本語 😀 \u2028 '\"; DROP TABLE chats; -- \\u0000 %s :x", "\x01\x7f\ufffe"]
)
def test_texts_come_back_as_they_were(store, text):
    completion, chat = add(store, talk(text), text + "!", user="Ünï:%s", settings={"stop": [text]})
    store.feedback(completion, edit=text + "?")
    dialog, edited = Store(store._engine.url, create=False).dialogs()
    assert dialog.id == chat
    assert said(dialog) == [text, text + "!"] and said(edited) == [text, text + "?"]
    assert dialog.meta["settings"] == {"stop": [text]} and dialog.meta["user"] == "Ünï:%s"
    _, more = add(store, talk(text, text + "!", "x"), "y", user="Ünï:%s")
    assert [found.id for found in store.dialogs()] == [more, edited.id]


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
def test_what_one_of_the_databases_cannot_hold_is_refused(store, text):
    completion, chat = add(store, talk("hi"), "Hello")
    attempts = [
        lambda: add(store, talk(text), "x"),
        lambda: add(store, talk("x"), text),
        lambda: add(store, talk("x"), "x", user=text),
        lambda: add(store, talk("x"), "x", settings={"stop": [text]}),
        lambda: add(store, talk("x"), "x", completion=text),
        lambda: store.feedback(completion, edit=text),
        lambda: store.rate(chat, {text: 1}),
        lambda: store.rate(chat, {}, text),
        lambda: store.start_chat(model="bot", consent=text),
        lambda: store.keys.add(text),
    ]
    for attempt in attempts:
        with pytest.raises(UserError, match="expected"):
            attempt()
    for attempt in (
        lambda: store.chat(text),
        lambda: store.feedback(text, vote=1),
        lambda: store.keys.revoke(text),
        lambda: add(store, talk("x"), "x", chat=text),
    ):
        with pytest.raises(KeyError, match="expected"):
            attempt()
    assert store.delete_user(text) == 0 and store.keys.find(text) is None
    assert store.counts() == {"chats": 1, "turns": 1, "votes": 0, "ratings": 0}


def test_values_of_the_wrong_kind_are_refused(store):
    completion, chat = add(store, talk("hi"), "Hello")
    attempts = [
        (lambda: add(store, [], "x"), "non-empty list as `messages`"),
        (lambda: add(store, [{"role": "robot", "content": "x"}], "x"), "`role` to be one of"),
        (lambda: add(store, [{"role": "user", "content": 5}], "x"), "string as `content`"),
        (lambda: add(store, talk("x")), "at least one reply"),
        (lambda: add(store, talk("x"), None), "a text as the reply of choice 0"),
        (lambda: add(store, talk("x"), "x", seconds=float("nan")), "expected as seconds"),
        (lambda: add(store, talk("x"), "x", user="u" * 257), "0 to 256 characters"),
        (lambda: store.feedback(completion, vote=2), "-1, 0, 1 or None"),
        (lambda: store.feedback(completion, vote=True), "-1, 0, 1 or None"),
        (lambda: store.feedback(completion, edit=" "), "a text or None"),
        (lambda: store.rate(chat, {"quality": "good"}), "{name: number}"),
        (lambda: store.rate(chat, {"quality": float("inf")}), "{name: number}"),
        (lambda: store.delete_user(""), "name of a user"),
        (lambda: store.keys.add(""), "1 to 256 characters"),
        (lambda: store.keys.add("a", requests_per_minute=0), "at least 1"),
    ]
    for attempt, message in attempts:
        with pytest.raises(UserError, match=message):
            attempt()
    assert store.counts() == {"chats": 1, "turns": 1, "votes": 0, "ratings": 0} and store.keys.all() == []


def test_a_repeated_call_stores_nothing_twice(store):
    first = add(store, talk("hi"), "a", "b", completion="chatcmpl-same")
    before = rows(store, TURNS)
    assert add(store, talk("hi"), "a", "b", completion="chatcmpl-same") == first
    assert rows(store, TURNS) == before and store.counts()["chats"] == 1
    with pytest.raises(UserError, match="stored for another API key"):
        add(store, talk("hi"), "a", completion="chatcmpl-same", key="other")


def test_the_same_call_from_many_threads_stores_once(store):
    threads = [
        threading.Thread(
            target=add, args=(store, talk("hi"), "a"), kwargs={"completion": f"chatcmpl-t{i % 3}"}
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(turn.completion for turn in rows(store, TURNS)) == {f"chatcmpl-t{i}": 1 for i in range(3)}
    assert store.counts()["chats"] == 3


def test_other_keys_can_neither_read_nor_change_a_chat(store):
    completion, chat = add(store, talk("hi"), "Hello", key="ann", user="u")
    for key in ("bob", ""):
        for attempt in (
            lambda key=key: store.chat(chat, key=key),
            lambda key=key: store.feedback(completion, vote=1, key=key),
            lambda key=key: store.rate(chat, {"quality": 1}, key=key),
            lambda key=key: add(store, talk("x"), "x", chat=chat, key=key),
        ):
            with pytest.raises(KeyError, match="of this API key"):
                attempt()
        assert store.delete_user("u", key=key) == 0
        assert (
            add(store, talk("hi", "Hello", "more"), "x", key=key, user="u")[1] != chat
        )  # does not even learn that the conversation is known
        store.delete_user("u", key=key)
    for attempt in (
        lambda: store.feedback(completion, 1, key="ann", vote=1),
        lambda: store.chat("chat-0", key="ann"),
    ):
        with pytest.raises(KeyError):
            attempt()
    assert store.chat(chat, key="ann")["messages"][1]["content"] == "Hello" and store.counts()["turns"] == 1


def test_deleting_a_user_leaves_nothing_of_the_text(store, store_url, tmp_path):
    secret = "my sister Zebedea"
    chat = store.start_chat(user="ann", model="bot", consent=f"{secret} agrees")
    for number in range(30):
        completion, _ = add(
            store,
            talk(f"{secret} {number} " * 200),
            f"Who is {secret}?",
            chat=chat,
            settings={"stop": [secret]},
        )
        store.feedback(completion, vote=1, edit=f"How is {secret}?")
    store.rate(chat, {secret: 3}, f"{secret} liked it")
    _, kept = add(store, talk("hi"), "Hello", user="bob")
    assert store.delete_user("ann") == 1 and store.delete_user("ann") == 0
    left = "".join(map(str, [*rows(store, CHATS), *rows(store, TURNS), *rows(store, KEYS)]))
    assert "Zebedea" not in left and "ann" not in left
    assert [dialog.id for dialog in store.dialogs()] == [kept]
    if store_url.startswith("sqlite"):
        assert b"Hello" in b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert b"Zebedea" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert add(store, talk("hi"), "x", user="ann")[1] != chat
    assert min(row.number for row in rows(store, CHATS) if row.user == "ann") > 2  # no number comes back


def test_keys_are_shown_once_stored_as_hashes_and_revoked(store):
    key = store.keys.add("app", requests_per_minute=7)
    other = store.keys.add("web")
    assert key.startswith("sk-rl-") and len(key) >= 48 and key != other
    assert (store.keys.find(key).name, store.keys.find(key).requests_per_minute) == ("app", 7)
    assert (
        store.keys.find(key[:-1]) is None and store.keys.find("") is None and store.keys.find("app") is None
    )
    assert key not in str(rows(store, KEYS)) and key[6:] not in str(rows(store, KEYS))
    with pytest.raises(UserError, match="expected a new name for the key, got 'app'"):
        store.keys.add("app")
    store.keys.revoke("app")
    [app, web] = store.keys.all()
    assert store.keys.find(key) is None and store.keys.find(other) == web and app.revoked and not web.revoked
    store.keys.revoke("app")
    assert store.keys.all()[0].revoked == app.revoked
    again = store.keys.add("app")
    assert store.keys.find(key) is None and store.keys.find(again).name == "app"
    with pytest.raises(KeyError, match="there are app, web"):
        store.keys.revoke("apq")


def test_a_key_has_scopes(store):
    key = store.keys.find(store.keys.add("p", scopes=["participant", "metrics"]))
    assert key.scopes == ("participant", "metrics") and key.may("chat", "metrics") and not key.may("chat")
    assert key.blind and not store.keys.find(store.keys.add("app")).blind
    for wrong in ([], ["chat", "admin"], "chat"):
        with pytest.raises(UserError, match="expected scopes of a key .chat, participant, labeller"):
            store.keys.add("x", scopes=wrong)


OLD = """
CREATE TABLE chats (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL,
    user TEXT NOT NULL, model TEXT NOT NULL, assigned BOOLEAN NOT NULL, consent TEXT, ratings JSON,
    comments TEXT NOT NULL, created DOUBLE NOT NULL, updated DOUBLE NOT NULL);
CREATE TABLE turns (number INTEGER PRIMARY KEY AUTOINCREMENT, completion TEXT NOT NULL,
    choice INTEGER NOT NULL, chat INTEGER NOT NULL REFERENCES chats (number) ON DELETE CASCADE,
    parent INTEGER REFERENCES turns (number), model TEXT NOT NULL, checkpoint TEXT NOT NULL,
    method TEXT NOT NULL, settings JSON NOT NULL, prompt JSON NOT NULL, reply TEXT NOT NULL,
    finish_reason TEXT NOT NULL, tokens JSON NOT NULL, seconds DOUBLE NOT NULL, conversation TEXT NOT NULL,
    vote INTEGER, edit TEXT, created DOUBLE NOT NULL);
CREATE TABLE keys (name TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, requests_per_minute INTEGER NOT NULL,
    created DOUBLE NOT NULL, revoked DOUBLE);
INSERT INTO chats VALUES (1, 'chat-1', 'ann', 'u', 'm', 0, NULL, NULL, '', 1.0, 1.0);
INSERT INTO turns VALUES (1, 'c', 0, 1, NULL, 'm', 'p', 'bc', '{}', '[{"role": "user", "content": "hi"}]',
    'Hello', 'stop', '{}', 0.1, '{said}', 1, NULL, 1.0);
INSERT INTO keys VALUES ('ann', '{hash}', 7, 1.0, NULL);
"""


def test_a_store_of_an_earlier_version_goes_on(tmp_path):
    """Its chats are there, its keys may chat, and it takes what this version stores."""
    url = f"sqlite:///{tmp_path}/old.db"
    with contextlib.closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        hashed = OLD.replace("{hash}", hashlib.sha256(b"sk-rl-old").hexdigest())
        connection.executescript(hashed.replace("{said}", conversation_hash(talk("hi", "Hello"))))
    with pytest.raises(UserError, match="earlier version's, which opens once a server"):
        Store(url, create=False)
    store = Store(url)
    assert store.keys.find("sk-rl-old").scopes == ("chat",)
    _, chat = add(store, talk("hi", "Hello", "so?"), "So.", key="ann", user="u", chat="chat-1")
    add(store, talk("hey"), "Yes?", key="ann", user="u")
    assert chat == "chat-1" and store.counts()["chats"] == 2
    assert [len(dialog.messages) for dialog in Store(url, create=False).dialogs()] == [4, 2]
    store.close()


def test_dialogs_of_a_range_of_chats(store):
    chats = [add(store, talk(f"hi {i}"), "Hello")[1] for i in range(250)]
    store.start_chat(model="bot")
    numbers = [chat.number for chat in rows(store, CHATS)]
    assert [d.id for d in store.dialogs()] == chats
    assert [d.id for d in store.dialogs(numbers[5], numbers[7])] == chats[5:8]
    assert [d.id for d in store.dialogs(last=numbers[120])] == chats[:121]
    assert [d.id for d in store.dialogs(first=numbers[240])] == chats[240:]
    assert list(store.dialogs(numbers[-1])) == []


WRITER = """
import sys
from rl_dialog.data.store import Store
url, name, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = Store(url)
made = {"model": "m", "checkpoint": "", "method": "", "settings": {}, "seconds": 0.0}
for number in range(first, first + count):
    completion = f"{name}-{number}"
    messages = [{"role": "user", "content": f"{name} {number // 3}"}]
    for back in range(number % 3, 0, -1):
        messages += [{"role": "assistant", "content": f"reply {number - back}"}, \
{"role": "user", "content": "more"}]
    store.add_turns(messages, [(f"reply {number}", "stop", {})], completion=completion, user=name, **made)
    store.feedback(completion, vote=1)
    print(number, flush=True)
"""


def writer(url, name, first, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, name, str(first), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_four_processes_write_at_once(store_url):
    """They also make the tables at the same moment. 10 conversations of 3 turns each are linked in each
    process."""
    writers = [writer(store_url, f"w{i}", 0, 30) for i in range(4)]
    outs = [process.communicate(timeout=400)[0] for process in writers]
    assert [process.returncode for process in writers] == [0] * 4
    assert [out.split() for out in outs] == [[str(i) for i in range(30)]] * 4
    store = Store(store_url, create=False)
    assert store.counts() == {"chats": 120, "turns": 120, "votes": 120, "ratings": 0}
    assert Counter(len(dialog.replies) for dialog in store.dialogs()) == {3: 40}
    store.close()


@pytest.mark.parametrize("rounds", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_kill_9_loses_nothing_that_was_acknowledged(store_url, rounds):
    rng = random.Random(0)
    acknowledged: list[int] = []
    for _ in range(rounds):
        process = writer(
            store_url, "w", len(acknowledged), 100_000
        )  # begins with the one that may or may not be there
        enough = len(acknowledged) + rng.randrange(1, 25)
        while len(acknowledged) < enough:
            acknowledged.append(int(process.stdout.readline()))
        time.sleep(rng.random() * 0.01)
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += [
            int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")
        ]
        process.wait()
    assert acknowledged == list(range(len(acknowledged)))
    store = Store(store_url, create=False)
    turns = Counter(turn.completion for turn in rows(store, TURNS))
    assert set(turns.values()) == {1}
    assert {f"w-{number}" for number in acknowledged} <= set(turns) and len(turns) <= len(acknowledged) + 1
    votes = Counter(turn.vote for turn in rows(store, TURNS) if int(turn.completion[2:]) in set(acknowledged))
    assert votes == {1: len(acknowledged)}
    store.close()


@pytest.mark.slow
def test_a_user_is_deleted_while_chats_go_on(store):
    stop, problems = threading.Event(), []

    def chatter():
        try:
            while not stop.is_set():
                completion, chat = add(store, talk("hi"), "Hello", user="ann")
                add(store, talk("hi", "Hello", "more"), "x", user="ann")
                for change in (
                    lambda c=completion: store.feedback(c, vote=1),
                    lambda c=chat: add(store, talk("y"), "z", user="ann", chat=c),
                ):
                    with contextlib.suppress(KeyError):  # deleted meanwhile
                        change()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=chatter) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        store.delete_user("ann")
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    store.delete_user("ann")
    assert store.counts() == {"chats": 0, "turns": 0, "votes": 0, "ratings": 0}


@pytest.mark.parametrize(
    "url, message",
    [
        ("chats.db", "expected the URL of a store"),
        ("", "expected the URL of a store"),
        ("sqlite://", "expected a file's path"),
        ("sqlite:///:memory:", "expected a file's path"),
        ("sqlite:///a.db?mode=ro", "expected a file's path"),
        ("sqlite://a/b.db", "expected a file's path"),
        ("mysql://u:hunter2@h/d", "SQLite or PostgreSQL store .*got 'mysql://\\*\\*\\*@h/d'"),
        ("postgresql+asyncpg://u:hunter2@h/d", "SQLite or PostgreSQL store"),
        ("postgresql://u:hunter2@h:port/d", "expected the URL of a store"),
        (
            "postgresql://u:hunter2@127.0.0.1:1/d",
            "cannot open the store postgresql://u:\\*\\*\\*@127.0.0.1:1/d: .*refused",
        ),
        (
            "postgresql://u@127.0.0.1:1/d?password=hunter2",
            "cannot open the store postgresql://u@127.0.0.1:1/d: ",
        ),
        ("sqlite:////nowhere/chats.db", "expected a folder for the SQLite file"),
        ("sqlite:////proc/chats.db", "cannot open the store sqlite:////proc/chats.db"),
    ],
)
def test_bad_urls(url, message):
    with pytest.raises(UserError, match=message) as raised:
        Store(url)
    assert "hunter2" not in str(raised.value) and raised.value.__cause__ is None


def test_files_that_are_no_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="found nothing at"):
        Store("sqlite:///missing.db", create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "text.db").write_text("This is a text, no database. " * 100)
    with pytest.raises(UserError, match="file is not a database"):
        Store("sqlite:///text.db")
    for name, statement in (
        ("other.db", "CREATE TABLE songs (name)"),
        ("old.db", "CREATE TABLE chats (number)"),
    ):
        connection = sqlite3.connect(name)
        connection.execute(statement)
        connection.close()
    with pytest.raises(UserError, match="missing the tables chats, turns; .*other.db holds the tables songs"):
        Store("sqlite:///other.db", create=False)
    with pytest.raises(UserError, match="missing the columns id, thread, key, .* of the table chats"):
        Store("sqlite:///old.db")
    Store("sqlite:///new.db")
    monkeypatch.chdir("/")
    Store(f"sqlite:///{tmp_path}/new.db", create=False)


def test_a_relative_path_is_taken_from_where_the_store_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("sqlite:///chats.db")
    monkeypatch.chdir("/")
    threads = [
        threading.Thread(target=add, args=(store, talk("hi"), "a")) for _ in range(4)
    ]  # new connections
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.counts()["chats"] == 4 and store.name == f"sqlite:///{tmp_path}/chats.db"


@pytest.mark.slow
@pytest.mark.postgres
def test_passwords_are_not_in_the_name(postgres_url):
    store = Store(postgres_url)
    assert store.name.startswith("postgresql://postgres:***@/test_") and "hunter2" not in store.name + repr(
        store
    ) + repr(store._engine)
    for driver in ("postgres", "postgresql+psycopg"):
        Store(postgres_url.replace("postgresql", driver), create=False).close()
    store.close()


TEXTS = st.sampled_from(["a", "b", ""])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "go on", "again", "forge", "edit", "vote"]),
        st.integers(0, 10),
        TEXTS,
        st.lists(TEXTS, min_size=1, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_every_reply_is_trained_on_exactly_once(steps):
    """Whatever people do: open chats, go on after any reply, ask again, put words into the assistant's mouth,
    edit, vote. And every conversation that was had is the beginning of a Dialog."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/chats.db")
        had, choices, edits, votes = replay(store, steps)
        dialogs = list(store.dialogs())
        store.close()
    marks = [(d, d.messages[i]) for d in dialogs for i in d.replies]
    assert Counter(m["completion"] for _, m in marks if "completion" in m) == Counter(
        completion for completion, _, _ in had
    )
    assert sum("completion" not in m for _, m in marks) == len(edits)
    voted = {
        str(said)
        for number, (completion, _, said) in enumerate(had)
        if (completion, choices[number]) in votes
    }
    assert sum(m.get("feedback", {}).get("vote") == -1 for _, m in marks) == len(voted)
    found = [[(m["role"], m["content"]) for m in dialog.messages] for dialog in dialogs]
    for _, _, conversation in had:
        told = [(m["role"], m["content"]) for m in conversation]
        assert any(each[: len(told)] == told for each in found)
    assert len({d.id for d in dialogs}) == len(dialogs)
    assert all(Dialog.from_json(d.to_json()) == d for d in dialogs)


def replay(store, steps):
    """Does the steps; ([(completion, chat, conversation with its reply)], the choice of each, the edited and
    the voted (completion, choice))."""
    had, choices, edits, votes = [], [], set(), set()
    for step, pick, text, replies, named in steps:
        completion, chat, conversation = had[pick % len(had)] if had else ("", None, [])
        if step in ("edit", "vote") and had:
            choice = choices[pick % len(had)]
            store.feedback(completion, choice, **({"edit": text + "!"} if step == "edit" else {"vote": -1}))
            (edits if step == "edit" else votes).add((completion, choice))
            continue
        said = (
            [{"role": "assistant", "content": text}]
            if step == "forge"
            else conversation[:-1]
            if step == "again"
            else conversation
        )
        said = [] if step == "open" else said
        messages = said if step == "again" and said else [*said, {"role": "user", "content": text}]
        completion, chat = add(store, messages, *replies, chat=chat if named else None)
        for choice, reply in enumerate(replies):
            had.append((completion, chat, [*messages, {"role": "assistant", "content": reply}]))
            choices.append(choice)
    return had, choices, edits, votes
