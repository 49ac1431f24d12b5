"""The programs people use, as they are: `transformers chat` in a terminal, the official client with streams
at once, and the bytes of a stream."""

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.methods import BC
from tests.serving.conftest import until

HELLO = {"role": "user", "content": "hello"}
FINE = {"role": "assistant", "content": "fine, thank you"}
AND_YOU = {"role": "user", "content": "and you?"}
EAT = {"role": "assistant", "content": "what would you like to eat?"}
ODD = {"role": "user", "content": "odd?"}
LINES = {
    "role": "assistant",
    "content": "one\u2028two\x85three\r\nfour 👍 \u00e9",
}  # what some take for the end of a line, and characters of several tokens


@pytest.fixture
def friend(make_policy, tokenizer, tmp_path):
    """A checkpoint that has learned by heart what to say."""
    policy = make_policy(BC())
    rows = []
    for context, reply in (([HELLO], FINE), ([HELLO, FINE, AND_YOU], EAT), ([ODD], LINES)):
        prompt = encode_prompt(context, tokenizer, max_length=96)
        rows.append(
            (
                len(prompt),
                torch.tensor(
                    [
                        [
                            *prompt,
                            *tokenizer.encode(reply["content"], add_special_tokens=False),
                            tokenizer.eos_token_id,
                        ]
                    ]
                ),
            )
        )
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(200):
        losses = [
            torch.nn.functional.cross_entropy(policy(ids).logits[0, start - 1 : -1].float(), ids[0, start:])
            for start, ids in rows
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        if max(losses) < 0.02:
            break
    policy.save_pretrained(tmp_path / "friend")
    tokenizer.save_pretrained(tmp_path / "friend")
    return str(tmp_path / "friend")


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command, environment):
        self.end, inner = pty.openpty()
        offline = {
            "TERM": "dumb",
            "HF_HUB_OFFLINE": "0",
        }  # offline, huggingface_hub refuses to talk even to this machine
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=os.environ | offline | environment,
            start_new_session=True,
        )
        os.close(inner)
        self.text = ""

    def read_until(self, words, *, times=1, seconds=240):
        """All that it wrote, once `words` are there so many times."""
        deadline = time.monotonic() + seconds
        while self.text.count(words) < times:
            assert time.monotonic() < deadline and self.process.poll() is None, (
                f"expected {words!r} {times} times, got {self.text}"
            )
            if select.select([self.end], [], [], 0.2)[0]:
                self.text += os.read(self.end, 65536).decode(errors="replace")
        return self.text

    def type(self, line):
        os.write(self.end, f"{line}\n".encode())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self.end)


@pytest.fixture
def terminal():
    opened = []

    def start(*command, environment):
        opened.append(Terminal(*command, environment=environment))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "with_key", [pytest.param(False, marks=pytest.mark.slow, id="open"), pytest.param(True, id="key")]
)
def test_transformers_chat(serve, friend, terminal, with_key):
    program = str(Path(sys.executable).parent / "transformers")
    with serve(models={"friend": friend}, max_tokens=40, needs_key=with_key) as (url, _, store):
        key = store.keys.add("ann") if with_key else ""
        command = [program, "chat", "friend", f"{url}/v1", "do_sample=False", "max_new_tokens=200"]
        chat = terminal(*command, "--user", "ann", environment={"HF_TOKEN": key} if with_key else {})
        assert "friend was already loaded" in chat.read_until("<ann>:")
        chat.type("hello")
        assert "fine, thank you" in chat.read_until("<ann>:", times=2)
        chat.type("and you?")
        assert "what would you like to eat?" in chat.read_until("<ann>:", times=3)
        chat.type("!exit")
        assert chat.process.wait(120) == 0
        (dialog,) = store.dialogs()
        assert [(message["role"], message["content"]) for message in dialog.messages] == [
            (m["role"], m["content"]) for m in (HELLO, FINE, AND_YOU, EAT)
        ]
        assert dialog.meta["settings"]["temperature"] == 0, "its generation_config counts"


@pytest.fixture
def slowed(monkeypatch):
    """slowed(engine): every step takes a while, and the twentieth, of thirty, is not made before somebody has
    gone."""

    def slow(engine):
        tickets, steps, submit = [], [], engine.submit

        def noted(*args):
            tickets.append(submit(*args))
            return tickets[-1]

        def slowly(*args, quickly=engine.policy.read, **kwargs):
            time.sleep(0.02)
            steps.append(1)
            if len(steps) == 20:
                until(lambda: any(each.cancelled for each in tickets), "the server to notice that one left")
            return quickly(*args, **kwargs)

        monkeypatch.setattr(engine, "submit", noted)
        monkeypatch.setattr(engine.policy, "read", slowly)

    return slow


