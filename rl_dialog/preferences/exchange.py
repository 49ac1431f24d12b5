"""Labels that come and go: JSONL of our own, one label a line, and for replies TRL's preference format.

{"query": ..., "first": ..., "second": ..., "preference": 1.0, "labeller": "ann", "shown": ..., "answered": ..., "reward_version": 3, ...}
{"prompt": [messages], "chosen": [reply], "rejected": [reply], "chosen_reward": 1.0, "rejected_reward": 0.0, "ids": [chosen, rejected]}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rl_dialog.config import read_yaml
from rl_dialog.data.files import write_text_atomically
from rl_dialog.data.readers import Bad, find_logs, read_log
from rl_dialog.data.schema import Dialog
from rl_dialog.data.splits import split_key
from rl_dialog.errors import UserError
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import Label, pair_id
from rl_dialog.preferences.segments import Reply, Segment, Segments


def open_labels(folder: str | Path, database: str = "") -> tuple[LabelLog, Segments]:
    """The label log and the segments of a run's folder, to read; `database` is the log's URL where that is not the folder's labels.db."""
    folder = Path(folder)
    return LabelLog(database or f"sqlite:///{folder / 'labels.db'}", create=False), Segments(folder / "clips")


def take_over(source: Path, out: Path, labels: str) -> int:
    """Copies the labels of another run, with their clips; how many. Raises UserError for a folder that is no run's."""
    path = source / "prefer.yaml"
    if not path.is_file():
        raise UserError(f"--labels_from: expected the folder of a run with prefer.yaml, got {source}")
    (theirs, there), here = open_labels(source, read_yaml(str(path))["labels"]), Segments(out / "clips")
    copied = theirs.labels()
    for label in copied:
        for id in (label.first, label.second):
            here.add(there[id])
    return LabelLog(labels).add_labels(copied)


def write_labels(labels: Iterable[Label], path: str | Path) -> int:
    """JSONL, one label a line; how many. `log.labels()`, or `log.answers()` for all that was ever answered."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for count, label in enumerate(labels, 1):  # noqa: B007
            file.write(json.dumps(asdict(label), ensure_ascii=False) + "\n")
    return count


def read_labels(path: str | Path) -> Iterator[Label]:
    """What `write_labels` wrote, for `LabelLog.add_labels`; revoked answers are left out. Raises UserError for the first line that is no label."""
    names = [field.name for field in fields(Label)]
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                label = Label(**{name: row[name] for name in names})
                _check_types(label)
            except (ValueError, KeyError, TypeError) as error:
                told = f"no {error}" if isinstance(error, KeyError) else error
                raise UserError(f"{path}:{number}: expected a label, a JSON object with {', '.join(names)}, got {line[:200]!r}: {told}") from None
            if row.get("revoked") is None:
                yield label


def _check_types(label: Label) -> None:
    kinds = {"preference": (int, float, type(None)), "reward_version": int, "validation": bool, "number": int, "shown": (int, float)}
    kinds |= {"answered": (int, float)} | dict.fromkeys(("query", "first", "second", "labeller"), str)
    for name, kind in kinds.items():
        value = getattr(label, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{name} is {value!r}")


def trl_rows(labels: Iterable[Label], segments: Mapping[str, Segment]) -> Iterator[dict[str, Any]]:
    """The labels of replies as rows with prompt, chosen and rejected. Ties and incomparable ones are left out: the format has no place for them.

    Raises UserError for labels of clips, and of replies to different contexts.
    """
    for label in labels:
        if label.preference is None or label.preference == 0.5:
            continue
        ids = (label.first, label.second) if label.preference > 0.5 else (label.second, label.first)
        better, worse = (_reply(segments[id], label) for id in ids)
        if list(map(dict, better.context)) != list(map(dict, worse.context)):
            raise UserError(f"expected two replies to one context in the query {label.query!r}, got replies to different ones")
        chosen, rejected = ([{"role": "assistant", "content": reply.text}] for reply in (better, worse))
        prompt = [{"role": message["role"], "content": message["content"]} for message in better.context]
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, "chosen_reward": 1.0, "rejected_reward": 0.0, "ids": list(ids)}


def write_trl(path: Path, labels: Iterable[Label], segments: Mapping[str, Segment]) -> int:
    """Writes these rows, whole or not at all; how many."""
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in trl_rows(labels, segments)]
    write_text_atomically(path, "".join(rows))
    return len(rows)


def _reply(segment: Segment, label: Label) -> Reply:
    if not isinstance(segment, Reply):
        raise UserError(f"expected labels of replies, got one of clips of an environment: the query {label.query!r}")
    return segment


def add_pairs(paths: Sequence[str], log: LabelLog, segments: Segments, *, labeller: str = "import") -> tuple[int, list[Bad]]:
    """Pairs of chosen and rejected replies (TRL's formats, OpenAI's preferences) as labels of `labeller`, the replies among the segments; how many
    were new, and what in the files was no such pair. A pair that came in before is left as it is; pairs of equal replies and of replies in several
    messages are bad."""
    logs, bad, _ = find_logs(paths)
    labels = []
    now = time.time()
    for file in logs:
        chosen: Dialog | None = None
        for item in read_log(file):
            if isinstance(item, Bad):
                bad.append(item)
            elif "preferred" not in item.meta:
                bad.append(Bad(file.name, f"dialog {item.id!r}", "expected a pair of replies, chosen and rejected, got one dialog", file.corpus))
            elif item.meta["preferred"]:
                chosen = item
            else:
                try:
                    label = _pair_label(chosen, item, log, segments, labeller, now)
                except ValueError as error:
                    bad.append(Bad(file.name, f"pair {item.meta['pair']!r}", str(error), file.corpus))
                else:
                    labels.append(label)
    return log.add_labels(labels), bad


def _pair_label(chosen: Dialog, rejected: Dialog, log: LabelLog, segments: Segments, labeller: str, now: float) -> Label:
    """Which of the two is `first` says nothing about which one was chosen."""
    better, worse = (_last_reply(dialog) for dialog in (chosen, rejected))
    if better.id == worse.id:
        raise UserError("expected two different replies, got the same one twice")
    if better.context != worse.context:
        raise UserError("expected replies of one message each, got several")
    first, second = sorted((better, worse), key=lambda reply: reply.id)
    for reply in (first, second):
        segments.add(reply)
    preference = 1.0 if first is better else 0.0
    query = pair_id(first.id, second.id)
    return Label(0, query, first.id, second.id, preference, labeller, now, now, 0, log.is_validation(split_key(chosen)))


def _last_reply(dialog: Dialog) -> Reply:
    said = [{"role": message["role"], "content": message["content"] or ""} for message in dialog.messages]
    last = dialog.replies[-1]
    return Reply(said[:last], said[last]["content"], {"dialog": dialog.id, "message": last})
