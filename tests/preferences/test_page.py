"""The labelling page's HTTP side: a real server, real leases, and everything that clients can do wrong."""

from __future__ import annotations

import io
import json
import re
import threading

import httpx
import numpy as np
import pytest
from PIL import Image

from rl_dialog.errors import UserError
from rl_dialog.preferences.frames import draw_pixels, sheet
from rl_dialog.preferences.page.app import STATIC, create_page
from rl_dialog.preferences.page.server import PageServer

TEXT = re.compile(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|<style|javascript:")


def lease(client):
    """The next pair, or None."""
    response = client.post("/v1/lease", json={})
    assert response.status_code == 200, response.text
    return response.json()["query"]


def answer(client, query, choice, **headers):
    return client.post("/v1/answers", json={"query": query["id"], "choice": choice}, headers=headers)


def held(client, *queries):
    return client.post("/v1/renew", json={"queries": [query["id"] for query in queries]}).json()["held"]


# Who may do what


def test_pages_have_no_inline_script_and_come_with_headers(page):
    client = page()
    for path in ("/", "/run", "/page/label.js", "/page/page.css", "/page/icon.svg"):
        response = client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "script-src 'self'" in policy
            and "unsafe" not in policy
            and "http" not in policy
        )
        assert (
            response.headers["x-content-type-options"] == "nosniff"
            and response.headers["referrer-policy"] == "no-referrer"
        )
        assert not TEXT.search(response.text) or path.endswith(".svg"), path
    for file in STATIC.iterdir():
        assert not re.search(r"(src|href|from|import)\W+https?://", file.read_text(encoding="utf-8")), (
            f"{file.name} loads from elsewhere"
        )
    assert (
        client.get("/page/app.py").status_code
        == client.get("/page/../app.py").status_code
        == client.get("/openapi.json").status_code
        == 404
    )


@pytest.mark.parametrize("token", [None, "rl-wrong", "rl", "ä"])
def test_nothing_is_told_without_a_token(page, labelled_run, token):
    labelled_run.ask(1)
    client = page()
    headers = {"Authorization": f"Bearer {token}".encode()} if token is not None else {}
    for method, path in (
        *(("POST", f"/v1/{name}") for name in ("lease", "renew", "release", "answers", "undo")),
        *(
            ("GET", f"/v1/{name}")
            for name in ("status", "labellers", "run", "metrics", f"segments/{'0' * 64}.png")
        ),
    ):
        response = client.request(method, path, headers=headers, json={} if method == "POST" else None)
        assert response.status_code == 401 and "token" in response.json()["error"]["message"], path
        assert response.headers["www-authenticate"] == "Bearer"
    assert client.get("/page.json").json()["needs_token"] is True and client.get("/health").json() == {
        "status": "ok"
    }


def test_who_is_revoked_is_out_at_once(page, labelled_run):
    labelled_run.ask(2)
    ann = page("ann")
    answer(ann, lease(ann), "left")
    labelled_run.log.revoke_labeller("ann")
    assert ann.post("/v1/lease", json={}).status_code == 401
    assert labelled_run.log.labels() == [] and len({lease(page("bob"))["id"], lease(page("bob"))["id"]}) == 2


def test_the_open_page_is_for_this_machine_under_its_own_name(page, labelled_run):
    labelled_run.ask(1)
    client = page(None, labeller="me")
    assert client.get("/page.json").json()["needs_token"] is False
    wrong = client.post("/v1/lease", json={}, headers={"Host": "evil.example"})
    assert wrong.status_code == 403 and "evil.example" in wrong.json()["error"]["message"]
    answer(client, lease(client), "left")
    assert [label.labeller for label in labelled_run.log.labels()] == ["me"]


# Pairs


