"""`delexicalise` as a user runs it."""

import json
import os
from pathlib import Path

import pytest

from envs.multiwoz import Simulator, load_world
from envs.multiwoz.lexical import PLACEHOLDER
from pipelines.delexicalise import DelexicaliseConfig, delexicalised, main, with_placeholders
from rl_dialog.data.schema import Dialog, read_jsonl
from rl_dialog.errors import UserError

DATA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[2] / "../shared/data")) / "multiwoz"


def message(role, text, acts):
    return {"role": role, "content": text, "annotations": {"dialogue_acts": acts}}


TALK = [
    message("user", "A hotel in the east please", {"Hotel-Inform": [["Area", "east"]]}),
    message("assistant", "The lamb , 01223 , in the east . 2 in all", {"Hotel-Inform": [["Name", "The lamb"], ["Phone", "01223"], ["Choice", "2"]]}),
    message("user", "Book it", {}),
    message("assistant", "Done , XY12", {"Booking-Book": [["Ref", "XY12"]]}),
]


def converted(goal, talk=TALK):
    return delexicalised(Dialog("a", talk, goal=goal), Simulator(load_world()))


def test_a_dialog_as_a_text_model_would_have_met_it():
    found = converted({"hotel": {"info": {"area": "east"}, "reqt": ["phone"], "book": {"day": "monday"}}, "taxi": {}})
    assert [m["role"] for m in found.messages] == ["user", "system", "assistant"] * 2
    assert found.messages[1]["content"].startswith("hotel: ") and found.messages[1]["content"].endswith("Area east")
    assert [found.messages[i]["content"] for i in found.replies] == [
        "[hotel_name] , [hotel_phone] , in the east . [hotel_choice] in all",
        "Done , [booking_ref]",
    ]
    assert [found.messages[i]["reward"] for i in found.replies] == [-1.0, 80.0] and found.meta["outcome"] == {"success": True}


def test_what_was_not_told_is_no_success():
    for goal in ({"hotel": {"reqt": ["postcode"]}}, {"restaurant": {"reqt": ["phone"]}}, {"train": {"book": {"people": "2"}}}):
        assert converted(goal).messages[-1]["reward"] == -40.0
    assert converted(None) is None and converted({"hotel": {"reqt": ["phone"]}}, [{"role": "user", "content": "x"}]) is None


def test_placeholders_are_numbered():
    acts = [
        ("Inform", "Hotel", "Name", "a inn"),
        ("Inform", "Hotel", "Name", "b inn"),
        ("Inform", "Hotel", "Addr", "1 x st"),
        ("Inform", "Hotel", "Addr", "y park"),
    ]
    assert with_placeholders("b inn or a inn , 1 x st , y park", tuple(acts)) == "[hotel_name] or [hotel_name_2] , [hotel_addr]"


def test_mistakes_are_explained(tmp_path):
    with pytest.raises(UserError, match="expected --logs"):
        main(DelexicaliseConfig())
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"id": "a", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]})
    )
    if DATA.is_dir():
        with open(tmp_path / "chats.jsonl", "a", encoding="utf-8") as file:
            file.write('\n{"messages": 1}\n')
        with pytest.raises(UserError, match="expected dialogs with acts and goals.*the first of 1 records that cannot be read is .*line 2"):
            main(DelexicaliseConfig(logs=(str(tmp_path / "chats.jsonl"),), world=str(DATA), output_dir=str(tmp_path / "out"), quiet=True))


@pytest.mark.realdata
def test_the_corpus(tmp_path):
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    found = main(DelexicaliseConfig(logs=(str(DATA / "val.json.zip"),), world=str(DATA), output_dir=str(tmp_path), quiet=True))
    assert (found["dialogs"], found["left_out"], found["quarantined"], found["replies"]) == (999, 0, 0, 7365) and 0.8 < found["success"] < 1
    replies = [dialog.messages[i]["content"] for dialog in read_jsonl(tmp_path / "dialogs.jsonl") for i in dialog.replies]
    assert sum(bool(PLACEHOLDER.search(text)) for text in replies) > 0.4 * len(replies)
