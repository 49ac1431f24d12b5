"""The catalogue of worlds behind adapters.

    python -m envs.adapters                                    all games of TextArena, tasks of reasoning-gym
    python -m envs.adapters textarena:Nim-v0 textarena:Chess-v0
    python -m envs.adapters --list                             their names
    python -m envs.adapters --ids                              every id of TextArena, not one per game
    python -m envs.adapters textarena:Nim-v0 --logs nim.jsonl --dialogs 2000 --seed 1
    python -m envs.adapters --cost textarena:Nim-v0            microseconds that the adapter adds to a move
    python -m envs.adapters --page envs/adapters/CATALOGUE.md  writes the page

Each world is checked against the contract and played by a random mover, who also writes logs (--logs). Ends
with one line of JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections import Counter
from pathlib import Path

from envs.adapters import PREFIXES, adapter
from envs.adapters.catalogue import (
    EPISODES,
    SECONDS,
    TWICE,
    Row,
    as_json,
    differing,
    measured,
    summary,
    table,
)
from envs.adapters.cost import cost
from rl_dialog.data.schema import read_jsonl
from rl_dialog.errors import UserError

PAGE = """# The catalogue

Written by `python -m envs.adapters --page envs/adapters/CATALOGUE.md` (TextArena {textarena}, reasoning-gym
{gym}). One id of each game, {episodes} episodes of a random mover and of each scripted player against random
movers, and the checks of `conformance.py`. Replies and returns are means per episode of the policy's role;
replies per second are of one core, and include the others' moves and the search for moves that the game
takes. Where the random mover finds no first move its return says nothing, and such an opponent loses by
itself: name another. In reasoning-gym the player knows every other answer.

{counts}

{table}
"""


def games() -> list[str]:
    """One id of each game of TextArena."""
    from textarena.envs.registration import ENV_REGISTRY

    from envs.adapters.textarena_game import game_names

    found: dict[str, str] = {}
    for name in game_names():
        found.setdefault(str(ENV_REGISTRY[name].entry_point), name)
    return [f"textarena:{name}" for name in found.values()]


def everything(*, ids: bool = False) -> list[str]:
    """The names of what is installed."""
    from envs.adapters.reasoning_gym_world import task_names
    from envs.adapters.textarena_game import game_names

    names: list[str] = []
    for found in (
        lambda: [f"textarena:{name}" for name in game_names()] if ids else games(),
        lambda: [f"reasoning_gym:{name}" for name in task_names()],
    ):
        try:
            names += found()
        except UserError as error:
            print(f"note: {error}", file=sys.stderr)
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m envs.adapters", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="worlds; by default all of what is installed")
    parser.add_argument("--list", action="store_true", help="print the names only")
    parser.add_argument("--ids", action="store_true", help="every id of TextArena, not one per game")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="behind each mean")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for a world that is then given up")
    parser.add_argument("--page", type=Path, help="write the table to this file")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--logs", type=Path, help="write a random mover's episodes to this file")
    parser.add_argument("--dialogs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the logs")
    parser.add_argument("--cost", action="store_true", help="time the moves of TextArena's games, and ours")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if strange := [name for name in options.names if name.partition(":")[0] not in PREFIXES]:
        parser.error(f"expected names such as textarena:Nim-v0, got {', '.join(strange)}")
    for name, least in (("dialogs", 1), ("seed", 0), ("seconds", 1)):
        if (got := getattr(options, name)) < least:
            parser.error(f"--{name}: expected at least {least}, got {got}")
    if options.logs:
        if len(options.names) != 1:
            parser.error("--logs: expected the name of one world")
        _write_logs(options.names[0], options.logs, options.dialogs, options.seed)
        return
    names = options.names or everything(ids=options.ids)
    if options.list:
        print("\n".join(names))
        return
    if options.cost:
        print(json.dumps([cost(name.partition(":")[2]) for name in names if name.startswith("textarena:")]))
        return
    if options.digests:
        print(json.dumps({row.name: row.episodes for row in measured(names, TWICE)}))
        return
    if options.episodes <= TWICE:
        parser.error(f"--episodes: expected more than {TWICE}, got {options.episodes}")
    rows = []
    for row in measured(names, options.episodes, options.seconds):
        rows.append(row)
        state = row.why_not or "; ".join(row.faults) or "ok"
        print(f"{row.name:<44} {state[:120]}", file=sys.stderr, flush=True)
    _report(rows, options)


def _write_logs(name: str, path: Path, dialogs: int, seed: int) -> None:
    adapter(name).write_logs(path, dialogs=dialogs, seed=seed)
    logs = list(read_jsonl(path))
    ends = Counter(str(log.meta["end"]) for log in logs)
    scored = [log for log in logs if log.meta["end"] != "unscored"]
    totals = [sum(log.messages[i]["reward"] for i in log.replies) for log in scored]
    mean = round(sum(totals) / len(totals), 4) if totals else None
    print(json.dumps({"logs": str(path), "dialogs": len(logs), "return": mean, "ends": ends}))


def _report(rows: list[Row], options: argparse.Namespace) -> None:
    others = differing(rows, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(as_json(rows), indent=1), encoding="utf-8")
    if options.page:
        options.page.write_text(page_of(rows, others, options.episodes), encoding="utf-8")
    else:
        print(table(rows, others))
    print(json.dumps(summary(rows, others) | {"other_episodes_in_other_processes": sorted(others)}))


def page_of(rows: list[Row], others: set[str], episodes: int) -> str:
    """CATALOGUE.md."""
    told = [
        f"- {kind}: of {found['worlds']} worlds {found['run']} run to an end on this machine, and of "
        f"these {found['keep_the_contract']} keep the contract."
        for kind, found in summary(rows, others).items()
    ]
    versions = {"textarena": _version("textarena"), "gym": _version("reasoning-gym")}
    return PAGE.format(episodes=episodes, counts="\n".join(told), table=table(rows, others), **versions)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:  # no such folder, say
        sys.exit(f"error: {error}")
