"""How an agent that searches speaks: the prompts of RAG-Gym's agents, and the action in what they say.

    direct      one action, nothing else
    react       a thought, then an action (ReAct)
    re2search   a reasoned answer, which of its claims are unverified, then a query for the first of them (Re2Search)
    calls       the chat template's own tool calls; a turn without a call is the answer

An action is `search QUERY` or `answer ANSWER`, in one line behind `Action:`. A turn in which there is none, or without
the lines that its form asks for, is `Malformed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.serve.parsers import Message
from moesaic.worlds.text_actions import Invalid, Malformed, action_in

LONGEST_QUERY = 400  # characters that are searched for


@dataclass(frozen=True)
class Query:
    text: str


@dataclass(frozen=True)
class Final:
    """The answer, which ends an episode."""

    text: str


Action = Query | Final


@dataclass(frozen=True)
class SearchForm:
    instructions: str
    sections: tuple[str, ...] = ()  # lines that stand before the action
    calls: bool = False

    def read(self, said: Message) -> Action:
        return self._call(said) if self.calls else self._written(said.content)

    def write(self, action: Action, said: Sequence[str] = ()) -> str:
        """A turn of this form; `said` are what stands in its sections, in their order."""
        lines = [f"{name}: {text}" for name, text in zip(self.sections, said, strict=True)]
        return "\n".join([*lines, f"Action: {'search' if isinstance(action, Query) else 'answer'} {action.text}"])

    def _written(self, text: str) -> Action:
        line = action_in(text)
        missing = [name for name in self.sections if not re.search(rf"^[ \t]*{name}:[ \t]*\S", text, re.M)]
        if missing:
            raise Malformed(f"There was no {missing[0]} in that. A turn is: {', '.join((*self.sections, 'Action'))}.")
        found = re.fullmatch(r"(search|answer)\b\s*[:\[(]?\s*(.*?)\s*[\])]?", line, re.I)
        if found is None:
            raise Invalid("That is no action. An action is: search QUERY, or: answer ANSWER.")
        if not found[2]:
            raise Invalid(f"There was nothing to {found[1].casefold()}.")
        return Query(found[2]) if found[1].casefold() == "search" else Final(found[2])

    def _call(self, said: Message) -> Action:
        if not said.calls:
            return Final(said.content.rpartition("</think>")[2].strip())
        if len(said.calls) > 1:
            raise Malformed(f"There were {len(said.calls)} calls in that, and one can be carried out at a time.")
        (call,) = said.calls
        if call.name != "search":
            raise Invalid(f"error: there is no {call.name}; there is search")
        try:
            query = json.loads(call.arguments or "{}").get("query")
        except (ValueError, AttributeError):
            query = None
        if not isinstance(query, str) or not query.strip():
            raise Invalid("error: query must be text")
        return Query(query.strip())


ACTIONS = """Your actions, one in each turn, in one line:
Action: search QUERY
Action: answer ANSWER"""

FORMS: dict[str, SearchForm] = {
    "direct": SearchForm(
        f"Find the answer to a question by searching a collection of texts. {ACTIONS}\n"
        "A query that is short and names one thing finds most. The answer is a name, a number or a few words."
    ),
    "react": SearchForm(
        "Find the answer to a question by searching a collection of texts. In each turn say first, in one line that "
        f"begins with Thought:, what is known and what is missing; then act. {ACTIONS}\n"
        "Do not ask again what was asked. The answer is a name, a number or a few words.",
        ("Thought",),
    ),
    "re2search": SearchForm(
        "Find the answer to a question by searching a collection of texts. Each turn has three lines:\n"
        "Reasoning: step by step to an answer, as far as you can get now\n"
        "Unverified: the claims of that reasoning that no passage so far supports, or: none\n"
        "Action: search QUERY for the first of those claims; only if there is none: answer ANSWER\n"
        "The answer is a name, a number or a few words.",
        ("Reasoning", "Unverified"),
    ),
    "calls": SearchForm("Search before you answer.", calls=True),
}
