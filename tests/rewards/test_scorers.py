"""Scorers: asked once per text and in batches, built-in or a model; rewards that read them, by hand."""

from __future__ import annotations

import pickle
import random
import time

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from rl_dialog.data.schema import Dialog
from rl_dialog.errors import UserError
from rl_dialog.rewards import REWARDS, choose_rewards
from rl_dialog.rewards.choosing import prepared_rewards, read_label_weights
from rl_dialog.rewards.coherence import answer_coherence, coherence, coherence_extrema, coherence_greedy
from rl_dialog.rewards.encoder import Encoder
from rl_dialog.rewards.reply import toxicity, toxicity_level, toxicity_noised
from rl_dialog.rewards.scorers import (
    EMOJI_WEIGHTS,
    EMOJIS,
    HASHED_WORDS,
    MOST_TEXTS,
    MOST_WORDS,
    TOGETHER,
    VADER,
    Scorer,
    in_batches,
    make_scorers,
    needed,
    toxicity_levels,
    with_scorers,
)
from rl_dialog.rewards.similarity import similarity
from rl_dialog.rewards.user import sentiment, sentiment_transition
from rl_dialog.rewards.words import LONGEST_REMEMBERED, _found, parts


def talk(*turns, name="d"):
    return Dialog(
        id=name,
        messages=[{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)],
    )


@pytest.fixture
def counting():
    """A scorer of text lengths that writes down what it was asked."""
    asked = []

    def score(texts):
        asked.append(list(texts))
        return [float(len(text)) for text in texts]

    return Scorer("lengths", score, 0.0), asked


def test_a_text_is_asked_once_and_in_batches(counting):
    scorer, asked = counting
    reward = with_scorers(sentiment_transition, {"sentiment": scorer})
    dialogs = [talk("hi", "a", f"answer {n % 7}", "b", name=f"d{n}") for n in range(TOGETHER + 10)]
    values = [reward(dialog) for dialog in in_batches(dialogs, [reward], [scorer])]
    assert values == [[6.0, None]] * len(dialogs)  # "answer 3" has six characters more than "hi"
    assert [len(batch) for batch in asked] == [8]  # seven answers and "hi"; the second group asks nothing new


def test_batches_change_nothing(counting):
    scorer, asked = counting
    dialogs = [talk("hi" * n, "a", "so", "b" * n, "!" * n) for n in range(5)]
    rewards = choose_rewards(
        ["sentiment", "sentiment_slope", "reply_sentiment", "question"], scorers={"sentiment": scorer}
    )
    together = [
        [reward(d) for reward in rewards.values()]
        for d in in_batches(dialogs, list(rewards.values()), [scorer])
    ]
    alone = choose_rewards(list(rewards), scorers={"sentiment": Scorer("lengths", scorer.score, 0.0)})
    assert together == [[reward(d) for reward in alone.values()] for d in dialogs]


def test_what_is_remembered_is_bounded(counting):
    scorer, _ = counting
    for n in range(MOST_TEXTS + 5):
        scorer(str(n))
    assert len(scorer.known) <= MOST_TEXTS and scorer("123") == 3.0


def test_which_scorers_a_reward_needs():
    assert (
        needed(sentiment) == ["sentiment"]
        and needed(coherence) == ["encoder"]
        and needed(toxicity) == ["toxicity"]
        and needed(REWARDS["you"]) == []
    )
    assert with_scorers(REWARDS["you"], make_scorers()) is REWARDS["you"]
    assert pickle.loads(pickle.dumps(sentiment)) is sentiment


def vectors(**known):
    """An encoder of the words it is given."""
    return Scorer(
        "words",
        lambda texts: [
            np.array([known[w] for w in text.split() if w in known]).reshape(-1, 2) for text in texts
        ],
        np.zeros((0, 2)),
    )


def test_coherence_by_hand():
    """x and y of length 1 at a right angle; reply "x y", the user's "x": means (.5, .5) and x, cosine .7071;
    each of the user's words is met: 1."""
    encoder = vectors(x=[1.0, 0.0], y=[0.0, 1.0])
    dialog = talk("x", "x y", "y")
    assert coherence(dialog, encoder=encoder) == [pytest.approx(0.7071, abs=1e-4)]
    assert coherence_extrema(dialog, encoder=encoder) == [pytest.approx(0.7071, abs=1e-4)]
    assert coherence_greedy(dialog, encoder=encoder) == [pytest.approx(1.0)]
    assert coherence_greedy(talk("x y", "x"), encoder=encoder) == [pytest.approx(0.5)]
    assert answer_coherence(dialog, encoder=encoder) == [pytest.approx(0.7071, abs=1e-4)]
    assert coherence(talk("what", "x y"), encoder=encoder) == [0.0]  # no word of the user's is known
    assert coherence(Dialog(id="d", messages=[{"role": "assistant", "content": "x"}]), encoder=encoder) == [
        None
    ]


