"""Worlds to act in, by name; each is a Gymnasium environment."""

from envs.small_talk_world import SmallTalk

ENVS = {"small_talk": SmallTalk}
