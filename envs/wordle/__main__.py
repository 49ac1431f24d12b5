"""The command line of Wordle.

    python -m envs.wordle                                               returns and speed of every player
    python -m envs.wordle --logs logs.jsonl --kind adversarial --games 22000
    python -m envs.wordle --pairs pairs.jsonl --games 1000              pairs of guesses for Q-rank
    python -m envs.wordle --logs logs.jsonl --people tweets.csv --column text
    python -m envs.wordle --play

envs/README.md says what the players and the kinds of logs are.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from envs.wordle.colours import RULES
from envs.wordle.logs import KINDS, write_games, write_logs, write_pairs
from envs.wordle.people import people_games, read_answers, read_texts, squares
from envs.wordle.policies import POLICIES, Optimal, game_chance, play, play_on
from envs.wordle.rules import State
from envs.wordle.terminal import Person, grid
from envs.wordle.words import SHIPPED, Words, load_words, read_words
from rl_dialog.errors import UserError

GAMES = 1000  # how many by default
BESIDE = {"kind": "logs", "people": "logs", "column": "people", "answers": "people", "guesses": "people"}


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of returns, writes logs or pairs (the last line is JSON), or lets a person play."""
    parser = _parser()
    options = parser.parse_args(arguments)
    games = GAMES if options.games is None else options.games
    if games < 1 or options.seed < 0:
        parser.error(
            f"expected --games of at least 1 and --seed of at least 0, got {games} and {options.seed}"
        )
    _expect_together(parser, options)
    try:
        words = load_words(options.words, options.colouring)
        if options.play:
            _play(words, options.seed)
        elif options.pairs:
            print(json.dumps(write_pairs(options.pairs, pairs=games, seed=options.seed, words=words)))
        elif options.people:
            print(json.dumps(_people(options, words)))
        elif options.logs:
            kind = options.kind or "mixture"
            how = {"dialogs": games, "seed": options.seed, "kind": kind, "words": words}
            print(json.dumps(write_logs(options.logs, **how)))
        else:
            print(json.dumps(_table(words, games, options.seed)))
    except UserError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m envs.wordle", **how)
    parser.add_argument("--logs", type=Path, metavar="PATH", help="write games here, a Dialog per line")
    parser.add_argument("--kind", choices=list(KINDS), help="of logs (default mixture)")
    parser.add_argument("--pairs", type=Path, metavar="PATH", help="write pairs of guesses for Q-rank here")
    parser.add_argument("--people", type=Path, metavar="CSV", help="games from squares that people shared")
    parser.add_argument("--column", metavar="NAME", help="of that file, with the texts (default text)")
    parser.add_argument("--answers", type=Path, metavar="PATH", help="number and word of a day per line")
    parser.add_argument("--guesses", type=Path, metavar="PATH", help="words that people try, one per line")
    parser.add_argument("--play", action="store_true", help="play here; an empty line asks for a hint")
    parser.add_argument("--words", type=Path, default=SHIPPED, metavar="PATH", help="a list of one's own")
    parser.add_argument("--colouring", choices=RULES, default="simple", help="default %(default)s")
    parser.add_argument("--games", type=int, help=f"how many (default {GAMES}; of people all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default %(default)s)")
    return parser


def _expect_together(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An error for flags of which one would do nothing."""
    asked = [f"--{name}" for name in ("play", "pairs", "logs") if getattr(options, name)]
    if len(asked) > 1:
        parser.error(f"expected one of --play, --pairs and --logs, got {' and '.join(asked)}")
    for flag, beside in BESIDE.items():
        if getattr(options, flag) is not None and not getattr(options, beside):
            parser.error(f"expected --{beside} PATH beside --{flag}, which nothing else reads")
    if options.people and options.kind:
        parser.error("expected --people or --kind, got both: the games of people are of one kind")


def _table(words: Words, games: int, seed: int) -> dict[str, Any]:
    """Prints and returns each player's mean return, its interval, and games per second of processor time."""
    print(f"{'player':<18} return, 95 % interval of {games} games, seed {seed}   won   games/s")
    found = {}
    for name in POLICIES:
        began = time.process_time()
        ends = [play(words, name, seed=seed, index=i) for i in range(games)]
        speed = games / (time.process_time() - began)
        totals = np.array([end.total for end in ends])
        half = 1.96 * totals.std(ddof=1) / np.sqrt(games) if games > 1 else float("nan")
        won = np.mean([end.won for end in ends])
        print(f"{name:<18} {totals.mean():6.2f} +- {half:.2f} {won:34.1%} {speed:9.0f}")
        found[name] = {"return": round(float(totals.mean()), 4), "won": round(float(won), 4)}
    return found


def _people(options: argparse.Namespace, words: Words) -> dict[str, Any]:
    answers = read_answers(options.answers) if options.answers else {}
    guesses = read_words(options.guesses) if options.guesses else ()
    texts = list(read_texts(options.people, options.column or "text"))
    games = people_games(texts, words, options.seed, guesses=guesses, answers=answers)
    name = f"wordle-people-{options.seed}"
    return {"texts": len(texts), **write_games(options.logs, islice(games, options.games), name=name)}


def _play(words: Words, seed: int) -> None:
    person = Person(words, Optimal(words, game_chance(seed, "hint")))
    try:
        end = play_on(words, person, game_chance(seed), State(words.every))
    except (EOFError, KeyboardInterrupt):
        print("\nno more guesses")
        return
    print(f"\n{grid(end)}\nreturn {end.total}\n\n{squares(end)}")


if __name__ == "__main__":
    main()
