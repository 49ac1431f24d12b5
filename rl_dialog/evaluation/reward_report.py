"""What the rewards of a prepared directory look like before anything is trained on them: `prepare --report`
writes report/report.html into it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.evaluation import plots
from rl_dialog.evaluation.agreement import (
    TOGETHER,
    Labelled,
    RewardAgreement,
    agreement,
    labelled_replies,
    opening,
)
from rl_dialog.evaluation.document import Column, Sample, Section, Table, write_document
from rl_dialog.rewards.hacks import HACKS, try_hacks
from rl_dialog.rewards.normalise import Normaliser, weighted_sum
from rl_dialog.rewards.statistics import SUM

SAMPLE = 3000  # about so many dialogs of the training split are looked at (and all labels)
HACKED = 500  # about so many of them the hacks are tried on
EXAMPLES = 3  # replies shown at each end

Reward = Callable[[Dialog], Sequence[float | None]]


def write_reward_report(data: Path, rewards: Mapping[str, Reward]) -> tuple[Path, Path]:
    """The report on a data directory whose components `rewards` computes. Returns the paths of report.md and
    report.html."""
    manifest = load_manifest(data)
    dialogs = sample_dialogs(data, manifest)
    table = reward_table(dialogs, list(rewards))
    labelled = labelled_replies(
        (dialog for split in SPLITS for dialog in read_dialogs(data, split)), list(rewards)
    )
    (data / "report").mkdir(exist_ok=True)
    sections = [
        _components(manifest, table),
        _distributions(table),
        _correlations(manifest),
        _human(labelled),
        _hacks(drawn(lambda: dialogs, len(dialogs), HACKED), rewards, manifest),
        *_examples(dialogs, table),
    ]
    return write_document("Rewards", [section for section in sections if section], data / "report")


def sample_dialogs(data: Path, manifest: Mapping[str, Any]) -> list[Dialog]:
    """About SAMPLE dialogs of the training split."""
    return drawn(lambda: read_dialogs(data, "train"), manifest["splits"]["train"]["dialogs"], SAMPLE)


def drawn(read: Callable[[], Iterable[Dialog]], count: int, size: int) -> list[Dialog]:
    """`size` of `count` dialogs, or a few more, by a hash of the messages before the first reply: both sides
    of a preference pair are drawn or neither.

    Files have an order (chosen, rejected, chosen, ...) that every n-th dialog would fall in step with.
    Dialogs that merely begin as many others do are drawn one by one. `read` is called three times.
    """
    if count <= size:
        return list(read())
    alike = Counter(map(opening, read()))

    def place(dialog: Dialog) -> float:
        """Uniform in 0..1; another for each `size`, so that a sample of a sample is one."""
        key = opening(dialog)
        salt = dialog.to_json().encode() if alike[key] > TOGETHER else b""
        return int.from_bytes(hashlib.sha256(b"%d\0%b%b" % (size, key, salt)).digest()[:8], "big") / 2**64

    places = [place(dialog) for dialog in read()]
    last = sorted(places)[size - 1]
    return [dialog for dialog, at in zip(read(), places, strict=True) if at <= last]


def reward_table(dialogs: Sequence[Dialog], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Component -> (R,) over all replies of the dialogs, NaN where it does not apply.

    `sum` is the reward that methods learn from, NaN where it is missing.
    """
    replies = [dialog.messages[i] for dialog in dialogs for i in dialog.replies]
    table = {
        name: np.array([reply["rewards"].get(name, np.nan) for reply in replies], dtype=float)
        for name in names
    }
    return table | {SUM: np.array([reply["reward"] for reply in replies], dtype=float)}


