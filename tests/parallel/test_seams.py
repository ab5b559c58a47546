"""The seams that many devices stand on, on two real processes (gloo): FSDP2 over blocks, and experts on other ranks by
`ops` alone. Nothing in model/ knows of either."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moesaic
from moesaic.kernels import Kernels
from moesaic.kernels.interface import Dispatched, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.model import directory
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.sharded import whole
from moesaic.train.architecture import architecture
from moesaic.train.optimizers.adamw import AdamW

WORLD = 2
# Sizes that two ranks cannot divide evenly: a hidden size of 21, hidden layers of 33 and 7 experts.
SIZES = [
    "model={family: moesaic, vocab: 67, hidden: 21, layers: 3, heads: 3, kv_heads: 1, head_size: 6, dense_layers: 0,"
    " experts: 7, experts_per_token: 2, expert_hidden: 33, shared_experts: 0, context: 64}"
]


def model_of(experts: int = 7) -> Model:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/tiny.yaml", [*SIZES, f"model.experts={experts}"])
    return Model(architecture(recipe.model, bos=None, eos=(), pad=None)).initialize(3)


def batch(rank: int) -> tuple[Tensor, Tensor, Layout]:
    generator = torch.Generator().manual_seed(rank)
    tokens_T = torch.randint(0, 67, (24,), generator=generator)
    return tokens_T, tokens_T.roll(-1), Layout([10, 14])


def loss_of(model: Model, rank: int, scale: float) -> Tensor:
    tokens_T, targets_T, layout = batch(rank)
    total, _ = model.cross_entropy(model(tokens_T, layout), targets_T, torch.full((24,), scale / 48))
    return total


def on_two_ranks(check: Callable[[int, Path], None], folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(_rank, args=(check, port, folder), nprocs=WORLD)


def _rank(rank: int, check: Callable[[int, Path], None], port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    try:
        check(rank, folder)
    finally:
        dist.destroy_process_group()


def fsdp(rank: int, folder: Path) -> None:
    single, model = model_of(), model_of()
    for number in range(WORLD):
        loss_of(single, number, 1.0).backward()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    sharded = {name for name, parameter in model.named_parameters() if name.startswith("layers.")}
    assert sharded and all(whole(parameter) is not parameter for name, parameter in _named(model, sharded))
    loss_of(model, rank, float(WORLD)).backward()  # FSDP takes the mean over ranks, so each counts double
    for name, parameter in model.named_parameters():
        if name not in sharded:  # embedding, norm and output matrix are not divided: their gradients are ours to add
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD
        assert torch.equal(whole(parameter.grad), single.get_parameter(name).grad), name

    results = []
    for one in (single, model):
        optimizer = AdamW(lr=0.01).build(one.named_parameters())
        results.append(optimizer.step(1.0, clip=100.0))
    torch.testing.assert_close(results[0].norm, results[1].norm)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), single.get_parameter(name)), name

    directory.save(model, folder / f"rank{rank}")
    saved = directory.load(folder / f"rank{rank}").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in single.state_dict().items())

    prompts, options = [[5, 6, 7, 8, 9], [3, 1]], {"max_tokens": 6, "temperature": 0.0}
    served = moesaic.Engine(model, cache_bytes=1 << 20).generate(prompts, **options)
    expected = moesaic.Engine(single, cache_bytes=1 << 20).generate(prompts, **options)
    assert [one.tokens for one in served] == [one.tokens for one in expected]
    assert [one.logprobs for one in served] == [one.logprobs for one in expected]


def _named(model: Model, names: set[str]) -> list[tuple[str, nn.Parameter]]:
    return [(name, model.get_parameter(name)) for name in sorted(names)]


class ExpertParallel:
    """Every rank holds some of the experts; rows go to theirs and come back."""

    def __init__(self, plain: Kernels) -> None:
        self.plain = plain
        self.sent_rows = 0

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        here = len(weights.gate_up_EGD)
        sent = self.plain.dispatch(x_TD, routes, here * WORLD)
        counts_RE = sent.counts_E.view(WORLD, here)
        arriving_RE = torch.empty_like(counts_RE)
        dist.all_to_all_single(arriving_RE, counts_RE.contiguous())
        out_splits, in_splits = arriving_RE.sum(1).tolist(), counts_RE.sum(1).tolist()
        self.sent_rows += sum(in_splits)

        def exchange(rows: Tensor, to: list[int], source: list[int]) -> Tensor:
            return collectives.all_to_all_single_autograd(rows.contiguous(), to, source, dist.group.WORLD).wait()

        x_AD, weights_A1 = (exchange(rows, out_splits, in_splits) for rows in (sent.x_AD, sent.weights_A1))
        # Rows came sorted by expert from every rank; the experts want them sorted by expert over all ranks.
        expert_A = torch.cat([torch.arange(here).repeat_interleave(counts_E) for counts_E in arriving_RE])
        order_A = expert_A.argsort(stable=True)
        rows = Dispatched(x_AD[order_A], weights_A1[order_A], arriving_RE.sum(0), order_A, len(order_A))
        y_AD = self.plain.compute_experts(rows, weights)
        back_AD = torch.zeros_like(y_AD).index_copy(0, order_A, y_AD)
        return self.plain.combine(exchange(back_AD, in_splits, out_splits), sent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def expert_parallel(rank: int, folder: Path) -> None:
    single = model_of(experts=8)
    model = copy.deepcopy(single)
    for block in model.layers:
        ffn = block.ffn
        assert isinstance(ffn, MixtureFeedForward)
        for name in ("gate_up_EGD", "down_EDF"):
            own = getattr(ffn, name).detach().chunk(WORLD)[rank].clone()
            setattr(ffn, name, nn.Parameter(own))
    parallel = ExpertParallel(model.ops)
    model.ops = parallel  # type: ignore[assignment]
    for number in range(WORLD):
        loss_of(single, number, 1.0).backward()
    torch.testing.assert_close(loss_of(model, rank, 1.0), loss_of(single, rank, 1.0))
    loss_of(model, rank, 1.0).backward()
    assert parallel.sent_rows == 2 * 3 * 24 * 2  # forwards, layers, tokens, experts of a token
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected = single.get_parameter(name).grad
        if name.endswith(("gate_up_EGD", "down_EDF")):
            expected = expected.chunk(WORLD)[rank]  # rows of all ranks have come to it
        else:
            dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("check", [fsdp, expert_parallel], ids=lambda check: check.__name__)
def test_on_two_processes(check: Callable[[int, Path], None], tmp_path: Path) -> None:
    on_two_ranks(check, tmp_path)
