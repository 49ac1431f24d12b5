"""Language understanding for MultiWOZ's dialogs: words to dialogue acts, from annotated corpora, from simulated dialogs, or from both.

    python -m pipelines.fit_nlu --output_dir models/nlu                                                          the generated town, template words
    python -m pipelines.fit_nlu --output_dir models/nlu --world DIR --logs DIR/val.json.zip --simulated 1000     MultiWOZ's files and a corpus
    python -m pipelines.fit_nlu --output_dir models/nlu --logs DIR/val.json.zip --model_name_or_path bert-base-uncased      a pretrained encoder

`converse --nlu models/nlu` lets simulated users and systems read with it. Precision, recall and F1 on held-out dialogs, for both sides and each of
their intents, go to metrics.json, records of the logs that cannot be read to quarantine.jsonl. The model is described in rl_dialog/models/nlu.py.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from envs.multiwoz import Options, RulePolicy, Simulator, load_world
from envs.multiwoz.acts import Act, ActError, checked, from_corpus
from envs.multiwoz.agents import Session, SystemAgent, UserAgent
from envs.multiwoz.agents import played as as_played
from envs.multiwoz.channel import Channel
from envs.multiwoz.lexical import PLACEHOLDER
from envs.multiwoz.rollout import dialog_record
from envs.multiwoz.templates import Speaker
from envs.multiwoz.world import World
from rl_dialog.data.files import write_json
from rl_dialog.data.labelled import LabelledTurn
from rl_dialog.data.readers import Bad, find_logs, read_log
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.models.nlu import load_nlu, new_nlu
from rl_dialog.run import Output, claim_output, run
from rl_dialog.training.nlu import fit, judge, labels_of

SIDE = {"user": "user", "assistant": "system"}
NOISE = 0.3  # of every other simulated dialog, on both sides' acts: so that more is said than the rule policy and a content user say
SIMULATED_SEED = 1_000_003  # of simulated dialogs: not those that policies are judged on


@dataclass(frozen=True)
class FitNluConfig(Output):
    """What to learn from, and how."""

    logs: tuple[str, ...] = ()
    """files and folders with annotated dialogs: MultiWOZ 2.0 or 2.1, or what `simulate` and `converse` wrote"""
    world: str = ""
    """folder with MultiWOZ's files for the simulated dialogs; by default the generated town"""
    simulated: int | None = None
    """simulated dialogs to learn from; by default 1000 without logs, none with logs"""
    templates: Literal["manual", "auto_manual"] = "manual"
    """how simulated dialogs are worded. manual: a sentence for each act; auto_manual: one for all acts of a kind where the world has one"""
    model_name_or_path: str = ""
    """a pretrained encoder, a folder or a hub name; by default a small one is trained from nothing"""
    hidden_size: int = 64
    """without --model_name_or_path: its width"""
    num_hidden_layers: int = 2
    """without --model_name_or_path: its layers"""
    vocab_size: int = 4096
    """without --model_name_or_path: size of the tokenizer"""
    context: int = 1
    """how many turns before the text are read with it; 0 for none"""
    max_length: int = 128
    """tokens of context and text"""
    min_count: int = 3
    """acts that occur less often are not learned"""
    learning_rate: float = 1e-2
    """at its highest, after a tenth of the steps; 3e-5 is usual with --model_name_or_path"""
    per_device_train_batch_size: int = 32
    """turns of a step"""
    num_train_epochs: float = 10.0
    """how often every turn is seen"""
    weight_decay: float = 0.01
    """of all matrices"""
    validation: float = 0.1
    """share of the dialogs that are held out to judge by"""
    seed: int = 0
    """the new weights, the order of the turns, the held-out dialogs"""


def main(config: FitNluConfig) -> dict[str, Any]:
    """Trains, judges and saves; returns headline figures. Raises UserError or OSError for what the user can fix."""
    _check(config)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    dialogs, bad = read_logs(config.logs)
    sources = {"logs": logged_turns(dialogs)} if config.logs else {}
    if config.logs and not sources["logs"]:
        why = f"; the first of {len(bad)} records that cannot be read is {bad[0]}" if bad else ""
        raise UserError(f"expected dialogs with acts (MultiWOZ's annotations, or what `simulate` wrote), found none in {', '.join(config.logs)}{why}")
    count = (0 if config.logs else 1000) if config.simulated is None else config.simulated
    if count:
        sources["simulated"] = list(simulated_turns(load_world(config.world), count, templates=config.templates, seed=SIMULATED_SEED + config.seed))
    held_out = {name: [turn for turn in turns if _held_out(turn.dialog, config)] for name, turns in sources.items()}
    turns = [turn for each in sources.values() for turn in each if not _held_out(turn.dialog, config)]
    out = claim_output(config, "fit_nlu")
    labels = labels_of(turns, min_count=config.min_count, context=config.context, max_length=config.max_length)
    torch.manual_seed(config.seed)
    shape = {name: getattr(config, name) for name in ("model_name_or_path", "hidden_size", "num_hidden_layers", "vocab_size")}
    nlu = new_nlu(turns, labels, **shape)
    began = time.perf_counter()
    with tqdm(unit="step", disable=True if config.quiet else None) as bar:
        fit(nlu, turns, **_settings(config), progress=lambda step, steps, loss: _show(bar, step, steps, loss))
    seconds = time.perf_counter() - began
    nlu.save(out)
    write_quarantine(bad, out)
    nlu = load_nlu(out)  # what is judged is what was saved
    figures = {name: judge(nlu, part) for name, part in held_out.items() if part}
    sizes = {"turns": len(turns), "tags": len(labels.tags), "acts": len(labels.acts), "parameters": sum(p.numel() for p in nlu.parameters())}
    write_json(out / "metrics.json", {"sizes": sizes, "seconds": round(seconds, 1), "held_out": figures})
    if not config.quiet:
        print(table(figures), flush=True)
    headline = {f"{name}_{side}_f1": figures[name][side]["f1"] for name in figures for side in ("user", "system") if side in figures[name]}
    return {"output_dir": config.output_dir, **headline, **sizes, "quarantined": len(bad), "seconds": round(seconds, 1)}


