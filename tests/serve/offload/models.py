"""Small random models in directories, for tests of offloading: mixtures with more experts than a small cache holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Completion
from tests.random_models import save_random, small_config

VOCABULARY = 101
SAME: dict[str, Any] = {"max_position_embeddings": 256, "initializer_range": 0.3}
PROMPTS = [[5, 17, 3], list(range(40, 75)), [99, 1, 1, 2, 3, 5, 8, 13], [7]]


def mixture(directory: Path, layers: int = 4, dtype: str = "float32") -> Path:
    """Grouped-query attention, eight experts of which a token has two."""
    config = small_config(
        "qwen3_moe", VOCABULARY, hidden=32, ffn=32, layers=layers, heads=(4, 2), head_dim=8,
        moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, dtype=dtype, **SAME,
    )  # fmt: skip
    return save_random(config, directory)


def latent_mixture(directory: Path, further: int = 0) -> Path:
    """Latent attention, a dense layer, shared experts, groups of experts and a balance bias."""
    config = small_config(
        "deepseek_v3", VOCABULARY, hidden=32, ffn=32, layers=3, heads=(6, 6),
        q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, num_nextn_predict_layers=further, **SAME,
    )  # fmt: skip
    return save_random(config, directory, seed=1)


def answers(model: Model, **sampling: Any) -> list[tuple[list[int], list[float]]]:
    """What an engine makes of all prompts at once, then of one alone: tokens and the bits of their probabilities."""
    engine = Engine(model, cache_bytes=1 << 22, max_requests=8, seed=3)
    sampling = {"max_tokens": 12, "temperature": 0.0, **sampling}
    done = engine.generate(PROMPTS, **sampling)
    alone = [engine.generate([prompt], **sampling)[0] for prompt in PROMPTS[:2]]
    return [_bits(one) for one in [*done, *alone]]


def _bits(done: Completion) -> tuple[list[int], list[float]]:
    return list(done.tokens), [entry.logprob for entry in done.logprobs]
