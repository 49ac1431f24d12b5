"""Large JSON arrays and objects, one element at a time.

The window over the text is decoded by json's C scanner, so reading is as fast as `json.loads` and memory is
that of one element. An event parser such as ijson gives up a file at its first `NaN` (Python's own json.dump
writes them) or invalid byte; here such an element is reported and the elements after it are still read.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import count
from typing import Any, BinaryIO, NamedTuple

from rl_dialog.data.formats.log_file import PIECE, SHOWN
from rl_dialog.errors import UserError

DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\r\n]*")
MARK = re.compile(r'["\[\]{},]')
IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]', re.DOTALL)


class JsonError(UserError):
    """The JSON text cannot be followed any further."""


class Item(NamedTuple):
    """One element: where it is, its value, how its text begins, and why it could not be decoded ("" if it
    could)."""

    path: tuple[str | int, ...]
    value: Any
    text: str
    problem: str


def json_items(stream: BinaryIO, depth: int, limit: int) -> Iterator[Item]:
    """The elements `depth` levels below the top: 0 is the whole text, and every object that follows it there;
    1 its elements, 2 their elements. One of more than `limit` characters is passed over and comes out with a
    problem."""
    window = _Window(stream, limit)
    yield from window.walk(depth, ())
    for number in count(1) if depth == 0 else ():  # JSON lines whose first one goes on behind a file's head
        if window.ahead() != "{":
            break
        yield window.item((number,))
    if window.ahead():
        raise JsonError(f"expected the end of the file after the closing bracket, got {window.excerpt()!r}")


class _Window:
    """The part of the text that is being looked at."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self.stream, self.limit = stream, limit
        self.decode = codecs.getincrementaldecoder("utf-8")(
            "surrogateescape"
        ).decode  # an invalid byte spoils its own element only
        self.text, self.at, self.ended = "", 0, False
        self.more()
        self.text = self.text.removeprefix("\ufeff")

    def more(self) -> None:
        """Drops what is behind, and at least doubles what is ahead: a long element is copied and retried a
        logarithmic number of times."""
        ahead = self.text[self.at :]
        pieces, room = [ahead], max(PIECE, len(ahead))
        while room > 0 and not self.ended:
            piece = self.stream.read1(PIECE)
            self.ended = not piece
            pieces.append(self.decode(piece, final=self.ended))
            room -= len(pieces[-1])
        self.text, self.at = "".join(pieces), 0

    def ahead(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            self.at = SPACE.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()

    def excerpt(self) -> str:
        return self.text[self.at : self.at + SHOWN]

    def walk(self, depth: int, path: tuple[str | int, ...]) -> Iterator[Item]:
        opening = self.ahead()
        if depth == 0 or opening not in ("[", "{"):
            yield self.item(path)
            return
        closing = {"[": "]", "{": "}"}[opening]
        self.at += 1
        for index in count():
            if self.ahead() == closing:
                break
            yield from self.walk(depth - 1, (*path, self.key() if opening == "{" else index))
            mark = self.ahead()
            if mark not in (",", closing):
                raise JsonError(
                    f"expected `,` or `{closing}` after element {index + 1}, got "
                    f"{self.excerpt() or 'the end of the file'!r}"
                )
            self.at += mark == ","
        self.at += 1

    def key(self) -> str:
        key = self.value()
        if not isinstance(key, str) or self.ahead() != ":":
            raise JsonError(f"expected a key and `:`, got {repr(key)[:SHOWN]}")
        self.at += 1
        return key

    def item(self, path: tuple[str | int, ...]) -> Item:
        text = self.excerpt()
        try:
            return Item(path, self.value(), text, "")
        except (ValueError, RecursionError) as error:
            problem = (
                f"expected valid JSON, got {error.msg if isinstance(error, json.JSONDecodeError) else error}"
            )
        if not self.skip():
            raise JsonError(
                "the text ends or breaks inside element "
                f"{path[-1] + 1 if path and isinstance(path[-1], int) else path}: {problem}"
            )
        return Item(path, None, text, problem)

    def value(self) -> Any:
        """Decodes what is ahead, reading on as long as it may only be cut off by the window's end."""
        if not self.ahead():
            raise JsonError("the end of the file")
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16
                if self.ended or not cut:
                    raise
            if len(self.text) - self.at > self.limit:
                raise JsonError(f"an element longer than {self.limit} characters")
            self.more()

    def skip(self) -> bool:
        """Passes a value that cannot be decoded by matching brackets outside strings; False where the file
        ends first."""
        depth = 0
        while True:
            match = MARK.search(self.text, self.at)
            if match is None:
                self.at = len(self.text)
                if self.ended:
                    return False
                self.more()
                continue
            mark = match[0]
            if depth == 0 and mark in ",]}":
                self.at = match.start()
                return True
            self.at = match.end()
            if mark == '"' and not self.skip_string():
                return False
            depth += (mark in "[{") - (mark in "]}")
            if depth == 0 and mark in "]}":
                return True

    def skip_string(self) -> bool:
        while True:
            self.at = IN_STRING.match(self.text, self.at).end()
            if self.text.startswith('"', self.at):
                self.at += 1
                return True
            if self.ended:
                return False
            self.more()


def beginning(text: str) -> Any:
    """The value that a JSON text begins with, as far as the text goes or is valid: what is open there is
    closed. None where it is not JSON."""
    text = text.lstrip("\ufeff \t\r\n")
    open_brackets: list[str] = []
    valid_end, closers = 0, ""
    for match in TOKEN.finditer(text):
        mark = match[0]
        if mark in ("[", "{"):
            open_brackets.append("]" if mark == "[" else "}")
            valid_end, closers = match.end(), "".join(reversed(open_brackets))
        elif mark in ("]", "}"):
            if not open_brackets or open_brackets.pop() != mark:
                break
            if not open_brackets:
                valid_end, closers = match.end(), ""
                break
        elif mark == "," and open_brackets:
            valid_end, closers = match.start(), "".join(reversed(open_brackets))
    try:
        return json.loads(text[:valid_end] + closers)
    except json.JSONDecodeError as error:
        return beginning(text[: error.pos]) if 0 < error.pos < valid_end else None
    except (ValueError, RecursionError):
        return None
