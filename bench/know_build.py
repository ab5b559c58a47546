"""How long does a knowledge base take to build, does it stay linear, and what does one more document cost?

    python -m bench.know_build                          some minutes; writes bench/results/know_build.json
    python -m bench.know_build --embed out/minilm       embedding too, measured apart on a smaller text
    python -m bench.know_build --text FILE              a text of one's own, in documents of 20,000 characters

Real text: the sources of Python's standard library (code, comments and docstrings), and for the many chunks that are
searched, of all installed packages. Processor time stands beside wall time, which shares disk and cores with others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.measure import record
from moesaic.know.build import build
from moesaic.know.knowledge_base import KnowledgeBase
from moesaic.know.parts import Asked

MEGABYTES = (1, 4, 16)
QUERIES = (
    "how is a socket closed when the connection is reset",
    "parse a date with a time zone",
    "thread pool executor shutdown wait for pending futures",
    "regular expression that matches an email address",
    "raise an error if the file does not exist",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build knowledge bases and time it.")
    parser.add_argument("--embed", type=Path, help="directory of an embedding model")
    parser.add_argument("--text", type=Path, help="a text file to index, in place of Python's sources")
    parser.add_argument("--documents", type=int, default=10_000, help="that one more is added to")
    parser.add_argument("--chunks", type=int, default=100_000, help="that are searched by words")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for megabytes in MEGABYTES:
            source = corpus(place / f"text{megabytes}", texts(arguments.text), megabytes * 10**6)
            for extract in ("none", "patterns"):
                rows.append(shown(size_row(source, place / "kb", extract)))
        rows.append(shown(one_more(place, arguments.documents, arguments.text)))
        rows.append(shown(query_row(place, arguments.chunks)))
        if arguments.embed:
            source = corpus(place / "little", texts(arguments.text), 200_000)
            rows.append(shown(embed_row(source, place / "kb", arguments.embed)))
    print(f"wrote {record('know_build', rows)}")


def shown(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def texts(file: Path | None) -> Iterator[str]:
    if file is not None:
        text = file.read_text(encoding="utf-8")
        yield from (text[start : start + 20_000] for start in range(0, len(text), 20_000))
        return
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")


def corpus(folder: Path, found: Iterator[str], size: int) -> Path:
    """Files of at most `size` bytes in all."""
    folder.mkdir()
    left = size
    for number, text in enumerate(found):
        raw = text.encode()[:left]
        (folder / f"{number:06}.txt").write_bytes(raw.decode(errors="ignore").encode())
        left -= len(raw)
        if not left:
            break
    return folder


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, {
        "seconds": round(time.perf_counter() - wall, 4),
        "processor_seconds": round(time.process_time() - processor, 4),
    }


def size_row(source: Path, kb: Path, extract: str) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in source.iterdir()) / 10**6
    built, times = timed(lambda: build([source], kb, asked=Asked(extract=extract)))
    _, again = timed(lambda: build([source], kb))
    on_disk = sum(file.stat().st_size for file in kb.rglob("*") if file.is_file()) / 10**6
    shutil.rmtree(kb)
    per_megabyte = {f"{name}_per_megabyte": round(value / size, 3) for name, value in times.items()}
    return {
        "what": "build", "megabytes": round(size, 2), "extract": extract, "documents": built.documents,
        "chunks": built.chunks, **times, **per_megabyte, "megabytes_on_disk": round(on_disk, 1),
        "unchanged_processor_seconds": again["processor_seconds"],
    }  # fmt: skip


def one_more(place: Path, documents: int, file: Path | None) -> dict[str, Any]:
    """A document added to many, and to nothing, turn about."""
    source, kb = place / "many", place / "many-kb"
    source.mkdir()
    pieces = [text[start : start + 2000] for text in texts(file) for start in range(0, len(text), 2000)]
    for number in range(documents):
        (source / f"{number:06}.txt").write_text(f"Document {number}.\n\n{pieces[number % len(pieces)]}")
    _, whole = timed(lambda: build([source], kb))
    added: dict[str, list[dict[str, float]]] = {"to_many": [], "alone": []}
    for number in range(20):
        one = place / f"one{number}.txt"
        one.write_text(f"One more, number {number}.\n\n{pieces[-number - 1]}")
        _, times = timed(lambda: build([one], kb))
        added["to_many"].append(times)
        _, times = timed(lambda: build([one], place / f"alone{number}"))
        added["alone"].append(times)
    _, unchanged = timed(lambda: build([source], kb))
    return {
        "what": "one more", "documents": documents, "all_processor_seconds": whole["processor_seconds"],
        **{
            f"{name}_{key}": round(statistics.median(times[key] for times in runs), 4)
            for name, runs in added.items()
            for key in ("seconds", "processor_seconds")
        },
        "slowest_to_many_seconds": max(times["seconds"] for times in added["to_many"]),
        "unchanged_folder_processor_seconds": unchanged["processor_seconds"],
    }  # fmt: skip


def query_row(place: Path, chunks: int) -> dict[str, Any]:
    source = place / "packages"
    source.mkdir()
    kb, left = place / "packages-kb", chunks * 820  # some 820 characters a chunk
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))):
        raw = path.read_bytes()
        if left > 0:
            (source / f"{number:06}.txt").write_bytes(raw)
            left -= len(raw)
    built, times = timed(lambda: build([source], kb, asked=Asked(extract="none")))
    with KnowledgeBase.open(kb) as base:
        base.words.search("open", 8)
        runs = [timed(lambda query=query: base.words.search(query, 8))[1] for query in QUERIES * 20]
        segments = len(base.segments)
    return {
        "what": "search by words", "chunks": built.chunks, "segments": segments, "build_seconds": times["seconds"],
        "median_milliseconds": round(1000 * statistics.median(run["seconds"] for run in runs), 3),
        "median_processor_milliseconds": round(1000 * statistics.median(run["processor_seconds"] for run in runs), 3),
    }  # fmt: skip


def embed_row(source: Path, kb: Path, model: Path) -> dict[str, Any]:
    build([source], kb, asked=Asked(extract="none"))
    size = sum(file.stat().st_size for file in source.iterdir()) / 10**6
    built, times = timed(lambda: build([source], kb, asked=Asked(model)))
    return {
        "what": "embed", "megabytes": round(size, 2), "chunks": built.chunks, **times,
        "seconds_per_megabyte": round(times["seconds"] / size, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
