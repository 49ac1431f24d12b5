"""YAML first, flags second, everything else an error that names the key and the nearest known one."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from rl_dialog.config import (
    ConfigError,
    changed,
    from_dict,
    load_config,
    read_yaml,
    save_config,
    to_dict,
    typed_command,
)
from rl_dialog.run import run

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Method:
    pass


@dataclass(frozen=True)
class Cloning(Method):
    top: float = 1.0


@dataclass(frozen=True)
class Learning(Method):
    tau: float = 0.7
    beta: float = 1.0
    discount: Literal["token", "turn"] = "token"


@dataclass(frozen=True)
class Trainer:
    """How to train."""

    learning_rate: float = 1e-3
    """peak learning rate"""
    max_steps: int = 10
    """updates"""
    bf16: bool = False
    """bfloat16"""


@dataclass(frozen=True)
class Config:
    """What the tests configure."""

    data: str = ""
    """a folder of
    logs"""
    trainer: Trainer = field(default_factory=Trainer)
    method: Method = field(default_factory=Learning)
    rewards: dict[str, float] = field(default_factory=lambda: {"vote": 0.0, "length": 0.0})
    """weights"""
    seed: int = 0
    limit: int | None = None
    kinds: tuple[str, ...] = ()
    shares: tuple[float, float] = (0.1, 0.2)
    anything: dict[str, float] = field(default_factory=dict)


CHOICES = {"method": {"cloning": Cloning, "learning": Learning}}


@pytest.fixture
def load(tmp_path):
    """load("--flag", "value", yaml="...")."""

    def build(*arguments, yaml=None):
        if yaml is not None:
            (tmp_path / "c.yaml").write_text(yaml, encoding="utf-8")
            arguments = ("--config", str(tmp_path / "c.yaml"), *arguments)
        return load_config(Config, arguments, choices=CHOICES)

    return build


def test_defaults(load):
    assert load() == Config()
    assert load(yaml="") == Config()
    assert load(yaml="# only a comment\n") == Config()


def test_yaml_first_flags_second(load):
    config = load(
        "--trainer.max_steps",
        "7",
        "--method.beta",
        "4",
        yaml="trainer: {max_steps: 5, bf16: true}\nmethod: {name: learning, tau: 0.9}\nseed: 3\n",
    )
    assert config == Config(
        trainer=Trainer(max_steps=7, bf16=True), method=Learning(tau=0.9, beta=4.0), seed=3
    )


def test_the_config_flag_may_stand_anywhere_and_the_last_one_wins(load, tmp_path):
    (tmp_path / "first.yaml").write_text("seed: 1\ndata: first\n")
    (tmp_path / "second.yaml").write_text("seed: 2\n")
    config = load(
        "--data", "flag", f"--config={tmp_path}/first.yaml", "--config", str(tmp_path / "second.yaml")
    )
    assert (config.seed, config.data) == (2, "flag")


def test_the_last_of_a_repeated_flag_wins(load):
    assert load("--seed", "1", "--seed", "2").seed == 2
    assert load("--method", "cloning", "--method", "learning").method == Learning()


@pytest.mark.parametrize("flag", ["--trainer.learning_rate", "--trainer.learning-rate"])
@pytest.mark.parametrize("joined", [True, False])
def test_dashes_and_underscores(load, flag, joined):
    arguments = [f"{flag}=0.5"] if joined else [flag, "0.5"]
    assert load(*arguments).trainer.learning_rate == 0.5


def test_a_value_keeps_its_dashes(load):
    assert load("--data", "my-logs/2026-11-20").data == "my-logs/2026-11-20"
    assert load("--data=my-logs").data == "my-logs"


def test_scientific_notation_in_yaml(load):
    """YAML 1.1 reads 1e-4 as a string."""
    assert yaml.safe_load("1e-4") == "1e-4"
    config = load(
        yaml=(
            "trainer: {learning_rate: 1e-4, max_steps: 1e3}\nrewards: {vote: 2e-1}\nmethod: {tau: "
            "9e-1}\nshares: [1e-2, 3e-1]\n"
        )
    )
    assert config.trainer == Trainer(learning_rate=1e-4, max_steps=1000)
    assert isinstance(config.trainer.max_steps, int)
    assert (
        config.rewards["vote"] == 0.2 and config.method == Learning(tau=0.9) and config.shares == (0.01, 0.3)
    )


def test_a_whole_number_for_a_float_field_is_a_float(load):
    config = load(yaml="trainer: {learning_rate: 1}\nrewards: {vote: 2}\n")
    assert isinstance(config.trainer.learning_rate, float) and isinstance(config.rewards["vote"], float)


def test_large_integers_are_exact(load):
    assert load(yaml=f"seed: {2**63 + 1}\n").seed == 2**63 + 1


def test_booleans(load):
    assert load("--trainer.bf16").trainer.bf16 is True
    assert load("--trainer.no-bf16", yaml="trainer: {bf16: true}\n").trainer.bf16 is False
    assert load("--trainer.no_bf16", yaml="trainer: {bf16: true}\n").trainer.bf16 is False


def test_optional_values(load):
    assert load(yaml="limit: 5\n").limit == 5
    assert load(yaml="limit: null\n").limit is None
    assert load("--limit", "6", yaml="limit: 5\n").limit == 6
    assert load("--limit", "None", yaml="limit: 5\n").limit is None


def test_tuples(load):
    assert load(yaml="kinds: [a, b]\nshares: [0.3, 0.4]\n") == Config(kinds=("a", "b"), shares=(0.3, 0.4))
    assert load("--kinds", "a", "b", "--shares", "0.3", "0.4") == Config(kinds=("a", "b"), shares=(0.3, 0.4))


# --- choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["method: cloning\n", "method: {name: cloning}\n"])
def test_a_choice_by_name(load, text):
    assert load(yaml=text).method == Cloning()
    assert load("--method.top", "0.5", yaml=text).method == Cloning(top=0.5)


def test_the_flag_picks_over_the_yaml_and_drops_its_values(load):
    """tau belongs to another method; values of the same method stay."""
    text = "method: {name: learning, tau: 0.9}\n"
    assert load("--method", "cloning", yaml=text).method == Cloning()
    assert load("--method=learning", yaml=text).method == Learning(tau=0.9)


def test_values_without_a_name_belong_to_the_default_choice(load):
    assert load(yaml="method: {tau: 0.9}\n").method == Learning(tau=0.9)


# --- dictionaries -------------------------------------------------------------------------------------------


def test_flags_of_a_dictionary(load):
    assert load("--rewards.vote", "1").rewards == {"vote": 1.0, "length": 0.0}
    assert load("--rewards.vote=-1.5", "--rewards.length", "2", yaml="rewards: {vote: 9}\n").rewards == {
        "vote": -1.5,
        "length": 2.0,
    }
    assert Config().rewards == {"vote": 0.0, "length": 0.0}  # no default was changed on the way


def test_what_was_changed(load):
    """Only what differs from the defaults, choices by their type: a field that a later version adds changes
    nothing."""
    assert changed(Config()) == {}
    config = load("--rewards.vote", "1", "--method", "cloning", "--trainer.learning_rate", "0.5")
    assert changed(config) == {
        "rewards": {"vote": 1.0},
        "method": {"type": "Cloning"},
        "trainer": {"type": "Trainer", "learning_rate": 0.5},
    }
    assert changed(load("--method.tau", "0.9"))["method"]["tau"] == 0.9


def test_names_of_the_user_s_own(load):
    """`module:function`, as flags and in YAML; anything else unknown stays an error."""
    given = load(
        "--rewards.my_module:kind",
        "0.5",
        "--rewards.a.b:c=-1",
        "--rewards.vote",
        "2",
        yaml="rewards: {other:kind: 3, length: 1}\n",
    )
    assert given.rewards == {
        "vote": 2.0,
        "length": 1.0,
        "my_module:kind": 0.5,
        "a.b:c": -1.0,
        "other:kind": 3.0,
    }
    for wrong in ("my module:kind", "my_module:", ":kind", "my_module:2"):
        with pytest.raises(ConfigError, match="unknown flag"):
            load(f"--rewards.{wrong}", "1")


def test_a_dictionary_in_yaml_is_laid_over_the_default(load):
    assert load(yaml="rewards: {length: 3}\n").rewards == {"vote": 0.0, "length": 3.0}


def test_a_dictionary_without_default_keys_takes_any(load):
    assert load(yaml="anything: {x: 1}\n").anything == {"x": 1.0}


# --- errors -------------------------------------------------------------------------------------------------

WRONG_YAML = [
    ("sead: 1\n", ["c.yaml", "unknown key 'sead'", "Did you mean seed?"]),
    ("trainer: {max_step: 1}\n", ["trainer", "unknown key 'max_step'", "Did you mean max_steps?"]),
    ("method: {name: learning, top: 1}\n", ["method", "unknown key 'top'", "Learning"]),
    (
        "method: {name: learnin}\n",
        ["unknown method 'learnin'", "expected one of cloning, learning", "Did you mean learning?"],
    ),
    ("method: {name: 5}\n", ["unknown method '5'", "expected one of cloning, learning"]),
    ("method: 5\n", ["c.yaml", "expected a name or keys and values for method, got 5"]),
    ("rewards: {votes: 1}\n", ["unknown key 'votes' in rewards", "Did you mean vote?"]),
    ("rewards: {2026-01-01: 1}\n", ["unknown key datetime.date(2026, 1, 1) in rewards"]),
    (f"rewards: {{vote: 1{'0' * 400}}}\n", ["expected a number below 1.8e308 for rewards.vote"]),
    ("1: 2\n", ["unknown key 1"]),
    ("xyzzy: 2\n", ["unknown key 'xyzzy' for Config."]),
    ("trainer: {max_steps: four}\n", ["c.yaml: trainer", "expected a number for max_steps, got 'four'"]),
    ("trainer: {max_steps: 4.5}\n", ["expected int for max_steps, got 4.5"]),
    ("trainer: {max_steps: .inf}\n", ["expected int for max_steps, got inf"]),
    ("trainer: {max_steps: true}\n", ["expected int for max_steps, got True"]),
    ("trainer: {learning_rate: fast}\n", ["expected a number for learning_rate, got 'fast'"]),
    ("trainer: {learning_rate: [1]}\n", ["expected float for learning_rate, got [1]"]),
    ("trainer: {learning_rate: false}\n", ["expected float for learning_rate, got False"]),
    ("trainer: {bf16: 1}\n", ["expected bool for bf16, got 1"]),
    ("trainer: {bf16: 'no'}\n", ["expected bool for bf16, got 'no'"]),
    ("trainer: 3\n", ["expected keys and values for trainer, got 3"]),
    ("trainer:\n", ["expected keys and values for trainer, got None"]),
    (
        "method: {discount: tokn}\n",
        ["expected discount to be one of token, turn, got 'tokn'", "Did you mean token?"],
    ),
    ("data: 5\n", ["expected str for data, got 5"]),
    ("data:\n", ["expected str for data, got None"]),
    ("limit: many\n", ["expected a number for limit, got 'many'"]),
    ("kinds: a\n", ["expected tuple for kinds, got 'a'"]),
    ("kinds: [1]\n", ["expected str for kinds, got 1"]),
    ("shares: [0.1]\n", ["expected 2 values for shares, got [0.1]"]),
    ("rewards: {vote: much}\n", ["expected a number for rewards.vote, got 'much'"]),
    ("rewards: 5\n", ["expected dict for rewards, got 5"]),
    ("- 1\n", ["c.yaml", "expected keys and values at the top, got list"]),
    ("a: [\n", ["c.yaml", "expected YAML"]),
    ("a: 2026-13-45\n", ["c.yaml", "expected YAML", "month must be in 1..12"]),
    ("data: {{ run }}\n", ["c.yaml", "expected a name as a key, found a mapping", "line 1"]),
    ("? [a, b]\n: 1\n", ["c.yaml", "expected a name as a key, found a sequence"]),
    ("a: 1\nb: 2\na: 3\n", ["c.yaml", "expected every key once, found 'a' again", "line 3"]),
]
WRONG_FLAGS = [
    (["runs/bc"], ["expected a flag before every value, got 'runs/bc'", "--help"]),
    (["--sead", "1"], ["unknown flag --sead", "Did you mean --seed?", "--help"]),
    (["--sead=1"], ["unknown flag --sead.", "Did you mean --seed?"]),
    (
        ["--trainer.learning-rat", "1"],
        ["unknown flag --trainer.learning_rat.", "Did you mean --trainer.learning_rate?"],
    ),
    (["--method.tua", "1"], ["unknown flag --method.tua", "Did you mean --method.tau?"]),
    (["--method", "cloning", "--method.tau", "1"], ["unknown flag --method.tau"]),
    (
        ["--method", "clonning"],
        ["unknown method 'clonning'", "expected one of cloning, learning", "Did you mean cloning?"],
    ),
    (["--rewards.votes", "1"], ["unknown flag --rewards.votes", "Did you mean --rewards.vote?"]),
    (["--rewards.vote", "much"], ["expected a number for --rewards.vote, got 'much'"]),
    (["--method="], ["unknown method ''", "expected one of cloning, learning"]),
    (["--method", "learning", "--method", ""], ["unknown method ''"]),
    (["--config="], ["cannot read the config file ''"]),
    (["--config"], ["expected a value after --config, got nothing"]),
    (["--method"], ["expected a value after --method, got nothing"]),
    (
        ["--config", "/no/such/file.yaml"],
        ["cannot read the config file '/no/such/file.yaml'", "No such file"],
    ),
]


def test_yaml_takes_over_keys_from_elsewhere(tmp_path):
    """By its merge key; those that stand beside it win."""
    (tmp_path / "c.yaml").write_text(
        "small: &small {layers: 1, width: 32}\n"
        "wide: &wide {<<: *small, width: 64}\n"
        "wider: {<<: *wide, width: 128}\n"
    )
    values = read_yaml(str(tmp_path / "c.yaml"))
    assert values["wide"] == {"layers": 1, "width": 64}
    assert values["wider"] == {"layers": 1, "width": 128}


def test_a_config_that_came_with_the_package_is_found_by_its_path(tmp_path, monkeypatch):
    """Who installed the package and copies a command of a page is told where its file is."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="No such file or directory; the one that came .*/tune_configs/sweep_kl"
    ):
        read_yaml("tune_configs/sweep_kl.yaml")
    with pytest.raises(ConfigError, match="cannot read the config file 'nowhere.yaml': [^;]*$"):
        read_yaml("nowhere.yaml")
    (tmp_path / "latin1.yaml").write_bytes("title: Größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="expected UTF-8 text"):
        read_yaml("latin1.yaml")


@pytest.mark.parametrize(("text", "parts"), WRONG_YAML, ids=[text.strip() for text, _ in WRONG_YAML])
def test_wrong_yaml(load, text, parts):
    with pytest.raises(ConfigError) as error:
        load(yaml=text)
    for part in parts:
        assert part in str(error.value), error.value


@pytest.mark.parametrize(
    ("arguments", "parts"), WRONG_FLAGS, ids=[" ".join(arguments) for arguments, _ in WRONG_FLAGS]
)
def test_wrong_flags(load, arguments, parts):
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    for part in parts:
        assert part in str(error.value), error.value


@pytest.mark.parametrize(
    "arguments", [["--seed", "four"], ["--method.discount", "tokn"], ["--shares", "0.1"]]
)
def test_flags_of_the_wrong_type_exit_with_status_two(load, arguments, capsys):
    with pytest.raises(SystemExit) as end:
        load(*arguments)
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert arguments[0].removeprefix("--") in shown.out + shown.err


def test_help_lists_every_flag_with_its_default_and_meaning(load, capsys):
    with pytest.raises(SystemExit) as end:
        load("--help")
    assert end.value.code in (0, None)
    text = capsys.readouterr().out
    for part in ("--trainer.learning", "peak learning rate", "0.001", "--method.tau", "0.7", "{token,turn}"):
        assert part in text, part
    assert "a folder of logs" in text, "no line ends where one of the source does"


# --- round trips --------------------------------------------------------------------------------------------


def test_a_saved_config_loads_equal(load, tmp_path):
    config = Config(
        data="logs/日本: #1",
        trainer=Trainer(learning_rate=1e-5, max_steps=3, bf16=True),
        method=Cloning(top=0.25),
        rewards={"vote": 1e-7, "length": -2.0},
        seed=11,
        limit=4,
        kinds=("a", "no", "1"),
        shares=(0.0, 0.5),
        anything={"x": 1.5},
    )
    save_config(config, tmp_path / "saved.yaml", choices=CHOICES)
    assert load("--config", str(tmp_path / "saved.yaml")) == config
    assert load("--config", str(tmp_path / "saved.yaml"), "--seed", "12").seed == 12
    save_config(Config(), tmp_path / "default.yaml", choices=CHOICES)
    assert load("--config", str(tmp_path / "default.yaml")) == Config()


def test_to_dict_names_the_choice():
    assert to_dict(Config(method=Cloning()), choices=CHOICES)["method"] == {"name": "cloning", "top": 1.0}
    assert to_dict(Config(), choices=CHOICES)["shares"] == [0.1, 0.2]


@pytest.mark.parametrize("method", ["bc", "kl_control", "ilql"])
def test_the_real_methods_survive_a_round_trip(method, tmp_path):
    from rl_dialog.methods import METHODS
    from rl_dialog.methods.method import Method as RealMethod

    @dataclass(frozen=True)
    class Run:
        method: RealMethod = field(default_factory=METHODS["bc"])

    Run.__annotations__["method"] = RealMethod
    choices = {"method": METHODS}
    config = load_config(
        Run, ["--method", method, *(["--method.gamma", "0.5"] if method != "bc" else [])], choices=choices
    )
    assert type(config.method) is METHODS[method] and (method == "bc" or config.method.gamma == 0.5)
    save_config(config, tmp_path / "run.yaml", choices=choices)
    assert load_config(Run, ["--config", str(tmp_path / "run.yaml")], choices=choices) == config


def test_from_dict_names_the_place():
    with pytest.raises(ConfigError, match="^here: unknown key 'tua' for Learning. Did you mean tau"):
        from_dict(Learning, {"tua": 1}, where="here")
    assert from_dict(Learning, {"tau": "5e-1"}, where="here") == Learning(tau=0.5)


def test_a_missing_required_field_is_named():
    @dataclass(frozen=True)
    class Needs:
        out: str

    with pytest.raises(ConfigError, match="here: .*'out'"):
        from_dict(Needs, {}, where="here")


def test_a_command_can_be_typed_again(load):
    config = Config(data="my logs", seed=3)
    command = typed_command("train", config, ("data", "seed", "limit"))
    assert command == "python -m pipelines.train --data 'my logs' --seed 3"
    assert load(*shlex.split(command)[3:]) == config


# --- run ----------------------------------------------------------------------------------------------------


def test_run_prints_the_result_as_the_last_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipelines/x.py", "--seed", "5"])
    run(Config, lambda config: {"seed": config.seed, "out": Path("über/x")}, choices=CHOICES)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"seed": 5, "out": "über/x"}


