"""Hierarchical models against a walk token by token, and as causal LMs like any other: cached equals
uncached, batched equals single, in slots as without."""

import copy
import inspect
import queue

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import encode_prompt, message_ends, tokenize
from rl_dialog.errors import UserError
from rl_dialog.evaluation.conversations import Conversations, can_keep
from rl_dialog.evaluation.generation import Decoding, beam_replies, generate_replies
from rl_dialog.methods import BC, ILQL, Psi
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.latents import AT_MEAN
from rl_dialog.models.policy import Policy
from rl_dialog.models.recurrent_state import MessageStates
from rl_dialog.models.seeded_noise import derived, standard_normal
from rl_dialog.serving.batch import Ask
from rl_dialog.serving.engine import Engine

FAMILIES = ("hred", "vhred", "vhcr")
HELLO = [{"role": "user", "content": "hello"}]
LONGER = [*HELLO, {"role": "assistant", "content": "yes, you?"}, {"role": "user", "content": "to eat"}]


def make(tokenizer, family, method=None, **fields) -> Policy:
    torch.manual_seed(0)
    config = ModelConfig(family=family, width=16, layers=2, context=256, latent_size=3, **fields)
    policy = Policy(load_lm(config, tokenizer), method or BC(), config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return policy.eval()


def some_rows(tokenizer, rows=3, width=17) -> torch.Tensor:
    ids = torch.randint(8, len(tokenizer), (rows, width))
    ids[0, [0, 4, 5, 11]] = tokenizer.eos_token_id  # a row that begins with an end, an empty message
    ids[1, [3, 16]] = tokenizer.eos_token_id
    return ids


def walk(model, ids, seed):
    """(T, H) the decoder's states of one row, a token at a time, as the docstring of
    hierarchical_trunk.py has it."""
    config, end = model.config, set(model.config.message_end_ids)
    numbers = torch.tensor([seed])

    def noise(number):
        return standard_normal(derived(numbers, number), config.latent_size)

    z_conv = noise(-1) if config.conversation_latent else torch.zeros(1, 0)
    context = model.first_context(z_conv).tanh() if config.conversation_latent else torch.zeros(1, 16)

    def start(number):
        """The decoder's start in a message, and what it reads beside each word of it."""
        z = torch.zeros(1, 0)
        if config.message_latent:
            prior = model.prior(context, z_conv)
            z = prior.mean + prior.variance.sqrt() * noise(number)
        known = torch.cat([context, z, z_conv], 1)
        return model.start(known).tanh().view(2, 1, 16), model.reminder(known)

    encoder, (decoder, reminder), number, said = torch.zeros(2, 1, 16), start(0), 0, []
    for token in ids:
        word = model.embedding(token)[None, None]
        _, encoder = model.encoder(word, encoder)
        if int(token) in end:
            _, context = model.context(torch.cat([encoder[-1], z_conv], 1)[None], context[None])
            context, encoder, number = context[0], torch.zeros(2, 1, 16), number + 1
            decoder, reminder = start(number)
        _, decoder = model.decoder(word + reminder, decoder)
        said.append(decoder[-1, 0])
    return torch.stack(said)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_states_are_those_of_a_walk_token_by_token(tokenizer, family):
    model = make(tokenizer, family).lm.model
    ids, seeds = some_rows(tokenizer), torch.tensor([5, 6, 7])
    hidden = model(ids, noise=seeds).last_hidden_state
    for row, seed in enumerate(seeds.tolist()):
        torch.testing.assert_close(hidden[row], walk(model, ids[row], seed), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_a_cache_goes_on_from_is_what_was_read(tokenizer, family):
    policy = make(tokenizer, family, ILQL())  # with a value trunk of its own
    ids, seeds = some_rows(tokenizer), torch.tensor([5, 6, 7])
    whole = policy(ids, noise=seeds, use_cache=False).logits
    for cuts in ([1] * 17, [4, 1, 7, 5], [5, 12]):
        cache, parts, at = MessageStates(1), [], 0
        for length in cuts:
            out = policy(ids[:, at : at + length], noise=seeds, past_key_values=cache, use_cache=True)
            cache, at = out.past_key_values, at + length
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
        assert cache.get_seq_length() == 17


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_on_either_side_and_company_change_nothing(tokenizer, family):
    model = make(tokenizer, family).lm.model
    ids, seeds = some_rows(tokenizer), torch.tensor([5, 6, 7])
    alone = model(ids[1:2, :9], noise=seeds[1:2]).last_hidden_state
    for begin in (0, 4, 8):  # padded with ends, which must not be read as any
        padded = torch.full((3, 17), tokenizer.eos_token_id)
        padded[0], padded[1, begin : begin + 9] = ids[0], ids[1, :9]
        mask = torch.zeros(3, 17, dtype=torch.bool)
        mask[0], mask[1, begin : begin + 9], mask[2, :1] = True, True, True
        hidden = model(padded, mask, noise=seeds).last_hidden_state
        torch.testing.assert_close(hidden[1:2, begin : begin + 9], alone, atol=1e-5, rtol=1e-5)
        assert not hidden[1][~mask[1]].any()


@torch.no_grad()
def test_a_state_has_one_size_however_long_the_conversation(tokenizer):
    model, cache, sizes = make(tokenizer, "vhcr").lm.model, MessageStates(), set()
    for _ in range(10):
        model(some_rows(tokenizer), past_key_values=cache, noise=torch.tensor([1, 2, 3]))
        sizes.add(sum(value.numel() for value in vars(cache.state).values()))
    assert sizes == {3 * (2 * 16 + 16 + 2 * 16 + 16 + 3 + 1 + 1)} and cache.read == 170


@torch.no_grad()
def test_a_latent_without_variance_is_hred_with_its_mean(tokenizer):
    vhred, hred = make(tokenizer, "vhred").lm.model, make(tokenizer, "hred").lm.model
    mean = torch.tensor([0.3, -1.0, 0.7])
    nn.init.zeros_(vhred.prior.mean.weight)
    vhred.prior.mean.bias.copy_(mean)
    nn.init.zeros_(vhred.prior.spread.weight)
    nn.init.constant_(vhred.prior.spread.bias, -40.0)
    shared = {name: value for name, value in vhred.state_dict().items() if name in hred.state_dict()}
    names = ("start.weight", "reminder.weight")  # (L H, H + Z) and (H, H + Z)
    weights = {name: shared.pop(name) for name in names}
    hred.load_state_dict(shared | {name: weights[name][:, :16] for name in names}, strict=True)
    for name in names:
        hred.get_submodule(name.partition(".")[0]).bias += weights[name][:, 16:] @ mean
    ids = some_rows(tokenizer)
    expected = hred(ids).last_hidden_state
    torch.testing.assert_close(vhred(ids).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    drawn = vhred(ids, noise=torch.tensor([1, 2, 3])).last_hidden_state
    torch.testing.assert_close(drawn, expected, atol=2e-3, rtol=1e-3)  # its variance is 1e-8


@torch.no_grad()
def test_seeds_draw_and_their_absence_is_the_mean(tokenizer):
    model, ids = make(tokenizer, "vhcr").lm.model, some_rows(tokenizer)
    mean = model(ids).last_hidden_state
    mixed = model(ids, noise=torch.tensor([AT_MEAN, 4, AT_MEAN])).last_hidden_state
    torch.testing.assert_close(mixed[[0, 2]], mean[[0, 2]])
    assert (mixed[1] - mean[1]).abs().max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_in_a_batch_are_those_alone_and_those_of_slots_and_engine(tokenizer, family):
    policy = make(tokenizer, family, ILQL())
    decoding, talks, seeds = Decoding(max_new_tokens=12), [HELLO, LONGER, HELLO], [11, 12, 13]
    together = generate_replies(policy, tokenizer, talks, decoding, seeds=seeds)
    alone = [
        generate_replies(policy, tokenizer, [talk], decoding, seeds=[seed])[0]
        for talk, seed in zip(talks, seeds, strict=True)
    ]
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    engine = Engine(policy, tokenizer, slots=2)
    said = [_served(engine, tokenizer, talk, decoding, seed) for talk, seed in zip(talks, seeds, strict=True)]
    engine.close()
    assert said == [reply.text for reply in alone]
    assert can_keep(policy, decoding)


def _served(engine, tokenizer, talk, decoding, seed):
    pieces, text = queue.Queue(), ""
    engine.submit(Ask(encode_prompt(talk, tokenizer, max_length=128), decoding, seed), pieces.put)
    while True:
        piece = pieces.get(timeout=120)
        assert not isinstance(piece, Exception), piece
        text += piece.text
        if piece.finish:
            return text.strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_its_slot(tokenizer, family):
    """Two turns: what was read of the first is not read again (but by VHCR, whose latent has new noise), and
    says the same."""
    policy = make(tokenizer, family)
    decoding = Decoding(max_new_tokens=8)
    running = Conversations(policy, tokenizer, decoding, rows=2)
    talk = list(HELLO)
    for turn in range(3):
        (reply,) = running.answer({"a": talk}, [20 + turn])
        (expected,) = generate_replies(policy, tokenizer, [talk], decoding, seeds=[20 + turn])
        assert reply.tokens == expected.tokens
        held = list(running.held[0])
        talk += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "more"}]
        prompt = held + [tokenizer.eos_token_id, 9, 9]
        assert running.slots.reusable(held, prompt) == (0 if family == "vhcr" else len(held))
        assert running.slots.reusable(held, prompt[:-3]) == 0  # nothing new
        assert running.slots.reusable(held, [*held, 9]) == 0  # the reply's message has begun
        assert running.slots.reusable([*held, 8], prompt) == 0  # another beginning


def test_beams_and_greedy_need_no_seeds(tokenizer):
    policy = make(tokenizer, "vhred", ILQL())
    decoding = Decoding(max_new_tokens=6, do_sample=False)
    (greedy,) = generate_replies(policy, tokenizer, [LONGER], decoding, seeds=[1])
    ids = torch.tensor([encode_prompt(LONGER, tokenizer, max_length=99)])
    with torch.no_grad():
        for token in greedy.tokens:
            assert policy(ids, use_cache=False).logits[0, -1].argmax() == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
    beams = beam_replies(policy, tokenizer, LONGER, Decoding(max_new_tokens=6, do_sample=False, num_beams=3))
    assert len({beam.tokens for beam in beams}) == 3
    scores = [_mean_logp(policy, tokenizer, beam) for beam in beams]
    assert [beam.score for beam in beams] == pytest.approx(scores, abs=1e-4)


@torch.no_grad()
def _mean_logp(policy, tokenizer, beam):
    """The mean log-probability of a beam's tokens without a cache."""
    prompt = encode_prompt(LONGER, tokenizer, max_length=99)
    said = [*beam.tokens, *([tokenizer.eos_token_id] if beam.finished else [])]
    logp = policy(torch.tensor([prompt + said]), use_cache=False).logits[0].log_softmax(-1)
    return float(np.mean([logp[len(prompt) - 1 + i, token] for i, token in enumerate(said)]))


def test_trunks_that_do_not_decode_keep_no_state(tokenizer):
    """Values of psi beside a target trunk of its own: `generate` holds what `forward` reads."""
    policy = make(tokenizer, "hred", Psi(), target_trunk="separate")
    ids = torch.tensor([encode_prompt(HELLO, tokenizer, max_length=99)])
    said = policy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)[0]
    for at in range(ids.shape[1], len(said)):
        assert policy(said[None, :at], use_cache=False).logits[0, -1].argmax() == said[at]


