"""An evaluation as one HTML file: the numbers side by side, and the first questions with every model's answer."""

from __future__ import annotations

from pathlib import Path

from moesaic import atomic
from moesaic.evaluate.comparison import Results, rows
from moesaic.report.page import page, section, table


def write_page(file: Path, found: Results) -> None:
    chapters = [section("Numbers", "Intervals are Wilson's, at 95 %.", table(("", *found), rows(found)))]
    for suite in next(iter(found.values())):
        samples_of = {place: own.get(suite, {}).get("samples") or [] for place, own in found.items()}
        count = min((len(samples) for samples in samples_of.values()), default=0)
        shown = [samples[:count] for samples in samples_of.values()]
        if count and all("question" in sample for samples in shown for sample in samples):
            lines = [
                (samples[0]["question"], *(f"{'✓' if s['right'] else '✗'} {s['answer']}" for s in samples))
                for samples in zip(*shown, strict=True)
            ]
            answers_table = table(("question", *found), lines).replace("<td>", '<td class="said">')
            chapters.append(section(f"Answers: {suite}", "", answers_table))
    atomic.write_text(file, page("Evaluation", f"<h1>Evaluation</h1>{''.join(chapters)}"))
