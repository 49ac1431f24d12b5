"""Labels as others read them: those of a run's folder, and for replies TRL's preference format.

{"prompt": [messages], "chosen": [reply], "rejected": [reply], "chosen_reward": 1.0, "rejected_reward": 0.0,
"ids": [chosen, rejected]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_dialog.config import read_yaml
from rl_dialog.data.files import write_text_atomically
from rl_dialog.errors import UserError
from rl_dialog.preferences.agreement import opinions
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labelling import log_url
from rl_dialog.preferences.labels import Label
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Clip, Reply, Segment, Segments


def open_labels(folder: str | Path, database: str = "") -> tuple[LabelLog, Segments]:
    """The label log and the segments of a run's folder, to read; `database` is the log's URL where that is
    not the folder's labels.db. Who reads makes no tables: they may be asked to read anything."""
    folder = Path(folder)
    return LabelLog(database or RunFiles(folder).own_labels, create=False), Segments(folder / "clips")


def take_over(source: Path, out: Path, labels: str) -> int:
    """Copies what everybody said of the pairs of another run, gold pairs left out, with the clips; how many
    answers. Raises UserError for a folder that is no run's."""
    path = source / "prefer.yaml"
    if not path.is_file():
        raise UserError(f"--labels_from: expected the folder of a run with prefer.yaml, got {source}")
    (source_log, source_segments), segments = (
        open_labels(source, log_url("", source, read_yaml(str(path)))),
        Segments(out / "clips"),
    )
    copied = opinions(source_log.answers())
    for id in {id: None for answer in copied for id in (answer.first, answer.second)}:
        segments.add(source_segments[id])
    return LabelLog(labels).add_labels(copied)


def trl_rows(labels: Iterable[Label], segments: Mapping[str, Segment]) -> Iterator[dict[str, Any]]:
    """The labels of replies as rows with prompt, chosen and rejected. Ties and incomparable ones are left
    out: the format has no place for them.

    Raises UserError for labels of clips, and of replies to different contexts.
    """
    for label in labels:
        if label.preference is None or label.preference == 0.5:
            continue
        ids = (label.first, label.second) if label.preference > 0.5 else (label.second, label.first)
        better, worse = (_reply(segments[id], label) for id in ids)
        if list(map(dict, better.context)) != list(map(dict, worse.context)):
            raise UserError(
                f"expected two replies to one context in the query {label.query!r}, got replies to different "
                "ones"
            )
        chosen, rejected = ([{"role": "assistant", "content": reply.text}] for reply in (better, worse))
        prompt = [{"role": message["role"], "content": message["content"]} for message in better.context]
        yield {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            "chosen_reward": 1.0,
            "rejected_reward": 0.0,
            "ids": list(ids),
        }


def write_trl(path: Path, labels: Iterable[Label], segments: Mapping[str, Segment]) -> int:
    """Writes these rows, whole or not at all; how many."""
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in trl_rows(labels, segments)]
    write_text_atomically(path, "".join(rows))
    return len(rows)


def _reply(segment: Segment, label: Label) -> Reply:
    if not isinstance(segment, Reply):
        got = "clips of an environment" if isinstance(segment, Clip) else "whole conversations"
        raise UserError(f"expected labels of replies, got one of {got}: the query {label.query!r}")
    return segment
