"""VHRL in the online loop, on a VHRED: the latents that were drawn are found again, both gradients by hand,
what is shared with reinforce, and who learns when."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from rl_dialog.data.rollout import Rollout
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import PPO, RLOO, VHRL, Method, Reinforce
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.latents import noise_of
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.online import OnlineSettings, OnlineTrainer
from tests.optima.test_online import words

SETTINGS = OnlineSettings(max_steps=4, eval_steps=0, warmup_steps=0, learning_rate=1e-2, report_to="none")
RAW = replace(SETTINGS, value_unit=1.0)


class Wordy:
    """Pays for A, and less for every word, in one or two turns as its seed says."""

    turns = 0

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        said = int(np.random.default_rng(seed).integers(2))
        self.left = self.turns or 1 + said
        self.messages = [{"role": "user", "content": ("go", "then go")[said]}]
        return list(self.messages), {}

    def step(self, reply):  # noqa: ANN001, ANN201
        self.left -= 1
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "then"}]
        paid = float(reply.count("A") + 0.1 * len(reply))
        return list(self.messages), paid, not self.left, False, {}


class Once(Wordy):
    turns = 1


@pytest.fixture
def tokenizer():  # noqa: ANN201
    """Whose texts give the same ids again, so that replies stand in one row."""
    return words()


def new_lm(tokenizer, seed: int):  # noqa: ANN001, ANN201
    torch.manual_seed(seed)
    shape = ModelConfig(family="vhred", width=12, latent_size=3, context=64)
    lm = load_lm(shape, tokenizer)
    with torch.no_grad():
        for parameter in lm.parameters():  # words depend on latents, and latents on contexts
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return lm, shape


@pytest.fixture
def make_trainer(tokenizer, tmp_path):  # noqa: ANN001, ANN201
    """make_trainer(method, play, folder=..., settings=...): a VHRED whose prior is another one."""

    def build(method: Method, play=None, folder="run", settings=SETTINGS, **more):  # noqa: ANN001, ANN003, ANN202
        lm, shape = new_lm(tokenizer, 0)
        policy = Policy(lm, method, shape).eval()
        prior = Prior([copy.deepcopy(new_lm(tokenizer, 1)[0])])
        return OnlineTrainer(policy, tokenizer, play, settings, tmp_path / folder, prior=prior, **more)

    return build


@pytest.fixture
def played(make_trainer, tokenizer):  # noqa: ANN001, ANN201
    """played(world, ...): a round of it."""

    def play(world=Wordy, *, groups=3, size=4, tokens=5) -> list[Rollout]:  # noqa: ANN001
        rollouts = Rollouts(world, Decoding(max_new_tokens=tokens), groups=groups, group_size=size, seed=3)
        return rollouts(make_trainer(RLOO()).policy, tokenizer, 0)

    return play


def learned(trainer: OnlineTrainer, rollouts: list[Rollout], step: int = 0) -> dict[str, torch.Tensor]:
    """Minus the gradient of one step of the optimizer."""
    trainer.optimizer = torch.optim.SGD([p for p in trainer.policy.parameters() if p.requires_grad], lr=1.0)
    trainer.learning_rate, trainer.passes, trainer.parts = 1.0, 1, 1
    trainer.config = replace(trainer.config, max_grad_norm=0, lr_scheduler_type="constant")
    trainer.step = step
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer._learn(rollouts)
    return {name: value - before[name] for name, value in trainer.policy.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    size = max(float(value.abs().max()) for value in one.values())
    assert size > 1e-3
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5 * size, msg=name)


def mixed(*terms: tuple[float, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(weight * each[name] for weight, each in terms) for name in terms[0][1]}


# --- the latents that were drawn ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Reinforce(), PPO(), VHRL(), VHRL(through_latents=True)], ids=repr)
def test_the_learner_finds_the_latents_that_were_drawn(make_trainer, played, method: Method) -> None:  # noqa: ANN001
    """Each reply of a row has its own, so words have the probability that they were drawn with; with other
    seeds they have another."""
    rollouts = played()
    assert max(len(row.latent_seeds) for each in rollouts for row in each.rows) == 2
    trainer = make_trainer(method)
    assert trainer._learn(rollouts)["train/behaviour_gap"] < 1e-5
    others = [
        replace(each, rows=tuple(replace(row, latent_seeds=row.latent_seeds + 1) for row in each.rows))
        for each in rollouts
    ]
    assert make_trainer(method)._learn(others)["train/behaviour_gap"] > 0.05


def test_a_policy_that_is_its_prior_has_no_divergence(make_trainer, played) -> None:  # noqa: ANN001
    """Latents that are given to both, or drawn by both with the same noise, are as likely under both."""
    for method in (VHRL(), VHRL(through_latents=True), VHRL(learns="worker")):
        trainer = make_trainer(method)
        trainer.objective._prior[0].members[0].lm.load_state_dict(trainer.policy.lm.state_dict())
        metrics = trainer._learn(played())
        assert metrics["train/kl_per_reply"] == pytest.approx(0, abs=1e-5)
    held = make_trainer(VHRL())._learn(played())
    assert held["train/kl_per_reply"] > held["train/latent_kl_per_reply"] + 0.1 > 0.2


def test_latents_are_asked_about_as_they_were_drawn_in_later_passes_too(make_trainer, played) -> None:  # noqa: ANN001
    """A second pass at other weights finds the same latents, with other densities."""
    trainer = make_trainer(VHRL())
    rollouts = played()
    trainer._set_unit(np.array([each.total for each in rollouts]))
    said, experiences = trainer._experiences(rollouts)
    samples = [each for of in trainer._samples(rollouts, said, experiences) for each in of]
    with torch.no_grad():
        for parameter in trainer.policy.lm.model.prior.parameters():
            parameter.add_(0.1)
    for batch in trainer._batches(samples, unchanged=False):
        out = trainer.policy.outputs(batch)
        torch.testing.assert_close(out.drawn, batch.latents)
        assert (out.latent_logp - batch.latent_behaviour_logp).abs().max() > 0.05
        found = -out.lm.nll(batch.actions)[1]
        torch.testing.assert_close(found, batch.old_logp, rtol=1e-4, atol=1e-4)  # the decoder is the same


# --- the gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        VHRL(c=0.0, baseline="none", manager_weight=0.3, worker_weight=0.7),
        VHRL(c=0.0, baseline="none", words="mean", dimensions="mean"),
        VHRL(c=0.0, baseline="none", learns="manager"),
        VHRL(c=0.0, baseline="none", manager_weight=0.3, through_latents=True),
    ],
    ids=repr,
)
def test_the_gradient_by_hand(make_trainer, played, method: VHRL) -> None:  # noqa: ANN001
    """-1/E sum_e R_e [alpha log N(z_e; mu, sigma^2) + beta sum_t log pi(w_t | z_e)] by torch alone, from the
    model's parts; one reply per episode, so R is the advantage of its latent and of all its words."""
    rollouts = played(Once)
    found = learned(make_trainer(method, settings=RAW), rollouts)
    policy = make_trainer(method).policy
    model, total = policy.lm.model, 0.0
    for rollout in rollouts:
        (row,) = rollout.rows
        begins, ids = int(row.reply_starts[0]), torch.tensor(row.input_ids, dtype=torch.int64)
        cache = policy.lm(input_ids=ids[None, :begins], use_cache=True).past_key_values
        context = cache.state.context
        drawn = model.prior(context)
        manager = Normal(drawn.mean, drawn.variance.sqrt())
        seed, number = torch.tensor([int(row.latent_seeds[0])]), cache.state.message[:, None]
        latent = drawn.at(noise_of(seed, number, 3)[:, 0])
        of_words = latent if method.through_latents else latent.detach()
        known = torch.cat([context, of_words], 1)
        start = model.start(known).tanh()
        first = max(i for i in range(begins) if ids[i] in policy.config.message_end_ids)
        states, _ = model.decoder(model.embedding(ids[None, first:-1]) + model.reminder(known), start[None])
        log_pi = policy.lm.lm_head(states[0, begins - 1 - first :]).log_softmax(1)
        likely = log_pi.gather(1, ids[begins : row.reply_ends[0] + 1, None])
        assert likely.squeeze(1).tolist() == pytest.approx(rollout.logp[0].tolist(), abs=1e-4)
        said = likely.mean() if method.words == "mean" else likely.sum()
        chosen = manager.log_prob(latent.detach())
        chosen = chosen.mean() if method.dimensions == "mean" else chosen.sum()
        said = said * (method.learns != "manager")
        score = method.manager_weight * chosen + method.worker_weight * said
        total = total + rollout.total * score / len(rollouts)
    total.backward()
    wanted = {f"lm.{name}": p.grad for name, p in policy.lm.named_parameters() if p.grad is not None}
    assert wanted["lm.model.prior.mean.weight"].abs().max() > 1e-3
    same(wanted, found)
    assert not any(value.any() for name, value in found.items() if name not in wanted)


