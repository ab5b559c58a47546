"""The rows and tiles of a flat batch's layout, as paged attention takes them. Made once for all layers of a forward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.cuda.step_inputs import INDEX_TILE, tiles_of
from moesaic.kernels.triton.attention.paged_rows import MAX_DECODE_TOKENS, Rows, Tiles


def rows_of(layout: Any, size: int, max_decode_tokens: int = MAX_DECODE_TOKENS) -> Rows:
    """Those of a layout over a paged cache."""
    known: Rows | None = vars(layout).get("cuda_rows")
    if known is None:
        known = vars(layout)["cuda_rows"] = make_rows(layout, size, max_decode_tokens)
    return known


def make_rows(layout: Any, size: int, max_decode_tokens: int = MAX_DECODE_TOKENS) -> Rows:
    spans = [span for span in layout.spans if span.new]
    pages = [list(layout.pages[span.number]) for span in layout.spans]
    width = max(map(len, pages), default=1)

    def device(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(layout.device, non_blocking=True)

    tiles = Tiles.of(spans, size, max_decode_tokens)
    trees_TM = cached_S = None
    if layout.has_trees:
        tiles = tiles.in_decode()
        widest = max(span.new for span in spans)
        trees_TM = torch.ones(layout.tokens, widest, dtype=torch.int8, device=layout.device)
        for span in spans:
            tree_TT = layout.trees[span.number]
            if tree_TT is not None:
                trees_TM[span.start : span.stop, : span.new] = tree_TT.to(torch.int8)
        cached_S = device([span.cached for span in layout.spans])
    return Rows(
        positions_T=device([position for span in spans for position in range(span.cached, span.total)]),
        sequences_T=device([span.number for span in spans for _ in range(span.new)]),
        page_table_SP=device([row + [0] * (width - len(row)) for row in pages]),
        max_length=max((span.total for span in spans), default=1),
        trees_TM=trees_TM,
        cached_S=cached_S,
        read_before_wait=False,
        **tiles.fields(device),
    )


def indexed(rows: Rows, layout: Any) -> Rows:
    """The same with tiles for an indexer."""
    known: torch.Tensor | None = vars(layout).get("index_tiles")
    if known is None:
        tiles = [tile for span in layout.spans for tile in tiles_of(span.start, span.new, INDEX_TILE)]
        known = vars(layout)["index_tiles"] = torch.tensor(tiles, dtype=torch.int32, device=layout.device)
    return replace(rows, index_X2=known)


def flat_rows(layout: Any, size: int, max_decode_tokens: int = MAX_DECODE_TOKENS) -> Rows:
    """Whole sequences side by side as a cache with pages of one token, each where its row is."""
    known: Rows | None = vars(layout).get("flat_rows")
    if known is None:
        spans, device = layout.spans, layout.device
        whole = partial(torch.tensor, dtype=torch.int32, device=device)
        first_S, length_S = whole([span.start for span in spans]), whole([span.new for span in spans])
        max_length = max(span.new for span in spans)
        sequence_T = torch.arange(len(spans), dtype=torch.int32, device=device).repeat_interleave(length_S)
        row_T = torch.arange(layout.tokens, dtype=torch.int32, device=device)
        known = vars(layout)["flat_rows"] = Rows(
            positions_T=row_T - first_S[sequence_T],
            sequences_T=sequence_T,
            page_table_SP=first_S[:, None] + torch.arange(max_length, dtype=torch.int32, device=device),
            max_length=max_length,
            read_before_wait=False,
            **Tiles.of(spans, size, max_decode_tokens).fields(whole),
        )
    return known
