"""Logs of scripted askers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.text_world import play
from envs.visual_dialogue.players import Mixed, players
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError


def write_logs(
    world: Any, path: str | Path, *, dialogs: int, seed: int, player: str = "mixed"
) -> dict[str, Any]:
    """Writes so many dialogues of a player in a world of scenes as JSON lines of Dialogs, with `reward` on
    every question; `meta` says whose they are and how many questions were polar. Returns what they are like.
    Raises UserError for an unknown player."""
    known = players(world.kind)
    if player not in known:
        raise UserError(f"player: expected one of {', '.join(known)}, got {player!r}")
    returns: list[float] = []
    counts = {"questions": 0, "polar": 0, "penalised": 0}

    def each() -> Iterator[Dialog]:
        for number in range(dialogs):
            start = random.Random(f"{seed} {number}").getrandbits(62)
            asker = known[player](start)
            played = play(world(), asker, seed=start)
            (dialog,), (total,) = played.dialogs.values(), played.returns.values()
            polar = sum(info.get("polar", False) for info in played.infos)
            returns.extend([] if total is None else [total])
            counts["questions"] += len(played.infos)
            counts["polar"] += polar
            counts["penalised"] += sum(info.get("penalised", False) for info in played.infos)
            dialog.id, dialog.source = f"visual_dialogue-{world.kind}-{seed}-{number:06d}", "visual_dialogue"
            dialog.meta |= {"player": asker.habit if isinstance(asker, Mixed) else player, "polar": polar}
            yield dialog

    write_jsonl(each(), path)
    mean = round(sum(returns) / len(returns), 4) if returns else None
    failed = {"failed": dialogs - len(returns)} if len(returns) < dialogs else {}
    return {"path": str(path), "dialogs": dialogs, "mean_return": mean, **counts, **failed}
