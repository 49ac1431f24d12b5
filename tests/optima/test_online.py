"""The real online loop on a table reaches p exp(R / c) / Z, the optimum of E[R] - c KL(pi || p).

A world of one word per turn. After `go`, A earns 1, C earns -1, whatever else earns nothing, and the
conversation is over; B earns nothing yet and leads to `then`, where A costs 2, B earns 2.5 and C earns 1. On
average `then` is worth less than A; for a policy that knows what to say there it is worth more.
"""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import GRPO, PPO, RLOO, Method, Reinforce
from rl_dialog.models.prior import Prior
from rl_dialog.training.online import OnlineSettings, OnlineTrainer
from tests.optima.tabular import Learned, TabularLM, tabular_lm, tabular_policy

PAD, END, USER, BOT, GO_WORD, THEN_WORD, A, B, C = range(9)
WORDS = ("<pad>", "<end>", "<u>", "<a>", "go", "then", "A", "B", "C")
GO = [USER, GO_WORD, END, BOT]
THEN = [*GO, B, END, USER, THEN_WORD, END, BOT]
FIRST, SECOND = {"A": 1.0, "C": -1.0}, {"A": -2.0, "B": 2.5, "C": 1.0}
TEMPLATE = (
    "{% for m in messages %}{{ '<u> ' if m['role'] == 'user' else '<a> ' }}{{ m['content'] }} <end> "
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


class Letters:
    """The world above."""

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        self.messages = [{"role": "user", "content": "go"}]
        return list(self.messages), {}

    def step(self, reply):  # noqa: ANN001, ANN201
        second = len(self.messages) > 1
        self.messages.append({"role": "assistant", "content": reply})
        over = second or reply != "B"
        if not over:
            self.messages.append({"role": "user", "content": "then"})
        return list(self.messages), (SECOND if second else FIRST).get(reply, 0.0), over, False, {}


def words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<u>", "<a>"],
    )
    found.chat_template = TEMPLATE
    return found


def place(ids: tuple[int, ...]) -> tuple[int, int]:
    """Turn, and tokens since it began: what was said before does not matter."""
    starts = [i for i, token in enumerate(ids) if token == BOT]
    return len(starts), len(ids) - (starts[-1] if starts else 0)


@pytest.fixture
def learn(make_row, tmp_path):  # noqa: ANN001, ANN201
    """learn(method, rounds=..., rate=..., episodes=..., how=...): a `Learned` after rounds of groups of
    four."""

    def run(method: Method, *, rounds=40, rate=0.3, episodes=192, decoding=None):  # noqa: ANN001, ANN202
        def table() -> TabularLM:
            return tabular_lm([make_row([*THEN, A], [(len(THEN), len(THEN), 0.0)])], len(WORDS), key=place)

        decoding = decoding or Decoding(max_new_tokens=1)
        settings = OnlineSettings(
            max_steps=rounds,
            learning_rate=rate,
            warmup_steps=0,
            eval_steps=0,
            value_unit=1.0,
            report_to="none",
            logging_steps=rounds,
            per_device_train_batch_size=episodes,
        )
        play = Rollouts(Letters, decoding, groups=episodes // 4, group_size=4, seed=0, batch_size=episodes)
        policy = tabular_policy(table(), method)
        OnlineTrainer(
            policy,
            words(),
            play,
            settings,
            tmp_path / "run",
            prior=Prior([table()]),
            temperature=decoding.temperature,
        ).train()
        return Learned(policy)

    return run


def optimum(c: float) -> tuple[list[float], list[float]]:
    """Of both turns, from a uniform prior: what `then` is worth is c log E_p exp(r / c)."""
    later = [math.exp(SECOND.get(word, 0.0) / c) for word in WORDS]
    first = [math.exp(FIRST.get(word, 0.0) / c) for word in WORDS]
    first[B] = sum(later) / len(WORDS)
    return [weight / sum(first) for weight in first], [weight / sum(later) for weight in later]


@pytest.mark.parametrize(
    "method",
    [
        RLOO(c=1.0),
        pytest.param(Reinforce(c=1.0, baseline="leave_one_out"), marks=pytest.mark.slow),
        pytest.param(Reinforce(c=1.0, baseline="none"), marks=pytest.mark.slow),
        pytest.param(PPO(c=1.0), marks=pytest.mark.slow),
        pytest.param(
            GRPO(c=1.0, kl="reward", divide_by_deviation=False, divide_by_length=False),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda method: repr(method)[:60],
)
def test_the_optimum_near_the_prior(learn, method: Method) -> None:  # noqa: ANN001
    learned = learn(method)
    first, second = optimum(1.0)
    assert learned.chances(GO) == pytest.approx(first, abs=0.05)
    assert learned.chances(THEN) == pytest.approx(second, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [Reinforce(c=0.02), GRPO(c=0.0), PPO(c=0.02)],
    ids=lambda method: repr(method)[:60],
)
def test_a_weak_prior_lets_the_best_conversation_win(learn, method: Method) -> None:  # noqa: ANN001
    """It goes through a turn that earns nothing by itself."""
    learned = learn(method, rounds=60)
    assert learned.greedy(THEN) == B and learned.chances(THEN)[B] > 0.8
    assert learned.greedy(GO) == B and learned.chances(GO)[B] > 0.8


@pytest.mark.slow
def test_the_policy_at_a_temperature_is_what_learns(learn) -> None:  # noqa: ANN001
    """Drawn at 2, the optimum is that of the policy at 2: half of its logits are log p + R / c."""
    learned = learn(RLOO(c=1.0), rate=0.5, decoding=Decoding(max_new_tokens=1, temperature=2.0))
    chances = learned.logits(THEN).div(2).softmax(-1).tolist()
    assert chances == pytest.approx(optimum(1.0)[1], abs=0.05)


@pytest.mark.slow
def test_k3_ends_where_its_own_divergence_does(learn) -> None:  # noqa: ANN001
    """It descends KL(p || pi): pi (r - E r) = c (pi - p) in a state that is reached always."""
    learned = learn(RLOO(c=2.0, kl="k3"))
    pi = torch.tensor(learned.chances(GO))
    later = torch.tensor(learned.chances(THEN))
    r = torch.tensor([FIRST.get(word, 0.0) for word in WORDS])
    r[B] = sum(chance * SECOND.get(word, 0.0) for chance, word in zip(later.tolist(), WORDS, strict=True))
    slope = pi * (r - (pi * r).sum())
    assert (slope - 2.0 * (pi - 1 / len(WORDS))).abs().max() < 0.05
    assert slope.abs().max() > 0.1
