"""The neural.chat CSV exports: website rows and processed transitions back to conversations."""

import csv
import gzip
import random
import tracemalloc
from pathlib import Path

import pytest

from rl_dialog.data.formats.neural_chat import strip_emoji
from rl_dialog.data.readers import Bad, Dialog, find_logs, read_log

RATING_COLUMNS = [
    f"Chat Rating {name}"
    for name in ("Quality", "Fluency", "Coherency", "Diversity", "Contingency", "Empathy", "Comments")
]
WEBSITE = [
    "ID",
    "Chat ID",
    "Datetime",
    "Chatbot ID",
    "Message",
    "Response",
    "Bot Input",
    "Study Key",
    "User Session Key",
    "Response Rating",
    *RATING_COLUMNS,
]


def website_row(
    chat: str, second: int, message: str, response: str, vote: str = "0", ratings: tuple = ("",) * 7
) -> list[str]:
    moment = f"2019-05-08T20:06:{second:02d}.345000+00:00"
    return [
        str(second),
        chat,
        moment,
        "vhred_emotion",
        message,
        response,
        '["x"]',
        "study1",
        "session1",
        vote,
        *ratings,
    ]


def write_csv(path: Path, header: list[str], rows: list[list[str]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(path: Path) -> tuple[list[Dialog], list[Bad]]:
    logs, bads, _ = find_logs([str(path)])
    items = [item for log in logs for item in read_log(log)]
    return [item for item in items if isinstance(item, Dialog)], bads + [
        item for item in items if isinstance(item, Bad)
    ]


def texts(dialog: Dialog) -> list[str]:
    return [message["content"] for message in dialog.messages]


# --- website export -----------------------------------------------------------------------------------------


def test_rows_become_conversations_in_time_order_with_votes_and_ratings(tmp_path):
    rated = ("5", "6", "7", "1", "2.5", "4", "nice bot")
    rows = [
        website_row("a", 2, "and you?", "😀 hi", "1", rated),
        website_row("a", 1, "hello", "日本語 ok", "-1", rated),
        website_row("b", 3, "NA", "null"),
    ]
    dialogs, bads = read(write_csv(tmp_path / "records.csv", WEBSITE, rows))
    assert not bads
    first, second = dialogs
    assert texts(first) == ["hello", "日本語 ok", "and you?", "hi"]
    assert [message["role"] for message in first.messages] == ["user", "assistant"] * 2
    assert [first.messages[i]["feedback"]["vote"] for i in first.replies] == [-1, 1]
    assert first.messages[3]["original"] == "😀 hi" and "original" not in first.messages[1]
    assert first.messages[3]["datetime"].startswith("2019-05-08T20:06:02")
    assert first.meta["ratings"] == {
        "quality": 5,
        "fluency": 6,
        "coherency": 7,
        "diversity": 1,
        "contingency": 2.5,
        "empathy": 4,
    }
    expected = {"chatbot": "vhred_emotion", "study": "study1", "session": "session1", "comments": "nice bot"}
    assert {key: first.meta[key] for key in expected} == expected
    assert (first.id, first.source, first.truncated) == ("a", "records", False)
    assert texts(second) == ["NA", "null"] and "ratings" not in second.meta
    assert second.messages[1]["feedback"] == {"vote": 0}


def test_an_empty_reply_does_not_lose_the_end_of_the_conversation(tmp_path):
    rows = [
        website_row("a", 1, "hello", "hi"),
        website_row("a", 2, "", "yes?"),
        website_row("a", 3, "bye", "😀", "-1"),
    ]
    dialog = read(write_csv(tmp_path / "r.csv", WEBSITE, rows))[0][0]
    assert texts(dialog) == ["hello", "hi", "", "yes?", "bye", ""]
    assert dialog.replies == [1, 3] and not dialog.truncated
    assert (
        dialog.messages[5]["original"] == "😀"
        and dialog.messages[5]["feedback"] == {"vote": -1}
        and dialog.messages[5]["weight"] == 0
    )


def test_an_unsorted_export_gives_the_same_dialogs(tmp_path):
    rows = [
        website_row(f"chat{i}", second, f"m{i}-{second}", f"r{i}-{second}")
        for i in range(30)
        for second in range(1, 8)
    ]
    ordered = read(write_csv(tmp_path / "sorted.csv", WEBSITE, rows))[0]
    random.Random(3).shuffle(rows)
    shuffled = read(write_csv(tmp_path / "shuffled.csv", WEBSITE, rows))[0]
    assert len(ordered) == 30 and {d.id: d.messages for d in ordered} == {d.id: d.messages for d in shuffled}


@pytest.mark.slow
def test_a_sorted_export_is_read_in_flat_memory(tmp_path):
    rows = [
        website_row(f"chat{i:05d}", second, "m" * 1000, "r" * 1000)
        for i in range(400)
        for second in range(1, 6)
    ]  # 4 MB
    log = find_logs([str(write_csv(tmp_path / "r.csv", WEBSITE, rows))])[0][0]
    del rows
    tracemalloc.start()
    count = sum(1 for _ in read_log(log))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 400 and peak < 2 << 20


@pytest.mark.parametrize(
    "moment", ["1557345966", "2019-05-08 20:06:12", "2019-05-08T20:06:12.345Z", "2019-05-08"]
)
def test_readable_dates(tmp_path, moment):
    row = website_row("a", 1, "hello", "hi")
    row[2] = moment
    assert "order" not in read(write_csv(tmp_path / "r.csv", WEBSITE, [row]))[0][0].meta


def test_unreadable_dates_keep_the_order_of_the_file_and_say_so(tmp_path):
    rows = [website_row("a", 2, "one", "1"), website_row("a", 1, "two", "2")]
    rows[1][2] = "yesterday"
    dialog = read(write_csv(tmp_path / "r.csv", WEBSITE, rows))[0][0]
    assert texts(dialog) == ["one", "1", "two", "2"] and "yesterday" in dialog.meta["order"]


@pytest.mark.parametrize("missing", ["Response", "Chat ID", "Datetime", "Message"])
def test_a_missing_column_is_named_with_those_found(tmp_path, missing):
    at = WEBSITE.index(missing)
    rows = [website_row("a", 1, "hello", "hi")]
    path = write_csv(
        tmp_path / "r.csv", WEBSITE[:at] + WEBSITE[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]
    )
    dialogs, bads = read(path)
    assert not dialogs and len(bads) == 1
    assert f"missing {missing}; found ID" in bads[0].reason and "Study Key" in bads[0].reason


def test_bad_rows_do_not_stop_the_file(tmp_path):
    path = write_csv(
        tmp_path / "r.csv",
        WEBSITE,
        [website_row("a", 1, "x", "y"), website_row("b", 1, "x", "y", "up"), website_row("", 1, "x", "y")],
    )
    with open(path, "ab") as file:
        file.write(
            b"1,too,short\r\n\r\n" + ",".join(website_row("c", 1, "x", "caf\xe9")).encode("latin-1") + b"\r\n"
        )
        file.write(",".join(website_row("d", 1, "x", "nan", ratings=("nan", *[""] * 6))).encode() + b"\r\n")
        file.write(",".join(website_row("e", 1, "last", "one")).encode())
    dialogs, bads = read(path)
    assert [dialog.id for dialog in dialogs] == ["a", "e"]
    reasons = {bad.where: bad.reason for bad in bads}
    assert "a finite number as `Response Rating`, got 'up'" in reasons["chat b (line 3)"]
    assert "Chat ID" in reasons["line 4"]
    assert "expected 17 fields" in reasons["line 5"] and "got 3" in reasons["line 5"]
    assert "UTF-8" in reasons["line 7"] and "0xe9" in reasons["line 7"]
    assert "a finite number as `Chat Rating Quality`, got 'nan'" in reasons["chat d (line 8)"]
    assert len(bads) == 5


def test_text_with_newlines_quotes_and_commas(tmp_path):
    dialog = read(
        write_csv(tmp_path / "r.csv", WEBSITE, [website_row("a", 1, 'say "hi",\nplease', "ok\n\nfine")])
    )[0][0]
    assert texts(dialog) == ['say "hi",\nplease', "ok\n\nfine"]


def test_an_unclosed_quote_is_reported_with_its_lines(tmp_path):
    path = write_csv(tmp_path / "r.csv", WEBSITE, [website_row("a", 1, "x", "y")])
    with open(path, "ab") as file:
        file.write(b'1,b,"never closed\r\n' + ",".join(website_row("c", 1, "x", "y")).encode() + b"\r\n")
    dialogs, bads = read(path)
    assert [dialog.id for dialog in dialogs] == ["a"]
    assert "line 3 to line 4: an unclosed quote?" in bads[0].reason


def test_dialogs_before_the_cut_of_a_gzipped_export_survive(tmp_path):
    plain = write_csv(
        tmp_path / "r.csv",
        WEBSITE,
        [website_row(f"c{i}", n, str(hash((i, n))), "y") for i in range(3_000) for n in (1, 2)],
    )
    whole = gzip.compress(plain.read_bytes())
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    dialogs, bads = read(cut)
    assert 1_000 < len(dialogs) < 2_000 and all(len(dialog.messages) == 4 for dialog in dialogs)
    assert len(bads) == 1 and "cut off" in bads[0].reason


def test_the_ratings_export_is_skipped(tmp_path):
    header = [
        "ID",
        "Chat ID",
        "Datetime",
        "Chatbot ID",
        "User Session Key",
        "Quality",
        "Comments",
        "Chat Length",
        "Study Key",
    ]
    path = write_csv(
        tmp_path / "ratings.csv", header, [["1", "a", "2019-01-01", "x", "s", "5", "", "3", "study"]]
    )
    logs, bads, skipped = find_logs([str(path)])
    assert not logs and not bads and "ratings without messages" in skipped[0].reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("😀 hi", "hi"),
        ("日本語 ok", "日本語 ok"),
        ("nice 😀 day", "nice day"),
        ("great 👍🏽!", "great!"),
        ("👩‍👩‍👧 family", "family"),
        ("❤️ you", "you"),
        ("🇩🇪 hallo", "hallo"),
        ("한국어 العربية न‌मस्ते", "한국어 العربية न‌मस्ते"),
        ("  plain  ", "  plain  "),
        ("C++ & #1 © 5*", "C++ & #1 © 5*"),
        ("😀", ""),
    ],
)
def test_emoji_are_stripped_and_scripts_are_kept(text, expected):
    assert strip_emoji(text) == expected


