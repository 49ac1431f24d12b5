"""What happens in task-oriented dialogs: what users asked for and got, what they were told unasked, what went
round in circles, why dialogs failed.

A dialog is a line of `simulate`'s or `converse`'s dialogs.jsonl: both sides' acts in every message, the
user's goal, and in `meta` the outcome.

    user: Request Hotel Phone ?      system: Inform Hotel Area east
    user: Request Hotel Phone ?      system: Inform Hotel Phone 01223
          asked                              unasked, if Area is no wish
          a loop of 2                        answered, not at once

Acts are `(intent, domain, slot, value)`; slots have the names that acts use.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_dialog.data.schema import Dialog, read_jsonl
from rl_dialog.errors import UserError
from rl_dialog.evaluation.intervals import Measure

Act = tuple[str, str, str, str]
TELLS = ("Inform", "Recommend", "Select", "OfferBook", "OfferBooked", "Book")
FIGURE = {  # as simulate calls them -> as outcomes do, whose precision counts every superfluous slot
    "success": "success",
    "success_strict": "success_strict",
    "complete": "complete",
    "book_rate": "book_rate",
    "inform_precision_all_slots": "inform_precision",
    "inform_recall": "inform_recall",
    "inform_f1_all_slots": "inform_f1",
}
REASONS = {
    "not booked": "a booking that the user wanted was never made",
    "booked wrongly": "what was booked does not meet the user's wishes",
    "not answered": "something the user asked for was never told",
    "never asked": "the user left before it had asked for all that it wanted to know",
    "wrong answers": "all was told and booked, but not of anything that meets the user's wishes",
}
BY_DOMAIN = (
    "success",
    "book_rate",
    "inform_precision_all_slots",
    "inform_recall",
    "inform_f1_all_slots",
    "turns",
)
MISSED = {
    "nothing found": "the system's last word on it was that there is none",
    "refused": "its last word was that it cannot be booked",
    "not reached": "the user left before it came to that domain",
    "no details": "the user never said for when or for how many",
    "ignored": "the user said so, and was not told why nothing came of it",
}


@dataclass(frozen=True)
class Said:
    """One side's turn."""

    side: str  # user, system
    text: str
    acts: tuple[Act, ...]
    understood: tuple[Act, ...] | None  # what the other side made of its words, where it read words


@dataclass(frozen=True)
class Asked:
    """A thing that the user asked for: when it was told, in replies after the question (0: at once; None:
    never), and the first reply to it."""

    domain: str
    slot: str
    answered: int | None
    reply: tuple[Act, ...]


@dataclass
class TaskDialog:
    """One dialog and what can be said of it."""

    key: tuple[int, ...]  # the seeds: the same key is the same user with the same goal
    id: str
    goal: dict[str, Any]
    turns: list[Said]
    total: float | None  # the return; None where the reward of a reply is missing
    outcome: dict[str, Any]
    asked: list[Asked] = field(default_factory=list)
    unasked: list[tuple[str, str]] = field(
        default_factory=list
    )  # (domain, slot) told though nobody asked or wished
    loops: list[tuple[str, tuple[Act, ...], int]] = field(
        default_factory=list
    )  # (side, acts, how often in a row)
    booked: list[str] = field(default_factory=list)  # domains of the goal for which a booking was made

    def __post_init__(self) -> None:
        self.asked, self.unasked = _asked(self.turns), _unasked(self.turns)
        self.loops = [loop for side in ("user", "system") for loop in _loops(side, self.turns)]
        self.booked = _booked(self.turns)

    @property
    def success(self) -> bool:
        return bool(self.outcome["success"])

    @property
    def replies(self) -> int:
        return sum(turn.side == "system" for turn in self.turns)

    @property
    def to_book(self) -> list[str]:
        """Domains of the goal with a booking."""
        return [domain for domain, wish in self.goal.items() if wish.get("book")]

    @property
    def reason(self) -> str:
        """Why it failed, one of REASONS, the first that applies; "" for a success."""
        if self.success:
            return ""
        if set(self.to_book) - set(self.booked):
            return "not booked"
        if (rate := self.outcome.get("book_rate")) is not None and rate < 1:
            return "booked wrongly"
        if any(question.answered is None for question in self.asked):
            return "not answered"
        if (recall := self.outcome.get("inform_recall")) is not None and recall < 1:
            return "never asked"
        return "wrong answers"

    @property
    def missed(self) -> dict[str, str]:
        """Domain of a booking that was never made -> why, one of MISSED."""
        return {
            domain: _missed(self.turns, domain, self.goal[domain]["book"])
            for domain in self.to_book
            if domain not in self.booked
        }

    @property
    def turns_by_domain(self) -> Counter[str]:
        """Goal domain -> replies while it was the one that the user had spoken of last."""
        return Counter(
            domain for turn, domain in _with_domain(self.turns) if turn.side == "system" and domain
        )


