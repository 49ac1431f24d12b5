"""Learning in games that nobody here wrote, at the defaults: between the clone and what the method itself
would answer, worked out from the logs.

    python -m tests.learning.test_games nim 0 1 2          every method of the table in one game, seed by seed

The logs are those of a random, a mediocre and a good player (tests/worlds). A state is the last user message,
an action a whole reply.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_dialog.data.schema import Dialog, read_jsonl
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.methods import BC, ILQL, METHODS, Method, Psi
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.loop import Trainer, TrainerConfig
from tests.worlds.graphs import Graph7
from tests.worlds.mazes import Maze, Walk
from tests.worlds.text_game import Game, write_logs

MODEL = ModelConfig(layers=2, width=64)
Table = dict[
    str, dict[str, list[tuple[float, str | None]]]
]  # state -> reply -> (reward, next state) of each time it was said
Choice = dict[str, float]


def table_of(dialogs: list[Dialog]) -> tuple[Table, list[str]]:
    """The logged decision process and the states that dialogs begin in."""
    table: Table = defaultdict(lambda: defaultdict(list))
    starts = []
    for dialog in dialogs:
        states = [dialog.messages[i - 1]["content"] for i in dialog.replies]
        starts.append(states[0])
        for state, following, i in zip(states, [*states[1:], None], dialog.replies, strict=True):
            table[state][dialog.messages[i]["content"]].append((dialog.messages[i]["reward"], following))
    return table, starts


def exact_policy(
    table: Table,
    gamma: float,
    backup: Callable[[Choice, Choice], float],
    act: Callable[[Choice, Choice], Choice],
) -> dict[str, Choice]:
    """act(p, Q) in every logged state, Q being that of V(s) = backup(p, Q) in the logged process, by value
    iteration."""
    value, policy = defaultdict(float), {}
    for _ in range(60):
        for state, replies in table.items():
            total = sum(map(len, replies.values()))
            p = {a: len(said) / total for a, said in replies.items()}
            q = {
                a: sum(r + gamma * (value[s] if s else 0.0) for r, s in said) / len(said)
                for a, said in replies.items()
            }
            value[state], policy[state] = backup(p, q), act(p, q)
    return policy


def return_in_logs(policy: dict[str, Choice], table: Table, starts: list[str]) -> float:
    """What a policy earns if the logged process is the world: a draw that was lucky once is lucky always."""
    earned = defaultdict(float)
    for _ in range(60):
        for state, replies in table.items():
            earned[state] = sum(
                policy[state][a] * sum(r + (earned[s] if s else 0.0) for r, s in said) / len(said)
                for a, said in replies.items()
            )
    return float(np.mean([earned[state] for state in starts]))


def return_in_game(policy: dict[str, Choice], game: type[Game], episodes: int = 1000) -> float:
    """What it earns in the game itself, with a random move in a state that the logs never had."""
    chance, total, world = random.Random(7), 0.0, game()
    for episode in range(episodes):
        messages, _ = world.reset(seed=episode)
        ended = False
        while not ended:
            moves = policy.get(messages[-1]["content"]) or dict.fromkeys(world.moves(world.state), 1.0)
            move = chance.choices(list(moves), list(moves.values()))[0]
            messages, reward, terminated, truncated, _ = world.step(move)
            total, ended = total + reward, terminated or truncated
    return total / episodes


def tilted(strength: float) -> Callable[[Choice, Choice], Choice]:
    def act(p: Choice, q: Choice) -> Choice:
        top = max(q.values())
        weight = {a: p[a] * math.exp(strength * (q[a] - top)) for a in p}
        return {a: w / sum(weight.values()) for a, w in weight.items()}

    return act


def mean(p: Choice, q: Choice) -> float:
    return sum(p[a] * q[a] for a in p)


def expectile_at(tau: float) -> Callable[[Choice, Choice], float]:
    def backup(p: Choice, q: Choice) -> float:
        low, high = min(q.values()), max(q.values())
        for _ in range(40):
            v = (low + high) / 2
            low, high = (
                (v, high)
                if sum(p[a] * (tau if q[a] > v else 1 - tau) * (q[a] - v) for a in p) > 0
                else (low, v)
            )
        return (low + high) / 2

    return backup


def soft_at(c: float) -> Callable[[Choice, Choice], float]:
    def backup(p: Choice, q: Choice) -> float:
        top = max(q.values())
        return top + c * math.log(sum(p[a] * math.exp((q[a] - top) / c) for a in p))

    return backup


def best_of(n: int) -> Callable[[Choice, Choice], Choice]:
    """The best of n replies drawn from p; replies of equal Q share their chance as p does."""

    def act(p: Choice, q: Choice) -> Choice:
        chosen, below = {}, 0.0
        for value in sorted(set(q.values())):
            tied = [a for a in q if q[a] == value]
            mass = sum(p[a] for a in tied)
            chosen |= {a: ((below + mass) ** n - below**n) * p[a] / mass for a in tied}
            below += mass
        return chosen

    return act


def exact_of(method: Method, unit: float, table: Table) -> dict[str, Choice]:
    """The policy that the method would be if it learned perfectly what the logs say."""
    name = next(name for name, kind in METHODS.items() if type(method) is kind)
    strength = method.in_rewards(unit).get("beta") or 1 / method.in_rewards(unit).get("c", 1.0)
    ways = {
        "mc": (mean, tilted(strength)),
        "sarsa": (mean, tilted(strength)),
        "ilql": (expectile_at(getattr(method, "tau", 0.5)), tilted(strength)),
        "cql": (lambda p, q: max(q.values()), tilted(strength)),
        "psi": (soft_at(1 / strength), tilted(strength)),
        "kl_control": (expectile_at(getattr(method, "tau", 0.5)), tilted(strength / 2)),
        "utterance_ilql": (expectile_at(getattr(method, "tau", 0.5)), best_of(method.num_generations)),
    }
    return exact_policy(table, method.gamma, *ways[name])


class Trial:
    """One game's logs, and what is trained on them."""

    def __init__(self, game: type, folder: Path, *, episodes: int = 2500, model: ModelConfig = MODEL) -> None:
        if hasattr(game, "write_logs"):
            game.write_logs(folder / "logs.jsonl", dialogs=episodes, seed=1)
        else:
            write_logs(game, folder / "logs.jsonl", episodes, 1)
        self.game, self.folder, self.model = game, folder, model
        self.dialogs = list(read_jsonl(folder / "logs.jsonl"))
        self.tokenizer = train_tokenizer(
            message["content"] for dialog in self.dialogs for message in dialog.messages
        )
        self.rows = [row for dialog in self.dialogs for row in tokenize(dialog, self.tokenizer)]
        self.table, self.starts = table_of(self.dialogs)

    def train(self, method: Method, seed: int, start: Policy | None = None, **settings: int) -> Policy:
        """As `train` would, at its defaults."""
        torch.manual_seed(seed)
        policy = Policy(
            copy.deepcopy(start.lm) if start else load_lm(self.model, self.tokenizer), method, self.model
        )
        policy.start = "made" if start else "new"
        config = TrainerConfig(seed=seed, report_to="none", eval_steps=0, **settings)
        cut = len(self.rows) // 10
        Trainer(
            policy,
            self.tokenizer,
            self.rows[cut:],
            self.rows[:cut],
            config,
            tempfile.mkdtemp(dir=self.folder),
        ).train()
        return policy.eval()

    def returns(self, policy: Policy, *, do_sample: bool = True, episodes: int = 300) -> np.ndarray:
        method = policy.method
        best = (
            {"num_generations": method.num_generations, "rank_by": method.rank_by}
            if do_sample and method.num_generations > 1
            else {}
        )
        decoding = Decoding(do_sample=do_sample, max_new_tokens=16, **best)
        with torch.inference_mode():
            played = play_episodes(policy, self.tokenizer, self.game, range(episodes), decoding, seed=7)
        return np.array([episode.total for episode in played])


