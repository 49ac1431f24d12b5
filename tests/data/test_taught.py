"""What teachers say of messages, beside the tokens: on the right token, once, whatever is cut, packed or
padded."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_dialog.data import shards
from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.taught import Taught, in_rows, sizes
from rl_dialog.data.tokenize import CHAT_TEMPLATE, tokenize
from rl_dialog.methods import DT

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def numbered(dialog: Dialog) -> Taught:
    """What a teacher would say who calls message n (n, 10 n)."""
    spoken = [n for n, m in enumerate(dialog.messages) if m["role"] != "system" and m["content"]]
    values = np.array(spoken, float)[:, None]
    return Taught(np.array(spoken, np.int32), values.astype(np.float32), (10 * values).astype(np.float16))


def talk(*contents, system="", truncated=False) -> Dialog:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return Dialog("d", messages, truncated=truncated)


def read_back(row, tokenizer) -> dict[int, str]:
    """What a row's tokens say, by the number that the teacher gave the message."""
    start_of = sorted(tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("user", "assistant"))
    said = {}
    for place, number in zip(row.taught.places, row.taught.emotions[:, 0], strict=True):
        assert row.input_ids[place] == tokenizer.eos_token_id
        begin = max(i for i in range(place) if row.input_ids[i] in start_of)
        said[int(number)] = tokenizer.decode(row.input_ids[begin + 1 : place])
    return said


def test_places_by_hand():
    """Messages of 3, 4, 2 and 5 tokens; the second row has the first token of the dialog in front, begins at
    message 1 and is cut in message 3. Message 1 is in the first row already, message 3 in none."""
    dialog = Taught(np.arange(4, dtype=np.int32), np.eye(4, dtype=np.float32), np.zeros((4, 0), np.float16))
    rows = in_rows(dialog, [0, 3, 7, 9], [3, 6, 9, 14], [(0, 0, 8), (1, 3, 10)])
    assert [row.places.tolist() for row in rows] == [[2, 5], [6]]
    assert [row.emotions.argmax(1).tolist() for row in rows] == [[0, 1], [2]]
    assert sizes({}) == (0, 0) and sizes({"emotion": {"labels": "ab"}, "embedding": {"size": 7}}) == (2, 7)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML])
@pytest.mark.parametrize("system", ["", "be kind"])
def test_each_message_is_taught_where_it_ends(tokenizer, monkeypatch, template, system):
    """An empty message says nothing; what a template writes behind an end of turn is no part of a message."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    dialog = talk("hi", "hello you", "", "yes", system=system)
    [row] = tokenize(dialog, tokenizer, taught=numbered(dialog))
    first = bool(system)
    assert read_back(row, tokenizer) == {first: "hi", first + 1: "hello you", first + 3: "yes"}
    [plain] = tokenize(dialog, tokenizer)
    assert plain.taught is None and np.array_equal(plain.input_ids, row.input_ids)


def test_a_message_is_taught_where_the_next_header_ends_it(tokenizer, monkeypatch):
    """Some templates end what the user says only with the header of the reply (Falcon 3, DeepSeek): before it
    a model that reads message by message has not read that message. The last one here is never read."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% else %}"
        "<|user|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    dialog = talk("hi", "hello you", "yes", "no", "hello")
    [row] = tokenize(dialog, tokenizer, taught=numbered(dialog))
    assert row.taught.emotions[:, 0].tolist() == [0, 1, 2, 3]
    ends = tokenizer.convert_ids_to_tokens(row.input_ids[row.taught.places])
    assert ends == ["<|assistant|>", "<|end|>"] * 2


@pytest.mark.parametrize("turns", [6, 40])  # a long dialog is rendered in another way
@pytest.mark.parametrize("truncated", [False, True])
def test_cut_rows_keep_alignment_and_teach_each_message_once(tokenizer, turns, truncated):
    generator = np.random.default_rng(turns)
    contents = [f"{n} " + "you " * int(generator.integers(1, 12)) for n in range(turns)]
    dialog = talk(*contents, *(["and?"] if truncated else []), system="be kind", truncated=truncated)
    rows = tokenize(dialog, tokenizer, max_length=60, taught=numbered(dialog))
    assert len(rows) > 1
    said = [read_back(row, tokenizer) for row in rows]
    assert all(one.keys().isdisjoint(other) for i, one in enumerate(said) for other in said[:i])
    together = {number: text for row in said for number, text in row.items()}
    assert together == {n: m["content"] for n, m in enumerate(dialog.messages) if n in together}
    assert len(together) >= turns - 1
    for row, plain in zip(rows, tokenize(dialog, tokenizer, max_length=60), strict=True):
        assert np.array_equal(row.input_ids, plain.input_ids)
        assert np.array_equal(row.taught.embeddings[:, 0], 10 * row.taught.emotions[:, 0])


