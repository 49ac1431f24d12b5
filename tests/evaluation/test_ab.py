"""The A/B report by hand: what counts for which model, and intervals that draw chats and not replies."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pipelines.ab import ABConfig, main
from rl_dialog.data import store as stores
from rl_dialog.data.schema import Dialog
from rl_dialog.data.store import Store
from rl_dialog.errors import UserError
from rl_dialog.evaluation.ab import compare_served, read_chats, sections
from rl_dialog.evaluation.document import to_markdown
from rl_dialog.evaluation.intervals import Measure, unpaired_difference


def chat(
    name, model, *votes, minute=0, drawn=None, ratings=None, user="", texts=None, says=None, checkpoint="c"
):
    """A chat of the drawn `model` that began at `minute`: one reply per vote (None: nobody voted), by
    `says[i]` where another model spoke."""
    messages = []
    for i, vote in enumerate(votes):
        by = says[i] if says else model
        reply = {
            "role": "assistant",
            "content": texts[i] if texts else f"reply {i}",
            "model": by,
            "checkpoint": checkpoint,
            "completion": f"{name}-{i}",
        }
        messages += [
            {"role": "user", "content": "hi"},
            reply | {"seconds": 0.5} | ({} if vote is None else {"feedback": {"vote": vote}}),
        ]
    meta = {
        "user": user,
        "started": f"2026-01-01T10:{minute:02d}:00+00:00",
        "drawn": model if drawn is None else drawn,
        "method": "bc",
    }
    return Dialog(name, messages, source="served", meta=meta | ({"ratings": ratings} if ratings else {}))


def compared(*dialogs, **given):
    return compare_served(read_chats(dialogs), **given)


def triple(estimate):
    return (estimate.value, estimate.low, estimate.high)


def few_participants(counts):
    return (
        f"few participants: {counts}. 95 % intervals over fewer than 8 are too narrow "
        "(over 2 they hold the truth half the time, over 5 in 85 %)"
    )


def test_figures_and_intervals_by_hand():
    """bc: votes (1, 1, 1, -1) in one chat and (-1) in another: mean 1/5. A replicate draws n - 1 = 1 of the
    two chats, so it is 2/4 or -1/1: the interval is [-1, 1/2]. Drawing single replies would give a narrower
    one around 0.2."""
    found = compared(
        chat("a", "bc", 1, 1, 1, -1, None),
        chat("b", "bc", -1),
        chat("c", "ilql", 1),
        chat("d", "ilql", 0, 1, minute=1),
    )
    bc, ilql = found.arms
    assert (bc.name, len(bc.chats), ilql.name, len(ilql.chats)) == ("bc", 2, "ilql", 2)
    assert triple(bc.group.estimates["vote"]) == (0.2, -1.0, 0.5)
    assert triple(bc.group.estimates["up"]) == (0.6, 0.0, 0.75)
    assert triple(bc.group.estimates["down"]) == (0.4, 0.25, 1.0)
    assert triple(bc.group.estimates["voted"]) == (5 / 6, 0.8, 1.0)
    assert triple(bc.group.estimates["replies"]) == (3.0, 1.0, 5.0)
    assert triple(ilql.group.estimates["vote"]) == (2 / 3, 0.5, 1.0)
    assert bc.group.estimates["words"].value == 2.0 and bc.group.estimates["seconds"].value == 0.5


def test_the_difference_draws_the_chats_of_each_model_by_themselves():
    """bc is -1 or 1/2 in a replicate, ilql 1/2 or 1, each pair with probability 1/4: the difference lies
    between 1/2 - 1/2 and 1 - -1."""
    chats = [chat("a", "bc", 1, 1, 1, -1), chat("b", "bc", -1), chat("c", "ilql", 1), chat("d", "ilql", 0, 1)]
    [change] = compared(*chats).differences
    assert (change.arm.name, change.baseline.name, change.chats) == ("ilql", "bc", (2, 2))
    assert triple(change.figures["vote"]) == pytest.approx((2 / 3 - 0.2, 0.0, 2.0))
    assert triple(compared(*chats, baseline="ilql").differences[0].figures["vote"]) == pytest.approx(
        (0.2 - 2 / 3, -2.0, 0.0)
    )


def test_an_unpaired_difference_has_the_spread_of_both_groups():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=300), rng.normal(size=500)
    found = unpaired_difference(Measure.mean(ours + 1.0), Measure.mean(theirs))
    half = 1.96 * np.sqrt(ours.var(ddof=1) / 300 + theirs.var(ddof=1) / 500)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.15 * half)
    one = unpaired_difference(Measure.mean([1.0, None]), Measure.mean(theirs))
    assert one.value == pytest.approx(1.0 - theirs.mean()) and one.low is None and one.high is None
    assert unpaired_difference(Measure.mean([None]), Measure.mean(theirs)) is None


def test_without_votes_there_is_no_figure_of_votes():
    found = compared(chat("a", "bc", None, None), chat("b", "ilql", None))
    assert "vote" not in found.arms[0].group.estimates and "vote" not in found.differences[0].figures
    assert found.arms[0].group.estimates["voted"].value == 0.0
    assert "| bc | 1 | 2 | 2.00 | 0.0 % |" in to_markdown("", sections(found))


def test_one_model_alone_has_figures_and_no_difference():
    found = compared(chat("a", "bc", 1), chat("b", "bc", -1))
    assert triple(found.arms[0].group.estimates["vote"]) == (0.0, -1.0, 1.0)
    assert found.differences == [] and [section.title for section in sections(found)] == [
        "Votes",
        "Replies",
        "Models",
    ]


def test_only_chats_that_began_while_both_got_new_ones_are_compared():
    """bc alone until minute 2, both until 4, then ilql alone: the thumbs before and after would tell of days,
    not of models."""
    before = [chat(f"early{i}", "bc", -1, minute=0) for i in range(4)]
    both = [
        chat("b", "bc", 1, minute=3),
        chat("i", "ilql", 1, minute=2),
        chat("c", "bc", 1, minute=4),
        chat("j", "ilql", 1, minute=4),
    ]
    found = compared(*before, *both, chat("late", "ilql", -1, minute=9))
    [change] = found.differences
    assert change.chats == (2, 2) and change.figures["vote"].value == 0.0
    assert change.began == ("2026-01-01T10:02:00+00:00", "2026-01-01T10:04:00+00:00")
    assert found.notes == [
        "ilql - bc: 5 chats began when only one of the two got new ones and do not count",
        few_participants("bc 6, ilql 3"),
    ]
    apart = compared(chat("a", "bc", 1, minute=1), chat("b", "ilql", 1, minute=2))
    assert apart.differences[0].figures == {} and apart.notes == [
        "ilql and bc never got new chats at the same time: there is no comparison"
    ]


def test_a_chat_that_changes_its_model_counts_up_to_the_change():
    """ilql was taken out of service after its first reply. The rating is of the whole chat, so it is
    nobody's; as is a chat all by another."""
    moved = chat("a", "ilql", 1, -1, -1, says=["ilql", "bc", "ilql"], ratings={"quality": 1})
    found = compared(
        moved,
        chat("b", "ilql", 1, ratings={"quality": 5}),
        chat("c", "bc", -1),
        chat("d", "ilql", -1, says=["bc"]),
    )
    ilql = next(arm for arm in found.arms if arm.name == "ilql")
    assert (
        len(ilql.chats) == 2
        and ilql.group.estimates["vote"].value == 1.0
        and ilql.group.estimates["rating/quality"].value == 5.0
    )
    assert found.notes == [
        "2 chats were not answered by one model alone: 3 replies from the change on, and their ratings, do "
        "not count",
        few_participants("ilql 2"),
    ]


