"""Which shapes of steps an engine will run, so that it can capture them before the first request comes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moesaic.kernels.cuda.step_inputs import (
    ChunkRows,
    DecodeRows,
    StepShape,
    Tiling,
    next_power,
    padded_rows,
    plan_for,
    shape_for,
)
from moesaic.kernels.triton.attention.paged import SPLIT


def expected_shapes(max_sequences: int, max_tokens: int, max_length: int, tiling: Tiling) -> list[StepShape]:
    """All of them, where prompts attend to what is cached as answers do; where they attend to expanded latents, those
    of prompts that are read in one piece. The largest come first: the memory of a graph serves smaller ones after it.
    """
    found: dict[StepShape, None] = {}
    for rows in reversed(_row_counts(max(max_tokens, max_sequences))):
        for sampled in reversed(_powers(8, min(rows - 1, max_sequences))):
            count = min(sampled, rows - 1, max_sequences)
            found[_shape(0, _prompts(count, rows), max_sequences, tiling)] = None
        for shape in _beside_answers(rows, max_sequences, tiling) if tiling.prompt_rows else ():
            found[shape] = None
    for splits in reversed(_powers(2, -(-max_length // SPLIT))):
        for rows in reversed(_powers(2, max_sequences)):
            found[StepShape(rows, rows, rows, splits, decode_only=True)] = None
    return list(found)


def _beside_answers(rows: int, max_sequences: int, tiling: Tiling) -> Iterator[StepShape]:
    """Of steps with one prompt beside sequences that decode: how many latents are expanded is a power of two, of which
    two may go with one number of rows."""
    for power in _powers(4, max_sequences - 1):
        decoding = min(power, max_sequences - 1)
        for prompt in (rows - decoding, next_power(2, rows) // 2):
            if decoding > 0 and prompt > 0 and padded_rows(prompt + decoding) == padded_rows(rows):
                yield _shape(decoding, _prompts(1, prompt), max_sequences, tiling)


def _row_counts(most: int) -> list[int]:
    """The largest number of rows of each padded size."""
    sizes = sorted({padded_rows(count) for count in _bounds(most)})
    return [max(2, min(size, most)) for size in sizes]


def _bounds(most: int) -> Iterator[int]:
    size = 16
    while size < most:
        yield size
        yield size // 2 * 3
        size *= 2
    yield most


def _powers(base: int, most: int) -> list[int]:
    """1, base ... and the first that is no less than `most`."""
    found = [1]
    while found[-1] < most:
        found.append(found[-1] * base)
    return found


def _prompts(count: int, rows: int) -> list[ChunkRows]:
    """So many prompts, of as many rows in all, read to their ends."""
    lengths = [rows // count + (number < rows % count) for number in range(count)]
    return [ChunkRows(slot, 0, range(length), 1, prompt=length) for slot, length in enumerate(lengths)]


def _shape(decoding: int, prompts: list[ChunkRows], max_sequences: int, tiling: Tiling) -> StepShape:
    nothing = np.zeros(decoding, np.int32)
    batch = DecodeRows(nothing, nothing, nothing, nothing)
    return shape_for(batch, prompts, max_sequences, tiling, plan_for(prompts, tiling))
