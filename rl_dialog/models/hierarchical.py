"""Hierarchical recurrent language models of dialogs over a flat row of tokens: HRED (Sordoni et al. 2015,
arXiv 1507.02221), VHRED (Serban et al. 2016, arXiv 1605.06069) and VHCR (Park et al. 2018, arXiv 1804.03424).

    logits = output embedding x the decoder's state + a level of each word

hierarchical_trunk.py says how the decoder's states come about. A message ends at the tokens that
`message_ends` (data/tokenize.py) finds in the chat template. To everything else the model is a causal LM
whose cache, a `State`, does not grow. Importing this module makes the family known to transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rl_dialog.models.hierarchical_config import HierarchicalConfig
from rl_dialog.models.hierarchical_trunk import HierarchicalModel, HierarchicalPreTrained
from rl_dialog.models.recurrent_state import MessageStates


class LatentGenerationMixin(GenerationMixin):
    """`generate` for models that may have latents, whose seeds `with_state` adds."""

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, noise: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """transformers repeats a prompt and all that belongs to it for each reply; seeds may be those of the
        replies already."""
        ids, inputs = super()._expand_inputs_for_generation(expand_size=expand_size, **inputs)
        if noise is not None:
            inputs["noise"] = noise if len(noise) == len(ids) else noise.repeat_interleave(expand_size)
        return ids, inputs


class HierarchicalLM(HierarchicalPreTrained, LatentGenerationMixin):
    """The causal LM: logits = output embedding x the decoder's states, + a level of each word."""

    def __init__(self, config: HierarchicalConfig) -> None:
        super().__init__(config)
        self.model = HierarchicalModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    @torch.no_grad()
    def start_at(self, counts: Tensor) -> None:
        """A new model begins by saying each word as often as it is said at all, counts (V,). Left to find
        that in its states, it does little else for hundreds of updates."""
        if self.lm_head.bias is not None:
            often = counts + 1.0  # a word that was never said is not impossible
            self.lm_head.bias.copy_((often / often.sum()).log())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: MessageStates | None = None,
        use_cache: bool | None = None,
        noise: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), or of the last `logits_to_keep` positions; see HierarchicalModel.forward."""
        out = self.model(input_ids, attention_mask, past_key_values, use_cache, noise)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)

    def generate(self, *args: Any, **settings: Any) -> Any:
        """transformers' `generate`. Where it samples, latents are drawn too, with seeds from torch's
        generator unless `noise` is given."""
        return super().generate(*args, **with_state(self, 0, args, settings))


def is_hierarchical(model: nn.Module) -> bool:
    """Whether a model, or the trunk of one, is of this family."""
    return isinstance(model, HierarchicalPreTrained)


def with_state(
    model: PreTrainedModel, others: int, args: tuple[Any, ...], settings: dict[str, Any]
) -> dict[str, Any]:
    """Settings of `generate` with the cache and the seeds of a hierarchical model, where they lack them: one
    seed a reply, or a prompt whose beams are compared."""
    ids = settings.get("input_ids", settings.get("inputs", args[0] if args else None))
    config = settings.get("generation_config", args[1] if len(args) > 1 else None)
    every = (settings, vars(config) if config else {}, vars(model.generation_config))

    def asked(name: str) -> Any:
        """As transformers reads it: what the caller leaves open the model's own settings say."""
        return next((given[name] for given in every if given.get(name) is not None), None)

    cache = settings.get("past_key_values")
    empty = cache is None or not isinstance(cache, MessageStates) and not cache.get_seq_length()
    if empty and asked("use_cache") is not False and not asked("cache_implementation"):
        settings = settings | {"past_key_values": MessageStates(others)}
    if not asked("do_sample") or settings.get("noise") is not None or ids is None:
        return settings
    replies = 1 if (asked("num_beams") or 1) > 1 else asked("num_return_sequences") or 1
    return settings | {"noise": torch.randint(2**62, (len(ids) * replies,)).to(ids.device)}


AutoConfig.register("hierarchical", HierarchicalConfig)
AutoModel.register(HierarchicalConfig, HierarchicalModel)
AutoModelForCausalLM.register(HierarchicalConfig, HierarchicalLM)
