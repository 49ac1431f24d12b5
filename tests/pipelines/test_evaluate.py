"""The evaluation from checkpoints to report: figures against direct computation, every output, determinism,
and errors a user can read."""

import csv
import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.evaluate import EvaluateConfig, main
from rl_dialog.data.schema import Dialog
from rl_dialog.data.shards import FORMAT, MANIFEST, SHARD_SCHEMA, VERSION, pack_rows, shard_name
from rl_dialog.data.tokenize import load_tokenizer, tokenize
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import play_episodes
from rl_dialog.evaluation.generation import Decoding, load_for_decoding
from rl_dialog.methods import BC, ILQL, WayOffPolicy
from rl_dialog.models.checkpoint import save_policy
from rl_dialog.models.text_reward import TextReward
from rl_dialog.rewards.tfidf import TfidfClassifier

SHORT = {
    "episodes": 6,
    "max_new_tokens": 6,
    "max_prompt_length": 100,
    "contexts": 4,
    "replicates": 200,
    "quiet": True,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models on a busy machine are faster without a pool of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def runs(make_policy, tokenizer, tmp_path):
    """Run folders: two seeds of bc, one of ilql, one of kl_control with its prior."""
    made = {}
    for name, method, seed in (
        ("bc-seed0", BC(), 0),
        ("bc-seed1", BC(), 1),
        ("ilql-seed0", ILQL(), 0),
        ("kl-seed0", WayOffPolicy(), 0),
    ):
        folder = tmp_path / "runs" / name
        if method.uses_prior:
            make_policy(BC(), seed=5).lm.save_pretrained(folder / "prior")
        for step in (1, 2):
            save_policy(
                make_policy(method, seed=seed + 10 * step),
                folder / f"checkpoint-{step}",
                prior="../prior" if method.uses_prior else None,
            )
            tokenizer.save_pretrained(folder / f"checkpoint-{step}")
        (folder / "best").write_text("checkpoint-1\n")
        (folder / "latest").write_text("checkpoint-2\n")
        lines = [{"step": step, "train/loss": 3.0 / step, "eval/nll": 2.0 / step} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "tra'
        )
        made[name] = str(folder)
    return made


@pytest.fixture
def data(tokenizer, tmp_path):
    """A data directory whose test split holds rated replies: two contexts with good and bad ones, and a
    longer dialog."""
    replies = [
        ("coffee please", "sure, anything else?", 1.0),
        ("coffee please", "no", 0.0),
        ("a tea", "here you are", 1.0),
        ("a tea", "what", 0.0),
    ]
    dialogs = [
        Dialog(
            f"d{n}",
            [{"role": "user", "content": asked}, {"role": "assistant", "content": said, "reward": reward}],
        )
        for n, (asked, said, reward) in enumerate(replies)
    ]
    long = [
        ("user", "hello"),
        ("assistant", "hello there"),
        ("user", "thank you"),
        ("assistant", "that is all?"),
    ]
    dialogs.append(
        Dialog(
            "long",
            [
                {"role": role, "content": text, **({"reward": 0.5} if role == "assistant" else {})}
                for role, text in long
            ],
        )
    )
    directory = tmp_path / "data"
    directory.mkdir()
    rows = [tokenize(dialog, tokenizer, max_length=128) for dialog in dialogs]
    columns = [
        pa.array([dialog.to_row()[field.name] for dialog in dialogs], field.type)
        for field in list(SHARD_SCHEMA)[:-1]
    ]
    table = pa.Table.from_arrays([*columns, pack_rows(rows)], schema=SHARD_SCHEMA)
    pq.write_table(table, directory / shard_name("test", 0))
    weights = {"vote": 1.0, "logged": 0.0, "sentiment": 0.5}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "splits": {
            "train": {"dialogs": 0, "shards": []},
            "validation": {"dialogs": 0, "shards": []},
            "test": {"dialogs": len(dialogs), "shards": [{"file": shard_name("test", 0)}]},
        },
        "rewards": {"components": {name: {"weight": weight} for name, weight in weights.items()}},
    }
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return str(directory)


