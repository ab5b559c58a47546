"""Tiles that were found quickest, by GPU and shape of experts: those of this version, and this machine's own.

Every tile gives the same bits, so a table can make steps faster or slower, but nothing else.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from moesaic import atomic
from moesaic.json_files import object_or_empty

Tile = tuple[int, int, int, int]  # columns, elements of K, stages, warps
KINDS = ("up_tile", "down_tile")
SHIPPED = Path(__file__).with_name("tiles.json")


def launch_options(tile: Tile) -> dict[str, Any]:
    BN, BK, stages, warps = tile
    return {"BN": BN, "BK": BK, "STAGES": stages, "num_warps": warps}


def own() -> Path:
    return Path.home() / ".cache" / "moesaic" / "tiles.json"


def key(gpu: str, path: str, shape: tuple[int, ...], align: int) -> str:
    """`shape` is D, F, experts and experts per token; `align` how many rows a tile has, where they are sorted."""
    return f"{gpu}, {path}, {'x'.join(map(str, shape))}, {align}"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """What is no table counts for nothing: without one there are rules."""
    try:
        return object_or_empty(file.read_bytes())
    except OSError:
        return {}


@cache
def table() -> dict[str, dict[str, Any]]:
    return read(SHIPPED) | read(own())


def well_formed(tile: Any) -> bool:
    return isinstance(tile, list) and len(tile) == 4 and all(isinstance(number, int) and number > 0 for number in tile)


@cache
def tiles_of(gpu: str, path: str, shape: tuple[int, ...], align: int) -> dict[str, Any]:
    entry = table().get(key(gpu, path, shape, align), {})
    kept = entry if isinstance(entry, dict) else {}
    return {kind: (*kept[kind],) for kind in KINDS if well_formed(kept.get(kind))}


def tiles_for(device: torch.device, path: str, shape: tuple[int, ...], align: int = 0) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return tiles_of(torch.cuda.get_device_name(device), path, shape, align)


def keep(file: Path, gpu: str, path: str, shape: tuple[int, ...], align: int, found: dict[str, Tile]) -> None:
    """Add to a table, whole or not at all."""
    entries = read(file) | {key(gpu, path, shape, align): {kind: list(tile) for kind, tile in found.items()}}
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(file, dict(sorted(entries.items())), indent=1)
    table.cache_clear()
    tiles_of.cache_clear()
