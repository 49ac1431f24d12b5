"""The file of a sweep: what is trained, over which search space, and the points of that space.

`pipelines.tune` runs them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl_dialog.config import ConfigError, check_flags, from_dict, read_yaml
from rl_dialog.errors import UserError
from rl_dialog.evaluation.comparison import BASELINE

COPY = "sweep.yaml"  # in the folder of a sweep: the file as it was
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, float, float], float]] = {
    "uniform": lambda rng, low, high: float(rng.uniform(low, high)),
    "loguniform": lambda rng, low, high: float(np.exp(rng.uniform(np.log(low), np.log(high)))),
    "randint": lambda rng, low, high: int(rng.integers(low, high + 1)),
}
# `VERB.FLAG` in a space is a flag of that stage; all others are flags of the trials' own train or online
VERBS = ("prepare", "start", "evaluate")
LONGEST = 219  # bytes of a point's name: `.bc,NAME-seed1234567890.json.tmp-1234567` is a file name of 255
DATA = "{data}"  # in the flags of online: the data directory that `prepare` made


@dataclass(frozen=True)
class Halving:
    """Asynchronous successive halving (Li et al. 2020): at `grace`, `grace * factor`, ... steps only the best
    1/factor of the trials go on."""

    grace: int
    factor: int = 3


@dataclass(frozen=True)
class Sweep:
    """The YAML file. Strings of flags are what one would type after the verb."""

    title: str
    about: str
    # flag of a trial, or VERB.FLAG -> list of values or {uniform|loguniform|randint: [low, high]}; or a list
    # of such, their union
    space: object
    train: str = ""  # flags of every trial, which learns from the logs
    online: str = ""  # instead: flags of `online`, with which every trial plays and learns from that
    start: str = ""  # flags of the bc that all trials of a seed start from; without it they start as they are
    logs: tuple[str, ...] = ()  # from where the command starts, or below $RL_DIALOG_DATA
    # instead: dialogs and seed of logs from small talk, or from a `world`, with options of its write_logs
    write_logs: dict[str, object] = field(default_factory=dict)
    prepare: str = ""
    evaluate: str = ""  # flags of the evaluation of all trials that reach their end
    # of training's own evaluations: what trials are stopped by, and ranked by where there is no evaluation
    metric: str = "eval/return"
    figure: str = "return"  # of the evaluation: what the report ranks by
    mode: Literal["max", "min"] = "max"  # of the metric; figures know which side is better
    seeds: tuple[int, ...] = (0,)
    # grid: every combination of the lists; optuna: `samples` points, chosen by what earlier ones reached
    search: Literal["grid", "optuna"] = "grid"
    samples: int = 1  # draws from the distributions for each combination of lists; with optuna, points in all
    batch: int = 4  # points that optuna chooses at a time
    # {grace: steps, factor: 3} on the first seed; what ends gets the others
    halving: dict[str, int] = field(default_factory=dict)

    @property
    def verb(self) -> str:
        """What trials are runs of."""
        return "online" if self.online else "train"

    @property
    def flags(self) -> str:
        """Of that verb, for every trial."""
        return self.online or self.train


@dataclass(frozen=True)
class Point:
    """Values of the space's parameters."""

    values: dict[str, Any]

    @property
    def name(self) -> str:
        """`psi,c=0.2` of {method: psi, method.c: 0.2}; one that is too long for the name of a folder is cut,
        with a digest of the whole behind it."""
        labels = [
            shown(value) if name == "method" else f"{name.rpartition('.')[2]}={shown(value)}"
            for name, value in self.values.items()
        ]
        name = ",".join(labels).replace("/", "_")
        if len(whole := name.encode()) <= LONGEST:
            return name
        digest = hashlib.sha256(whole).hexdigest()[:12]
        return whole[: LONGEST - 13].decode(errors="ignore") + "~" + digest

    def of(self, verb: str) -> Point:
        """What it says about one stage; `train` is what no other one is named for."""
        return Point({name: value for name, value in self.values.items() if _verb(name) == verb})

    @property
    def trained(self) -> Point:
        """Points that differ in their evaluation only share their trials."""
        return Point({name: value for name, value in self.values.items() if _verb(name) != "evaluate"})

    def data_folder(self, out: Path) -> Path:
        """Where the data of its reward mix is made:

        `out` itself for points that say nothing about prepare.
        """
        mix = self.of("prepare")
        return out / "mixes" / mix.name if mix.values else out

    def report_folder(self, out: Path) -> Path:
        """`report` of points that say nothing about start and evaluation, `reports/<what they say>` of the
        others, which have a bc of their own."""
        evaluated = Point(self.of("start").values | self.of("evaluate").values)
        return out / "reports" / evaluated.name if evaluated.values else out / "report"

    @property
    def flags(self) -> list[str]:
        """As one would type them after the verb."""
        words: list[str] = []
        for name, value in self.values.items():
            flag = name.split(".", 1)[1] if _verb(name) != "train" else name
            if isinstance(value, bool):
                head, _, leaf = flag.rpartition(".")
                words.append(f"--{head}{'.' * bool(head)}{'' if value else 'no_'}{leaf}")
            else:
                words += [f"--{flag}", repr(value) if isinstance(value, float) else str(value)]
        return words


