"""Published training runs (`published.yaml`) as the planner's own questions, with the seconds a step took."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.parallel.layout import ParallelLayout, parse_layout
from moesaic.plan.hardware import Cluster, load_cluster
from moesaic.plan.models import from_dimensions, load_model
from moesaic.plan.shape import ModelShape
from moesaic.plan.training.workload import TrainingWork
from moesaic.yaml_reader import read_yaml

FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class PublishedRun:
    source: str
    model: ModelShape
    cluster: Cluster
    layout: ParallelLayout
    work: TrainingWork
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.cluster.name} {self.layout} batch {self.work.batch}"


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    raw = read_yaml(FILE.read_text(), FILE.name)
    return tuple(_run(table["source"], row) for table in raw for row in table["runs"])


def _run(source: str, row: dict[str, Any]) -> PublishedRun:
    given = row["model"]
    model = load_model(given) if isinstance(given, str) else from_dimensions(given, FILE.name, "")
    if row.get("parallel_block"):
        model = replace(model, parallel_block=True)
    cluster = load_cluster(row["cluster"])
    layout = parse_layout(row["layout"], cluster.count)
    overlap = row.get("overlap")
    hidden = None if overlap is None else frozenset(() if overlap == "none" else overlap.split(","))
    work = TrainingWork(row["batch"], row["seq"], row.get("dtype", "bf16"), row["recompute"], hidden)
    return PublishedRun(source, model, cluster, layout, work, _seconds(row, model, cluster, work))


def _seconds(row: dict[str, Any], model: ModelShape, cluster: Cluster, work: TrainingWork) -> float:
    if "seconds" in row:
        return float(row["seconds"])
    if "tokens_per_gpu" in row:
        return work.tokens / (row["tokens_per_gpu"] * cluster.count)
    flops = megatron_flops(model, work)
    if "mfu" in row:
        return flops / (row["mfu"] / 100 * cluster.count * cluster.device.peak("bf16"))
    # 2104.04473 counts the recomputed forward pass of the layers too: four thirds.
    return flops * 4 / 3 / (row["tflops"] * 1e12 * cluster.count)


def megatron_flops(model: ModelShape, work: TrainingWork) -> float:
    """As Megatron's tables count: scores of the whole square, not of the causal half."""
    causal = model.training_flops(work.tokens, work.sequence)
    return causal + (causal - 6 * work.tokens * model.active_parameters)
