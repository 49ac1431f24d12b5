"""Who plays the conversations of `simulate`: this process, or worker actors; both give the same ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from envs.multiwoz import Options, RulePolicy, Simulator, load_world
from envs.multiwoz.acts import Acts
from envs.multiwoz.rollout import Played, Respond, by_bits, play_together
from envs.multiwoz.tracker import DialogState
from rl_dialog.models.act_policy import ActPolicy, ActPolicyConfig, GreedyActs, is_act_policy


def shape_of(simulator: Simulator) -> ActPolicyConfig:
    """The policy that fits a world."""
    vectors = simulator.vectors
    digest = hashlib.sha256("\n".join([*vectors.user_acts.tokens, "", *vectors.system_acts.tokens]).encode()).hexdigest()
    return ActPolicyConfig(vectors.state_size, vectors.action_size, vocabulary=digest[:16])


def responder(name: str, simulator: Simulator) -> Respond | None:
    """What `rule` or the checkpoint of a task policy says, state by state; None for another checkpoint, such as a language model's.

    Raises UserError for a task policy of another world.
    """
    if name == "rule":
        return RulePolicy(simulator.world.database, simulator.options).respond
    from rl_dialog.models.checkpoint import resolve  # here, because it loads transformers, which the rule policy need not wait for

    place = Path(resolve(name))
    if not is_act_policy(place):
        return None
    choose, vectors = GreedyActs(ActPolicy.from_pretrained(place, expected=shape_of(simulator))), simulator.vectors

    def respond(state: DialogState, rng: random.Random) -> Acts:
        return vectors.acts(choose(vectors.states([state]), vectors.masks([state]))[0], state, rng)

    return respond


class Player:
    """One world and its users; plays numbered conversations with the policy it is given, the rule policy for None."""

    def __init__(self, world: str | Path, options: Options, *, together: int = 64) -> None:
        self.world, self.together = str(Path(world).absolute()) if world else "", together  # workers do not share our working directory
        self.simulator = Simulator(load_world(self.world), options)
        self.rule = RulePolicy(self.simulator.world.database, options)

    def __call__(self, episodes: Sequence[int], policy: ActPolicy | None, seed: int) -> list[Played]:
        """Conversations with consecutive numbers, in their order."""
        if policy is None:
            respond = lambda talks: [self.rule.respond(talk.state, talk.rng) for talk in talks]  # noqa: E731
        else:
            respond = by_bits(self.simulator, GreedyActs(policy))
        together = {"episodes": len(episodes), "first": episodes[0], "together": self.together}
        return list(play_together(self.simulator, respond, seed=seed, **together))


def conversations(
    player: Player, policy: ActPolicy | None, episodes: Sequence[int], *, seed: int, workers: int = 0, address: str = ""
) -> Iterator[Played]:
    """The numbered conversations in their order, each as soon as it and those before it are done; without workers this process plays."""
    from rl_dialog.cluster.rollout import Workers, split

    chunks = split(episodes, max(64, player.together))
    make_player = partial(Player, player.world, player.simulator.options, together=player.together)
    with Workers(make_player, workers, address=address or None) if workers else nullcontext() as pool:
        done = pool.play_chunks(chunks, policy, seed) if workers else ((chunk, player(chunk, policy, seed)) for chunk in chunks)
        finished: dict[int, Sequence[Played]] = {}
        following = iter(chunks)
        chunk = next(following, None)
        for played, result in done:
            finished[played[0]] = result
            while chunk is not None and chunk[0] in finished:
                yield from finished.pop(chunk[0])
                chunk = next(following, None)
