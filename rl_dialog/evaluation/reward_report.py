"""What the rewards of a prepared directory look like before anything is trained on them: `prepare --report` writes report/report.html into it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.data.shards import load_manifest, read_dialogs
from rl_dialog.evaluation import plots
from rl_dialog.evaluation.document import Column, Sample, Section, Table, write_document
from rl_dialog.rewards.hacks import HACKS, try_hacks
from rl_dialog.rewards.normalise import Normaliser, weighted_sum
from rl_dialog.rewards.statistics import SUM

MOST_DIALOGS = 3000  # of the training split, evenly taken from all of it
HACKED = 500  # dialogs that the hacks are tried on
EXAMPLES = 3  # replies shown at each end
REPLICATES = 500

Reward = Callable[[Dialog], Sequence[float | None]]


def write_reward_report(data: Path, rewards: Mapping[str, Reward]) -> tuple[Path, Path]:
    """The report on a data directory whose components `rewards` computes. Returns the paths of report.md and report.html."""
    manifest = load_manifest(data)
    dialogs = sample_dialogs(data, manifest)
    table = reward_table(dialogs, list(rewards))
    (data / "report").mkdir(exist_ok=True)
    sections = [
        _components(manifest, table),
        _distributions(table),
        _correlations(manifest),
        _human(dialogs, table),
        _hacks(dialogs[:: max(1, len(dialogs) // HACKED)][:HACKED], rewards, manifest),
        *_examples(dialogs, table),
    ]
    return write_document("Rewards", [section for section in sections if section], data / "report")


def sample_dialogs(data: Path, manifest: Mapping[str, Any]) -> list[Dialog]:
    """Every n-th dialog of the training split."""
    step = max(1, -(-manifest["splits"]["train"]["dialogs"] // MOST_DIALOGS))
    return list(islice(read_dialogs(data, "train"), 0, None, step))


def reward_table(dialogs: Sequence[Dialog], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Component -> (R,) over all replies of the dialogs, NaN where it does not apply.

    `sum` is the reward that methods learn from, NaN where it is missing.
    """
    replies = [dialog.messages[i] for dialog in dialogs for i in dialog.replies]
    table = {name: np.array([reply["rewards"].get(name, np.nan) for reply in replies], dtype=float) for name in names}
    return table | {SUM: np.array([reply["reward"] for reply in replies], dtype=float)}


def auc(scores: np.ndarray, good: np.ndarray, weights: np.ndarray | None = None) -> float:
    """P(the score of a good one > that of a bad one) + half of P(equal), (R,) each; `weights` (R,) count replies several times. NaN without both."""
    weights = np.ones(len(scores)) if weights is None else weights
    values, place = np.unique(scores, return_inverse=True)
    bad = np.bincount(place, weights * ~good, len(values))
    won = np.cumsum(bad) - bad / 2
    pairs = (weights * good).sum() * bad.sum()
    return float((weights * good * won[place]).sum() / pairs) if pairs else float("nan")


def _components(manifest: Mapping[str, Any], table: Mapping[str, np.ndarray]) -> Section:
    rows, notes = [], []
    normalisers = manifest["rewards"].get("normalisers", {})
    for name, row in [*manifest["rewards"]["components"].items(), (SUM, manifest["rewards"]["sum"])]:
        values = table[name][~np.isnan(table[name])]
        common = max(np.unique(values, return_counts=True)[1], default=0) / max(len(values), 1)
        figures = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("mean", "std", "min", "max")]
        weight = f"{row['weight']:g}" if "weight" in row else ""
        rows.append([name, weight, normalisers.get(name, {}).get("kind", ""), *figures, f"{row['coverage']:.1%}", f"{common:.1%}"])
        if not row["coverage"]:
            notes.append(f"{name} applies to no reply: it teaches nothing")
        elif row["std"] == 0:
            notes.append(f"{name} is the same for all replies it applies to: it teaches nothing")
        elif common > 0.95:
            notes.append(f"{name} gives {common:.1%} of the replies one and the same number: what it teaches hangs on few replies")
        if name == SUM and 0 < row["coverage"] < 1:
            notes.append(f"{1 - row['coverage']:.1%} of the replies have no reward: no method takes it for 0")
    columns = ["reward", "weight", "normaliser", "mean", "std", "min", "max", "coverage", "commonest value"]
    dialogs = sum(manifest["splits"][split]["dialogs"] for split in SPLITS)
    text = [
        f"{dialogs:,} dialogs. Components are raw, the sum is what methods learn from. Coverage: share of the replies that a component applies to. "
        "Commonest value: share of those that have the most frequent number. "
        "The sum is missing where no component with a weight applies."
    ]
    return Section("Components", text, Table(columns, rows), notes)


def _distributions(table: Mapping[str, np.ndarray]) -> Section:
    shown = {name: values[~np.isnan(values)] for name, values in table.items()}
    png = plots.histograms({name: values for name, values in shown.items() if len(values)})
    text = [f"Over {len(table[SUM]):,} replies of the training split; the number of replies on a logarithmic scale."]
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
    return Section("Correlations", text, notes=strong, plot=("correlations.png", plots.heat_map(names, values)))


