"""Causal language models of any architecture of transformers: opening them, and what each has of its own.

Whatever differs between architectures is found out here, by asking the model: how its logits come from its
hidden states, and under which name it takes a cache. A model that does not fit is refused with
its name and the reason.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from rl_dialog.data.tokenize import require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.methods.scores import Linear
from rl_dialog.models.hierarchical import is_hierarchical
from rl_dialog.models.recurrent_state import MessageStates
from rl_dialog.models.weights import load_strictly, require_readable, require_weights

ADAPTER = "adapter_config.json"  # as peft names it
BASE, PRIOR = KEPT = "base", "prior"  # folders of a run with a model that its checkpoints belong to
CLOSE = {"atol": 1e-3, "rtol": 1e-3}  # two ways of computing the same logits


def load_quietly() -> None:
    """What transformers loads from here on shows neither bars nor warnings."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def open_causal_lm(
    name_or_path: str,
    *,
    what: str = "a causal LM",
    expected: str = "a hub name, or a directory with config.json and model.safetensors",
) -> PreTrainedModel:
    """The causal LM at a hub name or in a directory, in float32, with the attention that transformers chooses
    for it; of a multimodal model the part that reads and writes text, of LoRA adapters the model that they
    make.

    Raises UserError for what cannot be read, saying `what` was `expected`, and for what is no causal LM.
    """
    require_readable(name_or_path)
    where = f"cannot load {what} from {str(name_or_path)!r}"
    if base := base_of_adapter(name_or_path):
        return _adapted(open_causal_lm(base), str(name_or_path), where)
    try:
        config = AutoConfig.from_pretrained(name_or_path)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UserError(f"{where}: expected a model that continues texts, got a {config.model_type}")
        lm, lacking = load_strictly(AutoModelForCausalLM, name_or_path)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, SafetensorError) as error:
        raise UserError(f"{where}: expected {expected} ({error})") from error
    require_weights(lm, lacking, where)
    return _text_part(lm)


def config_of(name_or_path: str | Path) -> PretrainedConfig:
    """The config of a model at a hub name or in a directory; of LoRA adapters that of the model that they
    belong to."""
    base = base_of_adapter(name_or_path)
    return config_of(base) if base else AutoConfig.from_pretrained(name_or_path)


def is_model(directory: Path) -> bool:
    """Whether a directory holds a model or LoRA adapters of one."""
    return (directory / "config.json").is_file() or (directory / ADAPTER).is_file()