def read_task_dialogs(path: str | Path) -> list[TaskDialog]:
    """The dialogs of a file.

    Raises DialogError for a malformed line, UserError for a dialog without acts, goal or outcome, and for two
    of the same user.
    """
    dialogs = [_task_dialog(dialog, f"{path}, dialog {dialog.id}") for dialog in read_jsonl(path)]
    if not dialogs:
        raise UserError(f"{path}: expected dialogs, found none")
    key, times = Counter(dialog.key for dialog in dialogs).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"{path}: expected a dialog per user, got {times} with the seeds {list(key)}: keep the dialogs of"
            " one run in a file"
        )
    return dialogs


def read_simulated(folders: Sequence[str]) -> dict[str, tuple[str, list[TaskDialog]]]:
    """Name -> (folder, dialogs) of folders that simulate or converse wrote; NAME=FOLDER gives one another
    name."""
    runs: dict[str, tuple[str, list[TaskDialog]]] = {}
    for flag in folders:
        name, _, folder = flag.rpartition("=") if "=" in flag and not Path(flag).exists() else ("", "", flag)
        path, name = Path(folder) / "dialogs.jsonl", name or Path(folder).name
        if not path.is_file():
            raise UserError(
                f"--simulated {folder}: expected a folder that simulate or converse wrote, found no {path}"
            )
        if name in runs:
            raise UserError(
                f"--simulated: two folders are called {name}; name them: a={runs[name][0]} b={folder}"
            )
        runs[name] = folder, read_task_dialogs(path)
    return runs


def options_of(folder: str) -> dict[str, Any] | None:
    """The user options of a run that are not the defaults; None where its results do not tell them."""
    path = Path(folder) / "results.json"
    return json.loads(path.read_text(encoding="utf-8")).get("options") if path.is_file() else None


def _task_dialog(dialog: Dialog, where: str) -> TaskDialog:
    outcome, seeds = dialog.meta.get("outcome"), dialog.meta.get("seeds")
    if not isinstance(outcome, dict) or "success" not in outcome or not isinstance(seeds, list):
        raise UserError(
            f"{where}: expected `seeds` and an `outcome` with `success`, as simulate and converse write them,"
            f" got {dialog.meta!s:.120}"
        )
    if not isinstance(dialog.goal, dict) or not all(isinstance(wish, dict) for wish in dialog.goal.values()):
        raise UserError(f"{where}: expected the user's goal by domain, got {dialog.goal!r:.120}")
    turns = []
    for message in dialog.messages:
        if message["role"] not in ("user", "assistant"):
            continue
        if (acts := _acts(message.get("acts"))) is None:
            raise UserError(
                f"{where}: expected `acts` of four strings each in every message, got "
                f"{message.get('acts')!r:.120}"
            )
        side, understood = (
            "system" if message["role"] == "assistant" else "user",
            _acts(message.get("understood")),
        )
        if (meant := _acts(message.get("meant"))) is not None:  # a reply's acts are what the user read
            acts, understood = meant, acts
        turns.append(Said(side, message["content"] or "", acts, understood))
    rewards = [dialog.messages[i].get("reward") for i in dialog.replies]
    total = None if None in rewards else sum(rewards, 0.0)
    return TaskDialog(tuple(seeds), dialog.id, dialog.goal, turns, total, outcome)


def _acts(value: Any) -> tuple[Act, ...] | None:
    if not isinstance(value, list | tuple) or not all(
        isinstance(act, list | tuple) and len(act) == 4 for act in value
    ):
        return None
    return tuple(tuple(map(str, act)) for act in value)


