"""The split of a dialog depends on its own key and the seed alone."""

import json
import random
import subprocess
import sys
from collections import Counter

import pytest

from rl_dialog.data.readers import dialogs_of_logs
from rl_dialog.data.schema import Dialog
from rl_dialog.data.splits import assign_split, split_key
from rl_dialog.errors import UserError


def dialog(first, *, answer="ok", id="d", system=None, opening=None, meta=None):
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": answer}]
    if opening is not None:
        messages.insert(0, {"role": "assistant", "content": opening})
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Dialog(id=id, messages=messages, meta=meta or {})


def test_known_answers():
    """sha256 of "0\\0user\\0question 0" .. 7, first 8 bytes / 2**64: .006 .992 .349 .519 .735 .438 .807 .379;
    below .2 test, below .5 validation.

    Written down so that no release moves a dialog from training into the test set.
    """
    splits = [assign_split(dialog(f"question {i}"), 0.3, 0.2) for i in range(8)]
    assert splits == ["test", "train", "validation", "train", "train", "validation", "train", "validation"]


def test_the_same_in_another_process_and_in_any_order():
    code = (
        "from rl_dialog.data.schema import Dialog\nfrom rl_dialog.data.splits import "
        "assign_split\nprint([assign_split(Dialog(id='d', messages=[{'role': 'user', 'content': f'question "
        "{i}'}]), .3, .2, seed=5) for i in reversed(range(40))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    order = random.sample(range(40), 40)
    here = {i: assign_split(dialog(f"question {i}", id=str(i)), 0.3, 0.2, seed=5) for i in order}
    assert out.strip() == str([here[i] for i in reversed(range(40))])
    assert len(set(here.values())) == 3


def test_replies_to_the_same_context_never_straddle():
    """Whatever the reply, its id, the system prompt, an assistant's opening or the spacing: one first user
    turn is on one side."""
    for i in range(50):
        question = f"question {i}"
        variants = [
            dialog(question, answer="a", id="1"),
            dialog(question, answer="b", id="2"),
            dialog(question, system=f"the user's name is {i}"),
            dialog(question, opening="welcome"),
            dialog(f"  question \n {i} "),
        ]
        assert len({assign_split(d, 0.3, 0.3, seed=1) for d in variants}) == 1


def test_case_and_punctuation_of_the_first_turn_make_no_difference():
    assert (
        len(
            {
                split_key(dialog(text))
                for text in ("What's up?", "whats up", "WHAT\u2019S  UP!!", "- what's up...")
            }
        )
        == 1
    )
    assert len({split_key(dialog(text)) for text in ("Straße", "STRASSE", "strasse.")}) == 1
    assert split_key(dialog("9:30")) != split_key(dialog("930")) and split_key(dialog("1+1")) != split_key(
        dialog("1 1")
    )
    assert split_key(dialog("?")) != split_key(dialog("!")) != split_key(dialog(""))  # nothing else is said
    assert (
        split_key(dialog("x", meta={"group": "A"}))
        != split_key(dialog("x", meta={"group": "a"}))
        != split_key(dialog("a"))
    )
    assert split_key(dialog("group\0a")) != split_key(dialog("x", meta={"group": "a"}))


def test_a_longer_conversation_goes_where_its_beginning_went():
    short = dialog("where is the station?")
    longer = Dialog(
        id="x",
        messages=[
            *short.messages,
            {"role": "user", "content": "thanks"},
            {"role": "assistant", "content": "bye"},
        ],
    )
    assert split_key(short) == split_key(longer)


def test_a_group_stays_together_and_is_no_user_text():
    together = {
        assign_split(dialog(f"question {i}", meta={"group": "customer 7"}), 0.4, 0.4, seed=2)
        for i in range(50)
    }
    assert len(together) == 1
    apart = {
        assign_split(dialog("the same question", meta={"group": i}), 0.4, 0.2, seed=2) for i in range(50)
    }
    assert apart == {"train", "validation", "test"}
    assert split_key(dialog("x", meta={"group": "g"})) != split_key(dialog("g"))
    assert split_key(dialog("x", meta={"group": None})) == split_key(dialog("x"))


def test_shares_are_roughly_right():
    """4000 keys at .1 and .2: expected 400 and 800, standard deviations 19 and 25; the bounds are 5 of them
    wide."""
    count = Counter(assign_split(dialog(f"question {i}"), 0.1, 0.2) for i in range(4000))
    assert abs(count["validation"] - 400) < 95
    assert abs(count["test"] - 800) < 127
    assert sum(count.values()) == 4000


def test_the_seed_draws_another_split():
    """At half and half two seeds agree on about half of 200 keys (standard deviation 7)."""
    agree = sum(
        assign_split(dialog(f"q{i}"), 0.5, 0, seed=1) == assign_split(dialog(f"q{i}"), 0.5, 0, seed=2)
        for i in range(200)
    )
    assert 65 < agree < 135


def test_no_share_means_no_dialog():
    dialogs = [dialog(f"question {i}") for i in range(300)]
    assert {assign_split(d, 0, 0) for d in dialogs} == {"train"}
    assert {assign_split(d, 0.4, 0) for d in dialogs} == {"train", "validation"}
    assert {assign_split(d, 0, 0.4) for d in dialogs} == {"train", "test"}


def test_growing_the_validation_share_leaves_the_test_set_alone():
    dialogs = [dialog(f"question {i}") for i in range(500)]
    few, many = (
        {d.messages[0]["content"] for d in dialogs if assign_split(d, share, 0.2) == "test"}
        for share in (0.05, 0.5)
    )
    assert few == many != set()


def test_dialogs_without_a_user_turn_have_a_key():
    only = Dialog(id="d", messages=[{"role": "assistant", "content": "hello"}])
    assert assign_split(only, 0.1, 0.1) in ("train", "validation", "test")


@pytest.mark.parametrize(
    ("validation", "test"), [(-0.1, 0), (0, -0.1), (0.5, 0.5), (0, 1), (1.2, 0), (float("nan"), 0)]
)
def test_impossible_shares_are_refused(validation, test):
    with pytest.raises(UserError, match=r"validation \+ test < 1, got validation="):
        assign_split(dialog("x"), validation, test)


def test_by_dialog_one_opening_is_on_every_side_and_equal_dialogs_on_one():
    dialogs = [dialog("begin", answer=f"move {i}", id=str(i)) for i in range(60)]
    splits = [assign_split(d, 0.3, 0.3, by="dialog") for d in dialogs]
    assert set(splits) == {"train", "validation", "test"}
    assert len({assign_split(d, 0.3, 0.3) for d in dialogs}) == 1
    copies = [dialog("begin", answer=f"move {i}", id="other") for i in range(60)]
    assert [assign_split(d, 0.3, 0.3, by="dialog") for d in copies] == splits, "the id does not matter"
    together = [dialog("begin", answer=f"move {i}", meta={"group": "a game"}) for i in range(60)]
    assert len({assign_split(d, 0.3, 0.3, by="dialog") for d in together}) == 1


def test_by_dialog_both_sides_of_a_preference_pair_stay_together(tmp_path):
    """Apart they are no pair, and nothing learns from them."""
    talk = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": "I begin."}]
    rows = [
        {
            "prompt": [*talk, {"role": "user", "content": f"move {i // 2}"}],
            "chosen": [{"role": "assistant", "content": f"good {i}"}],
            "rejected": [{"role": "assistant", "content": f"poor {i}"}],
        }
        for i in range(60)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = {d.id: assign_split(d, 0.3, 0.3, by="dialog") for d in dialogs_of_logs([str(path)])}
    pairs = [{splits[f"pairs:{i + 1}#{side}"] for side in ("chosen", "rejected")} for i in range(60)]
    assert all(len(pair) == 1 for pair in pairs) and len(set(splits.values())) == 3
    assert pairs[0::2] == pairs[1::2], "and so do pairs with one context"
