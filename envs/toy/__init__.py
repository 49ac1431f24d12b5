"""Small worlds in words whose best return is known: branching graph, random walks, maze, house, questions,
chess end-games."""

from envs.toy.endgames import Endgames
from envs.toy.graphs import BranchingGraph
from envs.toy.house import HiddenHouse, House
from envs.toy.maze import DoubleT, HiddenDoubleT
from envs.toy.questions import GuessMyCity, TwentyQuestions
from envs.toy.walks import RandomWalks

TOYS = {
    "toy_graph": BranchingGraph,
    "toy_walks": RandomWalks,
    "toy_maze": DoubleT,
    "toy_maze_hidden": HiddenDoubleT,
    "toy_house": House,
    "toy_house_hidden": HiddenHouse,
    "toy_twenty_questions": TwentyQuestions,
    "toy_guess_my_city": GuessMyCity,
    "toy_endgames": Endgames(),
}