# --- processed CSV ------------------------------------------------------------------------------------------

PROCESSED = [
    "Chat ID",
    "Datetime",
    "state",
    "action",
    "next_state",
    "done",
    "reward_manual_ratings",
    "reward_you",
    "Response Rating",
    "Chat Rating Quality",
]


def transitions(chat: str, turns: int, history: int) -> list[list[str]]:
    """Rows as the published cleaning wrote them: states limited to `history` - 2 texts, next states to
    `history`."""
    context = [text for i in range(1, turns + 1) for text in (f"m{i}", f"r{i}")] + [""]
    rows = []
    for i in range(turns):
        state, after = context[: 1 + 2 * i][-(history - 2) :], context[: 3 + 2 * i][-history:]
        rows.append(
            [
                chat,
                f"2019-01-01 00:00:{i:02d}",
                repr(state),
                f"r{i + 1}",
                repr(after),
                str(int(i == turns - 1)),
                str(i / 2),
                "",
                "1",
                "6",
            ]
        )
    return rows


def test_the_published_cleaning_is_undone(tmp_path):
    rows = transitions("a", 3, history=10)
    assert [row[2] for row in rows] == ["['m1']", "['m1', 'r1', 'm2']", "['m1', 'r1', 'm2', 'r2', 'm3']"]
    assert rows[-1][4].endswith("'m3', 'r3', '']") and [row[5] for row in rows] == ["0", "0", "1"]
    dialog = read(write_csv(tmp_path / "p.csv", PROCESSED, rows))[0][0]
    assert (
        texts(dialog) == ["m1", "r1", "m2", "r2", "m3", "r3"]
        and dialog.replies == [1, 3, 5]
        and not dialog.truncated
    )
    assert [dialog.messages[i]["rewards"] for i in dialog.replies] == [
        {"reward_manual_ratings": n / 2} for n in range(3)
    ]
    assert dialog.messages[1]["feedback"] == {"vote": 1} and dialog.meta["ratings"] == {"quality": 6}


