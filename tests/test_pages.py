"""The pages beside the code name everything that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envs import ENVS
from pipelines.__main__ import VERBS
from rl_dialog.data.readers import READERS
from rl_dialog.methods import METHODS
from rl_dialog.rewards import REWARDS

ROOT = Path(__file__).parent.parent
FOLDERS = ("rl_dialog", "envs", "pipelines")
PAGES = {
    path: path.read_text(encoding="utf-8") for name in FOLDERS for path in sorted((ROOT / name).rglob("*.md"))
}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_is_one_screen():
    assert len(README.encode()) <= 9000


@pytest.mark.parametrize(
    ("folder", "names"),
    [("rl_dialog/methods", METHODS), ("rl_dialog/rewards", REWARDS), ("envs", ENVS), ("pipelines", VERBS)],
    ids=["methods", "rewards", "envs", "verbs"],
)
def test_every_name_is_on_the_page_of_its_folder(folder, names):
    page = PAGES[ROOT / folder / "README.md"]
    missing = [name for name in names if not re.search(rf"\b{name}\b", page)]
    assert not missing


def test_every_reader_is_on_the_page_of_the_data():
    page = PAGES[ROOT / "rl_dialog/data/README.md"]
    assert [name for name in READERS if not re.search(rf"\b{name}\b", page)] == []


def test_every_module_is_on_a_page():
    """Named as a file, `schema.py`, on the page of its folder or of one above."""
    missing = []
    for path in (path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))):
        near = [text for page, text in PAGES.items() if page.parent in path.parents]
        if not path.stem.startswith("__") and not any(
            re.search(rf"\b{path.stem}(\.py)?\b", text) for text in near
        ):
            missing.append(str(path.relative_to(ROOT)))
    assert not missing, f"on no page: {', '.join(missing)}"


def test_every_link_of_a_page_leads_somewhere():
    wrong = []
    for page, text in [(ROOT / "README.md", README), *PAGES.items()]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in link and not (page.parent / link).exists():
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_every_config_that_is_named_is_there():
    """On a page, in a help text, in a docstring or in another config."""
    files = [ROOT / "README.md", *(ROOT / "tune_configs").glob("*.yaml")]
    files += [path for name in FOLDERS for kind in ("md", "py") for path in (ROOT / name).rglob(f"*.{kind}")]
    named = {
        (name, str(path.relative_to(ROOT)))
        for path in files
        for name in re.findall(r"tune_configs/\w+\.yaml", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert not [(name, where) for name, where in sorted(named) if not (ROOT / name).is_file()]


def test_every_page_that_help_or_a_comment_names_is_there():
    """By its name in the repository, or beside the file that names it."""
    wrong = []
    for path in (path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))):
        for named in re.findall(r"\w[\w./-]*\.md\b", path.read_text(encoding="utf-8")):
            if "/" in named and not (ROOT / named).is_file():
                wrong.append(f"{path.relative_to(ROOT)}: {named}")
    assert not wrong, "\n".join(wrong)
