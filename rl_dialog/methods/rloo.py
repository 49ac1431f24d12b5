"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rl_dialog.data.batch import Batch
from rl_dialog.methods.advantages import Experience, means_of_others
from rl_dialog.methods.online import OnlineMethod, totals


@dataclass(frozen=True)
class RLOO(OnlineMethod):
    """REINFORCE leave-one-out (Ahmadian et al. 2024): a whole episode is one action.

    l = -i A log pi, A = R - mean R of the others of the group, R all that the episode earned, less c times
    its log-ratio to the prior.
    """

    @property
    def compares_groups(self) -> bool:
        return True

    def advantages(self, experiences: Sequence[Experience]) -> list[np.ndarray]:
        earned, groups = totals(self, experiences)
        above = np.nan_to_num(earned - means_of_others(earned, groups))  # who is alone has nobody to beat
        return [np.full(len(each.rewards), a) for each, a in zip(experiences, above, strict=True)]

    def surrogate(self, logp: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return -self.importance(logp, batch) * batch.advantages * logp, {}
