"""Experts that are fetched when tokens are routed to them, and ahead of that where it can be foreseen.

`OffloadedExperts` stands in for `ops`: the model and the engine know nothing of it. When a layer comes to its experts,
those that are not in its slots are fetched; then the next layer's router looks at this layer's hidden states, before
its feed-forward half and through the next layer's norm, and the experts it would choose are fetched while this layer
and the attention after it are computed (as Eliseev and Mazur do for Mixtral). A wrong prediction costs a copy, never a
result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.linear import Norm
from moesaic.model.router import Router
from moesaic.serve.offload.expert_cache import ExpertCache, Key
from moesaic.serve.offload.expert_forms import ExpertForm, ListedForm
from moesaic.serve.offload.expert_store import ExpertStore
from moesaic.serve.offload.slot_sums import TokenWaves, in_order, sums_by_choice, waves
from moesaic.serve.offload.transfers import Job, Transfers

FEW = 16384  # choices that are brought to the host as they are; of more, only which experts are among them


@dataclass
class OffloadCounts:
    """Experts are counted once per layer and forward, however many tokens want them."""

    wanted: int = 0
    hits: int = 0  # in a slot, or on the way there because they were predicted
    misses: int = 0  # fetched when they were wanted
    predictable: int = 0  # wanted where there was a prediction
    predicted: int = 0  # and it named them
    fetched_ahead: int = 0
    fetched: int = 0
    bytes: int = 0  # of all that were fetched
    wait_seconds: float = 0.0  # that the host waited for copies

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.wanted)

    @property
    def prediction_rate(self) -> float:
        """The share of wanted experts that had been predicted."""
        return self.predicted / max(1, self.predictable)


class Slots:
    """Tensors (slots, ...) of which each slot holds an expert; one layer's, or shared by several of one shape."""

    def __init__(self, tensors: list[Tensor], store: ExpertStore, transfers: Transfers, counts: OffloadCounts) -> None:
        self.tensors, self.store, self.transfers, self.counts = tensors, store, transfers, counts
        self.cache = ExpertCache(len(tensors[0]))
        self.shared = False
        self.bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)  # of a slot
        self._jobs: dict[int, Job] = {}
        self._used: torch.cuda.Event | None = None  # after the last computation with any of them

    def fetch(self, key: Key) -> int | None:
        """Begin to fetch an expert that has no slot; None if all slots are pinned."""
        slot = self.cache.place(key)
        if slot is None:
            return None
        old = self._jobs.pop(slot, None)
        if old is not None and not old.cancel():
            with contextlib.suppress(Exception):  # nobody has asked for what it fetched
                old.wait()
        into = [tensor[slot] for tensor in self.tensors]
        self._jobs[slot] = self.transfers.begin(partial(self.store.read, key, into), self._used)
        self.counts.fetched += 1
        self.counts.bytes += self.bytes
        return slot

    def cancel(self, key: Key) -> None:
        """It is not wanted after all: if its copy has not begun, it need not."""
        slot = self.cache.slot(key)
        if slot is not None and slot in self._jobs and self._jobs[slot].cancel():
            del self._jobs[slot]
            self.cache.forget(key)
            self.counts.fetched -= 1
            self.counts.bytes -= self.bytes

    def coming(self, key: Key) -> bool:
        """Whether its copy may still be under way."""
        return self.cache.slot(key) in self._jobs

    def wait(self, keys: Sequence[Key]) -> None:
        """Until these have come."""
        begun = time.perf_counter()
        for key in keys:
            slot = self.cache.slot(key)
            assert slot is not None
            if (job := self._jobs.pop(slot, None)) is not None:
                try:
                    job.wait()
                except BaseException:
                    self.cache.forget(key)
                    raise
        self.counts.wait_seconds += time.perf_counter() - begun

    def used(self) -> None:
        """What was computed so far may use any slot: nothing is overwritten before it is done."""
        self._used = self.transfers.mark()


@dataclass
class OffloadedLayer:
    index: int
    form: ExpertForm
    slots: Slots
    norm: Norm
    router: Router
    following: OffloadedLayer | None = None
    expected: set[int] | None = None  # experts that were predicted for the next forward to come here
    ahead: list[Key] = field(default_factory=list)  # of those the ones that are pinned

    def __post_init__(self) -> None:
        self.count = self.form.count
        self.experts = self.form.weights(self.slots.tensors)


