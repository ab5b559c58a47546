"""A timeline as a PNG: ranks as rows, a bar per operation coloured by what it is, idle time left white."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moesaic.plan.timeline.events import Timeline
from moesaic.plan.timeline.trace import COMPUTE_KINDS, Record, Trace

# Wong's palette: told apart also by those who do not see red and green as different.
COLOURS = {
    "forward": "#0072b2",
    "backward": "#009e73",
    "weight gradient": "#56b4e9",
    "communication": "#e69f00",
    "optimizer": "#cc79a7",
    "data": "#f0e442",
}
MAX_ROWS = 64
LABELLED = 600  # bars that can still hold a number
PARTED = 4000  # bars that a white line can still part


def write_gantt(what: Timeline | Trace, file: str | Path, title: str = "", ranks: Sequence[int] | None = None) -> None:
    """Draws a timeline or a trace. Of many ranks, `ranks` or an even choice of them is shown, and the title says so."""
    trace = what if isinstance(what, Trace) else Trace.of_timeline(what)
    everyone = trace.ranks
    shown = list(ranks) if ranks is not None else everyone
    if len(shown) > MAX_ROWS:
        shown = [shown[int(place)] for place in np.linspace(0, len(shown) - 1, MAX_ROWS)]
    rows = {rank: row for row, rank in enumerate(shown)}
    records = [record for record in trace.records if record.rank in rows]
    begin = min((record.start for record in trace.records), default=0.0)
    end = max((record.end for record in trace.records), default=0.0)
    with matplotlib.rc_context({"font.size": 9, "font.family": "DejaVu Sans"}):
        height = 1.6 + 0.32 * max(2, len(shown))
        figure = Figure(figsize=(12, height), layout="constrained", dpi=150)
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        # Communication that overlaps is a narrow bar below the computation it runs beside.
        bars: dict[str, list[list[tuple[float, float]]]] = {}
        for record in records:
            low, high = _extent(record)
            row = rows[record.rank]
            left, right = record.start - begin, record.end - begin
            corners = [(left, row + low), (left, row + high), (right, row + high), (right, row + low)]
            bars.setdefault(_class(record.kind), []).append(corners)
        for name, corners_of in bars.items():
            parted = name != "communication" and len(records) < PARTED
            edges = {"edgecolors": "white", "linewidths": 0.3} if parted else {"edgecolors": "none"}
            axes.add_collection(PolyCollection(corners_of, facecolors=COLOURS[name], **edges))
        labelled = [
            record for record in records if record.kind in ("forward", "backward") and record.micro_batch is not None
        ]
        if len(labelled) <= LABELLED:
            for record in labelled:
                if record.end - record.start > (end - begin) / 150:
                    middle = (record.start + record.end) / 2 - begin
                    place = (middle, rows[record.rank] - 0.1)
                    axes.text(*place, str(record.micro_batch), ha="center", va="center", color="white", fontsize=6)
        axes.set_xlim(0, (end - begin) or 1)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown])
        axes.set_xlabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(_title(trace, title, begin, end, len(shown), len(everyone)), loc="left")
        handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in bars]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        figure.savefig(str(file), format="png")


def _class(kind: str) -> str:
    name = kind.replace("_", " ")
    return name if name in COLOURS else "communication"


def _extent(record: Record) -> tuple[float, float]:
    """From where to where in its row a bar reaches."""
    return (-0.4, 0.2) if record.kind in COMPUTE_KINDS else (0.22, 0.4)


def _title(trace: Trace, title: str, begin: float, end: float, shown: int, ranks: int) -> str:
    steps = max(1, len(trace.steps))
    whole = (end - begin) * max(1, ranks)
    main = {(record.rank, record.stream) for record in trace.records if record.kind == "forward" and record.stream}
    busy = sum(
        record.end - record.start
        for record in trace.records
        if record.kind in COMPUTE_KINDS or (record.rank, record.stream) in main
    )
    parts = [title, f"{(end - begin) / steps:.4g} s a step", f"bubble {1 - busy / whole:.1%}" if whole else ""]
    if shown < ranks:
        parts.append(f"{shown} of {ranks} ranks")
    return ", ".join(part for part in parts if part)
