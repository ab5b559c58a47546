"""Layers with a sliding window beside layers that a policy prunes.

A token of such a layer sees the last rows alone, so those before them are left out of its cache for good, exactly, and
out of every policy's budget: a policy is shown the other layers, and its budget is a share of theirs. Rows of a
windowed layer are dropped whenever the policy prunes; between two prunings they are only hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.config import Layer
from moesaic.serve.core.kv_policies import Retained

WITHOUT = "Serve this model without --kv-policy."


class Windows:
    def __init__(self, layers: Sequence[Layer]) -> None:
        self.sizes = [layer.window for layer in layers]
        self.judged = [number for number, size in enumerate(self.sizes) if size is None]  # layers that a policy sees
        if any(layer.chunked for layer in layers):
            raise UserError("--kv-policy", "the model has layers that attend in chunks of the text", WITHOUT)
        if not self.judged:
            problem = "every layer of the model has a sliding window of its own, which bounds its cache already"
            raise UserError("--kv-policy", problem, WITHOUT)
        self.any = len(self.judged) < len(self.sizes)

    def seen(self, widths: Sequence[int]) -> np.ndarray:
        """Of so many rows of each layer, how many a token sees that has just been added to them."""
        return np.array([width if size is None else min(width, size) for width, size in zip(widths, self.sizes)])

    def shown(self, columns_LNM: Tensor) -> Tensor:
        """What a policy sees of them."""
        return columns_LNM[self.judged] if self.any else columns_LNM

    def hidden(self, layer: int, new: int, rows: int, device: torch.device) -> Tensor | None:
        """Which of a layer's rows lie before the windows of the new tokens, which are the last rows (1, T, M)."""
        size = self.sizes[layer]
        if size is None or rows <= size:
            return None
        own_T1 = torch.arange(rows - new, rows, device=device)[:, None]
        return (torch.arange(rows, device=device) <= own_T1 - size)[None]

    def with_all_layers(self, chosen: Retained | None, positions_LNM: Tensor, computed: int) -> Retained | None:
        """What a policy has chosen of the layers it sees, with what the others retain: what the next token sees."""
        if not self.any:
            return chosen
        rows_LNM, onto_LNM = positions_LNM >= 0, None
        for layer, size in enumerate(self.sizes):
            if size is not None:
                rows_LNM[layer] &= positions_LNM[layer] > computed - size
        if chosen is not None:
            rows_LNM[self.judged] = chosen.rows_LNM
            if chosen.onto_LNM is not None:  # rows of a window stay as they are
                onto_LNM = torch.arange(rows_LNM.shape[-1], device=rows_LNM.device).expand(rows_LNM.shape).clone()
                onto_LNM[self.judged] = chosen.onto_LNM
        return Retained(rows_LNM, onto_LNM)