def read_sweep(path: str, *, seeds: Sequence[int] = (), samples: int = 0) -> Sweep:
    """The YAML file, with other seeds and samples if given. Raises ConfigError for what is not in it."""
    values = read_yaml(path)
    if not values.get("space"):
        raise ConfigError(f"{path}: expected a space: flags of train with the values to try, got none")
    sweep = from_dict(Sweep, values, where=path)
    if unknown := set(sweep.halving) - {"grace", "factor"}:
        raise ConfigError(f"{path}: halving: expected factor, grace, got {', '.join(sorted(unknown))}")
    sweep = replace(sweep, seeds=tuple(seeds) or sweep.seeds, samples=samples or sweep.samples)
    _check_counts(path, sweep)
    for name in ("prepare", "start", "train", "online", "evaluate"):
        check_flags(getattr(sweep, name), f"{path}: {name}")
    check_logs(path, sweep.logs, sweep.write_logs)
    for space in _spaces(sweep):
        if not isinstance(space, Mapping) or not space:
            raise ConfigError(
                f"{path}: space: expected a mapping of flags to values, or a list of such, got {space!r}"
            )
        for name, entry in space.items():
            _check_entry(path, name, entry)
        if sweep.start and BASELINE in (space.get("method") or ()):
            raise ConfigError(
                f"{path}: space: method: expected none of bc, which all points start from and are compared "
                "with; tf_all clones for longer"
            )
        if not sweep.start and (name := next((name for name in space if _verb(name) == "start"), None)):
            raise ConfigError(
                f"{path}: space: {name} is about the bc that trials start from, but the file has no start"
            )
        if not sweep.evaluate and (name := next((name for name in space if _verb(name) == "evaluate"), None)):
            raise ConfigError(f"{path}: space: {name} is about the evaluation, but the file has no evaluate")
    _check_online(path, sweep)
    if sweep.search == "optuna" and any(
        _verb(name) == "evaluate" for space in _spaces(sweep) for name in space
    ):
        raise ConfigError(
            f"{path}: optuna chooses by what training reports, before the evaluation: expected no evaluate.* "
            "in its space"
        )
    return sweep


