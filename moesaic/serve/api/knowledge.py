"""What answers may be drawn from: knowledge bases, which `serve` is given from outside and knows by this form only.

Whoever starts the server opens them, once, in the process that takes requests (`moesaic serve DIR --know KB`); all
models and workers share them. A base is searched on a thread of its own, one query at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from moesaic.errors import UserError
from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.metrics import Histogram

Result = TypeVar("Result")

MAX_QUERY = 4096  # characters
MAX_PASSAGES = 50
MOST_WAITING = 64  # queries of one base
MAX_TEXT = 16_000  # characters of a passage; chunks are shorter, whoever made them


@dataclass(frozen=True)
class Passage:
    """A piece of a document: `text` stands there from character `start` to `end`."""

    id: str
    source: str  # a path below what was indexed, or a URL
    title: str
    text: str
    start: int
    end: int
    score: float = 0.0
    document: str = ""
    page: int | None = None


@dataclass(frozen=True)
class Citation:
    """A place in an answer that names a passage. The quote is the part of the passage that says it, and stands in the
    document from `quote_start` to `quote_end`."""

    number: int  # of the passage, from 1
    start: int  # of what names it, such as [1], in the answer
    end: int
    quote: str
    quote_start: int
    quote_end: int
    supported: bool | None = None  # whether the passage says it; None: nobody checked


class Knowledge(Protocol):
    """One base. Its methods are called on one thread."""

    @property
    def rows(self) -> int:
        """How many passages it holds."""
        ...

    @property
    def methods(self) -> Sequence[str]:
        """Of search, the default first."""
        ...

    def search(self, query: str, k: int, method: str) -> Sequence[Passage]: ...

    def fetch(self, name: str) -> Passage | None:
        """The passage with this id; None: there is none."""
        ...

    def cite(self, question: str, answer: str, passages: Sequence[Passage]) -> Sequence[Citation]:
        """The citations of an answer, each checked against its passage."""
        ...


@dataclass(frozen=True)
class Found:
    base: str
    passage: Passage


@dataclass
class Use:
    """Of one base, for metrics."""

    waiting: int = 0
    failed: int = 0
    passages: int = 0
    seconds: Histogram = field(default_factory=Histogram)


class Bases:
    """The bases of a server, by name."""

    def __init__(self, bases: Mapping[str, Knowledge] | None = None) -> None:
        self.bases = dict(bases or {})
        self.uses = {name: Use() for name in self.bases}
        self._threads = {name: ThreadPoolExecutor(1, f"know {name}") for name in self.bases}

    def __bool__(self) -> bool:
        return bool(self.bases)

    def chosen(self, names: Sequence[str] | None, place: str) -> list[str]:
        """The bases that a request means; all of them, if it names none."""
        if not self.bases:
            raise UserError(place, "this server has no knowledge base", "Start it with --know DIR.")
        for name in names or ():
            if name not in self.bases:
                raise UserError(place, f"there is no base {name[:64]!r}", f"There is {', '.join(self.bases)}.")
        return list(dict.fromkeys(names or self.bases))

    def check_method(self, names: Sequence[str], method: str, place: str = "method") -> None:
        for name in names:
            known = self.bases[name].methods
            if method != "auto" and method not in known:
                raise UserError(place, f"the base {name!r} has no search by {method!r}", f"Take {', '.join(known)}.")

    async def search(self, names: Sequence[str], query: str, k: int, method: str = "auto") -> list[Found]:
        """The best passages of these bases. Scores of two bases cannot be compared: they take turns."""

        async def one(name: str) -> list[Found]:
            base = self.bases[name]
            found = await self.beside(name, lambda: base.search(query, k, method))
            self.uses[name].passages += len(found)
            return [Found(name, passage) for passage in found]

        lists = await asyncio.gather(*(one(name) for name in names))
        longest = max(map(len, lists), default=0)
        return [found[place] for place in range(longest) for found in lists if place < len(found)][:k]

    async def fetch(self, names: Sequence[str], wanted: str) -> Found | None:
        for name in names:
            base = self.bases[name]
            passage = await self.beside(name, lambda base=base: base.fetch(wanted))  # type: ignore[misc]
            if passage is not None:
                return Found(name, passage)
        return None

    async def beside(self, name: str, work: Callable[[], Result]) -> Result:
        use = self.uses[name]
        if use.waiting >= MOST_WAITING:
            raise ApiError(429, f"too many searches of {name!r}", code="queue_full", headers={"retry-after": "1"})
        use.waiting += 1
        began = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[name], work)
        except Exception:
            use.failed += 1
            raise
        finally:
            use.waiting -= 1
            use.seconds.observe(time.monotonic() - began)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def metrics(self) -> Iterator[Metric]:
        if not self.bases:
            return
        rows = GaugeMetricFamily("moesaic:know_passages", "Passages of a base.", labels=["base"])
        waiting = GaugeMetricFamily("moesaic:know_searches_waiting", "Searches under way.", labels=["base"])
        failed = CounterMetricFamily("moesaic:know_searches_failed", "Searches that failed.", labels=["base"])
        found = CounterMetricFamily("moesaic:know_passages_found", "Passages found.", labels=["base"])
        took = HistogramMetricFamily("moesaic:know_search_seconds", "Of a search, with its wait.", labels=["base"])
        for name, use in self.uses.items():
            rows.add_metric([name], self.bases[name].rows)
            waiting.add_metric([name], use.waiting)
            failed.add_metric([name], use.failed)
            found.add_metric([name], use.passages)
            took.add_metric([name], use.seconds.buckets(), use.seconds.total)
        yield from (rows, waiting, failed, found, took)
