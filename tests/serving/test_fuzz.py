"""Requests that nobody would write by hand: whatever comes, an answer in OpenAI's form, never a 5xx, and the
engines go on."""

import asyncio
import gzip
import json
import logging
import socket
import time
from contextlib import contextmanager

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rl_dialog.methods import ILQL

MODELS = ("bc", "ilql", "sign")
effort = pytest.mark.parametrize(
    "effort", [1, pytest.param(9, marks=[pytest.mark.slow, pytest.mark.long])], ids=["short", "long"]
)


@contextmanager
def unharmed(serve, caplog, **changed):
    """(http, store, url) of a server; at the end it has logged no failure, its engines are idle and healthy
    and answer a normal request."""
    with serve(**changed) as (url, models, store), httpx.Client(base_url=url, timeout=240) as http:
        yield http, store, url
        engines = [model.engine for model in models.served.values()]
        deadline = time.monotonic() + 240
        while any(len(engine.batch) or engine.depth() or engine.tickets for engine in engines):
            assert time.monotonic() < deadline, "requests are left in an engine"
            time.sleep(0.01)
        assert all(engine.healthy() and not engine.stats.failed for engine in engines)
        assert http.get("/health").json()["status"] == "ok"
        for name in models.served:
            answer = http.post(
                "/v1/chat/completions",
                json={"model": name, "messages": [{"role": "user", "content": "hello"}]},
            )
            assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def server(serve, make_policy, tokenizer, checkpoints, tmp_path, caplog):
    """server(): `unharmed` with a third model whose method takes only some betas, and short replies."""
    make_policy(ILQL(extraction="sign", beta=0.7)).save_pretrained(tmp_path / "sign")
    tokenizer.save_pretrained(tmp_path / "sign")
    models = checkpoints | {"sign": str(tmp_path / "sign")}

    def start(**changed):
        return unharmed(
            serve,
            caplog,
            **{"models": models, "max_tokens": 4, "most_tokens": 8, "max_body_bytes": 100_000} | changed,
        )

    return start


def examples(count):
    """As many, each time the same ones; what fails is told as it was found or smaller."""
    quiet = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.large_base_example,
    ]
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=phases,
        suppress_health_check=quiet,
    )


def checked(answer):
    """The answer, once it is no server error, and if it is an error, one in OpenAI's form."""
    assert answer.status_code < 500, answer.text
    if answer.status_code < 400:
        return answer
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and len(error["message"]) < 1100
    assert isinstance(error["type"], str) and error["type"]
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    return answer


def events(text):
    """The JSON of every event of a stream that must be whole."""
    *parts, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def send(http, path, value, method="POST"):
    """`value` as JSON, with what only Python's JSON has: NaN, infinities and lone surrogates."""
    return checked(
        http.request(method, path, content=json.dumps(value), headers={"Content-Type": "application/json"})
    )


HARMFUL = [
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "\udfff\ud800",
    "\u2028",
    "\ufeff",
    "👩‍👩‍👧",
    "\x1b[0m",
    "<|end|>",
    "<|user|>",
    "..",
    "a" * 300,
    "NaN",
]
EXTREME = [
    0,
    -1,
    2**31,
    2**63,
    -(2**63),
    2**64,
    10**400,
    1e308,
    5e-324,
    -0.0,
    0.005,
    float("nan"),
    float("inf"),
]
STRANGE = st.sampled_from(HARMFUL)
ANY_TEXT = st.text(st.characters(codec=None), max_size=30) | STRANGE
NUMBERS = st.integers() | st.floats() | st.sampled_from(EXTREME)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
) | st.sampled_from([[0] * 3000, [[]] * 50, {str(n): n for n in range(300)}, ["stop"] * 40, "x" * 30_000])


def _nested(depth):
    value = 0
    for level in range(depth):
        value = [value] if level % 2 else {"content": value}
    return value


