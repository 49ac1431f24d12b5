"""What `prepare` says that should not be overlooked."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from rl_dialog.cluster.data_directory import _write_quarantine
from rl_dialog.data.manifest_report import notes
from rl_dialog.data.readers import STOPPED, Bad, Skipped


def manifest(**changes: Any) -> dict[str, Any]:
    """100 dialogs of 200 replies; a rating of half of the dialogs, and a reward that every reply has."""
    row = {"mean": 3.0, "std": 1.0, "min": 1.0, "max": 5.0, "weight": 1.0}
    components = {"rating": {**row, "coverage": 0.25}, "question": {**row, "min": 0.0, "coverage": 1.0}}
    rewards = {"components": components, "sum": {**row, "coverage": 1.0}, "normalisers": {}}
    none = dict.fromkeys(
        ("quarantined", "renamed_ids", "cut_replies", "shared_contexts", "largest_context"), 0
    )
    splits = {split: {"dialogs": 100 * (split == "train"), "replies": 200 * (split == "train")} for split in
              ("train", "validation", "test")}  # fmt: skip
    settings = {"split": "hash", "validation": 0, "test": 0}
    how = {"split_by": "first_turn", "split_why": "", "settings": settings, "stopped": []}
    return {**none, **how, "splits": splits, "rewards": rewards, **changes}


def test_a_rating_that_counts_as_0_where_nobody_rated_is_told():
    """50 of 100 conversations are rated, 1 to 5; with a reward of every reply the others earn less
    than 1 star. No note where all are rated, where 0 is one of the values, or where a normaliser makes 0 the
    mean."""
    [told] = notes(manifest())
    assert "rating lies between 1 and 5 and applies to 50 of 200 replies" in told
    assert "--normalise rating=zscore" in told
    for changed in ({"coverage": 0.5}, {"min": -1.0}, {"weight": 0.0}):
        made = manifest()
        made["rewards"]["components"]["rating"] |= changed
        assert not list(notes(made))
    made = manifest()
    made["rewards"]["normalisers"] = {"rating": {"kind": "zscore"}}
    assert not list(notes(made))


def test_a_reward_that_tells_nothing_apart_is_told():
    """As one that reads English makes of other languages; a vote that only few gave does tell."""
    for row, is_told in (
        ({"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0, "coverage": 0.5}, True),
        ({"mean": 3.0, "std": 0.0, "min": 3.0, "max": 3.0, "coverage": 1.0}, True),
        ({"mean": 3.0, "std": 0.0, "min": 3.0, "max": 3.0, "coverage": 0.5}, False),
        ({"mean": 3.0, "std": 0.0, "min": 3.0, "max": 3.0, "coverage": 1.0, "weight": 0.0}, False),
    ):
        made = manifest()
        made["rewards"]["components"]["rating"] |= row
        told = [note for note in notes(made) if "tells none from another" in note]
        assert len(told) == is_told, row


@pytest.mark.parametrize(("dialogs", "alike", "told"), [(10, 1, False), (15, 1, False), (10, 2, True)])
def test_dialogs_that_begin_alike_are_told_where_there_are_two(dialogs, alike, told):
    made = manifest(largest_context=round(alike / dialogs, 4))
    made["splits"]["train"]["dialogs"] = dialogs
    said = "of the dialogs share their first user turn or `meta.group`"
    assert any(said in note for note in notes(made)) == told
    assert any("--split_by dialog parts those without a `meta.group`" in note for note in notes(made)) == told


def test_skipped_files_are_named():
    skipped = [Skipped(f"logs/{name}", "documentation or code") for name in ("a.md", "b.md", "c.md", "d.md")]
    [one], [four] = (
        [note for note in notes(manifest(), some) if "skip" in note] for some in (skipped[:1], skipped)
    )
    assert one == "1 file skipped (a.md): the reasons are in manifest.json"
    assert four == "4 files skipped (a.md, b.md, c.md, ...): the reasons are in manifest.json"


@pytest.mark.parametrize(("number", "told"), [(1, "1 record could"), (1200, "1,200 records could")])
def test_files_that_were_not_read_to_their_end_are_named(number, told, tmp_path):
    """A file whose reading stops is one line of quarantine, and may be nearly all of the logs."""
    parts = tmp_path / "parts"
    parts.mkdir()
    lost = [
        Bad("a.csv", "after record 2", f"{STOPPED}: KeyError", "a"),
        Bad("b.csv", "record 3", "no role", "b"),
    ]
    (parts / "0.jsonl").write_text("".join(json.dumps(asdict(item)) + "\n" for item in lost))
    count, stopped = _write_quarantine([], parts, [], tmp_path / "quarantine.jsonl")
    assert (count, stopped) == (2, [f"a.csv:after record 2: {STOPPED}: KeyError"])
    made = manifest(quarantined=number, stopped=stopped)
    made["rewards"]["components"].pop("rating")
    first, second = notes(made)
    assert told in first and "what follows in this file was not read" in second
