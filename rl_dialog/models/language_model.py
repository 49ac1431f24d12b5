"""The language model of a policy, and the shape of its heads: what flags say of it, and how it is loaded or
made new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rl_dialog.data.tokenize import message_ends, special_ids
from rl_dialog.errors import UserError
from rl_dialog.models.causal_lm import open_causal_lm
from rl_dialog.models.hierarchical_config import HierarchicalConfig

# The hierarchical families, and what they draw a latent for.
LATENTS = {"hred": "none", "vhred": "message", "vhcr": "conversation"}
# Fields of a new model, and those of them that only some families use.
OF_NEW = ("family", "layers", "attention_heads", "width", "context", "dropout", "latent_size", "word_drop")
OF_NEW += ("sentence_drop", "kl_annealing", "free_bits", "bow_weight")
OF_TRANSFORMERS = ("attention_heads",)
HEAD_SIZE = 16  # of an attention head at least: with 8 numbers a clone of small talk returns .1 less
OF_HIERARCHICAL = ("word_drop", "sentence_drop")
OF_LATENTS = ("latent_size", "kl_annealing", "free_bits", "bow_weight")


@dataclass(frozen=True)
class ModelConfig:
    """The language model and the shape of its heads."""

    model_name_or_path: Annotated[str, tyro.conf.arg(prefix_name=False)] = ""
    """hub name or local directory of a causal LM (a checkpoint of ours too); empty builds a new one from the
    fields below"""
    family: Literal["llama", "gpt2", "hred", "vhred", "vhcr"] = "llama"
    """architecture of a new model; llama knows how far back a word is, so what it learns in one turn holds in
    all of them; hred reads a dialog message by message with GRUs, vhred draws a latent for each message that
    it says, and vhcr one for the conversation too"""
    layers: int | None = None
    """transformer blocks of a new model, by default 4; of a hierarchical one the GRUs on top of each other in
    its encoder and decoder, by default 1"""
    attention_heads: int | None = None
    """attention heads of a new transformer, which share its width; by default 8 of at least 16 numbers each,
    also where a llama is too narrow for that. Each can look at a place of its own, say a square of a board"""
    width: int = 128
    """hidden size of a new model"""
    context: int = 1024
    """longest input of a new model, in tokens"""
    dropout: float = 0.0
    """dropout of a new model; a llama has it in its attention only"""
    latent_size: int = 32
    """numbers in each latent of a new vhred or vhcr"""
    word_drop: float = 0.0
    """chance of each word that a new hierarchical model's decoder reads to be hidden while it clones"""
    sentence_drop: float = 0.0
    """chance of each message to be hidden from a new hierarchical model's context while it clones"""
    kl_annealing: float = 0.0
    """share of a run in which the weight of a latent's KL rises from 0 to 1 while it clones, in a new vhred
    or vhcr, which keeps it; as long as latents cost little the context is not listened to"""
    free_bits: float = 0.0
    """nats of KL that each latent of a new vhred or vhcr, which keeps them, may have for nothing; in the run
    that makes the model they are granted in its middle third, bit by bit, when its context is heard"""
    bow_weight: float = 0.0
    """weight of predicting the words of a message, in no order, from its latent, in a new vhred or vhcr"""
    emotion_weight: float = 0.0
    """weight of predicting how each message feels from the context's state behind it while it clones, in a
    new hierarchical model, which keeps it; wants data that was prepared with --teachers emotion"""
    embedding_weight: float = 0.0
    """the same of each message's sentence embedding; wants --teachers embedding"""
    heads: Literal["dueling", "mlp", "advanced_mlp", "lowrank"] = "dueling"
    """Q heads: mlp as published (2H x V numbers each), dueling (the same with a level for each state),
    advanced_mlp (a transformer's MLP block, 8H x H + H x V), or lowrank on top of the LM head (rank x V)"""
    rank: int = 32
    """rank of lowrank heads"""
    value_trunk: Literal["auto", "shared", "separate"] = "auto"
    """separate: Q and V read a transformer of their own, which begins as a copy of the LM's; shared: they
    read the LM's hidden states, which costs less, but values and words spoil each other's features; auto:
    separate, except with LoRA"""
    target_trunk: Literal["shared", "separate"] = "shared"
    """shared: the target heads read what the online ones read; separate: a Polyak-averaged copy of that
    transformer"""
    detach_q: bool = False
    """stop the gradient of Q at the heads: nothing below them learns from it"""
    detach_v: bool = False
    """stop the gradient of V at the heads"""
    detach_lm: bool = False
    """stop the gradient of cloning at the output layer, which alone learns the words"""
    use_peft: bool = False
    """train LoRA adapters instead of all of the LM; the LM without them is the frozen prior"""
    lora_r: int = 16
    """rank of the adapters"""
    lora_alpha: int = 32
    """scale of the adapters (alpha / r)"""
    lora_dropout: float = 0.0
    """dropout inside the adapters"""
    lora_target_modules: str = "all-linear"
    """comma-separated module names, or all-linear"""


