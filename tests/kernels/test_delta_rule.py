"""The gated delta rule token by token, in chunks and in native code: one result, which is `transformers`'."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from moesaic.kernels import cpu, native, reference
from moesaic.kernels.interface import DeltaCall
from moesaic.kernels.native.invariant import InvariantKernels
from moesaic.model.layout import Layout, PagedCache, SequenceStates

OPS = native.kernels()
WAYS: dict[str, Callable[[DeltaCall], Tensor]] = {"one by one": reference.delta_rule, "in chunks": cpu.delta_rule}
if OPS is not None:
    WAYS["native"] = OPS.delta_rule
Shape = tuple[int, int, int, int, int]  # key heads, heads, key size, value size, width
SHAPES: list[Shape] = [(2, 4, 6, 5, 4), (1, 1, 3, 40, 2), (3, 3, 16, 33, 3), (1, 2, 1, 1, 4)]


def drawn(lengths: list[int], shape: Shape, seed: int = 0, fading: float = 0.0) -> DeltaCall:
    key_heads, heads, key_size, value_size, width = shape
    generator = torch.Generator().manual_seed(seed)
    tokens, channels = sum(lengths), 2 * key_heads * key_size + heads * value_size

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    gates = random(tokens, 2 * heads).split(heads, dim=1)
    parameters = random(channels, width), random(heads) + fading, random(heads)
    return DeltaCall(random(tokens, channels), *gates, *parameters, key_heads, key_size, value_size, Layout(lengths))


def as_transformers(call: DeltaCall) -> Tensor:
    """Sequence by sequence, with the library's convolution and their recurrence."""
    heads, keys, width = call.decay_TH.shape[1], call.key_heads * call.key_size, call.taps_XW.shape[1]
    out = []
    for _, x_TX, strength_TH, decay_TH in call.layout.per_sequence(call.qkv_TX, call.strength_TH, call.decay_TH):
        padded_XT = F.pad(x_TX.T[None], (width - 1, 0))
        mixed_TX = F.silu(F.conv1d(padded_XT, call.taps_XW[:, None], groups=x_TX.shape[1]))[0].T
        q, k, v = mixed_TX.split([keys, keys, heads * call.value_size], dim=1)
        q, k = (
            x.unflatten(1, (call.key_heads, -1)).repeat_interleave(heads // call.key_heads, dim=1)[None] for x in (q, k)
        )
        g = -call.log_rate_H.exp() * F.softplus(decay_TH + call.shift_H)
        args = q, k, v.unflatten(1, (heads, -1))[None], g[None], strength_TH.sigmoid()[None]
        out.append(theirs.torch_recurrent_gated_delta_rule(*args, use_qk_l2norm_in_kernel=True)[0][0])
    return torch.cat(out)


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and torch.isfinite(found).all()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-5 * float(wanted.abs().max() + 1e-6))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 17, 63, 64, 65, 129]), min_size=1, max_size=3), st.sampled_from(SHAPES))
def test_all_ways_are_transformers(lengths: list[int], shape: Shape) -> None:
    call = drawn(lengths, shape, sum(lengths))
    wanted = as_transformers(call)
    with torch.no_grad():
        for way in WAYS.values():
            close(way(call), wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_steps_of_any_length_go_on_where_the_last_ended(way: str, shape: Shape) -> None:
    """Sequences of a batch in other orders each time, in places that held others before."""
    key_heads, heads, key_size, value_size, width = shape
    run, call = WAYS[way], drawn([70, 9], shape)
    channels = call.qkv_TX.shape[1]
    sizes = {"state": (heads, key_size, value_size), "before": (width - 1, channels)}
    cache = PagedCache([{}], 1, 1, torch.float32, "cpu", SequenceStates([sizes], 4))
    assert cache.states is not None
    for kept in cache.states.layers[0].values():
        kept.fill_(float("nan"))  # what lay there before
    rows = [call.qkv_TX, call.strength_TH, call.decay_TH]
    pieces: list[list[Tensor]] = [[], []]
    # Which sequences bring how many tokens: one alone, both side by side, one of which brings nothing, one by one.
    steps = [{0: 66}, {1: 2, 0: 1}, {0: 1, 1: 5}, {1: 0, 0: 2}, {1: 1}, {1: 1}]
    done = [0, 0]
    with torch.no_grad():
        for step in steps:
            starts = [(number, (0, 70)[number] + done[number], new) for number, new in step.items()]
            layout = Layout(
                list(step.values()),
                cached=[done[number] for number in step],
                cache=cache,
                pages=[[0] * 70] * len(step),
                states=[(3, 1)[number] for number in step],
            )
            given = [torch.cat([x_T[start : start + new] for _, start, new in starts]) for x_T in rows]
            out = run(call._replace(layout=layout, states=cache.states.layers[0], **dict(zip(call._fields, given))))
            for (number, _, new), piece in zip(starts, out.split(list(step.values())), strict=True):
                pieces[number].append(piece)
                done[number] += new
        whole = run(call)
    found = torch.cat([*pieces[0], *pieces[1]])
    close(found, whole)
    if way == "native":
        assert torch.equal(found, whole)


@pytest.mark.parametrize("fading", [0.0, 2.0], ids=["usual", "states that fade fast"])
def test_gradients_in_chunks_are_those_token_by_token(fading: float) -> None:
    call = drawn([65, 3], SHAPES[0], seed=4, fading=fading)
    grads = []
    for way in (reference.delta_rule, cpu.delta_rule, *([InvariantKernels(OPS).delta_rule] if OPS else [])):
        inputs = [tensor.clone().requires_grad_() for tensor in call[:6]]
        given = call._replace(**dict(zip(DeltaCall._fields, inputs)))
        (way(given).square() * torch.linspace(1, 2, len(call.qkv_TX))[:, None, None]).sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    for other in grads[1:]:
        for found, wanted in zip(other, grads[0], strict=True):
            # The decay's is the difference of sums over a chunk: where states fade it is far smaller than they.
            assert torch.isfinite(found).all() and (found - wanted).norm() < 1e-3 * wanted.norm()