def test_the_worker_alone_is_reinforce(make_trainer, played) -> None:  # noqa: ANN001
    rollouts = played()
    for how in ({"baseline": "batch"}, {"gamma": 0.9, "c": 0.3}, {"kl": "k3", "entropy_weight": 0.1}):
        wanted = learned(make_trainer(Reinforce(**how)), rollouts)
        same(wanted, learned(make_trainer(VHRL(learns="worker", **how)), rollouts))


@pytest.mark.parametrize(
    "how",
    [{}, {"kl": "k3"}, {"gamma": 0.9, "standardise": True, "words": "mean"}, {"through_latents": True}],
    ids=str,
)
def test_joint_is_manager_and_worker(make_trainer, played, how) -> None:  # noqa: ANN001
    """Of decoupled rounds, the manager's and the worker's, with the weights of each."""
    rollouts = played()
    apart = VHRL(learns="decoupled", **how)
    manager, worker = (learned(make_trainer(apart), rollouts, step) for step in (0, 1))
    both = VHRL(manager_weight=0.3, worker_weight=0.7, **how)
    same(mixed((0.3, manager), (0.7, worker)), learned(make_trainer(both), rollouts))
    if not how.get("through_latents"):
        same(manager, learned(make_trainer(VHRL(learns="manager", **how)), rollouts))


