"""Online learning: the policy plays episodes, learns from what came of them, and stays near its prior.

    play -> drop what has no return -> what the policy, its values and the prior say of every token
         -> advantages (methods/advantages.py) -> passes over the episodes -> log, evaluate, save

A step of the run is one such round. All that happens in it follows from (seed, step) and the weights, so a
run that was killed and resumed is the run that was not. Tokens are learned from as they were drawn
(data/rollout.py); sums of losses are divided by the episodes of the whole step of the optimizer, whatever the
micro-batches. Of several learners the first one plays, or has actors play, for all; the rows to look at and
the episodes of each step of the optimizer are shared out. Everything else is the loop of offline learning
(training/loop.py).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_dialog.data.batch import Batch, collate
from rl_dialog.data.files import write_json, write_text_atomically
from rl_dialog.data.rollout import Rollout
from rl_dialog.data.tokenize import Row
from rl_dialog.errors import UserError
from rl_dialog.methods.advantages import SAME, Experience, groups_without_spread
from rl_dialog.methods.method import Outputs
from rl_dialog.models.checkpoint import describe
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from rl_dialog.training.logger import Logger, write_note
from rl_dialog.training.loop import Evaluate, Objective, Trainer
from rl_dialog.training.micro_batches import like_lengths
from rl_dialog.training.optim import Schedule
from rl_dialog.training.over_optimisation import OverOptimisation
from rl_dialog.training.token_page import TokenEpisode, TokenRow, token_page
from rl_dialog.training.versions import Versions
from rl_dialog.training.worker_group import patient_group

UNIT = "unit.json"  # beside the optimizer's state: whether the unit of values is known yet, c, the alarm
SAMPLES = "samples"  # the folder of a run with its conversations token by token
LOGGED = 1  # the stream of randomness that logged rows are drawn from
KL_CUT = 0.2  # the largest relative error that the controller of c answers to (Ziegler et al. 2019)

Play = Callable[[Policy, Any, int], Sequence[Rollout]]  # (policy, tokenizer, step) -> the step's episodes


@dataclass(frozen=True)
class OnlineSettings:
    """How long, how fast, how often. Names are those of transformers and TRL."""

    max_steps: int = 200
    """rounds of playing and learning"""
    num_iterations: int | None = None
    """passes over the episodes of a round; by default the method's own (ppo 2, the others 1)"""
    num_mini_batches: int | None = None
    """steps of the optimizer in a pass, each on its share of the episodes; by default the method's own (ppo
    2, the others 1)"""
    per_device_train_batch_size: int = 16
    """most rows in a micro-batch; the update does not depend on it"""
    learning_rate: float | None = None
    """peak learning rate of AdamW; by default a quarter of what `train` takes for the same model: 2.5e-4 for
    one of width 64 that was made here, 1.5e-5 for a pretrained one of width 768"""
    lr_scheduler_type: Schedule = "linear"
    """the learning rate stays (constant), or falls to zero (linear, cosine)"""
    warmup_steps: int = 5
    """rounds of linear warm-up"""
    weight_decay: float = 0.0
    """weight decay of AdamW, on matrices only"""
    max_grad_norm: float = 1.0
    """clip the norm of the language model's gradient, and during the warm-up that of the values; 0 does not
    clip"""
    bf16: bool = False
    """bfloat16 autocast while learning (weights, values and the optimizer stay float32)"""
    value_unit: float = 0.0
    """rewards are learned from in this many units of reward; 0 takes the spread of the first round's returns
    (of the first that has one), 1 the rewards as they are. c, entropy_weight and values are in this unit;
    returns are reported in units of reward"""
    target_kl: float = 0.0
    """nats per reply that the policy shall be away from the prior: c follows, c <- c (1 + kl_gain e) after
    each round, e = (kl_per_reply / target_kl - 1) cut to [-.2, .2] (Ziegler et al. 2019); 0 leaves c alone"""
    kl_gain: float = 0.1
    """how fast c follows"""
    supervised_weight: float = 0.0
    """weight of -log p of logged replies per token (with `data`), beside what was played: as many logged rows
    as episodes in every step of the optimizer (the ptx term of Ouyang et al. 2022)"""
    logging_steps: int = 1
    """rounds between two lines of metrics"""
    eval_steps: int = 25
    """rounds between two evaluations; 0 evaluates at the start and at the end only"""
    save_steps: int = 0
    """rounds between two checkpoints; 0 saves at every evaluation"""
    save_total_limit: int = 2
    """checkpoints kept, besides the best"""
    seed: int = 0
    """seed of the conversation partners, of what is drawn, of the order of episodes and of new values"""
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl; wandb and mlflow are installed apart and read their own
    environment variables"""


@dataclass(frozen=True)
class Sample:
    """A row to learn from: one number for each of its n decisions."""

    row: Row
    behaviour_logp: np.ndarray
    old_logp: np.ndarray
    prior_logp: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    value_targets: np.ndarray
    # Of each of its R replies, where the method chooses their latents:
    latents: np.ndarray | None = None  # (R, Z) float32
    latent_behaviour_logp: np.ndarray | None = None
    latent_prior_logp: np.ndarray | None = None
    latent_advantages: np.ndarray | None = None


@dataclass(frozen=True)
class Said:
    """What the policy, its values and the prior say of a row before a round's updates."""

    logp: np.ndarray  # (n,) float64
    prior_logp: np.ndarray  # (n,)
    values: np.ndarray  # (n,) in units of value; 0 without a value head
    last_value: float  # of the state behind the row, where the conversation goes on
    # Where the method chooses latents, of the R replies:
    latents: np.ndarray | None = None  # (R, Z) float32
    latent_logp: np.ndarray | None = None  # (R,)
    latent_prior_logp: np.ndarray | None = None  # (R,)


