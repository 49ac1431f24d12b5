"""Conversations token by token, as a page: what was read, what was drawn, how likely it was, and what the
policy is told about it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_dialog.data.tokenize import Row

STYLE = """
body { font: 15px/1.9 system-ui, sans-serif; color: #1f2328; max-width: 1000px; margin: 2rem auto; \
padding: 0 1.2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; } p { max-width: 75ch; }
.row { border: 1px solid #ddd; border-radius: 8px; padding: .5rem .8rem; margin: .5rem 0; \
overflow-wrap: anywhere; white-space: pre-wrap; }
.read { color: #6e7781; } .drawn { border-radius: 3px; border-bottom: 2px solid #8c959f; }
.unlikely { border-bottom-color: #cf222e; }
"""
UNLIKELY = 0.05  # a probability below which a token is underlined in red


@dataclass(frozen=True)
class TokenRow:
    """A row of an episode; arrays have a number for each of the n tokens that were drawn."""

    row: Row
    logp: np.ndarray  # of the policy that drew, after temperature, top-k and top-p
    prior_logp: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class TokenEpisode:
    """An episode, its title and its rows."""

    title: str
    rows: Sequence[TokenRow]


def token_page(title: str, episodes: Sequence[TokenEpisode], tokenizer: Any) -> str:
    """One HTML file. Green tokens are made likelier (their advantage is positive), red ones less likely, the
    stronger the colour the more; grey ones were read and are not learned from."""
    most = max(
        (float(np.abs(row.advantages * row.weights).max(initial=0)) for e in episodes for row in e.rows),
        default=0.0,
    )
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        "<p>Grey was read and is not learned from. Of what was drawn, green is made likelier and red less "
        "likely; a red line marks what was drawn although its probability was below "
        f"{UNLIKELY:g}. Rest on a token to read its numbers.</p>",
    ]
    for episode in episodes:
        parts.append(f"<h2>{html.escape(episode.title)}</h2>")
        parts += [f'<div class="row">{_row(row, most, tokenizer)}</div>' for row in episode.rows]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _row(row: TokenRow, most: float, tokenizer: Any) -> str:
    spans, n = [], 0
    for token, drawn in zip(row.row.input_ids.tolist(), row.row.assistant.tolist(), strict=True):
        text = html.escape(tokenizer.decode([token]))
        if not drawn:
            spans.append(f'<span class="read">{text}</span>')
            continue
        spans.append(_drawn(text, row, n, most))
        n += 1
    return "".join(spans)


def _drawn(text: str, row: TokenRow, n: int, most: float) -> str:
    p, prior = np.exp(float(row.logp[n])), np.exp(float(row.prior_logp[n]))
    advantage, weight = float(row.advantages[n]), float(row.weights[n])
    share = abs(advantage * weight) / most if most else 0.0
    colour = "46,160,67" if advantage > 0 else "207,34,46"
    numbers = f"p {p:.3g}, prior {prior:.3g}, advantage {advantage:+.3g}, weight {weight:.3g}"
    kind = "drawn unlikely" if p < UNLIKELY else "drawn"
    return (
        f'<span class="{kind}" style="background:rgba({colour},{0.6 * share:.2f})" title="{numbers}">{text}'
        "</span>"
    )
