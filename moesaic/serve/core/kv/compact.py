"""One request's KV cache in compact form: every layer and head retains rows of its own, packed into its pages.

Unit u of a request is (page `pages[u // units]`, layer and head of `u % units`): `page_size` rows. A head has a list of
units (`units.py`): blocks of quantized tokens lie in its first slots, then plain rows. Metadata (where a row lies, its
position, its score) is one column a row, oldest first and right-aligned, so that new tokens are the last columns for
all heads alike. `packing.py` has what happens when rows are pruned or quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.native.retained_rows import RETAINED
from moesaic.serve.core.kv.packing import repack
from moesaic.serve.core.kv.units import Units
from moesaic.serve.core.kv_policies import AttentionStatistics

if TYPE_CHECKING:
    from moesaic.serve.core.kv.store import Store

SPARE = 64  # columns of metadata that are allocated ahead


class CompactRequest:
    def __init__(self, store: Store, prompt: int) -> None:
        self.store, self.policy, self.prompt = store, store.policy, prompt
        layers, heads = store.layers, store.heads
        self.computed = 0
        self.new = 0  # tokens of the forward under way
        self.due = self.policy.due(0, prompt)
        self.scored_from = self.policy.score_from(self.due, prompt)
        # Counts and units are on the host, rows and their metadata on the device.
        self.counts_LN = torch.zeros(layers, heads, dtype=torch.int64)  # rows, quantized ones included
        self.encoded = [0] * layers  # of them, in each head of a layer
        self.coded_rows: list[Tensor | None] = [None] * layers  # (N, rows) of the blocks
        self.units = Units(store)
        self.set_columns(
            *(torch.zeros(layers, heads, 0, dtype=kind) for kind in (torch.int32, torch.int32, torch.float))
        )
        # The last tokens' queries, those of position p at p % Q: as many as keys are quantized for.
        self.recorded_queries = self.policy.encoding.queries if self.policy.encoding is not None else 0
        self.queries_LQHC: Tensor | None = None
        self.records: Any = None  # of a step that native code computes layer by layer
        self._held: dict[int | None, Tensor] = {}  # what records point at
        self.notes: dict[str, Any] = {}  # the policy's own, from one pruning to the next

    # How large it is

    def set_columns(self, rows_LNM: Tensor, positions_LNM: Tensor, scores_LNM: Tensor) -> None:
        """New metadata, and what follows from the counts as Python numbers: attention reads it in every layer."""
        self.columns, self.ahead = rows_LNM.shape[-1], 0
        self._buffers = [self._with_spare(columns, 0) for columns in (rows_LNM, positions_LNM, scores_LNM)]
        self.count()

    def _with_spare(self, columns_LNM: Tensor, more: int) -> Tensor:
        """A copy with room for some more columns."""
        layers, heads, width = columns_LNM.shape
        room = torch.zeros(layers, heads, width + more + SPARE, dtype=columns_LNM.dtype, device=self.store.device)
        room[..., :width] = columns_LNM
        return room

    @property
    def rows_LNM(self) -> Tensor:
        return self._buffers[0][..., : self.columns]

    @property
    def positions_LNM(self) -> Tensor:
        return self._buffers[1][..., : self.columns]

    @property
    def scores_LNM(self) -> Tensor:
        return self._buffers[2][..., : self.columns]

    def count(self) -> None:
        rows = self.counts_LN.tolist()
        self.widths = [max(own) for own in rows]
        self.even = [min(own) == max(own) for own in rows]
        self.counts_on_device = None if all(self.even) else self.counts_LN.to(self.store.device)

    @property
    def coded_slots(self) -> list[int]:
        """Slots of each layer's heads that blocks of quantized tokens take; fewer than they have tokens."""
        encoding = self.policy.encoding
        if encoding is None:
            return [0] * len(self.encoded)
        return [tokens // encoding.group * self.store.block_rows for tokens in self.encoded]

    @property
    def slots_LN(self) -> Tensor:
        """Slots in use."""
        if self.policy.encoding is None:
            return self.counts_LN
        return self.counts_LN + (torch.tensor(self.coded_slots) - torch.tensor(self.encoded))[:, None]

    def pages_for(self, tokens: int) -> int:
        """How many pages it takes with so many more tokens."""
        if tokens <= self.ahead:  # whose rows are allocated already
            return self.units.pages_owned
        return self.units.pages(self.slots_LN + tokens)

    @property
    def bookkeeping_bytes(self) -> int:
        """Memory beside the pages."""
        known = (self.units.units_LNK, *self._buffers, *self.coded_rows, self.queries_LQHC)
        return sum(tensor.nbytes for tensor in known if tensor is not None)

    # More tokens

    def begin(self, tokens: int, pages: Sequence[int]) -> None:
        """Allocate rows for the new tokens of a forward, in all layers; `pages` are enough for them."""
        if tokens <= self.ahead:
            self.ahead -= tokens
        else:
            self.ahead = self._allocate(tokens, pages)
        self.first_scored = min(tokens, max(0, self.scored_from - self.computed))
        if (scored := tokens - self.first_scored) and self.policy.decay != 1.0:
            self.scores_LNM.mul_(self.policy.decay**scored)
        self.columns, self.new = self.columns + tokens, tokens
        self.counts_LN = self.counts_LN + tokens
        self.widths = [width + tokens for width in self.widths]  # `even` stays what it was
        if self.counts_on_device is not None:
            self.counts_on_device = self.counts_LN.to(self.store.device)

    def _allocate(self, tokens: int, pages: Sequence[int]) -> int:
        """Rows for so many tokens. On a GPU, where writing few numbers takes as long as writing many, those of the
        tokens that may follow too, as far as every head's last unit reaches: how many more there are then."""
        slots_LN, more = self.slots_LN, 0
        self.units.grow(slots_LN + tokens)
        if tokens == 1 and self.store.writes_ahead:
            more = int((self.units.owned_LN * self.store.page_size - slots_LN).min()) - 1
        fresh, whole = self.columns, tokens + more
        rows_LNT = self.units.rows(slots_LN[..., None] + torch.arange(whole), pages)
        if fresh + whole > self._buffers[0].shape[-1]:
            used = (self.rows_LNM, self.positions_LNM, self.scores_LNM)
            self._buffers = [self._with_spare(columns, whole) for columns in used]
        self._buffers[0][..., fresh : fresh + whole] = rows_LNT
        self._buffers[1][..., fresh : fresh + whole] = torch.arange(
            self.computed, self.computed + whole, dtype=torch.int32
        )
        self._buffers[2][..., fresh : fresh + whole] = 0.0
        return more

    def extend(self, layer: int, k_TNC: Tensor, v_TNC: Tensor) -> None:
        """Write the new tokens of one layer."""
        store = self.store
        rows = self.rows_LNM[layer, :, self.columns - self.new :].flatten().long()
        store.keys_XC.index_copy_(0, rows, k_TNC.transpose(0, 1).reshape(-1, store.size).to(store.keys_XC.dtype))
        store.values_XC.index_copy_(0, rows, v_TNC.transpose(0, 1).reshape(-1, store.size).to(store.values_XC.dtype))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer (N, M, C); where heads differ, the shorter ones begin with rows that do not
        count (`missing`)."""
        store, encoding = self.store, self.policy.encoding
        plain = self.widths[layer] - self.encoded[layer]
        rows = self.rows_LNM[layer, :, self.columns - plain :].flatten()
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
        self.scores_LNM[layer, :, self.columns - weights_NTM.shape[-1] :] += weights_NTM.sum(1)

    def record_queries(self, layer: int, q_THC: Tensor) -> None:
        """Keep the last queries, for which keys are quantized."""
        if not self.recorded_queries:
            return
        new = min(len(q_THC), self.recorded_queries)
        last = self.computed + len(q_THC)
        places = torch.arange(last - new, last, device=q_THC.device) % self.recorded_queries
        self.room_for_queries(q_THC.shape[1])[layer, places] = q_THC[-new:].to(torch.bfloat16)

    def room_for_queries(self, heads: int) -> Tensor:
        if self.queries_LQHC is None:
            shape = (self.store.layers, self.recorded_queries, heads, self.store.size)
            self.queries_LQHC = torch.zeros(shape, dtype=torch.bfloat16, device=self.store.device)
        return self.queries_LQHC

    def one_window(self) -> bool:
        """Whether no row that one of the new tokens sees lies before the window of a later one."""
        windows = self.store.windows
        return self.new == 1 or not windows.any or bool((windows.seen(self.widths) == self.widths).all())

    def native(self, heads: int, token: int | None = None) -> Any:
        """All of it as native code reads it, a record for each layer; None where that does not know the form. With a
        token, as that one of the new ones sees it."""
        store, encoding = self.store, self.policy.encoding
        if not store.is_native or any(e and not even for e, even in zip(self.encoded, self.even)):
            return None
        made = np.zeros(store.layers, RETAINED)
        rows_LNB, _, scores_LNB = self._buffers
        later = 0 if token is None else self.new - 1 - token
        layer_L, encoded_L = np.arange(store.layers), np.array(self.encoded)
        seen_L = store.windows.seen([width - later for width in self.widths])
        first_L = layer_L * rows_LNB.stride(0) + self.columns - later - seen_L  # columns of a layer begin here
        made["rows"] = rows_LNB.data_ptr() + 4 * (first_L + encoded_L)
        plain_L = seen_L - encoded_L
        counts_LN = self.counts_LN - torch.tensor(self.encoded)[:, None] - later
        self._held[token] = counts_LN = counts_LN.minimum(torch.from_numpy(plain_L)[:, None])
        made["counts"] = counts_LN.data_ptr() + 8 * store.heads * layer_L
        made["scores"] = scores_LNB.data_ptr() + 4 * first_L if self.first_scored < self.new else 0
        made["stride"], made["plain"] = rows_LNB.stride(1), plain_L
        made["position"] = self.computed + (token or 0)
        made["scored"], made["decay"] = self.first_scored, self.policy.decay
        for layer, size in enumerate(store.windows.sizes):
            if size is not None:
                made["scores"][layer] = 0  # nobody asks
        if self.recorded_queries:
            queries_LQHC = self.room_for_queries(heads)
            made["queries"] = queries_LQHC.data_ptr() + 2 * queries_LQHC.stride(0) * layer_L
            made["last"] = self.recorded_queries
        if encoding is not None:
            made["coded"] = [0 if coded is None else coded.data_ptr() for coded in self.coded_rows]
            made["blocks"], made["rows_each"] = encoded_L // encoding.group, store.block_rows
            made["tokens"], made["bits"] = encoding.group, encoding.bits
            made["key_width"] = 0 if encoding.keys == "channel" else encoding.width(store.size)
            made["value_width"] = encoding.width(store.size)
        return made

    # Fewer

    def end(self, tokens: Sequence[int], pages: list[int], computed: int) -> list[int]:
        """The forward has ended, and so many tokens are computed: draft tokens beyond them were rejected. Prune if that
        is due, and return the pages that became free."""
        if rejected := self.computed + self.new - computed:
            self.columns, self.ahead = self.columns - rejected, 0
            self.counts_LN = self.counts_LN - rejected
            self.count()
        self.computed, self.new = computed, 0
        if self.computed < self.due:
            return []
        windows = self.store.windows
        statistics = AttentionStatistics(
            self.computed,
            self.prompt,
            tokens[: self.computed],
            windows.shown(self.positions_LNM),
            windows.shown(self.scores_LNM),
            lambda number: self.read(windows.judged[number])[0],
            lambda: self.store.kinds,
            self.notes,
        )
        retained = self.policy.prune(statistics)
        if retained is not None:
            retained.check(self.policy, statistics.present_LNM, [self.encoded[layer] for layer in windows.judged])
        retained = windows.with_all_layers(retained, self.positions_LNM, self.computed)
        self.due = self.policy.due(self.computed, self.prompt)
        self.scored_from = self.policy.score_from(self.due, self.prompt)
        return repack(self, retained, pages)
