"""Random walks on graphs that no setting was chosen on, as worlds by name: `tests.worlds.graphs:Graph7`."""

from __future__ import annotations

from envs.toy.walks import RandomWalks


class Graph7(RandomWalks):
    graph_seed = 7


class Graph8(RandomWalks):
    graph_seed = 8


class Graph9(RandomWalks):
    graph_seed = 9
