"""Does a world keep the contract of `text_world.py`? For anybody's class:

python -m pipelines.check_env --env my_worlds:House

assert not [each for each in check_world(House) if each.fault]      # in a test of one's own
"""

from __future__ import annotations

import copy
import itertools
import math
import multiprocessing
import numbers
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

from envs.text_world import ALONE, Message, Played, Player, most_turns, play, restore, snapshot
from rl_dialog.data.schema import ROLES, TEXT, can_be_encoded, failure_of, read_jsonl
from rl_dialog.errors import UserError

MakeWorld = Callable[[], Any]
SEEDS = (11, 6, 2**40 + 3)  # of the episodes that are played twice; players of odd seeds babble
MEASURED = 32  # episodes behind a scripted player's mean
CHILD_SECONDS = 120.0  # after which another process that plays the same episodes is given up
NONE = "the class brings none"
# messages, reward, terminated, truncated, role, why it failed
Step = tuple[list[Message], Any, bool, bool, str, str | None]


@dataclass(frozen=True)
class Finding:
    """What a check found: a fault, or something to know."""

    check: str
    fault: str = ""
    note: str = ""


def check_world(
    make_world: MakeWorld,
    *,
    but: tuple[str, ...] = (),
    limit: Callable[[], AbstractContextManager] = nullcontext,
) -> list[Finding]:
    """Plays in worlds of a class, in every way that the verbs do, and returns what was found: one Finding per
    check, in the order of `CHECKS`, less those in `but`. What a world brings by choice is checked where it
    does. A fault in one of the first two hides what comes after them, which is left out. `limit` is around
    each check: it may give up one that does not end, by a UserError."""
    findings = []
    for name, check in CHECKS.items():
        if name not in but:
            try:
                with limit():
                    findings.append(Finding(name, note=check(make_world) or ""))
            except UserError as fault:
                findings.append(Finding(name, str(fault)))
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"(at {Path(last.filename).name}:{last.lineno})"
                findings.append(Finding(name, f"the world raised {type(error).__name__}: {error} {where}"))
            if findings[-1].fault and name in ("contract", "seed"):
                break
    return findings


