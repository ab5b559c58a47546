"""GPTQ's rounding to floating-point numbers: FP8, MXFP4 and NVFP4 lie unevenly, so each column finds its own nearest.

Scales are fitted first, by what flows in, and stay. What `gptq_rounding.py` says of the order of inputs and of damping
holds here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import AT_ONCE, DAMPINGS, MIN_TOKENS, TRIED_ON, damped, inverse_factor
from moesaic.model.formats.float_matrix import FLOAT_FORMATS, FloatFormat, FloatMatrix, fit, made, spread


def gptq_floats(
    name: str, weight_OI: Tensor, statistics: InputStatistics, pieces: Sequence[slice], damping: float = 0.0
) -> FloatMatrix:
    form = FLOAT_FORMATS[name]
    scales_OG, global_scale = fit(name, weight_OI, pieces, statistics.importance_I)
    steps_OI = spread(scales_OG, global_scale, form, weight_OI.shape[1])
    numbers = torch.empty_like(weight_OI)
    for rows, moments_II in statistics.parts(len(weight_OI)):
        share = damping or _steady_damping(weight_OI[rows], steps_OI[rows], statistics, form)
        numbers[rows] = corrected(weight_OI[rows], steps_OI[rows], damped(moments_II, share), form)
    return made(name, numbers, scales_OG, global_scale)


def corrected(weight_OI: Tensor, steps_OI: Tensor, moments_II: Tensor, form: FloatFormat) -> Tensor:
    """The numbers, one input after the other, with those still to come making up for each error."""
    order_I = moments_II.diagonal().argsort(descending=True, stable=True)
    left_OI, steps_OI = weight_OI[:, order_I].clone(), steps_OI[:, order_I]
    upper_II = inverse_factor(moments_II[order_I][:, order_I])
    numbers_OI = torch.empty_like(left_OI)
    for start in range(0, len(order_I), AT_ONCE):
        stop = min(start + AT_ONCE, len(order_I))
        errors = torch.empty_like(left_OI[:, start:stop])
        for i in range(start, stop):
            numbers_OI[:, i] = form.nearest(left_OI[:, i] / steps_OI[:, i])
            error_O = (left_OI[:, i] - numbers_OI[:, i] * steps_OI[:, i]) / upper_II[i, i]
            left_OI[:, i:stop].addr_(error_O, upper_II[i, i:stop], alpha=-1)
            errors[:, i - start] = error_O
        left_OI[:, stop:].addmm_(errors, upper_II[start:stop, stop:], alpha=-1)
    out_OI = torch.empty_like(numbers_OI)
    out_OI[:, order_I] = numbers_OI
    return out_OI


def _steady_damping(weight_OI: Tensor, steps_OI: Tensor, statistics: InputStatistics, form: FloatFormat) -> float:
    """What loses least on tokens set aside, for some of the outputs."""
    if len(statistics.rows_TI) < MIN_TOKENS:
        return DAMPINGS[-1]
    most, rest = statistics.split()
    some = slice(0, len(weight_OI), max(1, len(weight_OI) // TRIED_ON))
    losses = []
    for share in DAMPINGS:
        numbers_OI = corrected(weight_OI[some], steps_OI[some], damped(most.moments_II, share), form)
        off_OI = numbers_OI * steps_OI[some] - weight_OI[some]
        losses.append(float((off_OI @ rest.moments_II * off_OI).sum()))
    return DAMPINGS[losses.index(min(losses))]
