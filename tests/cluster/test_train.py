"""What is around Ray's trainer; training itself is tested through pipelines/train.py."""

from __future__ import annotations

import signal
import sys

import pytest

from rl_dialog.cluster import train


@pytest.mark.parametrize("error", [None, OSError("no room")])
def test_ctrl_c_is_pythons_again_after_training(error, monkeypatch, tmp_path):
    """Ray Train puts a handler of its own in its place and leaves it there."""

    class Trainer:
        def __init__(self, *_, **__):
            pass

        def fit(self):
            signal.signal(signal.SIGINT, lambda *_: None)
            if error:
                raise error

    monkeypatch.setattr(train, "TorchTrainer", Trainer)
    before = signal.getsignal(signal.SIGINT)
    try:
        train.fit(print, None, train.WorkerGroup(), tmp_path)
    except OSError as raised:
        assert raised is error
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("status", [0, 1])
def test_ctrl_c_in_training_is_an_interrupt(status, monkeypatch, tmp_path):
    """Ray Train's handler aborts the run and exits, without a word and with a status that says nothing."""

    class Trainer:
        def __init__(self, *_, **__):
            pass

        def fit(self):
            signal.signal(signal.SIGINT, lambda *_: sys.exit(status))
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train, "TorchTrainer", Trainer)
    with pytest.raises(KeyboardInterrupt):
        train.fit(print, None, train.WorkerGroup(), tmp_path)


def test_workers_that_wait_for_one_another_in_vain_fail_within_the_hour(monkeypatch, tmp_path):
    """For what the first one does alone they wait otherwise (tests/training/test_worker_group.py)."""
    made = {}

    class Trainer:
        def __init__(self, *_, **options):
            made.update(options)

        def fit(self):
            pass

    monkeypatch.setattr(train, "TorchTrainer", Trainer)
    train.fit(print, None, train.WorkerGroup(2), tmp_path)
    assert 600 <= made["torch_config"].timeout_s <= 3600
