"""What a family file may say beside its config keys and tensor names, for training from scratch, upcycling and GGUF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from moesaic.model.config import Activation


@dataclass(frozen=True)
class Traits:
    """What the architecture fixes and a recipe leaves open."""

    rotary_share: float = 1.0  # of a head, with RoPE
    interleaved: bool = False  # RoPE rotates neighbouring dimensions
    post_norms: bool = False
    latent: bool = False  # multi-head latent attention
    indexer: bool = False  # attention to selected tokens
    indexer_interleaved: bool = True  # RoPE rotates neighbouring dimensions there
    sinks: bool = False  # a learned logit of no token in every head's softmax
    bias: bool = False  # of attention's projections, of routers and of experts
    qkv_bias: bool = False
    norm: Literal["heads", "whole", "rotated", "unit"] = "heads"  # what is normed of queries and keys
    shared_gate: bool = False
    scales_input: bool = False  # of experts
    activation: Activation = "silu"
    gated: bool = False  # heads are multiplied by a sigmoid of their own
    norm_offset: bool = False  # norms multiply by one more than their weights
    delta: bool = False  # a gated delta rule in most layers
    encoder: bool = False  # reads texts as a whole; not trained from scratch here
    mixture: str = ""  # the family a dense model becomes when it is upcycled; else our own architecture


@dataclass(frozen=True)
class Turned:
    """How matrices of a family lie on disk, where that is not as the model has them (`formats/turned.py`)."""

    inputs_first: bool = True  # matrices of experts are (E, inputs, outputs)
    alternating: bool = False  # their rows of gate and up in turns
    by_head: tuple[int, ...] = ()  # rows lie head by head, so many of each kind; here they lie kind by kind


class GGUFReader(Protocol):
    """The metadata of a GGUF file; keys are those below the architecture's name."""

    sizes: dict[str, int]

    def integer(self, key: str, default: Any = ..., least: int = 1) -> int: ...

    def flag(self, key: str, default: Any = ...) -> bool: ...

    def real(self, key: str, default: Any = ...) -> float: ...

    def has(self, tensor: str) -> bool: ...

    def impossible(self, what: str) -> Exception: ...

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class GGUF:
    """How llama.cpp keeps the family's models."""

    architecture: str
    # From config.json and a layer's number, which parts of the table in gguf/source.py it holds; "own" is `table`.
    parts: Callable[[dict[str, Any], int], list[str]]
    # Keys of config.json beside those that all have.
    config: Callable[[GGUFReader], dict[str, Any]] = lambda reader: {}
    table: str = ""  # rows of the family's own: name in the file, name in the checkpoint, shape
    mixture: bool = False
    predicts_further: bool = False  # whether multi-token-prediction layers are in the file
    partial_rotary: bool = False
    rotates_neighbours: bool = False  # queries and keys lie as llama.cpp rotates them, not as transformers does
    yarn_mscale: bool = False


def attention_parts(config: dict[str, Any], out_bias: bool = True) -> list[str]:
    return ["attention"] + (["qkv_bias"] + (["out_bias"] if out_bias else []) if config["attention_bias"] else [])


def expert_hidden(reader: GGUFReader) -> dict[str, Any]:
    reader.sizes["F"] = reader.integer("expert_feed_forward_length")
    return {"moe_intermediate_size": reader.sizes["F"]}
