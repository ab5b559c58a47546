"""How a run is divided among devices: the section `parallel` of a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from moesaic.recipe_sections import Count, Natural, Section


class ParallelSection(Section):
    """Many devices: started by torchrun, one process each. dp x cp x tp x pp of them; ep lies within dp x cp x tp."""

    headings: ClassVar[dict[str, str]] = {
        "layout": "who holds what",
        "exact": "the same bits",
        "chunks": "faster experts and attention",
        "schedule": "pipelines",
        "timeout": "staying up",
    }

    layout: str | None = Field(None, description="a layout in one text, or the file that moesaic plan --save wrote")
    dp: int = Field(0, ge=0, description="data parallel: ranks that see other sequences; 0: all that are left")
    tp: Count = Field(1, description="tensor parallel, with sequence parallel between matmuls")
    cp: Count = Field(1, description="context parallel: ranks that share every sequence")
    pp: Count = Field(1, description="pipeline stages")
    ep: Count = Field(1, description="expert parallel: ranks that share one set of experts")
    zero: int = Field(
        2, ge=0, le=3, description="0: data ranks hold everything; 1, 2: FSDP; 3: parameters gathered layer by layer"
    )
    interleave: Count = Field(1, description="chunks of layers per pipeline rank")
    exact: bool = Field(
        False, description="add up in the order of ranks: the bits of one process that accumulates (dp, ep)"
    )
    chunks: Count = Field(1, description="groups of a rank's experts whose tokens travel while others compute")
    dispatch: Literal["plain", "once", "node"] = Field(
        "plain", description="once: a token crosses to a rank once, however many experts there want it; node: to a node"
    )
    node_ranks: int = Field(0, ge=0, description="ranks of each node, for dispatch=node; 0: as torchrun says")
    context: Literal["ulysses", "mesh", "ring"] = Field(
        "ulysses", description="context parallel: by heads (all-to-all), or by tiles of queries and keys"
    )
    replicas: Count = Field(1, description="HSDP: copies of what FSDP divides, as between nodes; divides dp")
    shadow: Natural | Literal["auto"] = Field(
        0, description="copy so many experts, those most tokens want, to all ranks; auto: where it sends less"
    )
    tiles: Count = Field(1, description="tensor parallel: tiles of rows that travel while others are multiplied")
    regather: bool = Field(
        False, description="tensor parallel: gather rows again in the backward pass, not keep them (memory for bytes)"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        "1f1b", description="of a pipeline; its micro-batches are train.accumulate"
    )
    stages: tuple[int, ...] = Field((), description="layers of each pipeline stage; by default as equal as can be")
    timeout: float = Field(
        600.0, gt=0, description="seconds within which a rank that holds the others up is named, and the run ended"
    )
    trace: bool = Field(False, description="record what every rank does when, and report who is slow; takes time")
    trace_every: Count = Field(10, description="steps between two reports of who is slow")
    redundancy: bool = Field(False, description="keep every rank's state in its neighbour's memory: no step is lost")
    redundancy_folder: str | None = Field(
        None, description="where, on each machine; by default its shared memory (/dev/shm)"
    )