def test_run_makes_an_error_one_paragraph_and_status_two(monkeypatch, capsys):
    monkeypatch.delenv("RL_DIALOG_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["pipelines/x.py", "--sead", "5"])
    with pytest.raises(SystemExit) as end:
        run(Config, lambda config: {}, choices=CHOICES)
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert (
        "error: unknown flag --sead. Did you mean --seed?" in shown.err
        and "Traceback" not in shown.err
        and shown.out == ""
    )
    monkeypatch.setenv("RL_DIALOG_DEBUG", "1")
    with pytest.raises(ConfigError):
        run(Config, lambda config: {}, choices=CHOICES)


def test_programming_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pipelines/x.py"])
    with pytest.raises(ZeroDivisionError):
        run(Config, lambda config: {"x": 1 / 0}, choices=CHOICES)


def test_importing_the_config_is_light():
    """`--help` of any pipeline starts here: neither torch nor ray nor tyro."""
    code = (
        "import sys; import rl_dialog.config; print(sorted({'torch', 'ray', 'tyro', 'transformers'} & "
        "set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (
            ("--trainer.learning_rate", "inf"),
            "",
            "flags: expected a finite number for --trainer.learning_rate, got inf",
        ),
        (("--method.tau", "nan"), "", "flags: expected a finite number for --method.tau, got nan"),
        (("--shares", "0.1", "-inf"), "", "flags: expected a finite number for --shares, got -inf"),
        (("--rewards.vote=nan",), "", "expected a finite number for rewards.vote, got nan"),
        ((), "method: {beta: .inf}", "c.yaml: method: expected a finite number for beta, got inf"),
        ((), "anything: {depth: .nan}", "c.yaml: expected a finite number for anything.depth, got nan"),
    ],
)
def test_numbers_are_finite(load, arguments, text, message):
    with pytest.raises(ConfigError) as error:
        load(*arguments, yaml=text or None)
    assert message in str(error.value)
