"""A conversation at a terminal, whoever answers: the lines that are typed, and how a sitting ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def typed_lines(prompt: str) -> Iterator[str]:
    """What the user types; a terminal gets line editing."""
    if not sys.stdin.isatty():
        yield from (as_typed(line, sys.stdin.encoding) for line in sys.stdin)
        return
    while True:
        try:
            yield as_typed(input(prompt), sys.stdin.encoding)
        except EOFError:
            print()
            return


def as_typed(text: str, encoding: str) -> str:
    """Text with bytes that its encoding does not have is UTF-8, or else Latin-1.

    Python reads such bytes as lone surrogates (PEP 383).
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        typed = text.encode(encoding, "surrogateescape")
        try:
            return typed.decode("utf-8")
        except UnicodeDecodeError:
            return typed.decode("latin-1")
    return text


@contextmanager
def saved_at_the_end(save: Callable[[], None]) -> Iterator[None]:
    """Saves the conversation however the block ends; Ctrl-C ends it like /quit, and so does all that
    `interrupted_once` (run.py) makes of it."""
    try:
        yield
    except KeyboardInterrupt:
        print(flush=True)
    finally:
        save()
