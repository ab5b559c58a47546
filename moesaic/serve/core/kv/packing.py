"""What happens to a compact request's rows when they are pruned, merged or quantized, so that whole pages become free.

Blocks of quantized tokens lie in the first slots of a head, plain rows in the slots after them, in any order. Rows that
stay do not move, except those in slots that are given up or become part of a block: they fill the slots of rows that
are gone. So a round moves about as many rows as it evicts or quantizes, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.serve.core.kv.encoding import Encoding
from moesaic.serve.core.kv_policies import Retained

if TYPE_CHECKING:
    from moesaic.serve.core.kv.compact import CompactRequest

MAX_NUMBERS = 1 << 22  # of keys that are quantized at a time


def repack(compact: CompactRequest, retained: Retained | None, pages: list[int]) -> list[int]:
    """Retain some rows, quantize the oldest of them if the policy has an encoding; the pages that became free."""
    present_LNM = compact.positions_LNM >= 0
    if retained is not None:
        kept_LNM = retained.rows_LNM & present_LNM
        kept_LNM[..., -1] = True  # the newest always stays: no head may be left with nothing to attend to
        if retained.onto_LNM is not None:
            _merge(compact, retained.onto_LNM, kept_LNM)
        if not torch.equal(kept_LNM, present_LNM):
            _evict(compact, kept_LNM, pages)
    if compact.policy.encoding is not None:
        _encode(compact, compact.policy.encoding, pages)
    used = compact.pages_for(0)
    freed = pages[used:]
    del pages[used:]
    return freed


def _merge(compact: CompactRequest, onto_LNM: Tensor, kept_LNM: Tensor) -> None:
    """Write what every set of rows becomes into the one that stays for it."""
    store = compact.store
    for layer in store.windows.judged:
        onto_NM, kept_NM = onto_LNM[layer], kept_LNM[layer]
        k_NMC, v_NMC = compact.policy.merge(*compact.read(layer), onto_NM)
        rows = compact.rows_LNM[layer][kept_NM].long()
        store.keys_XC[rows], store.values_XC[rows] = k_NMC[kept_NM], v_NMC[kept_NM]


def _evict(compact: CompactRequest, kept_LNM: Tensor, pages: Sequence[int]) -> None:
    plain_LNM = kept_LNM.clone()
    for layer, encoded in enumerate(compact.encoded):  # quantized rows have no row of their own
        start = compact.columns - compact.widths[layer]
        plain_LNM[layer, :, start : start + encoded] = False
    rows_LNM = _settle(compact, plain_LNM, compact.encoded, pages)
    compact.counts_LN = counts_LN = kept_LNM.sum(-1).cpu()
    # Right-aligned again: in every head what is retained, in order.
    most, device = int(counts_LN.max()), kept_LNM.device
    head_LN1 = torch.arange(counts_LN.numel(), device=device).view(*counts_LN.shape, 1)
    gap_LN1 = (most - counts_LN).to(device)[..., None]
    place_X = (head_LN1 * most + gap_LN1 + kept_LNM.cumsum(-1) - 1)[kept_LNM]

    def compressed(columns_LNM: Tensor, nothing: int) -> Tensor:
        made = torch.full((counts_LN.numel() * most,), nothing, dtype=columns_LNM.dtype, device=device)
        made[place_X] = columns_LNM[kept_LNM]
        return made.view(*counts_LN.shape, most)

    rows_LNM = compressed(rows_LNM, -1)
    # A gap points at the head's newest row, which is there: a row never written may hold NaN.
    rows_LNM = rows_LNM.where(rows_LNM >= 0, rows_LNM[..., -1:])
    compact.set_columns(rows_LNM, compressed(compact.positions_LNM, -1), compressed(compact.scores_LNM, 0))


def _settle(compact: CompactRequest, plain_LNM: Tensor, encoded: list[int], pages: Sequence[int]) -> Tensor:
    """Fit the units to these plain rows behind blocks of so many tokens, and move what must move; where each row is."""
    store, had = compact.store, compact.coded_slots
    counts_LN, compact.encoded = plain_LNM.sum(-1).cpu(), encoded
    coded_L1 = torch.tensor(compact.coded_slots)[:, None]
    compact.units.fit(counts_LN + coded_L1)
    moved = _moved_blocks(compact, had, pages)
    # The rows of every head's slots, and which head each row of the cache belongs to now.
    slot_M = torch.arange(int(counts_LN.max()))
    inside_LNM = slot_M < counts_LN[..., None]
    rows_LNM = compact.units.rows((slot_M + coded_L1[..., None]).where(inside_LNM, 0), pages)
    inside_LNM = inside_LNM.to(store.device)
    head_LN1 = torch.arange(counts_LN.numel(), dtype=torch.int32, device=store.device).view(*counts_LN.shape, 1)
    owner_X, now_LNM = store.owner_X, compact.rows_LNM.clone()
    owner_X[now_LNM.flatten().long()] = -1
    owner_X[rows_LNM[inside_LNM].long()] = head_LN1.expand_as(inside_LNM)[inside_LNM]
    moving_LNM = plain_LNM & (owner_X[now_LNM.long()] != head_LN1)
    # What is in its head's slots stays; of the slots that are left over there are as many as rows that must move.
    owner_X[now_LNM[plain_LNM & ~moving_LNM].long()] = -1
    free_LNM = inside_LNM & (owner_X[rows_LNM.long()] == head_LN1)
    targets, sources = rows_LNM[free_LNM], now_LNM[moving_LNM]
    now_LNM[moving_LNM] = targets
    sources, targets = torch.cat([sources, moved[0]]), torch.cat([targets, moved[1]])
    for slab_XC in (store.keys_XC, store.values_XC):  # all are read before any is written
        slab_XC.index_copy_(0, targets.long(), slab_XC.index_select(0, sources))
    return now_LNM


def _moved_blocks(compact: CompactRequest, slots: list[int], pages: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows of blocks, in the first slots of each layer's heads, whose units have another number now: from where and to
    where."""
    none = compact.rows_LNM.new_empty(0)
    sources, targets = [none], [none]
    for layer, rows in enumerate(compact.coded_rows):
        if rows is not None:
            now = _slot_rows(compact, [layer], slots[layer], pages)[0]
            sources.append(rows[now != rows])
            targets.append(now[now != rows])
            compact.coded_rows[layer] = now
    return torch.cat(sources), torch.cat(targets)


