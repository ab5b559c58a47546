"""Agentic search as a nested decision process (RAG-Gym, Xiong et al.): outside, which query comes next, or which
answer; inside, the tokens it is written with. An episode holds the outer state, a question with the queries so far and
the passages they brought up, and scores every action by itself (process reward):

    sufficiency   a query brought up a document that the answer rests on, and that had not been seen
    utility       how far up that document stands: 1 / rank
    novelty       the share of its passages that had not been shown

each from 0 to 1, weighed. Where it is not known what an answer rests on, it is what holds the answer. A query that was
asked before scores 0, and so does a turn that is no action, which is told what is wrong with it. An answer scores what
it is worth (outcome reward): exact match, or F1, against every known form of the right one.

Passages are data. They are shown in a message of their own, and marks of chat templates in them are taken apart.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moesaic.know.answer.writers import MARKERS
from moesaic.know.chunk import Chunk, Hit, Retriever
from moesaic.serve.parsers import Message
from moesaic.worlds.environments import Episode, Step
from moesaic.worlds.search_forms import FORMS, LONGEST_QUERY, Query
from moesaic.worlds.text_actions import Invalid, Malformed
from moesaic.worlds.tools.search import Index, words

Outcome = Literal["exact", "f1"]
NOTHING = "(nothing was found)"
LAST = "This is the last turn: answer."


@dataclass(frozen=True)
class ProcessReward:
    """How much each part of a query's score counts."""

    sufficiency: float = 0.6
    utility: float = 0.2
    novelty: float = 0.2

    def __post_init__(self) -> None:
        weights = (self.sufficiency, self.utility, self.novelty)
        if not all(isinstance(w, int | float) and not isinstance(w, bool) and w >= 0 for w in weights):
            raise ValueError("weights of process are numbers from 0 on")
        if sum(weights) > 1.0 + 1e-9:
            raise ValueError("weights of process add up to 1 at most: a score is from 0 to 1")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ProcessReward:
        if unknown := set(options) - {"sufficiency", "utility", "novelty"}:
            raise ValueError(f"process has no {', '.join(sorted(unknown))}; it has sufficiency, utility and novelty")
        return cls(**options)

    def score(self, hits: Sequence[Hit], supports: Sequence[bool], shown: frozenset[str]) -> float:
        """Of a query by what it found, which of it the answer rests on, and the ids of chunks shown before."""
        if not hits:
            return 0.0
        new = [hit.chunk.id not in shown for hit in hits]
        gain = next((rank for rank, (hit, is_new) in enumerate(zip(supports, new), 1) if hit and is_new), 0)
        found = self.sufficiency + self.utility / gain if gain else 0.0
        return found + self.novelty * sum(new) / len(new)


@dataclass(frozen=True)
class Asked:
    """A question, every form of its right answer, and, where they are known, the titles of the documents that it rests
    on, in the order of the hops."""

    question: str
    answers: tuple[str, ...]
    supporting: tuple[str, ...] = ()

    def rests_on(self, chunk: Chunk) -> bool:
        if self.supporting:
            return chunk.title in self.supporting
        text = f" {' '.join(words(chunk.text))} "
        return any(f" {' '.join(words(answer))} " in text for answer in self.answers if words(answer))


@dataclass(frozen=True)
class Searched:
    query: str
    passages: tuple[str, ...]  # ids of chunks


@dataclass(frozen=True)
class SearchRules:
    """What an environment's options say of every episode."""

    turns: int
    passages: int = 2
    longest: int = 600  # characters of one passage that are shown
    mistakes: int = 3  # in a row, that end an episode
    form: str = "direct"
    outcome: Outcome = "exact"
    process: ProcessReward = ProcessReward()

    def __post_init__(self) -> None:
        if min(self.turns, self.passages, self.longest, self.mistakes) < 1:
            raise ValueError("a search needs at least one turn, one passage, one character of it and one mistake")
        if self.form not in FORMS:
            raise ValueError(f'form: there is no "{self.form}"; known: {", ".join(FORMS)}')


