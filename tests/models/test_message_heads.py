"""What is predicted of messages: losses by hand, from the context's state behind each message, and nothing
else changes."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from rl_dialog.data.batch import collate
from rl_dialog.data.schema import Dialog
from rl_dialog.data.taught import Taught
from rl_dialog.data.tokenize import tokenize
from rl_dialog.errors import UserError
from rl_dialog.methods import BC, Psi
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.message_heads import MessageHeads
from rl_dialog.models.policy import Policy
from rl_dialog.rewards.teachers import describe, make_teachers

FAMILIES = ("hred", "vhred", "vhcr")
BOTH = {"emotion": {"name": "a", "labels": ["sad", "glad"]}, "embedding": {"name": "b", "size": 3}}
LESSONS = {"emotion_weight": 2.0, "embedding_weight": 3.0}
TALKS = (("hello", "yes"), ("hello", "yes, you?", "to eat", "tea"), ("what would you", "all", "that is"))


def lesson(messages: int) -> Taught:
    """Other values for each message."""
    glad = (np.arange(messages) + 1) / (messages + 2)
    vectors = np.stack([glad, 2 - glad, 0 * glad], 1)
    shares = np.stack([1 - glad, glad], 1).astype(np.float32)
    return Taught(np.arange(messages, dtype=np.int32), shares, vectors.astype(np.float16))


def make_rows(tokenizer, taught=True):
    roles = ("user", "assistant")
    dialogs = [
        Dialog(str(i), [{"role": roles[n % 2], "content": text} for n, text in enumerate(talk)])
        for i, talk in enumerate(TALKS)
    ]
    lessons = [lesson(len(talk)) if taught else None for talk in TALKS]
    return [row for d, t in zip(dialogs, lessons, strict=True) for row in tokenize(d, tokenizer, taught=t)]


def make(tokenizer, family, method=None, teachers=BOTH, **fields) -> Policy:
    torch.manual_seed(0)
    config = ModelConfig(family=family, width=16, context=256, latent_size=3, **fields)
    policy = Policy(load_lm(config, tokenizer, teachers=teachers), method or BC(), config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return policy.eval()


def regularisation(policy, rows):
    batch = collate(rows)
    batch.noise = torch.arange(len(rows))
    return policy.outputs(batch, learning=True).messages


def test_losses_by_hand():
    """Heads that say (1/4, 3/4) and (1, 0, 0) whatever the context. KL of (1/2, 1/2) from that is
    1/2 ln 2 + 1/2 ln 2/3 = 0.1438, of (0, 1) it is ln 4/3 = 0.2877. Distances: (0, 0, 0) is 1 away, so 1/3
    as a mean, over a variance of 1/2: 2/3; (1, 2, 2) is 8 away: 16/3."""
    heads = MessageHeads(4, 2, 3)
    for head, said in ((heads.emotion, [math.log(0.25), math.log(0.75)]), (heads.embedding, [1.0, 0.0, 0.0])):
        nn.init.zeros_(head[-1].weight)
        with torch.no_grad():
            head[-1].bias.copy_(torch.tensor(said))
    heads.variance.fill_(0.5)
    emotions = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    embeddings = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0]])
    losses = heads(torch.randn(2, 4), emotions, embeddings)
    assert losses["emotion"].item() == pytest.approx(0.1438 + 0.2877, abs=1e-4)
    assert losses["embedding"].item() == pytest.approx(2 / 3 + 16 / 3, rel=1e-6)


def test_heads_begin_as_the_teachers_mean():
    """Of embeddings 0 and 2 in one number and 1 twice in the other the mean is (1, 1), the variances are 1
    and 0, so s^2 is 1/2; in these units the mean earns 1 a message."""
    heads = MessageHeads(4, 2, 2)
    for module in heads.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
    emotions = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    embeddings = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    heads.start_at(emotions, embeddings)
    assert heads.variance.item() == 0.5
    assert heads.emotion(torch.zeros(1, 4)).softmax(1)[0].tolist() == pytest.approx([0.4, 0.6])
    losses = heads(torch.zeros(2, 4), emotions, embeddings)
    assert losses["embedding"].item() == pytest.approx(2.0)
    assert not MessageHeads(4, 0, 0)(torch.zeros(2, 4), emotions[:, :0], embeddings[:, :0])


@pytest.mark.parametrize("family", FAMILIES)
def test_contexts_are_those_behind_each_message(tokenizer, family):
    """Message by message, as hierarchical_trunk.py has it; the seed's latent of the conversation beside."""
    policy, rows = make(tokenizer, family, **LESSONS), make_rows(tokenizer)
    batch = collate(rows)
    batch.noise = torch.arange(3)
    with torch.no_grad():
        _, terms = policy._inferred(batch)
        model, got = policy.lm.model, terms.contexts
        assert len(got) == sum(map(len, TALKS))
        if family == "vhcr":
            return  # its contexts depend on a posterior; padding and company are tested below
        at = 0
        for row in rows:
            context, begin = torch.zeros(1, 1, 16), 0
            for place in row.taught.places.tolist():
                ids = torch.from_numpy(row.input_ids[begin : place + 1].astype(np.int64))
                _, message = model.encoder(model.embedding(ids)[None])
                _, context = model.context(message[-1][None], context)
                torch.testing.assert_close(got[at], context[0, 0], atol=1e-5, rtol=1e-5)
                at, begin = at + 1, place + 1


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_in_a_batch_are_taught_as_alone(tokenizer, family):
    """Padded or not; latents follow from the rows' seeds."""
    policy, rows = make(tokenizer, family, **LESSONS).train(), make_rows(tokenizer)
    together = regularisation(policy, rows)
    batches = [collate([row]) for row in rows]
    for seed, batch in enumerate(batches):
        batch.noise = torch.tensor([seed])
    alone = [policy.outputs(batch, learning=True).messages for batch in batches]
    for name in ("emotion", "embedding"):
        expected = sum(each.losses[name] for each in alone)
        assert together.losses[name].item() == pytest.approx(expected.item(), rel=1e-4)
    weighted = 2 * together.losses["emotion"] + 3 * together.losses["embedding"]
    assert together.penalty.item() == pytest.approx(weighted.item(), rel=1e-6)


