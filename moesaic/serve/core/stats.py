"""What an engine is doing and has done, for metrics and the live view: the load of its experts, and a snapshot of all
this, of one engine or summed over replicas."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

from moesaic.model.config import Experts
from moesaic.model.context import Routing
from moesaic.model.transformer import Model
from moesaic.serve.offload.stats import offload_stats

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


@dataclass(frozen=True)
class EngineStats:
    running: int = 0  # requests that hold pages of the KV cache
    waiting: int = 0  # requests that hold none yet
    pages: int = 0
    pages_in_use: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # and found there
    states: int = 0  # places for what layers keep of a sequence as a whole; others than requests' are of prefixes
    states_in_use: int = 0  # by requests
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    output_search_checked: int = 0  # tokens found by a search of the output matrix that were computed in full too
    output_search_missed: int = 0  # and were not the likeliest
    finished: int = 0
    aborted: int = 0
    busy_seconds: float = 0.0
    cache_host_bytes: int = 0  # of pages in host memory
    cache_disk_bytes: int = 0
    host_tokens: int = 0  # that came back from host memory
    disk_tokens: int = 0  # that came back from disk
    spilled_pages: int = 0  # that went to host memory or disk
    dropped_pages: int = 0  # that should have gone to disk, which was too slow
    transferred_tokens: int = 0  # whose pages came from another engine
    transferred_bytes: int = 0
    recomputed_tokens: int = 0  # whose pages should have come from another engine
    failed_transfers: int = 0
    clock_mhz: float = 0.0  # of its GPU, where it is controlled
    room_same_clock: int = 0  # more requests that it takes without a higher clock
    room_in_time: int = 0  # and within its SLO
    expert_hits: int = 0  # offloaded experts that were there when they were wanted, once per layer and step
    expert_misses: int = 0
    experts_predictable: int = 0  # wanted where the layer before had predicted some
    experts_predicted: int = 0  # and them among these
    offload_bytes: int = 0  # of weights that were fetched
    experts: dict[int, list[int]] = field(default_factory=dict)  # tokens of each expert, by layer

    @classmethod
    def of(cls, engine: Engine) -> EngineStats:
        """Read beside the engine's thread, so one step may be missing."""
        requests = list(engine.scheduler.requests.values())
        running = sum(bool(request.pages) for request in requests)
        page_pool, counts = engine.page_pool, engine.counts
        return cls(
            running=running,
            waiting=len(requests) - running,
            pages=page_pool.pages,
            pages_in_use=page_pool.in_use,
            prefix_queries=page_pool.queries,
            prefix_hits=page_pool.hits,
            states=engine.cache.states.places if engine.cache.states is not None else 0,
            states_in_use=sum(request.state is not None for request in requests),
            preemptions=engine.scheduler.preemptions,
            experts=engine.experts.by_layer(),
            **vars(counts),
            **(engine.governor.stats(engine) if engine.governor is not None else {}),
            **(engine.outside.stats() if engine.outside is not None else {}),
            **offload_stats(engine.model),
            output_search_checked=engine.search.checked if engine.search is not None else 0,
            output_search_missed=engine.search.missed if engine.search is not None else 0,
        )

    def __add__(self, other: EngineStats) -> EngineStats:
        layers = self.experts.keys() | other.experts.keys()
        experts = {layer: _sum(self.experts.get(layer), other.experts.get(layer)) for layer in sorted(layers)}
        numbers = [each.name for each in fields(self) if each.name != "experts"]
        return EngineStats(**{name: getattr(self, name) + getattr(other, name) for name in numbers}, experts=experts)

    @property
    def cache_usage(self) -> float:
        """The share of the KV cache's pages that is in use."""
        return self.pages_in_use / max(1, self.pages)


def _sum(some: list[int] | None, others: list[int] | None) -> list[int]:
    return [one + other for one, other in zip(some, others, strict=True)] if some and others else some or others or []


class ExpertCounts:
    """Tokens routed to each expert of each layer."""

    def __init__(self, model: Model) -> None:
        self.experts = {
            number: layer.ffn.count
            for number, layer in enumerate(model.config.layers)
            if isinstance(layer.ffn, Experts)
        }
        self.starts: dict[int, int] = {}
        total = 0
        for number, count in self.experts.items():
            self.starts[number] = total
            total += count
        self.counts = torch.zeros(total, dtype=torch.int64, device=model.device)

    def count(self, routing: Routing) -> None:
        """All layers of one forward at once."""
        routed = [
            routes.flatten() + self.starts[layer] for layer, routes in routing.choices.items() if layer in self.starts
        ]
        if routed:
            self.counts += torch.bincount(torch.cat(routed), minlength=len(self.counts))

    def by_layer(self) -> dict[int, list[int]]:
        counts = self.counts.tolist()
        return {layer: counts[start : start + self.experts[layer]] for layer, start in self.starts.items()}
