"""Kaiyuan-2B's quantile data benchmarking: which quality quantile of which source trains best.

    moesaic quantiles recipes/tiny.yaml --out out/quantiles

    table = benchmark_quantiles(Shards("out/data"), recipe.data, train_proxy, tokens=200_000, batch_tokens=4096)
    print(table.text())
    table.recommendation.phases       # for data.phases of a recipe
    table.snippet()                   # the same as YAML, with the data.quality that `keep` then goes by

Every source is cut into slices of equal token share by quality. On each slice a small proxy model is trained from the
same start, for the same number of tokens, and its loss measured on the same held-out text; `train_proxy(stream, name)`
does both and returns the loss (train/quantile_proxies.py has the real one). Slices of different sources at the same
quantile can then be compared, which scores from different scales cannot.

The recommendation. *Tilt*: a slice is worth exp(-(loss - best) / spread), with `spread` the standard deviation of all
losses (equal losses: all are worth the same). First phase: each source weighs the worth of its slices times their
tokens. Second phase (the last `final` share of the run, the selective repetition): each source keeps its best slices,
from the top down to the last one whose loss is not above the median of all; a source of which not even the top slice
passes is left out. It is a rule of thumb to start from; losses that differ less than those of two seeds say nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from moesaic.data.mixture import make_plan
from moesaic.data.ordering import token_ranks
from moesaic.data.shards import Shards
from moesaic.data.stream import TokenStream
from moesaic.errors import UserError
from moesaic.recipe_sections import DataSection, PhaseSection, SourceSection
from moesaic.units import plural


@dataclass(frozen=True)
class Slice:
    """Quantile `number` of a source (0 is the lowest), with the loss of a proxy trained on it for `epochs` epochs."""

    source: str
    number: int
    low: float  # quality of its worst and best document
    high: float
    tokens: int
    epochs: float
    loss: float


@dataclass(frozen=True)
class Recommendation:
    phases: tuple[PhaseSection, ...]
    why: str


@dataclass(frozen=True)
class QuantileTable:
    column: str
    quantiles: int
    slices: tuple[Slice, ...]
    recommendation: Recommendation
    quality: Any = None  # what data.quality must be for `keep` to go by the column, where that is another

    def text(self) -> str:
        """A row for each source, a column for each quantile, the best loss of all marked."""
        best = min(piece.loss for piece in self.slices)
        sources = list(dict.fromkeys(piece.source for piece in self.slices))
        width = max(len("source"), *map(len, sources))
        heads = [band(number, self.quantiles) for number in range(self.quantiles)]
        lines = [f"{'source':<{width}}  " + "  ".join(f"{head:>9}" for head in heads) + f"   of {self.column}"]
        for source in sources:
            row = [piece for piece in self.slices if piece.source == source]
            losses = [f"{piece.loss:.4f}{'*' if piece.loss == best else ' '}" for piece in row]
            lines.append(f"{source:<{width}}  " + "  ".join(f"{loss:>9}" for loss in losses))
        repeated = max(self.slices, key=lambda piece: piece.epochs)
        if repeated.epochs > 1:
            lines.append(f"some slices were repeated, up to {repeated.epochs:.1f} times ({repeated.source})")
        return "\n".join([*lines, self.recommendation.why])

    def snippet(self) -> str:
        """The recommended mixture as it stands in a recipe."""
        quality = [f"  quality: {_on_a_line(self.quality)}"] if self.quality else []
        lines = ["data:", *quality, "  phases:"]
        for phase in self.recommendation.phases:
            entry = {"share": phase.share, "weights": phase.weights} | ({"keep": phase.keep} if phase.keep else {})
            lines.append(f"    - {_on_a_line(entry)}")
        return "\n".join(lines)


def benchmark_quantiles(
    data: Shards,
    section: DataSection,
    train_proxy: Callable[[TokenStream, str], float],
    *,
    tokens: int,
    batch_tokens: int,
    quantiles: int = 4,
    column: str = "quality",
    final: float = 0.3,
) -> QuantileTable:
    """Train a proxy on every quantile of every source of `section`, and recommend a mixture of two phases."""
    if quantiles < 2:
        raise UserError("quantiles", f"{quantiles} slices cannot be compared", "Ask for 2 or more.")
    values = data.column(column)
    cuts: list[tuple[SourceSection, int, np.ndarray]] = []  # all of them before the first proxy is trained
    for source in section.sources:
        documents = np.flatnonzero((data.domain == data.domains.index(source.name)) & ~data.held_out)
        ranks = token_ranks(values[documents], data.lengths[documents])
        for number in range(quantiles):
            chosen = documents[(ranks >= number / quantiles) & (ranks < (number + 1) / quantiles)]
            if not len(chosen) or not data.lengths[chosen].sum():
                problem = f"{plural(len(documents), 'document')} cannot be cut into {quantiles} slices of equal size"
                raise UserError(f"data.sources: {source.name}", problem, "Ask for fewer quantiles.")
            cuts.append((source, number, chosen))
    slices = []
    for source, number, chosen in cuts:
        plain = DataSection(
            sources=(source.model_copy(update={"max_epochs": None}),),
            sequence_length=section.sequence_length,
            seed=section.seed,
        )
        plan = make_plan(data, plain, tokens=tokens, documents=chosen)
        stream = TokenStream(data, plan, batch_tokens=batch_tokens, sequence_length=section.sequence_length)
        loss = float(train_proxy(stream, f"{source.name} {band(number, quantiles)}"))
        if not math.isfinite(loss):
            raise UserError(source.name, f"the proxy's loss on quantile {number} is {loss}", "Lower its rate.")
        size = int(data.lengths[chosen].sum())
        low, high = float(values[chosen].min()), float(values[chosen].max())
        slices.append(Slice(source.name, number, low, high, size, tokens / size, loss))
    recommended = recommend(slices, quantiles, final)
    keeps = any(phase.keep for phase in recommended.phases)
    quality = _as_quality(column, section) if keeps and column != "quality" else None
    return QuantileTable(column, quantiles, tuple(slices), recommended, quality)


def recommend(slices: list[Slice], quantiles: int, final: float = 0.3) -> Recommendation:
    """The rule of the docstring above."""
    losses = [piece.loss for piece in slices]
    best, spread, median = min(losses), statistics.pstdev(losses), statistics.median(losses)
    worth = [math.exp(-(loss - best) / spread) if spread > 0 else 1.0 for loss in losses]
    first: dict[str, float] = {}
    second: dict[str, float] = {}
    keep: dict[str, float] = {}
    for source in dict.fromkeys(piece.source for piece in slices):
        mine = [(piece, value) for piece, value in zip(slices, worth) if piece.source == source]
        first[source] = sum(piece.tokens * value for piece, value in mine)
        mine.sort(key=lambda pair: -pair[0].number)
        kept = 0
        while kept < len(mine) and mine[kept][0].loss <= median:
            kept += 1
        if kept:
            keep[source] = kept / quantiles
            second[source] = sum(piece.tokens * value for piece, value in mine[:kept])
    if not second:  # the best slices are nowhere at the top: quality by this column says nothing
        why = "recommended: one phase; higher quality did not lower the loss, so no quantile is favored"
        return Recommendation((PhaseSection(share=1.0, weights=_normal(first)),), f"{why}\n  weights {_normal(first)}")
    phases = (
        PhaseSection(share=round(1 - final, 6), weights=_normal(first)),
        PhaseSection(share=round(final, 6), weights=_normal(second), keep=keep),
    )
    why = (
        f"recommended: {1 - final:.0%} of the run with weights {phases[0].weights},\n"
        f"  then {final:.0%} with weights {phases[1].weights}, keeping the best {keep}"
    )
    return Recommendation(phases, why)


def _as_quality(column: str, section: DataSection) -> dict[str, Any]:
    """The method that makes a column the one that phases keep the best by: its own, or that of the records' numbers."""
    scores: list[dict[str, Any]] = section.model_dump(mode="json")["scores"]
    return next((method for method in scores if method["name"] == column), {"name": "column", "column": column})


def _on_a_line(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)).strip()


def band(number: int, quantiles: int) -> str:
    """A quantile's name: 25%-50%."""
    return f"{number / quantiles:.0%}-{(number + 1) / quantiles:.0%}"


def _normal(weights: dict[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: round(weight / total, 3) for name, weight in weights.items()}
