"""Quantized weights as `transformers` and vLLM keep them: the compressed-tensors layout, read and written.

Read: integer weights, packed (`pack-quantized`) or not (`int-quantized`), per group or channel, with activations in
float or quantized per token; and MXFP4, as the integers of 5 bits that its numbers are with half the scale. Written:
integers; `float_layouts.py` has the floating-point formats.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.quantized import BITS, BLOCK, QuantizedMatrix, padded, unpack
from moesaic.model.families import Place
from moesaic.model.formats import float4, float_layouts
from moesaic.model.formats.checkpoint import QUANTIZATION, Checkpoint
from moesaic.model.formats.float8 import plain_dtype
from moesaic.model.formats.packed import CPU, PackedModules, pack32, unpack32
from moesaic.model.formats.quantized import Scheme

_REMEDY = "Take integer weights of 1 to 6 or 8 bits, per group or channel, or FP8, MXFP4 or NVFP4."


class Arguments(NamedTuple):
    """What a config group says of its modules' weights."""

    bits: int
    symmetric: bool  # the codes' middle is zero
    group: int  # 0: the whole channel
    activation_bits: int
    mxfp4: bool = False


class CompressedTensors(PackedModules):
    def __init__(self, raw: Checkpoint) -> None:
        super().__init__(raw)
        self._groups = _groups(self._settings, self._where)
        self._modules = {name.removesuffix(".weight_scale") for name in self._stored if name.endswith(".weight_scale")}

    def _kind(self, module: str) -> torch.dtype:
        found = self._raw.dtype(f"{module}.weight_scale")
        return found if found.is_floating_point else plain_dtype(self.config, self._where)

    def _size(self, module: str) -> tuple[int, ...]:
        if self._arguments(module).mxfp4 and len(self._stored.get(f"{module}.weight_packed", ())) == 2:
            outputs, width = self._stored[f"{module}.weight_packed"]
            return outputs, width * 2
        if f"{module}.weight" in self._stored:
            return self._stored[f"{module}.weight"]
        shape = f"{module}.weight_shape"
        if self._stored.get(shape) != (2,) or f"{module}.weight_packed" not in self._stored:
            raise UserError(self.place, f"{module} has no weights", "Copy it again.")
        outputs, inputs = self._raw.tensor(shape).tolist()
        bits = self._arguments(module).bits
        if self._stored[f"{module}.weight_packed"] != (outputs, -(-inputs * bits // 32)):
            raise UserError(self.place, f"{module}.weight_packed does not hold {outputs}x{inputs}", "Copy it again.")
        return int(outputs), int(inputs)

    def _arguments(self, module: str) -> Arguments:
        for targets, arguments in self._groups:
            for target in targets:
                if target in ("Linear", module) or (target.startswith("re:") and re.match(target[3:], module)):
                    return arguments
        raise UserError(self._where, f"{QUANTIZATION}: nothing is said about {module}", _REMEDY)

    def _matrix(self, module: str, device: torch.device = CPU) -> QuantizedMatrix:
        bits, symmetric, group, activation_bits, mxfp4 = self._arguments(module)
        outputs, inputs = self._size(module)
        if mxfp4:
            return self._mxfp4(module, outputs, inputs, device)
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
            words = self._raw.tensor(f"{module}.weight_packed")
            if words.dtype != torch.int32:
                raise UserError(self.place, f"{module} is not packed in words of 32 bits", _REMEDY)
            codes_OI = unpack32(words, bits, inputs)
        else:
            weights_OI = self._raw.tensor(f"{module}.weight")
            if weights_OI.dtype != torch.int8:
                raise UserError(self.place, f"{module}.weight is {weights_OI.dtype}", _REMEDY)
            codes_OI = (weights_OI.int() + middle).to(torch.uint8)
        zeros_OG = None
        if not symmetric:
            if f"{module}.weight_zero_point" not in self._stored:
                raise UserError(self.place, f"1 tensor missing: {module}.weight_zero_point", "Copy it again.")
            zeros_OG = self._raw.tensor(f"{module}.weight_zero_point")
            if zeros_OG.dtype == torch.int32:
                zeros_OG = unpack32(zeros_OG.T.contiguous(), bits, outputs).T.float()
            else:
                zeros_OG = zeros_OG.float() + middle
            if zeros_OG.shape != scales_OG.shape:
                raise UserError(self.place, f"{module}: zero points {tuple(zeros_OG.shape)}", _REMEDY)
        zeros_OG = None if zeros_OG is None else zeros_OG.to(device)
        return QuantizedMatrix.of(codes_OI.to(device), scales_OG.to(device), zeros_OG, bits, group, activation_bits)

    def _mxfp4(self, module: str, outputs: int, inputs: int, device: torch.device) -> QuantizedMatrix:
        packed, exponents_OG = (self._raw.tensor(f"{module}.weight_{of}") for of in ("packed", "scale"))
        if packed.dtype != torch.uint8 or exponents_OG.dtype != torch.uint8:
            raise UserError(self.place, f"{module} is not e2m1 with e8m0 scales in bytes", _REMEDY)
        if exponents_OG.shape != (outputs, -(-inputs // float4.MXFP4_GROUP)):
            problem = f"{module}: scales {tuple(exponents_OG.shape)} for {outputs}x{inputs}"
            raise UserError(self.place, problem, _REMEDY)
        return float4.mxfp4_matrix(packed, exponents_OG, device)


def _groups(settings: dict[str, Any], where: Path) -> list[tuple[list[str], Arguments]]:
    def wrong(problem: str) -> UserError:
        return UserError(where, f"{QUANTIZATION}: {problem}", _REMEDY)

    found = []
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise wrong("no config_groups")
    if settings.get("kv_cache_scheme"):
        raise wrong("a quantized cache is not read")
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise wrong(f"{str(name)[:60]!r} says nothing about weights")
        weights, inputs, targets = group["weights"], group.get("input_activations"), group.get("targets")
        bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size") or 0
        mxfp4 = (weights.get("type"), bits, strategy, size) == ("float", 4, "group", float4.MXFP4_GROUP)
        if mxfp4:
            inputs = None  # rounding of activations is left out
        elif bits not in BITS or weights.get("type") != "int" or strategy not in ("group", "channel", "tensor"):
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
        for target in targets:
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise wrong(f"the target {target[:60]!r} is no pattern ({error})") from None
        symmetric = bool(weights.get("symmetric", True))
        group_size = size if strategy == "group" else 0
        found.append((targets, Arguments(bits, symmetric, group_size, activation_bits, mxfp4)))
    # Names first, then whole classes of layers.
    return sorted(found, key=lambda entry: "Linear" in entry[0])


Made = tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]


def entries_for(place: Place, scheme: Scheme, matrix: Callable[[], QuantizedMatrix], where: Path) -> Iterator[Made]:
    """What is written for the part of a matrix that `place` names; scales stay in half precision."""
    rows = slice(None)
    if place.part and isinstance(place.part[-1], slice):
        rows = place.part[-1]
    module, (outputs, inputs) = place.name.removesuffix(".weight"), place.shape
    groups = -(-inputs // scheme.group)
    problem = ""
    if scheme.rank:
        problem = "has no place for corrections of low rank"
    elif groups > 1 and inputs % scheme.group:
        problem = f"has no groups of {scheme.group} for {inputs} inputs ({place.name})"
    if problem:
        raise UserError(where, f"the compressed-tensors layout {problem}", "Leave out --layout, or choose otherwise.")

    def codes() -> Tensor:
        found = matrix()
        return unpack(found.codes[rows], found.bits)[:, :inputs]

    def zeros() -> Tensor:
        found_GO = matrix().zeros_GO
        assert found_GO is not None
        zeros_GO = found_GO[:, rows]
        if not bool((zeros_GO == zeros_GO.round()).all()):
            problem = "the compressed-tensors layout has whole zero points only"
            raise UserError(where, problem, "Leave out --layout.")
        return pack32(zeros_GO.to(torch.uint8).contiguous(), scheme.bits).T.contiguous()

    if scheme.activation_bits == 8 and scheme.bits == 8:
        yield f"{module}.weight", torch.int8, (outputs, inputs), lambda: (codes().int() - 128).to(torch.int8)
    else:
        words = (outputs, -(-inputs * scheme.bits // 32))
        yield f"{module}.weight_packed", torch.int32, words, lambda: pack32(codes(), scheme.bits)
        yield f"{module}.weight_shape", torch.int64, (2,), lambda: torch.tensor([outputs, inputs])
        if scheme.zeros:
            shape = (-(-outputs * scheme.bits // 32), groups)
            yield f"{module}.weight_zero_point", torch.int32, shape, zeros
    scales = f"{module}.weight_scale"
    yield scales, torch.float16, (outputs, groups), lambda: matrix().scales_GO[:, rows].T.contiguous()


def settings_for(kinds: dict[str, Scheme | str], plain: list[str]) -> dict[str, Any]:
    """config.json's part, from the scheme of each module (group 0: a whole channel) or the name of its floating-point
    format; `plain` are linear modules that were left as they are."""
    by_scheme: dict[Scheme | str, list[str]] = defaultdict(list)
    for module, scheme in kinds.items():
        by_scheme[scheme].append(module)
    most = max(by_scheme, key=lambda scheme: len(by_scheme[scheme]))
    groups = {}
    for number, (scheme, modules) in enumerate(by_scheme.items()):
        targets = ["Linear"] if scheme == most else sorted(modules)
        about = float_layouts.described(scheme) if isinstance(scheme, str) else _described(scheme)
        groups[f"group_{number}"] = {**about, "targets": targets}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def _described(scheme: Scheme) -> dict[str, Any]:
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": not scheme.zeros,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group or None,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "weights": weights,
        "input_activations": inputs if scheme.activation_bits == 8 else None,
        "format": "int-quantized" if scheme.activation_bits == 8 and scheme.bits == 8 else "pack-quantized",
    }