PLAIN = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8
).filter(str.strip)
SAID = PLAIN | st.lists(PLAIN.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)
TURNS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), SAID
    ),
    max_size=4,
)
LAST = st.builds(lambda content: {"role": "user", "content": content}, SAID)
LEAD = st.just([]) | st.builds(
    lambda role, content: [{"role": role, "content": content}],
    st.sampled_from(["system", "developer"]),
    PLAIN,
)
MESSAGES = st.builds(lambda lead, turns, last: [*lead, *turns, last], LEAD, TURNS, LAST)
GENERATION_CONFIG = st.fixed_dictionaries(
    {}, optional={"temperature": st.floats(0.01, 2), "top_k": st.integers(0, 99),
                  "max_new_tokens": st.integers(1, 10**6), "do_sample": st.booleans()}
).map(json.dumps)  # fmt: skip
VALID_FIELDS = {
    "stream": st.booleans(),
    "stream_options": st.builds(lambda wanted: {"include_usage": wanted}, st.booleans()),
    "temperature": st.floats(0.01, 2) | st.sampled_from([1, 2]),
    "top_p": st.floats(0, 1),
    "max_tokens": st.integers(1, 8),
    "max_completion_tokens": st.integers(1, 8),
    "n": st.integers(1, 16),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": PLAIN | st.lists(PLAIN, max_size=4),
    "logprobs": st.just(True),
    "user": PLAIN,
    "metadata": st.dictionaries(PLAIN, PLAIN, max_size=3),
    "store": st.booleans(),
    "top_k": st.integers(0, 1_000_000),
    "decoder": st.sampled_from(["method", "lm"]),
    "num_generations": st.integers(0, 4),
    "return_values": st.booleans(),
    "generation_config": GENERATION_CONFIG,
    "tools": st.just([]),
    "response_format": st.just({"type": "text"}),
    "logit_bias": st.just({}),
    "frequency_penalty": st.just(0),
}


@st.composite
def valid_requests(draw):
    """Chat requests that must be answered."""
    chosen = draw(st.lists(st.sampled_from(sorted(VALID_FIELDS)), unique=True, max_size=7))
    body = {"model": draw(st.sampled_from(MODELS)), "messages": draw(MESSAGES)} | {
        name: draw(VALID_FIELDS[name]) for name in chosen
    }
    betas = {
        "bc": st.none(),
        "ilql": st.none() | st.floats(-1000, 1000),
        "sign": st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True),
    }
    body["beta"] = draw(betas[body["model"]])
    if "logprobs" in body:
        body["top_logprobs"] = draw(st.none() | st.integers(0, 20))
    if body.get("num_generations", 0) > 1:  # choosing among replies needs different ones
        body["temperature"] = 1
    return body


@st.composite
def near_valid_requests(draw):
    """Valid ones with a few things wrong: fields of any value, unknown fields, missing ones, messages that
    are none."""
    body = draw(valid_requests())
    body["num_generations"] = draw(st.sampled_from([None, 0, 1, 17]))
    names = [
        *VALID_FIELDS,
        "model",
        "messages",
        "beta",
        "top_logprobs",
        "chat_id",
        "audio",
        "modalities",
        "tool_choice",
        "service_tier",
    ]
    if draw(st.booleans()):
        body[draw(st.sampled_from(["stop", "user", "model", "chat_id", "metadata"]))] = draw(
            STRANGE | STRANGE.map(lambda text: {text: text})
        )
    for name in draw(st.lists(st.sampled_from(names) | ANY_TEXT, max_size=2)):
        body[name] = draw(ANYTHING | st.integers(1, 200).map(_nested))
    if draw(st.booleans()):
        message = {
            "role": draw(st.sampled_from(["system", "user", "assistant", "tool", "developer"])),
            "content": draw(ANY_TEXT | ANYTHING),
        }
        before = body["messages"] if isinstance(body.get("messages"), list) else []
        body["messages"] = [*before, message | draw(st.dictionaries(ANY_TEXT, ANYTHING, max_size=2))]
    if draw(st.integers(0, 3)) == 0:
        body["generation_config"] = json.dumps(
            draw(
                st.dictionaries(
                    st.sampled_from(["temperature", "top_p", "top_k", "max_new_tokens"]), ANYTHING
                )
            )
        )
    if draw(st.integers(0, 9)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))))
    return body


