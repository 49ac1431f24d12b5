"""The reward model over text: what it reads, what it writes, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from rl_dialog.cluster.candidate_folder import check_vocabulary, longest_row
from rl_dialog.errors import UserError
from rl_dialog.methods import ILQL
from rl_dialog.models.causal_lm import open_causal_lm
from rl_dialog.models.text_reward import TextReward, adapters, check_base

TALK = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you today?"}]
TALKS = [
    TALK,
    [*TALK, {"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "that is all"}],
    [*TALK[:1], {"role": "assistant", "content": ""}],
]


def new(**settings):
    torch.manual_seed(0)
    return TextReward.new(
        ["hello there, how are you today?", "that is all"] * 5, hidden_size=32, vocab_size=300, **settings
    )


@pytest.fixture
def like_trl(tokenizer, tmp_path):
    """A causal LM with a scalar head whose padding is its end of sequence, as TRL's reward trainer saves
    it."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.eos_token_id, **shape
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "trl")
    tokenizer.save_pretrained(tmp_path / "trl")
    return tmp_path / "trl"


def test_a_batch_scores_as_each_alone():
    reward = new().eval()
    together = reward.score(TALKS)
    assert together == pytest.approx([reward.score([talk])[0] for talk in TALKS], abs=1e-5)
    assert len({round(value, 4) for value in together}) == 3


def pretrained(kind, tokenizer, folder):
    """A small random encoder of a family, as its hub has it."""
    torch.manual_seed(0)
    names = {
        transformers.XLNetConfig: ("d_model", "n_layer", "n_head", "d_inner"),
        transformers.DistilBertConfig: ("dim", "n_layers", "n_heads", "hidden_dim"),
    }
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    shape = dict(zip(names.get(kind, usual), (16, 1, 2, 32), strict=True))
    limit = {} if kind is transformers.XLNetConfig else {"max_position_embeddings": 40}
    config = kind(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape, **limit)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["Roberta", "MPNet", "Bert", "XLNet"])
def test_a_reply_longer_than_a_model_has_positions_is_cut(kind, tokenizer, tmp_path):
    base = pretrained(getattr(transformers, f"{kind}Config"), tokenizer, tmp_path)
    reward = TextReward.from_base(base, max_length=64).eval()
    offset = {"Roberta": tokenizer.pad_token_id + 1, "MPNet": 2}.get(kind, 0)
    assert reward.max_length == (64 if kind == "XLNet" else 40 - offset), kind
    talks = [*TALKS, [*TALK[:1], {"role": "assistant", "content": "z" * 300}]]
    assert len(reward.encode(talks[-1])) == reward.max_length
    alone = [reward.score([talk])[0] for talk in talks]
    assert reward.score(talks) == pytest.approx(alone, abs=1e-5), "whatever padding is beside it"


def test_a_config_without_padding_gets_the_tokenizers(tokenizer, tmp_path):
    """Early LLaMAs say -1."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=-1, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = TextReward.from_base(str(tmp_path), max_length=64).eval()
    assert reward.score(TALKS) == pytest.approx([reward.score([talk])[0] for talk in TALKS], abs=1e-5)


def test_the_head_of_distilbert_learns_below_adapters(tokenizer, tmp_path):
    base = pretrained(transformers.DistilBertConfig, tokenizer, tmp_path)
    reward = TextReward.from_base(base, max_length=64)
    with adapters(reward, 2, 4):
        learned = {name for name, one in reward.model.named_parameters() if one.requires_grad}
        heads = {name for name in learned if "classifier" in name}
        assert heads and not any("lora" in name for name in heads)
        assert any("lora" in name for name in learned)
    assert type(reward.model.pre_classifier) is torch.nn.Linear


def test_the_reply_and_its_context_both_count():
    reward = new().eval()
    other_reply, other_context = (
        [TALK[0], {"role": "assistant", "content": "no"}],
        [{"role": "user", "content": "bye"}, TALK[1]],
    )
    assert len({round(value, 4) for value in reward.score([TALK, other_reply, other_context])}) == 3


def test_what_is_saved_is_a_from_pretrained_directory(tmp_path):
    reward = new(max_length=40).eval()
    reward.save_pretrained(tmp_path)
    again = TextReward.from_pretrained(tmp_path)
    assert again.score(TALKS) == pytest.approx(reward.score(TALKS), abs=1e-5) and again.max_length == 40
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForSequenceClassification.from_pretrained(tmp_path).eval(),
    )
    ids = tokenizer.apply_chat_template(TALK, return_dict=True, return_tensors="pt")
    assert model.config.num_labels == 1 and model(**ids).logits.item() == pytest.approx(
        reward.score([TALK])[0], abs=1e-5
    )


def test_models_of_trl_load(like_trl):
    reward = TextReward.from_pretrained(like_trl)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(like_trl),
        AutoModelForSequenceClassification.from_pretrained(like_trl).eval(),
    )
    alone = [
        model(**tokenizer.apply_chat_template(talk, return_dict=True, return_tensors="pt")).logits.item()
        for talk in TALKS
    ]
    assert reward.score(TALKS) == pytest.approx(alone, abs=1e-5)


def test_a_policy_becomes_a_reward_model(checkpoints, tmp_path):
    reward = TextReward.from_base(checkpoints["bc"], max_length=64)
    assert reward.model.config.num_labels == 1
    trunk = TextReward.from_base(checkpoints["bc"], max_length=64).model.base_model.state_dict()
    assert all(
        torch.equal(value, trunk[name]) for name, value in reward.model.base_model.state_dict().items()
    )  # of the policy, not new
    reward.eval().save_pretrained(tmp_path)
    assert TextReward.from_pretrained(tmp_path).score(TALKS) == pytest.approx(reward.score(TALKS), abs=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_policy_with_adapters_becomes_a_reward_model_that_learns(make_policy, tokenizer, tmp_path, rank):
    """Of the model that the adapters make; what they belong to alone would be another policy's."""
    policy = make_policy(ILQL(), "llama", peft=True)
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    check_base(str(tmp_path))
    assert longest_row(tmp_path, 10_000) < 10_000 and check_vocabulary(tmp_path) is None
    reward = TextReward.from_base(str(tmp_path), max_length=64)
    ids = torch.arange(5)[None]
    merged = open_causal_lm(str(tmp_path)).base_model(input_ids=ids).last_hidden_state
    found = reward.model.base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, merged)
    assert (merged - open_causal_lm(str(tmp_path / "base")).base_model(input_ids=ids)[0]).abs().max() > 1e-2
    with adapters(reward, rank, 4):
        assert any(parameter.requires_grad for parameter in reward.model.parameters())
    assert all(parameter.requires_grad for parameter in reward.model.parameters())


