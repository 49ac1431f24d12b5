"""CartPole with four kinds of logged data through the losses of rl_dialog/methods: the classic-control check of Jaques et al. 2019, 1907.00456.

    python -m tests.learning.cartpole --out DIR [--seeds K] [--steps N]

A Q-learner explores CartPole (at most 200 steps, reward 1 each) and leaves four buffers of 10 000 transitions. On each of them every method learns a
policy without the environment, which afterwards only measures it:

    full         everything the learner saw, from its first random step on
    concurrent   the same, through a window of the most recent data that slides along while the method learns
    expert       the learner at its best, always with its best action
    noisy        the same with 30 % random actions

A transition is a decision of a Batch: its state is an observation instead of a prefix of tokens and its turn ends at once; an MLP stands for the
language model. All seeds and buffers learn side by side, as slices of batched matrix products: K networks, B transitions each, N = K B decisions.
Writes cartpole.json and cartpole.svg and prints the table.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from rl_dialog.data.batch import Batch
from rl_dialog.evaluation.intervals import Estimate, Measure, estimate
from rl_dialog.methods import BC, WayOffPolicy
from rl_dialog.methods.method import Method, Outputs
from rl_dialog.methods.scores import Dense

BUFFERS = ("full", "concurrent", "expert", "noisy")
LENGTH, WINDOW, NOISE = 10_000, 2_000, 0.3  # transitions in a buffer and in the sliding window; the noisy expert's share of random actions
LIMIT, EPISODES = 200, 50  # steps of an episode (CartPole-v0's limit); episodes that measure a policy
SCALE = torch.tensor([1.0, 1.0, 0.1, 1.0])  # brings position, speed, angle and angular speed to one size
WIDTH, SAMPLES = 32, 32  # hidden units; B
C, PASSES, DRAWS = 2.0, 5, 2  # WOP's c and M as published; how many actions DBCQ draws from the prior
DROPOUT = 0.02  # where targets are Monte-Carlo. All values are near 1 / (1 - gamma), so more of it would drown the differences between actions
GAMMA, POLYAK, RATE = 0.95, 0.005, 1e-3  # for all methods; targets that follow ten times as fast let plain Q-learning diverge
PRIOR_STEPS = 2_000

Q_LEARNING = WayOffPolicy(origin="logits", state_value=False, coefficient="kl", c=0.0, gamma=GAMMA)  # r + 0 (log p - log pi) + gamma max Q'
LOWER_Q_LEARNING = replace(Q_LEARNING, target_passes=PASSES)  # what DBCQ chooses by
WOP = WayOffPolicy(backup="psi", origin="logits", state_value=False, c=C, gamma=GAMMA, target_passes=PASSES)
Act = Callable[[Tensor], Tensor]  # (K, E, 4) observations -> (K, E, 2) probabilities
Seen = Callable[["Transitions", Tensor], None]  # the logs so far and the K numbers of transitions in them


class Networks(nn.Module):
    """K independent MLPs of two hidden layers: (K, B, 4) observations -> (K, B, 2) scores."""

    def __init__(self, count: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = [(len(SCALE), WIDTH), (WIDTH, WIDTH), (WIDTH, 2)]
        self.weights = nn.ParameterList([(torch.rand(count, i, o) * 2 - 1) / i**0.5 for i, o in sizes])
        self.biases = nn.ParameterList([torch.zeros(count, 1, o) for _, o in sizes])
        self.dropout = nn.Dropout(dropout)

    def forward(self, observations: Tensor) -> Tensor:
        hidden = observations / SCALE
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            thinned = self.dropout(torch.ones_like(bias))  # one mask per network and pass: a pass is one draw of a function
            hidden = torch.relu(torch.baddbmm(bias, hidden, weight)) * thinned
        return torch.baddbmm(self.biases[-1], hidden, self.weights[-1])


@dataclass
class Transitions:
    """K logs of L transitions each, in the order they were made. The reward is always 1."""

    observations: Tensor  # (K, L, 4)
    actions: Tensor  # (K, L) int64
    following: Tensor  # (K, L, 4)
    terminated: Tensor  # (K, L) bool: the pole fell or the cart left. An episode cut by the time limit is not: its value goes on
    ended: Tensor  # (K, L) bool: terminated or cut

    @classmethod
    def empty(cls, count: int, length: int) -> Transitions:
        flags = (torch.zeros(count, length, dtype=torch.bool) for _ in range(2))
        return cls(torch.zeros(count, length, 4), torch.zeros(count, length, dtype=torch.int64), torch.zeros(count, length, 4), *flags)

    @classmethod
    def stack(cls, parts: list[Transitions]) -> Transitions:
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def batch(self, columns: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """The transitions `columns` (K, B) as N = K B decisions with their observations and the following ones, each (K, B, 4).

        States are the N observations, then the N following ones. There are no tokens, so the token tensors are empty.
        """
        place = torch.arange(len(columns))[:, None], columns
        dones, count, tokens = self.terminated[place].flatten(), columns.numel(), torch.zeros(0, 0)
        batch = Batch(
            *[tokens] * 6,
            states=torch.arange(2 * count),
            actions=self.actions[place].flatten(),
            rewards=torch.ones(count),
            rated=torch.ones(count, dtype=torch.bool),
            next_state=torch.arange(count, 2 * count).masked_fill(dones, 0),
            dones=dones,
            turn_end=torch.ones(count, dtype=torch.bool),
            rows=torch.arange(count),
        )
        return batch, self.observations[place], self.following[place]

    def mean_return(self) -> Tensor:
        """(K,) the mean return of the episodes in the logs, that is their mean length; the last, unfinished one does not count."""
        steps = torch.arange(1, self.ended.shape[1] + 1)
        return torch.stack([steps[ended].max() / ended.sum() for ended in self.ended])


class Learner:
    """One method on K networks: what the trainer does with a language model, without the language."""

    def __init__(self, method: Method, networks: Networks, *, prior: Networks | None = None) -> None:
        self.method, self.online, self.prior = method, networks.train(), prior
        self.target = copy.deepcopy(networks).requires_grad_(False).train(method.target_passes > 1)  # dropout is for several passes only
        self.optimizer = torch.optim.Adam(networks.parameters(), lr=RATE)

    def update(self, transitions: Transitions, columns: Tensor, *, progress: float) -> None:
        """One step of Adam; `progress` 0..1 lowers the learning rate to a fiftieth."""
        batch, now, then = transitions.batch(columns)
        scores = self.online(now).flatten(0, 1)  # (N, 2)
        unread = torch.zeros_like(scores)  # losses read online scores at decisions only, target scores at next states only
        with torch.no_grad():
            if self.method.uses_prior:
                logits = torch.zeros_like(scores) if self.prior is None else self.prior(now).flatten(0, 1)
                batch.prior_logp = logits.log_softmax(1).gather(1, batch.actions[:, None]).squeeze(1)
            passes = range(self.method.target_passes if self.method.heads.lm_target else 0)
            targets = tuple(Dense(torch.cat([unread, self.target(then).flatten(0, 1)])) for _ in passes)
        loss = self.method.loss(Outputs(Dense(torch.cat([scores, unread])), lm_target=targets), batch)
        (loss.total / columns.shape[1]).backward()  # the mean over each network's own decisions
        self.optimizer.param_groups[0]["lr"] = RATE * max(0.02, 1 - progress)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), POLYAK)


def record(act: Callable[[Tensor], Tensor], count: int, length: int, *, seed: int, seen: Seen | None = None) -> Transitions:
    """Transitions of `count` environments under act: (K, 4) -> (K,); `seen(transitions, sizes)` is called after every step."""
    env, observations = _make_env(count, seed)
    logs, sizes, fresh = Transitions.empty(count, length), torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    while int(sizes.min()) < length:
        actions = act(observations)
        step = env.step(actions.numpy())
        following, terminated, cut = (torch.from_numpy(step[i]) for i in (0, 2, 3))
        k = (~fresh & (sizes < length)).nonzero().squeeze(1)  # the step after an episode's end only resets, whatever the action
        values = observations, actions, following, terminated, terminated | cut
        for f, value in zip(fields(Transitions), values, strict=True):
            getattr(logs, f.name)[k, sizes[k]] = value[k]
        sizes[k] += 1
        observations, fresh = following, terminated | cut
        if seen is not None:
            seen(logs, sizes)
    return logs


def returns(act: Act, count: int, *, seed: int, episodes: int = EPISODES) -> Tensor:
    """(K,) the mean return of each network's policy; every policy starts from the same states with the same luck."""
    env, observations = _make_env(count * episodes, seed)
    draws = torch.Generator().manual_seed(seed)
    alive, total = torch.ones(count * episodes, dtype=torch.bool), torch.zeros(count * episodes)
    for _ in range(LIMIT):
        with torch.no_grad():
            probabilities = act(observations.view(count, episodes, 4)).flatten(0, 1)
        actions = (torch.rand(len(alive), generator=draws) < probabilities[:, 1]).long()
        following, _, terminated, cut, _ = env.step(actions.numpy())
        total += alive
        alive &= ~torch.from_numpy(terminated | cut)
        observations = torch.from_numpy(following)
    return total.view(count, episodes).mean(1)


