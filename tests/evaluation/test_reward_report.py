"""The reward report's figures by hand; the whole report is written in tests/pipelines/test_prepare.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rl_dialog.data.schema import SPLITS, Dialog
from rl_dialog.evaluation import reward_report
from rl_dialog.evaluation.agreement import agreement, auc, auc_with_interval, labelled_replies
from rl_dialog.evaluation.reward_report import _human, _sums, drawn, reward_table
from rl_dialog.rewards import REWARDS
from rl_dialog.rewards.hacks import try_hacks


def test_auc_counts_pairs():
    """Good 3, 1; bad 2, 1, 0: of six pairs 3 wins all three, 1 wins one and ties one: 4.5 / 6."""
    scores, good = np.array([3.0, 1.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False, False])
    assert auc(scores, good) == pytest.approx(4.5 / 6)
    assert auc(-scores, good) == pytest.approx(1.5 / 6)
    assert np.isnan(auc(scores, np.ones(5, bool)))


def reply(**fields):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "rewards": {}, "reward": 0.0, **fields},
    ]
    return Dialog(id="d", messages=messages)


def test_a_missing_reward_is_no_zero_in_the_table():
    voted = reply(rewards={"vote": 1.0}, reward=2.0)
    table = reward_table([reply(reward=None), reply(reward=0.0), voted], ["vote"])
    np.testing.assert_array_equal(table["sum"], [np.nan, 0, 2])
    np.testing.assert_array_equal(table["vote"], [np.nan, np.nan, 1])


@pytest.mark.parametrize("values", [[0.1 + 0.2, 0.3], [1e17, 1e17 + 16], [1e17], [0.0, 1e-300]])
def test_rewards_that_differ_by_rounding_only_are_drawn(values):
    assert reward_report.plots.histograms({"sum": np.array(values)}).startswith(b"\x89PNG")


def test_a_hack_changes_no_reward_that_nobody_gave():
    """The sum of nothing is missing for the logged reply and for the hacked one, so nothing is won."""
    how = {"weights": {"vote": 1.0, "question": 0.0}, "normalisers": {}}
    total = partial(_sums, rewards={name: REWARDS[name] for name in how["weights"]}, **how)
    assert [total(reply()), total(reply(feedback={"vote": -1}))] == [[None], [-1.0]]
    assert try_hacks([reply()], {"sum": total}) == {"sum": {}}


def of(source, **fields):
    return replace(reply(**fields), source=source)


def test_labels_are_votes_or_logged_numbers_of_two_kinds():
    votes = [reply(feedback={"vote": vote}) for vote in (1, -1, 0)] + [reply()]
    found = labelled_replies(votes, [])
    assert (found.kinds, found.good.tolist()) == (("vote",), [True, False])
    found = labelled_replies(
        [reply(rewards={"logged": value}) for value in (1.0, 0.0)] + [reply()], ["logged"]
    )
    assert (found.kinds, found.good.tolist(), found.scores) == (("logged",), [True, False], {})
    assert labelled_replies([reply(rewards={"logged": value}) for value in (1.0, 0.0, 0.5)], []) is None
    assert labelled_replies([reply()], []) is None


def test_every_source_has_labels_of_its_own():
    """Votes; -1 and 2; a scale of three values, which is no label; one value only, which is the good one of 0
    and 1 elsewhere."""
    values = {"voted": (), "two": (-1.0, 2.0), "scale": (1.0, 2.0, 3.0), "zeros and ones": (0.0, 1.0)}
    dialogs = [of(source, rewards={"logged": value}) for source, found in values.items() for value in found]
    dialogs += [of("voted", rewards={"logged": 0.5}, feedback={"vote": vote}) for vote in (1, 0, -1)]
    found = labelled_replies(dialogs, [])
    told = [(found.sources[s], good) for s, good in zip(found.source, found.good.tolist(), strict=True)]
    assert sorted(told) == [
        (source, good) for source in ("two", "voted", "zeros and ones") for good in (False, True)
    ]
    apart = labelled_replies(
        [of(source, rewards={"logged": value}) for source, value in (("chosen", 1.0), ("rejected", 0.0)) * 2],
        [],
    )
    assert apart.sources == ("chosen", "rejected") and apart.good.tolist() == [True, False] * 2


def pairs(count, source="pairs"):
    """The file's order is chosen, rejected, chosen, ...; `length` prefers the chosen one in three pairs of
    four."""
    for n in range(count):
        for side, label in (("chosen", 1.0), ("rejected", 0.0)):
            length = n % 7 + (label if n % 4 else 1 - label)
            said = {
                "role": "assistant",
                "content": side,
                "rewards": {"logged": label, "length": length},
                "reward": label,
            }
            yield Dialog(
                id=f"{n}#{side}", messages=[{"role": "user", "content": f"question {n}"}, said], source=source
            )


def test_a_pair_is_drawn_as_a_whole_and_both_sides_alike():
    """Every second one of 2,000 dialogs would be the chosen ones."""
    dialogs = list(pairs(1000))
    sample = drawn(lambda: dialogs, 2000, 1000)
    sides = Counter(dialog.id.split("#")[1] for dialog in sample)
    assert sides["chosen"] == sides["rejected"] and 400 < sides["chosen"] < 600
    assert {dialog.id for dialog in sample} == {
        dialog.id for dialog in drawn(lambda: reversed(dialogs), 2000, 1000)
    }
    again = drawn(lambda: sample, len(sample), 500)
    assert 400 < len(again) < 600
    opening = [{"role": "user", "content": "hi"}]  # of all of them: drawn one by one, not all or none
    alike = [Dialog(str(n), [*opening, {"role": "assistant", "content": "yes"}]) for n in range(1000)]
    assert 200 <= len(drawn(lambda: alike, 1000, 200)) < 210
    assert len(drawn(lambda: dialogs, 2000, 1)) == 2  # never none, and never half a pair


def test_an_interval_is_over_units():
    """A set written down five times over says no more; noise is covered in about 19 of 20 sets."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(300):
        unit = np.repeat(np.arange(40), 3)
        good = rng.random(120) < 0.3
        _, low, high = auc_with_interval(
            np.repeat(rng.normal(size=40), 3) + rng.normal(size=120) + good, good, unit
        )
        covered.append(low < NORMAL_AUC < high)
    assert 0.92 < np.mean(covered) < 0.985
    scores, good, unit = rng.normal(size=60), rng.random(60) < 0.5, np.arange(60)
    assert auc_with_interval(scores, good, unit) == pytest.approx(
        auc_with_interval(*(np.tile(each, 5) for each in (scores, good, unit)))
    )


