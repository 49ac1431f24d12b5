"""`online --preferences.labeller`: a policy learns what is preferred of its conversations as it has them."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipelines import fit_reward, online
from pipelines.online import OnlineConfig
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.methods import RLOO
from rl_dialog.preferences import labelled_reward
from rl_dialog.preferences.gold_pairs import gold_of
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labelled_reward import LabelledReward
from rl_dialog.preferences.labelled_settings import LabelledRewardSettings
from rl_dialog.preferences.labels import NewQuery
from rl_dialog.preferences.reply_fitting import Fitting
from rl_dialog.preferences.segments import Conversation, Reply, Segments
from tests.envs.chat_server import chat_server

WORLD = '''
import numpy as np

class Vowels:
    """Pays for vowels, in two turns; partners differ in what they say first."""
    def reset(self, *, seed=None):
        self.messages = [{"role": "user", "content": f"hello {np.random.default_rng(seed).integers(99)}"}]
        return list(self.messages), {}
    def step(self, reply):
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and you?"}]
        return list(self.messages), vowels_in(reply), len(self.messages) > 4, False, {}

class Talk:
    """Two bots speak in turn, twice each, and are paid for their own vowels; it always begins alike."""
    def reset(self, *, seed=None):
        self.views, self.said = {role: [{"role": "user", "content": "begin"}] for role in ("ann", "bob")}, 0
        return list(self.views["ann"]), {"role": "ann"}
    def step(self, reply):
        me, other = ("ann", "bob")[:: 1 - 2 * (self.said % 2)]
        self.said += 1
        self.views[me].append({"role": "assistant", "content": reply})
        self.views[other].append({"role": "user", "content": reply})
        over = self.said == 4
        return list(self.views[other]), {me: vowels_in(reply)}, over, False, {"role": other}

def vowels_in(text):
    return float(sum(text.count(letter) for letter in "aeiou"))

def heard(dialog):
    """The letters that the user has heard in the end, of which a multiple of five says nothing."""
    told = [m["content"].rpartition(" ")[2] for m in dialog.messages if "I heard" in m["content"]]
    return [float(told[-1]) if int(told[-1]) % 5 else None for _ in dialog.replies]

def vowels(dialog):
    """The vowels of each reply."""
    return [vowels_in(dialog.messages[i]["content"]) for i in dialog.replies]
'''


@pytest.fixture
def config(checkpoints, tmp_path: Path, monkeypatch) -> OnlineConfig:  # noqa: ANN001
    (tmp_path / "vowels_world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("vowels_world", None)
    asked = LabelledRewardSettings(
        labeller="oracle",
        budget=300,
        initial_labels=30,
        fitting=Fitting(epochs=5, learning_rate=3e-3),
        validation=0.2,
        max_length=64,
    )
    return OnlineConfig(
        model_name_or_path=checkpoints["bc"],
        env="vowels_world:Vowels",
        method=RLOO(c=0.01),
        output_dir=str(tmp_path / "online"),
        groups=6,
        group_size=4,
        max_steps=10,
        warmup_steps=0,
        eval_steps=5,
        learning_rate=1e-2,
        env_episodes=24,
        max_new_tokens=4,
        report_to="none",
        quiet=True,
        device="cpu",
        preferences=asked,
    )


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_policy_learns_what_is_preferred(config, tmp_path: Path) -> None:  # noqa: ANN001
    """Nobody tells it what the world pays; an oracle says of pairs which was paid more. What was labelled is
    read by `fit_reward` as if people had answered."""
    result = online.main(config)
    out = Path(config.output_dir)
    measured = [line for line in lines(out) if "eval/true_return" in line]
    assert "eval/return" not in measured[0] and measured[0]["eval/unscored"] == 1  # no reward yet
    assert measured[-1]["eval/true_return"] > measured[0]["eval/true_return"] + 0.5
    assert Path(result["best"]).name == "checkpoint-10"  # returns by other rewards cannot be compared
    rounds = [line for line in lines(out) if "train/return" in line]
    assert rounds[0]["pref/labels"] == 30 and rounds[-1]["pref/labels"] <= 300
    assert rounds[-1]["pref/held_out_accuracy"] > 0.6
    assert all("train/true_return" in line and "train/reward_labels" in line for line in rounds)
    fitted = fit_reward.FitRewardConfig(run=str(out), output_dir=str(tmp_path / "reward"), quiet=True)
    fitted = replace(fitted, device="cpu", num_hidden_layers=1, hidden_size=32)
    assert fit_reward.main(fitted)["pairs"] > 40
    with pytest.raises(UserError, match="--checkpoint: expected labels of single replies"):
        fit_reward.main(replace(fitted, checkpoint=result["best"], overwrite=True))


@pytest.mark.slow
def test_a_run_that_was_killed_asks_and_learns_the_same(config, tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    """What it had asked and learned after its checkpoint is forgotten; the labels are not asked for again."""
    config = replace(config, max_steps=6, eval_steps=2)
    whole = online.main(config)
    half = replace(config, output_dir=str(tmp_path / "half"))
    meet = LabelledReward.meet

    def stop_in_the_middle(self, played, policy, tokenizer, step: int) -> None:  # noqa: ANN001
        meet(self, played, policy, tokenizer, step)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(LabelledReward, "meet", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        online.main(half)
    answered = LabelLog(f"sqlite:///{tmp_path / 'half' / 'labels.db'}").labels()
    monkeypatch.setattr(LabelledReward, "meet", meet)
    resumed = online.main(replace(half, resume=True))
    weights = [Path(run["latest"], "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]
    labels = [LabelLog(f"sqlite:///{folder / 'labels.db'}").labels()
              for folder in (Path(config.output_dir), tmp_path / "half")]  # fmt: skip
    told = [{(each.query, each.first, each.preference) for each in of_run} for of_run in labels]
    assert told[0] == told[1] and labels[1][: len(answered)] == answered


@pytest.mark.slow
def test_versions_that_nobody_goes_on_from_are_forgotten(config) -> None:  # noqa: ANN001
    often = replace(config.preferences, refit=0.0, schedule="constant")
    online.main(replace(config, preferences=often, eval_steps=8))
    versions = sorted(int(path.name) for path in (Path(config.output_dir) / "rewards").iterdir())
    assert versions == [5, 6, 7, 8, 9]  # three of before checkpoint-8, and what came after it


def asked_of(out: Path) -> list[tuple[Conversation | Reply, Conversation | Reply]]:
    """What was compared, in the order of the answers."""
    segments = Segments(out / "clips")
    return [(segments[each.first], segments[each.second]) for each in _log(out).labels()]


@pytest.mark.slow
def test_in_self_play_each_role_is_compared_with_itself(config, tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    """Who speaks second, too, whose conversations begin with other words of the first. The same words with
    another partner stay on one side of the split, also in a run that was stopped and goes on."""
    often = replace(config.preferences, initial_labels=50, budget=100, validation=0.5, schedule="constant")
    short = {"groups": 4, "max_steps": 4, "eval_steps": 2, "env_episodes": 8, "max_new_tokens": 1, "top_k": 4}
    config = replace(config, env="vowels_world:Talk", self_play=True, preferences=often, **short)
    online.main(config)
    out, half = Path(config.output_dir), tmp_path / "half"
    pairs = asked_of(out)
    assert {(a.source["role"], b.source["role"]) for a, b in pairs} == {("ann", "ann"), ("bob", "bob")}
    assert any(len({each.messages[0]["content"] for each in pair}) == 2 for pair in pairs)
    assert all([m["content"] for m in a.context] == ["begin"] for a, _ in pairs if a.source["role"] == "ann")
    tasks = {f"In which conversation is the bot better? The bot's role is {role}." for role in ("ann", "bob")}
    assert _log(out).usual_task() in tasks
    whole = lines(out)
    assert all("eval/true_return" in line for line in whole if "eval/failed" in line)
    assert {"train/return_ann", "train/return_bob", "train/true_return"} <= whole[1].keys()

    meet = LabelledReward.meet

    def stop(self, played, policy, tokenizer, step: int) -> None:  # noqa: ANN001
        meet(self, played, policy, tokenizer, step)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(LabelledReward, "meet", stop)
    with pytest.raises(KeyboardInterrupt):
        online.main(replace(config, output_dir=str(half)))
    monkeypatch.setattr(LabelledReward, "meet", meet)
    online.main(replace(config, output_dir=str(half), resume=True))
    assert (half / "asked.jsonl").read_bytes() == (out / "asked.jsonl").read_bytes()
    told = [
        {n: v for n, v in line.items() if n.startswith(("train", "eval", "pref")) and not n.endswith("_s")}
        for line in (whole[-1], lines(half)[-1])
    ]
    assert told[0] == told[1]


@pytest.mark.slow
def test_conversations_with_users_behind_an_endpoint_are_compared(config, tmp_path: Path) -> None:  # noqa: ANN001
    """Of one person each pair; what people said to a reply counts where a reward answers for those who see
    all of it. It judges the conversation as a whole, and skips one of which it says nothing."""
    people = [{"name": name, "system": f"You are {name}."} for name in ("ada", "bo", "cy")]
    (tmp_path / "people.jsonl").write_text("\n".join(map(json.dumps, people)))

    def answer(request: dict) -> str:
        system, *_, last = request["messages"]
        return f"{system['content']} I heard {len(last['content'])}"

    asked = replace(config.preferences, answers="vowels_world:heard", initial_labels=20, budget=40)
    with chat_server(answer) as server:
        users = {"env": "", "users": server.url, "personas": str(tmp_path / "people.jsonl"), "user_turns": 2}
        talking = replace(config, **users, preferences=asked, max_steps=2, env_episodes=4)
        online.main(talking)
        out = Path(config.output_dir)
        pairs = asked_of(out)
        assert len(pairs) > 25 and all(a.context == b.context for a, b in pairs)
        assert all("I heard" in each.messages[-1]["content"] for pair in pairs for each in pair)
        assert _log(out).counts()["skipped"] > 0
        assert all("eval/true_return" not in line and "train/true_return" not in line for line in lines(out))
        replies = replace(asked, about="replies", answers="vowels_world:vowels")
        online.main(replace(talking, preferences=replies, output_dir=str(tmp_path / "replies")))
    pairs = asked_of(tmp_path / "replies")
    assert all(a.context == b.context and a.text != b.text for a, b in pairs)
    assert {len(a.context) for a, _ in pairs} == {1, 3}


def test_people_are_waited_for_and_told_where(config, monkeypatch, capfd) -> None:  # noqa: ANN001
    """One person answers in the folder of the run, as `label --run` does."""
    monkeypatch.setattr(labelled_reward, "LOOK", 0.05)
    asked = replace(config.preferences, labeller="people", initial_labels=12, budget=16, max_behind=0)
    config = replace(config, preferences=asked, max_steps=2, eval_steps=0)
    out, over, seen = Path(config.output_dir), threading.Event(), []

    def person() -> None:
        while not (out / "asked.jsonl").is_file() and not over.is_set():
            time.sleep(0.02)
        log, segments = LabelLog(f"sqlite:///{out / 'labels.db'}"), Segments(out / "clips")
        while not over.is_set():
            pair = log.lease("ann")
            if pair is None:
                time.sleep(0.02)
                continue
            left, right = segments[pair.left], segments[pair.right]
            seen.append((type(left), pair.task))
            longer = len(left.text) - len(right.text)
            log.answer(pair.id, "ann", "tie" if not longer else "left" if longer > 0 else "right")

    thread = threading.Thread(target=person)
    thread.start()
    try:
        online.main(config)
    finally:
        over.set()
        thread.join()
    assert len(seen) >= 12 and set(seen) == {(Conversation, "In which conversation is the bot better?")}
    assert f"waiting for 12 of 12 labels: python -m pipelines.label --run {out}" in capfd.readouterr().err


def test_pairs_that_become_gold_are_not_waited_for(config, monkeypatch, tmp_path: Path) -> None:  # noqa: ANN001
    """Of six pairs an expert answers two while the run waits; these are made gold, and labels can only come
    from the others."""
    monkeypatch.setattr(labelled_reward, "LOOK", 0.01)
    monkeypatch.setattr(labelled_reward, "REMIND", 0.0)
    settings = replace(config.preferences, labeller="people")
    how = {"total_rounds": 2, "group_size": 4, "start": "new", "decoding": Decoding(), "seed": 0}
    reward = LabelledReward(settings, tmp_path, **how)
    new = [NewQuery(f"a{n}", f"b{n}", validation=False) for n in range(6)]
    reward.asked[0] = reward.log.add_queries(new)

    def answered(labeller: str, most: int) -> None:
        for pair in reward.log.lease_many(labeller, most):
            reward.log.answer(pair.id, labeller, "left")

    def meanwhile(_: str) -> None:
        assert not reward.log.gold(), "still waits with nothing left to label"
        answered("expert", 2)
        reward.log.add_gold(gold_of("expert", reward.log.answers()))
        answered("ann", 6)

    reward.say = meanwhile
    assert sum(answer.gold is None for answer in reward._answers(0)) == 4


@pytest.mark.slow
def test_single_replies_are_compared_with_what_might_have_been_said(config) -> None:  # noqa: ANN001
    asked = replace(config.preferences, about="replies", answers="vowels_world:vowels", initial_labels=30)
    online.main(replace(config, preferences=asked, eval_steps=0))
    out = Path(config.output_dir)
    segments = Segments(out / "clips")
    pairs = [(segments[each.first], segments[each.second]) for each in _log(out).labels()]
    assert all(isinstance(spoken, Reply) for pair in pairs for spoken in pair)
    assert all(first.context == second.context and first.text != second.text for first, second in pairs)
    assert {len(first.context) for first, _ in pairs} == {1, 3}  # of both turns
    measured = [line["eval/true_return"] for line in lines(out) if "eval/true_return" in line]
    assert measured[-1] > measured[0] + 0.5


def _log(out: Path) -> LabelLog:
    return LabelLog(f"sqlite:///{out / 'labels.db'}")


def test_a_reward_that_a_coin_taught_is_told(config, capfd) -> None:  # noqa: ANN001
    coins = replace(
        config.preferences,
        initial_labels=72,
        oracle=replace(config.preferences.oracle, noise=1.0),
        validation=0.7,
    )
    online.main(replace(config, preferences=coins, groups=12, max_steps=2, eval_steps=0))
    assert "held-out pairs as they were labelled, which a coin may do as well" in capfd.readouterr().err


def test_labels_that_prefer_nothing_end_the_run_which_can_go_on(config) -> None:  # noqa: ANN001
    """The ties stay; of the pairs that are asked about then one is better."""
    ties = replace(config.preferences, oracle=replace(config.preferences.oracle, ties=100.0))
    config = replace(config, preferences=ties, max_steps=1, eval_steps=0)
    with pytest.raises(UserError, match="labels that prefer one of two.*is kept: go on with --resume"):
        online.main(config)
    answers = _log(Path(config.output_dir)).answers()
    assert len(answers) == 30
    clear = replace(ties, initial_labels=36, oracle=replace(ties.oracle, ties=0.0))
    online.main(replace(config, preferences=clear, resume=True))
    assert _log(Path(config.output_dir)).answers()[:30] == answers


def test_a_resumed_run_that_is_refused_keeps_its_folder(config, monkeypatch) -> None:  # noqa: ANN001
    """It was stopped in its first round, before anybody had answered."""
    for stop, message in ((KeyboardInterrupt(), None), (UserError("no"), "no.*go on with --resume")):
        monkeypatch.setattr(LabelledReward, "_answers", Mock(side_effect=stop))
        with pytest.raises(type(stop), match=message):
            online.main(replace(config, resume=bool(message)))
    assert (Path(config.output_dir) / "asked.jsonl").is_file()


@pytest.mark.parametrize(
    ("of_run", "of_labels", "message"),
    [
        ({"rewards": {"question": 1.0}}, {}, "expected no --rewards.NAME WEIGHT"),
        ({"env": "", "contexts": "data"}, {}, "expected --env, --users, or --self_play from contexts"),
        ({"env": "", "contexts": "data", "self_play": True}, {}, "expected --preferences.answers REWARD"),
        ({"env": "", "users": "http://x/v1", "personas": "x"}, {}, "nobody pays where --users talk"),
        (
            {"env": "", "contexts": "data", "self_play": True},
            {"answers": "question", "initial_labels": 73},
            "the pairs of a round, 72 in 6 groups of 4",
        ),
        ({}, {"answers": "vowel"}, "unknown reward 'vowel'"),
        ({}, {"answers": "vote"}, "expected a reward that judges a conversation"),
        ({}, {"about": "replies", "answers": "answer_length"}, "a reward that judges a new reply by itself"),
        ({}, {"initial_labels": 200, "budget": 100}, "expected at most the budget of 100"),
        ({}, {"initial_labels": 37}, "expected at most the pairs of a round, 36 in 6 groups of 4"),
        ({}, {"about": "replies"}, "expected --preferences.answers REWARD"),
        ({}, {"labeller": "people", "answers": "vote"}, "expected --preferences.labeller oracle"),
        ({}, {"validation": 1.0}, "--preferences.validation of at least 0 and below 1"),
        ({}, {"budget": 0}, "--budget of at least 1"),
        ({}, {"model_name_or_path": "./nowhere"}, "expected a directory"),
    ],
    ids=str,
)
def test_what_can_be_known_to_fail_is_told_first(config, of_run, of_labels, message: str) -> None:  # noqa: ANN001
    asked = replace(config.preferences, **of_labels)
    with pytest.raises(UserError, match=message):
        online.main(replace(config, preferences=asked, **of_run))
    assert not Path(config.output_dir).exists()
