"""What a model is, and its life so far.

moesaic show out/smollm2
moesaic show out/smollm2 --json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.app import JsonFlag, print_json

ORDER = 20


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory.", show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Show what a model is: parameters, layers, memory, and its life so far."""
    from moesaic.model import lineage
    from moesaic.model.facts import bits_per_weight, describe_layers, facts
    from moesaic.model.formats.checkpoint import Checkpoint
    from moesaic.model.formats.matching import match
    from moesaic.model.formats.opening import is_compressed, open_checkpoint
    from moesaic.model.value_head import has_head

    source = open_checkpoint(directory)
    config, _ = match(source)
    known = facts(config)
    report: dict[str, Any] = {
        "directory": str(directory),
        "family": config.family,
        "parameters": known.parameters,
        "active_parameters": known.active_parameters,
        "prediction_parameters": known.prediction_parameters,
        "layers": len(config.layers),
        "layer_kinds": describe_layers(config),
        "hidden": config.hidden,
        "vocab": config.vocab,
        "experts": max((getattr(layer.ffn, "count", 0) for layer in config.layers), default=0),
        "experts_per_token": max((getattr(layer.ffn, "per_token", 0) for layer in config.layers), default=0),
        "context": config.context,
        "dtype": config.dtype,
        "disk_bytes": source.bytes,
        "bits_per_weight": bits_per_weight(Checkpoint(directory), config),
        "compressed": is_compressed(source),
        "run_bytes": source.bytes if is_compressed(source) else known.run_bytes,
        "train_bytes": known.train_bytes,
        "kv_bytes_per_token": known.kv_bytes_per_token,
        "value_head": has_head(directory),
        "life": lineage.read(directory),
    }
    if json:
        print_json(report)
        return
    _print(report)
    from moesaic.train.report.metrics import read_metrics
    from moesaic.train.report.terminal_plot import life_picture

    if (directory / "metrics.jsonl").is_file():
        print(f"\n{life_picture(read_metrics(directory))}")


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from moesaic.sizes import readable

    active = f", {count(report['active_parameters'])} active per token"
    parameters = count(report["parameters"]) + (active if report["experts"] else "")
    further = report["prediction_parameters"]
    stored = f"{report['bits_per_weight']:.2f} bits a weight" if report["compressed"] else report["dtype"]
    rows = [
        ("model", f"{report['family']}, {parameters}"),
        *[("layers" if not number else "", line) for number, line in enumerate(report["layer_kinds"])],
        *([("", f"{count(further)} parameters that predict further tokens")] if further else []),
        *([("", "a value head: it is a reward model or critic")] if report["value_head"] else []),
        ("sizes", f"hidden {report['hidden']}, vocabulary {report['vocab']:,}, context {report['context']:,}"),
        ("on disk", f"{readable(report['disk_bytes'])}, {stored}"),
        ("to run", f"{readable(report['run_bytes'])}, and {readable(report['kv_bytes_per_token'])} a token of context"),
        ("to train", f"{readable(report['train_bytes'])} (weights, gradients, AdamW; float32), and activations"),
    ]
    for stage in report["life"]:
        facts = {key: value for key, value in stage.items() if key not in ("stage", "when", "moesaic")}
        details = ", ".join(f"{key} {value}" for key, value in facts.items() if isinstance(value, str | int | float))
        rows.append((str(stage.get("when", "?"))[:10], f"{stage.get('stage', '?')}: {details}"))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(value))
    Console(highlight=False).print(table)


def count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
