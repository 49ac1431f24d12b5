"""A language model that is a table, so that the real trainer meets decision processes whose answers are
known.

A state is a row: each token leads from state to state, the last hidden state is the one-hot vector of the
state reached, and the logits are that state's column of the output embedding. With inner layers that pass the
one-hot vector on, the published MLP heads are tables too. Nothing else is special: `Policy`, `Trainer`,
checkpoints and `generate` see an ordinary `PreTrainedModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from rl_dialog.data.tokenize import Row
from rl_dialog.methods import Method
from rl_dialog.models.language_model import ModelConfig
from rl_dialog.models.policy import Policy

PUBLISHED = {
    "backup": "token",
    "discount": "token",
    "warmup": 0.0,
}  # values travel token by token, as in the papers

Key = Callable[[tuple[int, ...]], Hashable]  # what of the tokens so far makes a state


class TabularConfig(PretrainedConfig):
    """V tokens, S states. State 0 is the empty context, the last one stands for every context that no row
    contains."""

    model_type = "tabular"

    def __init__(
        self, vocab_size: int = 2, states: int = 2, max_position_embeddings: int = 1024, **options: object
    ) -> None:
        super().__init__(**options)
        self.vocab_size, self.states, self.hidden_size, self.max_position_embeddings = (
            vocab_size,
            states,
            states,
            max_position_embeddings,
        )
        self.use_cache = self.tie_word_embeddings = False


class Walk(nn.Module):
    """Tokens (B, T) to the one-hot vectors (B, T, S) of the states they lead to. A token's embedding, which
    never trains, lists where it leads from each state.
    """

    def __init__(self, config: TabularConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.states).requires_grad_(False)

    def forward(self, input_ids: Tensor, **_: object) -> BaseModelOutputWithPast:
        steps = self.tokens(input_ids).long()  # (B, T, S)
        state = input_ids.new_zeros(len(input_ids), 1)
        visited = []
        for t in range(input_ids.shape[1]):
            state = steps[:, t].gather(1, state)
            visited.append(state)
        return BaseModelOutputWithPast(
            nn.functional.one_hot(torch.cat(visited, 1), steps.shape[2]).to(self.tokens.weight.dtype)
        )


class TabularLM(PreTrainedModel, GenerationMixin):
    """logits[s] = column s of the output embedding (V, S), which starts at zero: the uniform policy."""

    config_class = TabularConfig
    base_model_prefix = "walk"
    _supports_sdpa = True  # it has no attention; a loader that asks for this one may have it

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.walk = Walk(config)
        self.table = nn.Linear(config.states, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.walk.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.table(self.walk(input_ids).last_hidden_state))


AutoConfig.register("tabular", TabularConfig)
AutoModelForCausalLM.register(TabularConfig, TabularLM)


def tabular_lm(rows: Sequence[Row], vocabulary: int, *, key: Key = tuple) -> TabularLM:
    """A table with a state for every context in `rows`; contexts with the same `key` share one.

    Raises ValueError where a shared state would have to lead to two states by the same token.
    """
    states: dict[Hashable, int] = {key(()): 0}
    steps: dict[tuple[int, int], int] = {}
    for row in rows:
        ids = tuple(row.input_ids.tolist())
        for t, token in enumerate(ids):
            here, there = (states.setdefault(key(ids[:n]), len(states)) for n in (t, t + 1))
            if steps.setdefault((here, token), there) != there:
                raise ValueError(
                    f"expected one successor of a state and a token, got two for token {token} after "
                    f"{ids[:t]}: `key` forgets too much"
                )
    lm = TabularLM(TabularConfig(vocab_size=vocabulary, states=len(states) + 1))
    with torch.no_grad():
        lm.walk.tokens.weight.fill_(len(states))
        for (here, token), there in steps.items():
            lm.walk.tokens.weight[token, here] = there
    lm.generation_config = GenerationConfig(do_sample=True, top_k=0, use_cache=False, pad_token_id=0)
    return lm


def tabular_policy(lm: TabularLM, method: Method) -> Policy:
    """A policy whose Q and V heads are tables as well: their inner layers are the identity and stay so, and
    nothing is shared between states."""
    policy = Policy(lm, method, ModelConfig(heads="mlp", value_trunk="shared"))
    for head in (
        []
        if policy.heads is None
        else [module for module in policy.heads.modules() if hasattr(module, "inner")]
    ):
        with torch.no_grad():
            head.inner.weight.copy_(torch.eye(*head.inner.weight.shape))
            head.inner.bias.zero_()
        head.inner.requires_grad_(False)
        head.out.bias.requires_grad_(False)
    return policy


def hidden(policy: Policy, context: Sequence[int]) -> Tensor:
    """(1, S) the one-hot vector of the state that a context leads to."""
    return policy.lm.walk(torch.tensor([list(context)])).last_hidden_state[:, -1]


@torch.no_grad()
def write(policy: Policy, context: Sequence[int], **tables: object) -> None:
    """Fills a state's entries of the tables: lm (V,), q and q_target (heads, V), v ()."""
    state = hidden(policy, context).argmax()
    for name, values in tables.items():
        if name == "lm":
            policy.lm.table.weight[:, state] = torch.tensor(values)
        elif name == "v":
            policy.heads.v.out.weight[0, state] = values
        else:
            for head, row in zip(getattr(policy.heads, name), values, strict=True):
                head.out.weight[:, state] = torch.as_tensor(row)


class Learned:
    """What a tabular policy says after a context of tokens."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.eval()

    @torch.no_grad()
    def q(self, context: Sequence[int], *, head: int = 0) -> list[float]:
        """Q of every token under one of the online heads."""
        return self.policy.heads.q[head](hidden(self.policy, context), None).dense()[0].tolist()

    @torch.no_grad()
    def q_of_reply(self, context: Sequence[int]) -> float:
        """Q of the reply that `context` ends with, where a method values whole replies."""
        return self.policy.heads.utterance_q[0](hidden(self.policy, context)).item()

    @torch.no_grad()
    def v(self, context: Sequence[int]) -> float:
        return self.policy.heads.v(hidden(self.policy, context)).item()

    @torch.no_grad()
    def logits(self, context: Sequence[int]) -> Tensor:
        """(V,) of the language model, which is Q for kl_control and psi."""
        return self.policy.lm(torch.tensor([list(context)])).logits[0, -1]

    @torch.no_grad()
    def chances(self, context: Sequence[int], method: Method | None = None) -> list[float]:
        """The policy's probabilities; with `method`, those of another way to decode the same heads."""
        self.policy.method = method or self.policy.method
        return self.policy(torch.tensor([list(context)]), logits_to_keep=1).logits[0, -1].softmax(-1).tolist()

    def greedy(self, context: Sequence[int], method: Method | None = None) -> int:
        chances = self.chances(context, method)
        return chances.index(max(chances))
