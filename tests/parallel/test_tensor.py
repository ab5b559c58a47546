"""Tensor parallel beside one process: hidden states, loss and every parameter's gradient, on two and four processes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.data.packing import Batch
from moesaic.model.config import Dense, Experts, GroupedQuery, Indexer, Latent, Layer, ModelConfig, Rope
from moesaic.model.context import Routing
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.kernels import ExpertParallelKernels
from moesaic.parallel.parts import Part
from moesaic.parallel.tensor.kernels import TensorParallelKernels
from moesaic.parallel.tensor.partition import shard_model
from moesaic.train.objectives.next_token import NextToken
from tests.parallel.ranks import on_ranks

VOCAB, HIDDEN = 53, 24
MIXTURE = Experts(count=8, per_token=2, hidden=12, shared_hidden=8, score="sigmoid", correction=True, scale=1.5)

# GLM-4.5: biased and normed queries and keys, half of a head turns, a dense first layer, a shared expert, MTP.
GLM = ModelConfig(
    "moesaic",
    VOCAB,
    HIDDEN,
    GroupedQuery(8, 2, 6, qkv_bias=True, qk_norm=True),
    Rope(4),
    (Layer(Dense(20)), Layer(MIXTURE), Layer(MIXTURE)),
    mtp=(Layer(MIXTURE),),
)
# DeepSeek-V3: latent attention, neighbours turn, groups of experts.
LATENT = Latent(4, kv_rank=10, plain_size=6, rope_size=4, value_size=8, q_rank=14)
DEEPSEEK = ModelConfig(
    "moesaic",
    VOCAB,
    HIDDEN,
    LATENT,
    Rope(4, interleaved=True),
    (Layer(Dense(20)), Layer(replace(MIXTURE, groups=4, top_groups=2))),
    mtp=(Layer(MIXTURE),),
)
# Qwen3-MoE: normed queries and keys, no shared expert.
QWEN = ModelConfig(
    "moesaic",
    VOCAB,
    HIDDEN,
    GroupedQuery(4, 4, 6, qk_norm=True),
    Rope(6),
    (Layer(Experts(count=8, per_token=3, hidden=12)),) * 2,
)
CONFIGS = {
    "GLM-4.5": GLM,
    "DeepSeek-V3": DEEPSEEK,
    "Qwen3-MoE": QWEN,
    # What no published model has together: every bias, post norms, a window, a residual expert, tied embeddings.
    "everything": replace(
        GLM,
        attention=GroupedQuery(4, 1, 6, qkv_bias=True, out_bias=True),
        layers=(Layer(Dense(12, bias=True), window=3), Layer(replace(MIXTURE, residual=True))),
        mtp=(),
        post_norms=True,
        tied=True,
    ),
    "latent without query latent": replace(DEEPSEEK, attention=replace(LATENT, q_rank=None, bias=True), mtp=()),
    "sparse": replace(
        DEEPSEEK,
        attention=replace(LATENT, indexer=Indexer(2, 6, topk=4)),
        layers=(Layer(Dense(20), index="full"), Layer(MIXTURE, index="shared")),
        mtp=(),
    ),
}
SHAPES = ("GLM-4.5", "DeepSeek-V3", "Qwen3-MoE")
LENGTHS = [7, 1, 12, 3]  # 23: neither two ranks nor four divide it


def model_of(config: ModelConfig) -> Model:
    model = Model(config).initialize(5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something, matrices that matter
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.15 if parameter.dim() > 1 else 0.3))
        for name, buffer in model.named_buffers():
            if name.endswith("correction"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.05)
    return model


def batch_of(lengths: list[int]) -> Batch:
    tokens_T = torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(8))
    targets_T = torch.cat(
        [torch.cat([piece[1:], torch.tensor([-100])]) if len(piece) else piece for piece in tokens_T.split(lengths)]
    )
    return Batch(tokens_T, targets_T, lengths, [0] * len(lengths), max(1, int((targets_T >= 0).sum())))


@dataclass
class Outcome:
    loss: Tensor
    hidden: list[Tensor]  # after each layer's norm of it, or the model's
    gradients: dict[str, Tensor]


def run(model: Model, batch: Batch, runner: LayerRunner = run_plainly) -> Outcome:
    hidden: list[Tensor] = []
    watched = [*model.layers, *model.mtp]
    handles = [part.register_forward_hook(lambda _, __, out: hidden.append(out.detach())) for part in watched]
    model.zero_grad()
    loss = NextToken()(model, batch, Routing(), runner).total
    for handle in handles:
        handle.remove()
    loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return Outcome(loss.detach(), hidden, gradients)


def own_experts(model: Model, rank: int, ranks: int) -> None:
    for module in list(model.modules()):
        if isinstance(module, MixtureFeedForward):
            for name in ("gate_up_EGD", "down_EDF"):
                setattr(module, name, nn.Parameter(getattr(module, name).detach().chunk(ranks)[rank].clone()))


def divided(whole: Model, rank: int, ranks: int, experts: bool, **options: Any) -> tuple[Model, dict[str, Part | None]]:
    """All ranks are tensor-parallel, and divide experts among them too or hold them all."""
    model = copy.deepcopy(whole)
    parts = shard_model(model, rank, ranks)
    ops: Any = TensorParallelKernels(model.ops, None, model.config, **options)
    if experts:
        own_experts(model, rank, ranks)
        ops = ExpertParallelKernels(ops, Exchange(), chunks=2)
    model.ops = ops
    return model, parts


def near(found: Tensor, expected: Tensor, what: str, noise: float = 0.0) -> None:
    """1e-5 of the largest: numbers of a gradient that are nearly zero are sums of some that are not. Beside it `noise`,
    which float32 has wherever such sums cancel."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5 * scale + noise, msg=lambda text: f"{what}: {text}"
    )