class OffloadedExperts(WrappedKernels):
    """`layers` by the sites of their experts."""

    def __init__(self, plain: Kernels, layers: dict[str, OffloadedLayer], counts: OffloadCounts) -> None:
        super().__init__(plain)
        self.layers, self.counts = layers, counts
        self._norms = {id(layer.norm.weight) for layer in layers.values()}
        self._stream_TD: Tensor | None = None

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if id(weight_D) in self._norms:
            self._stream_TD = x_TD
        return self.plain.rms_norm(x_TD, weight_D, eps)

    @torch.no_grad()
    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        layer = self.layers.get(weights.site)
        if layer is None:
            return self.plain.experts(x_TD, routes, weights)
        if not len(x_TD):
            return torch.zeros_like(x_TD)
        wanted, ahead = experts_among(routes.experts_TK, self._predict(layer))
        self._count(layer, wanted)
        release(layer, wanted)
        if isinstance(layer.form, ListedForm):
            return self._listed(layer, layer.form, x_TD, routes, wanted, ahead)
        cache = layer.slots.cache
        kept = {expert for expert in wanted if _pinned(cache, (layer.index, expert))}  # there for good
        if len(wanted) - len(kept) > cache.available:
            return self._by_waves(layer, x_TD, routes, wanted, kept, ahead)
        self._pin(layer, wanted)
        try:
            self._fetch_ahead(layer, ahead)
            slots = [_slot(layer, expert) for expert in wanted]
            if sums_by_choice(self.plain, x_TD, layer.experts.activation) or in_order(slots):
                layer.slots.wait([(layer.index, expert) for expert in wanted])
                chosen = Routes(_table(layer, wanted, x_TD.device)[routes.experts_TK], routes.weights_TK)
                return self.plain.experts(x_TD, chosen, layer.experts)
            rows = waves(self.plain, x_TD, routes, layer.count, layer.experts.activation)
            late = [expert for expert in wanted if layer.slots.coming((layer.index, expert))]
            there = [expert for expert in wanted if expert not in set(late)]
            for part in filter(None, (there, late)):  # what is there, while the rest comes
                layer.slots.wait([(layer.index, expert) for expert in part])
                rows.compute(part, _table(layer, part, x_TD.device), layer.experts)
            return rows.sum()
        finally:
            self._unpin(layer, wanted)

    def _listed(
        self,
        layer: OffloadedLayer,
        form: ListedForm,
        x_TD: Tensor,
        routes: Routes,
        wanted: list[int],
        ahead: list[int],
    ) -> Tensor:
        """Kernels that take one expert after the other, in order: each must be there when its turn comes."""
        slots = layer.slots
        held = wanted[: slots.cache.available]
        self._pin(layer, held)
        bound: set[int] = set()

        def hold(expert: int) -> None:
            if expert in bound:
                return
            if expert not in held:
                self._unpin(layer, [held.pop(0)])
                self._pin(layer, [expert])
                held.append(expert)
            slots.wait([(layer.index, expert)])
            form.bind(expert, slots.tensors[0][_slot(layer, expert)])
            bound.add(expert)

        form.gate_up.hold = form.down.hold = hold
        try:
            self._fetch_ahead(layer, ahead)
            return self.plain.experts(x_TD, routes, layer.experts)
        finally:
            self._unpin(layer, held)

    def _by_waves(
        self,
        layer: OffloadedLayer,
        x_TD: Tensor,
        routes: Routes,
        wanted: list[int],
        kept: set[int],
        ahead: list[int],
    ) -> Tensor:
        """More experts than slots: some at a time, the next fetched while those before them compute."""
        rows = waves(self.plain, x_TD, routes, layer.count, layer.experts.activation)
        room = layer.slots.cache.available
        if isinstance(rows, TokenWaves):
            parts = [sorted(set(chosen)) for chosen in routes.experts_TK.tolist()]
        else:
            there = [e for e in wanted if e not in kept and layer.slots.cache.slot((layer.index, e)) is not None]
            rest = [e for e in wanted if e not in kept and e not in set(there)]
            size = max(1, room // 2)
            parts = [(there + rest)[at : at + size] for at in range(0, len(there) + len(rest), size)]
            parts[0] += kept
        self._pin(layer, parts[0])
        for number, part in enumerate(parts):
            later = parts[number + 1] if number + 1 < len(parts) else None
            early = later is not None and self._fits(layer, later)
            try:
                if later is None:
                    self._fetch_ahead(layer, ahead)
                elif early:
                    self._pin(layer, later)
                layer.slots.wait([(layer.index, expert) for expert in part])
                rows.compute(part, _table(layer, part, x_TD.device), layer.experts)
            except BaseException:
                if early and later is not None:
                    self._unpin(layer, later)
                raise
            finally:
                self._unpin(layer, part)
            if later is not None and not early:
                self._pin(layer, later)
        return rows.sum()

    def _fits(self, layer: OffloadedLayer, experts: Sequence[int]) -> bool:
        cache = layer.slots.cache
        return sum(not _pinned(cache, (layer.index, expert)) for expert in experts) <= cache.available

    def _pin(self, layer: OffloadedLayer, experts: Sequence[int]) -> None:
        """Hold these in slots; what is in none is fetched."""
        slots, missing = layer.slots, []
        for expert in experts:
            if (slot := slots.cache.slot((layer.index, expert))) is not None:
                slots.cache.pin(slot)
            else:
                missing.append(expert)
        for expert in missing:
            slot = slots.fetch((layer.index, expert))
            assert slot is not None, "more experts at a time than slots"
            slots.cache.pin(slot)

    def _unpin(self, layer: OffloadedLayer, experts: Sequence[int]) -> None:
        layer.slots.used()
        for expert in experts:
            if (slot := layer.slots.cache.slot((layer.index, expert))) is not None:  # None: it could not be read
                layer.slots.cache.unpin(slot)

    def _count(self, layer: OffloadedLayer, wanted: list[int]) -> None:
        counts, cache = self.counts, layer.slots.cache
        cache.tick()
        there = 0
        for expert in wanted:
            cache.want((layer.index, expert))
            there += cache.slot((layer.index, expert)) is not None
        counts.wanted += len(wanted)
        counts.hits += there
        counts.misses += len(wanted) - there
        if layer.expected is not None:
            counts.predictable += len(wanted)
            counts.predicted += len(layer.expected.intersection(wanted))

    def _predict(self, layer: OffloadedLayer) -> Tensor | None:
        """The experts that the next layer would choose if this one's feed-forward half and its own attention added
        nothing."""
        following, stream_TD = layer.following, self._stream_TD
        self._stream_TD = None
        if following is None or stream_TD is None:
            return None
        x_TD = self.plain.rms_norm(stream_TD, following.norm.weight, following.norm.eps)
        logits_TE = self.plain.router_logits(x_TD, following.router.weight)
        return self.plain.route(logits_TE, following.router.correction, following.router.shape).experts_TK

    def _fetch_ahead(self, layer: OffloadedLayer, experts: list[int]) -> None:
        following = layer.following
        if following is None or not experts:
            return
        release(following, ())  # what an earlier forward, which stopped between, expected
        following.expected = set(experts)
        slots, cache = following.slots, following.slots.cache
        # What others in shared slots will need at least.
        reserve = following.router.shape.per_token if slots.shared else 0
        keys = [(following.index, expert) for expert in experts]
        there = [key for key in keys if cache.slot(key) is not None]
        for key in [*there, *(key for key in keys if cache.slot(key) is None)]:
            if cache.available <= reserve:
                break
            if (slot := cache.slot(key)) is None:
                slot = slots.fetch(key)
                assert slot is not None
                self.counts.fetched_ahead += 1
            cache.pin(slot)
            following.ahead.append(key)


def release(layer: OffloadedLayer, wanted: Sequence[int]) -> None:
    """What was expected here is not held any longer; what is not among the wanted need not come."""
    for key in layer.ahead:
        slot = layer.slots.cache.slot(key)
        if slot is None:
            continue
        layer.slots.cache.unpin(slot)
        if key[1] not in wanted:
            layer.slots.cancel(key)
    layer.ahead, layer.expected = [], None


def experts_among(routes_TK: Tensor, ahead_TK: Tensor | None) -> tuple[list[int], list[int]]:
    """The experts that occur in each, in order; brought to the host at once."""
    both = [routes_TK] if ahead_TK is None else [routes_TK, ahead_TK]
    if sum(part.numel() for part in both) > FEW:
        found = [part.unique().tolist() for part in both]
    else:
        numbers = torch.cat([part.reshape(-1) for part in both]).tolist()
        found = [sorted(set(numbers[: routes_TK.numel()])), sorted(set(numbers[routes_TK.numel() :]))]
    return found[0], found[1] if len(found) > 1 else []


def _pinned(cache: ExpertCache, key: Key) -> bool:
    slot = cache.slot(key)
    return slot is not None and cache.pins[slot] > 0


def _slot(layer: OffloadedLayer, expert: int) -> int:
    slot = layer.slots.cache.slot((layer.index, expert))
    assert slot is not None
    return slot


def _table(layer: OffloadedLayer, experts: Sequence[int], device: torch.device) -> Tensor:
    """The slot of each of these experts, by its number."""
    table = [0] * layer.count
    for expert in experts:
        table[expert] = _slot(layer, expert)
    return torch.tensor(table).to(device, non_blocking=True)
