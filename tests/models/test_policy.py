"""The policy decodes what its method says, through every road of `generate`: caches, ragged batches, beams,
samplers, streamers."""

import copy
import hashlib
import itertools
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    CohereConfig,
    DynamicCache,
    Gemma2Config,
    GraniteConfig,
    T5Config,
    TextIteratorStreamer,
    TextStreamer,
)

from rl_dialog.data import beginnings
from rl_dialog.data.batch import collate
from rl_dialog.errors import UserError
from rl_dialog.methods import BC, CHAI, ILQL, UtteranceILQL, WayOffPolicy
from rl_dialog.methods.scores import Dense
from rl_dialog.models import policy as policy_module
from rl_dialog.models.checkpoint import freeze_prior, save_policy
from rl_dialog.models.heads import ValueHeads
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.trunk_caches import TrunkCaches

PLAIN = [("bc", "mlp", "shared"), ("way_off_policy", "mlp", "shared")]
STEERED = [
    ("ilql", heads, trunk)
    for heads in ("mlp", "dueling", "advanced_mlp", "lowrank")
    for trunk in ("shared", "separate")
]
STEERED += [
    ("ilql", "mlp", "shared", "separate"),
    ("ilql", "lowrank", "separate", "separate"),
]  # the last one is the target trunk
METHODS = {"bc": BC(), "way_off_policy": WayOffPolicy(), "ilql": ILQL(beta=2.0)}
COMBINATIONS = [(family, *rest) for family in ("gpt2", "llama") for rest in PLAIN + STEERED]
PROMPT = torch.tensor([[3, 77, 78, 79, 1, 4]])


def named(combination):
    return "-".join(combination)


@pytest.fixture
def policy(request, make_policy):
    return built(make_policy, *request.param)


def built(make_policy, family, method, heads, trunk, target="shared"):
    return make_policy(METHODS[method], family, heads=heads, trunk=trunk, target=target)


def every(combinations):
    return pytest.mark.parametrize("policy", combinations, ids=named, indirect=True)


def greedy(policy, ids, *, new=8, **options):
    return policy.generate(ids, do_sample=False, min_new_tokens=new, max_new_tokens=new, **options)


@pytest.fixture
def rows(make_row):
    """Rows of 8, 5 and 6 tokens; the second is truncated."""
    return [
        make_row([3, 70, 1, 4, 71, 72, 73, 1], [(4, 7, 1.0)]),
        make_row([3, 90, 4, 91, 3], [(3, 3, -1.0)], truncated=True),
        make_row([3, 80, 81, 1, 4, 1], [(5, 5, 0.5)]),
    ]


# --- generation ---------------------------------------------------------------------------------------------


@every(COMBINATIONS)
def test_cached_decoding_is_uncached_decoding(policy):
    """The same greedy tokens, and at every step the logits of a full pass over the tokens so far."""
    cached = greedy(policy, PROMPT, use_cache=True, output_logits=True, return_dict_in_generate=True)
    uncached = greedy(policy, PROMPT, use_cache=False)
    assert torch.equal(cached.sequences, uncached)
    with torch.no_grad():
        full = policy(cached.sequences, use_cache=False).logits[:, PROMPT.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(cached.logits, 1), full, rtol=1e-4, atol=1e-4)
    assert (
        len(set(cached.sequences[0, PROMPT.shape[1] :].tolist())) > 1
    )  # not one token over and over, which any bug would repeat


@every(COMBINATIONS)
def test_a_ragged_batch_is_its_prompts_one_by_one(policy, tokenizer):
    """Prompts of 6, 3 and 9 tokens, padded on the left."""
    prompts = [PROMPT[0].tolist(), [3, 1, 4], [3, 100, 101, 102, 103, 104, 105, 1, 4]]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    together = greedy(
        policy,
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        output_logits=True,
        return_dict_in_generate=True,
    )
    for i, prompt in enumerate(prompts):
        alone = greedy(policy, torch.tensor([prompt]), output_logits=True, return_dict_in_generate=True)
        assert together.sequences[i, -8:].tolist() == alone.sequences[0, -8:].tolist()
        torch.testing.assert_close(
            torch.stack(together.logits, 1)[i], torch.stack(alone.logits, 1)[0], rtol=1e-4, atol=1e-4
        )


