"""Parts of a model that only kernels of a whole model on one device know: who divides or reshapes refuses them."""

from __future__ import annotations

from moesaic.errors import UserError
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig


def refuse_dividing(config: ModelConfig, place: object, remedy: str) -> None:
    """Among ranks."""
    attention, parts = config.attention, ""
    if isinstance(attention, GroupedQuery) and (attention.sinks or attention.norm != "heads"):
        parts = "heads with learned sinks" if attention.sinks else f"norms of queries and keys ({attention.norm})"
    elif any(layer.chunked or not layer.positions for layer in _layers(config)):
        parts = "attention by chunks or without positions"
    elif config.has_states or config.norm_offset or (isinstance(attention, GroupedQuery) and attention.gated):
        parts = "layers that keep a state of each sequence, or gated heads"
    elif config.knowledge is not None or config.infilling is not None or config.norm != "pre":
        parts = "a knowledge base, a text that is seen both ways or norms after each half"
    elif any(ffn.shared_gate or ffn.scales_input for ffn in _mixtures(config)):
        parts = "experts with scaled inputs or a shared one with a gate"
    if parts:
        raise UserError(place, f"the model has {parts}, which one device computes whole", remedy)
    refuse_reshaping(config, place, remedy)


def refuse_reshaping(config: ModelConfig, place: object, remedy: str) -> None:
    """Experts that move, or become others."""
    if any(ffn.bias for ffn in _mixtures(config)):
        raise UserError(place, "experts with biases are not moved, merged or narrowed here", remedy)


def _layers(config: ModelConfig) -> tuple[Layer, ...]:
    return (*config.layers, *config.mtp)


def _mixtures(config: ModelConfig) -> list[Experts]:
    return [layer.ffn for layer in _layers(config) if isinstance(layer.ffn, Experts)]
