"""State on the host: the bits of an optimizer in memory, whatever is overlapped, undone, on disk or resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.offload.host_memory import HostMemory
from moesaic.parallel.offload.staging import Staging
from moesaic.recipe_offload import OffloadSection, check_ranks
from moesaic.train.optimizers import Optimizer, OptimizerMethod, _offloaded
from moesaic.train.optimizers._offloaded import OffloadedOptimizer
from moesaic.train.optimizers.adamw import AdamW
from moesaic.train.optimizers.muon import Muon
from moesaic.train.optimizers.zero_one_adam import ZeroOneAdam
from tests.parallel.test_seams import model_of

CLIP = 1.0
HALF = 50121 * 12 / 2 / 2**30  # GiB for the state of about half of the weights
MANY = 100.0  # GiB to undo with: every bucket speculates


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of buckets, and so few buffers that most gradients wait for one."""
    monkeypatch.setattr(_offloaded, "BUCKET", 2000)
    monkeypatch.setattr(_offloaded, "BUFFERS", 2)


def backward(model: Model, step: int, share: float = 1.0) -> None:
    tokens_T = torch.randint(0, 67, (24,), generator=torch.Generator().manual_seed(step))
    scale_T = torch.full((24,), share / 24)
    model.cross_entropy(model(tokens_T, Layout([10, 14])), tokens_T.roll(-1), scale_T)[0].backward()


def rate(step: int) -> float:
    return 1 / (1 + 0.1 * step)


def train(model: Model, optimizer: Optimizer, steps: range, clip: float = CLIP) -> list[float]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        optimizer.expect(1, rate(step))
        backward(model, step)
        norms.append(float(optimizer.step(rate(step), clip=clip).norm))
    return norms


def build(
    method: OptimizerMethod, offload: OffloadSection | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Model, Optimizer]:
    model = model_of().to(dtype)
    return model, method.build(model.named_parameters(), offload=offload)