def _components(manifest: Mapping[str, Any], table: Mapping[str, np.ndarray]) -> Section:
    rows, notes = [], []
    normalisers = manifest["rewards"].get("normalisers", {})
    for name, row in [*manifest["rewards"]["components"].items(), (SUM, manifest["rewards"]["sum"])]:
        values = table[name][~np.isnan(table[name])]
        common = max(np.unique(values, return_counts=True)[1], default=0) / max(len(values), 1)
        figures = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("mean", "std", "min", "max")]
        weight = f"{row['weight']:g}" if "weight" in row else ""
        rows.append(
            [
                name,
                weight,
                normalisers.get(name, {}).get("kind", ""),
                *figures,
                f"{row['coverage']:.1%}",
                f"{common:.1%}",
            ]
        )
        if not row["coverage"]:
            notes.append(f"{name} applies to no reply: it teaches nothing")
        elif row["std"] == 0:
            notes.append(f"{name} is the same for all replies it applies to: it teaches nothing")
        elif common > 0.95:
            notes.append(
                f"{name} gives {common:.1%} of the replies one and the same number: what it teaches hangs on "
                "few replies"
            )
        if name == SUM and 0 < row["coverage"] < 1:
            notes.append(f"{1 - row['coverage']:.1%} of the replies have no reward: no method takes it for 0")
    columns = ["reward", "weight", "normaliser", "mean", "std", "min", "max", "coverage", "commonest value"]
    dialogs = sum(manifest["splits"][split]["dialogs"] for split in SPLITS)
    text = [
        f"{dialogs:,} dialogs. Components are raw, the sum is what methods learn from. Coverage: share of the"
        " replies that a component applies to. Commonest value: share of those that have the most frequent "
        "number. The sum is missing where no component with a weight applies."
    ]
    return Section("Components", text, Table(columns, rows), notes)


def _distributions(table: Mapping[str, np.ndarray]) -> Section:
    columns = {name: values[~np.isnan(values)] for name, values in table.items()}
    png = plots.histograms({name: values for name, values in columns.items() if len(values)})
    text = [
        f"Over {len(table[SUM]):,} replies of the training split; the number of replies on a logarithmic "
        "scale."
    ]
    return Section("Distributions", text, plot=None if png is None else ("distributions.png", png))


def _correlations(manifest: Mapping[str, Any]) -> Section | None:
    correlation = manifest["rewards"]["correlation"]
    names = [name for name in correlation if correlation[name][name] is not None]
    if len(names) < 2:
        return None
    values = [[correlation[a][b] for b in names] for a in names]
    strong = [
        f"{a} and {b} nearly measure the same ({correlation[a][b]:.2f})"
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if SUM not in (a, b) and correlation[a][b] is not None and abs(correlation[a][b]) > 0.8
    ]
    text = ["Over the replies that both apply to."]
    return Section(
        "Correlations", text, notes=strong, plot=("correlations.png", plots.heat_map(names, values))
    )


def _human(labelled: Labelled | None) -> Section | None:
    """How well each component tells good from bad replies, where people said which are."""
    agreements = (
        {}
        if labelled is None
        else {name: agreed for name in labelled.scores if (agreed := agreement(labelled, name)) is not None}
    )
    if not agreements:
        return None
    several = len(labelled.sources) > 1
    columns, rows = (
        ["reward", "AUC", *(["within sources", *labelled.sources] if several else []), "replies"],
        [],
    )
    for name, agreed in agreements.items():
        sources = [agreed.within, *map(agreed.of_source.get, labelled.sources)] if several else []
        rows.append(
            [
                name,
                *("-" if value is None else str(value) for value in (agreed.whole, *sources)),
                f"{agreed.whole.replies:,}",
            ]
        )
    text = [
        f"{' and '.join(labelled.kinds)}, all splits: {_counted(labelled.good)}. AUC: how often the component"
        " ranks a good reply above a bad one; 0.5 is chance, below it the component points the wrong way. 95 "
        "% intervals over dialogs, those that answer the same messages together."
    ]
    if several:
        counts = "; ".join(
            f"{name}: {_counted(labelled.good[labelled.source == s])}"
            for s, name in enumerate(labelled.sources)
        )
        text.append(f"By source, {counts}. Within sources: only replies of the same source are compared.")
    notes = [_separation(name, agreed) for name, agreed in agreements.items() if several and agreed.separates]
    return Section("Against human labels", text, Table(columns, rows), notes)


def _counted(good: np.ndarray) -> str:
    return f"{int(good.sum()):,} good and {int((~good).sum()):,} bad replies"


