"""Offload on a real GPU, where copies run beside the computation: the bits of the optimizer on a CPU, and no race.

pytest tests/gpu/test_gpu_offload.py
"""

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

from torch import nn

from moesaic.parallel.offload.activations import ActivationOffload
from moesaic.parallel.offload.staging import cheaper_side
from moesaic.recipe_offload import OffloadSection
from moesaic.train.optimizers import _offloaded
from moesaic.train.optimizers.adamw import AdamW

SHAPES = {f"layers.{number}.weight": (1024, 1024 + 128 * (number % 3)) for number in range(12)}
ADAM = AdamW(lr=0.01)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(_offloaded, "BUCKET", 2**21)
    monkeypatch.setattr(_offloaded, "BUFFERS", 2)


def parameters(device, dtype):
    draw = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype).to(device)) for name, shape in SHAPES.items()
    }


def gradients(step, dtype):
    draw = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def backward(model, given):
    """A loss whose gradients are the given ones, each after some work of the device."""
    total = torch.zeros((), device="cuda")
    for name, parameter in model.items():
        work = torch.randn(2048, 2048, device="cuda")
        for _ in range(4):
            work = work @ work / 64
        total = total + (parameter * (given[name].to("cuda") + 0 * work[0, 0].to(parameter.dtype))).sum()
    total.backward()


def trained(settings, dtype, steps=6):
    """On the GPU with offload, and on the CPU without."""
    model, host = parameters("cuda", dtype), parameters("cpu", dtype)
    optimizer = ADAM.build(model.items(), offload=settings)
    reference = ADAM.build(host.items())
    for step in range(steps):
        given = gradients(step, dtype)
        optimizer.zero_grad()
        optimizer.expect(1, 1.0)
        backward(model, given)
        optimizer.step(1.0, clip=math.inf)
        for name, parameter in host.items():
            parameter.grad = given[name].clone()
        reference.step(1.0, clip=math.inf)
    optimizer.bring_together()
    return model, optimizer, host, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        OffloadSection(cast="host"),
        OffloadSection(cast="device"),
        OffloadSection(speculative=1.0),
        OffloadSection(speculative=0.1),
        OffloadSection(delay=True),  # these gradients do not depend on the weights
    ],
    ids=["host", "device", "speculative", "partly", "delay"],
)
def test_has_the_bits_of_the_cpu(settings, dtype):
    model, optimizer, host, reference = trained(settings, dtype)
    assert len(optimizer.buckets) > 4 and optimizer.rollbacks == 0
    for name, parameter in host.items():
        assert torch.equal(model[name].cpu(), parameter), name
    for name, tensor in reference.state_dict().items():
        assert torch.equal(optimizer.state_dict()[name].cpu(), tensor), name


def test_a_share_on_the_device():
    gib = sum(math.prod(shape) for shape in SHAPES.values()) * 12 / 2 / 2**30
    model, optimizer, host, reference = trained(OffloadSection(on_device=gib), torch.bfloat16)
    places = {slot.weight.device.type for slot in optimizer.slots}
    assert places == {"cpu", "cuda"}
    for name, parameter in host.items():
        torch.testing.assert_close(model[name].cpu(), parameter, rtol=1e-2, atol=1e-3)


def test_clipped_speculation_is_undone():
    models = []
    for settings in (OffloadSection(), OffloadSection(speculative=1.0)):
        model = parameters("cuda", torch.bfloat16)
        optimizer = ADAM.build(model.items(), offload=settings)
        for step in range(3):
            optimizer.expect(1, 1.0)
            backward(model, gradients(step, torch.bfloat16))
            optimizer.step(1.0, clip=1.0)
        models.append(model)
    assert optimizer.rollbacks == 3 * len(optimizer.buckets)
    assert all(torch.equal(models[0][name], models[1][name]) for name in SHAPES)


def test_activations_wait_on_the_host():
    torch.manual_seed(0)
    model = nn.Sequential(*[module for _ in range(16) for module in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
    x = torch.randn(16384, 1024, device="cuda")
    found = []
    for offload in (None, ActivationOffload(model)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        if offload is None:
            loss = model(x).square().mean()
        else:
            with offload:
                loss = model(x).square().mean()
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        found.append((peak, [parameter.grad.clone() for parameter in model.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    assert found[1][0] < 0.7 * found[0][0]


def test_the_cheaper_side_is_measured():
    assert cheaper_side(torch.device("cuda"), numbers=2**20) in ("host", "device")
