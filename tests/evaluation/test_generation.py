"""Batched replies equal single ones, sampling has the right distribution and one stream per reply, beams are
drawn by rank."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TextStreamer

from rl_dialog.data.tokenize import encode_prompt
from rl_dialog.errors import UserError
from rl_dialog.evaluation.checkpoints import CheckpointConfig, evaluate_checkpoint, play_here
from rl_dialog.evaluation.episodes import env_return, play_episodes
from rl_dialog.evaluation.generation import (
    Decoding,
    Reply,
    RowSampler,
    beam_replies,
    choose_beam,
    generate_replies,
    load_for_decoding,
    prompt_limits,
    rank_weights,
    read_reply,
    stream,
    stream_reply,
)
from rl_dialog.evaluation.results import headline, put_together, write_evaluation
from rl_dialog.evaluation.runs import Entry
from rl_dialog.evaluation.scoring import rank_replies
from rl_dialog.methods import BC, DPO, ILQL, UtteranceILQL, WayOffPolicy
from rl_dialog.models.policy import Lengths

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


class Echo:
    """A world that ends after `length` replies and pays the length of each in words; the second reply gets a
    vote."""

    length = 3

    def reset(self, *, seed=None):
        self.messages = [
            {"role": "assistant", "content": "Welcome."},
            {"role": "user", "content": f"hello {seed % 7}"},
        ]
        return list(self.messages), {}

    def step(self, reply):
        said = sum(m["role"] == "assistant" for m in self.messages)
        self.messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": f"you said {reply[:5]}"},
        ]
        info = {"vote": 1} if said == 2 else {}
        return list(self.messages), float(len(reply.split())), said == self.length, False, info


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny models on a busy machine are faster without a pool of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [BC(), ILQL()], ids=["bc", "ilql"])
def test_a_ragged_batch_says_what_each_conversation_alone_would(make_policy, tokenizer, method, sample):
    policy = make_policy(method)
    decoding = Decoding(max_new_tokens=8, max_prompt_length=64, do_sample=sample)
    seeds = [stream(0, i) for i in range(len(TALKS))]
    together = generate_replies(policy, tokenizer, TALKS, decoding, seeds=seeds)
    alone = [
        generate_replies(policy, tokenizer, [talk], decoding, seeds=[seed])[0]
        for talk, seed in zip(TALKS, seeds, strict=True)
    ]
    assert together == alone
    assert together == generate_replies(policy, tokenizer, TALKS, decoding, seeds=seeds, batch_size=2)


def test_a_model_made_here_reads_no_longer_prompts_than_it_has_learned(make_policy, tokenizer):
    policy, decoding = make_policy(BC()), Decoding(max_new_tokens=8)
    late = TALKS[1][-1:]
    short = len(encode_prompt(late, tokenizer, max_length=64))

    def said(talk):
        return generate_replies(policy, tokenizer, [talk], decoding, seeds=[stream(0, 0)])

    whole = said(TALKS[1])
    policy.lengths = Lengths(row=64, prompt=short + 2)
    assert prompt_limits(policy, decoding)["usual"] == short + 2
    assert said(TALKS[1]) == said(late) != whole
    policy.lengths = Lengths(row=64, prompt=3)
    assert said(TALKS[1]) == said(late), "the last message stays whole"
    policy.lengths = Lengths(row=10_000, prompt=10_000)
    assert said(TALKS[1]) == whole and policy.longest_row == policy.context


# --- the best of several replies ----------------------------------------------------------------------------


def drawn(policy, tokenizer, talk, decoding, seed, count):
    """The replies among which `count` generations choose, one by one."""
    return [
        generate_replies(
            policy, tokenizer, [talk], replace(decoding, num_generations=1), seeds=[stream(seed, k)]
        )[0]
        for k in range(count)
    ]


def ranks(policy, tokenizer, talk, replies, by):
    prompt = encode_prompt(talk, tokenizer, max_length=64)
    ended = [[*reply.tokens, *([tokenizer.eos_token_id] if reply.finished else [])] for reply in replies]
    return rank_replies(policy, [prompt] * len(replies), ended, by=by)


@pytest.mark.parametrize(
    ("method", "rank_by", "way"),
    [
        (BC(), "", "mean log-probability"),
        (BC(), "log-probability", "log-probability"),
        (ILQL(beta=1.0), "", "mean Q"),
        (ILQL(beta=1.0), "last V", "last V"),
        (WayOffPolicy(), "", "mean log-probability"),
        (UtteranceILQL(rerank_log_prob_weight=0.0), "", "utterance Q"),
    ],
    ids=lambda each: str(each)[:12],
)
def test_the_best_of_n_is_the_one_that_ranks_highest(make_policy, tokenizer, method, rank_by, way):
    """Of the five replies that the five streams give, per conversation."""
    policy = make_policy(method)
    decoding = Decoding(max_new_tokens=6, max_prompt_length=64, num_generations=5, rank_by=rank_by)
    seeds = [stream(1, i) for i in range(len(TALKS))]
    said = generate_replies(policy, tokenizer, TALKS, decoding, seeds=seeds)
    choices = 0
    for talk, seed, reply in zip(TALKS, seeds, said, strict=True):
        candidates = drawn(policy, tokenizer, talk, decoding, seed, 5)
        scores = ranks(policy, tokenizer, talk, candidates, way)
        assert reply == candidates[int(scores.argmax())]
        choices += int(scores.argmax()) != 0
    assert choices  # the first one is not always the best


def test_the_best_of_n_does_not_depend_on_the_batch(make_policy, tokenizer):
    policy = make_policy(UtteranceILQL(num_generations=4))
    decoding = Decoding(max_new_tokens=6, max_prompt_length=64)
    seeds = [stream(2, i) for i in range(len(TALKS))]
    together = generate_replies(policy, tokenizer, TALKS, decoding, seeds=seeds)
    assert together == generate_replies(policy, tokenizer, TALKS, decoding, seeds=seeds, batch_size=3)
    assert together == [
        generate_replies(policy, tokenizer, [talk], decoding, seeds=[seed])[0]
        for talk, seed in zip(TALKS, seeds, strict=True)
    ]


def test_the_choice_is_made_without_dropout(make_policy, tokenizer):
    """As the training loop measures returns: the policy in training mode chooses as in evaluation, and no
    global random number is drawn."""
    policy = make_policy(UtteranceILQL(num_generations=6), dropout=0.5)
    decoding = Decoding(max_new_tokens=6, max_prompt_length=64)
    seeds = [stream(3, i) for i in range(len(TALKS))]
    expected = generate_replies(policy, tokenizer, TALKS, decoding, seeds=seeds)
    before = torch.random.get_rng_state()
    assert generate_replies(policy.train(), tokenizer, TALKS, decoding, seeds=seeds) == expected
    assert torch.equal(torch.random.get_rng_state(), before) and policy.training


class Heard:
    """A transformers streamer that remembers."""

    def __init__(self):
        self.put_, self.ended = [], 0

    def put(self, value):
        self.put_.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def test_a_streamer_gets_the_chosen_reply(make_policy, tokenizer):
    """The prompt, then all of the best reply at once, then the end; without a streamer the same reply."""
    policy = make_policy(UtteranceILQL(num_generations=5))
    decoding, heard = Decoding(max_new_tokens=6, max_prompt_length=64), Heard()
    reply = stream_reply(policy, tokenizer, TALKS[1], decoding, seed=4, streamer=heard)
    assert reply == generate_replies(policy, tokenizer, [TALKS[1]], decoding, seeds=[4])[0]
    assert reply == stream_reply(policy, tokenizer, TALKS[1], decoding, seed=4)
    assert (
        heard.put_ == [encode_prompt(TALKS[1], tokenizer, max_length=64), list(reply.tokens)]
        and heard.ended == 1
    )


def test_printing_the_chosen_reply(make_policy, tokenizer, capsys):
    policy = make_policy(UtteranceILQL(num_generations=3))
    reply = stream_reply(
        policy,
        tokenizer,
        TALKS[0],
        Decoding(max_new_tokens=6),
        seed=4,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    assert capsys.readouterr().out.strip() == reply.text


def test_ranking_by_what_a_policy_does_not_have(make_policy, tokenizer):
    with pytest.raises(
        UserError,
        match=(
            "cannot rank replies by 'utterance Q': expected one of 'mean log-probability', 'log-probability'"
        ),
    ):
        generate_replies(
            make_policy(BC()),
            tokenizer,
            TALKS[:1],
            Decoding(max_new_tokens=4, num_generations=2, rank_by="utterance Q"),
            seeds=[0],
        )


def reply_batch(policy, tokenizer, conversations, *, seed=0, **decoding):
    """The text of one reply per conversation, each with a stream of its own."""
    seeds = [stream(seed, i) for i in range(len(conversations))]
    return [
        reply.text
        for reply in generate_replies(policy, tokenizer, conversations, Decoding(**decoding), seeds=seeds)
    ]


# --- sampling and stopping ----------------------------------------------------------------------------------


def test_greedy_equals_generate(make_policy, tokenizer):
    policy = make_policy(BC())
    ids = tokenizer.apply_chat_template(
        TALKS[0], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    expected = policy.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=tokenizer.pad_token_id)[
        0, ids.shape[1] :
    ].tolist()
    assert reply_batch(policy, tokenizer, TALKS[:1], do_sample=False, max_new_tokens=8) == [
        read_reply(expected, policy, tokenizer).text
    ]


def test_sampling_leaves_the_global_random_state_alone(make_policy, tokenizer):
    policy = make_policy(BC())
    before = torch.random.get_rng_state()
    first = reply_batch(policy, tokenizer, TALKS, max_new_tokens=6, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert reply_batch(policy, tokenizer, TALKS, max_new_tokens=6, seed=3) == first
    assert reply_batch(policy, tokenizer, TALKS, max_new_tokens=6, seed=4) != first


def test_the_row_sampler_draws_from_the_softmax():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    sampler = RowSampler([stream(0, i) for i in range(4000)])
    drawn = sampler(None, p.log().expand(4000, 5)).argmax(1)
    shares = drawn.bincount(minlength=5) / 4000
    assert shares[4] == 0
    assert torch.allclose(shares, p, atol=0.03)  # about four standard errors
    with pytest.raises(UserError, match="one per stream"):
        sampler(None, p.expand(3, 5))


def test_a_reply_ends_before_the_end_of_turn(make_policy, tokenizer):
    policy = make_policy(BC())
    hello, end = tokenizer("hello")["input_ids"], tokenizer.eos_token_id
    role = tokenizer.convert_tokens_to_ids("<|user|>")
    assert read_reply([*hello, end, *hello], policy, tokenizer) == Reply("hello", tuple(hello), True)
    assert read_reply([role, *hello], policy, tokenizer) == Reply("hello", (role, *hello), False)
    assert read_reply([end, tokenizer.pad_token_id], policy, tokenizer) == Reply("", (), True)


def test_top_k_1_is_greedy(make_policy, tokenizer):
    policy = make_policy(ILQL())
    greedy = reply_batch(policy, tokenizer, TALKS, do_sample=False, max_new_tokens=6)
    assert reply_batch(policy, tokenizer, TALKS, do_sample=True, top_k=1, max_new_tokens=6) == greedy
    assert reply_batch(policy, tokenizer, TALKS, do_sample=True, temperature=1e-4, max_new_tokens=6) == greedy


def test_the_prompt_leaves_room_for_the_reply(make_policy, tokenizer):
    policy = make_policy(BC())  # 128 positions
    talk = [{"role": "user", "content": "thank you " * 200}]
    assert (
        len(generate_replies(policy, tokenizer, [talk], Decoding(max_new_tokens=16), seeds=[0])[0].tokens)
        <= 16
    )
    with pytest.raises(UserError, match="max_new_tokens 128 with a model of 128 positions"):
        reply_batch(policy, tokenizer, [talk], max_new_tokens=128)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"num_beams": 3},
        {"max_new_tokens": 0},
        {"top_k": -1},
        {"num_generations": -1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"num_generations": 2, "do_sample": False},
        {"rank_by": "best"},
    ],
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(UserError, match="expected"):
        Decoding(**wrong).check()


def test_rank_weights():
    assert rank_weights(5) == [0.4, 0.3, 0.2, 0.1, 0.0]
    assert rank_weights(2) == [1.0, 0.0]
    assert rank_weights(1) == [1.0]
    assert rank_weights(3) == pytest.approx([2 / 3, 1 / 3, 0])


def test_empty_beams_are_dropped():
    import numpy as np

    beams = [Reply(text, (1,), True, -1.0) for text in ("", "good", " ", "fine", "poor")]
    assert choose_beam(beams, np.random.default_rng(0))[1] == pytest.approx([0, 2 / 3, 0, 1 / 3, 0])
    nothing = [Reply("", (), True, -1.0)] * 4
    assert choose_beam(nothing, np.random.default_rng(0))[1] == [0.25] * 4
    chosen = [choose_beam(beams, np.random.default_rng(i))[0] for i in range(300)]
    assert set(chosen) == {1, 3}
    assert 160 < chosen.count(1) < 240


def test_beams_come_best_first(make_policy, tokenizer):
    beams = beam_replies(
        make_policy(ILQL()), tokenizer, TALKS[1], Decoding(max_new_tokens=6, num_beams=4, do_sample=False)
    )
    scores = [beam.score for beam in beams]
    assert len(beams) == 4
    assert scores == sorted(scores, reverse=True)


def test_episodes_become_dialogs_with_rewards_and_votes(make_policy, tokenizer):
    policy = make_policy(BC())
    played = play_episodes(policy, tokenizer, Echo, [4, 1], Decoding(max_new_tokens=5), seed=9, batch_size=1)
    assert [episode.index for episode in played] == [4, 1]
    first = played[0]
    assert len(first.dialog.replies) == len(first.replies) == Echo.length  # the greeting is the world's own
    assert [first.dialog.messages[i]["content"] for i in first.dialog.replies] == [
        reply.text for reply in first.replies
    ]
    assert first.total == sum(len(reply.text.split()) for reply in first.replies)
    assert "feedback" not in first.dialog.messages[first.dialog.replies[0]]
    assert first.dialog.messages[first.dialog.replies[1]]["feedback"] == {"vote": 1}
    assert not first.dialog.truncated
    cut = play_episodes(policy, tokenizer, Echo, [4], Decoding(max_new_tokens=5), seed=9, max_turns=2)[0]
    assert cut.dialog.truncated
    assert cut.replies == first.replies[:2]


class Broken(Echo):
    """Fails at its second reply for some partners, and cannot score the second reply of others."""

    def reset(self, *, seed=None):
        self.kind = ("whole", "failed", "unscored")[seed % 3]
        return super().reset(seed=seed)

    def step(self, reply):
        messages, reward, over, _, info = super().step(reply)
        second = len(messages) > 4
        if second and self.kind == "failed":
            return messages, 0.0, False, True, info | {"failed": "the server is gone"}
        return messages, None if second and self.kind == "unscored" else 1.0, over, False, info


def test_an_episode_that_failed_or_was_not_scored_has_no_return(make_policy, tokenizer):
    policy, decoding = make_policy(BC()), Decoding(max_new_tokens=3)
    played = play_episodes(policy, tokenizer, Broken, range(12), decoding, seed=4)
    ends = [episode.end for episode in played]
    assert set(ends) == {"terminated", "failed", "unscored"}
    for episode in played:
        assert episode.dialog.meta["end"] == episode.end
        assert episode.total == (3.0 if episode.end == "terminated" else None)
        assert episode.dialog.truncated == (episode.end == "failed")
        rewards = [episode.dialog.messages[i]["reward"] for i in episode.dialog.replies]
        known = {"terminated": [1.0, 1.0, 1.0], "failed": [1.0, None], "unscored": [1.0, None, None]}
        assert rewards == known[episode.end]
    assert played[ends.index("failed")].dialog.meta["failed"] == "the server is gone"
    cut = play_episodes(policy, tokenizer, Echo, [0], decoding, max_turns=1)[0]
    assert (cut.end, cut.dialog.truncated) == ("truncated", True)
    short = type("Short", (Echo,), {"max_turns": 2})  # what the world itself says
    assert len(play_episodes(policy, tokenizer, short, [0], decoding)[0].replies) == 2
    found = env_return(policy, tokenizer, make_env=Broken, episodes=12, seed=4, decoding=decoding)
    assert found["eval/return"] == 3.0 and found["eval/return_stderr"] == 0.0
    assert found["eval/failed"] == ends.count("failed") / 12
    assert found["eval/unscored"] == ends.count("unscored") / 12


class Gone(Echo):
    """Fails before anything is said."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)[0], {"failed": "no server"}


