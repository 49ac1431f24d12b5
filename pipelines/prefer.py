"""Teach a policy by comparing clips of what it does: it learns from the reward that explains the answers.

    python -m pipelines.prefer --env moving_dot --labeller oracle --out runs/dot                the environment's true reward answers
    python -m pipelines.prefer --env pong --out runs/pong                                       people answer, on the page whose address is printed
    python -m pipelines.prefer --env moving_dot --mode original-rewards --out runs/true         the yardstick: the true reward, no preferences

Killed, or to go on for longer: the same command again. What changed of its settings is shown. `--mode gather` and `--mode pretrain` are the first two
parts of `train`, for which others may answer in between (`python -m pipelines.label`). Into `out` go

    labels.db            every query, showing and answer (or the database that --labels names)
    clips/               what was compared
    reward/<version>/    the reward model: weights, normaliser, optimizer
    checkpoint-<steps>/  the policy; `latest` names the last one
    metrics.jsonl, tensorboard/, status.json, events.jsonl, prefer.yaml

rl_dialog/preferences/README.md describes the roles, the settings and every metric.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from envs import control_env
from pipelines.label import drawing
from rl_dialog.config import read_yaml, run, save_config, to_dict
from rl_dialog.preferences.exchange import open_labels
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.queries import QuerySettings
from rl_dialog.preferences.reward_trainer import RewardTraining
from rl_dialog.preferences.schedule import AnnotationSchedule
from rl_dialog.preferences.segments import Segments
from rl_dialog.training.logger import Logger, following
from rl_dialog.training.policy_gradient import A2C, FEATURES, PIXELS, PPO

# What users of the 2018 reproduction type, and what it is called here.
MODES = {
    "train_policy_with_preferences": "train",
    "gather_initial_prefs": "gather",
    "pretrain_reward_predictor": "pretrain",
    "train_policy_with_original_rewards": "original-rewards",
}
FIXED = (
    "env",  # a run is gone on with only where these are the same
    "env_options",
    "model",
    "algorithm",
    "envs",
    "synchronous",
)


@dataclass(frozen=True)
class OracleSettings:
    """How the synthetic labeller answers; it knows the true rewards."""

    temperature: float = 0.0
    """0: the better clip wins; above, the answer is drawn"""
    noise: float = 0.0
    """share of answers that are a coin's"""
    discount: float = 1.0
    """of a clip's rewards, per step"""
    ties: float = 0.0
    """returns that differ by no more are equally good"""


@dataclass(frozen=True)
class ModelSettings:
    """The reward model."""

    members: int = 3
    """of the ensemble"""
    hidden: tuple[int, ...] = ()
    """sizes of its layers; by default 64, 64, and 64 after convolutions"""
    action_input: Literal["one_hot", "number", "none"] = "one_hot"
    """how the action enters; none: the reward depends on the observation alone, as in Christiano et al. 2017"""
    dropout: float = 0.0
    """with a mask of its own for every step. Atari needs 0.5"""
    batchnorm: bool = False
    """of the convolutions"""
    scale: float = 1.0
    """standard deviation of the normalised reward"""


@dataclass(frozen=True)
class Suited:
    """Defaults of an environment."""

    steps: int
    budget: int
    initial: int
    envs: int
    ppo: PPO
    schedule_scale: float
    reward: RewardTraining
    model: ModelSettings = ModelSettings()
    queries: QuerySettings = QuerySettings()
    first_epochs: int = 200
    eval_every: int = 0