def _slot_rows(compact: CompactRequest, layers: list[int], slots: int, pages: Sequence[int]) -> Tensor:
    """The rows of the first slots of all heads of some layers, which have so many (G, N, slots)."""
    slots_GNX = torch.arange(slots).expand(len(layers), compact.store.heads, slots)
    return compact.units.rows(slots_GNX, pages, layers)


def _encode(compact: CompactRequest, encoding: Encoding, pages: Sequence[int]) -> None:
    """Quantize the oldest plain rows but the first, in whole blocks. Columns are then: quantized rows, the first ones,
    the others."""
    store, before, first = compact.store, compact.encoded, encoding.first
    after = [
        encoding.encoded_tokens(min(own)) if size is None else 0  # rows of a window come and go
        for own, size in zip(compact.counts_LN.tolist(), store.windows.sizes)
    ]
    if after == before:
        return
    columns = [one.clone() for one in (compact.rows_LNM, compact.positions_LNM, compact.scores_LNM)]
    plain_LNM = columns[1] >= 0
    for layer, (old, new) in enumerate(zip(before, after)):
        start = compact.columns - compact.widths[layer]
        for one in columns:
            ends, chosen = (
                one[layer, :, start + old : start + old + first],
                one[layer, :, start + old + first : start + new + first],
            )
            one[layer, :, start + old : start + new + first] = torch.cat([chosen, ends], dim=-1)
        plain_LNM[layer, :, start : start + new] = False
    # Layers with equally many new blocks are quantized together, unless they are long: while decoding all have one.
    alike: list[tuple[int, list[int]]] = []
    for fresh in sorted({new - old for old, new in zip(before, after)} - {0}):
        layers = [layer for layer in range(store.layers) if after[layer] - before[layer] == fresh]
        most = max(1, MAX_NUMBERS // (store.heads * fresh * store.size))
        alike += [(fresh, layers[start : start + most]) for start in range(0, len(layers), most)]
    blocks = []
    for fresh, layers in alike:
        start_G = torch.tensor([compact.columns - compact.widths[layer] + before[layer] for layer in layers])
        place_GNF = (start_G[:, None] + torch.arange(fresh))[:, None].expand(-1, store.heads, -1).to(store.device)
        rows = columns[0][layers].gather(-1, place_GNF).long()
        k_XFC, v_XFC = store.keys_XC[rows].flatten(0, 1), store.values_XC[rows].flatten(0, 1)
        size = store.block_rows * store.row_bytes
        keys = encoding.encode(k_XFC, encoding.keys, size, _queries_of(compact, layers))
        values = encoding.encode(v_XFC, encoding.values, size)
        blocks.append((layers, keys.unflatten(0, (len(layers), -1)), values.unflatten(0, (len(layers), -1))))
    compact.set_columns(*columns)
    had = compact.coded_slots
    compact.set_columns(_settle(compact, plain_LNM, after, pages), *columns[1:])
    for layers, keys_GNBX, values_GNBX in blocks:
        for layer, keys, values in zip(layers, keys_GNBX, values_GNBX):
            rows_NX = _slot_rows(compact, [layer], compact.coded_slots[layer], pages)[0]
            compact.coded_rows[layer] = rows_NX
            flat = rows_NX[:, had[layer] :].flatten().long()
            store.keys_bytes.index_copy_(0, flat, keys.view(-1, store.row_bytes))
            store.values_bytes.index_copy_(0, flat, values.view(-1, store.row_bytes))


def _queries_of(compact: CompactRequest, layers: list[int]) -> Tensor | None:
    """The last queries of each key head of some layers (heads, queries, C), oldest first."""
    if compact.queries_LQHC is None:
        return None
    kept, last = compact.recorded_queries, compact.computed
    places = [position % kept for position in range(max(0, last - kept), last)]
    q_GQHC = compact.queries_LQHC[layers][:, places]
    return q_GQHC.unflatten(2, (compact.store.heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