def test_an_auc_of_one_from_few_labels_is_not_certain():
    """By the rule of three, of the kind that there is less of; one conversation is one unit."""
    scores, good = np.arange(8.0), np.arange(8) >= 4
    assert auc_with_interval(scores, good, np.arange(8)) == pytest.approx((1.0, 0.25, 1.0))
    assert auc_with_interval(-scores, good, np.arange(8)) == pytest.approx((0.0, 0.0, 0.75))
    assert auc_with_interval(scores, good, np.zeros(8, int)) == (1.0, 0.0, 1.0)


NORMAL_AUC = 0.6915  # Phi(1 / 2): a good score is 1 more than a bad one, their difference has the variance 4


def test_a_reward_that_only_tells_sources_apart_is_told():
    """One source is mostly good and writes long, the other mostly bad and short; within each, length says
    nothing."""
    rng, dialogs = np.random.default_rng(0), []
    for n in range(800):
        source, good = ("a", rng.random() < 0.9) if n % 2 else ("b", rng.random() < 0.1)
        rewards = {
            "logged": float(good),
            "length": rng.normal() + 3 * (source == "a"),
            "judge": rng.normal() + 2 * good,
        }
        message = {"role": "assistant", "content": "x", "rewards": rewards, "reward": 0.0}
        dialogs.append(Dialog(str(n), [{"role": "user", "content": str(n)}, message], source=source))
    labelled = labelled_replies(dialogs, ["length", "judge"])
    length, judge = (agreement(labelled, name) for name in ("length", "judge"))
    assert length.whole.auc > 0.85 and length.within.low < 0.5 < length.within.high
    for name, found in (("length", length), ("judge", judge)):
        for source in "ab":
            its = [
                (d.messages[1]["rewards"][name], d.messages[1]["rewards"]["logged"] == 1)
                for d in dialogs
                if d.source == source
            ]
            assert found.of_source[source].auc == pytest.approx(auc(*map(np.array, zip(*its, strict=True))))
    assert length.separates and not judge.separates
    section = _human(labelled)
    assert section.table.columns == ["reward", "AUC", "within sources", "a", "b", "replies"]
    [note] = section.notes
    assert note.startswith("length tells sources apart: 0.8") and "between replies of the same source" in note


def test_sources_of_one_kind_each_say_nothing_of_replies():
    dialogs = [
        of(source, rewards={"logged": value, "length": n})
        for source, value in (("a", 1.0), ("b", 0.0))
        for n in range(5)
    ]
    [note] = _human(labelled_replies(dialogs, ["length"])).notes
    assert note.startswith("length: no source has good and bad replies that it applies to")


def test_the_report_counts_all_labelled_replies(tmp_path, monkeypatch):
    """1,000 pairs, a sample of 300 dialogs: the AUC is that of all 2,000 replies to the last digit."""
    dialogs = list(pairs(1000))
    components = {"length": {"weight": 1.0, "mean": 0, "std": 1, "min": 0, "max": 1, "coverage": 1.0}}
    manifest = {
        "splits": {split: {"dialogs": 0} for split in SPLITS} | {"train": {"dialogs": 2000}},
        "rewards": {"components": components, "sum": components["length"], "correlation": {}},
    }
    monkeypatch.setattr(reward_report, "SAMPLE", 300)
    monkeypatch.setattr(reward_report.plots, "histograms", lambda shown: None)
    monkeypatch.setattr(reward_report, "load_manifest", lambda data: manifest)
    monkeypatch.setattr(
        reward_report, "read_dialogs", lambda data, split: iter(dialogs if split == "train" else [])
    )
    markdown, _ = reward_report.write_reward_report(tmp_path, {"length": lambda dialog: [1.0]})
    scores, good = (
        np.array([d.messages[1]["rewards"][name] for d in dialogs]) for name in ("length", "logged")
    )
    [row] = [
        line for line in markdown.read_text().split("## ")[3].splitlines() if line.startswith("| length")
    ]
    assert row.startswith(f"| length | {auc(scores, good == 1):.3f} ") and row.endswith("| 2,000 |")
