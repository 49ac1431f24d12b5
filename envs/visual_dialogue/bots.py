"""The answerer and the questioner behind the six endpoints of the published environment server, by rules.

    /step_rank, /step                   [answer, progress]: answers the last question of the history
    /fetch_reward_rank, /fetch_reward   the value where the history is empty, else the last round's progress
    /fetch_a_bot_response               the answer alone
    /fetch_q_bot_response               the next question of a scripted questioner, who needs no picture

A request is a form of texts: `history`, a JSON list of {"speaker": "question" or "answer", "text"};
`caption`; `img_features`, a JSON list of numbers; `generation_kwargs`, a JSON object. `_rank` means by
percentile, the others by the mean square error of the predicted feature (at an empty history: the error
itself).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

import numpy as np

from envs.visual_dialogue.answers import HEDGES, MEANS, QUESTIONS, REMEMBERED, Question, answer, read_question
from envs.visual_dialogue.scenes import ATTRIBUTES, POOL, WIDTH, captions, features, pool, scene_of, value
from rl_dialog.errors import UserError

Entry = dict[str, str]  # speaker, text
Post = Callable[[str, Mapping[str, str]], Any]  # endpoint, form -> JSON value: in process, HTTP or an actor
GREEDY = {"inference": "greedy", "beamSize": 1}
LONGEST = 4000  # characters of a text
MOST_ENTRIES = 64  # of a history
LARGEST = 1e6  # number of a picture
NEAR = 1e-9  # distances that differ by less are equal


def post(endpoint: str, form: Mapping[str, str]) -> Any:
    """The JSON value that an endpoint answers to a form. Raises UserError for an unknown endpoint or a form
    that it cannot read."""
    if endpoint not in ENDPOINTS:
        near = get_close_matches(endpoint, ENDPOINTS, 1)
        hint = f". Did you mean {near[0]}?" if near else ""
        raise UserError(f"expected one of {', '.join(ENDPOINTS)}, got {endpoint!r}{hint}")
    _greedy(form)
    caption = form.get("caption", "")
    if len(caption) > LONGEST:
        raise UserError(f"caption: expected at most {LONGEST} characters, got {len(caption)}")
    return ENDPOINTS[endpoint](caption, _history(form), form)


def _greedy(form: Mapping[str, str]) -> None:
    how = _json(form, "generation_kwargs") if "generation_kwargs" in form else GREEDY
    if not isinstance(how, dict) or how.get("inference", "greedy") != "greedy":
        raise UserError(
            f"generation_kwargs: expected {json.dumps(GREEDY)}: the rules have no other, got {how!r}"
        )


def _json(form: Mapping[str, str], name: str) -> Any:
    if name not in form:
        raise UserError(f"expected the form field {name}, got {', '.join(sorted(form)) or 'none'}")
    try:
        return json.loads(form[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: expected JSON, got {form[name][:80]!r}: {error}") from None


def _history(form: Mapping[str, str]) -> list[Entry]:
    entries = _json(form, "history")
    if not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
        raise UserError(
            f"history: expected a list of at most {MOST_ENTRIES} entries, got {str(entries)[:80]}"
        )
    for number, entry in enumerate(entries):
        speaker = "answer" if number % 2 else "question"
        fits = isinstance(entry, dict) and entry.get("speaker") == speaker
        if not fits or not isinstance(entry.get("text"), str) or len(entry["text"]) > LONGEST:
            expected = f'{{"speaker": "{speaker}", "text": at most {LONGEST} characters}}'
            raise UserError(f"history: expected {expected} as entry {number}, got {str(entry)[:80]}")
    return entries


def _features(form: Mapping[str, str]) -> np.ndarray:
    numbers = _json(form, "img_features")
    told = "the stand-in's pictures have as many, those of the published server more"
    if not isinstance(numbers, list) or len(numbers) != WIDTH:
        got = f"{len(numbers)} of them" if isinstance(numbers, list) else str(numbers)[:80]
        raise UserError(f"img_features: expected a list of {WIDTH} numbers ({told}), got {got}")
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST for x in numbers):
        expected = f"finite numbers of at most {LARGEST:g}"  # their squares are added up
        raise UserError(f"img_features: expected {expected}, got {str(numbers)[:80]}")
    return np.array(numbers, dtype=float)


# ------------------------------------------------------------------------------------------------------------
# What the questioner believes, and how good it is


@cache
def answers_of(question: Question) -> np.ndarray:
    """(POOL,) the answer that each scene of the pool gives."""
    return np.array([answer(scene, question) for scene in pool()])


@lru_cache(maxsize=REMEMBERED)
def fitting(caption: str) -> np.ndarray:
    """(POOL,) bool: the scenes that a caption allows, by the values that it names."""
    words = caption.lower().split()
    told = [MEANS[word] for word in words if word in MEANS and word in ATTRIBUTES[MEANS[word][0]]]
    fits = np.array([all(value(scene, name) in values for name, values in told) for scene in pool()])
    fits.setflags(write=False)
    return fits


def agreeing(asked: str, told: str) -> np.ndarray:
    """(POOL,) bool: the scenes that give this answer; all of them for a hedge, and for a question that is not
    understood."""
    question, said = read_question(asked), told.strip().lower()
    if question is None or said in HEDGES:
        return np.ones(POOL, dtype=bool)
    return answers_of(question) == said


@cache
def undecided_pictures() -> tuple[int, ...]:
    """The scenes of the pool that dialogues are about: those which their caption alone does not rank first,
    where there would be nothing to win."""
    ideas = [predicted(caption, []) for caption in captions()]
    return tuple(n for n, idea in enumerate(ideas) if percentile(features()[n], idea) < 1 - 1.5 / POOL)


def predicted(caption: str, history: list[Entry]) -> np.ndarray:
    """(WIDTH,) the questioner's idea of the picture: the mean feature of the pool's scenes that agree with
    the caption and the answers; where none does any more, the mean of those that did last."""
    fits = fitting(caption)
    last = fits if fits.any() else np.ones(POOL, dtype=bool)
    for asked, told in zip(history[::2], history[1::2], strict=False):
        fits = fits & agreeing(asked["text"], told["text"])
        last = fits if fits.any() else last
    return features()[last].mean(0)


def percentile(truth: np.ndarray, idea: np.ndarray) -> float:
    """1 - rank / size of the pool, the true feature among those of the pool by distance to the idea; 1 is the
    nearest. The true one counts itself where it is not in the pool."""
    everyone = features()
    distances = ((everyone - idea) ** 2).sum(1)
    own = ((truth - idea) ** 2).sum()
    known = bool((np.abs(everyone - truth).max(1) < NEAR).any())
    return 1 - (1 + int((distances < own - NEAR).sum())) / (POOL + (not known))


def error(truth: np.ndarray, idea: np.ndarray) -> float:
    """The mean square error of the predicted feature."""
    return float(((truth - idea) ** 2).mean())


# ------------------------------------------------------------------------------------------------------------
# The endpoints


def _value(by_rank: bool, truth: np.ndarray, caption: str, history: list[Entry]) -> float:
    return (percentile if by_rank else error)(truth, predicted(caption, history))


def _progress(by_rank: bool, truth: np.ndarray, caption: str, history: list[Entry]) -> float:
    """How much the last round gained: in percentile, or off the error."""
    after, before = (_value(by_rank, truth, caption, part) for part in (history, history[:-2]))
    return after - before if by_rank else before - after


def _ends_with(speaker: str, history: list[Entry]) -> None:
    if len(history) % 2 == (speaker == "answer"):
        raise UserError(f"history: expected its last entry to be the {speaker}, got {len(history)} entries")


def _step(by_rank: bool, caption: str, history: list[Entry], form: Mapping[str, str]) -> list[Any]:
    told = _answer(caption, history, form)
    history = [*history, {"speaker": "answer", "text": told}]
    return [told, _progress(by_rank, _features(form), caption, history)]


def _reward(by_rank: bool, caption: str, history: list[Entry], form: Mapping[str, str]) -> float:
    truth = _features(form)
    _ends_with("answer", history)
    return (_progress if history else _value)(by_rank, truth, caption, history)


def _answer(caption: str, history: list[Entry], form: Mapping[str, str]) -> str:
    truth = _features(form)
    _ends_with("question", history)
    return answer(scene_of(truth), read_question(history[-1]["text"]))


def _question(caption: str, history: list[Entry], form: Mapping[str, str]) -> str:
    """The question that splits the scenes left best; the first of those that are equally good."""
    _ends_with("answer", history)
    fits = fitting(caption)
    for asked, told in zip(history[::2], history[1::2], strict=True):
        fits = fits & agreeing(asked["text"], told["text"])
    return max(QUESTIONS, key=lambda text: information(fits, text))


def information(fits: np.ndarray, text: str) -> float:
    """Nats that the answer to a question says about which of the scenes it is; 0 where there is none."""
    _, counts = np.unique(answers_of(read_question(text))[fits], return_counts=True)
    shares = counts / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum())


ENDPOINTS: dict[str, Callable[[str, list[Entry], Mapping[str, str]], Any]] = {
    "/step_rank": lambda *request: _step(True, *request),
    "/step": lambda *request: _step(False, *request),
    "/fetch_reward_rank": lambda *request: _reward(True, *request),
    "/fetch_reward": lambda *request: _reward(False, *request),
    "/fetch_a_bot_response": _answer,
    "/fetch_q_bot_response": _question,
}
