"""What a preference run depends on: its roles, their numbers, and what suits an environment where a number is
not given."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import tyro

from rl_dialog.config import at_least
from rl_dialog.errors import UserError
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.queries import QuerySettings
from rl_dialog.preferences.reward_trainer import RewardTraining
from rl_dialog.training.policy_gradient import A2C, FEATURES, PIXELS, PPO


@dataclass(frozen=True)
class OracleSettings:
    """How the synthetic labeller answers; it knows the true rewards."""

    temperature: float = 0.0
    """how much chance there is in an answer; 0: the better clip wins"""
    noise: float = 0.0
    """share of answers that the flip of a coin decides"""
    discount: float = 1.0
    """discount of a clip's rewards, per step"""
    ties: float = 0.0
    """how far the returns of two clips that are called equally good may lie apart"""

    def check(self) -> None:
        """Raises UserError for numbers that cannot be."""
        try:
            Oracle(**vars(self))
        except UserError as error:
            raise UserError(f"--oracle.{error}") from None


@dataclass(frozen=True)
class ModelSettings:
    """The reward model."""

    members: int = 3
    """members of the ensemble"""
    hidden: tuple[int, ...] = ()
    """sizes of its layers; by default 64, 64, and 64 after convolutions"""
    action_input: Literal["one_hot", "number", "none"] = "one_hot"
    """how the action enters; none: the reward depends on the observation alone, as in Christiano et al.
    2017"""
    dropout: float = 0.0
    """share of the features that are dropped, with a mask of its own for every step. Atari needs 0.5"""
    batchnorm: bool = False
    """normalise the outputs of the convolutions over a batch"""
    coordinates: bool = False
    """of pictures: what is seen is told by where it is, and not by a picture of it. Few labels teach more so,
    where the reward depends on where something is"""
    scale: float = 1.0
    """standard deviation of the normalised reward"""
    normalise_observations: bool = False
    """centre observations that are numbers, divide them by their deviations in labelled clips, and compress
    what is large"""
    scales: int = 1
    """with normalise_observations: 1, or 2: each number is there also as it comes, compressed"""

    def check(self) -> None:
        """Raises UserError for numbers that cannot be."""
        for name, fits, expected in (
            ("members", self.members >= 1, "at least 1"),
            ("hidden", all(size >= 1 for size in self.hidden), "sizes of at least 1"),
            ("dropout", 0 <= self.dropout < 1, "a share of at least 0 and below 1"),
            ("scale", self.scale > 0, "a number above 0"),
            ("scales", self.scales in (1, 2), "1 or 2"),
        ):
            if not fits:
                raise UserError(f"--model.{name}: expected {expected}, got {getattr(self, name)}")


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
    epochs: int = 4
    eval_every: int = 0
    eval_episodes: int = 100
    normalise_observations: bool = False
    aligned_clips: float = 0.0
    first_clips: int = 200
    averaging: float = 0.97


