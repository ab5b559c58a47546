"""The seams that many devices stand on, on two real processes (gloo): FSDP2 over blocks. Nothing in model/ knows of it.

Experts on other ranks stand in by `ops` (test_experts.py)."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moesaic
from moesaic.model import directory
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.sharded import whole
from moesaic.train.architecture import architecture
from moesaic.train.optimizers.adamw import AdamW
from tests.parallel.ranks import on_ranks

WORLD = 2
# Sizes that two ranks cannot divide evenly: a hidden size of 21, hidden layers of 33 and 7 experts.
SIZES = [
    "model={family: moesaic, vocab: 67, hidden: 21, layers: 3, heads: 3, kv_heads: 1, head_size: 6, dense_layers: 0,"
    " experts: 7, experts_per_token: 2, expert_hidden: 33, shared_experts: 0, context: 64}"
]


def model_of(experts: int = 7, shared: int = 0) -> Model:
    given = [*SIZES, f"model.experts={experts}", f"model.shared_experts={shared}"]
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/tiny.yaml", given)
    return Model(architecture(recipe.model, bos=None, eos=(), pad=None)).initialize(3)


def batch(rank: int) -> tuple[Tensor, Tensor, Layout]:
    generator = torch.Generator().manual_seed(rank)
    tokens_T = torch.randint(0, 67, (24,), generator=generator)
    return tokens_T, tokens_T.roll(-1), Layout([10, 14])


def loss_of(model: Model, rank: int, scale: float) -> Tensor:
    tokens_T, targets_T, layout = batch(rank)
    total, _ = model.cross_entropy(model(tokens_T, layout), targets_T, torch.full((24,), scale / 48))
    return total


def fsdp(rank: int, world: int, folder: Path) -> None:
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


def test_fsdp_on_two_processes(tmp_path: Path) -> None:
    on_ranks(WORLD, fsdp, tmp_path, tmp_path)
