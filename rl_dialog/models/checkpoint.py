"""The checkpoint directory *is* the LM's `from_pretrained` directory; what is ours stands beside it.

    config.json model.safetensors generation_config.json     the LM, or with LoRA instead of it
    adapter_config.json adapter_model.safetensors             its adapters, as peft writes and loads them
    tokenizer.json ... chat_template.jinja                    the tokenizer
    rl_dialog.yaml                                            method, heads, where the frozen prior is, how
                                                              long its rows were
    heads.safetensors                                         Q, target and V heads, separate value and target
                                                              trunks, and the values that steer (steering.py)
    README.md metrics.json                                    model card, figures at this step
    trainer/                                                  everything resume needs (training/loop.py)

No file here is a pickle and none is ever loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from rl_dialog.config import choice_class, choice_name, from_dict
from rl_dialog.data.files import write_atomically, write_json
from rl_dialog.data.tokenize import require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.methods import METHODS, Method
from rl_dialog.models.causal_lm import BASE, base_of_adapter, is_model, open_causal_lm
from rl_dialog.models.language_model import ModelConfig
from rl_dialog.models.policy import Lengths, Policy
from rl_dialog.models.prior import Prior
from rl_dialog.models.steering import Steering

FORMAT = 1
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # eight times as fast, where PyYAML was built with it
PRIOR_WEIGHTS = (  # of a prior that averages several models, in the folders member-0, member-1, ...
    "weights.json"
)
# Parts of a policy that heads.safetensors holds.
BESIDE_THE_LM = ("heads.", "value_trunk.", "target_trunk.", "steering.")


def method_name(method: Method) -> str:
    """The key of METHODS, or module:Class."""
    return choice_name(method, METHODS)


def save_policy(policy: Policy, directory: Path, *, prior: str | None = None) -> None:
    """Writes the LM, the heads and the method into `directory` (made if needed). `prior` is the path of the
    frozen prior, relative to it. Of a policy with LoRA the adapters are written; the model below them too
    unless `keep_base` did."""
    directory.mkdir(parents=True, exist_ok=True)
    if policy.has_adapters:
        _save_adapters(policy, directory)
    else:
        _save_lm(policy.lm, directory)
    tensors = {
        name: value.detach().contiguous().cpu()
        for name, value in policy.state_dict().items()
        if name.startswith(BESIDE_THE_LM)
    }
    if tensors:
        save_file(tensors, directory / "heads.safetensors")
    method = {"name": method_name(policy.method), **dataclasses.asdict(policy.method)}
    shape = {
        name: getattr(policy.model_config, name) for name in ("heads", "rank", "value_trunk", "target_trunk")
    }
    if prior is None and policy.has_adapters and policy.method.uses_prior:
        prior = BASE
    description = {"format": FORMAT, "method": method, "model": shape, "prior": prior}
    description |= {"value_unit": policy.value_unit, "pretrained": policy.start == "pretrained"}
    description |= {"lengths": policy.lengths._asdict()} if policy.lengths else {}
    if steering := policy.steering:
        acting = {"name": method_name(steering.method), **dataclasses.asdict(steering.method)}
        description["steering"] = {"method": acting, "model": steering.shape}
    (directory / "rl_dialog.yaml").write_text(yaml.safe_dump(description, sort_keys=False), encoding="utf-8")


def describe(directory: str | Path) -> dict[str, Any]:
    """The parsed rl_dialog.yaml, or {} for a directory or hub name that is not ours. Raises UserError for one
    that cannot be read."""
    path = Path(directory) / "rl_dialog.yaml"
    if not path.is_file():
        return {}
    try:
        description = yaml.load(path.read_text(encoding="utf-8"), LOADER)  # noqa: S506  (safe ones)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: expected YAML, got {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise UserError(f"{path}: expected a checkpoint of format {FORMAT}, got {str(description)[:120]!r}")
    return description


def read_method(directory: str | Path) -> Method:
    """The method a checkpoint was trained with; BC for a plain LM."""
    return _method_of(describe(directory), directory)


def _method_of(description: dict[str, Any], directory: str | Path) -> Method:
    values = dict(description.get("method") or {"name": "bc"})
    name = values.pop("name", None)
    kind = choice_class("method", name, METHODS, where=f"{directory}/rl_dialog.yaml: ")
    return from_dict(kind, values, where=f"{directory}/rl_dialog.yaml")


def load_policy(directory: str | Path, *, method: Method | None = None) -> Policy:
    """A policy in eval mode. `method` replaces the stored decoding (another beta) and must be of the stored
    kind.

    Raises UserError when the directory is not a checkpoint, was trained by another method, or lacks its
    heads.
    """
    directory = resolve(directory)
    require_hub_name_or_directory(directory)
    stored = read_method(directory)
    if method is not None and type(method) is not type(stored):
        raise UserError(
            f"{directory} was trained with {method_name(stored)}, expected {method_name(method)}: pass a "
            "checkpoint of that method, or train one"
        )
    method = method or stored
    lm = open_causal_lm(directory, what="a policy", expected="a checkpoint directory or a hub name")
    _speak_plainly(lm)
    shape = describe(directory).get("model") or {}
    policy = Policy(lm, method, from_dict(ModelConfig, shape, where=f"{directory}/rl_dialog.yaml"))
    policy.value_unit = float(describe(directory).get("value_unit", 1.0))
    policy.start, policy.lengths = start_of(directory), lengths_of(directory)
    policy.steering = _empty_steering(directory, lm)
    if policy.heads is not None or policy.steering is not None:
        _load_heads(policy, Path(directory) / "heads.safetensors")
    return policy.eval()


def _speak_plainly(lm: PreTrainedModel) -> None:
    """Of a model's own settings for generation only its special tokens stay: a penalty or a temperature that
    some model comes with would be part of what it says, and of no probability that is measured or learned."""
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(lm.generation_config, name) for name in special}
    lm.generation_config = GenerationConfig(**ids, do_sample=True, top_k=0)


def speaks_by_values(directory: str | Path) -> bool:
    """Whether a checkpoint's policy is more than its language model."""
    return not read_method(directory).plain_lm or "steering" in describe(directory)


