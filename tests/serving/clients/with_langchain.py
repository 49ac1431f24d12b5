"""The usual calls with langchain-openai: a line of JSON, call -> what came of it."""

import json
import os

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from outcomes import LONG, TALK, TOOL, attempt


def model(**fields):
    return ChatOpenAI(model="bc", base_url=os.environ["OPENAI_BASE_URL"], max_retries=0, **fields)


def ask(messages=TALK, **fields):
    return model(**fields).invoke(messages).content


said = ask(seed=1)
calls = {
    "chat": lambda: bool(said),
    "stream": lambda: "".join(chunk.content for chunk in model(seed=1).stream(TALK)) == said,
    "n": lambda: len(model(n=3).generate([[HumanMessage("hello")]]).generations[0]) == 3,
    "stop": lambda: said[2] not in ask(seed=1, stop=[said[2]]),
    "seed": lambda: ask(seed=1) == ask(seed=1) != ask(seed=2),
    "tools": lambda: model().bind_tools([TOOL]).invoke(TALK).content,
    "wrong key": lambda: ask(api_key="sk-rl-nobody"),
    "too long": lambda: ask(LONG),
}
print(json.dumps({name: attempt(call) for name, call in calls.items()}))
