"""The inputs of a graphed step, packed into one array so that they are copied to the device in one piece.

A step has a fixed number of rows, of rows after which a token is sampled, and of attention tiles; what is not used is
padding: rows that are no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moesaic.kernels.triton.attention.paged import SPLIT
from moesaic.kernels.triton.attention.prompt_rows import CHOOSING, IN_TILES, ExpansionPlan, prompt_rows

INDEX_TILE = 32  # tokens of a sequence whose keys are scored together


@dataclass(frozen=True)
class StepShape:
    tokens: int  # rows
    sampled: int  # rows after which a token is sampled
    tiles: int
    splits: int  # of the longest sequence's keys; how many there is space for changes no bit of the result
    decode_only: bool  # a token is sampled after every row
    prompt_tiles: int = 0  # of rows that attend to expanded latents
    expanded: int = 0  # rows of latents to expand, of each round
    rounds: int = 0
    adapted: bool = False  # whether sequences may have LoRA adapters
    choosing: bool = False  # whether there are rows of prompts that attend to what an indexer chose
    index_tiles: int = 0  # of rows for which an indexer has a choice


@dataclass(frozen=True)
class DecodeRows:
    """Sequences with one new row each, whose token is the last one sampled for their slot, and after which the next one
    is sampled."""

    slots_S: np.ndarray
    positions_S: np.ndarray
    temperatures_S: np.ndarray
    draws_S: np.ndarray


@dataclass
class ChunkRows:
    """The new rows of one other sequence."""

    slot: int
    start: int  # tokens of it that were computed before
    tokens: Sequence[int]
    sampled: int  # after so many of its rows, the last ones, a token each
    temperature: float = 0.0
    draws: Sequence[float] = ()  # for each of those, where there is a temperature
    prompt: int = 0  # how many tokens of its sequence are a prompt

    def expanded(self, tiling: Tiling) -> int:
        """Rows that attend to expanded latents, where prompts do."""
        return prompt_rows(self.start, len(self.tokens), self.prompt, tiling.topk) if tiling.prompt_rows else 0

    def choosing(self, tiling: Tiling) -> int:
        """Rows of a prompt after those, that attend to what an indexer chose."""
        if not tiling.topk or not tiling.prompt_rows:
            return 0
        of_prompt = max(0, min(self.start + len(self.tokens), self.prompt) - self.start)
        return of_prompt - self.expanded(tiling)


@dataclass(frozen=True)
class Tiling:
    """How many rows of one sequence attend together; and, where prompts attend to expanded latents, of a prompt's. With
    sparse attention, to how many tokens at most."""

    rows: int
    prompt_rows: int = 0
    topk: int = 0


def next_power(base: int, at_least: int) -> int:
    size = 1
    while size < at_least:
        size *= base
    return size


def padded_rows(count: int) -> int:
    """The next of 16, 24, 32, 48, 64 ...: few shapes, and never more than half as much again."""
    size = max(16, next_power(2, count))
    return size // 4 * 3 if size // 4 * 3 >= max(count, 16) else size


def tiles_of(first: int, count: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(size, first + count - start)) for start in range(first, first + count, size)]


def shape_for(
    batch: DecodeRows, chunks: Sequence[ChunkRows], max_sequences: int, tiling: Tiling, plan: ExpansionPlan | None
) -> StepShape:
    rows = len(batch.slots_S) + sum(len(chunk.tokens) for chunk in chunks)
    sampled = len(batch.slots_S) + sum(chunk.sampled for chunk in chunks)
    choosing = any(chunk.choosing(tiling) for chunk in chunks)
    ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
    longest = max([int(batch.positions_S.max(initial=0)) + 1, *ends])
    if rows == sampled and plan is None and not choosing:
        size = next_power(2, rows)
        return StepShape(size, size, size, next_power(2, -(-longest // SPLIT)), decode_only=True)
    size = padded_rows(rows)
    # An indexer's scores need room, and it has a choice where there is more than it would choose.
    splits = next_power(4, -(-longest // SPLIT)) if tiling.topk else 1
    shape = StepShape(
        size,
        next_power(8, sampled),
        size // tiling.rows + min(size, max_sequences),
        splits,
        decode_only=False,
        choosing=choosing,
        index_tiles=size // INDEX_TILE + min(size, max_sequences) if splits * SPLIT > tiling.topk > 0 else 0,
    )
    if plan is None and not choosing:
        return shape
    others = len(batch.slots_S)
    for chunk in chunks:
        left = len(chunk.tokens) - chunk.expanded(tiling) - chunk.choosing(tiling)
        others += len(tiles_of(0, left, tiling.rows))
    shape = replace(shape, tiles=next_power(4, others) if others else 0)  # no tile is a launch less
    if plan is None:
        return shape
    return replace(
        shape,
        prompt_tiles=size // tiling.prompt_rows + min(size, max_sequences),
        expanded=plan.size,
        rounds=next_power(2, len(plan.rounds)),
    )


def plan_for(chunks: Sequence[ChunkRows], tiling: Tiling) -> ExpansionPlan | None:
    reading = [(chunk.slot, chunk.start + rows) for chunk in chunks if (rows := chunk.expanded(tiling))]
    return ExpansionPlan.of(reading) if reading else None


def sections(shape: StepShape) -> dict[str, tuple[int, type]]:
    """Name -> (length in words of four bytes, dtype), in the order in which they lie."""
    T, R = shape.tokens, shape.sampled
    return {
        "draws": (2 * R, np.float64),  # first, because its numbers are twice as long
        "tokens": (T, np.int32),
        "slots": (T, np.int32),
        "positions": (T, np.int32),
        "rows": (0 if shape.decode_only else R, np.int32),
        "sampled_slots": (R, np.int32),  # the slot a sampled token goes to
        "temperatures": (R, np.float32),
        "tiles": (2 * shape.tiles, np.int32),
        "prompt_tiles": (4 * shape.prompt_tiles, np.int32),
        "expanded_slots": (shape.rounds * shape.expanded, np.int32),
        "expanded_positions": (shape.rounds * shape.expanded, np.int32),
        "kinds": (T if shape.rounds or shape.choosing else 0, np.int32),
        "index_tiles": (2 * shape.index_tiles, np.int32),
    }


def views(shape: StepShape, words: Any) -> Iterator[tuple[str, Any, type]]:
    """Name, words and dtype of each section, of an array or of a tensor."""
    at = 0
    for name, (length, dtype) in sections(shape).items():
        yield name, words[at : at + length], dtype
        at += length


@dataclass(frozen=True)
class StepInputs:
    shape: StepShape
    words: np.ndarray

    @staticmethod
    def padding(shape: StepShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Words of rows that are no tokens, and their sections by name."""
        words = np.zeros(sum(length for length, _ in sections(shape).values()), np.int32)
        given = {name: part.view(dtype) for name, part, dtype in views(shape, words)}
        given["positions"][:] = given["expanded_positions"][:] = -1
        given["sampled_slots"][:] = -1
        if shape.decode_only:
            tiles_X2 = given["tiles"].reshape(-1, 2)
            tiles_X2[:, 0], tiles_X2[:, 1] = np.arange(shape.tiles), 1
        return words, given

    @staticmethod
    def of(
        batch: DecodeRows, chunks: Sequence[ChunkRows], max_sequences: int, tiling: Tiling, adapted: bool = False
    ) -> StepInputs:
        plan = plan_for(chunks, tiling)
        shape = replace(shape_for(batch, chunks, max_sequences, tiling, plan), adapted=adapted)
        words, given = StepInputs.padding(shape)
        row = sampled = len(batch.slots_S)
        given["tokens"][:row] = -1  # the last one sampled for the slot
        given["slots"][:row] = given["sampled_slots"][:row] = batch.slots_S
        given["positions"][:row] = batch.positions_S
        given["temperatures"][:row] = batch.temperatures_S
        given["draws"][:row] = batch.draws_S
        for chunk in chunks:
            end = row + len(chunk.tokens)
            given["tokens"][row:end] = chunk.tokens
            given["slots"][row:end] = chunk.slot
            given["positions"][row:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            if chunk.sampled:
                these = slice(sampled, sampled + chunk.sampled)
                if not shape.decode_only:
                    given["rows"][these] = np.arange(end - chunk.sampled, end)
                given["sampled_slots"][these] = chunk.slot
                if chunk.temperature > 0:
                    given["temperatures"][these], given["draws"][these] = chunk.temperature, chunk.draws
                sampled += chunk.sampled
            row = end
        if not shape.decode_only:
            given["rows"][: len(batch.slots_S)] = np.arange(len(batch.slots_S))
            tiles = [(number, 1) for number in range(len(batch.slots_S))]
            index_tiles = list(tiles)
            prompt_tiles: list[tuple[int, ...]] = []
            begins = iter(plan.begins if plan is not None else ())
            row = len(batch.slots_S)
            given["kinds"][:row] = IN_TILES
            for chunk in chunks:
                end = row + len(chunk.tokens)
                index_tiles += tiles_of(row, len(chunk.tokens), INDEX_TILE)
                if expanded := chunk.expanded(tiling):
                    begin = next(begins)
                    prompt_tiles += [(*tile, *begin) for tile in tiles_of(row, expanded, tiling.prompt_rows)]
                choosing = row + expanded + chunk.choosing(tiling)
                given["kinds"][row + expanded : choosing] = CHOOSING
                tiles += tiles_of(choosing, end - choosing, tiling.rows)
                given["kinds"][choosing:end] = IN_TILES
                row = end
            given["tiles"].reshape(-1, 2)[: len(tiles)] = tiles or np.zeros((0, 2))
            if shape.index_tiles:
                given["index_tiles"].reshape(-1, 2)[: len(index_tiles)] = index_tiles
            if plan is not None:
                given["prompt_tiles"].reshape(-1, 4)[: len(prompt_tiles)] = prompt_tiles
                plan.fill(given["expanded_slots"], given["expanded_positions"])
        return StepInputs(shape, words)
