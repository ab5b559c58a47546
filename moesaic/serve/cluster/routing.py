"""Which worker a request goes to, and where it goes on: a strategy of `EngineClient`.

A request visits workers one after the other. Most visit one; a visit ends early when its worker dies, or when the
worker hands the request on (`Handed`), and the strategy is asked again. On every visit the request has the tokens it
has by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.serve.cluster.open_request import OpenRequest


@dataclass(frozen=True)
class Visit:
    worker: WorkerHandle
    extra: dict[str, Any] = field(default_factory=dict)  # what the worker is told beside the request itself


class Routing(Protocol):
    """`entry.route` is the strategy's own: what it remembers of a request."""

    def choose(self, entry: OpenRequest, workers: Sequence[WorkerHandle]) -> Visit | None:
        """Where a request goes next. All `workers` are ready; None: to none of them, ask again when another is."""

    def handed(self, entry: OpenRequest, what: Any) -> None:
        """A visit is over; what the worker left for the next."""


class PrefixRouting:
    """To the worker with the fewest tokens to compute before the request is done: those of its other requests, plus
    those of the prompt that are not in its prefix cache."""

    def choose(self, entry: OpenRequest, workers: Sequence[WorkerHandle]) -> Visit | None:
        if not workers:
            return None
        request = entry.request
        namespace, prompt = cache_namespace(request), request.prompt

        def cost(worker: WorkerHandle) -> tuple[int, int, int]:
            cached = worker.prefixes.tokens(namespace, prompt, worker.page_size)
            return worker.pending_tokens + len(prompt) - cached, len(worker.prefixes.pages), worker.number

        chosen = min(workers, key=cost) if len(workers) > 1 else workers[0]
        chosen.prefixes.add(namespace, prompt, chosen.page_size)
        return Visit(chosen)

    def handed(self, entry: OpenRequest, what: Any) -> None:
        raise AssertionError("no worker was asked to hand it on")


def cache_namespace(request: Request) -> str:
    """Requests of different namespaces share no pages."""
    return f"{request.adapter.name if request.adapter else ''}/{request.salt}"
