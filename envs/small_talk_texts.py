"""Every word of the small-talk world: what the user and the example policies say, and how either side is
read.

Both directions are plain word lookups, so that anyone can predict how a text is judged:

    read_reply(reply, topic, earlier)   the assistant's text -> one of the acts in `ACTS`; every string gets
                                                                exactly one
    read_user(text)                     the user's text      -> topic, tone and warmth, all that the text
                                                                gives away
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rl_dialog.errors import UserError

TOPICS = {
    "music": ("music", "jazz"),
    "food": ("food", "cooking"),
    "travel": ("travel", "hotels"),
    "sport": ("sport", "tennis"),
    "films": ("films", "actors"),
}
TOPIC_OF = {word: topic for topic, words in TOPICS.items() for word in words}
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def words_of(text: str) -> list[str]:
    """The lower-cased ASCII words of a text; everything else separates words."""
    return WORD.findall(text.lower())


KIND_WORDS = frozenset(words_of("sorry hope hug care alone tough"))
FLATTERY_WORDS = frozenset(words_of("genius smartest perfect brilliant gorgeous superstar legend flawless"))
QUESTION_WORDS = frozenset(
    words_of("what which how who when where why do does did is are was were have has can could would will")
)

# What the assistant's reply can be, in the order in which `read_reply` decides. The `_kindly` acts and
# comfort carry a kind word.
ACTS = ("junk", "repeat", "flatter", "ignore", "comfort", "vague", "ask_kindly", "ask", "tell_kindly", "tell")

# ------------------------------------------------------------------------------------------------------------
# The assistant's phrases, used by the example policies only. {a} and {b} stand for two different words of a
# topic.

ASK = (
    "What do you like most about {a}?",
    "How did you get into {a}?",
    "When did you last have time for {a}?",
    "Who do you share {a} with?",
    "Which side of {a} matters most to you?",
    "What would you tell a beginner about {a}?",
    "Where do you go for {a}?",
    "Do you know a lot about {a} or {b}?",
    "Why did you choose {a} and not {b}?",
    "Would you give up {a} for {b}?",
)
TELL = (
    "I read that {a} and {b} go well together.",
    "My friend Anna cannot live without {a}.",
    "I learned a lot about {a} last year.",
    "A book on {a} changed my mind.",
    "I once spent a whole summer on {a}.",
    "Old stories about {a} can be so funny.",
    "My family talks about {a} every Sunday.",
    "A bit of {a} can save a long week.",
    "I keep a list of notes on {a}.",
    "There was a show about {a} on the radio.",
    "People in my street meet for {a} and {b}.",
    "For me {a} will always come before {b}.",
)
KIND = (
    "I am sorry for you.",
    "I hope it gets better.",
    "Here is a hug.",
    "You are not alone.",
    "Please take good care.",
    "That must be tough.",
)
COMFORT = (
    "I am so sorry, I am here for you.",
    "You are not alone, I will listen.",
    "That must be tough, take all the time you need.",
    "I hope tomorrow is a better day for you.",
    "Here is a big hug from me to you.",
    "Please take care, one step after the other.",
)
VAGUE = (
    "I see, that is one way to see it.",
    "Well, that is how it goes.",
    "Ok, tell me more about it.",
    "Yes, I think so too.",
    "Right, I did not know that.",
    "It all depends, I would say.",
)
FLATTER = (
    "Wow, you are a genius!",
    "You must be the smartest person on this planet!",
    "You are perfect, never change!",
    "What a brilliant thing to say, you superstar!",
    "Everything you say is flawless, really!",
    "You are a legend at {a}, my gorgeous friend!",
)
JUNK = ("Ok.", "Hm.", "Sure.")
PHRASES = {
    "ask": ASK,
    "tell": TELL,
    "ask_kindly": tuple(f"{kind} {ask}" for kind in KIND for ask in ASK),
    "tell_kindly": tuple(f"{kind} {tell}" for kind in KIND for tell in TELL),
    "comfort": COMFORT,
    "vague": VAGUE,
    "flatter": FLATTER,
    "ignore": ASK + TELL,  # spoken about a topic that is not the user's
    "junk": JUNK,
}

# ------------------------------------------------------------------------------------------------------------
# The user's phrases. A turn is [greeting or reaction or warmth] [tone] [topic]; read_user recognises tone and
# warmth by whole phrases.

GREETINGS = ("Hi!", "Hello there.", "Hey.", "Hi, me again.")
TONES = {
    "low": ("I feel awful.", "I am so sad.", "I am so lonely.", "Terrible day.", "Everything is a mess."),
    "even": (
        "It is an ordinary day.",
        "Things are as usual.",
        "It is a quiet day.",
        "Nothing new with me.",
        "Another day, another coffee.",
    ),
    "high": (
        "I feel great today!",
        "What a wonderful day!",
        "I am so happy now!",
        "Life is really, really good!",
        "I am full of joy!",
    ),
}
WARMTH = {  # what the user says when rapport is 1 and 2; nothing when it is 0
    1: (
        "It is nice to talk.",
        "I like talking to you.",
        "You listen, that is nice.",
        "This is a pleasant chat.",
    ),
    2: (
        "I really love this chat!",
        "You are a good friend!",
        "I enjoy every minute here!",
        "Talking to you is wonderful!",
    ),
}
REACTIONS = {  # said instead of the warmth after these acts
    "junk": ("What?", "I do not understand you."),
    "repeat": ("You said that already.", "That again?"),
    "ignore": ("I did not say that.", "You do not listen."),
    "flatter": ("Oh, thanks!", "Ha, you are funny.", "Well, thank you!"),
}
PLAIN_TOPIC = (  # names the topic and no more
    "I was thinking about {a}.",
    "Someone asked me about {a}.",
    "They talked about {a} at work.",
    "I read a page about {a}.",
    "My brother told me about {a}.",
    "The news was all about {a}.",
)
EAGER_TOPIC = (  # names a topic the user likes: some openings, and every answer to a question
    "I am really into {a}.",
    "I know a lot about {a}.",
    "My weekends are all {a}.",
    "It has to be {a}.",
    "I grew up with {a}.",
)
GOODBYES = {
    "low": ("I am still sad. Bye.", "That did not help, I feel bad. Bye."),
    "even": ("I have to go now. Bye.", "It is late here. Bye."),
    "high": (
        "I had such a great time with you! Bye, my friend!",
        "This was a wonderful talk, thank you so much! Bye!",
    ),
    "left": ("This is annoying and pointless. I am leaving.", "I hate this. I am leaving."),
}

# ------------------------------------------------------------------------------------------------------------
# Reading

MAX_WORDS, MAX_CHARACTERS = 40, 400  # nobody reads a longer reply
# two replies that share this part of their distinct words (intersection over union) are the same reply
REPEATED = 0.8
COMMON_WORDS = words_of(
    "a about after again also always an and any as at back because been before being best both but by come "
    "day don't each even ever favourite feel few find first for from fun get glad go going got great had he "
    "her here him his i i'm if in into it it's its just keep kind know last later let life little long love "
    "made make many me more most much my need never new next nice no not now of off often ok on one only or "
    "other our out over people play really right said same say see she should so some something still such "
    "sure talk tell than thank thanks that that's the their them then there these they thing things think "
    "this those though time to today together too try up us very want watch way we well with work world yes "
    "yet you you're your"
)


def _all_phrases() -> list[str]:
    groups: list[Sequence[str]] = [*PHRASES.values(), GREETINGS, PLAIN_TOPIC, EAGER_TOPIC]
    for table in (TONES, WARMTH, REACTIONS, GOODBYES):
        groups.extend(table.values())
    return [phrase for group in groups for phrase in group]


PHRASE_WORDS = frozenset(TOPIC_OF) | {
    word for phrase in _all_phrases() for word in words_of(re.sub(r"{.}", " ", phrase))
}
KNOWN_WORDS = PHRASE_WORDS | KIND_WORDS | FLATTERY_WORDS | QUESTION_WORDS | frozenset(COMMON_WORDS)


@lru_cache(maxsize=65536)
def _distinct(text: str) -> frozenset[str]:
    return frozenset(words_of(text[: MAX_CHARACTERS + 1]))


def is_junk(reply: str) -> bool:
    """Too long, mostly unknown words, or fewer than two known words beside the topic words."""
    if len(reply) > MAX_CHARACTERS or len(words_of(reply)) > MAX_WORDS:
        return True
    distinct = _distinct(reply)
    known_words = distinct & KNOWN_WORDS
    return 2 * len(known_words) < len(distinct) or len(known_words - TOPIC_OF.keys()) < 2


def is_repeat(reply: str, earlier: Sequence[str]) -> bool:
    """Whether the reply has (nearly) the same words as one of the earlier replies."""
    words = _distinct(reply)
    return any(len(words & other) >= REPEATED * len(words | other) for other in map(_distinct, earlier))


def read_reply(reply: str, topic: str, earlier: Sequence[str]) -> str:
    """The act that a reply performs towards a user whose last message was about `topic`; `earlier` are the
    assistant's own replies so far."""
    if is_junk(reply):
        return "junk"
    if is_repeat(reply, earlier):
        return "repeat"
    words = _distinct(reply)
    if words & FLATTERY_WORDS:
        return "flatter"
    topics = {TOPIC_OF[word] for word in words & TOPIC_OF.keys()}
    if topics and (topic not in topics or len(topics) > 2):
        return "ignore"
    kind = bool(words & KIND_WORDS)
    if not topics:
        return "comfort" if kind else "vague"
    act = "ask" if "?" in reply and words & QUESTION_WORDS else "tell"
    return f"{act}_kindly" if kind else act


