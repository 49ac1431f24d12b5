"""The usual calls with the official Python client: a line of JSON, call -> what came of it."""

import json
import os

import openai
from outcomes import LONG, TALK, TOOL, attempt

address = os.environ["OPENAI_BASE_URL"]
client = openai.OpenAI(base_url=address, api_key=os.environ["OPENAI_API_KEY"], max_retries=0)
stranger = openai.OpenAI(base_url=address, api_key="sk-rl-nobody", max_retries=0)


def ask(client=client, messages=TALK, **fields):
    answer = client.chat.completions.create(model="bc", messages=messages, **fields)
    return [choice.message.content for choice in answer.choices]


def stream():
    chunks = client.chat.completions.create(model="bc", messages=TALK, seed=1, stream=True)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


said = ask(seed=1)[0]
calls = {
    "models": lambda: "bc" in [model.id for model in client.models.list()],
    "chat": lambda: bool(said),
    "stream": lambda: stream() == said,
    "n": lambda: len(ask(n=3)) == 3,
    "stop": lambda: said[2] not in ask(seed=1, stop=[said[2]])[0],
    "seed": lambda: ask(seed=1) == ask(seed=1) != ask(seed=2),
    "tools": lambda: ask(tools=[TOOL]),
    "wrong key": lambda: ask(stranger),
    "too long": lambda: ask(messages=LONG),
}
print(json.dumps({name: attempt(call) for name, call in calls.items()}))
