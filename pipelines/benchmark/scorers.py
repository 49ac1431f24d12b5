"""`benchmark scorers`: coherence by an encoder, batched, against one text at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from pipelines.benchmark.measuring import Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.readers import find_logs, read_log
from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import apply_rewards, choose_rewards
from rl_dialog.rewards.scorers import in_batches, make_scorers


def measure(config: BenchmarkConfig) -> Result:
    """Replies and the seconds of their coherence by the encoder at `config.encoder`, in one process."""
    logs, _, _ = find_logs([config.logs])
    dialogs = _first_dialogs(logs, config.conversations)
    replies = sum(len(dialog.replies) for dialog in dialogs)
    names = ["coherence", "answer_coherence"]

    def score(*, batched: bool) -> Callable[[], None]:
        def call() -> None:
            scorers = make_scorers([f"encoder={config.encoder}"])  # loaded anew: it remembers texts
            rewards = choose_rewards(names, scorers=scorers)
            for dialog in (
                in_batches(dialogs, list(rewards.values()), [scorers["encoder"]]) if batched else dialogs
            ):
                apply_rewards(dialog, rewards, dict.fromkeys(names, 1.0))

        return call

    contenders = {"plain": score(batched=False), "batched": score(batched=True)}
    seconds = take_turns(contenders, rounds=config.rounds, warmup=min(config.warmup, 1))
    setting = f"{', '.join(names)} over {len(dialogs)} dialogs, {replies} replies"
    return speeds(config, {setting: (replies, seconds)})


def _first_dialogs(logs: Any, count: int) -> list[Dialog]:
    dialogs = (item for log in logs for item in read_log(log) if isinstance(item, Dialog))
    return list(islice(dialogs, count))
