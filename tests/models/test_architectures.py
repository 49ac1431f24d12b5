"""Tiny random models of many architectures train, evaluate, generate, chat, serve and get LoRA adapters.
What one cannot do it refuses, with its name and the reason; rl_dialog/models/README.md has the table."""

import queue
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM

from rl_dialog import models
from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import encode_prompt, tokenize
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, beam_replies, generate_replies, stream_reply
from rl_dialog.evaluation.scoring import logged_replies, score_replies
from rl_dialog.methods import BC, ILQL
from rl_dialog.models.causal_lm import drops
from rl_dialog.models.checkpoint import load_policy
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.serving.batch import Ask
from rl_dialog.serving.engine import Engine
from rl_dialog.training.loop import Trainer, TrainerConfig

pytestmark = pytest.mark.slow

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {"head_dim": 8}
WINDOW = {"sliding_window": 12}  # shorter than every prompt
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
BOTH = ["linear_attention", "full_attention"]
LINEAR = {
    "layer_types": BOTH,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
STATES = "got linear_attention"
MAMBA_LORA = "Incompatible modules"

SIZES = {  # what each architecture needs besides COMMON
    "llama": {},
    "qwen3": HEADS,
    "gemma": HEADS,
    "gemma3_text": HEADS | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": HEADS | WINDOW,
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"n_inner": 64},
    "falcon": {},
    "olmo2": {},
    "granite": {"logits_scaling": 8.0},
    "smollm3": {},
    "stablelm": {},
    "mixtral": HEADS | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": HEADS | EXPERTS | {"num_experts": 4},
    "gpt_oss": HEADS | WINDOW | EXPERTS | {"num_local_experts": 4},
    "gemma2": HEADS | WINDOW | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "gemma3": HEADS | WINDOW,
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba": {"state_size": 8},
    "qwen3_5_text": HEADS | LINEAR,
    "cohere": {"logit_scale": 0.25},
}
KEEPS_LESS = {"gemma3_text", "mistral", "gpt_oss", "gemma2", "gemma3", "mamba", "qwen3_5_text"}
REFUSED = {  # (architecture, verb): why
    ("bloom", "serve"): "bloom: cannot be served, its attention needs more than positions and a mask",
    ("mamba", "serve"): f"mamba: expected layers that attend to the conversation.*{STATES}",
    ("qwen3_5_text", "serve"): f"qwen3_5_text: expected layers that attend to the conversation.*{STATES}",
    ("mamba", "lora"): f"lora_target_modules all-linear: expected layers of a MambaForCausalLM.*{MAMBA_LORA}",
}
TALKS = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "user", "content": "what would you like to eat today?"},
        {"role": "assistant", "content": "tea"},
        {"role": "user", "content": "oh"},
    ],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "thank you, that is all"}],
]
SEEDS = [11, 12, 13]
GREEDY = Decoding(max_new_tokens=8, max_prompt_length=96, do_sample=False)
SAMPLED = Decoding(max_new_tokens=8, max_prompt_length=96)


def config_of(kind, vocabulary):
    sizes = COMMON | SIZES[kind] | {"vocab_size": vocabulary}
    if kind != "gemma3":
        return AutoConfig.for_model(kind, **sizes)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoConfig.for_model(kind, text_config=sizes, vision_config=vision)


