"""A reader of your own: a function from an open text file to dialogs as plain dicts, one for each
conversation of the file.

    python -m pipelines.prepare --logs scripts/ --output_dir data/scripts
        --reader rl_dialog.data.formats.example:read

It reads scripts such as

    ANN: Is the museum open?
    BOT: Until six.
    ---

A copy of this file, say `my_reader.py` in the folder where the command starts, is `--reader my_reader:read`.
Files may be gzipped or in a zip. A record that is no dialog goes to quarantine with its number and the
reason; an exception ends the file there, and what came before is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO


def read(file: TextIO) -> Iterator[dict[str, Any]]:
    """The conversations between lines of three dashes."""
    for script in file.read().split("\n---"):
        turns = [line.partition(": ") for line in script.splitlines() if ": " in line]
        if turns:
            yield {
                "messages": [
                    {"role": "assistant" if who == "BOT" else "user", "content": text}
                    for who, _, text in turns
                ]
            }
