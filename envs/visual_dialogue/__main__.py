"""The command line of visual dialogue.

    python -m envs.visual_dialogue                                       returns and questions of every player
    python -m envs.visual_dialogue --kind yes_no --logs logs.jsonl --dialogs 2000 --seed 1
    python -m envs.visual_dialogue --serve 127.0.0.1:5000                the six endpoints over HTTP

The server knows no keys: whoever reaches its address can ask. envs/README.md says what the players and the
kinds of reward are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from envs.text_world import play
from envs.visual_dialogue.players import players
from envs.visual_dialogue.rules import KINDS
from envs.visual_dialogue.server import make_server, read_address
from envs.visual_dialogue.world import SCENES, Scenes
from rl_dialog.errors import UserError


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of players, writes logs (the last line is JSON), or serves until it is interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.dialogs < 1 or options.seed < 0:
        got = f"{options.dialogs} and {options.seed}"
        parser.error(f"expected --dialogs of at least 1 and --seed of at least 0, got {got}")
    worlds = {world.kind: world for world in SCENES.values()}
    try:
        if options.serve:
            _serve(options.serve, public=options.public)
        elif options.logs:
            how = {"dialogs": options.dialogs, "seed": options.seed, "player": options.player}
            print(json.dumps(worlds[options.kind].write_logs(options.logs, **how)))
        else:
            print(json.dumps(_table(worlds[options.kind], options.dialogs, options.seed)))
    except UserError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m envs.visual_dialogue", **how)
    parser.add_argument(
        "--kind", choices=list(KINDS), default="standard", help="of reward (default %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--logs", type=Path, metavar="PATH", help="write dialogues here, a Dialog per line")
    what.add_argument("--serve", metavar="HOST:PORT", help="answer the published protocol there")
    parser.add_argument(
        "--player", choices=list(players("standard")), default="mixed", help="whose logs (%(default)s)"
    )
    parser.add_argument("--public", action="store_true", help="let other machines ask the server, too")
    parser.add_argument("--dialogs", type=int, default=500, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default %(default)s)")
    return parser


def _table(world: type[Scenes], dialogs: int, seed: int) -> dict[str, Any]:
    """Prints and returns each player's mean return and the share of polar questions, and the optimum."""
    about = f"return, 95 % interval of {dialogs} dialogues, seed {seed}"
    print(f"{'player':<12} {about}   questions   polar   penalised")
    found: dict[str, Any] = {}
    for name, make in world.scripted_players().items():
        played = [play(world(), make(i), seed=i) for i in range(seed, seed + dialogs)]
        totals = np.array([each.returns["assistant"] for each in played])
        infos = [info for each in played for info in each.infos]
        half = 1.96 * totals.std(ddof=1) / np.sqrt(dialogs) if dialogs > 1 else float("nan")
        polar, penalised = (
            np.mean([info.get(key, False) for info in infos]) for key in ("polar", "penalised")
        )
        asked = len(infos) / dialogs
        print(f"{name:<12} {totals.mean():6.2f} +- {half:.2f} {asked:43.2f} {polar:7.0%} {penalised:11.0%}")
        found[name] = {"return": round(float(totals.mean()), 4), "polar": round(float(polar), 4)}
    found["optimum"] = round(world.optimum(), 4)
    print(f"{'optimum':<12} {found['optimum']:6.2f}   by search")
    return found


def _serve(address: str, *, public: bool) -> None:
    host, port = read_address(address)
    if not public and host not in ("127.0.0.1", "localhost"):
        remedy = "--public lets other machines ask, too"
        raise UserError(f"--serve: expected 127.0.0.1:{port}, got {address}: {remedy}")
    with make_server(host, port) as server:
        print(json.dumps({"url": f"http://{host}:{server.server_port}"}), flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("no more questions", file=sys.stderr)


if __name__ == "__main__":
    main()