def test_generate_draws_new_latents_each_time(tokenizer):
    lm = make(tokenizer, "vhred").lm
    nn.init.constant_(lm.model.prior.spread.bias, 9.0)
    ids = torch.tensor([encode_prompt(HELLO, tokenizer, max_length=99)] * 64)
    settings = {"max_new_tokens": 1, "attention_mask": torch.ones_like(ids)}
    first = lm.generate(ids, **settings)[:, -1]
    expected = lm(ids[:1]).logits[0, -1].softmax(-1)
    assert not torch.equal(first, lm.generate(ids, **settings)[:, -1])
    assert len(first.unique()) > 1 and expected.isfinite().all()


def seeds_read(model) -> list:
    """Where each pass of the model leaves the seeds that it was given."""
    seeds, names = [], list(inspect.signature(model.forward).parameters)

    def keep(_, args, inputs):
        seeds.append((dict(zip(names, args, strict=False)) | inputs)["noise"])

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return seeds


@pytest.mark.parametrize("wrapped", [False, True])
@torch.no_grad()
def test_a_loop_of_ones_own_goes_on_from_what_is_returned(tokenizer, wrapped):
    """As with any model of transformers; a cache of keys and values, which would stay empty, is refused, and
    `generate` makes its own instead."""
    policy = make(tokenizer, "vhred", ILQL())
    model, ids = policy if wrapped else policy.lm, some_rows(tokenizer)
    cache, logits = None, []
    for t in range(17):
        out = model(ids[:, t : t + 1], past_key_values=cache)
        cache, logits = out.past_key_values, [*logits, out.logits]
    expected = model(ids, use_cache=False)
    torch.testing.assert_close(torch.cat(logits, 1), expected.logits, atol=1e-4, rtol=1e-4)
    assert expected.past_key_values is None
    with pytest.raises(UserError, match="expected no cache or one that this model returned, got a Dynamic"):
        model(ids, past_key_values=DynamicCache())
    settings = {"max_new_tokens": 4, "do_sample": False}
    said = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(), **settings), said)


