"""The small classifier: what it computes without scikit-learn is what scikit-learn computes, and it
learns."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rl_dialog.errors import UserError
from rl_dialog.rewards.scorers import make_scorers
from rl_dialog.rewards.tfidf import TfidfClassifier, TfidfSettings, grams

GOOD, BAD = "thank kindly friend", "stupid rude fool"


def corpus(count=200, seed=0):
    """Texts of common words, half of them with a word of the one kind or the other."""
    rng = np.random.default_rng(seed)
    good = rng.random(count) < 0.4
    common = ["the", "a", "dog", "cat", "sat", "on", "mat", "with", "and", "you"]
    return [
        " ".join(rng.permutation([*rng.choice(common, 6), rng.choice((GOOD if g else BAD).split())]))
        for g in good
    ], good


def test_it_equals_scikit_learn_on_texts_it_has_not_seen():
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    texts, good = corpus()
    fitted = TfidfClassifier.fit(texts, good)
    vectorizer = TfidfVectorizer(analyzer=grams, min_df=3, max_df=0.9, sublinear_tf=True)
    x = vectorizer.fit_transform(texts).toarray()
    shares = [(x[chosen].sum(0) + 1) / (x[chosen].sum(0) + 1).sum() for chosen in (good, ~good)]
    ratio = np.log(shares[0] / shares[1])
    regression = LogisticRegression(C=4.0, max_iter=1000).fit(x * ratio, good)
    unseen = [*corpus(50, seed=1)[0], "", "nothing of this was seen", "you you you stupid"]
    expected = regression.predict_proba(vectorizer.transform(unseen).toarray() * ratio)[:, 1]
    assert fitted(unseen) == pytest.approx(expected.tolist(), abs=1e-6)


def test_it_learns_and_survives_a_file(tmp_path):
    texts, good = corpus()
    fitted = TfidfClassifier.fit(texts, good)
    fitted.save_pretrained(tmp_path / "scorer")
    again = TfidfClassifier.load(tmp_path / "scorer")
    unseen, truth = corpus(100, seed=2)
    assert (np.array(again(unseen)) > 0.5).tolist() == truth.tolist()
    assert again(unseen) == pytest.approx(fitted(unseen), abs=1e-4)
    scorer = make_scorers([f"toxicity={tmp_path / 'scorer'}"])["toxicity"]
    assert scorer("you stupid fool") < 0.2 < 0.8 < scorer("thank you kindly")


def test_what_cannot_be_fitted_or_read(tmp_path):
    with pytest.raises(UserError, match="expected good and bad texts, got 3 good ones of 3"):
        TfidfClassifier.fit(["a", "b", "c"], [True] * 3)
    with pytest.raises(UserError, match="expected words that occur in at least 3 of the 2 texts"):
        TfidfClassifier.fit(["a", "b"], [True, False])
    with pytest.raises(UserError, match="max_share in"):
        TfidfSettings(max_share=2.0)
    (tmp_path / "tfidf.json").write_text(json.dumps({"features": {"a": [1.0]}, "bias": 0.0}))
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="expected a classifier that pipelines.fit_reward wrote"):
            TfidfClassifier.load(place)


def test_words_and_pairs():
    assert (
        grams("You stupid fool") == ["you", "stupid", "fool", "you stupid", "stupid fool"] and grams("") == []
    )
