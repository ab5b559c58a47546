"""The native CPU kernels against the reference, against float64, and against themselves in other company."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from moesaic.kernels import Kernels, choose, native, reference
from moesaic.kernels.interface import AttentionCall, Mask, QKNorm, RopeAngles, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.model.layout import Layout, PagedCache

OPS = native.kernels()


@pytest.fixture(autouse=True)
def no_gradients():
    assert OPS is not None, "these tests need a C compiler"
    with torch.inference_mode():
        yield


@pytest.fixture(params=[1, 2, 3], ids=lambda threads: f"{threads} threads")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(ours, expected, digits=2e-6):
    expected = expected.double()
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=digits * float(expected.abs().max()) + 1e-12)


SIZES = [(1, 1), (3, 5), (16, 16), (64, 48), (100, 33), (768, 20), (1030, 7)]


class TestLinear:
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    @pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 29, 197])
    def test_equals_float64(self, rows, sizes, threads):
        inputs, outputs = sizes
        x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
        close(OPS.linear(x, weight), F.linear(x.double(), weight.double()))
        close(OPS.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_a_row_has_the_same_bits_in_any_company(self, sizes, threads):
        inputs, outputs = sizes
        x, weight = random(240, inputs), random(outputs, inputs)
        whole = OPS.linear(x, weight)
        for start, count in [(0, 1), (5, 2), (239, 1), (7, 3), (8, 4), (3, 5), (10, 9), (1, 17), (90, 100), (7, 229)]:
            assert torch.equal(OPS.linear(x[start : start + count], weight), whole[start : start + count])

    def test_rows_that_lie_apart(self):
        x, weight = random(6, 40)[:, 4:28], random(9, 24)
        assert torch.equal(OPS.linear(x, weight), OPS.linear(x.contiguous(), weight))
        assert torch.equal(OPS.linear(random(24, 6).t(), weight), OPS.linear(random(24, 6).t().contiguous(), weight))

    def test_no_rows(self):
        assert OPS.linear(random(0, 8), random(4, 8)).shape == (0, 4)

    def test_gradients_go_through_the_library(self):
        with torch.inference_mode(False), torch.enable_grad():
            x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
            OPS.linear(x, weight).sum().backward()
            close(weight.grad, x.detach().sum(0).expand(4, 8))

    def test_other_formats_go_to_the_library(self):
        x, weight = random(3, 8).double(), random(4, 8).double()
        assert OPS.linear(x, weight).dtype == torch.float64


@pytest.mark.parametrize("size", [1, 6, 64, 100, 768])
def test_norm(size, threads):
    x, weight = random(37, size) * 3, random(size)
    y = OPS.rms_norm(x, weight, 1e-6)
    close(y, reference.rms_norm(x, weight, 1e-6))
    assert torch.equal(y[5:6], OPS.rms_norm(x[5:6], weight, 1e-6))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("turning", [6, 16, 10], ids=lambda turning: f"turning {turning}")
def test_heads(normed, interleaved, turning, threads):
    tokens, heads, kv_heads, size = 70, 6, 2, 16
    qkv = random(tokens, heads + 2 * kv_heads, size)
    angles = random(tokens, turning // 2)
    norm = QKNorm(random(size), random(size, seed=1), 1e-5) if normed else None
    arguments = (kv_heads, norm, RopeAngles(angles.cos(), angles.sin(), interleaved))
    ours, expected = OPS.qk_norm_rope(qkv, *arguments), reference.qk_norm_rope(qkv, *arguments)
    for mine, theirs in zip(ours, expected, strict=True):
        close(mine, theirs)
    third = RopeAngles(angles[3:4].cos(), angles[3:4].sin(), interleaved)
    alone = OPS.qk_norm_rope(qkv[3:4], kv_heads, norm, third)
    for mine, whole in zip(alone, ours, strict=True):
        assert torch.equal(mine, whole[3:4])


@pytest.mark.parametrize("size", [1, 7, 64, 330])
def test_gated(size, threads):
    gate_up = random(30, 2 * size) * 8
    y = OPS.gated(gate_up, "silu")
    close(y, reference.gated(gate_up, "silu"))
    assert torch.equal(y[4:5], OPS.gated(gate_up[4:5], "silu"))


def test_gated_at_the_ends_of_the_scale():
    gate_up = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30, float("inf")]] * 2).flatten()
    gate_up[10:] = 1.0
    close(OPS.gated(gate_up[None, :], "silu")[:, :9], reference.gated(gate_up[None, :], "silu")[:, :9])
    assert torch.isnan(OPS.gated(torch.tensor([[float("nan"), 1.0, 1.0, 1.0]]), "silu"))[0, 0]


RULES = [
    dict(score="softmax", normalize=True, scale=1.0, groups=1, top_groups=1),
    dict(score="softmax", normalize=False, scale=2.5, groups=1, top_groups=1),
    dict(score="sigmoid", normalize=True, scale=1.5, groups=1, top_groups=1),
    dict(score="sigmoid", normalize=True, scale=1.0, groups=4, top_groups=2),
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
def test_route(rules, corrected):
    rules = SimpleNamespace(per_token=3, **rules)
    logits, correction = random(50, 16) * 2, random(16) if corrected else None
    routes, weights = OPS.route(logits, correction, rules)
    expected_routes, expected = reference.route(logits, correction, rules)
    assert torch.equal(routes, expected_routes)
    close(weights, expected)
    alone = OPS.route(logits[7:8], correction, rules)
    assert torch.equal(alone[0], routes[7:8]) and torch.equal(alone[1], weights[7:8])
    given = torch.stack([torch.randperm(16)[:3] for _ in range(50)])
    replayed, weights = OPS.route(logits, correction, rules, given)
    assert torch.equal(replayed, given)
    close(weights, reference.route(logits, correction, rules, given)[1])


def test_equal_scores_go_to_the_earliest():
    rules = SimpleNamespace(per_token=2, score="softmax", normalize=True, scale=1.0, groups=1, top_groups=1)
    routes, weights = OPS.route(torch.zeros(3, 8), None, rules)
    assert routes.tolist() == [[0, 1]] * 3 and weights.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 41])
@pytest.mark.parametrize("sizes", [(24, 16), (22, 15), (96, 40)], ids=str)
@pytest.mark.parametrize("skew", [False, True], ids=["spread", "same experts"])
def test_experts(tokens, sizes, skew, threads):
    hidden, width = sizes
    x = random(tokens, hidden)
    gate_up, down = random(6, 2 * width, hidden), random(6, hidden, width)
    generator = torch.Generator().manual_seed(1)
    routes = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(tokens)])
    routes = torch.zeros_like(routes) + torch.tensor([4, 0, 2]) if skew else routes
    weights = torch.rand(tokens, 3, generator=generator)
    y = OPS.experts(x, Routes(routes, weights), ExpertWeights(gate_up, down, "silu"))
    wide = ExpertWeights(gate_up.double(), down.double(), "silu")
    close(y, reference.experts(x.double(), Routes(routes, weights.double()), wide), 4e-6)
    last = slice(tokens - 1, tokens)
    assert torch.equal(
        y[last], OPS.experts(x[last], Routes(routes[last], weights[last]), ExpertWeights(gate_up, down, "silu"))
    )
    # The order in which a token names its experts does not matter either.
    turned = OPS.experts(x, Routes(routes.flip(1), weights.flip(1)), ExpertWeights(gate_up, down, "silu"))
    assert torch.equal(turned, y)


def cache_for(lengths, kv_heads, size, page_size=4):
    """A cache whose unused rows are poison, and pages handed out back to front, so that none lie in order."""
    counts = [-(-length // page_size) for length in lengths]
    cache = PagedCache(
        [{"keys": (kv_heads, size), "values": (kv_heads, size)}], sum(counts) + 2, page_size, torch.float32
    )
    for slab in cache.layers[0].values():
        slab.fill_(float("nan"))
    free = iter(reversed(range(sum(counts) + 2)))
    return cache, [[next(free) for _ in range(count)] for count in counts]


def attended(ops, q, k, v, lengths, steps, window=None, page_size=4):
    """The result for whole sequences that came in `steps` (a list of new tokens per sequence for each forward)."""
    cache, pages = cache_for(lengths, k.shape[1], k.shape[2], page_size)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    out = torch.full_like(q, float("nan"))
    done = [0] * len(lengths)
    for new in steps:
        rows = torch.cat([torch.arange(s + d, s + d + n) for s, d, n in zip(starts, done, new)])
        layout = Layout(new, cached=list(done), cache=cache, pages=pages)
        out[rows] = ops.attend(q[rows], k[rows], v[rows], AttentionCall(layout, cache.layers[0], 0.2, window))
        done = [d + n for d, n in zip(done, new)]
    assert done == list(lengths)
    return out


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 70], ids=lambda window: f"window {window}")
@pytest.mark.parametrize("size", [3, 16, 44])
def test_attention_from_pages(heads, window, size, threads):
    count, kv_heads = heads
    lengths = [150, 1, 70, 9]
    q, k, v = (random(sum(lengths), n, size, seed=n) for n in (count, kv_heads, kv_heads))
    layout = Layout(lengths)
    wide = [tensor.double() for tensor in (q, k, v)]
    expected = reference.attend(*wide, AttentionCall(layout, None, 0.2, window))
    flat = OPS.attend(q, k, v, AttentionCall(layout, None, 0.2, window))
    close(flat, expected, 4e-6)
    assert torch.equal(attended(OPS, q, k, v, lengths, [lengths], window), flat)
    steps = [[100, 1, 3, 0], [1, 0, 5, 0], [0, 0, 60, 8], [48, 0, 1, 1], [1, 0, 1, 0]]
    assert torch.equal(attended(OPS, q, k, v, lengths, steps, window), flat)
    assert torch.equal(attended(OPS, q, k, v, lengths, steps, window, page_size=16), flat)


def test_attention_reads_values_that_lie_apart():
    qkv = random(20, 8, 16)
    q, k, v = qkv[:, :4].contiguous(), qkv[:, 4:6].contiguous(), qkv[:, 6:]
    layout = Layout([12, 8])
    assert torch.equal(
        OPS.attend(q, k, v, AttentionCall(layout, None, 0.25)),
        OPS.attend(q, k, v.contiguous(), AttentionCall(layout, None, 0.25)),
    )


@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_of_guesses(window):
    """Beside a sequence without one."""
    lengths, size = [30, 12], 16
    q, k, v = (random(10, n, size, seed=n) for n in (4, 2, 2))
    tree = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool
    )
    positions = torch.tensor([25, 26, 26, 27, 27, 7, 8, 9, 10, 11])
    out = {}
    for name, ops in (("ours", OPS), ("reference", reference)):
        cache, pages = cache_for(lengths, 2, size)
        layout = Layout([25, 7], cached=[0, 0], cache=cache, pages=pages)
        before = [random(32, n, size, seed=9 + n) for n in (4, 2, 2)]
        ops.attend(*before, AttentionCall(layout, cache.layers[0], 0.2, window))
        layout = Layout([5, 5], cached=[25, 7], cache=cache, pages=pages, trees=[tree, None], positions=positions)
        out[name] = ops.attend(q, k, v, AttentionCall(layout, cache.layers[0], 0.2, window))
    close(out["ours"], out["reference"])


@pytest.mark.parametrize("new", [1, 5, 33])
@pytest.mark.parametrize("kept", [False, True], ids=["all", "some kept"])
def test_attention_of_one_sequence(new, kept):
    """As latent attention uses it: values of another size than keys, and a choice of tokens."""
    q, k, v = random(new, 6, 24), random(40, 2, 24), random(40, 2, 16)
    keep = torch.rand(new, 40) < 0.5 if kept else None
    if keep is not None:
        keep[torch.arange(new), torch.arange(40 - new, 40)] = True
    mask = Mask(0.2, None, keep)
    close(OPS.attention(q, k, v, mask), reference.attention(q, k, v, mask))


def test_other_activations_go_to_the_library():
    x, gate_up, down = random(3, 8), random(2, 8, 8), random(2, 8, 4)
    routes, weights = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    expected = reference.experts(x, Routes(routes, weights), ExpertWeights(gate_up, down, "relu"))
    close(OPS.experts(x, Routes(routes, weights), ExpertWeights(gate_up, down, "relu")), expected)


@pytest.mark.parametrize("mode", ["reference", "fast", "invariant"])
def test_every_mode_offers_every_operation(mode):
    asked = {name for name, value in vars(Kernels).items() if callable(value) and not name.startswith("_")}
    assert asked and asked <= set(dir(choose("cpu", mode)))
