"""The part of a GGUF file before its weights, and the weights' blocks.

The header is parsed here, not by `gguf.GGUFReader`: that one trusts every count in the file, so one flipped byte can
make it loop or allocate without end, and it takes seconds where this takes a fraction of one. Block formats are the
`gguf` package's.
"""

import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from moesaic.errors import UserError

READABLE = {
    kind
    for kind in GGMLQuantizationType
    if re.fullmatch(r"F32|F16|BF16|Q[45]_[01]|Q8_0|Q[2-6]_K|TQ[12]_0|MXFP4|IQ[1-4]_\w+", kind.name)
}
NUMBERS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
# Far above any real file, and small enough that a corrupt count costs neither memory nor time.
MOST_KEYS, MOST_TENSORS, MOST_ITEMS, LONGEST_STRING = 1 << 16, 1 << 20, 1 << 24, 1 << 24
COPY_AGAIN = "Copy or download it again."
ELEMENTS_AT_ONCE = 1 << 22  # elements dequantized in one go


class Stored(NamedTuple):
    """Where one tensor lies in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    offset: int  # from the start of the file

    def bytes(self, shape: tuple[int, ...]) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(shape) // block * size


class Metadata:
    """The file's key-value pairs, each asked for by type."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def _typed(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self.values.get(key, default)
        if value is ...:
            raise UserError(self.path, f"metadata key {key} is missing", "Use a complete GGUF file of a text model.")
        if value is not default and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise UserError(self.path, f"metadata key {key} has an unusable value {str(value)[:40]!r}", COPY_AGAIN)
        return value

    def text(self, key: str, default: Any = ...) -> str:
        return self._typed(key, (str,), default)

    def flag(self, key: str, default: Any = ...) -> bool:
        return self._typed(key, (bool,), default)

    def integer(self, key: str, default: Any = ..., least: int = 0) -> int:
        value = self._typed(key, (int, list), default)
        if isinstance(value, list):  # a value per layer
            if not value or any(item != value[0] or type(item) is not int for item in value):
                raise UserError(
                    self.path,
                    f"metadata key {key} differs between layers",
                    "Models with layers of one shape can be read.",
                )
            value = value[0]
        if value is not default and not least <= value < 1 << 31:
            raise UserError(self.path, f"metadata key {key} is {value}, which cannot be", COPY_AGAIN)
        return value

    def real(self, key: str, default: Any = ...) -> float:
        value = self._typed(key, (float, int), default)
        if value is default or (value == 0 and default is not ...):  # 0 stands for "not set" in these
            return default
        if not 0 < value < 1e30:  # nor nan
            raise UserError(self.path, f"metadata key {key} is {value}, which cannot be", COPY_AGAIN)
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    def items(self, key: str, kind: type, default: Any = ...) -> list[Any]:
        value = self._typed(key, (list,), default)
        if value is not default and any(type(item) is not kind for item in value):
            raise UserError(self.path, f"metadata key {key} is not a list of {kind.__name__}", COPY_AGAIN)
        return value


