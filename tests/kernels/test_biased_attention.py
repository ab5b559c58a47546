"""Pair-biased attention in blocks: that of the whole bias, in memory that does not grow with its square."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels import choose, cpu, reference
from moesaic.kernels.biased_attention import BlockBias, PairBiasedKernels, TensorBias, attend_biased
from moesaic.kernels.interface import AttentionCall
from moesaic.model.layout import Layout, PagedCache
from moesaic.model.transformer import Model
from moesaic.train.architecture import architecture
from tests.parallel.small_runs import recipe_of

LENGTHS = [37, 1, 20]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rows_of(heads: int, kv_heads: int) -> list[Tensor]:
    tokens = sum(LENGTHS)
    made = draw(tokens, heads, 8), draw(tokens, kv_heads, 8, seed=1), draw(tokens, kv_heads, 8, seed=2)
    return [tensor.requires_grad_() for tensor in made]


def pairs(sequence: int, rows: slice, keys: slice, a_TX: Tensor, b_TX: Tensor, table_HY: Tensor) -> Tensor:
    """Of two tokens' features and how far they are apart."""
    first = sum(LENGTHS[:sequence])
    apart_RM = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(keys.start, keys.stop)
    outer_RM = a_TX[first:][rows] @ b_TX[first:][keys].T
    return outer_RM + table_HY[:, apart_RM.clamp(-8, 8) + 8]


def factored(heads: int) -> list[Tensor]:
    made = draw(sum(LENGTHS), 3), draw(sum(LENGTHS), 3, seed=1), draw(heads, 17)
    return [tensor.requires_grad_() for tensor in made]


def gradients(attend: Callable[..., Tensor], given: list[Tensor], call: AttentionCall, inputs: list[Tensor]) -> Any:
    out_THC = attend(*given, call)
    return [out_THC.detach(), *torch.autograd.grad((out_THC * draw(*out_THC.shape)).sum(), [*given, *inputs])]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_blocks_are_dense_attention(causal: bool, window: int | None, heads: int, kv_heads: int) -> None:
    given, inputs, layout = rows_of(heads, kv_heads), factored(heads), Layout(LENGTHS)

    def call(size: int) -> AttentionCall:
        return AttentionCall(layout, None, 0.3, window, bias=BlockBias(pairs, inputs, causal=causal, size=size))

    dense = gradients(reference.attend, given, call(1), inputs)
    for size in (7, 16, 64):
        for found, wanted in zip(gradients(attend_biased, given, call(size), inputs), dense, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_a_whole_tensor_gets_its_gradient_in_blocks(shared: bool) -> None:
    given, layout = rows_of(4, 2), Layout(LENGTHS)
    whole = [draw(1 if shared else 4, length, length).requires_grad_() for length in LENGTHS]
    dense = gradients(reference.attend, given, AttentionCall(layout, None, 0.3, bias=TensorBias(whole)), whole)
    blocks = gradients(cpu.attend, given, AttentionCall(layout, None, 0.3, bias=TensorBias(whole, size=8)), whole)
    for found, wanted in zip(blocks, dense, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    # The same where somebody else keeps the gradient.
    kept = [torch.zeros_like(tensor) for tensor in whole]

    def receive(sequence: int, rows: slice, keys: slice, d_HRM: Tensor) -> None:
        kept[sequence][:, rows, keys] += d_HRM

    bias = TensorBias([tensor.detach() for tensor in whole], size=8, receive=receive)
    gradients(cpu.attend, given, AttentionCall(layout, None, 0.3, bias=bias), [])
    for found, wanted in zip(kept, dense[4:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["fast", "invariant", "reference"])
def test_every_kernel_takes_a_bias_and_a_cache(mode: Any) -> None:
    """A sequence in two steps, the second of which reads the first from the cache."""
    ops, bias = choose("cpu", mode), BlockBias(pairs, [t.detach() for t in factored(4)], size=8)
    q, k, v = (tensor.detach()[:37] for tensor in rows_of(4, 2))
    with torch.no_grad():
        whole = reference.attend(q, k, v, AttentionCall(Layout([37]), None, 0.3, 12, bias=bias))
        cache = PagedCache([{"keys": (2, 8), "values": (2, 8)}], pages=4, page_size=16, dtype=torch.float32)
        found = []
        for start, stop in ((0, 21), (21, 37)):
            layout = Layout([stop - start], cached=[start], cache=cache, pages=[[2, 0, 3]])
            call = AttentionCall(layout, cache.layers[0], 0.3, 12, bias=bias)
            found.append(ops.attend(q[start:stop], k[start:stop], v[start:stop], call))
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing_are_zero() -> None:
    def hidden(sequence: int, rows: slice, keys: slice) -> Tensor:
        row_R1, key_M = torch.arange(rows.start, rows.stop)[:, None], torch.arange(keys.start, keys.stop)
        return torch.where((row_R1 == 3) | (key_M > 10), float("-inf"), 0.0).expand(len(row_R1), len(key_M))

    given = [tensor.detach()[:37].requires_grad_() for tensor in rows_of(2, 2)]
    call = AttentionCall(Layout([37]), None, 0.3, bias=BlockBias(hidden, causal=False, size=8))
    out_THC, *grads = gradients(attend_biased, given, call, [])
    assert not out_THC[3].any() and out_THC[4].any()
    assert all(grad.isfinite().all() for grad in grads) and not grads[1][11:].any()


def test_a_whole_model_with_a_bias() -> None:
    model = Model(architecture(recipe_of("qwen").model, bos=None, eos=(), pad=None)).initialize(3)
    tokens_T, layout = torch.arange(sum(LENGTHS)) % 300, Layout(LENGTHS)
    nothing = PairBiasedKernels(model.ops, BlockBias(lambda n, rows, keys: torch.zeros(1, 1, 1), size=8))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_T, layout, ops=nothing), model(tokens_T, layout))  # type: ignore[arg-type]
    inputs = factored(model.config.attention.heads)
    some = PairBiasedKernels(model.ops, lambda layer: BlockBias(pairs, inputs, size=8) if layer == 1 else None)
    found = []
    for mode in ("fast", "reference"):
        model.mode = mode  # type: ignore[assignment]
        some.plain = model.ops
        hidden_TD = model(tokens_T, layout, ops=some)  # type: ignore[arg-type]
        found.append([hidden_TD.detach(), *torch.autograd.grad(hidden_TD.square().sum(), inputs)])
    for blocks, dense in zip(*found, strict=True):
        torch.testing.assert_close(blocks, dense, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0][0], model(tokens_T, layout).detach(), atol=1e-3)


