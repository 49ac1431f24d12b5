"""People's dialogs as a language model would have met them in the simulated world: notes from the databases,
placeholders for values, rewards.

A reply's annotated values become placeholders, `[hotel_name] is in the [hotel_area]`; before it stands what
the tracker makes of the user's annotated acts. Nobody rated these dialogs: a reply earns -1, and the last one
+80 when by the annotations every slot that the goal asks for was told and every booking got a reference, else
-40.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from envs.multiwoz.acts import GOAL_DOMAIN, GOAL_SLOT, Acts, acts_of
from envs.multiwoz.environment import FAILURE, SUCCESS, TURN, Simulator
from envs.multiwoz.lexical import PLACES, note, placeholder
from envs.multiwoz.tracker import DialogState
from rl_dialog.data.schema import Dialog

# A text and acts -> (start, end, (intent, domain, slot)) of each value in the text, in order; other acts.
Locate = Callable[
    [str, list[tuple[str, str, str, str]]], tuple[list[tuple[int, int, tuple[str, str, str]]], Any]
]


def delexicalised(dialog: Dialog, simulator: Simulator, locate: Locate) -> Dialog | None:
    """A corpus dialog as a text model would have met it; None for one without annotations or goal.

    `locate` finds the acts' values in a text: rl_dialog.data.labelled.located.
    """
    turns = [(message["role"], message["content"] or "", acts_of(message)) for message in dialog.messages]
    goal = {
        domain: parts
        for domain, parts in (dialog.goal or {}).items()
        if domain in GOAL_DOMAIN.values() and parts
    }
    if not goal or all(acts is None for _, _, acts in turns):
        return None
    state, informed = simulator.tracker.start(), set()
    messages: list[dict[str, Any]] = []
    for role, text, acts in turns:
        if role == "user":
            simulator.tracker.user_said(state, acts or ())
            messages += [
                {"role": "user", "content": text},
                {"role": "system", "content": note(state, simulator.world.database)},
            ]
            continue
        informed |= slots_told(acts or (), state)
        simulator.tracker.system_said(state, acts or ())
        messages.append(
            {"role": "assistant", "content": with_placeholders(text, acts or (), locate), "reward": TURN}
        )
    success = accomplished(goal, informed)
    replies = [message for message in messages if message["role"] == "assistant"]
    if not replies:
        return None
    replies[-1]["reward"] = SUCCESS if success else FAILURE
    meta = {"outcome": {"success": success}}
    return Dialog(dialog.id, messages, source=dialog.source, split=dialog.split, goal=goal, meta=meta)


def with_placeholders(text: str, acts: Acts, locate: Locate) -> str:
    """The text with placeholders where the acts' values stand, numbered in the order of their places; an
    address in two parts is one.
    """
    spans, _ = locate(text, [act for act in acts if f"{act[1]}_{act[2]}".lower() in PLACES])
    counts: Counter[tuple[str, str]] = Counter()
    parts, position = [], 0
    for start, end, (_, domain, slot) in spans:
        if not (slot == "Addr" and counts[domain, slot] and not text[position:start].strip(" ,")):
            counts[domain, slot] += 1
            parts += [text[position:start], placeholder(domain, slot, min(counts[domain, slot], 9))]
        position = end
    return "".join([*parts, text[position:]])


def slots_told(acts: Acts, state: DialogState) -> set[tuple[str, str]]:
    """(goal domain, goal slot) of what a turn tells; `Ref` is a booking."""
    return {
        (state.domain if domain == "Booking" else GOAL_DOMAIN[domain], GOAL_SLOT[domain].get(slot, slot))
        for intent, domain, slot, _ in acts
        if domain != "general" and intent != "Request"
    }


def accomplished(goal: Mapping[str, Any], informed: set[tuple[str, str]]) -> bool:
    """Was everything told that the goal asks for, and everything booked?"""
    for domain, parts in goal.items():
        slots = [*parts.get("reqt", ()), *(["Ref"] if parts.get("book") else [])]
        if any((domain, slot) not in informed for slot in slots):
            return False
    return True
