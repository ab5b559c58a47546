"""Which layers each pipeline stage holds, and a model that holds no others.

    stages = divide(config, ranks=4)                                # even
    stages = divide(config, ranks=4, chunks=2, shape="v")           # two stages per rank, there and back (ZBV)
    stages = divide(config, ranks=4, given=[3, 5, 5, 3])
    stages = divide(config, ranks=4, by="cost")                     # experts, head and prediction layers counted
    keep(model, stages, rank)                                       # also on the meta device
    stage_holds("layers.7.ffn.down_EDF", stages, rank)              # before any model is made

Names keep their global numbers: a layer that lies elsewhere is a placeholder without parameters. The embedding is on
the first stage, and once more on the last where the output matrix is tied to it or prediction layers (MTP) read it; the
last norm, the head and prediction layers are on the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels
from moesaic.model.block import Block
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.options import ParallelOptions
from moesaic.units import plural

Shape = Literal["loop", "v"]
PLACE = "parallel.stages"
SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
SINGLE = ("gpipe", "1f1b")  # one stage per rank


@dataclass(frozen=True)
class Stages:
    """`layers[s]` are those of stage s. Stages lie on ranks in a loop (0, 1, 0, 1) or as a V (0, 1, 1, 0)."""

    layers: tuple[range, ...]
    ranks: int
    shape: Shape = "loop"
    embed_twice: bool = False  # the last stage reads the embedding too

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return len(self.layers) // self.ranks

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    def rank_of(self, stage: int) -> int:
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.shape == "v" and lap % 2 else place

    def of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.count) if self.rank_of(stage) == rank)

    @property
    def shares_embedding(self) -> bool:
        """Whether two ranks hold the embedding, whose gradients are then one sum."""
        return self.embed_twice and self.rank_of(0) != self.rank_of(self.last)

    def copied(self, rank: int) -> frozenset[str]:
        """Parameters of this rank that another holds as well and counts, as in the norm of all gradients."""
        twice = self.shares_embedding and rank == self.rank_of(self.last)
        return frozenset({"embed"} if twice else ())


class Elsewhere(nn.Module):
    """In the place of a layer or norm that another rank holds."""

    ffn = None
    weight = None
    eps = 0.0

    def forward(self, x_TD: Tensor, ops: Kernels) -> Tensor:
        """The last norm; the stage's kernels leave the rows alone."""
        return ops.rms_norm(x_TD, self.weight, self.eps)  # type: ignore[arg-type]


