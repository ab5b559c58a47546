"""Checkpoints in 8-bit numbers with scales (DeepSeek-V3's, or in the compressed-tensors layout), read as plain weights.

A matrix `W` of float8 has a `W_scale_inv` or `W_scale` beside it: one number for all, one for each row, or one for each
block; a weight is its number times that of its block. Rounding of activations, which such checkpoints may also ask for,
is left out: it saves time where products of 8 bits are fast, and costs accuracy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.formats.checkpoint import QUANTIZATION, Checkpoint, QuantizedCheckpoint
from moesaic.model.formats.tensor_file import Part

SCALES = ("_scale_inv", "_scale")
LEFT_OUT = (".input_scale", ".activation_scale", ".input_zero_point")
_REMEDY = "Convert the weights to bfloat16 first."


def is_float8(settings: Any) -> bool:
    """Whether a checkpoint's own words say that this is what it is."""
    if not isinstance(settings, dict):
        return False
    if settings.get("quant_method") == "fp8":
        return True
    groups = settings.get("config_groups")
    return isinstance(groups, dict) and any(map(_of_float8, groups.values()))


def _of_float8(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    return isinstance(weights, dict) and weights.get("type") == "float" and weights.get("num_bits") == 8


def plain_dtype(config: dict[str, Any], where: Path) -> torch.dtype:
    """What weights are read as, as a checkpoint's own words have it."""
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(where, "dtype: is no format of weights", "Take bfloat16.")
    return dtype


class Float8Source(QuantizedCheckpoint):
    def __init__(self, raw: Checkpoint) -> None:
        super().__init__(raw)
        self._block = _block(self._settings, raw)
        self._scale = {}
        for name in self._stored:
            if raw.dtype(name) == torch.float8_e4m3fn:
                self._scale[name] = self._find(name)
        self._dtype = plain_dtype(self.config, self._where)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        scales = set(self._scale.values())
        return {
            name: shape for name, shape in self._stored.items() if name not in scales and not name.endswith(LEFT_OUT)
        }

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        if name not in self._scale:
            return self._raw.tensor(name, part)
        weight, scale = self._raw.tensor(name).float(), self._raw.tensor(self._scale[name]).float()
        dense = (weight * self._spread(scale, name)).to(self._dtype)
        return dense[part] if part else dense

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype if name in self._scale else self._raw.dtype(name)

    def _find(self, name: str) -> str:
        for ending in SCALES:
            if name + ending in self._stored:
                return name + ending
        raise UserError(self.place, f"{name} is in 8 bits and has no scale", "Copy it again.")

    def _spread(self, scale: Tensor, name: str) -> Tensor:
        """A scale for every weight, or what is broadcast to that."""
        *outer, rows, columns = self._stored[name] if len(self._stored[name]) > 1 else (1, *self._stored[name])
        if scale.numel() == 1:
            return scale.reshape(())
        if scale.shape in ((*outer, rows), (*outer, rows, 1)):
            return scale.reshape(*outer, rows, 1)
        high, wide = self._block or (0, 0)
        if not high or scale.shape != (*outer, -(-rows // high), -(-columns // wide)):
            shape = "x".join(map(str, scale.shape))
            raise UserError(self.place, f"{self._scale[name]} ({shape}) does not fit its weights", _REMEDY)
        spread = scale.repeat_interleave(high, dim=-2)[..., :rows, :]
        return spread.repeat_interleave(wide, dim=-1)[..., :columns]


def _block(settings: dict[str, Any], raw: Checkpoint) -> tuple[int, int] | None:
    """Rows and columns of a block, where scales are by block."""

    def wrong(problem: str) -> UserError:
        return UserError(raw.place / "config.json", f"{QUANTIZATION}: {problem}", _REMEDY)

    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise wrong(f"numbers of the form {str(settings['fmt'])[:20]!r} are not read")
    if settings.get("kv_cache_scheme"):
        raise wrong("a quantized cache is not read")
    found = settings.get("weight_block_size")
    for group in (settings.get("config_groups") or {}).values():
        if not _of_float8(group):
            raise wrong("weights of 8-bit numbers beside others are not read")
        found = group["weights"].get("block_structure") or found
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or any(type(size) is not int or size < 1 for size in found):
        raise wrong(f"blocks of {str(found)[:40]}")
    return found[0], found[1]
