"""Kernels of a rank that has some rows of every batch: attention exchanges, all else works on the rows that are here.

    model.ops = ContextParallelKernels(model.ops, group)

The model is given the whole batch, tokens, targets and layout; hidden states are of this rank's rows. Parameters see
their gradients as under data parallelism: the sum over the group is the gradient.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.interface import AttentionCall, Batch, Kernels, KVCache, LatentCall, QKNorm, RopeAngles
from moesaic.kernels.layer_weights import NormWeights
from moesaic.kernels.wrapped import for_batch
from moesaic.parallel.context.mesh_tiles import Tile
from moesaic.parallel.context.sparse import attend_selected, select_here
from moesaic.parallel.context.tiles import attend_by_tiles, attend_latent_by_tiles
from moesaic.parallel.context.ulysses import attend_by_heads, attend_latent_by_heads
from moesaic.parallel.row_kernels import RowKernels
from moesaic.parallel.rows import RowGroup, RowSplit, SplitKind, gather_rows

Method = Literal["ulysses", "mesh", "ring"]


def split_for(method: Method) -> SplitKind:
    """Ulysses has all rows of a head on one rank: any will do. Tiles want as many causal pairs on every rank."""
    return "contiguous" if method == "ulysses" else "zigzag"


class ContextParallelKernels(RowKernels):
    """`method`: Ulysses divides heads, Mesh-Attention (`mesh`, of which `ring` is one shape) the pairs of queries and
    keys, in tiles of the shape that sends least or of a given `tile`. `split`: which rows a rank has; by default equal
    runs for Ulysses, and for the others pieces that give every rank as many causal pairs. `traffic` counts the bytes
    this rank sent. Under tensor parallelism these are the outer kernels: what they leave of a batch is divided
    further."""

    def __init__(
        self,
        plain: Kernels,
        group: dist.ProcessGroup | None = None,
        *,
        method: Method = "ulysses",
        split: SplitKind | None = None,
        tile: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(plain)
        self.ranks = RowGroup(group)
        self.method = method
        self.kind = split or split_for(method)
        self.tile = Tile(1, self.ranks.size) if method == "ring" else None if tile is None else Tile(*tile)
        if self.tile is not None and self.tile.queries * self.tile.keys != self.ranks.size:
            shown = f"{self.tile.queries} x {self.tile.keys} blocks"
            raise UserError(
                f"a tile of {shown}", f"must be as many as ranks: {self.ranks.size}", "Leave it to be chosen."
            )
        self.traffic = self.ranks.traffic
        self._begun: RowSplit | None = None
        self._rope: tuple[RopeAngles, RopeAngles] | None = None  # the batch's, and of the rows that are here

    def for_batch(self, layout: Batch, rows: int | None = None) -> Self:
        assert rows is None, "whoever divides rows further stands within these kernels"
        self._begun = split = self.split(layout)  # a loss is asked for without a layout, right behind its forward
        bound = object.__new__(type(self))
        plain = for_batch(self.plain, layout, split.counts[self.ranks.rank])
        bound.__dict__.update(self.__dict__, plain=plain)
        return bound

    def split(self, layout: Batch) -> RowSplit:
        assert layout.pages_SP is None and not layout.has_trees, "only whole sequences are divided"
        lengths = [span.new for span in layout.spans]
        return RowSplit.of(lengths, self.ranks.size, self.kind, layout.spans_S4.device)

    def gather(self, rows_T: Tensor, layout: Batch) -> Tensor:
        """The whole batch's rows, for a loss that every rank computes whole (a balance loss over sequences): its
        gradient counts once."""
        split = self.split(layout)
        if (inner := getattr(self.plain, "gather", None)) is not None:  # those that divide rows further
            rows_T = inner(rows_T, layout, split.counts[self.ranks.rank])
        return gather_rows(rows_T, split, self.ranks, gradient="own")

    def rotate(self, x_THC: Tensor, rope: RopeAngles) -> Tensor:
        return self.plain.rotate(x_THC, self._rope_here(rope))

    def qk_norm_rope(
        self, qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.plain.qk_norm_rope(qkv_TXC, kv_heads, norm, self._rope_here(rope))

    @torch.compiler.disable  # a collective has no place in a compiled layer
    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        if call.bias is not None:
            raise UserError("parallel.cp", "ranks that divide sequences take no pair bias", "Set cp=1.")
        if not call.causal:
            raise UserError("parallel.cp", "ranks that divide sequences take no encoder", "Set cp=1.")
        if call.sinks_H is not None or call.chunked:
            raise UserError("parallel.cp", "ranks that divide sequences take no sinks and no chunks", "Set cp=1.")
        split = self.split(call.layout)
        if self.method == "ulysses":
            return attend_by_heads(self.plain, (q_THC, k_TNC, v_TNC), call, split, self.ranks)
        return attend_by_tiles((q_THC, k_TNC, v_TNC), call, split, self.ranks, self.tile)

    @torch.compiler.disable
    def attend_latent(self, call: LatentCall) -> Tensor:
        split, rope = self.split(call.attention.layout), self._rope_here(call.rope)
        if call.selected is not None and any(mask is not None for mask in call.selected):
            return attend_selected(self.plain, call, rope, split, self.ranks)
        if self.method == "ulysses" or not isinstance(call.up, Tensor):
            return attend_latent_by_heads(self.plain, call, rope, split, self.ranks)
        return attend_latent_by_tiles(self.plain, call, rope, split, self.ranks, self.tile)

    def index_rows(
        self, q_THC: Tensor | None, k_TC: Tensor, norm: NormWeights, rope: RopeAngles
    ) -> tuple[Tensor | None, Tensor]:
        return self.plain.index_rows(q_THC, k_TC, norm, self._rope_here(rope))

    @torch.compiler.disable
    def select_tokens(
        self, q_THC: Tensor, k_TC: Tensor, weights_TH: Tensor, layout: Batch, cache: KVCache | None, topk: int
    ) -> list[Tensor | None]:
        return select_here(q_THC, k_TC, weights_TH, layout, topk, self.split(layout), self.ranks)

    def own_rows(self, tokens: int) -> Tensor:
        """Those of the batch whose forward began last."""
        split = self._begun
        assert split is not None and split.tokens == tokens, f"{tokens} tokens are not of the batch that was begun"
        return split.parts[self.ranks.rank]

    def _rope_here(self, rope: RopeAngles) -> RopeAngles:
        if self._rope is None or self._rope[0] is not rope:
            self._rope = rope, rope.at(self.own_rows(len(rope.cos_TR)))
        return self._rope[1]
