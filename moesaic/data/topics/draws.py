"""Draws of a topic model: a hash for each token, by its position among all, so that nothing else decides them."""

from __future__ import annotations

import hashlib

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys(seed: int, iteration: int, steps: int) -> np.ndarray:
    """Four for each step of an iteration."""
    digest = hashlib.shake_128(f"{seed} {iteration}".encode()).digest(32 * steps)
    return np.frombuffer(digest, "<u8").reshape(steps, 4)


def places(first: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (np.arange(count, dtype=np.uint64) + np.uint64(first + 1)) * GOLDEN


def mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's mixing."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def scaled(bits_T: np.ndarray, topics: int) -> np.ndarray:
    return ((bits_T & np.uint64(0xFFFFFFFF)) * np.uint64(topics) >> np.uint64(32)).astype(np.uint16)


def share(bits_T: np.ndarray) -> np.ndarray:
    return (bits_T >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
