"""Small models with a tokenizer, made by `transformers`, for compression to work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moesaic.data.plain_text import builtin_text

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
SPARSE = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
    "head_dim": 4, "v_head_dim": 12, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 12,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
KINDS = {"qwen3_moe": MIXTURE, "glm_moe_dsa": SPARSE}


def make(path: Path, kind: str = "qwen3_moe", **more: Any) -> Path:
    settings = {**SIZES, **KINDS.get(kind, {}), **more}
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.12)
    model.save_pretrained(path)
    add_tokenizer(path)
    return path


def add_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([builtin_text()[:20_000]], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
