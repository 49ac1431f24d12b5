"""Where in a text the values of acts stand."""

import re

from rl_dialog.data.labelled import labelled_turns, located
from rl_dialog.data.readers import read_logs
from rl_dialog.data.schema import Dialog, write_jsonl

AREA, NAME, STARS = ("Inform", "Hotel", "Area"), ("Inform", "Hotel", "Name"), ("Inform", "Hotel", "Stars")


def spans(text, *acts):
    return [(text[start:end], tag) for start, end, tag in located(text, acts)[0]]


def test_values_are_found_as_words():
    text = "Two rooms in the East , please , northeast of it"
    assert located(
        text, [(*AREA, "east"), ("Inform", "Hotel", "Parking", "yes"), ("Request", "Hotel", "Phone", "?")]
    ) == (
        [(17, 21, AREA)],
        [("Inform", "Hotel", "Parking", "yes"), ("Request", "Hotel", "Phone", "?")],
    )
    assert spans("something moderately priced", (*AREA, "moderate")) == [("moderately", AREA)]
    assert spans("at   the  lamb", (*NAME, "the lamb")) == [("the  lamb", NAME)]
    assert spans("a.b (c)", (*NAME, "(c)")) == [("(c)", NAME)]


def test_words_of_every_script():
    """A vowel sign is part of its word; in Chinese and Japanese a value stands wherever its characters do."""
    for text, value, found in (
        ("दिल्ली में होटल", "दिल्ली", "दिल्ली"),
        ("दिल्ली में होटल", "दिल", "दिल्ली"),
        ("மதுரையில் ஓட்டல்", "மதுரை", "மதுரையில்"),
        ("مَرْحَبًا بك", "مَرْحَب", "مَرْحَبًا"),
        ("我要去北京西站", "北京", "北京"),
        ("去ABC酒店", "abc酒店", "ABC酒店"),
        ("東京タワーに行く", "東京タワー", "東京タワー"),
    ):
        assert spans(text, (*NAME, value)) == [(found, NAME)]
    assert spans("उत्तरदिल्ली", (*NAME, "दिल्ली")) == spans("hello", (*NAME, " ")) == []


def test_no_place_is_given_twice():
    assert spans("4 stars and 4 people", (*STARS, "4"), ("Inform", "Hotel", "People", "4")) == [
        ("4", STARS),
        ("4", ("Inform", "Hotel", "People")),
    ]
    assert spans("the north gallery in the north", (*AREA, "north"), (*NAME, "the north gallery")) == [
        ("the north gallery", NAME),
        ("north", AREA),
    ]


def test_what_is_not_there_is_about_the_sentence():
    assert located("somewhere nice", [(*AREA, "East"), ("Inform", "Hotel", "Internet", "yes")]) == (
        [],
        [(*AREA, "east"), ("Inform", "Hotel", "Internet", "yes")],
    )
    assert located("", [(*AREA, "")]) == ([], [(*AREA, "")])


def annotated(message):
    return message["acts"]


def test_logs_with_placeholders_teach_no_values(tmp_path):
    dialog = Dialog("a", [{"role": "user", "content": "east", "acts": [["Inform", "Hotel", "Area", "east"]]},
                          {"role": "assistant", "content": "[hotel_name]",
                           "acts": [["Inform", "Hotel", "Name", "inn"]]}])  # fmt: skip
    write_jsonl([dialog], tmp_path / "dialogs.jsonl")
    dialogs, bad = read_logs([tmp_path / "dialogs.jsonl"])
    assert [
        turn.text for turn in labelled_turns(dialogs, annotated, without=re.compile(r"\[hotel_name\]"))
    ] == ["east"] and not bad
