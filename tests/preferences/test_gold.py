"""The plan of a run: how many people see a pair, gold pairs among the others, what beside the choice is
said; files of gold pairs; and the report on agreement."""

from __future__ import annotations

import json

import pytest

from rl_dialog.errors import UserError
from rl_dialog.preferences import label_statements
from rl_dialog.preferences.disagreement_report import disagreement_report
from rl_dialog.preferences.frames import draw_pixels
from rl_dialog.preferences.gold_pairs import gold_of, read_gold
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.label_statements import find_free
from rl_dialog.preferences.labels import NewQuery, Remarks
from rl_dialog.preferences.plan import Plan
from rl_dialog.preferences.segments import Reply, Segments


@pytest.fixture
def log(tmp_path):
    made = LabelLog(f"sqlite:///{tmp_path}/labels.db", validation=0.0)
    yield made
    made.close()


def ask(log, number):
    return [log.add_query(f"a{n}", f"b{n}", id=f"query {n:03}") for n in range(number)]


def drain(log, who, choice="left"):
    """The queries that somebody gets until there is none, each answered."""
    got = []
    while query := log.lease(who):
        got.append(query.id)
        log.answer(query.id, who, choice)
    return got


# How many people see a pair


@pytest.mark.parametrize("people", [1, 2, 3])
def test_every_pair_is_seen_by_so_many_people_each_once(log, people):
    ask(log, 5)
    log.set_plan(overlap=people)
    ask(log, 20)  # some were there before, some come after
    seen = [set(drain(log, who)) for who in ("ann", "bob", "eve", "kim")]
    assert all(len(log.lease_many(who, 9)) == 0 for who in ("ann", "bob", "eve", "kim"))
    for n in range(20):
        assert sum(f"query {n:03}" in one for one in seen) == people
    assert len(log.labels()) == 20 and sum(map(len, seen)) == 20 * people


def test_a_higher_overlap_opens_what_was_answered_and_a_lower_one_closes_it(log):
    ask(log, 4)
    drain(log, "ann")
    assert log.lease("bob") is None
    log.set_plan(overlap=2)
    assert log.counts()["second_opinions"] == 4 and log.lease("ann") is None, "nobody gets a pair twice"
    assert len(drain(log, "bob")) == 4
    log.set_plan(overlap=1)
    assert log.counts()["second_opinions"] == 0 and log.lease("eve") is None and log.counts()["late"] == 0


def test_a_lease_costs_no_more_for_who_has_answered_a_lot(log):
    """A pair that waits for a second opinion is passed over by who gave the first: by a look into an index,
    and none at all the answers that they ever gave. With 4,000 of them a lease took six seconds, and nobody
    else could write."""
    log.add_queries(NewQuery(f"a{n}", f"b{n}") for n in range(501))
    log.set_plan(overlap=2)
    log.answer_many([(query, "left") for query in log.lease_many("ann", 500)], "ann")
    thousands = []
    with log._engine.connect() as connection:
        connection.connection.driver_connection.set_progress_handler(lambda: thousands.append(1) or 0, 1000)
        assert len(find_free(connection, "ann", 9, 0.0)) == 1
        connection.connection.driver_connection.set_progress_handler(None, 0)
    assert len(thousands) < 100, "thousand steps of SQLite's machine"


def test_who_was_revoked_and_comes_back_gets_none_of_the_pairs_again(log):
    ask(log, 3)
    log.add_labeller("ann")
    drain(log, "ann")
    log.revoke_labeller("ann")
    log.add_labeller("ann")
    assert log.lease("ann") is None and len(log.lease_many("bob", 9)) == 3


# Gold pairs


def gold(number, preference=1.0):
    return [NewQuery(f"g{n}", f"h{n}", f"gold {n}", gold=preference) for n in range(number)]


