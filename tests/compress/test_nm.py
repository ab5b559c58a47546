"""N:M: ADMM leaves less error than sizes do, and a search by matrix less than one form for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods.nm import NM
from moesaic.compress.methods.nm_mixed import NMMixed, cheapest, stored_bits
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model import directory
from moesaic.model.directory import load
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.formats.quantized import OwnLayout
from moesaic.train.constraints.nm import NM as Constraint
from tests.compress.made import add_tokenizer, make

REQUEST = CompressionRequest(samples=4, length=64, check_tokens=0, min_expert_tokens=16, ends_bits=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that differ in how much they matter: the second's matrices are small."""
    path = make(tmp_path_factory.mktemp("plain") / "model", "llama")
    own = load(path)
    with torch.no_grad():
        for parameter in own.layers[1].parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.4)
    directory.save(own, path)
    add_tokenizer(path)
    return path


def divergence(small: Path, large: Path) -> float:
    """Of the next-token distributions from those of the original."""
    tokens = torch.randint(0, 256, (2, 60), generator=torch.Generator().manual_seed(5)).tolist()
    ours, theirs = (torch.cat(load(path).logits(tokens)).log_softmax(-1) for path in (small, large))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


def test_admm_leaves_less_error_than_magnitude_or_wanda() -> None:
    generator = torch.Generator().manual_seed(0)
    rows_TI = torch.randn(400, 24, generator=generator) @ torch.randn(24, 48, generator=generator)
    rows_TI = rows_TI * torch.exp(torch.randn(48, generator=generator))
    weight_OI, statistics = torch.randn(20, 48, generator=generator), InputStatistics(rows_TI)
    errors = {}
    for score in ("magnitude", "wanda", "admm"):
        made = NM(score=score).matrix("", weight_OI, statistics)  # type: ignore[arg-type]
        assert isinstance(made, torch.Tensor)
        errors[score] = statistics.error(weight_OI, made)
    assert errors["admm"] < 0.3 * errors["wanda"] < 0.3 * errors["magnitude"]


def test_the_cheapest_plan_is_within_every_budget() -> None:
    costs = np.array([[0.0, 1.0, 4.0], [0.0, 3.0, 9.0]])
    sizes = np.array([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0]])
    assert cheapest(costs, [(sizes, 8.0)]) == [0, 0]
    assert cheapest(costs, [(sizes, 6.0)]) == [1, 0]
    assert cheapest(costs, [(sizes, 8.0), (sizes * 2, 12.0)]) == [1, 0]


def test_a_search_by_matrix_beats_one_form_for_all(model: Path, tmp_path: Path) -> None:
    """In as many bits, masks counted, and as many multiplications: 2:4 in 4 bits is 3 bits a weight."""
    compress(model, NM(bits=4, group=32), tmp_path / "uniform", REQUEST)
    compress(model, NMMixed(bits=3.0, macs=0.5, group=32), tmp_path / "searched", REQUEST)
    source = open_checkpoint(tmp_path / "searched")
    assert isinstance(source, OwnLayout)
    schemes = dict(source.schemes())
    sizes = {name: module.numel() for name, module in _matrices(tmp_path / "searched")}
    assert sizes.keys() == schemes.keys()
    choices = {name: (scheme.n or 1, scheme.m or 1, scheme.bits) for name, scheme in schemes.items()}
    assert len(set(choices.values())) > 1
    total = sum(sizes.values())
    assert sum(stored_bits(choices[name]) * size for name, size in sizes.items()) <= 3.001 * total
    assert sum(choices[name][0] / choices[name][1] * size for name, size in sizes.items()) <= 0.501 * total
    apart = {name: divergence(tmp_path / name, model) for name in ("uniform", "searched")}
    assert apart["searched"] < 0.9 * apart["uniform"]
    form = Constraint(like=str(tmp_path / "searched"))
    form.check()


def _matrices(path: Path) -> list[tuple[str, torch.nn.Module]]:
    return [(name, module) for name, module in load(path).named_modules() if isinstance(module, QuantizedMatrix)]
