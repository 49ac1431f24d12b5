"""Made-up comments in the layout of the Reddit CSV files: no text of anybody's."""

from __future__ import annotations

import csv
import random
from pathlib import Path

HEADER = [
    "id",
    "parent_id",
    "subreddit_id",
    "link_id",
    "text",
    "score",
    "ups",
    "author",
    "controversiality",
    "parent_link_id",
    "parent_text",
    "parent_score",
    "parent_ups",
    "parent_author",
    "parent_controversiality",
]
THINGS = ("the bus", "this film", "my bike", "the new bridge", "that cake", "the match")
KIND = ("I love {}.", "Thanks, {} made my day!", "Well said about {}.")
RUDE = ("Only an idiot likes {}.", "{} is pathetic, like you.", "What a stupid thing to say about {}.")
PARENTS = ("What do you think of {}?", 'They said "look at {}",\nand I did.', "So, {}, again.")


def write_comments(folder: Path, *, comments: int, seed: int) -> list[Path]:
    """Writes comments_positive.csv and comments_negative.csv, so many comments each: kind ones with a score
    above 0, rude ones with one below."""
    chance, paths = random.Random(seed), []
    for name, texts, sign in (("positive", KIND, 1), ("negative", RUDE, -1)):
        paths.append(folder / f"comments_{name}.csv")
        with open(paths[-1], "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(HEADER)
            for number in range(comments):
                thing = chance.choice(THINGS)
                text, parent = (chance.choice(kinds).format(thing) for kinds in (texts, PARENTS))
                score = sign * chance.randint(1, 900)
                about = [f"c{sign}{number}", f"t1_p{number // 2}", "t5_made", "t3_up"]
                rows.writerow([*about, text, score, max(score, 0), "ann", 0, "t3_up", parent, 7, 7, "bob", 0])
    return paths
