"""Served models compared by what their users said of them: an A/B test, read from the chats of a store.

The server draws a model for each participant (a key and its `user`), so participants, not chats or replies,
are what intervals draw again; a chat of nobody in particular is one. What counts for which model:

    chat 1   drawn bc      bc: Hi! (up)     bc: Why? (down)      everything counts for bc
    chat 2   drawn ilql    ilql: Hi! (up)   bc: Why? (down)      ilql was taken out of service meanwhile: its
                                                                 own reply counts, what follows does not
    chat 3   asked for ilql                                      shown apart: those who ask for a model are no
                                                                 random part of the users

A model under another checkpoint is another model. Two models are compared by the chats that began while both
got new ones: before a rollout there was nothing to draw, and other users on other days are no control group.
README.md defines the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.data.files import write_json
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation import plots
from rl_dialog.evaluation.document import Section, Table, write_document
from rl_dialog.evaluation.intervals import Estimate, Measure, unpaired_difference
from rl_dialog.evaluation.metrics import repeats
from rl_dialog.evaluation.summary import Group, RunResult, as_json, figure_of, shown
from rl_dialog.rewards.words import words

VOTES, TEXTS = ("replies", "voted", "up", "down", "vote"), ("words", "repeated", "seconds")
FEW = 8  # participants below which a bootstrap's intervals are much too narrow
Known = Mapping[
    str, Mapping[str, float]
]  # figure -> chat id -> its value, for what is known of chats and does not stand in the store


@dataclass(frozen=True)
class Said:
    """One served reply."""

    model: str
    checkpoint: str
    method: str
    mixed: bool  # another model had spoken before, in the same conversation
    vote: int | None  # None, too, where the same user votes later on the same conversation
    voted: bool
    words: int
    repeated: bool
    seconds: float | None


@dataclass
class Chat:
    """One chat with the replies of all its branches, each once."""

    id: str
    user: str
    started: str  # UTC in ISO form, so that the order of the texts is that of the times
    drawn: str  # the model that the server drew for it; "" where the client chose
    key: str = ""
    ratings: dict[str, float] = field(default_factory=dict)
    replies: list[Said] = field(default_factory=list)

    @property
    def participant(self) -> tuple[str, ...]:
        """Whose chat it is; of nobody in particular it is its own."""
        return (self.key, self.user) if self.key or self.user else (self.id,)

    @property
    def counted(self) -> list[Said]:
        """The replies that tell something of the chat's model: those before another one spoke."""
        wanted = self.drawn or self.replies[0].model
        first = next(
            (said.checkpoint for said in self.replies if said.model == wanted and not said.mixed), ""
        )
        return [
            said
            for said in self.replies
            if not said.mixed and (said.model, said.checkpoint) == (wanted, first)
        ]


@dataclass
class Arm:
    """A model and the chats that count for it."""

    name: str
    model: Said  # any of its replies
    chats: list[Chat]
    group: Group

    @property
    def began(self) -> tuple[str, str]:
        """When its first and its last chat began."""
        times = [chat.started for chat in self.chats]
        return min(times), max(times)


@dataclass
class Difference:
    """A model minus the baseline, in the chats that began between two times."""

    arm: Arm
    baseline: Arm
    began: tuple[str, str]
    chats: tuple[int, int]
    figures: dict[str, Estimate]


@dataclass
class Comparison:
    """The whole A/B test. `apart` are the chats whose model the client chose."""

    arms: list[Arm]
    differences: list[Difference]
    apart: list[Arm]
    notes: list[str]


def read_chats(dialogs: Iterable[Dialog]) -> list[Chat]:
    """The chats behind the Dialogs of a store: branches are put together again, and the Dialogs of edits are
    left out, which no model said."""
    found: dict[str, Chat] = {}
    for dialog in dialogs:
        name, _, branch = dialog.id.partition("#")
        if branch.startswith("edit-"):
            continue
        about = [str(dialog.meta.get(name, "")) for name in ("user", "started", "drawn", "key")]
        chat = found.setdefault(name, Chat(name, *about))
        chat.ratings |= dialog.meta.get("ratings", {})
        chat.replies += _said(dialog)
    return [chat for chat in found.values() if chat.replies]


