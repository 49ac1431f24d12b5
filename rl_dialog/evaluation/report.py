"""A report is a list of sections; it is written once as Markdown with its plots beside it, and once as a single HTML file that needs nothing else."""

from __future__ import annotations

import base64
import csv
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation import plots
from rl_dialog.evaluation.intervals import Estimate
from rl_dialog.evaluation.scoring import WAYS
from rl_dialog.evaluation.summary import FIGURES, Figure, Group, RunResult, figure_of, shown


@dataclass
class Table:
    """Cells are text; the first column names the row."""

    columns: list[str]
    rows: list[list[str]]


@dataclass
class Column:
    """One policy's side of a sample: (role, text, note) per message."""

    title: str
    lines: list[tuple[str, str, str]]


@dataclass
class Sample:
    """The same conversation partner, or the same context, met by several policies."""

    title: str
    columns: list[Column]


@dataclass
class Section:
    """A heading and what stands below it, in this order."""

    title: str
    text: list[str] = field(default_factory=list)
    table: Table | None = None
    notes: list[str] = field(default_factory=list)
    plot: tuple[str, bytes] | None = None  # file name, PNG
    samples: list[Sample] = field(default_factory=list)


@dataclass
class Evaluation:
    """Everything a report tells."""

    title: str
    about: list[str]
    groups: list[Group]
    comparisons: dict[str, tuple[str, dict[str, Estimate]]]  # label -> baseline's label, differences
    references: dict[str, Estimate]
    trained: list[str] | None  # rewards with a weight in the training data; None when that is not known
    folders: dict[str, list[Path]]  # group name -> run folders
    samples: int = 3


OVERVIEW = ("return", "perplexity", "kl", "critic", "distinct_2", "words", "repeated", "empty")
TEXTS = ("distinct_1", "distinct_2", "words", "tokens", "replies", "repeated", "rep_3", "empty", "unfinished")
LANGUAGE = ("perplexity", "lm_perplexity", "kl", "kl_per_reply")
COMPARED = ("return", "perplexity", "kl", "critic", "distinct_2", "words", "repeated")


def sections(evaluation: Evaluation) -> list[Section]:
    """The whole report, without what was not measured."""
    found = [
        _overview(evaluation),
        _returns(evaluation),
        _comparison(evaluation),
        *_rewards(evaluation),
        _figures(evaluation, "Language of the logs", LANGUAGE, LANGUAGE_TEXT),
        _trade_off(evaluation),
        _critic(evaluation),
        _figures(evaluation, "Generated text", TEXTS, TEXTS_TEXT),
        _curves(evaluation),
        _runs(evaluation),
        _samples(evaluation),
    ]
    return [section for section in found if section is not None]


LANGUAGE_TEXT = (
    "On the held-out logs: exp of the mean negative log-probability per decision token under what the policy samples from, and under its plain LM; "
    "KL(policy || prior) is exact over the vocabulary at every logged state. Perplexities compare between policies with the same tokenizer only."
)
TEXTS_TEXT = (
    "Of the generated replies. distinct-n: different n-grams of words / all of them. Repeated: the same as an earlier reply of the policy in the "
    "dialog, or nearly. Cut: no end of turn within the token limit."
)


def _overview(evaluation: Evaluation) -> Section:
    names = [name for name in OVERVIEW if _known(evaluation, name)]
    intro = [
        *evaluation.about,
        "Figures are means over runs with 95 % bootstrap intervals over runs and conversations; with one run the interval covers conversations only.",
    ]
    return Section("Overview", intro, _table(evaluation.groups, names, runs=True), _missing(evaluation.groups, names))


def _returns(evaluation: Evaluation) -> Section | None:
    png = plots.interval_plot(evaluation.groups, "return", title="Return per dialog", references=evaluation.references)
    if png is None:
        return None
    rows = [[group.label, shown(group.estimates.get("return"), FIGURES["return"])] for group in evaluation.groups]
    rows += [[label, shown(value, FIGURES["return"])] for label, value in evaluation.references.items()]
    text = ["Undiscounted sum of the environment's rewards. Every policy meets the same conversation partners. Small dots are single runs."]
    return Section("Return", text, Table(["policy", "return per dialog"], rows), plot=("return.png", png))


