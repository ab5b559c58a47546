"""Open a model directory in whichever layout its config.json says its weights are in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from moesaic.errors import UserError
from moesaic.model.families import Place, family_for, known
from moesaic.model.formats.checkpoint import GLM_BITS, QUANTIZATION, Checkpoint, Source
from moesaic.model.formats.compressed_tensors import CompressedTensors
from moesaic.model.formats.float8 import Float8Source, is_float8
from moesaic.model.formats.glm_int import GLMIntegers
from moesaic.model.formats.gptq_awq import METHODS, GPTQAndAWQ
from moesaic.model.formats.language_part import LanguagePart
from moesaic.model.formats.mxfp4_experts import MXFP4, MXFP4Experts
from moesaic.model.formats.nvfp4 import NVFP4Source, is_nvfp4
from moesaic.model.formats.quantized import OURS, OwnLayout, Quantized


class CompressedSource(Source, Protocol):
    """A source whose matrices can also be had as they are."""

    bytes: int

    def quantized(
        self, parameter: str, places: list[Place], device: torch.device, experts: Sequence[int] | None = None
    ) -> Quantized | None:
        """A quantized parameter, on a device: one matrix, or one for each of the `experts`, by default all; None for a
        plain one."""


def open_checkpoint(path: str | Path) -> Checkpoint | CompressedSource | Float8Source | NVFP4Source:
    """A model directory, quantized or not."""
    found = LanguagePart(path)
    settings = found.config.get(QUANTIZATION)
    if not settings:
        return GLMIntegers(found) if found.config.get(GLM_BITS) else found
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method == OURS:
        return OwnLayout(found)
    kind = found.config.get("model_type")
    if kind in known() and hasattr(family_for(kind, found.place), "turned"):
        problem = f"quantized checkpoints of {kind} from elsewhere are not read: rows lie head by head, and so do codes"
        raise UserError(found.place / "config.json", problem, "Take plain weights, and `moesaic compress` them.")
    if is_float8(settings):
        return Float8Source(found)
    if is_nvfp4(settings):
        return NVFP4Source(found)
    if method == MXFP4:
        return MXFP4Experts(found)
    if method == "compressed-tensors":
        return CompressedTensors(found)
    if method in METHODS and isinstance(settings, dict):
        return GPTQAndAWQ(found)
    problem = f"the weights are quantized ({str(method)[:60]!r})"
    raise UserError(found.place / "config.json", problem, "Convert them to plain weights first.")


def is_compressed(source: Source) -> bool:
    return hasattr(source, "quantized")
