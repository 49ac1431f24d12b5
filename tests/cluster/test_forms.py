"""A service on an actor answers as it does in this process."""

from __future__ import annotations

import copy
import pickle

import pytest

from envs.text_world import play
from envs.visual_dialogue import bots
from envs.visual_dialogue.world import YesNoScenes
from rl_dialog.cluster.data import connect
from rl_dialog.cluster.forms import ActorPost, place_service
from rl_dialog.errors import UserError


class ByActor(YesNoScenes):
    def connect(self) -> ActorPost:
        return ActorPost("bots")


@pytest.mark.slow
def test_visual_dialogue_by_an_actor() -> None:
    """The same episodes, in a copied and a pickled world too; unknown endpoints are the service's errors."""
    make = YesNoScenes.scripted_players()["polar"]
    with connect("local", num_cpus=1):
        place_service("bots", bots.post)
        world = pickle.loads(pickle.dumps(copy.deepcopy(ByActor())))
        for seed in range(3):
            here, there = (play(each, make(seed), seed=seed) for each in (YesNoScenes(), world))
            assert here.dialogs["assistant"].messages == there.dialogs["assistant"].messages
        with pytest.raises(UserError, match="no actor has"):
            place_service("bots", bots.post)
        with pytest.raises(UserError, match="Did you mean /step"):
            ActorPost("bots")("/stop", {})
