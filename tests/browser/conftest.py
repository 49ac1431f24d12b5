"""Chromium, and the real application behind it: real routes, keys and store; what the bot says, and when, is
up to the test."""

import shutil
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

SWITCHES = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def chromium():
    """A browser for the tests of one file: playwright's own, or the one on the PATH."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = next(
            filter(None, map(shutil.which, (own, "chromium", "chromium-browser", "google-chrome"))), None
        )
        if found is None:
            pytest.skip("no Chromium: playwright install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=SWITCHES)
        yield browser
        browser.close()


@dataclass
class Line:
    """One reply of the scripted bot. With `hold`, it waits after so many words until it is cancelled or `go`
    is set."""

    text: str
    hold: int | None = None
    fail: int | None = None  # after so many words, with an error
    go: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)


class Script:
    """Stands for an engine's `submit`: says the lines in their order, then small talk. V is 1, and Q - V of
    the words is 0, -0.25, 0.5, -0.75, ..."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque()
        self.asked: list = []  # every Ask

    def say(self, text, **how):
        self.lines.append(Line(text, **how))
        return self.lines[-1]

    def submit(self, ask, deliver):
        line = self.lines.popleft() if self.lines else Line("That sounds lovely.")
        self.asked.append(ask)
        threading.Thread(target=self._speak, args=(line, deliver), daemon=True).start()
        return SimpleNamespace(reused=0, cancel=line.cancelled.set)

    def _speak(self, line, deliver):
        from rl_dialog.serving.batch import Token
        from rl_dialog.serving.engine import Piece

        words = line.text.split(" ")
        for said, word in enumerate(words):
            if said == line.fail:
                deliver(RuntimeError("a fault that the test wants"))
                return
            if said == line.hold:
                while not (line.go.wait(0.02) or line.cancelled.is_set()):
                    pass
            if line.cancelled.is_set():
                return
            piece = word if said == 0 else f" {word}"
            deliver(Piece(0, piece, (Token(0, piece, logprob=-0.5, q=1 + (-1) ** said * said / 4, v=1.0),)))
            time.sleep(0.005)
        deliver(Piece(0, "", (Token(0, "", logprob=-0.1),), "stop"))


@dataclass
class Served:
    """A running server. `script` is what its bot says."""

    url: str
    models: object
    store: object
    settings: object  # ServeSettings
    script: Script
    engine_submit: object
    stands_at: list = field(default_factory=list)  # when the clock of the keys' rates stands: then

    def set(self, **changed) -> None:
        self.models.settings = replace(self.settings, **changed)

    def key(self, requests_per_minute=600, scopes=("participant",)) -> str:
        given = {"requests_per_minute": requests_per_minute, "scopes": scopes}
        return self.store.keys.add(f"key {time.monotonic_ns()}", **given)

    def latest_key(self) -> str:
        """The name of the one that was made last."""
        return max(self.store.keys.all(), key=lambda key: key.created).name

    def use_the_model(self) -> None:
        """The tiny ilql model speaks for itself."""
        self.models.served["ilql"].engine.submit = self.engine_submit


@pytest.fixture(scope="module")
def server(tokenizer, tmp_path_factory):
    """The application with two tiny models, bc and ilql; new chats get ilql. It needs a key."""
    import torch
    import uvicorn

    from rl_dialog.data.store import Store
    from rl_dialog.methods import BC, ILQL
    from rl_dialog.models.language_model import ModelConfig, load_lm
    from rl_dialog.models.policy import Policy
    from rl_dialog.serving.api import create_app
    from rl_dialog.serving.limits import RateLimit
    from rl_dialog.serving.served import Models
    from rl_dialog.serving.settings import ServeSettings

    root, folders = tmp_path_factory.mktemp("served"), {}
    for name, method in (("bc", BC()), ("ilql", ILQL())):
        torch.manual_seed(0)
        config = ModelConfig(layers=1, attention_heads=2, width=16, context=512)
        policy = Policy(load_lm(config, tokenizer), method, config)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        folders[name] = str(root / name)
        policy.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    settings = ServeSettings(
        models=folders,
        split={"ilql": 1},
        store=f"sqlite:///{root}/chats.db",
        title="Everyday chat",
        consent="Chats are kept.\n\nYou may stop at any time.",
        min_messages=2,
        max_tokens=24,
        max_prompt_length=256,
        threads=1,
        drain=1,
    )
    models, store, stands_at = Models(settings), Store(settings.store), []
    rates = RateLimit(lambda: stands_at[0] if stands_at else time.monotonic())

    async def take(key, per_minute):
        return rates.take(key, per_minute)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = uvicorn.Server(
            uvicorn.Config(
                create_app(models, store, take=take),
                log_config=None,
                log_level="warning",
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 120
        while not running.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start within 120 s"
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield Served(url, models, store, settings, Script(), models.served["ilql"].engine.submit, stands_at)
        running.should_exit = True
        thread.join(120)
    store.close()


@pytest.fixture
def served(server):
    """The server with its first settings and an empty script."""
    server.set()
    server.stands_at.clear()
    server.script = Script()
    for model in server.models.served.values():
        model.engine.submit = server.script.submit
    return server


@pytest.fixture
def open_page(chromium):
    """open_page(address, width, height): a page of a new browser profile; `watch` is called with every
    request and its whole response. What it complains about or asks of other hosts fails the test."""
    contexts, wrong = [], []

    def start(address, *, width=1000, height=800, clock=False, watch=None, **options):
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
        page.on(
            "console",
            lambda said: (
                wrong.append(said.text)
                if said.type == "error" and "Failed to load resource" not in said.text
                else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                wrong.append(request.url) if not request.url.startswith(address.split("/#")[0]) else None
            ),
        )
        if clock:
            page.clock.install()
        if watch:  # not by the page's own events: a browser soon forgets what came in a stream
            fetching = []

            def fetch(route):
                # The page asks how things stand every second. Where an answer takes longer, playwright calls
                # this again inside of itself, deeper and deeper; such a question goes its way unwatched.
                if fetching and route.request.url.endswith("/v1/status"):
                    route.continue_()
                    return
                fetching.append(route)
                response = route.fetch()
                fetching.remove(route)
                watch(route.request, response)
                route.fulfill(response=response)

            page.route("**/*", fetch)
        page.goto(address)
        return page

    yield start
    for context in contexts:
        context.close()
    assert not wrong
