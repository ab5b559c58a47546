"""DSA's indexers learn as DeepSeek-V3.2 and GLM-5 teach them: from dense attention at first, then from the tokens that
they select themselves.

train: {indexer: {warmup_steps: 200}}

The model learns nothing from the indexers' loss, and they nothing from the model's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.attention import LightningIndexer
from moesaic.model.config import Latent, ModelConfig
from moesaic.model.context import Routing
from moesaic.model.transformer import Model
from moesaic.recipe_sections import TrainSection


class IndexerTraining:
    """With nothing asked for, a step is the plain one, to the bit."""

    def __init__(self, settings: TrainSection, model: Model, ranks: int = 1) -> None:
        check(settings, model.config, ranks)
        self.settings = settings.indexer
        self.freezing = False  # everything but indexers, in the step that is taken
        self.teach: Literal["dense", "sparse"] | None = None
        if self.settings is None:
            return
        own = self.settings.frozen
        self.freezes = own if own is not None else settings.init is not None
        indexers = [module for module in model.modules() if isinstance(module, LightningIndexer)]
        learning = {parameter for indexer in indexers for parameter in indexer.parameters()}
        self.others = [p for p in model.parameters() if p not in learning and p.requires_grad]

    def begin_step(self, step: int) -> None:
        if self.settings is None:
            return
        self.teach = "dense" if step < self.settings.warmup_steps else "sparse"
        self.freezing = self.freezes and self.teach == "dense"
        for parameter in self.others:
            parameter.requires_grad_(not self.freezing)

    def routing(self, routing: Routing) -> Routing:
        """What a forward of this step notes, with how indexers learn."""
        routing.teach = self.teach
        return routing

    def losses(self, routing: Routing, share: float) -> dict[str, Tensor]:
        """The mean over indexers; `share` is this part's share of the batch."""
        if self.settings is None or not routing.indexer_losses:
            return {}
        each = [torch.stack(served).mean() for served in routing.indexer_losses.values()]
        return {"indexer": torch.stack(each).mean() * (self.settings.weight * share)}


def check(settings: TrainSection, config: ModelConfig, ranks: int = 1) -> None:
    attention = config.attention
    if settings.indexer is not None and ranks > 1:
        problem = "compares whole rows of attention, and ranks divide them"
        raise UserError("train.indexer", problem, "Run it in one process.")
    if settings.indexer is not None and not (isinstance(attention, Latent) and attention.indexer):
        problem = "the model's attention has no indexer"
        raise UserError("train.indexer", problem, "Leave it out, or name a family that has: glm_moe_dsa, deepseek_v32.")
