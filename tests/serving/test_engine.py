"""What the batched engine says is what evaluation/generation.py says, whoever else is in the batch; nobody
waits for ever, nothing stays behind."""

import queue
import threading
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, generate_replies, stream
from rl_dialog.evaluation.scoring import token_table
from rl_dialog.methods import BC, BCQ, CHAI, CQL, DBCQ, ILQL, MCReturns, UtteranceILQL, WayOffPolicy
from rl_dialog.models.policy import Policy
from rl_dialog.serving.batch import Ask, Row, _leaning
from rl_dialog.serving.engine import Closed, Engine, QueueFull

TALKS = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "user", "content": "what would you like to eat today?"},
        {"role": "assistant", "content": "tea"},
        {"role": "user", "content": "oh"},
    ],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "thank you, that is all"}],
    [{"role": "user", "content": "?"}],
    [{"role": "user", "content": "hello there, how are you? " * 3}],
]
DECODING = Decoding(max_new_tokens=12, max_prompt_length=96)


def texts(*args, **settings):
    """What is said alone. A server says no NUL, which no database can hold."""
    return [reply.text.replace("\0", "\ufffd") for reply in generate_replies(*args, **settings)]


class Client:
    """Collects what one request is sent."""

    def __init__(self):
        self.events = queue.Queue()
        self.pieces = []

    def __call__(self, what):
        self.events.put(what)

    def replies(self, choices=1, timeout=240.0):
        """The whole text of each choice; raises what ended the request."""
        texts, ended = [""] * choices, 0
        while ended < choices:
            piece = self.events.get(timeout=timeout)
            if isinstance(piece, Exception):
                raise piece
            self.pieces.append(piece)
            texts[piece.choice] += piece.text
            ended += bool(piece.finish)
        return texts


