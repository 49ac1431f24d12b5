"""Models on Ray Serve at a free port of this machine, which other models may replace, while a block lasts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from rl_dialog.cluster import serve
from rl_dialog.data.store import Store
from rl_dialog.models.checkpoint import resolve

Places = Mapping[str, Path]  # model -> its run or checkpoint


@contextmanager
def served_here(store: str, models: Places, user: str) -> Iterator[tuple[str, str, Callable[[Places], None]]]:
    """The address, a new key of this user, and the function that gives the running server other models, which
    new chats are drawn from alike."""
    with closing(Store(store)) as chats:
        key = chats.keys.add(user, requests_per_minute=1_000_000)
    with socket.socket() as held:
        # Nobody else is given the port as long as this socket has it. Serve's proxies listen there all the
        # same: they share ports, too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

        def deploy(models: Places) -> None:
            places = {name: str(Path(resolve(place)).resolve()) for name, place in models.items()}
            args = {"models": places, "split": dict.fromkeys(models, 1.0), "store": store, "threads": 1}
            # No CPU of its own: while training runs nobody talks, and a laptop has two.
            serve.deploy(args | {"replicas": "1", "cpus_per_replica": 0}, host="127.0.0.1", port=port)

        try:
            deploy(models)
            yield f"http://127.0.0.1:{port}", key, deploy
        finally:
            if serve.running():
                serve.stop()
