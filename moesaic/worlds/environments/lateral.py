"""Lateral thinking: what lies behind a strange story is found by yes/no questions (AgentBench's puzzles).

    moesaic evaluate DIR --suite agents environments=lateral

A story has four hidden parts: who, where, with what, and why. Questions are answered by rules from what the story
holds, and by no other model: a question is what it mentions, a part by its name or by what can be said of it ("Is it a
place on the water?"). The solution is judged the same way: the share of hidden parts that it names.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World

# Every part of a story: what it may be, and what can be said of it.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "who": {
        "surgeon": ("indoors worker", "learned", "careful"),
        "librarian": ("indoors worker", "learned", "quiet"),
        "clockmaker": ("indoors worker", "craftsman", "careful"),
        "baker": ("indoors worker", "craftsman", "early riser"),
        "sailor": ("traveller", "strong"),
        "pilot": ("traveller", "learned", "careful"),
        "postman": ("traveller", "early riser"),
        "diver": ("strong", "careful"),
        "shepherd": ("quiet", "early riser"),
        "farmer": ("strong", "early riser"),
    },
    "where": {
        "lighthouse": ("high", "on the water", "lonely"),
        "ferry": ("on the water", "moving", "crowded"),
        "submarine": ("on the water", "moving", "lonely"),
        "tower": ("high", "old"),
        "night train": ("moving", "crowded"),
        "balloon": ("moving", "high"),
        "theatre": ("crowded", "old"),
        "museum": ("old",),
        "cabin": ("lonely", "cold"),
        "mountain pass": ("high", "cold"),
    },
    "thing": {
        "umbrella": ("wooden", "long"),
        "violin": ("wooden", "precious"),
        "ladder": ("wooden", "long", "heavy"),
        "chest": ("wooden", "heavy"),
        "coin": ("metal", "precious", "small"),
        "key": ("metal", "small"),
        "anchor": ("metal", "heavy"),
        "sword": ("metal", "long"),
        "letter": ("small", "paper"),
        "map": ("paper", "precious"),
    },
    "reason": {
        "revenge": ("bad", "about another person"),
        "jealousy": ("bad", "about another person", "felt suddenly"),
        "greed": ("bad", "about money"),
        "debt": ("about money", "a duty"),
        "reward": ("about money",),
        "promise": ("about another person", "a duty"),
        "rescue": ("about another person", "felt suddenly"),
        "mistake": ("felt suddenly", "regretted"),
        "homesickness": ("regretted",),
        "order": ("a duty",),
    },
}
STRANGE = (
    "One night every clock in the street was stopped at the same minute",
    "A window was found open, and nothing was missing but the dust",
    "For a whole year nobody spoke of the empty chair",
    "The dog did not bark, and in the morning it was wet",
    "A song was heard that nobody had sung for fifty years",
)
NEGATIONS = re.compile(r"\b(?:not|never|no|nobody|nothing|neither|without)\b|n't\b")

RULES = """A riddle. You hear the end of a story, and find out what lies behind it: who did it, where, with which \
thing, and for what reason.
{known}
Your actions:
ask QUESTION (one that can be answered with yes or no, about one part of the story)
solve WHO, WHERE, THING, REASON (once, when you know)
{form}
For example: Action: ask Was it a {example}?
The story: {story}"""


class Riddle(Simulation):
    def __init__(self, draw: random.Random) -> None:
        self.hidden = {part: draw.choice(sorted(values)) for part, values in PARTS.items()}
        clues = {part: draw.choice(PARTS[part][self.hidden[part]]) for part in ("who", "where")}
        self.story = (
            f"{draw.choice(STRANGE)}. Somebody of whom people say: {clues['who']}. A place that is {clues['where']}."
        )
        self.example = draw.choice(sorted(set(PARTS["who"]) - {self.hidden["who"]}))

    def open(self) -> str:
        known = "\n".join(f"{part}: {_listed(values)}" for part, values in PARTS.items())
        return RULES.format(known=known, form=FORM, example=self.example, story=self.story)

    def act(self, action: str) -> str | Finished:
        verb, _, said = action.partition(" ")
        verb, said = verb.casefold().rstrip(":"), said.casefold()
        if verb == "ask" and said.strip():
            return self._answer(said)
        if verb == "solve" and said.strip():
            named = [self._values(part, said) for part in PARTS]
            # Who names everything knows nothing.
            right = sum(values == {self.hidden[part]} for part, values in zip(PARTS, named, strict=True))
            return Finished(right / len(PARTS), f"{right} of {len(PARTS)} parts are right.")
        raise Invalid("That is no action here. Actions: ask QUESTION, solve WHO, WHERE, THING, REASON.")

    def _answer(self, question: str) -> str:
        judged = []
        for part, value in self.hidden.items():
            judged += [value == named for named in self._values(part, question)]
            tags = {tag for tags in PARTS[part].values() for tag in tags if _mentions(question, tag)}
            judged += [tag in PARTS[part][value] for tag in tags]
        if not judged:
            return "That does not matter."
        yes = all(judged) if not re.search(r"\bor\b", question) else any(judged)
        if NEGATIONS.search(re.sub("|".join(map(re.escape, sorted(_all_tags()))), "", question)):
            yes = not yes
        return "Yes." if yes else "No."

    @staticmethod
    def _values(part: str, text: str) -> set[str]:
        return {value for value in PARTS[part] if _mentions(text, value)}


def _listed(values: dict[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{value} ({', '.join(tags)})" for value, tags in values.items())


def _mentions(text: str, words: str) -> bool:
    return re.search(rf"\b{re.escape(words)}s?\b", text) is not None


def _all_tags() -> set[str]:
    return {tag for values in PARTS.values() for tags in values.values() for tag in tags}


@dataclass(frozen=True)
class Lateral(World):
    turns: int = 25

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Riddle(draw)