def _make_env(count: int, seed: int) -> tuple[gymnasium.vector.VectorEnv, Tensor]:
    env = gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point", max_episode_steps=LIMIT)
    return env, torch.from_numpy(env.reset(seed=seed)[0])


def greedy(scores: Networks) -> Act:
    """The action with the highest score."""
    return lambda observations: F.one_hot(scores(observations).argmax(-1), 2).float()


def sampled(scores: Networks) -> Act:
    """softmax(scores): a clone's own probabilities, and the policy of Psi-learning."""
    return lambda observations: scores(observations).softmax(-1)


def best_of(prior: Tensor, q: Tensor, draws: int) -> Tensor:
    """(..., A) probabilities of the action with the highest Q among `draws` of the prior (DBCQ), both (..., A).

    With the actions in the order of their Q and F(a) the prior's probability of a or anything below it: P(a) = F(a)^n - F(a-)^n.
    """
    order = q.argsort(-1)
    below = prior.gather(-1, order).cumsum(-1) ** draws
    return torch.zeros_like(below).scatter(-1, order, below.diff(dim=-1, prepend=torch.zeros_like(below[..., :1])))


def explore(seeds: int, *, seed: int) -> tuple[Transitions, Networks]:
    """The full buffer of each seed's online Q-learner and the learner as it was when it did best."""
    learner = Learner(Q_LEARNING, Networks(seeds))
    best, score, step = copy.deepcopy(learner.online), torch.full((seeds,), -1.0), 0

    def act(observations: Tensor) -> Tensor:
        with torch.no_grad():
            return _perturbed(greedy(learner.online)(observations[:, None])[:, 0].argmax(-1), max(0.02, 1 - step / 3000))

    def seen(logs: Transitions, sizes: Tensor) -> None:
        nonlocal step, score
        step += 1
        if step > 500:
            learner.update(logs, (torch.rand(seeds, 2 * SAMPLES) * sizes[:, None]).long(), progress=min(1.0, step / LENGTH))
        if step % 500 == 0:
            now = returns(greedy(learner.online), seeds, seed=seed + step)
            with torch.no_grad():
                for kept, current in zip(best.parameters(), learner.online.parameters(), strict=True):
                    kept[now > score] = current[now > score]
            score = torch.maximum(score, now)

    return record(act, seeds, LENGTH, seed=seed, seen=seen), best.eval()