@pytest.fixture
def engine_of(tokenizer):
    engines = []

    def make(policy, **settings):
        engines.append(Engine(policy, tokenizer, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert not engine._thread.is_alive()


@pytest.fixture
def ask_of(tokenizer):
    def make(talk, seed=0, decoding=DECODING, **settings):
        return Ask(encode_prompt(talk, tokenizer, max_length=96), decoding, seed, **settings)

    return make


METHODS = [
    BC(),
    ILQL(),
    ILQL(top_k=5, advantage_clip=0.0),
    CQL(),
    MCReturns(),
    WayOffPolicy(),
    WayOffPolicy(backup="psi"),
    BCQ(),
    DBCQ(),
    UtteranceILQL(),
]


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "method",
    METHODS,
    ids=lambda method: type(method).__name__ + ("_top_k" if getattr(method, "top_k", 0) else ""),
)
def test_every_method_says_what_it_says_alone(make_policy, tokenizer, engine_of, ask_of, method, sample):
    """Requests that join at different times, more of them than slots, with prompts read in pieces."""
    policy = make_policy(method)
    decoding = replace(DECODING, do_sample=sample)
    seeds = [stream(3, i) for i in range(3 * len(TALKS))]
    expected = texts(policy, tokenizer, TALKS * 3, decoding, seeds=seeds)
    engine = engine_of(policy, slots=4, kept=2, piece=24)
    clients = []
    for talk, seed in zip(TALKS * 3, seeds, strict=True):
        clients.append(Client())
        engine.submit(ask_of(talk, seed, decoding), clients[-1])
        time.sleep(0.003)
    assert [client.replies()[0] for client in clients] == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("method", [UtteranceILQL(), CHAI()], ids=lambda method: type(method).__name__)
def test_the_critic_decides_what_is_said(make_policy, engine_of, ask_of, method):
    """With the signs of all values turned, others of the same replies are said."""
    policy, said = make_policy(method), []
    for _ in range(2):
        clients, engine = [Client() for _ in TALKS], engine_of(policy)
        for talk, client in zip(TALKS, clients, strict=True):
            engine.submit(ask_of(talk), client)
        said.append([client.replies()[0] for client in clients])
        with torch.no_grad():
            for head in policy.heads.utterance_q_target:
                head.out.weight.neg_()
                head.out.bias.neg_()
    assert said[0] != said[1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "trunk, target", [("shared", "shared"), ("separate", "shared"), ("separate", "separate")]
)
@pytest.mark.parametrize("heads", ["mlp", "lowrank"])
def test_every_shape_of_model(make_policy, tokenizer, engine_of, ask_of, family, trunk, target, heads):
    policy = make_policy(ILQL(), family, trunk=trunk, target=target, heads=heads)
    seeds = [stream(5, i) for i in range(len(TALKS))]
    expected = texts(policy, tokenizer, TALKS, DECODING, seeds=seeds)
    engine = engine_of(policy, slots=3, kept=1, piece=16)
    clients = [Client() for _ in TALKS]
    for talk, seed, client in zip(TALKS, seeds, clients, strict=True):
        engine.submit(ask_of(talk, seed), client)
    assert [client.replies()[0] for client in clients] == expected


def test_requests_of_every_kind_share_a_batch(make_policy, tokenizer, engine_of, ask_of):
    """Temperature, top-p, top-k, greedy, another beta and the plain LM side by side: each as if it were
    alone."""
    policy = make_policy(ILQL(beta=4.0))
    kinds = [
        ({}, {}),
        ({"temperature": 0.3}, {}),
        ({"top_p": 0.5, "top_k": 7}, {}),
        ({"do_sample": False}, {}),
        ({}, {"beta": 0.5}),
        ({}, {"decoder": "lm"}),
        ({"num_generations": 3}, {}),
    ]
    expected = []
    for decoding, settings in kinds:
        method = replace(
            policy.method, beta=settings.get("beta", 0.0 if settings.get("decoder") == "lm" else 4.0)
        )
        alone = Policy(policy.lm, method, policy.model_config)
        alone.heads = policy.heads
        expected += texts(alone.eval(), tokenizer, TALKS[:1], replace(DECODING, **decoding), seeds=[9])
    engine = engine_of(policy, slots=16)
    clients = [Client() for _ in kinds]
    for (decoding, settings), client in zip(kinds, clients, strict=True):
        engine.submit(ask_of(TALKS[0], 9, replace(DECODING, **decoding), **settings), client)
    assert [client.replies()[0] for client in clients] == expected
    assert len(set(expected)) >= 5


def test_the_next_turn_of_a_chat_begins_where_the_last_ended(make_policy, tokenizer, engine_of, ask_of):
    policy = make_policy(ILQL())
    engine = engine_of(policy, slots=2, kept=4)
    talk = [{"role": "system", "content": "be kind to us all"}, {"role": "user", "content": "hello there"}]
    short, before = replace(DECODING, max_new_tokens=3), 0
    for turn in range(3):
        (expected,) = generate_replies(policy, tokenizer, [talk], short, seeds=[turn])
        client = Client()
        ticket = engine.submit(ask_of(talk, turn, short), client)
        assert client.replies() == [expected.text]
        if turn:
            assert ticket.reused >= before - 1, "the last prompt is still in its slot"
        before = len(ticket.ask.prompt)
        talk = [*talk, {"role": "assistant", "content": expected.text}, {"role": "user", "content": "you?"}]
        other = Client()  # somebody else in between, in the same slots
        engine.submit(ask_of(TALKS[1], 1), other)
        other.replies()
    (expected,) = generate_replies(policy, tokenizer, [talk], short, seeds=[7])
    clients = [Client() for _ in range(4)]
    tickets = [
        engine.submit(ask_of(talk, 7, short), client) for client in clients
    ]  # four of one kind: three copy what the first has
    assert [client.replies()[0] for client in clients] == [expected.text] * 4
    assert min(ticket.reused for ticket in tickets) >= before - 1


def test_choices_draw_from_streams_of_one_seed_and_read_the_prompt_once(
    make_policy, tokenizer, engine_of, ask_of
):
    policy = make_policy(BC())
    engine = engine_of(policy, slots=4)
    client = Client()
    engine.submit(ask_of(TALKS[4], 11, choices=6), client)
    seeds = [11, *(stream(11, 1, choice) for choice in range(1, 6))]
    expected = texts(policy, tokenizer, [TALKS[4]] * 6, DECODING, seeds=seeds)
    assert client.replies(choices=6) == expected
    assert engine.stats.prompt_tokens == len(encode_prompt(TALKS[4], tokenizer, max_length=96))


def test_values_and_log_probabilities_are_those_of_the_table(make_policy, tokenizer, engine_of, ask_of):
    policy = make_policy(ILQL(top_k=20))  # decodes without V
    engine = engine_of(policy)
    client, other = Client(), Client()
    ask = ask_of(TALKS[1], 2, values=True, top_logprobs=3)
    engine.submit(ask_of(TALKS[0], 1), other)
    engine.submit(ask, client)
    (text,) = client.replies()
    tokens = [token for piece in client.pieces for token in piece.tokens]
    table = token_table(policy, None, list(ask.prompt), [token.id for token in tokens])
    assert tokens
    for token, row in zip(tokens, table, strict=True):
        assert token.q == pytest.approx(row["q"], abs=1e-4)
        assert token.v == pytest.approx(row["v"], abs=1e-4)
        assert token.logprob == pytest.approx(row["policy"], abs=1e-4)
        assert len(token.top) == 3 and token.top[0][1] >= token.top[1][1] >= token.top[2][1]
    assert "".join(token.text for token in tokens).strip() == text
    other.replies()
    assert all(token.q is None and token.logprob is None for piece in other.pieces for token in piece.tokens)


def test_a_stop_text_ends_the_reply_before_it_and_no_part_of_it_is_shown(
    make_policy, tokenizer, engine_of, ask_of
):
    policy = make_policy(BC())
    long = replace(DECODING, max_new_tokens=30)
    seed = next(
        s
        for s in range(99)
        if len(generate_replies(policy, tokenizer, TALKS[:1], long, seeds=[s])[0].text) > 20
    )
    (whole,) = generate_replies(policy, tokenizer, TALKS[:1], long, seeds=[seed])
    middle = len(whole.text) // 2
    word = whole.text[middle : middle + 3]
    client = Client()
    engine_of(policy).submit(ask_of(TALKS[0], seed, long, stop=(word, "never said")), client)
    (text,) = client.replies()
    assert text == whole.text[: whole.text.index(word)].strip()
    assert client.pieces[-1].finish == "stop"


def in_order():
    """(names of the requests that ended, a semaphore released at each end, listen(name): what to submit with
    a request)."""
    order, done = [], threading.Semaphore(0)

    def listen(name):
        def deliver(piece):
            if piece.finish:
                order.append(name)
                done.release()

        return deliver

    return order, done, listen


def held(engine):
    """What is set once the engine may begin: what is asked before is there all at once."""
    go, read = threading.Event(), engine.policy.read

    def when_all_are_there(*args, **kwargs):
        assert go.wait(240)
        return read(*args, **kwargs)

    engine.policy.read = when_all_are_there
    return go


def test_the_user_with_the_fewest_replies_under_way_is_next(make_policy, engine_of, ask_of):
    engine = engine_of(make_policy(BC()), slots=1, queue=99)
    order, done, listen = in_order()
    for n in range(5):
        engine.submit(ask_of(TALKS[4], n, user="greedy"), listen(f"greedy {n}"))
    engine.submit(ask_of(TALKS[0], 0, user="modest"), listen("modest 0"))
    engine.submit(ask_of(TALKS[0], 1, user="modest"), listen("modest 1"))
    for _ in range(7):
        assert done.acquire(timeout=240)
    assert [name for name in order if name.startswith("greedy")] == [f"greedy {n}" for n in range(5)], (
        "in turn within a user"
    )

    wide = engine_of(make_policy(BC()), slots=2, queue=99)
    go = held(wide)
    order.clear()
    for n in range(6):
        wide.submit(
            ask_of(TALKS[4], n, replace(DECODING, max_new_tokens=25), user="greedy"), listen(f"greedy {n}")
        )
    wide.submit(ask_of(TALKS[0], 0, user="modest"), listen("modest 0"))
    go.set()
    for _ in range(7):
        assert done.acquire(timeout=240)
    assert order.index("modest 0") <= 3, "not behind all that the other user had asked for before"


def test_a_full_queue_says_when_to_come_back(make_policy, engine_of, ask_of):
    engine = engine_of(make_policy(BC()), slots=1, queue=2)
    go = held(engine)
    clients, refused = [], []
    for n in range(12):
        clients.append(Client())
        try:
            engine.submit(ask_of(TALKS[4], n, replace(DECODING, max_new_tokens=30)), clients[-1])
        except QueueFull as error:
            refused.append(error)
            clients.pop()
    go.set()
    assert refused and all(error.retry_after >= 1 for error in refused)
    assert all(client.replies() for client in clients)
    assert engine.stats.refused == len(refused)
    assert engine.stats.requests == len(clients)


def test_cancelled_requests_leave_at_once_and_disturb_nobody(make_policy, tokenizer, engine_of, ask_of):
    policy = make_policy(ILQL())
    engine = engine_of(policy, slots=4, kept=0)
    long = replace(DECODING, max_new_tokens=60)
    seeds = [stream(1, i) for i in range(12)]
    expected = texts(policy, tokenizer, [TALKS[i % 5] for i in range(12)], long, seeds=seeds)
    clients = [Client() for _ in seeds]
    tickets = [engine.submit(ask_of(TALKS[i % 5], seed, long), clients[i]) for i, seed in enumerate(seeds)]
    for ticket in tickets[::2]:
        time.sleep(0.002)
        ticket.cancel()
    for i in range(1, 12, 2):
        assert clients[i].replies() == [expected[i]]
    deadline = time.monotonic() + 240
    while (len(engine.batch) or engine.depth()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (len(engine.batch), engine.depth(), engine.tickets) == (0, 0, {})


def test_an_error_in_a_step_ends_only_what_was_in_the_batch(make_policy, tokenizer, engine_of, ask_of):
    policy = make_policy(BC())
    engine = engine_of(policy, slots=2)
    real, broken = policy.read, threading.Event()

    def read(*args, **kwargs):
        if broken.is_set():
            broken.clear()
            raise RuntimeError("the device is on fire")
        return real(*args, **kwargs)

    policy.read = read
    broken.set()
    victim, next_one = Client(), Client()
    engine.submit(ask_of(TALKS[0], 0), victim)
    with pytest.raises(RuntimeError, match="on fire"):
        victim.replies()
    engine.submit(ask_of(TALKS[0], 0), next_one)
    assert next_one.replies() == [generate_replies(policy, tokenizer, TALKS[:1], DECODING, seeds=[0])[0].text]
    assert engine.healthy() and engine.stats.failed == 1


def test_an_engine_whose_every_step_fails_is_not_healthy(make_policy, engine_of, ask_of, monkeypatch):
    policy = make_policy(BC())
    engine = engine_of(policy)
    real = policy.read

    def broken(*_, **__):
        raise RuntimeError("no device")

    monkeypatch.setattr(policy, "read", broken)
    for expected in (True, True, False):
        client = Client()
        engine.submit(ask_of(TALKS[0]), client)
        with pytest.raises(RuntimeError, match="no device"):
            client.replies()
        deadline = time.monotonic() + 240
        while engine.healthy() != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.healthy() == expected
    monkeypatch.setattr(policy, "read", real)
    client = Client()
    engine.submit(ask_of(TALKS[0]), client)
    client.replies()
    assert engine.healthy(), "a step that succeeds ends it"


def test_closing_finishes_what_it_has_and_takes_nothing_new(make_policy, engine_of, ask_of):
    engine = engine_of(make_policy(BC()), slots=1)
    clients = [Client() for _ in range(3)]
    for n, client in enumerate(clients):
        engine.submit(ask_of(TALKS[0], n), client)
    engine.close(drain=30)
    assert all(client.replies() for client in clients)
    with pytest.raises(Closed):
        engine.submit(ask_of(TALKS[0], 0), Client())
    abrupt = engine_of(make_policy(BC()), slots=1)
    clients = [Client() for _ in range(6)]
    for n, client in enumerate(clients):
        abrupt.submit(ask_of(TALKS[4], n, replace(DECODING, max_new_tokens=30)), client)
    abrupt.close()
    endings = []
    for client in clients:
        try:
            endings.append(client.replies())
        except Closed as error:
            endings.append(error)
    assert any(isinstance(ending, Closed) for ending in endings)


def test_what_it_cannot_do_it_says(make_policy, engine_of, ask_of):
    engine = engine_of(make_policy(BC()))
    with pytest.raises(UserError, match="at most 128 tokens, prompt and reply together, got"):
        engine.submit(ask_of(TALKS[0], 0, replace(DECODING, max_new_tokens=127)), Client())
    with pytest.raises(UserError, match="BC, which has no beta"):
        engine.submit(ask_of(TALKS[0], beta=2.0), Client())
    with pytest.raises(UserError, match="expected a finite number for beta, got nan"):
        engine_of(make_policy(ILQL())).submit(ask_of(TALKS[0], beta=float("nan")), Client())
    with pytest.raises(UserError, match="at most 64 replies for a request, got 80"):
        engine.submit(ask_of(TALKS[0], 0, replace(DECODING, num_generations=16), choices=5), Client())
    with pytest.raises(UserError, match="beam search"):
        engine.submit(ask_of(TALKS[0], 0, Decoding(do_sample=False, num_beams=3)), Client())
    with pytest.raises(UserError, match="slots and piece of at least 1"):
        engine_of(make_policy(BC()), slots=0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4), "mamba: .*, got linear_attention"),
        (BloomConfig(hidden_size=16, n_layer=1, n_head=2), "bloom: .* needs more than positions and a mask"),
    ],
    ids=["states", "positions in its mask"],
)
def test_models_whose_attention_the_slots_cannot_carry_are_refused(tokenizer, engine_of, config, reason):
    config.vocab_size = len(tokenizer)
    policy = Policy(AutoModelForCausalLM.from_config(config), BC())
    with pytest.raises(UserError, match=reason):
        engine_of(policy)