def test_extrema_keep_the_sign():
    """(-3, 1) and (2, .5): the extrema are -3 and 1."""
    encoder = vectors(a=[-3.0, 1.0], b=[2.0, 0.5], c=[-3.0, 1.0])
    assert coherence_extrema(talk("c", "a b"), encoder=encoder) == [pytest.approx(1.0)]


def test_the_built_in_encoder_finds_shared_words():
    near, far, same = (
        coherence(talk("dogs bark in the park", reply))[0]
        for reply in ("dogs in the park sleep", "cats eat fish now", "Dogs bark in the park!")
    )
    assert same == pytest.approx(1.0) and same > near > 0.5 > abs(far)
    assert HASHED_WORDS("dogs") is HASHED_WORDS("dogs") and np.array_equal(
        HASHED_WORDS("cats dogs")[1], HASHED_WORDS("dogs")[0]
    )


def test_the_list_of_insults_finds_words():
    assert toxicity(talk("hi", "you idiot", "what", "a classic scrapbook")) == [-1.0, 0.0]


# --- models -------------------------------------------------------------------------------------------------

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "fine", "dogs"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """classifier(labels): a folder with a small random classifier of these labels."""

    def build(labels, **settings):
        folder = tmp_path_factory.mktemp("classifier")
        torch.manual_seed(0)
        (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "max_position_embeddings": 32,
        }
        config = BertConfig(
            vocab_size=len(VOCABULARY),
            **sizes,
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
            **settings,
        )
        BertForSequenceClassification(config).save_pretrained(folder)
        return str(folder)

    return build


def test_a_classifier_scores_the_weighted_labels(classifier):
    path = classifier(["Negative", "Neutral", "Positive"])
    scorer = make_scorers([f"sentiment={path}"])["sentiment"]
    assert scorer.name == path and scorer("  ") == 0.0
    model, tokenizer = (
        BertForSequenceClassification.from_pretrained(path).eval(),
        BertTokenizerFast.from_pretrained(path),
    )
    texts = ["good dogs", "bad", "fine fine dogs good"]
    for text in texts:
        p = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0].tolist()
        assert scorer(text) == pytest.approx(p[2] - p[0], abs=1e-5)
    together = make_scorers([f"sentiment={path}"])["sentiment"]
    together.collect()
    for text in texts:
        together(text)
    together.score_collected()
    assert [together.known[text] for text in texts] == pytest.approx(
        [scorer(text) for text in texts], abs=1e-5
    )


def test_an_encoder_is_asked_once_for_a_batch(classifier, monkeypatch):
    """Cosines of a model's mean token vectors, as `similarity("embedding")` has them; texts without words
    have no vectors."""
    path = classifier(["a", "b"])
    scorer, calls = make_scorers([f"encoder={path}"])["encoder"], []
    score = scorer.score
    monkeypatch.setattr(
        Encoder,
        "__call__",
        lambda self, texts, call=Encoder.__call__: calls.append(len(texts)) or call(self, texts),
    )
    reward = with_scorers(coherence, {"encoder": scorer})
    dialogs = [talk("good dogs", "bad dogs " * n, name=f"d{n}") for n in range(5)]  # the first reply is empty
    values = [reward(dialog)[0] for dialog in in_batches(dialogs, [reward], [scorer])]
    assert calls == [5]  # "good dogs" and four replies that are not empty
    expected = similarity("embedding", path=path)(
        [f"{'bad dogs ' * n}" for n in range(1, 5)], ["good dogs"] * 4
    )
    assert values == [0.0, *(pytest.approx(value, abs=1e-5) for value in expected)]
    assert score(["", " "])[0].shape == (0, 16)


def test_a_reward_that_cannot_work_with_a_blank_is_asked_again(counting):
    scorer, _ = counting

    def mine(dialog, *, sentiment):
        return [1 / sentiment(dialog.messages[i]["content"]) for i in dialog.replies]

    reward = with_scorers(mine, {"sentiment": scorer})
    assert [reward(dialog) for dialog in in_batches([talk("hi", "four")], [reward], [scorer])] == [[0.25]]
    [dialog] = in_batches([talk("hi", "")], [reward], [scorer])
    with pytest.raises(ZeroDivisionError):
        reward(dialog)