def _separation(name: str, agreed: RewardAgreement) -> str:
    if agreed.within is None:
        return (
            f"{name}: no source has good and bad replies that it applies to, so {agreed.whole.auc:.3f} says "
            "how it tells sources apart, not replies"
        )
    return (
        f"{name} tells sources apart: {agreed.whole.auc:.3f} over all replies, but {agreed.within} between "
        "replies of the same source, which is what counts for a policy"
    )


def _hacks(dialogs: Sequence[Dialog], rewards: Mapping[str, Reward], manifest: Mapping[str, Any]) -> Section:
    weights = {name: row["weight"] for name, row in manifest["rewards"]["components"].items()}
    normalisers = {
        name: Normaliser.from_dict(values)
        for name, values in manifest["rewards"].get("normalisers", {}).items()
    }
    reward_sum = partial(_sums, rewards=rewards, weights=weights, normalisers=normalisers)
    outcomes = try_hacks(dialogs, {**rewards, SUM: reward_sum})
    rows = [
        [
            name,
            *(
                (
                    "-"
                    if (o := by_hack.get(hack)) is None
                    else f"{o.wins:.0%} ({o.change:+.2g}){' falls' if o.falls_for else ''}"
                )
                for hack in HACKS
            ),
        ]
        for name, by_hack in outcomes.items()
    ]
    falls = {
        name: [hack for hack, outcome in by_hack.items() if outcome.falls_for]
        for name, by_hack in outcomes.items()
    }
    notes = [f"{name} falls for: {', '.join(hacks)}" for name, hacks in falls.items() if hacks]
    text = [
        f"Every reply of {len(dialogs):,} dialogs replaced by one that no user wants: the share of replies "
        "that would earn more than the logged one, and the mean change. A reward falls for a hack that wins "
        "more often than not, and on average: a policy that learns from it can be expected to find it. "
        "Rewards read from the user's answer show no change: what users would answer is not in the logs, so "
        "that is no proof of safety."
    ]
    return Section("Hacks", text, Table(["reward", *HACKS], rows), notes)


def _sums(
    dialog: Dialog,
    *,
    rewards: Mapping[str, Reward],
    weights: Mapping[str, float],
    normalisers: Mapping[str, Normaliser],
) -> list[float | None]:
    columns = {name: reward(dialog) for name, reward in rewards.items()}
    rows = (
        {name: column[r] for name, column in columns.items() if column[r] is not None}
        for r in range(len(dialog.replies))
    )
    return [weighted_sum(row, weights, normalisers) for row in rows]


def _examples(dialogs: Sequence[Dialog], table: Mapping[str, np.ndarray]) -> list[Section]:
    """The replies at both ends of every component that varies, one per dialog."""
    places = [(dialog, i) for dialog in dialogs for i in dialog.replies]
    samples = []
    for name, values in table.items():
        rated = np.flatnonzero(~np.isnan(values))
        if not len(rated) or values[rated].min() == values[rated].max():
            continue
        order = rated[np.argsort(values[rated], kind="stable")]
        columns = [
            _example(*places[place], values[place])
            for place in [*_distinct(order[::-1], places), *_distinct(order, places)]
        ]
        samples.append(Sample(name, columns))
    return (
        [
            Section(
                "Examples",
                ["The highest replies first, then the lowest, each from another dialog."],
                samples=samples,
            )
        ]
        if samples
        else []
    )


def _distinct(order: np.ndarray, places: Sequence[tuple[Dialog, int]]) -> list[int]:
    by_dialog: dict[str, int] = {}
    for place in order:
        by_dialog.setdefault(places[place][0].id, int(place))
        if len(by_dialog) == EXAMPLES:
            break
    return list(by_dialog.values())


def _example(dialog: Dialog, i: int, value: float) -> Column:
    """The reply between what was said before and after it."""
    lines = []
    for k in range(max(0, i - 1), min(len(dialog.messages), i + 2)):
        message = dialog.messages[k]
        lines.append(
            (
                message["role"],
                _cut(message["content"] or json.dumps(message.get("tool_calls", ""))),
                f"{value:.4g}" if k == i else "",
            )
        )
    return Column(dialog.id, lines)


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " ..."
