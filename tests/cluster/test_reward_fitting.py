"""A reward model that two workers of Ray Train fit is that of one process, but for rounding."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pipelines.fit_reward import FitRewardConfig, main
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.reward_fitting import from_anywhere
from rl_dialog.errors import UserError
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.reply_fitting import Fitting


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"what about {n}?", "chosen": f"sure {'x ' * (n % 9)}{n % 7}", "rejected": f"hmpf {n % 5}"}
        for n in range(70)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 330, "max_length": 64, "quiet": True}


@pytest.mark.slow
def test_two_workers_are_as_one(pairs, tmp_path):
    fitting = Fitting(learning_rate=5e-3, epochs=3, batch_size=9, calibration=0.2, patience=3)
    talk = [{"role": "user", "content": "what about 3?"}]
    replies = [
        [*talk, {"role": "assistant", "content": f"{said} {n}"}]
        for n in range(6)
        for said in ("sure", "hmpf")
    ]
    with connect(num_cpus=3):
        for name, of in (("all", fitting), ("adapters", replace(fitting, use_peft=True, lora_r=4))):
            scores = {}
            for workers in (0, 2):
                out = tmp_path / f"{name} {workers}"
                given = {
                    "logs": (pairs,),
                    "output_dir": str(out),
                    "num_workers": workers,
                    "fitting": of,
                    **SMALL,
                }
                main(FitRewardConfig(device="cpu", **given))
                assert not (out / "workers").exists()
                scores[workers] = TextReward.from_pretrained(out).score(replies)
            # The temperature is one of steps of 1.2 %.
            assert np.allclose(scores[0], scores[2], rtol=2e-2, atol=1e-2 * np.std(scores[0])), name
            assert np.std(scores[0]) > 0.1, "something was learned"


def test_a_base_in_a_folder_is_found_from_any_directory(tmp_path, monkeypatch):
    """Each worker of Ray Train has a directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    for name, base in (("base", str(tmp_path / "base")), ("org/name", "org/name"), ("", "")):
        config = FitRewardConfig(model_name_or_path=name, output_dir="out")
        assert from_anywhere(config).model_name_or_path == base


def test_a_count_of_words_needs_no_workers(pairs, tmp_path):
    given = {"logs": (pairs,), "output_dir": str(tmp_path / "out"), "objective": "ratings"}
    with pytest.raises(UserError, match="--num_workers: expected a transformer"):
        main(FitRewardConfig(model_name_or_path="tfidf", num_workers=2, **given))
