"""Values that no longer learn, and steer a language model that does: how `online` starts from a checkpoint
that speaks by its values (ilql, mc, psi, kl_control, bcq, ...).

    pi(a|s) = p(a|s) exp(beta (Q(s,a) - V(s))) / Z(s)     as the checkpoint's method has it (`Method.decode`)

p is the language model, which goes on learning; Q and V stay what they are, with the transformers that they
read. So the first policy is the checkpoint's, and what is learned is a factor on p.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_dialog.errors import UserError
from rl_dialog.methods.decoded import Decoded
from rl_dialog.methods.method import Method, Outputs
from rl_dialog.methods.scores import Scores
from rl_dialog.models.heads import ValueHeads

if TYPE_CHECKING:
    from rl_dialog.models.policy import Policy


class Steering(nn.Module):
    """The frozen values of a policy, and how its method acts by them. Raises UserError for lowrank heads."""

    def __init__(
        self,
        method: Method,
        heads: ValueHeads,
        trunk: nn.Module,
        target_trunk: nn.Module | None,
        shape: dict[str, Any],
    ) -> None:
        """trunk: what V reads; target_trunk: what Q' reads, if that is another; shape: of the heads, for
        `rl_dialog.yaml`."""
        super().__init__()
        self.method, self.heads, self.shape = method, heads, shape
        self.trunk, self.target_trunk = trunk, target_trunk
        self.heads.q = nn.ModuleList()  # the targets are what is acted on
        self.requires_grad_(False).eval()

    @classmethod
    def of(cls, policy: Policy) -> Steering:
        """That of a policy with values. Where these read the language model's own states, they keep its
        transformer as it is now."""
        config = policy.model_config
        check_heads(config.heads)
        trunk = policy.value_trunk
        trunk = copy.deepcopy(policy.lm.base_model) if trunk is None else trunk
        shape = {"heads": config.heads, "value_trunk": "separate", "target_trunk": config.target_trunk}
        return cls(policy.method, policy.heads, trunk, policy.target_trunk, shape)

    @property
    def trunks(self) -> list[nn.Module]:
        """The transformers that are run beside the language model."""
        return [trunk for trunk in (self.trunk, self.target_trunk) if trunk is not None]

    def scores(self, lm: Scores, hidden: list[Tensor]) -> Decoded:
        """pi in S states, of the language model's scores and the states (S, H) of each of `trunks`."""
        with torch.no_grad():
            q = tuple(head(hidden[-1], lm) for head in self.heads.q_target)
            reads_v = self.heads.v is not None and self.method.decodes_with_v
            v = self.heads.v(hidden[0]) if reads_v else None
        return Decoded(self.method, Outputs(lm, q_target=q, v=v))

    def train(self, mode: bool = True) -> Steering:
        """Without effect: there is no dropout in values that do not learn."""
        return super().train(False)


def check_heads(kind: str) -> None:
    """Raises UserError for heads that would change with the language model."""
    if kind == "lowrank":
        raise UserError(
            "expected a start whose values stay as they are, got lowrank heads, which are made of the "
            "language model's own output: they would change with every word that is learned. Train it with "
            "--model.heads dueling, or start from the model that it was trained from"
        )
