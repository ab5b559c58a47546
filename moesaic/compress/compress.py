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
from moesaic.compress.convergence import MOST_SAMPLES, enough_samples
from moesaic.compress.job import Job, Progress
from moesaic.compress.layer_store import LayerStore, parts_folder, started_with
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.compress.methods import Compressor
from moesaic.compress.report import keep_run_report, layer_errors, plot_errors
from moesaic.data.plain_text import builtin_text, read_text
from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.model.config import Experts
from moesaic.model.directory import Parts, chosen_device, load
from moesaic.model.encoder import refuse_encoder
from moesaic.model.facts import bits_per_weight, facts
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.formats.opening import is_compressed, open_checkpoint
from moesaic.model.formats.turned import turns
from moesaic.model.perplexity import perplexity
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.memory import free_bytes

DEFAULT_SAMPLES = 16  # where nothing says how many are enough
MIN_MIXED = 8  # fewer are of one kind
MOST_WRITTEN = 8  # samples that the model writes


@dataclass(frozen=True)
class CompressionRequest:
    """Everything that is asked for beside the method and its own options."""

    data: Path | None = None
    samples: int | None = None  # None: until more of them change nothing, as far as the method can tell
    length: int = 512
    ends_bits: int | None = None
    min_expert_tokens: int = 64
    layout: str | None = None  # None: the first of the method's
    check_tokens: int = 2048
    force: bool = False
    mix: bool = True  # calibrate on the builtin text and what the model writes, beside `data`
    device: str | None = None  # None: what there is

    def check(self) -> None:
        if self.layout is not None:
            writer.check_layout(self.layout)
        for flag, number, low in (
            ("--samples", DEFAULT_SAMPLES if self.samples is None else self.samples, 1),
            ("--length", self.length, 16),
            ("--min-expert-tokens", self.min_expert_tokens, 1),
            ("--check-tokens", self.check_tokens, 0),
        ):
            if number < low:
                raise UserError(flag, f"must be at least {low}, not {number}")
        if self.ends_bits not in (None, 0, 2, 3, 4, 5, 6, 8):
            raise UserError("--ends-bits", f"must be 0 (as they are), 2, 3, 4, 5, 6 or 8, not {self.ends_bits}")


