"""Serving engines by name (`engines.yaml`): the constants that a serving estimate needs beside the device's."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moesaic.errors import UserError
from moesaic.yaml_reader import read_yaml

CATALOGUE = Path(__file__).with_name("engines.yaml")


@dataclass(frozen=True)
class Engine:
    name: str
    step: float
    sequence: float
    kernels: float
    experts: float
    mixed: float
    eager: float
    first: float
    bunching: float
    running: int
    memory_share: float
    cache: str

    def cache_dtype(self, weights: str) -> str:
        if self.cache == "weights":
            return "fp8" if weights in {"fp8", "fp4"} else "bf16"
        return self.cache


@cache
def engines() -> dict[str, Engine]:
    raw = read_yaml(CATALOGUE.read_text(), CATALOGUE.name)
    return {name: Engine(name, **given) for name, given in raw.items()}


def load_engine(name: str) -> Engine:
    known = engines()
    wanted = name.lower().replace("-", "").replace("_", "").replace("tensorrtllm", "trtllm")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, 1)
    raise UserError(
        f"--backend {name}",
        "no serving engine of this name",
        f"Did you mean {near[0]}?" if near else f"Known are {', '.join(known)}.",
    )