ATARI = Suited(
    10_000_000,
    5500,
    500,
    16,
    PIXELS,
    schedule_scale=1_250_000,
    reward=RewardTraining(learning_rate=2e-4, adaptive_l2=True),
    model=ModelSettings(dropout=0.5, action_input="none", scale=0.05),
)
# A reward that is learned changes while the policy does. A short horizon tells right from wrong where little is left to gain, and a batch holds whole
# episodes: one of dots that have all arrived would teach nothing but noise.
DOT = replace(FEATURES, gamma=0.5, gae_lambda=0.9, learning_rate=1e-3, entropy_coeff=0.003, batch_size=1600)
FITTED = RewardTraining(learning_rate=3e-3)
FRAMES = Suited(
    150_000,
    3000,
    400,
    32,
    replace(FEATURES, gamma=0.9, learning_rate=5e-4, entropy_coeff=0.003, batch_size=1024),
    schedule_scale=50_000,
    reward=FITTED,
    eval_every=10_000,
)
SUITED = {  # by the environment and its observations
    "moving_dot": FRAMES,
    "moving_dot position": Suited(
        250_000,
        700,
        350,
        16,
        DOT,
        schedule_scale=20_000,
        reward=FITTED,
        queries=QuerySettings(selection="variance"),
        first_epochs=100,
        eval_every=10_000,
    ),
    "pong": ATARI,
    "enduro": ATARI,
    "atari": ATARI,
}


