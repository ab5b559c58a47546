"""A tiny random mixture of experts for tests of the engine, and time that passes only when layers are computed."""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request
from tests.random_models import save_random, small_config

VOCABULARY = 101


def tiny_model(layers: int = 2, context: int = 256, seed: int = 0) -> Model:
    """Weights so large that its likeliest token is far ahead of the next: no near-ties to flip."""
    config = small_config(
        "qwen3_moe", VOCABULARY, hidden=32, ffn=32, layers=layers, heads=(4, 2), head_dim=8,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=context, initializer_range=0.3,
    )  # fmt: skip
    return loaded(config, seed)


def tiny_latent_model(q_rank: int | None = 24, layers: int = 2) -> Model:
    """The same with latent attention, interleaved rotation, a dense layer and a shared expert."""
    config = small_config(
        "deepseek_v3", VOCABULARY, hidden=32, ffn=32, layers=layers, heads=(6, 6),
        q_lora_rank=q_rank, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, num_nextn_predict_layers=0,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return loaded(config, seed=1)


def loaded(config: Any, seed: int) -> Model:
    with tempfile.TemporaryDirectory() as path:
        return moesaic.load(save_random(config, Path(path), seed=seed))


def page_bytes(model: Model, page_size: int) -> int:
    numbers = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values())
    return numbers * 4 * page_size


def serve_all(engine: Engine, requests: Iterable[Request]) -> None:
    """Add all at once, and step until all are finished."""
    for request in requests:
        engine.add(request)
    while engine.working:
        engine.step()


class LayerClock:
    """A clock for an engine: one layer of n tokens takes `base + n * per_token` seconds, all else takes none."""

    def __init__(self, model: Model, base: float = 0.001, per_token: float = 0.001) -> None:
        self.now = 0.0
        self.base, self.per_token = base, per_token
        self.plans: list[tuple[float, int, Callable[[], object]]] = []
        self.numbers = itertools.count()
        self.hooks = [layer.register_forward_hook(self._layer) for layer in model.layers]

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something happen: in the middle of a layer, as from another thread."""
        heapq.heappush(self.plans, (when, next(self.numbers), what))

    def layer_seconds(self, tokens: int) -> float:
        return self.base + tokens * self.per_token

    def _layer(self, layer: object, given: tuple[torch.Tensor, ...], out: object) -> None:
        self.advance(self.layer_seconds(len(given[0])))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self.plans and self.plans[0][0] <= self.now:
            heapq.heappop(self.plans)[2]()

    def run(self, engine: Engine, most_steps: int = 20_000) -> None:
        """Step until everything planned has happened and nothing is left to do."""
        for _ in range(most_steps):
            if not engine.working:
                if not self.plans:
                    break
                self.advance(self.plans[0][0] - self.now)
            engine.step()
        else:
            raise AssertionError(f"still working after {most_steps} steps")
        self.remove()

    def remove(self) -> None:
        """No layer counts any more."""
        for hook in self.hooks:
            hook.remove()
