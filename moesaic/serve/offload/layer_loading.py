"""A model whose layers stay on disk or in host memory, and are streamed through two buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from moesaic.model.block import Block
from moesaic.model.directory import StoredWeights, fill
from moesaic.model.families.places import by_parameter
from moesaic.model.formats.opening import is_compressed
from moesaic.model.transformer import Model
from moesaic.serve.offload.layer_store import DiskLayers, HostLayers, LayerStore, SpilledLayers, StagedLayers, bytes_of
from moesaic.serve.offload.places import Home, default_home
from moesaic.serve.offload.transfers import transfers_for
from moesaic.serve.offload.weights import StreamedLayers, leaves_of, tensors_of


def fill_streamed(stored: StoredWeights, *, home: Home | None) -> Model:
    """What `moesaic.model.directory.fill` does, with the layers left out."""
    source, device = stored.source, stored.device
    model = fill(stored, lambda name: name.startswith("layers."))
    home = home or default_home(device)
    blocks = cast("list[Block]", list(model.layers))
    parts = by_parameter(stored.places)
    store: LayerStore
    if is_compressed(source) or home == "host":
        store = keeping = HostLayers(device.type == "cuda") if home == "host" else SpilledLayers()
        for number in range(len(blocks)):
            # Read as always, a layer at a time, and put away in the form in which it computes.
            made = fill(stored, _other_than(f"layers.{number}."))
            blocks[number] = model.layers[number] = cast(Block, made.layers[number])
            keeping.put(number, tensors_of(blocks[number]))
            for leaf in leaves_of(blocks[number]):
                leaf.assign(torch.empty_like(leaf.tensor, device="meta"))
    else:
        for block in blocks:
            for leaf in leaves_of(block):
                if not leaf.name.endswith("correction"):
                    leaf.assign(torch.empty_like(leaf.tensor, dtype=stored.dtype))
        names = [[name for name, _ in _named(block, f"layers.{number}.")] for number, block in enumerate(blocks)]
        shapes = {number: tensors_of(block) for number, block in enumerate(blocks)}
        store = DiskLayers(source, shapes, {n: [parts[name] for name in names[n]] for n in shapes})
    if device.type == "cuda" and home == "disk":
        store = StagedLayers(store, max(bytes_of(tensors_of(block)) for block in blocks))
    stream_layers(model, store)
    return model


def _other_than(prefix: str) -> Callable[[str], bool]:
    return lambda name: not name.startswith(prefix)


def _named(block: Block, prefix: str) -> list[tuple[str, Tensor]]:
    """Every tensor of a block by the name its parameter has in the model, in the order of `leaves_of`."""
    paths = {id(module): path for path, module in block.named_modules()}
    return [(f"{prefix}{paths[id(leaf.module)]}.{leaf.name}", leaf.tensor) for leaf in leaves_of(block)]


def stream_layers(model: Model, store: LayerStore) -> StreamedLayers:
    """Let a model whose layers have shapes only find them in a store."""
    return StreamedLayers(list(model.layers), store, model.device, transfers_for(model.device))
