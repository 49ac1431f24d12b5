"""What a method would answer in a game if it learned perfectly what the logs say: whole replies as actions,
the logs' own frequencies, values by iteration over the logged process."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np

from rl_dialog.data.schema import Dialog
from rl_dialog.methods import DT, METHODS, Method, TFTop
from tests.worlds.text_game import Game

Table = dict[
    str, dict[str, list[tuple[float, str | None]]]
]  # state -> reply -> (reward, next state) of each time it was said
Choice = dict[str, float]


def table_of(dialogs: list[Dialog]) -> tuple[Table, list[str]]:
    """The logged decision process and the states that dialogs begin in."""
    table: Table = defaultdict(lambda: defaultdict(list))
    starts = []
    for dialog in dialogs:
        states = [dialog.messages[i - 1]["content"] for i in dialog.replies]
        starts.append(states[0])
        for state, following, i in zip(states, [*states[1:], None], dialog.replies, strict=True):
            table[state][dialog.messages[i]["content"]].append((dialog.messages[i]["reward"], following))
    return table, starts


def exact_policy(
    table: Table,
    gamma: float,
    backup: Callable[[Choice, Choice], float],
    act: Callable[[Choice, Choice], Choice],
) -> dict[str, Choice]:
    """act(p, Q) in every logged state, Q being that of V(s) = backup(p, Q) in the logged process, by value
    iteration."""
    value, policy = defaultdict(float), {}
    for _ in range(60):
        for state, replies in table.items():
            total = sum(map(len, replies.values()))
            p = {a: len(said) / total for a, said in replies.items()}
            q = {
                a: sum(r + gamma * (value[s] if s else 0.0) for r, s in said) / len(said)
                for a, said in replies.items()
            }
            value[state], policy[state] = backup(p, q), act(p, q)
    return policy


def return_in_logs(policy: dict[str, Choice], table: Table, starts: list[str]) -> float:
    """What a policy earns if the logged process is the world: a draw that was lucky once is lucky always."""
    earned = defaultdict(float)
    for _ in range(60):
        for state, replies in table.items():
            earned[state] = sum(
                policy[state].get(a, 0.0) * sum(r + (earned[s] if s else 0.0) for r, s in said) / len(said)
                for a, said in replies.items()
            )
    return float(np.mean([earned[state] for state in starts]))


def return_in_game(policy: dict[str, Choice], game: type[Game], episodes: int = 1000) -> float:
    """What it earns in the game itself, with a random move in a state that the logs never had."""
    chance, total, world = random.Random(7), 0.0, game()
    for episode in range(episodes):
        messages, _ = world.reset(seed=episode)
        ended = False
        while not ended:
            moves = policy.get(messages[-1]["content"]) or dict.fromkeys(world.moves(world.state), 1.0)
            move = chance.choices(list(moves), list(moves.values()))[0]
            messages, reward, terminated, truncated, _ = world.step(move)
            total, ended = total + reward, terminated or truncated
    return total / episodes


def tilted(strength: float) -> Callable[[Choice, Choice], Choice]:
    def act(p: Choice, q: Choice) -> Choice:
        top = max(q.values())
        weight = {a: p[a] * math.exp(strength * (q[a] - top)) for a in p}
        return {a: w / sum(weight.values()) for a, w in weight.items()}

    return act


def mean(p: Choice, q: Choice) -> float:
    return sum(p[a] * q[a] for a in p)


def expectile_at(tau: float) -> Callable[[Choice, Choice], float]:
    def backup(p: Choice, q: Choice) -> float:
        low, high = min(q.values()), max(q.values())
        for _ in range(40):
            v = (low + high) / 2
            low, high = (
                (v, high)
                if sum(p[a] * (tau if q[a] > v else 1 - tau) * (q[a] - v) for a in p) > 0
                else (low, v)
            )
        return (low + high) / 2

    return backup


def soft_at(c: float) -> Callable[[Choice, Choice], float]:
    def backup(p: Choice, q: Choice) -> float:
        top = max(q.values())
        return top + c * math.log(sum(p[a] * math.exp((q[a] - top) / c) for a in p))

    return backup


def best_of(n: int) -> Callable[[Choice, Choice], Choice]:
    """The best of n replies drawn from p; replies of equal Q share their chance as p does."""

    def act(p: Choice, q: Choice) -> Choice:
        chosen, below = {}, 0.0
        for value in sorted(set(q.values())):
            tied = [a for a in q if q[a] == value]
            mass = sum(p[a] for a in tied)
            chosen |= {a: ((below + mass) ** n - below**n) * p[a] / mass for a in tied}
            below += mass
        return chosen

    return act


def weighted(tau: float, beta: float, clip: float) -> Callable[[Choice, Choice], Choice]:
    """What is cloned with the weights of awac."""

    def act(p: Choice, q: Choice) -> Choice:
        v = expectile_at(tau)(p, q)
        weight = {a: p[a] * math.exp(min(beta * (q[a] - v), math.log(clip))) for a in p}
        return {a: w / sum(weight.values()) for a, w in weight.items()}

    return act


def supported(threshold: float, p: Choice) -> Choice:
    """The replies that are nearly as frequent as the most frequent one (bcq asks that of each token)."""
    return {a: p[a] for a in p if p[a] >= threshold * max(p.values())}


def clone_of_the_best(method: TFTop | DT, dialogs: list[Dialog], table: Table) -> dict[str, Choice]:
    """The frequencies among the replies that tf_top keeps (by dialog; of equal ones at the border each in
    part) or that dt has in its best bin; those of all replies where a state has none of them."""
    earned = [np.array([dialog.messages[i]["reward"] for i in dialog.replies]) for dialog in dialogs]
    to_go = [rewards[::-1].cumsum()[::-1] for rewards in earned]
    if isinstance(method, TFTop):
        worth = np.concatenate([each[:1].repeat(len(each)) for each in to_go])
        most = max(1, int(method.fraction * len(worth)))
        border = np.sort(worth)[-most]
        at_the_border = (most - (worth > border).sum()) / (worth == border).sum()
        weights = (worth > border) + at_the_border * (worth == border)
    else:
        worth = np.concatenate(to_go)
        edge = np.quantile(worth, 1 - 1 / method.bins, method="higher")
        weights = worth >= max(edge, worth[worth > worth.min()].min())
    kept: dict[str, Choice] = defaultdict(lambda: defaultdict(float))
    said = ((dialog.messages[i - 1], dialog.messages[i]) for dialog in dialogs for i in dialog.replies)
    for (state, reply), weight in zip(said, weights, strict=True):
        kept[state["content"]][reply["content"]] += weight
    policy = {}
    for state, replies in table.items():
        choice = kept[state] if any(kept[state].values()) else {a: len(said) for a, said in replies.items()}
        policy[state] = {a: weight / sum(choice.values()) for a, weight in choice.items()}
    return policy


def exact_of(method: Method, unit: float, table: Table, dialogs: list[Dialog]) -> dict[str, Choice] | None:
    """The policy that the method would be if it learned perfectly what the logs say; None for a method that
    no such policy is known of (dpo, kto, chai, way_off_policy)."""
    strength = method.in_rewards(unit).get("beta") or 1 / method.in_rewards(unit).get("c", 1.0)
    match next(name for name, kind in METHODS.items() if type(method) is kind):
        case "tf_top" | "dt":
            return clone_of_the_best(method, dialogs, table)
        case "bc" | "tf_all":
            backup, act = mean, lambda p, q: p
        case "mc" | "sarsa":
            backup, act = mean, tilted(strength)
        case "ilql":
            backup, act = expectile_at(method.tau), tilted(strength)
        case "awac":
            beta, clip = method.awac_beta / unit, method.awac_clip
            backup, act = expectile_at(method.tau), weighted(method.tau, beta, clip)
        case "utterance_ilql":
            backup, act = expectile_at(method.tau), best_of(method.num_generations)
        case "cql":
            backup, act = (lambda p, q: max(q.values())), tilted(strength)
        case "bcq" | "dbcq" as name:
            likely = partial(supported, method.threshold)
            lean = tilted(strength) if name == "bcq" else best_of(method.samples)
            backup, act = (lambda p, q: max(q[a] for a in likely(p))), (lambda p, q: lean(likely(p), q))
        case "psi":
            backup, act = soft_at(1 / strength), tilted(strength)
        case "kl_control":
            backup, act = expectile_at(method.tau), tilted(strength / 2)
        case _:
            return None
    return exact_policy(table, getattr(method, "gamma", 1.0), backup, act)
