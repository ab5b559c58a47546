"""The Triton experts on a real GPU: correct, deterministic, and the same to the bit in any batch.

pytest tests/gpu
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.tuning import Choice, choose
from tests.gpu.models import error

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("exact_float32")
PORTABLE = Choice("portable", align=64, block=64)
DECODE = Choice("decode")


def problem(T, D, F, E, K, seed=0, dtype=torch.bfloat16, skew=False):
    torch.manual_seed(seed)
    scores_TE = torch.rand(T, E, device=DEVICE)
    if skew:
        scores_TE[:, E // 2] += 2.0
    routes_TK = scores_TE.topk(K, dim=-1).indices
    weights_TK = torch.rand(T, K, device=DEVICE) + 0.1
    return (
        torch.randn(T, D, device=DEVICE, dtype=dtype),
        routes_TK,
        weights_TK / weights_TK.sum(-1, keepdim=True),
        (torch.randn(E, 2 * F, D, device=DEVICE) / D**0.5).to(dtype),
        (torch.randn(E, D, F, device=DEVICE) / F**0.5).to(dtype),
    )


def meaning(x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF):
    """float32, one expert after the other."""
    x_TD, gate_up_EGD, down_EDF = x_TD.float(), gate_up_EGD.float(), down_EDF.float()
    F = down_EDF.shape[2]
    y_TD = torch.zeros_like(x_TD)
    for expert in range(down_EDF.shape[0]):
        token, choice = (routes_TK == expert).nonzero(as_tuple=True)
        both = x_TD[token] @ gate_up_EGD[expert].T
        hidden = torch.nn.functional.silu(both[:, :F]) * both[:, F:]
        y_TD = y_TD.index_add(0, token, weights_TK[token, choice, None] * (hidden @ down_EDF[expert].T))
    return y_TD


def poison(megabytes=3000):
    """Leave NaN in the memory the kernels will be given, so that an element nobody writes is seen."""
    page_pool = [
        torch.full((size << 19,), float("nan"), device=DEVICE, dtype=torch.bfloat16) for size in (megabytes, 64, 16, 4)
    ]
    small = [torch.full((4096,), -1, device=DEVICE, dtype=torch.int32) for _ in range(16)]
    del page_pool, small


SHAPES = {
    "qwen": (1024, 2048, 768, 128, 8),
    "glm": (777, 4096, 1408, 32, 8),
    "mixtral": (300, 1024, 3584, 8, 2),
    "one token": (1, 1024, 512, 64, 8),
    "seven tokens": (7, 512, 384, 64, 4),
    "256 experts": (513, 512, 256, 256, 8),
    "one expert": (200, 256, 128, 1, 1),
    "narrow": (129, 128, 128, 3, 2),
    "odd sizes": (65, 200, 72, 5, 3),
    "gpt-oss": (777, 2880, 2880, 8, 4),
    "cut tiles": (900, 320, 192, 8, 4),
    "cut rows": (600, 448, 1088, 4, 2),
    "cut columns": (500, 2112, 576, 4, 2),
    "many tokens": (20000, 256, 128, 16, 8),
}


@pytest.mark.parametrize("skew", [False, True], ids=["balanced", "skewed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forward(shape, skew):
    inputs = problem(*shape, seed=1, skew=skew)
    wanted = meaning(*inputs)
    poison()
    with torch.no_grad():
        assert error(experts(*inputs), wanted) < 8e-3


@pytest.mark.parametrize("choice", [PORTABLE, None], ids=["portable", "chosen"])
@pytest.mark.parametrize("skew", [False, True], ids=["balanced", "skewed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients(shape, skew, choice):
    if choice is PORTABLE and shape[0] * shape[1] > 1 << 20:
        pytest.skip("the portable path is tested on the smaller shapes")
    x, routes, weights, gate_up, down = problem(*shape, seed=2, skew=skew)
    grad = torch.randn_like(x)
    wanted_inputs = [tensor.float().requires_grad_() for tensor in (x, weights, gate_up, down)]
    wanted = torch.autograd.grad(meaning(wanted_inputs[0], routes, *wanted_inputs[1:]), wanted_inputs, grad.float())
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (x, weights, gate_up, down)]
    poison()
    y = experts(inputs[0], routes, *inputs[1:], choice=choice)
    poison()
    given = torch.autograd.grad(y, inputs, grad)
    for name, one, other in zip(("x", "weights", "gate_up", "down"), given, wanted, strict=True):
        assert one.dtype == dict(x=x, weights=weights, gate_up=gate_up, down=down)[name].dtype
        assert error(one, other) < 1.2e-2, name


@pytest.mark.parametrize(
    "shape",
    [SHAPES[name] for name in ("qwen", "glm", "mixtral", "odd sizes", "gpt-oss", "cut tiles")],
    ids=["qwen", "glm", "mixtral", "odd sizes", "gpt-oss", "cut tiles"],
)
def test_same_bits_alone_and_in_a_batch(shape):
    x, routes, weights, gate_up, down = problem(*shape, seed=3)
    with torch.no_grad():
        together = experts(x, routes, weights, gate_up, down)
        for part in (slice(0, 1), slice(5, 7), slice(3, 11), slice(0, 40), slice(17, shape[0] // 2)):
            alone = experts(x[part], routes[part], weights[part], gate_up, down)
            assert torch.equal(alone, together[part]), part
        backwards = experts(x.flip(0), routes.flip(0), weights.flip(0), gate_up, down).flip(0)
        assert torch.equal(backwards, together)
        streamed = [Choice("streamed", align) for align in (16, 32, 64)]
        for choice in (PORTABLE, Choice("portable", align=16, block=64), DECODE, *streamed):
            assert torch.equal(
                experts(x[:64], routes[:64], weights[:64], gate_up, down, choice=choice), together[:64]
            ), choice
    trained = experts(x.requires_grad_(), routes, weights, gate_up, down)
    assert torch.equal(trained.detach(), together), "training and serving differ"


def test_same_gradients_twice_and_in_any_company():
    x, routes, weights, gate_up, down = problem(*SHAPES["qwen"], seed=4)
    grad = torch.randn_like(x)

    def grads(rows):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (x[rows], weights[rows], gate_up, down)]
        return torch.autograd.grad(experts(inputs[0], routes[rows], *inputs[1:]), inputs, grad[rows])

    every = slice(0, 1024)
    first, again, some = grads(every), grads(every), grads(slice(100, 900))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert torch.equal(some[0], first[0][100:900]) and torch.equal(some[1], first[1][100:900])


def test_backward_can_run_twice():
    x, routes, weights, gate_up, down = problem(200, 256, 128, 8, 2, seed=5)
    x.requires_grad_()
    y = experts(x, routes, weights, gate_up, down)
    (first,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    (second,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(first, second)


@pytest.mark.parametrize("tokens", [1, 4, 24, 64, 512, 2000])
def test_in_a_cuda_graph(tokens):
    x, routes, weights, gate_up, down = problem(tokens, 2048, 768, 128, 8, seed=6)
    with torch.no_grad():
        experts(x, routes, weights, gate_up, down)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, routes, weights, gate_up, down)
        fresh = problem(tokens, 2048, 768, 128, 8, seed=7)
        x.copy_(fresh[0]), routes.copy_(fresh[1]), weights.copy_(fresh[2])
        graph.replay()
        assert torch.equal(y, experts(x, routes, weights, gate_up, down))


def test_float32_and_no_tokens():
    inputs = problem(70, 128, 128, 4, 2, dtype=torch.float32)
    with torch.no_grad():
        assert error(experts(*inputs), meaning(*inputs)) < 1e-5
        x, routes, weights, gate_up, down = inputs
        assert experts(x[:0], routes[:0], weights[:0], gate_up, down).shape == (0, 128)


def test_the_fast_path_is_taken():
    x, routes, weights, gate_up, _ = problem(256, 2048, 768, 8, 2)
    if torch.cuda.get_device_capability()[0] == 9:
        assert choose(x, routes, gate_up, training=True).path == "hopper"
        for width, path in ((2880, "hopper"), (320, "hopper"), (200, "portable")):
            x, routes, weights, gate_up, _ = problem(256, width, width, 8, 2)
            assert choose(x, routes, gate_up, training=True).path == path
