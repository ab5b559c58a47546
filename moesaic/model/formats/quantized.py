"""Quantized weights on disk in our own layout, which can also be read as plain tensors.

In our layout a quantized parameter `layers.0.attention.qkv.weight` is the tensors `....codes` (uint8, packed as
`kernels/quantized.py` multiplies by them), `....scales` and, where codes have no fixed middle, `....zeros`; a
correction of low rank is `....down` and `....up`, which are matrices of the same kind. An expert has its number in the
name. config.json says the bits and the group. Everything else is as the family names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.quantized import BITS, BLOCK, QuantizedMatrix, padded, unpack
from moesaic.model.families import Place, family_for, read_config
from moesaic.model.formats.checkpoint import QUANTIZATION, Checkpoint, QuantizedCheckpoint
from moesaic.model.formats.sparse import filled, kept_inputs, mask_bytes, thinned
from moesaic.model.formats.tensor_file import Part

OURS = "moesaic"
_AGAIN = "Copy it again, or compress the original again."
_SCALES = (torch.float16, torch.float32, torch.bfloat16)
Quantized = QuantizedMatrix | nn.ModuleList
ReadPart = Callable[[str, tuple[int, ...], tuple[torch.dtype, ...]], Tensor]


@dataclass(frozen=True)
class Scheme:
    """How a matrix is kept."""

    bits: int
    group: int
    activation_bits: int = 16
    zeros: bool = False
    rank: int = 0
    correction_bits: int = 8
    correction_group: int = 64
    # N of every M inputs are kept, the others are zero; 0: all are kept.
    n: int = 0
    m: int = 0

    def check(self, place: object) -> None:
        problem = ""
        if self.bits not in BITS or self.correction_bits not in BITS:
            problem = f"{self.bits} bits (corrections {self.correction_bits}) cannot be run"
        elif any(not 0 < size < 2**31 or size % BLOCK for size in (self.group, self.correction_group)):
            problem = f"groups must be multiples of {BLOCK}, not {self.group}"
        elif self.activation_bits not in (8, 16):
            problem = f"activations of {self.activation_bits} bits cannot be run"
        elif not 0 <= self.rank < 2**31:
            problem = f"there is no rank {self.rank}"
        elif (self.n, self.m) != (0, 0) and not (0 < self.n < self.m <= 64 and not self.zeros):
            problem = f"{self.n} of {self.m} weights cannot be kept"
        if problem:
            raise UserError(place, problem, "Compress the original again.")


class OwnLayout(QuantizedCheckpoint):
    """Names and schemes as the docstring above says."""

    def __init__(self, raw: Checkpoint) -> None:
        super().__init__(raw)
        self._default, self._special = _schemes(self._settings, self._where)
        names = {name.removesuffix(".codes") for name in self._stored if name.endswith(".codes")}
        names = {name for name in names if not name.endswith((".up", ".down"))}
        self._names = names
        config = read_config(self.config, self._where)
        layout: list[Place] = family_for(config.family, raw.place).layouts(config)[0]
        wholes: dict[str, list[Place]] = {}
        for place in layout:
            if not place.copy and (place.parameter in names or f"{place.parameter}.0" in names):
                wholes.setdefault(place.parameter, []).append(place)
        self._sizes = {name: _size(places) for name, places in wholes.items()}
        self._places = {place.name: place for places in wholes.values() for place in places}
        self._kept: tuple[str, QuantizedMatrix | None] = ("", None)  # the latest, whose other parts often come next

    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = tuple(f"{name}." for name in self._names)
        plain = {name: shape for name, shape in self._stored.items() if not name.startswith(own)}
        return plain | {name: place.shape for name, place in self._places.items()}

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        if name not in self._places:
            return self._raw.tensor(name, part)
        place = self._places[name]
        dtype = getattr(torch, str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32"))
        if len(self._sizes[place.parameter]) == 2:
            dense = self._matrix(place.parameter, self._sizes[place.parameter]).dense()[place.part or ...]
        elif place.part:
            expert, *rest = place.part
            dense = self._matrix(f"{place.parameter}.{expert}", self._sizes[place.parameter][1:]).dense()
            dense = dense[tuple(rest) or ...]
        else:
            count, *size = self._sizes[place.parameter]
            dense = torch.stack([self._matrix(f"{place.parameter}.{e}", tuple(size)).dense() for e in range(count)])
        return (dense[part] if part else dense).to(dtype)

    def quantized(
        self, parameter: str, places: list[Place], device: torch.device, experts: Sequence[int] | None = None
    ) -> Quantized | None:
        size = self._sizes.get(parameter)
        if size is None:
            return None
        if len(size) == 2:
            return self._read(parameter, size, device)
        wanted = range(size[0]) if experts is None else experts
        return nn.ModuleList(self._read(f"{parameter}.{expert}", size[1:], device) for expert in wanted)

    def schemes(self) -> Iterator[tuple[str, Scheme]]:
        for name in sorted(self._names):
            yield name, self._special.get(name, self._default)

    def _matrix(self, name: str, size: tuple[int, ...]) -> QuantizedMatrix:
        if self._kept[0] != name or self._kept[1] is None:
            self._kept = (name, self._read(name, size, torch.device("cpu")))
        assert self._kept[1] is not None
        return self._kept[1]

    def _read(self, name: str, size: tuple[int, ...], device: torch.device) -> QuantizedMatrix:
        """Its tensors go to the device first: what is done there to lay them out is many small steps."""
        scheme = self._special.get(name, self._default)
        return read_matrix(name, size, scheme, lambda *wanted: self._part(*wanted).to(device))

    def _part(self, name: str, shape: tuple[int, ...], kinds: tuple[torch.dtype, ...]) -> Tensor:
        if name not in self._stored:
            raise UserError(self.place, f"1 tensor missing: {name}", _AGAIN)
        if self._stored[name] != shape:
            raise UserError(self.place, f"{name} is {self._stored[name]}, not {shape}", _AGAIN)
        if self._raw.dtype(name) not in kinds:
            raise UserError(self.place, f"{name} is {self._raw.dtype(name)}", _AGAIN)
        return self._raw.tensor(name)


def read_matrix(name: str, size: tuple[int, ...], scheme: Scheme, part: ReadPart) -> QuantizedMatrix:
    """A matrix from its tensors; `part` reads one that must have a certain shape and type."""

    def one(name: str, size: tuple[int, ...], bits: int, group: int, zeros: bool, activation_bits: int = 16) -> Any:
        outputs, inputs = size
        of_groups = (-(-inputs // group), outputs)
        return QuantizedMatrix(
            part(f"{name}.codes", (outputs, padded(inputs) * bits // 8), (torch.uint8,)),
            part(f"{name}.scales", of_groups, _SCALES).float(),
            part(f"{name}.zeros", of_groups, _SCALES).float() if zeros else None,
            inputs=inputs,
            bits=bits,
            group=group,
            activation_bits=activation_bits,
        )

    if scheme.m:
        return _read_sparse(name, size, scheme, part)
    made: QuantizedMatrix = one(name, size, scheme.bits, scheme.group, scheme.zeros, scheme.activation_bits)
    if scheme.rank:
        bits, group = scheme.correction_bits, scheme.correction_group
        made.down_RI = one(f"{name}.down", (scheme.rank, size[1]), bits, group, False)
        made.up_OR = one(f"{name}.up", (size[0], scheme.rank), bits, group, False)
    return made


def _read_sparse(name: str, size: tuple[int, ...], scheme: Scheme, part: ReadPart) -> QuantizedMatrix:
    (outputs, inputs), bits = size, scheme.bits
    width = padded(kept_inputs(inputs, scheme.n, scheme.m)) * bits // 8
    packed = part(f"{name}.codes", (outputs, width), (torch.uint8,))
    mask = part(f"{name}.mask", (outputs, mask_bytes(inputs)), (torch.uint8,))
    codes_OI = filled(packed.cpu(), mask.cpu(), inputs, bits, scheme.n, scheme.m)
    if codes_OI is None:
        raise UserError(name, f"the mask does not keep {scheme.n} of every {scheme.m} weights", _AGAIN)
    scales_GO = part(f"{name}.scales", (-(-inputs // scheme.group), outputs), _SCALES).float()
    codes_OI = codes_OI.to(scales_GO.device)
    made = QuantizedMatrix.of(codes_OI, scales_GO.T, None, bits, scheme.group, scheme.activation_bits)
    made.kept = (scheme.n, scheme.m)
    return made


def _size(places: list[Place]) -> tuple[int, ...]:
    """The shape of a parameter of which these are all parts."""
    first = places[0]
    if not first.part:
        return first.shape
    if isinstance(first.part[0], slice):
        return (sum(place.shape[0] for place in places), *first.shape[1:])
    experts = len({place.part[0] for place in places})
    one = sum(prod(place.shape) for place in places if place.part[0] == first.part[0])
    return (experts, one // first.shape[-1], first.shape[-1])


def tensors_of(name: str, matrix: QuantizedMatrix) -> Iterator[tuple[str, Tensor]]:
    """What is written for a matrix."""
    if matrix.kept is None:
        yield f"{name}.codes", matrix.codes
    else:
        codes_OI = unpack(matrix.codes, matrix.bits)[:, : matrix.shape[1]]
        packed, mask = thinned(codes_OI, matrix.bits, *matrix.kept)
        yield f"{name}.codes", packed
        yield f"{name}.mask", mask
    yield f"{name}.scales", matrix.scales_GO.half()
    if matrix.zeros_GO is not None:
        yield f"{name}.zeros", matrix.zeros_GO.half()
    if matrix.down_RI is not None and matrix.up_OR is not None:
        yield from tensors_of(f"{name}.down", matrix.down_RI)
        yield from tensors_of(f"{name}.up", matrix.up_OR)


def scheme_of(matrix: QuantizedMatrix) -> Scheme:
    zeros = matrix.zeros_GO is not None
    if matrix.down_RI is None:
        n, m = matrix.kept or (0, 0)
        return Scheme(matrix.bits, matrix.group, matrix.activation_bits, zeros, n=n, m=m)
    down = matrix.down_RI
    return Scheme(matrix.bits, matrix.group, matrix.activation_bits, zeros, down.shape[0], down.bits, down.group)


def settings_of(schemes: dict[str, Scheme]) -> dict[str, Any]:
    """config.json's part: the most frequent scheme, and the matrices that are kept otherwise."""
    kinds = list(schemes.values())
    default = max(set(kinds), key=kinds.count)
    special = {name: plain_scheme(scheme) for name, scheme in schemes.items() if scheme != default}
    return {"quant_method": OURS, "format": 1, "default": plain_scheme(default), "matrices": special}


def plain_scheme(scheme: Scheme) -> dict[str, int]:
    return {field.name: int(getattr(scheme, field.name)) for field in fields(Scheme)}


def _schemes(settings: Any, where: Path) -> tuple[Scheme, dict[str, Scheme]]:
    special = settings.get("matrices", {})
    if settings.get("format") != 1 or not isinstance(special, dict):
        raise UserError(where, f"{QUANTIZATION}: not a form of compression that is known here", _AGAIN)
    return read_scheme(settings.get("default"), where), {n: read_scheme(raw, where) for n, raw in special.items()}


def read_scheme(raw: Any, where: Path) -> Scheme:
    known = {field.name for field in fields(Scheme)}
    if not isinstance(raw, dict) or not raw.keys() <= known or any(type(n) is not int for n in raw.values()):
        raise UserError(where, f"{QUANTIZATION}: {str(raw)[:80]!r} is no scheme", _AGAIN)
    try:
        made = Scheme(**raw)
    except TypeError:
        raise UserError(where, f"{QUANTIZATION}: a scheme needs bits and group", _AGAIN) from None
    made.check(where)
    return made