def test_replies_to_one_prompt_have_latents_of_their_own(tokenizer):
    """As those of several calls; beams, which are compared, have one."""
    policy = make(tokenizer, "vhred")
    seeds = seeds_read(policy.lm.model)
    ids = torch.tensor([encode_prompt(HELLO, tokenizer, max_length=99)] * 2)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "num_return_sequences": 3}
    said = policy.generate(ids, **settings)
    assert len(said) == 6 and len(seeds[0].unique()) == 6 and torch.equal(seeds[0], seeds[1])
    seeds.clear()
    policy.generate(ids, num_beams=3, **settings)
    assert seeds[0].view(2, 3).unique(dim=1).shape == (2, 1)
    seeds.clear()
    policy.generate(ids, noise=torch.tensor([5, 6]), **settings)
    assert seeds[0].tolist() == [5, 5, 5, 6, 6, 6]


@pytest.mark.parametrize("positional", [False, True])
def test_who_leaves_open_whether_to_sample_gets_latents_too(tokenizer, positional):
    """transformers takes what a generation_config does not say from the model's own, which samples."""
    lm = make(tokenizer, "vhred").lm
    config = GenerationConfig(max_new_tokens=1)
    ids = torch.tensor([encode_prompt(HELLO, tokenizer, max_length=99)])
    seeds = seeds_read(lm.model)
    lm.generate(ids, config) if positional else lm.generate(ids, generation_config=config)
    assert seeds[0] is not None
    lm.generate(ids, GenerationConfig(max_new_tokens=1, do_sample=False))
    assert seeds[1] is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_are_drawn_in_the_format_of_the_weights(tokenizer, family, dtype, tmp_path):
    policy = make(tokenizer, family)
    policy.lm.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    ids, seeds = some_rows(tokenizer), torch.tensor([5, 6, 7])
    logits = half(ids, noise=seeds).logits
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), policy(ids, noise=seeds).logits, atol=0.2, rtol=0.1)
    assert half.generate(ids, max_new_tokens=2, do_sample=True).shape == (3, 19)


