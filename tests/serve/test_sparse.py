"""2:4 weights for sparse tensor cores: which matrices go there, and that the numbers stay what they were.

pytest tests/serve/test_sparse.py; on a GPU tests/gpu/test_gpu_sparse_cores.py
"""

import pytest
import torch

from moesaic.errors import UserError
from moesaic.kernels.cuda.sparse_weight import SparseWeight, fits, is_two_of_four
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.sparse import install_sparse, matrices, to_sparse_cores
from moesaic.train.constraints.nm import largest


@pytest.fixture
def model():
    """A dense layer and a mixture with a shared expert, in bfloat16, two of four inputs everywhere."""
    config = ModelConfig(
        "glm4_moe", 96, 32, GroupedQuery(2, 1, 16, qkv_bias=True), rope=Rope(8),
        layers=(Layer(Dense(48)), Layer(Experts(4, 2, 16, shared_hidden=16))), init_std=0.2,
    )  # fmt: skip
    model = Model(config).initialize(0).to(torch.bfloat16).requires_grad_(False)
    for _, weight in matrices(model):
        weight.copy_(weight * largest(weight.abs(), 2, 4))
    return model


def test_two_of_four_is_seen():
    weight_OI = torch.tensor([[1.0, 0, 2, 0, 0, 0, 0, 3], [0, 0, 0, 0, 4, 5, 0, 0]])
    assert is_two_of_four(weight_OI)
    weight_OI[1, 6] = 1
    assert not is_two_of_four(weight_OI)
    assert not is_two_of_four(torch.zeros(4, 6)), "fours do not fill it"
    assert not fits(torch.zeros(16, 16)), "of 16 bits"
    assert not fits(torch.zeros(16, 24).bfloat16())
    assert fits(torch.zeros(32, 16).bfloat16())


def test_what_it_stands_for_and_what_it_gives():
    weight_OI = torch.randn(32, 16).bfloat16()
    weight_OI *= largest(weight_OI.abs(), 2, 4)
    sparse, bias_O = SparseWeight(weight_OI), torch.randn(32).bfloat16()
    assert torch.equal(sparse.dense(), weight_OI)
    for shape in ((1, 16), (5, 16), (2, 3, 16)):
        x_TI = torch.randn(shape).bfloat16()
        assert torch.equal(sparse.linear(x_TI, bias_O), torch.nn.functional.linear(x_TI, weight_OI, bias_O))
    with pytest.raises(AssertionError, match="more than two"):
        SparseWeight(torch.ones(16, 16).bfloat16())


def test_projections_go_there_and_text_stays(model):
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    before = [answer.tokens for answer in Engine(model).generate(prompts, max_tokens=6, temperature=0.0)]
    wanted = model.logits(prompts)
    assert not model.quantized
    assert install_sparse(model) == 8, "of attention, the dense layer and the shared expert"
    assert model.quantized
    assert isinstance(model.layers[1].ffn.gate_up_EGD, torch.nn.Parameter), "routed experts stay dense"
    assert isinstance(model.layers[1].ffn.router.weight, torch.nn.Parameter)
    for given, expected in zip(model.logits(prompts), wanted, strict=True):
        assert torch.allclose(given, expected, atol=0.02, rtol=0.02)
    after = [answer.tokens for answer in Engine(model).generate(prompts, max_tokens=6, temperature=0.0)]
    assert after == before


def test_what_is_not_two_of_four_stays(model):
    model.layers[0].ffn.down.weight.fill_(1.0)
    assert install_sparse(model) == 7
    assert isinstance(model.layers[0].ffn.down.weight, torch.nn.Parameter)


def test_a_cpu_is_refused(model):
    with pytest.raises(UserError, match="sparse tensor cores"):
        to_sparse_cores(model)
