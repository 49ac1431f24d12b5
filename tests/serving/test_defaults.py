"""What is measured is what is talked to: without flags evaluate, train, chat and serve draw replies alike."""

import inspect
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

from pipelines.chat import ChatConfig, begin, decoding_of
from pipelines.evaluate import EvaluateConfig
from pipelines.serve import ServeConfig, settings_of
from rl_dialog.evaluation.episodes import env_return
from rl_dialog.evaluation.generation import Decoding, generate_replies, load_for_decoding, stream
from rl_dialog.methods import UtteranceILQL
from rl_dialog.serving.completions import Completions
from rl_dialog.serving.protocol import ChatRequest

TALK = [{"role": "user", "content": "hello there"}]
# the fixture's server has limits of its own
DEFAULTS = {"max_tokens": Decoding.max_new_tokens, "max_prompt_length": Decoding.max_prompt_length}


def test_one_set_of_defaults(serve, tmp_path):
    with serve(**DEFAULTS) as (_, models, store):
        request = ChatRequest(model="bc", messages=TALK)
        served = Completions(models, store, None)._decoding(request, {}, [models.served["bc"]])
    assert served == decoding_of(ChatConfig()) == Decoding.of(EvaluateConfig()) == Decoding()
    assert inspect.signature(env_return).parameters["decoding"].default is None  # which is Decoding()
    told = settings_of(ServeConfig(models=("bc=runs/bc",), store=f"sqlite:///{tmp_path}/chats.db"))
    assert {getattr(told, name) for name in (*DEFAULTS, "most_tokens")} == {0}, "what the context leaves"


def test_the_limits_are_those_of_the_models_context(serve):
    """Without flags a reply may fill what the prompt leaves of the context (128 tokens here), and older
    messages go only where not even a short reply would fit."""
    with serve(max_tokens=0, max_prompt_length=0) as (url, models, _):
        models.served["bc"].engine.batch.stops = frozenset()  # it never ends by itself

        def ask(messages, **more):
            body = {"model": "bc", "messages": messages, "seed": 1} | more
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240).json()

        usage = ask(TALK)["usage"]
        assert usage["total_tokens"] == 128 and usage["completion_tokens"] > 64
        long = [{"role": role, "content": "well " * 10} for role in ("user", "assistant", "user")]
        for more in ({}, {"max_tokens": 127}):
            usage = ask(long, **more)["usage"]
            assert usage["total_tokens"] == 128 and usage["prompt_tokens"] <= 64
        told = ask([{"role": "user", "content": "word " * 200}])["error"]
        assert told["code"] == "context_length_exceeded" and "at most 64 tokens" in told["message"]


def test_older_messages_go_where_the_model_has_not_learned_to_read_them(serve, checkpoints):
    """The system prompt and the last message stay, as long as the context holds them."""
    place = Path(checkpoints["bc"]) / "rl_dialog.yaml"
    stored = yaml.safe_load(place.read_text()) | {"lengths": {"row": 60, "prompt": 40}}
    place.write_text(yaml.safe_dump(stored))
    with serve(max_tokens=12, max_prompt_length=0) as (url, _, _):

        def read(*messages):
            body = {"model": "bc", "messages": messages, "seed": 1}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240).json()
            return answer["usage"]["prompt_tokens"]

        said = [{"role": role, "content": "well " * 5} for role in ("user", "assistant", "user")]
        assert read(said[2]) <= read(*said) <= 40 < 3 * read(said[2]) - 10
        long = {"role": "user", "content": "well " * 20}
        assert read(*said[:2], long) == read(long) > 40


@pytest.fixture
def three(checkpoints, make_policy, tokenizer, tmp_path):
    """Those of `checkpoints`, and one that says the best of several replies."""
    place = str(tmp_path / "utterance")
    make_policy(UtteranceILQL(num_generations=4)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return checkpoints | {"utterance": place}


@pytest.mark.parametrize(
    "name",
    [pytest.param("bc", marks=pytest.mark.slow), "ilql", pytest.param("utterance", marks=pytest.mark.slow)],
)
def test_chat_and_server_say_what_is_evaluated(serve, three, tokenizer, capsys, name):
    """Reply for reply at the same seed, so in distribution too; chat's first draws from stream(seed, 0)."""
    policy, replies = load_for_decoding(three[name]), {"evaluated": [], "chat": [], "served": []}
    seeds = [stream(seed, 0) for seed in range(6)]
    decoding = Decoding.of(EvaluateConfig())
    evaluated = generate_replies(policy, tokenizer, [TALK] * len(seeds), decoding, seeds=seeds)
    with serve(models=three, **DEFAULTS) as (url, _, _):
        for seed, drawn in enumerate(seeds):
            chat = begin(replace(ChatConfig(), checkpoint=three[name], seed=seed, device="cpu", quiet=True))
            chat.answer(TALK[0]["content"])
            body = {"model": name, "messages": TALK, "seed": drawn}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
            replies["chat"].append(chat.messages[-1]["content"])
            replies["served"].append(answer["choices"][0]["message"]["content"])
    replies["evaluated"] = [reply.text for reply in evaluated]
    assert len(set(replies["evaluated"])) > 1, "sampled, not always the same"
    assert replies["chat"] == replies["evaluated"]
    assert replies["served"] == [text.replace("\0", "\ufffd") for text in replies["evaluated"]]
    capsys.readouterr()
