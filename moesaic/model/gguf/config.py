"""The metadata of a GGUF file as a config.json."""

import math
from pathlib import Path
from typing import Any, cast

import torch

from moesaic.errors import UserError
from moesaic.model.families import families
from moesaic.model.families.traits import GGUF
from moesaic.model.gguf.header import COPY_AGAIN, Header
from moesaic.model.gguf.tokenizer import special_ids


class ConfigReader:
    """`config` is the config.json; `sizes` says what the letters are by which shapes are described."""

    def __init__(self, header: Header) -> None:
        self.header, self.metadata = header, header.metadata
        self.architecture = self.metadata.text("general.architecture")
        found = [family for family in families() if hasattr(family, "GGUF_NAMES")]
        named = [family for family in found if family.GGUF_NAMES.architecture == self.architecture]
        if not named:
            known = sorted({family.GGUF_NAMES.architecture for family in found})
            problem = f"unknown architecture {self.architecture[:60]!r}"
            raise UserError(header.path, problem, f"Known ones: {', '.join(known)}.")
        mixture = self.integer("expert_count", 0, least=0) > 0  # llama.cpp may have one name for dense and mixture
        named = [family for family in named if family.GGUF_NAMES.mixture == mixture] or named
        self._module = named[0]
        self.family, self.names = named[0].__name__.rpartition(".")[2], cast(GGUF, named[0].GGUF_NAMES)
        self.sizes: dict[str, int] = {}
        self.config = self._read()

    def integer(self, key: str, default: Any = ..., least: int = 1) -> int:
        return self.metadata.integer(f"{self.architecture}.{key}", default, least)

    def flag(self, key: str, default: Any = ...) -> bool:
        return self.metadata.flag(f"{self.architecture}.{key}", default)

    def real(self, key: str, default: Any = ...) -> float:
        return self.metadata.real(f"{self.architecture}.{key}", default)

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    @property
    def path(self) -> Path:
        return self.header.path

    def impossible(self, what: str) -> UserError:
        return UserError(self.header.path, f"metadata cannot be right: {what}", COPY_AGAIN)

    def _read(self) -> dict[str, Any]:
        """Also says what the letters of the table are: V D H N C E as everywhere in this package, F the experts' and I
        the dense hidden size, S shared experts; for latent attention Q and R the query and key-value ranks, X the
        value head size, J = R + rotary size, K = unrotated key + value size of a head."""
        experts, blocks = self.integer("expert_count", 0, least=0), self.integer("block_count")
        hidden, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        kv_heads, head = self.integer("attention.head_count_kv", heads), self.integer("attention.key_length", 0)
        head = head or max(1, hidden // heads)
        used = self.integer("expert_used_count") if self.names.mixture else 0
        extra = self.integer("nextn_predict_layers", 0, least=0) if self.names.predicts_further else 0
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
            "architectures": [self._module.ARCHITECTURE],
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
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_q.bias" in self.header.tensors,
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            **special_ids(self.metadata),
        }
        if self.names.mixture:
            config["num_experts_per_tok"] = used
        config |= self.names.config(self)
        if "qk_rope_head_dim" in config:  # latent attention has heads of two sizes
            del config["head_dim"]
        config["rope_parameters"] = self._rope(config.get("qk_rope_head_dim", head), config["max_position_embeddings"])
        return config

    def _rope(self, head: int, context: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.real("rope.freq_base", 10000.0)}
        rotary = self.integer("rope.dimension_count", head)
        if self.names.partial_rotary:
            rope["partial_rotary_factor"] = rotary / head
        if rotary > head or (rotary < head and "partial_rotary_factor" not in rope):
            raise self.impossible(f"{rotary} rotated dimensions of a head of {head}")
        scaling = self.metadata.text(f"{self.architecture}.rope.scaling.type", "none")
        factor = self.real("rope.scaling.factor", 0) or self.real("rope.scale_linear", 1.0)
        unusual = [
            key
            for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
            if self.real(f"rope.scaling.{key}", 1.0) != 1.0
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
                if beta := self.real(f"rope.scaling.{theirs}", 0):
                    rope[ours] = beta
            if self.names.yarn_mscale and (multiplier := self.real("rope.scaling.yarn_log_multiplier", 0)):
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
