"""Citations of an answer that a server streams: nothing of it is taken back, so each is told whether it holds.

Marks such as [1] are checked where they stand. A sentence without one is given the passage that supports it, if one
does: small models often answer from a passage and forget to name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moesaic.know.answer.claims import Lexicon
from moesaic.know.answer.sentences import sentence_spans
from moesaic.know.answer.support import Source, Verdict
from moesaic.serve.api.know import citing
from moesaic.serve.api.knowledge import Citation, Passage

MOST_SENTENCES = 64  # of an answer; a model in a loop writes thousands


def checked_citations(answer: str, passages: Sequence[Passage]) -> list[Citation]:
    lexicon = Lexicon.of(passage.text for passage in passages)
    sources = [Source(passage.title, passage.text, lexicon) for passage in passages]
    marked = list(citing.marks(answer, len(passages)))
    found = [
        _citation(passages, number, start, end, *_verdict(answer, start, number, marked, sources))
        for number, start, end in marked
    ]
    return sorted([*found, *_unmarked(answer, passages, sources)], key=lambda one: (one.end, one.number))


def _verdict(
    answer: str, start: int, number: int, marked: Sequence[tuple[int, int, int]], sources: Sequence[Source]
) -> tuple[str, Verdict]:
    """Of one mark; several passages may support what none of them supports alone."""
    said = citing.statement(answer, start)
    own = sources[number - 1].check(said)
    if own.supported:
        return said, own
    beside = list(dict.fromkeys(other for other, place, _ in marked if citing.statement(answer, place) == said))
    if len(beside) > 1 and Source.joined([sources[other - 1] for other in beside]).check(said).supported:
        return said, Verdict(True, own.score, spans=own.spans)
    return said, own


def _unmarked(answer: str, passages: Sequence[Passage], sources: Sequence[Source]) -> Iterator[Citation]:
    for start, end in sentence_spans(answer)[:MOST_SENTENCES]:
        said = answer[start:end]
        behind = answer[end:].lstrip()[:1] == "["  # the mark of "... . [1]"
        if behind or citing.MARK.search(said):
            continue
        verdicts = {number: source.check(said) for number, source in enumerate(sources, 1)}
        fitting = [number for number, verdict in verdicts.items() if verdict.supported and verdict.spans]
        best = max(fitting, key=lambda n: (verdicts[n].score, verdicts[n].words, -n), default=None)
        if best is not None:
            yield _citation(passages, best, end, end, said, verdicts[best])


def _citation(passages: Sequence[Passage], number: int, start: int, end: int, said: str, verdict: Verdict) -> Citation:
    passage = passages[number - 1]
    first, last = verdict.quote or citing.nearest_sentence(said, passage.text)
    return Citation(
        number, start, end, passage.text[first:last], passage.start + first, passage.start + last, verdict.supported
    )
