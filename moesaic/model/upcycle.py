"""FastMoE's idea: a dense model becomes a mixture of experts that answers as the dense model did.

Every expert begins as the dense feed-forward network, or as one of `split` slices of it. The slices of one copy share
a row of the router, so a token takes whole copies; their weights sum to one, and the sum of the slices is the dense
network. `perturb` adds noise to the copies (a share of each matrix's spread), which gives up equality for diversity.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model import directory
from moesaic.model.config import Dense, Experts, ModelConfig
from moesaic.model.encoder import refuse_encoder
from moesaic.model.families import Place, family_for
from moesaic.model.families.places import Part
from moesaic.model.formats.checkpoint import Source
from moesaic.model.value_head import copy_head

MOST = 65536  # experts of a layer


@dataclass(frozen=True)
class Upcycle:
    experts: int
    topk: int
    split: int = 1
    perturb: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Upcycle:
        """From `experts=8,topk=2` and, if wanted, `split=`, `perturb=`, `seed=`."""
        known = {"experts": int, "topk": int, "split": int, "perturb": float, "seed": int}
        values: dict[str, Any] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in known:
                raise UserError("--upcycle", f"no such key {key!r}", f"Known: {', '.join(known)}.")
            if key in values:
                raise UserError("--upcycle", f"{key} is there twice", "Keep one of them.")
            try:
                values[key] = known[key](value)
            except ValueError:
                raise UserError("--upcycle", f"{key}={value} is not a number", "Example: experts=8,topk=2.") from None
        for key in ("experts", "topk"):
            if key not in values:
                raise UserError("--upcycle", f"{key} is missing", "Example: experts=8,topk=2.")
        return cls(**values)

    def check(self, hidden: int) -> None:
        problem = ""
        if self.experts > MOST:
            problem = f"experts is at most {MOST:,}, not {self.experts:,}"
        elif not 0 < self.split <= self.topk <= self.experts:
            problem = f"needs 0 < split <= topk <= experts, not {self.split}, {self.topk}, {self.experts}"
        elif self.experts % self.split or self.topk % self.split:
            problem = f"experts and topk must be multiples of split ({self.split}), so that tokens take whole copies"
        elif hidden % self.split:
            problem = f"the feed-forward size {hidden} does not divide into {self.split}"
        elif not 0 <= self.perturb < 1:
            problem = f"perturb must be from 0 up to 1, not {self.perturb}"
        if problem:
            raise UserError("--upcycle", problem, "Example: experts=8,topk=2.")


def mixture_of(config: ModelConfig, settings: Upcycle, place: object) -> ModelConfig:
    refuse_encoder(config, place, "it has no experts to choose among")
    dense = [layer.ffn for layer in config.layers]
    if config.has_experts or config.mtp:
        raise UserError(place, "is a mixture of experts already", "Upcycle a dense model.")
    layers = []
    for layer, ffn in zip(config.layers, dense, strict=True):
        assert isinstance(ffn, Dense)
        if ffn.bias:
            raise UserError(place, "its feed-forward layers have biases, which experts lack", "Upcycle another model.")
        settings.check(ffn.hidden)
        experts = Experts(settings.experts, settings.topk, ffn.hidden // settings.split)
        layers.append(replace(layer, ffn=experts))
    mixture: str = family_for(config.family, place).TRAITS.mixture
    return replace(config, family=mixture or config.family, layers=tuple(layers))


def upcycle(
    source: Source,
    path: str | Path,
    settings: Upcycle,
    *,
    life: list[dict[str, Any]],
    dtype: torch.dtype | None = None,
    progress: directory.Progress | None = None,
) -> ModelConfig:
    """Write the mixture tensor by tensor; neither model is in memory whole."""
    dense = directory.Parts(source)
    config = mixture_of(dense.config, settings, source.place)

    def tensor(place: Place) -> Tensor:
        layer, _, leaf = place.parameter.rpartition(".ffn.")
        if leaf == "router.weight":
            return _router(config, settings, _seed(settings, place))
        if leaf not in ("gate_up_EGD", "down_EDF"):
            return dense.tensor(place.parameter, place.part)
        if not place.part:  # our own architecture keeps all experts in one tensor
            return torch.stack([_expert(dense, settings, layer, leaf, e, ()) for e in range(settings.experts)])
        expert, *rest = place.part
        assert isinstance(expert, int)
        return _expert(dense, settings, layer, leaf, expert, tuple(rest))

    kind = dtype or getattr(torch, config.dtype)
    head = partial(copy_head, source.place)
    directory.write(path, config, tensor, kind, source.files, life, progress=progress, also=head)
    return config


def _expert(dense: directory.Parts, settings: Upcycle, layer: str, leaf: str, expert: int, part: Part) -> Tensor:
    """One expert's matrix, or its gate or up half: its slice of the dense one, with noise if wanted."""
    hidden = dense.config.layers[0].ffn.hidden
    size = hidden // settings.split
    own = slice(expert % settings.split * size, (expert % settings.split + 1) * size)
    if leaf == "down_EDF":
        # Slices are weighed 1/split each by the normalised router.
        matrix = dense.tensor(f"{layer}.ffn.down.weight")[:, own] * settings.split
    else:
        halves = [dense.tensor(f"{layer}.ffn.gate_up.weight", (slice(h * hidden, (h + 1) * hidden),)) for h in (0, 1)]
        matrix = torch.cat([half[own] for half in halves])
    if settings.perturb:
        generator = torch.Generator().manual_seed(_seed(settings, layer, leaf, expert))
        noise = torch.empty(matrix.shape).normal_(generator=generator)
        matrix = matrix + (settings.perturb * matrix.float().std() * noise).to(matrix.dtype)
    return matrix[part] if part else matrix


def _router(config: ModelConfig, settings: Upcycle, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    copies = settings.experts // settings.split
    rows = torch.empty(copies, config.hidden).normal_(0, config.init_std, generator=generator)
    return rows.repeat_interleave(settings.split, dim=0)


def _seed(settings: Upcycle, *place: object) -> int:
    return zlib.crc32(repr((settings.seed, place)).encode())