@dataclass(frozen=True)
class PreferConfig:
    """Who learns, from whose labels."""

    mode: Literal["train", "gather", "pretrain", "original-rewards", "train_policy_with_preferences", "gather_initial_prefs",
                  "pretrain_reward_predictor", "train_policy_with_original_rewards"] = "train"  # fmt: skip
    """train: everything. gather: first labels only, from the policy as it begins. pretrain: the reward from labels that are there. original-rewards:
    the policy from the true reward. The other names are the 2018 reproduction's"""
    env: str = "moving_dot"
    """moving_dot, pong, enduro, atari, or module:Class of your own vector of environments"""
    env_options: str = ""
    """arguments of the environment, `observations=position,continuous=true`"""
    out: Annotated[str, tyro.conf.arg(aliases=["--log-dir"])] = ""
    """folder of the run; a run that is there is gone on with"""
    labels: str = ""
    """URL of the label log; by default sqlite:///<out>/labels.db"""
    labels_from: Annotated[str, tyro.conf.arg(aliases=["--load-prefs-dir"])] = ""
    """folder of a run whose labels and clips are taken over at the start; then no initial ones are waited for"""
    labeller: Literal["page", "oracle", "none"] = "page"
    """page: people, in browsers. oracle: the true reward. none: whoever runs `python -m pipelines.label`"""
    synthetic_prefs: bool = False
    """the original's name of --labeller oracle"""
    synchronous: bool = False
    """one role after the other in one process, reproducible to the bit; for oracles"""
    seed: int = 0
    """of everything random"""
    steps: int | None = None
    """of the environments, that the policy learns from; by default what suits the environment"""
    million_timesteps: float | None = None
    """the original's way to say --steps"""
    budget: int | None = None
    """labels in all; by default what suits the environment"""
    initial_labels: Annotated[int | None, tyro.conf.arg(aliases=["--n-initial-prefs"])] = None
    """labels before the policy learns"""
    schedule: Literal["hyperbolic", "constant"] = "hyperbolic"
    """the rate of the other labels as the policy learns"""
    schedule_scale: float | None = None
    """steps after which the hyperbolic rate has halved; by default what suits the environment"""
    max_staleness: int = 10
    """labels that the reward in use may not know yet before the policy waits for it (with an oracle: of those wanted); 0: it never waits"""
    envs: Annotated[int | None, tyro.conf.arg(aliases=["--n-envs"])] = None
    """environments, of each worker"""
    workers: int = 0
    """env runner actors; 0: the learner plays itself"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """of the networks of policy and reward; auto: a GPU where there are pictures to see and a GPU to see them with. Workers are on CPUs"""
    algorithm: Literal["ppo", "a2c"] = "ppo"
    """a2c: the original's, one step per five steps of the environments"""
    ppo: PPO = FRAMES.ppo
    """of the policy; by default, as `reward`, `model` and `queries`, what suits the environment"""
    a2c: A2C = A2C()
    """the same for a2c"""
    lr: float | None = None
    """the original's name of the learning rate"""
    ent_coef: float | None = None
    """the original's name of the weight of the policy's entropy"""
    lr_zero_million_timesteps: float | None = None
    """the original's way to say lr_zero_steps"""
    checkpoint: Annotated[str, tyro.conf.arg(aliases=["--load-policy-ckpt-dir"])] = ""
    """of a policy to start with"""
    reward_checkpoint: Annotated[str, tyro.conf.arg(aliases=["--load-reward-predictor-ckpt-dir"])] = ""
    """of a reward model to start with: its folder; then no initial labels are waited for, and it is not fitted anew"""
    model: ModelSettings = FRAMES.model
    """the reward model"""
    reward: RewardTraining = FRAMES.reward
    """how it is fitted"""
    first_epochs: Annotated[int | None, tyro.conf.arg(aliases=["--n-initial-epochs"])] = None
    """passes over the initial labels; by default what suits the environment"""
    epochs: int = 4
    """passes over all labels whenever there are new ones"""
    queries: QuerySettings = FRAMES.queries
    """what is asked; by default what suits the environment"""
    oracle: OracleSettings = OracleSettings()
    """the synthetic labeller"""
    clips: Annotated[int, tyro.conf.arg(aliases=["--max-segs"])] = 1000
    """clips at hand to ask about; the oldest are forgotten"""
    page_host: str = "127.0.0.1"
    """address of the page. 127.0.0.1: for whoever sits at this machine, without tokens; any other: for labellers with tokens (pipelines.label)"""
    page_port: int = 8001
    """port of the page; 0: any free one"""
    save_every: Annotated[int, tyro.conf.arg(aliases=["--policy-ckpt-interval"])] = 40
    """rounds between checkpoints; episodes start anew there, so that a resumed run goes on as the uninterrupted one"""
    save_total_limit: int = 3
    """checkpoints kept"""
    eval_every: int | None = None
    """steps between evaluations on the true reward; by default what suits the environment, 0: none"""
    eval_episodes: int = 100
    """of an evaluation: the most probable actions, and sampled ones"""
    averaging: float = 0.97
    """what is evaluated and saved is the average of all rounds' policies, with weights that fall by this factor from round to round; 0: the last"""
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl"""
    address: str = ""
    """Ray cluster to join; empty starts one here (or joins RAY_ADDRESS)"""
    quiet: bool = False
    """print only the JSON line"""


def main(config: PreferConfig) -> dict[str, Any]:
    """Runs the mode; headline figures. Raises ValueError or OSError for what cannot be, RuntimeError where a role cannot be kept alive."""
    config = resolved(config)
    out = Path(config.out)
    _check(config)
    _go_on(config, out)
    began = time.perf_counter()
    result = {"train": _train, "gather": _train, "pretrain": _pretrain, "original-rewards": _original}[config.mode](config, out)
    return {"mode": config.mode, **result, "seconds": round(time.perf_counter() - began, 1), "out": str(out)}


def suited(config: PreferConfig) -> dict[str, Any]:
    """Settings of the policy, the reward and the queries that suit the environment, `load_config`'s."""
    of = _suited(config)
    # The learning rate falls to zero at the end: a policy that has arrived is not to be led astray by what the reward gets wrong.
    end = {"lr_zero_steps": _steps(config)}
    return {"ppo": asdict(of.ppo) | end, "a2c": end, "reward": asdict(of.reward), "model": asdict(of.model), "queries": asdict(of.queries)}


