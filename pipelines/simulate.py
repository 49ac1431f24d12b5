"""A task-oriented policy against simulated users: how often it does what they want.

    python -m pipelines.simulate --policy rule --episodes 1000 --output_dir runs/simulated                                   a generated town
    python -m pipelines.simulate --policy rule --world ../shared/data/multiwoz --episodes 1000 --output_dir runs/multiwoz    MultiWOZ's files
    python -m pipelines.simulate --policy ppo --world ../shared/data/multiwoz --episodes 500 --num_workers 2 --output_dir runs/ppo  then PPO
    python -m pipelines.simulate --policy ppo --model_name_or_path runs/ppo --epochs 0 --episodes 500 --output_dir runs/again        what it learned

Goal i of a seed is the same for every policy and in every run. Into `out` go

    results.json      every figure with its 95 % interval over conversations, per domain too
    dialogs.jsonl     the conversations in words, one Dialog per line, with acts and rewards: `prepare` reads them
    simulate.yaml     the config

and what pipelines/simulate_train.py writes while it trains. A trained policy says the most probable acts.

The world, its users and the measures are described in envs/multiwoz/README.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tqdm import tqdm

from envs.multiwoz.evaluator import Evaluator
from envs.multiwoz.rollout import Played, dialog_record, transcripts_hash
from envs.multiwoz.templates import Speaker
from pipelines.simulate_play import Player, conversations
from pipelines.simulate_train import TrainingConfig, train
from rl_dialog.config import changed
from rl_dialog.data.schema import Dialog, write_jsonl
from rl_dialog.errors import UserError
from rl_dialog.evaluation.intervals import Estimate, Measure, estimate
from rl_dialog.run import at_least, claim_output, run

CHANGEABLE = ("epochs", "episodes", "together", "num_workers", "save_total_limit")  # by --resume


@dataclass(frozen=True)
class SimulateConfig(TrainingConfig):
    """Which policy meets which users."""

    episodes: int = 1000
    """conversations of the final evaluation"""
    templates: Literal["manual", "auto_manual"] = "manual"
    """how acts are worded. manual: a sentence for each; auto_manual: one for all acts of a kind where the world has one"""
    together: int = 64
    """conversations stepped in turns; changes no result"""


def main(config: SimulateConfig) -> dict[str, Any]:
    """Trains if the policy is a trained one, plays all conversations and writes them; returns headline figures. Raises UserError or OSError."""
    _check(config)
    out, options = claim_output(config, "simulate", free=CHANGEABLE), config.simulator_options
    player = Player(config.world, options, together=config.together)
    world = player.simulator.world
    groups = world.group_templates if config.templates == "auto_manual" else {"user": {}, "system": {}}
    speakers = {side: Speaker(world.templates[side], side=side, groups=groups[side]) for side in ("user", "system")}
    policy, trained = train(config, player) if config.policy != "rule" else (None, {})
    began = time.perf_counter()
    episodes = conversations(player, policy, range(config.episodes), seed=config.seed, workers=config.num_workers, address=config.address)
    played = list(tqdm(episodes, total=config.episodes, unit="dialog", disable=True if config.quiet else None))
    seconds = time.perf_counter() - began
    figures = measure(played, Evaluator(world.database, replace(options, unrequested="act_names")))
    write_jsonl((Dialog.from_record(dialog_record(each, speakers)) for each in played), out / "dialogs.jsonl")
    results = {"world": world.source, "policy": config.policy, "episodes": config.episodes, "seed": config.seed, **trained, "figures": figures}
    results |= {"options": changed(options), "transcripts": transcripts_hash(played)}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not config.quiet:
        print(table(figures), flush=True)
    headline = {name: figure["value"] for name, figure in figures.items() if "/" not in name}
    return {
        **headline,
        "episodes": config.episodes,
        "steps_per_second": round(sum(each.talk.turns for each in played) / seconds),
        "transcripts": results["transcripts"],
        **trained,
        "results": str(out / "results.json"),
        "dialogs": str(out / "dialogs.jsonl"),
    }


def measure(played: Sequence[Played], published: Evaluator) -> dict[str, dict[str, Any]]:
    """Every figure with its interval; those of one domain are named `success/hotel`. `published` counts unrequested slots as the original does."""
    outcomes = [each.outcome for each in played]
    counts = [published.information(each.talk.record).scores or (None, None, None) for each in played]
    columns: dict[str, Iterable[float | None]] = {
        "success": [each.success for each in outcomes],
        "success_strict": [each.success_strict for each in outcomes],
        "complete": [each.complete for each in outcomes],
        "book_rate": [each.book_rate for each in outcomes],
        "inform_precision": [precision for precision, _, _ in counts],
        "inform_recall": [recall for _, recall, _ in counts],
        "inform_f1": [f1 for _, _, f1 in counts],
        "inform_precision_all_slots": [each.inform_precision for each in outcomes],
        "inform_f1_all_slots": [each.inform_f1 for each in outcomes],
        "turns": [each.turns for each in outcomes],
        "return": [each.total for each in outcomes],
    }
    for domain in dict.fromkeys(domain for each in outcomes for domain in each.domains):
        columns[f"success/{domain}"] = [each.domains.get(domain) for each in outcomes]
    measures = {name: Measure.mean(list(values)) for name, values in columns.items()}
    return {name: _figure(estimate([each]), dialogs=int(each.denominator.sum())) for name, each in measures.items()}


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures, one a line."""
    rows = [f"{'measure':<28}{'mean':>9}   95 % interval        dialogs"]
    for name, figure in figures.items():
        if figure["value"] is not None:
            interval = "" if figure["low"] is None else f"[{figure['low']:.3f}, {figure['high']:.3f}]"
            rows.append(f"{name:<28}{figure['value']:>9.3f}   {interval:<20}{figure['dialogs']:>8}")
    return "\n".join(rows)


def _figure(found: Estimate | None, *, dialogs: int) -> dict[str, Any]:
    """Numbers as JSON has them; `dialogs` are those that the figure applies to."""
    if found is None:
        return {"value": None, "low": None, "high": None, "dialogs": 0}
    ends = [None if end is None else round(end, 4) for end in (found.low, found.high)]
    return {"value": round(found.value, 4), "low": ends[0], "high": ends[1], "dialogs": dialogs}


def _check(config: SimulateConfig) -> None:
    at_least(config, episodes=1, together=1, seed=0, train_seed=0, num_workers=0, num_envs=1, eval_every=1, eval_episodes=1)
    at_least(config, rule_episodes=2, save_total_limit=1, epochs=0, batch_size=1)
    if config.policy == "rule":
        given = [name for name in ("model_name_or_path", "epochs", "batch_size", "resume") if getattr(config, name) not in (None, "", False)]
        if given:
            raise UserError(f"--{given[0]}: the rule policy is not trained; choose another --policy, or leave this out")


if __name__ == "__main__":
    run(SimulateConfig, main)