def _comparison(evaluation: Evaluation) -> Section | None:
    if not evaluation.comparisons:
        return None
    rewards = [name for group in evaluation.groups for name in group.estimates if name.startswith("reward/")]
    known = {name for _, changes in evaluation.comparisons.values() for name in changes}
    names = [name for name in dict.fromkeys((*COMPARED, *rewards)) if name in known]
    rows = []
    for label, (baseline, changes) in evaluation.comparisons.items():
        cells = [shown(changes.get(name), figure_of(name), signed=True) for name in names]
        rows.append([f"{label} - {baseline}", *cells])
    text = ["Differences with 95 % intervals, paired by conversation. Where the interval leaves out 0, other seeds would most likely agree."]
    return Section("Against the baseline", text, Table(["difference", *(_title(name, evaluation) for name in names)], rows))


def _rewards(evaluation: Evaluation) -> list[Section]:
    names = list(dict.fromkeys(name for group in evaluation.groups for name in group.estimates if name.startswith("reward/")))
    if not names:
        return []
    trained = [name for name in names if evaluation.trained is not None and name.removeprefix("reward/") in evaluation.trained]
    others = [name for name in names if name not in trained]
    text = ["Mean per generated reply that the reward applies to."]
    if evaluation.trained is None:
        text.append("Which of them the policies were trained on is not known without their data (--data).")
    else:
        text.append("A trained-on reward that rises while held-out ones fall is over-optimisation.")
    table = _table(evaluation.groups, trained + others)
    table.columns[1:] = [_title(name, evaluation) for name in trained + others]
    png = plots.panels(evaluation.groups, {name: _title(name, evaluation) for name in trained + others})
    return [Section("Rewards of generated dialogs", text, table, plot=None if png is None else ("rewards.png", png))]


def _figures(evaluation: Evaluation, title: str, wanted: Sequence[str], text: str) -> Section | None:
    names = [name for name in wanted if _known(evaluation, name)]
    if not any(name in group.estimates for group in evaluation.groups for name in names):
        return None
    return Section(title, [text], _table(evaluation.groups, names), _missing(evaluation.groups, names))


def _trade_off(evaluation: Evaluation) -> Section | None:
    png = plots.trade_off(evaluation.groups)
    return None if png is None else Section("What the distance to the prior buys", plot=("kl_return.png", png))


def _critic(evaluation: Evaluation) -> Section | None:
    having = [group for group in evaluation.groups if "critic" in group.estimates]
    if not having:
        return None
    ways = [f"critic/{way}" for way in WAYS if any(f"critic/{way}" in group.estimates for group in having)]
    contexts = having[0].estimates["critic"].units
    pairs = int(having[0].runs[0].measures["critic"].denominator.sum())
    text = [
        f"Share of {pairs} pairs of logged replies to the same context ({contexts} contexts) whose better one gets the "
        "higher score; guessing gives 50 %. Better means more reward from the reply to the end of its dialog. The first column is the critic's own "
        "way to rank: mean Q over the reply's tokens, or mean log-probability where a method has no Q."
    ]
    table = _table(having, ["critic", *ways])
    chance = {"chance": Estimate(0.5, None, None, 0, 0)}
    png = plots.interval_plot(having, "critic", title="Pairs that the critic orders right", references=chance)
    return Section("Critic", text, table, plot=None if png is None else ("critic.png", png))


def _curves(evaluation: Evaluation) -> Section | None:
    png = plots.learning_curves(evaluation.folders)
    return None if png is None else Section("Learning curves", ["From each run's metrics.jsonl."], plot=("curves.png", png))


def _runs(evaluation: Evaluation) -> Section:
    names = [name for name in OVERVIEW if any(name in group.estimates for group in evaluation.groups)]
    rows = []
    for group in evaluation.groups:
        for run in group.runs:
            cells = [shown(_point(run, name), FIGURES[name]) for name in names]
            rows.append([group.label, run.run, run.method, *cells, run.directory])
    columns = ["policy", "run", "method", *(FIGURES[name].title for name in names), "checkpoint"]
    return Section("Runs", [], Table(columns, rows), _missing(evaluation.groups, ["beta"]))


def _point(run: RunResult, name: str) -> Estimate | None:
    measure = run.measures.get(name)
    return None if measure is None or measure.value != measure.value else Estimate(measure.value, None, None, 1, len(measure.numerator))


