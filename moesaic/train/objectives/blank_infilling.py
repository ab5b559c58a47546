"""GLM's autoregressive blank infilling: spans of the text are cut out and written after it, in random order.

    train: {objective: {name: blank_infilling, share: 0.15, mean_span: 3.0, mask: "[MASK]", start: "<sop>"}}

Part A is the text with each span replaced by a mask token; part B is, for every span, a start token and the span. The
model learns to write part B. Positions of part B are those of the masks they fill, plus their place in the span, so
that a span's first token stands where its mask stood. Attention here is causal throughout, as in the decoder-only GLM
models; the 2022 model let part A see itself in both directions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective


@dataclass(frozen=True)
class BlankInfilling(Objective):
    share: float = 0.15  # of the tokens are cut out
    mean_span: float = 3.0  # Poisson
    mask: str = "[MASK]"
    start: str = "<sop>"
    end: str = "<eop>"
    seed: int = 0
    _marks: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.mean_span < 1:
            raise ValueError("share must be between 0 and 1, and mean_span at least 1")

    def prepare(self, model: Model) -> None:
        for name in ("mask", "start", "end"):
            text = getattr(self, name)
            number = model.tokenizer.fast.token_to_id(text) if model.tokenizer else None
            if number is None:
                raise UserError(
                    f"train.objective.{name}", f"the tokenizer has no token {text!r}", "Name one that it has."
                )
            self._marks[name] = number

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        rows, start = [], 0
        for length in batch.lengths:
            rows.append(self.cut(batch.tokens_T[start : start + length].tolist()))
            start += length
        tokens_T, targets_T, positions_T = (
            torch.tensor([value for row in rows for value in row[part]], device=batch.tokens_T.device)
            for part in range(3)
        )
        layout = Layout([len(row[0]) for row in rows], positions=positions_T, device=tokens_T.device)
        hidden_TD = model(tokens_T, layout, routing, runner)
        # A batch of `count` next-token targets has fewer blanks; the mean is over those, and a part weighs its share.
        blanks = (targets_T != IGNORED).sum().clamp(min=1)
        share = (batch.targets_T != IGNORED).sum() / max(batch.count, 1)
        scale_T: Tensor = (share / blanks).float().expand(len(targets_T))
        total, _ = model.cross_entropy(hidden_TD, targets_T, scale_T)
        return Loss(total, {"blanks": total.detach()}, routing)

    def cut(self, tokens: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Tokens, targets and positions of one sequence with its blanks; the same cut for the same tokens."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, tokens)).encode()))
        spans = self._spans(len(tokens), generator)
        text: list[int] = []
        positions: list[int] = []
        inside = {place for begin, end in spans for place in range(begin, end)}
        begins = {begin for begin, _ in spans}
        for place, token in enumerate(tokens):
            if place in begins:
                text.append(self._marks["mask"])
                positions.append(place)
            elif place not in inside:
                text.append(token)
                positions.append(place)
        targets = [IGNORED] * len(text)
        for number in torch.randperm(len(spans), generator=generator).tolist():
            begin, end = spans[number]
            span = tokens[begin:end]
            text += [self._marks["start"], *span]
            targets += [*span, self._marks["end"]]
            positions += range(begin, begin + len(span) + 1)
        return text, targets, positions

    def _spans(self, length: int, generator: torch.Generator) -> list[tuple[int, int]]:
        """Spans that do not touch, about `share` of the tokens together."""
        wanted = max(1, round(self.share * length))
        taken: set[int] = set()
        spans: list[tuple[int, int]] = []
        for _ in range(4 * wanted):  # a crowded text may not have room for more
            if wanted <= 0:
                break
            rate = torch.tensor(self.mean_span - 1)
            size = min(1 + int(torch.poisson(rate, generator=generator)), wanted)
            begin = int(torch.randint(0, max(length - size, 0) + 1, (), generator=generator))
            around = range(begin - 1, begin + size + 1)
            if begin + size > length or taken & set(around):
                continue
            taken |= set(range(begin, begin + size))
            spans.append((begin, begin + size))
            wanted -= size
        return sorted(spans)
