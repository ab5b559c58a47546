"""A target of compression, described in a file (HAGO): which numbers its instructions multiply, and how fast.

    moesaic compress out/smollm2 --target my_board.yaml --out out/small bits=4 speed=1.6

    instruction_set: avx512_vnni
    group: 64                                    inputs that share a scale, where not any will do
    symmetric: true                              no zero points
    multiply:                                    what a matrix may become; rate: speed beside float32
      - {weights: 4, rate: 1.8}
      - {weights: 8, inputs: 8, rate: 2.2}
      - {weights: 3, rank: 16, rate: 1.5}        codes and a correction of low rank

A name without a dot is one of the files in `moesaic/compress/targets/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from moesaic.errors import UserError
from moesaic.kernels.quantized import BITS, BLOCK
from moesaic.strict import STRICT, validate
from moesaic.yaml_reader import read_yaml

BUILTIN = Path(__file__).parent / "targets"


class Multiply(BaseModel):
    """One way to keep a matrix and to multiply by it."""

    model_config = STRICT
    weights: int  # bits
    inputs: int = 16  # bits; 8: rounded for each token
    rank: Annotated[int, Field(ge=0)] = 0
    rate: Annotated[float, Field(gt=0)] = 1.0


class Target(BaseModel):
    model_config = STRICT
    instruction_set: str = "any"
    group: int | None = None
    symmetric: bool | None = None
    multiply: Annotated[tuple[Multiply, ...], Field(min_length=1)]

    @property
    def fewest(self) -> int:
        return min(way.weights for way in self.multiply)

    @property
    def most(self) -> int:
        return max(way.weights for way in self.multiply)


def builtin_targets() -> list[str]:
    return sorted(file.stem for file in BUILTIN.glob("*.yaml"))


def read_target(name: str) -> Target:
    """A file, or one that comes with the package."""
    file = Path(name) if "." in name or "/" in name else BUILTIN / f"{name}.yaml"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        known = ", ".join(builtin_targets())
        raise UserError("target", f"no such target {name[:80]!r}", f"Name a YAML file, or one of {known}.") from None
    raw = read_yaml(text, str(file))
    if not isinstance(raw, dict):
        raise UserError(file, "does not describe a target", "docs/compress.md shows one.")
    found = validate(Target, raw, lambda path: str(file))
    for way in found.multiply:
        if way.weights not in BITS or way.inputs not in (8, 16):
            problem = f"multiply: weights of {way.weights} bits and inputs of {way.inputs} cannot be run"
            raise UserError(file, problem, f"Take weights of {', '.join(map(str, BITS))} bits and inputs of 8 or 16.")
        if way.rank and way.inputs != 16:
            raise UserError(file, "multiply: a correction of low rank takes inputs of 16 bits", "Leave one out.")
    if found.group is not None and (found.group < 0 or found.group % BLOCK):
        raise UserError(file, f"group: must be a multiple of {BLOCK}, or 0 for a whole channel", "Correct it.")
    return found
