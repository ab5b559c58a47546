"""Which of what was found is shown to the model (WebGLM): few passages, cut to the sentences that matter, none twice.

They fit into the model's context, counted in its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.know.answer.claims import Lexicon, Token, claims
from moesaic.know.answer.sentences import sentence_spans
from moesaic.know.answer.untrusted import shown_to_model
from moesaic.know.chunk import Chunk, Hit

WHOLE = 110  # words of a chunk that is shown as it is
SHOWN = 90  # words that are shown of a longer one
SAME = 0.7  # share of its words that another passage has, from which it says nothing new


@dataclass(frozen=True)
class Passage:
    number: int  # by which it is cited, from 1
    chunk: Chunk
    spans: tuple[tuple[int, int], ...]  # of the chunk's text that are shown

    @property
    def shown(self) -> str:
        """As the model reads it."""
        pieces = [self.chunk.text[start:end] for start, end in self.spans]
        return shown_to_model(" … ".join(pieces))


def choose(
    question: str, hits: Sequence[Hit], most: int = 5, fits: Callable[[Sequence[Passage]], bool] | None = None
) -> list[Passage]:
    """The best of the hits that say something new, at most so many, as long as they fit."""
    lexicon = Lexicon.of(hit.chunk.text for hit in hits)
    wanted = weights(claims(question, lexicon))
    chosen: list[Passage] = []
    known: list[set[str]] = []
    for hit in hits:
        words = {token.norm for token in claims(hit.chunk.text, lexicon) if token.kind != "function"}
        if not words or any(len(words & other) >= SAME * len(words) for other in known):
            continue
        passage = Passage(len(chosen) + 1, hit.chunk, chosen_spans(hit.chunk.text, wanted, lexicon))
        if fits is not None and not fits([*chosen, passage]):
            if chosen:
                continue  # a shorter one may fit
            passage = cut_to_fit(passage, fits)
        chosen.append(passage)
        known.append(words)
        if len(chosen) == most:
            break
    return chosen


def weights(tokens: Sequence[Token]) -> dict[str, float]:
    return {token.norm: token.weight for token in tokens if token.kind != "function"}


def chosen_spans(text: str, wanted: dict[str, float], lexicon: Lexicon) -> tuple[tuple[int, int], ...]:
    """The sentences that have most of the question's words, and the first, which says what the text is about."""
    if len(text.split()) <= WHOLE:
        return ((0, len(text)),)
    spans = sentence_spans(text)
    scores = []
    for start, end in spans:
        norms = {token.norm for token in claims(text[start:end], lexicon)}
        scores.append(sum(weight for norm, weight in wanted.items() if norm in norms))
    order = sorted(range(len(spans)), key=lambda n: (n != 0, -scores[n], n))
    kept: list[int] = []
    words = 0
    for number in order:
        start, end = spans[number]
        length = len(text[start:end].split())
        if kept and (words + length > SHOWN):
            continue
        kept.append(number)
        words += length
    return joined([spans[number] for number in sorted(kept)])


def joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours as one."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and start - found[-1][1] <= 2:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)


def cut_to_fit(passage: Passage, fits: Callable[[Sequence[Passage]], bool]) -> Passage:
    """The beginning of what is shown, as much as fits: by halves."""
    spans = passage.spans
    while not fits([passage]) and sum(end - start for start, end in spans) > 40:
        start, end = spans[-1]
        spans = spans[:-1] if len(spans) > 1 else ((start, start + (end - start) // 2),)
        passage = Passage(passage.number, passage.chunk, spans)
    return passage
