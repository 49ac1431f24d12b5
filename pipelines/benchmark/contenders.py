"""What takes training steps."""

from __future__ import annotations

from typing import Any

from rl_dialog.methods import (
    AWAC,
    BC,
    BCQ,
    CHAI,
    CQL,
    DPO,
    ILQL,
    KTO,
    KLControl,
    MCReturns,
    Method,
    Psi,
    UtteranceILQL,
    WayOffPolicy,
)
from rl_dialog.models.language_model import ModelConfig

# A method and the model fields it needs. Methods that share a loss stand for each other: bc for tf_all,
# tf_top and dt, ilql for sarsa, bcq for dbcq. The prior's log-probabilities are given, as they are after the
# start of a run.
CONTENDERS: dict[str, tuple[Method, dict[str, Any]]] = {
    "bc": (BC(), {}),
    "ilql mlp": (ILQL(), {"heads": "mlp"}),
    "ilql lowrank": (ILQL(), {"heads": "lowrank"}),
    "ilql, own trunk": (ILQL(), {"value_trunk": "separate"}),
    "mc lowrank": (MCReturns(), {"heads": "lowrank"}),
    "awac lowrank": (AWAC(), {"heads": "lowrank"}),
    "cql lowrank": (CQL(), {"heads": "lowrank"}),
    "bcq lowrank": (BCQ(), {"heads": "lowrank"}),
    "kl_control": (KLControl(), {}),
    "way_off_policy": (WayOffPolicy(), {}),
    "way_off_policy, exact KL": (WayOffPolicy(kl="exact"), {}),
    "way_off_policy, 5 passes": (WayOffPolicy(target_passes=5), {"dropout": 0.1}),
    "psi": (Psi(), {}),
    "utterance_ilql": (UtteranceILQL(), {}),
    "chai": (CHAI(), {}),
    "dpo": (DPO(), {}),
    "kto": (KTO(), {}),
}


def model_of(name: str, *, rank: int) -> ModelConfig:
    """A contender's shape: values read the language model's own transformer unless it says otherwise."""
    return ModelConfig(**{"rank": rank, "value_trunk": "shared"} | CONTENDERS[name][1])
