"""A layer as one piece, for kernels that can run it so; `Block.forward` says what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from moesaic.kernels.native.fused_layer import FusedLayer
from moesaic.kernels.native.quantized_fused import QuantizedFusedLayer
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.attention import GroupedQueryAttention
from moesaic.model.experts import DenseFeedForward, MixtureFeedForward

if TYPE_CHECKING:
    from moesaic.model.block import Block


def fused_layer(block: Block) -> FusedLayer | QuantizedFusedLayer | None:
    """None where a layer has parts that the one call does not know."""
    attention, ffn = block.attention, block.ffn
    if not isinstance(attention, GroupedQueryAttention) or block.attention_post_norm is not None:
        return None
    if ffn.activation != "silu":
        return None
    if any(isinstance(module, QuantizedMatrix) for module in block.modules()):
        return few_bits(block, attention)
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
    return FusedLayer(matrices, numbers, (attention.eps, attention.scale, scale))


def few_bits(block: Block, attention: GroupedQueryAttention) -> QuantizedFusedLayer | None:
    """The same of a layer whose matrices are all kept in few bits, without corrections."""
    ffn = block.ffn
    mixture = ffn if isinstance(ffn, MixtureFeedForward) else None
    if mixture is not None and mixture.residual is not None:
        return None
    dense = ffn if isinstance(ffn, DenseFeedForward) else ffn.shared
    groups: list[Any] = [[attention.qkv.weight], [attention.out.weight], None, None, None, None]
    if dense is not None:
        groups[2:4] = [dense.gate_up.weight], [dense.down.weight]
    if mixture is not None:
        groups[4:6] = mixture.gate_up_EGD, mixture.down_EDF
    every = [matrix for group in groups if group is not None for matrix in group]
    if not all(isinstance(matrix, QuantizedMatrix) and matrix.up_OR is None for matrix in every):
        return None
    plain = (
        block.attention_norm.weight,
        attention.q_norm.weight if attention.q_norm is not None else None,
        attention.k_norm.weight if attention.k_norm is not None else None,
        block.ffn_norm.weight,
        attention.qkv.bias,
        attention.out.bias,
        dense.gate_up.bias if dense is not None else None,
        dense.down.bias if dense is not None else None,
        mixture.router.weight if mixture is not None else None,
        mixture.router.correction if mixture is not None else None,
    )
    sizes, rules, scale = (0, 0, 0, 1, 1), (0, 0), 1.0
    if mixture is not None:
        shape = mixture.router.shape
        sizes = (shape.count, shape.per_token, shape.hidden, shape.groups, shape.top_groups)
        rules, scale = (int(shape.score == "softmax"), int(shape.normalize)), shape.scale
    heads = (attention.heads, attention.kv_heads, attention.size)
    inner = dense.down.weight.shape[1] if dense is not None else 0
    turning = (attention.window or 0, int(attention.interleaved))
    numbers = (block.attention_norm.weight.shape[0], *heads, inner, *sizes, *turning, *rules)
    return QuantizedFusedLayer(plain, groups, numbers, (attention.eps, attention.scale, scale))
