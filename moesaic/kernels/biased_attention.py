"""Pair-biased attention within memory (Evoformer, AlphaFold's triangle attention, DeepSpeed4Science): a number is added
to the score of every query and key, and neither scores nor these numbers are ever there as a whole.

    bias = BlockBias(lambda sequence, rows, keys, a_TX, b_TX: a_TX[rows] @ b_TX[keys].T, (a_TX, b_TX), causal=False)
    out_THC = ops.attend(q_THC, k_TNC, v_TNC, AttentionCall(layout, None, scale, bias=bias))
    hidden_TD = model(tokens_T, layout, ops=PairBiasedKernels(model.ops, bias))          # in every layer

Scores are taken in blocks with a running softmax, and a block of the bias is made when its scores are. On the way back
both are made again; what a block's bias was made of gets its gradient there and then, so memory grows with the block,
and with the length of a sequence, but not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.exact_forward import needs_grad
from moesaic.kernels.interface import AttentionCall, Kernels, LatentCall, PairBias
from moesaic.kernels.wrapped import WrappedKernels

SIZE = 256  # rows and keys of a block


@dataclass(frozen=True)
class BlockBias:
    """`make(sequence, rows, keys, *inputs)` gives the bias of these rows and keys (slices of a sequence's tokens, the
    cached ones counted): (heads, rows, keys), or what is broadcast to that. `inputs` are the tensors that have a
    gradient, of which every block takes a small part; a tensor of the whole bias is `TensorBias`."""

    make: Callable[..., Tensor]
    inputs: Sequence[Tensor] = ()
    causal: bool = True  # whether a token sees only those before it
    size: int = SIZE

    def block(self, sequence: int, rows: slice, keys: slice) -> Tensor:
        return self.make(sequence, rows, keys, *self.inputs)

    def add_gradient(
        self, grads: list[Tensor | None], sequence: int, rows: slice, keys: slice, d_block_HRM: Tensor
    ) -> None:
        wanted = [n for n, tensor in enumerate(self.inputs) if tensor.requires_grad]
        if not wanted:
            return
        own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.inputs]
        with torch.enable_grad():
            made = self.make(sequence, rows, keys, *own)
        if not made.requires_grad:  # here it has nothing of the inputs
            return
        d_made = d_block_HRM.sum_to_size(_three(made).shape).view_as(made).to(made.dtype)
        found = torch.autograd.grad(made, [own[n] for n in wanted], d_made, allow_unused=True)
        for n, part in zip(wanted, found, strict=True):
            if part is not None:
                before = grads[n]
                grads[n] = part.clone() if before is None else before.add_(part)


@dataclass(frozen=True)
class TensorBias:
    """One tensor for each sequence (heads or 1, its tokens, its tokens): in memory, or a file mapped to it. A gradient
    is added up in place, block by block: in a tensor like it, or by `receive(sequence, rows, keys, gradient)`, which
    may write it elsewhere (then it is wanted whenever that of queries, keys or values is)."""

    whole: Sequence[Tensor]
    causal: bool = True
    size: int = SIZE
    receive: Callable[[int, slice, slice, Tensor], None] | None = None
    inputs: Sequence[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", () if self.receive is not None else tuple(self.whole))

    def block(self, sequence: int, rows: slice, keys: slice) -> Tensor:
        return self.whole[sequence][:, rows, keys]

    def add_gradient(
        self, grads: list[Tensor | None], sequence: int, rows: slice, keys: slice, d_block_HRM: Tensor
    ) -> None:
        whole = self.whole[sequence]
        if self.receive is not None:
            self.receive(sequence, rows, keys, d_block_HRM.sum_to_size(self.block(sequence, rows, keys).shape))
        elif whole.requires_grad:
            if (found := grads[sequence]) is None:
                found = grads[sequence] = torch.zeros_like(whole)
            part = found[:, rows, keys]
            part += d_block_HRM.sum_to_size(part.shape).to(part.dtype)


class PairBiasedKernels(WrappedKernels):
    """Attention of every layer with a bias, or by the layer's number with its own (None: without)."""

    def __init__(self, plain: Kernels, bias: PairBias | Callable[[int], PairBias | None]) -> None:
        super().__init__(plain)
        self.bias = bias

    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        bias = self.bias(call.layer) if callable(self.bias) else self.bias
        return self.plain.attend(q_THC, k_TNC, v_TNC, call._replace(bias=bias))

    def attend_latent(self, call: LatentCall) -> Tensor:
        raise UserError("attention", "latent attention takes no pair bias", "Choose a family with grouped queries.")