@every(COMBINATIONS)
def test_beam_scores_are_the_policy_s_log_probabilities(policy):
    """Without length penalty a beam's score is the sum of log softmax(policy logits) over its new tokens;
    caches are reordered on the way."""
    length = PROMPT.shape[1]
    found = greedy(
        policy,
        PROMPT,
        new=6,
        num_beams=3,
        num_return_sequences=3,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        logp = policy(found.sequences, use_cache=False).logits.log_softmax(-1)[:, length - 1 : -1]
    end = policy.generation_config.eos_token_id
    taken = logp.gather(2, found.sequences[:, length:, None]).squeeze(2)
    assert end not in found.sequences[:, length:]
    assert len(set(map(tuple, found.sequences.tolist()))) == 3
    torch.testing.assert_close(found.sequences_scores, taken.sum(1), rtol=1e-4, atol=1e-3)
    assert found.sequences_scores.tolist() == sorted(found.sequences_scores.tolist(), reverse=True)


@every([("gpt2", "ilql", "mlp", "separate")])
def test_beams_as_wide_as_the_vocabulary_are_exact(policy):
    """With V beams nothing is pruned after one token: the best pair of tokens is that of a search through all
    V * V of them."""
    vocabulary = policy.config.vocab_size
    found = greedy(
        policy,
        PROMPT,
        new=2,
        num_beams=vocabulary,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    end = policy.generation_config.eos_token_id
    with torch.no_grad():
        first = policy(PROMPT, logits_to_keep=1).logits[0, -1].log_softmax(-1)
        continued = torch.cat([PROMPT.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], 1)
        second = policy(continued, logits_to_keep=1).logits[:, -1].log_softmax(-1)
    total = first[:, None] + second
    total[end], total[:, end] = -torch.inf, -torch.inf  # min_new_tokens forbids the end
    best = divmod(total.argmax().item(), vocabulary)
    assert found.sequences[0, -2:].tolist() == list(best)
    assert found.sequences_scores.item() == pytest.approx(total.max().item(), abs=1e-3)


@every([("gpt2", "bc", "mlp", "shared"), ("llama", "ilql", "lowrank", "separate")])
def test_sampling_follows_the_seed(policy):
    def sample(seed):
        torch.manual_seed(seed)
        return policy.generate(
            PROMPT.expand(3, -1),
            do_sample=True,
            min_new_tokens=10,
            max_new_tokens=10,
            temperature=0.9,
            top_p=0.95,
        ).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1)[0] != sample(1)[1]


@every([("gpt2", "ilql", "mlp", "shared")])
def test_samples_follow_the_method_s_distribution(policy):
    """4000 draws of one token: the share of the token that steering moves most is its steered probability,
    within 5 standard deviations."""
    with torch.no_grad():
        p = policy(PROMPT, logits_to_keep=1).logits[0, -1].softmax(-1)
        plain = policy.lm(PROMPT).logits[0, -1].softmax(-1)
    torch.manual_seed(0)
    drawn = policy.generate(PROMPT.expand(4000, -1), max_new_tokens=1)[:, -1]
    token = (p - plain).abs().argmax()
    share, wanted = (drawn == token).float().mean().item(), p[token].item()
    deviation = (wanted * (1 - wanted) / 4000) ** 0.5
    assert abs(share - wanted) < 5 * deviation < abs(plain[token].item() - wanted)


def test_nothing_is_cut_off_the_policy_unasked(tokenizer):
    """transformers keeps the 50 likeliest tokens by default; a new model's near uniform policy must reach
    more than that in 2000 draws."""
    config = ModelConfig(layers=1, attention_heads=2, width=16)
    policy = Policy(load_lm(config, tokenizer), BC(), config)
    assert len(set(policy.generate(PROMPT.expand(2000, -1), max_new_tokens=1)[:, -1].tolist())) > 200


@every([("gpt2", "way_off_policy", "mlp", "shared"), ("llama", "ilql", "mlp", "separate")])
def test_streamers_print_what_generate_returns(policy, tokenizer, capsys):
    whole = tokenizer.decode(greedy(policy, PROMPT)[0, PROMPT.shape[1] :])
    greedy(policy, PROMPT, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == whole.rstrip("\n")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=240)
    thread = threading.Thread(target=greedy, args=(policy, PROMPT), kwargs={"streamer": streamer})
    thread.start()
    parts = list(streamer)
    thread.join(240)
    assert "".join(parts) == whole
    assert len(parts) > 2


@every([("gpt2", "bc", "mlp", "shared"), ("gpt2", "ilql", "mlp", "separate")])
def test_generation_stops_at_the_end_of_turn(policy, tokenizer):
    """With the end of turn certain, one token is generated; the policy carries the tokenizer's ids."""
    end = tokenizer.eos_token_id
    assert (policy.generation_config.eos_token_id, policy.generation_config.pad_token_id) == (
        end,
        tokenizer.pad_token_id,
    )
    policy.method = AlwaysEnd(end)
    assert policy.generate(PROMPT, do_sample=False, max_new_tokens=5)[0, PROMPT.shape[1] :].tolist() == [end]


class AlwaysEnd(ILQL):
    """Decodes one token for certain."""

    def __init__(self, token):
        super().__init__()
        object.__setattr__(self, "token", token)

    def decode(self, out):
        logits = torch.zeros_like(out.lm.dense())
        logits[:, self.token] = 1e4
        return logits


# --- forward ------------------------------------------------------------------------------------------------


@every(COMBINATIONS)
def test_forward_is_the_method_s_decoding(policy, rows):
    """Logits of a plain forward pass at the decisions are `decode` of tables built from what training sees
    there."""
    batch = collate(rows)
    with torch.no_grad():
        out = policy.outputs(batch)
        logits = policy(batch.input_ids).logits.flatten(0, 1)[batch.states]
    expected = out.lm.dense()
    if isinstance(policy.method, ILQL):
        q = torch.minimum(*(head.dense() for head in out.q_target))
        expected = expected.log_softmax(-1) + 2.0 * (q - out.v[:, None])
        assert (expected - out.lm.dense().log_softmax(-1)).abs().max() > 0.1  # the heads do steer
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@every(COMBINATIONS)
def test_logits_to_keep(policy):
    """1: the last position, as decoding asks; indices: those positions; 0: all of them."""
    with torch.no_grad():
        full = policy(PROMPT).logits
        assert full.shape == (1, 6, policy.config.vocab_size)
        torch.testing.assert_close(
            policy(PROMPT, logits_to_keep=1).logits, full[:, -1:], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            policy(PROMPT, logits_to_keep=torch.tensor([0, 3])).logits, full[:, [0, 3]], rtol=1e-4, atol=1e-5
        )


@every(
    [
        ("gpt2", "ilql", "mlp", "separate"),
        ("llama", "ilql", "lowrank", "shared"),
        ("gpt2", "bc", "mlp", "shared"),
    ]
)
@pytest.mark.parametrize("explicit", [True, False], ids=["use_cache=True", "default"])
def test_a_returned_cache_continues(policy, explicit):
    """Token by token by hand, the first call without any cache, as a user's own loop would."""
    options = {"use_cache": True} if explicit else {}
    with torch.no_grad():
        full = policy(PROMPT).logits
        out = policy(PROMPT[:, :4], **options)
        cache = out.past_key_values
        assert cache.get_seq_length() == 4
        for t in (4, 5):
            out = policy(PROMPT[:, t : t + 1], past_key_values=cache, **options)
            torch.testing.assert_close(out.logits[:, -1], full[:, t], rtol=1e-4, atol=1e-4)


@every(
    [
        ("gpt2", "ilql", "mlp", "separate"),
        ("gpt2", "ilql", "mlp", "shared", "separate"),
        ("llama", "ilql", "mlp", "separate", "separate"),
    ]
)
def test_a_cropped_cache_forgets_all_trunks(policy):
    """Assisted decoding and regeneration crop the cache; those of the value and the target trunk must
    follow."""
    with torch.no_grad():
        full = policy(PROMPT).logits
        cache = policy(PROMPT, use_cache=True).past_key_values
        assert isinstance(cache, TrunkCaches)
        cache.crop(-2)
        trunks = [
            trunk for trunk in (policy.lm, policy.value_trunk, policy.target_trunk) if trunk is not None
        ]
        assert [each.get_seq_length() for each in (cache, *cache.others)] == [4] * len(trunks)
        out = policy(PROMPT[:, 4:], past_key_values=cache)
        torch.testing.assert_close(out.logits, full[:, 4:], rtol=1e-4, atol=1e-4)
        cache.reset()
        torch.testing.assert_close(policy(PROMPT, past_key_values=cache).logits, full, rtol=1e-4, atol=1e-4)


@every(
    [
        ("gpt2", "ilql", "mlp", "separate"),
        ("llama", "ilql", "mlp", "shared"),
        ("llama", "ilql", "mlp", "separate", "separate"),
    ]
)
def test_prompt_lookup_decoding_is_greedy_decoding(policy):
    """Guessed tokens that the policy rejects are cropped from the caches again."""
    prompt = torch.tensor([[3, 77, 78, 79, 1, 4, 77, 78]])
    expected = greedy(policy, prompt, new=12)
    repeated = torch.cat(
        [prompt, expected[:, prompt.shape[1] :], prompt], 1
    )  # some guesses are right, some are not
    assert torch.equal(
        greedy(policy, repeated, new=12, prompt_lookup_num_tokens=3), greedy(policy, repeated, new=12)
    )


@every([("gpt2", "ilql", "mlp", "separate")])
def test_a_foreign_cache_is_refused(policy):
    """The LM's own cache lacks that of the value trunk: a loop that went on from it would begin anew at each
    word. `generate` makes one that does not."""
    cache = DynamicCache()
    for count in ("nothing", "6 tokens"):
        expected = f"expected no cache or one that this policy returned, got a DynamicCache with {count}"
        with pytest.raises(UserError, match=expected):
            policy(PROMPT[:, :1], past_key_values=cache)
        policy.lm(PROMPT, past_key_values=cache)
    settings = {"max_new_tokens": 4, "do_sample": False}
    said = policy.generate(PROMPT, past_key_values=DynamicCache(), **settings)
    assert torch.equal(said, policy.generate(PROMPT, **settings))


@every(COMBINATIONS)
def test_attention_stays_sdpa(policy):
    assert policy.config._attn_implementation == "sdpa"
    assert policy.lm.config._attn_implementation == "sdpa"
    if policy.value_trunk is not None:
        assert policy.value_trunk.config._attn_implementation == "sdpa"


# --- outputs ------------------------------------------------------------------------------------------------


def tables(out):
    """Every score of an Outputs as dense tensors."""
    found = {
        "lm": out.lm.dense(),
        "v": out.v,
        "lm_target": out.lm_target[0].dense() if out.lm_target else None,
    }
    found |= {
        f"{name}{i}": head.dense() for name in ("q", "q_target") for i, head in enumerate(getattr(out, name))
    }
    return {name: value for name, value in found.items() if value is not None}


@every(COMBINATIONS)
def test_a_padded_batch_gives_each_row_its_own_outputs(policy, rows):
    policy.start_training()
    batch = collate(rows)
    width, states = batch.input_ids.shape[1], batch.states
    with torch.no_grad():
        together = tables(policy.outputs(batch))
        for b, row in enumerate(rows):
            alone = tables(policy.outputs(collate([row])))
            assert alone.keys() == together.keys()
            for name, value in alone.items():
                torch.testing.assert_close(
                    together[name][states // width == b],
                    value,
                    rtol=1e-4,
                    atol=1e-4,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
    wanted = {
        "bc": {"lm"},
        "way_off_policy": {"lm", "v", "lm_target"},
        "ilql": {"lm", "v", "q0", "q1", "q_target0", "q_target1"},
    }
    assert together.keys() == wanted[next(k for k, m in METHODS.items() if type(m) is type(policy.method))]


@every(COMBINATIONS)
def test_the_loss_of_a_batch_is_that_of_its_dense_tables(policy, rows):
    """The chunked, gathered scores and plain tables of the same numbers give the same loss."""
    policy.start_training()
    batch = collate(rows)
    with torch.no_grad():
        batch.prior_logp, batch.prior_lse = (
            policy.prior_logp(batch),
            policy.prior_scores(batch).reduce("logsumexp"),
        )
        out = policy.outputs(batch)
        dense = copy.copy(out)
        dense.lm, dense.q, dense.q_target = (
            Dense(out.lm.dense()),
            tuple(Dense(q.dense()) for q in out.q),
            tuple(Dense(q.dense()) for q in out.q_target),
        )
        dense.lm_target = tuple(Dense(target.dense()) for target in out.lm_target)
        got, expected = policy.method.loss(out, batch), policy.method.loss(dense, batch)
    torch.testing.assert_close(got.total, expected.total, rtol=1e-4, atol=1e-4)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(
            got.metrics[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@every([("gpt2", "way_off_policy", "mlp", "shared"), ("llama", "way_off_policy", "mlp", "shared")])
def test_the_target_copy_runs_on_its_own_trunk(policy, rows):
    """Once the online LM has moved on, the target's scores are still those of the whole model it was copied
    from."""
    batch = collate(rows)
    with torch.no_grad():
        before = policy.lm(batch.input_ids).logits.flatten(0, 1)[batch.states]
        policy.start_training()
        for p in policy.lm.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        out = policy.outputs(batch)
    torch.testing.assert_close(out.lm_target[0].dense(), before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out.lm.dense(), before, atol=0.1)
    assert not out.lm_target[0].features.requires_grad


@every([("gpt2", "bc", "mlp", "shared"), ("llama", "ilql", "lowrank", "shared")])
def test_prior_log_probabilities(policy, rows):
    """log softmax of the LM (not of the steered policy) at the action; the same in training mode."""
    batch = collate(rows)
    with torch.no_grad():
        logp = (
            policy.lm(batch.input_ids).logits.log_softmax(-1).flatten(0, 1)[batch.states[: batch.decisions]]
        )
    expected = logp.gather(1, batch.actions[:, None]).squeeze(1)
    torch.testing.assert_close(policy.prior_logp(batch), expected, rtol=1e-4, atol=1e-5)
    assert not policy.prior_logp(batch).requires_grad


def test_a_reply_is_valued_in_the_state_that_its_last_token_leads_to(make_policy, make_row):
    """One number per reply, from the hidden state at its last token, in a padded batch as alone."""
    policy = make_policy(UtteranceILQL())
    rows = [
        make_row([3, 70, 4, 71, 1, 3, 4, 72, 73, 1], [(3, 4, 1.0), (7, 9, 0.0)]),
        make_row([3, 90, 4, 91, 92], [(3, 4, 0.0)], truncated=True),
    ]
    with torch.no_grad():
        out = policy.outputs(collate(rows))
        alone = [
            policy.lm.base_model(torch.tensor([row.input_ids.tolist()])).last_hidden_state[0] for row in rows
        ]
        last = torch.cat([hidden[row.reply_ends] for hidden, row in zip(alone, rows, strict=True)])
        for heads, found in (
            (policy.heads.utterance_q, out.utterance_q),
            (policy.heads.utterance_q_target, out.utterance_q_target),
        ):
            for head, values in zip(heads, found, strict=True):
                torch.testing.assert_close(values, head(last), rtol=1e-4, atol=1e-4)
    assert out.utterance_q[0].shape == (3,) and len(set(out.utterance_q[0].tolist())) == 3


def test_polyak_averaging_of_reply_values(make_policy):
    policy = make_policy(UtteranceILQL())
    before = [p.detach().clone() for p in policy.heads.utterance_q_target.parameters()]
    policy.update_targets(0.25)
    for got, start, online in zip(
        policy.heads.utterance_q_target.parameters(),
        before,
        policy.heads.utterance_q.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(got, 0.75 * start + 0.25 * online)
        assert not got.requires_grad


# --- gradients and targets ----------------------------------------------------------------------------------


def loss_of(policy, rows):
    batch = collate(rows)
    if policy.method.uses_prior:
        batch.prior_logp = torch.full((batch.decisions,), -1.0)
        batch.prior_lse = torch.zeros(len(batch.states))
    return policy.method.loss(policy.outputs(batch), batch).total


def with_gradient(policy):
    return {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}


@every(COMBINATIONS)
def test_targets_get_no_gradient_and_the_rest_does(policy, rows):
    policy.start_training().train()
    loss_of(policy, rows).backward()
    reached = with_gradient(policy)
    assert not any(name.startswith(("heads.q_target.", "lm_target.", "target_trunk.")) for name in reached)
    wanted = {name.split(".")[0] for name, _ in policy.named_parameters()} - {"lm_target", "target_trunk"}
    assert {name.split(".")[0] for name in reached} == wanted
    for head in ("heads.q.0.", "heads.q.1.") * bool(policy.method.heads.q) + (
        "heads.v.",
    ) * policy.method.heads.v:
        assert any(name.startswith(head) for name in reached)


@pytest.mark.parametrize("heads", ["mlp", "advanced_mlp", "lowrank"])
@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_a_separate_trunk_keeps_values_out_of_the_language_model(make_policy, rows, heads, trunk):
    """Without a cloning term the LM of a separate trunk gets nothing; a shared one does."""
    policy = make_policy(ILQL(awac_weight=0.0), heads=heads, trunk=trunk)
    loss_of(policy, rows).backward()
    reached = {name.split(".")[0] for name in with_gradient(policy)}
    assert reached == ({"heads", "lm"} if trunk == "shared" else {"heads", "value_trunk"})


VALUES = {"cql_weight": 0.0, "awac_weight": 0.0}
ROUTES = {
    "q": (ILQL(v_weight=0.0, **VALUES), "detach_q"),
    "conservative": (ILQL(q_weight=0.0, v_weight=0.0, awac_weight=0.0), "detach_q"),
    "v": (ILQL(q_weight=0.0, **VALUES), "detach_v"),
    "utterance q": (UtteranceILQL(awac_weight=0.0), "detach_q"),
}


@pytest.mark.parametrize(("method", "flag"), ROUTES.values(), ids=ROUTES.keys())
@pytest.mark.parametrize("heads", ["mlp", "lowrank"])
@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_a_detached_loss_stops_at_its_heads(make_policy, rows, method, flag, heads, trunk):
    """L_Q, L_CQL or L_V alone: below the heads it reaches the trunk, with the flag nothing, and the heads'
    gradient is the same."""
    policy = make_policy(method, heads=heads, trunk=trunk)
    gradients = []
    for flags in ({}, {flag: True}, {"detach_q": True, "detach_v": True}):
        policy.model_config = replace(policy.model_config, **flags)
        policy.zero_grad()
        loss_of(policy, rows).backward()
        gradients.append(
            {
                name: p.grad.clone()
                for name, p in policy.named_parameters()
                if p.grad is not None and p.grad.any()
            }
        )
    free, stopped, both = gradients
    below = "lm" if trunk == "shared" else "value_trunk"
    assert {name.split(".")[0] for name in free} == {"heads", below}
    if not isinstance(method, UtteranceILQL):  # its V loss is not switched off
        assert {name.split(".")[0] for name in stopped} == {"heads"}
    assert {name.split(".")[0] for name in both} == {"heads"}
    for name in (name for name in free if name.startswith("heads.")):
        torch.testing.assert_close(both[name], free[name])


def test_a_detached_utterance_q_leaves_v_s_gradient(make_policy, rows):
    """With detach_q alone the trunk has the gradient that V's loss gives it: that of the sum of V before each
    reply, times its slope."""
    policy = make_policy(UtteranceILQL(awac_weight=0.0))
    batch = collate(rows)

    def trunk_gradient(loss):
        policy.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in policy.lm.base_model.parameters() if p.grad is not None])

    out = policy.outputs(batch)
    x = torch.minimum(*out.utterance_q_target) - out.v[batch.reply_starts]
    expected = trunk_gradient((torch.where(x < 0, 0.3, 0.7) * x.square()).sum())
    policy.model_config = replace(policy.model_config, detach_q=True)
    torch.testing.assert_close(trunk_gradient(loss_of(policy, rows)), expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "method",
    [ILQL(q_weight=0.0, v_weight=0.0, cql_weight=0.0, transition_weight=0.5), BC()],
    ids=["ilql", "bc"],
)
def test_a_detached_language_model_clones_with_its_output_layer_alone(make_policy, rows, family, method):
    """The output layer is the embedding too; no block below it gets a gradient, from the logged replies or
    from the context's tokens."""
    policy = make_policy(method, family)
    loss_of(policy, rows).backward()
    assert len(with_gradient(policy)) > 10
    policy.model_config = replace(policy.model_config, detach_lm=True)
    policy.zero_grad()
    loss_of(policy, rows).backward()
    (reached,) = with_gradient(policy)
    assert dict(policy.named_parameters())[reached] is policy.get_output_embeddings().weight


def test_context_scores_are_the_language_model_s(make_policy, rows):
    """transition_weight's term: -log softmax of a plain forward pass at every token that is the user's or the
    template's."""
    policy = make_policy(ILQL(transition_weight=1.0))
    batch = collate(rows)
    with torch.no_grad():
        got = policy.outputs(batch).context.dense()
        plain = policy.lm(batch.input_ids).logits.flatten(0, 1)[batch.context]
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)


@every(COMBINATIONS)
def test_bfloat16_training_runs(policy, rows):
    """Autocast around the loss, as the trainer does: a finite loss near the float32 one, and finite
    gradients."""
    policy.start_training()
    exact = loss_of(policy, rows).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = loss_of(policy, rows)
    total.backward()
    assert total.item() == pytest.approx(exact, rel=0.1, abs=0.5)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in policy.parameters())


def test_new_heads_say_nothing(make_policy, rows):
    """Heads as they are made: Q = V = 0 and so the policy is the LM; the two heads are not copies of each
    other, the targets are."""
    for kind in ("mlp", "advanced_mlp", "lowrank"):
        policy = make_policy(ILQL(beta=5.0), heads=kind, spread=0.0)
        with torch.no_grad():
            out = policy.outputs(collate(rows))
            assert not any(head.dense().any() for head in out.q + out.q_target) and not out.v.any()
            torch.testing.assert_close(policy(PROMPT).logits, policy.lm(PROMPT).logits.log_softmax(-1))
        first, second = (torch.cat([p.flatten() for p in head.inner.parameters()]) for head in policy.heads.q)
        assert not torch.equal(first, second)
        for online, target in zip(
            policy.heads.q.parameters(), policy.heads.q_target.parameters(), strict=True
        ):
            assert (
                torch.equal(online, target)
                and not target.requires_grad
                and online.data_ptr() != target.data_ptr()
            )


def test_head_kinds_are_checked():
    with pytest.raises(
        UserError, match="expected heads 'dueling', 'mlp', 'advanced_mlp', 'lowrank', got 'linear'"
    ):
        ValueHeads(ILQL().heads, 8, 10, kind="linear", rank=2)


@pytest.mark.parametrize("method", ["ilql", "way_off_policy"])
def test_polyak_averaging(make_policy, method):
    """alpha .005 from 0 towards 1: .005, then .005 + .995 * .005 = .009975, and 1 - .995^n after n steps.
    Nothing else moves."""
    policy = make_policy(METHODS[method]).start_training()
    online, target = (
        (policy.heads.q, policy.heads.q_target) if method == "ilql" else (policy.lm, policy.lm_target)
    )
    with torch.no_grad():
        for p in online.parameters():
            p.fill_(1.0)
        for p in target.parameters():
            p.fill_(0.0)
    moving = {id(p) for p in target.parameters()}
    before = {name: p.detach().clone() for name, p in policy.named_parameters() if id(p) not in moving}
    for n, expected in enumerate((0.005, 0.009975, 1 - 0.995**3), 1):
        policy.update_targets(0.005)
        for p in target.parameters():
            torch.testing.assert_close(
                p, torch.full_like(p, expected), rtol=0, atol=1e-7, msg=lambda m, n=n: f"step {n}: {m}"
            )
    for _ in range(135):
        policy.update_targets(0.005)
    first = next(iter(target.parameters()))
    assert (
        first.flatten()[0].item()
        == pytest.approx(1 - 0.995**138, abs=1e-5)
        == pytest.approx(0.4993, abs=1e-4)
    )  # half-life 138
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters() if name in before)


@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_polyak_averaging_of_the_target_trunk(make_policy, trunk):
    """It follows what the online heads read, the LM's transformer or the value trunk, and starts as its
    copy."""
    fresh = make_policy(ILQL(), trunk=trunk, target="separate", spread=0.0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(fresh.target_trunk.parameters(), fresh.lm.base_model.parameters(), strict=True)
    )
    assert not any(p.requires_grad for p in fresh.target_trunk.parameters())
    policy = make_policy(ILQL(), trunk=trunk, target="separate")
    online = policy.lm.base_model if trunk == "shared" else policy.value_trunk
    before = [p.detach().clone() for p in policy.target_trunk.parameters()]
    others = checksum(
        p
        for name, p in policy.named_parameters()
        if not name.startswith(("target_trunk.", "heads.q_target."))
    )
    policy.update_targets(0.25)
    for got, start, towards in zip(
        policy.target_trunk.parameters(), before, online.parameters(), strict=True
    ):
        torch.testing.assert_close(got, 0.75 * start + 0.25 * towards)
    assert (
        checksum(
            p
            for name, p in policy.named_parameters()
            if not name.startswith(("target_trunk.", "heads.q_target."))
        )
        == others
    )


def test_a_target_trunk_never_drops_out(make_policy, rows):
    """Training mode gives it no dropout, and Q' is that of the heads on the trunk as it stands."""
    policy = make_policy(ILQL(), target="separate", dropout=0.5).train()
    assert policy.lm.training and not policy.target_trunk.training
    batch = collate(rows)
    first, second = (policy.outputs(batch) for _ in range(2))
    assert not torch.equal(first.v, second.v)  # the online trunk does
    hidden = policy.target_trunk(batch.input_ids).last_hidden_state.flatten(0, 1)[batch.states]
    for once, again, head in zip(first.q_target, second.q_target, policy.heads.q_target, strict=True):
        assert torch.equal(once.dense(), again.dense())
        torch.testing.assert_close(once.dense(), head(hidden, None).dense())


@pytest.mark.parametrize("top_k", [0, 5])
def test_decoding_runs_the_trunks_that_it_reads_only(make_policy, top_k):
    """With top-k no V is read, so the value trunk is left out and the target trunk stays; cached decoding is
    uncached either way."""
    policy = make_policy(ILQL(beta=2.0, top_k=top_k), trunk="separate", target="separate")
    with torch.no_grad():
        cache = policy(PROMPT, use_cache=True).past_key_values
    assert len(cache.others) == (1 if top_k else 2)
    assert torch.equal(greedy(policy, PROMPT, use_cache=True), greedy(policy, PROMPT, use_cache=False))


def test_a_target_trunk_cannot_follow_adapters(make_policy):
    with pytest.raises(
        UserError,
        match="expected a target trunk to copy that LoRA does not change: set value_trunk separate, or",
    ):
        make_policy(ILQL(), target="separate", peft=True)
    assert make_policy(ILQL(), trunk="separate", target="separate", peft=True).target_trunk is not None


def test_proposals_are_valued_where_they_are_read(make_policy):
    """A trunk of CHAI's own would read other features than those of the proposals."""
    with pytest.raises(UserError, match="CHAI reads the frozen LM's .*: expected value_trunk auto or shared"):
        make_policy(CHAI(), trunk="separate")
    assert make_policy(CHAI(), trunk="auto").value_trunk is None


@pytest.mark.parametrize("method", [BC(), ILQL()], ids=["bc", "ilql"])
def test_nothing_clones_in_an_output_layer_below_adapters(make_policy, method):
    policy = make_policy(method, peft=True)
    policy.model_config = replace(policy.model_config, detach_lm=True)
    with pytest.raises(UserError, match="leave out --model.detach_lm or --model.use_peft"):
        policy.start_training()


def test_adapters_lie_below_the_output_layer(tokenizer):
    config = ModelConfig(
        family="llama", layers=1, width=32, attention_heads=2, use_peft=True, lora_target_modules="lm_head"
    )
    with pytest.raises(UserError, match="lm_head: expected layers below the output layer"):
        Policy(load_lm(config, tokenizer), BC(), config)


def test_a_hard_update_copies(make_policy):
    policy = make_policy(ILQL())
    policy.update_targets(1.0)
    assert all(
        torch.allclose(t, o)
        for t, o in zip(policy.heads.q_target.parameters(), policy.heads.q.parameters(), strict=True)
    )


def test_without_targets_an_update_does_nothing(make_policy):
    policy = make_policy(BC())
    before = checksum(policy.parameters())
    policy.start_training().update_targets(0.5)
    assert checksum(policy.parameters()) == before and policy.lm_target is None


def test_start_training_copies_once(make_policy):
    policy = make_policy(WayOffPolicy()).start_training()
    copied = policy.lm_target
    assert policy.start_training().lm_target is copied
    assert not any(p.requires_grad for p in copied.parameters())
    assert torch.equal(copied(PROMPT).logits, policy.lm(PROMPT).logits)
    assert all(
        a.data_ptr() != b.data_ptr() for a, b in zip(copied.parameters(), policy.lm.parameters(), strict=True)
    )


# --- the frozen prior and LoRA ------------------------------------------------------------------------------


def checksum(parameters):
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.detach().numpy().tobytes())
    return digest.hexdigest()


