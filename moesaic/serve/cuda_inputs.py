"""What the host tells the device of a step, packed into one array so that it travels in one piece.

A step has room for a fixed number of rows, of rows that are followed by a token, and of tiles of attention; what is not
used is filled with rows that are no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.kernels.triton.paged_attention import SPLIT


@dataclass(frozen=True)
class Shape:
    tokens: int  # rows
    chosen: int  # rows followed by a token
    tiles: int
    pieces: int  # of the longest sequence's keys; how many there is room for changes no bit of the result
    answers: bool  # one row per sequence, each followed by a token


@dataclass
class Part:
    """The new rows of one sequence: at most one token is left open, the last."""

    slot: int
    start: int  # tokens of it that were computed before
    tokens: Sequence[int]
    count: int  # one more than there are tokens, where the last is the one chosen for its slot
    followed: bool
    temperature: float = 0.0
    draw: float = 0.0


def power(base: int, least: int) -> int:
    size = 1
    while size < least:
        size *= base
    return size


def rounded(count: int) -> int:
    """The next of 16, 24, 32, 48, 64 ...: few shapes, and never more than half as much again."""
    size = max(16, power(2, count))
    return size // 4 * 3 if size // 4 * 3 >= max(count, 16) else size


def shape_for(parts: Sequence[Part], sequences: int, tile: int) -> Shape:
    rows = sum(part.count for part in parts)
    followed = sum(part.followed for part in parts)
    if all(part.count == 1 and part.followed for part in parts):
        size = power(2, rows)
        pieces = power(2, -(-max(part.start + 1 for part in parts) // SPLIT))
        return Shape(size, size, size, pieces, answers=True)
    size = rounded(rows)
    return Shape(size, power(8, followed), size // tile + min(size, sequences), 1, answers=False)


def sections(shape: Shape) -> dict[str, tuple[int, type]]:
    """Name -> (length in words of four bytes, kind of number), in the order in which they lie."""
    T, R = shape.tokens, shape.chosen
    return {
        "draws": (2 * R, np.float64),  # first, because its numbers are twice as long
        "tokens": (T, np.int32),
        "slots": (T, np.int32),
        "places": (T, np.int32),
        "rows": (0 if shape.answers else R, np.int32),
        "followed": (R, np.int32),  # the slot a chosen token goes to
        "temperatures": (R, np.float32),
        "tiles": (2 * shape.tiles, np.int32),
    }


@dataclass(frozen=True)
class Inputs:
    shape: Shape
    words: np.ndarray

    @staticmethod
    def views(shape: Shape, words: np.ndarray) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        at = 0
        for name, (length, kind) in sections(shape).items():
            found[name] = words[at : at + length].view(kind)
            at += length
        return found

    @staticmethod
    def empty(shape: Shape) -> np.ndarray:
        words = np.zeros(sum(length for length, _ in sections(shape).values()), np.int32)
        given = Inputs.views(shape, words)
        given["places"][:] = -1
        given["followed"][:] = -1
        if shape.answers:
            tiles_X2 = given["tiles"].reshape(-1, 2)
            tiles_X2[:, 0], tiles_X2[:, 1] = np.arange(shape.tiles), 1
        return words

    @staticmethod
    def of(parts: Sequence[Part], sequences: int, tile: int) -> Inputs:
        """`sequences` is the most there can be, `tile` how many rows of one sequence attend together."""
        shape = shape_for(parts, sequences, tile)
        words = Inputs.empty(shape)
        given = Inputs.views(shape, words)
        if shape.answers:
            count = len(parts)
            given["tokens"][:count] = [part.tokens[0] if part.tokens else -1 for part in parts]
            given["slots"][:count] = given["followed"][:count] = [part.slot for part in parts]
            given["places"][:count] = [part.start for part in parts]
        else:
            _fill(parts, given, tile)
        ends = [part for part in parts if part.followed]
        given["temperatures"][: len(ends)] = [part.temperature for part in ends]
        given["draws"][: len(ends)] = [part.draw for part in ends]
        return Inputs(shape, words)


def _fill(parts: Sequence[Part], given: dict[str, np.ndarray], tile: int) -> None:
    tiles_X2 = given["tiles"].reshape(-1, 2)
    row = tiles = chosen = 0
    for part in parts:
        end = row + part.count
        given["tokens"][row : row + len(part.tokens)] = part.tokens
        given["tokens"][row + len(part.tokens) : end] = -1
        given["slots"][row:end] = part.slot
        given["places"][row:end] = np.arange(part.start, part.start + part.count)
        starts = np.arange(row, end, tile)
        tiles_X2[tiles : tiles + len(starts), 0] = starts
        tiles_X2[tiles : tiles + len(starts), 1] = np.minimum(end - starts, tile)
        tiles += len(starts)
        if part.followed:
            given["rows"][chosen], given["followed"][chosen] = end - 1, part.slot
            chosen += 1
        row = end