def check_seeds(path: str, name: str, seeds: Sequence[int]) -> None:
    """Raises ConfigError without any, and where two runs would share a folder."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"{path}: {name}: expected different numbers from 0 on, got {list(seeds)}")


def check_logs(where: str, logs: Sequence[str], write_logs: Mapping[str, Any]) -> None:
    """Raises ConfigError for logs that are read and written, and for such as nobody can write."""
    if logs and write_logs:
        expected = "logs, which are read, or write_logs, which a world writes"
        raise ConfigError(f"{where}: expected {expected}, got both")
    for name, least in {"dialogs": 1, "seed": 0}.items() if write_logs else ():
        value = write_logs.get(name)
        if type(value) is not int or value < least:
            expected = f"expected a whole number of at least {least}, got {value!r}"
            raise ConfigError(f"{where}: write_logs: {name}: {expected}")


def check_world(where: str, write_logs: Mapping[str, Any], flags: Sequence[str]) -> None:
    """Raises ConfigError where a world is to write logs of small talk, and the flags of the verbs, which were
    found to be right, play in another one."""
    worlds = {world for each in flags for world in re.findall(r"--env[ =]+(\S+)", each)}
    if write_logs and not write_logs.get("world") and (others := sorted(worlds - {"small_talk"})):
        raise ConfigError(
            f"{where}: write_logs: without a world they are of small talk, and --env is {others[0]}: "
            f"expected world: {others[0]} beside dialogs and seed"
        )


def _check_counts(path: str, sweep: Sweep) -> None:
    """Numbers with which there would be no sweep."""
    check_seeds(path, "seeds", sweep.seeds)
    counts = {"samples": (sweep.samples, 1), "batch": (sweep.batch, 1)}
    if sweep.halving:
        if "grace" not in sweep.halving:
            raise ConfigError(f"{path}: halving: expected grace, the updates before the first trials stop")
        halving = Halving(**sweep.halving)
        counts |= {"halving: grace": (halving.grace, 1), "halving: factor": (halving.factor, 2)}
    for name, (value, least) in counts.items():
        if value < least:
            raise ConfigError(f"{path}: {name}: expected at least {least}, got {value}")


def _check_online(path: str, sweep: Sweep) -> None:
    """What trials of `online` need, and cannot have."""
    if not sweep.online:
        return
    if sweep.train:
        raise ConfigError(f"{path}: expected either train or online, which trials are runs of, got both")
    if not sweep.start:
        raise ConfigError(f"{path}: online: expected start, flags of the bc that talks first, got none")
    mixes = [name for space in _spaces(sweep) for name in space if _verb(name) == "prepare"]
    if mixes and DATA not in sweep.online:
        raise ConfigError(
            f"{path}: space: {mixes[0]} changes data, and these trials learn from what they play: expected "
            f"{DATA} among the flags of online, as in --contexts {DATA}, or another parameter"
        )


def check_same_sweep(out: Path, path: str) -> None:
    """Raises UserError where what the trials in `out` follow from has changed, so that they had to be
    deleted.

    The space may grow, and the evaluation change.
    """
    if not (out / COPY).is_file():
        return
    old, new = read_yaml(str(out / COPY)), read_yaml(path)
    for name in ("logs", "write_logs", "prepare", "start", "train", "online"):
        if old.get(name) != new.get(name):
            change = f"{name} is {new.get(name)!r}, but {out} was made with {old.get(name)!r}"
            raise UserError(f"{path}: {change}: choose another --output_dir, or --overwrite")
    recipe = next((out / "recipes").glob("*.json"), None)
    if recipe and json.dumps(str(out))[1:-1] not in recipe.read_text(encoding="utf-8"):
        fix = "Move it back to go on with it"
        raise UserError(f"{out} was moved since: {recipe} says where it was made. {fix}")


def find_points(sweep: Sweep) -> list[Point]:
    """Every combination of the listed values, each `samples` times where a distribution takes part; the same
    ones every time, and of each space of a union the same ones whatever the others are."""
    points: dict[str, Point] = {}
    for space in _spaces(sweep):
        own = [zlib.crc32(json.dumps(space).encode())] if isinstance(sweep.space, list) else []
        rng = np.random.default_rng([0, *own])
        distributions = {name: entry for name, entry in space.items() if isinstance(entry, Mapping)}
        listed = {name: entry for name, entry in space.items() if name not in distributions}
        for combination in itertools.product(*listed.values()):
            for _ in range(sweep.samples if distributions else 1):
                values = dict(zip(listed, combination, strict=True))
                values |= {
                    name: rounded(DISTRIBUTIONS[kind](rng, *limits))
                    for name, entry in distributions.items()
                    for kind, limits in entry.items()
                }
                point = Point({name: values[name] for name in space})
                if points.setdefault(point.name, point) != point:
                    raise ConfigError(
                        f"space: expected points of different names, but {points[point.name].values} and "
                        f"{point.values} are both {point.name}"
                    )
    return list(points.values())


class OptunaSearch:
    """Points chosen by Optuna's TPE sampler, `batch` at a time.

    Told the same values it chooses the same points, so a resumed sweep repeats none.
    """

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UserError(
                "search: optuna needs the package optuna: pip install optuna, or choose search: grid"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=max(5, sweep.batch), constant_liar=True)
        self._study = optuna.create_study(
            direction="maximize" if sweep.mode == "max" else "minimize", sampler=sampler
        )
        self._sweep, self._failed = sweep, optuna.trial.TrialState.FAIL

    def batches(self) -> Iterator[tuple[list[Point], Callable[[list[float | None]], None]]]:
        """The next points, and where to say what each reached (None: it failed)."""
        for start in range(0, self._sweep.samples, self._sweep.batch):
            trials = [self._study.ask() for _ in range(min(self._sweep.batch, self._sweep.samples - start))]

            def tell(values: list[float | None], trials: list[Any] = trials) -> None:
                for trial, value in zip(trials, values, strict=True):
                    (
                        self._study.tell(trial, value)
                        if value is not None
                        else self._study.tell(trial, state=self._failed)
                    )

            yield [self._point(trial) for trial in trials], tell

    def _point(self, trial: Any) -> Point:
        spaces = _spaces(self._sweep)
        number = trial.suggest_int("space", 0, len(spaces) - 1) if len(spaces) > 1 else 0
        values = {}
        for name, entry in spaces[number].items():
            label = f"{number}:{name}"
            if not isinstance(entry, Mapping):
                values[name] = trial.suggest_categorical(label, entry)
                continue
            [(kind, (low, high))] = entry.items()
            if kind == "randint":
                values[name] = trial.suggest_int(label, low, high)
            else:
                values[name] = rounded(trial.suggest_float(label, low, high, log=kind == "loguniform"))
        return Point(values)


def rounded(value: float) -> float:
    """To the four digits that names show."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def shown(value: Any) -> str:
    """As in a name."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spaces(sweep: Sweep) -> list[Mapping[str, Any]]:
    return sweep.space if isinstance(sweep.space, list) else [sweep.space]


def _verb(name: str) -> str:
    verb = name.partition(".")[0]
    return verb if verb in VERBS else "train"


def _check_entry(path: str, name: str, entry: Any) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"{path}: space: expected names of flags, got {name!r}")
    if name in VERBS:
        raise ConfigError(f"{path}: space: expected a flag of {name}, as {name}.FLAG, got {name} alone")
    expected = f"{path}: space: {name}: expected a list of values or one of {', '.join(DISTRIBUTIONS)}"
    if isinstance(entry, list) and entry:
        if odd := [value for value in entry if not isinstance(value, str | int | float | None)]:
            raise ConfigError(
                f"{path}: space: {name}: expected numbers and texts, got {odd[0]!r}: put it in quotes"
            )
        return
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{expected}, got {entry!r}")
    [*kinds] = entry
    limits = entry[kinds[0]] if kinds else None
    if len(kinds) != 1 or kinds[0] not in DISTRIBUTIONS or not isinstance(limits, list) or len(limits) != 2:
        raise ConfigError(f"{expected} with [low, high], got {dict(entry)!r}")
    if not all(isinstance(limit, int | float) for limit in limits) or not limits[0] < limits[1]:
        raise ConfigError(
            f"{expected} with [low, high], low below high (write 1.0e-4, not 1e-4: YAML reads that as text), "
            f"got {dict(entry)!r}"
        )
    if kinds[0] == "loguniform" and limits[0] <= 0:
        raise ConfigError(f"{path}: space: {name}: expected limits above 0 for loguniform, got {limits}")
    if kinds[0] == "randint" and not all(
        float(limit).is_integer() and abs(limit) < 2**63 - 1 for limit in limits
    ):
        raise ConfigError(
            f"{path}: space: {name}: expected whole numbers for randint, which draws some, of at most 18 "
            f"digits, got {limits}"
        )
