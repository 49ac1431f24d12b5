"""What learns from logs of CartPole: small networks side by side, the losses of rl_dialog/methods on them,
and priors p(a|s).

A transition is a decision of a Batch: its state is an observation instead of a prefix of tokens and its turn
ends at once; an MLP stands for the language model. All seeds and buffers learn together, as slices of batched
matrix products: K networks, B transitions each, N = K B decisions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_dialog.data.batch import Batch
from rl_dialog.methods import WayOffPolicy
from rl_dialog.methods.method import Method, Outputs
from rl_dialog.methods.scores import Dense

SCALE = torch.tensor([1.0, 1.0, 0.1, 1.0])  # brings position, speed, angle and angular speed to one size
WIDTH, SAMPLES = 32, 32  # hidden units; B
C, PASSES = 2.0, 5  # WOP's c and M as published
# Where targets are Monte-Carlo. All values are near 1 / (1 - gamma): more would drown differences of actions.
DROPOUT = 0.02
GAMMA, POLYAK, RATE = (
    0.95,
    0.005,
    1e-3,
)  # for all methods; targets that follow ten times as fast let plain Q-learning diverge
LATENT, MIXED = 2, 32  # numbers in z, and how many draws of it p(a|s) is the mean over

Q_LEARNING = WayOffPolicy(
    origin="logits", state_value=False, coefficient="kl", c=0.0, gamma=GAMMA
)  # r + 0 (log p - log pi) + gamma max Q'
LOWER_Q_LEARNING = replace(Q_LEARNING, target_passes=PASSES)  # what DBCQ chooses by
WOP = WayOffPolicy(backup="psi", origin="logits", state_value=False, c=C, gamma=GAMMA, target_passes=PASSES)

Act = Callable[[Tensor], Tensor]  # (K, E, 4) observations -> (K, E, 2) probabilities
Columns = Callable[[int], Tensor]  # the number of a step -> (K, B), which transitions it learns from


class Networks(nn.Module):
    """K independent MLPs of two hidden layers: (K, B, inputs) -> (K, B, outputs), the first four inputs an
    observation.
    """

    def __init__(self, count: int, *, inputs: int = 4, outputs: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = [(inputs, WIDTH), (WIDTH, WIDTH), (WIDTH, outputs)]
        self.weights = nn.ParameterList([(torch.rand(count, i, o) * 2 - 1) / i**0.5 for i, o in sizes])
        self.biases = nn.ParameterList([torch.zeros(count, 1, o) for _, o in sizes])
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.cat([SCALE, torch.ones(inputs - 4)]))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs / self.scale
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            thinned = self.dropout(
                torch.ones_like(bias)
            )  # one mask per network and pass: a pass is one draw of a function
            hidden = torch.relu(torch.baddbmm(bias, hidden, weight)) * thinned
        return torch.baddbmm(self.biases[-1], hidden, self.weights[-1])


class Added(nn.Module):
    """log p(a|s) of a clone, which stays as it is, plus what K networks say, at first 0: the policy starts as
    the clone.
    """

    def __init__(self, clone: Networks) -> None:
        super().__init__()
        self.clone, self.added = (
            copy.deepcopy(clone).requires_grad_(False),
            Networks(len(clone.weights[0]), dropout=DROPOUT),
        )
        nn.init.zeros_(self.added.weights[-1])

    def forward(self, observations: Tensor) -> Tensor:
        return self.clone(observations).log_softmax(-1) + self.added(observations)


@dataclass
class Transitions:
    """K logs of L transitions each, in the order they were made. The reward is always 1."""

    observations: Tensor  # (K, L, 4)
    actions: Tensor  # (K, L) int64
    following: Tensor  # (K, L, 4)
    terminated: Tensor  # (K, L) bool: the pole fell or the cart left; not where the time limit cut an episode
    ended: Tensor  # (K, L) bool: terminated or cut

    @classmethod
    def empty(cls, count: int, length: int) -> Transitions:
        flags = (torch.zeros(count, length, dtype=torch.bool) for _ in range(2))
        return cls(
            torch.zeros(count, length, 4),
            torch.zeros(count, length, dtype=torch.int64),
            torch.zeros(count, length, 4),
            *flags,
        )

    @classmethod
    def stack(cls, parts: list[Transitions]) -> Transitions:
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def batch(self, columns: Tensor, prior_logp: Tensor | None = None) -> tuple[Batch, Tensor, Tensor]:
        """The transitions `columns` (K, B) as N = K B decisions with their observations and the following
        ones, each (K, B, 4).

        States are the N observations, then the N following ones. There are no tokens, so the token tensors
        are empty. `prior_logp` (K, L) is log p of the logged actions.
        """
        place = torch.arange(len(columns))[:, None], columns
        dones, count, tokens = self.terminated[place].flatten(), columns.numel(), torch.zeros(0, 0)
        batch = Batch(
            *[tokens] * 6,
            states=torch.arange(2 * count),
            actions=self.actions[place].flatten(),
            rewards=torch.ones(count),
            rated=torch.ones(count, dtype=torch.bool),
            next_state=torch.arange(count, 2 * count).masked_fill(dones, 0),
            dones=dones,
            turn_end=torch.ones(count, dtype=torch.bool),
            rows=torch.arange(count),
        )
        if prior_logp is not None:
            batch.prior_logp = prior_logp[place].flatten()
        return batch, self.observations[place], self.following[place]

    def mean_return(self) -> Tensor:
        """(K,) the mean return of the episodes in the logs, that is their mean length; the last, unfinished
        one does not count.
        """
        steps = torch.arange(1, self.ended.shape[1] + 1)
        return torch.stack([steps[ended].max() / ended.sum() for ended in self.ended])


class Learner:
    """One method on K networks: what the trainer does with a language model, without the language."""

    def __init__(self, method: Method, networks: nn.Module) -> None:
        self.method, self.online = method, networks.train()
        self.target = (
            copy.deepcopy(networks).requires_grad_(False).train(method.target_passes > 1)
        )  # dropout is for several passes only
        self.optimizer = torch.optim.Adam(networks.parameters(), lr=RATE)

    def update(
        self, logs: Transitions, columns: Tensor, *, progress: float, prior_logp: Tensor | None = None
    ) -> None:
        """One step of Adam; `progress` 0..1 lowers the learning rate to a fiftieth."""
        batch, states, next_states = logs.batch(columns, prior_logp)
        scores = self.online(states).flatten(0, 1)  # (N, 2)
        unread = torch.zeros_like(
            scores
        )  # losses read online scores at decisions only, target scores at next states only
        with torch.no_grad():
            passes = range(self.method.target_passes if self.method.heads.lm_target else 0)
            targets = tuple(
                Dense(torch.cat([unread, self.target(next_states).flatten(0, 1)])) for _ in passes
            )
        loss = self.method.loss(Outputs(Dense(torch.cat([scores, unread])), lm_target=targets), batch)
        step(
            self.optimizer, loss.total / columns.shape[1], progress
        )  # the mean over each network's own decisions
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), POLYAK)


def step(optimizer: torch.optim.Optimizer, loss: Tensor, progress: float) -> None:
    loss.backward()
    optimizer.param_groups[0]["lr"] = RATE * max(0.02, 1 - progress)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def learn(
    method: Method,
    logs: Transitions,
    columns: Columns,
    *,
    steps: int,
    seed: int,
    prior_logp: Tensor | None = None,
    above: Networks | None = None,
) -> nn.Module:
    """One network per log; with `above` it adds to that clone's log p. Every method starts from the same
    weights.

    `columns` is asked anew for each step: methods that get equal ones see the same transitions in the same
    order.
    """
    torch.manual_seed(seed)
    networks = (
        Networks(len(logs.actions), dropout=DROPOUT if method.target_passes > 1 else 0.0)
        if above is None
        else Added(above)
    )
    learner = Learner(method, networks)
    for number in range(steps):
        learner.update(logs, columns(number), progress=number / steps, prior_logp=prior_logp)
    return networks.eval()


def greedy(scores: Callable[[Tensor], Tensor]) -> Act:
    """The action with the highest score."""
    return lambda observations: F.one_hot(scores(observations).argmax(-1), 2).float()


def sampled(scores: Callable[[Tensor], Tensor]) -> Act:
    """softmax(scores): a clone's own probabilities, and the policy of Psi-learning."""
    return lambda observations: scores(observations).softmax(-1)