def divide(
    config: ModelConfig,
    ranks: int,
    *,
    chunks: int = 1,
    shape: Shape = "loop",
    given: Sequence[int] | None = None,
    by: Literal["count", "cost"] = "count",
) -> Stages:
    """`given`: layers of each stage in order; else as equal as can be in number, or in what a token costs."""
    layers, count = len(config.layers), ranks * chunks
    if shape == "v" and chunks != 2:
        raise UserError("parallel.schedule", "a V has two stages per rank", f"Set two chunks, not {chunks}.")
    if given is not None:
        sizes = _checked(given, layers, ranks, chunks)
    elif layers < count:
        what = f"{plural(layers, 'layer')} for {count} stages ({ranks} ranks, {chunks} each)"
        raise UserError("parallel.pp", what, f"Take {layers} stages at most.")
    elif by == "cost":
        sizes = _by_cost(config, count)
    else:
        sizes = [layers // count + (stage < layers % count) for stage in range(count)]
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    for edge in edges[1:-1]:
        if edge < layers and config.layers[edge].index == "shared":
            full = [number for number, layer in enumerate(config.layers) if layer.index == "full"]
            problem = f"a stage would begin at layer {edge}, which attends to what a layer before it selected"
            raise UserError(PLACE, problem, f"Stages may begin at layers {', '.join(map(str, full))}.")
    embed_twice = count > 1 and (config.tied or bool(config.mtp))
    return Stages(tuple(range(*edge) for edge in pairwise(edges)), ranks, shape, embed_twice)


def stages_of(config: ModelConfig, layout: ParallelLayout, options: ParallelOptions) -> Stages:
    shape: Shape = "v" if options.schedule == "zbv" else "loop"
    return divide(config, layout.pp, chunks=layout.interleave, shape=shape, given=options.stages or None)


def check_schedule(schedule: str, stages: Stages, micro_batches: int) -> None:
    """Refuse what cannot run, before anything is made."""
    place = "parallel.schedule"
    if schedule not in SCHEDULE_NAMES:
        raise UserError(place, f"unknown schedule {schedule!r}", f"Known: {', '.join(SCHEDULE_NAMES)}.")
    if schedule in SINGLE and stages.chunks != 1:
        problem = f"{schedule} has one stage per rank, not {stages.chunks}"
        raise UserError(place, problem, "Take interleaved or zero_bubble, or interleave=1.")
    if schedule == "interleaved" and stages.chunks < 2:
        raise UserError(place, "interleaved needs several stages per rank", "Set interleave=2, or take 1f1b.")
    if (schedule == "zbv") != (stages.shape == "v"):
        raise UserError(place, "zbv, and no other, has its stages laid out as a V", "Divide the layers with shape='v'.")
    if problem := misfit(schedule, stages, micro_batches):
        enough = max(stages.count, micro_batches - micro_batches % stages.ranks)
        raise UserError("train.accumulate", problem, f"Nearest that works: {enough}.")


def misfit(schedule: str, stages: Stages, micro_batches: int) -> str:
    """What is wrong with a number of micro-batches, or nothing."""
    if schedule == "1f1b" and micro_batches < stages.count:
        return f"{micro_batches} micro-batches for {stages.count} stages leave stages idle all the time"
    rounds = max(1, micro_batches // stages.ranks)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return f"{micro_batches} micro-batches do not divide into {rounds} rounds of equal length"
    return ""


def stage_holds(name: str, stages: Stages, rank: int) -> bool:
    """Whether `rank` holds the parameter or buffer `name` of the whole model."""
    return any(belongs(name, stages, stage) for stage in stages.of_rank(rank))


def belongs(name: str, stages: Stages, stage: int) -> bool:
    """Whether stage `stage` reads the parameter `name`."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return int(rest.partition(".")[0]) in stages.layers[stage]
    if first == "embed":
        return stage == 0 or (stages.embed_twice and stage == stages.last)
    return stage == stages.last


@torch.no_grad()
def keep(model: Model, stages: Stages, rank: int) -> Model:
    """The model with what `rank` holds; everything else is gone from its parameters and its state."""
    mine = stages.of_rank(rank)
    for number in range(len(model.layers)):
        if not any(number in stages.layers[stage] for stage in mine):
            model.layers[number] = Elsewhere()
    if not stage_holds("embed", stages, rank):
        embed = model.embed
        del model.embed
        # What is left says which device and dtype the model has; it has no rows and is not saved.
        model.register_buffer("embed", embed.new_empty(0, embed.shape[1]), persistent=False)
    if stages.last not in mine:
        model.norm = Elsewhere()  # type: ignore[assignment]
        model.head = None
        model.mtp = nn.ModuleList()
        model.value = None
    return model


def _checked(given: Sequence[int], layers: int, ranks: int, chunks: int) -> list[int]:
    count = ranks * chunks
    if len(given) != count:
        each = "" if chunks == 1 else f" x {chunks} chunks"
        raise UserError(PLACE, f"{len(given)} numbers for {ranks} ranks{each}", f"Give {count}, one for each stage.")
    if sum(given) != layers:
        raise UserError(PLACE, f"{sum(given)} layers in all, but the model has {layers}", "Make them equal.")
    for stage, size in enumerate(given):
        if size < 0 or (size == 0 and 0 < stage < count - 1):
            problem = f"stage {stage} would hold {plural(size, 'layer')}"
            raise UserError(PLACE, problem, "Only the first (embedding) and the last (head) may hold none.")
    return list(given)


def _by_cost(config: ModelConfig, count: int) -> list[int]:
    """Contiguous stages whose dearest is as cheap as can be; the later stages take the slack."""
    costs = [token_cost(config, layer) for layer in config.layers]
    head = config.vocab * config.hidden
    further = sum(token_cost(config, layer) + 2 * config.hidden**2 + head for layer in config.mtp)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> int:
        if stop < len(costs) and config.layers[stop].index == "shared":
            return 1 << 62  # no stage may begin there
        return sums[stop] - sums[start] + (head + further if stage == count - 1 else 0)

    @cache
    def best(stage: int, start: int) -> tuple[int, tuple[int, ...]]:
        """The dearest of the stages from `stage` on, which hold the layers from `start` on; and their sizes."""
        if stage == count - 1:
            return cost_of(stage, start, len(costs)), (len(costs) - start,)
        found = []
        for stop in range(start + 1, len(costs) - (count - 2 - stage)):
            rest, sizes = best(stage + 1, stop)
            found.append((max(rest, cost_of(stage, start, stop)), (stop - start, *sizes)))
        return min(found, key=lambda one: one[0])

    return list(best(0, 0)[1])


def token_cost(config: ModelConfig, layer: Layer) -> int:
    """Multiply-adds of one token in a layer: the matrices it passes through, and scores over half a context."""
    with torch.device("meta"):
        block = Block(config, layer, 0)
    passed = sum(parameter.numel() for parameter in block.parameters())
    if isinstance(layer.ffn, Experts):
        passed -= (layer.ffn.count - layer.ffn.per_token) * 3 * layer.ffn.hidden * config.hidden
    attention = config.attention
    if isinstance(attention, GroupedQuery):
        width = 2 * attention.heads * attention.head_size
    else:
        width = attention.heads * (attention.key_size + attention.value_size)
    return passed + width * min(config.context // 2, layer.window or config.context)
