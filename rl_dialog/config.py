"""Configs: frozen dataclasses, filled from YAML first and dotted flags second, saved with every output.

    python -m pipelines.train --config tune_configs/ilql_snell.yaml --method.beta 4

A field whose type depends on a choice (the method) is named in `choices`: `--method ilql` picks the
dataclass, `--method.tau 0.8` sets its fields. Unknown flags and YAML keys are errors that name the nearest
known one. Where a field holds named numbers (`--rewards.vote 1`), a name of the form `module:function` is the
user's own.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import math
import os
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rl_dialog.errors import ROOT, UserError
from rl_dialog.own import own

T = TypeVar("T")
MEANT = {  # a flag by its name in another verb or program, where the nearest spelling would mislead
    "batch_size": ("per_device_train_batch_size",),
    "checkpoint": ("model_name_or_path", "checkpoints"),
    "checkpoints": ("checkpoint",),
    "epochs": ("num_train_epochs",),
    "lr": ("learning_rate",),
    "model": ("model_name_or_path", "checkpoint", "checkpoints"),
    "model_name_or_path": ("checkpoint", "checkpoints"),
    "out": ("output_dir",),
    "output": ("output_dir",),
    "policy": ("checkpoint", "checkpoints", "model_name_or_path"),
    "steps": ("max_steps",),
    "use_gpu": ("device",),
    "workers": ("num_workers",),
}
INSTALLED = "RL_DIALOG_INSTALLED"  # set where the command was started as `rl-dialog VERB`
Choices = Mapping[str, Mapping[str, type]]  # field name -> {choice name: dataclass}


class ConfigError(UserError):
    """A config file or flag that cannot be used; the message names the key and the nearest known one."""


def load_config(
    config_class: type[T],
    argv: Sequence[str] | None = None,
    *,
    choices: Choices | None = None,
    suited: Callable[[T], dict[str, Any]] | None = None,
    listed: Mapping[str, Mapping[str, Any]] | None = None,
) -> T:
    """`config_class` from `--config FILE` and dotted flags; later ones win. Raises ConfigError, or exits
    after `--help`.

    `suited` gives nested values that take the place of the class's defaults where these depend on the rest of
    the config, which it gets. `listed`: the names of a field that --help explains, where these are not its
    choices.
    """
    import tyro

    choices = choices or {}
    arguments = [_dashes_to_underscores(a) for a in (sys.argv[1:] if argv is None else argv)]
    below = (
        suited(load_config(config_class, [a for a in arguments if a != "--help"], choices=choices))
        if suited
        else {}
    )
    path, arguments = _take(arguments, "--config")
    values = _over(below, {} if path is None else read_yaml(path))
    for name, options in choices.items():
        picked, arguments = _take(arguments, f"--{name}")
        default = _field_default(config_class, name)
        values[name] = _choose(name, picked, values.get(name), options, default, path)
    values, arguments = _take_numbers(config_class, values, arguments)
    default = from_dict(config_class, values, where=path or "config")
    _refuse_unknown(arguments, set(_flags(default)))
    _refuse_bare(arguments, config_class)
    if "--help" in arguments:
        default = _with_numbers_to_show(default)
        _say_fields_in_one_line(default)
    shown = {
        "prog": _program(Path(sys.argv[0]).resolve()),
        "description": _described(config_class, {**choices, **(listed or {})}),
        "config": (tyro.conf.AvoidSubcommands,),
    }
    return finite(tyro.cli(config_class, args=arguments, default=default, **shown), "flags", "--")


def _take_numbers(
    config_class: type, values: dict[str, Any], arguments: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Flags of numbers in a dictionary, `--rewards.vote 1`, become values: tyro cannot type them from
    None."""
    for field in dataclasses.fields(config_class):
        usual = _field_default(config_class, field.name)
        keys = [*usual, *_own_keys(arguments, field.name)] if isinstance(usual, dict) else []
        for key in keys:
            flag = f"--{field.name}.{key}"
            number, arguments = _take(arguments, flag)
            if number is not None:
                entries = values.get(field.name) or {}
                values = values | {field.name: entries | {key: _to_float(number, flag, "flags")}}
    return values, arguments


