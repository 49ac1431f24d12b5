"""The frame of every command: its settings, its output folder, how it waits and how it ends.

@dataclass(frozen=True)
class CountConfig(Output):
    data: str = ""
    \"\"\"a directory that `prepare` wrote\"\"\"

def main(config: CountConfig) -> dict[str, Any]:
    require(config, data="a directory that `prepare` wrote")
    out = claim_output(config, "count")
    ...
    return {"output_dir": str(out)}

if __name__ == "__main__":
    run(CountConfig, main)
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import gc
import io
import ipaddress
import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from rl_dialog.config import (
    Choices,
    as_typed_here,
    load_config,
    read_yaml,
    require,
    save_config,
    to_dict,
    write_whole,
)
from rl_dialog.config import at_least as at_least  # verbs check their own settings by it
from rl_dialog.errors import UserError, room_for

T = TypeVar("T")
LINE_EVERY = 30.0  # seconds between two lines of progress
HALF = ".*.tmp-*"  # what a killed process had half written (data/files.py)
HELD: dict[Path, int] = {}  # folders that this process writes to, and what its locks on them are open as
RUNNING: list[Callable[..., Any]] = []  # the `main` of the command that this process is
HOW = (
    "output_dir",
    "overwrite",
    "resume",
    "quiet",
    "address",
    "num_cpus",
    "report_to",
)  # how a run is made: no result depends on it


@dataclass(frozen=True)
class Quiet:
    """What a command prints."""

    quiet: bool = False
    """print only the final line of JSON"""


@dataclass(frozen=True)
class OnCluster:
    """Where Ray runs."""

    address: str = ""
    """the Ray cluster to join; empty starts Ray on this machine, or joins RAY_ADDRESS"""


@dataclass(frozen=True)
class OnDevice:
    """Where torch computes."""

    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""


@dataclass(frozen=True)
class Output(Quiet):
    """A folder that a command fills."""

    output_dir: str = ""
    """the folder to write to; one that holds something is left alone"""
    overwrite: bool = False
    """delete the folder that this command filled before, with all that is in it, and start anew"""

    @property
    def is_resumable(self) -> bool:
        """Can --resume go on with what is in the folder?"""
        return False


@dataclass(frozen=True)
class ResumableOutput(Output):
    """A folder that a command fills for hours."""

    resume: bool = False
    """go on with what this command began in the folder, with the same settings"""

    @property
    def is_resumable(self) -> bool:
        return True


def run(
    config_class: type[T],
    main: Callable[[T], dict[str, Any]],
    *,
    choices: Choices | None = None,
    suited: Callable[[T], dict[str, Any]] | None = None,
    listed: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """The entry point of a command: loads its config, runs `main`, prints the headline figures as the last
    line of stdout.

    A message to people (UserError), or what the machine refused (OSError), becomes one paragraph on stderr
    and exit status 2; RL_DIALOG_DEBUG=1 shows where it came from. Anything else is a defect of ours and shows
    its traceback. Ctrl-C ends with status 130.
    """
    if not gc.isenabled():  # pipelines/__init__.py
        gc.freeze()  # what was imported stays
        gc.enable()
    _take_any_terminal()
    try:
        config = _typed(config_class, choices=choices, suited=suited, listed=listed)
        RUNNING.append(main)
        with room_for(getattr(config, "output_dir", "") or os.getcwd()):
            result = main(config)
    except (UserError, OSError) as error:
        if os.environ.get("RL_DIALOG_DEBUG"):
            raise
        how = dict.fromkeys(("break_long_words", "break_on_hyphens", "replace_whitespace"), False)
        told = f"error: {as_typed_here(_in_words(error))}"
        print("\n" + textwrap.fill(told, width=140, **how), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if os.environ.get("RL_DIALOG_DEBUG"):
            raise
        onwards = ": the same command with --resume goes on" if hasattr(config_class, "resume") else ""
        print(f"\ninterrupted{onwards}", file=sys.stderr)
        sys.exit(130)
    finally:
        RUNNING.clear()
        _let_go(*HELD)
    print(_shown_as_json(result), flush=True)


def _typed(config_class: type[T], **how: Any) -> T:
    """The config of a command; whoever reads of its help only the beginning ends it without a word."""
    try:
        return load_config(config_class, **how)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tells it at its end
        sys.exit(0)


def _in_words(error: Exception) -> str:
    """What the machine refused names the file and what to look at; `[Errno 13]` tells a person nothing."""
    if not (isinstance(error, OSError) and error.strerror and error.filename):
        return str(error)
    remedies = {
        PermissionError: "choose another place, or have it made readable and writable for you",
        FileNotFoundError: "look whether the path is spelt right and its folder can be made",
        FileExistsError: "choose another place",
        NotADirectoryError: "choose a path whose folders are folders",
    }
    remedy = remedies.get(type(error))
    return f"{error.filename}: {error.strerror}" + (f" ({remedy})" if remedy else "")


def claim_output(
    config: Output,
    name: str,
    *,
    free: Collection[str] = (),
    choices: Choices | None = None,
    began: Mapping[str, Any] | None = None,
    shared: bool = False,
    written: Collection[str] = (),
) -> Path:
    """The output folder, where NAME.yaml now holds the config: new, emptied by --overwrite, or as it was for
    --resume.

    Raises UserError for a folder that holds anything else, for a run that neither flag was given for, and for
    one to resume whose settings are not these; those in `free`, and how it is run, may differ. `began`: the
    settings of the one to resume, where NAME.yaml does not say all of them. Unless several commands may share
    the folder, another one that runs and claimed it is an error too; so is a setting that names something in
    a folder that --overwrite would delete, unless it is among those that name what is `written`.
    """
    require(config, output_dir="a folder to write to")
    out = Path(config.output_dir).absolute()
    settings, resume = out / f"{name}.yaml", getattr(config, "resume", False)
    if out.is_dir() and not shared:
        _hold(out)
    if resume and config.overwrite:
        raise UserError(f"expected --resume, to go on with {out}, or --overwrite, to delete it, got both")
    if out.exists() and (not out.is_dir() or any(path != settings for path in out.iterdir())):
        if not settings.is_file():
            raise UserError(
                f"{out} exists and was not made by `{name}`, so it is left alone: choose another --output_dir"
            )
        if config.overwrite:
            _check_outside(to_dict(config, choices=choices), out, but=(*HOW, *written))
            shutil.rmtree(out)
        elif resume:
            before = began or read_yaml(str(settings))
            check_same(before, to_dict(config, choices=choices), out, free=free)
        else:
            remedies = "--resume to go on with it or --overwrite" if config.is_resumable else "--overwrite"
            raise UserError(
                f"{out} already holds a run of `{name}`: pass {remedies} to delete it, or choose another "
                "--output_dir"
            )
    with room_for(out):
        out.mkdir(parents=True, exist_ok=True)
        if not shared:
            _hold(out)
        for left in out.rglob(HALF):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        save_config(config, settings, choices=choices)
    return out


def _check_outside(values: Mapping[str, Any], out: Path, *, but: Collection[str], group: str = "--") -> None:
    """Raises UserError for a setting, PATH or NAME=PATH, that names something in the folder."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_outside(value, out, but=(), group=f"{group}{name}.")
        for text in value if isinstance(value, list) else [value]:
            if name in but or not text or not isinstance(text, str):
                continue
            place = Path(text.rpartition("=")[2]).resolve()
            if place.is_relative_to(out.resolve()) and place.exists():
                raise UserError(
                    f"{group}{name} {text} is in {out}, which --overwrite would delete: choose another "
                    "--output_dir"
                )


