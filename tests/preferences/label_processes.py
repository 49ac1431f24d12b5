"""What the processes of test_label_log_faults.py do: they are forked from a server that has the imports done,
and killed."""

from __future__ import annotations

import time

from rl_dialog.preferences.label_log import LabelLog


def answer_forever(url, labeller, lease, acknowledged):
    """Sends (query, number of the answer) after each answer has returned. Every seventh one is undone and
    given anew."""
    log = LabelLog(url)
    while True:
        query = log.lease(labeller, lease)
        if query is None:
            time.sleep(0.002)
            continue
        label = log.answer(query.id, labeller, "left")
        acknowledged.send((label.query, label.number))
        if label.number % 7 == 0 and (query := log.undo(labeller, lease)):
            label = log.answer(query.id, labeller, "right")
            acknowledged.send((label.query, label.number))


def answer_all(url, labeller, lease, acknowledged, *, ahead=0.0, together=None):
    """Until there is nothing open, leased to others or not. By a clock that is so many seconds ahead; with a
    barrier `together` each answers once before anybody goes on, or a late one would find nothing left."""
    log = LabelLog(url, clock=lambda: time.time() + ahead)
    if together is not None:
        acknowledged.send((log.answer(log.lease(labeller, lease).id, labeller, "left").query, labeller))
        together.wait(240)
    while log.counts()["waiting"] + log.counts()["leased"]:
        query = log.lease(labeller, lease)
        if query is None:
            time.sleep(0.01)
            continue
        time.sleep(0.002)
        acknowledged.send((log.answer(query.id, labeller, "left").query, labeller))
    log.close()


def hold_and_vanish(url, labeller, lease, acknowledged):
    log = LabelLog(url)
    acknowledged.send([query.id for query in log.lease_many(labeller, 5, lease)])
    time.sleep(600)
