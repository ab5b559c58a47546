"""Thousands of hostile requests against a real server: does anything break, hang, leak, or reach a neighbour?

    python -m bench.hostile                        10,000 of them; writes bench/results/hostile.json
    python -m bench.hostile --requests 500 --seed 3

Requests are made from the server's OpenAPI document, so that every route has its share (`bench/hostile_requests.py`),
and sent over raw sockets, many at a time and now and then as a flood. Meanwhile a neighbour streams one completion
after the other. The program ends with an error if there was a 5xx that is not meant (501 and 503 are), a request
without an answer, an error that is not in the form of its dialect, memory or descriptors that stay, or a neighbour that
got other bits than it gets alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.hostile_dialects import with_dialects
from bench.hostile_requests import MODEL, Case, Cases
from bench.measure import record
from bench.processes import descendants, server_process
from bench.soak import make_directory, resident
from moesaic.serve.bench.server_process import serving

AT_ONCE = 16
FLOOD = 200  # requests that come together, now and then
PARTS = 9  # of a run, after the first tenth; each ends with a flood
PATIENCE = 60.0  # seconds, after which a request hangs
MEANT = {501, 503}
MEMORY_SHARE = 0.1  # that may be more at the end than in the first third of the run: an allocator keeps some
NEIGHBOUR = {
    "prompt": "a neighbour that streams", "max_tokens": 120, "temperature": 1.0, "seed": 11,
    "ignore_eos": True, "logprobs": 2,
    "stream": True,
}  # fmt: skip


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Kind:
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


class Broken(Exception):
    """A response that is no HTTP."""


class Run:
    def __init__(self, url: str, cases: Cases, patience: float = PATIENCE) -> None:
        self.url, self.cases, self.patience = url, cases, patience
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self.kinds: dict[str, Kind] = defaultdict(Kind)
        self.faults: list[str] = []
        self.sent = 0

    async def send(self, case: Case) -> None:
        """One case over a connection of its own."""
        self.sent += 1
        kind, began = self.kinds[case.kind], time.monotonic()
        try:
            async with asyncio.timeout(self.patience):
                answers = await self._exchange(case)
        except TimeoutError:
            self._fault(case, f"no answer in {self.patience:g} s")
            return
        except Broken as error:
            self._fault(case, f"not HTTP: {error}")
            return
        kind.seconds.append(time.monotonic() - began)
        if len(answers) < case.answers:
            self._fault(case, f"{len(answers)} answers, not {case.answers}")
        kind.statuses.update([str(answer.status) for answer in answers] or ["none"])
        for answer, path in zip(answers, case.paths or [case.path] * len(answers), strict=False):
            if problem := wrong(answer, case, path):
                self._fault(case, problem)

    def _fault(self, case: Case, problem: str) -> None:
        start = b"|".join(case.parts)[:3000]
        self.faults.append(f"{case.kind} {case.method} {case.path[:100]}: {problem} <- {start!r}")

    async def _exchange(self, case: Case) -> list[Answer]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=64 << 20)
        answers: list[Answer] = []
        try:
            with suppress(ConnectionError):  # the server may close while we send
                for number, part in enumerate(case.parts):
                    if number and case.pause:
                        await asyncio.sleep(case.pause)
                    writer.write(part)
                    await writer.drain()
                if case.half:
                    writer.write_eof()
            if case.leave:
                with suppress(ConnectionError, TimeoutError):
                    async with asyncio.timeout(0.05):
                        await reader.read(100)
                return []
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                many = case.kind == "pipelined"
                while (found := await read_answer(reader, case.method, wait=not answers)) is not None:
                    answers.append(found)
                    if not many or found.headers.get("connection") == "close":
                        break
        finally:
            writer.close()
            with suppress(Exception):
                await writer.wait_closed()
        return answers

    async def run(self, count: int, at_once: int = AT_ONCE, flood: int = FLOOD) -> None:
        """So many, the last of them as a flood if they are many more than one."""
        last = flood if count >= 3 * flood else 0
        cases = [self.cases.make() for _ in range(count - last)]

        async def work() -> None:
            while cases:
                await self.send(cases.pop())

        await asyncio.gather(*(work() for _ in range(at_once)))
        await asyncio.gather(*(self.send(self.cases.make()) for _ in range(last)))


async def read_answer(reader: asyncio.StreamReader, method: str, wait: bool) -> Answer | None:
    """The next response of a connection; None: there is none. Without `wait` one that does not come soon does not."""
    try:
        async with asyncio.timeout(None if wait else 1.0):
            line = await reader.readline()
    except TimeoutError:
        return None
    if not line:
        return None
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise Broken(repr(line[:80]))
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    status = int(words[1])
    if status == 100:
        return await read_answer(reader, method, wait)
    if method == "HEAD" or status in (204, 304):
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = await read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return Answer(status, headers, body)


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)


def wrong(answer: Answer, case: Case, path: str) -> str:
    """What is wrong with the answer to a request for `path`, if anything is."""
    if answer.status >= 500 and answer.status not in MEANT:
        return f"status {answer.status}: {answer.body[:200]!r}"
    if "x-request-id" not in answer.headers:
        return f"no x-request-id ({answer.status})"
    if answer.status < 400 or case.method == "HEAD":
        return ""
    if not answer.headers.get("content-type", "").startswith("application/json"):
        return f"an error ({answer.status}) of type {answer.headers.get('content-type')}: {answer.body[:80]!r}"
    try:
        content = json.loads(answer.body)
    except ValueError:
        return f"an error that is not JSON: {answer.body[:80]!r}"
    if b'"invalid_http"' in answer.body:
        return ""  # what was no HTTP has no path, and no dialect
    return "" if in_form(content, path) else f"form of {content}"[:300]


def in_form(content: Any, path: str) -> bool:
    if not isinstance(content, dict) or "error" not in content:
        return False
    error = content["error"]
    if path.startswith("/api/"):
        return isinstance(error, str) and bool(error)
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return False
    if path.startswith("/v1/messages"):
        return content.get("type") == "error" and isinstance(error.get("type"), str)
    return isinstance(error.get("type"), str)


class Neighbour:
    """Streams the same completion again and again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.alone: str | None = None
        self.same = self.other = self.refused = 0
        self.ended = False

    async def ask(self) -> str | None:
        """The bits of a completion: texts and log-probabilities, chunk by chunk; None: the queue was full."""
        found: list[Any] = []
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, verify=False) as client:
            async with client.stream("POST", "/v1/completions", json=NEIGHBOUR) as answer:
                if answer.status_code == 429:
                    return None
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                            logprobs = choice["logprobs"] or {}
                            found.append((choice["text"], logprobs.get("token_logprobs"), choice["finish_reason"]))
        text = "".join(part for part, _, _ in found)
        return json.dumps([text, [one for _, numbers, _ in found for one in numbers or ()], found[-1][2]])

    async def run(self) -> None:
        while not self.ended:
            said = await self.ask()
            if said is None:
                self.refused += 1
                await asyncio.sleep(0.1)
            elif said == self.alone:
                self.same += 1
            else:
                self.other += 1


