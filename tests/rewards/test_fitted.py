"""What `fit_reward` wrote, as the scorers of rewards load it."""

from __future__ import annotations

import json

import pytest
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.rewards.fitted import judges_texts, load_reward_model
from rl_dialog.rewards.scorers import make_scorers
from rl_dialog.rewards.tfidf import TfidfClassifier

TEXTS = ["thank you", "stupid fool", "you kind friend", "  "]


@pytest.fixture
def folder(tmp_path):
    """folder(rated, reads): a small transformer, untrained."""

    def make(rated, reads="reply"):
        torch.manual_seed(0)
        reward = TextReward.new(
            TEXTS * 5, hidden_size=32, num_hidden_layers=1, vocab_size=300, max_length=64, reads=reads
        )
        reward.model.config.rated = rated
        reward.eval().save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make


def test_a_text_is_judged_by_the_probability_of_a_good_reply(folder):
    path = folder(rated=True)
    scores = load_reward_model(path).score([[{"role": "assistant", "content": text}] for text in TEXTS[:3]])
    expected = [*torch.tensor(scores).sigmoid().tolist(), 0.0]  # an empty text is nothing
    for name in ("sentiment", "toxicity"):
        assert make_scorers([f"{name}={path}"])[name].score(TEXTS) == pytest.approx(expected, abs=1e-6)
    level = make_scorers([f"toxicity_level={path}"])["toxicity_level"]
    assert set(level.score(TEXTS)) <= {0, 1, 2} and level("  ") == 0


def test_scores_of_preferences_have_no_zero(folder):
    path = folder(rated=False)
    with pytest.raises(UserError, match="expected a model of good and bad replies .*--objective ratings"):
        make_scorers([f"toxicity={path}"])
    talk = (("user", "hi"), ("assistant", "thank you"))
    said = [{"role": role, "content": content} for role, content in talk]
    assert (
        make_scorers([f"reward_model={path}"])["reward_model"](talk)
        == load_reward_model(path).score([said])[0]
    )


@pytest.mark.parametrize("reads", ["reply", "conversation"])
def test_what_a_score_depends_on_survives_a_file(folder, reads):
    reward = TextReward.from_pretrained(folder(True, reads))
    one, other = (
        [{"role": "user", "content": asked}, {"role": "assistant", "content": "thank you"}]
        for asked in ("a", "b")
    )
    scores = reward.score([one, other, one[1:]])
    assert (reward.reads, reward.rated) == (reads, True)
    assert (scores[0] == pytest.approx(scores[1], abs=1e-6)) == (reads == "reply")
    assert (scores[0] == pytest.approx(scores[2], abs=1e-6)) == (reads == "reply")


def test_words_are_a_reward_model_too(tmp_path):
    classifier = TfidfClassifier.fit(TEXTS[:2] * 5, [True, False] * 5)
    classifier.save_pretrained(tmp_path)
    scorer = make_scorers([f"reward_model={tmp_path}"])["reward_model"]
    good, bad = (scorer((("user", "stupid?"), ("assistant", text))) for text in TEXTS[:2])
    assert good > 0 > bad
    [p] = classifier(TEXTS[:1])
    assert 1 / (1 + torch.tensor(-good).exp().item()) == pytest.approx(p, abs=1e-4)


def test_which_folders_are_ours(folder, tmp_path):
    assert judges_texts(folder(True)) and judges_texts(folder(False))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"id2label": {"0": "bad", "1": "good"}}))
    assert not judges_texts(str(tmp_path / "other")) and not judges_texts("roberta-base")
