"""Questions that a passage answers, with short answers that a rule can check (CANOE's synthetic data), of four kinds:

    straightforward   the passage states it                counterfactual   it states what everybody knows otherwise
    multi_hop         two of its statements together do    unanswerable     it does not say, and the answer is "unknown"

    tasks("context_qa", "train", 0).question               # a passage and a question; .answer is short, .solution long
    tasks("context_qa:multi_hop=0,facts=4", "train", 0)    # the share of each kind; so many statements in a passage
    tasks("context_qa:changed=0.5,added=0.2", "train", 0).solution     # long answers with planted hallucinations

`brief` is the share of questions that want the short answer alone; half of those passages are long answers, so that a
model made of nothing can tell what follows from one. `retell` is the share that want the passage told again in order of
the alphabet, where such a model learns to read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import Any

from moesaic.data.tasks.statements import RELATIONS, SUBJECTS, Statement, another, make_world, sentences, told, unsaid

KINDS = ("straightforward", "multi_hop", "counterfactual", "unanswerable")
UNKNOWN, SILENT = "unknown", "The text does not say."
TAGS = ("think", "long_answer", "answer")
BRIEFLY = f"Answer the question from the text alone, in a few words. If it does not say, answer {UNKNOWN}."
AT_LENGTH = (
    "Answer the question from the text alone. {think}Write an answer in whole sentences between <long_answer> and "
    "</long_answer>, and then the same in a few words between <answer> and </answer>. "
    f'If the text does not say, write "{SILENT}" and {UNKNOWN}.'
)
RETELL = "What does the text say, in order of the alphabet?"
THINK = "Think first, between <think> and </think>. "


@dataclass(frozen=True)
class Case:
    kind: str
    passage: tuple[Statement, ...]
    question: str
    needed: tuple[Statement, ...]  # none where the passage does not say
    asked: Statement  # what the answer states, or, where there is none, would be wrong to
    answer: str


@dataclass(frozen=True)
class ContextQA:
    """A family of tasks of our own: item i is the same everywhere."""

    straightforward: float = 1.0  # shares of the kinds
    multi_hop: float = 1.0
    counterfactual: float = 1.0
    unanswerable: float = 1.0
    facts: int = 6  # of a passage
    brief: float = 0.0
    retell: float = 0.0
    changed: float = 0.0  # share of long answers that state something else than the passage
    added: float = 0.0  # and of those that state more than it
    think: bool = True  # whether thoughts are asked for
    instructions: bool = True  # or only what a very small model needs

    def __post_init__(self) -> None:
        shares = (self.straightforward, self.multi_hop, self.counterfactual, self.unanswerable)
        if not all(isfinite(share) and share >= 0 for share in shares) or not sum(shares):
            raise ValueError("the shares of the kinds are numbers from 0 on, and not all are 0")
        if not 4 <= self.facts <= 12:
            raise ValueError("a passage has 4 to 12 facts")
        for pair in ((self.retell, self.brief), (self.changed, self.added)):
            if min(pair) < 0 or sum(pair) > 1:
                raise ValueError("retell and brief are shares, 1 at most together, and so are changed and added")

    def __getitem__(self, seed: int) -> dict[str, Any]:
        draw = Random(seed)
        shares = [getattr(self, kind) for kind in KINDS]
        case = make_case(draw, draw.choices(KINDS, shares)[0], self.facts)
        how, form, place = draw.random(), draw.random(), draw.random() < 0.5
        passage, long = told(case.passage), long_answer(case)
        retold, brief = how < self.retell, self.retell <= how < self.retell + self.brief
        if brief:
            passage = long if place else passage
        elif form < self.changed:
            long = changed(case)
        elif form < self.changed + self.added:
            long = added(case, draw)
        tags = () if brief or retold else TAGS if self.think else TAGS[1:]
        question = RETELL if retold else case.question
        answer = " ".join(sorted(one.told() for one in case.passage)) if retold else case.answer
        metadata = {
            "kind": case.kind,
            "passage": [list(statement) for statement in case.passage],
            "needed": [list(statement) for statement in case.needed],
            "bare_question": question,
            "tags": tags,
            "instructions": self.instructions,
        }
        asked = prompt(passage, question, tags, self.instructions)
        written = {"think": thought(case), "long_answer": long, "answer": case.answer}
        solution = "\n".join(f"<{tag}>{written[tag]}</{tag}>" for tag in tags) or answer
        return {"question": asked, "answer": answer, "metadata": metadata, "solution": solution}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Whether the short answer is right."""
        found = re.findall(r"<answer>(.*?)</answer>", answer or "", re.DOTALL)
        said = found[-1] if found else "" if entry["metadata"]["tags"] else answer or ""
        return float(plain(said) == plain(entry["answer"]))


