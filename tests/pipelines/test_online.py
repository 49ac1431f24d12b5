"""The verb: from a checkpoint to a better one, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from envs import text_env
from pipelines import evaluate, online, train
from pipelines.online import OnlineConfig
from rl_dialog.config import ConfigError, load_config
from rl_dialog.data.readers import read_logs
from rl_dialog.data.schema import Dialog
from rl_dialog.data.shards import FORMAT, MANIFEST, SHARD_SCHEMA, VERSION, pack_rows, shard_name
from rl_dialog.data.tokenize import load_tokenizer, tokenize
from rl_dialog.errors import UserError
from rl_dialog.evaluation.contexts import Contexts
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding
from rl_dialog.evaluation.online_run import ENV_SEED, model_card, with_absolute_paths
from rl_dialog.methods import BC, GRPO, ILQL, PPO, RLOO, VHRL
from rl_dialog.models.checkpoint import load_prior
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.rewards import apply_rewards, choose_rewards

WORLD = '''
import numpy as np

class Vowels:
    """Pays for the letter a, in two turns; partners differ in what they say first."""
    def reset(self, *, seed=None):
        self.messages = [{"role": "user", "content": f"hello {np.random.default_rng(seed).integers(99)}"}]
        return list(self.messages), {}
    def step(self, reply):
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and you?"}]
        return list(self.messages), float(reply.count("a")), len(self.messages) > 4, False, {}
'''


@pytest.fixture
def config(checkpoints, tmp_path: Path, monkeypatch) -> OnlineConfig:  # noqa: ANN001
    (tmp_path / "vowels_world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("vowels_world", None)
    return OnlineConfig(
        model_name_or_path=checkpoints["bc"],
        env="vowels_world:Vowels",
        method=RLOO(c=0.01),
        output_dir=str(tmp_path / "online"),
        groups=4,
        group_size=4,
        max_steps=12,
        warmup_steps=0,
        eval_steps=6,
        learning_rate=1e-2,
        env_episodes=24,
        max_new_tokens=4,
        report_to="none",
        quiet=True,
        device="cpu",
    )


def test_a_policy_learns_what_a_world_pays_for(config, tmp_path: Path) -> None:  # noqa: ANN001
    """Its checkpoint is read by whatever reads checkpoints, and it was measured with other partners than it
    has learned from."""
    result = online.main(config)
    assert result["return"] > result["return_before"] + 0.5
    out = Path(config.output_dir)
    best = (out / "best").read_text().strip()
    policy = Policy.from_pretrained(out / best)
    assert policy.method == config.method and AutoModelForCausalLM.from_pretrained(out / best)
    assert load_prior(out) is not None  # evaluate measures the divergence from it
    assert "rloo" in (out / best / "README.md").read_text()
    learned = {
        json.loads(line)["messages"][0]["content"]
        for path in sorted((out / "rollouts").iterdir())
        for line in path.open()
    }
    assert len(list((out / "rollouts").iterdir())) == 12 and len(learned) > 10
    seeds = {
        json.loads(line)["meta"]["seed"] for path in (out / "rollouts").iterdir() for line in path.open()
    }
    played = _measured_seeds(config, policy)
    assert len(seeds) == 48 and not seeds & played
    settings = evaluate.EvaluateConfig(
        checkpoints=(str(out),),
        env=config.env,
        episodes=8,
        max_new_tokens=4,
        output_dir=str(tmp_path / "report"),
        quiet=True,
        device="cpu",
    )
    assert evaluate.main(settings)["checkpoints"] >= 1


def _measured_seeds(config: OnlineConfig, policy: Policy) -> set[int]:
    tokenizer = load_tokenizer(config.model_name_or_path)
    episodes = play_episodes(
        policy,
        tokenizer,
        text_env(config.env),
        range(config.env_episodes),
        Decoding(max_new_tokens=1),
        seed=ENV_SEED,
    )
    return {episode.dialog.meta["seed"] for episode in episodes}


def test_a_run_goes_on_where_it_was(config, tmp_path: Path) -> None:  # noqa: ANN001
    """Two rounds and then two more are four, where the schedule does not look at the end."""
    config = replace(config, lr_scheduler_type="constant", method=PPO(c=0.01), max_steps=4, eval_steps=2)
    whole = online.main(config)
    half = replace(config, output_dir=str(tmp_path / "half"), max_steps=2)
    online.main(half)
    with pytest.raises(UserError, match="already holds a run of `online`: pass --resume"):
        online.main(half)
    with pytest.raises(UserError, match="made with other settings: --group_size 4 then and 2 now"):
        online.main(replace(half, resume=True, group_size=2))
    resumed = online.main(replace(half, resume=True, max_steps=4))
    assert resumed["return"] == whole["return"] and resumed["step"] == 4
    weights = [Path(run["latest"], "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]
    Path(resumed["latest"], "trainer", "unit.json").unlink()
    with pytest.raises(UserError, match="expected a whole checkpoint to go on with, got .*unit.json"):
        online.main(replace(half, resume=True, max_steps=5))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_name_or_path": ""}, "expected --model_name_or_path"),
        ({"model_name_or_path": "./nowhere"}, "expected a directory with a model"),
        ({"env": ""}, "expected either --env.*got neither"),
        ({"contexts": "data"}, "expected either --env.*got both"),
        ({"scorers": ("sentiment=x",)}, "--scorers: expected rewards that ask them"),
        ({"rewards": {"learned": 1.0}}, "--rewards.learned: expected the model that it asks"),
        ({"env": "", "contexts": "nowhere"}, "--contexts: expected rewards"),
        ({"env": "", "contexts": "nowhere", "rewards": {"question": 1.0}}, "nowhere"),
        ({"env": "smalltalk"}, "Did you mean small_talk"),
        ({"env": "pong"}, "unsuitable env"),
        ({"opponent_lag": 1}, "--opponent_lag: expected --self_play"),
        ({"learner_role": "x"}, "--learner_role: expected --self_play"),
        ({"self_play": True, "opponent_lag": -2}, "--opponent_lag -2: expected rounds from 0 on, or -1"),
        ({"self_play": True, "self_play_turns": 0}, "--self_play_turns of at least 1"),
        ({"eval_env": "smalltalk"}, "Did you mean small_talk"),
        ({"users": "http://x/v1"}, "expected either --env.*got both --env and --users"),
        ({"personas": "x"}, "--personas: expected --users URL, too"),
        ({"env": "", "users": "http://x/v1"}, "--users: expected --personas, a file that says who"),
        ({"env": "", "users": "x", "personas": "y"}, "--users: expected rewards that judge the replies"),
        (
            {"env": "", "users": "x", "personas": "y", "rewards": {"question": 1.0}, "self_play": True},
            "--users: expected no --self_play",
        ),
        (
            {"env": "", "users": "x", "personas": "y", "rewards": {"question": 1.0}},
            "--users: expected the address of an endpoint, http://host:port/v1, got 'x'",
        ),
        ({"user_turns": 0}, "--user_turns of at least 1"),
        ({"user_timeout": 0.0}, "--user_timeout: expected seconds above 0"),
        ({"data": "nowhere"}, "--data: expected --supervised_weight too"),
        ({"supervised_weight": 0.1}, "--supervised_weight: expected --data too"),
        ({"supervised_weight": 0.1, "data": "nowhere"}, "nowhere"),
        ({"target_kl": 1.0, "method": RLOO(c=0.0)}, "--target_kl: expected --method.c above 0"),
        ({"max_staleness": 1}, "--max_staleness 1: expected --num_workers"),
        ({"num_workers": -1}, "--num_workers of at least 0"),
        ({"num_learners": -1}, "--num_learners of at least 0"),
        ({"max_failures": -1}, "--max_failures of at least 0"),
        ({"group_size": 1}, "rloo compares the episodes of a group, so expected at least 2"),
        ({"groups": 0}, "--groups of at least 1"),
        ({"num_iterations": 0}, "--num_iterations of at least 1"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"top_p": 1.5}, "0 < top_p <= 1"),
        ({"seed": -1}, "--seed of at least 0"),
        ({"value_unit": -1.0}, "--value_unit of at least 0"),
        ({"learning_rate": -1.0}, "--learning_rate of at least 0"),
    ],
    ids=str,
)
def test_what_can_be_known_to_fail_is_told_first(config, changed, message: str) -> None:  # noqa: ANN001
    with pytest.raises(UserError, match=message):
        online.main(replace(config, **changed))
    assert not Path(config.output_dir).exists()


def test_the_model_card_says_how_to_talk_to_what_has_learned(config) -> None:  # noqa: ANN001
    """A policy at another temperature is another policy."""
    assert "--checkpoint THIS_FOLDER\n" in model_card(config, "me")
    cooler = replace(config, temperature=0.7, top_k=20)
    assert "--checkpoint THIS_FOLDER --temperature 0.7 --top_k 20\n" in model_card(cooler, "me")


@pytest.mark.slow
def test_a_policy_that_speaks_by_its_values_is_a_start(config, make_policy, tokenizer, tmp_path) -> None:  # noqa: ANN001
    """It talks as `ilql` does, learns, resumes with the same bits, is a start again, and is read by
    `evaluate`."""
    folder = str(tmp_path / "values")
    make_policy(ILQL(beta=0.1)).save_pretrained(folder)  # random values: a larger beta says one word only
    tokenizer.save_pretrained(folder)
    how = {"model_name_or_path": folder, "env_episodes": 24, "lr_scheduler_type": "constant"}
    config = replace(config, **how, max_steps=8, eval_steps=4)
    whole = online.main(config)
    start = Policy.from_pretrained(folder)
    settings = {"env": config.env, "episodes": 12, "max_new_tokens": 4, "quiet": True, "device": "cpu"}
    measured = _returns(start, config)
    assert whole["return_before"] == pytest.approx(sum(measured) / len(measured))
    assert whole["return"] > whole["return_before"]
    lines = [json.loads(line) for line in (Path(config.output_dir) / "metrics.jsonl").open()]
    assert abs(lines[1]["train/kl_per_reply"]) < 1e-4 and abs(lines[-2]["train/kl_per_reply"]) > 1e-3
    half = replace(config, output_dir=str(tmp_path / "half"))
    online.main(replace(half, max_steps=4))
    resumed = online.main(replace(half, resume=True))
    files = [
        Path(run["latest"], name).read_bytes()
        for name in ("model.safetensors", "heads.safetensors")
        for run in (whole, resumed)
    ]
    assert files[0] == files[1] and files[2] == files[3]
    assert "without the values that steer it" in Path(whole["latest"], "README.md").read_text()
    how = {"model_name_or_path": whole["latest"], "output_dir": str(tmp_path / "further")}
    further = replace(config, **how, max_steps=1)
    assert online.main(further)["return_before"] == pytest.approx(whole["return"])
    clone = replace(further, prior=folder, output_dir=str(tmp_path / "clone"))
    assert abs(online.main(clone)["train/kl_per_reply"]) > 0.1  # of its language model alone
    reported = evaluate.EvaluateConfig(
        checkpoints=(whole["latest"],), output_dir=str(tmp_path / "report"), **settings
    )
    assert evaluate.main(reported)["checkpoints"] == 1


def _returns(policy: Policy, config: OnlineConfig) -> list[float]:
    how = Decoding(max_new_tokens=config.max_new_tokens)
    tokenizer, env = load_tokenizer(config.model_name_or_path), text_env(config.env)
    args = policy, tokenizer, env, range(config.env_episodes), how
    return [episode.total for episode in play_episodes(*args, seed=ENV_SEED)]


def hierarchical(tokenizer, folder: Path, family: str, **more) -> str:  # noqa: ANN001, ANN003
    """A checkpoint of a new one."""
    shape = ModelConfig(family=family, width=12, **{"latent_size": 2} | more)
    Policy(load_lm(shape, tokenizer), BC(), shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"method": VHRL(c=0.01)}, id="joint"),
        pytest.param(
            {"method": VHRL(c=0.01, learns="decoupled", worker_rate=0.5), "max_steps": 48},
            id="decoupled",
            marks=pytest.mark.slow,
        ),
        pytest.param({"method": PPO(c=0.01)}, id="ppo", marks=pytest.mark.slow),
    ],
)
def test_a_start_with_latents_learns(config, tokenizer, tmp_path: Path, changed) -> None:  # noqa: ANN001
    """And is a checkpoint like any other, whose replies are what was measured."""
    start = hierarchical(tokenizer, tmp_path / "vhred", "vhred")
    config = replace(
        config, **{"model_name_or_path": start, "max_steps": 24, "learning_rate": 3e-2} | changed
    )
    result = online.main(config)
    assert result["return"] > result["return_before"] + 0.2
    assert result["train/behaviour_gap"] < 1e-5
    chooses = config.method.chooses_latents
    assert (result.get("train/latent_kl_per_reply", 0) > 0) == chooses
    policy = Policy.from_pretrained(result["latest"])
    assert policy.method == config.method and policy.has_latents
    assert sum(_returns(policy, config)) / config.env_episodes == pytest.approx(result["return"], abs=1e-3)


def test_latents_that_do_not_go_with_the_rest_are_refused(config, logs, tokenizer, tmp_path) -> None:  # noqa: ANN001
    starts = {
        family: hierarchical(tokenizer, tmp_path / family, family) for family in ("hred", "vhred", "vhcr")
    }
    starts["bc"] = config.model_name_or_path
    other = hierarchical(tokenizer, tmp_path / "other", "vhred", latent_size=3)
    of_latents = (
        "--method vhrl: expected a start that draws a latent for each message, got --model_name_or_path "
    )
    for method, family, more, message in (
        (VHRL(), "bc", {}, f"{of_latents}.*a gpt2 with latent none: start from one that `train"),
        (VHRL(learns="worker"), "hred", {}, f"{of_latents}.*a hierarchical with latent none.* made, or take"),
        (VHRL(), "vhcr", {}, f"{of_latents}.*a hierarchical with latent conversation.* made$"),
        (RLOO(), "vhcr", {}, "--model_name_or_path .*vhcr: expected latents of messages alone"),
        (
            VHRL(),
            "vhred",
            {"prior": starts["hred"]},
            "--prior .*hred: expected a vhred with latents of 2 numbers",
        ),
        (VHRL(), "vhred", {"prior": other}, "--prior .*other: expected a vhred with latents of 2 .* with 3"),
        (
            RLOO(),
            "vhred",
            {"data": logs, "supervised_weight": 1.0},
            "--data .*: expected a start without latents",
        ),
        (
            VHRL(),
            "vhred",
            {"max_staleness": 1, "num_workers": 1},
            "--max_staleness 1: expected 0 with --method vhrl",
        ),
    ):
        shutil.rmtree(config.output_dir, ignore_errors=True)
        with pytest.raises(UserError, match=message):
            online.main(replace(config, model_name_or_path=starts[family], method=method, **more))


def test_starts_whose_values_cannot_stay_are_refused(config, checkpoints, make_policy, tmp_path) -> None:  # noqa: ANN001
    with pytest.raises(UserError, match="--use_peft: expected a start that is its language model"):
        online.main(replace(config, model_name_or_path=checkpoints["ilql"], use_peft=True))
    make_policy(ILQL(), heads="lowrank").save_pretrained(tmp_path / "lowrank")
    with pytest.raises(UserError, match="got lowrank heads"):
        online.main(replace(config, model_name_or_path=str(tmp_path / "lowrank")))
    assert not Path(config.output_dir).exists()


def test_logs_are_for_train_and_worlds_for_online(tmp_path: Path) -> None:
    flags = ["--data", "x", "--output_dir", str(tmp_path / "x"), "--method", "grpo"]
    with pytest.raises(
        UserError, match="python -m pipelines.online --model_name_or_path RUN --env NAME --method grpo"
    ):
        train.main(load_config(train.TrainConfig, flags, choices=train.CHOICES))
    with pytest.raises(ConfigError, match="unknown method 'bc': expected one of reinforce, rloo, grpo, ppo"):
        load_config(OnlineConfig, ["--method", "bc"], choices=online.CHOICES)
    flags = ["--method", "rl_dialog.methods.example:Smoothed", "--model_name_or_path", "a"]
    flags += ["--env", "small_talk"]
    config = load_config(OnlineConfig, [*flags, "--output_dir", "b"], choices=online.CHOICES)
    with pytest.raises(UserError, match="Smoothed learns from logs: python -m pipelines.train"):
        online.main(config)
    flags = ["--method", "grpo", "--method.no-divide_by_length", "--method.kl", "k2"]
    method = load_config(OnlineConfig, flags, choices=online.CHOICES).method
    assert method == GRPO(divide_by_length=False, kl="k2")


@pytest.mark.slow
def test_adapters_learn_and_are_a_start_themselves(config, tmp_path: Path) -> None:  # noqa: ANN001
    """The prior is the model without them, a resumed run goes on with the same bits, and what has learned is
    the start of another run, whose prior is it."""
    how = {"use_peft": True, "lora_r": 4, "lr_scheduler_type": "constant", "eval_steps": 2, "env_episodes": 4}
    config = replace(config, learning_rate=5e-2, **how)
    whole = online.main(replace(config, max_steps=4))
    latest = Path(whole["latest"])
    assert (latest / "adapter_model.safetensors").is_file() and not (latest / "model.safetensors").is_file()
    half = replace(config, output_dir=str(tmp_path / "half"))
    online.main(replace(half, max_steps=2))
    resumed = online.main(replace(half, max_steps=4, resume=True))
    files = [Path(run["latest"], "adapter_model.safetensors").read_bytes() for run in (whole, resumed)]
    assert files[0] == files[1] and abs(whole["train/kl_per_reply"]) > 1e-3
    for use_peft in (True, False):
        further = {"model_name_or_path": whole["latest"], "output_dir": str(tmp_path / f"further-{use_peft}")}
        result = online.main(replace(config, **further, use_peft=use_peft, max_steps=1))
        assert result["return_before"] == pytest.approx(whole["return"])
        assert abs(result["train/kl_per_reply"]) < 1e-4  # from where it starts
    with pytest.raises(UserError, match="--use_peft: expected no --prior"):
        online.main(replace(half, prior=config.model_name_or_path))


def test_other_rewards_are_learned_in_a_world_whose_own_is_watched(config, tmp_path: Path) -> None:  # noqa: ANN001
    """The letter e is paid for, and the world's letters a stand beside it, in the log and in the figures."""
    (tmp_path / "e_reward.py").write_text(OWN.replace('count("a")', 'count("e")'))
    result = online.main(replace(config, rewards={"e_reward:vowels": 1.0}, max_steps=6, eval_steps=3))
    assert result["return"] > result["return_before"]
    lines = [json.loads(line) for line in (Path(config.output_dir) / "metrics.jsonl").open()]
    measured = [line for line in lines if "eval/return" in line]
    assert all({"eval/true_return", "eval/over_optimised"} <= line.keys() for line in measured)
    dialogs, _ = read_logs([Path(config.output_dir) / "rollouts"])
    for dialog in dialogs:
        for reply in (dialog.messages[i] for i in dialog.replies):
            assert reply["reward"] == reply["content"].count("e")
            assert reply["rewards"]["world"] == reply["content"].count("a")
    last = [dialog for dialog in dialogs if dialog.meta["step"] == 6]
    paid = [sum(dialog.messages[i]["rewards"]["world"] for i in dialog.replies) for dialog in last]
    assert result["train/true_return"] == pytest.approx(sum(paid) / len(paid))
    pages = sorted(path.name for path in (Path(config.output_dir) / "samples").iterdir())
    assert pages == ["round-000001.html", "round-000004.html", "round-000006.html"]