@contextmanager
def claimed(config: ResumableOutput, name: str, **how: Any) -> Iterator[Path]:
    """The folder of `claim_output`, for a run that may still be refused when all is loaded. Where that
    happens before it wrote a checkpoint, NAME.yaml tells again of those that are there."""
    settings = Path(config.output_dir).absolute() / f"{name}.yaml"
    latest = settings.with_name("latest")
    before, checkpoint = _text(settings), _text(latest)
    out = claim_output(config, name, **how)
    try:
        yield out
    except UserError:
        if config.resume and before and out.is_dir() and _text(latest) == checkpoint:
            with contextlib.suppress(OSError):  # of a full disk, which the error tells of
                write_whole(settings, before)
        raise


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _hold(out: Path) -> None:
    """A lock on the folder, which a command keeps until it ends or claims one elsewhere; who calls its `main`
    only looks. Raises UserError where another process has it."""
    _let_go(*(path for path in HELD if path not in out.parents))
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(
            f"{out}: expected a folder that no other command writes to, but one that is running does: wait "
            "for its end, or choose another --output_dir"
        ) from None
    except OSError:  # a file system that has no locks
        os.close(folder)
    else:
        HELD[out] = folder
        if not RUNNING:
            _let_go(out)


def _let_go(*folders: Path) -> None:
    for folder in folders:
        os.close(HELD.pop(folder))


