"""Answer questions by searching a knowledge base or local texts, with process and outcome rewards (RAG-Gym).

environment: {name: retrieval, know: KB, form: re2search, turns: 5}
environment: {name: retrieval, path: docs, form: calls, turns: 3}
rewards: [{name: environment}, {name: process, by: mean, weight: 0.3}]

The stage's `data` asks: a line's `answer`, with other forms of it in `answers`, is what answers are compared with, and
the titles in `supporting`, where a line has them, are the documents that a good query brings up. How queries are scored
is in `searching.py`, how an agent speaks in `search_forms.py`; questions about generated worlds are in `multihop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moesaic.know.chunk import Retriever
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.worlds.environments import Environment, Episode
from moesaic.worlds.environments.tool_use import opened
from moesaic.worlds.example import Example
from moesaic.worlds.search_forms import FORMS
from moesaic.worlds.searching import Asked, Outcome, ProcessReward, Searching, SearchRules, TextRetriever
from moesaic.worlds.stage_outputs import is_stage_output
from moesaic.worlds.tools.search import Search

SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": Search.description, "parameters": Search.parameters},
}


@dataclass(frozen=True)
class Retrieval(Environment):
    path: str = ""  # texts: a file, or a folder
    know: str = ""  # or a knowledge base
    passages: int = 2  # that a query shows
    longest: int = 600  # characters of one
    mistakes: int = 3  # turns in a row that are no action, and end an episode
    form: str = "calls"  # how the agent speaks: direct, react, re2search, calls
    instructions: str | None = None  # in place of the form's own
    outcome: Outcome = "exact"  # or f1
    process: Mapping[str, float] = field(default_factory=dict)  # weights of sufficiency, utility and novelty

    def __post_init__(self) -> None:
        _ = self.rules
        if bool(self.path) == bool(self.know):
            raise ValueError("retrieval needs the path of a text or a folder of texts, or know: a knowledge base")
        if self.path:
            Search(self.path, self.passages)  # refuses what it cannot search
        elif not is_stage_output(self.know):
            KnowledgeBase.open(self.know)

    def begin(self, example: Example) -> Episode:
        tools = [SEARCH] if FORMS[self.form].calls else []
        messages = opened(example, FORMS[self.form].instructions if self.instructions is None else self.instructions)
        return Searching(messages, tools, asked_of(example), self.retriever, self.rules)

    @cached_property
    def rules(self) -> SearchRules:
        shown = self.turns, self.passages, self.longest, self.mistakes
        return SearchRules(*shown, self.form, self.outcome, ProcessReward.of(self.process))

    @cached_property
    def retriever(self) -> Retriever:
        if self.know:
            return KnowledgeBase.open(self.know)
        return TextRetriever([("", text) for text in Search(self.path, self.passages).texts])


def asked_of(example: Example) -> Asked:
    """What is known of a question of a file."""
    answers = [] if example.truth is None else [example.truth]
    answers += [str(other) for other in example.facts.get("answers", ())]
    return Asked(example.question, tuple(answers), tuple(map(str, example.facts.get("supporting", ()))))
