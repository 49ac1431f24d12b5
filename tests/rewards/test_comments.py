"""The comment task: from the CSV files to rewards of upvotes and toxicity, and to a model of upvotes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_dialog.data.readers import read_logs
from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.rewards import apply_rewards, choose_rewards
from rl_dialog.rewards.choosing import load_rewards
from rl_dialog.rewards.reply import predicted_upvotes
from rl_dialog.rewards.scorers import NO_MODEL, Scorer
from rl_dialog.rewards.tfidf import TfidfClassifier
from tests.data.reddit_sample import write_comments


@pytest.fixture(scope="module")
def comments(tmp_path_factory: pytest.TempPathFactory) -> list[Dialog]:
    folder = tmp_path_factory.mktemp("comments")
    write_comments(folder, comments=60, seed=2)
    return read_logs([folder])[0]


def test_the_rewards_of_the_task(comments):
    """Kind comments earn +1 and 0, rude ones -1 and, at the weight of 5 that the paper trained on, -10."""
    weights = {"upvotes": 1.0, "toxicity_level": 5.0}
    for dialog in comments:
        apply_rewards(dialog, choose_rewards(weights), weights)
        reply = dialog.messages[dialog.replies[-1]]
        positive = reply["feedback"]["score"] > 0
        assert reply["reward"] == (1.0 if positive else -11.0)


def test_sensitive_comments_become_safe_or_toxic_by_halves():
    """0, -5, -10 by level; with noise the middle one falls to either side, always the same way."""
    level = Scorer("levels", lambda texts: [int(text.split()[0]) for text in texts], 0)
    texts = [f"{n % 3} {n}" for n in range(1200)]
    messages = [
        m for t in texts for m in ({"role": "user", "content": "x"}, {"role": "assistant", "content": t})
    ]
    scorers = {"toxicity_level": level}
    table = {}
    for name in ("toxicity_level", "toxicity_noised"):
        dialog = Dialog("d", messages)
        scored = apply_rewards(dialog, choose_rewards([name], scorers=scorers), {name: 5.0})[:, -1]
        table[name] = [scored[n::3].tolist() for n in range(3)]
        again = apply_rewards(dialog, choose_rewards([name], scorers=scorers), {name: 5.0})[:, -1]
        assert again.tolist() == scored.tolist()
    assert [set(each) for each in table["toxicity_level"]] == [{0.0}, {-5.0}, {-10.0}]
    noised = table["toxicity_noised"]
    assert [set(each) for each in noised] == [{0.0}, {0.0, -10.0}, {-10.0}]
    assert abs(noised[1].count(-10.0) - 200) < 4 * 10  # four standard deviations of 400 coins


def test_a_model_predicts_upvotes(comments, tmp_path: Path):
    """What `fit_reward` writes for the scores, asked about comments that it has not seen."""
    replies = [dialog.messages[dialog.replies[-1]] for dialog in comments]
    texts = [reply["content"] for reply in replies]
    good = [reply["feedback"]["score"] > 0 for reply in replies]
    model = TfidfClassifier.fit(texts, good)
    model.save_pretrained(tmp_path)
    options = {"rating": None, "compat": "", "label_weights": {}}
    weights = {"predicted_upvotes": 1.0}
    reward = load_rewards(weights, scorers=[f"upvotes={tmp_path}"], **options)["predicted_upvotes"]
    unseen = [
        "I love the moon.",
        "What a stupid thing to say about the moon.",
        "Only an idiot likes it.",
    ]
    for text, expected in zip(unseen, (1.0, -1.0, -1.0), strict=True):
        talk = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": text}]
        assert reward(Dialog("d", talk)) == [expected]
    with pytest.raises(UserError, match="--rewards.predicted_upvotes: expected the model that it asks"):
        load_rewards(weights, scorers=[], **options)
    assert predicted_upvotes(Dialog("d", talk), upvotes=NO_MODEL) == [None]


@pytest.mark.parametrize(("probability", "value"), [(0.5, 1.0), (0.499, -1.0), (0.0, -1.0), (1.0, 1.0)])
def test_half_is_enough(probability, value):
    talk = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    said = Scorer("said", lambda texts: [probability for _ in texts], 0.0)
    assert predicted_upvotes(Dialog("d", talk), upvotes=said) == [value]