def test_everything_at_once(runs, data, tmp_path):
    config = EvaluateConfig(
        checkpoints=tuple(runs.values()),
        env="small_talk",
        data=data,
        output_dir=str(tmp_path / "report"),
        **SHORT,
    )
    result = main(config)
    labels = [f"{name} ({which})" for name in ("bc", "ilql", "kl") for which in ("best", "last")]
    assert list(result["figures"]) == labels
    assert list(result["differences"]) == labels[2:]
    assert result["differences"]["ilql (last)"]["baseline"] == "bc (last)"
    assert result["references"]["optimum"] == pytest.approx(3.1855, abs=1e-3)
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    by_label = {group["label"]: group for group in metrics["groups"]}
    assert len(by_label["bc (best)"]["runs"]) == by_label["bc (best)"]["figures"]["return"]["runs"] == 2
    assert metrics["trained_rewards"] == ["vote", "sentiment"]
    assert "kl" not in by_label["bc (best)"]["figures"]
    assert by_label["bc (best)"]["runs"][0]["notes"]["kl"] == "the checkpoint names no frozen prior"
    assert by_label["kl (best)"]["figures"]["kl"]["value"] > 0
    assert by_label["ilql (best)"]["figures"]["kl"]["value"] > 0
    assert by_label["ilql (best)"]["figures"]["critic"]["units"] == 2
    assert set(by_label["ilql (best)"]["figures"]) > {
        "critic/mean Q",
        "critic/mean Q - V",
        "reward/vote",
        "reward/question",
        "distinct_2",
    }
    check_report(tmp_path / "report")
    check_replies(tmp_path / "report" / "replies.csv", result, metrics)


def check_report(out):
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)  # self-contained
    assert page.count("data:image/png;base64,") == len(list((out / "plots").iterdir())) == 5
    assert all(
        (out / "plots" / name).read_bytes().startswith(b"\x89PNG")
        for name in ("return.png", "kl_return.png", "curves.png", "critic.png")
    )
    for expected in (
        "behaviour policy",
        "trained on: vote",
        "held out: question",
        "ilql (last) - bc (last)",
        "Held-out context d0",
        "Episode 0",
    ):
        assert expected in page
        assert expected in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) >= 7
    for table in tables:  # every row has the columns of its header
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def check_replies(path, result, metrics):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == result["generated_replies"]
    chosen = [row for row in rows if row["policy"] == "bc (best)" and row["source"] == "env"]
    returns = {(row["run"], row["context"]): float(row["return"]) for row in chosen}
    assert len(returns) == 2 * SHORT["episodes"]
    assert sum(returns.values()) / len(returns) == pytest.approx(result["figures"]["bc (best)"]["return"][0])
    for key, total in returns.items():
        assert sum(
            float(row["reward"]) for row in chosen if (row["run"], row["context"]) == key
        ) == pytest.approx(total)
    logged = [row for row in rows if row["policy"] == "bc (best)" and row["source"] == "data"]
    assert {row["context"] for row in logged} == {"d0", "d2", "long"}  # every context once


def test_the_return_is_that_of_direct_rollouts(runs, tmp_path):
    from envs.small_talk import SmallTalk

    config = EvaluateConfig(
        checkpoints=(f"{runs['ilql-seed0']}/checkpoint-2",),
        env="small_talk",
        output_dir=str(tmp_path / "report"),
        beta=3.0,
        **SHORT,
    )
    result = main(config)
    policy = load_for_decoding(f"{runs['ilql-seed0']}/checkpoint-2", beta=3.0)
    decoding = Decoding(max_new_tokens=6, max_prompt_length=100)
    played = play_episodes(
        policy, load_tokenizer(f"{runs['ilql-seed0']}/checkpoint-2"), SmallTalk, range(6), decoding
    )
    (figures,) = result["figures"].values()
    assert figures["return"][0] == pytest.approx(sum(episode.total for episode in played) / 6)
    assert result["differences"] == {}
    assert "decoded with 3" in (tmp_path / "report" / "report.md").read_text()


