"""The serving kernels in Triton's interpreter, in float32, against the plain meaning of each.

pytest tests/kernels/test_triton_serving.py
"""

import gc
import weakref
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels import reference
from moesaic.kernels.cuda import invariant as cuda_invariant
from moesaic.kernels.cuda.fast import eager_router_logits
from moesaic.kernels.cuda.layout_rows import make_rows
from moesaic.kernels.interface import AttentionCall, LatentCall, Mask, QKNorm, RopeAngles, Routes
from moesaic.kernels.triton import gated, norm
from moesaic.kernels.triton.attention import expanded, paged
from moesaic.kernels.triton.attention.paged_rows import prefill_tile
from moesaic.kernels.triton.attention.qk_norm_rope import qk_norm_rope
from moesaic.kernels.triton.attention.qk_norm_rope_cache import qk_norm_rope_into_cache
from moesaic.kernels.triton.experts import biases
from moesaic.kernels.triton.experts.router import TopK, route
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.sample import logprobs_of, sample
from moesaic.model.config import Experts
from moesaic.model.experts import weighed_biases
from moesaic.model.layout import Layout, PagedCache
from moesaic.model.router import Router
from tests.kernels import interpreter

interpreter.require()


def close(given, wanted):
    torch.testing.assert_close(given, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("T", "inputs", "outputs"), [(1, 48, 40), (5, 70, 33), (20, 64, 96)])
def test_linear(T, inputs, outputs):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(T, inputs), torch.randn(outputs, inputs) / 8, torch.randn(outputs)
    close(linear(x, weight), x @ weight.T)
    close(linear(x, weight, bias), x @ weight.T + bias)


def test_rms_norm():
    x, weight = torch.randn(3, 5, 24), torch.randn(24)
    close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    more = torch.randn(3, 5, 24)
    both, normed = norm.add_and_norm(x, more, weight, 1e-6)
    close(both, x + more), close(normed, reference.rms_norm(x + more, weight, 1e-6))
    both, normed = norm.add_and_norm(x, more, weight, 1e-6, 2 * x)
    close(both, 3 * x + more), close(normed, reference.rms_norm(3 * x + more, weight, 1e-6))


def test_gated():
    gate_up = torch.randn(3, 2 * 1030)
    close(gated.gated(gate_up), reference.gated(gate_up, "silu"))


def batch(lengths, cached, N, C, page_size=4, trees=None, positions=None):
    """A layout over a cache whose pages lie in no order, filled with what was cached."""
    torch.manual_seed(1)
    counts = [-(-(new + old) // page_size) for new, old in zip(lengths, cached, strict=True)]
    cache = PagedCache([{"keys": (N, C), "values": (N, C)}], sum(counts) + 3, page_size, torch.float32)
    order = torch.randperm(sum(counts) + 3).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    for slab in cache.layers[0].values():
        slab.normal_()
    return Layout(lengths, cached=cached, cache=cache, pages=pages, trees=trees, positions=positions)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 2, 10)])
