"""Multi-hop worlds with known answers: invented people, places, companies and books, documents about them, and
questions whose answers have to be put together from several documents.

    made = world(7, people=12, hops=(1, 2, 3))
    made.documents                        # [(title, text), ...]: one for each thing, and idle ones
    made.triples                          # [("Tavo Belir", "birthplace", "Morva"), ...]; dates as 1957-03-14
    made.questions[0].text, .answer, .supporting, .program

    world(7, people=6, phrasings=1, kinds=("bridge",), years_only=True)       # small: one way to say a thing
    world(7, split="test", people=60, phrasings=4, distractors=40)            # hard; shares no name with split="train"

A world depends on nothing but its seed and options. `program` is the question in the intermediate language of
`know/language` (GraphQ IR); executed over the triples it gives the answer.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from moesaic.data.tasks.multihop_facts import Facts, Split, Triple, make_facts
from moesaic.data.tasks.multihop_questions import COMPARISONS, DIFFERENCES, GROUPS, INTERSECTIONS, SAME
from moesaic.data.tasks.multihop_texts import IDLE, OPENINGS, RELATIONS

UNKNOWN = "unknown"
KINDS = ("bridge", "comparison", "intersection", "count", "arithmetic", "superlative", "yes_no", "unanswerable")
# The fewest facts that a question of a kind needs; a count needs more documents where more things are counted.
FEWEST = {"bridge": 1, "unanswerable": 1, "count": 1} | dict.fromkeys(
    ("comparison", "intersection", "arithmetic", "superlative", "yes_no"), 2
)
TRIES = 40  # to find a question of a kind in a world that may have none


@dataclass(frozen=True)
class Question:
    text: str
    answer: str
    aliases: tuple[str, ...]  # other right ways to write the answer
    kind: str
    hops: int  # facts in a row, or side by side, that it needs
    supporting: tuple[str, ...]  # titles of the documents with these facts, in the order of the hops
    program: str


@dataclass(frozen=True)
class World:
    documents: tuple[tuple[str, str], ...]
    triples: tuple[Triple, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Described:
    """A thing as a question speaks of it: by its name, or by how it is reached from another."""

    thing: str
    text: str
    program: str
    path: tuple[str, ...]  # documents on the way, not its own


def world(
    seed: int,
    *,
    split: Split = "train",
    people: int = 12,
    hops: Sequence[int] = (1, 2, 3),
    kinds: Sequence[str] = KINDS,
    questions: int = 4,
    phrasings: int = 4,
    distractors: int = 6,
    years_only: bool = False,
    relations: Sequence[str] = (),
    short_names: bool = False,
) -> World:
    """`questions` of every kind and number of hops, where the world has so many; `phrasings` ways (1 to 4) to tell and
    ask a fact; `distractors` documents more, half of them about namesakes; `years_only`: years of birth, not dates;
    `relations`: facts of these only, all where none is named; `short_names`: one word of four letters each."""
    random = Random(f"multihop {split} {seed}")
    facts = make_facts(random, split, people, distractors // 2, years_only, relations, short_names)
    documents = list(_documents(random, facts, phrasings, distractors - distractors // 2))
    asker = Asker(random, facts, phrasings, years_only)
    asked: dict[str, Question] = {}
    for kind in kinds:
        for length in hops:
            if length >= FEWEST[kind]:
                enough = len(asked) + questions
                for _ in range(TRIES * questions):
                    question = asker.ask(kind, length)
                    if question is not None:
                        asked.setdefault(question.text, question)
                    if len(asked) == enough:
                        break
    return World(tuple(documents), tuple(facts.triples), tuple(asked.values()))


def _documents(random: Random, facts: Facts, phrasings: int, idle: int) -> Iterator[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    for kind, names in facts.things.items():
        for name in names if kind in OPENINGS else ():
            told = [(relation, value) for (subject, relation), value in facts.objects.items() if subject == name]
            random.shuffle(told)
            sentences = [_some(random, OPENINGS[kind], phrasings).format(s=name)]
            for relation, value in told:
                form = _some(random, RELATIONS[relation].sentences, phrasings)
                sentences.append(form.format(s=name, o=spoken(value)))
            made.append((name, " ".join(sentences)))
    everybody = [name for kind in ("person", "city", "company") for name in facts.things[kind]]
    for number in range(idle):
        a, b = random.sample(everybody, 2)
        made.append((f"Notes, part {number + 1}", " ".join(random.sample(IDLE, 4)).format(a=a, b=b)))
    random.shuffle(made)
    yield from made


def _some(random: Random, forms: Sequence[str], phrasings: int) -> str:
    return random.choice(forms[: max(1, phrasings)])


def spoken(value: str) -> str:
    """A date as in `14 March 1957`; anything else as it is."""
    date = _date(value)
    return value if date is None else f"{date.day} {date:%B} {date.year}"


def _date(value: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(value) if len(value) == 10 else None
    except ValueError:
        return None


def aliases(value: str) -> tuple[str, ...]:
    date = _date(value)
    if date is not None:
        return (value, f"{date:%B} {date.day}, {date.year}")
    return (f"{int(value):,}",) if value.isdecimal() and len(value) > 3 else ()


class Asker:
    """Makes questions about facts; each method gives None where what it drew makes no question."""

    def __init__(self, random: Random, facts: Facts, phrasings: int, years_only: bool) -> None:
        self.random, self.facts, self.phrasings = random, facts, phrasings
        # A year is a number: the language says which of several numbers is the smallest, and which date the earliest.
        self.words = {"earliest": "smallest", "latest": "largest"} if years_only else {}
        self.kinds: dict[str, Callable[[int], Question | None]] = {
            "bridge": self.bridge,
            "comparison": self.comparison,
            "intersection": self.intersection,
            "count": self.count,
            "arithmetic": self.arithmetic,
            "superlative": self.superlative,
            "yes_no": self.yes_no,
            "unanswerable": self.unanswerable,
        }

    def ask(self, kind: str, hops: int) -> Question | None:
        return self.kinds[kind](hops)

    def some(self, forms: Sequence[str]) -> str:
        return _some(self.random, forms, self.phrasings)

    def thing(self, kind: str) -> str:
        return self.random.choice([name for name in self.facts.things[kind] if name not in self.facts.aside])

    def described(self, thing: str, hops: int, seen: tuple[str, ...] = ()) -> Described | None:
        """A thing by a way of so many facts that leads to it and never comes by the same place twice."""
        if hops == 0:
            return Described(thing, thing, f"[{thing}]", ())
        ways = [
            (subject, relation)
            for (relation, found), subjects in self.facts.subjects.items()
            for subject in subjects
            if found == thing and subject not in self.facts.aside and subject not in (*seen, thing)
        ]
        if not ways:
            return None
        subject, relation = self.random.choice(ways)
        before = self.described(subject, hops - 1, (*seen, thing))
        if before is None:
            return None
        text = self.some(RELATIONS[relation].nouns).format(s=before.text)
        return Described(thing, text, f"<{relation}> of {before.program}", (*before.path, subject))

    def pair(self, kind: str, hops: int, other_kind: str | None = None) -> tuple[Described, Described] | None:
        """Two different things, reached by `hops` facts together."""
        first, second = self.thing(kind), self.thing(other_kind or kind)
        share = self.random.randint(0, hops)
        a, b = self.described(first, share), self.described(second, hops - share)
        return (a, b) if a and b and first != second else None

    def made(self, kind: str, hops: int, text: str, answer: str, supporting: Sequence[str], program: str) -> Question:
        text = text[0].upper() + text[1:]
        titles = tuple(dict.fromkeys(supporting))
        return Question(text, spoken(answer), aliases(answer), kind, hops, titles, program)

    def bridge(self, hops: int) -> Question | None:
        subject, relation, found = self.random.choice(self.facts.triples)
        about = None if subject in self.facts.aside else self.described(subject, hops - 1)
        if about is None or found in about.text:  # an answer that the question names
            return None
        text = self.some(RELATIONS[relation].questions).format(s=about.text)
        return self.made(
            "bridge", hops, text, found, (*about.path, subject), f"what is <{relation}> of {about.program}"
        )

    def unanswerable(self, hops: int) -> Question | None:
        relation = self.random.choice([name for name, known in RELATIONS.items() if known.missing])
        subject = self.thing(RELATIONS[relation].subject)
        about = self.described(subject, hops - 1)
        if about is None or (subject, relation) in self.facts.objects:
            return None
        text = self.some(RELATIONS[relation].questions).format(s=about.text)
        program = f"what is <{relation}> of {about.program}"
        made = self.made("unanswerable", hops, text, UNKNOWN, (*about.path, subject), program)
        return replace(made, aliases=("not known", "not stated", "unanswerable", "no answer"))

    def comparison(self, hops: int) -> Question | None:
        kind = self.random.choice(list(COMPARISONS))
        relation, extreme, forms = self.random.choice(COMPARISONS[kind])
        pair = self.pair(kind, hops - 2)
        if pair is None:
            return None
        a, b = pair
        best = self.best([a.thing, b.thing], relation, extreme)
        if best is None:
            return None
        program = f"what is ( ( {a.program} or {b.program} ) with the {self.words.get(extreme, extreme)} <{relation}> )"
        text = self.some(forms).format(a=a.text, b=b.text)
        return self.made("comparison", hops, text, best, (*a.path, a.thing, *b.path, b.thing), program)

    def best(self, things: Sequence[str], relation: str, extreme: str) -> str | None:
        """The one with the extreme value, if all have a value and no two the same."""
        values = {thing: self.facts.objects.get((thing, relation)) for thing in things}
        if None in values.values() or len(set(values.values())) < len(things):
            return None
        order = sorted(things, key=lambda thing: number(str(values[thing])))
        return order[0] if extreme in ("smallest", "earliest") else order[-1]

    def group(self, hops: int) -> tuple[str, Described, list[str]] | None:
        """All that have the same object of a relation, and how that is spoken of."""
        relation = self.random.choice(list(GROUPS))
        found = self.thing(RELATIONS[relation].object)
        about, members = self.described(found, hops), self.facts.subjects.get((relation, found), [])
        return (relation, about, members) if about and members else None

    def count(self, hops: int) -> Question | None:
        group = self.group(hops - 1)
        if group is None:
            return None
        relation, about, members = group
        text = self.some(GROUPS[relation][0]).format(s=about.text)
        program = f"how many are those whose <{relation}> is {about.program}"
        return self.made("count", hops, text, str(len(members)), (*about.path, *members), program)

    def superlative(self, hops: int) -> Question | None:
        group = self.group(hops - 2)
        if group is None or len(group[2]) < 2 or not GROUPS[group[0]][1]:
            return None
        relation, about, members = group
        by, extreme, forms = self.random.choice(GROUPS[relation][1])
        best = self.best(members, by, extreme)
        if best is None:
            return None
        word = self.words.get(extreme, extreme)
        program = f"what is ( those whose <{relation}> is {about.program} with the {word} <{by}> )"
        text = self.some(forms).format(s=about.text)
        return self.made("superlative", hops, text, best, (*about.path, *members), program)

    def intersection(self, hops: int) -> Question | None:
        first, second, forms = self.random.choice(INTERSECTIONS)
        both = [name for name in self.facts.things[RELATIONS[first].subject] if name not in self.facts.aside]
        answer = self.random.choice(both)
        ends = [self.facts.objects.get((answer, relation)) for relation in (first, second)]
        if ends[0] is None or ends[1] is None:
            return None
        share = self.random.randint(0, hops - 2)
        a, b = self.described(ends[0], share, (answer,)), self.described(ends[1], hops - 2 - share, (answer,))
        same = set(self.facts.subjects[first, ends[0]]) & set(self.facts.subjects[second, ends[1]])
        if a is None or b is None or len(same) != 1 or answer in a.text + b.text:
            return None
        program = f"what is ( those whose <{first}> is {a.program} and those whose <{second}> is {b.program} )"
        text = self.some(forms).format(a=a.text, b=b.text)
        return self.made("intersection", hops, text, answer, (*a.path, *b.path, answer), program)

    def arithmetic(self, hops: int) -> Question | None:
        late, early, forms = self.random.choice(DIFFERENCES)
        pair = self.pair(RELATIONS[late].subject, hops - 2, RELATIONS[early].subject)
        if pair is None:
            return None
        a, b = pair
        years = [self.facts.objects.get(key) for key in ((a.thing, late), (b.thing, early))]
        if years[0] is None or years[1] is None or (between := int(years[0][:4]) - int(years[1][:4])) <= 0:
            return None
        program = f"compute ( the latest year <{late}> of {a.program} minus the latest year <{early}> of {b.program} )"
        text = self.some(forms).format(a=a.text, b=b.text)
        return self.made("arithmetic", hops, text, str(between), (*a.path, a.thing, *b.path, b.thing), program)

    def yes_no(self, hops: int) -> Question | None:
        relation, forms = self.random.choice(SAME)
        wanted = self.random.random() < 0.5  # as many yes as no
        pair = self.pair(RELATIONS[relation].subject, hops - 2)
        if pair is None:
            return None
        a, b = pair
        ends = [self.facts.objects.get((about.thing, relation)) for about in pair]
        if None in ends or (ends[0] == ends[1]) != wanted:
            return None
        program = f"is there any ( <{relation}> of {a.program} and <{relation}> of {b.program} )"
        text = self.some(forms).format(a=a.text, b=b.text)
        answer = "yes" if wanted else "no"
        return self.made("yes_no", hops, text, answer, (*a.path, a.thing, *b.path, b.thing), program)


def number(value: str) -> int:
    """What dates and numbers are compared by."""
    date = _date(value)
    return int(value) if date is None else date.toordinal()