def descriptors(processes: list[int]) -> int:
    return sum(len(list(Path(f"/proc/{one}/fd").iterdir())) for one in processes)


async def idle(url: str) -> dict[str, float]:
    """What is left of requests, once it is nothing or a while has passed."""
    left: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) as client:
        for _ in range(300):
            live = (await client.get("/live")).json()
            left = {name: float(live[name]) for name in ("running", "waiting")}
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
    return left


async def attack(url: str, count: int, seed: int, at_once: int, flood: int, processes: list[int]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) as client:
        document = (await client.get("/openapi.json")).json()
    run = Run(url, Cases(with_dialects(document), seed))
    neighbour = Neighbour(url)
    neighbour.alone = await neighbour.ask()
    beside = asyncio.create_task(neighbour.run())
    began = time.monotonic()
    await run.run(max(count // 10, 1), at_once, 0)  # what a server loads once is not what it leaks
    before = {"memory_mib": sum(map(resident, processes)), "descriptors": descriptors(processes)}
    memory = []
    rest = count - run.sent
    for part in range(PARTS):
        share = rest // PARTS + (rest % PARTS if part == PARTS - 1 else 0)
        await run.run(share, at_once, flood)
        memory.append(round(sum(map(resident, processes)), 1))
    neighbour.ended = True
    await beside
    left = await idle(url)
    await asyncio.sleep(1.0)
    after = {"memory_mib": sum(map(resident, processes)), "descriptors": descriptors(processes)}
    faults = list(run.faults)
    highest = max(memory[: PARTS // 3])  # by then all that is loaded once is there, and the largest requests have come
    if after["memory_mib"] > highest * (1 + MEMORY_SHARE):
        faults.append(f"memory went from {highest:.0f} to {after['memory_mib']:.0f} MiB")
    if after["descriptors"] > before["descriptors"]:  # where `at_once` connections were open, and no fewer now
        faults.append(f"descriptors went from {before['descriptors']} to {after['descriptors']}")
    if any(left.values()):
        faults.append(f"left over: {left}")
    if neighbour.other or not neighbour.same:
        faults.append(f"a neighbour got other bits {neighbour.other} times of {neighbour.same + neighbour.other}")
    rows = [
        {
            "kind": name,
            "requests": len(kind.seconds),
            "median_ms": round(1e3 * statistics.median(kind.seconds), 1) if kind.seconds else None,
            "worst_ms": round(1e3 * max(kind.seconds), 1) if kind.seconds else None,
            "statuses": dict(sorted(kind.statuses.items())),
        }
        for name, kind in sorted(run.kinds.items())
    ]
    return {
        "requests": run.sent,
        "seed": seed,
        "routes": len(run.cases.posts) + len(run.cases.others),
        "seconds": round(time.monotonic() - began, 1),
        "memory_mib_by_part": memory,
        "before": before,
        "after": after,
        "neighbour": {"same": neighbour.same, "other": neighbour.other, "queue_full": neighbour.refused},
        "left_over": left,
        "faults": faults,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--flood", type=int, default=FLOOD)
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = make_directory(Path(folder) / MODEL)
        with serving(directory, ["--cache-gb", "0.05", "--max-requests", "32"]) as url:
            server = server_process()
            processes = [server, *descendants(server)]
            found = asyncio.run(attack(url, given.requests, given.seed, given.at_once, given.flood, processes))
    for row in found["rows"]:
        print(
            f"{row['kind']:>14} {row['requests']:6} {row['median_ms']:>9} ms {row['worst_ms']:>9} ms  {row['statuses']}"
        )
    print(
        {name: found[name] for name in ("requests", "routes", "seconds", "before", "after", "neighbour", "left_over")}
    )
    for fault in found["faults"][:40]:
        print("FAULT", fault[:2000])
    if not given.no_record:
        print(f"wrote {record('hostile', found.pop('rows'), **found)}")
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