def _refuse_unknown(arguments: Sequence[str], flags: set[str]) -> None:
    """Raises ConfigError for the first flag that there is not."""
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        if flag.startswith("--") and flag != "--help" and _positive(flag) not in flags:
            listed = "`--help` lists every flag with its default."
            raise ConfigError(f"unknown flag {flag}.{_nearest(flag, flags)} {listed}")


def _refuse_bare(arguments: Sequence[str], config_class: type) -> None:
    """Raises ConfigError for a value in front of all flags, where nothing is named by its place."""
    import tyro

    (by_place,) = tyro.conf.Positional[str].__metadata__
    hints = typing.get_type_hints(config_class, include_extras=True).values()
    if any(by_place in getattr(hint, "__metadata__", ()) for hint in hints):
        return
    if arguments and not arguments[0].startswith("-"):
        listed = "`--help` lists every flag with its default."
        raise ConfigError(f"expected a flag before every value, got {arguments[0]!r} without one. {listed}")


def _with_numbers_to_show(config: T) -> T:
    """For --help: tyro would show {None} for a number that is None."""
    dictionaries = {
        field.name: value
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), dict)
    }
    numbers = {
        name: {key: math.nan if value is None else value for key, value in entries.items()}
        for name, entries in dictionaries.items()
    }
    return dataclasses.replace(config, **numbers)


def _say_fields_in_one_line(config: Any) -> None:
    """For --help: tyro would break what a field says where its source does, in the middle of a sentence; it
    takes a text in the field's metadata as it is."""
    texts: dict[str, str] = {}
    for config_class in reversed(type(config).__mro__):
        texts |= _field_texts(config_class)
    for field in dataclasses.fields(config):
        if field.name in texts:
            field.metadata = types.MappingProxyType({"help": texts[field.name], **field.metadata})
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            _say_fields_in_one_line(value)


