"""Answers with citations (WebGLM): search, choose, write, check each citation against its passage.

    Answerer(base, EngineWriter.open("MODEL")).answer("Who wrote the first program?")

Where no statement is supported, or nothing that was found is about what is asked, the answer is that it is not in the
texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from moesaic.know.answer.answer import NOT_IN_TEXTS, Answer, Round
from moesaic.know.answer.choose import Passage, choose
from moesaic.know.answer.citations import check_answer
from moesaic.know.answer.claims import Lexicon, Token, claims
from moesaic.know.answer.prompts import CITE, QUOTE, SHORT, SHORT_FORM, citing_form, conversation, quoting_form
from moesaic.know.answer.sentences import sentence_spans
from moesaic.know.answer.writer import Measured, Writer
from moesaic.know.chunk import Hit, Retriever

MAX_TOKENS = 160
SHORT_TOKENS = 40
ABOUT = 0.5  # of the weight of what a question names, that must be in what was found


@dataclass
class Answerer:
    retriever: Retriever
    writer: Writer
    passages: int = 5  # shown at most
    found: int = 16  # searched for, to choose from
    temperature: float = 0.0
    seed: int = 0
    quote: bool = False  # answer with a sentence of the passages, word for word

    def answer(self, question: str) -> Answer:
        return self.from_hits(question, self.retriever.search(question, self.found))

    def from_hits(self, question: str, hits: Sequence[Hit], rounds: Sequence[Round] = ()) -> Answer:
        """`rounds` are follow-up questions that were answered before."""
        instruction = QUOTE if self.quote else CITE
        chosen = self.choose(instruction, question, hits, MAX_TOKENS, rounds)
        about = " ".join([question, *(one.query for one in rounds)]) if rounds else question
        if why := nothing_about(question, chosen) if not rounds else nothing_about(about, chosen):
            return Answer(question, (), tuple(chosen), "", tuple(rounds), why)
        written = self.writer.write(
            [conversation(instruction, question, chosen, rounds)],
            max_tokens=MAX_TOKENS,
            form=quoting_form(chosen) if self.quote else citing_form(len(chosen)),
            temperature=self.temperature,
            seed=self.seed,
        )[0]
        return checked(question, written, chosen, rounds)

    def short(self, questions: Sequence[str], hits: Sequence[Sequence[Hit]] | None = None) -> list[str]:
        """A few words for each question, without citations; all are written together."""
        hits = hits if hits is not None else [self.retriever.search(question, self.found) for question in questions]
        asked = [
            conversation(SHORT, question, self.choose(SHORT, question, own, SHORT_TOKENS))
            for question, own in zip(questions, hits, strict=True)
        ]
        written = self.writer.write(asked, max_tokens=SHORT_TOKENS, form=SHORT_FORM, seed=self.seed)
        return [short_text(text) for text in written]

    def choose(
        self, instruction: str, question: str, hits: Sequence[Hit], room: int, rounds: Sequence[Round] = ()
    ) -> list[Passage]:
        return choose(question, hits, self.passages, self._fits(instruction, question, room, rounds))

    def _fits(
        self, instruction: str, question: str, room: int, rounds: Sequence[Round]
    ) -> Callable[[Sequence[Passage]], bool] | None:
        writer = self.writer
        if not isinstance(writer, Measured):
            return None
        return lambda passages: (
            writer.count(conversation(instruction, question, passages, rounds)) + room <= writer.context
        )


def checked(question: str, written: str, passages: Sequence[Passage], rounds: Sequence[Round] = ()) -> Answer:
    """What a model wrote, with its citations checked."""
    text = written.strip()
    if text.startswith(NOT_IN_TEXTS) or not text:
        return Answer(question, (), tuple(passages), written, tuple(rounds), "the model did not find it")
    statements = check_answer(text, passages)
    why = None
    if not any(statement.supported for statement in statements):
        why = "no passage supports what the model wrote"
    else:
        cited = {c.number for statement in statements for c in statement.citations}
        asked = " ".join([question, *(f"{one.query} {one.answer}" for one in rounds)])
        why = unconnected(asked, [p for p in passages if p.number in cited], passages)
    return Answer(question, tuple(statements), tuple(passages), written, tuple(rounds), why)


def nothing_about(question: str, passages: Sequence[Passage]) -> str | None:
    """Why passages cannot answer a question, if they have too little of what it names."""
    if not passages:
        return "nothing was found"
    wanted = asked_about(question, passages)
    there = {token.norm for passage in passages for token in tokens_of(passage)}
    weight = sum(token.weight for token in wanted)
    if weight and sum(token.weight for token in wanted if token.norm in there) < ABOUT * weight:
        missing = dict.fromkeys(token.text for token in wanted if token.norm not in there)
        return f"nothing that was found is about {', '.join(missing)}"
    return None


def unconnected(question: str, cited: Sequence[Passage], passages: Sequence[Passage]) -> str | None:
    """Why passages that were cited have nothing to do with a question: they name nothing that it names, nor anything
    that is named by a passage about it, which is how a question of two steps is answered."""
    norms = {token.norm for token in asked_about(question, passages)}
    linked = set(norms)
    for passage in passages:
        tokens = tokens_of(passage)
        if norms & {token.norm for token in tokens}:
            linked |= {token.norm for token in tokens if token.kind == "name"}
    if any(linked & {token.norm for token in tokens_of(passage)} for passage in cited):
        return None
    return "what the model cites is about something else"


def asked_about(question: str, passages: Sequence[Passage]) -> list[Token]:
    """The names and numbers of a question; its words if it has none."""
    asked = claims(question, Lexicon.of(passage.chunk.text for passage in passages))
    named = [token for token in asked if token.kind in ("name", "number") and not token.initial]
    return named or [token for token in asked if token.kind == "word"]


def tokens_of(passage: Passage) -> list[Token]:
    return claims(" . ".join([passage.chunk.title, *passage.chunk.headings, passage.chunk.text]))


def quotes(question: str, hits: Sequence[Hit], most: int = 5) -> list[tuple[Passage, str, int, int]]:
    """Without a model: the best passages, each with the sentence that has most of the question, and where it stands."""
    passages = choose(question, hits, most)
    lexicon = Lexicon.of(passage.chunk.text for passage in passages)
    wanted = {token.norm for token in claims(question, lexicon) if token.kind != "function"}
    spans = {passage.number: sentence_spans(passage.chunk.text) for passage in passages}
    norms = {
        (number, span): {token.norm for token in claims(passages[number - 1].chunk.text[slice(*span)], lexicon)}
        for number, own in spans.items()
        for span in own
    }
    counts = Counter(norm for there in norms.values() for norm in there & wanted)
    found = []
    for passage in passages:
        chunk, number = passage.chunk, passage.number
        # What the title says is meant in every sentence, and tells none from the others.
        known = {token.norm for token in claims(" . ".join([chunk.title, *chunk.headings]))}
        telling = {norm: log(1 + len(norms) / counts[norm]) for norm in counts if norm not in known}

        def worth(
            span: tuple[int, int], number: int = number, telling: dict[str, float] = telling
        ) -> tuple[float, int]:
            there = norms[number, span]  # a heading has few words
            return sum(telling.get(norm, 0.0) for norm in there), min(len(there), 8)

        start, end = max(spans[number], key=worth, default=(0, len(chunk.text)))
        found.append((passage, chunk.text[start:end], chunk.start + start, chunk.start + end))
    return found


def short_text(written: str) -> str:
    """The answer out of its form; servers without forms write it plainly, and one that was cut has no end."""
    try:
        said = json.loads(written)
        return str(said["answer"]).strip() if isinstance(said, dict) else str(said)
    except (ValueError, LookupError):
        text = written.strip()
        if text.startswith("{"):
            text = text.partition(":")[2].strip().strip('"}').strip()
        return text.splitlines()[0].strip() if text else ""
