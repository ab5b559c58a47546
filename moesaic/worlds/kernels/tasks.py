"""Operations to write kernels for: what they are in PyTorch, and inputs of random shapes.

Of MSKernelBench's kinds: algebra (`matmul`, `row_sum`), kernels of language models (`swiglu`, `softmax`, `rms_norm`,
`layer_norm`, `attention`), sparse matrices (`sparse_matvec`) and scientific computing (`heat_step`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.worlds.kernels.inputs import Spec


@dataclass(frozen=True)
class KernelTask:
    name: str
    signature: str
    meaning: str
    reference: Callable[..., Tensor]
    arguments: Callable[[random.Random, bool], list[Spec]]  # of a small trial, or of one that is timed
    traffic: float = 1.2  # times the bytes of arguments and result that a good kernel moves, in a small trial


def _two(draw: random.Random, large: bool) -> tuple[int, int]:
    return (4096, 4096) if large else (draw.randint(3, 9), draw.randint(17, 90))


def _rows(draw: random.Random, large: bool) -> list[Spec]:
    return [{"normal": _two(draw, large)}]


def _swiglu(draw: random.Random, large: bool) -> list[Spec]:
    shape = _two(draw, large)
    return [{"normal": shape}, {"normal": shape}]


def _norm(weights: int) -> Callable[[random.Random, bool], list[Spec]]:
    def arguments(draw: random.Random, large: bool) -> list[Spec]:
        rows, width = _two(draw, large)
        return [{"normal": (rows, width)}, *({"normal": (width,)} for _ in range(weights)), {"value": 1e-5}]

    return arguments


def _matmul(draw: random.Random, large: bool) -> list[Spec]:
    m, n, k = (2048, 2048, 2048) if large else (draw.randint(17, 40), draw.randint(17, 40), draw.randint(17, 70))
    return [{"normal": (m, k)}, {"normal": (k, n)}]


def _attention(draw: random.Random, large: bool) -> list[Spec]:
    heads, length, width = (16, 2048, 64) if large else (2, draw.randint(17, 40), 16)
    return [{"normal": (heads, length, width)} for _ in range(3)]


def _sparse(draw: random.Random, large: bool) -> list[Spec]:
    rows, columns, most = (65536, 65536, 32) if large else (draw.randint(5, 12), draw.randint(10, 30), 5)
    total = rows * most
    return [
        {"offsets": rows, "most": most, "total": total},
        {"below": columns, "shape": (total,)},
        {"normal": (total,)},
        {"normal": (columns,)},
    ]


def _heat(draw: random.Random, large: bool) -> list[Spec]:
    shape = _two(draw, large)
    return [{"normal": (max(shape[0], 4), shape[1])}, {"value": 0.1}]


def _sparse_matvec(offsets: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=x.device), offsets.diff().long())
    return torch.zeros(len(offsets) - 1, device=x.device).index_add_(0, rows, values * x[columns.long()])


def _heat_step(u: Tensor, rate: float) -> Tensor:
    new = u.clone()
    middle = u[1:-1, 1:-1]
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    new[1:-1, 1:-1] = middle + rate * (around - 4 * middle)
    return new


TASKS = {
    task.name: task
    for task in (
        KernelTask(
            "swiglu", "swiglu(gate, up)", "silu(gate) * up, for two matrices of equal shape",
            lambda gate, up: F.silu(gate) * up, _swiglu,
        ),
        KernelTask("row_sum", "row_sum(x)", "the sum of every row of a matrix", lambda x: x.sum(-1), _rows),
        KernelTask("softmax", "softmax(x)", "the softmax of every row of a matrix", lambda x: x.softmax(-1), _rows),
        KernelTask(
            "rms_norm", "rms_norm(x, weight, eps)", "x / sqrt(mean of squares of its row + eps) * weight",
            lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps), _norm(1), 1.6,
        ),
        KernelTask(
            "layer_norm", "layer_norm(x, weight, bias, eps)",
            "(x - mean of its row) / sqrt(variance of its row + eps) * weight + bias",
            lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps), _norm(2), 2.0,
        ),
        KernelTask("matmul", "matmul(a, b)", "the matrix product of a (m, k) and b (k, n)", torch.matmul, _matmul, 2.0),
        KernelTask(
            "attention", "attention(q, k, v)",
            "softmax(q @ k.T / sqrt(width)) @ v with a causal mask, for q, k, v of shape (heads, length, width)",
            lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0],
            _attention, 2.0,
        ),
        KernelTask(
            "sparse_matvec", "sparse_matvec(offsets, columns, values, x)",
            "a sparse matrix times x; row r is values[i] in columns[i] for i from offsets[r] to below offsets[r + 1]",
            _sparse_matvec, _sparse, 1.5,
        ),
        KernelTask(
            "heat_step", "heat_step(u, rate)",
            "u + rate * (the sum of the four neighbours - 4 * u) inside a matrix; its border as it is",
            _heat_step, _heat, 3.0,
        ),
    )
}  # fmt: skip
