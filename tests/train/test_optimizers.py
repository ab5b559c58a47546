"""Optimizers: equal to PyTorch's own where it has them, and for all of them skipping, clipping, masters, resuming."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.train.loss_scale import LossScale
from moesaic.train.optimizers import Optimizer, OptimizerMethod, _optimizer, adamw, muon, role, zero_one_adam
from moesaic.train.optimizers.adamw import AdamW
from moesaic.train.optimizers.muon import Muon, adjustment, orthogonal
from moesaic.train.optimizers.zero_one_adam import ZeroOneAdam, variance_due
from tests.matrix import OPTIMIZERS

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
INFINITY = float("inf")
SHAPES = {
    "embed": (11, 8),
    "layers.0.attention.qkv.weight": (12, 8),
    "layers.0.attention.qkv.bias": (12,),
    "layers.0.ffn.router.weight": (4, 8),
    "layers.0.ffn.gate_up_EGD": (4, 12, 8),
    "layers.0.ffn.down_EDF": (4, 8, 6),
    "norm.weight": (8,),
    "head": (11, 8),
}
Parameters = dict[str, nn.Parameter]


def make(name: str, **options: Any) -> OptimizerMethod:
    return build(Method(name, options), OptimizerMethod, "test")


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Parameters:
    draw = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype).to(device)) for name, shape in SHAPES.items()
    }


def set_gradients(model: Parameters, seed: int, scale: float = 1.0, without: tuple[str, ...] = ()) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.items():
        gradient = torch.randn(parameter.shape, generator=draw) * scale
        parameter.grad = None if name in without else gradient.to(parameter)


def take(model: Parameters, optimizer: Optimizer, seeds: range, **options: Any) -> None:
    for seed in seeds:
        set_gradients(model, seed, **options)
        optimizer.step(1 / (seed + 1), clip=1.0)


def bits(tensors: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of every tensor: unlike ==, these tell 0.0 from -0.0 and find nan equal to itself."""
    return {name: bytes(tensor.detach().cpu().view(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestEveryOptimizer:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_goes_on_after_a_save_to_the_bit(self, name: str, dtype: torch.dtype, device: str) -> None:
        whole = parameters(dtype, device)
        optimizer = make(name).build(whole.items())
        take(whole, optimizer, range(5), without=("norm.weight",))
        take(whole, optimizer, range(5, 6), scale=INFINITY)
        saved = safetensors.torch.save(optimizer.state_dict())
        weights = {key: parameter.detach().clone() for key, parameter in whole.items()}
        take(whole, optimizer, range(6, 26))

        resumed = parameters(dtype, device)
        again = make(name).build(resumed.items())
        take(resumed, again, range(70, 73))  # what was there before a load must not matter
        with torch.no_grad():
            for key, parameter in resumed.items():
                parameter.copy_(weights[key])
        again.load_state_dict(safetensors.torch.load(saved))
        assert int(again.updates) == 5 and int(again.skipped) == 1
        take(resumed, again, range(6, 26))
        assert bits(resumed) == bits(whole)
        assert bits(again.state_dict()) == bits(optimizer.state_dict())

    @pytest.mark.parametrize("bad", [-INFINITY, float("nan")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_skips_what_is_not_finite(self, name: str, dtype: torch.dtype, bad: float, device: str) -> None:
        model = parameters(dtype, device)
        with torch.no_grad():
            model["layers.0.ffn.gate_up_EGD"][0, 0] = -0.0
        optimizer = make(name).build(model.items())
        take(model, optimizer, range(3), without=("head",))
        for broken in ("layers.0.ffn.gate_up_EGD", "norm.weight"):
            before, state = bits(model), bits(optimizer.state_dict())
            set_gradients(model, 9)
            gradient = model[broken].grad
            assert gradient is not None
            gradient.view(-1)[3] = bad
            count = int(optimizer.skipped)
            result = optimizer.step(1.0, clip=1.0)
            assert bool(result.skipped) and not math.isfinite(float(result.norm))
            assert int(result.updates) == 3 and int(optimizer.skipped) == count + 1
            assert bits(model) == before
            state["skipped"] = bits({"": optimizer.skipped})[""]
            assert bits(optimizer.state_dict()) == state
        set_gradients(model, 10)
        assert not bool(optimizer.step(1000.0, clip=1.0).skipped)
        assert all(now != bits(model)[key] for key, now in before.items())

    def test_a_skip_leaves_zeros_their_sign(self, name: str, device: str) -> None:
        model = {"w.weight": nn.Parameter(torch.full((4, 4), -0.0, device=device))}
        optimizer = make(name).build(model.items())
        for key, tensor in optimizer.state_dict().items():
            if "/" in key and tensor.is_floating_point() and tensor.dim():
                tensor.fill_(-0.0)
        before = bits(optimizer.state_dict() | model)
        set_gradients(model, 0, INFINITY)
        optimizer.step(1.0, clip=1.0)
        optimizer.skipped.zero_()
        assert bits(optimizer.state_dict() | model) == before

    def test_a_parameter_without_gradient_is_left_alone(self, name: str, device: str) -> None:
        model, other = parameters(device=device), parameters(device=device)
        idle = ("layers.0.ffn.down_EDF", "norm.weight", "layers.0.attention.qkv.weight")
        optimizer, reference = make(name).build(model.items()), make(name).build(other.items())
        set_gradients(model, 0, without=idle)
        optimizer.step(1.0, clip=INFINITY)
        set_gradients(other, 0)
        reference.step(1.0, clip=INFINITY)
        fresh = parameters(device=device)
        started = make(name).build(fresh.items()).state_dict()
        for key in SHAPES:
            same_as = fresh if key in idle else other
            assert torch.equal(model[key], same_as[key]), key
        for key, tensor in optimizer.state_dict().items():
            if key.split("/")[0] in idle:
                assert torch.equal(tensor, started[key]), key

    def test_no_gradient_at_all_is_a_step_of_norm_zero(self, name: str, device: str) -> None:
        model = parameters(device=device)
        before = bits(model)
        result = make(name).build(model.items()).step(1.0, clip=1.0)
        assert float(result.norm) == 0 and not bool(result.skipped) and bits(model) == before

    def test_clips_to_the_norm(self, name: str, device: str) -> None:
        clipped, scaled = parameters(device=device), parameters(device=device)
        one, two = make(name).build(clipped.items()), make(name).build(scaled.items())
        for seed in range(3):
            set_gradients(clipped, seed, 100.0)
            squares = [float(p.grad.double().square().sum()) for p in clipped.values() if p.grad is not None]
            expected = math.sqrt(sum(squares))
            result = one.step(1.0, clip=0.5)
            assert float(result.norm) == pytest.approx(expected, rel=1e-6)
            set_gradients(scaled, seed, 100.0)
            for parameter in scaled.values():
                assert parameter.grad is not None
                parameter.grad /= result.norm / 0.5
            assert float(two.step(1.0, clip=INFINITY).norm) == pytest.approx(0.5, rel=1e-6)
        for key in SHAPES:
            torch.testing.assert_close(clipped[key], scaled[key], rtol=1e-6, atol=1e-7)

    def test_a_norm_below_the_clip_changes_nothing(self, name: str, device: str) -> None:
        clipped, free = parameters(device=device), parameters(device=device)
        for model, clip in ((clipped, 1e6), (free, INFINITY)):
            optimizer = make(name).build(model.items())
            set_gradients(model, 0)
            optimizer.step(1.0, clip=clip)
        assert bits(clipped) == bits(free)

    def test_a_loss_scale_is_divided_away(self, name: str, device: str) -> None:
        plain, scaled = parameters(device=device), parameters(device=device)
        one, two = make(name).build(plain.items()), make(name).build(scaled.items())
        for seed in range(3):
            set_gradients(plain, seed)
            set_gradients(scaled, seed, 1024.0)
            norm = one.step(1.0, clip=0.1).norm
            assert torch.equal(two.step(1.0, clip=0.1, loss_scale=torch.tensor(1024.0, device=device)).norm, norm)
        assert bits(plain) == bits(scaled)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_masters_gather_what_the_parameter_cannot_hold(self, name: str, dtype: torch.dtype, device: str) -> None:
        model, exact = parameters(dtype, device), parameters(device=device)
        with torch.no_grad():
            for key, parameter in exact.items():
                parameter.copy_(model[key])
        options = {"lr": 1e-5, "weight_decay": 0.0}
        optimizer, reference = make(name, **options).build(model.items()), make(name, **options).build(exact.items())
        for _ in range(20):  # each step is far below half the distance of two neighbours around 1
            set_gradients(model, 0)
            for key, parameter in exact.items():
                parameter.grad = model[key].grad.float()  # type: ignore[union-attr]
            optimizer.step(1.0, clip=INFINITY)
            reference.step(1.0, clip=INFINITY)
        state = optimizer.state_dict()
        for key, parameter in model.items():
            master = state[f"{key}/master"]
            assert torch.equal(master, exact[key]) and torch.equal(parameter, master.to(dtype))
        start = parameters(dtype, device)
        assert any(not torch.equal(start[key], parameter) for key, parameter in model.items())

    def test_float32_needs_no_masters(self, name: str, device: str) -> None:
        state = make(name).build(parameters(device=device).items()).state_dict()
        assert not any(key.endswith("/master") for key in state)

    def test_masters_in_small_pieces_are_the_same(
        self, name: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run() -> dict[str, bytes]:
            model = parameters(torch.bfloat16, device)
            take(model, make(name).build(model.items()), range(3))
            return bits(model)

        whole = run()
        monkeypatch.setattr(_optimizer, "PIECE", 100)
        assert run() == whole

    def test_decay_is_for_matrices(self, name: str, device: str) -> None:
        for embeddings in (True, False):
            model, before = parameters(device=device), parameters(device=device)
            optimizer = make(name, lr=0.5, weight_decay=0.2, decay_embeddings=embeddings).build(model.items())
            for parameter in model.values():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(0.5, clip=1.0)
            for key, parameter in model.items():
                decays = parameter.dim() > 1 and (embeddings or key != "embed")
                torch.testing.assert_close(parameter, before[key] * (0.95 if decays else 1.0), rtol=1e-6, atol=0)

    def test_the_factor_scales_the_rate(self, name: str, device: str) -> None:
        half, factor = parameters(device=device), parameters(device=device)
        for model, lr, share in ((half, 0.25, 1.0), (factor, 0.5, 0.5)):
            optimizer = make(name, lr=lr).build(model.items())
            for seed in range(3):
                set_gradients(model, seed)
                optimizer.step(share, clip=1.0)
        assert bits(half) == bits(factor) != bits(parameters(device=device))

    def test_refuses_a_state_that_does_not_fit(self, name: str, device: str) -> None:
        model = parameters(device=device)
        optimizer = make(name).build(model.items())
        take(model, optimizer, range(2))
        good = {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}
        before = bits(good)
        key = next(key for key in good if key.startswith("layers.0.ffn.gate_up_EGD/") and good[key].dim())
        changed = {other: tensor + 1 for other, tensor in good.items()}
        for wrong, message in (
            ({other: tensor for other, tensor in changed.items() if other != key}, f"{key} is missing"),
            (changed | {"lost/step": torch.zeros(())}, "lost/step belongs to nothing"),
            (changed | {key: torch.zeros(4, 12, 9)}, r"float32 \[4, 12, 9\], and must be float32 \[4, 12, 8\]"),
            (changed | {key: torch.zeros(4, 12, 8).half()}, "must be float32"),
        ):
            with pytest.raises(UserError, match=message):
                optimizer.load_state_dict(wrong)
            assert bits(optimizer.state_dict()) == before

    def test_the_state_is_named_alike_each_time(self, name: str, device: str) -> None:
        one, two = (make(name).build(parameters(device=device).items()).state_dict() for _ in range(2))
        assert list(one) == list(two)
        assert {key.split("/")[0] for key in one} == {*SHAPES, "updates", "skipped"}

    def test_frozen_parameters_are_left_out(self, name: str, device: str) -> None:
        model = parameters(device=device)
        model["embed"].requires_grad_(False)
        optimizer = make(name).build(model.items())
        assert not any(key.startswith("embed/") for key in optimizer.state_dict())
        with pytest.raises(UserError, match="nothing to train"):
            make(name).build([("embed", model["embed"])])

    def test_zero_grad(self, name: str, device: str) -> None:
        model = parameters(device=device)
        set_gradients(model, 0)
        make(name).build(model.items()).zero_grad()
        assert all(parameter.grad is None for parameter in model.values())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_the_host_never_waits(self, name: str, dtype: torch.dtype, device: str) -> None:
        if device == "cpu":  # tensors without values: whatever would have to read one raises
            with FakeTensorMode():
                self._steps(name, dtype, device, torch.ones)
        else:
            self._steps(name, dtype, device, torch.ones)  # the first launch of a kernel may wait
            torch.cuda.set_sync_debug_mode("error")
            try:
                self._steps(name, dtype, device, torch.ones)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _steps(self, name: str, dtype: torch.dtype, device: str, ones: Callable[..., Tensor]) -> None:
        model = {key: nn.Parameter(ones(shape, dtype=dtype, device=device)) for key, shape in SHAPES.items()}
        optimizer, scale = make(name).build(model.items()), LossScale(device=device)
        for _ in range(3):
            for parameter in model.values():
                parameter.grad = torch.ones_like(parameter)
            result = optimizer.step(0.5, clip=1.0, loss_scale=scale.value)
            scale.update(result.skipped)

    def test_learns(self, name: str, device: str) -> None:
        torch.manual_seed(3)
        x_TD, target_DD = torch.randn(64, 8, device=device), torch.randn(8, 8, device=device)
        shapes = {"w.weight": (8, 8), "b.bias": (8,)}
        model = {key: nn.Parameter(torch.zeros(shape, device=device)) for key, shape in shapes.items()}
        optimizer = make(name, lr=0.2, weight_decay=0.0).build(model.items())
        losses = []
        for step in range(150):
            loss = F.mse_loss(F.linear(x_TD, model["w.weight"], model["b.bias"]), x_TD @ target_DD.T + 1)
            loss.backward()
            optimizer.step(1 - step / 150, clip=10.0)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[-1] < 1e-2 * losses[0]


class TestAdamW:
    def test_two_steps_by_hand(self) -> None:
        weight = nn.Parameter(torch.tensor([[1.0]]))
        optimizer = AdamW(lr=0.1, betas=(0.5, 0.5), eps=1e-12, weight_decay=0.1).build([("w.weight", weight)])
        weight.grad = torch.tensor([[0.5]])
        optimizer.step(1.0, clip=INFINITY)
        assert weight.item() == pytest.approx(1 * 0.99 - 0.1 * 1)  # corrected moments 0.5 and 0.25
        weight.grad = torch.tensor([[-1.0]])
        optimizer.step(1.0, clip=INFINITY)
        # moments -0.375 and 0.5625, both divided by 0.75
        assert weight.item() == pytest.approx(0.89 * 0.99 + 0.1 * 0.5 / math.sqrt(0.75))

    @pytest.mark.parametrize("device", DEVICES)
    def test_is_torchs_own_to_the_bit(self, device: str) -> None:
        ours, theirs = parameters(device=device), parameters(device=device)
        optimizer = AdamW(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1).build(ours.items())
        groups = [
            {"params": [p for p in theirs.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
        reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
        for seed in range(10):
            set_gradients(ours, seed)
            set_gradients(theirs, seed)
            for group in reference.param_groups:
                group["lr"] = 0.01 * (1 / (seed + 1))
            optimizer.step(1 / (seed + 1), clip=INFINITY)
            reference.step()
        state, exact = optimizer.state_dict(), 0
        for key, parameter in theirs.items():
            found = [(ours[key].detach(), parameter.detach())]
            found += [(state[f"{key}/{moment}"], value) for moment, value in reference.state[parameter].items()]
            # What is behind the last whole vector the library rounds in another way on a CPU.
            whole = device != "cpu" or parameter.numel() % adamw.VECTOR == 0
            exact += whole
            for mine, its in found:
                torch.testing.assert_close(mine, its, rtol=0 if whole else 1e-6, atol=0 if whole else 1e-8)
        assert exact >= 2

    @pytest.mark.parametrize("cut", [3, 8, 16, 40])
    def test_shards_have_the_bits_of_the_whole(self, cut: int) -> None:
        draw = torch.Generator().manual_seed(cut)
        first = torch.randn(7, 11, generator=draw)
        whole = nn.Parameter(first.clone())
        shards = [nn.Parameter(part.clone()) for part in first.flatten().tensor_split([cut])]
        one = AdamW(lr=0.01, weight_decay=0.0).build([("w.weight", whole)])
        two = AdamW(lr=0.01, weight_decay=0.0).build([(f"{n}.weight", shard) for n, shard in enumerate(shards)])
        for _ in range(5):
            gradient = torch.randn(7, 11, generator=draw)
            whole.grad = gradient.clone()
            for shard, part in zip(shards, gradient.flatten().tensor_split([cut]), strict=True):
                shard.grad = part.clone()
            one.step(1.0, clip=INFINITY)
            two.step(1.0, clip=INFINITY)
        for name in ("exp_avg", "exp_avg_sq"):
            parts = [two.state_dict()[f"{n}.weight/{name}"].flatten() for n in range(2)]
            assert torch.equal(one.state_dict()[f"w.weight/{name}"].flatten(), torch.cat(parts))
        assert torch.equal(whole.detach().flatten(), torch.cat([shard.detach() for shard in shards]))


class TestMuon:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
    @pytest.mark.parametrize("nesterov", [True, False])
    def test_is_torchs_own_to_the_bit(self, adjust: muon.Adjust, nesterov: bool, device: str) -> None:
        shapes = [(12, 8), (8, 12), (16, 16), (5, 33)]
        ours = {f"layers.{n}.out.weight": nn.Parameter(torch.randn(shape).to(device)) for n, shape in enumerate(shapes)}
        theirs = {key: nn.Parameter(parameter.detach().clone()) for key, parameter in ours.items()}
        options = Muon(lr=0.02, adjust=adjust, nesterov=nesterov, precision="bfloat16")
        optimizer = options.build(ours.items())
        reference = torch.optim.Muon(theirs.values(), lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust)
        for seed in range(5):
            set_gradients(ours, seed)
            set_gradients(theirs, seed)
            optimizer.step(1.0, clip=INFINITY)
            reference.step()
        assert bits(ours) == bits(theirs)

    def test_float32_is_bfloat16_made_finer(self) -> None:
        matrix, options = torch.randn(24, 16), ((3.4445, -4.7750, 2.0315), 5, 1e-7)
        fine, coarse = orthogonal(matrix, *options, "float32"), orthogonal(matrix, *options, "bfloat16")
        torch.testing.assert_close(fine, coarse.float(), rtol=0.05, atol=0.02)
        assert orthogonal(matrix, *options).dtype == torch.float32  # on a CPU

    def test_one_number_by_hand(self) -> None:
        a, b, c = 3.4445, -4.7750, 2.0315
        expected = 1.0
        for _ in range(5):
            expected *= a + b * expected**2 + c * expected**4
        weight = nn.Parameter(torch.tensor([[2.0]]))
        optimizer = Muon(lr=0.1, weight_decay=0.5, adjust="original").build([("w.weight", weight)])
        weight.grad = torch.tensor([[-3.0]])
        optimizer.step(1.0, clip=INFINITY)
        assert weight.item() == pytest.approx(2 * 0.95 + 0.1 * expected, rel=1e-5)

    def test_singular_values_come_near_one(self) -> None:
        for shape in ((32, 32), (64, 16), (3, 16, 48)):
            values = torch.linalg.svdvals(orthogonal(torch.randn(shape), (3.4445, -4.7750, 2.0315), 6, 1e-7))
            assert 0.6 < float(values.min()) and float(values.max()) < 1.3

    @pytest.mark.parametrize("piece", [2**26, 200])
    def test_each_expert_is_a_matrix_of_its_own(self, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(muon, "PIECE", piece)
        stacks = {
            "ffn.gate_up_EGD": nn.Parameter(torch.randn(5, 12, 8)),
            "ffn.down_EDF": nn.Parameter(torch.randn(5, 8, 6)),
        }
        singles = {
            f"{key}.{n}.weight": nn.Parameter(stack[n].detach().clone())
            for key, stack in stacks.items()
            for n in range(5)
        }
        one, two = Muon(lr=0.02).build(stacks.items()), Muon(lr=0.02).build(singles.items())
        for seed in range(3):
            set_gradients(stacks, seed)
            for key, stack in stacks.items():
                for n in range(5):
                    singles[f"{key}.{n}.weight"].grad = stack.grad[n].clone() * 10.0**n  # type: ignore[index]
                    stack.grad[n] *= 10.0**n  # type: ignore[index]
            one.step(1.0, clip=INFINITY)
            two.step(1.0, clip=INFINITY)
        for key, stack in stacks.items():
            together = torch.stack([singles[f"{key}.{n}.weight"] for n in range(5)])
            torch.testing.assert_close(stack.detach(), together.detach(), rtol=1e-5, atol=1e-6)

    def test_an_idle_expert_only_decays(self) -> None:
        stack = nn.Parameter(torch.randn(3, 8, 6))
        before = stack.detach().clone()
        optimizer = Muon(lr=0.5, weight_decay=0.1).build([("ffn.down_EDF", stack)])
        stack.grad = torch.randn(3, 8, 6)
        stack.grad[1] = 0
        optimizer.step(1.0, clip=1.0)
        torch.testing.assert_close(stack.detach()[1], before[1] * 0.95)
        assert (stack.detach()[0] - before[0] * 0.95).abs().mean() > 0.01

    def test_the_rest_goes_by_adamw_with_its_own_rate(self) -> None:
        ours, theirs = parameters(), parameters()
        rest = {"embed", "layers.0.attention.qkv.bias", "layers.0.ffn.router.weight", "norm.weight", "head"}
        options = Muon(lr=0.02, adamw_lr=0.003, adamw_betas=(0.8, 0.9), adamw_eps=1e-6, adamw_weight_decay=0.3)
        take(ours, options.build(ours.items()), range(3))
        take(theirs, AdamW(lr=0.003, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3).build(theirs.items()), range(3))
        assert {key for key in SHAPES if torch.equal(ours[key], theirs[key])} == rest

    def test_an_update_has_the_size_of_adamws(self) -> None:
        for shape in ((64, 64), (256, 64), (64, 256)):
            weight = nn.Parameter(torch.zeros(shape))
            weight.grad = torch.randn(shape)
            Muon(lr=1.0).build([("w.weight", weight)]).step(1.0, clip=INFINITY)
            assert 0.15 < float(weight.detach().square().mean().sqrt()) < 0.25
        assert adjustment("match_rms_adamw", 256, 64) == pytest.approx(3.2)
        assert adjustment("original", 256, 64) == 2.0 and adjustment("original", 64, 256) == 1.0


class TestZeroOneAdam:
    @pytest.mark.parametrize("double_every", [1, 3, 16])
    def test_the_policy_is_the_papers(self, double_every: int) -> None:
        steps, step = set(), 0
        for count in range(8 * double_every):
            steps.add(step)
            step += 2 ** (count // double_every)
        assert {t for t in range(step) if variance_due(torch.tensor(t), double_every)} == steps
        far = double_every * (2**40 - 1)
        assert variance_due(torch.tensor(far), double_every) and not variance_due(torch.tensor(far + 1), double_every)

    @pytest.mark.parametrize("device", DEVICES)
    def test_is_adam_while_every_step_updates_the_variance(self, device: str) -> None:
        ours, theirs = parameters(device=device), parameters(device=device)
        options = {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.1}
        one = ZeroOneAdam(variance_double_every=10, **options).build(ours.items())  # type: ignore[arg-type]
        two = AdamW(**options).build(theirs.items())  # type: ignore[arg-type]
        take(ours, one, range(10))
        take(theirs, two, range(10))
        for key in SHAPES:
            torch.testing.assert_close(ours[key], theirs[key], rtol=2e-6, atol=2e-6)
        take(ours, one, range(10, 20))
        take(theirs, two, range(10, 20))
        assert not torch.allclose(ours["head"], theirs["head"], rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("corrected", [True, False])
    def test_three_steps_by_hand(self, corrected: bool) -> None:
        weight = nn.Parameter(torch.tensor([1.0]))
        optimizer = ZeroOneAdam(
            lr=0.1, betas=(0.5, 0.75), eps=1e-12, variance_double_every=1, bias_correction=corrected
        ).build([("w", weight)])  # the variance is updated at steps 0, 1, 3, 7
        momentum = variance = count = 0.0
        expected = 1.0
        for step, gradient in enumerate((2.0, -1.0, 4.0)):
            weight.grad = torch.tensor([gradient])
            optimizer.step(1.0, clip=INFINITY)
            momentum = 0.5 * momentum + 0.5 * gradient
            if step in (0, 1):
                variance, count = 0.75 * variance + 0.25 * gradient**2, count + 1
            first, second = (1 - 0.5 ** (step + 1), 1 - 0.75**count) if corrected else (1.0, 1.0)
            expected -= 0.1 * (momentum / first) / math.sqrt(variance / second)
            assert weight.item() == pytest.approx(expected, rel=1e-6)

    def test_large_weights_in_pieces_are_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs = []
        for piece in (2**26, 7):
            monkeypatch.setattr(zero_one_adam, "PIECE", piece)
            model = parameters()
            take(model, ZeroOneAdam(variance_double_every=2).build(model.items()), range(6))
            runs.append(bits(model))
        assert runs[0] == runs[1]

    def test_the_variance_is_frozen_between(self) -> None:
        model = parameters()
        optimizer = ZeroOneAdam(variance_double_every=2).build(model.items())
        changes = []
        for step in range(20):
            before = bits(optimizer.state_dict())
            take(model, optimizer, range(step, step + 1))
            after = bits(optimizer.state_dict())
            changed = {before[key] != after[key] for key in after if key.endswith("/variance")}
            assert len(changed) == 1
            changes += [step] * changed.pop()
        assert changes == [0, 1, 2, 4, 6, 10, 14]
        assert int(optimizer.state_dict()["head/variance_step"]) == 7

    def test_a_step_is_linear_in_the_gradients_between(self) -> None:
        """Workers may exchange momenta only because the mean of their steps is the step of their mean."""
        model = parameters()
        optimizer = ZeroOneAdam(lr=0.1, variance_double_every=2).build(model.items())
        take(model, optimizer, range(7))
        state = {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}
        start = {key: parameter.detach().clone() for key, parameter in model.items()}
        draws = [{key: torch.randn(shape) for key, shape in SHAPES.items()} for _ in range(2)]

        def moved(share: float, steps: int = 3) -> dict[str, Tensor]:
            optimizer.load_state_dict(state)
            for key, parameter in model.items():
                parameter.data.copy_(start[key])
            for _ in range(steps):  # steps 7, 8 and 9: none updates the variance
                for key, parameter in model.items():
                    parameter.grad = share * draws[0][key] + (1 - share) * draws[1][key]
                optimizer.step(1.0, clip=INFINITY)
            return {key: parameter.detach() - start[key] for key, parameter in model.items()}

        one, other, mixed = moved(1.0), moved(0.0), moved(0.3)
        for key in SHAPES:
            torch.testing.assert_close(mixed[key], 0.3 * one[key] + 0.7 * other[key], rtol=1e-4, atol=1e-5)

    def test_a_weight_without_variance_takes_no_giant_step(self) -> None:
        model = {"embed": nn.Parameter(torch.zeros(3, 4)), "late.weight": nn.Parameter(torch.zeros(2, 2))}
        optimizer = ZeroOneAdam(lr=0.1, variance_double_every=1).build(model.items())
        for _ in range(5):  # steps 0 to 4; the next update of the variance is at 7
            model["embed"].grad = torch.zeros(3, 4)
            model["embed"].grad[0] = 1.0
            optimizer.step(1.0, clip=INFINITY)
        assert float(model["embed"].detach()[1:].abs().max()) == 0
        for parameter in model.values():
            parameter.grad = torch.full_like(parameter, 1e-3)
        before = model["embed"].detach().clone()
        optimizer.step(1.0, clip=INFINITY)
        assert 0 < float((model["embed"].detach() - before)[1:].abs().max()) < 0.1
        assert float(model["late.weight"].detach().abs().max()) == pytest.approx(0.1, rel=1e-3)


class TestLossScale:
    def test_doubles_after_good_steps_and_halves_after_bad(self) -> None:
        scale = LossScale(initial=8.0, grow_after=3, min_scale=2.0, max_scale=32.0)
        good, bad = torch.tensor(False), torch.tensor(True)
        values = []
        for skipped in [good] * 3 + [good] * 2 + [bad] + [good] * 9 + [bad] * 6:
            scale.update(skipped)
            values.append(float(scale.value))
        expected = [8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 16, 32, 32, 32, 32, 16, 8, 4, 2, 2, 2]
        assert values == expected

    def test_goes_on_after_a_save(self) -> None:
        one, two = LossScale(grow_after=3), LossScale(initial=4.0, grow_after=3)
        one.update(torch.tensor(False))
        two.load_state_dict(safetensors.torch.load(safetensors.torch.save(one.state_dict())))
        for scale in (one, two):
            for _ in range(2):
                scale.update(torch.tensor(False))
        assert float(one.value) == float(two.value) == 2.0**17
        for wrong in (
            {},
            one.state_dict() | {"more": torch.zeros(())},
            one.state_dict() | {"good_steps": torch.ones(2)},
        ):
            with pytest.raises(UserError, match="loss scale state"):
                two.load_state_dict(wrong)

    @pytest.mark.parametrize("options", [{"initial": 0.5}, {"initial": 2.0**25}, {"min_scale": 0.0}, {"grow_after": 0}])
    def test_refuses_bounds_that_are_none(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            LossScale(**options)

    def test_finds_a_scale_at_which_float16_does_not_overflow(self) -> None:
        model = {"w.weight": nn.Parameter(torch.ones(4, 4, dtype=torch.float16))}
        optimizer, scale = AdamW(lr=0.1).build(model.items()), LossScale(initial=2.0**16)
        x_TD = torch.full((2, 4), 8.0, dtype=torch.float16)
        skipped = []
        for _ in range(8):
            scale.apply(F.linear(x_TD, model["w.weight"]).float().sum()).backward()
            result = optimizer.step(1.0, clip=1.0, loss_scale=scale.value)
            scale.update(result.skipped)
            optimizer.zero_grad()
            skipped.append(bool(result.skipped))
        # The gradient of a weight is 16: scaled by 2^16, 2^15, ... it fits below 65504 from 2^11 on.
        assert skipped == [True] * 5 + [False] * 3 and float(scale.value) == 2.0**11
        assert float(result.norm) == 64.0 and model["w.weight"].max().item() < 0.8


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("adamw", {"lr": 0}, "lr must be above 0"),
            ("adamw", {"betas": [0.9, 1.0]}, "betas must be from 0 to below 1"),
            ("adamw", {"weight_decay": -0.1}, "weight_decay must be from 0"),
            ("adamw", {"lr": 1e300}, "lr must be above 0 and at most 1000"),
            ("adamw", {"eps": 0}, "eps must be above 0"),
            ("adamw", {"beta": [0.9, 0.95]}, "did you mean.*betas"),
            ("muon", {"momentum": 1.0}, "momentum must be from 0 to below 1"),
            ("muon", {"adamw_lr": -1}, "lr must be above 0"),
            ("muon", {"iterations": 0}, "iterations must be from 1"),
            ("muon", {"adjust": "some"}, "adjust"),
            ("zero_one_adam", {"variance_double_every": 0}, "variance_double_every must be at least 1"),
        ],
    )
    def test_refuses_what_cannot_be(self, name: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            make(name, **options)

    def test_as_a_recipe_writes_them(self) -> None:
        method = make("adamw", lr=3e-4, betas=[0.9, 0.95], weight_decay=0.1)
        assert method == AdamW(3e-4, (0.9, 0.95), weight_decay=0.1) and method.lr == 3e-4


def tiny() -> Model:
    config = ModelConfig(
        family="moesaic",
        vocab=32,
        hidden=16,
        attention=GroupedQuery(heads=2, kv_heads=1, head_size=8, qkv_bias=True, qk_norm=True),
        rope=Rope(size=8),
        layers=(
            Layer(Dense(24)),
            Layer(Experts(count=4, per_token=2, hidden=12, shared_hidden=12, residual=True)),
        ),
    )
    return Model(config).initialize(0)


def test_the_roles_of_a_models_parameters() -> None:
    roles: dict[str, set[str]] = {}
    for name, parameter in tiny().named_parameters():
        roles.setdefault(role(name, parameter), set()).add(name)
    assert roles["embedding"] == {"embed"} and roles["head"] == {"head"}
    assert roles["gate"] == {"layers.1.ffn.router.weight", "layers.1.ffn.residual.weight"}
    assert roles["hidden"] == {
        *(f"layers.{n}.attention.{part}.weight" for n in range(2) for part in ("qkv", "out")),
        *(f"layers.{path}.{part}.weight" for path in ("0.ffn", "1.ffn.shared") for part in ("gate_up", "down")),
        "layers.1.ffn.gate_up_EGD",
        "layers.1.ffn.down_EDF",
    }
    assert all(name.endswith(("norm.weight", "bias")) for name in roles["vector"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_learns_a_sequence(name: str) -> None:
    model = tiny()
    optimizer = make(name, lr=0.01).build(model.named_parameters())
    tokens_T = torch.tensor([(7 * n) % 32 for n in range(33)])
    layout = Layout([32])
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model.logits_at(model(tokens_T[:-1], layout)), tokens_T[1:])
        loss.backward()
        optimizer.step(1.0, clip=1.0)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] > 3.3 and losses[-1] < 0.5
