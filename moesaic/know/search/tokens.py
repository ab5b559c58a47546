"""Words of a text as an index of words keeps them, and words of a query.

Case, accents and compatibility forms are folded and English plurals lose their ending, which hurts no other language:
a query is treated as the texts are. Chinese, Japanese and Thai, which put no space between words, are indexed by
characters and pairs of characters. Function words are indexed, but count in a query only if it has no other words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

_STOP_WORDS = """
a about after all also am an and any are as at be because been before being between both but by can could did do does
doing during each for from further had has have having he her here hers him his how i if in into is it its itself just
me more most my no nor not of off on once only or other our out over own same she should so some such than that the
their them then there these they this those through to too under until up very was we were what when where which while
who whom whose why will with would you your yours
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
# Han, kana, Thai, Lao, Burmese and Khmer: no space between words.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNSPACED += "\U00020000-\U0003ffff"
_ASCII_WORD = re.compile(r"[a-z0-9_]+(?:'[a-z]+)?")
_MAX_LENGTH = 64  # characters: longer ones are data, not words


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    # Python's \w leaves out combining marks, which are parts of words in Hindi and in decomposed text.
    marks = "".join(
        f"\\u{code:04x}" for code in range(0x300, 0x10000) if unicodedata.category(chr(code)) in ("Mn", "Mc")
    )
    return re.compile(rf"\w[\w{marks}]*(?:['’]\w+)?"), re.compile(rf"[{_UNSPACED}]+|[^{_UNSPACED}]+")


def raw_words(text: str) -> list[str]:
    """In the order of the text, with case folded and nothing else done to them."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _patterns()[0].findall(unicodedata.normalize("NFKC", text).casefold())


def terms(word: str) -> tuple[str, ...]:
    """What a raw word of a document is indexed as; more than one where words are not set apart."""
    if word.isascii():
        return (_stem(word),)
    found: list[str] = []
    for run in _patterns()[1].findall(word):
        if re.match(f"[{_UNSPACED}]", run):
            found += [*run, *map("".join, pairwise(run))]
        else:
            found.append(_stem(_without_accents(run.replace("’", "'"))))
    return tuple(found)


def document_terms(text: str) -> list[str]:
    return [term for word in raw_words(text) for term in terms(word)]


def query_terms(text: str) -> list[str]:
    words = raw_words(text)
    telling = [word for word in words if word not in STOP_WORDS] or words
    return [term for word in telling for term in _query_terms(word)]


def _query_terms(word: str) -> Iterable[str]:
    """Of characters that come in pairs, the pairs alone."""
    found = terms(word)
    pairs = [term for term in found if len(term) == 2 and term[0] > "\u0dff"]
    return [term for term in found if len(term) > 1 or term <= "\u0dff"] if pairs else found


def _stem(word: str) -> str:
    """Harman's S stemmer, and the possessive."""
    if "'" in word:
        word = word.removesuffix("'s")
    if len(word) > _MAX_LENGTH:
        return word[:_MAX_LENGTH]
    if len(word) < 4 or word[-1] != "s" or word.endswith(("us", "ss", "is")):
        return word
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else word[:-3] + "y"
    return word[:-1]


def _without_accents(word: str) -> str:
    """Latin, Greek and Cyrillic letters lose their accents; marks of other scripts are letters of their own."""
    decomposed = unicodedata.normalize("NFD", word)
    return unicodedata.normalize("NFC", re.sub("[\u0300-\u036f]", "", decomposed))