@pytest.mark.slow
def test_gold_pairs_are_shown_now_and_then_and_are_no_labels(log):
    ask(log, 300)
    assert log.add_gold(gold(100)) == 100 and log.gold()["gold 7"] == 1.0
    assert not any(id.startswith("gold") for id in drain(log, "zoe")[:50]), "none without a share"
    log.set_plan(overlap=3, gold_share=0.2)
    before = log.counts()
    got = {who: drain(log, who) for who in ("ann", "bob")}
    for who, ids in got.items():
        shown = [id for id in ids if id.startswith("gold")]
        assert len(ids) == len(set(ids)), "each pair once"
        assert 300 < len(ids) == 300 + len(shown) and 0.14 < len(shown) / len(ids) < 0.26, who
    places = [[id.startswith("gold") for id in ids[:100]] for ids in got.values()]
    assert places[0] != places[1], "nobody can tell by the place"
    assert log.counts() | {"late": before["late"], "labels": 300} == log.counts()
    assert {label.query for label in log.labels()} == {f"query {n:03}" for n in range(300)}
    figures = log.labellers()["ann"]
    shown = sum(id.startswith("gold") for id in got["ann"])
    assert figures["gold"] == shown and 0.3 < figures["gold_right"] / shown < 0.7, "left is half of them"
    assert figures["shared"] == 600, "people are compared on the pairs whose answer nobody knows"


def test_of_many_gold_pairs_only_those_that_are_shown_are_read(log, monkeypatch):
    """With 2,000 of them a lease took .15 seconds, in which nobody else could write. Everybody has an order
    of their own."""
    log.add_queries(NewQuery(f"a{n}", f"b{n}") for n in range(40))
    log.add_gold(gold(500))
    log.set_plan(overlap=2, gold_share=0.5)
    hashed, share = [], label_statements.share
    monkeypatch.setattr(label_statements, "share", lambda *given: hashed.append(given) or share(*given))
    got = [[query.id for query in log.lease_many(who, 40)] for who in ("ann", "bob")]
    assert len(hashed) < 500
    shown = [[id for id in ids if id.startswith("gold")] for ids in got]
    assert all(len(ids) == len(set(ids)) > 10 for ids in shown) and not set(shown[0][:5]) & set(shown[1][:5])


def test_a_gold_pair_needs_pairs_to_be_mixed_with(log):
    log.add_gold(gold(5))
    log.set_plan(gold_share=0.5)
    assert log.lease("ann") is None, "it would be known by standing alone"


def test_a_gold_pair_is_held_renewed_and_taken_back_like_another(log):
    ask(log, 40)
    log.add_gold(gold(40))
    log.set_plan(gold_share=0.5)
    query = next(query for query in iter(lambda: log.lease("ann"), None) if query.id.startswith("gold"))
    assert log.renew(query.id, "ann") and not log.renew(query.id, "bob")
    label = log.answer(query.id, "ann", "left")
    assert log.answers()[-1].late is False and log.answers()[-1].gold == 1.0
    assert log.undo("ann").id == query.id
    assert log.answer(query.id, "ann", "right").preference == 1 - label.preference
    assert log.labels() == [] and log.expire(0.0) >= 0 and len(log.gold()) == 40


def test_the_same_gold_pair_for_two_people_at_once(log):
    ask(log, 50)
    log.add_gold(gold(1))
    log.set_plan(gold_share=0.5)
    for who in ("ann", "bob"):
        assert sum(query.id == "gold 0" for query in log.lease_many(who, 20)) == 1


def test_a_pair_that_was_asked_becomes_gold(log):
    ask(log, 2)
    drain(log, "ann")
    known = [NewQuery("b0", "a0", "query 000", gold=1.0)]  # the log has it the other way round
    assert log.add_gold(known) == 1 and log.gold() == {"query 000": 0.0}
    assert [label.query for label in log.labels()] == ["query 001"]
    assert log.labellers()["ann"]["gold"] == 1 and log.state() == (2, 0, 1)


