"""Published tables, loss rows and target rates, read off a policy whose tables hold the published numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from rl_dialog.methods import ILQL, WayOffPolicy
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import Prior
from tests.optima.tabular import PUBLISHED, Learned, TabularLM, hidden, tabular_lm, tabular_policy, write

U = 2


def near(value: float, tolerance: float = 1e-6):
    return pytest.approx(value, abs=tolerance)


@pytest.fixture
def row(make_row):
    """U 1 0: actions 1 and 0, reward 1 at the end."""
    return make_row([U, 1, 0], [(1, 2, 1.0)])


@pytest.fixture
def published(row):
    """published(method): the policy of spec/asapp_offline_rl.md's row "ilql loss"."""

    def build(method):
        policy = tabular_policy(tabular_lm([row], 3), method)
        write(
            policy,
            [U],
            lm=[0.0, 1, 0],
            q=([0.1, 0.6, -0.2], [0.2, 0.4, 0]),
            q_target=([0, 0.7, 0.1], [0.1, 0.3, 0]),
            v=0.5,
        )
        write(
            policy,
            [U, 1],
            lm=[2.0, 0, 0],
            q=([1, 0.3, 0], [0.8, 0.1, 0.5]),
            q_target=([0.9, 0.2, 0.1], [0.6, 0.2, 0.2]),
            v=0.2,
        )
        return policy

    return build


def test_the_published_loss_row_through_the_trainer(published, train, row):
    """tau .7, gamma .99, cql .1, awac 1, means over two decisions: y = (.99 * .2, 1) = (.198, 1), min Q' =
    (.3, .6). Metrics are those before the update. L_Q has no half and sums over the heads, as the published
    row does.
    """
    metrics = train(
        published(ILQL(**PUBLISHED, tau=0.7, gamma=0.99, cql_weight=0.1, cql_support=1.0, awac_weight=1.0)),
        [row],
        1,
        0.0,
    )
    expected = {
        "q_loss": 0.121204,
        "v_loss": 0.062,
        "cql_loss": 1.5304428,
        "nll": 0.3954947,
        "loss": 0.7317430,
        "advantage": 0.1,
    }
    assert {name: metrics[f"train/{name}"] for name in expected} == {
        name: near(value) for name, value in expected.items()
    }


def test_one_update_moves_q_to_the_published_targets(published, train, row):
    """At rate 1, Q_i(s, a) - Q_i is -2 (Q_i - y) / 2 with two decisions: Q jumps onto y = (.198, 1) in both
    heads."""
    learned = Learned(published(ILQL(**PUBLISHED, gamma=0.99, cql_weight=0.0, awac_weight=0.0)))
    train(learned.policy, [row], 1, 1.0)
    for head in range(2):
        assert [learned.q([U], head=head)[1], learned.q([U, 1], head=head)[0]] == [near(0.198), near(1.0)]


@pytest.mark.parametrize(
    ("alpha", "steps", "share"), [(0.001, 3, 0.002997001), (0.005, 1, 0.005), (0.005, 2, 0.009975)]
)
def test_targets_follow_once_per_update(published, train, row, alpha, steps, share):
    """Online 1, target 0, nothing learned: 1 - (1 - alpha)^n after n updates; at .005, .4993 after 138 of
    them and .99335 after 1000."""
    policy = published(ILQL(alpha=alpha))
    for state in ([U], [U, 1]):
        write(policy, state, q=[[1.0] * 3] * 2, q_target=[[0.0] * 3] * 2)
    state = hidden(policy, [U]).argmax()

    def is_everywhere(value):
        for head in policy.heads.q_target:
            torch.testing.assert_close(head.out.weight[:, state], torch.full((3,), value), rtol=0, atol=5e-6)

    train(policy, [row], steps, 0.0)
    is_everywhere(share)
    for n, later in ((138, 1 - (1 - alpha) ** 138), (1000, 1 - (1 - alpha) ** 1000)):
        for _ in range(n - steps):
            policy.update_targets(alpha)
        steps = n
        is_everywhere(later)
        assert alpha != 0.005 or later == near({138: 0.4993, 1000: 0.99335}[n], 5e-5)


