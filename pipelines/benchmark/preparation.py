"""`benchmark prepare`: rewards over logs, against one straightforward pandas pass; memory; long dialogs."""

from __future__ import annotations

import csv
import random
import re
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipelines.benchmark.measuring import Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.cluster.data import connect, peak_kib
from rl_dialog.cluster.scored import Scored
from rl_dialog.cluster.scoring import Scoring, score_logs
from rl_dialog.data.readers import find_logs
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.rewards import REWARDS, apply_rewards, choose_rewards
from rl_dialog.rewards.phrases import CHEERFUL, COMPLIMENTS, POLITENESS, SUPPORTIVE
from rl_dialog.rewards.words import QUESTION_WORDS

PHRASES = {
    "compliments": COMPLIMENTS,
    "politeness": POLITENESS,
    "cheerful": CHEERFUL,
    "supportive": SUPPORTIVE,
}
# The rewards of the 2019 code that need no model.
MODEL_FREE = [
    "you",
    "answer_length",
    "answer_characters",
    "conversation_length",
    "vote",
    "question",
    "laughter",
    *PHRASES,
]
STARTED = 100  # conversations of a log that takes as long as starting does
COLUMNS = (
    "Chat ID",
    "Chatbot ID",
    "Datetime",
    "Message",
    "Response",
    "Response Rating",
    "Chat Rating Quality",
)


