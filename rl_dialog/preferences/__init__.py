"""Preferences: two segments, a label, and the reward that is learned from many of them."""
