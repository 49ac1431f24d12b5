"""What a preference run asks of its environments before it writes anything."""

from __future__ import annotations

from typing import Any


def probe(make_envs: Any, *, is_seen: bool) -> Any:
    """One environment, closed. Raises UserError for options that it does not have, and where people could not
    see what happens in it.

    Args:
        make_envs: the constructor with its options, a `partial` (envs/__init__.py).
        is_seen: people are to compare clips of it.
    """
    drawn = is_seen and is_drawn_when_seen(make_envs)
    envs = make_envs(1, **({"pictures": True} if drawn else {}))
    if drawn:
        envs.reset(seed=0)
    envs.close()
    return envs


def is_drawn_when_seen(make_envs: Any) -> bool:
    """Do people see pictures that the environment draws for them, and not what the policy observes?"""
    return getattr(make_envs.func, "is_drawn_when_seen", False)


def observes_pictures(make_envs: Any) -> bool:
    """Does the policy observe pictures there, and not numbers?"""
    envs = make_envs(1)
    pictures = len(envs.single_observation_space.shape) == 3
    envs.close()
    return pictures
