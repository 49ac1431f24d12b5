"""Text as it grows: whole characters, never a part of a stop sequence, never less than before; against the
plainest way to get the same."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rl_dialog.serving.text import TextStream

BROKEN = "\ufffd"  # what is decoded for bytes that are no character


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer like Llama's: pieces of words, and single bytes for the rest."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefgh",
        "▁a",
        "▁bc",
        "ab",
        "é",
    ]
    backend = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def shown(tokenizer, ids, stop=()):
    """(the text after every token, the last one again after the end, the tokens' own characters)."""
    stream, texts, pieces = TextStream(tokenizer, stop), [], []
    for token in ids:
        pieces.append(stream.add(token))
        texts.append(stream.text)
        if stream.stopped:
            break
    stream.end(tokenizer.decode(ids[: len(pieces)], skip_special_tokens=True))
    return [*texts, stream.text], pieces


def expected(tokenizer, ids, stop):
    """The final text, decoded from scratch after every token."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        found = [text.index(word) for word in stop if word in text]
        if found and (count == len(ids) or not text.endswith(BROKEN)):  # it may still become a character
            return text[: min(found)].strip()
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


def ids_of(tokenizer, words):
    return [tokenizer.convert_tokens_to_ids(word) for word in words]


@pytest.mark.parametrize(
    "text", ["hello there, how are you?", "\n  grüße, 你好 👩‍👩‍👧 \t", "a\u2028b\x85c", "", "   ", "e\u0301"]
)
def test_a_text_comes_out_as_it_went_in(tokenizer, text):
    texts, pieces = shown(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert texts[-1] == text.strip()
    assert "".join(pieces) == text


def test_a_character_is_shown_when_its_last_byte_has_come(tokenizer):
    ids = tokenizer.encode("a👍b", add_special_tokens=False)
    assert len(ids) == 6, "four tokens for the thumb"
    assert shown(tokenizer, ids) == (
        ["a", "a", "a", "a", "a👍", "a👍b", "a👍b"],
        ["a", "", "", "", "👍", "b"],
    )
    assert shown(tokenizer, ids[:3])[0] == ["a", "a", "a", "a" + BROKEN], (
        "cut off: what came of it is told at the end"
    )


def test_a_stop_sequence_is_found_across_tokens_and_never_shown_in_part(tokenizer):
    ids = tokenizer.encode("one<END>two", add_special_tokens=False)
    texts, _ = shown(tokenizer, ids, ("<END>",))
    assert texts[-1] == "one" and max(texts, key=len) == "one"
    texts, _ = shown(tokenizer, tokenizer.encode("one<EN two", add_special_tokens=False), ("<END>",))
    assert texts[-1] == "one<EN two", "what only began like one is shown once it goes on differently"
    assert shown(tokenizer, tokenizer.encode("one<EN", add_special_tokens=False), ("<END>",))[0][-2:] == [
        "one",
        "one<EN",
    ], "or ends"
    assert shown(tokenizer, ids, ("D>", "<END>", "two"))[0][-1] == "one", "the first of several"
    assert shown(tokenizer, ids, ("one",))[0][-1] == ""
    (that,) = tokenizer.encode(" that", add_special_tokens=False)
    assert shown(tokenizer, [that], ("t",))[0][-1] == "", "the first in a token"
    thumbs = tokenizer.encode("ok👍👍 no", add_special_tokens=False)
    assert shown(tokenizer, thumbs, ("👍👍",))[0][-1] == "ok", (
        "of characters that are several tokens themselves"
    )


def test_white_space_around_a_reply_is_not_shown(tokenizer):
    texts, _ = shown(tokenizer, tokenizer.encode("  a  b  ", add_special_tokens=False))
    assert texts[-1] == "a  b" and not any(text != text.strip() for text in texts)


def test_no_database_holds_nul(tokenizer):
    texts, _ = shown(tokenizer, tokenizer.encode("a\0b", add_special_tokens=False))
    assert texts[-1] == f"a{BROKEN}b"


def test_bytes_that_are_no_character_do_not_end_the_stream(byte_fallback):
    """A line end is a byte token there; a broken character behind it turns both into something else."""
    ids = ids_of(byte_fallback, ["a", "<0x0A>", "<0xE2>", "b", "▁bc", "<0xE2>", "<0x82>", "<0xAC>"])
    texts, _ = shown(byte_fallback, ids)
    assert texts[2:] == [
        "a",
        f"a\n{BROKEN}b",
        f"a\n{BROKEN}b bc",
        *[f"a\n{BROKEN}b bc"] * 2,
        *[f"a\n{BROKEN}b bc€"] * 2,
    ]


quick = settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(tokenizer, ids, stop, *, exact):
    texts, pieces = shown(tokenizer, ids, stop)
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before), "it only grows"
    assert not [word for word in stop for text in texts if word in text]
    for count in range(1, len(pieces)):
        said, text = ("".join(part.split()) for part in ("".join(pieces[:count]), texts[count - 1]))
        assert len(said) - len(text) < max(map(len, stop), default=1), (
            "no more is held back than may become a stop sequence"
        )
    if exact:
        assert texts[-1] == expected(tokenizer, ids, stop).replace("\0", BROKEN)


@st.composite
def spoken(draw, size):
    """(token ids, stop sequences): any tokens, and stops that are likely to be in what they say."""
    ids = draw(st.lists(st.integers(0, size - 1) | st.integers(0, 260), max_size=25))
    cuts = st.tuples(st.integers(0, 30), st.integers(1, 6))
    return ids, draw(st.lists(cuts | st.text("ab \n€👍", min_size=1, max_size=4), max_size=4))


def stops_of(text, wanted):
    """The stop sequences that (start, length) cut out of the text, and those that are given. A broken
    character or NUL is nobody's stop sequence."""
    found = [word if isinstance(word, str) else text[word[0] : sum(word)] for word in wanted]
    return tuple(word for word in found if word and BROKEN not in word and "\0" not in word)


@quick
@given(spoken(330))
@example(([], []))
def test_any_tokens_against_the_plain_way(tokenizer, made):
    ids, wanted = made
    ids = [token for token in ids if token < len(tokenizer)]
    check(tokenizer, ids, stops_of(tokenizer.decode(ids, skip_special_tokens=True), wanted), exact=True)


@quick
@given(
    st.text(st.sampled_from("ab <>\n\té€👍\u0301你\u200d"), max_size=20),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=3),
)
def test_any_text_and_stop_sequences_cut_from_it(tokenizer, text, cuts):
    stop = stops_of(text, cuts)
    texts, _ = shown(tokenizer, tokenizer.encode(text, add_special_tokens=False), stop)
    if not stop:
        assert texts[-1] == text.strip()
    check(tokenizer, tokenizer.encode(text, add_special_tokens=False), stop, exact=True)


@quick
@given(spoken(270))
def test_any_tokens_of_a_tokenizer_with_bytes(byte_fallback, made):
    """Where single bytes are no character, what was shown stays; the rest holds as ever."""
    ids, wanted = made
    ids = [token for token in ids if token < len(byte_fallback)]
    check(
        byte_fallback, ids, stops_of(byte_fallback.decode(ids, skip_special_tokens=True), wanted), exact=False
    )