def test_another_checkpoint_under_the_same_name_is_another_model():
    found = compared(
        chat("a", "bot", 1, checkpoint="runs/ilql/checkpoint-5"),
        chat("b", "bot", -1, checkpoint="runs/ilql/checkpoint-9"),
    )
    assert [arm.name for arm in found.arms] == ["bot (ilql/checkpoint-5)", "bot (ilql/checkpoint-9)"]


def test_chats_whose_model_the_client_chose_stand_apart():
    found = compared(chat("a", "bc", 1), chat("b", "ilql", -1), chat("c", "ilql", 1, drawn=""))
    assert [arm.group.estimates["vote"].value for arm in (*found.arms, *found.apart)] == [1.0, -1.0, 1.0]
    text = to_markdown("", sections(found))
    assert "## Not part of the comparison" in text and found.differences[0].chats == (1, 1)
    alone = compared(chat("c", "ilql", 1, drawn=""))
    assert (alone.arms, alone.differences, len(alone.apart)) == ([], [], 1)


def test_ratings_repetitions_users_and_what_else_is_known():
    said = ["What do you like?", "What do you like?", "Music is nice."]
    found = compared(
        chat("a", "bc", 1, 1, 1, texts=said, ratings={"quality": 2, "fluency": 7}, user="ann"),
        chat("b", "bc", 1, user="ann"),
        known={"return": {"a": -0.5, "b": 1.5}},
    )
    figures = found.arms[0].group.estimates
    assert figures["repeated"].value == 1 / 4 and figures["return"].value == 0.5
    assert figures["return"].low is None, "one person"
    assert (figures["rating/quality"].value, figures["rating/fluency"].value) == (2.0, 7.0)
    assert found.notes == ["2 chats are by 1 participants, whom the intervals draw"]
    assert "return per dialog" in to_markdown("", sections(found))


def test_intervals_over_a_handful_of_people_are_said_to_be_too_narrow():
    few = [chat(f"a{i}", "bc", 1 - i % 2, user=f"ann {i}") for i in range(7)]
    many = [chat(f"b{i}", "ilql", 1 - i % 2, user=f"bob {i}") for i in range(8)]
    found = compared(*few, *many, chat("c", "bc", 1, user="ann 0"))
    assert found.notes[-1] == few_participants("bc 7")


