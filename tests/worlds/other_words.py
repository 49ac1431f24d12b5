"""The generated town with users who word everything otherwise: does a system understand, or has it learned
sentences by heart?

    python -m pipelines.converse --world tests.worlds.other_words:town --system runs/bc --output_dir runs/far
"""

from __future__ import annotations

from envs.multiwoz.town import generate_town
from envs.multiwoz.world import World

SENTENCES = {
    "Inform": (
        "{value} would suit me for the {word}.",
        "Make it {value} when it comes to the {word}.",
        "My {word}: {value}.",
    ),
    "Inform-none": (
        "Is there {a} {domain} around?",
        "I was hoping to find {a} {domain}.",
        "Then there is {a} {domain} to be found.",
    ),
    "Request": ("Which {word} is it?", "May I know the {word}?", "And the {word}?"),
    "bye": ("Perfect, see you.", "I have all I wanted. So long."),
    "greet": ("Hi there.",),
    "thank": ("Much obliged.",),
}


def town() -> World:
    """Places, wishes and the system's words are those of the town that one gets without --world."""
    return generate_town(user_sentences=SENTENCES)
