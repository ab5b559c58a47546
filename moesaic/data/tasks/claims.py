"""Claims about a passage, faithful to it or with a planted hallucination, with an explanation of which (FaithLens'
synthetic data). Labels are right by construction: something was changed, or nothing.

    number     another number            relation   who did what to whom, the other way round
    name       another name              added      something more, of which the passage says nothing
    negation   denied

    tasks("claims", "train", 0).question                   # a passage and a claim; .answer is yes or no
    tasks("claims:mislabelled=0.2,unexplained=0.3", "train", 0).solution   # as a teacher that errs would write it

An explanation says what the passage holds of the matter, so that a reader who has nothing else finds the label.
`brief` is the share that wants the label alone; half of those texts are explanations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from moesaic.data.tasks.context_qa import make_case
from moesaic.data.tasks.statements import RELATIONS, Statement, another, told, unsaid

PLANTED = ("number", "name", "relation", "negation", "added")
YES, NO, NOTHING = "yes", "no", "Nothing."
TAGS = ("explanation", "label")
EXPLAIN = (
    "Is the claim faithful to the text, that is, does the text state all of it? Say between <explanation> and "
    f"</explanation> what the text holds of the matter, then {YES} or {NO} between <label> and </label>."
)
BRIEFLY = f"Is the claim faithful to the text, that is, does the text state all of it? Answer {YES} or {NO}."


@dataclass(frozen=True)
class Claims:
    """A family of tasks of our own: item i is the same everywhere."""

    faithful: float = 0.5  # share of the claims
    facts: int = 6  # of a passage
    brief: float = 0.0
    mislabelled: float = 0.0  # shares of solutions: the label is wrong
    unexplained: float = 0.0  # the explanation is of something else
    instructions: bool = True  # or only what a very small model needs

    def __post_init__(self) -> None:
        shares = (self.faithful, self.brief, self.mislabelled, self.unexplained)
        if not all(0 <= share <= 1 for share in shares) or not 4 <= self.facts <= 12:
            raise ValueError("a passage has 4 to 12 facts, and everything else is a share between 0 and 1")

    def __getitem__(self, seed: int) -> dict[str, Any]:
        draw = Random(seed)
        passage = make_case(draw, "straightforward", self.facts).passage
        stated = draw.sample(passage, draw.randint(1, 2))
        planted = "" if draw.random() < self.faithful else draw.choice(PLANTED)
        sentences, planted = plant(planted, stated, passage, draw)
        chances = [draw.random() for _ in range(4)]
        explained, label = explanation(stated), NO if planted else YES
        claim, text = " ".join(sentences), told(passage)
        brief = chances[0] < self.brief
        if brief and chances[1] < 0.5:
            text = explained
        metadata = {
            "kind": planted or "faithful",
            "claim": claim,
            "tags": () if brief else TAGS,
            "instructions": self.instructions,
        }
        solution = label
        if not brief:
            said = {YES: NO, NO: YES}[label] if chances[2] < self.mislabelled else label
            if chances[3] < self.unexplained:
                explained = explanation(draw.sample([one for one in passage if one not in stated], 1))
            solution = f"<explanation>{explained}</explanation>\n<label>{said}</label>"
        asked = prompt(text, claim, brief, self.instructions)
        return {"question": asked, "answer": label, "metadata": metadata, "solution": solution}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Whether the label is right."""
        said = label_of(answer or "") if entry["metadata"]["tags"] else (answer or "").strip()
        return float(said == entry["answer"])


def label_of(text: str) -> str:
    found = re.findall(r"<label>(.*?)</label>", text, re.DOTALL)
    return str(found[-1]).strip() if found else ""


def prompt(text: str, claim: str, brief: bool, instructions: bool = True) -> str:
    if not instructions:
        return f"Text: {text}\nClaim: {claim}\n{'Briefly' if brief else 'Explained'}:"
    return f"{BRIEFLY if brief else EXPLAIN}\n\nText: {text}\n\nClaim: {claim}"


def explanation(stated: Sequence[Statement]) -> str:
    """What the passage says of the matter."""
    return told(stated) or NOTHING


def plant(kind: str, stated: Sequence[Statement], passage: Sequence[Statement], draw: Random) -> tuple[list[str], str]:
    """A claim's sentences with a hallucination of a kind, and the kind: another, where what is stated has no number,
    say."""
    sentences = [one.told() for one in stated]
    place = draw.randrange(len(stated))
    one = stated[place]
    if kind == "number" and RELATIONS[one.relation].object != "number":
        kind = "name"
    elif kind == "name" and RELATIONS[one.relation].object == "number":
        kind = "number"
    elif kind == "relation" and RELATIONS[one.relation].subject != RELATIONS[one.relation].object:
        kind = "negation"
    if kind in ("number", "name"):
        sentences[place] = another(one, draw).told()
    elif kind == "relation":
        sentences[place] = Statement(one.object, one.relation, one.subject).told()
    elif kind == "negation":
        sentences[place] = one.denied()
    elif kind == "added":
        sentences.append(unsaid(passage, draw).told())
    return sentences, kind