def _field_texts(config_class: type) -> dict[str, str]:
    """The string below each field of a class, as one line."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    except (OSError, TypeError):  # a class without a file
        return {}
    texts = {}
    for field, text in pairwise(source.body[0].body):
        match field, text:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                texts[name] = " ".join(words.split())
    return texts


def command_of(verb: str) -> str:
    """How to start a verb: as this one was started, `rl-dialog VERB` or `python -m pipelines.VERB`."""
    return f"rl-dialog {verb}" if os.environ.get(INSTALLED) else f"python -m pipelines.{verb}"


def as_typed_here(text: str) -> str:
    """With its commands as they are typed here."""
    return text.replace("python -m pipelines.", command_of(""))


def typed_command(verb: str, config: Any, names: Sequence[str]) -> str:
    """What was typed, as far as these settings tell: those that are not the usual ones."""
    words, usual = [], type(config)()
    for name in names:
        if (value := getattr(config, name)) != getattr(usual, name):
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{name}", *(f"{one:g}" if isinstance(one, float) else str(one) for one in values)]
    return f"python -m pipelines.{verb} {shlex.join(words)}".rstrip()


def _program(path: Path) -> str:
    """What runs this file; a package is run by its __main__.py."""
    module = path.parent if path.stem == "__main__" else path.with_suffix("")
    if module.parent.name == "pipelines":
        return command_of(module.name)
    return f"python -m {module.parent.name}.{module.name}"


def _described(config_class: type, listed: Mapping[str, Mapping[str, Any]]) -> str:
    """What --help says above the flags: what the verb does and writes, and each name that a choice (or a
    weighted sum) can have with the first paragraph of its own."""
    lines = [_about(config_class)]
    for field, options in listed.items():
        texts = {
            name: " ".join((option.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
            for name, option in options.items()
        }
        width = max(map(len, texts))
        how = f"--{field} NAME, or module:Class of your own, and --{field}.FIELD for each of its settings"
        if isinstance(_field_default(config_class, field), dict):
            how = f"--{field}.NAME WEIGHT, or --{field}.module:function WEIGHT for one of your own"
        lines += [f"\n{how}:\n"]
        lines += [f"  {name:<{width}}  {text}" for name, text in texts.items()]
    return "\n".join(lines)


def _about(config_class: type) -> str:
    """The text of a verb's file, with commands as they are typed here; of another config its class's."""
    name = config_class.__module__
    of_verb = name == "__main__" or name.startswith("pipelines.")
    text = (of_verb and sys.modules[name].__doc__) or config_class.__doc__ or ""
    return as_typed_here(textwrap.dedent(text))


def from_dict(config_class: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """A dataclass from nested plain values. Raises ConfigError for unknown or missing keys and for values of
    the wrong kind."""
    fields = {f.name: f for f in dataclasses.fields(config_class)}
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key {key!r} for {config_class.__name__}.{_nearest(str(key), fields)}"
            )
    if missing := [repr(name) for name, field in fields.items() if _required(field) and name not in values]:
        raise ConfigError(f"{where}: expected {', '.join(missing)} too, which {config_class.__name__} needs")
    hints = typing.get_type_hints(config_class)
    filled = {}
    for name, value in values.items():
        default = _field_default(config_class, name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(default):
            value = from_dict(type(default), value, where=f"{where}: {name}")
        elif isinstance(value, Mapping) and isinstance(default, dict):
            unknown = [key for key in value if default and key not in default and not is_own(key)]
            if unknown:
                raise ConfigError(
                    f"{where}: unknown key {unknown[0]!r} in {name}.{_nearest(str(unknown[0]), default)}"
                )
            value = default | dict(value)
        filled[name] = _typed(value, hints[name], name, where)
    try:
        return finite(config_class(**filled), where)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def _required(field: dataclasses.Field) -> bool:
    """Is there nothing that stands for it where it is not given?"""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def check_flags(text: str, where: str) -> None:
    """Raises ConfigError where a file's string of flags has a quote that is not closed."""
    try:
        shlex.split(text)
    except ValueError as error:
        problem = f"{str(error).lower()} in {text!r}"
        raise ConfigError(f"{where}: expected flags as one types them, got {problem}") from error


def finite(config: T, where: str, start: str = "") -> T:
    """The config as it is. Raises ConfigError for an infinite number or a NaN in it, which would spoil
    results without a word."""
    for name, number in _not_finite(config, ""):
        raise ConfigError(f"{where}: expected a finite number for {start}{name}, got {number}")
    return config