def resolved(config: PreferConfig) -> PreferConfig:
    """With numbers that suit the environment where none are given, and the original's names of settings carried over to ours."""
    of, steps = _suited(config), _steps(config)
    given = {"learning_rate": config.lr, "entropy_coeff": config.ent_coef}
    if config.lr_zero_million_timesteps is not None:
        given["lr_zero_steps"] = int(config.lr_zero_million_timesteps * 1e6)
    given = {name: value for name, value in given.items() if value is not None}
    budget = of.budget if config.budget is None else config.budget
    return replace(
        config,
        mode=MODES.get(config.mode, config.mode),
        labeller="oracle" if config.synthetic_prefs else config.labeller,
        labels=config.labels or f"sqlite:///{Path(config.out) / 'labels.db'}",
        steps=steps,
        budget=budget,
        initial_labels=min(of.initial, budget) if config.initial_labels is None else config.initial_labels,
        envs=of.envs if config.envs is None else config.envs,
        first_epochs=of.first_epochs if config.first_epochs is None else config.first_epochs,
        ppo=replace(config.ppo, **given),
        a2c=replace(config.a2c, **given),
        schedule_scale=of.schedule_scale if config.schedule_scale is None else config.schedule_scale,
        eval_every=of.eval_every if config.eval_every is None else config.eval_every,
        lr=None,
        ent_coef=None,
        lr_zero_million_timesteps=None,
        million_timesteps=None,
        synthetic_prefs=False,
    )


def _suited(config: PreferConfig) -> Suited:
    observations = make_envs(config).keywords.get("observations", "")
    return SUITED.get(f"{config.env} {observations}", SUITED.get(config.env, FRAMES))


def _steps(config: PreferConfig) -> int:
    given = config.steps if config.million_timesteps is None else int(config.million_timesteps * 1e6)
    return _suited(config).steps if given is None else given