def test_a_clip_comes_as_a_sheet_of_its_frames(page, labelled_run):
    first, second = labelled_run.clip(10, length=8), labelled_run.clip(90, length=8, steps=5)
    labelled_run.log.add_query(first, second, task="Which is brighter?")
    ann = page("ann")
    query = lease(ann)
    assert query["task"] == "Which is brighter?" and {query["left"]["id"], query["right"]["id"]} == {
        first,
        second,
    }
    for side in (query["left"], query["right"]):
        clip = labelled_run.segments[side["id"]]
        assert (side["kind"], side["frames"], side["width"], side["height"], side["ended"]) == (
            "clip",
            clip.steps,
            10,
            12,
            clip.steps < 8,
        )
        response = ann.get(f"/v1/segments/{side['id']}.png")
        assert (
            response.headers["content-type"] == "image/png" and "private" in response.headers["cache-control"]
        )
        whole = np.asarray(Image.open(io.BytesIO(response.content)))
        for n in range(side["frames"]):
            y, x = 12 * (n // side["columns"]), 10 * (n % side["columns"])
            assert np.array_equal(whole[y : y + 12, x : x + 10], clip.observations[n]), (
                "every frame is where the page looks for it"
            )
    assert ann.get(f"/v1/segments/{'0' * 64}.png").status_code == 404
    for id in ("..%2f..%2flabels", "x", "0" * 63, "0" * 63 + "G", first.upper()):
        assert ann.get(f"/v1/segments/{id}.png").status_code in (400, 404), id


def test_a_sheet_is_bounded_and_whole(labelled_run):
    from rl_dialog.preferences.segments import Clip

    wide = np.zeros((40, 700, 900, 3), np.uint8)
    wide[:, 350:, :] = 200
    made = sheet(Clip(wide, np.zeros(40, np.int64), np.zeros(40, np.float32), 40), draw_pixels)
    assert (made.frames, made.width, made.height) == (40, 450, 350), "smaller by a whole factor"
    pixels = np.asarray(Image.open(io.BytesIO(made.png)))
    assert pixels.shape[0] * pixels.shape[1] < 14_000_000 and set(np.unique(pixels[:350, :450])) == {0, 200}
    with pytest.raises(UserError, match="say how to draw"):
        sheet(
            Clip(np.zeros((3, 2), np.float32), np.zeros(3, np.int64), np.zeros(3, np.float32), 3), draw_pixels
        )
    with pytest.raises(UserError, match=r"uint8 \(H, W, 3\)"):
        sheet(labelled_run.segments[labelled_run.clip(1)], lambda observation: observation.astype(float))


def test_replies_come_with_their_context(page, labelled_run):
    labelled_run.ask_about_replies(task="Which helps more?")
    query = lease(page("ann"))
    assert {query["left"]["text"], query["right"]["text"]} == {"Yes, gladly.", "No."} and query["left"][
        "kind"
    ] == "reply"
    assert (
        query["left"]["context"]
        == query["right"]["context"]
        == [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": "Would you help me?"},
        ]
    )


def test_without_a_pair_the_page_waits(page, labelled_run):
    ann = page("ann")
    assert lease(ann) is None
    status = ann.get("/v1/status").json()
    assert status["labeller"] == "ann" and status["counts"]["labels"] == 0 and status["labels_wanted"] is None
    watcher = page(token=labelled_run.log.keys.add("kim", scopes=["metrics"]))
    assert watcher.get("/v1/metrics").json() == {"lines": [], "cursor": "", "more": False, "reset": False}
    (query,) = labelled_run.ask(1)
    assert lease(ann)["id"] == query and lease(ann) is None


def test_how_many_labels_are_wanted_is_no_labellers(page, labelled_run):
    """An answer to a gold pair leaves the number as it is, so it would tell which pairs these are."""
    ann = page("ann")
    kim = page(token=labelled_run.log.keys.add("kim", scopes=["labeller", "operator"]))
    for wanted, told in ((7, None), (0, 0)):
        (labelled_run.folder / "status.json").write_text(json.dumps({"labels_wanted": wanted}))
        assert ann.get("/v1/status").json()["labels_wanted"] == told
        assert kim.get("/v1/status").json()["labels_wanted"] == wanted


def test_answers_are_about_what_was_shown(page, labelled_run):
    """Somebody who always presses left prefers what they saw there; over many swapped showings, the first as
    often as the second."""
    labelled_run.ask(40)
    ann, shown = page("ann"), {}
    while query := lease(ann):
        shown[query["id"]] = query
        assert answer(ann, query, "left").status_code == 200
    labels = labelled_run.log.labels()
    assert len(labels) == 40
    for label in labels:
        preferred = label.first if label.preference == 1 else label.second
        assert preferred == shown[label.query]["left"]["id"]
    assert 7 < sum(label.preference for label in labels) < 33  # four standard deviations
    (mine,) = ann.get("/v1/labellers").json()["labellers"].values()
    assert mine["labels"] == 40 and mine["left_share"] == 1.0


def test_what_can_be_answered(page, labelled_run):
    queries = labelled_run.ask(4)
    ann = page("ann")
    for choice in ("left", "right", "tie", "skip"):
        assert answer(ann, lease(ann), choice).status_code == 200
    counts = ann.get("/v1/status").json()["counts"]
    assert (counts["labels"], counts["ties"], counts["skipped"]) == (3, 1, 1) and len(queries) == 4


def test_a_request_that_is_sent_again_counts_once(page, labelled_run):
    labelled_run.ask(2)
    ann = page("ann")
    query = lease(ann)
    first = answer(ann, query, "left", **{"Idempotency-Key": "k1"})
    assert (
        answer(ann, query, "left", **{"Idempotency-Key": "k1"}).json()
        == first.json()
        == answer(ann, query, "left").json()
    )
    changed = answer(ann, query, "right", **{"Idempotency-Key": "k1"})
    assert changed.status_code == 422 and "another request" in changed.json()["error"]["message"]
    assert labelled_run.log.state() == (1, 0, 0)

    undone = ann.post("/v1/undo", json={}, headers={"Idempotency-Key": "k2"}).json()["query"]
    assert undone == query, "the pair comes back as it was shown"
    again = answer(ann, undone, "right")
    assert again.json()["label"] == 2
    assert ann.post("/v1/undo", json={}, headers={"Idempotency-Key": "k2"}).json()["query"] == undone
    assert answer(ann, query, "left", **{"Idempotency-Key": "k1"}).json() == first.json(), (
        "a request that was long on its way changes nothing"
    )
    assert labelled_run.log.state() == (2, 1, 0) and len(labelled_run.log.labels()) == 1
    bob = page("bob")
    query = lease(bob)
    assert answer(bob, query, "tie", **{"Idempotency-Key": "k1"}).json()["query"] == query["id"], (
        "keys are a labeller's own"
    )


def test_an_undo_that_is_sent_again_to_a_new_server_takes_back_one_answer(page, labelled_run):
    """The first server was killed after the log had committed, and before it answered: the page sends the
    same request to the next one, which took back the answer before as well."""
    labelled_run.ask(2)
    ann = page("ann")
    queries = [lease(ann), lease(ann)]
    for query in queries:
        answer(ann, query, "left")
    undo = {"json": {}, "headers": {"Idempotency-Key": "k1"}}
    assert ann.post("/v1/undo", **undo).json()["query"]["id"] == queries[1]["id"]
    new_server = page("ann", lease=59.0)
    assert new_server.post("/v1/undo", **undo).json()["query"] == queries[1]
    assert [one.revoked is None for one in labelled_run.log.answers()] == [True, False]
    answer(new_server, queries[1], "right")
    undo["headers"] = {"Idempotency-Key": "k2"}
    assert new_server.post("/v1/undo", **undo).json()["query"] == queries[1]


def test_the_first_of_two_answers_stands_and_the_second_is_told_so(page, labelled_run):
    """Of one person with two windows. What they say where they learn of it can be taken back."""
    labelled_run.ask(2)
    ann = page("ann")
    query, other = lease(ann), lease(ann)
    assert answer(ann, query, "left").json()["earlier"] is None
    assert answer(ann, query, "left").json()["earlier"] is None  # the same again: nothing is lost
    ann.post("/v1/answers", json={"query": other["id"], "choice": "tie", "flag": "cut off"})
    second = ann.post("/v1/answers", json={"query": query["id"], "choice": "left", "strength": 2})
    stands = {"choice": "left", "strength": None, "reasons": [], "flag": None}
    assert second.json() == {"label": 1, "query": query["id"], "earlier": stands}
    assert answer(ann, other, "tie").json()["earlier"] == stands | {"choice": "tie", "flag": "cut off"}
    renewed = ann.post("/v1/renew", json={"queries": [query["id"], other["id"]]}).json()
    assert renewed == {"held": [], "answered": [query["id"], other["id"]]}
    assert ann.post("/v1/undo", json={"query": query["id"]}).json()["query"] == query
    assert ann.post("/v1/undo", json={"query": query["id"]}).json()["query"] is None
    assert answer(ann, query, "right").json() == {"label": 3, "query": query["id"], "earlier": None}


def test_undo_goes_back_answer_by_answer(page, labelled_run):
    labelled_run.ask(3)
    ann = page("ann")
    answered = []
    for _ in range(3):
        answered.append(lease(ann))
        answer(ann, answered[-1], "left")
    undo = lambda: ann.post("/v1/undo", json={}).json()["query"]  # noqa: E731
    assert [undo(), undo(), undo(), undo()] == [*reversed(answered), None]
    assert labelled_run.log.labels() == [] and ann.get("/v1/status").json()["counts"]["revoked"] == 3


def test_remarks_come_with_an_answer(page, labelled_run):
    labelled_run.log.set_plan(
        guideline="# Be kind", reasons=("short",), strength=True, goal=2, gold_share=0.0
    )
    labelled_run.ask(4)
    ann = page("ann")
    plan = ann.get("/v1/status").json()["plan"]
    assert plan | {"goal": 2, "session": 0, "strength": True, "reasons": ["short"]} == plan and len(plan) == 5
    assert ann.get("/v1/guideline").json() == {"text": "# Be kind"}
    query = lease(ann)
    told = {"query": query["id"], "choice": "left", "strength": 2, "reasons": ["short"], "flag": ""}
    assert ann.post("/v1/answers", json=told).status_code == 200
    odd = ann.post("/v1/answers", json={"query": lease(ann)["id"], "choice": "tie", "strength": 1})
    assert odd.status_code == 409 and "only with left or right" in odd.json()["error"]["message"]
    (kept,) = labelled_run.log.answers()
    assert (kept.strength, kept.reasons, kept.flag) == (2, ["short"], "")
    assert lease(ann) is None, "one answer and one pair on the screen are the two that are asked for"


def test_a_labeller_sees_their_own_figures_only(page, labelled_run):
    labelled_run.log.set_plan(overlap=2)
    labelled_run.ask(2)
    ann, bob = page("ann"), page("bob")
    for who in (ann, bob, bob):
        answer(who, lease(who), "left")
    status = ann.get("/v1/status").json()
    assert (
        status["counts"]
        == status["own"]
        == {"labels": 1, "ties": 0, "revoked": 0, "skipped": 0, "answers": 1}
    )
    (mine,) = ann.get("/v1/labellers").json()["labellers"].values()
    assert not {"agreement", "shared", "noise", "gold", "gold_right", "late"} & mine.keys()
    kim = page(token=labelled_run.log.add_labeller("kim", scopes=["labeller", "operator"]))
    assert kim.get("/v1/status").json()["counts"]["second_opinions"] == 1
    assert kim.get("/v1/labellers").json()["labellers"]["bob"]["shared"] == 1


# Several labellers


def test_a_pair_of_somebody_else(page, labelled_run):
    labelled_run.ask(1)
    ann, bob = page("ann"), page("bob")
    query = lease(ann)
    assert lease(bob) is None and held(bob, query) == []
    wrong = answer(bob, query, "left")
    assert wrong.status_code == 409 and "never" not in wrong.text and labelled_run.log.state() == (0, 0, 0)
    bob.post("/v1/release", json={"queries": [query["id"]]})
    assert lease(bob) is None and held(ann, query) == [query["id"]], "nobody gives back what another one has"
    assert bob.post("/v1/undo", json={}).json() == {"query": None}


def test_a_pair_that_is_given_back_or_left_goes_to_the_next(page, labelled_run):
    labelled_run.ask(1)
    ann, bob = page("ann"), page("bob")
    query = lease(ann)
    assert ann.post("/v1/release", json={"queries": [query["id"]]}).json() == {"held": []}
    assert lease(bob)["id"] == query["id"] and held(ann, query) == []
    for _ in range(5):  # somebody is there
        labelled_run.ahead += 50
        assert held(bob, query) == [query["id"]]
    assert lease(ann) is None
    labelled_run.ahead += 61
    assert lease(ann)["id"] == query["id"], "after the lease has run out"
    assert held(bob, query) == []
    assert answer(ann, query, "left").status_code == answer(bob, query, "right").status_code == 200
    assert [label.labeller for label in labelled_run.log.labels()] == ["ann"] and labelled_run.log.counts()[
        "late"
    ] == 1


def test_three_labellers_share_ninety_pairs_and_one_vanishes(page, labelled_run):
    queries = set(labelled_run.ask(90))
    seen, lock = [], threading.Lock()
    clients = {name: page(name) for name in ("ann", "bob", "eve")}

    def work(name, most):
        done = 0
        while done < most:
            query = lease(clients[name])
            if query is None:
                return
            with lock:
                seen.append(query["id"])
            if done + 1 < most:
                assert answer(clients[name], query, "left").status_code == 200
            done += 1

    def together(**most):
        threads = [threading.Thread(target=work, args=each) for each in most.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together(ann=200, bob=200, eve=5)  # eve leaves with her fifth pair on the screen
    assert len(seen) == len(set(seen)) == 90 and len(labelled_run.log.labels()) == 89
    labelled_run.ahead += 61
    together(ann=200, bob=200)
    labels = labelled_run.log.labels()
    assert len(seen) == 91 and {label.query for label in labels} == queries and len(labels) == 90


def test_nobody_takes_all_pairs(page, labelled_run):
    labelled_run.ask(10)
    ann = page("ann")
    mine = [lease(ann) for _ in range(8)]
    ninth = ann.post("/v1/lease", json={})
    assert ninth.status_code == 429 and "8 pairs" in ninth.json()["error"]["message"]
    answer(ann, mine[0], "left")
    ann.post("/v1/release", json={"queries": [mine[1]["id"]]})
    assert lease(ann) and lease(ann) and ann.post("/v1/lease", json={}).status_code == 429


# What goes wrong


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"query": "x", "choice": "both"}, 400),
        ({"query": "x"}, 400),
        ({"query": "x", "choice": "left", "strength": 3}, 400),
        ({"query": "x", "choice": "left", "flag": "un\0known"}, 400),
        ({"query": "x", "choice": "left", "reasons": "short"}, 400),
        ({"query": "x", "choice": "left", "reasons": ["x" * 41]}, 400),
        ({"query": "x", "choice": "left", "reasons": ["x"] * 13}, 400),
        ({"query": "x", "choice": "left", "flag": "x" * 501}, 400),
        ({"query": "", "choice": "left"}, 400),
        ({"query": "x" * 201, "choice": "left"}, 400),
        ({"query": 3, "choice": "left"}, 400),
        ({"query": "x", "choice": "left", "labeller": "bob"}, 400),
        ({"query": "unknown", "choice": "left"}, 404),
        ({"query": "un\0known", "choice": "left"}, 404),
        ([], 400),
        ("left", 400),
        (None, 400),
    ],
)
def test_answers_that_are_none(page, labelled_run, body, status):
    response = page("ann").post("/v1/answers", json=body)
    assert response.status_code == status and response.json()["error"]["message"], response.text
    assert labelled_run.log.state() == (0, 0, 0)