@dataclass
class Searching(Episode):
    """One question. Deterministic: the same turns bring up the same passages and scores."""

    asked: Asked
    retriever: Retriever
    rules: SearchRules
    history: list[Searched] = field(default_factory=list)
    turn: int = 0
    wrong: int = 0  # turns in a row that were no action

    @property
    def shown(self) -> frozenset[str]:
        return frozenset(id for searched in self.history for id in searched.passages)

    def step(self, said: Message) -> Step:
        self.turn += 1
        try:
            action = FORMS[self.rules.form].read(said)
        except (Malformed, Invalid) as error:
            self.wrong += 1
            invalid: Literal["format", "action"] = "format" if isinstance(error, Malformed) else "action"
            return Step(self._tell(str(error)), self.wrong >= self.rules.mistakes, score=0.0, invalid=invalid)
        self.wrong = 0
        if isinstance(action, Query):
            return self._search(action.text[:LONGEST_QUERY])
        worth = outcome(action.text, self.asked.answers, self.rules.outcome)
        return Step(done=True, score=worth, reward=worth)

    def _search(self, query: str) -> Step:
        hits = self.retriever.search(query, k=self.rules.passages)
        supports = [self.asked.rests_on(hit.chunk) for hit in hits]
        again = any(words(query) == words(before.query) for before in self.history)
        score = 0.0 if again else self.rules.process.score(hits, supports, self.shown)
        self.history.append(Searched(query, tuple(hit.chunk.id for hit in hits)))
        return Step(self._tell("\n".join(self._passage(hit.chunk) for hit in hits) or NOTHING), score=score)

    def _passage(self, chunk: Chunk) -> str:
        named = f"{chunk.title}: " if chunk.title and not chunk.text.startswith(chunk.title) else ""
        return f"{named}{as_data(chunk.text)}"[: self.rules.longest]

    def _tell(self, text: str) -> list[dict[str, str]]:
        role = "tool" if FORMS[self.rules.form].calls else "user"
        last = f"\n{LAST}" if self.turn + 1 == self.rules.turns else ""
        return [{"role": role, "content": text + last}]


def as_data(text: str) -> str:
    """Text in which a tokenizer finds no mark such as <|im_end|>."""
    return MARKERS.sub(lambda found: f"{found[0]} ", text)


def outcome(said: str, answers: Sequence[str], by: Outcome) -> float:
    """What an answer is worth against the nearest of the right ones."""
    measure = _exact if by == "exact" else _f1
    return max((measure(normal(said), normal(answer)) for answer in answers), default=0.0)


def normal(text: str) -> list[str]:
    """Words as HotpotQA and SQuAD compare them: without case, punctuation and articles."""
    text = "".join(
        letter
        for letter in unicodedata.normalize("NFKC", text).casefold()
        if not unicodedata.category(letter).startswith("P")
    )
    return [word for word in text.split() if word not in ("a", "an", "the")]


def _exact(said: list[str], truth: list[str]) -> float:
    return float(said == truth)


def _f1(said: list[str], truth: list[str]) -> float:
    both = sum((Counter(said) & Counter(truth)).values())
    return 2 * both / (len(said) + len(truth)) if both else float(not said and not truth)


class TextRetriever:
    """A few titled texts in memory, found by BM25: a Retriever that is made in no time."""

    def __init__(self, documents: Sequence[tuple[str, str]]) -> None:
        self.chunks = [
            Chunk(str(row), str(row), title, title, text, 0, len(text)) for row, (title, text) in enumerate(documents)
        ]
        # A title counts more than a mention: who is asked for comes before those who have to do with them.
        self.index = Index([f"{title} {title} {text}" for title, text in documents])

    def search(self, query: str, k: int = 8) -> list[Hit]:
        scores = self.index.scores(words(query), 1.2, 0.75)
        best = sorted(scores, key=lambda row: (-scores[row], row))[:k]
        return [Hit(self.chunks[row], row, scores[row]) for row in best]
