"""What the training of a task policy depends on, whatever the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from rl_dialog.config import at_least
from rl_dialog.errors import UserError
from rl_dialog.training.imitation import Imitation
from rl_dialog.training.policy_gradient import APPO, GDPL, PG, PPO

REINFORCED_EPOCHS = 220  # where --epochs is not given


@dataclass(frozen=True)
class TaskSettings:
    """Which policy, and how it is trained."""

    policy: Literal["rule", "mle", "pg", "ppo", "appo", "gdpl"] = "rule"
    """rule: the hand-written policy of envs/multiwoz/rule_policy.py. mle: imitation. From there on, pg:
    REINFORCE; ppo; appo: PPO that samples asynchronously, with V-trace; gdpl: PPO on an adversarially learned
    reward"""
    train_seed: int = 0
    """decides on networks, and the conversations to learn from; held-out goals depend on `seed` alone"""
    model_name_or_path: str = ""
    """a task policy's checkpoint, or the folder of a run (its best): where training starts; with --epochs 0
    it is evaluated as it is"""
    epochs: Annotated[int | None, tyro.conf.arg(aliases=["--epoch"])] = None
    """passes over the demonstrations (mle), batches of turns (all others); by default 16 and 220. ConvLab-2's
    --epoch is understood"""
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=["--batchsz"])] = None
    """system turns per epoch, in place of the method's own number. ConvLab-2's --batchsz is understood"""
    num_workers: Annotated[int, tyro.conf.arg(aliases=["--process-num"])] = 0
    """actors that hold conversations, in training and evaluation; 0: this process. ConvLab-2's --process_num
    is understood"""
    num_envs: int = 64
    """conversations that each of them steps at a time while training"""
    eval_every: int = 5
    """epochs between evaluations on the validation goals, which are also the checkpoints"""
    eval_episodes: int = 500
    """conversations of such an evaluation"""
    save_total_limit: int = 3
    """checkpoints kept, besides the best"""
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl"""
    mle: Imitation = Imitation()
    """settings of imitation"""
    pg: PG = PG()
    """settings of REINFORCE"""
    ppo: PPO = PPO()
    """settings of PPO"""
    appo: APPO = APPO()
    """settings of asynchronous PPO"""
    gdpl: GDPL = GDPL()
    """settings of PPO on a learned reward"""

    @property
    def method(self) -> PPO:
        """The settings of reinforcement."""
        settings = getattr(self, self.policy)
        if self.batch_size is None:
            return settings
        return replace(
            settings, batch_size=self.batch_size, minibatch_size=min(settings.minibatch_size, self.batch_size)
        )

    @property
    def imitation(self) -> Imitation:
        """The settings of imitation, where it is all that happens."""
        return self.mle if self.epochs is None else replace(self.mle, epochs=self.epochs)

    @property
    def reinforced_epochs(self) -> int:
        """Batches of turns."""
        return REINFORCED_EPOCHS if self.epochs is None else self.epochs

    def check(self, *, resume: bool) -> None:
        """Raises UserError for what cannot be trained."""
        at_least(self, train_seed=0, num_workers=0, num_envs=1, eval_every=1, eval_episodes=1)
        at_least(self, save_total_limit=1, epochs=0, batch_size=1)
        if self.policy == "rule":
            names = ("model_name_or_path", "epochs", "batch_size")
            given = [name for name in names if getattr(self, name) not in (None, "")]
            if given := given + ["resume"] * resume:
                raise UserError(
                    f"--{given[0]}: the rule policy is not trained; choose another --policy, or leave this "
                    "out"
                )
        if self.policy == "mle" and resume:
            raise UserError(
                "--resume: imitation is not resumed, as it takes minutes; pass --overwrite to start it anew"
            )
        if self.epochs == 0 and not self.model_name_or_path:
            what = "--model_name_or_path, the folder of a task policy or of a run"
            raise UserError(f"--epochs 0 evaluates a checkpoint: expected {what}")