def _asked(turns: Sequence[Said]) -> list[Asked]:
    requests, requested = [], set()
    for i, turn in enumerate(turns):
        if turn.side != "user":
            continue
        for intent, domain, slot, _ in turn.acts:
            if intent != "Request" or (domain, slot) in requested:
                continue
            requested.add((domain, slot))
            later = [reply.acts for reply in turns[i + 1 :] if reply.side == "system"]
            answered = next(
                (n for n, acts in enumerate(later) if any(_tells(act, domain, slot) for act in acts)), None
            )
            requests.append(Asked(domain, slot, answered, later[0] if later else ()))
    return requests


def _tells(act: Act, domain: str, slot: str) -> bool:
    return act[0] in TELLS and act[2] == slot and act[1] in (domain, "Booking")


def _unasked(turns: Sequence[Said]) -> list[tuple[str, str]]:
    """A system tells unasked what the user has neither asked for nor wished so far; names, choices and
    references are never unasked."""
    wishes: set[tuple[str, str]] = set()
    unasked = []
    for turn in turns:
        if turn.side == "user":
            wishes |= {(domain, slot) for _, domain, slot, _ in turn.acts}
            wishes |= {
                ("Taxi", "Car"),
                ("Taxi", "Phone"),
            }  # all that there is to a taxi; nobody has to ask for them
        else:
            unasked += [
                (domain, slot)
                for intent, domain, slot, _ in turn.acts
                if intent in ("Inform", "Recommend")
                and slot not in ("none", "Name", "Choice", "Ref", "Id")
                and (domain, slot) not in wishes
            ]
    return unasked


def _loops(side: str, turns: Sequence[Said]) -> list[tuple[str, tuple[Act, ...], int]]:
    """Acts that a side said at least twice in a row."""
    loops, last_acts, times = [], (), 0
    for acts in [*(tuple(sorted(turn.acts)) for turn in turns if turn.side == side), ()]:
        if acts and acts == last_acts:
            times += 1
            continue
        if times > 1:
            loops.append((side, last_acts, times))
        last_acts, times = acts, 1
    return loops


def _booked(turns: Sequence[Said]) -> list[str]:
    """Goal domains in which the system gave a reference; `Booking` is the domain that the user spoke of
    last."""
    domains = []
    for turn, current in _with_domain(turns):
        for intent, domain, slot, _ in turn.acts if turn.side == "system" else ():
            if slot == "Ref" and intent in ("Book", "OfferBooked"):
                domains.append(current if domain == "Booking" else domain.lower())
    return list(dict.fromkeys(domains))


def _with_domain(turns: Sequence[Said]) -> Iterator[tuple[Said, str]]:
    """Each turn with the goal domain that the user spoke of last."""
    current = ""
    for turn in turns:
        if turn.side == "user":
            current = next(
                (domain.lower() for _, domain, _, _ in reversed(turn.acts) if domain != "general"), current
            )
        yield turn, current


def _missed(turns: Sequence[Said], domain: str, book: Iterable[str]) -> str:
    """Why a booking was never made: by the last reply on the domain, else by what the user said of it."""
    replies, slots = [], set[str]()
    for turn, current in _with_domain(turns):
        about = [
            act
            for act in turn.acts
            if act[1].lower() == domain or (act[1] == "Booking" and current == domain)
        ]
        if about and turn.side == "system":
            replies.append({intent for intent, *_ in about})
        slots |= {slot.lower() for _, _, slot, _ in about if turn.side == "user"}
    for intent, reason in (("NoOffer", "nothing found"), ("NoBook", "refused")):
        if replies and intent in replies[-1]:
            return reason
    if not slots:
        return "not reached"
    return "ignored" if slots & {slot.lower() for slot in book} else "no details"


def measures(dialogs: Sequence[TaskDialog]) -> dict[str, Measure]:
    """Every figure with a unit per dialog; those that do not apply to a dialog's goal leave it out."""
    columns: dict[str, list[float | None]] = {
        name: [dialog.outcome.get(key) for dialog in dialogs] for name, key in FIGURE.items()
    }
    columns["turns"] = [dialog.replies for dialog in dialogs]
    columns["return"] = [dialog.total for dialog in dialogs]
    columns["loops"] = [bool(dialog.loops) for dialog in dialogs]
    figures = {
        name: Measure.mean(values)
        for name, values in columns.items()
        if any(value is not None for value in values)
    }
    for domain in domains_of(dialogs):
        columns = {"success": [dialog.outcome.get("domains", {}).get(domain) for dialog in dialogs]}
        for name in BY_DOMAIN[1:-1]:
            columns[name] = [
                dialog.outcome.get("by_domain", {}).get(domain, {}).get(FIGURE[name]) for dialog in dialogs
            ]
        columns["turns"] = [
            dialog.turns_by_domain[domain] if domain in dialog.goal else None for dialog in dialogs
        ]
        figures |= {
            f"{name}/{domain}": Measure.mean(values)
            for name, values in columns.items()
            if any(value is not None for value in values)
        }
    return figures


