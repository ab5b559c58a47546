"""How ranks work together, besides the layout: what a recipe's `parallel` section says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelOptions:
    exact: bool = False  # sums in the order of ranks: the bits of one process that accumulates as many micro-batches
    chunks: int = 1  # groups of experts whose rows travel while others compute
    dispatch: Literal["plain", "once", "node"] = "plain"  # once: a token crosses to a rank once; node: to a node once
    node_ranks: int = 0  # ranks of each node; 0: as torchrun says
    context: Literal["ulysses", "mesh", "ring"] = "ulysses"  # how ranks that share sequences attend
    replicas: int = 1  # copies of what FSDP divides (HSDP): gradients of copies are added up between them
    shadow: int | Literal["auto"] = 0  # experts most tokens want, that go to all ranks in place of their tokens
    tiles: int = 1  # of rows, that travel while others are multiplied (tensor parallel)
    regather: bool = False  # gathered rows again in the backward pass, in place of keeping them (tensor parallel)
    schedule: str = "1f1b"  # of a pipeline
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; none given: as equal as can be
    timeout: float = 600.0  # seconds within which a rank that holds the others up is named, and the run ended
    trace: bool = False  # what every rank did when, and who was slow
    trace_every: int = 10  # steps between two reports of who was slow
    redundancy: bool = False  # each rank's state in its neighbour's memory, after every step
    redundancy_folder: str | None = None  # of the machine's own memory or disk; by default its shared memory
