"""What a method is: hyper-parameters, the heads it needs, a loss on decisions, and how it turns outputs into
logits to sample from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods.scores import Scores

STRENGTH = 5.0
"""how far to lean on the advantage of single replies, per spread of returns, where nobody says how far"""


@dataclass(frozen=True)
class Heads:
    """What a method needs beside the LM's own logits."""

    q: int = 0  # vocabulary-wide Q heads
    v: bool = False  # a state-value head
    target: bool = False  # Polyak-averaged copies of the Q heads
    utterance_q: int = 0  # Q heads with one value for a whole reply, and their Polyak-averaged copies
    utterance_mean: bool = (
        False  # they read the mean hidden state up to the reply's end instead of the one at its end
    )
    lm_target: bool = False  # a Polyak-averaged copy of the whole LM

    @property
    def bootstraps(self) -> bool:
        """Whether what follows a reply is valued by the state that it leads to."""
        return bool(self.q or self.v or self.lm_target)


@dataclass
class Bound:
    """What turns the loss of cloning into the bound on the likelihood, where latents come from a
    posterior; sums over the batch."""

    kl: Tensor  # () nats
    penalty: Tensor  # () what the loss pays for them: with an annealed weight, and free bits
    words: Tensor | None = None  # () the weighted loss of predicting each message's words from its latent

    def added_to(self, loss: Loss) -> Loss:
        """`nll` becomes the bound on it, and `reconstruction` says what it was."""
        metrics = loss.metrics | {"kl": self.kl.detach()}
        if "nll" in metrics:
            metrics |= {"reconstruction": metrics["nll"], "nll": metrics["nll"] + self.kl.detach()}
        total = loss.total + self.penalty
        if self.words is not None:
            total, metrics = total + self.words, metrics | {"bag_of_words": self.words.detach()}
        return Loss(total, metrics)


@dataclass
class Regularisation:
    """What predictions of teachers' values add to the loss of cloning (models/message_heads.py)."""

    penalty: Tensor  # () what the loss pays for them
    losses: dict[str, Tensor]  # () each head's, without its weight; sums over the batch's messages
    messages: int = 0  # how many

    def added_to(self, loss: Loss) -> Loss:
        metrics = {name: value.detach() for name, value in self.losses.items()}
        metrics["messages"] = self.penalty.new_tensor(float(self.messages))
        return Loss(loss.total + self.penalty, loss.metrics | metrics)


@dataclass
class Outputs:
    """What a policy says about S states (data/batch.py: the N decisions first)."""

    lm: Scores  # None while a method trains whose loss does not read it (`Method.reads_lm`)
    q: tuple[Scores, ...] = ()
    q_target: tuple[Scores, ...] = ()
    v: Tensor | None = None  # (S,)
    lm_target: tuple[Scores, ...] = ()  # one per pass of the target LM
    prior: Scores | None = None  # the frozen prior, where the method reads more of it than batch.prior_logp
    context: Scores | None = (
        # (M, V) the LM where the context's tokens are predicted (batch.context), where the method learns
        # those too
        None
    )
    latents: Bound | None = None  # what the loss of a model with latents needs beside the method's
    messages: Regularisation | None = None  # and that of one that predicts what teachers say of messages
    # Of replies that were said with latents of their own (batch.reply_noise, batch.latents):
    drawn: Tensor | None = None  # (R, Z) the latents, without gradient
    latent_logp: Tensor | None = None  # (R,) their log-density; no gradient through the latents
    utterance_q: tuple[Tensor, ...] = ()  # (R,) each: the value of each reply
    utterance_q_target: tuple[Tensor, ...] = ()
    proposal_q: tuple[Tensor, ...] = ()  # (R, n) each: the values of proposed replies (batch.proposals)
    proposal_q_target: tuple[Tensor, ...] = ()
    random_q: tuple[Tensor, ...] = ()  # (R, n) each: the values of features drawn uniformly from [-1, 1]^H


@dataclass
class Loss:
    """`total` and every metric are SUMS over the method's terms (`Method.terms`, most often the N decisions);
    the training loop divides by their global number."""

    total: Tensor  # ()
    metrics: dict[str, Tensor] = field(default_factory=dict)  # (), detached


