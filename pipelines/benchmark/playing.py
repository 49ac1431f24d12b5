"""`benchmark play`: episodes/s of a language model in Wordle, many at a time, against one at a time; games/s
of scripted players on one core, and what the loop adds to a step of the world."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from envs import text_env
from pipelines.benchmark.measuring import Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.tokenize import train_tokenizer
from rl_dialog.evaluation.episodes import Episode, play_episodes
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.players import ScriptedPlay
from rl_dialog.methods import ILQL
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy

GAMES = 1000  # of each scripted player
PLAYERS = ("optimal", "consistent", "mixture", "random")
LONGEST = 8  # tokens of a reply: five letters, the end of turn, and some more


def measure(config: BenchmarkConfig) -> Result:
    """Episodes of a round and their seconds; games/s by player, and microseconds of the loop per step."""
    torch.manual_seed(config.seed)
    tokenizer = train_tokenizer(["wordle"], vocab_size=262)  # a token for each byte
    shape = ModelConfig(
        layers=config.layers, attention_heads=config.attention_heads, width=config.width, context=512
    )
    policy = Policy(load_lm(shape, tokenizer), ILQL(), shape).eval()
    count = config.num_envs

    def episodes(batch_size: int, *, keep_caches: bool) -> Callable[[], None]:
        how = {"seed": config.seed, "batch_size": batch_size, "keep_caches": keep_caches}
        world, decoding = text_env("wordle"), Decoding(max_new_tokens=LONGEST)
        return lambda: play_episodes(policy, tokenizer, world, range(count), decoding, **how) and None

    contenders = {
        "plain": episodes(1, keep_caches=False),
        "one at a time, caches kept": episodes(1, keep_caches=True),
        f"{count} at a time": episodes(count, keep_caches=False),
        f"{count} at a time, caches kept": episodes(count, keep_caches=True),
    }
    seconds = take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
    size = f"{config.layers} layers, width {config.width}"
    setting = f"{count} games of Wordle, {size}; plain: one at a time"
    games, micros = scripted(config.seed)
    lines = [f"{name:<20} {rate:>8.0f} games/s" for name, rate in games.items()]
    shown = "\nscripted players of Wordle, one core\n" + "\n".join(lines)
    shown += f"\nthe loop adds {micros:.0f} microseconds to a step\n"
    more = {"games_per_second": games, "microseconds_per_step": round(micros, 1)}
    return speeds(config, {setting: (count, seconds)}, shown=shown, **more)


def scripted(seed: int) -> tuple[dict[str, float], float]:
    """Games per second of processor time, with messages and Dialogs; and how many microseconds of a step are
    neither the world's nor the player's."""
    make_world, games, added, steps = text_env("wordle"), {}, 0.0, 0
    for name in PLAYERS:
        play = ScriptedPlay(make_world, (name,))
        play(range(50), seed)  # what is remembered of words is there before the clock
        taken, played = _timed(partial(play, range(GAMES), seed))
        games[name] = round(GAMES / taken, 1)
        bare, _ = _timed(partial(_bare, play, played, seed))
        added += taken - bare
        steps += sum(len(episode.replies) for episode in played)
    return games, 1e6 * added / steps


def _timed(call: Callable[[], list[Episode]]) -> tuple[float, list[Episode]]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def _bare(play: ScriptedPlay, episodes: list[Episode], seed: int) -> list[Episode]:
    """The same games by nothing but the world and the player."""
    for episode in episodes:
        world, player = play.make_env(), play.cast.player(seed, episode.index)
        messages, _ = world.reset(seed=stream(seed, episode.index))
        for _ in episode.replies:
            messages, *_ = world.step(player(messages))
    return episodes
