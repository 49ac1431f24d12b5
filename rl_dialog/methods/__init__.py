"""Every way to learn a policy from logs. A method is one file; METHODS is the only place that lists them."""

from rl_dialog.methods.bc import BC
from rl_dialog.methods.ilql import ILQL
from rl_dialog.methods.kl_control import KLControl
from rl_dialog.methods.method import Method

METHODS: dict[str, type[Method]] = {"bc": BC, "kl_control": KLControl, "ilql": ILQL}
