"""Visual dialogue to talk in: the user tells a caption, the assistant asks about the picture, the user
answers, and a frozen questioner in the server says how far it has got."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.text_world import Message, Player, play
from envs.visual_dialogue import bots, search
from envs.visual_dialogue.answers import read_question
from envs.visual_dialogue.client import Bots, HttpPost, ServerFailed
from envs.visual_dialogue.logs import write_logs
from envs.visual_dialogue.players import players
from envs.visual_dialogue.rules import ROUNDS, fires, halfway, reward
from envs.visual_dialogue.scenes import captions, features
from rl_dialog.errors import UserError

MODES = ("env_stops", "10_stop", "agent_stops")
STOP = "<stop>"
LONGEST = 400  # characters of a reply that are asked


class VisualDialogue:
    """Up to ten questions about a picture behind a server.

    A class of one's own names another server, pictures and rules, and is used as `--env module:Class`:

        class Published(VisualDialogue):
            server = "http://127.0.0.1:5000"
            dialogs, features = "visdial_0.5_val.json", "val.npy"
            kind = "conservative"
    """

    kind = "standard"  # of reward: one of rules.KINDS
    mode = "env_stops"  # 10_stop: ten rounds, each pays its progress; agent_stops: the same, until `<stop>`
    server = ""  # its URL; "": the stand-in, in this process
    dialogs: str | Path = ""  # pictures' captions, as `read_pictures` has it; "": those of the stand-in
    features: str | Path = ""  # and their features
    max_turns = ROUNDS + 1

    def __init__(self) -> None:
        fires(self.kind, "")  # an unknown kind raises
        if self.mode not in MODES:
            raise UserError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        if bool(self.dialogs) != bool(self.features):
            raise UserError(f"expected both dialogs and features, got {self.dialogs!r} and {self.features!r}")
        self.bots = Bots(self.connect())
        self.over = True

    def connect(self) -> bots.Post:
        """The way to the server: endpoint, form -> JSON value."""
        return HttpPost(self.server) if self.server else bots.post

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """A picture's caption. `info["failed"]` where the server does not answer."""
        self.caption, self.picture = self._draw(random.Random(seed))
        self.messages: list[Message] = [{"role": "user", "content": self.caption}]
        self.history: list[bots.Entry] = []
        self.first, self.progress, self.over = None, 0.0, False
        try:
            self.first = self.bots.reward_rank(self.caption, self.picture, [])
        except (ServerFailed, ConnectionError) as error:
            self.over = True
            return list(self.messages), {"failed": str(error)}
        return list(self.messages), {"percentile": self.first}

    def _draw(self, chance: random.Random) -> tuple[str, list[float]]:
        if not self.dialogs:
            number = chance.choice(bots.undecided_pictures())
            return captions()[number], features()[number].tolist()
        told, rows = read_pictures(self.dialogs, self.features)
        number = chance.randrange(len(told))
        row = np.asarray(rows[number], dtype=float)
        return told[number], (row / max(np.linalg.norm(row), 1e-12)).tolist()

    def step(self, reply: str) -> tuple[list[Message], float | None, bool, bool, dict[str, Any]]:
        """Answers a question. `info` has, for analysis only, the `percentile`, whether the answer is
        `penalised` and, where a stand-in's question is understood, whether it is `polar`. Raises RuntimeError
        after the end."""
        if self.over:
            raise RuntimeError("expected a running dialogue, got a reply outside of one; call reset first")
        self.messages.append({"role": "assistant", "content": reply})
        if self.mode == "agent_stops" and reply.strip() == STOP:
            self.over = True
            return list(self.messages), 0.0, True, False, {"percentile": self.first + self.progress}
        self.history.append({"speaker": "question", "text": reply[:LONGEST]})
        try:
            said, gained = self.bots.step_rank(self.caption, self.picture, self.history)
        except (ServerFailed, ConnectionError) as error:
            self.over = True
            return list(self.messages), None, False, True, {"failed": str(error)}
        return self._answered(reply, said, gained)

    def _answered(
        self, reply: str, said: str, gained: float
    ) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self.history.append({"speaker": "answer", "text": said})
        self.messages.append({"role": "user", "content": said})
        self.progress += gained
        stops = self.mode == "env_stops"
        self.over = len(self.history) == 2 * ROUNDS or (stops and halfway(self.first, self.progress))
        earned = reward(self.kind, said, last=self.over) if stops else gained
        question = read_question(reply[:LONGEST])
        info = {"percentile": self.first + self.progress, "penalised": fires(self.kind, said)}
        info |= {} if question is None else {"polar": question.polar}
        return list(self.messages), earned, self.over, False, info

    def draw(self) -> str:
        """The dialogue so far, and how near the questioner is."""
        said = [f"{message['role']:<9} {message['content']}" for message in self.messages]
        if self.first is None:  # the server did not answer
            return "\n".join(said)
        return "\n".join([*said, f"percentile {self.first + self.progress:.3f}, at first {self.first:.3f}"])


