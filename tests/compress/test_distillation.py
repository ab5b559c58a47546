"""What distillation is for: layers and students that are nearer to the teacher, by the one trainer, resumable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moesaic import kernels
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods.students import Students
from moesaic.compress.methods.xtc import XTC
from moesaic.kernels.fake_quantization import FakeQuantizedKernels, rounded_by
from moesaic.kernels.grid import Grid
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.quantized import QuantizedKernels
from moesaic.model.directory import load
from tests.compress.made import make
from tests.waiting import until

REQUEST = CompressionRequest(samples=4, length=64, check_tokens=0, min_expert_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("teacher") / "model")


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "distillation.jsonl").read_text().splitlines()]


def test_experts_are_distilled_as_they_are_served() -> None:
    """Rows into an expert and between its matrices are rounded to 8 bits, as the quantized kernels do."""
    generator = torch.Generator().manual_seed(0)
    gate_up_EGD, down_EDF = torch.randn(3, 128, 64, generator=generator), torch.randn(3, 64, 64, generator=generator)
    x_TD, grid = torch.randn(20, 64, generator=generator), Grid(4, 32, activation_bits=8)
    scores_TE = torch.rand(20, 3, generator=generator)
    weights_TK, experts_TK = scores_TE.topk(2)
    plain = kernels.choose("cpu", "reference")
    weights = ExpertWeights(gate_up_EGD, down_EDF, "silu", "ffn")
    routes = Routes(experts_TK, weights_TK)

    def distilled(bits: int) -> torch.Tensor:
        ops = FakeQuantizedKernels(plain, lambda site, weight: rounded_by(grid, weight), bits)
        return ops.experts(x_TD, routes, weights)

    served = ExpertWeights(
        torch.nn.ModuleList(grid.matrix(weight_OI) for weight_OI in gate_up_EGD),
        torch.nn.ModuleList(grid.matrix(weight_OI) for weight_OI in down_EDF),
        "silu",
        "ffn",
    )
    wanted_TD = QuantizedKernels(plain).experts(x_TD, routes, served)
    torch.testing.assert_close(distilled(8), wanted_TD, rtol=1e-4, atol=1e-3)
    assert float((distilled(16) - wanted_TD).abs().max()) > 0.1


def test_the_teacher_leaves_after_its_share_of_the_steps(model: Path, tmp_path: Path) -> None:
    compress(model, Students(depth=0.5, steps=4, teaching=0.5), tmp_path / "out", REQUEST)
    assert ["loss/kl" in row for row in metrics(tmp_path / "out")] == [True, True, False, False]
    assert (tmp_path / "out" / "distillation.png").is_file()


@pytest.mark.parametrize("options", [{"bits": 1}, {"bits": 2, "ternary": True}])
def test_extreme_compression_needs_long_training(options: dict[str, int], model: Path, tmp_path: Path) -> None:
    """XTC's point: one stage of distillation that is long enough does what a few steps do not."""
    apart = {}
    for steps in (4, 48):
        method = XTC(group=32, depth=1.0, steps=steps, rate=0.003, **options)  # type: ignore[arg-type]
        compress(model, method, tmp_path / str(steps), REQUEST)
        apart[steps] = sum(row["loss/kl"] for row in metrics(tmp_path / str(steps))[-4:])  # of each sequence
    assert apart[48] < 0.7 * apart[4]
    matrix = load(tmp_path / "48").layers[0].attention.out.weight  # type: ignore[union-attr]
    values = matrix.dense()[0, :32].unique()  # type: ignore[union-attr, operator]
    assert len(values) <= (2 if options["bits"] == 1 else 3)


def test_a_killed_distillation_resumes_from_its_checkpoint(model: Path, tmp_path: Path) -> None:
    method = Students(depth=0.5, steps=30, rate=0.001)
    compress(model, method, tmp_path / "whole", REQUEST)

    def stop(what: str, done: int, total: int) -> None:
        if done == 28:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(model, method, tmp_path / "part", REQUEST, stop)
    saved = tmp_path / ".part.compressing" / "run" / "checkpoints" / "step-00000025"
    until(saved.is_dir, "the checkpoint, which is written beside the steps")
    seen: list[int] = []
    compress(model, method, tmp_path / "part", REQUEST, lambda what, done, total: seen.append(done))
    assert seen[0] == 25
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert files[0] == files[1]
