"""What a word is made of, in every script: parts of regular expressions."""

from __future__ import annotations

import unicodedata

# Scripts written without spaces: kana, Han ideographs and their extensions. Korean and most others separate
# words, so \w+ finds theirs.
UNSPACED = (
    "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
# Vowel signs and accents that have a character of their own, which \w leaves out: Hindi, Arabic and Hebrew
# words would break at each. The variation selectors of emoji (fe00 to fe0f) are none of them.
_NEAR, _FAR = (
    "".join(chr(code) for code in codes if unicodedata.category(chr(code)) in ("Mn", "Mc"))
    for codes in (range(0x300, 0xFE00), range(0x10000, 0x1F000))
)
# re has a table of characters up to ffff and asks for those beyond one after the other, so that only what
# lies there may be asked for.
MARK = rf"(?:[{_NEAR}]|(?=[\U00010000-\U0001efff])[{_FAR}])"
LETTER = rf"[^\W{UNSPACED}]"  # of a word with borders; each character of UNSPACED is a word
SPACED = rf"{LETTER}++(?:{MARK}++{LETTER}*+)*+"  # such a word
