"""Something to be judged in one form, and many of them judged by several judges, several times each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moesaic.align.critiques.filters import Said, Settled, settle, side_of
from moesaic.align.critiques.judges import Judge, Question
from moesaic.worlds.completions import seed_of
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.critiques import Asking


@dataclass(frozen=True)
class Item:
    """`notes` are for who writes the critique: what was written before of the same answers. The critic that learns from
    it reads the prompt without them."""

    asking: Asking
    answer: Answer
    truth: int | None = None  # the side that code knows to be right
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return self.asking.prompt(self.answer)

    def side(self, critique: str) -> int | None:
        try:
            return side_of(self.asking.score(self.answer, [critique]))
        except ValueError:
            return None  # the form is broken

    def question(self, tokens: int, seed: int) -> Question:
        asked = self.asking.prompt(self.answer, notes=self.notes)
        return Question(asked, self.asking.grammar(self.answer, tokens), self.asking.length(self.answer, tokens), seed)


@dataclass
class Tribunal:
    """All judges, and how they are asked. `outcomes` counts why critiques were dropped."""

    judges: Sequence[Judge]
    samples: int  # critiques of each judge
    agree: float
    tokens: int
    temperature: float
    seed: int
    outcomes: dict[str, int] = field(default_factory=dict)
    right: int = 0  # verdicts that code agrees with,
    checked: int = 0  # of those that it could check
    asked: int = 0

    def settle(self, items: Sequence[Item]) -> list[Settled | None]:
        """What holds of each item, if anything does."""
        questions = []
        for item in items:
            self.asked += 1
            draws = (seed_of(self.seed, self.asked, sample) for sample in range(self.samples))
            questions += [item.question(self.tokens, draw) for draw in draws]
        said: list[list[Said]] = [[] for _ in items]
        for judge in self.judges:
            replies = judge.replies(questions, self.temperature)
            for number, item in enumerate(items):
                own = replies[number * self.samples : (number + 1) * self.samples]
                sides = [(one.strip(), item.side(one)) for one in own if isinstance(one, str)]
                said[number].append([(text, side) for text, side in sides if side is not None])
        return [self._settled(item, own) for item, own in zip(items, said, strict=True)]

    def drop(self, why: str) -> None:
        self.outcomes[why] = self.outcomes.get(why, 0) + 1

    def _settled(self, item: Item, said: Sequence[Said]) -> Settled | None:
        if item.truth is not None:
            self.right += sum(side == item.truth for own in said for _, side in own)
            self.checked += sum(map(len, said))
        found = settle(said, item.truth, self.agree)
        if isinstance(found, str):
            self.drop(found)
            return None
        return found


def of_pair(answer: Answer, other: Answer) -> Answer:
    """The first beside the second."""
    return replace(answer, facts={**answer.facts, "other": other.text})
