"""Reading files: every format, every kind of damage, and starting again after any record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.data import records
from moesaic.data.records import BrokenRecord, Document, Format, ReadPosition, Record, read_file

TEXTS = ["one", "two\nlines", "", "üñí 🙂", "x" * 3000, "five"]
same_folder = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def zstd(raw: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(raw, asbytes=True)


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "score": n}) + "\n" for n, text in enumerate(texts)).encode()


def parquet(path: Path, texts: list[str]) -> None:
    table = pyarrow.table({"text": texts, "score": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=4)


def write(path: Path, texts: list[str]) -> Format:
    """The texts in the format that the name says."""
    if path.name.endswith(".parquet"):
        parquet(path, texts)
        return Format(columns=["score"])
    raw = jsonl(texts) if ".jsonl" in path.name else "<END>".join(texts).encode()
    pack: Callable[[bytes], bytes] = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)
    path.write_bytes(pack(raw))
    return Format(columns=["score"]) if ".jsonl" in path.name else Format(separator="<END>")


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt", "a.txt.gz", "a.md.zst"]


@pytest.mark.parametrize("name", NAMES)
class TestEveryFormat:
    def test_gives_the_texts(self, tmp_path: Path, name: str) -> None:
        form = write(tmp_path / name, TEXTS)
        found = list(read_file(tmp_path / name, form, ReadPosition(3)))
        assert [record.text for record in found if isinstance(record, Document)] == TEXTS
        assert [record.after.file for record in found] == [3] * len(TEXTS)
        if form.columns:
            assert [record.fields["score"] for record in found if isinstance(record, Document)] == [*range(len(TEXTS))]

    def test_starts_again_after_any_record(self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(records, "BLOCK", 7)  # so that records and separators lie across blocks
        texts = [text for text in TEXTS * 3 if len(text) < 1000]
        form = write(tmp_path / name, texts)
        whole = list(read_file(tmp_path / name, form, ReadPosition()))
        assert len(whole) == len(texts)
        for number, record in enumerate(whole):
            assert list(read_file(tmp_path / name, form, record.after)) == whole[number + 1 :]


def broken(path: Path, form: Format = Format()) -> list[BrokenRecord]:  # noqa: B008
    return [record for record in read_file(path, form, ReadPosition()) if isinstance(record, BrokenRecord)]


def documents(path: Path, form: Format = Format()) -> list[str]:  # noqa: B008
    return [record.text for record in read_file(path, form, ReadPosition()) if isinstance(record, Document)]


class TestDamage:
    @pytest.mark.parametrize(
        ("line", "why"),
        [
            (b'{"text": "a"', "not JSON"),
            (b'{"text": 3}', 'the field "text" is not text'),
            (b'{"body": "a"}', 'no field "text"; it has body'),
            (b'["a"]', "not an object"),
            (b'{"text": "\xff"}', "not UTF-8"),
            (b'{"text": "\\ud800"}', "not valid Unicode"),
            (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON"),
            (b"[" * 100_000, "nested too deeply"),
        ],
    )
    def test_a_line_is_told_with_its_number_and_the_rest_is_read(self, tmp_path: Path, line: bytes, why: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(jsonl(["first"]) + line + b"\n" + jsonl(["last"]))
        assert documents(path) == ["first", "last"]
        (record,) = broken(path)
        assert record.line == 2 and record.file == str(path)
        assert why in record.why

    @pytest.mark.parametrize("value", ['"high"', "null", "NaN", "1e999", "[1]"])
    def test_a_column_must_be_a_number(self, tmp_path: Path, value: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text(f'{{"text": "a", "score": {value}}}\n')
        assert 'the field "score"' in broken(path, Format(columns=["score"]))[0].why

    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
    def test_a_cut_off_archive_keeps_what_came_before(self, tmp_path: Path, name: str) -> None:
        texts = [f"{n} {hash(str(n))}" for n in range(20_000)]
        form = write(tmp_path / name, texts)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
        kept = documents(tmp_path / name, form)
        assert kept == texts[: len(kept)]
        (record,) = broken(tmp_path / name, form)
        assert record.line == len(kept) + 1
        assert "runcated" in record.why

    def test_binary_files_are_one_broken_record(self, tmp_path: Path) -> None:
        for name in ("a.jsonl", "a.txt", "picture.png"):
            (tmp_path / name).write_bytes(b"\x89PNG\n\0\0\n" * 1000)
            (record,) = broken(tmp_path / name)
            assert "binary" in record.why and record.line == 1

    def test_a_row_of_parquet_that_is_not_utf8_costs_no_other(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        raw = pyarrow.array([b"first", b"ab\xff", b"last"], pyarrow.binary())
        texts = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        assert documents(path) == ["first", "last"]
        (record,) = broken(path)
        assert record.line == 2 and record.why == "not UTF-8 (byte 3 of it)"

    def test_a_parquet_file_without_the_column_or_cut_off(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        parquet(path, TEXTS)
        assert 'no column "body"; it has text, score' in broken(path, Format(text="body"))[0].why
        path.write_bytes(path.read_bytes()[:-10])
        assert len(broken(path)) == 1 and not documents(path)

    def test_null_in_parquet(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
        assert documents(path) == ["a", "b"]
        assert broken(path)[0].line == 2

    @pytest.mark.parametrize("mark", ["\n", "<END>"])
    def test_a_record_that_is_too_long_is_passed_over(
        self, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
        monkeypatch.setattr(records, "BLOCK", 16)
        name, form = ("a.jsonl", Format()) if mark == "\n" else ("a.txt", Format(separator=mark))
        made = [json.dumps({"text": text}) if mark == "\n" else text for text in ("a", "b" * 500, "c")]
        (tmp_path / name).write_text(mark.join(made))
        assert documents(tmp_path / name, form) == ["a", "c"]
        (record,) = broken(tmp_path / name, form)
        assert record.line == 2 and "longer than" in record.why
        assert [r.text for r in read_file(tmp_path / name, form, record.after) if isinstance(r, Document)] == ["c"]

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
        assert documents(tmp_path / "a.txt") == ["abc"]


@same_folder
@given(
    raw=st.binary(max_size=400), name=st.sampled_from([*NAMES, "a.bin", "a"]), separator=st.sampled_from([None, "a"])
)
def test_nothing_that_a_file_may_hold_stops_reading(
    tmp_path: Path, raw: bytes, name: str, separator: str | None
) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    form = Format(separator=separator)
    found: list[Record] = list(read_file(path, form, ReadPosition()))
    assert found or not raw
    for number, record in enumerate(found):
        if record.after.file == 0:
            assert list(read_file(path, form, record.after)) == found[number + 1 :]


@same_folder
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_one_wrong_byte_never_stops_reading(tmp_path: Path, data: st.DataObject, name: str) -> None:
    path = tmp_path / name
    form = write(path, TEXTS)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    assert len(list(read_file(path, form, ReadPosition()))) <= 2 * len(TEXTS) + 2
