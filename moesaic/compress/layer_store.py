"""Finished layers on disk beside the output: a killed run resumes where it was, and memory holds one layer."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from moesaic import atomic
from moesaic.atomic import LOCK
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.formats import tensor_file
from moesaic.model.formats.float_matrix import FloatMatrix
from moesaic.model.formats.quantized import Scheme, plain_scheme, read_matrix, read_scheme, scheme_of, tensors_of
from moesaic.model.formats.tensor_file import TensorFile

MARK = "request"
RUN = "run"


@dataclass
class Part:
    """What a method made of some parameters: quantized matrices, those of floating-point numbers, changed plain
    tensors, and facts to report."""

    matrices: dict[str, QuantizedMatrix] = field(default_factory=dict)
    floats: dict[str, FloatMatrix] = field(default_factory=dict)
    plain: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def parts_folder(out: Path) -> Path:
    """Where the parts of what is to be `out` lie."""
    return out.parent / f".{out.name}.compressing"


def started_with(out: Path, identity: dict[str, Any]) -> bool:
    """Whether what lies there was made for this very request."""
    mark = parts_folder(out) / MARK
    return mark.is_file() and mark.read_text() == _digest(identity)


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


class LayerStore:
    """A folder of parts by name. `identity` says what they belong to: parts of another request are deleted."""

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.folder, self._mark = parts_folder(out), _digest(identity)
        try:
            if self.folder.exists() and not started_with(out, identity):
                for file in self.folder.iterdir():
                    if file.is_dir():
                        shutil.rmtree(file)
                    elif file.name != LOCK:  # ours
                        file.unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise UserError(self.folder, problem, "Write elsewhere with --out.") from None
        self._open: dict[str, tuple[TensorFile, dict[str, Any]]] = {}

    def run_folder(self) -> Path:
        """Where a training run of this request is, with its checkpoints and metrics."""
        self._sign()
        return self.folder / RUN

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.json").is_file()

    def put(self, name: str, part: Part) -> None:
        """Whole or not at all: the file that says what is there comes last."""
        tensors = dict(part.plain)
        for parameter, matrix in part.matrices.items():
            tensors |= dict(tensors_of(parameter, matrix))
        for parameter, numbers in part.floats.items():
            tensors |= {f"{parameter}.stored": numbers.stored, f"{parameter}.scales": numbers.scales_OG.float()}
            if numbers.global_scale is not None:
                tensors[f"{parameter}.global"] = numbers.global_scale.reshape(1)
        self._write(f"{name}.safetensors", tensors)
        about = {
            "matrices": {
                parameter: {"size": list(matrix.shape), **plain_scheme(scheme_of(matrix))}
                for parameter, matrix in part.matrices.items()
            },
            "floats": {parameter: numbers.name for parameter, numbers in part.floats.items()},
            "plain": list(part.plain),
            "facts": part.facts,
        }
        atomic.write_json(self.folder / f"{name}.json", about)

    def get(self, name: str) -> Part:
        file, about = self._opened(name)
        matrices = {parameter: self.matrix(name, parameter) for parameter in about["matrices"]}
        floats = {parameter: self.float_matrix(name, parameter) for parameter in about["floats"]}
        return Part(matrices, floats, {key: file.tensor(key) for key in about["plain"]}, about["facts"])

    def about(self, name: str) -> dict[str, Any]:
        return self._opened(name)[1]

    def scheme(self, name: str, parameter: str) -> tuple[tuple[int, ...], Scheme]:
        entry = dict(self.about(name)["matrices"][parameter])
        return tuple(entry.pop("size")), read_scheme(entry, self.folder)

    def matrix(self, name: str, parameter: str) -> QuantizedMatrix:
        file = self._opened(name)[0]
        size, scheme = self.scheme(name, parameter)
        return read_matrix(parameter, size, scheme, lambda key, shape, kinds: file.tensor(key))

    def float_matrix(self, name: str, parameter: str) -> FloatMatrix:
        file, about = self._opened(name)
        scale = file.tensor(f"{parameter}.global") if f"{parameter}.global" in file.tensors else None
        stored, scales_OG = file.tensor(f"{parameter}.stored"), file.tensor(f"{parameter}.scales")
        return FloatMatrix(about["floats"][parameter], stored, scales_OG, scale)

    def plain(self, name: str, parameter: str) -> Tensor:
        return self._opened(name)[0].tensor(parameter)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def put_state(self, number: int, tensors: dict[str, Tensor]) -> None:
        """What the run carries from one layer to the next; only the latest is kept."""
        self._write(f"state-{number:05}.safetensors", tensors)
        for file in self.folder.glob("state-*.safetensors"):
            if file.name < f"state-{number:05}.safetensors":
                file.unlink()

    def state(self) -> tuple[int, dict[str, Tensor]] | None:
        files = sorted(self.folder.glob("state-*.safetensors"))
        if not files:
            return None
        file = TensorFile(files[-1], integers=True)
        return int(files[-1].stem.removeprefix("state-")), {name: file.tensor(name) for name in file.tensors}

    def clear(self) -> None:
        self._open.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _opened(self, name: str) -> tuple[TensorFile, dict[str, Any]]:
        if name not in self._open:
            about = read_json(self.folder / f"{name}.json")
            self._open[name] = (TensorFile(self.folder / f"{name}.safetensors", integers=True), about)
        return self._open[name]

    def _sign(self) -> None:
        if not (self.folder / MARK).is_file():  # not before: a request that is refused leaves nothing
            atomic.write_text(self.folder / MARK, self._mark)

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        self._sign()
        entries = [(key, t.dtype, tuple(t.shape), lambda t=t: t) for key, t in tensors.items()]
        with atomic.replacing_file(self.folder / name) as fresh:
            tensor_file.write(fresh, entries)
        self._open.pop(name.removesuffix(".safetensors"), None)


def rounded_scales(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """As it will be read back: scales and zeros are kept in half precision."""
    matrix.scales_XGO.copy_(matrix.scales_XGO.half().float())
    if matrix.zeros_XGO is not None:
        matrix.zeros_XGO.copy_(matrix.zeros_XGO.half().float())
    for part in (matrix.down_RI, matrix.up_OR):
        if part is not None:
            rounded_scales(part)
    return matrix