def frozen_parts(policy):
    return [p for name, p in policy.lm.named_parameters() if "lora_" not in name]


def train(policy, rows, steps=3):
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.01)
    policy.train()
    losses = []
    for _ in range(steps):
        loss = loss_of(policy, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        policy.update_targets(0.1)
        losses.append(loss.item())
    policy.eval()
    return losses


def test_training_leaves_the_frozen_prior_alone(make_policy, rows, tokenizer, tmp_path):
    """A copy made before training is bit for bit the same after it, and in no optimizer; what was written is
    the same model."""
    policy = make_policy(WayOffPolicy(), "llama")
    prior = freeze_prior(policy, tmp_path / "prior", tokenizer)
    before, at_first = checksum(prior.parameters()), prior.members[0](PROMPT).logits
    policy.start_training()
    train(policy, rows)
    assert checksum(prior.parameters()) == before
    assert not torch.allclose(policy(PROMPT).logits, at_first, atol=1e-3)  # the policy did move
    assert not any(p.requires_grad for p in prior.parameters()) and not prior.training
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "prior").eval()
    torch.testing.assert_close(stored(PROMPT).logits, at_first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "method", "heads", "trunk"),
    [("gpt2", "way_off_policy", "mlp", "shared"), ("llama", "ilql", "lowrank", "separate")],
)
def test_lora_trains_adapters_only(make_policy, rows, tmp_path, family, method, heads, trunk):
    """The LM under the adapters is the prior: unchanged by training, by target updates and by writing a
    checkpoint."""
    policy = make_policy(METHODS[method], family, heads=heads, trunk=trunk, peft=True)
    before = checksum(frozen_parts(policy))
    trained = {name for name, p in policy.lm.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    adapters = checksum(p for name, p in policy.lm.named_parameters() if "lora_" in name)
    policy.start_training()
    train(policy, rows)
    for step in range(2):
        save_policy(policy, tmp_path / str(step))
    assert checksum(frozen_parts(policy)) == before
    assert checksum(p for name, p in policy.lm.named_parameters() if "lora_" in name) != adapters


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_prior_is_the_lm_without_its_adapters(make_policy, rows, family):
    plain = make_policy(WayOffPolicy(), family)
    policy = make_policy(WayOffPolicy(), family, peft=True)  # the same seed: the same LM below the adapters
    batch = collate(rows)
    torch.testing.assert_close(policy.prior_logp(batch), plain.prior_logp(batch), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        steered = policy(PROMPT).logits
        assert not torch.allclose(steered, plain(PROMPT).logits, atol=1e-2)
        with policy.without_adapters():
            torch.testing.assert_close(policy(PROMPT).logits, plain(PROMPT).logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(policy(PROMPT).logits, steered)  # and they come back


def test_adapters_come_back_after_an_error_and_stay_trainable(make_policy):
    policy = make_policy(WayOffPolicy(), peft=True)
    steered = policy(PROMPT).logits
    trainable = {name for name, p in policy.named_parameters() if p.requires_grad}
    with pytest.raises(RuntimeError, match="inside"), policy.without_adapters():
        raise RuntimeError("inside")
    assert torch.equal(policy(PROMPT).logits, steered)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trainable


@every([c for c in COMBINATIONS if c[0] == "gpt2"])
def test_training_lowers_the_loss(policy, rows):
    policy.start_training()
    losses = train(policy, rows, steps=12)
    assert losses[-1] < 0.7 * losses[0]


# --- loading ------------------------------------------------------------------------------------------------


SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5),
        GraniteConfig(**SIZES, logits_scaling=8.0),
        CohereConfig(**SIZES, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_logits_that_are_capped_or_scaled_are_so_in_every_loss(config, make_row):
    """Gemma 2 squashes its logits, Granite and Cohere scale them."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(20)
    policy = Policy(lm, BC()).eval()
    ids = torch.tensor([[3, 17, 18, 19, 1, 4, 20]])
    torch.testing.assert_close(policy(ids).logits, lm(ids).logits, rtol=1e-4, atol=1e-4)
    batch = collate([make_row(ids[0].tolist(), [(2, 6, 1.0)])])
    loss = policy.outputs(batch).lm.nll(batch.actions)[0]
    plain = torch.nn.functional.cross_entropy(lm(ids).logits[0, 1:6], ids[0, 2:7], reduction="sum")
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(each, lm.get_input_embeddings().weight) for each in (loss, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BertConfig(**SIZES), "BertLMHeadModel: expected a model that reads from left to right"),
        (
            BertConfig(**SIZES, is_decoder=True),
            "BertLMHeadModel: expected logits = output embedding x last hidden state, times a number",
        ),
        (
            BartConfig(vocab_size=50, d_model=16, decoder_layers=1, decoder_attention_heads=2),
            "BartForCausalLM: expected a model that leaves out padding",
        ),
    ],
    ids=["not causal", "head of its own", "positions of its own"],
)
def test_models_that_no_method_fits_are_refused_by_name(config, reason):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with pytest.raises(UserError, match=reason):
        Policy(lm, BC())


def test_a_model_that_continues_nothing_is_refused_by_name(tokenizer, tmp_path):
    T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16, vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="expected a model that continues texts, got a t5"):
        load_lm(ModelConfig(model_name_or_path=str(tmp_path)), tokenizer)


def test_the_check_for_a_plain_head_leaves_the_mode_alone(make_policy):
    lm = make_policy(BC(), dropout=0.5).lm
    for training in (True, False):
        lm.train(training)
        assert Policy(lm, BC()).lm.training is training


def test_a_missing_model_is_one_paragraph(tokenizer):
    with pytest.raises(UserError, match="/no/such/model: expected a directory with a model"):
        load_lm(ModelConfig(model_name_or_path="/no/such/model"), tokenizer)
    with pytest.raises(
        UserError,
        match=(
            "cannot load a causal LM from 'nobody/nothing': expected a hub name, or a directory with "
            "config.json"
        ),
    ):
        load_lm(ModelConfig(model_name_or_path="nobody/nothing"), tokenizer)


@pytest.mark.parametrize(
    ("damage", "found"),
    [("lost", "no model.norm.weight: copy"), ("other", r"model.norm.weight of shape \(3,\) instead of")],
)
def test_weights_that_would_be_drawn_at_random_are_refused(tokenizer, make_policy, tmp_path, damage, found):
    make_policy(BC(), "llama").lm.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    added = {"model.norm.weight": torch.ones(3)} if damage == "other" else {}
    save_file({**weights, **added}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"that its config.json describes, found {found}"):
        load_lm(ModelConfig(model_name_or_path=str(tmp_path)), tokenizer)


def test_no_run_starts_from_a_pickle(tokenizer, make_policy, tmp_path):
    lm = make_policy(BC()).lm
    lm.config.save_pretrained(tmp_path)
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="got pytorch_model.bin, a pickle, which is not read"):
        load_lm(ModelConfig(model_name_or_path=str(tmp_path)), tokenizer)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_small_vocabulary_grows_to_the_tokenizer_s(tokenizer, make_policy, tmp_path, family):
    """A hub model whose tokenizer got our role tokens: every id has a row, and old rows are kept."""
    lm = make_policy(BC(), family).lm
    lm.resize_token_embeddings(len(tokenizer) - 6)
    lm.save_pretrained(tmp_path)
    grown = load_lm(ModelConfig(model_name_or_path=str(tmp_path)), tokenizer)
    assert grown.get_input_embeddings().num_embeddings == len(tokenizer) == grown.config.vocab_size
    assert grown.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert torch.equal(
        grown.get_input_embeddings().weight[: len(tokenizer) - 6], lm.get_input_embeddings().weight
    )
    assert Policy(grown, BC())(torch.tensor([[len(tokenizer) - 1]])).logits.shape[-1] == len(tokenizer)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_new_model_has_the_shape_of_its_config(tokenizer, family):
    config = ModelConfig(family=family, layers=3, attention_heads=2, width=24, context=40)
    lm = load_lm(config, tokenizer)
    sizes = (
        lm.config.num_hidden_layers,
        lm.config.num_attention_heads,
        lm.config.hidden_size,
        lm.config.max_position_embeddings,
        lm.config.vocab_size,
    )
    assert sizes == (3, 2, 24, 40, len(tokenizer))
    assert lm.config.model_type == family and lm.dtype == torch.float32
    assert lm.get_input_embeddings().weight.data_ptr() == lm.get_output_embeddings().weight.data_ptr()


@pytest.mark.parametrize(
    ("family", "width", "heads", "size"),
    [
        *[("llama", 128, 8, 16), ("llama", 64, 8, 16), ("llama", 300, 6, 50), ("llama", 101, 1, 100)],
        *[("gpt2", 128, 8, 16), ("gpt2", 64, 4, 16), ("gpt2", 15, 1, 15)],
    ],
)
def test_a_new_model_has_heads_that_are_no_smaller_than_16(tokenizer, family, width, heads, size):
    lm = load_lm(ModelConfig(family=family, layers=1, width=width), tokenizer)
    projected = {"llama": ".q_proj.weight", "gpt2": ".c_attn.weight"}[family]
    [weight] = [each for name, each in lm.named_parameters() if name.endswith(projected)]
    assert lm.config.num_attention_heads == heads
    assert weight.numel() == width * (heads * size if family == "llama" else 3 * width)
    assert lm(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_a_tokenizer_without_an_end_leaves_the_model_s(tokenizer, tmp_path):
    lm, end = load_lm(ModelConfig(layers=1, width=16), tokenizer), tokenizer.eos_token_id
    lm.generation_config.eos_token_id = [end]
    lm.save_pretrained(tmp_path)
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    found = load_lm(ModelConfig(model_name_or_path=str(tmp_path)), endless).generation_config
    assert found.eos_token_id == [end]


def test_named_lora_modules(tokenizer):
    config = ModelConfig(
        family="gpt2",
        layers=1,
        attention_heads=2,
        width=16,
        use_peft=True,
        lora_target_modules="c_attn, c_fc",
    )
    policy = Policy(load_lm(config, tokenizer), BC(), config)
    adapted = {
        name.split(".lora_")[0].rsplit(".", 1)[-1]
        for name, _ in policy.lm.named_parameters()
        if "lora_" in name
    }
    assert adapted == {"c_attn", "c_fc"}


def test_every_combination_is_another_policy(make_policy):
    """The fixtures do not test one thing six times: no two of them decode alike."""
    with torch.no_grad():
        found = [
            built(make_policy, *each)(PROMPT).logits.softmax(-1)
            for each in COMBINATIONS
            if each[1] != "way_off_policy"
        ]
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in itertools.combinations(found, 2))


def test_target_passes_differ_by_dropout_and_are_refused_without(make_policy, make_row):
    batch = collate([make_row([1, 2, 3, 4], [(1, 3, 1.0)])])
    batch.prior_logp = torch.zeros(batch.decisions)
    batch.prior_lse = torch.zeros(len(batch.states))
    policy = make_policy(WayOffPolicy(target_passes=3), dropout=0.2).start_training().train()
    first, second, third = (target.dense() for target in policy.outputs(batch).lm_target)
    assert (first - second).abs().max() > 1e-3 and (second - third).abs().max() > 1e-3
    one = make_policy(WayOffPolicy(), dropout=0.2).start_training().train()
    assert torch.equal(
        one.outputs(batch).lm_target[0].dense(), one.outputs(batch).lm_target[0].dense()
    )  # a single pass has no dropout
    with pytest.raises(
        UserError,
        match="target_passes 3: expected a language model with dropout, found none.*--model.dropout 0.1",
    ):
        make_policy(WayOffPolicy(target_passes=3)).start_training()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("trunk, target", [("shared", "shared"), ("separate", "separate")])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_what_rows_begin_with_alike_is_read_once_but_under_dropout(
    make_policy, make_row, monkeypatch, family, trunk, target, dropout
):
    """Losses and gradients of a method with words and values, in training as the loop takes them."""
    rows = [make_row([3, 70, 71, 72, 73, 4, 80 + k, 81, 1], [(6, 8, float(k))]) for k in range(4)]
    policy = make_policy(ILQL(), family, trunk=trunk, target=target, dropout=dropout)
    read, run = [], policy_module.run_trunk
    monkeypatch.setattr(
        policy_module, "run_trunk", lambda of, ids, *a, **k: read.append(ids.shape) or run(of, ids, *a, **k)
    )
    found, whole = [], (4, 9)
    for cost in (0, beginnings.PASS):
        monkeypatch.setattr(beginnings, "PASS", cost)
        batch = collate(rows)
        policy.zero_grad()
        loss = policy.method.loss(policy.outputs(batch), batch)
        loss.total.backward()
        grads = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        found.append((loss.total.detach(), grads))
    trunks = 1 if trunk == "shared" else 3
    assert read == [shape for _ in range(trunks) for shape in ((1, 6), (4, 3))] + [whole] * trunks
    (total, grads), (expected, wanted) = found
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    size = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-5 * size, msg=name)
    read.clear()
    monkeypatch.setattr(beginnings, "PASS", 0)
    policy.train().outputs(collate(rows))
    assert (whole in read) == bool(dropout)


def test_under_gradient_checkpointing_all_rows_are_read_whole(make_policy, make_row, monkeypatch):
    rows = [make_row([3, 70, 71, 72, 73, 4, 80 + k, 81, 1], [(6, 8, 0.0)]) for k in range(3)]
    policy, batch = make_policy(BC(), "llama").train(), collate(rows)
    expected = policy.outputs(batch).lm.nll(batch.actions)[1]
    monkeypatch.setattr(beginnings, "PASS", 0)
    policy.lm.gradient_checkpointing_enable()
    torch.testing.assert_close(policy.outputs(collate(rows)).lm.nll(batch.actions)[1], expected)