def steering_of(directory: str | Path) -> Steering | None:
    """The values of a checkpoint that speaks by them, to go on from; None for a language model alone.

    Raises UserError for values that cannot stay as they are.
    """
    if not speaks_by_values(directory):
        return None
    policy = load_policy(directory)
    return policy.steering or Steering.of(policy)


def _empty_steering(directory: str | Path, lm: PreTrainedModel) -> Steering | None:
    """The steering that a checkpoint names, to be filled with its tensors."""
    stored = describe(directory).get("steering")
    if stored is None:
        return None
    shape = from_dict(ModelConfig, stored["model"], where=f"{directory}/rl_dialog.yaml")
    return Steering.of(Policy(copy.deepcopy(lm), _method_of(stored, directory), shape))


def start_of(directory: str | Path) -> str:
    """Whether the LM in a directory was `made` by us from nothing, or `pretrained` elsewhere."""
    return "pretrained" if describe(directory).get("pretrained", True) else "made"


def lengths_of(directory: str | Path) -> Lengths | None:
    """What an LM that was made here has learned to read; None where that is not known, or it came from
    elsewhere."""
    stored = describe(directory).get("lengths")
    return Lengths(**stored) if stored else None


def load_prior(directory: str | Path) -> Prior | None:
    """The frozen prior a checkpoint was trained against, or None when it has none. Raises UserError when it
    is named but missing."""
    directory = resolve(directory)
    prior = describe(directory).get("prior")
    if prior is None:
        return None
    if prior == BASE and (base := base_of_adapter(directory)):
        return _load_frozen(base)
    path = (Path(directory) / prior).resolve()
    if not path.is_dir():
        raise UserError(
            f"{directory}/rl_dialog.yaml: expected the frozen prior at {path}, found nothing; copy the run's "
            "`prior` folder beside its checkpoints"
        )
    return _load_frozen(str(path))


