"""Several replies per context: top-k, clicks, ranking by a critic and the CSV, against answers worked out by
hand."""

import csv

import numpy as np
import pytest

from rl_dialog.cluster import candidates as cluster_candidates
from rl_dialog.data.schema import Dialog
from rl_dialog.data.tokenize import tokenize, train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation import contexts
from rl_dialog.evaluation.candidates import (
    Candidates,
    candidate_measures,
    candidate_replies,
    critic_table,
    make_candidates,
    ranked,
    read_similarities,
    similarity_table,
    top_k,
    write_candidates,
)
from rl_dialog.evaluation.generation import Decoding, Reply, beam_replies, generate_replies, stream
from rl_dialog.evaluation.intervals import difference, estimate
from rl_dialog.evaluation.scoring import LoggedReplies, critic_scores, score_replies
from rl_dialog.methods import BC, ILQL

ASKED = ["hello", "what would you like?", "thank you, that is all"]
CONVERSATIONS = [[{"role": "user", "content": text}] for text in ASKED]
SHORT = Decoding(max_new_tokens=6, max_prompt_length=60)


def dialog(name, *texts):
    roles = ("user", "assistant") * len(texts)
    return Dialog(name, [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])


def said(*texts):
    return [Reply(text, (1,), True) for text in texts]


@pytest.fixture
def made():
    """Two contexts of one dialog and one of another, three candidates each; the critic likes the last, the
    middle, and all the same."""
    one, two = dialog("one", "a", "b c", "d", "e"), dialog("two", "a", "f")
    scores = np.array([[0.2, 0.7, 0.5], [0.0, 0.0, 1.0], [0.6, 0.3, 0.1]])
    critic = np.array([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0], [4.0, 4.0, 4.0]])
    replies = [said("x", "y", "z"), said("x", "x", "e"), said("f", "", "f")]
    return Candidates(
        [(one, 1), (one, 3), (two, 1)], replies, {"near": scores}, {"mean Q": critic, "other": -critic}
    )


def test_top_k_is_the_best_so_far():
    assert top_k(np.array([[0.2, 0.7, 0.5]])).tolist() == [[0.2, 0.7, 0.7]]
    clicks = (np.array([[0.2, 0.7, 0.5]]) > 0.6).astype(float)
    assert top_k(clicks).tolist() == [[0, 1, 1]]


def test_ties_keep_the_order_of_generation():
    scores = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    by = np.array([[0.0, 5.0, 1.0], [4.0, 4.0, 4.0], [-np.inf, -2.0, -np.inf]])
    assert ranked(scores, by).tolist() == [[2, 3, 1], [1, 2, 3], [2, 1, 3]]


def test_figures_by_hand(made):
    found = candidate_measures(made)
    assert [found[f"top/near@{k}"].value for k in (1, 2, 3)] == pytest.approx([0.8 / 3, 1.3 / 3, 2.3 / 3])
    # 0.6 is not above the threshold of 0.6
    assert [found[f"top/click@{k}"].value for k in (1, 2, 3)] == pytest.approx([0, 1 / 3, 2 / 3])
    # in the critic's order: .5 .7 .2, then 0 1 0, then as generated
    assert [found[f"ranked/mean Q/near@{k}"].value for k in (1, 2, 3)] == pytest.approx(
        [1.1 / 3, 2.3 / 3, 2.3 / 3]
    )
    assert found["gain/mean Q/near@1"].value == pytest.approx(0.3 / 3)
    assert found["gain/mean Q/near@3"].value == 0
    assert found["gain/other/near@1"].value == 0  # .2, .0, .6 stay in front
    assert "gain/other/near@2" not in found  # ways besides its own are there for the first candidate only
    assert found["candidates_different"].value == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


def test_contexts_of_one_dialog_are_one_unit(made):
    found = candidate_measures(made)["top/near@1"]
    assert found.numerator.tolist() == pytest.approx([0.2, 0.6])
    assert found.denominator.tolist() == [2, 1]


def test_the_same_reply_is_a_click_and_none_is_not():
    f1 = read_similarities(("token_f1",))["token_f1"]
    table = similarity_table(
        f1, [said("I like tea", "", "I like"), said("no", "yes", "")], ["I like tea", "yes"]
    )
    assert table.tolist() == [[1, 0, pytest.approx(0.8)], [0, 1, 0]]


