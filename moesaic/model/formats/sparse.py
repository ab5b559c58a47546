"""N:M sparse quantized matrices on disk: the codes of the weights that stay, and a bit for every weight: which."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.quantized import pack, unpack


def kept_inputs(inputs: int, n: int, m: int) -> int:
    return -(-inputs // m) * n


def mask_bytes(inputs: int) -> int:
    return -(-inputs // 8)


def thinned(codes_OI: Tensor, bits: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Packed codes of N in every M inputs, and the mask; the others must stand for zero."""
    outputs, inputs = codes_OI.shape
    middle = 2 ** (bits - 1)
    codes_OXM = F.pad(codes_OI, (0, -inputs % m), value=middle).unflatten(1, (-1, m))
    weighs_OXM = codes_OXM != middle
    assert int(weighs_OXM.sum(-1).max()) <= n, f"more than {n} of {m} weights are left"
    # Where fewer are left, zeros fill up: those that come first.
    places_OXN = weighs_OXM.to(torch.int8).topk(n, dim=-1).indices.sort(dim=-1).values
    mask_OXM = torch.zeros_like(weighs_OXM).scatter_(-1, places_OXN, True)
    mask_OI = mask_OXM.flatten(1)[:, :inputs].cpu().numpy()
    packed = pack(codes_OXM.gather(-1, places_OXN).flatten(1), bits)
    return packed, torch.from_numpy(np.packbits(mask_OI, axis=1, bitorder="little"))


def filled(packed: Tensor, mask: Tensor, inputs: int, bits: int, n: int, m: int) -> Tensor | None:
    """One code per weight again; None where the mask is not of N in every M."""
    mask_OI = torch.from_numpy(np.unpackbits(mask.numpy(), axis=1, bitorder="little", count=inputs)).bool()
    short = -inputs % m
    mask_OXM = F.pad(mask_OI, (0, short)).unflatten(1, (-1, m))
    # In the last few inputs, places beyond the matrix may have been among the N.
    counts_OX = mask_OXM.sum(-1)
    counts_OX[:, -1] += (n - counts_OX[:, -1]).clamp(0, short)
    if bool((counts_OX != n).any()):
        return None
    missing_O = n - mask_OXM[:, -1].sum(-1)
    order_M = torch.arange(m) - (m - short)
    mask_OXM[:, -1] |= (order_M >= 0) & (order_M < missing_O[:, None])
    full_OXM = torch.full(mask_OXM.shape, 2 ** (bits - 1), dtype=torch.uint8)
    full_OXM[mask_OXM] = unpack(packed, bits)[:, : kept_inputs(inputs, n, m)].flatten()
    return full_OXM.flatten(1)[:, :inputs]
