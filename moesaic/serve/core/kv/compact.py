"""One request's KV cache in compact form: every layer and head retains rows of its own, packed into its pages.

Unit u of a request is (page `pages[u // units]`, layer and head of `u % units`): `page_size` rows. Rows of a head lie
one after the other in the units of its list: blocks of quantized tokens first, then plain rows, oldest first. After
pruning, the retained rows are written again from unit 0 on, and the pages behind them are freed.

The metadata of rows (where each lies, its position, its score) is right-aligned, so that new tokens are the last
columns for all heads alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.serve.core.kv_policies import AttentionStatistics, Retained

if TYPE_CHECKING:
    from moesaic.serve.core.kv.store import Store


class CompactRequest:
    def __init__(self, store: Store, prompt: int) -> None:
        self.store, self.policy, self.prompt = store, store.policy, prompt
        layers, heads, device = store.layers, store.heads, store.device
        self.computed = 0
        self.due = self.policy.due(0, prompt)
        self.scored_from = self.policy.score_from(self.due, prompt)
        # Counts are on the host, rows and their metadata on the device.
        self.counts_LN = torch.zeros(layers, heads, dtype=torch.int64)  # rows, quantized ones included
        self.encoded = [0] * layers  # of them, in each head of a layer
        self.coded_rows: list[Tensor | None] = [None] * layers  # (N, rows) of the blocks
        self.units_LNK = torch.zeros(layers, heads, 0, dtype=torch.int64)
        self.rows_LNM = torch.zeros(layers, heads, 0, dtype=torch.int32, device=device)
        self.positions_LNM = torch.zeros(layers, heads, 0, dtype=torch.int32, device=device)
        self.scores_LNM = torch.zeros(layers, heads, 0, device=device)
        # The last tokens' queries (T, H, C), as many as keys are quantized for.
        self.recorded_queries = self.policy.encoding.queries if self.policy.encoding is not None else 0
        self.queries: list[Tensor | None] = [None] * layers
        self._count()

    # How large it is

    def _count(self) -> None:
        """What follows from the counts, as Python numbers: attention reads it in every layer."""
        rows = self.counts_LN.tolist()
        self.widths = [max(own) for own in rows]
        self.even = [min(own) == max(own) for own in rows]
        self.counts_on_device = None if all(self.even) else self.counts_LN.to(self.store.device)

    @property
    def slots_LN(self) -> Tensor:
        """Rows of the cache in use: a block of quantized tokens takes fewer than it has tokens."""
        encoded_L1 = torch.tensor(self.encoded)[:, None]
        if self.policy.encoding is None:
            return self.counts_LN
        return self.counts_LN - encoded_L1 + encoded_L1 // self.policy.encoding.group * self.store.block_rows

    def _units(self, slots_LN: Tensor) -> Tensor:
        return (slots_LN + self.store.page_size - 1) // self.store.page_size

    def pages_for(self, tokens: int) -> int:
        """How many pages it takes with so many more tokens."""
        return -(-int(self._units(self.slots_LN + tokens).sum()) // self.store.units)

    @property
    def bookkeeping_bytes(self) -> int:
        """Memory beside the pages."""
        known = (self.units_LNK, self.rows_LNM, self.positions_LNM, self.scores_LNM, *self.coded_rows, *self.queries)
        return sum(tensor.nbytes for tensor in known if tensor is not None)

    # More tokens

    def begin(self, tokens: int, pages: Sequence[int]) -> None:
        """Allocate rows for the new tokens of a forward, in all layers; `pages` are enough for them."""
        slots_LN = self.slots_LN
        self._take_units(self._units(slots_LN + tokens))
        place_LNT = slots_LN[..., None] + torch.arange(tokens)
        self.new_LNT = self._rows(place_LNT, pages).to(self.store.device)
        self.new = tokens
        self.first_scored = min(tokens, max(0, self.scored_from - self.computed))
        self.counts_LN = self.counts_LN + tokens
        self.rows_LNM = torch.cat([self.rows_LNM, self.new_LNT.int()], dim=-1)
        shape = (*self.counts_LN.shape, tokens)
        self.scores_LNM = torch.cat([self.scores_LNM, self.scores_LNM.new_zeros(shape)], dim=-1)
        positions = torch.arange(self.computed, self.computed + tokens, dtype=torch.int32, device=self.store.device)
        self.positions_LNM = torch.cat([self.positions_LNM, positions.expand(shape)], dim=-1)
        if (scored := tokens - self.first_scored) and self.policy.decay != 1.0:
            self.scores_LNM *= self.policy.decay**scored
        self._count()

    def _take_units(self, wanted_LN: Tensor) -> None:
        """Units behind the last one in use, for heads whose own are full."""
        have_LN = self._units(self.slots_LN)
        if torch.equal(have_LN, wanted_LN):
            return
        layers, heads, width = self.units_LNK.shape
        if (more := int(wanted_LN.max()) - width) > 0:
            self.units_LNK = torch.cat([self.units_LNK, self.units_LNK.new_zeros(layers, heads, more)], dim=-1)
        number_K = torch.arange(self.units_LNK.shape[-1])
        fresh_LNK = (number_K >= have_LN[..., None]) & (number_K < wanted_LN[..., None])
        first = int(have_LN.sum())
        self.units_LNK[fresh_LNK] = torch.arange(first, first + int(fresh_LNK.sum()))

    def _rows(self, place_LNX: Tensor, pages: Sequence[int]) -> Tensor:
        """The rows, numbered through the whole cache, of the given places in each head's list of units."""
        store = self.store
        unit = self.units_LNK.gather(-1, place_LNX // store.page_size)
        page, cell = torch.tensor(pages)[unit // store.units], unit % store.units
        first = (cell // store.heads * store.pages + page) * store.page_size
        return (first + place_LNX % store.page_size) * store.heads + cell % store.heads

    def extend(self, layer: int, k_TNC: Tensor, v_TNC: Tensor) -> None:
        """Write the new tokens of one layer."""
        rows, store = self.new_LNT[layer].flatten(), self.store
        store.keys_XC.index_copy_(0, rows, k_TNC.transpose(0, 1).reshape(-1, store.size).to(store.keys_XC.dtype))
        store.values_XC.index_copy_(0, rows, v_TNC.transpose(0, 1).reshape(-1, store.size).to(store.values_XC.dtype))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer (N, M, C); where heads differ, the shorter ones begin with rows that do not
        count (`missing`)."""
        store, encoding = self.store, self.policy.encoding
        plain = self.widths[layer] - self.encoded[layer]
        rows = self.rows_LNM[layer, :, self.rows_LNM.shape[-1] - plain :].flatten()
        shape = (store.heads, plain, store.size)
        k_NMC, v_NMC = (
            store.keys_XC.index_select(0, rows).view(shape),
            store.values_XC.index_select(0, rows).view(shape),
        )
        coded = self.coded_rows[layer]
        if coded is None or encoding is None:
            return k_NMC, v_NMC
        blocks = (store.heads, -1, store.block_rows * store.row_bytes)
        old_k = encoding.decode(
            store.keys_bytes.index_select(0, coded.flatten()).view(blocks), encoding.keys, store.size
        )
        old_v = encoding.decode(
            store.values_bytes.index_select(0, coded.flatten()).view(blocks), encoding.values, store.size
        )
        return torch.cat([old_k.to(k_NMC), k_NMC], dim=1), torch.cat([old_v.to(v_NMC), v_NMC], dim=1)

    def missing(self, layer: int) -> Tensor | None:
        """Where heads differ: which columns of `read` are not rows of theirs (N, M)."""
        if self.even[layer] or self.counts_on_device is None:
            return None
        width = self.widths[layer]
        return torch.arange(width, device=self.store.device) < (width - self.counts_on_device[layer])[:, None]

    def add_scores(self, layer: int, weights_NTM: Tensor, first: int) -> None:
        """Add the attention that rows got from the new tokens, from `first` on: from those that are scored, the older
        ones decayed."""
        skip, decay = max(0, self.first_scored - first), self.policy.decay
        weights_NTM = weights_NTM[:, skip:]
        if decay != 1.0:
            after_T = self.new - 1 - first - skip - torch.arange(weights_NTM.shape[1], device=weights_NTM.device)
            weights_NTM = weights_NTM * (decay ** after_T.float())[:, None]
        self.scores_LNM[layer, :, self.scores_LNM.shape[-1] - weights_NTM.shape[-1] :] += weights_NTM.sum(1)

    def record_queries(self, layer: int, q_THC: Tensor) -> None:
        """Keep the last queries, for which keys are quantized."""
        if not self.recorded_queries:
            return
        # A copy: what it is cut from is as long as the forward.
        new_THC, before = q_THC[-self.recorded_queries :].to(torch.bfloat16, copy=True), self.queries[layer]
        more = self.recorded_queries - len(new_THC)
        if before is not None and more:
            new_THC = torch.cat([before[-more:], new_THC])
        self.queries[layer] = new_THC

    # Fewer

    def end(self, tokens: Sequence[int], pages: list[int]) -> list[int]:
        """The forward has ended. Prune if that is due, and return the pages that became free."""
        self.computed += self.new
        if self.computed < self.due:
            return []
        statistics = AttentionStatistics(
            self.computed,
            self.prompt,
            tokens[: self.computed],
            self.positions_LNM,
            self.scores_LNM,
            lambda layer: self.read(layer)[0],
            lambda: self.store.kinds,
        )
        retained = self.policy.prune(statistics)
        self.due = self.policy.due(self.computed, self.prompt)
        self.scored_from = self.policy.score_from(self.due, self.prompt)
        return self._rewrite(retained, pages)

    def _rewrite(self, retained: Retained | None, pages: list[int]) -> list[int]:
        """Retain some rows, quantize the oldest of them if the policy has an encoding, and pack all from unit 0 on."""
        present_LNM = self.positions_LNM >= 0
        if retained is not None:
            retained.check(self.policy, present_LNM, self.encoded)
        rows_LNM = present_LNM if retained is None else retained.rows_LNM & present_LNM
        rows_LNM[..., -1] = True  # the newest always stays: no head may be left with nothing to attend to
        counts_LN = rows_LNM.sum(-1).cpu()
        encoding = self.policy.encoding
        encoded = [encoding.encoded_tokens(min(own)) if encoding else 0 for own in counts_LN.tolist()]
        if torch.equal(counts_LN, self.counts_LN) and encoded == self.encoded:
            return []
        # Right-aligned again: in every head what is pruned, then what is retained, in order.
        most = int(counts_LN.max())
        column_LNM = rows_LNM.to(torch.uint8).argsort(dim=-1, stable=True)[..., rows_LNM.shape[-1] - most :]
        if encoding is not None and encoding.first:
            column_LNM = self._first_behind_blocks(column_LNM, counts_LN, encoded, encoding.first)
        gap_LNM = torch.arange(most) < (most - counts_LN)[..., None]
        gap_on_device = gap_LNM.to(self.store.device)
        contents = [
            self._contents(layer, rows_LNM, column_LNM, retained, counts_LN, encoded) for layer in range(len(encoded))
        ]
        self.positions_LNM = self.positions_LNM.gather(-1, column_LNM).masked_fill_(gap_on_device, -1)
        self.scores_LNM = self.scores_LNM.gather(-1, column_LNM).masked_fill_(gap_on_device, 0.0)
        self.counts_LN, self.encoded = counts_LN, encoded
        self._count()
        self._place(pages, gap_LNM)
        for layer, (k_NMC, v_NMC, coded) in enumerate(contents):
            self._write(layer, k_NMC, v_NMC, coded, ~gap_on_device[layer])
        used = self.pages_for(0)
        freed = pages[used:]
        del pages[used:]
        return freed

    def _first_behind_blocks(self, column_LNM: Tensor, counts_LN: Tensor, encoded: list[int], first: int) -> Tensor:
        """The order of columns in which the first rows, which are not quantized, come after all that are."""
        column_LNM = column_LNM.clone()
        for layer, (before, after) in enumerate(zip(self.encoded, encoded)):
            own_NM = column_LNM[layer, :, column_LNM.shape[-1] - int(counts_LN[layer].max()) :]
            stays, coded = own_NM[:, before : before + first], own_NM[:, before + first : after + first]
            own_NM[:, before : after + first] = torch.cat([coded, stays], dim=1)
        return column_LNM

    def _contents(
        self,
        layer: int,
        rows_LNM: Tensor,
        column_LNM: Tensor,
        retained: Retained | None,
        counts_LN: Tensor,
        encoded: list[int],
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """What one layer will hold: plain keys and values (N, M, C), right-aligned, and quantized blocks as bytes."""
        store, encoding, before = self.store, self.policy.encoding, self.encoded[layer]
        dropped = not torch.equal(counts_LN[layer], self.counts_LN[layer])
        old = None
        if before and encoding is not None and (coded := self.coded_rows[layer]) is not None:
            blocks = (store.heads, before // encoding.group, -1)
            flat = coded.flatten()
            old = store.keys_bytes[flat].view(blocks), store.values_bytes[flat].view(blocks)
        k_NMC, v_NMC = self.read(layer)
        width = int(counts_LN[layer].max())
        if retained is not None and retained.onto_LNM is not None:
            onto_NM = retained.onto_LNM[layer, :, retained.onto_LNM.shape[-1] - k_NMC.shape[1] :]
            k_NMC, v_NMC = self.policy.merge(k_NMC, v_NMC, onto_NM)
        if dropped or (encoding is not None and encoding.first):
            start = rows_LNM.shape[-1] - self.widths[layer]  # columns of the layer begin here
            index = (column_LNM[layer, :, column_LNM.shape[-1] - width :] - start).clamp_(min=0)
            index = index[..., None].expand(-1, -1, store.size)
            k_NMC, v_NMC = k_NMC.gather(1, index), v_NMC.gather(1, index)
        after = encoded[layer]
        if encoding is None or not after:
            return k_NMC, v_NMC, None
        block_bytes = store.block_rows * store.row_bytes
        fresh = (
            encoding.encode(k_NMC[:, before:after], encoding.keys, block_bytes, self._queries_of(layer)),
            encoding.encode(v_NMC[:, before:after], encoding.values, block_bytes),
        )
        joined = fresh if old is None else (torch.cat([old[0], fresh[0]], 1), torch.cat([old[1], fresh[1]], 1))
        return k_NMC[:, after:], v_NMC[:, after:], joined

    def _queries_of(self, layer: int) -> Tensor | None:
        """The last queries of each key head (N, Q, C)."""
        q_THC = self.queries[layer]
        return None if q_THC is None else q_THC.unflatten(1, (self.store.heads, -1)).transpose(0, 1).flatten(1, 2)

    def _place(self, pages: Sequence[int], gap_LNM: Tensor) -> None:
        """Assign units from 0 on to all rows there are now, and compute where each lies."""
        store, encoding = self.store, self.policy.encoding
        self.units_LNK = self.units_LNK.new_zeros(*self.counts_LN.shape, 0)
        slots_LN = self.slots_LN
        wanted_LN = self._units(slots_LN)
        ends = wanted_LN.flatten().cumsum(0).view_as(wanted_LN)
        self.units_LNK = (ends - wanted_LN)[..., None] + torch.arange(int(wanted_LN.max()))
        # A gap points at the head's first row, which is there: a row never written may hold NaN.
        most = gap_LNM.shape[-1]
        place_LNM = (torch.arange(most) - most + slots_LN[..., None]).clamp_(min=0)
        self.rows_LNM = self._rows(place_LNM, pages).int().to(store.device)
        self.coded_rows = [None] * len(self.encoded)
        for layer, tokens in enumerate(self.encoded):
            if tokens and encoding is not None:
                slots = torch.arange(tokens // encoding.group * store.block_rows).expand(*self.counts_LN.shape, -1)
                self.coded_rows[layer] = self._rows(slots, pages)[layer].int().to(store.device)

    def _write(
        self, layer: int, k_NMC: Tensor, v_NMC: Tensor, coded: tuple[Tensor, Tensor] | None, there_NM: Tensor
    ) -> None:
        store, plain = self.store, k_NMC.shape[1]
        last = self.rows_LNM.shape[-1] - plain
        rows, there = self.rows_LNM[layer, :, last:].long(), there_NM[:, last:]
        if self.even[layer]:
            flat = rows.flatten()
            store.keys_XC.index_copy_(0, flat, k_NMC.reshape(-1, store.size))
            store.values_XC.index_copy_(0, flat, v_NMC.reshape(-1, store.size))
        else:
            store.keys_XC[rows[there]] = k_NMC[there]
            store.values_XC[rows[there]] = v_NMC[there]
        rows_of_blocks = self.coded_rows[layer]
        if coded is not None and rows_of_blocks is not None:
            flat = rows_of_blocks.flatten().long()
            store.keys_bytes.index_copy_(0, flat, coded[0].view(-1, store.row_bytes))
            store.values_bytes.index_copy_(0, flat, coded[1].view(-1, store.row_bytes))
