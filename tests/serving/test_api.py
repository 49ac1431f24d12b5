"""The routes as clients use them: the official client, errors in OpenAI's form, keys, limits, and what
reaches the store."""

import json
import threading
import time
from dataclasses import replace

import httpx
import openai
import pytest

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.evaluation.generation import Decoding, generate_replies
from rl_dialog.serving.limits import RateLimit
from tests.serving.conftest import until

TALK = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def client_of():
    clients = []

    def make(url, key="none", **options):
        options |= {"max_retries": 0, "timeout": 120}
        clients.append(openai.OpenAI(base_url=f"{url}/v1", api_key=key, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def alone(models, name, messages, seed, **decoding):
    """What the model says without a server."""
    served = models.served[name]
    settings = Decoding(max_new_tokens=12, max_prompt_length=96, **decoding)
    (reply,) = generate_replies(served.engine.policy, served.tokenizer, [messages], settings, seeds=[seed])
    return replace(reply, text=reply.text.replace("\0", "\ufffd"))


@pytest.mark.parametrize("concurrency", [1, 16, 64])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_openai_client_gets_what_the_policy_says(serve, client_of, concurrency, stream):
    with serve() as (url, models, store):
        client, found, failed = client_of(url), {}, []

        def talk(n):
            try:
                asked = {"model": "ilql", "messages": TALK, "seed": n, "temperature": 0.8}
                if not stream:
                    answer = client.chat.completions.create(**asked)
                    found[n] = (
                        answer.choices[0].message.content,
                        answer.choices[0].finish_reason,
                        answer.usage,
                    )
                    return
                chunks = list(
                    client.chat.completions.create(
                        **asked, stream=True, stream_options={"include_usage": True}
                    )
                )
                said = [chunk.choices[0] for chunk in chunks if chunk.choices]
                ends = [choice.finish_reason for choice in said if choice.finish_reason]
                assert said[0].delta.role == "assistant" and len(ends) == 1 and said[-1].finish_reason
                assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {
                    "chat.completion.chunk"
                }
                assert chunks[-1].usage and not chunks[-1].choices
                found[n] = "".join(choice.delta.content or "" for choice in said), ends[0], chunks[-1].usage
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=talk, args=(n,)) for n in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not failed
        for n, (text, finish, usage) in found.items():
            reply = alone(models, "ilql", TALK, n, temperature=0.8)
            assert (text, finish) == (reply.text, "stop" if reply.finished else "length")
            assert usage.prompt_tokens == len(
                encode_prompt(TALK, models.served["ilql"].tokenizer, max_length=96)
            )
            assert usage.completion_tokens == len(reply.tokens)
        assert len(found) == concurrency == store.counts()["turns"]


def test_every_field_of_openais_that_we_have(serve, client_of):
    with serve() as (url, models, _):
        client = client_of(url)

        def ask(**fields):
            return client.chat.completions.create(**{"model": "ilql", "messages": TALK, "seed": 3} | fields)

        greedy = [ask(temperature=0, seed=seed).choices[0].message.content for seed in (1, 2)]
        assert greedy == [alone(models, "ilql", TALK, 0, do_sample=False).text] * 2, (
            "temperature 0 is greedy, whatever the seed"
        )
        several = ask(n=3, temperature=2)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in several.choices}) == 3
        assert several.choices[0].message.content == ask(temperature=2).choices[0].message.content, (
            "the first choice draws as a single one"
        )
        assert several.usage.completion_tokens > 12, "those of all choices"
        assert ask(max_tokens=2).choices[0].finish_reason == "length"
        assert ask(max_completion_tokens=2).usage.completion_tokens == 2
        told = ask(logprobs=True, top_logprobs=4).choices[0].logprobs.content
        assert all(
            len(token.top_logprobs) == 4 and token.logprob <= token.top_logprobs[0].logprob for token in told
        )
        whole = ask(temperature=0.5).choices[0].message.content
        stop = whole[3:5]
        assert (
            ask(temperature=0.5, stop=stop).choices[0].message.content == whole[: whole.index(stop)].strip()
        )
        assert ask(top_p=0.2).choices[0].message.content == alone(models, "ilql", TALK, 3, top_p=0.2).text
        parts = [
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}],
            },
        ]
        plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello you"}]
        assert (
            ask(messages=parts).choices[0].message.content == ask(messages=plain).choices[0].message.content
        )
        assert [model.id for model in client.models.list()] == ["bc", "ilql", "assigned"]
        assert client.models.retrieve("bc").method == "bc"


