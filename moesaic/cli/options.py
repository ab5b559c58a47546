"""Arguments and options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moesaic.cli import destination


def out_directory(help: str) -> Any:
    """The option --out of a command that fills a directory, with what goes there."""
    return typer.Option("--out", metavar="DIR", parser=destination.directory, help=help)


ModelDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A model directory.", show_default=False)]
RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML file; recipes/tiny.yaml is one.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys of the recipe.")
]
RunDirectory = Annotated[Path, out_directory("Directory of the run; resumed if it exists.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is a model directory.")]
MeasuredOn = Annotated[
    str | None,
    typer.Option(
        "--on", help="Source, or prepared data, on whose held-out text the loss is measured; default: all sources."
    ),
]
MeasuredTokens = Annotated[
    int, typer.Option("--tokens", help="Held-out tokens per source that the loss is measured on.", min=1)
]

Dtype = Annotated[str | None, typer.Option("--dtype", help="Dtype of the weights; default: what is fast here.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: cuda if there is one.")]
SamplingParams = Annotated[
    list[str] | None,
    typer.Option("--sampling", metavar="NAME=VALUE", help="A sampling param's default, as min_p=0.05; repeatable."),
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; default: all cores.")]

Offload = Annotated[
    Literal["experts", "weights"] | None,
    typer.Option("--offload", help="Weights that stay on disk or in host memory and come when needed."),
]
OffloadFrom = Annotated[
    Literal["disk", "host"] | None,
    typer.Option("--offload-from", help="Where offloaded weights are; default: disk on a CPU, host memory for a GPU."),
]
ExpertCache = Annotated[
    float | None,
    typer.Option("--expert-cache-gb", help="Size of the cache of offloaded experts; default: a quarter of them."),
]

KVPolicyName = Annotated[
    str | None,
    typer.Option(
        "--kv-policy", metavar="NAME", help="KV cache eviction or compression; docs/kv-cache.md lists policies."
    ),
]
KVOptions = Annotated[
    list[str] | None, typer.Option("--kv", metavar="key=value", help="Option of the KV policy; repeatable.")
]
ServedName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Model name on the server; default: its first.")
]
KeyVariable = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="VARIABLE", help="Environment variable that holds the server's API key."),
]
