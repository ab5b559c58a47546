"""Names in a text, found without a model: capitalised spans, quoted titles, dates and numbers, identifiers of code.

Scripts without capitals give what is quoted, katakana, and pieces of Chinese text that are repeated.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


def _class(*categories: str) -> str:
    """The characters of some Unicode categories up to where scripts with capitals end, as a class of a pattern."""
    found = [number for number in range(0x41, 0x2E00) if unicodedata.category(chr(number)) in categories]
    ranges: list[list[int]] = []
    for number in found:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return "".join(f"\\u{low:04x}-\\u{high:04x}" for low, high in ranges)


UPPER = _class("Lu", "Lt")
MONTH = (
    "(?:January|February|March|April|May|June|July|August|September|October|November|December|"
    "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)"
)
DATE = (
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)?\s{MONTH}\.?,?\s\d{{3,4}}|{MONTH}\.?\s\d{{1,2}}(?:st|nd|rd|th)?,?\s\d{{4}}|"
    rf"{MONTH}\.?\s\d{{4}}|\d{{4}}-\d\d-\d\d)"
)
CAPITALISED = (
    rf"(?:(?:[{UPPER}]\.\s?)+(?=[{UPPER}])|(?:St|Dr|Mr|Mrs|Ms|Mt|Sr|Jr|Ft)\.|[{UPPER}][\w'’]*(?:[-–./&+][\w'’]+)*\+*)"
)
# Words inside names that are not capitalised, in the languages that have most of them.
JOINING = (
    r"(?:of\sthe|of|the|for|de\sla|de\slos|de|la|le|les|du|des|del|della|di|da|do|dos|das|von\sder|von|van\sder|van|den|der|"
    r"zu|zur|und|und\sder|y|e|et|al|bin|ibn|ap|af|av|och|og|in\sthe|on\sthe|at\sthe|and\sthe|to\sthe|&|’n’)"
)
NAME = rf"{CAPITALISED}(?:\s(?:{JOINING}\s)?(?:{CAPITALISED}|\d+(?:st|nd|rd|th)?\b|(?<=[{UPPER}]\s)[IVX]+\b))*"
QUOTED = r"[\"“«](?P<quoted>[^\"“”«»\n]{2,60})[\"”»]|[「『《〈](?P<bracketed>[^「」『』《》〈〉\n]{1,40})[」』》〉]"
CODE = r"`(?P<code>[^`\n]{2,60})`|(?P<identifier>\b[a-z_]\w*(?:\.\w+)+\b(?:\(\))?|\b[a-z]\w*_\w+\b(?:\(\))?)"
SCANNER = re.compile(
    rf"{QUOTED}|{CODE}|(?P<date>{DATE})|(?P<name>(?<!\w){NAME})|(?P<number>(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w))"
    r"|(?P<kana>[\u30a1-\u30fa\u30fc]{3,}(?:・[\u30a1-\u30fa\u30fc]+)*)|(?P<end>[.!?](?=[\s\"”)\]]|$)|[。！？]|\n\s*\n)"
)
HAN = re.compile(r"[\u3400-\u9fff]{2,}")
POSSESSIVE = re.compile(r"['’]s?$")
SPACES = re.compile(r"\s+")
HYPHENS = re.compile(r"\s*[-‐‑–—]\s*")
NOT_OF_NAMES = re.compile(r"[\"“”«»()\[\],.:;!?*]|\u0301")
MARKS = re.compile("[\u0300-\u036f]")

# Words that begin sentences with a capital and name nothing. Pronouns among them stand for what a text is about.
_PRONOUNS = "he she it they his her its their him them this these"
_FUNCTION_WORDS = """
a about above after afterwards again against all almost along already also although always am among an and another
any anyone anything are as at away back be because been before being below between both but by can cannot could did
do does doing done down due during each early either else even ever every everyone everything except few first
finally following for from further generally given had has have having hence here how however i if in indeed instead
into is just last later like many may maybe me might more moreover most much must my near neither never nevertheless
next no nobody none nor not note nothing now of off often on once one only onto or other others our out over own per
perhaps previously rather same second see several shall should similarly since so some someone something sometimes
soon still subsequently such than that the then there therefore third those though three through throughout thus to
today together too toward towards two under unless unlike until up upon us use using usually very was we well were
what when whenever where whereas whether which while who whom whose why will with within without would yes yet you
your der die das ein eine und ist war le la les un une des est el los las una es il lo
"""
PRONOUNS = frozenset(_PRONOUNS.split())
FUNCTION_WORDS = PRONOUNS | frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True)
class Mention:
    text: str
    start: int
    end: int
    kind: str  # name, quoted, code, date, number, term, or end (of a sentence)


def scan(text: str) -> Iterator[Mention]:
    """Mentions in order, and where sentences end."""
    for found in SCANNER.finditer(text):
        kind = found.lastgroup or "name"
        start, end = found.span(kind)
        if kind == "name":
            yield from _trimmed(found[0], start)
        elif kind in ("quoted", "bracketed"):
            yield Mention(found[kind].strip(" ,."), start, end, "quoted")
        elif kind in ("code", "identifier"):
            yield Mention(found[kind].removesuffix("()"), start, end, "code")
        else:
            yield Mention(found[kind], start, end, "name" if kind == "kana" else kind)


def _trimmed(span: str, start: int) -> Iterator[Mention]:
    """A capitalised span without the words at its ends that name nothing: "In July" and "The" are not names."""
    words = span.split(" ") if " " in span else [span]
    while words and words[0].lower() in FUNCTION_WORDS:
        if len(words) > 1 and words[0] == "The" and words[1][:1].isupper() and len(words) > 2:
            break  # "The Daily Stormer": normalisation drops the article
        start += len(words[0]) + 1
        words = words[1:]
    while words and words[-1] in FUNCTION_WORDS:
        words = words[:-1]
    text = " ".join(words)
    end = start + len(text)
    text = POSSESSIVE.sub("", text).rstrip(".") if not re.search(r"(?:\b\w\.|Jr\.|Sr\.)$", text) else text
    if len(text) > 1 and not text.isdigit():
        yield Mention(text, start, end, "name")


def han_terms(text: str, most: int = 12) -> list[str]:
    """Pieces of Chinese text of two to four characters that come up again, the longest of those that overlap."""
    counts: Counter[str] = Counter()
    for run in HAN.findall(text):
        for size in (4, 3, 2):
            counts.update(run[at : at + size] for at in range(len(run) - size + 1))
    kept: list[str] = []
    for term, count in sorted(counts.items(), key=lambda pair: (-pair[1] * len(pair[0]), pair[0])):
        if count > 1 and not any(term in other for other in kept):
            kept.append(term)
        if len(kept) == most:
            break
    return kept


def parts(name: str) -> list[str]:
    """Names within a name: "University of Göttingen" names Göttingen too."""
    words = name.split(" ")
    for at in range(len(words) - 2, 0, -1):
        if words[at] in ("of", "de", "von", "in", "at", "for") and words[at + 1][:1].isupper():
            return [" ".join(words[at + 1 :])]
    return []


def key(name: str) -> str:
    """What two spellings of one name have in common."""
    text = MARKS.sub("", unicodedata.normalize("NFKD", name)).casefold() if not name.isascii() else name.lower()
    text = HYPHENS.sub(" ", NOT_OF_NAMES.sub(" ", text)).replace("’", "'")
    words = [word.removesuffix("'s").strip("'") for word in text.split()]
    if len(words) > 1 and words[0] in ("the", "a", "an"):
        words = words[1:]
    return " ".join(words)


def without_parentheses(title: str) -> str:
    """Of "Lilu (mythology)", "Lilu"."""
    return re.sub(r"\s*\([^()]*\)\s*$", "", title).strip()
