"""Prefill and decode apart: a request visits a worker that computes its prompt, then one that goes on with its pages.

    moesaic serve DIR --prefill 1 --decode 1

The first stops at the first token and holds the request's pages under a lease; the second asks for them by name while
other requests run, and computes what does not come. So whatever dies in between, the request goes on: without a prefill
worker the decode workers compute prompts, without a decode worker the prefill workers decode. Requests whose prompt has
to be computed where it is used (prompt log-probabilities, routes, embeddings) visit one worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moesaic.errors import UserError
from moesaic.serve.cluster.messages import EngineOptions
from moesaic.serve.cluster.routing import PrefixRouting, Visit
from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.pages.outside import TierOptions
from moesaic.serve.pages.remote import Origin
from moesaic.serve.pages.transport import nixl_package

if TYPE_CHECKING:
    from moesaic.serve.cluster.client import OpenRequest

PREFILL, DECODE = "prefill", "decode"
LEASE_SECONDS = 30.0  # that pages are held for the next worker, which may have to start first


class PrefillDecode:
    """Among workers of one kind as `PrefixRouting` chooses."""

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self._among = PrefixRouting()

    def choose(self, entry: OpenRequest, workers: Sequence[WorkerHandle]) -> Visit | None:
        prefill = [worker for worker in workers if worker.options.role == PREFILL]
        decode = [worker for worker in workers if worker.options.role == DECODE]
        request = entry.request
        if prefill and decode and not request.written and not request.recomputes_prompt:
            visit = self._among.choose(entry, prefill)
            extra: dict[str, Any] = {"lease": (secrets.token_hex(8), self.lease_seconds)}
        else:
            visit = self._among.choose(entry, decode or prefill)
            extra = {"origin": entry.route} if isinstance(entry.route, Origin) else {}
        return Visit(visit.worker, extra) if visit is not None else None

    def handed(self, entry: OpenRequest, what: Any) -> None:
        entry.route = what


@dataclass(frozen=True)
class Apart:
    """How many workers of each kind, and their layouts where they differ from that of all."""

    prefill: int
    decode: int
    prefill_layout: str | None = None
    decode_layout: str | None = None
    page_seconds: float = 5.0  # that a request waits for its pages
    transport: str = "distributed"

    @classmethod
    def of(cls, prefill: int | None, decode: int | None, **more: Any) -> Apart | None:
        """Both or neither."""
        if prefill is None and decode is None:
            for name in ("prefill_layout", "decode_layout"):
                if more.get(name) is not None:
                    raise UserError(f"--{name.replace('_', '-')}", "is for workers of their own", "Give --prefill.")
            return None
        if prefill is None or decode is None:
            missing = "--prefill" if prefill is None else "--decode"
            raise UserError(missing, "is missing", "Say how many workers prefill and how many decode.")
        return cls(prefill, decode, **more)


def roles(options: EngineOptions, apart: Apart, host: str = "127.0.0.1") -> list[EngineOptions]:
    """Options of all workers, which find each other at `host`."""
    if options.engine_options.get("kv_policy") is not None:
        problem = "pages of a pruned cache are of use to their own request alone"
        raise UserError("--prefill, --decode", f"cannot be combined with --kv-policy: {problem}", "Leave it out.")
    if apart.transport == "nixl" and nixl_package() is None:
        raise UserError("--page-transport", "nixl is not installed", "Install moesaic[nixl], or take distributed.")
    tiers = options.engine_options.get("tiers") or TierOptions()
    tiers = replace(tiers, travel=True, host=host, transport=apart.transport, page_seconds=apart.page_seconds)
    running = options.engine_options | {"tiers": tiers}
    wanted = []
    kinds = ((PREFILL, apart.prefill, apart.prefill_layout), (DECODE, apart.decode, apart.decode_layout))
    for role, count, layout in kinds:
        one = replace(options, engine_options=running, role=role, layout=options.layout if layout is None else layout)
        wanted += [one] * count
    return wanted