def _said(dialog: Dialog) -> Iterator[Said]:
    """The served replies of a branch that no earlier branch had."""
    earlier: list[str] = []
    speakers: set[tuple[str, str]] = set()
    for message in dialog.messages:
        if message["role"] != "assistant":
            continue
        text = message["content"] or ""
        if "completion" in message:
            speaker = message.get("model", ""), message.get("checkpoint", "")
            speakers.add(speaker)
            if message.get("weight", 1) != 0:
                given, how = message.get("feedback", {}), dialog.meta.get("method", "")
                voted = "vote" in given or "repeated_vote" in given
                yield Said(
                    *speaker,
                    how,
                    len(speakers) > 1,
                    given.get("vote"),
                    voted,
                    len(words(text)),
                    repeats(earlier, text),
                    message.get("seconds"),
                )
        earlier.append(text)


def compare_served(
    chats: Sequence[Chat],
    *,
    baseline: str = "",
    known: Known | None = None,
    replicates: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Figures per model and their differences to `baseline`, by default the model whose first chat is the
    earliest.

    Raises UserError without any chat, and for a baseline that was never drawn.
    """
    if not chats:
        raise UserError(
            "expected served chats with replies, found none: talk to a model first (python -m pipelines.serve"
            " --help)"
        )
    drawn, asked = (
        [chat for chat in chats if bool(chat.drawn) is wanted and chat.counted] for wanted in (True, False)
    )
    arms, apart = (
        sorted(_arms(part, known or {}, replicates, seed), key=lambda arm: arm.began[0])
        for part in (drawn, asked)
    )
    names = [arm.name for arm in arms]
    if baseline and baseline not in names:
        raise UserError(
            "--baseline: expected a model that the server drew, "
            f"{', '.join(names) or 'of which there are none'}, got {baseline!r}"
        )
    arms.sort(key=lambda arm: arm.name != baseline)  # stable: the others stay in the order of time
    differences = [_difference(arm, arms[0], known or {}, replicates, seed) for arm in arms[1:]]
    return Comparison(arms, differences, apart, _notes(chats, arms, differences))


def _arms(chats: Sequence[Chat], known: Known, replicates: int, seed: int) -> list[Arm]:
    by_model: dict[tuple[str, str], list[Chat]] = {}
    for chat in chats:
        by_model.setdefault((chat.counted[0].model, chat.counted[0].checkpoint), []).append(chat)
    models = [model for model, _ in by_model]
    arms = []
    for (model, checkpoint), members in by_model.items():
        name = model if models.count(model) == 1 else f"{model} ({'/'.join(Path(checkpoint).parts[-2:])})"
        said = members[0].counted[0]
        group = Group(name, "", [RunResult(name, checkpoint, said.method, measures(members, known))])
        group.summarise(replicates=replicates, seed=seed)
        arms.append(Arm(name, said, members, group))
    return arms


def measures(chats: Sequence[Chat], known: Known) -> dict[str, Measure]:
    """Every figure as a ratio of sums; one unit per participant. A chat whose model changed has neither a
    rating nor anything else that is of the whole."""
    places = {who: place for place, who in enumerate(dict.fromkeys(chat.participant for chat in chats))}
    found: dict[str, np.ndarray] = {}  # (participants, 2); 0 and 0 where it does not apply to one
    for chat in chats:
        said, whole = chat.counted, len(chat.counted) == len(chat.replies)
        votes, seconds = (
            [value for value in values if value is not None]
            for values in ([s.vote for s in said], [s.seconds for s in said])
        )
        pairs = {
            "replies": (len(said), 1),
            "voted": (sum(s.voted for s in said), len(said)),
            "vote": (sum(votes), len(votes)),
        }
        pairs |= {
            "up": (votes.count(1), len(votes)),
            "down": (votes.count(-1), len(votes)),
            "words": (sum(s.words for s in said), len(said)),
        }
        pairs |= {
            "repeated": (sum(s.repeated for s in said), len(said)),
            "seconds": (sum(seconds), len(seconds)),
        }
        of_whole = {f"rating/{scale}": value for scale, value in chat.ratings.items()}
        of_whole |= {name: values[chat.id] for name, values in known.items() if chat.id in values}
        pairs |= {name: (value, 1) for name, value in of_whole.items() if whole}
        for name, pair in pairs.items():
            sums = found.setdefault(name, np.zeros((len(places), 2)))
            sums[places[chat.participant]] += pair
    return {name: Measure(sums[:, 0], sums[:, 1]) for name, sums in found.items()}


def _difference(arm: Arm, baseline: Arm, known: Known, replicates: int, seed: int) -> Difference:
    (first, last), (other_first, other_last) = arm.began, baseline.began
    began = max(first, other_first), min(last, other_last)
    chats = [
        [chat for chat in side.chats if began[0] <= chat.started <= began[1]] for side in (arm, baseline)
    ]
    ours, theirs = (measures(members, known) for members in chats)
    found = {
        name: unpaired_difference(ours[name], theirs[name], replicates=replicates, seed=seed)
        for name in ours
        if name in theirs
    }
    return Difference(
        arm,
        baseline,
        began,
        (len(chats[0]), len(chats[1])),
        {name: change for name, change in found.items() if change is not None},
    )


def _notes(chats: Sequence[Chat], arms: Sequence[Arm], differences: Sequence[Difference]) -> list[str]:
    """What to know before believing a figure."""
    notes = []
    for change in differences:
        if not all(change.chats):
            notes.append(
                f"{change.arm.name} and {change.baseline.name} never got new chats at the same time: there is"
                " no comparison"
            )
        elif left := sum(len(side.chats) for side in (change.arm, change.baseline)) - sum(change.chats):
            notes.append(
                f"{change.arm.name} - {change.baseline.name}: {left} chats began when only one of the two got"
                " new ones and do not count"
            )
    switched = [chat for chat in chats if len(chat.counted) < len(chat.replies)]
    if switched:
        lost = sum(len(chat.replies) - len(chat.counted) for chat in switched)
        notes.append(
            f"{len(switched)} chats were not answered by one model alone: {lost} replies from the change on, "
            "and their ratings, do not count"
        )
    counted = [chat.participant for arm in arms for chat in arm.chats]
    if len(set(counted)) < len(counted):
        notes.append(f"{len(counted)} chats are by {len(set(counted))} participants, whom the intervals draw")
    people = {arm.name: len({chat.participant for chat in arm.chats}) for arm in arms}
    if few := [f"{name} {count}" for name, count in people.items() if 1 < count < FEW]:  # one has no interval
        notes.append(
            f"few participants: {', '.join(few)}. 95 % intervals over fewer than {FEW} are too narrow "
            "(over 2 they hold the truth half the time, over 5 in 85 %)"
        )
    return notes + _nothing(chats, arms)


def _nothing(chats: Sequence[Chat], arms: Sequence[Arm]) -> list[str]:
    """Why nothing is compared, if so."""
    asked = [chat for chat in chats if not chat.drawn]
    votes = sum(said.vote is not None for chat in asked for said in chat.replies)
    if asked and not arms:
        return [
            f"no chat counts: in all {len(asked)}, with {votes} votes, the client named the model. Only "
            'chats whose model the server drew are compared: clients ask for `model: "assigned"` and say who '
            "talks (`user`, or a participant's key)"
        ]
    if arms and not any("vote" in arm.group.estimates for arm in arms):
        elsewhere = f"; {votes} are in chats whose client named the model" if votes else ""
        return [f"no vote counts: nobody voted in a chat whose model the server drew{elsewhere}"]
    return []


def sections(comparison: Comparison) -> list[Section]:
    """The report, without what nobody measured."""
    arms, every = comparison.arms, [*comparison.arms, *comparison.apart]
    names = list(dict.fromkeys(name for arm in every for name in arm.group.estimates))
    ratings = [name for name in names if name.startswith("rating/")]
    first = [*VOTES, *(name for name in names if name not in (*VOTES, *ratings, *TEXTS))]
    png = plots.panels(
        [arm.group for arm in arms], {name: figure_of(name).title for name in [*first[2:], *ratings]}
    )
    found = [
        Section(
            "Votes", [VOTES_TEXT], _table(arms, first), comparison.notes, ("votes.png", png) if png else None
        ),
        _differences(comparison, [*first, *ratings, *TEXTS]),
        (
            Section(
                "Ratings",
                ["Of whole chats, by their users; the mean over the chats that have one."],
                _table(arms, ratings),
            )
            if ratings
            else None
        ),
        Section("Replies", [TEXTS_TEXT], _table(arms, TEXTS)),
        (
            Section("Not part of the comparison", [APART_TEXT], _table(comparison.apart, first))
            if comparison.apart
            else None
        ),
        _models(every),
    ]
    return [section for section in found if section is not None]


VOTES_TEXT = (
    "Of the chats whose model the server drew. Thumbs up, down and the mean vote (1, 0 or -1) are over the "
    "replies that were voted on; of a user's votes on the same conversation, word for word, the last one "
    "counts. 95 % bootstrap intervals over participants."
)
TEXTS_TEXT = (
    "Repeated: the same as an earlier reply of the chat, or nearly. Seconds: from the request to the end of "
    "the reply, waiting included."
)
APART_TEXT = (
    "Chats for which the client chose the model. Who asks for a model is no random part of the users, so "
    "these say nothing about its merit."
)


def _table(arms: Sequence[Arm], names: Sequence[str]) -> Table:
    having = [name for name in names if any(name in arm.group.estimates for arm in arms)]
    rows = [
        [
            arm.name,
            str(len(arm.chats)),
            str(sum(len(chat.counted) for chat in arm.chats)),
            *(shown(arm.group.estimates.get(name), figure_of(name)) for name in having),
        ]
        for arm in arms
    ]
    return Table(["model", "chats", "replies", *(figure_of(name).title for name in having)], rows)


def _differences(comparison: Comparison, names: Sequence[str]) -> Section | None:
    if not comparison.differences:
        return None
    changes = comparison.differences
    having = [name for name in names if any(name in change.figures for change in changes)]
    rows = [["chats", *(f"{change.chats[0]} and {change.chats[1]}" for change in changes)]]
    rows += [
        [
            figure_of(name).title,
            *(shown(change.figures.get(name), figure_of(name), signed=True) for change in changes),
        ]
        for name in having
    ]
    text = [
        "Over the chats that began while both got new ones. Where the interval leaves out 0, the luck of the "
        "draw hardly explains it."
    ]
    return Section(
        "Difference",
        text,
        Table(["figure", *(f"{change.arm.name} - {change.baseline.name}" for change in changes)], rows),
    )


def _models(arms: Sequence[Arm]) -> Section:
    rows = [[arm.name, arm.model.method, *arm.began, arm.model.checkpoint] for arm in arms]
    return Section("Models", [], Table(["model", "method", "first chat", "last chat", "checkpoint"], rows))


def write_ab_report(comparison: Comparison, out: Path) -> dict[str, Path]:
    """ab.md with plots/, ab.html and ab.json in `out`; their paths."""
    markdown, page = write_document("Served models compared", sections(comparison), out, name="ab")
    write_json(out / "ab.json", to_json(comparison))
    return {"report": markdown, "html": page, "json": out / "ab.json"}


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything the report says, as plain values."""

    def figures(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
        return {name: as_json(value) for name, value in estimates.items()}

    def described(arm: Arm) -> dict[str, Any]:
        counts = {"chats": len(arm.chats), "replies": sum(len(chat.counted) for chat in arm.chats)}
        about = {
            "model": arm.name,
            "checkpoint": arm.model.checkpoint,
            "method": arm.model.method,
            "began": arm.began,
        }
        return about | counts | {"figures": figures(arm.group.estimates)}

    changes = [
        {
            "model": d.arm.name,
            "baseline": d.baseline.name,
            "began": d.began,
            "chats": d.chats,
            "figures": figures(d.figures),
        }
        for d in comparison.differences
    ]
    models, apart = ([described(arm) for arm in arms] for arms in (comparison.arms, comparison.apart))
    return {"models": models, "differences": changes, "apart": apart, "notes": comparison.notes}


def headline(comparison: Comparison, names: Sequence[str]) -> dict[str, Any]:
    """The mean vote of each model, and the differences in the figures of these names, each with its
    interval."""
    models = {}
    for arm in comparison.arms:
        vote = arm.group.estimates.get("vote")
        models[arm.name] = {"chats": len(arm.chats), "vote": vote and vote.triple}
    differences = {
        f"{change.arm.name} - {change.baseline.name}": {
            name: change.figures[name].triple for name in names if name in change.figures
        }
        for change in comparison.differences
    }
    return {"models": models, "differences": differences, "notes": comparison.notes}