def _samples(evaluation: Evaluation) -> Section | None:
    same: dict[str, list[Group]] = {}
    for group in evaluation.groups:  # the best checkpoint is often the last one too
        same.setdefault(group.runs[0].directory, []).append(group)
    firsts = [(", ".join(group.label for group in groups), groups[0].runs[0]) for groups in same.values()]
    found = []
    for number in range(evaluation.samples):
        having = [(label, run.episodes[number]) for label, run in firsts if number < len(run.episodes)]
        if having:
            columns = [Column(f"{label}: return {episode.total:.2f}", _lines(episode.dialog)) for label, episode in having]
            found.append(Sample(f"Episode {having[0][1].index}", columns))
    for number in range(evaluation.samples):
        answers = [(label, run.answers[number]) for label, run in firsts if number < len(run.answers)]
        if answers:
            context = Column("context", _lines(answers[0][1].dialog)[:-1])
            log = Column("the log", [("assistant", answers[0][1].logged, "")])
            columns = [context, log, *(Column(label, _lines(answer.dialog)[-1:]) for label, answer in answers)]
            found.append(Sample(f"Held-out context {answers[0][1].context}", columns))
    return Section("Samples", ["The first run of each policy, the same conversation partners and contexts."], samples=found) if found else None


def _lines(dialog: Dialog) -> list[tuple[str, str, str]]:
    lines = []
    for message in dialog.messages:
        reward, vote = message.get("reward"), message.get("feedback", {}).get("vote")
        parts = ([f"{reward:+.2f}"] if reward is not None else []) + ([f"vote {vote:+d}"] if vote is not None else [])
        lines.append((message["role"], message["content"] or "", ", ".join(parts)))
    return lines


def _table(groups: Sequence[Group], names: Sequence[str], *, runs: bool = False) -> Table:
    columns = ["policy", *(["runs"] if runs else []), *(figure_of(name).title for name in names)]
    rows = [
        [group.label, *([str(len(group.runs))] if runs else []), *(shown(group.estimates.get(name), figure_of(name)) for name in names)]
        for group in groups
    ]
    return Table(columns, rows)


def _missing(groups: Sequence[Group], names: Sequence[str]) -> list[str]:
    """Why cells hold a dash, and what else to know about the figures."""
    notes: dict[str, list[str]] = {}
    for group in groups:
        for name in names:
            if text := group.note(name):
                labels = notes.setdefault(f"{figure_of(name).title if name in FIGURES else name}: {text}", [])
                labels.append(group.label)
    return [f"{text} ({', '.join(dict.fromkeys(labels))})" for text, labels in notes.items()]


def _known(evaluation: Evaluation, name: str) -> bool:
    """Measured for one of the groups at least, or missing for a reason."""
    return any(name in group.estimates or group.note(name) for group in evaluation.groups)


def _title(name: str, evaluation: Evaluation) -> str:
    figure: Figure = figure_of(name)
    if not name.startswith("reward/") or evaluation.trained is None:
        return figure.title
    return f"{'trained on' if figure.title in evaluation.trained else 'held out'}: {figure.title}"


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_report(evaluation: Evaluation, directory: Path) -> tuple[Path, Path]:
    """report.md with plots/*.png, and report.html."""
    found = sections(evaluation)
    (directory / "plots").mkdir(parents=True, exist_ok=True)
    for section in found:
        if section.plot:
            (directory / "plots" / section.plot[0]).write_bytes(section.plot[1])
    markdown, page = directory / "report.md", directory / "report.html"
    markdown.write_text(to_markdown(evaluation.title, found), encoding="utf-8")
    page.write_text(to_html(evaluation.title, found), encoding="utf-8")
    return markdown, page


def to_markdown(title: str, found: Sequence[Section]) -> str:
    """Markdown as GitHub renders it."""
    parts = [f"# {_md(title)}"]
    for section in found:
        parts.append(f"## {_md(section.title)}")
        parts += [_md(text) for text in section.text]
        if section.table:
            parts.append(_md_table(section.table))
        if section.notes:
            parts.append("\n".join(f"- {_md(note)}" for note in section.notes))
        if section.plot:
            parts.append(f"![{_md(section.title)}](plots/{section.plot[0]})")
        parts += [_md_sample(sample) for sample in section.samples]
    return "\n\n".join(parts) + "\n"