def domains_of(dialogs: Iterable[TaskDialog]) -> list[str]:
    """The goals' domains, the most frequent first."""
    counts = Counter(domain for dialog in dialogs for domain in dialog.goal)
    return [domain for domain, _ in counts.most_common()]


def domain_counts(dialogs: Sequence[TaskDialog], domain: str) -> dict[str, int]:
    """Of the dialogs with this domain in their goal: how many, things asked, told, told at once, bookings
    wanted and made, turns."""
    having = [dialog for dialog in dialogs if domain in dialog.goal]
    requests = [request for dialog in having for request in dialog.asked if request.domain.lower() == domain]
    return {
        "dialogs": len(having),
        "asked": len(requests),
        "told": sum(request.answered is not None for request in requests),
        "told at once": sum(request.answered == 0 for request in requests),
        "to book": sum(domain in dialog.to_book for dialog in having),
        "booked": sum(domain in dialog.to_book and domain in dialog.booked for dialog in having),
        "told unasked": sum(
            slot_domain.lower() == domain for dialog in having for slot_domain, _ in dialog.unasked
        ),
    }


@dataclass
class Question:
    """All questions for one slot, and what the first reply was where it did not answer."""

    asked: int = 0
    at_once: int = 0
    later: int = 0
    instead: Counter[str] = field(default_factory=Counter)

    @property
    def never(self) -> int:
        return self.asked - self.at_once - self.later


def questions(dialogs: Iterable[TaskDialog]) -> dict[str, Question]:
    """`Hotel Phone` -> what became of the questions for it, the least answered first."""
    by_slot: dict[str, Question] = defaultdict(Question)
    for dialog in dialogs:
        for request in dialog.asked:
            question = by_slot[f"{request.domain} {request.slot}"]
            question.asked += 1
            question.at_once += request.answered == 0
            question.later += bool(request.answered)
            if request.answered != 0:
                question.instead[_token_line(request.reply)] += 1
    return dict(sorted(by_slot.items(), key=lambda item: (-item[1].never, -item[1].later, -item[1].asked)))


@dataclass
class Reading:
    """All acts of one kind that were said in words, and what they were taken for."""

    said: int = 0
    understood: int = 0
    instead: Counter[str] = field(default_factory=Counter)


def readings(dialogs: Iterable[TaskDialog], side: str) -> dict[str, Reading]:
    """`Inform Hotel Area` of a side -> how the other side read it, the worst read first; {} where both spoke
    in acts."""
    by_act: dict[str, Reading] = defaultdict(Reading)
    for turn in (
        turn
        for dialog in dialogs
        for turn in dialog.turns
        if turn.side == side and turn.understood is not None
    ):
        acts_said, understood = (
            {(*act[:3], act[3].lower()) for act in turn_acts} for turn_acts in (turn.acts, turn.understood)
        )
        wrong = sorted(understood - acts_said)
        for act in sorted(acts_said):
            reading = by_act[_token(act)]
            reading.said += 1
            reading.understood += act in understood
            if act not in understood:
                near = (
                    [other for other in wrong if other[:3] == act[:3]]
                    or [other for other in wrong if other[1:3] == act[1:3]]
                    or wrong
                )
                reading.instead[f"{_token(near[0])} = {near[0][3]}" if near else "nothing"] += 1
    return dict(sorted(by_act.items(), key=lambda item: item[1].understood - item[1].said))


def _token(act: Act) -> str:
    return " ".join(word for word in act[:3] if word != "none")


def _token_line(acts: Iterable[Act]) -> str:
    return "; ".join(dict.fromkeys(map(_token, acts))) or "nothing"


def shown_acts(acts: Iterable[Act]) -> str:
    """Acts as one line."""
    return "; ".join(_token(act) + (f" = {act[3]}" if act[3] not in ("none", "?") else "") for act in acts)
