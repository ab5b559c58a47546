"""Rows that records bring along: one file of embeddings for each mark in a record's text.

    {"text": "<rows> is a square, <rows> is not.", "rows": ["a.npy", "b.safetensors"]}

Files lie beside the records' own file or below it, and hold one matrix of finite numbers each; nothing is unpickled. A
document knows how many rows come where; the rows themselves are read again, and copied into the prepared directory,
once all documents are written (`keep_rows`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moesaic.data.given_rows import write_rows
from moesaic.errors import UserError
from moesaic.model.formats.tensor_file import TensorFile
from moesaic.recipe_rows import RowsSection
from moesaic.recipe_sections import DataSection

KINDS = (".npy", ".safetensors")
MOST = 1 << 28  # bytes of one file


class RowFile(NamedTuple):
    path: str
    rows: int


class Placed(NamedTuple):
    """Rows of a file, in place of so many tokens of a document from one of them on."""

    path: str
    rows: int
    at: int


@dataclass(frozen=True, slots=True)
class MarkedRows:
    """Of one record: its text's mark, and a file for each time it occurs."""

    mark: str
    files: tuple[RowFile, ...]

    def pieces(self, text: str) -> list[str]:
        """The text before, between and behind its marks."""
        return text.split(self.mark)

    def identity(self, text: str) -> str:
        """What makes two records copies: the same words around another picture are not."""
        return "\0".join([text, *(file.path for file in self.files)])


def rows_of(record: Mapping[str, Any], text: str, folder: Path, section: RowsSection) -> MarkedRows | None:
    """What a record says of its rows; None where it has none. A ValueError says what is wrong with it."""
    named = record.get(section.field)
    names = [] if named is None else [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'the field "{section.field}" is not the name of a file, nor a list of them')
    marks = text.count(section.mark)
    if marks != len(names):
        raise ValueError(f'{marks} times "{section.mark}" in its text, and files for {len(names)}')
    files = tuple(RowFile(str(path), len(read_rows(path, section.size))) for path in _within(folder, names))
    return MarkedRows(section.mark, files) if files else None


def _within(folder: Path, names: list[str]) -> Iterator[Path]:
    """A record may have come from anywhere, and is not to reach for what lies elsewhere on this machine."""
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise ValueError(f"{name[:80]!r} is not below the folder of its record")
        yield folder / name


def read_rows(path: Path, size: int) -> np.ndarray:
    """(rows, size), float16 or float32; a ValueError says what is wrong with the file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.stat().st_size > MOST:
        raise ValueError(f"{path}: larger than {MOST >> 20} MiB")
    if path.suffix == ".npy":
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            raise ValueError(f"{path}: cannot be read ({str(error)[:100]})") from None
    elif path.suffix == ".safetensors":
        found = _tensor(path)
    else:
        raise ValueError(f"{path}: is not {' or '.join(KINDS)}")
    if not isinstance(found, np.ndarray) or found.ndim != 2 or not len(found) or found.shape[1] != size:
        raise ValueError(f"{path}: its shape is {getattr(found, 'shape', 'none')}, not rows of {size} numbers")
    if not np.issubdtype(found.dtype, np.floating) or not np.isfinite(found).all():
        raise ValueError(f"{path}: holds what is no finite number")
    return found if found.dtype in (np.float16, np.float32) else found.astype(np.float32)


def _tensor(path: Path) -> np.ndarray:
    try:
        file = TensorFile(path)
    except UserError as error:
        raise ValueError(f"{path}: {error.problem}") from None
    if len(file.tensors) != 1:
        raise ValueError(f"{path}: holds {len(file.tensors)} tensors, not one")
    tensor = file.tensor(next(iter(file.tensors)))
    found: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found


def row_size(data: DataSection) -> int | None:
    """What all sources say; None where none has rows."""
    sizes = {source.name: source.rows.size for source in data.sources if source.rows is not None}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError("data.sources: rows.size", f"rows of one size are wanted: {said}", "Make them alike.")
    if sizes and data.dedupe.near:
        problem = "looks at words alone, and records with the same words may have other rows"
        raise UserError("data.dedupe.near", problem, "Leave it out where a source has rows.")
    return next(iter(sizes.values()), None)


def listed(placed: Placed, first: int) -> bytes:
    """A line of the list of rows: of a document whose first token has this number through all shards."""
    return json.dumps([placed.path, placed.rows, first + placed.at]).encode() + b"\n"


def keep_rows(directory: Path, lines: Path, size: int) -> None:
    """Copy the rows of all listed files into the prepared directory."""
    placed = [Placed(*json.loads(line)) for line in lines.read_text().splitlines()]
    if not placed:
        return
    places = np.concatenate([np.arange(one.at, one.at + one.rows) for one in placed])
    write_rows(directory, places, (_again(one, size) for one in placed), (len(places), size))


def _again(placed: Placed, size: int) -> np.ndarray:
    remedy = "Remove the directory and prepare again."
    try:
        found = read_rows(Path(placed.path), size)
    except ValueError as error:
        raise UserError(placed.path, f"has changed since its record was read: {error}", remedy) from None
    if len(found) != placed.rows:
        raise UserError(placed.path, f"has changed: {len(found)} rows, and had {placed.rows}", remedy)
    return found
