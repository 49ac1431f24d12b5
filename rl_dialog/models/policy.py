"""The Policy: a causal LM, the heads its method needs, and logits that are already the method's.

`forward` returns what to sample from, so `generate` with its caches, beams, samplers and streamers works
unchanged. A checkpoint is the LM's own `from_pretrained` directory; heads and method stand beside it
(models/checkpoint.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.pytorch_utils import Conv1D

from rl_dialog.data.batch import Batch
from rl_dialog.errors import UserError
from rl_dialog.methods import Method
from rl_dialog.methods.method import Bound, Outputs, Regularisation
from rl_dialog.methods.scores import Linear
from rl_dialog.models.causal_lm import OutputLayer, drops, growing_cache, keeps_states_only, run_trunk
from rl_dialog.models.cpu_layers import speed_up
from rl_dialog.models.heads import ValueHeads
from rl_dialog.models.hierarchical import LatentGenerationMixin, is_hierarchical, with_state
from rl_dialog.models.hierarchical_trunk import Learning, Replies
from rl_dialog.models.language_model import ModelConfig
from rl_dialog.models.latents import LatentTerms
from rl_dialog.models.message_heads import MessageHeads
from rl_dialog.models.recurrent_state import MessageStates, StateSlots
from rl_dialog.models.slots import Slots
from rl_dialog.models.steering import Steering
from rl_dialog.models.trunk_caches import TrunkCaches, tokens_read


class Lengths(NamedTuple):
    """Of the rows that a model learned from, in tokens: it has positions for more, which mean nothing to
    it."""

    row: int  # the longest
    prompt: int  # that 99 in 100 replies were learned behind, or a shorter one


class Policy(PreTrainedModel, LatentGenerationMixin):
    """A causal LM with the value heads of its method. `policy.generate(...)` samples from the method's
    policy.

    The wrapper's config is the LM's own. Separate value and target trunks keep KV caches of their own beside
    the LM's (`TrunkCaches`).
    """

    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_cache_class = True
    main_input_name = "input_ids"

    def __init__(self, lm: PreTrainedModel, method: Method, config: ModelConfig | None = None) -> None:
        config = config or ModelConfig()
        super().__init__(lm.config)
        self.output_layer = OutputLayer.of(lm)
        speed_up(lm)
        has_heads = method.heads.q or method.heads.v or method.heads.utterance_q
        if method.proposals and config.value_trunk == "separate":
            raise UserError(
                f"{type(method).__name__} reads the frozen LM's hidden states, as its proposals were read: "
                "expected value_trunk auto or shared, got separate"
            )
        if config.value_trunk == "auto":
            shared = config.use_peft or bool(method.proposals) or not has_heads
            config = replace(config, value_trunk="shared" if shared else "separate")
        self.lm, self.method, self.model_config = lm, method, config
        self.generation_config = lm.generation_config
        vocabulary, hidden = lm.get_output_embeddings().weight.shape
        if config.target_trunk == "separate" and not method.heads.target:
            raise UserError(
                f"{type(method).__name__} has no target heads on tokens: expected target_trunk shared, got "
                "separate"
            )
        self.value_trunk = (
            copy.deepcopy(lm.base_model) if has_heads and config.value_trunk == "separate" else None
        )
        self.target_trunk = (
            self._new_target_trunk() if method.heads.target and config.target_trunk == "separate" else None
        )
        if config.use_peft and not getattr(lm, "_hf_peft_config_loaded", False):
            _add_lora(lm, config)
        self.heads = (
            ValueHeads(method.heads, hidden, vocabulary, kind=config.heads, rank=config.rank)
            if has_heads
            else None
        )
        self.lm_target: PreTrainedModel | None = None  # made by `start_training`
        self.steering: Steering | None = None  # values of the start of online learning, which do not learn
        self.base: str | None = None  # where the LM below its adapters stands (models/checkpoint.py)
        self.lengths: Lengths | None = None  # of what an LM made here has learned to read, where known
        self.value_unit = 1.0  # units of reward in one unit of what the heads say; set by training
        self.start: Literal["new", "made", "pretrained"] = (
            "pretrained" if config.model_name_or_path else "new"
        )  # where the LM comes from

    # What transformers asks of a model.

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for experts in this file, but they are in the LM's

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        noise: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) of the method's policy; `logits_to_keep=1` computes the last position only, as
        decoding does. noise (B,): the seeds of a hierarchical model's latents, without which they are their
        means."""
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        if self.is_hierarchical:
            inputs["noise"] = noise
        wants_cache = past_key_values is not None or (
            getattr(self.config, "use_cache", True) if use_cache is None else use_cache
        )
        trunks = self._decoding_trunks
        if wants_cache and self.is_hierarchical:
            past_key_values = MessageStates.around(past_key_values, len(trunks))
        elif wants_cache and (trunks or self._keeps_states_only):
            past_key_values = TrunkCaches.around(past_key_values, self.config, len(trunks))
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        states, cache = self._run(input_ids, past_key_values, trunks, **inputs)
        if isinstance(cache, TrunkCaches):
            cache.read += input_ids.shape[1]
        hidden = [each[:, keep] for each in states]
        logits = self.method.decode(self._outputs(*(each.flatten(0, 1) for each in hidden), training=False))
        return CausalLMOutputWithPast(logits=logits.unflatten(0, hidden[0].shape[:2]), past_key_values=cache)

    def generate(self, *args: Any, **settings: Any) -> Any:
        """transformers' `generate`, which makes caches for keys and values of one model only."""
        trunks = len(self._decoding_trunks)
        if self.is_hierarchical:
            return super().generate(*args, **with_state(self, trunks, args, settings))
        cache = settings.get("past_key_values")
        empty = cache is None or not isinstance(cache, TrunkCaches) and not tokens_read(cache)
        wanted = settings.get("use_cache", True) and not settings.get("cache_implementation")
        if empty and wanted and (trunks or self._keeps_states_only):
            settings["past_key_values"] = TrunkCaches(self.config, trunks)
        return super().generate(*args, **settings)

    @property
    def _decoding_trunks(self) -> list[nn.Module]:
        """The transformers beside the LM's that `decode` reads."""
        reads_value = self.method.decodes_with_v or (self.method.heads.q and self.target_trunk is None)
        return self._trunks(value=bool(reads_value))

    @cached_property
    def _keeps_states_only(self) -> bool:
        kinds = getattr(self.config, "layer_types", None)  # never left out by models with states
        return kinds is not None and keeps_states_only(DynamicCache(config=self.config))

    @property
    def is_hierarchical(self) -> bool:
        """Whether the LM is one of models/hierarchical.py."""
        return is_hierarchical(self.lm)

    @property
    def has_latents(self) -> bool:
        """Whether what the LM says depends on latents, and so on the noise that they are drawn with."""
        return self.is_hierarchical and self.config.latent != "none"

    @property
    def message_heads(self) -> MessageHeads | None:
        """What a hierarchical LM that learns from teachers predicts of messages."""
        return self.lm.base_model.message_heads if self.is_hierarchical else None

    # What a server asks of a model.

    def new_slots(self, slots: int, context: int) -> Slots | StateSlots:
        """Room for the keys and values (or states) of so many conversations, in the LM and in the trunks
        beside it."""
        if self.is_hierarchical:
            beside = tuple(trunk.new_slots(slots, context) for trunk in self._trunks())
            return self.lm.base_model.new_slots(slots, context, beside)
        others = tuple(Slots(trunk.config, slots, context) for trunk in self._trunks())
        return Slots(self.config, slots, context, others=others)

    @torch.inference_mode()
    def read(
        self,
        tokens: Tensor,
        slots: Slots | StateSlots,
        *,
        first: int,
        positions: Tensor,
        real: Tensor,
        wanted: tuple[Tensor, Tensor],
        wants_v: bool = False,
        noise: Tensor | None = None,
    ) -> Outputs:
        """Reads tokens (B, T) of the conversations in the rows from `first` on; what the policy says in the S
        states at `wanted` = (rows, columns).

        positions (B, T): where in its conversation each token stands; real (B, T): false for padding;
        wants_v: the states' values too, where the method has them but does not need them to decode; noise
        (B,): the seeds of their latents.
        """
        mask = slots.aim(first, positions, real)
        inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        inputs |= {"noise": noise} if self.is_hierarchical else {}
        states, _ = self._run(tokens, slots, self._trunks(), **inputs)
        return self._outputs(*_at(wanted, *states), training=False, wants_v=wants_v)

    def _trunks(self, *, value: bool = True) -> list[nn.Module]:
        """The transformers beside the LM that decoding runs."""
        own = (self.value_trunk if value else None, self.target_trunk)
        return [trunk for trunk in own if trunk is not None] + self._steering_trunks

    @property
    def _steering_trunks(self) -> list[nn.Module]:
        return self.steering.trunks if self.steering else []

    def _run(
        self, input_ids: Tensor, cache: Any, trunks: list[nn.Module], **inputs: Any
    ) -> tuple[list[Tensor], Any]:
        """The hidden states (B, T, H) of the LM, those that values and targets are read from, and those of
        `steering.trunks`; and the cache that the LM returned."""
        hidden, returned = run_trunk(self.lm.base_model, input_ids, cache, **inputs)
        caches = [None] * len(trunks) if cache is None else cache.others if trunks else []
        states = {
            id(trunk): run_trunk(trunk, input_ids, own, **inputs)[0]
            for trunk, own in zip(trunks, caches, strict=True)
        }
        value = states.get(id(self.value_trunk), hidden)
        steering = [states[id(trunk)] for trunk in self._steering_trunks]
        return [hidden, value, states.get(id(self.target_trunk), value), *steering], returned

    # What methods ask of a model.

    def outputs(self, batch: Batch, *, learning: bool = False) -> Outputs:
        """Everything the method's loss reads, on the batch's S states; all but `prior`, which is not the
        policy's. `learning`: a method that clones has the latents of a model with such from their
        posterior."""
        infers = learning and self.is_hierarchical and self.method.draws_from_posterior
        idle = (
            self.training
            and not self.method.reads_lm
            and self.value_trunk is not None
            and self.model_config.heads != "lowrank"
        )
        with nullcontext() if self.method.trains_lm else torch.no_grad():
            every, terms = self._inferred(batch) if infers else (None, None)
            drawn = ()
            if not idle and not infers:
                every, *drawn = said(self.lm.base_model, batch)  # (B*T, H)
        value_every = every if self.value_trunk is None else hidden_states(self.value_trunk, batch)
        every = value_every if idle else every
        with torch.no_grad():
            target_every = (
                value_every if self.target_trunk is None else hidden_states(self.target_trunk, batch)
            )
            steering = [hidden_states(trunk, batch) for trunk in self._steering_trunks]
        out = self._outputs(*_at(batch.states, every, value_every, target_every, *steering), training=True)
        out.lm = None if idle else out.lm
        out.latents = self._bound(batch, terms) if terms and self.has_latents else None
        out.messages = (
            self._regularisation(batch, terms) if terms and self.message_heads is not None else None
        )
        out.drawn, out.latent_logp = drawn or (None, None)
        if self.method.learns_context:
            out.context = self.output_layer.scores(
                self.lm, (every.detach() if self.model_config.detach_lm else every)[batch.context]
            )
        if self.method.heads.utterance_q:
            self._value_replies(out, batch, value_every)
        if self.lm_target is not None:
            with torch.no_grad():
                passes = [
                    hidden_states(self.lm_target.base_model, batch)[batch.states]
                    for _ in range(self.method.target_passes)
                ]
            out.lm_target = tuple(self.output_layer.scores(self.lm_target, hidden) for hidden in passes)
        return out

    @torch.no_grad()
    def inferred(self, batch: Batch) -> tuple[Outputs, LatentTerms]:
        """What a cloned LM with latents says when they come from the posterior with the batch's noise."""
        hidden, terms = self._inferred(batch)
        return Outputs(self.output_layer.scores(self.lm, hidden[batch.states])), terms

    def _inferred(self, batch: Batch) -> tuple[Tensor, LatentTerms]:
        """The hidden states (B*T, H) of a hierarchical LM that clones, and what its latents add."""
        targets = torch.zeros_like(batch.act).flatten()
        targets[batch.states[: batch.decisions]] = True
        messages = None if self.message_heads is None else batch.taught_at
        learning = Learning(targets.view_as(batch.act), messages)
        hidden, terms = self.lm.base_model.learn(batch.input_ids, batch.attention_mask, batch.noise, learning)
        return hidden.flatten(0, 1), terms

    def _bound(self, batch: Batch, terms: LatentTerms) -> Bound:
        """Outside of training all of the KL counts, and nothing is free."""
        config, kl = self.config, terms.every_kl.sum()
        if not self.training:
            return Bound(kl, kl)
        weight = min(1.0, batch.progress / config.kl_annealing) if config.kl_annealing else 1.0
        # A latent that costs nothing from the start says what the context would have said.
        granted = min(1.0, max(0.0, 3 * batch.progress - 1)) if self.start == "new" else 1.0
        words = None
        if terms.words is not None:
            states = batch.states[: batch.decisions]
            # Without the levels of words: where these say how often each is said, a bag has only the latent
            # to gain by, which then tells what the context would have told.
            scores = Linear(terms.words.flatten(0, 1)[states], self.lm.get_output_embeddings().weight)
            words = config.bow_weight * scores.nll(batch.actions)[0]
        return Bound(kl, weight * terms.penalty(granted * config.free_bits), words)

    def _regularisation(self, batch: Batch, terms: LatentTerms) -> Regularisation:
        """What the predictions of messages add; nothing outside of training, where they are only told."""
        if terms.contexts is None:
            raise UserError(
                "expected rows with what teachers say of their messages, which this model learns to predict "
                f"({', '.join(self.config.teachers)}), got rows without: run prepare again with --teachers "
                f"{' '.join(self.config.teachers)}"
            )
        losses = self.message_heads(terms.contexts, batch.emotions, batch.embeddings)
        weighted = sum(getattr(self.config, f"{name}_weight") * loss for name, loss in losses.items())
        penalty = weighted if self.training else torch.zeros_like(weighted)
        return Regularisation(penalty, losses, len(terms.contexts))

    @torch.no_grad()
    def prior_scores(self, batch: Batch) -> Linear:
        """The LM as it is now without adapters and dropout, in the batch's S states: the frozen prior of a
        policy with LoRA."""
        training = self.lm.training
        self.lm.eval()
        with self.without_adapters():
            scores = self.output_layer.scores(self.lm, hidden_states(self.lm.base_model, batch)[batch.states])
        self.lm.train(training)
        return scores

    @torch.no_grad()
    def prior_logp(self, batch: Batch) -> Tensor:
        """(N,) log p(action) under `prior_scores`."""
        return -self.prior_scores(batch).nll(batch.actions)[1]

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The LM as loaded: LoRA adapters off."""
        if not self.has_adapters:
            yield
            return
        self.lm.disable_adapters()
        try:
            yield
        finally:
            self.lm.enable_adapters()

    def train(self, mode: bool = True) -> Policy:
        """Dropout on or off; never in a language model that does not learn or in a target trunk, in the
        target LM only where the method takes several passes of it."""
        super().train(mode)
        if not self.method.trains_lm:
            self.lm.eval()
        if getattr(self, "target_trunk", None) is not None:
            self.target_trunk.eval()
        if getattr(self, "lm_target", None) is not None:
            self.lm_target.train(mode and self.method.target_passes > 1)
        return self

    def start_training(self) -> Policy:
        """Adds what only training needs: the Polyak copy of the LM, where the method has one. Raises
        UserError for passes that would be equal, and for cloning that nothing would learn from."""
        if self.method.target_passes > 1 and not drops(self.lm):
            raise UserError(
                f"target_passes {self.method.target_passes}: expected a language model with dropout, found "
                "none, so all passes would be the same; start from a new model with --model.dropout 0.1, or "
                "from one whose config has dropout"
            )
        if self.model_config.detach_lm and self.has_adapters:
            raise UserError(
                "detach_lm lets the output layer alone learn the words, but LoRA freezes it: leave out "
                "--model.detach_lm or --model.use_peft"
            )
        if self.method.heads.lm_target and self.lm_target is None:
            self.lm_target = copy.deepcopy(self.lm).requires_grad_(False)
        return self

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters lie above the LM's weights."""
        return getattr(self.lm, "_hf_peft_config_loaded", False)

    def state_that_changes(self) -> dict[str, Tensor]:
        """All tensors but those below adapters, which stay as they were loaded."""
        frozen = ("lm.", "lm_target.") if self.has_adapters else ()
        state = self.state_dict().items()
        return {name: value for name, value in state if not name.startswith(frozen) or "lora_" in name}

    @property
    def context(self) -> int | None:
        """The longest row in tokens that the LM reads; None where its config names no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def longest_row(self) -> int | None:
        """The longest row in tokens of which its probabilities mean something: what the LM reads, and of one
        that was made here what it learned from. None where nothing limits it."""
        limits = (self.context, self.lengths.row if self.lengths else None)
        return min((limit for limit in limits if limit), default=None)

    def values(self) -> list[nn.Parameter]:
        """The parameters of the heads and of a trunk of their own that train."""
        modules = [module for module in (self.heads, self.value_trunk) if module is not None]
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    @torch.no_grad()
    def update_targets(self, alpha: float) -> None:
        """Polyak averaging, once per optimizer step: target <- alpha * online + (1 - alpha) * target."""
        pairs = []
        if self.heads is not None:
            pairs += list(zip(self.heads.q_target.parameters(), self.heads.q.parameters(), strict=False))
            pairs += list(
                zip(
                    self.heads.utterance_q_target.parameters(),
                    self.heads.utterance_q.parameters(),
                    strict=True,
                )
            )
        if self.target_trunk is not None:
            pairs += list(
                zip(
                    self.target_trunk.parameters(),
                    (self.value_trunk or self.lm.base_model).parameters(),
                    strict=True,
                )
            )
        if self.lm_target is not None:
            pairs += list(zip(self.lm_target.parameters(), self.lm.parameters(), strict=True))
        if pairs:
            targets, online = zip(*pairs, strict=True)
            torch._foreach_lerp_(targets, online, alpha)

    def _value_replies(self, out: Outputs, batch: Batch, every: Tensor) -> None:
        """Adds the values of whole replies, logged and proposed; every (B*T, H)."""
        if self.method.heads.utterance_mean:
            every = running_means(every.unflatten(0, batch.input_ids.shape))
        ends = every[batch.reply_ends]  # (R, H)
        ends = ends.detach() if self.model_config.detach_q else ends
        online, target = self.heads.utterance_q, self.heads.utterance_q_target
        out.utterance_q = tuple(head(ends) for head in online)
        with torch.no_grad():
            out.utterance_q_target = tuple(head(ends) for head in target)
        if batch.proposals is None:
            return
        out.proposal_q = tuple(head(batch.proposals) for head in online)
        uniform = torch.rand_like(batch.proposals) * 2 - 1
        out.random_q = tuple(head(uniform) for head in online)
        with torch.no_grad():
            out.proposal_q_target = tuple(head(batch.proposals) for head in target)

    def _new_target_trunk(self) -> nn.Module:
        if self.model_config.use_peft and self.value_trunk is None:
            raise UserError(
                "expected a target trunk to copy that LoRA does not change: set value_trunk separate, or "
                "target_trunk shared"
            )
        return copy.deepcopy(self.value_trunk or self.lm.base_model).requires_grad_(False)

    def _outputs(
        self,
        hidden: Tensor,
        value_hidden: Tensor,
        target_hidden: Tensor,
        *steering_hidden: Tensor,
        training: bool,
        wants_v: bool = False,
    ) -> Outputs:
        """hidden, value_hidden, target_hidden and each of steering_hidden (S, H). What a steered LM says is
        what comes of it and the values that steer it."""
        config = self.model_config
        lm = self.output_layer.scores(self.lm, hidden.detach() if config.detach_lm else hidden)
        if self.steering is not None:
            lm = self.steering.scores(lm, list(steering_hidden))
        if self.heads is None:
            return Outputs(lm)
        q_hidden, v_hidden = (
            value_hidden.detach() if stop else value_hidden for stop in (config.detach_q, config.detach_v)
        )
        q = tuple(head(q_hidden, lm) for head in self.heads.q) if training else ()
        with torch.no_grad() if training else nullcontext():
            q_target = tuple(head(target_hidden, lm) for head in self.heads.q_target)
        needs_v = self.heads.v is not None and (training or wants_v or self.method.decodes_with_v)
        return Outputs(lm, q, q_target, self.heads.v(v_hidden) if needs_v else None)

    # Checkpoints (models/checkpoint.py has the layout).

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Writes the LM's own directory plus heads and method."""
        from rl_dialog.models.checkpoint import save_policy

        save_policy(self, Path(save_directory))

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, method: Method | None = None, **_: Any
    ) -> Policy:
        """A policy from a checkpoint directory, or from any causal LM (then `method` is behaviour cloning).
        Raises UserError."""
        from rl_dialog.models.checkpoint import load_policy

        return load_policy(pretrained_model_name_or_path, method=method)