def test_paged_attention(heads, window, sinks, monkeypatch):
    monkeypatch.setattr(paged, "SPLIT", 32)
    monkeypatch.setattr(paged, "BLOCK", 16)
    H, N, C = heads
    layout = batch([1, 3, 11, 1, 40], [0, 45, 30, 70, 0], N, C)
    q, k, v = torch.randn(56, H, C), torch.randn(56, N, C), torch.randn(56, N, C)
    slabs = layout.cache.layers[0]
    sinks_H = 3 * torch.randn(H) if sinks else None
    wanted = reference.attend(q, k, v, AttentionCall(layout, slabs, 0.3, window, sinks_H=sinks_H))
    rows = make_rows(layout, prefill_tile(H // N, wide=True))
    assert rows.decode_X2 is not None and rows.prefill_X2 is not None
    sums = torch.empty(H, 56)
    close(paged.attend(q, slabs["keys"], slabs["values"], rows, 0.3, window, sinks_H=sinks_H, sums_HT=sums), wanted)
    for span in layout.spans:
        keys_HMC = layout.read(slabs["keys"], span).repeat_interleave(H // N, 1).transpose(0, 1)
        scores_HTM = 0.3 * q[span.start : span.stop].transpose(0, 1) @ keys_HMC.mT
        back_TM = torch.arange(span.cached, span.total)[:, None] - torch.arange(span.total)
        seen_TM = (back_TM >= 0) & (back_TM < (window or span.total))
        sum_HT = scores_HTM.masked_fill(~seen_TM, float("-inf")).logsumexp(2)
        close(sums[:, span.start : span.stop], sum_HT if sinks_H is None else sum_HT.logaddexp(sinks_H[:, None]))


def test_attention_to_expanded_latents():
    """Two sequences in one round, one of them with cached tokens before its rows; tiles of another round, and those of
    no rows, are left alone."""
    torch.manual_seed(2)
    H, K, P, R, V = 3, 20, 12, 8, 10
    latents, table_SP = torch.randn(40, 4, K + R), torch.randperm(40)[:36].view(2, 18).int()
    sequence_X = torch.tensor([0] * 70 + [1] * 45 + [0] * 3).int()
    position_X = torch.cat([torch.arange(70), torch.arange(45), torch.full((3,), -1)]).int()
    latent_XK, key_XR = expanded.gather(latents, sequence_X, position_X, table_SP, K, torch.float32)
    assert not latent_XK[115:].any() and not key_XR[115:].any()
    page_X, row_X = table_SP[sequence_X[:115].long(), position_X[:115].long() // 4].long(), position_X[:115].long() % 4
    assert torch.equal(torch.cat([latent_XK, key_XR], 1)[:115], latents[page_X, row_X])
    kv_XE = latent_XK @ torch.randn(H * (P + V), K).T
    q_THC, q_THX = torch.randn(95, H, P + R), torch.randn(95, H, K + R)
    position_T = torch.cat([torch.arange(70), torch.arange(20, 45)]).int()
    tiles = torch.tensor([(0, 32, 0, 1), (32, 32, 0, 1), (64, 6, 0, 1), (70, 25, 70, 1), (0, 9, 0, 0), (0, 0, 0, 1)])
    out_THV = torch.full((96, H, V), -7.0)
    expanded.attend_expanded(q_THC, q_THX, kv_XE, key_XR, position_T, tiles.int(), out_THV, 0.3, round=1)
    assert bool((out_THV[95] == -7).all())
    kv_XHE = kv_XE.view(-1, H, P + V)
    k_XHC = torch.cat([kv_XHE[..., :P], key_XR[:, None].expand(-1, H, -1)], 2)
    q_THC = torch.cat([q_THC[..., :P], q_THX[..., K:]], 2)
    for rows, keys in ((slice(0, 70), slice(0, 70)), (slice(70, 95), slice(70, 115))):
        wanted = reference.attention(q_THC[rows], k_XHC[keys], kv_XHE[keys, :, P:], Mask(0.3))
        close(out_THV[rows], wanted)


def test_a_tree_of_draft_tokens():
    tree_TT = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    positions = torch.tensor([20, 21, 21, 22, 5])
    layout = batch([4, 1], [20, 5], 2, 16, trees=[tree_TT, None], positions=positions)
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    slabs = layout.cache.layers[0]
    wanted = reference.attend(q, k, v, AttentionCall(layout, slabs, 0.25))
    rows = make_rows(layout, prefill_tile(2, wide=True))
    close(paged.attend(q, slabs["keys"], slabs["values"], rows, 0.25), wanted)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rope_size", [16, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_heads(interleaved, rope_size, normed):
    H, N, C, eps = 4, 2, 16, 1e-6
    layout = batch([2, 1], [3, 9], N, C)
    slabs = layout.cache.layers[0]
    qkv, q_norm, k_norm = torch.randn(3, (H + 2 * N) * C), torch.randn(C), torch.randn(C)
    angle_PR = torch.randn(32, rope_size // 2)
    q, k, v = qkv.view(3, -1, C).split([H, N, N], dim=1)
    if normed:
        q, k = reference.rms_norm(q, q_norm, eps), reference.rms_norm(k, k_norm, eps)
    angles = angle_PR[layout.positions_T]
    rope = RopeAngles(angles.cos(), angles.sin(), interleaved)
    q, k = reference.rotate(q, rope), reference.rotate(k, rope)
    wanted = {name: slab.clone() for name, slab in slabs.items()}
    layout.write(wanted["keys"], k), layout.write(wanted["values"], v)
    table, rows = RopeAngles(angle_PR.cos(), angle_PR.sin(), interleaved), make_rows(layout, prefill_tile(2, True))
    qk_norm = QKNorm(q_norm, k_norm, eps) if normed else None
    given = qk_norm_rope_into_cache(qkv, qk_norm, table, layout.positions_T, rows, slabs, H, N)
    close(given, q), close(slabs["keys"], wanted["keys"]), close(slabs["values"], wanted["values"])


@pytest.mark.parametrize("score, biased", [("softmax", False), ("softmax", True), ("sigmoid", False)])
@pytest.mark.parametrize("tokens", [1, 19])
def test_router(score, biased, tokens):
    torch.manual_seed(2)
    shape = Experts(6, 3, 8, score=score, scale=1.5, correction=score == "sigmoid", bias=biased)
    router = Router(40, shape, 0)
    torch.nn.init.normal_(router.weight)
    if router.correction is not None:
        router.correction.normal_()
    bias_E = None
    if router.bias is not None:
        bias_E = torch.nn.init.normal_(router.bias, std=5.0).detach()
    x = torch.randn(tokens, 40)
    wanted_routes, wanted_weights = router(x)
    rules = (3, score == "sigmoid", True, 1.5)
    routes, weights = route(x, router.weight.detach(), router.correction, TopK(*rules), bias_E)
    assert torch.equal(routes.long(), wanted_routes)
    close(weights, wanted_weights.detach())
    # Rows that are no tokens choose nobody and count nowhere.
    places, chosen = torch.arange(tokens, dtype=torch.int32), torch.empty(tokens, 3, dtype=torch.int32)
    places[-1] = 3 if tokens == 1 else -1
    counts = torch.zeros(6, dtype=torch.int64)
    route(x, router.weight.detach(), router.correction, TopK(*rules, 1, 1, places, chosen, counts), bias_E)
    real = places >= 0
    assert torch.equal(chosen[real].long(), wanted_routes[real]) and bool((chosen[~real] == -1).all())
    assert torch.equal(counts, torch.bincount(wanted_routes[real].flatten(), minlength=6))


def test_biases_of_experts_have_the_bits_of_the_librarys_sums():
    routes, weights, bias = torch.tensor([[3, 0, 1], [2, 2, 0]]), torch.rand(2, 3), torch.randn(4, 40)
    wanted = weighed_biases(Routes(routes, weights), bias)
    given = biases.weighed_biases(routes.int(), weights, bias)
    assert torch.equal(given, wanted)


@pytest.mark.parametrize("groups, top_groups", [(8, 3), (4, 1), (2, 2)])
def test_router_with_groups(groups, top_groups):
    torch.manual_seed(4)
    shape = Experts(
        32, 4, 8, score="sigmoid", scale=1.5, correction=True, groups=groups, top_groups=top_groups
    )  # fmt: skip
    router = Router(40, shape, 0)
    torch.nn.init.normal_(router.weight)
    router.correction.normal_()
    x = torch.randn(25, 40)
    wanted_routes, wanted_weights = router(x)
    choice = TopK(4, True, True, 1.5, groups, top_groups)
    routes, weights = route(x, router.weight.detach(), router.correction, choice)
    assert torch.equal(routes.long(), wanted_routes)
    close(weights, wanted_weights.detach())


def test_sample():
    torch.manual_seed(3)
    logits = torch.randn(5, 1500) * 3
    hot = torch.tensor([0.0, 0.0, 0.7, 0.0, 1.0])
    draws = torch.tensor([0.0, 0.0, 0.37, 0.0, 0.91], dtype=torch.float64)
    slots, known = torch.tensor([2, -1, 0, 4, 1], dtype=torch.int32), torch.full((5,), -7, dtype=torch.int32)
    chosen, bits, drawn = sample(logits, hot, draws, slots, known)
    cold = [0, 1, 3]
    assert torch.equal(chosen[cold].long(), logits.argmax(-1)[cold])
    logprobs = logits.log_softmax(-1)
    close(bits.view(torch.float32), logprobs.gather(1, chosen.long()[:, None]).squeeze(1))
    warm = (logits / torch.where(hot > 0, hot, 1.0)[:, None]).log_softmax(-1)
    close(drawn.view(torch.float32), warm.gather(1, chosen.long()[:, None]).squeeze(1))
    for row, heat in ((2, 0.7), (4, 1.0)):  # asked about a token, the same bits as when it was chosen
        reported = logprobs_of(logits[row : row + 1], chosen[row : row + 1].long(), heat)
        assert torch.equal(reported, drawn.view(torch.float32)[row : row + 1])
    assert known.tolist() == [chosen[2], chosen[4], chosen[0], -7, chosen[3]]
    for row in (2, 4):  # the token in which the drawn share of the distribution falls, as numpy finds it
        below = (logits[row] / hot[row]).double().softmax(-1).numpy().cumsum()
        assert chosen[row] == below.searchsorted(draws[row].item(), side="right")
    ends = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    first, last = sample(logits[:2], torch.ones(2), ends, slots[:2], known)[0].tolist()
    assert first == 0 and last == 1499


def gradients(run, *inputs):
    """What `run` gives and what it passes back to its inputs, for some gradient of what it gave."""
    mine = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = run(*mine)
    outs = out if isinstance(out, tuple) else (out,)
    back = [torch.randn(one.shape, generator=torch.Generator().manual_seed(7)) for one in outs]
    return [*outs, *torch.autograd.grad(outs, mine, back)]


@pytest.mark.parametrize("window", [None, 7])
def test_learning_with_the_kernels_of_the_engine(window):
    """Every operation that has a gradient of its own, against the plain one."""
    torch.manual_seed(8)
    layout, rules = Layout([11, 1, 20, 3]), Experts(6, 3, 8, score="sigmoid", scale=1.5)
    x, weight, bias = torch.randn(35, 24), torch.randn(40, 24), torch.randn(40)
    q, k, v = torch.randn(35, 4, 16), torch.randn(35, 2, 16), torch.randn(35, 2, 16)
    qkv, q_norm, k_norm = torch.randn(35, 8, 16), torch.randn(16), torch.randn(16)
    angle = torch.randn(35, 8)
    cos, sin = angle.cos(), angle.sin()
    for run, inputs in (
        (lambda ops, *given: ops.linear(*given), (x, weight, bias)),
        (lambda ops, *given: ops.rms_norm(*given, 1e-6), (x, torch.randn(24))),
        (lambda ops, *given: ops.router_logits(*given), (x, weight)),
        (lambda ops, logits: ops.route(logits, None, rules).weights_TK, (torch.randn(35, 6),)),
        (lambda ops, *given: ops.attend(*given, AttentionCall(layout, None, 0.3, window)), (q, k, v)),
        (
            lambda ops, q, k, v, sinks_H: ops.attend(
                q, k, v, AttentionCall(layout, None, 0.3, window, sinks_H=sinks_H)
            ),
            (q, k, v, torch.randn(4)),
        ),
        (
            lambda ops, one, q_C, k_C: ops.qk_norm_rope(one, 2, QKNorm(q_C, k_C, 1e-6), RopeAngles(cos, sin, True)),
            (qkv, q_norm, k_norm),
        ),
        (lambda ops, one: ops.qk_norm_rope(one, 2, None, RopeAngles(cos, sin)), (qkv,)),
    ):
        given, wanted = (gradients(partial(run, ops), *inputs) for ops in (cuda_invariant, reference))
        for one, other in zip(given, wanted, strict=True):
            close(one, other)


def test_learning_with_the_engines_latent_attention():
    torch.manual_seed(10)
    layout, (H, P, V, K, R) = Layout([5, 1]), (6, 12, 10, 20, 4)
    angle = torch.randn(6, R)
    attention = AttentionCall(layout, None, 0.3)

    def call(*inputs):
        return LatentCall(*inputs[:3], 1e-6, inputs[3], None, P, RopeAngles(angle.cos(), angle.sin(), True), attention)

    def ours(*inputs):
        return cuda_invariant.attend_latent(call(*inputs))

    def plain(*inputs):
        q, k, v = cuda_invariant.expanded(call(*inputs), *inputs)
        return reference.attend(q, k, v, attention)

    inputs = (torch.randn(6, H, P + 2 * R), torch.randn(6, K + 2 * R), torch.randn(K), torch.randn(H * (P + V), K))
    for one, other in zip(gradients(ours, *inputs), gradients(plain, *inputs), strict=True):
        close(one, other)


def test_what_was_learned_from_is_given_back():
    """At once: weights whose own node held them would keep all of the forward before them until Python looks for
    cycles, which finds one layer at a time."""
    logits_TE = torch.randn(21, 6, requires_grad=True)
    weights_TK = cuda_invariant.route(logits_TE, None, Experts(6, 3, 8, score="sigmoid")).weights_TK
    weights_TK.square().sum().backward()
    assert logits_TE.grad is not None and logits_TE.grad.abs().sum() > 0
    left = weakref.ref(weights_TK)
    gc.disable()
    try:
        del weights_TK
        assert left() is None
    finally:
        gc.enable()


def test_router_logits_have_gradients():
    torch.manual_seed(11)
    inputs = (torch.randn(21, 24), torch.randn(6, 24))
    for one, other in zip(
        *(gradients(run, *inputs) for run in (eager_router_logits, reference.router_logits)), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rope_size", [16, 6])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_of_training(interleaved, rope_size, normed):
    torch.manual_seed(9)
    qkv, norms = torch.randn(35, 9, 16), [torch.randn(16), torch.randn(16)] if normed else []
    angle = torch.randn(35, rope_size // 2)
    rope = RopeAngles(angle.cos(), angle.sin(), interleaved)

    def run(ops, qkv, *norms):
        return ops(qkv, 2, QKNorm(*norms, 1e-6) if norms else None, rope)

    given, wanted = (gradients(partial(run, ops), qkv, *norms) for ops in (qk_norm_rope, reference.qk_norm_rope))
    for one, other in zip(given, wanted, strict=True):
        close(one, other)


def test_softmax_loss(monkeypatch):
    from moesaic.kernels.triton import softmax_loss as module

    monkeypatch.setattr(module, "BLOCK", 32)
    torch.manual_seed(5)
    logits, targets = torch.randn(4, 75) * 4, torch.tensor([3, 74, -100, 0])
    wanted = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    d_logits = logits.softmax(-1) - torch.nn.functional.one_hot(targets.clamp(min=0), 75)
    close(module.softmax_loss(logits, targets, -100, gradient=False), wanted)
    close(module.softmax_loss(logits, targets, -100, gradient=True), wanted)
    rows = [0, 1, 3]
    close(logits[rows], d_logits[rows])


def test_adamw_equals_the_library():
    from moesaic.kernels.triton.adamw import adamw

    torch.manual_seed(6)
    start = [torch.randn(37), torch.randn(3, 50)]
    library = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = torch.optim.AdamW(library, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours = [tensor.clone() for tensor in start]
    averages, squares = [[torch.zeros_like(tensor) for tensor in start] for _ in range(2)]
    steps = [torch.zeros(()) for _ in start]
    options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for number in range(4):
        gradients = [torch.randn_like(tensor) for tensor in start]
        for tensor, gradient in zip(library, gradients, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()
        doubled = [2 * gradient for gradient in gradients]
        skip = torch.tensor(float(number == 2))
        if number == 2:  # a step that is skipped leaves everything as it was
            adamw(ours, doubled, averages, squares, steps, **options, skip=skip)
            skip = torch.tensor(0.0)
        adamw(ours, doubled, averages, squares, steps, **options, divisor=torch.tensor(2.0), skip=skip)
    for tensor, other in zip(ours, library, strict=True):
        close(tensor, other.detach())
    assert [step.item() for step in steps] == [4, 4]
