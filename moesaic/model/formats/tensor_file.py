"""One safetensors file: opened after every byte it promises was found there once, read and written a tensor at a time.

Read with plain reads, not through a memory map: memory stays at one tensor, a file that shrinks meanwhile is an error
and not a crash, and an open file stays whole while its directory is replaced.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.units import readable_bytes

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What compressed weights are made of.
INTEGERS = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn}
_NAMES = {dtype: name for name, dtype in (DTYPES | INTEGERS | FLOAT8).items()}
# Far above any real file, and small enough that a corrupt one costs neither memory nor time.
MOST_HEADER, LONGEST_NAME, MOST_DIMENSIONS = 100 * 2**20, 500, 8
_AT_ONCE = 2**30  # the kernel reads no more than two gigabytes in one call
_AGAIN = "Copy it again, or run moesaic convert on the original."

Part = tuple[int | slice, ...]


class Stored(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the start of the file


class TensorFile:
    """`tensors` says what is in it. The file stays open as long as this object lives."""

    def __init__(self, path: Path, *, integers: bool = False) -> None:
        self.path = path
        self._dtypes = DTYPES | INTEGERS | FLOAT8 if integers else DTYPES
        try:
            # Without O_NONBLOCK a pipe of this name would wait for a writer for ever.
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._handle)
            status = os.fstat(self._handle)
        except OSError as error:
            raise UserError(path, f"cannot be read ({error.strerror})", "Check its permissions.") from None
        if not stat.S_ISREG(status.st_mode):
            raise UserError(path, "is not a regular file", _AGAIN)
        self.size = status.st_size
        self.tensors = self._parse()

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        """A tensor, or the part of it that lies in one piece: some index in every dimension but the last one named."""
        stored = self.tensors[name]
        out = torch.empty(_extent(stored.shape, part)[0], dtype=stored.dtype)
        self.read_into(out, name, part)
        return out

    def read_into(self, out: Tensor, name: str, part: Part = ()) -> None:
        """The same into memory that is there: a contiguous tensor of its shape and type."""
        stored = self.tensors[name]
        shape, start = _extent(stored.shape, part)
        assert out.shape == shape and out.dtype == stored.dtype and out.is_contiguous() and out.is_cpu
        self._read(_bytes(out), stored.offset + start * stored.dtype.itemsize, name)

    def _read(self, into: memoryview, offset: int, what: str) -> None:
        done = 0
        try:
            while done < len(into):
                count = os.preadv(self._handle, [into[done : done + _AT_ONCE]], offset + done)
                if not count:
                    raise UserError(self.path, f"{what} can no longer be read: the file became shorter", _AGAIN)
                done += count
        except OSError as error:
            raise UserError(self.path, f"{what} cannot be read ({error.strerror})", _AGAIN) from None

    def _parse(self) -> dict[str, Stored]:
        head = bytearray(8)
        if self.size < 8:
            raise self._wrong(f"truncated ({readable_bytes(self.size)})")
        self._read(memoryview(head), 0, "the header")
        (length,) = struct.unpack("<Q", head)
        if length > min(MOST_HEADER, self.size - 8):
            raise self._wrong("is not a safetensors file, or truncated in its header")
        raw = bytearray(length)
        self._read(memoryview(raw), 8, "the header")
        try:
            header = json.loads(raw.decode())
        except (ValueError, RecursionError):
            raise self._wrong("has a corrupt header") from None
        if not isinstance(header, dict):
            raise self._wrong("has a corrupt header")
        header.pop("__metadata__", None)
        start = 8 + length
        found: dict[str, Stored] = {}
        for name, entry in header.items():
            if not printable(name):
                raise self._wrong(f"has a tensor with the unreadable name {name[:60]!r}")
            found[name] = self._entry(name, entry, start)
        position = start
        for stored in sorted(found.values(), key=lambda stored: (stored.offset, prod(stored.shape))):
            if stored.offset != position:
                raise self._wrong("has tensors that overlap or leave gaps")
            position += prod(stored.shape) * stored.dtype.itemsize
        if position != self.size:
            state = "truncated" if self.size < position else "longer than its header says"
            raise self._wrong(f"{state} ({readable_bytes(self.size)} of {readable_bytes(position)})")
        return found

    def _entry(self, name: str, entry: Any, start: int) -> Stored:
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if len(
                shape
            ) <= MOST_DIMENSIONS and all(type(n) is int and 0 <= n < 2**48 for n in shape):
                pass
            case _:
                raise self._wrong(f"has a corrupt entry for {name}")
        # Older files of encoders count positions in a tensor, which nobody reads.
        dtypes = self._dtypes | INTEGERS if name.endswith("position_ids") else self._dtypes
        if dtype not in dtypes:
            raise self._wrong(f"{name} has type {dtype[:20]!r}, and only {', '.join(self._dtypes)} can be read")
        if begin < 0 or end - begin != prod(shape) * dtypes[dtype].itemsize:
            raise self._wrong(f"has a corrupt entry for {name}")
        return Stored(dtypes[dtype], tuple(shape), start + begin)

    def _wrong(self, problem: str) -> UserError:
        return UserError(self.path, problem, _AGAIN)


def _extent(shape: tuple[int, ...], part: Part) -> tuple[tuple[int, ...], int]:
    """The shape of a part and its first element's number; only the last index may be a slice."""
    start, rest = 0, shape
    for place, index in enumerate(part):
        size = prod(rest[1:])
        if isinstance(index, slice):
            assert place == len(part) - 1 and index.step is None
            rows = range(rest[0])[index]
            return (len(rows), *rest[1:]), start + rows.start * size
        start, rest = start + index * size, rest[1:]
    return rest, start


