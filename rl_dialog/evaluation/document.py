"""A report as a list of sections, and how it is written: Markdown with its plots beside it, and one HTML file
that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table as ShownTable


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
    checkpoint: str = ""  # whose side it is, where somebody may ask


@dataclass
class Sample:
    """The same conversation partner, or the same context, met by several policies."""

    title: str
    columns: list[Column]
    folded: bool = False  # on the page a click opens it


@dataclass
class Section:
    """A heading and what stands below it, in this order."""

    title: str
    text: list[str] = field(default_factory=list)
    table: Table | None = None
    notes: list[str] = field(default_factory=list)
    plot: tuple[str, bytes] | None = None  # file name, PNG
    samples: list[Sample] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # what to type, below the text
    markup: str = ""  # HTML that its maker has escaped; on the page only


def write_document(
    title: str, sections: Sequence[Section], directory: Path, *, name: str = "report"
) -> tuple[Path, Path]:
    """report.md (or another name) with plots/*.png, and report.html."""
    (directory / "plots").mkdir(parents=True, exist_ok=True)
    for section in sections:
        if section.plot:
            (directory / "plots" / section.plot[0]).write_bytes(section.plot[1])
    markdown, page = directory / f"{name}.md", directory / f"{name}.html"
    markdown.write_text(to_markdown(title, sections), encoding="utf-8")
    page.write_text(to_html(title, sections), encoding="utf-8")
    return markdown, page


def terminal() -> Console:
    """Where tables are shown: as wide as the terminal, or 150 characters in a file."""
    return Console(highlight=False, width=None if Console().is_terminal else 150)


def print_tables(
    sections: Sequence[Section],
    titles: Collection[str],
    *,
    wrapped: Collection[str] = (),
    notes: bool = False,
) -> None:
    """The tables of the sections with these titles; where `wrapped`, an interval has a line of its own."""
    console = terminal()
    for section in sections:
        if section.table and section.table.rows and section.title in titles:
            table = ShownTable(*section.table.columns, title=section.title)
            for row in section.table.rows:
                table.add_row(
                    *(cell.replace(" [", "\n[") if section.title in wrapped else cell for cell in row)
                )
            console.print(table, markup=False)
        for note in section.notes if notes else ():
            console.print(f"- {note}", markup=False)


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Markdown as GitHub renders it."""
    parts = [f"# {_md(title)}"]
    for section in sections:
        parts.append(f"## {_md(section.title)}")
        parts += [_md(text) for text in section.text]
        if section.commands:
            parts.append("\n".join(["```bash", *section.commands, "```"]))
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
        lines = [
            f"- **{role}**: {_md(text)}" + (f" ({note})" if note else "") for role, text, note in column.lines
        ]
        parts.append(f"**{_md(column.title)}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _md(text: str) -> str:
    """One line of text that Markdown shows as it is."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    for mark in ("\\", "|", "*", "_", "`", "[", "]"):
        escaped = escaped.replace(mark, "\\" + mark)
    return escaped


WIDE = 60  # characters of a cell whose column is text
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1180px; margin: 2rem auto; \
padding: 0 1.2rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; border-bottom: 1px solid #ddd; \
padding-bottom: .3rem; } h3 { font-size: 1rem; }
p { max-width: 75ch; } \
pre { background: #f5f7fa; padding: .6rem .8rem; border-radius: 8px; font-size: .86rem; overflow-x: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #e4e4e4; text-align: right; vertical-align: top; \
white-space: nowrap; }
small { color: #57606a; }
th { border-bottom: 2px solid #999; white-space: normal; vertical-align: bottom; } \
th:first-child, td:first-child { text-align: left; }
tbody tr:hover { background: #f5f7fa; } ul.notes { font-size: .86rem; color: #57606a; } \
img { max-width: 100%; height: auto; }
.sample { display: flex; gap: .8rem; overflow-x: auto; align-items: flex-start; padding-bottom: .5rem; }
summary { font-weight: 600; margin: .6rem 0; cursor: pointer; overflow-wrap: anywhere; }
.column { flex: 0 0 300px; border: 1px solid #ddd; border-radius: 8px; padding: .6rem; font-size: .86rem; }
.column h4 { margin: 0 0 .5rem; font-size: .86rem; } \
.line { margin: .3rem 0; padding: .3rem .55rem; border-radius: 8px; overflow-wrap: anywhere; }
.user, .system, .tool { background: #f1f2f4; margin-right: 1.6rem; } \
.assistant { background: #dfeafd; margin-left: 1.6rem; }
.note { color: #57606a; font-size: .78rem; }
th.text, td.text { text-align: left; white-space: normal; min-width: 22rem; } \
.empty { color: #9a3412; font-style: italic; }
"""


def to_html(title: str, sections: Sequence[Section]) -> str:
    """One file: styles and plots are inside."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
        if section.commands:
            parts.append(f"<pre>{html.escape(chr(10).join(section.commands))}</pre>")
        if section.table:
            parts.append(_html_table(section.table))
        if section.notes:
            parts.append(
                '<ul class="notes">'
                + "".join(f"<li>{html.escape(note)}</li>" for note in section.notes)
                + "</ul>"
            )
        if section.plot:
            data = base64.b64encode(section.plot[1]).decode()
            parts.append(
                f'<div><img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}"></div>'
            )
        parts += [_html_sample(sample) for sample in section.samples]
        parts += [section.markup] if section.markup else []
    head = (
        '<meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _html_table(table: Table) -> str:
    texts = (i and any(len(row[i]) > WIDE for row in table.rows) for i in range(len(table.columns)))
    kinds = [' class="text"' if text else "" for text in texts]
    head = "".join(
        f"<th{kind}>{html.escape(column)}</th>" for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = "".join("<tr>" + "".join(map(_html_cell, row, kinds)) + "</tr>\n" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _html_cell(cell: str, kind: str) -> str:
    """An interval stands below its estimate, so that wide tables fit."""
    value, bracket, interval = html.escape(cell).partition(" [")
    return (
        f"<td{kind}>{value}<br><small>[{interval}</small></td>"
        if bracket and not kind
        else f"<td{kind}>{html.escape(cell)}</td>"
    )


def _html_sample(sample: Sample) -> str:
    columns = "".join(
        f'<div class="column"><h4>{html.escape(c.title)}</h4>{"".join(map(_html_line, c.lines))}</div>'
        for c in sample.columns
    )
    if sample.folded:
        return (
            f"<details><summary>{html.escape(sample.title)}</summary><div"
            f' class="sample">{columns}</div></details>'
        )
    return f'<h3>{html.escape(sample.title)}</h3><div class="sample">{columns}</div>'


def _html_line(line: tuple[str, str, str]) -> str:
    role, text, note = line
    escaped_text = html.escape(text) if text.strip() else '<span class="empty">(empty)</span>'
    return (
        f'<div class="line {html.escape(role)}">{escaped_text}'
        + (f' <span class="note">{html.escape(note)}</span>' if note else "")
        + "</div>"
    )