# --- replies to logged contexts -----------------------------------------------------------------------------


@pytest.fixture
def logs(tokenizer, tmp_path: Path) -> str:  # noqa: ANN001
    """A data directory: three contexts to learn from (one of them stands there twice) and one held out."""
    directory = tmp_path / "data"
    directory.mkdir()
    splits = {}
    for split, openings in (("train", ("hello", "hello", "how are you?")), ("validation", ("thank you",))):
        dialogs = [
            Dialog(
                f"{split}-{n}",
                [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": "hello there", "reward": 9.0, "feedback": {"vote": 1}},
                    {"role": "user", "content": f"good {n // 2}"},
                    {"role": "assistant", "content": "thank you"},
                ],
            )
            for n, text in enumerate(openings)
        ]
        rows = [tokenize(dialog, tokenizer, max_length=128) for dialog in dialogs]
        columns = [
            pa.array([dialog.to_row()[field.name] for dialog in dialogs], field.type)
            for field in list(SHARD_SCHEMA)[:-1]
        ]
        table = pa.Table.from_arrays([*columns, pack_rows(rows)], schema=SHARD_SCHEMA)
        pq.write_table(table, directory / shard_name(split, 0))
        splits[split] = {"dialogs": len(dialogs), "shards": [{"file": shard_name(split, 0)}]}
    components = {"vote": {"weight": 1.0}}
    manifest = {"format": FORMAT, "version": VERSION, "splits": splits, "rewards": {"components": components}}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return str(directory)


