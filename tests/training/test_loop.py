"""The training loop: one update is one update however it is cut, and a resumed run is the run that never
stopped."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import Row, tokenize, train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.methods import BC, DT, FROM_LOGS, ILQL, METHODS, Method, Psi, WayOffPolicy
from rl_dialog.methods.method import Loss
from rl_dialog.methods.scores import kl_divergence
from rl_dialog.models.checkpoint import (
    freeze_prior,
    lengths_of,
    likeliest,
    load_policy,
    load_prior,
    start_of,
)
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.learned_rows import spread_of_returns
from rl_dialog.training.loop import Trainer, TrainerConfig
from rl_dialog.training.micro_batches import PASS, epoch_order, like_lengths
from rl_dialog.training.optim import learning_rate_at
from tests.ports import free_port

WORDS = ("yes", "no", "maybe", "good", "bad", "fine", "hello", "there", "what", "how", "nice", "day")
MODEL = ModelConfig(layers=1, width=16, attention_heads=2, context=128)
VARIANTS = {  # settings that take another way through the loop
    "exact kl": WayOffPolicy(kl="exact"),  # the prior runs at every step
    "base policy": ILQL(reg_to="base_policy", double_q=False),
    "context": ILQL(transition_weight=0.5, mc_returns=True),
    "target trunk": ILQL(),
    "target kl": ILQL(target_kl=0.5),
    "lora": ILQL(),
}


def make_tokenizer():  # noqa: ANN201
    return train_tokenizer([" ".join(WORDS)] * 3, vocab_size=300)


def make_rows(tokenizer, count: int = 24, *, max_length: int = 1024) -> list[Row]:  # noqa: ANN001
    """Dialogs of different length, reply count, reward and ending, so that every denominator differs between
    micro-batches."""
    generator = np.random.default_rng(0)
    rows = []
    for i in range(count):
        messages = []
        for _ in range(int(generator.integers(1, 4))):
            messages.append(
                {"role": "user", "content": " ".join(generator.choice(WORDS, generator.integers(1, 6)))}
            )
            reply = " ".join(generator.choice(WORDS, generator.integers(1, 8)))
            messages.append({"role": "assistant", "content": reply, "reward": float(generator.normal())})
        dialog = Dialog(str(i), messages, truncated=bool(i % 3 == 0))
        rows += tokenize(dialog, tokenizer, max_length=max_length)
    return rows


def make_candidates(tokenizer) -> list[Row]:  # noqa: ANN001
    """Two to four replies with different rewards to each of ten contexts: 31 pairs, of different lengths."""
    generator = np.random.default_rng(0)
    rows = []
    for i in range(10):
        user = {"role": "user", "content": " ".join(generator.choice(WORDS, 1 + i))}
        for k in range(2 + i % 3):
            reply = {
                "role": "assistant",
                "content": " ".join(generator.choice(WORDS, generator.integers(1, 8))),
                "reward": float(k),
            }
            rows += tokenize(Dialog(f"{i}-{k}", [user, reply]), tokenizer)
    return rows


def make_trainer(
    directory: Path,
    method: str,
    config: TrainerConfig,
    *,
    rows: list[Row] | None = None,
    start: str = "new",
) -> Trainer:
    how = VARIANTS[method] if method in VARIANTS else METHODS[method]()
    tokenizer = how.extend_tokenizer(make_tokenizer())
    torch.manual_seed(0)
    lm = load_lm(MODEL, tokenizer)
    target = "separate" if method == "target trunk" else "shared"
    policy = Policy(lm, how, replace(MODEL, target_trunk=target, use_peft=method == "lora"))
    policy.start = start
    if policy.heads is not None:
        for parameter in policy.heads.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    prior = Prior([load_lm(MODEL, tokenizer)]) if policy.method.uses_prior else None
    rows = (make_candidates if method == "dpo" else make_rows)(tokenizer) if rows is None else rows
    return Trainer(policy, tokenizer, rows, rows[:5], config, directory, prior=prior)


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.policy.state_dict().items()}


def _join(rank: int, world: int, port: int, timeout: timedelta | None = None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)


def _two_processes(worker: Callable[..., None], *arguments: object) -> None:
    """worker(rank, 2, port, *arguments) in two processes, forked from one that has imported this file:
    importing torch takes longer than all of the training."""
    set_forkserver_preload([__name__])
    multiprocessing.start_processes(
        worker, args=(2, free_port(), *arguments), nprocs=2, start_method="forkserver"
    )


def _worker(rank: int, world: int, port: int, folder: str, methods: list[str], config: TrainerConfig) -> None:
    """Trains one method after the other."""
    _join(rank, world, port)
    for method in methods:
        trainer = plain_descent(make_trainer(Path(folder, method), method, config))
        trainer.train()
        if rank == 0:
            save_file(parameters(trainer), Path(folder, method, "parameters.safetensors"))
    dist.destroy_process_group()


def _first_measures_for_long(rank: int, world: int, port: int, folder: str) -> None:
    _join(rank, world, port, timedelta(seconds=20))
    trainer = make_trainer(Path(folder), "bc", TrainerConfig(per_device_train_batch_size=2, **SHARED))
    trainer.evaluate = lambda *_: time.sleep(30) or {}
    trainer.train()
    dist.destroy_process_group()


@pytest.mark.slow
def test_an_evaluation_may_take_longer_than_workers_wait_for_one_another(tmp_path: Path) -> None:
    _two_processes(_first_measures_for_long, str(tmp_path))
    assert (tmp_path / "latest").is_file()


SHARED = {
    "max_steps": 3,
    "learning_rate": 0.1,
    "report_to": "none",
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "constant",
}


@pytest.fixture(scope="module")
def two_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By method, the parameters after the updates of 2 workers x 2 micro-batches of 2."""
    items = (item for item in request.session.items if item.module is request.module)
    chosen = [item.callspec.params["method"] for item in items if "two_workers" in item.fixturenames]
    folder = tmp_path_factory.mktemp("two")
    for method in chosen:
        (folder / method).mkdir()
    config = TrainerConfig(per_device_train_batch_size=2, gradient_accumulation_steps=2, **SHARED)
    _two_processes(_worker, str(folder), chosen, config)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ilql", "bc", "way_off_policy", "dpo", "kto"])
