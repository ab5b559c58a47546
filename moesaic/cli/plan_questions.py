"""The further questions of `moesaic plan`: stragglers, failures, clocks, separate experts, and this machine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json

ModelName = Annotated[
    str, typer.Option("--model", metavar="NAME|DIR|FILE.yaml", help="A known model, a model directory, or a YAML.")
]
ClusterName = Annotated[str, typer.Option("--cluster", metavar="NxDEVICE", help="For instance 32xH800.")]
Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="A Chrome trace (.json, .json.gz) or a CSV of a run.")]


def whatif(
    trace: Trace,
    ideal: Annotated[
        str, typer.Option(help="What computations are idealised by: mean or median of their kind.")
    ] = "mean",
    json: JsonFlag = False,
) -> None:
    """Replay a recorded run with stragglers healed: slow-down, wasted GPU hours, ranked causes."""
    from moesaic.plan.text_table import table
    from moesaic.plan.timeline.trace import read_trace
    from moesaic.plan.whatif.analysis import analyse

    found = analyse(read_trace(trace), ideal)
    if json:
        return print_json(found.as_dict())
    print(found.summary() + "\n")
    rows = [(row["what"], row["where"], row["saves"], row["why"]) for row in found.table()]
    print(table([("what", "where", "saves", "why"), *rows]))


def failures(
    cluster: Annotated[str, typer.Option(metavar="NxDEVICE", help="For instance 16384xH100.")],
    mtbf_hours: Annotated[float, typer.Option(help="Mean hours between failures of one device.", min=0.001)] = 45_000.0,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="That training stands still for a checkpoint.", min=0)
    ] = 30.0,
    write_seconds: Annotated[float, typer.Option(help="Then, in the background, until it is written.", min=0)] = 0.0,
    detection_seconds: Annotated[float, typer.Option(help="Until a failure is noticed.", min=0)] = 60.0,
    restart_seconds: Annotated[float, typer.Option(help="Until training goes on.", min=0)] = 300.0,
    interval_minutes: Annotated[
        float | None, typer.Option(help="Between checkpoints; default: the best interval.", min=0.01)
    ] = None,
    spares: Annotated[int | None, typer.Option(help="Spare nodes; default: there is always one.", min=0)] = None,
    repair_hours: Annotated[float, typer.Option(help="Until a failed node is back.", min=0)] = 24.0,
    elastic: Annotated[bool, typer.Option("--elastic", help="Go on with fewer nodes when spares run out.")] = False,
    redundant: Annotated[
        bool, typer.Option("--redundant", help="Bamboo: every stage also keeps its neighbour's layers.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """How much of the time trains when machines fail, and how often to write checkpoints."""
    from moesaic.plan.failures.goodput import FailureModel, Redundancy, best_interval, goodput, node_mtbf_seconds
    from moesaic.plan.hardware import load_cluster
    from moesaic.plan.text_table import table

    machines = load_cluster(cluster)
    per_node = min(8, machines.device.domain, machines.count)
    model = FailureModel(
        nodes=max(1, machines.count // per_node),
        node_mtbf_seconds=node_mtbf_seconds(mtbf_hours, per_node),
        checkpoint_seconds=checkpoint_seconds,
        write_seconds=write_seconds,
        detection_seconds=detection_seconds,
        restart_seconds=restart_seconds,
        spares=spares,
        repair_seconds=repair_hours * 3600 if spares is not None else 0.0,
        elastic=elastic,
        redundancy=Redundancy() if redundant else None,
    )
    found = goodput(model, interval_minutes * 60) if interval_minutes else best_interval(model)
    if json:
        return print_json({"cluster": machines.name, "nodes": model.nodes, **found.as_dict()})
    shares = [
        ("training that counts", found.goodput), ("writing checkpoints", found.checkpoints),
        ("work done twice", found.lost_work), ("noticing and restarting", found.downtime),
        ("waiting for repairs", found.waiting), ("redundant computation", found.redundancy),
    ]  # fmt: skip
    which = "given" if interval_minutes else "best"
    print(f"{machines.name}: {found.failures_per_day:.2f} failures a day, a checkpoint every ", end="")
    print(f"{found.interval_seconds / 60:.1f} minutes ({which})")
    print(table([(name, f"{share:.2%}") for name, share in shares if share > 0 or name.startswith("training")]))


def energy(
    model: ModelName,
    cluster: ClusterName,
    rate: Annotated[float, typer.Option(help="Requests per second, on average.", min=0.001)] = 10.0,
    seconds: Annotated[float, typer.Option(help="Length of the simulated trace.", min=1)] = 600.0,
    ttft_ms: Annotated[float, typer.Option(help="SLO: time to the first token.", min=1)] = 1000.0,
    tpot_ms: Annotated[float, typer.Option(help="SLO: time per further token.", min=0.1)] = 50.0,
    layout: Annotated[str, typer.Option(metavar='"tp=2"', help="Of one instance; half of them prefill.")] = "tp=1",
    dtype: Annotated[str, typer.Option(help="bf16, fp8 or fp4.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    json: JsonFlag = False,
) -> None:
    """What clocks cost a serving cluster: fixed ones, and VoltanaLLM's control, on a simulated trace."""
    from dataclasses import asdict

    from moesaic.parallel.layout import parse_layout
    from moesaic.plan.energy.compare import compare_clocks, saved
    from moesaic.plan.energy.request_trace import Traffic
    from moesaic.plan.hardware import load_cluster
    from moesaic.plan.models import load_model
    from moesaic.plan.text_table import table
    from moesaic.serve.energy.control import Slo

    slo = Slo(ttft_ms / 1e3, tpot_ms / 1e3)
    traffic = Traffic(seconds, rate, seed=seed)
    found = compare_clocks(load_model(model), load_cluster(cluster), parse_layout(layout), traffic, slo, dtype=dtype)
    if json:
        return print_json([asdict(one) | {"saved": saved(one, found[0])} for one in found])
    rows = [
        (one.policy, f"{one.joules_per_token:.3g} J", f"{saved(one, found[0]):.1%}", f"{one.attainment:.2%}",
         f"{one.ttft_p99 * 1e3:,.0f} ms", f"{one.tpot_p99 * 1e3:,.1f} ms")
        for one in found
    ]  # fmt: skip
    print(f"{found[0].requests:,} requests in {seconds:,.0f} s; saved is against the highest clock")
    print(table([("policy", "per token", "saved", "within SLO", "TTFT p99", "TPOT p99"), *rows]))


