"""The commands: `python -m pipelines VERB ...`, which an installed package also calls
`rl-dialog VERB ...`."""

from __future__ import annotations

import difflib
import gc
import os
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl_dialog.config import INSTALLED
from rl_dialog.errors import ROOT, page

ARCS = {
    "From logs to a better policy": {
        "quickstart": "the whole circle in minutes, in a world whose best policy is known",
        "prepare": "logs become scored, split and tokenised shards",
        "candidates": "a policy answers logged contexts, and its answers are scored",
        "train": "shards become a checkpoint, by any of the methods that learn from logs",
        "online": "a policy talks in a world and learns from what came of it",
        "tune": "many runs of a search space, and which one was best",
    },
    "How good it is": {
        "evaluate": "checkpoints become a report with intervals",
        "play": "a checkpoint, scripted players or you in any world: returns, logs, films",
        "check_env": "does a world of one's own keep the contract",
        "compare": "the table of all methods on all tasks, with a fair search for settings",
        "ab": "served models compared by what their users said of them",
        "analyse": "what happened in simulated task-oriented dialogs",
        "benchmark": "speed and memory on this machine, as ratios",
    },
    "Talking": {
        "chat": "talk to a checkpoint in the terminal",
        "serve": "an OpenAI-compatible endpoint and a chat page on Ray Serve, whose chats are logs",
        "serve_env": "a world to talk in, served to other trainers by OpenEnv's WebSocket protocol",
        "circle": "clone, serve, collect votes, learn from them, serve again, compare",
    },
    "Preferences": {
        "prefer": "teach a policy by comparing clips of what it does",
        "prefer_replies": "pairs of replies for people, or a reward, to compare",
        "label": "compare them, in the terminal or on a page for browsers",
        "fit_reward": (
            "a reward model over replies, from preferences or ratings, or a quick count of good and bad words"
        ),
    },
    "Task-oriented dialog": {
        "simulate": "a policy meets simulated users, and learns from them",
        "converse": "the same in words: a system of modules, or a language model",
        "talk": "take the part of the user or of the system, and look into every module",
        "fit_nlu": "a model that reads dialogue acts from words",
        "delexicalise": "a corpus as the simulated world would have written it",
    },
}
VERBS = {verb: text for verbs in ARCS.values() for verb, text in verbs.items()}


def main() -> None:
    """Runs the verb that is named first; without one, or with --help, lists them."""
    first, *rest = sys.argv[1:] or ["--help"]
    verb = first.replace("-", "_")
    if first in ("--help", "-h", "help"):
        print(overview())
    elif first == "--version":
        print(f"rl-dialog {_version()}")
    elif verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, 1)
        hint = f" Did you mean {near[0]}?" if near else " Without a verb, all of them are explained."
        print(f"error: unknown verb {first!r}: expected one of {', '.join(VERBS)}.{hint}", file=sys.stderr)
        sys.exit(2)
    else:
        if Path(sys.argv[0]).name == "rl-dialog":
            os.environ[INSTALLED] = "1"
        sys.argv[1:] = rest
        if os.getcwd() not in sys.path:  # where `module:Name` of one's own is looked for, as `python -m` does
            sys.path.insert(0, os.getcwd())
        gc.disable()  # as `python -m pipelines.VERB` does
        runpy.run_module(f"pipelines.{verb}", run_name="__main__", alter_sys=True)


def _version() -> str:
    try:
        return version("rl-dialog")
    except PackageNotFoundError:
        return "from a source tree, not installed"


def overview() -> str:
    """The verbs by the arcs of the circle."""
    width = max(map(len, VERBS))
    lines = ["usage: rl-dialog VERB [OPTIONS]     or     python -m pipelines.VERB [OPTIONS]", ""]
    for arc, verbs in ARCS.items():
        lines += [arc, *(f"  {verb:<{width}}  {text}" for verb, text in verbs.items()), ""]
    lines += ["rl-dialog VERB --help tells what a verb writes and every flag with its default."]
    lines += [f"{page('pipelines/README.md')} names the page of each verb."]
    if not Path("pipelines/README.md").exists():
        lines += [f"Files that help and messages name, such as envs/README.md, lie in {ROOT}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
