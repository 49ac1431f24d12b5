"""What is counted of task-oriented dialogs, by hand."""

import json

import pytest

from rl_dialog.data.schema import Dialog, DialogError
from rl_dialog.errors import UserError
from rl_dialog.evaluation.task_dialogs import domain_counts, measures, questions, read_task_dialogs, readings
from rl_dialog.evaluation.task_report import compare_tasks, sections, to_json, write_task_report

GOAL = {
    "hotel": {"info": {"area": "east"}, "reqt": {"phone": "?", "address": "?"}, "book": {"stay": "2"}},
    "police": {"info": {}},
}
EAST, PHONE, ADDRESS = (
    ["Inform", "Hotel", "Area", "east"],
    ["Request", "Hotel", "Phone", "?"],
    ["Request", "Hotel", "Addr", "?"],
)
OUTCOME = {
    "success": False,
    "book_rate": 1.0,
    "inform_f1": 0.5,
    "turns": 4,
    "domains": {"hotel": False, "police": True},
}


def record(key=0, success=False, **changes):
    turns = [
        ("user", [EAST, PHONE], None),
        ("assistant", [["Inform", "Hotel", "Stars", "4"], ["Inform", "Hotel", "Area", "east"]], -1),
        ("user", [PHONE, ADDRESS], None),
        ("assistant", [["Inform", "Hotel", "Phone", "01223"]], -1),
        ("user", [["Inform", "Hotel", "Stay", "2"]], None),
        ("assistant", [["Book", "Booking", "Ref", "00000001"]], -1),
        ("user", [ADDRESS], None),
        ("assistant", [["Request", "Hotel", "Day", "?"]], -40),
        ("user", [ADDRESS], None),
    ]
    messages = [
        {"role": role, "content": "words", "acts": acts}
        | ({} if reward is None else {"reward": float(reward)})
        for role, acts, reward in turns
    ]
    found = {
        "id": f"d{key}",
        "messages": messages,
        "goal": GOAL,
        "meta": {"seeds": [0, 0, 0, key], "outcome": OUTCOME | {"success": success}},
    }
    return found | changes


@pytest.fixture
def read(tmp_path):
    def load(*records):
        path = tmp_path / "dialogs.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
        return read_task_dialogs(path)

    return load


def test_a_return_is_unknown_where_a_reward_is_missing(read, tmp_path):
    unrated = record(1)
    del unrated["messages"][3]["reward"]
    unrated["messages"][5]["reward"] = None
    dialogs = read(record(), unrated)
    assert [dialog.total for dialog in dialogs] == [-43.0, None]
    assert measures(dialogs)["return"].value == -43.0 and "return" not in measures(dialogs[1:])
    for known, expected in ((dialogs, ["-43.0", ""]), (dialogs[1:], [""])):
        comparison = compare_tasks({"a": ("a", known)}, replicates=10, seed=0)
        written = write_task_report(comparison, tmp_path / "report")
        assert [row.split(",")[4] for row in written["csv"].read_text().splitlines()[1:]] == expected


def test_one_dialog(read):
    (dialog,) = read(record())
    assert [(a.slot, a.answered) for a in dialog.asked] == [("Phone", 1), ("Addr", None)]
    assert dialog.unasked == [("Hotel", "Stars")], "the area is the user's wish"
    assert [(side, times) for side, _, times in dialog.loops] == [("user", 2)]
    assert dialog.booked == dialog.to_book == ["hotel"]
    assert (dialog.replies, dialog.total, dialog.reason) == (4, -43.0, "not answered")
    assert domain_counts([dialog], "hotel") == {
        "dialogs": 1, "asked": 2, "told": 1, "told at once": 0, "to book": 1, "booked": 1, "told unasked": 1
    }  # fmt: skip
    asked = questions([dialog])
    assert list(asked) == ["Hotel Addr", "Hotel Phone"], "the worst first"
    assert (asked["Hotel Addr"].never, asked["Hotel Phone"].later) == (1, 1)
    assert asked["Hotel Phone"].instead == {"Inform Hotel Stars; Inform Hotel Area": 1}
    found = measures([dialog])
    assert {
        name: found[name].value for name in ("turns", "return", "loops", "success/hotel", "success/police")
    } == {
        "turns": 4, "return": -43, "loops": 1, "success/hotel": 0, "success/police": 1
    }  # fmt: skip
    assert "complete" not in found, "nobody measured it"


@pytest.mark.parametrize(
    ("without", "outcome", "reason"),
    [
        (None, {"success": True}, ""),
        (5, {}, "not booked"),
        (None, {"book_rate": 0.5}, "booked wrongly"),
        (None, {"book_rate": 0.0}, "booked wrongly"),
        (7, {}, "wrong answers"),  # the address is told there
        (7, {"inform_recall": 0.5}, "never asked"),  # the goal had more, which the user did not come to
    ],
)
def test_reasons(read, without, outcome, reason):
    changed = record()
    changed["meta"]["outcome"] = changed["meta"]["outcome"] | outcome
    if without is not None:
        changed["messages"][without]["acts"] = [["Inform", "Hotel", "Addr", "here"]]
    (dialog,) = read(changed)
    assert dialog.reason == reason


