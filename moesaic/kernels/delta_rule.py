"""The gated delta rule over a flat batch (Yang et al. 2024, Gated Delta Networks), by library calls.

A head has a state S, a matrix of key size by value size that begins as zeros. Each token makes it fade by `decay`, then
overwrites what S holds under its key with its value, as far as `strength` says, and reads S under its query:

    S = decay * S;  S = S + k (strength * (v - k' S))';  out = q' S

That is `delta_rule`, token by token. `delta_rule_in_chunks` gives the same with matmuls: inside of a chunk the tokens'
corrections are the solution of a triangular system, and only between chunks a state is handed on. Queries, keys and
values come through a causal convolution of a few tokens; sequences see nothing of each other in either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.interface import Batch, DeltaCall

CHUNK = 64
EPS = 1e-6  # under the norms of queries and keys


class Inputs(NamedTuple):
    """What the rule reads, float32: queries and keys of length one (queries also scaled), one of each for every head;
    the logarithm of the decay."""

    q_THC: Tensor
    k_THC: Tensor
    v_THV: Tensor
    decay_TH: Tensor
    strength_TH: Tensor

    def rows(self, start: int, stop: int) -> Inputs:
        return Inputs(*(x_T[start:stop] for x_T in self))


def delta_rule(call: DeltaCall) -> Tensor:
    """Token by token: what the operation means."""
    return _run(call, _one_by_one)


def delta_rule_in_chunks(call: DeltaCall) -> Tensor:
    """The same with matmuls, for training and prompts; sequences that bring one token each go side by side."""
    alone = all(span.new == 1 for span in call.layout.spans)
    return _run(call, _side_by_side if alone else _in_chunks)


def _run(call: DeltaCall, recur: Callable[[Inputs, Tensor, Batch], tuple[Tensor, Tensor]]) -> Tensor:
    states_SHCV, before_SWX = _begun(call)
    inputs, before_SWX = _inputs(call, before_SWX)
    out_THV, states_SHCV = recur(inputs, states_SHCV, call.layout)
    if call.states is not None:
        places_S = call.layout.states_S
        call.states["state"].index_copy_(0, places_S, states_SHCV)
        call.states["before"].index_copy_(0, places_S, before_SWX)
    return out_THV.to(call.qkv_TX.dtype)


def _begun(call: DeltaCall) -> tuple[Tensor, Tensor]:
    """Every sequence's state and the inputs of its last tokens; zeros where it begins, whatever lay there."""
    sequences, heads = len(call.layout.spans), call.decay_TH.shape[1]
    width, channels = call.taps_XW.shape[1], call.qkv_TX.shape[1]
    sizes = (heads, call.key_size, call.value_size), (width - 1, channels)
    if call.states is None:
        return tuple(call.qkv_TX.new_zeros(sequences, *size, dtype=torch.float32) for size in sizes)  # type: ignore
    places_S = call.layout.states_S
    fresh_S = torch.tensor([span.cached == 0 for span in call.layout.spans], device=places_S.device)
    state_SHCV, before_SWX = (call.states[name].index_select(0, places_S) for name in ("state", "before"))
    return state_SHCV.masked_fill(fresh_S[:, None, None, None], 0), before_SWX.masked_fill(fresh_S[:, None, None], 0)