def test_top_k_never_falls_and_ends_where_any_order_ends(make_policy, tokenizer):
    contexts = [(dialog(f"d{n}", text, "hello there"), 1) for n, text in enumerate(ASKED)]
    made = make_candidates(
        make_policy(ILQL()),
        tokenizer,
        contexts,
        SHORT,
        count=4,
        similarities=read_similarities(("token_f1", "chrf", "bleu")),
    )
    found = {name: measure.value for name, measure in candidate_measures(made).items()}
    for metric in ("token_f1", "chrf", "bleu", "click"):
        for kind in ("top", "ranked/mean Q"):
            values = [found[f"{kind}/{metric}@{k}"] for k in (1, 2, 3, 4)]
            assert values == sorted(values)
        assert found[f"top/{metric}@4"] == found[f"ranked/mean Q/{metric}@4"]


def test_sampled_candidates_depend_on_their_stream_only(make_policy, tokenizer):
    policy = make_policy(ILQL(beta=1.0))
    how = {"count": 3, "seed": 5}
    together = candidate_replies(policy, tokenizer, CONVERSATIONS, SHORT, batch_size=128, **how)
    assert together == candidate_replies(policy, tokenizer, CONVERSATIONS, SHORT, batch_size=2, **how)
    more = candidate_replies(policy, tokenizer, CONVERSATIONS, SHORT, batch_size=128, count=4, seed=5)
    assert [row[:3] for row in more] == together
    (alone,) = generate_replies(policy, tokenizer, [CONVERSATIONS[1]], SHORT, seeds=[stream(5, 1, 2)])
    assert together[1][2] == alone
    assert len({reply.text for reply in together[0]}) > 1


def test_without_sampling_the_greedy_reply_and_then_the_beams(make_policy, tokenizer):
    policy, decoding = make_policy(BC()), Decoding(max_new_tokens=6, max_prompt_length=60, do_sample=False)
    found = candidate_replies(policy, tokenizer, CONVERSATIONS, decoding, count=4, seed=0, batch_size=2)
    (greedy,) = generate_replies(policy, tokenizer, [CONVERSATIONS[0]], decoding, seeds=[0])
    assert found[0][0] == greedy
    three = Decoding(max_new_tokens=6, max_prompt_length=60, do_sample=False, num_beams=3)
    assert found[0][1:] == beam_replies(policy, tokenizer, CONVERSATIONS[0], three)
    assert [len(row) for row in found] == [4, 4, 4]
    assert candidate_replies(policy, tokenizer, CONVERSATIONS, decoding, count=1, seed=0, batch_size=2)[
        0
    ] == [greedy]


def test_the_critic_scores_what_was_generated(make_policy, tokenizer):
    """A candidate that a tokenizer would cut as it was generated scores as the same reply in a log does."""
    policy = make_policy(ILQL())
    (ids,) = [tokenizer("thank you", add_special_tokens=False)["input_ids"]]
    table = critic_table(
        policy, tokenizer, [CONVERSATIONS[0]], [[Reply("thank you", tuple(ids), True)]], SHORT
    )
    rows = tokenize(dialog("d", ASKED[0], "thank you"), tokenizer, max_length=64)
    logged = critic_scores(score_replies(policy, LoggedReplies(rows, np.zeros(1, np.int64), 1)))
    assert list(table) == list(logged)
    assert next(iter(table)) == "mean Q"
    for way, values in logged.items():
        assert table[way][0, 0] == pytest.approx(values[0], rel=1e-5)


def test_a_better_policy_differs_by_its_paired_difference(made):
    better = Candidates(made.contexts, made.replies, {"near": made.similarity["near"] + 0.1}, made.critic)
    first, second = candidate_measures(made)["top/near@1"], candidate_measures(better)["top/near@1"]
    change = difference([second], [first])
    assert (change.value, change.low, change.high) == (
        pytest.approx(0.1),
        pytest.approx(0.1),
        pytest.approx(0.1),
    )
    alone = estimate([first])
    assert alone.high - alone.low > 0.2  # the luck of the contexts, which pairing takes out


