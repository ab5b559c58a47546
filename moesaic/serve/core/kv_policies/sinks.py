"""Keep the first tokens and the newest (StreamingLLM: Efficient Streaming Language Models with Attention Sinks).

    moesaic serve DIR --kv-policy sinks --kv share=0.25
    moesaic serve DIR --kv-policy sinks --kv window=1024

With a `window` the cache never holds more than that and a round's tokens: it is pruned during prefill, too. Without
one, a share of the tokens is retained after the prefill. Keys keep the positions they were written with.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.serve.core.kv_policies import AttentionStatistics, Budgeted, Retained


@dataclass(frozen=True)
class Sinks(Budgeted):
    sinks: int = 4
    window: int = 0  # newest tokens beside them; 0: what the share leaves
    every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.window < 0:
            raise ValueError("sinks and window must not be negative")
        if self.window and not self.every:
            raise ValueError("a window needs rounds: every must be at least 1")

    def due(self, computed: int, prompt: int) -> int:
        if not self.window:
            return super().due(computed, prompt)
        full = self.sinks + self.window
        return full + (max(0, computed - full) // self.every + 1) * self.every

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        newest = self.window or max(1, self.budget(statistics.computed) - self.sinks)
        first_LNM = (statistics.positions_LNM < self.sinks) & statistics.present_LNM
        return Retained(first_LNM | (statistics.newest(newest) & statistics.present_LNM))
