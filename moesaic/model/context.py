"""What one forward carries from layer to layer besides the hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moesaic.kernels.interface import Kernels, KVCache, LayerStack, RopeAngles
from moesaic.model.layout import Layout


@dataclass
class Routing:
    """The experts chosen in each mixture layer: filled by a forward, or followed by one that replays.

    `choices[layer]` is (T, K); `logits[layer]` the router's (T, E) float32 logits, kept while `keep_logits` is set (the
    balance losses read them). `lengths` are those of the sequences, and `kept[layer]` where a layer saw only some of
    their tokens.
    """

    choices: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)
    keep_logits: bool = False
    replay: bool = False


class ForwardContext:
    """Not a dataclass: FSDP looks into those that pass it by, and gives a layer a copy of one in which it found router
    logits, so that what later layers note would be lost."""

    def __init__(
        self, layout: Layout, ops: Kernels, rope: RopeAngles, routing: Routing | None = None, absorb: bool = True
    ) -> None:
        self.layout, self.ops, self.rope, self.routing = layout, ops, rope, routing
        # Whether latent attention may take the shorter of its two ways, whose results differ in the last bits.
        self.absorb = absorb
        # DSA: which tokens the last full layer selected, one (T, M) mask per sequence; None where all fit.
        self.selected: list[Tensor | None] | None = None

    def cache_layer(self, layer: int) -> KVCache | None:
        return self.layout.cache.layers[layer] if self.layout.cache is not None else None

    def run_fused(self, stack: LayerStack, x_TD: Tensor) -> Tensor | None:
        """All layers of a stack as one kernel, to the same bits; None where they must go one by one."""
        routing, cache = self.routing, self.layout.cache
        if cache is None or (routing is not None and (routing.replay or routing.keep_logits)):
            return None
        caches = [cache.layers[layer.number] for layer in stack.layers]
        done = self.ops.run_layers(stack, x_TD, self.rope, self.layout, caches)
        if done is None:
            return None
        y_TD, routes_LTK = done
        if routing is not None:
            routing.choices.update((number, routes_LTK[at]) for at, number in stack.mixtures)
        return y_TD

    def of_tokens(self, layout: Layout, kept_T: Tensor) -> ForwardContext:
        """The same for some of the tokens, which a layout of their own describes."""
        return ForwardContext(layout, self.ops, self.rope.at(kept_T), self.routing)
