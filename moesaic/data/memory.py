"""Episodic memory on two levels: some sequences in RAM, more on disk, and a carousel that turns between them.

Carousel Memory (Lee et al. 2021): what does not fit in RAM is not thrown away but waits on disk, and a few sequences
are exchanged in the background at every step, so that replay sees in time all that is remembered. What is remembered is
a sample of the stream: domains share the places evenly, and within a domain every sequence has the same chance (a
reservoir), however long the stream is.

The file on disk is only ever appended to, and what it holds is never changed: a checkpoint is a prefix of it, with a
table of the places in use. So the state of a run is small, whoever reads in the background reads what will not change,
and a killed run goes on with the same bits. A place that is given to another sequence leaves its old one in the file;
the chance of that falls as the stream goes on, so the file grows with the logarithm of the stream's length.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import UserError

FILE = "sequences.tokens"
WHERE, LENGTH, DOMAIN = range(3)  # columns of an entry: first byte in the file, tokens, number of its domain
ITEM = np.dtype("<i4")
APART = 8  # one of so many remembered sequences is never replayed, where something is to be measured


class EpisodicMemory:
    def __init__(self, folder: Path, ram: int, disk: int, swap: int, seed: int = 0, *, apart: bool = False) -> None:
        self.folder, self.ram, self.places, self.swap, self.seed = folder, ram, max(ram, disk), swap, seed
        self.apart = apart  # whether some of what is remembered is kept apart, to measure on
        self.turns = 0  # how often something was drawn: every draw is a function of the seed and of this
        self.table_P3 = np.zeros((0, 3), np.int64)  # the places in use
        self.held: list[tuple[np.ndarray, np.ndarray]] = []  # in RAM: entry and tokens
        self.seen: dict[int, int] = {}  # sequences of each domain that came by
        self.size = self.crc = 0
        self._coming: tuple[np.ndarray, np.ndarray, Future[list[np.ndarray]]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="carousel")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / FILE, "a+b", buffering=0)  # noqa: SIM115 - it stays open for as long as the run

    # -- remembering

    def remember(self, sequences: Sequence[np.ndarray], domains: Sequence[int]) -> None:
        if not self.size:
            self._file.truncate(0)  # of a run that was killed before its first checkpoint
        random = self._draw()
        for tokens, domain in zip(sequences, domains, strict=True):
            self.seen[domain] = self.seen.get(domain, 0) + 1
            place = self._place(domain, random)
            if place is None:
                continue
            entry = np.array([self.size, len(tokens), domain])
            raw = tokens.astype(ITEM).tobytes()
            self._file.write(raw)
            self.size, self.crc = self.size + len(raw), zlib.crc32(raw, self.crc)
            if place < len(self.table_P3):
                old = int(self.table_P3[place, WHERE])
                self.table_P3[place] = entry
                for number, (held, _) in enumerate(self.held):
                    if held[WHERE] == old:
                        self.held[number] = entry, tokens
            else:
                self.table_P3 = np.concatenate([self.table_P3, entry[None]])
            if len(self.held) < self.ram and all(held[WHERE] != entry[WHERE] for held, _ in self.held):
                self.held.append((entry, tokens))

    def _place(self, domain: int, random: np.random.Generator) -> int | None:
        """The place that a sequence gets, if any."""
        if len(self.table_P3) < self.places:
            return len(self.table_P3)
        domains, counts = np.unique(self.table_P3[:, DOMAIN], return_counts=True)
        own = int(counts[domains == domain].sum())
        if own < self.places // len(self.seen):  # its share is not full: the largest gives one of its own
            given = domains[counts.argmax()]
        elif random.random() < own / self.seen[domain]:
            given = domain
        else:
            return None
        return int(random.choice(np.flatnonzero(self.table_P3[:, DOMAIN] == given)))

    # -- replay

    def replay(self, tokens: int, without: set[int]) -> list[tuple[np.ndarray, int]]:
        """Sequences in RAM of about so many tokens, the last one cut, and their domains; none of the domains that are
        being learned anyway. Then the carousel turns."""
        self._arrive()
        random = self._draw()
        able = [number for number, (entry, _) in enumerate(self.held) if int(entry[DOMAIN]) not in without]
        if self.apart:
            able = [number for number in able if _hash(self.held[number][0]) % APART]
        found = []
        for number in random.permutation(able):
            if tokens < 2:
                break
            entry, sequence = self.held[number]
            found.append((sequence[:tokens], int(entry[DOMAIN])))
            tokens -= len(sequence)
        self._turn(random)
        return found

    def _turn(self, random: np.random.Generator) -> None:
        """Begin to read a few sequences that are not in RAM, which replace some that are, at the next replay."""
        outside = self._outside()
        count = min(self.swap, len(outside), len(self.held))
        if not count:
            return
        entries_N3 = self.table_P3[random.choice(outside, count, replace=False)]
        leaving = random.choice(len(self.held), count, replace=False)
        self._coming = leaving, entries_N3, self._reader.submit(self._read, entries_N3)

    def _outside(self) -> list[int]:
        """Places that are not in RAM."""
        inside = {int(entry[WHERE]) for entry, _ in self.held}
        return [place for place, entry in enumerate(self.table_P3) if int(entry[WHERE]) not in inside]

    def _arrive(self) -> None:
        if self._coming is not None:
            leaving, entries_N3, reading = self._coming
            self._coming = None
            for number, entry, tokens in zip(leaving, entries_N3, reading.result(), strict=True):
                self.held[number] = entry, tokens

    def _read(self, entries_N3: np.ndarray) -> list[np.ndarray]:
        sizes = [(int(entry[LENGTH]) * ITEM.itemsize, int(entry[WHERE])) for entry in entries_N3]
        return [np.frombuffer(os.pread(self._file.fileno(), *one), ITEM).astype(np.int64) for one in sizes]

    def _draw(self) -> np.random.Generator:
        self.turns += 1
        return np.random.Generator(np.random.PCG64([self.seed, self.turns]))

    # -- how much is needed

    def never_replayed(self, each: int, without: set[int]) -> dict[int, list[np.ndarray]]:
        """Up to so many sequences of each other domain that no replay shows again: a fair measure of what is left."""
        found: dict[int, list[np.ndarray]] = {}
        entries = sorted((entry for entry in self.table_P3 if _hash(entry) % APART == 0), key=_hash)
        for domain in sorted({int(entry[DOMAIN]) for entry in entries} - without):
            found[domain] = self._read(np.array([entry for entry in entries if entry[DOMAIN] == domain][:each]))
        return found

    def resize(self, ram: int) -> None:
        """Another number of sequences in RAM: any of them leave, or any that wait on disk come."""
        if ram == self.ram:
            return
        self._arrive()
        self.ram, random = ram, self._draw()
        kept = sorted(random.permutation(len(self.held))[:ram])
        self.held = [self.held[number] for number in kept]
        outside = self._outside()
        if count := min(ram - len(self.held), len(outside)):
            entries_N3 = self.table_P3[random.choice(outside, count, replace=False)]
            self.held += zip(entries_N3, self._read(entries_N3), strict=True)

    # -- a killed run goes on

    def state(self) -> dict[str, Tensor]:
        """All but the sequences, which are on disk by then."""
        os.fsync(self._file.fileno())
        coming = self._coming
        held_N3 = np.array([entry for entry, _ in self.held], np.int64).reshape(-1, 3)
        return {
            "numbers": torch.tensor([self.turns, self.size, self.crc]),
            "table": torch.from_numpy(self.table_P3.copy()),
            "held": torch.from_numpy(held_N3),
            "seen": torch.tensor([*self.seen.items()], dtype=torch.int64).reshape(-1, 2),
            "leaving": torch.from_numpy(np.zeros(0, np.int64) if coming is None else coming[0].astype(np.int64)),
            "coming": torch.from_numpy(np.zeros((0, 3), np.int64) if coming is None else coming[1].copy()),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        self._coming = None
        if not state:  # nothing was remembered yet
            self.turns, self.table_P3, self.held, self.seen = 0, np.zeros((0, 3), np.int64), [], {}
            self.size = self.crc = 0
            return
        self.turns, size, crc = map(int, state["numbers"])
        self._cut(size, crc)
        self.table_P3 = state["table"].numpy().copy()
        held_N3 = state["held"].numpy().copy()
        self.held = list(zip(held_N3, self._read(held_N3), strict=True))
        self.seen = {int(domain): int(count) for domain, count in state["seen"]}
        if len(state["leaving"]):
            entries_N3 = state["coming"].numpy().copy()
            self._coming = state["leaving"].numpy().copy(), entries_N3, self._reader.submit(self._read, entries_N3)

    def _cut(self, size: int, crc: int) -> None:
        """Back to the first `size` bytes: what came later is remembered again."""
        path, remedy = self.folder / FILE, "Remove the run, or put the file back."
        if os.fstat(self._file.fileno()).st_size < size:
            raise UserError(path, "is shorter than when the checkpoint was saved", remedy)
        found = 0
        for start in range(0, size, 1 << 20):
            found = zlib.crc32(os.pread(self._file.fileno(), min(1 << 20, size - start), start), found)
        if found != crc:
            raise UserError(path, "has changed: its checksum is not the checkpoint's", remedy)
        self._file.truncate(size)
        self.size, self.crc = size, crc

    def close(self) -> None:
        self._reader.shutdown()
        self._file.close()


def _hash(entry: np.ndarray) -> int:
    """Of a remembered sequence, for as long as it is remembered."""
    return zlib.crc32(int(entry[WHERE]).to_bytes(8, "little"))
