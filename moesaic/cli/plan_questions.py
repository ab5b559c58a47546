"""The further questions of `moesaic plan`: what made a run slow, what failures cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="A Chrome trace (.json, .json.gz) or a CSV of a run.")]


def whatif(
    trace: Trace,
    ideal: Annotated[
        str, typer.Option(help="What computations are idealised by: mean or median of their kind.")
    ] = "mean",
    json: JsonFlag = False,
) -> None:
    """Replay a recorded run with stragglers healed: slow-down, wasted GPU hours, ranked causes."""
    from moesaic.plan.summary import table
    from moesaic.plan.trace import read_trace
    from moesaic.plan.whatif import analyse

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
    from moesaic.plan.failures import FailureModel, Redundancy, best_interval, goodput, node_mtbf_seconds
    from moesaic.plan.hardware import load_cluster
    from moesaic.plan.summary import table

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
