"""What a method reports of held-out dialogs is known before it is trained."""

from __future__ import annotations

import pytest
import torch

from rl_dialog.methods import FROM_LOGS, METHODS
from rl_dialog.training.rehearsal import reported_metrics


@pytest.mark.parametrize("name", FROM_LOGS)
def test_every_method_can_be_rehearsed(name: str) -> None:
    before = torch.get_rng_state()
    assert "eval/loss" in reported_metrics(METHODS[name]())
    assert torch.equal(torch.get_rng_state(), before)


def test_names_are_those_of_the_loss() -> None:
    assert reported_metrics(METHODS["bc"]()) == {"eval/loss", "eval/nll", "eval/perplexity"}
    assert "eval/q_loss" in reported_metrics(METHODS["ilql"]())
