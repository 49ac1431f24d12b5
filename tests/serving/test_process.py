"""An engine in a process of its own says what the engine says, refuses what it refuses, and neither side
outlives the other."""

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.serving.batch import Ask
from rl_dialog.serving.engine import Closed, QueueFull, Refused, load_engine
from rl_dialog.serving.process import EngineProcess
from tests.processes import title
from tests.serving.conftest import until

ROOT = Path(__file__).parents[2]
SIZES = {"slots": 2, "kept": 2, "queue": 3, "piece": 24}
LONG = Decoding(max_new_tokens=60, max_prompt_length=60)


@pytest.fixture
def engine(checkpoints):
    found = EngineProcess(checkpoints["ilql"], threads=1, **SIZES)
    yield found
    found.close()
    assert found._process.poll() is not None and not found._thread.is_alive()


@pytest.fixture
def ask(tokenizer):
    def make(text, **settings):
        settings = {"decoding": Decoding(max_new_tokens=12, max_prompt_length=60)} | settings
        return Ask(encode_prompt([{"role": "user", "content": text}], tokenizer, max_length=60), **settings)

    return make


def told(engine, asks):
    """What each request was told, the texts joined: (text, tokens, finish, reused) per choice, or the
    exception."""
    boxes = [queue.Queue() for _ in asks]
    for each, box in zip(asks, boxes, strict=True):
        engine.submit(each, box.put)
    return [whole(box, each.choices) for each, box in zip(asks, boxes, strict=True)]


def whole(box, choices=1):
    pieces, ended = [[] for _ in range(choices)], 0
    while ended < choices:
        what = box.get(timeout=240)
        if isinstance(what, Exception):
            return what
        pieces[what.choice].append(what)
        ended += bool(what.finish)
    return [
        ("".join(p.text for p in of), [t for p in of for t in p.tokens], of[-1].finish, of[-1].reused)
        for of in pieces
    ]


def test_a_model_stays_what_it_was_when_its_files_are_written_over(checkpoints, ask):
    """As `cp` writes over them; a new file under the old name would be another one."""
    engine = load_engine(checkpoints["ilql"], **SIZES)
    [before] = told(engine, [ask("hello there", top_logprobs=0)])
    for path in Path(checkpoints["ilql"]).glob("*.safetensors"):
        with path.open("r+b") as file:
            file.write(b"\x11" * path.stat().st_size)
    [after] = told(engine, [ask("hello there", top_logprobs=0)])
    engine.close()
    assert [t.logprob for t in after[0][1]] == [t.logprob for t in before[0][1]]


@pytest.mark.slow
def test_it_says_what_an_engine_says_and_refuses_what_it_refuses(engine, ask, checkpoints):
    asks = [
        ask("hello there"),
        ask("thank you", seed=4, choices=2, values=True, top_logprobs=2),
        ask("what would you like?", seed=5, stop=("e",)),
    ]
    here = load_engine(checkpoints["ilql"], **SIZES)
    expected = told(here, asks)
    here.close()
    found = told(engine, asks)
    for reply, wanted in zip(found, expected, strict=True):
        for (text, tokens, finish, _), (same_text, same_tokens, same_finish, _) in zip(
            reply, wanted, strict=True
        ):
            assert (text, finish, [t.id for t in tokens]) == (
                same_text,
                same_finish,
                [t.id for t in same_tokens],
            )
            for one, other in zip(tokens, same_tokens, strict=True):
                assert (one.logprob, one.q, one.v) == pytest.approx(
                    (other.logprob, other.q, other.v), abs=1e-4
                )
    assert found[1][0][1][0].q is not None and len(found[1]) == 2
    first, again = (told(engine, [ask("hello there, my word is tangerine", seed=1)])[0][0] for _ in range(2))
    assert first[0] == again[0] and (first[3], again[3]) == (
        0,
        len(ask("hello there, my word is tangerine").prompt) - 1,
    ), "it was kept"

    (refused,) = told(engine, [ask("hi", decoding=Decoding(max_new_tokens=200))])
    assert isinstance(refused, Refused) and "at most 128 tokens" in str(refused)
    answers, tickets = queue.Queue(), []
    while engine.stats.refused == 0 and len(tickets) < 1000:  # on a busy machine many may be answered before
        tickets.append(engine.submit(ask("hello", decoding=LONG, seed=len(tickets)), answers.put))
    full = next(what for what in iter(lambda: answers.get(timeout=240), None) if isinstance(what, QueueFull))
    assert full.retry_after >= 1 and "requests are waiting already" in str(full)
    until(lambda: engine.running() == engine.depth() == 0, "the process to answer all")
    engine._process.send_signal(signal.SIGSTOP)  # so that none of these is answered before it is cancelled
    tickets = [engine.submit(ask("hello", decoding=LONG, seed=n), answers.put) for n in range(3)]
    for ticket in tickets:
        ticket.cancel()
    engine._process.send_signal(signal.SIGCONT)
    until(lambda: engine.stats.cancelled >= 2, "the process to hear that requests are cancelled")
    until(lambda: engine.running() == engine.depth() == 0, "the process to forget them")
    assert engine.stats.refused >= 1 and engine.healthy() and not engine._open

    box = queue.Queue()
    engine.submit(ask("hello", decoding=LONG), box.put)
    engine.close(drain=30)
    assert whole(box)[0][2], "what it had is answered"
    assert not engine.healthy()
    with pytest.raises(Closed):
        engine.submit(ask("hello"), box.put)


@pytest.mark.slow
def test_a_process_that_dies_is_noticed(engine, ask):
    """By the server first: one that ends with it says nothing to those who wait."""
    waited = []
    engine._died = lambda: waited.extend(engine._open)
    engine._process.send_signal(signal.SIGSTOP)  # so that none of these is answered before it dies
    boxes = [queue.Queue() for _ in range(4)]
    for n, box in enumerate(boxes):
        engine.submit(ask("hello", seed=n), box.put)
    engine._process.send_signal(signal.SIGKILL)
    assert all(isinstance(whole(box), Closed) for box in boxes)
    assert not engine.healthy() and len(waited) == 4
    with pytest.raises(Closed):
        engine.submit(ask("hello"), boxes[0].put)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_loaded_is_refused_and_no_process_stays(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=str(tmp_path)):
        EngineProcess(str(tmp_path))
    assert not [child for child in psutil.Process().children() if "serving.process" in title(child)]


@pytest.mark.slow
def test_it_ends_with_its_server(checkpoints):
    script = (
        "from rl_dialog.serving.process import EngineProcess as "
        f"E\nprint(E({checkpoints['bc']!r})._process.pid, flush=True)\ninput()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        engine = psutil.Process(int(server.stdout.readline()))
        server.kill()
        engine.wait(timeout=120)
