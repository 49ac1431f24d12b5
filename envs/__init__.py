"""Worlds to talk in, by name; each is a Gymnasium environment whose observations are messages (`multiwoz/` can be spoken in acts too)."""

from envs.multiwoz.text import MultiWOZText
from envs.small_talk_world import SmallTalk

ENVS = {"small_talk": SmallTalk, "multiwoz": MultiWOZText}