def _perturbed(actions: Tensor, share: float) -> Tensor:
    return torch.where(torch.rand(len(actions)) < share, torch.randint(0, 2, actions.shape), actions)


def collect(seeds: int, *, seed: int = 0) -> Transitions:
    """The four buffers of every seed, in the order of BUFFERS: 4 x seeds logs."""
    full, expert = explore(seeds, seed=seed)

    def acting(share: float) -> Callable[[Tensor], Tensor]:
        return lambda observations: _perturbed(greedy(expert)(observations[:, None])[:, 0].argmax(-1), share)

    with torch.no_grad():
        clean, noisy = (record(acting(share), seeds, LENGTH, seed=seed + 1 + i) for i, share in enumerate((0.0, NOISE)))
    return Transitions.stack([full, full, clean, noisy])


def learn(method: Method, logs: Transitions, steps: int, *, prior: Networks | None = None, seed: int = 0) -> Networks:
    """One network per log. Every method starts from the same weights and sees the same transitions in the same order."""
    torch.manual_seed(seed)
    count, length = logs.actions.shape
    seeds, draws = count // len(BUFFERS), torch.Generator().manual_seed(seed)
    networks = Networks(count, dropout=DROPOUT if method.target_passes > 1 else 0.0)
    learner = Learner(method, networks, prior=prior)
    for step in range(steps):
        columns = torch.rand(count, SAMPLES, generator=draws)
        window = columns[seeds : 2 * seeds] * WINDOW + (length - WINDOW) * step / steps  # `concurrent`
        columns = torch.cat([columns[:seeds] * length, window, columns[2 * seeds :] * length]).long()
        learner.update(logs, columns, progress=step / steps)
    return networks.eval()


