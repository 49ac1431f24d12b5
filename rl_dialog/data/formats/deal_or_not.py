"""Deal or no deal: two people divide books, hats and balls that are worth different points to each.

`data.txt` holds every negotiation, once per side:

    1 0 4 2 1 2 YOU: i want the hats <eos> THEM: deal <eos> YOU: <selection> item0=0 item1=4 item2=0 <eos>
        reward=8 agree 1 4 4 1 1 2

that is: count and worth of the three items, the talk (YOU is the assistant), what YOU take, the points,
whether both took the same split, and the partner's counts and worths. Points count only in an agreement:
`reward=10 disagree` is what one side claimed while the two claims did not fit, and then nobody got anything,
as with "no agreement" and "disconnect". train.txt, val.txt and test.txt hold the same talks in tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from rl_dialog.data.formats.head import Head
from rl_dialog.data.formats.log_file import Bad, LogFile
from rl_dialog.data.formats.records import Record, dialogs, mismatch, records, split_of
from rl_dialog.data.schema import Dialog

ITEMS = ("book", "hat", "ball")
PLAIN = re.compile(
    r"(?P<input>(?:\d+ ){6})(?P<talk>.*<selection>)(?P<taken>[^<]*)<eos> reward=(?P<reward>.+)"
    r" (?P<ending>agree|disagree)(?: \d+){6}"
)
TAGGED = re.compile(
    r"<input> (?P<input>(?:\d+ ){6})</input> <dialogue> (?P<talk>.*) </dialogue> <output> (?P<output>.*)"
    r" </output>"
)
LOOKS_LIKE = re.compile(r"(?:\d+ ){6}(?:YOU|THEM): |<input> (?:\d+ ){6}</input> <dialogue>")
TAKEN = re.compile(r"item\d=(\d+)")
ROLES = {"YOU": "assistant", "THEM": "user"}


def matches(head: Head) -> bool:
    return head.kind == "text" and bool(LOOKS_LIKE.match(head.text.lstrip()))


def corpus(head: Head) -> str | None:
    return "deal_or_not"


def read(log: LogFile, *, max_line_bytes: int) -> Iterator[Dialog | Bad]:
    return dialogs(log, records(log, max_line_bytes=max_line_bytes), lambda record: [_dialog(log, record)])


def _dialog(log: LogFile, record: Record) -> Dialog:
    line = record.value
    plain, tagged = (pattern.match(line) if isinstance(line, str) else None for pattern in (PLAIN, TAGGED))
    if not plain and not tagged:
        raise mismatch(
            "",
            "`counts and worths, talk <eos> ... <selection> ... reward=N agree|disagree` or the tagged form",
            line,
        )
    counts, worths = _pairs((plain or tagged)["input"])
    messages = [
        _message(utterance, f"utterance {number}")
        for number, utterance in enumerate((plain or tagged)["talk"].split(" <eos> "))
    ]
    outcome, ending, selection = _plain_outcome(plain) if plain else _tagged_outcome(tagged["output"], worths)
    for message in reversed(messages):
        if message["role"] == "assistant":
            message["reward"] = outcome
            break
    meta: dict[str, Any] = {
        "outcome": outcome,
        "agreement": ending == "agree",
        "ending": ending,
        "group": messages[0]["content"],
    }
    meta |= {"selection": selection} if selection else {}
    items = "; ".join(
        f"{item}: {count} worth {worth}" for item, count, worth in zip(ITEMS, counts, worths, strict=True)
    )
    stem = PurePosixPath(log.name).stem
    split = split_of(stem) if stem in ("train", "val", "test") else None
    name = f"deal_or_not-{stem}-{record.number}"
    return Dialog(
        id=name,
        messages=[{"role": "system", "content": items}, *messages],
        source=log.corpus,
        split=split,
        meta=meta,
    )


def _message(utterance: str, where: str) -> dict[str, Any]:
    speaker, colon, text = utterance.partition(": ")
    if not colon or speaker not in ROLES:
        raise mismatch(where, "an utterance that begins with YOU: or THEM:", utterance)
    return {"role": ROLES[speaker], "content": text}


def _pairs(text: str) -> tuple[list[int], list[int]]:
    numbers = [int(number) for number in text.split()]
    return numbers[::2], numbers[1::2]


def _plain_outcome(match: re.Match[str]) -> tuple[float, str, list[int]]:
    """The points of YOU, how the talk ended, and what YOU took (or claimed)."""
    reward, selection = match["reward"], [int(number) for number in TAKEN.findall(match["taken"])]
    if not reward.isdigit():
        return 0.0, reward, selection  # "no agreement" or "disconnect"
    return (float(reward), "agree", selection) if match["ending"] == "agree" else (0.0, "disagree", selection)


def _tagged_outcome(output: str, worths: list[int]) -> tuple[float, str, list[int]]:
    selection = [int(number) for number in TAKEN.findall(output)][: len(ITEMS)]
    if len(selection) == len(ITEMS):
        return (
            float(sum(count * worth for count, worth in zip(selection, worths, strict=True))),
            "agree",
            selection,
        )
    ending = re.match(r"<(disagree|no_agreement|disconnect)>", output)
    if not ending:
        raise mismatch(
            "outcome", "item0=N item1=N item2=N, <disagree>, <no_agreement> or <disconnect>", output
        )
    return 0.0, ending[1].replace("_", " "), []