class OnlineObjective(Objective):
    """Policy and loss; log-probabilities are those of the policy at the temperature that it speaks at."""

    def __init__(self, policy: Policy, prior: Prior | Policy, temperature: float) -> None:
        super().__init__(policy, prior)
        self.temperature = temperature

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.advantages is None:  # logged: the supervised term
            total, nll = self.outputs(batch).lm.nll(batch.actions)
            return batch.supervised * total, {"supervised_nll": batch.supervised * nll.sum()}
        loss = self.policy.method.loss(self.outputs(batch), batch)
        return loss.total, loss.metrics

    def outputs(self, batch: Batch) -> Outputs:
        """What the policy says."""
        out = self.policy.outputs(batch)
        out.lm = out.lm.scaled(1 / self.temperature)
        return out

    def prior_logp(self, batch: Batch) -> Tensor:
        """(N,) what the prior says, at the same temperature."""
        scores = self._prior[0].prior_scores(batch)
        return -scores.scaled(1 / self.temperature).nll(batch.actions)[1]

    def latents(self, batch: Batch, out: Outputs) -> tuple[Tensor, Tensor, Tensor]:
        """Of each reply, where the method chooses latents: the one that was drawn (R, Z), its log-density
        (R,), and that under the prior (R,), or the same where each net draws its own. The batch gets them."""
        batch.latents = out.drawn
        if not self.policy.method.holds_latents:
            return out.drawn, out.latent_logp, out.latent_logp
        batch.reply_noise = None
        (prior,) = self._prior[0].members
        return out.drawn, out.latent_logp, prior.outputs(batch).latent_logp


