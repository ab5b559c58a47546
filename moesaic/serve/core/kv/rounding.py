"""Quantize keys for the queries that attend to them.

All that a key is for is its dot product with queries. A rounding error in one channel is best compensated in those that
are still to be rounded, along the inverse of the queries' second moments (GPTQ, Frantar et al. 2022, for weights; here
a token's key is the row of weights, and the last queries are the calibration inputs). `docs/LOG.md` has what it gains
in 2 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of the mean of the moments' diagonal: a few queries do not predict all later ones.
DAMPING = 0.5


def codes_for_queries(x_NMC: Tensor, scale_NMC: Tensor, least_NMC: Tensor, top: int, queries_NQC: Tensor) -> Tensor:
    """Codes from 0 to `top`, one for every number of every key; a number is scale * code + least."""
    order_NC, upper_NCC = _inverse_factor(queries_NQC)
    index_NCM = order_NC[..., None].expand(-1, -1, x_NMC.shape[1])
    # Channels first: what one step reads and writes then lies together.
    left_CNM, scale_CNM, least_CNM = (
        numbers.transpose(1, 2).gather(1, index_NCM).transpose(0, 1).contiguous()
        for numbers in (x_NMC, scale_NMC, least_NMC)
    )
    codes_CNM = torch.empty_like(left_CNM)
    for i in range(len(codes_CNM)):
        codes_CNM[i] = ((left_CNM[i] - least_CNM[i]) / scale_CNM[i]).round_().clamp_(0, top)
        off_NM = left_CNM[i] - torch.addcmul(least_CNM[i], codes_CNM[i], scale_CNM[i])
        off_NM /= upper_NCC[:, i, i, None]
        left_CNM[i + 1 :] -= upper_NCC[:, i, i + 1 :].T[..., None] * off_NM
    out_NCM = torch.empty_like(codes_CNM.transpose(0, 1))
    return out_NCM.scatter_(1, index_NCM, codes_CNM.transpose(0, 1)).transpose(1, 2)


def _inverse_factor(queries_NQC: Tensor) -> tuple[Tensor, Tensor]:
    """The order of the channels, largest moments first, and the upper Cholesky factor of the inverse of the moments."""
    queries_NQC = queries_NQC.double()
    moments_NCC = queries_NQC.transpose(1, 2) @ queries_NQC
    diagonal_NC = moments_NCC.diagonal(dim1=1, dim2=2)
    mean_N = diagonal_NC.mean(1).clamp(min=1e-12)
    order_NC = diagonal_NC.argsort(dim=1, descending=True, stable=True)
    size = order_NC.shape[1]
    rows_NCC, columns_NCC = (order.expand(-1, size, size) for order in (order_NC[..., None], order_NC[:, None]))
    moments_NCC = moments_NCC.gather(1, rows_NCC).gather(2, columns_NCC)
    moments_NCC.diagonal(dim1=1, dim2=2).add_(DAMPING * mean_N[:, None])
    inverse_NCC = torch.cholesky_inverse(torch.linalg.cholesky(moments_NCC))
    return order_NC, torch.linalg.cholesky(inverse_NCC, upper=True).float()
