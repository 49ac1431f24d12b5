"""Two people at the real page, one of whom does not look: gold pairs and agreement tell who it is, and the
reward model that weighs them is better on held-out truth than the one that does not."""

from __future__ import annotations

import random

import pytest

from rl_dialog.preferences.agreement import alpha, by_query, opinions
from rl_dialog.preferences.disagreement_report import disagreement_report
from rl_dialog.preferences.labels import NewQuery
from rl_dialog.preferences.replies import ReplyPair
from rl_dialog.preferences.reply_fitting import Fitting, score
from rl_dialog.preferences.reply_reward import ReplyRewardSettings, fitted, read_labels
from rl_dialog.preferences.segments import Reply
from tests.browser.test_label_page import eventually, labels, sit_down  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

GOOD, BAD = ("gladly", "thanks", "please", "welcome"), ("no", "whatever", "never", "wrong")
PLAIN = ("the", "room", "is", "booked", "today", "for", "two")
PAIRS, GOLD, HELD_OUT = 48, 40, 300


def worth(text):
    return sum((word in GOOD) - (word in BAD) for word in text.split())


def pairs(seed, number):
    """Pairs of replies of which one is truly better, the first."""
    rng, made = random.Random(seed), []
    while len(made) < number:
        one, other = (" ".join(rng.sample(PLAIN, 2) + rng.choices(GOOD + BAD, k=2)) for _ in range(2))
        if worth(one) != worth(other):
            talk = [{"role": "user", "content": f"question {seed} {len(made)}"}]
            better, worse = sorted((one, other), key=worth, reverse=True)
            made.append((Reply(talk, better), Reply(talk, worse)))
    return made


def answer_all(person, name, looks, choose):
    """Answers until they have answered every pair; how many answers that took, gold pairs included."""
    reply = "side => document.querySelector(`#${side} .reply`).textContent"
    ready = "() => !document.querySelector('.choice').disabled && !document.querySelector('.choice.pressed')"

    def answered():
        mine = [answer for answer in person.labels.log.answers() if answer.labeller == name]
        return sum(answer.gold is None for answer in mine) == PAIRS and len(mine)

    while not (done := answered()):
        if not person.page.evaluate(ready):
            person.page.wait_for_timeout(20)
            continue
        left, right = (person.page.evaluate(reply, side) for side in ("left", "right"))
        person.labels.ahead += looks  # seconds
        person.press(choose(left, right))
    return done


def accuracy(model):
    held_out = pairs(2, HELD_OUT)
    scores = score(model, [reply for pair in held_out for reply in pair])
    return sum(scores[better.id] > scores[worse.id] for better, worse in held_out) / HELD_OUT


def test_a_careless_labeller_is_caught_and_costs_the_reward_model_nothing(labels, sit_down, tmp_path):  # noqa: F811
    log, rng = labels.log, random.Random(0)
    asked = [tuple(map(labels.segments.add, pair)) for pair in pairs(0, PAIRS)]
    log.add_queries(
        NewQuery(*rng.sample(pair, 2), task="Which reply is better?", validation=False) for pair in asked
    )
    gold = [tuple(map(labels.segments.add, pair)) for pair in pairs(1, GOLD)]
    log.add_gold(NewQuery(*pair, task="Which reply is better?", gold=1.0) for pair in gold)
    log.set_plan(overlap=2, gold_share=0.3)
    url = labels.url()
    careless = sit_down("bob", url)  # he is quick, and first
    given = answer_all(careless, "bob", 0.1, lambda left, right: rng.choice(("l", "l", "l", "R")))
    careful = sit_down("ann", url)
    given += answer_all(careful, "ann", 3.0, lambda left, right: "l" if worth(left) > worth(right) else "R")
    eventually(lambda: log.state()[0] == given)

    told = disagreement_report(log, labels.segments, None, tmp_path / "report")
    figures = log.labellers()
    assert told["shared_pairs"] == PAIRS and 0.25 * PAIRS < told["disputed_pairs"] < 0.75 * PAIRS
    assert (
        alpha(
            [[one.preference for one in group] for group in by_query(opinions(log.answers())).values()]
        ).high
        < 0.5
    )
    assert figures["ann"]["gold_right"] == figures["ann"]["gold"] > 8
    assert figures["bob"]["gold_right"] < 0.8 * figures["bob"]["gold"]
    assert "bob" in told["doubtful"] and "ann" not in told["doubtful"], told

    fitting = Fitting(learning_rate=1e-2, epochs=12, batch_size=8)
    reached = {}
    for opinions_used in ("first", "weighted"):
        settings = ReplyRewardSettings(
            run=str(labels.folder),
            opinions=opinions_used,
            reads="reply",
            hidden_size=32,
            num_hidden_layers=1,
            vocab_size=400,
            fitting=fitting,
        )
        learned = read_labels(settings)
        assert len(learned.pairs) == PAIRS and all(isinstance(pair, ReplyPair) for pair in learned.pairs)
        reached[opinions_used] = accuracy(fitted(learned, settings))
    assert reached["weighted"] > 0.85 and reached["weighted"] > reached["first"] + 0.15, reached
    print(reached, told)