def test_psi_s_target_is_the_whole_lm(train, row):
    """alpha 1/4, two updates: 1 - .75^2 = .4375 of what is online."""
    policy = tabular_policy(
        tabular_lm([row], 3), WayOffPolicy(backup="psi", alpha=0.25, state_value=False)
    ).start_training()
    write(policy, [U], lm=[4.0, 8.0, 0.0])
    train(policy, [row], 2, 0.0, prior=Prior([tabular_lm([row], 3)]))
    assert policy.lm_target.table.weight[:, hidden(policy, [U]).argmax()].tolist() == [
        near(4 * 0.4375),
        near(8 * 0.4375),
        0.0,
    ]


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, (0.211942, 0.576117, 0.211942)),
        (1.0, (0.176389, 0.647223, 0.176389)),
        (4.0, (0.090703, 0.818594, 0.090703)),
    ],
)
def test_the_published_decoding_table(row, beta, expected):
    """Logits (0, 1, 0), min Q' (0, .3, 0), V .5."""
    policy = tabular_policy(tabular_lm([row], 3), ILQL(beta=beta))
    write(policy, [U], lm=[0.0, 1, 0], q_target=([0.2, 0.3, 0.0], [0.0, 0.9, 0.0]), v=0.5)
    assert Learned(policy).chances([U]) == [near(value, 5e-6) for value in expected]


@pytest.mark.parametrize(
    ("method", "chance"),
    [
        (ILQL(beta=0.0), 0.5),
        (ILQL(beta=1.0), 0.8808),
        (ILQL(beta=4.0), 0.99966),
        (ILQL(beta=1.0, advantage_clip=0.0), 0.7311),
        (ILQL(beta=4.0, advantage_clip=0.0), 0.9820),
    ],
)
@pytest.mark.parametrize("shift", [0.0, 7.0])
def test_advantages_of_one(make_row, method, chance, shift):
    """pi = (1/2, 1/2), A = (1, -1): sigmoid(2 beta), and with a clip at 0 sigmoid(beta). A constant on Q and
    V changes nothing."""
    policy = tabular_policy(tabular_lm([make_row([0, 1], [(1, 1, 0.0)])], 2), method)
    write(policy, [0], q_target=[[1 + shift, -1 + shift]] * 2, v=shift)
    assert Learned(policy).chances([0])[0] == near(chance, 5e-5)


def test_beams_of_three_tokens_by_three_steps(make_row):
    """With 27 beams nothing is pruned and the best reply of an exhaustive search is found; one beam is
    greedy, which here misses it."""
    replies = list(itertools.product(range(3), repeat=3))
    policy = tabular_policy(
        tabular_lm([make_row([0, *reply], [(1, 3, 0.0)]) for reply in replies], 3), ILQL(beta=1.0)
    ).eval()
    torch.manual_seed(0)
    for head in (*policy.heads.q_target, policy.heads.v):
        torch.nn.init.normal_(head.out.weight, std=1.5)
    torch.nn.init.normal_(policy.lm.table.weight)
    with torch.no_grad():
        ids = torch.tensor([[0, *reply] for reply in replies])
        log_p = policy(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).sum((1, 2))
    best, greedy = replies[log_p.argmax()], []
    for _ in range(3):
        greedy.append(Learned(policy).greedy([0, *greedy]))

    def generate(beams):
        scored = {"length_penalty": 0.0} if beams > 1 else {}
        options = {
            "do_sample": False,
            "num_beams": beams,
            "return_dict_in_generate": True,
            "output_scores": True,
        }
        return policy.generate(torch.tensor([[0]]), max_new_tokens=3, **options, **scored)

    exact = generate(27)
    assert exact.sequences[0, 1:].tolist() == list(best)
    assert exact.sequences_scores.item() == near(log_p.max().item(), 1e-5)
    assert generate(1).sequences[0, 1:].tolist() == greedy != list(best)


def test_a_tabular_checkpoint_comes_back(published, train, row):
    """What the trainer saved is the policy, by the ordinary road: config.json, safetensors, heads."""
    policy = published(ILQL(beta=2.0))
    loaded = Policy.from_pretrained(train(policy, [row], 3, 0.5)["latest"])
    assert isinstance(loaded.lm, TabularLM)
    for name, value in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert Learned(loaded).chances([U, 1]) == Learned(policy).chances([U, 1])


def test_a_key_that_forgets_too_much_is_refused(make_row):
    rows = [make_row([0, 1, 0], [(1, 1, 0.0)]), make_row([1, 1, 1], [(1, 1, 0.0)])]
    with pytest.raises(
        ValueError, match=r"expected one successor of a state and a token, got two for token 1 after \(1,\)"
    ):
        tabular_lm(rows, 2, key=lambda ids: len(ids) if len(ids) < 2 else ids)
