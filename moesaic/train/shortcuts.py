"""Cheaper steps, put together: how the blocks of a step are run, and how far along a run is if some are cheap."""

from __future__ import annotations

from moesaic.errors import UserError
from moesaic.model.config import Latent, ModelConfig
from moesaic.model.transformer import Through, plainly
from moesaic.recipe import TrainSection
from moesaic.train.embedding_shrink import EmbeddingShrink
from moesaic.train.layer_drop import LayerDrop
from moesaic.train.recompute import recompute
from moesaic.train.token_drop import TokenDrop


class Shortcuts:
    def __init__(self, settings: TrainSection, config: ModelConfig) -> None:
        self.innermost: Through = recompute if settings.recompute else plainly
        self.kinds: list[EmbeddingShrink | LayerDrop | TokenDrop] = [EmbeddingShrink(settings.embedding_shrink)]
        self.done: list[float] | None = None  # share of the run's layer-tokens before each step
        layers = len(config.layers)
        if settings.layer_drop:
            self.kinds.append(LayerDrop(layers, settings.layer_drop.floor, settings.layer_drop.gamma, settings.seed))
        if settings.token_drop:
            if isinstance(config.attention, Latent) and config.attention.indexer:
                problem = "layers that share a selection of tokens cannot drop some of them"
                raise UserError("train.token_drop", problem, "Remove it.")
            until = round(settings.token_drop.share * settings.steps)
            drop = TokenDrop(layers, until, settings.token_drop.start, settings.seed)
            self.kinds.append(drop)
            if settings.token_drop.layer_token_rate:
                steps = settings.steps - settings.warmup_steps
                costs = [drop.cost(step + settings.warmup_steps) for step in range(steps)]
                self.done = [sum(costs[:step]) / sum(costs) for step in range(steps)]

    def through(self, step: int) -> Through:
        """How a block is run in a step; with everything off, plainly."""
        through = self.innermost
        for kind in reversed(self.kinds):
            through = kind.at(step, through)
        return through

    def progress(self, step: int, steps: int) -> int:
        """The step a schedule is at: random-LTD counts what its layers have really seen."""
        return step if self.done is None else int(self.done[step] * steps)