def test_nothing_to_compare_is_said():
    named = compared(chat("a", "bc", 1, drawn=""), chat("b", "ilql", -1, None, drawn=""))
    assert named.arms == [] and "no chat counts: in all 2, with 2 votes, the client named" in named.notes[0]
    silent = compared(chat("a", "bc", None), chat("b", "ilql", 1, drawn=""))
    assert silent.notes == [
        "no vote counts: nobody voted in a chat whose model the server drew; 1 are in chats whose client "
        "named the model"
    ]
    with pytest.raises(UserError, match="expected served chats with replies, found none"):
        compared()
    with pytest.raises(UserError, match="expected a model that the server drew, bc, got 'ilql'"):
        compared(chat("a", "bc", 1), baseline="ilql")


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A store with two chats per model, one of them with a regenerated reply and an edit."""
    url = f"sqlite:///{tmp_path}/chats.db"
    store, clock = Store(url), iter(range(1_800_000_000, 1_900_000_000))
    monkeypatch.setattr(stores.time, "time", lambda: float(next(clock)))
    hi = [{"role": "user", "content": "hi"}]
    for number, model in enumerate(["bc", "ilql", "bc", "ilql"]):
        made = {
            "model": model,
            "checkpoint": f"/runs/{model}",
            "method": model,
            "settings": {},
            "seconds": 0.25,
        }
        name = store.start_chat(model=model, propensity=0.5, user=f"u{number}")
        for turn in range(1 + (number == 0)):  # the first chat's reply is regenerated
            store.add_turns(
                hi, [(f"hello {turn}", "stop", {})], chat=name, completion=f"{number}-{turn}", **made
            )
            store.feedback(f"{number}-{turn}", vote=1 if model == "ilql" else -1)
        store.rate(name, {"quality": number + 1})
    store.feedback("0-1", edit="Good morning")
    store.close()
    return url


def test_a_store_is_read_branch_by_branch(filled, tmp_path):
    """Both answers to the first chat's `hi` count, and the edit, which no model said, does not."""
    found = main(ABConfig(store=filled, output_dir=str(tmp_path / "ab"), quiet=True))
    assert found["models"] == {
        "bc": {"chats": 2, "vote": [-1.0, None, None]},
        "ilql": {"chats": 2, "vote": [1.0, None, None]},
    }
    record = json.loads((tmp_path / "ab" / "ab.json").read_text())
    assert [(row["model"], row["replies"], row["checkpoint"]) for row in record["models"]] == [
        ("bc", 3, "/runs/bc"),
        ("ilql", 2, "/runs/ilql"),
    ]
    assert record["models"][0]["figures"]["rating/quality"]["value"] == 2.0  # 1 and 3, once per chat
    page = (tmp_path / "ab" / "ab.html").read_text()
    assert "ilql - bc" in page and "Good morning" not in page and "data:image/png" in page


def test_a_reply_is_voted_on_whether_or_not_its_vote_counts(tmp_path):
    """Who begins three chats alike and votes in each has one vote, and has voted on three replies of three:
    a model that says the same more often is not voted on less."""
    with_votes = Store(f"sqlite:///{tmp_path}/chats.db")
    hi = [{"role": "user", "content": "hi"}]
    made = {"model": "bc", "checkpoint": "/runs/bc", "method": "bc", "settings": {}, "seconds": 0.25}
    for number, vote in enumerate((-1, 1, 1)):
        name = with_votes.start_chat(model="bc", propensity=0.5, user="ann")
        with_votes.add_turns(hi, [("hello", "stop", {})], chat=name, completion=str(number), **made)
        with_votes.feedback(str(number), vote=vote)
    [arm] = compare_served(read_chats(with_votes.dialogs())).arms
    with_votes.close()
    figures = {name: arm.group.estimates[name].value for name in ("replies", "voted", "vote", "up", "down")}
    assert figures == {"replies": 1, "voted": 1, "vote": 1, "up": 1, "down": 0}


def test_the_command_shows_the_votes(filled, tmp_path):
    command = [sys.executable, "-m", "pipelines.ab", "--store", filled, "--output_dir", str(tmp_path / "ab")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["models"]["bc"]["chats"] == 2 and "thumbs up" in run.stdout
    with pytest.raises(UserError, match="none.db"):
        main(ABConfig(store=f"sqlite:///{tmp_path}/none.db", output_dir=str(tmp_path / "none")))
    with pytest.raises(UserError, match="expected --seed of at least 0, got -1"):
        main(ABConfig(store=filled, output_dir=str(tmp_path / "none"), seed=-1))


@pytest.mark.parametrize("wrong", [{"store": "sqlite:///none.db"}, {"baseline": "nobody"}])
def test_an_earlier_report_stays_where_the_command_is_refused(wrong, filled, tmp_path):
    earlier = ABConfig(store=filled, output_dir=str(tmp_path / "ab"), quiet=True)
    main(earlier)
    with pytest.raises(UserError, match="none.db|nobody"):
        main(replace(earlier, overwrite=True, **wrong))
    assert (tmp_path / "ab" / "ab.html").is_file()
