"""A Hugging Face checkpoint on disk, read one tensor at a time, refused with a reason if anything about it is off.

Only safetensors are read: nothing is ever unpickled.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.atomic import recover
from moesaic.errors import UserError
from moesaic.json_files import is_file, read_bytes, read_json
from moesaic.model.formats.tensor_file import Part, TensorFile, printable

KNOWLEDGE = "knowledge.txt"  # the facts of a model with a knowledge base, one in each line
# Everything a directory may hold beside weights and config, carried along unread.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "modules.json",  # of sentence-transformers: how hidden states become an embedding
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    KNOWLEDGE,
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
QUANTIZATION = "quantization_config"  # the key of config.json that says how weights are quantized
GLM_BITS = "quantization_bit"  # the same in releases of GLM-130B and ChatGLM
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Source(Protocol):
    """Where a model comes from: a Hugging Face directory or a GGUF file."""

    config: dict[str, Any]
    place: Path

    @property
    def files(self) -> dict[str, bytes]:
        """The other files of the directory, by name."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        """A tensor of its own, or a part of it as `TensorFile` reads them."""


class Checkpoint:
    """A directory with config.json and safetensors, sharded or not."""

    config: dict[str, Any]
    files: dict[str, bytes]

    def __init__(self, path: str | Path) -> None:
        self.place = Path(path)
        # Another process may replace the directory while it is read; half of each would be no model, so look again.
        problem = UserError(path, "is replaced again and again while it is read", "Try again when its writer is done.")
        for _ in range(10):
            before = self._identity()
            try:
                self._look()
            except UserError as error:
                if before is None:  # nothing there: or for the moment in which one is taken away for another
                    problem = error
                    time.sleep(0.001)
                elif self._identity() == before:
                    raise
            else:
                if self._identity() == before:
                    return
        raise problem

    @property
    def bytes(self) -> int:
        return sum(file.size for file in set(self._home.values()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.tensors[self._stored(name)].shape for name, file in self._home.items()}

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        return self._home[name].tensor(self._stored(name), part)

    def read_into(self, out: Tensor, name: str, part: Part = ()) -> None:
        self._home[name].read_into(out, self._stored(name), part)

    def dtype(self, name: str) -> torch.dtype:
        return self._home[name].tensors[self._stored(name)].dtype

    def _stored(self, name: str) -> str:
        """What a tensor is called in its file."""
        return name

    def _identity(self) -> tuple[int, ...] | None:
        recover(self.place)
        try:
            # A run's directory stays, and its files are links to those of the latest checkpoint.
            seen = [os.stat(self.place), os.stat(self.place / "config.json")]
        except (OSError, ValueError):
            return None
        return tuple(number for status in seen for number in (status.st_dev, status.st_ino, status.st_ctime_ns))

    def _look(self) -> None:
        remedy = "Name a directory that holds config.json and model.safetensors."
        try:
            if not stat.S_ISDIR(os.stat(self.place).st_mode):
                raise UserError(self.place, "is a file, not a directory", remedy)
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "no path"
            problem = "no such directory" if isinstance(error, FileNotFoundError) else f"cannot be read ({problem})"
            raise UserError(self.place, problem, remedy) from None
        self.config = read_json(self.place / "config.json", missing="Name a directory that holds a model.")
        self._home: dict[str, TensorFile] = {}
        for file in self._weight_files():
            for name in file.tensors:
                if name in self._home:
                    other = self._home[name].path.name
                    raise UserError(file.path, f"{name} is also in {other}", "Remove one of the two files.")
                self._home[name] = file
        contents = ((name, read_bytes(self.place / name)) for name in SIDE_FILES)
        self.files = {name: content for name, content in contents if content is not None}

    def _weight_files(self) -> Iterator[TensorFile]:
        compressed = bool(self.config.get(QUANTIZATION) or self.config.get(GLM_BITS))
        if is_file(self.place / SINGLE):  # also where an index is there: as `transformers` does
            yield TensorFile(self.place / SINGLE, integers=compressed)
            return
        if not is_file(self.place / INDEX):
            raise self._no_weights()
        index = self.place / INDEX
        mapping = _weight_map(index)
        expected: dict[str, list[str]] = {}
        for name, shard in mapping.items():
            expected.setdefault(shard, []).append(name)
        for shard, names in sorted(expected.items()):
            # A link is followed wherever it leads, since the hub's cache is made of links to files elsewhere. That is
            # safe: only someone who can write here can place one, and what it leads to is read as tensors or refused.
            if not is_file(self.place / shard):
                raise UserError(index, f"names {shard}, which is not there", "Copy the missing file.")
            file = TensorFile(self.place / shard, integers=compressed)
            for name in names:
                if name not in file.tensors:
                    raise UserError(index, f"says {name} is in {shard}, but it is not", "Copy index and shards again.")
            yield file

    def _no_weights(self) -> UserError:
        try:
            pickled = sorted(name for name in os.listdir(self.place) if name.endswith(PICKLED))
        except OSError as error:
            return UserError(self.place, f"cannot be listed ({error.strerror})", "Check its permissions.")
        if not pickled:
            return UserError(self.place, f"no {SINGLE}", "Name a directory that holds a model's weights.")
        return UserError(
            self.place / pickled[0],
            "pickled weights are never opened, since loading them can run any code",
            "Save the model as safetensors.",
        )


class QuantizedCheckpoint:
    """What the quantized layouts share: the directory as it is, and a `config` that no longer says it is quantized."""

    def __init__(self, raw: Checkpoint, key: str = QUANTIZATION) -> None:
        self._raw = raw
        self.place, self.files, self.bytes = raw.place, raw.files, raw.bytes
        self._where = raw.place / "config.json"
        self.config = {name: value for name, value in raw.config.items() if name != key}
        self._settings: Any = raw.config[key]
        self._stored = raw.shapes()


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise UserError(index, "has no weight_map", "Copy the file again.")
    for name, file in mapping.items():
        if not printable(name):
            raise UserError(index, f"names a tensor {name[:60]!r}", "Copy the file again.")
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            shown = str(file)[:60]
            raise UserError(index, f"{name} is not in a safetensors file but in {shown!r}", "Correct the index.")
        if "/" in file or "\\" in file or file.startswith(".") or not printable(file):
            raise UserError(index, f"{name} points outside the directory, to {file[:60]!r}", "Correct the index.")
    return mapping
