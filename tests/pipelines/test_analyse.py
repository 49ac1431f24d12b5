"""`analyse` on what `simulate` and `converse` write, as a user runs them."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from envs.multiwoz import Options
from pipelines.analyse import AnalyseConfig, main
from pipelines.converse import ConverseConfig
from pipelines.converse import main as converse
from pipelines.simulate import SimulateConfig
from pipelines.simulate import main as simulate
from rl_dialog.errors import UserError


def test_a_worse_system_is_seen_to_be_worse(tmp_path):
    for name, mistakes in (("rule", 0.0), ("worse", 0.4)):
        converse(ConverseConfig(output_dir=str(tmp_path / name), episodes=60, mistakes=mistakes, quiet=True))
    command = [
        sys.executable,
        "-m",
        "pipelines.analyse",
        "--simulated",
        str(tmp_path / "rule"),
        f"bad={tmp_path / 'worse'}",
    ]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "report")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told["success"]) == ["rule", "bad"] and told["differences"]["bad"][2] < 0, (
        "the whole interval is below 0"
    )
    found = json.loads((tmp_path / "report" / "tasks.json").read_text())
    results = json.loads((tmp_path / "worse" / "results.json").read_text())["figures"]
    bad = found["policies"][1]
    for name in results.keys() & bad["figures"].keys():
        assert bad["figures"][name]["value"] == pytest.approx(results[name]["value"], abs=1e-4), name
    assert {"inform_f1_all_slots", "inform_recall", "success/hotel"} <= results.keys() & bad[
        "figures"
    ].keys() and "inform_f1" not in bad["figures"]
    assert (
        bad["figures"]["inform_f1_all_slots/hotel"]["value"]
        < found["policies"][0]["figures"]["inform_f1_all_slots/hotel"]["value"]
    )
    assert (
        bad["missed_bookings"] and "other user options" not in (tmp_path / "report" / "tasks.md").read_text()
    )
    assert sum(bad["failures"].values()) == round(60 * (1 - results["success"]["value"]))
    assert (
        bad["understood"]["system"]
        and "Who succeeds where" in done.stdout
        or (tmp_path / "report" / "tasks.md").read_text()
    )


def test_dialogs_in_acts_and_bad_input(tmp_path):
    simulate(SimulateConfig(output_dir=str(tmp_path / "acts"), episodes=30, quiet=True))
    told = main(
        AnalyseConfig(simulated=(str(tmp_path / "acts"),), output_dir=str(tmp_path / "report"), quiet=True)
    )
    assert told["differences"] == {} and told["success"]["acts"][0] > 0.8
    simulate(
        SimulateConfig(
            output_dir=str(tmp_path / "noisy"), episodes=30, options=Options(noise=0.3), quiet=True
        )
    )
    both = AnalyseConfig(
        simulated=(str(tmp_path / "acts"), str(tmp_path / "noisy")),
        output_dir=str(tmp_path / "report"),
        quiet=True,
    )
    with pytest.raises(UserError, match="already holds a run of `analyse`: pass --overwrite to delete it"):
        main(both)
    main(replace(both, overwrite=True))
    assert (
        "other user options, which are part of every difference between them. acts: the defaults; noisy: "
        "noise 0.3." in (tmp_path / "report" / "tasks.md").read_text(encoding="utf-8")
    )
    for config, message in (
        ({}, "expected --simulated"),
        ({"simulated": ("x",)}, "expected --output_dir"),
        (
            {"simulated": (str(tmp_path),), "output_dir": "x"},
            "expected a folder that simulate or converse wrote",
        ),
        ({"simulated": (str(tmp_path / "acts"),) * 2, "output_dir": "x"}, "two folders are called acts"),
        (
            {"simulated": (str(tmp_path / "acts"),), "output_dir": "x", "replicates": 0},
            "expected --replicates",
        ),
        ({"simulated": (str(tmp_path / "acts"),), "output_dir": "x", "seed": -1}, "expected --seed"),
    ):
        with pytest.raises(UserError, match=message):
            main(AnalyseConfig(**config))
