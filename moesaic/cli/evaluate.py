"""How good a model is.

moesaic evaluate out/smollm2 --suite perplexity --data text.txt
moesaic evaluate out/smollm2 --suite perplexity --data text.txt --json window=1024 stride=512
moesaic evaluate out/smollm2 --suite longcontext length=1024 --kv-policy snapkv --kv share=0.25
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.app import JsonFlag, print_json

ORDER = 70


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory.", show_default=False)],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[option=value ...]", help="Of the suites.", show_default=False)
    ] = None,
    suite: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="What to measure.")] = "perplexity",
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Text; else Python's own reference.")] = None,
    kv_policy: Annotated[
        str | None, typer.Option("--kv-policy", metavar="NAME", help="What of the cache stays (suites of long texts).")
    ] = None,
    kv: Annotated[list[str] | None, typer.Option(metavar="key=value", help="An option of the cache's policy.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; else what this machine is good at.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else what there is.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of the processor; else all.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure how good a model is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from moesaic.cli.method_options import MethodOptions
    from moesaic.errors import UserError
    from moesaic.evaluate.suites import Asked, Suite
    from moesaic.model.directory import load
    from moesaic.serve.kv_policies import KVPolicy

    chosen = MethodOptions(options or [])
    suites = {name: chosen.make(name, Suite, "--suite") for name in suite.split(",")}  # type: ignore[type-abstract]
    chosen.check()
    of_cache = MethodOptions(kv or [])
    policy = of_cache.make(kv_policy, KVPolicy, "--kv-policy")
    of_cache.check()
    for name, made in suites.items():
        if policy is not None and made is not None and not made.takes_kv_policy:
            raise UserError("--kv-policy", f"{name} is not measured with a pruned cache", "Take --suite longcontext.")
    model = load(directory, dtype=dtype, device=device, threads=threads)
    report: dict[str, Any] = {"directory": str(directory)}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=json) as bar:
        for name, made in suites.items():
            assert made is not None
            task = bar.add_task(name)

            def progress(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            report |= made.run(model, Asked(data, progress, policy))
    if json:
        print_json(report)
        return
    for key, value in report.items():
        print(f"{key:16}{value:.4f}" if isinstance(value, float) else f"{key:16}{value}")