def make_envs(config: PreferConfig) -> Any:
    """The constructor of vectors of environments. Raises ValueError for options that it does not have."""
    options = {}
    for part in filter(None, config.env_options.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--env_options: expected name=value,name=value, got {part!r}")
        options[name.strip()] = yaml.safe_load(value)
    return partial(control_env(config.env), **options)


def placed(config: PreferConfig, gpus: float) -> PreferConfig:
    """With a device that there is, of so many GPUs. Raises ValueError where a GPU is asked for and there is none."""
    if config.device == "cuda" and not gpus:
        raise ValueError("--device cuda: expected a GPU that torch and Ray know of, found none")
    if config.device != "auto":
        return config
    envs = make_envs(config)(1)
    pictures = len(envs.single_observation_space.shape) == 3
    envs.close()
    return replace(config, device="cuda" if gpus and pictures else "cpu")


def plan_of(config: PreferConfig, out: Path, *, gpus: float = 0.0) -> Any:
    """The roles of a run, as constructors. `gpus`: how many there are."""
    from rl_dialog.cluster.preferences import Plan

    config = placed(config, gpus)
    total = AnnotationSchedule(config.budget, config.steps, config.initial_labels, config.schedule, config.schedule_scale)
    labellers = {"oracle": partial(make_oracle, config, out), "page": partial(make_page, config, out)}
    return Plan(
        learner=partial(make_learner, config, out),
        asker=partial(make_asker, config, out),
        teacher=None if config.mode == "gather" else partial(make_teacher, config, out),
        labellers={} if config.labeller == "none" else {config.labeller: labellers[config.labeller]},
        wanted=total.labels_wanted,
        steps=config.steps,
        budget=config.budget,
        clips=config.clips,
        gather=config.initial_labels if config.mode == "gather" else 0,
        max_staleness=config.max_staleness,
        gpus=min(1.0, gpus / 2) if config.device == "cuda" else 0.0,
        paced=config.labeller == "oracle",
    )


def make_learner(config: PreferConfig, out: Path, *, learned: bool = True) -> Any:
    from rl_dialog.cluster.preference_learner import Learner, LearnerSettings

    envs = make_envs(config)
    names = ("envs", "workers", "seed", "save_every", "save_total_limit", "eval_every", "eval_episodes", "averaging", "device", "checkpoint")
    more = {name: getattr(config, name) for name in names}
    ppo = config.ppo if config.algorithm == "ppo" else config.a2c
    return Learner(LearnerSettings(config.env, envs, ppo, envs.func.clip_length, learned=learned, **more), out)


def make_asker(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.preferences.roles import Asker

    task = config.queries.task or make_envs(config).func.task
    pool = config.budget if config.labeller == "oracle" else None
    least = min(config.clips, 2 * config.initial_labels, 200)
    settings = replace(config.queries, task=task)
    return Asker(LabelLog(config.labels), Segments(out / "clips"), settings, capacity=config.clips, least=least, pool=pool, seed=config.seed)


def make_teacher(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.cluster.preference_learner import reward_shape
    from rl_dialog.preferences.roles import Teacher

    model = config.model
    shape = reward_shape(make_envs(config), hidden=model.hidden, **{name: getattr(model, name) for name in vars(model) if name != "hidden"})
    enough = 1 if config.labels_from or config.mode == "pretrain" else config.initial_labels
    passes = {"enough": enough, "first_epochs": config.first_epochs, "epochs": config.epochs, "start": config.reward_checkpoint}
    more = {**passes, "seed": config.seed, "device": config.device}
    return Teacher(LabelLog(config.labels), Segments(out / "clips"), out / "reward", shape, config.reward, **more)


def make_oracle(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.preferences.roles import OracleLabeller

    oracle = Oracle(**vars(config.oracle), seed=config.seed)
    return OracleLabeller(LabelLog(config.labels), Segments(out / "clips"), oracle)


def make_page(config: PreferConfig, out: Path) -> Any:
    from rl_dialog.preferences.page.app import create_page
    from rl_dialog.preferences.page.server import PageServer

    open_to_all = config.page_host in ("127.0.0.1", "localhost", "::1")
    draw = drawing({"env": config.env})
    app = create_page(LabelLog(config.labels), Segments(out / "clips"), draw=draw, labeller="you" if open_to_all else None, run=out)
    return PageServer(app, host=config.page_host, port=config.page_port)


def _train(config: PreferConfig, out: Path) -> dict[str, Any]:
    import ray
    import torch

    from rl_dialog.cluster.data import connect
    from rl_dialog.cluster.preferences import Supervisor, run_in_turn

    with nullcontext() if config.synchronous else connect(config.address or None):
        gpus = torch.cuda.device_count() if config.synchronous else ray.cluster_resources().get("GPU", 0)
        plan = plan_of(config, out, gpus=gpus)
        with _logged(config, out) as log:
            run_in_turn(plan, out, log) if config.synchronous else Supervisor(plan, out, log).run()
    counts = LabelLog(config.labels, create=False).counts()
    return {**figures(out), "labels": counts["labels"], "ties": counts["ties"], "skipped": counts["skipped"], **_latest(out)}


def _pretrain(config: PreferConfig, out: Path) -> dict[str, Any]:
    import torch

    teacher = make_teacher(placed(config, torch.cuda.device_count()), out)
    with _logged(config, out) as log:
        metrics = teacher.step()
        log(teacher.version, {f"pref/{name}": value for name, value in metrics.items()})
    if not teacher.version:
        raise ValueError(f"expected labels to fit a reward to in {config.labels}, found none; `--mode gather` collects them")
    return {**{name: metrics[name] for name in ("loss", "validation_accuracy", "training_labels") if name in metrics}, **_latest(out)}


def _original(config: PreferConfig, out: Path) -> dict[str, Any]:
    import torch

    from rl_dialog.cluster.data import connect

    with connect(config.address or None) if config.workers else nullcontext(), _logged(config, out) as log:
        learner = make_learner(placed(config, torch.cuda.device_count()), out, learned=False)
        while learner.steps < config.steps:
            metrics, _ = learner.step()
            log(int(metrics.pop("steps")), {name: value for name, value in metrics.items() if name.startswith(("train/", "eval/"))})
            if metrics["due"]:
                learner.save()
        learner.save()
    return {**figures(out), **_latest(out)}


def figures(out: Path) -> dict[str, Any]:
    """Of the run's metrics: the mean true return of the last tenth of its episodes, and of the last evaluation."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ended = [(line["train/return"], line["train/episodes"]) for line in lines if line.get("train/return") is not None]
    evaluated = [line for line in lines if line.get("eval/return") is not None]
    found: dict[str, Any] = {"steps": lines[-1]["step"] if lines else 0}
    if ended:
        last, left = [], sum(count for _, count in ended) / 10
        while ended and left > 0:
            value, count = ended.pop()
            last.append((value, min(count, left)))
            left -= count
        found["return"] = round(sum(value * count for value, count in last) / sum(count for _, count in last), 3)
    if evaluated:
        found |= {"eval_return": round(evaluated[-1]["eval/return"], 3), "eval_return_sampled": round(evaluated[-1]["eval/return_sampled"], 3)}
    return found


def _latest(out: Path) -> dict[str, str]:
    from rl_dialog.preferences.roles import newest_version

    found = {}
    if version := newest_version(out / "reward"):
        found["reward"] = str(out / "reward" / str(version))
    if (out / "latest").is_file():
        found["checkpoint"] = str(out / (out / "latest").read_text(encoding="utf-8").strip())
    return found


def _check(config: PreferConfig) -> None:
    if not config.out:
        raise ValueError("expected --out: the folder of the run")
    least = {"steps": 1, "budget": 1, "initial_labels": 1, "envs": 1, "workers": 0, "first_epochs": 1, "epochs": 1, "clips": 2, "save_every": 1}
    least |= {"save_total_limit": 1, "eval_every": 0, "eval_episodes": 1, "max_staleness": 0, "seed": 0}
    for name, number in least.items():
        if getattr(config, name) < number:
            raise ValueError(f"expected --{name} of at least {number}, got {getattr(config, name)}")
    if config.synchronous and config.labeller != "oracle" and config.mode in ("train", "gather"):
        raise ValueError("--synchronous waits for every answer: expected --labeller oracle")
    if not 0 <= config.averaging < 1:
        raise ValueError(f"expected --averaging of at least 0 and below 1, got {config.averaging}")
    make_envs(config)(1).close()  # an unknown environment, or options that it does not have, before anything is written


def _go_on(config: PreferConfig, out: Path) -> None:
    """Begins a run, or shows what changed of one that is there. Raises ValueError where it cannot be gone on with."""
    before = out / "prefer.yaml"
    if before.is_file():
        old, new = read_yaml(str(before)), to_dict(config)
        different = {name: (old.get(name), new[name]) for name in new if old.get(name) != new[name] and name not in ("quiet", "address", "report_to")}
        if wrong := [name for name in FIXED if name in different and (out / "latest").is_file()]:
            name = wrong[0]
            raise ValueError(
                f"{out} holds a run with --{name} {different[name][0]}, not {different[name][1]}: expected the same, or another --out for a new run"
            )
        for name, (was, now) in different.items():
            print(f"going on with --{name} {_shown(now, was)} instead of {_shown(was, now)}", file=sys.stderr, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    if config.labels_from and not before.is_file():
        take_over(Path(config.labels_from), out, config.labels)
    save_config(config, before)


def take_over(source: Path, out: Path, labels: str) -> int:
    """Copies the labels of another run, with their clips; how many. Raises ValueError for a folder that is no run's."""
    path = source / "prefer.yaml"
    if not path.is_file():
        raise ValueError(f"--labels_from: expected the folder of a run with prefer.yaml, got {source}")
    (theirs, there), here = open_labels(source, read_yaml(str(path))["labels"]), Segments(out / "clips")
    taken = theirs.labels()
    for label in taken:
        for id in (label.first, label.second):
            here.add(there[id])
    return LabelLog(labels).add_labels(taken)


def _shown(value: Any, other: Any) -> str:
    """A value, or what of it differs from another one."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items() if other.get(name) != each)
    return str(value)


@contextmanager
def _logged(config: PreferConfig, out: Path) -> Iterator[Any]:
    """Writes metrics and shows them while the block lasts."""
    latest = out / "latest"
    first = int(latest.read_text(encoding="utf-8").strip().rsplit("-", 1)[1]) if latest.is_file() else 0
    logger = Logger(out, first_step=first, report_to=config.report_to, settings=to_dict(config))
    with nullcontext() if config.quiet else following(out):
        yield logger.log
    logger.close()


if __name__ == "__main__":
    run(PreferConfig, main, suited=suited)