def test_samples_show_rewards_in_thousandths(runs, tmp_path, monkeypatch):
    (tmp_path / "clicks.py").write_text(
        "from envs.example import House\n\n\n"
        "class Clicks(House):\n"
        "    def step(self, reply):\n"
        "        messages, _, *rest = super().step(reply)\n"
        "        return messages, 0.0004, *rest\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    where = {"env": "clicks:Clicks", "output_dir": str(tmp_path / "report")}
    main(EvaluateConfig(checkpoints=(runs["bc-seed0"],), **where, **SHORT))
    text = (tmp_path / "report" / "report.md").read_text()
    assert "return 0.0036" in text and "+0.0004" in text  # nine replies


def test_data_alone_and_the_same_result_twice(runs, data, tmp_path):
    results = []
    for name in ("one", "two"):
        config = EvaluateConfig(
            checkpoints=(runs["bc-seed0"], runs["ilql-seed0"]),
            data=data,
            output_dir=str(tmp_path / name),
            **SHORT,
        )
        results.append(
            {
                key: value
                for key, value in main(config).items()
                if key in ("figures", "differences", "generated_replies")
            }
        )
    assert results[0] == results[1]
    assert "return" not in results[0]["figures"]["bc (best)"]
    text = (tmp_path / "one" / "report.md").read_text()
    assert "Held-out context" in text
    assert "Episode" not in text
    assert "one run says nothing about other seeds" in text and "other seeds would" not in text
    assert (tmp_path / "one" / "report.html").read_bytes() == (tmp_path / "two" / "report.html").read_bytes()


@pytest.mark.slow
def test_side_by_side_is_the_same_report(runs, data, tmp_path):
    settings = {"checkpoints": tuple(runs.values()), "env": "small_talk", "data": data} | SHORT
    results = []
    for name, side_by_side in (("alone", False), ("beside", True)):
        found = main(EvaluateConfig(**settings, output_dir=str(tmp_path / name), side_by_side=side_by_side))
        results.append(
            {
                key: value
                for key, value in found.items()
                if key in ("figures", "differences", "generated_replies")
            }
        )
    assert results[0] == results[1]
    for name in ("report.html", "replies.csv"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes()


def test_a_prior_that_was_left_behind_is_said_so(runs, data, tmp_path):
    import shutil

    shutil.rmtree(f"{runs['kl-seed0']}/prior")
    main(
        EvaluateConfig(
            checkpoints=(runs["kl-seed0"],), data=data, output_dir=str(tmp_path / "report"), **SHORT
        )
    )
    assert "expected the frozen prior at" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoints": ()}, "expected --checkpoints"),
        ({"output_dir": ""}, "expected --output_dir"),
        ({"env": ""}, "nothing to evaluate on: expected --env"),
        ({"env": "smalltalk"}, "unknown env 'smalltalk': expected one of .* Did you mean small_talk?"),
        ({"env": "", "data": "nowhere"}, "nowhere: expected a directory written by"),
        ({"beta": 2.0}, "--beta 2: none of these checkpoints was trained by a method with a beta"),
        ({"device": "cdua"}, "--device cdua: expected auto, cpu, cuda"),
        ({"names": ("a", "b")}, "one name per checkpoint"),
        ({"temperature": 0.0}, "expected temperature > 0"),
        ({"side_by_side": True, "num_workers": 2}, "expected side_by_side or num_workers"),
        ({"seed": -1}, "expected --seed of at least 0, got -1"),
        ({"held_out": -3}, "expected --held_out of at least 0, got -3"),
        ({"max_length": 0}, "expected --max_length of at least 2, got 0"),
    ],
)
def test_errors(runs, tmp_path, change, message):
    settings = (
        {"checkpoints": (runs["bc-seed0"],), "env": "small_talk", "output_dir": str(tmp_path / "report")}
        | SHORT
        | change
    )
    with pytest.raises(UserError, match=message):
        main(EvaluateConfig(**settings))


@pytest.mark.parametrize("wrong", [{"data": "nowhere"}, {"split": "tset"}])
def test_an_earlier_report_stays_where_the_command_is_refused(runs, data, tmp_path, wrong):
    (tmp_path / "report").mkdir()
    for name in ("evaluate.yaml", "report.html"):
        (tmp_path / "report" / name).touch()
    where = {"checkpoints": (runs["bc-seed0"],), "data": data, "output_dir": str(tmp_path / "report")}
    with pytest.raises(UserError, match="nowhere|tset"):
        main(EvaluateConfig(**where | SHORT | wrong, overwrite=True))
    assert (tmp_path / "report" / "report.html").is_file()