def _md_table(table: Table) -> str:
    lines = ["| " + " | ".join(map(_md, table.columns)) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join(lines + ["| " + " | ".join(map(_md, row)) + " |" for row in table.rows])


def _md_sample(sample: Sample) -> str:
    parts = [f"### {_md(sample.title)}"]
    for column in sample.columns:
        lines = [f"- **{role}**: {_md(text)}" + (f" ({note})" if note else "") for role, text, note in column.lines]
        parts.append(f"**{_md(column.title)}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _md(text: str) -> str:
    """One line of text that Markdown shows as it is."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    for mark in ("\\", "|", "*", "_", "`", "[", "]"):
        escaped = escaped.replace(mark, "\\" + mark)
    return escaped


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1180px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; border-bottom: 1px solid #ddd; padding-bottom: .3rem; } h3 { font-size: 1rem; }
p { max-width: 75ch; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #e4e4e4; text-align: right; vertical-align: top; white-space: nowrap; }
small { color: #57606a; }
th { border-bottom: 2px solid #999; white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
tbody tr:hover { background: #f5f7fa; } ul.notes { font-size: .86rem; color: #57606a; } img { max-width: 100%; height: auto; }
.sample { display: flex; gap: .8rem; overflow-x: auto; align-items: flex-start; padding-bottom: .5rem; }
.column { flex: 0 0 300px; border: 1px solid #ddd; border-radius: 8px; padding: .6rem; font-size: .86rem; }
.column h4 { margin: 0 0 .5rem; font-size: .86rem; } .line { margin: .3rem 0; padding: .3rem .55rem; border-radius: 8px; overflow-wrap: anywhere; }
.user, .system, .tool { background: #f1f2f4; margin-right: 1.6rem; } .assistant { background: #dfeafd; margin-left: 1.6rem; }
.note { color: #57606a; font-size: .78rem; white-space: nowrap; } .empty { color: #9a3412; font-style: italic; }
"""


def to_html(title: str, found: Sequence[Section]) -> str:
    """One file: styles and plots are inside."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in found:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
        if section.table:
            parts.append(_html_table(section.table))
        if section.notes:
            parts.append('<ul class="notes">' + "".join(f"<li>{html.escape(note)}</li>" for note in section.notes) + "</ul>")
        if section.plot:
            data = base64.b64encode(section.plot[1]).decode()
            parts.append(f'<p><img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}"></p>')
        parts += [_html_sample(sample) for sample in section.samples]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>\n" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _html_cell(cell: str) -> str:
    """An interval stands below its estimate, so that wide tables fit."""
    value, bracket, interval = html.escape(cell).partition(" [")
    return f"<td>{value}<br><small>[{interval}</small></td>" if bracket else f"<td>{value}</td>"


def _html_sample(sample: Sample) -> str:
    columns = "".join(f'<div class="column"><h4>{html.escape(c.title)}</h4>{"".join(map(_html_line, c.lines))}</div>' for c in sample.columns)
    return f'<h3>{html.escape(sample.title)}</h3><div class="sample">{columns}</div>'


def _html_line(line: tuple[str, str, str]) -> str:
    role, text, note = line
    said = html.escape(text) if text.strip() else '<span class="empty">(empty)</span>'
    return f'<div class="line {html.escape(role)}">{said}' + (f' <span class="note">{html.escape(note)}</span>' if note else "") + "</div>"


def write_replies(path: Path, groups: Sequence[Group]) -> int:
    """Every generated reply as one line of CSV; returns how many."""
    rewards = [f"reward:{name}" for name in groups[0].runs[0].rewards]
    columns = ["policy", "run", "checkpoint", "source", "context", "turn", "reply", "tokens", "finished", "reward", "return", "vote", *rewards]
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for group in groups:
            for run in group.runs:
                for row in _reply_rows(run):
                    writer.writerow({"policy": group.label, "run": run.run, "checkpoint": run.directory, **row})
                    count += 1
    return count


def _reply_rows(run: RunResult) -> Iterator[dict[str, Any]]:
    generated = [("env", e.dialog.id, e.dialog, e.replies, e.total) for e in run.episodes]
    generated += [("data", a.context, a.dialog, [a.reply], None) for a in run.answers]
    for number, (source, context, dialog, replies, total) in enumerate(generated):
        for turn, (i, reply) in enumerate(zip(dialog.replies, replies, strict=True)):
            message = dialog.messages[i]
            yield {
                "source": source,
                "context": context,
                "turn": turn,
                "reply": reply.text,
                "tokens": len(reply.tokens),
                "finished": int(reply.finished),
                "reward": message.get("reward"),
                "return": total,
                "vote": message.get("feedback", {}).get("vote"),
                **{f"reward:{name}": values[number][turn] for name, values in run.rewards.items()},
            }
