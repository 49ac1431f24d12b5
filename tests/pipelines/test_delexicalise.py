"""`delexicalise` as a user runs it."""

import json
import os
from pathlib import Path

import pytest

from envs.multiwoz.lexical import PLACEHOLDER
from pipelines.delexicalise import DelexicaliseConfig, main
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError

DATA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[2] / "../shared/data")) / "multiwoz"


def test_mistakes_are_explained(tmp_path):
    with pytest.raises(UserError, match="expected --logs"):
        main(DelexicaliseConfig())
    (tmp_path / "chats.jsonl").write_text(
        json.dumps(
            {"id": "a", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
        )
    )
    if DATA.is_dir():
        with open(tmp_path / "chats.jsonl", "a", encoding="utf-8") as file:
            file.write('\n{"messages": 1}\n')
        with pytest.raises(
            UserError,
            match=(
                "expected dialogs with acts and goals.*the first of 1 records that cannot be read is .*line 2"
            ),
        ):
            main(
                DelexicaliseConfig(
                    logs=(str(tmp_path / "chats.jsonl"),),
                    world=str(DATA),
                    output_dir=str(tmp_path / "out"),
                    quiet=True,
                )
            )


@pytest.mark.realdata
def test_the_corpus(tmp_path):
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    found = main(
        DelexicaliseConfig(
            logs=(str(DATA / "val.json.zip"),), world=str(DATA), output_dir=str(tmp_path), quiet=True
        )
    )
    assert (found["dialogs"], found["left_out"], found["quarantined"], found["replies"]) == (
        999,
        0,
        0,
        7365,
    ) and 0.8 < found["success"] < 1
    replies = [
        dialog.messages[i]["content"]
        for dialog in read_jsonl(tmp_path / "dialogs.jsonl")
        for i in dialog.replies
    ]
    assert sum(bool(PLACEHOLDER.search(text)) for text in replies) > 0.4 * len(replies)
