"""A model whose experts stay on disk or in host memory, behind a cache of given bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels
from moesaic.kernels.quantized import QuantizedKernels, QuantizedWeight
from moesaic.model.block import Block
from moesaic.model.directory import StoredWeights, fill
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.families import Place
from moesaic.model.families.places import by_parameter
from moesaic.model.formats.opening import is_compressed
from moesaic.model.transformer import Model
from moesaic.model.whole_only import refuse_reshaping
from moesaic.serve.offload.expert_cache import Key
from moesaic.serve.offload.expert_forms import ExpertForm, ListedForm, plain_form, stacked_form
from moesaic.serve.offload.expert_store import DiskExperts, ExpertStore, HostExperts
from moesaic.serve.offload.experts import OffloadCounts, OffloadedExperts, OffloadedLayer, Slots
from moesaic.serve.offload.layer_store import HostLayers, SpilledLayers
from moesaic.serve.offload.places import Home, default_home
from moesaic.serve.offload.slot_budget import ExpertShape, divide
from moesaic.serve.offload.transfers import transfers_for
from moesaic.serve.offload.weights import tensors_of

SHARE = 0.25  # of the experts' bytes that are cached where nothing is said
PARAMETERS = ("gate_up_EGD", "down_EDF")


def mixtures(model: Model) -> dict[str, Block]:
    """The layers with experts, those that predict further tokens last, by the sites of the experts."""
    blocks = [*model.layers, *(layer.block for layer in model.mtp)]
    return {block.ffn.site: block for block in blocks if isinstance(block.ffn, MixtureFeedForward)}


def fill_with_experts(stored: StoredWeights, *, home: Home | None, cache_bytes: int | None) -> Model:
    """What `moesaic.model.directory.fill` does, with the experts left out."""
    source, places, device = stored.source, stored.places, stored.device
    of_experts = {place.parameter for place in places if place.parameter.endswith(PARAMETERS)}
    if not of_experts:
        raise UserError(source.place, "has no experts to offload", "Take --offload weights.")
    refuse_reshaping(stored.config, source.place, "Take --offload weights.")
    model = fill(stored, of_experts.__contains__)
    home, parts = home or default_home(device), by_parameter(places)
    store: ExpertStore
    if is_compressed(source):
        store, forms = _quantized(model, source, parts, home)
        offload_experts(model, store, cache_bytes, forms=forms)
        return model
    store = DiskExperts(source, [(parts[f"{site}.gate_up_EGD"], parts[f"{site}.down_EDF"]) for site in mixtures(model)])
    if home == "host":
        in_memory = HostExperts(pinned=device.type == "cuda")
        for form in _plain_forms(model):
            in_memory.fill_layer(store, form.count, form.specs)
        store = in_memory
    offload_experts(model, store, cache_bytes)
    return model


def _ffn(block: Block) -> MixtureFeedForward:
    return cast(MixtureFeedForward, block.ffn)


def _plain_forms(model: Model) -> list[ExpertForm]:
    return [plain_form(_ffn(block), model.dtype) for block in mixtures(model).values()]


class ListedExpertStore:
    """Experts as bytes, each as long as it is, from host memory or a file of our own."""

    def __init__(self, layers: HostLayers | SpilledLayers) -> None:
        self.layers = layers

    def add(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self.layers.put(key, tensors)

    def read(self, key: Key, into: Sequence[Tensor]) -> None:
        self.layers.read(key, into[0][: self.layers.size(key)])


def _quantized(
    model: Model, source: Any, parts: dict[str, list[Place]], home: Home
) -> tuple[ExpertStore, list[ExpertForm]]:
    """Quantized experts in the form in which they compute, which is not that on disk: on a CPU in a file of our own, if
    not in memory; for a GPU in pinned memory. A matrix of all experts of a layer is in memory while it is put away."""
    cuda = model.device.type == "cuda"
    forms: list[ExpertForm] = []
    listed = ListedExpertStore(HostLayers(pinned=False) if home == "host" else SpilledLayers())
    stacked = HostExperts(pinned=cuda)
    for number, (site, block) in enumerate(mixtures(model).items()):
        names = [f"{site}.{parameter}" for parameter in PARAMETERS]
        pair = [source.quantized(name, parts[name], model.device) for name in names]
        if any(matrix is None for matrix in pair):
            raise UserError(source.place, f"only some matrices of {site} are quantized", "Take --offload weights.")
        for matrix in pair:
            for part in matrix.modules():
                if isinstance(part, QuantizedWeight):
                    part.dtype = model.dtype
        if cuda and model.mode != "reference":
            form, tensors = stacked_form(_ffn(block), *(_on_gpu(matrix, model, site, source) for matrix in pair))
            for host, tensor in zip(stacked.add_layer(form.count, form.specs), tensors, strict=True):
                host.copy_(tensor)
        else:
            for expert, matrices in enumerate(zip(*pair, strict=True)):
                listed.add((number, expert), tensors_of(nn.ModuleList(matrices)))
            form = ListedForm.of(_ffn(block), *pair)
        forms.append(form)
    if stacked.layers:
        return stacked, forms
    # Slots of one size, so that layers can share them, in however few bits each is.
    largest = max((form.specs for form in forms), key=lambda specs: specs[0].bytes)
    return listed, [replace(form, specs=largest) for form in forms]


def _on_gpu(matrix: nn.ModuleList, model: Model, site: str, source: Any) -> Any:
    from moesaic.kernels.triton.quantized.weight import gpu_weight  # Triton, which is on machines with a GPU

    made = gpu_weight(matrix, model.dtype, model.config.activation)
    if isinstance(made, nn.ModuleList):
        problem = f"the experts of {site} round their inputs too, and cannot be offloaded on a GPU"
        raise UserError(source.place, problem, "Take --offload weights.")
    return made


def offload_experts(
    model: Model,
    store: ExpertStore,
    cache_bytes: int | None = None,
    *,
    forms: list[ExpertForm] | None = None,
    fixed: int = 0,
) -> OffloadedExperts:
    """Let a model whose experts have shapes only find them in a store. The first `fixed` experts of each layer stay in
    the cache for good; whoever says so puts them there."""
    device, blocks = model.device, mixtures(model)
    sites, forms = list(blocks), forms or _plain_forms(model)
    shapes = [
        ExpertShape(form.count, form.bytes, _ffn(block).router.shape.per_token, form.specs)
        for block, form in zip(blocks.values(), forms, strict=True)
    ]
    if cache_bytes is None:
        cache_bytes = int(SHARE * sum(shape.count * shape.bytes for shape in shapes))
    transfers, counts = transfers_for(device), OffloadCounts()
    layers: dict[int, OffloadedLayer] = {}
    for pool in divide(cache_bytes, shapes):
        specs = forms[pool.layers[0]].specs
        tensors = [torch.empty((pool.slots, *spec.shape), dtype=spec.dtype, device=device) for spec in specs]
        slots = Slots(tensors, store, transfers, counts)
        slots.shared = len(pool.layers) > 1
        for number in pool.layers:
            block = blocks[sites[number]]
            layers[number] = OffloadedLayer(number, forms[number], slots, block.ffn_norm, _ffn(block).router)
        if not slots.shared:
            first_experts(slots, pool.layers[0], fixed)
    for number in range(1, len(sites)):
        if sites[number].startswith("layers."):  # further predictions begin from other hidden states
            layers[number - 1].following = layers[number]
    plain = model.ops
    if any(isinstance(form, ListedForm) for form in forms) and not isinstance(plain, QuantizedKernels):
        plain = cast(Kernels, QuantizedKernels(plain))
    made = OffloadedExperts(plain, {site: layers[number] for number, site in enumerate(sites)}, counts)
    model.ops = cast(Kernels, made)
    return made


def first_experts(slots: Slots, layer: int, fixed: int = 0) -> None:
    """A cache begins with the first experts of its layer: with all of them, if it holds all."""
    for expert in range(slots.cache.slots):
        if expert >= fixed:
            slots.fetch((layer, expert))
        elif (slot := slots.cache.place((layer, expert))) is not None:
            slots.cache.pin(slot)
    slots.wait([(layer, expert) for expert in range(fixed, slots.cache.slots)])