def disaggregate(
    model: ModelName,
    cluster: ClusterName,
    context: Annotated[float, typer.Option(help="Tokens of context per sequence.", min=1)] = 2048.0,
    tpot_ms: Annotated[float, typer.Option(help="Time per token that must be kept.", min=0.1)] = 150.0,
    train: Annotated[bool, typer.Option("--train", help="Training (DisagMoE) instead of decoding.")] = False,
    seq: Annotated[int, typer.Option(help="Training: tokens per sequence.", min=1)] = 4096,
    ep: Annotated[int, typer.Option(help="Training: ranks that share a set of experts.", min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    json: JsonFlag = False,
) -> None:
    """Attention and experts on separate devices, beside the usual layouts of the same devices."""
    from dataclasses import asdict

    from moesaic.plan.disaggregation import disagmoe
    from moesaic.plan.disaggregation.decode_parts import Decoding
    from moesaic.plan.disaggregation.group_sizes import serving_sizes
    from moesaic.plan.disaggregation.megascale_infer import compare_decoding
    from moesaic.plan.hardware import load_cluster
    from moesaic.plan.models import load_model
    from moesaic.plan.text_table import table

    shape, machines = load_model(model), load_cluster(cluster)
    if train:
        layers = disagmoe.compare(shape, machines, sequence=seq, ep=ep, dtype=dtype)
        if json:
            return print_json({name: asdict(one) for name, one in layers.items()})
        parts = [
            (name, f"{one.attention} + {one.experts}" if one.experts else f"{one.attention}",
             f"{one.seconds * 1e3:.2f} ms", f"{one.exposed:.0%} waiting", f"bound by {one.bound}")
            for name, one in layers.items()
        ]  # fmt: skip
        return print(table([("one layer, forward and backward", "devices", "time", "", ""), *parts]))
    asked = Decoding(context, tpot_ms / 1e3, dtype)
    served = serving_sizes(shape, machines.device, machines.count, asked)
    plans = compare_decoding(shape, machines, asked) | {"apart, as served here": served}
    if json:
        return print_json({name: asdict(one) if one else None for name, one in plans.items()})
    rows = []
    for name, one in plans.items():
        if one is None:
            rows.append((name, "", "does not fit or is too slow", "", "", ""))
            continue
        devices = f"{one.attention} + {one.experts}" if one.experts else f"{one.attention}"
        speed = f"{one.tokens_per_second / one.devices:,.0f} tok/s per device"
        rows.append(
            (name, devices, f"{one.batch:,} sequences", f"{one.tpot * 1e3:.1f} ms", speed, f"bound by {one.bound}")
        )
    print(table([("decoding", "devices", "under way", "TPOT", "throughput", ""), *rows]))
    if served is not None:
        print(f"\nNext: moesaic serve DIR --attention {served.attention} --experts {served.experts}")


def calibrate(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: the GPU if there is one.")] = None,
    seconds: Annotated[float, typer.Option(help="To measure for, about.", min=0.5)] = 6.0,
    name: Annotated[str, typer.Option(help="What to call it in --cluster 1xNAME.")] = "here",
    json: JsonFlag = False,
) -> None:
    """Measure this machine, and keep it as a device to plan with."""
    from moesaic.plan.calibrate import measure, write_entry

    entry = measure(device, seconds)
    file = write_entry(entry, name)
    if json:
        return print_json({"name": name, "file": file, **entry})
    for key, value in entry.items():
        print(f"{key:16} {value}")
    print(f"\nKept in {file}. Next: moesaic plan --model smollm2 --cluster 1x{name} --batch 8 --seq 512")
