"""Where vectors of words come from, to compare texts by.

(nothing)    the built-in encoder's: a fixed random vector per word, so near are texts that share words
a file       text, one line per word with its numbers, as GloVe and fastText publish them (.gz too); a
             first line with two numbers, as word2vec writes it, is passed over. A word that it has with
             capitals only ("Bahnhof") is taken from there. Words that it lacks have none
a folder     the input embeddings of a transformers model, a vector for each of its tokens
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from rl_dialog.errors import UserError
from rl_dialog.rewards.scorers import hashed_words
from rl_dialog.rewards.words import words

FIRST = 3  # lines that are looked at even where none of their words is asked for
WordVectors = Callable[[list[str]], list[np.ndarray]]  # texts -> (words with a vector, H) of each


def word_vectors(path: str) -> WordVectors:
    """Those of a path. Raises UserError for a file that holds something else."""
    if not path:
        return lambda texts: [hashed_words(text) for text in texts]
    return _of_file(Path(path)) if Path(path).is_file() else _of_model(path)


def _of_file(path: Path) -> WordVectors:
    """Only the vectors of words that occur are kept: published files have millions."""
    known: dict[str, np.ndarray | None] = {}

    def vectors(texts: list[str]) -> list[np.ndarray]:
        said = [words(text) for text in texts]
        missing = {word for text in said for word in text} - known.keys()
        known.update(dict.fromkeys(missing))
        known.update(_read(path, missing))
        size = next((len(vector) for vector in known.values() if vector is not None), 0)
        found = [[known[word] for word in text if known[word] is not None] for text in said]
        return [np.stack(each) if each else np.zeros((0, size)) for each in found]

    _read(path, ())  # what is wrong with its first lines is told now
    return vectors


def _read(path: Path, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """The vectors of the `wanted` words that it has; the first lines are looked at in any case. Raises
    UserError for a file that cannot be read as text."""
    try:
        return _found(path, wanted)
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        expected = "expected text with a word and its numbers per line, plain or as a whole .gz file"
        raise UserError(f"{path}: {expected} (word2vec's .bin is none), got: {error}") from error


def _found(path: Path, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """wanted: lower-case words, as texts are cut into."""
    found: dict[str, np.ndarray] = {}
    capitals: dict[str, np.ndarray] = {}
    size = None
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if number > FIRST and not wanted:
                break
            word, _, rest = line.rstrip().partition(" ")
            if number == 1 and len(rest.split()) == 1:  # how many words, of how many numbers each
                continue
            size = len(rest.split()) if size is None else size
            if number > FIRST and word.lower() not in wanted:
                continue
            word, *numbers = line.rstrip().rsplit(" ", size)  # some published words have spaces inside
            try:
                vector = np.array(numbers, float)
            except ValueError:
                vector = np.empty(0)
            if not size or len(vector) != size:
                expected = f"a word and {size or 'its'} numbers, separated by spaces"
                raise UserError(f"{path}:{number}: expected {expected}, got {line[:60]!r}")
            if (lower := word.lower()) in wanted:
                (found if word == lower else capitals).setdefault(lower, vector)
    return capitals | found


def _of_model(path: str) -> WordVectors:
    from rl_dialog.models.checkpoint import resolve
    from rl_dialog.rewards.encoder import Encoder

    encoder = Encoder(resolve(path))
    table = encoder.model.get_input_embeddings().weight.detach().float().numpy()

    def vectors(texts: list[str]) -> list[np.ndarray]:
        return [table[encoder.tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]

    return vectors
