"""Language understanding for MultiWOZ's dialogs: words to dialogue acts, from annotated corpora, from
simulated dialogs, or from both.

    python -m pipelines.fit_nlu --output_dir models/nlu                             # the generated town
    python -m pipelines.fit_nlu --output_dir models/nlu --logs DIR/val.json.zip     # a corpus
    python -m pipelines.fit_nlu --output_dir models/nlu --logs DIR/val.json.zip --world DIR --simulated 1000
    python -m pipelines.fit_nlu --output_dir models/nlu --model_name_or_path bert-base-uncased

`converse --nlu models/nlu` lets simulated users and systems read with it. Precision, recall and F1 on
held-out dialogs, for both sides and each of their intents, go to metrics.json, records of the logs that
cannot be read to quarantine.jsonl. The model is described in rl_dialog/models/nlu.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from envs.multiwoz import load_world
from envs.multiwoz.acts import acts_of
from envs.multiwoz.lexical import PLACEHOLDER
from envs.multiwoz.varied import varied_dialogs
from rl_dialog.data.files import write_json
from rl_dialog.data.labelled import LabelledTurn, labelled_turns
from rl_dialog.data.readers import Bad, read_logs, write_quarantine
from rl_dialog.errors import UserError
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.nlu import load_nlu
from rl_dialog.run import Output, at_least, claim_output, require, run
from rl_dialog.training.fitting import fitting_bar
from rl_dialog.training.nlu import NluSettings, is_held_out, judge, labels_of, table, teach, untrained

SIMULATED_SEED = 1_000_003  # of simulated dialogs: not those that policies are judged on


@dataclass(frozen=True)
class FitNluConfig(NluSettings, Output):
    """What to learn from, and how."""

    logs: tuple[str, ...] = ()
    """files and folders with annotated dialogs: MultiWOZ 2.0 or 2.1, or what `simulate` and `converse`
    wrote"""
    world: str = ""
    """folder with MultiWOZ's files for the simulated dialogs; by default the generated town"""
    simulated: int | None = None
    """simulated dialogs to learn from; by default 1000 without logs, none with logs"""
    templates: Literal["manual", "auto_manual"] = "manual"
    """how simulated dialogs are worded. manual: a sentence for each act; auto_manual: one for all acts of a
    kind where the world has one"""


def main(config: FitNluConfig) -> dict[str, Any]:
    """Trains, judges and saves; returns headline figures.

    Raises UserError or OSError for what the user can fix.
    """
    require(config, output_dir="a folder to write to")
    _check(config)
    load_quietly()
    sources, bad = _sources(config)
    parts = {name: [turn for turn in turns if is_held_out(turn, config)] for name, turns in sources.items()}
    turns = [turn for each in sources.values() for turn in each if not is_held_out(turn, config)]
    labels = labels_of(
        turns, min_count=config.min_count, context=config.context, max_length=config.max_length
    )
    nlu = untrained(turns, labels, config)
    out = claim_output(config, "fit_nlu")
    training_began = time.perf_counter()
    with fitting_bar(quiet=config.quiet) as progress:
        teach(nlu, turns, config, progress=progress)
    seconds = round(time.perf_counter() - training_began, 1)
    nlu.save(out)
    write_quarantine(bad, out)
    nlu = load_nlu(out)  # what is judged is what was saved
    figures = {name: judge(nlu, part) for name, part in parts.items() if part}
    sizes = {"turns": len(turns), "tags": len(labels.tags), "acts": len(labels.acts)}
    sizes["parameters"] = sum(p.numel() for p in nlu.parameters())
    write_json(out / "metrics.json", {"sizes": sizes, "seconds": seconds, "held_out": figures})
    if not config.quiet:
        print(table(figures), flush=True)
    sides = [(name, side) for name in figures for side in ("user", "system") if side in figures[name]]
    headline = {f"{name}_{side}_f1": figures[name][side]["f1"] for name, side in sides}
    return {"output_dir": str(out), **headline, **sizes, "quarantined": len(bad), "seconds": seconds}


def _sources(config: FitNluConfig) -> tuple[dict[str, list[LabelledTurn]], list[Bad]]:
    """The turns of the logs and of simulated dialogs, and what could not be read."""
    logged, bad = read_logs(config.logs)
    sources = {"logs": logged} if config.logs else {}
    count = (0 if config.logs else 1000) if config.simulated is None else config.simulated
    if count:
        seed = SIMULATED_SEED + config.seed
        sources["simulated"] = varied_dialogs(
            load_world(config.world), count, templates=config.templates, seed=seed
        )
    turns = {
        name: list(labelled_turns(dialogs, acts_of, without=PLACEHOLDER)) for name, dialogs in sources.items()
    }
    if config.logs and not turns["logs"]:
        why = f"; the first of {len(bad)} records that cannot be read is {bad[0]}" if bad else ""
        what = "dialogs with acts (MultiWOZ's annotations, or what `simulate` wrote)"
        raise UserError(f"expected {what}, found none in {', '.join(config.logs)}{why}")
    return turns, bad


def _check(config: FitNluConfig) -> None:
    if config.simulated == 0 and not config.logs:
        raise UserError("expected something to learn from: --logs, or --simulated of at least 1")
    at_least(
        config, simulated=0, context=0, min_count=1, max_length=16, per_device_train_batch_size=1, seed=0
    )
    for name in ("learning_rate", "num_train_epochs"):
        if not getattr(config, name) > 0:
            raise UserError(f"expected --{name} above 0, got {getattr(config, name)}")
    if not 0 <= config.validation < 1:
        raise UserError(f"expected --validation of at least 0 and below 1, got {config.validation}")
    if config.hidden_size % 32:
        width = f"a multiple of 32 (the width of an attention head), got {config.hidden_size}"
        raise UserError(f"expected --hidden_size to be {width}")


if __name__ == "__main__":
    run(FitNluConfig, main)
