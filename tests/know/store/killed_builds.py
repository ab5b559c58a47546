"""Builds that are killed, one after the other; run by test_killed.py in a process of its own, which may fork.

python -m tests.know.store.killed_builds FOLDER

After each, the base must hold all of the old version or all of the new one, and the next build must succeed and leave
nothing behind. Prints one JSON object: how many builds were killed, and how many of them after the new version counted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from moesaic.know.build import build
from moesaic.know.knowledge_base import KnowledgeBase

DOCUMENTS = 6
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}


def write_version(docs: Path, version: int) -> None:
    """Some files change, one comes, one goes."""
    for number in range(DOCUMENTS):
        if (number + version) % 3:
            (docs / f"{number}.txt").write_text(f"Document {number} of version{version}. " * 40)
    (docs / f"new{version}.txt").write_text(f"It came with version{version}.")
    (docs / f"new{version - 1}.txt").unlink(missing_ok=True)


def held(kb: Path) -> dict[str, str]:
    """All that a base holds, as its search finds it, once it is sure that its parts agree."""
    if not list(kb.glob("manifest-*.json")):
        return {}
    with KnowledgeBase.open(kb) as base:
        texts = {document.source: base.text(document.id) for document in base.documents()}
        for row, chunk in base.chunks():
            assert texts[chunk.source][chunk.start : chunk.end] == chunk.text
            assert chunk.text.split(".")[0].split()[-1] in {
                h.chunk.text.split(".")[0].split()[-1] for h in base.search(chunk.text, method="words")
            }
            assert base.graph is not None and base.graph.entities_of(row) is not None
        return texts


def there(docs: Path) -> dict[str, str]:
    return {f"docs/{file.name}": file.read_text() for file in docs.iterdir()}


def killed(docs: Path, kb: Path, operation: int | None, seconds: float) -> tuple[bool, float]:
    """Whether a build was killed, at its nth operation on files below the base, or after some time; and its time."""
    started = time.monotonic()
    child = os.fork()
    if not child:
        if operation is not None:
            seen = 0

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal seen
                if event in EVENTS and str(kb) in str(arguments[0]):
                    seen += 1
                    if seen == operation:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
        build([docs], kb)
        os._exit(0)
    if operation is None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), time.monotonic() - started


def main(folder: Path) -> None:
    docs, kb = folder / "docs", folder / "kb"
    docs.mkdir()
    draw = random.Random(0)
    kills = after_commit = operation = 0
    usual, ended, step = 0.05, False, 5
    for version in range(1, 61):
        old = held(kb)
        write_version(docs, version)
        new = there(docs)
        # Half are killed at one operation after the other, from the first to the last; half at any moment.
        at = None if version % 2 == 0 else operation + 1 + draw.randrange(step)
        was_killed, seconds = killed(docs, kb, at, draw.random() * usual)
        if at is not None:
            operation, ended = (operation + step, ended) if was_killed else (0, True)
            usual = usual if was_killed else seconds
        left = held(kb)
        assert left in (old, new), (version, at)
        kills += was_killed
        after_commit += was_killed and left == new != old
        if version % 3 == 0:  # else the next build meets what this one left
            build([docs], kb)
            assert held(kb) == new
            names = {entry.name for entry in KnowledgeBase.open(kb).manifest.segments}
            assert {file.name for file in (kb / "segments").iterdir()} == names
            assert len(list(kb.glob("manifest-*.json"))) == 1
            assert [file.name for file in kb.rglob(".*")] == [".lock"]
    print(json.dumps({"kills": kills, "after_commit": after_commit, "ended": ended}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