def test_requests_that_are_none(page, labelled_run):
    ann = page("ann")
    send = lambda content, **headers: ann.post("/v1/answers", content=content, headers=headers)  # noqa: E731
    assert send(b"{", **{"Content-Type": "application/json"}).status_code == 400
    assert send(b"\xff\xfe", **{"Content-Type": "application/json"}).status_code == 400
    assert send(b'{"query": "x", "choice": "left"}', **{"Content-Type": "text/plain"}).status_code == 400, (
        "no form of another page gets through"
    )
    assert send(b" " * 70_000, **{"Content-Type": "application/json"}).status_code == 413
    assert send((b" " * 1000 for _ in range(70)), **{"Content-Type": "application/json"}).status_code == 413
    assert ann.post("/v1/renew", json={"queries": ["x"] * 9}).status_code == 400
    assert ann.post("/v1/renew", json={"queries": ["unknown"]}).json() == {"held": [], "answered": []}
    assert ann.get("/v1/lease").status_code == 405 and ann.get("/nothing").status_code == 404
    watcher = page(token=labelled_run.log.keys.add("kim", scopes=["operator"]))
    assert watcher.get("/v1/metrics", params={"cursor": "x" * 50}).status_code == 400


def test_a_segment_that_is_gone_costs_one_pair_only(page, labelled_run):
    labelled_run.ask(1, priority=1.0)
    ((first, _),) = labelled_run.log.pairs()
    (good,) = labelled_run.ask(1)
    next((labelled_run.folder / "clips" / first[:2]).glob(f"{first}.*")).unlink()
    ann = page("ann")
    response = ann.post("/v1/lease", json={})
    assert response.status_code == 500 and first in response.json()["error"]["message"]
    assert lease(ann)["id"] == good


def test_a_server_says_where_it_is_and_what_is_wrong(labelled_run):
    role = PageServer(create_page(labelled_run.log, labelled_run.segments, labeller="me"))
    try:
        assert httpx.get(f"{role.url}/health").status_code == 200 and role.step() == {"url": role.url}
        with pytest.raises(UserError, match="free port"):
            PageServer(None, port=int(role.url.rsplit(":", 1)[1]))
        with pytest.raises(UserError, match="address of this machine"):
            PageServer(None, host="203.0.113.1")
    finally:
        role.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(role.url)
    with pytest.raises(UserError, match="ended by itself"):
        role.step()
