"""Read a rank's share of a model from its directory: only the slices it holds, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.kernels import Kernels, hardware
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.directory import StoredWeights, assign, install, load
from moesaic.model.families import Place
from moesaic.model.families.places import by_parameter
from moesaic.model.formats.checkpoint import Source
from moesaic.parallel.boxes import stored_boxes
from moesaic.parallel.parts import Part, Region, Slices, regions
from moesaic.serve.group.kernels import GroupKernels
from moesaic.serve.group.share_model import ShareModel
from moesaic.serve.group.shares import EXPERTS, Share, check, localize
from moesaic.serve.group.worker_group import WorkerGroup


def load_share(group: WorkerGroup, directory: str | Path, load_options: dict[str, Any]) -> ShareModel:
    """This rank's part of a model, whose `ops` talk to the others."""
    options = {"device": group.device, **load_options}
    if not options.get("threads") and torch.device(options["device"] or "cpu").type == "cpu":
        options["threads"] = max(1, hardware.threads() // group.neighbours)
    model = cast(ShareModel, load(directory, **options, filler=partial(fill_share, group)))
    model.ops = cast(Kernels, GroupKernels(model.ops, group, model.config))
    return model


def fill_share(group: WorkerGroup, stored: StoredWeights) -> ShareModel:
    config, source, places, dtype, device, mode = stored
    check(config, group.layout)
    with torch.device("meta"):
        model = ShareModel(config, mode)
    share, read = Share(config, group.layout, group.rank), stored_boxes(source)
    found = by_parameter(places)
    for name, blank in list(model.state_dict().items()):
        if group.experts_away and name.rpartition(".")[2] in EXPERTS:
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], None)
            continue
        part = share.part(name, blank.shape)
        if (matrix := _quantized(source, name, found[name], blank, part, share, device)) is not None:
            install(model, name, matrix, dtype)
        else:
            assign(model, name, plain_part(read, name, blank.shape, part, dtype, device), trained=False)
    localize(model, group.layout)
    return model


def plain_part(
    read: Callable[[str, Slices], Tensor],
    name: str,
    shape: torch.Size,
    part: Part | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    # The balance bias decides between near-equal scores, so it keeps full precision.
    kind = torch.float32 if name.endswith("correction") else dtype
    own = torch.empty(part.shape(shape) if part is not None else tuple(shape), dtype=kind, device=device)
    for region in regions(shape, part):
        for piece in _by_expert(region) if len(shape) == 3 else (region,):
            own[piece.here].copy_(read(name, piece.whole))
    return own


def _by_expert(region: Region) -> Iterator[Region]:
    """One expert at a time: where all are one tensor on disk, never more of it is in memory."""
    shift = region.here[0].start - region.whole[0].start
    for expert in range(region.whole[0].start, region.whole[0].stop):
        here = slice(expert + shift, expert + shift + 1)
        yield Region((slice(expert, expert + 1), *region.whole[1:]), (here, *region.here[1:]))


def _quantized(
    source: Source,
    name: str,
    places: list[Place],
    blank: Tensor,
    part: Part | None,
    share: Share,
    device: torch.device,
) -> QuantizedMatrix | nn.ModuleList | None:
    """A quantized matrix stays so; None for a plain one."""
    read = getattr(source, "quantized", None)
    if read is None:
        return None
    if name.rpartition(".")[2] in EXPERTS:
        found = read(name, places, device, experts=share.experts(len(blank)))
        if found is None or part is None or part.dim == 0:
            return cast("nn.ModuleList | None", found)
        return nn.ModuleList(rows_of(matrix, part.pieces) for matrix in found)
    found = read(name, places, device)
    return found if found is None or part is None else rows_of(found, part.pieces)


def rows_of(matrix: QuantizedMatrix, pieces: tuple[tuple[int, int], ...]) -> QuantizedMatrix:
    """Some outputs of a quantized matrix."""
    rows = torch.cat([torch.arange(start, stop) for start, stop in pieces]).to(matrix.device)
    zeros_GO = matrix.zeros_GO
    made = QuantizedMatrix(
        matrix.codes[rows],
        matrix.scales_GO[:, rows].contiguous(),
        None if zeros_GO is None else zeros_GO[:, rows].contiguous(),
        inputs=matrix.shape[1],
        bits=matrix.bits,
        group=matrix.group,
        activation_bits=matrix.activation_bits,
    )
    made.dtype, made.kept, made.down_RI = matrix.dtype, matrix.kept, matrix.down_RI
    made.up_OR = None if matrix.up_OR is None else rows_of(matrix.up_OR, pieces)
    return made
