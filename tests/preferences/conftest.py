"""A run's folder with clips and replies to compare, and the real page on a real server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from rl_dialog.preferences.frames import draw_pixels
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.segments import Clip, Reply, Segments


@dataclass
class Run:
    """A folder with a label log and segments."""

    folder: Path
    log: LabelLog
    segments: Segments
    ahead: float = 0.0  # seconds that have passed at a stroke, for leases

    def clip(self, mark, *, length=8, steps=None, height=12, width=10):
        """The id of a clip: frame t of it is grey mark + t, but for a white pixel that walks along the
        top."""
        frames = np.stack([np.full((height, width, 3), mark + t, np.uint8) for t in range(length)])
        for t in range(length):
            frames[t, 0, t % width] = 255
        return self.segments.add(
            Clip(frames, np.zeros(length, np.int64), np.zeros(length, np.float32), steps or length)
        )

    def ask(self, number=1, **given):
        """The ids of queries about pairs of clips."""
        begin = len(self.log.pairs())
        first = range(begin, begin + number)
        return [
            self.log.add_query(
                self.clip(n % 200, length=4 + n // 200), self.clip(n % 200, length=24 + n // 200), **given
            )
            for n in first
        ]

    def ask_about_replies(self, left="Yes, gladly.", right="No.", **given):
        context = [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": "Would you help me?"},
        ]
        pair = [self.segments.add(Reply(context, text)) for text in (left, right)]
        return self.log.add_query(*pair, **given)


@pytest.fixture
def labelled_run(tmp_path):
    clock = lambda: time.time() + run.ahead  # noqa: E731
    log = LabelLog(f"sqlite:///{tmp_path}/labels.db", validation=0.0, clock=clock)
    run = Run(tmp_path, log, Segments(tmp_path / "clips"))
    yield run
    log.close()


@pytest.fixture
def page(labelled_run):
    """page(who, token=..., **options of create_page): a client of the page, whose server runs until the test
    ends. One server per options."""
    from rl_dialog.preferences.page.app import create_page
    from rl_dialog.preferences.page.server import PageServer

    servers, clients, tokens = {}, [], {}

    def start(who=None, *, token=None, **options):
        key = repr(sorted(options.items()))
        if key not in servers:
            given = {"draw": draw_pixels, "run": labelled_run.folder} | options
            servers[key] = PageServer(create_page(labelled_run.log, labelled_run.segments, **given))
        if who and not token:
            token = tokens[who] = tokens.get(who) or labelled_run.log.add_labeller(who)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        clients.append(httpx.Client(base_url=servers[key].url, headers=headers, timeout=120))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    for server in servers.values():
        server.close()