class Scenes(VisualDialogue):
    """The stand-in, whose best return is known."""

    @classmethod
    def optimum(cls) -> float:
        """The best mean return, exact: by search over what an asker can know."""
        return search.optimum(cls.kind)

    @classmethod
    def scripted_players(cls) -> dict[str, Callable[[int], Player]]:
        """Scripted askers by name."""
        return players(cls.kind)

    @classmethod
    def reference_returns(cls, episodes: int, seed: int) -> dict[str, list[float]]:
        """Of the policy behind the logs, of the most informative question of any kind, and the optimum."""
        lines = {"behaviour policy": "mixed", "informative": "informative"}
        found = {line: cls._returns(name, episodes, seed) for line, name in lines.items()}
        return found | {"optimum": [cls.optimum()]}

    @classmethod
    def _returns(cls, name: str, episodes: int, seed: int) -> list[float]:
        make = cls.scripted_players()[name]
        return [play(cls(), make(i), seed=i).returns["assistant"] for i in range(seed, seed + episodes)]

    @classmethod
    def write_logs(
        cls, path: str | Path, *, dialogs: int, seed: int, player: str = "mixed"
    ) -> dict[str, Any]:
        """Dialogues of one of the players, a Dialog per line; returns what they are like."""
        return write_logs(cls, path, dialogs=dialogs, seed=seed, player=player)


class YesNoScenes(Scenes):
    """Answers that are yes or no cost 2 more."""

    kind = "yes_no"


class SoftScenes(Scenes):
    """Answers with a yes or no anywhere in them cost 2 more."""

    kind = "soft"


class ConservativeScenes(Scenes):
    """Yes, no and vague answers cost 2 more."""

    kind = "conservative"


SCENES = {
    "visual_dialogue": Scenes,
    "visual_dialogue_yes_no": YesNoScenes,
    "visual_dialogue_soft": SoftScenes,
    "visual_dialogue_conservative": ConservativeScenes,
}


@cache
def read_pictures(dialogs: str | Path, features: str | Path) -> tuple[list[str], Any]:
    """The captions of a VisDial file and the features of its pictures, a row each.

    `dialogs` is JSON, a list of objects with a `caption`; `features` is a NumPy array, PATH.npy, or one in an
    HDF5 file, PATH.h5:images_val. Raises UserError for anything else.
    """
    try:
        told = [each["caption"] for each in json.loads(Path(dialogs).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        got = f"{type(error).__name__}: {error}"
        raise UserError(f"{dialogs}: expected a JSON list of objects with a caption, got {got}") from error
    rows = _rows(str(features))
    texts = all(isinstance(each, str) for each in told)
    if not told or not texts or rows.ndim != 2 or len(rows) != len(told):
        got = f"{len(told)} captions and an array of {rows.shape}"
        raise UserError(f"{features}: expected a row of numbers per caption of {dialogs}, got {got}")
    return told, rows


def _rows(path: str) -> np.ndarray:
    name, _, key = path.rpartition(":")
    try:
        if path.endswith(".npy"):
            return np.load(path, mmap_mode="r")
        if name.endswith(".h5"):
            import h5py

            with h5py.File(name) as file:
                return file[key][:]
    except ImportError as error:
        raise UserError(f"{path}: HDF5 files need h5py: pip install h5py") from error
    except (OSError, ValueError, KeyError) as error:
        got = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: expected an array of features, got {got}") from error
    raise UserError(f"{path}: expected PATH.npy, or PATH.h5:NAME of a data set such as images_val")