def measure(config: BenchmarkConfig) -> Result:
    """Conversations and their seconds from the CSV to saved columns, without the start; memory."""
    with tempfile.TemporaryDirectory() as folder:
        small, log, large = (Path(folder) / f"{name}.csv" for name in ("small", "log", "large"))
        write_export(small, STARTED, config.turns, seed=config.seed)
        write_export(log, config.conversations, config.turns, seed=config.seed)
        write_export(large, 10 * config.conversations, config.turns, seed=config.seed)
        with connect("local", num_cpus=config.threads):
            memory = {"driver before": peak_kib()}
            for name, path in (("", log), (" at ten times the log", large)):
                scored = _score(path, Path(folder) / f"memory{len(memory)}")
                memory |= {f"driver{name}": peak_kib(), f"worker{name}": scored.worker_kib}
            contenders = {
                "start-up": lambda: _score(small, Path(tempfile.mkdtemp(dir=folder))),
                "prepare": lambda: _score(log, Path(tempfile.mkdtemp(dir=folder))),
                "plain": lambda: pandas_pass(log, Path(folder) / "pandas.csv"),
            }
            seconds = take_turns(contenders, rounds=config.rounds, warmup=min(config.warmup, 1))
    started = seconds.pop("start-up")
    share = 1 - STARTED / config.conversations
    seconds["prepare"] = [
        (elapsed - start) / share for elapsed, start in zip(seconds["prepare"], started, strict=True)
    ]
    setting = f"{config.conversations} conversations of {config.turns} exchanges"
    setting += f", {len(MODEL_FREE)} rewards, {config.threads} CPUs"
    memory["start_up_seconds"] = sorted(started)[len(started) // 2]
    slow = long_dialogs(config)
    lines = "".join(f"\n  {case:<24} {_line(row)}" for case, row in slow.items())
    return speeds(config, {setting: (config.conversations, seconds)}, shown=lines, memory=memory, long=slow)


def _line(row: dict[str, float]) -> str:
    seconds = f"tokenise {row['tokenise']:>8.2f} s   score {row['score']:>8.2f} s"
    return f"{seconds}   peak memory {row['peak_mib']:>6} MiB"


def _score(path: Path, directory: Path) -> Scored:
    """Pass 1 of prepare: from the log to scored dialogs in Parquet files."""
    logs, _, _ = find_logs([str(path)])
    return score_logs(logs, Scoring(weights=dict.fromkeys(MODEL_FREE, 1.0)), directory)


def write_export(path: Path, conversations: int, turns: int, *, seed: int) -> None:
    """A neural.chat website export: exchanges of 3 to 15 random words a side, every third side with a phrase
    that a reward looks for.
    """
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    listed = [
        *(phrase for phrases in PHRASES.values() for phrase in phrases),
        *sorted(QUESTION_WORDS),
        "you",
        "haha",
    ]
    began = datetime(2019, 5, 1, tzinfo=UTC)

    def text() -> str:
        chosen_words = rng.choices(words, k=rng.randint(3, 15))
        if rng.random() < 1 / 3:
            chosen_words.insert(rng.randrange(len(chosen_words) + 1), rng.choice(listed))
        return " ".join(chosen_words) + rng.choice(".?!")

    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for chat in range(conversations):
            quality = rng.randint(1, 7)
            for turn in range(turns):
                moment = (began + timedelta(seconds=600 * chat + 10 * turn)).isoformat()
                writer.writerow(
                    [f"chat {chat}", "bot", moment, text(), text(), rng.choice(("", "1", "-1")), quality]
                )


def long_dialogs(config: BenchmarkConfig) -> dict[str, dict[str, float]]:
    """{one long dialog, or one with a long turn: processor seconds of tokenising and of all rewards, this
    process's peak memory so far}.
    """
    rng = random.Random(config.seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)] + [
        "but",
        "good",
        "not",
        "great",
        "why",
    ] * 50
    tokenizer = train_tokenizer([" ".join(words)] * 2, vocab_size=1000)
    rewards = choose_rewards(list(REWARDS))

    def text(characters: int) -> str:
        return " ".join(rng.choices(words, k=1 + characters // 4))[:characters]

    cases = {f"{count} exchanges": [text(40) for _ in range(2 * count)] for count in config.exchanges}
    cases |= {
        f"a turn of {size} bytes": [text(size), text(size), text(40), text(40)] for size in config.turn_bytes
    }
    figures = {}
    for name, turns in cases.items():
        dialog = Dialog(
            name, [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        )
        began = time.process_time()
        tokenize(dialog, tokenizer)
        between = time.process_time()
        apply_rewards(dialog, rewards, dict.fromkeys(rewards, 1.0))
        seconds = {"tokenise": round(between - began, 3), "score": round(time.process_time() - between, 3)}
        figures[name] = seconds | {"peak_mib": peak_kib() // 1024}
    return figures


def pandas_pass(log: Path, out: Path) -> None:
    """The eleven columns as one would write them down: apply over rows, groupby over chats, z-scores."""
    import pandas as pd

    table = pd.read_csv(log, keep_default_na=False).sort_values(["Chat ID", "Datetime"])
    for name, phrases in PHRASES.items():
        table[name] = table["Response"].apply(
            lambda text, phrases=phrases: float(any(phrase in text.lower() for phrase in phrases))
        )
    table["you"] = table["Response"].apply(lambda text: float("you" in re.findall(r"\w+", text.lower())))
    table["question"] = table["Response"].apply(
        lambda text: 0.5 * ("?" in text) + 0.5 * any(word in text.lower() for word in QUESTION_WORDS)
    )
    table["vote"] = pd.to_numeric(table["Response Rating"]).fillna(0)
    chats = []
    for _, chat in table.groupby("Chat ID", sort=False):
        answers = chat["Message"].shift(-1).fillna("")
        rewards = {
            "answer_length": answers.apply(lambda text: len(text.split())),
            "answer_characters": answers.apply(len),
            "laughter": answers.apply(lambda text: text.lower().count("ha")),
            "conversation_length": float(len(chat)),
        }
        chats.append(chat.assign(**rewards))
    scored = pd.concat(chats)
    columns = scored[MODEL_FREE].astype(float)
    scored[MODEL_FREE] = (columns - columns.mean()) / columns.std()
    scored["reward"] = scored[MODEL_FREE].sum(axis=1)
    scored.to_csv(out, index=False)