def base_of_adapter(name_or_path: str | Path) -> str | None:
    """The model that the LoRA adapters in a directory belong to; None where there are none.

    It is looked for in and beside the directory first, so that a run's folder can move, then where the
    adapters say. Raises UserError where it is not there.
    """
    directory = Path(name_or_path)
    if not (directory / ADAPTER).is_file():
        return None
    try:
        base = json.loads((directory / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
        name = Path(base).name
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / ADAPTER}: expected a base_model_name_or_path ({error})") from error
    for place in (directory / name, directory.parent / name) if name in KEPT else ():
        if is_model(place):
            return str(place)
    try:
        require_hub_name_or_directory(base)
    except UserError as error:
        raise UserError(
            f"{directory / ADAPTER}: expected the model that these adapters belong to at {base}, found "
            "nothing; copy it there, or let base_model_name_or_path name it"
        ) from error
    return base


def _adapted(lm: PreTrainedModel, adapters: str, where: str) -> PreTrainedModel:
    """The model with the LoRA adapters of a directory added to its weights."""
    from peft import PeftModel

    try:
        merged = PeftModel.from_pretrained(lm, adapters).merge_and_unload()
        return merged.requires_grad_(True)  # peft froze what lies below adapters
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        raise UserError(f"{where}: expected LoRA adapters of a {type(lm).__name__} ({error})") from error


def _text_part(lm: PreTrainedModel) -> PreTrainedModel:
    """The language model inside a model that also sees or hears; any other one as it is."""
    config = lm.config.get_text_config(decoder=True)
    if config is lm.config:
        return lm
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{type(lm).__name__}: expected a model for text, found no language model inside it")
    with torch.device("meta"):  # a shell: its parts are replaced by those that were loaded
        text = AutoModelForCausalLM.from_config(config)
    setattr(text, text.base_model_prefix, lm.get_decoder())
    text.set_output_embeddings(lm.get_output_embeddings())
    if any(part.is_meta for part in (*text.parameters(), *text.buffers())):
        raise UserError(f"{type(lm).__name__}: cannot take out its language model, a {type(text).__name__}")
    return text.eval()


@dataclass(frozen=True)
class OutputLayer:
    """Logits = the output embedding x the last hidden state, times `scale`, softly held within +-`cap`."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(lm: PreTrainedModel) -> OutputLayer:
        """That of a model; dropout is left out. Raises UserError for a model that is no plain causal LM."""
        training = lm.training
        lm.eval()
        try:
            return _output_layer(lm)
        except UserError:
            raise
        except Exception as error:  # whatever it is, it is this architecture that does not fit
            raise UserError(
                f"{type(lm).__name__}: expected a language model that reads token ids, got an error from it: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            lm.train(training)

    def scores(self, lm: PreTrainedModel, hidden: Tensor) -> Linear:
        """The scores of every token in the states of hidden (S, H)."""
        head = lm.get_output_embeddings()
        plain = Linear(hidden, head.weight, getattr(head, "bias", None)).scaled(self.scale)
        return plain if self.cap is None else plain.capped(self.cap)


@torch.no_grad()
def _output_layer(lm: PreTrainedModel) -> OutputLayer:
    name, vocabulary = type(lm).__name__, lm.get_input_embeddings().num_embeddings
    # two texts that differ in their last token, and the first one again behind a token of padding
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [0, 1, 2, 3]], device=lm.device) % vocabulary
    real = torch.ones_like(ids)
    real[2, 0] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    logits = lm(input_ids=ids[:2], use_cache=False).logits.float()
    if not torch.allclose(logits[0, :3], logits[1, :3], **CLOSE):
        raise UserError(
            f"{name}: expected a model that reads from left to right, got logits that depend on later tokens "
            "(is its is_decoder false?)"
        )
    inputs = {"attention_mask": real, "position_ids": positions, "use_cache": False}
    hidden, _ = run_trunk(lm.base_model, ids, **inputs)
    layer = _fitted(lm, hidden[:2].flatten(0, 1), logits.flatten(0, 1))
    if not torch.allclose(layer.scores(lm, hidden[2, 1:]).dense(), logits[0, :3], **CLOSE):
        raise UserError(
            f"{name}: expected a model that leaves out padding, got other logits behind a padded beginning "
            "(does it count positions by itself?), so replies would depend on what else is in their batch"
        )
    _require_cache(lm, ids, inputs, hidden)
    return layer


def _require_cache(lm: PreTrainedModel, ids: Tensor, inputs: dict[str, Any], hidden: Tensor) -> None:
    """Raises UserError where the last token, read behind a cache of the others, has another hidden state than
    in `hidden`; models that have no cache pass."""
    if not hasattr(lm.config, "num_hidden_layers") or not getattr(lm.config, "use_cache", True):
        return
    first = {name: value[:, :-1] for name, value in inputs.items() if name != "use_cache"}
    last = {"attention_mask": inputs["attention_mask"], "position_ids": inputs["position_ids"][:, -1:]}
    empty = MessageStates() if is_hierarchical(lm) else DynamicCache(config=lm.config)
    _, cache = run_trunk(lm.base_model, ids[:, :-1], empty, use_cache=True, **first)
    if cache is None:
        return
    got, _ = run_trunk(lm.base_model, ids[:, -1:], cache, use_cache=True, **last)
    if not torch.allclose(got[:, 0], hidden[:, -1], **CLOSE):
        raise UserError(
            f"{type(lm).__name__}: expected a model that goes on from a cache of what it has read, got other "
            "hidden states than without one"
        )


def _fitted(lm: PreTrainedModel, hidden: Tensor, logits: Tensor) -> OutputLayer:
    """The layer that makes these logits (S, V) of hidden (S, H)."""
    cap = getattr(lm.config, "final_logit_softcapping", None)
    inner = logits if cap is None else cap * torch.atanh((logits / cap).clamp(-0.9999, 0.9999))
    plain = OutputLayer().scores(lm, hidden).dense()
    scale = ((inner * plain).sum() / plain.square().sum().clamp(min=1e-30)).item()
    for layer in (OutputLayer(cap=cap), OutputLayer(scale, cap)):
        if torch.allclose(layer.scores(lm, hidden).dense(), logits, **CLOSE):
            return layer
    raise UserError(
        f"{type(lm).__name__}: expected logits = output embedding x last hidden state, times a number or "
        "within a soft cap, got something else; models with such a head are not supported"
    )


def run_trunk(trunk: nn.Module, input_ids: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
    """The last hidden states (B, T, H) of a model without its head, and the cache it returned."""
    name, mask = _name_of_cache(type(trunk)), inputs.get("attention_mask")
    if name == "cache_params" and mask is not None and mask.shape[-1] > input_ids.shape[1]:
        inputs["attention_mask"] = None  # padding was left out of the states when it was read
    output = trunk(input_ids=input_ids, **{name: cache}, **inputs)
    return output.last_hidden_state, output.get(name)


def _name_of_cache(kind: type[nn.Module]) -> str:
    """Under which name a model takes its cache and returns it."""
    return "cache_params" if _takes(kind, "cache_params") else "past_key_values"  # Mamba and its relatives


@lru_cache
def _takes(kind: type[nn.Module], name: str) -> bool:
    """Whether the `forward` of a model has an argument of this name."""
    return name in inspect.signature(kind.forward).parameters


def keeps_states_only(cache: Cache) -> bool:
    """Whether no layer keeps keys and values: then nothing in the cache tells how many tokens it has read."""
    return bool(cache.layers) and all(cache.is_linear)


def drops(model: nn.Module) -> bool:
    """Whether training hides anything at random: by layers of ours or peft's, or by what the model's config
    says of its own."""
    shares = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    for name, share in vars(model.config).items():
        if re.search("dropout|pdrop|layerdrop", name) and not re.search("classifier|summary", name):
            shares.append(share)
    return any(isinstance(share, int | float) and share > 0 for share in shares)


def growing_cache(trunk: nn.Module) -> DynamicCache | None:
    """A cache to read rows of one length into. None for models that cannot go on from the keys and values of
    all tokens: they keep others or none, or turn them by how long the whole row is."""
    config = trunk.config
    if is_hierarchical(trunk) or not _takes(type(trunk), "past_key_values"):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic") or not getattr(config, "use_cache", True):
        return None
    cache = DynamicCache(config=config)
    return cache if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers) else None