def test_what_has_no_place() -> None:
    given, layout = rows_of(4, 4), Layout(LENGTHS)
    three = BlockBias(lambda n, rows, keys: torch.zeros(3, 1, 1))
    with pytest.raises(ValueError, match="a bias of 3 heads for attention with 4"):
        attend_biased(*given, AttentionCall(layout, None, 0.3, bias=three))
    with pytest.raises(UserError, match="latent attention takes no pair bias"):
        PairBiasedKernels(cpu, three).attend_latent(None)  # type: ignore[arg-type]


MEASURED = """
import json, resource, sys
import torch
from moesaic.kernels.biased_attention import BlockBias, attend_biased
from moesaic.kernels.interface import AttentionCall
from moesaic.model.layout import Layout

torch.set_num_threads(1)

def run(length):
    rows = [torch.randn(length, 4, 16, requires_grad=True) for _ in range(3)]
    parts = [torch.randn(length, 4, requires_grad=True) for _ in range(2)]
    bias = BlockBias(lambda n, rows, keys, a, b: a[rows] @ b[keys].T, parts, causal=False, size=256)
    attend_biased(*rows, AttentionCall(Layout([length]), None, 0.25, bias=bias)).sum().backward()
    assert parts[0].grad.any() or length == 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

print(json.dumps([run(length) for length in (256, 512, 4096)]))
"""


def test_memory_does_not_grow_with_the_square() -> None:
    """Forward and backward of 4,096 tokens; the bias of one head alone would be 64 MiB, and four heads' scores 256."""
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    _, short, long = json.loads(done.stdout)
    assert (long - short) / 1024 < 32, f"{(long - short) / 1024:.0f} MiB more"
