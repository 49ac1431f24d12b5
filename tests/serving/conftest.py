"""A served model: tiny checkpoints on disk, the real application, and a real server on a free port."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import uvicorn

from rl_dialog.data.store import Store
from rl_dialog.serving.api import create_app
from rl_dialog.serving.served import Models
from rl_dialog.serving.settings import ServeSettings
from rl_dialog.web_server import listening


@contextmanager
def serving(settings, **options):
    """(base URL, Models, Store) of a server that runs in this process until the block ends."""
    models, store = Models(settings), Store(settings.store)
    app = create_app(models, store, **options)
    place = listening("127.0.0.1", 0)
    how = {"log_config": None, "log_level": "warning", "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(app, **how))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the server to start")
        assert server.started, "the server ended before it began"
        yield f"http://127.0.0.1:{place.getsockname()[1]}", models, store
    finally:
        server.should_exit = True
        thread.join(120)
        store.close()
        place.close()
        assert not thread.is_alive()


def until(condition, what, seconds=120.0):
    """Waits for what comes in milliseconds on an idle machine."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.01)
    return found


def small(checkpoints, folder):
    return ServeSettings(
        models=checkpoints,
        store=f"sqlite:///{folder}/chats.db",
        needs_key=False,
        max_tokens=12,
        max_prompt_length=96,
        threads=1,
        drain=5,
    )


@pytest.fixture
def settings(checkpoints, tmp_path):
    return small(checkpoints, tmp_path)


@pytest.fixture(scope="module")
def one_server(shared_checkpoints, tmp_path_factory):
    """`serving` with the two checkpoints, one for all tests of a file that leave nothing behind in it."""
    with serving(small(shared_checkpoints, tmp_path_factory.mktemp("server"))) as found:
        yield found


@pytest.fixture
def serve(settings):
    """serve(**changed settings): `serving` with the two checkpoints."""

    def start(options=None, **changed):
        return serving(replace(settings, **changed), **(options or {}))

    return start