def test_different_methods_are_not_seeds_of_each_other(runs, tmp_path):
    chosen = (runs["bc-seed0"], runs["ilql-seed0"])
    with pytest.raises(UserError, match="expected runs of one method, got bc, ilql"):
        main(
            EvaluateConfig(
                checkpoints=chosen,
                names=("x", "x"),
                env="small_talk",
                output_dir=str(tmp_path / "report"),
                **SHORT,
            )
        )


def test_the_command_ends_with_one_line_of_json(runs, tmp_path):
    flags = ["--output_dir", str(tmp_path / "report"), "--env", "small_talk", "--episodes", "3", "--quiet"]
    flags += ["--max_new_tokens", "4", "--checkpoints", runs["bc-seed0"], runs["bc-seed1"]]
    command = [sys.executable, "-m", "pipelines.evaluate", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoints"] == 4


def test_a_misspelt_checkpoint_is_told(runs, tmp_path):
    where = {"output_dir": str(tmp_path / "report"), "env": "small_talk"}
    with pytest.raises(UserError, match="(?s)no such checkpoint.*Did you mean"):
        main(EvaluateConfig(checkpoints=(runs["bc-seed0"][:-1] + "9",), **where))


CANDIDATES = {"candidates": 3, "context_replies": "all", "similarities": ("token_f1", "chrf")}


def test_candidates_from_checkpoints_to_report(runs, data, tmp_path, capsys):
    out = tmp_path / "report"
    result = main(
        EvaluateConfig(
            checkpoints=(runs["bc-seed0"], runs["ilql-seed0"]),
            data=data,
            output_dir=str(out),
            **SHORT | CANDIDATES | {"quiet": False},
        )
    )
    printed = capsys.readouterr().out
    assert printed.index("Overview") < printed.index("Candidates") < printed.index("ilql (best) - bc (best)")
    figures = result["figures"]["bc (best)"]
    for metric in ("token_f1", "chrf", "click"):
        values = [figures[f"top/{metric}@{k}"][0] for k in (1, 2, 3)]
        assert values == sorted(values)
    assert "top/token_f1@1" in result["differences"]["ilql (best)"]
    metrics = json.loads((out / "metrics.json").read_text())
    ilql = next(group for group in metrics["groups"] if group["label"] == "ilql (best)")["figures"]
    assert {
        "ranked/mean Q/token_f1@2",
        "gain/mean Q/chrf@1",
        "gain/mean Q - V/click@1",
        "candidates_different",
    } <= set(ilql)
    text = (out / "report.md").read_text()
    for expected in (
        "## Candidates",
        "token\\_f1 top-1",
        "click top-3",
        "## The critic as ranker",
        "mean Q (its own)",
        "plots/candidates.png",
    ):
        assert expected in text
    assert (out / "plots" / "candidates.png").read_bytes().startswith(b"\x89PNG")
    assert len(result["candidates"]) == 4
    check_candidates(out / "candidates" / "bc-seed0-best.csv", out / "replies.csv", figures)


def test_a_reward_model_ranks_candidates_and_judges_replies(runs, data, tmp_path):
    """What it puts first is its own best, and `learned` is what it says of the answers."""
    torch.manual_seed(0)
    TextReward.new(
        ["hello there, sure, that is all?"], hidden_size=32, vocab_size=300, max_length=64
    ).save_pretrained(tmp_path / "model")
    with_model = {"reward_model": str(tmp_path / "model")}
    result = main(
        EvaluateConfig(
            checkpoints=(f"{runs['bc-seed0']}/checkpoint-1",),
            data=data,
            output_dir=str(tmp_path / "out"),
            **SHORT | CANDIDATES | with_model,
        )
    )
    [group] = json.loads((tmp_path / "out" / "metrics.json").read_text())["groups"]
    (path,) = (tmp_path / "out" / "candidates").iterdir()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    reward = TextReward.from_pretrained(tmp_path / "model")
    first = []
    for row in rows:
        context = [
            dict(zip(("role", "content"), line.split(": ", 1), strict=True))
            for line in row["context"].splitlines()
        ]
        scores = reward.score(
            [[*context, {"role": "assistant", "content": row[f"response_{k}"]}] for k in (1, 2, 3)]
        )
        first.append(float(row[f"token_f1_{1 + scores.index(max(scores))}"]))
    assert group["figures"]["ranked/reward model/token_f1@1"]["value"] == pytest.approx(
        sum(first) / len(first)
    )
    assert "gain/reward model/token_f1@1" in group["figures"] and "reward/learned" in group["figures"]
    assert "reward model" in (tmp_path / "out" / "report.md").read_text() and result["checkpoints"] == 1


def test_rewards_are_computed_as_the_data_was_prepared(runs, data, tmp_path, monkeypatch):
    """With its models, settings and functions of one's own; what is not here or fails is left out, and told,
    and of what the data names nothing is imported that nobody asks for."""
    monkeypatch.syspath_prepend(tmp_path)
    code = "def sevens(dialog):\n    return [7.0 for _ in dialog.replies]\n\n"
    code += "def fails(dialog):\n    return 1 / 0\n"
    (tmp_path / "rewards_of_mine.py").write_text(code)
    (tmp_path / "rewards_of_others.py").write_text("raise SystemExit(3)\n")
    # a classifier that knows no word gives its bias: 1 / (1 + 1/3)
    no_words = TfidfClassifier([], np.zeros(0), np.zeros(0), math.log(3))
    no_words.save_pretrained(tmp_path / "judge")
    manifest = json.loads((path := Path(data) / MANIFEST).read_text())
    names = ("vote", "reply_sentiment", "toxicity", "learned", "predicted_upvotes")
    names += ("rewards_of_mine:sevens", "rewards_of_mine:fails", "rewards_of_others:eights")
    manifest["rewards"]["components"] = {name: {"weight": 1.0} for name in names}
    scorers = [f"sentiment={tmp_path / 'judge'}", f"toxicity={tmp_path / 'lost'}"]
    path.write_text(json.dumps(manifest | {"settings": {"scorers": scorers}}))
    checkpoint = f"{runs['bc-seed0']}/checkpoint-1"
    asked = ("rewards_of_mine:sevens", "rewards_of_mine:fails")
    where = {"data": data, "output_dir": str(tmp_path / "out"), "rewards": asked}
    main(EvaluateConfig(checkpoints=(checkpoint,), **where, **SHORT))
    [group] = json.loads((tmp_path / "out" / "metrics.json").read_text())["groups"]
    figures, [run] = group["figures"], group["runs"]
    assert figures["reward/reply_sentiment"]["value"] == pytest.approx(0.75)
    assert figures["reward/rewards_of_mine:sevens"]["value"] == 7.0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "trained on: rewards_of_mine:sevens" in page
    not_known = "the model that the data was prepared with is not known here"
    for name, why in (
        ("toxicity", "lost: expected a directory with a model"),
        ("learned", f"{not_known}: --reward_model"),
        ("predicted_upvotes", not_known),
        ("rewards_of_mine:fails", "ZeroDivisionError: division by zero in line 5 of "),
        ("rewards_of_others:eights", "only for who asks for it: --rewards rewards_of_others:eights"),
    ):
        assert f"reward/{name}" not in run["figures"] and why in run["notes"][f"reward/{name}"]
        assert html.escape(why) in page


def check_candidates(path, replies, figures):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    each = [column for r in (1, 2, 3) for column in (f"response_{r}", f"token_f1_{r}", f"chrf_{r}")]
    assert list(rows[0]) == ["index", "context", "true_response", *each]
    assert [row["true_response"] for row in rows] == [
        "sure, anything else?",
        "here you are",
        "hello there",
        "that is all?",
    ]  # every context once
    assert rows[3]["context"] == "user: hello\nassistant: hello there\nuser: thank you"
    # the unit is the dialog, but the figure is the mean over contexts
    assert sum(float(row["token_f1_1"]) for row in rows) / 4 == pytest.approx(figures["top/token_f1@1"][0])
    assert sum(max(float(row["chrf_1"]), float(row["chrf_2"])) for row in rows) / 4 == pytest.approx(
        figures["top/chrf@2"][0]
    )
    with replies.open(newline="") as file:
        answers = [row["reply"] for row in csv.DictReader(file) if row["policy"] == "bc (best)"]
    assert answers == [row["response_1"] for row in rows]  # what is answered is the first candidate


@pytest.mark.slow
def test_candidates_do_not_depend_on_the_batch_size(runs, data, tmp_path):
    tables = []
    for size in (1, 128):
        out = tmp_path / str(size)
        main(
            EvaluateConfig(
                checkpoints=(f"{runs['ilql-seed0']}/checkpoint-1",),
                data=data,
                output_dir=str(out),
                batch_size=size,
                **SHORT | CANDIDATES,
            )
        )
        (path,) = (out / "candidates").iterdir()
        tables.append(path.read_text())
    assert tables[0] == tables[1]


def test_estimates_from_the_logs_in_the_report(runs, data, tmp_path):
    out, bc = tmp_path / "report", f"{runs['bc-seed0']}/checkpoint-1"
    chosen = (bc, f"{runs['ilql-seed0']}/checkpoint-1", f"{runs['kl-seed0']}/checkpoint-1")
    result = main(
        EvaluateConfig(
            checkpoints=chosen,
            data=data,
            output_dir=str(out),
            ope=("dm", "wis", "pdwis"),
            behaviour=bc,
            **SHORT,
        )
    )
    own, ilql = result["figures"]["bc (checkpoint-1)"], result["figures"]["ilql (checkpoint-1)"]
    assert own["ope/logged"][0] == pytest.approx((1 + 0 + 1 + 0 + 1) / 5)
    assert [own["ope/wis"][0], own["ope/pdwis"][0]] == pytest.approx([own["ope/logged"][0]] * 2)
    assert own["ope/n_eff"][0] == pytest.approx(5)
    assert 1 <= ilql["ope/n_eff"][0] < 5
    assert (own["ope/weight"][0], own["ope/outside"][0]) == (pytest.approx(1), pytest.approx(0))
    figures = {
        group["group"]: group["figures"] for group in json.loads((out / "metrics.json").read_text())["groups"]
    }
    assert (
        figures["bc"]["ope/weight"]["value"] == pytest.approx(1)
        and 0 <= figures["ilql"]["ope/outside"]["value"] <= 1
    )
    assert "ope/dm" in ilql
    assert "ope/dm" not in own
    text = (out / "report.md").read_text()
    known = "## Return estimated from the logs", "optimistic", "The method has no Q over tokens"
    known += (
        "mean weight",
        "mass outside the logs",
        "fewer than 40",
        "which only training reads",
        "No interval:",
    )
    assert ilql["ope/wis"][1:] == [None, None]
    assert all(expected in text for expected in known)
    assert (out / "plots" / "from_logs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "", "candidates": 2}, "--candidates: expected --data"),
        ({"data": "", "ope": ("fqe",)}, "--ope: expected --data"),
        ({"candidates": 2, "contexts": 0}, "contexts for candidates, got 2 and 0"),
        (
            {"candidates": 2, "similarities": ("token_f2",)},
            "unknown similarity 'token_f2'.*Did you mean token_f1?",
        ),
        (
            {"ope": ("fqa",)},
            "unknown estimate 'fqa': expected --ope with any of fqe, dm, wis, pdwis. Did you mean fqe?",
        ),
        ({"ope": ("wis",)}, "--ope wis: expected --behaviour, a checkpoint that stands for"),
        ({"ope": ("wis",), "behaviour": "nowhere/bc"}, "no such checkpoint: nowhere/bc"),
        ({"ope": ("fqe",)}, "--ope fqe: expected replies in the train split"),
        ({"ope": ("dm",), "gamma": 1.5}, "--gamma: expected a discount from 0 to 1, got 1.5"),
    ],
)
def test_errors_about_logs(runs, data, tmp_path, change, message):
    settings = {
        "checkpoints": (runs["bc-seed0"],),
        "env": "small_talk",
        "data": data,
        "output_dir": str(tmp_path / "report"),
        **SHORT,
    } | change
    with pytest.raises(UserError, match=message):
        main(EvaluateConfig(**settings))