def test_a_world_that_fails_at_once(make_policy, tokenizer):
    found = env_return(make_policy(BC()), tokenizer, make_env=Gone, episodes=2)
    assert found == {"eval/failed": 1.0, "eval/unscored": 0.0, "eval/replies_per_dialog": 0.0}


@pytest.mark.parametrize("world", [Broken, Gone])
def test_a_report_says_how_many_have_no_return(world, make_policy, tokenizer, tmp_path):
    make_policy(BC()).save_pretrained(tmp_path / "bc")
    tokenizer.save_pretrained(tmp_path / "bc")
    config = CheckpointConfig(episodes=12, seed=4, rewards=("logged",), max_new_tokens=3, replicates=20)
    found = evaluate_checkpoint(str(tmp_path / "bc"), config, play_here(config, world), None)
    failed, unscored = (int(found.measures[end].numerator.sum()) for end in ("failed", "unscored"))
    kinds = [stream(4, i) % 3 for i in range(12)]  # how `Broken` chooses
    assert (failed, unscored) == ((12, 0) if world is Gone else (kinds.count(1), kinds.count(2)))
    entry = Entry("bc", "", "bc", str(tmp_path / "bc"), tmp_path / "bc")
    told = put_together(config, [entry], {entry.directory: found}, None, world)
    written = write_evaluation(told, tmp_path, {})
    note = f"return per dialog: {failed} of 12 episodes failed and {unscored} were not scored"
    assert note in Path(written["report"]).read_text(encoding="utf-8")
    figures = headline(told)["figures"]["bc"]
    assert figures.get("return", [None])[0] == (None if world is Gone else 3.0)


