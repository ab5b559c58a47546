"""Weights of few bits as `transformers` and vLLM keep them: the compressed-tensors layout, read and written.

Read: whole-number weights, packed (`pack-quantized`) or not (`int-quantized`), by group or channel, with activations in
float or rounded by token. Written: the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.quantised import BITS, BLOCK, QuantisedMatrix, padded, unpack
from moesaic.model.checkpoint import Checkpoint
from moesaic.model.compressed import KEY, Quantised, Scheme
from moesaic.model.families import Place
from moesaic.model.tensor_file import Part

_REMEDY = "Take whole-number weights of 1, 2, 3, 4 or 8 bits, by group or channel."


class CompressedTensors:
    """A source, and its matrices as they are."""

    def __init__(self, raw: Checkpoint) -> None:
        self._raw = raw
        self.place, self.files, self.bytes = raw.place, raw.files, raw.bytes
        self._where = raw.place / "config.json"
        self.config = {key: value for key, value in raw.config.items() if key != KEY}
        self._groups = _groups(raw.config[KEY], self._where)
        self._stored = raw.shapes()
        self._modules = {name.removesuffix(".weight_scale") for name in self._stored if name.endswith(".weight_scale")}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, shape in self._stored.items():
            module = name.rpartition(".")[0]
            if module not in self._modules or name == f"{module}.bias":
                found[name] = shape
        return found | {f"{module}.weight": self._size(module) for module in self._modules}

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        module = name.removesuffix(".weight")
        if module not in self._modules or name == module:
            return self._raw.tensor(name, part)
        dense = self._matrix(module).dense().to(self._raw.dtype(f"{module}.weight_scale"))
        return dense[part] if part else dense

    def quantised(self, parameter: str, places: list[Place]) -> Quantised | None:
        modules = [place.name.removesuffix(".weight") for place in places]
        if not any(module in self._modules for module in modules):
            return None
        if not all(module in self._modules for module in modules):
            raise UserError(self.place, f"only some of {', '.join(modules[:3])} are quantised", _REMEDY)
        by_expert: dict[Any, list[QuantisedMatrix]] = defaultdict(list)
        for place, module in zip(places, modules, strict=True):
            expert = place.part[0] if place.part and isinstance(place.part[0], int) else None
            by_expert[expert].append(self._matrix(module))
        joined = {expert: _joined(parts, self.place) for expert, parts in by_expert.items()}
        return joined[None] if None in joined else nn.ModuleList(joined.values())

    def schemes(self) -> Iterator[tuple[str, Scheme]]:
        for module in sorted(self._modules):
            matrix = self._matrix(module)
            yield module, Scheme(matrix.bits, matrix.group, matrix.activation_bits, matrix.zeros_GO is not None)

    def _size(self, module: str) -> tuple[int, ...]:
        if f"{module}.weight" in self._stored:
            return self._stored[f"{module}.weight"]
        shape = f"{module}.weight_shape"
        if self._stored.get(shape) != (2,) or f"{module}.weight_packed" not in self._stored:
            raise UserError(self.place, f"{module} has no weights", "Copy it again.")
        outputs, inputs = self._raw.tensor(shape).tolist()
        bits = self._arguments(module)[0]
        if self._stored[f"{module}.weight_packed"] != (outputs, -(-inputs * bits // 32)):
            raise UserError(self.place, f"{module}.weight_packed does not hold {outputs}x{inputs}", "Copy it again.")
        return int(outputs), int(inputs)

    def _arguments(self, module: str) -> tuple[int, bool, int, int]:
        """Bits, whether the codes' middle is zero, the group (0: the whole channel), bits of activations."""
        for targets, arguments in self._groups:
            for target in targets:
                if target in ("Linear", module) or (target.startswith("re:") and re.match(target[3:], module)):
                    return arguments
        raise UserError(self._where, f"{KEY}: nothing is said about {module}", _REMEDY)

    def _matrix(self, module: str) -> QuantisedMatrix:
        bits, symmetric, group, activation_bits = self._arguments(module)
        outputs, inputs = self._size(module)
        group = group or padded(inputs)
        groups = -(-inputs // group)
        scales_OG = self._raw.tensor(f"{module}.weight_scale").float()
        if scales_OG.numel() == 1:  # one scale for all
            scales_OG = scales_OG.reshape(1, 1).expand(outputs, 1)
        if group % BLOCK or scales_OG.shape != (outputs, groups):
            problem = f"{module}: scales {tuple(scales_OG.shape)} for {outputs}x{inputs} in groups of {group}"
            raise UserError(self.place, problem, _REMEDY)
        if f"{module}.weight_g_idx" in self._stored:
            raise UserError(self.place, f"{module} has its inputs in another order", _REMEDY)
        middle = 2 ** (bits - 1)
        if f"{module}.weight_packed" in self._stored:
            codes_OI = _unpack32(self._raw.tensor(f"{module}.weight_packed"), bits, inputs)
        else:
            weights_OI = self._raw.tensor(f"{module}.weight")
            if weights_OI.dtype != torch.int8:
                raise UserError(self.place, f"{module}.weight is {weights_OI.dtype}", _REMEDY)
            codes_OI = (weights_OI.int() + middle).to(torch.uint8)
        zeros_OG = None
        if not symmetric:
            zeros_OG = self._raw.tensor(f"{module}.weight_zero_point")
            if zeros_OG.dtype == torch.int32:
                zeros_OG = _unpack32(zeros_OG.T.contiguous(), bits, outputs).T.float()
            else:
                zeros_OG = zeros_OG.float() + middle
            if zeros_OG.shape != scales_OG.shape:
                raise UserError(self.place, f"{module}: zero points {tuple(zeros_OG.shape)}", _REMEDY)
        return QuantisedMatrix.of(codes_OI, scales_OG, zeros_OG, bits, group, activation_bits)


def _joined(parts: list[QuantisedMatrix], where: Path) -> QuantisedMatrix:
    """Queries, keys and values, or gate and up, as one."""
    first = parts[0]
    kinds = {(part.bits, part.group, part.activation_bits, part.zeros_GO is None) for part in parts}
    if len(kinds) > 1:
        raise UserError(where, "matrices that are read as one are quantised in different ways", _REMEDY)
    if len(parts) == 1:
        return first
    zeros = [part.zeros_GO for part in parts if part.zeros_GO is not None]
    return QuantisedMatrix(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales_GO for part in parts], dim=1),
        torch.cat(zeros, dim=1) if zeros else None,
        inputs=first.shape[1],
        bits=first.bits,
        group=first.group,
        activation_bits=first.activation_bits,
    )


