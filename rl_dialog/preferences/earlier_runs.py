"""Runs that an earlier version began, and that go on with what it did.

That version had no environments of Gymnasium's, cut no clips where episodes begin, did not normalise
observations, had no coordinates of what is seen and no state behind the end of an episode. Its prefer.yaml
does not say so, because it had no names for these settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_dialog.config import to_dict
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.settings import PreferenceRun, Suited


def is_earlier(began: Mapping[str, Any], aligned_clips: float | None) -> bool:
    """Is a run to go on that was begun by such a version? Worlds of one's own had no aligned clips then, and
    have some since, unless they are told not to.

    Args:
        began: the settings in the run's folder; empty for a run that is new.
        aligned_clips: what is given of it now.
    """
    went_on = aligned_clips is None and not began.get("aligned_clips")
    return bool(began) and ("normalise_observations" not in began or went_on)


def as_it_saw(began: Mapping[str, Any], suited: Suited) -> Suited:
    """What suits the environment of a run, with a reward of pictures in the shape that it began with."""
    if not began or "coordinates" in began.get("model", {}):
        return suited
    return replace(suited, model=replace(suited.model, coordinates=False))


def environment_options(began: Mapping[str, Any], given: str | None = None) -> str:
    """The environment's options in the settings of a run, or those `given` as it would have understood them:
    where nothing is said of the steps that it absorbs, episodes that had ended stayed at their last
    observation."""
    options = began.get("env_options", "")
    given = options if given is None else given
    return given if "absorbed_steps=" in options else given.replace("ends=absorb", "ends=hold")


def with_names_since(began: Mapping[str, Any], run: PreferenceRun, make_envs: Any) -> Mapping[str, Any]:
    """The settings in the folder of a run that goes on, with what such a version did without having a name
    for it. `make_envs`: the constructor of its environments, a `partial` (envs/__init__.py)."""
    if not began:
        return began
    usual = to_dict(type(run)())
    groups = {name: usual[name] | value for name, value in began.items() if isinstance(value, dict)}
    groups["env_options"] = environment_options(began)
    if "normalise_observations" in began:
        return {**began, **groups}
    clip_length = getattr(make_envs.func, "clip_length", run.clip_length)
    names = {"clip_length": clip_length, "normalise_observations": False}
    return names | began | groups


def named_labels(began: Mapping[str, Any], folder: Path) -> str:
    """The label log that the settings in a run's folder name, empty where it is labels.db in that folder.

    Such a version wrote down where that was when the run began, which is another place in a copy, or where
    the folder was moved.
    """
    labels = began.get("labels") or ""
    own = RunFiles(folder).own_labels
    is_own = Path(labels).name == Path(own).name and (Path(folder) / Path(own).name).is_file()
    return "" if labels.startswith("sqlite:") and is_own else labels