def check_same(
    before: Mapping[str, Any], now: Mapping[str, Any], out: Path, *, free: Collection[str] = ()
) -> None:
    """Raises UserError that names what differs between the settings of a run and those it is to go on with;
    what is `free` may, `model.rank` for one field of a group."""
    before, now = (_without(free, settings) for settings in (before, now))
    different = [name for name in now if name not in HOW and before.get(name) != now[name]]
    if different:
        differences = "; ".join(
            f"--{name} {_difference(before.get(name), now[name])}" for name in different[:3]
        )
        raise UserError(
            f"{out} was made with other settings: {differences}. Resume it with the same ones, or choose "
            "another --output_dir"
        )


def _without(free: Collection[str], values: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    return {
        name: _without(free, value, f"{group}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if group + name not in free
    }


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name} {before.get(name)!r} then and {now.get(name)!r} now" for name in names)
    return f"{before!r} then and {now!r} now"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What a resumed run takes other than it was, a setting at a time: `--steps 2000 instead of 1000`."""
    for name in before:
        if name not in HOW and before[name] != now.get(name):
            new, old = _besides(now[name], before[name]), _besides(before[name], now[name])
            yield f"--{name} {new} instead of {old}"


def _besides(value: Any, other: Any) -> str:
    """A value, or what of it differs from another one."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items() if other.get(name) != each)
    return str(value)


def is_loopback(host: str) -> bool:
    """Does a server on this address hear this machine alone?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """An event that Ctrl-C and a termination signal set."""
    end = threading.Event()
    # In a thread: `wait`, which a signal interrupts, may hold the lock that `set` takes.
    with handling(lambda *_: _thread.start_new_thread(end.set, ()), signal.SIGINT, signal.SIGTERM):
        yield end


@contextmanager
def told_to_save() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or termination signal sets, for what is to save and to end; the second
    does not wait. To be asked by `is_set`: what waits for it may hold the lock that setting it takes."""
    stop = threading.Event()

    def end(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        print("\nsaving what is learned; once more to leave it", file=sys.stderr, flush=True)
        stop.set()

    with handling(end, signal.SIGINT, signal.SIGTERM):
        yield stop


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Ctrl-C, a termination signal and the end of the terminal interrupt the block; those after the first do
    not disturb its end."""
    came: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    with handling(interrupt, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def handling(handler: Callable[..., Any], *numbers: signal.Signals) -> Iterator[None]:
    """These signals go to the handler while the block lasts."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def progress(
    title: str, total: int | None, unit: str, *, done: int = 0, quiet: bool = False
) -> Iterator[Callable[[int], Any]]:
    """How far long work is: takes how many of `unit` have come since the last call. On stderr, a bar on a
    terminal and now and then a line where there is none, as in the log of a job; nothing if `quiet`."""
    if quiet:
        yield lambda count: None
    elif sys.stderr.isatty():
        with tqdm(desc=title, total=total, initial=done, unit=f" {unit}") as bar:
            yield bar.update
    else:
        with _lines_of(title, total, unit, done) as step:
            yield step


@contextmanager
def _lines_of(title: str, total: int | None, unit: str, done: int) -> Iterator[Callable[[int], None]]:
    """By a thread, so that a line comes also while nothing is finished."""
    began, ended, count = time.monotonic(), threading.Event(), done

    def say() -> None:
        of = "" if total is None else f" of {total:,}"
        seconds = time.monotonic() - began
        print(f"{title}: {count:,}{of} {unit} after {seconds:.0f} s", file=sys.stderr, flush=True)

    def step(more: int) -> None:
        nonlocal count
        count += more

    def keep_saying() -> None:
        while not ended.wait(LINE_EVERY):
            say()

    thread = threading.Thread(target=keep_saying, daemon=True)
    thread.start()
    try:
        yield step
    finally:
        ended.set()
        thread.join()
        if time.monotonic() - began >= LINE_EVERY:
            say()


def _take_any_terminal() -> None:
    """No character ends a program: one that the terminal cannot show is escaped, bytes that its encoding does
    not have are kept (PEP 383)."""
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _shown_as_json(result: dict[str, Any]) -> str:
    """One line that is JSON on any terminal."""
    text = json.dumps(result, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(result, default=str)
    return text
