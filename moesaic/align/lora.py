"""A stage's option `lora`: an adapter is trained (LoRA), and the model it corrects stays as it is.

lora: {rank: 16, alpha: 32, targets: [q_proj, v_proj]}
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.errors import UserError
from moesaic.model.config import ModelConfig
from moesaic.model.formats.checkpoint import Source
from moesaic.model.formats.opening import is_compressed
from moesaic.model.lora import Lora, adaptable, known_to_peft, target
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.recipe import Recipe
from moesaic.strict import did_you_mean

ROUTED = "routed experts and routers are no plain matrices, and stay as they are"
WITHOUT = dict.fromkeys(("experts", "gate_up_proj", "router", "gate"), ROUTED)
WITHOUT["kv_b_proj"] = "it expands cached latents, of all tokens and not those of a step"


@dataclass(frozen=True)
class LoraOptions:
    rank: int = 16
    alpha: float = 32.0  # the correction counts alpha / rank
    targets: tuple[str, ...] = ()  # last words of matrices' names on disk; none: all that peft can hold

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < float("inf"):
            raise ValueError("lora: rank is at least 1, and alpha above 0")

    def check(self, recipe: Recipe, source: Source, config: ModelConfig, layout: ParallelLayout, key: str) -> None:
        """Refuse what cannot be trained, before any stage is run."""
        if is_compressed(source):
            problem = "the base is quantized, and gradients through it (QLoRA) are not written"
            raise UserError(f"{key}: {source.place}", problem, "Name the model it was made from.")
        if layout.devices > 1:
            raise UserError(key, "an adapter is trained by one process", "Run it without torchrun.")
        for option in ("constraint", "indexer"):
            if getattr(recipe.train, option) is not None:
                problem = "changes weights that an adapter leaves as they are"
                raise UserError(f"train.{option}", problem, f"Leave it out, or {key}.")
        with torch.device("meta"):
            known = sorted({target(place) for parts in adaptable(Model(config)).values() for place in parts})
        for name in self.targets:
            if name in known:
                continue
            problem = f"no matrix is called {name}{did_you_mean(name, known)}"
            if name in WITHOUT:
                problem = f"{name} cannot be corrected: {WITHOUT[name]}"
            raise UserError(f"{key}.targets", problem, f"Known: {', '.join(known)}.")
        if not known:
            raise UserError(key, "the model has no matrix that an adapter could correct", "Leave lora out.")

    def attach(self, model: Model, seed: int) -> None:
        model.lora = Lora(model, self.rank, self.alpha, self.targets, seed)

    def said(self, model: Model) -> str:
        """How little is trained, for the log."""
        assert model.lora is not None
        trained = sum(parameter.numel() for parameter in model.lora.parameters())
        whole = sum(parameter.numel() for name, parameter in model.named_parameters() if not name.startswith("lora."))
        share = f"{trained:,} of {whole:,} parameters ({100 * trained / whole:.2g} %)"
        beyond = set(self.targets) - known_to_peft(model)
        peft = (
            f"; peft takes {', '.join(sorted(beyond))} for matrices of experts and cannot load this" if beyond else ""
        )
        return f"LoRA of rank {self.rank} on {model.lora.matrices} matrices: {share} are trained, others frozen{peft}"
