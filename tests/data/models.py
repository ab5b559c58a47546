"""A very small model directory with a tokenizer that was made here."""

from __future__ import annotations

from pathlib import Path

from tests.random_models import save_random, small_config

TEXTS = [f"The number {n} is a number; def f(x): return x + {n}\n" for n in range(100)]
VOCABULARY = 280


def tiny_model(directory: Path, seed: int = 0) -> Path:
    config = small_config("llama", VOCABULARY, hidden=32, ffn=48, layers=2, heads=(2, 1), initializer_range=0.3)
    return save_random(config, directory, TEXTS, seed)
