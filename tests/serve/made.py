"""A very small mixture model that has a tokenizer and a chat template, for tests of what is said."""

from __future__ import annotations

from pathlib import Path

from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer

TEXTS = [
    f'The number {n} is a number; {{"name": "x", "value": {n}}} and yes or no, as you like it.\n' for n in range(200)
]
VOCABULARY = 400


def talking_model(directory: Path, seed: int = 0, context: int = 512) -> Path:
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=context,
        eos_token_id=0,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    save_tokenizer(train_tokenizer(TEXTS, VOCABULARY), directory)
    return directory