class OnlineTrainer(Trainer):
    """One policy, the episodes that it plays, and its run folder.

    Args:
        policy: as loaded, with a method that learns online.
        play: gives the episodes of a round.
        prior: the frozen prior; without it the policy has adapters to switch off.
        temperature: what the policy speaks at, in `play` and when it is used.
        drawn_plainly: whether `play` draws from the policy's whole vocabulary, so that what it says of its
            draws is what the policy says of them.
        versions: of the policy from its start on, where `play` needs older ones.
        logged: rows of logs, for the supervised term.
        evaluate, report, describe: as Trainer has them; the best checkpoint is that of the highest
            `eval/return`.
        about_rewards: where rewards are learned while the policy is, how that stands; returns of different
            rounds cannot be compared then, so the best checkpoint is the latest.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        play: Play,
        config: OnlineSettings,
        output_dir: str | Path,
        *,
        prior: Prior | None = None,
        temperature: float = 1.0,
        drawn_plainly: bool = False,
        versions: Versions | None = None,
        logged: Sequence[Row] = (),
        evaluate: Evaluate | None = None,
        about_rewards: Callable[[], Mapping[str, float]] | None = None,
        report: Callable[[dict[str, float], bool], None] | None = None,
        describe: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        self.tokenizer, self.config, self.output_dir = tokenizer, config, Path(output_dir)
        self.play, self.evaluate, self.report, self.describe = play, evaluate, report, describe
        self.versions, self.logged = versions, logged
        self.logged_tokens = sum(int(row.assistant[1:].sum()) for row in logged) / max(1, len(logged))
        self.train_rows, self.eval_rows = (), ()
        self._start(policy, device)
        method = policy.method
        passes, parts = config.num_iterations, config.num_mini_batches
        self.passes = method.iterations if passes is None else passes
        self.parts = method.mini_batches if parts is None else parts
        self.drawn_plainly = drawn_plainly
        self.batch_size = 0  # no rows are given: a run is resumed by its step alone
        self.total_steps, self.warmup_steps = config.max_steps, config.warmup_steps
        self.eval_steps = config.eval_steps
        self.step, self.best, self.unit_known = 0, None, False
        self._held_out: list[float] = []
        self.alarm = OverOptimisation()
        self.about_rewards = about_rewards
        self.metric, self.sign = (None, 1) if about_rewards else self._selection_metric()
        frozen = prior.to(self.device) if prior else self.policy
        self.objective = OnlineObjective(self.policy, frozen, temperature)
        self.learning: nn.Module = self.objective  # what gradients are of: of several learners their sum

    def _train(self, objective: nn.Module, log: Logger | None) -> dict[str, float]:
        """From where it is to the last step; returns the last metrics."""
        self.learning = objective
        metrics: dict[str, float] = {}
        if self.step == 0 and self.evaluate:
            metrics = self._evaluation()
            if log:
                log.log(0, metrics)
        while self.step < self.total_steps:
            began = time.perf_counter()
            self.policy.eval()  # dropout would make another policy of the one that played
            if self.versions is not None:
                self.versions.remember(self.step, self.policy)
            rollouts = self._played()
            played = time.perf_counter() - began
            figures = figures_of(rollouts) | self._learn(
                [each for each in rollouts if each.total is not None]
            )
            seconds = time.perf_counter() - began
            drawn, read = (sum(f(row) for each in rollouts for row in each.rows) for f in (_drawn, _read))
            figures |= {
                "data/episodes_per_s": len(rollouts) / seconds,
                "data/playing": played / seconds,
                "data/drawn_tokens_per_s": drawn / played,
                "data/learned_tokens_per_s": read * self.passes / (seconds - played),
                "train/progress": self.step / self.total_steps,
                **(self.about_rewards() if self.about_rewards else {}),
            }
            if self._due(self.config.logging_steps):
                metrics = figures
                if log:
                    log.log(self.step, metrics)
            metrics |= self._evaluate_and_save(log)
        return metrics

    def _played(self) -> Sequence[Rollout]:
        """The episodes of this step, which the first learner gives to all."""
        rollouts = [self.play(self.policy, self.tokenizer, self.step) if self.rank == 0 else None]
        if self.world > 1:
            dist.broadcast_object_list(rollouts, src=0, group=patient_group())
        return rollouts[0]

    def _learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The updates of a round, and their metrics: means over decisions."""
        if not rollouts:
            raise UserError(
                f"step {self.step}: expected at least one episode with a return, got none: all of them "
                "failed or were not scored (the log of this round under rollouts/ has each with its end); "
                "repair the world and --resume"
            )
        if not self.unit_known:
            self._set_unit(np.array([rollout.total for rollout in rollouts]))
        said, experiences = self._experiences(rollouts)
        episodes = self._samples(rollouts, said, experiences)
        if self.rank == 0 and (self._due(self.eval_steps) or self.step in (0, self.total_steps - 1)):
            self._show(rollouts, episodes)
        sums, decisions, rate = self._passes(episodes)
        self.step += 1
        ratios = np.concatenate([each.log_ratio for each in experiences])
        replies = sum(each.replies for each in experiences)
        of_latents = [each.latent_log_ratio for each in experiences if each.latent_log_ratio is not None]
        latent_kl = float(np.concatenate(of_latents).mean()) if of_latents else 0.0
        means = {f"train/{name}": float(value) / decisions for name, value in sums.items()}
        if not self._draws_tell(rollouts):  # otherwise the update found it, with the same weights
            gaps = [
                np.abs(each.logp - logp) for a, b in zip(said, rollouts, strict=True)
                for each, logp in zip(a, b.logp, strict=True)
            ]  # fmt: skip
            means["train/behaviour_gap"] = float(np.concatenate(gaps).mean())
        kl_per_reply, c = float(ratios.sum()) / replies + latent_kl, self.policy.method.c
        self._steer(kl_per_reply)
        return means | {
            "train/learning_rate": rate,
            "train/c": c,
            "train/kl_per_reply": kl_per_reply,
            **({"train/latent_kl_per_reply": latent_kl} if self.policy.method.holds_latents else {}),
            "train/reply_tokens": len(ratios) / replies,
        }

    def _show(self, rollouts: Sequence[Rollout], episodes: Sequence[Sequence[Sample]]) -> None:
        """Writes two episodes of the first two groups as a page: their tokens, and what is learned from
        them."""
        shown: dict[int, list[TokenEpisode]] = {}
        for rollout, samples in zip(rollouts, episodes, strict=True):
            rows = [
                TokenRow(each.row, each.behaviour_logp, each.prior_logp, each.advantages, each.weights)
                for each in samples
            ]
            role = f", {rollout.role}" if rollout.role else ""
            title = f"Group {rollout.group}, episode {rollout.episode}{role}: return {rollout.total:.3g}"
            shown.setdefault(rollout.group, []).append(TokenEpisode(title, rows))
        chosen = [each for group in list(shown.values())[:2] for each in group[:2]]
        page = token_page(f"{self.output_dir.name}: round {self.step + 1}", chosen, self.tokenizer)
        (self.output_dir / SAMPLES).mkdir(parents=True, exist_ok=True)
        write_text_atomically(self.output_dir / SAMPLES / f"round-{self.step + 1:06d}.html", page)

    def _evaluation(self) -> dict[str, float]:
        """And whether a reward is over-optimised, where the world's own is known beside it."""
        metrics = super()._evaluation()
        if "eval/true_return" in metrics:
            message = self.alarm.look(self.step, metrics)
            metrics["eval/over_optimised"] = float(message is not None)
            if message:
                write_note(self.output_dir, message)
                warnings.warn(message, stacklevel=2)
        return metrics

    def _steer(self, kl_per_reply: float) -> None:
        """c for the next round, where a divergence is aimed at."""
        if self.config.target_kl:
            error = float(np.clip(kl_per_reply / self.config.target_kl - 1, -KL_CUT, KL_CUT))
            method = self.policy.method
            self.policy.method = replace(method, c=method.c * (1 + self.config.kl_gain * error))

    @torch.no_grad()
    def _set_unit(self, returns: np.ndarray) -> None:
        """What is learned does not depend on the unit of rewards: they are divided by the spread of the first
        round's returns. While all are equal, which teaches nothing, by their size (1 when they are 0), and
        then by that of the first round that has spread. Values begin at the mean."""
        spread, level = float(returns.std()), float(returns.mean())
        self.unit_known = bool(self.config.value_unit) or spread > SAME * abs(level)
        before, unit = self.policy.value_unit, spread if self.unit_known else abs(level) or 1.0
        if self.step and not self.unit_known:
            return
        self.policy.value_unit = self.config.value_unit or unit
        if self.policy.heads is not None and self.step == 0:
            self.policy.heads.start_at(level / self.policy.value_unit)
        elif self.policy.heads is not None:  # what they say stays the same in units of reward
            for parameter in self.policy.heads.v.out.parameters():
                parameter.mul_(before / self.policy.value_unit)

    @torch.no_grad()
    def _experiences(self, rollouts: Sequence[Rollout]) -> tuple[list[list[Said]], list[Experience]]:
        """What is said of every row before anything is learned, and what every episode led to."""
        rows = [row for rollout in rollouts for row in rollout.rows]
        drawn = [each for of in rollouts for each in of.logp] if self._draws_tell(rollouts) else None
        found: dict[int, Said] = {}
        method = self.policy.method
        parts = list(_micro_batches(rows, range(len(rows)), self.config.per_device_train_batch_size))
        for indices in self._mine(parts):
            batch = collate([rows[i] for i in indices], bootstraps=True).to(self.device)
            with self._autocast():
                if drawn is None:
                    out = self.objective.outputs(batch)
                    logp, v = -out.lm.nll(batch.actions)[1], out.v
                    chosen = self.objective.latents(batch, out) if method.chooses_latents else ()
                else:
                    logp, v, chosen = torch.from_numpy(np.concatenate([drawn[i] for i in indices])), None, ()
                prior = self.objective.prior_logp(batch)
            v = torch.zeros(len(batch.states)) if v is None else v
            logp, prior, v = (each.double().cpu().numpy() for each in (logp, prior, v))
            owner = batch.owners.cpu().numpy()
            of_reply = batch.rows[batch.turn_end].cpu().numpy()
            chosen = [each.cpu().numpy() for each in chosen]
            for place, i in enumerate(indices):
                mine, after = owner[: batch.decisions] == place, owner[batch.decisions :] == place
                tail = v[batch.decisions :][after]
                found[i] = Said(
                    logp[mine],
                    prior[mine],
                    v[: batch.decisions][mine],
                    float(tail[0]) if len(tail) else 0.0,
                    *(each[of_reply == place] for each in chosen),
                )
        found = self._of_all_learners(found)
        remaining = (found[i] for i in range(len(rows)))
        said = [[next(remaining) for _ in rollout.rows] for rollout in rollouts]
        unit = self.policy.value_unit
        return said, [_experience(*pair, unit) for pair in zip(rollouts, said, strict=True)]

    def _draws_tell(self, rollouts: Sequence[Rollout]) -> bool:
        """Do the draws tell what the policy says of them? Not where older weights drew, nor where more is
        asked than log-probabilities; with several updates, asking costs little."""
        plain = self.drawn_plainly and self.passes == self.parts == 1 and not self.config.bf16
        only_words = (
            self.policy.heads is None and self.policy.steering is None and not self.policy.has_latents
        )
        return plain and only_words and all(rollout.staleness == 0 for rollout in rollouts)

    def _of_all_learners(self, found: dict[int, Said]) -> dict[int, Said]:
        """What all of them have found."""
        if self.world == 1:
            return found
        theirs: list[Any] = [None] * self.world
        dist.all_gather_object(theirs, found)
        return {i: said for part in theirs for i, said in part.items()}

    def _samples(
        self, rollouts: Sequence[Rollout], said: Sequence[Sequence[Said]], experiences: Sequence[Experience]
    ) -> list[list[Sample]]:
        """Each episode's rows, with what the method makes of its decisions."""
        method, episodes = self.policy.method, []
        for rollout, of_rows, experience, advantages in zip(
            rollouts, said, experiences, method.advantages(experiences), strict=True
        ):
            cuts = np.cumsum([len(each.logp) for each in of_rows])[:-1]
            numbers = (
                np.split(values, cuts)
                for values in (advantages, method.weights(experience), method.value_targets(experience))
            )
            samples = zip(rollout.rows, rollout.logp, of_rows, *numbers, strict=True)
            episodes.append([Sample(row, mu, own.logp, own.prior_logp, *of) for row, mu, own, *of in samples])
        if method.chooses_latents:
            above = method.latent_advantages(experiences)
            episodes = [_with_latents(*each) for each in zip(episodes, said, above, strict=True)]
        return episodes

    def _passes(self, episodes: Sequence[Sequence[Sample]]) -> tuple[dict[str, Tensor], float, float]:
        """The steps of the optimizer of a round; the sums of their metrics over all learners, over how many
        decisions, and the learning rate."""
        rng = np.random.default_rng((self.config.seed, self.step))
        torch.manual_seed(int(rng.integers(1 << 62)))
        sums: dict[str, Tensor] = {}
        decisions, rate, number = 0, 0.0, 0
        for _ in range(self.passes):
            order = rng.permutation(len(episodes))
            for part in np.array_split(order, min(self.parts, len(order))):
                # Where episodes are fewer than learners, each one learns from all of them, for its share.
                few = len(part) < self.world
                mine, divisor = (part, len(part) * self.world) if few else (self._mine(part), len(part))
                samples = [sample for i in mine for sample in episodes[i]]
                batches = list(self._batches(samples, unchanged=number == 0))
                own = sum(batch.decisions for batch in batches)
                count = float(self._sum_over_workers(torch.tensor(float(own), device=self.device)))
                # Learners add up at the last batch: one of episodes, in which all parameters have a part.
                batches = [*self._logged_batches(len(part), number, whole=few), *batches]
                found, norm, rate = self._descend(self.learning, batches, divisor)
                if "supervised_nll" in found:  # a mean over logged tokens, not over what was played
                    found["supervised_nll"] *= count / (self.config.supervised_weight * divisor)
                for name, value in (found | {"grad_norm": norm * own}).items():
                    sums[name] = sums.get(name, 0) + value
                decisions, number = decisions + count, number + 1
        return {name: self._sum_over_workers(value) for name, value in sums.items()}, decisions, rate

    def _mine(self, indices: Sequence[int]) -> Sequence[int]:
        """This learner's share."""
        return indices[self.rank :: self.world]

    def _logged_batches(self, episodes: int, number: int, *, whole: bool) -> Iterator[Batch]:
        """Micro-batches of as many logged rows as episodes, for step `number` of the optimizer in this round.
        The step's losses are divided by its episodes; those of logged tokens by how many so many rows have on
        average, so that a token weighs the same whichever rows it meets.

        whole: all of them, not this learner's share.
        """
        if not self.logged:
            return
        rng = np.random.default_rng((self.config.seed, self.step, number, LOGGED))
        drawn = rng.integers(len(self.logged), size=episodes)
        rows = [self.logged[i] for i in (drawn if whole else self._mine(drawn))]
        for indices in _micro_batches(rows, range(len(rows)), self.config.per_device_train_batch_size):
            batch = collate([rows[i] for i in indices], pad_id=self.tokenizer.pad_token_id or 0)
            # _descend divides by the episodes, of which there are as many as rows
            batch.supervised = self.config.supervised_weight / self.logged_tokens
            yield batch.to(self.device)

    def _batches(self, samples: Sequence[Sample], *, unchanged: bool) -> Iterator[Batch]:
        """Micro-batches of like lengths. unchanged: the policy is the one of `_experiences`. (In bfloat16 it
        says something else of a row in another micro-batch, and with latents of others.)"""
        unchanged = unchanged and not self.config.bf16 and not self.policy.has_latents
        rows = [sample.row for sample in samples]
        size = self.config.per_device_train_batch_size
        for indices in _micro_batches(rows, range(len(rows)), size):
            chosen = [samples[i] for i in indices]
            batch = collate([sample.row for sample in chosen], pad_id=self.tokenizer.pad_token_id or 0)
            for name in Sample.__dataclass_fields__.keys() - {"row"}:
                values = [getattr(sample, name) for sample in chosen]
                if values[0] is not None:
                    setattr(batch, name, torch.from_numpy(np.concatenate(values).astype(np.float32)))
            batch.round, batch.unchanged = self.step, unchanged
            if self.policy.method.holds_latents:
                batch.reply_noise = None
            yield batch.to(self.device)

    def _fill(self, directory: Path, metrics: dict[str, float]) -> None:
        super()._fill(directory, metrics)
        state = {"known": self.unit_known, "c": self.policy.method.c, "alarm": self.alarm.state()}
        write_json(directory / "trainer" / UNIT, state)
        if self.versions is not None:
            self.versions.save(directory / "trainer", self.step)

    def _load(self, state: Path) -> None:
        super()._load(state)
        self.policy.value_unit = float(describe(state.parent).get("value_unit", 1.0))
        known = json.loads((state / UNIT).read_text(encoding="utf-8"))
        self.unit_known = known["known"]
        self.alarm.load(known.get("alarm", {}))
        if self.config.target_kl:
            self.policy.method = replace(self.policy.method, c=known.get("c", self.policy.method.c))
        if self.versions is not None:
            self.versions.load(state)


