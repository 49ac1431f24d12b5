"""What a benchmark depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from pipelines.benchmark.contenders import CONTENDERS
from rl_dialog.models.language_model import ModelConfig
from rl_dialog.run import ResumableOutput


@dataclass(frozen=True)
class BenchmarkConfig(ResumableOutput):
    """What to measure, and on which shapes."""

    what: tyro.conf.Positional[
        Literal[
            "train",
            "memory",
            "generate",
            "candidates",
            "prepare",
            "scorers",
            "tune",
            "serve",
            "simulate",
            "play",
            "prefer",
            "control",
            "cartpole",
            "wordle",
            "rlhf",
            "online",
            "offline_start",
            "self_play",
            "reward_model",
        ]
    ] = "train"
    """train: tokens/s of the training step; memory: its peak memory; generate: new tokens/s of sampling;
    candidates: contexts/s; prepare: conversations/s; scorers: replies/s; tune: trials/s; serve: tokens/s to
    several clients; simulate: system steps/s; play: episodes/s; prefer: environment steps/s; control: true
    returns of what preferences teach; cartpole: mean returns; wordle: shares of guesses that a critic ranks
    right; rlhf: true and learned rewards against KL; online: episodes/s of the loop that plays and learns;
    offline_start: conversations that learning from logs saves; self_play: what comes of the rewards of bots
    that talk to each other; reward_model: pairs/s, and accuracy on held-out ones"""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """train and memory: what to measure against the plain language model"""
    output_dir: str = "runs/benchmark"
    """the folder for benchmark.json: the figures, the settings and the machine"""
    rounds: int = 20
    """rounds to measure; each contender takes one step, or generates once, in each"""
    warmup: int = 3
    """rounds before those"""
    threads: int = 2
    """threads of torch"""
    layers: int = 6
    """transformer blocks"""
    attention_heads: int = 8
    """attention heads"""
    width: int = 256
    """hidden size"""
    vocabulary: int = 8192
    """tokens of the vocabulary"""
    rank: int = ModelConfig.rank
    """rank of lowrank heads"""
    batch_size: int = 16
    """train: rows of a batch; reward_model: pairs of one"""
    length: int = 128
    """train: tokens of a row"""
    user_block: int = 16
    """train: in the second setting, user and assistant alternate in blocks of so many tokens"""
    system_prompt: int = 64
    """train: in the third setting, the tokens that all rows begin with"""
    batch_sizes: tuple[int, ...] = (1, 16)
    """generate: rows of a batch, one setting each"""
    prompt: int = 32
    """generate: tokens of a prompt; serve: its words"""
    new_tokens: int = 64
    """generate, online: tokens of a reply; serve: half to one and a half times as many"""
    top_k: int = 20
    """generate, serve: how many tokens to sample among; ilql chooses them before it adds the advantage"""
    beta: float = 1.0
    """generate, serve: strength of the advantage"""
    contexts: int = 64
    """candidates: contexts of a round; their prompts have up to `prompt_words` words"""
    prompt_words: int = 64
    """candidates: words of the longest prompt, about as many tokens"""
    replies: int = 5
    """candidates: replies to each context, of up to 32 tokens"""
    conversations: int = 10_000
    """prepare: conversations of the CSV; scorers: dialogs"""
    turns: int = 10
    """prepare: exchanges of a conversation"""
    exchanges: tuple[int, ...] = (100, 400, 1600, 6400)
    """prepare: exchanges of one long dialog, whose scoring and tokenising are timed: twice as many should
    take twice as long"""
    turn_bytes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """prepare: length of one long turn, timed in the same way"""
    encoder: str = ""
    """scorers: an encoder's folder or hub name"""
    logs: str = ""
    """scorers: where the dialogs come from; reward_model: preferences or rated replies to learn from, instead
    of pairs of small talk"""
    clients: tuple[int, ...] = (1, 4, 16)
    """serve: how many clients send requests at once, one setting each"""
    requests: int = 4
    """serve: requests of each client in a round"""
    trials: int = 6
    """tune: trials of a round"""
    world: str = ""
    """simulate: folder with MultiWOZ's files; by default a generated town"""
    steps: int = 4000
    """simulate, prefer: system steps, or steps of the environments, of a round; cartpole: updates of each
    network of values; wordle: of each method"""
    num_envs: int = 64
    """simulate: conversations stepped together; play: episodes of a round, and of a batch"""
    num_workers: int = 0
    """simulate: measure so many rollout workers too, against one; 0: none"""
    seeds: int = 10
    """cartpole: independent learners with buffers and networks of their own; offline_start, self_play:
    clones, with all that starts from each; reward_model: random weights to start from; control: runs of each
    learner"""
    environments: tuple[str, ...] = ("Pendulum-v1", "Acrobot-v1 --ends absorb", "Reacher-v5")
    """control: environments of `prefer`, each with its flags of that verb; by --resume it is gone on with,
    also with more of these and of `seeds`, as `self_play` is"""
    control_steps: int = 250_000
    """control: steps to learn from in each run"""
    control_labels: int = 1400
    """control: pairs of clips that the oracle is asked about in each run"""
    imitation_python: str = ""
    """control: the Python of an environment with imitation, which learns from as many; by default it does
    not take part"""
    priors: tuple[Literal["clone", "vae", "uniform"], ...] = ("clone", "vae", "uniform")
    """cartpole: p(a|s) of DBCQ and WOP: a clone, a conditional VAE over actions, both actions alike"""
    runs: int = 1
    """wordle: runs of each method, with logs of their own"""
    games: int = 22_000
    """wordle: logged games of a run"""
    tau: float = 0.99
    """wordle: expectile of ilql"""
    labels: int = 2000
    """rlhf: contexts with a pair of replies that the oracle is asked about, in each of the two rounds of
    labels; reward_model: pairs"""
    flipped: float = 0.1
    """reward_model: share of the pairs of small talk of which the oracle prefers the worse reply"""
    epochs: float = 4.0
    """reward_model: how often every pair is seen"""
    learning_rate: float = 1e-3
    """reward_model: the highest one"""
    members: int = 3
    """rlhf: reward models of the ensemble; 1 leaves it out"""
    kl_weights: tuple[float, ...] = (0.0, 0.2)
    """rlhf: the weight c of the divergence from the prior, a run each; the ensemble and the second round take
    the smallest"""
    online_rounds: int = 60
    """rlhf: rounds of 64 replies that a run learns from; offline_start, self_play: of 64 conversations"""
    held_out: int = 200
    """rlhf: most contexts of the validation split that policies are measured on; self_play: conversations"""
    family: Literal["llama", "vhred"] = "llama"
    """self_play: the clone, a transformer, or a VHRED, whose latents learn too"""
    trl_python: str = ""
    """online, reward_model: the Python of an environment with TRL, whose trainers ours are measured against;
    by default ours are measured alone"""
    overlap_runs: int = 3
    """online: runs with a Ray actor for each staleness of 0, 1 and 2; 0 leaves them out"""
    seed: int = 0
    """weights, tokens, texts and sampling; cartpole, wordle and offline_start: the first of their seeds"""

    @property
    def is_resumable(self) -> bool:
        return self.what in ("control", "self_play")
