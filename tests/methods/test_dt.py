"""Return bins: where their tokens go, what they say, and how a policy is asked for the best one."""

import re

import numpy as np
import pytest

from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import END, encode_prompt, load_tokenizer, tokenize
from rl_dialog.errors import UserError
from rl_dialog.methods import DT

UNRATED = [np.nan] * 6
RETURN = re.compile(r"<\|return:(\w+)\|>")


@pytest.fixture
def told(tokenizer, tmp_path):
    """told(method): a copy of the shared tokenizer with the method's tokens and template."""

    def build(method):
        tokenizer.save_pretrained(tmp_path / "t")
        return method.extend_tokenizer(load_tokenizer(tmp_path / "t"))

    return build


def dialog(*turns):
    messages = []
    for i, reward in enumerate(turns):
        messages += [
            {"role": "user", "content": f"u{i}"},
            {"role": "assistant", "content": f"a{i}", "reward": reward},
        ]
    return Dialog("d", messages)


def rendered(row, made):
    return made.decode(row.input_ids)


def prepared(method, made, dialogs, tokenizer):
    rows = [
        row for d in dialogs for row in tokenize(d, tokenizer)
    ]  # as `prepare` made them, before the method was chosen
    return method.prepare(rows, rows[:1], made)


def test_each_reply_is_told_its_bin_and_nothing_else_changes(told, tokenizer):
    made = told(DT(by="reply"))
    rows, validation = prepared(DT(by="reply"), made, [dialog(1.0, -1.0), dialog(2.0, -2.0)], tokenizer)
    assert (
        rendered(rows[0], made)
        == f"<|user|>u0{END}<|assistant|><|return:1|>a0{END}<|user|>u1{END}<|assistant|><|return:0|>a1{END}"
    )
    written = [made.decode(rows[0].input_ids[end - 2 : end + 1]) for end in rows[0].reply_ends]
    assert written == [f"a0{END}", f"a1{END}"]
    assert made.decode(rows[0].input_ids[rows[0].assistant]) == f"a0{END}a1{END}"  # the bin is no action
    assert rows[0].rewards.tolist() == [1.0, -1.0] and rendered(validation[0], made) == rendered(
        rows[0], made
    )
    assert (rows[0].input_ids.dtype, rows[0].assistant.dtype, rows[0].reply_ends.dtype) == (
        np.int32,
        bool,
        np.int32,
    )


def test_a_run_goes_on_from_another_dt(told, tokenizer, tmp_path):
    """Its template wishes once, for what this one wants, also where the data was rendered with the other's
    wish."""
    earlier = told(DT(by="reply"))
    dialogs = [dialog(1.0, -1.0), dialog(2.0, -2.0)]
    fresh, _ = prepared(DT(by="reply"), earlier, dialogs, tokenizer)
    earlier.save_pretrained(tmp_path / "earlier")
    for method in (DT(by="reply"), DT(by="reply", want=0), DT(by="reply", bins=3)):
        made = method.extend_tokenizer(load_tokenizer(tmp_path / "earlier"))
        asked = made.apply_chat_template(dialogs[0].messages, tokenize=False)
        assert RETURN.findall(asked) == [str(method.want % method.bins)] * 2
        rows, _ = prepared(method, made, dialogs, earlier)
        assert all(len(RETURN.findall(rendered(row, made))) == 2 for row in rows)
        if method.bins == 2:
            for row, expected in zip(rows, fresh, strict=True):
                for name in ("input_ids", "assistant", "reply_ends"):
                    np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))


def test_replies_without_a_token_between_them_each_have_their_bin(told, tokenizer):
    """As DialoGPT's template writes what the assistant says twice in a row."""
    plain, made = told(DT(bins=2)), told(DT(bins=2, by="reply"))
    plain.chat_template = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    said = [("user", "u", None), ("assistant", "a0", -1.0), ("assistant", "a1", 1.0)]
    turns = [{"role": role, "content": text, "reward": reward} for role, text, reward in said]
    rows = tokenize(Dialog("d", turns), plain)
    assert rows[0].reply_starts.tolist() == [1 + len(plain.encode(text)) for text in ("u", f"u{END}a0")]
    (row,), _ = DT(bins=2, by="reply").prepare(rows, [], made)
    assert rendered(row, made) == f"u{END}<|return:0|>a0{END}<|return:1|>a1{END}"
    assert made.decode(row.input_ids[row.assistant]) == f"a0{END}a1{END}"


