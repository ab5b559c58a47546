"""Typed reading of a Hugging Face config.json: a missing or mistyped key is an error that names it."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args

from moesaic.errors import UserError
from moesaic.model.config import GroupedQuery, Rope, RopeKind

_REQUIRED: Any = object()
# JSON knows no bounds, arithmetic does: what is beyond these, or no number at all, is refused.
LARGEST_INTEGER, LARGEST_NUMBER = 2**63, 1e38
T = TypeVar("T")

ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Keys:
    def __init__(self, raw: dict[str, Any], place: object) -> None:
        self.raw = raw
        self.place = place

    def integer(self, *names: str, default: Any = _REQUIRED) -> int:
        """The first of `names` that is there."""
        value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= LARGEST_INTEGER:
            raise self.wrong(names[0], "a whole number", value)
        return value

    def maybe_integer(self, *names: str, default: int | None = None) -> int | None:
        value = self._find(names, default)
        return None if value is None else self.integer(*names, default=default)

    def number(self, *names: str, default: Any = _REQUIRED) -> float:
        value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_NUMBER:
            raise self.wrong(names[0], "a number", value)
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._find((name,), default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self._find((name,), default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text", value)
        return value

    def choices(self, name: str, allowed: set[str], length: int) -> list[str] | None:
        """A list of words, one per layer, if it is there."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(word, str) or word not in allowed for word in value):
            raise self.wrong(name, f"a list of {', '.join(sorted(allowed))}", value)
        if len(value) < length:
            raise UserError(
                self.place, f"{name}: {len(value)} entries for {length} layers", "Correct the configuration."
            )
        return value

    def activation(self) -> Literal["silu", "gelu", "gelu_tanh", "relu"]:
        name = self.text("hidden_act", default="silu")
        if name not in ACTIVATIONS:
            raise self.wrong("hidden_act", f"one of {', '.join(ACTIVATIONS)}", name)
        return ACTIVATIONS[name]

    def layer_count(self) -> int:
        count = self.integer("num_hidden_layers")
        if not 0 < count <= 10_000:
            raise self.wrong("num_hidden_layers", "between 1 and 10000", count)
        return count

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int or abs(token) >= LARGEST_INTEGER for token in values):
            raise self.wrong(name, "a token id or a list of them", value)
        return tuple(values)

    def every(self, context: int, eps: float) -> dict[str, Any]:
        """The fields of ModelConfig that every family reads the same way; `eps` is the default of its norms."""
        dtype = self.raw.get("dtype", self.raw.get("torch_dtype")) or "float32"
        if dtype not in ("float32", "bfloat16", "float16"):
            raise self.wrong("dtype", "float32, bfloat16 or float16", dtype)
        bos, pad = self.tokens("bos_token_id"), self.tokens("pad_token_id")
        return {
            "vocab": self.integer("vocab_size"),
            "hidden": self.integer("hidden_size"),
            "context": context,
            "norm_eps": self.number("rms_norm_eps", default=eps),
            "activation": self.activation(),
            "dtype": dtype,
            "init_std": self.number("initializer_range", default=0.02),
            "bos": bos[0] if bos else None,
            "eos": self.tokens("eos_token_id"),
            "pad": pad[0] if pad else None,
            "tied": self.flag("tie_word_embeddings", default=False),
        }

    def grouped_query(
        self, *, kv_heads: int | None = None, head_size: int | None = None, **options: Any
    ) -> GroupedQuery:
        """`kv_heads` and `head_size` are the family's own, for files that leave them out. A family without them means
        as many as there are heads, and an equal share of the hidden size."""
        heads = self.integer("num_attention_heads")
        if head_size is None:
            head_size = self.maybe_integer("head_dim") or self.integer("hidden_size") // max(heads, 1)
        else:
            head_size = self.integer("head_dim", default=head_size)
        return GroupedQuery(heads, self.integer("num_key_value_heads", default=kv_heads or heads), head_size, **options)

    def rope(
        self,
        head_size: int,
        *,
        context: int,
        share: float | None = None,
        interleaved: bool = False,
        theta: float = 10_000.0,
    ) -> Rope:
        """Rotary settings, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones).

        `share` is the default share of a head that turns, for the families that turn only a part of it, and `theta` the
        family's own, for files that leave it out.
        """
        raw = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        if not isinstance(raw, dict):
            raise self.wrong("rope_parameters", "a mapping", raw)
        inner = Keys(raw, self.place)
        kind = raw.get("rope_type", raw.get("type", "default"))
        if kind not in get_args(RopeKind):
            raise self.wrong("rope_type", f"one of {', '.join(get_args(RopeKind))}", kind)
        size = head_size
        if share is not None:
            default = self.number("partial_rotary_factor", default=share)
            size = int(head_size * inner.number("partial_rotary_factor", default=default))
        values: dict[str, Any] = {
            "size": size,
            "theta": inner.number("rope_theta", default=self.number("rope_theta", default=theta)),
            "kind": kind,
            "interleaved": interleaved,
        }
        if kind in ("yarn", "llama3"):
            original = inner.maybe_integer("original_max_position_embeddings") or context
            values["original_context"] = self.maybe_integer("original_max_position_embeddings") or original
        if kind == "yarn" and raw.get("factor") is None:
            values["factor"] = context / values["original_context"]
        elif kind != "default":
            values["factor"] = inner.number("factor")
        if kind == "yarn":
            for name, key in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
                if raw.get(key):
                    values[name] = inner.number(key)
            values["truncate"] = inner.flag("truncate", default=True)
            for key in ("attention_factor", "mscale", "mscale_all_dim"):
                if raw.get(key) is not None:
                    values[key] = inner.number(key)
        elif raw.get("mscale_all_dim") is not None and kind != "default":
            values["mscale_all_dim"] = inner.number("mscale_all_dim")
        if kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor"):
                values[key] = inner.number(key)
        return Rope(**values)

    def wrong(self, name: str, expected: str, found: object) -> UserError:
        shown = repr(found) if len(repr(found)) < 80 else repr(found)[:77] + "..."
        return UserError(self.place, f"{name}: must be {expected}, not {shown}", "Correct the configuration.")

    def _find(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if default is _REQUIRED:
            raise UserError(self.place, f"{names[0]}: missing", "Is this the config.json of a language model?")
        return default


def write_every(config: Any) -> dict[str, Any]:
    """The config.json keys that every family writes the same way."""
    names = {"gelu_tanh": "gelu_pytorch_tanh"}
    eos: Any = list(config.eos) if len(config.eos) > 1 else (config.eos[0] if config.eos else None)
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": len(config.layers),
        "hidden_act": names.get(config.activation, config.activation),
        "dtype": config.dtype,
        "initializer_range": config.init_std,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "bos_token_id": config.bos,
        "eos_token_id": eos,
        "pad_token_id": config.pad,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
    }


def write_grouped_query(config: Any, attention: GroupedQuery, *, partial: bool = False) -> dict[str, Any]:
    """The same with the keys of grouped-query attention and its RoPE."""
    return {
        **write_every(config),
        **write_rope(config.rope, attention.head_size, partial=partial),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_size,
    }


def write_rope(rope: Rope, head_size: int, *, partial: bool = False) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if partial:
        raw["partial_rotary_factor"] = rope.size / head_size
    if rope.kind != "default":
        raw["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3"):
        raw["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "yarn":
        raw |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, key) is not None:
                raw[key] = getattr(rope, key)
    elif rope.kind != "default" and rope.mscale_all_dim is not None:
        raw["mscale_all_dim"] = rope.mscale_all_dim
    if rope.kind == "llama3":
        raw |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return {"rope_parameters": raw}
