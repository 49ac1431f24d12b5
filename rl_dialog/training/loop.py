"""The only training loop: step, accumulate, clip, log, evaluate, save, resume. It runs alone or as one of the
workers of a process group.

Losses arrive as sums over a method's terms (most often decisions) and are divided by the number of terms that
an update has on average: a constant, so a token weighs the same whichever rows it meets, and one worker, two
workers and accumulated gradients make the same update. The rows of an update are drawn regardless of their
lengths; only inside it they are put into micro-batches of like lengths, which saves padding. The order of the
data and all randomness follow from (seed, step), so a run that was killed and resumed is the run that was
not.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.by_length import batches
from rl_dialog.data.files import write_atomically, write_json, write_text_atomically
from rl_dialog.data.tokenize import Row, longest_prompt
from rl_dialog.errors import UserError
from rl_dialog.methods.method import STRENGTH, Heads, Method
from rl_dialog.methods.scores import kl_divergence, kl_divergences
from rl_dialog.models.causal_lm import BASE, base_of_adapter
from rl_dialog.models.checkpoint import keep_base, likeliest, save_policy
from rl_dialog.models.latents import latent_seeds
from rl_dialog.models.policy import Lengths, Policy
from rl_dialog.models.prior import Prior
from rl_dialog.models.proposals import Proposals, propose
from rl_dialog.models.seeded_noise import derived
from rl_dialog.training.learned_rows import (
    check_rewards,
    in_units,
    outcomes,
    replies_to_go,
    shifted,
    single,
    spread_of_returns,
    warn_of_outliers,
)
from rl_dialog.training.logger import Logger
from rl_dialog.training.micro_batches import epoch_order, like_lengths
from rl_dialog.training.optim import (
    Schedule,
    default_learning_rate,
    learning_rate_at,
    load_optimizer,
    make_optimizer,
    save_optimizer,
)
from rl_dialog.training.worker_group import place_in_group, wait_for_the_first

FAR = 0.5  # nats per token from the prior at the start that are told: two clones of the same logs are nearer
WEAKEST, STRONGEST = -7.0, 9.0  # exponents of e: between which strengths a target_kl is looked for

Evaluate = Callable[[Policy, Any, int], dict[str, float]]  # (policy, tokenizer, step) -> {"eval/return": ...}


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how fast, how often. Names are those of transformers and TRL."""

    per_device_train_batch_size: int = 16
    """most dialogs per worker and micro-batch"""
    gradient_accumulation_steps: int = 1
    """micro-batches per update"""
    num_train_epochs: float | None = None
    """passes over the training split, where max_steps is not set; by default 3, or more where that is less
    than 4,000 updates of a new model or of new values, 2,000 of a model that was cloned before, and 1,000 of
    new values beside a pretrained one"""
    max_steps: int = 0
    """updates; 0 derives them from num_train_epochs"""
    learning_rate: float | None = None
    """peak learning rate of AdamW; by default it follows from the width and the start: 2e-3 for a new model
    of width 64, 1e-3 for one that goes on from such a model, 6e-5 for a pretrained one of width 768; a fifth
    of it for dpo. Values with a trunk of their own learn at most at 8e-3 over the root of the width"""
    lr_scheduler_type: Schedule = "linear"
    """the learning rate stays (constant), or falls to zero (linear, cosine)"""
    warmup_steps: int | None = None
    """updates of linear warm-up; by default a fiftieth of the run"""
    weight_decay: float = 0.0
    """weight decay of AdamW, on matrices only"""
    max_grad_norm: float = 1.0
    """clip the norm of the language model's gradient; 0 does not clip. That of the values is clipped during
    the warm-up alone: they are means over the logs, and a clipped surprise counts less than its share"""
    bf16: bool = False
    """bfloat16 autocast (weights, values and the optimizer stay float32)"""
    reward_spread: Literal["reply_end", "every_token"] = "reply_end"
    """where a reply's reward arrives; every_token reproduces the 2019 code"""
    reward_shift: float = 0.0
    """added to every reply's reward, in the data's unit: it also pays for (or charges) each further reply of
    a dialog"""
    value_unit: float = 0.0
    """values are learned in this many units of reward; 0 takes the spread of the training split's returns, 1
    learns raw values as the papers do. beta and c are in this unit; whatever is reported is in units of
    reward"""
    logging_steps: int = 10
    """updates between two lines of metrics"""
    eval_steps: int | None = None
    """updates between two evaluations; 0 evaluates at the end only; by default five evaluations in runs of
    500 updates or more"""
    save_steps: int = 0
    """updates between two checkpoints; 0 saves at every evaluation"""
    save_total_limit: int = 2
    """checkpoints kept, besides the best and, of a method without values, the one that predicts best"""
    seed: int = 0
    """seed of the order of the data, of initial weights and of dropout"""
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl; wandb and mlflow are installed apart and read their own
    environment variables"""


class Objective(nn.Module):
    """Policy and loss as one module, so that DDP sees a whole forward pass. `prior` is what has
    `prior_scores`: a Prior, or a policy with LoRA."""

    def __init__(self, policy: Policy, prior: Prior | Policy | None = None) -> None:
        super().__init__()
        self.policy = policy
        self._prior = (
            prior,
        )  # inside a tuple it is no submodule: nothing of it is trained, saved or sent to other workers

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        method = self.policy.method
        out = self.policy.outputs(batch, learning=True)
        if method.prior_every_step or (method.uses_prior and self.policy.has_latents):
            out.prior = self._prior[0].prior_scores(batch)
        if method.uses_prior and self.policy.has_latents:  # what it says depends on this batch's noise
            batch.prior_logp = -out.prior.nll(batch.actions)[1].float()
            batch.prior_lse = out.prior.reduce("logsumexp").float()
        loss = method.loss(out, batch)
        if out.latents is not None:
            loss = out.latents.added_to(loss)
        if out.messages is not None:
            loss = out.messages.added_to(loss)
        return loss.total, loss.metrics

    def prior_logp(self, batch: Batch) -> Tensor:
        """(N,) what the prior says of each action."""
        return -self._prior[0].prior_scores(batch).nll(batch.actions)[1].float()


class Trainer:
    """One policy, its data and its run folder. `train()` starts, or continues from the run folder's latest
    checkpoint.

    Args:
        policy: as loaded; its method decides the loss.
        prior: the frozen prior, where the method uses one. Without it the policy has adapters to switch off.
        train_rows, eval_rows: token rows; every worker holds all of them and takes its share of each batch.
        evaluate: called by the first worker at each evaluation, to measure what no loss can (returns in an
            environment).
        report: hears the step and the metrics of each evaluation once its checkpoint is saved, and whether it
            is the last one, on every worker (the environment's on the first).
        describe: written into every checkpoint as the model card.
    """

    data = 0  # which data it is; OnlineTrainer has none of its own

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        train_rows: Sequence[Row],
        eval_rows: Sequence[Row],
        config: TrainerConfig,
        output_dir: str | Path,
        *,
        prior: Prior | None = None,
        evaluate: Evaluate | None = None,
        report: Callable[[dict[str, float], bool], None] | None = None,
        describe: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        if not train_rows:
            raise UserError("expected at least one training row, got none: the train split holds no replies")
        self.tokenizer, self.config, self.output_dir = tokenizer, config, Path(output_dir)
        self.data = _fingerprint(train_rows)
        self.train_rows, self.eval_rows = self._prepared(policy, train_rows, eval_rows)
        self.evaluate, self.report, self.describe = evaluate, report, describe
        self._start(policy, device)
        self._plan_steps()
        self.step, self.best = 0, None
        self._held_out: list[float] = []  # the mean -log p of held-out tokens at each evaluation
        self._epoch: tuple[int, list[np.ndarray]] | None = None
        self.metric, self.sign = self._selection_metric()
        self.objective = Objective(
            self.policy,
            None if not policy.method.uses_prior else prior.to(self.device) if prior else self.policy,
        )
        asks_once = policy.method.uses_prior and not policy.has_latents
        self._prior_logp, self._prior_lse = self._ask_prior() if asks_once else (None, None)
        self._proposals = self._propose() if policy.method.proposals else None
        self._first_q = self._meet_prior() if policy.method.uses_prior else None
        self._reach = self._reach_of_q() if self._first_q is not None else math.inf

    def _prepared(
        self, policy: Policy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """The rows as the method learns from them, with rewards in the unit that its values get."""
        config, method = self.config, policy.method
        if policy.start == "new" or policy.lengths:
            policy.lengths = _lengths(train_rows, policy)
        train_rows, eval_rows = (shifted(rows, config.reward_shift) for rows in (train_rows, eval_rows))
        train_rows, eval_rows = (outcomes(rows, train_rows) for rows in (train_rows, eval_rows))
        check_rewards(method, train_rows)
        train_rows, eval_rows = single(train_rows), single(eval_rows)
        if policy.heads is not None or method.heads.lm_target:
            spread, level = spread_of_returns(train_rows)
            if not config.value_unit:
                warn_of_outliers(train_rows)
            policy.value_unit = config.value_unit or spread
            # What a conversation earns is a sum over its replies: their advantages spread about a root of
            # their number less, so more of that is needed to lean on them as far.
            strength = STRENGTH * math.sqrt(replies_to_go(train_rows)) * policy.value_unit / spread
            policy.method = method = method.suited(strength)
            if policy.heads is not None and not method.heads.lm_target and not config.value_unit:
                policy.heads.start_at(level / policy.value_unit)
            train_rows, eval_rows = (in_units(rows, policy.value_unit) for rows in (train_rows, eval_rows))
        if policy.message_heads is not None and policy.start == "new" and method.draws_from_posterior:
            _start_message_heads(policy, train_rows)
        had_held_out = len(eval_rows)
        train_rows, eval_rows = method.prepare(train_rows, eval_rows, self.tokenizer)
        if had_held_out and not len(eval_rows):
            warnings.warn(
                f"the validation split ({had_held_out} rows) has nothing that "
                f"{type(method).__name__.lower()} learns from, so there is no held-out loss and the best "
                "checkpoint is the last one: more of the logs are to be held out, by prepare's "
                "--validation or the splits that they declare",
                stacklevel=2,
            )
        longest, window = max(len(row.input_ids) for row in (*train_rows, *eval_rows)), policy.context
        if window and longest > window:
            raise UserError(
                f"expected rows of at most {window} tokens, the model's context, got one of {longest}: run "
                "prepare with a smaller --max_length (dt adds a token to every reply), or give a new model "
                "a larger --model.context"
            )
        return train_rows, eval_rows

    def _plan_steps(self) -> None:
        """How many updates, of how much, and when it is evaluated."""
        config, method, rows = self.config, self.policy.method, self.train_rows
        self.batch_size = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.world
        self.steps_per_epoch = -(-len(rows) // (self.batch_size * method.rows_per_unit))
        self.total_steps = config.max_steps or self._planned_updates()
        self.warmup_steps = self.total_steps // 50 if config.warmup_steps is None else config.warmup_steps
        few = 0 if self.total_steps < 500 else -(-self.total_steps // 5)
        self.eval_steps = few if config.eval_steps is None else config.eval_steps
        self.terms_per_update = _terms(method, rows) / len(rows) * method.rows_per_unit * self.batch_size

    def _start(self, policy: Policy, device: torch.device | str) -> None:
        """Puts the policy on its device, with the optimizer that fits it."""
        self.device = torch.device(device)
        self.rank, self.world = place_in_group()
        if policy.has_adapters and policy.base is None:
            started = (self.output_dir / "latest").is_file()
            keep_base(policy, self.output_dir / BASE, self.tokenizer, started=started)
        self.policy = policy.start_training().to(self.device)
        by_default = policy.method.learning_rate_share * default_learning_rate(
            policy.config.hidden_size, policy.start
        )
        self.learning_rate = by_default if self.config.learning_rate is None else self.config.learning_rate
        # Steps that suit words are too long for values: at 5e-3 and width 32 their transformer forgets to
        # tell states apart for good.
        most = default_learning_rate(policy.config.hidden_size, "made")
        self.optimizer = make_optimizer(
            self.policy,
            learning_rate=self.learning_rate,
            weight_decay=self.config.weight_decay,
            values=self.policy.values(),
            value_share=(
                min(1.0, most / self.learning_rate)
                if self.policy.value_trunk is not None and self.learning_rate
                else 1.0
            ),
        )

    def train(self) -> dict[str, Any]:
        """Trains to the last step; returns the final metrics and the paths of the latest and the best
        checkpoint."""
        self._resume()
        objective: nn.Module = self.objective
        if self.world > 1:
            objective = DistributedDataParallel(
                objective, find_unused_parameters=_may_leave_parameters_out(self.policy)
            )
        settings = asdict(self.config) | {
            "method": {"name": type(self.policy.method).__name__.lower(), **asdict(self.policy.method)}
        }
        if not self.rank and not self.step:  # of a start that ended before its first checkpoint
            (self.output_dir / "metrics.jsonl").unlink(missing_ok=True)
        log = (
            None
            if self.rank
            else Logger(
                self.output_dir, first_step=self.step, report_to=self.config.report_to, settings=settings
            )
        )
        with contextlib.closing(log) if log else contextlib.nullcontext():
            over = self.step >= self.total_steps  # a run that was over when it was resumed
            metrics = self._train(objective, log)
        if over:  # what its last checkpoint was found to be like is still true
            metrics = json.loads((self._pointer("latest") / "metrics.json").read_text(encoding="utf-8"))
            if self.policy.method.target_kl is not None:
                self.policy.method = self._at_target_kl()
        self._say_if_still_learning()
        self._say_if_held_out_loss_rose()
        units = {} if self.policy.value_unit == 1 else {"value_unit": self.policy.value_unit}
        units |= {
            f"{name}_in_rewards": value
            for name, value in self.policy.method.in_rewards(self.policy.value_unit).items()
        }
        return (
            metrics
            | units
            | {
                "step": self.step,
                "latest": str(self._pointer("latest")),
                "best": str(self._pointer("best")),
            }
        )

    def _say_if_still_learning(self) -> None:
        """A warning where the held-out cross-entropy fell between the last two evaluations by more than a
        fiftieth, and by so much that perplexity fell by a hundredth."""
        before, last = self._held_out[-2:] if len(self._held_out) > 1 else (0.0, 0.0)
        if before - last > max(0.02 * before, 0.01):
            warnings.warn(
                f"the held-out loss was still falling at the end, from {before:.3f} to {last:.3f} per token: "
                f"more than {self.total_steps} updates (--max_steps) would teach more",
                stacklevel=3,
            )

    def _say_if_held_out_loss_rose(self) -> None:
        """A warning where a model that clones predicts held-out replies worse than it did before, and what
        that means for `best`."""
        if not self._held_out or self.policy.method.heads != Heads() or self.metric == "eval/return":
            return
        lowest, last = min(self._held_out), self._held_out[-1]
        if last - lowest > max(0.02 * lowest, 0.01):
            name = Path(likeliest(self.output_dir)).name
            best = (
                f"`best` is {name}, which predicts the logs better; where there is something to win the "
                "last one may earn more"
                if self.metric == "eval/loss"
                else f"{name} predicts the logs better. `best` is the last one all the same: a new model "
                "goes on learning what its world answers to"
            )
            warnings.warn(
                f"the held-out loss rose at the end, from {lowest:.3f} to {last:.3f} per token: {best}; "
                "--env, in training or `evaluate`, tells by the return",
                stacklevel=3,
            )

    def _train(self, objective: nn.Module, log: Logger | None) -> dict[str, float]:
        """From where it is to the last step; returns the last metrics."""
        metrics: dict[str, float] = {}
        clock = time.perf_counter()
        tokens_since = 0
        while self.step < self.total_steps:
            sums, tokens = self._update(objective)
            tokens_since += tokens
            due = self._due(self.config.logging_steps)
            if due:
                seconds, clock = time.perf_counter() - clock, time.perf_counter()
                metrics = self._means("train", sums) | {
                    "data/tokens_per_s": tokens_since * self.world / seconds,
                    "train/epoch": self.step / self.steps_per_epoch,
                }
                metrics["train/progress"] = self.step / self.total_steps
                tokens_since = 0
                self._say_if_q_ran_away(metrics.get("train/q"))
            if log and due:
                log.log(self.step, metrics)
            metrics |= self._evaluate_and_save(log)
        return metrics

    def _update(self, objective: nn.Module) -> tuple[dict[str, Tensor], int]:
        """One optimizer step on the next global batch; returns the summed metrics and the number of tokens on
        this worker."""
        config = self.config
        batches = [self._collate(rows, self.train_rows, 0) for rows in self._micro_batches(self.step)]
        count = self._sum_over_workers(
            torch.tensor(float(sum(map(self.policy.method.terms, batches))), device=self.device)
        )
        for batch in batches:
            batch.progress = self.step / self.total_steps
        words = np.random.SeedSequence((config.seed, self.step, self.rank)).generate_state(1, np.uint64)
        seed = int(words[0] >> 1)
        # Of dropout. torch.manual_seed also writes down where it was called from, for each kind of device
        # that this torch does not find, which takes a fraction of a millisecond.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self.policy.train()
        self._measure(batches)
        sums, norm, rate = self._descend(objective, batches, self.terms_per_update)
        if target_rate := self.policy.method.target_rate(self.total_steps, self.step / self.total_steps):
            self.policy.update_targets(target_rate)
        self.step += 1
        # What every worker knows is shared out, because metrics are summed over workers and divided by
        # `count`.
        share = count / self.world
        tokens = sum(int(b.attention_mask.sum()) for b in batches)
        return (
            sums
            | {
                "grad_norm": norm * share,
                "learning_rate": rate * share,
                "decisions": share,
            },
            tokens,
        )

    def _descend(
        self, objective: nn.Module, batches: Sequence[Batch], divisor: float
    ) -> tuple[dict[str, Tensor], Tensor, float]:
        """One step of the optimizer on the losses of all batches, which are divided by `divisor`. Returns the
        summed metrics, the norm of the gradient and the learning rate."""
        config = self.config
        rate = learning_rate_at(
            self.step,
            peak=self.learning_rate * self.policy.method.rate_share(self.step),
            warmup=self.warmup_steps,
            total=self.total_steps,
            schedule=config.lr_scheduler_type,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        sums: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last or self.world == 1 else objective.no_sync():
                with self._autocast():
                    total, metrics = objective(batch)
                if not total.requires_grad:
                    raise UserError(
                        f"step {self.step}: expected the loss of {type(self.policy.method).__name__} to have "
                        "a gradient, got one without: make it of what the policy's outputs compute (of the "
                        "values that `nll` gives the sum has a gradient, the list has none)"
                    )
                (total * (self.world / divisor)).backward()  # DDP averages over workers
            for name, value in {"loss": total.detach(), **metrics}.items():
                sums[name] = sums.get(name, 0) + value.float()
        norm = nn.utils.get_total_norm([p.grad for p in self.policy.parameters() if p.grad is not None])
        if not torch.isfinite(norm):
            raise UserError(
                f"step {self.step}: expected a finite gradient, got norm {norm.item()}; lower the learning "
                "rate, or check the rewards (manifest.json has those of logs, rollouts/ those of online)"
            )
        most = config.max_grad_norm or float("inf")
        nn.utils.clip_grad_norm_(self.policy.lm.parameters(), most)
        if self.step < self.warmup_steps:
            nn.utils.clip_grad_norm_(self.policy.values(), most)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums, norm, rate

    def _planned_updates(self) -> int:
        """Those of num_train_epochs; by default three passes, and at least as many as what begins here, a
        model or its values, needs to be learned at all."""
        if self.config.num_train_epochs is not None:
            return max(1, round(self.config.num_train_epochs * self.steps_per_epoch))
        with_values = self.policy.heads is not None
        least = {
            "new": 4000,
            "made": 4000 if with_values else 2000,
            "pretrained": 1000 if with_values else 0,
        }[self.policy.start]
        if self.policy.start != "new" and self.policy.method.least_updates is not None:
            least = self.policy.method.least_updates
        return max(3 * self.steps_per_epoch, least)

    @torch.no_grad()
    def _measure(self, batches: Sequence[Batch], *, counted: bool = True) -> None:
        """Gives every batch what the method measures in all of them, on all workers, before any of them is
        learned from. Those that are not `counted` are copies of what another worker has."""
        if not self.policy.method.measures:
            return
        if self.policy.method.uses_prior and self.policy.has_latents:  # what it says depends on the noise
            for batch in batches:
                batch.prior_logp = self.objective.prior_logp(batch)
        with self._autocast():  # as the prior was asked
            measured = sum(self.policy.method.measure(self.policy.outputs(batch), batch) for batch in batches)
        measured = self._sum_over_workers(measured if counted else 0 * measured)
        for batch in batches:
            batch.measured = measured

    def _micro_batches(self, step: int) -> Iterator[Sequence[int]]:
        """This worker's rows of update `step`. The global batch depends on (seed, step) and its size, never
        on how it is cut."""
        epoch, position = divmod(step, self.steps_per_epoch)
        unit = self.policy.method.rows_per_unit
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (
                epoch,
                epoch_order(
                    len(self.train_rows) // unit, self.batch_size, seed=self.config.seed, epoch=epoch
                ),
            )
        lengths = {
            i: max(len(self.train_rows[i * unit + k].input_ids) for k in range(unit))
            for i in self._epoch[1][position]
        }
        by_length = sorted(self._epoch[1][position].tolist(), key=lengths.__getitem__)
        for micro_batch in like_lengths(
            by_length[self.rank :: self.world], lengths, self.config.per_device_train_batch_size
        ):
            yield [i * unit + k for i in micro_batch for k in range(unit)]

    def _collate(self, indices: Sequence[int], rows: Sequence[Row], offset: int) -> Batch:
        """Some of `rows` as a batch; what was computed before training about all rows, train and eval, has
        them from `offset` on."""
        row_logp = None if self._prior_logp is None else [self._prior_logp[offset + i] for i in indices]
        batch = collate(
            [rows[i] for i in indices],
            pad_id=self.tokenizer.pad_token_id or 0,
            spread=self.config.reward_spread,
            prior_logp=row_logp,
            bootstraps=self.policy.method.heads.bootstraps,
        )
        if self._prior_lse is not None:
            levels = np.concatenate([self._prior_lse[offset + i] for i in indices])
            known = torch.empty(len(batch.states))
            # row by row, as `_ask_prior` keeps them: the decisions of one, then the state that it leads to
            known[batch.owners.argsort(stable=True)] = torch.from_numpy(levels)
            batch.prior_lse = known
        if self._proposals is not None:
            proposed = [self._proposals[offset + i] for i in indices]
            batch.proposals = torch.from_numpy(np.concatenate([proposal.features for proposal in proposed]))
            batch.proposal_logp = torch.from_numpy(np.concatenate([proposal.logp for proposal in proposed]))
        if self.policy.has_latents and not self.policy.method.proposals:  # those were valued at the means
            batch.noise = self._noise(indices, offset)
            if batch.led_from is not None:
                batch.noise = torch.cat([batch.noise, batch.noise[batch.led_from]])
        return batch.to(self.device)

    def _noise(self, indices: Sequence[int], offset: int) -> Tensor:
        """(B,) seeds of the rows' latents: new ones in each update, whichever worker reads a row, and the
        same ones in every evaluation."""
        of_step = torch.tensor([self.config.seed]) if offset else self._step_seed()
        return latent_seeds(derived(of_step, torch.tensor(list(indices)) + offset))

    def _step_seed(self) -> Tensor:
        return derived(torch.tensor([self.config.seed]), self.step + 1)

    def _propose(self) -> list[Proposals]:
        """What the LM, as it is before training, answers to every context. It stays so: methods that ask for
        this do not train it."""
        ends = {"eos_id": self.tokenizer.eos_token_id, "pad_id": self.tokenizer.pad_token_id or 0}
        self.policy.eval()
        return propose(self.policy, [*self.train_rows, *self.eval_rows], **ends, seed=self.config.seed)

    @torch.no_grad()
    def _ask_prior(self, batch_size: int = 32) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Under the frozen prior, once, in a fixed order: log p of every logged action, and the log-sum-exp
        of its logits in every state of a row.

        One array per row, train and eval rows in this order.
        """
        (frozen,) = self.objective._prior
        rows = [*self.train_rows, *self.eval_rows]
        logp, lse = ([np.empty(0, np.float32)] * len(rows) for _ in range(2))
        order = np.argsort([len(row.input_ids) for row in rows], kind="stable")
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = collate([rows[i] for i in indices], bootstraps=self.policy.method.heads.bootstraps)
            batch = batch.to(self.device)
            with self._autocast():
                scores = frozen.prior_scores(batch)
                levels = scores.reduce("logsumexp").float().cpu().numpy()
                action_logp = -scores.nll(batch.actions)[1].float().cpu().numpy()
            owner = batch.owners.cpu().numpy()
            for place, i in enumerate(indices):
                logp[i], lse[i] = action_logp[owner[: batch.decisions] == place], levels[owner == place]
        return logp, lse

    @torch.no_grad()
    def _meet_prior(self, rows: int = 64) -> float | None:
        """A warning where training starts far from the prior; the mean Q of logged tokens there, where Q is
        the LM's logits."""
        (frozen,) = self.objective._prior
        self.policy.eval()
        kl, q, tokens = 0.0, 0.0, 0
        indices = range(min(rows, len(self.train_rows)))
        for start in range(0, len(indices), 8):
            batch = self._collate(indices[start : start + 8], self.train_rows, 0)
            decisions = slice(0, batch.decisions)
            tokens += batch.decisions
            with self._autocast():
                if frozen is not self.policy:  # else it is the start
                    kl += float(
                        kl_divergences(
                            self.policy.outputs(batch).lm.rows(decisions),
                            frozen.prior_scores(batch).rows(decisions),
                        ).sum()
                    )
                if self.policy.method.heads.lm_target:
                    q += float(self.objective(batch)[1]["q"])
        if kl / tokens > FAR:
            warnings.warn(
                "the prior is far from the model that training starts from: KL(policy || prior) is "
                f"{kl / tokens:.2f} nats per token, expected at most {FAR}: start from the prior "
                "(--model_name_or_path), or choose one that was trained on these logs (--prior)",
                stacklevel=3,
            )
        return q / tokens if self.policy.method.heads.lm_target else None

    def _reach_of_q(self) -> float:
        """How far the mean Q of logged tokens can move before it is about something else than rewards and a
        prior's log-probabilities."""
        every = self.config.reward_spread == "every_token"
        tokens = [row.assistant.sum() / len(row.rewards) if every else 1.0 for row in self.train_rows]
        returns = max(
            float(np.nanmax(np.abs(row.returns), initial=0.0)) * n
            for row, n in zip(self.train_rows, tokens, strict=True)
        )
        reward = max(float(np.nanmax(np.abs(row.rewards), initial=0.0)) for row in self.train_rows)
        return math.log(self.policy.get_output_embeddings().weight.shape[0]) + self.policy.method.reach(
            returns, reward
        )

    def _say_if_q_ran_away(self, q: float | None) -> None:
        """Once, at the first logged step where it is so; training goes on, because a bound from the logs
        cannot be sure."""
        if q is None or abs(q - (self._first_q or 0.0)) <= self._reach:
            return
        warnings.warn(
            f"step {self.step}: Q ran away: expected logged tokens within {self._reach:.1f} of where they "
            f"began ({self._first_q:+.1f} on average), which is more than the rewards of the logs explain, "
            f"got {q:+.1f}: what is learned from here on is of no use. Take a prior nearer to the start "
            "(--prior), a larger --method.c, or a smaller --method.gamma or --learning_rate; or psi or "
            "kl_control, which keep to the logs",
            stacklevel=3,
        )
        self._reach = math.inf

    @torch.no_grad()
    def _evaluation(self) -> dict[str, float]:
        """The loss terms on the evaluation rows, shared out over the workers, and what `evaluate`
        measures."""
        self.policy.eval()
        sums: dict[str, Tensor] = {}
        size = self.config.per_device_train_batch_size * self.policy.method.rows_per_unit
        count = torch.zeros((), device=self.device)
        mine = range(self.rank * size, len(self.eval_rows), size * self.world)
        index_ranges = [range(start, min(start + size, len(self.eval_rows))) for start in mine]
        idle = not index_ranges and bool(
            self.eval_rows
        )  # few rows: this worker has none, and still must name the sums that all add up
        index_ranges = [range(min(size, len(self.eval_rows)))] if idle else index_ranges
        measured = self._measured(index_ranges, counted=not idle)
        for number, indices in enumerate(index_ranges):
            batch = self._collate(indices, self.eval_rows, len(self.train_rows))
            batch.measured = None if measured is None else measured[number]
            with self._autocast():
                total, metrics = self.objective(batch)
            for name, value in {"loss": total, **metrics}.items():
                sums[name] = sums.get(name, 0) + value.float()
            count += self.policy.method.terms(batch)
        if idle:
            sums, count = {name: 0 * value for name, value in sums.items()}, 0 * count
        metrics = (
            self._means("eval", sums | {"decisions": count}) if self.eval_rows else {}
        )  # `decisions`: what the sums are divided by
        if "eval/nll" in metrics:
            metrics["eval/perplexity"] = float(np.exp(metrics["eval/nll"]))
            self._held_out.append(metrics["eval/nll"])
        if self.evaluate and self.rank == 0:
            metrics |= self.evaluate(self.policy, self.tokenizer, self.step)
        if self.world > 1:
            wait_for_the_first()
        return metrics

    def _measured(self, index_ranges: Sequence[range], *, counted: bool) -> list[Any] | None:
        """What the method measures of each batch of evaluation rows; None where it measures nothing."""
        if not self.policy.method.measures or not self.eval_rows:
            return None
        batches = [self._collate(indices, self.eval_rows, len(self.train_rows)) for indices in index_ranges]
        self._measure(batches, counted=counted)
        return [batch.measured for batch in batches]

    def _evaluate_and_save(self, log: Logger | None) -> dict[str, float]:
        """At the steps where they are due."""
        evaluating = self._due(self.eval_steps) or self.step == self.total_steps
        saving = self._due(self.config.save_steps) or evaluating
        learning = self.policy.method
        if saving and learning.target_kl is not None:
            self.policy.method = self._at_target_kl()
        metrics = self._evaluation() if evaluating else {}
        if log and metrics:
            log.log(self.step, metrics)
        if saving and self.rank == 0:
            self._save(metrics)
        if self.step < self.total_steps:
            self.policy.method = learning
        if saving and self.world > 1:
            wait_for_the_first()
        if self.report and evaluating:
            self.report({"step": self.step, **metrics}, self.step == self.total_steps)
        return metrics

    @torch.no_grad()
    def _at_target_kl(self, rows: int = 64, halvings: int = 24) -> Method:
        """The method with the strength at which KL(policy || p) per held-out reply is its `target_kl`, by
        bisection; it rises with the strength.

        It is the `kl_per_reply` of `evaluate`: summed over the decisions of logged replies, of validation
        rows where there are any.
        """
        self.policy.eval()
        method, rows_used = self.policy.method, (self.eval_rows or self.train_rows)[:rows]
        batches = [
            collate(rows_used[start : start + 8]).to(self.device) for start in range(0, len(rows_used), 8)
        ]
        outputs = [(batch, self.policy.outputs(batch)) for batch in batches]
        replies = sum(int(batch.turn_end.sum()) for batch in batches)

        def divergence(strength: float) -> float:
            stronger = method.with_strength(strength)
            divergences = (
                kl_divergence(stronger.decode(out).log_softmax(1), out.lm.dense().log_softmax(1))[
                    : batch.decisions
                ]
                for batch, out in outputs
            )
            return sum(float(row_kl.sum()) for row_kl in divergences) / max(1, replies)

        low, high = WEAKEST, STRONGEST
        for _ in range(halvings):
            middle = (low + high) / 2
            low, high = (low, middle) if divergence(math.exp(middle)) > method.target_kl else (middle, high)
        strength = math.exp((low + high) / 2)
        if high == STRONGEST and self.step == self.total_steps:
            warnings.warn(
                f"--method.target_kl {method.target_kl:g}: expected a strength with so many nats per reply, "
                f"got {divergence(strength):.2g} at the largest, {strength:.0f}: values hardly tell replies "
                "apart, and to lean on them as far says little; train for longer, or ask for less",
                stacklevel=2,
            )
        return method.with_strength(strength)

    def _save(self, metrics: dict[str, float]) -> None:
        """checkpoint-<step>/, then the pointers `latest` and `best`, then the removal of old ones."""
        value = metrics.get(self.metric) if self.metric else None
        if value is not None and (self.best is None or self.sign * value > self.sign * self.best["value"]):
            self.best = {"step": self.step, "value": value, "metric": self.metric}
        if self.metric is None:
            self.best = {"step": self.step, "value": None, "metric": None}
        name = f"checkpoint-{self.step}"
        write_atomically(self.output_dir / name, lambda directory: self._fill(directory, metrics))
        write_text_atomically(self.output_dir / "latest", name + "\n")
        if self.best is not None:
            write_text_atomically(self.output_dir / "best", f"checkpoint-{self.best['step']}\n")
        checkpoints = sorted(
            self.output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1])
        )
        for old in checkpoints[:-1]:
            shutil.rmtree(old / "trainer", ignore_errors=True)  # only the latest can be resumed
        keep = {f"checkpoint-{self.best['step']}"} if self.best is not None else set()
        if self.policy.method.heads == Heads():
            keep.add(Path(likeliest(self.output_dir)).name)
        for old in checkpoints[: -self.config.save_total_limit]:
            if old.name not in keep:
                shutil.rmtree(old)

    def _fill(self, directory: Path, metrics: dict[str, float]) -> None:
        save_policy(
            self.policy, directory, prior="../prior" if (self.output_dir / "prior").is_dir() else None
        )
        self.tokenizer.save_pretrained(directory)
        write_json(directory / "metrics.json", {"step": self.step, **metrics})
        (directory / "README.md").write_text(self.describe, encoding="utf-8")
        state = directory / "trainer"
        state.mkdir()
        if self.policy.has_adapters:
            tensors = {name: value.contiguous() for name, value in self.policy.state_that_changes().items()}
            save_file(tensors, state / "policy.safetensors")
        else:
            save_model(self.policy, str(state / "policy.safetensors"))
        save_optimizer(self.optimizer, state / "optimizer.safetensors")
        progress = {
            "step": self.step,
            "best": self.best,
            "batch_size": self.batch_size,
            "rows": len(self.train_rows),
            "data": self.data,
            "total_steps": self.total_steps,
        }
        write_json(state / "progress.json", progress)

    def _resume(self) -> None:
        """Continues from `latest`, if there is one. Raises UserError when it belongs to other data or another
        batch size, and where its files are not whole."""
        if not (self.output_dir / "latest").is_file():
            return
        state = self._pointer("latest") / "trainer"
        try:
            self._load(state)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            got = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{state}: expected a whole checkpoint to go on with, got {got}: copy it anew, or start a "
                "run in another --output_dir, from an earlier checkpoint by --model_name_or_path"
            ) from error

    def _load(self, state: Path) -> None:
        """What a checkpoint has beside the model."""
        progress = json.loads((state / "progress.json").read_text(encoding="utf-8"))
        self._check_progress(state, progress)
        self._load_weights(state)
        load_optimizer(self.optimizer, state / "optimizer.safetensors")
        self.step, self.best = progress["step"], progress["best"]

    def _check_progress(self, state: Path, progress: dict[str, Any]) -> None:
        here = {"batch_size": self.batch_size, "rows": len(self.train_rows), "data": self.data}
        stored = here | {key: progress[key] for key in here if key in progress}
        if stored != here:
            raise UserError(
                f"{state}: expected to resume a run with {stored}, got {here}; resume with the same data and "
                "global batch size, or start anew"
            )

    def _load_weights(self, state: Path) -> None:
        """Of a policy with LoRA all but the model below the adapters, which has to be the one they are of."""
        path = state / "policy.safetensors"
        if not self.policy.has_adapters:
            try:
                load_model(self.policy, str(path), device=str(self.device))
            except RuntimeError as error:
                found = " ".join(str(error).split())[:200]
                raise UserError(
                    f"{path}: expected the weights of this policy, got those of another ({found} ...): "
                    "resume with the same --model_name_or_path, or start a run in another --output_dir"
                ) from error
            return
        base = base_of_adapter(state.parent)
        if base is not None and Path(base).absolute() != Path(self.policy.base).absolute():
            raise UserError(
                f"{state.parent}: expected to resume adapters of {base}, got those of {self.policy.base}: "
                "resume with the same model, or start a run in another --output_dir"
            )
        missing, unexpected = self.policy.load_state_dict(
            load_file(path, device=str(self.device)), strict=False
        )
        missing = set(missing) & self.policy.state_that_changes().keys()
        if missing or unexpected:
            raise UserError(
                f"{path}: expected the weights of this policy, missing {sorted(missing)[:3]}, unexpected "
                f"{unexpected[:3]}: resume with the same method, heads and adapters"
            )

    def _selection_metric(self) -> tuple[str | None, int]:
        """What `best` means: the return in an environment, else the latest, as a TD error ranks no policies,
        and as a new model goes on learning the rules of its world long after its held-out loss has begun to
        rise. The held-out loss counts of a model that was there before and learns no values, and where the
        logs have nothing to win."""
        if self.evaluate:
            return "eval/return", 1
        if self.policy.method.heads != Heads() or not self.eval_rows:
            return None, 1
        rewarded = any(np.nan_to_num(row.rewards).any() for row in self.train_rows)
        return (None, 1) if self.policy.start == "new" and rewarded else ("eval/loss", -1)

    def _means(self, group: str, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sums over this worker's decisions to means over everyone's."""
        names = [name for name in sums if name != "decisions"]
        stacked = torch.stack(
            [
                torch.as_tensor(sums[name], dtype=torch.float64).to(self.device)
                for name in (*names, "decisions")
            ]
        )
        *values, count = self._sum_over_workers(stacked).tolist()
        return {f"{group}/{name}": value / count for name, value in zip(names, values, strict=True)}

    def _sum_over_workers(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def _autocast(self) -> contextlib.AbstractContextManager:
        return (
            torch.autocast(self.device.type, torch.bfloat16) if self.config.bf16 else contextlib.nullcontext()
        )

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _pointer(self, name: str) -> Path:
        path = self.output_dir / name
        return self.output_dir / path.read_text(encoding="utf-8").strip() if path.is_file() else path


def _fingerprint(rows: Sequence[Row]) -> int:
    """Tells what was said and what it earned from other data of as many rows."""
    number = 0
    for row in rows:
        for part in (row.input_ids, row.assistant, row.rewards):
            number = zlib.crc32(part.tobytes(), number)
    return number


def _start_message_heads(policy: Policy, rows: Sequence[Row]) -> None:
    """They begin as what the training split's teachers say on average. Warns of a teacher that says the same
    of every message, as VADER does of languages whose words it does not know."""
    taught = [row.taught for row in rows if row.taught is not None and len(row.taught.places)]
    if not taught:  # the first update tells what is missing
        return
    emotions, embeddings = (
        torch.from_numpy(np.concatenate([getattr(each, name) for each in taught]).astype(np.float32))
        for name in ("emotions", "embeddings")
    )
    policy.message_heads.start_at(emotions, embeddings)
    said = {"emotion": emotions, "embedding": embeddings}
    for name, teacher in policy.config.teachers.items():
        if (said[name] == said[name][0]).all():
            warnings.warn(
                f"{teacher['name']} ({name}) says the same of all {len(said[name])} messages, so nothing can "
                "be learned from it. Does it know the language of the logs? prepare --teachers "
                f"{name}=PATH asks another model",
                stacklevel=2,
            )


def _lengths(rows: Sequence[Row], policy: Policy) -> Lengths | None:
    """What a model that is made here has learned to read after these rows; None for one that tells positions
    by reading, and can go on."""
    if policy.is_hierarchical:
        return None
    prompts = np.concatenate([np.ones(1, np.int32), *(row.reply_starts for row in rows)])
    # Where rows are short, one in hundreds has two replies, and what is behind the first is not learned.
    usual = int(np.quantile(prompts, 0.99, method="higher"))
    longest = max(len(row.input_ids) for row in rows)
    if any(len(row.next_prompt) for row in rows):  # a whole conversation may fill the window
        usual = min(usual, longest_prompt(longest))
    lengths = Lengths(longest, usual)
    return Lengths(*map(max, lengths, policy.lengths or lengths))


def _terms(method: Method, rows: Sequence[Row], size: int = 512) -> int:
    """How many terms the losses of all rows have."""
    units = [rows[i : i + method.rows_per_unit] for i in range(0, len(rows), method.rows_per_unit)]
    unit_batches = batches([len(unit[0].input_ids) for unit in units], size)
    return sum(
        method.terms(collate([row for i in unit_batch for row in units[i]])) for unit_batch in unit_batches
    )


def _may_leave_parameters_out(policy: Policy) -> bool:
    """Whether a loss can skip some parameters, which DDP must be told: an LM head that nothing trains when
    the cloning term is off, say."""
    config = policy.model_config
    detached = config.detach_q or config.detach_v or config.detach_lm
    return policy.is_hierarchical or policy.method.skips_parameters or detached