def freeze_prior(
    policy: Policy,
    directory: Path,
    tokenizer: Any,
    *,
    checkpoints: Sequence[str] = (),
    weights: Sequence[float] = (),
    started: bool = False,
) -> Prior | None:
    """The prior of a run, kept in `directory` so that evaluations see the same one: the average of the LMs
    of `checkpoints`, or without any the LM as it is before training, with what steers it.

    A prior that is in `directory` already must be this one. Another one was left by a run that was killed: it
    is replaced, with a warning, while the run has no checkpoint; where it has (`started`), its values are
    about the other prior, and UserError is raised. None for a policy with LoRA and no checkpoints: switching
    its adapters off gives the prior without a second model. Raises UserError for checkpoints of another
    vocabulary, or weights that do not fit.
    """
    if policy.has_adapters and not checkpoints:
        keep_base(policy, directory, tokenizer, started=started)
        return None
    lms = [open_causal_lm(resolve(path)) for path in checkpoints]
    prior = Prior(lms or [copy.deepcopy(policy.lm)], weights)
    prior.steered_by(None if checkpoints else policy.steering)
    ours = policy.get_output_embeddings().weight.shape[0]
    if prior.vocabulary != ours:
        raise UserError(
            f"expected a prior with the policy's {ours} tokens, got {prior.vocabulary} in "
            f"{', '.join(checkpoints)}"
        )
    if int(os.environ.get("RANK", "0")) == 0:
        _keep_prior(directory, list(prior.members), prior.weights, tokenizer, checkpoints, started)
    return prior


def keep_base(policy: Policy, directory: Path, tokenizer: Any, *, started: bool = False) -> None:
    """Sees to it that the model below a policy's adapters stands somewhere once, for all checkpoints of a
    run: where it was loaded from if that is the very same, else in `directory`.

    Raises UserError where another model is there and the run has checkpoints (`started`).
    """
    policy.base = _place_of_base(policy)
    if policy.base is None:
        if int(os.environ.get("RANK", "0")) == 0:
            _keep_prior(directory, [policy], (1.0,), tokenizer, (), started)
        policy.base = str(directory.absolute())


def _place_of_base(policy: Policy) -> str | None:
    """The hub name or directory of the model below the adapters. None for a new model, one that got more
    tokens, part of another, and a checkpoint of ours, which its run may remove."""
    name = policy.model_config.model_name_or_path
    if not name or describe(name) or base_of_adapter(name):
        return None
    stored, ours = AutoConfig.from_pretrained(name), policy.lm.config
    if type(stored) is not type(ours) or stored.vocab_size != ours.vocab_size:
        return None
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _keep_prior(
    directory: Path,
    members: Sequence[Policy],
    weights: Sequence[float],
    tokenizer: Any,
    checkpoints: Sequence[str],
    started: bool,
) -> None:
    """Writes a prior into `directory`, unless it is there."""
    if directory.is_dir():
        difference = _difference(directory, members, weights)
        if not difference:
            return
        ours = "the model as it is before training" if not checkpoints else " and ".join(checkpoints)
        if started:
            raise UserError(
                f"{directory}: expected the {directory.name} of this run, {ours}, found {difference}, with "
                "which the run's checkpoints were trained: resume with the same --model, --prior and "
                "--prior_weights (and --seed, where the model is new), or start a run in another --output_dir"
            )
        warnings.warn(
            f"{directory} held another {directory.name} ({difference}) of a run that wrote no checkpoint: it "
            f"is replaced by {ours}",
            stacklevel=4,
        )

    def fill(temporary: Path) -> None:
        for i, member in enumerate(members):
            place = temporary / f"member-{i}" if len(members) > 1 else temporary
            if member.steering is None:
                _save_lm(member.lm, place)
            else:
                save_policy(member, place)
        if len(members) > 1:
            write_json(temporary / PRIOR_WEIGHTS, weights)
        tokenizer.save_pretrained(temporary)

    write_atomically(directory, fill)


def _difference(directory: Path, members: Sequence[Policy], weights: Sequence[float]) -> str:
    """What the prior in `directory` is instead of these models with these weights; nothing where it is the
    same, to the last bit."""
    try:
        stored = _load_frozen(str(directory))
    except (OSError, ValueError, SafetensorError) as error:
        return f"one that cannot be read: {str(error)[:120]}"
    if len(stored.members) != len(members):
        return f"one of {len(stored.members)} models instead of {len(members)}"
    if not all(
        math.isclose(theirs, ours, rel_tol=1e-6) for theirs, ours in zip(stored.weights, weights, strict=True)
    ):
        return (
            f"one with the weights {[round(weight, 4) for weight in stored.weights]} instead of "
            f"{[round(weight, 4) for weight in weights]}"
        )
    pairs = zip(stored.members, members, strict=True)
    changed = [i for i, (theirs, ours) in enumerate(pairs) if not _same_tensors(theirs, ours)]
    return (
        f"one of another model (number {changed[0] + 1})"
        if changed and len(members) > 1
        else "another model"
        if changed
        else ""
    )