def replies(http, body):
    """The text of each choice of a request that must be answered, in one piece or streamed."""
    answer = send(http, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    count = body.get("n") or 1
    if not body.get("stream"):
        assert answer.json()["usage"]["completion_tokens"] <= 8 * count
        return [choice["message"]["content"] for choice in answer.json()["choices"]]
    texts, ended, streamed = [""] * count, [], events(answer.text)
    for choice in (choice for event in streamed for choice in event["choices"]):
        assert choice["index"] not in ended, "nothing comes after a choice's end"
        texts[choice["index"]] += choice["delta"].get("content") or ""
        ended += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(ended) == list(range(count))
    assert bool(streamed[-1].get("usage")) == bool((body.get("stream_options") or {}).get("include_usage"))
    return texts


@effort
def test_valid_requests_are_answered(server, effort):
    """And what a stream says is what the answer in one piece says."""
    with server() as (http, store, _):

        @examples(120 * effort)
        @given(valid_requests())
        def asked(body):
            texts = replies(http, body)
            stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
            assert not [(text, stop) for text in texts for stop in stops if stop in text]
            if "seed" in body:
                assert replies(http, body | {"stream": not body.get("stream")}) == texts

        asked()
        assert store.counts()["turns"] > 0


@pytest.mark.slow
@effort
def test_arbitrary_json_on_every_route(server, effort):
    with server() as (http, _, _):
        chat = http.post("/v1/chats", json={"model": "bc", "user": "u"}).json()["id"]
        said = http.post(
            "/v1/chat/completions",
            json={"model": "bc", "chat_id": chat, "messages": [{"role": "user", "content": "hi"}]},
        ).json()["id"]
        ids = st.sampled_from([chat, said]) | ANYTHING
        fields = {
            "/v1/chat/completions": ["model", "messages"],
            "/v1/chats": ["user", "consent", "model"],
            f"/v1/chats/{chat}/ratings": [
                "quality",
                "fluency",
                "diversity",
                "contingency",
                "empathy",
                "comments",
            ],
            "/v1/chats/chat-none/ratings": ["quality"],
            "/v1/feedback": ["completion_id", "index", "vote", "edit"],
            "/load_model": ["model"],
        }
        known = {
            "vote": st.integers(-2, 2),
            "index": st.integers(-1, 16),
            "quality": st.integers(0, 8),
            "model": st.sampled_from([*MODELS, "assigned"]),
        }

        @examples(300 * effort)
        @given(st.data())
        def asked(data):
            path = data.draw(st.sampled_from(sorted(fields)))
            names = data.draw(st.lists(st.sampled_from(fields[path]) | ANY_TEXT, max_size=4))
            body = {
                name: data.draw(ids if name.endswith("_id") else known.get(name, ANY_TEXT) | ANYTHING)
                for name in names
            }
            send(http, path, body if data.draw(st.integers(0, 9)) else data.draw(ANYTHING))

        asked()


@pytest.mark.slow
@effort
def test_near_valid_chat_requests(server, effort):
    with server() as (http, _, _):

        @examples(300 * effort)
        @given(near_valid_requests())
        def asked(body):
            answer = send(http, "/v1/chat/completions", body)
            if answer.status_code == 200 and body.get("stream"):
                assert all("error" not in event for event in events(answer.text))

        asked()


@pytest.mark.slow
@effort
def test_many_at_once_of_which_some_leave(server, effort):
    """Clients that give up at any moment, among others that get what they asked for."""

    async def ask(http, body, patience):
        try:
            answer = await asyncio.wait_for(
                http.post("/v1/chat/completions", content=json.dumps(body)), patience
            )
        except TimeoutError:
            return
        checked(answer)
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            assert all("error" not in event for event in events(answer.text))

    async def ask_all(url, asked):
        async with httpx.AsyncClient(
            base_url=url, timeout=240, headers={"Content-Type": "application/json"}
        ) as http:
            await asyncio.gather(*(ask(http, body, patience) for body, patience in asked))

    with server(slots=6, kept=3) as (_, _, url):

        @examples(5 * effort)
        @given(st.lists(st.tuples(valid_requests(), st.none() | st.floats(0, 0.3)), min_size=10, max_size=40))
        def asked(several):
            asyncio.run(ask_all(url, several))

        asked()


@effort
def test_names_in_paths(server, effort):
    """Whatever stands in a path, percent-encoded or as it is."""
    encoded = st.binary(min_size=1, max_size=20).map(lambda raw: "".join(f"%{byte:02X}" for byte in raw))
    plain = st.text(
        st.characters(codec="ascii", categories=["L", "N", "P", "S"], exclude_characters="?#%"),
        min_size=1,
        max_size=20,
    )
    routes = [
        ("GET", "/v1/chats/{}"),
        ("POST", "/v1/chats/{}/ratings"),
        ("DELETE", "/v1/users/{}"),
        ("GET", "/v1/models/{}"),
        ("GET", "/page/{}"),
        ("GET", "/{}"),
    ]
    with server() as (http, _, url):

        @examples(150 * effort)
        @given(
            st.sampled_from(routes),
            encoded | plain | st.sampled_from(["%00", "a%2Fb", "..%2F..%2Fapi.py", "%ED%A0%80", "a" * 5000]),
        )
        def asked(route, name):
            method, path = route
            content = b'{"quality": 3}' if method == "POST" else None
            answer = http.send(
                httpx.Request(
                    method,
                    url + path.format(name),
                    content=content,
                    headers={"Content-Type": "application/json"},
                )
            )
            if answer.status_code >= 400:
                checked(answer)
            assert answer.status_code < 500

        asked()
        for user in ("a/b", "%00", "ü ü", "?"):
            http.post("/v1/chats", json={"user": user}).raise_for_status()
            assert http.delete("/v1/users/" + "".join(f"%{byte:02X}" for byte in user.encode())).json() == {
                "deleted": 1
            }, user


@pytest.mark.slow
@effort
def test_what_the_schema_describes(server, effort):
    """Every operation of /openapi.json, with what fits its schema and with what does not; answers are those
    that the schema names."""
    with server() as (http, _, url):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        chat = http.post("/v1/chats", json={"model": "bc"}).json()["id"]
        conforms = [
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
            allow_header_conformance,
        ]
        for operation in (result.ok() for result in schema.get_all_operations()):
            takes = bool(operation.body or operation.path_parameters)  # without, nothing can be wrong
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 1 + takes]:

                @examples(8 * effort)
                @given(
                    operation.as_strategy(generation_mode=mode),
                    st.none() | st.sampled_from(MODELS),
                    st.booleans(),
                )
                def asked(case, model, real):
                    if model and isinstance(case.body, dict) and "model" in case.body:
                        case.body["model"] = model
                    if real and "chat" in case.path_parameters:
                        case.path_parameters["chat"] = chat  # noqa: B023
                    answer = case.call(base_url=url, timeout=240)
                    checked(httpx.Response(answer.status_code, content=answer.content))
                    case.validate_response(answer, checks=conforms)

                asked()


