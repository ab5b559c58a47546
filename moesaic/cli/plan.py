"""Memory, time, layout and cost before paying for a cluster, and how wrong the answer may be.

moesaic plan --model GLM-4.5-Air --cluster 64xH200 --train --batch 1024 --seq 4096
moesaic plan --model GPT-3-175B --cluster 3072xA100 --batch 6144 --seq 2048 --layout "tp=8 pp=8 interleave=6"
moesaic plan --model DeepSeek-V3 --cluster 16xH200 --serve --in 1024 --out 128 --layout "tp=8 dp=2 ep=16"
moesaic plan --model my-model.yaml --cluster 8xH100 --train --batch 64 --seq 4096 --json
moesaic plan whatif trace.json
moesaic plan failures --cluster 16384xH100 --checkpoint-seconds 20
moesaic plan energy --model Qwen3-30B-A3B --cluster 4xH200 --rate 20
moesaic plan disaggregate --model Qwen3-235B-A22B --cluster 32xH800
moesaic plan calibrate
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.atomic import write_json
from moesaic.cli import destination, plan_questions
from moesaic.cli.app import JsonFlag, print_json
from moesaic.errors import UserError

if TYPE_CHECKING:
    from moesaic.plan.hardware import Cluster
    from moesaic.plan.shape import ModelShape

ORDER = 5
command = typer.Typer(help="Memory, time, layout and cost before paying for a cluster.", invoke_without_command=True)

for question in (
    plan_questions.whatif, plan_questions.failures, plan_questions.energy, plan_questions.disaggregate,
    plan_questions.calibrate,
):  # fmt: skip
    command.command()(question)

Hardware = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Your own devices, as YAML (docs/plan.md); they may extend known ones."),
]


@command.callback()
def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR|FILE.yaml", help="A known model, a model directory, or a YAML of dimensions."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NxDEVICE", help="For instance 64xH200.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Plan training (the default).")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Plan serving.")] = False,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar='"tp=8 pp=16"',
            help="tp, pp, dp, ep, cp, interleave, zero, mb; dp defaults to what remains. Or a file that --save wrote. "
            "Without it the best one is searched.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Training: sequences per step, over the whole cluster.")] = 1024,
    seq: Annotated[int, typer.Option(help="Training: tokens per sequence.")] = 4096,
    recompute: Annotated[
        str | None, typer.Option(help="Training: activations recomputed: none, selective or full; a search chooses.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp8 or fp4; serving also int4 and int8.")] = "bf16",
    overlap: Annotated[
        str | None,
        typer.Option(
            metavar="tp,pp,dp,ep", help="Communication hidden behind computation; default: as stacks on that device do."
        ),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="fused or unfused (before FlashAttention); default: as stacks on that device do.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="Pipeline schedule: 1f1b or zero-bubble.")] = "1f1b",
    imbalance: Annotated[float, typer.Option(help="Tokens of the busiest expert rank over the mean.")] = 1.0,
    prompt: Annotated[int, typer.Option("--in", help="Serving: prompt tokens.")] = 1024,
    out: Annotated[
        str | None, typer.Option("--out", metavar="TOKENS|FILE", help="Serving: output tokens. Else as --save.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Serving: requests at once.")] = 64,
    backend: Annotated[
        str, typer.Option(help="Serving: typical (not known which), vllm, sglang, trtllm, or moesaic (one device).")
    ] = "typical",
    prefill: Annotated[
        str | None, typer.Option(metavar='"tp=4"', help="Serving: layout of separate prefill workers.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan and its layout as JSON.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the simulated step as a Chrome trace.")
    ] = None,
    gantt: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the simulated step as PNG.")] = None,
    hardware: Hardware = None,
    json: JsonFlag = False,
) -> None:
    """Does it fit, how fast, which layout, what does it cost: for training (--train) or serving (--serve)."""
    if context.invoked_subcommand is not None:
        return
    if model is None or cluster is None:
        print(context.get_help())
        raise typer.Exit(0 if model is None and cluster is None else 2)
    if train and serve:
        raise UserError("--train --serve", "one plan is for one of them", "Leave one out.")
    from moesaic.plan.hardware import load_cluster
    from moesaic.plan.models import load_model

    shape, machines = load_model(model), load_cluster(cluster, hardware)
    if out is not None and not (serve and out.isdigit()):
        save, out = save or Path(out), None
    if serve:
        wanted = int(out) if out else 128
        report, text = _serve(shape, machines, layout, prefill, prompt, wanted, concurrency, dtype, backend)
    else:
        from moesaic.plan.training.workload import TrainingWork

        hidden = None if overlap is None else frozenset(overlap.split(",")) - {"", "none"}
        fused = None if attention is None else _fused(attention)
        work = TrainingWork(batch, seq, dtype, recompute or "none", hidden, imbalance, fused, schedule)
        report, text = _train(shape, machines, layout, work, recompute, trace, gantt)
    if save:
        write_json(destination.file(save), report)
    if json:
        return print_json(report)
    print(text)
    if save:
        print(f"\nWritten to {save}; `moesaic plan --layout {save}` takes it again.")


def _fused(attention: str) -> bool:
    if attention not in ("fused", "unfused"):
        raise UserError(f"--attention {attention}", "is not known", "One of fused, unfused.")
    return attention == "fused"


def _train(
    model: ModelShape, cluster: Cluster, layout: str | None, work: Any, recompute: str | None,
    trace: Path | None, gantt: Path | None,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    from moesaic.parallel.layout import parse_layout
    from moesaic.plan.training.estimate import plan_training
    from moesaic.plan.training.search import search
    from moesaic.plan.training.summary import search_text, training_text

    if layout is None:
        result = search(model, cluster, work, recompute)
        made, text = result.best, search_text(result)
        report = made.as_json() | {"tried": result.tried, "runners_up": [other.brief() for other in result.others]}
    else:
        made = plan_training(model, cluster, parse_layout(layout, cluster.count), work)
        report, text = made.as_json(), training_text(made)
    if trace or gantt:
        from moesaic.plan.timeline.gantt import write_gantt
        from moesaic.plan.timeline.trace import Trace, write_chrome
        from moesaic.plan.training.simulate import simulate_step

        step = simulate_step(made)
        report |= {"simulated_seconds": step.seconds, "simulated_bubble": step.bubble}
        if trace:
            write_chrome(Trace.of_timeline(step.timeline), trace)
        if gantt:
            write_gantt(step.timeline, gantt, f"{model.name} on {cluster.name}: {made.layout}")
    return report, text


def _serve(
    model: ModelShape, cluster: Cluster, layout: str | None, prefill: str | None, prompt: int, output: int,
    concurrency: int, dtype: str, backend: str,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    from moesaic.parallel.layout import parse_layout
    from moesaic.plan.serving.estimate import estimate_serving
    from moesaic.plan.serving.measured_tables import find_tables
    from moesaic.plan.serving.search import search_serving
    from moesaic.plan.serving.summary import found_json, found_text, serving_json, serving_text

    if layout is None:
        found = search_serving(
            model, cluster, prompt=prompt, output=output, concurrency=concurrency, dtype=dtype, backend=backend
        )
        return found_json(model, cluster, found), found_text(model, cluster, found)
    parsed = parse_layout(layout, None if prefill else cluster.count)
    before = parse_layout(prefill, None, "--prefill") if prefill else None
    made = estimate_serving(
        model, cluster, parsed, prompt=prompt, output=output, concurrency=concurrency, dtype=dtype, backend=backend,
        prefill=before, tables=find_tables(),
    )  # fmt: skip
    return serving_json(model, cluster, parsed, made), serving_text(model, cluster, parsed, made)
