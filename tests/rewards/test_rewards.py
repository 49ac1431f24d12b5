"""Weights, order, coverage and the names of rewards."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog, DialogError
from rl_dialog.errors import UserError
from rl_dialog.rewards import COLUMNS_2019, COMPAT, REWARDS, Statistics, apply_rewards, choose_rewards
from rl_dialog.rewards.choosing import prepared_rewards


def talk():
    return Dialog(
        id="d",
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "how are you ?",
                "feedback": {"vote": 1},
                "reward": 7,
                "rewards": {"learned": 2.0, "vote": -1},
            },
            {"role": "user", "content": "fine"},
            {"role": "assistant", "content": "bye"},
        ],
    )


def test_components_and_their_weighted_sum_are_written_into_the_replies():
    dialog = talk()
    weights = {"question": 0.5, "vote": 2.0, "answer_length": 0.0}
    table = apply_rewards(dialog, choose_rewards(weights), weights)
    np.testing.assert_allclose(table, [[1.0, 1.0, 1 / 30, 2.5], [0.0, math.nan, math.nan, 0.0]])
    assert dialog.messages[1]["rewards"] == {
        "learned": 2.0,
        "question": 1.0,
        "vote": 1.0,
        "answer_length": 1 / 30,
    }
    assert dialog.messages[1]["reward"] == 2.5
    assert dialog.messages[3]["rewards"] == {"question": 0.0}
    assert dialog.messages[3]["reward"] == 0.0
    assert "reward" not in dialog.messages[0]
    assert Dialog.from_json(dialog.to_json()) == dialog


def test_a_reply_that_no_component_with_a_weight_applies_to_has_no_reward():
    """Nobody voted on the second reply; that `question` applies to it changes nothing: it has no weight."""
    found = []
    for weights in ({"vote": 2.0}, {"vote": 2.0, "question": 0.0}):
        dialog = talk()
        dialog.messages[3]["reward"] = 7.0  # the log's own
        table = apply_rewards(dialog, choose_rewards(weights), weights)
        np.testing.assert_array_equal(table[:, -1], [2.0, math.nan])
        assert Dialog.from_row(dialog.to_row()) == dialog
        found.append([dialog.messages[i]["reward"] for i in dialog.replies])
    assert found == [[2.0, None]] * 2
    assert dialog.messages[3]["rewards"] == {"question": 0.0}
    summary = Statistics.of(table).summary(weights)
    assert summary["sum"] == {"mean": 2.0, "std": 0.0, "min": 2.0, "max": 2.0, "coverage": 0.5}
    assert summary["components"]["question"]["coverage"] == 1


def test_weights_that_are_all_zero_make_no_reward():
    dialog, weights = talk(), {"question": 0.0}
    apply_rewards(dialog, choose_rewards(weights), weights)
    assert [dialog.messages[i]["reward"] for i in dialog.replies] == [None, None]


def test_every_reward_gives_one_number_or_none_per_reply_and_travels_to_workers():
    for name, reward in REWARDS.items():
        values = pickle.loads(pickle.dumps(reward))(talk())
        assert len(values) == 2, name
        assert all(value is None or isinstance(value, float) for value in values), name


def test_a_named_rating_is_chosen_and_an_unknown_reward_is_an_error():
    dialog = talk()
    dialog.meta = {"ratings": {"quality": 5, "fluency": 1}}
    assert choose_rewards(["rating"], rating_name="fluency")["rating"](dialog) == [None, 1]
    with pytest.raises(UserError, match="unknown reward 'votes': expected one of vote, rating"):
        choose_rewards(["votes"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "expected 2 numbers, .* got 1"),
        ([1.0, math.nan], "finite numbers or None, got nan"),
        ([1.0, 10**400], "finite numbers or None, got 1000"),
    ],
)
def test_a_reward_that_breaks_its_promise_is_named(values, message):
    with pytest.raises(UserError, match=f"reward 'mine', dialog 'd': .*{message}"):
        apply_rewards(talk(), {"mine": lambda dialog: values}, {"mine": 1.0})


def test_rewards_too_large_to_learn_from_are_an_error_of_the_dialog():
    """Their squares would be infinite in the statistics of all others, and they themselves in float32."""
    for value, weight, got in ((1e200, 1.0, r"1e\+200"), (-1e30, -10.0, r"1e\+31")):
        with pytest.raises(
            DialogError, match=rf"dialog 'd': expected rewards and .* to 1e\+30, .* got {got}"
        ):
            apply_rewards(talk(), {"mine": lambda dialog, v=value: [None, v]}, {"mine": weight})
    for one, other in ((1e308, 1e308), (1e308, -1e308)):  # and so would their sum be, or nothing at all
        rewards = {"one": lambda dialog, v=one: [v, v], "other": lambda dialog, v=other: [v, v]}
        with pytest.raises(DialogError, match=r"dialog 'd': expected rewards and .* got "):
            apply_rewards(talk(), rewards, {"one": 10.0, "other": 10.0})
    both = talk()
    both.meta["ratings"] = {"quality": 1e308, "fluency": 1e308}
    with pytest.raises(DialogError, match=r"dialog 'd': expected ratings .* got inf"):
        apply_rewards(both, choose_rewards({"rating": 1.0}), {"rating": 1.0})


def test_rewards_and_shards_import_neither_torch_nor_ray():
    code = (
        "import sys, rl_dialog.rewards, rl_dialog.data.shards; print(sorted({'torch', 'ray', 'transformers'} "
        "& set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's: own(code) writes it and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code):
        name = f"own_{abs(hash(code))}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def test_a_reward_of_the_user_s_own(own):
    name = (
        own(
            "def shouts(dialog):\n    return [dialog.messages[i]['content'].count('!') for i in "
            "dialog.replies]\n"
        )
        + ":shouts"
    )
    dialog = talk()
    table = apply_rewards(dialog, choose_rewards({name: 2.0}), {name: 2.0})
    counts = [dialog.messages[i]["content"].count("!") for i in dialog.replies]
    assert table.tolist() == [[float(n), 2.0 * n] for n in counts]
    assert [dialog.messages[i]["rewards"][name] for i in dialog.replies] == [float(n) for n in counts]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1 / 0]", "ZeroDivisionError: division by zero in line 2 of /.*py$"),
        ("return [1.0]", "expected 2 numbers, one per reply, got 1"),
        ("return [1.0, float('nan')]", "expected finite numbers or None, got nan"),
        ("return [1.0, 'good']", "expected finite numbers or None, got 'good'"),
        ("return None", "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_what_is_wrong_with_it_names_the_dialog(own, body, message):
    name = own(f"def mine(dialog):\n    {body}\n") + ":mine"
    with pytest.raises(UserError, match=f"reward '{name}', dialog 'd': {message}"):
        apply_rewards(talk(), choose_rewards([name]), {name: 1.0})


def test_a_module_that_is_not_there_or_not_right(own):
    for name, reason in (
        ("nowhere_to_be_found:f", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        (own("x = 1\n") + ":f", "AttributeError"),
        (own("def f(:\n") + ":f", "SyntaxError"),
        (own("f = 3\n") + ":f", "expected a function that takes a Dialog, got 3"),
    ):
        with pytest.raises(UserError, match=f"reward '{name}': .*{reason}"):
            choose_rewards([name])


def test_prepared_rewards_read_the_same_rating_and_columns():
    dialog = talk()
    dialog.meta = {"ratings": {"quality": 5, "fluency": 1}}
    [rating] = prepared_rewards(["rating"], {"rating": "fluency"})[0].values()
    assert rating(dialog) == [None, 1]
    rewards, missing = prepared_rewards(["laughter", "repetition"], {"compat": "2019"})
    assert rewards == {"laughter": COMPAT["2019"]["laughter"][0]}
    assert missing["repetition"].startswith("--compat 2019: 'repetition' is not known")


def test_the_2019_columns_are_known_by_their_names():
    assert set(COLUMNS_2019.values()) <= set(REWARDS)
    assert choose_rewards(["laughter"], compat="2019")["laughter"] is COMPAT["2019"]["laughter"][0]
    with pytest.raises(
        UserError,
        match="'repetition' is not known as the 2019 code computed it, expected some of you, answer_length",
    ):
        choose_rewards(["repetition"], compat="2019")
