"""Attention over compact requests: each attends to the rows it has retained, and policies' scores are summed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.interface import AttentionCall, Batch, Kernels, KVCache, LayerStack, RopeAngles
from moesaic.kernels.native import kernels
from moesaic.kernels.native.fused_layers import MAX_STACK_TOKENS
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.serve.core.kv.compact import CompactRequest

MAX_WEIGHTS = 1 << 24  # attention weights in memory at a time
SMALL_SOFTMAX = 1 << 16  # weights for which one thread is faster than several
FEW_QUERIES = 8  # for which an explicit softmax is faster than the fused kernel


class CompactKernels(WrappedKernels):
    """Kernels over which compact requests attend, each to what it has retained; in the order of a forward's spans."""

    def __init__(self, plain: Kernels, sequences: Sequence[CompactRequest]) -> None:
        super().__init__(plain)
        self.sequences = sequences

    def run_layers(  # type: ignore[override]
        self, stack: LayerStack, x_TD: Tensor, rope: RopeAngles, layout: Batch, caches: Sequence[KVCache]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """A step of few tokens in one native call, which finds every layer's rows by itself."""
        run, store = getattr(self.plain, "run_retained_layers", None), self.sequences[0].store
        if run is None or not store.is_native or len(x_TD) > MAX_STACK_TOKENS:
            return None
        if not all(compact.one_window() for compact in self.sequences):
            return None
        records = [compact.native(store.query_heads) for compact in self.sequences]
        if any(record is None for record in records):
            return None
        done: tuple[Tensor, list[Tensor]] | None = run(
            stack, x_TD, rope, layout, store.cache, np.ascontiguousarray(np.stack(records, axis=1))
        )
        return done

    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        pieces = [
            attend(self.sequences[span.number], q, k, v, call.layer, call.scale)
            for span, q, k, v in call.layout.per_sequence(q_THC, k_TNC, v_TNC)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def attend(compact: CompactRequest, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, layer: int, scale: float) -> Tensor:
    """Write the new tokens' keys and values, then attend from the new tokens to all rows of their sequence."""
    new, heads, size = q_THC.shape
    compact.extend(layer, k_TNC, v_TNC)
    if (out_THC := _native(compact, q_THC, layer, scale)) is not None:
        return out_THC
    compact.record_queries(layer, q_THC)
    if compact.widths[layer] == new:
        k_NMC, v_NMC = k_TNC.transpose(0, 1), v_TNC.transpose(0, 1)
    else:
        k_NMC, v_NMC = (read.to(q_THC) for read in compact.read(layer))
    kv_heads, rows = k_NMC.shape[:2]
    q_NGTC = q_THC.view(new, kv_heads, -1, size).permute(1, 2, 0, 3)
    hidden = _hidden(compact.missing(layer), new, rows, q_THC.device)
    before = compact.store.windows.hidden(layer, new, rows, q_THC.device)
    if before is not None:
        hidden = before if hidden is None else hidden | before
    asked = new if compact.store.windows.sizes[layer] is not None else compact.first_scored
    scored = 0 if new <= FEW_QUERIES else asked  # from here on the attention weights are needed
    pieces = []
    if scored:
        pieces.append(_fused(q_NGTC[:, :, :scored], k_NMC, v_NMC, hidden, scale))
    block = max(1, MAX_WEIGHTS // (heads * rows))
    for start in range(scored, new, block):
        stop = min(new, start + block)
        part = None if hidden is None else hidden[:, start:stop]
        out, weights_NGTM = _explicit(q_NGTC[:, :, start:stop], k_NMC, v_NMC, part, scale)
        pieces.append(out)
        if stop > asked:
            compact.add_scores(layer, weights_NGTM.sum(1), start)
    out_NGTC = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    return out_NGTC.permute(2, 0, 1, 3).reshape(new, heads, size)


def _native(compact: CompactRequest, q_THC: Tensor, layer: int, scale: float) -> Tensor | None:
    """Few tokens on a CPU, in a step that also has many of others, by the code that runs whole steps of few
    (`kernels/native/retained.c`), so with the same bits; None where there is none."""
    store, library = compact.store, kernels()
    if library is None or len(q_THC) > MAX_STACK_TOKENS or q_THC.dtype != torch.float32:
        return None
    if layer == 0 or compact.records is None:
        compact.records = compact.native(q_THC.shape[1]) if store.is_native else None
    if compact.records is None:
        return None
    if store.windows.sizes[layer] is not None and not compact.one_window():
        each = [
            _of_one_call(
                library, compact, q_THC[token : token + 1], compact.native(q_THC.shape[1], token), layer, scale
            )
            for token in range(len(q_THC))
        ]
        return torch.cat(each)
    return _of_one_call(library, compact, q_THC, compact.records, layer, scale)


def _of_one_call(
    library: Any, compact: CompactRequest, q_THC: Tensor, records: Any, layer: int, scale: float
) -> Tensor:
    store, span_14 = compact.store, torch.tensor([[0, len(q_THC), 0, 0]])
    out_THC: Tensor = library.attend_retained(q_THC, store.cache, span_14, records[layer:], store.heads, scale)
    return out_THC


def _hidden(missing_NM: Tensor | None, new: int, rows: int, device: torch.device) -> Tensor | None:
    """What each new token may not attend to (N or 1, T, M): the new ones after it, and what is no row of its head."""
    if new == 1:
        return None if missing_NM is None else missing_NM[:, None]
    last_T1 = torch.arange(rows - new, rows, device=device)[:, None]
    later_TM = (torch.arange(rows, device=device) > last_T1)[None]
    return later_TM if missing_NM is None else later_TM | missing_NM[:, None]


def _fused(q_NGTC: Tensor, k_NMC: Tensor, v_NMC: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    group, new = q_NGTC.shape[1:3]
    visible = None if hidden is None else ~hidden[:, None, :new]
    k_NGMC, v_NGMC = (x_NMC[:, None].expand(-1, group, -1, -1) for x_NMC in (k_NMC, v_NMC))
    return F.scaled_dot_product_attention(q_NGTC, k_NGMC, v_NGMC, attn_mask=visible, scale=scale)


def _explicit(
    q_NGTC: Tensor, k_NMC: Tensor, v_NMC: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    kv_heads, group, new, size = q_NGTC.shape
    scores = torch.bmm(q_NGTC.reshape(kv_heads, group * new, size) * scale, k_NMC.transpose(1, 2))
    scores = scores.view(kv_heads, group, new, -1)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], float("-inf"))
    weights_NGTM = _softmax(scores)
    out = torch.bmm(weights_NGTM.to(v_NMC.dtype).flatten(1, 2), v_NMC)
    return out.view(kv_heads, group, new, size), weights_NGTM


def _softmax(scores: Tensor) -> Tensor:
    """In numpy for a decode step on a CPU: torch wakes its other threads for any softmax, however small, which takes
    ten times as long as the softmax itself."""
    if scores.device.type != "cpu" or scores.numel() > SMALL_SOFTMAX or scores.dtype != torch.float32:
        return scores.softmax(-1, dtype=torch.float32)
    array = scores.numpy()
    np.subtract(array, array.max(-1, keepdims=True), out=array)
    np.exp(array, out=array)
    np.divide(array, array.sum(-1, keepdims=True), out=array)
    return scores
