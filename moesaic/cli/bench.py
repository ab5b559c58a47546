"""Benchmark a server under load, or the planner beside published runs.

moesaic bench serve http://127.0.0.1:8000 --rate 4 --requests 100
moesaic bench plan --png planned.png
moesaic bench serve out/smollm2 --trace trace.jsonl --speed 2 --first-token 0.5 --json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import KeyVariable, ServedName

ORDER = 90
command = typer.Typer(help="Benchmark a server under load, or the planner beside published runs.")


@command.callback()
def several() -> None:
    """Benchmark a server under load, or the planner beside published runs."""


@command.command()
def serve(
    server: Annotated[
        str,
        typer.Argument(
            metavar="URL|DIR", help="An OpenAI-compatible server, or a model directory to serve for the benchmark."
        ),
    ],
    rate: Annotated[float, typer.Option(help="Request rate, per second (Poisson arrivals).", min=0.001)] = 2.0,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 50,
    words: Annotated[int, typer.Option(help="Mean words per prompt.", min=1)] = 100,
    max_tokens: Annotated[int, typer.Option(help="Output tokens per request.", min=1)] = 32,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests and their arrival times, as JSONL.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Speed-up of the trace.", min=0.001)] = 1.0,
    first_token: Annotated[float, typer.Option(help="Goodput target: seconds to the first token (TTFT).", min=0)] = 1.0,
    between: Annotated[float, typer.Option(help="Goodput target: mean seconds between tokens (TPOT).", min=0)] = 0.2,
    model: ServedName = None,
    api_key_env: KeyVariable = None,
    seconds: Annotated[float, typer.Option(help="Timeout of a request.", min=0.1)] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Send requests as concurrent clients would, and report throughput, latencies and goodput."""
    import asyncio
    import os
    import sys
    from contextlib import nullcontext

    from moesaic.errors import UserError
    from moesaic.serve.bench.load import Target, check_address, poisson, read_trace, report, send_all
    from moesaic.serve.bench.server_process import serving

    key = None
    if api_key_env is not None and not (key := os.environ.get(api_key_env)):
        raise UserError("--api-key-env", f"{api_key_env} is not set")
    if "://" in server:
        check_address(server)
    load = read_trace(trace, speed, seed) if trace else poisson(requests, rate, words, max_tokens, seed)

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {len(load)} answered", end="" if done < len(load) else "\n", file=sys.stderr)

    with nullcontext(server) if "://" in server else serving(Path(server)) as url:
        results = asyncio.run(send_all(url, load, model=model, key=key, seconds=seconds, progress=progress))
    found = report(load, results, Target(first_token, between))
    if json:
        print_json(found)
    else:
        _print(found)
    if 2 * found["failed"] > found["requests"]:  # what was measured is not the load that was asked for
        raise typer.Exit(1)


def _print(found: dict[str, Any]) -> None:
    print(
        "{requests} requests in {seconds:.1f} s, {failed} failed; {requests_per_second:.2f} requests/s, "
        "{prompt_tokens_per_second:.0f} prompt tokens/s, {tokens_per_second:.1f} tokens/s".format(**found)
    )
    for problem, count in found["problems"].items():
        example = found["said"].get(problem)
        print(f"  {count} x {problem}" + (f", such as: {example}" if example else ""))
    for name, key in (
        ("TTFT", "first_token_seconds"),
        ("inter-token", "inter_token_seconds"),
        ("end to end", "request_seconds"),
    ):
        if spread := found[key]:
            print(f"{name:15}" + "  ".join(f"{which} {value * 1000:.0f} ms" for which, value in spread.items()))
    good = found["goodput"]
    print(
        f"goodput        {good['share']:.0%} of requests, {good['requests_per_second']:.2f} a second, had their first "
        f"token within {good['first_token_target']:g} s and the others within {good['inter_token_target']:g} s each"
    )


@command.command()
def plan(
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot planned against measured steps.", parser=destination.file)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Predict every published training run, and print how far off each prediction is."""
    from moesaic.plan.training.accuracy import accuracy_json, accuracy_text, plot_accuracy

    if png:
        plot_accuracy(png)
    if json:
        return print_json(accuracy_json())
    print(accuracy_text())
