"""What can be known to fail in a run of online learning (online_run.py) before anything is played."""

from __future__ import annotations

from rl_dialog.config import at_least
from rl_dialog.data.shards import load_manifest
from rl_dialog.data.tokenize import require_hub_name_or_directory
from rl_dialog.errors import UserError
from rl_dialog.evaluation.online_run import OnlineRun, decoding_of
from rl_dialog.evaluation.openings import ROLES
from rl_dialog.methods import ONLINE
from rl_dialog.models.checkpoint import describe, method_name, resolve, speaks_by_values
from rl_dialog.models.steering import check_heads
from rl_dialog.rewards import choosing
from rl_dialog.training.logger import check_tracker
from rl_dialog.training.versions import FROZEN


def check_run(config: OnlineRun, *, labelled: bool = False) -> None:
    """What can be known to fail before anything is loaded. Raises UserError.

    labelled: somebody is asked what is preferred, so that rewards need not be given.
    """
    _check_numbers(config)
    decoding_of(config).check()
    _check_partner(config, labelled=labelled)
    _check_self_play(config)
    if config.max_staleness and not config.num_workers:
        raise UserError(
            f"--max_staleness {config.max_staleness}: expected --num_workers, which play while this process "
            "learns"
        )
    check_tracker(config.report_to)
    if config.max_staleness and config.method.online and config.method.chooses_latents:
        raise UserError(
            f"--max_staleness {config.max_staleness}: expected 0 with --method {method_name(config.method)}, "
            "which learns from latents as its round's weights draw them (--method.learns worker does not)"
        )
    if not config.method.online:
        raise UserError(
            f"--method {method_name(config.method)} learns from logs: python -m pipelines.train; online "
            f"learn {', '.join(ONLINE)}"
        )
    _check_terms(config)
    if config.method.compares_groups and config.group_size < 2:
        raise UserError(
            f"--group_size {config.group_size}: {method_name(config.method)} compares the episodes of a "
            "group, so expected at least 2; ppo, and reinforce with another --method.baseline, learn from "
            "single ones"
        )


def check_start(config: OnlineRun) -> None:
    """The same of what it starts from, and of the logs and contexts. Raises UserError."""
    for place in (config.data, config.contexts):
        if place:
            load_manifest(place)
    for path in (config.model_name_or_path, *([config.prior] if config.prior else [])):
        require_hub_name_or_directory(path)
    start = resolve(config.model_name_or_path)
    if speaks_by_values(start):
        check_heads((describe(start).get("model") or {}).get("heads", ""))
        if config.use_peft:
            raise UserError(
                "--use_peft: expected a start that is its language model, got "
                f"{config.model_name_or_path}, which speaks by its values too: the model without adapters "
                "would not be its prior"
            )


def _check_numbers(config: OnlineRun) -> None:
    at_least(
        config,
        max_steps=1, groups=1, group_size=1, batch_size=0, env_episodes=1, self_play_turns=1,
        user_turns=1, user_concurrency=1,
        num_workers=0, cpus_per_worker=1, max_staleness=0, lora_r=1, lora_alpha=1,
        per_device_train_batch_size=1, num_learners=0, max_failures=0,
        num_iterations=1, num_mini_batches=1, warmup_steps=0, eval_steps=0, save_steps=0, logging_steps=1,
        save_total_limit=1, max_grad_norm=0, seed=0, value_unit=0,
        target_kl=0, kl_gain=0, supervised_weight=0, learning_rate=0, weight_decay=0,
    )  # fmt: skip


def _check_terms(config: OnlineRun) -> None:
    """What the loss has besides the method's own."""
    if bool(config.data) != bool(config.supervised_weight):
        given, other = ("data", "supervised_weight") if config.data else ("supervised_weight", "data")
        raise UserError(
            f"--{given}: expected --{other} too: a supervised term is of logs (data) and has a weight"
        )
    if config.use_peft and config.prior:
        raise UserError(
            "--use_peft: expected no --prior, because the model without its adapters is the prior, got "
            f"{config.prior}"
        )
    if config.target_kl and not config.method.c:
        raise UserError("--target_kl: expected --method.c above 0, which is where c begins")


def _check_partner(config: OnlineRun, *, labelled: bool) -> None:
    given = [f"--{name}" for name in ("env", "contexts", "users") if getattr(config, name)]
    if len(given) != 1:
        raise UserError(
            "expected either --env, a world to talk in, or --contexts, a directory that `prepare` wrote, or "
            "--users, an endpoint that plays the user, got "
            + (f"both {' and '.join(given)}" if given else "neither")
        )
    weights = choosing.read_weights(config.rewards)
    if bool(config.users) != bool(config.personas):
        missing = "personas, a file that says who the users are" if config.users else "users URL"
        raise UserError(f"--{'users' if config.users else 'personas'}: expected --{missing}, too")
    if config.users and config.self_play:
        raise UserError("--users: expected no --self_play, because the endpoint plays the other role")
    if not config.user_timeout > 0:
        raise UserError(f"--user_timeout: expected seconds above 0, got {config.user_timeout}")
    if config.scorers and not weights:
        raise UserError("--scorers: expected rewards that ask them, --rewards.NAME WEIGHT, got none")
    if labelled and weights:
        raise UserError(
            "--preferences.labeller: expected no --rewards.NAME WEIGHT, because the reward is learned from "
            "labels"
        )
    if labelled and config.contexts and not config.self_play:
        raise UserError(
            "--preferences.labeller: expected --env, --users, or --self_play from contexts; about replies to "
            "logged contexts prefer_replies asks, and fit_reward learns from the answers"
        )
    if not config.env and not weights and not labelled:
        raise UserError(
            f"{given[0]}: expected rewards that judge the replies, --rewards.NAME WEIGHT, got none"
        )


def roles_learned(config: OnlineRun) -> int | None:
    """The roles that the policy learns in each group of episodes; None where its world alone knows."""
    if not config.self_play or config.learner_role:
        return 1
    if config.contexts:
        return 1 if config.opponent_lag else len(ROLES)
    return None


def _check_self_play(config: OnlineRun) -> None:
    if config.opponent_lag < FROZEN:
        raise UserError(
            f"--opponent_lag {config.opponent_lag}: expected rounds from 0 on, or {FROZEN} for a copy that "
            "stays what the policy was at the start"
        )
    if not config.self_play and (config.opponent_lag or config.learner_role):
        flag = "opponent_lag" if config.opponent_lag else "learner_role"
        raise UserError(f"--{flag}: expected --self_play, where the policy has an opponent and a role")
    if config.self_play and config.contexts and config.learner_role not in ("", *ROLES):
        raise UserError(
            f"--learner_role {config.learner_role}: expected {' or '.join(ROLES)}, the sides of a "
            "conversation that begins with a logged user's words"
        )
    if config.eval_env and not config.env:
        raise UserError(
            "--eval_env: expected --env; with --contexts the return is measured on the validation split, and "
            "with --users by the personas that are held out"
        )