def best_of(prior: Tensor, q: Tensor, draws: int) -> Tensor:
    """(..., A) probabilities of the action with the highest Q (..., A) among `draws` of the prior (DBCQ).

    With the actions in the order of their Q and F(a) the prior's probability of a or anything below it: P(a)
    = F(a)^n - F(a-)^n.
    """
    order = q.argsort(-1)
    below = prior.gather(-1, order).cumsum(-1) ** draws
    return torch.zeros_like(below).scatter(
        -1, order, below.diff(dim=-1, prepend=torch.zeros_like(below[..., :1]))
    )


def variational(logs: Transitions, columns: Columns, *, steps: int, seed: int) -> Act:
    """A conditional VAE over actions, as the paper's prior: p(a|s) is the mean of the decoder's p(a|s,z) over
    draws of z from N(0, 1).

    It learns by the lower bound log p(a|s) >= E_q(z|s,a) log p(a|s,z) - KL(q(z|s,a) || N(0, 1)). The draws
    are the same for all states and stay, so that the prior is a function of the state.
    """
    torch.manual_seed(seed)
    count = len(logs.actions)
    encoder, decoder = Networks(count, inputs=6, outputs=2 * LATENT), Networks(count, inputs=4 + LATENT)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=RATE)
    place = torch.arange(count)[:, None]
    for number in range(steps):
        batch = columns(number)
        observations, actions = logs.observations[place, batch], logs.actions[place, batch]
        mean, log_variance = encoder(torch.cat([observations, F.one_hot(actions, 2).float()], -1)).chunk(
            2, -1
        )  # (K, B, LATENT)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        log_p = (
            decoder(torch.cat([observations, z], -1))
            .log_softmax(-1)
            .gather(-1, actions[..., None])
            .squeeze(-1)
        )
        kl = (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1) / 2
        step(optimizer, (kl - log_p).sum() / batch.shape[1], number / steps)
    draws = torch.randn(MIXED, LATENT)

    def act(observations: Tensor) -> Tensor:
        repeated = observations[:, :, None].expand(-1, -1, MIXED, -1).flatten(1, 2)  # (K, E MIXED, 4)
        z = draws.repeat(observations.shape[1], 1).expand(len(observations), -1, -1)
        return decoder(torch.cat([repeated, z], -1)).softmax(-1).unflatten(1, (-1, MIXED)).mean(2)

    return act


def uniform(observations: Tensor) -> Tensor:
    """Both actions alike: what a method does with a prior that says nothing, it does without one."""
    return torch.full((*observations.shape[:-1], 2), 0.5)


@torch.no_grad()
def log_probability(prior: Act, logs: Transitions) -> Tensor:
    """(K, L) log p of the logged actions, never below log 1e-8."""
    parts = zip(logs.observations.split(1000, 1), logs.actions.split(1000, 1), strict=True)
    return (
        torch.cat(
            [
                prior(observations).gather(-1, actions[..., None]).squeeze(-1)
                for observations, actions in parts
            ],
            1,
        )
        .clamp_min(1e-8)
        .log()
    )