def test_streams_at_once_of_which_one_is_cancelled(serve, slowed):
    asked = {"model": "ilql", "messages": [HELLO], "max_tokens": 30, "temperature": 2}

    async def read(client, seed, *, leave_after=None):
        said, chunks = "", 0
        async with await client.chat.completions.create(**asked, seed=seed, stream=True) as stream:
            async for chunk in stream:
                chunks += 1
                said += "".join(choice.delta.content or "" for choice in chunk.choices)
                if chunks == leave_after:
                    return None
        return said

    async def talk(url):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            wholes = [
                (await client.chat.completions.create(**asked, seed=seed)).choices[0] for seed in range(8)
            ]
            slowed(models.served["ilql"].engine)
            streamed = await asyncio.gather(
                *(read(client, seed, leave_after=3 if seed == 2 else None) for seed in range(8))
            )
            return [whole.message.content for whole in wholes], list(streamed)

    with serve() as (url, models, store):
        wholes, streamed = asyncio.run(talk(url))
        assert streamed == [None if seed == 2 else whole for seed, whole in enumerate(wholes)]
        engine = models.served["ilql"].engine
        until(lambda: not len(engine.batch) and not engine.depth(), "the engine to be idle")
        assert (engine.stats.cancelled, engine.stats.failed) == (1, 0)
        assert store.counts()["turns"] == 8 + 7, "the one that was left is not stored"


@pytest.mark.slow
def test_the_clients_own_way_to_collect_a_stream(serve, friend):
    """`chat.completions.stream` puts the chunks together; what comes out is the answer in one piece."""

    async def talk(url):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            asked = {
                "model": "friend",
                "messages": [ODD],
                "seed": 4,
                "n": 3,
                "logprobs": True,
                "top_logprobs": 2,
                "max_tokens": 60,
            }
            whole = await client.chat.completions.create(**asked)
            async with client.chat.completions.stream(
                **asked, stream_options={"include_usage": True}
            ) as stream:
                kinds = {event.type async for event in stream}
                return whole, await stream.get_final_completion(), kinds

    with serve(models={"friend": friend}) as (url, _, _):
        whole, collected, kinds = asyncio.run(talk(url))
        assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
        assert collected.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
            exclude={"prompt_tokens_details"}
        )
        for one, other in zip(whole.choices, collected.choices, strict=True):
            assert (one.index, one.message.content, one.message.role) == (
                other.index,
                other.message.content,
                other.message.role,
            )
            assert one.finish_reason == other.finish_reason
            assert [token.token for token in one.logprobs.content] == [
                token.token for token in other.logprobs.content
            ]
            for token in one.logprobs.content:
                assert token.bytes is None or bytes(token.bytes).decode() == token.token
        assert any(token.bytes is None for token in whole.choices[0].logprobs.content), (
            "a part of the thumb has no characters"
        )


def test_what_goes_wrong_in_a_stream_is_raised(serve, monkeypatch):
    with (
        serve() as (url, _, store),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        monkeypatch.setattr(store, "add_turns", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(openai.APIError, match="could not be stored"):
            list(client.chat.completions.create(model="bc", messages=[HELLO], stream=True))


@pytest.mark.slow
def test_the_bytes_of_a_stream(serve, friend):
    body = {
        "model": "friend",
        "messages": [ODD],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 60,
    }
    with (
        serve(models={"friend": friend}) as (url, _, _),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer,
    ):
        assert (
            answer.headers["content-type"].startswith("text/event-stream")
            and answer.headers["cache-control"] == "no-store"
        )
        sent = b"".join(answer.iter_raw())
    assert sent.isascii() and sent.endswith(b"\n\ndata: [DONE]\n\n")
    parts = sent.decode().split("\n\n")[:-2]
    assert all(part.startswith("data: ") and len(part.splitlines()) == 1 for part in parts), (
        "one line each, however a client splits them"
    )
    first, *middle, last, usage = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert len({event["id"] for event in (first, *middle, last, usage)}) == 1
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    assert (
        "".join(choice["delta"]["content"] for event in middle for choice in event["choices"])
        == LINES["content"]
    )
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert (
        usage["choices"] == []
        and usage["usage"]["total_tokens"]
        == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
    )
    assert all(event["usage"] is None for event in (first, *middle, last))
