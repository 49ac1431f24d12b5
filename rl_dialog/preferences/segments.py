"""Segments: what is compared. A clip of an environment, a reply in its context, or a conversation after its
beginning.

Each is one file of its own, named by the SHA-256 of what is shown: the same segment is stored once, whoever
meets it again and after any restart.

    clips/3f/3fa9....npz    Clip: observations, actions, true rewards, where it came from
    clips/81/8177....json   Reply: the messages before it, and its text
    clips/b0/b03c....json   Conversation: the messages before it, and those that it is
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.errors import UserError

IDENTITY = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Clip:
    """L steps of one episode. An episode that ended sooner is padded: its last step is repeated, with rewards
    of 0.

    Letters: L steps. Raises UserError for arrays of different lengths.
    """

    observations: np.ndarray  # (L, ...) what the policy saw before each action
    actions: np.ndarray  # (L,) int64, or (L, A) float32
    rewards: (
        np.ndarray
    )  # (L,) float32, the environment's own: for the oracle and for reports, never for the reward model
    steps: int  # that were taken; the rest is padding
    source: Mapping[str, Any] = field(
        default_factory=dict
    )  # env, worker, episode, start, policy_version: not part of the id
    pictures: np.ndarray | None = None  # (L, H, W, 3) bytes: what people see, if observations do not tell

    def __post_init__(self) -> None:
        lengths = {len(self.observations), len(self.actions), len(self.rewards)}
        lengths |= set() if self.pictures is None else {len(self.pictures)}
        if len(lengths) != 1 or not 0 < self.steps <= max(lengths):
            raise UserError(
                "expected as many observations, actions and rewards, and 1 to that many steps, got lengths "
                f"{lengths}, {self.steps} steps"
            )

    @cached_property
    def id(self) -> str:
        """SHA-256 over shapes, types and bytes of observations, actions and pictures, in hex."""
        digest = hashlib.sha256()
        pictures = () if self.pictures is None else (self.pictures,)
        for array in (self.observations, self.actions, *pictures):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def true_return(self) -> float:
        """The sum of the true rewards, undiscounted."""
        return float(self.rewards.sum())


@dataclass(frozen=True)
class Reply:
    """What a bot answered. Raises UserError for a context that is no messages."""

    context: Sequence[
        Mapping[str, str]
    ]  # messages with role and content; none before a reply that opens the conversation
    text: str
    source: Mapping[str, Any] = field(default_factory=dict)  # model, dialog, ...: not part of the id

    def __post_init__(self) -> None:
        _check_messages(self.context)

    @cached_property
    def id(self) -> str:
        """SHA-256 over the context's roles and contents and the text, in hex."""
        return hashlib.sha256(self._content().encode()).hexdigest()

    def _content(self) -> str:
        return _content_of(context=_plain(self.context), text=self.text)


@dataclass(frozen=True)
class Conversation:
    """What a bot and its partner said from some reply on. Raises UserError for what is no messages, or has no
    reply of the bot among them."""

    context: Sequence[Mapping[str, str]]  # what they had said before, that is no part of what is compared
    messages: Sequence[Mapping[str, str]]  # role and content; the bot is the assistant
    source: Mapping[str, Any] = field(default_factory=dict)  # model, dialog, ...: not part of the id

    def __post_init__(self) -> None:
        _check_messages(self.context)
        _check_messages(self.messages)
        if not any(message["role"] == "assistant" for message in self.messages):
            raise UserError(f"expected a reply among the messages, got {str(self.messages)[:200]}")

    @cached_property
    def id(self) -> str:
        """SHA-256 over the roles and contents of all messages, in hex."""
        return hashlib.sha256(self._content().encode()).hexdigest()

    @property
    def text(self) -> str:
        """All messages as one text, for where there is no room for more."""
        return "\n".join(f"{message['role']}> {message['content']}" for message in self.messages)

    def _content(self) -> str:
        return _content_of(context=_plain(self.context), messages=_plain(self.messages))


Spoken = Reply | Conversation
Segment = Clip | Spoken


