"""i-MedRAG: the model asks follow-up questions from what was found so far, several rounds, and then answers.

Each query is answered by ordinary retrieval; query and answer are the history that the next round begins from. By
forms, so that a small model can do it: queries are a JSON list, their answers a few words, the last one has citations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.know.answer.answer import Answer, Round
from moesaic.know.answer.answering import Answerer
from moesaic.know.answer.prompts import FOLLOW_UP, conversation, queries_form
from moesaic.know.chunk import Hit

QUERY_TOKENS = 120


@dataclass
class FollowUp:
    answerer: Answerer
    rounds: int = 2
    queries: int = 2  # in a round

    def answer(self, question: str) -> Answer:
        found = self.explore([question])[0]
        return self.answerer.from_hits(question, found.merged(), found.rounds)

    def short(self, questions: Sequence[str]) -> list[str]:
        """A few words for each, all questions side by side; the history comes as passages do."""
        found = self.explore(questions)
        return self.answerer.short(
            [asked(question, one.rounds) for question, one in zip(questions, found, strict=True)],
            [one.merged() for one in found],
        )

    def explore(self, questions: Sequence[str]) -> list[Explored]:
        answerer = self.answerer
        states = [Explored(question, [answerer.retriever.search(question, answerer.found)]) for question in questions]
        for number in range(1, self.rounds + 1):
            written = answerer.writer.write(
                [self._asks(state) for state in states],
                max_tokens=QUERY_TOKENS,
                form=queries_form(self.queries),
                temperature=answerer.temperature,
                seed=answerer.seed + number,
            )
            new = [
                (state, query)
                for state, text in zip(states, written, strict=True)
                for query in state.fresh(read_queries(text))[: self.queries]
            ]
            if not new:
                break
            hits = [answerer.retriever.search(query, answerer.found) for _, query in new]
            answers = answerer.short([query for _, query in new], hits)
            for (state, query), own, said in zip(new, hits, answers, strict=True):
                state.hits.append(own)
                state.rounds.append(Round(number, query, said, tuple(dict.fromkeys(h.chunk.source for h in own[:3]))))
        return states

    def _asks(self, state: Explored) -> Sequence[dict[str, str]]:
        passages = self.answerer.choose(FOLLOW_UP, state.question, state.hits[0], QUERY_TOKENS, state.rounds)
        return [dict(message) for message in conversation(FOLLOW_UP, state.question, passages[:3], state.rounds)]


@dataclass
class Explored:
    """A question, what was found for it and for each query, and the history."""

    question: str
    hits: list[list[Hit]]
    rounds: list[Round] = field(default_factory=list)

    def fresh(self, queries: Sequence[str]) -> list[str]:
        known = {self.question.casefold(), *(one.query.casefold() for one in self.rounds)}
        return [query for query in dict.fromkeys(queries) if query.casefold() not in known]

    def merged(self) -> list[Hit]:
        """The best of each search in turn, each chunk once: what follow-up questions found stands beside the first."""
        found: dict[str, Hit] = {}
        for rank in range(max(map(len, self.hits), default=0)):
            for hits in self.hits:
                if rank < len(hits):
                    found.setdefault(hits[rank].chunk.id, hits[rank])
        return list(found.values())


def asked(question: str, rounds: Sequence[Round]) -> str:
    """A question after what is known."""
    known = "; ".join(f"{one.query} {one.answer}" for one in rounds)
    return f"{question} (Known: {known})" if known else question


def read_queries(written: str) -> list[str]:
    """Out of their form, also where it was cut off, or a server wrote lines instead."""
    try:
        listed = json.loads(written)["queries"]
        queries = listed if isinstance(listed, list) else []
    except (ValueError, LookupError, TypeError):
        queries = [line.strip(" -*\t\"',[]{}") for line in written.splitlines()] if "{" not in written else []
    return [" ".join(query.split()) for query in queries if isinstance(query, str) and len(query.strip()) >= 8]