def test_no_state_is_left_in_the_global_generator(make_policy, engine_of, ask_of):
    engine = engine_of(make_policy(BC()))
    before = torch.get_rng_state()
    client = Client()
    engine.submit(ask_of(TALKS[0], 0), client)
    client.replies()
    assert torch.equal(before, torch.get_rng_state())


def test_interleaved_chats_with_one_system_prompt_keep_their_own_history(make_policy, engine_of, ask_of):
    """The system prompt is most of each conversation; none takes over another's slot while others are
    empty."""
    engine = engine_of(make_policy(BC()), slots=2, kept=6)
    short, system = (
        replace(DECODING, max_new_tokens=2),
        {"role": "system", "content": "you are kind to all of them and you say so"},
    )
    chats = [[system, {"role": "user", "content": f"hello {name}"}] for name in ("ann", "bob", "eve")]
    before = [0, 0, 0]
    for turn in range(3):
        for i, chat in enumerate(chats):
            client = Client()
            ticket = engine.submit(ask_of(chat, turn, short, key="k"), client)
            (text,) = client.replies()
            assert not turn or ticket.reused >= before[i] - 1, "only what is new was read"
            before[i] = len(ticket.ask.prompt)
            chats[i] = [*chat, {"role": "assistant", "content": text}, {"role": "user", "content": "you?"}]


