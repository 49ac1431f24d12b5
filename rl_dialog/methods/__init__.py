"""Every way to learn a policy, from logs or from its own episodes. A method is one file; METHODS is the only
place that lists them."""

from rl_dialog.methods.awac import AWAC
from rl_dialog.methods.bc import BC
from rl_dialog.methods.bcq import BCQ
from rl_dialog.methods.chai import CHAI
from rl_dialog.methods.cql import CQL
from rl_dialog.methods.dbcq import DBCQ
from rl_dialog.methods.dpo import DPO
from rl_dialog.methods.dt import DT
from rl_dialog.methods.grpo import GRPO
from rl_dialog.methods.ilql import ILQL
from rl_dialog.methods.kl_control import KLControl
from rl_dialog.methods.kto import KTO
from rl_dialog.methods.mc import MCReturns
from rl_dialog.methods.method import Method
from rl_dialog.methods.ppo import PPO
from rl_dialog.methods.psi import Psi
from rl_dialog.methods.reinforce import Reinforce
from rl_dialog.methods.rloo import RLOO
from rl_dialog.methods.sarsa import SARSA
from rl_dialog.methods.tf_all import TFAll
from rl_dialog.methods.tf_top import TFTop
from rl_dialog.methods.utterance_ilql import UtteranceILQL
from rl_dialog.methods.vhrl import VHRL
from rl_dialog.methods.way_off_policy import WayOffPolicy

METHODS: dict[str, type[Method]] = {
    "bc": BC,
    "tf_all": TFAll,
    "tf_top": TFTop,
    "dt": DT,
    "kl_control": KLControl,
    "psi": Psi,
    "way_off_policy": WayOffPolicy,
    "ilql": ILQL,
    "utterance_ilql": UtteranceILQL,
    "sarsa": SARSA,
    "mc": MCReturns,
    "awac": AWAC,
    "cql": CQL,
    "bcq": BCQ,
    "dbcq": DBCQ,
    "chai": CHAI,
    "dpo": DPO,
    "kto": KTO,
    "reinforce": Reinforce,
    "rloo": RLOO,
    "grpo": GRPO,
    "ppo": PPO,
    "vhrl": VHRL,
}
FROM_LOGS = {name: kind for name, kind in METHODS.items() if not kind.online}  # those of `train`
ONLINE = {name: kind for name, kind in METHODS.items() if kind.online}  # those of `online`