# A reward that is learned changes while the policy does. A short horizon tells right from wrong where little
# is left to gain, and a batch holds whole episodes: one of dots that have all arrived would teach nothing but
# noise.
POSITION = Suited(
    steps=250_000,
    budget=700,
    initial=350,
    envs=16,
    ppo=replace(
        FEATURES, gamma=0.5, gae_lambda=0.9, learning_rate=1e-3, entropy_coeff=0.003, batch_size=1600
    ),
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
# Labels tell what a place is worth sooner than what each picture of one is, and sooner of many clips than of
# few.
DOT_PIXELS = replace(
    FRAMES,
    reward=RewardTraining(learning_rate=1e-3, begin_unsure=True),
    model=ModelSettings(coordinates=True),
    first_epochs=20,
    epochs=1,
    first_clips=800,
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
# Worlds that nobody has seen: their observations may have any unit, their episodes may be long, and most
# pairs of clips may be ties.
UNKNOWN = Suited(
    steps=250_000,
    budget=1400,
    initial=350,
    envs=16,
    ppo=replace(FEATURES, gamma=0.99, gae_lambda=0.95, learning_rate=5e-4, entropy_coeff=0.003, passes=8),
    schedule_scale=50_000,
    reward=RewardTraining(
        learning_rate=3e-3,
        batch_size=64,
        patience=30,
        begin_unsure=True,
        even_ties=True,
        confirm=True,
        least_pace=0.2,
        curious=True,
    ),
    model=ModelSettings(normalise_observations=True, scales=2),
    queries=QuerySettings(selection="informative"),
    eval_every=25_000,
    eval_episodes=10,
    normalise_observations=True,
    aligned_clips=0.5,
    averaging=0.9,
)
UNKNOWN_PICTURES = replace(
    ATARI,
    steps=1_000_000,
    budget=1400,
    initial=350,
    schedule_scale=200_000,
    queries=UNKNOWN.queries,
    aligned_clips=UNKNOWN.aligned_clips,
    reward=replace(ATARI.reward, confirm=True),
)
SUITED = {  # by environment and observations
    "moving_dot": FRAMES,
    "moving_dot position": POSITION,
    "moving_dot pixels": DOT_PIXELS,
    "pong": ATARI,
    "enduro": ATARI,
    "atari": ATARI,
}


def suited_to(
    environment: str, observations: str = "", *, pictures: bool = False, earlier: bool = False
) -> Suited:
    """What suits an environment; `pictures`: what is observed there, where nothing else is known of it;
    `earlier`: what an earlier version took for such a one."""
    unknown = FRAMES if earlier else UNKNOWN_PICTURES if pictures else UNKNOWN
    return SUITED.get(f"{environment} {observations}", SUITED.get(environment, unknown))


def clip_length_of(horizon: int) -> int:
    """Steps of a clip where nobody says how many: a tenth of an episode, 10 to 25. What is compared is then
    short enough to be seen at a glance, and an answer about few steps tells better which of them were
    good."""
    return min(25, max(10, horizon // 10), horizon)


@dataclass(frozen=True)
class PreferenceRun:
    """Who learns, from whose labels."""

    mode: Literal["train", "gather", "pretrain", "original-rewards", "train_policy_with_preferences",
                  "gather_initial_prefs", "pretrain_reward_predictor",
                  "train_policy_with_original_rewards"] = "train"  # fmt: skip
    """train: everything. gather: first labels only, from the policy as it begins. pretrain: the reward from
    labels that are there. original-rewards: the policy from the true reward. The other names are the 2018
    reproduction's"""
    env: str = "moving_dot"
    """moving_dot, pong, enduro, atari, any id of Gymnasium's (Pendulum-v1), or module:Class of a
    gymnasium.Env or a vector of environments of your own"""
    labels: str = ""
    """URL of the label log; by default sqlite:///OUTPUT_DIR/labels.db"""
    labels_from: Annotated[str, tyro.conf.arg(aliases=["--load-prefs-dir"])] = ""
    """folder of a run whose labels, everybody's, and clips are taken over at the start; then no initial ones
    are waited for"""
    labeller: Literal["page", "oracle", "none"] = "page"
    """page: people, in browsers. oracle: the true reward. none: whoever runs `python -m pipelines.label`"""
    seed: int = 0
    """seed of everything random"""
    steps: int | None = None
    """steps of the environments that the policy learns from; by default what suits the environment"""
    budget: int | None = None
    """labels in all; by default what suits the environment"""
    initial_labels: Annotated[int | None, tyro.conf.arg(aliases=["--n-initial-prefs"])] = None
    """labels before the policy learns; by default what suits the environment"""
    schedule: Literal["hyperbolic", "constant"] = "hyperbolic"
    """the rate of the other labels as the policy learns"""
    schedule_scale: float | None = None
    """steps after which the hyperbolic rate has halved; by default what suits the environment"""
    max_staleness: int = 10
    """labels that the reward in use may not know yet before the policy waits for it (with an oracle: of those
    wanted); 0: it never waits"""
    num_envs: Annotated[int | None, tyro.conf.arg(aliases=["--n-envs"])] = None
    """environments of each worker; by default what suits the environment"""
    num_workers: int = 0
    """env runner actors; 0: the learner plays itself"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the networks of policy and reward compute; auto: on a GPU where there are pictures to see and a
    GPU to see them with. Workers are on CPUs"""
    algorithm: Literal["ppo", "a2c"] = "ppo"
    """how the policy learns; a2c: the original's, one step per five steps of the environments"""
    ppo: PPO = FRAMES.ppo
    """settings of ppo; by default, as `reward`, `model` and `queries`, what suits the environment"""
    a2c: A2C = A2C()
    """settings of a2c; by default what suits the environment"""
    model_name_or_path: Annotated[str, tyro.conf.arg(aliases=["--load-policy-ckpt-dir"])] = ""
    """folder of a policy to start from, or of a run: its latest"""
    reward_model: Annotated[str, tyro.conf.arg(aliases=["--load-reward-predictor-ckpt-dir"])] = ""
    """folder of a reward model to start from, or of a run: its newest; then no initial labels are waited for,
    and it is not fitted anew"""
    model: ModelSettings = FRAMES.model
    """the reward model"""
    reward: RewardTraining = FRAMES.reward
    """how the reward model is fitted"""
    first_epochs: Annotated[int | None, tyro.conf.arg(aliases=["--n-initial-epochs"])] = None
    """passes over the initial labels; by default what suits the environment"""
    epochs: int | None = None
    """passes over all labels whenever there are new ones; by default what suits the environment"""
    queries: QuerySettings = FRAMES.queries
    """what is asked; by default what suits the environment"""
    oracle: OracleSettings = OracleSettings()
    """the synthetic labeller"""
    clip_length: int | None = None
    """steps of a clip; by default what suits the environment: a tenth of an episode, 10 to 25"""
    aligned_clips: float | None = None
    """share of the episodes whose first clip begins with them; by default what suits the environment"""
    first_clips: int | None = None
    """clips at hand before the first question, at most two for each initial label; by default what suits the
    environment"""
    normalise_observations: bool | None = None
    """the policy sees observations that are numbers centred and divided by their deviations, and beside that
    as they come, compressed where they are large; by default yes, but for the environments that come with
    this project"""
    clips: Annotated[int, tyro.conf.arg(aliases=["--max-segs"])] = 1000
    """clips at hand to ask about; the oldest are forgotten"""
    page_host: str = "127.0.0.1"
    """address of the page. 127.0.0.1: for whoever sits at this machine, without tokens; any other: for
    labellers with tokens (pipelines.label)"""
    page_port: int = 8001
    """port of the page; 0: any free one"""
    save_every: Annotated[int, tyro.conf.arg(aliases=["--policy-ckpt-interval"])] = 40
    """rounds between checkpoints; episodes start anew there, so that a resumed run goes on as the
    uninterrupted one"""
    save_total_limit: int = 3
    """checkpoints kept"""
    eval_every: int | None = None
    """steps between evaluations on the true reward; by default what suits the environment, 0: none"""
    eval_episodes: int | None = None
    """episodes of an evaluation with the most probable actions, and as many with sampled ones; by default
    what suits the environment"""
    averaging: float | None = None
    """what is evaluated and saved is the average of all rounds' policies, with weights that fall by this
    factor from round to round; 0: the last; by default what suits the environment"""

    @property
    def is_seen(self) -> bool:
        """Do people answer, who see clips? The mode is told in our words."""
        return self.labeller != "oracle" and self.mode in ("train", "gather")

    def check(self) -> None:
        """Raises UserError for numbers that cannot be."""
        at_least(self, steps=1, budget=1, initial_labels=1, num_envs=1, num_workers=0)
        at_least(self, first_epochs=1, epochs=1, clips=2, first_clips=2, save_every=1, save_total_limit=1)
        at_least(self, eval_every=0, eval_episodes=1, max_staleness=0, seed=0, clip_length=1)
        if not 0 <= self.aligned_clips <= 1:
            raise UserError(f"expected --aligned_clips between 0 and 1, got {self.aligned_clips}")
        if not 0 <= self.averaging < 1:
            raise UserError(f"expected --averaging of at least 0 and below 1, got {self.averaging}")
        if self.initial_labels > self.budget:
            got = f"got {self.initial_labels}"
            raise UserError(f"expected --initial_labels of at most --budget, which is {self.budget}, {got}")
        if self.schedule_scale <= 0:
            raise UserError(f"expected --schedule_scale above 0, got {self.schedule_scale:g}")
        self.oracle.check()
        self.model.check()


R = TypeVar("R", bound=PreferenceRun)


def suited_groups(suited: Suited, steps: int) -> dict[str, dict[str, Any]]:
    """Settings of the policy, the reward and the queries that suit an environment."""
    # The learning rate falls to zero at the end: a policy that has arrived is not to be led astray by what
    # the reward gets wrong.
    decay = {"lr_zero_steps": steps}
    reward = {name: asdict(getattr(suited, name)) for name in ("reward", "model", "queries")}
    return {"ppo": asdict(suited.ppo) | decay, "a2c": decay, **reward}


def envs_of(horizon: int, batch_size: int, most: int) -> int:
    """Environments that play side by side where nobody says how many: so few that a batch holds whole
    episodes, from 4 to `most`. A batch of nothing but late steps, where all have fallen or arrived, would
    teach only what the reward gets wrong there."""
    return min(most, max(4, batch_size // horizon)) if horizon else most


def completed(run: R, suited: Suited, clip_length: int, horizon: int = 0) -> R:
    """The run with numbers that suit its environment where none are given. `horizon`: steps of an episode,
    where these are known and the environments are not ours."""
    budget = suited.budget if run.budget is None else run.budget
    numbers = {
        "steps": suited.steps,
        "budget": budget,
        "initial_labels": min(suited.initial, budget),
        "num_envs": envs_of(horizon, run.ppo.batch_size, suited.envs),
    }
    numbers["clip_length"] = clip_length
    names = ("first_epochs", "epochs", "schedule_scale", "eval_every", "eval_episodes", "aligned_clips")
    names += ("averaging", "first_clips", "normalise_observations")
    numbers |= {name: getattr(suited, name) for name in names}
    return replace(run, **{name: number for name, number in numbers.items() if getattr(run, name) is None})