def test_two_workers_and_accumulation_make_the_update_of_one_batch(
    method: str, two_workers: Path, tmp_path: Path
) -> None:
    """Three updates of 8 dialogs (8 pairs for dpo): 1 x 8, as 4 micro-batches of 2, and as 2 workers x 2
    micro-batches of 2, from the same start.

    Micro-batches hold different numbers of decisions, so averaging their means would differ; dividing sums by
    the global number does not. Plain gradient descent, because Adam divides by the gradient's size and so
    turns the rounding of a zero gradient (attention's key bias) into a step.
    """
    one = plain_descent(
        make_trainer(tmp_path / "one", method, TrainerConfig(per_device_train_batch_size=8, **SHARED))
    )
    start = parameters(one)
    one.train()
    cut = plain_descent(
        make_trainer(
            tmp_path / "cut",
            method,
            TrainerConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, **SHARED),
        )
    )
    cut.train()
    two = load_file(two_workers / method / "parameters.safetensors")
    moved = max((expected - start[name]).abs().max().item() for name, expected in parameters(one).items())
    assert moved > 5e-3  # the updates were real, thousands of times the tolerance
    for name, expected in parameters(one).items():
        for how, got in (("accumulated", parameters(cut)), ("two workers", two)):
            torch.testing.assert_close(
                got[name], expected, atol=1e-6, rtol=0, msg=lambda text, what=(how, name): f"{what}: {text}"
            )