def compress(
    directory: Path,
    method: Compressor,
    out: Path,
    request: CompressionRequest,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Returns what it came to, as it also stands in the new directory's life."""
    request.check()
    layout = request.layout or method.layouts[0]
    if layout not in method.layouts:
        problem = (
            f"what {type(method).__module__.rpartition('.')[2]} makes with these options cannot be kept in {layout}"
        )
        raise UserError("--layout", problem, f"Take {' or '.join(method.layouts)}; docs/compress.md has the formats.")
    if request.ends_bits and layout != "moesaic":
        problem = f"the {layout} layout keeps the embedding and the output matrix as they are"
        raise UserError("--ends-bits", problem, "Leave one of them out.")
    started = time.perf_counter()
    source = open_checkpoint(directory)
    if is_compressed(source):
        raise UserError(directory, "is compressed already", "Compress the original.")
    refuse_to_overwrite(out, directory)
    parts = Parts(source)
    refuse_encoder(parts.config, directory, "there is nothing to calibrate it by")
    mixture = any(isinstance(layer.ffn, Experts) for layer in parts.config.layers)
    if layout != "moesaic" and turns(parts.config.family):
        problem = f"matrices of {parts.config.family} lie otherwise on disk than {layout} has them"
        raise UserError("--layout", problem, "Leave out --layout.")
    if layout != "moesaic" and mixture and (why := method.not_joined):
        problem = f"transformers cannot load a mixture of experts from {why} in {layout}"
        remedy = "Leave out --layout, or make symmetric codes of one size (as rtn, awq and gptq symmetric=true do)."
        raise UserError("--layout", problem, remedy)
    named = {"name": type(method).__module__.rpartition(".")[2], **dataclasses.asdict(method)}  # type: ignore[call-overload]
    tokenizer = Tokenizer.from_files(source.files, source.place)
    text = read_text(request.data)
    sequences: list[list[int]] = []
    length = min(request.length, parts.config.context)
    by_convergence = request.samples is None and isinstance(method, LayerwiseCompressor)
    if method.reads_text:
        if tokenizer is None:
            raise UserError(directory, "has no tokenizer, and this method reads text", "Take rtn or hqq.")
        samples = request.samples or (MOST_SAMPLES if by_convergence else DEFAULT_SAMPLES)
        sequences = _calibration(directory, tokenizer, text, request, samples, length)
    ends_bits = method.ends_bits if layout == "moesaic" else 0
    ends_bits = ends_bits if request.ends_bits is None else request.ends_bits
    identity = {
        "source": str(directory.resolve()),
        "config": source.config,
        "life": lineage.read(directory),
        "bytes": Checkpoint(directory).bytes,
        "method": named,
        "target": str(getattr(method, "_target", "")),
        "text": hashlib.sha256(repr(sequences).encode()).hexdigest(),
        "by_convergence": by_convergence,
        "ends_bits": ends_bits,
        "least": request.min_expert_tokens,
        "layout": layout,
    }
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken and not request.force and not started_with(out, identity):  # else it was killed while it was measured
        raise UserError(out, "exists already", "Name another directory, or add --force to replace it.")
    with exclusive(parts_folder(out)):
        store = LayerStore(out, identity)
        whole_zeros, device = layout != "moesaic", chosen_device(request.device)
        job = Job(
            parts, directory, store, sequences, ends_bits, request.min_expert_tokens, whole_zeros, progress, device
        )
        if by_convergence and sequences:
            job.sequences = sequences[: enough_samples(job)]
        config = method.run(job)
        errors = layer_errors(store)
        before, known = Checkpoint(directory).bytes, facts(config)
        result: dict[str, Any] = {
            "method": named,
            "source": directory.name,
            "layout": layout,
            "calibration_tokens": sum(map(len, job.sequences)),
            "bytes_before": before,
            "parameters": known.parameters,
        }
        writer.write(job, config, out, [*lineage.read(directory), lineage.stage("compress", **result)], layout)
        result["bytes"] = Checkpoint(out).bytes
        result["bits_per_weight"] = bits_per_weight(Checkpoint(out), config)
        result["ratio"] = round(result["bytes"] / before, 4)
        result["layer_errors"] = errors
        if store.has("plan"):
            result["plan"] = {key: of for key, of in store.about("plan")["facts"].items() if key != "choices"}
        if request.check_tokens and tokenizer is not None:
            progress("measuring", 0, 1)
            result |= _cost(directory, out, tokenizer, text, request, length)
        result["seconds"] = round(time.perf_counter() - started, 1)
        _tell(out, result, directory)
        keep_run_report(store, out)
        store.clear()
    return result


def _calibration(
    directory: Path, tokenizer: Tokenizer, text: str, request: CompressionRequest, samples: int, length: int
) -> list[list[int]]:
    """Half of it the user's own text, if there is one; the rest in turns the builtin text and what the model writes."""
    pieces = calibration.sequences(text, tokenizer, samples, length, request.data or "builtin text")
    if not request.mix or samples < MIN_MIXED:
        return pieces
    own: list[list[int]] = []
    if 4 * Checkpoint(directory).bytes < free_bytes(chosen_device("cpu")):
        count = min(MOST_WRITTEN, samples // 4)
        own = calibration.written_by(load(directory, device=request.device), pieces[:count], length)
    if request.data is None:
        return calibration.mixed([pieces, own], samples)
    builtin = calibration.sequences(builtin_text(), tokenizer, samples, length, "builtin text")
    other = calibration.mixed([own, builtin], samples)
    return calibration.mixed([pieces, other], samples)


def _cost(
    directory: Path, out: Path, tokenizer: Tokenizer, text: str, request: CompressionRequest, length: int
) -> dict[str, Any]:
    """Perplexity before and after: on the end of the text, which is the last that calibration would take, and on text
    of a kind that is never calibrated on."""
    texts = [text[-request.check_tokens * 16 :], calibration.unlike_text()[: request.check_tokens * 16]]
    like, unlike = (tokenizer.encode(some)[-request.check_tokens :] for some in texts)
    if len(like) < 2:
        return {}
    before, before_unlike, after, after_unlike = (
        perplexity(model, tokens, length, length).perplexity
        for model in (load(place, device=request.device) for place in (directory, out))
        for tokens in (like, unlike)
    )
    return {
        "check_tokens": len(like),
        "perplexity_before": round(before, 4),
        "perplexity": round(after, 4),
        "perplexity_change": round(after / before - 1, 5),
        "unlike_perplexity_before": round(before_unlike, 4),
        "unlike_perplexity": round(after_unlike, 4),
        "unlike_perplexity_change": round(after_unlike / before_unlike - 1, 5),
    }


def _tell(out: Path, result: dict[str, Any], source: Path) -> None:
    """What was measured after writing goes to the life as well, and the plot beside it."""
    life = [*lineage.read(source), lineage.stage("compress", **result)]
    atomic.write_json(out / lineage.FILE, lineage.content(life), indent=2)
    if result["layer_errors"]:
        plot_errors(result, out / "compression.png")