def experiment(seeds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """buffer -> policy -> the mean return of each seed; the policy "behaviour" is what wrote the buffer."""
    torch.manual_seed(0)
    logs = collect(seeds)
    prior = learn(BC(), logs, PRIOR_STEPS)
    q, q_lower, psi = (learn(method, logs, steps, prior=prior) for method in (Q_LEARNING, LOWER_Q_LEARNING, WOP))
    policies: dict[str, Act] = {
        "BC": sampled(prior),
        "BC, best action": greedy(prior),
        "Batch Q": greedy(q),
        "DBCQ": lambda observations: best_of(prior(observations).softmax(-1), q_lower(observations), DRAWS),
        "WOP": sampled(psi),
        "WOP, best action": greedy(psi),
    }
    found = {"behaviour": logs.mean_return()} | {name: returns(act, len(BUFFERS) * seeds, seed=10_000) for name, act in policies.items()}
    rows = {name: value.view(len(BUFFERS), seeds).tolist() for name, value in found.items()}
    return {buffer: {name: row[i] for name, row in rows.items()} for i, buffer in enumerate(BUFFERS)}


def paired_p(better: list[float], worse: list[float]) -> float:
    """One-sided exact sign-flip test over seeds: the share of the 2^K sign patterns of better - worse whose sum is at least the observed one."""
    gaps = np.asarray(better) - np.asarray(worse)
    signs = np.asarray(list(itertools.product((1, -1), repeat=len(gaps))))
    return float(np.mean(signs @ gaps >= gaps.sum() - 1e-9))


def interval(values: list[float]) -> Estimate:
    """The mean over seeds with its 95 % bootstrap interval; no interval where all seeds are equal."""
    return estimate([Measure.whole(value) for value in values])


def table(found: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Markdown: a row per policy, a column per buffer."""
    lines = ["| policy | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for name in next(iter(found.values())):
        cells = [interval(rows[name]) for rows in found.values()]
        shown = [f"{e.value:.0f}" if e.low is None else f"{e.value:.0f} [{e.low:.0f}, {e.high:.0f}]" for e in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def plot(found: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """A panel per buffer: each policy's mean with its 95 % interval, its seeds as dots, and the behaviour policy as a line."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True)
    for axes, (buffer, rows) in zip(panels, found.items(), strict=True):
        behaviour = interval(rows["behaviour"])
        axes.axhline(behaviour.value, color="#6b6b6b", linestyle="--", linewidth=1.2, label="behaviour policy")
        if behaviour.low is not None:
            axes.axhspan(behaviour.low, behaviour.high, color="#6b6b6b", alpha=0.15, linewidth=0)
        names = [name for name in rows if name != "behaviour"]
        for x, name in enumerate(names):
            value, colour = interval(rows[name]), "#b5468c" if name.startswith("WOP") else "#4269d0"
            face = "white" if name.endswith("best action") else colour
            axes.plot([x + 0.25] * len(rows[name]), rows[name], ".", color=colour, alpha=0.35, markersize=4)
            if value.low is not None:
                axes.plot([x, x], [value.low, value.high], color=colour, linewidth=2)
            axes.plot(x, value.value, "o", color=colour, markerfacecolor=face, markersize=6)
        axes.set_xticks(range(len(names)), names, rotation=55, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_title(buffer, loc="left", fontsize=10)
        axes.set_ylim(0, 1.04 * LIMIT)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean return (steps of 200)", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for cartpole.json and cartpole.svg")
    parser.add_argument("--seeds", type=int, default=10, help="independent learners, buffers and networks")
    parser.add_argument("--steps", type=int, default=8_000, help="updates of each Q method")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = experiment(args.seeds, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    summary = {"seeds": args.seeds, "steps": args.steps, "returns": found}
    (args.out / "cartpole.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    plot(found, args.out / "cartpole.svg")
    print(table(found))
    print(f"{args.seeds} seeds, {args.steps} steps, {time.perf_counter() - start:.0f} s; mean return and 95 % interval over seeds")


if __name__ == "__main__":
    main()
