"""Finding logs, choosing readers, and what damaged files do: every case is a real file on disk."""

import gzip
import io
import json
import math
import random
import time
import tracemalloc
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_dialog.data.formats.json_stream import JsonError, beginning, json_items
from rl_dialog.data.readers import READERS, Bad, LogFile, find_logs, read_log
from rl_dialog.data.schema import ARROW_SCHEMA, Dialog, write_jsonl
from rl_dialog.data.splits import split_key
from rl_dialog.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(*paths, reader=None, **options) -> tuple[list[Dialog], list[Bad]]:
    """Everything that comes out of these files: dialogs, and what is bad at finding or at reading."""
    logs, bads, _ = find_logs([str(path) for path in paths], reader=reader)
    items = [item for log in logs for item in read_log(log, **options)]
    return [item for item in items if isinstance(item, Dialog)], bads + [
        item for item in items if isinstance(item, Bad)
    ]


def read_lines(file) -> list[dict]:
    """A reader of one's own."""
    return list(map(json.loads, file))


def one_bad(bads: list[Bad]) -> Bad:
    assert len(bads) == 1, bads
    assert json.loads(json.dumps(asdict(bads[0]))) == asdict(bads[0])
    assert len(bads[0].excerpt) <= 200
    return bads[0]


# --- finding ------------------------------------------------------------------------------------------------


def test_a_folder_of_mixed_formats_is_read_in_sorted_order(tmp_path):
    write(tmp_path / "logs/b.jsonl", jsonl(GOOD))
    write(tmp_path / "logs/a.csv", "Chat ID,Datetime,Message,Response\nc1,2020-01-01,hi,hello\n")
    write(tmp_path / "logs/deeper/c.json", json.dumps([{"prompt": "hi", "completion": "hello"}]))
    logs, bads, skipped = find_logs([str(tmp_path / "logs")])
    assert [(Path(log.path).name, log.reader, log.corpus) for log in logs] == [
        ("a.csv", "neural_chat", "logs"),
        ("b.jsonl", "openai", "logs"),
        ("c.json", "trl", "logs/deeper"),
    ]
    assert not bads and not skipped


def test_the_reader_is_chosen_by_content_not_by_extension(tmp_path):
    for name in ("chat.txt", "chat.log", "chat", "chat.csv", "chat.json"):
        path = write(tmp_path / name, jsonl(GOOD, GOOD))
        dialogs, bads = read(path)
        assert len(dialogs) == 2 and not bads, name
    packed = write(tmp_path / "packed.bin", gzip.compress(jsonl(GOOD).encode()))
    assert len(read(packed)[0]) == 1


def test_a_data_directory_in_the_making_beside_the_logs_is_not_read(tmp_path):
    write(tmp_path / "a.jsonl", jsonl(GOOD))
    half = tmp_path / "out.tmp-gpu-77-abc"
    write(half / "recipe.json", "{}")
    write(half / "train" / "0.jsonl", jsonl(GOOD))
    write(tmp_path / "cooking.tmp-1/b.jsonl", jsonl(GOOD))  # another program's
    assert [Path(log.path).name for log in find_logs([str(tmp_path)])[0]] == ["a.jsonl", "b.jsonl"]


def test_other_files_are_skipped_and_unknown_ones_are_reported(tmp_path):
    write(tmp_path / "a.jsonl", jsonl(GOOD))
    quoted = "# How a line looks\n" + jsonl(GOOD)
    for name in ("README.md", "LICENSE", "README", "x.py"):
        write(tmp_path / name, quoted)
    for name in (
        "ontology.json",
        "kb.json",
        "db/hotel_db.json",
        "sys_da_voc.txt",
        "quarantine.jsonl",
        "results.json",
    ):
        write(tmp_path / name, '{"hotel": {"area": ["east"]}}')
    write(tmp_path / ".hidden.jsonl", jsonl(GOOD))
    write(tmp_path / "__MACOSX/a.jsonl", jsonl(GOOD))
    write(tmp_path / "notice.jsonl", jsonl(GOOD))
    write(tmp_path / "unknown.json", '{"rows": 3}')
    logs, bads, skipped = find_logs([str(tmp_path)])
    assert [Path(log.path).name for log in logs] == ["a.jsonl", "notice.jsonl"]
    assert len(skipped) == 10 and all(entry.reason for entry in skipped)
    assert Path(one_bad(bads).file).name == "unknown.json"
    assert (
        "no reader recognises this file: expected one of dialog, sharegpt, trl" in bads[0].reason
        and "rows" in bads[0].reason
    )


@pytest.mark.parametrize("reader", [None, "openai"])
def test_a_log_with_the_name_of_an_auxiliary_file_is_still_read(tmp_path, reader):
    write(tmp_path / "schema.json", json.dumps([GOOD]))
    write(tmp_path / "database" / "chats.jsonl", jsonl(GOOD))
    write(tmp_path / "database" / "hotels.json", json.dumps({"hotels": []}))
    dialogs, bads = read(tmp_path, reader=reader)
    assert len(dialogs) == 2 and not bads


def test_reader_forces_one_by_name(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl({"prompt": "hi", "completion": "hello"}))
    dialogs, bads = read(path, reader="openai")
    assert not dialogs and "expected a JSON object with the key `messages`" in one_bad(bads).reason
    assert find_logs([str(path)])[0][0].reader == "trl"


