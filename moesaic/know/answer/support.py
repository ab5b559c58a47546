"""Whether a passage supports a statement: its names, numbers, negations, order and, by how rare they are, its words.

    Source(title, text).check("Ada Lovelace wrote the first program.")

Each clause of the statement is laid beside the sentence of the passage that covers most of it; going on in another
sentence costs something, or a name could be taken from anywhere. A name or number that the sentence does not have, a
negation on one side only, or a relation whose two sides changed places speaks against it, whatever else is the same. Of
other words, so much must be there (`Limits`, chosen by bench/know_citations.py on other texts than those it reports).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from moesaic.know.answer.claims import PRONOUNS, Lexicon, Token, claims, folded, is_negation
from moesaic.know.answer.relations import turned_around
from moesaic.know.answer.sentences import sentence_spans, sentences

AUXILIARIES = frozenset(("is", "are", "was", "were", "has", "had", "have"))
SWITCH = 2.0  # what going on in another sentence costs, in words that are missing


@dataclass(frozen=True)
class Verdict:
    supported: bool
    score: float  # the share of what is claimed that is there, by weight
    words: float = 0.0  # the same of words that are neither names nor numbers
    reasons: tuple[str, ...] = ()  # why not
    spans: tuple[tuple[int, int], ...] = ()  # the sentences of the passage it was compared with

    @property
    def quote(self) -> tuple[int, int] | None:
        """One span of the passage: neighbouring sentences together, else the first."""
        if not self.spans:
            return None
        spans = sorted(self.spans)
        start, end = spans[0]
        for following in spans[1:]:
            if following[0] - end > 3:
                break
            end = following[1]
        return start, end


@dataclass(frozen=True)
class Limits:
    """How much of a statement must be there, by weight: of all that it claims, and of its words that are no names."""

    score: float = 0.4
    words: float = 0.45

    def allow(self, verdict: Verdict) -> bool:
        return verdict.score >= self.score and verdict.words >= self.words


LIMITS = Limits()


@dataclass(frozen=True)
class SourceSentence:
    start: int
    end: int
    tokens: list[Token]
    counts: Counter[str]  # how often a name or number may be used
    norms: frozenset[str]
    names: list[str]  # runs of names, as initials
    subject: tuple[str, ...]  # the title's words, where a pronoun stands for it

    def has(self, token: Token) -> bool:
        return token.norm in self.norms or (token.kind == "name" and self._initials(token))

    def _initials(self, token: Token) -> bool:
        short = token.text.replace(".", "")
        return len(short) > 1 and short.isupper() and folded(short) in self.names


@dataclass
class Source:
    """A passage, read once and compared with many statements. `lexicon` says how rare words are."""

    title: str
    text: str
    lexicon: Lexicon = field(default_factory=Lexicon)
    headings: Sequence[str] = ()

    @cached_property
    def _title(self) -> Counter[str]:
        about = claims(" ".join([self.title, *self.headings]), self.lexicon)
        return Counter({token.norm for token in about if token.kind != "function"})

    @cached_property
    def _sentences(self) -> list[SourceSentence]:
        return [self._sentence(start, end) for start, end in sentence_spans(self.text)]

    @classmethod
    def joined(cls, sources: Sequence[Source]) -> Source:
        """Several passages as one, in which each sentence is still about its own title."""
        joined = cls(sources[0].title, "".join(source.text for source in sources), sources[0].lexicon)
        titles: Counter[str] = Counter()
        found: list[SourceSentence] = []
        first = 0
        for source in sources:
            titles.update(source._title)
            found += [replace(one, start=first + one.start, end=first + one.end) for one in source._sentences]
            first += len(source.text)
        joined.__dict__.update(_title=titles, _sentences=found)
        return joined

    def _sentence(self, start: int, end: int) -> SourceSentence:
        tokens = claims(self.text[start:end], self.lexicon)
        counts = Counter(token.norm for token in tokens if token.kind != "function")
        pronouns = sum(token.norm in PRONOUNS for token in tokens)
        for norm in self._title:
            # A statement may say the title's name where the text says "it", or once where it says "the film".
            counts[norm] += pronouns + (counts[norm] == 0)
        runs: dict[int, str] = {}
        for token in tokens:
            if token.kind == "name":
                runs[token.run] = runs.get(token.run, "") + folded(token.text[0])
        subject = tuple(self._title) if tokens and folded(tokens[0].text) in PRONOUNS else ()
        own = {token.norm for token in tokens}
        norms = frozenset(norm for norm in counts if norm in own or not norm[:1].isdigit())
        return SourceSentence(start, end, tokens, counts, norms, list(runs.values()), subject)

    def check(self, statement: str, limits: Limits = LIMITS) -> Verdict:
        """Of several sentences each must be supported."""
        parts = [self._check(sentence, limits) for sentence in sentences(statement)]
        if not parts:
            return Verdict(False, 0.0, reasons=("says nothing",))
        spans = tuple(dict.fromkeys(span for part in parts for span in part.spans))
        reasons = tuple(dict.fromkeys(reason for part in parts for reason in part.reasons))
        score, words = min(part.score for part in parts), min(part.words for part in parts)
        return Verdict(all(part.supported for part in parts), score, words, reasons, spans)

    def _check(self, sentence: str, limits: Limits) -> Verdict:
        tokens = claims(sentence, self.lexicon)
        total = sum(token.weight for token in tokens)
        if not self._sentences or not total:
            return Verdict(False, 0.0, reasons=("says nothing",))
        segments = segments_of(tokens)
        of_title = {token.place for token in tokens if self._number_of_title(token, tokens)}
        aligned = self._align([[token for token in segment if token.place not in of_title] for segment in segments])
        missing, reasons = [], []
        used: Counter[str] = Counter()
        near = {other for number in aligned for other in (number - 1, number, number + 1)}
        allowed: Counter[str] = Counter()
        for number in near & set(range(len(self._sentences))):
            allowed.update(self._sentences[number].counts)
        for number, segment in zip(aligned, segments, strict=True):
            source = self._sentences[number]
            for token in segment:
                if token.kind == "function":
                    continue
                used[token.norm] += 1
                # More often than around there: it took another's place.
                many = token.kind in ("name", "number") and used[token.norm] > allowed[token.norm] > 0
                if many or not (source.has(token) or token.place in of_title):
                    missing.append(token)
        score = 1.0 - sum(token.weight for token in missing) / total
        for kind in ("name", "number"):
            if absent := [token.text for token in missing if token.kind == kind]:
                reasons.append(f"{kind} not there: {', '.join(absent)}")
        reasons += self._detached(segments, aligned, missing)
        for number in dict.fromkeys(aligned):
            own = [token for segment, at in zip(segments, aligned, strict=True) if at == number for token in segment]
            source = self._sentences[number]
            if word := other_polarity(own, source.tokens):
                reasons.append(f"negated on one side only: {word}")
            if word := turned_around(own, source.tokens, source.subject):
                reasons.append(f"the two sides of {word!r} changed places")
        plain = [token for token in tokens if token.kind == "word"]
        lost = [token for token in missing if token.kind == "word"]
        words = 1.0 - sum(t.weight for t in lost) / sum(t.weight for t in plain) if plain else 1.0
        if score < limits.score or words < limits.words:
            reasons.append(f"too little of it is there ({score:.2f}; not: {', '.join(t.text for t in lost[:6])})")
        spans = tuple((self._sentences[n].start, self._sentences[n].end) for n in dict.fromkeys(aligned))
        return Verdict(not reasons, score, words, tuple(reasons), spans)

    def _number_of_title(self, token: Token, tokens: list[Token]) -> bool:
        """Whether it is said as a part of the title."""
        if token.kind != "number" or token.norm not in self._title:
            return False
        beside = tokens[max(0, token.place - 1) : token.place] + tokens[token.place + 1 : token.place + 2]
        return any(other.norm in self._title for other in beside)

    def _align(self, segments: list[list[Token]]) -> list[int]:
        """For each clause the number of a sentence, so that what is missing and the changes cost least."""
        costs = [
            [sum(token.weight for token in segment if not source.has(token)) for source in self._sentences]
            for segment in segments
        ]
        best = list(costs[0])
        back: list[list[int]] = []
        for row in costs[1:]:
            cheapest = min(range(len(best)), key=best.__getitem__)
            came = [n if best[n] <= best[cheapest] + SWITCH else cheapest for n in range(len(best))]
            best = [min(best[n], best[cheapest] + SWITCH) + row[n] for n in range(len(best))]
            back.append(came)
        at = min(range(len(best)), key=best.__getitem__)
        path = [at]
        for came in reversed(back):
            at = came[at]
            path.append(at)
        return path[::-1]

    def _detached(self, segments: list[list[Token]], aligned: list[int], missing: list[Token]) -> list[str]:
        """A clause that was found in another sentence than its neighbours, but not its words: only its names were."""
        lost = {token.place for token in missing}
        groups: dict[int, list[Token]] = {}
        for segment, at in zip(segments, aligned, strict=True):
            groups.setdefault(at, []).extend(segment)
        said = {at: sum(t.kind == "word" and t.place not in lost for t in own) for at, own in groups.items()}
        main = max(groups, key=lambda at: (said[at], len(groups[at])))
        reasons = []
        for at, own in groups.items():
            words = sum(token.kind == "word" for token in own)
            named = any(token.kind in ("name", "number") and token.norm not in self._title for token in own)
            # A clause of its own has somebody it is about.
            whole = any(token.norm in self._title or token.norm in PRONOUNS or is_verb(token) for token in own)
            if at != main and named and (said[at] < (1 if whole else 2) or said[at] * 2 <= words):
                reasons.append(f"not said of it: {' '.join(token.text for token in own)}")
        return reasons


def is_verb(token: Token) -> bool:
    return token.norm in AUXILIARIES or (token.kind == "word" and token.text.endswith("ed"))


def segments_of(tokens: list[Token]) -> list[list[Token]]:
    segments: list[list[Token]] = []
    for token in tokens:
        if not segments or segments[-1][0].segment != token.segment:
            segments.append([])
        segments[-1].append(token)
    return segments


def other_polarity(said: list[Token], source: list[Token]) -> str | None:
    """A word that is negated in one of the two only."""
    for first, second in ((said, source), (source, said)):
        there: dict[str, set[bool]] = {}
        for token in second:
            if token.kind != "function":
                there.setdefault(token.norm, set()).add(token.negated)
        for place, token in enumerate(first):
            following = folded(first[place + 1].text) if place + 1 < len(first) else ""
            if token.kind != "function" or not is_negation(folded(token.text)):
                continue
            if following == "only" and any(folded(t.text) == "but" for t in first[place:]):
                continue  # "not only ... but also"
            scope = [t for t in first[place + 1 : place + 5] if t.kind != "function" and t.negated]
            known = next((t for t in scope if t.norm in there), None)
            if known is not None and True not in there[known.norm]:
                return known.text
            denied = any(t.kind == "function" and is_negation(folded(t.text)) for t in second)
            if known is None and not denied and (first is said or (not scope and said_before(first, place, there))):
                return token.text
    return None


def said_before(tokens: list[Token], place: int, there: dict[str, set[bool]]) -> bool:
    """Whether the last word before a place, such as the end of "but the others did not", is known."""
    before = next((token for token in reversed(tokens[:place]) if token.kind != "function"), None)
    return before is not None and before.norm in there
