"""Whoever opens a model of transformers reads no pickle, and draws no weight at random without a word."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_dialog.data.labelled import LabelledTurn
from rl_dialog.errors import UserError
from rl_dialog.models.nlu import Labels, load_nlu, new_nlu
from rl_dialog.models.text_reward import TextReward
from rl_dialog.rewards.encoder import Classifier, Encoder, Regression

TURN = LabelledTurn("hello", "user", (), (("greet", "", "", ""),))
LABELS = Labels((), TURN.acts, (), ((True, True),))


@pytest.fixture
def folder(tmp_path):
    """A trained reward model, which is an encoder with a head."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    TextReward.new(["hello there"], **size).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def nlu_folder(tmp_path):
    new_nlu([TURN], LABELS, hidden_size=32, num_hidden_layers=1, vocab_size=300).save(tmp_path / "nlu")
    return tmp_path / "nlu"


def base_of_nlu(path: str):
    return new_nlu([TURN], LABELS, encoder=path)


def base_of_reward(path: str):
    return TextReward.from_base(path, max_length=16)


OPENERS = {
    "encoder": Encoder,
    "regression": Regression,
    "nlu": base_of_nlu,
    "reward": TextReward.from_pretrained,
    "base": base_of_reward,
}


def pickle_weights(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def change_weights(folder, changed):
    """Without the weights that became None."""
    weights = load_file(folder / "model.safetensors") | changed
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("opener", [*OPENERS.values(), Classifier], ids=[*OPENERS, "classifier"])
def test_pickled_weights_are_refused(folder, opener):
    pickle_weights(folder)
    with pytest.raises(UserError, match="got pytorch_model.bin, a pickle, which is not read: where"):
        opener(str(folder))


@pytest.mark.parametrize("damage", ["missing", "of another shape"])
@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
def test_a_trunk_without_one_of_its_weights_is_refused(folder, opener, damage):
    name = "model.final_norm.weight"
    change_weights(folder, {name: None if damage == "missing" else torch.ones(3)})
    found = "no .*final_norm" if damage == "missing" else r"final_norm.weight of shape \(3,\) instead of \(32"
    with pytest.raises(UserError, match=found):
        opener(str(folder))


def test_only_a_model_that_learns_on_may_lack_a_head(folder):
    change_weights(folder, {"classifier.weight": None, "classifier.bias": None})
    for opener in (Encoder, base_of_nlu, base_of_reward):
        opener(str(folder))
    for opener in (TextReward.from_pretrained, Regression):
        with pytest.raises(UserError, match="no classifier.bias, no classifier.weight"):
            opener(str(folder))


def test_a_saved_nlu_is_refused_with_a_pickle_or_without_a_weight(nlu_folder):
    change_weights(nlu_folder, {"final_norm.weight": None})
    with pytest.raises(UserError, match="found no final_norm.weight: copy config.json and weights"):
        load_nlu(nlu_folder)
    pickle_weights(nlu_folder)
    with pytest.raises(UserError, match="got pytorch_model.bin, a pickle"):
        load_nlu(nlu_folder)


@pytest.mark.parametrize("pickled", ["adapters", "base"])
def test_adapters_and_their_base_are_no_pickles_either(folder, tmp_path, pickled):
    from peft import LoraConfig, get_peft_model

    reward = TextReward.from_pretrained(folder)
    adapted = get_peft_model(reward.model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear"))
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapters = tmp_path / "adapters"
    adapted.save_pretrained(adapters)
    reward.tokenizer.save_pretrained(adapters)
    TextReward.from_pretrained(adapters)
    if pickled == "base":
        pickle_weights(folder)
    else:
        stored = adapters / "adapter_model.safetensors"
        torch.save(load_file(stored), adapters / "adapter_model.bin")
        stored.unlink()
    name = "pytorch_model.bin" if pickled == "base" else "adapter_model.bin"
    with pytest.raises(UserError, match=f"got {name}, a pickle, which is not read"):
        TextReward.from_pretrained(adapters)