@pytest.mark.parametrize(
    ("said", "replied", "reason"),
    [
        ([["Inform", "Hotel", "Stay", "2"]], [["Inform", "Hotel", "Stars", "4"]], "ignored"),
        ([["Inform", "Hotel", "Stay", "2"]], [["NoBook", "Booking", "none", "none"]], "refused"),
        ([["Inform", "Hotel", "Area", "east"]], [["NoOffer", "Hotel", "Area", "east"]], "nothing found"),
        ([["Inform", "Hotel", "Area", "east"]], [["Request", "Hotel", "Stars", "?"]], "no details"),
        ([["Request", "Police", "Phone", "?"]], [["Inform", "Police", "Phone", "999"]], "not reached"),
    ],
)
def test_missed_bookings(read, said, replied, reason):
    turns = [
        {"role": "user", "content": "", "acts": said},
        {"role": "assistant", "content": "", "acts": replied, "reward": -1.0},
    ]
    (dialog,) = read(record(messages=turns))
    assert dialog.missed == {"hotel": reason} and dialog.reason == "not booked"


def test_figures_of_a_domain(read):
    """The user speaks of the hotel in all four turns; its figures are those of the outcome, and the police
    has none."""
    changed = record()
    changed["meta"]["outcome"] = changed["meta"]["outcome"] | {
        "by_domain": {"hotel": {"book_rate": 1.0, "inform_f1": 2 / 3}, "police": {}}
    }
    found = measures(read(changed))
    assert {name: measure.value for name, measure in found.items() if "/" in name} == {
        "success/hotel": 0, "success/police": 1, "book_rate/hotel": 1, "inform_f1_all_slots/hotel": 2 / 3,
        "turns/hotel": 4, "turns/police": 0
    }  # fmt: skip
    assert found["inform_f1_all_slots"].value == 0.5


def test_readings(read):
    changed = record()
    changed["messages"][0]["understood"] = [
        ["Inform", "Hotel", "Area", "West"],
        ["Request", "Hotel", "Phone", "?"],
    ]
    changed["messages"][1] |= {
        "meant": [["Inform", "Hotel", "Stars", "4"], ["Inform", "Hotel", "Phone", "01223"]]
    }
    (dialog,) = read(changed)
    user, system = (readings([dialog], side) for side in ("user", "system"))
    assert (user["Inform Hotel Area"].said, user["Inform Hotel Area"].understood) == (1, 0)
    assert (
        user["Inform Hotel Area"].instead == {"Inform Hotel Area = west": 1}
        and user["Request Hotel Phone"].understood == 1
    )
    assert list(system) == [
        "Inform Hotel Phone",
        "Inform Hotel Stars",
    ], "in the one reply that says what was meant"
    assert dialog.asked[0].answered == 0, "what was meant counts, not what was read"


def test_comparison_and_report(read, tmp_path):
    bad, good = (
        read(record(0), record(1), record(2, success=True)),
        read(record(0, success=True), record(1), record(2, success=True)),
    )
    comparison = compare_tasks(
        {"bad": ("runs/bad", bad), "good": ("runs/good", good)}, replicates=200, seed=0
    )
    change = comparison.differences["good"]["success"]
    assert change.value == pytest.approx(1 / 3) and change.low <= 1 / 3 <= change.high
    (table,) = [section.table for section in sections(comparison) if section.title == "Who succeeds where"]
    assert table.rows == [["good", "1", "1", "0", "1"]]
    paths = write_task_report(comparison, tmp_path / "report")
    page = paths["html"].read_text()
    for heading in (
        "Measures",
        "Difference",
        "Domains",
        "Why dialogs fail",
        "Questions",
        "Told unasked",
        "Loops",
        "Turns and returns",
        "Failures of bad",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert paths["csv"].read_text().splitlines()[1] == "bad,d0,0,4,-43.0,not answered,2,1,1"
    assert (
        json.loads(paths["json"].read_text())["policies"][0]["failures"]
        == {"not answered": 2}
        == to_json(comparison)["policies"][0]["failures"]
    )


def test_what_cannot_be_compared_or_read(read, tmp_path):
    one, other = read(record(0)), read(record(1))
    with pytest.raises(UserError, match="the same users as runs/a .1 goals.*--seed"):
        compare_tasks({"a": ("runs/a", one), "b": ("runs/b", other)}, replicates=10, seed=0)
    for broken, told in (
        (record(meta={}), "expected `seeds` and an `outcome`"),
        (record(goal=None), "expected the user's goal by domain"),
        (
            record(
                messages=[
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho", "reward": 1.0},
                ]
            ),
            "expected `acts` of four",
        ),
    ):
        with pytest.raises(UserError, match=told):
            read(broken)
    with pytest.raises(UserError, match=r"expected a dialog per user, got 2 with the seeds \[0, 0, 0, 0\]"):
        read(record(0), record(1), record(0))
    with pytest.raises(UserError, match="found none"):
        read()
    (tmp_path / "bad.jsonl").write_text('{"id": 3\n')
    with pytest.raises(DialogError, match=r"bad.jsonl:1"):
        read_task_dialogs(tmp_path / "bad.jsonl")
    assert Dialog.from_record(record()).goal == GOAL
