"""The usual calls with litellm: a line of JSON, call -> what came of it."""

import json
import os

import litellm
from litellm.utils import get_valid_models
from outcomes import LONG, TALK, TOOL, attempt

litellm.suppress_debug_info = True
address = os.environ["OPENAI_BASE_URL"]


def ask(messages=TALK, api_key=os.environ["OPENAI_API_KEY"], **fields):
    answer = litellm.completion(
        model="openai/bc", messages=messages, api_base=address, api_key=api_key, num_retries=0, **fields
    )
    return [choice.message.content for choice in answer.choices]


def stream():
    chunks = litellm.completion(model="openai/bc", messages=TALK, api_base=address, seed=1, stream=True)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def models():
    return "bc" in get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=address
    )


said = ask(seed=1)[0]
calls = {
    "models": models,
    "chat": lambda: bool(said),
    "stream": lambda: stream() == said,
    "n": lambda: len(ask(n=3)) == 3,
    "stop": lambda: said[2] not in ask(seed=1, stop=[said[2]])[0],
    "seed": lambda: ask(seed=1) == ask(seed=1) != ask(seed=2),
    "tools": lambda: ask(tools=[TOOL]),
    "wrong key": lambda: ask(api_key="sk-rl-nobody"),
    "too long": lambda: ask(LONG),
}
print(json.dumps({name: attempt(call) for name, call in calls.items()}))