def attend_biased(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
    """`attend` of a call that has a bias, for any device."""
    layout, cache, bias = call.layout, call.cache, call.bias
    assert bias is not None
    if layout.has_trees:
        raise UserError("attention", "a pair bias knows no trees of draft tokens", "Draft lines.")
    if call.sinks_H is not None or call.chunked:
        raise UserError("attention", "learned sinks and chunks take no pair bias", "Choose another family.")
    if cache is not None:
        layout.write(cache["keys"], k_TNC)
        layout.write(cache["values"], v_TNC)
    pieces = []
    for span, q, k, v in layout.per_sequence(q_THC, k_TNC, v_TNC):
        if cache is not None and (span.cached or cache["keys"].dtype != k.dtype):
            k, v = layout.read(cache["keys"], span).to(q), layout.read(cache["values"], span).to(q)
        blocks = Blocks(bias, span.number, q.shape[0], k.shape[0], call.scale, call.window)
        if needs_grad(q, k, v, *bias.inputs):
            pieces.append(_Biased.apply(blocks, q, k, v, *bias.inputs))
        else:
            pieces.append(_forward(blocks, q, k, v)[0])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True)
class Blocks:
    """One sequence's scores in blocks: `new` queries, the last of `total` keys."""

    bias: PairBias
    sequence: int
    new: int
    total: int
    scale: float
    window: int | None

    def rows(self) -> Iterator[slice]:
        return (slice(at, min(at + self.bias.size, self.new)) for at in range(0, self.new, self.bias.size))

    def keys(self, rows: slice) -> Iterator[slice]:
        """Those that any of the rows sees."""
        first, last = self.placed(rows).start, self.placed(rows).stop
        stop = last if self.bias.causal else self.total
        start = 0 if self.window is None else max(0, first - self.window + 1)
        for at in range(start - start % self.bias.size, stop, self.bias.size):
            yield slice(at, min(at + self.bias.size, stop))

    def placed(self, rows: slice) -> slice:
        """Where queries stand among all tokens of the sequence."""
        before = self.total - self.new
        return slice(before + rows.start, before + rows.stop)

    def scores(self, q_HRC: Tensor, k_NMC: Tensor, rows: slice, keys: slice) -> Tensor:
        placed = self.placed(rows)
        scores_HRM = per_kv_head(q_HRC, len(k_NMC)) @ k_NMC.transpose(1, 2) * self.scale
        scores_HRM = scores_HRM.view(*q_HRC.shape[:2], -1)
        bias_HRM = _three(self.bias.block(self.sequence, placed, keys))
        if bias_HRM.shape[0] not in (1, len(q_HRC)):
            raise ValueError(f"a bias of {bias_HRM.shape[0]} heads for attention with {len(q_HRC)}")
        scores_HRM = scores_HRM + bias_HRM.to(scores_HRM)
        query_R1 = torch.arange(placed.start, placed.stop, device=q_HRC.device)[:, None]
        key_M = torch.arange(keys.start, keys.stop, device=q_HRC.device)
        if self.bias.causal and keys.stop > placed.start + 1:
            scores_HRM = scores_HRM.masked_fill(key_M > query_R1, float("-inf"))
        if self.window is not None and keys.start <= placed.stop - 1 - self.window:
            scores_HRM = scores_HRM.masked_fill(key_M <= query_R1 - self.window, float("-inf"))
        return scores_HRM


def per_kv_head(x_HRC: Tensor, kv_heads: int) -> Tensor:
    """Query heads that share a key head, one behind the other (kv heads, group x rows, size)."""
    return x_HRC.reshape(kv_heads, -1, x_HRC.shape[-1])


def _three(bias: Tensor) -> Tensor:
    """Without heads it is the same for all."""
    return bias[None] if bias.dim() == 2 else bias


def _by_head(x_THC: Tensor) -> Tensor:
    """As what is summed in: float32, at least."""
    return x_THC.transpose(0, 1).to(torch.promote_types(x_THC.dtype, torch.float32))


