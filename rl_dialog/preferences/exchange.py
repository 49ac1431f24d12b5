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
from rl_dialog.models.control_policy import ControlPolicyConfig
from rl_dialog.preferences.agreement import opinions
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labelling import log_url
from rl_dialog.preferences.labels import Answer, Label
from rl_dialog.preferences.reliability import Judgement
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Clip, Reply, Segment, Segments


def open_labels(folder: str | Path, database: str = "") -> tuple[LabelLog, Segments]:
    """The label log and the segments of a run's folder, to read; `database` is the log's URL where that is
    not the folder's labels.db. Who reads makes no tables: they may be asked to read anything."""
    folder = Path(folder)
    return LabelLog(database or RunFiles(folder).own_labels, create=False), Segments(folder / "clips")


def labels_of_run(source: Path) -> tuple[list[Answer], Segments]:
    """What everybody said of the pairs of a run, gold pairs left out, and its segments. Raises UserError for
    a folder that is no run's."""
    path = source / "prefer.yaml"
    if not path.is_file():
        raise UserError(f"--labels_from: expected the folder of a run with prefer.yaml, got {source}")
    log, segments = open_labels(source, log_url("", source, read_yaml(str(path))))
    said = opinions(log.answers())
    log.close()
    return said, segments


def check_source(source: Path, out: Path, shape: ControlPolicyConfig) -> None:
    """Can a run in the folder `out`, whose policy has this shape, take over the labels of another one? Raises
    UserError for its own folder, and for clips of other observations or actions."""
    if source.resolve() == out.resolve():
        keep = "to begin anew with its labels, move the folder and name it by its new name"
        raise UserError(f"--labels_from: expected another run than the one in --output_dir, {out}: {keep}")
    said, segments = labels_of_run(source)
    clip = segments[said[0].first] if said else None
    if clip is not None and not is_seen_by(clip, shape):
        theirs = f"observations {clip.observations.shape[1:]} and actions like {clip.actions[0]}"
        kind = f"{shape.actions} {'' if shape.discrete else 'continuous '}actions"
        expected = f"expected clips with observations {shape.observation} and {kind}"
        raise UserError(f"--labels_from {source}: {expected}, got {theirs}: they are of another environment")


def is_seen_by(clip: Clip, shape: ControlPolicyConfig) -> bool:
    """Has a policy of this shape such observations and actions?"""
    if clip.observations.shape[1:] != shape.observation:
        return False
    if shape.discrete:
        return clip.actions.ndim == 1 and clip.actions.max() < shape.actions
    return clip.actions.shape[1:] == (shape.actions,)


def take_over(source: Path, out: Path, labels: str) -> int:
    """Copies what everybody said of the pairs of another run, gold pairs left out, with the clips; how many
    answers. What came before is left out. Raises UserError for a folder that is no run's."""
    (copied, source_segments), segments = labels_of_run(source), Segments(out / "clips")
    for id in {id: None for answer in copied for id in (answer.first, answer.second)}:
        segments.add(source_segments[id])
    return LabelLog(labels).add_labels(copied)


def trl_rows(
    labels: Iterable[Label | Judgement], segments: Mapping[str, Segment]
) -> Iterator[dict[str, Any]]:
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


def write_trl(path: Path, labels: Iterable[Label | Judgement], segments: Mapping[str, Segment]) -> int:
    """Writes these rows, whole or not at all; how many."""
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in trl_rows(labels, segments)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, "".join(rows))
    return len(rows)


def _reply(segment: Segment, label: Label | Judgement) -> Reply:
    if not isinstance(segment, Reply):
        got = "clips of an environment" if isinstance(segment, Clip) else "whole conversations"
        raise UserError(f"expected labels of replies, got one of {got}: the query {label.query!r}")
    return segment
