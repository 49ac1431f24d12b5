"""A checkpoint directory is the policy: what is written is what is loaded, by us and by plain transformers,
and damage is named."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_dialog.config import ConfigError
from rl_dialog.data.batch import collate
from rl_dialog.data.files import write_atomically, write_json, write_text_atomically
from rl_dialog.errors import UserError
from rl_dialog.methods import BC, ILQL, UtteranceILQL, WayOffPolicy
from rl_dialog.models.checkpoint import (
    freeze_prior,
    load_policy,
    load_prior,
    method_name,
    read_method,
    resolve,
    save_policy,
    start_of,
)
from rl_dialog.models.policy import Policy

IDS = torch.tensor([[3, 77, 78, 79, 1, 4, 80]])
STEERED = [
    (family, heads, trunk, "shared")
    for family in ("gpt2", "llama")
    for heads in ("mlp", "lowrank")
    for trunk in ("shared", "separate")
]
STEERED += [
    ("gpt2", "advanced_mlp", "shared", "shared"),
    ("gpt2", "mlp", "shared", "separate"),
    ("llama", "lowrank", "separate", "separate"),
]  # the last one is the target trunk
SAFE = {".safetensors", ".json", ".yaml", ".txt", ".md", ".jinja"}


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def saved(make_policy, tmp_path):
    """An ILQL policy and its directory."""
    policy = make_policy(ILQL(beta=2.0, tau=0.9))
    save_policy(policy, tmp_path / "checkpoint")
    return policy, tmp_path / "checkpoint"


# --- round trips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "heads", "trunk", "target"), STEERED)
def test_a_steered_policy_comes_back(make_policy, tmp_path, family, heads, trunk, target):
    """Logits, every tensor and the method; not by way of the same seed."""
    policy = make_policy(ILQL(beta=3.5, top_k=7, tau=0.8), family, heads=heads, trunk=trunk, target=target)
    policy.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = Policy.from_pretrained(tmp_path)
    assert loaded.method == policy.method == ILQL(beta=3.5, top_k=7, tau=0.8)
    assert not loaded.training
    close(logits(loaded), logits(policy))
    mine, theirs = policy.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    shape = loaded.model_config
    assert (shape.heads, shape.rank, shape.value_trunk, shape.target_trunk) == (heads, 4, trunk, target)
    options = {"do_sample": False, "max_new_tokens": 6}
    assert torch.equal(loaded.generate(IDS, **options), policy.generate(IDS, **options))


@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_values_of_whole_replies_come_back(make_policy, make_row, tmp_path, trunk):
    """The heads that choose among replies are in the checkpoint, their targets too."""
    policy = make_policy(UtteranceILQL(num_generations=3), trunk=trunk)
    policy.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = Policy.from_pretrained(tmp_path)
    assert loaded.method == UtteranceILQL(num_generations=3)
    batch = collate([make_row([3, 70, 4, 71, 1], [(3, 4, 1.0)])])
    mine, theirs = policy.outputs(batch), loaded.outputs(batch)
    for name in ("utterance_q", "utterance_q_target"):
        assert [values.tolist() for values in getattr(mine, name)] == [
            values.tolist() for values in getattr(theirs, name)
        ]
    assert torch.equal(mine.v, theirs.v)


@pytest.mark.parametrize(
    "method", [BC(), WayOffPolicy(c=0.25, backup="max", coefficient="kl")], ids=["bc", "way_off_policy"]
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_plain_policy_comes_back(make_policy, tmp_path, family, method):
    policy = make_policy(method, family).start_training()
    policy.save_pretrained(tmp_path)
    loaded = Policy.from_pretrained(tmp_path)
    assert loaded.method == method and loaded.lm_target is None
    close(logits(loaded), logits(policy))


@pytest.mark.slow
def test_plain_transformers_loads_the_policy_in_a_fresh_process(make_policy, tmp_path, tokenizer):
    """bc and way_off_policy act by their LM alone: AutoModelForCausalLM, in a process without us, gives the
    policy's logits and replies."""
    wanted = {}
    for name, method, family in (("bc", BC(), "gpt2"), ("way_off_policy", WayOffPolicy(), "llama")):
        policy = make_policy(method, family)
        policy.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        torch.manual_seed(0)
        wanted[name] = (
            logits(policy).flatten()[:50],
            policy.generate(IDS, do_sample=False, max_new_tokens=5)[0].tolist(),
        )
    code = f"""
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {{}}
for name in {list(wanted)}:
    model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + name).eval()
    ids = torch.tensor({IDS.tolist()})
    with torch.no_grad():
        found[name] = model(ids).logits.flatten()[:50].tolist(), \
model.generate(ids, do_sample=False, max_new_tokens=5)[0].tolist()
    assert AutoTokenizer.from_pretrained({str(tmp_path)!r} + "/" + name).chat_template
assert not any(module.startswith("rl_dialog") for module in sys.modules)
print(json.dumps(found))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for name, (numbers, replies) in wanted.items():
        close(torch.tensor(found[name][0]), numbers)
        assert found[name][1] == replies


def test_a_plain_model_directory_is_behaviour_cloning(make_policy, tmp_path):
    lm = make_policy(BC()).lm
    lm.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.method == BC()
    close(logits(loaded), logits(lm))


def test_decoding_can_be_replaced(saved):
    policy, directory = saved
    loaded = load_policy(directory, method=ILQL(beta=0.0))
    close(logits(loaded), logits(policy.lm).log_softmax(-1))
    assert not torch.allclose(logits(loaded), logits(policy), atol=1e-2)


@pytest.mark.parametrize(
    ("family", "method", "heads", "trunk"),
    [("gpt2", WayOffPolicy(), "mlp", "shared"), ("llama", ILQL(), "lowrank", "separate")],
)
def test_adapters_come_back_merged(make_policy, tmp_path, family, method, heads, trunk):
    """The checkpoint is the adapters beside their model, opened they are one; the policy that wrote it goes
    on with its adapters on and its base untouched."""
    policy = make_policy(method, family, heads=heads, trunk=trunk, peft=True)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    steered = logits(policy)
    with policy.without_adapters():
        assert not torch.allclose(logits(policy), steered, atol=1e-2)
    policy.save_pretrained(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert torch.equal(logits(policy), steered)
    loaded = Policy.from_pretrained(tmp_path)
    assert not any("lora" in name for name in loaded.state_dict())
    torch.testing.assert_close(logits(loaded), steered, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(policy.lm), rtol=1e-4, atol=1e-4
    )


def test_a_models_own_settings_for_generation_stay_out(make_policy, tokenizer, tmp_path):
    """A penalty would be part of what it says, and of no probability that is measured or learned."""
    lm = make_policy(BC()).lm
    lm.generation_config.repetition_penalty, lm.generation_config.temperature = 5.0, 0.3
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = load_policy(tmp_path).generation_config
    assert found.repetition_penalty in (None, 1.0) and found.temperature in (None, 1.0) and found.do_sample
    assert found.eos_token_id == lm.generation_config.eos_token_id


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_weights_are_written_once(make_policy, tmp_path, family, peft):
    """The output layer is the input embedding: one tensor of vocabulary x width in the file."""
    policy = make_policy(BC(), family, peft=peft)
    policy.save_pretrained(tmp_path)
    path = tmp_path / ("base/model.safetensors" if peft else "model.safetensors")
    shapes = [tuple(value.shape) for value in load_file(path).values()]
    assert shapes.count((policy.config.vocab_size, 32)) == 1


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "lora"])
def test_no_file_is_a_pickle(make_policy, tmp_path, tokenizer, peft):
    policy = make_policy(ILQL(), trunk="separate", peft=peft)
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "heads.safetensors",
        "rl_dialog.yaml",
        "tokenizer.json",
    } <= {p.name for p in files}
    for path in files:
        assert path.suffix in SAFE, path
        assert path.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), path


def test_the_description_is_readable_and_complete(saved):
    _, directory = saved
    description = yaml.safe_load((directory / "rl_dialog.yaml").read_text())
    assert (
        description["method"]["name"] == "ilql"
        and description["method"]["tau"] == 0.9
        and description["method"]["beta"] == 2.0
    )
    assert description["model"] == {
        "heads": "mlp",
        "rank": 4,
        "value_trunk": "shared",
        "target_trunk": "shared",
    }
    assert read_method(directory) == ILQL(beta=2.0, tau=0.9)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 1 and generation["pad_token_id"] == 0 and generation["top_k"] == 0


def test_method_names_are_those_of_the_registry():
    assert [method_name(m) for m in (BC(), WayOffPolicy(), ILQL())] == ["bc", "way_off_policy", "ilql"]


# --- damage -------------------------------------------------------------------------------------------------


def refused(directory, *parts, **options):
    """Loading raises a ValueError (one a user sees as a paragraph) that says all of this."""
    with pytest.raises(UserError) as error:
        load_policy(directory, **options)
    for part in parts:
        assert part in str(error.value), f"expected {part!r} in {error.value}"


def test_another_method_s_checkpoint(saved):
    _, directory = saved
    refused(directory, str(directory), "trained with ilql, expected way_off_policy", method=WayOffPolicy())


def test_missing_heads(saved):
    _, directory = saved
    (directory / "heads.safetensors").unlink()
    refused(directory, "heads.safetensors: expected the heads of method ilql, found no such file")


@pytest.mark.parametrize("damage", ["nonsense", "empty", "cut"])
def test_damaged_heads(saved, damage):
    _, directory = saved
    path = directory / "heads.safetensors"
    path.write_bytes(
        {"nonsense": b"not safetensors at all", "empty": b"", "cut": path.read_bytes()[:-100]}[damage]
    )
    refused(directory, "heads.safetensors: expected the heads of ilql in safetensors format, got:")


@pytest.mark.parametrize("damage", ["nonsense", "empty", "cut"])
def test_a_damaged_model(saved, damage):
    _, directory = saved
    path = directory / "model.safetensors"
    path.write_bytes(
        {"nonsense": b"not safetensors at all", "empty": b"", "cut": path.read_bytes()[:-100]}[damage]
    )
    refused(
        directory,
        f"cannot load a policy from {str(directory)!r}: expected a checkpoint directory or a hub name",
    )


def test_heads_of_another_shape(saved):
    _, directory = saved
    path = directory / "heads.safetensors"
    save_file(
        {name: value[:1].contiguous() if value.dim() else value for name, value in load_file(path).items()},
        path,
    )
    refused(directory, "heads.safetensors: expected the heads of ilql", "size mismatch")


def test_some_heads_missing_or_foreign(saved):
    _, directory = saved
    path = directory / "heads.safetensors"
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if ".v." not in name}, path)
    refused(directory, "missing ['heads.v.inner.weight'")
    save_file(tensors | {"heads.extra": torch.zeros(1)}, path)
    refused(directory, "unexpected ['heads.extra']")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("format: 2\n", ["expected a checkpoint of format 1, got", "'format': 2"]),
        ("just words\n", ["expected a checkpoint of format 1, got 'just words'"]),
        ("format: 1\nmethod: {name: dqn}\n", ["unknown method 'dqn': expected one of ", "kl_control"]),
        ("format: 1\nmethod: {name: ilql, tua: 0.5}\n", ["unknown key 'tua'", "Did you mean tau?"]),
        (
            "format: 1\nmethod: {name: ilql}\nmodel: {headz: mlp}\n",
            ["unknown key 'headz'", "Did you mean heads?"],
        ),
        ("format: 1\nmethod: {name: ilql", ["expected YAML"]),
    ],
)
def test_a_damaged_description(saved, text, parts):
    _, directory = saved
    (directory / "rl_dialog.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        load_policy(directory)
    assert "rl_dialog.yaml" in str(error.value)
    for part in parts:
        assert part in str(error.value), f"expected {part!r} in {error.value}"


def test_no_checkpoint(tmp_path, monkeypatch):
    refused(
        "no-such-model-of-anyone",
        "cannot load a policy from 'no-such-model-of-anyone': expected a checkpoint directory or a hub name",
    )
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (
        "/no/such/checkpoint",
        "runs/missing",
        "./missing",
        "a/b/c",
    ):  # no hub is asked for what is meant as a path
        refused(
            path,
            f"{path}: expected a directory with a model (or a hub name such as owner/model), found nothing "
            "there",
        )


def test_a_damaged_config(saved):
    _, directory = saved
    (directory / "config.json").write_text("{")
    refused(directory, "cannot load a policy from")


# --- run folders and priors ---------------------------------------------------------------------------------


def test_a_run_folder_is_its_best_checkpoint(saved):
    policy, directory = saved
    run = directory.parent
    with pytest.raises(
        UserError,
        match=(
            r"expected a checkpoint \(config.json\) or a run folder \(best, latest\), found \['checkpoint'\]"
        ),
    ):
        resolve(run)
    (run / "latest").write_text("checkpoint-9\n")
    assert resolve(run) == str(run / "checkpoint-9")
    (run / "best").write_text("checkpoint\n")
    assert resolve(run) == str(directory)
    assert resolve(directory) == str(directory)
    assert resolve("some-org/some-model") == "some-org/some-model"
    close(logits(load_policy(run)), logits(policy))


def test_the_prior_is_found_beside_the_checkpoint(make_policy, tmp_path, tokenizer):
    """Its path is relative to the checkpoint, so a copied run folder still works."""
    policy = make_policy(WayOffPolicy())
    prior = freeze_prior(policy, tmp_path / "run/prior", tokenizer)
    with torch.no_grad():
        for p in policy.lm.parameters():
            p.add_(0.1)
    save_policy(policy, tmp_path / "run/checkpoint-1", prior="../prior")
    (tmp_path / "run").rename(tmp_path / "moved")
    loaded = load_prior(tmp_path / "moved/checkpoint-1")
    close(logits(loaded.members[0]), logits(prior.members[0]))
    assert not torch.allclose(logits(loaded.members[0]), logits(policy), atol=1e-2)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    for path in (tmp_path / "moved/prior").iterdir():
        path.unlink()
    (tmp_path / "moved/prior").rmdir()
    with pytest.raises(
        UserError, match="expected the frozen prior at .*prior, found nothing; copy the run's `prior` folder"
    ):
        load_prior(tmp_path / "moved/checkpoint-1")


def test_no_prior_is_none(saved):
    assert load_prior(saved[1]) is None


@pytest.fixture
def members(make_policy, tmp_path):
    """A checkpoint, and a run folder whose best one is another model."""
    save_policy(make_policy(BC(), seed=1), tmp_path / "first")
    save_policy(make_policy(BC(), "llama", seed=2), tmp_path / "run/checkpoint-3")
    (tmp_path / "run/best").write_text("checkpoint-3\n")
    return [str(tmp_path / "first"), str(tmp_path / "run")]


def prior_logp(prior, make_row):
    return prior.prior_logp(collate([make_row([3, 70, 4, 71, 1], [(3, 4, 1.0)])]))


def test_an_averaged_prior_comes_back_with_its_weights(make_policy, make_row, tmp_path, tokenizer, members):
    """Two models and their shares, from files of plain transformers; a resumed run and an evaluation find the
    same average."""
    policy = make_policy(WayOffPolicy())
    prior = freeze_prior(policy, tmp_path / "out/prior", tokenizer, checkpoints=members, weights=(1.0, 3.0))
    assert prior.weights == (0.25, 0.75)
    close(logits(prior.members[1]), logits(load_policy(members[1])))
    save_policy(policy, tmp_path / "out/checkpoint-1", prior="../prior")
    expected = prior_logp(prior, make_row)
    for loaded in (
        load_prior(tmp_path / "out/checkpoint-1"),
        freeze_prior(policy, tmp_path / "out/prior", tokenizer, checkpoints=members, weights=(1.0, 3.0)),
    ):
        assert loaded.weights == (0.25, 0.75)
        close(prior_logp(loaded, make_row), expected)
    assert not any(path.suffix not in SAFE for path in (tmp_path / "out/prior").rglob("*") if path.is_file())


def test_one_checkpoint_as_the_prior_is_that_model(make_policy, make_row, tmp_path, tokenizer, members):
    policy = make_policy(WayOffPolicy())
    prior = freeze_prior(policy, tmp_path / "out/prior", tokenizer, checkpoints=members[:1])
    save_policy(policy, tmp_path / "out/checkpoint-1", prior="../prior")
    loaded = load_prior(tmp_path / "out/checkpoint-1")
    close(logits(loaded.members[0]), logits(load_policy(members[0])))
    close(prior_logp(loaded, make_row), prior_logp(prior, make_row))
    assert not torch.allclose(logits(loaded.members[0]), logits(policy), atol=1e-2)
    assert (tmp_path / "out/prior/model.safetensors").is_file()  # one model is a model directory


def test_a_prior_of_another_vocabulary_is_refused(make_policy, tmp_path, tokenizer, members):
    policy = make_policy(WayOffPolicy())
    size = policy.config.vocab_size
    policy.lm.resize_token_embeddings(size + 5)
    with pytest.raises(
        UserError, match=f"expected a prior with the policy's {size + 5} tokens, got {size} in .*first"
    ):
        freeze_prior(policy, tmp_path / "out/prior", tokenizer, checkpoints=members[:1])
    assert not (tmp_path / "out/prior").exists()


@pytest.mark.slow
def test_the_prior_of_another_run_is_replaced_while_nothing_was_learned_with_it(
    make_policy, make_row, tmp_path, tokenizer, members
):
    """A run was killed before its first checkpoint and left its prior; the next one in its folder has
    another."""
    policy, folder = make_policy(WayOffPolicy()), tmp_path / "out/prior"
    wanted = {
        "another model": {"checkpoints": members[1:]},
        "one of 1 models instead of 2": {"checkpoints": members, "weights": (1.0, 3.0)},
        r"one with the weights \[0.25, 0.75\] instead of \[0.5, 0.5\]": {"checkpoints": members},
        r"one of another model \(number 1\)": {"checkpoints": members[::-1]},
        "one of 2 models instead of 1": {},
    }
    freeze_prior(policy, folder, tokenizer, checkpoints=members[:1])
    for found, prior in wanted.items():
        with pytest.raises(
            UserError,
            match=(
                f"prior: expected the prior of this run, .*, found {found}, with which the run's checkpoints "
                "were trained"
            ),
        ):
            freeze_prior(policy, folder, tokenizer, **prior, started=True)
        with pytest.warns(
            UserWarning,
            match=(
                rf"prior held another prior \({found}\) of a run that wrote no checkpoint: it is replaced by"
            ),
        ):
            fresh = freeze_prior(policy, folder, tokenizer, **prior)
        save_policy(policy, tmp_path / "out/checkpoint-1", prior="../prior")
        close(prior_logp(load_prior(tmp_path / "out/checkpoint-1"), make_row), prior_logp(fresh, make_row))
        with warnings.catch_warnings():  # the same one is kept without a word, checkpoints or not
            warnings.simplefilter("error")
            freeze_prior(policy, folder, tokenizer, **prior, started=True)
            freeze_prior(policy, folder, tokenizer, **prior)


def test_a_lora_policy_may_have_another_prior_than_its_own_model(make_policy, tmp_path, tokenizer, members):
    policy = make_policy(WayOffPolicy(), peft=True)
    prior = freeze_prior(policy, tmp_path / "out/prior", tokenizer, checkpoints=members)
    assert len(prior.members) == 2
    again = freeze_prior(policy, tmp_path / "out/prior", tokenizer, checkpoints=members)
    assert len(again.members) == 2


def test_freezing_a_lora_policy_writes_the_lm_and_copies_nothing(make_policy, tmp_path, tokenizer):
    policy = make_policy(WayOffPolicy(), peft=True, spread=0.0)  # adapters as they are made: no effect yet
    assert freeze_prior(policy, tmp_path / "prior", tokenizer) is None
    assert (
        freeze_prior(policy, tmp_path / "prior", tokenizer, started=True) is None
    )  # a resumed run finds what it wrote
    with policy.without_adapters():
        close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "prior")), logits(policy))


# --- atomic writes ------------------------------------------------------------------------------------------


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "checkpoint"

    def half(directory: Path) -> None:
        (directory / "a").write_text("new")
        assert not target.exists() or (target / "a").read_text() == "old"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, half)
    assert not target.exists()
    write_atomically(target, lambda directory: (directory / "a").write_text("old"))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, half)
    assert (target / "a").read_text() == "old"
    write_atomically(
        target, lambda directory: (directory / "b").write_text("third")
    )  # what the killed write left does not get in
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_small_files_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    write_text_atomically(path, "checkpoint-1")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomically(path, "checkpoint-2")
    assert path.read_text() == "checkpoint-1"


def test_json_has_no_nan(tmp_path):
    """NaN and infinity are not JSON: null, at any depth."""
    write_json(tmp_path / "m.json", {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": "café"})
    text = (tmp_path / "m.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "a": None,
        "b": [None, None, 1.5],
        "c": "café",
    }
    assert "café" in text and text.endswith("\n")


def test_config_errors_are_value_errors():
    assert issubclass(ConfigError, ValueError)


def test_the_unit_of_values_and_where_the_model_began_come_back(make_policy, tokenizer, tmp_path):
    """A model that began here stays one that began here; a directory that is not ours is a pretrained one."""
    policy = make_policy(ILQL())
    policy.value_unit = 12.5
    save_policy(policy, tmp_path / "ours")
    again = Policy.from_pretrained(tmp_path / "ours")
    assert again.value_unit == 12.5 and again.start == "made" and policy.start == "new"
    (tmp_path / "ours" / "rl_dialog.yaml").unlink()
    assert start_of(tmp_path / "ours") == "pretrained"