class Segments:
    """The folder of segments of a run. A file is there as a whole or not at all, and on the disk when `add`
    returns."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def add(self, segment: Segment) -> str:
        """Writes a segment if it is new; its id."""
        path = self._path(segment.id, segment)
        if not path.is_file():
            data = _clip_bytes(segment) if isinstance(segment, Clip) else _spoken_bytes(segment)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, data)
        return segment.id

    def __contains__(self, id: str) -> bool:
        return bool(IDENTITY.fullmatch(id)) and any(self._folder(id).glob(f"{id}.*"))  # or `*` is one

    def __getitem__(self, id: str) -> Segment:
        """The segment of that id. Raises UserError where there is none, and where the file is not what its
        name says."""
        paths = [path for path in self._folder(id).glob(f"{id}.*") if path.suffix in (".npz", ".json")]
        if not paths:
            remedy = "a label log goes with the clips/ of its run: copy or move both"
            raise UserError(f"expected the segment {id} in {self.folder}, found none; {remedy}")
        path = paths[0]
        try:
            segment = _read_clip(path) if path.suffix == ".npz" else _read_spoken(path)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise UserError(f"{path}: expected a segment, got {type(error).__name__}: {error}") from error
        if segment.id != id:
            raise UserError(
                f"{path}: expected the segment {id}, got one whose content is {segment.id}: the file was "
                "changed"
            )
        return segment

    def _folder(self, id: str) -> Path:
        return self.folder / id[:2]

    def _path(self, id: str, segment: Segment) -> Path:
        return self._folder(id) / f"{id}.{'npz' if isinstance(segment, Clip) else 'json'}"


def cut_clips(
    observations: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    *,
    length: int,
    first: int = 0,
    source: Mapping[str, Any] | None = None,
    pictures: np.ndarray | None = None,
) -> list[Clip]:
    """Steps of one episode as clips that do not overlap; the last is padded, so that none straddles two
    episodes.

    `first`: the number of the first of these steps in the episode. `source` gets each clip's `start`.
    """
    clips = []
    for start in range(0, len(actions), length):
        steps = min(length, len(actions) - start)
        indices = np.minimum(np.arange(start, start + length), start + steps - 1)
        earned = np.zeros(length, np.float32)
        earned[:steps] = rewards[start : start + steps]
        clips.append(
            Clip(
                observations[indices],
                actions[indices],
                earned,
                steps,
                {**(source or {}), "start": first + start},
                None if pictures is None else pictures[indices],
            )
        )
    return clips


def _clip_bytes(clip: Clip) -> bytes:
    file = io.BytesIO()
    meta = json.dumps({"steps": clip.steps, "source": dict(clip.source)})
    more = {} if clip.pictures is None else {"pictures": clip.pictures}
    more |= {"actions": clip.actions, "rewards": clip.rewards, "meta": np.array(meta)}
    np.savez_compressed(file, **compact(clip.observations), **more)
    return file.getvalue()


def _read_clip(path: Path) -> Clip:
    with np.load(path) as arrays:  # pickles are refused by default
        meta = json.loads(str(arrays["meta"]))
        pictures = arrays.get("pictures")
        about = (meta["steps"], meta["source"], pictures)
        return Clip(restored(arrays), arrays["actions"], arrays["rewards"], *about)


def compact(observations: np.ndarray) -> dict[str, np.ndarray]:
    """A clip's observations in a form that takes less room: stacks of frames # (L, H, W, S) as the first
    stack and the newest frame of the others.

    Only where that loses nothing: at an episode's start a stack may have been emptied.
    """
    overlapping = (
        observations.ndim == 4
        and observations.shape[-1] > 1
        and np.array_equal(observations[1:, ..., :-1], observations[:-1, ..., 1:])
    )
    return (
        {"stack": observations[0], "newest": observations[1:, ..., -1]}
        if overlapping
        else {"observations": observations}
    )


def restored(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The inverse of `compact`."""
    if "observations" in arrays:
        return arrays["observations"]
    stack, newest = arrays["stack"], arrays["newest"]
    frames = np.concatenate([np.moveaxis(stack, -1, 0), newest])  # (S + L - 1, H, W)
    size = stack.shape[-1]
    return np.stack([np.moveaxis(frames[t : t + size], 0, -1) for t in range(len(newest) + 1)])


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not all(isinstance(message.get("content"), str) and message.get("role") for message in messages):
        raise UserError(f"expected a context of messages with role and content, got {str(messages)[:200]}")


def _plain(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _content_of(**parts: Any) -> str:
    return json.dumps(parts, ensure_ascii=False, sort_keys=True)


def _spoken_bytes(spoken: Spoken) -> bytes:
    content = {**json.loads(spoken._content()), "source": dict(spoken.source)}
    return json.dumps(content, ensure_ascii=False).encode()


def _read_spoken(path: Path) -> Spoken:
    values = json.loads(path.read_text(encoding="utf-8"))
    if "messages" in values:
        return Conversation(values["context"], values["messages"], values["source"])
    return Reply(values["context"], values["text"], values["source"])


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)
