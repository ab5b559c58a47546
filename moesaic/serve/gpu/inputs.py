"""What the host tells the device of a step, packed into one array so that it travels in one piece.

A step has room for a fixed number of rows, of rows that are followed by a token, and of tiles of attention; what is not
used is filled with rows that are no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.kernels.triton.attention.paged import SPLIT


@dataclass(frozen=True)
class Shape:
    tokens: int  # rows
    chosen: int  # rows followed by a token
    tiles: int
    pieces: int  # of the longest sequence's keys; how many there is room for changes no bit of the result
    answers: bool  # every row is followed by a token


@dataclass(frozen=True)
class CohortRows:
    """Sequences with one new row each, whose token is the one chosen for their slot, and which a token follows."""

    slots: np.ndarray
    places: np.ndarray
    temperatures: np.ndarray
    draws: np.ndarray


@dataclass
class Part:
    """The new rows of one other sequence."""

    slot: int
    start: int  # tokens of it that were computed before
    tokens: Sequence[int]
    followed: int  # of its rows, the last ones, by a token each
    temperature: float = 0.0
    draws: Sequence[float] = ()  # for each of those, where there is a temperature


def power(base: int, least: int) -> int:
    size = 1
    while size < least:
        size *= base
    return size


def rounded(count: int) -> int:
    """The next of 16, 24, 32, 48, 64 ...: few shapes, and never more than half as much again."""
    size = max(16, power(2, count))
    return size // 4 * 3 if size // 4 * 3 >= max(count, 16) else size


def shape_for(cohort: CohortRows, parts: Sequence[Part], sequences: int, tile: int) -> Shape:
    """`sequences` is the most there can be, `tile` how many rows of one sequence attend together."""
    rows = len(cohort.slots) + sum(len(part.tokens) for part in parts)
    followed = len(cohort.slots) + sum(part.followed for part in parts)
    if rows == followed:
        longest = max([int(cohort.places.max(initial=0)) + 1, *(part.start + len(part.tokens) for part in parts)])
        size = power(2, rows)
        return Shape(size, size, size, power(2, -(-longest // SPLIT)), answers=True)
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
    def of(cohort: CohortRows, parts: Sequence[Part], sequences: int, tile: int) -> Inputs:
        shape = shape_for(cohort, parts, sequences, tile)
        words = Inputs.empty(shape)
        given = Inputs.views(shape, words)
        row = chosen = len(cohort.slots)
        given["tokens"][:row] = -1
        given["slots"][:row] = given["followed"][:row] = cohort.slots
        given["places"][:row] = cohort.places
        given["temperatures"][:row] = cohort.temperatures
        given["draws"][:row] = cohort.draws
        for part in parts:
            end = row + len(part.tokens)
            given["tokens"][row:end] = part.tokens
            given["slots"][row:end] = part.slot
            given["places"][row:end] = np.arange(part.start, part.start + len(part.tokens))
            if part.followed:
                these = slice(chosen, chosen + part.followed)
                if not shape.answers:
                    given["rows"][these] = np.arange(end - part.followed, end)
                given["followed"][these] = part.slot
                if part.temperature > 0:
                    given["temperatures"][these], given["draws"][these] = part.temperature, part.draws
                chosen += part.followed
            row = end
        if not shape.answers:
            given["rows"][: len(cohort.slots)] = np.arange(len(cohort.slots))
            tiles = [(number, 1) for number in range(len(cohort.slots))]
            row = len(cohort.slots)
            for part in parts:
                end = row + len(part.tokens)
                tiles += [(start, min(tile, end - start)) for start in range(row, end, tile)]
                row = end
            given["tiles"].reshape(-1, 2)[: len(tiles)] = tiles
        return Inputs(shape, words)
