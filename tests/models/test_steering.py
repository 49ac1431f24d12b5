"""A start that speaks by its values: the first policy is the checkpoint's, learner and engine agree on it,
its gradient is that of the decoded policy, and checkpoints of it decode the same."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tests.methods.test_online as world
from rl_dialog.data.batch import collate
from rl_dialog.data.rollout import rollout_rows
from rl_dialog.errors import UserError
from rl_dialog.evaluation.conversations import Conversations, can_keep
from rl_dialog.evaluation.generation import Decoding, generate_replies, recorded_replies
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import BCQ, GRPO, ILQL, PPO, RLOO, KLControl, MCReturns, Psi, Reinforce
from rl_dialog.methods.decoded import Decoded
from rl_dialog.methods.method import Outputs
from rl_dialog.methods.scores import Dense, entropy
from rl_dialog.models.checkpoint import freeze_prior, load_prior, speaks_by_values, steering_of
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.training.online import OnlineSettings, OnlineTrainer
from tests.training.test_online import Wordy

STARTS = {
    "ilql": (ILQL(beta=2.0), {}),
    "ilql, own trunks": (ILQL(beta=2.0), {"trunk": "separate", "target": "separate"}),
    "ilql among the top": (ILQL(beta=1.0, top_k=40, advantage_clip=0.5), {"trunk": "separate"}),
    "mc": (MCReturns(beta=1.5), {"heads": "dueling"}),
    "psi": (Psi(c=0.5), {"trunk": "separate"}),
    "kl_control": (KLControl(c=0.7), {}),
    "bcq": (BCQ(beta=1.0), {"trunk": "separate"}),
}
TALKS = [[{"role": "user", "content": text}] for text in ("hello", "what would you like to eat", "hi", "a b")]


@pytest.fixture
def begin(make_policy, tokenizer, tmp_path):  # noqa: ANN001, ANN201
    """begin(name, method): (the start, a policy of the method that goes on from its checkpoint)."""

    def made(name: str = "ilql", method=RLOO()):  # noqa: ANN001, ANN202, B008
        acting, how = STARTS[name]
        start = make_policy(acting, "llama", **how)
        folder = tmp_path / "start"
        start.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = ModelConfig(model_name_or_path=str(folder))
        policy = Policy(load_lm(model, tokenizer), method, model)
        policy.steering = steering_of(folder)
        return start, policy.eval()

    return made


@torch.no_grad()
def log_pi(policy: Policy) -> torch.Tensor:
    ids = torch.tensor([[1, 5, 40, 41, 2, 60, 61], [1, 5, 42, 2, 7, 70, 9]])
    return policy(ids).logits.float().log_softmax(-1)


@pytest.mark.parametrize("name", STARTS)
def test_the_first_policy_is_that_of_the_checkpoint(begin, name: str) -> None:  # noqa: ANN001
    start, policy = begin(name)
    torch.testing.assert_close(log_pi(policy), log_pi(start), atol=1e-5, rtol=1e-5)
    assert (
        log_pi(policy).exp() - policy.lm(torch.tensor([[1, 5, 40]])).logits.softmax(-1)[:, -1:]
    ).abs().max() > 0.01
    assert not any(parameter.requires_grad for parameter in policy.steering.parameters())
    assert policy.steering not in policy.values()


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        *(("ilql", size) for size in (1, 3, 128)),
        *(("ilql, own trunks", size) for size in (1, 128)),
        ("ilql among the top", 3),
        ("psi", 128),
    ],
)
def test_the_learner_says_what_the_engine_said_in_every_batch(
    begin, tokenizer, name: str, batch_size: int
) -> None:  # noqa: ANN001
    """Where prompts are read anew, and where caches stay from turn to turn; at a temperature too."""
    _, policy = begin(name)
    for temperature in (1.0, 0.7):
        decoding = Decoding(max_new_tokens=6, temperature=temperature)
        anew = recorded_replies(policy, tokenizer, TALKS, decoding, seeds=[3, 1, 4, 1], batch_size=batch_size)
        assert can_keep(policy, decoding)
        kept = Conversations(policy, tokenizer, decoding, rows=4)
        from_cache = kept.recorded(dict(enumerate(TALKS)), [3, 1, 4, 1])
        rows = [rollout_rows([reply.spoken], [0.0], truncated=False)[0][0] for reply in anew]
        batch = collate(rows)
        with torch.no_grad():
            logp = -policy.outputs(batch).lm.scaled(1 / temperature).nll(batch.actions)[1]
        for b, (one, other) in enumerate(zip(anew, from_cache, strict=True)):
            assert one.spoken.ids == other.spoken.ids
            np.testing.assert_allclose(one.spoken.logp, logp[batch.rows == b].numpy(), atol=5e-5)
            np.testing.assert_allclose(other.spoken.logp, one.spoken.logp, atol=5e-5)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ilql", RLOO(c=0.1)),
        ("ilql, own trunks", PPO(c=0.1)),
        pytest.param("psi", GRPO(), marks=pytest.mark.slow),
        pytest.param("ilql", PPO(c=0.1), marks=pytest.mark.slow),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_a_step_moves_the_language_model_and_no_value(begin, tokenizer, tmp_path, name, method) -> None:  # noqa: ANN001
    """At first nothing is charged: the prior is the policy of the start. What is saved decodes the same, and
    so does its prior."""
    start, policy = begin(name, method)
    prior = freeze_prior(policy, tmp_path / "run/prior", tokenizer)
    steering = {key: value.clone() for key, value in policy.steering.state_dict().items()}
    before = policy.lm.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    play = Rollouts(Wordy, Decoding(max_new_tokens=4), groups=3, group_size=3, seed=0)
    settings = OnlineSettings(
        max_steps=1, learning_rate=1e-2, warmup_steps=0, eval_steps=0, report_to="none", num_iterations=1
    )
    trainer = OnlineTrainer(policy, tokenizer, play, settings, tmp_path / "run", prior=prior)
    result = trainer.train()
    assert abs(result["train/kl_per_reply"]) < 1e-4 and result["train/behaviour_gap"] < 1e-5
    for key, value in policy.steering.state_dict().items():
        assert torch.equal(value, steering[key]), key
    assert not torch.equal(policy.lm.state_dict()["model.layers.0.mlp.up_proj.weight"], before)
    assert (log_pi(policy) - log_pi(start)).abs().max() > 1e-3

    loaded = Policy.from_pretrained(result["latest"])
    assert type(loaded.method) is type(method) and loaded.steering.method == start.method
    assert torch.equal(log_pi(loaded), log_pi(policy))
    said = [
        [
            reply.text
            for reply in generate_replies(each, tokenizer, TALKS, Decoding(max_new_tokens=8), seeds=[1] * 4)
        ]
        for each in (loaded, policy)
    ]
    assert said[0] == said[1]
    (kept,) = load_prior(result["latest"]).members
    torch.testing.assert_close(log_pi(kept), log_pi(start), atol=1e-5, rtol=1e-5)
    assert speaks_by_values(result["latest"])  # it can be gone on from again
    again = Policy(load_lm(ModelConfig(model_name_or_path=result["latest"]), tokenizer), RLOO())
    again.steering = steering_of(result["latest"])
    torch.testing.assert_close(log_pi(again.eval()), log_pi(policy), atol=1e-6, rtol=1e-6)
    with pytest.raises(UserError, match="expected the prior of this run.*found another model"):
        other = Policy(load_lm(ModelConfig(model_name_or_path=result["latest"]), tokenizer), RLOO())
        freeze_prior(other, tmp_path / "run/prior", tokenizer, started=True)


@pytest.mark.parametrize("name", ["bcq", "ilql among the top"])
def test_a_word_that_only_the_prior_would_never_say_ends_no_learning(
    begin, tokenizer, tmp_path, name: str
) -> None:  # noqa: ANN001
    """The support moves with the language model, so from the second round on the policy says what its prior
    has no probability for, and in a second pass a word may be one that it would no longer say."""
    method = PPO(c=0.1, whiten=False, entropy_weight=0.01) if name == "bcq" else RLOO(c=0.1)
    _, policy = begin(name, method)
    frozen = freeze_prior(policy, tmp_path / "run/prior", tokenizer)
    play = Rollouts(Wordy, Decoding(max_new_tokens=4), groups=2, group_size=2, seed=3)
    settings = OnlineSettings(max_steps=3, warmup_steps=0, learning_rate=3e-2, eval_steps=0, report_to="none")
    trainer = OnlineTrainer(policy, tokenizer, play, settings, tmp_path / "run", prior=frozen)
    result = trainer.train()
    assert result["train/kl_per_reply"] > 1 and result["train/grad_norm"] > 0
    assert all(math.isfinite(result[f"train/{figure}"]) for figure in ("loss", "kl", "entropy"))


def test_lowrank_values_are_no_start(make_policy, tmp_path) -> None:  # noqa: ANN001
    make_policy(ILQL(), heads="lowrank").save_pretrained(tmp_path / "start")
    with pytest.raises(UserError, match="expected a start whose values stay as they are, got lowrank"):
        steering_of(tmp_path / "start")


# --- by enumeration -----------------------------------------------------------------------------------------

BETA = 1.5
generator = torch.Generator().manual_seed(11)
Q = [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
V = torch.randn(4, generator=generator, dtype=torch.float64)
START = world.POLICY.clone()


def steered(table: torch.Tensor) -> torch.Tensor:
    """log p + beta (min Q - V), which softmax turns into the decoded policy."""
    return table.log_softmax(1) + BETA * (torch.minimum(*Q) - V[:, None])


def decoded(table: torch.Tensor, places) -> Decoded:  # noqa: ANN001
    lm, q = Dense(table[places]), tuple(Dense(each[places]) for each in Q)
    return Decoded(ILQL(beta=BETA), Outputs(lm, q_target=q, v=V[places]))


@pytest.mark.parametrize(
    "method",
    [RLOO(c=world.C), Reinforce(c=world.C), Reinforce(c=world.C, baseline="none")],
    ids=lambda method: repr(method)[:60],
)
def test_the_first_gradient_is_that_of_the_decoded_policy(monkeypatch, method) -> None:  # noqa: ANN001
    """Over all groups of episodes of a world of seven, each with its probability under the decoded policy:
    the gradient, in the language model's logits, of E[R] - c KL(pi || prior)."""

    def gradient(method, batch, episodes, values=None):  # noqa: ANN001, ANN202
        table = START.clone().requires_grad_()
        places = [s for episode in episodes for s in world.states(episode)]
        return torch.autograd.grad(method.loss(Outputs(decoded(table, places)), batch).total, table)[0]

    monkeypatch.setattr(world, "POLICY", steered(START))
    monkeypatch.setattr(world, "gradient", gradient)
    table = START.clone().requires_grad_()
    (exact,) = torch.autograd.grad(world.objective(steered(table)), table)
    torch.testing.assert_close(world.expected_gradient(method), exact, atol=1e-8, rtol=1e-6)
    assert exact.abs().max() > 0.1
    step = 1e-5  # and by finite differences
    for s, a in ((0, 1), (1, 2), (2, 0)):
        moved = torch.zeros_like(START)
        moved[s, a] = step
        rise = world.objective(steered(START + moved)) - world.objective(steered(START - moved))
        assert float(rise) / (2 * step) == pytest.approx(float(exact[s, a]), abs=1e-6)


