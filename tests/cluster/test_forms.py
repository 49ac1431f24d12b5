"""A service on an actor answers as it does in this process."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import ray

from envs.text_world import play
from envs.visual_dialogue import bots
from envs.visual_dialogue.world import YesNoScenes
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.forms import ActorPost, place_service
from rl_dialog.errors import UserError


class ByActor(YesNoScenes):
    def connect(self) -> ActorPost:
        return ActorPost("bots")


def until_gone(name: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name)
        except ValueError:
            return
        time.sleep(0.1)
    raise TimeoutError(name)


@pytest.mark.slow
def test_visual_dialogue_by_an_actor() -> None:
    """The same episodes, in a copied and a pickled world too; unknown endpoints are the service's errors, and
    a lost actor fails the episode."""
    make = YesNoScenes.scripted_players()["polar"]
    with connect("local", num_cpus=1):
        actor = place_service("bots", bots.post)
        world = pickle.loads(pickle.dumps(copy.deepcopy(ByActor())))
        for seed in range(3):
            here, there = (play(each, make(seed), seed=seed) for each in (YesNoScenes(), world))
            assert here.dialogs["assistant"].messages == there.dialogs["assistant"].messages
        with pytest.raises(UserError, match="no actor has"):
            place_service("bots", bots.post)
        with pytest.raises(UserError, match="Did you mean /step"):
            ActorPost("bots")("/stop", {})
        world.reset(seed=1)
        ray.kill(actor)
        until_gone("bots")
        _, reward, terminated, truncated, info = world.step("is it red?")
        assert (reward, terminated, truncated) == (None, False, True) and "actor bots" in info["failed"]
        assert "expected one of this name" in ByActor().reset(seed=1)[1]["failed"]
