"""A Hugging Face checkpoint on disk, read one tensor at a time, refused with a reason if anything about it is off.

Only safetensors are read: nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moesaic.errors import UserError

# Everything a directory may hold beside weights and config, carried along unread.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
MAX_HEADER = 100 * 2**20
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class Source(Protocol):
    """Where a model comes from: a Hugging Face directory or a GGUF file."""

    config: dict[str, Any]
    place: Path

    @property
    def files(self) -> dict[str, bytes]:
        """The other files of the directory, by name."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """A directory with config.json and safetensors, sharded or not."""

    def __init__(self, path: str | Path) -> None:
        self.place = Path(path)
        if not self.place.is_dir():
            what = "is a file, not a directory" if self.place.exists() else "no such directory"
            raise UserError(path, what, "Name a directory that holds config.json and model.safetensors.")
        self.config = read_json(self.place / "config.json")
        self._headers: dict[str, dict[str, tuple[int, ...]]] = {}
        self._home: dict[str, Path] = {}
        for file in self._weight_files():
            for name, shape in _header(file).items():
                if name in self._home:
                    raise UserError(file, f"{name} is also in {self._home[name].name}", "Remove one of the two files.")
                self._home[name] = file
                self._headers.setdefault(file.name, {})[name] = shape
        self._check_index()

    @property
    def files(self) -> dict[str, bytes]:
        found = {}
        for name in SIDE_FILES:
            file = self.place / name
            if file.is_file():
                try:
                    found[name] = file.read_bytes()
                except OSError as error:
                    raise UserError(file, f"cannot be read ({error.strerror})", "Check its permissions.") from None
        return found

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in set(self._home.values()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for header in self._headers.values() for name, shape in header.items()}

    def tensor(self, name: str) -> Tensor:
        file = self._home[name]
        try:
            with safe_open(file, "pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(file, f"{name} cannot be read ({error})", "Copy the file again.") from None
        return tensor

    def _weight_files(self) -> Iterator[Path]:
        index = self.place / "model.safetensors.index.json"
        single = self.place / "model.safetensors"
        if index.is_file():
            for name in sorted(set(_weight_map(index).values())):
                file = self.place / name
                if not file.is_file():
                    raise UserError(index, f"names {name}, which is not there", "Copy the missing file.")
                yield file
        elif single.is_file():
            yield single
        else:
            pickled = [p.name for p in self.place.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            if pickled:
                raise UserError(
                    self.place / pickled[0],
                    "pickled weights are never opened, since loading them can run any code",
                    "Save the model as safetensors.",
                )
            raise UserError(self.place, "no model.safetensors", "Name a directory that holds a model's weights.")

    def _check_index(self) -> None:
        index = self.place / "model.safetensors.index.json"
        if not index.is_file():
            return
        for name, file in _weight_map(index).items():
            if name not in self._headers.get(file, {}):
                raise UserError(index, f"says {name} is in {file}, but it is not", "Copy index and shards again.")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON mapping from a file."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(file, "no such file", "Name a directory that holds a model.") from None
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror})", "Check its permissions.") from None
    except UnicodeDecodeError:
        raise UserError(file, "is not UTF-8 text", "Copy the file again.") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(file, f"is not JSON ({error})", "Copy the file again.") from None
    if not isinstance(content, dict):
        raise UserError(file, f"holds a {type(content).__name__}, not a mapping", "Copy the file again.")
    return content


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise UserError(index, "has no weight_map", "Copy the file again.")
    for name, file in mapping.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise UserError(index, f"{name} is not in a safetensors file but in {str(file)[:60]!r}", "Correct the index.")
        if Path(file).name != file or file.startswith("."):
            raise UserError(index, f"{name} points outside the directory, to {file!r}", "Correct the index.")
    return mapping


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a safetensors file, after checking that every byte it promises is there, once."""
    again = "Copy it again, or run moesaic convert on the original."

    def refuse(problem: str) -> UserError:
        return UserError(file, problem, again)

    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))[0]
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise refuse("is not a safetensors file, or truncated in its header")
            raw = opened.read(length)
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror})", "Check its permissions.") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise refuse("has a corrupt header") from None
    if not isinstance(header, dict):
        raise refuse("has a corrupt header")
    shapes, extents = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
                type(n) is int and n >= 0 for n in shape
            ):
                pass
            case _:
                raise refuse(f"has a corrupt entry for {name}")
        if dtype not in DTYPES:
            raise refuse(f"{name} has type {dtype}, and only {', '.join(DTYPES)} can be read")
        count = 1
        for n in shape:
            count *= n
        if not 0 <= begin <= end or end - begin != count * BYTES[dtype]:
            raise refuse(f"has a corrupt entry for {name}")
        shapes[name] = tuple(shape)
        extents.append((begin, end))
    position = 0
    for begin, end in sorted(extents):
        if begin != position:
            raise refuse("has tensors that overlap or leave gaps")
        position = end
    if 8 + length + position != size:
        state = "truncated" if size < 8 + length + position else "longer than its header says"
        raise refuse(f"{state} ({readable(size)} of {readable(8 + length + position)})")
    return shapes


def readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
