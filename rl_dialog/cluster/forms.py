"""A service of forms on a Ray actor: endpoint and form in, a JSON value out, as over HTTP.

place_service("visual_dialogue", post)      # anywhere on the cluster; it lives as long as the Ray does
ActorPost("visual_dialogue")("/step_rank", form)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from rl_dialog.errors import UserError

SECONDS = 30.0  # for one answer
STARTING = 120.0  # for a place on the cluster

Post = Callable[[str, Mapping[str, str]], Any]


@ray.remote(num_cpus=1)
class _Service:
    def __init__(self, post: Post) -> None:
        self.post = post

    def answer(self, endpoint: str, form: Mapping[str, str]) -> Any:
        return self.post(endpoint, form)

    def ready(self) -> bool:
        return True


def place_service(name: str, post: Post) -> Any:
    """Starts the actor that answers by `post`, and returns it once it is there; `ray.kill` ends it. Uses the
    Ray of this process. Raises UserError for a name that is taken, TimeoutError where it finds no place."""
    try:
        actor = _Service.options(name=name, lifetime="detached", max_restarts=-1).remote(post)
    except ValueError as error:
        raise UserError(f"expected a name that no actor has, got {name!r}") from error
    try:
        ray.get(actor.ready.remote(), timeout=STARTING)
    except ray.exceptions.GetTimeoutError as error:
        ray.kill(actor)
        raise TimeoutError(f"actor {name}: expected a place (1 CPU) within {STARTING:g} s") from error
    return actor


class ActorPost:
    """Sends forms to the actor of a name. Raises ConnectionError where it is not there, lost, or does not
    answer within `seconds`; errors of the service itself come through."""

    def __init__(self, name: str, *, seconds: float = SECONDS) -> None:
        self.name, self.seconds, self.actor = name, seconds, None

    def __call__(self, endpoint: str, form: Mapping[str, str]) -> Any:
        try:
            if self.actor is None:
                self.actor = ray.get_actor(self.name)
            return ray.get(self.actor.answer.remote(endpoint, dict(form)), timeout=self.seconds)
        except ray.exceptions.GetTimeoutError as error:
            got = f"none of {endpoint} within {self.seconds:g} s"
            raise ConnectionError(f"actor {self.name}: expected an answer, got {got}") from error
        except ray.exceptions.RayActorError as error:
            self.actor = None
            raise ConnectionError(f"actor {self.name}: expected an answer, got {error}") from error
        except ValueError as error:
            if self.actor is not None:
                raise  # the service's own
            raise ConnectionError(f"actor {self.name}: expected one of this name, got none") from error

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"actor": None}  # a handle is this process's
