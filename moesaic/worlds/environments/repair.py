"""Code repair: a small program with a fault in it, tests that one can run, and others that one cannot see.

    moesaic evaluate DIR --suite agents environments=repair
    environment: {name: repair, functions: 3}

The program is several functions, one of which has a line that is wrong. Tests run in the sandbox (`worlds/sandbox.py`):
what the program returns there is compared out here, so that it never sees what is expected. Those that judge have other
inputs than those that are shown; a program that knows the shown answers by heart fails.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from moesaic.worlds.faulty_programs import ROUTINES, Routine
from moesaic.worlds.sandbox import Limits, run_python
from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World

SHOWN, HIDDEN = 4, 12  # tests of a function
MOST_LINES, MOST_TOLD = 200, 300
ATTEMPTS = 200  # at inputs that tell a fault

RULES = """You repair a Python program: one line of it is wrong, and some tests fail.
Your actions:
show (the program, with the numbers of its lines)
test (run the tests that you may see)
replace NUMBER: LINE (indentation counts, and begins after the blank that follows the colon)
insert NUMBER: LINE (before the line of that number)
delete NUMBER
submit (once, when it is repaired: other tests of the same functions decide)
{form}
For example: Action: replace 3:     total = 0
The program:
{program}"""

# Runs in the sandbox. Calls come on stdin; what a function returns, or how it fails, is said under a mark that the
# program cannot know before it has run.
INSIDE = """
import json, sys
asked = json.load(sys.stdin)
space = {"__name__": "program"}
said = []
try:
    exec(compile(asked["program"], "program", "exec"), space)
except BaseException as error:
    said = [["error", f"{type(error).__name__}: {error}"[:200]]] * len(asked["calls"])
else:
    for name, arguments in asked["calls"]:
        try:
            said.append(["value", json.loads(json.dumps(space[name](*arguments)))])
        except BaseException as error:
            said.append(["error", f"{type(error).__name__}: {error}"[:200]])
