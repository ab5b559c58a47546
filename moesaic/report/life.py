"""The life of a quickstart's model as one HTML file: what each stage did, in plots, tables and samples.

    write(Path("out/quickstart"), known)         # out/quickstart/report.html; needs nothing but a browser

`known` is what quickstart.json holds; the curves come from the runs' own metrics.jsonl.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import moesaic
from moesaic import atomic
from moesaic.json_files import read_json
from moesaic.model import lineage
from moesaic.report.charts import Curve, lines, shares
from moesaic.report.page import grid, page, section, table
from moesaic.train.report.metrics import Line, read_metrics
from moesaic.train.report.plot import series, smooth
from moesaic.units import readable_bytes, readable_count, readable_duration

FILE = "report.html"


def write(out: Path, known: dict[str, Any]) -> Path:
    chapters = [top(known), machine(known)]
    if "base" in known:
        chapters += [
            pretraining(out, known),
            sft(read_metrics(out / "aligned" / "stages" / "1-sft")),
            grpo(read_metrics(out / "aligned"), known),
        ]
    else:
        chapters.append(sft(read_metrics(out / "sft")))
    chapters += [compression(known), samples(known), life(out)]
    atomic.write_text(out / FILE, page("The life of a model", "".join(chapters)))
    return out / FILE


def top(known: dict[str, Any]) -> str:
    models = known["evaluated"]["models"]
    seconds = sum(stage.get("seconds", 0.0) for stage in known.values())
    boxes = [(f"{found['accuracy']:.1%}", f"accuracy, {name}") for name, found in models.items()]
    boxes.append(
        (readable_bytes(known["small"]["bytes"]), f"quantized, from {readable_bytes(known['small']['bytes_before'])}")
    )
    boxes.append((readable_duration(seconds), "from scratch to this page"))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in boxes)
    return (
        "<header><h1>The life of a model</h1>"
        f'<p class="soft">A mixture of experts with {readable_count(known["small"]["parameters"])} parameters, '
        f"trained by moesaic {escape(moesaic.__version__)} on this machine. Its task: held-out questions, such as "
        f"“{escape(next(iter(models.values()))['samples'][0]['question'])}”.</p></header>"
        f'<ul class="life">{items}</ul>'
    )


def machine(known: dict[str, Any]) -> str:
    rows = [(name, value) for name, value in known["machine"].items() if name != "seconds"]
    return section("The machine", "", table((), rows))


def pretraining(out: Path, known: dict[str, Any]) -> str:
    run = read_metrics(out / "base")
    steps, losses = series(run, "loss")
    curves = [Curve("loss", steps, losses, "faint"), Curve("loss", steps, smooth(losses))]
    prediction = read_json(out / "prediction.json")
    curves.append(Curve("predicted by the loss law", prediction["step"], prediction["loss"], "dashed"))
    pilots = [
        Curve(f"pilot, {name} learning rate", *smoothed(read_metrics(out / "pilots" / name)))
        for name in ("constant", "cosine")
    ]
    charts = [
        lines(curves, "Loss", "step", logarithmic=True),
        lines(pilots, "Loss of the two pilot runs the law was fitted to", "step", logarithmic=True),
        experts(run),
        lines([Curve("tokens/s", *smoothed(run, "tokens_per_second"))], "Throughput", "step", from_zero=True),
    ]
    sizes = {source["name"]: readable_count(source["tokens"]) for source in known["data"]["sources"]}
    sources = ", ".join(f"{name} ({tokens} tokens)" for name, tokens in sizes.items())
    missed = known["law"]["predicted"] / known["base"]["loss"] - 1
    text = (
        f"Data: {sources}; vocabulary {known['data']['vocabulary']:,}. The loss law, fitted to two short pilot runs, "
        f"predicted a final loss of {known['law']['predicted']:.3f}; the run ended at {known['base']['loss']:.3f}, so "
        f"the prediction was {abs(missed):.1%} too {'high' if missed > 0 else 'low'}."
    )
    return section("Pretraining", text, grid(charts))


def experts(run: Sequence[Line]) -> str:
    tables = [(line["step"], line["expert_load"]["table"]) for line in run if "table" in line.get("expert_load", {})]
    if not tables:
        return ""
    return shares([table[-1] for _, table in tables], [step for step, _ in tables], "Expert load (last layer)", "step")


def sft(run: Sequence[Line]) -> str:
    charts = [
        lines([Curve("held-out accuracy", *measured(run, "accuracy"), "dots")], "Accuracy", "step",
              from_zero=True, percent=True),
        lines([Curve("loss", *series(run, "loss"), "faint"), Curve("loss", *smoothed(run))], "Loss", "step",
              logarithmic=True),
    ]  # fmt: skip
    text = "Questions with answers; some answers are worked out step by step (chain of thought), most are bare."
    return section("Supervised fine-tuning (SFT)", text, grid(charts))


def grpo(run: Sequence[Line], known: dict[str, Any]) -> str:
    mismatch = known["aligned"]["mismatch"]
    charts = [
        lines([Curve("held-out accuracy", *measured(run, "accuracy"), "dots"),
               Curve("reward", *series(run, "reward"))], "Accuracy and reward", "step", from_zero=True, percent=True),
        lines([Curve("tokens", *series(run, "answer_tokens"))], "Response length", "step", from_zero=True),
        lines([Curve("nats per token", *series(run, "entropy"))], "Entropy", "step", from_zero=True),
        lines([Curve("maximum difference", *series(run, "mismatch_max"))],
              "Log-probabilities, trainer vs. engine", "step", from_zero=True),
    ]  # fmt: skip
    text = (
        "The model samples a group of responses to each prompt, and the policy gradient makes the correct ones more "
        "likely (GRPO). Step-by-step responses are correct more often, so responses grow longer. Engine and trainer "
        f"run the same model with the same kernels: their log-probabilities differ by {mismatch:g} at most."
    )
    return section("Reinforcement learning (GRPO)", text, grid(charts))


def compression(known: dict[str, Any]) -> str:
    small, models = known["small"], known["evaluated"]["models"]
    before = 8 * small["bytes_before"] / small["parameters"]
    rows = [
        ("size", readable_bytes(small["bytes_before"]), readable_bytes(small["bytes"])),
        ("bits per weight", f"{before:.0f}", f"{small['bits_per_weight']:.2f}"),
        ("held-out accuracy", *(f"{found['accuracy']:.1%}" for found in list(models.values())[-2:])),
    ]
    method = small["method"]
    text = f"{method['name'].upper()}, in groups of {method['group']} weights."
    return section("Quantized to 4 bits", text, table(("", *list(models)[-2:]), rows))


def samples(known: dict[str, Any]) -> str:
    models = known["evaluated"]["models"]
    rows = []
    for number, first in enumerate(next(iter(models.values()))["samples"]):
        cells = [f"<td>{escape(first['question'])}</td>"]
        for found in models.values():
            sample = found["samples"][number]
            kind = "right" if sample["right"] else "wrong"
            cells.append(f'<td class="said {kind}">{escape(sample["answer"] or "(nothing)")}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in ("question", *models))
    count = next(iter(models.values()))["examples"]
    body = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return section("Samples", f"The first of {count} held-out questions, and the responses after each stage.", body)


def life(out: Path) -> str:
    rows = [(stage.get("when", ""), stage.get("stage", "")) for stage in lineage.read(out / "small")]
    text = f"As <code>moesaic show {escape(shlex.quote(str(out / 'small')))}</code> prints it."
    return section("Lineage", text, table(("when", "stage"), rows))


def measured(run: Sequence[Line], key: str) -> tuple[Any, Any]:
    """Only the steps that have a value."""
    steps, values = series(run, key)
    there = np.isfinite(values)
    return steps[there], values[there]


def smoothed(run: Sequence[Line], key: str = "loss") -> tuple[Any, Any]:
    steps, values = series(run, key)
    return steps, smooth(values)
