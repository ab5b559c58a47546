"""Evaluate a model, or compare several.

moesaic evaluate out/smollm2 --suite perplexity --data text.txt
moesaic evaluate out/smollm2 --suite perplexity --data text.txt --json window=1024 stride=512
moesaic evaluate out/aligned out/small --suite tasks family=sums --out evaluation
moesaic evaluate http://127.0.0.1:8000/v1 --suite tasks examples=50
moesaic evaluate out/smollm2 --suite longcontext --kv-policy snapkv --kv share=0.25
moesaic evaluate out/aligned --suite agents,safety --out evaluation
moesaic evaluate out/a --suite tasks --checkpoints
moesaic evaluate --suite machine seconds=20
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import Device, Dtype, KeyVariable, KVOptions, KVPolicyName, ServedName, Threads, out_directory
from moesaic.cli.progress import progress_bar

if TYPE_CHECKING:
    from moesaic.evaluate.evaluate import Evaluation

ORDER = 70


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL ... [option=value ...]",
            help="Model directories, or URLs of servers; and options of the suites.",
            show_default=False,
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Suites to run; docs/evaluate.md lists them.")
    ] = "perplexity",
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text or JSONL; perplexity's default is Python's reference.")
    ] = None,
    out: Annotated[
        Path | None, out_directory("Keep responses and write evaluation.json and .html; the same command resumes.")
    ] = None,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints", help="MODEL is a run: evaluate every checkpoint it keeps; scores go to its scores.jsonl."
        ),
    ] = False,
    kv_policy: KVPolicyName = None,
    kv: KVOptions = None,
    model: ServedName = None,
    api_key_env: KeyVariable = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json: JsonFlag = False,
) -> None:
    """Evaluate a model, or compare several."""
    import re

    from rich.console import Console

    from moesaic.cli.method_options import MethodOptions
    from moesaic.evaluate.evaluate import Evaluation, table
    from moesaic.evaluate.suites import Suite, Weights
    from moesaic.serve.core.kv_policies import KVPolicy

    options = [word for word in words or [] if re.match(r"\w+=", word)]
    models = [word for word in words or [] if word not in options]
    chosen = MethodOptions(options)
    suites = {name: chosen.make(name, Suite, "--suite") for name in suite.split(",")}  # type: ignore[type-abstract]
    chosen.check()
    of_cache = MethodOptions(kv or [])
    policy = of_cache.make(kv_policy, KVPolicy, "--kv-policy")
    of_cache.check()
    evaluation = Evaluation(
        {name: made for name, made in suites.items() if made is not None},
        data=data,
        out=out,
        kv_policy=policy,
        api_key_env=api_key_env,
        model=model,
        weights=Weights(dtype, device, threads),
    )
    evaluation.check(models)
    if checkpoints:
        return _along_the_run(evaluation, models, json)
    with progress_bar(disable=json) as progress:
        found = evaluation.run(models, progress)
    if json:
        report: dict[str, Any] = {"models": found}
        if len(found) == 1:  # one model's numbers stand by themselves, and those of one suite
            ((place, by_suite),) = found.items()
            report = {"directory": place} | (
                next(iter(by_suite.values())) if len(by_suite) == 1 else {"suites": by_suite}
            )
        print_json(report)
        return
    Console(highlight=False).print(table(found))
    if out is not None:
        print(f"{out / 'evaluation.html'}")


def _along_the_run(evaluation: Evaluation, runs: list[str], json: bool) -> None:
    from moesaic.evaluate.checkpoints import FILE, evaluate_checkpoints
    from moesaic.evaluate.comparison import cell

    with progress_bar(disable=json) as progress:
        found = evaluate_checkpoints(evaluation, [Path(run) for run in runs], progress)
    if json:
        return print_json({"runs": found})
    for run, lines in found.items():
        for line in lines:
            numbers = {key: value for key, value in line["numbers"].items() if isinstance(value, int | float)}
            print(f"{run} step {line['step']:,} {line['suite']}: {cell(numbers, next(iter(numbers), ''))}")
        print(f"wrote {Path(run) / FILE}; next: moesaic law emerge {' '.join(map(shlex.quote, runs))}")
