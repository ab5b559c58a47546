"""HTML and PDF are read in a process of its own, with limits on processor time and memory: a page or a paper that is
made to hang or to fill a parser costs that file and nothing else.

    READERS[".pdf"] = Bounded("pdf", "pypdf")

One process reads one file after another, and a new one takes its place when a file has brought it down. What goes
between the two is JSON and bytes. Where a file asks for more time than its size allows (SECONDS, and SECONDS_PER_MB for
large ones), the kernel ends the process; processor time is counted, so that a busy machine refuses nothing.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from functools import cache
from typing import IO, Any

from moesaic.errors import UserError
from moesaic.know.documents import html, pdf
from moesaic.know.documents.document import Document, Heading, Raw, Skipped, Unreadable
from moesaic.units import readable_bytes

SECONDS = 60.0  # of processor time that a file may take
SECONDS_PER_MB = 20.0  # and more, the larger it is
WAIT = 20  # times as long on the clock: the process hangs without computing
MEMORY = 4 * 2**30  # bytes of address space
LONGEST_REPLY = 2**30
READS = {"html": html.read, "pdf": pdf.read}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Bounded:
    """A reader of `kind` in the other process."""

    kind: str
    library: str
    seconds: float = SECONDS
    memory: int = MEMORY

    def __call__(self, raw: Raw) -> list[Document]:
        if importlib.util.find_spec(self.library) is None:
            problem = f"{self.kind.upper()} is read with {self.library}, which is not installed"
            raise UserError(raw.source, problem, "Install it: pip install 'moesaic[know]'")
        seconds = self.seconds + SECONDS_PER_MB * len(raw.bytes) / 2**20
        request = {"kind": self.kind, "source": raw.source, "seconds": seconds, "memory": self.memory}
        reply = _child().ask(request, raw.bytes)
        if reply.get("stopped") == "time":
            raise Unreadable(f"takes more than {seconds:.3g} seconds to read")
        if reply.get("stopped") == "memory":
            raise Unreadable(f"takes more than {readable_bytes(self.memory)} of memory to read")
        if "stopped" in reply:
            raise Unreadable(f"brings the reader down ({reply['stopped']})")
        raw.skipped.extend(Skipped(**skipped) for skipped in reply["skipped"])
        if "unreadable" in reply:
            raise Unreadable(reply["unreadable"])
        return [_document(found) for found in reply["documents"]]


def _document(found: dict[str, Any]) -> Document:
    headings = tuple(Heading(**heading) for heading in found.pop("headings"))
    return Document(**found | {"headings": headings, "pages": tuple(found["pages"])})


class _Child:
    """The process that reads, as the one that asks sees it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def ask(self, request: dict[str, Any], content: bytes) -> dict[str, Any]:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                command = [sys.executable, "-m", "moesaic.know.documents.bounded"]
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process = self.process
            assert process.stdin is not None and process.stdout is not None
            watch = threading.Timer(WAIT * request["seconds"], process.kill)
            watch.start()
            try:
                _send(process.stdin, json.dumps(request).encode())
                _send(process.stdin, content)
                reply: dict[str, Any] = json.loads(_receive(process.stdout))
                return reply
            except (OSError, EOFError, ValueError):
                process.kill()
                ended = -process.wait()
                process.stdin.close()
                process.stdout.close()
                late = ended == signal.SIGXCPU or not watch.is_alive()
                return {"stopped": "time" if late else f"it ended with {ended or 'nothing said'}"}
            finally:
                watch.cancel()


@cache
def _child() -> _Child:
    return _Child()


def _send(to: IO[bytes], message: bytes) -> None:
    to.write(_LENGTH.pack(len(message)))
    to.write(message)
    to.flush()


def _receive(of: IO[bytes]) -> bytes:
    head = of.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    if length > LONGEST_REPLY:
        raise EOFError
    message = of.read(length)
    if len(message) < length:
        raise EOFError
    return message


def _read(request: dict[str, Any], content: bytes) -> dict[str, Any]:
    """In the other process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = used.ru_utime + used.ru_stime
    hard_time, hard_memory = (resource.getrlimit(which)[1] for which in (resource.RLIMIT_CPU, resource.RLIMIT_AS))
    resource.setrlimit(resource.RLIMIT_CPU, (int(spent + request["seconds"]) + 1, hard_time))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory"], hard_memory))
    raw = Raw(content, request["source"])
    reply: dict[str, Any] = {}
    try:
        reply["documents"] = [asdict(document) for document in READS[request["kind"]](raw)]
    except Unreadable as why:
        reply["unreadable"] = str(why)
    except RecursionError:
        reply["unreadable"] = "is nested too deep"
    except MemoryError:
        return {"stopped": "memory"}
    return reply | {"skipped": [asdict(skipped) for skipped in raw.skipped]}


def serve() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks is told, and ends this with its input
    while True:
        try:
            request, content = json.loads(_receive(sys.stdin.buffer)), _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(sys.stdout.buffer, json.dumps(_read(request, content)).encode())


if __name__ == "__main__":
    serve()
