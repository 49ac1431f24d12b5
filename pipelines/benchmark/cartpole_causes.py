"""Why policies learned from logs of CartPole come out as they do: what their scores say and what is true."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from envs.cart_pole import LIMIT, cart_poles_at
from pipelines.benchmark.cartpole_learners import GAMMA, PASSES, Act, Transitions

PROBED = 1000  # states of each log
MATTERS = 1.0  # steps, discounted, that the worse action costs where the choice matters

Shares = dict[
    str, list[tuple[float, float]]
]  # what -> each log's numerator and denominator: the figure of several logs is sum / sum


def balancing(observations: Tensor) -> Tensor:
    """A rule that never falls: push to where the pole leans and turns, and a little to where the cart is and
    goes.
    """
    return F.one_hot((observations @ torch.tensor([0.02, 0.05, 1.0, 0.3]) > 0).long(), 2).float()


@torch.no_grad()
def true_values(act: Act, states: Tensor) -> Tensor:
    """(K, E, 2) discounted returns of each action in the states (K, E, 4) when the best actions of `act`
    follow; rolled out, not estimated.
    """
    count, width = states.shape[:2]
    env = cart_poles_at(states[:, :, None].expand(-1, -1, 2, -1).flatten(0, 2).numpy())
    actions, alive, values = (
        torch.arange(2).repeat(count * width),
        torch.ones(count * width * 2, dtype=torch.bool),
        torch.zeros(count * width * 2),
    )
    for t in range(LIMIT):
        values += alive * GAMMA**t
        following, _, terminated, _, _ = env.step(actions.numpy())
        alive &= ~torch.from_numpy(terminated)
        actions = act(torch.from_numpy(following).view(count, -1, 4)).argmax(-1).flatten()
    return values.view(count, width, 2)


@torch.no_grad()
def causes(logs: Transitions, priors: dict[str, Act], values: dict[str, nn.Module], *, seed: int) -> Shares:
    """Figures that explain returns, over PROBED states of every log.

    A choice matters where the worse action costs more than a step, if a rule that never falls goes on after
    it; there the logged action, the one that a prior finds likelier or the one of higher value is right or
    wrong. For priors and WOP (whose values differ by log pi): by how much the logged action stands above the
    other, everywhere. For M passes: by how much their least lowers the value of a state, and how far they
    differ in what they prefer.
    """
    draws = torch.Generator().manual_seed(seed)
    place = (
        torch.arange(len(logs.actions))[:, None],
        torch.randint(0, logs.actions.shape[1], (len(logs.actions), PROBED), generator=draws),
    )
    states, logged = logs.observations[place], logs.actions[place] * 2.0 - 1
    true = true_values(balancing, states).diff(dim=-1).squeeze(-1)  # above 0 where action 1 is the right one
    matter, every = (true.abs() > MATTERS).float(), torch.ones_like(true)
    leanings = {
        f"p, {name}": prior(states).clamp_min(1e-8).log()
        for name, prior in priors.items()
        if name != "uniform"
    }  # that has no opinion
    leanings |= {name: networks(states) for name, networks in values.items()}
    leanings = {"logged action": logged} | {
        name: scores.diff(dim=-1).squeeze(-1) for name, scores in leanings.items()
    }
    shares = {"% of states: the choice matters": (100 * matter, every)}
    shares |= {
        f"% right there: {name}": (100 * matter * (leaning.sign() == true.sign()), matter)
        for name, leaning in leanings.items()
    }
    shares |= {
        f"logged - other: {name}": (logged * leanings[name], every)
        for name in leanings
        if name.startswith(("p, ", "WOP"))
    }
    if psi := next((name for name in values if name.startswith("WOP")), None):
        lowered, apart = _passes(values[psi], states)
        shares |= {
            f"least of {PASSES} passes lowers a value by: {psi}": (lowered, every),
            f"passes differ in 1 - 0 by: {psi}": (apart, every),
        }
    return {
        name: list(zip(top.sum(1).tolist(), bottom.sum(1).tolist(), strict=True))
        for name, (top, bottom) in shares.items()
    }


def _passes(networks: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
    """(K, E) twice: the mean minus the least of the passes with dropout, of an action; the range of their
    differences between the actions.
    """
    active = copy.deepcopy(networks).train()
    passes = torch.stack([active(states) for _ in range(PASSES)])  # (M, K, E, 2)
    apart = passes.diff(dim=-1).squeeze(-1)
    return (passes.mean(0) - passes.amin(0)).mean(-1), apart.amax(0) - apart.amin(0)
