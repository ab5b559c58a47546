"""Right if the code in the answer passes its tests, in the sandbox.

The tests come with the question, `facts["tests"]`, each in one of three forms:

    {call: "add(2, 3)", value: 5}        what the call gives is compared here, outside of the sandbox
    {input: "2 3", output: "5"}          a program: what it reads and what it must print
    "assert add(2, 3) == 5"              code that must not raise

The first two cannot be passed by code that only ends the process, prints what a test would print, or returns an object
that is equal to everything, and the values it should give are nowhere in its reach. The third must run beside the
answer and is harder to cheat than an exit code (its verdict carries a word that the answer would have to dig out of the
interpreter's frames), not impossible.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.align.rewards import Reward
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import after_thought
from moesaic.worlds.sandbox import Limits, run_python

BLOCK = re.compile(r"^[ \t]*```(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)

# Reads what to do before the answer can, and leaves nothing on stdin or on disk for it to read again.
BESIDE = """
def run():
    import json, os, sys
    asked = json.load(sys.stdin)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    os.unlink(__file__)
    write, dumps, word = os.write, json.dumps, asked.pop("word")
    space = {"__name__": "answer"}
    exec(compile(asked["code"], "answer.py", "exec"), space)
    for number, test in enumerate(asked["tests"]):
        try:
            verdict = dumps(eval(test["call"], space)) if "call" in test else exec(test["code"], space) or "true"
        except BaseException:
            continue
        sys.stdout.flush()
        write(1, f"\\n{word} {number} {verdict}\\n".encode())
run()
"""


@dataclass(frozen=True)
class CodeTests(Reward):
    parallel: ClassVar[int] = 4

    share: bool = False  # the share of tests that pass; else 1 only if all do
    bare: bool = False  # whether an answer without a block of code is taken as code
    seconds: float = 5.0  # for each program, and for all calls and asserts of an answer together
    memory_mb: int = 512

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.memory_mb < 64:
            raise ValueError("seconds must be above 0, and memory_mb at least 64")

    def __call__(self, answer: Answer) -> float:
        tests = [_checked(test) for test in answer.facts.get("tests", ())]
        if not tests:
            raise ValueError("the question came without tests")
        code = self.code_in(answer.text)
        if code is None:
            return 0.0
        passed = self._beside(code, [test for test in tests if "input" not in test])
        passed += sum(self._program(code, test) for test in tests if "input" in test)
        return passed / len(tests) if self.share else float(passed == len(tests))

    def lacks(self, example: Example) -> str:
        return "" if example.facts.get("tests") else "tests"

    def code_in(self, text: str) -> str | None:
        """The last block of code behind the thoughts."""
        said = after_thought(text)
        blocks = BLOCK.findall(said)
        return blocks[-1] if blocks else (said or None) if self.bare else None

    def _limits(self) -> Limits:
        return Limits(seconds=self.seconds, memory_mb=self.memory_mb)

    def _program(self, code: str, test: dict[str, Any]) -> bool:
        result = run_python(code, stdin=test["input"], limits=self._limits())
        return result.ok and _lines(result.stdout) == _lines(test["output"])

    def _beside(self, code: str, tests: Sequence[dict[str, Any]]) -> int:
        """How many calls and asserts pass; those said before the time was over count."""
        if not tests:
            return 0
        word = secrets.token_hex(16)
        unsolved = [{key: test[key] for key in ("call", "code") if key in test} for test in tests]
        asked = json.dumps({"code": code, "word": word, "tests": unsolved})
        said = run_python(BESIDE, stdin=asked, limits=self._limits()).stdout
        passed = set()
        for number, verdict in re.findall(rf"^{word} (\d+) (.*)$", said, re.MULTILINE):
            test = tests[int(number)]
            try:
                if "call" not in test or same(json.loads(verdict), test["value"]):
                    passed.add(int(number))
            except (ValueError, RecursionError):
                continue
        return len(passed)


def same(said: Any, value: Any) -> bool:
    """Equal as JSON has it, so that a tuple is a list; numbers with a point to nine digits; True is not 1."""
    if isinstance(said, float) or isinstance(value, float):
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (said, value))
        return numbers and math.isclose(said, value, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(said, list) and isinstance(value, list | tuple):
        return len(said) == len(value) and all(map(same, said, value))
    if isinstance(said, dict) and isinstance(value, dict):
        wanted = {str(key): inner for key, inner in value.items()}
        return said.keys() == wanted.keys() and all(same(said[key], wanted[key]) for key in said)
    return type(said) is type(value) and bool(said == value)


def _checked(test: Any) -> dict[str, Any]:
    if isinstance(test, str):
        return {"code": test}
    if isinstance(test, dict):
        if test.keys() == {"call", "value"} and isinstance(test["call"], str):
            return test
        if test.keys() == {"input", "output"} and all(isinstance(part, str) for part in test.values()):
            return test
    raise ValueError(f"not a test: {str(test)[:80]}; give code, or call and value, or input and output")


def _lines(text: str) -> list[str]:
    """Spaces at the end of a line, and empty lines at the end, do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
