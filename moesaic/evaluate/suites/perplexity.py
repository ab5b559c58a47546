"""Perplexity of a text: how many tokens the model hesitates between, on average.

    moesaic evaluate out/smollm2 --suite perplexity --data text.txt --json
    moesaic evaluate out/smollm2 --suite perplexity --data text.txt window=1024 stride=512

The whole file is one sequence of tokens, read in windows; each next window begins `stride` tokens further, and only the
tokens that no window before has predicted count. With a stride of a whole window (the default) every token is read
once, and the first of each window is predicted by none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from moesaic.data.plain_text import read_text
from moesaic.errors import UserError
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.model.perplexity import perplexity
from moesaic.model.transformer import Model

LARGEST_WINDOW = 2048  # unless asked for; attention over more takes most of the time


@dataclass(frozen=True)
class Perplexity(Suite):
    window: int = 0  # 0: the context, at most 2048
    stride: int = 0  # 0: a window
    tokens: int = 0  # 0: the whole file

    takes_data = True

    def __post_init__(self) -> None:
        if self.window < 0 or self.window == 1 or self.stride < 0 or self.tokens < 0:
            raise ValueError("window must be at least 2, stride and tokens at least 1 (or 0 for what is usual)")

    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        assert model is not None
        window = self.window or min(model.config.context, LARGEST_WINDOW)
        stride = self.stride or window
        if window > model.config.context:
            raise UserError("window", f"{window} is longer than the model's context of {model.config.context}")
        if stride > window:
            raise UserError("stride", f"{stride} is longer than a window of {window}", "Tokens would be left out.")
        if model.tokenizer is None:
            raise UserError("model", "has no tokenizer", "Add tokenizer.json to its directory.")
        text = read_text(context.data)
        if self.tokens:
            text = text[: self.tokens * 16]
        tokens = model.tokenizer.encode(text)
        tokens = tokens[: self.tokens] if self.tokens else tokens
        if len(tokens) < 2:
            raise UserError(context.data or "text", "holds fewer than two tokens", "Give a longer text.")
        found = perplexity(model, tokens, window, stride, context.progress)
        size = len(model.tokenizer.decode(tokens).encode())
        return {
            "perplexity": found.perplexity,
            "nats_per_token": found.nats / found.predicted,
            # Of the first token of a window nothing is known, so it counts as what a token takes on average.
            "bits_per_byte": found.nats / found.predicted * len(tokens) / math.log(2) / max(size, 1),
            "tokens": len(tokens),
            "predicted": found.predicted,
            "window": window,
            "stride": stride,
        }
