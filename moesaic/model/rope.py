"""Rotary position embeddings and the ways a context is stretched: linear, dynamic NTK, YaRN, Llama 3."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from moesaic.kernels.interface import RopeAngles
from moesaic.model.config import ModelConfig, Rope
from moesaic.model.layout import Layout


@cache
@torch.inference_mode(False)  # what is kept must serve training, too
def frequencies(rope: Rope, context: int, device: torch.device | None = None) -> tuple[Tensor, float]:
    """The angle per position of every rotary pair (float32), and the factor on cosines and sines."""
    steps = torch.arange(0, rope.size, 2, dtype=torch.int64, device=device).float() / rope.size
    plain = 1.0 / rope.theta**steps
    original = rope.original_context or context
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "yarn":
        return _yarn(rope, steps, original), _yarn_attention_factor(rope, context / original)
    if rope.kind == "llama3":
        return _llama3(rope, plain, original), 1.0
    return plain, 1.0  # "dynamic" is plain until a sequence outgrows the context


def rope_of(config: ModelConfig, layout: Layout) -> RopeAngles:
    """The rotary angles of every token of a flat batch, once for all layers."""
    return angles_of(config.rope, config.context, layout)


def angles_of(rope: Rope, context: int, layout: Layout) -> RopeAngles:
    speed_R, factor = frequencies(rope, context, layout.device)
    if rope.kind == "dynamic" and max((int(span.total) for span in layout.spans), default=0) > context:
        speed_R = dynamic_frequencies(rope, context, layout.totals_T)
    angle_TR = layout.positions_T[:, None].float() * speed_R
    return RopeAngles(angle_TR.cos() * factor, angle_TR.sin() * factor, rope.interleaved)


@cache
@torch.inference_mode(False)
def _table(rope: Rope, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    speed_R, factor = frequencies(rope, context, device)
    angle_PR = torch.arange(context, device=device)[:, None].float() * speed_R
    return angle_PR.cos() * factor, angle_PR.sin() * factor


def table_angles(rope: Rope, context: int, layout: Layout) -> RopeAngles:
    """The same out of one table: a position's are the same to the bit in any batch, while the library's cosine is not
    where a row is no whole number of vectors."""
    if rope.kind == "dynamic" or any(span.total > context for span in layout.spans):
        return angles_of(rope, context, layout)
    cos_PR, sin_PR = _table(rope, context, layout.device)
    return RopeAngles(cos_PR[layout.positions_T], sin_PR[layout.positions_T], rope.interleaved)


def position_angles(config: ModelConfig, positions: int, device: torch.device) -> RopeAngles:
    """The rotary angles of every position, where they do not depend on a sequence's length."""
    speed_R, factor = frequencies(config.rope, config.context, device)
    angle_PR = torch.arange(positions, device=device)[:, None].float() * speed_R
    return RopeAngles(angle_PR.cos() * factor, angle_PR.sin() * factor, config.rope.interleaved)


def dynamic_frequencies(rope: Rope, context: int, lengths_T: Tensor) -> Tensor:
    """Dynamic NTK: the base grows with the length of the sequence a token is in, once that exceeds the context.

    Every token of a flat batch may be in a sequence of another length, so there is one row of frequencies per token.
    """
    lengths_T = lengths_T.clamp(min=context).float()
    growth_T = (rope.factor * lengths_T / context) - (rope.factor - 1)
    theta_T = rope.theta * growth_T ** (rope.size / (rope.size - 2))
    steps = torch.arange(0, rope.size, 2, dtype=torch.int64, device=lengths_T.device).float() / rope.size
    return 1.0 / theta_T[:, None] ** steps


def softmax_scale(rope: Rope, key_size: int) -> float:
    """The attention scale of latent attention, which YaRN raises by its all-dimensions factor."""
    scale = key_size**-0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= _mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(rope: Rope, stretch: float) -> float:
    factor = rope.factor or stretch
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return _mscale(factor)


def _yarn(rope: Rope, steps: Tensor, original: int) -> Tensor:
    """Fast pairs keep their speed, slow ones are interpolated, with a linear ramp between."""

    def pair_turning(times: float) -> float:
        return rope.size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    if low == high:
        high += 0.001
    speed = rope.theta**steps
    keep = 1 - ((torch.arange(rope.size // 2, device=steps.device).float() - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * speed)) * (1 - keep) + (1.0 / speed) * keep


def _llama3(rope: Rope, plain: Tensor, original: int) -> Tensor:
    wavelength = 2 * math.pi / plain
    slow, fast = original / rope.low_freq_factor, original / rope.high_freq_factor
    stretched = torch.where(wavelength > slow, plain / rope.factor, plain)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    return torch.where((wavelength >= fast) & (wavelength <= slow), between, stretched)
