"""The online loop: one update whatever the padding, micro-batches and order; resume; what is left out."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_dialog.data import beginnings
from rl_dialog.data.rollout import Rollout, Spoken, rollout_rows
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import env_return
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.rollouts import Rollouts
from rl_dialog.methods import GRPO, ONLINE, PPO, RLOO, Method, Reinforce
from rl_dialog.models import policy as policy_module
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.online import OnlineSettings, OnlineTrainer

SETTINGS = OnlineSettings(max_steps=4, eval_steps=0, warmup_steps=0, learning_rate=1e-2, report_to="none")


class Wordy:
    """Pays for the letter e; two turns."""

    def reset(self, *, seed=None):  # noqa: ANN001, ANN201
        self.messages = [{"role": "user", "content": f"hello {np.random.default_rng(seed).integers(9)}"}]
        return list(self.messages), {}

    def step(self, reply):  # noqa: ANN001, ANN201
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and you?"}]
        return list(self.messages), float(reply.count("e")), len(self.messages) > 4, False, {}


@pytest.fixture
def make_trainer(make_policy, tokenizer, tmp_path):  # noqa: ANN001, ANN201
    """make_trainer(method, play, folder=..., policy settings): a trainer whose prior is another model."""

    def build(method: Method, play, folder="run", settings=SETTINGS, *, trunk="shared", **more):  # noqa: ANN001, ANN202
        policy = make_policy(method, "llama", trunk=trunk)
        prior = Prior([copy.deepcopy(make_policy(method, "llama", seed=1).lm)])
        where = tmp_path / folder
        return OnlineTrainer(policy, tokenizer, play, settings, where, prior=prior, **more)

    return build


def episode(
    number: int, group: int, rng, total: float | None = 1.0, turns: int = 2, length: int = 4
) -> Rollout:  # noqa: ANN001
    """Made-up ids; the log-probabilities are those of no model, so that importance weights differ from 1."""
    ids, spoken = [1, 5], []
    for _ in range(turns):
        drawn = rng.integers(10, 60, int(rng.integers(1, length))).tolist()
        spoken.append(Spoken(tuple(ids), tuple(drawn), tuple(rng.uniform(-4, -1, len(drawn)))))
        ids += [*drawn, 2, 7, 5]
    earned = [0.0] * (turns - 1) + [math.nan if total is None else total]
    rows, logp = rollout_rows(spoken, earned, truncated=False)
    return Rollout(number, group, rows, logp, total)


def episodes(count: int = 8, seed: int = 0) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    return [
        episode(i, i // 4, rng, float(rng.normal()), turns=1 + i % 3, length=3 + 3 * (i % 2))
        for i in range(count)
    ]


def learned(trainer: OnlineTrainer, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    """The gradient of one step, whatever the optimizer would make of it."""
    trainer.optimizer = torch.optim.SGD([p for p in trainer.policy.parameters() if p.requires_grad], lr=1.0)
    trainer.learning_rate, trainer.passes, trainer.parts = 1.0, 1, 1
    trainer.config = replace(trainer.config, max_grad_norm=0, lr_scheduler_type="constant")
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer._learn(rollouts)
    return {name: value - before[name] for name, value in trainer.policy.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    size = max(float(value.abs().max()) for value in one.values())
    assert size > 1e-3
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5 * size, msg=name)


METHODS = [
    RLOO(),
    Reinforce(baseline="batch", entropy_weight=0.01),
    GRPO(),
    GRPO(kl="k2", divide_by_deviation=False, divide_by_length=False),
    PPO(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_one_update_whatever_the_micro_batches_and_the_order(make_trainer, method: Method) -> None:  # noqa: ANN001
    rollouts = episodes()
    whole = learned(make_trainer(method, None), rollouts)
    for size in (1, 3):
        settings = replace(SETTINGS, per_device_train_batch_size=size)
        same(whole, learned(make_trainer(method, None, settings=settings), rollouts))
    same(whole, learned(make_trainer(method, None), rollouts[::-1]))


@pytest.mark.parametrize(
    ("method", "trunk"), [*((method, "shared") for method in METHODS), (PPO(), "separate")], ids=repr
)
def test_one_update_however_often_beginnings_are_read(make_trainer, method, trunk, monkeypatch) -> None:  # noqa: ANN001
    """What episodes begin with alike is read once for all of them, by the policy, its values and the
    prior."""
    rollouts, read, run = episodes(), [], policy_module.run_trunk
    monkeypatch.setattr(
        policy_module,
        "run_trunk",
        lambda trunk, ids, *a, **k: read.append(ids.numel()) or run(trunk, ids, *a, **k),
    )
    whole, every = learned(make_trainer(method, None, trunk=trunk), rollouts), sum(read)
    read.clear()
    monkeypatch.setattr(beginnings, "PASS", 0)
    same(whole, learned(make_trainer(method, None, trunk=trunk), rollouts))
    assert sum(read) < every


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_one_update_whatever_the_length_of_others(make_trainer, method: Method, monkeypatch) -> None:  # noqa: ANN001
    """An episode that ends in many words of the world makes others' rows longer, and changes nothing; nor
    does the id of the padding."""
    rollouts = episodes()
    monkeypatch.setattr("rl_dialog.training.micro_batches.PASS", 10**9)  # all in one micro-batch
    whole = learned(make_trainer(method, None), rollouts)
    row = rollouts[0].rows[-1]
    tail = np.full(40, 9, np.int32)
    longer = replace(
        row, input_ids=np.append(row.input_ids, tail), assistant=np.append(row.assistant, tail < 0)
    )
    padded = [replace(rollouts[0], rows=(*rollouts[0].rows[:-1], longer)), *rollouts[1:]]
    same(whole, learned(make_trainer(method, None), padded))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_episode_in_two_rows_is_learned_from_as_in_one(make_trainer, method: Method) -> None:  # noqa: ANN001
    """Where the template rewrote nothing but the row was begun anew, every number is the same: one outcome,
    one weight, values that go on over the rows."""
    rng = np.random.default_rng(1)
    whole = [episode(i, 0, rng, float(i), turns=2) for i in range(3)]
    (row,), (logp,) = whole[1].rows, whole[1].logp
    first = int(row.reply_ends[0]) + 1
    count = int(row.assistant[:first].sum())
    context = row.assistant & (np.arange(len(row.assistant)) >= first)
    parts = (
        replace(
            row,
            input_ids=row.input_ids[:first],
            assistant=row.assistant[:first],
            reply_ends=row.reply_ends[:1],
            rewards=row.rewards[:1],
            truncated=True,
        ),
        replace(row, assistant=context, reply_ends=row.reply_ends[1:], rewards=row.rewards[1:]),
    )
    split = [whole[0], replace(whole[1], rows=parts, logp=(logp[:count], logp[count:])), whole[2]]
    same(learned(make_trainer(method, None), whole), learned(make_trainer(method, None), split))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_episodes_without_a_return_are_in_no_statistic_and_no_loss(make_trainer, tokenizer, method) -> None:  # noqa: ANN001
    rng = np.random.default_rng(2)
    scored = [episode(i, i // 3, rng, float(rng.normal())) for i in range(6)]
    failed = [episode(9, 0, rng, None), Rollout(10, 1, (), (), None)]
    settings = replace(SETTINGS, max_steps=1)
    runs = [
        make_trainer(method, lambda *_, found=found: found, folder, settings)
        for folder, found in (("without", scored), ("with", [*scored[:3], *failed, *scored[3:]]))
    ]
    without, among = (trainer.train() for trainer in runs)
    for name, value in runs[0].policy.state_dict().items():
        assert torch.equal(runs[1].policy.state_dict()[name], value), name
    assert (without["train/no_return"], among["train/no_return"]) == (0, 0.25)
    assert without["train/return"] == among["train/return"]


def test_a_round_without_any_return_ends_the_run(make_trainer) -> None:  # noqa: ANN001
    broken = [episode(0, 0, np.random.default_rng(0), None)]
    with pytest.raises(UserError, match="at least one episode with a return, got none.*--resume"):
        make_trainer(RLOO(), lambda *_: broken).train()


def test_a_flat_group_moves_the_policy_only_towards_the_prior(make_trainer) -> None:  # noqa: ANN001
    rng = np.random.default_rng(3)
    flat = [episode(i, 0, rng, 2.0) for i in range(4)]
    nothing = learned(make_trainer(GRPO(c=0.0), None), flat)
    assert not any(value.any() for value in nothing.values())
    held = learned(make_trainer(GRPO(), None), flat)
    assert any(value.abs().max() > 1e-4 for value in held.values())


@pytest.mark.parametrize("method", [PPO(), RLOO(entropy_weight=0.05), Reinforce(), GRPO()], ids=repr)
def test_the_unit_of_rewards_changes_nothing(make_trainer, method: Method) -> None:  # noqa: ANN001
    """Not even with the c that is the default: it is in the unit of what is learned, as values are."""

    def scaled(factor: float) -> list[Rollout]:
        def times(row):  # noqa: ANN001, ANN202
            return replace(row, rewards=row.rewards * np.float32(factor))

        return [
            replace(each, rows=tuple(map(times, each.rows)), total=each.total * factor) for each in episodes()
        ]

    runs = {}
    for factor in (1.0, 1024.0, 2.0**-20):
        play = scaled(factor)
        trainer = make_trainer(method, lambda *_, play=play: play, f"run-{factor}")
        runs[factor] = (trainer.train(), trainer.policy)
    (result, policy), *others = runs.values()
    for (other, scaled_policy), factor in zip(others, list(runs)[1:], strict=True):
        for name, value in policy.state_dict().items():
            torch.testing.assert_close(scaled_policy.state_dict()[name], value, rtol=1e-3, atol=1e-4)
        assert scaled_policy.value_unit == pytest.approx(policy.value_unit * factor)
        assert other["train/return"] == pytest.approx(result["train/return"] * factor)
        assert other["train/loss"] == pytest.approx(result["train/loss"], rel=1e-2, abs=1e-3)
        if not isinstance(method, GRPO):  # its c is in the group's deviations
            assert other["c_in_rewards"] == pytest.approx(method.c * policy.value_unit * factor)


@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_the_unit_is_that_of_the_first_round_with_spread(make_trainer, factor: float) -> None:  # noqa: ANN001
    """Until then nothing was learned from rewards; values stay what they are in units of reward, and a run
    that goes on from there knows what is still open."""
    rng = np.random.default_rng(0)
    flat = [episode(i, 0, rng, 0.0) for i in range(4)]
    spread = [episode(i, 0, rng, float(factor * i)) for i in range(4)]

    def play(policy, tokenizer, step):  # noqa: ANN001, ANN202
        return flat if step < 2 else spread

    settings = replace(SETTINGS, save_steps=1, lr_scheduler_type="constant")
    whole = make_trainer(PPO(), play, "whole", settings)
    whole.train()
    assert whole.policy.value_unit == pytest.approx(factor * np.std(range(4)))
    half = make_trainer(PPO(), play, "half", replace(settings, max_steps=2))
    half.train()
    assert half.policy.value_unit == 1 and not half.unit_known
    resumed = make_trainer(PPO(), play, "half", settings)
    resumed.train()
    assert resumed.policy.value_unit == whole.policy.value_unit
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(resumed.policy.state_dict()[name], value), name
    before = half._experiences(spread)[1]
    half._set_unit(np.array([each.total for each in spread]))
    for one, other in zip(before, half._experiences(spread)[1], strict=True):
        np.testing.assert_allclose(other.values * half.policy.value_unit, one.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("earned", [0.0, 0.1, -0.1, -700.0, 1e-4])
@pytest.mark.parametrize("method", [PPO(c=0.0), RLOO(c=0.0), Reinforce(c=0.0), GRPO(c=0.0)], ids=repr)
def test_returns_that_are_all_equal_move_no_word(make_trainer, method: Method, earned: float) -> None:  # noqa: ANN001
    """Rounding errors of values are no advantages, whatever they are divided by."""
    rng = np.random.default_rng(3)
    flat = [episode(i, i // 4, rng, earned) for i in range(8)]
    settings = replace(SETTINGS, max_steps=1)
    trainer = make_trainer(method, lambda *_: flat, settings=settings, trunk="separate")
    with torch.no_grad():
        for parameter in trainer.policy.heads.parameters() if trainer.policy.heads else ():
            parameter.zero_()  # as values begin
    before = {name: value.clone() for name, value in trainer.policy.lm.state_dict().items()}
    trainer.train()
    for name, value in trainer.policy.lm.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_c_follows_the_divergence_that_is_aimed_at(make_trainer, tmp_path) -> None:  # noqa: ANN001
    """c <- c (1 + gain e) with e cut to [-.2, .2]: it falls below the target and rises above it. A run that
    was stopped goes on with the c that it had."""

    def run(folder: str, steps: int, target: float):  # noqa: ANN202
        how = {"target_kl": target, "kl_gain": 0.5, "lr_scheduler_type": "constant"}
        settings = replace(SETTINGS, max_steps=steps, save_steps=1, **how)
        trainer = make_trainer(RLOO(c=0.2), lambda *_: episodes(), folder, settings)
        trainer.train()
        return trainer.policy

    for folder, target, sign in (("far", 1e3, -1), ("near", 1e-3, 1)):
        run(folder, 3, target)
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").open()]
        found = [line["train/c"] for line in lines]
        divergences = [line["train/kl_per_reply"] for line in lines]
        expected = 0.2
        for c, divergence in zip(found, divergences, strict=True):
            assert c == pytest.approx(expected)
            expected *= 1 + 0.5 * max(-0.2, min(0.2, divergence / target - 1))
        assert sign * (found[-1] - found[0]) > 0
    whole = run("whole", 4, 0.5)
    run("half", 2, 0.5)
    resumed = run("half", 4, 0.5)
    assert resumed.method.c == whole.method.c != 0.2
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.parametrize("size", [1, 16])
def test_the_supervised_term_is_that_of_cloning(make_trainer, size: int) -> None:  # noqa: ANN001
    """Where nothing else moves the policy: a step along w times the gradient of the mean -log p of the logged
    reply's tokens, whatever the micro-batches."""
    rng = np.random.default_rng(3)
    flat = [episode(i, i // 2, rng, 1.0) for i in range(4)]
    (row,) = episode(9, 0, rng, None).rows
    settings = replace(SETTINGS, supervised_weight=0.25, per_device_train_batch_size=size)
    trainer = make_trainer(RLOO(c=0.0), None, settings=settings, logged=[row])
    ids, mask = torch.tensor(row.input_ids[None].astype(np.int64)), torch.tensor(row.assistant[1:])
    logp = trainer.policy.lm(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[mask, 0]
    names = [name for name, value in trainer.policy.lm.named_parameters()]
    expected = torch.autograd.grad(0.25 * logp.mean(), list(trainer.policy.lm.parameters()))
    moved = learned(trainer, flat)
    for name, value in zip(names, expected, strict=True):
        torch.testing.assert_close(moved[f"lm.{name}"], value, rtol=1e-3, atol=1e-6, msg=name)
    assert any(value.abs().max() > 1e-3 for value in expected)
    metrics = trainer._learn(flat)
    assert 0 < metrics["train/supervised_nll"] < float(-logp.detach().mean())


@pytest.mark.slow
def test_values_are_learned(make_trainer) -> None:  # noqa: ANN001
    """Group 0 earns 30, group 1 earns 10, and their first token tells them apart."""
    rng = np.random.default_rng(4)
    found = []
    for i in range(8):
        each = episode(i, i % 2, rng, 30.0 - 20 * (i % 2), turns=1)
        ids = each.rows[0].input_ids.copy()
        ids[0] = 1 + i % 2
        found.append(replace(each, rows=(replace(each.rows[0], input_ids=ids),)))
    settings = replace(SETTINGS, max_steps=30, learning_rate=5e-3)
    trainer = make_trainer(PPO(c=0.0), lambda *_: found, settings=settings, trunk="separate")
    assert trainer.train()["train/v_loss"] < 0.05
    _, experiences = trainer._experiences(found)
    values = [float(each.values[0]) * trainer.policy.value_unit for each in experiences]
    assert values == pytest.approx([30, 10] * 4, abs=3)


def test_learner_and_sampler_agree_and_the_prior_is_another(make_trainer, tokenizer) -> None:  # noqa: ANN001
    play = Rollouts(Wordy, Decoding(max_new_tokens=4, temperature=0.7), groups=2, group_size=2, seed=0)
    trainer = make_trainer(RLOO(), play, temperature=0.7)
    metrics = trainer._learn(play(trainer.policy, tokenizer, 0))
    assert metrics["train/behaviour_gap"] < 1e-5 and metrics["train/kl_per_reply"] > 0.1


def test_only_before_the_first_step_is_the_policy_the_one_that_was_asked(make_trainer, tokenizer) -> None:  # noqa: ANN001
    play = Rollouts(Wordy, Decoding(max_new_tokens=4), groups=2, group_size=2, seed=0)
    trainer = make_trainer(PPO(), play, trunk="separate")  # two passes of two steps
    rollouts, outputs = play(trainer.policy, tokenizer, 0), trainer.policy.outputs
    asked = []
    trainer.policy.outputs = lambda batch: asked.append(batch.unchanged) or outputs(batch)
    trainer._learn(rollouts)
    assert asked[-4:] == [True, False, False, False]


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo"])
def test_what_the_draws_say_is_not_asked_again(make_trainer, tokenizer, name: str) -> None:  # noqa: ANN001
    """Of one update of the weights that drew; the update, its metrics and the gap are the same without."""
    play = Rollouts(Wordy, Decoding(max_new_tokens=4), groups=2, group_size=3, seed=0)
    found = []
    for plain in (True, False):
        trainer = make_trainer(ONLINE[name](), play, str(plain), drawn_plainly=plain)
        rollouts, outputs = play(trainer.policy, tokenizer, 0), trainer.policy.outputs
        asked = []
        trainer.policy.outputs = lambda batch, of=outputs, asked=asked: asked.append(batch) or of(batch)
        metrics = trainer._learn(rollouts)
        found.append((len(asked), metrics, trainer.policy.state_dict()))
    (fewer, metrics, weights), (more, others, theirs) = found
    assert fewer < more and metrics.keys() == others.keys() and metrics["train/behaviour_gap"] < 1e-5
    assert {key: metrics[key] for key in metrics} == pytest.approx(others, rel=1e-4, abs=1e-6)
    for key, value in weights.items():  # of a gradient near 0 AdamW's first step shows the rounding
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-3)
        assert float((value - theirs[key]).abs().mean()) < 1e-5


@pytest.mark.parametrize(
    ("settings", "more", "staleness"),
    [
        (SETTINGS, {"drawn_plainly": False}, 0),
        (SETTINGS, {}, 1),
        (replace(SETTINGS, num_iterations=2), {}, 0),
        (replace(SETTINGS, bf16=True), {}, 0),
        (SETTINGS, {"values": True}, 0),
    ],
    ids=["top-k", "stale", "two passes", "bf16", "values"],
)
def test_it_is_asked_where_the_draws_do_not_say(make_trainer, settings, more, staleness) -> None:  # noqa: ANN001
    method = PPO(c=0.1) if more.pop("values", False) else RLOO(c=0.1)
    trainer = make_trainer(method, lambda *_: [], settings=settings, **{"drawn_plainly": True} | more)
    rollouts = [replace(episode(0, 0, np.random.default_rng(0), 1.0), staleness=staleness)]
    assert not trainer._draws_tell(rollouts)


@pytest.mark.parametrize("name", ["rloo", "ppo"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make_trainer, tmp_path, name: str) -> None:  # noqa: ANN001
    """Partners, draws, order, moments, values and their unit all go on where they were."""
    settings = replace(SETTINGS, max_steps=4, save_steps=1)

    def make(folder: str):  # noqa: ANN202
        decoding = Decoding(max_new_tokens=3)
        play = Rollouts(
            Wordy, decoding, groups=2, group_size=2, seed=5, folder=tmp_path / folder / "rollouts"
        )
        return make_trainer(ONLINE[name](), play, folder, settings)

    whole = make("whole")
    whole.train()
    stopped = make("stopped")
    learn = stopped._learn

    def stop(rollouts):  # noqa: ANN001, ANN202
        if stopped.step == 2:
            raise KeyboardInterrupt
        return learn(rollouts)

    stopped._learn = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make("stopped")
    with torch.no_grad():
        for parameter in resumed.policy.parameters():
            parameter.add_(1)  # whatever learns starts with what is in the checkpoint
    resumed.train()
    for name_, value in whole.policy.state_dict().items():
        assert torch.equal(resumed.policy.state_dict()[name_], value), name_
    assert resumed.policy.value_unit == whole.policy.value_unit
    logs = [
        sorted((path.name, path.read_bytes()) for path in (tmp_path / folder / "rollouts").iterdir())
        for folder in ("whole", "stopped")
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 4
    lines = [
        [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").open()]
        for folder in ("whole", "stopped")
    ]
    for one, other in zip(*lines, strict=True):
        assert {k: v for k, v in one.items() if k.startswith("train")} == {
            k: v for k, v in other.items() if k.startswith("train")
        }


def test_a_run_that_begins_again_is_measured_at_its_start_once(make_trainer, tmp_path) -> None:  # noqa: ANN001
    """Its first try measured, and ended before its first checkpoint."""

    def break_off(*_: object) -> None:
        raise KeyboardInterrupt

    settings = replace(SETTINGS, max_steps=1)
    measure = lambda *_: {"eval/return": 1.0}  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        make_trainer(RLOO(), break_off, settings=settings, evaluate=measure).train()
    make_trainer(RLOO(), lambda *_: episodes(), settings=settings, evaluate=measure).train()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [line["step"] for line in lines if "eval/return" in line] == [0, 1]


def test_the_checkpoint_is_one_like_any_other(make_trainer, tmp_path, tokenizer) -> None:  # noqa: ANN001
    """Values and their unit come back; the return is that of the trained policy, and the best is its own."""
    decoding = Decoding(max_new_tokens=3)
    play = Rollouts(Wordy, decoding, groups=2, group_size=2, seed=5)

    def evaluate(policy, tokenizer, step):  # noqa: ANN001, ANN202
        return env_return(policy, tokenizer, make_env=Wordy, episodes=6, decoding=decoding)

    trainer = make_trainer(PPO(), play, evaluate=evaluate)
    result = trainer.train()
    loaded = Policy.from_pretrained(result["latest"])
    assert loaded.method == PPO() and loaded.value_unit == trainer.policy.value_unit
    for name, value in trainer.policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert evaluate(loaded, tokenizer, 0)["eval/return"] == result["eval/return"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [line["step"] for line in lines if "eval/return" in line] == [0, 4]