@pytest.mark.parametrize("method", ["exact kl", "base policy", "context", "utterance_ilql"])
def test_accumulation_makes_the_update_of_one_batch(method: str, tmp_path: Path) -> None:
    """What is divided by the number of replies, and what reads the prior or the context's tokens, is a sum
    over rows too."""
    shared = {
        "max_steps": 2,
        "learning_rate": 0.1,
        "report_to": "none",
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "constant",
    }
    one = plain_descent(
        make_trainer(tmp_path / "one", method, TrainerConfig(per_device_train_batch_size=8, **shared))
    )
    cut = plain_descent(
        make_trainer(
            tmp_path / "cut",
            method,
            TrainerConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, **shared),
        )
    )
    start = parameters(one)
    one.train()
    cut.train()
    assert (
        max((expected - start[name]).abs().max().item() for name, expected in parameters(one).items()) > 1e-2
    )
    for name, expected in parameters(one).items():
        torch.testing.assert_close(
            parameters(cut)[name], expected, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- pairs of rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_pair_stays_in_one_micro_batch(method: str, size: int, tmp_path: Path) -> None:
    """Batch sizes count pairs; every micro-batch holds whole ones, the better (or own) reply first, and an
    epoch takes every pair."""
    config = TrainerConfig(per_device_train_batch_size=size, gradient_accumulation_steps=2, report_to="none")
    trainer = make_trainer(tmp_path, method, config)
    pairs = len(trainer.train_rows) // 2
    assert trainer.steps_per_epoch == -(-pairs // (2 * size)) and pairs > 30
    taken = set()
    for step in range(trainer.steps_per_epoch):
        parts = list(trainer._micro_batches(step))
        assert sum(map(len, parts)) == 4 * size and max(map(len, parts)) <= 2 * size
        for part in parts:
            assert [i % 2 for i in part] == [0, 1] * (len(part) // 2) and [i // 2 for i in part[0::2]] == [
                i // 2 for i in part[1::2]
            ]
            taken |= {i // 2 for i in part}
    assert taken == set(range(pairs))


def test_the_held_out_loss_of_pairs_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    found = [
        make_trainer(
            tmp_path, "dpo", TrainerConfig(per_device_train_batch_size=size, report_to="none")
        )._evaluation()
        for size in (1, 2, 8)
    ]
    assert found[0]["eval/loss"] > 0
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


def test_kto_s_divergence_is_that_of_the_whole_update(tmp_path: Path) -> None:
    """z is measured over all strangers before anything is learned, so a batch's loss is the sum of its parts'
    however it is cut."""
    trainer = make_trainer(tmp_path, "kto", TrainerConfig(report_to="none"))
    trainer.policy.eval()
    trainer._prior_logp = [logp - 3.0 for logp in trainer._prior_logp]  # g > 0 in every row, so z > 0

    def total(*parts: list[int]) -> float:
        batches = [
            trainer._collate([2 * pair + side for pair in part for side in (0, 1)], trainer.train_rows, 0)
            for part in parts
        ]
        trainer._measure(batches)
        assert batches[0].measured[0] > 0
        return sum(trainer.objective(batch)[0].item() for batch in batches)

    assert total([0, 1, 2, 3], [4, 5], [6, 7]) == pytest.approx(total(list(range(8))), rel=1e-5)


def test_a_worker_without_held_out_rows_adds_nothing_to_kto_s_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers share two batches of held-out rows, as threads that wait for one another's sums."""
    monkeypatch.setattr("rl_dialog.training.loop.wait_for_the_first", lambda: None)
    trainers = []
    for rank in range(4):
        trainer = make_trainer(
            tmp_path / str(rank), "kto", TrainerConfig(per_device_train_batch_size=8, report_to="none")
        )
        trainer._prior_logp = [logp - 3.0 for logp in trainer._prior_logp]
        trainers.append(trainer)
    alone, *workers = trainers
    assert len(alone.eval_rows) == 2 * 14
    said, together = [torch.empty(0)] * 3, Barrier(3)

    def evaluated(rank: int) -> dict[str, float]:
        def summed(value: torch.Tensor) -> torch.Tensor:
            said[rank] = value
            together.wait(20)
            total = sum(said)
            together.wait(20)
            return total

        workers[rank].rank, workers[rank].world, workers[rank]._sum_over_workers = rank, 3, summed
        return workers[rank]._evaluation()

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(evaluated, range(3)))
    assert found == [pytest.approx(alone._evaluation(), rel=1e-5)] * 3


def test_kto_s_divergence_is_measured_with_the_numbers_that_the_prior_has(tmp_path: Path) -> None:
    """With bf16 too: where training starts at the prior it is 0, not the rounding between two formats."""
    trainer = make_trainer(tmp_path, "kto", TrainerConfig(report_to="none", bf16=True))
    trainer.policy.lm.load_state_dict(trainer.objective._prior[0].members[0].lm.state_dict())
    batch = trainer._collate(range(16), trainer.train_rows, 0)
    trainer.policy.eval()
    with trainer._autocast(), torch.no_grad():
        batch.prior_logp = trainer.objective.prior_logp(batch)
    trainer._measure([batch])
    assert batch.measured.tolist() == [0.0, 8.0]


def test_kto_s_divergence_has_dropout_whatever_came_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation, or a start from a checkpoint, leaves a model without it: a resumed run would learn
    something else than one that went on."""
    monkeypatch.setattr(f"{__name__}.MODEL", replace(MODEL, dropout=0.5))
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=1, report_to="none")
    learned = []
    for evaluated in (False, True):
        trainer = make_trainer(tmp_path / str(evaluated), "kto", config)
        trainer._prior_logp = [logp - 3.0 for logp in trainer._prior_logp]
        trainer.policy.train(not evaluated)
        torch.manual_seed(7 + evaluated)
        trainer._update(trainer.objective)
        learned.append(parameters(trainer))
    assert all(torch.equal(value, learned[1][name]) for name, value in learned[0].items())


# --- the run ------------------------------------------------------------------------------------------------


def test_the_prior_of_every_step_is_no_part_of_the_policy(tmp_path: Path) -> None:
    """It is run by the loss, and neither trained, nor saved, nor put into training mode."""
    trainer = make_trainer(
        tmp_path,
        "exact kl",
        TrainerConfig(per_device_train_batch_size=4, max_steps=2, learning_rate=1e-2, report_to="none"),
    )
    (prior,) = trainer.objective._prior
    before = [p.detach().clone() for p in prior.parameters()]
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in prior.parameters()} and not any(
        "prior" in name for name in trainer.objective.state_dict()
    )
    trainer.train()
    assert (
        all(torch.equal(a, b) for a, b in zip(prior.parameters(), before, strict=True)) and not prior.training
    )


@pytest.mark.parametrize(
    ("held_out", "told"),
    [
        ([2.0, 1.9], "from 2.000 to 1.900 per token"),
        ([3.0, 2.0, 1.98], ""),  # by a hundredth
        ([4e-4, 3e-4], ""),  # what is shown is 0.000 both times
        ([0.02, 0.015], ""),  # a quarter of nearly nothing
        ([1.9, 2.0], ""),
        ([2.0], ""),
    ],
)
def test_a_loss_that_still_falls_is_told_where_that_matters(
    tmp_path: Path, held_out: list[float], told: str
) -> None:
    trainer = make_trainer(tmp_path, "bc", TrainerConfig(report_to="none"))
    trainer._held_out = held_out
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer._say_if_still_learning()
    assert [told in str(warning.message) for warning in warned] == [True] * bool(told)


@pytest.mark.parametrize(
    ("method", "held_out", "told"),
    [
        ("bc", [2.0, 1.9, 2.5], "from 1.900 to 2.500 per token: checkpoint-1 predicts the logs better"),
        ("bc", [2.0, 1.9, 1.91], ""),  # by less than a fiftieth
        ("bc", [0.002, 0.004], ""),
        ("bc", [2.0, 1.9], ""),
        ("bc", [], ""),
        ("ilql", [2.0, 1.9, 2.5], ""),  # whose best is the latest
    ],
)
def test_a_held_out_loss_that_rose_is_told(
    tmp_path: Path, method: str, held_out: list[float], told: str
) -> None:
    trainer = make_trainer(tmp_path, method, TrainerConfig(report_to="none"))
    trainer._held_out = held_out
    for step, loss in enumerate(held_out):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/metrics.json").write_text(json.dumps({"eval/nll": loss}))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer._say_if_held_out_loss_rose()
    assert [told in str(warning.message) for warning in warned] == [True] * bool(told)


def test_rows_longer_than_the_context_are_refused_before_training(tmp_path: Path) -> None:
    """128 tokens fit; dt adds one. GPT-2 would fail inside its embedding."""
    rows = [
        Row(
            np.full(128, 10, np.int32),
            np.arange(128) > 64,
            np.asarray([127], np.int32),
            np.asarray([float(i)], np.float32),
            False,
        )
        for i in range(4)
    ]
    make_trainer(tmp_path / "fits", "bc", TrainerConfig(max_steps=1), rows=rows)
    with pytest.raises(
        UserError,
        match=(
            "at most 128 tokens, the model's context, got one of 129: run prepare with a smaller --max_length"
        ),
    ):
        make_trainer(tmp_path / "longer", "dt", TrainerConfig(max_steps=1), rows=rows)


def plain_descent(trainer: Trainer) -> Trainer:
    trainer.optimizer = torch.optim.SGD([p for p in trainer.policy.parameters() if p.requires_grad], lr=0.1)
    return trainer


@pytest.mark.parametrize("method", [*FROM_LOGS, *VARIANTS])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(method: str, tmp_path: Path) -> None:
    """Dropout, warm-up, decay, moments, targets and the order of the data all continue where they were."""
    config = TrainerConfig(
        per_device_train_batch_size=4,
        max_steps=10,
        learning_rate=1e-2,
        warmup_steps=3,
        save_steps=4,
        logging_steps=1,
        report_to="none",
    )
    whole = make_trainer(tmp_path / "whole", method, config)
    whole.train()
    stopped = make_trainer(tmp_path / "stopped", method, config)
    update = stopped._update

    def stop(objective):  # noqa: ANN001, ANN202
        if stopped.step == 6:
            raise KeyboardInterrupt
        return update(objective)

    stopped._update = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(tmp_path / "stopped", method, config)
    for parameter in resumed.policy.lm.parameters():
        if parameter.requires_grad:  # whatever learns starts with what is in the checkpoint
            torch.nn.init.constant_(parameter, 0.5)
    resumed.train()
    for name, expected in parameters(whole).items():
        assert torch.equal(parameters(resumed)[name], expected), name
    lines = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "stopped")
    ]
    timeless = [[{k: v for k, v in line.items() if "per_s" not in k} for line in run] for run in lines]
    assert timeless[0] == timeless[1]


def lora_trainer(directory: Path, model: str, *, steps: int, method: Method | None = None) -> Trainer:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = replace(MODEL, model_name_or_path=model, use_peft=True, lora_r=2)
    settings = {"max_steps": steps, "save_steps": 1, "learning_rate": 0.1, "report_to": "none"}
    policy = Policy(load_lm(config, tokenizer), method or BC(), config)
    rows = make_rows(tokenizer)
    run = TrainerConfig(per_device_train_batch_size=4, **settings)
    prior = freeze_prior(policy, directory / "prior", tokenizer) if policy.method.uses_prior else None
    return Trainer(policy, tokenizer, rows, rows[:5], run, directory, prior=prior)


def whole_models(directory: Path) -> list[str]:
    """Files under a folder with as many numbers as the model has."""
    found = [path for path in directory.rglob("*.safetensors") if path.name != "optimizer.safetensors"]
    most = 0.5 * sum(tensor.numel() for tensor in load_lm(MODEL, make_tokenizer()).parameters())
    large = [path for path in found if sum(tensor.numel() for tensor in load_file(path).values()) > most]
    return sorted(str(path.relative_to(directory)) for path in large)


@pytest.fixture
def pretrained(tmp_path: Path) -> str:
    load_lm(MODEL, make_tokenizer()).save_pretrained(tmp_path / "pretrained")
    return str(tmp_path / "pretrained")


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


@pytest.mark.parametrize("method", [BC(), WayOffPolicy()], ids=["bc", "with a prior"])
def test_adapters_are_written_alone_and_open_in_plain_peft(
    tmp_path: Path, pretrained: str, method: Method
) -> None:
    lora_trainer(tmp_path / "run", pretrained, steps=2, method=method).train()
    assert whole_models(tmp_path / "run") == []
    checkpoint = tmp_path / "run" / "checkpoint-2"
    policy = Policy.from_pretrained(checkpoint)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained), checkpoint)
    for plain in (opened, AutoPeftModelForCausalLM.from_pretrained(checkpoint)):
        torch.testing.assert_close(logits(plain), logits(policy.lm), rtol=1e-4, atol=1e-4)
        with plain.disable_adapter():
            assert not torch.allclose(logits(plain), logits(policy.lm), atol=0.01)
    if method.uses_prior:
        stored = AutoModelForCausalLM.from_pretrained(pretrained)
        assert torch.equal(logits(load_prior(checkpoint).members[0].lm), logits(stored))


def test_a_new_model_below_adapters_is_written_once_and_moves_with_its_run(tmp_path: Path) -> None:
    lora_trainer(tmp_path / "run", "", steps=2).train()
    assert whole_models(tmp_path / "run") == ["base/model.safetensors"]
    expected = logits(Policy.from_pretrained(tmp_path / "run" / "checkpoint-2"))
    plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2")
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    checkpoint = tmp_path / "elsewhere" / "checkpoint-2"
    assert torch.equal(logits(Policy.from_pretrained(checkpoint)), expected)
    second = lora_trainer(tmp_path / "second", str(checkpoint), steps=1)  # which the first run may remove
    assert torch.equal(logits(second.policy), expected)
    second.train()
    assert whole_models(tmp_path / "second") == ["base/model.safetensors"]
    (tmp_path / "elsewhere" / "base").rename(tmp_path / "elsewhere" / "lost")
    with pytest.raises(UserError, match="adapter_config.json: expected the model that these adapters belong"):
        Policy.from_pretrained(checkpoint)


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_below_adapters_can_be_told_apart(tmp_path: Path, tied: bool) -> None:
    """Nothing trains their embeddings: where they began alike, dt's bins would mean the same, and a reply
    could not end with a token of its own. Those of known tokens stay."""
    lm = load_lm(MODEL, make_tokenizer())
    lm.config.tie_word_embeddings = tied
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(lm.config)
    lm.save_pretrained(tmp_path)
    tokenizer, known = DT().extend_tokenizer(make_tokenizer()), lm.config.vocab_size
    model = replace(MODEL, model_name_or_path=str(tmp_path), use_peft=True)
    larger = load_lm(model, tokenizer)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        before, after = getattr(lm, get)().weight, getattr(larger, get)().weight
        assert torch.equal(after[:known], before) and len(after) == known + 3
        apart = torch.pdist(after[known:]).min()
        assert apart > 0.5 * torch.pdist(before).mean()
    assert (larger.get_input_embeddings().weight is larger.get_output_embeddings().weight) == tied


def test_adapters_are_not_resumed_on_another_model(tmp_path: Path, pretrained: str) -> None:
    lora_trainer(tmp_path / "run", pretrained, steps=1).train()
    shutil.copytree(pretrained, tmp_path / "other")
    with pytest.raises(UserError, match="expected to resume adapters of .*pretrained, got those of .*other"):
        lora_trainer(tmp_path / "run", str(tmp_path / "other"), steps=2).train()


@pytest.mark.parametrize("changes", [{"width": 32}, {"layers": 2}])
def test_another_model_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=1, report_to="none")
    make_trainer(tmp_path, "bc", config).train()
    monkeypatch.setattr(f"{__name__}.MODEL", replace(MODEL, **changes))
    with pytest.raises(UserError, match="expected the weights of this policy, got those of another .*resume"):
        make_trainer(tmp_path, "bc", replace(config, max_steps=2)).train()


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        ("latest", "No such file"),
        ("checkpoint-1/trainer/progress.json", "JSONDecodeError"),
        ("checkpoint-1/trainer/policy.safetensors", "SafetensorError"),
        ("checkpoint-1/trainer/optimizer.safetensors", "SafetensorError"),
    ],
)
def test_a_damaged_checkpoint_is_told(tmp_path: Path, damaged: str, told: str) -> None:
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=1, report_to="none")
    make_trainer(tmp_path, "bc", config).train()
    (tmp_path / damaged).write_bytes((tmp_path / damaged).read_bytes()[:5])
    with pytest.raises(UserError, match=f"expected a whole checkpoint to go on with, got .*{told}"):
        make_trainer(tmp_path, "bc", replace(config, max_steps=2)).train()


def test_resuming_with_as_many_rows_of_other_rewards_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=1, report_to="none")
    rows = make_rows(make_tokenizer())
    make_trainer(tmp_path, "ilql", config, rows=rows).train()
    other = [row.with_rewards(lambda rewards: rewards + 1) for row in rows]
    with pytest.raises(UserError, match="expected to resume a run with .*'data': .*; resume with the same"):
        make_trainer(tmp_path, "ilql", replace(config, max_steps=2), rows=other).train()


def test_a_run_that_is_over_still_tells_its_figures_when_resumed(tmp_path: Path) -> None:
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=1, report_to="none")
    first, again = (make_trainer(tmp_path, "target kl", config).train() for _ in range(2))
    assert again == {name: value for name, value in first.items() if name in again}
    assert again["eval/loss"] == first["eval/loss"]
    assert again["beta_in_rewards"] != pytest.approx(ILQL().in_rewards(first["value_unit"])["beta"])


def test_resuming_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=2, report_to="none")
    make_trainer(tmp_path, "bc", config).train()
    with pytest.raises(UserError, match="expected to resume a run with .*'batch_size': 4.*'batch_size': 8"):
        make_trainer(
            tmp_path, "bc", TrainerConfig(per_device_train_batch_size=8, max_steps=4, report_to="none")
        ).train()


@pytest.mark.parametrize(("start", "reward", "best"), [("new", 1, 8), ("new", 0, 4), ("made", 1, 4)])
def test_checkpoints_are_pointed_to_pruned_and_free_of_pickles(
    tmp_path: Path, start: str, reward: float, best: int
) -> None:
    """The likeliest one stays. It is `best` where the model was there before, or where there is nothing to
    win; a new one's is the last."""
    config = TrainerConfig(
        per_device_train_batch_size=4,
        max_steps=8,
        eval_steps=2,
        save_total_limit=2,
        learning_rate=1.0,  # far too long: the loss rises after a few steps
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to="none",
    )
    rows = [replace(row, rewards=reward * row.rewards) for row in make_rows(make_tokenizer())]
    with pytest.warns(UserWarning, match="checkpoint-4.* predicts the logs better"):
        make_trainer(tmp_path, "bc", config, rows=rows, start=start).train()
    losses = {
        line["step"]: line["eval/loss"]
        for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if "eval/loss" in line
    }
    names = [f"checkpoint-{step}" for step in (4, 6, 8)]
    assert min(losses, key=losses.get) == 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == names
    assert (tmp_path / "latest").read_text().strip() == names[2]
    assert (tmp_path / "best").read_text().strip() == f"checkpoint-{best}"
    assert likeliest(tmp_path) == str(tmp_path / names[0])
    assert likeliest(tmp_path / names[2]) == str(tmp_path / names[2])
    for path in tmp_path.glob("checkpoint-*/rl_dialog.yaml"):  # a policy of values is not its language model
        path.write_text(path.read_text().replace("name: bc", "name: ilql"))
    assert likeliest(tmp_path) == str(tmp_path / f"checkpoint-{best}")
    assert not list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("*.pkl"))
    assert [path.parent.name for path in tmp_path.rglob("trainer")] == ["checkpoint-8"]


@pytest.mark.parametrize(
    ("method", "start", "updates"),
    [("bc", "new", 4000), ("bc", "made", 2000), ("ilql", "made", 4000), ("ilql", "pretrained", 1000)]
    + [("dpo", "made", 24), ("dpo", "pretrained", 24), ("dpo", "new", 4000), ("kto", "made", 2000)],
)
def test_how_many_updates_there_are_by_default(tmp_path: Path, method: str, start: str, updates: int) -> None:
    """Of few dialogs, or of 31 pairs, which more than three passes would learn by heart."""
    config = TrainerConfig(per_device_train_batch_size=4, report_to="none")
    assert make_trainer(tmp_path, method, config, start=start).total_steps == updates


def test_best_is_the_highest_return_when_an_environment_measures_it(tmp_path: Path) -> None:
    returns = {2: 1.0, 4: 3.0, 6: 2.0}
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=6, eval_steps=2, report_to="none")
    trainer = make_trainer(tmp_path, "ilql", config)
    trainer.evaluate, trainer.metric, trainer.sign = (
        (lambda policy, tokenizer, step: {"eval/return": returns[step]}),
        "eval/return",
        1,
    )
    trainer.train()
    assert (tmp_path / "best").read_text().strip() == "checkpoint-4"