class Header:
    """`metadata` and `tensors` of a file; no count in it is believed before it is held against the bytes left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(path, "no such file", "Give the path of a .gguf file.")
        try:
            with open(path, "rb") as file:
                self._parse(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UserError(path, f"cannot be read ({error.strerror})", "Check its permissions.") from None

    def read(self, key: str, expert: int | None = None) -> torch.Tensor:
        """One stored tensor, or one expert of a stack, in float32; only a few rows are held twice at a time."""
        stored = self.tensors[key]
        shape = stored.shape if expert is None else stored.shape[1:]
        out = torch.empty(shape)
        rows, width = out.view(-1, shape[-1]).numpy(), stored.bytes(shape[-1:])
        step = max(1, ELEMENTS_AT_ONCE // shape[-1])
        try:
            with open(self.path, "rb") as file, np.errstate(all="ignore"):
                file.seek(stored.offset + (expert or 0) * stored.bytes(shape))
                for start in range(0, len(rows), step):
                    count = min(step, len(rows) - start)
                    data = np.fromfile(file, np.uint8, count * width).reshape(count, width)
                    rows[start : start + count] = dequantize(data, stored.kind)
        except (OSError, ValueError):
            raise UserError(self.path, f"tensor {key} can no longer be read: the file changed", COPY_AGAIN) from None
        return out

    def _parse(self, file: BinaryIO, size: int) -> None:
        path = self.path
        self.file, self.left, self.size = file, size, size
        if self.take(4) != b"GGUF":
            raise UserError(path, "not a GGUF file (its first bytes are not GGUF)", "Give a .gguf file.")
        version = self.number("<I")
        if version not in (2, 3):
            order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise UserError(path, f"GGUF {order} is not supported", "Use a little-endian file of version 2 or 3.")
        tensors, keys = self.number("<Q"), self.number("<Q")
        if tensors > min(MOST_TENSORS, self.left // 24) or keys > min(MOST_KEYS, self.left // 13):
            self.corrupt(f"it claims {tensors} tensors and {keys} metadata keys")
        self.metadata = Metadata(path, dict(self.unique(keys, self.pair)))
        described = dict(self.unique(tensors, self.tensor))
        align = self.metadata.integer("general.alignment", 32, least=1)
        start = -(-(size - self.left) // align) * align
        self.tensors = {name: stored._replace(offset=start + stored.offset) for name, stored in described.items()}
        end, before = start, "the header"
        for name, stored in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if stored.offset < end:
                self.corrupt(f"tensor {name} overlaps {before}")
            end, before = stored.offset + stored.bytes(stored.shape), name
            if end > size:
                raise UserError(path, f"truncated: tensor {name} ends at byte {end:,} of {size:,}", COPY_AGAIN)

    def corrupt(self, what: str) -> NoReturn:
        raise UserError(self.path, f"corrupt header: {what}", COPY_AGAIN)

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise UserError(self.path, f"truncated: the header does not end within its {self.size:,} bytes", COPY_AGAIN)
        self.left -= count
        data = self.file.read(count)
        if len(data) != count:
            raise UserError(self.path, "became shorter while it was read", COPY_AGAIN)
        return data

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        length = self.number("<Q")
        if length > min(LONGEST_STRING, self.left):
            self.corrupt(f"a string of {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise UserError(self.path, "corrupt header: a string is not UTF-8", COPY_AGAIN) from None

    def unique(self, count: int, read: Callable[[], tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for _ in range(count):
            name, value = read()
            if name in seen or not name.isprintable():
                self.corrupt(f"{name[:60]!r} " + ("appears twice" if name in seen else "is an unreadable name"))
            seen.add(name)
            yield name, value

    def kind(self, known: Any, what: str) -> Any:
        code = self.number("<I")
        try:
            return known(code)
        except ValueError:
            raise UserError(
                self.path,
                f"{what} has the unknown type {code}",
                "The file is corrupt, or newer than the gguf package: pip install -U gguf.",
            ) from None

    def pair(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.kind(GGUFValueType, f"metadata key {key[:60]!r}"), key)

    def value(self, kind: GGUFValueType, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalars(kind, 1)[0]
        kind, count = self.kind(GGUFValueType, f"metadata key {key[:60]!r}"), self.number("<Q")
        if kind == GGUFValueType.ARRAY:
            self.corrupt(f"metadata key {key[:60]!r} is a list of lists")
        if count > min(MOST_ITEMS, self.left):
            self.corrupt(f"metadata key {key[:60]!r} has {count} items")
        return [self.string() for _ in range(count)] if kind == GGUFValueType.STRING else self.scalars(kind, count)

    def scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return (values != 0).tolist() if kind == GGUFValueType.BOOL else values.tolist()

    def tensor(self) -> tuple[str, Stored]:
        name, rank = self.string(), self.number("<I")
        if not 1 <= rank <= 4:
            self.corrupt(f"tensor {name[:60]!r} has {rank} dimensions")
        shape = tuple(self.number("<Q") for _ in range(rank))[::-1]
        stored = Stored(self.kind(GGMLQuantizationType, f"tensor {name[:60]!r}"), shape, self.number("<Q"))
        if stored.kind not in READABLE:
            raise UserError(
                self.path,
                f"tensor {name} has type {stored.kind.name}, which is not supported",
                "Use a file quantized to " + ", ".join(sorted(kind.name for kind in READABLE)) + ".",
            )
        if min(shape) < 1 or shape[-1] % GGML_QUANT_SIZES[stored.kind][0]:
            self.corrupt(f"tensor {name[:60]!r} has the impossible shape {shape} for {stored.kind.name}")
        return name, stored
