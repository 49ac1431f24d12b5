"""A served model: tiny checkpoints on disk, the real application, and a real server on a free port."""

import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
import uvicorn

from rl_dialog.data.store import Store
from rl_dialog.serving.api import create_app
from rl_dialog.serving.served import Models
from rl_dialog.serving.settings import ServeSettings


@contextmanager
def serving(settings, **options):
    """(base URL, Models, Store) of a server that runs in this process until the block ends."""
    models, store = Models(settings), Store(settings.store)
    app = create_app(models, store, **options)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.02)
        yield url, models, store
    finally:
        server.should_exit = True
        thread.join(20)
        store.close()
        assert not thread.is_alive()


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
