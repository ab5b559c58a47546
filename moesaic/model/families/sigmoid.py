"""The feed-forward layers of the DeepSeek-V3 line (DeepSeek-V3, GLM-4.5, GLM-5): dense first, then sigmoid-routed
experts with a balance bias and a shared expert, then layers that predict further tokens."""

from __future__ import annotations

from typing import Any

from moesaic.errors import UserError
from moesaic.model.config import Dense, Experts, Layer, ModelConfig
from moesaic.model.families.keys import Keys
from moesaic.model.families.traits import GGUFReader, expert_hidden

SIGMOID = 2  # of GGUF's expert_gating_func


def read_layers(
    keys: Keys, *, dense_first: int, groups: int, top_groups: int, scale: float, normalize: bool = True
) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """The layers and the prediction layers; the arguments are the family's defaults."""
    width = keys.integer("moe_intermediate_size")
    experts = Experts(
        count=keys.integer("n_routed_experts", "num_local_experts", "num_experts"),
        per_token=keys.integer("num_experts_per_tok", default=8),
        hidden=width,
        score="sigmoid",
        normalize=keys.flag("norm_topk_prob", default=normalize),
        scale=keys.number("routed_scaling_factor", default=scale),
        correction=True,
        groups=keys.integer("n_group", default=groups),
        top_groups=keys.integer("topk_group", default=top_groups),
        shared_hidden=width * keys.integer("n_shared_experts", default=1),
    )
    count = keys.layer_count()
    dense = Dense(keys.integer("intermediate_size"))
    first = keys.integer("first_k_dense_replace", default=dense_first)
    kinds = keys.choices("mlp_layer_types", {"dense", "sparse"}, count) or [
        "dense" if number < first else "sparse" for number in range(count)
    ]
    further = keys.integer("num_nextn_predict_layers", "num_mtp_layers", default=0)
    if not 0 <= further <= 100:
        raise keys.wrong("num_nextn_predict_layers", "between 0 and 100", further)
    return tuple(Layer(dense if kind == "dense" else experts) for kind in kinds[:count]), (Layer(experts),) * further


def write_layers(config: ModelConfig) -> dict[str, Any]:
    ffns = [layer.ffn for layer in config.layers]
    experts = next(ffn for ffn in ffns if isinstance(ffn, Experts))
    dense = next((ffn for ffn in ffns if isinstance(ffn, Dense)), None)
    return {
        "intermediate_size": dense.hidden if dense else experts.hidden,
        "moe_intermediate_size": experts.hidden,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "n_shared_experts": experts.shared_hidden // experts.hidden,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "first_k_dense_replace": next(n for n, ffn in enumerate(ffns) if isinstance(ffn, Experts)),
        "num_nextn_predict_layers": len(config.mtp),
    }


def gguf_routing(reader: GGUFReader, default: int) -> dict[str, Any]:
    """The routing keys from a GGUF file; `default` is the gating function of files that name none."""
    if reader.integer("expert_gating_func", default, least=0) != SIGMOID:
        problem = "experts are chosen by softmax (DeepSeek-V2)"
        raise UserError(reader.path, problem, "DeepSeek-V3 files can be read.")
    reader.sizes["S"] = reader.integer("expert_shared_count")
    return {
        **expert_hidden(reader),
        "n_routed_experts": reader.sizes["E"],
        "n_shared_experts": reader.sizes["S"],
        "n_group": reader.integer("expert_group_count", 1),
        "topk_group": reader.integer("expert_group_used_count", 1),
        "norm_topk_prob": reader.flag("expert_weights_norm", False),
        "routed_scaling_factor": reader.real("expert_weights_scale", 1.0),
        "first_k_dense_replace": reader.integer("leading_dense_block_count", least=0),
    }


def gguf_feed_forward(config: dict[str, Any], layer: int) -> list[str]:
    return ["dense"] if layer < config["first_k_dense_replace"] else ["experts", "shared"]
