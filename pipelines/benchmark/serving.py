"""`benchmark serve`: streamed replies to many clients over one request at a time, what HTTP and Ray Serve
cost over the bare engine, first tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from torch import nn

from pipelines.benchmark.measuring import Measured, Result, speeds, take_turns
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.cluster import serve
from rl_dialog.cluster.data import connect
from rl_dialog.data.tokenize import encode_prompt, train_tokenizer
from rl_dialog.evaluation.generation import Decoding, generate_replies
from rl_dialog.methods import ILQL
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.serving.batch import Ask
from rl_dialog.serving.engine import Engine, Piece

PORT = 18431
ONE, ENGINE, SERVED = "plain", "engine", "HTTP on Ray Serve"


def measure(config: BenchmarkConfig) -> Result:
    """Tokens of a round and its seconds for each number of clients, first tokens and the overhead.

    Everything runs before the clock does.
    """
    measured: Measured = {}
    first_tokens: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        load = Load(config, folder)
        engine = Engine(load.policy, load.tokenizer, slots=max(config.clients), kept=0)
        stack.callback(engine.close)
        stack.enter_context(connect("local", num_cpus=config.threads))
        settings = {
            "models": {"ilql": str(folder)},
            "store": f"sqlite:///{folder}/chats.db",
            "slots": max(config.clients),
            "kept": 0,
        }
        settings |= {
            "needs_key": False,
            "threads": config.threads,
            "most_tokens": 2 * config.new_tokens,
            "max_prompt_length": load.room,
        }
        serve.deploy(settings, host="127.0.0.1", port=PORT)
        stack.callback(serve.stop)
        for clients in config.clients:
            setting = f"{clients} client{'s' * (clients > 1)}"
            first_tokens[setting] = {ENGINE: [], SERVED: []}
            contenders: dict[str, Callable[[], None]] = {
                ONE: lambda n=clients: load.one_at_a_time(n),
                ENGINE: lambda n=clients, delays=first_tokens[setting][ENGINE]: delays.extend(
                    load.on_engine(engine, n)
                ),
                SERVED: lambda n=clients, delays=first_tokens[setting][SERVED]: delays.extend(
                    load.over_http(n)
                ),
            }
            seconds = take_turns(contenders, rounds=config.rounds, warmup=config.warmup)
            measured[setting] = load.tokens(clients), seconds
    overhead = {
        name: round(median(b / a for a, b in zip(times[ENGINE], times[SERVED], strict=True)) - 1, 3)
        for name, (_, times) in measured.items()
    }
    tokens = {
        name: {contender: round(1000 * median(delays), 1) for contender, delays in of.items()}
        for name, of in first_tokens.items()
    }
    return speeds(
        config, measured, serving={"http_and_serve_over_engine": overhead, "median_ms_to_first_token": tokens}
    )


class Load:
    """A random ilql policy, saved where a server finds it, and clients that send prompts of random words, one
    request after the other.

    Replies are of different length, half to one and a half times `new_tokens`, the same ones for every
    contender: were all of one length, all clients would wait for tokens together and send requests together,
    as they never do in use.
    """

    def __init__(self, config: BenchmarkConfig, folder: Path) -> None:
        self.config, self.rng, self.lock = config, np.random.default_rng(config.seed), threading.Lock()
        self.words = [
            "".join(self.rng.choice(list("abcdefghijklmnopqrstuvwxyz"), size=self.rng.integers(2, 9)))
            for _ in range(1000)
        ]
        self.tokenizer = train_tokenizer([" ".join(self.words)] * 3, vocab_size=config.vocabulary)
        self.room = 2 * config.prompt
        torch.manual_seed(config.seed)
        context = 2 * max(self.room, 2 * config.new_tokens)
        shape = {
            "layers": config.layers,
            "attention_heads": config.attention_heads,
            "width": config.width,
            "context": context,
        }
        model = ModelConfig(family="gpt2", **shape, heads="lowrank")
        self.policy = Policy(
            load_lm(model, _Larger(self.tokenizer, config.vocabulary)),
            ILQL(beta=config.beta, top_k=config.top_k),
            model,
        ).eval()
        for parameter in self.policy.heads.parameters():
            nn.init.normal_(parameter, std=0.02)  # new heads are zero and would steer nowhere
        self.policy.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def lengths(self, clients: int) -> list[list[int]]:
        """The tokens that each client asks for, request by request."""
        half = self.config.new_tokens // 2
        token_counts = np.random.default_rng([self.config.seed, clients]).integers(
            half, 3 * half, size=(clients, self.config.requests), endpoint=True
        )
        return token_counts.clip(1).tolist()

    def tokens(self, clients: int) -> int:
        """Of a round; nearly no reply ends early, the model being random."""
        return sum(map(sum, self.lengths(clients)))

    def decoding(self, length: int) -> Decoding:
        return Decoding(max_new_tokens=length, max_prompt_length=self.room)

    def talk(self) -> list[dict[str, str]]:
        """A prompt that nobody has sent before."""
        with self.lock:
            return [
                {"role": "user", "content": " ".join(self.rng.choice(self.words, size=self.config.prompt))}
            ]

    def one_at_a_time(self, clients: int) -> None:
        """The policy's own `generate`, as it runs without a server."""
        for n, length in enumerate(itertools.chain(*self.lengths(clients))):
            generate_replies(self.policy, self.tokenizer, [self.talk()], self.decoding(length), seeds=[n])

    def on_engine(self, engine: Engine, clients: int) -> list[float]:
        """The engine without HTTP, a thread per client; the seconds to each first text."""
        delays: list[float] = []
        failed: list[Exception] = []

        def client(lengths: list[int]) -> None:
            for n, length in enumerate(lengths):
                ended, began, arrivals = threading.Event(), time.perf_counter(), []

                def deliver(piece: Piece | Exception, arrivals=arrivals, ended=ended) -> None:
                    failed.extend([piece] if isinstance(piece, Exception) else [])
                    ends = isinstance(piece, Exception) or bool(piece.finish)
                    arrivals.extend([time.perf_counter()] if ends or piece.text else [])
                    if ends:
                        ended.set()

                engine.submit(
                    Ask(
                        encode_prompt(self.talk(), self.tokenizer, max_length=self.room),
                        self.decoding(length),
                        n,
                    ),
                    deliver,
                )
                if not ended.wait(300) or failed:
                    return
                delays.append(arrivals[0] - began)

        threads = [threading.Thread(target=client, args=(lengths,)) for lengths in self.lengths(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(delays) < clients * self.config.requests:
            expected = clients * self.config.requests
            raise RuntimeError(f"expected {expected} replies of the engine, got {len(delays)}: {failed[:1]}")
        return delays

    def over_http(self, clients: int) -> list[float]:
        """Streams from the server, a connection for each client; the seconds to each first token."""
        return list(itertools.chain(*asyncio.run(self._clients(clients))))

    async def _clients(self, clients: int) -> list[list[float]]:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=300, limits=limits) as http:
            return await asyncio.gather(*(self._client(http, lengths) for lengths in self.lengths(clients)))

    async def _client(self, http: httpx.AsyncClient, lengths: list[int]) -> list[float]:
        delays = []
        for n, length in enumerate(lengths):
            body = {"model": "ilql", "messages": self.talk(), "stream": True, "seed": n, "max_tokens": length}
            began, complete = time.perf_counter(), False
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if (
                        line.startswith("data: {")
                        and len(delays) == n
                        and json.loads(line[6:])["choices"][0]["delta"].get("content")
                    ):
                        delays.append(time.perf_counter() - began)
                    complete |= line == "data: [DONE]"
            if not complete:
                raise RuntimeError(f"expected a complete stream, request {n} ended before [DONE]")
            delays += [time.perf_counter() - began] * (len(delays) == n)  # a reply without text
        return delays


class _Larger:
    """The tokenizer's ids, and as many more as the vocabulary is to have."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.size = max(size, len(tokenizer))
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )

    def __len__(self) -> int:
        return self.size
