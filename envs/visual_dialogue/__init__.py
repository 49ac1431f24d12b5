"""Visual dialogue without pictures: scenes for photographs, rules for the bots, the published protocol and
rewards. envs/README.md describes it, and `python -m envs.visual_dialogue --help` the command."""

from envs.visual_dialogue.client import Bots, HttpPost, ServerFailed
from envs.visual_dialogue.server import make_server
from envs.visual_dialogue.world import SCENES, Scenes, VisualDialogue

__all__ = ["SCENES", "Bots", "HttpPost", "Scenes", "ServerFailed", "VisualDialogue", "make_server"]
