"""Small random models of several families for the tests on a GPU, and how far results are from those wanted."""

import torch
import transformers

VOCAB = 4096
CONFIGS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=640,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        max_position_embeddings=2048,
        initializer_range=0.06,
    ),
    "mixtral": transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        max_position_embeddings=2048,
        initializer_range=0.06,
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        max_position_embeddings=2048,
        initializer_range=0.06,
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=640,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=192,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        max_position_embeddings=2048,
        initializer_range=0.06,
        num_nextn_predict_layers=0,
    ),
}


def saved(tmp_path_factory):
    """The directory of each model, by name."""
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
    return made


def tokens_of(*lengths, seed=0):
    torch.manual_seed(seed)
    return [torch.randint(VOCAB, (length,)).tolist() for length in lengths]


def error(given, wanted):
    """Relative, of a tensor whose numbers are finite."""
    assert torch.isfinite(given).all()
    return ((given.float() - wanted.float()).norm() / wanted.float().norm()).item()