def figures_of(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What a round's episodes were like."""
    scored = [rollout for rollout in rollouts if rollout.total is not None]
    figures = {
        "train/no_return": 1 - len(scored) / len(rollouts),
        "train/replies_per_dialog": sum(len(r.rewards) for each in rollouts for r in each.rows)
        / len(rollouts),
        "train/rows_per_dialog": sum(len(each.rows) for each in rollouts) / len(rollouts),
        "train/distinct_pairs": _distinct_pairs(rollouts),
        "train/staleness": float(np.mean([each.staleness for each in rollouts])),
    }
    if scored:
        totals = np.array([rollout.total for rollout in scored])
        groups = np.array([rollout.group for rollout in scored])
        figures["train/return"] = float(totals.mean())
        figures["train/flat_groups"] = groups_without_spread(totals, groups)
        roles = np.array([rollout.role for rollout in scored])
        for name in sorted({name for rollout in scored for name in rollout.components}):
            values = [each.components[name] for each in scored if name in each.components]
            figures["train/true_return" if name == "world" else f"train/reward_{name}"] = float(
                np.mean(values)
            )
        if len(names := sorted(set(roles))) > 1:
            figures |= {f"train/return_{name}": float(totals[roles == name].mean()) for name in names}
    return figures


def _distinct_pairs(rollouts: Sequence[Rollout]) -> float:
    """Different pairs of tokens that follow each other in replies, as a share of all such pairs: the lower,
    the more the policy repeats itself."""
    pairs: list[tuple[int, int]] = []
    for row in (row for each in rollouts for row in each.rows):
        both = row.assistant[1:] & row.assistant[:-1]
        pairs += zip(row.input_ids[:-1][both].tolist(), row.input_ids[1:][both].tolist(), strict=True)
    return len(set(pairs)) / max(1, len(pairs))


def _drawn(row: Row) -> int:
    return int(row.assistant[1:].sum())


def _read(row: Row) -> int:
    return len(row.input_ids)


def _experience(rollout: Rollout, said: Sequence[Said], unit: float) -> Experience:
    """The decisions of an episode, with rewards in units of value."""
    rewards, ends = [], []
    for row in rollout.rows:
        places = np.flatnonzero(row.assistant[1:]) + 1  # of the tokens that were drawn
        end = np.isin(places, row.reply_ends)
        reward = np.zeros(len(places))
        reward[end] = row.rewards.astype(np.float64) / unit
        rewards.append(reward)
        ends.append(end)
    logp, prior, values = (
        np.concatenate([getattr(each, name) for each in said]) for name in ("logp", "prior_logp", "values")
    )
    # Only where the episode was cut off is its last row's end a state of its own.
    last = said[-1].last_value if rollout.rows[-1].truncated else 0.0
    turn_end = np.concatenate(ends)
    ratio, parts = None, {}
    if said[0].latents is not None:
        ratio = np.concatenate([each.latent_logp - each.latent_prior_logp for each in said], dtype=np.float64)
    for name, (weight, earned) in rollout.parts.items():
        parts[name] = weight, np.zeros(len(turn_end))
        parts[name][1][turn_end] = earned / unit
    return Experience(
        rollout.group,
        np.concatenate(rewards),
        turn_end,
        logp - prior,
        np.append(values, last),
        ratio,
        parts,
    )


def _with_latents(samples: Sequence[Sample], said: Sequence[Said], advantages: np.ndarray) -> list[Sample]:
    """The rows of an episode with what was found of their latents. advantages (R,), of the whole episode."""
    parts = np.split(advantages, np.cumsum([len(each.latent_logp) for each in said])[:-1])
    return [
        replace(
            sample,
            latents=own.latents,
            latent_behaviour_logp=own.latent_logp,
            latent_prior_logp=own.latent_prior_logp,
            latent_advantages=part,
        )
        for sample, own, part in zip(samples, said, parts, strict=True)
    ]


def _micro_batches(rows: Sequence[Row], indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    lengths = {i: len(rows[i].input_ids) for i in indices}
    return like_lengths(sorted(indices, key=lengths.__getitem__), lengths, size)
