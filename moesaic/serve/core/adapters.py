"""LoRA adapters: low-rank corrections of a model's matrices, several of them side by side in one pass.

An adapter is a directory as `peft` writes it (adapter_config.json, adapter_model.safetensors). Rows of the flat batch
that belong to a request with an adapter get its correction after the shared product; the model does not know.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.kernels.quantized import QuantizedWeight
from moesaic.model.families import family_for, write_config
from moesaic.model.families.places import Place
from moesaic.model.formats.tensor_file import TensorFile
from moesaic.model.formats.turned import from_disk, turned_in
from moesaic.model.linear import Linear
from moesaic.model.lora import PEFT
from moesaic.model.transformer import Model


@dataclass(frozen=True, eq=False)
class Adapter:
    """`corrections` holds, by the site of the matrix they correct, the down (r, I) and up (O, r) matrices; `digest` is
    of the files they were read from."""

    name: str
    corrections: dict[str, tuple[Tensor, Tensor]]
    digest: str = ""

    def correction(self, site: str) -> tuple[Tensor, Tensor] | None:
        return self.corrections.get(site)


def load_adapter(model: Model, path: str | Path, name: str) -> Adapter:
    """Read an adapter and check that it fits the model."""
    directory = Path(path)
    settings = _settings(directory / "adapter_config.json")
    file = TensorFile(directory / "adapter_model.safetensors")
    parameters: dict[str, Any] = dict(model.named_parameters())  # whole or a rank's rows of them
    parameters |= {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}
    plain = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)}
    layouts = family_for(model.config.family, directory).layouts(model.config)
    places = {place.name: place for candidates in layouts for place in candidates}
    raw = write_config(model.config)[1]
    pieces: dict[str, list[tuple[Place, Tensor, Tensor]]] = {}
    targeted: set[str] = set()
    for key in sorted(file.tensors):
        module, kind, rest = key.partition(".lora_A.")
        if not kind:
            if ".lora_B." in key:
                continue
            raise UserError(file.path, f"{key} is not a part of a LoRA adapter that can be served")
        place = places.get(f"{module.removeprefix(PEFT)}.weight")
        if place is None or place.parameter not in plain:
            remedy = "Adapters may correct the matrices of attention, dense and shared feed-forward layers."
            raise UserError(file.path, f"{module} is no such matrix of this model", remedy)
        if place.parameter.endswith(".kv_up.weight"):
            problem = f"{module} expands cached latents, of all tokens and not those of a step; it cannot be corrected"
            raise UserError(file.path, problem, "Train the adapter without it.")
        partner = f"{module}.lora_B.{rest}"
        if partner not in file.tensors:
            raise UserError(file.path, f"{partner} is missing", "Copy the adapter again.")
        down, up = file.tensor(key), file.tensor(partner)
        rank = down.shape[0]
        if down.shape != (rank, place.shape[1]) or up.shape != (place.shape[0], rank) or not rank:
            shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
            raise UserError(file.path, f"{module}: {shapes} do not correct a matrix of {place.shape}")
        described = _described_rank(settings, module.removeprefix(PEFT))
        if rank != described:
            problem = f"{module} has rank {rank}, and adapter_config.json says {described}"
            raise UserError(file.path, problem, "The two files are of different adapters: copy it again.")
        if not _targeted(settings, module.removeprefix(PEFT)):
            problem = f"{module} is corrected, and is none of adapter_config.json's target_modules"
            raise UserError(file.path, problem, "The two files are of different adapters: copy it again.")
        targeted.add(module.rpartition(".")[2])
        alpha = settings["lora_alpha"]
        up = from_disk(turned_in(raw, place.name), up)
        pieces.setdefault(place.parameter, []).append(
            (place, down, up * (alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank))
        )
    if not pieces:
        raise UserError(file.path, "holds no correction")
    wanted = settings.get("target_modules")
    here = {name.removesuffix(".weight").rpartition(".")[2] for name in places}  # peft skips what a model does not have
    if isinstance(wanted, list) and (missing := {str(one).rpartition(".")[2] for one in wanted} & here - targeted):
        problem = f"holds no correction of {', '.join(sorted(missing))}, which adapter_config.json names"
        raise UserError(file.path, problem, "The two files are of different adapters: copy it again.")
    outputs: dict[str, int] = {}
    for place in places.values():
        rows = place.part[0].stop if place.part and isinstance(place.part[0], slice) else place.shape[0]
        outputs[place.parameter] = max(rows, outputs.get(place.parameter, 0))
    corrections = {
        key.removesuffix(".weight"): _joined(parameters[key], outputs[key], found) for key, found in pieces.items()
    }
    return Adapter(name, corrections, _digest(directory))


def _digest(directory: Path) -> str:
    whole = hashlib.blake2b(digest_size=20)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        whole.update((directory / name).read_bytes())
    return whole.hexdigest()


def _joined(weight: Any, outputs: int, pieces: list[tuple[Place, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Corrections of parts of one matrix (queries, keys, values) as one: their ranks side by side, each to its rows."""
    down_RI = torch.cat([down for _, down, _ in pieces])
    up_OR = torch.zeros(outputs, down_RI.shape[0])
    start = 0
    for place, down, up in pieces:
        up_OR[place.part[0] if place.part else slice(None), start : start + len(down)] = up.float()
        start += len(down)
    return down_RI.to(weight.device, weight.dtype), up_OR.to(weight.device, weight.dtype)