def test_what_is_never_said_has_a_bounded_probability_and_no_entropy() -> None:
    """The second and the third token are outside the support: log pi = (0, -20, -20), entropy 0."""
    logits = torch.tensor([[5.0, 1.0, 0.0]] * 3, requires_grad=True)
    scores = Decoded(BCQ(beta=1.0), Outputs(Dense(logits), q_target=(Dense(torch.zeros(3, 3)),)))
    total, nll = scores.nll(torch.tensor([0, 1, 2]))
    (total + entropy(scores, torch.ones(3))).backward()
    assert nll.tolist() == [0.0, 20.0, 20.0] and not logits.grad.any()


def test_scores_of_what_is_decoded() -> None:
    """Against the dense table: the same in chunks, at a temperature, and weighted."""
    places, actions = [0, 1, 2, 3, 0], torch.tensor([2, 0, 1])
    scores, dense = decoded(START, places), Dense(steered(START)[places])
    some = slice(1, 5)
    pairs = [(scores, dense), (scores.scaled(0.5), dense.scaled(0.5)), (scores.rows(some), dense.rows(some))]
    for one, other in pairs:
        weight = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
        torch.testing.assert_close(one.dense(), other.dense())
        torch.testing.assert_close(one.at(actions), other.at(actions))
        for each, expected in zip(one.nll(actions, weight), other.nll(actions, weight), strict=True):
            torch.testing.assert_close(each, expected)
        for how in ("max", "logsumexp"):
            torch.testing.assert_close(one.reduce(how), other.reduce(how))
    tokens = torch.tensor([[0, 1]] * 5)
    torch.testing.assert_close(scores.at_each(tokens), dense.at_each(tokens))
    assert float(scores.nll(actions[:0])[0]) == 0 and not math.isnan(float(scores.lse(2).sum()))
    assert replace(ILQL(), beta=0.0).decode(scores.out).exp().sum(1) == pytest.approx(1.0)