def test_the_prior_never_moves(tmp_path: Path) -> None:
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2, report_to="none")
    trainer = make_trainer(tmp_path, "way_off_policy", config)
    before = hashlib.sha256(np.concatenate(trainer._prior_logp).tobytes()).hexdigest()
    lm = parameters(trainer)
    trainer.train()
    assert hashlib.sha256(np.concatenate(trainer._prior_logp).tobytes()).hexdigest() == before
    assert any(
        not torch.equal(value, lm[name])
        for name, value in parameters(trainer).items()
        if name.startswith("lm.")
    )


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    rows = make_rows(make_tokenizer(), 4)
    rows[0].rewards[:] = np.inf
    trainer = make_trainer(
        tmp_path,
        "ilql",
        TrainerConfig(per_device_train_batch_size=4, max_steps=2, report_to="none"),
        rows=rows,
    )
    with pytest.raises(UserError, match="expected a finite gradient"):
        trainer.train()


def test_a_loss_without_a_gradient_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list that `nll` gives beside the sum has none."""
    trainer = make_trainer(tmp_path, "bc", TrainerConfig(max_steps=2, report_to="none"))
    monkeypatch.setattr(BC, "loss", lambda self, out, batch: Loss(out.lm.nll(batch.actions)[1].sum(), {}))
    with pytest.raises(UserError, match="expected the loss of BC to have a gradient"):
        trainer.train()


def test_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train split holds no replies"):
        make_trainer(tmp_path, "bc", TrainerConfig(), rows=[])


def test_tensorboard_holds_what_the_json_lines_hold(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(
        tmp_path, "bc", TrainerConfig(per_device_train_batch_size=8, max_steps=4, logging_steps=2)
    ).train()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = {e.step: e.value for e in events.Scalars("train/loss")}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == {
        line["step"]: pytest.approx(line["train/loss"], rel=1e-6) for line in lines if "train/loss" in line
    } and set(written) == {2, 4}


@pytest.mark.parametrize(("rows", "batch"), [(24, 8), (25, 8), (3, 8), (1000, 7)])
def test_an_epoch_takes_every_row_and_full_batches_only(rows: int, batch: int) -> None:
    batches = epoch_order(rows, batch, seed=1, epoch=2)
    taken = np.concatenate(batches)
    assert (
        {len(b) for b in batches} == {batch} and set(taken) == set(range(rows)) and len(taken) - rows < batch
    )
    again = epoch_order(rows, batch, seed=1, epoch=2)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    if rows > 100:
        other = epoch_order(rows, batch, seed=1, epoch=3)
        assert not all(np.array_equal(a, b) for a, b in zip(batches, other, strict=True))


def test_micro_batches_are_cut_where_padding_costs_more_than_a_pass() -> None:
    """At most `size` rows each, in order, every row once; short rows stay together whatever their lengths."""
    generator = np.random.default_rng(0)
    for top in (20, 3000):
        lengths = dict(enumerate(sorted(generator.integers(1, top, 64).tolist())))
        for size in (1, 7, 64):
            parts = list(like_lengths(range(64), lengths, size))
            assert [i for part in parts for i in part] == list(range(64)) and max(map(len, parts)) <= size
            if size > 1:
                padded = sum(lengths[part[-1]] * len(part) for part in parts)
                assert padded <= 1.25 * sum(lengths.values()) + len(parts) * (PASS + top)
    assert len(list(like_lengths(range(64), dict.fromkeys(range(64), 9), 64))) == 1


def test_schedules_by_hand() -> None:
    """peak 1, 2 steps of warm-up, 10 in all: (1/2, 1), then linear from 1 to 0 over 8 steps; cosine is 1/2
    halfway."""
    linear = [learning_rate_at(step, peak=1.0, warmup=2, total=10, schedule="linear") for step in range(11)]
    assert linear[:3] == [0.5, 1.0, 1.0] and linear[6] == 0.5 and linear[10] == 0.0
    assert learning_rate_at(6, peak=1.0, warmup=2, total=10, schedule="cosine") == pytest.approx(0.5)
    assert learning_rate_at(99, peak=1.0, warmup=2, total=10, schedule="constant") == 1.0


def test_methods_with_targets_move_them(tmp_path: Path) -> None:
    for method in (ILQL(), WayOffPolicy()):
        name = "ilql" if isinstance(method, ILQL) else "way_off_policy"
        trainer = make_trainer(
            tmp_path / name,
            name,
            TrainerConfig(per_device_train_batch_size=4, max_steps=1, learning_rate=1e-1, report_to="none"),
        )
        start = parameters(trainer)
        trainer.train()
        end = parameters(trainer)
        online, target = (
            ("heads.q.0.out.weight", "heads.q_target.0.out.weight")
            if name == "ilql"
            else ("lm.lm_head.weight", "lm_target.lm_head.weight")
        )
        torch.testing.assert_close(
            end[target], start[target] + (end[online] - start[target])
        )  # one update: a rate of 1
        assert [method.target_rate(5000, progress) for progress in (0, 0.5, 1)] == pytest.approx(
            [0.02, 0.01, 0.002]
        )
        assert replace(method, alpha=0.005).target_rate(9, 1.0) == 0.005


@pytest.mark.parametrize("method", [name for name in FROM_LOGS if METHODS[name]().needs_rewards])
def test_rewards_that_are_all_zero_are_refused(method: str, tmp_path: Path) -> None:
    rows = [replace(row, rewards=np.zeros_like(row.rewards)) for row in make_rows(make_tokenizer(), 6)]
    with pytest.raises(
        UserError,
        match=(
            r"learns from rewards, and all \d+ replies of the training split have reward 0 or none: run"
            r" prepare with --rewards"
        ),
    ):
        make_trainer(tmp_path, method, TrainerConfig(), rows=rows)


def test_rewards_are_shifted(tmp_path: Path) -> None:
    """Training with a shift is training on rows whose rewards were changed by hand; the rows themselves stay
    as they are."""
    config = TrainerConfig(max_steps=3, per_device_train_batch_size=4, report_to="none")
    rows = make_rows(make_tokenizer())
    changed = [replace(row, rewards=(row.rewards + 2).astype(np.float32)) for row in rows]
    trainers = [
        make_trainer(tmp_path / "flags", "ilql", replace(config, reward_shift=2.0), rows=rows),
        make_trainer(tmp_path / "hand", "ilql", config, rows=changed),
        make_trainer(tmp_path / "raw", "ilql", config, rows=rows),
    ]
    flags, hand, raw = (parameters(trainer) for trainer in trainers if trainer.train() or True)
    assert all(torch.equal(flags[name], hand[name]) for name in hand)
    assert not all(torch.equal(flags[name], raw[name]) for name in raw)


# --- units --------------------------------------------------------------------------------------------------

VALUE_METHODS = [
    name for name, kind in FROM_LOGS.items() if kind().heads.q or kind().heads.v or kind().heads.utterance_q
]
UPDATES = {"ilql": 200, "psi": 200}  # of the others 40


def times(rows: list[Row], factor: float) -> list[Row]:
    return [replace(row, rewards=row.rewards * np.float32(factor)) for row in rows]


def learn_in_two_units(folder: Path, method: str, *, updates: int, batch_size: int) -> None:
    """Updates on rewards and on 1024 times the rewards end in the same weights; what is reported is 1024
    times as much."""
    config = TrainerConfig(
        per_device_train_batch_size=batch_size,
        max_steps=updates,
        learning_rate=3e-3,
        report_to="none",
        logging_steps=updates,
    )
    rows = make_rows(make_tokenizer(), 12)
    one, large = (
        make_trainer(folder / f"{method}-{factor}", method, config, rows=times(rows, factor))
        for factor in (1, 1024)
    )
    assert large.policy.value_unit == pytest.approx(1024 * one.policy.value_unit, rel=1e-6)
    start = parameters(one)
    one.train(), large.train()
    assert any(not torch.equal(value, start[name]) for name, value in parameters(one).items())
    for name, value in parameters(one).items():
        torch.testing.assert_close(
            parameters(large)[name],
            value,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{method}, {name}: {text}",
        )


@pytest.mark.parametrize(
    "method",
    [
        "mc",
        "ilql",
        *(pytest.param(name, marks=pytest.mark.slow) for name in VALUE_METHODS if name not in ("mc", "ilql")),
    ],
)
def test_the_unit_of_rewards_changes_nothing(method: str, tmp_path: Path) -> None:
    learn_in_two_units(tmp_path, method, updates=UPDATES.get(method, 40), batch_size=4)


def _learn_in_two_units(rank: int, world: int, port: int, folder: str) -> None:
    _join(rank, world, port)
    for method in VALUE_METHODS:
        learn_in_two_units(Path(folder), method, updates=UPDATES.get(method, 40), batch_size=2)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_unit_of_rewards_changes_nothing_for_two_workers(tmp_path: Path) -> None:
    _two_processes(_learn_in_two_units, str(tmp_path))


def test_the_spread_of_returns() -> None:
    """Returns to go 3, 2 and -1, 0; equal returns are their own unit, and an unrated reply adds nothing."""

    def row(*rewards: float) -> Row:
        ends = np.arange(1, 2 * len(rewards), 2)
        return Row(
            np.arange(2 * len(rewards)),
            np.arange(2 * len(rewards)) % 2 == 1,
            ends,
            np.asarray(rewards, np.float32),
            False,
        )

    assert spread_of_returns([row(1.0, 2.0), row(-1.0, 0.0)]) == (
        pytest.approx(np.std([3, 2, -1, 0])),
        pytest.approx(1.0),
    )
    assert spread_of_returns([row(-4.0), row(-4.0)]) == (4.0, -4.0) and spread_of_returns([row(0.0)]) == (
        1.0,
        0.0,
    )
    assert spread_of_returns([row(1.0, np.nan), row(3.0, np.nan)]) == (1.0, 2.0)


def test_rewards_that_are_all_equal_say_how_long_conversations_get(tmp_path: Path) -> None:
    """-1 for each turn, as in a game of guesses, is worth learning from; but a column of ones by mistake is
    worth a word."""
    rows = [replace(row, rewards=np.full_like(row.rewards, -1)) for row in make_rows(make_tokenizer(), 6)]
    with pytest.warns(
        UserWarning,
        match=(
            "every reply of the training split earned -1: all there is to learn is how long conversations get"
        ),
    ):
        make_trainer(tmp_path, "ilql", TrainerConfig(), rows=rows)


def test_a_high_level_of_rewards_is_told_with_what_takes_it_off(tmp_path: Path) -> None:
    rows = make_rows(make_tokenizer(), 6)
    high = [replace(row, rewards=row.rewards + np.float32(1e4)) for row in rows]
    with pytest.warns(UserWarning, match=r"rewards are 10000.* and differ by .*--reward_shift -10000"):
        make_trainer(tmp_path, "ilql", TrainerConfig(), rows=high)
    with warnings.catch_warnings(action="error"):
        make_trainer(tmp_path / "off", "ilql", TrainerConfig(reward_shift=-1e4), rows=high)


def test_returns_that_dwarf_all_others_are_told(tmp_path: Path) -> None:
    """One conversation earns ten thousand. Where all others earn the same, one that does not is no error."""
    rows = make_rows(make_tokenizer(), 150)
    outlier = [replace(row, rewards=row.rewards + 1e4 * (i == 70)) for i, row in enumerate(rows)]
    rare = [replace(row, rewards=np.full_like(row.rewards, i == 70)) for i, row in enumerate(rows)]
    with pytest.warns(UserWarning, match="few returns make nearly all of their spread.*--normalise rank"):
        make_trainer(tmp_path / "outlier", "mc", TrainerConfig(), rows=outlier)
    with warnings.catch_warnings(action="error"):
        for name, given in (("rows", rows), ("rare", rare)):
            make_trainer(tmp_path / name, "mc", TrainerConfig(), rows=given)


@pytest.mark.parametrize("level", [1_234_567.0, 1_700_000_000.0])
def test_on_any_level_what_is_told_takes_it_off(tmp_path: Path, level: float) -> None:
    """Float32 has steps of 1/8 at a million and of 128 at two thousand millions."""
    rows = [replace(row, rewards=row.rewards.astype(float)) for row in make_rows(make_tokenizer(), 6)]
    high = [replace(row, rewards=row.rewards + level) for row in rows]
    with pytest.warns(UserWarning, match="takes it off") as told:
        make_trainer(tmp_path, "ilql", TrainerConfig(), rows=high)
    shift = float(re.search(r"--reward_shift (\S+)", str(told[0].message))[1])
    spread = np.concatenate([row.rewards for row in rows]).std()
    assert abs(shift + level + np.concatenate([row.rewards for row in rows]).mean()) < 0.1 * spread
    low, off = (
        make_trainer(tmp_path / name, "ilql", TrainerConfig(reward_shift=by), rows=given)
        for name, by, given in (("low", shift + level, rows), ("off", shift, high))
    )
    assert off.policy.value_unit == pytest.approx(low.policy.value_unit, rel=1e-5)


def test_held_out_rows_that_a_method_cannot_use_are_told(tmp_path: Path) -> None:
    """None of the five held-out dialogs is as good as those that tf_top keeps."""
    rows = [
        replace(row, rewards=np.full_like(row.rewards, float(i >= 5)))
        for i, row in enumerate(make_rows(make_tokenizer(), 20))
    ]
    with pytest.warns(UserWarning, match=r"validation split \(5 rows\) has nothing that tftop learns from"):
        make_trainer(tmp_path, "tf_top", TrainerConfig(), rows=rows)


@pytest.mark.parametrize("method", ["ilql", "psi", "utterance_ilql", "kto", "dt", "chai"])
def test_an_empty_reply_is_one_decision(method: str, tmp_path: Path) -> None:
    """Saying nothing is to end the turn at once: one action, with its reward, that every method can learn to
    avoid."""
    tokenizer = make_tokenizer()
    said = [("", -1.0), ("yes", 1.0), ("no", 0.0)] * 3
    rows = []
    for i, (text, reward) in enumerate(said):
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": text, "reward": reward},
        ]
        rows += tokenize(Dialog(str(i), messages), tokenizer)
    trainer = make_trainer(
        tmp_path,
        method,
        TrainerConfig(max_steps=2, per_device_train_batch_size=4, report_to="none"),
        rows=rows,
    )
    assert np.isfinite(trainer.train()["eval/loss"])
    empty = rows[0]
    assert (
        empty.assistant.sum() == 1
        and empty.input_ids[-1] == tokenizer.eos_token_id
        and empty.reply_ends.tolist() == [len(empty.input_ids) - 1]
    )


def with_prior(folder: Path, members: int = 1, **settings) -> Trainer:  # noqa: ANN003
    """way_off_policy from a fresh model, the prior that model or the average of several copies of it, logits
    away from 0."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    policy = Policy(load_lm(MODEL, tokenizer), WayOffPolicy(), MODEL)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight.mul_(20.0)
    rows = make_rows(tokenizer)
    config = TrainerConfig(
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        **settings,
    )
    return Trainer(
        policy,
        tokenizer,
        rows,
        rows[:5],
        config,
        folder,
        prior=Prior([copy.deepcopy(policy.lm) for _ in range(members)]),
    )


