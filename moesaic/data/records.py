"""Read the records of one file: text, JSONL (plain, .gz, .zst) or parquet, without ever holding the whole file.

A record is a `Document` or, where something is wrong with it, a `BrokenRecord` with where and why; both have the
position after them, from which reading can resume. Memory is bounded by `MAX_RECORD_BYTES`, the largest record that is
accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import pyarrow
import pyarrow.parquet

from moesaic.data.record_rows import MarkedRows, rows_of
from moesaic.json_lines import is_unicode
from moesaic.recipe_rows import RowsSection

MAX_RECORD_BYTES = 64 << 20  # bytes of the largest record; a longer one is broken
BLOCK = 1 << 20
JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """Where to resume reading: a file of the source, the records of it already read, and, where possible, a byte."""

    file: int = 0
    record: int = 0
    byte: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    after: ReadPosition
    fields: Mapping[str, float] = field(default_factory=dict)
    rows: MarkedRows | None = None

    @property
    def identity(self) -> str:
        """What copies of it have, too."""
        return self.text if self.rows is None else self.rows.identity(self.text)

    @property
    def pieces(self) -> list[str]:
        """Its text, between rows."""
        return [self.text] if self.rows is None else self.rows.pieces(self.text)


@dataclass(frozen=True, slots=True)
class BrokenRecord:
    """`line` counts from 1: the line of a JSONL file, the row of a parquet one, the document of a text."""

    file: str
    line: int
    why: str
    after: ReadPosition


Record = Document | BrokenRecord


@dataclass(frozen=True)
class Format:
    """How the records of a source are written."""

    text: str = "text"
    columns: Sequence[str] = ()
    separator: str | None = None
    rows: RowsSection | None = None


def read_file(path: Path, form: Format, start: ReadPosition) -> Iterator[Record]:
    """The records of one file from `start` on; whatever is wrong with the file itself is a broken record too."""
    kind, compression = _kind(path)
    read = _parquet if kind == ".parquet" else _json_lines if kind in JSON_LINES else _text
    at = start
    try:
        for record in read(path, form, start, compression):
            yield record
            at = record.after
    # Arrow's errors are OSError and ValueError (ArrowInvalid); a cut-off archive is one of them.
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        yield BrokenRecord(str(path), at.record + 1, why[:200], ReadPosition(start.file + 1))


def is_text(path: Path) -> bool:
    """Whether it is read as text, which has no fields."""
    return _kind(path)[0] not in (".parquet", *JSON_LINES)


def _kind(path: Path) -> tuple[str, str | None]:
    """What its name says it is, and how it is compressed."""
    before, last = ["", "", *map(str.lower, path.suffixes)][-2:]
    return (before, COMPRESSED[last]) if last in COMPRESSED else (last, None)


def _text(path: Path, form: Format, start: ReadPosition, compression: str | None) -> Iterator[Record]:
    for raw, after in _split(path, form.separator, start, compression):
        text = _decode(raw)
        if isinstance(text, str):
            yield Document(text, after)
        else:
            yield BrokenRecord(str(path), after.record, text.why, after)


def _json_lines(path: Path, form: Format, start: ReadPosition, compression: str | None) -> Iterator[Record]:
    for raw, after in _split(path, "\n", start, compression):
        if raw is not None and not raw.strip():
            yield Document("", after)
            continue
        text = _decode(raw)
        if not isinstance(text, str):
            yield BrokenRecord(str(path), after.record, text.why, after)
            continue
        try:
            yield _document(json.loads(text), form, after, path.parent)
        except RecursionError:
            yield BrokenRecord(str(path), after.record, "nested too deeply", after)
        except json.JSONDecodeError as error:
            yield BrokenRecord(str(path), after.record, f"not JSON: {error.msg} at character {error.pos + 1}", after)
        except ValueError as error:  # a number of thousands of digits
            yield BrokenRecord(str(path), after.record, f"not JSON: {error}", after)
        except _WrongRecordError as error:
            yield BrokenRecord(str(path), after.record, str(error), after)


def _parquet(path: Path, form: Format, start: ReadPosition, compression: str | None) -> Iterator[Record]:
    if compression:
        raise ValueError("a parquet file is compressed inside; unpack this one")
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        wanted = [form.text, *form.columns, *([form.rows.field] if form.rows else [])]
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f'no column "{missing[0]}"; it has {", ".join(names)}')
        first = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > start.record:
                number = first
                for batch in file.iter_batches(64, row_groups=[group], columns=wanted):
                    for row in _rows(batch) if number + batch.num_rows > start.record else [None] * batch.num_rows:
                        number += 1
                        if number > start.record:
                            after = ReadPosition(start.file, number)
                            try:
                                if isinstance(row, _NotText):
                                    raise _WrongRecordError(row.why)
                                yield _document(row, form, after, path.parent)
                            except _WrongRecordError as error:
                                yield BrokenRecord(str(path), number, str(error), after)
            first += rows


def _rows(batch: pyarrow.RecordBatch) -> list[Any]:
    try:
        return cast(list[Any], batch.to_pylist())
    except UnicodeDecodeError:  # one row must not cost those around it
        return [_row(batch.slice(number, 1)) for number in range(batch.num_rows)]


def _row(batch: pyarrow.RecordBatch) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _NotText(f"not UTF-8 (byte {error.start + 1} of it)")


class _WrongRecordError(Exception):
    pass


def _document(record: Any, form: Format, after: ReadPosition, folder: Path) -> Document:
    if not isinstance(record, dict):
        raise _WrongRecordError("not an object with fields")
    if form.text not in record:
        raise _WrongRecordError(f'no field "{form.text}"; it has {", ".join(map(str, record))[:100] or "none"}')
    text = record[form.text]
    if not isinstance(text, str):
        raise _WrongRecordError(f'the field "{form.text}" is not text')
    if not is_unicode(text):
        raise _WrongRecordError(f'the field "{form.text}" is not valid Unicode (half of a pair)')
    if len(text) > MAX_RECORD_BYTES:
        raise _WrongRecordError(f"longer than {MAX_RECORD_BYTES >> 20} MiB")
    fields = {}
    for name in form.columns:
        value = record.get(name)
        if not isinstance(value, int | float) or not abs(value) < 1e38:  # as large as a column can hold; never nan
            raise _WrongRecordError(f'the field "{name}" is {"missing" if value is None else "not a number"}')
        fields[name] = float(value)
    try:
        rows = rows_of(record, text, folder, form.rows) if form.rows is not None else None
    except ValueError as error:
        raise _WrongRecordError(str(error)) from None
    return Document(text, after, fields, rows)


@dataclass(frozen=True)
class _NotText:
    why: str


def _decode(raw: bytes | None) -> str | _NotText:
    if raw is None:
        return _NotText(f"longer than {MAX_RECORD_BYTES >> 20} MiB; give the source a separator, or divide the record")
    if b"\0" in raw:
        return _NotText("binary data, not text in UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _NotText(f"not UTF-8 (byte {error.start + 1} of it)")


def _split(
    path: Path, separator: str | None, start: ReadPosition, compression: str | None
) -> Iterator[tuple[bytes | None, ReadPosition]]:
    """The pieces between separators, each with the position after it; None in place of one that is too long."""
    mark = separator.encode() if separator else None
    number = start.record if not compression else 0
    with _open(path, compression) as stream:
        if not compression:
            stream.seek(start.byte)  # an archive can only be read from its beginning
        at = start.byte
        for raw, size in _pieces(stream, mark):
            number, at = number + 1, at + size
            if number > start.record:
                yield raw, ReadPosition(start.file, number, 0 if compression else at)


def _open(path: Path, compression: str | None) -> IO[bytes]:
    if compression is None:
        return path.open("rb")
    return cast(BinaryIO, pyarrow.input_stream(str(path), compression=compression, buffer_size=BLOCK))


def _pieces(stream: IO[bytes], mark: bytes | None) -> Iterator[tuple[bytes | None, int]]:
    """Each piece and how many bytes it took, its separator included."""
    rest, lost = b"", 0  # `lost`: bytes of a piece that was too long to keep
    looked = False
    while block := stream.read(BLOCK):
        if not looked and b"\0" in block[:8192]:
            raise ValueError("binary data, not text in UTF-8")  # the whole file: its lines would mean nothing
        looked = True
        if mark is None:
            parts, rest = [], rest + block
        else:
            *parts, rest = (rest + block).split(mark)
        for part in parts:
            size = lost + len(part) + len(mark or b"")
            yield (None if lost or len(part) > MAX_RECORD_BYTES else part), size
            lost = 0
        if len(rest) > MAX_RECORD_BYTES:
            tail = len(mark) - 1 if mark else 0  # a separator may lie across two blocks
            lost, rest = lost + len(rest) - tail, rest[len(rest) - tail :]
    if rest or lost:
        yield (None if lost else rest), lost + len(rest)
