"""The report on a run's labels: who labelled and how far they can be trusted, how far they agree, and every
pair that they dispute, with its clips or replies and what each of them said.

    disagreement_report(log, segments, draw, folder) -> agreement.html and agreement.md in the folder
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from rl_dialog.errors import UserError
from rl_dialog.evaluation.document import Section, Table, write_document
from rl_dialog.preferences.agreement import (
    Alpha,
    alpha,
    alpha_of_each,
    by_query,
    disagreement,
    doubts,
    opinions,
)
from rl_dialog.preferences.frames import Draw, drawn_frames
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labels import STRENGTHS, Answer
from rl_dialog.preferences.reliability import Reliability, dawid_skene
from rl_dialog.preferences.segments import Clip, Segment, Segments

MOST_PAIRS = 100  # shown with their clips or replies
MOST_FRAMES = 60  # of a film in the report
LEAST_SIDE = 160  # pixels: smaller frames are enlarged by a whole factor
RATE = 15  # frames per second, as on the page
LAST_TURNS = 4  # messages of the context that are shown
SAYS = {1.0: "A is better", 0.5: "equal", 0.0: "B is better"}
STYLE = """<style>
.pair { border: 1px solid #ddd; border-radius: 12px; padding: 1rem 1.2rem; margin: 1.2rem 0; }
.pair h3 { margin: 0 0 .6rem; } .pair .both { display: flex; flex-wrap: wrap; gap: 1rem; }
.pair .one { flex: 1 1 18rem; min-width: 0; border: 1px solid #ddd; border-radius: 8px; padding: .7rem; }
.pair .one h4 { margin: 0 0 .4rem; } .pair .one img { image-rendering: pixelated; }
.pair .said { white-space: pre-wrap; overflow-wrap: anywhere; }
.pair ul { margin: .6rem 0 0; padding-left: 1.2rem; } .pair .role { color: #57606a; font-weight: 600; }
</style>"""


@dataclass(frozen=True)
class Findings:
    """What the report says, in numbers."""

    people: dict[str, dict[str, Any]]  # labeller -> figures, their alpha, accuracy and doubts
    alphas: dict[str, Alpha | None]  # distance, and how pairs are counted -> alpha of all
    disputed: list[tuple[str, list[Answer], float]]  # query, answers, disagreement; the most disputed first
    flagged: list[Answer]
    shared: int  # pairs that two or more people compared
    truths: Reliability | None


def findings(log: LabelLog) -> Findings:
    """Of a log's answers as they stand."""
    answers = [answer for answer in log.answers() if answer.revoked is None]
    groups = by_query(opinions(answers))
    shared = {query: group for query, group in groups.items() if len(group) > 1}
    units = [[answer.preference for answer in group] for group in shared.values()]
    said = [(one.query, one.labeller, one.preference) for one in answers if one.counts]
    truths = dawid_skene(said, known=log.gold()) if said else None
    disputes = [
        (query, group, disagreement([one.preference for one in group])) for query, group in shared.items()
    ]
    return Findings(
        _people(log.labellers(), alpha_of_each(shared), truths),
        {distance: alpha(units, distance=distance) for distance in ("ordinal", "nominal", "interval")}
        | {"ordinal, in both orders": alpha(units, symmetric=True)},
        sorted((one for one in disputes if one[2] > 0), key=lambda one: -one[2]),
        [answer for answer in answers if answer.flag is not None],
        len(shared),
        truths,
    )


def _people(
    figures: Mapping[str, dict[str, Any]], alphas: Mapping[str, Alpha | None], truths: Reliability | None
) -> dict[str, dict[str, Any]]:
    people = {}
    for name, of in figures.items():
        known = truths is not None and name in truths.labellers
        people[name] = of | {
            "alpha": alphas.get(name),
            "accuracy": truths.accuracy(name) if known else None,
            "doubts": doubts(of),
        }
    return people


def disagreement_report(
    log: LabelLog, segments: Segments, draw: Draw | None, folder: str | Path
) -> dict[str, Any]:
    """Writes the report; its paths and headline figures. Raises UserError for clips without a way to draw
    them."""
    found = findings(log)
    sections = [_overview(found, log), _labellers(found), _pairs(found, segments, draw)]
    sections += [_flags(found)] if found.flagged else []
    markdown, page = write_document("Agreement of labellers", sections, Path(folder), name="agreement")
    overall = found.alphas["ordinal"]
    return {
        "report": str(page),
        "markdown": str(markdown),
        "labellers": len(found.people),
        "shared_pairs": found.shared,
        "disputed_pairs": len(found.disputed),
        "flagged": len(found.flagged),
        "alpha": None if overall is None else round(overall.value, 3),
        "doubtful": {name: of["doubts"] for name, of in found.people.items() if of["doubts"]},
    }


def _overview(found: Findings, log: LabelLog) -> Section:
    counts, plan = log.counts(), log.plan
    text = [
        f"{counts['labels']} pairs have a label, {counts['ties']} of them a tie; {found.shared} were "
        f"compared by two or more people, who dispute {len(found.disputed)}. The plan asks {plan.overlap:g} "
        f"{'person' if plan.overlap == 1 else 'people'} about each pair, and shows a gold pair in "
        f"{plan.gold_share:.0%} of the cases; there are {len(log.gold())} of them."
    ]
    if not found.shared:
        text.append("Nobody shares a pair with anybody: label --overlap 2 lets two people see each pair.")
    rows = [
        [distance, str(value), str(value.pairs)] if value else [distance, "–", "–"]
        for distance, value in found.alphas.items()
    ]
    notes = [
        "Krippendorff's alpha, with a 95 % interval over pairs: 1 is perfect agreement, 0 what coins give; "
        "below .67 even tentative conclusions are usually not drawn. Ordinal: a tie is closer to a "
        "preference than the opposite preference. Nominal: it is as far. Interval: it is half of the way. "
        "In both orders: each pair counts twice, the second time with its segments exchanged. Where the "
        "first one is nearly always better, as in some logs, chance seems to agree as people do, and only "
        "this says how far they do."
    ]
    return Section("All labellers", text, Table(["alpha", "value", "pairs"], rows), notes)


def _labellers(found: Findings) -> Section:
    columns = ["labeller", "labels", "ties", "can't tell", "flags", "s per answer", "left"]
    columns += ["agreement", "alpha", "gold right", "noise", "accuracy"]
    suspects = {name: of["doubts"] for name, of in found.people.items() if of["doubts"]}
    text = [f"Look at {name}: {'; '.join(reasons)}." for name, reasons in suspects.items()]
    notes = [
        "Agreement: the share of comparisons with others in which both said the same. Noise: the share of "
        "answers by a coin that would explain it, if the others are as noisy. Accuracy: P(right | one is "
        "better) by Dawid and Skene, from all answers and gold pairs; of whom nothing is known it is .95.",
        "Alpha: with each of the others in turn. Look at: what fewer than one attentive labeller in a "
        "hundred would do. label --revoke NAME takes all of somebody's labels out; fit_reward weighs them by "
        "their reliability either way.",
    ]
    table = Table(columns, list(map(_row, found.people.items())))
    return Section("Each of them", text, table, notes)


def _row(person: tuple[str, dict[str, Any]]) -> list[str]:
    name, of = person
    shown = lambda value, form: "–" if value is None else format(value, form)  # noqa: E731
    gold = f"{of['gold_right']} of {of['gold']}" if of["gold"] else "–"
    agreement = f"{of['agreement']:.0%} of {of['shared']}" if of["shared"] else "–"
    return [
        name if of["active"] else f"{name} (revoked)",
        *(str(of[key]) for key in ("labels", "ties", "skips", "flags")),
        shown(of["seconds"], ".1f"),
        shown(of["left_share"], ".0%"),
        agreement,
        str(of["alpha"] or "–"),
        gold,
        shown(of["noise"], ".2f"),
        shown(of["accuracy"], ".2f"),
    ]


def _pairs(found: Findings, segments: Segments, draw: Draw | None) -> Section:
    shown = found.disputed[:MOST_PAIRS]
    text = [f"The {len(shown)} most disputed of {len(found.disputed)}." if shown else "None is disputed."]
    rows = [
        [query[:12], *_votes(group), f"{share:.2f}", _probable(found.truths, query)]
        for query, group, share in shown
    ]
    columns = ["pair", "A better", "equal", "B better", "disagreement", "most probably"]
    notes = ["Disagreement: the share of pairs of people who did not say the same. A is the first segment."]
    blocks = [
        _block(query, group, segments, draw, _probable(found.truths, query)) for query, group, _ in shown
    ]
    table = Table(columns, rows) if rows else None
    return Section("Disputed pairs", text, table, notes if rows else [], markup=STYLE + "\n".join(blocks))


def _votes(group: Sequence[Answer]) -> list[str]:
    said = [answer.preference for answer in group]
    return [str(said.count(value)) for value in (1.0, 0.5, 0.0)]


def _probable(truths: Reliability | None, query: str) -> str:
    if truths is None or query not in truths.queries:
        return "–"
    p = truths.queries[query]
    return f"{SAYS[(1.0, 0.5, 0.0)[int(p.argmax())]]} ({p.max():.2f})"


def _block(query: str, group: Sequence[Answer], segments: Segments, draw: Draw | None, probable: str) -> str:
    sides = [segments[group[0].first], segments[group[0].second]]
    context = "" if isinstance(sides[0], Clip) else _context(sides[0])
    both = "".join(
        f'<div class="one"><h4>{name}</h4>{_shown(side, draw)}</div>'
        for name, side in zip("AB", sides, strict=True)
    )
    said = "".join(f"<li>{_said(answer)}</li>" for answer in group)
    head = f"<h3>{html.escape(query[:12])}: most probably {html.escape(probable)}</h3>"
    return f'<div class="pair">{head}{context}<div class="both">{both}</div><ul>{said}</ul></div>'


def _said(answer: Answer) -> str:
    parts = [SAYS[answer.preference]]
    parts += [STRENGTHS[answer.strength]] if answer.strength else []
    parts += [", ".join(answer.reasons)] if answer.reasons else []
    parts += [f"flagged: {answer.flag}"] if answer.flag is not None else []
    return f"<b>{html.escape(answer.labeller)}</b>: {html.escape('; '.join(parts))}"


def _context(reply: Segment) -> str:
    turns = list(reply.context)[-LAST_TURNS:]
    left_out = len(reply.context) - len(turns)
    before = f'<p class="note">{left_out} earlier messages are left out.</p>' if left_out else ""
    return before + "".join(
        f'<p class="said"><span class="role">{html.escape(turn["role"])}</span> '
        f"{html.escape(turn['content'])}</p>"
        for turn in turns
    )


def _shown(segment: Segment, draw: Draw | None) -> str:
    if not isinstance(segment, Clip):
        return f'<div class="said">{html.escape(segment.text) or "(an empty reply)"}</div>'
    if draw is None:
        raise UserError("expected a function that draws observations, to show clips in the report")
    data = base64.b64encode(_film(segment, draw)).decode()
    return f'<img alt="a clip of {segment.steps} steps" src="data:image/gif;base64,{data}">'


def _film(clip: Clip, draw: Draw) -> bytes:
    """An endless GIF; of a long clip every n-th frame."""
    frames = drawn_frames(clip, draw)
    step = -(-len(frames) // MOST_FRAMES)
    factor = max(1, LEAST_SIDE // max(frames.shape[1:3]))
    images = [Image.fromarray(frame.repeat(factor, 0).repeat(factor, 1)) for frame in frames[::step]]
    file = io.BytesIO()
    more = {"append_images": images[1:], "duration": round(1000 * step / RATE), "loop": 0}
    images[0].save(file, "gif", save_all=True, **more)
    return file.getvalue()


def _flags(found: Findings) -> Section:
    rows = [
        [one.query[:12], one.labeller, SAYS.get(one.preference, "can't tell"), one.flag or ""]
        for one in found.flagged
    ]
    return Section(
        "Flagged pairs", ["What labellers say is wrong."], Table(["pair", "who", "said", "flag"], rows)
    )
