"""Rows that stand in place of tokens: embeddings of images or speech that an encoder has made, beside prepared tokens.

    places = places_of(Shards("out/data"), placeholder)       # where the text has a token that holds their place
    give_rows(Shards("out/data"), places, rows_RD)            # kept in out/data/rows/, found by whoever opens the data

Or records name files of rows, and preparing does both (`record_rows.py`). A row is for one token of the shards, whose
number is then read by nobody. Packing puts rows into a batch's columns (`GIVEN` says where, `ROWS` what), and an
objective that knows them feeds them to the model in place of embeddings. None of them is ever a target. Rows are
memory-mapped; a prepared directory may have them added, or others in their place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moesaic import atomic
from moesaic.data.checksums import checksum
from moesaic.errors import UserError
from moesaic.json_files import read_json

if TYPE_CHECKING:
    from moesaic.data.shards import Shards

FOLDER, FACTS, FILES = "rows", "rows.json", ("places.npy", "values.npy")
ROWS, GIVEN = "rows", "given"  # a batch's columns: (T, D), zeros where a token is read, and (T,)
AGAIN = "Give the rows again (moesaic.data.given_rows)."


class GivenRows:
    """Of a prepared directory: `places` are numbers of tokens through all shards, in order."""

    def __init__(self, folder: Path, tokens: int) -> None:
        facts = read_json(folder / FACTS, AGAIN)
        self.folder, self.checksums = folder, facts.get("checksums")
        try:
            self.places: np.ndarray = np.load(folder / "places.npy", mmap_mode="r", allow_pickle=False)
            self.rows: np.ndarray = np.load(folder / "values.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(folder, f"cannot be read ({error})", AGAIN) from None
        problem = _wrong(self.places, self.rows, tokens)
        if problem is not None:
            raise UserError(folder, problem, AGAIN)

    def verify(self) -> None:
        if [checksum(self.folder / name) for name in FILES] != self.checksums:
            raise UserError(self.folder, "has changed: a checksum is not the one that was written", AGAIN)

    @property
    def size(self) -> int:
        return int(self.rows.shape[1])

    def targets_lost(self, starts: np.ndarray, lengths: np.ndarray) -> int:
        """How many tokens of pieces have a row behind them in the same piece, which nobody is to predict."""
        return int(np.sum(np.searchsorted(self.places, starts + lengths) - np.searchsorted(self.places, starts + 1)))

    def columns(self, starts: np.ndarray, lengths: np.ndarray) -> dict[str, Tensor]:
        """Of pieces one after the other; nothing where none of their tokens has a row."""
        begins = np.cumsum(lengths) - lengths
        place_T = np.arange(int(lengths.sum())) + np.repeat(starts - begins, lengths)
        found_T = np.searchsorted(self.places, place_T)
        given_T = self.places[np.minimum(found_T, len(self.places) - 1)] == place_T
        if not given_T.any():
            return {}
        rows_TD = np.zeros((len(place_T), self.size), np.float32)
        rows_TD[given_T] = self.rows[found_T[given_T]]
        return {ROWS: torch.from_numpy(rows_TD), GIVEN: torch.from_numpy(given_T)}


def open_rows(directory: Path, tokens: int) -> GivenRows | None:
    folder = directory / FOLDER
    return GivenRows(folder, tokens) if (folder / FACTS).is_file() else None


def places_of(data: Shards, token: int) -> np.ndarray:
    """Every place at which the prepared text has this token."""
    firsts = np.cumsum([0, *(shard["tokens"] for shard in data.manifest["shards"])])
    shards = range(len(data.manifest["shards"]))
    return np.concatenate([np.flatnonzero(data.shard(number)[0] == token) + firsts[number] for number in shards])


def give_rows(data: Shards, places: np.ndarray, rows_RD: np.ndarray) -> None:
    """Keep a row for each of these tokens, in place of those there were. Who has the data open does not see it."""
    places = np.asarray(places, np.int64)
    problem = _wrong(places, rows_RD, data.tokens)
    if problem is not None:
        raise UserError("rows", problem, "Give a row of finite numbers for each place, places in order.")
    write_rows(data.directory, places, [rows_RD], rows_RD.shape, half=rows_RD.dtype == np.float16)


def write_rows(
    directory: Path, places: np.ndarray, parts: Iterable[np.ndarray], shape: tuple[int, ...], half: bool = False
) -> None:
    """The same with what is known to be right, in parts of which one is in memory at a time."""
    kind = np.dtype(np.float16 if half else np.float32)
    room = shape[0] * shape[1] * kind.itemsize + places.nbytes + 4096
    with atomic.replacing(directory / FOLDER, room) as fresh:
        np.save(fresh / "places.npy", places)
        with (fresh / "values.npy").open("wb") as file:
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for rows_RD in parts:
                file.write(np.ascontiguousarray(rows_RD, kind).tobytes())
        sums = [checksum(fresh / name) for name in FILES]
        (fresh / FACTS).write_text(json.dumps({"rows": len(places), "size": shape[1], "checksums": sums}))


def _wrong(places: np.ndarray, rows: np.ndarray, tokens: int) -> str | None:
    if places.ndim != 1 or rows.ndim != 2 or len(places) != len(rows) or not len(rows) or not rows.shape[1]:
        return f"places of shape {places.shape} and rows of shape {rows.shape} do not belong together"
    if not np.issubdtype(places.dtype, np.integer) or not np.issubdtype(rows.dtype, np.floating):
        return f"places are {places.dtype} and rows {rows.dtype}"
    if int(places[0]) < 0 or int(places[-1]) >= tokens or bool((np.diff(places) <= 0).any()):
        return f"places are not in order, or beyond the {tokens:,} tokens there are"
    return None
