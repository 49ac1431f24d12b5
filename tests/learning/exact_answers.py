"""What a method would answer in a game if it learned perfectly what the logs say: whole replies as actions,
the logs' own frequencies, values by iteration over the logged process.

    python -m tests.learning.exact_answers nim --noise 3      what the conservative term of ilql does to that
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np

from rl_dialog.data.schema import Dialog, read_jsonl
from rl_dialog.methods import DT, METHODS, Method, TFTop
from rl_dialog.methods.method import STRENGTH
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
    hold: Callable[[Choice, Choice], Choice] = lambda p, q: q,
) -> dict[str, Choice]:
    """act(p, Q) in every logged state, Q being that of V(s) = backup(p, Q) in the logged process, by value
    iteration. `hold`: what else moves Q."""
    value, policy = defaultdict(float), {}
    for _ in range(60):
        for state, replies in table.items():
            total = sum(map(len, replies.values()))
            p = {a: len(said) / total for a, said in replies.items()}
            q = {
                a: sum(r + gamma * (value[s] if s else 0.0) for r, s in said) / len(said)
                for a, said in replies.items()
            }
            q = hold(p, q)
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


def held(weight: float, support: float, unit: float = 1.0) -> Callable[[Choice, Choice], Choice]:
    """Q, in rewards, where the TD error and the conservative term of this weight are at rest: 2 p_a (Q_a -
    y_a) = w_a (p_a - softmax(Q)_a), Q in units of `unit`, by Newton's method. w_a falls to 0 from p_a =
    `support` to twice that."""

    def hold(p: Choice, q: Choice) -> Choice:
        share, target = np.array(list(p.values())), np.array([q[a] for a in p]) / unit
        weights, found = weight * (1 - (share / support - 1).clip(0, 1)), target.copy()
        for _ in range(50):
            soft = np.exp(found - found.max())
            soft /= soft.sum()
            slope = np.diag(2 * share) + weights[:, None] * (np.diag(soft) - np.outer(soft, soft))
            step = np.linalg.solve(slope, 2 * share * (found - target) - weights * (share - soft))
            found = found - step
            if abs(step).max() < 1e-9:
                break
        return dict(zip(p, unit * found, strict=True))

    return hold


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


def main() -> None:
    """The exact answer of ilql with its conservative term everywhere, as by default, and nowhere."""
    from tests.worlds.textarena_games import GAMES, write_logs

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("game", choices=sorted(GAMES))
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of what is added to each outcome")
    options = parser.parse_args()
    game, chance = GAMES[options.game], random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        write_logs(game, f"{folder}/logs.jsonl", 2500, 1)
        dialogs = list(read_jsonl(f"{folder}/logs.jsonl"))
    for dialog in dialogs:
        dialog.messages[dialog.replies[-1]]["reward"] += chance.gauss(0, options.noise)
    table, starts = table_of(dialogs)
    rewards = [np.array([dialog.messages[i]["reward"] for i in dialog.replies]) for dialog in dialogs]
    unit = float(np.std(np.concatenate([each[::-1].cumsum() for each in rewards])))
    strength = STRENGTH * math.sqrt(np.mean([n for each in rewards for n in range(1, len(each) + 1)]))
    for weight, support in ((0.3, 1.0), (0.3, 0.1), (0.0, 1.0)):
        lean, hold = tilted(strength / unit), held(weight, support, unit)
        answer = exact_policy(table, 0.99, expectile_at(0.7), lean, hold)
        greedy = {state: {max(choice, key=choice.get): 1.0} for state, choice in answer.items()}
        earned = return_in_logs(answer, table, starts)
        played, likeliest = (return_in_game(each, game, 2000) for each in (answer, greedy))
        about = f"in the logs {earned:.3f}, in the game {played:.3f}, greedy {likeliest:.3f}"
        print(f"cql_weight {weight}, cql_support {support}: {about}", flush=True)


if __name__ == "__main__":
    main()
