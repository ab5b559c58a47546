"""A very small mixture model that has a tokenizer and a chat template, for tests of what is said."""

from __future__ import annotations

from pathlib import Path

from tests.random_models import save_random, small_config

TEXTS = [
    f'The number {n} is a number; {{"name": "x", "value": {n}}} and yes or no, as you like it.\n' for n in range(200)
]
VOCABULARY = 400


def talking_model(directory: Path, seed: int = 0, context: int = 512) -> Path:
    config = small_config(
        "qwen3_moe", VOCABULARY, hidden=48, ffn=64, layers=3, heads=(4, 2), head_dim=16,
        moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2,
        initializer_range=0.2, max_position_embeddings=context, eos_token_id=0,
    )  # fmt: skip
    return save_random(config, directory, TEXTS, seed)
