"""What a sentence claims, word by word: names, numbers, relation words with how rare they are, and what is negated.

    claims("Ada Lovelace did not meet Babbage in 1833.")

Written for English; texts in other languages that have spaces and capitals are compared by their words all the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from typing import Literal

Kind = Literal["name", "number", "word", "function"]

TOKEN = re.compile(
    r"(?P<number>\d+(?:[,.]\d+)*(?:st|nd|rd|th|s)?\b)|(?P<initials>(?:[A-Z]\.){2,})"
    r"|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)|(?P<mark>[,;:()\[\]–—.!?\"“”])|(?P<digits>\d+)"
)


def words(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


FUNCTION = words(
    """a an the this that these those of in on at by for with from to into onto upon as is are was were be been being am
and or but nor so yet if then than it its itself he him his himself she her hers herself they them their themselves
we us our i me my you your who whom whose which what where when while there here has have had having do does did
doing will would shall should can could may might must also both each such some any all one same other own about
over under after before during between through within among against per via up down out off again further once more
most very just only even still too however moreover additionally furthermore therefore thus hence according because
although though since until unless whereas whether s t d ll re ve m"""
)
PRONOUNS = words(
    "he him his she her hers it its they them their himself herself itself themselves this these who which"
)
NEGATIONS = words("not no never none nobody nothing neither nor without cannot hardly nowhere non isn wasn aren weren")
CLAUSE = words("and but or while which who whose whom that where when after before because although though as since if")
NUMERALS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty"""
ORDINALS = "zeroth first second third fourth fifth sixth seventh eighth ninth tenth"
WORDED = {word: str(n) for listed in (NUMERALS, ORDINALS) for n, word in enumerate(listed.split())}
# "Republic of Seychelles" is one name.
WITHIN_NAMES = words("of de von van du la le der den al bin")
SCOPE = 4  # tokens after a negation within which it is about what it negates
NAME_WEIGHT = 3.0


@dataclass(frozen=True)
class Token:
    text: str
    norm: str  # what is compared
    kind: Kind
    weight: float
    segment: int  # of the clause it is in: a mark, or a word such as "and", begins another
    stretch: int  # the same by marks alone
    place: int
    negated: bool = False
    initial: bool = False  # it begins a sentence, where a capital says nothing
    run: int = -1  # names that follow each other are one


@dataclass(frozen=True)
class Lexicon:
    """How rare words are in the texts that were read, and which are written small, so that a capital makes no name."""

    documents: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    small: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Lexicon:
        counts: Counter[str] = Counter()
        small: set[str] = set()
        documents = 0
        for text in texts:
            said = {found["word"] for found in TOKEN.finditer(text) if found["word"]}
            counts.update({stem(word) for word in said})
            small.update(word for word in said if word[0].islower())
            documents += 1
        return cls(documents, counts, frozenset(small))

    def rarity(self, norm: str) -> float:
        """From 0.5 for a word that is in every text to 2 for one that is in none; 1 where no text was read."""
        if self.documents < 2:
            return 1.0
        return 0.5 + 1.5 * log((self.documents + 1) / (self.counts[norm] + 1)) / log(self.documents + 1)


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """A word without its inflection, roughly; the same rough form for all of its forms is what matters."""
    word = folded(word)
    word = re.sub(r"['’]s?$", "", word)
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "i"
    for ending in ("ing", "ed", "ly", "es", "s"):
        least = 3 if ending in ("ing", "ed", "ly") else 2
        if word.endswith(ending) and len(word) - len(ending) > least and not word.endswith(("ss", "us", "is")):
            word = word[: -len(ending)]
            if ending in ("ing", "ed") and word[-1] == word[-2] and word[-1] not in "lsz":
                word = word[:-1]
            break
    return re.sub(r"(?:e|y|i)$", lambda found: "" if found[0] == "e" else "i", word) if len(word) > 3 else word


@lru_cache(maxsize=65536)
def folded(word: str) -> str:
    """Without case and accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", word.casefold()) if not unicodedata.combining(c))


def claims(sentence: str, lexicon: Lexicon | None = None) -> list[Token]:
    """The tokens of one sentence, marks apart."""
    lexicon = lexicon or Lexicon()
    found: list[Token] = []
    segment, stretch, place, run, last_name, negation = 0, 0, 0, 0, -2, -99
    initial = True
    for match in TOKEN.finditer(sentence):
        if match["mark"]:
            if match["mark"] not in '"“”':
                segment, stretch, negation = segment + 1, stretch + 1, -99
            initial = initial or match["mark"] in ".!?"
            last_name = -2
            continue
        text = match[0]
        lower = folded(text)
        if lower in CLAUSE:
            segment += 1
        kind, norm = kind_and_norm(text, lower, match.lastgroup or "", initial, lexicon)
        if lower == "first" and found and found[-1].norm == "at":
            kind = "function"  # "at first" counts nothing
        negated = place - negation <= SCOPE and kind != "function"
        if is_negation(lower) and not of_title(sentence, match, initial):
            kind, negation = "function", place
        weight = 0.0 if kind == "function" else 3.0 if kind == "number" else lexicon.rarity(norm)
        if kind == "name":
            run += last_name != place - 1
            last_name, weight = place, NAME_WEIGHT
        elif lower in WITHIN_NAMES and last_name == place - 1:
            last_name = place
        own = run if kind == "name" else -1
        found.append(Token(text, norm, kind, weight, segment, stretch, place, negated, initial, own))
        initial = False
        place += 1
    return shared_weights(found)


def kind_and_norm(text: str, lower: str, group: str, initial: bool, lexicon: Lexicon) -> tuple[Kind, str]:
    if group in ("number", "digits"):
        plain = re.sub(r"(?<=\d)(?:st|nd|rd|th|s)$", "", lower)
        return "number", re.sub(r",(?=\d{3})", "", plain).lstrip("0") or "0"
    if group == "initials":
        return "name", lower.replace(".", "")
    base = re.sub(r"['’]s?$", "", lower)
    if base in FUNCTION and not (lower == "may" and text[0].isupper() and not initial):
        return "function", base
    if lower in WORDED:
        return "number", WORDED[lower]
    if not text[0].isupper():
        return "word", stem(text)
    if initial and (text.lower() in lexicon.small or lower.endswith(("ly", "ing", "ed"))):
        return "word", stem(text)
    return "name", stem(text)


def is_negation(lower: str) -> bool:
    return lower in NEGATIONS or lower.endswith(("n't", "n’t"))


def of_title(sentence: str, match: re.Match[str], initial: bool) -> bool:
    """Whether a negation is part of a name, such as "Never Cry Wolf"."""
    if not match[0][0].isupper() or (match[0].isupper() and len(match[0]) > 1):
        return False
    return not initial or re.match(r",? [A-Z]", sentence[match.end() :]) is not None


def shared_weights(tokens: list[Token]) -> list[Token]:
    """A name of three words weighs as much as one of one."""
    lengths = Counter(token.run for token in tokens if token.run >= 0)
    return [
        Token(**(vars(token) | {"weight": token.weight / lengths[token.run]})) if token.run >= 0 else token
        for token in tokens
    ]