def test_emoji_weights():
    """Uniform over the 64 emojis: 4.5 / 64 = .0703125; all on thumbsup: 1."""
    assert len(EMOJIS) == 64 and set(EMOJI_WEIGHTS) <= set(EMOJIS)
    weights = np.array([EMOJI_WEIGHTS.get(emoji, 0.0) for emoji in EMOJIS])
    assert np.full(64, 1 / 64) @ weights == 0.0703125
    assert np.eye(64)[EMOJIS.index("thumbsup")] @ weights == 1.0


def test_a_classifier_of_64_unnamed_outputs_is_one_of_emojis(classifier):
    scorer = make_scorers([f"sentiment={classifier([f'LABEL_{i}' for i in range(64)])}"])["sentiment"]
    assert abs(scorer("good dogs") - 0.0703125) < 0.1  # a random model is nearly uniform


def test_prepared_rewards_weigh_the_labels_as_they_were_and_a_lost_model_takes_no_other_along(classifier):
    path = classifier(["joy", "anger"])
    weights = {"joy": 1.0, "anger": -0.5}
    settings = {"scorers": ["encoder=/lost", f"sentiment={path}"]}
    settings["label_weights"] = [f"{label}={weight}" for label, weight in weights.items()]
    rewards, missing = prepared_rewards(["coherence", "reply_sentiment"], settings)
    scorer = make_scorers([f"sentiment={path}"], label_weights=weights)["sentiment"]
    dialog = talk("hi", "good dogs")
    assert rewards.keys() == {"reply_sentiment"} and missing.keys() == {"coherence"}
    [said] = rewards["reply_sentiment"](dialog)
    assert said == pytest.approx(scorer("good dogs"), abs=1e-6)


def test_several_labels_may_hold(classifier):
    path = classifier(["toxic", "insult"], problem_type="multi_label_classification")
    scorer = make_scorers([f"toxicity={path}"], label_weights={"toxic": 1.0, "insult": 0.0})["toxicity"]
    model, tokenizer = (
        BertForSequenceClassification.from_pretrained(path).eval(),
        BertTokenizerFast.from_pretrained(path),
    )
    expected = model(**tokenizer("bad dogs", return_tensors="pt")).logits.sigmoid()[0, 0].item()
    assert toxicity(talk("hi", "bad dogs"), toxicity=scorer) == [pytest.approx(-expected, abs=1e-5)]


@pytest.mark.parametrize(
    ("probabilities", "level"),
    [
        ((0.6, 0.3, 0.1), 0),
        ((0.3, 0.6, 0.1), 1),
        (
            (0.1, 0.2, 0.7),
            1,
        ),  # the likeliest is 2, but exp(-0.355) = 0.7012 it is not: the likelier of 0 and 1
        ((0.2, 0.1, 0.7), 0),
        ((0.1, 0.1, 0.8), 2),
        ((0.0, 0.2988, 0.7012), 2),
    ],
)
def test_a_toxicity_level_needs_to_be_sure_of_2(probabilities, level):
    assert toxicity_levels([probabilities], [0, 1, 2]) == [level]
    assert toxicity_levels([probabilities[::-1]], [2, 1, 0]) == [level]


def test_a_classifier_of_two_labels_says_1_where_it_is_not_sure():
    assert (
        toxicity_levels([[0.4], [0.6], [0.71]], [2])
        == toxicity_levels([[0.6, 0.4], [0.4, 0.6], [0.29, 0.71]], [0, 2])
        == [0, 1, 2]
    )


def test_levels_of_a_classifier_and_of_the_list_of_insults(classifier):
    path = classifier(["safe", "sensitive", "unsafe"])
    scorer = make_scorers([f"toxicity_level={path}"])["toxicity_level"]
    model, tokenizer = (
        BertForSequenceClassification.from_pretrained(path).eval(),
        BertTokenizerFast.from_pretrained(path),
    )
    table = model(**tokenizer("bad dogs", return_tensors="pt")).logits.softmax(-1).tolist()
    dialog = talk("hi", "bad dogs", "so?", "", "and?", "you idiot")
    assert toxicity_level(dialog, toxicity_level=scorer)[:2] == [
        -float(toxicity_levels(table, [0, 1, 2])[0]),
        0.0,
    ]
    assert toxicity_level(dialog) == [0.0, 0.0, -2.0]
    with pytest.raises(UserError, match="expected labels that count 0, 1 or 2"):
        make_scorers([f"toxicity_level={path}"], label_weights={"safe": 0.5})


