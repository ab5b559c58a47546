"""What keys and values depend on beside tokens: the weights, to the last bit, and how they are computed and kept.

Pages that outlive a process, or leave it, carry this in their names. A whole model is read once for it, as fast as its
file can be; sampling its tensors would miss the one that somebody has edited.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moesaic.model.layout import PagedCache
from moesaic.model.transformer import Model

BLOCK = 8 << 20  # bytes hashed at a time
THREADS = 8
FORMAT = 1  # of the bytes of a page; another number, and pages of before are not found


def identity_of_directory(directory: Path) -> str:
    """Of all files that a model's weights are read from: the same wherever the directory lies."""
    if directory.is_file():  # GGUF
        return _of_file(directory)
    kinds = {".safetensors", ".gguf"}
    files = sorted(path for path in directory.iterdir() if path.suffix in kinds or path.name == "config.json")
    with ThreadPoolExecutor(THREADS) as pool:  # hashing lets other threads run
        found = list(pool.map(_of_file, files))
    return _joined([f"{path.name}={one}" for path, one in zip(files, found, strict=True)])


def identity_of_model(model: Model) -> str:
    """Of all weights in memory, where a model has no directory or has left it."""
    whole = hashlib.blake2b(digest_size=20)
    whole.update(repr(model.config).encode())
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        for block in flat.split(BLOCK):
            whole.update(block.cpu().numpy())
    return whole.hexdigest()


def namespace(weights: str, model: Model, cache: PagedCache) -> str:
    """With what else decides the bits of a page."""
    kept = next((tensor.dtype for layer in cache.layers for tensor in layer.values()), model.dtype)
    return f"{FORMAT} {weights} {model.dtype} {model.mode} {model.device.type} {kept} {cache.page_size}"


def with_identity(directory: Path, engine_options: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine, with the identity of its weights where its pages outlive or leave its process."""
    tiers = engine_options.get("tiers")
    if tiers is None or not (tiers.travel or tiers.disk_bytes):
        return engine_options
    return engine_options | {"weights": identity_of_directory(directory)}


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _joined(parts: list[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=20).hexdigest()
