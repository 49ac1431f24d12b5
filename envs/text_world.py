"""Worlds to talk in: the contract, and how scripted players play an episode.

A worked example is `example.py`; `python -m pipelines.check_env --env module:Class` tells whether a class
keeps the contract (`conformance.py`).

    reset(*, seed=None) -> messages, info
    step(reply)         -> messages, reward, terminated, truncated, info

**Messages** are dicts in OpenAI's form, `role` (system, user, assistant or tool) and `content`. Both methods
return the conversation so far in a new list, and each begins with the one before; after a step follow the
reply, as the assistant's, and what the world says to it. The world may have words of its own beforehand.

**The reward** of a step is a number. None says that nobody knows what the reply earned, which is not 0.

**An episode ends** in one of four ways:

    terminated   the world is at its end: nothing can be earned any more
    truncated    it was cut off, so that what would have followed is worth something
    failed       the world broke (a server is gone, an opponent crashed): `info["failed"]` says why, and
                 `truncated` is true. `reset` can say so too. None and False say that nothing failed
    unscored     a reward was None

The last two have no return: they are counted apart and stand in no mean. An exception out of `reset` or
`step` is a defect of the world and ends the command, with the line where it came from.

**Randomness** comes from a generator that `reset` makes of its seed, never from that of the process: then
episodes are the same side by side, in any order and on any number of workers. Without a seed any episode will
do. A world can be pickled at any time.

**Snapshots**: `snapshot(world)` and `restore(world, saved)` copy all that the world is made of. One that
knows better (its state is on a server, or shares large tables) has methods `snapshot()` and `restore(saved)`.

**Several players**: `info["role"]` names who speaks next, and messages are as that role sees them, its own as
the assistant's. Rewards come by role, {"buyer": 1.0, "seller": -1.0}; what a role gets out of its turn is
earned by what it said last. The last step's `info["role"]` says whose view its messages are, by default the
speaker's; `info["views"]`, by choice, has those of others who learn how it ended. An episode gives one Dialog
per role (`play`).

**By choice** a class has, as static or class methods,

    scripted_players()                   {name: make}: make(seed) is a player, messages -> reply
    optimum()                            the best mean return that is possible
    reference_returns(episodes, seed)    {name: list of returns}: lines that `evaluate` draws
    write_logs(path, *, dialogs, seed)   Dialogs of mixed quality, one JSON line each

as a method `draw()`, the present state in lines of text, and as an attribute `max_turns`, the replies after
which the verbs cut an episode off; by default 64. `info["meta"]`, of `reset` and of steps (newer keys replace
older ones), is what else the episode's Dialog keeps in its `meta`. A class whose steps wait for others (a
server) says as `concurrency` how many of its worlds may be stepped at a time, each in a thread; by default 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rl_dialog.data.schema import Dialog, View, end_of, failure_of

Message = dict[str, Any]
Player = Callable[[list[Message]], str]  # what the player sees, its own replies as the assistant's -> a reply

ALONE = "assistant"  # the role of a world's only player
MAX_TURNS = 64  # replies after which an episode is cut off whose world does not say


class TextWorld(Protocol):
    """A world to talk in: any class with these two methods."""

    def reset(self, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Begins the episode of a seed."""

    def step(self, reply: str) -> tuple[list[Message], float | None, bool, bool, dict[str, Any]]:
        """What the reply leads to."""


def most_turns(world: Any) -> int:
    """The replies after which an episode is cut off."""
    return getattr(world, "max_turns", MAX_TURNS)


def snapshot(world: Any) -> Any:
    """All that the episode's future depends on, to go back to with `restore`, in this world or another of its
    class."""
    return world.snapshot() if hasattr(world, "snapshot") else copy.deepcopy(vars(world))


def restore(world: Any, saved: Any) -> None:
    """Goes back to a snapshot, as often as one likes."""
    if hasattr(world, "restore"):
        world.restore(saved)
        return
    vars(world).clear()
    vars(world).update(copy.deepcopy(saved))


@dataclass
class Played:
    """An episode that is over."""

    dialogs: dict[str, Dialog]  # role -> what it saw and said; of roles that spoke
    end: str  # one of rl_dialog.data.schema.ENDS
    infos: list[dict[str, Any]]  # of the steps

    @property
    def returns(self) -> dict[str, float | None]:
        """Role -> the undiscounted return; None where the episode has none."""
        scored = self.end in ("terminated", "truncated")
        return {
            role: sum(dialog.messages[i]["reward"] for i in dialog.replies) if scored else None
            for role, dialog in self.dialogs.items()
        }


def play(
    world: Any, players: Player | Mapping[str, Player], *, seed: int, max_turns: int | None = None
) -> Played:
    """Plays the episode of a seed. `players` is a function for everyone, or one by role.

    Raises UserError for a world whose steps do not add to the conversation.
    """
    messages, info = world.reset(seed=seed)
    name = type(world).__name__
    role, infos, terminated, failed = info.get("role", ALONE), [], False, failure_of(info)
    told = dict(info.get("meta", {}))
    views: dict[str, View] = {role: View(list(messages))}
    where = f"{name}, episode whose seed is {seed}"
    over = failed is not None
    while not over:
        reply = (players[role] if isinstance(players, Mapping) else players)(messages)
        messages, reward, terminated, truncated, info = world.step(reply)
        infos.append(info)
        failed = failure_of(info)
        told |= info.get("meta", {})
        spoke, role = role, info.get("role", role)
        said = {"role": "assistant", "content": reply}
        views[spoke].say(messages if role == spoke else [*views[spoke].messages, said], where)
        if role != spoke:
            views.setdefault(role, View()).see(messages, where)
        for each, seen in info.get("views", {}).items():
            views.setdefault(each, View()).see(seen, where)
        for each, value in (reward if isinstance(reward, Mapping) else {spoke: reward}).items():
            views.setdefault(each, View()).earn(value if failed is None else None)
        over = terminated or truncated or len(infos) >= (max_turns or most_turns(world)) or failed is not None
    how = {"terminated": terminated, "failed": failed, "seed": seed, "told": told}
    return _played(name, views, infos, **how)


def _played(
    name: str,
    views: Mapping[str, View],
    infos: list[dict[str, Any]],
    *,
    terminated: bool,
    failed: str | None,
    seed: int,
    told: Mapping[str, Any],
) -> Played:
    rewards = [reward for view in views.values() for reward in (*view.rewards.values(), view.early)]
    end = end_of(rewards, terminated=terminated, failed=failed is not None)
    meta = {**told, "seed": seed, "end": end} | ({} if failed is None else {"failed": failed})
    dialogs = {}
    for role, view in views.items():
        if view.rewards or (failed is not None and view.messages):
            number = f"{name}-{seed}" + ("" if role == ALONE else f"-{role}")
            own = meta | ({} if role == ALONE else {"role": role})
            dialogs[role] = Dialog(number, view.marked(), source=name, truncated=not terminated, meta=own)
    return Played(dialogs, end, infos)
