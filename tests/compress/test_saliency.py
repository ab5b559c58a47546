"""The saliency of each token for a layer's output, beside what really happens when one token's values are disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from moesaic import kernels
from moesaic.compress import layers
from moesaic.compress.calibration_statistics import CalibratedLayer, RecordingKernels
from moesaic.compress.saliency import EVEN, measure_saliency
from moesaic.model.block import Block
from moesaic.model.directory import load
from tests.compress.made import make

TOKENS = 24


class Disturbing(RecordingKernels):
    """Adds a little to the outputs first..last of one matrix, at one token."""

    def __init__(self, plain: Any, site: str, first: int, last: int, token: int, change: Tensor) -> None:
        super().__init__(plain)
        self.target, self.where, self.change = site, (token, slice(first, last)), change

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        y_TO = super().linear(x_TI, weight_OI, bias_O, site)
        if site == self.target:
            y_TO = y_TO.clone()
            y_TO[self.where] += self.change
        return y_TO


def test_counts_are_what_disturbances_do(tmp_path: Path) -> None:
    model = load(make(tmp_path / "model", "llama"))
    block = cast(Block, model.layers[0]).requires_grad_(False)
    attention: Any = block.attention
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(TOKENS, 64, generator=generator)
    x_TD *= torch.logspace(-1, 1, TOKENS)[torch.randperm(TOKENS, generator=generator), None]

    def run(ops: Any) -> Tensor:
        with torch.no_grad():
            out_TD: Tensor = block(x_TD, layers.context_of(model.config, [TOKENS], ops, model.device))
        return out_TD

    def pieces(ops: Any) -> Any:
        context = layers.context_of(model.config, [TOKENS], ops, model.device)
        yield slice(0, TOKENS), lambda of: of(x_TD, context)

    recorder = RecordingKernels(kernels.choose("cpu"))
    out_TD = run(recorder)
    calibrated = CalibratedLayer(block, recorder, 8, pieces, out_TD)
    measure_saliency(block, calibrated)
    statistics = calibrated.statistics("attention.qkv.weight")
    assert statistics is not None and [size for size, _ in statistics.saliency] == [64, 32, 32]
    for _, counts_T in statistics.saliency:
        assert abs(float(counts_T.mean()) - 1) < 1e-4 and float(counts_T.min()) >= EVEN * 0.99
    start = 0
    for size, counts_T in statistics.saliency:
        happened = []
        for token in range(TOKENS):
            effect = 0.0
            for _ in range(6):
                change = torch.randn(size, generator=generator) * 1e-2
                ops = Disturbing(kernels.choose("cpu"), attention.qkv.site, start, start + size, token, change)
                effect += float(((run(ops) - out_TD).square().mean(1) / out_TD.square().mean(1)).sum())
            happened.append(effect)
        start += size
        wanted = np.array(happened) / np.mean(happened) * (1 - EVEN) + EVEN
        assert np.corrcoef(np.log(wanted), counts_T.log().numpy())[0, 1] > 0.8
    parts = list(statistics.parts(128))
    assert [rows for rows, _ in parts] == [slice(0, 64), slice(64, 96), slice(96, 128)]
    values_T = statistics.saliency[2][1]
    wanted_II = (statistics.rows_TI * values_T[:, None]).T @ statistics.rows_TI / TOKENS
    assert torch.allclose(parts[2][1], wanted_II, atol=1e-5)
