"""A shell in which commands really run, shut in: questions about files, and changes to them (AgentBench's system).

    moesaic evaluate DIR --suite agents environments=shell

Every command runs in the sandbox that runs code for rewards (`worlds/sandbox.py`), in a file system of its own in
memory that is gone when it ends; the files it leaves in its directory are laid out again for the next one. So nothing
that a command does outlives the episode, or reaches this machine. Needs a sandbox with namespaces, in which a
program may start others.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.worlds.sandbox import Limits, run_python
from moesaic.worlds.text_actions import FORM, Finished, Simulation, World, same

INSIDE = Path(__file__).with_name("_shell_inside.py")
GRACE = 4.0  # seconds to lay files out and take them down again
OUTPUT = 2_000_000  # bytes that the program inside may say: all files, in base64

WORDS = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "harbor", "inlet", "jasper", "karst", "lagoon")
REGIONS = ("north", "south", "east", "west")

RULES = """You have a shell on a Linux machine. Each action is one command line for /bin/sh, run in your home \
directory; what it prints is shown to you. Files stay from one command to the next; variables and the \
working directory do not.
When you know the answer to a question: answer VALUE
When a change is made: finish
{form}
For example: Action: ls -l
{task}"""

Files = dict[str, Any]  # path -> [mode, kind, content in base64]


@dataclass(frozen=True)
class Task:
    text: str
    files: Files = field(repr=False)
    answer: str | None = None  # of a question,
    done: Callable[[Files], bool] = lambda files: False  # or whether a change is made


def _folder(files: Files, path: str) -> None:
    for depth in range(1, path.count("/") + 1):
        files.setdefault(path.rsplit("/", depth)[0], [0o755, "directory", ""])


def laid(texts: dict[str, str], modes: dict[str, int] | None = None) -> Files:
    """Files with these texts, and the directories they are in, those first."""
    found: Files = {}
    for path in texts:
        _folder(found, path)
    found = dict(sorted(found.items()))
    for path, text in texts.items():
        found[path] = [(modes or {}).get(path, 0o644), "file", base64.b64encode(text.encode()).decode()]
    return found


def text_of(files: Files, path: str) -> str | None:
    entry = files.get(path)
    return base64.b64decode(entry[2]).decode(errors="replace") if entry and entry[1] == "file" else None


def _notes(draw: random.Random, count: int) -> dict[str, str]:
    """Texts of a few lines in several folders."""
    found: dict[str, str] = {}
    while len(found) < count:
        path = f"{draw.choice(WORDS)}/{draw.choice(WORDS)}.{draw.choice(('txt', 'log', 'md'))}"
        lines = (" ".join(draw.choices(WORDS, k=draw.randint(3, 8))) for _ in range(draw.randint(3, 9)))
        found[path] = "".join(f"{line}\n" for line in lines)
    return found


def _count_files(draw: random.Random) -> Task:
    notes, ending, word = _notes(draw, 14), draw.choice(("txt", "log", "md")), draw.choice(WORDS)
    found = sum(path.endswith(ending) and word in text.split() for path, text in notes.items())
    text = f"Question: how many files, in all folders, have a name that ends in .{ending} and contain the word {word}?"
    return Task(text, laid(notes), str(found))


def _find_line(draw: random.Random) -> Task:
    notes, code = _notes(draw, 12), f"{draw.randrange(10**6):06d}"
    path = draw.choice(sorted(notes))
    lines = notes[path].splitlines()
    lines.insert(draw.randint(0, len(lines)), f"code {code}")
    notes[path] = "".join(f"{line}\n" for line in lines)
    text = "Question: in one file there is a line that begins with the word code. Which number follows it?"
    return Task(text, laid(notes), code)


def _sum_column(draw: random.Random) -> Task:
    rows = [(draw.choice(REGIONS), draw.choice(WORDS), draw.randint(1, 500)) for _ in range(40)]
    region = draw.choice(rows)[0]
    table = "region,item,amount\n" + "".join(f"{where},{what},{amount}\n" for where, what, amount in rows)
    text = f"Question: in data/sales.csv, what is the sum of the column amount over the lines of region {region}?"
    return Task(text, laid({"data/sales.csv": table}), str(sum(row[2] for row in rows if row[0] == region)))


def _longest_file(draw: random.Random) -> Task:
    notes = {f"logs/{word}.log": "" for word in draw.sample(WORDS, 8)}
    for path, count in zip(notes, draw.sample(range(5, 60), len(notes)), strict=True):
        notes[path] = "".join(f"{draw.choice(WORDS)}\n" for _ in range(count))
    longest = max(notes, key=lambda path: notes[path].count("\n"))
    text = "Question: which file in the folder logs has the most lines? Give its name without the folder."
    return Task(text, laid(notes), longest.removeprefix("logs/"))


def _permissions(draw: random.Random) -> Task:
    names = draw.sample(WORDS, 7)
    texts = {f"tools/{name}.{'sh' if number < 4 else 'txt'}": "echo hello\n" for number, name in enumerate(names)}
    files = laid(texts)

    def done(now: Files) -> bool:
        return set(now) == set(files) and all(
            bool(now[path][0] & 0o100) == path.endswith(".sh") and now[path][2] == files[path][2] for path in texts
        )

    text = "Change: let the owner execute every file in tools whose name ends in .sh, and none of the others."
    return Task(text, files, done=done)


def _move(draw: random.Random) -> Task:
    notes = {f"box/{name}.{'tmp' if number < 4 else 'txt'}": f"{name}\n" for number, name in enumerate(WORDS[:9])}
    moved = {path.replace("box/", "trash/") if path.endswith(".tmp") else path: text for path, text in notes.items()}

    def done(now: Files) -> bool:
        return {path: text_of(now, path) for path, entry in now.items() if entry[1] == "file"} == moved

    text = "Change: move every file of the folder box whose name ends in .tmp to a new folder trash beside it."
    return Task(text, laid(dict(draw.sample(sorted(notes.items()), len(notes)))), done=done)


def _sorted_lines(draw: random.Random) -> Task:
    lines = draw.choices(WORDS, k=30)
    wanted = "".join(f"{line}\n" for line in sorted(set(lines)))
    text = "Change: write the different lines of words.txt to a new file sorted.txt, each once, in alphabetical order."
    return Task(
        text,
        laid({"words.txt": "".join(f"{line}\n" for line in lines)}),
        done=lambda now: text_of(now, "sorted.txt") == wanted,
    )


KINDS: tuple[Callable[[random.Random], Task], ...] = (
    _count_files,
    _find_line,
    _sum_column,
    _longest_file,
    _permissions,
    _move,
    _sorted_lines,
)


class Terminal(Simulation):
    def __init__(self, draw: random.Random, number: int, seconds: float) -> None:
        self.task = KINDS[number % len(KINDS)](draw)
        self.files, self.seconds = self.task.files, seconds

    def open(self) -> str:
        return RULES.format(form=FORM, task=self.task.text)

    def act(self, action: str) -> str | Finished:
        if found := re.fullmatch(r"answer\b:?(.*)", action, re.I):
            return Finished(float(self.task.answer is not None and same(found[1], self.task.answer)))
        if re.fullmatch(r"finish\.?", action, re.I):
            return Finished(float(self.task.done(self.files)))
        return self._run(action)

    def _run(self, command: str) -> str:
        asked = {"files": self.files, "command": command, "seconds": self.seconds}
        limits = Limits(seconds=self.seconds + GRACE, disk_mb=8, memory_mb=256, output_bytes=OUTPUT)
        result = run_python(INSIDE.read_text(encoding="utf-8"), stdin=json.dumps(asked), limits=limits)
        try:
            told = json.loads(result.stdout) if result.ok else {}
        except ValueError:
            told = {}
        if result.level == "guarded" or "refused" in told:
            problem = "in the sandbox of this machine a program cannot start others, as a shell must"
            raise UserError("environments: shell", problem, "Allow user namespaces, or leave shell out.")
        if "output" not in told:
            return f"The shell broke down ({result.why or 'it said nothing'}), and files are as they were before."
        lines = [told["output"].rstrip() or "(no output)"]
        if told["code"] == 124:
            lines.append(f"(stopped, or not done after {self.seconds:g} s)")
        elif told["code"]:
            lines.append(f"({'exit code' if told['code'] > 0 else 'killed by signal'} {abs(told['code'])})")
        if "files" in told:
            self.files = told["files"]
        else:
            lines.append(f"({told['problem']}; files are as they were before)")
        return "\n".join(lines)


@dataclass(frozen=True)
class Shell(World):
    turns: int = 8
    seconds: float = 3.0  # for one command

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Terminal(draw, number, self.seconds)
