"""The call of `delta_rule.c`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.interface import DeltaCall


def run(library: Any, call: DeltaCall) -> Tensor:
    """All float32; of each row, numbers side by side."""
    layout, states, width = call.layout, call.states, call.taps_XW.shape[1]
    (tokens, channels), heads, sequences = call.qkv_TX.shape, call.decay_TH.shape[1], len(call.layout.spans)
    if states is None:  # a scratch for each sequence
        sizes = (heads, call.key_size, call.value_size), (width - 1, channels)
        state, before = (call.qkv_TX.new_empty(sequences, *size) for size in sizes)
        places_S = torch.arange(sequences)
    else:
        state, before, places_S = states["state"], states["before"], layout.states_S
    taps_WX = call.taps_XW.t().contiguous()
    mixed_TX, gates_TH2 = (call.qkv_TX.new_empty(size) for size in ((tokens, channels), (tokens, heads, 2)))
    out_THV = call.qkv_TX.new_empty(tokens, heads, call.value_size)
    library.delta_rule(
        call.qkv_TX.data_ptr(), call.strength_TH.data_ptr(), call.decay_TH.data_ptr(), taps_WX.data_ptr(),
        call.log_rate_H.data_ptr(), call.shift_H.data_ptr(), state.data_ptr(), before.data_ptr(), places_S.data_ptr(),
        layout.spans_S4.data_ptr(), mixed_TX.data_ptr(), gates_TH2.data_ptr(), out_THV.data_ptr(),
        sequences, call.key_heads, heads, call.key_size, call.value_size, width, call.qkv_TX.stride(0),
        call.decay_TH.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out_THV