def test_what_clients_send_by_habit(serve, client_of):
    """Penalties and biases are honoured, the rest is taken and said to be unused."""
    with serve() as (url, models, _):
        client = client_of(url)

        def ask(**fields):
            return client.chat.completions.create(**{"model": "bc", "messages": TALK, "seed": 3} | fields)

        a, b = (str(*models.served["bc"].tokenizer.encode(text)) for text in "ab")
        likely = {a: 100, b: -100}, {a: -100, b: 100}
        said = [ask(temperature=0, logit_bias=bias, max_tokens=4) for bias in likely]
        assert [answer.choices[0].message.content for answer in said] == ["aaaa", "bbbb"]
        greedy = {"temperature": 0, "logit_bias": {a: 50, b: 50}, "max_tokens": 40}
        plain = ask(**greedy).choices[0].message.content
        for name in ("frequency_penalty", "presence_penalty"):
            assert ask(**greedy, **{name: 2.0}).choices[0].message.content != plain, name
        assert "unused" not in ask().model_extra
        habit = {"parallel_tool_calls": False, "reasoning_effort": "low", "verbosity": "low"}
        answer = ask(**habit, service_tier="auto", frequency_penalty=0, logit_bias={}, tool_choice="none")
        assert answer.model_extra["unused"] == [
            "parallel_tool_calls",
            "reasoning_effort",
            "service_tier",
            "verbosity",
        ]
        chunks = list(ask(reasoning_effort="low", stream=True))
        assert all(chunk.model_extra["unused"] == ["reasoning_effort"] for chunk in chunks)


def test_our_own_fields(serve, client_of):
    with serve() as (url, models, _):
        client = client_of(url)

        def ask(model="ilql", **body):
            return client.chat.completions.create(
                model=model, messages=TALK, seed=5, extra_body=body
            ).choices[0]

        values = ask(return_values=True)
        said = "".join(token["token"] for token in values.values["content"]).strip()
        assert said.rstrip("\ufffd") == values.message.content.rstrip("\ufffd"), (
            "bytes at the end that never became a character are no token's"
        )
        assert all(
            token["advantage"] == pytest.approx(token["q"] - token["v"]) for token in values.values["content"]
        )
        assert ask("bc", return_values=True).values["content"][0]["q"] is None, "a cloned model has no values"
        said = {
            ask().message.content,
            ask(beta=0.0).message.content,
            ask(beta=40.0).message.content,
            ask(top_k=1).message.content,
        }
        assert len(said) == 4
        assert ask(decoder="lm").message.content == ask(beta=0.0).message.content, (
            "without advantage the policy is its language model"
        )
        assert (
            ask(num_generations=4).message.content == alone(models, "ilql", TALK, 5, num_generations=4).text
        )
        with pytest.raises(openai.BadRequestError, match="BC, which has no beta"):
            ask("bc", beta=1.0)
        chunks = client.chat.completions.create(
            model="ilql", messages=TALK, seed=5, stream=True, extra_body={"return_values": True}
        )
        streamed = [
            token
            for chunk in chunks
            for choice in chunk.choices
            for token in getattr(choice, "values", {"content": []})["content"]
        ]
        assert [token["token"] for token in streamed] == [
            token["token"] for token in values.values["content"]
        ]


def test_turns_of_a_chat_become_one_dialog_with_its_votes(serve, client_of):
    with serve() as (url, _, store):
        client, talk = client_of(url), list(TALK)
        for turn in range(3):
            answer = client.chat.completions.create(model="bc", messages=talk, user="ann", seed=turn)
            talk += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": f"and {turn}?"},
            ]
            vote = httpx.post(f"{url}/v1/feedback", json={"completion_id": answer.id, "vote": (turn % 3) - 1})
            assert vote.status_code == 200
        httpx.post(
            f"{url}/v1/chats/{answer.chat_id}/ratings", json={"quality": 6, "comments": "nice"}
        ).raise_for_status()
        (dialog,) = store.dialogs()
        assert [(message["role"], message["content"]) for message in dialog.messages] == [
            (m["role"], m["content"]) for m in talk[:-1]
        ]
        assert [
            message["feedback"]["vote"] for message in dialog.messages if message["role"] == "assistant"
        ] == [-1, 0, 1]
        assert (dialog.id, dialog.meta["user"], dialog.meta["ratings"]) == (
            answer.chat_id,
            "ann",
            {"quality": 6},
        )
        assert httpx.delete(f"{url}/v1/users/ann").json() == {"deleted": 3}, "each request named no chat"
        assert list(store.dialogs()) == []


