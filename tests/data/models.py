"""A very small model directory with a tokenizer that was made here."""

from __future__ import annotations

from pathlib import Path

from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer

TEXTS = [f"The number {n} is a number; def f(x): return x + {n}\n" for n in range(100)]
VOCABULARY = 280


def tiny_model(directory: Path, seed: int = 0) -> Path:
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(train_tokenizer(TEXTS, VOCABULARY), directory)
    return directory
