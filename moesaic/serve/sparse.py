"""Serve a model whose weights are 2:4 (`compress --method nm`, or trained under `constraint: {name: nm}`) on sparse
tensor cores, which skip the zeros.

    model = moesaic.load(path, dtype="bfloat16", device="cuda"); to_sparse_cores(model)

Projections of attention, dense feed-forward layers and shared experts go there. Routed experts stay dense: the library
multiplies by one matrix at a time, and a layer of experts is one kernel here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.cuda.sparse_weight import SparseWeight, fits, has_sparse_cores, is_two_of_four
from moesaic.model.directory import install
from moesaic.model.matrices import matrix_parameters
from moesaic.model.transformer import Model


@torch.no_grad()
def to_sparse_cores(model: Model) -> int:
    """How many matrices are there now; those that are not 2:4, or that the library does not take, are as before."""
    if not has_sparse_cores(model.device):
        raise UserError(
            "sparse", "needs a GPU with sparse tensor cores (Ampere or later) and cuSPARSELt", "Leave it out."
        )
    if model.mode == "invariant":
        raise UserError("sparse", "sparse tensor cores do not promise the same bits in any batch", "Leave it out.")
    count = install_sparse(model)
    if not count:
        raise UserError(
            "sparse",
            "no matrix of the model is 2:4 in a 16-bit dtype",
            "Make one with moesaic compress DIR --method nm, and load it with dtype=bfloat16.",
        )
    return count


def install_sparse(model: Model) -> int:
    """The same on any device: where there are no sparse tensor cores, it changes nothing but who multiplies."""
    found = [(name, weight) for name, weight in matrices(model) if fits(weight) and is_two_of_four(weight)]
    for name, weight in found:
        install(model, name, SparseWeight(weight), weight.dtype)
    model.weights_replaced()
    return len(found)


def matrices(model: Model) -> Iterator[tuple[str, nn.Parameter]]:
    """What may go there: the matrices of layers, experts left out."""
    chosen = {f"layers.{name}" for name in matrix_parameters(model.layers)}
    yield from ((name, weight) for name, weight in model.named_parameters() if name in chosen and weight.dim() == 2)


def sparse_bytes(weight: Tensor) -> int:
    """What a 16-bit matrix takes as 2:4: half its numbers, and two bits to say where each was."""
    return weight.numel() * weight.element_size() * 9 // 16