def test_gold_pairs_that_are_none(log):
    for pairs, said in (([NewQuery("a", "b")], "without"), (gold(1) * 2, "one twice")):
        with pytest.raises(UserError, match=said):
            log.add_gold(pairs)
    with pytest.raises(UserError, match="known preference"):
        NewQuery("a", "b", gold=0.7)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"overlap": 0.5}, "--overlap: expected a number from 1"),
        ({"gold_share": 0.9}, "--gold_share"),
        ({"goal": -1}, "--goal"),
        ({"session": -1}, "--session"),
        ({"reasons": ("a", "a")}, "different"),
        ({"reasons": ("",)}, "1 to 40 characters"),
        ({"reasons": ("\udcff",)}, "--reasons what every database can hold"),
    ],
)
def test_plans_that_cannot_be(log, changed, said):
    with pytest.raises(UserError, match=said):
        log.set_plan(**changed)
    assert log.plan == Plan()


def test_a_plan_is_everybodys(log, tmp_path):
    log.set_plan(overlap=2, reasons=("polite", "short"), guideline="# Be kind")
    other = LabelLog(f"sqlite:///{tmp_path}/labels.db")
    assert other.plan == Plan(overlap=2, reasons=("polite", "short"), guideline="# Be kind")
    assert other.set_plan(strength=True).reasons == ("polite", "short")
    other.close()


# Remarks


def test_what_is_said_beside_the_choice_is_kept(log):
    ask(log, 2)
    log.lease_many("ann", 2)
    log.answer("query 000", "ann", "right", Remarks(2, ("polite", "short"), "the wrong language"))
    log.answer("query 001", "ann", "tie")
    first, second = log.answers()
    assert (first.strength, first.reasons, first.flag) == (2, ["polite", "short"], "the wrong language")
    assert (second.strength, second.reasons, second.flag) == (None, None, None)
    assert log.labellers()["ann"]["flags"] == 1


def test_remarks_that_are_none(log):
    ask(log, 1)
    log.lease("ann")
    with pytest.raises(UserError, match="only with left or right"):
        log.answer("query 000", "ann", "tie", Remarks(strength=1))
    with pytest.raises(UserError, match="strength of 1 or 2"):
        Remarks(strength=3)
    assert log.state() == (0, 0, 0)


# Files of gold pairs


@pytest.fixture
def segments(tmp_path):
    return Segments(tmp_path / "clips")


def write(tmp_path, *lines):
    path = tmp_path / "gold.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_gold_pairs_of_a_file(tmp_path, segments):
    ids = [segments.add(Reply([{"role": "user", "content": "Hello?"}], text)) for text in ("Hi.", "No.")]
    trl = {"prompt": [{"role": "user", "content": "Help?"}]}
    trl |= {"chosen": [{"role": "assistant", "content": "Gladly."}], "rejected": "No."}
    rows = read_gold(write(tmp_path, trl, "", {"first": ids[0], "second": ids[1], "preference": 0}), segments)
    assert [row.gold for row in rows] == [1.0, 0.0] and rows[1].first == ids[0]
    assert segments[rows[0].first].text == "Gladly." and segments[rows[0].second].text == "No."


def test_gold_pairs_that_call_tools(tmp_path, segments):
    """The same as the pairs of `prefer_replies`, or they would be known by it."""
    calls = [[{"function": {"name": name, "arguments": "{}"}}] for name in ("search", "delete")]
    chosen, rejected = (
        [{"role": "assistant", "content": text, "tool_calls": call}]
        for text, call in zip(("Wait.", None), calls, strict=True)
    )
    [row] = read_gold(write(tmp_path, {"prompt": "?", "chosen": chosen, "rejected": rejected}), segments)
    assert segments[row.first].text == "Wait." + json.dumps(calls[0])
    assert segments[row.second].text == json.dumps(calls[1])


PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}'


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_file_of_any_language_and_editor(tmp_path, segments, ending):
    """`prefer_replies --export` writes texts as they are: with line separators that end no line of JSON."""
    texts = ("eins\u2028zwei", "x\x85y", "मेज़ पर")
    rows = [{"prompt": "?", "chosen": text, "rejected": "no"} for text in texts]
    lines = (json.dumps(row, ensure_ascii=False) + ending for row in rows)
    path = tmp_path / "gold.jsonl"
    path.write_bytes("".join(lines).encode("utf-8-sig"))
    assert [segments[pair.first].text for pair in read_gold(path, segments)] == list(texts)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "gold.jsonl:1: expected JSON"),
        ([1], "gold.jsonl:1: expected prompt, chosen and rejected"),
        ({"prompt": "a", "chosen": "b"}, "got prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "two different replies"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}, "role and content"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}, "of the assistant"),
        ({"first": "x", "second": "y", "preference": 1}, "the id of a segment"),
        ({"first": "*", "second": "/etc/x", "preference": 1}, "the id of a segment"),
        ({"first": "/etc/x", "second": "../*", "preference": 1}, "the id of a segment"),
        ({"first": "x", "second": "y", "preference": 0.3}, "preference of 1, 0 or 0.5"),
        ({"first": "x", "second": "y"}, "got None"),
        (
            '{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}',
            "gold.jsonl:1: prompt: expected text without",
        ),
        (PAIR + "\n\n" + PAIR, "gold.jsonl:3: expected every pair once, got that of line 1 again"),
        ("", "found none"),
    ],
)
def test_lines_that_are_no_gold_pair(tmp_path, segments, line, said):
    with pytest.raises(UserError, match=said):
        read_gold(write(tmp_path, line), segments)
    with pytest.raises(UserError, match="expected a file of JSON lines"):
        read_gold(tmp_path / "none.jsonl", segments)


def test_gold_pairs_of_somebody_who_is_trusted(log):
    ask(log, 3)
    for query, choice in zip(log.lease_many("expert", 3), ("left", "tie", "skip"), strict=True):
        log.answer(query.id, "expert", choice)
    (pair,) = gold_of("expert", log.answers())
    assert pair.id == "query 000" and pair.gold == log.answers()[0].preference
    with pytest.raises(UserError, match="found no such"):
        gold_of("nobody", log.answers())
    log.add_gold([pair])
    assert gold_of("expert", log.answers()) == [], "a known answer stays, whatever else somebody says"


# The report


def test_the_report_shows_who_and_what_is_disputed(labelled_run, tmp_path):
    log = labelled_run.log
    log.set_plan(overlap=2, strength=True, reasons=("polite",))
    clips = labelled_run.ask(2)
    replies = labelled_run.ask_about_replies(left="Yes, <b>gladly</b>.")
    for who in ("ann", "bob"):
        for query in log.lease_many(who, 9):
            wanted = query.first if who == "ann" or query.id == clips[0] else query.second
            said = Remarks(2, ("polite",), "odd" if query.id == replies else None)
            log.answer(query.id, who, "left" if query.left == wanted else "right", said)
    told = disagreement_report(log, labelled_run.segments, draw_pixels, tmp_path / "report")
    assert (told["shared_pairs"], told["disputed_pairs"], told["flagged"]) == (3, 2, 2)
    page = (tmp_path / "report" / "agreement.html").read_text()
    assert page.count('class="pair"') == 2 and page.count("data:image/gif;base64,") == 2
    assert "Yes, &lt;b&gt;gladly&lt;/b&gt;." in page and "<b>gladly" not in page
    assert "much better; polite; flagged: odd" in page and "Would you help me?" in page
    assert "ann" in (tmp_path / "report" / "agreement.md").read_text()


def test_the_report_of_an_empty_log(labelled_run, tmp_path):
    told = disagreement_report(labelled_run.log, labelled_run.segments, None, tmp_path / "report")
    assert told["alpha"] is None and told["labellers"] == 0
    assert "Nobody shares a pair" in (tmp_path / "report" / "agreement.md").read_text()
