"""Training in float8 on a real GPU: the kernels beside what they mean in plain PyTorch, and a whole model's steps.

pytest tests/gpu/test_gpu_float8_training.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

from moesaic.kernels import reference
from moesaic.kernels.float8 import ReferenceFloat8, block_numbers
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.triton.float8.rounding import round_both_ways
from moesaic.kernels.triton.float8.training import HopperFloat8
from moesaic.recipe import load_recipe
from moesaic.train.pretrain import pretrain
from moesaic.train.report.metrics import read_metrics
from tests.gpu.models import error

if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("these kernels are for Hopper", allow_module_level=True)


def random(*shape, seed=0, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def gradients(run, *inputs):
    """The output, and the gradients of what takes one."""
    inputs = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    out = run(*inputs)
    out.backward(random(*out.shape, seed=99))
    return [out.detach(), *(tensor.grad for tensor in inputs if tensor.requires_grad)]


@pytest.mark.parametrize("shape", [(1, 300, 200), (3, 384, 256)])
def test_weights_are_rounded_both_ways_to_the_same_numbers(shape):
    weight = random(*shape, scale=0.02)
    (numbers, scales), turned = round_both_ways(weight)
    wanted, wanted_scales = block_numbers(weight)
    assert torch.equal(numbers.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scales, wanted_scales)
    assert torch.equal(turned[0].view(torch.uint8), wanted.mT.contiguous().view(torch.uint8))
    assert torch.equal(turned[1], wanted_scales.mT)


@pytest.mark.parametrize("rows, outputs, inputs", [(1000, 1024, 2048), (37, 272, 400)])
def test_a_linear_map_and_its_gradients(rows, outputs, inputs):
    given = random(rows, inputs), random(outputs, inputs, scale=0.02), random(outputs)
    found, wanted = gradients(HopperFloat8().linear, *given), gradients(ReferenceFloat8().linear, *given)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 5e-3


@pytest.mark.parametrize("shape", [(512, 256, 8, 2, 700), (2048, 768, 16, 4, 1500)], ids=str)
def test_experts_and_their_gradients(shape):
    D, F, E, K, T = shape
    x_TD, up, down = random(T, D), random(E, 2 * F, D, scale=0.03, seed=1), random(E, D, F, scale=0.03, seed=2)
    torch.manual_seed(0)
    routes_TK = torch.rand(T, E, device="cuda").topk(K, -1).indices
    weights_TK = torch.rand(T, K, device="cuda")

    def by(matmuls):
        def run(x_TD, weights_TK, up, down):
            return matmuls.experts(x_TD, Routes(routes_TK, weights_TK), ExpertWeights(up, down, "silu"))

        return gradients(run, x_TD, weights_TK, up, down)

    found, wanted, plain = by(HopperFloat8()), by(ReferenceFloat8()), by(reference)
    for one, other, exact in zip(found, wanted, plain, strict=True):
        assert error(one, other) < 0.04, "numbers in the middle of two may be rounded either way"
        assert error(one, exact) < 1.1 * error(other, exact), "no further from what nobody rounded"
    assert all(torch.equal(one, other) for one, other in zip(found, by(HopperFloat8()), strict=True)), "repeats"


def test_a_recipe_trains_in_float8_beside_bfloat16_and_resumes(tmp_path, monkeypatch):
    """Stopped in the middle it goes on as in one go, as near as the library repeats itself."""
    sizes = {"hidden": 256, "head_size": 64, "dense_hidden": 256, "expert_hidden": 128}
    given = [f"model.{key}={size}" for key, size in sizes.items()]
    given += ["data.sources=[{name: code, path: 'builtin:stdlib', documents: 100, weight: 1.0}]", "schedule=constant"]
    given += ["train.warmup_steps=2", "train.save_every=10"]
    monkeypatch.setattr("moesaic.train.run.compile_blocks", lambda model: None)

    def run(name, *overrides, steps=20):
        data = tmp_path / "bfloat16" / "data"
        overrides += (f"train.data={data}",) if data.is_dir() else ()
        pretrain(
            load_recipe("recipes/tiny.yaml", [*given, f"train.steps={steps}", *overrides]), tmp_path / name, quiet=True
        )
        return torch.tensor([line["loss"] for line in read_metrics(tmp_path / name)])

    plain, whole = run("bfloat16", "train.dtype=bfloat16"), run("whole", "train.dtype=fp8")
    run("parts", "train.dtype=fp8", steps=10)
    assert (run("parts", "train.dtype=fp8") - whole).abs().max() < 0.01 and not torch.equal(whole, plain)
    assert plain[-1] < plain[0] - 0.8 and (whole[-5:].mean() - plain[-5:].mean()).abs() < 0.05