def _forward(blocks: Blocks, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and for every query the log of the sum its scores are divided by."""
    q_HTC, k_NMC, v_NMX = _by_head(q_THC), _by_head(k_MNC), _by_head(v_MNX)
    heads, kv_heads = len(q_HTC), len(k_NMC)
    out_THX = q_THC.new_empty(blocks.new, heads, v_MNX.shape[-1])
    log_HT = q_HTC.new_empty(heads, blocks.new)
    for rows in blocks.rows():
        q_HRC = q_HTC[:, rows]
        top_HR1 = q_HRC.new_full((heads, q_HRC.shape[1], 1), float("-inf"))
        sum_HR1 = torch.zeros_like(top_HR1)
        out_HRX = q_HRC.new_zeros(heads, q_HRC.shape[1], v_MNX.shape[-1])
        for keys in blocks.keys(rows):
            scores_HRM = blocks.scores(q_HRC, k_NMC[:, keys], rows, keys)
            before_HR1, top_HR1 = top_HR1, torch.maximum(top_HR1, scores_HRM.amax(-1, keepdim=True))
            against_HR1 = top_HR1.masked_fill(top_HR1.isinf(), 0.0)  # of rows that have seen nothing yet
            less_HR1 = (before_HR1 - against_HR1).exp()
            weights_HRM = (scores_HRM - against_HR1).exp_()
            sum_HR1 = sum_HR1 * less_HR1 + weights_HRM.sum(-1, keepdim=True)
            part_HRX = (per_kv_head(weights_HRM, kv_heads) @ v_NMX[:, keys]).view_as(out_HRX)
            out_HRX = out_HRX * less_HR1 + part_HRX
        seen_HR1 = sum_HR1.clamp(min=torch.finfo(sum_HR1.dtype).tiny)
        out_THX[rows] = (out_HRX / seen_HR1).transpose(0, 1).to(out_THX.dtype)
        log_HT[:, rows] = (top_HR1.masked_fill(top_HR1.isinf(), 0.0) + seen_HR1.log()).squeeze(-1)
    return out_THX, log_HT


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Blocks, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, *inputs: Tensor) -> Tensor:
        out_THX, log_HT = _forward(blocks, q_THC, k_MNC, v_MNX)
        ctx.blocks, ctx.inputs = blocks, len(inputs)
        ctx.save_for_backward(q_THC, k_MNC, v_MNX, out_THX, log_HT)
        return out_THX

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THC, k_MNC, v_MNX, out_THX, log_HT = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        q_HTC, k_NMC, v_NMX = _by_head(q_THC), _by_head(k_MNC), _by_head(v_MNX)
        d_out_HTX = _by_head(grads[0])
        kv_heads = len(k_NMC)
        own_HT1 = (d_out_HTX * _by_head(out_THX)).sum(-1, keepdim=True)
        d_q_THC = torch.empty_like(q_THC)
        d_k_NMC, d_v_NMX = torch.zeros_like(k_NMC), torch.zeros_like(v_NMX)
        d_inputs: list[Tensor | None] = [None] * ctx.inputs
        for rows in blocks.rows():
            q_HRC, d_out_HRX = q_HTC[:, rows], d_out_HTX[:, rows]
            d_q_HRC = torch.zeros_like(q_HRC)
            for keys in blocks.keys(rows):
                weights_HRM = (blocks.scores(q_HRC, k_NMC[:, keys], rows, keys) - log_HT[:, rows, None]).exp_()
                d_out_NYX = per_kv_head(d_out_HRX, kv_heads)
                d_v_NMX[:, keys] += per_kv_head(weights_HRM, kv_heads).transpose(1, 2) @ d_out_NYX
                d_weights_HRM = (d_out_NYX @ v_NMX[:, keys].transpose(1, 2)).view_as(weights_HRM)
                d_scores_HRM = weights_HRM.mul_(d_weights_HRM.sub_(own_HT1[:, rows]))
                blocks.bias.add_gradient(d_inputs, blocks.sequence, blocks.placed(rows), keys, d_scores_HRM)
                d_scores_NYM = per_kv_head(d_scores_HRM, kv_heads)
                d_q_HRC += (d_scores_NYM @ k_NMC[:, keys]).view_as(d_q_HRC)
                d_k_NMC[:, keys] += d_scores_NYM.transpose(1, 2) @ per_kv_head(q_HRC, kv_heads)
            d_q_THC[rows] = (d_q_HRC * blocks.scale).transpose(0, 1).to(d_q_THC.dtype)
        d_k_MNC = (d_k_NMC * blocks.scale).transpose(0, 1).to(k_MNC.dtype)
        return None, d_q_THC, d_k_MNC, d_v_NMX.transpose(0, 1).to(v_MNX.dtype), *d_inputs