@pytest.mark.parametrize(
    ("paths", "reader", "said"),
    [
        (["a.jsonl"], "opanai", "did you mean 'openai'"),
        (["b.jsonl"], None, "did you mean 'a.jsonl'"),
        (["nowhere/at/all"], None, "found nothing at"),
        (["empty"], None, "expected logs in the folder"),
        (["docs"], None, "found README.md"),
    ],
)
def test_wrong_requests_are_refused_with_a_suggestion(tmp_path, paths, reader, said):
    write(tmp_path / "a.jsonl", jsonl(GOOD))
    (tmp_path / "empty").mkdir()
    write(tmp_path / "docs/README.md", "text")
    with pytest.raises(UserError, match=said):
        find_logs([str(tmp_path / path) for path in paths], reader=reader)


def test_a_log_file_with_an_unknown_reader_is_refused(tmp_path):
    with pytest.raises(UserError, match="did you mean 'multiwoz'"):
        list(read_log(LogFile(str(tmp_path / "x"), "multiwos")))


def test_a_file_given_twice_is_read_once(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl(GOOD))
    logs, _, skipped = find_logs([str(path), str(tmp_path)])
    assert len(logs) == 1 and "also given as" in skipped[0].reason


def test_a_second_copy_is_skipped(tmp_path):
    write(tmp_path / "a.jsonl", jsonl(GOOD))
    write(tmp_path / "a.jsonl.gz", gzip.compress(jsonl(GOOD).encode()))
    logs, _, skipped = find_logs([str(tmp_path)])
    assert [Path(log.path).name for log in logs] == ["a.jsonl"] and "repeats records of" in skipped[0].reason


def test_packed_files_are_second_copies_only_with_the_same_contents(tmp_path):
    """Gzipped, zipped, and gzipped within a zip."""
    for name, row in (("same", GOOD), ("other", {**GOOD, "id": "other"})):
        folder, packed = tmp_path / name, gzip.compress(jsonl(row).encode())
        write(folder / "a.jsonl", jsonl(GOOD))
        write(folder / "a.jsonl.gz", packed)
        with zipfile.ZipFile(folder / "a.jsonl.zip", "w") as archive:
            archive.writestr("inside.jsonl", jsonl(row))
        with zipfile.ZipFile(folder / "both.zip", "w") as archive:
            archive.writestr("b/c.jsonl", jsonl(GOOD))
            archive.writestr("b/c.jsonl.gz", packed)
    logs, bads, skipped = find_logs([str(tmp_path / "same")])
    assert (len(logs), len(skipped), bads) == (2, 3, [])
    logs, bads, skipped = find_logs([str(tmp_path / "other")])
    assert (len(logs), skipped, bads) == (5, [], [])


def test_a_damaged_copy_is_reported_and_none(tmp_path):
    write(tmp_path / "a.jsonl", jsonl(GOOD))
    write(tmp_path / "a.jsonl.gz", gzip.compress(jsonl(GOOD).encode())[:-9])
    assert "gzip" in one_bad(read(tmp_path)[1]).reason


