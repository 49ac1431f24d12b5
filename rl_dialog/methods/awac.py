"""Advantage-weighted cloning: the policy itself moves towards tokens of high advantage, and decodes without
value heads' help."""

from __future__ import annotations

from dataclasses import dataclass

from rl_dialog.methods.ilql import ILQL


@dataclass(frozen=True)
class AWAC(ILQL):
    """Cloning in which replies of a higher advantage weigh more.

    ILQL's values, and L_LM = -min(exp(awac_beta (min Q' - V)), awac_clip) log p(a|s); acts on p alone (Snell
    et al. 2022, baselines).
    """

    tau: float = 0.7
    """expectile of V"""
    awac_beta: float | None = None
    """inverse temperature of the cloning weights, per spread of returns in the training split (per unit of
    reward with value_unit 1); by default half of the beta of ilql"""
    beta: float | None = 0.0
    """strength of the advantage when decoding: none, the weights are in the LM"""
