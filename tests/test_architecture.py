"""Who may import whom, read from the source: what a diagram would promise and nobody would keep."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("rl_dialog", "envs", "pipelines")

# What each package of rl_dialog may import of the others (itself and EVERYWHERE always). Every arrow points
# towards the data.
EVERYWHERE = ("errors", "own")
ALLOWED = {
    "errors": set(),
    "own": set(),
    "config": set(),
    "run": {"config"},
    "web_server": set(),
    "data": {"config"},
    "methods": {"config", "data"},
    "models": {"config", "data", "methods"},
    "rewards": {"config", "data", "models"},  # a learned reward is a model
    "training": {"config", "data", "methods", "models"},
    "evaluation": {"config", "data", "rewards", "methods", "models", "training"},
    "preferences": {"web_server", "config", "data", "rewards", "methods", "models", "training", "evaluation"},
    "serving": {"web_server", "config", "data", "rewards", "methods", "models", "training", "evaluation"},
    "cluster": {
        "web_server",
        "config",
        "data",
        "rewards",
        "methods",
        "models",
        "training",
        "evaluation",
        "preferences",
        "serving",
    },
}
# Libraries that only these places know.
CONFINED = {
    "ray": ("rl_dialog/cluster/", "pipelines/"),
    # imitation's environment has it, where nothing of ours is
    "gymnasium": ("envs/", "rl_dialog/cluster/", "pipelines/benchmark/imitation_rival.py"),
    "fastapi": ("rl_dialog/serving/", "rl_dialog/preferences/page", "rl_dialog/cluster/serve.py"),
}
VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "handler", "base", "misc", "tools"}


def sources() -> list[Path]:
    return [path for name in OURS for path in sorted((ROOT / name).rglob("*.py"))]


def imports(source: str, package: str) -> Iterator[str]:
    """Every module that a source text imports, at any depth of the code; `from a import b` counts as a and as
    a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def imports_of(path: Path) -> set[str]:
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    return set(imports(path.read_text(encoding="utf-8"), package))


def of(library: str, modules: set[str]) -> set[str]:
    return {module for module in modules if module == library or module.startswith(library + ".")}


def layer(module: str) -> str | None:
    """`rl_dialog.data.schema` -> data; None for what is not a part of rl_dialog."""
    parts = module.split(".")
    return parts[1] if parts[0] == "rl_dialog" and len(parts) > 1 else None


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_reader_of_imports():
    """These tests are as good as what they see: aliases, nested and relative imports, names from packages."""
    text = (
        "import a.b as c, d\nfrom e import f\nfrom . import g\nfrom ..h import i\ndef x():\n    from j.k "
        "import (l, m)\n# import no\n'import no'\n"
    )
    assert set(imports(text, "p.q")) == {
        "a.b",
        "d",
        "e",
        "e.f",
        "p.q",
        "p.q.g",
        "p.h",
        "p.h.i",
        "j.k",
        "j.k.l",
        "j.k.m",
    }
    assert of("ray", {"ray", "ray.data", "rays", "x.ray"}) == {"ray", "ray.data"}
    assert (layer("rl_dialog.data.schema"), layer("rl_dialog"), layer("torch.data")) == ("data", None, None)


def test_there_is_something_to_check():
    names = {shown(path) for path in sources()}
    assert {
        "rl_dialog/data/schema.py",
        "rl_dialog/methods/ilql.py",
        "rl_dialog/models/policy.py",
        "rl_dialog/config.py",
    } <= names


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_packages_import_towards_the_data_only(name):
    wrong = [
        f"{shown(path)} imports {module}"
        for path in sources()
        if path.relative_to(ROOT).parts[:2] in (("rl_dialog", name), ("rl_dialog", f"{name}.py"))
        for module in sorted(imports_of(path))
        if (other := layer(module)) in ALLOWED and other not in ALLOWED[name] | {name, *EVERYWHERE}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_its_place_in_the_order():
    """A new package must be entered above; one that is not would be checked by nothing."""
    found = {
        path.relative_to(ROOT / "rl_dialog").parts[0].removesuffix(".py")
        for path in (ROOT / "rl_dialog").rglob("*.py")
    }
    assert found - {"__init__"} <= ALLOWED.keys(), found - ALLOWED.keys()


def test_the_order_has_no_circle():
    done: set[str] = set()
    for name, below in ALLOWED.items():
        assert below <= done, f"{name} may import {below - done}, which stand after it"
        done.add(name)


@pytest.mark.parametrize("library", sorted(CONFINED))
def test_libraries_stay_where_they_belong(library):
    wrong = [
        shown(path)
        for path in sources()
        if not shown(path).startswith(CONFINED[library]) and of(library, imports_of(path))
    ]
    assert not wrong, f"{library} may be imported in {', '.join(CONFINED[library])} only, not in {wrong}"


def known(module: str) -> bool:
    return bool(
        of("rl_dialog.data.schema", {module}) or any(of(f"rl_dialog.{name}", {module}) for name in EVERYWHERE)
    )


def test_environments_know_the_dialog_and_nothing_else_of_ours():
    """An environment can be lifted out of this repository with three files."""
    wrong = [
        f"{shown(path)} imports {module}"
        for path in sources()
        if shown(path).startswith("envs/")
        for module in sorted(imports_of(path))
        if of("pipelines", {module})
        or (of("rl_dialog", {module}) and module not in ("rl_dialog", "rl_dialog.data") and not known(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_library_knows_neither_environments_nor_pipelines():
    """An environment travels as a constructor that a pipeline passes in."""
    wrong = [
        f"{shown(path)} imports {module}"
        for path in sources()
        if shown(path).startswith("rl_dialog/")
        for module in sorted(imports_of(path))
        if of("envs", {module}) or of("pipelines", {module})
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_tests():
    wrong = [
        shown(path) for path in sources() if of("tests", imports_of(path)) or of("pytest", imports_of(path))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "rl_dialog",
        *(f"rl_dialog.{name}" for name in ("config", "run", "data.schema", "data.splits", "data.readers")),
    ],
)
def test_light_modules_do_not_load_torch(module):
    code = (
        f"import sys; import {module}; print(sorted({{'torch', 'transformers', 'ray'}} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    assert out.strip() == "[]"


def test_no_file_is_named_for_nothing():
    wrong = [
        shown(path)
        for path in sources()
        if path.stem in VAGUE or any(part in VAGUE for part in path.relative_to(ROOT).parts[:-1])
    ]
    assert not wrong, f"name what is in them: {wrong}"


def test_nothing_unpickles():
    """Data and checkpoints come from strangers; a pickle runs their code. (Ray's own wire format is not ours
    to choose.)"""
    wrong = [
        shown(path)
        for path in sources()
        for library in ("pickle", "dill", "cloudpickle", "joblib", "shelve")
        if of(library, imports_of(path))
    ]
    calls = [
        f"{shown(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func) in ("torch.load", "pd.read_pickle", "pandas.read_pickle")
            or any(k.arg == "allow_pickle" for k in node.keywords)
        )
    ]
    assert not wrong + calls
