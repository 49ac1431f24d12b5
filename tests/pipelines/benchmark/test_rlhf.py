"""Learning from feedback where the truth is known: its estimates by enumeration, its table and plot, and the
whole command on tiny sizes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from envs.small_talk import SmallTalk, expected_reward
from pipelines.benchmark import rlhf
from pipelines.benchmark.__main__ import main
from pipelines.benchmark.rlhf import BEST_OF, Curve, HeldOut, Point, best_of, best_of_n, plot, table
from pipelines.benchmark.settings import BenchmarkConfig
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.methods import BC
from rl_dialog.models.prior import Prior


class Longer:
    """Likes long replies."""

    def score(self, conversations):
        return [float(len(messages[-1]["content"])) for messages in conversations]


@pytest.fixture
def held_out(make_policy, tokenizer):
    contexts = [SmallTalk().reset(seed=n)[0] for n in range(6)]
    return HeldOut(contexts, tokenizer, make_policy(BC()), 3)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_best_of_n_is_the_mean_over_all_choices(n):
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(4, 5)), rng.normal(size=(4, 5))
    for row, (score, value) in enumerate(zip(scores, values, strict=True)):
        choices = [max(chosen, key=score.__getitem__) for chosen in itertools.combinations(range(5), n)]
        expected = np.mean([value[best] for best in choices])
        assert best_of(scores, values, n)[row] == pytest.approx(expected)


def test_the_best_of_one_is_any_reply_and_more_are_better_by_what_chooses_them(held_out):
    curve = best_of_n(held_out, Longer())
    assert [point.step for point in curve.points] == [1, 2, 4, 8, 16, 32]
    first, *others = curve.points
    assert (first.kl, first.learned) == (0.0, pytest.approx(0.0, abs=1e-9))
    replies = held_out.replies(held_out.start, 32)
    assert first.true == pytest.approx(held_out.truth(replies).mean())
    assert np.all(np.diff([point.learned for point in curve.points]) > 0)
    assert others[0].kl == pytest.approx(np.log(2) - 0.5)


def test_a_policy_is_measured_by_its_own_replies_and_its_distance(held_out, make_policy):
    start = held_out.start
    prior = Prior([start.lm], [1.0])
    there = held_out.point(start, [Longer()], step=0, prior=prior)
    assert there.kl == pytest.approx(0.0, abs=1e-5) and there.learned == 0.0
    other = make_policy(BC(), seed=5)
    found = held_out.point(other, [Longer()], step=7, prior=prior)
    replies = held_out.replies(other)
    worth = [
        expected_reward(Dialog("reply", [*context, {"role": "assistant", "content": reply.text}]))[-1]
        for context, [reply] in zip(held_out.contexts, replies, strict=True)
    ]
    assert found.true == pytest.approx(np.mean(worth)) and found.step == 7 and found.kl > 0


def curves():
    points = [Point(0, 0.0, 0.1, 0.01, 0.0, 0.0), Point(5, 4.0, 0.3, 0.01, 1.0, 0.1)]
    fallen = [*points, Point(10, 9.0, 0.2, 0.02, 2.0, 0.1)]
    return [Curve(BEST_OF, points), Curve("c 0", fallen, alarm=10), Curve("c 0.1", points)]


def test_the_table_says_where_a_curve_is_best_and_where_it_ends():
    _, _, best, over, held = table(curves())
    assert best == "| best of n | +0.300 ± 0.020 | 4.00 | +0.300 ± 0.020 | 4.00 | +1.00 |  |"
    assert over == "| c 0 | +0.300 ± 0.020 | 4.00 | +0.200 ± 0.039 | 9.00 | +2.00 | round 10 |"
    assert held.endswith("| never |")


def test_the_plot_has_every_curve_in_both_panels():
    true, learned = plot(curves()).axes
    assert [len(line.get_xdata()) for line in true.lines] == [2, 3, 2]
    assert list(learned.lines[1].get_ydata()) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "wrong",
    [{"labels": 0}, {"members": 0}, {"kl_weights": ()}, {"kl_weights": (-0.1,)}, {"held_out": 1}],
)
def test_numbers_that_no_run_has(wrong):
    with pytest.raises(UserError, match="rlhf: expected labels, members and online_rounds"):
        main(BenchmarkConfig(what="rlhf", **wrong))


@pytest.mark.slow
@pytest.mark.long
def test_the_command(tmp_path, monkeypatch, capsys):
    """From logs to the plot, with labels of two rounds; the ends are what the last checkpoints say."""
    monkeypatch.setattr(rlhf, "DIALOGS", 80)
    monkeypatch.setattr(rlhf, "CLONE_STEPS", 4)
    monkeypatch.setattr(rlhf, "DRAWS", 4)
    out = tmp_path / "rlhf"
    size = {"labels": 30, "members": 2, "kl_weights": (0.0, 0.5), "online_rounds": 3, "held_out": 8}
    found = main(BenchmarkConfig(what="rlhf", **size, threads=1, output_dir=str(out)))
    report, printed = json.loads((out / "benchmark.json").read_text()), capsys.readouterr().out
    names = ["best of n", "c 0", "c 0.5", "ensemble of 2, c 0", "second round of labels, c 0"]
    assert [curve["name"] for curve in report["curves"]] == names and list(found["ends"]) == names
    assert [[point["step"] for point in curve["points"]] for curve in report["curves"]] == [
        [1, 2, 4],
        *[[0, 1, 2, 3]] * 4,
    ]
    first, *_, again = report["reward_models"]
    assert again["pairs"] > first["pairs"] > 10
    assert "<svg" in (out / "rlhf.svg").read_text() and "| ensemble of 2, c 0 |" in printed
    kinds = {
        len(json.loads(line)["messages"]) % 2
        for line in (out / "online-c_0/rollouts/step-000001.jsonl").open()
    }
    assert kinds == {0}  # a logged context and one reply
