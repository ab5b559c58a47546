"""Cheaper steps, put together: how the blocks of a step are run, and what it costs if it is cheap."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.errors import UserError
from moesaic.model.config import Latent, ModelConfig
from moesaic.model.transformer import LayerRunner, run_plainly
from moesaic.recipe_sections import TrainSection
from moesaic.train.layer_runners.embedding_shrink import EmbeddingShrink
from moesaic.train.layer_runners.layer_drop import LayerDrop
from moesaic.train.layer_runners.recompute import recompute
from moesaic.train.layer_runners.token_drop import TokenDrop
from moesaic.units import plural


class LayerRunners:
    def __init__(self, settings: TrainSection, config: ModelConfig) -> None:
        self.innermost: LayerRunner = recompute if settings.recompute else run_plainly
        self.kinds: list[EmbeddingShrink | LayerDrop | TokenDrop] = [EmbeddingShrink(settings.embedding_shrink)]
        self.cost: Callable[[int], float] | None = None  # layer-tokens of a step, where the schedule counts them
        layers = len(config.layers)
        if settings.layer_drop:
            self.kinds.append(LayerDrop(layers, settings.layer_drop.floor, settings.layer_drop.gamma, settings.seed))
        if settings.token_drop:
            if layers < 3:
                problem = f"the first and the last of {plural(layers, 'layer')} see every token, and none lies between"
                raise UserError("train.token_drop", problem, "Remove it, or train a deeper model.")
            if isinstance(config.attention, Latent) and config.attention.indexer:
                problem = "layers that share a selection of tokens cannot drop some of them"
                raise UserError("train.token_drop", problem, "Remove it.")
            until = round(settings.token_drop.share * settings.steps)
            drop = TokenDrop(layers, until, settings.token_drop.start, settings.seed)
            self.kinds.append(drop)
            if settings.token_drop.layer_token_rate:
                self.cost = drop.cost

    def runner(self, step: int) -> LayerRunner:
        """How a block is run in a step; with everything off, plainly."""
        runner = self.innermost
        for kind in reversed(self.kinds):
            runner = kind.at(step, runner)
        return runner