@pytest.fixture(scope="module")
def nim(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    pytest.importorskip("textarena", reason="the games of TextArena: pip install textarena")
    from tests.worlds.textarena_games import Nim

    return Trial(Nim, tmp_path_factory.mktemp("nim"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_nim_ilql_learns_what_it_would_answer(nim: Trial) -> None:
    """A third of the default number of updates leads more than half of the way from the clone to the method's
    own exact answer."""
    torch.set_num_threads(1)
    clone = nim.train(BC(), 0, max_steps=2000)
    policy = nim.train(ILQL(), 0, clone, max_steps=1300)
    exact = return_in_logs(exact_of(policy.method, policy.value_unit, nim.table), nim.table, nim.starts)
    cloned = nim.returns(clone).mean()
    assert exact > 0.9 and (nim.returns(policy).mean() - cloned) / (exact - cloned) > 0.5


@pytest.mark.slow
def test_errors_do_not_add_up_where_conversations_come_back(tmp_path: Path) -> None:
    """Psi in random walks, with a small c. A walk that turns in circles earns nothing, but a soft maximum
    over errors of Q would make each state a little better than the next one, round and round."""
    torch.set_num_threads(1)
    walks = Trial(Graph7, tmp_path, episodes=1000)
    clone = walks.train(BC(), 0, max_steps=500)
    policy = walks.train(Psi(c=0.033), 0, clone, max_steps=500)
    assert walks.returns(policy).mean() > 0.9


def main() -> None:
    """The table of one game."""
    from tests.worlds.textarena_games import GAMES

    games = GAMES | {"maze": Maze, "walk": Walk}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("game", choices=sorted(games))
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument(
        "--max_steps",
        type=int,
        default=0,
        help="updates of the methods (not of the clone); by default as many as train makes",
    )
    parser.add_argument(
        "--methods", nargs="+", default=["mc", "sarsa", "ilql", "cql", "psi", "kl_control", "utterance_ilql"]
    )
    parser.add_argument("--attention_heads", type=int, help="of the model; the tables of the page have 4")
    parser.add_argument(
        "--strength", type=float, help="how far to lean on values, per spread of returns; in those tables 8"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = replace(MODEL, attention_heads=options.attention_heads)
        trial = Trial(games[options.game], Path(folder), model=model)
        logs = exact_policy(trial.table, 1.0, mean, lambda p, q: p)
        print(f"logs {return_in_logs(logs, trial.table, trial.starts):.3f}", flush=True)
        for seed in options.seeds:
            clone = trial.train(BC(), seed)
            cloned, greedy = trial.returns(clone).mean(), trial.returns(clone, do_sample=False).mean()
            print(f"bc              seed {seed}: sampled {cloned:.3f}, greedy {greedy:.3f}", flush=True)
            longer = trial.train(BC(), seed, clone, max_steps=options.max_steps or 4000)
            as_long = trial.returns(longer), trial.returns(longer, do_sample=False)
            print(f"trained as long seed {seed}: " + both_ways(*as_long), flush=True)
            for name in options.methods:
                method = METHODS[name]()
                method = method.suited(options.strength) if options.strength else method
                policy = trial.train(method, seed, clone, max_steps=options.max_steps)
                played = trial.returns(policy), trial.returns(policy, do_sample=False)
                answer = exact_of(policy.method, policy.value_unit, trial.table)
                exact = return_in_logs(answer, trial.table, trial.starts)
                in_game = return_in_game(answer, games[options.game])
                way, gained = played[0].mean() - cloned, gains(played, as_long)
                print(
                    f"{name:15s} seed {seed}: {both_ways(*played)}, exact {exact:.3f} "
                    f"(in the game {in_game:.3f}), share {way / (exact - cloned):.2f} "
                    f"({way / (in_game - cloned):.2f}); above the clone trained as long {gained}",
                    flush=True,
                )


def both_ways(sampled: np.ndarray, greedy: np.ndarray) -> str:
    return f"sampled {sampled.mean():.3f}, greedy {greedy.mean():.3f}"


def gains(played: tuple[np.ndarray, np.ndarray], as_long: tuple[np.ndarray, np.ndarray]) -> str:
    """Differences over the same beginnings, sampled and greedy, each with its standard error."""
    pairs = [ours - theirs for ours, theirs in zip(played, as_long, strict=True)]
    return " and ".join(f"{each.mean():.3f} (s.e. {each.std() / math.sqrt(len(each)):.3f})" for each in pairs)


if __name__ == "__main__":
    main()