@pytest.mark.parametrize("rank", [0, 2])
def test_tokens_that_a_base_did_not_know_begin_apart_below_adapters(like_trl, rank):
    """Such as those of roles, without which nobody knows who speaks: adapters let them stay as they begin.
    Where everything learns they begin alike."""
    base = LlamaForSequenceClassification.from_pretrained(like_trl)
    known = base.config.vocab_size - 40
    base.resize_token_embeddings(known)
    base.save_pretrained(like_trl)
    reward = TextReward.from_base(str(like_trl), max_length=64)
    with adapters(reward, rank, 4):
        pass
    table = reward.model.get_input_embeddings().weight.detach()
    assert torch.equal(table[:known], base.get_input_embeddings().weight)
    apart = torch.pdist(table[known:]).mean() / torch.pdist(table[:known]).mean()
    assert apart > 0.5 if rank else apart < 0.01


def test_of_long_conversations_the_system_prompt_and_the_end_are_read():
    reward = new(max_length=40)
    system, old = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "something long ago " * 20},
    )
    cut = reward.encode([system, old, *TALK])
    assert len(cut) <= 40 and cut == reward.encode([system, *TALK])
    assert (
        reward.encode([{"role": "user", "content": "y"}, {"role": "assistant", "content": "z" * 200}])[-1]
        == reward.tokenizer.eos_token_id
    )


def test_a_tool_call_is_read_as_its_json():
    reward = new()
    call = [{"function": {"name": "menu", "arguments": "{}"}}]
    written = {"role": "assistant", "content": json.dumps(call)}
    assert reward.encode(
        [TALK[0], {"role": "assistant", "content": None, "tool_calls": call}]
    ) == reward.encode([TALK[0], written])


def test_what_is_no_reward_model_is_refused(checkpoints, like_trl, tmp_path):
    with pytest.raises(
        UserError,
        match="expected a trained reward model with one output, got a model of which the files have no score",
    ):
        TextReward.from_pretrained(checkpoints["bc"])
    with pytest.raises(UserError, match="found nothing there"):
        TextReward.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="expected a reward model"):
        TextReward.from_pretrained(tmp_path / "empty")
    config = json.loads((like_trl / "config.json").read_text())
    (like_trl / "config.json").write_text(
        json.dumps(config | {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}})
    )
    with pytest.raises(UserError, match="expected"):
        TextReward.from_pretrained(like_trl)


def test_an_encoder_with_a_decoder_is_refused(tokenizer, tmp_path):
    """Its head reads the last of as many ends of a sequence as all conversations of a batch must have."""
    shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "num_labels": 1}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **shape)
    T5ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    base = lambda path: TextReward.from_base(path, max_length=64)  # noqa: E731
    for refuse in (base, TextReward.from_pretrained, check_base):
        with pytest.raises(UserError, match="expected an encoder or a language model, got a t5, an encoder"):
            refuse(str(tmp_path))


def test_damaged_weights_and_a_missing_template_are_refused(like_trl, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(like_trl)
    tokenizer.chat_template = None
    (like_trl / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(like_trl)
    with pytest.raises(UserError, match="chat template"):
        TextReward.from_pretrained(like_trl)
    (like_trl / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match="expected a reward model"):
        TextReward.from_pretrained(like_trl)
    with pytest.raises(UserError, match="--model_name_or_path"):
        TextReward.from_base(str(like_trl), max_length=10)