def test_outside_of_training_they_are_told_and_cost_nothing(tokenizer):
    policy = make(tokenizer, "vhred", **LESSONS)
    told = regularisation(policy, make_rows(tokenizer))
    assert told.penalty == 0 and told.losses["emotion"] > 0 and told.losses["embedding"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_without_weights_loss_and_gradients_are_those_of_a_model_without_teachers(tokenizer, family):
    """To the last bit, with the teachers' columns in the rows and without."""
    gradients = []
    for teachers, taught in ((None, False), (BOTH, True)):
        policy = make(tokenizer, family, teachers=teachers).train()
        batch = collate(make_rows(tokenizer, taught))
        batch.noise = torch.arange(3)
        out = policy.outputs(batch, learning=True)
        assert out.messages is None and policy.message_heads is None
        loss = policy.method.loss(out, batch)
        total = (loss if out.latents is None else out.latents.added_to(loss)).total
        total.backward()
        named = dict(policy.named_parameters())
        gradients.append({name: p.grad for name, p in named.items() if p.grad is not None} | {"loss": total})
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        assert torch.equal(value, gradients[1][name]), name


def test_one_teacher_alone_has_one_head(tokenizer):
    policy = make(tokenizer, "hred", embedding_weight=1.0)
    assert policy.message_heads.emotion is None and policy.config.emotion_weight == 0
    assert regularisation(policy, make_rows(tokenizer)).losses.keys() == {"embedding"}


def test_a_checkpoint_has_the_heads_and_says_the_same_without_them(tokenizer, tmp_path):
    policy = make(tokenizer, "vhcr", **LESSONS)
    policy.message_heads.variance.fill_(0.7)
    policy.save_pretrained(tmp_path)
    # a copy: how kernels round depends on where weights lie, which a file maps wherever its header ends
    again, rows = copy.deepcopy(Policy.from_pretrained(tmp_path)), make_rows(tokenizer)
    assert again.config.teachers == BOTH and again.config.emotion_weight == 2.0
    told, expected = regularisation(again, rows), regularisation(policy, rows)
    assert all(torch.equal(told.losses[name], value) for name, value in expected.losses.items())
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.p*kl*"))
    ids, noise = torch.from_numpy(rows[0].input_ids.astype(np.int64))[None], torch.tensor([1])
    said = again(ids, noise=noise).logits
    nn.init.normal_(again.message_heads.emotion[0].weight)
    assert torch.equal(again(ids, noise=noise).logits, said)


def test_values_do_not_read_them(tokenizer):
    """psi on a model that learned them: no teachers are asked for."""
    policy = make(tokenizer, "vhred", Psi(), **LESSONS).train()
    batch = collate(make_rows(tokenizer, taught=False))
    batch.noise = torch.arange(3)
    assert policy.outputs(batch, learning=True).messages is None


@pytest.mark.parametrize(
    ("fields", "teachers", "expected"),
    [
        ({"emotion_weight": -1.0}, BOTH, "--model.emotion_weight: expected a number of at least 0, got -1"),
        ({"embedding_weight": math.nan}, BOTH, "--model.embedding_weight: expected a number of at least 0"),
        (
            {"emotion_weight": 1.0, "family": "llama"},
            BOTH,
            "--model.family hred, vhred or vhcr, got --model.family llama",
        ),
        (
            {"emotion_weight": 1.0, "model_name_or_path": "runs/x"},
            BOTH,
            "expected a new model.*got runs/x, which keeps its own",
        ),
        (
            {"emotion_weight": 1.0},
            {},
            "prepared with --teachers emotion, got the data, prepared without teachers: run prepare again "
            r"with --teachers emotion \(or emotion=PATH\)",
        ),
        (
            {"embedding_weight": 1.0},
            {"emotion": BOTH["emotion"]},
            "prepared with emotion only: run prepare again with --teachers emotion embedding",
        ),
    ],
)
def test_weights_that_nothing_can_be_learned_with_are_refused(tokenizer, fields, teachers, expected):
    with pytest.raises(UserError, match=expected):
        load_lm(ModelConfig(**{"family": "vhred", "width": 16} | fields), tokenizer, teachers=teachers)


def test_rows_without_teachers_are_refused(tokenizer):
    policy = make(tokenizer, "hred", **LESSONS)
    with pytest.raises(UserError, match="run prepare again with --teachers emotion embedding"):
        regularisation(policy, make_rows(tokenizer, taught=False))


def test_the_built_in_teachers_fit_a_model(tokenizer):
    policy = make(tokenizer, "hred", teachers=describe(make_teachers(["emotion", "embedding"])), **LESSONS)
    heads = policy.message_heads
    assert heads.emotion[-1].out_features == 3 and heads.embedding[-1].out_features == 256