sys.stdout.flush()
print()
print(asked["mark"] + json.dumps(said))
"""

Call = tuple[str, list[Any]]


class Workshop(Simulation):
    def __init__(self, draw: random.Random, functions: int, seconds: float) -> None:
        self.seconds = seconds
        routines = draw.sample(ROUTINES, functions)
        faulty = draw.choice(routines)
        fault = draw.choice(faulty.faults)
        sources = [routine.broken(fault) if routine is faulty else routine.source for routine in routines]
        self.lines = "\n\n".join(source.rstrip("\n") for source in sources).splitlines()
        self.mark = f"{draw.getrandbits(64):016x}"
        self.shown, self.hidden = [], []  # calls and what they should return
        for routine in routines:
            tests = _tests(draw, routine, fault if routine is faulty else None)
            self.shown += tests[:SHOWN]
            self.hidden += tests[SHOWN:]

    def open(self) -> str:
        return RULES.format(form=FORM, program=self._program())

    def act(self, action: str) -> str | Finished:
        if found := re.fullmatch(r"(show|test|submit)\.?", action, re.I):
            verb = found[1].casefold()
            return self._submit() if verb == "submit" else self._test() if verb == "test" else self._program()
        if found := re.fullmatch(r"delete (\d{1,4})\.?", action, re.I):
            number = self._number(found[1])
            del self.lines[number]
            return f"Line {number + 1} is deleted."
        if found := re.fullmatch(r"(replace|insert) (\d{1,4}):(?: (.*))?", action, re.I):
            return self._write(found[1].casefold(), found[2], found[3] or "")
        raise Invalid(
            "That is no action here. Actions: show, test, replace NUMBER: LINE, insert NUMBER: LINE, delete "
            "NUMBER, submit."
        )

    def _write(self, verb: str, said: str, line: str) -> str:
        if verb == "insert":
            if len(self.lines) >= MOST_LINES:
                raise Invalid(f"The program has {MOST_LINES} lines, and no room for more.")
            number = self._number(said, len(self.lines) + 1)
            self.lines.insert(number, line)
            return f"Line {number + 1} is new."
        number = self._number(said)
        self.lines[number] = line
        return f"Line {number + 1} is replaced."

    def _number(self, said: str, last: int = 0) -> int:
        last = last or len(self.lines)
        if not 1 <= int(said) <= last:
            raise Invalid(f"There is no line {said}; lines are 1 to {last}.")
        return int(said) - 1

    def _program(self) -> str:
        return "\n".join(f"{number}: {line}" for number, line in enumerate(self.lines, 1))

    def _test(self) -> str:
        told = []
        for (call, wanted), (kind, value) in zip(self.shown, self._run([call for call, _ in self.shown]), strict=True):
            if kind != "value" or value != wanted:
                got = value if kind == "error" else json.dumps(value)
                given = ", ".join(map(json.dumps, call[1]))
                told.append(f"{call[0]}({given}) should be {json.dumps(wanted)}, but is {got}"[:MOST_TOLD])
        return "\n".join(told) or "All tests pass."

    def _submit(self) -> Finished:
        calls = [*self.shown, *self.hidden]
        right = sum(
            kind == "value" and value == wanted
            for (_, wanted), (kind, value) in zip(calls, self._run([call for call, _ in calls]), strict=True)
        )
        return Finished(float(right == len(calls)), f"{right} of {len(calls)} tests pass.")

    def _run(self, calls: list[Call]) -> list[list[Any]]:
        """What every call gives: its value, or why there is none."""
        asked = {"program": "\n".join(self.lines), "calls": calls, "mark": self.mark}
        result = run_python(INSIDE, stdin=json.dumps(asked), limits=Limits(seconds=self.seconds, memory_mb=256))
        nothing = [["error", result.why or "the program ended too early"]] * len(calls)
        _, mark, said = result.stdout.rpartition(f"\n{self.mark}")
        try:
            found = json.loads(said) if mark and result.ok else nothing
        except ValueError:
            return nothing
        fits = isinstance(found, list) and len(found) == len(calls)
        return found if fits and all(isinstance(entry, list) and len(entry) == 2 for entry in found) else nothing


def _tests(draw: random.Random, routine: Routine, fault: tuple[str, str] | None) -> list[tuple[Call, Any]]:
    """Inputs and right results; of a faulty function, tests that are shown and those that are hidden both notice it."""
    right = _function(routine.source, routine.name)
    drawn = [routine.inputs(draw) for _ in range(SHOWN + HIDDEN)]
    if fault is not None:
        telling = [
            arguments
            for arguments in (routine.inputs(draw) for _ in range(ATTEMPTS))
            if tells(routine, fault, arguments)
        ]
        drawn[0], drawn[SHOWN], drawn[SHOWN + 1] = telling[0], telling[1], telling[-1]
    return [
        ((routine.name, arguments), json.loads(json.dumps(right(*json.loads(json.dumps(arguments))))))
        for arguments in drawn
    ]


def tells(routine: Routine, fault: tuple[str, str], arguments: list[Any]) -> bool:
    """Whether a call goes otherwise with a fault. Ours are known to end, or to fail."""
    try:
        wrong = _function(routine.broken(fault), routine.name)(*json.loads(json.dumps(arguments)))
    except Exception:
        return True
    return bool(wrong != _function(routine.source, routine.name)(*json.loads(json.dumps(arguments))))


def _function(source: str, name: str) -> Any:
    """Of our own sources only."""
    space: dict[str, Any] = {}
    exec(source, space)
    return space[name]


@dataclass(frozen=True)
class Repair(World):
    turns: int = 12
    functions: int = 3
    seconds: float = 10.0  # for all tests

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.functions <= len(ROUTINES):
            raise ValueError(f"functions is from 1 to {len(ROUTINES)}")

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Workshop(draw, self.functions, self.seconds)
