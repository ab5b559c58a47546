"""Rank 0 of a worker group: an engine whose forwards run on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.model.layout import Layout, PagedCache
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import Adapter
from moesaic.serve.core.driver import EngineLost
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import Chunk, Forward, ForwardPass, Runner
from moesaic.serve.core.kv.store import Store
from moesaic.serve.core.memory import DTYPES, SHARE, free_bytes
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.sampler import Sampler
from moesaic.serve.group.experts.group_slots import GroupSlots
from moesaic.serve.group.experts.rebalancing import Changes, Rebalancer, write_changes
from moesaic.serve.group.group_cache import GroupCache
from moesaic.serve.group.kernels import GroupKernels
from moesaic.serve.group.page_pools import PagePools
from moesaic.serve.group.pages import group_pages
from moesaic.serve.group.rank_state import RankState, RankStats
from moesaic.serve.group.refusals import check_drafters
from moesaic.serve.group.share_adapters import load_adapter_share
from moesaic.serve.group.share_model import ShareModel
from moesaic.serve.group.step_array import Change, Command, Forget, Piece, Predicted, send, spans_of, write_text
from moesaic.serve.group.worker_group import WorkerGroup


def agreed_cache_bytes(group: WorkerGroup, model: Model, asked: int | None) -> int:
    """What the KV cache of every rank may take: what is left at the rank that has least."""
    sharing = group.neighbours if model.device.type == "cpu" else 1
    own = asked if asked is not None else int(free_bytes(model.device) * SHARE) // sharing
    return int(group.control.gather(torch.tensor([own]), "start").min())


class GroupEngine(Engine):
    """`close` ends the other ranks; they also end when this process does."""

    def __init__(
        self,
        model: Model,
        group: WorkerGroup,
        slots: GroupSlots | None = None,
        rebalance_steps: int = 0,
        **options: Any,
    ) -> None:
        self.group, self.slots = group, slots
        self.changes: list[Change] = []
        self.numbers: dict[Adapter, int] = weakref.WeakKeyDictionary()  # type: ignore[assignment]
        self.loaded = 0
        tiers, weights = options.pop("tiers", None), options.pop("weights", None)
        super().__init__(model, **options)
        self.outside = group_pages(self, tiers, weights)
        check_drafters(self.drafter, self.predicts)
        kernels = cast(GroupKernels, model.ops)
        kernels.announce = self._ask_for_logits
        if isinstance(model, ShareModel):
            model.announce = self._ask_to_predict
        self.rebalancer = self.new_rebalancer(rebalance_steps)

    def new_rebalancer(self, steps: int) -> Rebalancer | None:
        """What moves experts to where the load is, every so many steps."""
        if self.slots is None:
            return None
        slots, ranks = self.slots, self.group.layout.ep
        nodes = ranks // self.group.neighbours if ranks % self.group.neighbours == 0 else 1
        return Rebalancer(self.experts, lambda: slots.plans, self.move_experts, steps, max(1, nodes))

    def before_step(self) -> None:
        if self.rebalancer is not None:
            self.rebalancer.before_step()

    def move_experts(self, changes: Changes) -> None:
        """Between two steps."""
        self.tell(Command.EXPERTS, write_changes(changes))
        self.state.move_experts(changes)

    @property
    def predicts(self) -> bool:
        """Whether the ranks can run multi-token-prediction layers together."""
        return self.group.layout.dp == 1

    def new_cache(self, pages: int, page_size: int, dtype: torch.dtype, sequences: int) -> PagedCache:
        model = self.model
        cache = GroupCache(self.changes, model.cache_shapes(), pages, page_size, dtype, model.device)
        known = list(DTYPES.values())
        kinds = [*known, torch.float16]
        send(self.group.control, [], Command.START, [pages, page_size, kinds.index(dtype)])
        self.state = RankState(model, self.group, cache, self.slots)
        return cache

    def new_page_pool(self, reuse_prefixes: bool, store: Store | None) -> PagePool:
        if self.group.layout.dp == 1:
            return super().new_page_pool(reuse_prefixes, store)
        return PagePools(self.cache, self.changes, self.group.layout.dp, reuse_prefixes)

    def new_runner(self) -> Runner:
        return GroupRunner(self)

    def tell(self, command: Command, body: Sequence[int] = ()) -> None:
        """To all other ranks, with what has changed since the last time."""
        changes = list(self.changes)
        self.changes.clear()
        send(self.group.control, changes, command, body, self.group.stall_seconds)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Every rank reads it, and keeps its rows."""
        adapter = load_adapter_share(self.model, self.group, path, name)
        number, self.loaded = self.loaded, self.loaded + 1
        self.tell(Command.ADAPTER, [number, *write_text(str(Path(path).absolute()))])
        self.state.meet()
        self.numbers[adapter], self.adapters[name] = number, adapter
        weakref.finalize(adapter, self.changes.append, Forget(number))

    def load_weights(self, directory: str | Path, recompute: bool = True) -> None:
        """Every rank reads its share of other weights of the same model."""
        self.state.check_weights(directory)
        self.tell(Command.WEIGHTS, write_text(str(Path(directory).absolute())))
        self.state.load_weights(str(directory))
        self.state.meet()
        self.weights_changed(recompute)

    def rank_stats(self) -> list[RankStats]:
        """Between two steps: what each rank holds and has sent."""
        self.tell(Command.STATS)
        return self.state.stats()

    def close(self) -> None:
        self.tell(Command.END)

    def _ask_for_logits(self, hidden_ND: Tensor) -> None:
        self.tell(Command.HEAD, [len(hidden_ND)])
        self.group.tensor.broadcast(hidden_ND, "hidden")

    def _ask_to_predict(self, layer: int, hidden_RD: Tensor, next_R: Tensor, layout: Layout) -> None:
        spans = layout.spans
        assert layout.pages is not None
        rows = Predicted(
            layer,
            [span.new for span in spans],
            [span.cached for span in spans],
            [list(pages) for pages in layout.pages],
            layout.positions_T.tolist(),
            next_R.tolist(),
        )
        self.tell(Command.PREDICT, rows.numbers())
        self.group.tensor.broadcast(hidden_RD, "hidden")


