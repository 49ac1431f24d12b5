"""Return-conditioned cloning (decision transformer): tell the LM how well each reply turned out, then ask for
the best."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from rl_dialog.data.missing import unrated
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods.bc import BC

UNKNOWN = "<|return:unknown|>"
RETURN = r"<\|return:(?:\d+|unknown)\|>"


@dataclass(frozen=True)
class DT(BC):
    """Cloning behind a token that names the return; it is then asked for the best.

    Cross-entropy on replies behind a token that names their return: L = -mean log p(a | s, bin of the
    return).

    The bins are quantiles of the training split's returns, equal returns in one bin, or given by `edges`. The
    checkpoint's chat template writes the wanted bin before every reply, so whatever renders it (chat,
    evaluate, transformers' own pipelines) asks for that return. Replies of the data that are context only
    (weight 0) stand behind the wanted bin too, as they do when acting. A reply whose return is not known
    stands behind a token of its own: its language is learned, its worth is left open.
    """

    bins: int = 2
    """return bins, at most"""
    edges: tuple[float, ...] = ()
    """lower ends of all bins but the first, instead of quantiles; bins is then one more than edges"""
    want: int = -1
    """the bin to ask for when acting; -1 is the best one"""
    by: Literal["to_go", "reply"] = "to_go"
    """what a return is: the sum of the known rewards from this reply to its dialog's end, or this reply's
    own"""

    def extend_tokenizer(self, tokenizer: Any) -> Any:
        if self.bins < 2 or not -self.bins <= self.want < self.bins:
            raise UserError(
                f"dt: expected at least 2 bins and one of them to want, got bins {self.bins} and want "
                f"{self.want}"
            )
        if self.edges and (
            len(self.edges) != self.bins - 1 or any(low >= high for low, high in pairwise(self.edges))
        ):
            raise UserError(
                f"dt: expected {self.bins - 1} rising edges for {self.bins} bins, got {list(self.edges)}"
            )
        specials = {"additional_special_tokens": [*self._tokens, UNKNOWN]}
        tokenizer.add_special_tokens(specials, replace_extra_special_tokens=False)
        before, behind = _wish(self._tokens[self.want])
        template = tokenizer.chat_template
        template = template["default"] if isinstance(template, dict) else template  # of several by name
        tokenizer.chat_template = before + _plain(template) + behind
        return tokenizer

    def prepare(
        self, train: Sequence[Row], validation: Sequence[Row], tokenizer: Any
    ) -> tuple[list[Row], list[Row]]:
        """Both splits with a bin token before every reply. Raises UserError when known returns are equal,
        or none is in the wanted bin."""
        known = np.concatenate([self._returns(row) for row in train])
        edges, known = self._edges(known), known[~np.isnan(known)]
        ids = np.asarray(tokenizer.convert_tokens_to_ids(self._tokens), np.int32)
        # fewer bins than asked for (many equal returns): the best one keeps its name
        bin_of = np.array([*range(len(edges)), self.bins - 1])
        ids = ids[bin_of]
        filled = np.unique(bin_of[np.searchsorted(edges, known, side="right")])
        want = self.want % self.bins
        if want not in filled:  # nothing would be learned of the token behind which it then says everything
            raise UserError(
                f"dt: expected replies of the training split in bin {want} (--method.want), got those of "
                f"bins {filled.tolist()} (returns {known.min():g} to {known.max():g}, lower ends "
                f"{edges.tolist()}): want one of these, or change --method.bins or --method.edges"
            )
        header = self._header(tokenizer)
        returns = [i for token, i in tokenizer.get_vocab().items() if re.fullmatch(RETURN, token)]
        wanted_id, unknown = tokenizer.convert_tokens_to_ids([self._tokens[self.want], UNKNOWN])

        def labelled(row: Row) -> Row:
            row = _without(row, returns)
            starts = row.reply_starts
            unlearnt = np.setdiff1d(_behind(header, row.input_ids), starts)  # replies that are context only
            earned = self._returns(row)
            bins = np.where(np.isnan(earned), unknown, ids[np.searchsorted(edges, earned, side="right")])
            places, tokens = (
                np.concatenate([starts, unlearnt]),
                np.concatenate([bins, np.full(len(unlearnt), wanted_id)]).astype(np.int32),
            )
            rows = np.insert(row.input_ids, places, tokens), np.insert(row.assistant, places, False)

            def moved(old: np.ndarray) -> np.ndarray:
                return (old + np.searchsorted(np.sort(places), old, side="right")).astype(np.int32)

            taught = row.taught and replace(row.taught, places=moved(row.taught.places))
            changed = {"input_ids": rows[0], "assistant": rows[1], "reply_ends": moved(row.reply_ends)}
            return replace(row, **changed, taught=taught)

        return [labelled(row) for row in train], [labelled(row) for row in validation]

    def _edges(self, returns: np.ndarray) -> np.ndarray:
        """The lower ends of all bins but the first, for these returns of the training split."""
        finite = returns[~np.isnan(returns)]
        if not len(finite) or finite.min() == finite.max():
            problem = f"every reply has the return {finite[0]:g}" if len(finite) else "no reply has a return"
            raise UserError(f"dt: {problem}{unrated(returns)}: prepare with rewards that differ, or train bc")
        if self.edges:
            return np.asarray(self.edges, np.float32)  # as returns are
        edges = np.quantile(finite, np.arange(1, self.bins) / self.bins, method="higher")
        second = finite[finite > finite.min()].min()  # the lowest bin is never empty, however often it occurs
        return np.unique(np.maximum(edges, second))

    def _header(self, tokenizer: Any) -> np.ndarray:
        """What the template writes before a reply, without the wanted bin."""
        question = [{"role": "user", "content": "?"}]
        without, prompt = (
            tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=add)
            for add in (False, True)
        )
        return np.asarray(
            tokenizer.encode(
                prompt[len(without) :].removesuffix(self._tokens[self.want]), add_special_tokens=False
            ),
            np.int32,
        )

    @property
    def _tokens(self) -> list[str]:
        return [f"<|return:{i}|>" for i in range(self.bins)]

    def _returns(self, row: Row) -> np.ndarray:
        return row.rewards if self.by == "reply" else row.returns


def _wish(token: str) -> tuple[str, str]:
    """What stands before and behind a chat template so that it writes the token before every reply."""
    return (
        "{% set ns = namespace(m=[]) %}{% for x in messages %}{% set ns.m = ns.m + ([dict(x, content='"
        + token
        + "' ~ (x['content'] or ''))] if x['role'] == 'assistant' else [x]) %}"
        "{% endfor %}{% set messages = ns.m %}",
        "{% if add_generation_prompt %}" + token + "{% endif %}",
    )


def _plain(template: str) -> str:
    """Without the wish of an earlier dt, whose run this one goes on from."""
    for token in re.findall(RETURN, template):
        before, behind = _wish(token)
        if template.startswith(before) and template.endswith(behind):
            return _plain(template[len(before) : len(template) - len(behind)])
    return template


def _without(row: Row, tokens: Sequence[int]) -> Row:
    """The row without the returns that the template of an earlier dt wished for as it was rendered."""
    wished = np.flatnonzero(np.isin(row.input_ids, tokens) & ~row.assistant)
    if not len(wished):
        return row

    def moved(old: np.ndarray) -> np.ndarray:
        return (old - np.searchsorted(wished, old)).astype(np.int32)

    ids, assistant = np.delete(row.input_ids, wished), np.delete(row.assistant, wished)
    taught = row.taught and replace(row.taught, places=moved(row.taught.places))
    return replace(row, input_ids=ids, assistant=assistant, reply_ends=moved(row.reply_ends), taught=taught)


def _behind(header: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The positions in `ids` that follow an occurrence of `header`; none for an empty one, and not the end of
    `ids`."""
    if not 0 < len(header) < len(ids):
        return np.empty(0, np.int64)
    positions = np.flatnonzero(
        (np.lib.stride_tricks.sliding_window_view(ids, len(header)) == header).all(1)
    ) + len(header)
    return positions[positions < len(ids)]
