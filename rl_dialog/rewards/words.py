"""Words as the rewards count them: no model, no downloads, and text without spaces counts too."""

from __future__ import annotations

import re
from functools import lru_cache

from rl_dialog.data.letters import SPACED, UNSPACED

REMEMBERED = 256  # texts: several rewards count the words of the same dialog, one after the other
LONGEST_REMEMBERED = 10_000  # characters: 256 turns of a megabyte would fill the memory with their words

_WORD = re.compile(rf"[{UNSPACED}]|{SPACED}(?:['’]{SPACED})*")
_RUN = re.compile(rf"[{UNSPACED}]+|{SPACED}")

# English function words, which say nothing about repetition. Question words are not among them: asking the
# same question again is repetition.
_FUNCTION_WORDS = """
a an the this that these those some any each every no not nor
i me my mine myself you your yours yourself he him his himself she her hers herself it its itself
we us our ours ourselves they them their theirs themselves
am is are was were be been being do does did doing done have has had having
can could will would shall should may might must ought
and or but if then than so as because while until though although
of at by for with about against between into through during before after above below to from up down in out \
on off over under
again further once here there all both few more most other such only own same too very just also
s t d m o re ve ll don didn doesn isn aren wasn weren hasn haven hadn won wouldn couldn shouldn can't cannot
yes yeah oh okay ok well
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
QUESTION_WORDS = frozenset(("who", "what", "why", "where", "how", "when"))


def words(text: str) -> tuple[str, ...]:
    """Lower-case words; punctuation is none, "don't" is one, and each ideograph or kana counts as one."""
    return _found(_WORD, text) if len(text) <= LONGEST_REMEMBERED else _found.__wrapped__(_WORD, text)


def parts(text: str) -> tuple[str, ...]:
    """Lower-case words split at apostrophes too ("what's" -> what, s), with unspaced text in whole runs."""
    return _found(_RUN, text) if len(text) <= LONGEST_REMEMBERED else _found.__wrapped__(_RUN, text)


@lru_cache(2 * REMEMBERED)
def _found(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    return tuple(pattern.findall(text.lower()))


def content_words(text: str) -> set[str]:
    """The distinct words that carry meaning."""
    return set(meaningful(text))


def meaningful(text: str) -> list[str]:
    """The words that carry meaning, in order: no function words; unspaced text gives its pairs of
    neighbouring characters."""
    content: list[str] = []
    for word in parts(text):
        if re.match(f"[{UNSPACED}]", word):
            content += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        elif word not in FUNCTION_WORDS:
            content.append(word)
    return content