def test_the_csv_has_the_columns_of_the_paper(tmp_path, made):
    two = Candidates(
        made.contexts[:1],
        [row[:2] for row in made.replies[:1]],
        {"a": np.array([[0.25, 1.0]]), "b": np.array([[0.0, 0.5]])},
        {},
    )
    write_candidates(tmp_path / "c.csv", two)
    with (tmp_path / "c.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row) == [
        "index",
        "context",
        "true_response",
        "response_1",
        "a_1",
        "b_1",
        "response_2",
        "a_2",
        "b_2",
    ]
    assert list(row.values()) == ["0", "user: a", "b c", "x", "0.25", "0.0", "y", "1.0", "0.5"]


def test_texts_with_line_breaks_come_back(tmp_path):
    spoken = dialog("d", 'a "quoted", line\nand another', "b\nc")
    write_candidates(
        tmp_path / "c.csv", Candidates([(spoken, 1)], [said("x\ny")], {"a": np.array([[1.0]])}, {})
    )
    with (tmp_path / "c.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["context"], row["true_response"], row["response_1"]) == (
        'user: a "quoted", line\nand another',
        "b\nc",
        "x\ny",
    )


def test_what_cannot_be_compared_is_said(make_policy, tokenizer):
    with pytest.raises(UserError, match="unknown similarity 'token_f'.*Did you mean token_f1?"):
        read_similarities(("token_f",))
    with pytest.raises(UserError, match="each name once, got chrf twice"):
        read_similarities(("chrf", "chrf"))
    with pytest.raises(UserError, match="expected at least one"):
        read_similarities(())
    with pytest.raises(UserError, match="bert_score: expected .* as its path"):
        read_similarities(("bert_score",))
    with pytest.raises(UserError, match="at least one context and one candidate, got 0 contexts"):
        make_candidates(make_policy(BC()), tokenizer, [], SHORT, count=2, similarities={})


def test_another_policys_critic_ranks_the_same_replies(make_policy, tokenizer):
    """What it ranks and by what: the ranker's own table for these replies, beside the policy's; one with
    other tokens is refused."""
    policy, ranker = make_policy(BC()), make_policy(ILQL(), seed=1)
    contexts = [(dialog(str(n), text, "fine"), 1) for n, text in enumerate(ASKED)]
    f1 = {"token_f1": read_similarities(["token_f1"])["token_f1"]}
    found = make_candidates(
        policy, tokenizer, contexts, SHORT, count=3, similarities=f1, ranker=(ranker, tokenizer)
    )
    own = critic_table(ranker, tokenizer, CONVERSATIONS, found.replies, SHORT)
    assert {f"ranker's {way}" for way in own} == {way for way in found.critic if way.startswith("ranker's")}
    assert found.own_way == "mean log-probability"
    assert all(np.allclose(found.critic[f"ranker's {way}"], own[way]) for way in own)
    assert "ranked/ranker's last V/token_f1@1" in candidate_measures(found)
    other = train_tokenizer(["hollow willow"] * 3, vocab_size=len(tokenizer))
    with pytest.raises(UserError, match="--ranker: expected a checkpoint with the .* tokens of the policy"):
        make_candidates(policy, tokenizer, contexts, SHORT, count=2, similarities=f1, ranker=(ranker, other))


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_reply_that_only_calls_tools_is_no_empty_reply(monkeypatch, tmp_path, nothing):
    call = {"role": "assistant", "content": nothing, "tool_calls": [{"function": {"name": "f"}}]}
    ask = {"role": "user", "content": "call it"}
    logged = [Dialog("tool", [ask, call]), Dialog("text", [ask, {"role": "assistant", "content": ""}])]
    for module in (cluster_candidates, contexts):
        monkeypatch.setattr(module, "read_dialogs", lambda *_: logged)
    settings = {"limit": 0, "total": 2, "size": 9, "openings": True}
    shards, skipped = cluster_candidates.write_contexts(tmp_path, "train", tmp_path, **settings)
    assert skipped["tool_calls"] == 1 and shards[0]["contexts"] == 1
    logged.pop()
    with pytest.raises(UserError, match="expected replies with something before them"):
        contexts.Contexts("data", "train", {}, {})