def _not_finite(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield from () if math.isfinite(value) else ((name, value),)
        return
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _not_finite(inner, name)


def require(config: Any, **fields: str) -> None:
    """Raises UserError for the first of these settings that is empty; each is given with what it is."""
    for name, what in fields.items():
        if not getattr(config, name):
            raise UserError(f"expected --{name}: {what}")


def at_least(config: Any, **fields: float) -> None:
    """Raises UserError for the first of these settings that is below its bound; None is no setting."""
    for name, least in fields.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise UserError(f"expected --{name} of at least {least}, got {value}")


def to_dict(config: Any, *, choices: Choices | None = None) -> dict[str, Any]:
    """The inverse of `load_config`'s YAML: nested plain values, with the name of each choice under `name`."""
    values = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    for field, options in (choices or {}).items():
        values[field] = {"name": choice_name(getattr(config, field), options), **values[field]}
    return values


def choice_name(value: Any, options: Mapping[str, type]) -> str:
    """What a choice is called: its key, or `module:Class` for the user's own."""
    kind = type(value)
    return next(
        (name for name, option in options.items() if kind is option), f"{kind.__module__}:{kind.__qualname__}"
    )


def choice_class(what: str, name: str, options: Mapping[str, type], *, where: str = "") -> type:
    """The dataclass behind a name, the user's own for `module:Class`. Raises ConfigError for anything that is
    not of the same kind as the options."""
    if name in options:
        return options[name]
    if not is_own(name):
        expected = f"expected one of {', '.join(options)}, or module:Class for one of your own"
        raise ConfigError(f"{where}unknown {what} {name!r}: {expected}.{_nearest(name, options)}")
    loaded = own(name, what)
    kinds = set.intersection(*(set(option.__mro__) for option in options.values())) - {object}
    if not (isinstance(loaded, type) and dataclasses.is_dataclass(loaded) and kinds & set(loaded.__mro__)):
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigError(
            f"{where}{what} {name!r}: expected a frozen dataclass derived from {expected}, got {loaded!r}"
        )
    return loaded


def changed(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, nested ones too: what a later version with
    more fields says the same of."""
    default, changes = type(config)(), {}
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            inner = changed(value)
            if inner or type(value) is not type(usual):
                changes[field.name] = {"type": type(value).__name__, **inner}
        elif isinstance(value, dict):
            if entries := {
                key: entry for key, entry in value.items() if key not in usual or usual[key] != entry
            }:
                changes[field.name] = entries
        elif value != usual:
            changes[field.name] = value
    return changes


def save_config(config: Any, path: str | Path, *, choices: Choices | None = None) -> None:
    """Writes the resolved config as YAML that `--config` reads back; whole or not at all."""
    write_whole(
        Path(path), yaml.safe_dump(to_dict(config, choices=choices), sort_keys=False, allow_unicode=True)
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a file, or leaves what was there."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _choose(
    name: str, picked: str | None, given: Any, options: Mapping[str, type], default: Any, path: str | None
) -> Any:
    """The dataclass instance for a choice: the flag's name wins over the YAML's; the YAML's values are kept
    when the name agrees."""
    if given is not None and not isinstance(given, str | Mapping):
        raise ConfigError(f"{path}: expected a name or keys and values for {name}, got {given!r}")
    values = {"name": given} if isinstance(given, str) else dict(given or {})
    declared = values.pop("name", choice_name(default, options))
    chosen = str(declared if picked is None else picked)
    if chosen != declared:
        values = {}
    return from_dict(choice_class(name, chosen, options), values, where=f"{path or 'config'}: {name}")


def _take(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Removes `flag VALUE` or `flag=VALUE`; the last one wins."""
    value, rest, i = None, [], 0
    while i < len(arguments):
        if arguments[i] == flag:
            if i + 1 == len(arguments):
                raise ConfigError(f"expected a value after {flag}, got nothing")
            value, i = arguments[i + 1], i + 2
        elif arguments[i].startswith(flag + "="):
            value, i = arguments[i].split("=", 1)[1], i + 1
        else:
            rest.append(arguments[i])
            i += 1
    return value, rest


def is_own(key: Any) -> bool:
    """Does a key name something of the user's, `module:function`?"""
    module, colon, function = str(key).partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _own_keys(arguments: list[str], field: str) -> list[str]:
    """`module:function` of flags such as `--rewards.module:function 1`."""
    start = f"--{field}."
    keys = [
        argument.removeprefix(start).partition("=")[0] for argument in arguments if argument.startswith(start)
    ]
    return [key for key in dict.fromkeys(keys) if is_own(key)]


class _OnceEach(yaml.SafeLoader):
    """A key that stands twice is an error; YAML itself would take the last one without a word. What `<<`
    takes over from elsewhere may stand again."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = f"expected a name as a key, found a {key.id}: put a text with {{ or [ in quotes"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            if (key.tag, key.value) in seen:
                problem = f"expected every key once, found {key.value!r} again"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return node


def read_yaml(path: str) -> dict[str, Any]:
    """Keys and values of a YAML file. Raises ConfigError for anything else."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _OnceEach)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        installed = ROOT / path
        hint = f"; the one that came with this package is {installed}" if installed.is_file() else ""
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got other bytes ({error.reason})") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter of 2026-13-45, which is no date
        raise ConfigError(f"{path}: expected YAML, got {error}") from error
    if not isinstance(values or {}, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, got {type(values).__name__}")
    return values or {}


def _over(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with others in their place."""
    both = {
        key: _over(values[key], other) if isinstance(other, Mapping) and key in values else other
        for key, other in others.items()
    }
    return {**values, **both}


def _flags(config: Any, prefix: str = "--") -> list[str]:
    flags = []
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, extras = getattr(config, field.name), getattr(hints[field.name], "__metadata__", ())
        flag = (
            f"--{field.name}"
            if any(getattr(extra, "prefix_name", None) is False for extra in extras)
            else f"{prefix}{field.name}"
        )
        flags.append(flag)
        # other names, in tyro's spelling: --process-num
        flags += [
            _dashes_to_underscores(alias)
            for extra in extras
            for alias in getattr(extra, "aliases", None) or ()
        ]
        if dataclasses.is_dataclass(value):
            flags += _flags(value, flag + ".")
        elif isinstance(value, dict):
            flags += [f"{flag}.{key}" for key in value]
    return flags


def _field_default(config_class: type, name: str) -> Any:
    field = next(f for f in dataclasses.fields(config_class) if f.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _positive(flag: str) -> str:
    head, _, last = flag.rpartition(".")
    last = last.removeprefix("--").removeprefix("no_")
    return f"{head}.{last}" if head else f"--{last}"


def _dashes_to_underscores(argument: str) -> str:
    """`--max-length 8` is `--max_length 8`."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


def _nearest(word: str, known: Any) -> str:
    known = list(known)
    dashes, name = ("--", word[2:]) if word.startswith("--") else ("", word)
    for meant in MEANT.get(name, ()):
        if dashes + meant in known:
            return f" Did you mean {dashes}{meant}?"
    begun = [name for name in known if name.startswith(word) and len(word) > 3]
    close = begun or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def _typed(value: Any, kind: Any, name: str, where: str) -> Any:
    """A value as YAML gives it to one of the annotation `kind`: lists become tuples, 1e-4 (a string in YAML)
    a number. Raises ConfigError."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        return _typed(value, next(part for part in parts if part is not type(None)), name, where)
    if origin is typing.Literal and value not in parts:
        near = _nearest(str(value), map(str, parts))
        raise ConfigError(
            f"{where}: expected {name} to be one of {', '.join(map(str, parts))}, got {value!r}.{near}"
        )
    if origin is tuple and isinstance(value, list | tuple):
        each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(each) != len(value):
            raise ConfigError(f"{where}: expected {len(each)} values for {name}, got {value!r}")
        return tuple(_typed(v, part, name, where) for v, part in zip(value, each, strict=True))
    if origin is dict and isinstance(value, Mapping):
        if odd := next((key for key in value if not isinstance(key, str)), None):
            raise ConfigError(f"{where}: expected names as the keys of {name}, got {odd!r}: put it in quotes")
        return {key: _typed(v, parts[1], f"{name}.{key}", where) for key, v in value.items()}
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = value if isinstance(value, kind) else _to_float(value, name, where)
        if kind is float or isinstance(number, int) or number.is_integer():
            return kind(number)
    expected = origin or kind
    if isinstance(expected, type) and (not isinstance(value, expected) or kind is int):
        shown = (
            "keys and values"
            if dataclasses.is_dataclass(kind)
            else getattr(expected, "__name__", str(expected))
        )
        raise ConfigError(f"{where}: expected {shown} for {name}, got {value!r}")
    return value


def _to_float(value: Any, name: str, where: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a number for {name}, got {value!r}") from error
    except OverflowError as error:
        raise ConfigError(f"{where}: expected a number below 1.8e308 for {name}, got a larger one") from error
