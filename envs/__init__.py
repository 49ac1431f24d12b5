"""Worlds to talk in, by name; each is a Gymnasium environment whose observations are messages (`multiwoz/` is spoken in acts, see its README)."""

from envs.small_talk_world import SmallTalk

ENVS = {"small_talk": SmallTalk}
