"""Tasks of reasoning-gym as worlds of one reply: `reasoning_gym:chain_sum?max_terms=3`.

Options are those of the task's configuration, and

    size    how many problems there are; the seed of an episode chooses one. By default 10,000
    seed    of the data set: other problems. By default 0

The message is the question, and the reward the score of the answer, mostly 0 to 1: what stands between the
last <answer> and </answer> of the reply, or else the whole reply. An answer on which the scorer raises an
error, or says no finite number, is a failed episode: its score is not known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from envs.adapters.luck import own_luck
from envs.adapters.names import unknown
from envs.adapters.textarena_game import fresh_seed
from envs.text_world import Message
from rl_dialog.errors import UserError

SIZE = 10_000
DATA: dict[tuple[str, str], Any] = {}  # data sets of this process; they have no state


def library() -> Any:
    """reasoning-gym. Raises UserError where it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            "expected reasoning-gym for worlds named reasoning_gym:..., got "
            f"{error}; pip install reasoning-gym"
        ) from error
    return reasoning_gym


def task_names() -> list[str]:
    """Every task but `composite`, which is made of others."""
    library()
    from reasoning_gym.factory import DATASETS

    return [name for name in DATASETS if name != "composite"]


class ReasoningGymWorld:
    """One question, one answer."""

    max_turns = 1

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Raises UserError for an unknown task and for options that it does not take."""
        self.name, self.options = name, {"size": SIZE, "seed": 0, **(options or {})}
        self.messages: list[Message] = []
        self.index = 0
        size = self.options["size"]
        if type(size) is not int or size < 1:
            expected = "size to be a whole number of at least 1"
            raise UserError(f"env 'reasoning_gym:{name}': expected {expected}, got {size!r}")
        _data(self.name, self.options)

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """The problem of a seed."""
        self.index = (fresh_seed() if seed is None else seed) % self.options["size"]
        try:
            question = self._entry()["question"]
        except Exception as error:
            self.messages = [{"role": "user", "content": "There is no question."}]
            return list(self.messages), {"failed": f"{self.name}: {type(error).__name__}: {error}"}
        self.messages = [{"role": "user", "content": question}]
        return list(self.messages), {}

    def step(self, reply: str) -> tuple[list[Message], float | None, bool, bool, dict[str, Any]]:
        """The score of the reply."""
        self.messages.append({"role": "assistant", "content": reply})
        data, entry = _data(self.name, self.options), self._entry()
        answer = library().utils.extract_answer(reply)
        try:
            with own_luck(self.index, with_numpy=True):
                score = float(data.score_answer(reply.strip() if answer is None else answer, entry))
            if not math.isfinite(score):
                raise ValueError(f"a score of {score}")
        except Exception as error:
            why = f"{self.name} cannot score the answer: {type(error).__name__}: {error}"
            return list(self.messages), None, False, True, {"failed": why}
        return list(self.messages), score, True, False, {"answer": entry["answer"]}

    def draw(self) -> str:
        """The question."""
        return self.messages[0]["content"]

    def tells_answers(self) -> bool:
        """Whether the task knows an answer to its questions: some only know how to score one."""
        with own_luck(0, with_numpy=True):
            return _data(self.name, self.options)[0]["answer"] is not None

    def known_answer(self, *, right: bool) -> str:
        """The answer that the task knows, or the one to the next problem."""
        if right:
            return str(self._entry()["answer"])
        with own_luck(self.index, with_numpy=True):
            return str(_data(self.name, self.options)[(self.index + 1) % self.options["size"]]["answer"])

    def _entry(self) -> dict[str, Any]:
        with own_luck(self.index, with_numpy=True):
            return _data(self.name, self.options)[self.index]


def _data(name: str, options: Mapping[str, Any]) -> Any:
    """The data set. Raises UserError where it cannot be made."""
    key = name, repr(sorted(options.items()))
    if key in DATA:
        return DATA[key]
    gym = library()
    if name not in (known := task_names()):
        what = f"one of the {len(known)} tasks of reasoning-gym"
        raise unknown("reasoning_gym", name, known, what)
    try:
        with own_luck(options["seed"], with_numpy=True):
            DATA[key] = gym.create_dataset(name, **options)
    except Exception as error:
        from reasoning_gym.factory import DATASETS

        fields = ", ".join(each.name for each in dataclasses.fields(DATASETS[name][1]))
        raise UserError(
            f"env 'reasoning_gym:{name}': expected options among {fields} that fit, got "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error
    return DATA[key]