def _settings(path: Path) -> dict[str, Any]:
    settings = read_json(path, "Copy the adapter again.", missing="Give the directory of a LoRA adapter.")
    if settings.get("peft_type") != "LORA":
        raise UserError(path, "does not describe a LoRA adapter")
    for key in ("use_dora", "lora_bias", "modules_to_save", "alpha_pattern", "fan_in_fan_out", "layer_replication"):
        if settings.get(key):
            raise UserError(path, f"{key} is not supported")
    if settings.get("bias", "none") != "none":
        raise UserError(path, "an adapter that changes biases is not supported")
    if not isinstance(settings.get("lora_alpha"), int | float) or not math.isfinite(settings["lora_alpha"]):
        raise UserError(path, "lora_alpha is missing or no number")
    if type(settings.get("r")) is not int or settings["r"] < 1:
        raise UserError(path, "r, the rank, is missing or no number above 0")
    if not isinstance(settings.get("rank_pattern") or {}, dict):
        raise UserError(path, "rank_pattern is no table of ranks")
    if not isinstance(settings.get("target_modules"), str | list):
        raise UserError(path, "target_modules is missing, or neither a list nor a pattern")
    return settings


def _described_rank(settings: dict[str, Any], module: str) -> int:
    """By `rank_pattern`, whose keys are ends of names or patterns of them, or the one rank of all."""
    for pattern, rank in (settings.get("rank_pattern") or {}).items():
        if _matches(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(settings["r"])


def _targeted(settings: dict[str, Any], module: str) -> bool:
    targets = settings["target_modules"]
    if isinstance(targets, str):  # a pattern, unless it stands for all matrices
        return targets == "all-linear" or _matches(targets, module) or _matches(targets, PEFT + module)
    return any(module == one or module.endswith(f".{one}") for one in targets)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error:
        raise UserError("adapter_config.json", f'"{pattern}" is no pattern', "Copy the adapter again.") from None


def rows_by_adapter(adapters: list[tuple[Adapter | None, range]], device: torch.device) -> dict[Adapter, Tensor]:
    """Which rows of a flat batch each adapter corrects."""
    rows: dict[Adapter, list[int]] = {}
    for adapter, own in adapters:
        if adapter is not None:
            rows.setdefault(adapter, []).extend(own)
    return {adapter: torch.tensor(own, device=device) for adapter, own in rows.items()}
