"""What an offloaded model has fetched, as numbers for metrics."""

from __future__ import annotations

from moesaic.model.transformer import Model
from moesaic.serve.offload.experts import OffloadedExperts
from moesaic.serve.offload.weights import streamed_layers


def offload_stats(model: Model) -> dict[str, int]:
    """Fields of `EngineStats`; none of a model that is all in memory."""
    if isinstance(model.ops, OffloadedExperts):
        counts = model.ops.counts
        return {
            "expert_hits": counts.hits,
            "expert_misses": counts.misses,
            "experts_predictable": counts.predictable,
            "experts_predicted": counts.predicted,
            "offload_bytes": counts.bytes,
        }
    streamed = streamed_layers(model.layers)
    return {} if streamed is None else {"offload_bytes": streamed.counts.bytes}
