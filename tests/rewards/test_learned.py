"""The reward of a model that learned from preferences."""

from __future__ import annotations

import pytest
import torch

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.rewards import apply_rewards, choose_rewards
from rl_dialog.rewards.choosing import load_rewards, scorer_names
from rl_dialog.rewards.learned import LATEST, learned
from rl_dialog.rewards.scorers import Scorer, in_batches, make_scorers

CALL = [{"function": {"name": "menu", "arguments": "{}"}}]


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    TextReward.new(
        ["hello there, how are you", "that is all"], hidden_size=32, vocab_size=300, max_length=64
    ).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def talk(number):
    return Dialog(
        f"d{number}",
        [
            {"role": "assistant", "content": "welcome"},
            {"role": "user", "content": f"hello {number}"},
            {"role": "assistant", "content": None, "tool_calls": CALL, "weight": 0},
            {"role": "assistant", "content": "how are you"},
            {"role": "user", "content": "fine"},
            {"role": "assistant", "content": "that is all"},
        ],
    )


def test_each_reply_is_scored_behind_everything_before_it(model):
    scorers = make_scorers([f"reward_model={model}"])
    dialog = talk(1)
    opening, middle, last = learned(dialog, reward_model=scorers["reward_model"])
    reward = TextReward.from_pretrained(model)
    assert opening is None
    assert [middle, last] == pytest.approx(reward.score([dialog.messages[:4], dialog.messages[:6]]), abs=1e-5)
    assert middle != pytest.approx(
        learned(talk(2), reward_model=scorers["reward_model"])[1], abs=1e-5
    )  # the context counts


def test_dialogs_scored_together_are_scored_as_alone(model):
    alone = [
        learned(talk(n), reward_model=make_scorers([f"reward_model={model}"])["reward_model"])
        for n in range(5)
    ]
    scorers = make_scorers([f"reward_model={model}"])
    rewards = choose_rewards(["learned"], scorers=scorers)
    together = [
        apply_rewards(dialog, rewards, {"learned": 1.0})[:, 0].tolist()
        for dialog in in_batches(
            [talk(n) for n in range(5)], list(rewards.values()), [scorers["reward_model"]]
        )
    ]
    for found, expected in zip(together, alone, strict=True):
        assert found[1:] == pytest.approx(expected[1:], abs=1e-5)


def test_it_does_not_apply_without_a_model():
    assert learned(talk(1)) == [None, None, None]


def test_it_wants_the_model_and_names_it(model):
    weights, plain = {"learned": 1.0}, {"rating": None, "compat": "", "label_weights": {}}
    assert set(load_rewards(weights, scorers=(f"reward_model={model}",), **plain)) == {"learned"}
    assert scorer_names(weights, compat="", scorers=(f"reward_model={model}",)) == {"learned": model}
    with pytest.raises(
        UserError, match=r"--rewards.learned: expected the model that it asks, --scorers reward_model=DIR"
    ):
        load_rewards(weights, scorers=(), **plain)
    with pytest.raises(UserError, match="found nothing there"):
        load_rewards(weights, scorers=("reward_model=./nowhere",), **plain)
    with pytest.raises(UserError, match="--label_weights: expected a classifier"):
        make_scorers([f"reward_model={model}"], label_weights={"good": 1.0})


def test_several_models_are_an_ensemble_whose_mean_counts(model, tmp_path):
    torch.manual_seed(1)
    other = str(tmp_path / "other")
    TextReward.new(["welcome hello fine"], hidden_size=32, vocab_size=300, max_length=64).save_pretrained(
        other
    )
    entries = [f"reward_model={model}", f"reward_model={other}"]
    first, second, both = (
        learned(talk(1), reward_model=make_scorers(some)["reward_model"])[1:]
        for some in (entries[:1], entries[1:], entries)
    )
    assert first != pytest.approx(second, abs=1e-3)
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)], abs=1e-5)
    named = scorer_names({"learned": 1.0}, compat="", scorers=entries)
    assert named == {"learned": f"{model}, {other}"}
    with pytest.raises(UserError, match="--scorers encoder=b: expected one model, got encoder=a too"):
        make_scorers(["encoder=a", "encoder=b"])


def test_of_a_long_conversation_the_model_is_shown_the_latest_messages():
    shown = []
    model = Scorer(
        "lengths", lambda talks: shown.extend(talks) or [float(len(turns)) for turns in talks], 0.0
    )
    messages = [
        {"role": "system", "content": "be kind"},
        *({"role": r, "content": f"{r} {i}"} for i in range(300) for r in ("user", "assistant")),
    ]
    lengths = learned(Dialog("long", messages), reward_model=model)
    assert lengths[:3] == [3.0, 5.0, 7.0] and max(lengths) == lengths[-1] == LATEST + 2
    assert shown[-1][0] == ("system", "be kind") and shown[-1][-1] == ("assistant", "assistant 299")