def raw(url, request, *, leave):
    """What a server says to these bytes, until it closes the connection; with `leave` the client has closed
    its end."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=240) as connection:
        connection.sendall(request)
        if leave:
            connection.shutdown(socket.SHUT_WR)
        said = b""
        while more := connection.recv(65536):
            said += more
    return said


GOOD = json.dumps({"model": "bc", "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.mark.slow
def test_other_methods_headers_and_encodings(server):
    with server(max_body_bytes=2000) as (http, _, url):
        v1 = (
            "chat/completions",
            "chats",
            "chats/x",
            "models",
            "models/x",
            "feedback",
            "users/u",
            "chats/x/ratings",
        )
        for path in (
            "/",
            "/page.json",
            "/health",
            "/metrics",
            "/load_model",
            "/nowhere",
            *(f"/v1/{name}" for name in v1),
        ):
            for method in ("GET", "HEAD", "PUT", "PATCH", "OPTIONS", "TRACE", "DELETE", "PROPFIND"):
                answer = http.request(method, path)
                assert answer.status_code < 500
                if answer.status_code >= 400 and method != "HEAD":
                    checked(answer)
        squeezed = gzip.compress(GOOD)
        for content, headers in (
            (squeezed, {"Content-Encoding": "gzip", "Content-Type": "application/json"}),
            (GOOD, {"Content-Type": "text/plain"}),
            (GOOD, {"Content-Type": "multipart/form-data"}),
            (GOOD, {"Content-Type": "application/x-www-form-urlencoded"}),
            (GOOD, {"Content-Type": "\xff\xfe"}),
            (GOOD.decode().encode("utf-16"), {"Content-Type": "application/json"}),
            (b"\xef\xbb\xbf" + GOOD, {"Content-Type": "application/json"}),
            (b"", {"Content-Type": "application/json"}),
            (b"null", {"Content-Type": "application/json"}),
            (b"[" * 1990, {"Content-Type": "application/json"}),
            (b'{"model": ' + b"9" * 1900 + b"}", {"Content-Type": "application/json"}),
            (GOOD, {"Content-Type": "application/json", "Authorization": "Bearer \xff"}),
            (GOOD, {"Content-Type": "application/json", "Authorization": "Bearer"}),
            (GOOD, {"Content-Type": "application/json", "Authorization": "Bearer " + "k" * 5000}),
            (
                GOOD,
                {
                    "Content-Type": "application/json",
                    "Accept": "image/png",
                    "Range": "bytes=0-1",
                    "Expect": "200-ok",
                },
            ),
            (GOOD, {"Content-Type": "application/json", "X-Forwarded-For": "\xff", "Cookie": "a=b; =;;"}),
        ):
            encoded = [(name, value.encode("latin-1")) for name, value in headers.items()]
            checked(http.post("/v1/chat/completions", content=content, headers=encoded))


def test_bodies_that_come_in_strange_ways(server):
    with server(max_body_bytes=2000) as (http, _, url):
        checked(
            http.post(
                "/v1/chat/completions",
                content=(GOOD[i : i + 1] for i in range(len(GOOD))),
                headers={"Content-Type": "application/json"},
            )
        )
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
            b" application/json\r\nConnection: close\r\n"
        )
        for request, status in (
            (head + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD, b"200"),
            (
                head.replace(b"localhost", b"elsewhere") + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
                b"403",
            ),  # a page of another site, asked by name
            (head + b"Content-Length: 5\r\n\r\n" + GOOD, b"400"),  # cut: no JSON
            (head + b"Content-Length: 99999999999999999999999\r\n\r\n" + GOOD, b"4"),
            (head + b"Content-Length: -1\r\n\r\n" + GOOD, b"400"),
            (head + b"Content-Length: 3000\r\n\r\n", b"413"),
            (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
            (head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD), b"200"),
            (
                head + b"Transfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b"x" * 100 + b"\r\n",
                b"",
            ),  # never ends: the client left
            (head + b"Content-Length: 500\r\n\r\n" + GOOD, b""),  # shorter than announced: the client left
            (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),  # TLS to a server without
            (b"FROBNICATE / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"4"),
            (b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b""),
            (
                (
                    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade:"
                    b" websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
                ),
                b"",
            ),
        ):
            said = raw(url, request, leave=not status)
            assert said[9:12].startswith(status) and not said[9:12].startswith(b"5"), (request, said)