def load_lm(
    config: ModelConfig,
    tokenizer: Any,
    *,
    teachers: Mapping[str, dict[str, Any]] | None = None,
    begun: Path | None = None,
) -> PreTrainedModel:
    """The causal LM of a ModelConfig in float32, with room for every token of the tokenizer. A reply ends at
    the tokenizer's end of turn, and at the special tokens that the model itself names as ends. `teachers`:
    those of the data, as its manifest has them; `begun`: a checkpoint of the run that goes on, whose new
    model was perhaps made otherwise than today. Raises UserError when it cannot be loaded."""
    chosen = chosen_teachers(config, teachers or {})
    if config.model_name_or_path:
        lm = open_causal_lm(config.model_name_or_path)
    else:
        made = begun is not None and (begun / "config.json").is_file()  # with LoRA it is the adapters alone
        made = AutoConfig.from_pretrained(begun) if made else _new_lm_config(config, tokenizer, chosen)
        lm = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    if len(tokenizer) > (known := lm.get_input_embeddings().num_embeddings):
        lm.resize_token_embeddings(len(tokenizer))
        if config.use_peft:
            set_apart(lm, known)
    ends = lm.generation_config.eos_token_id
    ends = {*([ends] if isinstance(ends, int) else ends or [])}
    ends &= special_ids(tokenizer) if ends else ends
    end = tokenizer.eos_token_id
    lm.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted({*ends, end} - {None}) if ends - {end} else end,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        top_k=0,  # all of the policy; transformers would keep 50 tokens
    )
    return lm


@torch.no_grad()
def set_apart(lm: PreTrainedModel, known: int) -> None:
    """Draws the embeddings of new tokens as far apart as the `known` ones lie. transformers begins all of
    them as their mean, and below adapters they stay as they begin: nothing could tell them apart."""
    layers = (lm.get_input_embeddings(), lm.get_output_embeddings())  # often with one and the same table
    for table in {layer.weight.data_ptr(): layer.weight for layer in layers if layer is not None}.values():
        old, new = table[:known], table[known:]
        new.copy_(old.mean(0) + old.std(0) * torch.randn_like(new))


def check_family(config: ModelConfig) -> None:
    """Raises UserError for a field of a new model that its family does not use, that is no new one's, or for
    a width that its heads cannot share."""
    hierarchical, default = config.family in LATENTS, ModelConfig()
    if start := config.model_name_or_path:
        for name in OF_NEW:
            if (value := getattr(config, name)) != getattr(default, name):
                raise UserError(
                    f"--model.{name} {value} is about a new model, expected none beside --model_name_or_path "
                    f"{start}, which has its own shape: leave one of the two out"
                )
        return
    users = {
        OF_TRANSFORMERS: (not hierarchical, "llama or gpt2"),
        OF_HIERARCHICAL: (hierarchical, "hred, vhred or vhcr"),
        OF_LATENTS: (LATENTS.get(config.family, "none") != "none", "vhred or vhcr"),
    }
    for names, (used, families) in users.items():
        for name in () if used else names:
            if (value := getattr(config, name)) != getattr(default, name):
                raise UserError(
                    f"--model.{name} {value:g}: a new {config.family} has no use for it, expected "
                    f"--model.family {families}: leave it out, or choose another family"
                )
    if not hierarchical:
        _attention(config)


