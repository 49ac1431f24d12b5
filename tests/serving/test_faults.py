"""What may go wrong between the engine's thread, the event loop and whoever watches them."""

import shutil
import threading
from dataclasses import replace

import httpx
import pytest

from rl_dialog.data.tokenize import encode_prompt, train_tokenizer
from rl_dialog.evaluation.generation import Decoding, generate_replies
from rl_dialog.methods import BC
from rl_dialog.serving.batch import Ask
from rl_dialog.serving.engine import Closed
from rl_dialog.serving.served import Models
from tests.serving.conftest import until

TALK = [{"role": "user", "content": "hello there"}]


def test_a_model_replaced_between_prompt_and_engine_reads_a_prompt_of_its_own(
    serve, make_policy, tmp_path, monkeypatch
):
    """The new model's tokens are others: what was made for the old one would be nonsense to it."""
    words = train_tokenizer(["some other words of another corpus"] * 20, vocab_size=300)
    make_policy(BC(), seed=1).save_pretrained(tmp_path / "other")
    words.save_pretrained(tmp_path / "other")
    with serve() as (url, models, store):
        engine = models.served["bc"].engine
        submit = engine.submit

        def too_late(ask, deliver):
            models.update(replace(models.settings, models={"bc": str(tmp_path / "other")}))
            engine.close()
            return submit(ask, deliver)

        monkeypatch.setattr(engine, "submit", too_late)
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={"model": "bc", "messages": TALK, "seed": 2}, timeout=120
        ).json()
        prompt = encode_prompt(TALK, words, max_length=96)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        (reply,) = generate_replies(
            models.served["bc"].engine.policy,
            words,
            [TALK],
            Decoding(max_new_tokens=12, max_prompt_length=96),
            seeds=[2],
        )
        assert answer["choices"][0]["message"]["content"] == reply.text.replace("\0", "\ufffd")
        (dialog,) = store.dialogs()
        assert dialog.meta["checkpoint"] == str(tmp_path / "other")


def test_another_model_in_the_same_folder_is_loaded_when_models_are_set_again(settings, checkpoints):
    settings = replace(settings, models={"bot": checkpoints["bc"]}, drain=0)
    models = Models(settings)
    first = models.served["bot"]
    models.update(replace(settings, split={"bot": 1.0}))
    assert models.served["bot"] is first
    shutil.copytree(checkpoints["ilql"], checkpoints["bc"], dirs_exist_ok=True)
    models.update(settings)
    assert models.served["bot"].method == "ilql"
    shutil.rmtree(checkpoints["bc"])
    models.update(settings)
    assert models.served["bot"].method == "ilql", "it is in memory"
    models.close()


def test_an_engine_that_was_idle_for_long_is_not_late_with_its_first_request(serve):
    with serve() as (url, models, _):
        engine, done = models.served["bc"].engine, []
        with engine._wake:  # the thread cannot begin yet
            engine._beat -= 1000
            engine.submit(Ask([5, 6, 7], Decoding(max_new_tokens=2)), done.append)
            assert engine.healthy() and httpx.get(f"{url}/health").status_code == 200
            engine._beat -= 1000
            assert not engine.healthy(), "but it has to go on"
            assert httpx.get(f"{url}/health").status_code == 503


def test_health_knows_the_store(serve, tmp_path):
    with serve() as (url, _, store):
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "models": "ok", "store": "ok"}
        store.close()
        (tmp_path / "chats.db").rename(tmp_path / "elsewhere.db")
        (tmp_path / "chats.db").mkdir()
        answer = httpx.get(f"{url}/health")
        assert (answer.status_code, answer.json()) == (
            503,
            {"status": "failing", "models": "ok", "store": "failing"},
        )
        (tmp_path / "chats.db").rmdir()
        (tmp_path / "elsewhere.db").rename(tmp_path / "chats.db")
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_request_that_breaks_the_server_is_counted(serve, monkeypatch):
    with serve() as (url, _, store):
        monkeypatch.setattr(store, "start_chat", lambda **_: (_ for _ in ()).throw(RuntimeError("no disk")))
        answer = httpx.post(f"{url}/v1/chats", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            500,
            "internal_error",
        ) and "no disk" not in answer.text
        assert 'serve_responses_total{route="/v1/chats",status="500"} 1.0' in httpx.get(f"{url}/metrics").text


def test_cancelled_requests_give_up_their_places_in_the_queue_while_no_slot_is_free(serve, monkeypatch):
    with serve(slots=1, queue=3) as (_, models, _):
        engine, done = models.served["bc"].engine, threading.Event()
        engine.batch.stops = frozenset()  # the first request goes on to its last token
        read, steps = engine.policy.read, threading.Semaphore(0)

        def when_told(*args, **kwargs):
            """A step is made when the test says so: the slot is not free before its end."""
            assert steps.acquire(timeout=120)
            return read(*args, **kwargs)

        monkeypatch.setattr(engine.policy, "read", when_told)
        ask = Ask([5, 6, 7], Decoding(max_new_tokens=60))
        engine.submit(ask, lambda piece: piece.finish and done.set())
        until(lambda: len(engine.batch), "the first request to begin")
        for _ in range(3):
            tickets = [engine.submit(ask, lambda _: None) for _ in range(3)]
            for ticket in tickets:
                ticket.cancel()
            for _ in range(4):  # each of them may have begun before
                steps.release()
            until(lambda: not engine.depth(), "the cancelled requests to give up their places")
            assert not done.is_set()
        steps.release(100)
        assert done.wait(120) and engine.stats.cancelled == 9


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_thread_nobody_waits_for_it(serve, monkeypatch):
    with serve() as (url, models, _):
        engine, got = models.served["bc"].engine, []

        def end():
            raise SystemExit

        monkeypatch.setattr(engine.batch, "step", end)
        engine.submit(Ask([5, 6, 7], Decoding(max_new_tokens=2)), got.append)
        engine._thread.join(120)
        assert isinstance(got[0], Closed) and not engine.healthy()
        with pytest.raises(Closed):
            engine.submit(Ask([5, 6, 7], Decoding(max_new_tokens=2)), got.append)
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "bc", "messages": TALK})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert httpx.get(f"{url}/health").status_code == 503
