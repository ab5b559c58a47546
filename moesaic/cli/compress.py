"""Compress a model directory: quantize, prune or distill it.

moesaic compress out/smollm2 --method rtn --out out/small bits=4 group=64
moesaic compress out/smollm2 --method gptq --out out/small --data text.txt bits=3 group=64
moesaic compress out/mixture --method rtn --out out/w4a16 --layout compressed-tensors bits=4 group=64
moesaic compress out/mixture --method gptq --out out/mxfp4 format=mxfp4
moesaic compress out/smollm2 --target board.yaml --out out/small bits=4 speed=1.5
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import Device, Force, ModelDirectory, out_directory
from moesaic.cli.progress import progress_bar

ORDER = 60


def command(
    directory: ModelDirectory,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[option=value ...]", help="Options of the method.", show_default=False),
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compression method; docs/compress.md lists them. Default: gptq.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A target described in a YAML file, for which mixed precision is planned."),
    ] = None,
    out: Annotated[Path | None, out_directory("The directory to write.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration text, beside Python's own reference.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Calibration samples. Default: as many as it takes until more change nothing, up to 64."),
    ] = None,
    mix: Annotated[
        bool, typer.Option(help="Calibrate on the builtin text and what the model itself writes, beside --data.")
    ] = True,
    length: Annotated[int, typer.Option(help="Tokens per calibration sample.")] = 512,
    min_expert_tokens: Annotated[
        int, typer.Option(help="Calibration tokens every expert gets, routed to it or not.")
    ] = 64,
    ends_bits: Annotated[
        int | None,
        typer.Option(help="Bits of the embedding and the LM head; 0: not quantized. Default: 8 in our own layout."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="moesaic|compressed-tensors|fp8|glm-int",
            help="Layout of the quantized weights on disk: our own, what transformers and vLLM load (default with "
            "format=fp8_..., mxfp4 or nvfp4), DeepSeek's FP8, or GLM's INT4 and INT8.",
        ),
    ] = None,
    check_tokens: Annotated[
        int, typer.Option(help="Tokens to measure perplexity on, before and after; 0: do not.")
    ] = 2048,
    device: Device = None,
    force: Force = False,
    json: JsonFlag = False,
) -> None:
    """Compress a model (quantize, prune, distill) and measure what it costs."""
    from moesaic.cli.method_options import MethodOptions
    from moesaic.compress.compress import CompressionRequest, compress
    from moesaic.compress.methods import Compressor
    from moesaic.errors import UserError
    from moesaic.units import readable_bytes

    if out is None:
        raise UserError("--out", "is missing", "Name the directory to write.")
    if target is not None and method not in (None, "mixed"):
        raise UserError("--target", f"is for mixed precision, and not for {method}", "Leave out --method.")
    chosen = MethodOptions([*(options or []), *([f"target={target}"] if target is not None else [])])
    method = method or ("mixed" if target is not None else "gptq")
    made = chosen.make(method, Compressor, "--method")  # type: ignore[type-abstract]
    chosen.check()
    assert made is not None
    request = CompressionRequest(
        data, samples, length, ends_bits, min_expert_tokens, layout, check_tokens, force, mix, device
    )
    with progress_bar(disable=json) as progress:
        result = compress(directory, made, out, request, progress)
    if json:
        print_json({"directory": str(out), **result})
        return
    print(
        f"{out}: {readable_bytes(result['bytes'])}, {result['ratio']:.3f} of {readable_bytes(result['bytes_before'])}; "
        f"{result['bits_per_weight']:.2f} bits per weight; {result['seconds']:.0f} s."
    )
    if "perplexity" in result:
        print(
            f"Perplexity on {result['check_tokens']:,} tokens at the end of the text: "
            f"{result['perplexity_before']:.3f} before, {result['perplexity']:.3f} after "
            f"({result['perplexity_change']:+.2%}). On unlike text (source code): "
            f"{result['unlike_perplexity_before']:.3f}, then {result['unlike_perplexity']:.3f} "
            f"({result['unlike_perplexity_change']:+.2%})."
        )
    place = shlex.quote(str(out))
    print(f"Chat: moesaic chat {place}    Evaluate: moesaic evaluate {place} --suite perplexity --data FILE")