class Babbler:
    """Says words that it heard, and sometimes nothing or a great deal; the same to the same conversation."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, messages: list[Message]) -> str:
        chance = random.Random(f"{self.seed} {len(messages)}")
        words = " ".join(message["content"] or "" for message in messages[-3:]).split() or ["yes"]
        odd = ("", "so it is\n" * 2000, "¿Qué? 你好 🙂\u2028 \\n {} <|end|>")
        return chance.choice([chance.choice(words), " ".join(words[-8:]), *odd][: 5 if self.seed % 2 else 2])


def episode_steps(world: Any, player: Player, seed: int) -> Iterator[Step]:
    """The episode of a seed, a step at a time, and before them how it began."""
    messages, info = world.reset(seed=seed)
    yield copy.deepcopy(messages), 0.0, False, False, info.get("role", ALONE), failure_of(info)
    if failure_of(info) is None:
        yield from _going_on(world, player, messages, most_turns(world))


def _going_on(world: Any, player: Player, messages: list[Message], most: int) -> Iterator[Step]:
    role = ALONE
    for _ in range(most):
        messages, reward, terminated, truncated, info = world.step(player(messages))
        role, failed = info.get("role", role), failure_of(info)
        yield copy.deepcopy(messages), copy.copy(reward), terminated, truncated, role, failed
        if terminated or truncated or failed is not None:
            return


def _player(make_world: MakeWorld, seed: int) -> Player:
    """One that gets somewhere where the world brings some, for every other seed."""
    players = make_world().scripted_players() if hasattr(make_world(), "scripted_players") else {}
    names = sorted(players)
    return players[names[seed % len(names)]](seed) if names and seed % 2 == 0 else Babbler(seed)


def _alone(make_world: MakeWorld, seed: int) -> list[Step]:
    return list(episode_steps(make_world(), _player(make_world, seed), seed))


def _expect(condition: Any, expected: str, got: Any) -> None:
    if not condition:
        shown = repr(got)
        raise UserError(f"expected {expected}, got {shown if len(shown) <= 200 else shown[:200] + '...'}")


def _expect_same(one: list[Step], other: list[Step], how: str) -> None:
    for number, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            names = ("messages", "rewards", "terminated", "truncated", "roles", "failures")
            which = next(i for i in range(len(ours)) if ours[i] != theirs[i])
            last = [str(step[which][-1:] if which == 0 else step[which])[:160] for step in (ours, theirs)]
            raise UserError(f"{how}: at step {number} other {names[which]}: {last[0]} and then {last[1]}")
    if len(one) != len(other):
        raise UserError(f"{how}: {len(one) - 1} steps and then {len(other) - 1}")


def _check_contract(make_world: MakeWorld) -> str:
    """What `reset` and `step` return, for good replies and odd ones."""
    begun = make_world().reset(seed=SEEDS[0])
    _expect(isinstance(begun, tuple) and len(begun) == 2, "reset to return (messages, info)", begun)
    _check_messages("reset", begun[0])
    _expect(isinstance(begun[1], dict), "a dict as info of reset", begun[1])
    most = most_turns(make_world())
    whole = isinstance(most, numbers.Integral) and most > 0
    _expect(whole, "a whole number above 0 as max_turns", most)
    at_once = getattr(make_world, "concurrency", 1)
    whole = isinstance(at_once, numbers.Integral) and at_once > 0
    _expect(whole, "a whole number above 0 as concurrency", at_once)
    heard = Heard()
    ended = [_check_episode(make_world, seed + more, heard) for seed in SEEDS for more in (0, 1)]
    _expect(not all(heard.failures), "episodes that do not fail", heard.failures[0])
    make_world().reset()  # without a seed
    played = play(make_world(), Babbler(SEEDS[0]), seed=SEEDS[0])
    _expect(played.dialogs, "a Dialog of the episode", played)
    notes = [] if all(ended) else ["some episodes do not end by themselves: they are cut"]
    if heard.paid - heard.spoke:
        silent, spoke = (
            ", ".join(sorted(map(repr, roles))) for roles in (heard.paid - heard.spoke, heard.spoke)
        )
        notes.append(f"rewards go to {silent}, who said nothing, so that they are lost: {spoke} spoke")
    if heard.changed:
        notes.append(f"a reply stands in the conversation with another text, as {heard.changed[0]}")
    return "; ".join(notes)


@dataclass
class Heard:
    """What the episodes of a check were like."""

    spoke: set[str] = field(default_factory=set)  # the roles that did
    paid: set[str] = field(default_factory=set)  # those with rewards
    changed: list[str] = field(default_factory=list)  # replies as the world repeats them, in other words
    failures: list[str | None] = field(default_factory=list)  # why each of them failed


def _check_episode(make_world: MakeWorld, seed: int, heard: Heard) -> bool:
    """Whether the episode ends by itself."""
    world, player = make_world(), _player(make_world, seed)
    messages, info = world.reset(seed=seed)
    role, several = ALONE, "role" in info
    seen: dict[str, list[Message]] = {}
    _check_failure(info)
    heard.failures.append(failure_of(info))
    for _ in range(most_turns(world)):
        if failure_of(info) is not None:
            heard.failures[-1] = failure_of(info)
            return True
        role = info.get("role", role)
        _expect(isinstance(role, str), "text as info['role']", role)
        heard.spoke.add(role)
        seen[role] = copy.deepcopy(messages)
        reply = player(messages)
        stepped = world.step(reply)
        _check_step(stepped, messages, role, seen)
        messages, reward, terminated, truncated, info = stepped
        if info.get("role", role) == role and messages[len(seen[role])]["content"] != reply:
            heard.changed.append(repr(messages[len(seen[role])]["content"])[:80])
        by_role = isinstance(reward, dict) or "role" in info
        expected = "info['role'] of reset to name who speaks first, as a world of several players has it"
        _expect(several or not by_role, expected, (reward, info))
        _expect(isinstance(info.get("role", role), str), "text as info['role']", info.get("role"))
        heard.paid |= {name for name, value in reward.items() if value} if isinstance(reward, dict) else set()
        if terminated or truncated:
            heard.failures[-1] = failure_of(info)
            return True
    return False


def _check_messages(where: str, messages: Any) -> None:
    full = isinstance(messages, list) and messages
    _expect(full, f"{where} to return a non-empty list of messages", messages)
    for message in messages:
        fits = isinstance(message, dict) and message.get("role") in ROLES
        _expect(fits, f"messages of {where} with `role` (one of {', '.join(ROLES)}) and `content`", message)
        said = isinstance(message.get("content"), str) or (
            message.get("content") is None and message.get("tool_calls")
        )
        _expect(said, f"messages of {where} with text as `content`", message)
        _expect(can_be_encoded(message["content"] or ""), f"in messages of {where} {TEXT}", message)


def _check_step(stepped: Any, given: list[Message], role: str, seen: dict[str, list[Message]]) -> None:
    what = "step to return (messages, reward, terminated, truncated, info)"
    _expect(isinstance(stepped, tuple) and len(stepped) == 5, what, stepped)
    messages, reward, terminated, truncated, info = stepped
    _check_messages("step", messages)
    _expect(isinstance(info, dict), "a dict as info of step", info)
    _expect(messages is not given, "a new list of messages from each step", "the list of the step before")
    _expect(given == seen[role], "a list of messages that later steps leave alone", given[len(seen[role]) :])
    following = info.get("role", role)
    before = seen.get(following, [])
    grown = messages[: len(before)] == before
    if following in seen:
        grown = grown and len(messages) > len(before) and messages[len(before)]["role"] == "assistant"
    _expect(grown, "the conversation so far with the reply added, as the assistant's", messages[-2:])
    for other, view in info.get("views", {}).items():
        _check_messages("step", view)
        before = seen.get(other, [])
        _expect(
            view[: len(before)] == before, f"in info['views'] what {other} saw so far, and more", view[-2:]
        )
    for one in reward.values() if isinstance(reward, dict) else [reward]:
        _expect(one is None or _finite(one), "a finite number or None as the reward", one)
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        _expect(isinstance(value, bool | np.bool_), f"true or false as {name}", value)
    _check_failure(info)
    if failure_of(info) is not None:
        _expect(truncated and not terminated, "a failed step to be truncated", (terminated, truncated))


def _check_failure(info: dict[str, Any]) -> None:
    why = failure_of(info)
    told = why is None or (isinstance(why, str) and why)
    _expect(told, "words that say why it failed in info['failed']", why)


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of 400 digits
        return False


def _check_seed(make_world: MakeWorld) -> str:
    """Twice the same, whatever the generators of the process say, and these are left alone."""
    states = random.getstate(), np.random.get_state()
    try:
        found = []
        for luck in (1, 2):
            random.seed(luck)
            np.random.seed(luck)
            before = random.getstate(), str(np.random.get_state())
            found.append([_alone(make_world, seed) for seed in SEEDS])
            after = random.getstate(), str(np.random.get_state())
            _expect(before == after, "a generator per episode", "draws from the generator of the process")
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    for first, again in zip(*found, strict=True):
        _expect_same(first, again, "the same seed and replies, played twice")
    several = [list(episode_steps(make_world(), _player(make_world, 0), seed)) for seed in range(8)]
    return "every seed gives the same episode" if all(one == several[0] for one in several) else ""


def _check_order(make_world: MakeWorld) -> str:
    """One world after the other, with an episode that was left halfway."""
    world = make_world()
    for seed in reversed(SEEDS):
        left = episode_steps(world, Babbler(seed + 2), seed + 2)
        next(left)
        next(left, None)
        again = list(episode_steps(world, _player(make_world, seed), seed))
        _expect_same(_alone(make_world, seed), again, "a new world, and one that was played in before")
    return ""


def _check_side_by_side(make_world: MakeWorld) -> str:
    tables = [episode_steps(make_world(), _player(make_world, seed), seed) for seed in SEEDS]
    played: list[list[Step]] = [[] for _ in SEEDS]
    for row in itertools.zip_longest(*tables):
        for steps, step in zip(played, row, strict=True):
            steps += [step] if step else []
    for seed, steps in zip(SEEDS, played, strict=True):
        _expect_same(_alone(make_world, seed), steps, "alone, and side by side with others")
    return ""


def _halfway(make_world: MakeWorld, seed: int) -> tuple[Any, Player, list[Message], list[Step]]:
    """A world in mid-episode, who plays in it, what is seen, and what is to follow."""
    whole = _alone(make_world, seed)
    turns = (len(whole) - 1) // 2
    world, player = make_world(), _player(make_world, seed)
    messages, _ = world.reset(seed=seed)
    for _ in range(turns):
        messages, *_ = world.step(player(messages))
    return world, player, messages, whole[turns + 1 :]


def _check_snapshot(make_world: MakeWorld) -> str:
    for seed in SEEDS:
        world, player, messages, rest = _halfway(make_world, seed)
        saved = snapshot(world)
        for how in ("on from a snapshot", "on from it after going back", "and once more"):
            _expect_rest(rest, world, player, messages, f"an episode without a break, {how}")
            restore(world, saved)
        other = make_world()
        other.reset(seed=seed + 1)
        restore(other, saved)
        _expect_rest(rest, other, player, messages, "an episode without a break, and in another world")
    return ""


def _check_pickle(make_world: MakeWorld) -> str:
    for seed in SEEDS:
        world, player, messages, rest = _halfway(make_world, seed)
        try:
            sent = ForkingPickler.loads(ForkingPickler.dumps(world))  # as processes send it to each other
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise UserError(f"expected a world that can be pickled, got {got}") from error
        _expect_rest(rest, sent, player, messages, "an episode without a break, and on from a pickled world")
    return ""


def _expect_rest(rest: list[Step], world: Any, player: Player, messages: list[Message], how: str) -> None:
    found = list(_going_on(world, copy.deepcopy(player), messages, len(rest)))
    roles_told = [step[:4] + step[5:] for step in rest]  # a role that is not told anew is the one before
    _expect_same(roles_told, [step[:4] + step[5:] for step in found], how)


def _check_other_process(make_world: MakeWorld) -> str:
    """As a worker plays it: another process, whose hashes of strings differ."""
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        there = child.submit(_play_all, make_world)
        try:
            if not wait([there], CHILD_SECONDS).done:
                expected = f"another process to play {len(SEEDS)} episodes within {CHILD_SECONDS:g} s"
                waits = "does a world wait for what this one holds, such as a file or a port?"
                raise UserError(f"expected {expected}, got one that goes on: {waits}")
        except BaseException:  # of the limit around this check too
            for process in set(multiprocessing.active_children()) - before:
                process.kill()  # or it would be waited for as long as its world waits
            raise
    for here, other in zip(_play_all(make_world), there.result(), strict=True):
        _expect_same(here, other, "this process, and another one (does it go through a set?)")
    return ""


def _play_all(make_world: MakeWorld) -> list[list[Step]]:
    return [_alone(make_world, seed) for seed in SEEDS]


def _check_players(make_world: MakeWorld) -> str:
    """Scripted players speak, and none is better than the optimum."""
    brought = make_world()
    if not hasattr(brought, "scripted_players"):
        return NONE
    best = brought.optimum() if hasattr(brought, "optimum") else None
    told = []
    for name, make in brought.scripted_players().items():
        # Seeds of their own: a player that draws as the world draws would guess all of it.
        played = [_played_by(make(MEASURED + seed), make_world(), seed) for seed in range(MEASURED)]
        if all(one.end == "failed" for one in played):
            raise UserError(f"player {name}: expected episodes that do not fail, got {MEASURED} that did")
        scored = [one for one in played if one.end in ("terminated", "truncated")]
        returns = [each for one in scored for each in one.returns.values() if each is not None]
        if not returns:
            told.append(f"{name} without a return")
            continue
        mean, error = np.mean(returns), np.std(returns) / np.sqrt(len(returns))
        told.append(f"{name} {_number(mean)}" + (f" ({len(scored)})" if len(scored) < MEASURED else ""))
        rounding = 1e-6 * max(abs(best or 0.0), *map(abs, returns))
        # The episodes that have a return may be the better ones: then the mean is no measure of the player.
        if best is not None and len(played[0].returns) == 1 and len(scored) == MEASURED:
            expected = f"no player above the optimum {best:g}"
            _expect(mean <= best + 4 * error + rounding, expected, f"{name} at {mean:g} +- {error:g}")
    told += [] if best is None else [f"optimum {_number(best)}"]
    return f"{', '.join(told)} ({MEASURED} episodes each)"


def _number(value: float) -> str:
    """Rewards may be in thousandths."""
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.1 else f"{value:.3g}"


def _played_by(player: Any, world: Any, seed: int) -> Played:
    """As in the verb `play`: who may ask the world does."""
    return play(world, player.in_world(world) if hasattr(player, "in_world") else player, seed=seed)


def _bringer(make_world: MakeWorld, name: str) -> Any:
    """Whom the verbs ask: the class, or the constructor that stands for it."""
    return make_world if hasattr(make_world, name) else make_world()


def _check_references(make_world: MakeWorld) -> str:
    brought = _bringer(make_world, "reference_returns")
    if not hasattr(brought, "reference_returns"):
        return NONE
    found = brought.reference_returns(4, 0)
    fits = isinstance(found, dict) and all(
        isinstance(name, str) and len(values) and all(isinstance(value, numbers.Real) for value in values)
        for name, values in found.items()
    )
    _expect(fits, "{name: list of returns} from reference_returns(episodes, seed)", found)
    return ", ".join(found)


def _check_drawing(make_world: MakeWorld) -> str:
    world = make_world()
    if not hasattr(world, "draw"):
        return NONE
    steps = []
    for step in episode_steps(world, _player(make_world, SEEDS[0]), SEEDS[0]):
        steps.append(step)
        drawing = world.draw()
        _expect(isinstance(drawing, str) and drawing, "text from draw()", drawing)
    _expect_same(_alone(make_world, SEEDS[0]), steps, "an episode that is not drawn, and one that is")
    return "drawn in text"


def _check_logs(make_world: MakeWorld) -> str:
    brought = _bringer(make_world, "write_logs")
    if not hasattr(brought, "write_logs"):
        return NONE
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("logs.jsonl", "again.jsonl")]
        try:
            for path in paths:
                brought.write_logs(path, dialogs=5, seed=3)
        except UserError as why:  # logs are by choice
            return f"none: {why}"
        dialogs = list(read_jsonl(paths[0]))
        _expect(len(dialogs) == 5, "5 Dialogs from write_logs(path, dialogs=5, seed=3)", len(dialogs))
        same = paths[0].read_bytes() == paths[1].read_bytes()
        _expect(same, "the same logs from the same seed", "other ones")
    return "written as Dialogs"


CHECKS: dict[str, Callable[[MakeWorld], str]] = {
    "contract": _check_contract,
    "seed": _check_seed,
    "order": _check_order,
    "side by side": _check_side_by_side,
    "snapshot": _check_snapshot,
    "pickle": _check_pickle,
    "other process": _check_other_process,
    "players": _check_players,
    "references": _check_references,
    "drawing": _check_drawing,
    "logs": _check_logs,
}
