"""Shared fixtures: a tiny tokenizer, tiny policies with random heads, hand-made rows. Nothing here downloads
anything."""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read when torch is first imported; these models are too small to share between cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray's workers are as urgent as the tests that wait for them; its own 15 is behind all else on the machine.
os.environ.setdefault("RAY_worker_niceness", "0")
# How soon Ray Train notices that its workers have ended; its own 2 s are a good part of a run of two updates.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
# No test calls a server with a public certificate; each client of httpx would read 140 of them, in 15 ms.
os.environ.setdefault("SSL_CERT_DIR", os.path.dirname(__file__))

gc.disable()  # until all tests are collected

import httpx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# httpx waits 5 s for an answer, which a busy machine may take. How soon a server answers is no test's subject
# but of those that say a time.
for part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, 120.0)


def pytest_collection_modifyitems(items):
    """A slow test takes minutes on an idle machine: beside others it needs more than the ten that are enough
    for all tests, if it names no time of its own."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_collection_finish():
    """What torch, Ray and the tests themselves brought stays to the end: looking through it for garbage, over
    and over while it is imported, is a third of the time of collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state, alone or among others."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer of about 330 tokens with our chat template."""
    from rl_dialog.data.tokenize import train_tokenizer

    return train_tokenizer(
        ["hello there, how are you?", "what would you like to eat today?", "thank you, that is all"] * 20,
        vocab_size=330,
    )


@pytest.fixture
def make_row():
    """make_row(ids, [(first, last, reward), ...], truncated): a Row whose replies are the token spans
    first..last, ends included."""
    from rl_dialog.data.tokenize import Row

    def build(ids, replies, truncated=False):
        assistant = np.zeros(len(ids), bool)
        for first, last, _ in replies:
            assistant[first : last + 1] = True
        ends = np.asarray([last for _, last, _ in replies], np.int32)
        rewards = np.asarray([reward for *_, reward in replies], np.float32)
        return Row(np.asarray(ids, np.int32), assistant, ends, rewards, truncated)

    return build


@pytest.fixture(scope="session")
def make_policy(tokenizer):
    """make_policy(method, family, heads=..., trunk=..., target=..., ...): a two-layer policy in eval mode,
    its heads random, no two alike."""
    import torch

    from rl_dialog.models.language_model import ModelConfig, load_lm
    from rl_dialog.models.policy import Policy

    def build(
        method,
        family="gpt2",
        *,
        heads="mlp",
        trunk="shared",
        target="shared",
        peft=False,
        spread=0.3,
        dropout=0.0,
        seed=0,
    ):
        torch.manual_seed(seed)
        config = ModelConfig(
            family=family,
            layers=2,
            attention_heads=2,
            width=32,
            context=128,
            dropout=dropout,
            heads=heads,
            rank=4,
            value_trunk=trunk,
            target_trunk=target,
            use_peft=peft,
            lora_r=2,
        )
        lm = load_lm(config, tokenizer)
        with torch.no_grad():
            for (
                name,
                parameter,
            ) in lm.named_parameters():  # a new model is near uniform, or repeats its last token
                parameter.add_(
                    torch.randn_like(parameter) * (0.1 if "wte" in name or "embed_tokens" in name else 0.3)
                )
        policy = Policy(lm, method, config)
        with torch.no_grad():
            named = sorted(
                policy.named_parameters(), key=lambda each: each[0].startswith("target_trunk.")
            )  # last: what it adds is its own
            for name, parameter in named:
                if name.startswith(("heads.", "value_trunk.", "target_trunk.")) or "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * spread)
        return policy.eval()

    return build


@pytest.fixture(scope="session")
def shared_checkpoints(make_policy, tokenizer, tmp_path_factory):
    """{"bc": folder, "ilql": folder}: tiny checkpoints that no test changes."""
    from rl_dialog.methods import BC, ILQL

    root, folders = tmp_path_factory.mktemp("checkpoints"), {}
    for name, method in (("bc", BC()), ("ilql", ILQL())):
        folders[name] = str(root / name)
        make_policy(method).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture
def checkpoints(shared_checkpoints, tmp_path):
    """{"bc": folder, "ilql": folder}: a test's own copies of the tiny checkpoints."""
    return {
        name: str(shutil.copytree(folder, tmp_path / name)) for name, folder in shared_checkpoints.items()
    }


@pytest.fixture(scope="session")
def postgres_server():
    """A PostgreSQL server of our own: its programs, and the folder of its socket. Skips where there is no
    PostgreSQL."""
    programs = _postgres_programs()
    if not programs:
        pytest.skip("no PostgreSQL server here (apt-get install postgresql)")
    folder = Path(
        tempfile.mkdtemp(prefix="pg-", dir="/tmp")
    )  # a socket's path is short, and the server's user must get in
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []  # it refuses to run as root
    if as_user:
        shutil.chown(folder, "postgres", "postgres")

    def command(*words):
        subprocess.run(
            [*as_user, *words],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            timeout=60,
        )

    data, control = str(folder / "data"), str(programs / "pg_ctl")
    settings = (
        f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off -c max_connections=50"
    )
    try:
        command(
            str(programs / "initdb"),
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        )
        command(control, "-D", data, "-l", str(folder / "log"), "-w", "-t", "30", "-o", settings, "start")
        yield programs, folder
        command(control, "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _postgres_programs():
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = shutil.which("initdb") or (debian and debian[-1])
    return Path(found).resolve().parent if found else None


@pytest.fixture
def postgres_url(postgres_server):
    """The URL of an empty database, the same one for every test (each new one is 7 MB in 300 files), unless a
    test has dropped it."""
    import psycopg

    _, folder = postgres_server
    with psycopg.connect(f"postgresql://postgres@/postgres?host={folder}", autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_database WHERE datname = 'test_all'").fetchone():
            connection.execute("CREATE DATABASE test_all")
    url = f"postgresql://postgres:hunter2@/test_all?host={folder}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND "
            "pid != pg_backend_pid()"
        )
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])])
def store_url(request, tmp_path):
    """An empty database of each kind that a store can be in."""
    return (
        f"sqlite:///{tmp_path}/chats.db"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_url")
    )
