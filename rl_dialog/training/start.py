"""How a training run starts: what is checked before, what is loaded, what its notes and checkpoints tell.

    check_run -> train_run on every worker -> load_trainer -> Trainer.train (training/loop.py) -> result.json

`pipelines/train.py` starts the workers, and brings what is measured in an environment.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerFast

from rl_dialog.config import at_least
from rl_dialog.data.files import write_json
from rl_dialog.data.shards import load_manifest, read_rows
from rl_dialog.data.tokenize import load_tokenizer, require_hub_name_or_directory
from rl_dialog.errors import UserError, room_for
from rl_dialog.methods import BC, Method
from rl_dialog.models.causal_lm import load_quietly
from rl_dialog.models.checkpoint import freeze_prior, lengths_of, method_name, resolve, start_of
from rl_dialog.models.language_model import LATENTS, ModelConfig, check_family, chosen_teachers, load_lm
from rl_dialog.models.policy import Policy
from rl_dialog.models.prior import proper_weights
from rl_dialog.training.learned_rows import said_counts
from rl_dialog.training.logger import NOTES, check_tracker, write_note
from rl_dialog.training.loop import Evaluate, Trainer, TrainerConfig

Report = Callable[[dict[str, float], bool], None]  # metrics of an evaluation, and whether it is the last one
Run = TypeVar("Run", bound="TrainingRun")


@dataclass(frozen=True)
class TrainingRun(TrainerConfig):
    """What learns, from what, and how."""

    data: str = ""
    """a directory that `prepare` wrote"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """the language model and its heads"""
    method: Method = field(default_factory=BC)
    """how to learn: a name, and dotted flags for its fields"""
    prior: tuple[str, ...] = ()
    """checkpoints whose weighted average is the frozen prior, for methods that have one (model averaging);
    by default the model as loaded"""
    prior_weights: tuple[float, ...] = ()
    """weight of each checkpoint of the prior; by default equal"""


def check_run(run: TrainingRun) -> None:
    """What can be known to fail before a worker starts. Raises UserError."""
    if run.method.online:
        name = method_name(run.method)
        raise UserError(
            f"--method {name} learns from episodes that the policy plays itself, not from logs: clone them "
            f"first, then python -m pipelines.online --model_name_or_path RUN --env NAME --method {name}"
        )
    at_least(
        run,
        per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=0,
        learning_rate=0, warmup_steps=0, weight_decay=0, max_grad_norm=0, value_unit=0, logging_steps=1,
        eval_steps=0, save_steps=0, save_total_limit=1, seed=0,
    )  # fmt: skip
    if run.num_train_epochs is not None and not run.num_train_epochs > 0:
        raise UserError(
            f"expected --num_train_epochs above 0, got {run.num_train_epochs:g}: nothing would be learned"
        )
    check_family(run.model)
    _check_teachers(run)
    if (run.prior or run.prior_weights) and not run.method.uses_prior:
        users = "way_off_policy, dpo, kto, and ilql with reg_to base_policy do"
        raise UserError(f"--prior: {method_name(run.method)} has none; {users}")
    if len(run.prior_weights) not in (0, len(run.prior)):
        expected = f"one for each of the {len(run.prior)} checkpoints of --prior"
        raise UserError(f"--prior_weights: expected {expected}, got {run.prior_weights}")
    if not proper_weights(run.prior_weights):
        raise UserError(f"--prior_weights: expected finite numbers above 0, got {list(run.prior_weights)}")
    for path in run.prior:
        require_hub_name_or_directory(path)
        remedy = f"train a prior on {run.data} (--prior), or run prepare again with --tokenizer {path}"
        _require_tokens(run.data, path, remedy)
    check_tracker(run.report_to)
    if start := run.model.model_name_or_path:
        _require_tokens(run.data, start, f"run prepare again with --tokenizer {start}")


def _check_teachers(run: TrainingRun) -> None:
    """A model that predicts what teachers say of messages needs data that they were asked about."""
    teachers = load_manifest(run.data).get("teachers", {})
    chosen = chosen_teachers(run.model, teachers, data=run.data)
    if chosen and not run.method.draws_from_posterior:
        flags = " and ".join(f"--model.{name}_weight" for name in chosen)
        raise UserError(
            f"{flags}: expected a method that clones (bc, tf_all, tf_top, dt), because only these learn what "
            f"teachers say, got {method_name(run.method)}: train bc first, and go on from it with "
            f"--model_name_or_path RUN --method {method_name(run.method)}"
        )
    start = run.model.model_name_or_path
    if not start or not _is_hierarchical(run.model) or not run.method.draws_from_posterior:
        return
    stored = _stored_config(start).get("teachers", {})
    for name, teacher in stored.items():
        if teachers.get(name) != teacher:
            theirs = teachers[name]["name"] if name in teachers else "none"
            raise UserError(
                f"{start} learns what {teacher['name']} says of each message ({name}), expected data that "
                f"was prepared with the same teacher, got {theirs} in {run.data}: run prepare again with "
                f"--teachers {' '.join(map(_entry, stored.items()))}"
            )


def _entry(named: tuple[str, dict[str, Any]]) -> str:
    """A teacher as `prepare` is told of it: the built-in ones have names that are no folders."""
    name, teacher = named
    return f"{name}={teacher['name']}" if Path(teacher["name"]).exists() else name


def _require_tokens(data: str, path: str, remedy: str) -> None:
    """Tokens are matched by their ids: a model whose ids mean other words would learn those."""
    if (theirs := _tokenizer_of(path)) is None:
        return
    ours = load_tokenizer(Path(data) / "tokenizer")
    if ours.get_vocab() != theirs.get_vocab():
        different = f"{len(ours)} tokens that are not those of {path} ({len(theirs)})"
        raise UserError(f"{data} was tokenised with {different}: {remedy}")


def _tokenizer_of(path: str) -> PreTrainedTokenizerFast | None:
    """That of a model; None for one that has none beside it."""
    try:
        return load_tokenizer(resolve(path))
    except UserError:
        return None


def with_absolute_paths(run: Run) -> Run:
    """For workers, which do not share the working directory of whoever starts them."""
    model = run.model
    if model.model_name_or_path and Path(model.model_name_or_path).is_dir():
        model = replace(model, model_name_or_path=str(Path(model.model_name_or_path).absolute()))
    prior = tuple(str(Path(resolve(path)).absolute()) if Path(path).is_dir() else path for path in run.prior)
    return replace(run, data=str(Path(run.data).absolute()), model=model, prior=prior)


def train_run(
    run: TrainingRun,
    output_dir: Path,
    *,
    device: torch.device,
    evaluate: Evaluate | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """What one worker does, from files to checkpoints; `evaluate` and `report` are those of Trainer.

    What a method or the loop warns of is told at once to who follows the run, and stands under `notes` in
    result.json: nobody reads a worker's stderr.
    """
    notes: list[str] = []
    with room_for(output_dir):
        trainer = load_trainer(run, output_dir, notes, device=device, evaluate=evaluate, report=report)
        with noting(notes, output_dir):
            result = trainer.train()
        result |= {"notes": notes} if notes else {}
        if trainer.rank == 0:
            write_json(output_dir / "result.json", result)
    return result


def load_trainer(
    run: TrainingRun,
    output_dir: Path,
    notes: list[str],
    *,
    device: torch.device,
    evaluate: Evaluate | None = None,
    report: Report | None = None,
) -> Trainer:
    """Everything loaded; `notes` gets what was warned of."""
    load_quietly()
    tokenizer = run.method.extend_tokenizer(load_tokenizer(Path(run.data) / "tokenizer"))
    torch.manual_seed(run.seed)
    model = run.model
    if model.model_name_or_path and Path(model.model_name_or_path).is_dir():
        # a run folder stands for its best checkpoint
        model = replace(model, model_name_or_path=resolve(model.model_name_or_path))
    teachers = load_manifest(run.data).get("teachers", {})
    begun = Path(resolve(output_dir)) if (output_dir / "latest").is_file() else None
    policy = Policy(load_lm(model, tokenizer, teachers=teachers, begun=begun), run.method, model)
    if model.model_name_or_path:
        policy.start, policy.lengths = (of(model.model_name_or_path) for of in (start_of, lengths_of))
    taught = policy.message_heads is not None and run.method.draws_from_posterior
    rows = [list(read_rows(run.data, split, taught=taught)) for split in ("train", "validation")]
    if policy.start == "new" and policy.is_hierarchical:
        policy.lm.start_at(said_counts(rows[0], len(tokenizer)))
    trainer_settings = {"evaluate": evaluate, "report": report, "describe": model_card(run, output_dir.name)}
    notes += notes_before(run, measured=evaluate is not None)
    with noting(notes, output_dir):
        prior, started = output_dir / "prior", (output_dir / "latest").is_file()
        if run.method.uses_prior:
            averaged = {"checkpoints": run.prior, "weights": run.prior_weights, "started": started}
            trainer_settings["prior"] = freeze_prior(policy, prior, tokenizer, **averaged)
        try:
            return Trainer(policy, tokenizer, *rows, run, output_dir, **trainer_settings, device=device)
        except UserError:
            if not started:  # with these in it the folder would hold a run, of which there is nothing
                shutil.rmtree(prior, ignore_errors=True)
                (output_dir / NOTES).unlink(missing_ok=True)
            raise


def notes_before(run: TrainingRun, *, measured: bool) -> list[str]:
    """What the data directory tells before anything is trained; `measured` says whether the return is."""
    notes = []
    if not load_manifest(run.data)["splits"].get("validation", {}).get("dialogs"):
        best = "is chosen by the return alone" if measured else "is the last one"
        notes += [
            f"{run.data} has no validation dialogs: nothing is measured on held-out replies, and the best "
            f"checkpoint {best}; prepare keeps some back (--validation; --split_by dialog where all begin "
            "alike)"
        ]
    if (start := run.model.model_name_or_path) and _tokenizer_of(start) is None:
        notes += [f"{start} has no tokenizer: whether {run.data} has the tokens that it knows cannot be told"]
    return notes


@contextmanager
def noting(notes: list[str], directory: Path) -> Iterator[None]:
    """Collects the warnings of the block and writes them where `following` reads, which shows each once."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category is not UserWarning:
                return show(message, category, *where, **more)
            notes.append(" ".join(str(message).split()))  # as `following` shows it
            if int(os.environ.get("RANK", "0")) == 0:
                write_note(directory, notes[-1])

        warnings.showwarning = note
        yield


