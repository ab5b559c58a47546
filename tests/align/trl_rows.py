"""Pairs of completions as trl's DPO trainer takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesaic.align.preference.pairs import Pair


def padded(pairs: Sequence[Pair]) -> dict[str, torch.Tensor]:
    """Chosen ones first, then rejected ones, all as long as the longest."""
    said = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    longest = max(len(one.tokens) for one in said)
    rows = [(one.tokens, one.learn, longest - len(one.tokens)) for one in said]
    return {
        "input_ids": torch.tensor([tokens + [0] * missing for tokens, _, missing in rows]),
        "attention_mask": torch.tensor([[1] * len(tokens) + [0] * missing for tokens, _, missing in rows]),
        "completion_mask": torch.tensor([list(map(int, learn)) + [0] * missing for _, learn, missing in rows]),
    }
