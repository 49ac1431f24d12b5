"""What can be done in the small-talk world: returns of its policies, logs, and a command line.

    python -m envs.small_talk
        the optimum and the return of every policy here
    python -m envs.small_talk --logs logs.jsonl --dialogs 2000 --seed 1
        chat logs of the mixed behaviour policy

The world itself is in `small_talk_world.py`, its rules in `small_talk_rules.py`, its policies and its optimum
in `small_talk_policies.py`, its words in `small_talk_texts.py`, its description in README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.small_talk_policies import (
    POLICIES,
    MixedPolicy,
    OptimalPolicy,
    belief_of,
    consequences,
    optimal_return,
)
from envs.small_talk_rules import TURNS
from envs.small_talk_texts import read_reply, read_user
from envs.small_talk_world import SmallTalk, SmallTalkVector, conversation_seed, play, returns
from rl_dialog.errors import UserError

if TYPE_CHECKING:
    from rl_dialog.data.schema import Dialog

__all__ = [
    "POLICIES",
    "TURNS",
    "SmallTalk",
    "SmallTalkVector",
    "expected_reward",
    "mean_interval",
    "optimal_return",
    "returns",
    "write_logs",
]


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half width of its 95 % interval (normal approximation)."""
    return float(values.mean()), float(1.96 * values.std(ddof=1) / np.sqrt(len(values)))


def expected_reward(dialog: Dialog) -> list[float]:
    """A Reward: what this world pays for each reply on average, given all that the text before it gives away.

    It asks neither a seed nor what the user answered, so it judges any reply to a conversation of this world:
    `--rewards.envs.small_talk:expected_reward 1`. Raises UserError for words of another world's user.
    """
    rewards = []
    for i in dialog.replies:
        before = [{"role": message["role"], "content": message["content"]} for message in dialog.messages[:i]]
        earlier = [message["content"] for message in before if message["role"] == "assistant"]
        topic = read_user(before[-1]["content"]).topic
        act = read_reply(dialog.messages[i]["content"], topic, earlier)
        rewards.append(consequences(belief_of(before), act)[0])
    return rewards


def write_logs(path: str | Path, *, dialogs: int, seed: int) -> dict[str, Any]:
    """Writes JSON lines of Dialogs spoken by `MixedPolicy`: `reward` on every reply, `feedback.vote` where
    the user voted, a rating in `meta`.

    `meta.seed` with the logged replies reproduces a dialog in `SmallTalk`. Returns counts and the mean
    return.
    """
    # here, because it brings pyarrow along, which the world does not need
    from rl_dialog.data.schema import Dialog, write_jsonl

    counts = dict.fromkeys(("dialogs", "replies", "votes"), 0)
    total: dict[str, Any] = {"path": str(path), "seed": seed, **counts, "mean_return": 0.0}

    def logged(index: int) -> Dialog:
        world, rewards, infos = play(MixedPolicy, seed=seed, index=index)
        for message, reward, info in zip(world.messages[1::2], rewards, infos, strict=True):
            message["reward"] = round(reward, 6)
            if "vote" in info:
                message["feedback"] = {"vote": info["vote"]}
        total["dialogs"] += 1
        total["replies"] += len(rewards)
        total["votes"] += sum("vote" in info for info in infos)
        total["mean_return"] += sum(rewards) / dialogs
        ratings = {"quality": 1 + infos[-1]["hidden"]["mood"]}
        meta = {"ratings": ratings, "seed": conversation_seed(seed, index)}
        about = {"source": "small_talk", "meta": meta}
        return Dialog(id=f"small_talk-{seed}-{index:06d}", messages=world.messages, **about)

    write_jsonl((logged(index) for index in range(dialogs)), path)
    return total


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of returns, or writes logs; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m envs.small_talk", description=main.__doc__)
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="PATH",
        help="write logs of the mixed policy here instead of printing the table",
    )
    parser.add_argument(
        "--dialogs",
        type=int,
        default=1000,
        help="conversations to write, or to average per policy (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.dialogs < 1 or options.seed < 0:
        parser.error(
            f"expected --dialogs of at least 1 and --seed of at least 0, got {options.dialogs} and "
            f"{options.seed}"
        )
    if options.logs:
        try:
            print(json.dumps(write_logs(options.logs, dialogs=options.dialogs, seed=options.seed)))
        except UserError as error:
            parser.error(str(error))
        return
    table = {f"optimum ({name})": (optimal_return(information=name), None) for name in ("full", "text")}
    print(
        f"{'policy':<30} return per conversation, 95 % interval of {options.dialogs} conversations, seed "
        f"{options.seed}"
    )
    table |= {
        name: mean_interval(returns(make, conversations=options.dialogs, seed=options.seed))
        for name, make in POLICIES.items()
    }
    for name, (mean, half) in table.items():
        print(f"{name:<30} {mean:6.2f}" + ("  by search" if half is None else f" +- {half:.2f}"))
    world, rewards, _ = play(OptimalPolicy, seed=options.seed, index=0)
    print(f"\nThe optimal policy, rewards {[round(reward, 2) for reward in rewards]}:")
    print("\n".join(f"{m['role']:>9}: {m['content']}" for m in world.messages), end="\n\n")
    print(json.dumps({name: round(mean, 4) for name, (mean, _) in table.items()}))


if __name__ == "__main__":
    main()
