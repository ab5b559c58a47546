"""Students taught in stages (Mixture-of-Students, DeepSpeed-MoE): a teacher for half the steps, for all, or for none.

    python -m bench.students                     half a minute of one core

Sequences with a rule that nine tokens of ten follow; a teacher of two layers that has seen some, and a student that
has one. The loss is on sequences that no run saw. Writes bench/results/students.json.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bench.measure import machine, record
from moesaic.methods import Method
from moesaic.model import directory
from moesaic.model.transformer import Model
from moesaic.recipe_sections import SpikeSection
from tests.train.tiny_runs import CONFIG, loss_of, trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--teacher-steps", type=int, nargs="*", default=[60, 150])
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for rule in arguments.rules:
        for steps in arguments.teacher_steps:
            with tempfile.TemporaryDirectory() as made:
                out = Path(made)
                teacher = trained(Model(CONFIG).initialize(1), out / "teaching", rule, steps)
                directory.save(teacher, out / "teacher")
                small = Model(replace(CONFIG, layers=CONFIG.layers[1:])).initialize(0)
                row = {"rule": rule, "teacher steps": steps, "teacher": loss_of(teacher, rule)}
                for share in (0.0, 0.5, 1.0):
                    objective = Method("distill", {"teacher": str(out / "teacher"), "teaching": share})
                    spike = SpikeSection(sigmas=0)
                    student = trained(small, out / str(share), rule, arguments.steps, objective=objective, spike=spike)
                    row[f"student, taught {share:g}"] = loss_of(student, rule)
                rows.append(row)
                print(row, flush=True)
    record("students", rows, steps=arguments.steps)
    print(machine())


if __name__ == "__main__":
    main()
