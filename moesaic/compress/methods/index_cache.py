"""IndexCache: most layers of sparse attention (DSA) use the selection of the nearest layer before them that makes one.

    moesaic compress out/dsa --method index_cache --out out/shared keep=0.5 steps=100

Which layers keep an indexer is chosen greedily by the loss on the calibration text: from all that have one, that layer
gives its up whose loss is the least without it, again and again. `steps` then teach the indexers that are left what all
layers they serve look at, while everything else is frozen (multi-layer distillation: `model/indexer_loss.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from moesaic.compress.distill import Distillation, recipe_for, reduced, train_student
from moesaic.compress.layer_store import Part
from moesaic.compress.methods import Compressor
from moesaic.data.packing import IGNORED
from moesaic.errors import UserError
from moesaic.methods import Method
from moesaic.model.attention import LatentAttention
from moesaic.model.block import Block
from moesaic.model.config import Latent, ModelConfig
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.recipe_sections import IndexerTrainingSection

if TYPE_CHECKING:
    from moesaic.compress.job import Job
    from moesaic.recipe import Recipe


@dataclass(frozen=True)
class IndexCache(Compressor):
    keep: float = 0.5  # share of the layers that keep an indexer
    steps: int = 100
    rate: float = 1e-3
    batch: int = 1  # sequences a step

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1 or self.steps < 0 or self.rate <= 0 or self.batch < 1:
            raise ValueError("keep must be above 0 and at most 1, rate above 0, batch at least 1, steps not negative")

    @property
    def ends_bits(self) -> int:
        return 0

    def run(self, job: Job) -> ModelConfig:
        config, attention = job.config, job.config.attention
        if not isinstance(attention, Latent) or attention.indexer is None:
            raise UserError(job.source, "its attention has no indexer", "Choose another method.")
        longest = max(map(len, job.sequences), default=0)
        if longest <= attention.indexer.topk:
            problem = f"an indexer that picks {attention.indexer.topk} tokens takes all of samples of {longest}"
            raise UserError("--length", problem, "Raise it above that.")
        count = max(1, round(self.keep * len(config.layers)))
        if not job.store.has("plan"):
            job.store.put("plan", Part(facts=Search(job).plan(count)))
        full = set(job.store.about("plan")["facts"]["full"])
        made = shared(config, full)
        if self.steps:
            # Layers are the same ones; those that share have no indexer, so theirs are not asked for.
            weights = reduced(job, list(range(len(config.layers))), made)
            taught = train_student(job, made, weights, self._distillation(), recipe=self._recipe(job))
            job.store.put("indexers", Part(plain={name: of for name, of in taught.items() if ".indexer." in name}))
        return made

    def _distillation(self) -> Distillation:
        return Distillation(self.steps, self.rate, self.batch)

    def _recipe(self, job: Job) -> Recipe:
        recipe = recipe_for(job, self._distillation(), None)
        teaching = IndexerTrainingSection(warmup_steps=self.steps, frozen=True)
        return recipe.changed(train={"objective": Method("next_token"), "indexer": teaching})


def shared(config: ModelConfig, full: set[int]) -> ModelConfig:
    """The config in which these layers alone have an indexer."""
    kinds: list[Literal["full", "shared"]] = ["full" if n in full else "shared" for n in range(len(config.layers))]
    return replace(config, layers=tuple(replace(of, index=kind) for of, kind in zip(config.layers, kinds, strict=True)))


class Search:
    """The loss of the calibration text by which layers have an indexer. What lies before a layer does not depend on
    whether it has one, so each is tried from there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        with torch.device("meta"):
            self.model = Model(job.config, job.mode)
        weights = reduced(job, list(range(len(job.config.layers))), job.config)
        self.model.load_state_dict(weights, assign=True)
        self.layout = Layout([len(tokens) for tokens in job.sequences], device=job.device)
        self.tokens_T = torch.tensor([token for tokens in job.sequences for token in tokens], device=job.device)
        following = [token for tokens in job.sequences for token in [*tokens[1:], IGNORED]]
        self.targets_T = torch.tensor(following, device=job.device)

    @torch.no_grad()
    def plan(self, count: int) -> dict[str, object]:
        full = [number for number, layer in enumerate(self.job.config.layers) if layer.index == "full"]
        before = after = self._loss(0, *self._begin())
        total, tries = max(len(full) - count, 0), []
        for done in range(total):
            self.job.progress("choosing", done, total)
            states = self._states()
            losses = {}
            for number in full[1:]:  # the first layer must select
                attention = self._attention(number)
                own, attention.indexer = attention.indexer, None
                losses[number] = self._loss(number, *states[number])
                attention.indexer = own
            given_up = min(losses, key=lambda number: losses[number])
            after = losses[given_up]
            self._attention(given_up).indexer = None
            full.remove(given_up)
            tries.append({"layer": given_up, "loss": after})
        return {"full": full, "loss_before": before, "loss": after, "choices": tries}

    def _attention(self, number: int) -> LatentAttention:
        return cast(LatentAttention, cast(Block, self.model.layers[number]).attention)

    def _begin(self) -> tuple[Tensor, list[Tensor | None] | None]:
        return self.model.begin(self.tokens_T, self.layout)[0], None

    def _states(self) -> list[tuple[Tensor, list[Tensor | None] | None]]:
        """Before each layer: the stream, and what was selected last."""
        x_TD, context = self.model.begin(self.tokens_T, self.layout)
        states: list[tuple[Tensor, list[Tensor | None] | None]] = []
        for number in range(len(self.model.layers)):
            states.append((x_TD, context.selected))
            x_TD = self.model.run_layers(x_TD, context, number, number + 1)
        return states

    def _loss(self, start: int, x_TD: Tensor, selected: list[Tensor | None] | None) -> float:
        _, context = self.model.begin(self.tokens_T, self.layout)
        context.selected = selected
        hidden_TD = self.model.finish(self.model.run_layers(x_TD, context, start), context)
        seen_T = (self.targets_T != IGNORED).float()
        total, _ = self.model.cross_entropy(hidden_TD, self.targets_T, seen_T / seen_T.sum())
        return float(total)