class GroupForward(Forward):
    """Requests of one data-parallel rank after those of another."""

    def __init__(self, engine: GroupEngine, chunks: list[Chunk]) -> None:
        super().__init__(sorted(chunks, key=lambda chunk: chunk.request.data_rank), engine.version)
        self.engine = engine
        adapters = [chunk.request.adapter for chunk in self.chunks]
        numbers = [-1 if adapter is None else engine.numbers[adapter] for adapter in adapters]
        self.pieces = [Piece.of(chunk, number) for chunk, number in zip(self.chunks, numbers, strict=True)]
        self.used = {number: adapter for number, adapter in zip(numbers, adapters) if adapter is not None}
        self.spans = spans_of(self.pieces)

    def advance(self) -> None:
        body = [len(self.pieces), *(number for piece in self.pieces for number in piece.numbers())]
        self.engine.tell(Command.STEP, body)
        found = self.engine.state.step.run(self.pieces, self.used)
        self.hidden_TD, self.logits_NV, self.routing, self.done = *found, True

    def sampler(self, rows: list[int]) -> Sampler:
        wanted = [span.start + row for piece, span in zip(self.pieces, self.spans) for row in piece.wanted]
        assert rows == wanted, "logits were computed of other rows"
        return Sampler(self.logits_NV)


class GroupRunner(Runner):
    """All layers at once: ranks do not stop between them."""

    takes_windows = False
    engine: GroupEngine

    def run(self, work: list[Chunk] | ForwardPass) -> Forward | None:
        assert isinstance(work, list), "nothing stops a forward"
        if not work:
            return None
        engine = self.engine
        start = engine.clock()
        try:
            engine.before_step()
            forward = GroupForward(engine, work)
            forward.advance()
        except EngineLost:
            raise
        except Exception as error:  # others wait in a collective that this rank left
            raise EngineLost(f"a step failed on rank 0 ({type(error).__name__}: {error})") from error
        forward.seconds = engine.clock() - start
        engine.counts.busy_seconds += forward.seconds
        engine.scheduler.policy.finished(cast(ForwardPass, forward))
        return forward