def chosen_teachers(
    config: ModelConfig, teachers: Mapping[str, dict[str, Any]], *, data: str = "the data"
) -> dict[str, dict[str, Any]]:
    """Those of the data's teachers that a new model learns from. Raises UserError for weights that are none,
    of a model that has no states between messages, or without such a teacher."""
    chosen = {}
    for name in ("emotion", "embedding"):
        weight = getattr(config, f"{name}_weight")
        flag = f"--model.{name}_weight"
        if not 0 <= weight < math.inf:
            raise UserError(f"{flag}: expected a number of at least 0, got {weight:g}")
        if not weight:
            continue
        if config.model_name_or_path or config.family not in LATENTS:
            got = config.model_name_or_path or f"--model.family {config.family}"
            raise UserError(
                f"{flag} {weight:g}: expected a new model that reads message by message, --model.family "
                f"hred, vhred or vhcr, got {got}"
                + (", which keeps its own" if config.model_name_or_path else "")
            )
        if name not in teachers:
            others = f"with {', '.join(teachers)} only" if teachers else "without teachers"
            both = " ".join([*teachers, name])
            raise UserError(
                f"{flag} {weight:g}: expected data that was prepared with --teachers {name}, got {data}, "
                f"prepared {others}: run prepare again with --teachers {both} (or {name}=PATH)"
            )
        chosen[name] = teachers[name]
    return chosen


def _new_lm_config(config: ModelConfig, tokenizer: Any, teachers: dict[str, dict[str, Any]]) -> Any:
    vocabulary = len(tokenizer)
    spread = (
        config.width**-0.5
    )  # the usual 0.02 is meant for widths near 1024; a narrow model starts almost blind with it
    if config.family in LATENTS:
        return _new_hierarchical_config(config, tokenizer, teachers)
    layers = 4 if config.layers is None else config.layers
    heads, size = _attention(config)
    if config.family == "gpt2":
        drop = {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
        sizes = {
            "n_layer": layers,
            "n_head": heads,
            "n_embd": config.width,
            "n_positions": config.context,
        }
        return AutoConfig.for_model(
            "gpt2",
            vocab_size=vocabulary,
            **sizes,
            **drop,
            initializer_range=spread,
            bos_token_id=None,
            eos_token_id=None,
        )
    return AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=config.width,
        intermediate_size=config.width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=size,
        max_position_embeddings=config.context,
        attention_dropout=config.dropout,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=None,
    )


def _attention(config: ModelConfig) -> tuple[int, int]:
    """Heads of a new transformer, and the size of each. Raises UserError for a width that cannot be shared
    out to as many as were asked for."""
    width, heads, llama = config.width, config.attention_heads, config.family == "llama"
    if heads is None and width > 0:  # the heads of a llama may be larger than their shares of its width
        fit = (n for n in range(1, 9) if width % n == 0 and (llama or width >= HEAD_SIZE * n))
        heads = max(fit, default=1)
        return heads, max(HEAD_SIZE, width // heads // 2 * 2) if llama else width // heads
    share = 2 if llama else 1  # a llama turns numbers in pairs
    if heads is None or heads < 1 or width < share or width % (share * heads):
        flags = "" if heads is None else f" with --model.attention_heads {heads}"
        expected = "at least one head" if heads == 0 else f"a multiple of {share * (heads or 1)}, above 0"
        raise UserError(f"--model.width {width}{flags}: expected {expected}")
    return heads, width // heads


def _new_hierarchical_config(
    config: ModelConfig, tokenizer: Any, teachers: dict[str, dict[str, Any]]
) -> HierarchicalConfig:
    shares = ("dropout", "word_drop", "sentence_drop", "kl_annealing")
    names = (*shares, "latent_size", "free_bits", "bow_weight")
    if config.layers is not None and config.layers < 1:
        raise UserError(f"--model.layers: expected at least 1, got {config.layers}")
    for name in names:
        value, least = getattr(config, name), 1 if name == "latent_size" else 0
        if not least <= value <= (1 if name in shares else math.inf):
            expected = "from 0 to 1" if name in shares else f"of at least {least}"
            raise UserError(f"--model.{name}: expected a number {expected}, got {value:g}")
    return HierarchicalConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.width,
        num_hidden_layers=1 if config.layers is None else config.layers,
        message_end_ids=message_ends(tokenizer),
        latent=LATENTS[config.family],
        decoder_reads_context=True,
        output_bias=True,
        max_position_embeddings=config.context,
        bos_token_id=None,
        eos_token_id=None,
        teachers=teachers,
        **{f"{name}_weight": getattr(config, f"{name}_weight") for name in teachers},
        **{name: getattr(config, name) for name in names},
    )
