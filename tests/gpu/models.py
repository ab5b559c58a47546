"""Small random models of several families for the tests on a GPU, and how far results are from those wanted."""

import torch

from tests.random_models import save_random, small_config

VOCAB = 4096
SAME = {"max_position_embeddings": 2048, "initializer_range": 0.06}
CONFIGS = {
    config.model_type: config
    for config in (
        small_config(
            "qwen3_moe", VOCAB, hidden=512, ffn=640, layers=3, heads=(8, 2), head_dim=64, mlp_only_layers=[0],
            moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, **SAME,
        ),
        small_config(
            "mixtral", VOCAB, hidden=256, ffn=384, layers=2, heads=(4, 4), sliding_window=None,
            num_local_experts=8, num_experts_per_tok=2, **SAME,
        ),
        small_config(
            "glm4_moe", VOCAB, hidden=256, ffn=384, layers=2, heads=(6, 2), head_dim=64, first_k_dense_replace=1,
            moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, **SAME,
        ),
        small_config(
            "deepseek_v3", VOCAB, hidden=512, ffn=640, layers=3, heads=(16, 16), first_k_dense_replace=1,
            q_lora_rank=192, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            moe_intermediate_size=256, n_routed_experts=32, num_experts_per_tok=4, n_shared_experts=1,
            n_group=4, topk_group=2, num_nextn_predict_layers=0, **SAME,
        ),
        small_config(
            "gpt_oss", VOCAB, hidden=256, ffn=192, layers=3, heads=(8, 2), head_dim=64, sliding_window=48,
            num_local_experts=8, num_experts_per_tok=4, **SAME,
        ),
        small_config(
            "olmoe", VOCAB, hidden=256, ffn=128, layers=2, heads=(4, 2), num_experts=8, num_experts_per_tok=2, **SAME,
        ),
        small_config(
            "qwen2_moe", VOCAB, hidden=256, ffn=384, layers=2, heads=(4, 2), num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=128, shared_expert_intermediate_size=192, mlp_only_layers=[0], **SAME,
        ),
        small_config(
            "glm_moe_dsa", VOCAB, hidden=512, ffn=640, layers=3, heads=(16, 16),
            q_lora_rank=192, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            mlp_layer_types=["dense", "sparse", "sparse"], moe_intermediate_size=256, n_routed_experts=32,
            num_experts_per_tok=4, n_shared_experts=1, n_group=1, topk_group=1,
            index_n_heads=32, index_head_dim=128, index_topk=64, indexer_types=["full", "shared", "full"], **SAME,
        ),
        small_config(  # with so many heads that two programs share a token's values
            "deepseek_v32", VOCAB, hidden=256, ffn=384, layers=2, heads=(64, 64), first_k_dense_replace=1,
            q_lora_rank=192, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64,
            moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
            n_group=1, topk_group=1, index_n_heads=64, index_head_dim=128, index_topk=100,
            num_nextn_predict_layers=0, **SAME,
        ),
    )
} | {
    "64 heads": small_config(  # that two warpgroups take, where all latents are attended to
        "deepseek_v3", VOCAB, hidden=256, ffn=384, layers=2, heads=(64, 64), first_k_dense_replace=1,
        q_lora_rank=192, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64,
        moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        n_group=1, topk_group=1, num_nextn_predict_layers=0, **SAME,
    )
}  # fmt: skip


def saved(tmp_path_factory):
    """The directory of each model, by name."""
    return {
        name: save_random(config, tmp_path_factory.mktemp(name.replace(" ", "_")), biases=0.1)
        for name, config in CONFIGS.items()
    }


def tokens_of(*lengths, seed=0):
    torch.manual_seed(seed)
    return [torch.randint(VOCAB, (length,)).tolist() for length in lengths]


def error(given, wanted):
    """Relative, of a tensor whose numbers are finite."""
    assert torch.isfinite(given).all()
    return ((given.float() - wanted.float()).norm() / wanted.float().norm()).item()
