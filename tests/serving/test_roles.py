"""Who may do what: every route with every kind of key, on the server of chats and on the page for labels."""

import re

import httpx

from rl_dialog.data.keys import SCOPES
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.page.app import create_page
from rl_dialog.preferences.page.server import PageServer
from rl_dialog.preferences.segments import Segments
from rl_dialog.serving.api import create_app

EVERYBODY = (None, *SCOPES)  # None: without a key
TALKERS = ("chat", "participant")
WATCHERS = ("operator", "metrics")
CHATS = {
    ("GET", "/v1/models"): TALKERS,
    ("GET", "/v1/models/{name:path}"): TALKERS,
    ("POST", "/v1/chat/completions"): TALKERS,
    ("POST", "/load_model"): EVERYBODY,
    ("POST", "/v1/chats"): TALKERS,
    ("GET", "/v1/chats/{chat}"): TALKERS,
    ("POST", "/v1/chats/{chat}/ratings"): TALKERS,
    ("POST", "/v1/feedback"): TALKERS,
    ("DELETE", "/v1/users/{user:path}"): ("participant", "operator"),
    ("GET", "/page.json"): EVERYBODY,
    ("GET", "/"): EVERYBODY,
    ("GET", "/health"): EVERYBODY,
    ("GET", "/metrics"): WATCHERS,
    ("GET", "/openapi.json"): EVERYBODY,
    ("GET", "/page"): EVERYBODY,
}
LABELS = {
    **{("POST", f"/v1/{name}"): ("labeller",) for name in ("lease", "renew", "release", "answers", "undo")},
    ("GET", "/v1/segments/{id}.png"): ("labeller",),
    ("GET", "/v1/status"): ("labeller",),
    ("GET", "/v1/guideline"): ("labeller",),
    ("GET", "/v1/labellers"): ("labeller", "operator"),
    ("GET", "/v1/run"): WATCHERS,
    ("GET", "/v1/metrics"): WATCHERS,
    ("GET", "/health"): EVERYBODY,
    ("GET", "/page.json"): EVERYBODY,
    ("GET", "/"): EVERYBODY,
    ("GET", "/run"): EVERYBODY,
    ("GET", "/page"): EVERYBODY,
}
BODY = {"model": "assigned", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def routes(routed):
    """(method, path) of everything that an application answers; a mounted folder as a GET."""
    found = set()
    for route in routed:
        if hasattr(route, "original_router"):  # as FastAPI keeps the routers that it includes
            found |= routes(route.original_router.routes)
            continue
        methods = getattr(route, "methods", None) or {"GET"}
        found |= {(method, route.path) for method in methods - {"HEAD"}}
    return found


def matrix(http, app, table, keys, bodies):
    """What the routes say to each kind of key, compared with the table."""
    assert routes(app.routes) == set(table), "a route without an entry, or an entry without a route"
    wrong = []
    for (method, path), may in table.items():
        filled = re.sub("{[^}]*}", "0" * 64, path) + ("/icon.svg" if path == "/page" else "")
        for scope in EVERYBODY:
            headers = {"Authorization": f"Bearer {keys[scope]}"} if scope else {}
            body = bodies.get(path, {}) if method == "POST" else None
            answer = http.request(method, filled, headers=headers, json=body)
            expected = "in" if scope in may else "401" if scope is None else "403"
            got = str(answer.status_code) if answer.status_code in (401, 403) else "in"
            if got != expected or answer.status_code >= 500:
                wrong.append((method, path, scope, answer.status_code, answer.text[:200]))
    assert not wrong


def test_the_server_of_chats(serve):
    with serve(needs_key=True) as (url, models, store), httpx.Client(base_url=url, timeout=240) as http:
        keys = {scope: store.keys.add(scope, scopes=[scope]) for scope in SCOPES}
        matrix(http, create_app(models, store), CHATS, keys, {"/v1/chat/completions": BODY})


def test_the_page_for_labels(tmp_path):
    log = LabelLog(f"sqlite:///{tmp_path}/labels.db")
    app = create_page(log, Segments(tmp_path), run=tmp_path)
    with PageServer(app) as server, httpx.Client(base_url=server.url, timeout=240) as http:
        keys = {scope: log.keys.add(scope, scopes=[scope]) for scope in SCOPES}
        bodies = {"/v1/renew": {"queries": []}, "/v1/release": {"queries": []}}
        bodies["/v1/answers"] = {"query": "x", "choice": "left"}
        matrix(http, app, LABELS, keys, bodies)
        log.add_labeller("ann")
        for scope, seen in (("labeller", set()), ("operator", {"ann"})):
            told = http.get("/v1/labellers", headers={"Authorization": f"Bearer {keys[scope]}"}).json()
            assert set(told["labellers"]) == seen, "a labeller sees nobody else"
    log.close()


def test_nobody_continues_reads_rates_or_deletes_anothers_chat(serve):
    """Ann's chat with everybody else's keys, and with her own key in another user's name."""
    with serve(needs_key=True) as (url, _, store), httpx.Client(base_url=url, timeout=240) as http:
        keys = {name: store.keys.add(name, scopes=["participant"]) for name in ("ann", "bob")}
        keys |= {name: store.keys.add(name) for name in ("app", "web")}
        headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        for owner, others in (("ann", ("bob", "app")), ("app", ("ann", "web"))):
            chat = http.post("/v1/chats", json={"user": "u"}, headers=headers[owner]).json()["id"]
            body = BODY | {"chat_id": chat, "user": "u"}
            said = http.post("/v1/chat/completions", json=body, headers=headers[owner]).json()["id"]
            tries = [
                ("GET", f"/v1/chats/{chat}", None),
                ("POST", f"/v1/chats/{chat}/ratings", {"quality": 1}),
                ("POST", "/v1/feedback", {"completion_id": said, "vote": -1}),
                ("POST", "/v1/chat/completions", body),
                ("POST", "/v1/chat/completions", BODY | {"completion_id": said}),
            ]
            for other in others:
                for method, path, content in tries:
                    answer = http.request(method, path, json=content, headers=headers[other])
                    assert answer.status_code == 404, (other, method, path, answer.text)
            wrong = http.post("/v1/chat/completions", json=body | {"user": "v"}, headers=headers[owner])
            assert wrong.status_code == 404 and "and this user" in wrong.text
        assert http.delete("/v1/users/u", headers=headers["bob"]).json() == {"deleted": 0}
        assert http.delete("/v1/users/u", headers=headers["app"]).status_code == 403
        assert store.counts() == {"chats": 2, "turns": 2, "votes": 0, "ratings": 0}
        assert http.delete("/v1/users/any", headers=headers["ann"]).json() == {"deleted": 1}, (
            "all that is hers"
        )
        boss = {"Authorization": f"Bearer {store.keys.add('boss', scopes=['operator'])}"}
        assert http.delete("/v1/users/u?key=web", headers=boss).json() == {"deleted": 0}
        assert http.delete("/v1/users/u?key=app", headers=boss).json() == {"deleted": 1}


def test_a_participant_learns_of_no_model(serve):
    with serve(needs_key=True) as (url, _, store):
        key = store.keys.add("ann", scopes=["participant"])
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=240) as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["assigned"]
            for name in ("bc", "ilql", "none"):
                answers = [
                    http.get(f"/v1/models/{name}"),
                    http.post("/v1/chats", json={"model": name}),
                    http.post("/v1/chat/completions", json=BODY | {"model": name}),
                ]
                for answer in answers:
                    message = answer.json()["error"]["message"].replace(f"{name!r}", "")
                    assert answer.status_code == 404 and "bc" not in message and "ilql" not in message


def test_what_a_refusal_says(serve):
    with serve(needs_key=True) as (url, _, store):
        key = store.keys.add("m", scopes=["metrics"])
        answer = httpx.post(f"{url}/v1/chats", json={}, headers={"Authorization": f"Bearer {key}"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "missing_scope")
        assert (
            error["message"] == "expected an API key of scope chat or participant, got one of scope metrics"
        )
