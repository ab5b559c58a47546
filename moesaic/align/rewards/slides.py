"""How a slide is laid out, as a real browser shows it (AeSlides): one metric of it, by plain code.

    rewards:
      - {name: slides, metric: content}
      - {name: slides, metric: collisions}
      - {name: slides, metric: aspect}
      - {name: slides, metric: whitespace}
      - {name: slides, metric: balance}
    normalise: each

What was asked for is that of `builtin:slides`, or a line's `slide`: {title, points, picture}. A metric of the layout
counts as far as the content can be seen: leaving out what is hard to place is no way to a better layout. All slides of
a step are laid out together, and once, however many metrics look at them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from moesaic.align import slides_page
from moesaic.align.rewards import Reward
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import after_thought
from moesaic.worlds.slides.layout import Layout
from moesaic.worlds.slides.rendering import layouts, why_not

FENCED = re.compile(r"\A\s*```\w*\n(.*?)\n?```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Slides(Reward):
    held_out: ClassVar[bool] = True

    metric: Literal["content", "collisions", "aspect", "whitespace", "balance"] = "collisions"

    def __post_init__(self) -> None:
        if problem := why_not():
            raise ValueError(problem)

    @property
    def aspect(self) -> str:
        return self.metric

    def each(self, answers: Sequence[Answer]) -> list[float | Exception]:
        shown = layouts([slide_of(answer.text) for answer in answers])
        return [self._of(*one) for one in zip(shown, answers, strict=True)]

    def lacks(self, example: Example) -> str:
        return "" if wanted_of(example) is not None else "a slide {title, points} that is asked for"

    def show(self, answers: Sequence[Answer], out: Path) -> None:
        slides, wanted = [slide_of(answer.text) for answer in answers], [wanted_of(answer) for answer in answers]
        slides_page.write(out, [answer.question for answer in answers], slides, wanted)

    def _of(self, layout: Layout | Exception, answer: Answer) -> float | Exception:
        wanted = wanted_of(answer)
        if isinstance(layout, Exception) or wanted is None:
            return layout if isinstance(layout, Exception) else ValueError("no slide {title, points} was asked for")
        content = layout.content(wanted)
        return content if self.metric == "content" else content * float(getattr(layout, self.metric)())


def slide_of(text: str) -> str:
    """The HTML of an answer."""
    said = after_thought(text)
    fenced = FENCED.match(said)
    return fenced[1] if fenced else said


def wanted_of(answer: Answer | Example) -> Mapping[str, Any] | None:
    wanted = answer.task.metadata if answer.task is not None else answer.facts.get("slide")
    return wanted if isinstance(wanted, Mapping) and {"title", "points"} <= wanted.keys() else None
