"""Quantize the whole KV cache to 8, 4 or 2 bits (KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache).

    moesaic serve DIR --kv-policy quantized --kv bits=8
    moesaic serve DIR --kv-policy quantized --kv bits=4 --kv keys=token

After the prefill, and whenever a block of generated tokens is full, all but the first and the newest tokens are
quantized. Keys have one scale per channel and block, or, as values do, one per token; a scale and a minimum take 4
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moesaic.serve.core.kv.encoding import Encoding
from moesaic.serve.core.kv_policies import AttentionStatistics, KVPolicy, Retained, next_round


@dataclass(frozen=True)
class Quantized(KVPolicy):
    bits: int = 8
    group: int = 32  # tokens of a block
    channels: int = 32  # of a token that share a scale
    recent: int = 32  # newest tokens, which are not quantized
    keys: Literal["channel", "token"] = "channel"
    first: int = 4  # oldest tokens, which are not quantized either
    queries: int = 16  # last tokens whose queries keys are quantized for; 0: to the nearest code
    encoding: Encoding = field(init=False)

    def __post_init__(self) -> None:
        made = Encoding(
            self.bits, self.group, self.channels, self.recent, self.keys, first=self.first, queries=self.queries
        )
        object.__setattr__(self, "encoding", made)

    def due(self, computed: int, prompt: int) -> int:
        return next_round(computed, prompt, self.group)

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        return None