OWN = '''
def vowels(dialog):
    """The letters a of each reply."""
    return [float(dialog.messages[i]["content"].count("a")) for i in dialog.replies]
'''


def test_replies_to_contexts_are_judged_by_rewards(config, logs, tmp_path: Path) -> None:  # noqa: ANN001
    (tmp_path / "vowels_reward.py").write_text(OWN)
    config = replace(config, env="", contexts=logs, rewards={"vowels_reward:vowels": 2.0, "question": 0.0})
    result = online.main(config)
    assert result["return"] > result["return_before"] + 0.5
    dialogs, bad = read_logs([Path(config.output_dir) / "rollouts"])
    assert not bad and len(dialogs) == 12 * 16
    contexts = {" | ".join(m["content"] for m in d.messages[:-1]) for d in dialogs}
    assert contexts == {
        "hello",
        "hello | hello there | good 0",
        "how are you?",
        "how are you? | hello there | good 1",
    }
    for dialog in dialogs:
        assert dialog.replies == [len(dialog.messages) - 1] and not dialog.truncated
        reply = dialog.messages[-1]
        assert reply["reward"] == 2 * reply["content"].count("a") and "feedback" not in str(
            dialog.messages[:-1]
        )
        assert reply["rewards"]["vowels_reward:vowels"] == reply["content"].count("a")
    asked = [dialog.messages[-1]["rewards"]["question"] for dialog in dialogs if dialog.meta["step"] == 12]
    assert result["train/reward_question"] == pytest.approx(sum(asked) / len(asked))  # watched at no weight


