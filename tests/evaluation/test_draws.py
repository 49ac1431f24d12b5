"""Several replies per context: the same as one at a time, distinct, from streams of their own; and the cache
that makes them cheap."""

import pytest
import torch
from transformers import DynamicCache

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import encode_prompt, tokenize
from rl_dialog.errors import UserError
from rl_dialog.evaluation.draws import Context, Drawn, _keep, draw_replies
from rl_dialog.evaluation.generation import Decoding, Reply, beam_replies, generate_replies, stream
from rl_dialog.methods import BC, ILQL
from rl_dialog.models.prefill import RoomyLayer
from tests.evaluation.test_generation import TALKS

CONTEXTS = [Context((0, n), talk, "the human's") for n, talk in enumerate(TALKS)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("method", "family", "trunk"),
    [
        (BC(), "gpt2", "shared"),
        (BC(), "llama", "shared"),
        (ILQL(), "gpt2", "shared"),
        (ILQL(), "gpt2", "separate"),
    ],
)
def test_a_prompt_read_once_gives_the_replies_of_a_prompt_read_each_time(
    make_policy, tokenizer, method, family, trunk
):
    policy = make_policy(method, family, trunk=trunk)
    decoding = Decoding(max_new_tokens=8, max_prompt_length=64)
    drawn = draw_replies(policy, tokenizer, CONTEXTS, decoding, count=3, tries=1, seed=5)
    expected = [
        [
            generate_replies(policy, tokenizer, [context.messages], decoding, seeds=[stream(5, 0, n, k)])[0]
            for k in range(3)
        ]
        for n, context in enumerate(CONTEXTS)
    ]
    assert [d.replies for d in drawn] == [list(dict.fromkeys(replies)) for replies in expected]
    assert [d.duplicates for d in drawn] == [3 - len(d.replies) for d in drawn]


@pytest.mark.parametrize(
    "decoding",
    [Decoding(max_new_tokens=6), Decoding(max_new_tokens=6, do_sample=False, num_beams=4)],
    ids=["sampled", "beams"],
)
def test_what_is_said_depends_neither_on_the_batch_nor_on_the_other_contexts(
    make_policy, tokenizer, decoding
):
    policy = make_policy(BC())

    def texts(contexts, batch_size=128):
        drawn = draw_replies(policy, tokenizer, contexts, decoding, count=3, batch_size=batch_size)
        return [([reply.text for reply in d.replies], d.duplicates) for d in drawn]

    together = texts(CONTEXTS)
    assert together == [texts([context], 1)[0] for context in CONTEXTS] == texts(CONTEXTS, 7)
    assert together[1:3] == texts(CONTEXTS[1:3])


def test_beams_are_those_of_a_single_search(make_policy, tokenizer):
    policy = make_policy(BC())
    decoding = Decoding(max_new_tokens=6, do_sample=False, num_beams=4)
    drawn = draw_replies(policy, tokenizer, CONTEXTS, decoding, count=4)
    for context, found in zip(CONTEXTS, drawn, strict=True):
        texts = list(
            dict.fromkeys(r.text for r in beam_replies(policy, tokenizer, context.messages, decoding))
        )
        assert [r.text for r in found.replies] == texts
        assert found.duplicates == 4 - len(texts)


def test_repetitions_are_removed_and_drawn_again(make_policy, tokenizer):
    """At a low temperature nearly all draws are the likeliest reply."""
    policy = make_policy(BC())
    cold = Decoding(max_new_tokens=3, temperature=0.5, top_k=2)
    [once] = draw_replies(policy, tokenizer, CONTEXTS[:1], cold, count=6, tries=1)
    [often] = draw_replies(policy, tokenizer, CONTEXTS[:1], cold, count=6, tries=4)
    assert once.duplicates == 6 - len(once.replies) > 0
    assert often.replies[: len(once.replies)] == once.replies and len(often.replies) > len(once.replies)
    assert len({r.text for r in often.replies}) == len(often.replies)
    human = once.replies[0].text
    [copied] = draw_replies(
        policy, tokenizer, [Context((0, 0), TALKS[0], f" {human}\n")], cold, count=6, tries=1
    )
    assert [r.text for r in copied.replies] == [r.text for r in once.replies[1:]]


def test_an_opening_is_asked_for_as_it_was_trained(make_policy, tokenizer):
    [row] = tokenize(Dialog("d", [{"role": "assistant", "content": "hello"}]), tokenizer)
    assert encode_prompt([], tokenizer, max_length=8) == row.input_ids[: int(row.assistant.argmax())].tolist()
    drawn = draw_replies(
        make_policy(BC()),
        tokenizer,
        [Context((0, 9), [], "hello"), *CONTEXTS],
        Decoding(max_new_tokens=4),
        count=2,
    )
    assert len(drawn[0].replies) == 2


def test_what_is_kept():
    drawn = Drawn([])
    replies = [Reply(text, (), True) for text in ("a", "yes", "a", "", "b", "", "c")]
    _keep(drawn, "yes ", replies, 3)
    assert [r.text for r in drawn.replies] == ["a", "", "b"]
    assert drawn.duplicates == 3  # yes, a, the second empty one; c came too late


@pytest.mark.parametrize(
    ("decoding", "settings", "message"),
    [
        (Decoding(do_sample=False, num_beams=2), {"count": 3}, "num_beams 2 for 3: set num_beams 3"),
        (Decoding(), {"count": 0}, "at least one candidate"),
        (Decoding(), {"count": 1, "tries": 0}, "one try"),
        (Decoding(num_beams=3), {"count": 3}, "sampling or a beam search"),
        (Decoding(num_generations=2), {"count": 3}, "candidates are drawn one by one"),
    ],
)
def test_settings_that_contradict_each_other(make_policy, tokenizer, decoding, settings, message):
    with pytest.raises(UserError, match=message):
        draw_replies(make_policy(BC()), tokenizer, CONTEXTS, decoding, **settings)


def test_a_roomy_layer_holds_what_a_dynamic_one_holds():
    torch.manual_seed(0)
    plain, cache = DynamicCache(), DynamicCache()
    start = torch.randn(2, 3, 2, 5, 4)  # keys and values, rows, heads, tokens, size
    plain.update(*start, 0), cache.update(*start, 0)
    cache.layers[0] = RoomyLayer(cache.layers[0], 3)
    for step in range(6):  # twice as many as there is room for
        token = torch.randn(2, 3, 2, 1, 4)
        if step == 4:
            rows = torch.tensor([2, 0, 2])
            plain.reorder_cache(rows), cache.reorder_cache(rows)
        before = cache.layers[0].keys.data_ptr()
        for one, other in zip(plain.update(*token, 0), cache.update(*token, 0), strict=True):
            assert torch.equal(one, other)
        assert cache.get_seq_length() == plain.get_seq_length()
        assert (cache.layers[0].keys.data_ptr() == before) == (step in (1, 2, 3, 5)), (
            "a token within the room copies nothing"
        )