def _same_tensors(stored: Policy, policy: Policy) -> bool:
    """Of the language model, adapters aside, and of what steers it."""
    ours, theirs = _without_adapters(policy.lm), stored.lm.state_dict()
    for tensors, steering in ((ours, policy.steering), (theirs, stored.steering)):
        values = steering.state_dict() if steering else {}
        tensors |= {f"steering.{name}": value for name, value in values.items()}
    return ours.keys() == theirs.keys() and all(
        torch.equal(value.cpu(), ours[name].cpu()) for name, value in theirs.items()
    )


def resolve(directory: str | Path) -> str:
    """A checkpoint, or the one that a run folder's `best` (else `latest`) names; hub names pass through."""
    path = Path(directory)
    if path.is_dir() and not is_model(path):
        for pointer in ("best", "latest"):
            if (path / pointer).is_file():
                return str(path / (path / pointer).read_text(encoding="utf-8").strip())
        raise UserError(
            f"{directory}: expected a checkpoint (config.json) or a run folder (best, latest), found "
            f"{sorted(p.name for p in path.iterdir())[:8]}"
        )
    return str(directory)


def likeliest(directory: str | Path) -> str:
    """Of the run folder of a clone the checkpoint under which held-out replies were likeliest, which need not
    be the one that acts best; else what `resolve` says. A policy that speaks by values is what its last
    ones say, however well its language model predicts."""
    losses = {}
    for path in sorted(Path(directory).glob("checkpoint-*/metrics.json")):
        loss = json.loads(path.read_text(encoding="utf-8")).get("eval/nll")
        if loss is not None and not speaks_by_values(path.parent):
            losses[str(path.parent)] = loss
    return min(losses, key=losses.__getitem__) if losses else resolve(directory)


def _load_frozen(place: str) -> Prior:
    """place: a directory, or a hub name of a single model."""
    path = Path(place) / PRIOR_WEIGHTS
    weights = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ()
    folders = [f"{place}/member-{i}" for i in range(len(weights))] or [place]
    prior = Prior([open_causal_lm(folder) for folder in folders], weights)
    return prior if weights else prior.steered_by(steering_of(place))


def _save_lm(lm: PreTrainedModel, directory: Path) -> None:
    """The LM without adapters."""
    if not getattr(lm, "_hf_peft_config_loaded", False):
        lm.save_pretrained(directory)
        return
    lm._hf_peft_config_loaded = False  # with it save_pretrained would write the adapters alone
    try:
        lm.save_pretrained(directory, state_dict=_without_adapters(lm))
    finally:
        lm._hf_peft_config_loaded = True


def _without_adapters(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Every tensor of a model under the name that it has without LoRA."""
    state = lm.state_dict().items()
    return {name.replace(".base_layer", ""): value for name, value in state if "lora_" not in name}


def _save_adapters(policy: Policy, directory: Path) -> None:
    """What `peft` loads: the adapters, and where the model is that they belong to."""
    from peft import get_peft_model_state_dict

    base = policy.base
    if base is None:
        base = str((directory / BASE).absolute())
        _save_lm(policy.lm, directory / BASE)
    config = copy.copy(policy.lm.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(directory))
    adapters = get_peft_model_state_dict(policy.lm, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": value.contiguous().cpu() for name, value in adapters.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _load_heads(policy: Policy, path: Path) -> None:
    if not path.is_file():
        raise UserError(
            f"{path}: expected the heads of method {method_name(policy.method)}, found no such file"
        )
    try:
        missing, unexpected = policy.load_state_dict(load_file(path), strict=False)
    except (SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{path}: expected the heads of {method_name(policy.method)} in safetensors format, got: {error}"
        ) from error
    missing = [name for name in missing if name.startswith(BESIDE_THE_LM)]
    if missing or unexpected:
        raise UserError(
            f"{path}: expected the heads of {method_name(policy.method)}, missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}"
        )