def plain(text: str) -> str:
    return text.strip().rstrip(".").casefold()


def prompt(passage: str, question: str, tags: tuple[str, ...], instructions: bool = True) -> str:
    """How a question is asked; without tags for the short answer alone."""
    if not instructions:
        return f"Text: {passage}\nQuestion: {question}\n{'At length' if tags else 'Briefly'}:"
    if question == RETELL:
        return f"Text: {passage}\n\n{question}"
    how = AT_LENGTH.format(think=THINK if "think" in tags else "") if tags else BRIEFLY
    return f"{how}\n\nText: {passage}\n\nQuestion: {question}"


def make_case(draw: Random, kind: str, facts: int) -> Case:
    world = make_world(draw, people=4, countries=3)

    def stated(subject: str, relation: str) -> Statement:
        return Statement(subject, relation, world[subject, relation])

    everything = [stated(*place) for place in world]
    needed: tuple[Statement, ...]
    if kind == "multi_hop":
        first = draw.choice([one for one in everything if RELATIONS[one.relation].noun])
        about = "person" if first.relation == "teacher" else "country"
        last = stated(first.object, draw.choice(SUBJECTS[about]))
        needed, subject = (first, last), RELATIONS[first.relation].noun.format(s=first.subject)
    else:
        about = "country" if kind == "counterfactual" else draw.choice(list(SUBJECTS))
        last = draw.choice([one for one in everything if one.relation in SUBJECTS[about]])
        needed, subject = (last,), last.subject
        if kind == "counterfactual":
            last = another(last, draw, tuple(world.values()))
            needed = (last,)
    # What could be mistaken for it: the same said of others.
    others = [draw.choice(confusable(one, everything)) for one in needed]
    hidden = {(one.subject, one.relation) for one in (*needed, *others)}
    rest = [one for one in everything if (one.subject, one.relation) not in hidden]
    draw.shuffle(rest)
    if kind == "unanswerable":  # the text speaks of whom is asked about, and says something else
        rest.sort(key=lambda one: one.subject != last.subject)
    told_of = (*others, *needed) if kind != "unanswerable" else others
    passage = list(dict.fromkeys((*told_of, *rest)))[:facts]
    draw.shuffle(passage)
    question = RELATIONS[last.relation].question.format(s=subject)
    if kind == "unanswerable":
        return Case(kind, tuple(passage), question, (), last._replace(object=others[0].object), UNKNOWN)
    return Case(kind, tuple(passage), question, needed, last._replace(object=others[-1].object), last.object)


def confusable(one: Statement, everything: Sequence[Statement]) -> list[Statement]:
    return [o for o in everything if o.relation == one.relation and one.subject != o.subject and one.object != o.object]


def long_answer(case: Case) -> str:
    return told(case.needed) or SILENT


def changed(case: Case) -> str:
    """A hallucination: what the passage says of another is said of the one who was asked about."""
    return told((*case.needed[:-1], case.asked))


def added(case: Case, draw: Random) -> str:
    """Another: something more, of which the passage says nothing."""
    return told((*case.needed, unsaid(case.passage, draw)))


def thought(case: Case) -> str:
    way = " and then of ".join(one.subject for one in case.needed)
    return f"I read of {way}." if way else "It is not there."


def statements_of(metadata: Mapping[str, Any], which: str) -> list[Statement]:
    """Those of a task's `passage`, or those `needed`."""
    return [Statement(*one) for one in metadata[which]]


def unsupported(long: str, metadata: Mapping[str, Any]) -> list[str]:
    """The sentences of a long answer that its passage does not state; that it does not say is a statement as well."""
    passage = {one.told() for one in statements_of(metadata, "passage")}
    silent = set() if metadata["needed"] else {SILENT}
    return [sentence for sentence in sentences(long) if sentence not in passage | silent]
