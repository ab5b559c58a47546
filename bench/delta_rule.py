"""The gated delta rule on a CPU at the sizes of Qwen3-Next's heads: token by token in C, in chunks by library calls,
and as `transformers` computes it in chunks.

    python -m bench.delta_rule              half a minute; writes bench/results/delta_rule.json

A layer with four key heads and eight heads of 128 by 128 (a quarter of a released one), its convolution included. Costs
are processor seconds of one thread, medians of turns that alternate; ratio = other's time / C's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from bench.families import turns
from bench.measure import record
from moesaic.kernels import cpu, native
from moesaic.kernels.interface import DeltaCall
from moesaic.model.layout import Layout, PagedCache, SequenceStates

KEY_HEADS, HEADS, SIZE, WIDTH = 4, 8, 128, 4
CHANNELS = 2 * KEY_HEADS * SIZE + HEADS * SIZE
CASES = {"prompt of 256": [256], "prompt of 1024": [1024], "eight tokens": [1] * 8, "a token": [1]}


def main() -> None:
    torch.set_num_threads(1)
    compiled = native.kernels()
    assert compiled is not None, "there is no compiler"
    table, rows = Table("case", "C", "in chunks", "ratio", "transformers", "ratio"), []
    with torch.inference_mode():
        for name, lengths in CASES.items():
            call, wanted = drawn(lengths), cpu.delta_rule(drawn(lengths))
            assert (compiled.delta_rule(call) - wanted).norm() < 1e-4 * wanted.norm()
            runs: dict[str, Any] = {"C": lambda: compiled.delta_rule(call), "chunks": lambda: cpu.delta_rule(call)}
            if len(lengths) == 1 < lengths[0]:
                runs["transformers"] = lambda: as_transformers(call)
            found = {who: 1e3 * seconds for who, seconds in turns(runs).items()}
            rows.append({"case": name, **found})
            table.add_row(name, *cells(found))
    Console().print(table)
    print(record("delta_rule", rows, clock="processor time in ms, one thread"))


def cells(found: dict[str, float]) -> list[str]:
    shown = [f"{found['C']:.2f} ms"]
    for other in ("chunks", "transformers"):
        known = other in found
        shown += [f"{found[other]:.2f} ms", f"{found[other] / found['C']:.1f}x"] if known else ["", ""]
    return shown


def drawn(lengths: list[int]) -> DeltaCall:
    """A prompt begins; single tokens go on."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    tokens, states, layout = sum(lengths), None, Layout(lengths)
    if tokens == len(lengths):
        sizes = {"state": (HEADS, SIZE, SIZE), "before": (WIDTH - 1, CHANNELS)}
        kept = SequenceStates([sizes], tokens)
        for tensor in kept.layers[0].values():
            tensor.normal_(0, 0.1, generator=generator)
        cache, places = PagedCache([{}], 1, 16, torch.float32, "cpu", kept), list(range(tokens))
        layout = Layout(lengths, cached=[7] * tokens, cache=cache, pages=[[0]] * tokens, states=places)
        states = kept.layers[0]
    gates = random(tokens, 2 * HEADS).split(HEADS, dim=1)
    taken = random(CHANNELS, WIDTH), random(HEADS), random(HEADS)
    return DeltaCall(random(tokens, CHANNELS), *gates, *taken, KEY_HEADS, SIZE, SIZE, layout, states)


def as_transformers(call: DeltaCall) -> Tensor:
    padded_XT = F.pad(call.qkv_TX.T[None], (WIDTH - 1, 0))
    mixed_TX = F.silu(F.conv1d(padded_XT, call.taps_XW[:, None], groups=CHANNELS))[0].T
    q, k, v = mixed_TX.split([KEY_HEADS * SIZE, KEY_HEADS * SIZE, HEADS * SIZE], dim=1)
    q, k = (x.unflatten(1, (KEY_HEADS, -1)).repeat_interleave(HEADS // KEY_HEADS, dim=1)[None] for x in (q, k))
    g = -call.log_rate_H.exp() * F.softplus(call.decay_TH + call.shift_H)
    args = q, k, v.unflatten(1, (HEADS, -1))[None], g[None], call.strength_TH.sigmoid()[None]
    out: Tensor = theirs.torch_chunk_gated_delta_rule(*args, use_qk_l2norm_in_kernel=True)[0]
    return out


if __name__ == "__main__":
    main()
