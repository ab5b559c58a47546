"""The training kernels on a real GPU: the loss with its gradient, and AdamW, against the library.

pytest tests/gpu/test_gpu_training.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

from moesaic.kernels.cross_entropy import IGNORED, linear_cross_entropy
from moesaic.kernels.triton.adamw import adamw
from moesaic.recipe import load_recipe
from moesaic.train.pretrain import pretrain
from moesaic.train.report.metrics import read_metrics

DEVICE = "cuda"


@pytest.mark.parametrize("vocab", [500, 32000, 151_552])
def test_linear_cross_entropy(vocab):
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device=DEVICE).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, 256, device=DEVICE) / 16).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocab, (300,), device=DEVICE)
    targets[5] = IGNORED
    scale = torch.rand(300, device=DEVICE)
    total, losses = linear_cross_entropy(hidden, weight, targets, scale, rows=128)
    total.backward()
    wide_hidden, wide_weight = (tensor.detach().float().requires_grad_() for tensor in (hidden, weight))
    wanted = torch.nn.functional.cross_entropy(
        wide_hidden @ wide_weight.T, targets, ignore_index=IGNORED, reduction="none"
    )
    (wanted * scale).sum().backward()
    assert losses[5] == 0
    assert (losses - wanted).abs().max() < 0.03
    for given, true in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        assert ((given.float() - true).norm() / true.norm()).item() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_adamw_equals_the_library(dtype):
    torch.manual_seed(1)
    start = [torch.randn(shape, device=DEVICE).to(dtype) for shape in ((5000,), (300, 77), ())]
    library = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = torch.optim.AdamW(library, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ours = [tensor.clone() for tensor in start]
    averages, squares = [[torch.zeros_like(tensor) for tensor in start] for _ in range(2)]
    steps = [torch.zeros((), device=DEVICE) for _ in start]
    for _ in range(5):
        gradients = [torch.randn_like(tensor) for tensor in start]
        for tensor, gradient in zip(library, gradients, strict=True):
            tensor.grad = gradient
        optimizer.step()
        adamw(
            ours, gradients, averages, squares, steps, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1
        )  # fmt: skip
    for tensor, other in zip(ours, library, strict=True):
        apart = (tensor.float() - other.detach().float()).abs().max()
        assert apart < (1e-5 if dtype == torch.float32 else 0.02), apart


def test_a_recipe_compiles_its_blocks_and_learns_the_same(tmp_path, monkeypatch):
    """The loss of every step with blocks as they are, and compiled: within the noise of bfloat16."""
    losses = {}
    for name in ("compiled", "plain"):
        made = []
        if name == "plain":
            monkeypatch.setattr("moesaic.train.run.compile_blocks", made.append)
        source = "data.sources=[{name: code, path: 'builtin:stdlib', documents: 100, weight: 1.0}]"
        given = [f"train.data={tmp_path / 'compiled' / 'data'}"] if name == "plain" else []
        recipe = load_recipe("recipes/tiny.yaml", ["train.steps=30", "train.batch_tokens=4096", source, *given])
        pretrain(recipe, tmp_path / name, quiet=True)
        losses[name] = torch.tensor([line["loss"] for line in read_metrics(tmp_path / name)])
        assert len(made) == (name == "plain"), "a run on a GPU compiles its blocks"
    assert losses["compiled"][-1] < losses["compiled"][0] - 1.0
    assert (losses["compiled"] - losses["plain"]).abs().max() < 0.05
