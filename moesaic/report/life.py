"""The life of a quickstart's model as one HTML file: what each stage did, in curves, tables and answers.

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
from moesaic.sizes import readable
from moesaic.train.report.display import amount, duration
from moesaic.train.report.metrics import Line, read_metrics
from moesaic.train.report.plot import series, smooth

FILE = "report.html"


def write(out: Path, known: dict[str, Any]) -> Path:
    chapters = [top(known), machine(known)]
    if "base" in known:
        chapters += [
            pretraining(out, known),
            teaching(read_metrics(out / "aligned" / "stages" / "1-sft")),
            trying(read_metrics(out / "aligned"), known),
        ]
    else:
        chapters.append(teaching(read_metrics(out / "taught")))
    chapters += [compression(known), answers(known), life(out)]
    atomic.write_text(out / FILE, page("The life of a model", "".join(chapters)))
    return out / FILE


def top(known: dict[str, Any]) -> str:
    models = known["evaluated"]["models"]
    seconds = sum(stage.get("seconds", 0.0) for stage in known.values())
    boxes = [(f"{found['accuracy']:.1%}", f"right when {name}") for name, found in models.items()]
    boxes.append((readable(known["small"]["bytes"]), f"from {readable(known['small']['bytes_before'])}"))
    boxes.append((duration(seconds), "from nothing to this page"))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in boxes)
    return (
        "<header><h1>The life of a model</h1>"
        f'<p class="soft">A mixture of experts with {amount(known["small"]["parameters"])} parameters, made by moesaic '
        f"{escape(moesaic.__version__)} on this machine. Its task: questions it has never seen, such as "
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
    told = read_json(out / "prediction.json")
    curves.append(Curve("what the law said before it began", told["step"], told["loss"], "dashed"))
    pilots = [
        Curve(f"pilot, {name} rate", *smoothed(read_metrics(out / "pilots" / name))) for name in ("constant", "cosine")
    ]
    charts = [
        lines(curves, "Loss", "step", logarithmic=True),
        lines(pilots, "Loss of the two pilots the law was fitted to", "step", logarithmic=True),
        experts(run),
        lines([Curve("tokens a second", *smoothed(run, "tokens_per_second"))], "Speed", "step", from_zero=True),
    ]
    sources = ", ".join(f"{source['name']} ({amount(source['tokens'])} tokens)" for source in known["data"]["sources"])
    missed = known["law"]["predicted"] / known["base"]["loss"] - 1
    text = (
        f"Text from {sources} became tokens of a vocabulary of {known['data']['vocabulary']:,}. Two short pilots gave "
        f"the law of its loss, which foretold {known['law']['predicted']:.3f} for the end of the long run; it ended at "
        f"{known['base']['loss']:.3f}, so the law was {abs(missed):.1%} too {'high' if missed > 0 else 'low'}."
    )
    return section("Pretraining", text, grid(charts))


def experts(run: Sequence[Line]) -> str:
    tables = [(line["step"], line["expert_load"]["table"]) for line in run if "table" in line.get("expert_load", {})]
    if not tables:
        return ""
    return shares(
        [table[-1] for _, table in tables], [step for step, _ in tables], "Which experts work (last layer)", "step"
    )


def teaching(run: Sequence[Line]) -> str:
    charts = [
        lines([Curve("held-out questions right", *measured(run, "accuracy"), "dots")], "Accuracy", "step",
              from_zero=True, percent=True),
        lines([Curve("loss", *series(run, "loss"), "faint"), Curve("loss", *smoothed(run))], "Loss", "step",
              logarithmic=True),
    ]  # fmt: skip
    text = "Examples of questions and answers. Some answers are worked out line by line, most are bare."
    return section("Taught", text, grid(charts))


def trying(run: Sequence[Line], known: dict[str, Any]) -> str:
    mismatch = known["aligned"]["mismatch"]
    charts = [
        lines([Curve("held-out questions right", *measured(run, "accuracy"), "dots"),
               Curve("reward", *series(run, "reward"))], "Accuracy and reward", "step", from_zero=True, percent=True),
        lines([Curve("tokens", *series(run, "answer_tokens"))], "Length of an answer", "step", from_zero=True),
        lines([Curve("nats a token", *series(run, "entropy"))], "How undecided it is", "step", from_zero=True),
        lines([Curve("largest difference", *series(run, "mismatch_max"))],
              "Log-probabilities: trainer against engine", "step", from_zero=True),
    ]  # fmt: skip
    text = (
        "Now it answers questions itself, several times each, and what was right is made likelier (GRPO). Working "
        "an answer out is right more often, so they grow longer. The engine that answers and the trainer that learns "
        f"are the same model with the same kernels: their log-probabilities differ by {mismatch:g} at most."
    )
    return section("Aligned by trying", text, grid(charts))


def compression(known: dict[str, Any]) -> str:
    small, models = known["small"], known["evaluated"]["models"]
    before = 8 * small["bytes_before"] / small["parameters"]
    rows = [
        ("size", readable(small["bytes_before"]), readable(small["bytes"])),
        ("bits a weight", f"{before:.0f}", f"{small['bits_per_weight']:.2f}"),
        ("held-out questions right", *(f"{found['accuracy']:.1%}" for found in list(models.values())[-2:])),
    ]
    method = small["method"]
    text = f"{method['name'].upper()}, in groups of {method['group']} weights."
    return section("In 4 bits", text, table(("", "aligned", "4 bits"), rows))


def answers(known: dict[str, Any]) -> str:
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
    plural = next(iter(models.values()))["examples"]
    body = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return section("What it says", f"The first of {plural} questions that no stage saw, after each stage.", body)


def life(out: Path) -> str:
    rows = [(stage.get("when", ""), stage.get("stage", "")) for stage in lineage.read(out / "small")]
    text = f"As <code>moesaic show {escape(shlex.quote(str(out / 'small')))}</code> tells it."
    return section("On record", text, table(("when", "stage"), rows))


def measured(run: Sequence[Line], key: str) -> tuple[Any, Any]:
    """Only the steps at which something was measured."""
    steps, values = series(run, key)
    there = np.isfinite(values)
    return steps[there], values[there]


def smoothed(run: Sequence[Line], key: str = "loss") -> tuple[Any, Any]:
    steps, values = series(run, key)
    return steps, smooth(values)