def test_a_chat_is_known_by_its_id_or_a_completion_and_never_by_its_text(serve, client_of):
    """Two callers with one key, no user, temperature 0: their first exchanges are equal."""
    with serve() as (url, _, store):
        client = client_of(url)

        def ask(messages, **known):
            return client.chat.completions.create(
                model="bc", messages=messages, temperature=0, extra_body=known
            )

        hers, his = ask(TALK), ask(TALK)
        said = {"role": "assistant", "content": hers.choices[0].message.content}
        secret = [*TALK, said, {"role": "user", "content": "my secret is 4711"}]
        assert hers.choices[0].message.content == his.choices[0].message.content
        answers = [ask(secret), ask(secret, chat_id=hers.chat_id), ask(secret, completion_id=hers.id)]
        assert [answer.chat_id == hers.chat_id for answer in answers] == [False, True, True]
        seen = {chat: httpx.get(f"{url}/v1/chats/{chat}").text for chat in (hers.chat_id, his.chat_id)}
        assert "4711" in seen[hers.chat_id] and "4711" not in seen[his.chat_id]
        assert len({hers.chat_id, his.chat_id, answers[0].chat_id}) == 3 == store.counts()["chats"]
        with pytest.raises(openai.NotFoundError, match="no chat 'chatcmpl-none'"):
            ask(secret, completion_id="chatcmpl-none")
        with pytest.raises(openai.NotFoundError, match="and this user"):
            ask(secret, chat_id=hers.chat_id, user="somebody else")
        with pytest.raises(openai.BadRequestError, match="in place of chat_id"):
            ask(secret, chat_id=hers.chat_id, completion_id=hers.id)


