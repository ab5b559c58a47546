"""Vectors as codes of 8 or 4 bits a number, with a unit and a length each: what is held in memory to choose candidates.

A fixed rotation, drawn by a seed, spreads every vector evenly over its numbers first, so that one unit per vector
serves all of them whatever the data.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.nearest.exact import address

BLOCK = 64  # numbers that one Hadamard transform mixes


def library() -> Any:
    kernels = native.kernels()
    if kernels is None:
        raise UserError("graph search", "needs a C compiler, and there is none", "Install gcc or clang.")
    return kernels.library


@dataclass(frozen=True)
class Codes:
    records_NB: np.ndarray  # of bytes: the codes, then two floats, the unit and the squared length
    bits: int
    middle_D: np.ndarray  # the mean, which was subtracted
    signs_3P: np.ndarray  # of the rotation
    given: int  # dimensions, of which there are P after padding

    @classmethod
    def of(cls, rows_ND: np.ndarray, bits: int, seed: int = 0, threads: int | None = None) -> Codes:
        count, given = rows_ND.shape
        padded = -(-given // BLOCK) * BLOCK
        middle_D = mean(rows_ND)
        signs_3P = np.random.default_rng(seed).choice(np.array([-1, 1], dtype=np.float32), size=(3, padded))
        records_NB = np.empty((count, padded * bits // 8 + 8), dtype=np.uint8)
        encode = library().nearest_encode
        for first in range(0, count, 1 << 16):
            part_ND = np.ascontiguousarray(rows_ND[first : first + (1 << 16)], dtype=np.float32)
            encode(
                pointer(part_ND), long(len(part_ND)), long(given), pointer(middle_D), pointer(signs_3P), long(padded),
                long(BLOCK), bits, pointer(records_NB[first:]), long(records_NB.shape[1]),
                threads or torch.get_num_threads(),
            )  # fmt: skip
        return cls(records_NB, bits, middle_D, signs_3P, given)

    @property
    def padded(self) -> int:
        return self.signs_3P.shape[1]

    @property
    def place(self) -> tuple[ctypes.c_void_p, ctypes.c_long, ctypes.c_long]:
        """Where they are, as native code is told."""
        return pointer(self.records_NB), long(self.records_NB.shape[1]), long(self.padded)

    def decoded(self) -> np.ndarray:
        """The points that the codes stand for, centred and rotated."""
        body = self.padded * self.bits // 8
        units_N = self.records_NB[:, body : body + 4].copy().view(np.float32)[:, 0]
        if self.bits == 8:
            numbers_NP = self.records_NB[:, :body].view(np.int8).astype(np.float64)
        else:
            halves = self.records_NB[:, :body].reshape(len(self.records_NB), -1, 16)
            numbers_NP = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(halves), -1) - 7.5
        decoded_NP: np.ndarray = numbers_NP * units_N[:, None].astype(np.float64)
        return decoded_NP

    def save(self, folder: Path) -> None:
        np.save(folder / f"codes{self.bits}.npy", self.records_NB)
        np.savez(folder / "rotation.npz", middle=self.middle_D, signs=self.signs_3P)

    @classmethod
    def load(cls, folder: Path, bits: int) -> Codes:
        with np.load(folder / "rotation.npz") as rotation:
            middle_D, signs_3P = rotation["middle"], rotation["signs"]
        records_NB = np.load(folder / f"codes{bits}.npy", mmap_mode="r")
        return cls(records_NB, bits, middle_D, signs_3P, len(middle_D))


def mean(rows_ND: np.ndarray) -> np.ndarray:
    sums_D = np.zeros(rows_ND.shape[1])
    for first in range(0, len(rows_ND), 1 << 14):
        sums_D += rows_ND[first : first + (1 << 14)].sum(axis=0, dtype=np.float64)
    return (sums_D / max(1, len(rows_ND))).astype(np.float32)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(array))


def long(number: int) -> ctypes.c_long:
    return ctypes.c_long(number)