def test_a_reader_of_ones_own_gets_every_file_but_documents_and_our_outputs(tmp_path, monkeypatch):
    names = ["data.txt", "db/a.txt", "results.json", "schema.json", "splits/a.csv", "tasks.json", "train.txt"]
    for name in [*names, "README.md", "LICENSE", ".hidden.csv", "manifest.json", "quarantine.jsonl"]:
        write(tmp_path / "logs" / name, "hi;hello\n")
    write(tmp_path / "their_reader.py", "def read(file): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    logs, bads, skipped = find_logs([str(tmp_path / "logs")], reader="their_reader:read")
    assert sorted(Path(log.path).relative_to(tmp_path / "logs").as_posix() for log in logs) == names
    assert {log.reader for log in logs} == {"their_reader:read"} and not bads
    left = ["LICENSE", "README.md", "manifest.json", "quarantine.jsonl"]
    assert sorted(Path(entry.file).name for entry in skipped) == left


def test_of_a_data_directory_the_shards_are_read_and_nothing_below(tmp_path):
    """Its pairs are the same replies again, with other rewards; its tokenizer is no log."""
    write_jsonl([Dialog("d", GOOD["messages"])], write(tmp_path / "data" / "a.jsonl", ""))
    write(tmp_path / "data" / "tokenizer" / "tokenizer.json", "{}")
    pair = {"prompt": "hi", "chosen": "hello", "rejected": "no"}
    write(tmp_path / "data" / "pairs" / "train.jsonl", jsonl(pair))
    assert len(read(tmp_path)[0]) == 3  # no data directory yet
    write(tmp_path / "data" / "manifest.json", '{"format": "rl_dialog.data"}')
    dialogs, bads = read(tmp_path)
    assert [dialog.id for dialog in dialogs] == ["d"] and not bads
    assert len(read(tmp_path / "data" / "pairs")[0]) == 2


@pytest.mark.parametrize("reader", [None, f"{__name__}:read_lines"])
def test_ids_made_for_records_without_one_are_stable_and_distinct(tmp_path, reader):
    for name in ("a.jsonl", "a.json", "x/a.jsonl"):
        write(tmp_path / name, jsonl(GOOD, GOOD))
    first, second = read(tmp_path, reader=reader)[0], read(tmp_path, reader=reader)[0]
    assert len({dialog.id for dialog in first}) == 6
    assert [dialog.id for dialog in first] == [dialog.id for dialog in second]
    alone = read(write(tmp_path / "y/march.jsonl", jsonl(GOOD, GOOD)))[0]
    assert [dialog.id for dialog in alone] == ["march:1", "march:2"] and alone[0].source == "march"


# --- damaged files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.zip", "a"])
def test_an_empty_file_is_reported(tmp_path, name):
    bad = one_bad(read(write(tmp_path / name, b""))[1])
    assert bad.reason == "the file is empty" and bad.file.endswith(name)


def test_a_file_of_blank_lines_is_empty_and_an_empty_array_is_not_a_log(tmp_path):
    assert one_bad(read(write(tmp_path / "a.jsonl", "\n\r\n  \n"))[1]).reason == "the file is empty"
    assert "no reader recognises" in one_bad(read(write(tmp_path / "b.json", "[]"))[1]).reason
    forced = read(write(tmp_path / "c.json", "[]"), reader="openai")[1]
    assert "without any record" in one_bad(forced).reason


def test_broken_lines_between_good_ones(tmp_path):
    lines = [
        b'{"messages": [{"role": "user", "content": "cut',  # 1
        json.dumps(GOOD).encode(),
        b"not json",  # 3
        b'{"messages": "text"}',  # 4
        b'{"messages": []}',  # 5
        b"[1, 2]",  # 6
        b"",
        b'{"messages": [{"role": "assistant", "content": "\xff"}]}',  # 8
        b'{"messages": [{"role": "assistant", "content": "x", "reward": NaN}]}',  # 9
        b'{"messages": [{"role": "robot", "content": "x"}]}',  # 10
        b'{"messages": [{"role": "user", "content": "x", "reward": 1}]}',  # 11
        b'{"messages": [{"role": "user", "content": 3}]}',  # 12
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',  # 13
        b'{"messages": [{"role": "user", "content": "x"}], "score": NaN}',  # 14
        b"[" * 100_000,  # 15
        json.dumps(GOOD).encode(),
    ]
    dialogs, bads = read(write(tmp_path / "log.jsonl", b"\r\n".join(lines)))
    assert [dialog.id for dialog in dialogs] == ["log:2", "log:16"]
    assert [bad.where for bad in bads] == [f"line {n}" for n in (1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15)]
    reasons = dict(zip((bad.where for bad in bads), (bad.reason for bad in bads), strict=True))
    assert "invalid JSON" in reasons["line 3"]
    assert "expected UTF-8 text, got byte 0xff at column" in reasons["line 8"]
    assert (
        "NaN" in reasons["line 9"]
        and "`role` to be one of" in reasons["line 10"]
        and "robot" in reasons["line 10"]
    )
    assert (
        "rewards on assistant messages only" in reasons["line 11"]
        and "text that UTF-8 and JSON can hold" in reasons["line 14"]
    )
    for bad in bads:
        json.dumps(asdict(bad)).encode()
        json.dumps(asdict(bad), ensure_ascii=False).encode()


def test_the_first_lines_may_be_broken(tmp_path):
    path = write(tmp_path / "log.txt", b"\xff\xfa broken\n{}\n" + jsonl({"level": "info"}, GOOD).encode())
    dialogs, bads = read(path)
    assert len(dialogs) == 1 and [bad.where for bad in bads] == ["line 1", "line 2", "line 3"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_byte_order_mark_crlf_and_blank_lines(tmp_path, name):
    row = json.dumps(GOOD)
    text = f"\ufeff{row}\r\n\r\n{row}\r\n" if name == "a.jsonl" else f"\ufeff\r\n[{row},\r\n{row}]\r\n"
    dialogs, bads = read(write(tmp_path / name, text))
    assert len(dialogs) == 2 and not bads
    assert dialogs[0].messages == GOOD["messages"]


def test_a_spreadsheet_row_of_empty_cells_is_blank(tmp_path):
    path = write(tmp_path / "a.csv", 'prompt,completion\nhi,yo\n,\n\n" ",\nbye,\n,\n')
    dialogs, bads = read(path)
    assert [[message["content"] for message in dialog.messages] for dialog in dialogs] == [
        ["hi", "yo"],
        ["bye", ""],
    ]
    assert not bads


def test_a_csv_with_a_column_twice_gives_no_rows(tmp_path):
    path = write(tmp_path / "a.csv", "prompt,completion,label,label\nhi,yo,true,false\n")
    dialogs, bads = read(path)
    assert not dialogs and one_bad(bads).reason == "expected each column once, got 'label' twice"


def test_a_csv_whose_header_cannot_be_read_gives_no_rows(tmp_path):
    path = write(tmp_path / "a.csv", b"Chat ID,Datetime,Message,Response,caf\xe9\na,1,x,y,z\na,2,x,y,z\n")
    dialogs, bads = read(path)
    assert not dialogs and [bad.where for bad in bads] == ["line 1", ""] and "column names" in bads[1].reason


def test_utf16_is_named(tmp_path):
    assert "UTF-16" in one_bad(read(write(tmp_path / "a.jsonl", jsonl(GOOD).encode("utf-16")))[1]).reason


def test_what_no_reader_recognises_is_named_by_its_keys_or_its_encoding(tmp_path):
    flat = write(tmp_path / "flat.jsonl", jsonl({"text": "hi", "reply": "ho"}))
    assert "got the keys reply, text; a format" in one_bad(read(flat)[1]).reason
    latin = write(tmp_path / "latin.jsonl", '{"messages": "çà"}\n'.encode("latin1"))
    assert "got text that is not UTF-8 (convert it" in one_bad(read(latin)[1]).reason


@pytest.mark.parametrize("kind", ["bz2", "zstd"])
@pytest.mark.parametrize("reader", [None, "openai"])
def test_a_file_packed_otherwise_is_named(tmp_path, kind, reader):
    path = tmp_path / f"a.jsonl.{kind}"
    with pa.output_stream(path, compression=kind) as file:
        file.write(jsonl(GOOD).encode())
    logs, bads, _ = find_logs([str(path)], reader=reader)
    bads += [item for log in logs for item in read_log(log)]
    assert f"expected a plain file, gzip or zip, got {kind}" in one_bad(bads).reason


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz"])
def test_dialogs_before_the_cut_of_a_gzip_survive(tmp_path, name):
    rows = [
        {"id": str(i), "messages": [{"role": "user", "content": str(hash((i, 1)))}]} for i in range(20_000)
    ]
    text = jsonl(*rows) if name == "a.jsonl.gz" else json.dumps(rows)
    whole = gzip.compress(text.encode())
    dialogs, bads = read(write(tmp_path / name, whole[: len(whole) // 2]))
    assert 5_000 < len(dialogs) < 15_000
    assert [dialog.id for dialog in dialogs] == [str(i) for i in range(len(dialogs))]
    assert (
        "gzip" in one_bad(bads).reason
        and "cut off" in bads[0].reason
        and bads[0].where == f"after record {len(dialogs)}"
    )


def test_dialogs_before_the_cut_of_an_array_survive(tmp_path):
    text = json.dumps([GOOD, GOOD, GOOD])
    dialogs, bads = read(write(tmp_path / "a.json", text[: len(text) - 30]))
    assert len(dialogs) == 2 and "breaks inside element 3" in one_bad(bads).reason
    dialogs, bads = read(write(tmp_path / "b.json", text[:-1]))
    assert len(dialogs) == 3 and "the end of the file" in one_bad(bads).reason


def test_a_broken_element_of_an_array_does_not_cost_the_others(tmp_path):
    good = json.dumps(GOOD).encode()
    broken = [
        b'{"messages": [1 2, "]"]}',
        b'{"messages": [{"role": "assistant", "content": "a", "reward": NaN}]}',
        b'{"messages": [{"role": "\xff"}]}',
        b"nil",
    ]
    dialogs, bads = read(write(tmp_path / "a.json", b"[" + b",\n".join([good, *broken, good]) + b"]"))
    assert [dialog.id for dialog in dialogs] == ["a:1", "a:6"]
    assert [bad.where for bad in bads] == ["item 2", "item 3", "item 4", "item 5"]
    assert "valid JSON" in bads[0].reason and "NaN" in bads[1].reason


def test_truncated_zip_and_damaged_member(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "a.jsonl", jsonl(*[{"id": str(i), **GOOD, "note": str(hash((i, 1)))} for i in range(20_000)])
        )
        archive.writestr("README.md", "text")
    whole = buffer.getvalue()
    dialogs, bads = read(write(tmp_path / "cut.zip", whole[: len(whole) // 2]))
    assert not dialogs and "expected a whole zip file" in one_bad(bads).reason
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 200] = bytes(200)
    dialogs, bads = read(write(tmp_path / "damaged.zip", bytes(damaged)))
    assert (
        1_000 < len(dialogs) < 20_000
        and "reading stopped here" in bads[-1].reason
        and bads[-1].file.endswith("damaged.zip/a.jsonl")
    )
    write(tmp_path / "whole.zip", whole)
    logs, bads, skipped = find_logs([str(tmp_path / "whole.zip")])
    assert (logs[0].member, logs[0].corpus, len(skipped)) == ("a.jsonl", "whole", 1)
    assert sum(isinstance(item, Dialog) for item in read_log(logs[0])) == 20_000


@pytest.mark.slow
def test_a_line_of_200_megabytes_is_reported_in_bounded_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    with open(path, "wb") as file:
        file.write(jsonl(GOOD).encode() + b'{"messages": [{"role": "user", "content": "')
        for _ in range(200):
            file.write(b"a" * (1 << 20))
        file.write(b'"}]}\n' + jsonl(GOOD).encode())
    started = time.process_time()
    for limit, megabytes in ((1 << 20, 8), (64 << 20, 90)):
        tracemalloc.start()
        dialogs, bads = read(path, max_line_bytes=limit)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < megabytes << 20, f"{peak / 2**20:.0f} MB at a limit of {limit}"
        assert [dialog.id for dialog in dialogs] == ["long:1", "long:3"]
        assert (
            one_bad(bads).where == "line 2"
            and f"at most {limit} bytes" in bads[0].reason
            and "209715" in bads[0].reason
        )
    assert time.process_time() - started < 5
    path.unlink()


def test_a_first_and_only_line_that_is_too_long_is_still_recognised(tmp_path):
    path = write(
        tmp_path / "a.jsonl", b'{"messages": [{"role": "user", "content": "' + b"a" * (3 << 20) + b'"}]}'
    )
    dialogs, bads = read(path, max_line_bytes=1 << 20)
    assert not dialogs and "max_line_bytes" in one_bad(bads).reason
    assert len(read(path)[0]) == 1


def test_a_line_exactly_as_long_as_allowed_is_read(tmp_path):
    row = json.dumps(GOOD)
    path = write(tmp_path / "a.jsonl", row + "\n")
    assert len(read(path, max_line_bytes=len(row) + 1)[0]) == 1
    assert len(read(path, max_line_bytes=len(row))[1]) == 1


@pytest.mark.slow
def test_a_large_array_is_read_in_flat_memory(tmp_path):
    path = tmp_path / "big.json"
    row = json.dumps({"messages": [{"role": "user", "content": "a" * 10_000}]})
    with open(path, "w") as file:
        file.write("[" + ",\n".join([row] * 4_000) + "]")  # 40 MB
    log = find_logs([str(path)])[0][0]
    tracemalloc.start()
    count = sum(isinstance(item, Dialog) for item in read_log(log))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4_000 and peak < 8 << 20


def test_a_missing_file_is_reported_when_it_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl(GOOD))
    log = find_logs([str(path)])[0][0]
    path.unlink()
    assert "cannot be read: No such file" in one_bad(list(read_log(log))).reason


def test_a_format_that_fails_on_a_record_does_not_stop_the_file(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", jsonl({**GOOD, "boom": 1}, GOOD))
    from rl_dialog.data.formats import openai

    made = openai.chat_messages
    calls = []

    def fails_once(value, where):
        calls.append(where)
        if len(calls) == 1:
            raise KeyError("boom")
        return made(value, where)

    monkeypatch.setattr(openai, "chat_messages", fails_once)
    dialogs, bads = read(path)
    assert len(dialogs) == 1 and "KeyError" in one_bad(bads).reason and bads[0].where == "line 1"


def test_random_damage_never_raises_and_never_passes_in_silence(tmp_path):
    rng = random.Random(5)
    seeds = {
        "a.jsonl": jsonl(GOOD, TRL["kto"][0], TRL["implied prompt of messages"][0]).encode(),
        "a.json": json.dumps([GOOD, GOOD]).encode(),
        "a.csv": b"Chat ID,Datetime,Message,Response\na,1,x,y\na,2,x,y\n",
        "a.json.gz": gzip.compress(json.dumps([GOOD] * 5).encode()),
        "val.json": json.dumps({"SNG1": {"goal": {}, "log": [{"text": "x"}, {"text": "y"}]}}).encode(),
    }
    pieces = [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b"null",
        b"NaN",
        b"1e999",
        b"\\",
        b"\xff",
        b"\x00",
        b"\n",
        b"{}",
        b"\\ud800",
    ]
    for round_number in range(400):
        name, data = rng.choice([(name, bytearray(data)) for name, data in seeds.items()])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 1, 4])] = rng.choice(pieces)
        path = write(tmp_path / str(round_number) / name, bytes(data))
        dialogs, bads = read(
            path, reader=rng.choice([None, None, *READERS]), max_line_bytes=rng.choice([50, 1 << 20])
        )
        assert dialogs or bads, data
        for dialog in dialogs:
            assert Dialog.from_row(dialog.to_row()) == dialog
            dialog.to_json().encode()
        for bad in bads:
            json.dumps(asdict(bad), ensure_ascii=False).encode()


# --- JSON in pieces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "value", [[1, "a,]", {"b": [None, 2.5]}], {"k": {"x": 1, "y": [2]}, "é": "ü\\\"'"}, [], {}, 7, [[], [1]]]
)
def test_elements_are_those_of_json_loads(depth, value):
    def elements(value, depth, path=()):
        if depth == 0 or not isinstance(value, dict | list):
            return [(path, value)]
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, item in pairs for found in elements(item, depth - 1, (*path, key))]

    for indent in (None, 2):
        stream = io.BufferedReader(io.BytesIO(json.dumps(value, indent=indent).encode()))
        assert [(item.path, item.value) for item in json_items(stream, depth, 1000)] == elements(value, depth)


def test_elements_longer_than_a_piece_are_read_and_longer_than_the_limit_are_passed(tmp_path):
    long = "x\\" * 400_000
    path = write(tmp_path / "a.json", json.dumps([1, long, {"a": [long]}, 2]))
    with open(path, "rb") as stream:
        assert [item.value for item in json_items(stream, 1, 10 << 20)] == [1, long, {"a": [long]}, 2]
    with open(path, "rb") as stream:
        items = list(json_items(stream, 1, 1000))
    assert [item.value for item in items] == [1, None, None, 2] and "longer than 1000" in items[1].problem


@pytest.mark.parametrize(("text", "depth"), [(b"[1] 2", 1), (b"{} }", 0), (b'{"a": [1]} {"a": [2]}', 1)])
def test_text_after_the_value_is_an_error(text, depth):
    with pytest.raises(JsonError, match="expected the end of the file"):
        list(json_items(io.BufferedReader(io.BytesIO(text)), depth, 1000))


@pytest.mark.parametrize("indent", [None, 1])
def test_objects_one_after_another_are_read_whatever_the_first_ones_length(tmp_path, indent):
    """`datasets` names JSON lines .json; that a second line follows shows only behind a long first one."""
    for length in (1, 200_000):
        long = {"messages": [{"role": "user", "content": "x" * length}, REPLY]}
        text = "\n".join(json.dumps(row, indent=indent) for row in (long, GOOD, GOOD))
        dialogs, bads = read(write(tmp_path / "a.json", text))
        assert not bads and [len(dialog.messages[0]["content"]) for dialog in dialogs] == [length, 2, 2]
        assert len({dialog.id for dialog in dialogs}) == 3
    text = "\n".join(json.dumps(row, indent=indent) for row in (long, long)) + '\n{"messages": nothing}\n'
    dialogs, bads = read(write(tmp_path / "b.json", text + json.dumps(GOOD)))
    assert len(dialogs) == 3 and one_bad(bads).where == "item 3"


def test_beginning_closes_what_is_open():
    text = json.dumps({"a": [{"b": "x, [y"}, {"c": 'q"}'}], "d": 1})
    assert beginning(text) == json.loads(text)
    for end in range(1, len(text)):
        assert isinstance(beginning(text[:end]), dict)
    assert beginning(text[: text.index("q")]) == {"a": [{"b": "x, [y"}, {}]}
    assert beginning("no json") is None and beginning("") is None


# --- our own format and OpenAI's ----------------------------------------------------------------------------

OWN = Dialog(
    id="d1",
    messages=[
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "日本語\nok"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "{}", "tool_call_id": "1"},
        {
            "role": "assistant",
            "content": "ok",
            "reward": 0.5,
            "rewards": {"length": 1.0},
            "feedback": {"vote": 1},
            "weight": 1,
        },
    ],
    source="bank",
    split="test",
    truncated=True,
    goal={"domain": "x"},
    meta={"ratings": {"quality": 5}},
)


def test_our_own_jsonl_and_parquet_come_back_equal(tmp_path):
    other = Dialog(id="d2", messages=[{"role": "user", "content": ""}], source="bank")
    write_jsonl([OWN, other], tmp_path / "a.jsonl")
    assert find_logs([str(tmp_path / "a.jsonl")])[0][0].reader == "dialog"
    assert read(tmp_path / "a.jsonl") == ([OWN, other], [])
    table = pa.Table.from_pylist([OWN.to_row(), other.to_row()], schema=ARROW_SCHEMA).append_column(
        "input_ids", [[1, 2]]
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert find_logs([str(tmp_path / "a.parquet")])[0][0].reader == "dialog"
    assert read(tmp_path / "a.parquet") == ([OWN, other], [])


def test_damaged_parquet(tmp_path):
    rows = [OWN.to_row() | {"id": str(i)} for i in range(3)]
    rows[1]["messages"] = [{"role": "user", "content": "x", "extra": "not json"}]
    pq.write_table(pa.Table.from_pylist(rows, schema=ARROW_SCHEMA), tmp_path / "a.parquet")
    dialogs, bads = read(tmp_path / "a.parquet")
    assert [dialog.id for dialog in dialogs] == ["0", "2"] and one_bad(bads).where == "row 2"
    whole = (tmp_path / "a.parquet").read_bytes()
    assert "Parquet" in one_bad(read(write(tmp_path / "cut.parquet", whole[: len(whole) // 2]))[1]).reason
    pq.write_table(pa.Table.from_pylist(rows, schema=ARROW_SCHEMA).drop(["goal"]), tmp_path / "b.parquet")
    assert "missing ['goal']" in one_bad(read(tmp_path / "b.parquet")[1]).reason


def test_openai_rows(tmp_path):
    row = {
        "messages": [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": "ok",
                "weight": 0,
                "reward": 1,
                "rewards": {"a": 2},
                "feedback": {"vote": -1},
            },
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
        ],
        "tools": [{"type": "function"}],
        "split": "val",
    }
    dialogs, bads = read(write(tmp_path / "chat.jsonl", jsonl(row, {**row, "id": 7, "source": "shop"})))
    assert not bads
    first, second = dialogs
    assert (
        first.messages[0] == {"role": "system", "content": "be kind"}
        and first.messages[1]["content"] == "one two"
    )
    assert first.messages[2] == row["messages"][2] and first.replies == [3]
    assert first.messages[3] == {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert (first.id, first.source, first.split, first.meta) == (
        "chat:1",
        "chat",
        "validation",
        {"tools": row["tools"]},
    )
    assert (second.id, second.source) == ("7", "shop")
    for dialog in dialogs:
        assert Dialog.from_row(dialog.to_row()) == dialog


def test_keys_that_a_table_filled_with_null_are_absent(tmp_path):
    """As `datasets` and pandas write messages of which only some have a vote, a weight or calls."""
    nothing = dict.fromkeys(("weight", "feedback", "rewards", "tool_calls"))
    user = {"role": "user", "content": "hi", **nothing}
    voted = {"role": "assistant", "content": "ho", **nothing, "feedback": {"vote": 1}, "reward": None}
    dialogs, bads = read(write(tmp_path / "chat.jsonl", jsonl({"messages": [user, voted]})))
    assert not bads
    assert dialogs[0].replies == [1]
    assert dialogs[0].messages[1]["feedback"] == {"vote": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "message 0, part 0: expected .*text only.*image_url",
        ),
        ({"messages": ["hi"]}, "message 0: expected an object, got 'hi'"),
        ({"split": "holdout"}, "expected one of .*got 'holdout'"),
        ({"id": ["x"]}, "a string or an integer as `id`"),
        ({"meta": "x"}, "an object as `meta`"),
    ],
)
def test_openai_rows_that_are_refused(tmp_path, change, said):
    dialogs, bads = read(write(tmp_path / "chat.jsonl", jsonl(GOOD, {**GOOD, **change})))
    assert len(dialogs) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(one_bad(bads).reason)


def test_a_refusal_is_what_the_assistant_said(tmp_path):
    """OpenAI's models say it beside a content of null."""
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    (dialog,), bads = read(write(tmp_path / "a.jsonl", jsonl({"messages": [USER, refused]})))
    assert not bads and dialog.messages[1] == {**refused, "content": "I cannot."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    (dialog,), bads = read(write(tmp_path / "a.jsonl", jsonl({"messages": [USER, parts]})))
    assert not bads and dialog.messages[1] == {"role": "assistant", "content": "I cannot."}


def test_durations_of_parquet_are_text(tmp_path):
    row = {"messages": [[USER, OTHER]], "took": pa.array([90], pa.duration("s"))}
    pq.write_table(pa.table(row), tmp_path / "a.parquet")
    (dialog,), bads = read(tmp_path / "a.parquet")
    assert not bads and dialog.meta == {"took": "0:01:30"}


def test_openai_preferences(tmp_path):
    row = {
        "input": {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes?"},
                {"role": "user", "content": "joke"},
            ],
            "tools": [],
        },
        "preferred_output": [{"role": "assistant", "content": "ha"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
    (good, poor), bads = read(write(tmp_path / "p.jsonl", jsonl(row)))
    assert not bads
    assert good.messages[:-1] == poor.messages[:-1] and good.messages[1]["weight"] == 0
    assert good.messages[-1] == {"role": "assistant", "content": "ha", "reward": 1.0}
    assert poor.messages[-1] == {"role": "assistant", "content": "no", "reward": 0.0}
    assert good.meta == {"tools": [], "pair": "p:1", "preferred": True} and poor.meta["preferred"] is False
    assert (good.id, poor.id) == ("p:1#chosen", "p:1#rejected") and good.replies == poor.replies == [3]
    assert (
        read(write(tmp_path / "q.jsonl", jsonl({**row, "non_preferred_output": []})))[0] == []
    )  # never half a pair


# --- TRL ----------------------------------------------------------------------------------------------------

USER, REPLY, OTHER = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "good"},
    {"role": "assistant", "content": "poor"},
)
EARLIER = [USER, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "joke"}]
CHOSEN, REJECTED = {**REPLY, "reward": 1.0}, {**OTHER, "reward": 0.0}
CONTEXT = [USER, {"role": "assistant", "content": "yes?", "weight": 0}, {"role": "user", "content": "joke"}]
TRL = {
    "completion": ({"prompt": "hi", "completion": "good"}, [[USER, REPLY]]),
    "completion of messages": ({"prompt": EARLIER, "completion": [REPLY]}, [[*CONTEXT, REPLY]]),
    "messages": ({"messages": [USER, REPLY]}, [[USER, REPLY]]),
    "pair": ({"prompt": "hi", "chosen": "good", "rejected": "poor"}, [[USER, CHOSEN], [USER, REJECTED]]),
    "pair of messages": (
        {"prompt": EARLIER, "chosen": [REPLY], "rejected": [OTHER]},
        [[*CONTEXT, CHOSEN], [*CONTEXT, REJECTED]],
    ),
    "implied prompt of messages": (
        {"chosen": [*EARLIER, REPLY], "rejected": [*EARLIER, OTHER]},
        [[*CONTEXT, CHOSEN], [*CONTEXT, REJECTED]],
    ),
    "prompt repeated in the answers": (
        {"prompt": "hi", "chosen": [USER, REPLY], "rejected": [USER, OTHER]},
        [[USER, CHOSEN], [USER, REJECTED]],
    ),
    "kto": (
        {"prompt": "hi", "completion": "good", "label": True},
        [[USER, {**CHOSEN, "feedback": {"vote": 1}}]],
    ),
    "kto of messages": (
        {"prompt": [USER], "completion": [OTHER], "label": False},
        [[USER, {**REJECTED, "feedback": {"vote": -1}}]],
    ),
    "kto in numbers": (
        {"prompt": "hi", "completion": "good", "label": 1.0},
        [[USER, {**CHOSEN, "feedback": {"vote": 1}}]],
    ),
    "kto in a number": (
        {"prompt": "hi", "completion": [OTHER], "label": 0.0},
        [[USER, {**REJECTED, "feedback": {"vote": -1}}]],
    ),
    "kto without a label": ({"prompt": "hi", "completion": "good", "label": math.nan}, [[USER, REPLY]]),
    "kto without a label in text": ({"prompt": "hi", "completion": "good", "label": ""}, [[USER, REPLY]]),
    "implied prompt in text": (
        {"chosen": "The sky is blue.", "rejected": "The sky is blank."},
        [
            [
                {"role": "user", "content": "The sky is "},
                {"role": "assistant", "content": "blue.", "reward": 1.0},
            ],
            [
                {"role": "user", "content": "The sky is "},
                {"role": "assistant", "content": "blank.", "reward": 0.0},
            ],
        ],
    ),
    "implied prompt in a transcript": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: good", "rejected": "\n\nHuman: hi\n\nAssistant: poor"},
        [[USER, CHOSEN], [USER, REJECTED]],
    ),
}


def stored(tmp_path: Path, rows: list[dict], container: str) -> Path:
    path = tmp_path / f"rows.{container}"
    if container == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    text = json.dumps(rows) if "jsonl" not in container else jsonl(*rows)
    return write(path, gzip.compress(text.encode()) if container.endswith("gz") else text)


@pytest.mark.parametrize("container", ["jsonl", "json", "jsonl.gz", "json.gz", "parquet"])
@pytest.mark.parametrize("shape", TRL)
def test_trl_shapes_in_every_container(tmp_path, shape, container):
    row, expected = TRL[shape]
    dialogs, bads = read(stored(tmp_path, [row, row], container))
    assert not bads
    assert [dialog.messages for dialog in dialogs] == expected * 2
    assert len({dialog.id for dialog in dialogs}) == len(dialogs)
    for dialog in dialogs:
        assert dialog.replies == [len(dialog.messages) - 1]
    if "chosen" in row:
        assert dialogs[0].meta["pair"] == dialogs[1].meta["pair"] != dialogs[2].meta["pair"]
        assert [dialog.meta["preferred"] for dialog in dialogs] == [True, False, True, False]


@pytest.mark.parametrize("name", ["kto.csv", "kto.txt", "export"])
def test_trl_rows_of_a_table_are_read_by_whatever_name(tmp_path, name):
    dialogs, bads = read(write(tmp_path / name, 'prompt,completion,label\nhi,"a,\nb",1\nbye,c,0\n'))
    assert [dialog.messages[-1]["content"] for dialog in dialogs] == ["a,\nb", "c"] and not bads
    assert [dialog.messages[-1]["reward"] for dialog in dialogs] == [1.0, 0.0]


def test_a_prompt_beside_whole_conversations_is_not_said_twice_where_they_have_a_system_prompt(tmp_path):
    begins = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    whole = {name: [*begins, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    for prompt in ("q", begins[1:], begins):
        dialogs, bads = read(write(tmp_path / "a.jsonl", jsonl({"prompt": prompt, **whole})))
        assert [dialog.messages[:-1] for dialog in dialogs] == [begins, begins] and not bads


def test_trl_rows_in_csv_keep_their_texts(tmp_path):
    path = write(
        tmp_path / "kto.csv.gz", gzip.compress(b'prompt,completion,label\nNA,"a,\nb",True\nnull,,false\n')
    )
    dialogs, bads = read(path)
    assert not bads
    assert [[message["content"] for message in dialog.messages] for dialog in dialogs] == [
        ["NA", "a,\nb"],
        ["null", ""],
    ]
    assert [dialog.messages[1]["feedback"] for dialog in dialogs] == [{"vote": 1}, {"vote": -1}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "hi", "completion": "x", "label": "maybe"}, "true or false as `label`"),
        ({"prompt": "hi", "completion": "x", "label": 0.5}, "true or false as `label`"),
        ({"prompt": "hi", "completion": [USER]}, "an assistant message in the completion"),
        ({"chosen": "same", "rejected": "same"}, "chosen and rejected to differ"),
        ({"prompt": "hi", "chosen": "x", "rejected": None}, "a list of messages"),
        ({"prompt": "hi"}, "expected a row with prompt and completion"),
    ],
)
def test_trl_rows_that_are_refused(tmp_path, row, said):
    dialogs, bads = read(write(tmp_path / "a.jsonl", jsonl(TRL["pair"][0], row)))
    assert len(dialogs) == 2 and said in one_bad(bads).reason and bads[0].where == "line 2"


def test_other_columns_of_a_row_are_kept(tmp_path):
    row = {**TRL["pair"][0], "id": "p7", "score_chosen": 8.5, "source": "feedback", "split": "train"}
    good, poor = read(write(tmp_path / "a.jsonl", jsonl(row)))[0]
    assert good.meta == {"score_chosen": 8.5, "pair": "p7", "preferred": True}
    assert (good.id, poor.source, poor.split) == ("p7#chosen", "feedback", "train")


@pytest.mark.parametrize("reader", ["openai", "trl", "sharegpt", "preference", "input", "own"])
def test_a_group_of_the_logs_own_does_not_decide_splits(tmp_path, monkeypatch, reader):
    """Two customers of a treatment group are two contexts; `meta.group` of a row is ours."""
    write(
        tmp_path / "json_reader.py", "import json\n\ndef read(file):\n    yield from map(json.loads, file)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def row(text: str, **more) -> dict:
        asked, said = {"role": "user", "content": text}, {"role": "assistant", "content": "yes"}
        other = {**said, "content": "no"}
        pair = {"preferred_output": [said], "non_preferred_output": [other]}
        return {
            "openai": {"messages": [asked, said], **more},
            "trl": {"prompt": text, "completion": "yes", **more},
            "sharegpt": {"conversations": [{"from": "human", "value": text}], **more},
            "preference": {"input": {"messages": [asked]}, **pair, **more},
            "input": {"input": {"messages": [asked], **more}, **pair},
            "own": {"messages": [asked, said], **more},
        }[reader]

    def dialogs(*rows: dict) -> list[Dialog]:
        forced = "json_reader:read" if reader == "own" else None
        found, bads = read(write(tmp_path / "a.jsonl", jsonl(*rows)), reader=forced)
        assert found and not bads
        return found

    plain = dialogs(row("a"), row("b"))
    treated = dialogs(row("a", group="treatment"), row("b", group="treatment"))
    assert list(map(split_key, treated)) == list(map(split_key, plain))
    assert {dialog.meta["log_group"] for dialog in treated} == {"treatment"}
    assert list(map(split_key, dialogs(row("a", group=None), row("b", group=None)))) == list(
        map(split_key, plain)
    )
    if reader != "input":
        grouped = dialogs(*(row(text, meta={"group": "ours"}, group="theirs") for text in "ab"))
        assert len(set(map(split_key, grouped))) == 1 and grouped[0].meta["group"] == "ours"


def test_every_reader_has_the_three_functions():
    for name, form in READERS.items():
        assert all(callable(getattr(form, function)) for function in ("matches", "corpus", "read")), name


def test_simple_logs_are_read_fast_enough(tmp_path):
    rows = [{"id": str(i), "messages": GOOD["messages"] * 3} for i in range(10_000)]
    path = write(tmp_path / "a.jsonl", jsonl(*rows))
    log = replace(find_logs([str(path)])[0][0], corpus="speed")
    started = time.process_time()
    assert sum(isinstance(item, Dialog) for item in read_log(log)) == len(rows)
    assert time.process_time() - started < 4, (
        "below 2,500 dialogs a second, where 5,000 is the aim on an idle core"
    )


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    real = tmp_path / "real" / "inner"
    real.mkdir(parents=True)
    (real / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n'
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "here").symlink_to(tmp_path / "real")
    (real / "back").symlink_to(tmp_path / "real")
    found, _, _ = find_logs([str(logs)])
    assert [log.path for log in found] == [str(logs / "here" / "inner" / "a.jsonl")]
