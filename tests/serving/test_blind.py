"""While models are compared, nothing that a client sees tells which of them answers; and who gets which."""

import asyncio
import re
from collections import Counter
from dataclasses import replace

import httpx
import openai
import pytest

from rl_dialog.data.keys import ANYBODY
from rl_dialog.data.tokenize import train_tokenizer
from rl_dialog.methods import UtteranceILQL
from rl_dialog.serving.completions import Completions
from rl_dialog.serving.protocol import ChatRequest

TALK = [{"role": "user", "content": "hello there"}]
FIELDS = ({}, {"temperature": 0}, {"max_tokens": 3}, {"stream": True}, {"n": 2}, {"logprobs": True},
          {"beta": 1.0}, {"decoder": "lm"}, {"num_generations": 2}, {"return_values": True},
          {"max_tokens": 100_000}, {"messages": [{"role": "user", "content": "long " * 400}]},
          {"messages": [{"role": "user", "content": "a" * 70}]}, {"model": "bc"},
          {"model": "nobody"})  # fmt: skip


@pytest.fixture
def arms(checkpoints, make_policy, tmp_path):
    """Models that differ in all they can: with values and without, one reply and the best of several, other
    tokenizers."""
    words = train_tokenizer(["some other words of another corpus"] * 20, vocab_size=300)
    make_policy(UtteranceILQL(num_generations=4), seed=3).save_pretrained(tmp_path / "utterance")
    words.save_pretrained(tmp_path / "utterance")
    return checkpoints | {"utterance": str(tmp_path / "utterance")}


def shape(value):
    """What a JSON value looks like without its texts and numbers; names and kinds stay."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return value if value is None or isinstance(value, bool) else type(value).__name__


def seen(answer):
    """All of an answer that could tell something, but for what the model says and how long it takes."""
    headers = {
        name: value for name, value in answer.headers.items() if name not in ("content-length", "date")
    }
    if answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, headers, set(re.findall(r'"(\w+)":', answer.text))
    body = answer.json()
    return answer.status_code, headers, body["error"] if "error" in body else shape(body)


@pytest.mark.slow
def test_every_arm_looks_the_same(serve, arms):
    with serve(models=arms, needs_key=True, max_tokens=0) as (url, models, store):
        looks = {}
        for number in range(24):
            key = store.keys.add(f"p{number}", scopes=["participant"])
            arm, _ = models.draw(f"p{number}")
            if arm in looks:
                continue
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=240) as http:
                chat = http.post("/v1/chats", json={"user": "u", "consent": "yes"})
                known = {"model": "assigned", "messages": TALK, "user": "u", "chat_id": chat.json()["id"]}
                said = [http.post("/v1/chat/completions", json=known | fields) for fields in FIELDS]
                vote = {"completion_id": said[0].json()["id"], "vote": 1}
                looks[arm] = [
                    *map(seen, [chat, *said, http.post("/v1/feedback", json=vote)]),
                    *map(seen, [http.get(f"/v1/chats/{chat.json()['id']}"), http.get("/v1/models")]),
                    seen(http.get("/page.json")),
                ]
                assert store.known(chat.json()["id"], key=f"p{number}").model == arm
        assert set(looks) == set(arms)
        for arm in arms:
            assert looks[arm] == looks["bc"], arm
        statuses = [status for status, *_ in looks["bc"]]
        assert Counter(statuses) == {200: 9, 400: 9, 404: 2}


def test_values_are_shown_where_nothing_is_compared(serve):
    with serve(split={"ilql": 1.0}) as (url, *_):
        chat = httpx.post(f"{url}/v1/chats", json={}).json()
        body = {
            "model": "assigned",
            "chat_id": chat["id"],
            "messages": TALK,
            "seed": 3,
            "return_values": True,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240).json()
        assert chat["has_values"] and answer["choices"][0]["values"]["content"][0]["q"] is not None


def test_any_client_gets_the_model_that_is_drawn_for_its_participant(serve):
    """The official client, one key, no chat ids: a user's requests go to one model, users to both by the
    split, and each conversation is stored with the probability of its draw."""
    with (
        serve(split={"bc": 1.0, "ilql": 3.0}) as (url, models, store),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client,
    ):
        users = [f"user {n}" for n in range(40)]
        few = {models.draw(user)[0]: user for user in users}  # one of each model
        for user in (*few.values(), *users[:3]):
            talk = list(TALK)
            for _ in range(2):
                answer = client.chat.completions.create(
                    model="assigned", messages=talk, user=user, max_tokens=4
                )
                assert answer.model == "assigned"
                talk += [{"role": "assistant", "content": answer.choices[0].message.content}, *TALK]
        drawn = {}
        for dialog in store.dialogs():
            models_of = {m["model"] for m in dialog.messages if m["role"] == "assistant"}
            assert models_of == {dialog.meta["drawn"]} and len(dialog.replies) == 2
            assert dialog.meta["propensity"] == {"bc": 0.25, "ilql": 0.75}[dialog.meta["drawn"]]
            drawn[dialog.meta["user"]] = dialog.meta["drawn"]
        assert len(drawn) >= 3 and set(drawn.values()) == {"bc", "ilql"}
        shares = Counter(models.draw(f"user {n}")[0] for n in range(4000))
        assert shares["ilql"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_who_says_nothing_of_themselves_is_somebody_new(serve):
    """Without key and user every request is a draw of its own, and a chat whose model is gone stays with one;
    a named key is one participant."""
    with serve() as (_, models, store):
        completions = Completions(models, store, None)

        def drawn(key=ANYBODY, chat_id=None):
            request = ChatRequest(model="assigned", messages=TALK, chat_id=chat_id)
            _, served, propensity = asyncio.run(completions._model(request, key))
            return served.name, propensity

        assert {drawn() for _ in range(40)} == {("bc", 0.5), ("ilql", 0.5)}
        about = {"key": "", "user": "", "model": "gone", "propensity": 0.5}
        chats = [store.start_chat(**about) for _ in range(40)]
        once, again = ([drawn(chat_id=chat) for chat in chats] for _ in range(2))
        assert once == again and set(once) == {("bc", None), ("ilql", None)}
        assert len({drawn(replace(ANYBODY, name="app")) for _ in range(40)}) == 1
