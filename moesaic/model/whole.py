"""A layer as one piece, for kernels that can run it so; `Block.forward` says what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.kernels.native.block import Whole
from moesaic.model.attention import GroupedQueryAttention
from moesaic.model.experts import DenseFeedForward, MixtureFeedForward

if TYPE_CHECKING:
    from moesaic.model.block import Block


def whole(block: Block) -> Whole | None:
    """None where a layer has parts that the one call does not know."""
    attention, ffn = block.attention, block.ffn
    if not isinstance(attention, GroupedQueryAttention) or block.attention_post_norm is not None:
        return None
    if ffn.activation != "silu":
        return None
    dense: DenseFeedForward | None
    router: tuple[Tensor | None, ...] = (None, None, None, None)
    sizes = (0, 0, 0, 1, 1)
    softmax = normalize = 0
    scale = 1.0
    if isinstance(ffn, MixtureFeedForward):
        if ffn.residual is not None:
            return None
        dense, shape = ffn.shared, ffn.router.shape
        router = (ffn.router.weight, ffn.router.correction, ffn.gate_up_EGD, ffn.down_EDF)
        sizes = (shape.count, shape.per_token, ffn.down_EDF.shape[2], shape.groups, shape.top_groups)
        softmax, normalize, scale = int(shape.score == "softmax"), int(shape.normalize), shape.scale
    else:
        dense = ffn
    joined: tuple[Tensor | None, ...] = (None, None, None, None)
    if dense is not None:
        joined = (dense.gate_up.weight, dense.gate_up.bias, dense.down.weight, dense.down.bias)
    matrices = (
        block.attention_norm.weight,
        attention.qkv.weight,
        attention.qkv.bias,
        attention.q_norm.weight if attention.q_norm is not None else None,
        attention.k_norm.weight if attention.k_norm is not None else None,
        attention.out.weight,
        attention.out.bias,
        block.ffn_norm.weight,
        *joined,
        *router,
    )
    inner = dense.down.weight.shape[1] if dense is not None else 0
    numbers = (
        block.attention_norm.weight.shape[0],
        attention.heads,
        attention.kv_heads,
        attention.size,
        inner,
        *sizes,
        attention.window or 0,
        int(attention.interleaved),
        softmax,
        normalize,
    )
    return Whole(matrices, numbers, (attention.eps, attention.scale, scale))