def _human(dialogs: Sequence[Dialog], table: Mapping[str, np.ndarray]) -> Section | None:
    """How well each component tells good from bad replies, where people said which are."""
    found = human_labels(dialogs)
    if found is None:
        return None
    what, good, known = found
    owner = np.repeat(np.arange(len(dialogs)), [len(dialog.replies) for dialog in dialogs])
    rows = []
    for name, values in table.items():
        use = known & ~np.isnan(values)
        if name in (what, SUM) or len(set(good[use])) < 2:
            continue
        value, low, high = auc_with_interval(values[use], good[use], owner[use])
        rows.append([name, f"{value:.3f} [{low:.3f}, {high:.3f}]", f"{use.sum():,}"])
    if not rows:
        return None
    text = [
        f"{what}: {int((good & known).sum()):,} good and {int((~good & known).sum()):,} bad replies in the sample. AUC: how often the component "
        "ranks a good reply above a bad one; 0.5 is chance, below it the component points the wrong way. 95 % intervals over dialogs."
    ]
    return Section("Against human labels", text, Table(["reward", "AUC", "replies"], rows))


def human_labels(dialogs: Sequence[Dialog]) -> tuple[str, np.ndarray, np.ndarray] | None:
    """(which reward, good (R,), known (R,)): votes other than 0, else `logged` rewards of two values; None where there are neither."""
    replies = [dialog.messages[i] for dialog in dialogs for i in dialog.replies]
    votes = np.array([(reply.get("feedback") or {}).get("vote") or 0 for reply in replies], dtype=float)
    if len(set(votes[votes != 0])) == 2:
        return "vote", votes > 0, votes != 0
    logged = np.array([reply["rewards"].get("logged", np.nan) for reply in replies], dtype=float)
    values = np.unique(logged[~np.isnan(logged)])
    return ("logged", logged == values[1], ~np.isnan(logged)) if len(values) == 2 else None


def auc_with_interval(scores: np.ndarray, good: np.ndarray, owner: np.ndarray) -> tuple[float, float, float]:
    """(AUC, low, high) with a 95 % bootstrap interval over dialogs; scores, good and the number of the dialog are (R,) each."""
    rng = np.random.default_rng(0)
    dialogs, place = np.unique(owner, return_inverse=True)
    draws = [rng.multinomial(len(dialogs), np.full(len(dialogs), 1 / len(dialogs)))[place] for _ in range(REPLICATES)]
    again = [found for weights in draws if not np.isnan(found := auc(scores, good, weights))]
    low, high = np.percentile(again, [2.5, 97.5])
    return auc(scores, good), float(low), float(high)


def _hacks(dialogs: Sequence[Dialog], rewards: Mapping[str, Reward], manifest: Mapping[str, Any]) -> Section:
    weights = {name: row["weight"] for name, row in manifest["rewards"]["components"].items()}
    normalisers = {name: Normaliser.from_dict(values) for name, values in manifest["rewards"].get("normalisers", {}).items()}
    whole = partial(_sums, rewards=rewards, weights=weights, normalisers=normalisers)
    outcomes = try_hacks(dialogs, {**rewards, SUM: whole})
    rows = [
        [name, *("-" if (o := found.get(hack)) is None else f"{o.wins:.0%} ({o.change:+.2g}){' falls' if o.falls_for else ''}" for hack in HACKS)]
        for name, found in outcomes.items()
    ]
    falls = {name: [hack for hack, outcome in found.items() if outcome.falls_for] for name, found in outcomes.items()}
    notes = [f"{name} falls for: {', '.join(hacks)}" for name, hacks in falls.items() if hacks]
    text = [
        f"Every reply of {len(dialogs):,} dialogs replaced by one that no user wants: the share of replies that would earn more than the logged one, "
        "and the mean change. A reward falls for a hack that wins more often than not, and on average: a policy that learns from it can be expected "
        "to find it. Rewards read from the user's answer show no change: what users would answer is not in the logs, so that is no proof of safety."
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
    rows = ({name: column[r] for name, column in columns.items() if column[r] is not None} for r in range(len(dialog.replies)))
    return [weighted_sum(row, weights, normalisers) for row in rows]


def _examples(dialogs: Sequence[Dialog], table: Mapping[str, np.ndarray]) -> list[Section]:
    """The replies at both ends of every component that varies, one per dialog."""
    places = [(dialog, i) for dialog in dialogs for i in dialog.replies]
    samples = []
    for name, values in table.items():
        known = np.flatnonzero(~np.isnan(values))
        if not len(known) or values[known].min() == values[known].max():
            continue
        order = known[np.argsort(values[known], kind="stable")]
        columns = [_example(*places[place], values[place]) for place in [*_distinct(order[::-1], places), *_distinct(order, places)]]
        samples.append(Sample(name, columns))
    return [Section("Examples", ["The highest replies first, then the lowest, each from another dialog."], samples=samples)] if samples else []


def _distinct(order: np.ndarray, places: Sequence[tuple[Dialog, int]]) -> list[int]:
    found: dict[str, int] = {}
    for place in order:
        found.setdefault(places[place][0].id, int(place))
        if len(found) == EXAMPLES:
            break
    return list(found.values())


def _example(dialog: Dialog, i: int, value: float) -> Column:
    """The reply between what was said before and after it."""
    lines = []
    for k in range(max(0, i - 1), min(len(dialog.messages), i + 2)):
        message = dialog.messages[k]
        lines.append((message["role"], _cut(message["content"] or json.dumps(message.get("tool_calls", ""))), f"{value:.4g}" if k == i else ""))
    return Column(dialog.id, lines)


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " ..."
