"""Small mixtures on disk for tests of expert ranks: grouped-query attention, and latent attention with shared experts
and a dense first layer."""

from __future__ import annotations

from pathlib import Path

from tests.random_models import save_random, small_config

VOCABULARY = 211


def save_mixture(folder: Path, family: str = "qwen3_moe", layers: int = 3) -> Path:
    if family == "qwen3_moe":
        config = small_config(
            family, VOCABULARY, hidden=64, ffn=96, layers=layers, heads=(4, 2), head_dim=16,
            moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3,
            max_position_embeddings=256, initializer_range=0.2,
        )  # fmt: skip
    else:
        config = small_config(
            family, VOCABULARY, hidden=64, ffn=96, layers=layers, heads=(4, 4),
            q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
            moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
            first_k_dense_replace=1, n_group=1, topk_group=1, num_nextn_predict_layers=0,
            max_position_embeddings=256, initializer_range=0.2,
        )  # fmt: skip
    return save_random(config, folder, seed=3)
