"""What `moesaic compress` does: check that it can be done, run the method, write the directory, measure, report."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.atomic import exclusive, refuse_to_overwrite
from moesaic.compress import calibration, writer
from moesaic.compress.job import Job, Progress
from moesaic.compress.layer_store import LayerStore, parts_folder, started_with
from moesaic.compress.methods import Compressor
from moesaic.compress.report import layer_errors, plot_errors
from moesaic.data.plain_text import read_text
from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.model.config import Experts
from moesaic.model.directory import Parts, chosen_device, load
from moesaic.model.facts import bits_per_weight, facts
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.formats.opening import is_compressed, open_checkpoint
from moesaic.model.perplexity import perplexity
from moesaic.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompressionRequest:
    """Everything that is asked for beside the method and its own options."""

    data: Path | None = None
    samples: int = 16
    length: int = 512
    ends_bits: int | None = None
    min_expert_tokens: int = 64
    layout: str = "moesaic"
    check_tokens: int = 2048
    force: bool = False
    device: str | None = None  # None: what there is

    def check(self) -> None:
        writer.check_layout(self.layout)
        for flag, number, low in (
            ("--samples", self.samples, 1),
            ("--length", self.length, 16),
            ("--min-expert-tokens", self.min_expert_tokens, 1),
            ("--check-tokens", self.check_tokens, 0),
        ):
            if number < low:
                raise UserError(flag, f"must be at least {low}, not {number}")
        if self.ends_bits not in (None, 0, 2, 3, 4, 5, 6, 8):
            raise UserError("--ends-bits", f"must be 0 (as they are), 2, 3, 4, 5, 6 or 8, not {self.ends_bits}")
        if self.ends_bits and self.layout != "moesaic":
            problem = f"the {self.layout} layout keeps the embedding and the output matrix as they are"
            raise UserError("--ends-bits", problem, "Leave one of them out.")


def compress(
    directory: Path,
    method: Compressor,
    out: Path,
    request: CompressionRequest,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Returns what it came to, as it also stands in the new directory's life."""
    request.check()
    if method.own_layout and request.layout != "moesaic":
        problem = f"what {type(method).__module__.rpartition('.')[2]} makes cannot be kept in {request.layout}"
        raise UserError("--layout", problem, "Leave it out, or take rtn, gptq, awq or zeroquant.")
    started = time.perf_counter()
    source = open_checkpoint(directory)
    if is_compressed(source):
        raise UserError(directory, "is compressed already", "Compress the original.")
    refuse_to_overwrite(out, directory)
    parts = Parts(source)
    mixture = any(isinstance(layer.ffn, Experts) for layer in parts.config.layers)
    if request.layout != "moesaic" and mixture and (why := method.not_joined):
        problem = f"transformers cannot load a mixture of experts from {why} in {request.layout}"
        remedy = "Leave out --layout, or make symmetric codes of one size (as rtn, awq and gptq symmetric=true do)."
        raise UserError("--layout", problem, remedy)
    named = {"name": type(method).__module__.rpartition(".")[2], **dataclasses.asdict(method)}  # type: ignore[call-overload]
    tokenizer = Tokenizer.from_files(source.files, source.place)
    text = read_text(request.data)
    sequences: list[list[int]] = []
    length = min(request.length, parts.config.context)
    if method.reads_text:
        if tokenizer is None:
            raise UserError(directory, "has no tokenizer, and this method reads text", "Take rtn or hqq.")
        sequences = calibration.sequences(text, tokenizer, request.samples, length, request.data or "builtin text")
    ends_bits = method.ends_bits if request.layout == "moesaic" else 0
    ends_bits = ends_bits if request.ends_bits is None else request.ends_bits
    identity = {
        "source": str(directory.resolve()),
        "config": source.config,
        "life": lineage.read(directory),
        "bytes": Checkpoint(directory).bytes,
        "method": named,
        "text": hashlib.sha256(repr(sequences).encode()).hexdigest(),
        "ends_bits": ends_bits,
        "least": request.min_expert_tokens,
        "layout": request.layout,
    }
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken and not request.force and not started_with(out, identity):  # else it was killed while it was measured
        raise UserError(out, "exists already", "Name another directory, or add --force to replace it.")
    with exclusive(parts_folder(out)):
        store = LayerStore(out, identity)
        whole_zeros, device = request.layout != "moesaic", chosen_device(request.device)
        job = Job(
            parts, directory, store, sequences, ends_bits, request.min_expert_tokens, whole_zeros, progress, device
        )
        config = method.run(job)
        errors = layer_errors(store)
        before, known = Checkpoint(directory).bytes, facts(config)
        result: dict[str, Any] = {
            "method": named,
            "source": directory.name,
            "layout": request.layout,
            "calibration_tokens": sum(map(len, sequences)),
            "bytes_before": before,
            "parameters": known.parameters,
        }
        writer.write(job, config, out, [*lineage.read(directory), lineage.stage("compress", **result)], request.layout)
        result["bytes"] = Checkpoint(out).bytes
        result["bits_per_weight"] = bits_per_weight(Checkpoint(out), config)
        result["ratio"] = round(result["bytes"] / before, 4)
        result["layer_errors"] = errors
        if request.check_tokens and tokenizer is not None:
            progress("measuring", 0, 1)
            result |= _cost(directory, out, tokenizer, text, request, length)
        result["seconds"] = round(time.perf_counter() - started, 1)
        _tell(out, result, directory)
        store.clear()
    return result


def _cost(
    directory: Path, out: Path, tokenizer: Tokenizer, text: str, request: CompressionRequest, length: int
) -> dict[str, Any]:
    """Perplexity before and after on the end of the text, which is the last that calibration would take."""
    tail = tokenizer.encode(text[-request.check_tokens * 16 :])[-request.check_tokens :]
    if len(tail) < 2:
        return {}
    before, after = (
        perplexity(load(place, device=request.device), tail, length, length).perplexity for place in (directory, out)
    )
    return {
        "check_tokens": len(tail),
        "perplexity_before": round(before, 4),
        "perplexity": round(after, 4),
        "perplexity_change": round(after / before - 1, 5),
    }


def _tell(out: Path, result: dict[str, Any], source: Path) -> None:
    """What was measured after writing goes to the life as well, and the plot beside it."""
    life = [*lineage.read(source), lineage.stage("compress", **result)]
    atomic.write_json(out / lineage.FILE, lineage.content(life), indent=2)
    if result["layer_errors"]:
        plot_errors(result, out / "compression.png")
