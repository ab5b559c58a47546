"""Instructions with constraints that a rule can check, from a file: the share of answers that keep them all.

    moesaic evaluate out/model --suite instructions --data instructions.jsonl

A line is {"prompt": "Describe the sea in 20 words.", "constraints": [{"kind": "max_words", "value": 20}]}; the kinds
are those of the reward `constraints` (docs/align.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import UserError
from moesaic.evaluate.questions import FileQuestions, Question, read_lines, text_under
from moesaic.evaluate.suites import SuiteContext
from moesaic.worlds.judges.constraints import share_kept

EXAMPLE = '{"prompt": "Describe the sea.", "constraints": [{"kind": "max_words", "value": 20}]}'


@dataclass(frozen=True)
class Instructions(FileQuestions):
    share: bool = False  # count the share of constraints that are kept, not whether all are

    def questions(self, context: SuiteContext) -> list[Question]:
        found = []
        for place, line in read_lines(context.data, EXAMPLE)[: self.examples or None]:
            question = Question(
                text_under(line, place, "prompt", "question"), None, {"constraints": line.get("constraints")}
            )
            try:
                self.judge(question, "")
            except ValueError as error:
                raise UserError(place, str(error), f"A line is such as {EXAMPLE}") from None
            found.append(question)
        return found

    def judge(self, question: Question, text: str) -> float:
        return share_kept(text, question.facts["constraints"], all_or_nothing=not self.share)
