"""The rewards of a prepare run: which ones, by which models, how they are normalised, and what the manifest says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_dialog.cluster.scored import Scored
from rl_dialog.cluster.shards import Shard
from rl_dialog.data.shards import MANIFEST, load_manifest
from rl_dialog.errors import UserError
from rl_dialog.rewards import COLUMNS_2019, COMPAT, REWARDS, Statistics, choose_rewards
from rl_dialog.rewards.normalise import Normaliser, fit_moments, fit_rank, read_kinds
from rl_dialog.rewards.scorers import BUILT_IN, make_scorers, needed
from rl_dialog.rewards.statistics import SUM

MOST_SHOWN = 9  # components whose correlations fit a terminal; manifest.json and the report have those of more

if TYPE_CHECKING:
    from pipelines.prepare import PrepareConfig


def weights_of(config: PrepareConfig) -> dict[str, float]:
    """Reward -> weight. Raises UserError for an unknown reward, or a model that cannot be loaded: now, and not in a worker."""
    if config.weight and len(config.weight) != len(config.reward):
        raise UserError(f"expected a weight for each reward, got {len(config.reward)} rewards (-r) and {len(config.weight)} weights (-w)")
    weights = {name: float(weight) for name, weight in config.rewards.items() if weight is not None}
    for given, weight in zip(config.reward, config.weight or [1.0] * len(config.reward), strict=True):
        name = given if given in REWARDS else COLUMNS_2019.get(given) or COLUMNS_2019.get(f"reward_{given}", given)
        if name in weights:
            raise UserError(f"expected each reward once, got {name} twice" + (f", once as {given}" if given != name else ""))
        weights[name] = weight
    if not weights:
        weights = {"logged": 1.0}
        if not config.quiet:
            print("no --rewards given: a reply's reward is the one its log has (logged 1)")
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise UserError(f"expected a finite weight for --rewards.{name}, got {weight}")
    scorers = make_scorers(config.scorers, label_weights=label_weights_of(config))
    choose_rewards(weights, compat=config.compat, scorers=scorers)
    if "learned" in weights and scorers["reward_model"] is BUILT_IN["reward_model"]:
        raise UserError("--rewards.learned: expected the model that it asks, --scorers reward_model=DIR (pipelines.fit_reward makes one)")
    return weights


def label_weights_of(config: PrepareConfig) -> dict[str, float]:
    """Label of a classifier -> what it counts."""
    found = {}
    for entry in config.label_weights:
        label, _, number = entry.rpartition("=")
        try:
            found[label] = float(number)
        except ValueError:
            raise UserError(f"--label_weights {entry}: expected LABEL=NUMBER") from None
    return found


def kinds_of(config: PrepareConfig, weights: dict[str, float]) -> dict[str, str]:
    """Which normaliser each reward wants, if any."""
    usual = [f"{name}={COMPAT[config.compat][name][1]}" for name in weights] if config.compat and not config.normalisers else []
    return read_kinds([*usual, *config.normalise], list(weights))


def given_normalisers(config: PrepareConfig, weights: dict[str, float]) -> dict[str, Normaliser]:
    """Those of --normalisers for the rewards of this run."""
    if not config.normalisers:
        return {}
    if config.normalise:
        raise UserError("expected --normalise to fit normalisers or --normalisers to use fitted ones, got both")
    path = Path(config.normalisers)
    manifest = load_manifest(path.parent if path.name == MANIFEST else path)
    found = manifest["rewards"].get("normalisers", {})
    if not found:
        raise UserError(f"--normalisers {config.normalisers}: expected a data directory that was prepared with --normalise")
    if unknown := [name for name in found if name not in weights]:
        raise UserError(f"--normalisers {config.normalisers}: it normalises {', '.join(unknown)}, expected --rewards.{unknown[0]} in this run too")
    return {name: Normaliser.from_dict(values) for name, values in found.items()}


def fit(kinds: dict[str, str], weights: dict[str, float], scored: Scored, *, everywhere: bool) -> dict[str, Normaliser]:
    """From the training split, or `everywhere` from all. Raises UserError for a component that applies to none of its replies."""
    figures = (scored.statistics if everywhere else scored.training).summary(weights)["components"]
    for name in kinds:
        if not figures[name]["coverage"]:
            raise UserError(f"--normalise: the reward {name} applies to no reply of the training split, so there is nothing to fit: leave it out")
    return {
        name: fit_rank(scored.ranked[name])
        if kind == "rank"
        else fit_moments(kind, mean=figures[name]["mean"], std=figures[name]["std"], low=figures[name]["min"], high=figures[name]["max"])
        for name, kind in kinds.items()
    }


def reward_figures(scored: Scored, shards: dict[str, list[Shard]], weights: dict[str, float], normalisers: dict[str, Normaliser]) -> dict[str, Any]:
    """Statistics of the raw components; of their sum as it is used, normalised or not."""
    figures = scored.statistics.summary(weights)
    if normalisers:
        totals = [Statistics.from_dict(shard.rewards) for found in shards.values() for shard in found]
        figures["sum"] = reduce(Statistics.merge, totals).summary({})["sum"]
        for row in figures["correlation"].values():
            row.pop(SUM)  # it was that of the raw sum
        figures["correlation"].pop(SUM)
    return figures | {"normalisers": {name: normaliser.to_dict() for name, normaliser in normalisers.items()}}


def scorer_names(config: PrepareConfig, weights: dict[str, float]) -> dict[str, str]:
    """Reward -> the model that scored it, for those that need one."""
    own = dict(entry.partition("=")[::2] for entry in config.scorers)
    functions = {name: function for name, (function, _) in COMPAT[config.compat].items()} if config.compat else REWARDS
    needs = {name: needed(functions[name]) for name in weights if name in functions}
    return {name: ", ".join(own.get(kind, BUILT_IN[kind].name) for kind in kinds) for name, kinds in needs.items() if kinds}


def reward_tables(rewards: dict[str, Any]) -> Iterator[Any]:
    from rich.table import Table

    figures = ("mean", "std", "min", "max")
    table = Table("reward", title="Rewards per reply (over the replies a component applies to)", title_justify="left")
    for name in ("weight", *figures, "coverage"):
        table.add_column(name, justify="right")
    for name, row in rewards["components"].items():
        table.add_row(name, f"{row['weight']:g}", *(_number(row[key]) for key in figures), f"{row['coverage']:.1%}")
    table.add_row("sum", "", *(_number(rewards["sum"][key]) for key in figures), f"{rewards['sum']['coverage']:.1%}")
    yield table
    if 1 < len(rewards["components"]) <= MOST_SHOWN:
        names = list(rewards["correlation"])
        table = Table("correlation", *names, title_justify="left")
        for name in names:
            table.add_row(name, *("" if value is None else f"{value:.2f}" for value in rewards["correlation"][name].values()))
        yield table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
