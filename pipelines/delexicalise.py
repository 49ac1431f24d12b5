"""MultiWOZ's own dialogs in the form in which a language model meets the simulated world: notes from the databases, placeholders for values, rewards.

    python -m pipelines.delexicalise --logs DIR/val.json.zip --world DIR --output_dir data/corpus
    python -m pipelines.prepare --logs data/corpus runs/logs --output_dir data/both

A reply's annotated values become placeholders, `[hotel_name] is in the [hotel_area]`; before it stands what the tracker makes of the user's annotated
acts. Nobody rated these dialogs: a reply earns -1, and the last one +80 when by the annotations every slot that the goal asks for was told and every
booking got a reference, else -40. Dialogs without annotations or without a goal are counted and left out; records that cannot be read are counted
and go to quarantine.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from envs.multiwoz import Options, Simulator, load_world
from envs.multiwoz.acts import GOAL_DOMAIN, GOAL_SLOT, Acts
from envs.multiwoz.environment import FAILURE, SUCCESS, TURN
from envs.multiwoz.lexical import PLACES, note, placeholder
from envs.multiwoz.tracker import DialogState
from pipelines.fit_nlu import acts_of, read_logs, write_quarantine
from rl_dialog.data.labelled import located
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.run import Output, claim_output, require, run


@dataclass(frozen=True)
class DelexicaliseConfig(Output):
    logs: tuple[str, ...] = ()
    """files and folders of MultiWOZ 2.0 or 2.1"""
    world: str = ""
    """folder with MultiWOZ's files, whose databases the notes are about"""


def main(config: DelexicaliseConfig) -> dict[str, Any]:
    """Writes the dialogs; returns how many, and how many of them were successful. Raises UserError or OSError for what the user can fix."""
    require(config, logs="files or folders of MultiWOZ 2.0 or 2.1", world="the folder with MultiWOZ's files")
    simulator = Simulator(load_world(config.world), Options())
    given, bad = read_logs(config.logs)
    found = [delexicalised(dialog, simulator) for dialog in tqdm(given, unit="dialog", disable=True if config.quiet else None)]
    dialogs = [dialog for dialog in found if dialog is not None]
    if not dialogs:
        why = f"; the first of {len(bad)} records that cannot be read is {bad[0]}" if bad else ""
        raise UserError(f"expected dialogs with acts and goals, found none in {', '.join(config.logs)}{why}")
    out = claim_output(config, "delexicalise")
    write_quarantine(bad, out)
    write_jsonl(dialogs, out / "dialogs.jsonl")
    ends = Counter(dialog.meta["outcome"]["success"] for dialog in dialogs)
    counts = {"dialogs": len(dialogs), "left_out": len(found) - len(dialogs), "quarantined": len(bad)}
    figures = {**counts, "success": round(ends[True] / len(dialogs), 4)}
    return {**figures, "replies": sum(len(dialog.replies) for dialog in dialogs), "output_dir": str(out / "dialogs.jsonl")}


def delexicalised(dialog: Dialog, simulator: Simulator) -> Dialog | None:
    """A corpus dialog as a text model would have met it; None for one without annotations or goal."""
    turns = [(message["role"], message["content"] or "", acts_of(message)) for message in dialog.messages]
    wanted = {domain: parts for domain, parts in (dialog.goal or {}).items() if domain in GOAL_DOMAIN.values() and parts}
    if not wanted or all(acts is None for _, _, acts in turns):
        return None
    state, told = simulator.tracker.start(), set()
    messages: list[dict[str, Any]] = []
    for role, text, acts in turns:
        if role == "user":
            simulator.tracker.user_said(state, acts or ())
            messages += [{"role": "user", "content": text}, {"role": "system", "content": note(state, simulator.world.database)}]
            continue
        told |= slots_told(acts or (), state)
        simulator.tracker.system_said(state, acts or ())
        messages.append({"role": "assistant", "content": with_placeholders(text, acts or ()), "reward": TURN})
    success = accomplished(wanted, told)
    replies = [message for message in messages if message["role"] == "assistant"]
    if not replies:
        return None
    replies[-1]["reward"] = SUCCESS if success else FAILURE
    meta = {"outcome": {"success": success}}
    return Dialog(dialog.id, messages, source=dialog.source, split=dialog.split, goal=wanted, meta=meta)


def with_placeholders(text: str, acts: Acts) -> str:
    """The text with placeholders where the acts' values stand, numbered in the order of their places; an address in two parts is one."""
    spans, _ = located(text, [act for act in acts if f"{act[1]}_{act[2]}".lower() in PLACES])
    counts: Counter[tuple[str, str]] = Counter()
    parts, done = [], 0
    for start, end, (_, domain, slot) in spans:
        if not (slot == "Addr" and counts[domain, slot] and not text[done:start].strip(" ,")):
            counts[domain, slot] += 1
            parts += [text[done:start], placeholder(domain, slot, min(counts[domain, slot], 9))]
        done = end
    return "".join([*parts, text[done:]])


def slots_told(acts: Acts, state: DialogState) -> set[tuple[str, str]]:
    """(goal domain, goal slot) of what a turn tells; `Ref` is a booking."""
    return {
        (state.domain if domain == "Booking" else GOAL_DOMAIN[domain], GOAL_SLOT[domain].get(slot, slot))
        for intent, domain, slot, _ in acts
        if domain != "general" and intent != "Request"
    }


def accomplished(goal: Mapping[str, Any], told: set[tuple[str, str]]) -> bool:
    """Was everything told that the goal asks for, and everything booked?"""
    for domain, parts in goal.items():
        wanted = [*parts.get("reqt", ()), *(["Ref"] if parts.get("book") else [])]
        if any((domain, slot) not in told for slot in wanted):
            return False
    return True


if __name__ == "__main__":
    run(DelexicaliseConfig, main)