def test_the_noised_level_tosses_a_coin_for_1():
    scorer = Scorer("levels", lambda texts: [{"a": 0, "b": 2}.get(text, 1) for text in texts], 0)
    texts = [str(i) for i in range(2000)]
    values = toxicity_noised(talk(*(part for text in texts for part in ("hi", text))), toxicity_level=scorer)
    assert (
        set(values) == {0.0, -2.0} and 900 < values.count(-2.0) < 1100
    )  # 4.5 standard deviations around 1000
    assert toxicity_noised(talk("hi", texts[7], "hi", "a", "hi", "b"), toxicity_level=scorer) == [
        values[7],
        0.0,
        -2.0,
    ]


def test_what_cannot_be_a_scorer(classifier):
    path = classifier(["joy", "anger"])
    for entries, weights, message in (
        (["feelings=x"], {}, "expected NAME=PATH with a NAME of sentiment, encoder, toxicity"),
        (["sentiment"], {}, "expected NAME=PATH"),
        (["sentiment=/nowhere/at/all"], {}, "/nowhere/at/all"),
        (
            [f"sentiment={path}"],
            {},
            "its labels are joy, anger, and what 'joy' counts is not known: .* --label_weights joy=0 anger=0",
        ),
        ([], {"joy": 1.0}, "expected a classifier whose labels they weigh"),
    ):
        with pytest.raises(UserError, match=message):
            make_scorers(entries, label_weights=weights)
    assert (
        -1
        <= make_scorers([f"sentiment={path}"], label_weights={"Joy": 1.0, "anger": -1.0})["sentiment"]("good")
        <= 1
    )


def test_vader_says_what_the_library_says():
    """Over boosters, negations, idioms, capitals, and "but" between equal valences, of which the library
    changes the first."""
    from vaderSentiment.vaderSentiment import BOOSTER_DICT, NEGATE, SPECIAL_CASES, SentimentIntensityAnalyzer

    library, rng = SentimentIntensityAnalyzer(), random.Random(0)
    said = [
        "but",
        "BUT",
        "no",
        "nor",
        "least",
        "at",
        "never",
        "so",
        "without",
        "doubt",
        "good",
        "good",
        "GOOD",
        "bad",
        "house",
        "ok!",
        "?",
        "\U0001f601",
    ]
    said += [
        *list(BOOSTER_DICT)[:9],
        *NEGATE[:9],
        *(word for idiom in SPECIAL_CASES for word in idiom.split()),
        *rng.sample(sorted(library.lexicon), 20),
    ]
    for length in [*range(20)] * 20:
        text = " ".join(rng.choices(said, k=length))
        assert VADER.score([text]) == [
            library.polarity_scores(text)["compound"]
        ]  # the same sums in the same order: equal to the bit


def test_vader_reads_a_long_turn_in_linear_time():
    """A fifth of a second of a processor; the library takes more than 25."""
    began = time.process_time()
    VADER.score(["good but not so great a day, " * 3500])
    assert time.process_time() - began < 5


def test_long_texts_fill_no_memory():
    text = " ".join(f"w{i}" for i in range(10 * MOST_WORDS))
    assert HASHED_WORDS.score([text])[0].shape[0] == MOST_WORDS and len(text) > LONGEST_REMEMBERED
    before = _found.cache_info().currsize
    assert len(parts(text)) == 10 * MOST_WORDS and _found.cache_info().currsize == before


def test_a_scorer_forgets_what_would_fill_the_memory(monkeypatch):
    monkeypatch.setattr("rl_dialog.rewards.scorers.MOST_BYTES", 1000)
    scorer = Scorer("vectors", lambda texts: [np.zeros(50) for _ in texts], 0.0)
    for i in range(10):
        scorer(f"text {i}")
        assert len(scorer.known) <= 3


def test_a_label_counts_once():
    assert read_label_weights(["joy=1", "a=b=-1"]) == {"joy": 1.0, "a=b": -1.0}
    with pytest.raises(UserError, match="--label_weights joy=0: expected each label once, got joy twice"):
        read_label_weights(["joy=1", "joy=0"])
    for entry in ("joy", "=1", "joy=nan", "joy=-inf", "joy=1e999"):
        with pytest.raises(UserError, match=f"--label_weights {entry}: expected LABEL=NUMBER"):
            read_label_weights([entry])
