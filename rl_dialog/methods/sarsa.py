"""One step of policy improvement: value the behaviour that wrote the logs, then lean towards what it
valued."""

from __future__ import annotations

from dataclasses import dataclass

from rl_dialog.methods.ilql import ILQL


@dataclass(frozen=True)
class SARSA(ILQL):
    """ILQL for the values of the logs' own behaviour.

    ILQL with tau = 1/2: V is the mean of Q over logged tokens, so Q is that of the behaviour policy (Snell et
    al. 2022, "single-step RL").
    """

    tau: float = 0.5
    """expectile; 0.5 is what makes this SARSA"""
