"""What a source of a recipe names: files, folders and patterns of them, or something that needs no download.

path: corpus.jsonl.zst | texts/ | "texts/**/*.parquet"      files, in the order of their names
path: builtin:stdlib                                        the source code of Python's standard library
path: builtin:reasoning_gym/gcd,chain_sum:max_terms=2       tasks with answers, of the training seeds
path: builtin:facts                                         planted facts and questions (see tasks/planted.py)
path: builtin:arithmetic                                    a set of such tasks (see tasks/families.py)

corpus = open_source(source)
for record in corpus.records(start): ...                    start: the `after` of any record read before
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from moesaic.data.records import Document, Format, ReadPosition, Record, is_text, read_file
from moesaic.data.tasks import as_text, check_family, tasks
from moesaic.data.tasks.families import PRESETS, split_names
from moesaic.data.tasks.planted import planted
from moesaic.errors import UserError
from moesaic.recipe_sections import SourceSection
from moesaic.strict import did_you_mean

BUILTIN = "builtin:"
FACTS = "facts"
GYM = "reasoning_gym/"
START = ReadPosition()
PIECE_BYTES, PIECE_TASKS = 8 << 20, 1024  # of what one worker of a cluster reads at a time, at least
TASKS = 10_000  # documents of a source of tasks when the recipe does not say how many

# Not part of the library proper: tests, and what was installed beside it.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Corpus(Protocol):
    """The documents of a source, always in the same order."""

    @property
    def size(self) -> int:
        """How much there is, in the units of `done`."""
        ...

    def done(self, place: ReadPosition) -> int:
        """How much of `size` lies before a place; for showing progress."""
        ...

    def state(self) -> str:
        """Changes when what would be read changes, as far as can be seen without reading it."""
        ...

    def records(self, start: ReadPosition = START, stop: ReadPosition | None = None) -> Iterator[Record]:
        """Those from one position to another, which is the end or one of the `cuts`."""
        ...

    def cuts(self, start: ReadPosition = START) -> list[ReadPosition]:
        """Positions from `start` to the end between which others may read; none, if nothing is left."""
        ...

    def sample(self, budget: int, seed: int) -> Iterator[str]:
        """Texts of about `budget` bytes, from all over the source."""
        ...


@dataclass(frozen=True)
class Files:
    """Documents in files."""

    paths: Sequence[Path]
    form: Format

    @cached_property
    def starts(self) -> list[int]:
        """The bytes before each file, and of all."""
        return list(accumulate(map(_size, self.paths), initial=0))

    @property
    def size(self) -> int:
        return self.starts[-1]

    def done(self, place: ReadPosition) -> int:
        return self.starts[min(place.file, len(self.paths))] + place.byte

    def state(self) -> str:
        facts = hashlib.blake2b(digest_size=16)
        for path in self.paths:
            stat = path.stat()
            facts.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return facts.hexdigest()

    def cuts(self, start: ReadPosition = START) -> list[ReadPosition]:
        """Between files; those of a piece have some MB together."""
        found = [start]
        for number in range(start.file + 1, len(self.paths)):
            if self.starts[number] - self.done(found[-1]) >= PIECE_BYTES:
                found.append(ReadPosition(number))
        return [*found, ReadPosition(len(self.paths))] if start.file < len(self.paths) else []

    def records(self, start: ReadPosition = START, stop: ReadPosition | None = None) -> Iterator[Record]:
        for number in range(start.file, len(self.paths) if stop is None else stop.file):
            yield from read_file(self.paths[number], self.form, start if number == start.file else ReadPosition(number))

    def sample(self, budget: int, seed: int) -> Iterator[str]:
        # The beginnings of many files rather than all of a few: files are often sorted by something.
        share = max(budget // max(len(self.paths), 1), 1 << 16)
        order = sorted(range(len(self.paths)), key=lambda number: _hash(f"{seed} {number}"))
        for number in order:
            if budget <= 0:
                return
            left = min(share, budget)
            for record in read_file(self.paths[number], self.form, ReadPosition(number)):
                if left <= 0:
                    break
                if isinstance(record, Document) and record.text:
                    text = "".join(record.pieces)[: 4 * left]
                    yield text
                    left -= len(text.encode())
                    budget -= len(text.encode())


@dataclass(frozen=True)
class Tasks:
    """Questions with their answers, of several families in turn, all of the training split."""

    families: Sequence[str]
    count: int

    @property
    def size(self) -> int:
        return self.count

    def done(self, place: ReadPosition) -> int:
        return place.record

    def state(self) -> str:
        from importlib.metadata import version

        return f"reasoning-gym {version('reasoning-gym')}"

    def cuts(self, start: ReadPosition = START) -> list[ReadPosition]:
        found = [ReadPosition(0, number) for number in range(start.record, self.count, PIECE_TASKS)]
        return [*found, ReadPosition(0, self.count)] if found else []

    def records(self, start: ReadPosition = START, stop: ReadPosition | None = None) -> Iterator[Record]:
        for number in range(start.record, self.count if stop is None else stop.record):
            yield Document(self._text(number), ReadPosition(0, number + 1))

    def sample(self, budget: int, seed: int) -> Iterator[str]:
        for number in range(self.count):
            if budget <= 0:
                return
            text = self._text(number)
            budget -= len(text.encode())
            yield text

    def _text(self, number: int) -> str:
        index, family = divmod(number, len(self.families))
        return as_text(tasks(self.families[family], "train", index))


class Episodes(Tasks):
    """Planted facts and what follows from them."""

    def state(self) -> str:
        return "planted facts 1"

    def _text(self, number: int) -> str:
        return planted(number).text()


def open_source(source: SourceSection, place: str = "data.sources") -> Corpus:
    """The corpus that a source names; `place` is where a mistake in it is to be found."""
    here = f"{place}: {source.name}"
    form = Format(source.text, source.columns, source.separator, source.rows)
    if source.path.startswith(BUILTIN):
        return _builtin(source, here, form)
    paths = [path for path in _paths(source.path, here) if _size(path)]
    if not paths:
        raise UserError(here, f"{source.path} holds no data", "Give the path of files with text in them.")
    if source.separator and not any(map(is_text, paths)):
        raise UserError(f"{here}: separator", f"{source.path} is not text, which it would divide", "Leave it out.")
    return _with_fields(Files(paths, form), here)


def _with_fields(files: Files, here: str) -> Files:
    texts = [path for path in files.paths if is_text(path)]
    if texts and (files.form.columns or files.form.rows):
        problem = f"{texts[0]} is text, whose documents have no fields"
        raise UserError(
            f"{here}: {'columns' if files.form.columns else 'rows'}",
            problem,
            "Leave it out, or name files such as *.jsonl in path.",
        )
    return files


def _builtin(source: SourceSection, here: str, form: Format) -> Corpus:
    name = source.path.removeprefix(BUILTIN)
    if name == "stdlib":
        return _with_fields(Files(_standard_library(), form), here)
    if name == FACTS:
        return Episodes((), source.documents or TASKS)
    if name in PRESETS:
        families: Sequence[str] = PRESETS[name]
    elif name.startswith(GYM):
        families = split_names(name.removeprefix(GYM))
    else:
        known = ["stdlib", FACTS, *PRESETS, GYM + "FAMILY"]
        raise UserError(here, f'there is no "{source.path}"{did_you_mean(name, known)}')
    for family in families:
        check_family(family, here, as_source=True)
    for key in ("columns", "separator", "rows"):
        if getattr(source, key):
            raise UserError(f"{here}: {key}", "tasks are text, one document each, without fields", "Leave it out.")
    return Tasks(families, source.documents or TASKS)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _paths(pattern: str, here: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _within(path)
    if not glob.has_magic(pattern):
        raise UserError(here, f"{pattern}: no such file or folder", "Paths are relative to where the command runs.")
    found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not found:
        raise UserError(here, f"{pattern}: nothing matches this pattern")
    within = [file for match in found for file in (_within(match) if match.is_dir() else [match])]
    return list(dict.fromkeys(within))  # a pattern with ** names a folder and what is in it


def _within(folder: Path) -> list[Path]:
    """Every file below a folder that is not hidden, in the order of their names."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root) / name for name in files if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.as_posix())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
