"""What a request's messages become."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rl_dialog.data.storable import request_messages
from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.serving.completions import _token_text
from rl_dialog.serving.protocol import ChatRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TALK = [
    {"role": "user", "content": "how warm is it?", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "c1", "content": "12 C"},
]


def plain(messages):
    return [each.plain for each in ChatRequest.model_validate({"model": "m", "messages": messages}).messages]


def test_tools_are_read_and_kept(tokenizer):
    """As in training, where a reply's calls are a part of it."""
    said = request_messages(plain(TALK))
    assert said[1]["tool_calls"] == [CALL] and said[2]["tool_call_id"] == "c1" and said[0]["name"] == "ann"
    logged = [{key: value for key, value in message.items() if key != "refusal"} for message in TALK]
    prompts = [encode_prompt(messages, tokenizer, max_length=500) for messages in (said, logged)]
    assert prompts[0] == prompts[1] and "Rome" in tokenizer.decode(prompts[0])


def test_a_refusal_is_what_was_said():
    said = [{"type": "refusal", "refusal": "I will not."}]
    assert plain([{"role": "assistant", "content": said}, TALK[0]])[0]["content"] == "I will not."
    with pytest.raises(ValidationError):
        plain([{"role": "assistant", "content": [{"type": "refusal", "refusal": 3}]}, TALK[0]])


def test_tokens_have_their_spaces():
    """Tokenizers of the Llama 2 kind leave the space out of a token that they decode alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({"a": 0, "\u2581hello": 1, "\u2581there": 2, "\u2581a": 3}, unk_token="a")
    )
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = PreTrainedTokenizerFast(tokenizer_object=words)
    assert [_token_text(made, token)["token"] for token in (1, 2)] == [" hello", " there"]
    assert made.decode([2]) == "there"
