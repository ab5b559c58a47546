"""Questions over long made-up texts, of the kinds of RULER (What's the Real Context Size of Your Language Models?).

needle        one sentence of many says a number
multikey      several sentences say numbers of different things, and one is asked for
multivalue    several sentences say numbers of the same thing, and all are asked for
multiquery    several sentences say numbers of different things, and two are asked for
tracking      variables are given values of other variables; which have a certain value?
aggregation   which words are the most common in a list?
fewshot       words with numbers by what they name; which number does a new word get?
qa            a sentence in other words than the question's says where somebody lives

Everything is drawn from a seed: the same questions each time, for any model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

WORDS = {
    "adjective": "amber ancient bitter brave bright broken calm clever cold copper crimson curious dark distant early "
    "empty faithful foggy gentle golden grey happy heavy hidden hollow honest humble icy idle ivory jolly kind late "
    "little lonely loud lucky marble misty modest narrow noble northern old patient plain polite proud purple quick "
    "quiet rapid rare rough royal rusty sharp shy silent silver simple slow smooth soft solid southern steady stormy "
    "strange sudden sunny tall tender thin tidy tiny velvet violet warm western wide wild wise wooden young",
    "noun": "anchor apron arrow barrel basket bell bench blanket boat book bottle bridge broom bucket button candle "
    "canoe carpet castle chair clock coin compass cradle cup curtain desk door drum engine feather fence flag flute "
    "fork garden gate glove hammer harbour helmet hill house island jacket kettle key kite ladder lake lamp lantern "
    "letter library lock map market meadow mill mirror mountain needle oven painting pencil pillow plate pocket pond "
    "rope ring river road roof saddle school shovel spoon stable stone table tower train tunnel umbrella valley "
    "village violin wagon wall well wheel window",
    "verb": "admired borrowed carried described drew followed found forgot kept left lost noticed passed repaired",
}
PHRASES = {
    "place": "behind the mill|near the harbour|under the old bridge|beside the road|at the market|by the lake",
    "when": "In the morning|After lunch|Late at night|Last winter|On Sunday|Before the storm|A year ago",
}
PEOPLE = [
    "Alice",
    "Boris",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Henry",
    "Irene",
    "Jacob",
    "Karen",
    "Louis",
    "Maria",
    "Nora",
    "Oscar",
    "Paula",
    "Simon",
]
TOWNS = [
    "Athens",
    "Berlin",
    "Cairo",
    "Dublin",
    "Florence",
    "Geneva",
    "Hamburg",
    "Lisbon",
    "London",
    "Madrid",
    "Naples",
    "Oslo",
    "Paris",
    "Rome",
    "Vienna",
]
ADJECTIVES, NOUNS, VERBS = (words.split() for words in WORDS.values())
PLACES, WHEN = (phrases.split("|") for phrases in PHRASES.values())
SORTS = {
    "animal": "badger bear camel cat cow deer dog donkey fox frog goat horse lion mouse otter pig rabbit sheep wolf",
    "fruit": "apple apricot banana cherry fig grape lemon lime mango melon orange peach pear plum raspberry strawberry",
    "clothing": "belt boots cap cardigan coat dress gloves hat jeans scarf shirt shoes skirt socks sweater trousers",
    "vehicle": "aeroplane bicycle bus car ferry helicopter lorry motorbike scooter ship taxi tractor tram truck van",
}


@dataclass(frozen=True)
class Question:
    kind: str
    text: str  # what is read
    asked: str
    opening: str  # of the answer, which goes on from here
    answers: tuple[str, ...]
    first: bool = False  # whether the answer must be the first word


def needle(draw: random.Random, size: int, keys: int = 1) -> Question:
    names = [f"{adjective} {noun}" for adjective, noun in zip(draw.sample(ADJECTIVES, keys), draw.sample(NOUNS, keys))]
    numbers = [str(draw.randrange(1000, 10_000)) for _ in names]
    lines = _sentences(draw, size)
    for name, number in zip(names, numbers):
        lines.insert(draw.randrange(len(lines) + 1), f"The secret number of the {name} is {number}.")
    opening = f"The secret number of the {names[0]} is"
    kind = "needle" if keys == 1 else "multikey"
    return Question(kind, " ".join(lines), f"What is the secret number of the {names[0]}?", opening, (numbers[0],))


def multikey(draw: random.Random, size: int) -> Question:
    return needle(draw, size, keys=6)


def multivalue(draw: random.Random, size: int) -> Question:
    name = f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"
    numbers = [str(number) for number in draw.sample(range(1000, 10_000), 3)]
    lines = _sentences(draw, size)
    for number in numbers:
        lines.insert(draw.randrange(len(lines) + 1), f"One of the secret numbers of the {name} is {number}.")
    asked = f"What are the three secret numbers of the {name}?"
    opening = f"The secret numbers of the {name} are"
    return Question("multivalue", " ".join(lines), asked, opening, tuple(numbers))


def multiquery(draw: random.Random, size: int) -> Question:
    names = [f"{adjective} {noun}" for adjective, noun in zip(draw.sample(ADJECTIVES, 4), draw.sample(NOUNS, 4))]
    numbers = [str(number) for number in draw.sample(range(1000, 10_000), len(names))]
    lines = _sentences(draw, size)
    for name, number in zip(names, numbers):
        lines.insert(draw.randrange(len(lines) + 1), f"The secret number of the {name} is {number}.")
    asked = f"What are the secret numbers of the {names[0]} and of the {names[1]}?"
    opening = f"The secret numbers of the {names[0]} and of the {names[1]} are"
    return Question("multiquery", " ".join(lines), asked, opening, tuple(numbers[:2]))


def qa(draw: random.Random, size: int) -> Question:
    people, towns = draw.sample(PEOPLE, 6), draw.sample(TOWNS, 6)
    lines = _sentences(draw, size)
    for person, town in zip(people, towns):
        lines.insert(draw.randrange(len(lines) + 1), f"{person} has had a small house in {town} for many years.")
    asked = f"In which town does {people[0]} live?"
    return Question("qa", " ".join(lines), asked, f"{people[0]} lives in", (towns[0],), first=True)


def tracking(draw: random.Random, size: int) -> Question:
    names = draw.sample([f"{a}{b}{a}" for a in "ABCDEFGHJKLM" for b in "NPQRSTUVWXYZ"], 6)
    values = [str(draw.randrange(1000, 10_000)) for _ in range(2)]
    chains = [
        [f"VAR {own[0]} = {value}."] + [f"VAR {two} = VAR {one}." for one, two in pairwise(own)]
        for own, value in zip((names[:3], names[3:]), values)
    ]
    lines = _sentences(draw, size)
    places = [sorted(draw.randrange(len(lines) + 1) for _ in chain) for chain in chains]
    inserted = sorted(
        (
            (place, order, line)
            for own, chain in zip(places, chains)
            for order, (place, line) in enumerate(zip(own, chain))
        ),
        key=lambda entry: entry[:2],
        reverse=True,
    )
    for place, _, line in inserted:  # from the back, so that places stay true
        lines.insert(place, line)
    asked = f"Which variables have the value {values[0]}? Name all three."
    return Question(
        "tracking", " ".join(lines), asked, f"The variables with the value {values[0]} are", tuple(names[:3])
    )


def aggregation(draw: random.Random, size: int) -> Question:
    total = max(size * 8, 30)  # a sentence is about eight words
    common, rare = draw.sample(NOUNS, 3), draw.sample(ADJECTIVES, len(ADJECTIVES))
    each = total // 6
    words = common * each + [rare[number % len(rare)] for number in range(total - 3 * each)]
    draw.shuffle(words)
    text = " ".join(words)
    return Question(
        "aggregation",
        text,
        "What are the three most common words in this list?",
        "The most common words are",
        tuple(common),
    )


def fewshot(draw: random.Random, size: int) -> Question:
    labels = {sort: str(draw.randrange(1000, 10_000)) for sort in SORTS}
    words = {sort: draw.sample(own.split(), len(own.split())) for sort, own in SORTS.items()}
    wanted = draw.choice(list(SORTS))
    unseen = words[wanted].pop()
    lines = []
    for number in range(max(8, size * 2)):
        sort = list(SORTS)[number % len(SORTS)]
        lines.append(f"{draw.choice(words[sort])}: {labels[sort]}")
    draw.shuffle(lines)
    # The answer goes on where the examples end, which a small model understands better than a question.
    opening = "\n".join([*lines[-3:], f"{unseen}:"])
    asked = f"Go on with {unseen}: words for the same sort of thing have the same number."
    return Question("fewshot", "\n".join(lines[:-3]), asked, opening, (labels[wanted],), first=True)


KINDS: dict[str, Callable[[random.Random, int], Question]] = {
    "needle": needle,
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
    "tracking": tracking,
    "aggregation": aggregation,
    "fewshot": fewshot,
    "qa": qa,
}


def question(kind: str, length: int, tokenizer: Tokenizer, seed: int, number: int) -> tuple[Question, list[int]]:
    """The question of a kind with this number, as long as fits in `length` tokens, and its prompt."""
    low, high, found = 1, max(2, length // 4), None
    while low <= high:
        size = (low + high) // 2
        made = KINDS[kind](random.Random(f"{seed} {kind} {number}"), size)
        tokens = prompt(made, tokenizer)
        if len(tokens) <= length:
            low, found = size + 1, (made, tokens)
        else:
            high = size - 1
    if found is None:
        raise UserError("length", f"{length} tokens hold no question of the kind {kind}", "Take more.")
    return found


def prompt(made: Question, tokenizer: Tokenizer) -> list[int]:
    """As a chat where the model knows chats; with the beginning of the answer."""
    content = f"Read this text and answer the question after it.\n\n{made.text}\n\n{made.asked}"
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{content}\nAnswer: {made.opening}")
    return tokenizer.encode(tokenizer.chat([{"role": "user", "content": content}]) + made.opening, special=False)


def score(made: Question, text: str) -> float:
    """The share of what was to be named that is named."""
    words = re.findall(r"\w+", text.lower())
    counted = words[:1] if made.first else words
    return sum(answer.lower() in counted for answer in made.answers) / len(made.answers)


def _sentences(draw: random.Random, count: int) -> list[str]:
    return [
        f"{draw.choice(WHEN)} the {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {draw.choice(PLACES)} was the one "
        f"that somebody {draw.choice(VERBS)}."
        for _ in range(count)
    ]
