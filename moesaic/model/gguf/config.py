"""The metadata of a GGUF file as a config.json."""

import math
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.model.gguf.header import COPY_AGAIN, Header
from moesaic.model.gguf.tokenizer import special_ids

FAMILIES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "deepseek2": "deepseek_v3",
}
CLASSES = {
    "llama": "Llama",
    "mixtral": "Mixtral",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3",
}
SIGMOID = 2  # of expert_gating_func


class ConfigReader:
    """`config` is the config.json; `sizes` says what the letters are by which shapes are described."""

    def __init__(self, header: Header) -> None:
        self.header, self.metadata = header, header.metadata
        self.architecture = self.metadata.text("general.architecture")
        if self.architecture not in FAMILIES:
            raise UserError(
                header.path,
                f"unknown architecture {self.architecture[:60]!r}",
                f"Known ones: {', '.join(sorted(FAMILIES))}.",
            )
        self.sizes: dict[str, int] = {}
        self.config = self._read()

    def integer(self, key: str, default: Any = ..., least: int = 1) -> int:
        return self.metadata.integer(f"{self.architecture}.{key}", default, least)

    def _real(self, key: str, default: Any = ...) -> float:
        return self.metadata.real(f"{self.architecture}.{key}", default)

    def impossible(self, what: str) -> UserError:
        return UserError(self.header.path, f"metadata cannot be right: {what}", COPY_AGAIN)

    def _read(self) -> dict[str, Any]:
        """Also says what the letters of the table are: V D H N C E as everywhere in this package, F the experts' and I
        the dense hidden size, S shared experts; for latent attention Q and R the query and key-value ranks, X the
        value head size, J = R + rotary size, K = unrotated key + value size of a head."""
        experts, blocks = self.integer("expert_count", 0, least=0), self.integer("block_count")
        self.family = "mixtral" if self.architecture == "llama" and experts else FAMILIES[self.architecture]
        hidden, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        kv_heads, head = self.integer("attention.head_count_kv", heads), self.integer("attention.key_length", 0)
        head = head or max(1, hidden // heads)
        moe = self.family not in ("llama", "qwen3", "glm4")
        used = self.integer("expert_used_count") if moe else 0
        extra = self.integer("nextn_predict_layers", 0, least=0) if self.family == "glm4_moe" else 0
        if not extra < blocks <= len(self.header.tensors):
            raise self.impossible(f"{blocks} layers ({extra} for further tokens) in {len(self.header.tensors)} tensors")
        if heads % kv_heads or head % 2 or used > experts:
            raise self.impossible(f"{heads} heads of size {head} over {kv_heads}, {used} of {experts} experts")
        if "token_embd.weight" not in self.header.tensors:
            raise UserError(self.header.path, "no token embedding in it", "Use a complete file of a text model.")
        vocabulary, inner = self.header.tensors["token_embd.weight"].shape[0], self.integer("feed_forward_length")
        self.sizes = {
            "2": 2,
            "V": vocabulary,
            "D": hidden,
            "I": inner,
            "H": heads,
            "N": kv_heads,
            "C": head,
            "E": experts,
        }
        config: dict[str, Any] = {
            "architectures": [CLASSES[self.family] + "ForCausalLM"],
            "model_type": self.family,
            "dtype": "float32",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "hidden_act": "silu",
            "num_hidden_layers": blocks - extra,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_q.bias" in self.header.tensors,
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            **special_ids(self.metadata),
        }
        if moe:
            config["num_experts_per_tok"] = used
        if moe and self.family != "mixtral":
            self.sizes["F"] = config["moe_intermediate_size"] = self.integer("expert_feed_forward_length")
        if self.family == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in self.header.tensors
        elif self.family == "mixtral":
            config |= {"num_local_experts": experts, "sliding_window": None}
        elif self.family == "qwen3_moe":  # llama.cpp renormalises the top k of this architecture unasked
            config |= {"num_experts": experts, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        elif self.family == "glm4_moe":
            config |= {
                "use_qk_norm": "blk.0.attn_q_norm.weight" in self.header.tensors,
                "num_nextn_predict_layers": extra,
            }
            config |= self._sigmoid_routing(experts)
        elif self.family == "deepseek_v3":
            config |= {"num_key_value_heads": heads, "num_nextn_predict_layers": 0}
            config |= self._sigmoid_routing(experts) | self._latent_attention()
            del config["head_dim"]
        config["rope_parameters"] = self._rope(config.get("qk_rope_head_dim", head), config["max_position_embeddings"])
        return config

    def _sigmoid_routing(self, experts: int) -> dict[str, Any]:
        # Files of DeepSeek-V2 name no gating function and mean softmax; those of GLM mean sigmoid.
        if self.integer("expert_gating_func", SIGMOID if self.family == "glm4_moe" else 0, least=0) != SIGMOID:
            raise UserError(
                self.header.path, "experts are chosen by softmax (DeepSeek-V2)", "DeepSeek-V3 files can be read."
            )
        self.sizes["S"] = self.integer("expert_shared_count")
        return {
            "n_routed_experts": experts,
            "n_shared_experts": self.sizes["S"],
            "n_group": self.integer("expert_group_count", 1),
            "topk_group": self.integer("expert_group_used_count", 1),
            "norm_topk_prob": self.metadata.flag(f"{self.architecture}.expert_weights_norm", False),
            "routed_scaling_factor": self._real("expert_weights_scale", 1.0),
            "first_k_dense_replace": self.integer("leading_dense_block_count", least=0),
        }

    def _latent_attention(self) -> dict[str, Any]:
        rank, rotary = self.integer("attention.kv_lora_rank"), self.integer("rope.dimension_count")
        # Newer files describe the heads of the compressed cache under the old keys, and the real heads under these.
        key = self.integer("attention.key_length_mla", 0) or self.integer("attention.key_length")
        value = self.integer("attention.value_length_mla", 0) or self.integer("attention.value_length")
        if key <= rotary:
            raise self.impossible(f"keys of size {key} with {rotary} of it rotated")
        query_rank = self.integer("attention.q_lora_rank", 0) or None
        self.sizes |= {
            "C": key,
            "Q": query_rank or 0,
            "R": rank,
            "J": rank + rotary,
            "X": value,
            "K": key - rotary + value,
        }
        return {
            "q_lora_rank": query_rank,
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rotary,
            "qk_nope_head_dim": key - rotary,
            "v_head_dim": value,
            "rope_interleave": True,
        }

    def _rope(self, head: int, context: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self._real("rope.freq_base", 10000.0)}
        rotary = self.integer("rope.dimension_count", head)
        if self.family in ("glm4", "glm4_moe"):
            rope["partial_rotary_factor"] = rotary / head
        if rotary > head or (rotary < head and "partial_rotary_factor" not in rope):
            raise self.impossible(f"{rotary} rotated dimensions of a head of {head}")
        scaling = self.metadata.text(f"{self.architecture}.rope.scaling.type", "none")
        factor = self._real("rope.scaling.factor", 0) or self._real("rope.scale_linear", 1.0)
        unusual = [
            key
            for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
            if self._real(f"rope.scaling.{key}", 1.0) != 1.0
        ]
        if (
            unusual
            or scaling not in ("none", "linear", "yarn")
            or f"{self.architecture}.rope.dimension_sections" in (self.metadata.values)
        ):
            raise UserError(
                self.header.path,
                f"rotary scaling {scaling[:60]!r} {' '.join(unusual)} is not supported",
                "Text models with none, linear, yarn or llama3 scaling are.",
            )
        if scaling == "yarn":
            rope |= {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": self.integer("rope.scaling.original_context_length", context),
            }
            for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if beta := self._real(f"rope.scaling.{theirs}", 0):
                    rope[ours] = beta
            if self.family == "deepseek_v3" and (multiplier := self._real("rope.scaling.yarn_log_multiplier", 0)):
                rope["mscale"] = rope["mscale_all_dim"] = round(10 * multiplier, 6)
        elif factor != 1.0:
            rope |= {"rope_type": "linear", "factor": factor}
        elif "rope_freqs.weight" in self.header.tensors:
            rope |= self._llama3_scaling(head, rope["rope_theta"])
        return rope

    def _llama3_scaling(self, head: int, theta: float) -> dict[str, Any]:
        """The file holds what each frequency is divided by; find the published rule that gives these numbers."""
        factors = (
            self.header.read("rope_freqs.weight")
            if self.header.tensors["rope_freqs.weight"].shape == (head // 2,)
            else None
        )
        if factors is None or not bool((factors >= 1).all()):
            raise self.impossible(f"rope_freqs.weight is not {head // 2} divisors")
        factor = float(factors.max())
        wavelength = 2 * math.pi * theta ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
        for context in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
            smooth = ((context / wavelength - 1) / 3).clamp(0, 1)  # low and high frequency factors 1 and 4
            if torch.allclose(1 / ((1 - smooth) / factor + smooth), factors.double(), rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": context,
                }
        raise UserError(
            self.header.path,
            "rope_freqs.weight follows no known rotary scaling",
            "Convert the original checkpoint instead.",
        )
