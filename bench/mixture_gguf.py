"""A Qwen3-MoE directory as the GGUF file that llama.cpp reads, in float32 and without a tokenizer: a peer's way in.

For benches, which ask tokens and not text; Moesaic itself reads GGUF and writes model directories.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from moesaic.model.directory import open_source

WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
OF_EXPERT = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def write(directory: Path, file: Path) -> None:
    source = open_source(str(directory))
    config, count = source.config, source.config["num_local_experts"]
    assert config["model_type"] == "qwen3_moe" and config["norm_topk_prob"], "llama.cpp weighs its experts to one"

    def tensor(name: str) -> np.ndarray:
        return source.tensor(f"{name}.weight").float().numpy()

    out = gguf.GGUFWriter(file, "qwen3moe")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_expert_count(count)
    out.add_expert_used_count(config["num_experts_per_tok"])
    out.add_expert_feed_forward_length(config["moe_intermediate_size"])
    out.add_vocab_size(config["vocab_size"])
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_tokenizer_model("no_vocab")
    for name, ours in WHOLE.items():
        out.add_tensor(f"{name}.weight", tensor(ours))
    for layer in range(config["num_hidden_layers"]):
        for name, ours in OF_LAYER.items():
            out.add_tensor(f"blk.{layer}.{name}.weight", tensor(f"model.layers.{layer}.{ours}"))
        for name, ours in OF_EXPERT.items():
            experts = [f"model.layers.{layer}.mlp.experts.{number}.{ours}" for number in range(count)]
            out.add_tensor(f"blk.{layer}.{name}.weight", np.stack([tensor(expert) for expert in experts]))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