@dataclass(frozen=True)
class Method:
    """A frozen dataclass of hyper-parameters with a loss and a decode rule; nothing else differs between
    methods."""

    heads: ClassVar[Heads] = Heads()
    target_passes: ClassVar[int] = 1  # forward passes of the target LM; more than one are made with dropout
    rows_per_unit: ClassVar[int] = (
        1  # rows that `prepare` puts side by side and that must stay in one batch (a pair: 2)
    )
    needs_rewards: ClassVar[bool] = True  # off: learns the same from rewards that are all zero
    trains_lm: ClassVar[bool] = True  # off: only the heads learn
    learning_rate_share: ClassVar[float] = (
        1.0  # of the default learning rate, where steps that suit cloning are too long
    )
    least_updates: ClassVar[int | None] = (
        None  # by default, however few the data; None: what a new model, or new values, need (loop.py)
    )
    reads_lm: ClassVar[bool] = True  # off: the loss does not ask for Outputs.lm
    proposals: ClassVar[int] = (
        0  # replies that the LM proposes to every context before training, for batch.proposals
    )
    acts_with_beta: ClassVar[bool] = False  # `beta` belongs to `decode`: another one needs no training
    target_kl: ClassVar[float | None] = (
        None  # nats per reply that a method with `with_strength` is to keep from p
    )
    num_generations: ClassVar[int] = 1  # replies to draw when acting, of which the best is said ...
    rank_by: ClassVar[str] = ""  # ... by this way of evaluation/scoring.py ...
    rerank_log_prob_weight: ClassVar[float] = 0.0  # ... and so much of its log-probability
    online: ClassVar[bool] = False  # learns from episodes that it plays itself (methods/online.py)
    measures: ClassVar[bool] = (
        False  # `loss` wants in batch.measured what `measure` finds in the whole update
    )
    gamma: ClassVar[float] = 1.0  # discount of the returns that Q estimates ...
    discount: ClassVar[str] = "turn"  # ... at every token, or at the end of a reply
    draws_from_posterior: ClassVar[bool] = (
        False  # learns to say what was said and no more, so latents may be inferred from it
    )
    plain_lm: ClassVar[bool] = (
        True  # decode is the LM's logits, so the checkpoint alone (AutoModelForCausalLM) is the policy
    )

    @property
    def uses_prior(self) -> bool:
        """Wants a frozen prior, and in batch.prior_logp its log-probability of each action, computed once
        before training."""
        return False

    @property
    def prior_every_step(self) -> bool:
        """Wants `Outputs.prior` too, the whole distribution: a forward pass of the prior at every step."""
        return False

    @property
    def learns_context(self) -> bool:
        """Wants `Outputs.context`."""
        return False

    @property
    def skips_parameters(self) -> bool:
        """Can the loss leave out parameters of the LM or of a head? Training by several workers must know."""
        return not self.trains_lm

    @property
    def has_critic(self) -> bool:
        """Is there a Q over tokens outside of training too?"""
        return bool(self.heads.q)

    @property
    def about_q(self) -> str:
        """Why Q over tokens is no return, or why it is read in training alone; nothing for a plain return."""
        return ""

    @property
    def decodes_with_v(self) -> bool:
        """Does `decode` read the state's value? It shifts all logits of a state alike, so most decoding can
        leave it out."""
        return False

    def extend_tokenizer(self, tokenizer: Any) -> Any:
        """The tokenizer with what the method adds to it (tokens, template), before the language model is
        made."""
        return tokenizer

    def prepare(
        self, train: Sequence[Row], validation: Sequence[Row], tokenizer: Any
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """What the rows of both splits become before training: which replies to learn from, behind which
        tokens."""
        return train, validation

    def terms(self, batch: Batch) -> int:
        """How many terms the sums of `loss` have: the N decisions, unless the method learns from whole
        replies or pairs."""
        return batch.decisions

    def target_rate(self, updates: int, progress: float) -> float:
        """Polyak rate of the targets in a run of so many updates, of which the share `progress` is done; 0
        for a method without targets."""
        return 0.0

    def rate_share(self, step: int) -> float:
        """The share of the learning rate in update (online: round) `step`."""
        return 1.0

    def suited(self, strength: float) -> Method:
        """The method with what nobody set of how far to lean on an advantage: `strength`, per unit of value,
        which follows from the data that it learns from."""
        return self

    def with_strength(self, strength: float) -> Method:
        """The method that acts on log p + strength (Q - V), for methods that act on something like it."""
        raise TypeError(f"{type(self).__name__} has no strength to set")

    def in_rewards(self, unit: float) -> dict[str, float]:
        """The hyper-parameters that are in the unit of values, as they are in units of reward, where a unit
        of values is `unit` of them."""
        return {}

    def reach(self, returns: float, reward: float) -> float:
        """How far Q can come to lie from where it starts, where no return exceeds `returns` and no reward
        `reward` (both sizes, in units of value).

        Infinite for methods whose Q nobody watches.
        """
        return math.inf

    def measure(self, out: Outputs, batch: Batch) -> Tensor:
        """(K,) sums over a batch; the loop adds them up over the whole update before any of its losses is
        computed."""
        raise TypeError(f"{type(self).__name__} measures nothing")

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        """The training loss over the batch's decisions."""
        raise TypeError(f"{type(self).__name__} has no loss")

    def critic(self, out: Outputs) -> Tensor:
        """(S, V) Q over tokens, in units of value, of a method that `has_critic`: the lowest target head."""
        return reduce(torch.minimum, (head.dense() for head in out.q_target))

    def decode(self, out: Outputs) -> Tensor:
        """(S, V) logits to sample from; temperature, top-p and the rest belong to `generate`."""
        return out.lm.dense()


def check_ranges(
    method: Method,
    *,
    above_0: Sequence[str] = (),
    at_least_0: Sequence[str] = (),
    at_least_1: Sequence[str] = (),
    shares: Sequence[str] = (),
) -> None:
    """Raises UserError for the first of these hyper-parameters that is out of its range, a share from 0 to 1;
    None is no setting."""
    ranges = {
        "above 0": (above_0, lambda value: value > 0),
        "of at least 0": (at_least_0, lambda value: value >= 0),
        "of at least 1": (at_least_1, lambda value: value >= 1),
        "from 0 to 1": (shares, lambda value: 0 <= value <= 1),
    }
    for expected, (names, fits) in ranges.items():
        for name in names:
            value = getattr(method, name)
            if value is not None and not fits(value):
                raise UserError(f"expected --method.{name} {expected}, got {value:g}")