def _is_hierarchical(model: ModelConfig) -> bool:
    """Of a model that transformers does not know by itself."""
    if not model.model_name_or_path:
        return model.family in LATENTS
    return _stored_config(model.model_name_or_path).get("model_type") == "hierarchical"


def _stored_config(start: str) -> dict[str, Any]:
    """What the config.json of a model to start from says; nothing where it is on the hub, or are adapters.
    Raises UserError for a file that is none."""
    path = Path(resolve(start)) / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected the JSON object that describes a model: copy the model anew")
    return config


def model_card(run: TrainingRun, name: str) -> str:
    """The README.md of a checkpoint: what it is, how it was made, how to use it."""
    manifest = load_manifest(run.data)
    components = manifest["rewards"]["components"]
    weights = {reward: row["weight"] for reward, row in components.items() if row["weight"]}
    plain = "the same logits" if run.method.plain_lm else "the language model without its value heads"
    if _is_hierarchical(run.model):
        plain += ", after `import rl_dialog.models.hierarchical`"
    return f"""# {name}

A dialog policy trained with `{method_name(run.method)}` by rl_dialog.

- method: `{run.method}`
- data: {", ".join(manifest["sources"])} ({manifest["splits"]["train"]["replies"]} replies to learn from)
- rewards and weights: {weights or "none"}
- seed: {run.seed}

```bash
python -m pipelines.chat --checkpoint THIS_FOLDER
```

`rl_dialog.models.policy.Policy.from_pretrained(folder)` gives the policy; \
`transformers.AutoModelForCausalLM.from_pretrained(folder)` gives {plain}.
"""
