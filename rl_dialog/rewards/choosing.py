"""What a user says about rewards: which ones, with which weights, asked of which models, normalised how."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_dialog.data.shards import MANIFEST, load_manifest
from rl_dialog.errors import UserError
from rl_dialog.rewards import COLUMNS_2019, COMPAT, REWARDS, Reward, choose_rewards
from rl_dialog.rewards.fitted import judges_texts
from rl_dialog.rewards.normalise import Normaliser, read_kinds
from rl_dialog.rewards.scorers import (
    BUILT_IN,
    LABELS,
    NO_MODEL,
    Scorer,
    make_scorers,
    needed,
    paths_of,
)


def read_weights(
    rewards: Mapping[str, float | None], *, names: Sequence[str] = (), weights: Sequence[float] = ()
) -> dict[str, float]:
    """Reward -> weight, of `rewards` that have one and of `names` with `weights` (1 each by default), which
    may be those of the 2019 code."""
    if weights and len(weights) != len(names):
        raise UserError(
            f"expected a weight for each reward, got {len(names)} rewards (-r), {len(weights)} weights (-w)"
        )
    chosen_weights = {name: float(weight) for name, weight in rewards.items() if weight is not None}
    for word, weight in zip(names, weights or [1.0] * len(names), strict=True):
        name = word if word in REWARDS else COLUMNS_2019.get(word) or COLUMNS_2019.get(f"reward_{word}", word)
        if name in chosen_weights:
            raise UserError(
                f"expected each reward once, got {name} twice" + (f", once as {word}" if word != name else "")
            )
        chosen_weights[name] = weight
    for name, weight in chosen_weights.items():
        if not math.isfinite(weight):
            raise UserError(f"expected a finite weight for --rewards.{name}, got {weight}")
    return chosen_weights


def read_label_weights(entries: Sequence[str]) -> dict[str, float]:
    """Label of a classifier -> what it counts, of LABEL=NUMBER."""
    counts = {}
    for entry in entries:
        label, _, number = entry.rpartition("=")
        if label in counts:
            raise UserError(f"--label_weights {entry}: expected each label once, got {label} twice")
        try:
            counts[label] = float(number)
        except ValueError:
            counts[label] = math.nan
        if not label or not math.isfinite(counts[label]):
            raise UserError(f"--label_weights {entry}: expected LABEL=NUMBER")
    return counts


def load_rewards(
    weights: Mapping[str, float],
    *,
    rating: str | None,
    compat: str,
    scorers: Sequence[str],
    label_weights: Mapping[str, float],
) -> dict[str, Reward]:
    """The functions with their models.

    Raises UserError for an unknown reward, or a model that cannot be loaded: now, and not in a worker.
    """
    if rating is not None and "rating" not in weights:
        raise UserError(f"--rating {rating}: expected --rewards.rating WEIGHT too, the reward that reads it")
    models = make_scorers(scorers, label_weights=label_weights)
    functions = choose_rewards(weights, rating_name=rating, compat=compat, scorers=models)
    for name, scorer in (("learned", "reward_model"), ("predicted_upvotes", "upvotes")):
        if name in weights and models[scorer] is BUILT_IN[scorer]:
            raise UserError(
                f"--rewards.{name}: expected the model that it asks, --scorers {scorer}=DIR "
                "(pipelines.fit_reward makes one)"
            )
    return functions


def prepared_rewards(
    names: Sequence[str],
    settings: Mapping[str, Any],
    *,
    reward_model: str = "",
    asked: Collection[str] = (),
) -> tuple[dict[str, Reward], dict[str, str]]:
    """The functions as `prepare` with these settings had them, and why some of `names` are not among them.

    `reward_model` stands for the one that the settings name. Only a `module:function` that was `asked` for is
    imported: data of others does not say which code runs here.
    """
    scorers, problems = _prepared_scorers(settings, reward_model)
    how = {"rating_name": settings.get("rating"), "compat": settings.get("compat", ""), "scorers": scorers}
    rewards, missing = {}, {}
    for name in names:
        if ":" in name and name not in asked:
            missing[name] = f"the data names it; code runs only for who asks for it: --rewards {name}"
            continue
        try:
            [reward] = choose_rewards([name], **how).values()
        except UserError as error:
            missing[name] = str(error)
            continue
        lacking = [kind for kind in needed(reward) if scorers[kind] is NO_MODEL]
        if lacking:
            unknown = "the model that the data was prepared with is not known here"
            flag = ": --reward_model" if "reward_model" in lacking else ""
            missing[name] = problems.get(lacking[0], unknown) + flag
        else:
            rewards[name] = reward
    return rewards, missing


def _prepared_scorers(
    settings: Mapping[str, Any], reward_model: str
) -> tuple[dict[str, Scorer], dict[str, str]]:
    """Keyword -> scorer, NO_MODEL for one that cannot be loaded; and why it cannot."""
    paths = paths_of(settings.get("scorers", ())) | ({"reward_model": [reward_model]} if reward_model else {})
    weights = read_label_weights(settings.get("label_weights", ()))
    scorers, problems = dict(BUILT_IN), {}
    for kind, named in paths.items():
        weighed = kind in LABELS and not judges_texts(named[0])
        entries = [f"{kind}={path}" for path in named]
        try:
            scorers[kind] = make_scorers(entries, label_weights=weights if weighed else None)[kind]
        except UserError as error:
            scorers[kind], problems[kind] = NO_MODEL, str(error)
    return scorers, problems


def scorer_names(weights: Mapping[str, float], *, compat: str, scorers: Sequence[str]) -> dict[str, str]:
    """Reward -> the model that scored it, for those that need one."""
    paths = {name: ", ".join(named) for name, named in paths_of(scorers).items()}
    functions = {name: function for name, (function, _) in COMPAT[compat].items()} if compat else REWARDS
    needs = {name: needed(functions[name]) for name in weights if name in functions}
    return {
        name: ", ".join(paths.get(kind, BUILT_IN[kind].name) for kind in kinds)
        for name, kinds in needs.items()
        if kinds
    }


def kinds_of(weights: Mapping[str, float], normalise: Sequence[str], *, compat: str) -> dict[str, str]:
    """Which normaliser each reward wants, if any; with `compat`, as the 2019 code had it unless `normalise`
    says otherwise."""
    usual = [f"{name}={COMPAT[compat][name][1]}" for name in weights] if compat else []
    return read_kinds([*usual, *normalise], list(weights))


def load_normalisers(path: str, weights: Mapping[str, float]) -> dict[str, Normaliser]:
    """Those of a data directory, or its manifest.json, for the rewards of this run."""
    directory = Path(path).parent if Path(path).name == MANIFEST else Path(path)
    fitted = load_manifest(directory)["rewards"].get("normalisers", {})
    if not fitted:
        raise UserError(f"--normalisers {path}: expected a data directory that was prepared with --normalise")
    if unknown := [name for name in fitted if name not in weights]:
        raise UserError(
            f"--normalisers {path}: it normalises {', '.join(unknown)}, expected --rewards.{unknown[0]} in "
            "this run too"
        )
    return {name: Normaliser.from_dict(values) for name, values in fitted.items()}