def printable(name: str) -> bool:
    """Whether a name from a file can be shown in one line, and given to the system."""
    return name.isprintable() and 0 < len(name) <= LONGEST_NAME


def write(path: Path, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor | None]]]) -> None:
    """Write a file whose tensors are made one by one, so that no more than one is in memory. One that is None stays a
    hole, which others fill (`fill_box`)."""
    # Wider numbers first: then every tensor begins at a multiple of its number's size, which readers rely on.
    ordered = sorted(tensors, key=lambda entry: -entry[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape, _ in ordered:
        end = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
        for name, dtype, shape, make in ordered:
            if (fresh := make()) is None:
                os.lseek(file.fileno(), prod(shape) * dtype.itemsize, os.SEEK_CUR)
                continue
            made = fresh.detach()
            del fresh
            tensor = made.to("cpu", dtype).contiguous()
            if dtype == torch.float16 != made.dtype and tensor.isinf().sum() > made.isinf().sum():
                raise UserError(name, "holds numbers that are too large for float16", "Take bfloat16 or float32.")
            del made
            assert tensor.shape == shape, f"{name}: {tuple(tensor.shape)} for {shape}"
            _write(file.fileno(), _bytes(tensor))
            del tensor  # before the next one is made
        os.ftruncate(file.fileno(), 8 + len(text) + position)


def fill_box(handle: int, stored: Stored, box: Part, values: Tensor) -> None:
    """Write `values` to a box of a tensor in an open file: a slice for every dimension."""
    values = values.detach().to("cpu", stored.dtype).contiguous()
    inner = len(box)  # dimensions from here on lie in one piece
    while inner and values.shape[inner - 1] == stored.shape[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    starts = [index.start if isinstance(index, slice) else index for index in box]
    strides = [prod(stored.shape[dimension + 1 :]) for dimension in range(len(box))]
    runs = values.reshape(prod(values.shape[:inner]), -1)
    for number, place in enumerate(product(*(range(size) for size in values.shape[:inner]))):
        outer = [start + step for start, step in zip(starts, place, strict=False)]
        first = sum(at * stride for at, stride in zip([*outer, *starts[inner:]], strides, strict=True))
        data, offset = _bytes(runs[number]), stored.offset + first * stored.dtype.itemsize
        while len(data):
            done = os.pwrite(handle, data[:_AT_ONCE], offset)
            data, offset = data[done:], offset + done


def _write(handle: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(handle, data[:_AT_ONCE]) :]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
