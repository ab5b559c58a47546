"""Token shards: flat files of token numbers, each beside a table of its documents, and one manifest over all.

    manifest.json             what there is, of which sizes and checksums; written last, so its presence means finished
    shards/00000.tokens       numbers, two bytes each where the vocabulary allows, four elsewhere
    shards/00000.documents    a row for each document: where it ends, its domain, and its columns
    columns/NAME.npy          a column that was computed later, for all documents
    rows/                     embeddings that stand in place of some tokens (given_rows.py)
    tokenizer/                the tokenizer's files

    data = Shards(directory)                      # sizes are verified here; verify=True also reads every byte
    data.gather(starts, lengths)                  # the tokens of any spans, one flat array

Files are memory-mapped: opening is immediate, and memory holds only the document table's columns that are asked for.
Checksums are BLAKE2b: at about 1 GB/s, far above the throughput of tokenizing, no weaker hash is needed, and a changed
byte cannot go unseen, as it could with 32 bits of CRC over many shards.
"""

from __future__ import annotations

import hashlib
import io
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moesaic import atomic
from moesaic.data.checksums import checksum
from moesaic.data.given_rows import open_rows
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.strict import did_you_mean

FORMAT = 1
MANIFEST = "manifest.json"
FIXED: list[tuple[str, str]] = [("end", "<i8"), ("domain", "<u2"), ("held_out", "<u2")]
AGAIN = "Run moesaic prepare again into a new directory, or copy the file from where it is whole."


def token_type(vocabulary: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def row_type(columns: list[str]) -> np.dtype[Any]:
    return np.dtype([*FIXED, *((f"column_{name}", "<f4") for name in columns)])


def shard_files(directory: Path, number: int) -> tuple[Path, Path]:
    name = directory / "shards" / f"{number:05d}"
    return name.with_suffix(".tokens"), name.with_suffix(".documents")


class Shards:
    """Prepared data, for reading. Documents are numbered from 0 through all shards; so are tokens."""

    def __init__(self, directory: str | Path, *, verify: bool = False) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        self.domains: list[str] = [source["name"] for source in self.manifest["sources"]]
        self.documents: int = self.manifest["documents"]
        self.tokens: int = self.manifest["tokens"]
        self.vocabulary: int = self.manifest["vocabulary"]
        self._type = token_type(self.vocabulary)
        self._row = row_type(self.manifest["columns"])
        for number, shard in enumerate(self.manifest["shards"]):
            self._check(number, shard, verify)
        self._maps = [
            np.memmap(shard_files(self.directory, number)[0], self._type, "r")
            for number in range(len(self.manifest["shards"]))
        ]
        self._firsts = np.cumsum([0, *(shard["tokens"] for shard in self.manifest["shards"])])
        self.rows = open_rows(self.directory, self.tokens)
        if verify and self.rows is not None:
            self.rows.verify()

    def _check(self, number: int, shard: dict[str, Any], verify: bool) -> None:
        sizes = (shard["tokens"] * self._type.itemsize, shard["documents"] * self._row.itemsize)
        for path, size, digest in zip(shard_files(self.directory, number), sizes, shard["checksums"], strict=True):
            try:
                found = path.stat().st_size
            except FileNotFoundError:
                raise UserError(path, "is missing, though the manifest names it", AGAIN) from None
            if found != size:
                raise UserError(path, f"has changed: {found:,} bytes, and was written with {size:,}", AGAIN)
            if verify and checksum(path) != digest:
                raise UserError(path, "has changed: its checksum is not the manifest's", AGAIN)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any change of the tokens, the document table or the rows that stand in place of tokens."""
        facts = [self.manifest["vocabulary"], self.manifest["columns"], self.domains]
        facts += [[shard["tokens"], shard["documents"], shard["checksums"]] for shard in self.manifest["shards"]]
        facts += [self.rows.checksums] if self.rows is not None else []
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()

    @cached_property
    def starts(self) -> np.ndarray:
        """The first token of each document."""
        ends = self._field("end")
        counts = [shard["documents"] for shard in self.manifest["shards"]]
        ends = ends + np.repeat(self._firsts[:-1], counts)
        return np.concatenate([np.zeros(1, np.int64), ends[:-1]])

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts, append=self.tokens)

    @cached_property
    def domain(self) -> np.ndarray:
        """The number of each document's domain, which is its source, in `domains`."""
        return self._field("domain")

    @cached_property
    def held_out(self) -> np.ndarray:
        return self._field("held_out").astype(bool)

    @property
    def columns(self) -> list[str]:
        later = (path.stem for path in (self.directory / "columns").glob("*.npy"))
        return sorted({*self.manifest["columns"], *later})

    def column(self, name: str) -> np.ndarray:
        """A number for each document; one that was computed later wins over one that was prepared."""
        later = self.directory / "columns" / f"{name}.npy"
        if later.is_file():
            values = np.load(later, allow_pickle=False)
            if values.shape != (self.documents,):
                raise UserError(later, f"has {len(values)} rows for {self.documents} documents", "Compute it again.")
            return values
        if name not in self.manifest["columns"]:
            known = did_you_mean(name, self.columns)
            raise UserError(self.directory, f'the data has no column "{name}"{known}', "See data.quality, data.scores.")
        return self._field(f"column_{name}")

    def add_column(self, name: str, values: np.ndarray) -> None:
        """Keep a number for each document under a name, beside what was prepared."""
        assert values.shape == (self.documents,), "one number for each document"
        folder = self.directory / "columns"
        folder.mkdir(exist_ok=True)
        content = io.BytesIO()
        np.save(content, values.astype(np.float32))
        atomic.write_bytes(folder / f"{name}.npy", content.getvalue())

    def shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of one shard and where its documents end, both still on disk."""
        rows = np.memmap(shard_files(self.directory, number)[1], self._row, "r")
        return self._maps[number], rows["end"]

    def document(self, number: int) -> np.ndarray:
        return self.gather(self.starts[number : number + 1], self.lengths[number : number + 1])

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The tokens of spans, one after the other. A span lies within one document."""
        out = np.empty(int(lengths.sum()), np.int64)
        if not len(out):
            return out
        shard_of = np.searchsorted(self._firsts, starts, side="right") - 1
        # Within a span the distance from a token's place in the output to its place in the file is the same.
        begins = np.cumsum(lengths) - lengths
        distance = np.repeat(starts - self._firsts[shard_of] - begins, lengths)
        index = np.arange(len(out), dtype=np.int64)
        index += distance
        first = shard_of[0]
        if (shard_of == first).all():
            out[:] = self._maps[first][index]
            return out
        shard_of_T = np.repeat(shard_of, lengths)
        for shard in np.unique(shard_of):
            mine = shard_of_T == shard
            out[mine] = self._maps[shard][index[mine]]
        return out

    def _field(self, name: str) -> np.ndarray:
        files = (shard_files(self.directory, number)[1] for number in range(len(self.manifest["shards"])))
        return np.concatenate([np.fromfile(file, self._row)[name] for file in files])


def read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.exists():
        resumable = (directory / "progress.json").exists()
        problem = "its preparation was not finished" if resumable else "holds no prepared data"
        remedy = "Run the same moesaic prepare again; it resumes." if resumable else "Run moesaic prepare."
        raise UserError(directory, problem, remedy)
    manifest = read_json(path, AGAIN)
    if manifest.get("format") != FORMAT:
        raise UserError(path, "was not written by this version of moesaic prepare", "Prepare the data again.")
    return manifest