def test_a_policy_takes_one_role(make_policy, tokenizer):
    class Two(Echo):
        def step(self, reply):
            *stepped, info = super().step(reply)
            return *stepped, {"role": "seller"}

    with pytest.raises(UserError, match="Two: expected a world of one player, got None and 'seller'"):
        play_episodes(make_policy(BC()), tokenizer, Two, [0], Decoding(max_new_tokens=3))


def test_episodes_do_not_depend_on_who_else_is_playing(make_policy, tokenizer):
    policy = make_policy(ILQL())
    decoding = Decoding(max_new_tokens=5)
    together = play_episodes(policy, tokenizer, Echo, range(9), decoding, seed=1)
    split = play_episodes(policy, tokenizer, Echo, range(9), decoding, seed=1, batch_size=4)
    assert [episode.dialog for episode in together] == [episode.dialog for episode in split]
    assert play_episodes(policy, tokenizer, Echo, [7], decoding, seed=1)[0].dialog == together[7].dialog


def test_env_return_for_the_training_loop(make_policy, tokenizer):
    policy = make_policy(BC()).train()
    found = env_return(
        policy, tokenizer, 10, make_env=Echo, episodes=6, seed=2, decoding=Decoding(max_new_tokens=5)
    )
    assert found == env_return(
        policy, tokenizer, 20, make_env=Echo, episodes=6, seed=2, decoding=Decoding(max_new_tokens=5)
    )
    assert found["eval/replies_per_dialog"] == Echo.length
    assert policy.training


