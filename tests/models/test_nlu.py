"""Language understanding: learned, saved, loaded, and its mistakes explained."""

import json

import pytest
import torch

from rl_dialog.data.labelled import LabelledTurn
from rl_dialog.errors import UserError
from rl_dialog.models.nlu import Labels, _words, load_nlu, new_nlu
from rl_dialog.training.nlu import fit, judge, labels_of, loss_of, targets

AREAS = ("east", "west", "north", "south")
FOODS = ("thai food", "greek", "old french")
HELLO = ("greet", "general", "none", "none")


def turns():
    """Sixty turns about restaurants and hotels; what "it" is follows from what was said before."""
    found = []
    for i in range(60):
        area, food, side = AREAS[i % 4], FOODS[i % 3], ("user", "system")[i % 2]
        domain = ("Hotel", "Restaurant")[i // 2 % 2]
        context = (f"a {domain.lower()} , then",)
        acts = [("Inform", domain, "Area", area), ("Inform", "Restaurant", "Food", food)]
        found.append(LabelledTurn(f"it is {area} , with {food}", side, context, tuple(acts), str(i)))
        found.append(
            LabelledTurn(
                f"hello {i}, what is the phone of it",
                side,
                context,
                (HELLO, ("Request", domain, "Phone", "?")),
                str(i),
            )
        )
    return found


@pytest.fixture(scope="module")
def nlu():
    torch.manual_seed(0)
    model = new_nlu(turns(), labels_of(turns()), hidden_size=32, num_hidden_layers=1, vocab_size=400)
    losses = []
    fit(
        model,
        turns(),
        learning_rate=1e-2,
        batch_size=20,
        epochs=12,
        progress=lambda step, steps, loss: losses.append(loss),
    )
    assert len(losses) == 72 and losses[-1] < 0.2 * losses[0]
    return model


def test_it_learns_values_sentences_and_context(nlu):
    figures = judge(nlu, turns())
    assert figures["all"]["f1"] > 0.95 and figures["user/Request"]["acts"] == 30, figures
    read = nlu.reader("user")
    assert ("Inform", "Hotel", "Area", "west") in read("It is WEST , with greek", ["a hotel , then"])
    assert ("Inform", "Restaurant", "Food", "old french") in read(
        "it is east , with old french", ["a restaurant , then"]
    )
    assert read("", ["a hotel , then"]) == read("  ") == []


def test_a_batch_reads_as_its_turns_do(nlu):
    asked = [(turn.text, turn.context, turn.side) for turn in turns()[:10]] + [
        ("", (), "user"),
        ("it is east " * 100, (), "system"),
    ]
    assert nlu.understand(asked) == [nlu.understand([each])[0] for each in asked]


@pytest.mark.parametrize("context", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("earlier", [0, 1, 2, 3])
def test_as_many_turns_are_read_before_the_text_as_there_are(context, earlier):
    """The latest ones, where there are more; all of them near the beginning of a dialog."""
    model = new_nlu(turns()[:4], labels_of(turns(), context=context), hidden_size=32, num_hidden_layers=1)
    said = ["east", "west", "south"][:earlier]
    ids = model.encode([("greek", said, "user")]).inputs["input_ids"][0]
    read = model.tokenizer.decode(ids).partition("greek")[0]
    assert [word for word in said if word in read] == said[max(0, earlier - context) :]


def test_saved_and_loaded(nlu, tmp_path):
    nlu.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors", ".jinja"}
    again = load_nlu(tmp_path)
    asked = [(turn.text, turn.context, turn.side) for turn in turns()]
    assert again.understand(asked) == nlu.understand(asked) and again.labels == nlu.labels


def test_any_encoder_can_be_the_base(nlu, tmp_path):
    nlu.encoder.save_pretrained(tmp_path)
    nlu.tokenizer.save_pretrained(tmp_path)
    based = new_nlu(turns(), labels_of(turns()), encoder=str(tmp_path))
    assert torch.equal(
        based.encoder.embeddings.tok_embeddings.weight, nlu.encoder.embeddings.tok_embeddings.weight
    )
    assert not torch.equal(based.tagger.weight, nlu.tagger.weight)
    with pytest.raises(UserError, match="expected a directory with a model"):
        new_nlu(turns(), labels_of(turns()), encoder=str(tmp_path / "nothing" / "here" / "at_all"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="--model_name_or_path .*: expected a folder with config.json"):
        new_nlu(turns(), labels_of(turns()), encoder=str(tmp_path))


def test_targets_by_hand():
    """`in the east`, tokens of single words: outside, outside, the beginning of tag 0; a second token of a
    value goes on."""
    labels = Labels((("Inform", "Hotel", "Area"),), (HELLO,), ((True, True),), ((True, True),))
    turn = LabelledTurn("in the east end", "user", (), (("Inform", "Hotel", "Area", "east end"), HELLO))
    model = new_nlu([turn] * 3, labels, hidden_size=32, num_hidden_layers=1, vocab_size=300)
    batch = model.encode([(turn.text, (), "user")])
    tags, told = targets(labels, [turn], batch)
    by_character = {
        start: tag
        for (start, _), tag, mine in zip(
            batch.offsets[0], tags[0].tolist(), batch.text[0].tolist(), strict=True
        )
        if mine
    }
    assert all(tag == 0 for start, tag in by_character.items() if start < 6) and told.tolist() == [[1.0]]
    inside = [tag for start, tag in sorted(by_character.items()) if start >= 6]
    assert inside[0] == 1 and set(inside[1:]) == {2}
    assert loss_of(model, [turn]).item() > 0


def test_a_side_says_only_what_it_said_in_training():
    intents = {"user": "Inform", "system": "Recommend"}
    side_turns = [
        LabelledTurn(f"it is {area}", side, (), ((intents[side], "Hotel", "Area", area),))
        for side in intents
        for area in AREAS
    ]
    labels = labels_of(side_turns)
    assert [tag[0] for tag in labels.tags] == ["Inform", "Recommend"] and labels.tag_sides == (
        (True, False),
        (False, True),
    )
    model = new_nlu(side_turns, labels, hidden_size=32, num_hidden_layers=1, vocab_size=300)
    fit(model, side_turns, learning_rate=1e-2, batch_size=8, epochs=40)
    for side, intent in intents.items():
        assert {act[0] for act in model.reader(side)("it is east")} == {intent}


def test_figures_by_hand(nlu, monkeypatch):
    """Two wanted, one of them found, and one too many: P = 1/2, R = 1/2; values differ in case and blanks
    only."""
    turn = LabelledTurn("x", "user", (), (("Inform", "Hotel", "Name", "The Lamb"), HELLO))
    monkeypatch.setattr(
        nlu,
        "understand",
        lambda turns: [[("Inform", "Hotel", "Name", "the  lamb"), ("Inform", "Hotel", "Area", "east")]],
    )
    figures = judge(nlu, [turn])
    assert figures["all"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "acts": 2}
    assert figures["user/greet"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "acts": 1}


def test_mistakes_are_explained(nlu, tmp_path):
    with pytest.raises(UserError, match="found no nlu.json"):
        load_nlu(tmp_path)
    with pytest.raises(UserError, match="expected the side user or system, got 'bot'"):
        nlu.reader("bot")
    with pytest.raises(UserError, match="expected acts that occur at least 3 times"):
        labels_of(turns()[:1])
    nlu.save(tmp_path)
    description = json.loads((tmp_path / "nlu.json").read_text())
    for broken in (
        "[",
        json.dumps({**description, "format": 99}),
        json.dumps({**description, "acts": [], "act_sides": []}),
        json.dumps({**description, "x": 1}),
    ):
        (tmp_path / "nlu.json").write_text(broken)
        with pytest.raises(UserError, match=str(tmp_path.name)):
            load_nlu(tmp_path)


def test_a_value_goes_on_to_the_end_of_its_words():
    """Tokens end within words; each character of Chinese is a word."""
    assert _words("moderately priced , please", 0, 4) == "moderately"
    assert _words("दिल्ली में", 0, 2) == "दिल्ली"
    assert _words("我要去北京西站", 3, 5) == "北京"