@pytest.fixture(params=list(SIZES))
def model(request, tokenizer, tmp_path):
    """(architecture, folder) of a model whose next tokens are far from equally likely."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config_of(request.param, len(tokenizer)))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() >= 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    lm.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return request.param, tmp_path / "model"


def dialogs():
    def messages(i):
        return [
            {"role": "user", "content": "hello there " * (1 + i % 3)},
            {"role": "assistant", "content": "how are you?", "reward": float(i % 2)},
            {"role": "user", "content": "oh"},
            {"role": "assistant", "content": "thank you" * (1 + i % 2), "reward": 1.0},
        ]

    return [Dialog(str(i), messages(i)) for i in range(6)]


def train(folder, tokenizer, out, method, *, steps=2, learning_rate=1e-3, **model):
    """The policy that a short run leaves."""
    config = ModelConfig(model_name_or_path=str(folder), heads="mlp", **model)
    policy = Policy(load_lm(config, tokenizer), method, config)
    settings = {"max_steps": steps, "learning_rate": learning_rate, "report_to": "none"}
    rows = [row for dialog in dialogs() for row in tokenize(dialog, tokenizer, max_length=200)]
    run = TrainerConfig(per_device_train_batch_size=3, logging_steps=1, save_steps=1, **settings)
    result = Trainer(policy, tokenizer, rows, rows[:2], run, out).train()
    assert all(np.isfinite(value) for value in result.values() if isinstance(value, float)), result
    return load_policy(out)


def evaluates(policy, tokenizer):
    """Held-out replies scored in one batch and one by one."""
    logged = logged_replies(dialogs(), tokenizer, max_length=200)
    together, alone = (score_replies(policy, logged, tokens_per_batch=n) for n in (8192, 1))
    for name in ("nll", "lm_nll", "q", "v_last"):
        np.testing.assert_allclose(getattr(together, name), getattr(alone, name), rtol=1e-3, atol=1e-3)


def generates(policy, tokenizer):
    """In one batch what each says alone; with a cache what is likeliest without one."""
    for decoding in (GREEDY, SAMPLED):
        together = generate_replies(policy, tokenizer, TALKS, decoding, seeds=SEEDS)
        for talk, seed, reply in zip(TALKS, SEEDS, together, strict=True):
            (alone,) = generate_replies(policy, tokenizer, [talk], decoding, seeds=[seed])
            assert reply.tokens == alone.tokens
            assert decoding is SAMPLED or likeliest(policy, tokenizer, talk, reply.tokens)
    assert len(beam_replies(policy, tokenizer, TALKS[1], Decoding(5, 96, False, num_beams=3))) == 3


def likeliest(policy, tokenizer, talk, tokens):
    said = encode_prompt(talk, tokenizer, max_length=96)
    with torch.no_grad():
        logits = policy(torch.tensor([[*said, *tokens]]), use_cache=False).logits[0, len(said) - 1 : -1]
    taken = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    return bool((taken >= logits.amax(1) - 1e-3).all())


def chats(policy, tokenizer):
    for talk in TALKS:
        (expected,) = generate_replies(policy, tokenizer, [talk], SAMPLED, seeds=[4])
        assert stream_reply(policy, tokenizer, talk, SAMPLED, seed=4).tokens == expected.tokens


def serves(policy, tokenizer):
    """Three chats in the slots at once, prompts read in pieces: what is said without a server."""
    engine = Engine(policy, tokenizer, slots=2, kept=1, piece=16)
    try:
        for decoding in (GREEDY, SAMPLED):
            heard = [queue.Queue() for _ in TALKS]
            for talk, seed, out in zip(TALKS, SEEDS, heard, strict=True):
                prompt = encode_prompt(talk, tokenizer, max_length=96)
                engine.submit(Ask(prompt, decoding, seed), out.put)
            expected = generate_replies(policy, tokenizer, TALKS, decoding, seeds=SEEDS)
            assert [text_of(out) for out in heard] == [r.text.replace("\0", "\ufffd") for r in expected]
    finally:
        engine.close()


def text_of(pieces):
    text, piece = "", None
    while piece is None or not piece.finish:
        piece = pieces.get(timeout=240)
        if isinstance(piece, Exception):
            raise piece
        text += piece.text
    return text.strip()


@torch.no_grad()
def logits(lm):
    return lm(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


VERBS = {"evaluate": evaluates, "generate": generates, "chat": chats, "serve": serves}


def test_what_rows_begin_with_alike_is_read_once(model, tokenizer, monkeypatch):
    """Losses and gradients are those of reading all rows; a model that keeps something else than the keys and
    values of all tokens reads all rows."""
    kind, folder = model
    config = ModelConfig(model_name_or_path=str(folder))
    policy = Policy(load_lm(config, tokenizer), BC(), config).eval()
    assert drops(policy.lm) == (kind in ("gpt2", "opt"))  # whose configs have 0.1
    batch = collate([row for dialog in dialogs() for row in tokenize(dialog, tokenizer, max_length=200)])
    rows, width = batch.input_ids.shape
    batch.input_ids[:, 1] = torch.arange(rows) % 2  # two beginnings of three tokens
    batch.beginning, batch.begun, batch.begins_like = 3, torch.tensor([0, 1]), torch.arange(rows) % 2
    passes, run = [], models.policy.run_trunk
    monkeypatch.setattr(
        models.policy,
        "run_trunk",
        lambda trunk, ids, *a, **k: passes.append(ids.shape) or run(trunk, ids, *a, **k),
    )
    found = []
    for each in (batch, replace(batch, begun=None)):
        policy.zero_grad()
        total, nll = policy.outputs(each).lm.nll(batch.actions)
        total.backward()
        found.append(
            {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}
        )
        found[-1]["nll"] = nll.detach()
    once, whole = found
    size = max(float(value.abs().max()) for value in whole.values())
    for name, value in whole.items():
        torch.testing.assert_close(once[name], value, rtol=1e-3, atol=1e-5 * size, msg=f"{kind} {name}")
    in_parts = [] if kind in KEEPS_LESS else [(2, 3), (rows, width - 3)]
    assert passes == [*(in_parts or [(rows, width)]), (rows, width)]


@pytest.mark.parametrize("method", [BC(), ILQL()], ids=["bc", "ilql"])
def test_every_verb_works_or_says_why_not(model, method, tokenizer, tmp_path):
    kind, folder = model
    policy = train(folder, tokenizer, tmp_path / "run", method)
    for verb, does in VERBS.items():
        if reason := REFUSED.get((kind, verb)):
            with pytest.raises(UserError, match=reason):
                does(policy, tokenizer)
        else:
            does(policy, tokenizer)


def test_adapters_are_trained_resumed_and_loaded_by_peft(model, tokenizer, tmp_path):
    kind, folder = model
    run = tmp_path / "run"
    if reason := REFUSED.get((kind, "lora")):
        with pytest.raises(UserError, match=reason):
            train(folder, tokenizer, run, BC(), use_peft=True)
        if kind != "mamba":
            return
    more = {"lora_target_modules": "in_proj, x_proj"} if kind == "mamba" else {}
    more |= {"use_peft": True, "lora_r": 2, "learning_rate": 0.1}
    for steps in (1, 2):
        train(folder, tokenizer, run, BC(), steps=steps, **more)
    checkpoint = run / "checkpoint-2"
    policy = load_policy(checkpoint)
    generates(policy, tokenizer)
    assert not list(checkpoint.rglob("model.safetensors"))
    plain = AutoPeftModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(plain), logits(policy.lm), rtol=1e-3, atol=1e-3)
    with plain.disable_adapter():
        assert not torch.allclose(logits(plain), logits(policy.lm), atol=0.05)  # they do say something
