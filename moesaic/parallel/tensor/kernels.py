"""The model's matmuls divided among ranks, and rows between them too (sequence parallel), by standing in for `ops`.

    shard_model(model, rank, ranks)                      # or fill parts as `partition.part_of` says
    model.ops = TensorParallelKernels(model.ops, group, model.config, tiles=2)

Every hidden state is of this rank's rows only. A matrix that makes heads or hidden units gathers the rows first; the
one that reads them scatters its sums. In between a rank has all rows of its own heads or hidden units, so attention
needs nothing new. Latent attention gathers its narrow latents and not hidden states: queries' before the up-projection,
keys' and values' behind the down-projection, which every rank expands for its own heads.

Gradients of divided parameters are complete here, those of whole ones a part of the sum over ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Self

import torch.distributed as dist
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.interface import Batch, Kernels, QKNorm, RopeAngles
from moesaic.kernels.wrapped import for_batch
from moesaic.model.config import GroupedQuery, ModelConfig
from moesaic.parallel.row_kernels import RowKernels
from moesaic.parallel.tensor.exchange import Chunks, TileExchange
from moesaic.parallel.tensor.matmul import Copies, Division, Gather, GatherMatmul, MatmulScatter
from moesaic.parallel.tensor.partition import READS, check, kv_copies, kv_heads_of

GATHERS_FIRST = frozenset({"qkv", "q_up", "gate_up"})
GATHERS_AFTER = frozenset({"kv_down", "keys", "head_weights"})  # their outputs are narrower than their inputs
DIVIDED = GATHERS_FIRST | GATHERS_AFTER | READS | {"queries"}


class TensorParallelKernels(RowKernels):
    """`tiles`: how many a collective and its matmul are cut into; `keep`: whether gathered rows are kept for the
    backward pass (memory) or gathered again there (bytes). `traffic` counts the bytes this rank sent. Under context
    parallelism these are the inner kernels: they divide further what those leave of a batch."""

    def __init__(
        self,
        plain: Kernels,
        group: dist.ProcessGroup | None,
        config: ModelConfig,
        *,
        tiles: int = 1,
        keep: bool = True,
    ) -> None:
        super().__init__(plain)
        exchange = TileExchange(group)
        check(config, exchange.size)
        if tiles < 1:
            raise UserError("parallel.tiles", f"must be a whole number from 1 on, not {tiles}")
        self.exchange, self.tiles, self.keep = exchange, tiles, keep
        self.traffic = exchange.traffic
        self.kv_heads: int | None = None
        self.copies: Copies | None = None
        if isinstance(config.attention, GroupedQuery):
            self.kv_heads = kv_heads_of(config.attention, exchange.size)
            copies = kv_copies(config.attention, exchange.size)
            if copies > 1:
                first = config.attention.heads // exchange.size * config.attention.head_size
                self.copies = Copies(first, copies)
        self._division: Division | None = None
        self._gathered: tuple[Tensor, Tensor] | None = None  # rows and all ranks', for a second reader of the same

    def for_batch(self, layout: Batch, rows: int | None = None) -> Self:
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__, plain=for_batch(self.plain, layout, rows))
        bound._division = self._divide(layout, rows)
        return bound

    def _divide(self, layout: Batch, rows: int | None) -> Division:
        chunks = self.chunks(layout.tokens if rows is None else rows)
        return Division(self.exchange, chunks, self.tiles, self.keep)

    def gather(self, rows_ND: Tensor, layout: Batch, rows: int | None = None) -> Tensor:
        """The whole batch's rows, for a loss that every rank computes whole (a balance loss over sequences): its
        gradient counts once."""
        found_TD: Tensor = Gather.apply(rows_ND, self._divide(layout, rows), False)
        return found_TD

    def chunks(self, total: int) -> Chunks:
        return Chunks(total, self.exchange.size)

    def own_rows(self, tokens: int) -> slice:
        return self.chunks(tokens).of(self.exchange.rank)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        kind, division = site.rpartition(".")[2], self._division
        plain = partial(self.plain.linear, site=site)
        if self.exchange.size == 1 or kind not in DIVIDED:
            return plain(x_TI, weight_OI, bias_O)
        assert division is not None, f"{site} needs all rows, and nobody said of which batch (`for_batch`)"
        if kind in GATHERS_FIRST:
            copies = self.copies if kind == "qkv" else None
            found, self._gathered = self._gathered, None
            known = found[1] if found is not None and found[0] is x_TI else None
            out: Tensor = GatherMatmul.apply(x_TI, weight_OI, bias_O, plain, division, copies, known)
            return out
        if kind in READS:
            out = MatmulScatter.apply(x_TI, weight_OI, plain, division)
            return out if bias_O is None else out + bias_O
        if kind in GATHERS_AFTER:
            out = Gather.apply(plain(x_TI, weight_OI, bias_O), division, True)
            return out
        # The indexer's queries, from the latents that the up-projection reads next.
        all_TI = self.exchange.begin_gather(x_TI.detach(), division.chunks).whole()
        self._gathered = (x_TI, all_TI)
        return plain(all_TI, weight_OI, bias_O)

    def qk_norm_rope(
        self, qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.plain.qk_norm_rope(qkv_TXC, self.kv_heads or kv_heads, norm, rope)