def test_what_the_rewards_say_is_what_a_world_pays(logs) -> None:  # noqa: ANN001
    """The reward of the last reply alone, by the same functions as `prepare`; the seed says which context."""
    weights = {"question": 1.0, "repetition": 0.5}
    rewards = choose_rewards(weights)
    contexts = Contexts(logs, "train", rewards, weights)
    world = contexts()
    begun = [world.reset(seed=seed)[0] for seed in range(12)]
    assert begun == [contexts().reset(seed=seed)[0] for seed in range(12)]
    assert {len(messages) for messages in begun} == {1, 3}
    messages, _ = world.reset(seed=0)
    for reply in ("what would you like?", "hello there", ""):
        after, reward, terminated, truncated, _ = world.step(reply)
        assert after == [*messages, {"role": "assistant", "content": reply}] and terminated and not truncated
        dialog = Dialog("d", [dict(message) for message in after])
        assert reward == pytest.approx(apply_rewards(dialog, rewards, weights)[-1, -1])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            {"vote": 1.0, "question": 1.0},
            "--rewards.vote: expected a reward that judges a new reply by itself",
        ),
        ({"sentiment": 1.0}, "--rewards.sentiment: expected a reward that judges a new reply by itself"),
        ({"learned": 1.0}, "--rewards.learned: expected the model that it asks, --scorers reward_model=DIR"),
        ({"questoin": 1.0}, "unknown reward 'questoin'"),
    ],
    ids=str,
)
def test_rewards_that_cannot_judge_a_new_reply_are_refused(config, logs, rewards, message: str) -> None:  # noqa: ANN001
    with pytest.raises(UserError, match=message):
        online.main(replace(config, env="", contexts=logs, rewards=rewards))
    assert not Path(config.output_dir).exists()


