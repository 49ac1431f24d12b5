"""Teachers: what they say of each message, each text asked once; and what is no teacher."""

from __future__ import annotations

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.rewards.encoder import Encoder
from rl_dialog.rewards.scorers import VADER, hashed_words, moods
from rl_dialog.rewards.teachers import Teacher, describe, make_teachers, teach
from tests.rewards.test_scorers import classifier  # noqa: F401  (a fixture)
from tests.rewards.test_similarity import TEXTS, encoder  # noqa: F401  (a fixture)


def talk(*messages) -> Dialog:
    return Dialog("d", [{"role": role, "content": content} for role, content in messages])


TALK = talk(
    ("system", "be kind"), ("user", "I love it"), ("assistant", "  "), ("user", "no"), ("assistant", "no")
)


def test_moods_are_vaders_shares():
    """In "I love it" love has valence 3.2, which counts 4.2, and two neutral words count 1 each."""
    love, nothing, bad = moods(["I love it", "?!", "I hate this awful thing"])
    assert love == pytest.approx([0, 2 / 6.2, 4.2 / 6.2], abs=1e-3) and nothing.tolist() == [0, 1, 0]
    assert bad.argmax() == 0 and bad.sum() == pytest.approx(1)


def test_the_built_in_teachers_say_something_of_each_spoken_message():
    """Not of the system prompt, nor of a blank message."""
    teachers = make_teachers(["embedding", "emotion"])
    assert describe(teachers) == {
        "emotion": {"name": VADER.name, "labels": ["negative", "neutral", "positive"]},
        "embedding": {"name": "hashed words", "size": 256},
    }
    [taught] = teach(teachers, [TALK])
    assert taught.places.tolist() == [1, 3, 4]
    assert taught.emotions == pytest.approx(moods(["I love it", "no", "no"]), abs=1e-6)
    words = hashed_words("I love it")
    assert taught.embeddings[0] == pytest.approx(words.mean(0), abs=2e-3)
    assert taught.embeddings.dtype == np.float16


def test_a_text_is_asked_once():
    asked = []

    def ask(texts):
        asked.append(texts)
        return np.array([[float(len(text))] for text in texts])

    first, second = teach({"embedding": Teacher("lengths", ask, {"size": 1})}, [TALK, talk(("user", "no"))])
    assert asked == [["I love it", "no"]]
    assert first.embeddings.tolist() == [[9], [2], [2]] and second.embeddings.tolist() == [[2]]
    assert first.emotions.shape == (3, 0)
    [silent] = teach({"embedding": Teacher("lengths", ask, {"size": 1})}, [talk(("system", "x"))])
    assert silent.embeddings.shape == (0, 1)


def test_models_of_ones_own(classifier, encoder):  # noqa: F811
    path = classifier(["joy", "anger"])
    teachers = make_teachers([f"emotion={path}", f"embedding={encoder}"])
    assert describe(teachers)["emotion"] == {"name": path, "labels": ["joy", "anger"]}
    assert describe(teachers)["embedding"] == {"name": str(encoder), "size": 32}
    [taught] = teach(teachers, [talk(("user", TEXTS[0]), ("assistant", TEXTS[1]))])
    assert taught.emotions.sum(1) == pytest.approx([1, 1], abs=1e-6)
    states = Encoder(str(encoder))([TEXTS[0]])[TEXTS[0]][0]
    assert taught.embeddings[0] == pytest.approx(states.mean(0).numpy(), abs=2e-3)


def test_several_labels_that_hold_are_shares(classifier):  # noqa: F811
    path = classifier(["joy", "anger", "fear"], problem_type="multi_label_classification")
    [taught] = teach(make_teachers([f"emotion={path}"]), [talk(("user", "good dogs"))])
    assert taught.emotions.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["emotoin"], "unknown teacher 'emotoin'.*Did you mean emotion?"),
        (["emotion", "embeding=x"], "unknown teacher 'embeding'.*Did you mean embedding?"),
        (["emotion", "emotion=x"], "each teacher once.*got emotion twice"),
        (["embedding="], "got no path behind ="),
        (["embedding=/no/such/encoder"], "/no/such/encoder: expected a directory with a model"),
    ],
)
def test_what_is_no_teacher(entries, message):
    with pytest.raises(UserError, match=message):
        make_teachers(entries)