def test_the_pages_routes(serve):
    with (
        serve(split={"bc": 0.0, "ilql": 1.0}) as (url, _, store),
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        told = http.get("/page.json").json()
        assert (told["bots"], told["needs_key"]) == (1, False)
        chat = http.post("/v1/chats", json={"user": "u1", "consent": "yes, I agree"}).json()
        assert (chat["model"], chat["has_values"]) == ("assigned", True)
        answer = http.post(
            "/v1/chat/completions",
            json={"model": "assigned", "chat_id": chat["id"], "messages": TALK, "user": "u1"},
        ).json()
        assert (answer["model"], answer["chat_id"]) == ("assigned", chat["id"])
        assert (
            http.post(
                "/v1/feedback", json={"completion_id": answer["id"], "vote": 1, "edit": "Hello!"}
            ).status_code
            == 200
        )
        again = http.get(f"/v1/chats/{chat['id']}").json()
        assert again["messages"][1] == {
            "role": "assistant",
            "content": answer["choices"][0]["message"]["content"],
        } | {
            "completion_id": answer["id"],
            "index": 0,
            "vote": 1,
            "edit": "Hello!",
        }
        assert "ilql" not in json.dumps(again), "the bots are anonymous"
        assert store.chat(chat["id"])["model"] == "ilql"
        assert http.get("/v1/chats/chat-nobody").status_code == 404
        assert (
            http.post("/v1/feedback", json={"completion_id": "chatcmpl-none", "vote": 1}).status_code == 404
        )


@pytest.mark.parametrize(
    "body, status, words",
    [
        (
            {"model": "nobody", "messages": TALK},
            404,
            "'nobody' does not exist; expected one of 'bc', 'ilql', 'assigned'",
        ),
        ({"model": "bc"}, 400, "messages: Field required"),
        ({"model": "bc", "messages": []}, 400, "messages"),
        (
            {"model": "bc", "messages": TALK, "temprature": 1},
            400,
            "unknown field temprature; did you mean temperature?",
        ),
        ({"model": "bc", "messages": TALK, "temperature": "hot"}, 400, "temperature"),
        ({"model": "bc", "messages": TALK, "temperature": 1e-9}, 400, "at least 0.01"),
        ({"model": "bc", "messages": TALK, "top_p": 2}, 400, "top_p"),
        ({"model": "bc", "messages": TALK, "max_tokens": 128}, 400, "at most 127, got 128"),
        ({"model": "bc", "messages": TALK, "n": 99}, 400, "n: "),
        (
            {"model": "bc", "messages": TALK, "stop": list("abcde")},
            400,
            "stop: expected at most 4 texts, got 5",
        ),
        ({"model": "bc", "messages": TALK, "stop": 5}, 400, "stop: expected a text or a list of them"),
        ({"model": "bc", "messages": TALK, "stop": ["a", ""]}, 400, "stop.1: "),
        (
            {"model": "bc", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            'messages.0.content: expected parts {"type": "text", "text": ...}, got \'image_url\'',
        ),
        (
            {"model": "bc", "messages": [{"role": "user", "content": 5}]},
            400,
            "messages.0.content: expected a",
        ),
        (
            {"model": "bc", "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "0.text: Field",
        ),
        (
            {"model": "bc", "messages": TALK, "logit_bias": {"x": 1}},
            400,
            "logit_bias: expected ids of tokens",
        ),
        ({"model": "bc", "messages": TALK, "logit_bias": {"99999": 1}}, 400, "logit_bias: expected ids"),
        ({"model": "bc", "messages": TALK, "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias: expected ids"),
        ({"model": "bc", "messages": TALK, "presence_penalty": 3}, 400, "presence_penalty: "),
        ({"model": "bc", "messages": TALK, "tools": [{}]}, 400, "tools is not supported"),
        ({"model": "bc", "messages": TALK, "response_format": {"type": "json_object"}}, 400, "only text"),
        ({"model": "bc", "messages": [{"role": "user", "content": "long " * 400}]}, 400, "at most 96 tokens"),
        ({"model": "bc", "messages": [{"role": "user", "content": "a\0b"}]}, 400, "NUL"),
        ({"model": "bc", "messages": [{"role": "wizard", "content": "a"}]}, 400, "role"),
        ({"model": "bc", "messages": TALK, "chat_id": "chat-none"}, 404, "no chat 'chat-none'"),
        ({"model": "assigned", "messages": TALK, "beta": 1.0}, 400, "beta: models are compared"),
        ({"model": "assigned", "messages": TALK, "return_values": True}, 400, "return_values: models are"),
        ({"model": "bc", "messages": TALK, "generation_config": "{"}, 400, "JSON object"),
        ({"model": "ilql", "messages": TALK, "beta": float("1e308")}, 400, "beta"),
        (
            {"model": "bc", "messages": TALK, "num_generations": 4, "temperature": 0},
            400,
            "num_generations 4: expected sampling, to draw several different replies (do_sample true, in a "
            "request a temperature above 0), got",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_say_what_is_wrong(one_server, body, status, words, stream):
    url, _, store = one_server
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        content=json.dumps(body | {"stream": stream}),
        headers={"Content-Type": "application/json"},
    )
    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert words in error["message"]
    assert store.counts()["turns"] == 0


def test_broken_bodies(serve):
    with serve(max_body_bytes=1000) as (url, _, _):
        for content, status in (
            (b"{", 400),
            (b"\xff\xfe", 400),
            (b"[" * 900, 400),
            (b"x" * 1001, 413),
            (b'{"messages": [{"role": "user", "content": "\\ud800"}], "model": "bc"}', 400),
        ):
            answer = httpx.post(
                f"{url}/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
            )
            assert (answer.status_code, "message" in answer.json()["error"]) == (status, True), content[:20]

        def chunks():
            for _ in range(50):
                yield b"x" * 100

        assert httpx.post(f"{url}/v1/chat/completions", content=chunks()).status_code == 413, (
            "without a Content-Length too"
        )
        content = json.dumps({"model": "bc", "messages": TALK}).encode()
        for headers in ({}, {"Content-Type": "text/plain"}):
            told = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers).json()["error"]
            assert "with the header Content-Type: application/json" in told["message"]
        for content, words in (
            (b'{"user": "\xff"}', "UTF-8 that can be read: 'utf-8' codec"),
            (b"[" * 900, "JSON"),
        ):
            told = httpx.post(
                f"{url}/v1/chats", content=content, headers={"Content-Type": "application/json"}
            )
            assert words in told.json()["error"]["message"]
        told = httpx.post(f"{url}/v1/feedback", json={"completion_id": "c", "vote": 1, "comment": "x"}).json()
        assert told["error"]["message"] == "unknown field comment", "ratings have comments, feedback has none"
        told = httpx.post(f"{url}/v1/chats", json=[1]).json()["error"]["message"]
        assert told == "expected a JSON object as the body, got list"
        assert httpx.get(f"{url}/v1/nowhere").json()["error"]["message"] == "Not Found"
        assert httpx.get(f"{url}/v1/chat/completions").status_code == 405


def test_nobody_without_a_key_gets_in(serve, client_of):
    with serve(needs_key=True) as (url, _, store):
        key = store.keys.add("ann", requests_per_minute=1000)
        other = store.keys.add("bob", requests_per_minute=1000)
        for method, path in (
            ("GET", "/v1/models"), ("GET", "/v1/models/bc"), ("POST", "/v1/chat/completions"),
            ("POST", "/v1/chats"), ("GET", "/v1/chats/x"), ("POST", "/v1/chats/x/ratings"),
            ("POST", "/v1/feedback"), ("DELETE", "/v1/users/x"), ("GET", "/metrics"),
        ):  # fmt: skip
            for headers in (
                {},
                {"Authorization": "Bearer sk-rl-wrong"},
                {"Authorization": key},
                {"Authorization": f"Basic {key}"},
            ):
                answer = httpx.request(method, url + path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), (
                    method,
                    path,
                    headers,
                )
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/page.json").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            client_of(url, "sk-rl-wrong").models.list()
        answer = client_of(url, key).chat.completions.create(model="bc", messages=TALK, user="u")
        hers, his = ({"Authorization": f"Bearer {each}"} for each in (key, other))
        assert httpx.get(f"{url}/v1/chats/{answer.chat_id}", headers=hers).status_code == 200
        assert httpx.get(f"{url}/v1/chats/{answer.chat_id}", headers=his).status_code == 404, "not bob's"
        assert (
            httpx.post(
                f"{url}/v1/feedback", json={"completion_id": answer.id, "vote": -1}, headers=his
            ).status_code
            == 404
        )
        store.keys.revoke("ann")
        with pytest.raises(openai.AuthenticationError):
            client_of(url, key).models.list()


def test_a_key_has_its_rate(serve, client_of, monkeypatch):
    """By a clock that stands: nothing flows back while the requests are on their way."""
    monkeypatch.setattr("rl_dialog.serving.api.RateLimit", lambda: RateLimit(lambda: 0.0))
    with serve(needs_key=True) as (url, _, store):
        slow, fast = (
            store.keys.add("slow", requests_per_minute=3),
            store.keys.add("fast", requests_per_minute=1000),
        )
        client = client_of(url, slow)
        for _ in range(3):
            client.models.list()
        with pytest.raises(openai.RateLimitError) as caught:
            client.models.list()
        assert int(caught.value.response.headers["retry-after"]) == 20
        client_of(url, fast).models.list()


def test_a_full_queue_is_429_with_retry_after(serve, client_of, monkeypatch):
    with serve(slots=1, queue=1) as (url, models, store):
        answers, policy = [], models.served["ilql"].engine.policy
        full = threading.Event()

        def held(*args, quickly=policy.read, **kwargs):
            """Nobody is answered before somebody was refused."""
            full.wait(120)
            return quickly(*args, **kwargs)

        monkeypatch.setattr(policy, "read", held)

        def ask():
            answers.append(
                httpx.post(
                    f"{url}/v1/chat/completions",
                    json={"model": "ilql", "messages": TALK, "max_tokens": 60},
                    timeout=300,
                )
            )
            if answers[-1].status_code == 429:
                full.set()

        threads = [threading.Thread(target=ask) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        by_status = {
            status: [a for a in answers if a.status_code == status]
            for status in {a.status_code for a in answers}
        }
        assert set(by_status) == {200, 429} and len(answers) == 24
        assert all(
            int(a.headers["retry-after"]) >= 1 and a.json()["error"]["code"] == "queue_full"
            for a in by_status[429]
        )
        assert store.counts()["turns"] == len(by_status[200])


def idle(models):
    """Waits until no engine has work."""
    engines = [model.engine for model in models.served.values()]
    until(lambda: not any(len(each.batch) or each.depth() for each in engines), "the engines to be idle")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_clients_that_vanish_free_their_slots(serve, stream, monkeypatch):
    with serve(slots=2) as (url, models, store):
        engine, tickets, reads = models.served["ilql"].engine, [], []
        real, submit = engine.policy.read, engine.submit

        def noted(*args):
            tickets.append(submit(*args))
            reads.clear()
            return tickets[-1]

        def slowly(*args, **kwargs):
            """The reply does not get beyond its twentieth token before the server knows that nobody waits."""
            reads.append(1)
            time.sleep(0.05)
            if len(reads) > 20:
                until(lambda: tickets[-1].cancelled, "the server to notice that its client has gone")
            return real(*args, **kwargs)

        monkeypatch.setattr(engine, "submit", noted)
        monkeypatch.setattr(engine.policy, "read", slowly)
        body = {"model": "ilql", "messages": TALK, "max_tokens": 60, "stream": stream, "seed": 1}
        patience = httpx.Timeout(120, read=120 if stream else 1)
        for gone in (1, 2, 3):
            with (
                pytest.raises(httpx.TimeoutException),
                httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=patience) as answer,
            ):
                heard = b""
                for piece in answer.iter_raw():
                    heard += piece
                    if heard.count(b"data: ") > 2:
                        raise httpx.ReadTimeout("enough")
            until(lambda n=gone: engine.stats.cancelled == n, "the engine to forget a request")
        idle(models)
        assert engine.stats.cancelled == 3
        assert store.counts()["turns"] == 0, "a reply that nobody got is no reply"


def test_a_reply_is_stored_before_it_is_complete(serve, monkeypatch):
    with serve() as (url, _, store):
        body = {"model": "bc", "messages": TALK, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["finish_reason"]:
                    assert store.counts()["turns"] == 1
        monkeypatch.setattr(store, "add_turns", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        lost = httpx.post(f"{url}/v1/chat/completions", json=body | {"stream": False}, timeout=120)
        assert (lost.status_code, lost.json()["error"]["type"]) == (500, "server_error")
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
            text = "".join(answer.iter_text())
        assert "[DONE]" not in text and '"finish_reason": "' not in text and '"server_error"' in text


def test_an_empty_reply_has_no_tokens_to_tell_of(serve):
    with serve() as (url, models, store):
        end = models.served["ilql"].tokenizer.eos_token_id
        asked = {"logprobs": True, "return_values": True, "logit_bias": {str(end): 100}}
        body = {"model": "ilql", "messages": TALK} | asked
        (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
        assert choice["logprobs"]["content"] == choice["values"]["content"] == []


def test_store_false_leaves_nothing_behind(serve):
    with serve() as (url, _, store):
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "bc", "messages": TALK, "seed": 3, "store": False},
            timeout=120,
        ).json()
        assert answer["choices"][0]["message"]["content"] and answer["chat_id"] is None
        assert store.counts() == {"chats": 0, "turns": 0, "votes": 0, "ratings": 0}


def test_models_are_replaced_while_requests_run(serve, settings, monkeypatch):
    """bc becomes what ilql is; requests under way end with the model they began with, none fails."""
    with serve() as (url, models, store):
        stop, answers = threading.Event(), []

        def ask():
            while not stop.is_set():
                answers.append(
                    httpx.post(
                        f"{url}/v1/chat/completions",
                        json={"model": "bc", "messages": TALK, "seed": 1},
                        timeout=120,
                    )
                )

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(answers) >= 4, "replies of the first model")
        models.update(replace(models.settings, models={"bc": settings.models["ilql"]}))
        replaced = len(answers)
        until(lambda: len(answers) > replaced + 8, "replies of the second model")  # 4 began with the first
        stop.set()
        for thread in threads:
            thread.join(300)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 2
        assert list(models.served) == ["bc"]
        methods = {dialog.meta["method"] for dialog in store.dialogs()}
        assert methods == {"bc", "ilql"}


def test_metrics_count_what_happened(serve):
    with serve() as (url, _, _):
        httpx.post(f"{url}/v1/chat/completions", json={"model": "ilql", "messages": TALK}, timeout=120)
        httpx.post(f"{url}/v1/chat/completions", json={"model": "nobody", "messages": TALK})
        text = httpx.get(f"{url}/metrics").text
        assert 'serve_responses_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'serve_responses_total{route="/v1/chat/completions",status="404"} 1.0' in text
        assert 'serve_requests_total{model="ilql"} 1.0' in text
        assert 'serve_ttft_seconds_count{model="ilql"} 1.0' in text
        assert 'serve_healthy{model="bc"} 1.0' in text