def _groups(settings: dict[str, Any], where: Path) -> list[tuple[list[str], tuple[int, bool, int, int]]]:
    def wrong(problem: str) -> UserError:
        return UserError(where, f"{KEY}: {problem}", _REMEDY)

    found = []
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise wrong("no config_groups")
    if settings.get("kv_cache_scheme"):
        raise wrong("a quantised cache is not read")
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise wrong(f"{str(name)[:60]!r} says nothing about weights")
        weights, inputs, targets = group["weights"], group.get("input_activations"), group.get("targets")
        bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size") or 0
        if bits not in BITS or weights.get("type") != "int" or strategy not in ("group", "channel", "tensor"):
            raise wrong(f"weights of {bits} bits ({weights.get('type')}, by {strategy}) cannot be run")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise wrong("inputs in another order cannot be run")
        if strategy == "group" and (type(size) is not int or size <= 0):
            raise wrong(f"groups of {size}")
        activation_bits = 16
        if inputs is not None:
            by_token = isinstance(inputs, dict) and inputs.get("dynamic") is True and inputs.get("strategy") == "token"
            if not by_token or inputs.get("num_bits") != 8 or inputs.get("type") != "int":
                raise wrong("activations other than 8 bits by token cannot be run")
            if not inputs.get("symmetric", True):
                raise wrong("activations with a zero point cannot be run")
            activation_bits = 8
        if not isinstance(targets, list) or any(not isinstance(target, str) for target in targets):
            raise wrong("targets are not a list of names")
        symmetric = bool(weights.get("symmetric", True))
        found.append((targets, (bits, symmetric, size if strategy == "group" else 0, activation_bits)))
    # Names first, then whole classes of layers.
    return sorted(found, key=lambda entry: "Linear" in entry[0])