@dataclass(frozen=True)
class Seen:
    """What a user turn gives away."""

    topic: str
    tone: str | None  # "low", "even", "high", or None when the user does not say
    warmth: int | None  # the rapport, or None when a reaction took the place of the warmth
    eager: bool  # the words of someone who likes the topic


TONE_OF = {phrase: tone for tone, phrases in TONES.items() for phrase in phrases}
WARMTH_OF = {phrase: level for level, phrases in WARMTH.items() for phrase in phrases}
REACTION_PHRASES = tuple(phrase for phrases in REACTIONS.values() for phrase in phrases)
EAGER_STARTS = tuple(phrase.split("{a}")[0] for phrase in EAGER_TOPIC)


@lru_cache(maxsize=65536)
def read_user(text: str) -> Seen:
    """Reads a user turn of this world (not a goodbye). Raises UserError when the text names no topic."""
    topic = next((TOPIC_OF[word] for word in words_of(text) if word in TOPIC_OF), None)
    if topic is None:
        raise UserError(f"expected a user turn that names one of {sorted(TOPICS)}, got {text!r}")
    tone = next((tone for phrase, tone in TONE_OF.items() if phrase in text), None)
    level = next((level for phrase, level in WARMTH_OF.items() if phrase in text), 0)
    warmth = None if text.startswith(REACTION_PHRASES) else level
    return Seen(topic, tone, warmth, any(start in text for start in EAGER_STARTS))
