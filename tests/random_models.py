"""Small models with random weights, as `transformers` makes and saves them: what tests and benches load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer


def small_config(
    family: str, vocab: int, hidden: int, ffn: int, layers: int, heads: tuple[int, int], **more: Any
) -> Any:
    """A family's config: `heads` are those of queries and of keys and values, `more` are keys of config.json."""
    import transformers

    return transformers.AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        **more,
    )


def save_random(config: Any, directory: Path, texts: Iterable[str] = (), seed: int = 0, biases: float = 0.0) -> Path:
    """A model of random weights, with a tokenizer trained on `texts` where there are any. Biases, which begin as zeros,
    are drawn with the standard deviation `biases`, if it is not 0."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if biases and name.endswith("bias"):
                parameter.normal_(0, biases)
    model.save_pretrained(directory)
    if texts:
        save_tokenizer(train_tokenizer(texts, config.vocab_size), directory)
    return directory