def hidden_states(trunk: nn.Module, batch: Batch) -> Tensor:
    """(B*T, H). Rows are padded on the right, so causal attention needs no padding mask."""
    return said(trunk, batch)[0]


def said(trunk: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """`hidden_states`; and where the batch's replies have latents of their own, those (R, Z) and their
    log-density (R,)."""
    own = {}
    if is_hierarchical(trunk):  # padding would be read as one more message, which costs time
        own = {"attention_mask": batch.attention_mask, "noise": batch.noise}
        if trunk.config.latent != "none" and (batch.reply_noise is not None or batch.latents is not None):
            replies = Replies(batch.states[batch.reply_starts], batch.reply_noise, batch.latents)
            hidden, *drawn = trunk.said(batch.input_ids, batch.attention_mask, replies)
            return hidden.flatten(0, 1), *drawn
    # Each row has a dropout of its own.
    alone = batch.begun is None or (trunk.training and drops(trunk))
    if not alone and (cache := growing_cache(trunk)):
        return (_read_once(trunk, batch, cache).flatten(0, 1),)
    return (run_trunk(trunk, batch.input_ids, use_cache=False, **own)[0].flatten(0, 1),)


def _read_once(trunk: nn.Module, batch: Batch, cache: DynamicCache) -> Tensor:
    """(B, T, H): what rows begin with alike is read once, into the cache that all of them go on from.
    Gradients flow through it."""
    length, (rows, width) = batch.beginning, batch.input_ids.shape
    positions = torch.arange(width, device=batch.input_ids.device)[None]
    inputs = {"use_cache": True, "position_ids": positions[:, :length]}
    begun, cache = run_trunk(trunk, batch.input_ids[batch.begun, :length], cache, **inputs)
    if cache is None or cache.get_seq_length() != length:  # under gradient checkpointing nothing is kept
        return run_trunk(trunk, batch.input_ids, use_cache=False)[0]
    cache.reorder_cache(batch.begins_like)
    inputs["position_ids"] = positions[:, length:].expand(rows, -1)
    rest, _ = run_trunk(trunk, batch.input_ids[:, length:], cache, **inputs)
    return torch.cat([begun[batch.begins_like], rest], 1)


def running_means(hidden: Tensor) -> Tensor:
    """(B, T, H) -> (B*T, H): the mean over the tokens up to each position."""
    count = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
    return (hidden.float().cumsum(1) / count).flatten(0, 1)


def _at(positions: Any, *hidden: Tensor) -> list[Tensor]:
    """The rows of each, gathered once where two are the same."""
    gathered = {id(each): each[positions] for each in hidden}
    return [gathered[id(each)] for each in hidden]


def _add_lora(lm: PreTrainedModel, config: ModelConfig) -> None:
    from peft import LoraConfig

    if is_hierarchical(lm):
        raise UserError(
            "expected a transformer to adapt, got a hierarchical model, whose GRUs LoRA cannot adapt: leave "
            "--model.use_peft out"
        )
    names = config.lora_target_modules
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=names if names == "all-linear" else [name.strip() for name in names.split(",")],
        fan_in_fan_out=any(
            isinstance(module, Conv1D) for module in lm.modules()
        ),  # GPT-2 stores weights as (in, out)
        task_type="CAUSAL_LM",
    )
    try:
        lm.add_adapter(adapters)
    except ValueError as error:
        raise UserError(
            f"--model.lora_target_modules {names}: expected layers of a {type(lm).__name__} that LoRA can "
            f"adapt ({error})"
        ) from error
    if any("lora_" in name for name, _ in lm.get_output_embeddings().named_parameters()):
        raise UserError(
            f"--model.lora_target_modules {names}: expected layers below the output layer, whose weights are "
            "read without adapters, got it among them: leave it out"
        )