def test_a_message_that_no_row_has_whole_is_in_none(tokenizer):
    dialog = talk("you " * 200, "yes", "hi", "no")
    rows = tokenize(dialog, tokenizer, max_length=40, taught=numbered(dialog))
    assert {number for row in rows for number in read_back(row, tokenizer)} == {1, 2, 3}


def test_a_batch_has_the_places_of_all_rows(tokenizer):
    dialogs = [talk("hi", "hello you"), talk("yes", "no", "you", "hi", "hello")]
    rows = [row for d in dialogs for row in tokenize(d, tokenizer, taught=numbered(d))]
    batch = collate(rows)
    assert batch.emotions[:, 0].tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert (batch.input_ids.flatten()[batch.taught_at] == tokenizer.eos_token_id).all()
    assert (batch.taught_at // batch.input_ids.shape[1]).tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert (batch.embeddings == 10 * batch.emotions).all()
    assert collate(tokenize(dialogs[0], tokenizer)).taught_at is None


def test_tokens_before_replies_move_the_places():
    """dt writes a token in front of every reply, one, also where the data was rendered with its wish."""
    from tests.training.test_loop import make_tokenizer

    method = DT(bins=2)
    tokenizer = method.extend_tokenizer(make_tokenizer())
    dialog = talk("yes", "no", "what", "good bad")
    for i, reward in ((1, 2.0), (3, 1.0)):
        dialog.messages[i]["reward"] = reward
    rows = tokenize(dialog, make_tokenizer(), taught=numbered(dialog))
    assert rows[0].taught is not None
    [moved], [again] = method.prepare(rows, tokenize(dialog, tokenizer, taught=numbered(dialog)), tokenizer)
    np.testing.assert_array_equal(again.input_ids, moved.input_ids)
    np.testing.assert_array_equal(again.taught.places, moved.taught.places)
    assert len(moved.input_ids) > len(rows[0].input_ids)
    assert (moved.input_ids[moved.taught.places] == tokenizer.eos_token_id).all()
    assert (moved.taught.places >= rows[0].taught.places).all()


def test_shards_give_back_what_was_packed(tokenizer, tmp_path):
    """Rows without messages among them, and a teacher that is missing; unasked, nothing of it is read."""
    dialogs = [talk("hi", "hello you"), talk("yes", "no", "you")]
    silent = Taught(np.empty(0, np.int32), np.empty((0, 1), np.float32), np.empty((0, 0), np.float16))
    lessons = [silent, numbered(dialogs[1])]
    lessons[1] = Taught(lessons[1].places, lessons[1].emotions, lessons[1].embeddings[:, :0])
    windows = [tokenize(d, tokenizer, taught=t) for d, t in zip(dialogs, lessons, strict=True)]
    table = pa.Table.from_pylist([d.to_row() for d in dialogs], shards.ARROW_SCHEMA)
    table = table.append_column(shards.SHARD_SCHEMA.field("rows"), shards.pack_rows(windows))
    table = table.append_column(shards.TAUGHT_SCHEMA.field("taught"), shards.pack_taught(windows))
    pq.write_table(table, tmp_path / shards.shard_name("train", 0))
    manifest = {"format": shards.FORMAT, "version": shards.VERSION}
    manifest |= {"splits": {"train": {"shards": [{"file": shards.shard_name("train", 0)}]}}}
    manifest |= {"teachers": {"emotion": {"name": "x", "labels": ["only"]}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    first, second = shards.read_rows(tmp_path, "train", taught=True)
    assert first.taught.emotions.shape == (0, 1) and second.taught.embeddings.shape == (3, 0)
    assert np.array_equal(second.taught.places, windows[1][0].taught.places)
    assert np.array_equal(second.taught.emotions, windows[1][0].taught.emotions)
    assert collate([first, second]).emotions.shape == (3, 1)
    assert [row.taught for row in shards.read_rows(tmp_path, "train")] == [None, None]
