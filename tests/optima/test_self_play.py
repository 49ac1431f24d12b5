"""Self-play of a table finds the perfect play of Nim: one or two of up to five stones, and who takes the last
one wins. With three left the mover has lost; from anywhere else there is one move that leaves three or none.
"""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.rollouts import Playing, Rollouts
from rl_dialog.evaluation.self_play import Opponent
from rl_dialog.methods import PPO, RLOO, Method
from rl_dialog.models.prior import Prior
from rl_dialog.training.online import OnlineSettings, OnlineTrainer
from rl_dialog.training.versions import Versions
from tests.optima.tabular import Learned, tabular_lm, tabular_policy

STONES = 5
WORDS = ("<pad>", "<end>", "<u>", "<a>", "take1", "take2", *(f"left{n}" for n in range(STONES + 1)))
PAD, END, USER, BOT, ONE, TWO, NONE = range(7)
BEST = {5: TWO, 4: ONE, 2: TWO, 1: ONE}
TEMPLATE = (
    "{% for m in messages %}{{ '<u> ' if m['role'] == 'user' else '<a> ' }}{{ m['content'] }} <end> "
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


class Nim:
    """Two players; a move that the game does not know loses."""

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        self.left = int(np.random.default_rng(seed).integers(3, STONES + 1))
        self.views, self.mover = ([], []), 0
        return self._turn()

    def _turn(self):  # noqa: ANN202
        view = self.views[self.mover]
        view.append({"role": "user", "content": f"left{self.left}"})
        return list(view), {"role": f"player_{self.mover}"}

    def step(self, reply):  # noqa: ANN001, ANN201
        me, taken = self.mover, {"take1": 1, "take2": 2}.get(reply)
        self.views[me].append({"role": "assistant", "content": reply})
        if taken is None or taken > self.left or taken == self.left:
            won = 1.0 if taken == self.left else -1.0
            earned = {f"player_{me}": won, f"player_{1 - me}": -won}
            return list(self.views[me]), earned, True, False, {"role": f"player_{me}"}
        self.left, self.mover = self.left - taken, 1 - me
        messages, info = self._turn()
        return messages, {}, False, False, info


def words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "additional_special_tokens": ["<u>", "<a>"]}
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    found.chat_template = TEMPLATE
    return found


def since_last_asked(ids: tuple[int, ...]) -> tuple[int, ...]:
    """All that matters: how many stones there are now."""
    asked = [i for i, token in enumerate(ids) if token == USER]
    return ids[asked[-1] :] if asked else ()


def asked(left: int) -> list[int]:
    return [USER, NONE + left, END, BOT]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lag"), [(RLOO(c=0.05), 0), (RLOO(c=0.05), 2), (PPO(c=0.05), 0)], ids=repr
)
def test_self_play_finds_perfect_play(make_row, tmp_path, method: Method, lag: int) -> None:  # noqa: ANN001
    rows = [
        make_row([*asked(left), move, END, USER], [(4, 4, 0.0)])
        for left in range(STONES + 1)
        for move in range(len(WORDS))
    ]
    policy = tabular_policy(tabular_lm(rows, len(WORDS), key=since_last_asked), method)
    prior = Prior([tabular_lm(rows, len(WORDS), key=since_last_asked)])
    versions, opponent, tokenizer = Versions(policy, lag=lag), Opponent(policy), words()
    how = Decoding(max_new_tokens=1)
    more = {"self_play": True, "versions": versions, "opponent": opponent if lag else None}
    play = Rollouts(Nim, how, groups=16, group_size=8, seed=0, batch_size=128, **more)
    settings = OnlineSettings(
        max_steps=45, learning_rate=0.3, warmup_steps=0, eval_steps=0, value_unit=1.0, report_to="none",
        logging_steps=45, per_device_train_batch_size=400,
    )  # fmt: skip
    trainer = OnlineTrainer(
        policy, tokenizer, play, settings, tmp_path / "run", prior=prior, versions=versions
    )
    trainer.train()
    learned = Learned(policy)
    for left, move in BEST.items():
        assert learned.chances(asked(left))[move] > 0.9, left
    playing = Playing(Nim, how, 1, 7, 192, self_play=True)
    opened = [each for each in playing(policy, tokenizer, range(192)) if each.opens]
    won = {
        n: np.mean([each.total > 0 for each in opened if each.dialog.messages[0]["content"] == f"left{n}"])
        for n in (3, 4, 5)
    }
    assert won[3] < 0.15 and min(won[4], won[5]) > 0.85