def everything(model: Model, optimizer: Optimizer) -> dict[str, Tensor]:
    return model.state_dict() | optimizer.state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    "method", [AdamW(lr=0.01), Muon(lr=0.01), ZeroOneAdam(lr=0.01)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("where", ["cpu", "disk", "speculative", "cast", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_has_the_bits_of_one_in_memory(method: OptimizerMethod, where: str, dtype: torch.dtype, tmp_path: Path) -> None:
    settings = {
        "cpu": OffloadSection(),
        "disk": OffloadSection(optimizer=str(tmp_path / "nvme")),
        "speculative": OffloadSection(speculative=MANY),
        "cast": OffloadSection(cast="device"),
        "shared": OffloadSection(on_device=HALF, speculative=MANY),
    }[where]
    model, optimizer = build(method, dtype=dtype)
    norms = train(model, optimizer, range(5))
    other, offloaded = build(method, settings, dtype)
    assert isinstance(offloaded, OffloadedOptimizer) and len(offloaded.buckets) > 2
    away = sum(slot.weight.numel() for bucket in offloaded.buckets for _, slot in bucket.slots)
    assert (away < 0.7 * 50121) == (where == "shared") and away > 0
    assert train(other, offloaded, range(5)) == norms and max(norms) > CLIP  # some steps clip
    assert_same(everything(model, optimizer), everything(other, offloaded))
    if where == "disk":
        assert list((tmp_path / "nvme").iterdir()) == []  # files without names: a killed run leaves nothing


class TestSpeculation:
    def test_is_kept_when_right_and_undone_when_not(self) -> None:
        model, optimizer = build(AdamW(lr=0.01))
        other, offloaded = build(AdamW(lr=0.01), OffloadSection(speculative=MANY))
        assert isinstance(offloaded, OffloadedOptimizer)
        buckets = len(offloaded.buckets)
        for clip, undone in ((math.inf, 0), (1e-3, buckets), (math.inf, 0)):
            before = offloaded.rollbacks
            train(model, optimizer, range(3), clip)
            train(other, offloaded, range(3), clip)
            assert offloaded.rollbacks - before == 3 * undone
            assert_same(everything(model, optimizer), everything(other, offloaded))

    def test_runs_during_the_backward_pass(self) -> None:
        model, optimizer = build(AdamW(lr=0.01), OffloadSection(speculative=MANY))
        assert isinstance(optimizer, OffloadedOptimizer)
        optimizer.expect(1, 1.0)
        backward(model, 0)
        assert all(bucket.speculation is not None for bucket in optimizer.buckets)
        assert all(parameter.grad is None for parameter in model.parameters())  # the device is rid of them
        optimizer.step(1.0, clip=math.inf)
        assert optimizer.rollbacks == 0

    def test_memory_bounds_it(self) -> None:
        gib = 3 * 4 * 5000 / 2**30
        _, optimizer = build(AdamW(), OffloadSection(speculative=gib))
        assert isinstance(optimizer, OffloadedOptimizer)
        rooms = [bucket.undo for bucket in optimizer.buckets]
        number = sum(room is not None for room in rooms)
        assert 0 < number < len(rooms) and all(room is None for room in rooms[number:])
        assert sum(t.numel() * t.element_size() for room in rooms if room for t in room) <= gib * 2**30

    def test_another_rate_than_expected_is_found_out(self) -> None:
        model, optimizer = build(AdamW(lr=0.01))
        other, offloaded = build(AdamW(lr=0.01), OffloadSection(speculative=MANY))
        for one, its in ((model, optimizer), (other, offloaded)):
            its.expect(1, 0.5)
            backward(one, 0)
            its.step(0.25, clip=math.inf)
        assert_same(everything(model, optimizer), everything(other, offloaded))

    def test_a_backward_pass_without_a_step(self) -> None:
        model, optimizer = build(AdamW(lr=0.01), OffloadSection(speculative=MANY))
        before = {name: tensor.clone() for name, tensor in everything(model, optimizer).items()}
        optimizer.expect(1, 1.0)
        backward(model, 0)
        optimizer.zero_grad()
        assert_same(everything(model, optimizer), before)
        train(model, optimizer, range(1))


every_setting = pytest.mark.parametrize(
    "settings",
    [
        OffloadSection(),
        OffloadSection(speculative=MANY),
        OffloadSection(delay=True),
        OffloadSection(speculative=MANY, on_device=HALF),
    ],
    ids=["plain", "speculative", "delay", "shared"],
)


@every_setting
def test_a_step_that_is_not_finite_changes_nothing(settings: OffloadSection) -> None:
    model, optimizer = build(AdamW(lr=0.01), settings)
    train(model, optimizer, range(2))
    optimizer.bring_together()
    before = {name: tensor.clone() for name, tensor in everything(model, optimizer).items()}
    optimizer.zero_grad()
    optimizer.expect(1, 1.0)
    handle = model.embed.register_hook(lambda gradient: gradient * math.nan)
    backward(model, 2)
    handle.remove()
    result = optimizer.step(1.0, clip=CLIP)
    optimizer.bring_together()
    after = everything(model, optimizer)
    assert bool(result.skipped) and int(after["skipped"]) == 1
    assert_same(after | {"skipped": before["skipped"]}, before)
    train(model, optimizer, range(2, 4))
    assert int(optimizer.updates) == 4


def test_loss_scale_and_missing_gradients() -> None:
    model, optimizer = build(AdamW(lr=0.01))
    other, offloaded = build(AdamW(lr=0.01), OffloadSection(speculative=MANY))
    scale = torch.tensor(8.0)
    for step in range(3):
        for one, its in ((model, optimizer), (other, offloaded)):
            its.zero_grad()
            its.expect(1, 1.0)
            backward(one, step, share=8.0)
            if step == 1 and one is model:
                one.head.grad = None  # type: ignore[union-attr]
            if step == 1 and one is other:  # the same, for one whose gradients have left already
                its.zero_grad()
                one.head.requires_grad_(False)  # type: ignore[union-attr]
                backward(one, step, share=8.0)
                one.head.requires_grad_(True)  # type: ignore[union-attr]
            its.step(1.0, clip=CLIP, loss_scale=scale)
        assert_same(everything(model, optimizer), everything(other, offloaded))


def test_micro_batches() -> None:
    model, optimizer = build(AdamW(lr=0.01))
    other, offloaded = build(AdamW(lr=0.01), OffloadSection(speculative=MANY))
    for step in range(3):
        for one, its in ((model, optimizer), (other, offloaded)):
            its.zero_grad()
            its.expect(3, 1.0)
            for part in range(3):
                backward(one, 3 * step + part, share=1 / 3)
            its.step(1.0, clip=CLIP)
    assert_same(everything(model, optimizer), everything(other, offloaded))
    offloaded.expect(1, 1.0)
    backward(other, 0)
    with pytest.raises(AssertionError, match="further backward pass"):
        backward(other, 1)


def test_a_delayed_update_is_one_step_late() -> None:
    """By hand: the gradients of a step are of weights that miss the update before."""
    model, optimizer = build(AdamW(lr=0.01))
    other, offloaded = build(AdamW(lr=0.01), OffloadSection(delay=True))
    stale = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    latest = stale[0]
    for step in range(5):
        model.load_state_dict(stale[-1])  # what the forward pass sees
        optimizer.zero_grad()
        backward(model, step)
        model.load_state_dict(latest)
        optimizer.step(rate(step), clip=CLIP)
        stale.append(latest)
        latest = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(other, offloaded, range(5))
    assert_same(other.state_dict(), stale[-1])
    offloaded.bring_together()
    assert_same(everything(other, offloaded), everything(model, optimizer))


@every_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumes_with_and_without(settings: OffloadSection, dtype: torch.dtype) -> None:
    model, optimizer = build(AdamW(lr=0.01), settings, dtype)
    train(model, optimizer, range(3))
    optimizer.bring_together()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    train(model, optimizer, range(3, 6))
    optimizer.bring_together()
    for other_settings in (settings, None):
        if other_settings is None and settings.delay:
            continue
        other, again = build(AdamW(lr=0.01), other_settings, dtype)
        other.load_state_dict(weights)
        again.load_state_dict(state)
        train(other, again, range(3, 6))
        again.bring_together()
        assert_same(everything(model, optimizer), everything(other, again))


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(UserError, match="no space"):
        HostMemory(tmp_path).copy(torch.zeros(8), torch.float32)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot hold"):
        HostMemory(tmp_path / "file" / "below")


def test_buffers_come_back() -> None:
    staging = Staging(torch.device("cpu"), 4096, 2, "host")
    first, second = staging.take(), staging.take()
    assert first is not None and second is not None and staging.take(wait=False) is None
    staging.fetch(first, [torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16)], staging.now())
    views = first.wait()
    assert views[0].tolist() == [0, 1, 2, 3, 4] and views[1].dtype == torch.bfloat16
    target = torch.empty(5, dtype=torch.bfloat16)
    staging.send(first, [torch.full((5,), 1.0000001)], [target])
    assert target.tolist() == [1.0] * 5 and staging.take(wait=False) is first


def test_is_for_one_rank() -> None:
    check_ranks(OffloadSection(), 1)
    check_ranks(OffloadSection(optimizer=None, activations=True), 2)
    with pytest.raises(UserError, match="2 ranks"):
        check_ranks(OffloadSection(), 2)