def test_a_prior_averaged_with_itself_trains_like_itself(tmp_path: Path) -> None:
    one, twice = with_prior(tmp_path / "one"), with_prior(tmp_path / "twice", 2)
    assert twice._first_q == pytest.approx(one._first_q, abs=1e-4)
    one, twice = one.train(), twice.train()
    for name in ("train/q", "train/q_loss", "eval/q", "eval/log_p_minus_log_pi"):
        assert twice[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name


def test_a_prior_far_from_the_start_is_told(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = with_prior(tmp_path / "near")
    far = Prior([load_lm(MODEL, near.tokenizer)])
    with pytest.warns(
        UserWarning,
        match=(
            r"the prior is far from .*: KL\(policy \|\| prior\) is \d+\.\d\d nats per token, expected at most"
            r" 0\.5: start"
        ),
    ):
        Trainer(near.policy, near.tokenizer, near.train_rows, [], near.config, tmp_path / "far", prior=far)


def test_q_that_runs_away_is_told_once_and_while_it_does(tmp_path: Path) -> None:
    """Rewards of the logs are about 1, c is 1/2: Q has no business beyond some ten nats of its start. Steps
    that are too long send it there."""
    trainer = with_prior(tmp_path, value_unit=1.0)
    trainer.learning_rate = 3.0
    assert 5 < trainer._reach < 50
    with pytest.warns(
        UserWarning,
        match=(
            r"step \d: Q ran away: expected logged tokens within \d+\.\d of where they began \(.* got"
            r" .*--method.c"
        ),
    ) as told:
        trainer.train()
    assert len([warning for warning in told if "ran away" in str(warning.message)]) == 1


def test_the_prior_s_levels_reach_the_states_they_belong_to(tmp_path: Path) -> None:
    """Decisions first, then the states that only bootstrap, whatever rows share a batch: as a pass over the
    batch itself would find them."""
    trainer = make_trainer(tmp_path, "way_off_policy", TrainerConfig(report_to="none"))
    (prior,) = trainer.objective._prior
    for indices in ([0], [3, 1, 0], [7, 2, 9, 6]):
        batch = trainer._collate(indices, trainer.train_rows, 0)
        scores = prior.prior_scores(batch)
        torch.testing.assert_close(batch.prior_lse, scores.reduce("logsumexp"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(batch.prior_logp, -scores.nll(batch.actions)[1], rtol=1e-4, atol=1e-5)
        assert len(batch.prior_lse) == len(batch.states)


# --- a divergence instead of a strength ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        ILQL(target_kl=0.5),
        pytest.param(Psi(target_kl=0.5), marks=pytest.mark.slow),
        pytest.param(ILQL(target_kl=2.0), marks=pytest.mark.slow),
    ],
    ids=["ilql", "psi", "ilql, 2 nats"],
)
def test_the_strength_follows_from_a_divergence_per_reply(method: Method, tmp_path: Path) -> None:
    """Within a tenth on other rows than it was solved on, at every checkpoint; learning itself is not changed
    by it."""
    tokenizer = make_tokenizer()
    rows = make_rows(tokenizer, 240)
    config = TrainerConfig(
        per_device_train_batch_size=8, max_steps=120, eval_steps=60, learning_rate=3e-3, report_to="none"
    )
    torch.manual_seed(0)
    policy = Policy(load_lm(MODEL, tokenizer), method, MODEL)
    Trainer(policy, tokenizer, rows[:120], rows[120:200], config, tmp_path).train()
    for step in (60, 120):
        solved = Policy.from_pretrained(tmp_path / f"checkpoint-{step}")
        batch = collate(rows[120:])
        with torch.no_grad():
            out = solved.outputs(batch)
            each = kl_divergence(solved.method.decode(out).log_softmax(1), out.lm.dense().log_softmax(1))[
                : batch.decisions
            ]
        assert float(each.sum() / batch.turn_end.sum()) == pytest.approx(method.target_kl, rel=0.1)
    assert (
        solved.method != method
        and replace(
            solved.method, **{name: getattr(method, name) for name in ("beta", "c") if hasattr(method, name)}
        )
        == method
    )


def test_a_divergence_that_no_strength_reaches_is_told(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    rows, config = make_rows(tokenizer), TrainerConfig(max_steps=1, report_to="none")
    policy = Policy(load_lm(MODEL, tokenizer), ILQL(target_kl=1e6), MODEL)
    with pytest.warns(
        UserWarning, match=r"target_kl 1e\+06: expected a strength .* got [\d.e+]+ at the largest"
    ):
        Trainer(policy, tokenizer, rows, [], config, tmp_path).train()


# --- rewards that are missing -------------------------------------------------------------------------------


def only_last(rows: list[Row]) -> list[Row]:
    return [
        replace(
            row, rewards=np.append(np.full(len(row.rewards) - 1, np.nan), row.rewards[-1:]).astype(np.float32)
        )
        for row in rows
    ]


def test_rewards_on_last_replies_alone_are_outcomes(tmp_path: Path) -> None:
    """The replies before them earned 0, and it is said; where some other reply has a reward too, those
    without one have none."""
    rows = make_rows(make_tokenizer(), 12)
    config = TrainerConfig(max_steps=2, per_device_train_batch_size=4, report_to="none")
    with pytest.warns(
        UserWarning, match="only last replies have a reward: it is taken for the conversation's"
    ):
        outcome = make_trainer(tmp_path / "outcome", "ilql", config, rows=only_last(rows))
    zeros = [
        replace(row, rewards=np.append(np.zeros(len(row.rewards) - 1), row.rewards[-1:]).astype(np.float32))
        for row in rows
    ]
    given = make_trainer(tmp_path / "zeros", "ilql", config, rows=zeros)
    outcome.train(), given.train()
    assert all(torch.equal(value, parameters(given)[name]) for name, value in parameters(outcome).items())
    later = {"later_rewards": zeros[0].rewards[-1:], "later_tokens": np.array([1], np.int32)}
    unrated = replace(rows[0], rewards=np.full_like(rows[0].rewards, np.nan), truncated=True, **later)
    cut = make_trainer(tmp_path / "cut", "ilql", config, rows=[unrated, *only_last(rows)]).train_rows[0]
    assert not cut.rewards.any(), "those of a dialog that was cut come before its outcome too"
    some = only_last(rows[:6]) + rows[6:]
    assert any(
        np.isnan(row.rewards).any()
        for row in make_trainer(tmp_path / "some", "ilql", config, rows=some).train_rows
    )


@pytest.mark.parametrize("method", [name for name in VALUE_METHODS if name not in ("chai", "way_off_policy")])
def test_what_an_unrated_reply_would_have_earned_teaches_nothing(method: str, tmp_path: Path) -> None:
    """Heads that value unrated replies get no gradient from them: with no rated reply in a batch the value
    terms are 0."""
    rows = make_rows(make_tokenizer(), 8)
    trainer = make_trainer(
        tmp_path, method, TrainerConfig(per_device_train_batch_size=4, report_to="none"), rows=rows
    )
    unrated = [replace(row, rewards=np.full_like(row.rewards, np.nan)) for row in rows]
    metrics = trainer.objective(collate(unrated))[1]
    assert metrics["q_loss"] == 0 and metrics.get("v_loss", torch.zeros(())) == 0
    assert trainer.objective(collate(rows))[1]["q_loss"] > 0


def test_what_the_prior_says_of_a_state_stays_with_it(tmp_path: Path) -> None:
    """Whichever rows meet in a batch, and where some of them go on in another row."""
    rows = make_rows(make_tokenizer(), max_length=24)
    trainer = make_trainer(tmp_path, "exact kl", TrainerConfig(max_steps=1, report_to="none"), rows=rows)
    batch = trainer._collate(list(range(30, -1, -2)), trainer.train_rows, 0)
    assert batch.extra and len(batch.states) > batch.decisions + batch.extra
    (prior,) = trainer.objective._prior
    scores = prior.prior_scores(batch)
    torch.testing.assert_close(batch.prior_lse, scores.reduce("logsumexp"))
    torch.testing.assert_close(batch.prior_logp, -scores.nll(batch.actions)[1])


@pytest.mark.parametrize("method", ["ilql", "exact kl", "context"])
def test_an_update_of_windows_is_one_update_however_it_is_cut(method: str, tmp_path: Path) -> None:
    rows = make_rows(make_tokenizer(), max_length=24)
    states = []
    for size in (24, 4):
        config = TrainerConfig(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=24 // size,
            max_steps=2,
            learning_rate=1e-3,
            report_to="none",
        )
        trainer = make_trainer(tmp_path / str(size), method, config, rows=rows)
        trainer.train()
        states.append(trainer.policy.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["gpt2", "hred"])
def test_a_model_made_here_remembers_how_long_its_rows_were(family: str, tmp_path: Path) -> None:
    """It has positions for more that mean nothing to it, so prompts are cut to what it learned. What comes
    from elsewhere, and a recurrent model, has no such limit."""
    tokenizer = make_tokenizer()
    config = TrainerConfig(per_device_train_batch_size=4, max_steps=1, learning_rate=0, report_to="none")
    shape = replace(MODEL, family=family)

    def learned(rows: list[Row], name: str, start: str = "") -> Policy:
        policy = Policy(load_lm(replace(shape, model_name_or_path=start), tokenizer), BC(), shape)
        if start:
            policy.start, policy.lengths = start_of(start), lengths_of(start)
        Trainer(policy, tokenizer, rows, [], config, tmp_path / name).train()
        return load_policy(tmp_path / name / "checkpoint-1")

    talk = [{"role": role, "content": "hello there"} for role in ("user", "assistant") * 3]
    dialog = Dialog(id="d", messages=talk)
    whole, cut = tokenize(dialog, tokenizer), tokenize(dialog, tokenizer, max_length=12)
    assert len(cut) > 1
    policy = learned(cut, "cut")
    assert policy.longest_row == (128 if family == "hred" else max(len(row.input_ids) for row in cut))
    if family == "hred":
        assert policy.lengths is None
        return
    long = learned(whole, "longer", str(tmp_path / "cut" / "checkpoint-1")).lengths
    assert long == (len(whole[0].input_ids), whole[0].reply_starts[-1])
    again = learned(cut, "again", str(tmp_path / "longer" / "checkpoint-1"))
    assert again.lengths == long, "what was learned once stays"
    once = learned(cut * 100 + whole, "once").lengths
    assert once == (long.row, max(row.reply_starts[-1] for row in cut)), "what was learned once is not known"
    load_lm(MODEL, tokenizer).save_pretrained(tmp_path / "elsewhere")
    assert learned(cut, "other", str(tmp_path / "elsewhere")).lengths is None
