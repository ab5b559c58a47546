"""The model directory, the one artifact every stage reads and writes: a Hugging Face checkpoint and its life story."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels import Mode, probe
from moesaic.model import lineage
from moesaic.model.atomic import replacing, settle
from moesaic.model.checkpoint import Checkpoint, Source
from moesaic.model.config import ModelConfig
from moesaic.model.families import Place, family_for, read_config, write_config
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model

SHARD_BYTES = 4 * 10**9
# Shown of the tensors that are missing, extra or misshapen.
SHOWN = 10
Progress = Callable[[int, int], None]


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    mode: Mode = "fast",
) -> Model:
    """A model, with its `.config` and `.tokenizer`. What is not said is chosen by probing this machine."""
    place = Path(path)
    settle(place)
    source = Checkpoint(place)
    device = torch.device(device) if device is not None else probe.device()
    torch.set_num_threads(threads or probe.threads())
    config, places = match(source)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    wanted = wanted or probe.dtype(device, getattr(torch, config.dtype))
    model = fill(config, source, places, wanted, device, mode)
    model.tokenizer = Tokenizer.from_files(source.files, place)
    return model


def match(source: Source) -> tuple[ModelConfig, list[Place]]:
    """The configuration of a source and where each of its tensors goes, once every tensor is there and fits."""
    config = read_config(source.config, source.place / "config.json")
    shapes = {name: shape for name, shape in source.shapes().items() if not name.endswith("rotary_emb.inv_freq")}
    layouts = family_for(config.family, source.place).layouts
    further = f"model.layers.{len(config.layers)}."
    if config.mtp and not any(name.startswith(further) for name in shapes):
        config = replace(config, mtp=())  # declared, but not shipped
    if config.tied and "lm_head.weight" in shapes and not _head_is_embedding(source):
        config = replace(config, tied=False)
    candidates: list[list[Place]] = layouts(config)
    places = max(candidates, key=lambda places: sum(place.name in shapes for place in places))
    _compare(places, shapes, source.place)
    return config, [place for place in places if place.name in shapes]


def _head_is_embedding(source: Source) -> bool:
    embedding, head = source.tensor("model.embed_tokens.weight"), source.tensor("lm_head.weight")
    return embedding.shape == head.shape and torch.equal(embedding, head)


def _compare(places: list[Place], shapes: dict[str, tuple[int, ...]], where: Path) -> None:
    expected = {place.name: place for place in places}
    missing = [place.name for place in places if place.name not in shapes and not place.copy]
    extra = [name for name in shapes if name not in expected]
    wrong = [
        f"{name} is {_shape(shapes[name])}, not {_shape(place.shape)}"
        for name, place in expected.items()
        if name in shapes and shapes[name] != place.shape
    ]
    for problem, names in (("missing", missing), ("misshapen", wrong), ("extra", extra)):
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            count = f"{len(names)} tensor{'s' if len(names) > 1 else ''} {problem}"
            raise UserError(where, f"{count}: {shown}", "The weights do not belong to this config.json.")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a single number"


def fill(
    config: ModelConfig,
    source: Source,
    places: list[Place],
    dtype: torch.dtype,
    device: torch.device,
    mode: Mode = "fast",
) -> Model:
    """A model with the source's weights, read one tensor at a time."""
    with torch.device("meta"):
        model = Model(config, mode)
    by_parameter = defaultdict(list)
    for place in places:
        if not place.copy:
            by_parameter[place.parameter].append(place)
    for name, blank in list(model.state_dict().items()):
        # The balance bias decides between near-equal scores, so it keeps full precision.
        kind = torch.float32 if name.endswith("correction") else dtype
        tensor = torch.empty(blank.shape, dtype=kind, device=device)
        for place in by_parameter[name]:
            tensor[place.part].copy_(source.tensor(place.name)) if place.part else tensor.copy_(source.tensor(place.name))
        _assign(model, name, tensor)
    return model


def _assign(model: Model, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


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
    state = model.state_dict()
    kind = dtype or model.dtype
    files = files if files is not None else (model.tokenizer.files if model.tokenizer else {})

    def tensor(place: Place) -> Tensor:
        whole = state[place.parameter].detach()
        return whole[place.part] if place.part else whole

    write(path, model.config, tensor, kind, files, life or [], shard_bytes, progress)


def convert(
    source: Source,
    path: str | Path,
    *,
    life: list[dict[str, Any]],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> ModelConfig:
    """Write a source out as a model directory, tensor by tensor: the model is never in memory whole."""
    config, places = match(source)
    direct = {(place.parameter, str(place.part)): place for place in places if not place.copy}

    def tensor(place: Place) -> Tensor:
        same = direct.get((place.parameter, str(place.part)))
        if same is not None:
            return source.tensor(same.name)
        return source.tensor(direct[place.parameter, "()"].name)[place.part]

    write(path, config, tensor, dtype or getattr(torch, config.dtype), source.files, life, shard_bytes, progress)
    return config


def write(
    path: str | Path,
    config: ModelConfig,
    tensor: Callable[[Place], Tensor],
    dtype: torch.dtype,
    files: dict[str, bytes],
    life: list[dict[str, Any]],
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    config, raw = write_config(replace(config, dtype=str(dtype).removeprefix("torch.")))
    places: list[Place] = family_for(config.family, path).layouts(config)[0]
    # A tied head is not written twice: `transformers` ties it again.
    places = [place for place in places if not (place.copy and place.name == "lm_head.weight")]
    sizes = [_bytes(place, dtype) for place in places]
    texts = {
        **files,
        "config.json": _json(raw),
        lineage.FILE: _json(lineage.content(life)),
    }
    texts.setdefault("generation_config.json", _json(_generation(config)))
    room = int(sum(sizes) * 1.01) + sum(map(len, texts.values())) + 2**20
    with replacing(Path(path), room) as fresh:
        shards = list(_shards(places, sizes, shard_bytes))
        index = {}
        done = 0
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for place in shard:
                kind = torch.float32 if _keeps_precision(place) else dtype
                tensors[place.name] = tensor(place).to("cpu", kind).contiguous().clone()
                index[place.name] = name
                done += _bytes(place, dtype)
                if progress is not None:
                    progress(done, sum(sizes))
            save_file(tensors, fresh / name, metadata={"format": "pt"})
        if len(shards) > 1:
            content = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
            texts["model.safetensors.index.json"] = _json(content)
        for name, text in texts.items():
            (fresh / name).write_bytes(text)


def _keeps_precision(place: Place) -> bool:
    return place.parameter.endswith("correction")


def _bytes(place: Place, dtype: torch.dtype) -> int:
    count = 1
    for n in place.shape:
        count *= n
    return count * (4 if _keeps_precision(place) else dtype.itemsize)


def _shards(places: list[Place], sizes: list[int], limit: int) -> Iterator[list[Place]]:
    shard: list[Place] = []
    total = 0
    for place, size in zip(places, sizes, strict=True):
        if shard and total + size > limit:
            yield shard
            shard, total = [], 0
        shard.append(place)
        total += size
    yield shard


def _generation(config: ModelConfig) -> dict[str, Any]:
    eos: Any = list(config.eos) if len(config.eos) > 1 else (config.eos[0] if config.eos else None)
    content = {"bos_token_id": config.bos, "eos_token_id": eos, "pad_token_id": config.pad}
    return {name: value for name, value in content.items() if value is not None}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
