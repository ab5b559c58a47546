"""Statements about real passages of which it is known whether the passage supports them: true ones, and false ones.

Made with nothing that the checker itself uses, and with a list of synonyms that it does not have. Each kind is made at
most once of a document, so that the counts are of documents.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

TRUE = ("extractive", "reordered", "synonyms", "dropped", "merged", "pronoun")
FALSE = (
    *(
        "other passage",
        "other document",
        "number changed",
        "number of the passage",
        "name changed",
        "name of the passage",
    ),
    *("negated", "swapped"),
)
NOT_PROMISED = ("other relation",)  # reported, and outside of the totals

NAME = re.compile(r"\b[A-Z][\w'’-]+(?: (?:of |the |de |von )?[A-Z][\w'’-]+)*")
NUMBER = re.compile(r"\b\d{1,4}\b(?![,.]\d)")
AUXILIARY = re.compile(r"\b(is|was|are|were|has been|have been|had been|can|could|will|would|may|must)\b(?! not)")
PAST = re.compile(r"(?<=[a-z0-9)] )([a-z]{3,}ed)\b(?= (?!by\b))")
PRONOUN = re.compile(r"^(He|She|It|They)\b(?=\s)")
SYNONYMS = {
    "film": "movie", "movie": "film", "wrote": "penned", "written": "penned", "located": "situated",
    "situated": "located", "created": "made", "founded": "established", "established": "founded", "large": "big",
    "big": "large", "began": "started", "started": "began",
    "famous": "renowned", "known": "recognised", "received": "got", "became": "turned into",
    "many": "numerous", "several": "a number of", "near": "close to", "children": "kids", "company": "firm",
    "around": "about", "often": "frequently", "mainly": "chiefly", "primarily": "mainly", "used": "employed",
    "main": "principal", "major": "important", "including": "among them", "different": "distinct", "city": "town",
    "built": "constructed", "constructed": "built", "originally": "at first", "released": "issued", "won": "gained",
    "popular": "well-liked", "various": "diverse", "area": "region", "region": "area", "home": "residence",
    "appeared": "showed up", "produced": "made", "begin": "start", "ended": "finished", "died": "passed away",
    "usually": "as a rule", "consists": "is made up", "approximately": "roughly", "moved": "relocated",
    "killed": "slain", "author": "writer", "actor": "performer", "band": "group", "song": "track", "album": "record",
}  # fmt: skip
RELATIONS = {
    "born": "buried", "founded": "dissolved", "directed": "criticised", "written": "rejected", "wrote": "translated",
    "won": "lost", "released": "withdrawn", "married": "sued", "produced": "financed", "played": "watched",
    "located": "unknown", "built": "demolished", "joined": "left", "began": "ended", "increased": "fell",
    "died": "lived", "bought": "sold", "defeated": "trained", "published": "banned", "starring": "mocking",
}  # fmt: skip
LISTED = """
It He She They We The In On At A An This That These Those What When Where Who Which After Before During As For
From His Her Its Their There However Although While Since By With And But Also Both Some Many Most One Two
Three Each January February March April May June July August September October November December Monday
Tuesday Wednesday Thursday Friday Saturday Sunday According Level Twenty Originally"""
NO_NAMES = frozenset(LISTED.split())
EITHER_WAY = re.compile(
    r"\b(married|met|and|between|with|or|versus|against|known as|called|near|cousin|sister|brother)\b"
)


@dataclass(frozen=True)
class Passage:
    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def name(self) -> str:
        """The title as a text would say it."""
        return re.sub(r"\s*\(.*?\)$", "", self.title)


@dataclass(frozen=True)
class Planted:
    kind: str
    true: bool
    statement: str
    cited: Passage
    about: str  # the document by which halves are told apart


def read_sets(folder: Path) -> list[list[Passage]]:
    """The passages that were retrieved for each question of HotpotQA or MuSiQue, in their published forms."""
    sets = []
    for record in json.loads((folder / "qa_train.json").read_text(encoding="utf-8")):
        if "context" in record:
            found = [Passage(title, tuple(s.strip() for s in said if s.strip())) for title, said in record["context"]]
        else:
            found = [Passage(one["title"], tuple(split(one["paragraph_text"]))) for one in record["paragraphs"]]
        sets.append([passage for passage in found if passage.sentences])
    return sets


def read_wikitext(file: Path) -> list[list[Passage]]:
    """The paragraphs of each article of WikiText, with its spaces around marks taken back."""
    sets: list[list[Passage]] = []
    title = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if found := re.fullmatch(r" = ([^=]+) = ?", line):
            title = plain(found[1].strip())
            sets.append([])
        elif title and len(line.split()) > 40 and "<unk>" not in title:
            said = tuple(one for one in split(plain(line.strip())) if "<unk>" not in one)
            if said:
                sets[-1].append(Passage(f"{title} (paragraph {len(sets[-1]) + 1})", said))
    return [one for one in sets if len(one) > 1]


def plain(text: str) -> str:
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)'%]|'s\b|n't\b)", r"\1", re.sub(r"\( ", "(", text))
    return re.sub(r'" ([^"]*) "', r'"\1"', text)


def split(text: str) -> list[str]:
    """Roughly: sentences that were cut wrongly are not planted in."""
    return [one for one in re.split(r"(?<=[a-z0-9)\"'][.!?]) (?=[A-Z\"])", text.strip()) if one.strip()]


def usable(sentence: str) -> bool:
    words = sentence.split()
    return 6 <= len(words) <= 40 and sentence[-1] in ".!" and sentence[0].isupper() and sentence.count('"') % 2 == 0


def plants(sets: list[list[Passage]], seed: int = 0) -> list[Planted]:
    rng = random.Random(seed)
    made: list[Planted] = []
    seen: set[str] = set()
    everything = [passage for one in sets for passage in one]
    for one in sets:
        for passage in one:
            if passage.title in seen:
                continue
            seen.add(passage.title)
            made += of_passage(passage, [p for p in one if p.title != passage.title], everything, rng)
    return made


def of_passage(
    passage: Passage, others: list[Passage], everything: list[Passage], rng: random.Random
) -> Iterator[Planted]:
    usable_ones = [sentence for sentence in passage.sentences if usable(sentence)]
    if not usable_ones or not others:
        return
    for kind, make in MAKERS.items():
        for sentence in rng.sample(usable_ones, len(usable_ones)):
            statement = make(sentence, passage, others, rng)
            if statement is not None and statement != sentence:
                yield Planted(kind, kind in TRUE, statement, passage, passage.title)
                break
    sentence = rng.choice(usable_ones)
    yield Planted("extractive", True, sentence, passage, passage.title)
    named = [said for s in usable_ones if passage.name in (said := PRONOUN.sub(passage.name, s))]
    if named:
        statement = rng.choice(named)
        closest = max(others, key=lambda other: overlap(statement, other.text))
        # The same may stand in two documents; then it is no false citation.
        if statement not in closest.text and passage.name not in closest.text:
            yield Planted("other passage", False, statement, closest, passage.title)
        far = rng.choice(everything)
        if far.title != passage.title and passage.name not in far.text:
            yield Planted("other document", False, statement, far, passage.title)


def overlap(statement: str, text: str) -> float:
    words, there = set(re.findall(r"\w{3,}", statement.lower())), set(re.findall(r"\w{3,}", text.lower()))
    return len(words & there) / max(1, len(words))


Maker = Callable[[str, Passage, list[Passage], random.Random], "str | None"]


def pronoun(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    return PRONOUN.sub(passage.name, sentence) if PRONOUN.match(sentence) else None


def reordered(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    if found := re.fullmatch(r"((?:In|On|During|After|Before|Since|At) [^,]{3,40}), ([^,]+)\.", sentence):
        first, rest = found.groups()
        return f"{rest[0].upper()}{rest[1:]} {first[0].lower()}{first[1:]}."
    if found := re.fullmatch(
        r"([^,]{15,}[a-z]) ((?:in|on|during|since) (?:[A-Z][a-z]+ )?(?:\d{1,2}, )?\d{4})\.", sentence
    ):
        return f"{found[2][0].upper()}{found[2][1:]}, {lowered(found[1])}."
    if found := re.fullmatch(r"([^,]{15,}),? ((?:while|although|when|because|after|before) [^,]{10,})\.", sentence):
        return f"{found[2][0].upper()}{found[2][1:]}, {lowered(found[1])}."
    return None


def lowered(text: str) -> str:
    return text[0].lower() + text[1:] if re.match(r"(?:The|A|An|It|He|She|They|This|His|Her|Its)\b", text) else text


def synonyms(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    found = [word for word in re.findall(r"\b[a-z]+\b", sentence) if word in SYNONYMS]
    for word in rng.sample(found, min(2, len(found))):
        sentence = re.sub(rf"\b{word}\b", SYNONYMS[word], sentence, count=1)
    return sentence if found else None


def dropped(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    for pattern, left in (
        (r" \([^()]*\)", ""),
        (r"(?<=\w), (?:a|an|the|which|who) [^,]{5,60},(?= )", ""),
        (r",? (?:in|on|during) (?:[A-Z][a-z]+ )?(?:\d{1,2}, )?\d{4}(?=\.$)", ""),
        (r", (?:which|who|where|with|including|using|making|such as) .*(?=\.$)", ""),
        (r" (?:very|also|originally|often|mainly|mostly|usually|widely|currently|formerly)(?= )", ""),
    ):
        short = re.sub(pattern, left, sentence, count=1)
        if short != sentence and len(short.split()) >= 5:
            return short
    return None


def merged(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    place = passage.sentences.index(sentence)
    if place + 1 >= len(passage.sentences) or not usable(following := passage.sentences[place + 1]):
        return None
    if not re.match(r"(?:He|She|It|They|The|In|This)\b", following) or len(sentence.split()) > 25:
        return None
    following = PRONOUN.sub(passage.name, following) if rng.random() < 0.5 else following
    return f"{sentence[:-1]}, and {following if following.startswith(passage.name) else lowered(following)}"


def number_changed(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    if not (found := list(NUMBER.finditer(sentence))):
        return None
    one = rng.choice(found)
    value = int(one[0]) + rng.choice([-7, -3, -2, -1, 1, 2, 3, 7])
    new = str(abs(value))
    return None if re.search(rf"\b{new}\b", passage.text) else sentence[: one.start()] + new + sentence[one.end() :]


def number_of_passage(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    for one in rng.sample(found := list(NUMBER.finditer(sentence)), len(found)):
        there = {n for n in NUMBER.findall(passage.text.replace(sentence, "")) if len(n) == len(one[0])}
        if there := there - set(NUMBER.findall(sentence)):
            return sentence[: one.start()] + rng.choice(sorted(there)) + sentence[one.end() :]
    return None


def names_in(text: str) -> list[re.Match[str]]:
    """Not those that begin a sentence, where a capital says little."""
    return [
        one for one in NAME.finditer(text) if one.start() > 0 and text[one.start() - 2] not in '.!?"' and is_name(one)
    ]


def is_name(found: re.Match[str]) -> bool:
    return len(found[0]) > 3 and not NO_NAMES & set(found[0].split())


def name_changed(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    pool = {one[0] for other in others for said in other.sentences for one in names_in(said)}
    return with_name(sentence, passage, {name for name in pool if name not in passage.text}, rng)


def name_of_passage(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    pool = {one[0] for said in passage.sentences if said != sentence for one in names_in(said)}
    return with_name(sentence, passage, pool, rng)


def with_name(sentence: str, passage: Passage, pool: set[str], rng: random.Random) -> str | None:
    shared = set(re.findall(r"\w+", sentence)) | set(re.findall(r"\w+", passage.title))
    pool = {name for name in pool if not shared & set(re.findall(r"\w+", name))}
    found = names_in(sentence)
    if not pool or not found:
        return None
    one = rng.choice(found)
    return sentence[: one.start()] + rng.choice(sorted(pool)) + sentence[one.end() :]


def negated(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    if re.search(r"\b(is|was|are|were|did|does|do|has|had) not\b", sentence):
        return re.sub(r"\b(is|was|are|were|did|does|do|has|had) not\b", r"\1", sentence, count=1)
    if re.search(r"\b(?:not|never|no|without)\b|n't", sentence):
        return None
    if one := AUXILIARY.search(sentence):
        first = one[0].split()[0]
        return sentence[: one.start()] + first + " not" + one[0][len(first) :] + sentence[one.end() :]
    return PAST.sub(r"never \1", sentence, count=1) if PAST.search(sentence) else None


def swapped(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    verb = re.search(r"\b(?:was|is|were|are|has|had|[a-z]{3,}ed|wrote|won|led|held|built|made|took)\b", sentence)
    if not verb:
        return None
    before = [one for one in NAME.finditer(sentence) if one.end() < verb.start()]
    after = [one for one in NAME.finditer(sentence) if one.start() > verb.end()]
    if not before or not after or EITHER_WAY.search(sentence[before[0].end() : after[0].start()]):
        return None
    a, b = before[0], after[0]
    between = sentence[a.end() : b.start()]
    plain = re.search(r"\b[a-z]{4,}\b", between)  # a relation has a word
    if not is_name(a) or not is_name(b) or not (" " in a[0] or a[0] in passage.title):
        return None
    if not plain or a.start() > 4 or a[0] in b[0] or b[0] in a[0] or "(" in between:
        return None
    return sentence[: a.start()] + b[0] + between + a[0] + sentence[b.end() :]


def other_relation(sentence: str, passage: Passage, others: list[Passage], rng: random.Random) -> str | None:
    found = [word for word in re.findall(r"\b[a-z]+\b", sentence) if word in RELATIONS]
    return re.sub(rf"\b{found[0]}\b", RELATIONS[found[0]], sentence, count=1) if found else None


MAKERS: dict[str, Maker] = {
    "pronoun": pronoun, "reordered": reordered, "synonyms": synonyms, "dropped": dropped, "merged": merged,
    "number changed": number_changed, "number of the passage": number_of_passage, "name changed": name_changed,
    "name of the passage": name_of_passage, "negated": negated, "swapped": swapped, "other relation": other_relation,
}  # fmt: skip
