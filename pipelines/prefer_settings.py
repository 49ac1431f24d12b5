"""The settings of `prefer`: whose defaults depend on the environment, and what they were called in the 2018 reproduction."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from envs import control_env
from rl_dialog.errors import UserError
from rl_dialog.preferences.queries import QuerySettings
from rl_dialog.preferences.reward_trainer import RewardTraining
from rl_dialog.run import OnCluster, ResumableOutput
from rl_dialog.training.policy_gradient import A2C, FEATURES, PIXELS, PPO

# What users of the 2018 reproduction type, and what it is called here.
MODES = {
    "train_policy_with_preferences": "train",
    "gather_initial_prefs": "gather",
    "pretrain_reward_predictor": "pretrain",
    "train_policy_with_original_rewards": "original-rewards",
}


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


# A reward that is learned changes while the policy does. A short horizon tells right from wrong where little is left to gain, and a batch holds whole
# episodes: one of dots that have all arrived would teach nothing but noise.
POSITION = Suited(
    steps=250_000,
    budget=700,
    initial=350,
    envs=16,
    ppo=replace(FEATURES, gamma=0.5, gae_lambda=0.9, learning_rate=1e-3, entropy_coeff=0.003, batch_size=1600),
    schedule_scale=20_000,
    reward=RewardTraining(learning_rate=3e-3),
    queries=QuerySettings(selection="variance"),
    first_epochs=100,
    eval_every=10_000,
)
FRAMES = Suited(
    steps=150_000,
    budget=3000,
    initial=400,
    envs=32,
    ppo=replace(FEATURES, gamma=0.9, learning_rate=5e-4, entropy_coeff=0.003, batch_size=1024),
    schedule_scale=50_000,
    reward=RewardTraining(learning_rate=3e-3),
    eval_every=10_000,
)
ATARI = Suited(
    steps=10_000_000,
    budget=5500,
    initial=500,
    envs=16,
    ppo=PIXELS,
    schedule_scale=1_250_000,
    reward=RewardTraining(learning_rate=2e-4, adaptive_l2=True),
    model=ModelSettings(dropout=0.5, action_input="none", scale=0.05),
)
SUITED = {"moving_dot": FRAMES, "moving_dot position": POSITION, "pong": ATARI, "enduro": ATARI, "atari": ATARI}  # by environment and observations


@dataclass(frozen=True)
class PreferConfig(ResumableOutput, OnCluster):
    """Who learns, from whose labels."""

    mode: Literal["train", "gather", "pretrain", "original-rewards", "train_policy_with_preferences", "gather_initial_prefs",
                  "pretrain_reward_predictor", "train_policy_with_original_rewards"] = "train"  # fmt: skip
    """train: everything. gather: first labels only, from the policy as it begins. pretrain: the reward from labels that are there. original-rewards:
    the policy from the true reward. The other names are the 2018 reproduction's"""
    env: str = "moving_dot"
    """moving_dot, pong, enduro, atari, or module:Class of your own vector of environments"""
    env_options: str = ""
    """arguments of the environment, `observations=position,continuous=true`"""
    output_dir: Annotated[str, tyro.conf.arg(aliases=["--log-dir"])] = ""
    """the folder of the run"""
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
    num_envs: Annotated[int | None, tyro.conf.arg(aliases=["--n-envs"])] = None
    """environments, of each worker"""
    num_workers: int = 0
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
    model_name_or_path: Annotated[str, tyro.conf.arg(aliases=["--load-policy-ckpt-dir"])] = ""
    """of a policy to start with"""
    reward_model: Annotated[str, tyro.conf.arg(aliases=["--load-reward-predictor-ckpt-dir"])] = ""
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
        labels=config.labels or f"sqlite:///{Path(config.output_dir) / 'labels.db'}",
        steps=steps,
        budget=budget,
        initial_labels=min(of.initial, budget) if config.initial_labels is None else config.initial_labels,
        envs=of.envs if config.num_envs is None else config.num_envs,
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
    """The constructor of vectors of environments. Raises UserError for options that it does not have."""
    options = {}
    for part in filter(None, config.env_options.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--env_options: expected name=value,name=value, got {part!r}")
        options[name.strip()] = yaml.safe_load(value)
    return partial(control_env(config.env), **options)
