"""Problems of mathematics from a file (GSM8K, MATH), judged by math-verify: 1/2, 0.5 and \\frac{1}{2} are one.

    moesaic evaluate out/model --suite math --data gsm8k_test.jsonl examples=200 max_tokens=512

A line has `question` or `problem`, and `answer` or `solution`; of an answer with `####` in it, as in GSM8K, what
follows is the answer, and of a solution with `\\boxed{}`, as in MATH, what is in the last box. Of what a model says
without either the last number counts; thoughts do not. What cannot be compared in time is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moesaic.errors import UserError
from moesaic.evaluate.questions import FileQuestions, Question, read_lines, text_under
from moesaic.evaluate.suites import SuiteContext
from moesaic.worlds.judges.answer_part import after_thought, last_box
from moesaic.worlds.judges.math_worker import MathWorker

EXAMPLE = '{"question": "What is 6 times 7?", "answer": "42"}'
SECONDS = 5.0  # for one comparison
NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?%?")
IN_WORDS = re.compile(rf"(?:[^\W\d_]{{2,}}[,:]?\s+)*({NUMBER.pattern})(?:\s+[^\W\d_]{{2,}})*\.?")  # 18 dollars


@dataclass(frozen=True)
class Math(FileQuestions):
    max_tokens: int = 512
    instruction: str = "Think step by step, and end with the answer in \\boxed{}."
    worker: MathWorker = field(default_factory=MathWorker, init=False, repr=False, compare=False)

    def questions(self, context: SuiteContext) -> list[Question]:
        lines = read_lines(context.data, EXAMPLE)
        found = []
        for place, line in lines[: self.examples or None]:
            problem = text_under(line, place, "question", "problem", "prompt")
            if not (truth := right_answer(text_under(line, place, "answer", "solution"))):
                raise UserError(place, "its answer is empty", f"A line is such as {EXAMPLE}")
            found.append(Question(f"{problem}\n{self.instruction}".strip(), truth))
        return found

    def judge(self, question: Question, text: str) -> float:
        assert question.truth is not None
        said = final(after_thought(text))
        try:
            return float(said == question.truth or self.worker.equal(question.truth, said, SECONDS))
        except (OSError, ValueError):  # it took too long or too much memory, or is no mathematics
            return 0.0


def final(text: str) -> str:
    """What an answer comes to: in the last box, after ####, or else its last number."""
    if (marked := in_marks(text)) is not None:
        return marked
    numbers = NUMBER.findall(text)
    return plain(numbers[-1]) if numbers and len(text.split()) > 1 else text.strip()


def right_answer(text: str) -> str:
    """The same of what a file holds to be right, where `5 \\sqrt{2}` is one answer: only words are left out."""
    if (marked := in_marks(text)) is not None:
        return marked
    text = text.strip()
    return plain(found[1]) if len(text.split()) > 1 and (found := IN_WORDS.fullmatch(text)) else text


def plain(number: str) -> str:
    return number.replace("$", "").strip("%").replace(",", "")


def in_marks(text: str) -> str | None:
    if (boxed := last_box(text)) is not None:  # before ####, which may be a heading
        return boxed
    return text.rpartition("####")[2].strip().replace(",", "") if "####" in text else None