def test_who_learns_what_in_decoupled_rounds(make_trainer, played) -> None:  # noqa: ANN001
    """The manager's rounds move nothing that only speaks, and the worker's not the net that draws latents."""
    rollouts, method = played(), VHRL(learns="decoupled", worker_rate=0.5)
    moved = [
        {name for name, value in learned(make_trainer(method), rollouts, step).items() if value.any()}
        for step in (0, 1)
    ]
    speaks = {name for name in moved[1] if any(part in name for part in ("decoder", "lm_head", "start"))}
    draws = {name for name in moved[0] if ".prior." in name}
    assert speaks and draws and not speaks & moved[0] and not draws & moved[1]
    assert {"lm.model.context.weight_ih_l0", "lm.model.embedding.weight"} <= moved[0] & moved[1]


def test_decoupled_rounds_have_their_own_rates_and_moments_move_nothing(make_trainer, played) -> None:  # noqa: ANN001
    """AdamW goes on from old gradients only where there are new ones."""
    rollouts, rates, steps = played(), [], []
    settings = replace(SETTINGS, lr_scheduler_type="constant")
    trainer = make_trainer(VHRL(learns="decoupled", worker_rate=0.01), settings=settings)
    for _ in range(4):
        before = copy.deepcopy(trainer.policy.state_dict())
        rates.append(trainer._learn(rollouts)["train/learning_rate"])
        after = trainer.policy.state_dict()
        steps.append({name for name in after if not torch.equal(after[name], before[name])})
    assert rates == pytest.approx([1e-2, 1e-4] * 2)
    assert not any(".prior." in name for name in steps[1] | steps[3])
    assert not any("lm_head" in name for name in steps[0] | steps[2])


# --- one update, one run ------------------------------------------------------------------------------------

METHODS = [
    VHRL(),
    VHRL(through_latents=True, standardise=True, gamma=0.9),
    VHRL(learns="worker"),
    VHRL(kl="k2", words="mean"),
    PPO(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_one_update_whatever_the_micro_batches_and_the_order(make_trainer, played, method) -> None:  # noqa: ANN001
    rollouts = played()
    whole = learned(make_trainer(method), rollouts)
    for size in (1, 3):
        settings = replace(SETTINGS, per_device_train_batch_size=size)
        same(whole, learned(make_trainer(method, settings=settings), rollouts))
    same(whole, learned(make_trainer(method), rollouts[::-1]))


@pytest.mark.parametrize("learns", ["joint", "decoupled"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make_trainer, tmp_path, learns) -> None:  # noqa: ANN001
    settings = replace(SETTINGS, max_steps=3, save_steps=1, lr_scheduler_type="constant", num_iterations=2)

    def make(folder: str, steps: int) -> OnlineTrainer:
        how = {"groups": 2, "group_size": 2, "seed": 5, "folder": tmp_path / folder / "rollouts"}
        play = Rollouts(Wordy, Decoding(max_new_tokens=3), **how)
        return make_trainer(VHRL(learns=learns), play, folder, replace(settings, max_steps=steps))

    whole = make("whole", 3)
    whole.train()
    make("half", 1).train()
    resumed = make("half", 3)
    resumed.train()
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(resumed.policy.state_dict()[name], value), name