@pytest.mark.parametrize("history", [3, 4, 5, 10])
def test_a_limited_history_loses_no_message(tmp_path, history):
    rows = transitions("a", 6, history)
    assert max(row[2].count("'") // 2 for row in rows) == min(11, history - 2)
    dialog = read(write_csv(tmp_path / "p.csv", PROCESSED, rows))[0][0]
    assert (
        texts(dialog) == [text for i in range(1, 7) for text in (f"m{i}", f"r{i}")]
        and len(dialog.replies) == 6
    )


def test_repeated_texts_are_not_merged(tmp_path):
    rows = [
        [
            "a",
            str(i),
            repr(["hi", "hi"] * i + ["hi"]),
            "hi",
            repr(["hi", "hi"] * (i + 1) + ["hi" if i < 2 else ""]),
            str(int(i == 2)),
        ]
        for i in range(3)
    ]
    dialog = read(write_csv(tmp_path / "p.csv", PROCESSED[:6], rows))[0][0]
    assert texts(dialog) == ["hi"] * 6 and dialog.replies == [1, 3, 5]


def test_rows_that_are_missing_are_found_in_the_state_of_later_ones(tmp_path):
    rows = transitions("a", 4, history=10)
    dialog = read(write_csv(tmp_path / "p.csv", PROCESSED, [rows[1], rows[3]]))[0][0]
    assert texts(dialog) == [text for i in range(1, 5) for text in (f"m{i}", f"r{i}")]
    assert dialog.replies == [3, 7]  # the others are context
    cut = read(write_csv(tmp_path / "q.csv", PROCESSED, rows[:2]))[0][0]
    assert cut.truncated and texts(cut) == ["m1", "r1", "m2", "r2", "m3"]


def test_emoji_in_a_state_do_not_double_the_reply(tmp_path):
    rows = [
        ["a", "1", "['m1']", "😀 r1", "['m1', '😀 r1', 'm2']", "0"],
        ["a", "2", "['m1', '😀 r1', 'm2']", "r2", "['m1', '😀 r1', 'm2', 'r2', '']", "1"],
    ]
    assert texts(read(write_csv(tmp_path / "p.csv", PROCESSED[:6], rows))[0][0]) == ["m1", "r1", "m2", "r2"]


def test_without_chat_ids_every_row_is_a_dialog(tmp_path):
    rows = [row[2:] for row in transitions("a", 3, history=5)]
    dialogs, bads = read(write_csv(tmp_path / "p.csv", PROCESSED[2:], rows))
    assert not bads and [texts(dialog) for dialog in dialogs] == [
        ["m1", "r1", "m2"],
        ["m1", "r1", "m2", "r2", "m3"],
        ["m2", "r2", "m3", "r3"],
    ]
    assert [dialog.replies for dialog in dialogs] == [[1], [3], [3]]
    assert [dialog.truncated for dialog in dialogs] == [True, True, False]
    assert (
        dialogs[1].messages[3]["rewards"] == {"reward_manual_ratings": 0.5}
        and len({dialog.id for dialog in dialogs}) == 3
    )


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("state", "__import__('os').getcwd()", "a Python list of strings as `state`"),
        ("state", "[1, 2]", "a Python list of strings as `state`"),
        ("state", "[]", "a state that ends with the user's message"),
        ("next_state", "not a list", "as `next_state`"),
        ("done", "maybe", "0 or 1 as `done`"),
        ("reward_you", "high", "a finite number as `reward_you`"),
        ("reward_you", "inf", "a finite number as `reward_you`"),
    ],
)
def test_values_that_are_refused(tmp_path, column, value, said):
    rows = transitions("a", 1, 5) + transitions("b", 1, 5)
    rows[0][PROCESSED.index(column)] = value
    dialogs, bads = read(write_csv(tmp_path / "p.csv", PROCESSED, rows))
    assert [dialog.id for dialog in dialogs] == ["b"]
    assert len(bads) == 1 and said in bads[0].reason and bads[0].where == "chat a (line 2)"


def test_a_processed_file_without_action_says_so(tmp_path):
    path = write_csv(tmp_path / "p.csv", ["state", "next_state", "done"], [["['x']", "['x', 'y', '']", "1"]])
    dialogs, bads = read(path)
    assert not dialogs and "missing action; found state, next_state, done" in bads[0].reason