def test_nothing_of_one_key_or_user_is_reused_for_another(make_policy, engine_of, ask_of):
    """How many tokens were there already would tell them what the other one wrote."""
    engine = engine_of(make_policy(BC()), slots=2, kept=4)
    talk = [{"role": "user", "content": "hello there, my word is tangerine"}]
    reused = []
    for key, user in (("alice", ""), ("bob", ""), ("alice", "ann"), ("alice", "")):
        client = Client()
        ticket = engine.submit(ask_of(talk, 0, key=key, user=user), client)
        client.replies()
        reused.append(ticket.reused)
    assert reused[:3] == [0, 0, 0] and reused[3] == len(ticket.ask.prompt) - 1


def test_a_key_cannot_jump_the_queue_by_naming_new_users(make_policy, engine_of, ask_of):
    engine = engine_of(make_policy(BC()), slots=2, queue=99)
    go = held(engine)
    order, done, listen = in_order()
    long = replace(DECODING, max_new_tokens=25)
    for n in range(6):
        engine.submit(ask_of(TALKS[4], n, long, key="loud", user=f"user {n}"), listen("loud"))
    engine.submit(ask_of(TALKS[0], 0, key="quiet"), listen("quiet"))
    go.set()
    for _ in range(7):
        assert done.acquire(timeout=240)
    assert order.index("quiet") <= 3


