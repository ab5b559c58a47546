"""A request at the front, from its submission to its end, whichever workers it visits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.core.engine_loop import Queue
from moesaic.serve.core.request import Request


@dataclass(eq=False)
class OpenRequest:
    request: Request
    queue: Queue
    visit: int | None = None  # its number; None: it waits for a worker
    worker: WorkerHandle | None = None
    attempts: int = 0  # visits that ended in a death since its last token
    weights: int | None = None  # those it began with
    pending_tokens: int = 0  # as counted at its worker
    route: Any = None  # what the routing strategy remembers of it
