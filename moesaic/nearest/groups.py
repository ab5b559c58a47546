"""Lists of nearly nearest neighbours: k-means groups that overlap, and inside each group all pairs.

A vector belongs to its few nearest groups, so that two near ones seldom share none. All pairs of a group are one dense
product, which a processor does many times faster than as many pairs here and there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.nearest.codes import Codes, library, long, pointer
from moesaic.nearest.exact import inner_products

ROUNDS = 6  # of k-means
SAMPLE = 48  # vectors a group that k-means sees
FOUND = np.dtype([("id", np.uint32), ("far", np.float32)])  # who, and the squared distance
NOBODY = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Groups:
    members_M: np.ndarray  # of uint32: those of the first group, then of the second, ...
    starts_G: np.ndarray  # of int64, one more than there are groups
    entries_G: np.ndarray  # of uint32: the vector nearest the middle of each group


def group(rows_ND: np.ndarray, middle_D: np.ndarray, size: int, overlap: int, seed: int) -> Groups:
    """About one group per `size` vectors, each vector in `overlap` of them."""
    count = len(rows_ND)
    groups = int(np.clip(count // size, 1, 1024))
    random = np.random.default_rng(seed)
    sample_S = np.sort(random.choice(count, min(count, SAMPLE * groups), replace=False))
    sample_SD = np.ascontiguousarray(rows_ND[sample_S], dtype=np.float32) - middle_D
    centres_GD = sample_SD[np.sort(random.choice(len(sample_SD), groups, replace=False))]
    for _ in range(ROUNDS if groups > 1 else 0):
        nearest_S = closeness(sample_SD, centres_GD).argmax(axis=1)
        order_S = np.argsort(nearest_S, kind="stable")
        held_G, first_G = np.unique(nearest_S[order_S], return_index=True)
        sums_GD = np.add.reduceat(sample_SD[order_S], first_G, axis=0)
        centres_GD[held_G] = sums_GD / np.diff(np.append(first_G, len(order_S)))[:, None]
    overlap = min(overlap, groups)
    chosen = np.empty((count, overlap), dtype=np.int32)
    best_G, entries_G = np.full(groups, -np.inf, dtype=np.float32), np.zeros(groups, dtype=np.uint32)
    for first in range(0, count, 8192):
        part_BD = np.ascontiguousarray(rows_ND[first : first + 8192], dtype=np.float32) - middle_D
        close_BG = closeness(part_BD, centres_GD)
        part_BO = np.argpartition(-close_BG, overlap - 1, axis=1)[:, :overlap] if overlap < groups else None
        chosen[first : first + len(close_BG)] = np.arange(groups) if part_BO is None else np.sort(part_BO, axis=1)
        close_BG -= 0.5 * np.einsum("bd,bd->b", part_BD, part_BD)[:, None]  # comparable for one centre too
        most_G = close_BG.argmax(axis=0)
        better_G = close_BG[most_G, np.arange(groups)] > best_G
        best_G[better_G] = close_BG[most_G, np.arange(groups)][better_G]
        entries_G[better_G] = (most_G + first)[better_G]
    flat_M = chosen.ravel()
    members_M = (np.argsort(flat_M, kind="stable") // overlap).astype(np.uint32)
    starts_G = np.concatenate([[0], np.cumsum(np.bincount(flat_M, minlength=groups))]).astype(np.int64)
    return Groups(members_M, starts_G, entries_G)


def closeness(rows_BD: np.ndarray, centres_GD: np.ndarray) -> np.ndarray:
    """The greater the nearer; comparable for one row."""
    products_BG = inner_products(rows_BD, np.ascontiguousarray(centres_GD))
    return products_BG - 0.5 * np.einsum("gd,gd->g", centres_GD, centres_GD)


def neighbour_lists(codes: Codes, groups: Groups, length: int, threads: int) -> np.ndarray:
    lists_NK = np.empty((len(codes.records_NB), length), dtype=FOUND)
    lists_NK["far"], lists_NK["id"] = np.inf, NOBODY
    library().nearest_lists(
        *codes.place, pointer(groups.members_M), pointer(groups.starts_G), long(len(groups.entries_G)),
        pointer(lists_NK), long(length), threads,
    )  # fmt: skip
    return lists_NK
