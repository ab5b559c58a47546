"""What one forward carries from layer to layer besides the hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from moesaic.kernels.interface import Kernels, KVCache, LayerStack, RopeAngles
from moesaic.model.config import Rope
from moesaic.model.knowledge import Facts
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
    # DSA: whether indexers learn in this forward, in which attention is dense or to what they select; and what the
    # indexer of each full layer lost, against its own attention and that of every layer it serves.
    teach: Literal["dense", "sparse"] | None = None
    indexer_losses: dict[int, list[Tensor]] = field(default_factory=dict)


class ForwardContext:
    """Not a dataclass: FSDP looks into those that pass it by, and gives a layer a copy of one in which it found router
    logits, so that what later layers note would be lost."""

    def __init__(
        self, layout: Layout, ops: Kernels, rope: RopeAngles, routing: Routing | None = None, absorb: bool = True
    ) -> None:
        self.layout, self.ops, self.rope, self.routing = layout, ops, rope, routing
        self.layer_ropes: dict[Rope, RopeAngles] = {}  # of layers that have their own
        # Whether latent attention may take the shorter of its two ways, whose results differ in the last bits.
        self.absorb = absorb
        # DSA: which tokens the last full layer selected, (T, topk) places per sequence; None where all fit.
        self.selected: list[Tensor | None] | None = None
        # Where indexers learn: that layer's number and the scores of its indexer, one (T, M) for each sequence.
        self.index_scores: tuple[int, list[Tensor]] | None = None
        self.facts: Facts | None = None  # what its layers read, of a model with a knowledge base

    def cache_layer(self, layer: int) -> KVCache | None:
        return self.layout.cache.layers[layer] if self.layout.cache is not None else None

    def layer_states(self, layer: int) -> KVCache | None:
        cache = self.layout.cache
        return cache.states.layers[layer] if cache is not None and cache.states is not None else None

    @property
    def teach(self) -> Literal["dense", "sparse"] | None:
        return self.routing.teach if self.routing is not None else None

    def angles(self, rope: Rope | None) -> RopeAngles:
        """Of the model, or of a layer that has its own."""
        return self.rope if rope is None else self.layer_ropes[rope]

    def run_fused(self, stack: LayerStack, x_TD: Tensor) -> Tensor | None:
        """All layers of a stack as one kernel, to the same bits; None where they must go one by one."""
        routing, cache = self.routing, self.layout.cache
        if not self.layout.is_cached or (routing is not None and (routing.replay or routing.keep_logits)):
            return None
        # Where nothing is in pages of its own, the kernels know where keys and values are.
        caches = [] if cache is None else [cache.layers[layer.number] for layer in stack.layers]
        done = self.ops.run_layers(stack, x_TD, self.rope, self.layout, caches)
        if done is None:
            return None
        y_TD, routes_LTK = done
        if routing is not None:
            routing.choices.update((number, routes_LTK[at]) for at, number in stack.mixtures)
        return y_TD

    def of_tokens(self, layout: Layout, kept_T: Tensor) -> ForwardContext:
        """The same for some of the tokens, which a layout of their own describes."""
        chosen = ForwardContext(layout, self.ops, self.rope.at(kept_T), self.routing)
        chosen.facts = self.facts
        chosen.layer_ropes = {rope: angles.at(kept_T) for rope, angles in self.layer_ropes.items()}
        return chosen