def _inputs(call: DeltaCall, before_SWX: Tensor) -> tuple[Inputs, Tensor]:
    """The convolution, norms and gates; and the last inputs of each sequence, for its next token."""
    qkv_TX, taps_XW, width = call.qkv_TX.float(), call.taps_XW.float(), call.taps_XW.shape[1]
    tokens, kept = len(qkv_TX), width - 1
    device = qkv_TX.device
    lengths_S = torch.tensor([span.new for span in call.layout.spans], device=device)
    number_T = torch.arange(len(lengths_S), device=device).repeat_interleave(lengths_S, output_size=tokens)
    starts_S = lengths_S.cumsum(0) - lengths_S
    place_T = torch.arange(tokens, device=device) - starts_S[number_T]

    def rows(number: Tensor, place: Tensor) -> Tensor:
        """Where the inputs of sequences' tokens lie: behind all new rows are those from before, oldest first."""
        return torch.where(place >= 0, starts_S[number] + place, tokens + number * kept + kept + place)

    all_EX = torch.cat([qkv_TX, before_SWX.flatten(0, 1)])
    mixed_TX = qkv_TX * taps_XW[:, kept]
    for back in range(1, width):
        mixed_TX = mixed_TX + all_EX.index_select(0, rows(number_T, place_T - back)) * taps_XW[:, kept - back]
    last_SW = lengths_S[:, None] + torch.arange(-kept, 0, device=device)
    sequence_S1 = torch.arange(len(lengths_S), device=device)[:, None]
    before_SWX = all_EX[rows(sequence_S1, last_SW)].detach()

    heads = call.decay_TH.shape[1]
    keys, values = call.key_heads * call.key_size, heads * call.value_size
    q_TX, k_TX, v_TX = F.silu(mixed_TX).split([keys, keys, values], dim=1)
    q_TNC, k_TNC = (x_TX.unflatten(1, (call.key_heads, call.key_size)) for x_TX in (q_TX, k_TX))
    q_THC, k_THC = (_unit(x_TNC).repeat_interleave(heads // call.key_heads, dim=1) for x_TNC in (q_TNC, k_TNC))
    fading_TH = -call.log_rate_H.float().exp() * F.softplus(call.decay_TH.float() + call.shift_H)
    v_THV = v_TX.unflatten(1, (heads, call.value_size))
    return Inputs(q_THC * call.key_size**-0.5, k_THC, v_THV, fading_TH, call.strength_TH.sigmoid().float()), before_SWX


def _unit(x_TNC: Tensor) -> Tensor:
    return x_TNC * torch.rsqrt(x_TNC.pow(2).sum(-1, keepdim=True) + EPS)


def _step(state_SHCV: Tensor, one: Inputs) -> tuple[Tensor, Tensor]:
    """One token of some sequences."""
    state_SHCV = state_SHCV * one.decay_TH.exp()[..., None, None]
    known_SHV = torch.einsum("shc,shcv->shv", one.k_THC, state_SHCV)
    correction_SHV = (one.v_THV - known_SHV) * one.strength_TH[..., None]
    state_SHCV = state_SHCV + one.k_THC[..., None] * correction_SHV[..., None, :]
    return torch.einsum("shc,shcv->shv", one.q_THC, state_SHCV), state_SHCV


def _one_by_one(inputs: Inputs, states_SHCV: Tensor, layout: Batch) -> tuple[Tensor, Tensor]:
    out, states = [inputs.v_THV[:0]], []
    for span, state in zip(layout.spans, states_SHCV.split(1), strict=True):
        for row in range(span.start, span.stop):
            read_1HV, state = _step(state, inputs.rows(row, row + 1))
            out.append(read_1HV)
        states.append(state)
    return torch.cat(out), torch.cat(states)


def _side_by_side(inputs: Inputs, states_SHCV: Tensor, layout: Batch) -> tuple[Tensor, Tensor]:
    return _step(states_SHCV, inputs)


def _in_chunks(inputs: Inputs, states_SHCV: Tensor, layout: Batch) -> tuple[Tensor, Tensor]:
    """Chunks M of all sequences at once, and then one after the other of each; of a sequence's last one, the tokens
    that are missing write nothing."""
    # Longest first: at every further chunk, the sequences that have one are the first few.
    spans = sorted((span for span in layout.spans if span.new), key=lambda span: -span.new)
    counts = [-(-span.new // CHUNK) for span in spans]
    device, tokens = states_SHCV.device, layout.tokens
    if not spans:
        return inputs.v_THV, states_SHCV
    # By turns: first the first chunk of every sequence, then the second of those that have one, ...
    turns = [[at for at, count in enumerate(counts) if count > turn] for turn in range(counts[0])]
    first_M = torch.tensor(
        [spans[at].start + turn * CHUNK for turn, those in enumerate(turns) for at in those], device=device
    )
    stop_M = torch.tensor([spans[at].stop for those in turns for at in those], device=device)
    row_MB = first_M[:, None] + torch.arange(CHUNK, device=device)
    row_MB = torch.where(row_MB < stop_M[:, None], row_MB, tokens)  # a row of zeros
    q_MHBC, k_MHBC, v_MHBV, decay_MHB, strength_MHB = (_chunked(x_T, row_MB) for x_T in inputs)

    fallen_MHB = decay_MHB.cumsum(-1)  # the logarithm of what is left of the state that a chunk begins with
    later_BB = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1)
    between_MHBB = (fallen_MHB[..., :, None] - fallen_MHB[..., None, :]).masked_fill(later_BB, float("-inf")).exp()
    left_MHB1 = fallen_MHB.exp()[..., None]
    strong_MHBC = k_MHBC * strength_MHB[..., None]
    # What a token corrects depends on the corrections of those before it: L x = y with ones on the diagonal, which the
    # solver does not read.
    system_MHBB = (strong_MHBC @ k_MHBC.transpose(-1, -2)) * between_MHBB
    asked = torch.cat([v_MHBV * strength_MHB[..., None], strong_MHBC * left_MHB1], dim=-1)
    solved = torch.linalg.solve_triangular(system_MHBB, asked, upper=False, unitriangular=True)
    wanted_MHBV, known_MHBC = solved.split([v_MHBV.shape[-1], k_MHBC.shape[-1]], dim=-1)
    inside_MHBB = (q_MHBC @ k_MHBC.transpose(-1, -2)) * between_MHBB
    asks_MHBC = q_MHBC * left_MHB1
    writes_MHCB = (k_MHBC * (fallen_MHB[..., -1:] - fallen_MHB).exp()[..., None]).transpose(-1, -2)
    lasting_MH11 = fallen_MHB[..., -1].exp()[..., None, None]

    order_S = torch.tensor([span.number for span in spans], device=device)
    running, ended, out = states_SHCV.index_select(0, order_S), [], []
    each = [len(those) for those in turns]
    pieces = (wanted_MHBV, known_MHBC, inside_MHBB, asks_MHBC, writes_MHCB, lasting_MH11)
    for wanted, known, inside, asks, writes, lasting in zip(*(piece.split(each) for piece in pieces), strict=True):
        ended.append(running[len(wanted) :])
        running = running[: len(wanted)]
        new = wanted - known @ running
        out.append(asks @ running + inside @ new)
        running = running * lasting + writes @ new
    final_SHCV = torch.cat([running, *reversed(ended)])
    out_MBHV = torch.cat(out).transpose(1, 2)
    # Rows of zeros were added behind the last; each token's own is found by where it went.
    place_T = torch.empty(tokens + 1, dtype=torch.int64, device=device)
    place_T[row_MB.flatten()] = torch.arange(row_MB.numel(), device=device)
    states_SHCV = states_SHCV.index_copy(0, order_S, final_SHCV)
    return out_MBHV.flatten(0, 1).index_select(0, place_T[:tokens]), states_SHCV


def _chunked(x_T: Tensor, row_MB: Tensor) -> Tensor:
    """Rows by chunk, heads before tokens."""
    padded_T = torch.cat([x_T, x_T.new_zeros(1, *x_T.shape[1:])])
    return padded_T[row_MB].transpose(1, 2)