@torch.no_grad()
def test_a_checkpoint_whose_decoder_reads_its_context_at_its_start_alone_goes_on_as_it_was(
    tokenizer, tmp_path
):
    """Its config.json names neither the other way nor the words' levels, nor do its weights have them: it is
    new models without what they read beside each word, and without these levels."""
    policy, ids, seeds = make(tokenizer, "vhcr"), some_rows(tokenizer), torch.tensor([5, 6, 7])
    for parameter in (*policy.lm.model.reminder.parameters(), policy.lm.lm_head.bias):
        nn.init.zeros_(parameter)
    older = copy.deepcopy(policy.lm)
    older.model.reminder, older.lm_head.bias = None, None
    older.config.decoder_reads_context = older.config.output_bias = False
    older.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text()
    for name in ("decoder_reads_context", "output_bias"):
        text = text.replace(f'"{name}": false,', "")
    file.write_text(text)
    opened = load_lm(ModelConfig(model_name_or_path=str(tmp_path)), tokenizer).eval()
    cache, expected = MessageStates(), policy.lm(ids, noise=seeds).logits
    parts = [
        opened(part, noise=seeds, past_key_values=cache, use_cache=True).logits for part in ids.split(6, 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    assert cache.state.reminder.shape == (3, 0)


@torch.no_grad()
def test_a_new_model_says_each_word_as_often_as_it_is_said(tokenizer):
    """And a word that was never said once in all."""
    policy, counts = make(tokenizer, "hred"), torch.arange(len(tokenizer))
    policy.lm.lm_head.weight.zero_()
    policy.lm.start_at(counts)
    shares = policy(torch.tensor([[9, 8]])).logits.softmax(2)
    torch.testing.assert_close(shares, ((counts + 1) / (counts + 1).sum()).expand(1, 2, -1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_says_the_same(tokenizer, family, tmp_path):
    policy = make(tokenizer, family, ILQL(), bow_weight=1.0, word_drop=0.2, sentence_drop=0.2)
    policy.save_pretrained(tmp_path)
    # a copy: a file is mapped wherever its header ends, and how kernels round depends on where weights lie
    again = copy.deepcopy(Policy.from_pretrained(tmp_path))
    ids, noise = some_rows(tokenizer), torch.tensor([1, 2, 3])
    assert again.config.to_diff_dict() == policy.config.to_diff_dict()
    with torch.no_grad():
        assert torch.equal(again(ids, noise=noise).logits, policy(ids, noise=noise).logits)


def test_messages_end_where_the_template_says(tokenizer):
    assert message_ends(tokenizer) == [tokenizer.eos_token_id]
    template, tokenizer.chat_template = (
        tokenizer.chat_template,
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"),
    )
    try:
        with pytest.raises(UserError, match="ends every message with a special token.*behind what the user"):
            load_lm(ModelConfig(family="hred", width=16), tokenizer)
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("word_drop", 1.5, "from 0 to 1"), ("latent_size", 0, "of at least 1"), ("free_bits", -1.0, "least 0")],
)
def test_settings_that_make_no_sense_are_refused(tokenizer, field, value, expected):
    with pytest.raises(UserError, match=f"--model.{field}: expected a number .*{expected}, got {value:g}"):
        load_lm(ModelConfig(family="vhred", width=16, **{field: value}), tokenizer)


def test_what_a_state_cannot_do_is_refused(tokenizer):
    policy = make(tokenizer, "hred")
    with pytest.raises(UserError, match="cannot be cut to a beginning"):
        MessageStates().crop(1)
    with pytest.raises(UserError, match="hierarchical model, whose GRUs LoRA cannot adapt"):
        Policy(policy.lm, BC(), ModelConfig(use_peft=True))
    slots = policy.new_slots(2, 8)
    with pytest.raises(UserError, match="at most 8 tokens in a conversation, got 9"):
        slots.aim(0, torch.tensor([[8]]), torch.tensor([[True]]))


def test_padded_rows_of_a_batch_are_learned_from_as_alone(tokenizer):
    """The bound of rows in one batch is the sum of theirs alone."""
    policy = make(tokenizer, "vhcr")
    reply = {"role": "assistant", "content": "tea"}
    talks = [[*HELLO, reply], [*LONGER, reply]]
    rows = [tokenize(Dialog(str(i), talk), tokenizer)[0] for i, talk in enumerate(talks)]

    def bound(chosen, seeds):
        batch = collate(chosen)
        batch.noise = torch.tensor(seeds)
        with torch.no_grad():
            out = policy.outputs(batch, learning=True)
            return out.latents.added_to(policy.method.loss(out, batch)).total.item()

    assert bound(rows, [3, 4]) == pytest.approx(bound(rows[:1], [3]) + bound(rows[1:], [4]), abs=1e-4)
