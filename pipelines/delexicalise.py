"""MultiWOZ's own dialogs in the form in which a language model meets the simulated world: notes from the
databases, placeholders for values, rewards.

    python -m pipelines.delexicalise --logs DIR/val.json.zip --world DIR --output_dir data/corpus
    python -m pipelines.prepare --logs data/corpus runs/logs --output_dir data/both

What becomes of a dialog is told in envs/multiwoz/corpus.py. Dialogs without annotations or without a goal are
counted and left out; records that cannot be read are counted and go to quarantine.jsonl.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from envs.multiwoz import Options, Simulator, load_world
from envs.multiwoz.corpus import delexicalised
from rl_dialog.data.labelled import located
from rl_dialog.data.readers import read_logs, write_quarantine
from rl_dialog.data.schema import write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.run import Output, claim_output, require, run


@dataclass(frozen=True)
class DelexicaliseConfig(Output):
    """Which corpus, and which world."""

    logs: tuple[str, ...] = ()
    """files and folders of MultiWOZ 2.0 or 2.1"""
    world: str = ""
    """the folder with MultiWOZ's files, whose databases the notes are about"""


def main(config: DelexicaliseConfig) -> dict[str, Any]:
    """Writes the dialogs; returns how many, and how many of them were successful.

    Raises UserError or OSError for what the user can fix.
    """
    require(config, logs="files or folders of MultiWOZ 2.0 or 2.1", world="the folder with MultiWOZ's files")
    simulator = Simulator(load_world(config.world), Options())
    logged, bad = read_logs(config.logs)
    bar = tqdm(logged, unit="dialog", disable=True if config.quiet else None)
    dialogs = [dialog for each in bar if (dialog := delexicalised(each, simulator, located)) is not None]
    if not dialogs:
        why = f"; the first of {len(bad)} records that cannot be read is {bad[0]}" if bad else ""
        raise UserError(f"expected dialogs with acts and goals, found none in {', '.join(config.logs)}{why}")
    out = claim_output(config, "delexicalise")
    write_quarantine(bad, out)
    write_jsonl(dialogs, out / "dialogs.jsonl")
    ends = Counter(dialog.meta["outcome"]["success"] for dialog in dialogs)
    counts = {"dialogs": len(dialogs), "left_out": len(logged) - len(dialogs), "quarantined": len(bad)}
    figures = {**counts, "success": round(ends[True] / len(dialogs), 4)}
    return {**figures, "replies": sum(len(dialog.replies) for dialog in dialogs), "output_dir": str(out)}


if __name__ == "__main__":
    run(DelexicaliseConfig, main)