def read_logs(paths: Iterable[str | Path]) -> tuple[list[Dialog], list[Bad]]:
    """The dialogs of logs, and what could not be read. Raises UserError for paths where there is nothing."""
    logs, bad, _ = find_logs([str(path) for path in paths])
    items = [item for log in logs for item in read_log(log)]
    return [item for item in items if isinstance(item, Dialog)], [*bad, *(item for item in items if isinstance(item, Bad))]


def write_quarantine(bad: Sequence[Bad], out: Path) -> None:
    """What could not be read, one record per line, in quarantine.jsonl; an earlier one there is replaced."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "quarantine.jsonl").write_text("".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in bad), encoding="utf-8")


def logged_turns(dialogs: Iterable[Dialog]) -> list[LabelledTurn]:
    """The annotated turns of dialogs."""
    return [turn for dialog in dialogs for turn in turns_of(dialog)]


def turns_of(dialog: Dialog) -> Iterator[LabelledTurn]:
    """The turns of a dialog that have acts, with what was said before each. Turns with placeholders for values are left out."""
    said: list[str] = []
    for message in dialog.messages:
        text = message["content"] or ""
        if message["role"] not in SIDE:
            continue
        acts = acts_of(message)
        if acts is not None and not PLACEHOLDER.search(text):
            yield LabelledTurn(text, SIDE[message["role"]], tuple(said), acts, dialog.id)
        said.append(text)


def acts_of(message: dict[str, Any]) -> tuple[Act, ...] | None:
    """The acts of a message; None where it has no annotation. Acts that the ontology does not know are left out."""
    if "acts" in message:
        acts = [tuple(act) for act in message["acts"]]
    elif "dialogue_acts" in message.get("annotations", {}):
        acts = from_corpus(message["annotations"]["dialogue_acts"])
    else:
        return None
    found = []
    for act in acts:
        try:
            found += checked([act], side=SIDE[message["role"]])
        except ActError:
            continue
    return tuple(found)


def simulated_turns(world: World, count: int, *, templates: str, seed: int) -> Iterator[LabelledTurn]:
    """Turns of the rule policy with simulated users, worded by templates."""
    groups = world.group_templates if templates == "auto_manual" else {"user": {}, "system": {}}
    speakers = {side: Speaker(world.templates[side], side=side, groups=groups[side]) for side in ("user", "system")}
    mistakes = Channel(world.system_acts, world.values, NOISE)
    for number in range(count):
        simulator = Simulator(world, Options(noise=NOISE * (number % 2)))
        rule = RulePolicy(world.database, simulator.options).respond
        policy = rule if number % 2 == 0 else lambda state, rng, rule=rule: mistakes.passed(rule(state, rng), rng)
        session = Session(UserAgent(simulator), SystemAgent(simulator, policy))
        (meeting,) = session.play([(seed, 0, 0, number)])
        yield from turns_of(Dialog.from_record(dialog_record(as_played(meeting, simulator, number), speakers)))


def table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """The figures, one line for each source, side and intent."""
    rows = [f"{'held out':<12}{'of':<22}{'precision':>10}{'recall':>8}{'F1':>8}{'acts':>8}"]
    for source, found in figures.items():
        rows += [f"{source:<12}{name:<22}{x['precision']:>10.3f}{x['recall']:>8.3f}{x['f1']:>8.3f}{x['acts']:>8}" for name, x in found.items()]
    return "\n".join(rows)


def _held_out(dialog: str, config: FitNluConfig) -> bool:
    digest = hashlib.sha256(f"{config.seed}\0{dialog}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < config.validation


def _settings(config: FitNluConfig) -> dict[str, Any]:
    return {
        "learning_rate": config.learning_rate,
        "batch_size": config.per_device_train_batch_size,
        "epochs": config.num_train_epochs,
        "weight_decay": config.weight_decay,
        "seed": config.seed,
    }


def _show(bar: tqdm, step: int, steps: int, loss: float) -> None:
    bar.total = steps
    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    bar.update(step - bar.n)


def _check(config: FitNluConfig) -> None:
    if config.simulated == 0 and not config.logs:
        raise UserError("expected something to learn from: --logs, or --simulated of at least 1")
    for name, least in (("simulated", 0), ("context", 0), ("min_count", 1), ("max_length", 16), ("per_device_train_batch_size", 1), ("seed", 0)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"expected --{name} of at least {least}, got {value}")
    for name in ("learning_rate", "num_train_epochs"):
        if not getattr(config, name) > 0:
            raise UserError(f"expected --{name} above 0, got {getattr(config, name)}")
    if not 0 <= config.validation < 1:
        raise UserError(f"expected --validation of at least 0 and below 1, got {config.validation}")
    if config.hidden_size % 32:
        raise UserError(f"expected --hidden_size to be a multiple of 32 (the width of an attention head), got {config.hidden_size}")


if __name__ == "__main__":
    run(FitNluConfig, main)