def test_a_request_whose_best_reply_cannot_be_chosen_hears_of_it(make_policy, engine_of, ask_of, monkeypatch):
    engine = engine_of(make_policy(UtteranceILQL()))

    def fails(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr("rl_dialog.serving.engine.reply_scores", fails)
    client = Client()
    engine.submit(ask_of(TALKS[0]), client)
    with pytest.raises(RuntimeError, match="no memory"):
        client.replies()


def test_slots_that_could_not_grow_are_as_they_were(make_policy, engine_of, ask_of, monkeypatch):
    """One conversation too long for the memory there is must not break those that fit."""
    policy = make_policy(BC())
    engine = engine_of(policy)
    real, full = torch.Tensor.new_zeros, threading.Event()

    def limited(self, *size):
        if full.is_set():
            raise RuntimeError("out of memory")
        return real(self, *size)

    monkeypatch.setattr(torch.Tensor, "new_zeros", limited)
    talk, clients = (
        [{"role": "user", "content": "hello there, how are you? " * 8}],
        [Client() for _ in range(3)],
    )
    engine.submit(ask_of(TALKS[0]), clients[0])
    first = clients[0].replies()
    full.set()
    engine.submit(ask_of(talk), clients[1])
    with pytest.raises(RuntimeError, match="out of memory"):
        clients[1].replies()
    full.clear()
    engine.submit(ask_of(talk), clients[2])
    assert clients[2].replies() == texts(policy, engine.tokenizer, [talk], DECODING, seeds=[0])
    again = Client()
    engine.submit(ask_of(TALKS[0]), again)
    assert again.replies() == first


def test_penalties_and_biases_by_hand():
    """The reply has said 3 twice and 5 once: 3 loses 2 * 0.5 + 0.25, 5 loses 0.5 + 0.25 and gains 2. The
    other row asks for nothing."""
    leaning = Ask([1], frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((5, 2.0), (0, -1.0)))
    rows = [Row(ask, None, None, tokens=[3, 5, 3]) for ask in (leaning, Ask([1]))]
    found = _leaning(torch.zeros(2, 6, dtype=torch.bfloat16), rows)
    assert found.tolist() == [[-1.0, 0, 0, -1.25, 0, 1.25], [0.0] * 6]
