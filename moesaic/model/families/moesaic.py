"""Our own architecture, for what no other can express: a pyramid of experts, a residual expert (DeepSpeed-MoE).

config.json holds the ModelConfig itself and tensors carry the model's own names. `transformers` cannot load it.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moesaic.errors import UserError
from moesaic.model.config import ModelConfig
from moesaic.model.families.keys import LARGEST_INTEGER, LARGEST_NUMBER, Keys
from moesaic.model.families.places import Place
from moesaic.model.families.traits import Traits

ARCHITECTURE = "MoesaicForCausalLM"
TRAITS = Traits()


def read(keys: Keys) -> ModelConfig:
    config = build(ModelConfig, keys.raw.get("config"), "config", keys.place)
    assert isinstance(config, ModelConfig)
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    return {"config": config.to_dict()}


def layouts(config: ModelConfig) -> list[list[Place]]:
    import torch

    from moesaic.model.transformer import Model

    with torch.device("meta"):
        model = Model(config)
    return [[Place(name, tuple(tensor.shape), name) for name, tensor in model.state_dict().items()]]


def build(kind: Any, value: Any, key: str, place: object) -> Any:
    """A value of the given type from plain JSON, refusing whatever does not fit."""

    def wrong(expected: str) -> UserError:
        return UserError(place, f"{key}: must be {expected}, not {str(value)[:60]!r}", "Correct the configuration.")

    origin, choices = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise wrong("a mapping")
        hints = get_type_hints(kind)
        unknown = value.keys() - hints.keys()
        if unknown:
            raise UserError(place, f"{key}: no such key {sorted(unknown)[0][:60]!r}", "Correct the configuration.")
        missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in value]
        if missing:
            raise UserError(place, f"{key}.{missing[0]}: missing", "Correct the configuration.")
        return kind(**{name: build(hints[name], item, f"{key}.{name}", place) for name, item in value.items()})
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise wrong("a list")
        return tuple(build(choices[0], item, f"{key}.{number}", place) for number, item in enumerate(value))
    if origin is Literal:
        if value not in choices or isinstance(value, bool):
            raise wrong(f"one of {', '.join(map(str, choices))}")
        return value
    if choices:  # a union
        if value is None and type(None) in choices:
            return None
        kinds = [choice for choice in choices if choice is not type(None)]
        if isinstance(value, dict):
            # The kind whose fields are the ones given: each of our unions of dataclasses differs in its fields.
            given = set(value)
            kinds.sort(key=lambda choice: len(given ^ {f.name for f in fields(choice)}) if is_dataclass(choice) else 99)
        return build(kinds[0], value, key, place)
    if kind is float and type(value) in (int, float) and abs(value) < LARGEST_NUMBER:
        return float(value)
    if kind in (int, bool, str) and type(value) is kind and (kind is not int or abs(value) < LARGEST_INTEGER):
        return value
    raise wrong({int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(kind, str(kind)))
