"""Visual dialogue under the yes/no penalty: who learns asks fewer polar questions than the clone, and earns
more.

    python -m tests.learning.test_visual_dialogue --seeds 0
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from envs import text_env
from envs.visual_dialogue.answers import read_question
from rl_dialog.data.schema import read_jsonl
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.methods import BC, METHODS, Method
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.loop import Trainer, TrainerConfig

MODEL = ModelConfig(layers=2, width=64)


class Trial:
    """Logs of one kind of reward, and what is trained on them."""

    def __init__(self, name: str, folder: Path, *, dialogs: int, seed: int) -> None:
        self.world, self.folder = text_env(name), folder
        self.logs = self.world.write_logs(folder / "logs.jsonl", dialogs=dialogs, seed=seed)
        logged = list(read_jsonl(folder / "logs.jsonl"))
        self.tokenizer = train_tokenizer(message["content"] for one in logged for message in one.messages)
        self.rows = [row for one in logged for row in tokenize(one, self.tokenizer)]

    def train(self, method: Method, seed: int, max_steps: int, start: Policy | None = None) -> Policy:
        """As `train` would, at its defaults but for the number of updates."""
        torch.manual_seed(seed)
        lm = copy.deepcopy(start.lm) if start else load_lm(MODEL, self.tokenizer)
        policy = Policy(lm, method, MODEL)
        policy.start = "made" if start else "new"
        config = TrainerConfig(seed=seed, report_to="none", eval_steps=0, max_steps=max_steps)
        cut, place = len(self.rows) // 10, tempfile.mkdtemp(dir=self.folder)
        Trainer(policy, self.tokenizer, self.rows[cut:], self.rows[:cut], config, place).train()
        return policy.eval()

    def figures(self, policy: Policy, *, episodes: int) -> dict[str, float]:
        """Its mean return with the standard error, questions of a dialogue and the share of polar ones."""
        decoding = Decoding(do_sample=True, max_new_tokens=24)
        with torch.inference_mode():
            played = play_episodes(policy, self.tokenizer, self.world, range(episodes), decoding, seed=7)
        totals = np.array([each.total for each in played])
        dialogs = [each.dialog for each in played]
        asked = [read_question(one.messages[i]["content"]) for one in dialogs for i in one.replies]
        return {
            "return": float(totals.mean()),
            "error": float(totals.std(ddof=1) / np.sqrt(episodes)),
            "questions": len(asked) / episodes,
            "polar": float(np.mean([question is not None and question.polar for question in asked])),
            "unclear": float(np.mean([question is None for question in asked])),
        }


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_under_the_penalty_it_asks_fewer_polar_questions(tmp_path: Path) -> None:
    """By .05 of the share, which was chosen after .09 of it, and 1.5 of the return, were measured on this
    seed: it guards what was found."""
    torch.set_num_threads(1)
    trial = Trial("visual_dialogue_yes_no", tmp_path, dialogs=1500, seed=1)
    clone = trial.train(BC(), 0, 500)
    cloned = trial.figures(clone, episodes=200)
    learnt = trial.figures(trial.train(METHODS["ilql"](), 0, 450, clone), episodes=200)
    assert learnt["polar"] < cloned["polar"] - 0.05
    assert learnt["return"] >= cloned["return"]


def main() -> None:
    """One JSON line for the logs and for each method and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="visual_dialogue_yes_no")
    parser.add_argument("--dialogs", type=int, default=1500)
    parser.add_argument("--clone_steps", type=int, default=500, help="updates of the clone")
    parser.add_argument("--max_steps", type=int, default=450, help="updates of each method")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=["ilql"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(options.env, Path(folder), dialogs=options.dialogs, seed=1)
        print(json.dumps({"logs": trial.logs}), flush=True)
        for seed in options.seeds:
            began = time.process_time()
            clone = trial.train(BC(), seed, options.clone_steps)
            shown = {"method": "bc", "seed": seed, **trial.figures(clone, episodes=options.episodes)}
            print(json.dumps(shown | {"seconds": time.process_time() - began}), flush=True)
            for name in options.methods:
                began = time.process_time()
                policy = trial.train(METHODS[name](), seed, options.max_steps, clone)
                shown = {"method": name, "seed": seed, **trial.figures(policy, episodes=options.episodes)}
                print(json.dumps(shown | {"seconds": time.process_time() - began}), flush=True)


if __name__ == "__main__":
    main()
