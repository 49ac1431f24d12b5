"""The toy worlds from a command line.

    python -m envs.toy
        the optimum of every world, and what its players and its logs earn
    python -m envs.toy toy_maze
        the same of one of them, and an episode of the best player
    python -m envs.toy "toy_endgames?pieces=KRK&opponent=best"
        a world with options
    python -m envs.toy toy_maze --logs maze.jsonl --dialogs 1240 --seed 1
        its logs

Their description is in envs/README.md.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from envs import text_env
from envs.text_world import play
from envs.toy import TOYS
from envs.toy.endgames import Endgames
from envs.toy.process import TextProcess
from rl_dialog.errors import UserError


def main(arguments: list[str] | None = None) -> None:
    """Prints returns, or writes logs; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m envs.toy", description=main.__doc__)
    parser.add_argument("world", nargs="?", help=f"one of {', '.join(TOYS)}; by default all of them")
    parser.add_argument("--logs", metavar="PATH", help="write logs of this world instead of playing")
    parser.add_argument(
        "--dialogs", type=int, default=1000, help="to write, or to play (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.dialogs < 1 or (options.logs and not options.world):
        parser.error("expected --dialogs of at least 1, and with --logs the name of a world")
    if options.seed < 0:
        parser.error(f"expected --seed of at least 0, got {options.seed}")
    try:
        run(options)
    except UserError as error:
        parser.error(str(error))


def run(options: argparse.Namespace) -> None:
    """Raises UserError for an unknown world, and where its logs cannot be written."""
    if options.world and options.world.partition("?")[0] not in TOYS:
        raise UserError(f"expected one of {', '.join(TOYS)}, got {options.world!r}")
    if options.logs:
        world = text_env(options.world)
        print(json.dumps(world.write_logs(options.logs, dialogs=options.dialogs, seed=options.seed)))
        return
    found = {}
    for name in [options.world] if options.world else TOYS:
        try:
            found[name] = returns(text_env(name), options.dialogs, options.seed)
        except UserError as error:  # a library that it needs is missing
            if options.world:
                raise
            print(f"{name:<22}left out: {error}")
            continue
        print(f"{name:<22}" + "".join(f"{who} {mean:.2f}   " for who, mean in found[name].items()))
    if options.world:
        show(text_env(options.world), options.seed)
    print(json.dumps({name: {k: round(v, 4) for k, v in means.items()} for name, means in found.items()}))


def returns(world: type[TextProcess] | Endgames, dialogs: int, seed: int) -> dict[str, float]:
    """The optimum, and the mean return of each player and of the logs."""
    found = {"optimum": world.optimum()}
    for name, make in world.scripted_players().items():
        played = (play(world(), make(i), seed=i) for i in range(seed, seed + dialogs))
        found[name] = float(np.mean([sum(one.returns.values()) for one in played]))
    logs = [sum(one.returns.values()) for one in world.logged(dialogs, seed)]
    return found | {"logs": float(np.mean(logs))}


def show(world: type[TextProcess] | Endgames, seed: int) -> None:
    """The drawing of the first state, and an episode of the best player."""
    begun = world()
    begun.reset(seed=seed)
    if hasattr(begun, "draw"):
        print(f"\n{begun.draw()}")
    played = play(world(), world.scripted_players()["optimal"](seed), seed=seed)
    print()
    for message in next(iter(played.dialogs.values())).messages:
        reward = f"   [{message['reward']:g}]" if "reward" in message else ""
        print(f"{message['role']:>9}: {message['content']}{reward}")
    print()


if __name__ == "__main__":
    main()
