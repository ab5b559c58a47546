"""2:4 weights on the sparse tensor cores of a real GPU: near what they stand for, and whole models as graphs.

pytest tests/gpu/test_gpu_sparse_cores.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import moesaic
from moesaic.errors import UserError
from moesaic.kernels.cuda.sparse_weight import SparseWeight, has_sparse_cores
from moesaic.serve.core.engine import Engine
from moesaic.serve.gpu.overlap import OverlapLoop
from moesaic.serve.sparse import matrices, to_sparse_cores
from moesaic.train.constraints.nm import largest
from tests.gpu.models import error, tokens_of

if not has_sparse_cores(torch.device("cuda")):
    pytest.skip("no sparse tensor cores, or no cuSPARSELt", allow_module_level=True)


@pytest.mark.parametrize("outputs, inputs", [(1408, 4096), (5120, 2048), (48, 32)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_matmul(outputs, inputs, biased):
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs, device="cuda") * 0.02).bfloat16()
    weight *= largest(weight.abs(), 2, 4)
    sparse = SparseWeight(weight)
    bias = torch.randn(outputs, device="cuda").bfloat16() if biased else None
    assert torch.equal(sparse.dense(), weight)
    for rows in (1, 7, 8, 33, 300):
        x_TI = torch.randn(rows, inputs, device="cuda").bfloat16()
        wanted = torch.nn.functional.linear(x_TI.float(), weight.float(), None if bias is None else bias.float())
        assert error(sparse.linear(x_TI, bias), wanted) < 5e-3, rows


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe"])
def test_a_model_runs_as_graphs(directories, name):
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device="cuda")
    for _, weight in matrices(model):
        weight.data.copy_(weight * largest(weight.abs(), 2, 4))
    prompts = tokens_of(5, 100, 33)
    wanted = [found.float() for found in model.logprobs(prompts)]
    assert to_sparse_cores(model) > 0
    engine = Engine(model, cache_bytes=1 << 26)
    assert isinstance(engine.runner, OverlapLoop), "steps overlap"
    assert all(len(answer.tokens) == 8 for answer in engine.generate(prompts, max_tokens=8, temperature=0.0))
    for given, expected in zip(model.logprobs(prompts), wanted, strict=True):
        assert (given - expected).abs().mean() < 0.1
    with pytest.raises(UserError, match="no matrix of the model is 2:4"):
        to_sparse_cores(model)
