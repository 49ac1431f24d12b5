"""Weights, order, coverage and the names of rewards."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import REWARDS, apply_rewards, choose_rewards


def talk():
    return Dialog(
        id="d",
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "how are you ?", "feedback": {"vote": 1}, "reward": 7, "rewards": {"learned": 2.0, "vote": -1}},
            {"role": "user", "content": "fine"},
            {"role": "assistant", "content": "bye"},
        ],
    )


def test_components_and_their_weighted_sum_are_written_into_the_replies():
    dialog = talk()
    weights = {"question": 0.5, "vote": 2.0, "answer_length": 0.0}
    table = apply_rewards(dialog, choose_rewards(weights), weights)
    np.testing.assert_allclose(table, [[1.0, 1.0, 1 / 30, 2.5], [0.0, math.nan, math.nan, 0.0]])
    assert dialog.messages[1]["rewards"] == {"learned": 2.0, "question": 1.0, "vote": 1.0, "answer_length": 1 / 30}
    assert dialog.messages[1]["reward"] == 2.5
    assert dialog.messages[3]["rewards"] == {"question": 0.0}
    assert dialog.messages[3]["reward"] == 0.0
    assert "reward" not in dialog.messages[0]
    assert Dialog.from_json(dialog.to_json()) == dialog


def test_every_reward_gives_one_number_or_none_per_reply_and_travels_to_workers():
    for name, reward in REWARDS.items():
        values = pickle.loads(pickle.dumps(reward))(talk())
        assert len(values) == 2, name
        assert all(value is None or isinstance(value, float) for value in values), name


def test_a_named_rating_is_chosen_and_an_unknown_reward_is_an_error():
    dialog = talk()
    dialog.meta = {"ratings": {"quality": 5, "fluency": 1}}
    assert choose_rewards(["rating"], rating_name="fluency")["rating"](dialog) == [None, 1]
    with pytest.raises(ValueError, match="unknown reward 'votes': expected one of vote, rating"):
        choose_rewards(["votes"])


@pytest.mark.parametrize(("values", "message"), [([1.0], "expected 2 numbers, .* got 1"), ([1.0, math.nan], "finite numbers or None, got nan")])
def test_a_reward_that_breaks_its_promise_is_named(values, message):
    with pytest.raises(ValueError, match=f"reward 'mine', dialog 'd': .*{message}"):
        apply_rewards(talk(), {"mine": lambda dialog: values}, {"mine": 1.0})


def test_rewards_and_shards_import_neither_torch_nor_ray():
    code = "import sys, rl_dialog.rewards, rl_dialog.data.shards; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
