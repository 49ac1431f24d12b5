"""What a method reports of held-out dialogs is known before it is trained."""

from __future__ import annotations

import pytest
import torch

from rl_dialog.methods import BCQ, FROM_LOGS, ILQL, METHODS, UtteranceILQL
from rl_dialog.training.rehearsal import reported_metrics


@pytest.mark.parametrize("name", FROM_LOGS)
def test_every_method_can_be_rehearsed(name: str) -> None:
    before = torch.get_rng_state()
    assert "eval/loss" in reported_metrics(METHODS[name]())
    assert torch.equal(torch.get_rng_state(), before)


def test_names_are_those_of_the_loss() -> None:
    assert reported_metrics(METHODS["bc"]()) == {"eval/loss", "eval/nll", "eval/perplexity"}
    assert {"eval/q_loss", "eval/perplexity"} <= reported_metrics(METHODS["ilql"]())


def test_who_does_not_clone_reports_no_perplexity() -> None:
    """The language model is not asked: 0 nats, and so a perplexity of 1, would be made up."""
    for method in (ILQL(awac_weight=0.0), BCQ(clone_weight=0.0), UtteranceILQL(awac_weight=0.0)):
        assert not {name for name in reported_metrics(method) if "nll" in name or "perplexity" in name}
    assert "eval/nll" in reported_metrics(ILQL(awac_weight=0.0, reg_to="base_policy"))
