"""Boxes of a model's parameters, read from a directory or made afresh: a rank touches only what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moesaic.model.config import ModelConfig
from moesaic.model.families import Place
from moesaic.model.first_weights import first_parameter
from moesaic.model.formats.checkpoint import Source
from moesaic.model.formats.matching import match
from moesaic.parallel.parts import Region, Slices, overlap


def first_boxes(config: ModelConfig, shapes: dict[str, tuple[int, ...]], seed: int) -> Callable[[str, Slices], Tensor]:
    """Fresh weights."""

    def read(name: str, box: Slices) -> Tensor:
        rows = first_parameter(name, shapes[name], seed, config, (box[0].start, box[0].stop))
        return rows[(slice(None), *box[1:])]

    return read


def stored_boxes(source: Source) -> Callable[[str, Slices], Tensor]:
    """Weights of a model directory."""
    _, places = match(source)
    of: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if not place.copy:
            of[place.parameter].append(place)

    def read(name: str, box: Slices) -> Tensor:
        found = None
        for place in of[name]:
            wanted = Region(box, tuple(slice(0, part.stop - part.start) for part in box))
            common = overlap(wanted, box_of(place))
            if common is None:
                continue
            region, inside = common
            rows, *columns = on_disk(place, inside)
            stored = source.tensor(place.name, (rows,))[(slice(None), *columns)]
            if found is None:
                found = torch.empty([part.stop - part.start for part in box], dtype=stored.dtype)
            found[region.here] = stored.reshape(found[region.here].shape)
        assert found is not None, f"{name} is not stored"
        return found

    return read


def box_of(place: Place) -> Slices:
    """Of its parameter, what a tensor on disk holds. Its last dimensions are those that its part does not name."""
    named = [slice(part, part + 1) if isinstance(part, int) else part for part in place.part if part is not None]
    singles = sum(isinstance(part, int) for part in place.part)
    rest = place.shape[len(place.part) - singles :]
    return (*named, *(slice(0, size) for size in rest))


def on_disk(place: Place, inside: Slices) -> Slices:
    """A box of what a tensor on disk holds, in that tensor's own dimensions."""
    singles = sum(isinstance(part, int) for part in place.part)
    return (*(slice(0, 1) for part in place.part if part is None), *inside[singles:])


def boxes_to_write(places: list[Place], name: str, mine: list[Region]) -> Iterator[tuple[Place, Slices, Slices]]:
    """Of the tensors on disk that hold a parameter: this rank's boxes, there and in its own tensor."""
    for place in places:
        for region in mine if place.parameter == name else ():
            if (common := overlap(region, box_of(place))) is not None:
                yield place, on_disk(place, common[1]), common[0].here
