"""A compressed model as a directory: quantized matrices in our layout or compressed-tensors', the rest as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.compress.job import Job
from moesaic.errors import UserError
from moesaic.kernels.quantized import padded
from moesaic.model.config import ModelConfig
from moesaic.model.directory import Entry, write_entries
from moesaic.model.families import Place, family_for, write_config
from moesaic.model.formats import compressed_tensors, float_layouts, glm_int
from moesaic.model.formats.checkpoint import GLM_BITS, QUANTIZATION
from moesaic.model.formats.quantized import Scheme, settings_of
from moesaic.model.formats.sparse import kept_inputs, mask_bytes
from moesaic.model.value_head import copy_head

LAYOUTS = ("moesaic", "compressed-tensors", "fp8", "glm-int")


def write(job: Job, config: ModelConfig, out: Path, life: list[dict[str, Any]], layout: str) -> None:
    config, raw = write_config(replace(config, dtype=job.config.dtype))
    layouts: list[list[Place]] = family_for(config.family, out).layouts(config)
    places = [place for place in layouts[0] if not (place.copy and place.name == "lm_head.weight")]
    homes, floats, plain = _homes(job)
    entries: list[Entry] = []
    schemes: dict[str, Scheme] = {}
    modules: dict[str, Scheme | str] = {}
    for place in places:
        names = _names(place, homes | floats)
        if not names:
            entries.append(Entry(place.name, _dtype(place, job), place.shape, partial(_plain, job, plain, place)))
            continue
        if layout == "moesaic":
            for name in names:
                if name not in schemes:
                    size, schemes[name] = job.store.scheme(homes[name], name)
                    entries += _own_entries(job, homes[name], name, size, schemes[name])
            continue
        (name,) = names
        if name in floats:
            home = floats[name]
            modules[place.name.removesuffix(".weight")] = kind = job.store.about(home)["floats"][name]
            numbers = partial(job.store.float_matrix, home, name)
            entries += [Entry(*entry) for entry in float_layouts.entries_for(place, kind, numbers, layout)]
            continue
        size, scheme = job.store.scheme(homes[name], name)
        modules[place.name.removesuffix(".weight")] = replace(scheme, group=0) if scheme.group >= size[1] else scheme
        matrix = partial(job.store.matrix, homes[name], name)
        if layout == "glm-int":
            raw[GLM_BITS] = scheme.bits
            entries += [Entry(*entry) for entry in glm_int.entries_for(place, scheme, matrix)]
            continue
        entries += [Entry(*entry) for entry in compressed_tensors.entries_for(place, scheme, matrix, out)]
    if schemes:
        raw[QUANTIZATION] = settings_of(schemes)
    if modules and layout != "glm-int":
        linear = {place.name.removesuffix(".weight") for place in places if len(place.shape) == 2} | {"lm_head"}
        left = sorted(linear - modules.keys() - {"model.embed_tokens"})
        settings = float_layouts.fp8_settings(left) if layout == "fp8" else None
        raw[QUANTIZATION] = settings or compressed_tensors.settings_for(modules, left)
    write_entries(out, raw, entries, job.parts.source.files, life, also=partial(copy_head, job.source))


def _homes(job: Job) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Which part of the layer store holds a quantized matrix, which one of floating-point numbers, and which a plain
    tensor."""
    matrices: dict[str, str] = {}
    floats: dict[str, str] = {}
    plain: dict[str, str] = {}
    for part in job.store.names():
        about = job.store.about(part)
        matrices |= dict.fromkeys(about["matrices"], part)
        floats |= dict.fromkeys(about["floats"], part)
        plain |= dict.fromkeys(about["plain"], part)
    return matrices, floats, plain


def _names(place: Place, homes: dict[str, str]) -> list[str]:
    """The quantized matrices that a tensor on disk would be made of; none for a plain one."""
    names = [place.parameter]
    if place.part and isinstance(place.part[0], int):
        names = [f"{place.parameter}.{place.part[0]}"]
    elif len(place.shape) == 3:
        names = [f"{place.parameter}.{expert}" for expert in range(place.shape[0])]
    return names if names[0] in homes else []


def _plain(job: Job, homes: dict[str, str], place: Place) -> Tensor:
    name, part = place.parameter, place.part
    if name in homes:
        whole = job.store.plain(homes[name], name)
        return whole[part] if part else whole
    if f"{name}.0" in homes:  # experts one by one
        if not part:
            return torch.stack([job.store.plain(homes[f"{name}.{e}"], f"{name}.{e}") for e in range(place.shape[0])])
        expert, *rest = part
        return job.store.plain(homes[f"{name}.{expert}"], f"{name}.{expert}")[tuple(rest) or ...]
    return job.parts.tensor(name, part)


def _dtype(place: Place, job: Job) -> torch.dtype:
    return torch.float32 if place.parameter.endswith("correction") else job.dtype


def _own_entries(job: Job, home: str, name: str, size: tuple[int, ...], scheme: Scheme) -> Iterator[Entry]:
    def one(name: str, size: tuple[int, ...], bits: int, group: int, zeros: bool) -> Iterator[Entry]:
        outputs, inputs = size
        of_groups = (-(-inputs // group), outputs)
        yield _stored(job, home, f"{name}.codes", torch.uint8, (outputs, padded(inputs) * bits // 8))
        yield _stored(job, home, f"{name}.scales", torch.float16, of_groups)
        if zeros:
            yield _stored(job, home, f"{name}.zeros", torch.float16, of_groups)

    if scheme.m:
        outputs, inputs = size
        width = padded(kept_inputs(inputs, scheme.n, scheme.m)) * scheme.bits // 8
        yield _stored(job, home, f"{name}.codes", torch.uint8, (outputs, width))
        yield _stored(job, home, f"{name}.mask", torch.uint8, (outputs, mask_bytes(inputs)))
        yield _stored(job, home, f"{name}.scales", torch.float16, (-(-inputs // scheme.group), outputs))
        return
    yield from one(name, size, scheme.bits, scheme.group, scheme.zeros)
    if scheme.rank:
        bits, group = scheme.correction_bits, scheme.correction_group
        yield from one(f"{name}.down", (scheme.rank, size[1]), bits, group, False)
        yield from one(f"{name}.up", (size[0], scheme.rank), bits, group, False)


def _stored(job: Job, home: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Entry:
    return Entry(name, dtype, shape, partial(job.store.plain, home, name))


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise UserError("--layout", f'no such layout "{layout}"', f"Take {', '.join(LAYOUTS)}.")