def test_another_beta(make_policy, tokenizer, tmp_path):
    make_policy(ILQL(beta=1.0)).save_pretrained(tmp_path / "ilql")
    make_policy(BC()).save_pretrained(tmp_path / "bc")
    assert load_for_decoding(tmp_path / "ilql", beta=7.0).method == ILQL(beta=7.0)
    assert load_for_decoding(tmp_path / "ilql").method.beta == 1.0
    with pytest.raises(UserError, match="--beta: expected a number of at least 0, .* got -1"):
        load_for_decoding(tmp_path / "ilql", beta=-1.0)
    for beta in (float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"ilql: expected a finite number for beta, got {beta}"):
            load_for_decoding(tmp_path / "ilql", beta=beta)
    make_policy(DPO()).save_pretrained(tmp_path / "dpo")
    for name in ("bc", "dpo"):  # dpo's beta belongs to training
        with pytest.raises(UserError, match=f"trained with {name}, which has no beta"):
            load_for_decoding(tmp_path / name, beta=7.0)


def test_no_conversation_gets_no_reply(make_policy, tokenizer):
    """Also where a method would choose among several: there is nothing to rank."""
    for method in (BC(), UtteranceILQL()):
        assert generate_replies(make_policy(method), tokenizer, [], Decoding(), seeds=[]) == []