def test_a_return_is_what_is_still_to_come(told, tokenizer):
    """Returns to go: (0, -1) and (3, 2): the first reply of the first dialog earned 1 and is in the lower
    half for what followed."""
    rows, _ = prepared(DT(), told(DT()), [dialog(1.0, -1.0), dialog(1.0, 2.0)], tokenizer)
    assert [rendered(row, told(DT())).count("<|return:1|>") for row in rows] == [0, 2]


def test_a_policy_is_asked_for_the_best_bin_in_every_turn(told):
    made = told(DT(bins=3))
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    ids = encode_prompt(messages, made, max_length=100)
    assert (
        made.decode(ids)
        == f"<|user|>x{END}<|assistant|><|return:2|>y{END}<|user|>z{END}<|assistant|><|return:2|>"
    )
    asked = told(DT(bins=3, want=0))
    assert asked.decode(encode_prompt(messages[:1], asked, max_length=100)).endswith(
        "<|assistant|><|return:0|>"
    )


def test_the_prompt_is_the_prefix_that_was_trained_on(told, tokenizer):
    made = told(DT(by="reply"))
    rows, _ = prepared(DT(by="reply"), made, [dialog(1.0), dialog(0.0)], tokenizer)
    prompt = encode_prompt([{"role": "user", "content": "u0"}], made, max_length=100)
    assert rows[0].input_ids[: len(prompt)].tolist() == prompt and rows[0].assistant[len(prompt)]


def test_held_out_dialogs_are_scored_as_asked_for(told):
    """evaluate renders logs with the checkpoint's template: the wanted bin, and the same replies as
    actions."""
    made = told(DT())
    (row,) = tokenize(dialog(1.0, -1.0), made)
    assert made.decode(row.input_ids).count("<|return:1|>") == 2
    assert made.decode(row.input_ids[row.assistant]) == f"a0{END}a1{END}"


@pytest.mark.parametrize(
    ("rewards", "bins", "expected"),
    [([0, 0, 0, 1], 2, [0, 0, 0, 1]), ([0, 1, 2, 3], 4, [0, 1, 2, 3]), ([0, 0, 0, 5], 4, [0, 0, 0, 3])],
)
def test_quantile_bins_keep_equal_returns_together(told, tokenizer, rewards, bins, expected):
    made = told(DT(bins=bins))
    rows, _ = prepared(DT(bins=bins), made, [dialog(float(r)) for r in rewards], tokenizer)
    found = [next(i for i in range(bins) if f"<|return:{i}|>" in rendered(row, made)) for row in rows]
    assert found == expected


@pytest.mark.parametrize(("by", "expected"), [("reply", ["unknown", "1", "0"]), ("to_go", ["1", "1", "0"])])
def test_an_unknown_return_is_said_to_be_unknown(told, tokenizer, by, expected):
    """Replies that earned ?, 2 and -1: the first one leads to 1, the second too, the last one to -1."""
    method = DT(by=by, edges=(0.0,))
    made = told(method)
    dialogs = [dialog(None, 2.0, -1.0), dialog(None), dialog(-3.0), dialog(-2.0)]
    rows, (validation,) = prepared(method, made, dialogs, tokenizer)
    assert RETURN.findall(rendered(rows[0], made)) == expected == RETURN.findall(rendered(validation, made))
    assert [RETURN.findall(rendered(row, made)) for row in rows[1:]] == [["unknown"], ["0"], ["0"]]
    assert made.decode(rows[1].input_ids[rows[1].assistant]) == f"a0{END}"  # its language is learned
    np.testing.assert_array_equal(rows[1].rewards, [np.nan])


def test_bins_are_those_of_the_known_returns(told, make_row):
    """Returns 0, 1, 2 and six unknown ones: the upper half begins at 1, the median."""
    method = DT(by="reply")
    made = told(method)
    rows, _ = method.prepare([make_row([9, 5], [(1, 1, r)]) for r in (0.0, 1.0, 2.0, *UNRATED)], [], made)
    assert [made.decode(row.input_ids[1]) for row in rows] == [
        *("<|return:0|>", "<|return:1|>", "<|return:1|>"),
        *["<|return:unknown|>"] * 6,
    ]