# --- self-play ----------------------------------------------------------------------------------------------


def test_a_refused_run_leaves_its_folder_to_the_corrected_command(config) -> None:  # noqa: ANN001
    """The world says when it is played that it has two roles."""
    refused = replace(config, env="tests.evaluation.test_self_play:Bidding", max_steps=1)
    with pytest.raises(UserError, match="online --self_play"):
        online.main(refused)
    assert not Path(config.output_dir).exists()
    online.main(replace(refused, self_play=True))


def talks(config: OnlineConfig, logs: str, **more) -> OnlineConfig:  # noqa: ANN003
    rewards = {"vowels_reward:vowels": 1.0, "repetition": 0.1}
    return replace(config, env="", contexts=logs, self_play=True, self_play_turns=2, rewards=rewards, **more)


def test_two_copies_talk_and_both_learn_what_rewards_say(config, logs, tmp_path: Path) -> None:  # noqa: ANN001
    """From logged openings; each side is judged by its own replies, in the whole conversation."""
    (tmp_path / "vowels_reward.py").write_text(OWN)
    config = talks(config, logs, env_episodes=8, max_steps=8)
    result = online.main(config)
    assert result["return"] > result["return_before"] + 0.5
    dialogs, bad = read_logs([Path(config.output_dir) / "rollouts"])
    assert not bad and len(dialogs) == 8 * 16 * 2
    assert {dialog.meta["role"] for dialog in dialogs} == {"assistant", "user"}
    for dialog in dialogs:
        opening, *said = dialog.messages
        assert opening["content"] in ("hello", "how are you?") and len(said) == 4
        replies = [dialog.messages[i] for i in dialog.replies]
        assert len(replies) == 2
        for reply in replies:
            weighed = reply["rewards"]["vowels_reward:vowels"] + 0.1 * reply["rewards"].get("repetition", 0)
            assert reply["reward"] == pytest.approx(weighed)
        if dialog.meta["role"] == "user":
            assert opening["role"] == "assistant" and opening["weight"] == 0
    lines = [json.loads(line) for line in (Path(config.output_dir) / "metrics.jsonl").open()]
    assert {"train/return_assistant", "train/return_user"} <= lines[1].keys()
    assert {"eval/return_assistant", "eval/return_user", "eval/reward_repetition"} <= lines[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("lag", [2, -1])
def test_a_run_against_a_copy_goes_on_where_it_was(config, logs, tmp_path: Path, lag: int) -> None:  # noqa: ANN001
    """The copy too: the third round is played against the second version of the policy."""
    (tmp_path / "vowels_reward.py").write_text(OWN)
    how = {"opponent_lag": lag, "lr_scheduler_type": "constant", "max_steps": 5, "eval_steps": 2}
    config = talks(config, logs, env_episodes=4, learner_role="assistant", **how)
    whole = online.main(config)
    half = replace(config, output_dir=str(tmp_path / "half"), max_steps=2)
    online.main(half)
    resumed = online.main(replace(half, resume=True, max_steps=5))
    weights = [Path(run["latest"], "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]
    with pytest.raises(UserError, match="--opponent_lag"):
        online.main(replace(half, resume=True, opponent_lag=0))


@pytest.mark.slow
def test_two_copies_with_latents_talk_and_one_stays_as_it_was(config, logs, tokenizer, tmp_path) -> None:  # noqa: ANN001
    """VHRL as published: a VHRED talks to a frozen copy of itself, three replies each, and several rewards
    are standardised and added up."""
    start = hierarchical(tokenizer, tmp_path / "vhred", "vhred")
    (tmp_path / "vowels_reward.py").write_text(OWN)
    method = VHRL(c=0.0, gamma=0.9, baseline="none", standardise=True, words="mean", manager_weight=0.1)
    how = {"opponent_lag": -1, "learner_role": "assistant", "env_episodes": 16, "max_steps": 16}
    config = replace(talks(config, logs, **how), learning_rate=3e-2, self_play_turns=3)
    result = online.main(replace(config, model_name_or_path=start, method=method))
    assert result["return"] > result["return_before"] + 0.2
    dialogs, bad = read_logs([Path(config.output_dir) / "rollouts"])
    assert not bad and len(dialogs) == 16 * 16 * 2
    assert {(d.meta["role"], d.meta["player"]) for d in dialogs} == {
        ("assistant", "learner"),
        ("user", "copy"),
    }
    assert all(len(dialog.messages) == 7 for dialog in dialogs)


def test_a_role_that_no_conversation_has_is_refused(config, logs) -> None:  # noqa: ANN001
    config = talks(config, logs, learner_role="bot")
    with pytest.raises(UserError, match="--learner_role bot: expected assistant or user"):
        online.main(config)


# --- held to logs -------------------------------------------------------------------------------------------


def test_the_supervised_term_holds_a_policy_to_the_logs(config, logs, tokenizer, tmp_path: Path) -> None:  # noqa: ANN001
    """What is learned says the logged replies more surely than without it."""
    with pytest.raises((UserError, OSError), match="tokenizer"):
        online.main(replace(config, data=logs, supervised_weight=1.0))
    tokenizer.save_pretrained(Path(logs) / "tokenizer")
    found = {}
    for weight in (0.5, 5.0):
        how = {"data": logs, "supervised_weight": weight, "output_dir": str(tmp_path / str(weight))}
        found[weight] = online.main(replace(config, **how, max_steps=4, env_episodes=4))
    assert found[5.0]["train/supervised_nll"] < found[0.5]["train/supervised_nll"] - 0.1


def test_learners_elsewhere_find_what_a_command_names(config, tmp_path: Path) -> None:  # noqa: ANN001
    """They start in another folder than the command did; names on the hub stay."""
    (tmp_path / "judge").mkdir()
    named = replace(
        config,
        model_name_or_path=Path(config.model_name_or_path).name,
        prior="org/model",
        data="",
        scorers=("reward_model=judge",),
    )
    found = with_absolute_paths(named)
    start = str(tmp_path / named.model_name_or_path)
    assert (found.model_name_or_path, found.prior, found.data) == (start, "org/model", "")
    assert found.scorers == (f"reward_model={tmp_path / 'judge'}",)
