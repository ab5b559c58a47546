"""A tiny random mixture of experts for tests of the engine, and time that passes only when layers are computed."""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Callable

import torch
import transformers

import moesaic
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine

VOCABULARY = 101


def tiny_model(layers: int = 2, context: int = 256, seed: int = 0) -> Model:
    """Weights so large that its likeliest token is far ahead of the next: no near-ties to flip."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=context,
        initializer_range=0.3,
    )
    with tempfile.TemporaryDirectory() as path:
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
        return moesaic.load(path)


def tiny_latent_model(q_rank: int | None = 24, layers: int = 2) -> Model:
    """The same with latent attention, interleaved rotation, a dense layer and a shared expert."""
    torch.manual_seed(1)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=q_rank,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        intermediate_size=32,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        num_nextn_predict_layers=0,
    )
    with tempfile.TemporaryDirectory() as path:
        transformers.DeepseekV3ForCausalLM(config).save_pretrained(path)
        return moesaic.load(path)


def page_bytes(model: Model, page_size: int) -> int:
    numbers = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values())
    return numbers * 4 * page_size


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