def compare(
    found: Outcome,
    expected: Outcome,
    parts: dict[str, Part | None],
    rows_N: Tensor,
    beside: dist.ProcessGroup | None = None,
) -> None:
    """A divided run beside a whole one: own rows of hidden states, the sum of losses, own parts of gradients. `beside`:
    ranks that hold the same parts for other rows."""
    for number, (own, whole) in enumerate(zip(found.hidden, expected.hidden, strict=True)):
        near(own, whole[rows_N], f"hidden states {number}")
    loss = found.loss.clone()
    dist.all_reduce(loss)
    near(loss, expected.loss, "loss")
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, whole in expected.gradients.items():
        gradient, part = found.gradients[name].clone(), parts[name]
        if part is not None:
            whole = part.take(whole)
            if beside is not None:
                dist.all_reduce(gradient, group=beside)
        elif gradient.shape == whole.shape:
            dist.all_reduce(gradient)
        else:  # own experts
            whole = whole.chunk(dist.get_world_size())[dist.get_rank()]
        near(gradient, whole, name, noise)


def same_copies(found: Outcome, parts: dict[str, Part | None]) -> int:
    """Key/value heads that several ranks hold got the same gradient to the bit; how many rows that were."""
    rows = 0
    for name, part in parts.items():
        if part is None or max(part.copies) == 1:
            continue
        own = found.gradients[name][part.lengths[0] :].contiguous()
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        first = dist.get_rank() - part.copy
        assert all(torch.equal(own, everyone[first + copy]) for copy in range(part.copies[1])), name
        rows += len(own)
    return rows


def rows_of(total: int, rank: int, ranks: int) -> Tensor:
    return torch.arange(total)[total * rank // ranks : total * (rank + 1) // ranks]


def every_model(rank: int, world: int) -> None:
    for name, config in CONFIGS.items():
        whole = model_of(config)
        for lengths in (LENGTHS, [3]) if name in SHAPES[:2] else (LENGTHS,):
            batch = batch_of(lengths)
            expected = run(whole, batch)
            for experts in (False, True) if len(lengths) > 1 and name in SHAPES else (True,):
                model, parts = divided(whole, rank, world, experts)
                found = run(model, batch)
                try:
                    compare(found, expected, parts, rows_of(sum(lengths), rank, world))
                    assert (same_copies(found, parts) > 0) == (name == "everything" or (name, world) == ("GLM-4.5", 4))
                except AssertionError as error:
                    raise AssertionError(f"{name}, {lengths}, experts divided: {experts}, rank {rank}") from error


@pytest.mark.parametrize("world", [2, 4])
def test_models_on_ranks(world: int, tmp_path: Path) -> None:
    on_ranks(world, every_model, tmp_path)