def test_what_is_refused(told, tokenizer):
    with pytest.raises(UserError, match=r"dt: every reply has the return 1 \(2 of 3 have no reward\): prep"):
        prepared(DT(by="reply"), told(DT()), [dialog(1.0, None), dialog(None)], tokenizer)
    with pytest.raises(UserError, match=r"dt: no reply has a return \(2 of 2 have no reward\): prep"):
        prepared(DT(), told(DT()), [dialog(None), dialog(None)], tokenizer)
    with pytest.raises(
        UserError, match="dt: every reply has the return 1: prepare with rewards that differ, or train bc"
    ):
        prepared(DT(), told(DT()), [dialog(1.0), dialog(1.0)], tokenizer)
    with pytest.raises(
        UserError, match="expected at least 2 bins and one of them to want, got bins 2 and want 2"
    ):
        told(DT(want=2))


@pytest.mark.parametrize("edge", [0.1, 0.6, 0.7, 0.9])
def test_a_return_on_an_edge_that_float32_rounds_is_inside_the_upper_bin(told, make_row, edge):
    method = DT(edges=(edge,), by="reply")
    made = told(method)
    rows, _ = method.prepare([make_row([9, 5], [(1, 1, r)]) for r in (0.0, edge, 1.0)], [], made)
    assert [made.decode(row.input_ids[1]) for row in rows] == ["<|return:0|>", *["<|return:1|>"] * 2]


def test_of_several_templates_the_default_one_wishes(told, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "several")
    several = load_tokenizer(tmp_path / "several")
    several.chat_template = {"default": several.chat_template, "tool_use": "tools"}
    assert DT().extend_tokenizer(several).chat_template == told(DT()).chat_template


def test_given_edges_are_the_lower_ends_of_bins(told, make_row):
    """Returns 1 to 10, good from 8 on: a return on the edge is inside the upper bin."""
    method = DT(edges=(8.0,), by="reply")
    tokenizer = told(method)
    rows, _ = method.prepare(
        [make_row([9, 5, 6], [(1, 2, float(reward))]) for reward in range(1, 11)], [], tokenizer
    )
    bad, good = tokenizer.convert_tokens_to_ids(["<|return:0|>", "<|return:1|>"])
    assert [int(row.input_ids[1]) for row in rows] == [bad] * 7 + [good] * 3


@pytest.mark.parametrize(
    ("method", "rewards", "found"),
    [
        (DT(bins=4, want=2, by="reply"), (0.0, 1.0, 0.0, 1.0), r"\[0, 3\]"),  # two returns make two bins
        (DT(edges=(10.0,), by="reply"), (1.0, 2.0, np.nan), r"\[0\]"),
    ],
)
def test_a_bin_that_no_reply_is_in_cannot_be_asked_for(told, make_row, method, rewards, found):
    """Nothing would be learned of its token, and all that the policy says stands behind it."""
    made, rows = told(method), [make_row([9, 5], [(1, 1, reward)]) for reward in rewards]
    with pytest.raises(UserError, match=f"dt: expected replies .* in bin . .*, got those of bins {found}"):
        method.prepare(rows, [], made)


@pytest.mark.parametrize(("bins", "edges"), [(2, (1.0, 2.0)), (3, (3.0, 3.0))])
def test_edges_that_do_not_fit_the_bins(told, bins, edges):
    with pytest.raises(UserError, match="dt: expected . rising edges for . bins"):
        told(DT(bins=bins, edges=edges))


def test_replies_that_are_context_only_stand_behind_the_wanted_bin(told):
    """As they do when acting, where the template writes it before every reply."""
    method = DT()
    tokenizer = told(method)
    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "thank you", "weight": 0},
        {"role": "user", "content": "what?"},
    ]
    answers = [[*talk, {"role": "assistant", "content": "tea", "reward": reward}] for reward in (0.0, 1.0)]
    plain = load_tokenizer(tokenizer.name_or_path)
    rows, _ = method.prepare(
        [row for i, messages in enumerate(answers) for row in tokenize(Dialog(str(i), messages), plain)],
        [],
        tokenizer,
    )
    bad, good = tokenizer.convert_tokens_to_ids(["<|return:0|>", "<|return:1|>"])
    prompt = encode_prompt(talk, tokenizer, max_length=100)
    assert prompt.count(good) == 2
    for row, own in zip(rows, (bad, good), strict=True):
        assert row.input_ids[: len(prompt)].tolist() == [*prompt[:-1], own]
        assert row.assistant.nonzero()[0][0] == len(prompt) and row.reply_ends.tolist() == [
            len(row.input_ids) - 1
        ]
