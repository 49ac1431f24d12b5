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
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_dialog.data.schema import read_jsonl
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.methods import BC, FROM_LOGS, ILQL, Method, Psi
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.loop import Trainer, TrainerConfig
from tests.learning.exact_answers import (
    exact_of,
    exact_policy,
    mean,
    return_in_game,
    return_in_logs,
    table_of,
)
from tests.worlds.graphs import Graph7
from tests.worlds.mazes import Maze, Walk
from tests.worlds.text_game import write_logs

MODEL = ModelConfig(layers=2, width=64)


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
        tokenizer = self.tokenizer_of(method)
        lm = copy.deepcopy(start.lm) if start else load_lm(self.model, tokenizer)
        if len(tokenizer) > lm.get_input_embeddings().num_embeddings:
            lm.resize_token_embeddings(len(tokenizer))
        policy = Policy(lm, method, self.model)
        policy.start = "made" if start else "new"
        config = TrainerConfig(seed=seed, report_to="none", eval_steps=0, **settings)
        cut = len(self.rows) // 10
        Trainer(
            policy,
            tokenizer,
            self.rows[cut:],
            self.rows[:cut],
            config,
            tempfile.mkdtemp(dir=self.folder),
        ).train()
        return policy.eval()

    def tokenizer_of(self, method: Method) -> Any:
        return method.extend_tokenizer(copy.deepcopy(self.tokenizer))

    def returns(self, policy: Policy, *, do_sample: bool = True, episodes: int = 300) -> np.ndarray:
        method = policy.method
        best = (
            {"num_generations": method.num_generations, "rank_by": method.rank_by}
            if do_sample and method.num_generations > 1
            else {}
        )
        decoding = Decoding(do_sample=do_sample, max_new_tokens=16, **best)
        with torch.inference_mode():
            played = play_episodes(
                policy, self.tokenizer_of(method), self.game, range(episodes), decoding, seed=7
            )
        return np.array([episode.total for episode in played])


@pytest.fixture(scope="module")
def nim(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    pytest.importorskip("textarena", reason="the games of TextArena: pip install textarena")
    from tests.worlds.textarena_games import Nim

    return Trial(Nim, tmp_path_factory.mktemp("nim"))


@pytest.mark.slow
@pytest.mark.long  # tests/optima/test_mixed_logs.py shows the same in a tenth of the time
@pytest.mark.timeout(1800)
def test_in_nim_ilql_learns_what_it_would_answer(nim: Trial) -> None:
    """A fifth of the default number of updates leads more than half of the way from the clone to the method's
    own exact answer."""
    torch.set_num_threads(1)
    clone = nim.train(BC(), 0, max_steps=1000)
    policy = nim.train(ILQL(), 0, clone, max_steps=800)
    answer = exact_of(policy.method, policy.value_unit, nim.table, nim.dialogs)
    exact = return_in_logs(answer, nim.table, nim.starts)
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
        "--methods",
        nargs="+",
        choices=FROM_LOGS,
        default=["mc", "sarsa", "ilql", "cql", "psi", "kl_control", "utterance_ilql"],
    )
    parser.add_argument("--attention_heads", type=int, help="of the model; the tables of the page have 4")
    parser.add_argument(
        "--strength", type=float, help="how far to lean on values, per spread of returns; in those tables 8"
    )
    parser.add_argument(
        "--cql_support", type=float, help="where the conservative term acts; in most tables of the page 1"
    )
    parser.add_argument("--dialogs", type=int, default=2500, help="how many are logged")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = replace(MODEL, attention_heads=options.attention_heads)
        trial = Trial(games[options.game], Path(folder), episodes=options.dialogs, model=model)
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
                method = FROM_LOGS[name]()
                method = method.suited(options.strength) if options.strength else method
                if options.cql_support is not None and hasattr(method, "cql_support"):
                    method = replace(method, cql_support=options.cql_support)
                policy = trial.train(method, seed, clone, max_steps=options.max_steps)
                played = trial.returns(policy), trial.returns(policy, do_sample=False)
                way, told = played[0].mean() - cloned, "no exact answer"
                answer = None
                if getattr(trial.game, "tells_all", True):
                    answer = exact_of(policy.method, policy.value_unit, trial.table, trial.dialogs)
                if answer:
                    exact = return_in_logs(answer, trial.table, trial.starts)
                    in_game = return_in_game(answer, games[options.game])
                    share, of_game = way / (exact - cloned), way / (in_game - cloned)
                    told = f"exact {exact:.3f} (in the game {in_game:.3f}), share {share:.2f} ({of_game:.2f})"
                print(
                    f"{name:15s} seed {seed}: {both_ways(*played)}, {told}; "
                    f"above the clone trained as long {gains(played, as_long)}",
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