def tensors_for(place: Place, matrix: QuantisedMatrix) -> Iterator[tuple[str, Tensor]]:
    """What is written for the part of a matrix that `place` names; scales stay in half precision."""
    assert matrix.up_OR is None, "the layout has no corrections"
    rows = slice(None)
    if place.part and isinstance(place.part[-1], slice):
        rows = place.part[-1]
    module, (outputs, inputs) = place.name.removesuffix(".weight"), place.shape
    codes_OI = unpack(matrix.codes[rows], matrix.bits)[:, :inputs]
    scales_OG = matrix.scales_GO[:, rows].T.contiguous()
    if matrix.activation_bits == 8 and matrix.bits == 8:
        yield f"{module}.weight", (codes_OI.int() - 128).to(torch.int8)
        yield f"{module}.weight_scale", scales_OG.half()
        return
    yield f"{module}.weight_packed", _pack32(codes_OI, matrix.bits)
    yield f"{module}.weight_scale", scales_OG.half()
    yield f"{module}.weight_shape", torch.tensor([outputs, inputs])
    if matrix.zeros_GO is not None:
        zeros_OG = matrix.zeros_GO[:, rows].T.contiguous()
        assert bool((zeros_OG == zeros_OG.round()).all()), "the layout has whole zero points"
        yield (
            f"{module}.weight_zero_point",
            _pack32(zeros_OG.to(torch.uint8).T.contiguous(), matrix.bits).T.contiguous(),
        )


def settings_for(kinds: dict[str, QuantisedMatrix], plain: list[str]) -> dict[str, Any]:
    """config.json's part, from a matrix for each module; `plain` are linear modules that were left as they are."""
    schemes: dict[str, list[str]] = defaultdict(list)
    made: dict[str, dict[str, Any]] = {}
    for module, matrix in kinds.items():
        scheme = _scheme(matrix)
        schemes[str(scheme)].append(module)
        made[str(scheme)] = scheme
    most = max(schemes, key=lambda key: len(schemes[key]))
    groups = {}
    for number, (key, modules) in enumerate(schemes.items()):
        groups[f"group_{number}"] = {**made[key], "targets": ["Linear"] if key == most else sorted(modules)}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(plain),
        "kv_cache_scheme": None,
    }


def _scheme(matrix: QuantisedMatrix) -> dict[str, Any]:
    whole = matrix.group >= matrix.shape[1]
    weights = {
        "num_bits": matrix.bits,
        "type": "int",
        "symmetric": matrix.zeros_GO is None,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else matrix.group,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    whole_bytes = matrix.activation_bits == 8 and matrix.bits == 8
    return {
        "weights": weights,
        "input_activations": inputs if matrix.activation_bits == 8 else None,
        "format": "int-quantized" if whole_bytes else "pack-quantized",
    }


def _pack32(codes_OI: Tensor, bits: int) -> Tensor:
    """A row as one stream of bits, lowest first, in words of 32."""
    count = codes_OI.shape[1]
    words = -(-count * bits // 32)
    ones = np.unpackbits(codes_OI.numpy()[:, :, None], axis=2, bitorder="little")[:, :, :bits].reshape(
        len(codes_OI), -1
    )
    ones = np.pad(ones, ((0, 0), (0, words * 32 - count * bits)))
    return torch.from_numpy(np.packbits(ones, axis=1, bitorder="little").view(np.int32))


def _unpack32(words: Tensor, bits: int, count: int) -> Tensor:
    ones = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    ones = ones.reshape(len(words), count, bits)
    return torch.from_numpy(np.packbits(ones, axis=2, bitorder="little").squeeze(2))
