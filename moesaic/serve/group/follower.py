"""A rank that is not the first: it waits for an array, does what that says, and waits again."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from moesaic.model.layout import Layout, PagedCache
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import Adapter
from moesaic.serve.core.memory import DTYPES
from moesaic.serve.group.experts.group_slots import GroupSlots
from moesaic.serve.group.experts.rebalancing import read_changes
from moesaic.serve.group.kernels import GroupKernels
from moesaic.serve.group.pages import FollowerPages
from moesaic.serve.group.rank_state import RankState
from moesaic.serve.group.share_adapters import load_adapter_share
from moesaic.serve.group.step_array import (
    Change,
    Command,
    Copy,
    Drop,
    Forget,
    Piece,
    Predicted,
    Reader,
    Write,
    read_text,
    receive,
)
from moesaic.serve.group.worker_group import WorkerGroup
from moesaic.serve.pages.outside import TierOptions


class Follower:
    """Waiting for rank 0 may take a day, a collective inside a step `stall_seconds`."""

    def __init__(
        self,
        model: Model,
        group: WorkerGroup,
        slots: GroupSlots | None = None,
        tiers: TierOptions | None = None,
    ) -> None:
        self.model, self.group, self.slots, self.tiers = model, group, slots, tiers
        self.kernels = cast(GroupKernels, model.ops)
        self.adapters: dict[int, Adapter] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Until rank 0 says that it ends."""
        self.state = self._start(receive(self.group.control).body)
        self.pages: FollowerPages | None = None
        if self.tiers is not None and self.tiers.travel:
            self.pages = FollowerPages(self.model, self.group, self.state.cache, self.tiers)
        while True:
            changes, command, body = receive(self.group.control)
            for change in changes:
                self._change(change)
            if command == Command.END:
                return
            self._do(command, body)

    def _start(self, body: Reader) -> RankState:
        pages, page_size, kind = body.take(3)
        dtype = [*DTYPES.values(), torch.float16][kind]
        shapes = self.model.cache_shapes()
        cache = PagedCache(shapes, pages, page_size, dtype, self.model.device)
        return RankState(self.model, self.group, cache, self.slots)

    def _change(self, change: Change) -> None:
        if isinstance(change, Forget):
            self.adapters.pop(change.adapter, None)
        elif isinstance(change, Write | Drop):
            assert self.pages is not None
            self.pages.change(change)
        elif change.dp == self.group.dp:
            if isinstance(change, Copy):
                self.state.cache.copy_rows(change.source, change.target, change.rows)
            else:
                self.state.cache.move(change.sources, change.targets)

    def _do(self, command: Command, body: Reader) -> None:
        if command == Command.STEP:
            pieces = [Piece.read(body) for _ in range(body.one())]
            self.state.step.run(pieces, self.adapters)
        elif command == Command.HEAD:
            if self.group.dp == 0:
                self.kernels.logits(self._hidden(body.one()), self.model.output)
        elif command == Command.FETCH:
            assert self.pages is not None
            self.pages.fetch(body.rest())
        elif command == Command.PREDICT:
            self._predict(Predicted.read(body))
        elif command == Command.ADAPTER:
            number = body.one()
            self.adapters[number] = load_adapter_share(self.model, self.group, read_text(body.rest()), str(number))
            self.state.meet()
        elif command == Command.STATS:
            self.state.stats()
        elif command == Command.EXPERTS:
            self.state.move_experts(read_changes(body))
        elif command == Command.WEIGHTS:
            self.state.load_weights(read_text(body.rest()))
            self.state.meet()

    def _hidden(self, rows: int) -> Tensor:
        room_ND = torch.empty(rows, self.model.config.hidden, dtype=self.model.dtype, device=self.model.device)
        return self.group.tensor.broadcast(room_ND, "hidden")

    def _predict(self, rows: Predicted) -> None:
        device = self.model.device
        layout = Layout(
            rows.lengths,
            cached=rows.cached,
            cache=self.state.cache,
            pages=rows.pages,
            positions=torch.tensor(rows.positions, device=device),
            device=device,
        )
        hidden_RD = self._hidden(len(rows.tokens))
        self.model.predict_further(rows.layer, hidden_RD, torch.tensor(rows.tokens, device=device), layout)
